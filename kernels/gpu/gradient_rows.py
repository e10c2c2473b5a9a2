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
from torch.torch_version import TorchVersion

from ..rules import swapped
from .launch import Given, arguments, capability, ranges, rows_in_place, tile
from .tiles import factors, finish, in_range, kept, kernel, load, octaves, product, touched, weights

# before 3.7 Triton fails on sm_90 to overlap loads with a loop that has two products and a branch between
PIPELINES = TorchVersion(triton.__version__) >= (3, 7)


@kernel
def rows_kernel(DX, DOT, REFERENCE, RANGES, X_SIDE, Y_SIDE,
                X, Y, RULE, N, M, SHAPE, GIVEN, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                RESIDENT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """DX[rows of program x, features of program y], and DOT[y, rows] = their share of each row's x·dx."""
    row = tl.program_id(0) * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    first_d = tl.program_id(1) * BLOCK_D
    scale = octaves(RULE)
    row_a, row_b = factors(X_SIDE, rows, N)
    if RESIDENT:
        x = load(X, row, 0, N, SHAPE.D, SHAPE.q_row, BLOCK_N, BLOCK_D)
    start, stop = in_range(RANGES, tl.program_id(0), 0, M, BLOCK_M)
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for column in range(start, stop, BLOCK_M):
        columns = column + tl.arange(0, BLOCK_M)
        y = load(Y, column, first_d, M, SHAPE.D, SHAPE.k_row, BLOCK_M, BLOCK_D)
        if RESIDENT:
            s = tl.dot(x, y.T, input_precision=PRECISION)
        else:
            s = product(X, Y, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        w = weights(s, scale, row_a, row_b, columns, X_SIDE, Y_SIDE, REFERENCE, M)
        if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
            w = tl.where(kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), w, 0.0)
        dx = tl.dot(w.to(y.dtype), y, dx, input_precision=PRECISION)
    d = first_d + tl.arange(0, BLOCK_D)
    dx, inside, dots = finish(dx, GIVEN, X_SIDE, Y_SIDE, RULE, rows, d, N, M, EXCLUDE, DOT is not None)
    place = rows.to(tl.int64)[:, None] * GIVEN.features + d[None, :]
    tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
    if DOT is not None:
        tl.store(DOT + tl.program_id(1) * N + rows, dots, mask=rows < N)


def block_sizes(x, rule):
    """As tile(), with the whole row in one block where it fits beside its gradient.

    Up to 128 features two programs share a multiprocessor of an H100, and three where a rule needs registers.
    """
    blocks, width = tile(x, rule), max(16, triton.next_power_of_2(x.shape[1]))
    blocks |= dict(BLOCK_N=64, BLOCK_D=width if width <= 256 else 128, RESIDENT=width <= 256, num_stages=2)
    if width > 128 or rule.row_features is not None:
        columns = 32 if width == 256 and rule.row_features is not None else 64
        return blocks | dict(BLOCK_M=min(columns, blocks["BLOCK_M"]), num_warps=8, maxnreg=255)
    if capability(x) == 9 and blocks["BLOCK_M"] == 128:
        return blocks | dict(num_warps=4, num_stages=3, maxnreg=255)
    registers = 168 if capability(x) == 9 else 255
    return blocks | dict(BLOCK_M=min(64, blocks["BLOCK_M"]), num_warps=4, maxnreg=registers)


def gradients(q, k, temperature, rule, rows, columns, reference, ending, needs, one_set):
    """See gradient.gradients: (dq, dk, shares of ⟨q, dq⟩ or None)."""
    def of(x, y, rule, x_side, y_side, dot):
        blocks = block_sizes(x, rule) | (dict(maxnreg=255) if dot else {})
        if reference is not None and blocks["RESIDENT"] and capability(x) == 9 and not PIPELINES:
            blocks["num_stages"] = 1
        grid = triton.cdiv(len(x), blocks["BLOCK_N"]), triton.cdiv(x.shape[1], blocks["BLOCK_D"])
        dx = torch.empty_like(x, dtype=ending.dtype, memory_format=torch.contiguous_format)
        dot = torch.empty(grid[1], len(x), dtype=torch.float32, device=x.device) if dot else None
        operands, rest = arguments(x, y, temperature, rule, blocks)
        given = Given.of(rows_in_place(x), rows_in_place(y), ending)
        rows_kernel[grid](dx, dot, reference, ranges(rule, blocks), x_side, y_side, *operands, given, **rest)
        return dx, dot

    needs_q, needs_k, needs_dot = needs
    dq, dk, dot = *(q.new_empty(0, q.shape[1], dtype=ending.dtype) for _ in range(2)), None
    if needs_q:
        dq, dot = of(q, k, rule, rows, columns, needs_dot)
    if needs_k:
        dk, _ = of(k, q, swapped(rule), columns, rows, False)
    return dq, dk, dot
