"""Pictures as they are read: from memory, from an .npy row by row, or from files that processes of their own
decode anew each time. What they give depends on nothing but the plan that they are given."""
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

from ..cli import Fault, fail, say
from ..files import open_plain
from ..progress import progress
from .augmentation import resized, scaled
from .workers import in_workers

FORMATS = "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"   # of Pillow's; for others it starts programs
MODES = "1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"      # 8 bits a channel
MOST_PIXELS = 2**26                                            # of one; Pillow warns from 89 million on
MOST_NAMED = 1000                                              # damaged files in one line


class Source:
    """Pictures that are read where they are asked for, by row number.

    labels    (N,) int64, or None
    names     {label: name} of those that are called otherwise
    digest    a checksum of all files, where they were read whole; None: what is behind a path has its own
    """
    digest = None

    def __init__(self, length, labels, names=None):
        self.places, self.labels, self.names = np.arange(length), labels, names or {}

    def __len__(self):
        return len(self.places)

    def keep(self, rows):
        """Leaves all others out."""
        self.places = self.places[rows]
        self.labels = None if self.labels is None else self.labels[torch.as_tensor(rows)]


class Arrays(Source):
    """Pictures of one size: in memory, or on the disk.

    images    (N, H, W, 3) uint8: a tensor, or NpyRows
    """

    def __init__(self, images, labels):
        super().__init__(len(images), labels)
        self.images = images

    def sizes(self, rows):
        """(n, 2): width and height."""
        return np.tile(self.images.shape[2:0:-1], (len(rows), 1))

    def usual_size(self, most):
        """Of views: the pictures' own."""
        return min(self.images.shape[1:3])

    def place(self, device):
        """Pictures in memory that take less than a quarter of the device's move there."""
        if device.type == "cuda" and torch.is_tensor(self.images):
            if self.images.nbytes < torch.cuda.mem_get_info()[0] / 4:
                self.images = self.images.to(device)

    def load_views(self, plan, size, cubic, device):
        """Yields the views of each (row numbers (n,), boxes (views, n, 4)) of a plan: (views · n, 3, size,
        size) float32 from 0 to 1, on the device."""
        for rows, boxes in plan:
            rows = torch.from_numpy(self.places[rows]).to(getattr(self.images, "device", "cpu"))
            x = scaled(self.images[rows].to(device))
            yield torch.cat([resized(x, part, size, cubic) for part in boxes])


class NpyRows:
    """The pictures of an .npy file. It is no memmap: where a file is cut meanwhile that kills the process."""

    def __init__(self, path, shape, start):
        self.path, self.shape, self.start = path, shape, start
        self.file = open_plain(path)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        found = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for picture, row in zip(found, rows.tolist()):
            self.file.seek(self.start + row * picture.nbytes)
            if self.file.readinto(picture) != picture.nbytes:
                fail(f"{self.path}: was cut while it was read", every_rank=True)
        return torch.from_numpy(found)


