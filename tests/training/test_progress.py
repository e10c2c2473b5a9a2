"""Test --log, which sends metrics to wandb or TensorBoard."""
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

import simcse
from running import KEPT, metrics


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
