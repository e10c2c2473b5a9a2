"""Compile every Triton kernel for sm_80, sm_90 and sm_100 exactly as a launch would, without a GPU.

    python -m pytest tests/gpu/test_compile.py                      the kernels that are nearest to a limit
    TENCL_COMPILE=all python -m pytest tests/gpu/test_compile.py    all kernels; half an hour
    python tests/gpu/test_compile.py [90]                           print registers, spills and shared memory

The tests call the host functions as a loss does, with a driver that compiles kernels and runs none. A kernel
must not spill registers (8 bytes of predicates are allowed) or need more shared memory than the GPU has. For
half types it must use the GPU's tensor core instruction. In the kernels ONE_LOOP, products must not wait for
each other (see tiles.count_steps).
"""
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUNED = "3.6", "3.7"           # the tile sizes of the kernels were chosen with these versions of Triton
TENSOR_CORE = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}       # {GPU generation: its matrix instruction}
ONE_LOOP = "sums_kernel", "weights_kernel", "sigmoid_kernel"
# (dtype, float32 matmul precision). float16 is absent: it takes as many registers as bfloat16
DTYPES = [("bfloat16", "high"), ("bfloat16", "highest"), ("float32", "high"), ("float32", "highest")]
# {(dtype, float32 matmul precision, kind of temperature): titles of launches that nearly fill the registers
# or the shared memory of some GPU}. Each kernel has at least one launch.
TIGHT = {
    ("bfloat16", "high", "number"): ["forward 128 two sides", "forward 128 two sides, few", "queue 128",
                                     "small d 128 one side", "large d 256 two sides", "fused 256 targets",
                                     "fused 256 targets, wide", "large d 256 self-similarity",
                                     "fused 256 one side", "small d 128 two sides, pointers",
                                     "small d 128 gathered pairs, pointers"],
    ("bfloat16", "high", "tensor"): ["forward 128 self-similarity", "forward 256 lse diagonal", "queue 256",
                                     "forward 128 gathered pairs", "small d 128 self-similarity",
                                     "small d 128 within", "sigmoid 256", "large d 256 lse ids"],
    ("bfloat16", "highest", "number"): ["small d 128 all", "top 64 of 256 all"],
    ("float32", "high", "number"): ["sigmoid 256"],
    ("float32", "high", "tensor"): ["forward 256 one side", "fused 256 one side"],
    ("float32", "highest", "number"): ["top 64 of 256 within", "sigmoid 256"],
    ("float32", "highest", "tensor"): ["forward 128 self-similarity", "large d 256 all"]}


