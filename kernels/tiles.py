"""What all kernels share on the device: a tile of logits, what the rule leaves of it, its sums and weights.

              columns j →
           ┌──────┬──────┬──────┐     A tile is Σ over D in blocks of BLOCK_D of
    rows i │ tile │ tile │ tile │     (BLOCK_N, BLOCK_D)·(BLOCK_D, BLOCK_M) on the tensor cores,
           └──────┴──────┴──────┘     so no D is too large; it never leaves the registers.

Logits are kept in units of log 2 (s·log2(e)/τ), because exp2 is what the hardware has. Where every |s| ≤
BOUND, no exp2(s) and no sum of 2²⁰ of them overflows or vanishes in float32: no maximum has to be subtracted,
and one exponential serves rows and columns alike. Unit rows are bounded from τ = 0.0145 up.
"""
import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
BOUND = tl.constexpr(100.0)


@triton.jit
def load(X, row, d, count, width, stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D) of X (count, width) from (row, d) on, zeros outside."""
    if stride is None:
        x = X.load([row, d])
    else:
        rows, features = row + tl.arange(0, BLOCK), d + tl.arange(0, BLOCK_D)
        x = tl.load(X + rows.to(tl.int64)[:, None] * stride + features[None, :],  # 64 bits: N·D may pass 2³¹
                    mask=(rows < count)[:, None] & (features < width)[None, :], other=0.0)
    return x


@triton.jit
def product(Q, K, row, column, N, M, D, q_row, k_row, PRECISION: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_N, BLOCK_M) float32: q_i·k_j of the tile at (row, column)."""
    s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for d in range(0, D, BLOCK_D):
        q = load(Q, row, d, N, D, q_row, BLOCK_N, BLOCK_D)
        k = load(K, column, d, M, D, k_row, BLOCK_M, BLOCK_D)
        s = tl.dot(q, k.T, s, input_precision=PRECISION)
    return s


@triton.jit
def octaves(RULE):
    """log2(e)/τ: from q·k to a logit in units of log 2."""
    if RULE.temperature is None:
        scale = RULE.octaves
    else:
        scale = LOG2E / tl.load(RULE.temperature)
    return scale


