"""Several processes: invalid environment variables, processes that wait or that disagree."""
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import simcse
from kernels.training import ranks
from kernels.training.errors import UserError
from running import KEPT, SMALL, fork_context, free_port, metrics, rejects

PAIR = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")


@pytest.fixture
def variables(monkeypatch):
    """Return a function that sets these variables, and unsets those that are None or not given."""
    def set_variables(**given):
        for name in (*ranks.VARIABLES, "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, text in given.items():
            if text is not None:
                monkeypatch.setenv(name, text)
    return set_variables


@pytest.mark.parametrize("given, reason", [
    (PAIR | dict(RANK="2"), "RANK must be less"), (PAIR | dict(MASTER_ADDR=None), "KeyError"),
    (PAIR | dict(MASTER_PORT="http"), "invalid literal")])
def test_invalid_variables(given, reason, variables, cwd, capfd):
    """Every rank prints the error, not only rank 0."""
    variables(**given)
    wanted = rf"cannot connect to the other processes \(.*{reason}.*\): RANK is .*WORLD_SIZE is .*; start .*"
    rejects("simcse", capfd, wanted, *SMALL, "--out", "out")


@pytest.mark.parametrize("given", [{}, dict(WORLD_SIZE="1"), dict(RANK="0", WORLD_SIZE="1")])
def test_single_process_needs_no_master_address(given, variables):
    variables(**given)
    ranks.join_group(torch.device("cpu"))
    assert not torch.distributed.is_initialized() and (ranks.rank(), ranks.world_size()) == (0, 1)


def test_local_rank_is_the_number_of_a_gpu(variables, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    variables(LOCAL_RANK="1")
    assert ranks.local_device() == torch.device("cuda:1") and current == [1]
    variables(LOCAL_RANK="2")
    with pytest.raises(UserError, match="LOCAL_RANK is 2, but this machine has 2 GPUs; start one process .*"):
        ranks.local_device()


# ── processes that wait for each other ──


def start_rank(rank, port, *flags):
    """Start simcse.py in a new process, with stdout and stderr in the files RANK.out and RANK.err."""
    env = PAIR | dict(RANK=rank, MASTER_PORT=str(port))
    process = fork_context().Process(target=run_rank, args=(env, flags, Path.cwd()))
    process.start()
    return process


def run_rank(env, flags, folder):                              # the new process of start_rank
    os.chdir(folder)
    os.environ.update(env)
    for number, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{env['RANK']}.{name}", os.O_WRONLY | os.O_CREAT), number)
    torch.cuda.is_available = lambda: False
    ranks.QUIET_SECONDS = 0
    simcse.main([*map(str, flags)])


@pytest.mark.parametrize("rank, kind", [("0", signal.SIGTERM), ("1", signal.SIGINT)])
def test_signal_while_waiting_for_other_ranks(rank, kind, cwd, variables):
    """A rank says that it waits, and ends at once."""
    variables()
    process, end = start_rank(rank, free_port(), *SMALL, "--out", "out"), time.monotonic() + 60
    while not (Path(f"{rank}.out").exists() and "waiting" in Path(f"{rank}.out").read_text()):
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, kind)
    process.join(60)
    assert process.exitcode in (-kind, 130) and not Path("out").exists()
    assert "waiting  for other processes: RANK is" in Path(f"{rank}.out").read_text()


@pytest.mark.parametrize("other, message", [
    (["--seed", "7"], "seed of rank 1 is 7, of rank 0 42; start all ranks with the same flags and data"),
    (["--data", "other.csv"], "inputs of rank 1 is ")])
def test_ranks_that_disagree(other, message, cwd, variables):
    """Ranks with other flags or other data end before training."""
    variables()
    Path("other.csv").write_text(Path("good.csv").read_text().replace("man", "dog"))
    port = free_port()
    processes = [start_rank("0", port, *SMALL, "--out", "out"),
                 start_rank("1", port, *SMALL, "--out", "out", *other)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [2, 2] and not Path("out").exists()
    assert message in Path("0.err").read_text() and "start all ranks" in Path("1.err").read_text()


# ── main in a thread of another program ──


def run_in_thread(main, *argv):
    """Run main in a thread; return a list of the exceptions that it raised."""
    errors = []

    def work():
        try:
            main([*map(str, argv)])
        except BaseException as error:
            errors.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors


def test_main_in_a_thread(cwd, capfd):
    """Python handles no signals in a thread; everything else works as usual."""
    before = signal.getsignal(signal.SIGTERM)
    assert run_in_thread(simcse.main, *KEPT, "--out", "out") == []
    assert len(metrics(Path("out"))) == 1 and Path("out/model.safetensors").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    capfd.readouterr()
    error, = run_in_thread(simcse.main, *KEPT, "--out", "out")
    assert (type(error), error.code) == (SystemExit, 2)
    assert "simcse.py: --out out contains another run" in capfd.readouterr().err
