"""Test the progress line, and --log, which sends metrics to wandb or TensorBoard."""
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest

import simcse
from kernels.training import progress
from running import KEPT, SMALL, metrics


def test_speed_and_remaining_time(cwd, monkeypatch, capsys):
    """Steps of 1 second give 2 rows per second, although evaluations last 100 seconds. The remaining time
    includes evaluations."""
    clock, evaluate_and_save = SimpleNamespace(now=0), simcse.Evaluator.evaluate_and_save

    def step(model):
        clock.now += 1

    def evaluate(*given):
        clock.now += 100
        evaluate_and_save(*given)

    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(simcse, "all_reduce_gradients", step)
    monkeypatch.setattr(simcse.Evaluator, "evaluate_and_save", evaluate)
    simcse.main([*SMALL, "--steps", "3", "--eval-every", "1", "--out", "out"])
    found = re.findall(r"  (\d+) rows/s  left (\S+)", capsys.readouterr().out)
    assert found == [("2", "3:22"), ("2", "1:41"), ("2", "0:00")]


@pytest.mark.parametrize("name, package", [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_trackers_get_the_numbers_of_metrics(name, package, cwd, monkeypatch):
    """After --resume, wandb continues the same run, and TensorBoard drops the rows after the checkpoint."""
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
