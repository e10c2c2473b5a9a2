"""Logistic regression and k-means on frozen embeddings, compared with their definitions and, if it is
installed, with scikit-learn; and --transfer and --cluster."""
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
from kernels.training.probes import (
    C_GRID,
    best_c,
    best_matching,
    contingency,
    evaluate_clusters,
    evaluate_transfer,
    features,
    folds,
    k_means,
    logistic_regression,
    logits,
    v_measure,
)
from running import DATA, SENTENCES, embed_saved, rejects


def blobs(classes, n=40, width=6, spread=0.3, seed=0):
    """Return (x (N, width), y (N,)): rows around a centre for each class. Column 0 is multiplied by 50."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(classes * n) % classes
    x = torch.randn(classes, width, generator=generator)[y]
    x = x + spread * torch.randn(x.shape, generator=generator)
    return x * torch.tensor([50.0] + [1.0] * (width - 1)), y


def stub(x):
    """Return a model that embeds the text "7" as row 7 of x."""
    return SimpleNamespace(embed=lambda texts: (x, [int(text) for text in texts]), normalise=False,
                           device=x.device)


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_regression_minimises_the_loss(classes):
    """L-BFGS reaches the minimum for every C, although the columns differ in scale. For two classes the loss
    has one weight vector."""
    x, y = blobs(classes, spread=1.5)
    for c, (weights, biases) in zip(C_GRID, logistic_regression(x, y, classes, C_GRID)):
        weights.requires_grad_(), biases.requires_grad_()
        z = x.double() @ weights + biases
        if classes == 2:
            cross_entropy = F.softplus(z[:, 0] * (1 - 2 * y)).sum()
        else:
            cross_entropy = -z.log_softmax(1).gather(1, y[:, None]).sum()
        loss = cross_entropy + weights.square().sum() / (2 * c)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, (weights, biases))])
        hessian = torch.autograd.functional.hessian(
            lambda w: F.cross_entropy(logits(x, w, biases.detach()), y, reduction="sum")
            + w.square().sum() / (2 * c), weights.detach()).flatten(0, 1).flatten(1)
        inner = gradient[: len(hessian)]
        assert weights.shape == (6, 1 if classes == 2 else 4)
        # the left side is twice the remaining decrease (Newton)
        assert inner @ torch.linalg.solve(hessian, inner) < 1e-4 * loss
        assert gradient[len(hessian) :].abs().max() < 0.01 * len(x)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("c", [0.25, 8])
def test_logistic_regression_equals_scikit_learn(classes, c):
    theirs = pytest.importorskip("sklearn.linear_model").LogisticRegression(C=c, max_iter=10_000, tol=1e-8)
    x, y = blobs(classes, spread=1.5)
    found = logits(x, *logistic_regression(x, y, classes, [c])[0]).softmax(1)
    expected = theirs.fit(x.double().numpy(), y.numpy()).predict_proba(x.double().numpy())
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_folds_have_equal_sizes_and_label_distributions():
    y = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)[torch.randperm(100)]
    fold = folds(y, 1)
    assert fold.bincount().tolist() == [10] * 10 and not fold.equal(folds(y, 2)) and fold.equal(folds(y, 1))
    assert (contingency(fold.numpy(), y.numpy(), 10)[:, :3] == [5, 3, 2]).all()


def test_c_is_chosen_on_a_held_out_fold():
    """The best C on this fold is chosen, for rows that are mostly noise; the smallest if all are equally
    good."""
    x, y = blobs(2, n=100, width=100, spread=10.0, seed=1)
    x = F.normalize(x, dim=1)
    held = folds(y, 4) == 0
    right = [(logits(x[held], *logistic_regression(x[~held], y[~held], 2, [c])[0]).argmax(1) == y[held]).sum()
             for c in C_GRID]
    assert len(set(map(int, right))) > 1                       # otherwise any choice would pass
    assert best_c(x, y, 2, seed=3) == C_GRID[int(np.argmax(right))]
    assert best_c(10.0 * F.one_hot(y), y, 2, seed=3) == C_GRID[0]


def test_transfer_never_tests_on_training_rows():
    """A test file with permuted labels has accuracy 0. In cross-validation every row is tested once, by a
    model that was not trained on it."""
    x, y = blobs(3, spread=0.1)
    rows, names = [(str(i),) for i in range(120)], list("abc")
    train, test = (rows[:90], y[:90], names), (rows[90:], y[90:], names)
    assert evaluate_transfer(stub(x), train, test, 1)[0] == 100
    assert evaluate_transfer(stub(x), train, (rows[90:], (y[90:] + 1) % 3, names), 1)[0] == 0
    accuracy, strengths = evaluate_transfer(stub(x), (rows, y, names), None, 1)
    assert accuracy == 100 and set(strengths) <= set(C_GRID)
    noise = torch.randint(3, (120,), generator=torch.Generator().manual_seed(0))
    accuracy, _ = evaluate_transfer(stub(torch.eye(120)), (rows, noise, names), None, 1)
    assert accuracy < 50                                       # 100 if the rows were not held out


def test_features_of_pairs():
    x = torch.randn(4, 3)
    found = features(stub(x), [("0", "1"), ("2", "3")])
    torch.testing.assert_close(found, torch.cat([(x[::2] - x[1::2]).abs(), x[::2] * x[1::2]], 1))
    normalising = stub(x)
    normalising.normalise = True
    torch.testing.assert_close(features(normalising, [("3",)]), F.normalize(x[3:], dim=1))


def test_k_means_finds_blobs_and_converges():
    x, y = blobs(5, spread=0.05)
    x[:, 0] = 10 * y
    data = [(str(i),) for i in range(200)], y, list("abcde")
    assert evaluate_clusters(stub(x), data, 1) == [(100, 100)] * 5
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    assigned = k_means(x, 6, 0)
    centres = torch.stack([x[assigned == i].mean(0) for i in range(6)])
    assert assigned.equal(torch.cdist(x, centres).argmin(1))       # every row is in its nearest cluster
    grid = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0)).repeat(20, 1)
    grid += 0.02 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    found = [len(set(k_means(grid, 25, i)[:25].tolist())) for i in range(20)]
    assert found.count(25) == 20                               # plain k-means++ misses some clusters
    assigned = k_means(torch.tensor([[0.0], [1.0]])[torch.arange(8) % 2], 4, 0)    # 2 points for 4 clusters
    assert len(assigned) == 8 and assigned[0] != assigned[1]


def test_k_means_is_as_good_as_scikit_learn():
    """Compare the sums of squared distances of ten runs each: their mean and their minimum."""
    theirs = pytest.importorskip("sklearn.cluster").KMeans
    x, _ = blobs(8, spread=2.0)
    ours = []
    for seed in range(10):
        assigned = k_means(x, 8, seed)
        clusters = [x[assigned == i] for i in range(8)]
        ours.append(sum((rows - rows.mean(0)).square().sum().item() for rows in clusters))
    expected = [theirs(8, n_init=1, random_state=seed).fit(x.numpy()).inertia_ for seed in range(10)]
    assert np.mean(ours) == pytest.approx(np.mean(expected), rel=0.1)
    assert min(ours) == pytest.approx(min(expected), rel=0.02)


@pytest.mark.parametrize("k", [2, 4, 6])
def test_matching_and_v_measure(k):
    """The matching is the best of all permutations. The V-measure equals its definition by entropies."""
    for table in np.random.default_rng(k).integers(0, 9, (20, k, k)).astype(float):
        permutations = itertools.permutations(range(k))
        assert best_matching(table) == max(sum(table[i, j] for i, j in enumerate(columns))
                                           for columns in permutations)
    share = table / table.sum()

    def entropy(p):
        return -sum(x * np.log(x) for x in p.flatten() if x)

    def conditional_entropy(share):
        """Return the entropy of the row, given the column."""
        return entropy(share) - entropy(share.sum(0))

    homogeneity = 1 - conditional_entropy(share) / entropy(share.sum(1))
    completeness = 1 - conditional_entropy(share.T) / entropy(share.sum(0))
    expected = 2 * homogeneity * completeness / (homogeneity + completeness)
    assert v_measure(table) == pytest.approx(expected)
    assert v_measure(np.diag(np.arange(1.0, k + 1))[::-1]) == pytest.approx(1)
    assert v_measure(np.ones((k, k))) == pytest.approx(0, abs=1e-9)


# ── the flags ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def topics(cwd):
    """Write topics.tsv and more.tsv with rows of two labels, and the folder sts with two files of scored
    pairs."""
    lines = [line for line in (DATA / "topics.tsv").read_text().splitlines() if "\t" in line]
    head, rows = lines[0], [line.split("\t") for line in lines[1:]]
    labels = sorted({row[1] for row in rows})[:2]
    rows = [row for row in rows if row[1] in labels][:60]
    Path("topics.tsv").write_text("\n".join([head, *("\t".join(row) for row in rows[:40])]) + "\n")
    Path("more.tsv").write_text("\n".join([head, *("\t".join(row) for row in rows[40:])]) + "\n")
    Path("sts").mkdir()
    for i in (1, 2):
        pairs = [f"{SENTENCES[j][0]}\t{SENTENCES[i * j][0]}\t{j % 6}" for j in range(20)]
        Path(f"sts/sts{i}.tsv").write_text("\n".join(pairs))
    Path("sts/README.md").write_text("of these files")


TEST_FLAGS = "--seed 5 --test sts --transfer topics.tsv topics.tsv,more.tsv --cluster topics.tsv".split()


@pytest.mark.parametrize("name", ["simcse", "ease", "vascl", "dclr", "selfguided"])
def test_evaluation_prints_the_final_scores_of_the_run(name, topics, bert, capsys):
    """The scores are those of the best checkpoint, which at this learning rate is not the last one."""
    data = {"ease": DATA / "entities.tsv", "selfguided": DATA / "sts.tsv"}.get(name, DATA / "sentences.txt")
    Path(data.name).write_bytes(b"".join(data.read_bytes().splitlines(True)[:61]))         # three batches
    flags = ["--data", data.name, "--model", bert, "--steps", 3, "--batch-size", 20, "--max-length", 50,
             "--lr", 0.05, "--dev", "sts/sts1.tsv", "--eval-every", 1]
    flags += ["--guide", bert] if name == "dclr" else []
    main, labels = importlib.import_module(name).main, ("test", "transfer", "cluster")
    main([*map(str, flags), *TEST_FLAGS, "--out", "out"])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(labels)]
    number = r"(-?\d+\.\d\d)"
    expected = [f"test +{number} .* sts/sts1.tsv", f"test +{number} .* sts/sts2.tsv", f"test +{number}  mean",
              f"transfer {number}  C [ .0-9]+  topics.tsv", f"transfer {number}  C .*  topics.tsv,more.tsv",
              f"transfer {number}  mean", rf"cluster +{number} ± \d+.\d\d  accuracy {number}  topics.tsv",
              f"cluster +{number}  mean"]
    assert len(printed) == 8 and all(map(re.fullmatch, expected, printed)), printed
    main(["--evaluate", "--model", "out", *TEST_FLAGS])
    again = capsys.readouterr().out.splitlines()
    assert [line for line in again if line.startswith(labels)] == printed


def test_features_equal_single_embeddings(topics, finished, monkeypatch):
    """The regression gets the embedding of each text in order, as if the text was embedded alone."""
    seen = []

    def evaluate_transfer(model, train, test, seed):
        seen.append((train, features(model, train[0])))
        return 1, []

    monkeypatch.setattr("kernels.training.probes.evaluate_transfer", evaluate_transfer)
    simcse.main(["--evaluate", "--model", str(finished), "--transfer", "topics.tsv", "--pooling", "avg"])
    data, x = seen[0]
    rows, y, names = data
    lines = [line.split("\t") for line in Path("topics.tsv").read_text().splitlines()[1:]]
    assert [(text, names[label]) for (text,), label in zip(rows, y)] == [tuple(line[:2]) for line in lines]
    torch.testing.assert_close(x, embed_saved(finished, [text for (text,) in rows], "avg"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("flags, expected", [
    (["--transfer", "no.tsv"], "no.tsv: No such file.*"),
    (["--transfer", "topics.tsv,more.tsv,more.tsv"], "--transfer topics.tsv,more.tsv,more.tsv: expected "
     "one file, or a training file and .*"),
    (["--transfer", "topics.tsv,"], "--transfer topics.tsv,: expected one file, or .*"),
    (["--transfer", "topics.tsv,other.tsv"], "other.tsv line 2: label 'zoo', expected a label of the "
     "training file: .*"),
    (["--transfer", "one.tsv"], r"one.tsv: 1 labels \(column label\) in 4 rows, expected at least 2 .*"),
    (["--cluster", "own.tsv"], r"own.tsv: 4 labels \(column label\) in 4 rows, expected at least 2 .*"),
    (["--transfer", "gap.tsv"], "gap.tsv line 3: an empty cell; .*"),
    (["--cluster", "pairs.tsv"], "--cluster pairs.tsv: two text columns, expected one"),
    (["--transfer", "topics.tsv,pairs.tsv"], "--transfer topics.tsv,pairs.tsv: one file has one .*"),
    (["--test", "empty"], "--test empty: the folder has no file whose name ends in .*")])
def test_bad_input(flags, expected, topics, bert, capfd):
    labels = [line.split("\t")[1] for line in Path("topics.tsv").read_text().splitlines()[1:]]
    label = labels[0]
    other = next(name for name in labels if name != label)
    Path("other.tsv").write_text("sentence\tlabel\nA.\tzoo\nB.\tzoo\n")
    Path("one.tsv").write_text("sentence\tlabel\n" + "A.\tx\n" * 4)
    Path("own.tsv").write_text("sentence\tlabel\nA.\tw\nB.\tx\nC.\ty\nD.\tz\n")
    Path("gap.tsv").write_text("sentence\tlabel\nA.\tw\n \tw\nC.\ty\nD.\ty\n")
    Path("pairs.tsv").write_text("sentence1\tsentence2\tlabel\n" + f"A.\tB.\t{label}\nC.\tD.\t{other}\n" * 3)
    Path("empty").mkdir()
    rejects("simcse", capfd, expected, "--evaluate", "--model", bert, *flags)
