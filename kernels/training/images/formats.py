"""Read data sets of images: arrays, CIFAR's python batches, folders and tables of image files.

Files may come from strangers. Sizes that a header claims are compared with the file and with this machine's
memory before anything is allocated, and no code in a file is run.
"""
import contextlib
import math
import os
import stat
import zipfile
from pathlib import Path

import numpy as np
import torch

from ..cli import UserError, check_memory, fail, total_memory
from ..files import open_regular_file
from ..tables import read_table
from .loading import ImageArrays, ImageFiles, NpyRows
from .pickles import Array, read_pickle
from .workers import usable_cores

ARRAY_NAMES = "images", "labels", "test_images", "test_labels"
EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


@contextlib.contextmanager
def one_line_errors(path):
    """Turn any error that a damaged file causes in the block into a one-line UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:                                 # libraries raise many types for damaged files
        what = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        fail(f"{getattr(error, 'filename', None) or path}: {what}")


def read_images(path, workers=None, skip=False):
    """Return (images, test images or None): ImageArrays or ImageFiles of the data set at a path.

    workers   processes that decode image files; None: one for each usable core
    skip      skip and count damaged image files; False: raise UserError
    """
    path, decoding = Path(path), (usable_cores() if workers is None else workers, skip)
    with one_line_errors(path):
        mode = os.stat(path).st_mode                           # raises OSError if the path does not exist
        if stat.S_ISDIR(mode):
            if os.path.lexists(path / "images.npy"):           # an unpacked .npz
                names = [name for name in ARRAY_NAMES if os.path.lexists(path / f"{name}.npy")]
                return read_arrays(path, {name: path / f"{name}.npy" for name in names})
            for first, test in (("data_batch_1", "test_batch"), ("train", "test")):        # CIFAR-10, -100
                if os.path.lexists(path / first) and not (path / first).is_dir():
                    test = read_cifar([path / test]) if os.path.lexists(path / test) else None
                    return read_cifar(sorted(path.glob(first.replace("_1", "_*")))), test
            return ImageFiles(path, *list_folder(path), *decoding), None
        if path.suffix == ".npy":
            return read_arrays(path, {"images": path})
        if path.suffix == ".npz":
            with open_regular_file(path) as file, zipfile.ZipFile(file) as members:
                return read_arrays(path, {part.filename.removesuffix(".npy"): part
                                          for part in members.infolist()}, members)
        if path.suffix in (".tsv", ".csv"):
            return ImageFiles(path, *list_table(path), *decoding), None
        fail(f"{path}: expected a folder of images, CIFAR's python batches, .npz, .npy, or a .tsv or .csv "
             "that lists image files")


# ── arrays ──


class NpyHeader:
    """The header of an .npy file or of an .npy member of an .npz.

    nbytes             size of the array according to the header
    available_bytes    size of the data in the file
    keep_on_disk       True for images that would fill more than a quarter of the memory: their rows are read
                       from the .npy when they are needed
    """

    def __init__(self, name, file, members):
        self.name, self.file, self.open = name, file, members.open if members else open_regular_file
        with self.open(file) as opened:
            version = np.lib.format.read_magic(opened)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            self.shape, fortran_order, self.dtype = read(opened)
            self.start = opened.tell()
        self.available_bytes = (file.file_size if members else os.path.getsize(file)) - self.start
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        is_large = self.nbytes > total_memory() / 4
        self.keep_on_disk = not members and "images" in name and not fortran_order and is_large

    def read(self):
        """Return the array, or NpyRows if it is kept on disk."""
        if self.keep_on_disk:
            return NpyRows(self.file, self.shape, self.start)
        with self.open(self.file) as opened:
            return np.lib.format.read_array(opened, allow_pickle=False)


def read_arrays(path, files, members=None):
    """Return (images, test images or None) as ImageArrays. All headers are checked before an array is read.

    path       for messages
    files      {array name: path of an .npy}, or {array name: member of an .npz}
    members    the opened .npz, or None
    """
    if "images" not in files:
        names = ", ".join([*files][:9]) or "no array"
        fail(f"{path}: contains {names}; expected images, and optionally {', '.join(ARRAY_NAMES[1:])}")
    headers = [NpyHeader(name, files[name], members) for name in ARRAY_NAMES if name in files]
    by_name = {header.name: header for header in headers}
    prefixes = ["", "test_"] if "test_images" in by_name else [""]
    for prefix in prefixes:
        check_headers(path, prefix, by_name[f"{prefix}images"], by_name.get(f"{prefix}labels"))
    for header in headers:
        if header.nbytes > header.available_bytes:
            found = f"{header.available_bytes:,} of {header.nbytes:,} bytes"
            fail(f"{path}: {header.name} are truncated, {found}; copy the file again")
    check_memory(f"{path}", sum(header.nbytes for header in headers if not header.keep_on_disk))
    arrays = {header.name: header.read() for header in headers}
    splits = [make_arrays(path, prefix, arrays[f"{prefix}images"], arrays.get(f"{prefix}labels"))
              for prefix in prefixes]
    return splits[0], splits[1] if len(splits) > 1 else None


def check_headers(path, prefix, images, labels):
    """Raise UserError if dtype or shape in the headers of images or labels (may be None) is wrong."""
    shape = images.shape
    if images.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        fail(f"{path}: {prefix}images are {images.dtype} {shape}, expected uint8 (N, height, width, 3)")
    if labels is not None and (labels.shape != shape[:1] or labels.dtype.kind not in "iu"):
        found = f"{prefix}labels are {labels.dtype} {labels.shape}"
        fail(f"{path}: {found}, expected {shape[0]} integers that are 0 or larger")


def make_arrays(path, prefix, images, labels):
    """Return ImageArrays of the arrays read; raise UserError if a label is out of range."""
    if labels is not None:
        if labels.min() < 0 or labels.max() >= 2**63:
            found = f"{prefix}labels range from {labels.min()} to {labels.max()}"
            fail(f"{path}: {found}, expected {len(images)} integers from 0 to 2^63 - 1")
        labels = torch.from_numpy(labels.astype(np.int64))
    return ImageArrays(images if isinstance(images, NpyRows) else torch.from_numpy(images), labels)


# ── CIFAR ──


def read_cifar(paths):
    """Return ImageArrays of the images and labels in CIFAR's python batches."""
    images, labels = zip(*map(read_batch, paths))
    images = np.concatenate(images).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return make_arrays(paths[0], "", np.ascontiguousarray(images), np.concatenate(labels))


