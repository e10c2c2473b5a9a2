"""Readers of image data sets: good files are read, bad ones give a one-line error, no code in them is run."""
import io
import os
import pickle
import re
import socket
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from kernels.training import cli
from kernels.training.cli import UserError
from kernels.training.images import formats, loading
from kernels.training.images.formats import read_images
from kernels.training.images.loading import NpyRows
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


def before_numpy_2(content):
    """Return the pickle as numpy 1 wrote it, when modules were in numpy.core instead of numpy._core."""
    for name in (b"multiarray", b"numeric"):
        new, old = b"numpy._core." + name, b"numpy.core." + name
        content = content.replace(b"\x8c%c%s" % (len(new), new), b"\x8c%c%s" % (len(old), old))
        content = content.replace(b"c" + new, b"c" + old)
    return content


def make_batch(data=FLAT, labels=(0, 1, 256, 3)):
    return {b"batch_label": b"one of", b"data": data, b"labels": list(labels), b"filenames": [b"a", b"\xff"]}


NEW = {f"protocol {i}": pickle.dumps(make_batch(), i) for i in range(6)}
NEW |= {f"Fortran order {i}": pickle.dumps(make_batch(np.asfortranarray(FLAT)), i) for i in range(6)}
OLD = {"Python 2": old_pickle(), "Python 2 Fortran order": old_pickle(fortran_order=True)}


@pytest.mark.parametrize("content", [*NEW.values(), *OLD.values()], ids=[*NEW, *OLD])
def test_cifar_batches_of_all_protocols_are_read(content, tmp_path):
    is_framed = content[:1] == b"\x80" and content[1] >= 4     # then a change of its length would damage it
    for written in (content, content if is_framed else before_numpy_2(content)):
        write(tmp_path / "data_batch_1", written)
        found, test = read_images(tmp_path)
        assert np.array_equal(found.images, PIXELS) and test is None
        assert found.labels.tolist() == [0, 1, 256, 3]


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
    (b"cnumpy.f2py.__main__\ndtype\n.", "numpy.f2py.__main__.dtype, which CIFAR batches .*"),
    (b"\x80\x04\x8c\x05a\nb\rc\x8c\x01d\x93.", r"a\\nb\\rc.d, which CIFAR batches .*"),
    (b"(icollections\nCounter\n.", "collections.Counter, which CIFAR batches .*"),
    (b"cnumpy.core.multiarray\n_reconstruct\n(N}S'__code__'\nI1\nstb.", None), (b"Pfile\n.", None),
    (b"", None), (b"\xff\xff", None), (b"s.", None), (b"h\x07.", None), (old_pickle()[:-9], None)]


@pytest.mark.parametrize("content, expected", ATTACKS, ids=range(len(ATTACKS)))
def test_pickles_cannot_run_code(content, expected, cwd, capfd):
    write("x/data_batch_1", content)
    message = f"contains {expected}" if expected else ".*"
    assert_data_rejected(capfd, f"x/data_batch_1: {message}")
    assert not Path("ran").exists()


# ── arrays ──


