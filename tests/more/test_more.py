"""What the scripts of further papers share: several processes, mistakes of a user, and where kernels/ is."""
import csv
import json
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
    ("consert", []), ("declutr", []), ("simcls", []), ("cil", []), ("cil", CODE), ("finetune", CODE)])
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


LINE = json.loads((DATA / "relations.jsonl").read_text().splitlines()[0])
SCORES = "text,reference,cand1,cand2,scores\n"
FILES = {
    "three.csv": "a,b,c\n" * 3, "short.csv": f"{SCORES}A,B,C,D,1\n", "word.csv": f"{SCORES}A,B,C,D,1 x\n",
    "bag.jsonl": LINE, "shape.jsonl": LINE | dict(t=None), "na.jsonl": LINE | dict(relation="NA"),
    "name.jsonl": LINE | dict(h=dict(LINE["h"], pos=[1, 3])),
    "numbers.tsv": "sentence\tlabel\nA\t1.5\nB\t2\n",
    "class.tsv": "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\n", "one.tsv": "sentence\tlabel\nA\tmotion\n"}


@pytest.mark.parametrize("command, message", [
    ("consert --views delete dropout --prompt x", "--prompt: --views delete dropout would change .*"),
    ("consert --views synonym dropout", "--views synonym and --wordnet, .* need each other"),
    ("consert --columns 1 --adversarial 0.1", r"--adversarial: good\.csv has 1 column, .*"),
    ("consert --data three.csv", r"three\.csv: 3 columns, expected sentences, or anchors and positives; .*"),
    ("consert --model XLM --max-length 32", "--model XLM: XLMModel has no module `embeddings` .*"),
    ("declutr", r"good\.csv: several columns, expected one of documents; choose it by --columns"),
    ("declutr --columns 1 --max-length 32", r"good\.csv: 0 of 3 documents have at least 128 .*"),
    ("simcls", r"good\.csv: 2 columns, expected text, reference and candidates; see --columns"),
    ("simcls --columns 1 2 1 --batch-size 4", r"good\.csv: 3 rows, expected at least .* is 4"),
    ("simcls --evaluate --dev short.csv", r"short\.csv line 2: scores '1'; expected a number for each .*"),
    ("simcls --evaluate --dev word.csv", r"word\.csv line 2: scores '1 x'; expected a number for each .*"),
    ("cil --data shape.jsonl", r"shape\.jsonl line 1: expected a JSON object with text, relation, h .*"),
    ("cil --data name.jsonl", r"name\.jsonl line 1: h: pos \[1, 3\] is 'hi', expected the name 'Chidi'"),
    ("cil --data na.jsonl", r"na\.jsonl: no line has a relation other than NA and no_relation"),
    ("cil --data bag.jsonl", r"bag\.jsonl: 1 bags, expected at least --batch-size .*"),
    ("cil --evaluate --model .", "--model .: no heads.safetensors, expected a model that .*"),
    ("finetune --data class.tsv --ood one.tsv", r"--ood one\.tsv: expected training texts .* in --dev"),
    ("finetune --data numbers.tsv --supcon-weight 1", "--supcon-weight.*: the task is regression, .*"),
    ("finetune --data class.tsv --contrast-set class.tsv one.tsv", ".*: 2 and 1 rows; expected an .*")])
def test_mistakes(command, message, cwd, capfd, folder_of):
    for name, content in FILES.items():
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    script, *flags = command.split()
    if "XLM" in flags:
        Path("XLM").symlink_to(folder_of("XLM"))
        capfd.readouterr()                                     # a progress bar of transformers
    good = ["--data", "good.csv", "--model", "scratch", "--batch-size", 2]
    rejects(script, capfd, message, *good, *flags)
