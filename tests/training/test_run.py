"""Test a run of simcse.py: its folder, signals and --resume, a full disk, weights that are NaN."""
import itertools
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import simcse
from kernels.training.out import atomic_file
from running import KEPT, SMALL, equal, metrics, saved_weights

FLAGS = [*SMALL, "--steps", "3", "--eval-every", "1"]


def saved_step(out):
    return torch.load(Path(out, "state.pt"), weights_only=True)["progress"]["step"]


def stop_in_step(step, stop, *flags):
    """Run simcse.py, and call stop() in this step, after its backward pass. The exit code must be 130."""
    steps = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(simcse, "all_reduce_gradients", lambda model: next(steps) == step and stop())
        simcse.main([*map(str, flags)])


def interrupt():
    raise KeyboardInterrupt


# ── signals and --resume ──


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_after_its_step_is_saved(kind, cwd, capfd):
    """--resume needs only --out, which may have moved. The weights equal those of an uninterrupted run."""
    flags = [*SMALL, "--steps", "3", "--lr", "1e-3", "--prompt", "a: ", "b: "]
    simcse.main([*flags, "--out", "whole"])
    stop_in_step(2, lambda: signal.raise_signal(kind), *flags, "--out", "out")
    assert saved_step("out") == 2 and "at step 2, saved; --resume continues" in capfd.readouterr().out
    os.rename("out", "moved")
    with open("moved/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')                          # a kill may cut the last row
    simcse.main(["--resume", "--out", "moved"])
    assert equal(saved_weights(Path("whole")), saved_weights(Path("moved")))
    assert not Path("moved/state.pt").exists()


def test_a_second_signal_stops_at_once(cwd):
    stop_in_step(2, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)], *FLAGS, "--out", "out")
    assert saved_step("out") == 1


@pytest.mark.parametrize("keep, during, after", [
    ("always", True, True), ("running", True, False), ("never", False, False)])
def test_keep_state(keep, during, after, cwd, capfd):
    """--keep-state decides whether state.pt exists during and after the run. --resume may change
    --keep-state; without state.pt, --resume starts at step 1. A new run does not overwrite a stopped one."""
    stop_in_step(2, interrupt, *FLAGS, "--keep-state", keep, "--out", "out")
    assert Path("out/state.pt").exists() == during
    simcse.main([*FLAGS, "--keep-state", keep, "--out", "whole"])
    assert Path("whole/state.pt").exists() == after and Path("whole/model.safetensors").exists()
    assert not Path("whole/tokens").exists()
    with pytest.raises(SystemExit, match="2"):
        simcse.main([*FLAGS, "--out", "out"])
    assert "--out out contains another run; continue it with --resume, or" in capfd.readouterr().err
    simcse.main(["--resume", "--out", "out", "--keep-state", "always"])
    assert saved_step("out") == 3
    assert [(row["step"], row["saved"]) for row in metrics(Path("out"))] == [(i, True) for i in (1, 2, 3)]


# ── saving ──


def test_files_are_flushed_before_they_are_renamed(cwd, monkeypatch):
    """Without fsync, a power failure could leave an incomplete file. Killing a process cannot test this."""
    calls, real_replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda *_: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or real_replace(*paths))
    with atomic_file(Path("a.txt")) as file:
        file.write("A.")
    assert calls == ["fsync", "replace"] and Path("a.txt").read_text() == "A."


@pytest.mark.parametrize("full_at", ["model.safetensors", "state.pt"])
def test_full_disk_keeps_the_checkpoint(full_at, cwd, capfd):
    """Writing this file fails halfway. A limit on the size of files has the same effect as a full disk."""
    stop_in_step(2, interrupt, *FLAGS, "--out", "out")
    capfd.readouterr()
    before = {name: Path("out", name).read_bytes() for name in ("model.safetensors", "state.pt")}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[full_at]) - 9, unlimited[1]))
    try:
        with pytest.raises(SystemExit, match="2"):
            simcse.main(["--resume", "--out", "out"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert re.fullmatch(r"simcse\.py: out.*File too large.*\n", capfd.readouterr().err)
    for name in {full_at, "state.pt"}:
        assert Path("out", name).read_bytes() == before[name]


def test_weights_that_are_not_finite_are_not_saved(cwd, capfd):
    """An update can make a weight NaN although the loss of the step was finite."""
    def spoil(optimizer, *_):
        optimizer.param_groups[0]["params"][0].data.view(-1)[5] = torch.nan

    hook = register_optimizer_step_post_hook(spoil)
    with pytest.raises(SystemExit, match="2"):
        simcse.main([*KEPT, "--out", "out"])
    hook.remove()
    assert "contains NaN or infinity" in capfd.readouterr().err
    assert not list(Path("out").rglob("*.safetensors")) and not Path("out/state.pt").exists()
