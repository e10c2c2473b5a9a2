"""Mean losses: thin, for users who want one call.

Rows are used as given. For cosine similarities pass unit rows (F.normalize), or normalize=True. Raw rows of a
large length often give a loss of 0.0, and no loss checks for them: reading lengths would wait for the GPU.

In a softmax loss the positive is taken out of the fused sum by rule and comes back as softplus(lse −
positive), the same number with a far better gradient.
"""
import math

import torch
import torch.nn.functional as F

from . import eager, operations
from .blockwise import add_rows
from .checks import (
    TINY,
    check_choice,
    check_dense,
    check_flag,
    check_integer,
    check_number,
    check_positives,
    check_rows,
    check_temperature,
    told,
)
from .dispatch import is_watched
from .paths import choose_impl, keeps_keys
from .rules import Rule, make_rule
from .similarity import (
    as_scalar,
    check_inputs,
    fused_lse,
    in_dtype,
    normalized,
    similarity_topk,
    softmax_loss,
    unit_rows,
)


def info_nce(q, k, temperature=0.07, *, symmetric=False, offset=0, normalize=False, impl="auto"):
    """Mean over rows of −log( exp(q_i·k_{i+offset}/τ) / Σ_j exp(q_i·k_j/τ) ).

    q, k         (N, D) queries, (M, D) keys, M ≥ N + offset: row i's positive is key i + offset
    temperature  float > 0 (see similarity_lse) or a 0-dim tensor, which then gets its gradient
    symmetric    mean of this and of the same with queries and keys swapped (M = N)
    offset       this rank's first row among the gathered keys, own_rows(rows).start; 0 in one process
    normalize    True: divides rows by their lengths first; False: uses them as given, so pass unit rows
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64)
    source       van den Oord et al. 2018, eq. 4; symmetric: Radford et al. 2021, fig. 3
    """
    return contrast(q, k, temperature, symmetric, offset, normalize, impl)


def contrast(q, k, temperature, symmetric, offset, normalize, impl, names=("q", "k")):
    """info_nce; names are the caller's, for messages."""
    q, k, temperature, products = check_inputs(q, k, temperature, names)
    check_flag("symmetric", symmetric)
    check_flag("normalize", normalize)
    rule, impl = make_rule(q, k, False, "diagonal", offset=offset), choose_impl(impl, q)
    check_positives((names[0], q), (names[1], k), offset)
    if symmetric and q.shape[0] != k.shape[0]:
        wanted = f"{len(q)} as {names[0]}, for both are anchors"
        raise ValueError(f"{names[1]}: {len(k)} rows, wanted {wanted}")
    if normalize:
        q, k, products = normalized(q, k, products)
    if impl == "eager":
        return eager.info_nce(*in_dtype(products, q, k), temperature, offset, symmetric)
    return softmax_loss(q, k, temperature, rule, impl, products, both=symmetric)


def clip_loss(image, text, temperature=0.07, *, normalize=False, impl="auto"):
    """Symmetric info_nce over (N, D) images and (N, D) texts, scalar; source: Radford et al. 2021, fig. 3."""
    return contrast(image, text, temperature, True, 0, normalize, impl, ("image", "text"))


def queue_loss(q, k, queue, temperature=0.07, *, normalize=False, impl="auto"):
    """Mean over rows of −log( exp(q_i·k_i/τ) / (exp(q_i·k_i/τ) + Σ_j exp(q_i·queue_j/τ)) ): MoCo's loss.

    q, k         (N, D) queries and their positives, row by row; other rows of k are no negatives
    queue        (K, D) negatives of every row; never gets a gradient, which makes this cheaper than two sides
    temperature  float > 0 (see similarity_lse) or a 0-dim tensor, which then gets its gradient
    normalize    True: divides the rows of q, k and queue by their lengths first; see similarity_lse. That of
                 the queue costs O(K·D) in each call: a queue that is filled with unit rows saves it
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64)
    source       He et al. 2020 (MoCo), eq. 1
    """
    q, queue, *_ = check_inputs(q, queue, 1.0, names=("q", "queue"))
    q, k, temperature, products = check_inputs(q, k, temperature)  # q is float32 if either of them was
    check_flag("normalize", normalize)
    queue = queue.detach()
    impl = choose_impl(impl, q)
    if len(q) != len(k):
        raise ValueError(f"k: {len(k)} rows, wanted {len(q)} as q")
    if normalize:
        q, k, products = normalized(q, k, products)
        queue = unit_rows(queue)
    if impl == "eager":
        return eager.queue_loss(*in_dtype(products, q, k, queue), temperature)
    if keeps_keys(q, impl, products):
        needs = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, temperature)]
        return operations.call(operations.queue_loss, q, k, temperature, queue, *Rule(), impl, products,
                               *needs)[0]
    from .gpu.launch import octaves_of
    positive = (as_multiplied(q, temperature, products) * as_multiplied(k, temperature, products)).sum(1)
    lse, (top, total) = operations.call(operations.lse, q, queue, temperature, *Rule(), impl, products)
    gap = (top - positive * octaves_of(temperature, q) + total.log2()) * math.log(2)
    # lse − positive/τ would have the rounding of large numbers that cancel; of lse only the gradient is left
    return -F.logsigmoid(-gap - (lse - lse.detach())).mean()


