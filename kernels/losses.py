"""The public losses: they check their arguments and call the implementation. Each returns a mean over rows.

The losses use rows as they are. For cosine similarities pass unit rows (F.normalize), or normalize=True. Rows
with large norms often give a loss of 0.0. No loss checks norms, because this would synchronise with the GPU.

A softmax loss is −log p, where p is the softmax probability of the positive. "triton" and "blockwise" compute
softplus(lse − logit of the positive), where lse is the log-sum-exp of the negatives only. The value of the
loss is the same. If the loss is small, its gradient is more accurate.
"""
import torch
import torch.nn.functional as F

from . import checks
from .call import as_scalar, prepare, unit_rows
from .masks import Mask
from .ring import RingRows, cat_views


def info_nce(q, k, temperature=0.07, *, symmetric=False, gathered=None, offset=0, normalize=False,
             impl="auto"):
    """Return the mean over rows of −log( exp(q_i·k_{i+offset}/τ) / Σ_j exp(q_i·k_j/τ) ).

    q, k         (N, D) queries; (M, D) keys, also from ring_rows. The positive of query i is key i+offset
    temperature  τ: float > 0 (similarity_lse gives the range), or a 0-dim tensor, which then gets a gradient
    symmetric    True: as in CLIP, return the mean of two losses: one has a softmax over keys (dim=1), the
                 other has a softmax over queries (dim=0). q and k must then both be (N, D)
    gathered     for symmetric=True on several ranks: the pair (q of all ranks, k of all ranks), (M, D) each,
                 from gather_rows or ring_rows; q and k are local rows. For symmetric=False pass all keys as k
    offset       index of this rank's first row in the batch of all ranks, own_rows(batch_size).start
    normalize    True: divide each row by its norm first; False: use rows as they are (unit rows give cosines)
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64 rows)
    source       van den Oord et al. 2018, eq. 4; symmetric: Radford et al. 2021, fig. 3
    """
    checks.check_flag("symmetric", symmetric)
    if gathered is not None and not symmetric:
        raise ValueError("gathered: needs symmetric=True; without it, expected the keys of all ranks as k")
    return mean_cross_entropy(q, k, temperature, symmetric, gathered, offset, normalize, impl, ("q", "k"))


def mean_cross_entropy(q, k, temperature, symmetric, gathered, offset, normalize, impl, names):
    """Check the arguments, return the loss of info_nce or clip_loss; messages call q and k by `names`."""
    sides, both = [(q, k, names)], symmetric and gathered is None
    if both:
        check_no_offset(offset)
    elif symmetric:
        all_q, all_k = checks.check_pair("gathered", gathered, f"({names[0]}, {names[1]}) of all ranks")
        sides = [(q, all_k, (names[0], f"gathered: {names[1]}")),
                 (k, all_q, (names[1], f"gathered: {names[0]}"))]
    losses = []
    for x, y, side_names in sides:
        call = prepare(x, y, temperature, Mask("diagonal", offset=offset), positives=True, names=side_names,
                       normalize=normalize, impl=impl, others=(RingRows,))
        if symmetric and len(q) != len(k):
            raise ValueError(f"{names[1]}: {len(k)} rows, expected {len(q)} like {names[0]}")
        losses.append(call.ops.softmax_loss(call, both))
    return sum(losses) / len(losses) if len(losses) > 1 else losses[0]


def clip_loss(image, text, temperature=0.07, *, gathered=None, offset=0, normalize=False, impl="auto"):
    """Return the mean of two info_nce losses: each image against all texts, and each text against all images.

    image, text  (N, D) each; row i of image and row i of text are a pair
    gathered     on several ranks: the pair (images of all ranks, texts of all ranks), (M, D) each, from
                 gather_rows or ring_rows. The loss is the mean over this rank's images and texts
    offset       index of this rank's first row in `gathered`, own_rows(batch_size).start
    others       temperature, normalize and impl: as in info_nce
    returns      scalar, float32 (float64 for float64 rows)
    source       Radford et al. 2021, fig. 3
    """
    names = "image", "text"
    return mean_cross_entropy(image, text, temperature, True, gathered, offset, normalize, impl, names)


