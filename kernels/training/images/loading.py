"""Sources of images: arrays in memory, an .npy on disk, or image files that worker processes decode.

A plan tells a source which views to make: it is an iterable of batches (rows, boxes), where rows are n row
numbers and boxes (views, n, 4) are one box (left, top, width, height) for each view of each image. The views
depend on the plan only, not on the number of workers.
"""
import contextlib
import hashlib
import importlib.util
import itertools
import os
import zlib
from collections import deque

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..cli import UserError, fail, log
from ..files import open_regular_file
from ..progress import progress
from .augmentation import crop_and_resize, to_float
from .workers import parallel_map

# Pillow's formats that are opened; for some others Pillow would start external programs
FORMATS = "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"
MODES = "1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"      # at most 8 bits per channel
MAX_PIXELS = 2**26                                             # of an image; Pillow warns above 89 million
MAX_NAMED = 1000                                               # damaged files that one message names


class ImageSource:
    """Base class of images that are read by row number when they are needed.

    kept      (N,) the original row number of each image; keep_only makes it shorter
    labels    (N,) int64, or None
    names     {label: class name}; a label that is missing here is named by its number
    digest    checksum of all files, if they were read completely; None: computed later, from the path
    """
    digest = None

    def __init__(self, length, labels, names=None):
        self.kept, self.labels, self.names = np.arange(length), labels, names or {}

    def __len__(self):
        return len(self.kept)

    def keep_only(self, rows):
        """Remove all images except those with these row numbers."""
        self.kept = self.kept[rows]
        self.labels = None if self.labels is None else self.labels[torch.as_tensor(rows)]


class ImageArrays(ImageSource):
    """Images of one size, in memory or in an .npy on disk.

    images    (N, H, W, 3) uint8: a tensor, or NpyRows
    """

    def __init__(self, images, labels):
        super().__init__(len(images), labels)
        self.images = images

    def sizes(self, rows):
        """Return (n, 2): width and height of the images."""
        return np.tile(self.images.shape[2:0:-1], (len(rows), 1))

    def default_view_size(self, model_size):
        """Return the side of views in pixels if --image-size is not given: the shorter side of the images."""
        return min(self.images.shape[1:3])

    def to_device(self, device):
        """Move images from memory to a GPU if they take less than a quarter of its free memory."""
        if device.type == "cuda" and torch.is_tensor(self.images):
            if self.images.nbytes < torch.cuda.mem_get_info()[0] / 4:
                self.images = self.images.to(device)

    def load_views(self, plan, size, bicubic, device):
        """Yield the views (views · n, 3, size, size) float32 in [0, 1] of each batch of a plan."""
        for rows, boxes in plan:
            rows = torch.from_numpy(self.kept[rows]).to(getattr(self.images, "device", "cpu"))
            x = to_float(self.images[rows].to(device))
            yield torch.cat([crop_and_resize(x, part, size, bicubic) for part in boxes])


class NpyRows:
    """The rows of an .npy of images, read from disk when they are indexed. This is not a memmap, because
    reading a memmap of a file that was truncated kills the process (SIGBUS)."""

    def __init__(self, path, shape, start):
        self.path, self.shape, self.start = path, shape, start
        self.file = open_regular_file(path)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        found = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for image, row in zip(found, rows.tolist()):
            self.file.seek(self.start + row * image.nbytes)
            if self.file.readinto(image) != image.nbytes:
                fail(f"{self.path}: was truncated while it was read", every_rank=True)
        return torch.from_numpy(found)


