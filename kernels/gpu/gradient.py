"""Backward pass of softmax losses: compute the logits again, turn them into weights W, multiply by W.

Let g_i = dloss_dlse_i and p_ij = exp(q_i·k_j/τ − lse_i), or 0 where the mask excludes column j. Then

    W_ij = g_i p_ij        dq_i = (1/τ) Σ_j W_ij k_j        dk_j = (1/τ) Σ_i W_ij q_i        dτ = −⟨q, dq⟩ / τ

Eager                                        bytes moved by eager (float32 logits)
    w = g[:, None] * (s - lse[:, None]).exp()    read and write 16 N·M or more
    dq, dk = w @ k / τ, w.T @ q / τ              read 8 N·M

Small D (gradient_small_d.py): a program loops over k for its rows of q and keeps dq and W in registers.
Large D (this file): a kernel writes blocks of W, 2 N·M bytes in half types, and cuBLAS reads them twice. This
takes 6 N·M·D operations (3 N²D with self-similarity); 2 N·M·D of them compute the logits again.

If the loss also has a column softmax p' with derivatives g'_j, one dot product gives both terms of
W_ij = g_i p_ij + g'_j p'_ij. With self-similarity (rows z), dz = (1/τ) W z, where W_ij = g_i p_ij + g_j p_ji.
If column j is the positive of row i, the mask excludes it, and W_ij = 0. The positive's term has the weight
−g_i, or with a column softmax −(g_i + g'_j). This term is added at the end, in float32.

In a half type, W must not overflow, and small weights should not underflow. Therefore g does not contain
constants such as 1/N; the gradients are multiplied by these at the end. Since |g| ≤ 1, W can be multiplied
by WEIGHT_SCALE = 2¹⁴; the final sums are divided by it. In float16, W then does not overflow. If g = 1, even
p_ij = 2⁻³⁸ does not underflow. The order of all sums is fixed, so the same input gives the same bits.
"""
import torch
import triton
import triton.language as tl

from .gradient_small_d import small_d_gradients
from .heuristics import is_small_d
from .launch import aligned, capability, kernel_args, launch, persistent_grid, tile_config
from .products import (
    GradientScaling, add_blocks, finish_gradients, gradient_of_temperature, gradient_sums, without_padding)
from .shift import Sides, as_side, make_side
from .tiles import (
    add_tile_product, cast_for_matmul, count_steps, keep_mask, kernel, load_factors,
    log2e_over_tau, needs_mask, next_step, softmax_weights)


