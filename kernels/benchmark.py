"""Measure time, memory and error of the losses of this package and of other installed packages.

    python -m kernels.benchmark --json h200.json     default losses and sizes for this device; save results
    python -m kernels.benchmark --from h200.json     show saved results; docs/plot_kernels.py plots them
    python -m kernels.benchmark --loss clip_loss --sizes 16384x16384x768 --impl eager blockwise

A case is a loss, a size N x M x D (q is (N, D), k is (M, D)) and a kind of inputs (--set). For each case and
implementation, the output has these columns:
forward ms    median time of a forward pass
ms            median time of a forward and a backward pass together; 20 %, 80 %: percentiles of this time
MB            peak memory of both passes, in 2^20 bytes, with the gradients but without the inputs
error         relative error |g - g64| / |g64| of the gradient g of q; g64 is this gradient in float64

On a GPU, the L2 cache is flushed before each timed run. Each implementation has one process for all cases,
from small to large. If this process crashes or a case takes longer than --limit, later cases are skipped.
"""
import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import math
import multiprocessing
import platform
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import kernels

TAU = 0.05
LARGE = "16384x16384x768 65536x65536x768"
SQUARE = f"256x256x768 1024x1024x768 4096x4096x768 {LARGE}"
DEFAULT_SIZES = {                                              # a CPU runs only the sizes with N·M ≤ 2^28
    "nt_xent": f"{SQUARE} 32768x32768x128", "clip_loss": SQUARE, "info_nce": SQUARE, "sigmoid_loss": LARGE,
    "sup_con_loss": LARGE, "queue_loss": "256x65536x128 4096x65536x128",
    "linear_cross_entropy": "8192x128256x4096"}
OURS = ("auto", "triton", "blockwise")
# This maps an implementation to its PyPI package; "torch" is torch.nn.functional.linear_cross_entropy.
PEERS = {"torch": "torch", "memeff": "memeff", "Inf-CL": "inf-cl", "CCE": "cut-cross-entropy",
         "Liger": "liger-kernel", "siglip-kernel": "siglip-kernel"}
# Each printed column has a title, a key in the dict of a result, and a number format.
COLUMNS = (("forward ms", "forward_ms", ".3g"), ("ms", "ms", ".4g"), ("20 %", "ms_20", ".4g"),
           ("80 %", "ms_80", ".4g"), ("MB", "extra_mb", ".4g"), ("error", "error", ".1e"))


# ── cases ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_inputs(case, device):
    """Return q (N, D), k (M, D), targets (N,). For queue_loss, k is the queue followed by the N positives.

    case    dict of loss, size [N, M, D], set and dtype (names). In the set "trained", row i of q is similar
            to row i of the last N rows of k. If these are the positives (queue_loss, and for M = N info_nce,
            clip_loss, nt_xent), the loss is about 5e-3
    """
    loss, (n, m, d), dtype = case["loss"], case["size"], getattr(torch, case["dtype"])
    torch.manual_seed(0)
    q = F.normalize(torch.randn(n, d, device=device), dim=1)
    k = F.normalize(torch.randn(m + n if loss == "queue_loss" else m, d, device=device), dim=1)
    if case["set"] == "trained":  # positive's logit = lse of M random logits − log 5e-3, so loss ≈ 5e-3
        cosine = TAU * (math.log(m) + 1 / (2 * d * TAU ** 2) - math.log(5e-3))
        noise = k[-n:] - (k[-n:] * q).sum(1, keepdim=True) * q
        k[-n:] = cosine * q + (1 - cosine ** 2) ** 0.5 * F.normalize(noise, dim=1)
    targets = torch.arange(n, device=device) % m
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(loss != "queue_loss"), targets


