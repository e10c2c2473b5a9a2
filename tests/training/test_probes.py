"""Test --transfer and --cluster: scores of embeddings whose answer is known, and mistakes in the data."""
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.training.probes import C_GRID, evaluate_clusters, evaluate_transfer, features
from running import rejects

ROWS = [(str(i),) for i in range(120)]                         # text i is the number i
LABELS = np.array(list("abc") * 40)
SHUFFLED = np.random.default_rng(0).permutation(LABELS)


def stub(x, normalise=False):
    """Return a model that embeds the text "7" as row 7 of x."""
    return SimpleNamespace(embed=lambda texts: (x, [int(text) for text in texts]), normalise=normalise)


@pytest.fixture
def clouds():
    """Return a model that embeds row i near the unit vector number i mod 3."""
    pytest.importorskip("sklearn")
    noise = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    return stub(torch.eye(3, 6).repeat(40, 1) + 0.05 * noise)


def test_transfer_never_tests_on_training_rows(clouds):
    """Separable classes give 100, wrong test labels 0. In cross-validation, shuffled labels give about
    chance, although a regression on one-hot embeddings fits all its training rows. C is chosen on held-out
    rows: the smallest C, if a larger C only fits wrong labels."""
    train, wrong = (ROWS[:90], LABELS[:90]), np.roll(LABELS[90:], 1)
    assert evaluate_transfer(clouds, train, (ROWS[90:], LABELS[90:]), 1) == (100, C_GRID[:1])
    assert evaluate_transfer(clouds, train, (ROWS[90:], wrong), 1)[0] == 0
    assert evaluate_transfer(clouds, (ROWS, LABELS), None, 1)[0] == 100
    assert evaluate_transfer(stub(torch.eye(120)), (ROWS, SHUFFLED), None, 1)[0] < 50
    labels = np.where(np.arange(120) % 7, LABELS, "a")
    one_hot = stub(torch.cat([torch.eye(3).repeat(40, 1), torch.eye(120)], 1))
    assert evaluate_transfer(one_hot, (ROWS, labels), (ROWS, labels), 1)[1] == C_GRID[:1]


def test_clusters(clouds):
    """Separate clouds score 100; shuffled labels a V-measure near 0 and chance accuracy. Starts differ."""
    assert evaluate_clusters(clouds, (ROWS, LABELS), 1) == [(pytest.approx(100), 100)] * 5
    noise = stub(torch.randn(120, 6, generator=torch.Generator().manual_seed(0)))
    v_measures, accuracies = zip(*evaluate_clusters(noise, (ROWS, SHUFFLED), 1))
    assert max(v_measures) < 10 and max(accuracies) < 50 and len(set(v_measures)) > 1


def test_features():
    """A pair gives |u − v| and u ⊙ v. If the model normalises its embeddings, the features are unit rows."""
    x = torch.randn(4, 3)
    u, v = x[::2], x[1::2]
    assert np.allclose(features(stub(x), [("0", "1"), ("2", "3")]), torch.cat([(u - v).abs(), u * v], 1))
    assert np.allclose(features(stub(x, normalise=True), [("3",)]), F.normalize(x[3:], dim=1))


@pytest.mark.parametrize("flags, expected", [
    ("--transfer two.tsv,own.tsv", "own.tsv: label 'w', expected a label of two.tsv: x, y"),
    ("--transfer own.tsv", "own.tsv: 3 labels in 3 rows, expected at least 2 labels with 12 rows each"),
    ("--cluster own.tsv", "own.tsv: 3 labels in 3 rows, expected at least 2 labels, with two .*")])
def test_bad_input(flags, expected, cwd, bert, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))         # imported, but not used here
    Path("two.tsv").write_text("sentence\tlabel\n" + "A.\tx\nB.\ty\n" * 12)
    Path("own.tsv").write_text("sentence\tlabel\nA.\tw\nB.\tx\nC.\ty\n")
    rejects("simcse", capfd, expected, "--evaluate", "--model", bert, *flags.split())
