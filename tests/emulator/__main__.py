"""Run the Triton kernels as compiled for a GPU, without a GPU: execute their PTX on the CPU and compare the
results with eager in float64.

    python tests/emulator 90 --minutes 4               as many cases as fit, one of each section in turn
    python tests/emulator 80 --sections losses masks   all cases of two sections, compiled for sm_80
    python tests/emulator 90 --only "clip_loss 150"    the cases with this text in their title
    python tests/emulator 90 --sample                  what the test suite runs, see test_emulator.py
    python tests/emulator 90 --faults                  only check the emulator: it finds planted faults

The exit code is 1 if any case is wrong, and 2 for wrong flags. Each case has one line with its verdict:

    ok             the result is within the tolerances of tests/kernels, and as accurate as rounding explains
    BAD            it is not
    FAULT          the GPU would stop, refuse the launch or hang: out of bounds, misaligned, deadlock
    unsupported    the emulator does not know an instruction; it never skips one
    finding        the result depends on timing or on memory that nobody wrote

What is checked: addresses and alignment of every access; reads of memory that nobody wrote (tensors from
torch.empty are NaN); races between programs in global memory, and from barrier to barrier between warps in
shared memory; that asynchronous copies and matrix products are waited for before their results are used or
their operands change; fences before wgmma and bulk copies; that the driver would accept the tensor maps;
arrivals and bytes of mbarriers; kernel parameters; that shuffles and matrix products have all their lanes.

What is not checked: time; the assembler and its machine code (tests/gpu/test_compile.py assembles); the
rounding of the hardware (here products are exact, sums are in float64 and rounded once per instruction, and
ex2 and division are rounded correctly); the memory model beyond barriers and fence.proxy.async; races between
the lanes of one warp; PyTorch's own matrix products, which run on the CPU; sm_100.
"""
import argparse
import gc
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ["masks", "losses", "frozen_keys", "code_paths", "large_d", "sorted_groups", "several_tiles",
            "extremes", "fuzz", "topk"]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"tests/emulator: {message}\n")


def minutes(text):
    """Return a number of minutes above 0."""
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)


def make_parser():
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter, prog="tests/emulator")
    add = parser.add_argument
    add("chip", type=int, choices=[80, 90], help="compile for sm_80 (A100) or sm_90 (H100, H200)")
    add("--minutes", type=minutes, help="start no case after so many minutes; default: run all")
    add("--only", default="", metavar="TEXT", help="run only cases with this text in their title")
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION",
        help=f"run only these: {' '.join(SECTIONS)}")
    add("--no-races", action="store_true", help="do not look for races in shared memory: twice as fast")
    add("--sample", action="store_true", help="run a few small cases that launch every kernel, and --faults")
    add("--faults", action="store_true", help="plant faults in kernels, which the emulator has to find")
    return parser


def prepare():
    """Set the environment for compiling without a GPU. This must run before torch and triton are imported."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # other processes must not find kernels without an assembler's output
    os.environ["TRITON_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "tencl-emulator-cache")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/kernels"), str(ROOT / "tests/gpu")]
    import torch
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("warn")                     # fills tensors from torch.empty with NaN
    warnings.filterwarnings("ignore")


class Report:
    """Runs cases, prints a line for each and counts verdicts."""

    def __init__(self, gpu):
        self.gpu, self.verdicts, self.started = gpu, Counter(), time.time()

    def run(self, case):
        """Return (verdict, text) of a case."""
        import torch
        from memory import Fault
        from ptx import Unsupported
        verdicts, found_before = {Fault: "FAULT", Unsupported: "unsupported"}, len(self.gpu.findings)
        torch.set_float32_matmul_precision(case.precision)
        try:
            text = case.compare()
        except (AssertionError, Fault, Unsupported) as error:
            return verdicts.get(type(error), "BAD"), " ".join(str(error).split())
        new = self.gpu.findings[found_before:]
        return ("finding", new[0]) if new else ("ok", text)

    def add(self, section, case):
        """Run a case and print its line."""
        started, first = time.time(), len(self.gpu.launches)
        verdict, text = self.run(case)
        self.verdicts[verdict] += 1
        kernels = Counter(launch.kernel.removesuffix("_kernel") for launch in self.gpu.launches[first:])
        kernels = ", ".join(f"{name} {count}" if count > 1 else name for name, count in kernels.items())
        print(f"sm_{self.gpu.number} {section}: {case.title}: {verdict} {text} [{kernels}] "
              f"{time.time() - started:.1f} s", flush=True)

    def summary(self):
        """Print counts and findings. Return whether all cases are right."""
        launches = self.gpu.launches
        seconds, emulated = time.time() - self.started, sum(launch.seconds for launch in launches)
        print(f"\nsm_{self.gpu.number}: {sum(self.verdicts.values())} cases: {dict(self.verdicts)}; "
              f"{len(launches):,} launches of {sum(launch.programs for launch in launches):,} programs; "
              f"{seconds:.0f} s, of which {emulated:.0f} s in the emulator")
        for name, count in sorted(Counter(launch.kernel for launch in launches).items()):
            programs = sum(launch.programs for launch in launches if launch.kernel == name)
            print(f"    {name:24}{count:8,} launches{programs:10,} programs")
        print(f"{len(self.gpu.findings)} findings")
        for finding in self.gpu.findings:
            print(f"    {finding}")
        return set(self.verdicts) <= {"ok", "not run"} and not self.gpu.findings


def run_cases(flags, gpu, cases):
    """Run (section, case) pairs and print the summary, also after Ctrl-C. Return whether all are right."""
    report = Report(gpu)
    try:
        for section, case in cases:
            if flags.minutes and time.time() - report.started > 60 * flags.minutes:
                report.verdicts["not run"] += 1
            else:
                report.add(section, case)
    except KeyboardInterrupt:
        report.summary()
        sys.exit(130)
    return report.summary()


def main(argv=None):
    parser = make_parser()
    flags = parser.parse_args(argv)
    prepare()
    import kernel_cases
    import self_check
    from driver import EmulatedGPU
    gpu = EmulatedGPU(flags.chip, not flags.no_races)
    gpu.activate()
    gc.freeze()              # the garbage collector skips what was imported, which makes it much faster
    kernel_cases.pretend(flags.chip)
    right = True
    if flags.sample or not flags.faults:
        cases = kernel_cases.in_turn(flags.chip, flags.sections)
        if flags.sample:
            cases = (("sample", case) for case in kernel_cases.sample(flags.chip))
        cases = [(section, case) for section, case in cases if flags.only in case.title]
        if not cases:
            parser.error(f"--only: no title contains {flags.only!r}")
        right = run_cases(flags, gpu, cases)
    if flags.sample:
        missing = kernel_cases.all_kernels() - {launch.kernel for launch in gpu.launches}
        print(f"kernels without a case: {sorted(missing)}")
        right &= not missing
    if flags.sample or flags.faults:
        right &= self_check.find_planted_faults(Report(gpu), flags.chip, once=flags.sample)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
