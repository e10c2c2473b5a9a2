"""python -m kernels.benchmark: results, table, plot, one-line errors, crashes of the measuring process."""
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

from kernels.benchmark import gather
from kernels.benchmark import measure as benchmark
from kernels.benchmark import report as benchmark_report
from kernels.heuristics import HAS_TRITON
from kernels.printing import program_name

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "kernels" / "results" / "cpu.json"
needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")


def test_saved_result_and_printed_table(tmp_path, monkeypatch, capsys):
    """One result, measured in its own process, saved as JSON and printed as a markdown table."""
    monkeypatch.setattr(benchmark, "matmul_flops", lambda dtype, device: 1e11)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)
    path = tmp_path / "rows.json"
    flags = "--loss info_nce --sizes 64x64x16 --impl blockwise --dtype float32 --repeat 3 --set trained"
    benchmark.main([*flags.split(), "--markdown", "--json", str(path)])
    result, output = json.loads(path.read_text()), capsys.readouterr().out
    row, = result["rows"]
    assert {"device", "torch", "date", "command"} <= set(result) and row["error"] < 1e-3
    assert 0 < row["ms_20"] <= row["ms"] <= row["ms_80"] and row["forward_ms"] > 0 and row["peak_percent"] > 0
    assert output.count("| trained |") == 1 and "| set | blockwise |" in output


def case(folder, loss, impl):
    return dict(loss=loss, size=[32, 32, 8], dtype="float32", device="cpu", repeat=1, trained=False, peak=1.0,
                folder=str(folder), impl=impl)


def test_every_loss_has_results(tmp_path, monkeypatch, capsys):
    """A result has numbers or the reason why it failed. The float64 gradient is computed once per case."""
    calls, our_loss = [], benchmark.our_loss

    def record(*args):
        calls.append(args)
        return our_loss(*args)

    monkeypatch.setattr(benchmark, "our_loss", record)
    for loss in benchmark.MIN_FLOP:
        (tmp_path / loss).mkdir()
        impls = ["eager", "blockwise", "auto", "CCE", "unknown"]
        for impl in impls:
            benchmark.print_result(case(tmp_path / loss, loss, impl))
        rows = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
        *ours, cce, unknown = rows
        assert [row["impl"] for row in rows] == impls and unknown["failed"] == "does not have this loss"
        assert all(row["error"] < 1e-3 and row["ms"] > 0 for row in ours)
        assert "failed" in cce or cce["ms"] > 0  # not installed, or needs a GPU
    assert calls == [(loss, "blockwise") for loss in benchmark.MIN_FLOP]


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_results_of_the_interpreter_are_marked(tmp_path, capsys):
    """The saved result, the printed line and the table have a mark. Plain PyTorch is not marked."""
    for impl, is_marked in (("triton", True), ("blockwise", False)):
        benchmark.print_result(case(tmp_path, "info_nce", impl))
        row = dict(loss="info_nce", size=[32, 32, 8], set="random") | json.loads(capsys.readouterr().out)
        assert row["interpreted"] == is_marked and row["error"] < 1e-3 and row["ms"] > 0
        assert (benchmark.cells(row)[-1] == "  interpreted") == is_marked
        assert ("| interpreted: " in benchmark.markdown({"rows": [row]})) == is_marked


@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "linear_cross_entropy"])
def test_both_losses_of_liger_are_called_correctly(loss, tmp_path, monkeypatch, capsys):
    """In Liger's documentation, the plain loss has no temperature; the scaled one returns a loss per row."""
    def plain(weight, x, target):
        return F.cross_entropy(x @ weight.T, target)

    def scaled(x, weight, target, temperature=1.0):
        return F.cross_entropy(x @ weight.T / temperature, target, reduction="none")

    ops = SimpleNamespace(LigerFusedLinearScaledCrossEntropyFunction=SimpleNamespace(apply=scaled))
    transformers = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=lambda: plain)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    for impl in ("Liger", "Liger-scaled"):
        benchmark.print_result(case(tmp_path, loss, impl))
        assert json.loads(capsys.readouterr().out)["error"] < 1e-3


@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "linear_cross_entropy"])
def test_quack_is_called_correctly(loss, tmp_path, monkeypatch, capsys):
    """QuACK's loss takes x (N, D), weight (M, D) and targets, and has no temperature."""
    def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096):
        return F.cross_entropy(x @ weight.T, target)

    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy",
                        SimpleNamespace(chunked_linear_cross_entropy=chunked_linear_cross_entropy))
    benchmark.print_result(case(tmp_path, loss, "QuACK"))
    assert json.loads(capsys.readouterr().out)["error"] < 1e-3


