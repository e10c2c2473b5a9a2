"""A ring of processes has the losses of one process, needs less memory, and reports a process that fails."""
import ctypes
import datetime
import itertools
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import kernels
from loss_check import EAGER, MORE, error_of
from running import run_ranks

ROWS = 14                                                      # three or four processes have unequal shares
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
IDS, GROUPS = torch.arange(ROWS) * 5 % 4, torch.arange(ROWS) ** 2 % 3          # GROUPS has 0 and 1, but no 2


def gathered(s):
    """Return the arguments `gathered` and `offset` of a loss of s.x and s.y."""
    alone = s.own == slice(0, ROWS)
    return dict(gathered=None if alone else (s.all(s.x), s.all(s.y)), offset=0 if alone else s.own.start)


def lse(s, keys, **masks):
    """Return the mean log-sum-exp with a weight for each row; a row that is −∞ counts as 0."""
    found = kernels.similarity_lse(s.x, keys, s.t, impl=s.impl, **masks)
    return (found.masked_fill(found.isneginf(), 0) * torch.linspace(-1, 2, ROWS)[s.own]).mean()


CASES = {
    "lse": lambda s: lse(s, s.all(s.y)),
    "lse, diagonal": lambda s: lse(s, s.all(s.y), exclude="diagonal", offset=s.own.start),
    "lse, another diagonal": lambda s: lse(s, s.all(s.y), exclude="diagonal", offset=s.own.start - 2),
    "lse, ids": lambda s: lse(s, s.all(s.y), exclude=("diagonal", IDS[s.own], IDS), offset=s.own.start),
    "lse, groups": lambda s: lse(
        s, s.all(s.y), exclude=(IDS[s.own], IDS), within=(2 * GROUPS[s.own], GROUPS)),
    "lse, far below 0": lambda s: kernels.similarity_lse(      # each query has a key in only one block
        s.x, s.all(-8 * s.x), 0.05, within=(torch.arange(ROWS)[s.own], torch.arange(ROWS)), impl=s.impl
    ).mean(),
    "lse, frozen keys": lambda s: lse(s, s.all(s.y.detach())),
    "lse, frozen queries": lambda s: kernels.similarity_lse(
        s.x.detach(), s.all(s.y), 0.3, impl=s.impl).mean(),
    "lse, only τ": lambda s: kernels.similarity_lse(
        s.x.detach(), s.all(s.y.detach()), s.t, impl=s.impl).mean(),
    "info_nce": lambda s: kernels.info_nce(s.x, s.all(s.y), s.t, offset=s.own.start, impl=s.impl),
    "info_nce, frozen queries": lambda s: kernels.info_nce(
        s.x.detach(), s.all(s.y), s.t.detach(), offset=s.own.start, impl=s.impl),
    "info_nce, small loss": lambda s: kernels.info_nce(s.x, s.all(s.x * 2), 0.3, offset=s.own.start,
                                                       impl=s.impl),
    "info_nce, norms": lambda s: kernels.info_nce(
        s.x * 3, s.all(s.y * 2), s.t, offset=s.own.start, normalize=True, impl=s.impl),
    "clip_loss": lambda s: kernels.clip_loss(s.x, s.y, s.t, impl=s.impl, **gathered(s)),
    "nt_xent": lambda s: kernels.nt_xent(s.x, s.y, s.t, impl=s.impl, **gathered(s)),
    "sigmoid_loss": lambda s: kernels.sigmoid_loss(
        s.x, s.all(s.y), s.t, s.b, offset=s.own.start, impl=s.impl)}
# {processes: list of (dtype of rows, dtype of autocast or None, implementation of the ring)}. In pairs, the
# processes 0 and 2 share a batch, and 1 and 3 another one. Triton's interpreter is wrong in bfloat16
KINDS = {"2": [(F64, None, "auto"), (F16, None, "triton")], "4": [(F64, None, "auto")],
         "3": [(F64, None, "auto"), (F32, None, "auto"), (BF16, None, "auto"), (F32, BF16, "auto"),
               (F32, None, "triton"), (F32, F16, "triton")], "4 in pairs": [(F64, None, "auto")]}


