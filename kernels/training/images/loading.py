"""Sources of images: arrays in memory or on disk, and image files that worker processes decode.

A batch is (epoch, row numbers of images). A Cutter chooses boxes in these images; a resized box is a view.
The views depend only on the batch and the Cutter, not on the number of workers.
"""
import functools
import itertools
import multiprocessing
import os
import signal
from multiprocessing.util import Finalize
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import SIGNALS, fail, log
from ..progress import progress
from .augmentation import Crops, centre_crop_boxes, crop_and_resize, to_float

# The formats that Pillow may open. For some other formats, Pillow would start external programs.
FORMATS = "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"
MODES = "1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"      # 8 bits or fewer per channel
ORIENTATION = 0x0112           # EXIF tag for the image's rotation; values above 4 swap width and height
REPAIR = "repair or delete it, or start again with --skip-damaged"


class Cutter(NamedTuple):
    """Settings that say which parts of images become views.

    crops      Crops: `count` random crops. None: a centre crop, whose side is `share` of the shorter side
    size       side of a view in pixels
    bicubic    True: resize with bicubic interpolation; False: bilinear
    """
    crops: Crops | None
    seed: int
    count: int
    share: float
    size: int
    bicubic: bool

    def boxes(self, epoch, rows, sizes):
        """Return boxes (views, n, 4) for n images. sizes: (n, 2) width and height of the images."""
        if self.crops is None:
            return centre_crop_boxes(sizes, self.share)
        return self.crops.sample_boxes(self.seed, epoch, rows, sizes, self.count)


class ImageSource:
    """Base class of data sets whose images are read by row number when they are needed.

    kept      (N,) original row numbers of the N images that keep_only has not removed
    labels    (N,) int64, or None
    names     {label: class name}. A label without an entry is named by its number
    """

    def __init__(self, length, labels, names=None):
        self.kept, self.labels, self.names = np.arange(length), labels, names or {}

    def __len__(self):
        return len(self.kept)

    def keep_only(self, rows):
        """Remove all images except those with these row numbers."""
        self.kept = self.kept[rows]
        self.labels = None if self.labels is None else self.labels[torch.as_tensor(rows)]


class ImageArrays(ImageSource):
    """Images of one size: a tensor (N, H, W, 3) uint8 in memory."""

    def __init__(self, images, labels):
        super().__init__(len(images), labels)
        self.images = images

    def default_view_size(self, model_size):
        """Return the side of views in pixels if --image-size is not given: the shorter side of the images."""
        return min(self.images.shape[1:3])

    def to_device(self, device):
        """Move images from memory to a GPU if they take less than a quarter of its free memory."""
        if device.type == "cuda" and self.images.nbytes < torch.cuda.mem_get_info()[0] / 4:
            self.images = self.images.to(device)

    def load_views(self, batches, cutter, device):
        """Yield the views of each batch of n images: (views · n, 3, size, size) float32 in [0, 1]."""
        for epoch, rows in batches:
            boxes = cutter.boxes(epoch, rows, np.tile(self.images.shape[2:0:-1], (len(rows), 1)))
            x = to_float(self.images[self.kept[rows]].to(device))
            yield torch.cat([crop_and_resize(x, part, cutter.size, cutter.bicubic) for part in boxes])


class ImageFiles(ImageSource):
    """Image files of any size. Worker processes decode a file each time it is used.

    folder    folder to which `paths`, the paths of the files, are relative
    labels    class name of each file, or None
    workers   number of worker processes; 0: decode in this process
    skip      True: decode all files now, and remove damaged files. False: fail when a damaged file is used
    """

    def __init__(self, folder, paths, labels, workers, skip):
        labels = labels and [normalize("NFC", name) for name in labels]
        numbers = {name: number for number, name in enumerate(sorted({*(labels or ())}))}
        labels = torch.tensor([numbers[name] for name in labels]) if labels else None
        super().__init__(len(paths), labels, {number: name for name, number in numbers.items()})
        self.paths = np.array([*map(os.fsencode, paths)])      # an array takes less memory than a list
        self.folder, self.workers = folder, workers
        if skip:
            self.skip_damaged()

    def path(self, row):
        """Return the path of the image file with this row number."""
        return os.path.join(self.folder, os.fsdecode(self.paths[self.kept[row]]))

    def default_view_size(self, model_size):
        """Return the side of views in pixels if --image-size is not given: `model_size`, or less if the
        shorter sides of the first 100 images are all smaller."""
        sizes = [0]
        for path in map(self.path, range(min(100, len(self)))):
            try:
                sizes.append(min(open_image(path).size))
            except Exception as error:                         # damaged images cause errors of many types
                fail(f"{describe_damage(path, error)}; {REPAIR}")
        return min(model_size, max(sizes))

    def to_device(self, device):
        """Do nothing: files are decoded on the CPU."""

    def skip_damaged(self):
        """Decode all files once, remove the damaged ones, and print up to 100 names."""
        paths = ((self.path(row),) for row in range(len(self)))
        found = progress(parallel_map(find_damage, paths, self.workers), "checking images", total=len(self))
        damaged = {row: reason for row, reason in enumerate(found) if reason}
        if damaged:
            log("skipped", f"{self.folder}: {len(damaged):,} of {len(self):,} images cannot be read: "
                           f"{'; '.join([*damaged.values()][:100])}")
            self.keep_only(np.setdiff1d(np.arange(len(self)), [*damaged]))
        if not len(self):
            fail(f"{self.folder}: no image can be read")

    def load_views(self, batches, cutter, device):
        """Yield the views of each batch, as ImageArrays.load_views does. Each worker decodes one part of a
        batch. While a batch is in use, the workers decode the next two batches."""
        batches, again = itertools.tee(batches)
        tasks = ((epoch, part) for epoch, rows in batches for part in self.split(rows))
        results = parallel_map(functools.partial(crop_files, self, cutter), tasks, self.workers)
        for _, rows in again:
            parts = [*itertools.islice(results, len(self.split(rows)))]
            for error in (part for part in parts if isinstance(part, str)):
                fail(f"{error}; {REPAIR}", every_rank=True)
            yield to_float(torch.cat(parts, 1).to(device).flatten(0, 1))

    def split(self, rows):
        """Return the parts of a batch, one for each worker."""
        return np.array_split(rows, min(len(rows), max(1, self.workers)))


