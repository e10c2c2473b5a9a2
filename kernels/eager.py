"""The operations as in a textbook, with the (N, M) matrix of logits stored.

Tests and benchmarks compare the fused operations with this file. Only this file supports higher derivatives.
impl="auto" uses this file only for small matrices. `call` holds the checked arguments (call.py).
"""
import torch
import torch.nn.functional as F

from .masks import excluded


def logits_of(call):
    """Return the logits q·kᵀ/τ, (N, M), in float32 (float64 for float64 rows)."""
    q, k = call.q.to(call.product_dtype), call.keys.to(call.product_dtype)
    if call.product_dtype == call.temperature.dtype:
        return (q / call.temperature) @ k.T
    return (q @ k.T).to(call.temperature.dtype) / call.temperature


def masked_logits(call):
    """Return (logits with −inf where excluded, None or a bool (N,) that is True for rows of only −inf)."""
    s, mask = logits_of(call), call.mask
    if mask.exclude == "diagonal" and not mask.has_vectors and s.shape[1] > 1:
        s.diagonal(mask.offset).fill_(-torch.inf)
        return s, None
    out = excluded(mask, torch.arange(len(s), device=s.device), *s.shape)
    return (s, None) if out is None else (s.masked_fill(out, -torch.inf), out.all(1))


def similarity_lse(call):
    """Return (N,): the log-sum-exp of each row's logits, without the columns that the mask excludes."""
    s, empty = masked_logits(call)
    if empty is None:
        return s.logsumexp(1)
    # logsumexp would give NaN gradients for a row of only -inf; such a row gets the constant -inf instead
    return s.masked_fill(empty[:, None], 0).logsumexp(1).masked_fill(empty, -torch.inf)


def similarity_topk(call, n):
    """Return (values, columns) of the n largest logits of each row; column −1 for a value of −inf."""
    values, columns = masked_logits(call)[0].topk(n, 1)
    return values, columns.masked_fill(values.isneginf(), -1)


def info_nce(call, symmetric=False):
    """Return the mean cross entropy of all rows (symmetric: of all rows and columns). Row i has the target
    i + offset."""
    logits = logits_of(call)
    targets = torch.arange(len(logits), device=logits.device) + call.mask.offset
    loss = F.cross_entropy(logits, targets)
    return (loss + F.cross_entropy(logits.T, targets)) / 2 if symmetric else loss


def queue_loss(call, queue):
    """Return MoCo's cross entropy (algorithm 1): column 0 is the positive, other columns are the queue."""
    q, k, queue = (x.to(call.product_dtype) for x in (call.q, call.k, queue))
    positive, negatives = (q * k).sum(1, keepdim=True), q @ queue.T
    logits = torch.cat([x.to(call.temperature.dtype) for x in (positive, negatives)], 1) / call.temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def sigmoid_loss(call, bias):
    """Return 1/N Σ_i Σ_j −log σ(±logit_ij), with + for positives (j = i + offset), else −."""
    logits = logits_of(call) + bias
    sign = -torch.ones_like(logits)
    sign.diagonal(call.mask.offset).fill_(1)
    return -F.logsigmoid(sign * logits).sum() / len(logits)


def nt_xent(call):
    """Return the mean cross entropy in SimCLR's algorithm 1; a view's logit with itself is -inf."""
    logits = logits_of(call)
    n, m = logits.shape
    first = torch.arange(n // 2, device=logits.device) + call.mask.offset
    views = torch.stack([first, first + m // 2])
    return F.cross_entropy(logits.scatter_(1, views.view(-1, 1), -torch.inf), views.flip(0).view(-1))


def sup_con_loss(call, row_labels, column_labels):
    """Return the mean loss of all rows: a row's loss is the mean −log softmax of its positives (0 if none).

    The positives of a row are the other rows with its label; the softmax is over all other rows.
    """
    s, offset = logits_of(call), call.mask.offset
    s.diagonal(offset).fill_(torch.finfo(s.dtype).min)
    positive = row_labels[:, None] == column_labels
    positive.diagonal(offset).fill_(False)
    return -(s.log_softmax(1).where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)).mean()


def linear_cross_entropy(call, targets):
    """Return the mean cross entropy of hidden·weightᵀ/τ over rows with target ≠ −100; 0 if there are none."""
    total = F.cross_entropy(logits_of(call), targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)
