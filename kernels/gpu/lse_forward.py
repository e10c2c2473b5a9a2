"""Forward pass: log-sum-exp of each row of q·kᵀ/τ, or of each row and each column; and the softmax loss.

Eager                                      bytes moved, N·M logits       here
    s = q @ k.T / temperature              write 4 N·M                   tiles stay in registers
    s = s.masked_fill(excluded, -inf)      read and write 8 N·M          where() on the few tiles that need it
    lse = s.logsumexp(1), s.logsumexp(0)   read 8 N·M or more            one or two numbers per row of a tile

Two algorithms share this file; s is in log2 units:

    function          used for                                     kernels, in order
    tile_max_forward  row softmax only, k is not q; any softmax,   tile_stats_kernel, merge_stats_kernel
                      if q and k have at most FEW_ROWS rows
    bounded_forward   row and column softmax, or self-similarity   bounded_sums_kernel, add_sums_kernel,
                                                                   finish_sums_kernel

tile_max_forward gives every tile its own maxima. Each tile (I, J) writes two numbers per row i:

    m[J, i] = max_{j∈J} s_ij        l[J, i] = Σ_{j∈J} exp2(s_ij − m[J, i])

and, if columns are asked for, two per column, from the same dot products. merge_stats_kernel merges the tiles
of a row: m_i = max_J m[J, i], l_i = Σ_J l[J, i] exp2(m[J, i] − m_i). m and l stay two numbers: lse, one
number, would be rounded at the size of m, and all softmax weights of the row would have that error.

bounded_forward subtracts one shift r from all logits (bound.py), so that one exponential serves rows and
columns. A program takes a column tile J and loops over up to ROWS_PER_PROGRAM rows. It writes the sums of the
rows at each step and keeps the sums of its columns in registers until the end:

    row_sums[J, i] = Σ_{j∈J} exp2(s_ij − r)      column_sums[j] = Σ_i exp2(s_ij − r) over the program's rows

add_sums_kernel adds these sums to l. finish_sums_kernel computes rows again if their sum underflowed.

With self-similarity the logits are symmetric: the column sums of tile (I, J) are the row sums of tile (J, I),
so only tiles on and above the diagonal are computed, which saves half of the products. Large problems are cut
into blocks of tiles; the sums of one block are added before the next block starts, and programs that run
together share rows, which stay in the L2 cache. There are no atomics, and the order of all sums is fixed: the
same input gives the same bits.

The softmax loss compares the lse of each row with its positive. The mask excludes the positive from the sum,
by index, and its dot product is kept:

    gap_i = lse_i − positive_i        loss = Σ_i w_i softplus(gap_i)        dloss_dlse_i = σ(gap_i)

So dloss_dlse is accurate also when it is tiny, unlike 1 − p_positive, which would be 1 − 0.999…. The last
kernel of each algorithm computes all three numbers.
"""
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..masks import transposed
from .bound import MIN_LOG2_SUM, bound_of_norms, has_few_rows
from .launch import (
    TARGET_PROGRAMS, aligned_operands, capability, ceil_div, check_device, column_ranges, kernel_args,
    next_power_of_2, temperature_only_mask, tile_config, total)
from .tiles import (
    LOG2E, bound_is_zero, exp2_scaled, finite_max, keep_mask, kept_column_range, kernel, load_tile,
    log2e_over_tau, lse_minus_positive, max_and_sum_exp, merge_max_sum, needs_mask, positive_columns,
    qk_tile, softplus, swizzle_program_id)

MAX_BLOCK_ROWS = 2 ** 14       # 16,384 rows of 768 features fit the L2 cache
MAX_TABLE_ENTRIES = 2 ** 22    # largest number of (tile, row) entries of a block; m and l take 16 MiB each
ROWS_PER_PROGRAM = 512         # largest number of rows that a program of bounded_sums_kernel loops over


