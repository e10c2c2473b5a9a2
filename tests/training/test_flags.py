"""Test default values of flags, and the checksums by which --resume notices that an input has changed."""
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import simcse
from kernels.training.errors import UserError
from kernels.training.flags import fill_defaults
from kernels.training.out import fingerprints


def test_a_flag_given_as_0_is_no_missing_flag():
    args = SimpleNamespace(warmup_steps=0, blur=None)
    fill_defaults(args, dict(warmup_steps=9, blur=0.5))
    assert vars(args) == dict(warmup_steps=0, blur=0.5)


# ── checksums of inputs ──

@pytest.mark.parametrize("flag, value, change", [
    ("data", "a.txt", lambda: Path("a.txt").write_text("A man eat.\n")),       # its size is unchanged
    ("test", ["b.txt", "a.txt"], lambda: Path("a.txt").write_text("A man eat.\n")),
    ("model", "model", lambda: Path("model/new.json").touch()),
    ("model", "model", lambda: Path("model/weights").write_text("B man ate.\n")),
    ("data", "large.txt", lambda: Path("large.txt").write_text("A" * 2**21 + "B")),
    ("data", "images", lambda: Path("images/a/0.png").write_text("A dog ate.\n")),
    ("data", "images", lambda: os.rename("images/a/0.png", "images/b/1.png")),
    ("data", "images", lambda: os.unlink("images/a/0.png"))])
def test_checksum_changes_with_the_input(flag, value, change, cwd):
    """A checksum depends on a file's content, and on names, sizes and contents of a folder's files."""
    Path("large.txt").write_text("A" * 2**21 + "A")
    for path in "a.txt", "b.txt", "images/a/0.png", "images/b/0.png", "model/config.json", "model/weights":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"act": "gelu"}) if path.endswith("json") else "A man ate.\n")
    args = SimpleNamespace(inputs={flag: "model"}, **{flag: value})
    before = fingerprints(args)
    assert before == fingerprints(args)
    change()
    assert before[flag] != fingerprints(args)[flag]


def test_large_folders_and_names_of_new_models(cwd):
    """Of 2,001 files, every third is hashed; sizes count for all. A folder named scratch is not read."""
    for i in range(2001):
        Path(f"{i:04}.png").write_text("A")
    args, found = SimpleNamespace(inputs=dict(data="training data"), data="."), []
    for name, text in ("0001.png", "B"), ("0001.png", "AB"), ("0003.png", "B"):
        found.append(fingerprints(args))
        Path(name).write_text(text)
    assert found[0] == found[1] != found[2] != fingerprints(args)
    Path("scratch").mkdir()
    assert fingerprints(SimpleNamespace(inputs=dict(model="model"), model="scratch")) == {}


@pytest.mark.parametrize("flags, wanted", [
    ("", "the following arguments are required: --data"),
    ("--resume --out none", "--resume: no run in none"),
    ("--data pipe.txt", "--data pipe.txt: neither a file nor a folder")])
def test_missing_data(flags, wanted, cwd):
    os.mkfifo("pipe.txt")
    with pytest.raises(UserError, match=f"^{wanted}"):
        simcse.make_parser().parse_args(flags.split())
