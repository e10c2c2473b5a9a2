"""Wrong flags, and checksums of the inputs that flags name, by which --resume notices changed inputs."""
import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.training.errors import UserError, one_line
from kernels.training.flags import ScriptParser
from kernels.training.out import fingerprints
from running import SMALL, rejects


@pytest.mark.parametrize("flags, wanted", [
    ("--batch-size 4", r"good\.csv: 3 rows, expected at least 2 and at least --batch-size \(4\)"),
    ("--temperature nan", r"argument --temperature: nan: expected a number of at least 0\.0001"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--max-length 2.5", r"argument --max-length: invalid int value: '2\.5'")])
def test_wrong_flags(flags, wanted, cwd, capfd):
    rejects("simcse", capfd, wanted, *SMALL, *flags.split())


@pytest.mark.parametrize("flags, wanted", [
    ("", "the following arguments are required: --data"), ("--resume", "--resume: no run in out/none"),
    ("--tune y --data x", "--tune gives the training data; leave out --data"),
    ("--data x --guide=", "--guide: empty"), ("--tune x", None), ("--tune x --data x", None)])
def test_flags_that_name_inputs(flags, wanted):
    """Training needs --data, or a script's own flag for training data (here --tune). No name may be empty."""
    parser = ScriptParser("a script")
    parser.add_shared_flags("--data", "--evaluate", "--resume", out="out/none")
    parser.add_argument("--guide", reads="model")
    parser.add_argument("--tune", reads="training data")
    if wanted:
        with pytest.raises(UserError, match=wanted):
            parser.parse_args(flags.split())
    else:
        assert parser.parse_args(flags.split()).data == "x"


def test_messages_are_one_line():
    """Line breaks and terminal controls are escaped, joiners of Persian and emoji are not."""
    assert one_line("a\n\x1bb\u202ec") == r"a\n\x1bb\u202ec"
    assert one_line("می\u200cخواهم 👩\u200d💻 é") == "می\u200cخواهم 👩\u200d💻 é"


# ── checksums of inputs ──

SCRIPTS = "simclr moco simcse selfguided cline tacl ease vascl dclr childtuning finetune".split()
NO_INPUT = {"--out", "--prompt", "--columns", "--text-columns", "--label-column", "--child-filter",
            "--layer-study", "--save-triples", "--dev-columns"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_input_flag_has_a_checksum(script):
    parser = importlib.import_module(script).make_parser()
    names = {flag.option_strings[-1] for flag in parser._actions
             if flag.nargs != 0 and flag.type is None and not flag.choices}
    assert {name[2:].replace("-", "_") for name in names - NO_INPUT} <= parser.inputs.keys()


@pytest.mark.parametrize("flag, value, change", [
    ("data", "a.txt", lambda: Path("a.txt").write_text("A man eat.\n")),       # of the same size
    ("test", ["b.txt", "a.txt"], lambda: Path("a.txt").write_text("A man eat.\n")),
    ("transfer", ["b.txt,a.txt"], lambda: Path("a.txt").write_text("A man eat.\n")),
    ("guide", "model", lambda: Path("model/config.json").write_text('{"act": "relu"}')),
    ("model", "model", lambda: Path("model/new.json").touch()),
    ("data", "images", lambda: Path("images/a/0.png").write_text("smaller")),
    ("data", "images", lambda: os.rename("images/a/0.png", "images/b/1.png")),
    ("data", "images", lambda: os.unlink("images/a/0.png"))])
def test_checksum_changes_with_the_input(flag, value, change, cwd):
    """Of files the size and the first megabyte count, of folders the names and sizes, and config.json."""
    for path in "a.txt", "b.txt", "images/a/0.png", "images/b/0.png", "model/config.json":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"act": "gelu"}) if path.endswith("json") else "A man ate.\n")
    args = SimpleNamespace(inputs=[flag], **{flag: value})
    before = fingerprints(args)
    assert before == fingerprints(args)
    change()
    assert before[flag] != fingerprints(args)[flag]
