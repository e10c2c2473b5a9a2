"""Measure time, memory and error of the losses, in this package and in other packages that are installed.

    python -m kernels.benchmark                                    default losses and sizes for this device
    python -m kernels.benchmark --loss clip_loss --sizes 16384x16384x768 --impl eager blockwise
    python -m kernels.benchmark --json h200.json                   also save the results
    python -m kernels.benchmark --from h200.json --markdown --plot h200.png      show saved results

Each row of the output names the loss, the size N x M x D (q is (N, D), k is (M, D)), the set of inputs and
the implementation. The other columns are:

    forward ms      median time of a forward pass, over --repeat runs
    ms, 20 %, 80 %  median time of a forward and backward pass, and its 20th and 80th percentile
    extra MB        peak memory of a forward and backward pass: gradients included, inputs not
    error           |g - g64| / |g64| (Euclidean norms), where g is the gradient in q, and g64 is computed in
                    float64
    peak %          100 · ideal time / ms. The ideal time is the FLOP of the matrix products that the loss
                    needs at least (MIN_FLOP in cases.py), divided by the FLOP/s of a large matrix product

Inputs are unit vectors: random ones (--set random), or pairs as similar as after training, with a mean loss
of about 5e-3 (--set trained). On a GPU, the L2 cache is flushed before each timed run. Memory on a CPU is
read from /proc (Linux only).

If a case does not fit in memory or cannot run, the reason is printed in place of the numbers. Some
packages have a slightly different loss: it is timed, but has no error. "interpreted" marks results of
Triton's interpreter, whose times are meaningless.

Each result is measured in a process of its own, for at most --limit seconds, so a crash or a hang costs one
result.
"""
import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time

import torch

import kernels
from kernels.benchmark.cases import (
    IMPLS,
    MIN_FLOP,
    PEERS,
    is_interpreted,
    is_related_loss,
    loss_function,
    make_inputs,
    our_loss,
)
from kernels.benchmark.report import COLUMNS, cells, markdown, plot
from kernels.printing import escape_unencodable, fail, one_line

DEFAULT_SIZES = {
    "cuda": {"nt_xent": ["256x256x128", "1024x1024x128", "4096x4096x128", "32768x32768x128",
                         "32768x32768x768", "65536x65536x768", "1048576x1048576x768"],
             "clip_loss": ["1024x1024x768", "65536x65536x768"],
             "info_nce": ["64x64x768", "1024x1024x768", "65536x65536x768"],
             "queue_loss": ["256x65536x128", "4096x65536x128"],
             "linear_cross_entropy": ["8192x128256x4096"],
             "sigmoid_loss": ["65536x65536x768"], "sup_con_loss": ["65536x65536x768"]},
    "cpu": {"nt_xent": ["256x256x128", "4096x4096x128"], "clip_loss": ["4096x4096x768"],
            "info_nce": ["256x256x128", "4096x4096x768", "16384x16384x768"], "queue_loss": ["256x65536x128"],
            "sigmoid_loss": ["16384x16384x768"], "sup_con_loss": ["16384x16384x768"]}}


def measure(loss, size, dtype, impl, device, repeat, trained, peak, folder):
    """Return the result of one implementation: {"ms": ..., "extra_mb": ..., ...}, or {"failed": reason}.

    peak      FLOP/s of a large matrix product on this device
    folder    shared by the implementations of a case, for the exact gradient
    """
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

    # A small warm-up, so that memory which PyTorch allocates only once does not count
    if device == "cuda":  # cuBLAS's workspaces for forward and backward
        few = q[:256].detach().requires_grad_()
        (few @ few.T).sum().backward()
    elif loss != "queue_loss":  # modules that are imported at the first use
        few_q, few_k, few_targets = (x[:256] for x in make_inputs(loss, size, dtype, device, trained))
        f(few_q, few_k, few_targets % len(few_k)).backward()
    before = peak_memory_bytes(device, reset=True)
    forward_backward()
    synchronize(device)
    row = dict(extra_mb=(peak_memory_bytes(device) - before) / 2 ** 20, interpreted=is_interpreted(impl))
    row["forward_ms"], _, _ = time_ms(forward, device, repeat)
    row["ms"], row["ms_20"], row["ms_80"] = time_ms(forward_backward, device, repeat)
    n, m, d = size
    if peak:
        row["peak_percent"] = 100 * MIN_FLOP[loss] * n * m * d / (row["ms"] / 1e3) / peak
    if not is_related_loss(loss, impl) and n * m * d <= 2 ** (42 if device == "cuda" else 38):
        forward_backward()
        grad = q.grad.double()
        q.grad = k.grad = None
        exact = exact_gradient(loss, q, k, targets, f"{folder}/exact.pt")
        row["error"] = ((grad - exact).norm() / exact.norm()).item()
    return row


