"""Flags: wrong flags are rejected in one line; a caller in Python gets an exception."""
import sys
from unittest.mock import Mock

import pytest

import simcse
from kernels.training.errors import UserError
from kernels.training.flags import SHARED_FLAGS, ScriptParser
from kernels.training.progress import progress
from running import SMALL, rejects


@pytest.mark.parametrize("flags, wanted", [
    ("--batch-size 4", r"good\.csv: 3 rows, expected at least 2 and at least --batch-size \(4\)"),
    ("--temperature nan", r"argument --temperature: nan: expected a number of at least 0\.0001"),
    ("--temperature warm", r"argument --temperature: invalid float value: 'warm'"),
    ("--max-length 2", r"argument --max-length: 2: expected a number of at least 3"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--seed 9999999999999999999",
     r"argument --seed: 9999999999999999999: expected a number of at least 0"),
    ("--lr 1e30", r"argument --lr: 1e30: expected a number of at least 0"),
    ("--pooling best", r"argument --pooling: invalid choice: 'best' \(choose from .*cls_before_pooler.*\)"),
    ("--frobnicate", r"unrecognized arguments: --frobnicate"),
    ("--model none/such", r"--model none/such: no such folder, and the hub .*; give a local folder, or .*")])
def test_wrong_flags(cwd, capfd, flags, wanted):
    rejects("simcse", capfd, wanted, *SMALL, *flags.split())


@pytest.mark.parametrize("flags, wanted", [
    ("", "the following arguments are required: --data"), ("--resume", "--resume: no run in out/none"),
    ("--tune y --data x", "--tune gives the training data; leave out --data"),
    ("--data x --guide=", "--guide: empty; .*"), ("--data x --dev=", "--dev: empty; .*"),
    ("--evaluate --guide x", "--evaluate: nothing to evaluate; .*"), ("--evaluate --more x", None),
    ("--tune x", None), ("--tune x --data x", None)])
def test_flags_that_name_inputs(flags, wanted):
    """Training needs --data, or a script's own flag for training data (here --tune). No name may be empty."""
    parser = ScriptParser("a script")
    parser.add_shared_flags("--data", "--dev", "--evaluate", "--resume", out="out/none")
    for name, reads in ("--guide", "model"), ("--tune", "training data"), ("--more", "held-out data"):
        parser.add_argument(name, reads=reads)
    if wanted:
        with pytest.raises(UserError, match=wanted):
            parser.parse_args(flags.split())
    else:
        args = parser.parse_args(flags.split())
        assert args.inputs == ["data", "dev", "guide", "tune", "more"]
        assert args.data == (None if args.evaluate else "x")


def test_error_is_an_exception_for_a_caller_in_python():
    with pytest.raises(FileNotFoundError, match="no-such-file.csv"):
        simcse.load_data("no-such-file.csv", simcse.make_parser().parse_args(["--data", "no-such-file.csv"]))
    with pytest.raises(UserError, match="unrecognized"):
        simcse.make_parser().parse_args(["--data", "x", "--frobnicate"])


@pytest.mark.parametrize("rank, shown", [("0", True), ("1", False)])
def test_only_rank_0_shows_a_progress_bar(rank, shown, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", Mock(isatty=lambda: True, encoding="utf-8"))
    assert bool(progress(None, "reading", total=3).disable) == (not shown)


def test_help_shows_defaults():
    parser = ScriptParser("a script")
    for name in SHARED_FLAGS:
        parser.add_shared(name, 7 if name == "--seed" else None, "warm" if name == "--lr" else None)
    page = " ".join(parser.format_help().split())
    assert "default 7" in page and "learning rate; default warm" in page
    args = parser.parse_args(["--data", "x"])
    assert (args.seed, args.lr, args.test, args.resume) == (7, None, [], False)
