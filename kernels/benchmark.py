"""Time, memory and error of every implementation that can be imported, in one run.

    python -m kernels.benchmark                                    the grid that suits the device at hand
    python -m kernels.benchmark --loss clip_loss --sizes 16384x16384x768 --impl eager blockwise
    python -m kernels.benchmark --json kernels/results/h200.json   the rows as data, with device, versions, date and command
    python -m kernels.benchmark --from kernels/results/h200.json --markdown --plot h200.png        a table and a picture of them

A row is a loss, a size N x M x D and an implementation. Rows of q and k are unit vectors, random or, with --set trained,
pairs so close that the mean loss is about 5e-3. ms are medians over --repeat runs with the 20th and 80th percentile, on a
GPU with its second-level cache flushed before each; extra MB is the peak above inputs, gradients included; error is that
of the gradient of q against float64, relative, both as Euclidean norms; peak % is what the fewest known multiplications
(PRODUCTS) take at the speed of a plain matrix product of the same run, in percent of the time. A case that does not fit
says so, and so does an implementation of a related loss, which is a marker and has no error.
Implementations share a process on a GPU; on the CPU each has its own, as its memory is read from /proc (Linux).
"""
import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import kernels
from kernels.pictures import fail, new_figure, save

TAU = 0.05
# multiplications of the fewest products known, in N·M·D (one product of all pairs is 2); nt_xent's two views are one set
PRODUCTS = {"nt_xent": 4, "clip_loss": 6, "info_nce": 6, "queue_loss": 4, "linear_cross_entropy": 6}
GRID = {
    "cuda": {"nt_xent": ["256x256x128", "1024x1024x128", "4096x4096x128", "32768x32768x128", "32768x32768x768", "65536x65536x768",
                         "1048576x1048576x768"],
             "clip_loss": ["1024x1024x768", "65536x65536x768"],
             "info_nce": ["64x64x768", "1024x1024x768", "65536x65536x768"],
             "queue_loss": ["256x65536x128", "4096x65536x128"],
             "linear_cross_entropy": ["8192x128256x4096"]},
    "cpu": {"nt_xent": ["256x256x128", "4096x4096x128"], "clip_loss": ["4096x4096x768"],
            "info_nce": ["256x256x128", "4096x4096x768", "16384x16384x768"], "queue_loss": ["256x65536x128"]}}
PEERS = {"memeff": "memeff", "Inf-CL": "inf-cl", "CCE": "cut-cross-entropy", "Liger": "liger-kernel", "siglip-kernel": "siglip-kernel"}
IMPLS = ["eager", "compile", "blockwise", "triton", "torch", *PEERS]


