"""Nearest columns in Triton: the n largest logits of each row, one tile at a time.

Eager                                   bytes moved                     here
    s = q @ k.T                         write 4 N·M                     tiles stay in registers
    values, indices = s.topk(n)         read 4 N·M, several times       n slots a row, in registers

A program owns BLOCK_N rows and walks the columns of its split, as the forward kernel does. While any row's
best logit of the tile beats the worst of its slots, the best takes the worst's place and leaves the tile. A
row's M logits in random order change its slots about n·ln(M/n) times in all, so almost every tile passes with
one comparison. The slots of all splits are merged, and sorted, by one topk in PyTorch.
"""
import torch
import triton
import triton.language as tl

from .launch import PROGRAMS, arguments, check_device, tile
from .tiles import kept, kernel, product

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@kernel
def topk_kernel(VALUES, PLACES, split,
                Q, K, RULE, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """VALUES, PLACES[rows of program x, y·SLOTS …] = the SLOTS largest logits of split y of the columns; ∞
    stands for NaN, LARGEST for ∞."""
    row = tl.program_id(0) * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * split
    slot = tl.arange(0, SLOTS)[None, :]
    values = tl.full((BLOCK_N, SLOTS), float("-inf"), tl.float32)
    places = tl.full((BLOCK_N, SLOTS), -1, tl.int32)
    for start in range(first, tl.minimum(first + split, M), BLOCK_M):
        columns = start + tl.arange(0, BLOCK_M)
        s = product(Q, K, row, start, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        s = tl.where(s == s, tl.minimum(s, LARGEST), float("inf"))    # NaN compares with nothing
        s = tl.where(kept(rows, start, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), s, float("-inf"))
        better = tl.max(s, 1) > tl.min(values, 1)
        while tl.max(better.to(tl.int32), 0) > 0:
            best, at = tl.max(s, 1, return_indices=True)
            worst = tl.argmin(values, 1)
            here = better[:, None] & (slot == worst[:, None])
            values = tl.where(here, best[:, None], values)
            places = tl.where(here, (start + at)[:, None], places)
            s = tl.where(better[:, None] & (columns[None, :] == (start + at)[:, None]), float("-inf"), s)
            better = tl.max(s, 1) > tl.min(values, 1)
    out = rows.to(tl.int64)[:, None] * (tl.num_programs(1) * SLOTS) + tl.program_id(1) * SLOTS + slot
    tl.store(VALUES + out, values, mask=(rows < N)[:, None])
    tl.store(PLACES + out, places, mask=(rows < N)[:, None])


def block_sizes(q, rule):
    """As tile(), smaller, as slots need registers; maxnreg keeps the assembler from spilling to run more."""
    blocks = tile(q, rule)
    return {**blocks, "BLOCK_N": 64, "BLOCK_M": min(64, blocks["BLOCK_M"]), "maxnreg": 255}


def similarity_topk(q, k, temperature, n, rule):
    """(values (N, n) float32, columns (N, n) int64), largest first; see kernels.similarity_topk."""
    check_device(q)
    blocks = block_sizes(q, rule)
    operands, rest = arguments(q, k, temperature, rule, blocks)
    row_blocks, column_blocks = triton.cdiv(len(q), blocks["BLOCK_N"]), triton.cdiv(len(k), blocks["BLOCK_M"])
    splits = min(column_blocks, triton.cdiv(PROGRAMS, row_blocks))
    split = triton.cdiv(column_blocks, splits) * blocks["BLOCK_M"]
    splits, slots = triton.cdiv(len(k), split), triton.next_power_of_2(max(n, 2))
    values = torch.empty(len(q), splits * slots, dtype=torch.float32, device=q.device)
    places = torch.empty(len(q), splits * slots, dtype=torch.int32, device=q.device)
    topk_kernel[row_blocks, splits](values, places, split, *operands, SLOTS=slots, **rest)
    values, order = values.topk(n, 1)
    nan, infinite = values == torch.inf, values == LARGEST.value
    values = values.masked_fill_(infinite, torch.inf).masked_fill_(nan, torch.nan)
    return values, places.gather(1, order).long()
