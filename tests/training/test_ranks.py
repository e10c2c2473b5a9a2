"""Test runs of two processes (ranks): equal flags and data, a rank that dies, random state of each rank."""
import itertools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from kernels.training import loop
from running import DATA, end, equal, free_port, start_rank

COMMAND = ["simcse", "--model", "scratch", "--data", DATA / "nli.csv", "--batch-size", 8,
           "--keep-state", "always"]


def start_both(folder, *flags, setup=None, of_rank_1=()):
    """Start simcse.py as ranks 0 and 1 in sub-folders 0 and 1. Both write to `out` beside the folder."""
    port, words = free_port(), [*COMMAND, "--out", folder.parent / "out", *flags]
    return [start_rank(0, 2, port, words, folder / "0", setup),
            start_rank(1, 2, port, [*words, *of_rank_1], folder / "1", setup)]


@pytest.mark.parametrize("flag, message", [
    ("--seed", "seed of rank 1 is 7, of rank 0 42; start all ranks with the same flags and data"),
    ("--data", "inputs of rank 1 is ")])
def test_ranks_that_disagree(flag, message, tmp_path):
    """If the ranks have different flags or different data, both exit before training."""
    (tmp_path / "other.csv").write_text((DATA / "nli.csv").read_text().replace("man", "dog"))
    value = 7 if flag == "--seed" else tmp_path / "other.csv"
    processes = start_both(tmp_path / "run", of_rank_1=[flag, value])
    assert [end(process) for process in processes] == [2, 2] and not (tmp_path / "out").exists()
    assert message in (tmp_path / "run/0/errors").read_text()
    assert "start all ranks" in (tmp_path / "run/1/errors").read_text()


def test_dead_rank_ends_the_others(tmp_path):
    """If one rank dies, the other exits with one line, and the last checkpoint is complete."""
    out, errors, latest = tmp_path / "out", tmp_path / "run/0/errors", time.monotonic() + 60
    processes = start_both(tmp_path / "run", "--steps", 500, "--eval-every", 1)
    while not (out / "state.pt").exists():
        assert processes[0].is_alive() and time.monotonic() < latest, errors.read_text()
        time.sleep(0.02)
    processes[1].kill()
    assert end(processes[0]) == 2 and errors.read_text().count("\n") == 1
    assert "another process of this run has died or hangs" in errors.read_text()
    assert torch.load(out / "state.pt", weights_only=True)["progress"]["step"] >= 1


def signal_rank_1_in_step_3():
    """Send SIGTERM to rank 1, in its third step."""
    real, steps = loop.all_reduce_gradients, itertools.count(1)

    def all_reduce_after_signal(model):
        if next(steps) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        real(model)

    loop.all_reduce_gradients = all_reduce_after_signal


def test_every_rank_resumes_with_its_own_random_state(tmp_path):
    """After a signal to one rank, both stop at step 10, and rank 0 saves. The resumed run has, bit by bit,
    the weights of a run that was not stopped. For this, each rank must load its own random state, because
    dropout depends on it."""
    for folder, more, setup in (("whole/run", [], None), ("parts/first", [], signal_rank_1_in_step_3),
                                ("parts/second", ["--resume"], None)):
        processes = start_both(tmp_path / folder, "--steps", 12, "--eval-every", 12, *more, setup=setup)
        assert [end(process) for process in processes] == ([130, 130] if setup else [0, 0])
    assert "stopped  at step 10, saved" in (tmp_path / "parts/first/0/printed").read_text()
    states = (torch.load(tmp_path / run / "out/state.pt", weights_only=True) for run in ("whole", "parts"))
    whole, parts = states
    seeds = [state[:8].view(torch.int64).item() for state, _ in whole["random"]]       # 8 bytes are the seed
    assert seeds == [42, 43]
    assert equal(whole["random"], parts["random"]) and equal(whole["model"], parts["model"])
