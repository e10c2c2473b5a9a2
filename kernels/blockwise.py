"""The operations over strips of rows in plain PyTorch: any device, float64 too; O(N + M) beside the inputs.

Eager stores s = q·kᵀ/τ and its softmax, both (N, M). Here one buffer holds the logits of a few rows:

    lse_i  = top_i + log total_i,       total_i = Σ_j exp(s_ij − top_i)     one strip forward, then forgotten
    dq_i   = (1/τ) Σ_j g_i p_ij k_j,    dk_j = (1/τ) Σ_i g_i p_ij q_i,      p_ij = exp(s_ij − top_i) / total_i

top_i is max_j s_ij. It and total_i stay two numbers: as one, lse_i has |s|'s rounding, all p_ij of a row are
wrong by the same factor, and Σ_j p_ij k_j − k_positive no longer cancels where small τ or equal rows need it.

`g_i` is a factor of a row, so it multiplies the narrow sides (q and dq, (N, D)) and never the strip. The
backward pass computes each strip again: 2 + 6 N·M·D operations against eager's 2 + 4. A loss that knows its
own g_i, as a mean does as soon as lse_i is known, takes the gradient while the strip is there: 6 in all, no
more than eager, a fraction of its passes over memory.
"""
import torch
import torch.nn.functional as F

from .rules import Rule, left_out, positive_of

STRIP_LOGITS = 2 ** 24    # held at a time: 64 MB in float32, for GEMMs at full speed (2²² costs a tenth)
SMALL = 2 ** 20           # logits up to which there is one strip
ROWS = 32                 # but never fewer rows: below, a GEMM turns into a pass over the keys per row


def cast(q, k, temperature):
    """Rows and columns in the dtype that sums have; one tensor for both where k is None."""
    rows = q.to(temperature.dtype)
    return rows, rows if k is None else k.to(temperature.dtype)


def strips(q, k, temperature, rule, upper=False, least=1, start=None):
    """Yield (rows, columns, s): slices and their logits, in one buffer; −inf where the rule leaves out.

    upper    of one set: only the columns from the strip's first row on
    least    columns that a strip has at the least
    start    scalar tensor that is added to each logit; None: none
    """
    cuts = list(spans(len(q), len(k), rule, upper, least))
    largest = max((rows.stop - rows.start) * (at.stop - at.start) for rows, at in cuts)
    buffer, columns = q.new_empty(largest), k.T
    for rows, at in cuts:
        shape = rows.stop - rows.start, at.stop - at.start
        s = buffer[:shape[0] * shape[1]].view(shape)
        if start is None:
            torch.mm(q[rows] / temperature, columns[:, at], out=s)
        else:
            s.copy_(start).addmm_(q[rows] / temperature, columns[:, at])
        leave_out(s, rule, rows, at, len(q), len(k))
        yield rows, at, s


