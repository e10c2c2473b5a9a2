"""Frozen embeddings judged by labels: a logistic regression, as SentEval's transfer tasks, and k-means."""
import argparse
import math
import os

import numpy as np
import torch
import torch.nn.functional as F

from ..cli import fail
from ..progress import progress
from ..tables import empty_cell
from ..text.labelled import find_columns

FOLDS, STARTS = 10, 5
STRENGTHS = [2.0**power for power in range(-2, 4)]             # C, of which one is chosen (SentEval)


def load_labelled(path, names=None):
    """([(text,) or (text, text)], label numbers (N,), names of the labels) of a file; only `names` are
    labels, if given."""
    columns = argparse.Namespace(text=None, label=None)
    table, texts, label = find_columns(path, columns)
    rows, answers = [], []
    for place, cells in table:
        if fault := empty_cell([cells[i] for i in (*texts, label)]):
            fail(f"{path} {place}: {fault}")
        rows.append(tuple(" ".join(cells[i].split()) for i in texts))
        answers.append(cells[label].strip())
        if names and answers[-1] not in names:
            fail(f"{path} {place}: label {answers[-1]!r}, wanted one that the training file has, "
                 f"{', '.join(names)}"[:200])
    names = names or sorted(set(answers))
    if not 2 <= len(names) <= len(rows) // 2:
        fail(f"{path}: {len(names)} labels ({columns.label}) of {len(rows)} rows, wanted at least 2, and two "
             "rows for each")
    numbers = {name: i for i, name in enumerate(names)}
    return rows, torch.tensor([numbers[answer] for answer in answers]), names


def load_parts(path):
    """(train, test or None) of a file that is cross-validated, or of train.tsv,test.tsv."""
    names = [path] if os.path.exists(path) else path.split(",")
    if len(names) > 2 or not all(names):
        fail(f"--transfer {path}: wanted a file, or two, to train on and to test on, with a comma between")
    train = load_labelled(names[0])
    test = load_labelled(names[1], train[2]) if names[1:] else None
    if test and len(test[0][0]) != len(train[0][0]):
        fail(f"--transfer {path}: one file has a text a row, the other two")
    return train, test


def load_clusters(path):
    """What load_labelled gives, of a file with one column of text."""
    found = load_labelled(path)
    if len(found[0][0]) == 2:
        fail(f"--cluster {path}: two columns of text, wanted one")
    return found


def features(model, rows):
    """(N, H) embeddings of texts; of pairs |u − v| and u·v side by side (SentEval)."""
    z, places = model.embed([text for row in rows for text in row])
    z = F.normalize(z, dim=1) if model.normalise else z
    u, *v = z[places].view(len(rows), -1, z.shape[1]).unbind(1)
    return torch.cat([(u - v[0]).abs(), u * v[0]], 1) if v else u


# ── a logistic regression ───────────────────────────────────────────────────────────────────────────────────


def transfer(model, train, test, seed):
    """(accuracy in percent, the strengths C that were chosen) of a logistic regression on the embeddings of
    load_labelled's rows; without test it is cross-validated. C is chosen on a tenth of the training part."""
    rows, y, names = train
    x, y, right, chosen = features(model, rows), y.to(model.device), [], set()
    if test:
        parts = [(x, y, features(model, test[0]), test[1].to(model.device))]
    else:
        fold = folds(y, seed)
        parts = ((x[fold != i], y[fold != i], x[fold == i], y[fold == i]) for i in range(FOLDS))
    bar = progress(parts, "logistic regression", " folds", total=1 if test else FOLDS)
    for own, labels, held, wanted in bar:
        strength = best_strength(own, labels, len(names), seed)
        (fit,) = logistic_regression(own, labels, len(names), [strength])
        right.append(logits(held, *fit).argmax(1) == wanted)
        chosen.add(strength)
    return 100 * torch.cat(right).double().mean().item(), sorted(chosen)


