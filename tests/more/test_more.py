"""What the scripts of further papers share: several processes, mistakes of a user, and where kernels/ is."""
import csv
import runpy
import sys
from pathlib import Path

import pytest

from running import DATA, NLI, ROOT, metrics, rejects, run, run_distributed

# {script: flags beside those of all}. Nothing is random: no dropout, no masks, and spans of equal tokens
FLAGS = {
    "consert": "--data pairs.csv --views dropout dropout --adversarial 0.5",
    "declutr": "--data letters.txt --max-length 4 --spans 2 3 --mlm-weight 0",
    "simcls": "--data candidates.csv --pooling avg",
    "cil": "--data relations.jsonl --mlm-weight 0 --classifier-dropout 0 --warmup-steps 1",
    "finetune": "--data topics.tsv --ood-epochs 1 --supcon-weight 0.5 --rdrop-weight 0.5 --warmup-ratio 0"}
CODE = ["--form", "code"]


@pytest.mark.parametrize("name, form", [
    ("consert", []), ("declutr", []), ("simcls", []), ("cil", []), ("cil", CODE), ("finetune", []),
    ("finetune", CODE)])
def test_processes_equal_one(name, form, tmp_path, bert, monkeypatch):
    """Three processes with unequal shares of a batch, and chunks, have the losses and gradients of one
    process without chunks."""
    monkeypatch.chdir(tmp_path)
    for file, rows in {"pairs.csv": [row[:2] for row in NLI[:20]], "candidates.csv": NLI[:20],
                       "letters.txt": [[f"{letter} " * 16] for letter in "abcdefghijkl"]}.items():
        with open(file, "w", newline="") as stream:
            csv.writer(stream).writerows(rows)
    for file, lines in ("relations.jsonl", 162), ("topics.tsv", 17):
        Path(file).write_text("".join((DATA / file).read_text().splitlines(True)[:lines]))
    flags = ["--model", bert, "--batch-size", 8, "--steps", 2, "--lr", 1e-4, *FLAGS[name].split(), *form]
    one = run(name, tmp_path / "one", *flags)
    chunks = [] if name == "finetune" else ["--chunk-size", 3]
    norms = run_distributed(3, name, tmp_path / "three", [*flags, *chunks])
    assert [row["loss"] for row in metrics(tmp_path / "three")] == pytest.approx(one.losses, rel=1e-5)
    assert norms == pytest.approx(one.norms, rel=1e-4)


@pytest.mark.parametrize("name", FLAGS)
def test_the_script_finds_kernels(name, monkeypatch):
    """`python docs/more/NAME.py` adds the folder of kernels/ to the search path."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT])
    runpy.run_path(str(ROOT / "docs/more" / f"{name}.py"))
    assert any(Path(path).resolve() == ROOT for path in sys.path)


@pytest.mark.parametrize("command, message", [
    ("consert --data three.csv", r"three\.csv: 3 columns, expected sentences, or anchors and positives; .*"),
    ("declutr --columns 1 --max-length 32", r"good\.csv: 0 of 3 documents have at least 128 .*"),
    ("simcls", r"good\.csv: 2 columns, expected text, reference and candidates; see --columns"),
    ("cil --evaluate --model .", "--model .: no heads.safetensors, expected a model that .*")])
def test_mistakes(command, message, cwd, capfd):
    Path("three.csv").write_text("a,b,c\n" * 3)
    script, *flags = command.split()
    rejects(script, capfd, message, "--data", "good.csv", "--model", "scratch", "--batch-size", 2, *flags)
