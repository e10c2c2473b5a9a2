"""Gradient of wide rows: blocks of softmax weights, and plain matrix products with them.

W is (N, M), so it exists one block of at most paths.BUFFER at a time: 8192 × 8192 in a half type (formulas:
gradient.py). A kernel computes a block from q, k and the statistics, a matrix product with an exponential at
its end; cuBLAS does the other products, with float32 sums:

               columns J                          for each block of rows I, each block of columns J:
            ┌──────────────┐                          W      = kernel(q_I, k_J)     in q's dtype
     rows I │ W (I × J)    │                          dq_I  += W  @ k_J
            └──────────────┘                          dk_J  += Wᵀ @ q_I

6 N·M·D operations, as many as eager's backward plus the recomputed product. With one set W is symmetric:
blocks above the diagonal serve both of their sides, and those below are never computed, 3 P²D in all.
"""
import torch
import triton
import triton.language as tl
from torch.torch_version import TorchVersion

from .. import paths
from .launch import Given, arguments, multiplicands, rows_in_place, tile, turned
from .tiles import (
    WEIGHT_SCALE,
    factors,
    finish,
    grouped,
    kept,
    kernel,
    octaves,
    product,
    stored,
    touched,
    weights,
)

ACCUMULATES = TorchVersion(torch.__version__) >= (2, 11)     # addmm adds half products to a float32 matrix


