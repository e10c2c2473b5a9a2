"""python -m kernels.pictures and --plot of the benchmark: what is read, what is drawn, and one line where neither can be."""
import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from kernels import benchmark, pictures

DATA = Path(__file__).parent / "data"
drawing = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


def write_run(folder, rows, before=None, args=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "args.json").write_text(json.dumps(args or {}))
    if before:
        torch.save({"progress": {"step": 4, "before": before, "best": None}, "model": {}}, folder / "state.pt")
    return str(folder)


def curve(steps=4, **dev):
    """Loss 10 / step; every second step has the scores, each times the step."""
    return [{"step": i, "loss": 10 / i} | {f"dev_{key}": value * i for key, value in dev.items() if i % 2 == 0} for i in range(1, steps + 1)]


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the last picture, which is not written."""
    kept = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: kept.append(figure))
    monkeypatch.setattr(benchmark, "save", lambda figure, path: kept.append(figure))
    return lambda: kept[-1].axes


def points(axis):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]


# ── what is drawn ──


@drawing
def test_loss_and_score(tmp_path, drawn):
    """Several folders are lines of one colour each, with their names; a run without scores is in the first panel alone."""
    folders = [write_run(tmp_path / "one", curve(spearman=10), dict(spearman=5.0)), write_run(tmp_path / "two", curve(2)),
               write_run(tmp_path / "three", curve(knn=7))]
    pictures.main([*folders, "--save", "a.png"])
    loss, score = drawn()
    assert points(loss) == [([1, 2, 3, 4], [10, 5, 10 / 3, 2.5]), ([1, 2], [10, 5]), ([1, 2, 3, 4], [10, 5, 10 / 3, 2.5])]
    assert points(score) == [([0, 2, 4], [5, 20, 40]), ([2, 4], [14, 28])]           # the first one begins before training
    assert [line.get_color() for line in score.lines] == [loss.lines[i].get_color() for i in (0, 2)] == ["C0", "C2"]
    assert [text.get_text() for text in loss.figure.legends[0].texts] == ["one", "two", "three"]
    assert (loss.get_xlabel(), score.get_ylabel()) == ("step", "dev Spearman · 100 or dev kNN, %")


@drawing
def test_plane_in_order(tmp_path, drawn):
    folder = write_run(tmp_path / "run", curve(8, spearman=1, alignment=0.1, uniformity=-1), dict(spearman=0.0, alignment=0.9, uniformity=-0.5))
    pictures.main([folder, "--save", "a.png"])
    _, _, plane = drawn()
    path, first, last = points(plane)
    assert path == ([-0.5, -2, -4, -6, -8], pytest.approx([0.9, 0.2, 0.4, 0.6, 0.8]))
    assert (first, last) == (([-0.5], [0.9]), ([-8], [0.8])) and plane.lines[1].get_markerfacecolor() == "white"
    assert [(text.get_text(), text.xy[0]) for text in plane.texts] == [("step 0", -0.5), ("4", -4), ("8", -8)]
    assert plane.get_xlabel() == "uniformity (lower is better)" and plane.get_ylabel() == "alignment (lower is better)"


@drawing
@pytest.mark.parametrize("before", [None, dict(accuracy=1.0, similarity=[0.9, 0.8, 0.7])])
def test_layers_before_and_after(tmp_path, drawn, before):
    rows = [dict(step=1, loss=3.0, dev_accuracy=2.0, dev_similarity=[0.5, 0.5, 0.6]), dict(step=2, loss=2.0, dev_accuracy=3.0, dev_similarity=[0.1, 0.2, 0.3])]
    pictures.main([write_run(tmp_path / "tacl", rows, before), "--save", "a.png"])
    _, score, layers = drawn()
    assert points(score) == [([0, 1, 2], [1, 2, 3]) if before else ([1, 2], [2, 3])]
    assert [values for _, values in points(layers)] == [[0.9, 0.8, 0.7]] * bool(before) + [[0.1, 0.2, 0.3]]


@drawing
def test_runs_of_one_folder(tmp_path, drawn):
    """Child-Tuning's steps run on from one run to the next; the score is the metric that it compares by."""
    rows = [dict(step=step, loss=1.0, mode=mode, seed=seed, dev_accuracy=0.0, dev_matthews=float(step))
            for step, mode, seed in ((2, "F", 1), (4, "F", 1), (6, "F", 2), (8, "F", 2), (10, "D", 1), (12, "D", 1))]
    pictures.main([write_run(tmp_path / "rte", rows, args=dict(metric="matthews")), "--save", "a.png"])
    loss, score = drawn()
    assert points(score) == [([2, 4], [2, 4]), ([2, 4], [6, 8]), ([2, 4], [10, 12])]
    assert [line.get_color() for line in loss.lines] == ["C0", "C0", "C1"] and score.get_ylabel() == "dev Matthews · 100"
    assert [text.get_text() for text in loss.figure.legends[0].texts] == ["rte F", "rte D"]