@pytest.mark.parametrize("loss", ["sigmoid_loss", "clip_loss"])
def test_siglip_kernel_gets_our_scale_and_bias(loss, tmp_path, monkeypatch, capsys):
    """This kernel's loss is not quite clip_loss: there its time is measured, but not its error."""
    def fused_siglip_loss(q, k, log_scale, bias):
        match = 2 * torch.eye(len(q)) - 1
        return -F.logsigmoid(match * (q @ k.T * log_scale.exp() + bias)).sum() / len(q)

    monkeypatch.setitem(sys.modules, "siglip_kernel", SimpleNamespace(fused_siglip_loss=fused_siglip_loss))
    benchmark.print_result(case(tmp_path, loss, "siglip-kernel"))
    row = json.loads(capsys.readouterr().out)
    assert row["ms"] > 0 and (row["error"] < 1e-3 if loss == "sigmoid_loss" else "error" not in row)


@pytest.mark.parametrize("flags, expected", [
    ("--from none.json", "--from none.json: No such file or directory"),
    ("--from README.md", "--from README.md: not a file of results; expected one that --json wrote"),
    ("--from [].json", "--from [].json: not a file of results; expected one that --json wrote"),
    ("--from [].json --plot none/x.png", "none/x.png: its folder does not exist or is not writable"),
    ("--json none/x.json", "none/x.json: its folder does not exist or is not writable"),
    ("--loss l2", "argument --loss: invalid choice: 'l2' (choose from NAMES)"),
    ("--impl cuda", "argument --impl: invalid choice: 'cuda' (choose from NAMES)"),
    ("--sizes 4x4", "argument --sizes: 4x4: expected N x M x D, for example 4096x4096x128"),
    ("--sizes 4x4x4x", "argument --sizes: 4x4x4x: expected N x M x D, for example 4096x4096x128"),
    ("--limit 1.5", "argument --limit: 1.5: expected a number of at least 1"),
    ("--repeat 0", "argument --repeat: 0: expected a number of at least 1")])
def test_bad_flags_are_rejected(flags, expected, tmp_path, monkeypatch, capsys):
    """The message is one line, and comes before anything is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# A")
    (tmp_path / "[].json").write_text("[]")
    with pytest.raises(SystemExit) as end:
        benchmark.main(flags.split())
    out, error = capsys.readouterr()
    name, message = error.split(": ", 1)
    assert (end.value.code, out, name) == (2, "", program_name())
    assert re.sub("choose from .*[)]", "choose from NAMES)", message) == expected + "\n"


# ── failures of the measuring process ───────────────────────────────────────────────────────────────────────

# A module that starts a child process, writes both process ids to a file, and sleeps
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
    """Return a function that writes modules, which hide installed packages from the measuring process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(ROOT)

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
    return write


def wait_for_pids(path):
    """Wait for the file that HANGS writes, and return its process ids."""
    began = time.time()
    while not path.exists():
        assert time.time() - began < 60
        time.sleep(0.05)
    return path.read_text().split()


def assert_gone(pids):
    """Assert that the processes end within ten seconds. They may remain as zombies until they are reaped."""
    began = time.time()
    while any(map(is_running, pids)):
        assert time.time() - began < 10
        time.sleep(0.05)


