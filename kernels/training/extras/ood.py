"""--ood: texts of classes that are not in the training data (out of domain). Three detectors score them, and
are evaluated by how well their scores separate these texts from texts of known classes."""
import numpy as np
import torch

from ..data import empty_cell, join_names, normalise_name
from ..errors import fail, log
from ..text.classifier import forward_rows, read_table_with_names
from .classifier_losses import classify_with_features

NEIGHBOURS = 20                                                # of LOF, as in the released code
BLOCK = 2**24                                                  # distances computed at a time


def load_unseen(args):
    """Return [(texts, 0)] of --ood, from the same text columns as in --data; [] without --ood."""
    if args.ood is None:
        return []
    if not args.dev or args.task == "regression":
        found = f"{args.task} {'with' if args.dev else 'without'} --dev"
        fail(f"--ood {args.ood}: {found}; expected classification, and texts of known classes in --dev")
    header, table, named = read_table_with_names(args.ood, args.text_columns)
    names = [normalise_name(name) for name in header]
    expected = [normalise_name(name) for name in args.text_columns]
    if not named and len(names) == len(expected):              # no header: the columns are the texts
        names = expected
    if not set(expected) <= set(names):
        fail(f"{args.ood}: columns {join_names(header)}; expected those of {args.data or args.dev}, "
             f"{join_names(args.text_columns)}")
    rows = [(place, tuple(cells[names.index(name)] for name in expected)) for place, cells in table]
    for place, texts in rows:
        if fault := empty_cell(texts):
            fail(f"{args.ood} {place}: {fault}")
    log("data", f"{len(rows):,} texts of unseen classes from {args.ood}")
    return [(texts, 0) for _, texts in rows]


def unseen_scores(model, train, dev, unseen):
    """Return {detector: {"AUROC", "FPR95", "F1"}} in percent, of rows as tokenise_texts returns them.

    train   may be empty: then only the maximum softmax is evaluated
    """
    found = [[x.to(model.device) for x in forward_rows(model, rows, classify_with_features)]
             for rows in (dev, unseen, train) if rows]
    if not all(x.isfinite().all() for part in found for x in part):
        log("note", "--ood: some logits or features are NaN or infinite; they count as 0")
        found = [[x.nan_to_num(0, 0, 0) for x in part] for part in found]
    if not train:
        return run_detectors(*found)
    labels = torch.tensor([label for _, label in train], device=model.device)
    return run_detectors(*found[:2], found[2][1], labels)


def run_detectors(known, unseen, train=None, labels=None):
    """Return {detector: its metrics, see ood_metrics}.

    known, unseen   (logits (n, C), features (n, H)) of the rows to separate
    train, labels   (N, H) training features and their labels (N,); None: evaluate the maximum softmax only
    """
    # name: (0 if it scores logits, 1 if features; scoring function)
    detectors = {"maximum softmax": (0, maximum_softmax)}
    if train is not None:
        detectors["local outlier factor"] = 1, local_outlier_factor(train)
        detectors["Mahalanobis"] = 1, mahalanobis(train, labels)
    return {name: ood_metrics(*(score(part[which]).cpu().numpy() for part in (known, unseen)))
            for name, (which, score) in detectors.items()}


def maximum_softmax(logits):
    """Return the highest class probability (n,) float64 of logits (n, C); known rows should score higher."""
    return logits.double().softmax(1).amax(1)


def local_outlier_factor(train, neighbours=NEIGHBOURS):
    """Return a function that maps features (n, H) to −LOF (n,), float64; known rows should score higher.

    LOF compares the density around a vector with the density around its nearest training vectors. Distances
    are Euclidean.

    train        (N, H), any float type
    neighbours   number k of nearest vectors; at most N − 1 are used. Ties are broken arbitrarily
    source       Breunig et al. 2000; a mean reachability distance of 0, among equal vectors, is replaced by
                 1e-10
    """
    centre = train.double().mean(0)                            # subtracted: less cancellation in distances
    train, k = train.double() - centre, min(neighbours, len(train) - 1)
    if k == 0:                                                 # a single vector has no neighbours
        return lambda x: -(x.double() - centre - train).norm(dim=1)

    def nearest(x, exclude_self):
        """Return distances and indices (n, k) of the nearest training vectors, block by block."""
        size, found = max(1, BLOCK // len(train)), []
        for start in range(0, len(x), size):
            distances = torch.cdist(x[start : start + size], train)
            if exclude_self:                                   # x is train
                distances.diagonal(start).fill_(torch.inf)
            found.append(distances.topk(k, largest=False))
        return [torch.cat(parts) for parts in zip(*found)]

    distances, indices = nearest(train, True)
    kth_distance = distances[:, -1]                            # of each training vector to its k-th neighbour

    def density(distances, indices):
        reachability = torch.maximum(distances, kth_distance[indices])
        return 1 / reachability.mean(1).clamp(min=1e-10)

    train_density = density(distances, indices)

    def score(x):
        distances, indices = nearest(x.double() - centre, False)
        return -train_density[indices].mean(1) / density(distances, indices)
    return score


def mahalanobis(train, labels):
    """Return a function that maps features z (n, H) to −(z − μ)ᵀ Σ⁺ (z − μ) (n,), float64; μ is the nearest
    class mean.

    train, labels   (N, H) features, any float type, and (N,) integers
    source          Lee et al. 2018: Σ = 1/N Σ_i (z_i − μ_i)(z_i − μ_i)ᵀ over all classes, where μ_i is the
                    mean of the class of z_i; Σ⁺ is its pseudo-inverse
    """
    train = train.double()
    _, group = labels.unique(return_inverse=True)
    sums = train.new_zeros(int(group.max()) + 1, train.shape[1]).index_add(0, group, train)
    means = sums / group.bincount()[:, None]
    centred = train - means[group]
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(train))
    # features are float32, so a variance below its rounding error counts as 0
    real = variances > torch.finfo(torch.float32).eps * variances.max()
    whitening = directions[:, real] / variances[real].sqrt()

    def whiten(x):
        """After this map the Mahalanobis distance is the Euclidean one."""
        return (x.double() - means[0]) @ whitening

    return lambda x: -torch.cdist(whiten(x), whiten(means)).amin(1).square()


def ood_metrics(known, unseen):
    """Return {"AUROC", "FPR95", "F1"} in percent.

    known, unseen   (n,), (m,) scores that should be higher for known rows than for unseen ones

    AUROC   probability that a known row scores higher than an unseen one; ties count half
    FPR95   fraction of unseen rows that are accepted, at the threshold that accepts 95 % of the known rows
    F1      of detecting unseen rows at that threshold
    """
    known = np.sort(known)
    below, upto = (np.searchsorted(known, unseen, side) for side in ("left", "right"))
    threshold = known[len(known) // 20]                        # n − ⌈0.95 n⌉ known rows score lower
    accepted, detected = (unseen >= threshold).mean(), (unseen < threshold).sum()
    rejected = (known < threshold).sum()
    return {"AUROC": 100 * float(1 - (below + upto).mean() / 2 / len(known)), "FPR95": 100 * float(accepted),
            "F1": 100 * float(2 * detected / (detected + rejected + len(unseen)))}