def ours(loss, impl):
    """loss(q, k, targets) by this package."""
    f = getattr(kernels, loss)
    if loss == "linear_cross_entropy":
        return lambda q, k, targets: f(q, k, targets, impl=impl)
    if loss == "queue_loss":                                       # the positives are the rows after the queue
        return lambda q, k, targets: f(q, k[-len(q):], k[:-len(q)], TAU, impl=impl)
    if loss == "nt_xent":
        return lambda q, k, targets: f(q[:len(q) // 2], k[:len(q) // 2], TAU, impl=impl)
    return lambda q, k, targets: f(q, k, TAU, impl=impl)


def peer(loss, impl):
    """loss(q, k, targets) by another package, as its documentation calls it; None where it has no such loss."""
    tau, both = 1.0 if loss == "linear_cross_entropy" else TAU, loss == "clip_loss"
    one_sided = None
    if impl == "torch" and hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        one_sided = lambda q, k, targets: F.linear_cross_entropy(q / tau, k, targets, options=options)
    elif impl == "CCE":
        from cut_cross_entropy import linear_cross_entropy
        one_sided = lambda q, k, targets: linear_cross_entropy(q / tau, k, targets, filter_eps=None)
    elif impl == "Inf-CL":
        from inf_cl import cal_flash_loss
        one_sided = lambda q, k, targets: cal_flash_loss(q, k, targets, 1 / tau, head_dim=min(256, q.shape[1])).mean()
    elif impl == "Liger" and loss == "linear_cross_entropy":
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction
        def one_sided(q, k, targets):
            out = LigerFusedLinearScaledCrossEntropyFunction.apply(q, k, targets)
            return (out[0] if isinstance(out, tuple) else out).mean()
    elif impl == "Liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        one_sided = lambda q, k, targets: LigerFusedLinearCrossEntropyLoss()(k, q / tau, targets)
    elif impl == "memeff" and loss in ("clip_loss", "nt_xent"):
        from memeff import MemoryEfficientCLIPLoss
        f = MemoryEfficientCLIPLoss(temperature=TAU, normalized_inputs=True, stable=False)
        return lambda q, k, targets: f(q, k) if both else f(z := views(q, k), z.roll(len(z) // 2, 0))
    elif impl == "siglip-kernel" and both:
        from siglip_kernel import fused_siglip_loss
        scale, bias = torch.tensor(math.log(1 / TAU), device="cuda"), torch.tensor(-10.0, device="cuda")
        return lambda q, k, targets: fused_siglip_loss(q, k, scale, bias)
    if one_sided is None or loss == "queue_loss":
        return None
    if both:
        return lambda q, k, targets: (one_sided(q, k, targets) + one_sided(k, q, targets)) / 2
    if loss == "nt_xent":
        return lambda q, k, targets: one_sided(z := views(q, k), z, targets.roll(len(z) // 2))
    return one_sided


def views(q, k):
    """The one set of nt_xent: N points are two views of N / 2 things."""
    return torch.cat([q[:len(q) // 2], k[:len(q) // 2]])


def is_marker(loss, impl):
    """Whether impl computes another loss from as many products: over one set nobody else leaves a row itself out."""
    return impl == "siglip-kernel" or loss == "nt_xent" and impl in ("torch", *PEERS)


def rows(loss, size, dtype, device, trained):
    """(q, k, targets) of a case: q and k require a gradient, a queue's rows do not."""
    n, m, d = size
    draw = lambda count, seed: F.normalize(torch.randn(count, d, device=device, generator=torch.Generator(device).manual_seed(seed)), dim=1)
    q, extra = draw(n, 0), n if loss == "queue_loss" else 0
    k = draw(m + extra, 1)
    if trained:                                                    # cosine at which log Σ over random rows − positive is log 5e-3
        cosine = TAU * (math.log(m) + 1 / (2 * d * TAU ** 2) - math.log(5e-3))
        noise = k[-n:] - (k[-n:] * q).sum(1, keepdim=True) * q
        k[-n:] = cosine * q + (1 - cosine ** 2) ** 0.5 * F.normalize(noise, dim=1)
    targets = torch.randint(m, (n,), device=device, generator=torch.Generator(device).manual_seed(2))
    if loss != "linear_cross_entropy":
        targets = torch.arange(n, device=device)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(loss != "queue_loss"), targets


def function(loss, impl):
    """loss(q, k, targets) by impl, None where it has none."""
    if impl == "compile":
        return torch.compile(ours(loss, "eager"), dynamic=False)
    return ours(loss, impl) if impl in ("eager", "blockwise", "triton") else peer(loss, impl)


def measure(loss, size, dtype, impl, device, repeat, trained, peak):
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

    warm = [x[:256] for x in rows(loss, size, dtype, device, trained)] if device == "cpu" else (q, k, targets)
    if device == "cpu" and loss != "queue_loss":                   # what PyTorch imports and sets up once is nobody's memory
        f(warm[0], warm[1], warm[2] % len(warm[1])).backward()
    before = memory(device, reset=True)
    both()
    synchronize(device)
    row = dict(extra_mb=(memory(device) - before) / 2 ** 20)
    row["forward_ms"], _, _ = seconds(forward, device, repeat)
    row["ms"], row["ms_20"], row["ms_80"] = seconds(both, device, repeat)
    n, m, d = size
    if peak:
        row["peak_percent"] = 100 * PRODUCTS[loss] * n * m * d / (row["ms"] / 1e3) / peak
    if not is_marker(loss, impl) and n * m * d <= 2 ** (42 if device == "cuda" else 38):
        both()
        grad, exact_q, exact_k = q.grad.double(), q.detach().double().requires_grad_(), k.detach().double().requires_grad_(k.requires_grad)
        q.grad = k.grad = None
        ours(loss, "blockwise")(exact_q, exact_k, targets).backward()
        row["error"] = ((grad - exact_q.grad).norm() / exact_q.grad.norm()).item()
    return row


def seconds(step, device, repeat):
    """(median, 20th and 80th percentile) of milliseconds a step; slow ones are repeated for ten seconds, three times at least."""
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
    """Bytes at the highest point since the last reset; with reset, bytes now. On the CPU the process's resident set."""
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
    """Measure the implementations of a case, a line of JSON each; one that raises is the reason in its row."""
    dtype = getattr(torch, case.pop("dtype"))
    for impl in case.pop("impls"):
        try:
            with contextlib.redirect_stdout(sys.stderr):           # peers talk
                row = measure(impl=impl, dtype=dtype, **case)
        except ImportError as error:
            row = {"failed": f"not installed ({error.name})"}
        except Exception as error:
            row = {"failed": reason(str(error))}
        if case["device"] == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps({"impl": impl, **row}), flush=True)


def reason(message):
    """The last line of a failure, in the words of the table where memory ran out."""
    if "out of memory" in message.lower() or "can't allocate" in message.lower():
        return "does not fit in memory"
    return (message.strip().splitlines() or ["failed"])[-1][:80]


def run(case):
    """Yield a row for each implementation of a case. A process that dies costs the row at work, and the rest go on."""
    impls = list(case["impls"])
    while impls:
        together = impls if case["device"] == "cuda" else impls[:1]
        process = subprocess.Popen([sys.executable, "-m", "kernels.benchmark", "--child", json.dumps({**case, "impls": together})],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, errors = process.communicate()
        for line in out.splitlines():
            yield json.loads(line)
            impls.pop(0)
        if process.returncode:
            killed = process.returncode == -9
            yield {"impl": impls.pop(0), "failed": "does not fit in memory" if killed else reason(errors)}


def about(device):
    """What the rows were made with."""
    versions = {"torch": torch.__version__, "triton": None, "kernels": kernels.__version__, "python": platform.python_version()}
    for package in ("triton", *PEERS.values()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return dict(device=name, **versions, date=time.strftime("%Y-%m-%d"), command=" ".join(["python -m kernels.benchmark", *sys.argv[1:]]))


COLUMNS = (("forward ms", "forward_ms", ".3g"), ("ms", "ms", ".4g"), ("20 %", "ms_20", ".4g"), ("80 %", "ms_80", ".4g"),
           ("extra MB", "extra_mb", ".0f"), ("error", "error", ".1e"), ("peak %", "peak_percent", ".0f"))


def cells(row):
    """A row's columns as text; one that failed has its reason behind the name."""
    name = [row["loss"], "x".join(map(str, row["size"])), row["set"], row["impl"]]
    if "failed" in row:
        return name + [row["failed"]]
    return name + [format(row[key], style) if key in row else "" for _, key, style in COLUMNS]


def markdown(result):
    """A line a case and a column an implementation: ms of forward and backward, extra MB, error."""
    cases, impls = {}, list(dict.fromkeys(row["impl"] for row in result["rows"]))
    for row in result["rows"]:
        text = row.get("failed") or f"{row['ms']:,.{0 if row['ms'] >= 100 else 3}{'f' if row['ms'] >= 100 else 'g'}} ms, {row['extra_mb']:,.0f} MB" + (f", {row['error']:.0e}" if "error" in row else "")
        cases.setdefault((row["loss"], "x".join(map(str, row["size"])), row["set"]), {})[row["impl"]] = text
    table = [["loss", "N x M x D", "rows", *impls], ["---"] * (3 + len(impls))]
    table += [[*case, *(found.get(impl, "") for impl in impls)] for case, found in cases.items()]
    head = ", ".join(f"{name} {value}" for name, value in result.items() if name not in ("rows", "command"))
    return "\n".join([head, "", *("| " + " | ".join(line) + " |" for line in table)])


def plot(result, path):
    """Time above memory against N, a column for each loss and width, a line for each implementation, all logarithmic."""
    done, cases = [row for row in result["rows"] if "ms" in row], {}
    for row in done:
        n, m, d = row["size"]
        if row["set"] == done[0]["set"]:                           # one kind of rows, the first that was measured
            title = f"{row['loss']}, D {d:,}" + (f", M {m:,}" if m != n else "")
            cases.setdefault(title, {}).setdefault(row["impl"], []).append((n, row["ms"], row["extra_mb"]))
    curves = {title: lines for title, lines in cases.items() if any(len(points) > 1 for points in lines.values())}
    cases = curves or cases                                        # a single size is no curve: the table has it
    if not cases:
        fail("--plot: no row has a time")
    figure, axes = new_figure(2, len(cases), 3.4, 2.1, sharex="col")
    for column, (title, lines) in zip(axes.T, cases.items()):
        column[0].set_title(title, fontsize=10)
        draw_curves(column[0], lines, 1)
        draw_curves(column[1], lines, 2)
        column[1].set_xlabel("N")
    axes[0, 0].set_ylabel("time, ms")
    axes[1, 0].set_ylabel("extra memory, MB")
    handles = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=5, frameon=False)
    about = "forward + backward", done[0]["dtype"], result["device"], f"torch {result['torch']}", result["date"]
    figure.supxlabel(", ".join(about), fontsize=8, color="0.4")
    save(figure, path)


def draw_curves(axis, lines, column):
    """One panel of plot. At the largest N the highest and the lowest point have their number."""
    ends, largest = [], max(point[0] for points in lines.values() for point in points)
    for impl in sorted(lines, key=IMPLS.index):
        colour = f"C{IMPLS.index(impl) % 10}"
        points = sorted((point[0], max(point[column], 2 ** -8)) for point in lines[impl])      # no memory is less than a page
        thick = dict(linewidth=2.4, zorder=3) if impl in ("blockwise", "triton") else dict(linewidth=1.4)      # ours stand out
        axis.loglog(*zip(*points), "o-", markersize=4, color=colour, label=impl, **thick)
        ends += [(value, colour) for n, value in points if n == largest]
    ends.sort()
    for (value, colour), side in ((ends[-1], "bottom"), (ends[0], "top"))[: len(ends)]:
        axis.annotate(f"{value:,.{0 if value >= 100 else 1}f}", (largest, value), (5, 1 if side == "bottom" else -1),
                      textcoords="offset points", fontsize=8, color=colour, verticalalignment=side)
    sizes = sorted({point[0] for points in lines.values() for point in points})
    axis.set_xticks(sizes, [f"{n:,}" if i == 0 or n > 2 * sizes[i - 1] else "" for i, n in enumerate(sizes)])  # room for each
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.minorticks_off()
    axis.margins(0.08, 0.15)


def shape(text):
    """"4096x4096x128" as [4096, 4096, 128]."""
    if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*){2}", text):
        raise argparse.ArgumentTypeError(f"{text}: wanted N x M x D, as 4096x4096x128")
    return [int(x) for x in text.split("x")]


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted a number of at least 1")
    return int(text)


def read(path):
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
    with open(f"{path}.part", "w") as file:
        json.dump(result, file, indent=1)
    os.replace(f"{path}.part", path)


def main(argv=None):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", nargs="+", choices=PRODUCTS, help="losses to run (default: the grid's)")
    parser.add_argument("--sizes", nargs="+", type=shape, help="N x M x D, as 4096x4096x128 (default: the grid's)")
    parser.add_argument("--set", nargs="+", choices=("random", "trained"), default=["random"], help="rows: unrelated, or pairs after training")
    parser.add_argument("--dtype", default="bfloat16" if device == "cuda" else "float32", help="of the rows",
                        choices=("float64", "float32", "float16", "bfloat16"))
    parser.add_argument("--impl", nargs="+", choices=IMPLS, help="what to run (default: all that the device has)",
                        default=[x for x in IMPLS if x != "blockwise"] if device == "cuda" else ["eager", "blockwise"])
    parser.add_argument("--repeat", type=count, default=20 if device == "cuda" else 5, help="timed runs of each")
    parser.add_argument("--json", help="write the rows to this file, after each")
    parser.add_argument("--from", dest="source", help="measure nothing: take the rows from this file")
    parser.add_argument("--markdown", action="store_true", help="print the rows as a markdown table at the end")
    parser.add_argument("--plot", help="draw the rows to this file (wants matplotlib)")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)         # a case's own process
    args = parser.parse_args(argv)
    if args.child:
        return child(args.child)
    for path in filter(None, (args.json, args.plot)):              # before hours of work
        if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            fail(f"{path}: its folder is not there, or cannot be written")
    result = read(args.source) if args.source else measured(args, device)
    if args.markdown:
        print(markdown(result))
    if args.plot:
        plot(result, args.plot)


def measured(args, device):
    """Run the cases that the arguments ask for, print each row as it is done, and return them all."""
    from tqdm import tqdm
    grid = {loss: args.sizes or [shape(x) for x in GRID[device].get(loss, [])] for loss in args.loss or GRID[device]}
    cases = [(loss, size, rows) for loss, sizes in grid.items() for size in sizes for rows in args.set]
    result = {**about(device), "rows": []}
    print(*(f"{name} {value}" for name, value in result.items() if name != "rows"), sep="   ")
    if device == "cpu":
        print("no GPU: the Triton kernels and their peers are not measured here")
    print(f"{'loss':21}{'N x M x D':22}{'rows':8}{'impl':14}" + "".join(f"{title:>11}" for title, _, _ in COLUMNS))
    peak = matrix_peak(getattr(torch, args.dtype), device)
    with tqdm(total=len(cases) * len(args.impl), disable=None, unit="row") as bar:
        for loss, size, rows in cases:
            case = dict(loss=loss, size=size, dtype=args.dtype, device=device, repeat=args.repeat, trained=rows == "trained", peak=peak)
            for row in run({**case, "impls": args.impl}):
                result["rows"].append({**dict(loss=loss, size=size, set=rows, dtype=args.dtype), **row})
                name, shaped, kind, impl, *numbers = cells(result["rows"][-1])
                bar.write(f"{loss:21}{shaped:22}{kind:8}{impl:14}" + "".join(f"{x:>11}" for x in numbers))
                bar.update()
                if args.json:
                    write(result, args.json)
    return result


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:                                      # what is measured is printed, and in the file of --json
        sys.exit(130)
