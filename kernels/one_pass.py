"""Loss and gradient of wide rows in one pass: strips of the softmax, made once and used twice.

One direction of a mean loss knows its own gradient as soon as the rows' sums are known, so nothing is
computed again: 6 N·M·D operations, as many as eager, where forward and backward apart take 8. For each strip
of rows I and all columns:

    e_ij = exp2(s_ij)                by tiles, in q's dtype, and Σ_j of each tile         strip_kernel
    lse_i, slope_i, loss             from the sums of all tiles                           merge_kernel
    f_i = slope_i exp2(−lse_i)       a factor of a row: it stays out of the strip         fold_kernel
    dq_I = f_I (e k) − slope_I k_pos             dk += eᵀ (f_I q_I) − …                   cuBLAS

That takes |s| ≤ 106 and a type of float32's range (reference.py). Else, and in float16, tiles have their own
row maxima, which need no bound, and one more pass over the strip makes weights of them:

    e_ij = exp2(s_ij − top_iJ)       w_ij = e_ij · slope_i exp2(top_iJ − lse_i)           scale_kernel

The device looks at the bound, so that nothing waits. Strips are as tall as paths.STRIP allows; Σ_i is done in
their order, so the same input gives the same bits.
"""
import torch
import triton
import triton.language as tl

from .gradient import SHIFT
from .gradient_blocks import GROUP, add_product, finished
from .launch import arguments, check_device, multiplicands, tile, turned
from .lse_forward import merge
from .paths import gradient_dtype, strip_height
from .reference import Side, reference_of
from .tiles import LOG2E, grouped, kept, kernel, octaves, positive_of, product, stored, touched


@triton.jit
def is_folded(REFERENCE):
    """Whether exp2(s) needs no maximum: row factors then stay out of the strip."""
    folded = False
    if REFERENCE is not None:
        folded = tl.load(REFERENCE) == 0.0
    return folded


