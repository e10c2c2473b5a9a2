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
from .launch import arguments, multiplicands, tile, turned
from .reference import padded
from .tiles import factors, finish, grouped, kept, kernel, octaves, product, stored, touched, weights

GROUP = 16        # tiles of each side whose rows the second-level cache holds
ACCUMULATES = TorchVersion(torch.__version__) >= (2, 11)     # addmm adds half products to a float32 matrix


@kernel
def weights_kernel(W, X_SIDE, Y_SIDE, REFERENCE, padded_x, padded_y, first_x, first_y, tiles_x, tiles_y,
                   w_row, Q, K, RULE, N, M, D, q_row, k_row,
                   EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, SHIFT: tl.constexpr,
                   MIRROR: tl.constexpr, GROUP: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """W[i, j] = 2^SHIFT (slope_i exp(s_ij − lse_i) + …) of a block, from tile (first_x, first_y) on.
    MIRROR: a block on the diagonal of one set; what is above the diagonal is stored on both sides of it."""
    tile_i, tile_j = grouped(tl.program_id(0), tiles_x, tiles_y, GROUP)
    if MIRROR and tile_i > tile_j:
        return
    i, j = tile_i * BLOCK_N + tl.arange(0, BLOCK_N), tile_j * BLOCK_M + tl.arange(0, BLOCK_M)
    row, column = (first_x + tile_i) * BLOCK_N, (first_y + tile_j) * BLOCK_M
    rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
    s = product(Q, K, row, column, N, M, D, q_row, k_row, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    row_a, row_b = factors(X_SIDE, rows, N, padded_x, SHIFT)
    w = weights(s, octaves(RULE), row_a, row_b, columns, X_SIDE, Y_SIDE, REFERENCE, M, padded_y, SHIFT)
    if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
        w = tl.where(kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), w, 0.0)
    w = stored(w, W, PRECISION)
    tl.store(W + i.to(tl.int64)[:, None] * w_row + j[None, :], w)
    if MIRROR and tile_i < tile_j:
        tl.store(W + j.to(tl.int64)[:, None] * w_row + i[None, :], w.T)


@kernel
def finish_kernel(DX, DOT, SUM, GRAD, SCALES, X_ROWS, Y_ROWS, X_SIDE, Y_SIDE, RULE, unit, N, M, features,
                  x_stride, y_stride, EXCLUDE: tl.constexpr, SHIFT: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """DX = finish(SUM), rows times SCALES first, a tile of rows and features at a time."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = rows.to(tl.int64)[:, None] * features + d[None, :]
    dx = tl.load(SUM + place, mask=(rows < N)[:, None] & (d < features)[None, :], other=0.0)
    if SCALES is not None:
        dx = dx * tl.load(SCALES + rows, mask=rows < N, other=0.0)[:, None]
    dx, inside, dots = finish(dx, X_ROWS, Y_ROWS, X_SIDE, Y_SIDE, GRAD, unit, RULE, rows, d, N, M, features,
                             x_stride, y_stride, EXCLUDE, SHIFT, DOT is not None)
    tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
    if DOT is not None:
        tl.store(DOT + tl.program_id(1) * N + rows, dots, mask=rows < N)


def gradients(q, k, temperature, rule, rows, columns, reference, grad, unit, needs_q, needs_k,
              needs_temperature, dtype, positives, one_set, shift):
    """See gradient.gradients: (dq, dk, shares of ⟨q, dq⟩ or None)."""
    given_q, given_k = (x if x.stride(1) == 1 else x.contiguous() for x in (q, k))
    q, k = multiplicands(q, k)
    sums_q, sums_k = (torch.zeros(len(x) if needed else 0, x.shape[1], dtype=torch.float32, device=q.device)
                      for x, needed in ((q, needs_q or needs_temperature), (k, needs_k)))
    two_sided = rows.slope is not None and columns.slope is not None
    blocks = tile(q, rule, two_sided)
    if two_sided:
        blocks |= dict(maxnreg=255, num_warps=4 if q.element_size() == 2 else 8)
    pointers, sizes, rest = arguments(q, k, temperature, rule, blocks)

    def weigh(w, w_row, x, y, tiles_x, tiles_y):
        mirror = one_set and x == y and blocks["BLOCK_N"] == blocks["BLOCK_M"]
        warps = dict(num_warps=8) if mirror else {}               # two tiles to store take registers
        weights_kernel[tiles_x * tiles_y,](
            w, rows, columns, reference, padded(len(q)), padded(len(k)), x, y, tiles_x, tiles_y, w_row,
            *pointers, *sizes, SHIFT=shift, MIRROR=mirror, GROUP=GROUP, **rest | warps)

    add_blocks(sums_q, sums_k, q, k, blocks, weigh, one_set)
    *_, taken = pointers
    rest = rule.exclude, grad, unit, positives, dtype, shift
    dq, dk, dot = *(q.new_empty(0, q.shape[1], dtype=dtype) for _ in range(2)), None
    if len(sums_q):
        dq, dot = finished(sums_q, given_q, given_k, taken, rows, columns, *rest, needs_temperature)
    del sums_q
    if len(sums_k):
        dk, _ = finished(sums_k, given_k, given_q, turned(taken), columns, rows, *rest, False)
    return dq, dk, dot


def add_blocks(sums_q, sums_k, q, k, blocks, weigh, one_set=False):
    """sums_q += W k and sums_k += Wᵀ q, of which either may be empty, with the blocks of W (N, M) that
    weigh(w, w_row, first tiles x and y, tiles x and y) leaves in w, a buffer whose rows are w_row apart; None
    where both are empty. One set: W is symmetric, and all of it goes to sums_q."""
    height, width = block_shape(q, k, one_set)
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


def finished(sums, x, y, rule, x_side, y_side, exclude, grad, unit, positives, dtype, shift, dot,
             scales=None):
    """(gradient of x from Σ_j w_ij y_j 2^SHIFT, in dtype: float32 in place; each row's x·dx or None)."""
    dx = sums if dtype == torch.float32 else torch.empty_like(sums, dtype=dtype)
    grid = triton.cdiv(len(x), 32), triton.cdiv(x.shape[1], 128)
    dot = torch.empty(grid[1], len(x), dtype=torch.float32, device=x.device) if dot else None
    if exclude == "target" and rule.row_ids is None:              # any number of rows aim at one of x
        if positives:
            add_targets(sums, y, rule.column_ids, y_side.slope, shift)
        positives = False
    finish_kernel[grid](dx, dot, sums, grad, scales, x, y if positives else None, x_side, y_side, rule, unit,
                        len(x), len(y), x.shape[1], x.stride(0), y.stride(0),
                        EXCLUDE=exclude, SHIFT=shift, BLOCK_N=32, BLOCK_D=128)
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


def add_targets(sums, q, targets, slope, shift):
    """sums[target_i] −= 2^SHIFT slope_i q_i, repeated targets in a fixed order, a few rows at a time."""
    for rows in torch.arange(len(q), device=q.device).split(8192):
        sums.index_put_((targets[rows],), q[rows] * (slope[rows] * -2 ** shift)[:, None], accumulate=True)


def block_shape(q, k, square):
    """(rows, columns) of the largest block of weights that BUFFER holds in whole tiles, near square for large
    products."""
    entries = paths.BUFFER // q.element_size()
    side = 1 << (entries.bit_length() - 1) // 2
    if square:
        return min(len(q), side), min(len(q), side)
    height = min(len(q), max(side, entries // len(k) // 128 * 128))
    return height, min(len(k), entries // (triton.cdiv(height, 128) * 128) // 128 * 128)