def exact_gradient(loss, q, k, targets, path):
    """Return the gradient in q, computed in float64. The first process of a case that needs it saves it to
    the path for the others."""
    if not os.path.exists(path):
        exact_q, exact_k = (x.detach().double().requires_grad_(x.requires_grad) for x in (q, k))
        our_loss(loss, "blockwise")(exact_q, exact_k, targets).backward()
        torch.save(exact_q.grad, f"{path}.part")
        os.replace(f"{path}.part", path)
    return torch.load(path, map_location=q.device)


def time_ms(step, device, repeat):
    """Return median, 20th and 80th percentile of the time of step(), in milliseconds, over up to `repeat`
    runs. After ten seconds and at least three runs no further run starts. A first run is not timed."""
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


def synchronize(device):
    """Wait until a GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_flops(dtype, device):
    """Return the FLOP/s of a large matrix product on this device."""
    side = 8192 if device == "cuda" else 2048
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side ** 3 / (time_ms(lambda: a @ b, device, 10)[1] / 1e3)


def peak_memory_bytes(device, reset=False):
    """Return the peak memory since the last reset in bytes; on a CPU, that of the process (resident set).
    With reset, the peak is first set to the memory in use now."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024


def print_result(case):
    """Measure one implementation in this process and print the result as a line of JSON, also if it fails."""
    dtype = getattr(torch, case.pop("dtype"))
    try:
        row = measure(dtype=dtype, **case)
    except ImportError as error:
        row = {"failed": f"not installed ({error.name})"}
    except Exception as error:
        row = {"failed": short_error(str(error)) or type(error).__name__}
    print("\n" + json.dumps({"impl": case["impl"], **row}), flush=True)


def short_error(message):
    """Return the most informative line of an error message, the same for all out-of-memory errors."""
    if "out of memory" in message.lower() or "can't allocate" in message.lower():
        return "does not fit in memory"
    lines = [line.strip() for line in message.strip().splitlines()]
    return next((line for line in lines if "CUDA error" in line), "".join(lines[-1:]))[:80]


def run_case(case, limit):
    """Return the result of one implementation, measured in a new process for at most `limit` seconds. That
    process and all processes that it started are killed at the end, also after an exception."""
    command = [sys.executable, "-m", "kernels.benchmark", "--child", json.dumps(case)]
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        output = file.read()
    results = [line for line in output.splitlines() if line.startswith('{"impl": ')]  # packages print too
    if results:
        return json.loads(results[-1])
    if code is None:
        failed = f"exceeds the time limit of {limit} s"
    elif code == -signal.SIGKILL:
        failed = "does not fit in memory"
    else:
        ended = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        failed = f"{ended}: {short_error(output)}".rstrip(": ")
    return {"impl": case["impl"], "failed": failed}


def describe_environment(device):
    """Return {"device": ..., "torch": ..., ...}: device, versions, date and command of this run."""
    versions = {"torch": torch.__version__, "triton": None, "kernels": kernels.VERSION,
                "python": platform.python_version()}
    for package in ("triton", *PEERS.values()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    command = " ".join(["python -m kernels.benchmark", *sys.argv[1:]])
    return dict(device=name, **versions, date=time.strftime("%Y-%m-%d"), command=command)


def parse_size(text):
    """Return [4096, 4096, 128] for "4096x4096x128"."""
    if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*){2}", text):
        raise argparse.ArgumentTypeError(f"{text}: expected N x M x D, for example 4096x4096x128")
    return [int(x) for x in text.split("x")]


