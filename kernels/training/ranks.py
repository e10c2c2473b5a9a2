"""The processes of a run: what torchrun's environment variables say of them, and how they meet.

    RANK, WORLD_SIZE             which of how many processes this is; without both it is alone
    LOCAL_RANK                   its GPU
    LOCAL_WORLD_SIZE             how many of them this machine has
    MASTER_ADDR, MASTER_PORT     where they meet; one that is alone wants none

Without torch, until they meet: cli.py answers wrong variables before the seconds that it takes to load.
"""
import datetime
import os
import re
import socket
import threading
import time

LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
QUIET, PATIENCE = 10, 300                                      # seconds of waiting: without a word, at most
COLLECTIVE = datetime.timedelta(minutes=30)                    # how long one may take

meeting = None                                                 # the thread that meets the others


def problem():
    """Return one line about a variable that cannot be, or None."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in os.environ and number(name) is None:
            return (f"{name} is {os.environ[name]!r}; wanted a whole number from {LEAST[name]} on: start "
                    "with torchrun, which sets it, or unset it")
    for one, other in ("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"):
        if one in os.environ and other not in os.environ and (one == "RANK" or world() > 1):
            return f"{one} is set and {other} is not: start with torchrun, which sets both, or unset {one}"
    if rank() >= world():
        return f"RANK is {rank()} of WORLD_SIZE {world()}; wanted at most {world() - 1}: ranks count from 0"
    if world() > 1:
        if not os.environ.get("MASTER_ADDR"):
            return no_place("MASTER_ADDR", "the machine of rank 0")
        if not 0 < (number("MASTER_PORT") or 0) < 2**16:
            return no_place("MASTER_PORT", "a free port of that machine, from 1 to 65535")
    return None


def no_place(name, wanted):
    """A line about a variable that does not say where processes meet."""
    found = f"is {os.environ[name]!r}" if name in os.environ else "is not set"
    return (f"{name} {found}; wanted {wanted}, where {world()} processes (WORLD_SIZE) meet: start with "
            "torchrun, which sets it, or unset WORLD_SIZE and RANK for one process")


def number(name, usual=None):
    """What a variable of LEAST says, or `usual` where it says nothing, or what cannot be."""
    text = os.environ.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) and int(text) >= LEAST[name] else usual


def rank():
    """The number of this process, from 0."""
    return number("RANK", 0)


def world():
    """How many processes the run has."""
    return number("WORLD_SIZE", 1)


def is_first_rank():
    """Whether this process is the one that speaks: also one whose RANK is wrong, which has to be told."""
    return rank() == 0


def own_device():
    """The torch.device of this process; where a variable chose its GPU, that becomes the current one."""
    import torch

    from .cli import fail  # which imports this module

    if not torch.cuda.is_available():
        return torch.device("cpu")
    own, there = number("LOCAL_RANK", 0), torch.cuda.device_count()
    if own >= there:
        fail(f"LOCAL_RANK is {own}, and this machine has {there} GPUs; wanted at most {there - 1}: start as "
             f"many processes as GPUs, torchrun --nproc-per-node {there}", every_rank=True)
    device = torch.device(f"cuda:{own}")
    if {"RANK", "LOCAL_RANK"} & os.environ.keys():
        torch.cuda.set_device(device)
    return device


def join(device):
    """Meets the other processes of the run, if there are any; torch.distributed is ready then.

    What waits there is C++, in which Python hears no signal: so a thread waits, and this one looks after it.
    """
    global meeting
    import torch.distributed as dist

    from .cli import fail, show  # which imports this module

    if world() == 1:
        return
    if dist.is_initialized():                                  # a second run of these processes
        dist.barrier()
        return
    failed, began, told = [], time.monotonic(), False
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    alone = "TORCHELASTIC_RUN_ID" not in os.environ            # nobody sees to it that the others live
    meeting = threading.Thread(target=meet, args=(device, failed), daemon=True)
    meeting.start()
    while meeting.is_alive():
        meeting.join(0.2)
        waited = time.monotonic() - began
        if waited > QUIET and not told and (alone or is_first_rank()):
            show("waiting", f"for the others of {world()} processes (WORLD_SIZE) at {place}")
            told = True
        if waited > PATIENCE and alone:
            fail(f"not all of {world()} processes (WORLD_SIZE) came to {place} (MASTER_ADDR, MASTER_PORT) in "
                 f"{PATIENCE // 60} minutes; start them with torchrun, or unset WORLD_SIZE and RANK for one "
                 "process", every_rank=True)
    if failed:
        fail(failed[0], every_rank=True)


def meet(device, failed):
    """Joins the group; what hinders it is a line in `failed`."""
    import torch
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.getaddrinfo(host, port)
        if device.type == "cuda":
            torch.cuda.set_device(device)                      # each thread has its own
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE)
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no name of a host"
        failed.append(f"MASTER_ADDR is {host!r}: {why}; wanted the name or address of the machine of rank 0")
    except Exception as error:
        text = f"MASTER_PORT is {port}: another process has this port; name a free one"
        if "EADDRINUSE" not in str(error):
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            text = f"{world()} processes (WORLD_SIZE) cannot meet at {host}:{port} ({reason})"
        failed.append(text)


def waits():
    """Whether the thread that meets the others is still at it: it would hang an ordinary exit."""
    return meeting is not None and meeting.is_alive()
