"""Read data sets of images: arrays, CIFAR's python batches, or folders of image files. Code inside a file is
never run."""
import contextlib
import os
import pickle
from pathlib import Path

import numpy as np
import torch

from ..errors import UserError, fail, is_out_of_memory
from ..out import names_below
from .loading import ImageArrays, ImageFiles

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
# what a pickled array needs, by Python 2 (CIFAR's files), by Python 3, and by NumPy 2
ALLOWED = {"numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct",
           "numpy._core.multiarray._reconstruct", "_codecs.encode"}
SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test"}


def read_images(path, workers=None, skip=False):
    """Read a data set, and return (images, test images or None), as ImageArrays or ImageFiles. workers and
    skip: see ImageFiles; workers=None: number of CPU cores / number of ranks on this machine."""
    path = Path(path)
    if workers is None:
        workers = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    with one_line_errors(path):
        if path.is_dir():
            for first, test in (("data_batch_1", "test_batch"), ("train", "test")):      # CIFAR-10, CIFAR-100
                if (path / first).is_file():
                    test = read_cifar([path / test]) if (path / test).exists() else None
                    return read_cifar(sorted(path.glob(first.replace("_1", "_*")))), test
            return ImageFiles(path, *list_folder(path), workers, skip), None
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                return read_arrays(path, dict(arrays))
        path.stat()                                            # raises OSError if the path does not exist
        fail(f"{path}: expected a folder of images, CIFAR's python batches, or .npz")


@contextlib.contextmanager
def one_line_errors(path):
    """Context manager: turn an error that a damaged file causes into a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:                                 # damaged files cause errors of many types
        if is_out_of_memory(error):
            raise
        what = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        fail(f"{getattr(error, 'filename', None) or path}: {what}")


def read_arrays(path, arrays):
    """Return (images, test images or None) as ImageArrays. arrays: {name: array}; path: for messages."""
    if "images" not in arrays:
        fail(f"{path}: contains {', '.join(arrays) or 'no array'}; expected images, and optionally labels, "
             "test_images, test_labels")
    splits = [make_arrays(path, prefix, arrays.get(f"{prefix}images"), arrays.get(f"{prefix}labels"))
              for prefix in ("", "test_")]
    return splits[0], splits[1]


def make_arrays(path, prefix, images, labels):
    """Return ImageArrays of a split, or None if images is None. Fail if a dtype or shape is wrong. prefix: ""
    or "test_", the start of array names in messages."""
    if images is None:
        return None
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
        fail(f"{path}: {prefix}images are {images.dtype} {images.shape}, expected uint8 (N, height, width, "
             "3)")
    if labels is not None:
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0:
            found = f"{prefix}labels are {labels.dtype} {labels.shape}"
            fail(f"{path}: {found}, expected {len(images)} integers that are 0 or larger")
        labels = torch.from_numpy(np.array(labels, np.int64))
    return ImageArrays(torch.from_numpy(np.ascontiguousarray(images)), labels)


def read_cifar(paths):
    """Return ImageArrays of the images and labels in CIFAR's python batches."""
    images, labels = zip(*map(read_batch, paths))
    images = np.concatenate(images).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return make_arrays(paths[0], "", images, np.concatenate(labels))


def read_batch(path):
    """Return the images (n, 3072) uint8 and the labels (n,) int64 of one of CIFAR's python batches."""
    with one_line_errors(path), open(path, "rb") as file:
        batch = BatchUnpickler(file, fix_imports=False, encoding="bytes").load()
        labels = batch.get(b"labels", batch.get(b"fine_labels"))
        return batch[b"data"].reshape(-1, 3072), np.array(labels, np.int64)


class BatchUnpickler(pickle.Unpickler):
    """Reads CIFAR's batches. Unlike pickle.Unpickler, it does not import functions that a file names."""

    def find_class(self, module, name):
        """Return a class or function that CIFAR's batches use; raise ValueError for all others."""
        if f"{module}.{name}" not in ALLOWED:
            raise ValueError(f"contains {module}.{name}, which CIFAR batches never contain")
        return super().find_class(module, name)


def list_folder(path):
    """Return (names of the image files below a folder, their labels or None). A label is the name of the
    folder directly below `path` that contains the file. Files and folders named .* are left out."""
    names = [name for name in names_below(path) if name.lower().endswith(EXTENSIONS)]
    if not names:
        fail(f"{path}: no image files in this folder; expected files that end in {', '.join(EXTENSIONS)}")
    labels = [name.partition(os.sep)[0] if os.sep in name else None for name in names]
    classes = sorted({*labels} - {None})
    if classes and None in labels:
        fail(f"{path}: some images are in sub-folders ({', '.join(classes[:3])}) and some are not; "
             "sub-folders are labels, so move all images into sub-folders, or none")
    if classes and {*map(str.lower, classes)} <= SPLITS:
        fail(f"{path}: its sub-folders {', '.join(classes)} look like splits, not classes; give "
             f"--data {path / classes[0]}, and another sub-folder as --dev")
    return names, labels if classes else None