class Share:
    """The rows of a batch that this process has, and what the functions of CASES need.

    rounded  dtype to which the numbers of x and y are rounded
    dtype    dtype of x and y; t and b are float64 if it is, else float32
    gather   function gather(x, ROWS, group=group); None: this process has all rows
    """
    def __init__(self, rounded, dtype, impl, gather=None, group=None):
        numbers, number = torch.Generator().manual_seed(0), torch.promote_types(dtype, F32)
        unit = F.normalize(torch.randn(2, ROWS, 20, generator=numbers, dtype=F64), dim=2).to(rounded)
        self.leaves = [x.to(dtype).requires_grad_() for x in unit]
        self.leaves += [torch.tensor(x, dtype=number, requires_grad=True) for x in (0.15, -2.5)]
        self.own = kernels.own_rows(ROWS, group=group) if gather else slice(0, ROWS)
        self.x, self.y = (x[self.own] for x in self.leaves[:2])
        self.t, self.b = self.leaves[2:]
        self.all = (lambda x: gather(x, ROWS, group=group)) if gather else lambda x: x
        self.impl = impl

    def parts(self, loss, autocast=None):
        """Return [this process's part of the loss, of the gradients of x, y, t and b], float64."""
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            value = loss(self) * ((self.own.stop - self.own.start) / ROWS)
        gradients = torch.autograd.grad(value, self.leaves, materialize_grads=True)
        return [x.detach().double() for x in (value, *gradients)]


def save_parts(rank, folder, processes):
    """Save {(kind, case): (parts with gathered rows, parts with a ring)} of this process."""
    in_pairs, found = "pairs" in processes, {}
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2] if in_pairs else None
    for kind, (name, loss) in itertools.product(KINDS[processes], CASES.items()):
        dtype, autocast, impl = kind
        found[kind, name] = [Share(autocast or dtype, dtype, impl, gather, group).parts(loss, autocast)
                             for impl, gather in (("auto", kernels.gather_rows), (impl, kernels.ring_rows))]
    torch.save(found, folder / str(rank))


@pytest.mark.parametrize("processes", KINDS)
def test_ring_equals_one_process(processes, tmp_path):
    """Float64 up to 1e-12, Triton up to EAGER, else up to 3 times the error of gathered rows, plus MORE."""
    run_ranks(save_parts, int(processes[0]), tmp_path, processes)
    saved = [torch.load(tmp_path / str(rank)) for rank in range(int(processes[0]))]
    for kind, name in saved[0]:
        dtype, autocast, impl = kind
        exact = Share(autocast or dtype, F64, "blockwise").parts(CASES[name])
        assert exact[0]
        for ranks in (saved[::2], saved[1::2]) if "pairs" in processes else (saved,):
            ways = zip(*(parts[kind, name] for parts in ranks))                # gathered rows, then the ring
            for part, gather, ring in zip(exact, *([sum(parts) for parts in zip(*way)] for way in ways)):
                limit = 1e-12 if dtype == F64 else 3 * error_of(gather, part) + MORE[autocast or dtype]
                limit = EAGER[autocast or dtype] if impl == "triton" else limit
                assert error_of(ring, part) <= limit, (kind, name, error_of(ring, part), limit)


# ── memory, and a process that fails ────────────────────────────────────────────────────────────────────────


def memory(name):
    """Return a value in MiB of this process: VmRSS, the resident memory, or VmHWM, its peak."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def save_peaks(rank, folder):
    """Save the peak memory of losses above their inputs, in MiB: [gathered rows, ring]."""
    ctypes.CDLL(None).mallopt(-3, 2**16)                       # return freed memory to the system at once
    x, y = (torch.randn(1024, 1024).requires_grad_() for _ in "xy")            # each tensor has 4 MiB
    peaks = []
    for gather in (kernels.gather_rows, kernels.ring_rows):
        for rows in (x[:64], y[:64]), (x, y):                  # the first pass loads libraries
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")      # this resets the peak VmHWM to VmRSS
            before, all_rows = memory("VmRSS"), 4 * len(rows[0])
            kernels.info_nce(rows[0], gather(rows[1], all_rows), offset=rank * len(rows[0])).backward()
            peak = memory("VmHWM") - before
            x.grad = y.grad = None
        peaks.append(peak)
    torch.save(peaks, folder / str(rank))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory(tmp_path):
    """Gathered keys and their gradients take 32 MiB on each of four processes. A ring needs less."""
    run_ranks(save_peaks, 4, tmp_path)
    for gathered, ring in (torch.load(tmp_path / str(rank)) for rank in range(4)):
        assert 36 < gathered and ring < 31, (gathered, ring)


def skip_backward(rank):
    """Process 1 computes the loss, but does not call backward. The others must get an error."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    x = torch.randn(2, 4).requires_grad_()
    lse, began = kernels.similarity_lse(x, kernels.ring_rows(x, 6, group=group)), time.monotonic()
    if rank != 1:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|closed"):
            lse.sum().backward()
        assert time.monotonic() - began < 15


def test_a_process_that_fails():
    run_ranks(skip_backward, 3)
