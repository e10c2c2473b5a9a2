"""python -m kernels.training.plot: what it reads, what it draws, and its errors."""
import importlib
import json
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from kernels.training import plot
from running import ROOT, rejects


@pytest.fixture(autouse=True)
def empty_folder(cwd):
    """Give each test an empty folder."""


def write_run(folder, rows):
    """Write the files of a run."""
    Path(folder).mkdir(parents=True)
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "args.json").write_text("{}")


def curve(steps, **dev):
    """Return the rows of a run: loss 12 / step and, in even steps, each score in `dev` times the step."""
    rows = [{"step": i, "loss": 12 / i} for i in range(1, steps + 1)]
    for row in rows[1::2]:
        row |= {f"dev_{key}": value * row["step"] for key, value in dev.items()}
    return rows


def plot_folders(*folders, file="a.png"):
    """Plot the folders. Return (axes, list of the points of each line per axis, labels of the legend)."""
    pytest.importorskip("matplotlib")
    with patch.object(plot, "save_figure", wraps=plot.save_figure) as save:
        plot.main([*folders, "--save", file])
    figure = save.call_args.args[0]
    points = [[tuple(map(list, line.get_data())) for line in axis.lines] for axis in figure.axes]
    return figure.axes, points, [text.get_text() for text in figure.legends[0].texts]


def test_panels():
    """Each folder has a line of its colour in each panel for which it has data. Run a has a row of step 0."""
    a, c = curve(8, spearman=10, alignment=0.1, uniformity=-1), curve(4, knn=7)
    a[3]["dev_similarity"] = [0.5, 0.6]
    a[7]["dev_similarity"] = [0.1, 0.2]
    c[3]["dev_similarity"] = [0.3]
    a[3] |= dict(dev_auc=50, dev_curve=[0.9, 0.8, 0.7])
    a[5] |= dict(dev_auc=40, dev_curve=[0.2, 0.2])             # a lower area: this curve is not drawn
    before = dict(dev_spearman=5.0, dev_alignment=0.9, dev_uniformity=-0.5, dev_similarity=[0.9, 0.8])
    write_run("a", [dict(step=0, **before), *a])
    write_run("b", [*curve(1), dict(step=2, loss=float("nan"))])
    write_run("c/a", c)                                      # named by its path: there is another a
    axes, lines, legend = plot_folders("a", "b", "c/a")
    losses, scores, path, layers, precision = lines
    steps, nan = [1, 2, 3, 4, 5, 6, 7, 8], pytest.approx(float("nan"), nan_ok=True)
    assert losses == [(steps, [12 / i for i in steps]), ([1, 2], [12, nan]), (steps[:4], [12, 6, 4, 3])]
    assert scores == [([0, 2, 4, 6, 8], [5, 20, 40, 60, 80]), ([2, 4], [14, 28])]
    whole = [-0.5, -2, -4, -6, -8], pytest.approx([0.9, 0.2, 0.4, 0.6, 0.8])
    assert path == [whole, ([-0.5], [0.9]), ([-8], [0.8])]
    assert axes[2].lines[1].get_markerfacecolor() == "white"   # hollow
    assert [(x.get_text(), x.xy[0]) for x in axes[2].texts] == [("step 0", -0.5), ("4", -4), ("8", -8)]
    assert precision == [([0.01, 0.02, 0.03], [0.9, 0.8, 0.7])]
    assert [values for _, values in layers] == [[0.9, 0.8], [0.1, 0.2], [0.3]]
    assert [line.get_color() for axis in axes[:2] for line in axis.lines] == ["C0", "C1", "C2", "C0", "C2"]
    assert [axis.get_xlabel().split()[0] for axis in axes[2:]] == ["uniformity", "layer", "recall"]
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


def test_runs_that_differ_in_a_number_share_a_label():
    """They have one colour and one entry in the legend. A single run keeps its number."""
    folders = "out/D-42", "out/D-43", "out/F-42"
    for folder in folders:
        write_run(folder, curve(4))
    axes, lines, legend = plot_folders(*folders)
    assert len(lines[0]) == 3 and legend == ["D", "F-42"]
    assert [line.get_color() for line in axes[0].lines] == ["C0", "C0", "C1"]


@pytest.mark.parametrize("name, flags, panels, file, magic", [
    ("simcse", "nli.csv --dev DATA/sts.tsv", 3, "a.pdf", b"%PDF"),
    ("childtuning", "topics.tsv --dev DATA/topics.tsv --mode none --metric f1", 2, "a.svg", b"<?xml")])
def test_plots_of_real_runs(name, flags, panels, file, magic):
    flags = f"--model scratch --batch-size 8 --steps 2 --eval-every 1 --out out --data DATA/{flags}"
    importlib.import_module(name).main(flags.replace("DATA", f"{ROOT}/tests/data").split())
    axes, lines, legend = plot_folders("out", file=file)
    assert len(axes) == panels and legend == ["out"] and lines[0][0][0] == [1, 2]
    assert lines[1][0][0][-2:] == [1, 2]
    assert Path(file).read_bytes().startswith(magic)
    for file, message in ("none/a.png", "No such file"), ("a.xyz", ".*not supported"):
        with pytest.raises(SystemExit, match=f"{file}: {message}"):
            plot.main(["out", "--save", file])


def test_bad_input(monkeypatch, capfd):
    rejects(plot, capfd, "good.csv/metrics.jsonl: Not a dir.*", "good.csv", "--save", "a.png")
    write_run("new", [])
    rejects(plot, capfd, "new/metrics.jsonl: empty; .* no step yet", "new", "--save", "a.png")
    write_run("run", curve(4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "kernels.training.plot")  # to be run as python -m runs it
    monkeypatch.setattr(sys, "argv", ["", "run", "--save", "a.png"])
    with pytest.raises(SystemExit, match="plots need the package matplotlib; "):
        runpy.run_module("kernels.training.plot", run_name="__main__")
