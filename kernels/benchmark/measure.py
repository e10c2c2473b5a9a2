"""Time, memory and error of every implementation that can be imported, in one run.

    python -m kernels.benchmark                                       the grid that suits the device at hand
    python -m kernels.benchmark --loss clip_loss --sizes 16384x16384x768 --impl eager blockwise
    python -m kernels.benchmark --json h200.json                      the rows as data, versions and command
    python -m kernels.benchmark --from h200.json --markdown --plot h200.png          a table and a picture

A row is a loss, a size N x M x D and an implementation. Rows of q and k are unit vectors, random or, with
--set trained, pairs so close that the mean loss is about 5e-3. ms are medians over --repeat runs with the
20th and 80th percentile, on a GPU with its second-level cache flushed before each, and no speed where a row
says that Triton's interpreter computed it; extra MB is the peak above
inputs, gradients included; error is that of the gradient of q against float64, relative, both as Euclidean
norms; peak % is what the fewest known multiplications (PRODUCTS) take at the speed of a plain matrix product
of the same run, in percent of the time. A case that does not fit says so, and so does an implementation of a
related loss, which is a marker and has no error.
Every row has a process of its own and --limit seconds: what fails, dies or hangs costs one row. On the CPU
that process's memory is read from /proc (Linux).
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
from kernels.benchmark.cases import IMPLS, PEERS, PRODUCTS, function, is_interpreted, is_marker, ours, rows
from kernels.benchmark.report import COLUMNS, cells, markdown, plot
from kernels.printing import fail, one_line, print_all

GRID = {
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
    """One row: milliseconds forward and forward + backward, extra MB and error; or why there is none."""
    f = function(loss, impl)
    if f is None:
        return {"failed": "has no such loss"}
    q, k, targets = rows(loss, size, dtype, device, trained)

    def both():
        q.grad = k.grad = None
        f(q, k, targets).backward()

    def forward():
        with torch.no_grad():
            f(q, k, targets)

    if device == "cuda":  # what PyTorch sets up once is nobody's memory: cuBLAS's buffers for both directions
        few = q[:256].detach().requires_grad_()
        (few @ few.T).sum().backward()
    elif loss != "queue_loss":  # nor what it imports
        few_q, few_k, few_targets = (x[:256] for x in rows(loss, size, dtype, device, trained))
        f(few_q, few_k, few_targets % len(few_k)).backward()
    before = memory(device, reset=True)
    both()
    synchronize(device)
    row = dict(extra_mb=(memory(device) - before) / 2 ** 20, interpreted=is_interpreted(impl))
    row["forward_ms"], _, _ = seconds(forward, device, repeat)
    row["ms"], row["ms_20"], row["ms_80"] = seconds(both, device, repeat)
    n, m, d = size
    if peak:
        row["peak_percent"] = 100 * PRODUCTS[loss] * n * m * d / (row["ms"] / 1e3) / peak
    if not is_marker(loss, impl) and n * m * d <= 2 ** (42 if device == "cuda" else 38):
        both()
        grad = q.grad.double()
        q.grad = k.grad = None
        exact = exact_gradient(loss, q, k, targets, f"{folder}/exact.pt")
        row["error"] = ((grad - exact).norm() / exact.norm()).item()
    return row


def exact_gradient(loss, q, k, targets, path):
    """The gradient of q in float64, which the first process of a case to need it leaves to the others."""
    if not os.path.exists(path):
        exact_q, exact_k = (x.detach().double().requires_grad_(x.requires_grad) for x in (q, k))
        ours(loss, "blockwise")(exact_q, exact_k, targets).backward()
        torch.save(exact_q.grad, f"{path}.part")
        os.replace(f"{path}.part", path)
    return torch.load(path, map_location=q.device)


def seconds(step, device, repeat):
    """(median, 20th and 80th percentile) of milliseconds a step; slow ones get ten seconds or three times."""
    step()
    taken = []
    flush = torch.empty(2 ** 28, dtype=torch.uint8, device=device) if device == "cuda" else None
    while len(taken) < repeat and (len(taken) < 3 or sum(taken) < 10_000):
        if device == "cuda":
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            stop.synchronize()
            taken.append(start.elapsed_time(stop))
        else:
            start = time.perf_counter()
            step()
            taken.append(1e3 * (time.perf_counter() - start))
    return [torch.tensor(taken).quantile(x).item() for x in (0.5, 0.2, 0.8)]


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def matrix_peak(dtype, device):
    """Multiplications and additions a second of the best plain matrix product."""
    side = 8192 if device == "cuda" else 2048
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side ** 3 / (seconds(lambda: a @ b, device, 10)[1] / 1e3)


def memory(device, reset=False):
    """Bytes at the highest point since the last reset; with reset, bytes now; CPU: the resident set."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024


def child(case):
    """Print the row of an implementation as a line of JSON; one that raises has the reason there."""
    dtype = getattr(torch, case.pop("dtype"))
    try:
        row = measure(dtype=dtype, **case)
    except ImportError as error:
        row = {"failed": f"not installed ({error.name})"}
    except Exception as error:
        row = {"failed": reason(str(error)) or type(error).__name__}
    print("\n" + json.dumps({"impl": case["impl"], **row}), flush=True)


def reason(message):
    """The line of a message that says most, in the words of the table where memory ran out."""
    if "out of memory" in message.lower() or "can't allocate" in message.lower():
        return "does not fit in memory"
    lines = [line.strip() for line in message.strip().splitlines()]
    return next((line for line in lines if "CUDA error" in line), "".join(lines[-1:]))[:80]


