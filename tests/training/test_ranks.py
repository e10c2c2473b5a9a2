"""Several processes: invalid environment variables, processes that do not connect or that hang."""
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import simcse
from kernels.training import ranks
from kernels.training.cli import UserError, command, exit_process, write
from running import KEPT, SMALL, fork_context, free_port, metrics, rejects

PAIR = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")


@pytest.fixture
def variables(monkeypatch):
    """Return a function that sets these variables, and unsets those that are None or not given."""
    def set_variables(**given):
        for name in (*ranks.ENV_MINIMUM, "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, text in given.items():
            if text is not None:
                monkeypatch.setenv(name, text)
    return set_variables


@pytest.mark.parametrize("given", [
    dict(RANK="0"), dict(WORLD_SIZE="2"), PAIR | dict(RANK="2"), PAIR | dict(RANK="x"),
    PAIR | dict(WORLD_SIZE="two"), PAIR | dict(MASTER_ADDR=None), PAIR | dict(MASTER_PORT=""),
    PAIR | dict(MASTER_PORT="http")])
def test_invalid_variables(given, variables, cwd, capfd):
    """Every rank prints the error, not only rank 0."""
    variables(**given)
    rejects("simcse", capfd, "RANK is .*WORLD_SIZE is .*; start with torchrun, .*", *SMALL, "--out", "out")


@pytest.mark.parametrize("given", [{}, dict(LOCAL_RANK="3"), dict(WORLD_SIZE="1"),
                                   dict(RANK="0", WORLD_SIZE="1"),
                                   PAIR | dict(RANK="00", WORLD_SIZE="01", MASTER_PORT="none")])
def test_single_process_needs_no_master_address(given, variables):
    variables(**given)
    assert ranks.env_error() is None and ranks.is_first_rank() and ranks.world_size() == 1
    ranks.join_group(torch.device("cpu"))
    assert not torch.distributed.is_initialized()


def test_local_rank_is_the_number_of_a_gpu(variables, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    variables(LOCAL_RANK="1")
    assert ranks.local_device() == current[0] == torch.device("cuda:1")
    variables(LOCAL_RANK="2")
    with pytest.raises(UserError, match="LOCAL_RANK is 2, but this machine has 2 GPUs; expected at most 1; "):
        ranks.local_device()


def test_other_connection_errors_are_one_line(variables, cwd, capfd, monkeypatch):
    def fail_to_init(*_, **__):
        raise ValueError("first\nsecond")
    monkeypatch.setattr(torch.distributed, "init_process_group", fail_to_init)
    variables(**PAIR)
    wanted = r"2 processes \(WORLD_SIZE\) cannot connect to 127\.0\.0\.1:29555 .*: first"
    rejects("simcse", capfd, wanted, *SMALL, "--out", "out")


# ── processes that wait for each other ──


def start_rank(env, flags, timeout=300):
    """Start simcse.py in a new process, with stdout and stderr in the files RANK.out and RANK.err."""
    process = fork_context().Process(target=run_rank, args=(env, flags, Path.cwd(), timeout))
    process.start()
    return process


def run_rank(env, flags, folder, timeout):                     # the new process of start_rank
    os.chdir(folder)
    os.environ.update(env)
    for number, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{env['RANK']}.{name}", os.O_WRONLY | os.O_CREAT), number)
    torch.cuda.is_available = lambda: False
    ranks.QUIET_SECONDS, ranks.RENDEZVOUS_TIMEOUT = 0, timeout
    simcse.main([*map(str, flags)])


def wait_until(condition, process):
    end = time.monotonic() + 60
    while not condition() and process.exitcode is None and time.monotonic() < end:
        time.sleep(0.02)
    assert process.exitcode is None                            # its process id is still valid


def exit_code(process):
    """Return the exit code, or None if the process does not end within a minute; then kill it."""
    process.join(60)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def output(rank="0"):
    return Path(f"{rank}.out").read_text(), Path(f"{rank}.err").read_text()


@pytest.mark.parametrize("rank, kind", [("0", signal.SIGTERM), ("1", signal.SIGINT)])
def test_signal_while_waiting_for_other_ranks(rank, kind, cwd, variables):
    variables()
    port = str(free_port())
    process = start_rank(PAIR | dict(RANK=rank, MASTER_PORT=port), [*SMALL, "--out", "out"])
    wait_until(lambda: Path(f"{rank}.out").exists() and "waiting" in output(rank)[0], process)
    os.kill(process.pid, kind)
    assert exit_code(process) == 130 and not Path("out").exists()
    out, errors = output(rank)
    assert f"\nwaiting  until 2 processes (WORLD_SIZE) connect to 127.0.0.1:{port}\n" in "\n" + out
    assert errors == "" and out.endswith("\nstopped  before anything was saved\n") == (rank == "0")


def test_other_ranks_never_connect(cwd, variables):
    variables()
    process = start_rank(PAIR | dict(MASTER_PORT=str(free_port())), [*SMALL, "--out", "out"], timeout=0.5)
    assert exit_code(process) == 2 and not Path("out").exists()
    errors = output()[1]
    assert errors.startswith("simcse.py: not all 2 processes (WORLD_SIZE) connected to 127.0.0.1:")
    assert "start them with torchrun" in errors and errors.count("\n") == 1


def test_thread_that_connects_to_other_ranks_does_not_block_the_exit(monkeypatch):
    monkeypatch.setattr(ranks, "joining_thread", Mock(is_alive=lambda: True))
    monkeypatch.setattr(os, "_exit", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        exit_process(2)


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


def test_closed_pipe_in_a_thread(monkeypatch, capfd):
    """A closed pipe ends main without a signal, which would end the whole program."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        error, = run_in_thread(command(lambda argv=None: write("lost")))
        monkeypatch.undo()
    assert (type(error), error.code) == (SystemExit, 130)
