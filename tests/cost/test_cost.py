"""python -m kernels.cost: limits on instructions per tile, counted code path, arithmetic, errors."""
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# {kernel: {features D: most instructions per warp and tile on sm_90}}: the count with Triton 3.7, plus 5 %
LIMITS = {"bounded_sums_kernel": {128: 386, 768: 1480}, "small_d_kernel": {128: 461},
          "weights_kernel": {768: 2400}, "strip_kernel": {768: 1775},
          "frozen_keys_kernel": {128: 361}, "sigmoid_kernel": {768: 3346}}
# Numbers of rows are multiples of 16 and, for the kernels that are compiled quickly, other numbers too.
UNALIGNED = [("nt_xent", [32772, 32772, 128]), ("queue_loss", [4099, 65539, 128])]
CASES = [("nt_xent", [32768, 32768, 128]), ("nt_xent", [16384, 16384, 768]), ("info_nce", [8192, 8192, 768]),
         ("queue_loss", [4096, 65536, 128]), ("sigmoid_loss", [8192, 8192, 768]), *UNALIGNED]


@pytest.fixture
def cost(monkeypatch):
    """Return kernels.cost.predict, imported without TRITON_INTERPRET."""
    # Import the kernels before TRITON_INTERPRET is deleted, because other tests run them in the interpreter.
    for module in ("gradient", "lse_frozen_keys", "lse_forward", "fused_forward_backward", "sigmoid", "topk"):
        importlib.import_module(f"kernels.gpu.{module}")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from kernels.cost import predict
    return predict


def test_instructions_per_tile_stay_under_limits():
    """This file is run as a script in a new process, because Triton's interpreter is active in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True)
    seen, slack = Counter(), 1 if version("triton").startswith("3.7") else 1.2
    for loss, size, kernel, instructions in map(json.loads, done.stdout.splitlines()):
        limit = LIMITS.get(kernel, {}).get(size[2])
        if limit:
            seen[kernel, size[2], size[0] % 16 == 0] += 1
            assert 100 < instructions <= slack * limit, (loss, size, kernel)
    tiles = {(kernel, d, True) for kernel, limits in LIMITS.items() for d in limits}
    assert set(seen) == tiles | {(kernel, d, False) for kernel, d, _ in tiles if d == 128}


def test_host_time_of_small_batches():
    """Small batches start no kernel and no more operations than eager; --host prints one line for each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.cost", "--host", "--loss", "nt_xent"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    rows = re.findall(r"nt_xent +(\d+)" + 3 * r" +(\d+) \((\d+) \+ (\d+)\)" + r"  (\w+), [\d.]+ of eager",
                      done.stdout)
    assert [row[0] for row in rows] == ["64", "256", "1024"]
    for _, *eager, us, launches, operations, triton_us, triton_launches, _, auto in rows:
        assert eager[1] == launches == "0" and auto == "blockwise" and int(triton_launches) >= 2
        assert int(operations) <= int(eager[2]) and min(map(int, (us, triton_us))) > 0


SASS = """
 /*0000*/                   S2R R0, SR_TID.X ;                 /* 0x0 */
 /*0010*/              @!P0 BRA 0x00f0 ;                       /* 0x0 */
 /*0020*/                   MUFU.EX2 R1, R1 ;                  /* 0x0 */
 /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24 ;
 /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, R120, gdesc[UR16].tnspB, R24, gsb0 ;
 /*0050*/               @P1 BRA 0x0090 ;
 /*0060*/                   LDS.128 R4, [R2] ;
 /*0070*/                   LDS.128 R4, [R2] ;
 /*0080*/                   STG.E.64 desc[UR4][R2.64], R4 ;
 /*0090*/                   LDSM.16.M88.4 R8, [R3] ;
 /*00a0*/              @!P2 BRA 0x00e0 ;
 /*00b0*/               @P3 BRA 0x0020 ;
 /*00c0*/               @P4 EXIT ;
 /*00d0*/                   EXIT ;
 /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR9], RZ ;
 /*00e8*/              @!P2 BRA 0x00e0 ;
 /*00ec*/                   BRA 0x00b0 ;
 /*00f0*/                   EXIT ;
 /*0100*/                   BRA 0x0100;
"""


