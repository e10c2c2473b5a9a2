"""python -m kernels.pictures: what is read, what is drawn, and one line where neither can be."""
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
        torch.save({"progress": {"step": 4, "before": before}, "model": {}}, folder / "state.pt")
    return str(folder)


def curve(steps=4, **dev):
    """Loss 12 / step; every second step has the scores, each times the step."""
    scores = lambda i: {f"dev_{key}": value * i for key, value in dev.items() if i % 2 == 0}
    return [{"step": i, "loss": 12 / i} | scores(i) for i in range(1, steps + 1)]


@pytest.fixture
def drawn(monkeypatch):
    """drawn(*folders): the axes of their picture, which is not written."""
    kept = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: kept.append(figure))
    return lambda *folders: pictures.main([*folders, "--save", "a.png"]) or kept.pop().axes


def points(axis):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]


def legend(axis):
    return [text.get_text() for text in axis.figure.legends[0].texts]


@drawing
def test_loss_and_score(tmp_path, drawn):
    """Folders are lines of a colour each with their names; one without scores is in the first panel alone."""
    gap = [*curve(1), dict(step=2, loss=math.nan)]
    loss, score = drawn(write_run(tmp_path / "a", curve(spearman=10), dict(spearman=5.0)),
                        write_run(tmp_path / "b", gap), write_run(tmp_path / "c", curve(knn=7)))
    whole = [1, 2, 3, 4], [12, 6, 4, 3]
    assert points(loss) == [whole, ([1, 2], [12, pytest.approx(math.nan, nan_ok=True)]), whole]
    assert points(score) == [([0, 2, 4], [5, 20, 40]), ([2, 4], [14, 28])]  # the first begins before training
    assert [line.get_color() for line in (*loss.lines, *score.lines)] == ["C0", "C1", "C2", "C0", "C2"]
    assert (loss.get_xlabel(), score.get_ylabel()) == ("step", "dev Spearman · 100 or dev kNN, %")
    assert legend(loss) == ["a", "b", "c"]
    one, other = write_run(tmp_path / "a/out", gap), write_run(tmp_path / "b/out", gap)
    assert legend(drawn(one, other)[0]) == [one, other]        # folders of one name keep their path


@drawing
def test_plane_in_order(tmp_path, drawn):
    before = dict(spearman=0.0, alignment=0.9, uniformity=-0.5)
    run = write_run(tmp_path / "run", curve(8, spearman=1, alignment=0.1, uniformity=-1), before)
    _, _, plane = drawn(run)
    path = [-0.5, -2, -4, -6, -8], pytest.approx([0.9, 0.2, 0.4, 0.6, 0.8])
    assert points(plane) == [path, ([-0.5], [0.9]), ([-8], [0.8])]
    assert plane.lines[1].get_markerfacecolor() == "white"
    assert [(text.get_text(), text.xy[0]) for text in plane.texts] == [("step 0", -0.5), ("4", -4), ("8", -8)]
    assert plane.get_xlabel().startswith("uniformity") and plane.get_ylabel().startswith("alignment")


@drawing
@pytest.mark.parametrize("before", [None, dict(accuracy=1.0, similarity=[0.9, 0.8, 0.7])])
def test_layers_before_and_after(tmp_path, drawn, before):
    rows = [dict(step=1, loss=3.0, dev_accuracy=2.0, dev_similarity=[0.5, 0.5, 0.6]),
            dict(step=2, loss=2.0, dev_accuracy=3.0, dev_similarity=[0.1, 0.2, 0.3])]
    _, score, layers = drawn(write_run(tmp_path / "tacl", rows, before))
    assert points(score) == [([0, 1, 2], [1, 2, 3]) if before else ([1, 2], [2, 3])]
    assert [values for _, values in points(layers)] == [[0.9, 0.8, 0.7]] * bool(before) + [[0.1, 0.2, 0.3]]


@drawing
def test_runs_of_one_folder(tmp_path, drawn):
    """Child-Tuning's steps run on from one run to the next; the score is the metric that it compares by."""
    runs = (2, "F", 1), (4, "F", 1), (6, "F", 2), (8, "F", 2), (10, "D", 1), (12, "D", 1)
    rows = [dict(step=step, loss=1.0, mode=mode, seed=seed, dev_accuracy=0.0, dev_matthews=float(step))
            for step, mode, seed in runs]
    loss, score = drawn(write_run(tmp_path / "rte", rows, args=dict(metric="matthews")))
    assert points(score) == [([2, 4], [2, 4]), ([2, 4], [6, 8]), ([2, 4], [10, 12])]
    assert [line.get_color() for line in loss.lines] == ["C0", "C0", "C1"]
    assert legend(loss) == ["rte F", "rte D"] and score.get_ylabel() == "dev Matthews · 100"


