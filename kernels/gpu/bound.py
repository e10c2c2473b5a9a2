"""One shift r subtracted from all logits of a call, so that one exponential serves row sums and column sums.

A softmax subtracts a maximum before exp2. With a maximum per row and another per column, every logit needs
two exponentials. With one shift r for all logits, one is enough:

    e_ij = exp2(s_ij − r)        l_i = Σ_j e_ij        l'_j = Σ_i e_ij        w_ij = e_ij (f_i + f'_j)

s is in log2 units; f_i = dloss_dlse_i / l_i is the factor of row i, f'_j that of column j. Nothing may
overflow, and nothing that counts may underflow. By Cauchy and Schwarz, the largest norms of rows of q and
of k bound every logit, |s| ≤ B. A thousandth is added to B, because rows may be rounded to TF32, and norms
and dot products are rounded. Then

    r = max(B − 106, 0)          terms up to 2¹⁰⁶, and sums of 2²⁰ of them, are in float32's range

If B ≤ 106, as for unit rows at τ ≥ 0.0137, then r = 0 and no term underflows. For a larger B, terms below
2⁻¹²⁶ underflow, but they are too small to change a sum above 2⁻⁸⁰. If the sum of a row is smaller (at τ =
0.01: if its nearest column has a cosine below −0.29), forward computes that row again with its own maximum.
Backward computes one exponential per logit if all rows and columns have the same m, namely r, else two.

The factors are computed once per row and padded to whole tiles (SoftmaxSide.factors), so that loops over
tiles need neither a logarithm nor a mask for them.
"""
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..heuristics import FEW_ROWS
from .launch import ceil_div, temperature_only_mask
from .tiles import kernel, load_tile, log2e_over_tau, row_factors

MAX_LOG2_TERM = tl.constexpr(106.0)        # log2 of the largest term exp2(s − r)
MIN_LOG2_SUM = tl.constexpr(-80.0)         # log2 of the smallest sum that underflowed terms cannot change
NORM_MARGIN = tl.constexpr(1 + 2 ** -10)   # factor on B for rounding
MAX_TILE_SIDE = 256                        # longest side of a tile in any kernel; factors are padded to it


class SoftmaxSide(NamedTuple):
    """The row or the column softmax of the loss, as kernel arguments; all None if the loss lacks it."""
    stats: Any = None        # (2, N) float32: m and l
    dloss_dlse: Any = None   # (N,) float32
    factors: Any = None      # (2, padded) float32: factor and m of tiles.row_factors; None for few rows
    padded: Any = None       # N, rounded up to a multiple of MAX_TILE_SIDE


@triton.jit
def min_max(X, count, BLOCK: tl.constexpr):
    """Return (min, max) of the first `count` numbers of X."""
    low, high = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        low = tl.minimum(low, tl.load(X + at, mask=at < count, other=float("inf")))
        high = tl.maximum(high, tl.load(X + at, mask=at < count, other=float("-inf")))
    return tl.min(low, 0), tl.max(high, 0)


@kernel
def bound_kernel(BOUND, X_VECTOR, Y_VECTOR, MASK, N, M, FROM_NORMS: tl.constexpr, BLOCK: tl.constexpr):
    """Write BOUND. With FROM_NORMS, X_VECTOR and Y_VECTOR have the largest norms of blocks of rows of
    q and k, and BOUND is the shift r = max(B − 106, 0).

    Otherwise they are the m of rows and columns, and BOUND is their common value, or ∞ if they differ.
    Y_VECTOR None: the same vector as X_VECTOR.
    """
    low, high = min_max(X_VECTOR, N, BLOCK)
    low_y, high_y = low, high
    if Y_VECTOR is not None:
        low_y, high_y = min_max(Y_VECTOR, M, BLOCK)
    if FROM_NORMS:                 # a constexpr, because Triton 3.6 cannot compare the tuple MASK with None
        r = tl.maximum(high * high_y * tl.abs(log2e_over_tau(MASK)) * NORM_MARGIN - MAX_LOG2_TERM, 0.0)
    else:
        r = tl.where((low == high) & (low_y == high) & (high_y == high), high, float("inf"))
    tl.store(BOUND, r)


