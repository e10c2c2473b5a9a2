"""The folder of a run: --out checked, its code kept, files in it replaced whole; and whether data changed."""
import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from .command import fail


def check_out(out, resume):
    """Refuses an --out that cannot be, or must not be, written."""
    path = out.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"--out {out}: {existing} is no folder that can be written")
    if resume and not (path / "state.pt").is_file():
        fail(f"--out {out}: no state.pt to resume from")
    if not resume and existing == path and any(path.iterdir()):
        kept = "files but no checkpoint: empty it"
        if (path / "state.pt").is_file():
            kept = "another run: continue it with --resume"
        fail(f"--out {out} holds {kept}, or name another folder")


def write_code(out, script, flags):
    """A new folder with the flags and the code that runs, so that a result knows what it came from."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "args.json").write_text(json.dumps(flags, indent=1))
        shutil.copy(script, out)
        shutil.copytree(Path(__file__).parent, out / "training", ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")


@contextlib.contextmanager
def new_files(run):
    """A folder to write into; when the block ends its files are renamed into --out, each at once whole."""
    aside = run.out / ".saving"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    yield aside
    for file in [path for path in aside.rglob("*") if path.is_file()]:
        target = run.out / file.relative_to(aside)
        target.parent.mkdir(exist_ok=True)
        os.replace(file, target)
    shutil.rmtree(aside)


def save_tokenizer(tokenizer, folder):
    tokenizer.backend_tokenizer.no_truncation()                # tokenise's, which would be saved
    tokenizer.save_pretrained(folder)


def model_card(run, kind, tags, text, load):
    """README.md of a folder. kind: of the hub's pipelines; tags: the libraries that read it, the first above
    all."""
    best = run.progress["best"].items()
    scores = ", ".join(f"{name} {value:.4g}" for name, value in best if isinstance(value, (int, float)))
    return f"""---
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


def fingerprint(path):
    """Tells whether data changed between runs: of a file its size and up to 256 places in it, of a folder its
    names and sizes. Rows in memory have one in their name (tables.Table)."""
    if not isinstance(path, (str, Path)):
        return str(path)
    path = Path(path)
    digest, size = hashlib.sha1(), path.stat().st_size
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digest.update("".join(f"{file.relative_to(path)} {file.stat().st_size}\n" for file in files).encode())
    else:
        digest.update(str(size).encode())
        with open(path, "rb") as file:
            for place in range(0, size, max(2**16, size // 256)):
                file.seek(place)
                digest.update(file.read(2**16))
    return digest.hexdigest()
