"""Device functions that several kernels call: dot products, mask and softmax weights of a tile of logits.

              columns j →
           ┌──────┬──────┬──────┐     For each BLOCK_D features, the tensor cores add a product
    rows i │ tile │ tile │ tile │     (BLOCK_N, BLOCK_D)·(BLOCK_D, BLOCK_M) to the dot products of a tile,
           └──────┴──────┴──────┘     so D can have any size. Dot products stay in registers.
"""
import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
WEIGHT_SCALE = tl.constexpr(2.0 ** 14)   # stored softmax weights are multiplied by this; gradient.py says why
# Triton compiles variants of a kernel for special integers (1, multiples of 16) and for aligned pointers. The
# arguments below get no variants, since most change with the batch: one kernel serves all batch sizes.
kernel = triton.jit(
    do_not_specialize=("N", "M", "D", "l_offset", "first_row", "first_column", "first_x", "first_y", "height",
                       "width", "split_columns", "splits", "tiles", "tiles_x", "tiles_y", "count",
                       "side_count", "side_stride"),
    do_not_specialize_on_alignment=("STATS", "LSE", "DLOSS_DLSE", "SIDES_OUT", "LOSS", "ROW_TABLE",
                                    "COLUMN_TABLE", "TABLE", "TILE_SUMS", "COEFFICIENTS", "POSITIVE",
                                    "WEIGHTS", "FACTOR", "NORMS"))


