"""Files of pictures: what is there is read, whatever is not ends in one line, and nothing in them is run."""
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
from kernels.training.cli import Fault
from kernels.training.images import formats, loading, pickles
from kernels.training.images.formats import read_pictures
from kernels.training.images.loading import NpyRows
from running import refuse, run
from simclr import CROPS

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
FLAT = PIXELS.transpose(0, 3, 1, 2).reshape(4, 3072)


def put(path, content=b""):
    """A file of bytes, or of a picture."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content) if isinstance(content, bytes) else Image.fromarray(content).save(path)
    return path


def refuse_data(capfd, wanted, data="x"):
    short = "--model resnet-small --steps 1 --probe-epochs 0".split()              # where it does not refuse
    refuse("simclr", capfd, wanted, "--data", data, "--batch-size", 2, *short)


# ── pickles ──


def old_pickle(by_columns=False):
    """A batch as Python 2 wrote CIFAR's, protocol 2: its strings are bytes, and so are the pixels."""
    data = FLAT.tobytes("F" if by_columns else "C")
    return (b"\x80\x02}q\x01(U\x0bbatch_labelU\x06one ofU\x04datacnumpy.core.multiarray\n_reconstruct\nq\x03"
            b"cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x04M\x00\x0c\x86cnumpy\ndtype\nq\x06"
            b"U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            + b"I%02d\nT" % by_columns + struct.pack("<i", len(data)) + data + b"tb"
            b"U\x0bfine_labels](K\x00K\x01M\x00\x01K\x03eU\tfilenames](U\x01aU\x01bU\x01cU\x01deu.")


def before_numpy_2(content):
    """A pickle as numpy wrote it that had its modules elsewhere."""
    for name in (b"multiarray", b"numeric"):
        new, old = b"numpy._core." + name, b"numpy.core." + name
        content = content.replace(b"\x8c%c%s" % (len(new), new), b"\x8c%c%s" % (len(old), old))
        content = content.replace(b"c" + new, b"c" + old)
    return content


def batch(data=FLAT, labels=(0, 1, 256, 3)):
    return {b"batch_label": b"one of", b"data": data, b"labels": list(labels), b"filenames": [b"a", b"\xff"]}


NEW = {f"protocol {i}": pickle.dumps(batch(), i) for i in range(6)}
NEW |= {f"by columns {i}": pickle.dumps(batch(np.asfortranarray(FLAT)), i) for i in range(6)}
OLD = {"Python 2": old_pickle(), "Python 2 by columns": old_pickle(True)}


@pytest.mark.parametrize("content", [*NEW.values(), *OLD.values()], ids=[*NEW, *OLD])
def test_batches_that_python_wrote(content, tmp_path):
    for written in (content, before_numpy_2(content)):
        put(tmp_path / "data_batch_1", written)
        found, test = read_pictures(tmp_path)
        assert np.array_equal(found.images, PIXELS) and test is None
        assert found.labels.tolist() == [0, 1, 256, 3]


class Call:
    """Pickled, it asks for a call."""
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


