"""Pictures from files: arrays, CIFAR's python batches, folders. What a file claims is held against what is
there, and what the machine has, before it is believed; nothing that lies in a file is run."""
import contextlib
import functools
import math
import multiprocessing
import os
import signal
import stat
import threading
import zipfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from .command import Fault, afford, fail
from .files import open_plain
from .pickles import Array, read_pickle

ARRAYS = "images", "labels", "test_images", "test_labels"
KINDS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
FORMATS = "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"   # of Pillow's; for others it starts programs
MODES = "1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"      # 8 bits a channel
MOST_PIXELS = 2**26                                            # of a picture; Pillow warns from 89 million on
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def by(shape):
    return f"{shape[1]} x {shape[0]}"                          # as one says it: width first


@contextlib.contextmanager
def told(path):
    """Whatever a damaged file makes of the block becomes one line that names it."""
    try:
        yield
    except Fault:
        raise
    except BrokenProcessPool:
        fail(f"{path}: a process that decoded its pictures was killed, perhaps for want of memory")
    except Exception as error:                                 # there are many ways to fail
        what = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        fail(f"{getattr(error, 'filename', None) or path}: {what}")


def read_pictures(path, classes=None):
    """((pictures uint8 (N, H, W, 3), labels int64 (N,) or None), the same of a test set or None).

    classes   {sub-folder: label}, filled where labels are sub-folders: with those of the training set, a test
              set's names get the same numbers
    """
    path, classes = Path(path), {} if classes is None else classes
    with told(path):
        kind = os.stat(path).st_mode                           # no such file: an OSError that says so
        if stat.S_ISDIR(kind):
            first, test = path / "data_batch_1", path / "test_batch"
            if first.is_dir() or not os.path.lexists(first):
                return read_folder(path, classes), None
            test = read_cifar([test]) if os.path.lexists(test) else None
            return read_cifar(sorted(path.glob("data_batch_*"))), test
        if path.suffix == ".npy":
            return read_arrays(path, {"images": os.path.getsize(path)}, lambda name: open_plain(path))
        if path.suffix == ".npz":
            with open_plain(path) as file, zipfile.ZipFile(file) as members:
                sizes = {part.filename.removesuffix(".npy"): part.file_size for part in members.infolist()}
                return read_arrays(path, sizes, lambda name: members.open(f"{name}.npy"))
        fail(f"{path}: wanted a folder of pictures, CIFAR-10's python batches, .npz or .npy")


# ── arrays ──


class Head(NamedTuple):
    """What an .npy file says of its array, and how many bytes are behind that."""
    shape: tuple
    dtype: np.dtype
    there: int

    @property
    def wanted(self):
        return math.prod(self.shape) * self.dtype.itemsize


def read_arrays(path, sizes, open_array):
    """What read_pictures gives, of .npy files {name: bytes}. All heads are checked before one is read on."""
    if "images" not in sizes:
        names = ", ".join([*sizes][:9]) or "nothing"
        fail(f"{path}: holds {names}; wanted images, and {', '.join(ARRAYS[1:])}")
    names = [name for name in ARRAYS if name in sizes]
    heads, arrays = {}, {}
    for name in names:
        with open_array(name) as file:
            heads[name] = read_head(file, sizes[name])
    check_kind(path, "", heads["images"], heads.get("labels"))
    if "test_images" in heads:
        check_kind(path, "test_", heads["test_images"], heads.get("test_labels"))
    for name, head in heads.items():
        if head.wanted > head.there:
            fail(f"{path}: {name} are cut off, {head.there:,} of {head.wanted:,} bytes; copy the file again")
    afford(f"{path}", sum(head.wanted for head in heads.values()))
    for name in names:
        with open_array(name) as file:
            arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    images, labels, *test = map(arrays.get, ARRAYS)
    test = None if test[0] is None else check_pictures(path, "test_", *test)
    return check_pictures(path, "", images, labels), test


def read_head(file, size):
    """The Head of an .npy file of so many bytes."""
    of = np.lib.format
    version = of.read_magic(file)
    shape, _, dtype = (of.read_array_header_1_0 if version == (1, 0) else of.read_array_header_2_0)(file)
    return Head(shape, dtype, size - file.tell())


def check_kind(path, prefix, pictures, labels):
    """Names a dtype or shape that does not fit, of arrays or of their Heads."""
    shape = pictures.shape
    if pictures.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        fail(f"{path}: {prefix}images are {pictures.dtype} {shape}, wanted uint8 (N, height, width, 3)")
    if labels is not None and (labels.shape != shape[:1] or labels.dtype.kind not in "iu"):
        found = f"{prefix}labels are {labels.dtype} {labels.shape}"
        fail(f"{path}: {found}, wanted {shape[0]} integers from 0 up")


def check_pictures(path, prefix, pictures, labels):
    """(pictures, labels) as tensors; what does not fit is named."""
    check_kind(path, prefix, pictures, labels)
    if labels is None:
        return torch.from_numpy(pictures), None
    if labels.min() < 0 or labels.max() >= 2**63:
        found = f"{prefix}labels from {labels.min()} to {labels.max()}"
        fail(f"{path}: {found}, wanted {len(pictures)} integers from 0 up, below 2^63")
    return torch.from_numpy(pictures), torch.from_numpy(labels.astype(np.int64))