@triton.jit
def save_positives(POSITIVE, qk, rows, column, index_base, N, M, MASK, EXCLUDE: tl.constexpr,
                   BLOCK_M: tl.constexpr, SELF_SIMILARITY: tl.constexpr):
    """Write the dot products of those rows whose positive is in this tile, before the mask excludes them.

    index_base  as in tiles.keep_mask
    """
    target = positive_columns(rows, N, M, MASK, EXCLUDE)
    is_target = (column - index_base + tl.arange(0, BLOCK_M))[None, :] == (target - index_base)[:, None]
    found = tl.sum(tl.where(is_target, qk, 0.0), 1)
    in_tile = (rows < N) & (target >= column) & (target < column + BLOCK_M) & (target < M)
    tl.store(POSITIVE + rows, found, mask=in_tile)
    if EXCLUDE == "pair" and SELF_SIMILARITY:      # tiles below the diagonal are never computed
        tl.store(POSITIVE + target, found, mask=in_tile)


@kernel
def tile_stats_kernel(ROW_TABLE, COLUMN_TABLE, POSITIVE, RANGES, first_row, first_column, height, width,
                      tiles_per_program, Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr,
                      PRECISION: tl.constexpr, RESIDENT: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write m and l of the rows and columns of each tile, for the block of `height` rows and `width` columns.

    ROW_TABLE     (2, column tiles J, height): m and l of row first_row + i in tile J
    COLUMN_TABLE  (2, row tiles I, width): m and l of column first_column + j in tile I; or None
    A program takes a row tile and loops over tiles_per_program column tiles. RESIDENT: it loads q only once.
    """
    programs_per_row = tl.cdiv(tl.cdiv(width, BLOCK_M), tiles_per_program)
    tile_i, program_j = swizzle_program_id(tl.program_id(0), tl.cdiv(height, BLOCK_N), programs_per_row)
    row = first_row + tile_i * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    scale = log2e_over_tau(MASK)
    if RESIDENT:
        q = load_tile(Q, row, 0, N, SHAPE.D, SHAPE.q_stride, BLOCK_N, BLOCK_D)
    start = first_column + program_j * tiles_per_program * BLOCK_M
    stop = tl.minimum(start + tiles_per_program * BLOCK_M, first_column + width)
    start, stop = kept_column_range(RANGES, row // BLOCK_N, start, stop, BLOCK_M)
    for column in range(start, stop, BLOCK_M):
        columns = column + tl.arange(0, BLOCK_M)
        if RESIDENT:
            k = load_tile(K, column, 0, M, SHAPE.D, SHAPE.k_stride, BLOCK_M, BLOCK_D)
            qk = tl.dot(q, k.T, input_precision=PRECISION)
        else:
            qk = qk_tile(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        if needs_mask(row, column, N, M, MASK, EXCLUDE, BLOCK_N, BLOCK_M):
            if POSITIVE is not None:
                save_positives(POSITIVE, qk, rows, column, 0, N, M, MASK, EXCLUDE, BLOCK_M, False)
            qk = tl.where(keep_mask(rows, column, 0, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M), qk,
                          float("-inf"))
        m_i, l_i = max_and_sum_exp(qk, scale, 1)
        place = ROW_TABLE + (column - first_column) // BLOCK_M * height + rows - first_row
        tl.store(place, m_i, mask=rows < first_row + height)
        tl.store(place + tl.cdiv(width, BLOCK_M) * height, l_i, mask=rows < first_row + height)
        if COLUMN_TABLE is not None:
            m_j, l_j = max_and_sum_exp(qk, scale, 0)
            place = COLUMN_TABLE + tile_i * width + columns - first_column
            tl.store(place, m_j, mask=columns < first_column + width)
            tl.store(place + tl.cdiv(height, BLOCK_N) * width, l_j, mask=columns < first_column + width)


@kernel
def bounded_sums_kernel(ROW_SUMS, COLUMN_SUMS, POSITIVE, BOUND, first_row, first_column, height, width,
                        tiles_per_program, Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr,
                        PRECISION: tl.constexpr, RESIDENT: tl.constexpr, TRIANGLE: tl.constexpr,
                        BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write sums of exp2(s − r), r = BOUND, over the tiles of the block of `height` rows and `width` columns.

    ROW_SUMS     (column tiles J, height): sum over J of row first_row + i
    COLUMN_SUMS  (programs of a column tile, width): sum of column first_column + j over the program's rows
    TRIANGLE     the block lies on the diagonal of a self-similarity: only the tiles on and above the diagonal
                 are computed. Those on it contribute to COLUMN_SUMS only, so that each logit counts once
                 (BLOCK_M is a multiple of BLOCK_N)
    A program takes a column tile and loops over tiles_per_program row tiles. RESIDENT: it loads k only once.
    """
    programs_per_column = tl.cdiv(tl.cdiv(height, BLOCK_N), tiles_per_program)
    tile_j, program_i = swizzle_program_id(tl.program_id(0), tl.cdiv(width, BLOCK_M), programs_per_column)
    column = first_column + tile_j * BLOCK_M
    columns = column + tl.arange(0, BLOCK_M)
    bound = tl.load(BOUND)
    # with a number as temperature, scale is a kernel argument: unless it passes through where(), registers
    # spill on sm_90. If bound is NaN, all results are NaN anyway
    scale = tl.where(bound == bound, log2e_over_tau(MASK), bound)
    if RESIDENT:
        k = load_tile(K, column, 0, M, SHAPE.D, SHAPE.k_stride, BLOCK_M, BLOCK_D)
    start = first_row + program_i * tiles_per_program * BLOCK_N
    stop = tl.minimum(start + tiles_per_program * BLOCK_N, first_row + height)
    if TRIANGLE:
        stop = tl.minimum(stop, column + BLOCK_M)
    # a thread holds rows r and r + 8 of each 16 rows of a tensor core product: it adds them without a shuffle
    column_sums = tl.zeros((BLOCK_N // 16, 8, BLOCK_M), tl.float32)
    for row in range(start, stop, BLOCK_N):
        rows = row + tl.arange(0, BLOCK_N)
        if RESIDENT:
            q = load_tile(Q, row, 0, N, SHAPE.D, SHAPE.q_stride, BLOCK_N, BLOCK_D)
            qk = tl.dot(q, k.T, input_precision=PRECISION)
        else:
            qk = qk_tile(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        if needs_mask(row, column, N, M, MASK, EXCLUDE, BLOCK_N, BLOCK_M):
            if POSITIVE is not None:
                save_positives(POSITIVE, qk, rows, column, column, N, M, MASK, EXCLUDE, BLOCK_M, True)
            keep = keep_mask(rows, column, column, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M)
            qk = tl.where(keep, qk, float("-inf"))
        e = exp2_scaled(qk, scale, bound)
        column_sums += tl.sum(tl.reshape(e, (BLOCK_N // 16, 2, 8, BLOCK_M)), 1)
        end = first_row + height
        if TRIANGLE:
            end = tl.minimum(end, column)
        tl.store(ROW_SUMS + tile_j * height + rows - first_row, tl.sum(e, 1), mask=rows < end)
    tl.store(COLUMN_SUMS + program_i * width + columns - first_column, tl.sum(tl.sum(column_sums, 0), 0),
             mask=columns < first_column + width)


@kernel
def add_sums_kernel(TOTAL, TABLE, tiles, count, triangle_tiles, OVERWRITE: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Add the rows of a table (tiles, count): TOTAL[i] += Σ_J TABLE[J, i].

    OVERWRITE       ignore what TOTAL holds
    triangle_tiles  of as many first rows J only the sums above the diagonal, i < J · BLOCK_M, were written
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, tiles, 32):
        j = first + tl.arange(0, 32)
        written = (j >= triangle_tiles)[:, None] | (rows[None, :] < (j * BLOCK_M)[:, None])
        sums += tl.sum(tl.load(TABLE + j[:, None] * count + rows[None, :],
                               mask=written & (j < tiles)[:, None] & (rows < count)[None, :], other=0.0), 0)
    if not OVERWRITE:
        sums += tl.load(TOTAL + rows, mask=rows < count, other=0.0)
    tl.store(TOTAL + rows, sums, mask=rows < count)


@kernel
def finish_sums_kernel(STATS, LSE, DLOSS_DLSE, LOSS, POSITIVE, BOUND, weight,
                       Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write m = r = BOUND to STATS, which already holds l. Then write the results.

    The results are LSE; or, for a loss, DLOSS_DLSE, and in LOSS one partial sum of the loss per program.
    Rows whose l underflowed are computed again, with a maximum of their own.
    """
    row = tl.program_id(0) * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    inside, bound, scale = rows < N, tl.load(BOUND), log2e_over_tau(MASK)
    l_i = tl.load(STATS + N + rows, mask=inside, other=1.0)
    m_i = tl.zeros((BLOCK_N,), tl.float32) + finite_max(bound)
    underflowed = tl.log2(l_i) < tl.where(bound > 0.0, MIN_LOG2_SUM, float("-inf"))
    if tl.max(underflowed.to(tl.int32), 0) > 0:
        own_m = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        own_l = tl.zeros((BLOCK_N,), tl.float32)
        for column in range(0, M, BLOCK_M):
            qk = qk_tile(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
            keep = keep_mask(rows, column, 0, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M)
            tile_m, tile_l = max_and_sum_exp(tl.where(keep, qk, float("-inf")), scale, 1)
            own_m, own_l = merge_max_sum(own_m, own_l, tile_m, tile_l)
        underflowed = underflowed & (own_l > 0.0)                  # a row without columns keeps the shift
        m_i, l_i = tl.where(underflowed, finite_max(own_m), m_i), tl.where(underflowed, own_l, l_i)
        tl.store(STATS + N + rows, l_i, mask=inside)
    tl.store(STATS + rows, m_i, mask=inside)
    if LOSS is None:
        tl.store(LSE + rows, (m_i + tl.log2(l_i)) / LOG2E, mask=inside)
    else:
        positive = tl.load(POSITIVE + rows, mask=inside, other=0.0)
        loss, dloss_dlse = softplus(lse_minus_positive(m_i, l_i, positive, scale))
        tl.store(DLOSS_DLSE + rows, dloss_dlse, mask=inside)
        tl.store(LOSS + tl.program_id(0), tl.sum(tl.where(inside, loss, 0.0), 0) * weight)


@kernel
def merge_stats_kernel(STATS, LSE, DLOSS_DLSE, LOSS, TABLE, POSITIVE, WEIGHTS, MASK, BOUND, weight, tiles,
                       count, l_offset, SIDES: tl.constexpr, OVERWRITE: tl.constexpr,
                       TILES_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """Merge m and l of the tiles in TABLE (SIDES, 2, tiles, count) into STATS[side, :, i].

    Then write those that are given: LSE, DLOSS_DLSE, and in LOSS one partial sum of the loss per program.
    OVERWRITE  ignore what STATS holds
    BOUND      the shift r, or None. If r is 0, all m are 0 and TABLE holds only l; otherwise m and l
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    loss_sum, no_maximum = 0.0, bound_is_zero(BOUND)
    for side in tl.static_range(SIDES):
        m_i, l_i = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
        stats = STATS + 2 * side * l_offset + rows
        if not OVERWRITE:
            m_i = tl.load(stats, mask=inside, other=float("-inf"))
            l_i = tl.where(m_i == float("-inf"), 0.0, tl.load(stats + l_offset, mask=inside, other=0.0))
        for first in range(0, tiles, TILES_AT_ONCE):
            j = first + tl.arange(0, TILES_AT_ONCE)
            place = TABLE + (2 * side * tiles + j)[:, None] * count + rows[None, :]
            mask = (j < tiles)[:, None] & inside[None, :]
            if BOUND is None:
                tile_m = tl.load(place, mask=mask, other=float("-inf"))
            else:
                default = tl.where(no_maximum, 0.0, float("-inf"))
                tile_m = tl.load(place, mask=tl.where(no_maximum, False, mask), other=default)
            m_new = tl.maximum(m_i, tl.max(tile_m, 0))
            tile_l = tl.load(place + tiles * count, mask=mask, other=0.0)
            tile_l *= tl.exp2(tile_m - finite_max(m_new)[None, :])
            tile_l = tl.where(tile_m == float("-inf"), 0.0, tile_l)    # tiles that no program computed
            l_i = l_i * tl.exp2(m_i - finite_max(m_new)) + tl.sum(tile_l, 0)
            m_i = m_new
        if LSE is not None or LOSS is not None:                        # STATS is complete
            m_i = finite_max(m_i)
        tl.store(stats, m_i, mask=inside)
        tl.store(stats + l_offset, l_i, mask=inside)
        if LSE is not None:
            tl.store(LSE + rows, (m_i + tl.log2(l_i)) / LOG2E, mask=inside)
        if LOSS is not None:
            positive = tl.load(POSITIVE + rows, mask=inside, other=0.0)
            loss, dloss_dlse = softplus(lse_minus_positive(m_i, l_i, positive, log2e_over_tau(MASK)))
            if WEIGHTS is not None:
                row_weight = tl.load(WEIGHTS + rows, mask=inside, other=0.0)
                loss = tl.where(row_weight == 0.0, 0.0, loss * row_weight)      # the loss may be NaN
                dloss_dlse = tl.where(row_weight == 0.0, 0.0, dloss_dlse * row_weight)
            tl.store(DLOSS_DLSE + side * count + rows, dloss_dlse, mask=inside)
            loss_sum += tl.sum(tl.where(inside, loss, 0.0), 0) * weight
    if LOSS is not None:
        tl.store(LOSS + tl.program_id(0), loss_sum)


class ForwardResult(NamedTuple):
    """Results of the forward pass, all float32."""
    stats: Any             # (sides, 2, N): m and l of rows, and of columns if both were asked for
    lse: Any               # (N,) of the rows; None if the loss was asked for
    dloss_dlse: Any        # (sides, N), without the factor 1/N that rows without weights have; or None
    loss: Any              # scalar; or None


def forward(q, k, temperature, mask, both=False, loss=False, weights=None, positive=None):
    """Return the ForwardResult of the rows and, with both, of the columns (then N = M).

    k         None: self-similarity, with a symmetric mask
    loss      True: return Σ_i w_i softplus(gap_i) instead of lse; with both, the mean of the two sides
    weights   (N,) float32 w; None: 1/N
    positive  (N,) float32 dot products, if the positives are not rows of k; only for the rows' softmax
    """
    check_device(q)
    self_similarity, k = k is None, q if k is None else k
    q, k, mask = aligned_operands(q, k, mask)
    bound = bound_of_norms(q, k, temperature) if both or self_similarity else None
    if bound is not None:
        return bounded_forward(q, k, temperature, mask, bound, loss, self_similarity)
    # for few rows computing both triangles of a self-similarity costs nothing extra
    return tile_max_forward(q, k, temperature, mask, both, loss, weights, positive)


def tile_max_forward(q, k, temperature, mask, both, loss, weights, positive):
    """Return the ForwardResult of forward(), computed with maxima per tile, from aligned_operands."""
    n, m = q.shape[0], k.shape[0]
    few = has_few_rows(n, m)
    stats = torch.empty(2 if both else 1, 2, n, dtype=torch.float32, device=q.device)
    outputs, saved_positive = dict(lse=stats.new_empty(n)), None
    if loss:
        if positive is None:
            positive = saved_positive = stats.new_empty(n)
        outputs = dict(positive=positive, dloss_dlse=torch.empty_like(stats[:, 0]), weights=weights,
                       mask=temperature_only_mask(temperature, q))
    lse, dloss_dlse = outputs.get("lse"), outputs.get("dloss_dlse")
    config = lse_config(q, mask, both) | (dict(maxnreg=255) if both else {})
    assert not both or config["BLOCK_N"] == config["BLOCK_M"], "rows and columns need tables of one shape"
    operands, rest = kernel_args(q, k, mask, temperature, config)
    ranges = column_ranges(mask, config)

    def tile_stats(i, j, height, width):
        """Return the tables of a block: (2, column tiles, height), (2, row tiles, width) or no entries."""
        tiles_i, tiles_j = ceil_div(height, config["BLOCK_N"]), ceil_div(width, config["BLOCK_M"])
        sizes = 2 * tiles_j * height, 2 * tiles_i * width if both else 0
        row_table, column_table = stats.new_empty(sum(sizes)).split(sizes)
        if ranges is not None:
            row_table.fill_(-torch.inf)  # tiles outside the ranges are not computed
        # a loop over several column tiles pays only if q is loaded once, or if ranges skip tiles
        longest = 1 if ranges is None and not config["RESIDENT"] else 16
        tiles_per_program = max(1, min(longest, tiles_i * tiles_j // (4 * TARGET_PROGRAMS)))
        tile_stats_kernel[tiles_i * ceil_div(tiles_j, tiles_per_program),](
            row_table, column_table if both else None, saved_positive, ranges, i, j, height, width,
            tiles_per_program, *operands, **rest)
        return row_table.view(2, tiles_j, height), column_table.view(2, -1, width)

    height, width = stats_block_shape(q, k, square=both)
    if height >= n and width >= m:
        row_table, _ = tile_stats(0, 0, n, m)                      # with both, the column table follows it
        return ForwardResult(stats, lse, dloss_dlse, merge_stats(stats, row_table, few, True, **outputs))
    stats.fill_(-torch.inf)
    for i in range(0, n, height):
        for j in range(0, m, width):
            row_table, column_table = tile_stats(i, j, min(height, n - i), min(width, m - j))
            merge_stats(stats[:1, :, i:i + height], row_table, few)
            if both:
                merge_stats(stats[1:, :, j:j + width], column_table, few)
    no_tiles = stats[0, :, None, :][:, :0]
    return ForwardResult(stats, lse, dloss_dlse, merge_stats(stats, no_tiles, few, **outputs))


def bounded_forward(q, k, temperature, mask, bound, loss, self_similarity):
    """Return the ForwardResult of forward() for many rows and both sides, computed with one shift.

    q, k, mask  from aligned_operands
    """
    n = q.shape[0]
    stats = torch.empty(1 if self_similarity else 2, 2, n, dtype=torch.float32, device=q.device)
    # positives are stored even if no loss reads them: without a store, the branch for masked tiles is not
    # compiled as a branch, and registers spill
    l_sums, positive = stats[:, 1], stats.new_empty(n) if loss or mask.exclude != "none" else None
    config = bounded_config(q, mask)
    assert not self_similarity or config["BLOCK_M"] % config["BLOCK_N"] == 0, "tiles must end on the diagonal"
    operands, rest = kernel_args(q, k, mask, temperature, config)
    side, _ = stats_block_shape(q, k, square=True)
    for i in range(0, n, side):
        for j in range(i if self_similarity else 0, n, side):
            height, width, on_diagonal = min(side, n - i), min(side, n - j), self_similarity and i == j
            tiles_i, tiles_j = ceil_div(height, config["BLOCK_N"]), ceil_div(width, config["BLOCK_M"])
            tiles_per_program = max(1, min(ROWS_PER_PROGRAM // config["BLOCK_N"],
                                           tiles_i * tiles_j // (4 * TARGET_PROGRAMS)))
            programs_per_column = ceil_div(tiles_i, tiles_per_program)
            table = l_sums.new_empty(tiles_j * height + programs_per_column * width)
            row_sums, column_sums = table.split([tiles_j * height, programs_per_column * width])
            bounded_sums_kernel[tiles_j * programs_per_column,](
                row_sums, column_sums, positive, bound, i, j, height, width, tiles_per_program, *operands,
                TRIANGLE=on_diagonal, **rest)
            if on_diagonal:
                # height = width, so each row of the table has `height` sums; by symmetry the column sums also
                # belong to l of these rows
                add_sums(l_sums[0, i:i + height], table, i == 0, config, tiles_j)
            else:
                add_sums(l_sums[0, i:i + height], row_sums, j == 0, config)
                add_sums(l_sums[-1, j:j + width], column_sums, i == 0, config)
    return finish_sums(stats, positive, q, k, temperature, mask, bound, loss)


def finish_sums(stats, positive, q, k, temperature, mask, bound, loss):
    """Return the ForwardResult of bounded_forward, whose stats (sides, 2, N) already hold l."""
    n, sides = q.shape[0], stats.shape[0]
    config = tile_config(q, mask)
    # a smaller tile leaves registers for own_m and own_l of finish_sums_kernel
    config |= dict(BLOCK_M=min(64, config["BLOCK_M"]))
    programs = ceil_div(n, config["BLOCK_N"])
    lse, dloss_dlse = None if loss else stats.new_empty(n), None
    if loss:
        dloss_dlse, loss_sums = stats.new_empty(sides, n), stats.new_empty(sides, programs)
    for side, (x, y, side_mask) in enumerate([(q, k, mask), (k, q, transposed(mask))][:sides]):
        operands, rest = kernel_args(x, y, side_mask, temperature, config)
        outputs = (dloss_dlse[side], loss_sums[side]) if loss else (None, None)
        finish_sums_kernel[programs,](stats[side], lse, *outputs, positive, bound, 1 / (n * sides),
                                      *operands, **rest)
    return ForwardResult(stats, lse, dloss_dlse, total(loss_sums) if loss else None)


def add_sums(sums, table, overwrite, config, triangle_tiles=0):
    """Add a table (tiles · N,) to sums (N,), in place. overwrite: ignore what sums holds."""
    n = sums.shape[0]
    add_sums_kernel[ceil_div(n, 64),](sums, table, table.shape[0] // n, n, triangle_tiles,
                                      OVERWRITE=overwrite, BLOCK_M=config["BLOCK_M"], BLOCK=64,
                                      enable_fp_fusion=True)


def merge_stats(stats, table, few, overwrite=False, lse=None, positive=None, dloss_dlse=None, weights=None,
                mask=None, mean_over=None, bound=None):
    """Merge the m and l of tiles into stats, in place, and fill lse or dloss_dlse if they are given.

    stats      (sides, 2, N)
    table      (2, tiles, N) m and l of the rows. For two sides the kernel reads past this view: the table of
               the columns, of the same shape, must follow it in the same memory
    few        has_few_rows of the whole problem, so that a short batch uses the same compiled kernel
    overwrite  True: ignore what stats holds
    positive   (N,) dot products of the positives, for a loss
    weights    (N,) row weights of the loss; None: 1 / mean_over, whose default is N
    mask       KernelMask with the temperature, for a loss
    bound      the shift r, a 0-dim tensor, or None. If r is 0, all m are 0 and the table holds only l;
               otherwise it holds m and l
    returns    the loss, a scalar; None without positive
    """
    sides, _, n = stats.shape
    tiles = table.shape[1]
    # a program takes 1024 rows of a small batch, which then needs one program and no final sum
    block, tiles_at_once = (1024, 8) if few else (32, 64)
    programs = ceil_div(n, block)
    loss_sums = None if positive is None else stats.new_empty(programs if programs > 1 else ())
    weight = 1 if weights is not None else 1 / (mean_over or n)
    merge_stats_kernel[programs,](stats, lse, dloss_dlse, loss_sums, table, positive, weights, mask, bound,
                                  weight / sides, tiles, n, stats.stride(1), SIDES=sides,
                                  OVERWRITE=overwrite, TILES_AT_ONCE=tiles_at_once, BLOCK=block, num_warps=8,
                                  enable_fp_fusion=True)
    if loss_sums is None:
        return None
    return loss_sums if programs == 1 else total(loss_sums)


def stats_block_shape(q, k, square):
    """Return (rows, columns) of a block.

    Its rows of q have at most 2²⁴ numbers, 32 MiB in half types, which fit the L2 cache. Its table has at
    most MAX_TABLE_ENTRIES entries if a tile has 64 columns or more.
    """
    height = max(1024, min(MAX_BLOCK_ROWS, 2 ** 24 // q.shape[1] // 1024 * 1024))
    return height, height if square else MAX_TABLE_ENTRIES * 64 // height // 1024 * 1024


def lse_config(x, mask, two_sided=False):
    """Return tile_config() plus RESIDENT: whether a program loads its own rows once (half types, D ≤ 128)."""
    config, features = tile_config(x, mask, two_sided), max(16, next_power_of_2(x.shape[1]))
    resident = x.element_size() == 2 and features <= 128
    if resident:
        config |= dict(BLOCK_D=features, num_stages=2)
        if mask.exclude == "pair" and capability(x) >= 10:
            config |= dict(BLOCK_M=64)                             # 128 columns spill registers there
    return config | dict(RESIDENT=resident)


def bounded_config(x, mask):
    """Return lse_config() for bounded_sums_kernel.

    On sm_90, 64 rows per tile leave registers for the column sums, so that three programs fit on an SM.
    """
    config = lse_config(x, mask, two_sided=True)
    if config["RESIDENT"] and capability(x) == 9:
        config |= dict(BLOCK_N=64, num_warps=4, maxnreg=168)
    return config