@triton.jit
def write_weights(tiles, common_m, W, X_SIDE, Y_SIDE, first_x, first_y, tiles_x, tiles_y, w_row_stride,
                  Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                  TRIANGLE: tl.constexpr, ONE_EXPONENTIAL: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a block of W, see weights_kernel. tiles.softmax_weights explains common_m and ONE_EXPONENTIAL."""
    scale = log2e_over_tau(MASK)
    tile, tile_i, tile_j, d = tl.program_id(0) - tl.num_programs(0), 0, 0, SHAPE.D
    qk = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(0, count_steps(tiles, SHAPE.D, BLOCK_D)):
        tile, tile_i, tile_j, d = next_step(tile, tile_i, tile_j, d, tiles_x, tiles_y, SHAPE.D, TRIANGLE,
                                            BLOCK_D)
        row, column = (first_x + tile_i) * BLOCK_N, (first_y + tile_j) * BLOCK_M
        qk = add_tile_product(qk, Q, K, row, column, d, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        if d + BLOCK_D >= SHAPE.D:                                 # the tile is complete
            rows, columns = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_M)
            row_factor, row_m = load_factors(X_SIDE, rows)
            w = softmax_weights(qk, scale, row_factor, row_m, columns, X_SIDE, Y_SIDE, common_m,
                                ONE_EXPONENTIAL)
            if needs_mask(row, column, N, M, MASK, EXCLUDE, BLOCK_N, BLOCK_M):
                w = tl.where(keep_mask(rows, column, N, M, MASK, EXCLUDE, PRECISION, BLOCK_M), w, 0.0)
            w = cast_for_matmul(w, W, PRECISION)
            i, j = tile_i * BLOCK_N + tl.arange(0, BLOCK_N), tile_j * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(W + i[:, None] * w_row_stride + j[None, :], w)
            if TRIANGLE:
                tl.store(W + j[:, None] * w_row_stride + i[None, :], w.T)
            qk = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)


@kernel
def weights_kernel(W, X_SIDE, Y_SIDE, COMMON_M, tiles, first_x, first_y, tiles_x, tiles_y, w_row_stride,
                   Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                   TRIANGLE: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the weights, times WEIGHT_SCALE, to W for the block that starts at tile (first_x, first_y).

    COMMON_M  m of every row and column; ∞ if some have another m (shift.py); None: no shift was used
    TRIANGLE  True: the block lies on the diagonal of a self-similarity (tiles.tile_at). Each tile is stored
              twice: at its place, and transposed at the mirrored place
    """
    common_m = float("inf")
    if COMMON_M is not None:
        common_m = tl.load(COMMON_M)
        write_weights(tl.where(common_m < float("inf"), tiles, 0), common_m, W, X_SIDE, Y_SIDE, first_x,
                      first_y, tiles_x, tiles_y, w_row_stride, Q, K, MASK, N, M, SHAPE, EXCLUDE, PRECISION,
                      TRIANGLE, True, BLOCK_N, BLOCK_M, BLOCK_D)
    write_weights(tl.where(common_m < float("inf"), 0, tiles), common_m, W, X_SIDE, Y_SIDE, first_x, first_y,
                  tiles_x, tiles_y, w_row_stride, Q, K, MASK, N, M, SHAPE, EXCLUDE, PRECISION, TRIANGLE,
                  False, BLOCK_N, BLOCK_M, BLOCK_D)


def similarity_lse_backward(call, grad, stats, common_m, needs):
    """Return (dq, dk, dτ) for the upstream gradient grad (N,); stats and common_m are from similarity_lse."""
    largest = largest_finite(grad)       # grad is divided by largest, because kernels expect |dloss/dlse| ≤ 1
    rows = as_side(make_side(stats, (grad / largest).contiguous()))
    sides = Sides(rows, rows if call.k is None else as_side(None), common_m)
    return gradients(call, sides, GradientScaling(largest, 1.0, False, call.q.dtype), needs)


def largest_finite(grad):
    """Return the largest finite |grad|, but never 0: NaN and ∞ must not change the scale of other rows."""
    finite = grad.nan_to_num(0, 0, 0)
    return torch.linalg.vector_norm(finite, torch.inf).clamp(min=torch.finfo(torch.float32).tiny)


def softmax_loss_backward(call, grad, sides, common_m, needs, weighted):
    """Return (dq, dk, dτ) for the upstream gradient grad (0-dim); sides is from softmax_loss_forward.

    weighted  True: the rows have weights, so the loss is no mean over rows
    """
    rows = columns = as_side(sides[0])
    if call.k is not None:
        columns = as_side(sides[1] if len(sides) == 2 else None)
    factor = (1 if weighted else 1 / len(call.q)) / len(sides)
    scaling = GradientScaling(grad, factor, True, call.q.dtype)
    return gradients(call, Sides(rows, columns, common_m), scaling, needs)


def gradients(call, sides, scaling, needs):
    """Return (dq (N, D), dk (M, D), dτ). Unneeded dq, dk are empty, unneeded dτ is None; dτ also needs dq.

    sides  the Sides, with |dloss_dlse| ≤ 1. With self-similarity, rows and columns are the same side, and dq
           is the whole gradient
    needs  three flags: whether the gradients of q, k and the temperature are needed
    """
    compute = small_d_gradients if is_small_d(call) else large_d_gradients
    dq, dk, dot = compute(call, sides, scaling, needs)
    return dq, dk, gradient_of_temperature(call, dot, needs)


def large_d_gradients(call, sides, scaling, needs):
    """Return (dq, dk, partial sums of ⟨q, dq⟩ or None), see gradients(). Unneeded dq, dk are empty."""
    given, self_similarity = call.rounded, call.k is None
    call = aligned(given)
    config = tile_config(call.q, call.mask, square=self_similarity)
    if capability(call.q) >= 10 and sides.are_two:
        config |= dict(BLOCK_N=64, BLOCK_M=64, num_warps=4)        # tiles of 128 × 128 would spill registers
    operands, rest = kernel_args(call, config)
    if sides.are_two and (operands[-1].q_stride is not None or call.mask.row_ids is not None):
        rest |= dict(num_warps=8)     # pointers need more registers than descriptors; ids need registers, too

    def fill_weights(w, w_row_stride, first_x, first_y, tiles_x, tiles_y):
        triangle = self_similarity and first_x == first_y
        tiles = tiles_x * (tiles_x + 1) // 2 if triangle else tiles_x * tiles_y
        launch(weights_kernel, persistent_grid(tiles, w, rest["num_warps"]),
               w, *sides, tiles, first_x, first_y, tiles_x, tiles_y, w_row_stride, *operands,
               TRIANGLE=triangle, **rest)

    sums = gradient_sums(given, needs)
    add_blocks(*sums, *without_padding(call, given), config, fill_weights, self_similarity)
    return finish_gradients(sums, given, sides, scaling, needs[2])