@triton.jit
def overlap(row, column, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether the tile that starts at (row, column) has an entry on the diagonal."""
    return (row < column + BLOCK_M) & (column < row + BLOCK_N)


@triton.jit
def touched(row, column, N, M, RULE, EXCLUDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether the rule or the edge may leave out any entry of a tile; index rules leave most tiles whole."""
    some = (row + BLOCK_N > N) | (column + BLOCK_M > M)
    if EXCLUDE == "diagonal":
        some = some | overlap(row + RULE.offset, column, BLOCK_N, BLOCK_M)
    elif EXCLUDE == "pair":
        some = some | overlap(row, column, BLOCK_N, BLOCK_M)
        some = some | overlap(row + N // 2, column, BLOCK_N, BLOCK_M)
        some = some | overlap(row, column + N // 2, BLOCK_N, BLOCK_M)
    if EXCLUDE == "ids" or EXCLUDE == "target":
        some = True
    if RULE.row_groups is not None or RULE.row_features is not None:
        some = True
    return some


@triton.jit
def positive_of(rows, N, RULE, EXCLUDE: tl.constexpr):
    """The column that holds each row's positive, which the rule leaves out; it may lie outside [0, M)."""
    if EXCLUDE == "pair":
        column = tl.where(rows < N // 2, rows + N // 2, rows - N // 2)
    elif EXCLUDE == "target":
        column = tl.load(RULE.row_ids + rows, mask=rows < N, other=-1)
    else:
        column = rows + RULE.offset
    return column


@triton.jit
def kept(rows, columns, N, M, RULE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr):
    """(rows, columns) bool: the columns that the rule leaves to each row. The twin of rules.left_out."""
    keep = (rows < N)[:, None] & (columns < M)[None, :]
    if EXCLUDE == "diagonal":
        keep = keep & (columns[None, :] != rows[:, None] + RULE.offset)
    elif EXCLUDE == "pair":
        keep = keep & (columns[None, :] != rows[:, None])
        keep = keep & (columns[None, :] != positive_of(rows, N, RULE, EXCLUDE)[:, None])
    elif EXCLUDE == "target" and RULE.row_ids is None:  # the other way round: rows are what columns aim at
        column_ids = tl.load(RULE.column_ids + columns, mask=columns < M, other=-1)
        keep = keep & (rows[:, None] != column_ids[None, :])
    elif EXCLUDE == "target":
        keep = keep & (columns[None, :] != positive_of(rows, N, RULE, EXCLUDE)[:, None])
    elif EXCLUDE == "ids":
        row_ids = tl.load(RULE.row_ids + rows, mask=rows < N, other=0)
        column_ids = tl.load(RULE.column_ids + columns, mask=columns < M, other=0)
        keep = keep & (row_ids[:, None] != column_ids[None, :])
    if RULE.row_groups is not None:
        row_groups = tl.load(RULE.row_groups + rows, mask=rows < N, other=0)
        column_groups = tl.load(RULE.column_groups + columns, mask=columns < M, other=0)
        keep = keep & (row_groups[:, None] == column_groups[None, :])
    if RULE.row_features is not None:
        f = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
        for e in range(0, RULE.width, 16):
            f_row = load(RULE.row_features, tl.min(rows, 0), e, N, RULE.width, RULE.row_stride,
                         rows.shape[0], 16)
            f_column = load(RULE.column_features, tl.min(columns, 0), e, M, RULE.width, RULE.column_stride,
                            columns.shape[0], 16)
            f = tl.dot(f_row, f_column.T, f, input_precision=PRECISION)
        keep = keep & (f < RULE.phi)
    return keep


@triton.jit
def log_sum(s, axis: tl.constexpr):
    """log2 Σ exp2(s) along an axis, whatever the size of s; −inf where nothing is left."""
    top = tl.max(s, axis)
    reference = tl.where(top == float("-inf"), 0.0, top)          # −inf − (−inf) would be NaN
    return reference + tl.log2(tl.sum(tl.exp2(s - tl.expand_dims(reference, axis)), axis))


@triton.jit
def shifts(LSE, SLOPE, at, count, SHIFT: tl.constexpr):
    """(lse_i − log2 |slope_i| − SHIFT, sign of slope_i), in units of log 2: one vector instead of two."""
    shift, sign = 0.0, 1.0
    if LSE is not None:
        slope = tl.load(SLOPE + at, mask=at < count, other=0.0)
        shift = tl.load(LSE + at, mask=at < count, other=0.0) * LOG2E - tl.log2(tl.abs(slope)) - SHIFT
        sign = tl.where(slope < 0, -1.0, 1.0)
    return shift, sign


@triton.jit
def weights(s, row_shift, row_sign, column_shift, column_sign, bounded,
            OF_ROWS: tl.constexpr, OF_COLUMNS: tl.constexpr, SIGNED: tl.constexpr):
    """2^SHIFT (slope_i exp2(s_ij − lse_i) + slope_j exp2(s_ij − lse_j)), dloss/ds; either may be missing."""
    if OF_ROWS and OF_COLUMNS and not SIGNED:
        if bounded:
            w = tl.exp2(s) * (tl.exp2(-row_shift)[:, None] + tl.exp2(-column_shift)[None, :])
        else:
            w = tl.exp2(s - row_shift[:, None]) + tl.exp2(s - column_shift[None, :])
    else:
        w = tl.zeros(s.shape, tl.float32)
        if OF_ROWS:
            of_rows = tl.exp2(s - row_shift[:, None])
            w = of_rows * row_sign[:, None] if SIGNED else of_rows
        if OF_COLUMNS:
            of_columns = tl.exp2(s - column_shift[None, :])
            w += of_columns * column_sign[None, :] if SIGNED else of_columns
    return w


@triton.jit
def finish(dx, X, PARTNERS, X_SLOPE, Y_SLOPE, GRAD, unit, RULE, rows, d, N, M, width, x_row, partner_row,
           EXCLUDE: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr):
    """From Σ_j w_ij y_j to the gradient: less the positive's share, times what reached the loss; and if DOT
    each row's share of ⟨x, dx⟩."""
    dx = dx * (1.0 / (1 << SHIFT))
    inside = (rows < N)[:, None] & (d < width)[None, :]
    if PARTNERS is not None:
        at = positive_of(rows, N, RULE, EXCLUDE)
        there = (rows < N) & (at >= 0) & (at < M)
        share = tl.zeros((rows.shape[0],), tl.float32)
        if X_SLOPE is not None:
            share += tl.load(X_SLOPE + rows, mask=there, other=0.0)
        if Y_SLOPE is not None:
            share += tl.load(Y_SLOPE + at, mask=there, other=0.0)
        partner = tl.load(PARTNERS + at.to(tl.int64)[:, None] * partner_row + d[None, :],
                          mask=there[:, None] & (d < width)[None, :], other=0.0)
        dx = dx - share[:, None] * partner.to(tl.float32)
    dx = dx * (tl.load(GRAD) * unit * octaves(RULE) / LOG2E)
    dots = 0.0
    if DOT:
        x = tl.load(X + rows.to(tl.int64)[:, None] * x_row + d[None, :], mask=inside, other=0.0)
        dots = tl.sum(dx * x.to(tl.float32), 1)
    return dx, inside, dots


@triton.jit
def softplus(x):
    """(log(1 + exp(x)), σ(x)), to the last digits for every x."""
    u = tl.exp(-tl.abs(x))
    # log(1 + u) loses u below 2⁻²⁴; the quotient gives it back (Kahan)
    rounded = 1 + u
    log1p = tl.where(rounded == 1, u, tl.log(rounded) * u / tl.where(rounded == 1, 1.0, rounded - 1))
    return tl.maximum(x, 0.0) + log1p, tl.where(x > 0, 1.0, u) / rounded


@triton.jit
def is_bounded(LIMIT):
    """Whether every |s| ≤ BOUND, as far as LIMIT, the largest possible |s|, tells; None tells nothing."""
    if LIMIT is None:
        bounded = False
    else:
        bounded = tl.load(LIMIT) <= BOUND
    return bounded


@triton.jit
def in_range(RANGES, tile, start, stop, BLOCK_M: tl.constexpr):
    """Of the columns [start, stop), those whole tiles that the rows of a tile may keep any of."""
    if RANGES is not None:
        start = tl.maximum(start, tl.load(RANGES + 2 * tile) // BLOCK_M * BLOCK_M)
        stop = tl.minimum(stop, tl.load(RANGES + 2 * tile + 1))
    return start, stop
