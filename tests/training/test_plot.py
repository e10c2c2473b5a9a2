"""Test python -m kernels.training.plot: the lines of its panels, and its errors."""
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from kernels.training import plot
from running import rejects


def write_run(folder, *rows):
    """Write rows to metrics.jsonl, and an empty args.json, in a new folder."""
    Path(folder).mkdir()
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "args.json").write_text("{}")


def test_panels(cwd):
    """A panel shows each run that has data for it. Run `a` has scores of step 0."""
    pytest.importorskip("matplotlib")
    scores = [dict(dev_spearman=10 * i, dev_alignment=i / 8, dev_uniformity=-i) for i in range(3)]
    write_run("a", dict(step=0, **scores[0], dev_similarity=[0.9, 0.8]), dict(step=1, loss=3.5),
              dict(step=2, loss=2.5, **scores[1], dev_auc=50, dev_curve=[0.9, 0.8]),
              dict(step=4, loss=1.5, **scores[2], dev_auc=40, dev_curve=[0.2, 0.2], dev_similarity=[0.1, 0]))
    write_run("b-1", dict(step=1, loss=12.0))
    write_run("b-2", dict(step=3, loss=4.0, dev_knn=28))
    with patch.object(plot, "save_figure", wraps=plot.save_figure) as save:
        plot.main(["a", "b-1", "b-2", "--save", "a.png"])
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    figure = save.call_args.args[0]
    losses, scores, path, layers, precision = (
        [tuple(map(list, line.get_data())) for line in axis.lines] for axis in figure.axes)
    assert losses == [([1, 2, 4], [3.5, 2.5, 1.5]), ([1], [12]), ([3], [4])]
    assert scores == [([0, 2, 4], [0, 10, 20]), ([3], [28])]
    assert path == [([0, -1, -2], [0, 0.125, 0.25]), ([0], [0]), ([-2], [0.25])]       # line, start, end
    assert [values for _, values in layers] == [[0.9, 0.8], [0.1, 0]]
    assert precision == [([0.01, 0.02], [0.9, 0.8])]           # the curve with the largest area


def test_bad_input(cwd, capfd):
    rejects(plot, capfd, "good.csv/metrics.jsonl: Not a dir.*", "good.csv", "--save", "a.png")
    write_run("new")
    rejects(plot, capfd, "new/metrics.jsonl: empty; .* no step yet", "new", "--save", "a.png")
