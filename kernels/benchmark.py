"""Time, peak extra memory and error of every implementation, forward + backward.

    python -m kernels.benchmark                                   sizes that suit the device at hand
    python -m kernels.benchmark --loss info_nce --sizes 16384x16384x768 --dtype float32
    python -m kernels.benchmark --json results.json               the rows as data, with device and versions

Each row is a process of its own, so that the peak of one implementation is not hidden by another's. Inputs are random
unit rows. Times are medians over --repeat runs after one warm-up, with the 20th and 80th percentile; extra memory is the
peak above the inputs, gradients included; error is the largest difference of the gradient of q from float64, relative to
its largest entry. A case that does not fit says so.
On the CPU the memory is read from /proc, so it wants Linux.
"""
import argparse
import json
import platform
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import kernels

LOSSES = {
    "info_nce": lambda q, k, impl: kernels.info_nce(q, k, 0.07, impl=impl),
    "clip_loss": lambda q, k, impl: kernels.clip_loss(q, k, 0.07, impl=impl),
    "nt_xent": lambda q, k, impl: kernels.nt_xent(q, k, 0.07, impl=impl),
    "linear_cross_entropy": lambda q, k, impl: kernels.linear_cross_entropy(
        q, k, torch.arange(len(q), device=q.device) % len(k), impl=impl)}
SIZES = {"cpu": ["1024x1024x128", "4096x4096x128", "4096x4096x768"],
         "cuda": ["1024x1024x128", "4096x4096x128", "32768x32768x128", "32768x32768x768", "65536x65536x768"]}


def shape(text):
    """"4096x4096x128" as [4096, 4096, 128]."""
    size = [int(x) for x in text.split("x")]
    if len(size) != 3 or min(size) < 1:
        raise ValueError
    return size


def measure(loss, size, dtype, impl, device, repeat):
    """One row: seconds, percentiles, peak extra MB and error, of one implementation at one size."""
    n, m, d = size
    q, k = (F.normalize(torch.randn(rows, d, generator=torch.Generator().manual_seed(seed)), dim=1)
            .to(device, dtype).requires_grad_() for seed, rows in enumerate((n, m)))

    def step():
        q.grad = k.grad = None
        LOSSES[loss](q, k, impl).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    LOSSES[loss](q[:8], k[:8], impl).backward()              # what PyTorch imports and sets up once is nobody's memory
    q.grad = k.grad = None
    before = memory(device, reset=True)
    step()
    row = dict(extra_mb=(memory(device) - before) / 2 ** 20)
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    row["ms_20"], row["ms"], row["ms_80"] = (1e3 * torch.tensor(seconds).quantile(x).item() for x in (0.2, 0.5, 0.8))
    exact_q, exact_k = (x.detach().double().requires_grad_() for x in (q, k))
    LOSSES[loss](exact_q, exact_k, "blockwise").backward()
    row["error"] = ((q.grad - exact_q.grad).abs().max() / exact_q.grad.abs().max()).item()
    return row


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


def versions(device):
    """What the numbers were made with."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return dict(device=name, torch=torch.__version__, kernels=kernels.__version__, python=platform.python_version(),
                date=time.strftime("%Y-%m-%d"), command=" ".join(["python -m kernels.benchmark", *sys.argv[1:]]))


def main(argv=None):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", nargs="+", default=["info_nce"], choices=LOSSES, help="losses to run")
    parser.add_argument("--sizes", nargs="+", type=shape, default=[shape(x) for x in SIZES[device]], help="N x M x D, as 4096x4096x128")
    parser.add_argument("--dtype", default="bfloat16" if device == "cuda" else "float32", help="of the rows",
                        choices=("float64", "float32", "float16", "bfloat16"))
    parser.add_argument("--impl", nargs="+", default=["eager", "triton" if device == "cuda" else "blockwise"], help="what to run")
    parser.add_argument("--repeat", type=int, default=5, help="timed runs of each")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)                  # a row's own process: its arguments as JSON
    args = parser.parse_args(argv)
    if args.one:
        case = json.loads(args.one)
        print(json.dumps(measure(**{**case, "dtype": getattr(torch, case["dtype"])})))
        return
    about = versions(device)
    print(*(f"{name} {value}" for name, value in about.items()), sep="   ")
    print(f"{'loss':22}{'N x M x D':20}{'impl':11}{'ms':>10}{'20 %':>10}{'80 %':>10}{'extra MB':>10}{'error':>10}")
    rows = []
    for loss in args.loss:
        for size in args.sizes:
            for impl in args.impl:
                case = dict(loss=loss, size=size, dtype=args.dtype, impl=impl, device=device,
                            repeat=args.repeat)
                done = subprocess.run([sys.executable, "-m", "kernels.benchmark", "--one", json.dumps(case)],
                                      capture_output=True, text=True)
                rows.append({**case, **(json.loads(done.stdout) if done.returncode == 0 else {"failed": why(done)})})
                print(f"{loss:22}{'x'.join(map(str, size)):20}{impl:11}", line(rows[-1]), sep="", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**about, "rows": rows}, file, indent=1)


def line(row):
    """A row's numbers, or why there are none."""
    if "failed" in row:
        return row["failed"]
    return f"{row['ms']:10.2f}{row['ms_20']:10.2f}{row['ms_80']:10.2f}{row['extra_mb']:10.0f}{row['error']:10.1e}"


def why(done):
    """The last line of a failed process, in the words of this table where it ran out of memory."""
    message = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    out = done.returncode == -9 or "out of memory" in message.lower() or "can't allocate" in message.lower()
    return "does not fit in memory" if out else message


if __name__ == "__main__":
    main()
