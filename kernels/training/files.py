"""Opens the user's files: those that can be read again, unchanged while they are read, text in UTF-8."""
import contextlib
import functools
import gzip
import json
import os
import stat
import zlib

from .cli import Fault, fail, memory
from .progress import progress

LONGEST = 2**24                                                # bytes of a line, letters of a cell


def open_plain(path, unpack=open):
    """Opens a file to read its bytes. A pipe or a device, which could block for ever, is a Fault.

    unpack   what opens it: open, or that of gzip or bz2
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        fail(f"{path}: a pipe, a socket or a device, which cannot be read twice; wanted a file")
    return unpack(path, "rb")


@contextlib.contextmanager
def opened(path, unpack=None):
    """open_plain as a context, in which errors of the file system and of unpacking are Faults."""
    try:
        with open_plain(path, unpack or open) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or f'{error}; copy it or pack it anew'}")


def stamp(path):
    """Size, time and inode of a file, which differ once it was changed; None where there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


@contextlib.contextmanager
def unchanged(path, was):
    """Fails where the file's stamp is not `was` before or after the block, or at a Fault in it, which the
    change may have caused. Where `was` is None nothing is compared."""
    def check():
        if was and stamp(path) != was:
            fail(f"{path}: changed or deleted while it was read; leave it as it is, and start again")

    check()
    try:
        yield
    except Fault:
        check()
        raise
    check()


def read_lines(path, longest=LONGEST):
    """Yields the lines of a text file, which may be packed by gzip, and shows progress."""
    packed = path.suffix.lower() == ".gz"
    with opened(path, gzip.open if packed else None) as file:
        size = None if packed else os.fstat(file.fileno()).st_size
        with progress(None, f"reading {path.name}", total=size, unit="B", unit_scale=True) as bar:
            for text, size in decoded(file, path, longest):
                bar.update(size)
                yield text


def read_whole(path):
    """The text of a file that is read at once: of at most an eighth of this machine's memory."""
    most, held, lines = memory() // 8, 0, []
    for line in read_lines(path, most):
        lines.append(line)
        held += len(line)
        if held > most:
            fail(f"{path}: over {most / 2**30:.1f} GB, and a .json is read whole; write it as .jsonl")
    return "".join(lines)


def decoded(file, path, longest=LONGEST):
    """Yields (line, its bytes) of an open file, which messages call `path`; without the byte order mark.
    Lines of more than `longest` bytes, and other letters than UTF-8's, are Faults."""
    starts = file.tell() == 0
    for number, raw in enumerate(pieces(file, longest + 1), 1):
        if len(raw) > longest:
            fail(f"{path} line {number}: over {longest >> 20} MB; wanted a row a line")
        if b"\0" in raw:
            fail(f"{path} line {number}: a NUL character; delete it, or if this is UTF-16, convert it, "
                 "for example with iconv")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")
        if number == 1 and starts:
            text = text.removeprefix("\ufeff")
            if "\r" in text[:-1] and not text.endswith("\n"):
                fail(f"{path}: lines end as on an old Mac; convert it, for example with tr '\\r' '\\n'")
        yield text, len(raw)


def pieces(file, most=LONGEST):
    """Yields the lines of an open file, as bytes; a longer one in several parts."""
    return iter(functools.partial(file.readline, most), b"")


def read_settings(path):
    """The value of a .json of settings, which is no larger than LONGEST. Raises ValueError."""
    with open_plain(path) as file:
        text = file.read(LONGEST + 1)
    try:
        if len(text) > LONGEST:
            raise ValueError(f"over {LONGEST >> 20} MB")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a valid JSON file of settings: {error}") from error