@kernel
def strip_kernel(E, TOPS, PARTS, POSITIVE, REFERENCE, Q, K, RULE, N, M, D, q_row, k_row, first_row, height,
                 tiles_x, tiles_y, e_row, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """E[i, j] = exp2(s − TOPS[J, i]), PARTS[J, i] = log2 Σ_j exp2(s), POSITIVE[i] of rows first_row + i."""
    tile_i, tile_j = grouped(tl.program_id(0), tiles_x, tiles_y, GROUP)
    row, column = first_row + tile_i * BLOCK_N, tile_j * BLOCK_M
    rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
    at = rows - first_row
    s = product(Q, K, row, column, N, M, D, q_row, k_row, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    s = s * octaves(RULE)
    if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
        target = positive_of(rows, N, RULE, EXCLUDE)
        here = (at < height) & (target >= column) & (target < column + BLOCK_M) & (target < M)
        tl.store(POSITIVE + at, tl.sum(tl.where(columns[None, :] == target[:, None], s, 0.0), 1), mask=here)
        s = tl.where(kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), s, float("-inf"))
    place = tile_j * height + at
    if is_folded(REFERENCE):
        e = tl.exp2(s)
        part = tl.log2(tl.sum(e, 1))
    else:
        top = tl.max(s, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        e = tl.exp2(s - top[:, None])
        part = top + tl.log2(tl.sum(e, 1))
        tl.store(TOPS + place, top, mask=at < height)
    tl.store(PARTS + place, part, mask=at < height)
    tl.store(E + at.to(tl.int64)[:, None] * e_row + columns[None, :], stored(e, E, PRECISION))


@kernel
def scale_kernel(E, TOPS, LSE, SLOPE, REFERENCE, height, M, e_row, PRECISION: tl.constexpr,
                 SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """E[i, j] becomes w_ij 2^SHIFT, a row tile of the tiles that made it at a time."""
    if is_folded(REFERENCE):
        return
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < height
    top = tl.load(TOPS + tl.program_id(1) * height + rows, mask=inside, other=0.0)
    lse = tl.load(LSE + rows, mask=inside, other=0.0) * LOG2E
    factor = tl.load(SLOPE + rows, mask=inside, other=0.0) * tl.exp2(tl.minimum(top - lse, 0.0) + SHIFT)
    place = E + rows.to(tl.int64)[:, None] * e_row + columns[None, :]
    mask = inside[:, None] & (columns < M)[None, :]
    e = tl.load(place, mask=mask, other=0.0)
    tl.store(place, stored(e.to(tl.float32) * factor[:, None], E, PRECISION), mask=mask)


@kernel
def fold_kernel(FOLDED, SCALES, Q, LSE, SLOPE, REFERENCE, count, features, q_row, PRECISION: tl.constexpr,
                SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """SCALES[i] = f_i 2^SHIFT and FOLDED[i] = f_i 2^SHIFT q_i; 1 and q_i where the strip has the factor."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lse = tl.load(LSE + rows, mask=rows < count, other=0.0) * LOG2E
    scale = tl.load(SLOPE + rows, mask=rows < count, other=0.0) * tl.exp2(SHIFT - lse)
    scale = tl.where(is_folded(REFERENCE), tl.where(lse == float("-inf"), 0.0, scale), 1.0)
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
    tops, parts, positive = new(tiles * height), new(tiles * height), new(height)
    lse, slope, scales, loss = new(1, n), new(1, n), new(n), []
    folded = torch.empty(height, q.shape[1], dtype=q.dtype, device=q.device)
    for i in range(0, n, height):
        at = slice(i, min(i + height, n))
        w = strip[:at.stop - i, :m]
        rows = triton.cdiv(len(w), blocks["BLOCK_N"])
        strip_kernel[rows * tiles,](strip, tops, parts, positive, reference, *pointers, *sizes, first_row=i,
                                    height=len(w), tiles_x=rows, tiles_y=tiles, e_row=strip.stride(0),
                                    GROUP=GROUP, **rest)
        of_strip = parts[:tiles * len(w)].view(tiles, len(w))
        of_rows = None if weights is None else weights[at]
        loss.append(merge(lse[:, at], of_strip, True, positive, slope[:, at], of_rows, of=n))
        if weights is not None:
            slope[:, at] *= of_rows
        of_rows = lse[0, at], slope[0, at], reference
        scale_kernel[triton.cdiv(len(w), 32), tiles](strip, tops, *of_rows, len(w), m, strip.stride(0),
                                                     precision, SHIFT, BLOCK_N=32, BLOCK_M=blocks["BLOCK_M"])
        if len(dq):
            add_product(dq[at], w, k)
        x = q[at]
        if reference is not None:
            x = folded[:len(w)]
            grid = triton.cdiv(len(w), 32), triton.cdiv(q.shape[1], 128)
            fold_kernel[grid](x, scales[at], q[at], *of_rows, len(w), q.shape[1], q.stride(0), precision,
                              SHIFT, BLOCK_N=32, BLOCK_D=128)
        if len(dk):
            add_product(dk, w.T, x)
    *_, taken = pointers
    side, no_side = Side(lse[0], slope[0]), Side()
    dtype, dt = gradient_dtype(dtype, temperature, "triton"), new(0)
    rest = rule.exclude, new().fill_(1), 1 / n if weights is None else 1.0, True, dtype, SHIFT
    del strip, w, tops, parts, folded, x
    if len(dq):
        scales = None if reference is None else scales
        dq, dot = finished(dq, given_q, given_k, taken, side, no_side, *rest, needs_temperature, scales)
    if needs_temperature:
        dt = -dot.sum() / temperature
    if len(dk):
        dk, _ = finished(dk, given_k, given_q, turned(taken), no_side, side, *rest, False)
    return torch.stack(loss).sum(), dq.to(dtype), dk.to(dtype), dt