class ImageFiles(ImageSource):
    """Image files of any size and format; worker processes decode them every time they are used.

    path      the data set, for messages
    folder    the folder that `paths` are relative to
    labels    a label for each file, or None
    workers   number of worker processes; 0: decode in this process
    skip      skip damaged files; False: raise UserError
    """

    def __init__(self, path, folder, paths, labels, workers, skip):
        numbers = {name: number for number, name in enumerate(sorted({*(labels or ())}))}
        labels = torch.tensor([numbers[name] for name in labels]) if labels else None
        super().__init__(len(paths), labels, {number: name for name, number in numbers.items()})
        paths = [os.fsencode(path) for path in paths]
        self.ends = np.cumsum([0, *map(len, paths)])           # offsets of the paths in self.paths
        self.paths = b"".join(paths)                           # one object instead of millions saves memory
        self.folder, self.workers = folder, workers
        self.all_sizes = np.zeros((len(paths), 2), np.int32)
        self.check(path, skip)

    def path(self, row):
        """Return the path of an image file."""
        first, end = self.ends[self.kept[row]:][:2]
        return os.path.join(self.folder, os.fsdecode(self.paths[first:end]))

    def sizes(self, rows):
        """Return (n, 2): width and height of the images."""
        return self.all_sizes[self.kept[rows]]

    def default_view_size(self, model_size):
        """Return the side of views in pixels if --image-size is not given: that of the model's input images,
        or less if the shorter side of every image is smaller."""
        return min(model_size, int(self.sizes(slice(None)).min(1).max()))

    def to_device(self, device):
        """Do nothing: files are decoded on the CPU."""

    def check(self, path, skip):
        """Decode all files once, to find damaged ones, image sizes and the digest. Damaged files are skipped
        or raise a UserError; either way one message lists them."""
        if importlib.util.find_spec("PIL") is None:
            fail(f"{path}: reading image files needs the package Pillow; run pip install Pillow")
        checksums = np.zeros(len(self), np.uint32)
        tasks, damaged = np.array_split(np.arange(len(self)), -(-len(self) // 32)), {}
        paths = ((list(map(self.path, rows)),) for rows in tasks)
        with progress(None, "checking images", total=len(self)) as bar:
            for rows, results in zip(tasks, parallel_map(inspect_images, paths, self.workers)):
                for row, result in zip(rows, results):
                    if isinstance(result, str):
                        damaged[int(row)] = result
                    else:
                        *self.all_sizes[row], checksums[row] = result
                bar.update(len(rows))
        known = [self.paths, self.ends, checksums, *([] if self.labels is None else [self.labels.numpy()])]
        self.digest = hashlib.sha1(b"".join(map(bytes, known))).hexdigest()
        if damaged:
            text = self.describe_damaged(path, damaged)
            if not skip or len(damaged) == len(self):
                fail(f"{text}; repair or delete them, or skip them with --skip-damaged")
            log("skipped", text)
            self.keep_only(np.setdiff1d(self.kept, [*damaged]))

    def describe_damaged(self, path, damaged):
        """Return a message about damaged files, {row: what is wrong}, which names the first MAX_NAMED."""
        named = []
        for row, what in itertools.islice(damaged.items(), MAX_NAMED):
            named.append(f"{os.path.relpath(self.path(row), self.folder)}: {what}")
        if len(damaged) > len(named):
            named.append(f"{len(damaged) - len(named):,} more")
        return f"{path}: {len(damaged):,} of {len(self):,} images cannot be read: {'; '.join(named)}"

    def load_views(self, plan, size, bicubic, device):
        """Yield the views of each batch of a plan, as ImageArrays.load_views does."""
        for parts in self.decode(plan, size, bicubic):
            yield to_float(torch.cat([part.to(device) for part in parts], 1).flatten(0, 1))

    def decode(self, plan, size, bicubic):
        """Yield each batch of a plan as a list of parts (views, n_part, size, size, 3) uint8. Each worker
        decodes one part of a batch. While a batch is in use, workers decode the next two."""
        counts = deque()                                       # number of parts of each started batch

        def tasks():
            for rows, boxes in plan:
                parts = np.array_split(np.arange(len(rows)), min(len(rows), max(1, self.workers)))
                counts.append(len(parts))
                for part in parts:
                    paths = [self.path(row) for row in rows[part]]
                    yield paths, self.sizes(rows[part]), boxes[:, part], size, bicubic

        results = parallel_map(crop_files, tasks(), self.workers)
        for first in results:
            parts = [first, *itertools.islice(results, counts.popleft() - 1)]
            for error in (part for part in parts if isinstance(part, str)):
                fail(f"{error}; the file was readable when the run began", every_rank=True)
            yield parts


# ── decoding, in workers ──


@contextlib.contextmanager
def open_image(path):
    """Open an image file with Pillow and check its size and mode; no pixel is decoded yet."""
    from PIL import Image
    Image.MAX_IMAGE_PIXELS = None                              # MAX_PIXELS replaces Pillow's own limit
    with open_regular_file(path) as file, Image.open(file, formats=FORMATS) as image:
        width, height = image.size
        if not 0 < width * height <= MAX_PIXELS:
            raise BadImage(f"{width} x {height} pixels, expected 1 to {MAX_PIXELS:,}")
        if image.mode not in MODES:
            raise BadImage(f"its Pillow mode is {image.mode}, expected at most 8 bits per channel")
        yield image


class BadImage(Exception):
    """An image that can be opened but is not accepted; the text says why."""


def describe_error(error):
    """Return what is wrong with an image file, in words."""
    if isinstance(error, BadImage):
        return str(error)
    if isinstance(error, UserError):
        return "a pipe, a socket or a device"
    return getattr(error, "strerror", None) or f"not readable ({type(error).__name__})"


def inspect_images(paths):
    """Return inspect_image of each path."""
    return [*map(inspect_image, paths)]


def inspect_image(path):
    """Return (width, height, checksum) of an image file, or a text that says what is wrong with it. To find
    damage, the image is decoded; a JPEG at 1/8 of its size, which is faster and also reads the whole file."""
    try:
        with open_image(path) as image:
            size = image.size
            image.draft(None, (1, 1))
            image.load()
        with open_regular_file(path) as file:
            return *size, zlib.crc32(file.read())
    except Exception as error:                                 # Pillow raises many types for damaged images
        return describe_error(error)


def crop_files(paths, sizes, boxes, size, bicubic):
    """Return views (views, n, size, size, 3) uint8 of n image files, cropped and resized by Pillow; or a text
    that says what is wrong with a file. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that is enough.

    sizes    (n, 2) width and height of the images when they were checked
    boxes    (views, n, 4) left, top, width and height, in pixels of the full image
    """
    from PIL import Image
    shared = torch.empty(*boxes.shape[:2], size, size, 3, dtype=torch.uint8)
    if get_worker_info():                      # here a failure is reported; later it would hang the run
        shared.share_memory_()
    views = shared.numpy()
    method = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    shrinks = (boxes[:, :, 2:].min((0, 2)) // size).clip(1).tolist()
    for i, (path, (width, height), shrink) in enumerate(zip(paths, sizes.tolist(), shrinks)):
        try:
            with open_image(path) as image:
                if image.size != (width, height):
                    raise BadImage(f"is {image.size[0]} x {image.size[1]} now, was {width} x {height}")
                image.draft(None, (max(1, width // shrink), max(1, height // shrink)))
                x_scale, y_scale = image.size[0] / width, image.size[1] / height
                rgb = image if image.mode == "RGB" else image.convert("RGB")
                for view, (left, top, w, h) in zip(views[:, i], boxes[:, i].tolist()):
                    corners = left * x_scale, top * y_scale, (left + w) * x_scale, (top + h) * y_scale
                    view[:] = rgb.crop([*map(round, corners)]).resize((size, size), method)
        except Exception as error:
            return f"{path}: {describe_error(error)}"
    return shared
