"""Every Triton kernel compiled for sm_80, sm_90 and sm_100 as a real launch would compile it: no GPU needed.

    python -m pytest tests/gpu/test_compile.py                      the kernels that are nearest to a limit
    TENCL_COMPILE=all python -m pytest tests/gpu/test_compile.py    all 1,500, ten minutes
    python tests/gpu/test_compile.py [90]                        their table: registers, spills, shared memory

The host functions are called as users call them, on a driver that compiles for the chip and runs nothing.
What must hold: nothing spills but a word of predicates (other versions of Triton spill a little more), shared
memory is within the chip's limit, and half types run on the chip's own tensor core instruction.
"""
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUNED = "3.6", "3.7"           # the versions of Triton that the kernels' tiles were chosen with
PRODUCT = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}       # a chip's own instruction
DTYPES = [("bfloat16", "high"), ("bfloat16", "highest"), ("float32", "high"), ("float32", "highest"),
          ("float16", "high")]
# what fills registers or shared memory on some chip, and each kernel on each tensor core
TIGHT = {
    ("bfloat16", "high"): ["sums 128 one set", "rows 256 within", "rows 128 one set", "rows 768 one side",
                           "keys 128 within", "blocks 256 two sides", "one pass 256 one side", "sigmoid 256",
                           "sums 256 lse diagonal"],
    ("bfloat16", "highest"): ["rows 256 all", "keys 128 all", "top 64 of 256 all"],
    ("float32", "high"): ["sums 256 one side", "one pass 256 one side", "one pass 256 targets",
                          "sigmoid 256"],
    ("float32", "highest"): ["sums 128 one set", "blocks 256 all", "top 64 of 256 within", "sigmoid 256"],
    ("float16", "high"): ["sums 256 two sides", "sigmoid 256"]}


def launches(name, precision):
    """(what is launched, function that does): everything that can be launched on rows of a dtype."""
    import torch

    from kernels import paths
    from kernels.gpu import gradient, lse_fixed_keys, lse_forward, one_pass, reference, sigmoid, topk
    from kernels.rules import make_rule

    def gradients(narrow, *arguments):
        gradient.is_narrow = lambda *x: narrow
        gradient.gradients(*arguments)

    def with_few(few, f):
        """Few rows are not looked at for a bound."""
        reference.FEW = few
        f()
        reference.FEW = 0

    torch.set_float32_matmul_precision(precision)
    half, full_features_alone = name != "float32", (name, precision) == ("bfloat16", "highest")
    like_bfloat16 = name == "float16"  # to the last register
    t, needs, rows = torch.ones(()), (True, True, True), (torch.ones(300),) * 2
    ids, f = (torch.arange(300), torch.arange(500)), (torch.ones(300, 32), torch.ones(500, 32), 0.5)
    rules = {"none": {}, "diagonal": dict(exclude="diagonal"), "ids": dict(exclude=ids),
             "within": dict(within=ids),
             "similar": dict(exclude="diagonal", similar=f), "all": dict(exclude=ids, within=ids, similar=f)}
    for d in (64, 128, 256, 768):
        q, k, square = (torch.zeros(n, d, dtype=getattr(torch, name)) for n in (300, 500, 300))
        for title, rule in rules.items():
            if full_features_alone and "similar" not in rule:
                continue
            rule = make_rule(q, k, False, **rule)
            one_sided = q, k, t, rule, rows, None, t, 1.0, *needs, q.dtype
            if d in (128, 256):  # one stays in shared memory and one does not
                yield f"sums {d} {title}", lambda: lse_forward.log_sums(q, k, t, rule)
            if d == 256:
                yield f"blocks {d} {title}", lambda: gradients(False, *one_sided)
            if half and not like_bfloat16:
                yield f"rows {d} {title}", lambda: gradients(True, *one_sided)
            if half and not like_bfloat16 and d <= paths.WIDEST:
                yield f"keys {d} {title}", lambda: lse_fixed_keys.similarity_lse(q, k, t, rule)
            for n in (2, 16, 64) if d == 256 and not like_bfloat16 else ():
                yield f"top {n} of {d} {title}", lambda: topk.similarity_topk(q, k, t, n, rule)
        if full_features_alone:
            continue
        diagonal, pair = make_rule(q, square, False, "diagonal"), make_rule(q, q, True, "pair")
        targets = make_rule(q, square, False)._replace(exclude="target", row_ids=ids[0])
        for title in ("none", "diagonal", "pair") if d != 64 or half else ():
            of_one_set = make_rule(q, q, True, None if title == "none" else title)
            yield f"sums {d} lse {title}", lambda: lse_forward.log_sums(q, None, t, of_one_set)
        for title, needed in (("", True), (", no gradient", False)) if d == 256 else ():
            pairs = q, square, t, t, diagonal, *[needed] * 4, q.dtype
            yield f"sigmoid {d}{title}", lambda: sigmoid.sigmoid_loss(*pairs)
        for title, other, rule, both, columns in (
                ("one side", square, diagonal, False, None), ("targets", square, targets, False, None),
                ("two sides", square, diagonal, True, rows), ("one set", None, pair, False, rows)):
            if d != 64 or half:
                weights = t if title == "targets" else None
                forward = lambda: lse_forward.log_sums(q, other, t, rule, both, True, weights)
                yield f"sums {d} {title}", forward
                if columns:
                    yield f"sums {d} {title}, few", lambda: with_few(1024, forward)
            if d == 256 and columns is None:
                one = q, other, t, rule, None, *needs, q.dtype
                yield f"one pass {d} {title}", lambda: one_pass.softmax_loss(*one)
            sides = q, other, t, rule, rows, columns, t, 1.0, *needs, q.dtype, True
            if d == 256:
                yield f"blocks {d} {title}", lambda: gradients(False, *sides)
            if half and title != "targets":
                yield f"rows {d} {title}", lambda: gradients(True, *sides)
                if columns:
                    yield f"rows {d} {title}, few", lambda: with_few(1024, lambda: gradients(True, *sides))


