"""Every command and every piece of Python in README.md runs: as printed, with SHORT's flags behind it, in a copy of the repository.

Files that do not ship have a stand-in under the printed name. A command of a program that SHORT lacks fails, one that names an
unknown file fails in the script, and an entry that README.md has no more fails as well. Set-up (venv, pip) and these tests are not run.
"""
import csv, importlib, importlib.util, json, os, pickle, re, shlex, shutil, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT, IMAGES = "--model scratch --steps 2 ", "--model resnet-small --steps 2 --batch-size 16 --probe-epochs 1"
SHORT = {"simcse.py": TEXT, "selfguided.py": TEXT + "--width 64", "cline.py": TEXT, "tacl.py": TEXT + "--batch-size 8 --dev-pairs 8", "ease.py": TEXT,
         "vascl.py": TEXT, "dclr.py": TEXT, "childtuning.py": TEXT + "--seeds 1", "simclr.py": IMAGES, "moco.py": IMAGES,
         "kernels.benchmark": "--loss nt_xent --sizes 32x32x16 --set random --impl blockwise --repeat 1"}


def documents(path):
    lines = (DATA / "sentences.txt").read_text(encoding="utf-8").splitlines()[:120]
    path.write_text("\n".join(line + "\n" * (i % 8 == 7) for i, line in enumerate(lines)), encoding="utf-8")


def links(path):
    with open(DATA / "entities.tsv", encoding="utf-8") as file:
        path.write_text(json.dumps(list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))))


def cifar(path):
    """A folder as CIFAR-10's: 10 pictures of 32 x 32 in each file."""
    path.mkdir()
    shapes = np.load(DATA / "shapes.npz")
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        some = slice(10 * i, 10 * i + 10)
        pictures = shapes["images"][some].repeat(2, 1).repeat(2, 2).transpose(0, 3, 1, 2).reshape(10, -1)
        (path / name).write_bytes(pickle.dumps({b"data": pictures, b"labels": shapes["labels"][some].tolist()}))


def finished(path):
    """The folder of a run."""
    if not hasattr(finished, "kept"):
        finished.kept = path
        importlib.import_module("simcse").main(shlex.split(f"--data {DATA}/nli.csv --dev {DATA}/sts.tsv --out {path} {TEXT}"))
    else:
        shutil.copytree(finished.kept, path)


# printed name: a file of tests/data, or what makes one; the folders of runs are read where a command does not write them
STAND_INS = {"nli.csv": "nli.csv", "snli_triples.csv": "nli.csv", "/usr/share/wordnet": "wordnet", "wikipedia.txt": documents, "held-out.txt": documents,
             "ease-en.json": links, "fewrel.tsv": "entities.tsv", "links.tsv": "entities.tsv", "cifar-10-batches-py": cifar, "cifar2k.npz": "shapes.npz", "minilm": finished,
             "out/simcse": finished}
STAND_INS |= dict.fromkeys("wiki1m.txt wiki20k.txt wiki5k.txt wiki.txt mixed.txt".split(), "sentences.txt")
STAND_INS |= dict.fromkeys("rte.tsv cola_train.tsv sst2_train.tsv".split(), "topics.tsv") | dict.fromkeys("rte-dev.tsv cola_dev.tsv sst2_dev.tsv".split(), "topics_dev.tsv")
STAND_INS |= dict.fromkeys("stsb-all.tsv stsb-dev.tsv stsb_dev.tsv".split(), "sts.tsv")
NAMES = dict(F=F, torch=torch, q=torch.randn(8, 16), k=torch.randn(8, 16))                     # what pieces of Python take as given
PYTHON = re.compile(r"((\S*/)?python3?|torchrun( --\S+ \d+)*) ")
SETUP = re.compile(r"\S*python3? -m (venv|pytest) |\S*pip3? install |git clone |cd tencl")
OUTPUT = re.compile(r"\w+ {2,}|\s|selfguided \w+ |\d|#|$")                                    # a line that a command printed