# (a pickle, what is told of it): to unpickle the first three runs a command, others end the process
ATTACKS = [
    (pickle.dumps(os.system), "posix.system, which no CIFAR batch does"),
    (pickle.dumps({b"data": Call(os.system, ("touch ran",))}), "posix.system, which no CIFAR batch does"),
    (pickle.dumps(Call(eval, ("open('ran', 'w')",)), 0), r"__?builtin.*\.eval, which no CIFAR batch does"),
    (b"cnumpy.f2py.__main__\ndtype\n.", "numpy.f2py.__main__.dtype, which no CIFAR batch does"),
    (b"\x80\x04\x8c\x05numpy\x8c\x0btesting.x.y\x93.", "numpy.testing.x.y, which no CIFAR batch does"),
    (b"\x80\x04\x8c\x05a\nb\rc\x8c\x01d\x93.", r"a\\nb\\rc.d, which no CIFAR batch does"),
    (b"cbuiltins\ngetattr\n(cnumpy\nndarray\nS'tobytes'\ntR.", "builtins.getattr, which no CIFAR batch does"),
    (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I1\ntcnumpy\ndtype\n"
     b"(S'O8'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI63\ntbI00\nS'AAAAAAAA'\ntb.",
     "a numpy.dtype that is no array of uint8, which no CIFAR batch does"),
    (b"cnumpy\nndarray\n}S'shape'\nI1\nsb.", "a BUILD that no CIFAR batch does"),
    (b"cnumpy.core.multiarray\n_reconstruct\n(N}S'__code__'\nI1\nstb.", "a BUILD that no CIFAR batch does"),
    (b"(icollections\nCounter\n.", "INST, which no CIFAR batch does"),
    (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ, which no CIFAR batch does"),
    (b"\x80\x02\x82\x01.", "EXT1, which no CIFAR batch does"),
    (b"Pfile\n.", "PERSID, which no CIFAR batch does"),
    (b"NQ.", "BINPERSID, which no CIFAR batch does"),
    (b"})" + b"\x85" * 300_000 + b"Ns.", "keys that are no text, which no CIFAR batch does"),
    (b"})" + b"q\x00h\x00\x86" * 60 + b"Ns.", "keys that are no text, which no CIFAR batch does"),
    (b"cnumpy._core.numeric\n_frombuffer\n(C\x04AAAAcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I4\nI1000000000000\nt"
     b"VC\ntR.", "an array whose type, shape and bytes do not agree"),
    (b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.", None),
    (b"\x80\x04\x96" + struct.pack("<Q", 2**40) + b"x.", None),
    (b"\x80\x02\x8b\xff\xff\xff\x7fx.", None), (b"", None), (b"\x80", None), (b"\xff\xff", None),
    (b"s.", None), (b"h\x07.", None), (b"}(S'a'\nu.", None), (b"I1\nI1\nR.", None), (old_pickle()[:-9], None)]


@pytest.mark.parametrize("content, wanted", ATTACKS, ids=range(len(ATTACKS)))
def test_pickles_run_nothing(content, wanted, here, capfd):
    put("x/data_batch_1", content)
    known = {name for name in sys.modules if name.startswith("numpy.")}
    attributes = {name: vars(np)[name] for name in ("ndarray", "dtype")}
    refuse_data(capfd, rf"x/data_batch_1: holds {wanted}" if wanted else r"x/data_batch_1: .*")
    assert {name for name in sys.modules if name.startswith("numpy.")} == known
    assert attributes.items() <= vars(np).items()


def test_pickles_take_no_more_than_they_are(monkeypatch):
    """A number of the memo is no length, a text that is encoded again and again is there once."""
    assert pickles.read_pickle(b"Nr\xff\xff\xff\x3f.") is None
    once = b"(c_codecs\nencode\nq\x00(X\x03\x00\x00\x00abcX\x06\x00\x00\x00latin1tq\x01"
    _, _, *made = pickles.read_pickle(once + b"h\x00h\x01R" * 99 + b"t.")
    assert set(made) == {b"abc"} and len({id(value) for value in made}) == 1
    monkeypatch.setattr(pickles, "MOST", 1000)
    with pytest.raises(ValueError, match="more than 1,000 parts"):
        pickles.read_pickle(b"](" + b"N" * 1000 + b"e.")


LAUGHS = []
for _ in range(40):
    LAUGHS = [LAUGHS, LAUGHS]


@pytest.mark.parametrize("value, wanted", [
    ([1, 2], "holds a list, wanted a dict with data and labels"),
    ({}, r"data are no array, wanted uint8 \(N, 3072\)"), (batch({}), "data are no array, .*"),
    (batch(FLAT[0]), r"data are \(3072,\), .*"), (batch(FLAT[:, 1:]), r"data are \(4, 3071\), .*"),
    (batch(FLAT / 1), r"holds a numpy.dtype that is no .*"),
    (batch(FLAT[:0], []), ".*"),
    *(({b"data": FLAT, b"labels": labels}, r"labels are no list of 4 integers from 0 up, below 2\^63")
      for labels in (None, [1], [0, 1, 2, 3.0], [0, 1, 2, True], [0, 1, 2, -1], [2**63] * 4, [10**5000] * 4,
                     [LAUGHS] * 4))])
def test_values_that_are_no_batch(value, wanted, here, capfd):
    put("x/data_batch_1", pickle.dumps(value))
    refuse_data(capfd, rf"x/data_batch_1: {wanted}")


# ── arrays ──


def npy(shape, dtype="|u1", content=b""):
    """An .npy file of what it claims and of what it has."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, dict(descr=dtype, fortran_order=False, shape=shape))
    return file.getvalue() + content


def npz(path, compression=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)


IMAGES = npy((4, 2, 2, 3), content=bytes(48))


@pytest.mark.parametrize("members, wanted", [
    (dict(images=npy((2**40, 8, 8, 3))), r"images are cut off, 0 of 211,106,232,532,992 bytes; copy .*"),
    (dict(images=npy((4, 2, 2, 3), content=bytes(47))), r"images are cut off, 47 of 48 bytes; .*"),
    (dict(images=IMAGES, labels=npy((2**40,), "<i8")), r"labels are int64 \(1099511627776,\), wanted .*"),
    (dict(images=IMAGES, labels=npy((4,), "|S0")), r"labels are .S0 \(4,\), wanted 4 int.*"),
    (dict(images=IMAGES, labels=npy((4,), "|O", pickle.dumps([Call(os.system, ("touch ran",))]))),
     r"labels are object \(4,\), wanted 4 .*"),
    (dict(images=IMAGES, labels=npy((4,), "<f8", bytes(32))), r"labels are float64 \(4,\), wanted 4 int.*"),
    (dict(images=IMAGES, labels=npy((3,), "<i8", bytes(24))), r"labels are int64 \(3,\), wanted 4 int.*"),
    (dict(images=npy((4, 2, 2, 3), "<f8", bytes(384))), r"images are float64 \(4, 2, 2, 3\), wanted .*"),
    (dict(images=IMAGES, test_images=npy((2, 2, 3), content=bytes(12))), r"test_images are uint8 \(2, 2, .*"),
    (dict(images=IMAGES, labels=npy((4,), "|i1", b"\0\1\2\xfd")), "labels from -3 to 2, wanted 4 .*"),
    (dict(images=IMAGES, labels=npy((4,), "<u8", b"\xff" * 32)), r"labels from 18446744073709551615 .*"),
    (dict(images=IMAGES, test_images=npy((2**50, 2, 2, 3))), "test_images are cut off, 0 of .*"),
    (dict(images=npy((4, 0, 2, 3))), r"images are uint8 \(4, 0, 2, 3\), wanted .*"),
    (dict(images=npy((-4, -2, 2, 3))), r"images are uint8 \(-4, -2, 2, 3\), wanted .*"),
    (dict(images=b"\x93NUMPY\1\0\xff\xff" + b"(" * 70_000), ".*"), (dict(images=b""), ".*"),
    (dict(a=b"", b=b""), "holds a, b; wanted images, and labels, test_images, test_labels")])
def test_arrays_that_are_not_what_they_claim(members, wanted, here, capfd):
    npz("x.npz", **members)
    refuse_data(capfd, rf"x\.npz: {wanted}", "x.npz")
    if list(members) == ["images"]:
        put("x.npy", members["images"])
        refuse_data(capfd, rf"x\.npy: {wanted}", "x.npy")


def test_arrays_that_memory_cannot_hold(here, capfd, monkeypatch):
    """A megabyte of zeros is a kilobyte when it is packed: refused by its head, before it is unpacked."""
    monkeypatch.setattr(cli, "memory", lambda: 2**19)
    monkeypatch.setattr(np.lib.format, "read_array", Mock(side_effect=AssertionError))
    npz("x.npz", zipfile.ZIP_DEFLATED, images=npy((2**10, 16, 16, 3), content=bytes(3 * 2**18)))
    assert Path("x.npz").stat().st_size < 2000
    refuse_data(capfd, r"x\.npz would need .* GB of memory, this machine has .* GB", "x.npz")


# ── folders ──


def png(width, height):
    """What a picture of this size begins with."""
    def chunk(kind, content):
        tail = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I4s", len(content), kind) + content + tail
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def listen(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)


UNREADABLE, SPECIAL = r"not readable \(\w+\)", "a pipe, a socket or a device"
PICTURES = [
    ("b.png", lambda path: os.mkfifo(path), SPECIAL), ("b.png", listen, SPECIAL),
    ("b.png", lambda path: os.symlink("/dev/zero", path), SPECIAL),
    ("b.png", lambda path: os.symlink("nowhere", path), "No such file or directory"),
    ("b.png", lambda path: put(path), UNREADABLE), ("b.png", lambda path: put(path, b"a text"), UNREADABLE),
    ("b.png", lambda path: put(path, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n"),
     UNREADABLE),
    ("b.jpg", lambda path: put(path, jpeg(PIXELS[0])[:-400]), UNREADABLE),
    ("b.png", lambda path: put(path, png(32, 32)), UNREADABLE),
    ("b.png", lambda path: put(path, png(50_000, 50_000)), "50000 x 50000 pixels, wanted 1 to 67,108,864"),
    ("b.png", lambda path: put(path, png(9_500, 9_500)), "9500 x 9500 pixels, wanted 1 to 67,108,864"),
    ("b.png", lambda path: put(path, png(0, 0)), UNREADABLE),
    ("b.ppm", lambda path: put(path, b"P6 0 0 255 "), UNREADABLE),
    ("b.png", lambda path: put(path, PIXELS[0, :, :, 0].astype(np.uint16)), "its mode is I;16, wanted 8 .*"),
    ("b.tif", lambda path: put(path, PIXELS[0, :, :, 0] / np.float32(1)), "its mode is F, wanted 8 bits .*"),
    ("b\n\x1b[2J\udcff.png", lambda path: put(path), UNREADABLE)]


@pytest.mark.parametrize("name, make, wanted", PICTURES, ids=range(len(PICTURES)))
def test_what_is_no_picture(name, make, wanted, here, capfd):
    """A pipe would block, a device never end, a large one fill the memory, a warning be a second line."""
    put("x/a.png", PIXELS[0])
    make(f"x/{name}")
    told = r"b\\n\\x1b\[2J.+" if "\n" in name else name
    refuse_data(capfd, f"x: 1 of 2 pictures cannot be read: {told}: {wanted}; repair or delete them, or "
                       "leave them out by --skip-damaged")


def put_damaged():
    """Four of ten that cannot be read, two classes."""
    for i in range(10):
        put(f"x/{'ab'[i % 2]}/{i}.png", PIXELS[i % 4])
    put("x/a/4.png", b"a text")
    put("x/b/5.png", PIXELS[0, :, :, 0].astype(np.uint16))
    os.rename("x/a/6.png", "x/a/6.jpg")
    put("x/a/6.jpg", jpeg(PIXELS[0])[:-400])
    put("x/b/7.png", png(50_000, 50_000))


DAMAGED = (r"x: 4 of 10 pictures cannot be read: a/4\.png: not .*; a/6\.jpg: not .*; b/5\.png: its mode is "
           r"I;16, .*; b/7\.png: 50000 x .*")


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_pictures_are_named_or_left_out(workers, here, capfd):
    put_damaged()
    refuse_data(capfd, DAMAGED, "x")
    flags = "--data x --skip-damaged --model resnet-small --batch-size 4 --steps 1 --size 8 --workers"
    said = run("simclr", Path("out"), *flags.split(), workers).said
    assert re.fullmatch(DAMAGED, said["skipped"]) and said["simclr"].startswith("unsupervised: 6 pictures")
    found, _ = read_pictures("x", workers=workers, skip=True)
    assert re.fullmatch(rf"skipped  {DAMAGED}\n", capfd.readouterr().out)
    assert found.labels.tolist() == [0] * 3 + [1] * 3 and len(found) == 6
    assert [Path(found.path(row)).name for row in range(6)] == [f"{i}.png" for i in (0, 2, 8, 1, 3, 9)]
    assert np.array_equal(pixels(found), PIXELS[[0, 2, 0, 1, 3, 1]])
    for path in Path("x").glob("*/*"):
        put(path, b"")
    with pytest.raises(Fault, match="x: 10 of 10 pictures cannot be read: .*"):
        read_pictures("x", workers=workers, skip=True)


def test_of_many_damaged_pictures_the_first_are_named(here, monkeypatch):
    monkeypatch.setattr(loading, "MOST_NAMED", 20)
    for i in range(200):
        put(f"x/{i:03}.png")
    with pytest.raises(Fault, match=r"200 of 200 .*; 019\.png: [^;]*; 180 more; repair"):
        read_pictures("x", workers=0)


def test_without_pillow(here, monkeypatch):
    put("x/a.png", b"")
    put("x/b.png", b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Fault) as fault:
        read_pictures("x", workers=0)
    assert str(fault.value) == "x: reading it wants the package Pillow: pip install Pillow"


@pytest.mark.parametrize("make, wanted", [
    (lambda: os.mkfifo("x"), "x: wanted a folder of pictures, .*"),
    (lambda: os.symlink("/dev/zero", "x"), "x: wanted a folder of pictures, .*"),
    (lambda: os.symlink("x", "x"), "x: Too many levels of symbolic links"),
    (lambda: os.mkdir("x") or os.symlink("b.png", "x/b.png"), r"x/b\.png: Too many levels of symbolic links"),
    (lambda: put("x/a/a.png", PIXELS[0]) and os.symlink("..", "x/a/b"), "x/a/b: a link to x, whose .*"),
    (lambda: put("x/a/a.png", PIXELS[0]) and os.symlink("a", "x/b"), "x/b: a link to x/a, whose .*"),
    (lambda: os.mkdir("x") or os.mkfifo("x/data_batch_1"), "x/data_batch_1: a pipe, a socket .*"),
    (lambda: os.mkdir("x") or os.mkfifo("x/images.npy"), r"x/images\.npy: a pipe, a socket .*"),
    (lambda: put("x/a.txt", b"x"), r"x: no pictures; wanted \.bmp, .*"),
    (lambda: put("x/a\nb/1.png", PIXELS[0]) and put("x/1.png", PIXELS[1]), r"x: .* folders a\\nb; .*")])
def test_what_is_no_folder_of_pictures(make, wanted, here, capfd):
    make()
    refuse_data(capfd, wanted)


def pixels(source):
    """All pictures of Files of one size, as they are."""
    sizes = source.sizes(slice(None))
    boxes = np.concatenate([0 * sizes, sizes], 1)[None]
    (parts,) = source.decode([(np.arange(len(source)), boxes)], int(sizes[0, 0]), cubic=False)
    return torch.cat(parts, 1)[0].numpy()


def test_odd_names_and_links(tmp_path):
    """Links to folders, names that are no text and folders that are called x.png are right."""
    for i, name in enumerate(("a/x.png/1.png", "a/x.png/\udcff\n.png", "x/b/2.png")):
        put(tmp_path / name, PIXELS[i])
    put(tmp_path / "x" / "notes.txt", b"no picture")
    (tmp_path / "x" / "c").symlink_to(tmp_path / "a")
    found, _ = read_pictures(tmp_path / "x")
    assert np.array_equal(pixels(found), PIXELS[[2, 0, 1]]) and found.labels.tolist() == [0, 1, 1]


# ── tables, unpacked arrays, CIFAR-100 ──


@pytest.mark.parametrize("name, text, labels", [
    ("labels.tsv", "file\tlabel\nsub/b.png\tdog\na.png\tcat\nsub/c.png\tdog\n", [1, 0, 1]),
    ("labels.tsv", "sub/b.png\t10\na.png\t9\nsub/c.png\t10\n", [0, 1, 0]),    # names: in their order
    ("labels.csv", 'sub/b.png,"a, b"\na.png,c\nsub/c.png,c\n', [0, 1, 1]),
    ("labels.csv", "file\nsub/b.png\na.png\nsub/c.png\n", None)])
def test_tables_of_files(name, text, labels, tmp_path, monkeypatch):
    """Named from the table's own folder on, wherever one stands."""
    for i, picture in enumerate(("a.png", "sub/b.png", "sub/c.png")):
        put(tmp_path / "data" / picture, PIXELS[i])
    put(tmp_path / "data" / name, text.encode())
    monkeypatch.chdir(tmp_path)
    found, test = read_pictures(f"data/{name}", workers=0)
    assert np.array_equal(pixels(found), PIXELS[[1, 0, 2]]) and test is None
    assert (found.labels if labels is None else found.labels.tolist()) == labels
    assert len(found.names) == (2 if labels else 0)


@pytest.mark.parametrize("text, wanted", [
    ("a.png\tcat\nnone.png\tdog\n", r"x\.tsv: 1 of 2 pictures cannot be read: none\.png: No such file .*"),
    ("a.png\tcat\tdog\n", r"x\.tsv line 1: wanted a file and a label, or a file"),
    ("a.png\tcat\nb.png\n", r"x\.tsv line 2: .*"), ("a.png\t\n", r"x\.tsv line 1: wanted a file .*"),
    ("\tcat\n", r"x\.tsv line 1: wanted a file .*"), ("", r"x\.tsv: no rows"),
    ("file\tlabel\n", r"x\.tsv: no rows"), (b"a.png\tc\xe9\n", r"x\.tsv line 1: not UTF-8; .*"),
    ("a.png\tc\0\n", r"x\.tsv line 1: a NUL character; .*")])
def test_tables_that_are_none(text, wanted, here, capfd):
    put("a.png", PIXELS[0])
    put("x.tsv", text if isinstance(text, bytes) else text.encode())
    refuse_data(capfd, wanted, "x.tsv")


def test_an_unpacked_npz(tmp_path):
    arrays = dict(images=PIXELS, labels=np.arange(4), test_images=PIXELS[:2], test_labels=np.array([3, 4]))
    np.savez(tmp_path / "x.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "x.npz") as file:
        file.extractall(tmp_path / "x")
    for name in ("x.npz", "x"):
        train, test = read_pictures(tmp_path / name)
        assert np.array_equal(train.images, PIXELS) and train.labels.tolist() == [0, 1, 2, 3]
        assert np.array_equal(test.images, PIXELS[:2]) and test.labels.tolist() == [3, 4]


def test_folders_that_are_called_train_and_test_are_classes_and_files_are_cifar_100(tmp_path):
    for i, name in enumerate(("train", "test")):
        put(tmp_path / "folder" / name / "a.png", PIXELS[i])
    found, _ = read_pictures(tmp_path / "folder", workers=0)
    assert found.labels.tolist() == [0, 1] and np.array_equal(pixels(found), PIXELS[[1, 0]])
    fine = {b"data": FLAT, b"fine_labels": [7, 99, 0, 7], b"coarse_labels": [1, 2, 3, 4]}
    put(tmp_path / "train", pickle.dumps(fine))
    put(tmp_path / "test", pickle.dumps(fine | {b"data": FLAT[:1], b"fine_labels": [5]}))
    put(tmp_path / "meta", pickle.dumps({b"fine_label_names": [b"apple"]}))
    train, test = read_pictures(tmp_path)
    assert np.array_equal(train.images, PIXELS) and train.labels.tolist() == [7, 99, 0, 7]
    assert np.array_equal(test.images, PIXELS[:1]) and test.labels.tolist() == [5]


def test_rows_that_memory_need_not_hold(tmp_path, monkeypatch):
    """They stay in their .npy, and give the same views; where it is cut meanwhile that is told."""
    np.save(tmp_path / "x.npy", PIXELS)
    np.save(tmp_path / "y.npy", np.asfortranarray(PIXELS))
    held, _ = read_pictures(tmp_path / "x.npy")
    monkeypatch.setattr(formats, "memory", lambda: 4 * PIXELS.nbytes - 1)
    rows, _ = read_pictures(tmp_path / "x.npy")
    assert isinstance(rows.images, NpyRows) and torch.is_tensor(held.images) and len(rows) == 4
    assert torch.is_tensor(read_pictures(tmp_path / "y.npy")[0].images)            # by columns it is no row
    numbers, cpu = np.array([3, 0, 3]), torch.device("cpu")
    boxes = CROPS.draw(1, 0, numbers, rows.sizes(numbers), 2)
    views = [next(source.load_views([(numbers, boxes)], 8, True, cpu)) for source in (rows, held)]
    assert torch.equal(*views) and rows.usual_size(224) == held.usual_size(224) == 32
    os.truncate(tmp_path / "x.npy", PIXELS.nbytes - 1)
    with pytest.raises(Fault, match="x.npy: was cut while it was read"):
        next(rows.load_views([(numbers, boxes)], 8, True, cpu))
