"""Loss and gradient of wide rows in one pass: strips of the softmax, made once and used twice.

One direction of a mean loss knows its own gradient as soon as the rows' sums are known, so nothing is
computed again: 6 N·M·D operations, as many as eager, where forward and backward apart take 8. For each strip
of rows I and all columns:

    e_ij = exp2(s_ij − top_iJ)    by tiles (I, J) with their own row maxima, in q's dtype    like parts_kernel
    lse_i, slope_i, loss          from the sums of all tiles                                 merge_kernel
    w_ij = e_ij · slope_i exp2(top_iJ − lse_i)        in place, one pass over the strip
    dq_I = W k − slope_I k_pos    dk += Wᵀ q_I − …                                           cuBLAS

A tile's own maximum needs no bound on the logits: nothing overflows, and what vanishes would have vanished in
W. Strips are as tall as paths.BUFFER allows; Σ_i is done in their order, so the same input gives the same
bits.
"""
import torch
import triton
import triton.language as tl

from .gradient_blocks import SHIFT, add_product, finished
from .launch import arguments, tile
from .lse_forward import merge
from .paths import gradient_dtype, strip_height
from .rules import swapped
from .tiles import LOG2E, kept, octaves, positive_of, product, touched


@triton.jit
def strip_kernel(E, TOPS, PARTS, POSITIVE, Q, K, RULE, N, M, D, q_row, k_row, first_row, height, e_row,
                 EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_D: tl.constexpr):
    """E[i, j] = exp2(s − TOPS[J, i]), PARTS[J, i] = log2 Σ_j exp2(s), POSITIVE[i] of rows first_row + i."""
    row, column = first_row + tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
    at = rows - first_row
    s = product(Q, K, row, column, N, M, D, q_row, k_row, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    s = s * octaves(RULE)
    if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
        target = positive_of(rows, N, RULE, EXCLUDE)
        here = (at < height) & (target >= column) & (target < column + BLOCK_M) & (target < M)
        tl.store(POSITIVE + at, tl.sum(tl.where(columns[None, :] == target[:, None], s, 0.0), 1), mask=here)
        s = tl.where(kept(rows, columns, N, M, RULE, EXCLUDE, PRECISION), s, float("-inf"))
    top = tl.max(s, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    e = tl.exp2(s - top[:, None])
    place = tl.program_id(1) * height + at
    tl.store(TOPS + place, top, mask=at < height)
    tl.store(PARTS + place, top + tl.log2(tl.sum(e, 1)), mask=at < height)
    inside = (at < height)[:, None] & (columns < M)[None, :]
    tl.store(E + at.to(tl.int64)[:, None] * e_row + columns[None, :], e.to(E.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(E, TOPS, LSE, SLOPE, height, M, e_row, SHIFT: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """E[i, j] becomes w_ij 2^SHIFT, a row tile of the tiles that made it at a time."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < height
    top = tl.load(TOPS + tl.program_id(1) * height + rows, mask=inside, other=0.0)
    lse = tl.load(LSE + rows, mask=inside, other=0.0) * LOG2E
    factor = tl.load(SLOPE + rows, mask=inside, other=0.0) * tl.exp2(tl.minimum(top - lse, 0.0) + SHIFT)
    place = E + rows.to(tl.int64)[:, None] * e_row + columns[None, :]
    mask = inside[:, None] & (columns < M)[None, :]
    e = tl.load(place, mask=mask, other=0.0)
    tl.store(place, (e.to(tl.float32) * factor[:, None]).to(e.dtype), mask=mask)


def softmax_loss(q, k, temperature, rule, weights, needs_q, needs_k, needs_temperature, dtype):
    """(loss, dq (N, D) or empty, dk (M, D) or empty, dτ or empty) of rows that were given in dtype; see
    operations.softmax_loss."""
    q, k = (x if x.stride(1) == 1 else x.contiguous() for x in (q, k))
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)
    n, m, height = len(q), len(k), min(len(q), strip_height(q, k))
    needed = (q, needs_q or needs_temperature), (k, needs_k)
    dq, dk = (new(len(x) if wanted else 0, x.shape[1]).zero_() for x, wanted in needed)
    blocks = tile(q, rule)
    pointers, sizes, rest = arguments(q, k, temperature, rule, blocks)
    tiles = triton.cdiv(m, blocks["BLOCK_M"])
    whole_words = triton.cdiv(m, 16) * 16                      # 16 bytes at least
    strip = torch.empty(height, whole_words, dtype=q.dtype, device=q.device)
    tops, parts, positive = new(tiles * height), new(tiles * height), new(height)
    lse, slope, loss = new(1, n), new(1, n), []
    for i in range(0, n, height):
        at = slice(i, min(i + height, n))
        w = strip[:at.stop - i, :m]
        grid = triton.cdiv(len(w), blocks["BLOCK_N"]), tiles
        strip_kernel[grid](w, tops, parts, positive, *pointers, *sizes, first_row=i, height=len(w),
                           e_row=strip.stride(0), **rest)
        of_strip = parts[:tiles * len(w)].view(tiles, len(w))
        of_rows = None if weights is None else weights[at]
        loss.append(merge(lse[:, at], of_strip, True, positive, slope[:, at], of_rows, of=n))
        if weights is not None:
            slope[:, at] *= of_rows
        scale_kernel[triton.cdiv(len(w), 32), tiles](w, tops, lse[0, at], slope[0, at], len(w), m,
                                                     strip.stride(0), SHIFT=SHIFT, BLOCK_N=32,
                                                     BLOCK_M=blocks["BLOCK_M"])
        if len(dq):
            add_product(dq[at], w, k)
        if len(dk):
            add_product(dk, w.T, q[at])
    *_, taken = pointers
    rest = rule.exclude, new().fill_(1), 1 / n if weights is None else 1.0, True
    del strip, w, tops, parts
    dtype = gradient_dtype(dtype, temperature, "triton")
    dt = new(0)
    if len(dq):
        dq, dot = finished(dq, q, k, taken, slope[0], None, *rest, needs_temperature, dtype)
    if needs_temperature:
        dt = -dot.sum() / temperature
    if len(dk):
        dk, _ = finished(dk, k, q, swapped(taken), None, slope[0], *rest, False, dtype)
    return torch.stack(loss).sum(), dq.to(dtype), dk.to(dtype), dt
