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

from .launch import arguments, tile
from .paths import BUFFER
from .rules import swapped
from .tiles import finish, is_bounded, kept, octaves, product, shifts, touched, weights

SHIFT = 14        # weights are stored times 2¹⁴
ACCUMULATES = TorchVersion(torch.__version__) >= (2, 11)     # addmm adds half products to a float32 matrix


@triton.jit
def weights_kernel(W, X_LSE, X_SLOPE, Y_LSE, Y_SLOPE, LIMIT, first_row, first_column, last_row, last_column,
                   w_row, Q, K, RULE, N, M, D, q_row, k_row,
                   EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, SIGNED: tl.constexpr, SHIFT: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """W[i − first_row, j − first_column] = 2^SHIFT (slope_i exp(s_ij − lse_i) + …) of the block."""
    row, column = first_row + tl.program_id(0) * BLOCK_N, first_column + tl.program_id(1) * BLOCK_M
    rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
    s = product(Q, K, row, column, N, M, D, q_row, k_row, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    s = s * octaves(RULE)
    row_shift, row_sign = shifts(X_LSE, X_SLOPE, rows, N, SHIFT)
    column_shift, column_sign = shifts(Y_LSE, Y_SLOPE, columns, M, SHIFT)
    w = weights(s, row_shift, row_sign, column_shift, column_sign, is_bounded(LIMIT),
                X_LSE is not None, Y_LSE is not None, SIGNED)
    if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
        w = tl.where(kept(rows, columns, N, M, RULE, EXCLUDE, PRECISION), w, 0.0)
    inside = (rows < last_row)[:, None] & (columns < last_column)[None, :]
    place = (rows - first_row).to(tl.int64)[:, None] * w_row + (columns - first_column)[None, :]
    tl.store(W + place, w.to(W.dtype.element_ty), mask=inside)


@triton.jit
def finish_kernel(DX, DOT, SUM, GRAD, X_ROWS, Y_ROWS, X_SLOPE, Y_SLOPE, RULE, unit, N, M, width,
                  x_stride, y_stride, EXCLUDE: tl.constexpr, SHIFT: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """DX = finish(SUM), a tile of rows and features at a time."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = rows.to(tl.int64)[:, None] * width + d[None, :]
    dx = tl.load(SUM + place, mask=(rows < N)[:, None] & (d < width)[None, :], other=0.0)
    dx, inside, dots = finish(dx, X_ROWS, Y_ROWS, X_SLOPE, Y_SLOPE, GRAD, unit, RULE, rows, d, N, M, width,
                             x_stride, y_stride, EXCLUDE, SHIFT, DOT is not None)
    tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
    if DOT is not None:
        tl.store(DOT + tl.program_id(1) * N + rows, dots, mask=rows < N)


def gradients(q, k, temperature, rule, rows, columns, limit, grad, unit, needs_q, needs_k, needs_temperature,
              dtype, positives, one_set):
    """See gradient.gradients: (dq, dk, shares of ⟨q, dq⟩ or None)."""
    if q.stride(1) != 1 or k.stride(1) != 1:
        q, k = (q.contiguous(),) * 2 if one_set else (q.contiguous(), k.contiguous())
    sums_q, sums_k = (torch.zeros(len(x) if needed else 0, x.shape[1], dtype=torch.float32, device=q.device)
                      for x, needed in ((q, needs_q or needs_temperature), (k, needs_k)))
    statistics = *(rows or (None, None)), *(columns or (None, None)), limit
    two_sided = rows is not None and columns is not None
    blocks = tile(q, rule, two_sided)
    if two_sided:
        blocks |= dict(maxnreg=255, num_warps=4 if q.element_size() == 2 else 8)
    pointers, sizes, rest = arguments(q, k, temperature, rule, blocks)
    height, width = block_shape(q, k, one_set)
    whole_words = triton.cdiv(width, 16) * 16                     # 16 bytes at least
    buffer = torch.empty(height, whole_words, dtype=q.dtype, device=q.device)
    for i in range(0, len(q), height):
        for j in range(i if one_set else 0, len(k), width):
            at_i, at_j = slice(i, min(i + height, len(q))), slice(j, min(j + width, len(k)))
            shape = at_i.stop - i, at_j.stop - j
            w = buffer[:shape[0], :shape[1]]
            grid = triton.cdiv(shape[0], blocks["BLOCK_N"]), triton.cdiv(shape[1], blocks["BLOCK_M"])
            weights_kernel[grid](w, *statistics, i, j, at_i.stop, at_j.stop, buffer.stride(0),
                                 *pointers, *sizes, SIGNED=not positives, SHIFT=SHIFT, **rest)
            if len(sums_q):
                add_product(sums_q[at_i], w, k[at_j])
            if len(sums_k) or one_set and i != j:
                add_product((sums_q if one_set else sums_k)[at_j], w.T, q[at_i])
    *_, taken = pointers
    slopes = [None if side is None else side[1] for side in (rows, columns)]
    rest = rule.exclude, grad, unit, positives
    del buffer, w  # each makes room for the next
    dq, dk, dot = *(q.new_empty(0, q.shape[1], dtype=dtype) for _ in range(2)), None
    if len(sums_q):
        dq, dot = finished(sums_q, q, k, taken, *slopes, *rest, needs_temperature, dtype)
    del sums_q
    if len(sums_k):
        dk, _ = finished(sums_k, k, q, swapped(taken), *slopes[::-1], *rest, False, dtype)
    return dq, dk, dot


def finished(sums, x, y, rule, x_slope, y_slope, exclude, grad, unit, positives, dot, dtype):
    """(gradient of x from Σ_j w_ij y_j 2^SHIFT, in dtype: float32 in place; each row's x·dx or None)."""
    dx = sums if dtype == torch.float32 else torch.empty_like(sums, dtype=dtype)
    grid = triton.cdiv(len(x), 32), triton.cdiv(x.shape[1], 128)
    dot = torch.empty(grid[1], len(x), dtype=torch.float32, device=x.device) if dot else None
    if exclude == "target" and rule.row_ids is None:              # any number of rows aim at one of x
        if positives:
            add_targets(sums, y, rule.column_ids, y_slope)
        positives = False
    finish_kernel[grid](dx, dot, sums, grad, x, y if positives else None, x_slope, y_slope, rule, unit,
                        len(x), len(y), x.shape[1], x.stride(0), y.stride(0),
                        EXCLUDE=exclude, SHIFT=SHIFT, BLOCK_N=32, BLOCK_D=128)
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
    """sums[target_i] −= 2^SHIFT slope_i q_i, repeated targets in a fixed order, a few rows at a time."""
    for rows in torch.arange(len(q), device=q.device).split(8192):
        sums.index_put_((targets[rows],), q[rows] * (slope[rows] * -2 ** SHIFT)[:, None], accumulate=True)


def block_shape(q, k, square):
    """(rows, columns) of the largest block of weights that BUFFER holds, near square for large products."""
    entries = BUFFER // q.element_size()
    side = 1 << (entries.bit_length() - 1) // 2
    if square:
        return min(len(q), side), min(len(q), side)
    height = min(len(q), max(side, entries // len(k)))
    return height, min(len(k), entries // height, 2 ** 22)      # a grid has at most 65,535 programs across
