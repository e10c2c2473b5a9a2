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
from simclr import CROPS

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
    """Return all images of ImageFiles of 32 x 32 pixels."""
    views, = source.load_views([(0, np.arange(len(source)))], Cutter(None, 0, 1, 1.0, 32, False), CPU)
    return (255 * views).round().permute(0, 2, 3, 1).to(torch.uint8).numpy()


# ── CIFAR ──


def old_pickle(fortran_order=False):
    """Return a batch pickled as CIFAR's were, by Python 2 with protocol 2, where strings are bytes."""
    data = FLAT.tobytes("F" if fortran_order else "C")
    return (b"\x80\x02}q\x01(U\x0bbatch_labelU\x06one ofU\x04datacnumpy.core.multiarray\n_reconstruct\nq\x03"
            b"cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x04M\x00\x0c\x86cnumpy\ndtype\nq\x06"
            b"U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            + b"I%02d\nT" % fortran_order + struct.pack("<i", len(data)) + data + b"tb"
            b"U\x0bfine_labels](K\x00K\x01M\x00\x01K\x03eU\tfilenames](U\x01aU\x01bU\x01cU\x01deu.")


def new_pickle(protocol, data=FLAT, name=b"labels"):
    """Return such a batch, pickled by Python 3."""
    labels = [0, 1, 256, 3][:len(data)]
    return pickle.dumps({b"batch_label": b"one of", b"data": data, name: labels, b"filenames": [b"\xff"]},
                        protocol)


@pytest.mark.parametrize("content", [
    old_pickle(), old_pickle(fortran_order=True), new_pickle(2), new_pickle(4, np.asfortranarray(FLAT)),
    new_pickle(2, name=b"fine_labels")], ids=range(5))
def test_cifar(content, tmp_path):
    """CIFAR-10 has several batches, CIFAR-100 one file with fine labels; both may have a test set."""
    for first, test, count in ("data_batch_1", "test_batch", 8), ("train", "test", 4):
        write(tmp_path / first / first, content)
        write(tmp_path / first / first.replace("1", "2"), content)
        assert read_images(tmp_path / first)[1] is None
        write(tmp_path / first / test, new_pickle(2, FLAT[2:]))
        found, tested = read_images(tmp_path / first)
        assert np.array_equal(found.images, np.concatenate([PIXELS] * 2)[:count])
        assert found.labels.tolist() == ([0, 1, 256, 3] * 2)[:count]
        assert np.array_equal(tested.images, PIXELS[2:]) and tested.labels.tolist() == [0, 1]


# ── arrays, folders and tables of files ──


def test_an_unpacked_npz(tmp_path, monkeypatch):
    """Large images stay on disk; their views equal those of images in memory."""
    arrays = dict(images=PIXELS, labels=np.arange(4), test_images=PIXELS[:2], test_labels=np.array([3, 4]))
    with zipfile.ZipFile(write(tmp_path / "x.npz", arrays)) as file:
        file.extractall(tmp_path / "x")
    cutter, batch, views = Cutter(CROPS, 1, 2, 1.0, 8, True), [(0, np.array([3, 0, 3]))], []
    for name, memory in ("x.npz", 2**40), ("x", 2**40), ("x", 2 * PIXELS.nbytes):
        monkeypatch.setattr(formats, "total_memory", lambda memory=memory: memory)
        train, test = read_images(tmp_path / name)
        assert np.array_equal(train.images, PIXELS) and train.labels.tolist() == [0, 1, 2, 3]
        assert np.array_equal(test.images, PIXELS[:2]) and test.labels.tolist() == [3, 4]
        views.append(next(train.load_views(batch, cutter, CPU)))
    assert isinstance(train.images, np.memmap)
    assert torch.equal(views[0], views[1]) and torch.equal(views[0], views[2])


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
    ("labels.tsv", "file\tlabel\nsub/b.png\tdog\na.png\tcat\nsub/c.png\tdog\n", [1, 0, 1]),
    ("labels.csv", "label,file\n1,sub/b.png\n 2 , a.png\n 1,sub/c.png\n", [0, 1, 0]),
    ("labels.tsv", "sub/b.png\t10\na.png\t9\nsub/c.png\t10\n", [0, 1, 0]),    # "10" < "9"
    ("labels.csv", "file\nsub/b.png\na.png\nsub/c.png\n", None)])