def run(case, limit):
    """The row of a process of its own, which is gone, with all that it started, however this ends."""
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
        said = file.read()
    rows = [line for line in said.splitlines() if line.startswith('{"impl": ')]  # peers talk too
    if rows:
        return json.loads(rows[-1])
    if code is None:
        failed = f"time limit of {limit} s"
    elif code == -signal.SIGKILL:
        failed = "does not fit in memory"
    else:
        ended = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        failed = f"{ended}: {reason(said)}".rstrip(": ")
    return {"impl": case["impl"], "failed": failed}


def about(device):
    """What the rows were made with."""
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


def shape(text):
    """"4096x4096x128" as [4096, 4096, 128]."""
    if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*){2}", text):
        raise argparse.ArgumentTypeError(f"{text}: wanted N x M x D, as 4096x4096x128")
    return [int(x) for x in text.split("x")]


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted a number of at least 1")
    return int(text)


def load_result(path):
    """What an earlier run wrote."""
    try:
        with open(path) as file:
            result = json.load(file)
        result["rows"][0]["loss"], result["device"]
        return result
    except OSError as error:
        fail(f"--from {path}: {error.strerror}")
    except (ValueError, LookupError, TypeError):
        fail(f"--from {path}: wanted a file that --json wrote")


def write(result, path):
    """The file is whole at any time, whatever happens to the run."""
    try:
        with open(f"{path}.part", "w") as file:
            json.dump(result, file, indent=1)
        os.replace(f"{path}.part", path)
    except OSError as error:
        fail(f"--json {path}: {error.strerror}")


def main(argv=None):
    print_all()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kernels.benchmark", description=__doc__, formatter_class=style)
    parser.error = fail                                        # in one line, without the usage
    add = parser.add_argument
    add("--loss", nargs="+", choices=PRODUCTS, help="losses to run (default: the grid's)")
    add("--sizes", nargs="+", type=shape, help="N x M x D, as 4096x4096x128 (default: the grid's)")
    add("--set", nargs="+", choices=("random", "trained"), default=["random"],
        help="rows: unrelated, or pairs after training")
    add("--dtype", choices=("float64", "float32", "float16", "bfloat16"), help="of the rows",
        default="bfloat16" if on_gpu else "float32")
    add("--impl", nargs="+", choices=IMPLS, help="what to run (default: all that the device has)",
        default=[x for x in IMPLS if x != "blockwise"] if on_gpu else ["eager", "blockwise"])
    add("--repeat", type=count, default=20 if on_gpu else 5, help="timed runs of each")
    add("--limit", type=count, default=600 if on_gpu else 3600, help="seconds that a row may take")
    add("--json", help="write the rows to this file, after each")
    add("--from", dest="source", help="measure nothing: take the rows from this file")
    add("--markdown", action="store_true", help="print the rows as a markdown table at the end")
    add("--plot", help="draw the rows to this file (wants matplotlib)")
    add("--child", type=json.loads, help=argparse.SUPPRESS)    # a row's own process
    args = parser.parse_args(argv)
    if args.child:
        return child(args.child)
    for path in filter(None, (args.json, args.plot)):  # before hours of work
        if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            fail(f"{path}: its folder is not there, or cannot be written")
    result = load_result(args.source) if args.source else measured(args, device)
    if args.markdown:
        print(markdown(result))
    if args.plot:
        plot(result, args.plot)


def measured(args, device):
    """Run the cases that the arguments ask for, print each row as it is done, and return them all."""
    from tqdm import tqdm
    of_device = {loss: [shape(size) for size in sizes] for loss, sizes in GRID[device].items()}
    grid = {loss: args.sizes or of_device.get(loss, []) for loss in args.loss or of_device}
    cases = [(loss, size, rows) for loss, sizes in grid.items() for size in sizes for rows in args.set]
    result = {**about(device), "rows": []}
    print(*(one_line(f"{name} {value}") for name, value in result.items() if name != "rows"), sep="   ")
    if any(map(is_interpreted, args.impl)):
        print("TRITON_INTERPRET=1: what Triton's interpreter computed is no speed")
    elif device == "cpu":
        print("no GPU: the Triton kernels and their peers are not measured here")
    titles = "".join(f"{title:>11}" for title, _, _ in COLUMNS)
    print(f"{'loss':21}{'N x M x D':22}{'rows':8}{'impl':14}{titles}")
    peak = matrix_peak(getattr(torch, args.dtype), device)
    with tqdm(total=len(cases) * len(args.impl), disable=None, unit="row") as bar:
        for loss, size, rows in cases:
            case = dict(loss=loss, size=size, dtype=args.dtype, device=device, repeat=args.repeat,
                        trained=rows == "trained", peak=peak)
            with tempfile.TemporaryDirectory() as folder:
                for impl in args.impl:
                    row = run({**case, "impl": impl, "folder": folder}, args.limit)
                    result["rows"].append({**dict(loss=loss, size=size, set=rows, dtype=args.dtype), **row})
                    _, shaped, kind, _, *numbers = cells(result["rows"][-1])
                    numbers = "".join(f"{x:>11}" for x in numbers)
                    bar.write(one_line(f"{loss:21}{shaped:22}{kind:8}{impl:14}{numbers}"))
                    bar.update()
                    if args.json:
                        write(result, args.json)
    return result
