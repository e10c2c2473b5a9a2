"""What a loss would take on a chip that is not there: predicted from its compiled kernels, nothing is run.

    python -m kernels.cost --size 65536x65536x768 --loss info_nce --chip sm_90
    python -m kernels.cost --json kernels/results/cost.json                    six targets, as data too
    python -m kernels.cost --size 65536x65536x768 --loss info_nce --ranks 64 --link 50 --encoder-tflop 0.1

The loss runs forward and backward without memory and without a chip, and every kernel that it launches is
compiled (launches.py). What a warp does is counted in the assembler's listing (listing.py), how
often comes from the launch (kernel_costs.py). In cycles a launch needs

    tensor, MUFU, issue, shared    of the multiprocessor with the most tiles: what its programs do / the rate
    L2, HBM                        bytes of all programs / the rate; HBM reads each row of q and k once
    latency                        of kernels without tensor cores: loads that wait for each other

and the largest, the one that binds, is its time: all others are taken to hide behind it, at their full rate.
So a prediction is a floor. It tells what binds and compares kernels; a measured time lies above it. What
PyTorch does between kernels takes its bytes, and library products LIBRARY of the tensor peak. --ranks adds
what many GPUs cost (scale.py). Rates are the vendor's, but for what ASSUMED names.
"""
import argparse
import json
import math
import os
import sys
from collections import Counter

import torch

from ..benchmark.cases import PRODUCTS
from ..benchmark.measure import count, shape
from ..paths import HAS_TRITON
from ..printing import fail, print_all
from . import scale
from .kernel_costs import ISSUE, LATENCY, MUFU, SHARED, kernel_cost
from .launches import CHIPS, HBM_SHARE, launches

TARGETS = [("nt_xent", [32768, 32768, 128]), ("nt_xent", [65536, 65536, 768]),
           ("clip_loss", [65536, 65536, 768]), ("info_nce", [65536, 65536, 768]),
           ("queue_loss", [4096, 65536, 128]), ("nt_xent", [2 ** 20, 2 ** 20, 768])]
LIBRARY, SHORTEST = 0.8, 2e-6             # of the tensor peak; seconds of a launch
ASSUMED = (f"assumed: clocks; L2 of H200 as of A100, of B200 twice; {HBM_SHARE:.0%} of HBM's rate; "
           f"library products {LIBRARY:.0%} of the peak; {LATENCY} clocks a load; {SHORTEST * 1e6:.0f} µs a "
           "launch at least")


def product_cost(rows, columns, inner, flop, moved, chip):
    """Of a library product: tiles of 128 × 256, sums in as many pieces, up to 16, as fill the chip best."""
    tiles = math.ceil(rows / 128) * math.ceil(columns / 256)
    waves = [tiles * pieces / chip.multiprocessors for pieces in range(1, 17)]
    fills = max(wave / math.ceil(wave) for wave in waves)
    tensor = flop / (chip.multiprocessors * chip.tensor * LIBRARY * fills)
    return dict(bytes=moved, cycles={"tensor": tensor, "HBM": moved / chip.hbm_bytes()})


def predict(loss, size, dtype, chip_name):
    """{"ms": of a call forward and backward, "kernels": [a row for every compiled kernel, library products
    and the rest of PyTorch: what is counted, mean cycles of a launch, and ms and bytes of all]}."""
    chip, rows = CHIPS[chip_name], {}
    for what in launches(loss, size, dtype, chip_name):
        if len(what) == 4:
            name, row = what[0], kernel_cost(*what, chip, getattr(torch, dtype).itemsize)
        elif len(what) == 5:
            name, row = "products", product_cost(*what, chip)
        else:
            name, row = "PyTorch", dict(bytes=what[0], cycles={"HBM": what[0] / chip.hbm_bytes()})
        seconds = max(SHORTEST, max(row["cycles"].values()) / chip.ghz / 1e9)
        total = rows.setdefault((name, what[-1] if len(what) == 4 else None), dict(
            kernel=name, launches=0, **row | dict(ms=0, bytes=0, cycles=Counter())))
        total["launches"] += 1
        total["ms"] += 1e3 * seconds
        total["bytes"] += row["bytes"]
        total["cycles"].update(row["cycles"])
    for row in rows.values():
        row["cycles"] = {name: round(cycles / row["launches"]) for name, cycles in row["cycles"].items()}
        row["binds"], row["ms"] = max(row["cycles"], key=row["cycles"].get), round(row["ms"], 4)
    ms = round(sum(row["ms"] for row in rows.values()), 4)
    return dict(loss=loss, size=size, dtype=dtype, chip=chip_name, ms=ms, kernels=list(rows.values()))

# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────


COUNTS = {"launches": 9, "registers": 10, "spills": 7, "shared": 8, "programs": 9, "waves": 7, "tiles": 7,
          "instructions": 13, "mma": 6, "mufu": 6}