def sigmoid_loss(q, k, temperature=0.1, bias=-10.0, *, offset=0, normalize=False, impl="auto"):
    """1/N Σ_i Σ_j softplus(−y_ij (q_i·k_j/τ + b)), y = 1 where j = i + offset, else −1: SigLIP's loss.

    q, k         (N, D) queries, (M, D) keys, M ≥ N + offset: row i's positive is key i + offset
    temperature  float > 0 (see similarity_lse) or a 0-dim tensor, which then gets its gradient
    bias         finite float or a 0-dim tensor, which then gets its gradient. −log (M − 1) makes this
                 noise-contrastive estimation with the batch as noise, M − 1 samples to a positive
    offset       this rank's first row among the gathered keys, own_rows(rows).start; 0 in one process
    normalize    True: divides rows by their lengths first; False: uses them as given, so pass unit rows
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64)
    source       Zhai et al. 2023 (SigLIP), eq. 1 and algorithm 1; Gutmann and Hyvärinen 2010 (NCE), eq. 3
    """
    q, k, temperature, products = check_inputs(q, k, temperature)
    check_number("bias", bias, device=q.device)
    bias = as_scalar(bias, temperature.dtype)
    check_flag("normalize", normalize)
    rule, impl = make_rule(q, k, False, "diagonal", offset=offset), choose_impl(impl, q)
    check_positives(("q", q), ("k", k), offset)
    if normalize:
        q, k, products = normalized(q, k, products)
    if impl == "eager":
        return eager.sigmoid_loss(*in_dtype(products, q, k), temperature, bias, offset)
    inputs = q, k, temperature, bias
    needs = [torch.is_grad_enabled() and x.requires_grad for x in inputs]
    return operations.call(operations.sigmoid_loss, *inputs, *rule, impl, products, *needs)[0]


def as_multiplied(x, temperature, products):
    """x as wide as temperature, rounded as what the operations multiply, though its gradient is not; to be
    multiplied and summed, as autocast would take vecdot in half."""
    if products is None:
        return x.to(temperature.dtype)
    rounded = x.detach().to(products).to(temperature.dtype)
    return x.to(rounded.dtype) + (rounded - x).detach().nan_to_num_(0, torch.inf, -torch.inf)


def nt_xent(z1, z2, temperature=0.5, *, normalize=False, impl="auto"):
    """Mean over all 2N views of −log( exp(z_i·z_i'/τ) / Σ_{j≠i} exp(z_i·z_j/τ) ), i' the other view of i.

    z1, z2       (N, D) the two views, row i of one belonging to row i of the other
    temperature  float > 0 (see similarity_lse) or a 0-dim tensor, which then gets its gradient
    normalize    True: divides rows by their lengths first; False: uses them as given, so pass unit rows
    returns      scalar, float32 (float64 for float64): the paper's mean, half of the released code's value
    source       Chen et al. 2020 (SimCLR), eq. 1 and algorithm 1
    """
    z1, z2, temperature, products = check_inputs(z1, z2, temperature, names=("z1", "z2"))
    check_flag("normalize", normalize)
    impl = choose_impl(impl, z1)
    if len(z1) != len(z2):
        raise ValueError(f"z2: {len(z2)} rows, wanted {len(z1)} as z1")
    if normalize:
        z1, z2, products = normalized(z1, z2, products)
    if impl == "eager":
        return eager.nt_xent(*in_dtype(products, z1, z2), temperature)
    return softmax_loss(torch.cat([z1, z2]), None, temperature, Rule(exclude="pair"), impl, products)


