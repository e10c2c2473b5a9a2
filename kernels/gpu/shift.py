"""Subtract one shift r from all logits, so that row sums and column sums need only one exponential per logit.

A softmax subtracts a maximum before exp2. With a maximum per row and another per column, each logit needs
two exponentials. With one shift r for all logits, each logit needs only one:

    e_ij = exp2(s_ij − r)        l_i = Σ_j e_ij        l'_j = Σ_i e_ij        w_ij = e_ij (f_i + f'_j)

s is in log2 units. f_i = dloss_dlse_i / l_i is the factor of row i, and f'_j that of column j. A bound on the
logits keeps exp2 in range: by the Cauchy-Schwarz inequality |s| ≤ B, where B is the largest norm in q times
the largest norm in k times log2(e)/τ. B is increased by a thousandth, because norms and dot products are
rounded, and rows may be rounded to TF32. Then

    r = max(B − 106, 0)          terms are at most 2¹⁰⁶, so sums of 2²⁰ terms do not overflow in float32

If B ≤ 106, as for unit rows at τ ≥ 0.0137, then r = 0 and no term underflows. If B is larger, terms below
2⁻¹²⁶ underflow, but these are too small to change a sum above 2⁻⁸⁰. If the sum of a row is below 2⁻⁸⁰, the
forward pass computes this row again with its own maximum. (With unit rows and τ = 0.01, all cosines of such a
row are below −0.28.) COMMON_M is r, or ∞ if some row or column subtracts its own maximum. Backward computes
one exponential per logit if COMMON_M is finite, and two if COMMON_M is ∞.
"""
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import heuristics
from .heuristics import cdiv
from .launch import launch, temperature_of
from .tiles import kernel, load_tile, log2e_over_tau, softmax_factor

MAX_LOG2_TERM = tl.constexpr(106.0)        # the log2 of a term, s − r, is at most this number
MIN_LOG2_SUM = tl.constexpr(-80.0)         # a row or column is computed again if log2 of its sum is smaller
NORM_MARGIN = tl.constexpr(1 + 2 ** -10)   # the bound B on |s| is multiplied by this, to allow for rounding
MAX_TILE_SIDE = 128                        # largest BLOCK_N or BLOCK_M of kernels that read a SoftmaxSide


class SoftmaxSide(NamedTuple):
    """Kernel arguments for one side (softmax) of the loss. If the loss lacks this side, all fields are None.

    The fields are float32 vectors, padded with zeros to whole tiles where a kernel loads them without a mask.
    """
    factor: Any = None       # result of tiles.softmax_factor for each row (or column)
    m: Any = None            # number that is subtracted from the logits of each row (or column)
    dloss_dlse: Any = None


@triton.jit
def largest(X, count, BLOCK: tl.constexpr):
    """Return the largest of the first `count` numbers of X. No number of X may be negative."""
    found = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(X + at, mask=at < count, other=0.0))
    return tl.max(found, 0)


@kernel
def shift_kernel(SHIFT, COMMON_M, NORMS, MASK, tiles, count, BLOCK: tl.constexpr):
    """Compute r and write it to SHIFT and COMMON_M. NORMS (see norms_kernel) has `tiles` norms of q, then
    `count` norms of k. count = 0 means that k is q."""
    of_q = largest(NORMS, tiles, BLOCK)
    of_k = tl.where(count > 0, largest(NORMS + tiles, count, BLOCK), of_q)
    r = tl.maximum(of_q * of_k * tl.abs(log2e_over_tau(MASK)) * NORM_MARGIN - MAX_LOG2_TERM, 0.0)
    tl.store(SHIFT, r)
    tl.store(COMMON_M, r)


