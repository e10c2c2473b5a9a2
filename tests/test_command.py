"""Flags: what is refused, in one line; what a library user gets instead."""
import pytest

import simcse
from kernels.training.command import COMMON, Fault, Flags
from running import SMALL, refuse


@pytest.mark.parametrize("flags, wanted", [
    ("--batch-size 4", r"good\.csv: 3 rows, wanted at least 2 and --batch-size, which is 4"),
    ("--temperature 0", r"argument --temperature: 0: wanted a number of at least 0\.0001"),
    ("--temperature nan", r"argument --temperature: nan: wanted a number of at least 0\.0001"),
    ("--temperature warm", r"argument --temperature: invalid float value: 'warm'"),
    ("--max-length 2", r"argument --max-length: 2: wanted a number of at least 3"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--batch-size 0", r"argument --batch-size: 0: wanted a number of at least 1"),
    ("--lr nan", r"argument --lr: nan: wanted a number of at least 0"),
    ("--seed 9999999999999999999", r"argument --seed: 9999999999999999999: wanted a number of at least 0"),
    ("--pooling best", r"argument --pooling: invalid choice: 'best' \(choose from .*cls_before_pooler.*\)"),
    ("--frobnicate", r"unrecognized arguments: --frobnicate"),
    ("--model none/such", r"--model none/such: no such folder, and the hub .*; name a local folder, or .*")])
def test_wrong_flags(here, capfd, flags, wanted):
    refuse("simcse", capfd, wanted, *SMALL, *flags.split())


def test_data_is_required(here, capfd):
    refuse("simcse", capfd, r"the following arguments are required: --data", "--model", "scratch")


def test_a_fault_is_an_exception_to_a_library():
    with pytest.raises(Fault, match="no-such-file.csv: No such file or directory"):
        simcse.load_data("no-such-file.csv", simcse.make_parser().parse_args(["--data", "no-such-file.csv"]))
    with pytest.raises(Fault, match="unrecognized"):
        simcse.make_parser().parse_args(["--data", "x", "--frobnicate"])


def test_defaults_are_told():
    parser = Flags("what it does")
    for name in COMMON:
        parser.common(name, 7 if name == "--seed" else None, "warm" if name == "--lr" else None)
    page = " ".join(parser.format_help().split())
    assert "default 7" in page and "learning rate; default warm" in page
    args = parser.parse_args(["--data", "x"])
    assert (args.seed, args.lr, args.test, args.resume) == (7, None, [], False)
