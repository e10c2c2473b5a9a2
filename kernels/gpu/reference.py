"""One reference for all logits of a call, so that one exponential serves rows and columns alike.

    e_ij = exp2(s_ij − r)        Σ_j e_ij = exp2(lse_i − r)        w_ij = e_ij (a_i + a_j)

Nothing may overflow, nor vanish where it counts. Norms bound every |s| ≤ B (Cauchy and Schwarz; a thousandth
more, as rows may be rounded to TF32, and norms and products are), hence

    r = max(B − 106, 0)          terms up to 2¹⁰⁶, and sums of 2²⁰ of them, are in float32's range

Up to B = 106, unit rows from τ = 0.0137 on, nothing vanishes either. Beyond, what is below 2⁻¹²⁶ does, which
is no digit of a sum above 2⁻⁸⁰. Where a row's sum is smaller (τ = 0.01: its nearest column at a cosine below
−0.29), forward takes that row again with a top of its own. Backward has one
exponential where all rows have the same top, r, else two an entry.

What a row's part of a weight needs is made once per row, for whole tiles: no logarithm, and no mask, is left
in the loops over tiles.
"""
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..paths import FEW
from .launch import scale_of
from .tiles import kernel, octaves, own_factors

TOP, LEAST = tl.constexpr(106.0), tl.constexpr(-80.0)   # log2 of the largest term, of a sum that counts
ROUNDED = tl.constexpr(1 + 2 ** -10)                    # what a bound of norms leaves to rounding
LONGEST_TILE = 256                                      # vectors are padded to a multiple of it


class Side(NamedTuple):
    """A softmax of the loss, over the rows or the columns, as kernels take it; nothing but None: has not."""
    sums: Any = None      # (2, N) float32: top and Σ_j exp2(s_j − top)
    slope: Any = None     # (N,) float32: dloss/dlse
    factors: Any = None   # (2, padded) float32: a and b of the weights a exp2(s − b); None: few rows
    padded: Any = None    # N, to a multiple of LONGEST_TILE


@triton.jit
def extremes(X, count, BLOCK: tl.constexpr):
    """(smallest, largest) of as many numbers."""
    low, high = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        low = tl.minimum(low, tl.load(X + at, mask=at < count, other=float("inf")))
        high = tl.maximum(high, tl.load(X + at, mask=at < count, other=float("-inf")))
    return tl.min(low, 0), tl.max(high, 0)


@kernel
def reference_kernel(REFERENCE, X_VECTOR, Y_VECTOR, RULE, N, M, OF_NORMS: tl.constexpr,
                     BLOCK: tl.constexpr):
    """REFERENCE = r of norms under a RULE; of tops, without one, what all of them are or infinity."""
    low, high = extremes(X_VECTOR, N, BLOCK)
    low_y, high_y = low, high
    if Y_VECTOR is not None:
        low_y, high_y = extremes(Y_VECTOR, M, BLOCK)
    if OF_NORMS:                   # Triton 3.6 cannot compare a tuple with None
        r = tl.maximum(high * high_y * tl.abs(octaves(RULE)) * ROUNDED - TOP, 0.0)
    else:
        r = tl.where((low == high) & (low_y == high) & (high_y == high), high, float("inf"))
    tl.store(REFERENCE, r)


@kernel
def factors_kernel(FACTORS, SUMS, SLOPE, count, BLOCK: tl.constexpr):
    """FACTORS[:, i] = own_factors of row i, 0 past the last row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = own_factors(SUMS, SLOPE, at, at < count, count)
    tl.store(FACTORS + at, a)
    tl.store(FACTORS + tl.num_programs(0) * BLOCK + at, b)


def reference_of(q, k, temperature):
    """0-dim float32 r; None for few rows: reading them again costs more than a second exponential."""
    if max(len(q), len(k)) <= FEW:
        return None
    norms = functools.partial(torch.linalg.vector_norm, dim=1, dtype=torch.float32)
    return of_vectors(norms(q), None if k is q else norms(k), len(q), len(k), scale_of(temperature, q))


def common_top(rows, columns, n, m):
    """0-dim float32: the top that all of n rows and m columns have, whose sums (2, n), (2, m) or None are
    given, else infinity; None for few."""
    return None if max(n, m) <= FEW else of_vectors(rows, columns, n, m, None)


def of_vectors(x, y, n, m, rule):
    reference = torch.empty((), dtype=torch.float32, device=x.device)
    reference_kernel[1,](reference, x, y, rule, n, m, OF_NORMS=rule is not None, BLOCK=4096, num_warps=8,
                         enable_fp_fusion=True)
    return reference


def side_of(statistics):
    """(sums, slope), or None, as a Side; its factors are made here unless rows are few."""
    if statistics is None:
        return Side()
    sums, slope = (x if x.data_ptr() % 16 == 0 else x.clone() for x in statistics)  # or it has its own kernel
    if len(slope) <= FEW:
        return Side(sums, slope)
    programs = triton.cdiv(len(slope), LONGEST_TILE)
    factors = torch.empty(2, programs * LONGEST_TILE, dtype=torch.float32, device=slope.device)
    factors_kernel[programs,](factors, sums, slope, len(slope), BLOCK=LONGEST_TILE, enable_fp_fusion=True)
    return Side(sums, slope, factors, factors.shape[1])
