"""Forward in Triton: log-sum-exps of q·kᵀ/τ over rows, or rows and columns at once, and the softmax loss.

Eager                                      bytes moved, N·M logits       here
    s = q @ k.T / temperature              write 4 N·M                   tiles stay in registers
    s = s.masked_fill(left_out, -inf)      read and write 8 N·M          where() on the few tiles it touches
    lse = s.logsumexp(1), s.logsumexp(0)   read 8 N·M or more            a number or two a row of a tile

Over rows, and for few rows, every tile (I, J) leaves a sum of each of its rows (and columns),

    part[J, i] = Σ_{j∈J} exp2(s_ij − top)     part'[I, j] = Σ_{i∈I} exp2(s_ij − top')     one product for both

beside its top, the largest, and a second kernel sums the parts of a row. Top and total stay two numbers: lse
as one has the rounding of top, which would be every weight's of a row. Over rows and columns of many, one
exponential serves both (reference.py): a program owns the columns J and walks rows, columns' sums stay in its
registers and rows' sums are stored:

    sums[J, i] = Σ_{j∈J} exp2(s_ij − r)       sums'[j] of the rows that were walked

With one set of rows (q = k) the matrix is symmetric: sums' of tile (I, J) are sums of tile (J, I), so half of
the products are saved. Blocks of tiles are summed before the next, tiles side by side run together so that
their rows stay in the second-level cache. No atomics, no order left to chance: the same input gives the same
bits.

A softmax loss adds its positive by index. The rule leaves it out of the tile, where its logit is kept:

    gap_i = lse_i − positive_i      loss = Σ_i w softplus(gap_i)      slope_i = σ(gap_i), of the loss in lse_i

so no 1 − 0.999 is ever taken, and the last kernel has all three at hand when the parts of row i are summed.
"""
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..rules import swapped
from .launch import PROGRAMS, arguments, capability, check_device, ranges, scale_of, tile
from .reference import LEAST, reference_of
from .tiles import (
    LOG2E,
    added,
    finite,
    gap_of,
    grouped,
    in_range,
    is_folded,
    kept,
    kernel,
    load,
    octaves,
    positive_of,
    power,
    product,
    softplus,
    sums_of,
    touched,
)

SIDE = 2 ** 14       # rows of a block: 16,384 of 768 features fit the second-level cache
PARTS = 2 ** 22      # entries of each table of parts: 16 MiB
WALK = 512           # rows that a program takes one after the other before it sums its columns


@triton.jit
def keep_positives(POSITIVE, s, rows, column, origin, N, M, RULE, EXCLUDE: tl.constexpr,
                   BLOCK_M: tl.constexpr, ONE_SET: tl.constexpr):
    """The products of a tile's positives, before the rule leaves them out of s."""
    target = positive_of(rows, N, RULE, EXCLUDE)
    here = (column - origin + tl.arange(0, BLOCK_M))[None, :] == (target - origin)[:, None]
    found = tl.sum(tl.where(here, s, 0.0), 1)
    here = (rows < N) & (target >= column) & (target < column + BLOCK_M) & (target < M)
    tl.store(POSITIVE + rows, found, mask=here)
    if EXCLUDE == "pair" and ONE_SET:      # only the tiles on and above the diagonal are seen
        tl.store(POSITIVE + target, found, mask=here)


