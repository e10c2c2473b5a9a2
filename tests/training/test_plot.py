"""python -m kernels.training.plot: what it reads, what it draws, and its errors."""
import importlib
import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from kernels import benchmark
from kernels.training import plot
from running import ROOT, rejects


@pytest.fixture(autouse=True)
def empty_folder(cwd):
    """Give each test an empty folder."""


def write_run(folder, rows, **before):
    """Write the files of a run: these rows and, if given, a row of step 0 with the scores `before`."""
    Path(folder).mkdir(parents=True)
    if before:
        rows = [{"step": 0, **{f"dev_{key}": value for key, value in before.items()}}, *rows]
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "args.json").write_text("{}")


def curve(steps, **dev):
    """Return the rows of a run: loss 12 / step and, in even steps, each score in `dev` times the step."""
    def scores(i):
        return {f"dev_{key}": value * i for key, value in dev.items() if i % 2 == 0}

    return [{"step": i, "loss": 12 / i} | scores(i) for i in range(1, steps + 1)]


def plot_folders(*folders, file="a.png"):
    """Plot the folders. Return (axes, list of the points of each line per axis, labels of the legend)."""
    pytest.importorskip("matplotlib")
    with patch.object(plot, "save_figure", wraps=plot.save_figure) as save:
        plot.main([*folders, "--save", file])
    figure = save.call_args.args[0]

    def points(line):
        return list(line.get_xdata()), list(line.get_ydata())

    legend = [text.get_text() for text in figure.legends[0].texts]
    return figure.axes, [[points(line) for line in axis.lines] for axis in figure.axes], legend


def test_precision_recall_panel():
    """A run of cil.py: the curve of the checkpoint with the best area, a point per percent of recall."""
    rows = curve(6, auc=10)
    for row, area, points in zip(rows[1::2], (30, 50, 40), ([0.1], [0.9, 0.8, 0.7], [0.2, 0.2])):
        row |= dict(dev_auc=area, dev_curve=points)
    write_run("a", rows)
    axes, lines, _ = plot_folders("a")
    assert lines[2] == [([0.01, 0.02, 0.03], [0.9, 0.8, 0.7])]
    assert [axis.get_xlabel() for axis in axes] == ["step", "step", "recall"]


def test_panels():
    """Each folder has a line of its colour in each panel for which it has data. Run a has a row of step 0."""
    a, c = curve(8, spearman=10, alignment=0.1, uniformity=-1), curve(4, knn=7)
    a[3]["dev_similarity"] = [0.5, 0.6]
    a[7]["dev_similarity"] = [0.1, 0.2]
    c[3]["dev_similarity"] = [0.3]
    write_run("a", a, spearman=5.0, alignment=0.9, uniformity=-0.5, similarity=[0.9, 0.8])
    write_run("b", [*curve(1), dict(step=2, loss=float("nan"))])
    write_run("c/a", c)                                      # named by its path: there is another a
    axes, lines, legend = plot_folders("a", "b", "c/a")
    losses, scores, path, layers = lines
    steps, nan = [1, 2, 3, 4, 5, 6, 7, 8], pytest.approx(float("nan"), nan_ok=True)
    assert losses == [(steps, [12 / i for i in steps]), ([1, 2], [12, nan]), (steps[:4], [12, 6, 4, 3])]
    assert scores == [([0, 2, 4, 6, 8], [5, 20, 40, 60, 80]), ([2, 4], [14, 28])]
    whole = [-0.5, -2, -4, -6, -8], pytest.approx([0.9, 0.2, 0.4, 0.6, 0.8])
    assert path == [whole, ([-0.5], [0.9]), ([-8], [0.8])]
    assert axes[2].lines[1].get_markerfacecolor() == "white"   # hollow
    assert [(x.get_text(), x.xy[0]) for x in axes[2].texts] == [("step 0", -0.5), ("4", -4), ("8", -8)]
    assert [values for _, values in layers] == [[0.9, 0.8], [0.1, 0.2], [0.3]]
    assert [line.get_color() for axis in axes[:2] for line in axis.lines] == ["C0", "C1", "C2", "C0", "C2"]
    assert [axis.get_xlabel().split()[0] for axis in axes] == ["step", "step", "uniformity", "layer"]
    assert axes[1].get_ylabel() == "dev Spearman · 100 or dev kNN, %" and legend == ["a", "b", "c/a"]