@drawing
@pytest.mark.parametrize("name, magic", [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_a_picture_is_written(name, magic, tmp_path):
    run, path = write_run(tmp_path / "run", curve(spearman=1, alignment=1, uniformity=-1)), tmp_path / name
    pictures.main([run, "--save", str(path)])
    assert path.read_bytes().startswith(magic) and path.stat().st_size < 80_000


@pytest.mark.parametrize("name, data, score, panels", [
    ("simcse", ["nli.csv", "--dev", DATA / "sts.tsv"], "spearman", 3),
    ("childtuning", ["topics.tsv", "--dev", DATA / "topics_dev.tsv"], "accuracy", 2),
    ("simclr", ["shapes.npz", "--model", "resnet-small", "--probe-epochs", 0], "knn", 2)])
def test_what_scripts_write(name, data, score, panels, tmp_path):
    flags = ["--model", "scratch", "--data", DATA / data[0], *data[1:], "--batch-size", 8, "--steps", 2,
             "--eval-every", 1, "--out", tmp_path / "out"]
    importlib.import_module(name).main([*map(str, flags)])
    (label, *run), = pictures.read_runs(tmp_path / "out", "out")
    assert label == ("out D" if name == "childtuning" else "out") and pictures.score_of(*run) == score
    steps, values = pictures.columns(run[1], "step", f"dev_{score}")
    assert steps == [0, 1, 2][name == "childtuning":] and len(values) == len(steps)
    assert sum(bool(wants(*run)) for _, wants in pictures.PANELS) == panels


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────


def refuse(capsys, wanted, *argv, main=pictures.main):
    with pytest.raises(SystemExit) as end:
        main(list(argv))
    err = capsys.readouterr().err
    one_line = rf"[^\s:]+: {wanted}\n"  # . fits no newline
    assert end.value.code == 2 and re.fullmatch(one_line, err), err


@pytest.mark.parametrize("file, content, wanted", [
    ("metrics.jsonl", None, r"run/metrics\.jsonl: No such file or directory; wanted the --out folder .*"),
    ("args.json", None, r"run/args\.json: No such file or directory; wanted the --out folder of a run"),
    ("metrics.jsonl", "", r"run/metrics\.jsonl: empty; the run has reported no step yet"),
    ("metrics.jsonl", '{"step": 1, "loss": 2}\n{"s', r"run/metrics\.jsonl line 2: damaged; .* found '\{\"s'"),
    ("metrics.jsonl", '{"step": 1}\n', r"run/metrics\.jsonl line 1: damaged; .* with step and loss, .*"),
    ("metrics.jsonl", "[1, 2]\n", r"run/metrics\.jsonl line 1: damaged; .*"),
    ("metrics.jsonl", '{"step": "1", "loss": "2"}\n', r"run/metrics\.jsonl line 1: damaged; .*"),
    ("metrics.jsonl", "\n", r"run/metrics\.jsonl line 1: damaged; .*"),
    ("metrics.jsonl", "\xff\n", r"run: metrics\.jsonl is no text, or args\.json is damaged"),
    ("args.json", '{"metric"', r"run: metrics\.jsonl is no text, or args\.json is damaged"),
    ("args.json", "[]", r"run: metrics\.jsonl is no text, or args\.json is damaged"),
    ("state.pt", "PK", r"run/state\.pt: damaged \(\w+\); .* the picture begins at the first evaluation")])
def test_damaged_folder(file, content, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = Path(write_run(Path("run"), curve(spearman=1), dict(spearman=0.0))) / file
    file.unlink() if content is None else file.write_text(content, encoding="latin-1")
    refuse(capsys, wanted, "run", "--save", "a.png")
    refuse(capsys, r"none/metrics\.jsonl: No such file .*", "none", "--save", "a.png")
    refuse(capsys, r".*/metrics\.jsonl: Not a directory; .*", __file__, "--save", "a.png")
    assert not Path("a.png").exists()


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wanted, results = "wants the package matplotlib: pip install matplotlib", Path(benchmark.__file__).parent
    refuse(capsys, wanted, write_run(tmp_path / "run", curve()), "--save", str(tmp_path / "a.png"))
    flags = "--from", str(results / "results" / "cpu.json"), "--plot", str(tmp_path / "a.png")
    refuse(capsys, wanted, *flags, main=benchmark.main)


@drawing
def test_picture_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("run"), curve())
    refuse(capsys, r"none/a\.png: No such file or directory", run, "--save", "none/a.png")
    refuse(capsys, r"a\.xyz: .*not supported.*", run, "--save", "a.xyz")
