"""Mean losses: thin wrappers around the fused operations.

Rows are used as given. For cosine similarities pass unit rows (F.normalize), or normalize=True. Unnormalised
rows with large norms often give a loss of 0.0. No loss checks for this, because reading the norms would
synchronise with the GPU.

In a softmax loss the mask excludes the positive from the fused sum, and the loss is softplus(lse − positive).
This is the same number, with a much more accurate gradient when the loss is small.
"""
import math

import torch
import torch.nn.functional as F

from . import eager, ops
from .blockwise import add_rows, is_stored
from .checks import (
    SMALLEST,
    check_choice,
    check_dense,
    check_flag,
    check_integer,
    check_number,
    check_positives,
    check_rows,
    check_temperature,
    describe,
)
from .custom_op import cat_rows, is_traced
from .heuristics import choose_impl, uses_frozen_keys_op
from .masks import Mask, make_mask
from .similarity import (
    as_scalar,
    cast_rows,
    fused_lse,
    normalize_rows,
    prepare_inputs,
    similarity_topk,
    softmax_loss,
    unit_rows,
)


def info_nce(q, k, temperature=0.07, *, symmetric=False, offset=0, normalize=False, impl="auto"):
    """Return the mean over rows of −log( exp(q_i·k_{i+offset}/τ) / Σ_j exp(q_i·k_j/τ) ).

    q, k         (N, D) queries, (M, D) keys, M ≥ N + offset: the positive of row i is key i + offset
    temperature  float > 0 (see similarity_lse), or a 0-dim tensor, which then receives a gradient
    symmetric    True: the mean of this row-softmax loss (dim=1) and the column-softmax loss (dim=0), as in
                 CLIP (M = N)
    offset       this rank's first row in the gathered batch, own_rows(batch_size).start; 0 in one process
    normalize    True: divide rows by their norms first; False: use them as given, so pass unit rows
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64)
    source       van den Oord et al. 2018, eq. 4; symmetric: Radford et al. 2021, fig. 3
    """
    return info_nce_with_names(q, k, temperature, symmetric, offset, normalize, impl)


def info_nce_with_names(q, k, temperature, symmetric, offset, normalize, impl, names=("q", "k")):
    """Return info_nce; its error messages call q and k by `names`."""
    q, k, temperature, product_dtype = prepare_inputs(q, k, temperature, names)
    check_flag("symmetric", symmetric)
    check_flag("normalize", normalize)
    mask = make_mask(q, k, False, "diagonal", offset=offset)
    impl = choose_impl(impl, q, q.shape[0], k.shape[0])
    check_positives((names[0], q), (names[1], k), offset)
    if symmetric and q.shape[0] != k.shape[0]:
        expected = f"{len(q)} like {names[0]}, because both are anchors"
        raise ValueError(f"{names[1]}: {len(k)} rows, expected {expected}")
    if normalize:
        q, k, product_dtype = normalize_rows(q, k, product_dtype)
    if impl == "eager":
        return eager.info_nce(*cast_rows(product_dtype, q, k), temperature, offset, symmetric)
    return softmax_loss(q, k, temperature, mask, impl, product_dtype, both=symmetric)


def clip_loss(image, text, temperature=0.07, *, normalize=False, impl="auto"):
    """Return the symmetric info_nce of (N, D) images and texts; source: Radford et al. 2021, fig. 3."""
    return info_nce_with_names(image, text, temperature, True, 0, normalize, impl, ("image", "text"))