def test_tables_of_files(name, text, labels, tmp_path):
    """File names are relative to the table's folder. A header is obeyed, and spaces around cells are not part
    of them."""
    for i, image in enumerate(("a.png", "sub/b.png", "sub/c.png")):
        write(tmp_path / image, PIXELS[i])
    found, _ = read_images(write(tmp_path / name, text.encode()), workers=0)
    assert np.array_equal(pixels(found), PIXELS[[1, 0, 2]])
    assert (found.labels if labels is None else found.labels.tolist()) == labels


# ── mistakes ──


@pytest.mark.parametrize("files, expected", [
    ({"x.npz": dict(images=PIXELS, labels=np.zeros(4))}, "x.npz: labels are float64 .*, expected 4 int.*"),
    ({"x.npz": dict(images=PIXELS, labels=np.arange(3))}, "x.npz: labels are int64 .*, expected 4 int.*"),
    ({"x.npz": dict(images=PIXELS, labels=np.arange(4) - 1)}, r"x.npz: labels are .* that are 0 or larger"),
    ({"x.npz": dict(images=PIXELS / 255)}, "x.npz: images are float64 .*, expected uint8 .*"),
    ({"x.npz": dict(a=PIXELS)}, r"x.npz: contains a; expected images, and optionally labels, .*"),
    ({"x/data_batch_1": old_pickle()[:-9]}, "x/data_batch_1: .*"),
    ({"x/data_batch_1": pickle.dumps(os.system)}, r"x/data_batch_1: contains posix\.system, which CIFAR .*"),
    ({"x/a.txt": b""}, r"x: no image files in this folder; expected files .* \.bmp, .*"),
    ({"x/1.png": b"", "x/a/2.png": b""}, "x: some images are in sub-folders .* and some are not; .*"),
    ({"x/train/1.png": b"", "x/val/1.png": b""}, "x: its sub-folders train, val look like splits, .*"),
    ({"x.tsv": b"a.png\tcat\nb.png\n"}, r"x\.tsv line 2: .*"),
    ({"x.tsv": b"a.png\t\n"}, r"x\.tsv line 1: expected a file name and a label, or a file name alone"),
    ({"x.jpg": b""}, r"x\.jpg: expected a folder of images, CIFAR's python batches, .*")])
def test_bad_data(files, expected, cwd):
    for name, content in files.items():
        write(name, content)
    with pytest.raises(UserError, match=f"^{expected}$"):
        read_images(name.partition("/")[0], workers=0)


def jpeg(image):
    Image.fromarray(image).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n"         # would start a program
DAMAGED = {"b.png": (b"a text", r"cannot be read \(UnidentifiedImageError.*\)"),
           "b.gif": (EPS, r"cannot be read \(UnidentifiedImageError.*\)"),
           "b.jpg": (jpeg(PIXELS[0])[:-400], r"cannot be read \(OSError: .*\)"),
           "b.bmp": (None, "No such file or directory"),
           "b.tif": (PIXELS[0, :, :, 0].astype(np.uint16), r".* Pillow mode is I;16, .*")}


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images(workers, cwd, capsys):
    """A damaged image is named when it is met. --skip-damaged decodes all files before training, and prints
    the names of the damaged ones."""
    for name, (content, reason) in DAMAGED.items():
        write(f"{name}/a.png", PIXELS[0])
        os.symlink("nowhere", f"{name}/b.bmp") if content is None else write(f"{name}/{name}", content)
        message = rf"^{name}/{name}: .*{reason}; repair or delete it, or start again with --skip-damaged$"
        with pytest.raises(UserError, match=message):
            pixels(read_images(name, workers=workers)[0])
    for i in range(8):
        write(f"x/{'ab'[i % 2]}/{i}.png", b"a text" if i in (4, 5) else PIXELS[i % 4])
    found, _ = read_images("x", workers=workers, skip=True)
    said = r"skipped +x: 2 of 8 images cannot be read: x/a/4\.png: .*; x/b/5\.png: .*\n"
    assert re.fullmatch(said, capsys.readouterr().out) and found.labels.tolist() == [0] * 3 + [1] * 3
    assert [Path(found.path(row)).name for row in range(6)] == [f"{i}.png" for i in (0, 2, 6, 1, 3, 7)]
    assert np.array_equal(pixels(found), PIXELS[[0, 2, 2, 1, 3, 3]])
    for path in Path("x").glob("*/*"):
        write(path, b"")
    with pytest.raises(UserError, match="x: no image can be read"):
        read_images("x", workers=workers, skip=True)


def test_without_pillow(cwd, monkeypatch):
    write("x/a.png", b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="x: reading image files needs the package Pillow; .*"):
        read_images("x", workers=0)
