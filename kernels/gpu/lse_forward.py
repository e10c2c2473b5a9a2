"""Forward pass: log-sum-exp of each row (or of each row and column) of q·kᵀ/τ, and the softmax loss.

Eager                                      bytes moved by eager          this file
    s = q @ k.T / temperature              write 4 N·M                   tiles stay in registers
    s = s.masked_fill(excluded, -inf)      read and write 8 N·M          where() on the few tiles that need it
    lse = s.logsumexp(1), s.logsumexp(0)   read 8 N·M or more            write two numbers per row of a tile

sums_kernel writes two numbers for each row of a tile to a table. For row i of a tile with the columns J:

    m[J, i] = max_{j∈J} s_ij        l[J, i] = Σ_{j∈J} exp2(s_ij − m[J, i])        s: logits in log2 units

If column sums are needed too, sums_kernel also writes two numbers per column. merge_stats_kernel computes
m_i = max_J m[J, i] and l_i = Σ_J l[J, i] exp2(m[J, i] − m_i) for each row. Both m and l are stored, because
in the sum m + log2 l, a large m would round off digits of log2 l.

With column sums or self-similarity, one shift replaces all m (shift.py) if there are more than SHIFT_LOGITS
logits. row_stats_kernel then computes rows and columns again if their sums underflowed. With self-similarity,
column sums of tile (I, J) are row sums of tile (J, I), so only one of these two tiles is computed. Large
matrices are computed block by block, so that tables stay small. The order of all sums is fixed (there are no
atomics), so the same input gives the same bits.

The softmax loss compares lse_i with the logit of the positive of row i. The mask excludes the positive from
lse_i, and mask_tile stores the dot product of the positive:

    gap_i = lse_i − positive_i        loss = Σ_i w_i softplus(gap_i)        dloss_dlse_i = σ(gap_i)

w_i is 1/N or the caller's weight of row i (which also multiplies dloss_dlse_i). σ(gap_i) is accurate even
when it is tiny; the usual formula, 1 − softmax of the positive, would lose digits.
"""
import torch
import triton
import triton.language as tl

from .heuristics import cdiv, table_block_shape
from .launch import aligned, kernel_args, launch, persistent_grid, swapped, temperature_of, tile_config
from .shift import MIN_LOG2_SUM, new_sides, shift_of_norms
from .tiles import (
    LOG2E, add_tile_product, cast_for_matmul, count_steps, exp2_scaled,
    finite_max, keep_mask, kernel, log2e_over_tau, lse_minus_positive,
    needs_mask, next_step, positive_columns, qk_tile, softmax_factor, softplus)

ROWS_OF_STATS = 64             # rows per program of row_stats_kernel


