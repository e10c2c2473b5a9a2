"""Keys without gradient in Triton (a queue, a frozen tower): loss and gradient in one pass.

    lse_i = log Σ_j exp(q_i·k_j / τ)    p_ij = exp(q_i·k_j / τ − lse_i)
    o_i = Σ_j p_ij k_j                  dq_i = (g_i / τ) o_i

o is attention with the keys as values, so it comes out of the forward loop: 4 N·M·D operations where a
recomputing backward needs 6. A tile of keys is read once for both products:

           ┌─ (BLOCK_D, BLOCK_M) ─┐
    q_i ·  │        k_Jᵀ          │  = s       p = exp2(s − top)       o = o · exp2(old top − top) + p · k_J
           └──────────────────────┘

Few rows leave most of the chip idle, so their columns are split over several programs, each with its own top,
total and o, and a second kernel merges them by the weights total exp2(top_split − top). o stays in registers,
hence half types and D ≤ 256.

A queue's positive is not among its keys, so the second kernel takes it in: with gap_i = lse_i − q_i·k_i/τ

    loss_i = softplus(gap_i)        dq_i = σ(gap_i) (o_i − k_i) / τ        dk_i = −σ(gap_i) q_i / τ
"""
import torch
import triton
import triton.language as tl

from .launch import MULTIPROCESSORS, arguments, check_device, ranges, rows_in_place, tile
from .tiles import LOG2E, finite, gap_of, in_range, kept, kernel, load, octaves, power, softplus, touched


