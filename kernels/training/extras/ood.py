"""--ood: texts of classes that the training data does not have (out of domain), three detectors for them, and
how well each tells them from texts of known classes."""
import numpy as np
import torch

from ..cli import fail, say
from ..tables import empty_cell, listed, plain
from ..text.classifier import forward_rows
from ..text.labelled import read_named
from .classifier_losses import classify_vectors

NEIGHBOURS = 20                                                # of LOF, as in the released code
BLOCK = 2**24                                                  # distances at a time

def load_unseen(args):
    """[(texts, 0)] of --ood: the columns of text that --data has; [] without it."""
    if args.ood is None:
        return []
    if not args.dev or args.task == "regression":
        fail(f"--ood {args.ood}: {args.task} with{'' if args.dev else 'out'} --dev; wanted classification, "
             "and texts of known classes by --dev")
    header, table, named = read_named(args.ood, args.text)
    names, wanted = [plain(name) for name in header], [plain(name) for name in args.text]
    if not named and len(names) == len(wanted):                # texts alone
        names = wanted
    if not set(wanted) <= set(names):
        fail(f"{args.ood}: columns {listed(header)}; wanted those of {args.data or args.dev}, "
             f"{listed(args.text)}")
    rows = [(place, tuple(cells[names.index(name)] for name in wanted)) for place, cells in table]
    for place, texts in rows:
        if fault := empty_cell(texts):
            fail(f"{args.ood} {place}: {fault}")
    say("data", f"{len(rows):,} texts of no known class from {args.ood}")
    return [(texts, 0) for _, texts in rows]


def unseen_scores(model, train, dev, unseen):
    """{detector: {"AUROC", "FPR95", "F1"}} in percent, for rows as tokenise_texts gives them; without rows of
    train of the maximum softmax alone."""
    found = [[x.to(model.device) for x in forward_rows(model, rows, classify_vectors)]
             for rows in (dev, unseen, train) if rows]
    if not all(x.isfinite().all() for part in found for x in part):
        say("note", "--ood: logits or vectors hold NaN or infinity, which count as 0")
        found = [[x.nan_to_num(0, 0, 0) for x in part] for part in found]
    if not train:
        return detect(*found)
    labels = torch.tensor([label for _, label in train], device=model.device)
    return detect(*found[:2], found[2][1], labels)


def detect(known, unseen, train=None, labels=None):
    """{detector: scores of tell_apart} of known and unseen rows, each ((n, C) logits, (n, H) vectors); of the
    maximum softmax alone without training vectors (N, H) and their labels (N,)."""
    detectors = {"maximum softmax": (0, maximum_softmax)}
    if train is not None:
        detectors["local outlier factor"] = 1, local_outlier_factor(train)
        detectors["Mahalanobis"] = 1, mahalanobis(train, labels)
    return {name: tell_apart(*(score(part[which]).cpu().numpy() for part in (known, unseen)))
            for name, (which, score) in detectors.items()}


def maximum_softmax(logits):
    """(n,) float64 probability of the likeliest label, the higher the more known; logits (n, labels)."""
    return logits.double().softmax(1).amax(1)


def local_outlier_factor(train, neighbours=NEIGHBOURS):
    """A function of vectors (n, H) that gives −LOF (n,) float64, the higher the more known: how dense a
    vector's surroundings are, beside those of the nearest training vectors.

    train        (N, H), any float type
    neighbours   k; fewer where there are fewer vectors. Of equally near ones any k
    source       Breunig et al. 2000; Euclidean; a mean reach of 0, among equal vectors, counts as 1e-10
    """
    centre = train.double().mean(0)                            # distances to 0 cancel less
    train, k = train.double() - centre, min(neighbours, len(train) - 1)
    if k == 0:                                                 # a single vector has no surroundings
        return lambda x: -(x.double() - centre - train).norm(dim=1)

    def nearest(x, themselves):
        """Distances and places (n, k), in blocks; training rows are not near themselves."""
        size, found = max(1, BLOCK // len(train)), []
        for start in range(0, len(x), size):
            far = torch.cdist(x[start : start + size], train)
            if themselves:
                far.diagonal(start).fill_(torch.inf)
            found.append(far.topk(k, largest=False))
        return [torch.cat(parts) for parts in zip(*found)]

    far, places = nearest(train, True)
    reach = far[:, -1]                                         # of each vector: to its k-th neighbour
    density = lambda far, places: 1 / torch.maximum(far, reach[places]).mean(1).clamp(min=1e-10)
    dense = density(far, places)

    def score(x):
        far, places = nearest(x.double() - centre, False)
        return -dense[places].mean(1) / density(far, places)
    return score


def mahalanobis(train, labels):
    """A function of vectors (n, H) that gives −(z − μ)ᵀ Σ⁺ (z − μ) (n,) float64 of the nearest class mean μ.

    train, labels   (N, H) vectors, any float type, and (N,) integers
    source          Lee et al. 2018: Σ = 1/N Σ_i (z_i − μ_i)(z_i − μ_i)ᵀ, one for all classes; Σ⁺ its
                    pseudo-inverse
    """
    train, (_, group) = train.double(), labels.unique(return_inverse=True)
    sums = train.new_zeros(int(group.max()) + 1, train.shape[1]).index_add(0, group, train)
    means = sums / group.bincount()[:, None]
    apart = train - means[group]
    variances, directions = torch.linalg.eigh(apart.T @ apart / len(train))
    # vectors are float32: variance below its rounding is none
    real = variances > torch.finfo(torch.float32).eps * variances.max()
    whiten = directions[:, real] / variances[real].sqrt()
    white = lambda x: (x.double() - means[0]) @ whiten         # there the distance is Euclid's
    return lambda x: -torch.cdist(white(x), white(means)).amin(1).square()


def tell_apart(known, unseen):
    """{"AUROC", "FPR95", "F1"} in percent, of scores (n,) and (m,) that are higher for what is known.

    AUROC   how often a known row is above an unseen one; equal ones count half
    FPR95   unseen rows that are taken for known, where the threshold keeps 95 % of the known ones
    F1      of the unseen, at that threshold
    """
    known = np.sort(known)
    below, upto = (np.searchsorted(known, unseen, side) for side in ("left", "right"))
    threshold = known[len(known) // 20]                        # n − ⌈0.95 n⌉ are below
    kept, found = (unseen >= threshold).mean(), (unseen < threshold).sum()
    wrong = (known < threshold).sum()
    return {"AUROC": 100 * float(1 - (below + upto).mean() / 2 / len(known)), "FPR95": 100 * float(kept),
            "F1": 100 * float(2 * found / (found + wrong + len(unseen)))}