@triton.jit
def mask_tile(x, POSITIVE, row, column, N, M, MASK, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
              ONE_OF_TWO: tl.constexpr, shift, scale, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return x, a tile of logits, with −∞ where the mask excludes them.

    (x + shift) / scale of positives is written to POSITIVE. From sums_kernel, x is dot product · scale −
    shift, so the dot product is written. sigmoid.py passes shift 0 and scale 1, so the logit is written.
    ONE_OF_TWO  True: of tiles (I, J) and (J, I), only this one is computed; store the positives of both
    """
    if needs_mask(row, column, N, M, MASK, EXCLUDE, BLOCK_N, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_N)
        if POSITIVE is not None:
            target = positive_columns(rows, N, M, MASK, EXCLUDE)
            is_target = tl.arange(0, BLOCK_M)[None, :] == (target - column)[:, None]
            found = (tl.sum(tl.where(is_target, x, 0.0), 1) + shift) / scale
            in_tile = (rows < N) & (target >= column) & (target < column + BLOCK_M) & (target < M)
            tl.store(POSITIVE + rows, found, mask=in_tile)
            if EXCLUDE == "pair" and ONE_OF_TWO:
                tl.store(POSITIVE + target, found, mask=in_tile)
        keep = keep_mask(rows, column, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M)
        x = tl.where(keep, x, float("-inf"))
    return x


@triton.jit
def store_stats(TABLE, tile, tiles, at, count, m, l, mask):
    """Write m and l of one tile to TABLE (2, tiles, count), for its rows (or columns) with indices `at`."""
    tl.store(TABLE + tile * count + at, m, mask=mask)
    tl.store(TABLE + (tiles + tile) * count + at, l, mask=mask)


@kernel
def sums_kernel(ROW_TABLE, COLUMN_TABLE, E, POSITIVE, SHIFT, tiles, first_row, first_column, height, width,
                e_row_stride, Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                MAXIMA: tl.constexpr, TRIANGLE: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write m and l of the rows and columns of each tile, for a block of `height` rows and `width` columns.

    ROW_TABLE     (2, column tiles, height): entry [:, J, i] is m and l of row first_row + i in column tile J
    COLUMN_TABLE  None or (2, row tiles, width): [:, I, j] is m and l of column first_column + j in row tile I
    E             output (height, width), padded to whole tiles, for exp2(s − m); or None. If E and SHIFT are
                  given, MAXIMA=True does nothing if SHIFT is 0, and MAXIMA=False does nothing if it is not
    MAXIMA        True: m is the maximum of a row (or column) of the tile; False: m is the number SHIFT
    TRIANGLE      True: a diagonal block of a self-similarity (tiles.tile_at); COLUMN_TABLE is ROW_TABLE
    """
    tiles_i, tiles_j, scale = tl.cdiv(height, BLOCK_N), tl.cdiv(width, BLOCK_M), log2e_over_tau(MASK)
    if E is not None and SHIFT is not None:
        tiles = tl.where((tl.load(SHIFT) == 0.0) == MAXIMA, 0, tiles)
    tile, tile_i, tile_j, d = tl.program_id(0) - tl.num_programs(0), 0, 0, SHAPE.D
    qk = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(0, count_steps(tiles, SHAPE.D, BLOCK_D)):
        tile, tile_i, tile_j, d = next_step(tile, tile_i, tile_j, d, tiles_i, tiles_j, SHAPE.D, TRIANGLE,
                                            BLOCK_D)
        row, column = first_row + tile_i * BLOCK_N, first_column + tile_j * BLOCK_M
        qk = add_tile_product(qk, Q, K, row, column, d, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        if d + BLOCK_D >= SHAPE.D:                                 # the tile is complete
            shift = 0.0 if MAXIMA else tl.load(SHIFT)
            # qk must be used before the branch in mask_tile; tiles.count_steps says why
            x = qk + 0.0 if MAXIMA else tl.fma(qk, scale, -shift)
            x = mask_tile(x, POSITIVE, row, column, N, M, MASK, EXCLUDE, PRECISION, COLUMN_TABLE is not None,
                          shift, 1.0 if MAXIMA else scale, BLOCK_N, BLOCK_M)
            i, j = tile_i * BLOCK_N + tl.arange(0, BLOCK_N), tile_j * BLOCK_M + tl.arange(0, BLOCK_M)
            if MAXIMA:
                m_i = tl.max(x, 1) * scale                    # as scale > 0, this is the maximum of x · scale
                e = exp2_scaled(x, scale, finite_max(m_i)[:, None])
            else:
                m_i = tl.zeros((BLOCK_N,), tl.float32) + finite_max(shift)
                e = tl.exp2(x)
            store_stats(ROW_TABLE, tile_j, tiles_j, i, height, m_i, tl.sum(e, 1), i < height)
            if E is not None:
                tl.store(E + i.to(tl.int64)[:, None] * e_row_stride + j[None, :],
                         cast_for_matmul(e, E, PRECISION))
            if COLUMN_TABLE is not None:
                m_j = tl.zeros((BLOCK_M,), tl.float32) + finite_max(shift)
                if MAXIMA:
                    m_j = tl.max(x, 0) * scale
                    e = exp2_scaled(x, scale, finite_max(m_j)[None, :])
                mask = j < width
                if TRIANGLE:
                    mask = mask & (tile_i != tile_j)               # on the diagonal, column sums = row sums
                store_stats(COLUMN_TABLE, tile_i, tiles_i, j, width, m_j, tl.sum(e, 0), mask)
            qk = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)


@kernel
def row_stats_kernel(STATS, SHIFT, COMMON_M, Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr,
                     PRECISION: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """STATS (2, N) has m = SHIFT and l of each row. If l of a row underflowed, compute this row again, with
    its maximum as m, and replace m and l. If there are such rows, set COMMON_M to ∞."""
    row, scale = tl.program_id(0) * BLOCK_N, log2e_over_tau(MASK)
    rows = row + tl.arange(0, BLOCK_N)
    old_l = tl.load(STATS + N + rows, mask=rows < N, other=1.0)
    wanted = tl.log2(old_l) < tl.where(tl.load(SHIFT) > 0.0, MIN_LOG2_SUM, float("-inf"))
    stop = tl.where(tl.max(wanted.to(tl.int32), 0) > 0, M, 0)
    m_i = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_N,), tl.float32)
    for column in range(0, stop, BLOCK_M):
        qk = qk_tile(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        keep = keep_mask(rows, column, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M)
        qk = tl.where(keep, qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
        e = exp2_scaled(qk, scale, finite_max(m_new)[:, None])
        m_i, l_i = m_new, l_i * tl.exp2(m_i - finite_max(m_new)) + tl.sum(e, 1)
    wanted = wanted & (l_i > 0.0)                                  # store no row with all columns excluded
    if tl.max(wanted.to(tl.int32), 0) > 0:
        tl.store(COMMON_M, float("inf"))
    tl.store(STATS + rows, finite_max(m_i), mask=wanted)
    tl.store(STATS + N + rows, l_i, mask=wanted)


@kernel
def merge_stats_kernel(STATS, LSE, SIDES_OUT, LOSS, TABLE, POSITIVE, WEIGHTS, MASK, weight, tiles, count,
                       l_offset, side_count, side_stride, SIDES: tl.constexpr, OVERWRITE: tl.constexpr,
                       TILES_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """For each row i, merge m and l of all tiles, TABLE[side, :, :, i], into STATS[side, :, i].

    LSE gets the lse of each row, if given. LOSS gets each program's part of the loss, if given. With LOSS,
    SIDES_OUT gets a SoftmaxSide per side: three vectors, side_stride elements apart.
    OVERWRITE  True: ignore the old content of STATS
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, loss_sum = rows < count, 0.0
    for side in tl.static_range(SIDES):
        m_i, l_i = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
        stats = STATS + 2 * side * l_offset + rows
        if not OVERWRITE:
            m_i = tl.load(stats, mask=inside, other=float("-inf"))
            l_i = tl.load(stats + l_offset, mask=inside, other=0.0)
        for first in range(0, tiles, TILES_AT_ONCE):
            j = first + tl.arange(0, TILES_AT_ONCE)
            place = TABLE + (2 * side * tiles + j)[:, None] * count + rows[None, :]
            mask = (j < tiles)[:, None] & inside[None, :]
            tile_m = tl.load(place, mask=mask, other=float("-inf"))
            m_new = tl.maximum(m_i, tl.max(tile_m, 0))
            tile_l = tl.load(place + tiles * count, mask=mask, other=0.0)
            tile_l *= tl.exp2(tile_m - finite_max(m_new)[None, :])
            l_i = l_i * tl.exp2(m_i - finite_max(m_new)) + tl.sum(tile_l, 0)
            m_i = m_new
        if LSE is not None or LOSS is not None:                        # this is the last merge into STATS
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
                loss, dloss_dlse = loss * row_weight, dloss_dlse * row_weight
            out = SIDES_OUT + 3 * side * side_stride + rows
            tl.store(out, softmax_factor(dloss_dlse, l_i), mask=rows < side_count)
            tl.store(out + side_stride, m_i, mask=rows < side_count)
            tl.store(out + 2 * side_stride, dloss_dlse, mask=rows < side_count)
            loss_sum += tl.sum(tl.where(inside, loss, 0.0), 0) * weight
    if LOSS is not None:
        tl.store(LOSS + tl.program_id(0), loss_sum)


def similarity_lse(call):
    """Return (lse (N,), stats (2, N), COMMON_M or None), float32; the last two are for backward."""
    lse, stats, _, common_m = forward(call)
    return lse, stats[0], common_m


def softmax_loss_forward(call, both, weights):
    """Return (loss, sides for shift.as_side, COMMON_M or None), float32; the last two are for backward.

    The loss is Σ_i w_i softplus(gap_i) or, if both, the mean of row loss and column loss (N = M).
    weights  (N,) float32, the weights w_i in the loss; None: 1/N for all rows
    """
    loss, _, sides, common_m = forward(call, both, True, weights)
    return loss, sides, common_m


def forward(call, both=False, loss=False, weights=None):
    """Return (lse or loss, stats (1 or 2, 2, N), sides or None, COMMON_M or None) for the functions above."""
    call, triangle = aligned(call), call.k is None
    n, m = call.q.shape[0], call.keys.shape[0]                     # m is the number of keys
    sides, device = 2 if both else 1, call.q.device
    shift, common_m = shift_of_norms(call) if both or triangle else (None, None)
    stats = torch.empty(sides, 2, n, dtype=torch.float32, device=device)
    outputs = dict(lse=stats.new_empty(n))
    if loss:
        outputs = dict(positive=stats.new_empty(n), sides=new_sides(sides, n, device),
                       weights=weights, tau=temperature_of(call))
    config = tile_config(call.q, call.mask, triangle)
    if shift is None and (both or triangle):
        config |= dict(num_warps=8)                      # maxima of both rows and columns need more registers
    operands, rest = kernel_args(call, config)

    def sums(i, j, height, width):
        """Compute the block at (i, j): return (row table (2, column tiles, height), column table or None)."""
        tiles_i, tiles_j = cdiv(height, config["BLOCK_N"]), cdiv(width, config["BLOCK_M"])
        on_diagonal, sizes = triangle and i == j, (2 * tiles_j * height, 2 * tiles_i * width)
        tiles = tiles_i * (tiles_i + 1) // 2 if on_diagonal else tiles_i * tiles_j
        row_table, column_table = stats.new_empty(sizes[0]), None
        if both:
            row_table, column_table = stats.new_empty(sum(sizes)).split(sizes)
        elif triangle:
            column_table = row_table if on_diagonal else stats.new_empty(sizes[1])
        launch(sums_kernel, persistent_grid(tiles, stats, config["num_warps"]),
               row_table, column_table, None, outputs.get("positive"), shift, tiles, i, j, height, width, 0,
               *operands, MAXIMA=shift is None, TRIANGLE=on_diagonal, **rest)
        return row_table.view(2, tiles_j, height), column_table

    height, width = table_block_shape(call.q, call.keys, square=both or triangle)
    if height >= n and width >= m:
        table, _ = sums(0, 0, n, m)                    # with both=True, the column table comes next in memory
    else:
        merge_blocks(stats, n, m, height, width, triangle, sums)
        table = None
    if shift is not None:
        if table is not None:
            merge_stats(stats, table, True)
        recompute_rows(stats, call, config, shift, common_m)
        table = None
    loss = merge_stats(stats, table, table is not None, **outputs)
    return outputs["lse"] if loss is None else loss.sum(), stats, outputs.get("sides"), common_m


def merge_blocks(stats, n, m, height, width, triangle, sums):
    """Call sums, a function of forward(), for each block of logits, and merge its tables into stats."""
    for i in range(0, n, height):
        for j in range(i if triangle else 0, m, width):
            at_i, at_j = slice(i, min(i + height, n)), slice(j, min(j + width, m))
            row_table, column_table = sums(i, j, at_i.stop - i, at_j.stop - j)
            merge_stats(stats[:1, :, at_i], row_table, j == 0)
            if column_table is not None and not (triangle and i == j):
                merge_stats(stats[-1:, :, at_j], column_table.view(2, -1, at_j.stop - j), i == 0)


def recompute_rows(stats, call, config, shift, common_m):
    """Run row_stats_kernel on the rows and, if stats (sides, 2, N) has two sides, on the columns."""
    config = config | dict(BLOCK_N=ROWS_OF_STATS, BLOCK_M=min(64, config["BLOCK_M"]))
    for side in range(stats.shape[0]):
        turned = swapped(call) if side else call
        operands, rest = kernel_args(turned, config)
        launch(row_stats_kernel, (cdiv(turned.q.shape[0], ROWS_OF_STATS),), stats[side], shift, common_m,
               *operands, **rest)


def merge_stats(stats, table, overwrite=False, lse=None, positive=None, sides=None, weights=None, tau=None,
                mean_over=None):
    """Merge m and l of tiles into stats, write lse if given, and return partial sums of the loss or None.

    stats      (sides, 2, N): m and l
    table      (2, tiles, N): m and l of the rows. With two sides, the columns' table comes next in memory; it
               has as many tiles, because tiles are square. None: there is nothing to merge
    overwrite  True: ignore the old content of stats
    lse        (N,) output, or None
    positive   (N,) dot products of the positives; None: compute no loss
    sides      (number of softmaxes, 3, at least N) output for shift.as_side; needed if positive is given
    weights    (N,) row weights of the loss; None: each row has weight 1 / mean_over
    tau        Temperature; not None if positive is given
    mean_over  the number of rows over which the loss is a mean; None: N
    """
    count, _, n = stats.shape
    tiles = 0 if table is None else table.shape[1]
    side_count, side_stride = (n, n) if sides is None else (sides.shape[2], sides.stride(1))
    programs = cdiv(side_count, 32)
    loss_sums = None if positive is None else stats.new_empty(programs)
    weight = (1 if weights is not None else 1 / (mean_over or n)) / count
    launch(merge_stats_kernel, (programs,), stats, lse, sides, loss_sums, stats if table is None else table,
           positive, weights, tau, weight, tiles, n, stats.stride(1), side_count, side_stride, SIDES=count,
           OVERWRITE=overwrite, TILES_AT_ONCE=64, BLOCK=32, num_warps=8, enable_fp_fusion=True)
    return loss_sums
