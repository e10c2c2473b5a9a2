"""Frozen embeddings judged by labels: logistic regression and k-means against their definitions and, where
it is installed, scikit-learn; and the flags that ask for them."""
import importlib
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import simcse
from kernels.training.extras.probes import (
    STRENGTHS,
    best_strength,
    cluster,
    contingency,
    features,
    folds,
    k_means,
    logistic_regression,
    logits,
    matched,
    transfer,
    v_measure,
)
from running import DATA, SENTENCES, embed_saved, refuse


def blobs(classes, n=40, width=6, spread=0.3, seed=0):
    """(x (N, width), y (N,)): rows around a centre for each class; the first column 50 times the others."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(classes * n) % classes
    x = torch.randn(classes, width, generator=generator)[y]
    x = x + spread * torch.randn(x.shape, generator=generator)
    return x * torch.tensor([50.0] + [1.0] * (width - 1)), y


def stub(x):
    """A model whose text "7" is row 7 of x."""
    return SimpleNamespace(embed=lambda texts: (x, [int(text) for text in texts]), normalise=False,
                           device=x.device)


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_regression_is_at_the_minimum(classes):
    """Of the objective as it is written, for every C, in few enough steps for rows of any scale; for two
    classes that of one vector of weights."""
    x, y = blobs(classes, spread=1.5)
    for c, (weights, biases) in zip(STRENGTHS, logistic_regression(x, y, classes, STRENGTHS)):
        weights.requires_grad_(), biases.requires_grad_()
        z = x.double() @ weights + biases
        errors = F.softplus(z[:, 0] * (1 - 2 * y)).sum() if classes == 2 else -(
            z.log_softmax(1).gather(1, y[:, None]).sum())
        loss = errors + weights.square().sum() / (2 * c)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, (weights, biases))])
        hessian = torch.autograd.functional.hessian(
            lambda w: F.cross_entropy(logits(x, w, biases.detach()), y, reduction="sum")
            + w.square().sum() / (2 * c), weights.detach()).flatten(0, 1).flatten(1)
        inner = gradient[: len(hessian)]
        assert weights.shape == (6, 1 if classes == 2 else 4)
        assert inner @ torch.linalg.solve(hessian, inner) < 1e-4 * loss        # twice what is left to gain
        assert gradient[len(hessian) :].abs().max() < 0.01 * len(x)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("c", [0.25, 8])
def test_logistic_regression_like_scikit_learn(classes, c):
    theirs = pytest.importorskip("sklearn.linear_model").LogisticRegression(C=c, max_iter=10_000, tol=1e-8)
    x, y = blobs(classes, spread=1.5)
    found = logits(x, *logistic_regression(x, y, classes, [c])[0]).softmax(1)
    wanted = theirs.fit(x.double().numpy(), y.numpy()).predict_proba(x.double().numpy())
    np.testing.assert_allclose(found, wanted, atol=2e-3)


def test_folds_have_equal_sizes_and_shares():
    y = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)[torch.randperm(100)]
    fold = folds(y, 1)
    assert fold.bincount().tolist() == [10] * 10 and not fold.equal(folds(y, 2)) and fold.equal(folds(y, 1))
    assert (contingency(fold.numpy(), y.numpy(), 10)[:, :3] == [5, 3, 2]).all()


def test_the_strength_is_the_best_of_a_held_out_tenth():
    """Of rows that are mostly noise; and the smallest where all are as good."""
    x, y = blobs(2, n=100, width=100, spread=10.0, seed=1)
    x = F.normalize(x, dim=1)
    held = folds(y, 4) == 0
    right = [(logits(x[held], *logistic_regression(x[~held], y[~held], 2, [c])[0]).argmax(1) == y[held]).sum()
             for c in STRENGTHS]
    assert len(set(map(int, right))) > 1                       # else any would do
    assert best_strength(x, y, 2, seed=3) == STRENGTHS[int(np.argmax(right))]
    assert best_strength(10.0 * F.one_hot(y), y, 2, seed=3) == STRENGTHS[0]


def test_transfer_trains_on_one_part_and_tests_on_another():
    """Crossed labels of the test file score 0; cross-validated, every row is tested once, by others."""
    x, y = blobs(3, spread=0.1)
    rows, names = [(str(i),) for i in range(120)], list("abc")
    train, test = (rows[:90], y[:90], names), (rows[90:], y[90:], names)
    assert transfer(stub(x), train, test, 1)[0] == 100
    assert transfer(stub(x), train, (rows[90:], (y[90:] + 1) % 3, names), 1)[0] == 0
    accuracy, strengths = transfer(stub(x), (rows, y, names), None, 1)
    assert accuracy == 100 and set(strengths) <= set(STRENGTHS)
    noise = torch.randint(3, (120,), generator=torch.Generator().manual_seed(0))
    accuracy, _ = transfer(stub(torch.eye(120)), (rows, noise, names), None, 1)
    assert accuracy < 50                                       # a row that is not held out would give 100


def test_features_of_pairs():
    x = torch.randn(4, 3)
    found = features(stub(x), [("0", "1"), ("2", "3")])
    torch.testing.assert_close(found, torch.cat([(x[::2] - x[1::2]).abs(), x[::2] * x[1::2]], 1))
    normal = stub(x)
    normal.normalise = True
    torch.testing.assert_close(features(normal, [("3",)]), F.normalize(x[3:], dim=1))


def test_k_means_finds_blobs_and_ends():
    x, y = blobs(5, spread=0.05)
    x[:, 0] = 10 * y
    assert cluster(stub(x), ([(str(i),) for i in range(200)], y, list("abcde")), 1) == [(100, 100)] * 5
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    said = k_means(x, 6, 0)
    centres = torch.stack([x[said == i].mean(0) for i in range(6)])
    assert said.equal(torch.cdist(x, centres).argmin(1))       # no row wants to move any more
    grid = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0)).repeat(20, 1)
    grid += 0.02 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    found = [len(set(k_means(grid, 25, i)[:25].tolist())) for i in range(20)]
    assert found.count(25) == 20                               # fewer by a single candidate for each centre
    said = k_means(torch.tensor([[0.0], [1.0]])[torch.arange(8) % 2], 4, 0)    # fewer points than clusters
    assert len(said) == 8 and said[0] != said[1]


def test_k_means_like_scikit_learn():
    """The sums of squared distances of ten starts each."""
    theirs = pytest.importorskip("sklearn.cluster").KMeans
    x, _ = blobs(8, spread=2.0)
    ours = []
    for seed in range(10):
        said = k_means(x, 8, seed)
        ours.append(sum((x[said == i] - x[said == i].mean(0)).square().sum().item() for i in range(8)))
    wanted = [theirs(8, n_init=1, random_state=seed).fit(x.numpy()).inertia_ for seed in range(10)]
    assert np.mean(ours) == pytest.approx(np.mean(wanted), rel=0.1)
    assert min(ours) == pytest.approx(min(wanted), rel=0.02)


@pytest.mark.parametrize("k", [2, 4, 6])
def test_matching_and_v_measure(k):
    """All ways to match; both entropies written out."""
    for table in np.random.default_rng(k).integers(0, 9, (20, k, k)).astype(float):
        ways = itertools.permutations(range(k))
        assert matched(table) == max(sum(table[i, j] for i, j in enumerate(way)) for way in ways)
    share = table / table.sum()
    h = lambda p: -sum(x * np.log(x) for x in p.flatten() if x)
    given = lambda share: h(share) - h(share.sum(0))           # of rows, the column being known
    homogeneity, completeness = 1 - given(share) / h(share.sum(1)), 1 - given(share.T) / h(share.sum(0))
    wanted = 2 * homogeneity * completeness / (homogeneity + completeness)
    assert v_measure(table) == pytest.approx(wanted)
    assert v_measure(np.diag(np.arange(1.0, k + 1))[::-1]) == pytest.approx(1)
    assert v_measure(np.ones((k, k))) == pytest.approx(0, abs=1e-9)


# ── the flags ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def topics(here):
    """topics.tsv and more.tsv with rows of two labels, and a folder with two files of scored pairs."""
    lines = [line for line in (DATA / "topics.tsv").read_text().splitlines() if "\t" in line]
    head, rows = lines[0], [line.split("\t") for line in lines[1:]]
    usual = sorted({row[1] for row in rows})[:2]
    rows = [row for row in rows if row[1] in usual][:60]
    Path("topics.tsv").write_text("\n".join([head, *("\t".join(row) for row in rows[:40])]) + "\n")
    Path("more.tsv").write_text("\n".join([head, *("\t".join(row) for row in rows[40:])]) + "\n")
    Path("sts").mkdir()
    for i in (1, 2):
        pairs = [f"{SENTENCES[j][0]}\t{SENTENCES[i * j][0]}\t{j % 6}" for j in range(20)]
        Path(f"sts/sts{i}.tsv").write_text("\n".join(pairs))
    Path("sts/README.md").write_text("of these files")


JUDGED = "--seed 5 --test sts --transfer topics.tsv topics.tsv,more.tsv --cluster topics.tsv".split()


@pytest.mark.parametrize("name", ["simcse", "ease", "vascl", "dclr", "selfguided"])
def test_what_a_run_says_an_evaluation_says_again(name, topics, bert, capsys):
    """Of its best checkpoint; a rate so high makes it the first or the second of three."""
    data = {"ease": DATA / "entities.tsv", "selfguided": DATA / "sts.tsv"}.get(name, DATA / "sentences.txt")
    flags = ["--data", data, "--model", bert, "--steps", 3, "--batch-size", 20, "--max-length", 50,
             "--lr", 0.05, "--dev", "sts/sts1.tsv", "--eval-every", 1]
    flags += ["--guide", bert] if name == "dclr" else []
    main, labels = importlib.import_module(name).main, ("test", "transfer", "cluster")
    main([*map(str, flags), *JUDGED, "--out", "out"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(labels)]
    number = r"(-?\d+\.\d\d)"
    wanted = [f"test +{number} .* sts/sts1.tsv", f"test +{number} .* sts/sts2.tsv", f"test +{number}  mean",
              f"transfer {number}  C [ .0-9]+  topics.tsv", f"transfer {number}  C .*  topics.tsv,more.tsv",
              f"transfer {number}  mean", rf"cluster +{number} ± \d+.\d\d  accuracy {number}  topics.tsv",
              f"cluster +{number}  mean"]
    assert len(said) == 8 and all(map(re.fullmatch, wanted, said)), said
    main(["--evaluate", "--model", "out", *JUDGED])
    again = capsys.readouterr().out.splitlines()
    assert [line for line in again if line.startswith(labels)] == said


def test_embeddings_are_those_of_sentences_one_by_one(topics, finished, monkeypatch):
    """What the regression gets, and in which order; equal texts are read once."""
    seen = []

    def transfer(model, train, test, seed):
        seen.append((train, features(model, train[0])))
        return 1, []

    monkeypatch.setattr("kernels.training.extras.probes.transfer", transfer)
    simcse.main(["--evaluate", "--model", str(finished), "--transfer", "topics.tsv", "--pooling", "avg"])
    (rows, y, names), x = seen[0]
    lines = [line.split("\t") for line in Path("topics.tsv").read_text().splitlines()[1:]]
    assert [(text, names[label]) for (text,), label in zip(rows, y)] == [tuple(line[:2]) for line in lines]
    torch.testing.assert_close(x, embed_saved(finished, [text for (text,) in rows], "avg"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("flags, wanted", [
    (["--transfer", "no.tsv"], "no.tsv: No such file.*"),
    (["--transfer", "topics.tsv,more.tsv,more.tsv"], "--transfer topics.tsv,more.tsv,more.tsv: wanted a "
     "file, or two, .*"),
    (["--transfer", "topics.tsv,"], "--transfer topics.tsv,: wanted a file, or two, .*"),
    (["--transfer", "topics.tsv,other.tsv"], "other.tsv line 2: label 'zoo', wanted one that the training "
     "file has, .*"),
    (["--transfer", "one.tsv"], r"one.tsv: 1 labels \(label\) of 4 rows, wanted at least 2, .*"),
    (["--cluster", "own.tsv"], r"own.tsv: 4 labels \(label\) of 4 rows, wanted at least 2, .*"),
    (["--transfer", "gap.tsv"], "gap.tsv line 3: an empty cell; .*"),
    (["--cluster", "pairs.tsv"], "--cluster pairs.tsv: two columns of text, wanted one"),
    (["--transfer", "topics.tsv,pairs.tsv"], "--transfer topics.tsv,pairs.tsv: one file has a text .*"),
    (["--test", "empty"], "--test empty: no file in this folder ends in .*")])
def test_bad_input(flags, wanted, topics, bert, capfd):
    label = Path("topics.tsv").read_text().splitlines()[1].split("\t")[1]
    other = Path("topics.tsv").read_text().splitlines()
    other = next(line.split("\t")[1] for line in other[1:] if line.split("\t")[1] != label)
    Path("other.tsv").write_text("sentence\tlabel\nA.\tzoo\nB.\tzoo\n")
    Path("one.tsv").write_text("sentence\tlabel\n" + "A.\tx\n" * 4)
    Path("own.tsv").write_text("sentence\tlabel\nA.\tw\nB.\tx\nC.\ty\nD.\tz\n")
    Path("gap.tsv").write_text("sentence\tlabel\nA.\tw\n \tw\nC.\ty\nD.\ty\n")
    Path("pairs.tsv").write_text("sentence1\tsentence2\tlabel\n" + f"A.\tB.\t{label}\nC.\tD.\t{other}\n" * 3)
    Path("empty").mkdir()
    refuse("simcse", capfd, wanted, "--evaluate", "--model", bert, *flags)
