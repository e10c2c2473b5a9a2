"""Forward in Triton: log-sum-exps of q·kᵀ/τ over rows, or rows and columns at once, and the softmax loss.

Eager                                      bytes moved, N·M logits       here
    s = q @ k.T / temperature              write 4 N·M                   tiles stay in registers
    s = s.masked_fill(left_out, -inf)      read and write 8 N·M          where() on the few tiles it touches
    lse = s.logsumexp(1), s.logsumexp(0)   read 8 N·M or more            two numbers a row or column of a tile

Every tile (I, J) leaves the log-sum-exp of each of its rows, and where columns are asked for of each column:

    part[J, i] = log2 Σ_{j∈J} exp2(s_ij)      part'[I, j] = log2 Σ_{i∈I} exp2(s_ij)       one product for both

and a second kernel sums the parts of a row. With one set of rows (q = k) the matrix is symmetric: part' of
tile (I, J) is part of tile (J, I), so the tiles on and above the diagonal fill the same table and half of the
products are saved.

The parts of a large problem are made a block of tiles at a time and merged before the next. No atomics, no
order left to chance: the same input gives the same bits.

A softmax loss adds its positive by index. The rule leaves it out of the tile, where its logit is kept:

    gap_i = lse_i − positive_i      loss = Σ_i w softplus(gap_i)      slope_i = σ(gap_i), of the loss in lse_i

so no 1 − 0.999 is ever taken, and the second kernel has all three at hand when the parts of row i are summed.
"""
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import PROGRAMS, arguments, check_device, limit_of, ranges, tile
from .tiles import (
    LOG2E,
    in_range,
    is_bounded,
    kept,
    load,
    log_sum,
    octaves,
    positive_of,
    product,
    softplus,
    touched,
)

SIDE = 2 ** 14       # rows of a block: 16,384 of 768 features fit the second-level cache
PARTS = 2 ** 22      # entries of each table of parts: 16 MiB
WALK = 16            # tiles of a row tile that a program takes one after the other


