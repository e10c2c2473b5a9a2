"""Measure time, memory and error of the losses of this package and of other installed packages.

    python -m kernels.benchmark                                    default losses and sizes for this device
    python -m kernels.benchmark --loss clip_loss --sizes 16384x16384x768 --impl eager blockwise
    python -m kernels.benchmark --json h200.json                   also save the results
    python -m kernels.benchmark --from h200.json --markdown --plot h200.png      show saved results

A case is a loss, a size N x M x D (q is (N, D), k is (M, D)) and a kind of inputs (--set). For each case and
implementation, the output has these columns:
forward ms    median time of a forward pass
ms            median time of a forward and a backward pass together; 20 %, 80 %: percentiles of this time
MB            peak memory of both passes, in 2^20 bytes, with the gradients but without the inputs
error         relative error |g - g64| / |g64| of the gradient g of q; g64 is this gradient in float64

On a GPU, the L2 cache is flushed before each timed run. One process per implementation measures all cases,
from small to large. If it crashes, or a case takes longer than --limit, its remaining cases are not measured.
"""
import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import kernels
from kernels.figures import caption, in_mb, in_ms, largest_cases, plot

TAU = 0.05
DEFAULT_SIZES = {                                              # on a CPU, only sizes with N·M ≤ 2^28
    "nt_xent": "256x256x768 1024x1024x768 4096x4096x768 16384x16384x768 65536x65536x768 32768x32768x128",
    "clip_loss": "256x256x768 1024x1024x768 4096x4096x768 16384x16384x768 65536x65536x768",
    "info_nce": "256x256x768 1024x1024x768 4096x4096x768 16384x16384x768 65536x65536x768",
    "queue_loss": "256x65536x128 4096x65536x128", "linear_cross_entropy": "8192x128256x4096",
    "sigmoid_loss": "16384x16384x768 65536x65536x768", "sup_con_loss": "16384x16384x768 65536x65536x768"}
OURS = ("triton", "blockwise", "auto")
# implementation → name of its package on PyPI; "torch" is torch.nn.functional.linear_cross_entropy
PEERS = {"torch": "torch", "memeff": "memeff", "Inf-CL": "inf-cl", "CCE": "cut-cross-entropy",
         "Liger": "liger-kernel", "siglip-kernel": "siglip-kernel"}
IMPLS = ("eager", "compile", *OURS, *PEERS)
# printed columns: title, key in the dict of a result, number format
COLUMNS = (("forward ms", "forward_ms", ".3g"), ("ms", "ms", ".4g"), ("20 %", "ms_20", ".4g"),
           ("80 %", "ms_80", ".4g"), ("MB", "extra_mb", ".4g"), ("error", "error", ".1e"))


# ── cases ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_inputs(loss, size, dtype, device, trained):
    """Return q (N, D), k (M, D), targets (N,). For queue_loss, k is the queue followed by the N positives.

    trained    True: row i of q is similar to row i of the last N rows of k. If these are the positives
               (queue_loss, and for M = N info_nce, clip_loss, nt_xent), the loss is about 5e-3
    """
    n, m, d = size

    def seeded(seed):
        return dict(device=device, generator=torch.Generator(device).manual_seed(seed))

    q = F.normalize(torch.randn(n, d, **seeded(0)), dim=1)
    k = F.normalize(torch.randn(m + n if loss == "queue_loss" else m, d, **seeded(1)), dim=1)
    if trained:  # this cosine makes lse of M random logits − logit of the positive = log 5e-3: loss ≈ 5e-3
        cosine = TAU * (math.log(m) + 1 / (2 * d * TAU ** 2) - math.log(5e-3))
        noise = k[-n:] - (k[-n:] * q).sum(1, keepdim=True) * q
        k[-n:] = cosine * q + (1 - cosine ** 2) ** 0.5 * F.normalize(noise, dim=1)
    targets = torch.arange(n, device=device)
    if loss == "linear_cross_entropy":
        targets = torch.randint(m, (n,), **seeded(2))
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(loss != "queue_loss"), targets