CYCLES = {"tensor": 10, "MUFU": 10, "issue": 10, "shared": 10, "L2": 10, "HBM": 10, "latency": 9}


def report(result):
    """Lines of a prediction."""
    name = f"{result['loss']} {'x'.join(map(str, result['size']))} {result['dtype']} on {result['chip']}"
    yield f"{name}: {scale.short(result['ms'])} ms forward and backward"
    yield f"{'counted':18}" + "".join(f"{title:>{width}}" for title, width in COUNTS.items())
    for row in result["kernels"]:
        cells = (row.get(title, "") for title in COUNTS)
        cells = (format(x, ".2f") if isinstance(x, float) else x for x in cells)
        yield f"{row['kernel']:18}" + "".join(f"{x:>{w}}" for x, w in zip(cells, COUNTS.values()))
    yield (f"{'cycles a launch':18}" + "".join(f"{title:>{width}}" for title, width in CYCLES.items())
           + f"{'binds':>9}{'GB':>8}{'ms':>9}")
    for row in result["kernels"]:
        cells = "".join(f"{row['cycles'].get(title, 0):>{width},}" for title, width in CYCLES.items())
        yield f"{row['kernel']:18}{cells}{row['binds']:>9}{row['bytes'] / 1e9:8.2f}{row['ms']:9.3f}"


def make_parser():
    def number(text):
        if not 0 < float(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: wanted a number above 0")
        return float(text)

    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kernels.cost", description=__doc__, formatter_class=style)
    parser.error = fail                                        # in one line, without the usage
    add = parser.add_argument
    add("--loss", choices=PRODUCTS, help="with --size; default: six targets")
    add("--size", type=shape, help="N x M x D, as 4096x4096x128")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the rows")
    add("--chip", choices=CHIPS, default="sm_90", help=", ".join(f"{x} {y.name}" for x, y in CHIPS.items()))
    add("--json", help="write the predictions to this file")
    add("--ranks", type=count, help="GPUs that share the rows; with --size")
    add("--link", type=number, default=50, help="GB/s of each, default 50")
    add("--encoder-tflop", type=number, default=0.1, help="of a row, forward and backward, default 0.1")
    return parser


def main(argv=None):
    print_all()
    args = make_parser().parse_args(argv)
    if not HAS_TRITON or os.environ.get("TRITON_INTERPRET") == "1":
        fail("wanted the package triton, and TRITON_INTERPRET not set: kernels are compiled here")
    from triton.runtime.errors import OutOfResources
    if (args.loss is None) != (args.size is None) or args.ranks and not args.size:
        fail("--loss, --size: wanted both, or none for the six targets; --ranks wants them")
    if args.ranks and args.loss not in scale.SIDES:
        fail(f"--ranks: wanted --loss {', '.join(scale.SIDES)}, whose keys are gathered")
    if args.size and args.size[0] * args.size[1] > 2 ** 41:
        fail("--size: more than 2^41 pairs of rows; their launches are those of 2^40, more often")
    if args.json and not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK):
        fail(f"{args.json}: its folder is not there, or cannot be written")
    say = lambda *lines: print(*(f"predicted  {line}" for line in lines), sep="\n", flush=True)
    chip, results = CHIPS[args.chip], []
    say(f"{chip.name}: {chip.multiprocessors} multiprocessors at {chip.ghz} GHz, each {chip.tensor:,} bf16 "
        f"FLOP, {MUFU} MUFU, {ISSUE} issues, {SHARED} B shared a clock; L2 {chip.l2:,} B a clock; HBM "
        f"{chip.hbm:,} GB/s", ASSUMED)
    for loss, size in [(args.loss, args.size)] if args.size else TARGETS:
        try:
            results.append(predict(loss, size, args.dtype, args.chip))
        except (ValueError, OutOfResources) as error:
            fail(f"--size {'x'.join(map(str, size))}: {error}")
        say(*report(results[-1]))
    if args.ranks:
        size, peak = getattr(torch, args.dtype).itemsize, chip.multiprocessors * chip.tensor * chip.ghz * 1e9
        case = dict(d=args.size[2], size=size, sides=scale.SIDES[args.loss], link=args.link * 1e9,
                    tflop=args.encoder_tflop, peak=peak * 2 / size, library=LIBRARY)
        say(*scale.lines(args.size[0], args.ranks, case, chip))
    if args.json:
        about = dict(predicted=True, chip=chip._asdict(), assumed=ASSUMED, torch=torch.__version__,
                     command=" ".join(["python -m kernels.cost", *(argv or sys.argv[1:])]))
        try:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(about | dict(targets=results), file, indent=1, ensure_ascii=False)
        except OSError as error:
            fail(f"--json {args.json}: {error.strerror}")
