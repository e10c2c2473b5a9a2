"""One reference for all logits of a call, so that one exponential serves rows and columns alike.

    e_ij = exp2(s_ij − r)        Σ_j e_ij = exp2(lse_i − r)        w_ij = e_ij (a_i + a_j)

Nothing may overflow, nor vanish where it counts. Norms bound every |s| ≤ B (Cauchy and Schwarz), hence

    r = max(B − 106, 0)          terms up to 2¹⁰⁶, and sums of 2²⁰ of them, are in float32's range

Up to B = 106, unit rows from τ = 0.0137 on, nothing vanishes either. Beyond, what is below 2⁻¹²⁶ does, which
is no digit of a sum above 2⁻⁸⁰. Where a row's sum is smaller (τ = 0.01: its nearest column at a cosine below
−0.29), forward takes that row again with a maximum of its own, and backward two exponentials an entry.

What a row's part of a weight needs is made once per row, for whole tiles: no logarithm, and no mask, is left
in the loops over tiles.
"""
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import scale_of
from .paths import FEW
from .tiles import LOG2E, kernel, octaves, own_factors

TOP, LEAST = tl.constexpr(106.0), tl.constexpr(-80.0)   # log2 of the largest term, of a sum that counts
LONGEST_TILE = 256                                      # vectors are padded to a multiple of it


class Side(NamedTuple):
    """A softmax of the loss, over the rows or the columns, as kernels take it; nothing but None: has not."""
    lse: Any = None       # (N,) float32
    slope: Any = None     # (N,) float32: dloss/dlse
    factors: Any = None   # (2, padded N) float32: a and b of the weights a exp2(s − b); None: few rows


@triton.jit
def extremes(NORMS, LSE, count, BLOCK: tl.constexpr):
    """(largest norm, smallest lse of a row that has a column)."""
    longest, lowest = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), float("inf"), tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        longest = tl.maximum(longest, tl.load(NORMS + at, mask=at < count, other=0.0))
        if LSE is not None:
            lse = tl.load(LSE + at, mask=at < count, other=float("inf"))
            lowest = tl.minimum(lowest, tl.where(lse == float("-inf"), float("inf"), lse))
    return tl.max(longest, 0), tl.min(lowest, 0)


@kernel
def reference_kernel(REFERENCE, X_NORMS, Y_NORMS, X_LSE, Y_LSE, RULE, N, M, BLOCK: tl.constexpr):
    """REFERENCE = r; infinity where a sum is too small for it."""
    x, lowest = extremes(X_NORMS, X_LSE, N, BLOCK)
    y = x
    if Y_NORMS is not None:
        y, of_columns = extremes(Y_NORMS, Y_LSE, M, BLOCK)
        lowest = tl.minimum(lowest, of_columns)
    r = tl.maximum(x * y * octaves(RULE) - TOP, 0.0)
    tl.store(REFERENCE, tl.where((r > 0.0) & (lowest * LOG2E < r + LEAST), float("inf"), r))


@kernel
def factors_kernel(FACTORS, LSE, SLOPE, REFERENCE, count, padded_x, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """FACTORS[0, i], FACTORS[1, i] = a and b with a exp2(s − b) = slope exp2(s − lse) 2^SHIFT; 0 past the
    last row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(LSE + at, mask=at < count, other=0.0) * LOG2E
    slope = tl.load(SLOPE + at, mask=at < count, other=0.0)
    a, b = own_factors(lse, slope, SHIFT)
    if REFERENCE is not None:
        reference = tl.load(REFERENCE)
        if reference < float("inf"):
            a = slope * tl.where(lse == float("-inf"), 0.0, tl.exp2(reference - lse + SHIFT))
    tl.store(FACTORS + at, a)
    tl.store(FACTORS + padded_x + at, b)


def reference_of(q, k, temperature, rows=None, columns=None):
    """0-dim float32 r, infinity where the log-sum-exps of rows and columns (if given) say so; None for few
    rows: reading them again costs more than a second exponential."""
    if max(len(q), len(k)) <= FEW:
        return None
    norms = functools.partial(torch.linalg.vector_norm, dim=1, dtype=torch.float32)
    reference = torch.empty((), dtype=torch.float32, device=q.device)
    reference_kernel[1,](reference, norms(q), None if k is q else norms(k), rows, columns,
                         scale_of(temperature, q), len(q), len(k), BLOCK=4096, num_warps=8,
                         enable_fp_fusion=True)
    return reference


def padded(count):
    return triton.cdiv(count, LONGEST_TILE) * LONGEST_TILE


def side_of(statistics, reference, shift):
    """(lse, slope), or None, as a Side; its factors are made here unless rows are few."""
    if statistics is None:
        return Side()
    lse, slope = (x if x.data_ptr() % 16 == 0 else x.clone() for x in statistics)  # or it has its own kernel
    if len(lse) <= FEW:
        return Side(lse, slope)
    size = padded(len(lse))
    factors = torch.empty(2, size, dtype=torch.float32, device=lse.device)
    factors_kernel[size // LONGEST_TILE,](factors, lse, slope, reference, len(lse), size, SHIFT=shift,
                                          BLOCK=LONGEST_TILE, enable_fp_fusion=True)
    return Side(lse, slope, factors)