def read(text):
    """[(kind, name, text)] of a README: kind is "python", "command" or, a whole block that needs a shell, "shell"."""
    cases, prose = [], re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        lines = [line for line in re.sub(r" *\\\n *", " ", block).splitlines() if PYTHON.match(line.strip()) or not OUTPUT.match(line)]
        steps = [step.strip() for line in lines for step in line.split(" && ") if not SETUP.match(step)]
        if language == "python":
            cases.append(("python", block.split("\n")[0][:40], block))
        elif language not in ("json", "text", "bibtex") and all(PYTHON.match(step) for step in steps):
            cases += [("command", program(step), step) for step in steps]
        elif language not in ("json", "text", "bibtex"):
            cases.append(("shell", steps[0].split()[0], "\n".join(steps)))
    for table in re.findall(r"(?:^\|.*\|\n)+", prose, re.M):
        head, _, *rows = ([cell.strip(" `") for cell in row[1:-1].split("|")] for row in table.splitlines())
        for command in filter(None, (row[head.index("command")] for row in rows if "command" in head)):
            cases.append(("command", program(command), command) if PYTHON.match(command) else ("shell", command.split()[0], command))
    return cases


def program(command):
    words = shlex.split(PYTHON.sub("", command, count=1))
    return words[1] if words[0] == "-m" else words[0]


def tree(home):
    """The repository's code in an empty folder; `python` there is this one, and ends scripts after two steps."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, home)
    shutil.copytree(ROOT / "kernels", home / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "tests").symlink_to(ROOT / "tests")
    (home / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (home / ".venv" / "bin" / name).write_text(f'#!/bin/sh\ncase "$1" in *.py) set -- "$@" --steps 2;; esac\nexec "{sys.executable}" "$@"\n')
        (home / ".venv" / "bin" / name).chmod(0o755)


def run_command(command, home):
    name = program(command)
    if name not in SHORT:
        pytest.fail(f"README.md runs {name}, which SHORT in {Path(__file__).name} does not know: {command}")
    words = shlex.split(PYTHON.sub("", command, count=1) + " " + SHORT[name])
    words = words[1 + (words[0] == "-m"):]
    for i, word in enumerate(words):
        path = home / word.lstrip("/")
        if "/" in word:
            path.parent.mkdir(parents=True, exist_ok=True)
        if word in STAND_INS and words[i - 1] not in ("--out", "--save", "--json", "--plot"):
            make = STAND_INS[word]
            make(path) if callable(make) else path.exists() or path.symlink_to(DATA / make)
            words[i] = str(path) if word.startswith("/") else word
    importlib.import_module(name.removesuffix(".py")).main(words)


def run_python(text):
    """Paragraphs share their names; one that wants sentence-transformers waits until it is installed."""
    names, left_out = dict(NAMES), False
    for part in text.split("\n\n"):
        if "from sentence_transformers" in part and not importlib.util.find_spec("sentence_transformers"):
            left_out = True
        else:
            exec(part, names)
    if left_out:
        pytest.skip("sentence-transformers is not installed; the other paragraphs ran")


@pytest.mark.parametrize("kind, name, text", read(README), ids=lambda value: value[:40].replace("\n", " "))
def test_runs(kind, name, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tree(tmp_path)
    try:
        if kind == "python":
            finished(tmp_path / "out" / "first")
            run_python(text)
        elif kind == "shell":
            env = os.environ | {"PATH": f"{tmp_path / '.venv' / 'bin'}:{os.environ['PATH']}"}
            subprocess.run(["bash", "-e", "-c", text], env=env, check=True)
        else:
            run_command(text, tmp_path)
    except SystemExit as end:
        said = capsys.readouterr().err
        if end.code == 2 and "wants the package" in said:
            pytest.skip(said.strip())
        pytest.fail(f"{text}\nended with {end.code}: {said}")


def test_no_entry_is_left_over():
    words = {word for kind, _, text in read(README) if kind != "python" for word in text.split()}
    names = {name for kind, name, _ in read(README)}
    assert [name for name in STAND_INS if name not in words] == [] and [name for name in SHORT if name not in names] == []


def test_linked_files_are_there():
    assert [path for path in re.findall(r"\]\(([^)#:]+)\)", README) if not (ROOT / path).exists()] == []


def test_reads_what_a_readme_may_hold():
    text = ("```bash\npython3 -m venv .venv && .venv/bin/pip install -q x && .venv/bin/python a.py --data \\\n    b.txt\n```\n\n```\na        printed: 2 rows\n```\n"
            "| script | command |\n|---|---|\n| `d.py` | `python d.py --data e` |\n```python\nx = 1\n```\n```\nmake all\n```\n```\ntorchrun --nproc-per-node 4 f.py\npython -m g.h i\n```\n")
    assert [case[:2] for case in read(text)] == [
        ("command", "a.py"), ("python", "x = 1"), ("shell", "make"), ("command", "f.py"), ("command", "g.h"), ("command", "d.py")]
    assert read(text)[0][2] == ".venv/bin/python a.py --data b.txt"
