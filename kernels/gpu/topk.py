"""Find the nearest neighbours of each row: its n largest dot products, and their columns.

Eager                                   bytes moved by eager            this file
    s = q @ k.T                         write 4 N·M                     tiles stay in registers
    values, indices = s.topk(n)         read 4 N·M, several times       n slots per row, in registers

The columns are divided into splits. A program takes BLOCK_N rows and loops over the tiles of one split. The
slots of a row hold its largest values so far. If the largest value of a row in a tile exceeds the row's
smallest slot, it replaces this slot and is deleted from the tile. This is repeated until no row has such a
value. If the C values of a row in a split come in random order, its n slots, once full, change only about
n·ln(C/n) times. At the end, PyTorch's topk merges the slots of all splits.
"""
import torch
import triton.language as tl

from .. import blockwise
from .heuristics import TOPK_SLOTS, cdiv, power_of_2
from .launch import aligned, kernel_args, launch, multiprocessors, tile_config
from .tiles import keep_mask, kernel, qk_tile

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@kernel
def topk_kernel(VALUES, INDICES, split_columns,
                Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the SLOTS largest dot products and their columns, for BLOCK_N rows and one split of the columns.
    VALUES and INDICES are (N, splits · SLOTS). In VALUES, ∞ stands for NaN, and LARGEST stands for ∞."""
    row = tl.program_id(0) * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * split_columns
    slot = tl.arange(0, SLOTS)[None, :]
    values = tl.full((BLOCK_N, SLOTS), float("-inf"), tl.float32)
    indices = tl.full((BLOCK_N, SLOTS), -1, tl.int32)
    for column in range(first, tl.minimum(first + split_columns, M), BLOCK_M):
        columns = column + tl.arange(0, BLOCK_M)
        qk = qk_tile(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        qk = tl.where(qk == qk, tl.minimum(qk, LARGEST), float("inf"))    # NaN → ∞, ∞ → LARGEST
        qk = tl.where(keep_mask(rows, column, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M), qk, float("-inf"))
        better = tl.max(qk, 1) > tl.min(values, 1)
        while tl.max(better.to(tl.int32), 0) > 0:
            best, at = tl.max(qk, 1, return_indices=True)
            worst = tl.argmin(values, 1)
            replaced = better[:, None] & (slot == worst[:, None])
            values = tl.where(replaced, best[:, None], values)
            indices = tl.where(replaced, (column + at)[:, None], indices)
            qk = tl.where(better[:, None] & (columns[None, :] == (column + at)[:, None]), float("-inf"), qk)
            better = tl.max(qk, 1) > tl.min(values, 1)
    out = rows.to(tl.int64)[:, None] * (tl.num_programs(1) * SLOTS) + tl.program_id(1) * SLOTS + slot
    tl.store(VALUES + out, values, mask=(rows < N)[:, None])
    tl.store(INDICES + out, indices, mask=(rows < N)[:, None])


def similarity_topk(call, n):
    """Return (values (N, n) float32, columns (N, n) int64), largest first; see kernels.similarity_topk."""
    if n > TOPK_SLOTS:
        return blockwise.similarity_topk(call, n)
    call = aligned(call)
    config = tile_config(call.q, call.mask)
    config |= dict(BLOCK_N=64, BLOCK_M=min(64, config["BLOCK_M"]), num_warps=8)    # slots need many registers
    operands, rest = kernel_args(call, config)
    rows, columns, device = len(call.q), len(call.keys), call.q.device
    row_tiles, column_tiles = cdiv(rows, config["BLOCK_N"]), cdiv(columns, config["BLOCK_M"])
    splits = min(column_tiles, cdiv(2 * multiprocessors(call.q), row_tiles))
    split_columns = cdiv(column_tiles, splits) * config["BLOCK_M"]
    splits, slots = cdiv(columns, split_columns), power_of_2(max(n, 2))
    values = torch.empty(rows, splits * slots, dtype=torch.float32, device=device)
    indices = torch.empty(rows, splits * slots, dtype=torch.int32, device=device)
    launch(topk_kernel, (row_tiles, splits), values, indices, split_columns, *operands, SLOTS=slots, **rest)
    values, order = values.topk(n, 1)
    nan, infinite = values == torch.inf, values == LARGEST.value
    values = values.masked_fill_(infinite, torch.inf).masked_fill_(nan, torch.nan)
    return values, indices.gather(1, order).long()
