"""What a loss would launch on a chip that is not there: its host code runs, nothing else does.

Rows are tensors of the meta device, which have a shape and no memory, so batches of any size are cut as they
always are. The driver compiles for the chip and writes launches down. What the host asks of a GPU and meta
tensors answer otherwise is replaced while it runs.
"""
import functools
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..benchmark.cases import ours

REGISTERS, HBM_SHARE = 65_536, 0.9       # of a multiprocessor; of HBM's rate that a kernel can have


class Chip(NamedTuple):
    """Of NVIDIA's data sheets and white papers: 312, 989 and 2,250 dense bf16 TFLOP/s are 2,048, 4,096 and
    8,192 a clock and multiprocessor; a published rate of the second-level cache is A100's alone."""
    name: str
    multiprocessors: int
    ghz: float
    tensor: int          # bf16 FLOP a clock and multiprocessor
    l2: int              # bytes a clock
    hbm: float           # GB/s
    memory: int          # GB
    shared: int          # bytes a multiprocessor
    most_shared: int     # bytes a program

    def hbm_bytes(self):
        """A clock."""
        return self.hbm * HBM_SHARE / self.ghz


CHIPS = {"sm_80": Chip("A100", 108, 1.41, 2048, 5120, 2039, 80, 167_936, 166_912),
         "sm_90": Chip("H200", 132, 1.755, 4096, 5120, 4800, 141, 233_472, 232_448),
         "sm_100": Chip("B200", 148, 1.85, 8192, 10_240, 8000, 180, 233_472, 232_448)}


class AbsentChip:
    """What Triton asks of a driver, for a chip that is not there: kernels are compiled, and instead of being
    launched handed to record(name, arguments by name and the grid's x, y, programs, metadata, binary)."""

    def __init__(self, chip):
        from triton.backends.compiler import GPUTarget
        number, about = int(chip.removeprefix("sm_")), CHIPS[chip]
        self.utils, self.record, self.binaries, target = self, None, [], GPUTarget("cuda", number, 32)
        self.get_current_device, self.get_current_stream = lambda: number, lambda device: 0
        self.get_current_target = lambda: target
        self.get_device_properties = lambda device: dict(
            max_shared_mem=about.most_shared, max_num_regs=REGISTERS,
            multiprocessor_count=about.multiprocessors, warpSize=32)

    def load_binary(self, name, binary, shared, device):
        self.binaries.append(binary)
        return 1, len(self.binaries) - 1, 0, 0, 1024            # module, function, registers, spills, threads

    def launcher_cls(self, source, metadata):
        names = source.fn.arg_names

        def launch(x, y, z, stream, function, *rest):
            a = SimpleNamespace(**dict(zip(names, rest[-len(names):])), x=x, y=y, programs=x * y * z)
            if self.record:
                self.record(source.fn.__name__, a, metadata, self.binaries[function])
        return launch


absent = functools.cache(AbsentChip)    # what Triton has compiled keeps the driver that it was compiled with


class Recorder(TorchDispatchMode):
    """Hands what PyTorch does on memory to record(bytes)."""

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
    return sum(x.numel() * x.element_size() for x in tree_leaves(trees)
               if isinstance(x, torch.Tensor) and x.device.type == "meta")


def launches(loss, size, dtype, chip):
    """What a loss launches forward and backward, in order: (name, arguments, metadata, binary) of a kernel,
    (m, n, k, bf16 FLOP, bytes) of a library product, (bytes,) of what else PyTorch does."""
    from triton.runtime import driver

    from .. import checks, dispatch
    from ..gpu import gradient_blocks, launch, one_pass
    found, (n, m, d) = [], size
    record = lambda *what: found.append(what)

    def add_product(total, a, b):      # what it does on a GPU
        (rows, inner), columns = a.shape, b.shape[1]
        record(rows, columns, inner, rows * columns * inner * a.element_size(), bytes_of(a, b, total, total))

    queue, new = loss == "queue_loss", functools.partial(torch.empty, device="meta")
    q, k = (new(rows, d, dtype=getattr(torch, dtype)) for rows in (n, m + n * queue))
    targets = new(n, dtype=torch.int64)
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        for change in ((driver, "_active", absent(chip)), (absent(chip), "record", record),
                       (checks, "META", None), (launch, "INTERPRETED", True),
                       (launch, "PLAYED", int(chip[3:-1])),
                       (torch, "is_autocast_enabled", lambda *device: False),
                       (dispatch, "is_in_torch_dispatch_mode", lambda: False),
                       (gradient_blocks, "add_product", add_product), (one_pass, "add_product", add_product)):
            stack.enter_context(patch.object(*change))
        stack.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("high")
        stack.enter_context(Recorder(record))
        ours(loss, "triton")(q.requires_grad_(), k.requires_grad_(not queue), targets).backward()
    return found
