"""python -m kernels.cost: instructions a tile under their limits, arithmetic, one line for bad flags."""
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
# instructions of a warp and tile on sm_90 by the features of a row: what Triton 3.7 has, and 5 %
LIMITS = {"sums_kernel": {128: 386, 768: 1480}, "rows_kernel": {128: 461}, "weights_kernel": {768: 2400},
          "strip_kernel": {768: 1775}, "fixed_keys_kernel": {128: 361}, "sigmoid_kernel": {768: 3346}}
# 16 divides the rows, and does not
CASES = [("nt_xent", [32768, 32768, 128]), ("nt_xent", [32772, 32772, 128]), ("nt_xent", [16384, 16384, 768]),
         ("nt_xent", [16388, 16388, 768]), ("info_nce", [8192, 8192, 768]), ("info_nce", [8201, 8201, 768]),
         ("queue_loss", [4096, 65536, 128]), ("queue_loss", [4099, 65539, 128]),
         ("sigmoid_loss", [8192, 8192, 768]), ("sigmoid_loss", [8201, 8201, 768])]


@pytest.fixture
def cost(monkeypatch):
    for module in ("gradient", "lse_fixed_keys", "lse_forward", "one_pass", "sigmoid", "topk"):
        importlib.import_module(f"kernels.gpu.{module}")  # as the interpreter has them: other tests run them
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from kernels.cost import predict
    return predict


def test_instructions_of_tiles():
    """In a process of its own: here Triton is the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True)
    seen, slack = Counter(), 1 if version("triton").startswith("3.7") else 1.2
    for loss, size, kernel, instructions in map(json.loads, done.stdout.splitlines()):
        if limit := LIMITS.get(kernel, {}).get(size[2]):
            seen[kernel, size[2], size[0] % 16 == 0] += 1
            assert 100 < instructions <= slack * limit, (loss, size, kernel)
    assert set(seen) == {(*tile, even) for tile in [(kernel, d) for kernel, limits in LIMITS.items()
                                                    for d in limits] for even in (True, False)}


LISTING = """
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