@pytest.mark.parametrize("name, data, score, panels", [
    ("simcse", ["nli.csv", "--dev", DATA / "sts.tsv"], "spearman", 3), ("ease", ["entities.tsv", "--dev", DATA / "sts.tsv"], "spearman", 3),
    ("childtuning", ["topics.tsv", "--dev", DATA / "topics_dev.tsv"], "accuracy", 2),
    ("simclr", ["shapes.npz", "--model", "resnet-small", "--probe-epochs", 0], "knn", 2)])
def test_what_scripts_write(name, data, score, panels, tmp_path):
    flags = ["--model", "scratch", "--data", DATA / data[0], *data[1:], "--batch-size", 8, "--steps", 2, "--eval-every", 1, "--out", tmp_path / "out"]
    importlib.import_module(name).main([*map(str, flags)])
    (label, *run), = pictures.read_runs(tmp_path / "out", "out")
    assert label == ("out D" if name == "childtuning" else "out") and pictures.score_of(*run) == score
    steps, values = pictures.columns(run[1], "step", f"dev_{score}")
    assert steps == [0, 1, 2][name == "childtuning":] and len(values) == len(steps)
    assert sum(bool(wants(*run)) for _, wants in pictures.PANELS) == panels


@drawing
def test_folders_of_one_name_keep_their_path(tmp_path, drawn, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures.main([write_run(Path("a/out"), curve()), write_run(Path("b/out"), curve()), "--save", "a.png"])
    assert [text.get_text() for text in drawn()[0].figure.legends[0].texts] == ["a/out", "b/out"]


@drawing
@pytest.mark.parametrize("name, magic", [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_a_picture_is_written(name, magic, tmp_path):
    pictures.main([write_run(tmp_path / "run", curve(spearman=1, alignment=1, uniformity=-1)), "--save", str(tmp_path / name)])
    assert (tmp_path / name).read_bytes().startswith(magic) and (tmp_path / name).stat().st_size < 80_000


def bench(*rows):
    return dict(device="x", torch="2", date="today", rows=[
        dict(loss=loss, size=size, set=kind, dtype="float32", impl=impl) | ({"failed": "does not fit"} if ms is None else {"ms": ms, "extra_mb": mb})
        for loss, size, kind, impl, ms, mb in rows])


@drawing
def test_benchmark_has_time_above_memory(drawn):
    """A column for each loss and width with several sizes, by rising N; trained rows and what failed are left out."""
    benchmark.plot(bench(("nt_xent", [512, 512, 8], "random", "eager", 30, 60), ("nt_xent", [64, 64, 8], "random", "eager", 1, 2),
                         ("nt_xent", [64, 64, 8], "trained", "eager", 9, 9), ("nt_xent", [64, 64, 8], "random", "blockwise", 2, 0),
                         ("nt_xent", [512, 512, 8], "random", "blockwise", 10, 3), ("nt_xent", [999, 999, 8], "random", "eager", None, None),
                         ("clip_loss", [64, 64, 8], "random", "eager", 1, 1)), "a.png")
    time, memory = drawn()
    assert points(time) == [([64, 512], [1, 30]), ([64, 512], [2, 10])] and time.get_title() == "nt_xent, D 8"
    assert points(memory) == [([64, 512], [2, 60]), ([64, 512], [2 ** -8, 3])]                 # no zero on this scale
    assert [text.get_text() for text in time.texts] == ["30.0", "10.0"] and time.get_xscale() == time.get_yscale() == "log"
    assert [text.get_text() for text in memory.get_xticklabels()] == ["64", "512"]
    benchmark.plot(bench(("queue_loss", [64, 512, 8], "trained", "eager", 1, 1)), "a.png")     # the only size there is
    assert points(drawn()[0]) == [([64], [1])] and drawn()[0].get_title() == "queue_loss, D 8, M 512"


@drawing
def test_benchmark_draws_its_results(tmp_path):
    source = Path(benchmark.__file__).parent / "results" / "cpu.json"
    benchmark.main(["--from", str(source), "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ── bad input ──


def refuse(capsys, wanted, argv, main=pictures.main):
    with pytest.raises(SystemExit) as end:
        main(argv)
    err = capsys.readouterr().err
    assert end.value.code == 2 and re.fullmatch(rf"[^\s:]+: {wanted}\n", err), err             # . fits no newline: one line


def change(file, content):
    return lambda run: (run / file).write_bytes(content) if content is not None else (run / file).unlink()


@pytest.mark.parametrize("damage, wanted", [
    (change("metrics.jsonl", None), r"run/metrics\.jsonl: No such file or directory; wanted the --out folder of a run"),
    (change("args.json", None), r"run/args\.json: No such file or directory; wanted the --out folder of a run"),
    (change("metrics.jsonl", b""), r"run/metrics\.jsonl: empty; the run has reported no step yet"),
    (change("metrics.jsonl", b'{"step": 1, "loss": 2}\n{"step": 2, "lo'), r"run/metrics\.jsonl line 2: damaged; .*, found '\{\"step\": 2, \"lo'"),
    (change("metrics.jsonl", b'{"step": 1}\n'), r"run/metrics\.jsonl line 1: damaged; wanted a JSON object with step and loss, .*"),
    (change("metrics.jsonl", b'[1, 2]\n'), r"run/metrics\.jsonl line 1: damaged; .*"),
    (change("metrics.jsonl", b'{"step": "1", "loss": "2"}\n'), r"run/metrics\.jsonl line 1: damaged; .*"),
    (change("metrics.jsonl", b'\n'), r"run/metrics\.jsonl line 1: damaged; .*"),
    (change("metrics.jsonl", b'\xff\n'), r"run: metrics\.jsonl is no text, or args\.json is damaged"),
    (change("args.json", b'{"metric"'), r"run: metrics\.jsonl is no text, or args\.json is damaged"),
    (change("args.json", b'[]'), r"run: metrics\.jsonl is no text, or args\.json is damaged"),
    (change("state.pt", b'PK'), r"run/state\.pt: damaged \(\w+\); without this file the picture begins at the first evaluation"),
])
def test_damaged_folder(damage, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), curve(spearman=1), dict(spearman=0.0))
    damage(Path("run"))
    refuse(capsys, wanted, ["run", "--save", "a.png"])
    assert not Path("a.png").exists()


def test_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    refuse(capsys, r"none/metrics\.jsonl: No such file or directory; wanted the --out folder of a run", ["none", "--save", "a.png"])
    refuse(capsys, r"file/metrics\.jsonl: Not a directory; wanted the --out folder of a run", ["file", "--save", "a.png"])


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wanted = r"wants the package matplotlib: pip install matplotlib"
    refuse(capsys, wanted, [write_run(tmp_path / "run", curve()), "--save", str(tmp_path / "a.png")])
    refuse(capsys, wanted, ["--from", str(Path(benchmark.__file__).parent / "results" / "cpu.json"), "--plot", "a.png"], benchmark.main)


def test_benchmark_without_a_time(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(bench(("nt_xent", [64, 64, 8], "random", "eager", None, None))))
    refuse(capsys, "--plot: no row has a time", ["--from", str(tmp_path / "a.json"), "--plot", "a.png"], benchmark.main)


@drawing
def test_picture_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("run"), curve())
    refuse(capsys, r"none/a\.png: No such file or directory", [run, "--save", "none/a.png"])
    refuse(capsys, r"a\.xyz: .*not supported.*", [run, "--save", "a.xyz"])


@drawing
def test_loss_that_is_no_number_leaves_a_gap(tmp_path, drawn):
    pictures.main([write_run(tmp_path / "run", [dict(step=1, loss=1.0), dict(step=2, loss=math.nan), dict(step=3, loss=2.0)]), "--save", "a.png"])
    assert points(drawn()[0]) == [([1, 2, 3], [1.0, pytest.approx(math.nan, nan_ok=True), 2.0])]
