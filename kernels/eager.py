"""The operations as in a textbook, with the (N, M) matrix stored.

They are the oracle of the tests and the baseline of the benchmarks, and support higher derivatives.
"""
import torch
import torch.nn.functional as F

from .masks import excluded


def similarity_lse(q, k, temperature, mask):
    """Return logsumexp(1) of q·kᵀ/τ, over the columns that the mask keeps: (N,), float32 for half types."""
    s = (q @ k.T).to(temperature.dtype) / temperature
    out = excluded(mask, torch.arange(len(q), device=q.device), len(q), len(k))
    if out is not None:
        s = s.masked_fill(out, -torch.inf)
    # a row of only -inf has the right logsumexp, -inf, but a NaN gradient: replace its result by a constant
    empty = torch.zeros(len(q), dtype=torch.bool, device=q.device) if out is None else out.all(1)
    return s.masked_fill(empty[:, None], 0).logsumexp(1).masked_fill(empty, -torch.inf)


def similarity_topk(q, k, temperature, n, mask):
    """Return torch.topk of the stored matrix; the column is −1 where a row has fewer than n columns."""
    s = (q @ k.T).to(temperature.dtype) / temperature
    out = excluded(mask, torch.arange(len(q), device=q.device), len(q), len(k))
    values, columns = (s if out is None else s.masked_fill(out, -torch.inf)).topk(n, 1)
    return values, columns.masked_fill(values.isneginf(), -1)


def info_nce(q, k, temperature, offset=0, symmetric=False):
    """Return the cross entropy of row i with target i + offset, positive included in the sum."""
    logits = (q @ k.T).to(temperature.dtype) / temperature
    targets = torch.arange(len(q), device=q.device) + offset
    loss = F.cross_entropy(logits, targets)
    return (loss + F.cross_entropy(logits.T, targets)) / 2 if symmetric else loss


def queue_loss(q, k, queue, temperature):
    """Return the loss of MoCo's algorithm 1: cross entropy of the positive in column 0 against the queue."""
    positive, negatives = (q * k).sum(1, keepdim=True), q @ queue.T
    logits = torch.cat([x.to(temperature.dtype) for x in (positive, negatives)], 1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def sigmoid_loss(q, k, temperature, bias, offset):
    """Return 1/N Σ_i Σ_j −log σ(±logit_ij), with + for the positive, j = i + offset, and − otherwise."""
    logits = (q @ k.T).to(temperature.dtype) / temperature + bias
    sign = -torch.ones_like(logits)
    sign.diagonal(offset).fill_(1)
    return -F.logsigmoid(sign * logits).sum() / len(q)


def nt_xent(z, keys, temperature, offset):
    """Return the loss of SimCLR's algorithm 1: cross entropy over 2N × 2M similarities, own view -inf."""
    first = torch.arange(len(z) // 2, device=z.device) + offset
    views = torch.stack([first, first + len(keys) // 2])
    logits = (z @ keys.T).to(temperature.dtype) / temperature
    return F.cross_entropy(logits.scatter(1, views.view(-1, 1), -torch.inf), views.flip(0).view(-1))


def sup_con_loss(z, keys, temperature, mask):
    """Return the mean over rows of −log softmax, averaged over the row's positives; 0 for a row without any.

    The positives are the other rows of the same label; the softmax is over all other rows.
    """
    s = (z @ keys.T).to(temperature.dtype) / temperature
    s.diagonal(mask.offset).fill_(torch.finfo(temperature.dtype).min)
    positive = mask.row_ids[:, None] == mask.column_ids
    positive.diagonal(mask.offset).fill_(False)
    return -(s.log_softmax(1).where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)).mean()


def linear_cross_entropy(hidden, weight, targets, ignore_index, temperature):
    """Return the mean cross entropy of hidden·weightᵀ over rows whose target is not ignore_index, or 0."""
    logits = (hidden @ weight.T).to(temperature.dtype) / temperature
    total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return total / (targets != ignore_index).sum().clamp(min=1)
