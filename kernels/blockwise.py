"""The fused operations in plain PyTorch, on any device, float64 too; O(N + M) memory beside the inputs.

Eager stores the logits s = q·kᵀ/τ and their softmax p, both (N, M). This file computes the logits of a few
rows at a time (a strip), always in the same buffer. With g_i the upstream gradient of lse_i:

    m_i = max_j s_ij,    l_i = Σ_j exp(s_ij − m_i),    lse_i = m_i + log l_i                          forward
    dq_i = (1/τ) Σ_j g_i p_ij k_j,    dk_j = (1/τ) Σ_i g_i p_ij q_i,    p_ij = exp(s_ij − m_i) / l_i  backward

The statistics m_i and l_i are kept as two numbers. A single number lse_i would be rounded at the scale of
|s|, so all p_ij of row i would be wrong by the same factor, and Σ_j p_ij k_j − k_positive would not cancel as
it should when τ is small or rows are equal.

g_i is one factor per row, so it is applied to q and dq, which are only (N, D), and never to a strip. The
backward pass computes each strip again: 2 N·M·D operations forward and 6 backward, where eager needs 2 and 4.
If g_i is known as soon as lse_i is, as in the mean losses, the gradient is computed while the strip is in
memory: 6 in all, as many as eager, with far fewer passes over memory. In the losses, gap_i is lse_i minus the
logit of row i's positive.
"""
import torch
import torch.nn.functional as F

from .masks import Mask, excluded, own_columns, positive_columns

MAX_STRIP_LOGITS = 2 ** 24      # 64 MB in float32; large enough for full GEMM speed (2²² is 10 % slower)
SINGLE_STRIP_LOGITS = 2 ** 20   # a matrix of at most this many logits is one strip
STORED_LOGITS = 2 ** 18         # a matrix of at most this many is computed by stored.py; on the CPU it is
STORED_LOGITS_ON_GPU = 2 ** 22  # faster up to 512 × 512, on a GPU as long as the host limits the time
MIN_STRIP_ROWS = 32             # with fewer rows per strip, reading the keys would limit the GEMM


def is_small(logits, x):
    """Return whether stored.py computes a matrix of this number of logits on the device of x."""
    return logits <= (STORED_LOGITS_ON_GPU if x.is_cuda else STORED_LOGITS)


def is_stored(q, k):
    """Return whether stored.py computes an operation on the rows of q and k (None: q)."""
    return is_small(q.shape[0] * (q if k is None else k).shape[0], q)


def to_accumulation_dtype(q, k, temperature):
    """Cast q and k to the accumulation dtype, which is temperature's dtype; if k is None, return q twice."""
    q = q.to(temperature.dtype)
    return q, q if k is None else k.to(temperature.dtype)


def zeros_if(needed, x):
    """Return zeros like x if its gradient is needed, else a tensor without rows."""
    return torch.zeros_like(x if needed else x[:0])


