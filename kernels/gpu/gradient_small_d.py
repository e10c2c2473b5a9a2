"""Gradient for small D: a program holds rows of x and their gradient in registers, and loops over rows of y.

           ┌─ (BLOCK_D, BLOCK_M) ─┐
    x_i ·  │        y_Jᵀ          │  = s       w = softmax_weights(s)      dx_i += w · y_J   (see gradient.py)
           └──────────────────────┘

y_J are the rows of y in tile J. They are read once for both products. The weights w are never written to
memory. The kernel runs with x = q and y = k for dq, and again with x = k and y = q for dk. Each run takes
4 N·M·D operations, half of them for s.
"""
import torch
import triton.language as tl

from .heuristics import cdiv, power_of_2
from .launch import aligned, capability, kernel_args, launch, swapped, tile_config
from .products import finish_args
from .tiles import (
    finish_gradient, keep_mask, kernel, load_factors, load_tile, log2e_over_tau, needs_mask, softmax_weights)


@kernel
def small_d_kernel(DX, DOT, X_SIDE, Y_SIDE, COMMON_M, X, Y, MASK, N, M, SHAPE, FINISH,
                   EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write BLOCK_N rows of DX. D is at most BLOCK_D.

    DOT    output (N,): the sum of x·dx over the features; or None
    """
    row = tl.program_id(0) * BLOCK_N
    rows, d = row + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    scale, common_m = log2e_over_tau(MASK), float("inf")
    row_factor, row_m = load_factors(X_SIDE, rows)
    x = load_tile(X, row, 0, N, SHAPE.D, SHAPE.q_stride, BLOCK_N, BLOCK_D)
    if COMMON_M is not None:
        common_m = tl.load(COMMON_M)
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for exponentials in tl.static_range(1 + (COMMON_M is None), 3):    # 1 runs if common_m is finite, else 2
        end = tl.where((common_m < float("inf")) == (exponentials == 1), M, 0)
        for column in range(0, end, BLOCK_M):
            columns = column + tl.arange(0, BLOCK_M)
            y = load_tile(Y, column, 0, M, SHAPE.D, SHAPE.k_stride, BLOCK_M, BLOCK_D)
            xy = tl.dot(x, y.T, input_precision=PRECISION)
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
        tl.store(DOT + rows, dots, mask=rows < N)


def small_d_config(call, two_sided, needs_dot):
    """Return the config of small_d_kernel."""
    x = call.q
    config = tile_config(x, call.mask)
    config |= dict(BLOCK_N=64, BLOCK_D=max(16, power_of_2(x.shape[1])), num_warps=4, num_stages=2)
    if call.mask.row_features is not None:
        config |= dict(BLOCK_M=min(64, config["BLOCK_M"]), num_warps=8)
    elif capability(x) == 9 and config["BLOCK_M"] == 128:
        config |= {} if two_sided or needs_dot else dict(BLOCK_M=64, maxnreg=128)
    else:
        registers, warps = (168, 4) if capability(x) == 9 else (255, 4 if capability(x) < 9 else 8)
        config |= dict(BLOCK_M=min(64, config["BLOCK_M"]), maxnreg=registers, num_warps=warps)
    return config | dict(maxnreg=255) if needs_dot else config


def small_d_gradients(call, sides, scaling, needs):
    """Return (dq, dk, ⟨q_i, dq_i⟩ of each row or None), see gradient.gradients. Unneeded dq, dk are empty."""
    given = call.rounded
    call = aligned(given)
    dq, dk, dot = given.q[:0], given.q[:0], None
    if needs[0] or needs[2]:
        dq, dot = gradient_of_q(given, call, sides, scaling, needs[2])
    if needs[1] and given.k is not None:
        dk, _ = gradient_of_q(swapped(given), swapped(call), sides.swapped(), scaling)
    return dq, dk, dot


def gradient_of_q(given, call, sides, scaling, needs_dot=False):
    """Return (dq, ⟨q_i, dq_i⟩ of each row or None). `call` equals `given`, but has aligned rows."""
    (n, d), device = given.q.shape, given.q.device
    config = small_d_config(call, sides.are_two, needs_dot)
    dq = torch.empty(n, d, dtype=scaling.dtype, device=device)
    dot = torch.empty(n, dtype=torch.float32, device=device) if needs_dot else None
    operands, rest = kernel_args(call, config)
    if operands[-1].q_stride is not None:                      # pointers need more registers than descriptors
        rest |= dict(BLOCK_M=min(64, rest["BLOCK_M"]), maxnreg=max(168, rest["maxnreg"]))
    launch(small_d_kernel, (cdiv(n, config["BLOCK_N"]),), dq, dot, *sides, *operands,
           finish_args(given, scaling), **rest)
    return dq, dot
