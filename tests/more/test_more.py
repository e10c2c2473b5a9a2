"""Test that the scripts of further papers find the package kernels."""
import runpy
import sys
from pathlib import Path

import pytest

from running import ROOT


@pytest.mark.parametrize("name", "consert declutr simcls cil finetune".split())
def test_the_script_finds_kernels(name, monkeypatch):
    """`python docs/more/NAME.py` adds the folder that contains kernels/ to Python's search path."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT])
    runpy.run_path(str(ROOT / "docs/more" / f"{name}.py"))
    assert any(Path(path).resolve() == ROOT for path in sys.path)
