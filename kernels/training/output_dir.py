"""The folder of a run: --out checked, its code kept, files in it replaced whole; and whether data changed."""
import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from transformers.utils import cached_file

from .cli import Fault, fail, written
from .recipes import text_of

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
        other = "" if resume else "name another folder, or "
        fail(f"--out {out} holds a finished run: {other}to train its model further, start a new run with "
             f"--model {out} --out NEW")
    if resume and not begun:
        fail(f"--out {out}: no state.pt to resume from")
    if resume:
        return check_links(out)
    kept = {"state.pt": "another run: continue it with --resume",
            RUNNING: "a run that has no checkpoint yet: begin it again with --resume",
            None: "files but no checkpoint: empty it"}[begun]
    fail(f"--out {out} holds {kept}, or name another folder")


def check_links(out):
    """Refuses a folder to write with links in it: what is written would land elsewhere."""
    for inside, folders, files in os.walk(out):
        for name in (*folders, *files):
            if os.path.islink(path := os.path.join(inside, name)):
                fail(f"--out {out}: {os.path.relpath(path, out)} is a link, through which a run would write "
                     "elsewhere; replace it by what it points to, or delete it")


def new_file(path, mode="w"):
    """An open new file, in the place of an old one and never in what a link there points to."""
    path = Path(path)
    path.unlink(missing_ok=True)
    text = {} if "b" in mode else dict(encoding="utf-8", newline="")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return open(os.open(path, flags, 0o666), mode, **text)


def check_files(folder, named):
    """Refuses a folder with a pipe or a device in it, which would be read for ever."""
    for path in Path(folder).rglob("*"):
        if path.exists() and not path.is_file() and not path.is_dir():
            fail(f"{named}: {path.name} is a pipe or a device; wanted a file")


@contextlib.contextmanager
def locked(out, resume, rank=0):
    """The first rank locks the folder, before what is in it is read; a Fault within leaves it as it was.
    Without resume a folder is refused in which another run was begun since check_out."""
    file = lock(out) if rank == 0 else None
    try:
        if file and has_run(out) and not resume:
            fail(f"--out {out}: another run was begun in it while this one was starting; name another folder")
        yield file
    except Fault:
        if file and file.mode == "x":                          # which this process has made
            (out / RUNNING).unlink()
        raise


def has_run(out):
    """Whether a run was begun in this folder."""
    return any((out / name).is_file() for name in ("state.pt", "args.json"))


def lock(out):
    """The open file that shows the run at work in a folder. No second process can lock it, and a dead one
    does not hold it."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        file = open(out / RUNNING, "x")
    except FileExistsError:                                    # its content stays: it may be another's, too
        file = open(os.open(out / RUNNING, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)), "r+")
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
    with written(out / script.name), new_file(out / script.name, "wb") as file:
        file.write(script.read_bytes())
    shutil.rmtree(out / "training", ignore_errors=True)
    shutil.copytree(Path(__file__).parent, out / "training", ignore=shutil.ignore_patterns("__pycache__"))
    write_whole(out / "args.json", json.dumps(flags, indent=1))


def refuse_changes(was, now, out):
    """Fails if a flag, or the content of an input, is not what it was when the run in --out was begun."""
    if "inputs" not in was:
        fail("--resume: the run was begun by an older version; go on with that, or start a new one")
    for name in was:
        if name in ("data", "command", "inputs") or spelt(now.get(name)) == spelt(was[name]):
            continue                                           # checksums stand for the data
        hint = ""
        if name in ("steps", "epochs"):                        # the learning rates depend on it from step 1
            hint = f"; to train a model further, start a new run with --model {out} --out NEW"
        fail(f"--resume: {name} was {was.get(name)} in {out}, now it is {now.get(name)}{hint}")
    for name in was["inputs"] | now["inputs"]:
        if was["inputs"].get(name) != now["inputs"].get(name):
            words = text_of(now.get(name))
            fail(f"--resume: the content of --{name.replace('_', '-')} {words} is not what it was when the "
                 f"run in {out} was begun; put that back, or start a new run in another folder")


def spelt(flag):
    """A flag's value such that two spellings of a path are one."""
    if isinstance(flag, list):
        return [spelt(value) for value in flag]
    return os.path.realpath(flag) if isinstance(flag, str) and os.path.exists(flag) else flag


def write_whole(path, text):
    """Written aside, then renamed: whoever reads it, after a kill too, finds the old text or the new one."""
    aside = path.with_name(path.name + ".tmp")
    with written(path), new_file(aside) as file:
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
    with written(run.out):
        yield aside
    for path in [path for path in aside.rglob("*") if path.is_file()]:
        with open(path, "rb+") as file:
            with written(run.out):
                sync(file)
        target = run.out / path.relative_to(aside)
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    shutil.rmtree(aside)


def save_tokenizer(tokenizer, folder):
    """Writes a tokenizer, without the truncation that tokenise has set."""
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


MODEL_FILES = ".json", ".txt", ".model", ".safetensors", ".bin"
WHOLE = 2**28                                                  # bytes of a file that is read whole


def fingerprints(args, known):
    """{flag: checksum of the content} of the flags that name what a run reads (args.inputs).

    known   {flag: checksum} of those that were read whole already
    """
    found = {}
    for name in args.inputs:
        values = getattr(args, name)
        if values := [value for value in (values if isinstance(values, list) else [values]) if value]:
            found[name] = known.get(name) or " ".join(map(fingerprint, values))
    return found


def fingerprint(value):
    """Tells whether an input of a run has changed since: a checksum of a file, or of all names and files of a
    folder, links followed; of a model's folder the settings and weights alone; of a hub name the commit; of
    rows in memory what is in their name (tables.Table)."""
    names = [str(value)]
    if isinstance(value, str) and not os.path.exists(value):
        names = value.split(",")                               # train.tsv,test.tsv
    digest = hashlib.sha1()
    for name in names:
        if os.path.isdir(name):
            is_model = os.path.isfile(os.path.join(name, "config.json"))
            for file in files_of(name, {}):
                if os.path.isfile(file) and (not is_model or file.endswith(MODEL_FILES)):
                    digest.update(os.fsencode(os.path.relpath(file, name)) + b"\n")
                    add_file(digest, file)
        elif os.path.isfile(name):
            add_file(digest, name)
        else:
            return commit_of(str(value))
    return digest.hexdigest()


def files_of(folder, seen):
    """Paths of all files below a folder, in order, links followed, each folder once."""
    place = os.stat(folder)
    if seen.setdefault((place.st_dev, place.st_ino), folder) is folder:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            yield from files_of(entry.path, seen) if entry.is_dir() else [entry.path]


def add_file(digest, path):
    """Adds the size and content of a file; of one over WHOLE bytes, so many in 4,096 places."""
    size = os.path.getsize(path)
    digest.update(f"{size}\n".encode())
    with open(path, "rb") as file:
        for place in range(0, size, max(2**16, size // 4096) if size > WHOLE else 2**16):
            file.seek(place)
            digest.update(file.read(2**16))


def commit_of(name):
    """The commit of a model of the hub, as its place in the cache has it; of anything else its name."""
    try:
        return Path(cached_file(name, "config.json", local_files_only=True)).parent.name
    except (OSError, ValueError):                              # scratch, resnet-18, rows in memory
        return name
