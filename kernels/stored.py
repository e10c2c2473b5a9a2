"""The fused operations for small matrices: the logits are stored, in as few PyTorch operations as possible.

A step with a small matrix (heuristics.py) takes as long as the host needs to start its operations. Starting
a Triton kernel takes several times as long as starting a PyTorch operation, and strips need more operations.
Signatures and results are those of blockwise.py, which explains the formulas, except that similarity_lse
returns the softmax in place of its statistics.

Unlike the kernels, a loss computes the softmax with the positive. But its gradient is as accurate: the
positive's entry 1 − p, a difference that rounding destroys when p is near 1, is computed as the sum of all
other p.
"""
import torch
import torch.nn.functional as F

from .blockwise import to_accumulation_dtype
from .masks import excluded

WEIGHT_SCALE = 2.0 ** 14    # keeps small softmax weights above the smallest float16, as in gpu/gradient.py


def operands(q, k, temperature):
    """Return q and k (q itself if k is None) in the dtype of the products.

    Half rows stay as they are on a GPU, which multiplies them with float32 sums.
    """
    if q.dtype == temperature.dtype or q.is_cuda and q.dtype.itemsize == 2:
        return q, q if k is None else k
    return to_accumulation_dtype(q, k, temperature)


def reciprocal(temperature, count=1):
    """Return 1 / (temperature · count): a number if reading the temperature needs no synchronisation."""
    if temperature.is_cuda:
        return (temperature * count).reciprocal()
    return 1 / (temperature.item() * count)


def product(a, b, factor=None):
    """Return factor · a @ b, with float32 sums and results for half types."""
    if a.dtype.itemsize == 2:
        if a.is_cuda:
            s = torch.mm(a, b, out_dtype=torch.float32)
        else:                                                   # in tests: the CPU has no such product
            s = torch.mm(a.float(), b.float())
    elif isinstance(factor, float):
        return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=factor)
    else:
        s = torch.mm(a, b)
    return s if factor is None else s.mul_(factor)


def masked_logits(q, k, temperature, mask):
    """Return q·kᵀ/τ, −∞ where masked."""
    s = product(q, k.T, reciprocal(temperature))
    if mask.exclude not in ("none", "diagonal", "pair") or any(part is not None for part in mask[1:7]):
        rows = torch.arange(q.shape[0], device=q.device)
        return s.masked_fill_(excluded(mask, rows, q.shape[0], k.shape[0]), -torch.inf)
    if mask.exclude == "pair":
        own_views(s, mask).fill_(-torch.inf)
    if mask.exclude != "none":
        positives(s, mask).fill_(-torch.inf)
    return s


def gradients(w, q, k, temperature, count, needs_q, needs_k, needs_temperature, self_similarity=False):
    """Return (dq, dk, dτ) from w = count · dloss/ds; a gradient that is not needed has no elements.

    self_similarity  True: k is q, dq is the whole gradient, and dk has no elements
    """
    if self_similarity:
        w, needs_k = w + w.T, False
    factor = reciprocal(temperature, count)
    if q.dtype == torch.bfloat16:                               # it has the range of float32
        w, factor = torch.mul(w, factor, out=torch.empty_like(w, dtype=q.dtype)), None
    elif q.dtype == torch.float16:
        w = torch.mul(w, WEIGHT_SCALE, out=torch.empty_like(w, dtype=q.dtype))
        factor = factor / WEIGHT_SCALE
    dq = product(w, k, factor) if needs_q or needs_temperature else w.new_empty(0, q.shape[1])
    dk = product(w.T, q, factor) if needs_k else w.new_empty(0, q.shape[1])
    dt = dq.new_empty(0)
    if needs_temperature:                                       # s = q·k/τ; self-similarity counts each twice
        dt = torch.dot(q.reshape(-1).to(dq.dtype), dq.view(-1)) / (temperature * -(1 + self_similarity))
    return dq, dk, dt


def similarity_lse(q, k, temperature, mask):
    """Return (lse (N,), softmax (N, M)); a row without columns has lse −∞ and a softmax of 0."""
    q, k = operands(q, k, temperature)
    s = masked_logits(q, k, temperature, mask)
    limits = torch.finfo(s.dtype)
    maximum = s.amax(1, keepdim=True).clamp_(limits.min, limits.max)     # so that s − maximum is never ∞ − ∞
    e = s.sub_(maximum).exp_()
    total = e.sum(1, keepdim=True)
    lse = total.log().add_(maximum).squeeze(1)
    return lse, e.div_(total.clamp_(min=limits.tiny))


def similarity_lse_backward(q, k, temperature, mask, grad, p, needs_q, needs_k, needs_temperature):
    """Return (dq, dk, dτ) for the upstream gradient of lse."""
    rows, keys = operands(q, k, temperature)
    count = 1
    if rows.dtype == torch.float16:                             # w must not exceed 1
        count = 1 / largest_finite(grad)
        grad = grad * count
    needs = needs_q, needs_k, needs_temperature
    return gradients(p * grad[:, None], rows, keys, temperature, count, *needs, self_similarity=k is None)


def largest_finite(grad):
    """Return the largest finite |grad|, above 0: NaN or infinity must not change the scale of other rows."""
    size = grad.abs()
    return size.where(size < torch.inf, 0).amax().clamp(min=torch.finfo(torch.float32).tiny)


def similarity_lse_frozen_keys(q, k, temperature, mask):
    """Return (lse (N,), o (N, D)); see blockwise.similarity_lse_frozen_keys."""
    lse, p = similarity_lse(q, k, temperature, mask)
    o, *_ = gradients(p, *operands(q, k, temperature), torch.ones(()), 1, True, False, False)
    return lse, o


