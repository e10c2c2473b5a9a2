"""Loss with a row softmax, and its gradient, in one pass, for large D.

Each strip of exponentials is used for the loss and for both products of the gradient. The gradient of a row
is known as soon as that row's sum is known, except for the upstream gradient, one number that multiplies
everything later. So no logit is computed again: 6 N·M·D operations, as many as eager, where separate forward
and backward passes take 8. A strip is some rows I with all columns. For each strip (s in log2 units, f_i the
factor of row i):

    e_ij = exp2(s_ij)            tile by tile, in q's dtype, and Σ_j e_ij of each tile    strip_kernel
    l_i, dloss_dlse_i, loss      from the sums of all tiles of a row                      merge_stats_kernel
    f_i = dloss_dlse_i / l_i     multiplied into q, not into the strip                    scale_queries_kernel
    dq_I = f_I (e k)             dk += eᵀ (f_I q_I)                                       cuBLAS

The terms of the positives, −dloss_dlse_i k_p in dq_i and −dloss_dlse_i q_i in dk_p, are added at the end.

exp2 without a maximum needs |s| ≤ 106, which makes the shift 0 (bound.py), and a type with float32's range.
Otherwise, and always in float16, each tile (I, J) subtracts its own row maxima, and one more kernel turns the
strip into weights. They contain f_i, so neither q nor dq has to be multiplied by it:

    e_ij = exp2(s_ij − m_iJ)     w_ij = e_ij · f_i exp2(m_iJ − m_i)                       scale_strip_kernel

The kernels read the shift on the GPU, so there is no synchronisation: scale_strip_kernel is always launched,
and returns immediately if the shift is 0. A strip is written once and read twice, 6 N·M bytes in half types;
scale_strip_kernel reads and writes it once more. A strip has at most heuristics.STRIP_BYTES. The strips'
products are added to dk in order, so the same input gives the same bits.
"""
import functools

import torch
import triton.language as tl

from ..heuristics import gradient_dtype, strip_height
from .bound import SoftmaxSide, bound_of_norms, has_few_rows
from .gradient_large_d import add_product, finish_gradients, gradient_sums
from .launch import (
    GradientScaling, aligned_operands, ceil_div, check_device, contiguous_rows, kernel_args,
    temperature_only_mask, tile_config, total, without_padding)
from .lse_forward import merge_stats, save_positives
from .tiles import (
    bound_is_zero, cast_for_matmul, exp2_scaled, finite_max, keep_mask, kernel, log2e_over_tau, needs_mask,
    qk_tile, row_factors, swizzle_program_id)


