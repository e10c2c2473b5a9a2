"""python -m kernels.benchmark: its rows, its table, its picture, and one line for bad flags."""
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from kernels import benchmark, benchmark_report

RESULT = Path(benchmark.__file__).parent / "results" / "cpu.json"
drawing = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


def test_rows_and_table(tmp_path, monkeypatch, capsys):
    """A row in a process of its own; the file is the table."""
    monkeypatch.setattr(benchmark, "matrix_peak", lambda dtype, device: 1e11)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(Path(benchmark.__file__).parent.parent)
    path = tmp_path / "rows.json"
    flags = "--loss info_nce --sizes 64x64x16 --impl blockwise --dtype float32 --repeat 3 --set trained"
    benchmark.main([*flags.split(), "--markdown", "--json", str(path)])
    result, said = json.loads(path.read_text()), capsys.readouterr().out
    row, = result["rows"]
    assert {"device", "torch", "date", "command"} <= set(result) and row["error"] < 1e-3
    assert 0 < row["ms_20"] <= row["ms"] <= row["ms_80"] and row["forward_ms"] > 0 and row["peak_percent"] > 0
    assert said.count("| trained |") == 1 and "| rows | blockwise |" in said


def test_every_loss_has_its_rows(capsys):
    """As a case's own process measures them: numbers, or the reason why there are none."""
    for loss in benchmark.PRODUCTS:
        impls = ["eager", "blockwise", "CCE", "nobody's"]
        benchmark.child(dict(loss=loss, size=[32, 32, 8], dtype="float32", device="cpu", repeat=1,
                             trained=False, peak=1.0, impls=impls))
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        *ours, cce, nobody = rows
        assert [row["impl"] for row in rows] == impls and nobody["failed"] == "has no such loss"
        assert all(row["error"] < 1e-3 and row["ms"] > 0 for row in ours)
        assert "failed" in cce or cce["ms"] > 0  # not installed, or wants a GPU


@pytest.mark.parametrize("flags, wanted", [
    ("--from none.json", "--from none.json: No such file or directory"),
    ("--from README.md", "--from README.md: wanted a file that --json wrote"),
    ("--from [].json", "--from [].json: wanted a file that --json wrote"),
    ("--from [].json --plot none/x.png", "none/x.png: its folder is not there, or cannot be written"),
    ("--json none/x.json", "none/x.json: its folder is not there, or cannot be written"),
    ("--sizes 4x4", "error: argument --sizes: 4x4: wanted N x M x D, as 4096x4096x128"),
    ("--sizes 4x4x4x", "error: argument --sizes: 4x4x4x: wanted N x M x D, as 4096x4096x128"),
    ("--repeat 0", "error: argument --repeat: 0: wanted a number of at least 1")])
def test_flags_are_refused(flags, wanted, tmp_path, monkeypatch, capsys):
    """In one line, before anything is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# A")
    (tmp_path / "[].json").write_text("[]")
    with pytest.raises(SystemExit) as end:
        benchmark.main(flags.split())
    out, error = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and error.splitlines()[-1].endswith(wanted)


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
    (tmp_path / "a.json").write_text(json.dumps(results(("nt_xent", [64, 64, 8], "random", "eager"))))
    with pytest.raises(SystemExit):
        benchmark.main(["--from", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")])
    assert capsys.readouterr().err.endswith(": --plot: no row has a time\n")
