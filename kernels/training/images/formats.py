"""Where pictures come from: arrays, CIFAR's python batches, folders and lists of files. What a file claims is
held against what is there, and what the machine has, before it is believed; nothing that lies in a file is
run."""
import contextlib
import math
import os
import stat
import zipfile
from pathlib import Path

import numpy as np
import torch

from ..cli import Fault, afford, fail, memory
from ..files import open_plain
from ..tables import read_table
from .loading import Arrays, Files, NpyRows
from .pickles import Array, read_pickle
from .workers import cores

ARRAYS = "images", "labels", "test_images", "test_labels"
KINDS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


@contextlib.contextmanager
def told(path):
    """Whatever a damaged file makes of the block becomes one line that names it."""
    try:
        yield
    except Fault:
        raise
    except Exception as error:                                 # there are many ways to fail
        what = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        fail(f"{getattr(error, 'filename', None) or path}: {what}")


def read_pictures(path, workers=None, skip=False):
    """(pictures, those of a test set or None): Arrays or Files.

    workers   processes that decode; None: as many as there are cores
    skip      damaged files are left out and counted, or else refused
    """
    path, decoding = Path(path), (cores() if workers is None else workers, skip)
    with told(path):
        kind = os.stat(path).st_mode                           # no such file: an OSError that says so
        if stat.S_ISDIR(kind):
            if os.path.lexists(path / "images.npy"):           # an .npz that was unpacked
                names = [name for name in ARRAYS if os.path.lexists(path / f"{name}.npy")]
                return read_arrays(path, {name: path / f"{name}.npy" for name in names})
            for first, test in (("data_batch_1", "test_batch"), ("train", "test")):        # CIFAR-10, -100
                if os.path.lexists(path / first) and not (path / first).is_dir():
                    test = read_cifar([path / test]) if os.path.lexists(path / test) else None
                    return read_cifar(sorted(path.glob(first.replace("_1", "_*")))), test
            return Files(path, *list_folder(path), *decoding), None
        if path.suffix == ".npy":
            return read_arrays(path, {"images": path})
        if path.suffix == ".npz":
            with open_plain(path) as file, zipfile.ZipFile(file) as members:
                return read_arrays(path, {part.filename.removesuffix(".npy"): part
                                          for part in members.infolist()}, members)
        if path.suffix in (".tsv", ".csv"):
            return Files(path, *list_table(path), *decoding), None
        fail(f"{path}: wanted a folder of pictures, CIFAR's python batches, .npz, .npy, or a .tsv of files")


# ── arrays ──


class NpyHeader:
    """What an .npy file, or such a member of an .npz, says of its array before that is read.

    there     how many bytes of the array the file has; it takes `nbytes`
    stays     pictures that would fill a quarter of the memory stay in their .npy
    """

    def __init__(self, name, file, members):
        self.name, self.file, self.open = name, file, members.open if members else open_plain
        with self.open(file) as opened:
            version = np.lib.format.read_magic(opened)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            self.shape, by_columns, self.dtype = read(opened)
            self.start = opened.tell()
        self.there = (file.file_size if members else os.path.getsize(file)) - self.start
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.stays = not members and "images" in name and not by_columns and self.nbytes > memory() / 4

    def read(self):
        if self.stays:
            return NpyRows(self.file, self.shape, self.start)
        with self.open(self.file) as opened:
            return np.lib.format.read_array(opened, allow_pickle=False)


def read_arrays(path, files, members=None):
    """What read_pictures gives, of .npy files {name: path}, or {name: member} of an .npz. All headers are
    checked before an array is read."""
    if "images" not in files:
        names = ", ".join([*files][:9]) or "nothing"
        fail(f"{path}: holds {names}; wanted images, and {', '.join(ARRAYS[1:])}")
    headers = [NpyHeader(name, files[name], members) for name in ARRAYS if name in files]
    known = {header.name: header for header in headers}
    prefixes = ["", "test_"] if "test_images" in known else [""]
    for prefix in prefixes:
        check_kind(path, prefix, known[f"{prefix}images"], known.get(f"{prefix}labels"))
    for header in headers:
        if header.nbytes > header.there:
            found = f"{header.there:,} of {header.nbytes:,} bytes"
            fail(f"{path}: {header.name} are cut off, {found}; copy the file again")
    afford(f"{path}", sum(header.nbytes for header in headers if not header.stays))
    arrays = {header.name: header.read() for header in headers}
    sides = [check_pictures(path, prefix, arrays[f"{prefix}images"], arrays.get(f"{prefix}labels"))
             for prefix in prefixes]
    return sides[0], sides[1] if len(sides) > 1 else None


