"""Measure gather_rows between processes on this machine: seconds, bytes and copies.

    python -m kernels.benchmark.gather --rows 65536 --features 768 --processes 4

Each process has its share of the rows, in float32. "bare" is PyTorch's own collective into a buffer that
exists already, the least that gathering can cost. "copied" is the memory that gather_rows allocates beside
its result, of which each byte is written once: rows padded to equal shares, and rows cast to a half type.
"""
import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ..gather import ALL_GATHER, REDUCE_SCATTER, gather_rows, own_rows
from ..printing import fail

REPEATS = 7


class Allocations(TorchDispatchMode):
    """Sum the bytes of all tensors that PyTorch operations allocate."""
    total = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        found = operator(*arguments, **named or {})
        known = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in known:
            self.total += found.untyped_storage().nbytes()
        return found


def seconds(f):
    """Return the median time of f() over all repeats; all ranks begin each repeat together."""
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(rows, features, dtype):
    """Return [(name, seconds, seconds of the bare collective, bytes allocated)] of forward and backward.

    dtype  half type in which rows are sent; None: float32
    """
    own, world = own_rows(rows), dist.get_world_size()
    largest = -(-rows // world)
    x = torch.randn(own.stop - own.start, features).requires_grad_()
    sent = torch.zeros(largest, features, dtype=dtype or torch.float32)
    received = sent.new_empty(world * largest, features)
    total = torch.zeros(world * largest, features)
    part, gradient = total[:largest].clone(), torch.ones(rows, features)
    gathered = gather_rows(x, rows, dtype=dtype)

    def forward():
        return gather_rows(x, rows, dtype=dtype)

    def backward():
        return torch.autograd.grad(gathered, x, gradient, retain_graph=True)

    def bare_forward():
        ALL_GATHER(received, sent)

    def bare_backward():
        REDUCE_SCATTER(part, total)

    found = []
    for f, bare, result in (forward, bare_forward, gathered), (backward, bare_backward, x):
        with Allocations() as allocated:
            f()
        found.append((f.__name__, seconds(f), seconds(bare), max(0, allocated.total - result.nbytes)))
    return found


def one_process(rank, port, args):
    """Measure in one process; rank 0 prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.processes)
    if rank == 0:
        print(f"gather   {args.rows:,} × {args.features} float32 over {args.processes} processes, gloo, "
              f"{os.cpu_count()} CPU cores, torch {torch.__version__}", flush=True)
        print("sent as  direction  received per rank   seconds   bare  ratio    copied", flush=True)
    for dtype in (torch.float32, torch.float16):
        cast_to = dtype if dtype.itemsize == 2 else None
        for name, ours, bare, allocated in measure(args.rows, args.features, cast_to):
            size = dtype.itemsize if name == "forward" else 4
            received = (args.processes - 1) * args.rows * args.features * size / args.processes / 1e6
            if rank == 0:
                print(f"{str(dtype)[6:]}  {name:10}{received:15.1f} MB{ours:10.3f}{bare:7.3f}"
                      f"{ours / bare:7.2f}{allocated / 1e6:7.1f} MB", flush=True)
    dist.destroy_process_group()


def main(argv=None):
    """Start the processes."""
    text_format = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kernels.benchmark.gather", description=__doc__,
                                     formatter_class=text_format)
    parser.error = fail                                        # one line
    add = parser.add_argument
    add("--rows", type=int, default=65536, help="rows of the whole batch; default 65536")
    add("--features", type=int, default=768, help="features per row; default 768")
    add("--processes", type=int, default=4, help="number of processes; default 4")
    args = parser.parse_args(argv)
    if min(vars(args).values()) < 1 or args.rows < args.processes:
        fail("--rows, --features, --processes: expected at least 1 each, and at least one row per process")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_process, (port, args), args.processes)


if __name__ == "__main__":
    main()