@kernel
def fixed_keys_kernel(SUMS, O, RANGES, split,
                      Q, K, RULE, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """SUMS[y, :, rows of program x], top and log2 total, O[y, rows, :], over columns y·split to
    (y + 1)·split."""
    row = tl.program_id(0) * BLOCK_N
    rows, d = row + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q = load(Q, row, 0, N, SHAPE.D, SHAPE.q_row, BLOCK_N, BLOCK_D)
    scale = octaves(RULE)
    first = tl.program_id(1) * split
    start, stop = in_range(RANGES, tl.program_id(0), first, tl.minimum(first + split, M), BLOCK_M)
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    o = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for column in range(start, stop, BLOCK_M):
        k = load(K, column, 0, M, SHAPE.D, SHAPE.k_row, BLOCK_M, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
            s = tl.where(kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * scale)
        p = power(s, scale, finite(new)[:, None])
        shrink = tl.exp2(top - finite(new))
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(k.dtype), k, o * shrink[:, None], input_precision=PRECISION)
        top = new
    slot = tl.program_id(1).to(tl.int64) * N
    tl.store(SUMS + 2 * slot + rows, top, mask=rows < N)
    tl.store(SUMS + 2 * slot + N + rows, tl.log2(total), mask=rows < N)    # total itself spills
    o = o / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(O + (slot + rows)[:, None] * SHAPE.D + d[None, :], o,
             mask=(rows < N)[:, None] & (d < SHAPE.D)[None, :])


@kernel
def merge_keys_kernel(LSE, O, LOSS, DQ, DK, SUMS, PART_O, Q, POSITIVES, RULE, unit, splits, N, D, width,
                      q_row, positive_row, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A row's splits as one: LSE and O, or with POSITIVES a LOSS and unit times its gradients DQ, DK."""
    rows, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside, wide = rows < N, (rows < N)[:, None] & (d < width)[None, :]
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    o = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for split in range(0, splits):
        at = split * N + rows
        part_top = tl.load(SUMS + 2 * split * N + rows, mask=inside, other=float("-inf"))
        log_total = tl.load(SUMS + (2 * split + 1) * N + rows, mask=inside, other=float("-inf"))
        new = tl.maximum(top, part_top)
        shrink, weight = tl.exp2(top - finite(new)), tl.exp2(part_top - finite(new) + log_total)
        part = tl.load(PART_O + at.to(tl.int64)[:, None] * D + d[None, :],
                       mask=inside[:, None] & (d < D)[None, :], other=0.0)
        total = total * shrink + weight
        o = o * shrink[:, None] + part * weight[:, None]
        top = new
    o = o / tl.where(total == 0.0, 1.0, total)[:, None]
    at = rows.to(tl.int64)[:, None] * width + d[None, :]
    if POSITIVES is None:
        tl.store(LSE + rows, (top + tl.log2(total)) / LOG2E, mask=inside)
        tl.store(O + at, o, mask=wide)
    else:
        q = tl.load(Q + rows.to(tl.int64)[:, None] * q_row + d[None, :], mask=wide, other=0.0).to(tl.float32)
        k = tl.load(POSITIVES + rows.to(tl.int64)[:, None] * positive_row + d[None, :], mask=wide, other=0.0)
        k = k.to(tl.float32)
        loss, slope = softplus(gap_of(top, total, tl.sum(q * k, 1), octaves(RULE)))
        tl.store(LOSS + rows, loss * unit, mask=inside)
        slope = (slope * unit * octaves(RULE) / LOG2E)[:, None]
        tl.store(DQ + at, slope * (o - k), mask=wide)
        tl.store(DK + at, -slope * q, mask=wide)


def block_sizes(q, rule):
    """As tile(), with all of a row in one block and few enough columns that o fits beside the logits; maxnreg
    keeps the assembler from spilling to run more programs."""
    blocks, width = tile(q, rule), max(16, triton.next_power_of_2(q.shape[1]))
    columns = 64 if width <= 128 else 32 if rule.row_features is None else 16
    return {**blocks, "BLOCK_N": 64, "BLOCK_M": min(columns, blocks["BLOCK_M"]), "BLOCK_D": width,
            "num_warps": 4 if width <= 128 else 8, "num_stages": 2, "maxnreg": 255}


def splits_of(q, k, temperature, rule):
    """(tops and log2 totals (splits, 2, N), o (splits, N, padded D), rule, BLOCK_D): of each program."""
    check_device(q)
    blocks = block_sizes(q, rule)
    operands, rest = arguments(q, k, temperature, rule, blocks)
    row_blocks, column_blocks = triton.cdiv(len(q), blocks["BLOCK_N"]), triton.cdiv(len(k), blocks["BLOCK_M"])
    at_once = MULTIPROCESSORS * (3 if blocks["num_warps"] == 4 else 1)
    splits = min(column_blocks, max(1, at_once // row_blocks))     # no program waits for another to end
    split = triton.cdiv(column_blocks, splits) * blocks["BLOCK_M"]
    splits = triton.cdiv(len(k), split)
    sums = torch.empty(splits, 2, len(q), dtype=torch.float32, device=q.device)
    o = torch.empty(splits, len(q), operands[-1].D, dtype=torch.float32, device=q.device)
    fixed_keys_kernel[row_blocks, splits](sums, o, ranges(rule, blocks), split, *operands, **rest)
    return sums, o, operands[2], blocks["BLOCK_D"]


def similarity_lse(q, k, temperature, rule):
    """(lse (N,), o (N, D)), both float32."""
    parts, o_parts, _, width = splits_of(q, k, temperature, rule)
    lse = torch.empty(len(q), dtype=torch.float32, device=q.device)
    o = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    merge_keys_kernel[triton.cdiv(len(q), 16),](
        lse, o, None, None, None, parts, o_parts, None, None, None, 1.0, len(parts), len(q), o_parts.shape[2],
        q.shape[1], 0, 0, BLOCK_N=16, BLOCK_D=width, enable_fp_fusion=True)
    return lse, o


def queue_loss(q, k, queue, temperature, rule):
    """(mean loss, its gradients in q and k (N, D)), all float32; see kernels.queue_loss."""
    parts, o_parts, taken, width = splits_of(q, queue, temperature, rule)
    q, k = rows_in_place(q), rows_in_place(k)
    loss = torch.empty(len(q), dtype=torch.float32, device=q.device)
    dq, dk = (torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    merge_keys_kernel[triton.cdiv(len(q), 16),](
        None, None, loss, dq, dk, parts, o_parts, q, k, taken, 1 / len(q), len(parts), len(q),
        o_parts.shape[2], q.shape[1], q.stride(0), k.stride(0), BLOCK_N=16, BLOCK_D=width,
        enable_fp_fusion=True)
    return loss.sum(), dq, dk
