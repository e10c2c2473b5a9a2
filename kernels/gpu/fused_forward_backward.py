"""Compute loss and gradient in one pass, if the loss has a row softmax only and D is large.

Once the sum l_i of a row is known, the gradient of this row can be computed. Only the upstream gradient is
still unknown: one number, by which backward multiplies the gradients. So no logit is computed twice: one pass
takes 6 N·M·D operations, like eager; separate forward and backward passes would take 8. The logits are
computed in strips. A strip is a set I of rows, with all columns. For each strip, with s in log2 units:

    e_ij = exp2(s_ij)            tile by tile, in q's dtype, and Σ_j e_ij of each tile    sums_kernel
    l_i, dloss_dlse_i, loss      from the sums of all tiles of a row                      merge_stats_kernel
    f_i = dloss_dlse_i / l_i     factor of row i; it multiplies q_i, not e_i              scale_queries_kernel
    dq_I = f_I (e k)             dk += eᵀ (f_I q_I)                                       cuBLAS

The terms of the positives are added at the end: −dloss_dlse_i k⁺_i in the gradient of q_i, and −dloss_dlse_i
q_i in that of k⁺_i, the positive of row i. Then dq and dk are multiplied by 1/τ and constants such as 1/N.

This first method needs a shift of 0 (shift.py) and a dtype with the range of float32. If the shift is not 0,
or there is none, a second method subtracts the maximum m_iJ of each row i in tile (I, J), and
scale_strip_kernel turns e into weights w. These contain the factor f_i, so dq_I = w k and dk += wᵀ q_I:

    e_ij = exp2(s_ij − m_iJ)     w_ij = e_ij · f_i exp2(m_iJ − m_i)                       scale_strip_kernel

In float16, or for at most SHIFT_LOGITS logits, only the second method runs. Otherwise the host launches both,
because only the GPU knows whether the shift is 0. Kernels of the unused method do nothing or copy q. With
shift 0, strips are written once and read twice: 6 N·M bytes in half types. Strips add to dk in a fixed order:
the same input gives the same bits.
"""
import torch
import triton.language as tl

from .heuristics import cdiv, gradient_dtype, round_up, strip_height
from .launch import aligned, capability, kernel_args, launch, persistent_grid, temperature_of, tile_config
from .lse_forward import merge_stats, sums_kernel
from .products import (
    GradientScaling, add_product, finish_gradients, gradient_of_temperature, gradient_sums, without_padding)
from .shift import Sides, SoftmaxSide, as_side, new_sides, shift_of_norms
from .tiles import cast_for_matmul, kernel

MIN_WIDE_D = 2048                        # from this D on, tiles of half types can have 256 columns on an H100