def is_running(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_failure_costs_one_result(packages, tmp_path, monkeypatch):
    """An exception, a crash, a kill or an exit in one result does not affect those after it."""
    monkeypatch.setattr(benchmark, "matmul_flops", lambda dtype, device: 1e11)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prefix = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    prefix += "print('a warning', file=sys.stderr, flush=True); "
    packages(memeff="raise RuntimeError('CUDA error: unspecified\\nCompile with TORCH_USE_CUDA_DSA')",
             inf_cl=prefix + "os.kill(os.getpid(), 11)", cut_cross_entropy=prefix + "os.kill(os.getpid(), 9)",
             siglip_kernel="import os; os._exit(3)", liger_kernel="raise AssertionError")
    impls, path = ["memeff", "Inf-CL", "CCE", "siglip-kernel", "Liger", "blockwise"], tmp_path / "rows.json"
    benchmark.main(["--loss", "clip_loss", "--sizes", "32x32x8", "--json", str(path), "--impl", *impls])
    *failed, last = json.loads(path.read_text())["rows"]
    assert [row["failed"] for row in failed] == ["CUDA error: unspecified", "Segmentation fault: a warning",
                                                 "does not fit in memory", "exit code 3", "AssertionError"]
    assert [row["impl"] for row in (*failed, last)] == impls and last["error"] < 1e-3


def test_time_limit(packages, tmp_path):
    """The process and its child are killed. A result that was printed before the limit is kept."""
    packages(torch=HANGS.format(str(tmp_path / "pids")))
    row = benchmark.run_case(case(tmp_path, "info_nce", "eager"), limit=3)
    assert row == {"impl": "eager", "failed": "exceeds the time limit of 3 s"}
    assert_gone(wait_for_pids(tmp_path / "pids"))
    packages(torch="import time; print('{\"impl\": \"eager\", \"ms\": 1}', flush=True); time.sleep(999)")
    assert benchmark.run_case(case(tmp_path, "info_nce", "eager"), limit=1) == {"impl": "eager", "ms": 1}


def test_interrupt(packages, tmp_path):
    """Ctrl-C also kills the process that measures, which has its own process group, and its child."""
    packages(torch=HANGS.format(str(tmp_path / "pids")))

    def interrupt():
        wait_for_pids(tmp_path / "pids")
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        benchmark.run_case(case(tmp_path, "info_nce", "eager"), limit=60)
    assert_gone(wait_for_pids(tmp_path / "pids"))


def test_sigterm(packages, tmp_path):
    """SIGTERM, for example from the command `timeout`, acts like Ctrl-C; finished results are in the file."""
    packages(cut_cross_entropy=HANGS.format(str(tmp_path / "pids")))
    flags = "--loss info_nce --sizes 32x32x8 --dtype float32 --impl blockwise CCE eager --json".split()
    command = [sys.executable, "-m", "kernels.benchmark", *flags, str(tmp_path / "rows.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    pids = wait_for_pids(tmp_path / "pids")
    process.terminate()
    assert process.wait(20) == 130
    assert_gone(pids)
    assert [row["impl"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["blockwise"]
    assert not list(tmp_path.glob("tmp*"))


# ── plots ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_results(*rows):
    """Return what --json would save for rows (loss, size, set, impl, ms, extra MB)."""
    keys = "loss", "size", "set", "impl", "ms", "extra_mb"
    return dict(device="x", torch="2", date="today",
                rows=[dict(zip(keys, row)) | dict(dtype="float32") for row in rows])


def points(axis):
    """Return [(x values, y values)] of the lines in a panel."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]


@needs_matplotlib
def test_panels_of_time_and_memory(monkeypatch):
    """Losses with several sizes are plotted, sorted by N, without failed results, for one set of inputs."""
    figures = []
    monkeypatch.setattr(benchmark_report, "save_figure", lambda figure, path: figures.append(figure.axes))
    large, small = [512, 512, 8], [64, 64, 8]
    benchmark.plot(make_results(
        ("nt_xent", large, "random", "eager", 30, 60), ("nt_xent", small, "random", "eager", 1, 2),
        ("nt_xent", small, "trained", "eager", 9, 9), ("nt_xent", small, "random", "blockwise", 2, 0),
        ("nt_xent", large, "random", "blockwise", 10, 3), ("nt_xent", [999, 999, 8], "random", "eager"),
        ("clip_loss", small, "random", "eager", 1, 1)), "a.png")
    time, memory = figures[-1]
    assert points(time) == [([64, 512], [1, 30]), ([64, 512], [2, 10])] and time.get_title() == "nt_xent, D 8"
    assert points(memory) == [([64, 512], [2, 60]), ([64, 512], [2 ** -8, 3])]  # not 0 on a logarithmic axis
    assert [text.get_text() for text in time.texts] == ["30.0", "10.0"]
    assert time.get_xscale() == time.get_yscale() == "log"
    assert [text.get_text() for text in memory.get_xticklabels()] == ["64", "512"]
    benchmark.plot(make_results(("queue_loss", [64, 512, 8], "trained", "eager", 1, 1)), "a.png")
    assert points(figures[-1][0]) == [([64], [1])] and figures[-1][0].get_title() == "queue_loss, D 8, M 512"


@needs_matplotlib
def test_shipped_results_are_plotted(tmp_path):
    benchmark.main(["--from", str(RESULT), "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_plot(tmp_path, capsys):
    """One result has no time. The time of the other is that of Triton's interpreter, which does not count."""
    case = "nt_xent", [64, 64, 8], "random"
    found = make_results((*case, "eager"), (*case, "triton", 1, 1))
    found["rows"][1]["interpreted"] = True
    (tmp_path / "a.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit):
        benchmark.main(["--from", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")])
    assert capsys.readouterr().err.endswith(": --plot: no result has a time\n")


def test_gather_is_measured_between_processes(capfd):
    gather.main(["--rows", "9", "--features", "4", "--processes", "2"])
    head, _, *rows = capfd.readouterr().out.splitlines()
    assert head.startswith("gather   9 × 4 float32 over 2 processes, gloo, ")
    directions = [row.split()[:2] for row in rows]
    assert directions == [[sent, way] for sent in ("float32", "float16") for way in ("forward", "backward")]
    for flags in (["--rows", "0"], ["--rows", "3"], ["--rows", "x"]):
        with pytest.raises(SystemExit, match="2"):
            gather.main(flags)
        assert re.fullmatch(r".*: .*--rows.*\n", capfd.readouterr().err)
