"""python -m kernels.benchmark: its rows, its table, its picture, and one line for bad flags."""
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels.benchmark import measure as benchmark
from kernels.benchmark import report as benchmark_report
from kernels.paths import HAS_TRITON
from kernels.printing import program

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "kernels" / "results" / "cpu.json"
drawing = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


def test_rows_and_table(tmp_path, monkeypatch, capsys):
    """A row in a process of its own; the file is the table."""
    monkeypatch.setattr(benchmark, "matrix_peak", lambda dtype, device: 1e11)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)
    path = tmp_path / "rows.json"
    flags = "--loss info_nce --sizes 64x64x16 --impl blockwise --dtype float32 --repeat 3 --set trained"
    benchmark.main([*flags.split(), "--markdown", "--json", str(path)])
    result, said = json.loads(path.read_text()), capsys.readouterr().out
    row, = result["rows"]
    assert {"device", "torch", "date", "command"} <= set(result) and row["error"] < 1e-3
    assert 0 < row["ms_20"] <= row["ms"] <= row["ms_80"] and row["forward_ms"] > 0 and row["peak_percent"] > 0
    assert said.count("| trained |") == 1 and "| rows | blockwise |" in said


def case(folder, loss, impl):
    return dict(loss=loss, size=[32, 32, 8], dtype="float32", device="cpu", repeat=1, trained=False, peak=1.0,
                folder=str(folder), impl=impl)


def test_every_loss_has_its_rows(tmp_path, monkeypatch, capsys):
    """As a row's own process measures them: numbers, or the reason why there are none."""
    exact, ours = [], benchmark.ours
    monkeypatch.setattr(benchmark, "ours", lambda *asked: exact.append(asked) or ours(*asked))
    for loss in benchmark.PRODUCTS:
        (tmp_path / loss).mkdir()
        impls = ["eager", "blockwise", "CCE", "nobody's"]
        for impl in impls:
            benchmark.child(case(tmp_path / loss, loss, impl))
        rows = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
        *of_ours, cce, nobody = rows
        assert [row["impl"] for row in rows] == impls and nobody["failed"] == "has no such loss"
        assert all(row["error"] < 1e-3 and row["ms"] > 0 for row in of_ours)
        assert "failed" in cce or cce["ms"] > 0  # not installed, or wants a GPU
    assert exact == [(loss, "blockwise") for loss in benchmark.PRODUCTS]  # the float64 gradient, once a case


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="wants Triton's interpreter")
def test_an_interpreted_row_says_so(tmp_path, capsys):
    """In the file, in its line and in the table; of plain PyTorch there is nothing to say."""
    for impl, says in (("triton", True), ("blockwise", False)):
        benchmark.child(case(tmp_path, "info_nce", impl))
        row = dict(loss="info_nce", size=[32, 32, 8], set="random") | json.loads(capsys.readouterr().out)
        assert row["interpreted"] == says and row["error"] < 1e-3 and row["ms"] > 0
        assert (benchmark.cells(row)[-1] == "  interpreted") == says
        assert ("| interpreted: " in benchmark.markdown({"rows": [row]})) == says


@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "linear_cross_entropy"])
def test_both_losses_of_liger(loss, tmp_path, monkeypatch, capsys):
    """Called as its documentation has it: the plain one knows no temperature, the scaled one is a row's."""
    def plain(weight, x, target):
        return F.cross_entropy(x @ weight.T, target)

    def scaled(x, weight, target, temperature=1.0):
        return F.cross_entropy(x @ weight.T / temperature, target, reduction="none")

    of_rows = SimpleNamespace(LigerFusedLinearScaledCrossEntropyFunction=SimpleNamespace(apply=scaled))
    of_batch = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=lambda: plain)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", of_rows)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", of_batch)
    for impl in ("Liger", "Liger-scaled"):
        benchmark.child(case(tmp_path, loss, impl))
        assert json.loads(capsys.readouterr().out)["error"] < 1e-3


