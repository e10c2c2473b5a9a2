"""--transfer and --cluster: scores of data whose answer is known, printed lines, mistakes in the data."""
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import simcse
from kernels.training.probes import C_GRID, evaluate_clusters, evaluate_transfer, features
from running import DATA, few_pairs, rejects

ROWS = [(str(i),) for i in range(120)]                         # texts
LABELS = np.array(list("abc") * 40)
SHUFFLED = np.random.default_rng(0).permutation(LABELS)


def stub(x, normalise=False):
    """Return a model that embeds the text "7" as row 7 of x."""
    return SimpleNamespace(embed=lambda texts: (x, [int(text) for text in texts]), normalise=normalise)


@pytest.fixture
def clouds():
    """Return a model that embeds row i near the point number i mod 3."""
    pytest.importorskip("sklearn")
    noise = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    return stub(torch.eye(3, 6).repeat(40, 1) + 0.05 * noise)


def test_transfer_never_tests_on_training_rows(clouds):
    """Separable rows give 100, and a test file with wrong labels gives 0. In cross-validation, shuffled
    labels give about chance, although on one-hot rows a regression knows all rows that it was trained on."""
    train, wrong = (ROWS[:90], LABELS[:90]), np.roll(LABELS[90:], 1)
    assert evaluate_transfer(clouds, train, (ROWS[90:], LABELS[90:]), 1) == (100, C_GRID[:1])
    assert evaluate_transfer(clouds, train, (ROWS[90:], wrong), 1)[0] == 0
    assert evaluate_transfer(clouds, (ROWS, LABELS), None, 1)[0] == 100
    assert evaluate_transfer(stub(torch.eye(120)), (ROWS, SHUFFLED), None, 1)[0] < 50


def test_c_is_chosen_on_held_out_rows(clouds):
    """A large C is best if only a small column has the label, and the smallest if others only fit errors."""
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    labels = np.where(x[:, 0] > 0, "a", "b")
    x[:, 0] = 0.1 * x[:, 0].sign()
    assert min(evaluate_transfer(stub(x), (ROWS, labels), (ROWS, labels), 1)[1]) > 1
    labels = np.where(np.arange(120) % 7, LABELS, "a")
    one_hot = stub(torch.cat([torch.eye(3).repeat(40, 1), torch.eye(120)], 1))
    assert evaluate_transfer(one_hot, (ROWS, labels), (ROWS, labels), 1)[1] == C_GRID[:1]


def test_clusters(clouds):
    """Clouds give 100, and shuffled labels about 0 and chance."""
    assert evaluate_clusters(clouds, (ROWS, LABELS), 1) == [(pytest.approx(100), 100)] * 5
    v_measures, accuracies = zip(*evaluate_clusters(clouds, (ROWS, SHUFFLED), 1))
    assert max(v_measures) < 10 and max(accuracies) < 50


def test_features():
    x = torch.randn(4, 3)
    u, v = x[::2], x[1::2]
    assert np.allclose(features(stub(x), [("0", "1"), ("2", "3")]), torch.cat([(u - v).abs(), u * v], 1))
    assert np.allclose(features(stub(x, normalise=True), [("3",)]), F.normalize(x[3:], dim=1))


def test_evaluate_prints_the_final_scores_of_the_run(cwd, bert, capsys):
    """The scores are those of the best checkpoint, which at this learning rate is not the last one."""
    pytest.importorskip("sklearn")
    Path("sts").mkdir()
    few_pairs(Path("sts"), 20)
    Path("sts/README.md").touch()
    Path("a.tsv").write_text("".join((DATA / "topics.tsv").read_text().splitlines(True)[:150]))
    tests = "--seed 5 --test sts --transfer a.tsv a.tsv,a.tsv --cluster a.tsv".split()
    flags = "--steps 3 --batch-size 20 --max-length 50 --lr 0.05 --dev sts/few.tsv --eval-every 1 --out out"
    simcse.main(["--data", str(DATA / "sentences.txt"), "--model", str(bert), *flags.split(), *tests])
    printed = re.findall("^(?:test|transfer|cluster) .*", capsys.readouterr().out, re.MULTILINE)
    expected = ["test NUMBER .* sts/few.tsv", "test NUMBER  mean", "transfer NUMBER  C .*  a.tsv",
                "transfer NUMBER  C .*  a.tsv,a.tsv", "transfer NUMBER  mean",
                "cluster NUMBER ± NUMBER  accuracy NUMBER  a.tsv", "cluster NUMBER  mean"]
    expected = [line.replace("NUMBER", r" *(-?\d+\.\d\d)") for line in expected]
    assert len(printed) == 7 and all(map(re.fullmatch, expected, printed)), printed
    simcse.main(["--evaluate", "--model", "out", *tests])
    assert re.findall("^(?:test|transfer|cluster) .*", capsys.readouterr().out, re.MULTILINE) == printed


@pytest.mark.parametrize("flag", ["--transfer", "--cluster"])
def test_without_scikit_learn(flag, cwd, bert, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    expected = "--transfer and --cluster need the package scikit-learn: pip install scikit-learn"
    rejects("simcse", capfd, expected, "--evaluate", "--model", bert, flag, "good.csv")


@pytest.mark.parametrize("flags, expected", [
    ("--transfer two.tsv,", "--transfer two.tsv,: expected one file, or a training file and a test file .*"),
    ("--transfer two.tsv,own.tsv", "own.tsv: label 'w', expected a label of two.tsv: x, y"),
    ("--transfer own.tsv", "own.tsv: 4 labels in 4 rows, expected at least 2 labels with 12 rows each"),
    ("--transfer two.tsv,pairs.tsv", "--transfer two.tsv,pairs.tsv: one file has one text column and .*"),
    ("--transfer gap.tsv", "gap.tsv line 3: an empty cell; .*"),
    ("--cluster own.tsv", "own.tsv: 4 labels in 4 rows, expected at least 2 labels, with two .*"),
    ("--cluster pairs.tsv", "--cluster pairs.tsv: two text columns, expected one"),
    ("--test empty", "--test empty: the folder has no file whose name ends in .*")])
def test_bad_input(flags, expected, cwd, bert, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))         # imported, but not used yet
    Path("two.tsv").write_text("sentence\tlabel\n" + "A.\tx\nB.\ty\n" * 12)
    Path("own.tsv").write_text("sentence\tlabel\nA.\tw\nB.\tx\nC.\ty\nD.\tz\n")
    Path("gap.tsv").write_text("sentence\tlabel\nA.\tw\n \tw\nC.\ty\nD.\ty\n")
    Path("pairs.tsv").write_text("sentence1\tsentence2\tlabel\n" + "A.\tB.\tx\nC.\tD.\ty\n" * 3)
    Path("empty").mkdir()
    rejects("simcse", capfd, expected, "--evaluate", "--model", bert, *flags.split())
