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
import torch
import triton
import triton.language as tl

from ..paths import gradient_dtype, strip_height
from .gradient import SHIFT
from .gradient_blocks import GROUP, add_product, finished
from .launch import arguments, check_device, multiplicands, scale_of, tile, turned
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
def strip_kernel(E, PARTS, POSITIVE, REFERENCE, Q, K, RULE, N, M, D, q_row, k_row, first_row, height,
                 tiles_x, tiles_y, e_row, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """E[i, j] = exp2(s − top), PARTS[:, J, i] = top, Σ_j exp2(s − top), POSITIVE[i] of rows first_row + i;
    folded, top is 0 and not stored."""
    tile_i, tile_j = grouped(tl.program_id(0), tiles_x, tiles_y, GROUP)
    row, column = first_row + tile_i * BLOCK_N, tile_j * BLOCK_M
    rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
    at = rows - first_row
    s = product(Q, K, row, column, N, M, D, q_row, k_row, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
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


@triton.jit
def factors_of(SUMS, SLOPE, rows, inside, apart, SHIFT: tl.constexpr):
    """own_factors of rows."""
    top = tl.load(SUMS + rows, mask=inside, other=0.0)
    total = tl.load(SUMS + apart + rows, mask=inside, other=0.0)
    return own_factors(top, total, tl.load(SLOPE + rows, mask=inside, other=0.0), SHIFT)


@kernel
def scale_kernel(E, PARTS, SUMS, SLOPE, REFERENCE, height, apart, M, e_row, PRECISION: tl.constexpr,
                 SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """E[i, j] becomes w_ij 2^SHIFT, a row tile of the tiles that made it at a time."""
    if is_folded(REFERENCE):
        return
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < height
    of_tile = tl.load(PARTS + tl.program_id(1) * height + rows, mask=inside, other=0.0)
    a, b = factors_of(SUMS, SLOPE, rows, inside, apart, SHIFT)
    factor = a * tl.exp2(of_tile - b)
    place = E + rows.to(tl.int64)[:, None] * e_row + columns[None, :]
    mask = inside[:, None] & (columns < M)[None, :]
    e = tl.load(place, mask=mask, other=0.0)
    tl.store(place, stored(e.to(tl.float32) * factor[:, None], E, PRECISION), mask=mask)


@kernel
def fold_kernel(FOLDED, SCALES, Q, SUMS, SLOPE, REFERENCE, count, apart, features, q_row,
                PRECISION: tl.constexpr, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """SCALES[i] = f_i 2^SHIFT and FOLDED[i] = f_i 2^SHIFT q_i; 1 and q_i where the strip has the factor."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    scale, _ = factors_of(SUMS, SLOPE, rows, rows < count, apart, SHIFT)
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
    given_q, given_k = (x if x.stride(1) == 1 else x.contiguous() for x in (q, k))
    q, k = multiplicands(q, k)
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)
    n, m, height = len(q), len(k), min(len(q), strip_height(q, k))
    reference = None if q.dtype == torch.float16 else reference_of(q, k, temperature)
    needed = (q, needs_q or needs_temperature), (k, needs_k)
    dq, dk = (new(len(x) if wanted else 0, x.shape[1]).zero_() for x, wanted in needed)
    blocks = tile(q, rule)
    pointers, sizes, rest = arguments(q, k, temperature, rule, blocks)
    whole = lambda count, block: triton.cdiv(count, blocks[block]) * blocks[block]
    strip = torch.empty(whole(height, "BLOCK_N"), whole(m, "BLOCK_M"), dtype=q.dtype, device=q.device)
    tiles, precision = strip.shape[1] // blocks["BLOCK_M"], blocks["PRECISION"]
    parts, positive, number = new(2 * tiles * height), new(height), scale_of(temperature, q)
    sums, slope, scales, loss = new(1, 2, n), new(1, n), new(n), []
    folded = torch.empty(height, q.shape[1], dtype=q.dtype, device=q.device)
    for i in range(0, n, height):
        at = slice(i, min(i + height, n))
        w = strip[:at.stop - i, :m]
        rows = triton.cdiv(len(w), blocks["BLOCK_N"])
        strip_kernel[rows * tiles,](strip, parts, positive, reference, *pointers, *sizes, first_row=i,
                                    height=len(w), tiles_x=rows, tiles_y=tiles, e_row=strip.stride(0),
                                    GROUP=GROUP, **rest)
        of_strip = parts[:2 * tiles * len(w)].view(2, tiles, len(w))
        of_rows = None if weights is None else weights[at]
        loss.append(merge(sums[..., at], of_strip, True, None, positive, slope[:, at], of_rows, number, n,
                          reference))
        if weights is not None:
            slope[:, at] *= of_rows
        of_rows = sums[..., at], slope[0, at], reference, len(w), n
        scale_kernel[triton.cdiv(len(w), 32), tiles](strip, parts, *of_rows, m, strip.stride(0), precision,
                                                     SHIFT, BLOCK_N=32, BLOCK_M=blocks["BLOCK_M"])
        if len(dq):
            add_product(dq[at], w, k)
        x = q[at]
        if reference is not None:
            x = folded[:len(w)]
            grid = triton.cdiv(len(w), 32), triton.cdiv(q.shape[1], 128)
            fold_kernel[grid](x, scales[at], q[at], *of_rows, q.shape[1], q.stride(0), precision,
                              SHIFT, BLOCK_N=32, BLOCK_D=128)
        if len(dk):
            add_product(dk, w.T, x)
    *_, taken = pointers
    side, no_side = Side(sums[0], slope[0]), Side()
    dtype, dt = gradient_dtype(dtype, temperature, "triton"), new(0)
    rest = rule.exclude, new().fill_(1), 1 / n if weights is None else 1.0, True, dtype, SHIFT
    del strip, w, parts, folded, x
    if len(dq):
        scales = None if reference is None else scales
        dq, dot = finished(dq, given_q, given_k, taken, side, no_side, *rest, needs_temperature, scales)
    if needs_temperature:
        dt = -dot.sum() / temperature
    if len(dk):
        dk, _ = finished(dk, given_k, given_q, turned(taken), no_side, side, *rest, False)
    return torch.stack(loss).sum(), dq.to(dtype), dk.to(dtype), dt