def launches(name, precision, scalars):
    """Yield (title, function that launches kernels) for every launch with rows of the dtype `name`.

    precision  the float32 matmul precision, which this function sets
    scalars    "number" or "tensor": kind of the temperature and of sigmoid_loss's bias. Kernels take a number
               as an argument, and read a tensor from memory
    """
    import torch

    from kernels import call as calls
    from kernels.gpu import fused_forward_backward as fused
    from kernels.gpu import gradient, heuristics, launch, lse_forward, queue, shift, sigmoid, topk
    from kernels.masks import Mask, make_mask

    def gradients(small_d, *arguments):
        """Launch the gradient kernels for a small D or for a large D, whatever D the rows have."""
        gradient.is_small_d = lambda call: small_d
        gradient.gradients(*arguments)

    def with_value(module, name, value, f):
        """Call f() while module.name is `value`."""
        with mock.patch.object(module, name, value):
            f()

    def call_of(q, k, mask):
        """Return the Call of these rows and this mask."""
        return calls.Call(q, k, t, mask, "triton", q.dtype)

    # replace is_host_scalar, which compares devices: in these tests all tensors are on the CPU
    launch.is_host_scalar = sigmoid.is_host_scalar = lambda scalar, x: scalar is number
    torch.set_float32_matmul_precision(precision)
    half = name != "float32"
    only_features = (name, precision) == ("bfloat16", "highest")  # only mask features use the precision
    one, number, tensor = (torch.ones(()) for _ in range(3))
    t, other_kind = (number, tensor) if scalars == "number" else (tensor, number)
    needs, none, side = (True, True, True), shift.SoftmaxSide(), shift.SoftmaxSide(*torch.ones(3, 512))
    ids, f = (torch.arange(300), torch.arange(500)), (torch.ones(300, 32), torch.ones(500, 32), 0.5)
    masks = {"none": {}, "diagonal": dict(exclude="diagonal"), "ids": dict(exclude=ids),
             "diagonal ids": dict(exclude=("diagonal", *ids)), "within": dict(within=ids),
             "similar": dict(exclude="diagonal", similar=f), "all": dict(exclude=ids, within=ids, similar=f)}
    for d in (64, 128, 256, 768):
        q, k, square = (torch.zeros(n, d, dtype=getattr(torch, name)) for n in (300, 500, 300))
        scaling = [gradient.GradientScaling(one, 1.0, positives, q.dtype) for positives in (False, True)]
        for title, mask in masks.items():
            if only_features and "similar" not in mask:
                continue
            call = call_of(q, k, make_mask(len(q), len(k), False, **mask))
            one_sided = call, shift.Sides(side, none), scaling[0], needs
            if d in (128, 256):  # rows stay in shared memory if D = 128, but not if D = 256
                yield f"forward {d} {title}", lambda: lse_forward.forward(call)
            if d == 256:
                yield f"large d {d} {title}", lambda: gradients(False, *one_sided)
            if half and d <= heuristics.MAX_SMALL_D:
                yield f"small d {d} {title}", lambda: gradients(True, *one_sided)
            for n in (2, 16, 64) if d == 256 and t is number else ():
                yield f"top {n} of {d} {title}", lambda: topk.similarity_topk(call, n)
        if only_features:
            continue
        if half and d <= heuristics.MAX_QUEUE_D:
            yield f"queue {d}", lambda: queue.queue_loss(call_of(q, square, Mask()), k, needs)
        diagonal, pair = Mask("diagonal"), Mask("pair")
        targets = Mask("target", ids[0])
        excluded = dict(none=None, diagonal="diagonal", pair="pair", ids=(ids[0], ids[0]))
        for title, exclude in excluded.items() if d != 64 or half else ():
            symmetric = call_of(q, None, make_mask(len(q), len(q), True, exclude))
            yield f"forward {d} lse {title}", lambda: lse_forward.forward(symmetric)
            if title == "ids":                                 # as in sup_con_loss
                of_ids = symmetric, shift.Sides(side, side, one), scaling[0], needs
                yield f"large d {d} lse ids", lambda: gradients(False, *of_ids)
                if half and d <= heuristics.MAX_SMALL_D:
                    yield f"small d {d} lse ids", lambda: gradients(True, *of_ids)
        for title, bias in (("", t), (", other bias", other_kind)) if d == 256 else ():
            pairs = call_of(q, square, diagonal), bias, (*needs, True)
            yield f"sigmoid {d}{title}", lambda: sigmoid.sigmoid_loss(*pairs)
        for title, other, mask, both, columns in (
                ("one side", square, diagonal, False, none), ("targets", square, targets, False, none),
                ("gathered pairs", k, Mask("pair", offset=7), False, none),
                ("two sides", square, diagonal, True, side), ("self-similarity", None, pair, False, side)):
            call = call_of(q, other, mask)
            if d != 64 or half:
                weights = one if title == "targets" else None
                forward = lambda: lse_forward.forward(call, both, True, weights)
                yield f"forward {d} {title}", forward
                if columns is side:
                    yield f"forward {d} {title}, few", lambda: with_value(
                        heuristics, "SHIFT_LOGITS", 2 ** 26, forward)
            if d == 256 and columns is none:
                strips = lambda: fused.softmax_loss(call, False, None, needs)
                yield f"fused {d} {title}", strips
                yield f"fused {d} {title}, wide", lambda: with_value(fused, "MIN_WIDE_D", 0, strips)
            sides = shift.Sides(side, columns, one if columns is side else None)
            if d == 256:
                yield f"large d {d} {title}", lambda: gradients(False, call, sides, scaling[1], needs)
            if half and title != "targets" and d <= heuristics.MAX_SMALL_D:
                small = lambda: gradients(True, call, sides, scaling[1], needs)
                yield f"small d {d} {title}", small
                yield f"small d {d} {title}, pointers", lambda: with_value(
                    launch, "MAX_POINTER_WORK", 2 ** 33, small)
                if columns is side:
                    few = sides._replace(common_m=None)
                    yield f"small d {d} {title}, few", lambda: gradients(True, call, few, scaling[1], needs)


