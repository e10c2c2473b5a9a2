"""Readers of image data sets: good files are read, bad ones give a one-line error, no code in them is run."""
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

import simclr
from kernels.training.errors import UserError
from kernels.training.images import formats
from kernels.training.images.formats import read_images
from kernels.training.images.loading import Cutter
from running import rejects, run
from simclr import CROPS

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
FLAT = PIXELS.transpose(0, 3, 1, 2).reshape(4, 3072)


def write(path, content=b""):
    """Write a file with these bytes or this image, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content) if isinstance(content, bytes) else Image.fromarray(content).save(path)
    return path


def assert_data_rejected(capfd, expected, data="x"):
    """Assert that simclr.py exits with this message (a regular expression) when it reads the data."""
    short = "--model resnet-small --steps 1 --probe-epochs 0".split()              # in case data are accepted
    rejects("simclr", capfd, expected, "--data", data, "--batch-size", 2, *short)


# ── pickles ──


def old_pickle(fortran_order=False):
    """Return a batch pickled as CIFAR's were, by Python 2 with protocol 2, where strings are bytes."""
    data = FLAT.tobytes("F" if fortran_order else "C")
    return (b"\x80\x02}q\x01(U\x0bbatch_labelU\x06one ofU\x04datacnumpy.core.multiarray\n_reconstruct\nq\x03"
            b"cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x04M\x00\x0c\x86cnumpy\ndtype\nq\x06"
            b"U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            + b"I%02d\nT" % fortran_order + struct.pack("<i", len(data)) + data + b"tb"
            b"U\x0bfine_labels](K\x00K\x01M\x00\x01K\x03eU\tfilenames](U\x01aU\x01bU\x01cU\x01deu.")


def make_batch(data=FLAT, labels=(0, 1, 256, 3)):
    return {b"batch_label": b"one of", b"data": data, b"labels": list(labels), b"filenames": [b"a", b"\xff"]}


@pytest.mark.parametrize("content", [
    old_pickle(), old_pickle(fortran_order=True), pickle.dumps(make_batch(), 2),
    pickle.dumps(make_batch(np.asfortranarray(FLAT)), 4)], ids=range(4))
def test_cifar_batches_are_read(content, tmp_path):
    """Batches as they are distributed, and as Python 3 writes them."""
    write(tmp_path / "data_batch_1", content)
    found, test = read_images(tmp_path)
    assert np.array_equal(found.images, PIXELS) and test is None and found.labels.tolist() == [0, 1, 256, 3]