def queue_loss(q, k, queue, temperature=0.07, *, normalize=False, impl="auto"):
    """Return the mean over rows of −log( exp(q_i·k_i/τ) / (exp(q_i·k_i/τ) + Σ_j exp(q_i·queue_j/τ)) ).

    q, k         (N, D) queries and their positives, row by row; other rows of k are not negatives
    queue        (K, D) negatives of all rows; never receives a gradient, which makes this loss cheaper
    temperature  float > 0 (see similarity_lse), or a 0-dim tensor, which then receives a gradient
    normalize    True: divide the rows of q, k and queue by their norms first; see similarity_lse. For the
                 queue this costs O(K·D) in each call; to save it, pass unit rows and False
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64)
    source       He et al. 2020 (MoCo), eq. 1
    """
    q, queue, *_ = prepare_inputs(q, queue, 1.0, names=("q", "queue"))
    q, k, temperature, product_dtype = prepare_inputs(q, k, temperature)  # q is float32 if either of them was
    check_flag("normalize", normalize)
    queue = queue.detach()
    # no shape, so Triton on a GPU even for few rows: it starts 5 operations there, stored.py 22
    impl = choose_impl(impl, q)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k: {len(k)} rows, expected {len(q)} like q")
    if normalize:
        q, k, product_dtype = normalize_rows(q, k, product_dtype)
        queue = unit_rows(queue)
    if impl == "eager":
        return eager.queue_loss(*cast_rows(product_dtype, q, k, queue), temperature)
    if uses_frozen_keys_op(q, impl, product_dtype):
        needs = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, temperature)]
        return ops.call_op(ops.queue_loss, q, k, temperature, queue, *Mask(), impl, product_dtype, *needs)[0]
    from .gpu.launch import log2e_over_tau_of
    rounded_q, rounded_k = (round_like_products(x, temperature, product_dtype) for x in (q, k))
    positive = (rounded_q * rounded_k).sum(1)      # not vecdot, which autocast would compute in a half type
    lse, (maximum, total) = ops.call_op(ops.lse, q, queue, temperature, *Mask(), impl, product_dtype)
    # lse − positive/τ would be the difference of two large rounded numbers. So compute the value from the
    # kernel's maximum and sum, in log2 units; lse − lse.detach() is 0 and only adds the gradient of lse
    gap = (maximum - positive * log2e_over_tau_of(temperature, q) + total.log2()) * math.log(2)
    return -F.logsigmoid(-gap - (lse - lse.detach())).mean()


def sigmoid_loss(q, k, temperature=0.1, bias=-10.0, *, offset=0, normalize=False, impl="auto"):
    """Return 1/N Σ_i Σ_j softplus(−y_ij (q_i·k_j/τ + b)), where y_ij is 1 for j = i + offset, else −1.

    q, k         (N, D) queries, (M, D) keys, M ≥ N + offset: the positive of row i is key i + offset
    temperature  float > 0 (see similarity_lse), or a 0-dim tensor, which then receives a gradient
    bias         finite float, or a 0-dim tensor, which then receives a gradient; −log (M − 1) gives
                 noise-contrastive estimation with M − 1 noise samples per positive, taken from the batch
    offset       this rank's first row in the gathered batch, own_rows(batch_size).start; 0 in one process
    normalize    True: divide rows by their norms first; False: use them as given, so pass unit rows
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64)
    source       Zhai et al. 2023 (SigLIP), eq. 1 and algorithm 1; Gutmann and Hyvärinen 2010 (NCE), eq. 3
    """
    q, k, temperature, product_dtype = prepare_inputs(q, k, temperature)
    check_number("bias", bias, device=q.device)
    bias = as_scalar(bias, temperature.dtype)
    check_flag("normalize", normalize)
    mask = make_mask(q, k, False, "diagonal", offset=offset)
    impl = choose_impl(impl, q, q.shape[0], k.shape[0])
    check_positives(("q", q), ("k", k), offset)
    if normalize:
        q, k, product_dtype = normalize_rows(q, k, product_dtype)
    if impl == "eager":
        return eager.sigmoid_loss(*cast_rows(product_dtype, q, k), temperature, bias, offset)
    inputs = q, k, temperature, bias
    needs = [torch.is_grad_enabled() and x.requires_grad for x in inputs]
    return ops.call_op(ops.sigmoid_loss, *inputs, *mask, impl, product_dtype, *needs)[0]


def round_like_products(x, temperature, product_dtype):
    """Cast x to product_dtype, as matmul operands are, and then to temperature's dtype.

    The gradient is straight-through: it is not rounded to product_dtype.
    """
    if product_dtype is None:
        return x.to(temperature.dtype)
    rounded = x.detach().to(product_dtype).to(temperature.dtype)
    # a straight-through gradient; infinite minus infinite is NaN, which becomes 0
    return x.to(rounded.dtype) + (rounded - x).detach().nan_to_num_(0, torch.inf, -torch.inf)


