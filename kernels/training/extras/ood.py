"""Texts of classes that the training data does not have (out of domain): three detectors, and how well each
tells them from texts of known ones."""
import numpy as np
import torch

NEIGHBOURS = 20                                                # of LOF, as in the released code
BLOCK = 2**24                                                  # distances at a time


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