@triton.jit
def largest_norm(X, row, count, features, row_stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the largest norm of BLOCK_N rows of X (count, features), from the row with index `row` on."""
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for d in range(0, features, BLOCK_D):
        x = load_tile(X, row, d, count, features, row_stride, BLOCK_N, BLOCK_D)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    return tl.sqrt(tl.max(squares, 0))


@kernel
def norms_kernel(NORMS, Q, K, N, M, features, q_stride, k_stride, BLOCK_N: tl.constexpr,
                 BLOCK_D: tl.constexpr):
    """Write the largest norm of each BLOCK_N rows to NORMS: first of Q (N, features), then of K (M, ...)."""
    tile, tiles = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    if tile < tiles:
        tl.store(NORMS + tile, largest_norm(Q, tile * BLOCK_N, N, features, q_stride, BLOCK_N, BLOCK_D))
    else:
        row = (tile - tiles) * BLOCK_N
        tl.store(NORMS + tile, largest_norm(K, row, M, features, k_stride, BLOCK_N, BLOCK_D))


@kernel
def side_kernel(SIDE, STATS, DLOSS_DLSE, count, side_count, BLOCK: tl.constexpr):
    """Write the vectors of a SoftmaxSide to SIDE (3, side_count), from STATS (2, count) and DLOSS_DLSE."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dloss_dlse = tl.load(DLOSS_DLSE + at, mask=at < count, other=0.0)
    l_i = tl.load(STATS + count + at, mask=at < count, other=0.0)
    tl.store(SIDE + at, softmax_factor(dloss_dlse, l_i))
    tl.store(SIDE + side_count + at, tl.load(STATS + at, mask=at < count, other=0.0))
    tl.store(SIDE + 2 * side_count + at, dloss_dlse)


def shift_of_norms(call):
    """Return (SHIFT, COMMON_M), two 0-dim float32 tensors that hold r, for a call from launch.aligned.

    Return (None, None) for at most SHIFT_LOGITS logits. Kernels then subtract maxima.
    """
    q, k = call.q, call.keys
    (n, features), m = q.shape, k.shape[0]
    if n * m <= heuristics.SHIFT_LOGITS:
        return None, None
    tiles, count = cdiv(n, 16), 0 if call.k is None else cdiv(m, 16)
    norms = torch.empty(tiles + count, dtype=torch.float32, device=q.device)
    launch(norms_kernel, (tiles + count,), norms, q, k, n, m, features, q.stride(0), k.stride(0), BLOCK_N=16,
           BLOCK_D=256, enable_fp_fusion=True)
    shift, common_m = norms.new_empty(()), norms.new_empty(())
    launch(shift_kernel, (1,), shift, common_m, norms, temperature_of(call), tiles, count, BLOCK=4096,
           num_warps=8, enable_fp_fusion=True)
    return shift, common_m


def new_sides(sides, n, device):
    """Return an uninitialised tensor (sides, 3, padded n); as_side makes each entry a SoftmaxSide."""
    padded = cdiv(n, MAX_TILE_SIDE) * MAX_TILE_SIDE
    return torch.empty(sides, 3, padded, dtype=torch.float32, device=device)


def make_side(stats, dloss_dlse):
    """Return a tensor (3, padded n) for as_side, computed from stats (2, n) and dloss_dlse (n,)."""
    n = dloss_dlse.shape[0]
    side = new_sides(1, n, stats.device)[0]
    launch(side_kernel, (side.shape[1] // MAX_TILE_SIDE,), side, stats, dloss_dlse, n, side.shape[1],
           BLOCK=MAX_TILE_SIDE, enable_fp_fusion=True)
    return side


def as_side(side):
    """Return the rows of a tensor (3, padded n) as a SoftmaxSide; if side is None, all fields are None."""
    return SoftmaxSide() if side is None else SoftmaxSide(*side.unbind())


class Sides(NamedTuple):
    """The two softmaxes of a loss, and the m that they may share."""
    rows: SoftmaxSide
    columns: SoftmaxSide
    common_m: Any = None     # 0-dim tensor COMMON_M; None: no shift was used

    @property
    def are_two(self):
        """Whether the loss has a row softmax and a column softmax."""
        return self.rows.factor is not None and self.columns.factor is not None

    def swapped(self):
        """Return the Sides of the transposed matrix."""
        return self._replace(rows=self.columns, columns=self.rows)