def nt_xent(z1, z2, temperature=0.5, *, normalize=False, impl="auto"):
    """Return the mean over all 2N views of −log( exp(z_i·z_i'/τ) / Σ_{j≠i} exp(z_i·z_j/τ) ).

    z1, z2       (N, D) two views: row i of z1 and row i of z2 are each other's positive (i and i' above)
    temperature  float > 0 (see similarity_lse), or a 0-dim tensor, which then receives a gradient
    normalize    True: divide rows by their norms first; False: use them as given, so pass unit rows
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64): the paper's mean, half of the released code's value
    source       Chen et al. 2020 (SimCLR), eq. 1 and algorithm 1
    """
    z1, z2, temperature, product_dtype = prepare_inputs(z1, z2, temperature, names=("z1", "z2"))
    check_flag("normalize", normalize)
    n = 2 * z1.shape[0]
    impl = choose_impl(impl, z1, n, n)
    if z1.shape[0] != z2.shape[0]:
        raise ValueError(f"z2: {len(z2)} rows, expected {len(z1)} like z1")
    if normalize:
        z1, z2, product_dtype = normalize_rows(z1, z2, product_dtype)
    if impl == "eager":
        return eager.nt_xent(*cast_rows(product_dtype, z1, z2), temperature)
    return softmax_loss(cat_rows([z1, z2]), None, temperature, Mask(exclude="pair"), impl, product_dtype)


def sup_con_loss(z, labels=None, temperature=0.07, base_temperature=0.07, *, normalize=False, impl="auto"):
    """Return the mean over views of −τ/(τ_base |P(i)|) Σ_{p∈P(i)} [ z_i·z_p/τ − log Σ_{j≠i} exp(z_i·z_j/τ) ].

    z                 (N, V, D): V views of N samples
    labels            (N,) integers: the positives P(i) are all other views of the same label; None: all other
                      views of the same sample
    temperature       float > 0, or a 0-dim tensor, which then receives a gradient
    base_temperature  float > 0, τ_base in the released code. The paper's loss has no factor τ/τ_base; for the
                      paper's loss set base_temperature = temperature
    normalize         True: divide rows by their norms first; False: use them as given, so pass unit rows
    impl              see similarity_lse
    returns           scalar, float32 (float64 for float64); a view without positives counts as 0 in the mean
    source            Khosla et al. 2020 (SupCon), L^sup_out; its released losses.py
    """
    check_rows(z=(z, "N V D"), labels=(labels, "N", int, None))
    check_flag("normalize", normalize)
    n, views, d = z.shape
    has_factor = base_temperature is not temperature
    z = z.flatten(0, 1)
    z, _, temperature, product_dtype = prepare_inputs(z, z, temperature, names=("z", "z"))
    check_temperature(base_temperature, z.device, "base_temperature")
    impl = choose_impl(impl, z, z.shape[0], z.shape[0])
    labels = torch.arange(n, device=z.device) if labels is None else labels
    if normalize:
        z, _, product_dtype = normalize_rows(z, z, product_dtype)
    if impl == "eager":
        z, = cast_rows(product_dtype, z)
        loss = eager.sup_con_loss(z, labels.repeat_interleave(views), temperature)
    elif impl == "blockwise" and is_stored(z, None):
        mask = Mask("labels", labels.repeat_interleave(views))
        loss = softmax_loss(z, None, temperature, mask, impl, product_dtype)
    else:
        loss = fused_sup_con_loss(z.view(n, views, d), labels, temperature, impl, product_dtype)
    return loss * temperature / as_scalar(base_temperature, temperature.dtype) if has_factor else loss


def fused_sup_con_loss(z, labels, temperature, impl, product_dtype):
    """Return sup_con_loss without the factor τ/τ_base, without storing a matrix of all pairs of views."""
    n, views, _ = z.shape
    lse = fused_lse(z.flatten(0, 1), None, temperature, Mask("diagonal"), impl, product_dtype)
    # number the labels by their first place in the sorted labels: unlike torch.unique, no synchronisation
    ordered = labels.sort().values
    number = torch.searchsorted(ordered, labels)
    first, end = torch.searchsorted(ordered, ordered), torch.searchsorted(ordered, ordered, right=True)
    positives = (end - first) * views - 1
    weight = (positives > 0) / positives.clamp(min=1).to(lse.dtype)
    # the sum of z_i·z_p over all pairs of a label is |Σ_i z_i|² − Σ_i |z_i|²: no (N·V, N·V) matrix
    rows = round_like_products(z, temperature, product_dtype)
    sums = torch.zeros_like(rows[:, 0])
    add_rows(sums, number, rows.sum(1))
    near = (weight * (sums * sums).sum(1)).sum() - (weight[number] * (rows * rows).sum((1, 2))).sum()
    lse = lse.view(n, views).where(positives[number, None] > 0, 0)
    return (lse.sum() - near / temperature) / (n * views)