@kernel
def norms_kernel(NORMS, X, count, features, row_stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the largest norm of each block of rows of X (count, features)."""
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for d in range(0, features, BLOCK_D):
        x = load_tile(X, tl.program_id(0) * BLOCK_N, d, count, features, row_stride, BLOCK_N, BLOCK_D)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    tl.store(NORMS + tl.program_id(0), tl.sqrt(tl.max(squares, 0)))


@kernel
def factors_kernel(FACTORS, STATS, DLOSS_DLSE, count, BLOCK: tl.constexpr):
    """Write FACTORS[:, i] = row_factors of row i, or 0 after the last row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor, m = row_factors(STATS, DLOSS_DLSE, at, at < count, count)
    tl.store(FACTORS + at, factor)
    tl.store(FACTORS + tl.num_programs(0) * BLOCK + at, m)


def has_few_rows(n, m):
    """Return whether the kernels for few rows are used: launches then cost more than arithmetic."""
    return max(n, m) <= FEW_ROWS


def bound_of_norms(q, k, temperature):
    """Return the shift r, a 0-dim float32 tensor.

    Return None for few rows, for which the norms cost more than a second exponential.
    q, k  from aligned_operands; k may be q
    """
    n, m = q.shape[0], k.shape[0]
    if has_few_rows(n, m):
        return None
    norms_q = largest_norms(q)
    norms_k = None if k is q else largest_norms(k)
    return run_bound_kernel(norms_q, norms_k, len(norms_q), 0 if k is q else len(norms_k),
                            temperature_only_mask(temperature, q))


def largest_norms(x):
    """Return the largest norm of each block of 64 rows of x."""
    norms = torch.empty(ceil_div(x.shape[0], 64), dtype=torch.float32, device=x.device)
    norms_kernel[len(norms),](norms, x, *x.shape, x.stride(0), BLOCK_N=64, BLOCK_D=64, enable_fp_fusion=True)
    return norms


def common_maximum(row_stats, column_stats, n, m):
    """Return the m that all n rows and m columns share, as a 0-dim float32 tensor; ∞ if they differ.

    Return None for few rows.
    row_stats, column_stats  (2, n) and (2, m), of which only m, the first row, is read; column_stats None:
                             the columns have the statistics of the rows
    """
    return None if has_few_rows(n, m) else run_bound_kernel(row_stats, column_stats, n, m, None)


def run_bound_kernel(x, y, n, m, mask):
    """Run bound_kernel on the first n numbers of x and the first m numbers of y, and return its result.

    x, y  norms; if mask is None: stats, of which only the first row, m, is read
    """
    bound = torch.empty((), dtype=torch.float32, device=x.device)
    bound_kernel[1,](bound, x, y, mask, n, m, FROM_NORMS=mask is not None, BLOCK=4096, num_warps=8,
                     enable_fp_fusion=True)
    return bound


def make_side(statistics, bound):
    """Return the SoftmaxSide of (stats, dloss_dlse); None: an empty one.

    There are no factors for few rows, nor, without a bound, for up to 4 · FEW_ROWS: a launch would cost more.
    """
    if statistics is None:
        return SoftmaxSide()
    # Triton would compile another kernel for unaligned pointers
    stats, dloss_dlse = (x if x.data_ptr() % 16 == 0 else x.clone() for x in statistics)
    n = dloss_dlse.shape[0]
    if n <= (4 * FEW_ROWS if bound is None else FEW_ROWS):
        return SoftmaxSide(stats, dloss_dlse)
    programs = ceil_div(n, MAX_TILE_SIDE)
    factors = torch.empty(2, programs * MAX_TILE_SIDE, dtype=torch.float32, device=dloss_dlse.device)
    factors_kernel[programs,](factors, stats, dloss_dlse, n, BLOCK=MAX_TILE_SIDE,
                              enable_fp_fusion=True)
    return SoftmaxSide(stats, dloss_dlse, factors, factors.shape[1])