@pytest.mark.parametrize("loss", ["sigmoid_loss", "clip_loss"])
def test_siglip_kernel_has_the_scale_and_bias_of_ours(loss, tmp_path, monkeypatch, capsys):
    """Of another loss with as many products it is a marker, and has no error."""
    def fused_siglip_loss(q, k, log_scale, bias):
        match = 2 * torch.eye(len(q)) - 1
        return -F.logsigmoid(match * (q @ k.T * log_scale.exp() + bias)).sum() / len(q)

    monkeypatch.setitem(sys.modules, "siglip_kernel", SimpleNamespace(fused_siglip_loss=fused_siglip_loss))
    benchmark.child(case(tmp_path, loss, "siglip-kernel"))
    row = json.loads(capsys.readouterr().out)
    assert row["ms"] > 0 and (row["error"] < 1e-3 if loss == "sigmoid_loss" else "error" not in row)


@pytest.mark.parametrize("flags, wanted", [
    ("--from none.json", "--from none.json: No such file or directory"),
    ("--from README.md", "--from README.md: wanted a file that --json wrote"),
    ("--from [].json", "--from [].json: wanted a file that --json wrote"),
    ("--from [].json --plot none/x.png", "none/x.png: its folder is not there, or cannot be written"),
    ("--json none/x.json", "none/x.json: its folder is not there, or cannot be written"),
    ("--loss l2", "argument --loss: invalid choice: 'l2' (choose from NAMES)"),
    ("--impl cuda", "argument --impl: invalid choice: 'cuda' (choose from NAMES)"),
    ("--sizes 4x4", "argument --sizes: 4x4: wanted N x M x D, as 4096x4096x128"),
    ("--sizes 4x4x4x", "argument --sizes: 4x4x4x: wanted N x M x D, as 4096x4096x128"),
    ("--limit 1.5", "argument --limit: 1.5: wanted a number of at least 1"),
    ("--repeat 0", "argument --repeat: 0: wanted a number of at least 1")])
def test_flags_are_refused(flags, wanted, tmp_path, monkeypatch, capsys):
    """In one line, before anything is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# A")
    (tmp_path / "[].json").write_text("[]")
    with pytest.raises(SystemExit) as end:
        benchmark.main(flags.split())
    out, error = capsys.readouterr()
    name, said = error.split(": ", 1)
    assert (end.value.code, out, name) == (2, "", program())
    assert re.sub("choose from .*[)]", "choose from NAMES)", said) == wanted + "\n"


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────

HANGS = """
import os, subprocess, time
pids = os.getpid(), subprocess.Popen(["sleep", "999"]).pid
with open({0!r} + ".part", "w") as file:
    print(*pids, file=file)
os.rename({0!r} + ".part", {0!r})
time.sleep(999)
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Modules for a row's own process, in place of what is installed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(ROOT)

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
    return write


def hanging(path):
    """The ids of the processes that HANGS starts, once they are there."""
    began = time.time()
    while not path.exists():
        assert time.time() - began < 60
        time.sleep(0.05)
    return path.read_text().split()


def assert_gone(pids):
    """Ended, though whoever adopts one may not have waited for it yet."""
    began = time.time()
    while any(map(runs, pids)):
        assert time.time() - began < 10
        time.sleep(0.05)