def read_batch(path):
    """Return the images (n, 3072) uint8 and the labels (n,) int64 of one of CIFAR's python batches."""
    with one_line_errors(path):
        with open_regular_file(path) as file:
            check_memory(f"{path}", os.path.getsize(path))
            batch = read_pickle(file.read())
        if type(batch) is not dict:
            fail(f"{path}: contains a {type(batch).__name__}, expected a dict with data and labels")
        arrays = (batch.get(b"data"), batch.get(b"labels", batch.get(b"fine_labels")))
        data, labels = (array.values if type(array) is Array else array for array in arrays)
        if type(data) is not np.ndarray or data.ndim != 2 or data.shape[1] != 3072:
            found = f"has shape {data.shape}" if hasattr(data, "shape") else "is not an array"
            fail(f"{path}: data {found}, expected uint8 (N, 3072)")
        if type(labels) is list and all(type(label) is int and 0 <= label < 2**63 for label in labels):
            labels = np.array(labels, np.int64)
        if type(labels) is not np.ndarray or labels.shape != data.shape[:1]:
            expected = f"a list of {len(data):,} integers from 0 to 2^63 - 1"
            fail(f"{path}: labels do not fit the images, expected {expected}")
        return data, labels


# ── files ──


def list_folder(path):
    """Return (folder, names of the image files below it, their labels or None). The label of a file is the
    sub-folder of `path` that contains it."""
    names = [name for name in files_below(path, "", {}) if name.lower().endswith(EXTENSIONS)]
    if not names:
        fail(f"{path}: no image files in this folder; expected files that end in {', '.join(EXTENSIONS)}")
    labels = [name.partition("/")[0] if "/" in name else None for name in names]
    folders = sorted({*labels} - {None})
    if folders and None in labels:
        fail(f"{path}: some images are in sub-folders ({', '.join(folders[:3])}) and some are not; "
             "sub-folders are labels, so move all images into sub-folders, or none")
    return path, names, labels if folders else None


def files_below(folder, subfolder, seen):
    """Yield the names of all files below a folder, relative to it and sorted; symbolic links are followed.
    Raises UserError if a link leads to a folder that was already visited, which could be an endless loop.

    subfolder   sub-folder to list: "" or a relative path that ends in "/"
    seen        {(device, inode): path} of the folders visited so far
    """
    here = os.path.join(folder, subfolder)
    status = os.stat(here)
    first = seen.setdefault((status.st_dev, status.st_ino), here)
    if first is not here:
        fail(f"{here.rstrip('/')}: a link to {first.rstrip('/')}, whose images are already listed; "
             "delete the link")
    for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from files_below(folder, f"{subfolder}{entry.name}/", seen)
        else:
            yield subfolder + entry.name


def list_table(path):
    """Return (folder, names of image files, their labels or None) from a table with columns file and label,
    or with the column file alone. Names are relative to the table's folder."""
    def check(cells):
        if len(cells) > 2 or not all(map(str.strip, cells)):
            return "expected a file name and a label, or a file name alone"

    _, table = read_table(path, check, names=("file", "label"))
    names, *labels = zip(*(cells for _, cells in table))
    return path.parent, names, labels[0] if labels else None
