"""Progress: lines in a log, the remaining time, and trackers (--log)."""
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import simcse
from kernels.training import progress as module
from kernels.training.progress import Clock, progress, step_line
from running import KEPT, metrics, rejects


@pytest.fixture
def now(monkeypatch):
    """Return a fake clock: now.seconds changes only when a test changes it."""
    now = SimpleNamespace(seconds=100.0)

    def read():
        return now.seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=read, perf_counter=read))
    return now


def test_long_work_is_logged_without_a_terminal(monkeypatch, capsys):
    """Lines have the finished and the remaining work; short work prints nothing."""
    monkeypatch.setattr(module, "LOG_SECONDS", 0)
    assert list(progress(range(3), "linear probe", " steps")) == [0, 1, 2] and capsys.readouterr().err == ""
    monkeypatch.setattr(module, "QUIET_SECONDS", 0)
    assert list(progress(range(3), "linear probe", " steps")) == [0, 1, 2]
    lines = [line.strip() for line in capsys.readouterr().err.split("\n")]
    assert any(line.startswith("linear probe: 2 of 3 steps, ") and line.endswith(" left") for line in lines)


def test_remaining_time_includes_evaluations(now):
    """A first evaluation of 7 s; 10 steps of 2 s, evaluations after steps 4, 8, 10."""
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


def test_a_clock_that_stands_still(now):
    clock = Clock()
    clock.start(0)
    args = SimpleNamespace(eval_every=4, batch_size=6)
    assert "left 0:00" in step_line(clock, {"loss": 1.0, "lr": 0.1, "step": 1}, 10, args)


def fake_tracker(monkeypatch, name):
    """Install a fake package; return the list of its calls."""
    calls = []
    package = ModuleType(name)
    if name == "wandb":
        def init(**options):
            calls.append(options)
            return SimpleNamespace(log=lambda row, step: calls.append((step, row)))
        package.init = init
    else:
        class SummaryWriter:
            def __init__(self, folder, purge_step):
                calls.append((str(folder), purge_step))

            def add_scalar(self, name, value, step):
                calls.append((step, {name: value}))

            def flush(self):
                pass
        package.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), package)
    return calls


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_trackers_get_the_numbers_of_metrics(name, cwd, monkeypatch):
    """--resume continues the same run of wandb, and replaces the rows of TensorBoard after the checkpoint."""
    calls = fake_tracker(monkeypatch, name)
    flags = [*KEPT, "--log", name, "--out", "out"]
    simcse.main(flags)
    (row,) = metrics(Path("out"))
    numbers = {key: value for key, value in row.items() if key not in ("step", "best")}
    logged = {key: value for step, values in calls[1:] for key, value in values.items() if step == 1}
    assert logged == numbers and set(numbers) == {"loss", "lr", "seconds"}
    first = calls[0]
    simcse.main([*flags, "--resume"])
    if name == "wandb":
        assert (first["name"], first["resume"]) == ("out", "allow")
        assert first["id"] == calls[-1]["id"] and len(first["id"]) == 32
        assert first["config"]["batch_size"] == 2
    else:
        assert (first, calls[-1]) == (("out/tensorboard", 1), ("out/tensorboard", 2))


def test_tracker_that_is_missing(cwd, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = "--log wandb: the package wandb is not installed; pip install wandb, or leave --log out"
    rejects("simcse", capfd, wanted, *KEPT, "--log", "wandb")