@triton.jit
def parts_kernel(ROWS, COLUMNS, POSITIVE, LIMIT, RANGES, Q, K, RULE, N, M, D, q_row, k_row,
                 first_row, first_column, height, width, walk,
                 EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, RESIDENT: tl.constexpr,
                 TRIANGLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """ROWS[J, i − first_row], COLUMNS[I, j − first_column] of a block; a program walks row tile I."""
    tile_i = tl.program_id(0)
    row = first_row + tile_i * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    scale = octaves(RULE)
    bounded = is_bounded(LIMIT)
    if RESIDENT:
        q = load(Q, row, 0, N, D, q_row, BLOCK_N, BLOCK_D)
    start = first_column + tl.program_id(1) * walk * BLOCK_M
    stop = tl.minimum(start + walk * BLOCK_M, first_column + width)
    if TRIANGLE:
        start = tl.maximum(start, first_column + tile_i * BLOCK_M)
    start, stop = in_range(RANGES, row // BLOCK_N, start, stop, BLOCK_M)
    for column in range(start, stop, BLOCK_M):
        tile_j = (column - first_column) // BLOCK_M
        columns = column + tl.arange(0, BLOCK_M)
        if RESIDENT:
            k = load(K, column, 0, M, D, k_row, BLOCK_M, BLOCK_D)
            s = tl.dot(q, k.T, input_precision=PRECISION) * scale
        else:
            s = product(Q, K, row, column, N, M, D, q_row, k_row, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
            s = s * scale
        if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
            if POSITIVE is not None:
                target = positive_of(rows, N, RULE, EXCLUDE)
                logit = tl.sum(tl.where(columns[None, :] == target[:, None], s, 0.0), 1)
                here = (rows < N) & (target >= column) & (target < column + BLOCK_M) & (target < M)
                tl.store(POSITIVE + rows, logit, mask=here)
                if EXCLUDE == "pair" and COLUMNS is not None:      # of one set only these tiles are seen
                    tl.store(POSITIVE + target, logit, mask=here)
            s = tl.where(kept(rows, columns, N, M, RULE, EXCLUDE, PRECISION), s, float("-inf"))
        if COLUMNS is None:
            of_rows = log_sum(s, 1)
        else:
            if bounded:
                e = tl.exp2(s)
                of_rows, of_columns = tl.log2(tl.sum(e, 1)), tl.log2(tl.sum(e, 0))
            else:
                of_rows, of_columns = log_sum(s, 1), log_sum(s, 0)
            tl.store(COLUMNS + tile_i * width + columns - first_column, of_columns,
                     mask=(columns < first_column + width) & ((tile_i != tile_j) | (not TRIANGLE)))
        tl.store(ROWS + tile_j * height + rows - first_row, of_rows, mask=rows < first_row + height)


@triton.jit
def merge_kernel(LSE, SLOPE, LOSS, PARTS, POSITIVE, WEIGHTS, weight, tiles, count, SIDES: tl.constexpr,
                 FRESH: tl.constexpr, BLOCK: tl.constexpr):
    """LSE[i] = log(exp(LSE[i]) + Σ_J exp2(PARTS[J, i])) and, if LOSS, SLOPE[i] and a share of the loss."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    share = 0.0
    for side in tl.static_range(SIDES):
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        if not FRESH:
            top = tl.load(LSE + side * count + rows, mask=inside, other=float("-inf")) * LOG2E
            total = tl.where(top == float("-inf"), 0.0, 1.0)
        for first in range(0, tiles, 8):
            j = first + tl.arange(0, 8)
            part = tl.load(PARTS + (side * tiles + j)[:, None] * count + rows[None, :],
                           mask=(j < tiles)[:, None] & inside[None, :], other=float("-inf"))
            new = tl.maximum(top, tl.max(part, 0))
            reference = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp2(top - reference) + tl.sum(tl.exp2(part - reference[None, :]), 0)
            top = new
        lse = (top + tl.log2(total)) / LOG2E
        tl.store(LSE + side * count + rows, lse, mask=inside)
        if LOSS is not None:
            loss, slope = softplus(lse - tl.load(POSITIVE + rows, mask=inside, other=0.0) / LOG2E)
            tl.store(SLOPE + side * count + rows, slope, mask=inside)
            if WEIGHTS is not None:
                loss = loss * tl.load(WEIGHTS + rows, mask=inside, other=0.0)
            share += tl.sum(tl.where(inside, loss, 0.0), 0) * weight
    if LOSS is not None:
        tl.store(LOSS + tl.program_id(0), share)


class Sums(NamedTuple):
    """What the forward pass leaves behind; all float32."""
    lse: Any               # (sides, N): of the rows, and of the columns where both are asked for
    slope: Any             # (sides, N): dloss/dlse before weights, or None
    loss: Any              # scalar, or None


def log_sums(q, k, temperature, rule, both=False, loss=False, weights=None):
    """Sums over the columns of each row and, with both, over the rows of each column (N = M).

    k        None: one set of rows under a symmetric rule
    loss     also Σ_i w_i softplus(gap_i), with both the mean of two sides; w is 1/N, or weights (N,) float32
    """
    check_device(q)
    triangle = k is None
    k = q if triangle else k
    n, m = len(q), len(k)
    sides = 2 if both else 1
    lse = torch.empty(sides, n, dtype=torch.float32, device=q.device)
    positive, slope = (torch.empty_like(lse[0]), torch.empty_like(lse)) if loss else (None, None)
    limit = limit_of(q, k, temperature) if both or triangle else None
    blocks = block_sizes(q, rule, both or triangle)
    pointers, sizes, rest = arguments(q, k, temperature, rule, blocks)
    of_groups = ranges(rule, blocks)

    def parts(i, j, height, width):
        """The tables of a block: of rows (T, height), of columns (T', width), or the same, or none."""
        tiles_i, tiles_j = triton.cdiv(height, blocks["BLOCK_N"]), triton.cdiv(width, blocks["BLOCK_M"])
        on_diagonal = triangle and i == j
        both_tables = both or triangle and not on_diagonal
        sizes_of = tiles_j * height, both_tables * tiles_i * width
        of_rows, of_columns = lse.new_empty(sum(sizes_of)).split(sizes_of)
        if of_groups is not None:
            of_rows.fill_(-torch.inf)  # tiles that no program will see
        longest = 1 if of_groups is None and not blocks["RESIDENT"] else WALK
        walk = max(1, min(longest, tiles_i * tiles_j // (4 * PROGRAMS)))
        parts_kernel[tiles_i, triton.cdiv(tiles_j, walk)](
            of_rows, of_rows if on_diagonal else of_columns if both_tables else None, positive, limit,
            of_groups, *pointers, *sizes, first_row=i, first_column=j, height=height, width=width, walk=walk,
            TRIANGLE=on_diagonal, **rest)
        return of_rows.view(tiles_j, height), of_columns.view(-1, width)

    height, width = block_shape(q, k, square=both or triangle)
    if height >= n and width >= m:
        return Sums(lse, slope, merge(lse, parts(0, 0, n, m)[0], True, positive, slope, weights))
    lse.fill_(-torch.inf)
    for i in range(0, n, height):
        for j in range(i if triangle else 0, m, width):
            of_rows, of_columns = parts(i, j, min(height, n - i), min(width, m - j))
            merge(lse[:1, i:i + height], of_rows)
            if len(of_columns):
                merge(lse[-1:, j:j + width], of_columns)
    return Sums(lse, slope, merge(lse, lse[:0], False, positive, slope, weights) if loss else None)


def merge(lse, parts, fresh=False, positive=None, slope=None, weights=None, of=None):
    """lse (sides, N) takes in parts (T, N), of two sides twice that, in place of what it was if fresh; with
    positives also slope is filled and the loss returned, the mean over N rows, or as many as they are of."""
    sides, n = lse.shape
    block = 256
    if n <= 1024:  # few rows: all in one program
        block = min(1024, max(64, triton.next_power_of_2(n)))
    programs = triton.cdiv(n, block)
    shares = None if positive is None else lse.new_empty(programs)
    weight = 1 if weights is not None else 1 / (of or n)
    merge_kernel[programs,](lse, slope, shares, parts, positive, weights, weight / sides, len(parts), n,
                            SIDES=sides, FRESH=fresh, BLOCK=block, num_warps=8, enable_fp_fusion=True)
    return None if shares is None else shares[0] if programs == 1 else shares.sum()


def block_shape(q, k, square):
    """(rows, columns) of a block: rows stay in cache, a table of parts has PARTS entries at most."""
    height = max(1024, min(SIDE, 2 ** 24 // q.shape[1] // 1024 * 1024))
    return height, height if square else PARTS * 64 // height // 1024 * 1024


def block_sizes(q, rule, two_sided):
    """As tile(); narrow rows stay in shared memory while the columns pass."""
    blocks, width = tile(q, rule, two_sided), max(16, triton.next_power_of_2(q.shape[1]))
    resident = q.element_size() == 2 and width <= 128
    if resident:
        blocks |= dict(BLOCK_D=width, num_stages=2)
    return blocks | dict(RESIDENT=resident)


def similarity_lse(q, k, temperature, rule):
    """(N,) float32; see kernels.similarity_lse."""
    return log_sums(q, k, temperature, rule).lse[0]