def sup_con_loss(z, labels=None, temperature=0.07, base_temperature=0.07, *, normalize=False, impl="auto"):
    """Mean over the N·V views of −1/|P(i)| Σ_{p∈P(i)} [ z_i·z_p/τ − log Σ_{j≠i} exp(z_i·z_j/τ) ] · τ/τ_base.

    z                 (N, V, D) V views of N samples
    labels            (N,) integers: P(i) is all other views of the same label; None: of the same sample
    temperature       float > 0 or a 0-dim tensor, which then gets its gradient
    base_temperature  float > 0; the released code's factor. The paper's loss has none: give temperature again
    normalize         True: divides rows by their lengths first; False: uses them as given, so pass unit rows
    returns           scalar, float32 (float64 for float64); a view without positives adds 0 and counts
    source            Khosla et al. 2020 (SupCon), L^sup_out; its released losses.py
    """
    check_rows(z=(z, "N V D"), labels=(labels, "N", int, None))
    check_flag("normalize", normalize)
    (n, views, d), is_base = z.shape, base_temperature is temperature          # then their gradients cancel
    z = z.flatten(0, 1)
    z, _, temperature, products = check_inputs(z, z, temperature, names=("z", "z"))
    check_temperature(base_temperature, z.device, "base_temperature")
    base = as_scalar(base_temperature, temperature.dtype)
    scale = 1 if is_base else temperature / base
    impl, labels = choose_impl(impl, z), torch.arange(n, device=z.device) if labels is None else labels
    if normalize:
        z, _, products = normalized(z, z, products)
    if impl == "eager":
        z, = in_dtype(products, z)
        return scale * eager.sup_con_loss(z, labels.repeat_interleave(views), temperature)
    lse = fused_lse(z, None, temperature, Rule("diagonal"), impl, products)
    # a label's place is its first one's among the sorted: no value is waited for
    ordered = labels.sort().values
    place, first, past = (torch.searchsorted(ordered, x, right=right)
                          for x, right in ((labels, False), (ordered, False), (ordered, True)))
    positives = (past - first) * views - 1
    share = (positives > 0) / positives.clamp(min=1).to(lse.dtype)
    # Σ_i Σ_p z_i·z_p of a label is |Σ_i z_i|² − Σ_i |z_i|²: no matrix, and a sum whose gradient is no sum
    rows = as_multiplied(z, temperature, products).view(n, views, d)
    sums = torch.zeros_like(rows[:, 0])
    add_rows(sums, place, rows.sum(1))
    near = (share * (sums * sums).sum(1)).sum() - (share[place] * (rows * rows).sum((1, 2))).sum()
    lse = lse.view(n, views).where(positives[place, None] > 0, 0)
    return scale * (lse.sum() - near / temperature) / (n * views)


def linear_cross_entropy(hidden, weight, targets, ignore_index=-100, *, temperature=1.0, impl="auto"):
    """Mean cross entropy of the logits hidden·weightᵀ, which are never stored.

    Rows of any length, used as given: their products are the logits of a linear layer, not cosines.

    hidden        (N, D) float64 | float32 | float16 | bfloat16
    weight        (V, D) same dtype and device: one row a class
    targets       (N,) int64 in [0, V), or ignore_index for rows that do not count (but cost), NaN or not
    temperature   float > 0 or a 0-dim tensor dividing the logits
    returns       scalar, float32 (float64 for float64): mean over the rows that count, 0 where none does
    raises        on a GPU, where reading a target would wait, and under torch.compile a target that is
                  neither raises nothing, but makes the loss NaN
    """
    hidden, weight, temperature, products = check_inputs(hidden, weight, temperature, ("hidden", "weight"))
    impl = choose_impl(impl, hidden)
    if not isinstance(targets, torch.Tensor):
        raise ValueError(f"targets: found {told(targets)}, wanted an int64 tensor ({len(hidden)},)")
    check_dense("targets", targets)
    check_integer("ignore_index", ignore_index, -2 ** 63, 2 ** 63 - 1, "that int64 holds")
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:1]:
        found = f"{targets.dtype} of shape {tuple(targets.shape)}"
        raise ValueError(f"targets: found {found}, wanted int64 ({len(hidden)},)")
    if targets.device != hidden.device:
        raise ValueError(f"targets: on {targets.device}, wanted {hidden.device} as hidden")
    counts = targets != ignore_index
    wrong = counts & ((targets < 0) | (targets >= len(weight)))
    is_read = targets.is_cpu and not is_watched(targets)
    if is_read and wrong.any():
        row = wrong.nonzero()[0].item()
        wanted = f"0 to {len(weight) - 1}, or ignore_index, {ignore_index}"
        raise ValueError(f"targets: row {row} is {targets[row]}, wanted {wanted}")
    if not (is_read and counts.all()):  # rows that do not count are zeros: 0 · NaN would be every class's NaN
        hidden = hidden.masked_fill(~counts[:, None], 0)
    if impl == "eager":
        rows = in_dtype(products, hidden, weight)
        loss = eager.linear_cross_entropy(*rows, targets.masked_fill(wrong, 0), ignore_index, temperature)
    else:
        rule = Rule("target", targets.where(counts & ~wrong, 0))
        weights = counts.to(temperature.dtype)
        total = softmax_loss(hidden, weight, temperature, rule, impl, products, weights=weights)
        loss = total / counts.sum().clamp(min=1)
    return loss if is_read else loss * torch.ones_like(loss).masked_fill(wrong.any(), torch.nan)


