"""Image files, arrays and CIFAR batches that are damaged, huge, or contain programs."""
import io
import itertools
import os
import pickle
import struct
import zipfile
import zlib
from functools import partial

import numpy as np
from cases import Case, all_of, change_file, write_file
from PIL import Image
from texts import NOISE, flip_bits

case = partial(Case, "images")
scripts, flags = itertools.cycle(["moco", "simclr"]), itertools.cycle(["--data", "--dev"])
GREY = np.random.default_rng(0).integers(0, 256, (16, 16), np.uint8)


def image_bytes(kind, mode="RGB", size=(16, 16), **more):
    """Return the bytes of an image file of this format (kind), mode and size."""
    Image.fromarray(GREY).convert(mode).resize(size).save(file := io.BytesIO(), kind, **more)
    return file.getvalue()


def png_bytes(width, height, body=b""):
    """Return the bytes of a PNG file with this width and height in its header."""
    parts = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(body))
    chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(
        ">I", zlib.crc32(name + data))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in (*parts, (b"IEND", b"")))


def write_photos(size=(16, 16)):
    """Return a `make` that writes eight images to photos/."""
    return all_of(*(write_file(f"photos/{i}.png", image_bytes("PNG", size=size)) for i in range(8)))


ENCODED = {kind.lower(): image_bytes(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")}
BAD_FILES = {
    **{f"{kind} truncated": (f"x.{kind}", data[: len(data) // 2]) for kind, data in ENCODED.items()},
    **{f"{kind} flipped": (f"x.{kind}", flip_bits(data)) for kind, data in ENCODED.items()},
    "nothing": ("x.png", b""), "noise": ("x.jpg", NOISE), "text": ("x.png", b"no image\n"),
    "50,000 x 50,000": ("x.png", png_bytes(50_000, 50_000)),
    "the first": ("0.png", png_bytes(50_000, 50_000)),
    "12,000 x 12,000": ("x.png", png_bytes(12_000, 12_000, bytes(10**6))),
    "0 x 0": ("x.png", png_bytes(0, 0)),
    "2**31 x 1": ("x.png", png_bytes(2**31 - 1, 1)),
    "a newline in its name": ("x\ny.png", b"no"), "an escape in its name": ("x\x1b[2J.png", b"no"),
    "bytes in its name": (os.fsdecode(b"x\xff.png"), b"no"), "a newline in a label": ("a\nb/y.png", b"no"),
    "in a folder": ("cat/y.png", ENCODED["png"])}
GOOD_FORMATS = {"grey": ("PNG", "L"), "palette": ("PNG", "P"), "16 bits": ("PNG", "I;16"),
                "transparent": ("PNG", "RGBA"), "another size": ("PNG", "RGB", (99, 3)),
                "ink": ("JPEG", "CMYK"), "floats": ("TIFF", "F")}
ODD_FILES = {"a pipe": os.mkfifo, "a folder": os.mkdir,
             "unreadable": lambda path: (path.touch(), path.chmod(0)),
             "a dangling link": lambda path: path.symlink_to("none"),
             "itself": lambda path: path.symlink_to(path.name),
             "zeros without end": lambda path: path.symlink_to("/dev/zero")}


def folder_cases():
    for name, (file, data) in BAD_FILES.items():
        expected = "either" if "flipped" in name or "trunc" in name else "one line"
        yield case(f"folder: {name}", next(scripts), ["--data", "photos"],
                   all_of(write_photos(), write_file(f"photos/{file}", data)), expected)
    for name, (kind, *shape) in GOOD_FORMATS.items():
        yield case(f"folder: {name}", next(scripts), ["--data", "photos"],
                   all_of(write_photos(), write_file(f"photos/x.{kind.lower()}", image_bytes(kind, *shape))))
    for workers, name in enumerate(("text", "50,000 x 50,000", "an escape in its name")):
        argv = ["--data", "photos", "--skip-damaged", "--workers", workers]
        file, data = BAD_FILES[name]
        yield case(f"skipped: {name}", next(scripts), argv,
                   all_of(write_photos(), write_file(f"photos/{file}", data)),
                   "accepted")
    nothing = all_of(*(write_file(f"photos/{i}.png", png_bytes(9, 9)) for i in range(8)))
    yield case("skipped: all", next(scripts), ["--data", "photos", "--skip-damaged"], nothing, "one line")
    few = all_of(write_photos(), write_file("photos/7.png", b""))
    yield case("skipped: too many", next(scripts), ["--data", "photos", "--skip-damaged"], few, "one line")
    for name, make in ODD_FILES.items():
        expected = "either" if name == "a folder" else "one line"              # an empty folder may pass
        yield case(f"folder: {name}", next(scripts), ["--data", "photos"], enforce_permissions=True,
                   expected=expected,
                   make=all_of(write_photos(), lambda here, make=make: make(here / "photos/x.png")))
        yield case(f"npz: {name}", next(scripts), [next(flags), "a.npz"], enforce_permissions=True,
                   expected="one line",
                   make=lambda here, make=make: make(here / "a.npz"))
    loop = lambda here: (here / "photos/x").symlink_to(".")
    yield case("folder: a loop", "moco", ["--data", "photos"], all_of(write_photos(), loop))
    for size, script in itertools.product((1, 2), ("moco", "simclr")):
        yield case(f"folder: {size} x {size}", script, ["--data", "photos"], write_photos((size, size)))
    yield case("folder: empty", next(scripts), ["--data", "e"], lambda here: os.mkdir(here / "e"), "one line")


class Bomb:
    """Object that writes the file pwned when it is unpickled."""
    write = "open('pwned', 'w').close()"

    def __reduce__(self):
        return exec, (self.write,)


# ── tables of image files, classifiers ──

ROWS = "".join(f"photos/{i}.png\t{'ab'[i % 2]}\n" for i in range(8))
TABLES = {"good": ROWS, "a header": "file\tlabel\n" + ROWS, "a missing file": ROWS + "photos/8.png\ta\n",
          "3 columns": ROWS.replace("\n", "\tc\n"), "a short row": ROWS + "photos/1.png\n", "empty": "",
          "a header alone": "file\tlabel\n", "not UTF-8": ROWS.encode() + b"photos/1.png\t\xff\n",
          "NULs": ROWS + "photos/\0.png\ta\n", "no labels": ROWS.replace("\ta", "").replace("\tb", ""),
          "a folder": ROWS + "photos\ta\n", "above itself": ROWS + "../../photos/1.png\ta\n",
          "/dev/zero": ROWS + "/dev/zero\ta\n", "long names": ROWS + "a" * 5000 + "\ta\n",
          "an escape": ROWS + "\x1b[2J.png\ta\n", "itself": ROWS + "labels.tsv\ta\n"}
BAD_HEADS = {"half": lambda data: data[: len(data) // 2], "flipped": flip_bits, "empty": lambda data: b"",
             "noise": lambda data: NOISE, "2**60 bytes": lambda data: struct.pack("<Q", 2**60) + data[8:],
             "other layers": lambda data: data.replace(b"Linear", b"ReLU  "),
             "a program": lambda data: pickle.dumps(Bomb())}


def table_cases():
    """Yield cases with labels.tsv, a table of image files and labels, and with bad classifier heads."""
    for name, text in TABLES.items():
        expected = "accepted" if name in ("good", "a header", "no labels") else "one line"
        yield case(f"table: {name}", next(scripts), ["--data", "labels.tsv"],
                   all_of(write_photos(), write_file("labels.tsv", text)), expected)
    tune = ["--finetune", "labels.tsv", "--data", "labels.tsv", "--model"]
    make = all_of(write_photos(), write_file("labels.tsv", ROWS))
    yield case("a classifier", "simclr", [*tune, "net"], make, "accepted")
    yield case("a classifier on no head", "simclr", [*tune, "resnet-small"], make, "one line")
    yield case("a classifier without labels", "simclr", ["--finetune", "photos", "--data", "photos"], make,
               "one line")
    for name, edit in BAD_HEADS.items():
        yield case(f"head: {name}", "simclr", [*tune, "net"],
                   all_of(make, change_file("net/head.safetensors", edit)),
                   "either" if name == "flipped" else "one line")


# ── arrays ──


def npz_bytes(**arrays):
    """Return the bytes of an .npz file with these arrays, each an array or the bytes of an .npy file."""
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as parts:
        for name, array in arrays.items():
            if not isinstance(array, bytes):
                np.save(part := io.BytesIO(), array, allow_pickle=True)
                array = part.getvalue()
            parts.writestr(f"{name}.npy", array)
    return file.getvalue()


def npy_bytes(shape, dtype="|u1", data=b""):
    """Return the bytes of an .npy file with this shape and dtype in its header."""
    head = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head + data


PIXELS = np.random.default_rng(1).integers(0, 256, (16, 16, 16, 3), np.uint8)
LABELS = np.arange(16) % 4
GOOD_ARRAYS = dict(images=PIXELS, labels=LABELS, test_images=PIXELS[:4], test_labels=LABELS[:4])
BAD_IMAGES = {"floats": PIXELS / 255, "grey": PIXELS[..., 0], "4 channels": PIXELS[..., [0, 1, 2, 0]],
              "none": PIXELS[:0],
              "0 pixels": PIXELS[:, :0], "scalar": np.uint8(3), "strings": np.array(["a"]),
              "no numpy": b"junk",
              "a program": np.array([Bomb()], object), "2**40 images": npy_bytes((2**40, 16, 16, 3)),
              "2**62 x 2**62": npy_bytes((2**62, 2**62, 4, 3)), "-1 images": npy_bytes((-1, 16, 16, 3)),
              "too few": npy_bytes((16, 16, 16, 3), data=b"a"),
              "a header that runs": npy_bytes(f"exec({Bomb.write!r})"),
              "objects": npy_bytes((16, 16, 16, 3), "|O")}
BAD_LABELS = {"labels below 0": LABELS - 1, "float labels": LABELS / 2, "few labels": LABELS[:9],
              "labels of 2**63": LABELS.astype(np.uint64) + 2**63, "2**40 labels": npy_bytes((2**40,), "<i8"),
              "object labels": LABELS.astype(object)}


def array_cases():
    arrays = {name: dict(images=array) for name, array in BAD_IMAGES.items()}
    arrays |= {name: GOOD_ARRAYS | dict(labels=array) for name, array in BAD_LABELS.items()}
    arrays |= {"other names": dict(pictures=PIXELS)}
    files = {f"npz: {name}": ("a.npz", npz_bytes(**parts)) for name, parts in arrays.items()}
    files |= {f"npy: {name}": ("a.npy", array) for name,
              array in BAD_IMAGES.items() if isinstance(array, bytes)}
    for name, (file, data) in files.items():
        yield case(name, next(scripts), ["--data", file], write_file(file, data), "one line")
    for name, data in {"truncated": npz_bytes(**GOOD_ARRAYS)[:-30],
                       "flipped": flip_bits(npz_bytes(**GOOD_ARRAYS)), "empty": b"",
                       "another test size": npz_bytes(**GOOD_ARRAYS | dict(test_images=PIXELS[:4, :8])),
                       "a label of 10**12": npz_bytes(**GOOD_ARRAYS | dict(labels=LABELS * 10**12)),
                       "a label apart": npz_bytes(**GOOD_ARRAYS | dict(test_labels=LABELS[:4] + 9))}.items():
        yield case(f"npz: {name}", next(scripts), ["--data", "a.npz"], write_file("a.npz", data))


# ── CIFAR ──


def cifar_batch(**more):
    return {b"data": PIXELS.repeat(4, 1)[:, :, :16].reshape(16, 3072), b"labels": LABELS.tolist()} | {
        name.encode(): value for name, value in more.items()}


BAD_PICKLES = {
    **{f"exec, protocol {protocol}": pickle.dumps(cifar_batch(x=Bomb()), protocol) for protocol in (0, 2, 5)},
    "a module that runs": b"cnumpy.f2py.__main__\nmain\n.",
    "numpy.testing": b"cnumpy.testing\nrundocs\n(S'a'\ntR.",
    "a path of names": b"\x80\x04\x8c\x05numpy\x8c\x0cf2py.os.pipe\x93)R.", "no module": b"cnone\nsuch\n.",
    "objects": pickle.dumps(cifar_batch(data=np.array([None] * 16, object))), "an extension": b"\x82\x01.",
    "dtype of objects": b"cnumpy\ndtype\n(S'O8'\nI00\nI01\ntR.",
    "a build": b"cnumpy\nndarray\n}S'a'\nI1\nsb.",
    "2**60 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"a.", "persistent": b"Pname\n.",
    "a frame of 2**60": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
    "a memo of 2**31": b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".",
    "nested deeply": b"(" * 10**5 + b"l" * 10**5 + b".", "a list in itself": b"\x80\x02]q\0(h\0h\0e.",
    "truncated": pickle.dumps(cifar_batch())[:3000], "empty": b"", "a list": pickle.dumps([1]),
    "text labels": pickle.dumps(cifar_batch(labels=["a"] * 16)),
    "few labels": pickle.dumps(cifar_batch(labels=[1, 2])),
    "labels of 10**30": pickle.dumps(cifar_batch(labels=[10**30] * 16)),
    "no data": pickle.dumps({b"labels": [1]}),
    "labels below 0": pickle.dumps(cifar_batch(labels=[-1] * 16)),
    "nested": pickle.dumps(cifar_batch(labels=[[1], []] * 8)),
    "floats": pickle.dumps(cifar_batch(data=np.zeros((16, 3072)))),
    "narrow": pickle.dumps(cifar_batch(data=PIXELS[0, 0]))}


def cifar_cases():
    goods = {f"good, protocol {protocol}": pickle.dumps(cifar_batch(), protocol) for protocol in (0, 2, 5)}
    for name, data in (BAD_PICKLES | goods).items():
        yield case(f"cifar: {name}", next(scripts), ["--data", "cifar"],
                   write_file("cifar/data_batch_1", data),
                   "accepted" if name in goods else "one line")


def cases():
    for part in (folder_cases, table_cases, array_cases, cifar_cases):
        yield from part()
