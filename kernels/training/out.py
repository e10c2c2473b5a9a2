"""The output folder of a run: checks of --out, atomic writes, and checksums of inputs."""
import contextlib
import fcntl
import hashlib
import math
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from .errors import fail
from .flags import input_values

UNFINISHED = ".running"                                        # this file is in --out until the run ends
HASHED_FILES = 1000                                            # maximum number of files hashed per folder


def check_out(args):
    """Fail if --out is not writable, is inside an input folder, or has contents that must be preserved."""
    out, path = args.out, Path(args.out).absolute()
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"--out {out}: {existing} is not a writable folder")
    for flag, values in input_values(args):
        for folder in (value for value in values if os.path.isdir(value)):
            if path.resolve().is_relative_to(Path(folder).resolve()):
                fail(f"--out {out}: inside --{flag} {folder}; choose another folder")
    if existing != path or not any(path.iterdir()):
        return
    is_started = any((path / name).is_file() for name in ("state.pt", UNFINISHED))
    if is_started and not args.resume:
        fail(f"--out {out} contains another run; continue it with --resume, or choose another folder")
    if not is_started and (path / "args.json").is_file():
        fail(f"--out {out} contains a finished run; choose another folder, or to train its model further, "
             f"start a new run with --model {out} --out NEW")
    if not is_started:
        fail(f"--out {out} contains files but no run; empty it, or choose another folder")


def lock(folder, create=False):
    """Fail if another process writes to this output folder. Return the file that holds the lock, or None.

    The system frees the lock when the file is closed or the process ends. Worker processes do not inherit it.
    create   what to do if the file UNFINISHED does not exist. True: make it; False: return None
    """
    path = folder / UNFINISHED
    if not create and not path.is_file():
        return None
    file = open(path, "a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        fail(f"--out {folder}: another process is writing there; wait until it ends, or use another folder")
    except OSError:                                            # this file system does not support locks
        pass
    return file


@contextlib.contextmanager
def writing(path):
    """Context manager: if writing in the block fails (disk full, ...), raise a UserError that names path."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch.save raises a RuntimeError whose context is the OSError; safetensors raises a SafetensorError
        disk = error if isinstance(error, OSError) else error.__context__
        if not isinstance(disk, OSError) and not isinstance(error, SafetensorError):
            raise
        fail(f"{path}: {getattr(disk, 'strerror', None) or error}", every_rank=True)


@contextlib.contextmanager
def atomic_file(path, mode="w"):
    """Context manager: open a temporary file, which replaces `path` when the block ends. If the process is
    killed, `path` has its complete old content or its complete new content."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        with open(temporary, mode, **({} if "b" in mode else dict(encoding="utf-8", newline=""))) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextlib.contextmanager
def atomic_output(run):
    """Context manager: yield a temporary folder, whose files are renamed into --out when the block ends."""
    temporary = run.out / ".saving"
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(run.out):
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*")):              # a folder comes before the files in it
            target = run.out / path.relative_to(temporary)
            if path.is_dir():
                target.mkdir(exist_ok=True)
                continue
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            os.replace(path, target)
        shutil.rmtree(temporary)


def save_tokenizer(tokenizer, folder):
    """Save a tokenizer. First remove the truncation that text.tokens.tokenise has set in the tokenizer."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.save_pretrained(folder)


def fingerprints(args):
    """Return {flag: checksum of its inputs}. --resume compares the checksums."""
    return {name: " ".join(map(fingerprint, values)) for name, values in input_values(args)}


def fingerprint(value):
    """Return the checksum of an input. A file is hashed as a whole. Of a folder, hash the names and sizes of
    all files, and the contents of at most HASHED_FILES files. Return a hub name unchanged."""
    digest = hashlib.sha1()
    path = Path(value)
    if not path.exists():                                      # value is the name of a model on the hub
        return value
    if path.is_file():
        hash_file(digest, path)
        return digest.hexdigest()
    names = [name for name in names_below(path) if (path / name).is_file()]
    every = math.ceil(len(names) / HASHED_FILES)
    for i, name in enumerate(names):
        digest.update(os.fsencode(name) + b" %d " % (path / name).stat().st_size)
        if i % every == 0:
            hash_file(digest, path / name)
    return digest.hexdigest()


def names_below(folder):
    """Yield the path below `folder` of each file in it and its sub-folders, sorted. Links to folders are
    followed, but no folder is visited twice. Names that begin with a dot are left out."""
    visited = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        if os.path.realpath(path) in visited:
            folders.clear()
            continue
        visited.add(os.path.realpath(path))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = os.path.relpath(path, folder)
        shown = (name for name in sorted(files) if not name.startswith("."))
        yield from (os.path.normpath(os.path.join(inside, name)) for name in shown)


def hash_file(digest, path):
    """Add the content of a file to the digest."""
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
