"""The folder of a run: --out checked, its code kept, files in it replaced whole; and whether data changed."""
import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from .command import fail

RUNNING = ".running"  # in --out from the start of a run to its end; locked while its process lives


def check_out(out, resume, data):
    """Refuses an --out that cannot be, or must not be, written."""
    path = out.absolute()
    if any("\ud800" <= letter <= "\udfff" for letter in str(out)):
        fail(f"--out {out}: not UTF-8, which tokenizers want of a path; take another name")
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"--out {out}: {existing} is no folder that can be written")
    if isinstance(data, (str, Path)) and path.resolve().is_relative_to(Path(data).resolve()):
        fail(f"--out {out}: lies in --data {data}, where it would be taken for data; name another folder")
    if existing != path or not any(path.iterdir()):
        return
    begun = next((name for name in ("state.pt", RUNNING) if (path / name).is_file()), None)
    if not begun and (path / "args.json").is_file():
        further = f"to train its model further, start a new run with --model {out} --out NEW"
        fail(f"--out {out} holds a finished run: {further}" if resume else
             f"--out {out} holds a finished run: name another folder, or {further}")
    if resume and not begun:
        fail(f"--out {out}: no state.pt to resume from")
    if not resume:
        kept = {"state.pt": "another run: continue it with --resume",
                RUNNING: "a run that has no checkpoint yet: begin it again with --resume",
                None: "files but no checkpoint: empty it"}[begun]
        fail(f"--out {out} holds {kept}, or name another folder")


def check_files(folder, named):
    """Refuses a folder with a pipe or a device in it, which would be read for ever."""
    for path in Path(folder).rglob("*"):
        if path.exists() and not path.is_file() and not path.is_dir():
            fail(f"{named}: {path.name} is a pipe or a device; wanted a file")


def lock(out):
    """The open file that shows the run at work in a folder. No second process can lock it, and a dead one
    does not hold it."""
    out.mkdir(parents=True, exist_ok=True)
    file = open(out / RUNNING, "w")
    try:
        import fcntl
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:                                        # Windows
        pass
    except (BlockingIOError, PermissionError):
        fail(f"--out {out}: another process is at work in it; let it end, or name another folder")
    return file


def check_lock(out, file):
    """Refuses to write into a folder that was removed, or replaced, since it was locked."""
    try:
        ours = os.path.samestat(os.stat(out / RUNNING), os.fstat(file.fileno()))
    except FileNotFoundError:
        ours = False
    if not ours:
        fail(f"--out {out} was removed while this run was writing it; what was in it is lost, run it again")


def write_code(out, script, flags):
    """The flags and the code that runs, so that a result knows what it came from."""
    shutil.copy(script, out)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(__file__).parent, out / "training", ignore=ignore, dirs_exist_ok=True)
    write_whole(out / "args.json", json.dumps(flags, indent=1))


def changed_flags(was, now):
    """Names of the flags of a run that --resume was given another value of."""
    free = "data", "command"                                   # the fingerprint stands for the data
    return [name for name in was if name not in free and spelt(now.get(name)) != spelt(was[name])]


def spelt(flag):
    """A flag's value such that two spellings of a path are one."""
    if isinstance(flag, list):
        return [spelt(value) for value in flag]
    return os.path.realpath(flag) if isinstance(flag, str) and os.path.exists(flag) else flag


def refuse_flag(name, was, now, out):
    """Fails because a flag differs from that of the run in --out."""
    what = "the content of --data, by its checksum," if name == "fingerprint" else name
    hint = ""
    if name in ("steps", "epochs"):                            # the learning rates depend on it from step 1
        hint = f"; to train a model further, start a new run with --model {out} --out NEW"
    fail(f"--resume: {what} was {was[name]} in {out}, now it is {now.get(name)}{hint}")


def write_whole(path, text):
    """Written aside, then renamed: whoever reads it, after a kill too, finds the old text or the new one."""
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        sync(file)
    os.replace(aside, path)


def sync(file):
    """Whole on the disk before it takes the old one's place."""
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def new_files(run):
    """A folder to write into; when the block ends its files are renamed into --out, each at once whole."""
    check_lock(run.out, run.lock)
    aside = run.out / ".saving"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    yield aside
    for path in [path for path in aside.rglob("*") if path.is_file()]:
        with open(path, "rb+") as file:
            sync(file)
        target = run.out / path.relative_to(aside)
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    shutil.rmtree(aside)


def save_tokenizer(tokenizer, folder):
    tokenizer.backend_tokenizer.no_truncation()                # tokenise's, which would be saved
    tokenizer.save_pretrained(folder)


def model_card(run, kind, tags, text, load):
    """README.md of a folder. kind: of the hub's pipelines; tags: the libraries that read it, the first above
    all."""
    best = run.progress["saved"].items()
    scores = ", ".join(f"{name} {value:.4g}" for name, value in best if isinstance(value, (int, float)))
    card = f"""---
library_name: {tags[0]}
pipeline_tag: {kind}
tags: [{", ".join(tags)}]
---
# {run.out.name}

{text}
Trained by {run.script.name} from {run.args.model} on {Path(str(run.args.data)).name}: {scores}.
Every setting is in args.json, the course of the training in metrics.jsonl.

    {load}
"""
    return card.encode("utf-8", "backslashreplace").decode()   # names of files may be no UTF-8


def fingerprint(path):
    """Tells whether data changed between runs: of a file its size and up to 256 places in it, of a folder its
    names and sizes. Rows in memory have one in their name (tables.Table)."""
    if not isinstance(path, (str, Path)):
        return str(path)
    path = Path(path)
    digest, size = hashlib.sha1(), path.stat().st_size
    if path.is_dir():
        names = sorted(os.path.join(inside, name) for inside, _, names in os.walk(path) for name in names)
        for name in filter(os.path.isfile, names):
            digest.update(os.fsencode(f"{name[len(str(path)):]} {os.path.getsize(name)}\n"))
    else:
        digest.update(str(size).encode())
        with open(path, "rb") as file:
            for place in range(0, size, max(2**16, size // 256)):
                file.seek(place)
                digest.update(file.read(2**16))
    return digest.hexdigest()
