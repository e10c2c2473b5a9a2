"""What all kernels share on the device: a tile of logits, what the rule leaves of it, its sums and weights.

              columns j →
           ┌──────┬──────┬──────┐     A tile is Σ over D in blocks of BLOCK_D of
    rows i │ tile │ tile │ tile │     (BLOCK_N, BLOCK_D)·(BLOCK_D, BLOCK_M) on the tensor cores,
           └──────┴──────┴──────┘     so no D is too large; it never leaves the registers.

Logits are kept in units of log 2 (s·log2(e)/τ), because exp2 is what the hardware has; reference.py says how
one exponential serves rows and columns.
"""
import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
WEIGHT_SCALE = tl.constexpr(2.0 ** 14)       # weights are held times this (gradient.py)
GROUP = tl.constexpr(16)             # tiles of each side whose rows the second-level cache holds
# one compiled kernel serves all batches: no code for integers that change with them, nor for where vectors of
# one number a row begin
kernel = triton.jit(
    do_not_specialize=("N", "M", "apart", "first_row", "first_column", "first_x", "first_y", "height",
                       "width", "walk", "split", "splits", "tiles", "tiles_x", "tiles_y", "count"),
    do_not_specialize_on_alignment=("SUMS", "LSE", "SLOPE", "TOTAL", "POSITIVE", "WEIGHTS", "SCALES",
                                    "X_VECTOR", "Y_VECTOR"))


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
def product(Q, K, row, column, N, M, SHAPE, PRECISION: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_N, BLOCK_M) float32: q_i·k_j of the tile at (row, column)."""
    s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for d in range(0, SHAPE.D, BLOCK_D):
        q = load(Q, row, d, N, SHAPE.D, SHAPE.q_row, BLOCK_N, BLOCK_D)
        k = load(K, column, d, M, SHAPE.D, SHAPE.k_row, BLOCK_M, BLOCK_D)
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
def offset_of(RULE):
    """The rule's offset; launch.py says why it travels as another number."""
    return RULE.offset >> 2