def softmax_loss(q, k, temperature, mask, weights, both, needs_q, needs_k, needs_temperature):
    """Return (loss, dq, dk, dτ); see blockwise.softmax_loss.

    mask  excludes the positives; or exclude is "labels", for sup_con_loss: row_ids and column_ids hold the
          labels, and row i is column i + offset
    """
    rows, keys = operands(q, k, temperature)
    s, self_similarity = product(rows, keys.T, reciprocal(temperature)), k is None
    if mask.exclude in ("pair", "labels"):
        own_views(s, mask).fill_(torch.finfo(s.dtype).min)
    if mask.exclude == "labels":
        loss, w = mean_over_labels(s, mask)
    else:
        loss, w = cross_entropy(s, mask, 1)
    if both:
        loss_of_columns, w_of_columns = cross_entropy(s, mask, 0)
        loss, w = loss.add_(loss_of_columns).div_(2), w.add_(w_of_columns)
    count = q.shape[0] * (1 + both)
    if weights is None:
        loss = loss.mean()
    else:
        loss, w, count = weights @ loss, w.mul_(weights[:, None]), 1
    needs = needs_q, needs_k, needs_temperature
    return loss, *gradients(w, rows, keys, temperature, count, *needs, self_similarity)


def cross_entropy(s, mask, axis):
    """Return (loss of each row (N,), gradients of their sum in s (N, M)) for the softmax along axis."""
    log_p = s.log_softmax(axis)
    if mask.exclude == "target":
        targets = mask.row_ids[:, None]
        positive = log_p.gather(1, targets).squeeze(1)
        p = log_p.exp_().scatter_(1, targets, 0.0)
        others = p.sum(axis)
        p.scatter_(1, targets, others.neg()[:, None])
    else:
        of_positives = positives(log_p, mask)
        positive, p = of_positives.clone(), log_p.exp_()
        of_positives.fill_(0)                                   # now a view of p
        others = p.sum(axis).view_as(positive)
        torch.neg(others, out=of_positives)
    # −log p of the positive, with all digits also if it is small
    return F.softplus(others.log().sub_(positive), threshold=40).view(-1), p


def positives(x, mask):
    """Return the entries of the positives of x (N, M), contiguous: a view (N,), or (2, N/2) for "pair"."""
    if mask.exclude != "pair":
        return x.diagonal(mask.offset)
    (n, m), half = x.shape, x.shape[1] // 2    # entries (i, half + i + offset), then (n/2 + i, i + offset)
    return x.as_strided((2, n // 2), (n // 2 * m - half, m + 1), half + mask.offset)


def own_views(x, mask):
    """Return the entries of x (N, M) that compare a row with itself, contiguous: a view, as in positives."""
    if mask.exclude != "pair":
        return x.diagonal(mask.offset)
    (n, m), half = x.shape, x.shape[1] // 2    # entries (i, i + offset), then (n/2 + i, half + i + offset)
    return x.as_strided((2, n // 2), (n // 2 * m + half, m + 1), mask.offset)


def mean_over_labels(s, mask):
    """Return (loss of each row (N,), gradient of their sum in s): the mean of −log p over the row's label."""
    same = mask.row_ids[:, None] == mask.column_ids
    same.diagonal(mask.offset).fill_(False)
    count = same.sum(1, keepdim=True, dtype=s.dtype)
    target = same / count.clamp(min=1)
    log_p = s.log_softmax(1)
    loss = (target * log_p).sum(1).neg_()
    return loss, log_p.exp_().mul_(count > 0).sub_(target)


def queue_loss(q, k, queue, temperature, mask):
    """Return (loss, dq, dk); see blockwise.queue_loss."""
    rows, keys = operands(q, queue, temperature)
    q, k = q.to(temperature.dtype), k.to(temperature.dtype)
    factor = reciprocal(temperature)
    s = torch.cat([(q * k).sum(1, keepdim=True).mul_(factor), product(rows, keys.T, factor)], 1)
    log_p = s.log_softmax(1)
    p = log_p.exp()
    others = p[:, 1:].sum(1)
    loss = F.softplus(others.log() - log_p[:, 0], threshold=40).mean()
    dq, *_ = gradients(p[:, 1:], rows, keys, temperature, q.shape[0], True, False, False)
    of_positive = (others * -reciprocal(temperature, q.shape[0]))[:, None]
    return loss, dq.addcmul_(k, of_positive), of_positive * q


def sigmoid_loss(q, k, temperature, bias, mask, needs_q, needs_k, needs_temperature, needs_bias):
    """Return (loss, dq, dk, dτ, db); see blockwise.sigmoid_loss."""
    rows, keys = operands(q, k, temperature)
    n, s = q.shape[0], product(rows, keys.T, reciprocal(temperature)).add_(bias)
    of_positives = positives(s, mask).neg_()                    # the loss of a positive is softplus(−s)
    loss = F.softplus(s, threshold=40).sum().div_(n)
    w = s.sigmoid_()
    of_positives.neg_()                                         # now a view of w
    db = w.sum().div_(n) if needs_bias else s.new_empty(0)
    return loss, *gradients(w, rows, keys, temperature, n, needs_q, needs_k, needs_temperature), db


def similarity_topk(q, k, temperature, n, mask):
    """Return (values (N, n), columns (N, n) int64); see blockwise.similarity_topk."""
    q, k = operands(q, k, temperature)
    s = masked_logits(q, k, temperature, mask)
    values, columns = s.topk(n, 1)
    return values, columns.masked_fill_(values.isneginf(), -1)
