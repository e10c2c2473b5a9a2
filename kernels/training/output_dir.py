"""The output folder of a run: checks of --out, atomic writes; and checksums of a run's inputs."""
import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from safetensors.torch import save_file
from transformers.utils import cached_file

from .cli import fail, writing
from .recipes import format_value

UNFINISHED = ".running"                                        # this file is in --out until the run ends


def check_out(out, resume, data):
    """Fail if --out cannot be written, is inside --data, or has contents that must not be overwritten."""
    path = out.absolute()
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"--out {out}: {existing} is not a writable folder")
    if isinstance(data, (str, Path)) and path.resolve().is_relative_to(Path(data).resolve()):
        fail(f"--out {out}: inside --data {data}, where it would be read as data; choose another folder")
    if existing != path or not any(path.iterdir()):
        return
    started = next((name for name in ("state.pt", UNFINISHED) if (path / name).is_file()), None)
    if not started and (path / "args.json").is_file():
        other = "" if resume else "choose another folder, or "
        fail(f"--out {out} contains a finished run; {other}to train its model further, start a new run with "
             f"--model {out} --out NEW")
    if resume and not started:
        fail(f"--out {out}: no state.pt to resume from")
    if resume:
        return
    content = {"state.pt": "another run; continue it with --resume",
               UNFINISHED: "a run without a checkpoint; start it again with --resume",
               None: "files but no checkpoint; empty it"}[started]
    fail(f"--out {out} contains {content}, or choose another folder")


def create_file(path, mode="w"):
    """Open a new file for writing, in place of an old file or link of this name."""
    Path(path).unlink(missing_ok=True)
    return open(path, mode, **({} if "b" in mode else dict(encoding="utf-8", newline="")))


def has_run(out):
    """Return whether a run was started in this folder."""
    return any((out / name).is_file() for name in ("state.pt", "args.json"))


def write_code(out, script, flags):
    """Mark the run in --out as unfinished, and write args.json and copies of the script and of
    kernels/training, so that the run can be reproduced."""
    out.mkdir(parents=True, exist_ok=True)
    (out / UNFINISHED).touch()
    with writing(out / script.name), create_file(out / script.name, "wb") as file:
        file.write(script.read_bytes())
    shutil.rmtree(out / "training", ignore_errors=True)
    shutil.copytree(Path(__file__).parent, out / "training", ignore=shutil.ignore_patterns("__pycache__"))
    write_atomically(out / "args.json", json.dumps(flags, indent=1))


def refuse_changes(saved, now, out):
    """Fail if a flag, or the content of an input, differs from that of the run in --out.

    saved   the dict in args.json
    now     Run.flags() of this run
    """
    if "inputs" not in saved:
        fail("--resume: the run was started by an older version; continue with that version, or start a new "
             "run")
    for name in saved:
        if name in ("data", "command", "inputs"):              # --data is compared by its checksum, below
            continue
        if normalise_paths(now.get(name)) == normalise_paths(saved[name]):
            continue
        hint = ""
        if name in ("steps", "epochs"):                        # all learning rates depend on them
            hint = f"; to train a model further, start a new run with --model {out} --out NEW"
        fail(f"--resume: {name} was {saved.get(name)} in {out}, now it is {now.get(name)}{hint}")
    for name in saved["inputs"] | now["inputs"]:
        if saved["inputs"].get(name) != now["inputs"].get(name):
            value = format_value(now.get(name))
            fail(f"--resume: the content of --{name.replace('_', '-')} {value} has changed since the run in "
                 f"{out} was started; restore it, or start a new run in another folder")


def normalise_paths(flag):
    """Return a flag's value with absolute paths, so that two spellings of a path compare equal."""
    if isinstance(flag, list):
        return [normalise_paths(value) for value in flag]
    return os.path.realpath(flag) if isinstance(flag, str) and os.path.exists(flag) else flag


def write_atomically(path, text):
    """Write a temporary file and rename it: even after a kill, a reader finds the old text or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path), create_file(temporary) as file:
        file.write(text)
        flush_to_disk(file)
    os.replace(temporary, path)


def flush_to_disk(file):
    """Wait until the file is on the disk. Call this before renaming the file to its final name."""
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def atomic_output(run):
    """Context manager: yield a temporary folder, whose files are renamed into --out when the block ends."""
    temporary = run.out / ".saving"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    with writing(run.out):
        yield temporary
    for path in [path for path in temporary.rglob("*") if path.is_file()]:
        with open(path, "rb+") as file:
            with writing(run.out):
                flush_to_disk(file)
        target = run.out / path.relative_to(temporary)
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    shutil.rmtree(temporary)


def save_tokenizer(tokenizer, folder):
    """Save a tokenizer, without the truncation that text.tokens.tokenise has set."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.save_pretrained(folder)