def linear_cross_entropy(hidden, weight, targets, ignore_index=-100, *, temperature=1.0, impl="auto"):
    """Return the mean cross entropy of the logits hidden·weightᵀ/τ, which are never stored.

    Rows of any norm, used as given: the products are the logits of a linear layer, not cosines.

    hidden        (N, D) float64 | float32 | float16 | bfloat16
    weight        (V, D) same dtype and device: one row per class
    targets       (N,) int64 in [0, V), or ignore_index: such a row is ignored and may contain NaN, but takes
                  as much compute as any other row
    temperature   float > 0, or a 0-dim tensor, which then receives a gradient
    impl          see similarity_lse
    returns       scalar, float32 (float64 for float64): mean over rows that are not ignored,
                  0 if all are ignored
    raises        ValueError for a target outside [0, V) that is not ignore_index, but only on the CPU and
                  without torch.compile. Elsewhere reading the targets would synchronise with the GPU, so the
                  loss becomes NaN instead
    """
    hidden, weight, temperature, product_dtype = prepare_inputs(
        hidden, weight, temperature, ("hidden", "weight"))
    impl = choose_impl(impl, hidden, hidden.shape[0], weight.shape[0])
    if not isinstance(targets, torch.Tensor):
        raise ValueError(f"targets: found {describe(targets)}, expected an int64 tensor ({len(hidden)},)")
    check_dense("targets", targets)
    check_integer("ignore_index", ignore_index, -2 ** 63, 2 ** 63 - 1, "that int64 holds")
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:1]:
        found = f"{targets.dtype} of shape {tuple(targets.shape)}"
        raise ValueError(f"targets: found {found}, expected int64 ({len(hidden)},)")
    if targets.device != hidden.device:
        raise ValueError(f"targets: on {targets.device}, expected {hidden.device} like hidden")
    inside, weights = row_weights(targets, weight.shape[0], ignore_index, temperature.dtype)
    if impl != "eager":
        mask = Mask("target", inside)
        loss = softmax_loss(hidden, weight, temperature, mask, impl, product_dtype, weights=weights)
        return loss if weights is None else loss / weights.sum().clamp(min=1)
    rows = list(cast_rows(product_dtype, hidden, weight))
    if weights is None:
        return eager.linear_cross_entropy(*rows, inside, -100, temperature)
    rows[0] = rows[0].where((weights != 0)[:, None], 0)  # NaN in an ignored row must not reach a gradient
    loss = eager.linear_cross_entropy(*rows, inside.where(weights == 1, -100), -100, temperature)
    return loss * (1 + 0 * weights.sum())                # NaN if a target is wrong


def row_weights(targets, classes, ignore_index, dtype):
    """Return (targets (N,) clamped to [0, classes), weights (N,) of the rows, or None if all are 1).

    The weight is 0 for an ignored row and NaN for another target outside [0, classes); on the CPU, without
    torch.compile, such a target raises ValueError.
    """
    inside = targets.clamp(0, classes - 1)
    is_read = targets.is_cpu and not is_traced(targets)
    if is_read and not 0 <= ignore_index < classes and torch.equal(inside, targets):
        return targets, None
    weights = torch.where(inside == targets, 1.0, torch.nan).to(dtype)
    weights.masked_fill_(targets == ignore_index, 0)
    if is_read and weights.isnan().any():
        row = weights.isnan().nonzero()[0].item()
        expected = f"0 to {classes - 1}, or ignore_index, {ignore_index}"
        raise ValueError(f"targets: row {row} is {targets[row]}, expected {expected}")
    return inside, weights


