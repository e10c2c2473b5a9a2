"""--resume notices changed inputs: data, models, lists of files."""
import importlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.training.out import fingerprints
from running import DATA, KEPT, rejects, run, small_bert

SCRIPTS = "simclr moco simcse selfguided cline tacl ease vascl dclr childtuning finetune".split()
NO_INPUT = {"--out", "--prompt", "--columns", "--text-columns", "--label-column", "--child-filter",
            "--layer-study", "--save-triples", "--dev-columns"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_input_flag_has_a_checksum(script):
    parser = importlib.import_module(script).make_parser()
    flags = [flag for flag in parser._actions
             if flag.nargs != 0 and flag.type is None and not flag.choices]
    free = {flag.option_strings[-1] for flag in flags} - NO_INPUT
    assert {name[2:].replace("-", "_") for name in free} <= parser.inputs.keys()


def change_last_byte(path):
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def change_config(path):
    """Change a setting of a model without changing the size of its file."""
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"gelu"', '"relu"'))


def write_text(path):
    path.write_text("A man eats.\n")


def write_images(path):
    for label in "ab":
        (path / label).mkdir(parents=True)
        write_text(path / label / "0.png")


@pytest.mark.parametrize("flag, write, change", [
    ("data", write_text, change_last_byte), ("dev", write_text, lambda path: path.write_text("B.\n")),
    ("guide", small_bert, change_config), ("model", small_bert, lambda path: write_text(path / "new.json")),
    ("data", write_images, lambda path: (path / "a/0.png").write_text("A")),
    ("data", write_images, lambda path: os.rename(path / "a/0.png", path / "b/1.png")),
    ("data", write_images, lambda path: os.unlink(path / "a/0.png"))])
def test_checksum_changes_with_the_input(flag, write, change, tmp_path):
    """Of files the size and the first megabyte count, of folders the names and sizes, and config.json."""
    path = tmp_path / "input"
    write(path)
    args = SimpleNamespace(inputs=[flag], **{flag: str(path)})
    before, again = (fingerprints(args) for _ in range(2))
    assert before == again and before[flag]
    change(path)
    assert fingerprints(args)[flag] != before[flag]


def test_checksums_of_lists_and_pairs_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_text(Path(name))
    args = SimpleNamespace(inputs=["test", "transfer"], test=["a", "b"], transfer=["a,b"])
    before = fingerprints(args)
    change_last_byte(Path("b"))
    now = fingerprints(args)
    assert before["test"] != now["test"] and before["transfer"] != now["transfer"]


@pytest.mark.parametrize("flag, script, more, change", [
    ("--dev", "simcse", ["--dev", "dev.tsv"], lambda: change_last_byte(Path("dev.tsv"))),
    ("--guide", "dclr", ["--guide", "guide", "--phi", "0.994", "--columns", "1"],
     lambda: change_config(Path("guide")))])
def test_resume_rejects_changed_inputs(flag, script, more, change, cwd, capfd):
    shutil.copy(DATA / "sts.tsv", "dev.tsv")
    small_bert(Path("guide"))
    run(script, Path("out"), *KEPT, *more)
    capfd.readouterr()
    change()
    wanted = rf"--resume: the content of {flag} .* has changed since .*"
    rejects(script, capfd, wanted, *KEPT, *more, "--resume", "--out", "out")


def test_weights_that_are_not_finite_are_not_saved(cwd, capfd, monkeypatch):
    """An update may be NaN although the loss of its step was finite."""
    import simcse

    real_step = torch.optim.AdamW.step

    def step_with_nan(optimizer, *args):
        real_step(optimizer, *args)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].view(-1)[5] = torch.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", step_with_nan)
    with pytest.raises(SystemExit):
        simcse.main([*KEPT, "--out", "out"])
    assert "contains NaN or infinity" in capfd.readouterr().err
    assert not list(Path("out").rglob("*.safetensors")) and not Path("out/state.pt").exists()