def queue_loss(q, k, queue, temperature=0.07, *, normalize=False, impl="auto"):
    """Return the mean over rows of −log( exp(q_i·k_i/τ) / (exp(q_i·k_i/τ) + Σ_j exp(q_i·queue_j/τ)) ).

    q, k         (N, D) queries and (N, D) keys: k_i is the positive of q_i, and no other query uses k_i
    queue        (K, D) negatives of every query; the queue never receives a gradient
    normalize    True: divide the rows of q, k and queue by their norms first (see similarity_lse). This costs
                 O(K·D) for the queue in each call; to avoid this cost, pass unit rows and normalize=False
    others       temperature and impl: as in info_nce
    returns      scalar, float32 (float64 for float64 rows)
    source       He et al. 2020 (MoCo), eq. 1
    """
    checks.check_inputs(q, queue, ("q", "queue"))
    call = prepare(q, k, temperature, Mask(), positives=True, normalize=normalize, impl=impl,
                   columns=len(queue))
    if len(q) != len(k):
        raise ValueError(f"k: {len(k)} rows, expected {len(q)} like q")
    queue = queue.detach().resolve_neg()
    return call.ops.queue_loss(call, unit_rows(queue) if normalize else queue)


def sigmoid_loss(q, k, temperature=0.1, bias=-10.0, *, offset=0, normalize=False, impl="auto"):
    """Return 1/N Σ_i Σ_j softplus(−y_ij (q_i·k_j/τ + b)), with y_ij = 1 if j = i + offset, else −1.

    q, k         (N, D) queries; (M, D) keys, also from ring_rows. The positive of query i is key i+offset
    bias         b: finite float, or a 0-dim tensor, which then receives a gradient. b = −log(M − 1) gives
                 noise-contrastive estimation (NCE): the M − 1 other keys are the noise samples of a query
    offset       index of this rank's first row in the batch of all ranks, own_rows(batch_size).start
    others       temperature, normalize and impl: as in info_nce
    returns      scalar, float32 (float64 for float64 rows)
    source       Zhai et al. 2023 (SigLIP), eq. 1 and algorithm 1; Gutmann and Hyvärinen 2010 (NCE), eq. 3
    """
    call = prepare(q, k, temperature, Mask("diagonal", offset=offset), positives=True, normalize=normalize,
                   impl=impl, others=(RingRows,))
    checks.check_number("bias", bias, device=call.q.device)
    return call.ops.sigmoid_loss(call, as_scalar(bias, call.temperature.dtype))


def nt_xent(z1, z2, temperature=0.5, *, gathered=None, offset=0, normalize=False, impl="auto"):
    """Return the mean over all 2N views of −log( exp(z_i·z_i'/τ) / Σ_{j≠i} exp(z_i·z_j/τ) ).

    z1, z2       (N, D) each, two views of N samples: rows i of z1 and of z2 are a positive pair (i and i')
    gathered     on several ranks: the pair (z1 of all ranks, z2 of all ranks), (M, D) each, from gather_rows
                 or ring_rows. The loss is the mean over this rank's 2N views; each is compared with 2M views
    offset       index of this rank's first row in `gathered`, own_rows(batch_size).start
    others       temperature, normalize and impl: as in info_nce
    returns      scalar, float32 (float64 for float64 rows); half the value of the paper's released code
    source       Chen et al. 2020 (SimCLR), eq. 1 and algorithm 1
    """
    checks.check_inputs(z1, z2, ("z1", "z2"))
    if len(z1) != len(z2):
        raise ValueError(f"z2: {len(z2)} rows, expected {len(z1)} like z1")
    keys = None
    if gathered is None:
        check_no_offset(offset)
    else:
        all_z1, all_z2 = checks.check_pair("gathered", gathered, "(z1, z2) of all ranks")
        for name, own, rows in ("z1", z1, all_z1), ("z2", z2, all_z2):
            checks.check_inputs(own, rows, (name, f"gathered: {name}"), offset=offset, others=(RingRows,))
        if len(all_z1) != len(all_z2):
            raise ValueError(f"gathered: z2: {len(all_z2)} rows, expected {len(all_z1)} like z1")
        keys = cat_views(all_z1, all_z2)
    call = prepare(cat_views(z1, z2), keys, temperature, Mask("pair", offset=offset), normalize=normalize,
                   impl=impl, others=(RingRows,))
    return call.ops.softmax_loss(call)


def check_no_offset(offset):
    """Raise ValueError if offset is not 0; losses call this if gathered is None."""
    checks.check_offset(offset)
    if offset != 0:
        raise ValueError(f"offset: {checks.describe(offset)}, expected 0 if gathered is None")


