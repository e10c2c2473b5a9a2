"""Loss and gradient of wide rows in one pass: strips of the softmax, made once and used twice.

One direction of a mean loss knows its own gradient as soon as the rows' sums are known, so nothing is
computed again: 6 N·M·D operations, as many as eager, where forward and backward apart take 8. For each strip
of rows I and all columns:

    e_ij = exp2(s_ij)                by tiles, in q's dtype, and Σ_j of each tile         strip_kernel
    total_i, slope_i, loss           from the sums of all tiles                           merge_kernel
    f_i = slope_i / total_i          a factor of a row: it stays out of the strip         fold_kernel
    dq_I = f_I (e k) − slope_I k_pos             dk += eᵀ (f_I q_I) − …                   cuBLAS

That takes |s| ≤ 106 and a type of float32's range (reference.py). Else, and in float16, tiles have their own
row maxima, which need no bound, and one more pass over the strip makes weights of them:

    e_ij = exp2(s_ij − top_iJ)       w_ij = e_ij · f_i exp2(top_iJ − top_i)               scale_kernel

The device looks at the bound, so that nothing waits. Strips are as tall as paths.STRIP allows; Σ_i is done in
their order, so the same input gives the same bits.
"""
import functools

import torch
import triton
import triton.language as tl

from ..paths import gradient_dtype, strip_height
from .gradient_blocks import add_product, finished, zeros
from .launch import Ending, arguments, check_device, multiplicands, rows_in_place, scale_of, tile
from .lse_forward import keep_positives, merge
from .reference import Side, reference_of
from .tiles import (
    finite,
    grouped,
    is_folded,
    kept,
    kernel,
    octaves,
    own_factors,
    power,
    product,
    stored,
    touched,
)


