"""Every Triton kernel compiled for sm_80, sm_90 and sm_100 as a real launch would compile it: no GPU needed.

    python tests/test_compile.py [90]        the table: registers, spills, shared memory, programs a multiprocessor

The host functions are called as users call them, on a driver that compiles for the chip and runs nothing. What must hold:
nothing spills, shared memory is within the chip's limit, and half types run on the chip's own tensor core instruction.
"""
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHIPS = {80: ("mma.sync", 166_912), 90: ("wgmma", 232_448), 100: ("tcgen05", 232_448)}   # instruction, shared bytes a block
SM_REGISTERS, SM_SHARED = 65_536, {80: 167_936, 90: 233_472, 100: 233_472}               # of one multiprocessor
DTYPES = [("bfloat16", "high"), ("bfloat16", "highest"), ("float32", "high"), ("float32", "highest"), ("float16", "high")]


class AbsentChip:
    """What Triton asks of a driver, for a chip that is not there: its name, and launchers that do nothing."""
    launcher_cls = staticmethod(lambda source, metadata: lambda *arguments: None)

    def __init__(self, chip):
        from triton.backends.compiler import GPUTarget
        self.chip, self.target, self.utils = chip, GPUTarget("cuda", chip, 32), self

    def get_current_device(self):
        return self.chip

    def get_current_target(self):
        return self.target

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": CHIPS[self.chip][1], "max_num_regs": SM_REGISTERS, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name, binary, shared, device):
        return 1, 1, 0, 0, 1024                                # module, function, registers, spills, threads: not looked at


def launches(name, precision):
    """(rule's name, kernel, function that launches it): everything that can be launched on rows of a dtype."""
    import torch
    from kernels import lse_fixed_keys, lse_forward, lse_gradient, similarity, topk
    from kernels.rules import make_rule
    lse_forward.INTERPRETED = True                             # CPU tensors will do: nothing runs
    torch.set_float32_matmul_precision(precision)
    q, k = (torch.zeros(n, 256, dtype=getattr(torch, name)) for n in (300, 500))
    t, vector = torch.ones(()), torch.ones(300)
    ids, f = (torch.arange(300), torch.arange(500)), (torch.ones(300, 32), torch.ones(500, 32), 0.5)
    rules = {"none": {}, "diagonal": dict(exclude="diagonal"), "ids": dict(exclude=ids), "within": dict(within=ids),
             "similar": dict(exclude="diagonal", similar=f), "all": dict(exclude=ids, within=ids, similar=f)}
    rules = {title: make_rule(q, k, False, **rule) for title, rule in rules.items()} | {"pair": make_rule(q, q, True, "pair")}
    for title, rule in rules.items():
        if (name, precision) == ("bfloat16", "highest") and rule.row_features is None:
            continue                                           # it asks for full precision of float32 features alone
        b = q if title == "pair" else k
        yield title, lse_forward.lse_kernel, lambda: lse_forward.similarity_lse(q, b, t, rule)
        yield title, lse_gradient.weights_kernel, lambda: lse_gradient.similarity_lse_backward(
            vector, vector, q, b, t, rule, True, True)
        if name == "float16":                                  # as bfloat16, to the last register
            continue
        for n in (2, 16, 64):
            yield title, topk.topk_kernel, lambda: topk.similarity_topk(q, b, t, n, rule)
        for d in (16, 64, 128, 256):
            if d <= similarity.FIXED_KEYS_WIDEST.get(q.dtype, 0):
                yield title, lse_fixed_keys.fixed_keys_kernel, lambda: lse_fixed_keys.similarity_lse(q[:, :d], b[:, :d], t, rule)


def table(chip):
    """A row for every kernel that the launches compile for a chip, with what is wrong with it."""
    from triton.runtime import driver
    driver.set_active(AbsentChip(chip))
    instruction, most_shared = CHIPS[chip]
    for (name, precision), (title, kernel, launch) in itertools.chain.from_iterable(
            (((case, row) for row in launches(*case)) for case in DTYPES)):
        known = set(kernel.device_caches[chip][0])
        launch()
        for key, made in kernel.device_caches[chip][0].items():
            if key in known:
                continue
            registers, stack = resources(made.asm["cubin"])
            shared, threads = made.metadata.shared, 32 * made.metadata.num_warps
            programs = min(SM_REGISTERS // (registers * threads), SM_SHARED[chip] // (shared + 1024))
            wrong = ["spills"] * (stack > 0) + ["too much shared memory"] * (shared > most_shared)
            wrong += [f"no {instruction}"] * (name != "float32" and instruction not in made.asm["ptx"])
            yield f"sm_{chip:<4}{kernel.__name__:19}{name:9} {precision:8}{title:9}{registers:9}{stack:6}{shared:8}{programs:6}", wrong


def resources(cubin):
    """(registers a thread, bytes of stack a thread: spills) that the assembler reports for a cubin of one kernel."""
    import triton
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


@pytest.fixture(scope="module")
def tables():
    """The tables of all chips, made side by side in processes of their own: here Triton is the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    running = {chip: subprocess.Popen([sys.executable, __file__, str(chip)], env=environment, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for chip in CHIPS}
    return {chip: (process.communicate()[0], process.returncode) for chip, process in running.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists on Linux only")
@pytest.mark.parametrize("chip", CHIPS)
def test_no_spills_within_shared_memory_on_tensor_cores(chip, tables):
    text, code = tables[chip]
    lines = text.splitlines()
    assert code == 0 and not [line for line in lines if "WRONG" in line] and len(lines) > 150, text[-3000:]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(f"chip   {'kernel':19}{'dtype':9} {'float32':8}{'rule':9}registers stack  shared programs/SM")
    for chip in map(int, sys.argv[1:] or CHIPS):
        for line, wrong in table(chip):
            print(line + (f"   WRONG: {', '.join(wrong)}" if wrong else ""), flush=True)