@kernel
def strip_kernel(E, TABLE, POSITIVE, BOUND, first_row, height, tiles_x, tiles_y, e_row_stride,
                 Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a strip of exponentials E[i, j] = exp2(s − m) for rows first_row + i, and their sums.

    TABLE     (2, column tiles, height): m and l of each row per tile; if BOUND is 0, m is 0 and not written
    POSITIVE  (height,) dot products of the positives
    """
    tile_i, tile_j = swizzle_program_id(tl.program_id(0), tiles_x, tiles_y)
    row, column = first_row + tile_i * BLOCK_N, tile_j * BLOCK_M
    rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
    at = rows - first_row
    qk = qk_tile(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    if needs_mask(row, column, N, M, MASK, EXCLUDE, BLOCK_N, BLOCK_M):
        save_positives(POSITIVE - first_row, qk, rows, column, 0, N, M, MASK, EXCLUDE, BLOCK_M, False)
        qk = tl.where(keep_mask(rows, column, 0, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M), qk, float("-inf"))
    scale, place = log2e_over_tau(MASK), TABLE + tile_j * height + at
    if bound_is_zero(BOUND):
        e = exp2_scaled(qk, scale, 0.0)
    else:
        m_i = tl.max(qk, 1) * scale
        e = exp2_scaled(qk, scale, finite_max(m_i)[:, None])
        tl.store(place, m_i, mask=at < height)
    tl.store(place + tl.cdiv(M, BLOCK_M) * height, tl.sum(e, 1), mask=at < height)
    tl.store(E + at.to(tl.int64)[:, None] * e_row_stride + columns[None, :], cast_for_matmul(e, E, PRECISION))


@kernel
def scale_strip_kernel(E, TABLE, STATS, DLOSS_DLSE, BOUND, height, l_offset, M, e_row_stride,
                       PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Turn the exponentials E into weights, WEIGHT_SCALE · w_ij, in place; do nothing if BOUND is 0.

    A program takes BLOCK_N rows of one column tile of strip_kernel; their maxima are in TABLE.
    """
    if bound_is_zero(BOUND):
        return
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < height
    tile_m = tl.load(TABLE + tl.program_id(1) * height + rows, mask=inside, other=0.0)
    row_factor, m_i = row_factors(STATS, DLOSS_DLSE, rows, inside, l_offset)
    factor = row_factor * tl.exp2(tile_m - m_i)
    place = E + rows.to(tl.int64)[:, None] * e_row_stride + columns[None, :]
    mask = inside[:, None] & (columns < M)[None, :]
    e = tl.load(place, mask=mask, other=0.0)
    tl.store(place, cast_for_matmul(e.to(tl.float32) * factor[:, None], E, PRECISION), mask=mask)


@kernel
def scale_queries_kernel(SCALED_Q, ROW_FACTORS, Q, STATS, DLOSS_DLSE, BOUND, count, l_offset, features,
                         q_stride, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write ROW_FACTORS[i] = WEIGHT_SCALE · f_i and SCALED_Q[i] = ROW_FACTORS[i] · q_i.

    If BOUND is not 0, the strip already contains the factor: then write 1 and q_i.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    factor, _ = row_factors(STATS, DLOSS_DLSE, rows, rows < count, l_offset)
    factor = tl.where(bound_is_zero(BOUND), factor, 1.0)
    tl.store(ROW_FACTORS + rows, factor, mask=rows < count)
    inside = (rows < count)[:, None] & (d < features)[None, :]
    at = rows.to(tl.int64)[:, None]
    q = tl.load(Q + at * q_stride + d[None, :], mask=inside, other=0.0)
    tl.store(SCALED_Q + at * features + d[None, :], cast_for_matmul(q * factor[:, None], SCALED_Q, PRECISION),
             mask=inside)


def softmax_loss(q, k, temperature, mask, weights, needs_q, needs_k, needs_temperature, dtype):
    """Return (loss, dq (N, D), dk (M, D), dτ); a gradient that is not needed has no elements.

    dtype  dtype of the caller's rows, before autocast: bfloat16 rows get bfloat16 gradients, others float32
    """
    check_device(q)
    unpadded, aligned = (contiguous_rows(q), contiguous_rows(k)), aligned_operands(q, k, mask)
    q, k = (without_padding(x, q.shape[1]) for x in aligned[:2])
    sums = gradient_sums(q, k, needs_q, needs_k, needs_temperature)
    loss, side, q_factors, kernel_mask = accumulate_strips(*sums, q, k, aligned, temperature, weights)
    unit = 1 / q.shape[0] if weights is None else 1.0
    scaling = GradientScaling(None, unit, True, gradient_dtype(dtype))
    dq, dk, dot = finish_gradients(sums, *unpadded, kernel_mask, mask.exclude, side, SoftmaxSide(), scaling,
                                   needs_temperature, q_factors)
    return loss, dq, dk, total(dot, -1.0, temperature) if needs_temperature else loss.new_empty(0)


def accumulate_strips(dq, dk, q, k, aligned, temperature, weights):
    """Compute the loss and add the products of all strips to dq and dk; a dq or dk without rows is skipped.

    aligned  from launch.aligned_operands; q and k are its rows without padding
    returns  (loss, SoftmaxSide of the rows, q_factors, KernelMask). The caller must multiply row i of dq by
             q_factors[i], (N,); None: the strips already contain these factors
    """
    new = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    (n, features), m, itemsize = q.shape, k.shape[0], q.element_size()
    bound = None if q.dtype == torch.float16 else bound_of_norms(q, k, temperature)
    height, few, config = min(n, strip_height(itemsize, m)), has_few_rows(n, m), tile_config(q, aligned[2])
    operands, rest = kernel_args(*aligned, temperature, config)

    def whole_tiles(count, block):
        return ceil_div(count, config[block]) * config[block]

    strip = torch.empty(whole_tiles(height, "BLOCK_N"), whole_tiles(m, "BLOCK_M"), dtype=q.dtype,
                        device=q.device)
    tiles, precision = strip.shape[1] // config["BLOCK_M"], config["PRECISION"]
    table, positive, tau_mask = new(2 * tiles * height), new(height), temperature_only_mask(temperature, q)
    stats, dloss_dlse, losses = new(1, 2, n), new(1, n), []
    q_factors = None if bound is None else new(n)
    scaled_q = torch.empty(height, features, dtype=q.dtype, device=q.device)
    for i in range(0, n, height):
        at = slice(i, min(i + height, n))
        count = at.stop - i
        w, x = strip[:count, :m], q[at]
        row_tiles = ceil_div(count, config["BLOCK_N"])
        strip_kernel[row_tiles * tiles,](strip, table, positive, bound, i, count, row_tiles, tiles,
                                         strip.stride(0), *operands, **rest)
        strip_table = table[:2 * tiles * count].view(2, tiles, count)
        losses.append(merge_stats(stats[..., at], strip_table, few, True, None, positive, dloss_dlse[:, at],
                                  None if weights is None else weights[at], tau_mask, n, bound))
        row_arguments = stats[..., at], dloss_dlse[0, at], bound, count, n
        scale_strip_kernel[ceil_div(count, 32), tiles](strip, table, *row_arguments, m, strip.stride(0),
                                                       precision, BLOCK_N=32, BLOCK_M=config["BLOCK_M"])
        if dq.shape[0]:
            add_product(dq[at], w, k, True)
        if bound is not None:
            grid = ceil_div(count, 32), ceil_div(features, 128)
            scale_queries_kernel[grid](scaled_q[:count], q_factors[at], x, *row_arguments, features,
                                       q.stride(0), precision, BLOCK_N=32, BLOCK_D=128)
            x = scaled_q[:count]
        if dk.shape[0]:
            add_product(dk, w.T, x, i == 0)
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    return loss, SoftmaxSide(stats[0], dloss_dlse[0]), q_factors, operands[2]