@triton.jit
def overlap(row, column, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether the tile that starts at (row, column) has an entry on the diagonal."""
    return (row < column + BLOCK_M) & (column < row + BLOCK_N)


@triton.jit
def touched(row, column, N, M, RULE, EXCLUDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether the rule or the edge may leave out any entry of a tile; index rules leave most tiles whole."""
    some = (row + BLOCK_N > N) | (column + BLOCK_M > M)
    if EXCLUDE == "diagonal":
        some = some | overlap(row + offset_of(RULE), column, BLOCK_N, BLOCK_M)
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
        column = rows + offset_of(RULE)
    return column


@triton.jit
def kept(rows, column, origin, N, M, RULE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
         BLOCK_M: tl.constexpr):
    """(rows, BLOCK_M) bool: the columns from column on that the rule leaves to each row. The twin of
    rules.left_out. Indices are compared from origin on: in a loop over rows it is the column, or vectors that
    are the same in every turn would wait in registers."""
    at = column - origin + tl.arange(0, BLOCK_M)
    keep = (rows < N)[:, None] & (at < M - origin)[None, :]
    if EXCLUDE == "diagonal":
        keep = keep & (at[None, :] != (rows + offset_of(RULE) - origin)[:, None])
    elif EXCLUDE == "pair":
        keep = keep & (at[None, :] != (rows - origin)[:, None])
        keep = keep & (at[None, :] != (positive_of(rows, N, RULE, EXCLUDE) - origin)[:, None])
    elif EXCLUDE == "target" and RULE.row_ids is None:  # the other way round: rows are what columns aim at
        column_ids = tl.load(RULE.column_ids + origin + at, mask=at < M - origin, other=-1)
        keep = keep & (rows[:, None] != column_ids[None, :])
    elif EXCLUDE == "target":
        keep = keep & (at[None, :] != (positive_of(rows, N, RULE, EXCLUDE) - origin)[:, None])
    elif EXCLUDE == "ids":
        row_ids = tl.load(RULE.row_ids + rows, mask=rows < N, other=0)
        column_ids = tl.load(RULE.column_ids + origin + at, mask=at < M - origin, other=0)
        keep = keep & (row_ids[:, None] != column_ids[None, :])
    if RULE.row_groups is not None:
        row_groups = tl.load(RULE.row_groups + rows, mask=rows < N, other=0)
        column_groups = tl.load(RULE.column_groups + origin + at, mask=at < M - origin, other=0)
        keep = keep & (row_groups[:, None] == column_groups[None, :])
    if RULE.row_features is not None:
        f = tl.zeros((rows.shape[0], BLOCK_M), tl.float32)
        for e in range(0, RULE.width, 16):
            f_row = load(RULE.row_features, tl.min(rows, 0), e, N, RULE.width, RULE.row_stride,
                         rows.shape[0], 16)
            f_column = load(RULE.column_features, column, e, M, RULE.width, RULE.column_stride, BLOCK_M, 16)
            f = tl.dot(f_row, f_column.T, f, input_precision=PRECISION)
        keep = keep & (f < RULE.phi)
    return keep


@triton.jit
def power(s, scale, top):
    """exp2(s·scale − top) of products s, rounded once: forward and backward must agree to the last bit, as an
    error in s·scale alone, |logit| · 2⁻²⁴, would be every weight's of a row."""
    return tl.exp2(tl.fma(s, scale, -top))


@triton.jit
def finite(top):
    """A top to subtract: ∞ − ∞ would be NaN for columns that are finite, and −∞ is a row without columns."""
    return tl.where(top == float("-inf"), 0.0, tl.where(top == float("inf"), 3e38, top))


@triton.jit
def sums_of(s, scale, axis: tl.constexpr):
    """(top, Σ exp2(s·scale − top)) along an axis, whatever the size of s; (−inf, 0) where nothing is left."""
    top = tl.max(s, axis) * scale                                  # scale > 0
    return top, tl.sum(power(s, scale, tl.expand_dims(finite(top), axis)), axis)


@triton.jit
def added(top, total, other_top, other_total):
    """Two of these as one."""
    new = tl.maximum(top, other_top)
    return new, (total * tl.exp2(top - finite(new)) + other_total * tl.exp2(other_top - finite(new)))


@triton.jit
def is_folded(REFERENCE):
    """Whether exp2(s) needs no maximum: tops are 0, and in one_pass row factors stay out of the strip."""
    folded = False
    if REFERENCE is not None:
        folded = tl.load(REFERENCE) == 0.0
    return folded


@triton.jit
def gap_of(top, total, positive, scale):
    """lse − positive, of a product, in nats: two large numbers that may be close."""
    return (tl.fma(-positive, scale, top) + tl.log2(total)) / LOG2E


@triton.jit
def own_factors(SUMS, SLOPE, rows, mask, apart):
    """(a, b) of rows, with WEIGHT_SCALE slope exp2(s − lse) = a exp2(s − b); totals are `apart` from tops.
    lse as one number would have the rounding of |s|."""
    top = tl.load(SUMS + rows, mask=mask, other=0.0)
    total = tl.load(SUMS + apart + rows, mask=mask, other=0.0)
    slope = tl.load(SLOPE + rows, mask=mask, other=0.0)
    return tl.where(total == 0.0, 0.0, slope * WEIGHT_SCALE / total), top


@triton.jit
def factors(SIDE, at, count):
    """(a, b) of rows of a side: their part of a weight is a exp2(s − b)."""
    a, b = 1.0, 0.0
    if SIDE.slope is not None:
        if SIDE.factors is not None:                               # made once, for whole tiles
            a, b = tl.load(SIDE.factors + at), tl.load(SIDE.factors + SIDE.padded + at)
        else:
            a, b = own_factors(SIDE.sums, SIDE.slope, at, at < count, count)
    return a, b


@triton.jit
def weights(s, scale, row_a, row_b, columns, X_SIDE, Y_SIDE, REFERENCE, M):
    """WEIGHT_SCALE (slope_i exp2(s_ij − lse_i) + slope_j exp2(s_ij − lse_j)), dloss/ds, of products s; either
    may be missing."""
    if REFERENCE is None:
        w = tl.zeros(s.shape, tl.float32)
        if Y_SIDE.slope is not None:
            column_a, column_b = factors(Y_SIDE, columns, M)
            w = power(s, scale, column_b[None, :]) * column_a[None, :]
        if X_SIDE.slope is not None:
            w += power(s, scale, row_b[:, None]) * row_a[:, None]
    else:
        reference = tl.load(REFERENCE)
        if reference < float("inf"):                               # one exponential for both
            column_a = tl.load(Y_SIDE.factors + columns)
            w = power(s, scale, reference) * (row_a[:, None] + column_a[None, :])
        else:
            column_a, column_b = factors(Y_SIDE, columns, M)
            w = power(s, scale, column_b[None, :]) * column_a[None, :]
            w += power(s, scale, row_b[:, None]) * row_a[:, None]
    return w


@triton.jit
def finish(dx, GIVEN, X_SIDE, Y_SIDE, RULE, rows, d, N, M, EXCLUDE: tl.constexpr, DOT: tl.constexpr):
    """From Σ_j w_ij y_j to the gradient: less the positive's share, times what reached the loss; and if DOT
    each row's share of ⟨x, dx⟩."""
    dx = dx * (1.0 / WEIGHT_SCALE)
    inside = (rows < N)[:, None] & (d < GIVEN.features)[None, :]
    if GIVEN.partners is not None:
        at = positive_of(rows, N, RULE, EXCLUDE)
        there = (rows < N) & (at >= 0) & (at < M)
        share = tl.zeros((rows.shape[0],), tl.float32)
        if X_SIDE.slope is not None:
            share += tl.load(X_SIDE.slope + rows, mask=there, other=0.0)
        if Y_SIDE.slope is not None:
            share += tl.load(Y_SIDE.slope + at, mask=there, other=0.0)
        partner = tl.load(GIVEN.partners + at.to(tl.int64)[:, None] * GIVEN.partner_row + d[None, :],
                          mask=there[:, None] & (d < GIVEN.features)[None, :], other=0.0)
        dx = dx - share[:, None] * partner.to(tl.float32)
    dx = dx * (tl.load(GIVEN.grad) * GIVEN.unit * octaves(RULE) / LOG2E)
    dots = 0.0
    if DOT:
        x = tl.load(GIVEN.x + rows.to(tl.int64)[:, None] * GIVEN.x_row + d[None, :], mask=inside, other=0.0)
        dots = tl.sum(dx * x.to(tl.float32), 1)
    return dx, inside, dots


@triton.jit
def log1p(u):
    """log(1 + u) of u ≥ 0: where 1 + u loses u, below 2⁻²⁴, the quotient gives it back (Kahan)."""
    rounded = 1 + u
    return tl.where(rounded == 1, u, tl.log(rounded) * u / tl.where(rounded == 1, 1.0, rounded - 1))


@triton.jit
def softplus(x):
    """(log(1 + exp(x)), σ(x)), to the last digits for every x."""
    u = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + log1p(u), tl.where(x > 0, 1.0, u) / (1 + u)


@triton.jit
def sum_of_softplus(x):
    """(Σ log(1 + exp(x)), σ(x)) of a tile: a logarithm for every sixteen columns."""
    u = tl.exp(-tl.abs(x))
    sigma, v = tl.where(x > 0, 1.0, u) / (1 + u), u
    for _ in tl.static_range(4):       # (1 + v)(1 + v') − 1 = v + v' + v v' < 2¹⁶, where no small v is lost
        v = tl.permute(tl.reshape(v, (v.shape[0], 2, v.shape[1] // 2)), (0, 2, 1))
        v, other = tl.split(v)
        v = tl.fma(v, other, v + other)
    return tl.sum(tl.sum(tl.maximum(x, 0.0), 1) + tl.sum(log1p(v), 1), 0), sigma


@triton.jit
def grouped(program, tiles_x, tiles_y):
    """(x, y) of a program: GROUP by GROUP tiles run at a time, so that their rows stay in the cache."""
    group = program // (GROUP * tiles_y)
    first, inner = group * GROUP, program % (GROUP * tiles_y)
    high = tl.minimum(tiles_x - first, GROUP)
    return first + inner % high, inner // high


@triton.jit
def rounded(x):
    """float32 as TF32 has it, to the nearest even: the tensor cores cut the last 13 bits off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def stored(x, X, PRECISION: tl.constexpr):
    """x as the factor of a product that X will be."""
    if PRECISION == "tf32" and X.dtype.element_ty == tl.float32:
        x = rounded(x)
    return x.to(X.dtype.element_ty)


@triton.jit
def in_range(RANGES, tile, start, stop, BLOCK_M: tl.constexpr):
    """Of the columns [start, stop), those whole tiles that the rows of a tile may keep any of."""
    if RANGES is not None:
        start = tl.maximum(start, tl.load(RANGES + 2 * tile) // BLOCK_M * BLOCK_M)
        stop = tl.minimum(stop, tl.load(RANGES + 2 * tile + 1))
    return start, stop


@kernel
def copy_kernel(COPY, X, count, features, copied, x_row, x_column, ROUND: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """COPY (count, copied) = X (count, features), zeros behind; float32 rounded to TF32 if ROUND."""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    x = tl.load(X + rows * x_row + d * x_column, mask=(rows < count) & (d < features), other=0.0)
    if ROUND:
        x = rounded(x)
    tl.store(COPY + rows * copied + d, x, mask=(rows < count) & (d < copied))