def test_counted_code_path():
    """The counted path through SASS enters the loop. Inside the loop it skips the masked block and the wait.
    It does not take the early exit, although this would be the shortest path."""
    from kernels.cost import sass
    blocks, successors = sass.control_flow(sass.LINE.findall(SASS))
    loops = sass.find_loops(blocks, successors)
    counts = {at: sass.count_block(block) for at, block in blocks.items()}
    path = sass.best_path(blocks, successors, loops, counts, "mma")
    assert path == [0x00, 0x20, 0x90, 0xb0, 0xc0, 0xd0] and list(loops) == [0x20]
    assert loops[0x20] == {0x20, 0x60, 0x90, 0xb0, 0xe0, 0xec}
    assert counts[0x20] == Counter(instructions=4, mma=2, mufu=32, tensor=2 * 64 * 192 * 16 // 4,
                                 shared=(64 + 128 + 64) * 32 // 4)
    assert counts[0x60] == Counter(instructions=3, shared=2 * 512, written=256)
    assert counts[0x90]["shared"] == 512
    assert sass.best_path(blocks, successors, loops, counts, "") == [0x00, 0xf0]


def test_tiles_per_multiprocessor(cost):
    """The tiles of each program and SM, and the use of SMs by cuBLAS, equal numbers computed by hand."""
    from kernels.cost.kernel_costs import busiest_sm, tiles_of_programs
    assert busiest_sm((7,) * 512, 132) == (4, 28) and busiest_sm((6, 1, 1, 1, 1, 1), 2) == (1, 6)
    assert tiles_of_programs(4, 4, 2, 1, True) == (1, 2, 2, 2, 0, 0, 1, 2)      # 4 tiles of x, 2 steps
    assert tiles_of_programs(2, 5, 4, 1, False) == (4, 4, 1, 1)

    def tensor_cycles(rows):
        return cost.product_cost(rows, 768, 8192, 2 ** 37, 0, cost.CHIPS["sm_90"])["cycles"]["tensor"]

    full_speed = 132 * 4096 * cost.CUBLAS_EFFICIENCY
    assert tensor_cycles(8192) == pytest.approx(2 ** 37 / full_speed)  # 192 tiles x 11 pieces = 16 x 132 SMs
    assert tensor_cycles(128) == pytest.approx(2 ** 37 / full_speed * 132 / 48)  # 3 tiles x 16 pieces: 48


def test_step_of_many_ranks(cost):
    """The costs equal numbers computed by hand: 8 ranks, 64 rows of 16 bf16 features, 2 gathered sides."""
    from kernels.cost import multi_gpu
    case = dict(d=16, size=2, sides=2, link=1e3, tflop=1e-9, peak=1e6, library=0.5)
    step = multi_gpu.step_costs(64, 8, **case)
    assert step[:3] == (8, 2 * 56 * 16 * 2, 2 * 56 * 16 * 4) and step.memory_bytes == 2 * (64 + 8) * 16 * 6
    assert step.gather_seconds == pytest.approx(2 * 56 * 16 * 6 / 1e3)
    assert step.loss_seconds == pytest.approx(2 * 8 * 64 * 16 * 8 / 5e5)
    assert step.encoder_seconds == pytest.approx(8e3 / 4e5)
    assert step.ring_extra_seconds == pytest.approx(2 * 56 * 16 * 8 / 1e3 - step.loss_seconds)
    assert step.ring_memory_bytes == 3 * 2 * 8 * 16 * 6
    alone = multi_gpu.step_costs(64, 1, **case)
    assert alone.gather_seconds == alone.ring_extra_seconds == 0 and alone.memory_bytes == 2 * 64 * 16 * 6
    chip = cost.CHIPS["sm_90"]
    steps = step, alone, step._replace(local_rows=0.5), step._replace(memory_bytes=71e9)
    many, one, *rest = (multi_gpu.format_shares(x, chip) for x in steps)
    assert many.endswith("!") and one.startswith("0.0+") and rest == ["-", "full"]
    assert [multi_gpu.format_count(x) for x in (2 ** 24, 2 ** 12, 65)] == ["16M", "4k", "65"]


def test_every_line_says_predicted(cost, tmp_path, monkeypatch, capsys):
    row = dict(kernel="small_d_kernel", launches=2, registers=128, waves=1.5, ms=3.0, bytes=1e9,
               cycles={"tensor": 5, "HBM": 9}, binds="HBM")
    result = dict(loss="info_nce", size=[64, 64, 8], dtype="bfloat16", chip="sm_90", ms=3.0, kernels=[row])
    monkeypatch.setattr(cost, "predict", lambda *case: result)
    path = tmp_path / "cost.json"
    cost.main(["--loss", "info_nce", "--size", "64x64x8", "--ranks", "64", "--json", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20 and all(line.startswith("predicted ") for line in lines)
    assert json.loads(path.read_text())["targets"] == [result]


def test_docs_show_the_saved_predictions(cost):
    """The table in docs/scale.md has the times of kernels/results/cost.json."""
    from kernels.cost.multi_gpu import three_digits
    shipped = json.loads((ROOT / "kernels/results/cost.json").read_text())
    targets = shipped["targets"]
    assert shipped["predicted"] and [(x["loss"], x["size"]) for x in targets] == cost.DEFAULT_CASES
    table = re.findall(r"^\| (\w+) \| .* \| ([\d.]+) \| .*\|$", (ROOT / "docs/scale.md").read_text(), re.M)
    assert table == [(x["loss"], three_digits(x["ms"])) for x in targets]


BOTH = "--loss, --size: expected both, or neither for six default cases; --ranks needs both"


@pytest.mark.parametrize("flags, expected", [
    ("--size 4x4", "argument --size: 4x4: expected N x M x D, for example 4096x4096x128"),
    ("--ranks 0", "argument --ranks: 0: expected a number of at least 1"),
    ("--link -1", "argument --link: -1: expected a number above 0"),
    ("--encoder-tflop x", "argument --encoder-tflop: invalid number value: 'x'"),
    ("--size 64x64x8", BOTH),
    ("--ranks 8", BOTH),
    ("--loss queue_loss --size 64x64x8 --ranks 8",
     "--ranks: expected a --loss that gathers keys: info_nce, nt_xent, clip_loss"),
    ("--loss info_nce --size 64x32x8",
     "--size 64x32x8: k: 32 rows, expected at least 64 + offset 0: one positive for each row of q"),
    ("--json none/x.json", "none/x.json: its folder does not exist or is not writable")])
def test_bad_flags_are_rejected(flags, expected, cost, capsys):
    with pytest.raises(SystemExit) as end:
        cost.main(flags.split())
    assert end.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(expected)


def test_interpreter_is_rejected(cost, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as end:
        cost.main([])
    assert end.value.code == 2 and "TRITON_INTERPRET" in capsys.readouterr().err


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from kernels.cost.predict import predict
    for loss, size in CASES:
        for row in predict(loss, size, "bfloat16", "sm_90")["kernels"]:
            print(json.dumps([loss, size, row["kernel"], row.get("instructions")]), flush=True)