def test_way_through_a_listing():
    """Round the loop, past the mask and the wait; neither the early end nor the shortest."""
    from kernels.cost import listing
    blocks, follow = listing.flow(listing.LINE.findall(LISTING))
    loops = listing.loops_of(blocks, follow)
    does = {at: listing.work(block) for at, block in blocks.items()}
    way = listing.best_way(blocks, follow, loops, does, "mma")
    assert way == [0x00, 0x20, 0x90, 0xb0, 0xc0, 0xd0] and list(loops) == [0x20]
    assert loops[0x20] == {0x20, 0x60, 0x90, 0xb0, 0xe0, 0xec}
    assert does[0x20] == Counter(instructions=4, mma=2, mufu=32, tensor=2 * 64 * 192 * 16 // 4,
                                 shared=(64 + 128 + 64) * 32 // 4)
    assert does[0x60] == Counter(instructions=3, shared=2 * 512, written=256) and does[0x90]["shared"] == 512
    assert listing.best_way(blocks, follow, loops, does, "") == [0x00, 0xf0]


def test_the_busiest_multiprocessor(cost):
    from kernels.cost.kernel_costs import busiest, walked
    assert busiest((7,) * 512, 132) == (4, 28) and busiest((6, 1, 1, 1, 1, 1), 2) == (1, 6)
    assert walked(4, 4, 2, 1, True) == (1, 2, 2, 2, 0, 0, 1, 2)                 # columns 0 to 3, twice
    assert walked(2, 5, 4, 1, False) == (4, 4, 1, 1)
    of = lambda rows: cost.product_cost(rows, 768, 8192, 2 ** 37, 0, cost.CHIPS["sm_90"])["cycles"]["tensor"]
    assert of(8192) == pytest.approx(2 ** 37 / (132 * 4096 * cost.LIBRARY))      # 192 tiles in 11 pieces
    assert of(128) == pytest.approx(of(8192) * 132 / 48)                         # 3 tiles in 16


def test_a_step_of_many_ranks(cost):
    """By hand: 8 ranks, 64 rows of 16 bf16 features, 2 sides."""
    from kernels.cost import scale
    case = dict(d=16, size=2, sides=2, link=1e3, tflop=1e-9, peak=1e6, library=0.5)
    at = scale.step(64, 8, **case)
    assert at[:3] == (8, 2 * 56 * 16 * 2, 2 * 56 * 16 * 4) and at.memory == 2 * (64 + 8) * 16 * 6
    assert at.gather == pytest.approx(2 * 56 * 16 * 6 / 1e3)
    assert at.loss == pytest.approx(2 * 8 * 64 * 16 * 8 / 5e5) and at.encoder == pytest.approx(8e3 / 4e5)
    assert at.ring == pytest.approx(2 * 56 * 16 * 8 / 1e3 - at.loss) and at.ring_memory == 3 * 2 * 8 * 16 * 6
    alone = scale.step(64, 1, **case)
    assert alone.gather == alone.ring == 0 and alone.memory == 2 * 64 * 16 * 6
    chip = cost.CHIPS["sm_90"]
    steps = at, alone, at._replace(own=0.5), at._replace(memory=71e9)
    many, one, *rest = (scale.verdict(x, chip) for x in steps)
    assert many.endswith("!") and one.startswith("0.0+") and rest == ["-", "full"]
    assert [scale.named(x) for x in (2 ** 24, 2 ** 12, 65)] == ["16M", "4k", "65"]


def test_every_line_says_predicted(cost, tmp_path, monkeypatch, capsys):
    row = dict(kernel="rows_kernel", launches=2, registers=128, waves=1.5, ms=3.0, bytes=1e9,
               cycles={"tensor": 5, "HBM": 9}, binds="HBM")
    result = dict(loss="info_nce", size=[64, 64, 8], dtype="bfloat16", chip="sm_90", ms=3.0, kernels=[row])
    monkeypatch.setattr(cost, "predict", lambda *case: result)
    path = tmp_path / "cost.json"
    cost.main(["--loss", "info_nce", "--size", "64x64x8", "--ranks", "64", "--json", str(path)])
    said = capsys.readouterr().out.splitlines()
    assert len(said) > 20 and all(line.startswith("predicted ") for line in said)
    assert json.loads(path.read_text())["targets"] == [result]


def test_what_is_shipped(cost):
    """The predictions in docs/scale.md are those of the file."""
    from kernels.cost.scale import short
    shipped = json.loads((ROOT / "kernels/results/cost.json").read_text())
    targets = shipped["targets"]
    assert shipped["predicted"] and [(x["loss"], x["size"]) for x in targets] == cost.TARGETS
    table = re.findall(r"^\| (\w+) \| .* \| ([\d.]+) \| .*\|$", (ROOT / "docs/scale.md").read_text(), re.M)
    assert table == [(x["loss"], short(x["ms"])) for x in targets]


@pytest.mark.parametrize("flags, wanted", [
    ("--size 4x4", "argument --size: 4x4: wanted N x M x D, as 4096x4096x128"),
    ("--ranks 0", "argument --ranks: 0: wanted a number of at least 1"),
    ("--link -1", "argument --link: -1: wanted a number above 0"),
    ("--encoder-tflop x", "argument --encoder-tflop: invalid number value: 'x'"),
    ("--size 64x64x8", "--loss, --size: wanted both, or none for the six targets; --ranks wants them"),
    ("--ranks 8", "--loss, --size: wanted both, or none for the six targets; --ranks wants them"),
    ("--loss queue_loss --size 64x64x8 --ranks 8",
     "--ranks: wanted --loss info_nce, nt_xent, clip_loss, whose keys are gathered"),
    ("--loss info_nce --size 64x32x8",
     "--size 64x32x8: k: 32 rows, wanted at least 64 + offset 0: one positive for each row of q"),
    ("--json none/x.json", "none/x.json: its folder is not there, or cannot be written")])
def test_flags_are_refused(flags, wanted, cost, capsys):
    with pytest.raises(SystemExit) as end:
        cost.main(flags.split())
    assert end.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(wanted)


def test_the_interpreter_compiles_nothing(cost, monkeypatch, capsys):
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
