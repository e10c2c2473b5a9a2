"""Flags: what is refused, in one line; what a library user gets instead."""
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest

import simcse
from kernels.training import cli
from kernels.training.cli import COMMON, Fault, Flags
from kernels.training.progress import progress
from running import ROOT, SMALL, refuse


@pytest.mark.parametrize("flags, wanted", [
    ("--batch-size 4", r"good\.csv: 3 rows, wanted at least 2 and --batch-size, which is 4"),
    ("--temperature 0", r"argument --temperature: 0: wanted a number of at least 0\.0001"),
    ("--temperature nan", r"argument --temperature: nan: wanted a number of at least 0\.0001"),
    ("--temperature warm", r"argument --temperature: invalid float value: 'warm'"),
    ("--max-length 2", r"argument --max-length: 2: wanted a number of at least 3"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--batch-size 0", r"argument --batch-size: 0: wanted a number of at least 1"),
    ("--lr nan", r"argument --lr: nan: wanted a number of at least 0"),
    ("--seed 9999999999999999999",
     r"argument --seed: 9999999999999999999: wanted a number of at least 0, and below 2\^63"),
    ("--lr 1e30", r"argument --lr: 1e30: wanted a number of at least 0, and below 2\^63"),
    ("--pooling best", r"argument --pooling: invalid choice: 'best' \(choose from .*cls_before_pooler.*\)"),
    ("--frobnicate", r"unrecognized arguments: --frobnicate"),
    ("--model none/such", r"--model none/such: no such folder, and the hub .*; name a local folder, or .*")])
def test_wrong_flags(here, capfd, flags, wanted):
    refuse("simcse", capfd, wanted, *SMALL, *flags.split())


def test_help_and_wrong_flags_need_no_torch():
    """Of all scripts and modules with flags; every other import takes seconds."""
    code = """import runpy, sys
sys.modules |= dict.fromkeys(["torch", "transformers", "numpy"])
for name in sys.argv[1:]:
    for flags in (["--help"], ["--frobnicate"]):
        sys.argv = [name, *flags]
        sys.stdout.reconfigure(encoding="ascii", errors="strict")
        try:
            run = runpy.run_path if name.endswith(".py") else runpy.run_module
            run(name, run_name="__main__")
        except SystemExit as end:
            print(name, end.code)
"""
    names = [*(path.name for path in sorted(ROOT.glob("*.py"))), "kernels.training.extras.mine"]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, text=True, capture_output=True)
    ends = [line for line in done.stdout.splitlines() if re.fullmatch(r"[\w.]+ \d", line)]
    assert ends == [f"{name} {code}" for name in names for code in (0, 2)], done.stderr
    assert len(names) == 11 and done.stderr.count("\n") == 11


def test_without_docstrings(monkeypatch, capfd):
    """transformers reads them."""
    monkeypatch.setattr(cli, "handle_signals", lambda handler: None)
    monkeypatch.setattr(sys, "flags", Mock(optimize=2))
    with pytest.raises(SystemExit, match="2"):
        cli.answer_early(simcse.make_parser)
    assert ": python -OO, or PYTHONOPTIMIZE=2, drops docstrings" in capfd.readouterr().err


@pytest.mark.parametrize("flags, wanted", [
    ("", "the following arguments are required: --data"),
    ("--tune y --data x", "--tune names the data; leave --data out"),
    ("--data x --guide=", "--guide: an empty name, .*"), ("--data x --dev=", "--dev: an empty name, .*"),
    ("--evaluate --guide x", "--evaluate: nothing to evaluate; .*"), ("--evaluate --more x", None),
    ("--tune x", None), ("--tune x --data x", None)])
def test_flags_that_name_what_is_read(flags, wanted):
    """--tune takes the place of --data."""
    parser = Flags("what it does")
    parser.plain("--data", "--dev", "--evaluate")
    for name, reads in ("--guide", "model"), ("--tune", "training data"), ("--more", "held-out data"):
        parser.add_argument(name, reads=reads)
    if wanted:
        with pytest.raises(Fault, match=wanted):
            parser.parse_args(flags.split())
    else:
        args = parser.parse_args(flags.split())
        assert args.inputs == ["data", "dev", "guide", "tune", "more"]
        assert args.data == (None if args.evaluate else "x")


def test_a_fault_is_an_exception_to_a_library():
    with pytest.raises(Fault, match="no-such-file.csv: No such file or directory"):
        simcse.load_data("no-such-file.csv", simcse.make_parser().parse_args(["--data", "no-such-file.csv"]))
    with pytest.raises(Fault, match="unrecognized"):
        simcse.make_parser().parse_args(["--data", "x", "--frobnicate"])


@pytest.mark.parametrize("rank, shown", [("0", True), ("1", False)])
def test_one_bar_for_all_processes(rank, shown, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", Mock(isatty=lambda: True, encoding="utf-8"))
    assert bool(progress(None, "reading", total=3).disable) == (not shown)


def test_defaults_are_told():
    parser = Flags("what it does")
    for name in COMMON:
        parser.common(name, 7 if name == "--seed" else None, "warm" if name == "--lr" else None)
    page = " ".join(parser.format_help().split())
    assert "default 7" in page and "learning rate; default warm" in page
    args = parser.parse_args(["--data", "x"])
    assert (args.seed, args.lr, args.test, args.resume) == (7, None, [], False)
