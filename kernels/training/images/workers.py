"""Work in processes of its own: torch's DataLoader, whose workers here hear no signal but their parent's."""
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

METHOD = "fork" if sys.platform == "linux" else None           # others import PyTorch for every worker


def cores():
    """That this process may use, where others of the machine have as many."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, there // ranks.number("LOCAL_WORLD_SIZE", 1))


def in_workers(work, items, workers):
    """Yields work(*item) of each item, in order, done by so many processes, each two items ahead; 0: by this
    one. Tensors come through shared memory."""
    loader = DataLoader(Work(work), sampler=items, batch_size=None, num_workers=workers,
                        worker_init_fn=begin_worker, multiprocessing_context=METHOD if workers else None,
                        generator=torch.Generator())           # else it would draw from that of training
    with signals_wait():
        results = iter(loader)
    yield from results


class Work:
    """What a DataLoader takes for a dataset."""

    def __init__(self, work):
        self.work = work

    def __getitem__(self, item):
        return self.work(*item)


@contextlib.contextmanager
def signals_wait():
    """SIGNALS that come in the block come at its end: no process begins with its parent's handlers."""
    if not hasattr(signal, "pthread_sigmask"):                 # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(_):
    """A worker says nothing: its parent does. A step that a signal ends is to be finished and saved, so
    signals stay blocked, as signals_wait began it; it ends when its parent says so, or is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if hasattr(signal, "sigtimedwait"):
        threading.Thread(target=watch, args=(multiprocessing.parent_process(),), daemon=True).start()


def watch(parent):
    while parent.is_alive():
        heard = signal.sigtimedwait(SIGNALS, 1)
        if heard and heard.si_pid == parent.pid:
            break
    os._exit(0)