class Files(Source):
    """Pictures in files of any size and format, decoded anew each time by processes of their own.

    folder    that their paths start from
    """

    def __init__(self, path, folder, paths, labels, workers, skip):
        numbers = {name: number for number, name in enumerate(sorted({*(labels or ())}))}
        labels = torch.tensor([numbers[name] for name in labels]) if labels else None
        super().__init__(len(paths), labels, {number: name for name, number in numbers.items()})
        paths = [os.fsencode(path) for path in paths]
        self.ends = np.cumsum([0, *map(len, paths)])
        self.paths = b"".join(paths)                           # no million objects, which take memory
        self.folder, self.workers, self.all_sizes = folder, workers, np.zeros((len(paths), 2), np.int32)
        self.check(path, skip)

    def path(self, row):
        first, end = self.ends[self.places[row]:][:2]
        return os.path.join(self.folder, os.fsdecode(self.paths[first:end]))

    def sizes(self, rows):
        """(n, 2): width and height."""
        return self.all_sizes[self.places[rows]]

    def usual_size(self, most):
        """Of views: that of the model, where pictures are that large."""
        return min(most, int(self.sizes(slice(None)).min(1).max()))

    def place(self, device):
        pass

    def check(self, path, skip):
        """Decodes all, and learns their sizes. What is damaged is left out, or refused, all in one line."""
        if importlib.util.find_spec("PIL") is None:
            fail(f"{path}: reading it wants the package Pillow: pip install Pillow")
        checksums = np.zeros(len(self), np.uint32)
        rows, damaged = np.array_split(np.arange(len(self)), -(-len(self) // 32)), {}
        parts = ((list(map(self.path, part)),) for part in rows)
        with progress(None, "checking pictures", total=len(self)) as bar:
            for part, found in zip(rows, in_workers(measure, parts, self.workers)):
                for row, size in zip(part, found):
                    if isinstance(size, str):
                        damaged[int(row)] = size
                    else:
                        *self.all_sizes[row], checksums[row] = size
                bar.update(len(part))
        known = [self.paths, self.ends, checksums, *([] if self.labels is None else [self.labels.numpy()])]
        self.digest = hashlib.sha1(b"".join(map(bytes, known))).hexdigest()
        if damaged:
            text = self.describe_damaged(path, damaged)
            if not skip or len(damaged) == len(self):
                fail(f"{text}; repair or delete them, or leave them out by --skip-damaged")
            say("skipped", text)
            self.keep(np.setdiff1d(self.places, [*damaged]))

    def describe_damaged(self, path, damaged):
        """A text of {row: what is wrong with it}, which names the first of them."""
        named = []
        for row, what in itertools.islice(damaged.items(), MOST_NAMED):
            named.append(f"{os.path.relpath(self.path(row), self.folder)}: {what}")
        if len(damaged) > len(named):
            named.append(f"{len(damaged) - len(named):,} more")
        return f"{path}: {len(damaged):,} of {len(self):,} pictures cannot be read: {'; '.join(named)}"

    def load_views(self, plan, size, cubic, device):
        """What Arrays.load_views yields."""
        for parts in self.decode(plan, size, cubic):
            yield scaled(torch.cat([part.to(device) for part in parts], 1).flatten(0, 1))

    def decode(self, plan, size, cubic):
        """Yields the parts (views, n, size, size, 3) uint8 of each batch. A batch is a task for each worker;
        while one is in use the workers are at the next two."""
        counts = deque()                                       # tasks of each batch

        def tasks():
            for rows, boxes in plan:
                parts = np.array_split(np.arange(len(rows)), min(len(rows), max(1, self.workers)))
                counts.append(len(parts))
                for part in parts:
                    paths = [self.path(row) for row in rows[part]]
                    yield paths, self.sizes(rows[part]), boxes[:, part], size, cubic

        done = in_workers(cut, tasks(), self.workers)
        for first in done:
            parts = [first, *itertools.islice(done, counts.popleft() - 1)]
            for fault in (part for part in parts if isinstance(part, str)):
                fail(f"{fault}; it was whole when training began", every_rank=True)
            yield parts


# ── decoding, in workers ──


@contextlib.contextmanager
def picture_of(path):
    """A file as Pillow opens it: no pixel is decoded yet."""
    from PIL import Image
    Image.MAX_IMAGE_PIXELS = None                              # there is a limit of our own
    with open_plain(path) as file, Image.open(file, formats=FORMATS) as picture:
        width, height = picture.size
        if not 0 < width * height <= MOST_PIXELS:
            raise Odd(f"{width} x {height} pixels, wanted 1 to {MOST_PIXELS:,}")
        if picture.mode not in MODES:
            raise Odd(f"its mode is {picture.mode}, wanted 8 bits a channel")
        yield picture


class Odd(Exception):
    """What is wrong with a picture."""


def wrong(error):
    """What is wrong with a file, in words."""
    if isinstance(error, Odd):
        return str(error)
    if isinstance(error, Fault):
        return "a pipe, a socket or a device"
    return getattr(error, "strerror", None) or f"not readable ({type(error).__name__})"


def measure(paths):
    return [*map(measured, paths)]


def measured(path):
    """(width, height, checksum) of a file, or, a str, what is wrong with it. All of it is decoded, of a JPEG
    an eighth of its pixels."""
    try:
        with picture_of(path) as picture:
            size = picture.size
            picture.draft(None, (1, 1))
            picture.load()
        with open_plain(path) as file:
            return *size, zlib.crc32(file.read())
    except Exception as error:                                 # a damaged picture has many ways to fail
        return wrong(error)


def cut(paths, sizes, boxes, size, cubic):
    """Boxes (views, n, 4) of n files, of which pictures had these sizes, each resized as Pillow does: (views,
    n, size, size, 3) uint8; or, a str, what is wrong with a file. A JPEG is decoded at a half, a quarter or
    an eighth if boxes have pixels enough."""
    from PIL import Image
    shared = torch.empty(*boxes.shape[:2], size, size, 3, dtype=torch.uint8)
    if get_worker_info():                                      # here, so that an error of it is the task's
        shared.share_memory_()
    views = shared.numpy()
    method = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    shrinks = (boxes[:, :, 2:].min((0, 2)) // size).clip(1).tolist()
    for i, (path, (width, height), shrink) in enumerate(zip(paths, sizes.tolist(), shrinks)):
        try:
            with picture_of(path) as picture:
                if picture.size != (width, height):
                    raise Odd(f"is {picture.size[0]} x {picture.size[1]} now, was {width} x {height}")
                picture.draft(None, (max(1, width // shrink), max(1, height // shrink)))
                across, down = picture.size[0] / width, picture.size[1] / height
                whole = picture if picture.mode == "RGB" else picture.convert("RGB")
                for view, (left, top, w, h) in zip(views[:, i], boxes[:, i].tolist()):
                    corners = left * across, top * down, (left + w) * across, (top + h) * down
                    view[:] = whole.crop([*map(round, corners)]).resize((size, size), method)
        except Exception as error:
            return f"{path}: {wrong(error)}"
    return shared