def model_card(run, kind, tags, description, load_code):
    """Return the text of README.md for a saved model.

    kind          pipeline_tag of the Hugging Face hub
    tags          names of libraries that can load the folder; the first one is the card's library_name
    description   description of the model
    load_code     line of Python that loads it
    """
    best = run.extra_state["saved"].items()
    scores = ", ".join(f"{name} {value:.4g}" for name, value in best if isinstance(value, (int, float)))
    card = f"""---
library_name: {tags[0]}
pipeline_tag: {kind}
tags: [{", ".join(tags)}]
---
# {run.out.name}

{description}
Trained by {run.script.name} from {run.args.model} on {Path(str(run.args.data)).name}: {scores}.
All settings are in args.json, the training metrics in metrics.jsonl.

    {load_code}
"""
    return card.encode("utf-8", "backslashreplace").decode()   # names of files may not be UTF-8


def save_transformer(run, model, tokenizer, kind, text, load_code, more=None):
    """Write a model and its tokenizer into --out in transformers' format, with a model card; on rank 0 only.

    kind, text, load_code   as for model_card; text is its description
    more                    {file name: {name: tensor}} to write beside the model
    """
    if run.rank:
        return
    card = model_card(run, kind, ["transformers"], text, load_code)
    with atomic_output(run) as aside:
        model.save_pretrained(aside)
        save_tokenizer(tokenizer, aside)
        for name, tensors in (more or {}).items():
            save_file({part: tensor.cpu() for part, tensor in tensors.items()}, aside / name)
        (aside / "README.md").write_text(card, encoding="utf-8")


MODEL_FILES = ".json", ".txt", ".model", ".safetensors", ".bin"
MAX_FULL_HASH_BYTES = 2**28                                    # larger files are hashed by samples only


def fingerprints(args, known):
    """Return {flag: checksum of the content} for the flags that name an input of the run (args.inputs).

    known   {flag: checksum} of inputs that were already read in full
    """
    checksums = {}
    for name in args.inputs:
        values = getattr(args, name)
        if values := [value for value in (values if isinstance(values, list) else [values]) if value]:
            checksums[name] = known.get(name) or " ".join(map(fingerprint, values))
    return checksums


def fingerprint(value):
    """Return a text that changes if the input changes.

    For a file: its checksum. For a folder: the checksum of all names and files in it, following links; for a
    model folder, of the settings and weights only. For a hub name: the commit. For rows in memory: their
    description, which has a checksum (see tables.Table).
    """
    names = [str(value)]
    if isinstance(value, str) and not os.path.exists(value):
        names = value.split(",")                               # train.tsv,test.tsv
    digest = hashlib.sha1()
    for name in names:
        if os.path.isdir(name):
            is_model = os.path.isfile(os.path.join(name, "config.json"))
            for file in list_files(name, {}):
                if os.path.isfile(file) and (not is_model or file.endswith(MODEL_FILES)):
                    digest.update(os.fsencode(os.path.relpath(file, name)) + b"\n")
                    hash_file(digest, file)
        elif os.path.isfile(name):
            hash_file(digest, name)
        else:
            return hub_commit(str(value))
    return digest.hexdigest()


def list_files(folder, seen):
    """Yield the paths of all files below a folder, sorted, following links, but visiting each folder once."""
    status = os.stat(folder)
    if seen.setdefault((status.st_dev, status.st_ino), folder) is folder:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            yield from list_files(entry.path, seen) if entry.is_dir() else [entry.path]


def hash_file(digest, path):
    """Add the size and content of a file to the digest; of a large file, about 4,096 samples of 64 KB."""
    size = os.path.getsize(path)
    digest.update(f"{size}\n".encode())
    stride = max(2**16, size // 4096) if size > MAX_FULL_HASH_BYTES else 2**16
    with open(path, "rb") as file:
        for offset in range(0, size, stride):
            file.seek(offset)
            digest.update(file.read(2**16))


def hub_commit(name):
    """Return the commit of a hub model, which is the name of its folder in the cache; otherwise `name`."""
    try:
        return Path(cached_file(name, "config.json", local_files_only=True)).parent.name
    except (OSError, ValueError):                              # scratch, resnet-18, rows in memory
        return name