def sup_con_loss(z, labels=None, temperature=0.07, base_temperature=None, *, gathered=None, offset=0,
                 normalize=False, impl="auto"):
    """Return the mean over views of −τ/(τ_base |P(i)|) Σ_{p∈P(i)} [ z_i·z_p/τ − log Σ_{j≠i} exp(z_i·z_j/τ) ].

    z                 (N, V, D) V views of each of N samples
    labels            (N,) integers: the positives P(i) of view i are all other views with the same label;
                      None: P(i) are all other views of the same sample
    base_temperature  τ_base: float > 0 (released code: 0.07). None: as in the paper, no factor τ/τ_base
    gathered          on several ranks: the pair (z of all ranks (M, V, D), labels of all ranks (M,) or None),
                      both from gather_rows. The loss is the mean over this rank's N·V views, each compared
                      with the M·V views of all ranks
    offset            index of this rank's first sample in `gathered`, own_rows(batch_size).start
    others            temperature τ, normalize and impl: as in info_nce
    returns           scalar, float32 (float64 for float64 rows); in the mean, the loss of a view without
                      positives is 0
    source            Khosla et al. 2020 (SupCon), L^sup_out; losses.py of the released code
    """
    all_z, all_labels = z, labels
    if gathered is None:
        check_no_offset(offset)
    else:
        all_z, all_labels = checks.check_pair("gathered", gathered, "(z, labels) of all ranks")
    check_labels(z, labels, all_z, all_labels, offset)
    if base_temperature is not None:
        checks.check_number("base_temperature", base_temperature, checks.SMALLEST, device=z.device)
    views, by_pair = z.shape[1], labels is None and z.shape[1] == 2
    if by_pair:                                  # as in nt_xent, the first views come before the second views
        mask, rows, keys = Mask("pair", offset=offset), z.transpose(0, 1), all_z.transpose(0, 1)
    else:
        mask, rows, keys = Mask("diagonal", offset=offset * views), z, all_z
    keys = None if gathered is None else keys.flatten(0, 1)
    call = prepare(rows.flatten(0, 1), keys, temperature, mask, names=("z", "gathered: z"),
                   normalize=normalize, impl=impl)
    if by_pair:
        loss = call.ops.softmax_loss(call)
    else:
        if labels is None:                                 # each sample has its own label
            all_labels = torch.arange(len(all_z), device=z.device)
        loss = call.ops.sup_con_loss(call, views, all_labels, offset)
    if base_temperature is None or base_temperature is temperature:
        return loss
    return loss * call.temperature / as_scalar(base_temperature, loss.dtype)


def check_labels(z, labels, all_z, all_labels, offset):
    """Raise ValueError for one view without labels, or if (z, labels) do not fit (all_z, all_labels)."""
    checks.check_rows(offset, z=(z, "N V D"), labels=(labels, "N", int, None), **{
        "gathered: z": (all_z, "M V D"), "gathered: labels": (all_labels, "M", int, None)})
    if (labels is None) != (all_labels is None):
        raise ValueError("gathered: expected (z, labels) if labels are given, (z, None) if labels is None")
    if labels is None and z.shape[1] == 1:
        raise ValueError("labels: found None, expected labels, as z has only 1 view per sample")
    if labels is None or labels is all_labels or not labels.is_cpu:
        return
    if not torch.equal(labels.long(), all_labels[offset:offset + len(labels)].long()):
        raise ValueError(f"labels: not equal to the gathered labels from row {offset} on; expected labels "
                         "to be a slice of the gathered labels, and offset to be the start of this slice")


