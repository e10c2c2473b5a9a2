"""README and its like: commands parse, the one on what ships and the Python run, links lead somewhere, lines
have their length. Data of the other commands do not ship: the tests of each script run it."""
import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import kernels
from simcse import simcse_loss

ROOT = Path(__file__).resolve().parent.parent
README, HOUSE, FIDELITY = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/fidelity.md"))
DOCUMENTS = [README, HOUSE, *sorted(ROOT.glob("docs/*.md"))]
PYTHON = r"(?:\S*python3? (?:-m )?|torchrun (?:--\S+ \d+ )*)"
PROGRAM = re.compile(PYTHON + r"(kernels[\w.]+|\w+(?=\.py ))(?:\.py)? (.*)")


def read(path):
    """(text, [(language, block of code)], text without blocks) of a document."""
    text = path.read_text(encoding="utf-8")
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
    return text, fence.findall(text), fence.sub("", text)


def commands(path):
    """{(program, flags)} that a document prints, in blocks and in `code`."""
    _, blocks, prose = read(path)
    printed = "\n".join(re.sub(r" \\\n *", " ", block) for language, block in blocks if not language)
    lines = [*printed.splitlines(), *re.findall(r"`([^`\n]+)`", prose)]
    found = (PROGRAM.fullmatch(part.strip()) for line in lines for part in line.split(" && "))
    return {command.groups() for command in found if command}


COMMANDS = sorted(set().union(*map(commands, DOCUMENTS)))


@pytest.mark.parametrize("program, flags", COMMANDS, ids=lambda text: text[:60])
def test_command_parses(program, flags, monkeypatch):
    def parse(parser, words, namespace=None, parse_args=argparse.ArgumentParser.parse_args):
        raise KeyError("parsed" if "--help" in words or parse_args(parser, words) else None)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(KeyError, match="parsed"):
        importlib.import_module(program).main(shlex.split(flags))


def test_table_has_every_script():
    scripts = {path.stem for path in ROOT.glob("*.py")}
    assert set(re.findall(r"^\| `(\w+)\.py` .*`python \1\.py ", read(README)[0], re.M)) == scripts
    of_kernels = {f"kernels.{name}" for name in ("benchmark", "cost", "pictures", "training.mine")}
    assert {program for program, _ in COMMANDS} == scripts | of_kernels


def test_fidelity_names_flags_that_exist():
    for section in read(FIDELITY)[0].split("\n## ")[1:]:
        parser = importlib.import_module(re.search(r"(\w+)\.py", section)[1]).make_parser()
        assert set(re.findall(r"--[a-z][\w-]*", section)) <= set(parser._option_string_actions), section[:30]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, lines): README's copy of a script has run there, for a step, and said the lines."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "kernels", home / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "simcse.py", home)
    (home / "tests").symlink_to(ROOT / "tests")
    block = next(block for _, block in read(README)[1] if block.startswith("mkdir")).strip()
    block = block.replace("../.venv/bin/python", sys.executable) + " --steps 1 --out ../out/first"
    said = subprocess.run(["bash", "-ec", block], cwd=home, env=os.environ | {"OMP_NUM_THREADS": "1"},
                          check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    return home, said.replace("../", "").splitlines()


def test_a_run_says_what_readme_shows(run):
    shown = set(re.findall("^(?:simcse|model|tokens|load) .*", read(README)[1][0][1], re.M))
    assert len(shown) == 4 and shown <= set(run[1])


def test_python_runs(run, monkeypatch):
    monkeypatch.chdir(run[0])
    names, code = {}, "\n".join(block for language, block in read(README)[1] if language == "python")
    for part in code.split("\n\n"):
        if "sentence_transformers" not in part or importlib.util.find_spec("sentence_transformers"):
            exec(part, names)
    assert names["encoder"].weight.grad.isfinite().all() and names["tokenizer"]


def test_loss_of_the_eleventh_paper():
    names, (z1, z2) = {name: getattr(kernels, name) for name in kernels.__all__}, torch.randn(2, 8, 16)
    names["F"] = F
    for block in [block for language, block in read(HOUSE)[1] if language == "python"]:
        exec(textwrap.dedent(block), names)
    assert torch.allclose(names["my_loss"](z1, z2), simcse_loss(z1, z2)) and names["compute_loss"]


def test_links_and_lengths():
    assert len(read(README)[0].splitlines()) <= 130
    for path in DOCUMENTS:
        text, _, prose = read(path)
        assert all((path.parent / link).exists() for link in re.findall(r"\]\(([^):#]+)\)", prose)), path
        may = ("|", "python3 -m venv .venv && ")               # tables, and the two that have to be one line
        assert [line for line in text.splitlines() if len(line) > 110 and not line.startswith(may)] == []
