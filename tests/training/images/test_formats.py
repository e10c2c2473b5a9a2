"""Readers of image data sets: good files are read exactly, bad ones give a one-line error."""
import io
import os
import pickle
import re
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kernels.training.errors import UserError
from kernels.training.images import formats
from kernels.training.images.formats import read_images
from kernels.training.images.loading import Cutter

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
FLAT = PIXELS.transpose(0, 3, 1, 2).reshape(4, 3072)
CPU = torch.device("cpu")


def write(path, content=b""):
    """Write a file with these bytes, arrays or image, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content) if isinstance(content, bytes) else Image.fromarray(content).save(path)
    return path


def pixels(source):
    """Return all images of a source of images of 32 x 32 pixels."""
    views, = source.load_views([(0, np.arange(len(source)))], Cutter(None, 0, 1, 1.0, 32, False), CPU)
    return (255 * views).round().permute(0, 2, 3, 1).to(torch.uint8).numpy()


def python_2_pickle(order):
    """Return a batch pickled as CIFAR's were, by Python 2 with protocol 2, where strings are bytes."""
    data = FLAT.tobytes(order)
    return (b"\x80\x02}q\x01(U\x0bbatch_labelU\x06one ofU\x04datacnumpy.core.multiarray\n_reconstruct\nq\x03"
            b"cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x04M\x00\x0c\x86cnumpy\ndtype\nq\x06"
            b"U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            + b"I%02d\nT" % (order == "F") + struct.pack("<i", len(data)) + data + b"tb"
            b"U\x06labels](K\x00K\x01M\x00\x01K\x03eU\tfilenames](U\x01aU\x01bU\x01cU\x01deu.")


def python_3_pickle(name=b"labels"):
    batch = {b"batch_label": b"one of", b"data": FLAT, name: [0, 1, 256, 3], b"filenames": [b"a", b"\xff"]}
    return pickle.dumps(batch)


@pytest.mark.parametrize("names, content", [
    (["data_batch_1", "data_batch_2", "test_batch"], python_2_pickle("C")),
    (["data_batch_1"], python_2_pickle("F")), (["data_batch_1"], python_3_pickle()),
    (["train", "test"], python_3_pickle(b"fine_labels"))], ids=range(4))
def test_cifar(names, content, tmp_path):
    """CIFAR-10 has several batches, CIFAR-100 one file with fine labels; both may have a test set."""
    for name in names:
        write(tmp_path / name, content)
    found, test = read_images(tmp_path)
    times = max(1, len(names) - 1)
    assert np.array_equal(found.images, np.concatenate([PIXELS] * times))
    assert found.labels.tolist() == [0, 1, 256, 3] * times
    if len(names) > 1:
        assert np.array_equal(test.images, PIXELS) and test.labels.tolist() == [0, 1, 256, 3]
    else:
        assert test is None


@pytest.mark.parametrize("name, memory", [("x.npz", 2**40), ("x", 2**40), ("x", 2 * PIXELS.nbytes)])
def test_arrays(name, memory, tmp_path, monkeypatch):
    """An .npz, or its unpacked .npy files. These stay on disk if they are large."""
    monkeypatch.setattr(formats, "total_memory", lambda: memory)
    arrays = dict(images=PIXELS, labels=np.arange(4), test_images=PIXELS[:2], test_labels=np.array([3, 4]))
    with zipfile.ZipFile(write(tmp_path / "x.npz", arrays)) as file:
        file.extractall(tmp_path / "x")
    train, test = read_images(tmp_path / name)
    assert np.array_equal(pixels(train), PIXELS) and train.labels.tolist() == [0, 1, 2, 3]
    assert np.array_equal(pixels(test), PIXELS[:2]) and test.labels.tolist() == [3, 4]
    assert isinstance(train.images, np.memmap) == (memory < 2**40)


def test_folders(tmp_path):
    """Sub-folders of any depth and links to folders are labels. Names that begin with a dot are skipped."""
    for i, name in enumerate(("a/x.png/1.png", "a/x.png/0.png", "x/b/2.png")):
        write(tmp_path / name, PIXELS[i])
    for name in ("x/notes.txt", "x/.ipynb_checkpoints/2.png", "x/b/._2.png"):      # the last one is of macOS
        write(tmp_path / name)
    (tmp_path / "x" / "c").symlink_to(tmp_path / "a")
    found, test = read_images(tmp_path / "x", workers=0)
    assert np.array_equal(pixels(found), PIXELS[[2, 1, 0]]) and found.labels.tolist() == [0, 1, 1]
    assert found.names == {0: "b", 1: "c"} and test is None