def linear_cross_entropy(hidden, weight, targets, ignore_index=-100, *, temperature=1.0, impl="auto"):
    """Return the mean cross entropy of the logits hidden·weightᵀ/τ; only "eager" stores a large matrix.

    Rows are never normalised, because the products are the logits of a linear layer, not cosines.

    hidden        (N, D) float64 | float32 | float16 | bfloat16
    weight        (V, D) one row per class; dtype and device as hidden
    targets       (N,) int64 in [0, V), the class of each row, or ignore_index
    ignore_index  integer: rows with this target are ignored, may contain NaN, and take as long as other rows
    temperature   τ: float > 0, or a 0-dim tensor, which then receives a gradient
    impl          see similarity_lse
    returns       scalar, float32 (float64 for float64 rows): mean over rows not ignored; 0 if all are ignored
    raises        ValueError for a target that is neither in [0, V) nor ignore_index, on the CPU only. On a
                  GPU such a target makes the loss NaN, because a check would synchronise with the GPU
    """
    checks.check_integer("ignore_index", ignore_index, -2 ** 63, 2 ** 63 - 1, "that int64 holds")
    checks.check_rows(hidden=(hidden, "N D"), weight=(weight, "K D"), targets=(targets, "N", int))
    if targets.dtype != torch.int64:
        raise ValueError(f"targets: found {targets.dtype}, expected int64")
    ignored = targets == ignore_index
    inside, weights = row_weights(targets, len(weight), ignored, ignore_index)
    if weights is not None:                            # NaN in an ignored row must not reach a gradient
        hidden = hidden.masked_fill(ignored[:, None], 0)
    call = prepare(hidden, weight, temperature, Mask("target", inside), names=("hidden", "weight"), impl=impl)
    if weights is None:
        return call.ops.softmax_loss(call)
    weights = weights.to(call.temperature.dtype)
    return call.ops.softmax_loss(call, weights=weights) / weights.sum().clamp(min=1)


def row_weights(targets, classes, ignored, ignore_index):
    """Return (targets clamped to [0, classes), weights of the rows), (N,) each; weights None means all are 1.

    The weight of an ignored row is 0. Any other target outside [0, classes) raises ValueError on the CPU, and
    gets the weight NaN on a GPU.
    """
    inside, is_readable = targets.clamp(0, classes - 1), targets.is_cpu and not torch.compiler.is_compiling()
    if is_readable and not 0 <= ignore_index < classes and torch.equal(inside, targets):
        return inside, None
    is_inside = inside == targets
    weights = (is_inside / is_inside).masked_fill(ignored, 0)  # an invalid target gets the weight 0 / 0 = NaN
    if is_readable and weights.isnan().any():
        row = weights.isnan().nonzero()[0].item()
        expected = f"0 to {classes - 1}, or ignore_index, {ignore_index}"
        raise ValueError(f"targets: row {row} is {targets[row]}, expected {expected}")
    return inside, weights


def triplet_loss(anchor, positive, negative, margin=1.0):
    """Return the mean over rows of max(0, |a_i − p_i| − |a_i − n_i| + margin), with Euclidean distances.

    a, p and n are rows of anchor, positive and negative. They are not normalised here; FaceNet uses unit rows
    (F.normalize). This function casts all rows to the dtype of the loss, and calls F.triplet_margin_loss.

    anchor, positive, negative  (N, D) each, any float type; the loss is float64 if one is, else float32
    margin                      number > 0, a distance
    returns                     scalar
    source                      Schroff et al. 2015 (FaceNet), section 3.1, where distances are squared
    """
    checks.check_rows(anchor=(anchor, "N D"), positive=(positive, "N D"), negative=(negative, "N D"))
    checks.check_number("margin", margin, checks.SMALLEST)
    return F.triplet_margin_loss(*upcast(anchor, positive, negative), margin)


def margin_loss(x1, x2, same, margin=1.0):
    """Return the mean over rows of ½ d² if same[i], else ½ max(0, margin − d)², with d = |x1_i − x2_i|.

    Rows are not normalised; d and margin are Euclidean distances.

    x1, x2     (N, D) each, any float type. The loss is float64 if x1 or x2 is float64, else float32. If x1_i
               equals x2_i, the gradient of d is 0
    same       (N,) bool, or integers 0 and 1 (checked on the CPU): whether x1_i and x2_i have the same class
    margin     number > 0
    returns    scalar
    source     Hadsell, Chopra, LeCun 2006, eq. 4
    """
    checks.check_rows(x1=(x1, "N D"), x2=(x2, "N D"), same=(same, "N", bool, int))
    checks.check_number("margin", margin, checks.SMALLEST)
    if same.is_cpu and not torch.compiler.is_compiling():
        wrong = (same != 0) & (same != 1)
        if wrong.any():
            raise ValueError(f"same: found {same[wrong][0]}, expected 0 or 1")
    x1, x2 = upcast(x1, x2)
    distance = torch.linalg.vector_norm(x1 - x2, dim=1)
    return torch.where(same != 0, distance, F.relu(margin - distance)).square().mean() / 2


def upcast(*rows):
    """Cast all tensors to float64 if one of them is float64, and to float32 if none is."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in rows) else torch.float32
    return [x.to(dtype) for x in rows]
