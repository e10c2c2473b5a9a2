"""Gradient for small D: a program holds rows of x and their gradient in registers, and loops over rows of y.

           ┌─ (BLOCK_D, BLOCK_M) ─┐
    x_i ·  │        y_Jᵀ          │  = s       w = softmax_weights(s)      dx_i += w · y_J   (see gradient.py)
           └──────────────────────┘

y_J are the rows of y in tile J. They are read once for both products. The weights w are never written to
memory. The kernel runs with x = q and y = k for dq, and again with x = k and y = q for dk. Each run takes
4 N·M·D operations, half of them for s. D > 128 occurs only with groups (within=). Then a program computes
only 128 features of dx, so that D / 128 programs compute the same s. With more than FEW_ROWS rows or
columns and sorted group ids, a program skips columns before the first and after the last group of its rows.
"""
import torch
import triton.language as tl
from triton import cdiv, next_power_of_2

from ..masks import column_ranges, transposed
from .launch import (
    FinishArgs, aligned_operands, capability, contiguous_rows, kernel_args, tile_config)
from .tiles import (
    finish_gradient, keep_mask, kernel, load_factors, load_tile, log2e_over_tau, needs_mask, qk_tile,
    softmax_weights)


@kernel
def small_d_kernel(DX, DOT, COMMON_M, RANGES, X_SIDE, Y_SIDE, X, Y, MASK, N, M, SHAPE, FINISH,
                   EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, RESIDENT: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile of DX: BLOCK_N rows and BLOCK_D features. The grid is (row tiles, feature tiles).

    DOT       output (feature tiles, N): sums of x·dx over the features of a tile; or None
    RESIDENT  True: D ≤ BLOCK_D, so a program loads its rows of x only once
    """
    row, first_d = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_D
    rows, d = row + tl.arange(0, BLOCK_N), first_d + tl.arange(0, BLOCK_D)
    scale, common_m = log2e_over_tau(MASK), float("inf")
    row_factor, row_m = load_factors(X_SIDE, rows)
    if RESIDENT:
        x = load_tile(X, row, 0, N, SHAPE.D, SHAPE.q_stride, BLOCK_N, BLOCK_D)
    start, stop = 0, M
    if RANGES is not None:
        start = tl.load(RANGES + 2 * tl.program_id(0)) // BLOCK_M * BLOCK_M
        stop = tl.load(RANGES + 2 * tl.program_id(0) + 1)
    if COMMON_M is not None:
        common_m = tl.load(COMMON_M)
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for exponentials in tl.static_range(1 + (COMMON_M is None), 3):    # 1: with a finite common_m; 2: without
        end = tl.where((common_m < float("inf")) == (exponentials == 1), stop, start)
        for column in range(start, end, BLOCK_M):
            columns = column + tl.arange(0, BLOCK_M)
            y = load_tile(Y, column, first_d, M, SHAPE.D, SHAPE.k_stride, BLOCK_M, BLOCK_D)
            if RESIDENT:
                xy = tl.dot(x, y.T, input_precision=PRECISION)
            else:
                xy = qk_tile(X, Y, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
            w = softmax_weights(xy, scale, row_factor, row_m, columns, X_SIDE, Y_SIDE, common_m,
                                exponentials == 1)
            if needs_mask(row, column, N, M, MASK, EXCLUDE, BLOCK_N, BLOCK_M):
                w = tl.where(keep_mask(rows, column, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M), w, 0.0)
            dx = tl.dot(w.to(y.dtype), y, dx, input_precision=PRECISION)
    dx, inside, dots = finish_gradient(dx, FINISH, X_SIDE, Y_SIDE, MASK, rows, d, N, M, EXCLUDE,
                                       DOT is not None)
    place = rows.to(tl.int64)[:, None] * FINISH.features + d[None, :]
    tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
    if DOT is not None:
        tl.store(DOT + tl.program_id(1) * N + rows, dots, mask=rows < N)


def small_d_config(x, mask, one_side):
    """Return the config of small_d_kernel. one_side: the loss has only one softmax, and DOT is None."""
    config, features = tile_config(x, mask), max(16, next_power_of_2(x.shape[1]))
    config |= dict(BLOCK_N=64, BLOCK_D=min(features, 128), RESIDENT=features <= 128, num_warps=4,
                   num_stages=2)
    if features > 128 or mask.row_features is not None:
        return config | dict(BLOCK_M=min(64, config["BLOCK_M"]), num_warps=8)
    if capability(x) == 9 and config["BLOCK_M"] == 128:
        return config | (dict(BLOCK_M=64, maxnreg=128) if one_side else {})
    registers, warps = (168, 4) if capability(x) == 9 else (255, 4 if capability(x) < 9 else 8)
    return config | dict(BLOCK_M=min(64, config["BLOCK_M"]), maxnreg=registers, num_warps=warps)


def gradients(q, k, temperature, mask, rows, columns, common_m, scaling, needs, self_similarity):
    """Return (dq, dk, partial sums of ⟨q, dq⟩ or None), see gradient.gradients. Unneeded dq, dk are empty."""
    aligned_q, aligned_k, mask = aligned_operands(q, k, mask)

    def gradient_of(x, y, aligned_x, aligned_y, mask, x_side, y_side, needs_dot):
        one_side = x_side.factor is None or y_side.factor is None
        config = small_d_config(x, mask, one_side and not needs_dot)
        if needs_dot:
            config["maxnreg"] = 255
        n, d = x.shape
        grid = cdiv(n, config["BLOCK_N"]), cdiv(d, config["BLOCK_D"])
        dx = torch.empty_like(x, dtype=scaling.dtype, memory_format=torch.contiguous_format)
        dot = torch.empty(grid[1], n, dtype=torch.float32, device=x.device) if needs_dot else None
        operands, rest = kernel_args(aligned_x, aligned_y, mask, temperature, config)
        finish = FinishArgs.make(contiguous_rows(x), contiguous_rows(y), scaling)
        ranges = column_ranges(mask, config["BLOCK_N"])
        small_d_kernel[grid](dx, dot, common_m, ranges, x_side, y_side, *operands, finish, **rest)
        return dx, dot

    needs_q, needs_k, needs_dot = needs
    dq, dk = (q.new_empty(0, q.shape[1], dtype=scaling.dtype) for _ in range(2))
    dot = None
    if needs_q:
        dq, dot = gradient_of(q, k, aligned_q, aligned_k, mask, rows, columns, needs_dot)
    if needs_k:
        dk, _ = gradient_of(k, q, aligned_k, aligned_q, transposed(mask), columns, rows, False)
    return dq, dk, dot