@pytest.mark.parametrize("name, text, labels", [
    ("labels.tsv", "sub/b.png\t10\na.png\t9\nsub/c.png\t10\n", [0, 1, 0]),    # "10" < "9"
    ("labels.csv", "label,file\n1,sub/b.png\n 2 , a.png\n 1,sub/c.png\n", [0, 1, 0]),
    ("labels.csv", "file\nsub/b.png\na.png\nsub/c.png\n", None)])
def test_tables_of_files(name, text, labels, tmp_path):
    """File names are relative to the table's folder. A header is obeyed, and spaces around cells are not part
    of them."""
    for i, image in enumerate(("a.png", "sub/b.png", "sub/c.png")):
        write(tmp_path / image, PIXELS[i])
    found, _ = read_images(write(tmp_path / name, text.encode()), workers=0)
    assert np.array_equal(pixels(found), PIXELS[[1, 0, 2]])
    assert (found.labels if labels is None else found.labels.tolist()) == labels


@pytest.mark.parametrize("files, expected", [
    ({"x.npz": dict(images=PIXELS, labels=np.zeros(4))}, "x.npz: labels are float64 .*, expected 4 int.*"),
    ({"x.npz": dict(images=PIXELS, labels=np.arange(4) - 1)}, r"x.npz: labels are .* that are 0 or larger"),
    ({"x.npz": dict(images=PIXELS / 255)}, "x.npz: images are float64 .*, expected uint8 .*"),
    ({"x.npz": dict(a=PIXELS)}, r"x.npz: contains a; expected images, and optionally labels, .*"),
    ({"x/data_batch_1": python_3_pickle()[:-9]}, "x/data_batch_1: .*"),
    ({"x/data_batch_1": pickle.dumps(os.system)}, r"x/data_batch_1: contains posix\.system, which CIFAR .*"),
    ({"x/a.txt": b""}, r"x: no image files in this folder; expected files .* \.bmp, .*"),
    ({"x/1.png": b"", "x/a/2.png": b""}, "x: some images are in sub-folders .* and some are not; .*"),
    ({"x/train/1.png": b"", "x/val/1.png": b""}, "x: its sub-folders train, val look like splits, .*"),
    ({"x.tsv": b"a.png\tcat\tdog\n"}, "x.tsv line 1: expected a file name and a label, or a file name alone"),
    ({"x.jpg": b""}, r"x\.jpg: expected a folder of images, CIFAR's python batches, .*")])
def test_bad_data(files, expected, cwd):
    for name, content in files.items():
        write(name, content)
    with pytest.raises(UserError, match=f"^{expected}$"):
        read_images(name.partition("/")[0], workers=0)


Image.fromarray(PIXELS[0]).save(JPEG := io.BytesIO(), "JPEG")


@pytest.mark.parametrize("name, content, reason", [
    ("b.png", b"a text", r"cannot be read \(UnidentifiedImageError.*\)"),
    ("b.jpg", JPEG.getvalue()[:-400], r"cannot be read \(OSError: .*\)"),
    ("b.png", PIXELS[0, :, :, 0].astype(np.uint16), r".* Pillow mode is I;16, .*")])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named_when_it_is_met(name, content, reason, workers, cwd):
    write("x/a.png", PIXELS[0])
    write(f"x/{name}", content)
    message = f"^x/{name}: .*{reason}; repair or delete it, or start again with --skip-damaged$"
    with pytest.raises(UserError, match=message):
        pixels(read_images("x", workers=workers)[0])


def test_damaged_images_are_skipped(cwd, capsys):
    """--skip-damaged decodes all files before training, and prints the names of the damaged ones."""
    for i in range(8):
        write(f"x/{'ab'[i % 2]}/{i}.jpg", JPEG.getvalue()[: -400 if i in (4, 5) else None])
    found, _ = read_images("x", workers=2, skip=True)
    said = r"skipped +x: 2 of 8 images cannot be read: x/a/4\.jpg: .*; x/b/5\.jpg: .*\n"
    assert re.fullmatch(said, capsys.readouterr().out) and found.labels.tolist() == [0] * 3 + [1] * 3
    assert [Path(found.path(row)).name for row in range(6)] == [f"{i}.jpg" for i in (0, 2, 6, 1, 3, 7)]
    assert len(pixels(found)) == 6


def test_without_pillow(cwd, monkeypatch):
    write("x/a.png", b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="x: reading image files needs the package Pillow; .*"):
        read_images("x", workers=0)
