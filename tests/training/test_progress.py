"""Test the progress line."""
import re
from types import SimpleNamespace

import simcse
from kernels.training import progress
from running import SMALL


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
