"""--resume notices that an input of a run has changed: data, models, lists of files, what links lead to; it
neither follows links that it would write through, nor believes what state.pt claims."""

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
from kernels.training.images.formats import read_pictures
from kernels.training.state import check_optimizer, check_tensors, state_of_one, untouched
from running import DATA, KEPT, refuse, run, small_bert

SCRIPTS = "simclr moco simcse selfguided cline tacl ease vascl dclr childtuning".split()
NO_INPUT = {"--out", "--prompt", "--columns", "--text", "--label", "--child", "--study", "--save-triples"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_that_names_an_input_has_a_checksum(script):
    parser = importlib.import_module(script).make_parser()
    flags = [flag for flag in parser._actions
             if flag.nargs != 0 and flag.type is None and not flag.choices]
    free = {flag.option_strings[-1] for flag in flags} - NO_INPUT
    assert {name[2:].replace("-", "_") for name in free} <= parser.inputs.keys()


def one_more(path):
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def other_weights(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def write_text(path):
    path.write_text("A man eats.\n")


def write_links(path):
    """A folder for each label, which is a link."""
    for label in "ab":
        os.makedirs(f"elsewhere/{label}")
        write_text(Path("elsewhere", label, "x.txt"))
        path.mkdir(exist_ok=True)
        (path / label).symlink_to(Path("elsewhere", label).absolute())


@pytest.mark.parametrize("flag, write, change", [
    ("data", write_text, one_more), ("dev", write_text, one_more), ("guide", small_bert, other_weights),
    ("teacher", small_bert, other_weights), ("model", small_bert, other_weights),
    ("model", small_bert, lambda path: write_text(path / "modules.json")),
    ("wordnet", lambda path: shutil.copytree(DATA / "wordnet", path),
     lambda path: one_more(path / "data.noun")),
    ("data", write_links, lambda path: one_more(Path("elsewhere/a/x.txt"))),
    ("data", write_links, lambda path: os.rename("elsewhere/a/x.txt", "elsewhere/b/y.txt"))])
def test_a_checksum_changes_with_the_content(flag, write, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(path := Path("input"))
    args = SimpleNamespace(inputs=[flag], **{flag: str(path)})
    was, again = (output_dir.fingerprints(args, {}) for _ in range(2))
    assert was == again and was[flag]
    change(path)
    assert output_dir.fingerprints(args, {})[flag] != was[flag]


def test_lists_and_pairs_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_text(Path(name))
    args = SimpleNamespace(inputs=["test", "transfer"], test=["a", "b"], transfer=["a,b"])
    was = output_dir.fingerprints(args, {})
    one_more(Path("b"))
    now = output_dir.fingerprints(args, {})
    assert was["test"] != now["test"] and was["transfer"] != now["transfer"]


def picture(path, colour, size=4):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), colour, np.uint8)).save(path)


@pytest.mark.parametrize("change", [
    lambda: picture("all/a/0.bmp", 9), lambda: picture("all/a/0.bmp", 0, size=5),
    lambda: os.unlink("all/a/0.bmp"), lambda: os.rename("all/a/0.bmp", "all/b/9.bmp")])
@pytest.mark.parametrize("listed", [True, False])
def test_pictures(change, listed, tmp_path, monkeypatch):
    """Of equal size in bytes, of another size, gone, with another label; in a folder or in a list."""
    monkeypatch.chdir(tmp_path)
    for i in range(6):
        picture(f"all/{'ab'[i % 2]}/{i}.bmp", i)

    def digest():
        names = sorted(str(path) for path in Path("all").rglob("*.bmp"))
        Path("list.tsv").write_text("".join(f"{name}\t{name[4]}\n" for name in names))
        return read_pictures("list.tsv" if listed else "all", workers=0)[0].digest

    was = digest()
    assert was == digest()
    change()
    assert was != digest()


@pytest.mark.parametrize("flag, script, more, change", [
    ("--dev", "simcse", ["--dev", "dev.tsv"], lambda: one_more(Path("dev.tsv"))),
    ("--guide", "dclr", ["--guide", "guide", "--phi", "0.994", "--columns", "1"],
     lambda: other_weights(Path("guide")))])
def test_resume_refuses_other_companions(flag, script, more, change, here, capfd):
    shutil.copy(DATA / "sts.tsv", "dev.tsv")
    small_bert(Path("guide"))
    run(script, Path("out"), *KEPT, *more)
    capfd.readouterr()
    change()
    wanted = rf"--resume: the content of {flag} .* is not what it was .*"
    refuse(script, capfd, wanted, *KEPT, *more, "--resume", "--out", "out")


@pytest.mark.parametrize("name", [
    ".running", "metrics.jsonl.tmp", "state.tmp", "simcse.py", "training", "1_Pooling"])
