"""Check README, CONTRIBUTING and docs: commands parse, and links exist. Run README's first command, and the
Python code of README and CONTRIBUTING. Other commands need data that is not in the repository."""
import argparse
import importlib
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
README, CONTRIBUTING, FIDELITY = map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "docs/fidelity.md"))
DOCUMENTS = [README, CONTRIBUTING, *sorted(ROOT.glob("docs/*.md"))]
PYTHON = r"(?:\S*python3? (?:-m )?|torchrun (?:--\S+ \d+ )*)"
PROGRAM = re.compile(PYTHON + r"(?:docs/(?:more/)?)?(kernels[\w.]+|\w+(?=\.py ))(?:\.py)? (.*)")


def read(path):
    """Return (text, [(language, code block)], text without code blocks) of a document."""
    text = path.read_text(encoding="utf-8")
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
    return text, fence.findall(text), fence.sub("", text)


def commands(path):
    """Return {(program, flags)} of the commands in a document's code blocks and inline code. For a copy that
    `cp simcse.py NAME.py` makes, the program is simcse."""
    text, blocks, prose = read(path)
    copies = {copy: script for script, copy in re.findall(r"^cp (\w+)\.py (\w+)\.py$", text, re.M)}
    printed = "\n".join(re.sub(r" \\\n *", " ", block) for language, block in blocks if not language)
    lines = [*printed.splitlines(), *re.findall(r"`([^`\n]+)`", prose)]
    found = (PROGRAM.fullmatch(part.strip()) for line in lines for part in line.split(" && "))
    return {(copies.get(command[1], command[1]), command[2]) for command in found if command}


COMMANDS = sorted(set().union(*map(commands, DOCUMENTS)))


@pytest.mark.parametrize("program, flags", COMMANDS, ids=lambda text: text[:60])
def test_command_parses(program, flags, monkeypatch):
    # Replace parse_args, so that the program stops as soon as its flags are parsed.
    def parse(parser, words, namespace=None, parse_args=argparse.ArgumentParser.parse_args):
        raise KeyError("parsed" if "--help" in words or parse_args(parser, words) else None)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(KeyError, match="parsed"):
        importlib.import_module(program).main(shlex.split(flags))


def test_table_has_every_script():
    scripts = {path.stem for path in ROOT.glob("*.py")}
    assert set(re.findall(r"^\| `(\w+)\.py` .*`python \1\.py ", read(README)[0], re.M)) == scripts
    of_kernels = {"kernels.benchmark", "kernels.training.plot", "plot_kernels"}
    more = {path.stem for path in (ROOT / "docs" / "more").glob("*.py")} - {"cil_bags", "uncorrected_adamw"}
    assert {program for program, _ in COMMANDS} == scripts | of_kernels | more


def test_flags_in_docs_fidelity_exist():
    for section in read(FIDELITY)[0].split("\n## ")[1:]:
        parser = importlib.import_module(re.search(r"(\w+)\.py", section)[1]).make_parser()
        assert set(re.findall(r"--[a-z][\w-]*", section)) <= set(parser._option_string_actions), section[:30]


def test_a_run_prints_what_readme_shows(tmp_path):
    """The commands that copy a script run it on the data of README's first command, and print what README
    shows for this command, with the same scores. The losses alone can be copied into another package."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "simcse.py", tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    block = next(block for _, block in read(README)[1] if block.startswith("mkdir")).strip()
    block = block.replace("../.venv/bin/python", sys.executable) + " --out ../out/first"
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    printed = subprocess.run(["bash", "-ec", block], cwd=tmp_path, env=env, check=True,
                             stdout=subprocess.PIPE, encoding="utf-8").stdout.replace("../", "")
    shown = re.findall(r"^(?:simcse|model|run|tokens|before|done|load) .*?(?=, 0 min|$)",
                       read(README)[1][0][1], re.M)
    assert len(shown) == 7 and [line for line in shown if line not in printed] == []
    shutil.copytree(ROOT / "kernels", tmp_path / "mine/losses", ignore=shutil.ignore_patterns("training"))
    code = "import mine.losses, sys; assert mine.losses.info_nce and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_python_of_readme_runs():
    names, code = {}, "\n".join(block for language, block in read(README)[1] if language == "python")
    exec(code, names)
    assert names["loss"].isfinite() and names["lse"].isfinite().all() and names["lse"].shape == (512,)
    names["loss"].backward()


def test_my_loss_in_contributing_equals_simcse_loss():
    names, (z1, z2) = vars(kernels) | {"F": F}, torch.randn(2, 8, 16)
    for block in [block for language, block in read(CONTRIBUTING)[1] if language == "python"]:
        exec(textwrap.dedent(block), names)
    assert torch.allclose(names["my_loss"](z1, z2), simcse_loss(z1, z2)) and names["compute_loss"]


def test_links():
    for path in DOCUMENTS:
        links = re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", read(path)[2])
        assert all((path.parent / link).exists() for link in links), path