def triplet_loss(anchor, positive, negative=None, margin=1.0, *, mining="hard"):
    """Mean over rows of max(0, |a_i − p_i| − |a_i − n_i| + margin), Euclidean: F.triplet_margin_loss.

    Rows of any length, used as given. The margin is a distance: FaceNet's is one between unit rows
    (F.normalize).

    anchor, positive    (N, D) any float type; the loss is in float32, or float64
    negative            (N, D); None: a row of positive other than p_i (N ≥ 2), found by mining; the (N, N)
                        matrix of distances is never stored
    margin              number > 0
    mining              "hard": the row that is nearest to a_i; "semi-hard": the nearest of those farther from
                        a_i than p_i is, and the farthest of all where there are none
    returns             scalar
    source              Schroff et al. 2015 (FaceNet), sections 3.1 and 3.2, of distances, not their squares;
                        hard: Hermans et al. 2017
    """
    check_rows(anchor=(anchor, "N D"), positive=(positive, "N D"), negative=(negative, "N D", None))
    check_number("margin", margin, TINY)
    check_choice("mining", mining, "hard", "semi-hard")
    anchor, positive, negative = widened(anchor, positive, negative)
    if negative is None:
        if len(positive) < 2:
            raise ValueError("positive: 1 row, wanted at least 2 where no negative is given")
        with torch.autocast(anchor.device.type, enabled=False):
            mine = nearest_other if mining == "hard" else nearest_farther
            a, p = anchor.detach(), positive.detach()
            centre = p.mean(0)                                 # far from 0 products would round distances off
            negative = positive[mine(a - centre, p - centre)]
    return F.triplet_margin_loss(anchor, positive, negative, margin)


def nearest_other(a, p):
    """(N,) the row of p that is nearest to a_i, but not p_i."""
    # −|a − p|²/2 = a·p − |p|²/2 − |a|²/2, of which the last is the same for all p
    keys = torch.cat([p, -(p * p).sum(1, keepdim=True) / 2], 1)
    return similarity_topk(F.pad(a, (0, 1), value=1.0), keys, 1, exclude="diagonal")[1][:, 0]


def nearest_farther(a, p):
    """(N,) the row of p that is nearest to a_i among those farther than p_i; the farthest where none is."""
    found, size = [], max(1, 2**22 // len(p))
    for start in range(0, len(a), size):
        far = torch.cdist(a[start : start + size], p)
        own = far.diagonal(start).clone()
        farther = far.masked_fill(far <= own[:, None], torch.inf)              # p_i itself is not
        far.diagonal(start).fill_(-torch.inf)
        nearest, at = farther.min(1)
        found.append(torch.where(nearest.isinf(), far.argmax(1), at))
    return torch.cat(found)


def margin_loss(x1, x2, same, margin=1.0):
    """Mean over rows of ½ |x1 − x2|² where they are the same, else ½ max(0, margin − |x1 − x2|)².

    Rows of any length, used as given: the distance is Euclidean, and the margin is one.

    x1, x2     (N, D) any float type; the loss is in float32, or float64. Where both are equal |x1 − x2| has
               gradient 0
    same       (N,) bool, or integers 0 and 1
    margin     number > 0
    returns    scalar
    source     Hadsell, Chopra, LeCun 2006, eq. 4
    """
    check_rows(x1=(x1, "N D"), x2=(x2, "N D"), same=(same, "N", bool, int))
    check_number("margin", margin, TINY)
    if same.is_cpu and not is_watched(same) and (wrong := (same != 0) & (same != 1)).any():
        raise ValueError(f"same: found {same[wrong][0]}, wanted 0 or 1")
    x1, x2 = widened(x1, x2)
    distance = torch.linalg.vector_norm(x1 - x2, dim=1)
    return torch.where(same != 0, distance, F.relu(margin - distance)).square().mean() / 2


def widened(*rows):
    """All in float64 where one is, else in float32; None as None."""
    dtype = torch.float64 if any(x is not None and x.dtype == torch.float64 for x in rows) else torch.float32
    return [x if x is None else x.to(dtype) for x in rows]