def our_loss(loss, impl):
    """Return a loss of this package as a function (q, k, targets) → scalar."""
    f = getattr(kernels, loss)
    if impl == "compile":
        return torch.compile(our_loss(loss, "eager"), dynamic=False)
    if loss == "linear_cross_entropy":
        return lambda q, k, targets: f(q, k, targets, impl=impl)
    if loss == "queue_loss":  # k is the queue, followed by the positives
        return lambda q, k, targets: f(q, k[-len(q):], k[:-len(q)], TAU, impl=impl)
    if loss == "nt_xent":
        return lambda q, k, targets: f(q[:len(q) // 2], k[:len(q) // 2], TAU, impl=impl)
    if loss == "sup_con_loss":  # each label has two samples
        def supervised(q, k, targets):
            z = stack_views(q, k).unflatten(0, (2, -1)).transpose(0, 1)
            return f(z, torch.arange(len(z), device=z.device) // 2, TAU, TAU, impl=impl)
        return supervised
    return lambda q, k, targets: f(q, k, TAU, impl=impl)


def peer_loss(loss, impl):
    """Return another package's loss (q, k, targets) → scalar; raise NotImplementedError if it has none.
    For nt_xent, other packages include j = i in the sum: another loss, but with equally many products."""
    if impl == "siglip-kernel" and loss == "sigmoid_loss":
        from siglip_kernel import fused_siglip_loss
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scale, bias = (torch.tensor(x, device=device) for x in (math.log(1 / TAU), -10.0))
        return lambda q, k, targets: fused_siglip_loss(q, k, scale, bias)
    if impl == "memeff" and loss in ("clip_loss", "nt_xent"):
        from memeff import MemoryEfficientCLIPLoss
        symmetric = MemoryEfficientCLIPLoss(temperature=TAU, normalized_inputs=True, stable=False)
        if loss == "clip_loss":
            return lambda q, k, targets: symmetric(q, k)
        return lambda q, k, targets: symmetric(stack_views(q, k), stack_views(k, q))
    if impl in ("siglip-kernel", "memeff") or loss in ("queue_loss", "sigmoid_loss", "sup_con_loss"):
        raise NotImplementedError("does not have this loss")
    f = peer_cross_entropy(impl, 1.0 if loss == "linear_cross_entropy" else TAU)
    if loss == "clip_loss":
        return lambda q, k, targets: (f(q, k, targets) + f(k, q, targets)) / 2
    if loss == "nt_xent":
        return lambda q, k, targets: f(stack_views(q, k), stack_views(q, k), targets.roll(len(targets) // 2))
    return f


def peer_cross_entropy(impl, tau):
    """Return another package's loss (q, k, targets) → cross entropy of the rows of q·kᵀ/τ."""
    if impl == "torch":
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda q, k, targets: F.linear_cross_entropy(q / tau, k, targets, options=options)
    if impl == "CCE":
        from cut_cross_entropy import linear_cross_entropy
        return lambda q, k, targets: linear_cross_entropy(q / tau, k, targets, filter_eps=None)
    if impl == "Inf-CL":
        from inf_cl import cal_flash_loss
        return lambda q, k, targets: cal_flash_loss(q, k, targets, 1 / tau, min(256, q.shape[1])).mean()
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    return lambda q, k, targets: LigerFusedLinearCrossEntropyLoss()(k, q / tau, targets)


def stack_views(q, k):
    """Return N rows that are two views of N/2 samples: the first half of q, then the first half of k."""
    return torch.cat([q[:len(q) // 2], k[:len(q) // 2]])


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────


def measure(case, impl, device, repeat):
    """Return the result of one implementation, a dict {"ms": ..., "extra_mb": ..., ...}."""
    loss, size = case["loss"], case["size"]
    f = peer_loss(loss, impl) if impl in PEERS else our_loss(loss, impl)
    q, k, targets = make_inputs(case, device)

    def forward_backward():
        q.grad = k.grad = None
        f(q, k, targets).backward()

    forward_backward()  # the first run allocates cuBLAS's workspace and the like, which is not counted
    q.grad = k.grad = None
    before = peak_memory_bytes(device, reset=True)
    forward_backward()
    row = {"extra_mb": (peak_memory_bytes(device) - before) / 2 ** 20}
    with torch.no_grad():
        row["forward_ms"], _, _ = time_ms(lambda: f(q, k, targets), device, repeat)
    row["ms"], row["ms_20"], row["ms_80"] = time_ms(forward_backward, device, repeat)
    if (loss != "nt_xent" or impl not in PEERS) and math.prod(size) <= 2 ** (42 if device == "cuda" else 38):
        exact_q, exact_k = (x.detach().double().requires_grad_(x.requires_grad) for x in (q, k))
        our_loss(loss, "blockwise")(exact_q, exact_k, targets).backward()
        row["error"] = ((q.grad - exact_q.grad).norm() / exact_q.grad.norm()).item()
    return row


def time_ms(step, device, repeat):
    """Return the median, 20th and 80th percentile of step()'s time in ms: `repeat` runs, fewer after 10 s."""
    step()
    times = []
    flush = torch.empty(2 ** 28, dtype=torch.uint8, device=device) if device == "cuda" else None
    while len(times) < repeat and (len(times) < 3 or sum(times) < 10_000):
        if device == "cuda":
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
    return [torch.tensor(times).quantile(x).item() for x in (0.5, 0.2, 0.8)]


def peak_memory_bytes(device, reset=False):
    """Return this process's peak memory in bytes since the last reset: on the GPU or in RAM (Linux only)."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the OS, so that its next use is measured
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measure_cases(sender, impl, cases, device, repeat):
    """Measure the cases of one implementation in this process, and send each result through a pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C: run_impl ends this process
    for case in cases:
        torch.compiler.reset()  # without this, torch.compile compiles no more than eight sizes
        try:
            row = measure(case, impl, device, repeat)
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
        sender.send(row)
        torch.cuda.empty_cache()


def run_impl(impl, cases, device, repeat, limit, report):
    """Measure the cases of one implementation in a new process, and call report(row) for each result."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=measure_cases, args=(sender, impl, cases, device, repeat))
    process.start()
    sender.close()  # now only the new process can send, so the pipe closes when that process ends
    try:
        for case in cases:
            if not receiver.poll(limit):
                report({**case, "impl": impl, "failed": f"more than {limit} s; later cases are skipped"})
                break
            report({**case, "impl": impl, **receiver.recv()})
    except EOFError:
        process.join()
        report({**case, "impl": impl, "failed": f"exit code {process.exitcode}; later cases are skipped"})
    finally:
        process.kill()
        process.join()


def run_cases(args, device):
    """Measure the cases that the flags select, print each result when it is known, and return all."""
    cases = []
    for loss in args.loss or DEFAULT_SIZES:
        defaults = map(parse_size, DEFAULT_SIZES[loss].split())
        sizes = args.sizes or [x for x in defaults if device == "cuda" or x[0] * x[1] <= 2 ** 28]
        cases += [dict(loss=loss, size=size, set=x, dtype=args.dtype) for size in sizes for x in args.set]
    cases.sort(key=lambda case: math.prod(case["size"]))
    result = {**describe_environment(device), "rows": []}
    print(*(f"{name} {value}" for name, value in result.items() if name != "rows"), sep="   ")
    print(f"{'loss':21}{'N x M x D':22}{'set':8}{'impl':14}" + "".join(f"{x:>11}" for x, _, _ in COLUMNS))

    def report(row):
        result["rows"].append(row)
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1))
        case = f"{row['loss']:21}{'x'.join(map(str, row['size'])):22}{row['set']:8}{row['impl']:14}"
        numbers = "".join(f"{format(row.get(key, math.nan), style):>11}" for _, key, style in COLUMNS)
        print(case + row.get("failed", numbers), flush=True)

    impls = ["eager", "auto", "blockwise"]
    if device == "cuda":
        impls = ["eager", "compile", "auto", "triton", *(x for x in PEERS if PEERS[x] in result)]
    x = torch.empty(0, dtype=getattr(torch, args.dtype), device=device)
    for impl in args.impl or impls:
        measured = [case for case in cases if args.impl or impl == "eager"    # skip if auto selects this impl
                    or impl != kernels.choose_impl("auto", x, *case["size"][:2])]
        run_impl(impl, measured, device, args.repeat, args.limit, report)
    return result


# ── report and command line ─────────────────────────────────────────────────────────────────────────────────


def describe_environment(device):
    """Return a dict with the device, the versions of packages, the date and the command of this run."""
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    versions = {"python": platform.python_version(), "kernels": kernels.VERSION}
    for package in ("triton", *PEERS.values()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = " ".join(["python -m kernels.benchmark", *sys.argv[1:]])
    return dict(device=name, **versions, date=time.strftime("%Y-%m-%d"), command=command)


def name_ours(rows):
    """Rename the first of OURS that was measured, usually "auto", to "ours"."""
    first = next((impl for impl in OURS if any(row["impl"] == impl for row in rows)), None)
    return [row | {"impl": "ours"} if row["impl"] == first else row for row in rows]


def caption(result):
    """Return one line that says on which device, in which dtypes and when the results were measured."""
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in result["rows"]))
    return f"Forward + backward, {dtypes}: {result['device']}, torch {result['torch']}, {result['date']}"


def in_ms(ms):
    """Return a time in milliseconds as text with its unit."""
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def in_mb(mb):
    """Return a memory size in MB as text with its unit, which is GB from 1024 MB on."""
    if mb >= 1024:
        return f"{mb / 1024:.1f} GB"
    return f"{mb:.0f} MB" if mb >= 10 else f"{mb:.2g} MB"


def largest_cases(rows):
    """Return only the results for the largest size N·M·D of each loss."""
    largest = {row["loss"]: row["size"] for row in sorted(rows, key=lambda row: math.prod(row["size"]))}
    return [row for row in rows if row["size"] == largest[row["loss"]]]


def cell(row):
    """Return the text of a table cell for one result: time and memory, or why there is no result."""
    if not row or "failed" in row:
        return row.get("failed", "")
    return in_ms(row["ms"]) + (f", {in_mb(row['extra_mb'])}" if "extra_mb" in row else "")


def markdown(result, sizes):
    """Return a table of `sizes`, or of each loss's largest size. Omit errors if ours equal those of eager."""
    rows = [row for row in name_ours(result["rows"]) if not sizes or row["size"] in sizes]
    cases = {}  # {case: {implementation: row}}
    for row in rows if sizes else largest_cases(rows):
        case = row["loss"], " × ".join(f"{x:,}" for x in row["size"]), row["set"]
        cases.setdefault(case, {})[row["impl"]] = row
    names, lines = ("eager", "compile", "ours", "triton", "blockwise"), []
    for case, rows in cases.items():
        texts = [*case, *(cell(rows.get(name, {})) for name in names)]
        others = [row for name, row in rows.items() if name in PEERS and "ms" in row]
        best = min(others, key=lambda row: row["ms"], default={})
        texts.append(f"{best.get('impl', '')} {cell(best)}".strip())
        errors = (rows.get(name, {}).get("error") for name in ("eager", "ours"))
        lines.append([*texts, *("" if error is None else f"{error:.0e}" for error in errors)])
    titles = ["loss", "N × M × D", "inputs", *names, "best other package", "error of eager", "error of ours"]
    shown = titles[:-2] if all(line[-2] in ("", line[-1]) for line in lines) else titles
    kept = [i for i in range(len(shown)) if any(line[i] not in ("", "random") for line in lines)]
    table = [titles, ["---"] * len(titles), *lines]
    return "\n".join([caption(result), "", *("| " + " | ".join(x[i] for i in kept) + " |" for x in table)])


def parse_size(text):
    """Return [4096, 4096, 128] for "4096x4096x128"."""
    n, m, d = map(int, text.split("x"))
    return [n, m, d]


def load_result(path):
    """Return results that an earlier run saved by --json."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}; expected a file that --json wrote")


def make_parser(device):
    parser = argparse.ArgumentParser("kernels.benchmark", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--loss", nargs="+", choices=DEFAULT_SIZES, metavar="LOSS", help=", ".join(DEFAULT_SIZES))
    add("--sizes", nargs="+", type=parse_size, metavar="NxMxD", help="sizes, for example 4096x4096x128")
    add("--set", nargs="+", choices=("random", "trained"), default=["random"],
        help="random: unit vectors; trained: pairs so similar that info_nce is 5e-3; default random")
    add("--dtype", choices=("float64", "float32", "float16", "bfloat16"),
        default="bfloat16" if device == "cuda" else "float32", help="default on this device: %(default)s")
    add("--impl", nargs="+", choices=("eager", "compile", *OURS, *PEERS), metavar="IMPL",
        help=f"eager (plain PyTorch), compile (eager with torch.compile), {', '.join(OURS)}, or a package: "
             f"{', '.join(PEERS)}. Default: eager and auto; triton (GPU) or blockwise (CPU) for sizes where "
             "auto selects eager; on a GPU also compile and installed packages")
    add("--repeat", type=int, default=20, help="timed runs, or fewer if they take more than 10 s; default 20")
    add("--limit", type=int, default=600, metavar="SECONDS", help="time limit for one case; default 600")
    add("--json", metavar="FILE", help="save the results to this file, after each case")
    add("--from", dest="source", metavar="FILE", help="measure nothing; print a table of this --json file")
    add("--markdown", action="store_true", help="Markdown table of --sizes, or of each loss's largest size")
    return parser


def main(argv=None):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = make_parser(device).parse_args(argv)
    if args.source and (args.loss or args.impl or args.json):
        sys.exit("--from shows saved results: leave out --loss, --impl and --json; --sizes is allowed")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        sys.exit(f"--json {args.json}: its folder does not exist")
    result = load_result(args.source) if args.source else run_cases(args, device)
    if args.source or args.markdown:
        print(markdown(result, args.sizes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C: run_impl cleans up
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
