"""Every Triton kernel compiled ahead of time for sm_80, sm_90 and sm_100: no GPU needed.

    python tests/test_compile.py        the table: registers, spills, shared memory, programs a multiprocessor

What must hold: nothing spills, shared memory is within the chip's limit, and half types run on the chip's own tensor
core instruction (mma.sync, wgmma, tcgen05).
"""
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHIPS = {80: ("mma.sync", 166_912), 90: ("wgmma", 232_448), 100: ("tcgen05", 232_448)}   # instruction, shared bytes a block
RULES = [("none", False), ("diagonal", False), ("pair", False), ("ids", False), ("none", True), ("ids", True)]
POINTERS = {"LSE": "fp32", "O": "fp32", "VALUES": "fp32", "PLACES": "i32", "GRAD": "fp32", "TEMPERATURE": "fp32", "ROW_IDS": "i64", "COLUMN_IDS": "i64", "ROW_GROUPS": "i64",
            "COLUMN_GROUPS": "i64"}                                           # W, Q, K have the rows' dtype
SM_REGISTERS, SM_SHARED = 65_536, {80: 167_936, 90: 233_472, 100: 233_472}    # of one multiprocessor


def cases():
    """(kernel, dtype name, rule, blocks) of everything that can be launched. In most kernels D is the bound of a loop and
    changes nothing; lse_fixed_keys holds a whole row."""
    import torch
    from kernels import lse_fixed_keys, lse_forward, lse_gradient, similarity, topk
    from kernels.rules import Rule
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for (name, precision), (exclude, within) in itertools.product(
            [("bf16", "high"), ("fp16", "high"), ("fp32", "high"), ("fp32", "highest")], RULES):
        torch.set_float32_matmul_precision(precision)
        x = torch.empty(1, 256, dtype=names[name])
        rule = Rule(row_ids=x if exclude == "ids" else None, row_groups=x if within else None)

        def case(kernel, blocks, **constants):
            return kernel, name, (exclude, within), {**blocks, **constants}

        yield case(lse_forward.lse_kernel, lse_forward.tile(x, rule))
        yield case(lse_gradient.weights_kernel, lse_forward.tile(x, rule), SHIFT=lse_gradient.SHIFT)
        if name != "fp16":                                     # as bf16 to the last register, see the two above
            for slots in (2, 16, 64):
                yield case(topk.topk_kernel, topk.block_sizes(x, rule), SLOTS=slots)
            for d in (16, 64, 128, 256):
                if d <= similarity.FIXED_KEYS_WIDEST[x.dtype]:
                    yield case(lse_fixed_keys.fixed_keys_kernel, lse_fixed_keys.block_sizes(x[:, :d], rule))


def compile_case(case, chip):
    """{name: value} of what the assembler made of a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel, dtype, (exclude, within), blocks = case
    options = {name: blocks[name] for name in ("num_warps", "num_stages", "maxnreg") if name in blocks} | {"enable_fp_fusion": True}
    constants = {"EXCLUDE": exclude, "WITHIN": within, **{name: value for name, value in blocks.items() if name not in options}}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = ("constexpr" if name in constants else f"*{POINTERS.get(name, dtype)}" if name.isupper()
                           and name not in "NMD" else "i32")
        if signature[name].startswith("*") or name in ("D", "q_row", "k_row"):     # see in_whole_words
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", chip, 32),
                          options=options)
    registers, stack = resources(made.asm["cubin"])
    shared, threads = made.metadata.shared, 32 * options["num_warps"]
    return dict(chip=chip, kernel=kernel.__name__, dtype=dtype, precision=blocks["PRECISION"], exclude=exclude, within=within,
                registers=registers, stack=stack, shared=shared, instruction=CHIPS[chip][0] in made.asm["ptx"],
                programs=min(SM_REGISTERS // (registers * threads), SM_SHARED[chip] // (shared + 1024)))


def resources(cubin):
    """(registers a thread, bytes of stack a thread: spills) that the assembler reports for a cubin of one kernel."""
    import triton
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def table():
    """Rows of compile_case for every case and chip; the assembler runs outside Python, so threads share the cores."""
    work = list(itertools.product(cases(), CHIPS))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: compile_case(*job), work))


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists on Linux only")
def test_no_spills_within_shared_memory_on_tensor_cores():
    # a process of its own: here the kernels were imported for the interpreter
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) > 100, "the table is missing"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    bad = 0
    print(f"{'chip':>5} {'kernel':18}{'dtype':6}{'precision':10}{'exclude':10}{'within':7}registers stack  shared programs/SM")
    for row in table():
        half = row["dtype"] != "fp32"
        wrong = row["stack"] or row["shared"] > CHIPS[row["chip"]][1] or half and not row["instruction"]
        bad += bool(wrong)
        print(f"sm_{row['chip']:<3}{row['kernel']:18}{row['dtype']:6}{row['precision']:10}{row['exclude']:10}{row['within']!s:7}"
              f"{row['registers']:9}{row['stack']:6}{row['shared']:8}{row['programs']:6}"
              + (f"   WRONG: wanted no stack, {CHIPS[row['chip']][0]}" if wrong else ""))
    sys.exit(bool(bad))