def npy(shape, dtype="|u1", content=b""):
    """Return the bytes of an .npy whose header has this shape and dtype, followed by `content`."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, dict(descr=dtype, fortran_order=False, shape=shape))
    return file.getvalue() + content


def npz(path, compression=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)


IMAGES = npy((4, 2, 2, 3), content=bytes(48))


@pytest.mark.parametrize("members, expected", [
    (dict(images=npy((2**40, 8, 8, 3))), r"images are truncated, 0 of 211,106,232,532,992 bytes; copy .*"),
    (dict(images=npy((4, 2, 2, 3), content=bytes(47))), r"images are truncated, 47 of 48 bytes; .*"),
    (dict(images=IMAGES, labels=npy((2**40,), "<i8")), r"labels are int64 \(1099511627776,\), expected .*"),
    (dict(images=IMAGES, labels=npy((4,), "|S0")), r"labels are .S0 \(4,\), expected 4 int.*"),
    (dict(images=IMAGES, labels=npy((4,), "|O", pickle.dumps([Call(os.system, ("touch ran",))]))),
     r"labels are object \(4,\), expected 4 .*"),
    (dict(images=IMAGES, labels=npy((4,), "<f8", bytes(32))), r"labels are float64 \(4,\), expected 4 int.*"),
    (dict(images=IMAGES, labels=npy((3,), "<i8", bytes(24))), r"labels are int64 \(3,\), expected 4 int.*"),
    (dict(images=npy((4, 2, 2, 3), "<f8", bytes(384))), r"images are float64 \(4, 2, 2, 3\), expected .*"),
    (dict(images=IMAGES, test_images=npy((2, 2, 3), content=bytes(12))), r"test_images are uint8 \(2, 2, .*"),
    (dict(images=IMAGES, labels=npy((4,), "|i1", b"\0\1\2\xfd")), "labels range from -3 to 2, expected 4 .*"),
    (dict(images=IMAGES, labels=npy((4,), "<u8", b"\xff" * 32)), r"labels range from 1844674407370955.*"),
    (dict(images=IMAGES, test_images=npy((2**50, 2, 2, 3))), "test_images are truncated, 0 of .*"),
    (dict(images=npy((4, 0, 2, 3))), r"images are uint8 \(4, 0, 2, 3\), expected .*"),
    (dict(images=npy((-4, -2, 2, 3))), r"images are uint8 \(-4, -2, 2, 3\), expected .*"),
    (dict(images=b"\x93NUMPY\1\0\xff\xff" + b"(" * 70_000), ".*"), (dict(images=b""), ".*"),
    (dict(a=b"", b=b""), "contains a, b; expected images, and optionally labels, test_images, test_labels")])
def test_damaged_arrays_are_rejected(members, expected, cwd, capfd):
    npz("x.npz", **members)
    assert_data_rejected(capfd, rf"x\.npz: {expected}", "x.npz")
    if list(members) == ["images"]:
        write("x.npy", members["images"])
        assert_data_rejected(capfd, rf"x\.npy: {expected}", "x.npy")


def test_arrays_too_large_for_memory_are_rejected(cwd, capfd, monkeypatch):
    """768 KB of zeros take under 2 KB in an .npz. They are rejected by the header, before decompression."""
    monkeypatch.setattr(cli, "total_memory", lambda: 2**19)
    monkeypatch.setattr(np.lib.format, "read_array", Mock(side_effect=AssertionError))
    npz("x.npz", zipfile.ZIP_DEFLATED, images=npy((2**10, 16, 16, 3), content=bytes(3 * 2**18)))
    assert Path("x.npz").stat().st_size < 2000
    assert_data_rejected(capfd, r"x\.npz would need .* GB of memory, this machine has .* GB", "x.npz")


# ── folders ──


def png(width, height):
    """Return a PNG whose header gives this size, without pixels."""
    def chunk(kind, content):
        tail = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I4s", len(content), kind) + content + tail
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)


UNREADABLE, SPECIAL = r"not readable \(\w+\)", "a pipe, a socket or a device"
# (file name, function that creates the file, message)
BAD_IMAGES = [
    ("b.png", os.mkfifo, SPECIAL), ("b.png", make_socket, SPECIAL),
    ("b.png", lambda path: os.symlink("/dev/zero", path), SPECIAL),
    ("b.png", lambda path: os.symlink("nowhere", path), "No such file or directory"),
    ("b.png", write, UNREADABLE), ("b.png", lambda path: write(path, b"a text"), UNREADABLE),
    ("b.png", lambda path: write(path, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n"),
     UNREADABLE),
    ("b.jpg", lambda path: write(path, jpeg(PIXELS[0])[:-400]), UNREADABLE),
    ("b.png", lambda path: write(path, png(32, 32)), UNREADABLE),
    ("b.png", lambda path: write(path, png(50_000, 50_000)), "50000 x 50000 pixels, expected 1 to 67,.*"),
    ("b.png", lambda path: write(path, png(9_500, 9_500)), "9500 x 9500 pixels, expected 1 to 67,108,864"),
    ("b.png", lambda path: write(path, png(0, 0)), UNREADABLE),
    ("b.ppm", lambda path: write(path, b"P6 0 0 255 "), UNREADABLE),
    ("b.png", lambda path: write(path, PIXELS[0, :, :, 0].astype(np.uint16)), "its Pillow mode is I;16, .*"),
    ("b.tif", lambda path: write(path, PIXELS[0, :, :, 0] / np.float32(1)), "its Pillow mode is F, .*"),
    ("b\n\x1b[2J\udcff.png", write, UNREADABLE)]


@pytest.mark.parametrize("name, make, expected", BAD_IMAGES, ids=range(len(BAD_IMAGES)))
def test_bad_image_files_are_rejected(name, make, expected, cwd, capfd):
    """Reading a pipe would block, a device never ends, a huge image would fill the memory, and a warning of
    Pillow would be a second line."""
    write("x/a.png", PIXELS[0])
    make(f"x/{name}")
    shown = r"b\\n\\x1b\[2J.+" if "\n" in name else name
    assert_data_rejected(capfd, f"x: 1 of 2 images cannot be read: {shown}: {expected}; repair or delete "
                                "them, or skip them with --skip-damaged")


def write_damaged():
    """Write ten image files in two classes; four of them are damaged."""
    for i in range(10):
        write(f"x/{'ab'[i % 2]}/{i}.png", PIXELS[i % 4])
    write("x/a/4.png", b"a text")
    write("x/b/5.png", PIXELS[0, :, :, 0].astype(np.uint16))
    os.rename("x/a/6.png", "x/a/6.jpg")
    write("x/a/6.jpg", jpeg(PIXELS[0])[:-400])
    write("x/b/7.png", png(50_000, 50_000))


DAMAGED = (r"x: 4 of 10 images cannot be read: a/4\.png: not .*; a/6\.jpg: not .*; b/5\.png: its Pillow mode "
           r"is I;16, .*; b/7\.png: 50000 x .*")


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_are_named_or_skipped(workers, cwd, capfd):
    write_damaged()
    assert_data_rejected(capfd, DAMAGED, "x")
    flags = "--data x --skip-damaged --model resnet-small --batch-size 4 --steps 1 --image-size 8 --workers"
    said = run("simclr", Path("out"), *flags.split(), workers).said
    assert re.fullmatch(DAMAGED, said["skipped"]) and said["simclr"].startswith("unsupervised: 6 images")
    found, _ = read_images("x", workers=workers, skip=True)
    assert re.fullmatch(rf"skipped  {DAMAGED}\n", capfd.readouterr().out)
    assert found.labels.tolist() == [0] * 3 + [1] * 3 and len(found) == 6
    assert [Path(found.path(row)).name for row in range(6)] == [f"{i}.png" for i in (0, 2, 8, 1, 3, 9)]
    assert np.array_equal(pixels(found), PIXELS[[0, 2, 0, 1, 3, 1]])
    for path in Path("x").glob("*/*"):
        write(path, b"")
    with pytest.raises(UserError, match="x: 10 of 10 images cannot be read: .*"):
        read_images("x", workers=workers, skip=True)


def test_message_names_only_the_first_damaged_images(cwd, monkeypatch):
    monkeypatch.setattr(loading, "MAX_NAMED", 20)
    for i in range(200):
        write(f"x/{i:03}.png")
    with pytest.raises(UserError, match=r"200 of 200 .*; 019\.png: [^;]*; 180 more; repair"):
        read_images("x", workers=0)


def test_without_pillow(cwd, monkeypatch):
    write("x/a.png", b"")
    write("x/b.png", b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError) as error:
        read_images("x", workers=0)
    assert str(error.value) == "x: reading image files needs the package Pillow; run pip install Pillow"


@pytest.mark.parametrize("make, expected", [
    (lambda: os.mkfifo("x"), "x: expected a folder of images, .*"),
    (lambda: os.symlink("/dev/zero", "x"), "x: expected a folder of images, .*"),
    (lambda: os.symlink("x", "x"), "x: Too many levels of symbolic links"),
    (lambda: os.mkdir("x") or os.symlink("b.png", "x/b.png"), r"x/b\.png: Too many levels of symbolic links"),
    (lambda: write("x/a/a.png", PIXELS[0]) and os.symlink("..", "x/a/b"), "x/a/b: a link to x, whose .*"),
    (lambda: write("x/a/a.png", PIXELS[0]) and os.symlink("a", "x/b"), "x/b: a link to x/a, whose .*"),
    (lambda: os.mkdir("x") or os.mkfifo("x/data_batch_1"), "x/data_batch_1: a pipe, a socket .*"),
    (lambda: os.mkdir("x") or os.mkfifo("x/images.npy"), r"x/images\.npy: a pipe, a socket .*"),
    (lambda: write("x/a.txt", b"x"), r"x: no image files in this folder; expected files .* \.bmp, .*"),
    (lambda: write("x/a\nb/1.png", PIXELS[0]) and write("x/1.png", PIXELS[1]), "x: .* sub-folders .*")])
def test_bad_folders_of_images_are_rejected(make, expected, cwd, capfd):
    make()
    assert_data_rejected(capfd, expected)


def pixels(source):
    """Return all images of ImageFiles, which have one size, without cropping and resizing."""
    sizes = source.sizes(slice(None))
    boxes = np.concatenate([0 * sizes, sizes], 1)[None]
    (parts,) = source.decode([(np.arange(len(source)), boxes)], int(sizes[0, 0]), bicubic=False)
    return torch.cat(parts, 1)[0].numpy()


def test_odd_names_and_links(tmp_path):
    """Links to folders, names that are not UTF-8, and folders called x.png are accepted."""
    for i, name in enumerate(("a/x.png/1.png", "a/x.png/\udcff\n.png", "x/b/2.png")):
        write(tmp_path / name, PIXELS[i])
    write(tmp_path / "x" / "notes.txt", b"no image")
    (tmp_path / "x" / "c").symlink_to(tmp_path / "a")
    found, _ = read_images(tmp_path / "x")
    assert np.array_equal(pixels(found), PIXELS[[2, 0, 1]]) and found.labels.tolist() == [0, 1, 1]


# ── tables, unpacked arrays, CIFAR-100 ──


@pytest.mark.parametrize("name, text, labels", [
    ("labels.tsv", "file\tlabel\nsub/b.png\tdog\na.png\tcat\nsub/c.png\tdog\n", [1, 0, 1]),
    ("labels.tsv", "sub/b.png\t10\na.png\t9\nsub/c.png\t10\n", [0, 1, 0]),    # "10" < "9"
    ("labels.csv", 'sub/b.png,"a, b"\na.png,c\nsub/c.png,c\n', [0, 1, 1]),
    ("labels.csv", "file\nsub/b.png\na.png\nsub/c.png\n", None)])
def test_tables_of_files(name, text, labels, tmp_path, monkeypatch):
    """File names are relative to the table's folder, not to the working directory."""
    for i, image in enumerate(("a.png", "sub/b.png", "sub/c.png")):
        write(tmp_path / "data" / image, PIXELS[i])
    write(tmp_path / "data" / name, text.encode())
    monkeypatch.chdir(tmp_path)
    found, test = read_images(f"data/{name}", workers=0)
    assert np.array_equal(pixels(found), PIXELS[[1, 0, 2]]) and test is None
    assert (found.labels if labels is None else found.labels.tolist()) == labels
    assert len(found.names) == (2 if labels else 0)


