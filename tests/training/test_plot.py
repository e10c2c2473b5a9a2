"""Test python -m kernels.training.plot: the lines of its panels."""
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from kernels.training import plot


def write_run(folder, *rows):
    """Write rows to metrics.jsonl, and an empty args.json, in a new folder."""
    Path(folder).mkdir()
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "args.json").write_text("{}")


def test_panels(cwd):
    """A panel shows each run that has data for it. Run `a` has a score of step 0."""
    pytest.importorskip("matplotlib")
    write_run("a", dict(step=0, dev_knn=0), dict(step=1, loss=3.5), dict(step=2, loss=2.5, dev_knn=10))
    write_run("b-1", dict(step=1, loss=12.0))
    write_run("b-2", dict(step=3, loss=4.0, dev_knn=28))
    with patch.object(plot, "save_figure", wraps=plot.save_figure) as save:
        plot.main(["a", "b-1", "b-2", "--save", "a.png"])
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    losses, scores = ([tuple(map(list, line.get_data())) for line in axis.lines]
                      for axis in save.call_args.args[0].axes)
    assert losses == [([1, 2], [3.5, 2.5]), ([1], [12]), ([3], [4])]
    assert scores == [([0, 2], [0, 10]), ([3], [28])]