def all_kernels():
    """Return every kernel that a module of kernels.gpu defines or imports."""
    files = (ROOT / "kernels/gpu").glob("[a-z]*.py")
    modules = [importlib.import_module(f"kernels.gpu.{file.stem}") for file in files]
    found = (x for module in modules for x in vars(module).values() if hasattr(x, "device_caches"))
    return sorted({kernel for kernel in found if "kernel" in kernel.fn.__name__}, key=lambda x: x.fn.__name__)


def table(chip, only=None):
    """Yield (line of text, list of problems) of every kernel that the launches compile. chip: 90 for sm_90.

    only  titles of launches, in the form of TIGHT; None: all launches
    """
    from compiling_driver import compiling_driver
    from triton.runtime import driver

    from kernels.gpu import heuristics, launch
    launch.INTERPRETED = True  # kernels then accept CPU tensors; nothing runs
    launch.EMULATED_CAPABILITY = chip // 10
    heuristics.SHIFT_LOGITS = launch.MAX_POINTER_WORK = 0          # select the kernels for many logits
    driver.set_active(compiling_driver(f"sm_{chip}"))
    kernels = all_kernels()
    known, missing = set(), {(case, title) for case, titles in (only or {}).items() for title in titles}
    for (name, precision), scalars in itertools.product(DTYPES, ("number", "tensor")):
        case = name, precision, scalars
        for title, run in launches(*case):
            if only and title not in only.get(case, ()):
                continue
            run()
            missing.discard((case, title))
            for kernel in kernels:
                for key, compiled in kernel.device_caches[chip][0].items():
                    if (kernel, key) not in known:
                        known.add((kernel, key))
                        row, problems = check_compiled(chip, compiled, name != "float32")
                        line = f"{kernel.__name__:23}{name:9}{precision:8}{scalars:7}{title:31}{row}"
                        yield f"sm_{chip:<4}{line}", problems
    assert not missing, missing


def check_compiled(chip, compiled, half):
    """Return (text, list of problems) of a kernel. The text has its registers, stack and shared memory."""
    import triton
    from compiling_driver import CHIPS
    registers, stack = resources(compiled.asm["cubin"])
    shared, instruction = compiled.metadata.shared, TENSOR_CORE[chip]
    has_product = re.search(r"_dot|\.dot", compiled.asm["ttgir"])
    most_stack = 8 if triton.__version__.startswith(TUNED) else 256     # other versions spill a few registers
    problems = []
    if stack > most_stack:
        problems.append("spills")
    if shared > CHIPS[f"sm_{chip}"].shared:
        problems.append("too much shared memory")
    if half and has_product and instruction not in compiled.asm["ptx"]:
        problems.append(f"no {instruction}")
    if compiled.metadata.name in ONE_LOOP and instruction == "wgmma":
        command = [tool("ptxas"), "-v", "--gpu-name=sm_90a", "-o", os.devnull, "/dev/stdin"]
        done = subprocess.run(command, input=compiled.asm["ptx"], capture_output=True, text=True, check=True)
        if "wgmma" in done.stderr:                                 # ptxas printed a warning about wgmma
            problems.append("products wait for each other")
    return f"{registers:9}{stack:6}{shared:8}", problems


def tool(name):
    """Return the path of one of NVIDIA's programs that Triton contains."""
    import triton
    return Path(triton.__file__).parent / "backends/nvidia/bin" / name


def resources(cubin):
    """Return (registers, bytes of stack) per thread of a kernel. Spilled registers are on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("cuobjdump"), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", printed)[1]), int(re.search(r"STACK:(\d+)", printed)[1])


def compiling_environment():
    """Return an environment without TRITON_INTERPRET, for a process that compiles."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists on Linux only")
@pytest.mark.parametrize("chip", TENSOR_CORE)
def test_spills_shared_memory_and_tensor_cores(chip):
    flags = [] if os.environ.get("TENCL_COMPILE") == "all" else ["--tight"]
    command = [sys.executable, __file__, str(chip), *flags]
    done = subprocess.run(command, env=compiling_environment(), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if "WRONG" in line]
    assert done.returncode == 0 and not wrong and len(lines) > (25 if flags else 300), done.stdout[-3000:]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(f"chip   {'kernel':23}{'dtype':9}{'float32':8}{'τ':7}{'launch':31}"
          "registers stack  shared")
    tight = TIGHT if "--tight" in sys.argv else None
    for chip in map(int, [flag for flag in sys.argv[1:] if flag != "--tight"] or TENSOR_CORE):
        for line, problems in table(chip, tight):
            print(line + (f"   WRONG: {', '.join(problems)}" if problems else ""), flush=True)
