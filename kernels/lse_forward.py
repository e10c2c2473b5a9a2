"""Forward in Triton: row log-sum-exps of q·kᵀ/τ, one tile of logits at a time.

Eager                                               bytes moved, N·M logits       here
    s = q @ k.T / temperature                       write 4 N·M                   tiles stay in registers
    s = s.masked_fill(left_out, -inf)               read and write 8 N·M          where() on the tile
    lse = s.logsumexp(1)                            read 4 N·M or more            two numbers a row

              columns j →
           ┌──────┬──────┬──────┐     A program owns BLOCK_N rows and walks the columns of its split, BLOCK_M at a time.
    rows i │ tile │ tile │ tile │     A tile is Σ over D in blocks of BLOCK_D of (BLOCK_N, BLOCK_D)·(BLOCK_D, BLOCK_M)
           └──────┴──────┴──────┘     on the tensor cores, so no D is too large and every D has the same registers.

Over the tiles of a row runs the online softmax. With top the largest logit so far and total = Σ exp2(s − top):

    new   = max(top, max_j s_j)
    total = total · exp2(top − new) + Σ_j exp2(s_j − new)        the old sum is moved to the new reference first
    top   = new

Logits are kept in units of log 2 (s·log2(e)/τ), because exp2 is what the hardware has. Few rows leave most of the chip
idle, so their columns are split over several programs and the splits merged by a logsumexp in PyTorch; the number of
splits depends on the shape alone. No atomics: the same input gives the same bits.
"""
import math
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LN2 = math.log(2)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PROGRAMS = 264   # two for each of the 132 multiprocessors of an H100 or H200


class KernelRule(NamedTuple):
    """A rule as the kernels take it, beside its name (EXCLUDE): what it has not is None and leaves no code behind."""
    row_ids: Any
    column_ids: Any
    row_groups: Any
    column_groups: Any
    row_features: Any
    column_features: Any
    offset: Any
    phi: Any
    width: Any            # E
    row_stride: Any       # of the features
    column_stride: Any


@triton.jit
def product_tile(Q, K, rows, columns, N, M, D, q_row, k_row, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, columns) float32: q_i·k_j."""
    d = tl.arange(0, BLOCK_D)
    q_rows = Q + rows.to(tl.int64)[:, None] * q_row       # 64 bits: N·D may pass 2³¹
    k_rows = K + columns.to(tl.int64)[:, None] * k_row
    s = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, D, BLOCK_D):
        inside = (start + d < D)[None, :]
        q = tl.load(q_rows + (start + d)[None, :], mask=(rows < N)[:, None] & inside, other=0.0)
        k = tl.load(k_rows + (start + d)[None, :], mask=(columns < M)[:, None] & inside, other=0.0)
        s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
    return s


@triton.jit
def kept(rows, columns, N, M, RULE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr):
    """(rows, columns) bool: the columns that the rule leaves to each row. The twin of rules.left_out."""
    keep = (columns < M)[None, :]
    if EXCLUDE == "diagonal":
        keep = keep & (columns[None, :] != rows[:, None] + RULE.offset)
    elif EXCLUDE == "pair":
        other_view = tl.where(rows < M // 2, rows + M // 2, rows - M // 2)
        keep = keep & (columns[None, :] != rows[:, None]) & (columns[None, :] != other_view[:, None])
    elif EXCLUDE == "ids":
        row_ids = tl.load(RULE.row_ids + rows, mask=rows < N, other=0)
        column_ids = tl.load(RULE.column_ids + columns, mask=columns < M, other=0)
        keep = keep & (row_ids[:, None] != column_ids[None, :])
    if RULE.row_groups is not None:
        row_groups = tl.load(RULE.row_groups + rows, mask=rows < N, other=0)
        column_groups = tl.load(RULE.column_groups + columns, mask=columns < M, other=0)
        keep = keep & (row_groups[:, None] == column_groups[None, :])
    if RULE.row_features is not None:
        f = product_tile(RULE.row_features, RULE.column_features, rows, columns, N, M, RULE.width, RULE.row_stride,
                         RULE.column_stride, PRECISION, 16)
        keep = keep & (f < RULE.phi)
    return keep


@triton.jit
def lse_kernel(LSE, Q, K, TEMPERATURE, RULE, N, M, D, split, q_row, k_row, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
               BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """LSE[y, rows of program x] = log2 Σ exp2(s) over the columns [y·split, (y + 1)·split)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * split
    scale = 1.4426950408889634 / tl.load(TEMPERATURE)             # log2(e)/τ
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, tl.minimum(first + split, M), BLOCK_M):
        columns = start + tl.arange(0, BLOCK_M)
        s = product_tile(Q, K, rows, columns, N, M, D, q_row, k_row, PRECISION, BLOCK_D) * scale
        s = tl.where(kept(rows, columns, N, M, RULE, EXCLUDE, PRECISION), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        reference = tl.where(new == float("-inf"), 0.0, new)      # −inf − (−inf) would be NaN: nothing kept so far
        total = total * tl.exp2(top - reference) + tl.sum(tl.exp2(s - reference[:, None]), 1)
        top = new
    tl.store(LSE + tl.program_id(1).to(tl.int64) * N + rows, top + tl.log2(total), mask=rows < N)


def tile(x, rule):
    """Block sizes, warps, stages and input precision for rows of x. Registers and shared memory: tests/test_compile.py."""
    # 64-bit ids of a tile's columns, or a second product, take the registers of half a tile, all three of three quarters
    parts = sum(part is not None for part in (rule.row_ids, rule.row_groups, rule.row_features))
    columns = (128, 64, 64, 32)[parts]
    full = torch.get_float32_matmul_precision() == "highest"
    if full and torch.float32 in (x.dtype, getattr(rule.row_features, "dtype", None)):
        # plain multiply-adds: no tensor core takes full float32
        columns = 64 if rule.row_features is None else 32
        return dict(BLOCK_N=64, BLOCK_M=columns, BLOCK_D=16, num_warps=8, num_stages=2, maxnreg=255, PRECISION="ieee")
    return dict(BLOCK_N=128, BLOCK_M=columns, BLOCK_D=32 if x.dtype == torch.float32 else 64, num_warps=8, num_stages=3,
                PRECISION="tf32")                             # of no effect on half types


def check_device(q):
    """A CPU tensor needs the interpreter, which Triton turns on when the kernels are first imported."""
    if q.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"impl: 'triton' on {q.device} wants TRITON_INTERPRET=1 in the environment before the start; "
                         "use 'blockwise'")