def triplet_loss(anchor, positive, negative=None, margin=1.0, *, mining="hard"):
    """Return the mean over rows of max(0, |a_i − p_i| − |a_i − n_i| + margin), with Euclidean distances.

    Rows of any norm, used as given; F.triplet_margin_loss computes the value. The margin is a distance;
    FaceNet uses unit rows (F.normalize).

    anchor, positive    (N, D) any float type; the loss is float32, or float64 if one of them is
    negative            (N, D), or None: the negative of a_i is a row of positive other than p_i (N ≥ 2),
                        found by mining; the (N, N) matrix of distances is never stored
    margin              number > 0
    mining              "hard": the row nearest to a_i; "semi-hard": the nearest row among those farther from
                        a_i than p_i, or the farthest row if there is none
    returns             scalar
    source              Schroff et al. 2015 (FaceNet), sections 3.1 and 3.2, with distances instead of their
                        squares; hard: Hermans et al. 2017
    """
    check_rows(anchor=(anchor, "N D"), positive=(positive, "N D"), negative=(negative, "N D", None))
    check_number("margin", margin, SMALLEST)
    check_choice("mining", mining, "hard", "semi-hard")
    anchor, positive, negative = upcast(anchor, positive, negative)
    if negative is None:
        if len(positive) < 2:
            raise ValueError("positive: 1 row, expected at least 2 if negative is None")
        with torch.autocast(anchor.device.type, enabled=False):
            mine = hard_negatives if mining == "hard" else semi_hard_negatives
            a, p = anchor.detach(), positive.detach()
            centre = p.mean(0)       # distances computed from products lose digits if rows are far from 0
            negative = positive[mine(a - centre, p - centre)]
    return F.triplet_margin_loss(anchor, positive, negative, margin)


def hard_negatives(a, p):
    """Return (N,) the index of the row of p that is nearest to a_i, other than p_i."""
    # −|a − p|²/2 = a·p − |p|²/2 − |a|²/2, and |a|² is the same for all p
    keys = torch.cat([p, -(p * p).sum(1, keepdim=True) / 2], 1)
    return similarity_topk(F.pad(a, (0, 1), value=1.0), keys, 1, exclude="diagonal")[1][:, 0]


def semi_hard_negatives(a, p):
    """Return (N,) the index of the row of p that is nearest to a_i among those farther than p_i.

    If there is none, return the farthest row.
    """
    found, size = [], max(1, 2**22 // len(p))
    for start in range(0, len(a), size):
        distance = torch.cdist(a[start : start + size], p)
        own = distance.diagonal(start).clone()
        farther = distance.masked_fill(distance <= own[:, None], torch.inf)    # excludes p_i too
        distance.diagonal(start).fill_(-torch.inf)
        nearest, index = farther.min(1)
        found.append(torch.where(nearest.isinf(), distance.argmax(1), index))
    return torch.cat(found)


def margin_loss(x1, x2, same, margin=1.0):
    """Return the mean over rows of ½ d² if same[i], else ½ max(0, margin − d)², with d = |x1_i − x2_i|.

    Rows of any norm, used as given. Both d and the margin are Euclidean distances.

    x1, x2     (N, D) any float type; the loss is float32, or float64 if one of them is. For equal rows the
               gradient of d is 0
    same       (N,) bool, or integers 0 and 1
    margin     number > 0
    returns    scalar
    source     Hadsell, Chopra, LeCun 2006, eq. 4
    """
    check_rows(x1=(x1, "N D"), x2=(x2, "N D"), same=(same, "N", bool, int))
    check_number("margin", margin, SMALLEST)
    if same.is_cpu and not is_traced(same):
        wrong = (same != 0) & (same != 1)
        if wrong.any():
            raise ValueError(f"same: found {same[wrong][0]}, expected 0 or 1")
    x1, x2 = upcast(x1, x2)
    distance = torch.linalg.vector_norm(x1 - x2, dim=1)
    return torch.where(same != 0, distance, F.relu(margin - distance)).square().mean() / 2


def upcast(*rows):
    """Return all rows in float64 if one of them is float64, else in float32; None stays None."""
    dtype = torch.float64 if any(x is not None and x.dtype == torch.float64 for x in rows) else torch.float32
    return [x if x is None else x.to(dtype) for x in rows]
