"""Gradient for large D: a kernel computes blocks of softmax weights W, and cuBLAS multiplies them by k and q.

This takes 6 N·M·D operations; 2 N·M·D of them compute the logits again. With self-similarity, W is symmetric,
and this takes 3 N²D operations. products.py has the loop over blocks.
"""
import triton
import triton.language as tl

from .launch import aligned, capability, kernel_args, launch, persistent_grid, tile_config
from .products import add_blocks, finish_gradients, gradient_sums, without_padding
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


def gradients(call, sides, scaling, needs):
    """Return (dq, dk, partial sums of ⟨q, dq⟩ or None), see gradient.gradients. Unneeded dq, dk are empty."""
    given, self_similarity = call.rounded, call.k is None
    call = aligned(given)
    config = tile_config(call.q, call.mask, square=self_similarity)
    if capability(call.q) >= 10 and sides.are_two:
        config |= dict(BLOCK_N=64, BLOCK_M=64, num_warps=4)        # 128 × 128 would spill registers
    operands, rest = kernel_args(call, config)
    if sides.are_two and (operands[-1].q_stride is not None or call.mask.row_ids is not None):
        rest |= dict(num_warps=8)          # pointers take more registers than descriptors, and so do ids

    def fill_weights(w, w_row_stride, first_x, first_y, tiles_x, tiles_y):
        triangle = self_similarity and first_x == first_y
        tiles = tiles_x * (tiles_x + 1) // 2 if triangle else tiles_x * tiles_y
        launch(weights_kernel, persistent_grid(tiles, w, rest["num_warps"]),
               w, *sides, tiles, first_x, first_y, tiles_x, tiles_y, w_row_stride, *operands,
               TRIANGLE=triangle, **rest)

    sums = gradient_sums(given, needs)
    add_blocks(*sums, *without_padding(call, given), config, fill_weights, self_similarity)
    return finish_gradients(sums, given, sides, scaling, needs[2])
