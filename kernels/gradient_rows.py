"""Gradient of rows that stay on the chip: a program owns rows x_i and walks the rows y_j of the other side.

           ┌─ (BLOCK_D, BLOCK_M) ─┐
    x_i ·  │        y_Jᵀ          │  = s       w = weights(s)       dx += w · y_J     (formulas: gradient.py)
           └──────────────────────┘

The tile of y is read once for both products, and dx stays in registers. The gradient of q owns rows of q and
walks k, that of k the other way round: 4 N·M·D operations each, half of which recompute s. More than 256
features take turns, 128 of dx at a time, with s computed again for each: for few rows, and where groups leave
so little of the matrix that it costs nothing.

With groups (within=) whose column ids are sorted a program walks only from the first to the last column that
its rows have in common with; the cost follows the number of kept pairs.
"""
import torch
import triton
import triton.language as tl

from .launch import arguments, capability, ranges, tile
from .rules import swapped
from .tiles import finish, in_range, is_bounded, kept, load, octaves, product, shifts, touched, weights

SHIFT = 14        # weights are held times 2¹⁴


@triton.jit
def rows_kernel(DX, DOT, GRAD, X_ROWS, Y_ROWS, X_LSE, X_SLOPE, Y_LSE, Y_SLOPE, LIMIT, RANGES, unit, width,
                x_stride, y_stride, X, Y, RULE, N, M, D, x_row, y_row,
                EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, POSITIVES: tl.constexpr, SHIFT: tl.constexpr,
                RESIDENT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """DX[rows of program x, features of program y], and DOT[y, rows] = their share of each row's x·dx."""
    row = tl.program_id(0) * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    first_d = tl.program_id(1) * BLOCK_D
    scale = octaves(RULE)
    bounded = is_bounded(LIMIT)
    row_shift, row_sign = shifts(X_LSE, X_SLOPE, rows, N, SHIFT)
    if RESIDENT:
        x = load(X, row, 0, N, D, x_row, BLOCK_N, BLOCK_D)
    start, stop = in_range(RANGES, tl.program_id(0), 0, M, BLOCK_M)
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for column in range(start, stop, BLOCK_M):
        columns = column + tl.arange(0, BLOCK_M)
        y = load(Y, column, first_d, M, D, y_row, BLOCK_M, BLOCK_D)
        if RESIDENT:
            s = tl.dot(x, y.T, input_precision=PRECISION) * scale
        else:
            s = product(X, Y, row, column, N, M, D, x_row, y_row, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
            s = s * scale
        column_shift, column_sign = shifts(Y_LSE, Y_SLOPE, columns, M, SHIFT)
        w = weights(s, row_shift, row_sign, column_shift, column_sign, bounded,
                    X_LSE is not None, Y_LSE is not None, not POSITIVES)
        if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
            w = tl.where(kept(rows, columns, N, M, RULE, EXCLUDE, PRECISION), w, 0.0)
        dx = tl.dot(w.to(y.dtype), y, dx, input_precision=PRECISION)
    d = first_d + tl.arange(0, BLOCK_D)
    dx, inside, dots = finish(dx, X_ROWS, Y_ROWS if POSITIVES else None, X_SLOPE, Y_SLOPE, GRAD, unit, RULE,
                              rows, d, N, M, width, x_stride, y_stride, EXCLUDE, SHIFT, DOT is not None)
    tl.store(DX + rows.to(tl.int64)[:, None] * width + d[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    if DOT is not None:
        tl.store(DOT + tl.program_id(1) * N + rows, dots, mask=rows < N)


def block_sizes(x, rule):
    """As tile(), with the whole row in one block where it fits beside its gradient.

    Up to 128 features three programs share a multiprocessor.
    """
    blocks, width = tile(x, rule), max(16, triton.next_power_of_2(x.shape[1]))
    roomy = width > 128 or rule.row_features is not None
    warps, registers = (8, 255) if roomy else (4, 168 if capability(x) == 9 else 255)
    columns = min(32 if width == 256 and rule.row_features is not None else 64, blocks["BLOCK_M"])
    return {**blocks, "BLOCK_N": 64, "BLOCK_M": columns, "BLOCK_D": width if width <= 256 else 128,
            "RESIDENT": width <= 256, "num_warps": warps, "num_stages": 2, "maxnreg": registers}


def gradients(q, k, temperature, rule, rows, columns, limit, grad, unit, needs_q, needs_k, needs_temperature,
              dtype, positives, one_set):
    """See gradient.gradients: (dq, dk, shares of ⟨q, dq⟩ or None)."""
    def of(x, y, rule, x_statistics, y_statistics, dot):
        blocks = block_sizes(x, rule) | (dict(maxnreg=255) if dot else {})
        grid = triton.cdiv(len(x), blocks["BLOCK_N"]), triton.cdiv(x.shape[1], blocks["BLOCK_D"])
        dx = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        dot = torch.empty(grid[1], len(x), dtype=torch.float32, device=x.device) if dot else None
        pointers, sizes, rest = arguments(x, y, temperature, rule, blocks)
        x, y = (a if a.stride(1) == 1 else a.contiguous() for a in (x, y))
        statistics = *(x_statistics or (None, None)), *(y_statistics or (None, None))
        rows_kernel[grid](dx, dot, grad, x, y, *statistics, limit, ranges(rule, blocks), unit, x.shape[1],
                          x.stride(0), y.stride(0), *pointers, *sizes, POSITIVES=positives, SHIFT=SHIFT,
                          **rest)
        return dx, dot

    dq, dk, dot = *(q.new_empty(0, q.shape[1], dtype=dtype) for _ in range(2)), None
    if needs_q or needs_temperature:
        dq, dot = of(q, k, rule, rows, columns, needs_temperature)
    if needs_k:
        dk, _ = of(k, q, swapped(rule), columns, rows, False)
    return dq, dk, dot
