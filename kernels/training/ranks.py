"""The processes (ranks) of a run: torchrun's environment variables, and joining the process group."""
import datetime
import os
import signal
import socket
import threading

import torch
import torch.distributed as dist

from .errors import fail, log, signals_handled_by

QUIET_SECONDS = 10                                             # a longer wait for other ranks is reported
TIMEOUT = datetime.timedelta(minutes=30)                       # longest wait for other processes
VARIABLES = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


def rank():
    """Return the rank of this process: its number in the run, from 0."""
    return int(os.environ.get("RANK", 0))


def world_size():
    """Return the number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_device():
    """Return the torch.device of this process. A GPU (number LOCAL_RANK) becomes PyTorch's current device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        fail(f"LOCAL_RANK is {index}, but this machine has {count} GPUs; start one process per GPU: torchrun "
             f"--nproc-per-node {count}", every_rank=True)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join_group(device):
    """Initialise torch.distributed with the other processes of the run, if there are any."""
    if world_size() == 1 or dist.is_initialized():
        return
    where = ", ".join(f"{name} is {os.environ.get(name, 'not set')}" for name in VARIABLES)
    waiting = threading.Timer(QUIET_SECONDS, log, ("waiting", f"for other processes: {where}", True))
    waiting.daemon = True
    waiting.start()
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with signals_handled_by(signal.SIG_DFL):               # with SIG_DFL, Ctrl-C works even in C++ code
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    except Exception as error:                                 # PyTorch raises errors of many types
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fail(f"cannot connect to the other processes ({reason}): {where}; start with torchrun, or unset RANK "
             "and WORLD_SIZE to run one process", every_rank=True)
    finally:
        waiting.cancel()


def check_agreement(settings):
    """Fail if the ranks have different settings, {name: value}, for example flags or checksums of inputs."""
    if world_size() == 1:
        return
    found = [None] * world_size()
    dist.all_gather_object(found, settings)
    for other, theirs in enumerate(found):
        for name, value in settings.items():
            if theirs[name] != value:
                fail(f"{name} of rank {other} is {theirs[name]}, of rank {rank()} {value}; start all ranks "
                     "with the same flags and data", every_rank=True)
