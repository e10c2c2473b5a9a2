"""Several processes: variables that cannot be, partners that do not come or hang. And one thread of many."""
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import simcse
from kernels.training import ranks
from kernels.training.cli import Fault, answer_early, command, leave, put
from running import KEPT, SMALL, forks, free_port, metrics, refuse

PAIR = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
NUMBER = r"is .*; wanted a whole number from {} on: start with torchrun, which sets it, or unset it"
RANK, WORLD = f"RANK {NUMBER.format(0)}", f"WORLD_SIZE {NUMBER.format(1)}"
ADDRESS, PORT = (rf"{name} .*; wanted .*, where 2 processes \(WORLD_SIZE\) meet: start with torchrun, .*"
                 for name in ("MASTER_ADDR", "MASTER_PORT"))


@pytest.fixture
def variables(monkeypatch):
    """A function that sets these alone; None: that one is not set."""
    def to(**given):
        for name in (*ranks.LEAST, "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, text in given.items():
            if text is not None:
                monkeypatch.setenv(name, text)
    return to


@pytest.mark.parametrize("given, wanted", [
    (dict(RANK="0"), "RANK is set and WORLD_SIZE is not: start with torchrun, .*, or unset RANK"),
    (dict(RANK="1"), "RANK is set and .*"), (dict(WORLD_SIZE="2"), "WORLD_SIZE is set and RANK is not: .*"),
    (PAIR | dict(RANK="2"), "RANK is 2 of WORLD_SIZE 2; wanted at most 1: ranks count from 0"),
    *((PAIR | dict(RANK=text), RANK) for text in ("", "x", "-1", " 0", "1.0", "٠", "\udcff", "9" * 5000)),
    *((PAIR | dict(WORLD_SIZE=text), WORLD) for text in ("0", "two", "")),
    (dict(LOCAL_RANK="a"), f"LOCAL_RANK {NUMBER.format(0)}"),
    (dict(LOCAL_WORLD_SIZE="0"), f"LOCAL_WORLD_SIZE {NUMBER.format(1)}"),
    *((PAIR | dict(MASTER_ADDR=text), ADDRESS) for text in (None, "")),
    *((PAIR | dict(MASTER_PORT=text), PORT) for text in (None, "", "0", "65536", "-1", "http", "٨٠"))])
def test_variables_that_cannot_be(given, wanted, variables, here, capfd):
    """Whatever rank: otherwise nobody would say it."""
    variables(**given)
    refuse("simcse", capfd, wanted, *SMALL, "--out", "out")


@pytest.mark.parametrize("given", [{}, dict(LOCAL_RANK="3"), dict(WORLD_SIZE="1"),
                                   dict(RANK="0", WORLD_SIZE="1"),
                                   PAIR | dict(RANK="00", WORLD_SIZE="01", MASTER_PORT="none")])
def test_one_process_wants_no_place_to_meet(given, variables):
    variables(**given)
    assert ranks.problem() is None and ranks.is_first_rank() and ranks.world() == 1
    ranks.join(torch.device("cpu"))
    assert not torch.distributed.is_initialized()


def test_variables_are_answered_before_torch_is_there(variables, tmp_path, monkeypatch, capfd):
    variables(**PAIR | dict(RANK="x"))
    monkeypatch.setattr(sys, "argv", ["simcse.py", "--data", "x.csv"])
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setitem(sys.modules, "torch", None)            # an import would fail
    with pytest.raises(SystemExit, match="2"):
        answer_early(simcse.make_parser)
    for kind, handler in before.items():
        signal.signal(kind, handler)
    assert capfd.readouterr().err.startswith("simcse.py: RANK is 'x'; wanted")


def test_a_gpu_that_is_not_there(variables, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    variables(LOCAL_RANK="1")
    assert ranks.own_device() == chosen[0] == torch.device("cuda:1")
    variables(LOCAL_RANK="2")
    with pytest.raises(Fault, match="LOCAL_RANK is 2, and this machine has 2 GPUs; wanted at most 1: .*"):
        ranks.own_device()


def test_a_port_that_another_process_has(variables, here, capfd):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables(**PAIR | dict(MASTER_PORT=port))
        wanted = f"MASTER_PORT is {port}: another process has this port; name a free one"
        refuse("simcse", capfd, wanted, *SMALL, "--out", "out")


@pytest.mark.parametrize("error, wanted", [
    (socket.gaierror(-2, "Name or service not known"), "Name or service not known; wanted the name .*"),
    (UnicodeError("label too long"), "no name of a host; wanted .*")])
def test_a_host_that_nobody_knows(error, wanted, variables, here, capfd, monkeypatch):
    def unknown(*_):
        raise error
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    variables(**PAIR | dict(MASTER_ADDR="nowhere"))
    refuse("simcse", capfd, f"MASTER_ADDR is 'nowhere': {wanted}", *SMALL, "--out", "out")


def test_other_errors_of_the_thread(variables, here, capfd, monkeypatch):
    def broken(*_, **__):
        raise ValueError("first\nsecond")
    monkeypatch.setattr(torch.distributed, "init_process_group", broken)
    variables(**PAIR)
    wanted = r"2 processes \(WORLD_SIZE\) cannot meet at 127\.0\.0\.1:29555 \(ValueError: first\)"
    refuse("simcse", capfd, wanted, *SMALL, "--out", "out")


# ── processes that wait for each other ──


def begin(env, flags, patience=300, hangs=False):
    """simcse.py in a process of its own, which speaks into files of this folder: RANK.out and RANK.err."""
    process = forks().Process(target=play, args=(env, flags, Path.cwd(), patience, hangs))
    process.start()
    return process


def play(env, flags, place, patience, hangs):
    os.chdir(place)
    os.environ.update(env)
    for number, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{env['RANK']}.{name}", os.O_WRONLY | os.O_CREAT), number)
    torch.cuda.is_available = lambda: False
    ranks.QUIET, ranks.PATIENCE = 0, patience
    if hangs:
        simcse.sum_gradients = lambda model: os.kill(os.getpid(), signal.SIGSTOP)
    simcse.main([*map(str, flags)])


def wait_until(there, process):
    end = time.monotonic() + 60
    while not there() and process.exitcode is None and time.monotonic() < end:
        time.sleep(0.02)
    assert process.exitcode is None                            # and its number is still its own


def ended(process):
    process.join(60)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def said(rank="0"):
    return Path(f"{rank}.out").read_text(), Path(f"{rank}.err").read_text()


@pytest.mark.parametrize("rank, kind", [("0", signal.SIGTERM), ("1", signal.SIGINT)])
def test_a_signal_while_the_others_do_not_come(rank, kind, here, variables):
    variables()
    port = str(free_port())
    process = begin(PAIR | dict(RANK=rank, MASTER_PORT=port), [*SMALL, "--out", "out"])
    wait_until(lambda: Path(f"{rank}.out").exists() and "waiting" in said(rank)[0], process)
    os.kill(process.pid, kind)
    assert ended(process) == 130 and not Path("out").exists()
    out, errors = said(rank)
    assert f"\nwaiting  for the others of 2 processes (WORLD_SIZE) at 127.0.0.1:{port}\n" in "\n" + out
    assert errors == "" and out.endswith("\nstopped  before anything was saved\n") == (rank == "0")


def test_others_who_never_come(here, variables):
    variables()
    process = begin(PAIR | dict(MASTER_PORT=str(free_port())), [*SMALL, "--out", "out"], patience=0.5)
    assert ended(process) == 2 and not Path("out").exists()
    errors = said()[1]
    assert errors.startswith("simcse.py: not all of 2 processes (WORLD_SIZE) came to 127.0.0.1:")
    assert "start them with torchrun" in errors and errors.count("\n") == 1


def test_a_second_signal_ends_a_process_that_waits_for_one_that_hangs(here, variables):
    variables()
    env, flags = PAIR | dict(MASTER_PORT=str(free_port())), [*KEPT, "--out", "out"]
    first, second = begin(env, flags), begin(env | dict(RANK="1"), flags, hangs=True)
    try:
        wait_until(lambda: state(second)[0] == "T", second)
        wait_until(lambda: is_at_rest(first), first)           # in C++, in the same sum as ever
        os.kill(first.pid, signal.SIGTERM)
        os.kill(first.pid, signal.SIGINT)
        assert ended(first) == 130 and said()[1] == ""
    finally:
        second.kill()
        second.join()


def state(process):
    """(a letter, what it has computed)"""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[11:13]


def is_at_rest(process):
    found = []
    for _ in range(10):
        found.append(state(process))
        time.sleep(0.02)
    return found[0][0] == "S" and all(one == found[0] for one in found)


def test_a_thread_that_waits_does_not_hold_the_exit(monkeypatch):
    monkeypatch.setattr(ranks, "meeting", Mock(is_alive=lambda: True))
    monkeypatch.setattr(os, "_exit", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        leave(2)


# ── a thread of another program ──


def in_thread(main, *argv):
    ends = []

    def work():
        try:
            main([*map(str, argv)])
        except BaseException as error:
            ends.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return ends


def test_main_in_a_thread(here, capfd):
    """Python lets it hear no signal; all else is as ever."""
    before = signal.getsignal(signal.SIGTERM)
    assert in_thread(simcse.main, *KEPT, "--out", "out") == []
    assert len(metrics(Path("out"))) == 1 and Path("out/model.safetensors").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    capfd.readouterr()
    end, = in_thread(simcse.main, *KEPT, "--out", "out")
    assert (type(end), end.code) == (SystemExit, 2)
    assert "simcse.py: --out out holds another run" in capfd.readouterr().err


def test_a_pipe_that_closes_in_a_thread(monkeypatch, capfd):
    """A signal would end the program whose thread it is."""
    end, start = os.pipe()
    os.close(end)
    with open(start, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        ended, = in_thread(command(lambda argv=None: put("into nothing")))
        monkeypatch.undo()
    assert (type(ended), ended.code) == (SystemExit, 130)