@kernel
def strip_kernel(E, PARTS, POSITIVE, REFERENCE, first_row, height, tiles_x, tiles_y, e_row,
                 Q, K, RULE, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """E[i, j] = exp2(s − top), PARTS[:, J, i] = top, Σ_j exp2(s − top), POSITIVE[i] of rows first_row + i;
    folded, top is 0 and not stored."""
    tile_i, tile_j = grouped(tl.program_id(0), tiles_x, tiles_y)
    row, column = first_row + tile_i * BLOCK_N, tile_j * BLOCK_M
    rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
    at = rows - first_row
    s = product(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
        keep_positives(POSITIVE - first_row, s, rows, column, 0, N, M, RULE, EXCLUDE, BLOCK_M, False)
        s = tl.where(kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), s, float("-inf"))
    scale, place = octaves(RULE), PARTS + tile_j * height + at
    if is_folded(REFERENCE):
        e = power(s, scale, 0.0)
    else:
        top = tl.max(s, 1) * scale
        e = power(s, scale, finite(top)[:, None])
        tl.store(place, top, mask=at < height)
    tl.store(place + tl.cdiv(M, BLOCK_M) * height, tl.sum(e, 1), mask=at < height)
    tl.store(E + at.to(tl.int64)[:, None] * e_row + columns[None, :], stored(e, E, PRECISION))


@kernel
def scale_kernel(E, PARTS, SUMS, SLOPE, REFERENCE, height, apart, M, e_row, PRECISION: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """E[i, j] becomes w_ij WEIGHT_SCALE, a row tile of the tiles that made it at a time."""
    if is_folded(REFERENCE):
        return
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < height
    of_tile = tl.load(PARTS + tl.program_id(1) * height + rows, mask=inside, other=0.0)
    a, b = own_factors(SUMS, SLOPE, rows, inside, apart)
    factor = a * tl.exp2(of_tile - b)
    place = E + rows.to(tl.int64)[:, None] * e_row + columns[None, :]
    mask = inside[:, None] & (columns < M)[None, :]
    e = tl.load(place, mask=mask, other=0.0)
    tl.store(place, stored(e.to(tl.float32) * factor[:, None], E, PRECISION), mask=mask)


@kernel
def fold_kernel(FOLDED, SCALES, Q, SUMS, SLOPE, REFERENCE, count, apart, features, q_row,
                PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """SCALES[i] = f_i WEIGHT_SCALE, FOLDED[i] = SCALES[i] q_i; 1 and q_i where the strip has the factor."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    scale, _ = own_factors(SUMS, SLOPE, rows, rows < count, apart)
    scale = tl.where(is_folded(REFERENCE), scale, 1.0)
    tl.store(SCALES + rows, scale, mask=rows < count)
    inside = (rows < count)[:, None] & (d < features)[None, :]
    at = rows.to(tl.int64)[:, None]
    q = tl.load(Q + at * q_row + d[None, :], mask=inside, other=0.0)
    tl.store(FOLDED + at * features + d[None, :], stored(q * scale[:, None], FOLDED, PRECISION), mask=inside)


def softmax_loss(q, k, temperature, rule, weights, needs_q, needs_k, needs_temperature, dtype):
    """(loss, dq (N, D) or empty, dk (M, D) or empty, dτ or empty) of rows that were given in dtype; see
    operations.softmax_loss."""
    check_device(q)
    given = rows_in_place(q), rows_in_place(k)
    q, k = multiplicands(q, k)
    gradients = zeros(q, k, needs_q, needs_k, needs_temperature)
    loss, side, scales, taken = add_strips(*gradients, q, k, temperature, rule, weights)
    unit = 1 / len(q) if weights is None else 1.0
    ending = Ending(loss.new_ones(()), unit, True, gradient_dtype(dtype, temperature, "triton"))
    dq, dk, dot = finished(gradients, *given, taken, rule.exclude, side, Side(), ending, needs_temperature,
                           scales)
    return loss, dq, dk, -dot.sum() / temperature if needs_temperature else loss.new_empty(0)


def add_strips(dq, dk, q, k, temperature, rule, weights):
    """(loss, the Side of its softmax, scales of rows of dq (N,) or None, KernelRule); dq and dk, either of
    which may be empty, take in the strips' products, rows of dq still without their factor where it has
    scales."""
    new = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    n, m, height = len(q), len(k), min(len(q), strip_height(q, k))
    reference = None if q.dtype == torch.float16 else reference_of(q, k, temperature)
    blocks = tile(q, rule)
    operands, rest = arguments(q, k, temperature, rule, blocks)
    whole = lambda count, block: triton.cdiv(count, blocks[block]) * blocks[block]
    strip = torch.empty(whole(height, "BLOCK_N"), whole(m, "BLOCK_M"), dtype=q.dtype, device=q.device)
    tiles, precision = strip.shape[1] // blocks["BLOCK_M"], blocks["PRECISION"]
    parts, positive, number = new(2 * tiles * height), new(height), scale_of(temperature, q)
    sums, slope, loss = new(1, 2, n), new(1, n), []
    scales = None if reference is None else new(n)
    folded = torch.empty(height, q.shape[1], dtype=q.dtype, device=q.device)
    for i in range(0, n, height):
        at = slice(i, min(i + height, n))
        w, x = strip[:at.stop - i, :m], q[at]
        rows = triton.cdiv(len(w), blocks["BLOCK_N"])
        strip_kernel[rows * tiles,](strip, parts, positive, reference, i, len(w), rows, tiles,
                                    strip.stride(0), *operands, **rest)
        of_strip = parts[:2 * tiles * len(w)].view(2, tiles, len(w))
        own_weights = None if weights is None else weights[at]
        loss.append(merge(sums[..., at], of_strip, True, None, positive, slope[:, at], own_weights, number, n,
                          reference))
        if weights is not None:
            slope[:, at] *= own_weights
        of_rows = sums[..., at], slope[0, at], reference, len(w), n
        scale_kernel[triton.cdiv(len(w), 32), tiles](strip, parts, *of_rows, m, strip.stride(0), precision,
                                                     BLOCK_N=32, BLOCK_M=blocks["BLOCK_M"])
        if len(dq):
            add_product(dq[at], w, k)
        if reference is not None:
            grid = triton.cdiv(len(w), 32), triton.cdiv(q.shape[1], 128)
            fold_kernel[grid](folded[:len(w)], scales[at], x, *of_rows, q.shape[1], q.stride(0), precision,
                              BLOCK_N=32, BLOCK_D=128)
            x = folded[:len(w)]
        if len(dk):
            add_product(dk, w.T, x)
    return torch.stack(loss).sum(), Side(sums[0], slope[0]), scales, operands[2]