def logit_strips(q, k, temperature, mask, upper=False, min_columns=1, bias=None):
    """Yield (rows, columns, s) for each strip: its slices and its logits, −inf where masked.

    All s share one buffer, so s is valid only until the next strip.

    upper        True for self-similarity: a strip's columns start at its first row (upper triangle)
    min_columns  least number of columns of a strip; similarity_topk needs at least n
    bias         0-dim tensor to add to each logit, or None
    """
    slices = list(strip_slices(len(q), len(k), mask, upper, min_columns))
    largest = max((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in slices)
    buffer, transposed_k = q.new_empty(largest), k.T
    for rows, columns in slices:
        shape = rows.stop - rows.start, columns.stop - columns.start
        s = buffer[:shape[0] * shape[1]].view(shape)
        if bias is None:
            torch.mm(q[rows] / temperature, transposed_k[:, columns], out=s)
        else:
            s.copy_(bias).addmm_(q[rows] / temperature, transposed_k[:, columns])
        apply_mask(s, mask, rows, columns, len(q), len(k))
        yield rows, columns, s


def strip_slices(n, m, mask, upper, min_columns):
    """Yield the slice of rows and the slice of columns of each strip.

    If row and column groups are both sorted (checked on the CPU only) and the matrix is not small, a strip
    has the rows of several small groups, or some rows of a large one, and only the columns of these groups.
    """
    rows, columns = mask.row_groups, mask.column_groups
    one_strip = n * m <= SINGLE_STRIP_LOGITS
    if one_strip or rows is None or rows.is_cuda or not all((x[1:] >= x[:-1]).all() for x in (rows, columns)):
        # for small matrices a second strip costs more time than it saves; larger ones get at least four
        size = n if one_strip else min(-(-n // 4), max(MIN_STRIP_ROWS, MAX_STRIP_LOGITS // m))
        for start in range(0, n, size):
            yield slice(start, min(start + size, n)), slice(start if upper else 0, m)
        return
    rows, columns = rows.long(), columns.long()
    # the columns of row i's group are first[i] … last[i] − 1
    first = torch.searchsorted(columns, rows).tolist()
    last = torch.searchsorted(columns, rows, right=True).tolist()
    ends = [*((rows[1:] != rows[:-1]).nonzero().flatten() + 1).tolist(), n]
    start = 0
    for end, next_end in zip(ends, [*ends[1:], 2 * n + MIN_STRIP_ROWS]):
        if next_end - start > MIN_STRIP_ROWS:                       # else the next group joins this strip
            right = min(max(last[end - 1], first[start] + min_columns), m)
            of_groups = slice(min(first[start], right - min_columns), right)
            size = max(MIN_STRIP_ROWS, MAX_STRIP_LOGITS // (of_groups.stop - of_groups.start))
            for piece in range(start, end, size):
                yield slice(piece, min(piece + size, end)), of_groups
            start = end


def apply_mask(s, mask, rows, columns, n, m):
    """Set the masked entries of a strip to −inf.

    "diagonal" and "pair" alone write one or two entries per row; other masks need a bool matrix.
    """
    if mask.exclude == "none" and all(part is None for part in mask[1:7]):
        return
    if mask.exclude in ("diagonal", "pair") and all(part is None for part in mask[1:7]):
        if mask.exclude == "pair":
            s.diagonal(rows.start - columns.start).fill_(-torch.inf)
        replace_entries_(s, positive_columns(mask, n, m, s.device)[rows] - columns.start, -torch.inf)
        return
    rows = torch.arange(rows.start, rows.stop, device=s.device)
    s.masked_fill_(excluded(mask, rows, n, m, columns), -torch.inf)


def replace_entries_(s, columns, new):
    """Write new to s[i, columns_i] for each row i, but change nothing in rows where s has no such column.

    returns  (old values (n,), bool (n,): True where s has the column; elsewhere the old value is meaningless)
    """
    clamped = columns.clamp(0, s.shape[1] - 1)
    old, exists = s.gather(1, clamped[:, None]).squeeze(1), columns == clamped
    s.scatter_(1, clamped[:, None], torch.where(exists, new, old)[:, None])
    return old, exists


def exp_minus_max_(s):
    """Replace s by exp(s − row maximum) in place; return (row maximum, row sum of the exponentials)."""
    maximum = finite_max(s, 1)
    return maximum, s.sub_(maximum[:, None]).exp_().sum(1)


def finite_max(s, axis):
    """Return the maximum along axis, clamped to finite numbers, so that s − maximum is never ∞ − ∞ = NaN.

    Without the clamp it would be −∞ for a row without columns, and ∞ for a row with an infinite logit.
    """
    limits = torch.finfo(s.dtype)
    return s.amax(axis).clamp_(limits.min, limits.max)


def merge_stats(stats, maximum, total):
    """Merge the maximum and the sum of exponentials of new columns into the running ones, stats (2, n)."""
    new = torch.maximum(stats[0], maximum)
    stats[1] = stats[1] * (stats[0] - new).exp() + total * (maximum - new).exp()
    stats[0] = new


def safe_divide(x, total):
    """Return x / total, and 0 for a row without columns, whose total is 0."""
    return (x / total).masked_fill_(total == 0, 0)


def similarity_lse(q, k, temperature, mask):
    """Return (lse (N,), stats (2, N)) in temperature's dtype; k None: self-similarity, symmetric mask."""
    wide_q, wide_k = to_accumulation_dtype(q, k, temperature)
    if k is None:
        (stats,), *_ = two_sided_stats(wide_q, wide_q, temperature, mask, self_similarity=True)
        return stats[0] + stats[1].log(), stats
    stats = wide_q.new_empty(2, len(q))
    for rows, _, s in logit_strips(wide_q, wide_k, temperature, mask):
        stats[0, rows], stats[1, rows] = exp_minus_max_(s)
    return stats[0] + stats[1].log(), stats


def similarity_lse_backward(q, k, temperature, mask, grad, stats, needs_q, needs_k, needs_temperature):
    """Return (dq, dk, dτ) for the upstream gradient of lse.

    A gradient that is not needed has no elements, nor has dk if k is None.
    """
    wide_q, wide_k = to_accumulation_dtype(q, k, temperature)
    needs_q, grad, self_similarity = needs_q or needs_temperature, grad / temperature, k is None
    dq, dk = zeros_if(needs_q, wide_q), zeros_if(needs_k and not self_similarity, wide_k)
    if self_similarity:
        strips = logit_strips(wide_q, wide_q, temperature, mask, upper=True)
        skip_max = skipped_max(wide_q, stats)
        add_two_sided_gradients(dq, dk, wide_q, wide_q, strips, [grad], [stats], skip_max, self_similarity)
    else:
        grad = safe_divide(grad, stats[1])
        for rows, columns, s in logit_strips(wide_q, wide_k, temperature, mask):
            p = s.sub_(stats[0, rows, None]).exp_()
            add_gradients(dq, dk[columns], wide_q, wide_k[columns], p, rows, grad[rows], needs_q, needs_k)
    dt = gradient_of_temperature(wide_q, dq, temperature, needs_temperature, self_similarity)
    return dq, dk, dt


def gradient_of_temperature(q, dq, temperature, needed, self_similarity=False):
    """Return dτ = −⟨q, dq⟩/τ, because s = q·k/τ; no elements if it is not needed.

    With self-similarity ⟨q, dq⟩ contains each product twice.
    """
    if not needed:
        return q.new_empty(0)
    return -torch.linalg.vecdot(q, dq).sum() / temperature / (2 if self_similarity else 1)


def similarity_lse_frozen_keys(q, k, temperature, mask):
    """Return (lse (N,), o (N, D)) with o_i = Σ_j p_ij k_j, for keys without gradient: dq_i = g_i o_i / τ."""
    stats, o = stats_and_mean_keys(*to_accumulation_dtype(q, k, temperature), temperature, mask)
    return stats[0] + stats[1].log(), o


def stats_and_mean_keys(q, k, temperature, mask):
    """Return (stats (2, N), o (N, D)) with o_i = Σ_j p_ij k_j; q and k are in the accumulation dtype."""
    stats, o = q.new_empty(2, len(q)), torch.empty_like(q)
    for rows, columns, s in logit_strips(q, k, temperature, mask):
        stats[0, rows], total = exp_minus_max_(s)
        stats[1, rows] = total
        torch.mm(s, k[columns], out=o[rows]).div_(total.clamp(min=torch.finfo(s.dtype).tiny)[:, None])
    return stats, o


def softmax_loss(q, k, temperature, mask, weights, both, needs_q, needs_k, needs_temperature):
    """Return (loss, dq, dk, dτ), with gradients computed along with the loss.

    The loss is Σ_i w_i softplus(gap_i), with weights w (N,), or w = 1/N if weights is None. both: the mean of
    this row-softmax loss (dim=1) and the column-softmax loss (dim=0). A gradient that is not needed has no
    elements. See ops.softmax_loss.
    """
    needs_q = needs_q or needs_temperature
    wide_q, wide_k = to_accumulation_dtype(q, k, temperature)
    wide_k = None if k is None else wide_k
    compute = two_sided_loss if both or k is None else one_sided_loss
    loss, dq, dk = compute(wide_q, wide_k, temperature, mask, weights, needs_q, needs_k)
    return loss, dq, dk, gradient_of_temperature(wide_q, dq, temperature, needs_temperature, k is None)


def one_sided_loss(q, k, temperature, mask, weights, needs_q, needs_k):
    """Return (loss, dq, dk) for the row softmax (one per row i, dim=1).

    One pass over the strips: the statistics of a strip are all that its gradient needs.
    """
    weights = q.new_full((len(q),), 1 / len(q)) if weights is None else weights.to(q.dtype)
    targets = positive_columns(mask, len(q), len(k), q.device)
    own = None                                     # with "pair" a row has two excluded columns
    if mask.exclude == "pair":
        own = own_columns(mask, torch.arange(len(q), device=q.device), len(q), len(k))
    loss = q.new_zeros(())
    dq, dk = zeros_if(needs_q, q), zeros_if(needs_k, k)
    for rows, _, s in logit_strips(q, k, temperature, Mask()):
        positive, _ = replace_entries_(s, targets[rows], -torch.inf)
        if own is not None:
            s.scatter_(1, own[rows, None], -torch.inf)
        maximum, total = exp_minus_max_(s)
        gap = (maximum - positive) + total.log()
        softplus = -F.logsigmoid(-gap).masked_fill_(weights[rows] == 0, 0)          # accurate for every gap
        loss += weights[rows] @ softplus
        dloss_dlse = weights[rows] * gap.sigmoid() / temperature
        add_gradients(dq, dk, q, k, s, rows, safe_divide(dloss_dlse, total), needs_q, needs_k)
        positives = slice(rows.start + mask.offset, rows.stop + mask.offset)
        if mask.exclude != "diagonal":
            positives = targets[rows]
        if needs_q:                                # last, because the positives' coefficient is the largest
            dq[rows].addcmul_(k[positives], dloss_dlse[:, None], value=-1)
        if needs_k and isinstance(positives, slice):
            dk[positives].addcmul_(q[rows], dloss_dlse[:, None], value=-1)
        elif needs_k:
            add_rows(dk, positives, -dloss_dlse[:, None] * q[rows])
    return loss, dq, dk


def two_sided_loss(q, k, temperature, mask, weights, needs_q, needs_k):
    """Return (loss, dq, dk) for the mean of the row-softmax (dim=1) and the column-softmax loss (dim=0).

    Both use the same logits. Row i of q belongs to row i of k. A first pass computes the statistics, a second
    one the gradients: 8 N·M·D operations, where two calls of one_sided_loss need 12. Self-similarity (k None)
    needs 4: the logits are symmetric, so both softmaxes are the same, and a strip starts at its own diagonal.
    """
    self_similarity = k is None
    k, needs_k = (q, False) if self_similarity else (k, needs_k)
    targets = positive_columns(mask, len(q), len(q), q.device)
    positive = torch.empty_like(targets, dtype=q.dtype)

    def remove_positives(rows, s):
        first = rows.start if self_similarity else 0
        logit, exists = replace_entries_(s, targets[rows] - first, -torch.inf)
        positive[rows] = torch.where(exists, logit, positive[rows])
        if self_similarity:                        # a pair's logit occurs in one strip only
            positive[targets[rows]] = torch.where(exists, logit, positive[targets[rows]])
            s.diagonal().fill_(-torch.inf)

    stats, skip_max, strip = two_sided_stats(q, k, temperature, Mask(), self_similarity, remove_positives)
    gaps = [(maximum - positive) + total.log() for maximum, total in stats]
    loss = -sum(F.logsigmoid(-gap).mean() for gap in gaps) / len(gaps)
    dq, dk = zeros_if(needs_q, q), zeros_if(needs_k, k)
    if needs_q or needs_k:
        dloss_dlse = [gap.sigmoid() / (len(q) * len(gaps)) / temperature for gap in gaps]
        strips = logit_strips(q, k, temperature, mask, upper=self_similarity) if strip is None else [strip]
        add_two_sided_gradients(dq, dk, q, k, strips, dloss_dlse, stats, skip_max, self_similarity,
                                is_exp=skip_max and strip is not None)
        # the positives last, because their coefficient is the largest
        of_positives = (dloss_dlse[0] + dloss_dlse[-1][targets])[:, None]
        pairs = [(dq, k, of_positives), (dk, q, of_positives)]
        if self_similarity:
            half = len(q) // 2
            pairs = [(dq[:half], q[half:], of_positives[:half]), (dq[half:], q[:half], of_positives[half:])]
        for dx, y, coefficient in pairs:
            if len(dx):
                dx.addcmul_(y, coefficient, value=-1)
    return loss, dq, dk


def two_sided_stats(q, k, temperature, mask, self_similarity, remove_positives=None):
    """Return (stats, skip_max, strip): the statistics of the row and the column softmax.

    remove_positives  function of (rows, s) that is called on each strip first, or None
    stats             [(2, N) maximum and sum of each row, of each column]; self-similarity: of rows only
    skip_max          True: |s| < 69, so exp(s) neither overflows nor underflows, and 0 is used in place of
                      every maximum
    strip             None if there are several strips. Else (slice of rows, None for all columns, s), so that
                      the gradient need not compute s again; s holds exp(s) if skip_max
    """
    lowest = torch.full_like(q[:, 0], torch.finfo(q.dtype).min)
    of_rows = torch.stack([lowest, torch.zeros_like(lowest)])
    of_columns = of_rows if self_similarity else of_rows.clone()
    # on the CPU reading this number is free; if it is small, one exponential serves rows and columns
    skip_max = not q.is_cuda and bool(q.norm(dim=1).max() * k.norm(dim=1).max() / temperature.abs() < 69)
    for rows, _, s in logit_strips(q, k, temperature, mask, upper=self_similarity):
        # self-similarity: the first columns are the strip's own rows, and are already counted as rows
        first, inner = (rows.start, rows.stop - rows.start) if self_similarity else (0, 0)
        if remove_positives:
            remove_positives(rows, s)
        if skip_max:
            s.exp_()
        for part, x, axis in (of_rows[:, rows], s, 1), (of_columns[:, first + inner:], s[:, inner:], 0):
            maximum = x.new_zeros(()) if skip_max else finite_max(x, axis)
            e = x if skip_max else (x - maximum.unsqueeze(axis)).exp_()
            merge_stats(part, maximum, e.sum(axis))
    strip = (rows, None, s) if q.shape[0] * k.shape[0] <= SINGLE_STRIP_LOGITS else None
    return [of_rows] if self_similarity else [of_rows, of_columns], skip_max, strip


def skipped_max(q, stats):
    """Return whether two_sided_stats used 0 in place of every maximum."""
    return not q.is_cuda and not stats[0].any()


def add_two_sided_gradients(dq, dk, q, k, strips, dloss_dlse, stats, skip_max, self_similarity, is_exp=False):
    """Add W k to dq and Wᵀ q to dk, strip by strip, with W_ij = g_i p_ij + g'_j p'_ij.

    p is the row softmax (dim=1), p' the column softmax (dim=0).
    strips      (rows, columns, s) with the logits s, or exp(s) if is_exp
    dloss_dlse  [g / τ of rows, g' / τ of columns]; self-similarity: [g / τ], and dq is the whole gradient
    stats       the statistics of p and p', as two_sided_stats returns them
    """
    factors = [safe_divide(g, total) for g, (_, total) in zip(dloss_dlse, stats)]
    for rows, _, s in strips:
        first = rows.start if self_similarity else 0
        if skip_max:
            w = s if is_exp else s.exp_()
            w.mul_(factors[0][rows, None] + factors[-1][first:])
        else:
            w = (s - stats[0][0, rows, None]).exp_().mul_(factors[0][rows, None])
            inner = len(w) if self_similarity else 0
            others = slice(first + inner, None)
            w[:, inner:] += s[:, inner:].sub_(stats[-1][0, others]).exp_().mul_(factors[-1][others])
            if self_similarity:              # this square has s_ij and s_ji, each with its own rounding
                w[:, :inner] += w[:, :inner].T.clone()
        if len(dq):
            dq[rows].addmm_(w, k[first:])
        if self_similarity:
            dq[rows.stop:].addmm_(w[:, rows.stop - rows.start:].T, q[rows])
        elif len(dk):
            dk.addmm_(w.T, q[rows])


def queue_loss(q, k, queue, temperature, mask):
    """Return (loss, dq, dk): the mean of softplus(lse_i − q_i·k_i/τ), lse over the queue.

    The queue gets no gradient.
    """
    q, k, queue = (x.to(temperature.dtype) for x in (q, k, queue))
    (maximum, total), o = stats_and_mean_keys(q, queue, temperature, mask)
    # q / temperature is rounded as in the products with the queue
    gap = (maximum - (q / temperature * k).sum(1)) + total.log()
    dloss_dlse = (gap.sigmoid() / len(q) / temperature)[:, None]
    return -F.logsigmoid(-gap).mean(), dloss_dlse * (o - k), -dloss_dlse * q


def sigmoid_loss(q, k, temperature, bias, mask, needs_q, needs_k, needs_temperature, needs_bias):
    """Return (loss, dq, dk, dτ, db); a gradient that is not needed has no elements.

    The loss is 1/N Σ_ij softplus(−y_ij (q_i·k_j/τ + b)): y_ij = 1 for the positive pair, which is the one
    that the mask excludes, else −1. The gradient of a pair needs no other logit: each strip is computed once.
    """
    wide_q, wide_k = to_accumulation_dtype(q, k, temperature)
    needs_q, n = needs_q or needs_temperature, len(q)
    dq, dk = zeros_if(needs_q, wide_q), zeros_if(needs_k, wide_k)
    sums = wide_q.new_zeros(2, n)                                # Σ_j softplus(s_ij), Σ_j σ(s_ij)
    targets = positive_columns(mask, n, len(k), q.device)
    positive, scale = wide_q.new_empty(n), wide_q.new_full((n,), 1 / n) / temperature
    for rows, _, s in logit_strips(wide_q, wide_k, temperature, Mask(), bias=bias):
        positive[rows], _ = replace_entries_(s, targets[rows], -torch.inf)
        sums[0, rows] = F.softplus(s, threshold=40).sum(1)       # above 40, softplus(s) is s in float64 too
        if needs_bias or needs_q or needs_k:
            s.sigmoid_()
        if needs_bias:
            sums[1, rows] = s.sum(1)
        if needs_q or needs_k:
            add_gradients(dq, dk, wide_q, wide_k, s, rows, scale[rows], needs_q, needs_k)
    of_positives = (-positive).sigmoid()
    loss = (sums[0] - F.logsigmoid(positive)).sum() / n
    # the positives last, because their coefficient is the largest
    columns = slice(mask.offset, mask.offset + n)
    for dx, y in (dq, wide_k[columns]), (dk[columns], wide_q):
        if len(dx):
            dx.addcmul_(y, (of_positives * scale)[:, None], value=-1)
    db = (sums[1] - of_positives).sum() / n if needs_bias else wide_q.new_empty(0)
    dt = gradient_of_temperature(wide_q, dq, temperature, needs_temperature)
    return loss, dq, dk, dt, db


def similarity_topk(q, k, temperature, n, mask):
    """Return (values (N, n), columns (N, n) int64), largest first; the column is −1 if none is left."""
    q, k = to_accumulation_dtype(q, k, temperature)
    values, found = q.new_empty(len(q), n), torch.empty(len(q), n, dtype=torch.int64, device=q.device)
    for rows, columns, s in logit_strips(q, k, temperature, mask, min_columns=n):
        torch.topk(s, n, 1, out=(values[rows], found[rows]))
        found[rows] += columns.start
    return values, found.masked_fill_(values.isneginf(), -1)


def add_rows(total, index, rows):
    """Add rows to total[index], also for repeated indices.

    The result is deterministic: index_put_ on GPUs and index_add_ on the CPU add in a fixed order.
    """
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)


def add_gradients(dq, dk, q, k, p, rows, g, needs_q, needs_k):
    """Write dq_i = g_i Σ_j p_ij k_j and add Σ_i g_i p_ij q_i to dk_j, for the slice `rows` of a strip p."""
    if needs_q:
        torch.mm(p, k, out=dq[rows]).mul_(g[:, None])
    if needs_k:
        dk.addmm_(p.T, q[rows] * g[:, None])