@kernel
def scale_strip_kernel(E, TABLE, FACTOR, M_ROW, SHIFT, height, M, e_row_stride, PRECISION: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Turn the exponentials E into weights WEIGHT_SCALE · w_ij, in place. Do nothing if SHIFT is 0.

    TABLE          (2, column tiles, height) from sums_kernel: TABLE[0] are the maxima m_iJ
    FACTOR, M_ROW  (height,) factor and m of the rows, see shift.SoftmaxSide
    """
    tiles_j = tl.cdiv(M, BLOCK_M)
    tiles = tl.cdiv(height, BLOCK_N) * tiles_j
    if SHIFT is not None:
        tiles = tl.where(tl.load(SHIFT) == 0.0, 0, tiles)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = tile // tiles_j * BLOCK_N + tl.arange(0, BLOCK_N)
        tile_j = tile % tiles_j
        columns = tile_j * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = rows < height
        tile_m = tl.load(TABLE + tile_j * height + rows, mask=inside, other=0.0)
        m_i = tl.load(M_ROW + rows, mask=inside, other=0.0)
        factor = tl.load(FACTOR + rows, mask=inside, other=0.0) * tl.exp2(tile_m - m_i)
        place = E + rows.to(tl.int64)[:, None] * e_row_stride + columns[None, :]
        mask = inside[:, None] & (columns < M)[None, :]
        e = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, cast_for_matmul(e * factor[:, None], E, PRECISION), mask=mask)


@kernel
def scale_queries_kernel(SCALED_Q, Q, FACTOR, SHIFT, count, features, q_stride, PRECISION: tl.constexpr,
                         BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write FACTOR[i] · q_i to SCALED_Q. If SHIFT is not 0, write q_i: the strip is then already scaled."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    factor = tl.load(FACTOR + rows, mask=rows < count, other=0.0)
    factor = tl.where(tl.load(SHIFT) == 0.0, factor, 1.0)
    inside = (rows < count)[:, None] & (d < features)[None, :]
    at = rows.to(tl.int64)[:, None]
    q = tl.load(Q + at * q_stride + d[None, :], mask=inside, other=0.0)
    tl.store(SCALED_Q + at * features + d[None, :], cast_for_matmul(q * factor[:, None], SCALED_Q, PRECISION),
             mask=inside)


def softmax_loss(call, both, weights, needs):
    """Return (loss, dq (N, D), dk (M, D), dτ) for both=False. Unneeded dq, dk are empty, dτ is None."""
    given, sums = call.rounded, gradient_sums(call, needs)
    loss, side, shift = accumulate_strips(*sums, given, weights)
    factor = 1 / len(call.q) if weights is None else 1.0
    scaling = GradientScaling(None, factor, True, gradient_dtype(call.q.dtype))
    sides = Sides(as_side(side), SoftmaxSide())
    dq, dk, dot = finish_gradients(sums, given, sides, scaling, needs[2], shift)
    return loss, dq, dk, gradient_of_temperature(call, dot, needs)


def accumulate_strips(dq, dk, given, weights):
    """Compute the loss, and add the products of all strips to dq and to dk; an empty dq or dk stays empty.

    given    the call, with q and k in the dtype of products
    returns  (loss, vectors (3, padded N) of the row softmax for shift.as_side, shift). If shift is 0, the
             caller must still multiply each row of dq by its factor f_i
    """
    call = aligned(given)
    q, k = without_padding(call, given)
    (n, features), m = q.shape, len(k)                             # m is the number of keys
    shift = None if q.dtype == torch.float16 else shift_of_norms(call)[0]
    height = min(n, strip_height(q.element_size(), m, features))
    config = tile_config(q, call.mask)
    wide = features >= MIN_WIDE_D and call.mask.exclude != "pair"  # with "pair", registers would spill
    if wide and q.element_size() == 2 and capability(q) == 9 and config["BLOCK_M"] == 128:
        config |= dict(BLOCK_M=256, num_warps=8)
    operands, rest = kernel_args(call, config)
    strip = q.new_empty(round_up(height, config["BLOCK_N"]), round_up(m, config["BLOCK_M"]))
    tiles, precision = strip.shape[1] // config["BLOCK_M"], config["PRECISION"]
    side = new_sides(1, n, q.device)
    table, positive, stats = (side.new_empty(size) for size in (2 * tiles * height, n, (1, 2, height)))
    scaled_q, tau_mask, losses = q.new_empty(height, features), temperature_of(call), []
    for i in range(0, n, height):
        count = min(height, n - i)
        at = slice(i, i + count)
        w, x, side_at = strip[:count, :m], q[at], side[..., at]
        for maxima in (True,) if shift is None else (False, True):    # of two launches, one returns at once
            all_tiles = cdiv(count, config["BLOCK_N"]) * tiles
            launch(sums_kernel, persistent_grid(all_tiles, q, config["num_warps"]),
                   table, None, strip, positive, shift, all_tiles, i, 0, count, m, strip.stride(0), *operands,
                   MAXIMA=maxima, TRIANGLE=False, **rest)
        strip_table = table[:2 * tiles * count].view(2, tiles, count)
        losses.append(merge_stats(stats[..., :count], strip_table, True, None, positive[at], side_at,
                                  None if weights is None else weights[at], tau_mask, n))
        factor, m_row, _ = side_at[0]
        launch(scale_strip_kernel, persistent_grid(cdiv(count, 32) * tiles, q),
               strip, table, factor, m_row, shift, count, m, strip.stride(0), PRECISION=precision, BLOCK_N=32,
               BLOCK_M=config["BLOCK_M"])
        if len(dq):
            add_product(dq[at], w, k, True)
        if shift is not None:
            launch(scale_queries_kernel, (cdiv(count, 32), cdiv(features, 128)), scaled_q, x, factor, shift,
                   count, features, q.stride(0), PRECISION=precision, BLOCK_N=32, BLOCK_D=128)
            x = scaled_q[:count]
        if len(dk):
            add_product(dk, w.T, x, i == 0)
    loss = losses[0] if len(losses) == 1 else torch.cat(losses)
    return loss.sum(), side[0], shift
