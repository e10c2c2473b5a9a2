"""python -m kernels.training.plot: what it draws, and its errors."""
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from kernels.training import plot
from running import rejects


def write_run(folder, rows):
    """Write the files of a run."""
    Path(folder).mkdir()
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "args.json").write_text("{}")


def curve(steps, **dev):
    """Return the rows of a run: loss 12 / step and, in even steps, each score in `dev` times the step."""
    rows = [{"step": i, "loss": 12 / i} for i in range(1, steps + 1)]
    for row in rows[1::2]:
        row |= {f"dev_{key}": value * row["step"] for key, value in dev.items()}
    return rows


def test_panels(cwd):
    """Each folder has a line of its colour in each panel for which it has data. Runs whose names differ in a
    number share a colour and a label. Run a has scores of step 0, and a layer study."""
    pytest.importorskip("matplotlib")
    a = curve(8, spearman=10, alignment=0.1, uniformity=-1)
    a[3] |= dict(dev_similarity=[0.5, 0.6], dev_auc=50, dev_curve=[0.9, 0.8, 0.7])
    a[7] |= dict(dev_similarity=[0.1, 0.2], dev_auc=40, dev_curve=[0.2, 0.2])  # a lower area: not drawn
    before = dict(dev_spearman=5.0, dev_alignment=0.9, dev_uniformity=-0.5, dev_similarity=[0.9, 0.8])
    write_run("a", [dict(step=0, **before), *a])
    study = dict(untrained=[[0, 1], [2, 3]], trained=[[0, 6], [7, 8]], poolings=["cls", "max"])
    Path("a", "study.json").write_text(json.dumps(study))
    write_run("b-1", curve(1))
    write_run("b-2", curve(4, knn=7))
    with patch.object(plot, "save_figure", wraps=plot.save_figure) as save:
        plot.main(["a", "b-1", "b-2", "--save", "a.png"])
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    figure = save.call_args.args[0]
    losses, scores, path, layers, precision, study = (
        [tuple(map(list, line.get_data())) for line in axis.lines] for axis in figure.axes)
    steps = [1, 2, 3, 4, 5, 6, 7, 8]
    assert losses == [(steps, [12 / i for i in steps]), ([1], [12]), (steps[:4], [12, 6, 4, 3])]
    assert scores == [([0, 2, 4, 6, 8], [5, 20, 40, 60, 80]), ([2, 4], [14, 28])]
    whole = [-0.5, -2, -4, -6, -8], pytest.approx([0.9, 0.2, 0.4, 0.6, 0.8])
    assert path == [whole, ([-0.5], [0.9]), ([-8], [0.8])]     # and its first and last point
    assert [values for _, values in layers] == [[0.9, 0.8], [0.1, 0.2]]
    assert precision == [([0.01, 0.02, 0.03], [0.9, 0.8, 0.7])]
    assert [values for _, values in study] == [[0, 2], [1, 3], [0, 7], [6, 8]]
    colours = [line.get_color() for axis in figure.axes[:2] for line in axis.lines]
    assert colours == ["C0", "C1", "C1", "C0", "C1"]
    assert figure.axes[1].get_ylabel() == "dev Spearman · 100 or dev kNN, %"
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b"]


def test_bad_input(cwd, capfd):
    rejects(plot, capfd, "good.csv/metrics.jsonl: Not a dir.*", "good.csv", "--save", "a.png")
    write_run("new", [])
    rejects(plot, capfd, "new/metrics.jsonl: empty; .* no step yet", "new", "--save", "a.png")
