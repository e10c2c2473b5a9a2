"""Worker processes: torch's DataLoader, with workers that react only to signals from their parent process."""
import contextlib
import multiprocessing
import os
import signal
import sys
import threading

import torch
from torch.utils.data import DataLoader

from .. import ranks
from ..cli import SIGNALS

START_METHOD = "fork" if sys.platform == "linux" else None     # other methods import PyTorch in every worker


def usable_cores():
    """Return the number of CPU cores for this rank: those of the machine, divided by the ranks on it."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // ranks.int_env("LOCAL_WORLD_SIZE", 1))


def parallel_map(function, items, workers):
    """Yield function(*item) for each item, in order. Each of the worker processes works up to two items
    ahead; with 0 workers this process does the work. Tensors are passed through shared memory."""
    loader = DataLoader(TaskDataset(function), sampler=items, batch_size=None, num_workers=workers,
                        worker_init_fn=init_worker, multiprocessing_context=START_METHOD if workers else None,
                        generator=torch.Generator())           # the default would use up training's generator
    with signals_blocked():
        results = iter(loader)
    yield from results


class TaskDataset:
    """A dataset for DataLoader whose "indices" are the items of parallel_map."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, item):
        return self.function(*item)


@contextlib.contextmanager
def signals_blocked():
    """Block SIGNALS inside the block, and deliver them at its end. Workers start inside it, so that none of
    them ever runs the signal handlers of its parent."""
    if not hasattr(signal, "pthread_sigmask"):                 # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def init_worker(_):
    """Prepare a worker: silence its stderr, because the parent reports errors, and start exit_with_parent.
    Signals stay blocked in it: after Ctrl-C the parent still needs it to finish and save the step."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if hasattr(signal, "sigtimedwait"):
        parent = multiprocessing.parent_process()
        threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()


def exit_with_parent(parent):
    """Thread of a worker: end the process when its parent has ended or sends it a signal."""
    while parent.is_alive():
        received = signal.sigtimedwait(SIGNALS, 1)
        if received and received.si_pid == parent.pid:
            break
    os._exit(0)
