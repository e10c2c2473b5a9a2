"""Picture files, arrays and CIFAR batches that are damaged, huge, or programs."""
import io
import itertools
import os
import pickle
import struct
import zipfile
import zlib
from functools import partial

import numpy as np
from cases import Case, both, change, put
from PIL import Image
from texts import NOISE, flipped

case = partial(Case, "pictures")
scripts, flags = itertools.cycle(["moco", "simclr"]), itertools.cycle(["--data", "--dev"])
GREY = np.random.default_rng(0).integers(0, 256, (16, 16), np.uint8)


def encoded(kind, mode="RGB", size=(16, 16), **more):
    """The bytes of a picture."""
    Image.fromarray(GREY).convert(mode).resize(size).save(file := io.BytesIO(), kind, **more)
    return file.getvalue()


def png(width, height, body=b""):
    """A PNG that says it is so large."""
    parts = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(body))
    chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(
        ">I", zlib.crc32(name + data))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in (*parts, (b"IEND", b"")))


def photos(size=(16, 16)):
    return both(*(put(f"photos/{i}.png", encoded("PNG", size=size)) for i in range(8)))


FILES = {kind.lower(): encoded(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")}
BAD = {
    **{f"{kind} truncated": (f"x.{kind}", data[: len(data) // 2]) for kind, data in FILES.items()},
    **{f"{kind} flipped": (f"x.{kind}", flipped(data)) for kind, data in FILES.items()},
    "nothing": ("x.png", b""), "noise": ("x.jpg", NOISE), "text": ("x.png", b"no picture\n"),
    "50,000 x 50,000": ("x.png", png(50_000, 50_000)), "the first": ("0.png", png(50_000, 50_000)),
    "12,000 x 12,000": ("x.png", png(12_000, 12_000, bytes(10**6))), "0 x 0": ("x.png", png(0, 0)),
    "2**31 x 1": ("x.png", png(2**31 - 1, 1)),
    "a newline in its name": ("x\ny.png", b"no"), "an escape in its name": ("x\x1b[2J.png", b"no"),
    "bytes in its name": (os.fsdecode(b"x\xff.png"), b"no"), "a newline in a label": ("a\nb/y.png", b"no"),
    "in a folder": ("cat/y.png", FILES["png"])}
GOOD = {"grey": ("PNG", "L"), "palette": ("PNG", "P"), "16 bits": ("PNG", "I;16"),
        "transparent": ("PNG", "RGBA"), "another size": ("PNG", "RGB", (99, 3)),
        "ink": ("JPEG", "CMYK"), "floats": ("TIFF", "F")}
ODD = {"a pipe": os.mkfifo, "a folder": os.mkdir, "unreadable": lambda path: (path.touch(), path.chmod(0)),
       "a dangling link": lambda path: path.symlink_to("none"),
       "itself": lambda path: path.symlink_to(path.name),
       "zeros without end": lambda path: path.symlink_to("/dev/zero")}


def of_folders():
    for name, (file, data) in BAD.items():
        wanted = "either" if "flipped" in name or "trunc" in name else "one line"
        yield case(f"folder: {name}", next(scripts), ["--data", "photos"],
                   both(photos(), put(f"photos/{file}", data)), wanted)
    for name, (kind, *how) in GOOD.items():
        yield case(f"folder: {name}", next(scripts), ["--data", "photos"],
                   both(photos(), put(f"photos/x.{kind.lower()}", encoded(kind, *how))))
    for workers, name in enumerate(("text", "50,000 x 50,000", "an escape in its name")):
        argv = ["--data", "photos", "--skip-damaged", "--workers", workers]
        file, data = BAD[name]
        yield case(f"skipped: {name}", next(scripts), argv, both(photos(), put(f"photos/{file}", data)),
                   "accepted")
    nothing = both(*(put(f"photos/{i}.png", png(9, 9)) for i in range(8)))
    yield case("skipped: all", next(scripts), ["--data", "photos", "--skip-damaged"], nothing, "one line")
    few = both(photos(), put("photos/7.png", b""))
    yield case("skipped: too many", next(scripts), ["--data", "photos", "--skip-damaged"], few, "one line")
    for name, make in ODD.items():
        wanted = "either" if name == "a folder" else "one line"                # which is empty
        yield case(f"folder: {name}", next(scripts), ["--data", "photos"], bound=True, wanted=wanted,
                   make=both(photos(), lambda here, make=make: make(here / "photos/x.png")))
        yield case(f"npz: {name}", next(scripts), [next(flags), "a.npz"], bound=True, wanted="one line",
                   make=lambda here, make=make: make(here / "a.npz"))
    loop = lambda here: (here / "photos/x").symlink_to(".")
    yield case("folder: a loop", "moco", ["--data", "photos"], both(photos(), loop))
    for size, script in itertools.product((1, 2), ("moco", "simclr")):
        yield case(f"folder: {size} x {size}", script, ["--data", "photos"], photos((size, size)))
    yield case("folder: empty", next(scripts), ["--data", "e"], lambda here: os.mkdir(here / "e"), "one line")


class Bomb:
    """What runs, as it is unpickled: pwned is written."""
    write = "open('pwned', 'w').close()"

    def __reduce__(self):
        return exec, (self.write,)


# ── tables of files, classifiers ──

ROWS = "".join(f"photos/{i}.png\t{'ab'[i % 2]}\n" for i in range(8))
TABLES = {"good": ROWS, "a header": "file\tlabel\n" + ROWS, "a missing file": ROWS + "photos/8.png\ta\n",
          "3 columns": ROWS.replace("\n", "\tc\n"), "a short row": ROWS + "photos/1.png\n", "empty": "",
          "a header alone": "file\tlabel\n", "not UTF-8": ROWS.encode() + b"photos/1.png\t\xff\n",
          "NULs": ROWS + "photos/\0.png\ta\n", "no labels": ROWS.replace("\ta", "").replace("\tb", ""),
          "a folder": ROWS + "photos\ta\n", "above itself": ROWS + "../../photos/1.png\ta\n",
          "/dev/zero": ROWS + "/dev/zero\ta\n", "long names": ROWS + "a" * 5000 + "\ta\n",
          "an escape": ROWS + "\x1b[2J.png\ta\n", "itself": ROWS + "labels.tsv\ta\n"}
HEADS = {"half": lambda data: data[: len(data) // 2], "flipped": flipped, "empty": lambda data: b"",
         "noise": lambda data: NOISE, "2**60 bytes": lambda data: struct.pack("<Q", 2**60) + data[8:],
         "other layers": lambda data: data.replace(b"Linear", b"ReLU  "),
         "a program": lambda data: pickle.dumps(Bomb())}


def of_tables():
    for name, text in TABLES.items():
        wanted = "accepted" if name in ("good", "a header", "no labels") else "one line"
        yield case(f"table: {name}", next(scripts), ["--data", "labels.tsv"],
                   both(photos(), put("labels.tsv", text)), wanted)
    tune = ["--finetune", "labels.tsv", "--data", "labels.tsv", "--model"]
    make = both(photos(), put("labels.tsv", ROWS))
    yield case("a classifier", "simclr", [*tune, "net"], make, "accepted")
    yield case("a classifier on no head", "simclr", [*tune, "resnet-small"], make, "one line")
    yield case("a classifier without labels", "simclr", ["--finetune", "photos", "--data", "photos"], make,
               "one line")
    for name, how in HEADS.items():
        yield case(f"head: {name}", "simclr", [*tune, "net"], both(make, change("net/head.safetensors", how)),
                   "either" if name == "flipped" else "one line")


# ── arrays ──


def npz(**arrays):
    """The bytes of an .npz of arrays, or of their bytes."""
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as parts:
        for name, array in arrays.items():
            if not isinstance(array, bytes):
                np.save(part := io.BytesIO(), array, allow_pickle=True)
                array = part.getvalue()
            parts.writestr(f"{name}.npy", array)
    return file.getvalue()


def npy(shape, dtype="|u1", data=b""):
    """The bytes of an .npy with this in its header."""
    head = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head + data


LOOKS = np.random.default_rng(1).integers(0, 256, (16, 16, 16, 3), np.uint8)
LABELS = np.arange(16) % 4
WHOLE = dict(images=LOOKS, labels=LABELS, test_images=LOOKS[:4], test_labels=LABELS[:4])
IMAGES = {"floats": LOOKS / 255, "grey": LOOKS[..., 0], "4 channels": LOOKS[..., [0, 1, 2, 0]],
          "none": LOOKS[:0],
          "0 pixels": LOOKS[:, :0], "scalar": np.uint8(3), "strings": np.array(["a"]), "no numpy": b"junk",
          "a program": np.array([Bomb()], object), "2**40 pictures": npy((2**40, 16, 16, 3)),
          "2**62 x 2**62": npy((2**62, 2**62, 4, 3)), "-1 pictures": npy((-1, 16, 16, 3)),
          "too few": npy((16, 16, 16, 3), data=b"a"), "a header that runs": npy(f"exec({Bomb.write!r})"),
          "objects": npy((16, 16, 16, 3), "|O")}
OTHERS = {"labels below 0": LABELS - 1, "float labels": LABELS / 2, "few labels": LABELS[:9],
          "labels of 2**63": LABELS.astype(np.uint64) + 2**63, "2**40 labels": npy((2**40,), "<i8"),
          "object labels": LABELS.astype(object)}


def of_arrays():
    arrays = {name: dict(images=array) for name, array in IMAGES.items()}
    arrays |= {name: WHOLE | dict(labels=array) for name, array in OTHERS.items()}
    arrays |= {"other names": dict(pictures=LOOKS)}
    files = {f"npz: {name}": ("a.npz", npz(**parts)) for name, parts in arrays.items()}
    files |= {f"npy: {name}": ("a.npy", array) for name, array in IMAGES.items() if isinstance(array, bytes)}
    for name, (file, data) in files.items():
        yield case(name, next(scripts), ["--data", file], put(file, data), "one line")
    for name, data in {"truncated": npz(**WHOLE)[:-30], "flipped": flipped(npz(**WHOLE)), "empty": b"",
                       "another test size": npz(**WHOLE | dict(test_images=LOOKS[:4, :8])),
                       "a label of 10**12": npz(**WHOLE | dict(labels=LABELS * 10**12)),
                       "a label apart": npz(**WHOLE | dict(test_labels=LABELS[:4] + 9))}.items():
        yield case(f"npz: {name}", next(scripts), ["--data", "a.npz"], put("a.npz", data))


# ── CIFAR ──


def batch(**more):
    return {b"data": LOOKS.repeat(4, 1)[:, :, :16].reshape(16, 3072), b"labels": LABELS.tolist()} | {
        name.encode(): value for name, value in more.items()}


PROGRAMS = {
    **{f"exec, protocol {protocol}": pickle.dumps(batch(x=Bomb()), protocol) for protocol in (0, 2, 5)},
    "a module that runs": b"cnumpy.f2py.__main__\nmain\n.",
    "numpy.testing": b"cnumpy.testing\nrundocs\n(S'a'\ntR.",
    "a path of names": b"\x80\x04\x8c\x05numpy\x8c\x0cf2py.os.pipe\x93)R.", "no module": b"cnone\nsuch\n.",
    "objects": pickle.dumps(batch(data=np.array([None] * 16, object))), "an extension": b"\x82\x01.",
    "dtype of objects": b"cnumpy\ndtype\n(S'O8'\nI00\nI01\ntR.",
    "a build": b"cnumpy\nndarray\n}S'a'\nI1\nsb.",
    "2**60 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"a.", "persistent": b"Pname\n.",
    "a frame of 2**60": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
    "a memo of 2**31": b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".",
    "nested deeply": b"(" * 10**5 + b"l" * 10**5 + b".", "a list in itself": b"\x80\x02]q\0(h\0h\0e.",
    "truncated": pickle.dumps(batch())[:3000], "empty": b"", "a list": pickle.dumps([1]),
    "text labels": pickle.dumps(batch(labels=["a"] * 16)), "few labels": pickle.dumps(batch(labels=[1, 2])),
    "labels of 10**30": pickle.dumps(batch(labels=[10**30] * 16)), "no data": pickle.dumps({b"labels": [1]}),
    "labels below 0": pickle.dumps(batch(labels=[-1] * 16)),
    "nested": pickle.dumps(batch(labels=[[1], []] * 8)),
    "floats": pickle.dumps(batch(data=np.zeros((16, 3072)))), "narrow": pickle.dumps(batch(data=LOOKS[0, 0]))}


def of_cifar():
    goods = {f"good, protocol {protocol}": pickle.dumps(batch(), protocol) for protocol in (0, 2, 5)}
    for name, data in (PROGRAMS | goods).items():
        yield case(f"cifar: {name}", next(scripts), ["--data", "cifar"], put("cifar/data_batch_1", data),
                   "accepted" if name in goods else "one line")


def cases():
    for part in (of_folders, of_tables, of_arrays, of_cifar):
        yield from part()