@kernel
def weights_kernel(W, X_SIDE, Y_SIDE, REFERENCE, first_x, first_y, tiles_x, tiles_y, w_row,
                   Q, K, RULE, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                   MIRROR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """W[i, j] = WEIGHT_SCALE (slope_i exp(s_ij − lse_i) + …) of a block, from tile (first_x, first_y) on.
    MIRROR: a block on the diagonal of one set; what is above the diagonal is stored on both sides of it."""
    tile_i, tile_j = grouped(tl.program_id(0), tiles_x, tiles_y)
    if MIRROR and tile_i > tile_j:
        return
    i, j = tile_i * BLOCK_N + tl.arange(0, BLOCK_N), tile_j * BLOCK_M + tl.arange(0, BLOCK_M)
    row, column = (first_x + tile_i) * BLOCK_N, (first_y + tile_j) * BLOCK_M
    rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
    s = product(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    row_a, row_b = factors(X_SIDE, rows, N)
    w = weights(s, octaves(RULE), row_a, row_b, columns, X_SIDE, Y_SIDE, REFERENCE, M)
    if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
        w = tl.where(kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), w, 0.0)
    w = stored(w, W, PRECISION)
    tl.store(W + i.to(tl.int64)[:, None] * w_row + j[None, :], w)
    if MIRROR and tile_i < tile_j:
        tl.store(W + j.to(tl.int64)[:, None] * w_row + i[None, :], w.T)


@kernel
def finish_kernel(DX, DOT, SUM, SCALES, X_SIDE, Y_SIDE, RULE, N, M, GIVEN, EXCLUDE: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """DX = finish(SUM), rows times SCALES first, a tile of rows and features at a time."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = rows.to(tl.int64)[:, None] * GIVEN.features + d[None, :]
    dx = tl.load(SUM + place, mask=(rows < N)[:, None] & (d < GIVEN.features)[None, :], other=0.0)
    if SCALES is not None:
        dx = dx * tl.load(SCALES + rows, mask=rows < N, other=0.0)[:, None]
    dx, inside, dots = finish(dx, GIVEN, X_SIDE, Y_SIDE, RULE, rows, d, N, M, EXCLUDE, DOT is not None)
    tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
    if DOT is not None:
        tl.store(DOT + tl.program_id(1) * N + rows, dots, mask=rows < N)


def gradients(q, k, temperature, rule, rows, columns, reference, ending, needs, one_set):
    """See gradient.gradients: (dq, dk, shares of ⟨q, dq⟩ or None)."""
    given = rows_in_place(q), rows_in_place(k)
    q, k = multiplicands(q, k)
    sums = zeros(q, k, *needs)
    two_sided = rows.slope is not None and columns.slope is not None
    blocks = tile(q, rule, two_sided)
    if two_sided:
        blocks |= dict(maxnreg=255, num_warps=4 if q.element_size() == 2 else 8)
    operands, rest = arguments(q, k, temperature, rule, blocks)

    def weigh(w, w_row, x, y, tiles_x, tiles_y):
        mirror = one_set and x == y and blocks["BLOCK_N"] == blocks["BLOCK_M"]
        warps = dict(num_warps=8) if mirror else {}               # two tiles to store take registers
        weights_kernel[tiles_x * tiles_y,](w, rows, columns, reference, x, y, tiles_x, tiles_y, w_row,
                                           *operands, MIRROR=mirror, **rest | warps)

    add_blocks(*sums, q, k, blocks, weigh, one_set)
    return finished(sums, *given, operands[2], rule.exclude, rows, columns, ending, needs[2])


def zeros(q, k, needs_q, needs_k, needs_temperature):
    """[(N, D), (M, D)] float32, to sum weighted rows in; empty where neither they nor dτ are needed."""
    needed = (q, needs_q or needs_temperature), (k, needs_k)
    return [torch.zeros(len(x) if wanted else 0, x.shape[1], dtype=torch.float32, device=x.device)
            for x, wanted in needed]


def add_blocks(sums_q, sums_k, q, k, blocks, weigh, one_set=False):
    """sums_q += W k and sums_k += Wᵀ q, of which either may be empty, with the blocks of W (N, M) that
    weigh(w, w_row, first tiles x and y, tiles x and y) leaves in w, a buffer whose rows are w_row apart; None
    where both are empty. One set: W is symmetric, and all of it goes to sums_q."""
    height, width = weight_block(q, k, one_set)
    whole = lambda count, block: triton.cdiv(count, blocks[block]) * blocks[block]
    buffer, w_row = None, whole(width, "BLOCK_M")
    if len(sums_q) or len(sums_k):
        buffer = torch.empty(whole(height, "BLOCK_N"), w_row, dtype=q.dtype, device=q.device)
    for i in range(0, len(q), height):
        for j in range(i if one_set else 0, len(k), width):
            at_i, at_j = slice(i, min(i + height, len(q))), slice(j, min(j + width, len(k)))
            tiles = (triton.cdiv(at.stop - at.start, blocks[block])
                     for at, block in ((at_i, "BLOCK_N"), (at_j, "BLOCK_M")))
            weigh(buffer, w_row, i // blocks["BLOCK_N"], j // blocks["BLOCK_M"], *tiles)
            w = None if buffer is None else buffer[:at_i.stop - i, :at_j.stop - j]
            if len(sums_q):
                add_product(sums_q[at_i], w, k[at_j])
            if len(sums_k) or one_set and i != j:
                add_product((sums_q if one_set else sums_k)[at_j], w.T, q[at_i])


def finished(sums, q, k, rule, exclude, rows, columns, ending, needs_dot, scales=None):
    """(dq, dk, shares of ⟨q, dq⟩ or None) from sums, [Σ_j w_ij k_j, Σ_i w_ij q_i], either of which may be
    empty. The list is emptied on the way, so that dq's sums are freed before dk is made. scales: factors of
    the rows of q's sums, or None."""
    dot = None
    dq = sums.pop(0)
    if len(dq):
        dq, dot = finished_side(dq, q, k, rule, exclude, rows, columns, ending, needs_dot, scales)
    dk = sums.pop()
    if len(dk):
        dk, _ = finished_side(dk, k, q, turned(rule), exclude, columns, rows, ending)
    return dq.to(ending.dtype), dk.to(ending.dtype), dot


def finished_side(sums, x, y, rule, exclude, x_side, y_side, ending, needs_dot=False, scales=None):
    """(gradient of x from its sums: float32 in place; each row's x·dx or None)."""
    dx = sums if ending.dtype == torch.float32 else torch.empty_like(sums, dtype=ending.dtype)
    grid = triton.cdiv(len(x), 32), triton.cdiv(x.shape[1], 128)
    dot = torch.empty(grid[1], len(x), dtype=torch.float32, device=x.device) if needs_dot else None
    if exclude == "target" and rule.row_ids is None:              # any number of rows aim at one of x
        if ending.positives:
            add_targets(sums, y, rule.column_ids, y_side.slope)
        ending = ending._replace(positives=False)
    finish_kernel[grid](dx, dot, sums, scales, x_side, y_side, rule, len(x), len(y), Given.of(x, y, ending),
                        EXCLUDE=exclude, BLOCK_N=32, BLOCK_D=128)
    return dx, dot


def add_product(total, a, b):
    """total += a @ b in float32, whatever the dtype of a and b."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif not a.is_cuda:
        total.addmm_(a.float(), b.float())  # the interpreter's path: the CPU has no such product
    elif ACCUMULATES:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(a, b, out_dtype=torch.float32)


def add_targets(sums, q, targets, slope):
    """sums[target_i] −= WEIGHT_SCALE slope_i q_i, repeated targets in a fixed order, a few rows at a time."""
    for rows in torch.arange(len(q), device=q.device).split(8192):
        added = q[rows] * (slope[rows] * -WEIGHT_SCALE.value)[:, None]
        sums.index_put_((targets[rows],), added, accumulate=True)


def weight_block(q, k, square):
    """(rows, columns) of the largest block of weights that BUFFER holds in whole tiles, near square for large
    products."""
    entries = paths.BUFFER // q.element_size()
    side = 1 << (entries.bit_length() - 1) // 2
    if square:
        return min(len(q), side), min(len(q), side)
    height = min(len(q), max(side, entries // len(k) // 128 * 128))
    return height, min(len(k), entries // (triton.cdiv(height, 128) * 128) // 128 * 128)