def test_resume_refuses_links(name, here, capfd):
    out, target = Path("out"), Path("target")
    out.mkdir()
    (out / "state.pt").write_text("x")
    target.write_text("dear")
    (out / name).symlink_to(target.absolute())
    refuse("simcse", capfd, rf"--out out: {name} is a link, .*", *KEPT, "--resume", "--out", "out")


def test_new_files_do_not_follow_links(tmp_path):
    (target := tmp_path / "target").write_text("dear")
    (link := tmp_path / "link").symlink_to(target)
    os.link(target, name := tmp_path / "name")
    for path in (link, name):
        with output_dir.new_file(path) as file:
            file.write("new")
        assert path.read_text() == "new" and not path.is_symlink() and target.read_text() == "dear"
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(OSError):
        output_dir.lock(linked_lock(tmp_path))
    assert target.read_text() == "dear"


def linked_lock(path):
    (out := path / "out").mkdir()
    (out / output_dir.RUNNING).symlink_to(path / "target")
    return out


# ── state.pt ──


def trained(kind=torch.optim.AdamW, **more):
    """An optimizer after a step, and its state_dict."""
    weights = [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(4))]
    optimizer = kind(weights, lr=0.1, **more)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer, optimizer.state_dict()


def of_first(name, value):
    return lambda found: found["state"][0].update({name: value(found["state"][0][name])})


FORGED = {
    "shape": of_first("exp_avg", lambda x: x[:1]),
    "strides": of_first("exp_avg", lambda x: x[:1, :1].expand(3, 4)),
    "order": of_first("exp_avg", lambda x: x.T.contiguous().T),
    "dtype": of_first("exp_avg", lambda x: x.to(torch.int8)),
    "NaN": of_first("exp_avg_sq", lambda x: x * torch.nan), "negative": of_first("exp_avg_sq", lambda x: -x),
    "layout": of_first("exp_avg", lambda x: x.to_sparse()), "text": of_first("exp_avg", lambda x: "x"),
    "step": of_first("step", lambda x: -x), "half a step": of_first("step", lambda x: x / 2),
    "a later step": of_first("step", lambda x: x + 9),
    "empty": lambda found: found["state"].clear(), "one less": lambda found: found["state"].pop(1),
    "no moment": lambda found: found["state"][0].pop("exp_avg"),
    "shared": lambda found: found["state"][0].update(exp_avg=found["state"][0]["exp_avg_sq"]),
    "maximize": lambda found: found["param_groups"][0].update(maximize=True),
    "betas": lambda found: found["param_groups"][0].update(betas="x"),
    "rate": lambda found: found["param_groups"][0].update(lr=float("nan"))}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_optimizer_is_refused(name):
    optimizer, found = trained(fused=True)
    check_optimizer(found, optimizer, untouched(found), 1)
    was = untouched(found)
    FORGED[name](found)
    with pytest.raises((ValueError, TypeError)):
        check_optimizer(found, optimizer, was, 1)


@pytest.mark.parametrize("kind, more", [
    (torch.optim.SGD, dict(momentum=0.9)), (torch.optim.Adam, {}), (torch.optim.AdamW, dict(fused=True))])
def test_states_that_a_step_left_are_accepted(kind, more):
    optimizer, found = trained(kind, **more)
    rates = [group["lr"] for group in optimizer.param_groups]
    check_optimizer(found, optimizer, untouched(found), 1)
    assert state_of_one(optimizer).keys() == found["state"][0].keys()
    assert rates == [group["lr"] for group in optimizer.param_groups] and len(optimizer.state) == 2


@pytest.mark.parametrize("found", [
    {}, {"w": torch.ones(3), "x": torch.ones(1)}, {"w": torch.ones(2)}, {"w": "x"},
    {"w": torch.ones(3).half()}, {"w": torch.full((3,), torch.inf)}])
def test_forged_weights_are_refused(found):
    check_tensors("model", {"w": torch.zeros(3)}, {"w": torch.ones(3)})
    with pytest.raises(ValueError):
        check_tensors("model", found, {"w": torch.ones(3)})


def test_weights_that_are_not_finite_are_not_saved(here, capfd, monkeypatch):
    """The loss of a step may be finite where its update is not."""
    import simcse

    start = torch.optim.AdamW.step

    def spoil(optimizer, *args):
        start(optimizer, *args)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].view(-1)[5] = torch.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    with pytest.raises(SystemExit):
        simcse.main([*KEPT, "--out", "out"])
    assert "holds NaN or infinity" in capfd.readouterr().err
    assert not list(Path("out").rglob("*.safetensors")) and not Path("out/state.pt").exists()
