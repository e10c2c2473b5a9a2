"""Predict the time of a loss on a GPU that you do not have, from its compiled kernels; nothing is run on a
GPU.

    python -m kernels.cost --size 65536x65536x768 --loss info_nce --chip sm_90
    python -m kernels.cost --json kernels/results/cost.json          six default cases; also save the results
    python -m kernels.cost --size 65536x65536x768 --loss info_nce --ranks 64 --link 50 --encoder-tflop 0.1
    python -m kernels.cost --host                 the time of the host for small batches, measured (host.py)

A prediction shows which resource limits each kernel, and which of two versions of a kernel does less work.
It is a lower bound: measured times will be longer.

The loss is traced forward and backward on tensors that have shapes but no data, and every kernel that it
would launch is compiled for the chip (launches.py). The instructions of a warp are counted in the kernel's
machine code (sass.py); the arguments of the launch tell how many programs and loop iterations there are
(kernel_costs.py). For each resource, the clock cycles of a launch are its work divided by the rate. The first
four rows count the work of the busiest streaming multiprocessor (SM). L2 and HBM count all programs:

    tensor     FLOP of the tensor cores
    MUFU       results of the special function unit (exp2)
    issue      issued instructions
    shared     bytes to and from shared memory
    L2         bytes to and from the L2 cache
    HBM        bytes to and from GPU memory, assuming that each row of q and k is read once per launch
    latency    chain of loads that wait for each other; only for kernels without tensor cores

The largest number, the bottleneck, is the launch's time: the other resources are assumed to overlap with it
completely. Other PyTorch operations take the time of their memory traffic. Matrix products by cuBLAS are
assumed to reach 80 % of the tensor core peak. Rates are from the vendor's data sheets, except those that the
output lists as "assumed".

In the table of counts, registers and spills (bytes) are per thread, and shared memory (bytes) is per program.
"programs" is the number of programs that an SM holds at once. "waves" is how many times the programs of a
launch fill all SMs. "tiles" is the number of tiles on the busiest SM. Instructions, mma (tensor core
instructions) and mufu are per warp and tile. In the table of cycles, "limit" is the bottleneck.

With --ranks, the output also estimates the time of a training step on many GPUs (multi_gpu.py).
"""
import argparse
import json
import math
import os
import sys
from collections import Counter

import torch

from ..benchmark.cases import MIN_FLOP
from ..benchmark.measure import parse_size, positive_integer
from ..heuristics import HAS_TRITON
from ..printing import escape_unencodable, fail
from . import host, multi_gpu
from .kernel_costs import LOAD_CLOCKS, MUFU_RESULTS, SHARED_BYTES, WARP_INSTRUCTIONS, kernel_cost
from .launches import CHIPS, HBM_SHARE, record_launches

DEFAULT_CASES = [("nt_xent", [32768, 32768, 128]), ("nt_xent", [65536, 65536, 768]),
           ("clip_loss", [65536, 65536, 768]), ("info_nce", [65536, 65536, 768]),
           ("queue_loss", [4096, 65536, 128]), ("nt_xent", [2 ** 20, 2 ** 20, 768])]
CUBLAS_EFFICIENCY = 0.8                  # share of the tensor core peak
MIN_LAUNCH_SECONDS = 2e-6
ASSUMED = ("assumed: clock rates; L2 rate of H200 equal to A100's, of B200 twice that; "
           f"{HBM_SHARE:.0%} of the HBM rate; cuBLAS at {CUBLAS_EFFICIENCY:.0%} of the tensor core peak; "
           f"{LOAD_CLOCKS} clocks per load; at least {MIN_LAUNCH_SECONDS * 1e6:.0f} µs per launch")


def product_cost(rows, columns, inner, flop, moved, chip):
    """Return the bytes and cycles of a cuBLAS product (rows, inner)·(inner, columns). It is assumed to use
    tiles of 128 × 256 and to split sums into up to 16 pieces, whichever number fills the SMs best.

    flop     bf16 FLOP
    moved    bytes read and written
    """
    tiles = math.ceil(rows / 128) * math.ceil(columns / 256)
    waves = [tiles * pieces / chip.multiprocessors for pieces in range(1, 17)]
    fills = max(wave / math.ceil(wave) for wave in waves)
    tensor = flop / (chip.multiprocessors * chip.tensor * CUBLAS_EFFICIENCY * fills)
    return dict(bytes=moved, cycles={"tensor": tensor, "HBM": moved / chip.hbm_bytes()})