def runs(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_fault_costs_one_row(packages, tmp_path, monkeypatch):
    """One that raises, crashes, is killed, ends its process; what comes after them has its numbers."""
    monkeypatch.setattr(benchmark, "matrix_peak", lambda dtype, device: 1e11)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    death = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    death += "print('a warning', file=sys.stderr, flush=True); "
    packages(memeff="raise RuntimeError('CUDA error: unspecified\\nCompile with TORCH_USE_CUDA_DSA')",
             inf_cl=death + "os.kill(os.getpid(), 11)", cut_cross_entropy=death + "os.kill(os.getpid(), 9)",
             siglip_kernel="import os; os._exit(3)", liger_kernel="raise AssertionError")
    impls, path = ["memeff", "Inf-CL", "CCE", "siglip-kernel", "Liger", "blockwise"], tmp_path / "rows.json"
    benchmark.main(["--loss", "clip_loss", "--sizes", "32x32x8", "--json", str(path), "--impl", *impls])
    *failed, last = json.loads(path.read_text())["rows"]
    assert [row["failed"] for row in failed] == ["CUDA error: unspecified", "Segmentation fault: a warning",
                                                 "does not fit in memory", "exit code 3", "AssertionError"]
    assert [row["impl"] for row in (*failed, last)] == impls and last["error"] < 1e-3


def test_time_limit(packages, tmp_path):
    """Ends the process and what it started; a row that was there before stays."""
    packages(torch=HANGS.format(str(tmp_path / "pids")))
    row = benchmark.run(case(tmp_path, "info_nce", "eager"), limit=3)
    assert row == {"impl": "eager", "failed": "time limit of 3 s"}
    assert_gone(hanging(tmp_path / "pids"))
    packages(torch="import time; print('{\"impl\": \"eager\", \"ms\": 1}', flush=True); time.sleep(999)")
    assert benchmark.run(case(tmp_path, "info_nce", "eager"), limit=1) == {"impl": "eager", "ms": 1}


def test_interrupt(packages, tmp_path):
    """Ctrl-C ends the process at work, which is in no terminal's foreground, and what it started."""
    packages(torch=HANGS.format(str(tmp_path / "pids")))
    interrupt = lambda: hanging(tmp_path / "pids") and signal.raise_signal(signal.SIGINT)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(case(tmp_path, "info_nce", "eager"), limit=60)
    assert_gone(hanging(tmp_path / "pids"))


def test_terminated(packages, tmp_path):
    """SIGTERM, of the command timeout say, does as Ctrl-C; the rows so far are in the file."""
    packages(cut_cross_entropy=HANGS.format(str(tmp_path / "pids")))
    flags = "--loss info_nce --sizes 32x32x8 --dtype float32 --impl blockwise CCE eager --json".split()
    command = [sys.executable, "-m", "kernels.benchmark", *flags, str(tmp_path / "rows.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    pids = hanging(tmp_path / "pids")
    process.terminate()
    assert process.wait(20) == 130
    assert_gone(pids)
    assert [row["impl"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["blockwise"]
    assert not list(tmp_path.glob("tmp*"))


# ── pictures ────────────────────────────────────────────────────────────────────────────────────────────────


def results(*rows):
    keys = "loss", "size", "set", "impl", "ms", "extra_mb"
    return dict(device="x", torch="2", date="today",
                rows=[dict(zip(keys, row)) | dict(dtype="float32") for row in rows])


def points(axis):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]


@drawing
def test_time_above_memory(monkeypatch):
    """A column for each loss and width with several sizes, by rising N, without trained and failed rows."""
    kept = []
    monkeypatch.setattr(benchmark_report, "save", lambda figure, path: kept.append(figure.axes))
    large, small = [512, 512, 8], [64, 64, 8]
    benchmark.plot(results(
        ("nt_xent", large, "random", "eager", 30, 60), ("nt_xent", small, "random", "eager", 1, 2),
        ("nt_xent", small, "trained", "eager", 9, 9), ("nt_xent", small, "random", "blockwise", 2, 0),
        ("nt_xent", large, "random", "blockwise", 10, 3), ("nt_xent", [999, 999, 8], "random", "eager"),
        ("clip_loss", small, "random", "eager", 1, 1)), "a.png")
    time, memory = kept[-1]
    assert points(time) == [([64, 512], [1, 30]), ([64, 512], [2, 10])] and time.get_title() == "nt_xent, D 8"
    assert points(memory) == [([64, 512], [2, 60]), ([64, 512], [2 ** -8, 3])]  # no zero on this scale
    assert [text.get_text() for text in time.texts] == ["30.0", "10.0"]
    assert time.get_xscale() == time.get_yscale() == "log"
    assert [text.get_text() for text in memory.get_xticklabels()] == ["64", "512"]
    benchmark.plot(results(("queue_loss", [64, 512, 8], "trained", "eager", 1, 1)), "a.png")  # its only size
    assert points(kept[-1][0]) == [([64], [1])] and kept[-1][0].get_title() == "queue_loss, D 8, M 512"


@drawing
def test_results_are_drawn(tmp_path):
    benchmark.main(["--from", str(RESULT), "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path, capsys):
    """A row without a time, and one whose time is the interpreter's."""
    case = "nt_xent", [64, 64, 8], "random"
    found = results((*case, "eager"), (*case, "triton", 1, 1))
    found["rows"][1]["interpreted"] = True
    (tmp_path / "a.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit):
        benchmark.main(["--from", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")])
    assert capsys.readouterr().err.endswith(": --plot: no row has a time\n")
