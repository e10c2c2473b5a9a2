"""Evaluate frozen embeddings on labelled texts: logistic regression as in SentEval, and k-means."""
import argparse
import math
import os

import numpy as np
import torch
import torch.nn.functional as F

from .data import empty_cell
from .errors import fail
from .progress import progress
from .text.classifier import find_columns

FOLDS = 10                                                     # of the cross-validation
STARTS = 5                                                     # of k-means, with different seeds
C_GRID = [2.0**power for power in range(-2, 4)]                # inverse regularisation strengths C (SentEval)


def load_labelled(path, names=None):
    """Return ([(text,) or (text, text)], label numbers (N,), names of the labels) of a file.

    names   names of the labels that the file may have; None: all that it has
    """
    columns = argparse.Namespace(text_columns=None, label_column=None)         # find_columns fills them
    table, texts, label = find_columns(path, columns)
    rows, answers = [], []
    for place, cells in table:
        if fault := empty_cell([cells[i] for i in (*texts, label)]):
            fail(f"{path} {place}: {fault}")
        rows.append(tuple(" ".join(cells[i].split()) for i in texts))
        answers.append(cells[label].strip())
        if names and answers[-1] not in names:
            fail(f"{path} {place}: label {answers[-1]!r}, expected a label of the training file: "
                 f"{', '.join(names)}"[:200])
    names = names or sorted(set(answers))
    if not 2 <= len(names) <= len(rows) // 2:
        fail(f"{path}: {len(names)} labels (column {columns.label_column}) in {len(rows)} rows, expected at "
             "least 2 labels, with two rows for each on average")
    numbers = {name: i for i, name in enumerate(names)}
    return rows, torch.tensor([numbers[answer] for answer in answers]), names


def load_train_test(path):
    """Return (train, test) of a value of --transfer, each as load_labelled returns it.

    path   train.tsv,test.tsv; or one file to be cross-validated, for which test is None
    """
    names = [path] if os.path.exists(path) else path.split(",")
    if len(names) > 2 or not all(names):
        fail(f"--transfer {path}: expected one file, or a training file and a test file separated by a comma")
    train = load_labelled(names[0])
    test = load_labelled(names[1], train[2]) if names[1:] else None
    if test and len(test[0][0]) != len(train[0][0]):
        fail(f"--transfer {path}: one file has one text column and the other two, expected the same number")
    return train, test


def load_clusters(path):
    """Return what load_labelled returns, for a value of --cluster: a file with one text column."""
    found = load_labelled(path)
    if len(found[0][0]) == 2:
        fail(f"--cluster {path}: two text columns, expected one")
    return found


def features(model, rows):
    """Return features of N rows: for a text its embedding u, (N, H); for a pair |u − v| and u ⊙ v side by
    side, (N, 2H), as in SentEval."""
    z, places = model.embed([text for row in rows for text in row])
    z = F.normalize(z, dim=1) if model.normalise else z
    u, *v = z[places].view(len(rows), -1, z.shape[1]).unbind(1)
    return torch.cat([(u - v[0]).abs(), u * v[0]], 1) if v else u


# ── logistic regression ────────────────────────────────────────────────────────────────────────────────────


def evaluate_transfer(model, train, test, seed):
    """Return (accuracy in percent, the values of C that were chosen) of a logistic regression on embeddings.

    Each C is chosen on a tenth of the rows that the regression may train on.

    train, test   as load_labelled returns them; without test, train is cross-validated
    """
    rows, y, names = train
    x, y, right, chosen = features(model, rows), y.to(model.device), [], set()
    if test:
        parts = [(x, y, features(model, test[0]), test[1].to(model.device))]
    else:
        fold = folds(y, seed)
        parts = ((x[fold != i], y[fold != i], x[fold == i], y[fold == i]) for i in range(FOLDS))
    bar = progress(parts, "logistic regression", " folds", total=1 if test else FOLDS)
    for x_train, y_train, x_test, y_test in bar:
        c = best_c(x_train, y_train, len(names), seed)
        (fit,) = logistic_regression(x_train, y_train, len(names), [c])
        right.append(logits(x_test, *fit).argmax(1) == y_test)
        chosen.add(c)
    return 100 * torch.cat(right).double().mean().item(), sorted(chosen)


