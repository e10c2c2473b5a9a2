"""The queue loss of MoCo and its gradient in one pass. The keys in the queue get no gradient.

    lse_i = log Σ_j exp(q_i·k_j / τ) over the keys k_j of the queue      p_ij = exp(q_i·k_j / τ − lse_i)
    o_i = Σ_j p_ij k_j. The gradient of lse_i with respect to q_i is o_i / τ

o_i is the output of attention for query q_i, with the keys also as values. So the loop that computes lse can
compute o too, with 4 N·M·D operations in all. A separate backward pass would compute logits again: 6 N·M·D
in all. A program handles BLOCK_N queries q_i, and reads each tile k_J of keys once for both products:

           ┌─ (BLOCK_D, BLOCK_M) ─┐
    q_i ·  │        k_Jᵀ          │  = s       p = exp2(s − m_new)      o = o · exp2(m_old − m_new) + p · k_J
           └──────────────────────┘

m_old and m_new are the running maximum before and after tile J. If each program looped over all columns, a
small batch would leave most of the GPU idle. So the columns are divided into splits: queue_kernel computes m,
l and o of each split, and merge_splits_kernel merges them. The kernels serve half types with D ≤ 256: a
larger o would not fit in registers. The positive k⁺_i is not in the queue; its terms are added at the end:

    gap_i = lse_i − q_i·k⁺_i/τ        loss_i = softplus(gap_i)
    dq_i = σ(gap_i) (o_i − k⁺_i) / τ        dk⁺_i = −σ(gap_i) q_i / τ
"""
import functools

import torch
import torch.nn.functional as F
import triton.language as tl

from ..blockwise import gradient_of_temperature
from .gradient import similarity_lse_backward
from .heuristics import MAX_QUEUE_D, cdiv, power_of_2
from .launch import aligned, kernel_args, launch, multiprocessors, temperature_of, tile_config
from .lse_forward import similarity_lse
from .tiles import (
    LOG2E, exp2_scaled, finite_max, kernel, load_tile, log2e_over_tau, lse_minus_positive, softplus)


@kernel
def queue_kernel(STATS, O, split_columns,
                 Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """For BLOCK_N rows and one split, write m and log2 l to STATS[split, :, rows] and o to O[split, rows, :].
    A split has split_columns columns. The grid is (row tiles, splits)."""
    row = tl.program_id(0) * BLOCK_N
    rows, d = row + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q = load_tile(Q, row, 0, N, SHAPE.D, SHAPE.q_stride, BLOCK_N, BLOCK_D)
    scale = log2e_over_tau(MASK)
    start = tl.program_id(1) * split_columns
    stop = tl.minimum(start + split_columns, M)
    m_i = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_N,), tl.float32)
    o = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for column in range(start, stop, BLOCK_M):
        k = load_tile(K, column, 0, M, SHAPE.D, SHAPE.k_stride, BLOCK_M, BLOCK_D)
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        if column + BLOCK_M > M:
            qk = tl.where((column + tl.arange(0, BLOCK_M) < M)[None, :], qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
        p = exp2_scaled(qk, scale, finite_max(m_new)[:, None])
        shrink = tl.exp2(m_i - finite_max(m_new))
        l_i = l_i * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(k.dtype), k, o * shrink[:, None], input_precision=PRECISION)
        m_i = m_new
    slot = tl.program_id(1).to(tl.int64) * N
    tl.store(STATS + 2 * slot + rows, m_i, mask=rows < N)
    tl.store(STATS + 2 * slot + N + rows, tl.log2(l_i), mask=rows < N)    # to store l_i would spill registers
    o = o / l_i[:, None]
    tl.store(O + (slot + rows)[:, None] * SHAPE.D + d[None, :], o,
             mask=(rows < N)[:, None] & (d < SHAPE.D)[None, :])