class Tasks(Dataset):
    """A data set for DataLoader. An index is a tuple of arguments, and its item is function(*arguments)."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, arguments):
        return self.function(*arguments)


def parallel_map(function, items, workers):
    """Return an iterator over function(*item) for each item, in order. Each worker process computes up to
    two items before they are needed. With workers=0, this process does the work."""
    if workers:
        Finalize(None, kill_workers, exitpriority=0)
    return iter(DataLoader(Tasks(function), sampler=items, batch_size=None, num_workers=workers,
                           worker_init_fn=ignore_signals, multiprocessing_context="fork" if workers else None,
                           generator=torch.Generator()))       # leave PyTorch's default generator unchanged


def ignore_signals(_):
    """In a worker, ignore all signals that stop a run, because the current step still needs the worker."""
    for kind in SIGNALS:
        signal.signal(kind, signal.SIG_IGN)


def kill_workers():
    """Kill all workers at the end of this process. They ignore the SIGTERM of multiprocessing."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)              # else DataLoader reports the killed workers
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def open_image(path):
    """Open an image file with Pillow, and check its mode (pixel format). Do not decode its pixels."""
    from PIL import Image
    image = Image.open(path, formats=FORMATS)
    if image.mode not in MODES:
        raise ValueError(f"its Pillow mode is {image.mode}, expected at most 8 bits per channel")
    return image


def find_damage(path):
    """Return what is wrong with an image file, or None. A JPEG is decoded at 1/8 of its size. This also reads
    the whole file, but takes less time than decoding at full size."""
    try:
        with open_image(path) as image:
            image.draft(None, (1, 1))
            image.load()
    except Exception as error:                                 # damaged images cause errors of many types
        return describe_damage(path, error)


def describe_damage(path, error):
    """Return a text that names an image file and says why it cannot be read."""
    reason = getattr(error, "strerror", None) or f"cannot be read ({type(error).__name__}: {error})"
    return f"{path}: {reason}"


def crop_files(source, cutter, epoch, rows):
    """Crop and resize n image files. Return views (views, n, size, size, 3) uint8, or a text that describes a
    damaged file. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if no crop gets smaller than `size`."""
    from PIL import Image, ImageOps
    method = Image.Resampling.BICUBIC if cutter.bicubic else Image.Resampling.BILINEAR
    size, found = cutter.size, []
    for row in rows:
        try:
            with open_image(source.path(row)) as image:
                # EXIF stores how the camera was held. For a TIFF, Pillow has already swapped the sides.
                is_turned = image.getexif().get(ORIENTATION, 1) > 4 and image.format != "TIFF"
                width, height = image.size[::-1] if is_turned else image.size
                boxes = cutter.boxes(epoch, np.array([row]), np.array([[width, height]]))[:, 0]
                shrink = max(1, boxes[:, 2:].min() // size)
                image.draft(None, (max(1, image.width // shrink), max(1, image.height // shrink)))
                upright = ImageOps.exif_transpose(image)
                scale = np.tile([upright.width / width, upright.height / height], 2)
                boxes[:, 2:] += boxes[:, :2]                   # left, top, right, bottom
                rgb = upright if upright.mode == "RGB" else upright.convert("RGB")
                corners = [[*map(round, corner)] for corner in (boxes * scale).tolist()]
                views = (rgb.crop(corner).resize((size, size), method) for corner in corners)
                found.append([*map(np.asarray, views)])
        except Exception as error:                             # damaged images cause errors of many types
            return describe_damage(source.path(row), error)
    return torch.from_numpy(np.array(found)).transpose(0, 1)
