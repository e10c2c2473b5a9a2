"""Evaluate frozen embeddings on labelled texts: logistic regression as in SentEval, and k-means.

Both need the package scikit-learn. Only the flags --transfer and --cluster use this module.
"""
import argparse
import os
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F

from .data import empty_cell
from .errors import fail
from .progress import progress
from .text.classifier import find_columns

FOLDS = 10                                       # number of parts in cross-validation
MIN_ROWS = 12                                    # rows needed of each of 2 labels: 9 folds then have ≥ 10
STARTS = 5                                       # number of runs of k-means, with different seeds
C_GRID = [2.0**power for power in range(-2, 4)]  # inverse regularisation strengths C (SentEval)


def require_scikit_learn():
    """Fail if scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        fail("--transfer and --cluster need the package scikit-learn: pip install scikit-learn")


def load_labelled(path):
    """Read (rows, labels (N,)) from a file. A row is (text,) or (text, text), and a label is a string."""
    columns = argparse.Namespace(text_columns=None, label_column=None)         # find_columns sets both
    table, texts, label = find_columns(path, columns)
    rows, labels = [], []
    for place, cells in table:
        if fault := empty_cell([cells[i] for i in (*texts, label)]):
            fail(f"{path} {place}: {fault}")
        rows.append(tuple(" ".join(cells[i].split()) for i in texts))
        labels.append(cells[label].strip())
    return rows, np.array(labels)


def load_train_test(path):
    """Read (train, test) for a value of --transfer, each as load_labelled returns it.

    path   "train.tsv,test.tsv", or one file for cross-validation: then test is None
    """
    names = [path] if os.path.exists(path) else path.split(",")
    if len(names) > 2 or not all(names):
        fail(f"--transfer {path}: expected one file, or a training file and a test file separated by a comma")
    train = load_labelled(names[0])
    counts = Counter(train[1].tolist())
    if sum(count >= MIN_ROWS for count in counts.values()) < 2:
        fail(f"{names[0]}: {len(counts)} labels in {len(train[0])} rows, expected at least 2 labels with "
             f"{MIN_ROWS} rows each")
    if len(names) == 1:
        return train, None
    test = load_labelled(names[1])
    if unknown := {*test[1].tolist()} - {*counts}:
        fail(f"{names[1]}: label {min(unknown)!r}, expected a label of {names[0]}: "
             f"{', '.join(sorted(counts))}"[:300])
    if len(test[0][0]) != len(train[0][0]):
        fail(f"--transfer {path}: one file has one text column, the other has two; expected equal numbers")
    return train, test


def load_clusters(path):
    """Read a file of --cluster as load_labelled does. The file must have one text column."""
    rows, labels = load_labelled(path)
    if len(rows[0]) == 2:
        fail(f"--cluster {path}: two text columns, expected one")
    if not 2 <= len(set(labels)) <= len(rows) // 2:
        fail(f"{path}: {len(set(labels))} labels in {len(rows)} rows, expected at least 2 labels, with two "
             "or more rows per label on average")
    return rows, labels


def features(model, rows):
    """Return float64 features of N rows, as in SentEval. Texts have their embeddings as features: (N, H).
    A pair with the embeddings u and v has |u − v| and u ⊙ v, concatenated: (N, 2H)."""
    z, places = model.embed([text for row in rows for text in row])
    z = F.normalize(z, dim=1) if model.normalise else z
    u, *v = z[places].view(len(rows), -1, z.shape[1]).unbind(1)
    return (torch.cat([(u - v[0]).abs(), u * v[0]], 1) if v else u).double().cpu().numpy()


def evaluate_transfer(model, train, test, seed):
    """Train logistic regressions on embeddings. Return (accuracy in percent, the values of C chosen).

    Each regression chooses C, its inverse regularisation strength, on a tenth of its training rows.

    train, test   as load_labelled returns them; if test is None, train is cross-validated
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    x, y, right, chosen = features(model, train[0]), train[1], [], set()
    if test:
        parts = [(x, y, features(model, test[0]), test[1])]
    else:
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(x, y)
        parts = ((x[fit], y[fit], x[held_out], y[held_out]) for fit, held_out in folds)
    bar = progress(parts, "logistic regression", " folds", total=1 if test else FOLDS)
    for x_train, y_train, x_test, y_test in bar:
        tenths = StratifiedKFold(FOLDS, shuffle=True, random_state=seed + 1).split(x_train, y_train)
        search = GridSearchCV(LogisticRegression(max_iter=1000), {"C": C_GRID}, cv=[next(tenths)])
        right.append(search.fit(x_train, y_train).predict(x_test) == y_test)
        chosen.add(search.best_params_["C"])
    return 100 * np.concatenate(right).mean(), sorted(chosen)


def evaluate_clusters(model, data, seed):
    """Run k-means STARTS times. Return [(V-measure, accuracy)] of the runs, in percent.

    k is the number of labels. The accuracy is that of the best one-to-one matching of clusters and labels.

    data   as load_labelled returns it
    """
    from scipy.optimize import linear_sum_assignment
    from sklearn.cluster import KMeans
    from sklearn.metrics import v_measure_score
    from sklearn.metrics.cluster import contingency_matrix
    x, labels, scores = features(model, data[0]), data[1], []
    for i in progress(range(STARTS), "k-means", " starts"):
        assigned = KMeans(len(set(labels)), n_init=1, random_state=seed + i).fit_predict(x)
        table = contingency_matrix(labels, assigned)           # number of rows of each label in each cluster
        matched = table[linear_sum_assignment(table, maximize=True)].sum()
        scores.append((100 * v_measure_score(labels, assigned), 100 * matched / len(labels)))
    return scores
