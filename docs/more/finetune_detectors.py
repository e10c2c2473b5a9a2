"""Parts of finetune.py: features of texts, and the three detectors of --ood. A detector gives
each text a score, which should be higher for texts of known classes than for texts of unseen classes."""
import numpy as np
import torch

from kernels.training.data import empty_cell, join_names, normalise_name
from kernels.training.errors import fail, log
from kernels.training.text.classifier import classify, read_table_with_names


def classify_with_features(model, inputs):
    """Classify texts. Return (logits (n, labels), features (n, H)), both float32. The features are the input
    of the last linear layer. In training, dropout changes them."""
    labels, seen = model.config.num_labels, []
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
             for part in [part for part in linear if part.out_features == labels][-1:]]
    logits = classify(model, inputs)
    for hook in hooks:
        hook.remove()
    if len(seen) != 1:
        fail(f"{type(model).__name__}: a forward pass must call the last linear layer with {labels} outputs "
             f"once, but calls it {len(seen)} times; use another --model", every_rank=True)
    features, = seen
    if features.dim() == 3:                                    # GPT-2: of all tokens; use the last real one
        places = torch.arange(1, features.shape[1] + 1, device=model.device)
        last = (places * attention_mask_of(inputs)).argmax(1)
        features = features[torch.arange(len(last), device=model.device), last]
    return logits, features.float()


def attention_mask_of(inputs):
    """Return the attention mask (n, L), 0 for padding; all ones if the tokenizer has no mask (FNet)."""
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))


def load_unseen(args):
    """Read --ood into [(texts, 0)], where 0 replaces a label. The columns are the text columns of --data.
    Fail if scikit-learn, which local_outlier_factor needs, is not installed."""
    if not args.data or not args.dev:
        fail(f"--ood {args.ood}: requires --data (training texts) and --dev (other texts of these classes)")
    try:
        import sklearn.neighbors  # noqa: F401
    except ImportError:
        fail("--ood needs the package scikit-learn; run pip install scikit-learn")
    header, table, named = read_table_with_names(args.ood, args.text_columns)
    names, expected = ([*map(normalise_name, columns)] for columns in (header, args.text_columns))
    if not named and len(names) == len(expected):              # no header: all columns are texts
        names = expected
    if not set(expected) <= set(names):
        fail(f"{args.ood}: columns {join_names(header)}; expected the text columns of {args.data}: "
             f"{join_names(args.text_columns)}")
    rows = [(place, tuple(cells[names.index(name)] for name in expected)) for place, cells in table]
    for place, texts in rows:
        if fault := empty_cell(texts):
            fail(f"{args.ood} {place}: {fault}")
    log("data", f"{len(rows):,} texts of unseen classes from {args.ood}")
    return [(texts, 0) for _, texts in rows]


def detector_scores(known, unseen, train, labels):
    """Score texts with each detector, and return {name of the detector: result of ood_metrics}.

    known, unseen, train   (logits (n, C), features (n, H)) of the rows of --dev, --ood and --data
    labels                 (N,) classes of the training rows
    """
    (known_logits, known), (unseen_logits, unseen), (_, train) = known, unseen, train
    found = {"maximum softmax": [x.double().softmax(1).amax(1) for x in (known_logits, unseen_logits)],
             "local outlier factor": [local_outlier_factor(train, x) for x in (known, unseen)],
             "Mahalanobis": [mahalanobis(train, labels, x) for x in (known, unseen)]}
    return {name: ood_metrics(*(scores.numpy() for scores in pair)) for name, pair in found.items()}


def local_outlier_factor(train, x, neighbours=20):
    """Return −LOF (n,) float64, the negative local outlier factor, of features x (n, H). LOF compares the
    density around a vector with the density around its nearest training vectors (20 in the released code)."""
    from sklearn.neighbors import LocalOutlierFactor

    train, x = train.double().numpy(), x.double().numpy()
    detector = LocalOutlierFactor(n_neighbors=min(neighbours, len(train) - 1), novelty=True).fit(train)
    return torch.from_numpy(detector.score_samples(x))


def mahalanobis(train, labels, x):
    """Return (n,) float64 −(z − μ)ᵀ Σ⁺ (z − μ) for each row z of x (n, H), where μ is the nearest class mean.

    train, labels   (N, H) training features of any float type, and the class of each, (N,) integers
    source          Lee et al. 2018: Σ = 1/N Σ_i (z_i − μ_i)(z_i − μ_i)ᵀ over all classes, where μ_i is the
                    mean of the class of z_i; Σ⁺ is its pseudo-inverse
    """
    train = train.double()
    _, group = labels.unique(return_inverse=True)
    sums = train.new_zeros(int(group.max()) + 1, train.shape[1]).index_add(0, group, train)
    means = sums / group.bincount()[:, None]
    centred = train - means[group]
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(train))
    # a variance below the rounding error of float32 features counts as 0
    real = variances > torch.finfo(torch.float32).eps * variances.max()
    whitening = directions[:, real] / variances[real].sqrt()   # makes the distance Euclidean
    whitened, centres = ((z - means[0]) @ whitening for z in (x.double(), means))
    return -torch.cdist(whitened, centres).amin(1).square()


def ood_metrics(known, unseen):
    """Return {"AUROC", "FPR95", "F1"} in percent for scores of known rows (n,) and of unseen rows (m,).

    AUROC   probability that a known row scores higher than an unseen row; ties count half
    FPR95   fraction of unseen rows that are accepted by the threshold that accepts 95 % of the known rows
    F1      F1 of detecting unseen rows with the threshold of FPR95
    """
    known = np.sort(known)
    below, upto = (np.searchsorted(known, unseen, side) for side in ("left", "right"))
    threshold = known[len(known) // 20]                        # at most 5 % of known rows score lower
    accepted, detected = (unseen >= threshold).mean(), (unseen < threshold).sum()
    rejected = (known < threshold).sum()
    return {"AUROC": 100 * float(1 - (below + upto).mean() / 2 / len(known)), "FPR95": 100 * float(accepted),
            "F1": 100 * float(2 * detected / (detected + rejected + len(unseen)))}