def loss_function(loss, impl):
    """Return the loss as a function (q, k, targets) → scalar; None if the implementation does not have it."""
    if impl == "compile":
        torch.compiler.reset()  # without this, torch.compile compiles no more than eight sizes
        return torch.compile(our_loss(loss, "eager"), dynamic=False)
    return our_loss(loss, impl) if impl in ("eager", *OURS) else peer_loss(loss, impl)


def our_loss(loss, impl):
    f = getattr(kernels, loss)
    if loss == "linear_cross_entropy":
        return lambda q, k, targets: f(q, k, targets, impl=impl)
    if loss == "queue_loss":  # see make_inputs
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
    """Return a function (q, k, targets) → loss of another package, or None if the package lacks the loss.
    For nt_xent, other packages count the similarity of a row to itself as a negative. So their nt_xent
    differs slightly from ours, but it needs the same number of dot products."""
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
    if loss in ("queue_loss", "sigmoid_loss", "sup_con_loss"):
        return None
    f = peer_cross_entropy(impl, 1.0 if loss == "linear_cross_entropy" else TAU)
    if f is None:
        return None
    if loss == "clip_loss":
        return lambda q, k, targets: (f(q, k, targets) + f(k, q, targets)) / 2
    if loss == "nt_xent":
        return lambda q, k, targets: f(stack_views(q, k), stack_views(q, k), targets.roll(len(targets) // 2))
    return f


def peer_cross_entropy(impl, tau):
    """Return another package's loss (q, k, targets) → cross entropy of the rows of q·kᵀ/τ, or None."""
    if impl == "torch":
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda q, k, targets: F.linear_cross_entropy(q / tau, k, targets, options=options)
    if impl == "CCE":
        from cut_cross_entropy import linear_cross_entropy
        return lambda q, k, targets: linear_cross_entropy(q / tau, k, targets, filter_eps=None)
    if impl == "Inf-CL":
        from inf_cl import cal_flash_loss
        return lambda q, k, targets: cal_flash_loss(q, k, targets, 1 / tau, min(256, q.shape[1])).mean()
    if impl == "Liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        return lambda q, k, targets: LigerFusedLinearCrossEntropyLoss()(k, q / tau, targets)
    return None


def stack_views(q, k):
    """Return N rows that are two views of N/2 samples: the first half of q, then the first half of k."""
    return torch.cat([q[:len(q) // 2], k[:len(q) // 2]])


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────


def measure(loss, size, dtype, impl, device, repeat, trained):
    """Return the result of one implementation: {"ms": ..., "extra_mb": ..., ...}, or {"failed": reason}."""
    f = loss_function(loss, impl)
    if f is None:
        return {"failed": "does not have this loss"}
    q, k, targets = make_inputs(loss, size, dtype, device, trained)

    def forward_backward():
        q.grad = k.grad = None
        f(q, k, targets).backward()

    def forward():
        with torch.no_grad():
            f(q, k, targets)

    forward_backward()  # memory that is allocated only once, such as cuBLAS's workspace, is not counted
    q.grad = k.grad = None
    before = peak_memory_bytes(device, reset=True)
    forward_backward()
    row = {"extra_mb": (peak_memory_bytes(device) - before) / 2 ** 20}
    row["forward_ms"], _, _ = time_ms(forward, device, repeat)
    row["ms"], row["ms_20"], row["ms_80"] = time_ms(forward_backward, device, repeat)
    is_same_loss = loss != "nt_xent" or impl not in PEERS
    if is_same_loss and math.prod(size) <= 2 ** (42 if device == "cuda" else 38):
        exact_q, exact_k = (x.detach().double().requires_grad_(x.requires_grad) for x in (q, k))
        our_loss(loss, "blockwise")(exact_q, exact_k, targets).backward()
        row["error"] = ((q.grad - exact_q.grad).norm() / exact_q.grad.norm()).item()
    return row


def time_ms(step, device, repeat):
    """Return the median, 20th and 80th percentile of the time of step(), in milliseconds. A first run is not
    timed. Then `repeat` runs are timed, or fewer (at least three) if they take more than ten seconds."""
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
        ctypes.CDLL(None).malloc_trim(0)  # give freed memory back to the OS: its reuse would not be measured
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measure_cases(sender, impl, cases, device, repeat):
    """Measure the cases of one implementation in this process, and send each result through a pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C: run_impl ends this process
    for case in cases:
        trained, dtype = case["set"] == "trained", getattr(torch, case["dtype"])
        try:
            row = measure(case["loss"], case["size"], dtype, impl, device, repeat, trained)
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
        sender.send(row)
        if device == "cuda":
            torch.cuda.empty_cache()


def run_impl(impl, cases, device, repeat, limit, report):
    """Measure the cases of one implementation in a new process, and call report(row) for each result."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=measure_cases, args=(sender, impl, cases, device, repeat))
    process.start()
    sender.close()  # only the new process can send then, so the pipe closes when that process ends
    try:
        results = received_results(process, receiver, limit)
        for case in cases:
            row = next(results, {"failed": "not measured, because the process has ended"})
            report({**case, "impl": impl, **row})
    finally:
        process.kill()
        process.join()


def received_results(process, receiver, limit):
    """Yield each result that a process sends. When no more results come, yield {"failed": the reason}."""
    try:
        while receiver.poll(limit):
            yield receiver.recv()
        yield {"failed": f"takes longer than {limit} s"}
    except EOFError:
        process.join()
        yield {"failed": f"the process ended with exit code {process.exitcode}"}


def run_cases(args, device):
    """Measure the cases that the flags select, print each result when it is known, and return all."""
    cases = []
    for loss in args.loss or DEFAULT_SIZES:
        sizes = args.sizes or [parse_size(size) for size in DEFAULT_SIZES[loss].split()]
        if device == "cpu" and not args.sizes:
            sizes = [size for size in sizes if size[0] * size[1] <= 2 ** 28]
        cases += [dict(loss=loss, size=size, set=inputs, dtype=args.dtype)
                  for size in sizes for inputs in args.set]
    cases.sort(key=lambda case: math.prod(case["size"]))
    result = {**describe_environment(device), "rows": []}
    print(*(f"{name} {value}" for name, value in result.items() if name != "rows"), sep="   ")
    print(f"{'loss':21}{'N x M x D':22}{'set':8}{'impl':14}" + "".join(f"{x:>11}" for x, _, _ in COLUMNS))

    def report(row):
        result["rows"].append(row)
        if args.json:
            save_result(result, args.json)
        case = f"{row['loss']:21}{'x'.join(map(str, row['size'])):22}{row['set']:8}{row['impl']:14}"
        numbers = "".join(f"{format(row.get(key, math.nan), style):>11}" for _, key, style in COLUMNS)
        print(case + row.get("failed", numbers), flush=True)

    impls = ["eager", "blockwise"]
    if device == "cuda":
        installed = [impl for impl, package in PEERS.items() if package in result]
        impls = ["eager", "compile", "triton", *installed]
    for impl in args.impl or impls:
        run_impl(impl, cases, device, args.repeat, args.limit, report)
    return result


# ── report ──────────────────────────────────────────────────────────────────────────────────────────────────


def describe_environment(device):
    """Return a dict with the device, the versions of packages, the date and the command of this run."""
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    if os.environ.get("TRITON_INTERPRET") == "1":
        name += ", Triton's interpreter (its times are meaningless)"
    versions = {"python": platform.python_version(), "kernels": kernels.VERSION}
    for package in ("triton", *PEERS.values()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = " ".join(["python -m kernels.benchmark", *sys.argv[1:]])
    return dict(device=name, **versions, date=time.strftime("%Y-%m-%d"), command=command)


def rename(rows):
    """Rename "compile" to "compiled" and the first of OURS with results to "ours"; drop the rest of OURS."""
    ours = next((impl for impl in OURS if any(row["impl"] == impl and "ms" in row for row in rows)), None)
    names = {"eager": "eager", "compile": "compiled", ours: "ours"} | dict(zip(PEERS, PEERS))
    return [row | {"impl": names[row["impl"]]} for row in rows if row["impl"] in names]


def cell(row):
    """Return the text of a table cell for one result: time and memory, or why there is no result."""
    if not row or "failed" in row:
        return row.get("failed", "")
    return in_ms(row["ms"]) + (f", {in_mb(row['extra_mb'])}" if "extra_mb" in row else "")


def markdown(result):
    """Return a markdown table of the largest case of each loss. It shows only the fastest other package."""
    cases = {}  # {case: {implementation: row}}
    for row in largest_cases(result["rows"]):
        case = row["loss"], " × ".join(f"{x:,}" for x in row["size"]), row["set"]
        cases.setdefault(case, {})[row["impl"]] = row
    lines = []
    for case, rows in cases.items():
        texts = [*case, *(cell(rows.get(name, {})) for name in ("eager", "compiled", "ours"))]
        others = [row for name, row in rows.items() if name in PEERS and "ms" in row]
        best = min(others, key=lambda row: row["ms"], default={})
        texts.append(f"{best.get('impl', '')} {cell(best)}".strip())
        errors = (rows.get(name, {}).get("error") for name in ("eager", "ours"))
        lines.append([*texts, *("" if error is None else f"{error:.0e}" for error in errors)])
    titles = ["loss", "N × M × D", "inputs", "eager", "compiled", "ours", "best other package",
              "error of eager", "error of ours"]
    kept = [i for i in range(len(titles)) if any(line[i] not in ("", "random") for line in lines)]
    table = [titles, ["---"] * len(titles), *lines]
    return "\n".join([caption(result), "", *("| " + " | ".join(x[i] for i in kept) + " |" for x in table)])


# ── command line ────────────────────────────────────────────────────────────────────────────────────────────


def parse_size(text):
    """Return [4096, 4096, 128] for "4096x4096x128"."""
    n, m, d = map(int, text.split("x"))
    return [n, m, d]


def load_result(args):
    """Return results that an earlier run saved by --json, but only those that the flags select."""
    try:
        with open(args.source) as file:
            result = json.load(file)
        rows = [row for row in result["rows"] if row["set"] in args.set
                and (not args.loss or row["loss"] in args.loss)
                and (not args.impl or row["impl"] in args.impl)
                and (not args.sizes or row["size"] in args.sizes)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"--from {args.source}: {error}; expected a file that --json wrote")
    if not rows:
        sys.exit(f"--from {args.source}: the flags select no result")
    return {**result, "rows": rows}


def save_result(result, path):
    """Save results as JSON. If the process is killed during this, the file keeps its old content."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(result, indent=1))
    part.replace(path)


def make_parser(device):
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kernels.benchmark", description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("--loss", nargs="+", choices=DEFAULT_SIZES, metavar="LOSS", help=", ".join(DEFAULT_SIZES))
    add("--sizes", nargs="+", type=parse_size, metavar="NxMxD", help="for example 4096x4096x128")
    add("--set", nargs="+", choices=("random", "trained"), default=["random"],
        help="inputs: random unit vectors, or positive pairs as similar as after training; default random")
    add("--dtype", choices=("float64", "float32", "float16", "bfloat16"),
        default="bfloat16" if device == "cuda" else "float32", help="default on this device: %(default)s")
    add("--impl", nargs="+", choices=IMPLS, metavar="IMPL",
        help="of this package: eager (plain PyTorch), compile (eager with torch.compile), triton, blockwise, "
             f"auto (what its losses choose by default); of other packages: {', '.join(PEERS)} (torch is "
             "PyTorch's linear_cross_entropy); default on a GPU: eager, compile, triton and all installed "
             "packages; on a CPU: eager and blockwise")
    add("--repeat", type=int, default=20, help="timed runs, or fewer if they take more than 10 s; default 20")
    add("--limit", type=int, default=600, metavar="SECONDS", help="time limit for one case; default 600")
    add("--json", metavar="FILE", help="save the results to this file, after each case")
    add("--from", dest="source", metavar="FILE",
        help="show results that --json saved; only --loss, --sizes, --set and --impl select some of them")
    add("--markdown", action="store_true", help="print a markdown table of the largest size of each loss")
    add("--plot", metavar="FILE", help="plot the first --set: time and memory against N; needs matplotlib")
    return parser


def main(argv=None):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = make_parser(device).parse_args(argv)
    for path in filter(None, (args.json, args.plot)):  # fail before the measuring, which may take hours
        if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            sys.exit(f"{path}: its folder does not exist or is not writable")
    result = load_result(args) if args.source else run_cases(args, device)
    result["rows"] = rename(result["rows"])
    if args.markdown or args.source and not args.plot:
        print(markdown(result))
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: run_impl kills its new process
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