def predict(loss, size, dtype, chip_name):
    """Return the prediction for forward and backward: a dict with the time in "ms", and in "kernels" a row
    for each compiled kernel, for cuBLAS products and for other PyTorch operations. A row has the counts and
    mean cycles of a launch, and the milliseconds and bytes of all launches."""
    chip, rows = CHIPS[chip_name], {}
    for launch in record_launches(loss, size, dtype, chip_name):
        is_kernel = len(launch) == 4
        if is_kernel:
            name, row = launch[0], kernel_cost(*launch, chip, getattr(torch, dtype).itemsize)
        elif len(launch) == 5:
            name, row = "products", product_cost(*launch, chip)
        else:
            name, row = "PyTorch", dict(bytes=launch[0], cycles={"HBM": launch[0] / chip.hbm_bytes()})
        seconds = max(MIN_LAUNCH_SECONDS, max(row["cycles"].values()) / chip.ghz / 1e9)
        binary = launch[-1] if is_kernel else None              # one row for each compiled variant
        total = rows.setdefault((name, binary), dict(
            kernel=name, launches=0, **row | dict(ms=0, bytes=0, cycles=Counter())))
        total["launches"] += 1
        total["ms"] += 1e3 * seconds
        total["bytes"] += row["bytes"]
        total["cycles"].update(row["cycles"])
    for row in rows.values():
        row["cycles"] = {name: round(cycles / row["launches"]) for name, cycles in row["cycles"].items()}
        row["binds"] = max(row["cycles"], key=row["cycles"].get)                   # the bottleneck
        row["ms"] = round(row["ms"], 4)
    ms = round(sum(row["ms"] for row in rows.values()), 4)
    return dict(loss=loss, size=size, dtype=dtype, chip=chip_name, ms=ms, kernels=list(rows.values()))


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────

# columns of the two tables, with their widths
COUNTS = {"launches": 9, "registers": 10, "spills": 7, "shared": 8, "programs": 9, "waves": 7, "tiles": 7,
          "instructions": 13, "mma": 6, "mufu": 6}
CYCLES = {"tensor": 10, "MUFU": 10, "issue": 10, "shared": 10, "L2": 10, "HBM": 10, "latency": 9}


def report(result):
    """Yield the lines of a prediction: the time, a table of counts, and a table of cycles."""
    name = f"{result['loss']} {'x'.join(map(str, result['size']))} {result['dtype']} on {result['chip']}"
    yield f"{name}: {multi_gpu.three_digits(result['ms'])} ms forward and backward"
    yield f"{'counts':23}" + "".join(f"{title:>{width}}" for title, width in COUNTS.items())
    for row in result["kernels"]:
        cells = (row.get(title, "") for title in COUNTS)
        cells = (format(x, ".2f") if isinstance(x, float) else x for x in cells)
        yield f"{row['kernel']:23}" + "".join(f"{x:>{w}}" for x, w in zip(cells, COUNTS.values()))
    yield (f"{'cycles per launch':23}" + "".join(f"{title:>{width}}" for title, width in CYCLES.items())
           + f"{'limit':>9}{'GB':>8}{'ms':>9}")
    for row in result["kernels"]:
        cells = "".join(f"{row['cycles'].get(title, 0):>{width},}" for title, width in CYCLES.items())
        yield f"{row['kernel']:23}{cells}{row['binds']:>9}{row['bytes'] / 1e9:8.2f}{row['ms']:9.3f}"


