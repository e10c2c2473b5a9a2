"""python -m kernels.training.plot: what is read, what is drawn, and one line where neither can be."""
import importlib
import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from kernels.benchmark import measure
from kernels.training.extras import plot
from running import ROOT, refuse


@pytest.fixture(autouse=True)
def place(here, monkeypatch):
    """A folder of its own, and the name that a fault begins with."""
    monkeypatch.setattr(sys, "argv", ["plot.py"])


def write_run(folder, rows, **before):
    Path(folder).mkdir(parents=True)
    if before:
        rows = [{"step": 0, **{f"dev_{key}": value for key, value in before.items()}}, *rows]
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "args.json").write_text("{}")


def curve(steps, **dev):
    """Loss 12 / step; every second step has the scores, each times the step."""
    scores = lambda i: {f"dev_{key}": value * i for key, value in dev.items() if i % 2 == 0}
    return [{"step": i, "loss": 12 / i} | scores(i) for i in range(1, steps + 1)]


def drawn(*folders, file="a.png"):
    """The axes of their picture, the points of the lines in each, and the legend."""
    pytest.importorskip("matplotlib")
    with patch.object(plot, "save", wraps=plot.save) as save:
        plot.main([*folders, "--save", file])
    figure, points = save.call_args.args[0], lambda line: (list(line.get_xdata()), list(line.get_ydata()))
    legend = [text.get_text() for text in figure.legends[0].texts]
    return figure.axes, [[points(line) for line in axis.lines] for axis in figure.axes], legend


def test_panels():
    """Folders are lines of a colour each, in the panels that they have something for; a has a step 0."""
    a, c = curve(8, spearman=10, alignment=0.1, uniformity=-1), curve(4, knn=7)
    a[3]["dev_similarity"], a[7]["dev_similarity"], c[3]["dev_similarity"] = [0.5, 0.6], [0.1, 0.2], [0.3]
    write_run("a", a, spearman=5.0, alignment=0.9, uniformity=-0.5, similarity=[0.9, 0.8])
    write_run("b", [*curve(1), dict(step=2, loss=float("nan"))])
    write_run("c/a", c)                                       # folders of one name keep their path
    axes, (losses, scores, path, layers), legend = drawn("a", "b", "c/a")
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
    """A panel a run: a colour for each pooling, dashed before training; beside the others, and alone."""
    write_run("a", curve(4, knn=7))
    write_run("b", curve(4, knn=7))
    Path("a", "study.json").write_text(json.dumps(STUDY))
    Path("one.json").write_text(json.dumps(dict(evaluated=[[1], [2]], poolings=["mean"])))
    axes, lines, legend = drawn("a", "b", "one.json")
    assert [len(panel) for panel in lines] == [2, 2, 4, 1] and legend == ["a", "b"]
    layers, styles = [0, 1, 2], [(line.get_linestyle(), line.get_color()) for line in axes[2].lines]
    assert lines[2] == [(layers, [0, 2, 4]), (layers, [1, 3, 5]), (layers, [0, 7, 9]), (layers, [6, 8, 10])]
    assert styles == [("--", "C0"), ("--", "C1"), ("-", "C0"), ("-", "C1")]
    assert [text.get_text() for text in axes[2].get_legend().texts] == ["cls", "max"]
    assert [axis.get_title() for axis in axes[2:]] == ["a; dashed: untrained", "one.json"]
    assert drawn("one.json")[1:] == ([[([0, 1], [1, 2])]], [])


@pytest.mark.parametrize("name, flags, wanted, steps, file, magic", [
    ("simcse", "nli.csv --dev DATA/sts.tsv", "out spearman 3", [[0, 1, 2]], "a.pdf", b"%PDF"),
    ("simclr", "shapes.npz --model resnet-small --probe-epochs 0", "out knn 2", [[0, 1, 2]], "a.png", b"PNG"),
    ("childtuning", "topics.tsv --dev DATA/topics.tsv --mode F D --seeds 2 --metric f1 --fisher-samples 9",
     "out D, out D, out F, out F f1 2", [[1, 2]] * 4, "a.svg", b"<?xml")])
def test_what_scripts_write_is_read_and_drawn(name, flags, wanted, steps, file, magic, capfd):
    """Child-Tuning's trials have a line each, and those of a mode have one colour."""
    flags = f"--model scratch --batch-size 8 --steps 2 --eval-every 1 --out out --data DATA/{flags}"
    importlib.import_module(name).main(flags.replace("DATA", f"{ROOT}/tests/data").split())
    labels, metrics, rows = zip(*plot.read_runs("out", "out"))
    score = plot.score_of(metrics[0], rows[0])
    panels = sum(bool(wants(metrics[0], rows[0])) for _, wants in plot.PANELS)
    assert f"{', '.join(labels)} {score} {panels}" == wanted
    assert [plot.columns(run, "step", f"dev_{score}")[0] for run in rows] == steps
    axes, _, legend = drawn("out", file=file)
    assert [line.get_color() for line in axes[0].lines] == [f"C{legend.index(label)}" for label in labels]
    assert magic in Path(file).read_bytes()[:8] and Path(file).stat().st_size < 80_000
    refuse(plot, capfd, r"none/a\.png: No such file.*", "out", "--save", "none/a.png")
    refuse(plot, capfd, r"a\.xyz: .*not supported.*", "out", "--save", "a.xyz")


@pytest.mark.parametrize("file, content, wanted", [
    ("args.json", None, ": No such file or directory; wanted the --out folder of a run"),
    ("metrics.jsonl", "", ": empty; the run has reported no step yet"),
    ("metrics.jsonl", '{"step": 1, "loss": 2}\n{"s', r" line 2: damaged; .* found '\{\"s'"),
    *(("metrics.jsonl", line, " line 1: damaged; wanted a JSON object with step and loss, found .*")
      for line in ('{"step": 1}', "[1]", '{"step": "1", "loss": "2"}', "\n")),
    ("metrics.jsonl", "\xff\n", None), ("args.json", "{", None), ("args.json", "[]", None)])
def test_damaged_folder(file, content, wanted, capfd):
    write_run("run", curve(4, spearman=1), spearman=0.0)
    path = Path("run", file)
    path.unlink() if content is None else path.write_text(content, encoding="latin-1")
    wanted = rf"run/{file}{wanted}" if wanted else r"run: metrics\.jsonl is no text, or args\.json is damaged"
    refuse(plot, capfd, wanted, "run", "--save", "a.png")


@pytest.mark.parametrize("content", ["{", "[]", "{}", "\xff", '{"poolings": [], "trained": [[1], [2, 3]]}'])
def test_damaged_study(content, capfd):
    write_run("run", curve(4))
    Path("run/study.json").write_text(content, encoding="latin-1")
    wanted = r"run/study\.json: damaged; wanted what --study of selfguided\.py wrote"
    for out in "run", "run/study.json":
        refuse(plot, capfd, wanted, out, "--save", "a.png")
    refuse(plot, capfd, r"no\.json: No such file .*", "no.json", "--save", "a.png")


def test_without_folder_or_matplotlib(monkeypatch, capfd):
    refuse(plot, capfd, "good.csv/metrics.jsonl: Not a dir.*", "good.csv", "--save", "a.png")
    write_run("run", curve(4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wanted, result = "wants the package matplotlib: pip install .*", ROOT / "kernels/results/cpu.json"
    refuse(plot, capfd, wanted, "run", "--save", "a.png")
    monkeypatch.setattr(sys, "argv", ["measure.py"])
    refuse(measure, capfd, wanted, "--from", result, "--plot", "a.png")