@triton.jit
def load_tile(X, row, d, row_count, feature_count, row_stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the (BLOCK, BLOCK_D) part of X (row_count, feature_count) that starts at (row, d), with zeros
    outside X. X is a pointer or, if row_stride is None, a tensor descriptor."""
    if row_stride is None:
        x = X.load([row, d])
    else:
        rows, features = row + tl.arange(0, BLOCK), d + tl.arange(0, BLOCK_D)
        x = tl.load(X + rows.to(tl.int64)[:, None] * row_stride + features[None, :],  # N·D may exceed 2³¹
                    mask=(rows < row_count)[:, None] & (features < feature_count)[None, :], other=0.0)
    return x


@triton.jit
def qk_tile(Q, K, row, column, N, M, SHAPE, PRECISION: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the (BLOCK_N, BLOCK_M) float32 dot products q_i·k_j of the tile that starts at (row, column)."""
    qk = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for d in range(0, SHAPE.D, BLOCK_D):
        qk = add_tile_product(qk, Q, K, row, column, d, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    return qk


@triton.jit
def add_tile_product(qk, Q, K, row, column, d, N, M, SHAPE, PRECISION: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return qk plus the part of the dot products that the features d to d + BLOCK_D − 1 contribute."""
    q = load_tile(Q, row, d, N, SHAPE.D, SHAPE.q_stride, BLOCK_N, BLOCK_D)
    k = load_tile(K, column, d, M, SHAPE.D, SHAPE.k_stride, BLOCK_M, BLOCK_D)
    return tl.dot(q, k.T, qk, input_precision=PRECISION)


@triton.jit
def log2e_over_tau(MASK):
    """Return log2(e)/τ, which turns a dot product into a logit in log2 units."""
    if MASK.temperature is None:
        scale = MASK.log2e_over_tau
    else:
        scale = LOG2E / tl.load(MASK.temperature)
    return scale


@triton.jit
def mask_offset(MASK):
    """Return the offset of the mask; MASK.offset is 4 · offset + 2 (launch.kernel_mask says why)."""
    return MASK.offset >> 2


@triton.jit
def crosses_diagonal(row, column, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return whether the tile that starts at (row, column) contains entries of the diagonal."""
    return (row < column + BLOCK_M) & (column < row + BLOCK_N)


@triton.jit
def needs_mask(row, column, N, M, MASK, EXCLUDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return whether a tile may contain excluded entries or reach past the last row or column."""
    needed = (row + BLOCK_N > N) | (column + BLOCK_M > M)
    if EXCLUDE == "diagonal":
        needed = needed | crosses_diagonal(row + mask_offset(MASK), column, BLOCK_N, BLOCK_M)
    elif EXCLUDE == "pair":
        for view in tl.static_range(2):    # view is 0 for rows of first views, and 1 for rows of second views
            at = row + mask_offset(MASK) - view * (N // 2)
            needed = needed | crosses_diagonal(at, column, BLOCK_N, BLOCK_M)
            needed = needed | crosses_diagonal(at + M // 2, column, BLOCK_N, BLOCK_M)
    if EXCLUDE == "target":
        targets = positive_columns(row + tl.arange(0, BLOCK_N), N, M, MASK, EXCLUDE)
        in_tile = (targets >= column) & (targets < column + BLOCK_M)
        needed = needed | (tl.max(in_tile.to(tl.int32), 0) > 0)
    elif MASK.row_ids is not None:
        needed = True
    if MASK.row_groups is not None or MASK.row_features is not None:
        needed = True
    return needed


@triton.jit
def image_of(rows, N):
    """Return the image index of each row: rows i and i + N/2 are the two views of image i."""
    return tl.where(rows < N // 2, rows, rows - N // 2)


@triton.jit
def positive_columns(rows, N, M, MASK, EXCLUDE: tl.constexpr):
    """Return the column of each row's positive, or a number outside [0, M) if k does not contain it."""
    if EXCLUDE == "pair":
        image = image_of(rows, N) + mask_offset(MASK)
        column = tl.where(rows < N // 2, image + M // 2, image)
        column = tl.where((image >= 0) & (image < M // 2), column, -1)         # −1 if k lacks the positive
    elif EXCLUDE == "target":
        column = tl.load(MASK.row_ids + rows, mask=rows < N, other=-1)
    else:
        column = rows + mask_offset(MASK)
    return column


@triton.jit
def keep_mask(rows, column, N, M, MASK, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
              BLOCK_M: tl.constexpr):
    """Return a bool tile (rows, BLOCK_M), False for entries that are excluded or outside the matrix."""
    here = tl.arange(0, BLOCK_M)       # comparing columns within the tile, instead of `at`, saves registers
    at = column + here
    keep = (rows < N)[:, None] & (at < M)[None, :]
    if EXCLUDE == "diagonal":
        keep = keep & (here[None, :] != (rows + mask_offset(MASK) - column)[:, None])
    elif EXCLUDE == "pair":
        images = image_of(rows, N) + mask_offset(MASK)
        keep = keep & (image_of(at, M)[None, :] != images[:, None])
    elif EXCLUDE == "target":
        keep = keep & (here[None, :] != (positive_columns(rows, N, M, MASK, EXCLUDE) - column)[:, None])
    if EXCLUDE != "target" and MASK.row_ids is not None:
        row_ids = tl.load(MASK.row_ids + rows, mask=rows < N, other=0)
        column_ids = tl.load(MASK.column_ids + at, mask=at < M, other=0)
        keep = keep & (row_ids[:, None] != column_ids[None, :])
    if MASK.row_groups is not None:
        row_groups = tl.load(MASK.row_groups + rows, mask=rows < N, other=0)
        column_groups = tl.load(MASK.column_groups + at, mask=at < M, other=0)
        keep = keep & (row_groups[:, None] == column_groups[None, :])
    if MASK.row_features is not None:
        f = tl.zeros((rows.shape[0], BLOCK_M), tl.float32)
        for e in range(0, MASK.feature_count, 16):
            f_row = load_tile(MASK.row_features, tl.min(rows, 0), e, N, MASK.feature_count,
                              MASK.feature_count, rows.shape[0], 16)
            f_column = load_tile(MASK.column_features, column, e, M, MASK.feature_count, MASK.feature_count,
                                 BLOCK_M, 16)
            f = tl.dot(f_row, f_column.T, f, input_precision=PRECISION)
        keep = keep & (f < MASK.phi)
    return keep


@triton.jit
def exp2_scaled(qk, scale, m):
    """Return exp2(qk·scale − m). Without fma, rounding qk·scale adds a relative error of |logit| · 2⁻²⁴."""
    return tl.exp2(tl.fma(qk, scale, -m))


@triton.jit
def finite_max(m):
    """Replace m = −∞ (all columns excluded) by 0, and m = ∞ by 3e38. So s − m is never ∞ − ∞ = NaN."""
    return tl.where(m == float("-inf"), 0.0, tl.where(m == float("inf"), 3e38, m))


@triton.jit
def lse_minus_positive(m_i, l_i, positive, scale):
    """Return lse_i − positive/τ in nats; positive is the dot product of row i with its positive."""
    return (tl.fma(-positive, scale, m_i) + tl.log2(l_i)) / LOG2E   # the fma does not round positive·scale


@triton.jit
def softmax_factor(dloss_dlse, l_i):
    """Return f with f · exp2(s − m) = WEIGHT_SCALE · dloss_dlse · p; 0 if l_i is 0."""
    return tl.where(l_i == 0.0, 0.0, dloss_dlse * WEIGHT_SCALE / l_i)


@triton.jit
def load_factors(SIDE, at):
    """Return (factor, m) of the rows (or columns) `at`; (1, 0) if the loss has no softmax of this side."""
    factor, m = 1.0, 0.0
    if SIDE.factor is not None:
        factor, m = tl.load(SIDE.factor + at), tl.load(SIDE.m + at)
    return factor, m


@triton.jit
def softmax_weights(qk, scale, row_factor, row_m, columns, X_SIDE, Y_SIDE, common_m,
                    ONE_EXPONENTIAL: tl.constexpr):
    """Return a tile of WEIGHT_SCALE · w_ij, where w_ij = dloss_dlse_i p_ij + dloss_dlse'_j p'_ij.

    p is the row softmax, p' the column softmax. If the loss lacks one of them, its term is left out.
    ONE_EXPONENTIAL  True: the loss has both terms, and common_m is the m of all rows and columns (shift.py)
    """
    if ONE_EXPONENTIAL:
        column_factor = tl.load(Y_SIDE.factor + columns)
        w = exp2_scaled(qk, scale, common_m) * (row_factor[:, None] + column_factor[None, :])
    else:
        w = tl.zeros(qk.shape, tl.float32)
        if Y_SIDE.factor is not None:
            column_factor, column_m = load_factors(Y_SIDE, columns)
            w = exp2_scaled(qk, scale, column_m[None, :]) * column_factor[None, :]
        if X_SIDE.factor is not None:
            w += exp2_scaled(qk, scale, row_m[:, None]) * row_factor[:, None]
    return w


@triton.jit
def finish_gradient(dx, FINISH, X_SIDE, Y_SIDE, MASK, rows, d, N, M, EXCLUDE: tl.constexpr,
                    DOT: tl.constexpr):
    """Turn dx, a tile of WEIGHT_SCALE · Σ_j w_ij y_j, into the gradient of x.

    Divide dx by WEIGHT_SCALE, subtract the positive's term, multiply by 1/τ, FINISH.loss_factor, FINISH.grad.
    returns  (dx, mask of entries inside x, x·dx of each row over the features of this tile, or 0 without DOT)
    """
    dx = dx * (1.0 / WEIGHT_SCALE)
    inside = (rows < N)[:, None] & (d < FINISH.features)[None, :]
    if FINISH.positive_rows is not None:
        at = positive_columns(rows, N, M, MASK, EXCLUDE)
        exists = (rows < N) & (at >= 0) & (at < M)
        coefficient = tl.zeros((rows.shape[0],), tl.float32)
        if X_SIDE.dloss_dlse is not None:
            coefficient += tl.load(X_SIDE.dloss_dlse + rows, mask=exists, other=0.0)
        if Y_SIDE.dloss_dlse is not None:
            coefficient += tl.load(Y_SIDE.dloss_dlse + at, mask=exists, other=0.0)
        positive_row = tl.load(
            FINISH.positive_rows + at.to(tl.int64)[:, None] * FINISH.positive_stride + d[None, :],
            mask=exists[:, None] & (d < FINISH.features)[None, :], other=0.0)
        dx = dx - coefficient[:, None] * positive_row.to(tl.float32)
    factor = FINISH.loss_factor * log2e_over_tau(MASK) / LOG2E
    if FINISH.grad is not None:
        factor = tl.load(FINISH.grad) * factor
    dx = dx * factor
    dots = 0.0
    if DOT:
        x = tl.load(FINISH.x + rows.to(tl.int64)[:, None] * FINISH.x_stride + d[None, :], mask=inside,
                    other=0.0)
        dots = tl.sum(dx * x.to(tl.float32), 1)
    return dx, inside, dots


@triton.jit
def log1p(u):
    """Return log(1 + u) for u ≥ 0. Multiplying by u / (rounded − 1) corrects the rounding of 1 + u."""
    rounded = 1 + u
    return tl.where(rounded == 1, u, tl.log(rounded) * u / tl.where(rounded == 1, 1.0, rounded - 1))


@triton.jit
def softplus(x):
    """Return (log(1 + exp(x)), σ(x)), both with a small relative error; exp(x) underflows below −87."""
    u = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + log1p(u), tl.where(x > 0, 1.0, u) / (1 + u)


@triton.jit
def softplus_sum(x):
    """Return (sum of log(1 + exp(x)) over a tile, tile of σ(x)). Takes one logarithm per 8 columns."""
    positive_part = tl.sum(tl.where(x > 0, x, 0.0), 1)
    u = tl.exp2(-tl.abs(x) * LOG2E)
    root = tl.rsqrt(1 + u)                                 # this gives root² = 1 / (1 + u) without a division
    sigma, v = root * root, u
    sigma = tl.where(x > 0, sigma, sigma * u)
    for _ in tl.static_range(3):   # replace pairs by v + other + v·other = (1 + v)(1 + other) − 1
        v = tl.permute(tl.reshape(v, (v.shape[0], 2, v.shape[1] // 2)), (0, 2, 1))
        v, other = tl.split(v)
        v = tl.fma(v, other, v + other)
    return tl.sum(tl.sum(log1p(v), 1) + positive_part, 0), sigma


@triton.jit
def tile_at(index, tiles_x, tiles_y, TRIANGLE: tl.constexpr):
    """Return (x, y), the row and the column of the tile with this index in a grid of tiles_x × tiles_y tiles.

    Tiles with nearby indices share rows of q and k, so that these rows are still in the L2 cache.
    TRIANGLE  True: the logits are symmetric, and tiles_x = tiles_y = T. Only one of the tiles (x, y) and
              (y, x) has an index, so there are T (T + 1) / 2 indices. Row x has the tiles y = x, x + 1, …,
              x + T // 2 (modulo T). If T is even, the rows x ≥ T / 2 do not have the last of these tiles
    """
    width, group_tiles = tiles_y, 8                          # tiles are numbered in groups of 8 rows of tiles
    if TRIANGLE:
        width, group_tiles = tl.maximum(tiles_x // 2, 1), 4
    group = index // (group_tiles * width)
    first, inner = group * group_tiles, index % (group_tiles * width)
    height = tl.maximum(tl.minimum(tiles_x - first, group_tiles), 1)
    x, y = first + inner % height, inner // height
    if TRIANGLE:
        half = tiles_x // 2
        rest = index - tiles_x * half                              # if rest ≥ 0, the tile has y = x + T // 2
        x = tl.where(rest < 0, x, rest)
        y = x + tl.where(rest < 0, y, half)
        y = tl.where(y < tiles_x, y, y - tiles_x)
    return x, y


@triton.jit
def count_steps(tiles, D, BLOCK_D: tl.constexpr):
    """Return the number of steps of this program. A step adds BLOCK_D features to the products of a tile.

    Program p computes tiles p, p + num_programs, and so on. One loop runs over the features of all its tiles,
    so that loads for a tile overlap with the end of the previous tile. When a tile is complete, a kernel must
    use qk before any branch. The kernel then waits for the tensor cores only once per tile. If a branch came
    first, the kernel would wait after each tensor core instruction, and ptxas -v would print a warning.
    """
    return tl.cdiv(tl.maximum(tiles - tl.program_id(0), 0), tl.num_programs(0)) * tl.cdiv(D, BLOCK_D)


@triton.jit
def next_step(tile, tile_x, tile_y, d, tiles_x, tiles_y, D, TRIANGLE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return (index of the tile, tile_x, tile_y, d) of the next step, which starts at feature d."""
    d += BLOCK_D
    if d >= D:
        d = 0
        tile += tl.num_programs(0)
        tile_x, tile_y = tile_at(tile, tiles_x, tiles_y, TRIANGLE)
    return tile, tile_x, tile_y, d


@triton.jit
def round_to_tf32(x):
    """Return float32 x, rounded to the nearest TF32 number, ties to even. Tensor cores cut off 13 bits."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.minimum(bits, 0x7FFFEFFF)                        # the NaN 0x7FFFFFFF would overflow to −0
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def cast_for_matmul(x, X, PRECISION: tl.constexpr):
    """Return x in the dtype of X. If X is float32 and matrix products use TF32, x is rounded to TF32."""
    if PRECISION == "tf32" and X.dtype.element_ty == tl.float32:
        x = round_to_tf32(x)
    return x.to(X.dtype.element_ty)


@kernel
def copy_kernel(COPY, X, count, features, padded_features, row_stride, column_stride, ROUND: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy X (count, features) to COPY (count, padded_features), padded with zeros. ROUND: round to TF32."""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    x = tl.load(X + rows * row_stride + d * column_stride, mask=(rows < count) & (d < features), other=0.0)
    if ROUND:
        x = round_to_tf32(x)
    tl.store(COPY + rows * padded_features + d, x, mask=(rows < count) & (d < padded_features))