def make_parser():
    def number(text):
        """Parse a number above 0."""
        if not 0 < float(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
        return float(text)

    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kernels.cost", description=__doc__, formatter_class=style)
    parser.error = fail                                        # one line, without the usage text
    add = parser.add_argument
    add("--loss", choices=MIN_FLOP, metavar="LOSS",
        help=f"loss to predict, with --size: {', '.join(MIN_FLOP)}; default: six cases")
    add("--size", type=parse_size, metavar="NxMxD",
        help="size N x M x D, for example 4096x4096x128, with --loss; default: six cases")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="dtype of the rows of q and k; default bfloat16")
    chips = ", ".join(f"{name} ({chip.name})" for name, chip in CHIPS.items())
    add("--chip", choices=CHIPS, metavar="CHIP", default="sm_90", help=f"GPU: {chips}; default sm_90")
    add("--host", action="store_true",
        help="measure the time that the host needs for 64, 256 and 1,024 rows, of all losses or of --loss")
    add("--json", metavar="FILE", help="save the predictions to this file")
    add("--ranks", type=positive_integer,
        help="also estimate the time of a training step on this number of GPUs; needs --loss and --size")
    add("--link", type=number, default=50, metavar="GBPS",
        help="with --ranks: network bandwidth of each GPU in GB/s; default 50")
    add("--encoder-tflop", type=number, default=0.1, metavar="TFLOP",
        help="with --ranks: TFLOP of the encoder for one row, forward and backward; default 0.1")
    return parser


def main(argv=None):
    escape_unencodable()
    args = make_parser().parse_args(argv)
    if not HAS_TRITON or os.environ.get("TRITON_INTERPRET") == "1":
        fail("needs the package triton, and TRITON_INTERPRET must not be set, because kernels are compiled")
    from triton.runtime.errors import OutOfResources
    if args.host:
        print(*host.report(args.chip, args.loss), sep="\n", flush=True)
        return
    if (args.loss is None) != (args.size is None) or args.ranks and not args.size:
        fail("--loss, --size: expected both, or neither for six default cases; --ranks needs both")
    if args.ranks and args.loss not in multi_gpu.GATHERED_SIDES:
        fail(f"--ranks: expected a --loss that gathers keys: {', '.join(multi_gpu.GATHERED_SIDES)}")
    if args.size and args.size[0] * args.size[1] > 2 ** 41:
        fail("--size: more than 2^41 pairs of rows; expected fewer (larger sizes repeat the same launches)")
    if args.json and not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK):
        fail(f"{args.json}: its folder does not exist or is not writable")
    chip, results = CHIPS[args.chip], []
    print_lines(f"{chip.name}: {chip.multiprocessors} SMs at {chip.ghz} GHz; per SM and clock "
                f"{chip.tensor:,} bf16 FLOP, {MUFU_RESULTS} MUFU results, {WARP_INSTRUCTIONS} instructions, "
                f"{SHARED_BYTES} B shared memory; L2 {chip.l2:,} B per clock; HBM {chip.hbm:,} GB/s", ASSUMED)
    for loss, size in [(args.loss, args.size)] if args.size else DEFAULT_CASES:
        try:
            results.append(predict(loss, size, args.dtype, args.chip))
        except (ValueError, OutOfResources) as error:
            fail(f"--size {'x'.join(map(str, size))}: {error}")
        print_lines(*report(results[-1]))
    if args.ranks:
        size = getattr(torch, args.dtype).itemsize
        peak = chip.multiprocessors * chip.tensor * chip.ghz * 1e9
        case = dict(d=args.size[2], size=size, sides=multi_gpu.GATHERED_SIDES[args.loss],
                    link=args.link * 1e9, tflop=args.encoder_tflop, peak=peak * 2 / size,
                    library=CUBLAS_EFFICIENCY)
        print_lines(*multi_gpu.report(args.size[0], args.ranks, case, chip))
    if args.json:
        environment = dict(predicted=True, chip=chip._asdict(), assumed=ASSUMED, torch=torch.__version__,
                           command=" ".join(["python -m kernels.cost", *(argv or sys.argv[1:])]))
        try:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(environment | dict(targets=results), file, indent=1, ensure_ascii=False)
        except OSError as error:
            fail(f"--json {args.json}: {error.strerror}")


def print_lines(*lines):
    """Print lines, each marked as predicted."""
    print(*(f"predicted  {line}" for line in lines), sep="\n", flush=True)