def spans(n, m, rule, upper, least):
    """Yield the rows and columns of each strip.

    Where both have sorted groups, strips end with a group and meet its columns alone.
    """
    rows, columns = rule.row_groups, rule.column_groups
    one_strip = n * m <= SMALL
    if one_strip or rows is None or rows.is_cuda or not all((x[1:] >= x[:-1]).all() for x in (rows, columns)):
        # a few hundred rows are one strip, as every further one costs more than it saves; thousands are four
        size = n if one_strip else min(-(-n // 4), max(ROWS, STRIP_LOGITS // m))
        for start in range(0, n, size):
            yield slice(start, min(start + size, n)), slice(start if upper else 0, m)
        return
    rows, columns = rows.long(), columns.long()
    first, last = (torch.searchsorted(columns, rows, right=right).tolist() for right in (False, True))
    ends = [*((rows[1:] != rows[:-1]).nonzero().flatten() + 1).tolist(), n]
    start = 0
    for end, following in zip(ends, [*ends[1:], 2 * n + ROWS]):
        if following - start > ROWS:                            # groups of a few rows share a strip
            right = min(max(last[end - 1], first[start] + least), m)
            at = slice(min(first[start], right - least), right)
            size = max(ROWS, STRIP_LOGITS // (at.stop - at.start))
            for piece in range(start, end, size):
                yield slice(piece, min(piece + size, end)), at
            start = end


def leave_out(s, rule, rows, columns, n, m):
    """Put −inf where the rule leaves a column out; rules on index alone touch one or two entries a row."""
    if rule.exclude == "none" and all(part is None for part in rule[1:7]):
        return
    if rule.exclude in ("diagonal", "pair") and all(part is None for part in rule[1:7]):
        if rule.exclude == "pair":
            s.diagonal(rows.start - columns.start).fill_(-torch.inf)
        put_(s, positive_of(rule, n, s.device)[rows] - columns.start, -torch.inf)
        return
    rows = torch.arange(rows.start, rows.stop, device=s.device)
    s.masked_fill_(left_out(rule, rows, m, columns), -torch.inf)


def put_(s, at, new):
    """s[i, at_i] becomes new_i wherever at_i is a column of s; returns what was there, and whether it was."""
    inside = at.clamp(0, s.shape[1] - 1)
    was, there = s.gather(1, inside[:, None]).squeeze(1), at == inside
    s.scatter_(1, inside[:, None], torch.where(there, new, was)[:, None])
    return was, there


def exp_(s):
    """s becomes exp(s − top) in place; returns (top, Σ_j)."""
    top = top_of(s, 1)
    return top, s.sub_(top[:, None]).exp_().sum(1)


def top_of(s, axis):
    """The largest, made finite: ∞ − ∞ would be NaN, without columns and for those beside an infinite one."""
    limits = torch.finfo(s.dtype)
    return s.amax(axis).clamp_(limits.min, limits.max)


def take_in(sums, top, total):
    """sums (2, n), tops and totals so far, with those of other columns of the same rows."""
    new = torch.maximum(sums[0], top)
    sums[1] = sums[1] * (sums[0] - new).exp() + total * (top - new).exp()
    sums[0] = new


def share(x, total):
    """x / total, and 0 for a row without columns."""
    return (x / total).masked_fill_(total == 0, 0)


def similarity_lse(q, k, temperature, rule):
    """(lse (N,), (2, N) tops and totals) in temperature's dtype; k None: one set under a symmetric rule."""
    rows, columns = cast(q, k, temperature)
    if k is None:
        (sums,), *_ = sums_of_both(rows, rows, temperature, rule, one_set=True)
        return sums[0] + sums[1].log(), sums
    sums = rows.new_empty(2, len(q))
    for at, _, s in strips(rows, columns, temperature, rule):
        sums[0, at], sums[1, at] = exp_(s)
    return sums[0] + sums[1].log(), sums


def similarity_lse_backward(q, k, temperature, rule, grad, sums, needs_q, needs_k, needs_temperature):
    """(dq (N, D), dk (M, D), dτ), or empty, for the gradient of each row's lse; k None: all of it is dq."""
    rows, columns = cast(q, k, temperature)
    needs_q, grad, one_set = needs_q or needs_temperature, grad / temperature, k is None
    needed = (rows, needs_q), (columns, needs_k and not one_set)
    dq, dk = (torch.zeros_like(x if wanted else x[:0]) for x, wanted in needed)
    if one_set:
        again = strips(rows, rows, temperature, rule, upper=True)
        add_two_sided(dq, dk, rows, rows, again, [grad], [sums], is_bounded(rows, sums), one_set)
    else:
        grad = share(grad, sums[1])
        for at, mine, s in strips(rows, columns, temperature, rule):
            p = s.sub_(sums[0, at, None]).exp_()
            add_gradients(dq, dk[mine], rows, columns[mine], p, at, grad[at], needs_q, needs_k)
    return dq.to(q.dtype), dk.to(q.dtype), gradient_of_temperature(rows, dq, temperature, needs_temperature,
                                                                   one_set)


def gradient_of_temperature(q, dq, temperature, needed, one_set=False):
    """dτ or empty: s = q·k/τ, so −⟨q, dq⟩/τ; with one set every product is there twice."""
    if not needed:
        return q.new_empty(0)
    return -torch.linalg.vecdot(q, dq).sum() / temperature / (2 if one_set else 1)


def similarity_lse_fixed_keys(q, k, temperature, rule):
    """(lse (N,), o (N, D)) with o_i = Σ_j p_ij k_j: where the keys need no gradient, dq_i = g_i o_i / τ."""
    sums, o = sums_and_mean(*cast(q, k, temperature), temperature, rule)
    return sums[0] + sums[1].log(), o


def sums_and_mean(q, k, temperature, rule):
    """((2, N) tops and totals, o (N, D)) of rows that have been cast."""
    sums, o = q.new_empty(2, len(q)), torch.empty_like(q)
    for rows, columns, s in strips(q, k, temperature, rule):
        sums[0, rows], total = exp_(s)
        sums[1, rows] = total
        torch.mm(s, k[columns], out=o[rows]).div_(total.clamp(min=torch.finfo(s.dtype).tiny)[:, None])
    return sums, o


def softmax_loss(q, k, temperature, rule, weights, both, needs_q, needs_k, needs_temperature):
    """(loss, dq or empty, dk or empty, dτ or empty), gradients taken on the way; see operations.softmax_loss.

    Σ_i w_i softplus(lse_i − positive_i), w (N,) or the mean; both: the mean of this and of the columns' own.
    """
    needs_q = needs_q or needs_temperature
    rows, columns = cast(q, k, temperature)
    take = two_sided if both or k is None else one_sided
    loss, dq, dk = take(rows, None if k is None else columns, temperature, rule, weights, needs_q, needs_k)
    return loss, dq, dk, gradient_of_temperature(rows, dq, temperature, needs_temperature, k is None)


def one_sided(q, k, temperature, rule, weights, needs_q, needs_k):
    """A softmax over the columns of each row. One pass: a strip's sums are enough for its gradient."""
    weights = q.new_full((len(q),), 1 / len(q)) if weights is None else weights.to(q.dtype)
    targets = positive_of(rule, len(q), q.device)
    loss = q.new_zeros(())
    dq, dk = (torch.zeros_like(x if needed else x[:0]) for x, needed in ((q, needs_q), (k, needs_k)))
    for rows, _, s in strips(q, k, temperature, Rule()):
        positive, _ = put_(s, targets[rows], -torch.inf)
        top, total = exp_(s)
        gap = (top - positive) + total.log()
        softplus = -F.logsigmoid(-gap).masked_fill_(weights[rows] == 0, 0)              # exact for every gap
        loss += weights[rows] @ softplus
        slope = weights[rows] * gap.sigmoid() / temperature
        add_gradients(dq, dk, q, k, s, rows, share(slope, total), needs_q, needs_k)
        at = slice(rows.start + rule.offset, rows.stop + rule.offset)
        if rule.exclude == "target":
            at = targets[rows]
        if needs_q:  # the positives last: their coefficient is the largest
            dq[rows].addcmul_(k[at], slope[:, None], value=-1)
        if needs_k and isinstance(at, slice):
            dk[at].addcmul_(q[rows], slope[:, None], value=-1)
        elif needs_k:
            add_rows(dk, at, -slope[:, None] * q[rows])
    return loss, dq, dk


def two_sided(q, k, temperature, rule, weights, needs_q, needs_k):
    """A softmax over the columns of each row and one over the rows of each column, from the same logits; a
    row of the one belongs to a row of the other. Two passes, sums and then gradients: 8 N·M·D operations
    where two one_sided take 12. One set (k None) is symmetric, its two sides are the same, and a strip starts
    at its own diagonal: 4."""
    one_set = k is None
    k, needs_k = (q, False) if one_set else (k, needs_k)
    targets = positive_of(rule, len(q), q.device)
    positive = torch.empty_like(targets, dtype=q.dtype)

    def take_out(rows, s):
        logit, there = put_(s, targets[rows] - (rows.start if one_set else 0), -torch.inf)
        for at in (rows, targets[rows]) if one_set else (rows,):
            positive[at] = torch.where(there, logit, positive[at])
        if one_set:
            s.diagonal().fill_(-torch.inf)

    sides, bounded, last = sums_of_both(q, k, temperature, Rule(), one_set, take_out)
    gaps = [(top - positive) + total.log() for top, total in sides]
    loss = -sum(F.logsigmoid(-gap).mean() for gap in gaps) / len(gaps)
    dq, dk = (torch.zeros_like(x if needed else x[:0]) for x, needed in ((q, needs_q), (k, needs_k)))
    if needs_q or needs_k:
        slopes = [gap.sigmoid() / (len(q) * len(gaps)) / temperature for gap in gaps]
        again = strips(q, k, temperature, rule, upper=one_set) if last is None else [last]
        add_two_sided(dq, dk, q, k, again, slopes, sides, bounded, one_set, bounded and last is not None)
        # the positives last: their coefficient is the largest
        both = (slopes[0] + slopes[-1][targets])[:, None]
        pairs = [(dq, k, both), (dk, q, both)]
        if one_set:
            half = len(q) // 2
            pairs = [(dq[:half], q[half:], both[:half]), (dq[half:], q[:half], both[half:])]
        for dx, y, coefficient in pairs:
            if len(dx):
                dx.addcmul_(y, coefficient, value=-1)
    return loss, dq, dk


def sums_of_both(q, k, temperature, rule, one_set, take_out=None):
    """([(2, N) tops and totals of the rows, of the columns of two sets], whether all tops are 0, the only
    strip (rows, None, s) or None) of strips that take_out(rows, s) has seen; s is exp(s) if tops are 0."""
    lowest = torch.full_like(q[:, 0], torch.finfo(q.dtype).min)
    of_rows = torch.stack([lowest, torch.zeros_like(lowest)])
    of_columns = of_rows if one_set else of_rows.clone()
    # the CPU looks at a number for free: where no exp(s) can overflow or vanish, one serves rows and columns
    bounded = not q.is_cuda and bool(q.norm(dim=1).max() * k.norm(dim=1).max() / temperature.abs() < 69)
    for rows, _, s in strips(q, k, temperature, rule, upper=one_set):
        # of one set the inner columns are rows of this strip
        first, inner = (rows.start, rows.stop - rows.start) if one_set else (0, 0)
        if take_out:
            take_out(rows, s)
        if bounded:
            s.exp_()
        for sums, x, axis in (of_rows[:, rows], s, 1), (of_columns[:, first + inner:], s[:, inner:], 0):
            top = x.new_zeros(()) if bounded else top_of(x, axis)
            e = x if bounded else (x - top.unsqueeze(axis)).exp_()
            take_in(sums, top, e.sum(axis))
    only = (rows, None, s) if len(q) * len(k) <= SMALL else None
    return [of_rows] if one_set else [of_rows, of_columns], bounded, only


def is_bounded(q, sums):
    """Whether sums_of_both has found it so."""
    return not q.is_cuda and not sums[0].any()


def add_two_sided(dq, dk, q, k, again, slopes, sides, bounded, one_set, is_exp=False):
    """dq, dk take in the weights slope_i p_ij + slope_j p_ji of each strip of logits s, or exp(s) if is_exp;
    slopes hold 1/τ. One set: all of it is dq."""
    shares = [share(slope, total) for slope, (_, total) in zip(slopes, sides)]
    for rows, _, s in again:
        first = rows.start if one_set else 0
        if bounded:
            w = s if is_exp else s.exp_()
            w.mul_(shares[0][rows, None] + shares[-1][first:])
        else:
            w = (s - sides[0][0, rows, None]).exp_().mul_(shares[0][rows, None])
            inner = len(w) if one_set else 0
            others = slice(first + inner, None)
            w[:, inner:] += s[:, inner:].sub_(sides[-1][0, others]).exp_().mul_(shares[-1][others])
            if one_set:                                       # s_ij and s_ji, rounded apart, are both there
                w[:, :inner] += w[:, :inner].T.clone()
        if len(dq):
            dq[rows].addmm_(w, k[first:])
        if one_set:
            dq[rows.stop:].addmm_(w[:, rows.stop - rows.start:].T, q[rows])
        elif len(dk):
            dk.addmm_(w.T, q[rows])


def queue_loss(q, k, queue, temperature, rule):
    """(mean of softplus(lse_i − q_i·k_i/τ), dq, dk), lse over the queue, which gets no gradient."""
    q, k, queue = (x.to(temperature.dtype) for x in (q, k, queue))
    (top, total), o = sums_and_mean(q, queue, temperature, rule)
    gap = (top - (q / temperature * k).sum(1)) + total.log()     # q/τ is rounded as in the queue's products
    slope = (gap.sigmoid() / len(q) / temperature)[:, None]
    return -F.logsigmoid(-gap).mean(), slope * (o - k), -slope * q


def sigmoid_loss(q, k, temperature, bias, rule, needs_q, needs_k, needs_temperature, needs_bias):
    """(loss, dq, dk, dτ, db), or empty: 1/N Σ softplus(−y (q·k/τ + b)), y +1 where the rule leaves out.

    No weight needs another's logit: each strip is made once.
    """
    rows, columns = cast(q, k, temperature)
    needs_q, n = needs_q or needs_temperature, len(q)
    dq, dk = (torch.zeros_like(x if wanted else x[:0]) for x, wanted in ((rows, needs_q), (columns, needs_k)))
    sums, targets = rows.new_zeros(2, n), positive_of(rule, n, q.device)      # Σ softplus(s), Σ σ(s) of each
    positive, units = rows.new_empty(n), rows.new_full((n,), 1 / n) / temperature
    for at, _, s in strips(rows, columns, temperature, Rule(), start=bias):
        positive[at], _ = put_(s, targets[at], -torch.inf)
        sums[0, at] = F.softplus(s, threshold=40).sum(1)                      # in float64 too, e⁻⁴⁰ is none
        if needs_bias or needs_q or needs_k:
            s.sigmoid_()
        if needs_bias:
            sums[1, at] = s.sum(1)
        if needs_q or needs_k:
            add_gradients(dq, dk, rows, columns, s, at, units[at], needs_q, needs_k)
    slope = (-positive).sigmoid()
    loss = (sums[0] - F.logsigmoid(positive)).sum() / n
    # the positives last: their coefficient is the largest
    at = slice(rule.offset, rule.offset + n)
    for dx, y in (dq, columns[at]), (dk[at], rows):
        if len(dx):
            dx.addcmul_(y, (slope * units)[:, None], value=-1)
    db = (sums[1] - slope).sum() / n if needs_bias else rows.new_empty(0)
    dt = gradient_of_temperature(rows, dq, temperature, needs_temperature)
    return loss, dq, dk, dt, db


def similarity_topk(q, k, temperature, n, rule):
    """(values (N, n) in temperature's dtype, columns (N, n) int64, −1 where none is left), largest first."""
    q, k = cast(q, k, temperature)
    values, columns = q.new_empty(len(q), n), torch.empty(len(q), n, dtype=torch.int64, device=q.device)
    for rows, at, s in strips(q, k, temperature, rule, least=n):
        torch.topk(s, n, 1, out=(values[rows], columns[rows]))
        columns[rows] += at.start
    return values, columns.masked_fill_(values.isneginf(), -1)


def add_rows(total, index, rows):
    """total[index] += rows, repeated indices too, in a fixed order: each device has a function for that."""
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
