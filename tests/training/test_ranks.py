"""Several processes (ranks): agreement on flags and data, a rank that dies, the random state of each rank."""
import itertools
import time
from pathlib import Path

import pytest
import torch

import simcse
from running import DATA, equal, free_port, start

FLAGS = ["--model", "scratch", "--data", DATA / "nli.csv", "--batch-size", 8, "--keep-state", "always"]


def start_rank(rank, port, out, *flags, before=None):
    """Start simcse.py as this rank of two. Its stderr is in the file OUT.err."""
    return start("simcse", out, *FLAGS, *flags, before=before, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2",
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def end(process):
    """Wait for a process, and return its exit code. One that hangs is killed."""
    process.join(60)
    process.kill()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("flag, message", [
    ("--seed", "seed of rank 1 is 7, of rank 0 42; start all ranks with the same flags and data"),
    ("--data", "inputs of rank 1 is ")])
def test_ranks_that_disagree(flag, message, tmp_path):
    """Ranks with other flags or other data end before training."""
    (tmp_path / "other.csv").write_text((DATA / "nli.csv").read_text().replace("man", "dog"))
    value, port = 7 if flag == "--seed" else tmp_path / "other.csv", free_port()
    processes = [start_rank("0", port, tmp_path / "0"), start_rank("1", port, tmp_path / "1", flag, value)]
    assert [end(process) for process in processes] == [2, 2] and not (tmp_path / "0").exists()
    assert message in (tmp_path / "0.err").read_text()
    assert "start all ranks" in (tmp_path / "1.err").read_text()


def test_dead_rank_ends_the_others(tmp_path):
    """The other rank ends with one line, and the last checkpoint is complete."""
    out, port, latest = tmp_path / "out", free_port(), time.monotonic() + 60
    processes = [start_rank(rank, port, out, "--steps", 500, "--eval-every", 1) for rank in "01"]
    while not (out / "state.pt").exists():
        assert processes[0].is_alive() and time.monotonic() < latest, Path(f"{out}.err").read_text()
        time.sleep(0.02)
    processes[1].kill()
    code, errors = end(processes[0]), Path(f"{out}.err").read_text()
    assert code == 2 and errors.count("\n") == 1
    assert "another process of this run has died or hangs" in errors
    assert torch.load(out / "state.pt", weights_only=True)["progress"]["step"] >= 1


def stop_in_step_3():
    """Make simcse.py stop in its third step, as after Ctrl-C."""
    real, steps = simcse.all_reduce_gradients, itertools.count(1)

    def all_reduce_or_stop(model):
        if next(steps) == 3:
            raise KeyboardInterrupt
        real(model)

    simcse.all_reduce_gradients = all_reduce_or_stop


def test_every_rank_resumes_with_its_own_random_state(tmp_path):
    """Elsewhere, all ranks resume with the state of rank 0, so that dropout is not that of a whole run. Here
    the run has the weights of a run that was not interrupted, bit by bit."""
    runs = ("whole", [], None), ("parts", [], stop_in_step_3), ("parts", ["--resume"], None)
    for out, more, before in runs:
        port, flags = free_port(), ["--steps", 4, "--eval-every", 2, *more]
        processes = [start_rank(rank, port, tmp_path / out, *flags, before=before) for rank in "01"]
        assert [end(process) for process in processes] == ([130, 130] if before else [0, 0])
    whole, parts = (torch.load(tmp_path / out / "state.pt", weights_only=True) for out in ("whole", "parts"))
    seeds = [state[:8].view(torch.int64).item() for state, _ in whole["random"]]       # a state begins so
    assert seeds == [42, 43]
    assert equal(whole["random"], parts["random"]) and equal(whole["model"], parts["model"])
