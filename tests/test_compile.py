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
    """(what is launched, function that does): everything that can be launched on rows of a dtype."""
    import torch
    from kernels import gradient_blocks, gradient_rows, lse_fixed_keys, lse_forward, one_pass, paths, topk
    from kernels.rules import make_rule
    torch.set_float32_matmul_precision(precision)
    half, t = name != "float32", torch.ones(())
    for d in (64, 128, 256, 768):
        q, k = (torch.zeros(n, d, dtype=getattr(torch, name)) for n in (300, 500))
        ids, f = (torch.arange(300), torch.arange(500)), (torch.ones(300, 32), torch.ones(500, 32), 0.5)
        rules = {"none": {}, "diagonal": dict(exclude="diagonal"), "ids": dict(exclude=ids), "within": dict(within=ids),
                 "similar": dict(exclude="diagonal", similar=f), "all": dict(exclude=ids, within=ids, similar=f)}
        for title, rule in rules.items():
            if (name, precision) == ("bfloat16", "highest") and "similar" not in rule:
                continue                                       # it asks for full precision of float32 features alone
            rule, rows = make_rule(q, k, False, **rule), (torch.ones(300),) * 2
            if d in (128, 256):                                # one that stays in shared memory and one that does not
                yield f"{d:4} {title}", lambda: lse_forward.log_sums(q, k, t, rule)
            if d == 256:
                yield f"{d:4} {title}", lambda: gradient_blocks.gradients(q, k, t, rule, rows, None, None, t, 1.0, True, True,
                                                                          True, False, False)
            if name == "float16":                              # as bfloat16, to the last register
                continue
            if half:
                yield f"{d:4} {title}", lambda: gradient_rows.gradients(q, k, t, rule, rows, None, None, t, 1.0, True, True, True,
                                                                        False, False)
            if half and d <= paths.WIDEST:
                yield f"{d:4} {title}", lambda: lse_fixed_keys.similarity_lse(q, k, t, rule)
            for n in (2, 16, 64) if d == 256 else ():
                yield f"{d:4} {title}", lambda: topk.similarity_topk(q, k, t, n, rule)
        if (name, precision) == ("bfloat16", "highest"):
            continue
        square, sides = torch.zeros(300, d, dtype=q.dtype), (torch.ones(300),) * 2
        for title, other, rule, both, columns in (
                ("one side", square, make_rule(q, square, False, "diagonal"), False, None),
                ("targets", square, make_rule(q, square, False)._replace(exclude="target", row_ids=ids[0]), False, None),
                ("two sides", square, make_rule(q, square, False, "diagonal"), True, sides),
                ("one set", None, make_rule(q, q, True, "pair"), False, sides)):
            if d != 64 or half:
                yield f"{d:4} {title}", lambda: lse_forward.log_sums(q, other, t, rule, both, True, t if title == "targets" else None)
            if d == 256 and title in ("one side", "targets"):
                yield f"{d:4} {title}", lambda: one_pass.softmax_loss(q, other, t, rule, None, True, True, True)
            for path in [gradient_blocks] * (d == 256) + [gradient_rows] * (half and title != "targets"):
                yield f"{d:4} {title}", lambda: path.gradients(q, square if other is None else other, t, rule, sides, columns,
                                                               t if columns else None, t, 1.0, True, True, True, True, other is None)


def table(chip):
    """A row for every kernel that the launches compile for a chip, with what is wrong with it."""
    from triton.runtime import driver
    from kernels import gradient_blocks, gradient_rows, lse_fixed_keys, launch, lse_forward, one_pass, topk
    launch.INTERPRETED = True                                   # CPU tensors will do: nothing runs
    launch.PLAYED = chip // 10
    launch.FEW = 0                                              # rows are looked at for a bound
    driver.set_active(AbsentChip(chip))
    instruction, most_shared = CHIPS[chip]
    kernels = [lse_forward.parts_kernel, lse_forward.merge_kernel, gradient_rows.rows_kernel, gradient_blocks.weights_kernel,
               gradient_blocks.finish_kernel, one_pass.strip_kernel, one_pass.scale_kernel, lse_fixed_keys.fixed_keys_kernel,
               topk.topk_kernel]
    known = set()
    for (name, precision), (title, launch) in itertools.chain.from_iterable(
            (((case, row) for row in launches(*case)) for case in DTYPES)):
        launch()
        for kernel in kernels:
            for key, made in kernel.device_caches[chip][0].items():
                if (kernel, key) in known:
                    continue
                known.add((kernel, key))
                registers, stack = resources(made.asm["cubin"])
                shared, threads = made.metadata.shared, 32 * made.metadata.num_warps
                programs = min(SM_REGISTERS // (registers * threads), SM_SHARED[chip] // (shared + 1024))
                multiplies = ".dot" in made.asm["ttgir"] or "tt.dot" in made.asm["ttgir"] or "_dot" in made.asm["ttgir"]
                wrong = ["spills"] * (stack > 0) + ["too much shared memory"] * (shared > most_shared)
                wrong += [f"no {instruction}"] * (name != "float32" and multiplies and instruction not in made.asm["ptx"])
                yield (f"sm_{chip:<4}{kernel.__name__:19}{name:9} {precision:8}{title:16}{registers:9}{stack:6}{shared:8}"
                       f"{programs:6}", wrong)


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
    print(f"chip   {'kernel':19}{'dtype':9} {'float32':8}{'D, rule or loss':16}registers stack  shared programs/SM")
    for chip in map(int, sys.argv[1:] or CHIPS):
        for line, wrong in table(chip):
            print(line + (f"   WRONG: {', '.join(wrong)}" if wrong else ""), flush=True)
