"""The sigmoid loss of all pairs and its gradient in one pass. The weights W are computed block by block.

Eager                                        bytes moved by eager    this file
    s = q @ k.T / τ + b                      write 4 N·M             tiles stay in registers
    loss = -logsigmoid(±s).sum() / N         read 4 N·M or more      write Σ softplus(s), Σ σ(s) per tile
    dloss/ds = ∓σ(∓s) / N                    write 4 N·M or more     write blocks of W, in q's dtype

The upper sign is for positives. In this file s is in nats. Let k⁺_i be the key that is the positive of row i,
and s⁺_i its logit. W_ij is σ(s_ij), but 0 where key j is the positive of row i. Then

    N·dq_i = (1/τ) (Σ_j W_ij k_j − σ(−s⁺_i) k⁺_i)        dτ = −⟨q, dq⟩ / τ        N·db = Σ W − Σ_i σ(−s⁺_i)

The terms of the positives are added at the end; their factor σ(−s⁺_i) is more accurate than 1 − σ(s⁺_i). A
weight depends only on its logit, not on other logits of the row. So each block of W is computed only once:
6 N·M·D operations in all, as many as eager. products.add_blocks multiplies blocks of W by k and q.
"""
import torch
import triton.language as tl

from .heuristics import cdiv, gradient_dtype
from .launch import aligned, is_host_scalar, kernel_args, launch, persistent_grid, tile_config
from .lse_forward import mask_tile
from .products import (
    GradientScaling, add_blocks, finish_gradients, gradient_of_temperature, gradient_sums, without_padding)
from .shift import Sides, SoftmaxSide
from .tiles import (
    LOG2E, WEIGHT_SCALE, add_tile_product, cast_for_matmul, count_steps, kernel,
    log2e_over_tau, next_step, softplus, softplus_sum)


@kernel
def sigmoid_kernel(W, TILE_SUMS, POSITIVE, BIAS, bias, first_x, first_y, tiles_x, tiles_y, w_row_stride,
                   Q, K, MASK, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write WEIGHT_SCALE · W_ij to W for the block that starts at tile (first_x, first_y).

    TILE_SUMS  output (tiles, 2): Σ softplus(s) and Σ σ(s) of each tile, without the positives
    POSITIVE   output (N,): logits of the positives that lie in the block
    BIAS       0-dim tensor, used instead of the number bias; or None
    """
    tile, tile_i, tile_j, d = tl.program_id(0) - tl.num_programs(0), 0, 0, SHAPE.D
    qk = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(0, count_steps(tiles_x * tiles_y, SHAPE.D, BLOCK_D)):
        tile, tile_i, tile_j, d = next_step(tile, tile_i, tile_j, d, tiles_x, tiles_y, SHAPE.D, False,
                                            BLOCK_D)
        row, column = (first_x + tile_i) * BLOCK_N, (first_y + tile_j) * BLOCK_M
        qk = add_tile_product(qk, Q, K, row, column, d, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
        if d + BLOCK_D >= SHAPE.D:                                 # the tile is complete
            if BIAS is not None:
                bias = tl.load(BIAS)
            s = tl.fma(qk, log2e_over_tau(MASK) / LOG2E, bias)
            s = mask_tile(s, POSITIVE, row, column, N, M, MASK, EXCLUDE, PRECISION, False, 0.0, 1.0, BLOCK_N,
                          BLOCK_M)
            loss, w = softplus_sum(s)
            tl.store(TILE_SUMS + 2 * tile, loss)
            tl.store(TILE_SUMS + 2 * tile + 1, tl.sum(tl.sum(w, 1), 0))
            i, j = tile_i * BLOCK_N + tl.arange(0, BLOCK_N), tile_j * BLOCK_M + tl.arange(0, BLOCK_M)
            w = cast_for_matmul(w * WEIGHT_SCALE, W, PRECISION)
            tl.store(W + i[:, None] * w_row_stride + j[None, :], w)
            qk = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)


@kernel
def finish_sigmoid_kernel(LOSS, BIAS_GRADIENT, COEFFICIENTS, TILE_SUMS, POSITIVE, tiles, N, factor,
                          BLOCK: tl.constexpr):
    """Write σ(−s⁺_i) to COEFFICIENTS, factor · loss to LOSS and factor · db to BIAS_GRADIENT.
    One program adds the sums of all tiles and the terms of all positives, in float64."""
    loss, gradient = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for first in range(0, tiles, BLOCK):
        at = first + tl.arange(0, BLOCK)
        loss += tl.load(TILE_SUMS + 2 * at, mask=at < tiles, other=0.0).to(tl.float64)
        gradient += tl.load(TILE_SUMS + 2 * at + 1, mask=at < tiles, other=0.0).to(tl.float64)
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        positive = tl.load(POSITIVE + rows, mask=rows < N, other=0.0)
        of_positive, coefficient = softplus(-positive)
        tl.store(COEFFICIENTS + rows, coefficient, mask=rows < N)
        loss += tl.where(rows < N, of_positive, 0.0).to(tl.float64)
        gradient -= tl.where(rows < N, coefficient, 0.0).to(tl.float64)
    tl.store(LOSS, (tl.sum(loss, 0) * factor).to(tl.float32))
    tl.store(BIAS_GRADIENT, (tl.sum(gradient, 0) * factor).to(tl.float32))


def sigmoid_loss(call, bias, needs, grad=None):
    """Return (loss, dq, dk, dτ, db). Unneeded dq, dk are empty, unneeded dτ is None; dτ also needs dq."""
    given, sums = call.rounded, gradient_sums(call, needs)
    padded = aligned(given)
    (n, _), config = padded.q.shape, tile_config(padded.q, padded.mask)
    operands, rest = kernel_args(padded, config)
    bias_arguments = (None, bias.item()) if is_host_scalar(bias, call.q) else (bias, 0.0)
    tiles = cdiv(n, config["BLOCK_N"]) * cdiv(len(padded.keys), config["BLOCK_M"])
    tile_sums = torch.empty(tiles, 2, dtype=torch.float32, device=call.q.device)
    positive, coefficients, done = tile_sums.new_empty(n), tile_sums.new_empty(n), 0
    has_positives = call.mask.exclude != "none"

    def fill_weights(w, w_row_stride, first_x, first_y, tiles_x, tiles_y):
        nonlocal done
        launch(sigmoid_kernel, persistent_grid(tiles_x * tiles_y, w, config["num_warps"]),
               w, tile_sums[done:], positive, *bias_arguments, first_x, first_y, tiles_x, tiles_y,
               w_row_stride, *operands, **rest)
        done += tiles_x * tiles_y

    add_blocks(*sums, *without_padding(padded, given), config, fill_weights)
    loss, db = tile_sums.new_empty(()), tile_sums.new_empty(())
    launch(finish_sigmoid_kernel, (1,), loss, db, coefficients, tile_sums, positive, tiles,
           n if has_positives else 0, 1 / n, BLOCK=1024, enable_fp_fusion=True)
    # this loss has no lse: the field dloss_dlse holds σ(−s⁺_i), the coefficients of the positives
    sides = Sides(SoftmaxSide(dloss_dlse=coefficients), SoftmaxSide())
    scaling = GradientScaling(grad, 1 / n, has_positives, gradient_dtype(call.q.dtype))
    dq, dk, dot = finish_gradients(sums, given, sides, scaling, needs[2])
    return loss, dq, dk, gradient_of_temperature(call, dot, needs), db if grad is None else db * grad
