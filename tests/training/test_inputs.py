"""--resume notices changed inputs: data, models, lists of files, targets of links."""
import importlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kernels.training import output_dir
from kernels.training.images.formats import read_images
from running import DATA, KEPT, rejects, run, small_bert

SCRIPTS = "simclr moco simcse selfguided cline tacl ease vascl dclr childtuning".split()
NO_INPUT = {"--out", "--prompt", "--columns", "--text-columns", "--label-column", "--child-filter",
            "--layer-study", "--save-triples"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_input_flag_has_a_checksum(script):
    parser = importlib.import_module(script).make_parser()
    flags = [flag for flag in parser._actions
             if flag.nargs != 0 and flag.type is None and not flag.choices]
    free = {flag.option_strings[-1] for flag in flags} - NO_INPUT
    assert {name[2:].replace("-", "_") for name in free} <= parser.inputs.keys()


def change_last_byte(path):
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def change_weights(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def write_text(path):
    path.write_text("A man eats.\n")


def write_links(path):
    """Write a folder with two labels, each of which is a link to a folder."""
    for label in "ab":
        os.makedirs(f"elsewhere/{label}")
        write_text(Path("elsewhere", label, "x.txt"))
        path.mkdir(exist_ok=True)
        (path / label).symlink_to(Path("elsewhere", label).absolute())


@pytest.mark.parametrize("flag, write, change", [
    ("data", write_text, change_last_byte), ("dev", write_text, change_last_byte),
    ("guide", small_bert, change_weights), ("teacher", small_bert, change_weights),
    ("model", small_bert, change_weights),
    ("model", small_bert, lambda path: write_text(path / "modules.json")),
    ("wordnet", lambda path: shutil.copytree(DATA / "wordnet", path),
     lambda path: change_last_byte(path / "data.noun")),
    ("data", write_links, lambda path: change_last_byte(Path("elsewhere/a/x.txt"))),
    ("data", write_links, lambda path: os.rename("elsewhere/a/x.txt", "elsewhere/b/y.txt"))])
def test_checksum_changes_with_the_content(flag, write, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("input")
    write(path)
    args = SimpleNamespace(inputs=[flag], **{flag: str(path)})
    before, again = (output_dir.fingerprints(args, {}) for _ in range(2))
    assert before == again and before[flag]
    change(path)
    assert output_dir.fingerprints(args, {})[flag] != before[flag]


def test_checksums_of_lists_and_pairs_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_text(Path(name))
    args = SimpleNamespace(inputs=["test", "transfer"], test=["a", "b"], transfer=["a,b"])
    before = output_dir.fingerprints(args, {})
    change_last_byte(Path("b"))
    now = output_dir.fingerprints(args, {})
    assert before["test"] != now["test"] and before["transfer"] != now["transfer"]


def write_image(path, colour, size=4):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), colour, np.uint8)).save(path)


@pytest.mark.parametrize("change", [
    lambda: write_image("all/a/0.bmp", 9), lambda: write_image("all/a/0.bmp", 0, size=5),
    lambda: os.unlink("all/a/0.bmp"), lambda: os.rename("all/a/0.bmp", "all/b/9.bmp")])
@pytest.mark.parametrize("from_list", [True, False])
def test_checksum_of_images(change, from_list, tmp_path, monkeypatch):
    """The checksum changes if an image changes (also at equal size), is deleted, or gets another label."""
    monkeypatch.chdir(tmp_path)
    for i in range(6):
        write_image(f"all/{'ab'[i % 2]}/{i}.bmp", i)

    def digest():
        names = sorted(str(path) for path in Path("all").rglob("*.bmp"))
        Path("list.tsv").write_text("".join(f"{name}\t{name[4]}\n" for name in names))
        return read_images("list.tsv" if from_list else "all", workers=0)[0].digest

    before = digest()
    assert before == digest()
    change()
    assert before != digest()


@pytest.mark.parametrize("flag, script, more, change", [
    ("--dev", "simcse", ["--dev", "dev.tsv"], lambda: change_last_byte(Path("dev.tsv"))),
    ("--guide", "dclr", ["--guide", "guide", "--phi", "0.994", "--columns", "1"],
     lambda: change_weights(Path("guide")))])
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