def positive_integer(text):
    """Parse the value of a flag."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of at least 1")
    return int(text)


def load_result(path):
    """Return the results that an earlier run saved by --json."""
    try:
        with open(path) as file:
            result = json.load(file)
        result["rows"][0]["loss"], result["device"]
        return result
    except OSError as error:
        fail(f"--from {path}: {error.strerror}")
    except (ValueError, LookupError, TypeError):
        fail(f"--from {path}: not a file of results; expected one that --json wrote")


def save_result(result, path):
    """Save results as JSON. The file is replaced atomically, so it is complete even if the run is killed."""
    try:
        with open(f"{path}.part", "w") as file:
            json.dump(result, file, indent=1)
        os.replace(f"{path}.part", path)
    except OSError as error:
        fail(f"--json {path}: {error.strerror}")


def make_parser(on_gpu):
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kernels.benchmark", description=__doc__, formatter_class=style)
    parser.error = fail                                        # one line, without the usage text
    add = parser.add_argument
    add("--loss", nargs="+", choices=MIN_FLOP, metavar="LOSS",
        help=f"losses to measure: {', '.join(MIN_FLOP)}; default: those that suit the device")
    add("--sizes", nargs="+", type=parse_size, metavar="NxMxD",
        help="sizes N x M x D, for example 4096x4096x128; default: those that suit the device and the loss")
    add("--set", nargs="+", choices=("random", "trained"), default=["random"],
        help="inputs: random unit vectors, or pairs as similar as after training; default random")
    dtype = "bfloat16" if on_gpu else "float32"
    add("--dtype", choices=("float64", "float32", "float16", "bfloat16"), default=dtype,
        help=f"dtype of the inputs; default {dtype} on this device")
    impls = [x for x in IMPLS if x not in ("blockwise", "auto")] if on_gpu else ["eager", "blockwise"]
    add("--impl", nargs="+", choices=IMPLS, metavar="IMPL", default=impls,
        help="implementations to measure. Of this package: eager (plain PyTorch), compile (eager with "
             "torch.compile), blockwise, triton, auto (whichever of these two the losses choose by default). "
             "Of others: torch (PyTorch's linear_cross_entropy), "
             f"{', '.join(PEERS)}; default {' '.join(impls)} on this device")
    repeat, limit = (20, 600) if on_gpu else (5, 3600)
    add("--repeat", type=positive_integer, default=repeat, metavar="RUNS",
        help=f"number of timed runs; default {repeat} on this device")
    add("--limit", type=positive_integer, default=limit, metavar="SECONDS",
        help=f"stop the measurement of a result after this many seconds; default {limit} on this device")
    add("--json", metavar="FILE", help="save the results to this file, after each result")
    add("--from", dest="source", metavar="FILE", help="measure nothing; read results that --json saved")
    add("--markdown", action="store_true", help="print the results as a markdown table at the end")
    add("--plot", metavar="FILE", help="plot time and memory against N to this file; needs matplotlib")
    add("--child", type=json.loads, help=argparse.SUPPRESS)    # for the process of one result
    return parser


def main(argv=None):
    escape_unencodable()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = make_parser(device == "cuda").parse_args(argv)
    if args.child:
        return print_result(args.child)
    for path in filter(None, (args.json, args.plot)):  # fail now, not after hours of work
        if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            fail(f"{path}: its folder does not exist or is not writable")
    result = load_result(args.source) if args.source else run_cases(args, device)
    if args.markdown:
        print(markdown(result))
    if args.plot:
        plot(result, args.plot)


def run_cases(args, device):
    """Measure the cases that the arguments select, print each result when it is done, and return them all."""
    from tqdm import tqdm
    sizes_of = {loss: [parse_size(size) for size in sizes] for loss, sizes in DEFAULT_SIZES[device].items()}
    grid = {loss: args.sizes or sizes_of.get(loss, []) for loss in args.loss or sizes_of}
    cases = [(loss, size, inputs) for loss, sizes in grid.items() for size in sizes for inputs in args.set]
    result = {**describe_environment(device), "rows": []}
    print(*(one_line(f"{name} {value}") for name, value in result.items() if name != "rows"), sep="   ")
    if any(map(is_interpreted, args.impl)):
        print("TRITON_INTERPRET=1: times of Triton kernels are those of its interpreter, and meaningless")
    elif device == "cpu":
        print("no GPU: Triton kernels and other packages are not measured by default")
    titles = "".join(f"{title:>11}" for title, _, _ in COLUMNS)
    print(f"{'loss':21}{'N x M x D':22}{'set':8}{'impl':14}{titles}")
    peak = matmul_flops(getattr(torch, args.dtype), device)
    with tqdm(total=len(cases) * len(args.impl), disable=None, unit="result") as bar:
        for loss, size, inputs in cases:
            case = dict(loss=loss, size=size, dtype=args.dtype, device=device, repeat=args.repeat,
                        trained=inputs == "trained", peak=peak)
            with tempfile.TemporaryDirectory() as folder:
                for impl in args.impl:
                    row = run_case({**case, "impl": impl, "folder": folder}, args.limit)
                    row = {**dict(loss=loss, size=size, set=inputs, dtype=args.dtype), **row}
                    result["rows"].append(row)
                    _, size_text, _, _, *numbers = cells(row)
                    numbers = "".join(f"{x:>11}" for x in numbers)
                    bar.write(one_line(f"{loss:21}{size_text:22}{inputs:8}{impl:14}{numbers}"))
                    bar.update()
                    if args.json:
                        save_result(result, args.json)
    return result
