"""Progress: lines in a log, the remaining time, and trackers (--log)."""
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

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


@pytest.mark.parametrize("name, package", [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_trackers_get_the_numbers_of_metrics(name, package, cwd, monkeypatch):
    """--resume continues the same run of wandb, and replaces the rows of TensorBoard after the checkpoint."""
    tracker = MagicMock()
    monkeypatch.setitem(sys.modules, package, tracker)
    flags = [*KEPT, "--log", name, "--out", "out"]
    simcse.main(flags)
    simcse.main([*flags, "--resume"])
    (row,) = metrics(Path("out"))
    numbers = {key: row[key] for key in ("loss", "lr", "seconds")}
    if name == "wandb":
        first, second = (begun.kwargs for begun in tracker.init.call_args_list)
        assert (first["name"], first["resume"], first["config"]["batch_size"]) == ("out", "allow", 2)
        assert first["id"] == second["id"] and len(first["id"]) == 32
        tracker.init.return_value.log.assert_called_once_with(numbers, step=1)
    else:
        added = tracker.SummaryWriter.return_value.add_scalar.call_args_list
        assert added == [call(key, value, 1) for key, value in numbers.items()]
        folder = Path("out/tensorboard")
        assert tracker.SummaryWriter.call_args_list == [call(folder, purge_step=step) for step in (1, 2)]


def test_tracker_that_is_missing(cwd, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = "--log wandb: the package wandb is not installed; pip install wandb, or leave --log out"
    rejects("simcse", capfd, wanted, *KEPT, "--log", "wandb")
