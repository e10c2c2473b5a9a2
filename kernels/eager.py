"""The operations as a textbook writes them, the (N, M) matrix stored: oracle, baseline, every derivative."""
import torch
import torch.nn.functional as F

from .rules import left_out


def similarity_lse(q, k, temperature, rule):
    """logsumexp over the columns of q·kᵀ/τ that the rule keeps; (N,), float32 for half types."""
    s = (q @ k.T).to(temperature.dtype) / temperature
    out = left_out(rule, torch.arange(len(q), device=q.device), len(k))
    if out is not None:
        s = s.masked_fill(out, -torch.inf)
    # logsumexp of nothing but -inf is -inf, but its gradient would be NaN: such rows answer with a constant
    empty = torch.zeros(len(q), dtype=torch.bool, device=q.device) if out is None else out.all(1)
    return s.masked_fill(empty[:, None], 0).logsumexp(1).masked_fill(empty, -torch.inf)


def similarity_topk(q, k, temperature, n, rule):
    """torch.topk of the stored matrix; column −1 where none is left."""
    s = (q @ k.T).to(temperature.dtype) / temperature
    out = left_out(rule, torch.arange(len(q), device=q.device), len(k))
    values, columns = (s if out is None else s.masked_fill(out, -torch.inf)).topk(n, 1)
    return values, columns.masked_fill(values.isneginf(), -1)


def info_nce(q, k, temperature, offset=0, symmetric=False):
    """Cross entropy of row i against column i + offset; the positive stays in the sum, as papers write it."""
    logits = (q @ k.T).to(temperature.dtype) / temperature
    targets = torch.arange(len(q), device=q.device) + offset
    loss = F.cross_entropy(logits, targets)
    return (loss + F.cross_entropy(logits.T, targets)) / 2 if symmetric else loss


def queue_loss(q, k, queue, temperature):
    """MoCo's algorithm 1: cross entropy of the positive, first, against the queue."""
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1).to(temperature.dtype) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def sigmoid_loss(q, k, temperature, bias, offset):
    """Minus the sum over all pairs of log σ(±logit), + where the column is i + offset, a row."""
    logits = (q @ k.T).to(temperature.dtype) / temperature + bias
    sign = -torch.ones_like(logits)
    sign.diagonal(offset).fill_(1)
    return -F.logsigmoid(sign * logits).sum() / len(q)


def nt_xent(z1, z2, temperature):
    """SimCLR's algorithm 1: cross entropy over the 2N × 2N similarities, the diagonal at -inf."""
    z = torch.cat([z1, z2])
    logits = ((z @ z.T).to(temperature.dtype) / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z1)))


def sup_con_loss(z, labels, temperature):
    """Mean over rows of the mean −log softmax, over all others, of those of the same label; of none: 0."""
    s = ((z @ z.T).to(temperature.dtype) / temperature).fill_diagonal_(torch.finfo(temperature.dtype).min)
    positive = (labels[:, None] == labels).fill_diagonal_(False)
    return -(s.log_softmax(1).where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)).mean()


def linear_cross_entropy(hidden, weight, targets, ignore_index, temperature):
    """Cross entropy of hidden·weightᵀ over the rows whose target is not ignore_index; 0 if there is none."""
    logits = (hidden @ weight.T).to(temperature.dtype) / temperature
    total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return total / (targets != ignore_index).sum().clamp(min=1)