def in_whole_words(x):
    """x itself where its rows are contiguous, aligned and a multiple of 16 long, else a copy with zeros behind each row.

    A kernel reads 16 bytes at a time or falls back to single elements, whose addresses spill; zeros change no product.
    """
    if x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    copy = x.new_zeros(len(x), triton.cdiv(x.shape[1], 16) * 16)
    copy[:, :x.shape[1]] = x
    return copy


def arguments(q, k, temperature, rule):
    """What all kernels take: tensors and rule, sizes, and the rest by name."""
    q, k = in_whole_words(q), in_whole_words(k)
    f_q, f_k = (f if f is None else in_whole_words(f.float() if f.dtype == torch.float64 else f)    # tiles sum in float32
                for f in (rule.row_features, rule.column_features))
    shape = (None, None, None) if f_q is None else (f_q.shape[1], f_q.stride(0), f_k.stride(0))
    taken = KernelRule(*rule[1:5], f_q, f_k, rule.offset, rule.phi, *shape)
    return (q, k, temperature, taken), (len(q), *k.shape), dict(q_row=q.stride(0), k_row=k.stride(0), EXCLUDE=rule.exclude,
                                                                enable_fp_fusion=True)


def similarity_lse(q, k, temperature, rule):
    """(N,) float32; see kernels.similarity_lse."""
    check_device(q)
    pointers, sizes, rest = arguments(q, k, temperature, rule)
    blocks = tile(q, rule)
    row_blocks, column_blocks = triton.cdiv(len(q), blocks["BLOCK_N"]), triton.cdiv(len(k), blocks["BLOCK_M"])
    split = triton.cdiv(column_blocks, min(column_blocks, triton.cdiv(PROGRAMS, row_blocks))) * blocks["BLOCK_M"]
    splits = triton.cdiv(len(k), split)
    lse = torch.empty(splits, len(q), dtype=torch.float32, device=q.device)
    lse_kernel[row_blocks, splits](lse, *pointers, *sizes, split=split, **rest, **blocks)
    lse *= LN2
    return lse[0] if splits == 1 else lse.logsumexp(0)
