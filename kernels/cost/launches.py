"""Record what a loss would launch on a GPU that is not present: only the host code runs.

The inputs are tensors on the meta device, which have shapes but no memory, so batches of any size run as
they would on a GPU. A driver object replaces Triton's: it compiles kernels for the chip and records
launches. While the host code runs, functions that would answer differently for meta tensors than for GPU
tensors are patched.
"""
import functools
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import checks, custom_op
from ..benchmark import our_loss

REGISTERS = 65_536                       # per streaming multiprocessor (SM)
HBM_SHARE = 0.9                          # share of the HBM rate that a kernel can reach


class Chip(NamedTuple):
    """Rates and sizes of a GPU, from NVIDIA's data sheets and white papers. Dense bf16 peaks of 312, 989 and
    2,250 TFLOP/s mean 2,048, 4,096 and 8,192 FLOP per clock and SM. Only A100's L2 rate is published."""
    name: str
    multiprocessors: int
    ghz: float
    tensor: int          # bf16 FLOP per clock and SM
    l2: int              # bytes per clock
    hbm: float           # GB/s
    memory: int          # GB
    shared: int          # bytes of shared memory per SM
    most_shared: int     # bytes of shared memory that a program can have

    def hbm_bytes(self):
        """Return the bytes per clock that a kernel can read from or write to HBM."""
        return self.hbm * HBM_SHARE / self.ghz


CHIPS = {"sm_80": Chip("A100", 108, 1.41, 2048, 5120, 2039, 80, 167_936, 166_912),
         "sm_90": Chip("H200", 132, 1.755, 4096, 5120, 4800, 141, 233_472, 232_448),
         "sm_100": Chip("B200", 148, 1.85, 8192, 10_240, 8000, 180, 233_472, 232_448)}


class RecordingDriver:
    """A driver for Triton that compiles kernels for a chip and records launches instead of executing them.

    record    called for each launch with the kernel's name, its arguments by name (and the grid: x, y and the
              number of programs), Triton's metadata and the compiled binary. None: launches are ignored
    """

    def __init__(self, chip):
        from triton.backends.compiler import GPUTarget
        self.chip, self.number = CHIPS[chip], int(chip.removeprefix("sm_"))
        self.target = GPUTarget("cuda", self.number, 32)
        self.utils, self.record, self.binaries = self, None, []

    def get_current_device(self):
        return self.number

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target

    def get_device_properties(self, device):
        return dict(max_shared_mem=self.chip.most_shared, max_num_regs=REGISTERS,
                    multiprocessor_count=self.chip.multiprocessors, warpSize=32)

    def load_binary(self, name, binary, shared, device):
        """Keep a binary. Triton expects (module, function, registers, spills, threads)."""
        self.binaries.append(binary)
        return 1, len(self.binaries) - 1, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        """Return the function that Triton calls to launch a kernel."""
        names = source.fn.arg_names

        def launch(x, y, z, stream, function, *rest):
            a = SimpleNamespace(**dict(zip(names, rest[-len(names):])), x=x, y=y, programs=x * y * z)
            if self.record:
                self.record(source.fn.__name__, a, metadata, self.binaries[function])
        return launch


# One driver per chip: a kernel that Triton has compiled keeps the driver that it was compiled with.
recording_driver = functools.cache(RecordingDriver)


class MemoryTraffic(TorchDispatchMode):
    """Call record(bytes) for each PyTorch operation, with the bytes of its inputs and outputs."""

    def __init__(self, record):
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        out = operator(*arguments, **named or {})
        moved = bytes_of(arguments, named, out)
        if moved and not operator.is_view and "empty" not in operator.name():
            self.record(moved)
        return out


def bytes_of(*trees):
    """Return the total size of all meta tensors in these arguments."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(trees)
               if isinstance(x, torch.Tensor) and x.device.type == "meta")


@contextmanager
def simulated_gpu(chip, record):
    """Run the host code of kernels as for a GPU, with tensors that are not on one; see recording_driver."""
    from triton.runtime import driver

    from ..gpu import launch
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        for change in ((driver, "_active", recording_driver(chip)),
                       (recording_driver(chip), "record", record),
                       (launch, "INTERPRETED", True),
                       (launch, "EMULATED_CAPABILITY", int(chip[3:-1])),
                       (torch, "is_autocast_enabled", lambda *device: False),
                       (custom_op, "is_in_torch_dispatch_mode", lambda: False)):
            stack.enter_context(patch.object(*change))
        stack.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("high")
        yield


def record_launches(loss, size, dtype, chip):
    """Return a list of what a loss launches forward and backward, in order:

    (name, arguments, metadata, binary)    a Triton kernel; see RecordingDriver
    (m, n, k, FLOP, bytes)                 a cuBLAS product (m, k)·(k, n); a float32 FLOP counts as two bf16
                                           FLOP
    (bytes,)                               another PyTorch operation
    """
    from ..gpu import fused_forward_backward, gradient_large_d
    n, m, d = size
    found = []

    def record(*values):
        found.append(values)

    def add_product(total, a, b):      # total += a @ b, which is one cuBLAS call on a GPU
        rows, inner = a.shape
        columns = b.shape[1]
        record(rows, columns, inner, rows * columns * inner * a.element_size(), bytes_of(a, b, total, total))

    new = functools.partial(torch.empty, device="meta")
    has_queue = loss == "queue_loss"   # k is the queue, followed by the n positives
    q = new(n, d, dtype=getattr(torch, dtype))
    k = new(m + n if has_queue else m, d, dtype=getattr(torch, dtype))
    targets = new(n, dtype=torch.int64)
    with ExitStack() as stack:
        stack.enter_context(simulated_gpu(chip, record))
        for module in (gradient_large_d, fused_forward_backward):
            stack.enter_context(patch.object(module, "add_product", add_product))
        stack.enter_context(patch.object(checks, "META", None))
        stack.enter_context(MemoryTraffic(record))
        our_loss(loss, "triton")(q.requires_grad_(), k.requires_grad_(not has_queue), targets).backward()
    return found