class Call:
    """Object whose pickle calls a function when it is loaded."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


# (pickle, message after "contains"; None: any message). Unpickling the first three would run a command.
ATTACKS = [
    (pickle.dumps(os.system), "posix.system, which CIFAR batches .*"),
    (pickle.dumps({b"data": Call(os.system, ("touch ran",))}), "posix.system, which CIFAR batches .*"),
    (pickle.dumps(Call(eval, ("open('ran', 'w')",)), 0), r"__?builtin.*\.eval, which CIFAR batches .*"),
    (b"", None), (b"\xff\xff", None), (old_pickle()[:-9], None)]


@pytest.mark.parametrize("content, expected", ATTACKS, ids=range(len(ATTACKS)))
def test_pickles_cannot_run_code(content, expected, cwd, capfd):
    write("x/data_batch_1", content)
    message = f"contains {expected}" if expected else ".*"
    assert_data_rejected(capfd, f"x/data_batch_1: {message}")
    assert not Path("ran").exists()


# ── arrays ──


@pytest.mark.parametrize("arrays, expected", [
    (dict(images=PIXELS, labels=np.array([b"a"] * 4)), r"labels are .S1 \(4,\), expected 4 int.*"),
    (dict(images=PIXELS, labels=np.zeros(4)), r"labels are float64 \(4,\), expected 4 int.*"),
    (dict(images=PIXELS, labels=np.arange(3)), r"labels are int64 \(3,\), expected 4 int.*"),
    (dict(images=PIXELS, labels=np.arange(4) - 1), r"labels are int64 \(4,\), expected 4 integers that .*"),
    (dict(images=PIXELS / 255), r"images are float64 \(4, 32, 32, 3\), expected .*"),
    (dict(images=PIXELS, test_images=PIXELS[0]), r"test_images are uint8 \(32, 32, 3\), expected .*"),
    (dict(images=np.array([Call(os.system, ("touch ran",))] * 4, object)), "Object arrays .*"),
    (dict(a=PIXELS), "contains a; expected images, and optionally labels, test_images, test_labels")])
def test_wrong_arrays_are_rejected(arrays, expected, cwd, capfd):
    np.savez("x.npz", **arrays)
    assert_data_rejected(capfd, rf"x\.npz: {expected}", "x.npz")
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_truncated_arrays_are_rejected(name, cwd, capfd):
    (np.save if name.endswith("npy") else np.savez)(name, PIXELS)
    os.truncate(name, 4000)
    assert_data_rejected(capfd, rf"{name}: .*", name)


# ── folders ──


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


BAD_IMAGES = [
    ("b.png", lambda path: os.symlink("nowhere", path), "No such file or directory"),
    ("b.png", write, r"cannot be read \(UnidentifiedImageError.*\)"),
    ("b.png", lambda path: write(path, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n"),
     r"cannot be read \(UnidentifiedImageError.*\)"),
    ("b.jpg", lambda path: write(path, jpeg(PIXELS[0])[:-400]), r"cannot be read \(OSError: .*\)"),
    ("b.png", lambda path: write(path, PIXELS[0, :, :, 0].astype(np.uint16)), ".* Pillow mode is I;16, .*")]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name, make, expected", BAD_IMAGES, ids=range(len(BAD_IMAGES)))
def test_damaged_image_is_named_when_it_is_met(name, make, expected, workers, cwd, capfd):
    write("x/a.png", PIXELS[0])
    make(f"x/{name}")
    flags = "--data x --model resnet-small --batch-size 2 --steps 1 --image-size 8 --out o --workers"
    with pytest.raises(SystemExit, match="2"):
        simclr.main([*flags.split(), str(workers)])
    expected = rf"simclr\.py: x/{name}: {expected}; repair or delete it, or start again with --skip-damaged\n"
    errors = capfd.readouterr().err
    assert re.fullmatch(expected, errors), errors


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_are_skipped(workers, cwd, capfd):
    """--skip-damaged decodes all files before training, and prints the names of the damaged ones."""
    for i in range(10):
        write(f"x/{'ab'[i % 2]}/{i}.png", PIXELS[i % 4])
    write("x/a/4.png", b"a text")
    write("x/b/5.png", jpeg(PIXELS[0])[:-400])
    flags = "--data x --skip-damaged --model resnet-small --batch-size 4 --steps 1 --image-size 8 --workers"
    said = run("simclr", Path("out"), *flags.split(), workers).said
    assert re.fullmatch(r"x: 2 of 10 images cannot be read: x/a/4\.png: .*; x/b/5\.png: .*", said["skipped"])
    assert said["simclr"].startswith("unsupervised: 8 images")
    found, _ = read_images("x", workers=workers, skip=True)
    assert found.labels.tolist() == [0] * 4 + [1] * 4
    assert [Path(found.path(row)).name for row in range(8)] == [f"{i}.png" for i in (0, 2, 6, 8, 1, 3, 7, 9)]
    assert np.array_equal(pixels(found), PIXELS[[0, 2, 2, 0, 1, 3, 3, 1]])
    for path in Path("x").glob("*/*"):
        write(path, b"")
    with pytest.raises(UserError, match="x: no image can be read"):
        read_images("x", workers=workers, skip=True)


def test_without_pillow(cwd, monkeypatch):
    write("x/a.png", b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="x: reading image files needs the package Pillow; .*"):
        read_images("x", workers=0)


@pytest.mark.parametrize("names, expected", [
    (["a.txt"], r"x: no image files in this folder; expected files .* \.bmp, .*"),
    (["a/1.png", "1.png"], "x: .* sub-folders are labels, .*"),
    (["train/a/1.png", "val/a/1.png"], "x: its sub-folders train, val look like splits, .*x/train, .*")])
def test_bad_folders_of_images_are_rejected(names, expected, cwd, capfd):
    for name in names:
        write(f"x/{name}", PIXELS[0] if name.endswith("png") else b"")
    assert_data_rejected(capfd, expected)


def pixels(source):
    """Return all images of ImageFiles, which have one size, without resizing."""
    side = source.default_view_size(999)
    cutter = Cutter(None, 0, 1, 1.0, side, False)
    x, = source.load_views([(0, np.arange(len(source)))], cutter, torch.device("cpu"))
    return (255 * x).round().permute(0, 2, 3, 1).to(torch.uint8).numpy()


def test_odd_names_and_links(tmp_path):
    """Links to folders and names that are not UTF-8 are accepted. Names that begin with a dot are skipped."""
    for i, name in enumerate(("a/x.png/1.png", "a/x.png/\udcff\n.png", "x/b/2.png")):
        write(tmp_path / name, PIXELS[i])
    write(tmp_path / "x" / "notes.txt", b"no image")
    write(tmp_path / "x" / ".ipynb_checkpoints" / "2.png", PIXELS[3])
    write(tmp_path / "x" / "b" / "._2.png", b"of macOS")
    (tmp_path / "x" / "c").symlink_to(tmp_path / "a")
    found, _ = read_images(tmp_path / "x", workers=0)
    assert np.array_equal(pixels(found), PIXELS[[2, 0, 1]]) and found.labels.tolist() == [0, 1, 1]


# ── tables, unpacked arrays, CIFAR-100 ──


@pytest.mark.parametrize("name, text, labels", [
    ("labels.tsv", "file\tlabel\nsub/b.png\tdog\na.png\tcat\nsub/c.png\tdog\n", [1, 0, 1]),
    ("labels.csv", "label,file\n1,sub/b.png\n 2 , a.png\n 1,sub/c.png\n", [0, 1, 0]),
    ("labels.tsv", "sub/b.png\t10\na.png\t9\nsub/c.png\t10\n", [0, 1, 0]),    # "10" < "9"
    ("labels.csv", "file\nsub/b.png\na.png\nsub/c.png\n", None)])
def test_tables_of_files(name, text, labels, tmp_path, monkeypatch):
    """File names are relative to the table's folder. A header is obeyed, and spaces around cells are not part
    of them."""
    for i, image in enumerate(("a.png", "sub/b.png", "sub/c.png")):
        write(tmp_path / "data" / image, PIXELS[i])
    write(tmp_path / "data" / name, text.encode())
    monkeypatch.chdir(tmp_path)
    found, test = read_images(f"data/{name}", workers=0)
    assert np.array_equal(pixels(found), PIXELS[[1, 0, 2]]) and test is None
    assert (found.labels if labels is None else found.labels.tolist()) == labels
    assert len(found.names) == (2 if labels else 0)


@pytest.mark.parametrize("text, expected", [
    ("a.png\tcat\tdog\n", r"x\.tsv line 1: expected a file name and a label, or a file name alone"),
    ("a.png\tcat\nb.png\n", r"x\.tsv line 2: .*"), ("a.png\t\n", r"x\.tsv line 1: expected a file .*"),
    ("", r"x\.tsv: no rows")])
def test_bad_tables_are_rejected(text, expected, cwd, capfd):
    write("x.tsv", text.encode())
    assert_data_rejected(capfd, expected, "x.tsv")


def test_an_unpacked_npz(tmp_path, monkeypatch):
    """Large images stay on disk; their views equal those of images in memory."""
    arrays = dict(images=PIXELS, labels=np.arange(4), test_images=PIXELS[:2], test_labels=np.array([3, 4]))
    np.savez(tmp_path / "x.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "x.npz") as file:
        file.extractall(tmp_path / "x")
    cutter, batch, cpu = Cutter(CROPS, 1, 2, 1.0, 8, True), [(0, np.array([3, 0, 3]))], torch.device("cpu")
    views = []
    for name, memory in ("x.npz", 2**40), ("x", 2**40), ("x", 2 * PIXELS.nbytes):
        monkeypatch.setattr(formats, "total_memory", lambda memory=memory: memory)
        train, test = read_images(tmp_path / name)
        assert np.array_equal(train.images, PIXELS) and train.labels.tolist() == [0, 1, 2, 3]
        assert np.array_equal(test.images, PIXELS[:2]) and test.labels.tolist() == [3, 4]
        views.append(next(train.load_views(batch, cutter, cpu)))
    assert isinstance(train.images, np.memmap)
    assert torch.equal(views[0], views[1]) and torch.equal(views[0], views[2])


def test_cifar_100(tmp_path):
    fine = {b"data": FLAT, b"fine_labels": [7, 99, 0, 7], b"coarse_labels": [1, 2, 3, 4]}
    write(tmp_path / "train", pickle.dumps(fine, 2))
    write(tmp_path / "test", pickle.dumps(fine | {b"data": FLAT[:1], b"fine_labels": [5]}, 2))
    write(tmp_path / "meta", pickle.dumps({b"fine_label_names": [b"apple"]}))
    train, test = read_images(tmp_path)
    assert np.array_equal(train.images, PIXELS) and train.labels.tolist() == [7, 99, 0, 7]
    assert np.array_equal(test.images, PIXELS[:1]) and test.labels.tolist() == [5]
