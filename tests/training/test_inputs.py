"""--resume notices changed inputs (data, models, lists of files, targets of links), rejects links in --out,
and checks state.pt before loading it."""
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
from kernels.training.state import check_optimizer, check_tensors, example_state, params_without_state
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


@pytest.mark.parametrize("name", [
    ".running", "metrics.jsonl.tmp", "state.tmp", "simcse.py", "training", "1_Pooling"])
def test_resume_rejects_links(name, cwd, capfd):
    out, target = Path("out"), Path("target")
    out.mkdir()
    (out / "state.pt").write_text("x")
    target.write_text("precious")
    (out / name).symlink_to(target.absolute())
    rejects("simcse", capfd, rf"--out out: {name} is a link, .*", *KEPT, "--resume", "--out", "out")


def test_new_files_do_not_follow_links(tmp_path):
    target, link, hard_link = tmp_path / "target", tmp_path / "link", tmp_path / "hard_link"
    target.write_text("precious")
    link.symlink_to(target)
    os.link(target, hard_link)
    for path in (link, hard_link):
        with output_dir.create_file(path) as file:
            file.write("new")
        assert path.read_text() == "new" and not path.is_symlink() and target.read_text() == "precious"
    out = tmp_path / "out"
    out.mkdir()
    (out / output_dir.LOCK_FILE).symlink_to(target)
    with pytest.raises(OSError):
        output_dir.lock(out)
    assert target.read_text() == "precious"


# ── state.pt ──


def make_trained(kind=torch.optim.AdamW, **more):
    """Return an optimizer after a step, and its state_dict."""
    weights = [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(4))]
    optimizer = kind(weights, lr=0.1, **more)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer, optimizer.state_dict()


def change_state(name, change):
    """Return a function that changes this entry in the state of the first weight."""
    return lambda found: found["state"][0].update({name: change(found["state"][0][name])})


FORGED = {
    "shape": change_state("exp_avg", lambda x: x[:1]),
    "strides": change_state("exp_avg", lambda x: x[:1, :1].expand(3, 4)),
    "order": change_state("exp_avg", lambda x: x.T.contiguous().T),
    "dtype": change_state("exp_avg", lambda x: x.to(torch.int8)),
    "NaN": change_state("exp_avg_sq", lambda x: x * torch.nan),
    "negative": change_state("exp_avg_sq", lambda x: -x),
    "layout": change_state("exp_avg", lambda x: x.to_sparse()),
    "text": change_state("exp_avg", lambda x: "x"),
    "step": change_state("step", lambda x: -x), "half a step": change_state("step", lambda x: x / 2),
    "a later step": change_state("step", lambda x: x + 9),
    "empty": lambda found: found["state"].clear(), "one less": lambda found: found["state"].pop(1),
    "no moment": lambda found: found["state"][0].pop("exp_avg"),
    "shared": lambda found: found["state"][0].update(exp_avg=found["state"][0]["exp_avg_sq"]),
    "maximize": lambda found: found["param_groups"][0].update(maximize=True),
    "betas": lambda found: found["param_groups"][0].update(betas="x"),
    "rate": lambda found: found["param_groups"][0].update(lr=float("nan"))}


@pytest.mark.parametrize("name", FORGED)
def test_forged_optimizer_is_rejected(name):
    optimizer, found = make_trained(fused=True)
    without_state = params_without_state(found)
    check_optimizer(found, optimizer, without_state, 1)
    FORGED[name](found)
    with pytest.raises((ValueError, TypeError)):
        check_optimizer(found, optimizer, without_state, 1)


@pytest.mark.parametrize("kind, more", [
    (torch.optim.SGD, dict(momentum=0.9)), (torch.optim.Adam, {}), (torch.optim.AdamW, dict(fused=True))])
def test_state_of_a_real_step_is_accepted(kind, more):
    """The check does not change the optimizer."""
    optimizer, found = make_trained(kind, **more)
    rates = [group["lr"] for group in optimizer.param_groups]
    check_optimizer(found, optimizer, params_without_state(found), 1)
    assert example_state(optimizer).keys() == found["state"][0].keys()
    assert rates == [group["lr"] for group in optimizer.param_groups] and len(optimizer.state) == 2


@pytest.mark.parametrize("found", [
    {}, {"w": torch.ones(3), "x": torch.ones(1)}, {"w": torch.ones(2)}, {"w": "x"},
    {"w": torch.ones(3).half()}, {"w": torch.full((3,), torch.inf)}])
def test_forged_weights_are_rejected(found):
    check_tensors("model", {"w": torch.zeros(3)}, {"w": torch.ones(3)})
    with pytest.raises(ValueError):
        check_tensors("model", found, {"w": torch.ones(3)})


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