def all_kernels():
    """Every kernel of the package, by whatever module it is found in."""
    files = (ROOT / "kernels/gpu").glob("[a-z]*.py")
    modules = [importlib.import_module(f"kernels.gpu.{file.stem}") for file in files]
    found = (x for module in modules for x in vars(module).values() if hasattr(x, "device_caches"))
    return sorted({kernel for kernel in found if "kernel" in kernel.fn.__name__}, key=lambda x: x.fn.__name__)


def table(chip, only=None):
    """A row for every kernel that the launches, or only some, compile for a chip; what is wrong with it."""
    from triton.runtime import driver

    from kernels.cost.launches import absent
    from kernels.gpu import launch, reference
    launch.INTERPRETED = True  # CPU tensors will do: nothing runs
    launch.PLAYED = chip // 10
    launch.FEW = reference.FEW = 0  # rows are looked at for a bound
    driver.set_active(absent(f"sm_{chip}"))
    kernels = all_kernels()
    known, missing = set(), {(case, title) for case, titles in (only or {}).items() for title in titles}
    for name, precision in DTYPES:
        for title, do in launches(name, precision):
            if only and title not in only[name, precision]:
                continue
            do()
            missing.discard(((name, precision), title))
            for kernel in kernels:
                for key, made in kernel.device_caches[chip][0].items():
                    if (kernel, key) not in known:
                        known.add((kernel, key))
                        row, wrong = judge(chip, made, name != "float32")
                        yield f"sm_{chip:<4}{kernel.__name__:18}{name:9} {precision:8}{title:22}{row}", wrong
    assert not missing, missing


