"""Files of a user that are read: none is waited for, none changes unnoticed, text is UTF-8 in lines."""
import contextlib
import functools
import gzip
import json
import os
import re
import stat
import zlib

from .cli import Fault, fail, memory
from .progress import progress

LONGEST = 2**24                                                # bytes of a line, letters of a cell


def open_plain(path, unpack=open):
    """A file to read. A pipe or a device could keep one waiting for ever."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        fail(f"{path}: a pipe, a socket or a device, which cannot be read twice; wanted a file")
    return unpack(path, "rb")


@contextlib.contextmanager
def opened(path, unpack=None):
    """A file that can be read again and again, open to be read; all that hinders it is a Fault."""
    try:
        with open_plain(path, unpack or open) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or f'{error}; copy it or pack it anew'}")


def stamp(path):
    """What is another where a file was changed; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


@contextlib.contextmanager
def unchanged(path, was):
    """What is done within fails where the file has another stamp before, after, or when something else is
    wrong; without a stamp it is just done. Gives the function that compares."""
    def check():
        if was and stamp(path) != was:
            fail(f"{path}: changed or deleted while it was read; leave it as it is, and start again")

    check()
    try:
        yield check
    except Fault:
        check()
        raise
    check()


def read_lines(path, whole=False):
    """Yields the lines of a text file, which may be packed by gzip."""
    packed = path.suffix.lower() == ".gz"
    with opened(path, gzip.open if packed else None) as file:
        size = None if packed else os.fstat(file.fileno()).st_size
        name = f"reading {' '.join(path.name.split())}"
        with progress(None, name, total=size, unit="B", unit_scale=True) as bar:
            for text, size in decoded(file, path, whole):
                bar.update(size)
                yield text


ENCODINGS = {"UTF-32LE": rb"\xff\xfe\0\0|[^\0]\0\0\0", "UTF-32BE": rb"\0\0(\xfe\xff|\0[^\0])",
             "UTF-16LE": rb"\xff\xfe|[^\0]\0[^\0](\0|$)", "UTF-16BE": rb"\xfe\xff|\0[^\0]\0[^\0]"}


def decoded(file, path, whole=False):
    """Yields (line, its bytes) of an open text file. No line is longer than LONGEST; with whole, which keeps
    them all, they may be an eighth of the machine's memory together."""
    most, held, starts = memory() // 8 if whole else LONGEST, 0, file.tell() == 0
    for number, raw in enumerate(pieces(file, most + 1), 1):
        held = held * whole + len(raw)
        if starts and number == 1:
            for name, first in ENCODINGS.items():
                if re.match(first, raw):
                    fail(f"{path}: looks like {name}; convert it, for example with iconv -f {name} -t UTF-8")
            if not whole and not raw.endswith(b"\n") and b"\r" in raw[:-1]:
                fail(f"{path}: lines end as on an old Mac; convert it, for example with tr '\\r' '\\n'")
        if held > most:
            fail(f"{path}: over {most / 2**30:.1f} GB, and a .json is read whole; write it as .jsonl" if whole
                 else f"{path} line {number}: over {most >> 20} MB; wanted a row a line")
        if b"\0" in raw:
            fail(f"{path} line {number}: a NUL character; delete it, or convert the file if it is not UTF-8")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")
        if text := text.removeprefix("\ufeff") if starts and number == 1 else text:
            yield text, len(raw)


def pieces(file, most=LONGEST):
    """Yields the lines of an open file, as bytes; a longer one in several parts."""
    return iter(functools.partial(file.readline, most), b"")


def read_settings(path):
    """The value of a .json of settings, which is read whole: no larger than LONGEST. Raises ValueError."""
    with open_plain(path) as file:
        text = file.read(LONGEST + 1)
    try:
        if len(text) > LONGEST:
            raise ValueError(f"over {LONGEST >> 20} MB")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a valid JSON file of settings: {error}") from error