@kernel
def parts_kernel(ROWS, COLUMNS, POSITIVE, RANGES, first_row, first_column, height, width, walk,
                 Q, K, RULE, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                 RESIDENT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """ROWS[:, J, i − first_row], COLUMNS[:, I, j − first_column] of a block, tops and totals; a program walks
    the columns of a row tile I."""
    walks = tl.cdiv(tl.cdiv(width, BLOCK_M), walk)
    tile_i, walk_j = grouped(tl.program_id(0), tl.cdiv(height, BLOCK_N), walks)
    row = first_row + tile_i * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    scale = octaves(RULE)
    if RESIDENT:
        q = load(Q, row, 0, N, SHAPE.D, SHAPE.q_row, BLOCK_N, BLOCK_D)
    start = first_column + walk_j * walk * BLOCK_M
    stop = tl.minimum(start + walk * BLOCK_M, first_column + width)
    start, stop = in_range(RANGES, row // BLOCK_N, start, stop, BLOCK_M)
    for column in range(start, stop, BLOCK_M):
        columns = column + tl.arange(0, BLOCK_M)
        if RESIDENT:
            k = load(K, column, 0, M, SHAPE.D, SHAPE.k_row, BLOCK_M, BLOCK_D)
            s = tl.dot(q, k.T, input_precision=PRECISION)
        else:
            s = product(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
            if POSITIVE is not None:
                keep_positives(POSITIVE, s, rows, column, 0, N, M, RULE, EXCLUDE, BLOCK_M, False)
            s = tl.where(kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), s, float("-inf"))
        top, total = sums_of(s, scale, 1)
        place = ROWS + (column - first_column) // BLOCK_M * height + rows - first_row
        tl.store(place, top, mask=rows < first_row + height)
        tl.store(place + tl.cdiv(width, BLOCK_M) * height, total, mask=rows < first_row + height)
        if COLUMNS is not None:
            top, total = sums_of(s, scale, 0)
            place = COLUMNS + tile_i * width + columns - first_column
            tl.store(place, top, mask=columns < first_column + width)
            tl.store(place + tl.cdiv(height, BLOCK_N) * width, total, mask=columns < first_column + width)


@kernel
def sums_kernel(ROWS, COLUMNS, POSITIVE, REFERENCE, first_row, first_column, height, width, walk,
                Q, K, RULE, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                RESIDENT: tl.constexpr, TRIANGLE: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """ROWS[J, i − first_row], COLUMNS[walk, j − first_column] of a block; a program walks the rows of a
    column tile J. TRIANGLE: a block on the diagonal of one set, whose tiles there (BLOCK_M is a multiple of
    BLOCK_N) count as columns."""
    walks = tl.cdiv(tl.cdiv(height, BLOCK_N), walk)
    tile_j, walk_i = grouped(tl.program_id(0), tl.cdiv(width, BLOCK_M), walks)
    column = first_column + tile_j * BLOCK_M
    columns = column + tl.arange(0, BLOCK_M)
    scale, reference = octaves(RULE), tl.load(REFERENCE)
    if RESIDENT:
        k = load(K, column, 0, M, SHAPE.D, SHAPE.k_row, BLOCK_M, BLOCK_D)
    start = first_row + walk_i * walk * BLOCK_N
    stop = tl.minimum(start + walk * BLOCK_N, first_row + height)
    if TRIANGLE:
        stop = tl.minimum(stop, column + BLOCK_M)
    # two of the sixteen rows that a warp's product has are one thread's: added without a word to others
    of_columns = tl.zeros((BLOCK_N // 16, 8, BLOCK_M), tl.float32)
    for row in range(start, stop, BLOCK_N):
        rows = row + tl.arange(0, BLOCK_N)
        if RESIDENT:
            q = load(Q, row, 0, N, SHAPE.D, SHAPE.q_row, BLOCK_N, BLOCK_D)
            s = tl.dot(q, k.T, input_precision=PRECISION)
        else:
            s = product(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
            if POSITIVE is not None:
                keep_positives(POSITIVE, s, rows, column, column, N, M, RULE, EXCLUDE, BLOCK_M, True)
            keep = kept(rows, column, column, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M)
            s = tl.where(keep, s, float("-inf"))
        e = power(s, scale, reference)
        of_columns += tl.sum(tl.reshape(e, (BLOCK_N // 16, 2, 8, BLOCK_M)), 1)
        end = first_row + height
        if TRIANGLE:
            end = tl.minimum(end, column)
        tl.store(ROWS + tile_j * height + rows - first_row, tl.sum(e, 1), mask=rows < end)
    tl.store(COLUMNS + walk_i * width + columns - first_column, tl.sum(tl.sum(of_columns, 0), 0),
             mask=columns < first_column + width)


@kernel
def add_kernel(TOTAL, PARTS, tiles, count, BLOCK: tl.constexpr):
    """TOTAL[i] += Σ_J PARTS[J, i]."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, tiles, 32):
        j = first + tl.arange(0, 32)
        sums += tl.sum(tl.load(PARTS + j[:, None] * count + rows[None, :],
                               mask=(j < tiles)[:, None] & (rows < count)[None, :], other=0.0), 0)
    total = tl.load(TOTAL + rows, mask=rows < count, other=0.0)
    tl.store(TOTAL + rows, total + sums, mask=rows < count)


@kernel
def ends_kernel(SUMS, LSE, SLOPE, LOSS, POSITIVE, REFERENCE, weight,
                Q, K, RULE, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """SUMS[0] of the rows of program x beside their total, SUMS[1]; then LSE or SLOPE and a share of LOSS."""
    row = tl.program_id(0) * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    inside, reference, scale = rows < N, tl.load(REFERENCE), octaves(RULE)
    total = tl.load(SUMS + N + rows, mask=inside, other=1.0)
    top = tl.zeros((BLOCK_N,), tl.float32) + finite(reference)
    lost = tl.log2(total) < tl.where(reference > 0.0, LEAST, float("-inf"))
    if tl.max(lost.to(tl.int32), 0) > 0:                           # again, with a maximum of their own
        own_top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        own_total = tl.zeros((BLOCK_N,), tl.float32)
        for column in range(0, M, BLOCK_M):
            s = product(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
            keep = kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M)
            part_top, part_total = sums_of(tl.where(keep, s, float("-inf")), scale, 1)
            own_top, own_total = added(own_top, own_total, part_top, part_total)
        lost = lost & (own_total > 0.0)                            # a row without columns keeps the reference
        top, total = tl.where(lost, finite(own_top), top), tl.where(lost, own_total, total)
        tl.store(SUMS + N + rows, total, mask=inside)
    tl.store(SUMS + rows, top, mask=inside)
    if LOSS is None:
        tl.store(LSE + rows, (top + tl.log2(total)) / LOG2E, mask=inside)
    else:
        loss, slope = softplus(gap_of(top, total, tl.load(POSITIVE + rows, mask=inside, other=0.0), scale))
        tl.store(SLOPE + rows, slope, mask=inside)
        tl.store(LOSS + tl.program_id(0), tl.sum(tl.where(inside, loss, 0.0), 0) * weight)


@kernel
def merge_kernel(SUMS, LSE, SLOPE, LOSS, PARTS, POSITIVE, WEIGHTS, RULE, REFERENCE, weight, tiles, count,
                 apart, SIDES: tl.constexpr, FRESH: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr):
    """SUMS[side, :, i], tops and totals, take in PARTS[side, :, J, i]; then LSE, or SLOPE and a share of
    LOSS, if they are there."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    share, folded = 0.0, is_folded(REFERENCE)
    for side in tl.static_range(SIDES):
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        sums = SUMS + 2 * side * apart + rows
        if not FRESH:
            top = tl.load(sums, mask=inside, other=float("-inf"))
            total = tl.where(top == float("-inf"), 0.0, tl.load(sums + apart, mask=inside, other=0.0))
        for first in range(0, tiles, HIGH):
            j = first + tl.arange(0, HIGH)
            place = PARTS + (2 * side * tiles + j)[:, None] * count + rows[None, :]
            mask = (j < tiles)[:, None] & inside[None, :]
            if REFERENCE is None:
                part = tl.load(place, mask=mask, other=float("-inf"))
            else:
                unread = tl.where(folded, 0.0, float("-inf"))
                part = tl.load(place, mask=tl.where(folded, False, mask), other=unread)
            new = tl.maximum(top, tl.max(part, 0))
            of_part = tl.load(place + tiles * count, mask=mask, other=0.0)
            of_part *= tl.exp2(part - finite(new)[None, :])
            of_part = tl.where(part == float("-inf"), 0.0, of_part)    # a tile that no program has seen
            total = total * tl.exp2(top - finite(new)) + tl.sum(of_part, 0)
            top = new
        if LSE is not None or LOSS is not None:                        # the last time
            top = finite(top)
        tl.store(sums, top, mask=inside)
        tl.store(sums + apart, total, mask=inside)
        if LSE is not None:
            tl.store(LSE + rows, (top + tl.log2(total)) / LOG2E, mask=inside)
        if LOSS is not None:
            positive = tl.load(POSITIVE + rows, mask=inside, other=0.0)
            loss, slope = softplus(gap_of(top, total, positive, octaves(RULE)))
            tl.store(SLOPE + side * count + rows, slope, mask=inside)
            if WEIGHTS is not None:
                row_weight = tl.load(WEIGHTS + rows, mask=inside, other=0.0)
                loss = tl.where(row_weight == 0.0, 0.0, loss * row_weight)      # whatever an ignored row is
            share += tl.sum(tl.where(inside, loss, 0.0), 0) * weight
    if LOSS is not None:
        tl.store(LOSS + tl.program_id(0), share)


class Sums(NamedTuple):
    """What the forward pass leaves behind; all float32."""
    sums: Any              # (sides, 2, N): top and total of rows, and of columns where both are asked for
    lse: Any               # (N,) of the rows, or None where there is a loss
    slope: Any             # (sides, N): dloss/dlse before weights, or None
    loss: Any              # scalar, or None


def log_sums(q, k, temperature, rule, both=False, loss=False, weights=None):
    """Sums over the columns of each row and, with both, over the rows of each column (N = M).

    k        None: one set of rows under a symmetric rule
    loss     also Σ_i w_i softplus(gap_i), with both the mean of two sides; w is 1/N, or weights (N,) float32
    """
    check_device(q)
    reference = reference_of(q, q if k is None else k, temperature) if both or k is None else None
    if reference is not None:
        return two_sided(q, k, temperature, rule, reference, loss)
    k = q if k is None else k                                      # few rows: the square costs no more
    n, m = len(q), len(k)
    sums = torch.empty(2 if both else 1, 2, n, dtype=torch.float32, device=q.device)
    ends = dict(lse=sums.new_empty(n))
    if loss:
        ends = dict(positive=sums.new_empty(n), slope=torch.empty_like(sums[:, 0]), weights=weights,
                    rule=scale_of(temperature, q))
    positive, slope, lse = (ends.get(name) for name in ("positive", "slope", "lse"))
    blocks = block_sizes(q, rule, both) | (dict(maxnreg=255) if both else {})
    assert not both or blocks["BLOCK_N"] == blocks["BLOCK_M"], "tables of rows and of columns are one"
    operands, rest = arguments(q, k, temperature, rule, blocks)
    of_groups = ranges(rule, blocks)

    def parts(i, j, height, width):
        """The tables of a block: of rows (2, T, height), and of columns (2, T', width) or nothing."""
        tiles_i, tiles_j = triton.cdiv(height, blocks["BLOCK_N"]), triton.cdiv(width, blocks["BLOCK_M"])
        sizes_of = 2 * tiles_j * height, both * 2 * tiles_i * width
        of_rows, of_columns = sums.new_empty(sum(sizes_of)).split(sizes_of)
        if of_groups is not None:
            of_rows.fill_(-torch.inf)  # tiles that no program will see
        longest = 1 if of_groups is None and not blocks["RESIDENT"] else 16
        walk = max(1, min(longest, tiles_i * tiles_j // (4 * PROGRAMS)))
        parts_kernel[tiles_i * triton.cdiv(tiles_j, walk),](
            of_rows, of_columns if both else None, positive, of_groups, i, j, height, width, walk,
            *operands, **rest)
        return of_rows.view(2, tiles_j, height), of_columns.view(2, -1, width)

    height, width = sums_block(q, k, square=both)
    if height >= n and width >= m:
        return Sums(sums, lse, slope, merge(sums, parts(0, 0, n, m)[0], True, **ends))
    sums.fill_(-torch.inf)
    for i in range(0, n, height):
        for j in range(0, m, width):
            of_rows, of_columns = parts(i, j, min(height, n - i), min(width, m - j))
            merge(sums[:1, :, i:i + height], of_rows)
            if both:
                merge(sums[1:, :, j:j + width], of_columns)
    return Sums(sums, lse, slope, merge(sums, sums[0, :, None, :][:, :0], **ends))


def two_sided(q, k, temperature, rule, reference, loss):
    """log_sums of many rows over both of their sides, with one reference for all logits."""
    triangle = k is None
    k, n = q if triangle else k, len(q)
    sums = torch.zeros(1 if triangle else 2, 2, n, dtype=torch.float32, device=q.device)
    # without a loss nobody reads them; but a branch that stores nothing is no branch, and spills
    totals, positive = sums[:, 1], sums.new_empty(n) if loss or rule.exclude != "none" else None
    blocks = sums_sizes(q, rule)
    assert not triangle or blocks["BLOCK_M"] % blocks["BLOCK_N"] == 0, "columns end on the diagonal"
    operands, rest = arguments(q, k, temperature, rule, blocks)
    side, _ = sums_block(q, k, square=True)
    for i in range(0, n, side):
        for j in range(i if triangle else 0, n, side):
            height, width, on_diagonal = min(side, n - i), min(side, n - j), triangle and i == j
            tiles_i, tiles_j = triton.cdiv(height, blocks["BLOCK_N"]), triton.cdiv(width, blocks["BLOCK_M"])
            walk = max(1, min(WALK // blocks["BLOCK_N"], tiles_i * tiles_j // (4 * PROGRAMS)))
            walks = triton.cdiv(tiles_i, walk)
            table = totals.new_zeros if on_diagonal else totals.new_empty  # a triangle fills half of it
            parts = table(tiles_j * height + walks * width)
            of_rows, of_columns = parts.split([tiles_j * height, walks * width])
            sums_kernel[tiles_j * walks,](
                of_rows, of_columns, positive, reference, i, j, height, width, walk, *operands,
                TRIANGLE=on_diagonal, **rest)
            if on_diagonal:
                add(totals[0, i:i + height], parts)
            else:
                add(totals[0, i:i + height], of_rows)
                add(totals[-1, j:j + width], of_columns)
    blocks = tile(q, rule)
    blocks |= dict(BLOCK_M=min(64, blocks["BLOCK_M"]))            # registers for sums of their own
    programs = triton.cdiv(n, blocks["BLOCK_N"])
    lse, slope = None if loss else sums.new_empty(n), None
    if loss:
        slope, shares = sums.new_empty(len(sums), n), sums.new_empty(len(sums), programs)
    for at, (x, y, of_side) in enumerate([(q, k, rule), (k, q, swapped(rule))][:len(sums)]):
        operands, rest = arguments(x, y, temperature, of_side, blocks)
        of_loss = (slope[at], shares[at]) if loss else (None, None)
        ends_kernel[programs,](sums[at], lse, *of_loss, positive, reference, 1 / (n * len(sums)),
                               *operands, **rest)
    return Sums(sums, lse, slope, shares.sum() if loss else None)


def add(total, parts):
    """total (N,) takes in the sums of parts (T · N,)."""
    n = len(total)
    add_kernel[triton.cdiv(n, 64),](total, parts, len(parts) // n, n, BLOCK=64, enable_fp_fusion=True)


def merge(sums, parts, fresh=False, lse=None, positive=None, slope=None, weights=None, rule=None, of=None,
          reference=None):
    """sums (sides, 2, N) take in parts (2, T, N), of two sides twice that, in place of what they were if
    fresh, and lse (N,) is filled if given; with positives slope is filled, under a rule's temperature, and
    the loss returned, the mean over N rows, or as many as they are of. reference: 0 where all tops are."""
    sides, _, n = sums.shape
    tiles = parts.shape[1]
    block, high = (1024, 8) if tiles <= 8 else (32, 64)            # few rows: all in one program
    programs = triton.cdiv(n, block)
    shares = None if positive is None else sums.new_empty(programs)
    weight = 1 if weights is not None else 1 / (of or n)
    merge_kernel[programs,](sums, lse, slope, shares, parts, positive, weights, rule, reference,
                            weight / sides, tiles, n, sums.stride(1), SIDES=sides, FRESH=fresh, HIGH=high,
                            BLOCK=block, num_warps=8, enable_fp_fusion=True)
    return None if shares is None else shares[0] if programs == 1 else shares.sum()


def sums_block(q, k, square):
    """(rows, columns) of a block: rows stay in cache, a table of parts has PARTS entries at most."""
    height = max(1024, min(SIDE, 2 ** 24 // q.shape[1] // 1024 * 1024))
    return height, height if square else PARTS * 64 // height // 1024 * 1024


def block_sizes(x, rule, two_sided=False):
    """As tile(); narrow rows stay in shared memory while those of the other side pass."""
    blocks, width = tile(x, rule, two_sided), max(16, triton.next_power_of_2(x.shape[1]))
    resident = x.element_size() == 2 and width <= 128
    if resident:
        blocks |= dict(BLOCK_D=width, num_stages=2)
    return blocks | dict(RESIDENT=resident)


def sums_sizes(x, rule):
    """As block_sizes(); half a tile leaves registers for the sums of columns: three programs at a time."""
    blocks = block_sizes(x, rule, two_sided=True)
    if blocks["RESIDENT"] and capability(x) == 9:
        blocks |= dict(BLOCK_N=64, num_warps=4, maxnreg=168)
    return blocks
