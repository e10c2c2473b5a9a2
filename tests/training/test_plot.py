"""Test python -m kernels.training.plot: the lines of its panels."""
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from kernels.training import plot


def test_panels(cwd):
    """Each run is a line in the panel of losses and, if it has a dev score, in the panel of scores."""
    pytest.importorskip("matplotlib")
    runs = {"a": [dict(step=0, dev_knn=0), dict(step=1, loss=3.5), dict(step=2, loss=2.5, dev_knn=10)],
            "b": [dict(step=1, loss=12.0)]}
    for folder, rows in runs.items():
        Path(folder).mkdir()
        Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure, axes = plot.new_figure(1, 2, 4, 3)
    with patch.object(plot, "new_figure", lambda *_: (figure, axes)):
        plot.main(["a", "b", "--save", "a.png"])
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    losses, scores = ([tuple(map(list, line.get_data())) for line in axis.lines]
                      for axis in axes[0])
    assert losses == [([1, 2], [3.5, 2.5]), ([1], [12])] and scores == [([0, 2], [0, 10])]
