"""Whole runs: --out, --resume, a full disk, a dead rank, a loss that is NaN. Signals are tested in
test_failures.py."""
import functools
import json
import os
import re
import resource
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import simcse
from kernels.training.errors import command, fail, log
from running import DATA, KEPT, SMALL, equal, few_pairs, free_port, metrics, rejects, run, start

TEXT = ["--model", "scratch", "--data", DATA / "nli.csv", "--batch-size", 8]
IMAGES = ["--model", "resnet-small", "--data", DATA / "shapes.npz", "--batch-size", 16, "--probe-epochs", 0]
def wait_for_step(process, out, step):
    deadline = time.time() + 120
    while time.time() < deadline and process.is_alive():
        if (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {Path(f'{out}.err').read_text()}")


def last_step(out):
    return torch.load(out / "state.pt", weights_only=True)["progress"]["step"]


@pytest.mark.parametrize("keep, left", [("always", True), ("running", False), ("never", False)])
def test_keep_state(keep, left, tmp_path, monkeypatch):
    """state.pt exists during the run, except with never. --resume may change --keep-state."""
    flags = [*TEXT, "--dev", few_pairs(tmp_path), "--steps", 2, "--eval-every", 1]
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr("simcse.all_reduce_gradients", Mock(side_effect=[None, KeyboardInterrupt]))
        run("simcse", tmp_path / "out", *flags, "--keep-state", keep)
    exists = (tmp_path / "out" / "state.pt").is_file()
    assert exists == (keep != "never")
    if exists:
        run("simcse", tmp_path / "out", *flags, "--keep-state", "always", "--resume")
    simcse.main([*map(str, flags), "--keep-state", keep, "--out", str(tmp_path / "whole")])
    assert (tmp_path / "whole" / "state.pt").is_file() == left
    assert (tmp_path / "whole" / "model.safetensors").is_file()


def test_state_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    """Without fsync, a power cut could leave an incomplete state.pt. Killing a process does not show this."""
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *x, name=name, real=real: calls.append((name, *x)) or real(*x))
    result = run("simcse", tmp_path / "out", *TEXT, "--dev", few_pairs(tmp_path), "--steps", 1)
    assert re.search(r"  dev -?\d+\.\d\d best$", result.said["1/1"])
    renames = [i for i, call in enumerate(calls) if str(call[-1]).endswith("state.pt")]
    assert len(renames) == 1 and calls[renames[0] - 1][0] == "fsync"


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Return the folder of a run that stopped after two of four steps."""
    out = tmp_path_factory.mktemp("half") / "out"
    run("simcse", out, *TEXT, "--steps", 2, "--eval-every", 2)
    flags = json.loads((out / "args.json").read_text())
    (out / "args.json").write_text(json.dumps(flags | {"steps": 4}))
    return out


@pytest.mark.parametrize("written", ["nothing", "the model"])
def test_full_disk_is_one_line_and_keeps_the_checkpoint(written, tmp_path, half):
    """A limit on file sizes fails like a full disk: at once, or in the middle of state.pt."""
    out = shutil.copytree(half, tmp_path / "out")
    before = {name: (out / name).read_bytes() for name in ("model.safetensors", "state.pt")}
    most = 100_000 if written == "nothing" else sum(map(len, before.values())) // 2
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
    full = start("simcse", out, *TEXT, "--steps", 4, "--eval-every", 2, "--resume", before=limit)
    full.join(120)
    errors = Path(f"{out}.err").read_text()
    assert full.exitcode == 2 and errors.count("\n") == 1, errors
    assert "File too large" in errors and str(out) in errors
    kept = before if written == "nothing" else {"state.pt": before["state.pt"]}
    assert kept == {name: (out / name).read_bytes() for name in kept} and last_step(out) == 2


def test_dead_rank_ends_the_others(tmp_path):
    group = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    out, flags = tmp_path / "out", [*TEXT, "--steps", 500, "--eval-every", 1, "--keep-state", "always"]
    ranks = [start("simcse", out, *flags, RANK=rank, LOCAL_RANK=rank, **group) for rank in "01"]
    wait_for_step(ranks[0], out, 2)
    ranks[1].kill()
    ranks[0].join(60)
    errors = Path(f"{out}.err").read_text()
    assert ranks[0].exitcode == 2 and errors.count("\n") == 1
    assert "another process of this run has died or hangs" in errors and last_step(out) >= 1


def stop_after_three_steps():
    """Make simcse.py stop as after Ctrl-C, in the fourth step."""
    real, steps = simcse.all_reduce_gradients, []

    def all_reduce_or_stop(model):
        steps.append(model)
        if len(steps) > 3:
            raise KeyboardInterrupt
        real(model)

    simcse.all_reduce_gradients = all_reduce_or_stop


def test_every_rank_resumes_with_its_own_random_state(tmp_path):
    """Elsewhere, all ranks resume with the state of rank 0, so that dropout is not that of a whole run. Here
    the run resumes at step 2, and has the weights of a run that was not interrupted, bit by bit."""
    flags = [*TEXT, "--steps", 5, "--eval-every", 2, "--dev", few_pairs(tmp_path), "--keep-state", "always"]
    for out, more, before in (("whole", [], None), ("parts", [], stop_after_three_steps),
                              ("parts", ["--resume"], None)):
        group = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        ranks = [start("simcse", tmp_path / out, *flags, *more, before=before, **group, RANK=rank,
                       LOCAL_RANK=rank) for rank in "01"]
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == ([130, 130] if before else [0, 0])
    whole, parts = (torch.load(tmp_path / out / "state.pt", weights_only=True) for out in ("whole", "parts"))
    assert not torch.equal(whole["random"][0][0], whole["random"][1][0])
    assert equal(whole["random"], parts["random"]) and equal(whole["model"], parts["model"])
    assert [row["loss"] for row in metrics(tmp_path / "whole")] == [
        row["loss"] for row in metrics(tmp_path / "parts")]


def test_messages_replace_the_progress_bar(monkeypatch, capsys):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    log("stopped", "at step 3")
    with pytest.raises(SystemExit):
        command(lambda argv=None: fail("no"))()
    assert capsys.readouterr() == ("\r\x1b[Kstopped  at step 3\n", "\r\x1b[Ktest_run.py: no\n")


@pytest.mark.parametrize("name, flags, wanted", [
    ("ease", ["--data", DATA / "entities.tsv", "--warmup-steps", 500, "--batch-size", 8],
     "the warm-up has 500 steps, but the run has only 2: .*; shorten the warm-up, or train .*"),
    ("simclr", [*IMAGES[2:], "--model", "resnet-small", "--warmup-epochs", 2],
     "the warm-up has 74 steps, but the run has only 2: .*; shorten the warm-up, or train .*")])
def test_note_about_a_schedule_that_hardly_trains(name, flags, wanted, tmp_path):
    scratch = [] if "--model" in flags else ["--model", "scratch"]
    assert re.fullmatch(wanted, run(name, tmp_path / "out", *flags, *scratch, "--steps", 2).said["note"])


# ── folders ──


@pytest.mark.parametrize("flags, wanted", [
    ("--out good.csv", r"--out good\.csv: /.*/good\.csv is not a writable folder"),
    ("--out good.csv/out", r"--out good\.csv/out: /.*/good\.csv is not a writable folder"),
    ("--out .", r"--out \. contains files but no checkpoint; empty it, or choose another folder"),
    ("--out nothing/out", r"--out nothing/out: /.*/nothing is not a writable folder"),
    ("--resume --out .", r"--out \.: no state\.pt to resume from")])
def test_rejected_out(cwd, capfd, flags, wanted):
    Path("nothing").symlink_to("gone")
    rejects("simcse", capfd, wanted, *SMALL, *flags.split())


def test_resume_takes_flags_from_the_folder(cwd, monkeypatch, capfd):
    """--resume and --out are enough. Flags that are given must be equal to the saved ones, except a few."""
    flags = [*KEPT, "--steps", "3", "--lr", "1e-3", "--prompt", "a: ", "b: "]
    simcse.main([*flags, "--out", "whole"])
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr("simcse.all_reduce_gradients", Mock(side_effect=[None, KeyboardInterrupt]))
        simcse.main([*flags, "--out", "out"])
    os.rename("out", "moved")
    for more in ([], ["--keep-state", "running"]):             # the first one does all remaining steps
        simcse.main(["--resume", "--out", "moved", *more])
    os.rename("moved", "out")
    one, two = (load_file(f"{out}/model.safetensors") for out in ("whole", "out"))
    assert equal(one, two) and not Path("out/state.pt").exists()
    capfd.readouterr()
    wanted = "--resume: steps was 3 in whole, now it is 9; to train a model .* --model whole --out NEW"
    rejects("simcse", capfd, wanted, "--resume", "--out", "whole", "--steps", "9")
    wanted = "--out out contains a finished run; .* start a new run with --model out --out NEW"
    rejects("simcse", capfd, wanted, "--resume", "--out", "out")


DAMAGED = r"--resume: args\.json, state\.pt or metrics\.jsonl in out cannot be read \(.*\); start .*"


@pytest.mark.parametrize("file, change, flags, wanted", [
    ("state.pt", None, "", "--out out contains a finished run; .*"),
    ("state.pt", lambda old: old[:5000], "", DAMAGED),
    ("state.pt", lambda old: b"", "", DAMAGED),
    ("metrics.jsonl", lambda old: b"{\n", "", DAMAGED),
    ("args.json", None, "", DAMAGED),
    ("args.json", bytes, "--lr 1", r"--resume: lr was 0\.002 in out, now it is 1\.0"),
    ("args.json", bytes, "--chunk-tokens 9", r"--resume: chunk_tokens was None in out, now it is 9"),
    ("args.json", bytes, "--pooling cls", r"--resume: pooling was avg in out, now it is cls"),
    ("../good.csv", lambda old: old.replace(b"a", b"e", 1), "",
     "--resume: the content of --data .* has changed since the run in out was started; .*"),
    ("args.json", bytes, None, r"--out out contains another run; continue it with --resume, or choose .*")])
def test_rejected_resume(cwd, capfd, finished, file, change, flags, wanted):
    shutil.copytree(finished, "out")
    path = Path("out", file)
    if change:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    more = ["--resume", *flags.split()] if flags is not None else []
    rejects("simcse", capfd, wanted, *SMALL, "--out", "out", *more)
