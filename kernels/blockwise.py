"""The fused operations in plain PyTorch, on any device and also in float64, without a large (N, M) matrix.

eager.py stores the logits s = q·kᵀ/τ and their softmax p, both (N, M). This file computes one strip at a
time: the logits of a few rows. With the upstream gradient g_i = dloss/dlse_i of the log-sum-exp lse_i:

    max_i = max_j s_ij,    sum_i = Σ_j exp(s_ij − max_i),    lse_i = max_i + log sum_i                forward
    dq_i = (1/τ) Σ_j W_ij k_j,    dk_j = (1/τ) Σ_i W_ij q_i,    W_ij = g_i exp(s_ij − max_i) / sum_i  backward

In a softmax loss, lse_i sums over negatives only; s_i+ is the positive's logit, and w_i is row i's weight:

    loss = Σ_i w_i softplus(gap_i),    gap_i = lse_i − s_i+,    g_i = w_i σ(gap_i),    dloss/ds_i+ = −g_i

If each column j has a softmax too, as in clip_loss, W_ij gets a second term: g'_j exp(s_ij − max'_j) /
sum'_j, with the values of column j. If q is compared with itself (triangle=True), s_ij = s_ji, so a strip
omits the columns before its first row. The other columns start with a square: the rows of the strip, compared
with themselves. A logit s_ij to the right of the square counts for row i and, as s_ji, also for row j.

Gradients use max_i and sum_i, which are both stored, not lse_i. The rounding error of lse_i grows with |s|:
with lse_i, all p_ij of row i would be wrong by one common factor. Then Σ_j p_ij k_j would not cancel the key
of the positive in the gradient, as it must if τ is small or rows are equal.

eager.py needs 3 matrix products of 2·N·M·D operations each. This file needs up to 4, because it computes
strips again for the gradients. triangle=True halves the operations. With triangle=False, a loss with only a
row softmax needs 3 products (queue_loss 2): a strip has all logits of its rows, so it is computed only once.
"""
import torch
import torch.nn.functional as F

from .masks import excluded, own_columns, positive_columns

STRIP_LOGITS = 2 ** 23     # a strip of 32 MiB (float32) makes products fast, and malloc reuses its memory
ONE_STRIP = 2 ** 20        # a matrix of at most this many logits is one strip
MIN_STRIP_ROWS = 64        # fewer rows would make products slow, because each strip reads all keys


def rows_of(call):
    """Return q and the keys: rounded to the dtype of products, then cast to the dtype of sums."""
    rounded = call.rounded
    q = rounded.q.to(call.temperature.dtype)
    return q, q if call.k is None else rounded.k.to(q.dtype)


def zeros_if(needed, x):
    """Return zeros for the gradient of x, in the shape of x; without rows if this gradient is not needed."""
    return x.new_zeros((x if needed else x[:0]).shape)  # zeros_like would keep strides that cuBLAS may refuse


# ── strips of logits ────────────────────────────────────────────────────────────────────────────────────────