def folds(y, seed):
    """Assign each row to one of FOLDS folds of equal size, with the same distribution of labels: (N,)."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    order = order[y[order].argsort(stable=True)]
    return torch.empty_like(y).scatter(0, order, torch.arange(len(y), device=y.device) % FOLDS)


def best_c(x, y, classes, seed):
    """Return the C of C_GRID with the highest accuracy on a held-out fold, the smallest if several tie."""
    held_out = folds(y, seed + 1) == 0
    fits = logistic_regression(x[~held_out], y[~held_out], classes, C_GRID)
    right = [(logits(x[held_out], *fit).argmax(1) == y[held_out]).sum().item() for fit in fits]
    return C_GRID[right.index(max(right))]


def logistic_regression(x, y, classes, c_values):
    """Return for each C the (weights, biases) that minimise Σ cross entropy + |weights|² / 2C.

    x, y        (N, D) any float type, and (N,) int64 from 0 to classes − 1
    c_values    values of C, in rising order: each fit starts from the previous one
    returns     [((D, classes), (classes,))] float64; with two classes [((D, 1), (1,))], only the weights and
                the bias of the second class
    """
    x = x.double()
    centre = x.mean(0)
    columns = 1 if classes == 2 else classes
    fits = []
    eigenvalues, basis = torch.linalg.eigh((x - centre).T @ (x - centre))
    rotated, w = (x - centre) @ basis, x.new_zeros(x.shape[1], columns)
    biases = x.new_zeros(columns).requires_grad_()
    for c in c_values:
        # Rescale the axes so that the loss is about equally curved along each: L-BFGS then needs few steps.
        scale = (eigenvalues.clamp(min=0) * (classes - 1) / classes**2 + 1 / c).rsqrt()[:, None]
        w = scale * minimise_loss(rotated * scale.T, y, w / scale, biases, scale**2 / c)
        weights = basis @ w
        fits.append((weights, biases.detach() - centre @ weights))
    return fits


@torch.enable_grad()
def minimise_loss(x, y, w, biases, decay):
    """Return the weights that minimise Σ cross entropy + Σ decay · w² / 2. The search starts from the given w
    and `biases`; `biases` is updated in place."""
    w.requires_grad_()
    optimizer = torch.optim.LBFGS([w, biases], max_iter=1000, tolerance_grad=1e-5 * len(x), history_size=50,
                                  line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        cross_entropy = F.cross_entropy(logits(x, w, biases), y, reduction="sum")
        value = cross_entropy + (decay * w.square()).sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    return w.detach()


def logits(x, weights, biases):
    """Return the logits (N, classes). With two classes, the weights may have one column: it gives the logits
    of the second class, and the logits of the first class are 0."""
    found = x.double() @ weights + biases
    return F.pad(found, (1, 0)) if found.shape[1] == 1 else found


# ── k-means ─────────────────────────────────────────────────────────────────────────────────────────────────


def evaluate_clusters(model, data, seed):
    """Return [(V-measure, accuracy under the best matching)] in percent, of STARTS runs of k-means.

    k is the number of labels.

    data   as load_labelled returns it
    """
    rows, y, names = data
    x = features(model, rows)
    starts = progress(range(STARTS), "k-means", " starts")
    runs = [k_means(x - x.mean(0), len(names), seed + i).cpu().numpy() for i in starts]
    tables = [contingency(y.numpy(), assigned, len(names)) for assigned in runs]
    return [(100 * v_measure(table), 100 * best_matching(table) / table.sum()) for table in tables]


def k_means(x, k, seed, max_steps=300):
    """Return the cluster (N,) of each row of x (N, D). Lloyd's algorithm, initialised by greedy k-means++,
    until no row changes its cluster."""
    generator, squares = torch.Generator().manual_seed(seed), x.square().sum(1)

    def squared_distances(rows):
        return (squares[:, None] - 2 * x @ rows.T + rows.square().sum(1)).clamp(min=0)

    def sample(weights, n):
        return torch.multinomial(weights.cpu().double(), n, True, generator=generator)

    centres = x[sample(torch.ones(len(x)), 1)]
    least = squared_distances(centres)[:, 0]                   # of each row to its nearest centre
    while len(centres) < k:                                    # greedy: the best of several candidates
        rows = x[sample(least + 1e-12, 2 + int(math.log(k)))]
        closer = squared_distances(rows).minimum(least[:, None])
        best = closer.sum(0).argmin()
        centres, least = torch.cat([centres, rows[best, None]]), closer[:, best]
    assigned = torch.full((len(x),), -1, device=x.device)
    for _ in range(max_steps):
        nearest, now = squared_distances(centres).min(1)
        sizes = now.bincount(minlength=k)
        for empty in (sizes == 0).nonzero():                   # gets the row farthest from its centre
            far = nearest.argmax()
            now[far], nearest[far] = empty, 0
        if (now == assigned).all():
            break
        assigned, sizes = now, now.bincount(minlength=k)
        centres = torch.zeros_like(centres).index_add_(0, assigned, x) / sizes.clamp(min=1)[:, None]
    return assigned


def contingency(labels, assigned, k):
    """Return a table (k, k): the number of rows of each label (rows) in each cluster (columns)."""
    table = np.zeros((k, k))
    np.add.at(table, (labels, assigned), 1)
    return table


def v_measure(table):
    """Return the harmonic mean of homogeneity and completeness, from 0 to 1 (Rosenberg, Hirschberg 2007)."""
    shares = table / table.sum()

    def entropy(p):
        return -(p[p > 0] * np.log(p[p > 0])).sum()

    of_labels, of_clusters = entropy(shares.sum(1)), entropy(shares.sum(0))
    total = of_labels + of_clusters
    return 2 * (total - entropy(shares)) / total if total else 1.0


def best_matching(table):
    """Return the largest number of rows that are right if each cluster is matched to a label of its own. The
    Hungarian method: the rows of the table get their columns one after the other, along shortest augmenting
    paths."""
    k, cost = len(table), table.max() - table
    row_potential, column_potential = np.zeros(k), np.zeros(k + 1)
    row_of = np.full(k + 1, -1)                                # of each column; column k holds the new row
    for row in range(k):
        least, previous, done = np.full(k, np.inf), np.full(k, k), np.zeros(k + 1, bool)
        column, row_of[k] = k, row
        while row_of[column] >= 0:
            done[column], at = True, row_of[column]
            free = ~done[:k]
            reduced = cost[at] - row_potential[at] - column_potential[:k]
            better = free & (reduced < least)
            least[better], previous[better] = reduced[better], column
            column = np.where(free, least, np.inf).argmin()
            step = least[column]
            row_potential[row_of[done]] += step
            column_potential[done] -= step
            least[free] -= step
        while column != k:
            row_of[column], column = row_of[previous[column]], previous[column]
    return table[row_of[:k], np.arange(k)].sum()
