"""Test the readers of image data sets: good files are read exactly, bad files give a one-line error."""
import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kernels.training.errors import UserError
from kernels.training.images.formats import read_images
from kernels.training.images.loading import Cutter

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
CPU = torch.device("cpu")


def write(path, content=b""):
    """Write bytes, arrays (a dict) or an image to a file, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content) if isinstance(content, bytes) else Image.fromarray(content).save(path)
    return path


def pixels(source):
    """Return all images (n, 32, 32, 3) of a source whose images have 32 x 32 pixels."""
    views, = source.load_views([(0, np.arange(len(source)))], Cutter(None, 0, 1, 1.0, 32, False), CPU)
    return (255 * views).round().permute(0, 2, 3, 1).to(torch.uint8).numpy()


def python_2_pickle(key):
    """Return PIXELS pickled like a batch of CIFAR: by Python 2 with protocol 2, where strings are bytes."""
    data = PIXELS.transpose(0, 3, 1, 2).tobytes()
    return (b"\x80\x02}q\x01(U\x0bbatch_labelU\x06one ofU\x04datacnumpy.core.multiarray\n_reconstruct\nq\x03"
            b"cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x04M\x00\x0c\x86cnumpy\ndtype\nq\x06"
            b"U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            b"I00\nT" + struct.pack("<i", len(data)) + data + b"tb"
            + b"U" + bytes([len(key)]) + key + b"](K\x00K\x01M\x00\x01K\x03eu.")


@pytest.mark.parametrize("names, key", [
    (["data_batch_1", "data_batch_2", "test_batch"], b"labels"), (["train", "test"], b"fine_labels")])
def test_cifar(names, key, tmp_path):
    """CIFAR-10 has several training files. CIFAR-100 has one training file, with fine labels."""
    for name in names:
        write(tmp_path / name, python_2_pickle(key))
    found, test = read_images(tmp_path)
    times = len(names) - 1
    assert np.array_equal(found.images, np.concatenate([PIXELS] * times))
    assert found.labels.tolist() == [0, 1, 256, 3] * times
    assert np.array_equal(test.images, PIXELS) and test.labels.tolist() == [0, 1, 256, 3]


def test_folders(tmp_path):
    """The first sub-folder is an image's label, even if the image is in a deeper folder. Files and folders
    whose names begin with a dot are skipped."""
    for i, name in enumerate(("x/c/a/1.png", "x/c/a/0.png", "x/b/2.png")):
        write(tmp_path / name, PIXELS[i])
    for name in ("x/notes.txt", "x/.ipynb_checkpoints/2.png"):
        write(tmp_path / name)
    found, test = read_images(tmp_path / "x", workers=0)
    assert np.array_equal(pixels(found), PIXELS[[2, 1, 0]]) and found.labels.tolist() == [0, 1, 1]
    assert found.names == {0: "b", 1: "c"} and test is None


@pytest.mark.parametrize("files, expected", [
    ({"x.npz": dict(images=PIXELS / 255)}, "x.npz: images are float64 .*, expected uint8 .*"),
    ({"x.npz": dict(a=PIXELS)}, r"x.npz: contains a; expected images, and optionally labels, .*"),
    ({"x/a.txt": b""}, r"x: no image files in this folder; expected files .* \.bmp, .*"),
    ({"x/train/1.png": b"", "x/val/1.png": b""}, "x: its sub-folders train, val look like splits, .*")])
def test_bad_data(files, expected, cwd):
    for name, content in files.items():
        write(name, content)
    with pytest.raises(UserError, match=f"^{expected}$"):
        read_images(name.partition("/")[0], workers=0)


Image.fromarray(PIXELS[0]).save(JPEG := io.BytesIO(), "JPEG")


def test_damaged_images_are_skipped(cwd, capsys):
    """--skip-damaged decodes all files before training, and prints the names of the damaged files."""
    for i in range(8):
        write(f"x/{'ab'[i % 2]}/{i}.jpg", JPEG.getvalue()[: -400 if i in (4, 5) else None])
    found, _ = read_images("x", workers=2, skip=True)
    assert "x: 2 of 8 images cannot be read: x/a/4.jpg: " in capsys.readouterr().out
    assert found.labels.tolist() == [0] * 3 + [1] * 3
    assert [Path(found.path(row)).name for row in range(6)] == [f"{i}.jpg" for i in (0, 2, 6, 1, 3, 7)]
    assert len(pixels(found)) == 6
