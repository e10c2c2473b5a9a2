"""Mean losses on top of similarity_lse: thin, for users who want one call.

Rows are taken as given: for cosine similarities normalise first (F.normalize). In each loss the positive is
taken out of the fused sum by rule and comes back as softplus(lse − positive), the same number with a far
better gradient.
"""
import math

import torch
import torch.nn.functional as F

from . import eager, operations
from .checks import check_positives
from .dispatch import is_watched
from .paths import choose_impl, keeps_keys
from .rules import Rule, make_rule
from .similarity import check_inputs, in_dtype, softmax_loss


def info_nce(q, k, temperature=0.07, *, symmetric=False, offset=0, impl="auto"):
    """Mean over rows of −log( exp(q_i·k_{i+offset}/τ) / Σ_j exp(q_i·k_j/τ) ).

    q, k         (N, D) queries, (M, D) keys, M ≥ N + offset: row i's positive is key i + offset
    temperature  float > 0 or a 0-dim tensor, which then gets its gradient
    symmetric    mean of this and of the same with queries and keys swapped (M = N)
    offset       this rank's first row among the gathered keys
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64)
    raises       ValueError naming the argument, what it was and what is wanted
    source       van den Oord et al. 2018, eq. 4; symmetric: Radford et al. 2021, fig. 3
    """
    q, k, temperature, products = check_inputs(q, k, temperature)
    rule, impl = make_rule(q, k, False, "diagonal", offset=offset), choose_impl(impl, q)
    check_positives(("q", q), ("k", k), offset)
    if symmetric and (len(q) != len(k)):
        raise ValueError(f"symmetric: wanted as many rows in k as in q, found {len(k)} and {len(q)}")
    if impl == "eager":
        return eager.info_nce(*in_dtype(products, q, k), temperature, offset, symmetric)
    return softmax_loss(q, k, temperature, rule, impl, products, both=symmetric)


def clip_loss(image, text, temperature=0.07, *, impl="auto"):
    """Symmetric info_nce over (N, D) images and (N, D) texts, scalar; source: Radford et al. 2021, fig. 3."""
    return info_nce(image, text, temperature, symmetric=True, impl=impl)


def queue_loss(q, k, queue, temperature=0.07, *, impl="auto"):
    """Mean over rows of −log( exp(q_i·k_i/τ) / (exp(q_i·k_i/τ) + Σ_j exp(q_i·queue_j/τ)) ): MoCo's loss.

    q, k         (N, D) queries and their positives, row by row; other rows of k are no negatives
    queue        (K, D) negatives of every row; never gets a gradient, which makes this cheaper than two sides
    temperature  float > 0 or a 0-dim tensor, which then gets its gradient
    impl         see similarity_lse
    returns      scalar, float32 (float64 for float64)
    raises       ValueError naming the argument, what it was and what is wanted
    source       He et al. 2020 (MoCo), eq. 1
    """
    q, queue, *_ = check_inputs(q, queue, 1.0, names=("q", "queue"))
    q, k, temperature, products = check_inputs(q, k, temperature)  # q is float32 if either of them was
    queue = queue.detach()
    impl = choose_impl(impl, q)
    if len(q) != len(k):
        raise ValueError(f"k: {len(k)} rows, q has {len(q)}")
    if impl == "eager":
        return eager.queue_loss(*in_dtype(products, q, k, queue), temperature)
    if keeps_keys(q, impl, products):
        needs = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, temperature)]
        return operations.call(operations.queue_loss, q, k, queue, temperature, *Rule(), impl, products,
                               *needs)[0]
    rounded = (x.detach().to(products or x.dtype).to(temperature.dtype) for x in (q, k))
    # rounded as the others' products, though its gradient is not; autocast would take vecdot in half
    q_wide, k_wide = (x.to(y.dtype) + (y - x).detach().nan_to_num_(0, torch.inf, -torch.inf)
                      for x, y in zip((q, k), rounded))
    from .launch import octaves_of
    positive = (q_wide * k_wide).sum(1)
    lse, (top, total) = operations.call(operations.lse, q, queue, temperature, *Rule(), impl, products)
    gap = (top - positive * octaves_of(temperature, q) + total.log2()) * math.log(2)
    # lse − positive/τ would have the rounding of large numbers that cancel; of lse only the gradient is left
    return -F.logsigmoid(-gap - (lse - lse.detach())).mean()


def nt_xent(z1, z2, temperature=0.5, *, impl="auto"):
    """Mean over all 2N views of −log( exp(z_i·z_i'/τ) / Σ_{j≠i} exp(z_i·z_j/τ) ), i' the other view of i.

    z1, z2       (N, D) the two views, row i of one belonging to row i of the other
    temperature  float > 0 or a 0-dim tensor, which then gets its gradient
    returns      scalar, float32 (float64 for float64): the paper's mean, half of the released code's value
    raises       ValueError naming the argument, what it was and what is wanted
    source       Chen et al. 2020 (SimCLR), eq. 1 and algorithm 1
    """
    z1, z2, temperature, products = check_inputs(z1, z2, temperature, names=("z1", "z2"))
    impl = choose_impl(impl, z1)
    if len(z1) != len(z2):
        raise ValueError(f"z2: {len(z2)} rows, z1 has {len(z1)}")
    if impl == "eager":
        return eager.nt_xent(*in_dtype(products, z1, z2), temperature)
    return softmax_loss(torch.cat([z1, z2]), None, temperature, Rule(exclude="pair"), impl, products)


def linear_cross_entropy(hidden, weight, targets, ignore_index=-100, *, temperature=1.0, impl="auto"):
    """Mean cross entropy of the logits hidden·weightᵀ, which are never stored.

    hidden        (N, D) float64 | float32 | float16 | bfloat16
    weight        (V, D) same dtype and device: one row a class
    targets       (N,) int64 in [0, V), or ignore_index for rows that do not count (but cost), NaN or not
    temperature   float > 0 or a 0-dim tensor dividing the logits
    returns       scalar, float32 (float64 for float64): mean over the rows that count, 0 where none does
    raises        ValueError naming the argument, what it was and what is wanted. On a GPU, where reading a
                  target would wait, and under torch.compile a target that is neither makes the loss NaN
    """
    hidden, weight, temperature, products = check_inputs(hidden, weight, temperature, ("hidden", "weight"))
    impl = choose_impl(impl, hidden)
    if not isinstance(targets, torch.Tensor):
        raise ValueError(f"targets: found {type(targets).__name__}, wanted an int64 tensor ({len(hidden)},)")
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:1]:
        found = f"{targets.dtype} of shape {tuple(targets.shape)}"
        raise ValueError(f"targets: found {found}, wanted int64 ({len(hidden)},)")
    if targets.device != hidden.device:
        raise ValueError(f"targets: on {targets.device}, hidden is on {hidden.device}")
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
