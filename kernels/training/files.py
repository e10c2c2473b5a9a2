"""Open and read the user's files: regular files only, UTF-8 text, an error if a file changes meanwhile."""
import contextlib
import functools
import gzip
import json
import os
import stat
import zlib

from .cli import UserError, fail, total_memory
from .progress import progress

MAX_TEXT_BYTES = 2**24                                         # of a line, of a cell, of a config


def open_regular_file(path, opener=open):
    """Open a file to read bytes. Fail for a pipe or a device, which could block forever.

    opener   function that opens it: open, gzip.open or bz2.open
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        fail(f"{path}: a pipe, a socket or a device, which cannot be read twice; expected a file")
    return opener(path, "rb")


@contextlib.contextmanager
def open_file(path, opener=None):
    """Context manager: open_regular_file, with errors of the file system and of unpacking as UserError."""
    try:
        with open_regular_file(path, opener or open) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or f'{error}; copy it or compress it again'}")


def file_signature(path):
    """Return size, modification time and inode of a file, to detect changes; None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


@contextlib.contextmanager
def check_unchanged(path, signature):
    """Context manager: fail if the file's signature differs from this one before or after the block.

    A UserError in the block is checked, too: the change may be its cause. signature=None: no check.
    """
    def check():
        if signature and file_signature(path) != signature:
            fail(f"{path}: changed or deleted while it was read; start again, and do not change it during "
                 "the run")

    check()
    try:
        yield
    except UserError:
        check()
        raise
    check()


def read_lines(path, max_bytes=MAX_TEXT_BYTES):
    """Yield the lines of a text file, which may be compressed by gzip (.gz), and show progress."""
    compressed = path.suffix.lower() == ".gz"
    with open_file(path, gzip.open if compressed else None) as file:
        size = None if compressed else os.fstat(file.fileno()).st_size
        with progress(None, f"reading {path.name}", total=size, unit="B", unit_scale=True) as bar:
            for text, size in decoded_lines(file, path, max_bytes):
                bar.update(size)
                yield text


def read_whole(path):
    """Return the text of a file. Fail if it is longer than an eighth of this machine's memory."""
    most, length, lines = total_memory() // 8, 0, []
    for line in read_lines(path, most):
        lines.append(line)
        length += len(line)
        if length > most:
            fail(f"{path}: over {most / 2**30:.1f} GB, but a .json is read into memory; write it as .jsonl")
    return "".join(lines)


def decoded_lines(file, path, max_bytes=MAX_TEXT_BYTES):
    """Yield (text, number of bytes) for each line of an open file, without a byte order mark.

    Fails if a line has more than max_bytes bytes, contains NUL or is not UTF-8.

    path   name of the file in messages
    """
    at_start = file.tell() == 0
    for number, raw in enumerate(split_long_lines(file, max_bytes + 1), 1):
        if len(raw) > max_bytes:
            fail(f"{path} line {number}: over {max_bytes >> 20} MB; expected one row per line")
        if b"\0" in raw:
            fail(f"{path} line {number}: a NUL character; delete it, or if this is UTF-16, convert it, "
                 "for example with iconv")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            fail(f"{path} line {number}: not UTF-8; convert it, for example with iconv")
        if number == 1 and at_start:
            text = text.removeprefix("\ufeff")
            if "\r" in text[:-1] and not text.endswith("\n"):
                fail(f"{path}: lines end with a carriage return only; convert it, for example with "
                     "tr '\\r' '\\n'")
        yield text, len(raw)


def split_long_lines(file, max_bytes=MAX_TEXT_BYTES):
    """Yield the lines of an open file as bytes. A line of more than max_bytes comes in several parts."""
    return iter(functools.partial(file.readline, max_bytes), b"")


def read_json_config(path):
    """Return the content of a .json file such as config.json. Raises ValueError if it is invalid or large."""
    with open_regular_file(path) as file:
        text = file.read(MAX_TEXT_BYTES + 1)
    try:
        if len(text) > MAX_TEXT_BYTES:
            raise ValueError(f"over {MAX_TEXT_BYTES >> 20} MB")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a valid JSON file: {error}") from error
