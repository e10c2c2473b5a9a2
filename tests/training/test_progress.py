"""Progress: lines in a log, the remaining time, and trackers (--log)."""
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import simcse
from kernels.training import progress as module
from kernels.training.progress import Clock, progress, step_line
from running import KEPT, metrics, rejects


def test_long_work_is_logged_without_a_terminal(monkeypatch, capsys):
    """Lines have the finished and the remaining work; short work prints nothing."""
    monkeypatch.setattr(module, "LOG_SECONDS", 0)
    assert list(progress(range(3), "linear probe", " steps")) == [0, 1, 2] and capsys.readouterr().err == ""
    monkeypatch.setattr(module, "QUIET_SECONDS", 0)
    assert list(progress(range(3), "linear probe", " steps")) == [0, 1, 2]
    lines = [line.strip() for line in capsys.readouterr().err.split("\n")]
    assert any(line.startswith("linear probe: 2 of 3 steps, ") and line.endswith(" left") for line in lines)


def test_remaining_time_includes_evaluations(monkeypatch):
    """A first evaluation of 7 s; 10 steps of 2 s, evaluations after steps 4, 8, 10."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    clock, line = Clock(), {"loss": 1.0, "lr": 0.1, "saved": True}
    args = SimpleNamespace(eval_every=4, batch_size=6)
    began = clock.seconds()
    now.seconds += 7
    clock.count_pause(began)
    now.seconds += 60                                          # before the loop, which nothing predicts
    clock.start(0)
    now.seconds += 2
    assert clock.seconds_left(1, 10, 4) == 18 + 3 * 7
    now.seconds += 6
    began = clock.seconds()
    now.seconds += 5
    clock.count_pause(began)
    assert (clock.seconds_per_step(4), clock.seconds_left(4, 10, 4)) == (2, 12 + 2 * 6)        # (7 + 5) / 2 s
    shown = step_line(clock, line | {"step": 4}, 10, args, "20.00")
    assert shown.endswith("  3 rows/s  left 0:24  dev 20.00 saved")
    assert clock.seconds_left(10, 10, 4) == 0


def fake_package(name, calls):
    """Return a package that appends its calls to a list: the arguments of a run, then (step, numbers)."""
    def init(**options):
        calls.append(options)
        return SimpleNamespace(log=lambda numbers, step: calls.append((step, numbers)))

    def summary_writer(folder, purge_step):
        calls.append((str(folder), purge_step))
        return SimpleNamespace(flush=lambda: None,
                               add_scalar=lambda name, value, step: calls.append((step, {name: value})))

    package = ModuleType(name)
    package.init, package.SummaryWriter = init, summary_writer
    return package


@pytest.mark.parametrize("name, package", [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_trackers_get_the_numbers_of_metrics(name, package, cwd, monkeypatch):
    """--resume continues the same run of wandb, and replaces the rows of TensorBoard after the checkpoint."""
    calls = []
    monkeypatch.setitem(sys.modules, package, fake_package(package, calls))
    flags = [*KEPT, "--log", name, "--out", "out"]
    simcse.main(flags)
    (row,) = metrics(Path("out"))
    logged = {key: value for step, numbers in calls[1:] for key, value in numbers.items() if step == 1}
    assert logged == {key: row[key] for key in ("loss", "lr", "seconds")}
    first = calls[0]
    simcse.main([*flags, "--resume"])
    if name == "wandb":
        assert (first["name"], first["resume"], first["config"]["batch_size"]) == ("out", "allow", 2)
        assert first["id"] == calls[-1]["id"] and len(first["id"]) == 32
    else:
        assert (first, calls[-1]) == (("out/tensorboard", 1), ("out/tensorboard", 2))


def test_tracker_that_is_missing(cwd, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = "--log wandb: the package wandb is not installed; pip install wandb, or leave --log out"
    rejects("simcse", capfd, wanted, *KEPT, "--log", "wandb")
