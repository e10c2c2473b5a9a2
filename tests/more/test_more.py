"""Test all scripts of further papers: they find the package kernels, and reject mistakes of a user."""
import runpy
import sys
from pathlib import Path

import pytest

from running import ROOT, rejects


@pytest.mark.parametrize("name", "consert declutr simcls cil finetune".split())
def test_the_script_finds_kernels(name, monkeypatch):
    """`python docs/more/NAME.py` adds the folder that contains kernels/ to Python's search path."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT])
    runpy.run_path(str(ROOT / "docs/more" / f"{name}.py"))
    assert any(Path(path).resolve() == ROOT for path in sys.path)


@pytest.mark.parametrize("command, message", [
    ("consert --data three.csv", r"three\.csv: 3 columns, expected 1 \(sentences\) or 2 .*"),
    ("declutr --columns 1 --max-length 32", r"good\.csv: 0 of 3 documents have at least 128 .*"),
    ("simcls", r"good\.csv: 2 columns, expected text, reference and candidates; see --columns"),
    ("cil --evaluate --model .", "--model .: no heads.safetensors, expected a model that .*")])
def test_mistakes(command, message, cwd, capfd):
    Path("three.csv").write_text("a,b,c\n" * 3)
    script, *flags = command.split()
    rejects(script, capfd, message, "--data", "good.csv", "--model", "scratch", "--batch-size", 2, *flags)