@pytest.mark.parametrize("text, expected", [
    ("a.png\tcat\nnone.png\tdog\n", r"x\.tsv: 1 of 2 images cannot be read: none\.png: No such file .*"),
    ("a.png\tcat\tdog\n", r"x\.tsv line 1: expected a file name and a label, or a file name alone"),
    ("a.png\tcat\nb.png\n", r"x\.tsv line 2: .*"), ("a.png\t\n", r"x\.tsv line 1: expected a file .*"),
    ("\tcat\n", r"x\.tsv line 1: expected a file .*"), ("", r"x\.tsv: no rows"),
    ("file\tlabel\n", r"x\.tsv: no rows"), (b"a.png\tc\xe9\n", r"x\.tsv line 1: not UTF-8; .*"),
    ("a.png\tc\0\n", r"x\.tsv line 1: a NUL character; .*")])
def test_bad_tables_are_rejected(text, expected, cwd, capfd):
    write("a.png", PIXELS[0])
    write("x.tsv", text if isinstance(text, bytes) else text.encode())
    assert_data_rejected(capfd, expected, "x.tsv")


def test_an_unpacked_npz(tmp_path):
    arrays = dict(images=PIXELS, labels=np.arange(4), test_images=PIXELS[:2], test_labels=np.array([3, 4]))
    np.savez(tmp_path / "x.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "x.npz") as file:
        file.extractall(tmp_path / "x")
    for name in ("x.npz", "x"):
        train, test = read_images(tmp_path / name)
        assert np.array_equal(train.images, PIXELS) and train.labels.tolist() == [0, 1, 2, 3]
        assert np.array_equal(test.images, PIXELS[:2]) and test.labels.tolist() == [3, 4]


def test_folders_train_and_test_are_classes_but_files_are_cifar_100(tmp_path):
    for i, name in enumerate(("train", "test")):
        write(tmp_path / "folder" / name / "a.png", PIXELS[i])
    found, _ = read_images(tmp_path / "folder", workers=0)
    assert found.labels.tolist() == [0, 1] and np.array_equal(pixels(found), PIXELS[[1, 0]])
    fine = {b"data": FLAT, b"fine_labels": [7, 99, 0, 7], b"coarse_labels": [1, 2, 3, 4]}
    write(tmp_path / "train", pickle.dumps(fine))
    write(tmp_path / "test", pickle.dumps(fine | {b"data": FLAT[:1], b"fine_labels": [5]}))
    write(tmp_path / "meta", pickle.dumps({b"fine_label_names": [b"apple"]}))
    train, test = read_images(tmp_path)
    assert np.array_equal(train.images, PIXELS) and train.labels.tolist() == [7, 99, 0, 7]
    assert np.array_equal(test.images, PIXELS[:1]) and test.labels.tolist() == [5]


def test_large_arrays_stay_on_disk(tmp_path, monkeypatch):
    """The views equal those of arrays in memory. If the .npy is truncated during training, UserError."""
    np.save(tmp_path / "x.npy", PIXELS)
    np.save(tmp_path / "y.npy", np.asfortranarray(PIXELS))
    held, _ = read_images(tmp_path / "x.npy")
    monkeypatch.setattr(formats, "total_memory", lambda: 4 * PIXELS.nbytes - 1)
    rows, _ = read_images(tmp_path / "x.npy")
    assert isinstance(rows.images, NpyRows) and torch.is_tensor(held.images) and len(rows) == 4
    assert torch.is_tensor(read_images(tmp_path / "y.npy")[0].images)            # rows are not contiguous
    numbers, cpu = np.array([3, 0, 3]), torch.device("cpu")
    boxes = CROPS.sample_boxes(1, 0, numbers, rows.sizes(numbers), 2)
    views = [next(source.load_views([(numbers, boxes)], 8, True, cpu)) for source in (rows, held)]
    assert torch.equal(*views) and rows.default_view_size(224) == held.default_view_size(224) == 32
    os.truncate(tmp_path / "x.npy", PIXELS.nbytes - 1)
    with pytest.raises(UserError, match="x.npy: was truncated while it was read"):
        next(rows.load_views([(numbers, boxes)], 8, True, cpu))