def folds(y, seed):
    """(N,) the fold of each row, of FOLDS of equal size and with equal shares of labels."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    order = order[y[order].argsort(stable=True)]
    return torch.empty_like(y).scatter(0, order, torch.arange(len(y), device=y.device) % FOLDS)


def best_strength(x, y, classes, seed):
    """The C of STRENGTHS with the highest accuracy on a held-out fold; of several the smallest."""
    held = folds(y, seed + 1) == 0
    fits = logistic_regression(x[~held], y[~held], classes, STRENGTHS)
    right = [(logits(x[held], *fit).argmax(1) == y[held]).sum().item() for fit in fits]
    return STRENGTHS[right.index(max(right))]


def logistic_regression(x, y, classes, strengths):
    """For each C the (weights, biases) of logits that have the least Σ cross entropy + |weights|² / 2C.

    x, y        (N, D) any float type, (N,) int64 from 0 to classes − 1
    strengths   C, rising: each fit starts where the last one ended
    returns     [((D, classes), (classes,))] float64; of two classes only the second one's
    """
    x, centre, columns, fits = x.double(), x.double().mean(0), 1 if classes == 2 else classes, []
    eigenvalues, basis = torch.linalg.eigh((x - centre).T @ (x - centre))
    rotated, w = (x - centre) @ basis, x.new_zeros(x.shape[1], columns)
    biases = x.new_zeros(columns).requires_grad_()
    for c in strengths:
        # in units in which the loss is about equally steep in all directions L-BFGS needs few steps
        unit = (eigenvalues.clamp(min=0) * (classes - 1) / classes**2 + 1 / c).rsqrt()[:, None]
        w = unit * descend(rotated * unit.T, y, w / unit, biases, unit**2 / c)
        weights = basis @ w
        fits.append((weights, biases.detach() - centre @ weights))
    return fits


@torch.enable_grad()
def descend(x, y, w, biases, decay):
    """The w of the least Σ cross entropy + Σ decay · w² / 2, from w on; leaves its biases in `biases`."""
    w.requires_grad_()
    optimizer = torch.optim.LBFGS([w, biases], max_iter=1000, tolerance_grad=1e-5 * len(x), history_size=50,
                                  line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        errors = F.cross_entropy(logits(x, w, biases), y, reduction="sum")
        value = errors + (decay * w.square()).sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    return w.detach()


def logits(x, weights, biases):
    """(N, classes): of two classes the first one's are 0."""
    found = x.double() @ weights + biases
    return F.pad(found, (1, 0)) if found.shape[1] == 1 else found


# ── k-means ─────────────────────────────────────────────────────────────────────────────────────────────────


def cluster(model, data, seed):
    """[(V-measure, accuracy by the best matching)] in percent, of k-means on the embeddings of
    load_labelled's rows, k the number of labels, from STARTS different starts."""
    rows, y, names = data
    x = features(model, rows)
    starts = progress(range(STARTS), "k-means", " starts")
    found = [k_means(x - x.mean(0), len(names), seed + i).cpu().numpy() for i in starts]
    return [(100 * v_measure(table), 100 * matched(table) / table.sum())
            for table in (contingency(y.numpy(), said, len(names)) for said in found)]


def k_means(x, k, seed, most=300):
    """(N,) the cluster of each row of x (N, D): Lloyd's steps from greedy k-means++ until no row moves."""
    generator, squares = torch.Generator().manual_seed(seed), x.square().sum(1)
    distances = lambda rows: (squares[:, None] - 2 * x @ rows.T + rows.square().sum(1)).clamp(min=0)
    draw = lambda weights, n: torch.multinomial(weights.cpu().double(), n, True, generator=generator)
    centres = x[draw(torch.ones(len(x)), 1)]
    least = distances(centres)[:, 0]
    while len(centres) < k:                                    # of a few far rows the one that helps most
        rows = x[draw(least + 1e-12, 2 + int(math.log(k)))]
        closer = distances(rows).minimum(least[:, None])
        best = closer.sum(0).argmin()
        centres, least = torch.cat([centres, rows[best, None]]), closer[:, best]
    said = torch.full((len(x),), -1, device=x.device)
    for _ in range(most):
        nearest, now = distances(centres).min(1)
        sizes = now.bincount(minlength=k)
        for empty in (sizes == 0).nonzero():                   # takes the row farthest from its centre
            far = nearest.argmax()
            now[far], nearest[far] = empty, 0
        if (now == said).all():
            break
        said, sizes = now, now.bincount(minlength=k)
        centres = torch.zeros_like(centres).index_add_(0, said, x) / sizes.clamp(min=1)[:, None]
    return said


def contingency(truth, said, k):
    """(k, k) rows of each label in each cluster."""
    table = np.zeros((k, k))
    np.add.at(table, (truth, said), 1)
    return table


def v_measure(table):
    """Harmonic mean of homogeneity and completeness (Rosenberg, Hirschberg 2007), from 0 to 1."""
    shares = table / table.sum()
    entropy = lambda p: -(p[p > 0] * np.log(p[p > 0])).sum()
    truth, said = entropy(shares.sum(1)), entropy(shares.sum(0))
    return 2 * (truth + said - entropy(shares)) / (truth + said) if truth + said else 1.0


def matched(table):
    """The most rows that clusters can have right when each stands for a label of its own.

    The Hungarian method: rows take columns one after the other, along the cheapest path of changes.
    """
    k, cost = len(table), table.max() - table
    of_row, of_column, row_of = np.zeros(k), np.zeros(k + 1), np.full(k + 1, -1)
    for row in range(k):
        least, before, done = np.full(k, np.inf), np.full(k, k), np.zeros(k + 1, bool)
        column, row_of[k] = k, row
        while row_of[column] >= 0:
            done[column], at = True, row_of[column]
            free = ~done[:k]
            reduced = cost[at] - of_row[at] - of_column[:k]
            better = free & (reduced < least)
            least[better], before[better] = reduced[better], column
            column = np.where(free, least, np.inf).argmin()
            step = least[column]
            of_row[row_of[done]] += step
            of_column[done] -= step
            least[free] -= step
        while column != k:
            row_of[column], column = row_of[before[column]], before[column]
    return table[row_of[:k], np.arange(k)].sum()
