"""Small valid inputs of every kind, and flags with which each script accepts them."""
import json
import os
import shutil

import numpy as np
from PIL import Image

from running import DATA, train

TEXT = "--model scratch --batch-size 4 --steps 1"
IMAGES = "--data few.npz --model resnet-small --batch-size 8 --steps 1 --probe-epochs 0"
FLAGS = {
    "simclr": IMAGES,
    "moco": f"{IMAGES} --queue-size 16 --bn-splits 2",
    "simcse": f"--data few.csv {TEXT}",
    "selfguided": f"--data few.txt --projection-dim 16 {TEXT}",
    "cline": f"--data few.txt --wordnet {DATA / 'wordnet'} --tagger lexicon {TEXT} --held-out-rows 2",
    "tacl": f"--data documents.txt {TEXT} --max-length 32",
    "ease": f"--data entities.tsv {TEXT}",
    "vascl": f"--data few.txt {TEXT} --neighbours 2",
    "dclr": f"--data few.txt --guide bert {TEXT} --phi 0.99",
    "childtuning": f"--data topics.tsv --mode F {TEXT}",
    "docs/more/consert": f"--data few.txt {TEXT}",
    "docs/more/declutr": f"--data articles.txt {TEXT} --max-length 8",
    "docs/more/simcls": f"--data candidates.csv {TEXT}",
    "docs/more/cil": f"--data relations.jsonl {TEXT}",
    "docs/more/finetune": f"--data topics.tsv --supcon-weight 0.3 {TEXT}",
    "docs/more/ood": f"--data topics.tsv --ood-epochs 1 {TEXT}",
    "docs/more/memory_bank": f"{IMAGES} --bn-splits 2",
    "docs/more/simclr_v2": "--data few.npz --model net --batch-size 8 --steps 1"}


def words(command):
    """Return the words of a command "SCRIPT ...", with FLAGS[SCRIPT] and "--out out" added after SCRIPT."""
    script, *flags = command.split()
    return [script, *FLAGS[script].split(), "--out", "out", *flags]


def write_good_files(here, bert):
    """Write data files, a BERT (bert/), an image encoder (net/) and a run that --resume accepts (half/) to
    the folder `here`, and return `here`.

    bert    folder of a BERT, which is copied to here/bert
    """
    for name, new, rows in [("nli.csv", "few.csv", 13), ("sentences.txt", "few.txt", 12),
                            ("sentences.txt", "documents.txt", 12), ("sts.tsv", "sts.tsv", 5),
                            ("entities.tsv", "entities.tsv", 13), ("topics.tsv", "topics.tsv", 25),
                            ("relations.jsonl", "relations.jsonl", 40), ("nli.csv", "candidates.csv", 13)]:
        lines = (DATA / name).read_bytes().splitlines(True)[:rows]
        (here / new).write_bytes((b"\n" if new == "documents.txt" else b"").join(
            b"".join(lines[i : i + 3]) for i in range(0, rows, 3)))
    sentences = (here / "few.txt").read_text("utf-8").splitlines()
    (here / "articles.txt").write_text("\n".join(f"{sentence} " * 5 for sentence in sentences), "utf-8")
    with np.load(DATA / "shapes.npz") as file:
        arrays = {name: file[name][:16] for name in file}
    np.savez(here / "few.npz", **arrays)
    os.mkdir(here / "photos")
    for i, pixels in enumerate(arrays["images"][:8]):
        Image.fromarray(pixels).save(here / "photos" / f"{i}.png")
    shutil.copytree(bert, here / "bert")
    train(words("moco --out net"), here)
    train(words("simcse --out half --keep-state always"), here)
    return here


def with_settings(**more):
    """Return a function that takes the bytes of a JSON file, and returns them with these settings changed."""
    return lambda old: json.dumps(json.loads(old) | more).encode()


def change_files(here, made):
    """Write or delete files. made: {path: new text or bytes, function of the old bytes, None to delete}."""
    for name, content in made.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_bytes() if path.exists() else None
        content = content(old) if callable(content) else content
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
