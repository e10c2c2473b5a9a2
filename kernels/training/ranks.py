"""The processes (ranks) of a run: torchrun's environment variables, and joining the process group.

    RANK, WORLD_SIZE             index of this process, and number of all processes; without both: one process
    LOCAL_RANK                   GPU of this process
    LOCAL_WORLD_SIZE             number of processes on this machine
    MASTER_ADDR, MASTER_PORT     where the processes connect; a single process does not need them
"""
import datetime
import os
import re
import socket
import threading
import time

import torch
import torch.distributed as dist

ENV_MINIMUM = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
QUIET_SECONDS = 10                                             # of waiting before a message
RENDEZVOUS_TIMEOUT = 300                                       # seconds of waiting before an error
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)            # longest all_reduce

joining_thread = None                                          # connects to the other processes


def env_error():
    """Return an error message if torchrun's environment variables are incomplete or invalid, else None."""
    given = {"RANK", "WORLD_SIZE"} & os.environ.keys()
    if not given or "RANK" not in given and world_size() == 1:
        return None
    needed = ["RANK", "WORLD_SIZE"]
    if int_env("WORLD_SIZE") != 1:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    is_valid = all(os.environ.get(name) if name == "MASTER_ADDR" else int_env(name) is not None
                   for name in needed)
    if is_valid and rank() < world_size():
        return None
    found = ", ".join(f"{name} is {os.environ.get(name, 'not set')}" for name in needed)
    return f"{found}; start with torchrun, which sets them, or unset RANK and WORLD_SIZE to run one process"


def int_env(name, default=None):
    """Return a variable of ENV_MINIMUM as an integer, or `default` if it is unset or invalid."""
    text = os.environ.get(name, "")
    if re.fullmatch("[0-9]{1,18}", text) and int(text) >= ENV_MINIMUM[name]:
        return int(text)
    return default


def rank():
    """Return the number of this process, from 0."""
    return int_env("RANK", 0)


def world_size():
    """Return the number of processes of the run."""
    return int_env("WORLD_SIZE", 1)


def is_first_rank():
    """Return whether this process prints messages: on rank 0, or if its RANK is invalid, to report that."""
    return rank() == 0


def local_device():
    """Return the torch.device of this process. Under torchrun its GPU becomes the current one."""
    from .cli import fail  # not at the top, because cli imports this module

    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = int_env("LOCAL_RANK", 0), torch.cuda.device_count()
    if index >= count:
        fail(f"LOCAL_RANK is {index}, but this machine has {count} GPUs; expected at most {count - 1}; start "
             f"one process per GPU: torchrun --nproc-per-node {count}", every_rank=True)
    device = torch.device(f"cuda:{index}")
    if {"RANK", "LOCAL_RANK"} & os.environ.keys():
        torch.cuda.set_device(device)
    return device


def join_group(device):
    """Initialise torch.distributed with the other processes of the run, if there are any.

    Connecting waits in C++, where Python handles no signals: a second thread connects, this one waits for it.
    """
    global joining_thread

    from .cli import fail, log_on_any_rank  # not at the top, because cli imports this module

    if world_size() == 1:
        return
    if dist.is_initialized():                                  # the second run of these processes
        dist.barrier()
        return
    errors, began, has_logged = [], time.monotonic(), False
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    no_torchrun = "TORCHELASTIC_RUN_ID" not in os.environ      # which would notice that a process died
    joining_thread = threading.Thread(target=init_group, args=(device, errors), daemon=True)
    joining_thread.start()
    while joining_thread.is_alive():
        joining_thread.join(0.2)
        waited = time.monotonic() - began
        if waited > QUIET_SECONDS and not has_logged and (no_torchrun or is_first_rank()):
            log_on_any_rank("waiting", f"until {world_size()} processes (WORLD_SIZE) connect to {address}")
            has_logged = True
        if waited > RENDEZVOUS_TIMEOUT and no_torchrun:
            fail(f"not all {world_size()} processes (WORLD_SIZE) connected to {address} (MASTER_ADDR, "
                 f"MASTER_PORT) within {RENDEZVOUS_TIMEOUT // 60} minutes; start them with torchrun, or "
                 "unset WORLD_SIZE and RANK to run one process", every_rank=True)
    if errors:
        fail(errors[0], every_rank=True)


def init_group(device, errors):
    """Initialise the process group (body of the thread); append a message to `errors` if that fails."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.getaddrinfo(host, port)
        if device.type == "cuda":
            torch.cuda.set_device(device)                      # the current GPU is a setting of each thread
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    except Exception as error:
        errors.append(f"{world_size()} processes (WORLD_SIZE) cannot connect to {host}:{port} (MASTER_ADDR, "
                      f"MASTER_PORT): {error}".splitlines()[0])


def is_joining():
    """Return whether the joining thread still runs: it would block a normal exit."""
    return joining_thread is not None and joining_thread.is_alive()