def strip_slices(n, m, triangle):
    """Yield (slice of rows, slice of columns) for each strip."""
    height = n if n * m <= ONE_STRIP else max(MIN_STRIP_ROWS, min(STRIP_LOGITS // m, n // 8))
    for start in range(0, n, height):
        yield slice(start, min(start + height, n)), slice(start if triangle else 0, m)


def logit_strips(q, k, temperature, mask, triangle=False, positive=None):
    """Yield (slice of rows, slice of columns, logits s with −inf where masked) for each strip.

    triangle  True: k is q, and the columns of a strip start at the strip's first row
    positive  None, or a tensor (N,) that gets the logits of the positives, which the mask excludes. With
              triangle=True only its first N/2 entries are valid
    """
    n, m = len(q), len(k)
    by_index = mask.exclude == "target" or mask.exclude != "none" and not mask.has_vectors
    targets = positive_columns(mask, n, m, q.device) if by_index else None
    own = own_columns(mask, torch.arange(n, device=q.device), n, m) if mask.exclude == "pair" else None
    for rows, columns in strip_slices(n, m, triangle):
        s = (q[rows] / temperature) @ k[columns].T
        if by_index:                                         # the mask excludes 1 or 2 entries per row
            found = exclude_entries(s, targets[rows] - columns.start)
            if positive is not None:
                positive[rows] = found
            if own is not None:
                exclude_entries(s, own[rows] - columns.start)
        else:
            out = excluded(mask, torch.arange(rows.start, rows.stop, device=s.device), n, m, columns)
            if out is not None:
                s.masked_fill_(out, -torch.inf)
        yield rows, columns, s


def exclude_entries(s, columns):
    """Set s[i, columns[i]] to −inf in each row i, if s has that column; return the old entries (n,)."""
    inside = columns.clamp(0, s.shape[1] - 1)[:, None]
    old = s.gather(1, inside)
    s.scatter_(1, inside, old.masked_fill(inside == columns[:, None], -torch.inf))
    return old.squeeze(1)


# ── softmax statistics and gradients ────────────────────────────────────────────────────────────────────────


def new_stats(x):
    """Return the initial statistics (2, n), maximum and sum of exponentials, for the n rows of x."""
    stats = x.new_zeros(2, len(x))
    stats[0].fill_(torch.finfo(x.dtype).min)
    return stats


def add_stats(stats, s, axis):
    """Update the statistics of softmaxes along axis by the logits s; replace s by exp(s − maximum of s)."""
    limits = torch.finfo(s.dtype)
    # If all columns are excluded or a logit is infinite, the maximum is infinite; clamp avoids ∞ − ∞ = NaN.
    maximum = s.amax(axis).clamp_(limits.min, limits.max)
    merge_stats(stats, maximum, s.sub_(maximum.unsqueeze(axis)).exp_().sum(axis))


def merge_stats(stats, maximum, total, exp=torch.exp):
    """Merge new logits into stats: their maximum, and total, the sum of their exp(logit − maximum)."""
    new = torch.maximum(stats[0], maximum)
    stats[1] = stats[1] * exp(stats[0] - new) + total * exp(maximum - new)
    stats[0] = new


def two_sided_stats(q, k, temperature, mask, triangle, positive=None):
    """Return (statistics of the row softmaxes, statistics of the column softmaxes, strips).

    With triangle=True both statistics are the same tensor. If the norms of q and k prove that all |logits|
    are below 69, exp(s) can neither overflow nor underflow. On the CPU, 0 then replaces all maxima, so rows
    and columns share exp(s). If one strip then has all rows, strips is [(rows, columns, exp(s))], else [].
    """
    of_rows = new_stats(q)
    of_columns = of_rows if triangle else new_stats(k)
    strips = []
    small = not q.is_cuda and bool(q.norm(dim=1).max() * k.norm(dim=1).max() / temperature.abs() < 69)
    for rows, columns, s in logit_strips(q, k, temperature, mask, triangle, positive):
        right = len(s) if triangle else 0
        others = slice(columns.start + right, columns.stop)
        if small:
            zero, e = s.new_zeros(()), s.exp_()
            merge_stats(of_columns[:, others], zero, e[:, right:].sum(0))
            merge_stats(of_rows[:, rows], zero, e.sum(1))
            strips += [(rows, columns, e)] if len(e) == len(q) else []
        else:
            add_stats(of_columns[:, others], s[:, right:].clone(), 0)
            add_stats(of_rows[:, rows], s, 1)
    return of_rows, of_columns, strips


def divide(g, total):
    """Return g / total, and 0 where total is 0 (a softmax without logits)."""
    return (g / total).where(total != 0, 0)


def add_two_sided_gradients(dq, dk, q, k, strips, of_rows, of_columns, g, g_of_columns, triangle,
                            is_exp=False):
    """Add W k to dq and Wᵀ q to dk by strips (W: see the top of the file); skip a gradient without rows.

    of_rows, of_columns    statistics (2, n); with triangle=True both are the same tensor, and dk is dq
    g, g_of_columns        (n,) upstream gradients of the log-sum-exps of rows and of columns, divided by τ
    is_exp                 True: strips already hold exp(s), and all maxima are 0
    """
    factors, column_factors = divide(g, of_rows[1]), divide(g_of_columns, of_columns[1])
    same_maximum = not q.is_cuda and not of_rows[0].any() and not of_columns[0].any()
    for rows, columns, s in strips if len(dq) or len(dk) else ():
        right = len(s) if triangle else 0
        others = slice(columns.start + right, columns.stop)
        if same_maximum:
            w = (s if is_exp else s.exp_()).mul_(factors[rows, None] + column_factors[columns])
        else:
            w = (s - of_rows[0, rows, None]).exp_().mul_(factors[rows, None])
            if triangle:  # among the strip's own rows, column j uses s_ji, because s_ij may round differently
                w[:, :right] += w[:, :right].T.clone()
            w[:, right:] += s[:, right:].sub_(of_columns[0, others]).exp_().mul_(column_factors[others])
        if len(dq):
            dq[rows].addmm_(w, k[columns])
        if len(dk):
            dk[others].addmm_(w[:, right:].T, q[rows])


def add_products(dq, dk, w, q, k, rows, columns):
    """Add w k to dq[rows] and wᵀ q to dk[columns], for a strip's weights w; skip a gradient without rows."""
    if len(dq):
        dq[rows].addmm_(w, k[columns])
    if len(dk):
        dk[columns].addmm_(w.T, q[rows])


def subtract_positives(dq, dk, q, k, targets, g):
    """Subtract the terms of the positives: g_i k_t from dq_i, and g_i q_i from dk_t, with t = targets[i].

    These terms are large, so they come last: until then, the sums of the small terms lose fewer digits.
    """
    if len(dq):
        dq.addcmul_(k[targets], g[:, None], value=-1)
    if len(dk):
        add_rows(dk, targets, q * -g[:, None])


def add_rows(total, index, rows):
    """Add rows[i] to total[index[i]] for all i; an index may occur several times.

    The result is deterministic: index_put_ on GPUs and index_add_ on the CPU add in a fixed order.
    """
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)


def gradient_of_temperature(call, q, dq, needs):
    """Return dτ = −⟨q, dq⟩/τ, which follows from s = q·k/τ; None if dτ is not needed.

    With self-similarity ⟨q, dq⟩ counts each product twice, so the result is halved.
    """
    if not needs[2]:
        return None
    return -torch.linalg.vecdot(q, dq).sum() / call.temperature / (2 if call.k is None else 1)


# ── the log-sum-exp ─────────────────────────────────────────────────────────────────────────────────────────


def similarity_lse(call):
    """Return (log-sum-exp (N,), statistics (2, N)) in the dtype of the temperature."""
    q, k = rows_of(call)
    if call.k is None:
        stats, *_ = two_sided_stats(q, k, call.temperature, call.mask, True)
        return stats[0] + stats[1].log(), stats
    stats = new_stats(q)
    for rows, _, s in logit_strips(q, k, call.temperature, call.mask):
        add_stats(stats[:, rows], s, 1)
    return stats[0] + stats[1].log(), stats


def similarity_lse_backward(call, grad, stats, needs, sums=None):
    """Return (dq, dk, dτ), where grad (N,) is the upstream gradient of the log-sum-exp.

    dq and dk have no rows, and dτ is None, if they are not needed. For k=None, dq is the whole gradient.
    sums  (dq, dk) of earlier blocks of keys, to which this function adds; None: zeros
    """
    triangle, (q, k) = call.k is None, rows_of(call)
    dq, dk = sums or (zeros_if(needs[0] or needs[2], q), zeros_if(needs[1] and not triangle, k))
    strips, g = logit_strips(q, k, call.temperature, call.mask, triangle), grad / call.temperature
    if triangle:
        add_two_sided_gradients(dq, dq, q, k, strips, stats, stats, g, g, True)
    else:
        factors = divide(g, stats[1])
        for rows, columns, s in strips if len(dq) or len(dk) else ():
            w = s.sub_(stats[0, rows, None]).exp_().mul_(factors[rows, None])
            add_products(dq, dk, w, q, k, rows, columns)
    return dq, dk, gradient_of_temperature(call, q, dq, needs)


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────


def loss_and_slopes(positive, stats, weights):
    """Return (Σ_i w_i softplus(gap_i), g_i = w_i σ(gap_i)); positive (n,) holds the positives' logits."""
    gap = (stats[0] - positive) + stats[1].log()
    return -(weights @ F.logsigmoid(-gap)), weights * gap.sigmoid()     # −logsigmoid(−x) = softplus(x)


def fuses_backward(call, both, needs):
    """Return True: this module's softmax_loss always computes its gradients together with the loss."""
    return True


def softmax_loss(call, both, weights, needs):
    """Return (loss, dq, dk, dτ), with gradients computed along with the loss.

    The loss is Σ_i w_i softplus(gap_i), with weights w (N,), or w_i = 1/N for weights=None. With both=True,
    it is the mean of two such losses: one has a softmax per row (dim=1), the other a softmax per column
    (dim=0). The positive of query i is then key i. Unneeded gradients are as in similarity_lse_backward.
    """
    triangle, (q, k), temperature, mask = call.k is None, rows_of(call), call.temperature, call.mask
    n = len(q)
    dq, dk = zeros_if(needs[0] or needs[2], q), zeros_if(needs[1] and not triangle, k)
    weights = q.new_full((n,), (0.5 if both else 1) / n) if weights is None else weights.to(q.dtype)
    targets, positive = positive_columns(mask, n, len(k), q.device), q.new_empty(n)
    if triangle or both:
        of_rows, of_columns, strips = two_sided_stats(q, k, temperature, mask, triangle, positive)
        if triangle:      # only positive[:n/2] is valid; both views of a sample have the same positive logit
            positive[n // 2:] = positive[:n // 2]
        loss, g = loss_and_slopes(positive, of_rows, weights)
        g = g_of_columns = g / temperature
        if both:
            loss_of_columns, g_of_columns = loss_and_slopes(positive, of_columns, weights)
            loss, g_of_columns = loss + loss_of_columns, g_of_columns / temperature
        is_exp, strips = bool(strips), strips or logit_strips(q, k, temperature, mask, triangle)
        add_two_sided_gradients(dq, dq if triangle else dk, q, k, strips, of_rows, of_columns, g,
                                g_of_columns, triangle, is_exp)
        g = g + g_of_columns[targets]
    else:
        loss, g = q.new_zeros(()), q.new_empty(n)
        for rows, columns, s in logit_strips(q, k, temperature, mask, False, positive):
            stats = new_stats(s)
            add_stats(stats, s, 1)           # these statistics are complete, because a strip has all columns
            part, g[rows] = loss_and_slopes(positive[rows], stats, weights[rows])
            loss += part
            g[rows] /= temperature
            add_products(dq, dk, s.mul_(divide(g[rows], stats[1])[:, None]), q, k, rows, columns)
    subtract_positives(dq, dk, q, k, targets, g)
    return loss, dq, dk, gradient_of_temperature(call, q, dq, needs)


def queue_loss(call, queue, needs):
    """Return (loss, dq, dk, dτ), where the loss is the mean of softplus(lse_i − q_i·k_i/τ).

    lse_i is the log-sum-exp of the logits of query i with the queue. The queue gets no gradient.
    """
    (q, k), temperature = rows_of(call), call.temperature
    queue = queue.to(q.dtype)
    stats, o = new_stats(q), torch.zeros_like(q)               # o_i = Σ_j p_ij queue_j
    for rows, columns, s in logit_strips(q, queue, temperature, call.mask):
        add_stats(stats[:, rows], s, 1)
        add_products(o, o[:0], s, q, queue, rows, columns)
    o.mul_(divide(1, stats[1])[:, None])
    positive = (q / temperature * k).sum(1)            # q / τ is rounded first, as in the logits of the queue
    loss, g = loss_and_slopes(positive, stats, q.new_full((len(q),), 1 / len(q)))
    if not any(needs):
        return loss, None, None, None
    g = (g / temperature)[:, None]
    dq = g * (o - k)
    return loss, dq, -g * q, gradient_of_temperature(call, q, dq, needs)


def sigmoid_loss(call, bias, needs, grad=1, sums=None):
    """Return (loss, dq, dk, dτ, db). Unneeded gradients: as in similarity_lse_backward; db is then None.

    The loss is 1/N Σ_ij softplus(−y_ij (q_i·k_j/τ + b)). y_ij is 1 for positive pairs, which the mask
    excludes, and −1 for other pairs; if the mask excludes nothing, there are no positives. The gradient of a
    pair needs only the pair's logit, so each strip is computed once. sums: as in similarity_lse_backward.
    """
    (q, k), temperature = rows_of(call), call.temperature
    n = len(q)
    dq, dk = sums or (zeros_if(needs[0] or needs[2], q), zeros_if(needs[1], k))
    # In positive, ∞ means no positive (its terms are 0). totals holds Σ_j softplus(s_ij) and Σ_j σ(s_ij).
    positive, totals = q.new_full((n,), torch.inf), q.new_empty(2, n)
    for rows, columns, s in logit_strips(q, k, temperature, call.mask, positive=positive):
        s += bias
        totals[0, rows] = F.softplus(s, threshold=40).sum(1)   # above 40, softplus(s) is s even in float64
        totals[1, rows] = s.sigmoid_().sum(1)
        add_products(dq, dk, s.div_(n * temperature / grad), q, k, rows, columns)
    positive += bias
    of_positive = positive.neg().sigmoid()
    loss = (totals[0] - F.logsigmoid(positive)).sum() / n
    if call.mask.exclude != "none":
        targets = positive_columns(call.mask, n, len(k), q.device)
        subtract_positives(dq, dk, q, k, targets, of_positive * grad / n / temperature)
    db = (totals[1] - of_positive).sum() * grad / n if needs[3] else None
    return loss, dq, dk, gradient_of_temperature(call, q, dq, needs), db


# ── the nearest columns ─────────────────────────────────────────────────────────────────────────────────────


def similarity_topk(call, n):
    """Return (values, int64 columns), (N, n) each, largest first; column −1 for a value of −inf."""
    q, k = rows_of(call)
    values, found = q.new_full((len(q), n), -torch.inf), q.new_full((len(q), n), -1, dtype=torch.int64)
    for rows, _, s in logit_strips(q, k, call.temperature, call.mask):
        values[rows], found[rows] = s.topk(n, 1)
    return values, found.masked_fill_(values.isneginf(), -1)