# ── CIFAR ──


def read_cifar(paths):
    """Pictures and labels of CIFAR's python batches."""
    pictures, labels = zip(*map(read_batch, paths))
    pictures = np.concatenate(pictures).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return check_pictures(paths[0], "", np.ascontiguousarray(pictures), np.concatenate(labels))


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
        if type(labels) not in (list, np.ndarray) or len(labels) != len(data):
            found = f"{len(labels):,}" if type(labels) in (list, np.ndarray) else "no list"
            fail(f"{path}: labels are {found}, wanted {len(data):,} integers")
        for label in labels if type(labels) is list else []:
            if type(label) is not int or not 0 <= label < 2**63:
                found = label if type(label) is int else f"a {type(label).__name__}"
                fail(f"{path}: a label is {found}, wanted an integer from 0 up, below 2^63")
        return data, np.array(labels, np.int64)


# ── folders ──


def read_folder(path, classes):
    """Pictures of a folder, decoded in processes of their own; sub-folders, if it has any, are the labels."""
    files = [file for file in files_below(path, {}) if file.suffix.lower() in KINDS]
    if not files:
        fail(f"{path}: no pictures; wanted {', '.join(KINDS)}")
    inside = [file.relative_to(path).parts[:-1] for file in files]
    folders = sorted({parts[0] for parts in inside if parts})
    if folders and () in inside:
        fail(f"{path}: pictures beside the folders {', '.join(folders[:3])}; "
             "a label is a folder, so all or none lie in one")
    for name in folders:
        classes.setdefault(name, len(classes))
    labels = np.array([classes[parts[0]] for parts in inside]) if folders else None
    return check_pictures(path, "", decode_all(path, files), labels)


def files_below(folder, seen):
    """Paths of all files below a folder, in order. Links are followed; one that leads to a folder again,
    perhaps round and round, is refused."""
    place = os.stat(folder)
    if (first := seen.setdefault((place.st_dev, place.st_ino), folder)) is not folder:
        fail(f"{folder}: a link to {first}, whose pictures count already; delete one")
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from files_below(entry.path, seen)
        else:
            yield Path(entry.path)


def decode_all(path, files):
    """(N, H, W, 3) uint8 of picture files of one size, the first one's."""
    with workers() as pool:
        size = pool.submit(decode, files[0]).result()
        if isinstance(size, tuple) and not 0 < math.prod(size) <= MOST_PIXELS:
            size = f"{by(size[::-1])} pixels; wanted 1 to {MOST_PIXELS:,}"
        if isinstance(size, str):
            fail(f"{files[0]}: {size}")
        width, height = size
        afford(f"{path}: {len(files):,} pictures of {by((height, width))}", 3 * width * height * len(files))
        pictures = np.empty((len(files), height, width, 3), np.uint8)
        decoded = pool.map(functools.partial(decode, size=size), files, chunksize=64)
        for i, (file, picture) in enumerate(zip(files, decoded)):
            if isinstance(picture, tuple):
                picture = (f"{by(picture[::-1])}, {files[0].name} is {by((height, width))}; "
                           "bring all pictures to one size first")
            if isinstance(picture, str):
                fail(f"{file}: {picture}")
            pictures[i] = picture
    return pictures


def decode(file, size=None):
    """(H, W, 3) uint8 of a picture of this size, (width, height); its size where that is another, or None was
    asked for; or, a str, what is wrong with it. No pixel is decoded before its size is known."""
    try:
        from PIL import Image
    except ImportError:
        return "reading it wants the package Pillow: pip install Pillow"
    Image.MAX_IMAGE_PIXELS = None                              # decode_all has a limit of its own
    try:
        with open_plain(file) as opened, Image.open(opened, formats=FORMATS) as picture:
            if picture.size != size:
                return picture.size
            if picture.mode not in MODES:
                return f"its mode is {picture.mode}; wanted 8 bits a channel; convert it first"
            return np.asarray(picture.convert("RGB"))
    except Fault:
        return "a pipe, a socket or a device; delete it"
    except Exception as error:                                 # a damaged picture has many ways to fail
        what = getattr(error, "strerror", None) or f"not readable ({type(error).__name__})"
        return f"{what}; repair or delete it"


@contextlib.contextmanager
def workers():
    """A pool of processes that decode. What ends the block early ends them at once."""
    with ProcessPoolExecutor(initializer=begin_worker) as pool:
        try:
            with signals_wait():
                [*pool.map(int, range(pool._max_workers))]     # starts them
            yield pool
        except BaseException:
            for worker in [*(pool._processes or {}).values()]:
                worker.kill()                                  # nothing that is queued is waited for
            raise


@contextlib.contextmanager
def signals_wait():
    """STOPS that come in the block come at its end: no process begins with its parent's handlers at work."""
    if not hasattr(signal, "pthread_sigmask"):                 # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker():
    """A worker ends by a signal at once, and with its parent; it says nothing: its parent does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for kind in STOPS:
        if signal.getsignal(kind) != signal.SIG_IGN:           # nohup's
            signal.signal(kind, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