STUDY = dict(untrained=[[0, 1], [2, 3], [4, 5]], trained=[[0, 6], [7, 8], [9, 10]], poolings=["cls", "max"])


def test_study():
    """Each layer study has a panel, with one colour per pooling, and dashed lines for the untrained encoder;
    also if there are no other panels."""
    write_run("a", curve(4, knn=7))
    write_run("b", curve(4, knn=7))
    Path("a", "study.json").write_text(json.dumps(STUDY))
    Path("one.json").write_text(json.dumps(dict(evaluated=[[1], [2]], poolings=["mean"])))
    axes, lines, legend = plot_folders("a", "b", "one.json")
    assert [len(panel) for panel in lines] == [2, 2, 4, 1] and legend == ["a", "b"]
    layers, styles = [0, 1, 2], [(line.get_linestyle(), line.get_color()) for line in axes[2].lines]
    assert lines[2] == [(layers, [0, 2, 4]), (layers, [1, 3, 5]), (layers, [0, 7, 9]), (layers, [6, 8, 10])]
    assert styles == [("--", "C0"), ("--", "C1"), ("-", "C0"), ("-", "C1")]
    assert [text.get_text() for text in axes[2].get_legend().texts] == ["cls", "max"]
    assert [axis.get_title() for axis in axes[2:]] == ["a; dashed: untrained", "one.json"]
    assert plot_folders("one.json")[1:] == ([[([0, 1], [1, 2])]], [])


@pytest.mark.parametrize("name, flags, expected, steps, file, magic", [
    ("simcse", "nli.csv --dev DATA/sts.tsv", "out spearman 3", [[0, 1, 2]], "a.pdf", b"%PDF"),
    ("simclr", "shapes.npz --model resnet-small --probe-epochs 0", "out knn 2", [[0, 1, 2]], "a.png", b"PNG"),
    ("childtuning",
     "topics.tsv --dev DATA/topics.tsv --metric f1 --fisher-samples 9 --mode MODE --seed SEED",
     "out D, out D, out F, out F f1 2", [[1, 2]] * 4, "a.svg", b"<?xml")])
def test_plots_of_real_runs(name, flags, expected, steps, file, magic, capfd):
    """Runs in folders MODE-SEED are lines; those of one mode have the same colour."""
    flags = f"--model scratch --batch-size 8 --steps 2 --eval-every 1 --data DATA/{flags}"
    flags = flags.replace("DATA", f"{ROOT}/tests/data")
    for run in ("D-42", "D-43", "F-42", "F-43") if "MODE" in flags else ("",):
        words = flags.replace("MODE", run[:1]).replace("SEED", run[2:]).split()
        importlib.import_module(name).main([*words, "--out", f"out/{run}"])
    labels, metrics, rows = zip(*plot.read_runs("out", "out"))
    score = plot.score_of(metrics[0], rows[0])
    panels = sum(bool(has_data(metrics[0], rows[0])) for _, has_data in plot.PANELS)
    assert f"{', '.join(labels)} {score} {panels}" == expected
    assert [plot.values_of(run, "step", f"dev_{score}")[0] for run in rows] == steps
    axes, _, legend = plot_folders("out", file=file)
    assert [line.get_color() for line in axes[0].lines] == [f"C{legend.index(label)}" for label in labels]
    assert magic in Path(file).read_bytes()[:8] and Path(file).stat().st_size < 80_000
    for file, wanted in ("none/a.png", "No such file"), ("a.xyz", ".*not supported"):
        with pytest.raises(SystemExit, match=f"{file}: {wanted}"):
            plot.main(["out", "--save", file])


def test_without_folder_or_matplotlib(monkeypatch, capfd):
    rejects(plot, capfd, "good.csv/metrics.jsonl: Not a dir.*", "good.csv", "--save", "a.png")
    write_run("run", curve(4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for main, flags in (plot.main, "run --save"), (benchmark.main, f"--from {ROOT}/docs/cpu.json --plot"):
        with pytest.raises(SystemExit, match="plots need the package matplotlib; "):
            main([*flags.split(), "a.png"])
