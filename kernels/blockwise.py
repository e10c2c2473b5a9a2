"""The operations over strips of rows in plain PyTorch: any device, float64 too, memory O(N + M) beside the inputs.

Eager stores s = q·kᵀ/τ and its softmax, both (N, M). Here one buffer holds the logits of a few rows at a time:

    lse_i  = max_j s_ij + log Σ_j exp(s_ij − max_j s_ij)                   one strip forward, then forgotten
    dq_i   = (1/τ) Σ_j g_i p_ij k_j,    dk_j = (1/τ) Σ_i g_i p_ij q_i,      p_ij = exp(s_ij − lse_i)

`g_i` is a factor of a row, so it multiplies the narrow sides (q and dq, (N, D)) and never the strip. The backward pass
computes each strip again: 2 + 6 N·M·D operations against eager's 2 + 4. A loss that knows its own g_i, as a mean does
as soon as lse_i is known, takes the gradient while the strip is there: 6 in all, no more than eager, a fraction of
its passes over memory.
"""
import torch
import torch.nn.functional as F

from .rules import left_out

STRIP = 2 ** 24   # logits held at a time: 64 MB in float32, rows enough for a GEMM at full speed (2²² costs a tenth)
ROWS = 32         # but never fewer rows than this, below which a GEMM turns into a pass over the keys per row


def strips(q, k, temperature, rule):
    """Yield (rows, s): a slice of the rows and their logits, what the rule leaves out at -inf, in one reused buffer."""
    size = min(-(-len(q) // 4), max(ROWS, STRIP // len(k)))                     # small problems take four strips
    buffer, columns = q.new_empty(size, len(k)), k.T
    for start in range(0, len(q), size):
        rows = slice(start, min(start + size, len(q)))
        s = torch.mm(q[rows] / temperature, columns, out=buffer[:rows.stop - start])
        if rule.exclude == "diagonal" and all(part is None for part in rule[1:7]):      # the common rule: one entry a row
            s.diagonal(start + rule.offset).fill_(-torch.inf)
        elif (out := left_out(rule, torch.arange(rows.start, rows.stop, device=q.device), len(k))) is not None:
            s.masked_fill_(out, -torch.inf)
        yield rows, s


def exp_(s):
    """s becomes exp(s − shift) in place; returns (shift, Σ_j). The shift of a row without columns is finite: 0 / 0."""
    shift = s.amax(1).clamp_(min=torch.finfo(s.dtype).min)
    return shift, s.sub_(shift[:, None]).exp_().sum(1)


def similarity_lse(q, k, temperature, rule):
    """(N,) in temperature's dtype."""
    q, k = q.to(temperature.dtype), k.to(temperature.dtype)
    lse = q.new_empty(len(q))
    for rows, s in strips(q, k, temperature, rule):
        shift, total = exp_(s)
        lse[rows] = shift + total.log()
    return lse


def similarity_lse_backward(grad, lse, q, k, temperature, rule, needs_q, needs_k):
    """(dq (N, D) or empty, dk (M, D) or empty) in temperature's dtype, for the gradient of each row's lse."""
    q, k = q.to(temperature.dtype), k.to(temperature.dtype)
    dq, dk = (torch.zeros_like(x if needed else x[:0]) for x, needed in ((q, needs_q), (k, needs_k)))
    shift = lse.clamp(min=torch.finfo(lse.dtype).min)
    for rows, s in strips(q, k, temperature, rule):
        p = s.sub_(shift[rows, None]).exp_()
        add_gradients(dq, dk, q, k, p, rows, grad[rows] / temperature, needs_q, needs_k)
    return dq, dk


def similarity_lse_fixed_keys(q, k, temperature, rule):
    """(lse (N,), o (N, D)) with o_i = Σ_j p_ij k_j: where the keys need no gradient, dq_i = g_i o_i / τ."""
    q, k = q.to(temperature.dtype), k.to(temperature.dtype)
    lse, o = q.new_empty(len(q)), torch.empty_like(q)
    for rows, s in strips(q, k, temperature, rule):
        shift, total = exp_(s)
        lse[rows] = shift + total.log()
        torch.mm(s, k, out=o[rows]).div_(total.clamp(min=torch.finfo(s.dtype).tiny)[:, None])
    return lse, o


def softmax_loss(q, k, targets, weights, temperature, rule, needs_q, needs_k):
    """Σ_i w_i softplus(lse_i − q_i·k_target/τ) and, taken on the way, its gradients: (loss, dq or empty, dk or empty)."""
    dtype = temperature.dtype
    q, k, weights = q.to(dtype), k.to(dtype), weights.to(dtype)
    loss = q.new_zeros(())
    dq, dk = (torch.zeros_like(x if needed else x[:0]) for x, needed in ((q, needs_q), (k, needs_k)))
    for rows, s in strips(q, k, temperature, rule):
        positive_k = k[targets[rows]]
        shift, total = exp_(s)
        gap = shift + total.log() - (q[rows] * positive_k).sum(1) / temperature
        loss -= weights[rows] @ F.logsigmoid(-gap)          # softplus(x) = −log σ(−x), exact for every x
        slope = weights[rows] * gap.sigmoid() / temperature                        # of lse_i; minus that of the positive
        add_gradients(dq, dk, q, k, s, rows, slope / total.clamp(min=torch.finfo(dtype).tiny), needs_q, needs_k)
        if needs_q:
            dq[rows] -= slope[:, None] * positive_k
        if needs_k:
            add_rows(dk, targets[rows], -slope[:, None] * q[rows])
    return loss, dq, dk


def similarity_topk(q, k, temperature, n, rule):
    """(values (N, n) in temperature's dtype, columns (N, n) int64, −1 where none is left), largest first."""
    q, k = q.to(temperature.dtype), k.to(temperature.dtype)
    values, columns = q.new_empty(len(q), n), torch.empty(len(q), n, dtype=torch.int64, device=q.device)
    for rows, s in strips(q, k, temperature, rule):
        torch.topk(s, n, 1, out=(values[rows], columns[rows]))
    return values, columns.masked_fill_(values.isneginf(), -1)


def add_rows(total, index, rows):
    """total[index] += rows, repeated indices too, always in the same order: on each device the function that keeps it."""
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)


def add_gradients(dq, dk, q, k, p, rows, g, needs_q, needs_k):
    """dq_i = g_i Σ_j p_ij k_j of these rows, and dk_j += Σ_i g_i p_ij q_i."""
    if needs_q:
        torch.mm(p, k, out=dq[rows]).mul_(g[:, None])
    if needs_k:
        dk.addmm_(p.T, q[rows] * g[:, None])