def check_kind(path, prefix, images, labels):
    """Names a dtype or shape that does not fit, of the headers of arrays."""
    shape = images.shape
    if images.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        fail(f"{path}: {prefix}images are {images.dtype} {shape}, wanted uint8 (N, height, width, 3)")
    if labels is not None and (labels.shape != shape[:1] or labels.dtype.kind not in "iu"):
        found = f"{prefix}labels are {labels.dtype} {labels.shape}"
        fail(f"{path}: {found}, wanted {shape[0]} integers from 0 up")


def check_pictures(path, prefix, images, labels):
    """Arrays of arrays; labels that are none are named."""
    if labels is not None:
        if labels.min() < 0 or labels.max() >= 2**63:
            found = f"{prefix}labels from {labels.min()} to {labels.max()}"
            fail(f"{path}: {found}, wanted {len(images)} integers from 0 up, below 2^63")
        labels = torch.from_numpy(labels.astype(np.int64))
    return Arrays(images if isinstance(images, NpyRows) else torch.from_numpy(images), labels)


# ── CIFAR ──


def read_cifar(paths):
    """Pictures and labels of CIFAR's python batches."""
    images, labels = zip(*map(read_batch, paths))
    images = np.concatenate(images).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return check_pictures(paths[0], "", np.ascontiguousarray(images), np.concatenate(labels))


def read_batch(path):
    """(uint8 (n, 3072), int64 (n,)) of a batch."""
    with told(path):
        with open_plain(path) as file:
            afford(f"{path}", os.path.getsize(path))
            batch = read_pickle(file.read())
        if type(batch) is not dict:
            fail(f"{path}: holds a {type(batch).__name__}, wanted a dict with data and labels")
        arrays = (batch.get(b"data"), batch.get(b"labels", batch.get(b"fine_labels")))
        data, labels = (array.values if type(array) is Array else array for array in arrays)
        if type(data) is not np.ndarray or data.ndim != 2 or data.shape[1] != 3072:
            fail(f"{path}: data are {getattr(data, 'shape', 'no array')}, wanted uint8 (N, 3072)")
        if type(labels) is list and all(type(label) is int and 0 <= label < 2**63 for label in labels):
            labels = np.array(labels, np.int64)
        if type(labels) is not np.ndarray or labels.shape != data.shape[:1]:
            fail(f"{path}: labels are no list of {len(data):,} integers from 0 up, below 2^63")
        return data, labels


# ── files ──


def list_folder(path):
    """(folder, names of its pictures, their labels or None); sub-folders, if it has any, are the labels."""
    names = [name for name in files_below(path, "", {}) if name.lower().endswith(KINDS)]
    if not names:
        fail(f"{path}: no pictures; wanted {', '.join(KINDS)}")
    inside = [name.partition("/")[0] if "/" in name else None for name in names]
    folders = sorted({*inside} - {None})
    if folders and None in inside:
        fail(f"{path}: pictures beside the folders {', '.join(folders[:3])}; "
             "a label is a folder, so all or none lie in one")
    return path, names, inside if folders else None


def files_below(folder, inside, seen):
    """Names of all files below a folder, in order. Links are followed; one that leads to a folder again,
    perhaps round and round, is refused."""
    here = os.path.join(folder, inside)
    place = os.stat(here)
    if (first := seen.setdefault((place.st_dev, place.st_ino), here)) is not here:
        fail(f"{here.rstrip('/')}: a link to {first.rstrip('/')}, whose pictures count already; delete one")
    for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from files_below(folder, f"{inside}{entry.name}/", seen)
        else:
            yield inside + entry.name


def list_table(path):
    """The same of a table of files, named from its own folder on, and labels, or of files alone."""
    def check(cells):
        if len(cells) > 2 or not all(map(str.strip, cells)):
            return "wanted a file and a label, or a file"

    _, table = read_table(path, check, names=("file", "label"))
    names, *labels = zip(*(cells for _, cells in table))
    return path.parent, names, labels[0] if labels else None