@kernel
def merge_splits_kernel(LOSS, DQ, DK, STATS, SPLIT_O, Q, POSITIVE_KEYS, MASK, loss_factor, splits, N,
                        padded_D, D, q_stride, positive_stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Merge the splits of each row. Write LOSS (N,), DQ and DK (N, D), all multiplied by loss_factor.
    STATS is (splits, 2, N), SPLIT_O is (splits, N, padded_D). DK is the gradient of the positives."""
    rows, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    row_inside, inside = rows < N, (rows < N)[:, None] & (d < D)[None, :]
    m_i = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_N,), tl.float32)
    o = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for split in range(0, splits):
        split_m = tl.load(STATS + 2 * split * N + rows, mask=row_inside, other=float("-inf"))
        log2_l = tl.load(STATS + (2 * split + 1) * N + rows, mask=row_inside, other=float("-inf"))
        m_new = tl.maximum(m_i, split_m)
        shrink, weight = tl.exp2(m_i - finite_max(m_new)), tl.exp2(split_m - finite_max(m_new) + log2_l)
        split_o = tl.load(SPLIT_O + (split * N + rows).to(tl.int64)[:, None] * padded_D + d[None, :],
                          mask=row_inside[:, None] & (d < padded_D)[None, :], other=0.0)
        l_i = l_i * shrink + weight
        o = o * shrink[:, None] + split_o * weight[:, None]
        m_i = m_new
    o = o / l_i[:, None]
    place = rows.to(tl.int64)[:, None]
    q = tl.load(Q + place * q_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    k = tl.load(POSITIVE_KEYS + place * positive_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    loss, dloss_dlse = softplus(lse_minus_positive(m_i, l_i, tl.sum(q * k, 1), log2e_over_tau(MASK)))
    tl.store(LOSS + rows, loss * loss_factor, mask=row_inside)
    dloss_dlse = (dloss_dlse * loss_factor * log2e_over_tau(MASK) / LOG2E)[:, None]
    tl.store(DQ + place * D + d[None, :], dloss_dlse * (o - k), mask=inside)
    tl.store(DK + place * D + d[None, :], -dloss_dlse * q, mask=inside)


def queue_loss(call, queue, needs):
    """Return float32 (mean loss, dq (N, D), dk (N, D), dτ); call.k holds the positives."""
    if call.product_dtype.itemsize != 2 or call.q.shape[1] > MAX_QUEUE_D:
        return queue_loss_of_lse(call, queue, needs)
    given = call.rounded
    padded, features = aligned(given._replace(k=queue)), max(16, power_of_2(call.q.shape[1]))
    columns, warps = (128, 4) if features <= 128 else (32, 8)      # for a large D, o needs more registers
    config = tile_config(padded.q, call.mask) | dict(
        BLOCK_N=64, BLOCK_M=columns, BLOCK_D=features, num_warps=warps, num_stages=2)
    operands, rest = kernel_args(padded, config)
    (n, d), m, padded_d = call.q.shape, len(queue), padded.q.shape[1]     # m is the queue's length
    row_tiles, column_tiles = cdiv(n, config["BLOCK_N"]), cdiv(m, config["BLOCK_M"])
    at_once = multiprocessors(queue) * 8 // warps
    splits = min(column_tiles, max(1, at_once // row_tiles))     # programs run at once if row_tiles ≤ at_once
    split_columns = cdiv(column_tiles, splits) * config["BLOCK_M"]
    splits = cdiv(m, split_columns)
    new = functools.partial(torch.empty, dtype=torch.float32, device=queue.device)
    stats, o, loss, dq, dk = new(splits, 2, n), new(splits, n, padded_d), new(n), new(n, d), new(n, d)
    launch(queue_kernel, (row_tiles, splits), stats, o, split_columns, *operands, **rest)
    q, k = given.q.contiguous(), given.k.contiguous()
    launch(merge_splits_kernel, (cdiv(n, 16),),
           loss, dq, dk, stats, o, q, k, temperature_of(padded), 1 / n, splits, n, padded_d, d, q.stride(0),
           k.stride(0), BLOCK_N=16, BLOCK_D=config["BLOCK_D"], enable_fp_fusion=True)
    return loss.sum(), dq, dk, gradient_of_temperature(call, q.float(), dq, needs)


def queue_loss_of_lse(call, queue, needs):
    """Return what queue_loss returns, in any dtype and for any D, from the log-sum-exp and its gradient."""
    q, k = call.rounded.q.float(), call.rounded.k.float()
    others = call._replace(q=call.q.float(), k=queue)          # with q in float32, its gradient is float32
    lse, stats, common_m = similarity_lse(others)
    gap = lse - (q * k).sum(1) / call.temperature
    loss, g = F.softplus(gap, threshold=40).mean(), gap.sigmoid() / len(q)
    if not any(needs):
        return loss, None, None, None
    dq, _, _ = similarity_lse_backward(others, g, stats, common_m, (True, False, False))
    g = (g / call.temperature)[:, None]
    dq -= g * k
    return loss, dq, -g * q, gradient_of_temperature(call, q, dq, needs)