def judge(chip, made, half):
    """(registers, stack, shared memory, programs a multiprocessor; what is wrong) of a compiled kernel."""
    import triton

    from kernels.cost.launches import CHIPS, REGISTERS
    registers, stack = resources(made.asm["cubin"])
    shared, threads = made.metadata.shared, 32 * made.metadata.num_warps
    about, instruction = CHIPS[f"sm_{chip}"], PRODUCT[chip]
    programs = min(REGISTERS // (registers * threads), about.shared // (shared + 1024))
    multiplies = re.search(r"_dot|\.dot", made.asm["ttgir"])
    most = 8 if triton.__version__.startswith(TUNED) else 256     # others keep a few registers in memory
    wrong = ["spills"] * (stack > most) + ["too much shared memory"] * (shared > about.most_shared)
    wrong += [f"no {instruction}"] * bool(half and multiplies and instruction not in made.asm["ptx"])
    return f"{registers:9}{stack:6}{shared:8}{programs:6}", wrong


def resources(cubin):
    """(registers a thread, bytes of stack a thread: spills) that the assembler reports for a kernel."""
    import triton
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", said)[1]), int(re.search(r"STACK:(\d+)", said)[1])


def variants():
    """[(loss, kernel, how many)] of a kernel that a run with batches of many sizes would compile."""
    import torch
    import triton.compiler
    from triton.runtime import driver

    class Made:
        """A compiled kernel that is none: only how many there would be is looked at."""
        packed_metadata = function = None
        launch_metadata, run = (staticmethod(lambda *arguments: None) for _ in range(2))

    triton.compiler.compile = lambda *arguments, **options: Made()
    from kernels import (
        clip_loss,
        info_nce,
        linear_cross_entropy,
        nt_xent,
        queue_loss,
        sigmoid_loss,
        similarity_lse,
    )
    from kernels.cost.launches import absent
    from kernels.gpu import launch
    launch.INTERPRETED, on = True, dict(impl="triton")
    driver.set_active(absent("sm_90"))
    ids = lambda x: torch.arange(len(x))
    losses = {
        "info_nce": lambda q, k: info_nce(q[: len(q) // 3], k, offset=len(q) // 3, **on),
        "clip_loss": lambda q, k: clip_loss(q, k, **on), "nt_xent": lambda q, k: nt_xent(q, k, **on),
        "queue_loss": lambda q, k: queue_loss(q, k, k.detach().new_zeros(500, k.shape[1]), **on),
        "linear": lambda q, k: linear_cross_entropy(q, k, ids(q), **on),
        "sigmoid_loss": lambda q, k: sigmoid_loss(q[: len(q) // 3], k, offset=len(q) // 3, **on),
        "within": lambda q, k: similarity_lse(q, k, within=(ids(q), ids(k)), **on).sum()}
    for (name, loss), sizes in itertools.product(losses.items(), [(5, 16, 63, 64, 1000), (1025, 1040, 1102)]):
        for d, dtype in (128, torch.bfloat16), (768, torch.bfloat16), (768, torch.float32):
            for kernel in all_kernels():
                kernel.device_caches.clear()
            for n in sizes:
                loss(*(torch.zeros(n, d, dtype=dtype, requires_grad=True) for _ in range(2))).backward()
            for kernel in all_kernels():
                yield name, kernel.fn.__name__, len(kernel.device_caches[90][0])


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists on Linux only")
def test_batches_of_other_sizes_need_few_other_kernels():
    """Forward and backward, of rows and of columns, are different code; the size of a batch is not."""
    command = [sys.executable, __file__, "--variants"]
    done = subprocess.run(command, env=compiling(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert len({kernel for _, kernel, count in found if int(count)}) > 12
    assert [line for line in found if int(line[2]) > 3] == []


def compiling():
    """The environment of a process that compiles: here Triton is the interpreter."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists on Linux only")
@pytest.mark.parametrize("chip", PRODUCT)
def test_no_spills_within_shared_memory_on_tensor_cores(chip):
    flags = [] if os.environ.get("TENCL_COMPILE") == "all" else ["--tight"]
    done = subprocess.run([sys.executable, __file__, str(chip), *flags], env=compiling(), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if "WRONG" in line]
    assert done.returncode == 0 and not wrong and len(lines) > (25 if flags else 300), done.stdout[-3000:]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if "--variants" in sys.argv:
        sys.exit(print(*(" ".join(map(str, found)) for found in variants()), sep="\n"))
    print(f"chip   {'kernel':18}{'dtype':9} {'float32':8}{'launch':22}registers stack  shared programs/SM")
    tight = "--tight" in sys.argv and TIGHT
    for chip in map(int, [flag for flag in sys.argv[1:] if flag != "--tight"] or PRODUCT):
        for line, wrong in table(chip, tight):
            print(line + (f"   WRONG: {', '.join(wrong)}" if wrong else ""), flush=True)
