"""Loss and gradient of pairs that are judged each for itself, in one pass: blocks of weights, used twice.

Eager                                              bytes moved       here
    s = q @ k.T / τ + b                            write 4 N·M       tiles stay in registers
    loss = -logsigmoid(±s).sum() / N               read 4 N·M        Σ softplus(s), Σ σ(s): two numbers a tile
    dloss/ds = ±σ(±s) / N                          write 4 N·M       W, a block at a time, in q's dtype

With W_ij = σ(s_ij), but 0 for positives p_i, which come in at the end, where nothing cancels,

    N·dq_i = (1/τ) (Σ_j W_ij k_j − σ(−s_ip) k_p)        dτ = −⟨q, dq⟩ / τ        N·db = Σ W − Σ_i σ(−s_ip)

A weight is its own logit's: no row has to be summed first, so a block is computed once, 6 N·M·D operations in
all, no more than eager. Blocks, and the library's products with them, are those of gradient_blocks.py.
"""
import torch
import torch.nn.functional as F
import triton.language as tl

from ..paths import gradient_dtype
from .gradient_blocks import add_blocks, finished, zeros
from .launch import Ending, arguments, check_device, is_number, multiplicands, rows_in_place, tile
from .lse_forward import keep_positives
from .reference import Side
from .tiles import (
    LOG2E,
    WEIGHT_SCALE,
    grouped,
    kept,
    kernel,
    octaves,
    product,
    stored,
    sum_of_softplus,
    touched,
)


@kernel
def sigmoid_kernel(W, PARTS, POSITIVE, BIAS, bias, first_x, first_y, tiles_x, tiles_y, w_row,
                   Q, K, RULE, N, M, SHAPE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """W[i, j] = WEIGHT_SCALE σ(s_ij) of a block whose first tile is (first_x, first_y); PARTS[:, program] =
    Σ softplus(s), Σ σ(s) of a tile; POSITIVE[i], a product, of rows whose positive is there."""
    tile_i, tile_j = grouped(tl.program_id(0), tiles_x, tiles_y)
    row, column = (first_x + tile_i) * BLOCK_N, (first_y + tile_j) * BLOCK_M
    rows = row + tl.arange(0, BLOCK_N)
    s = product(Q, K, row, column, N, M, SHAPE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    if touched(row, column, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
        keep_positives(POSITIVE, s, rows, column, 0, N, M, RULE, EXCLUDE, BLOCK_M, False)
        s = tl.where(kept(rows, column, 0, N, M, RULE, EXCLUDE, PRECISION, BLOCK_M), s, float("-inf"))
    if BIAS is not None:
        bias = tl.load(BIAS)
    loss, w = sum_of_softplus(tl.fma(s, octaves(RULE) / LOG2E, bias))
    tl.store(PARTS + tl.program_id(0), loss)
    tl.store(PARTS + tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(w, 1), 0))
    if W is not None:
        i, j = tile_i * BLOCK_N + tl.arange(0, BLOCK_N), tile_j * BLOCK_M + tl.arange(0, BLOCK_M)
        w = stored(w * WEIGHT_SCALE, W, PRECISION)
        tl.store(W + i.to(tl.int64)[:, None] * w_row + j[None, :], w)


def sigmoid_loss(q, k, temperature, bias, rule, needs_q, needs_k, needs_temperature, needs_bias, dtype):
    """(loss, dq (N, D), dk (M, D), dτ, db, or empty) of rows that were given in dtype; see
    operations.sigmoid_loss."""
    check_device(q)
    given = rows_in_place(q), rows_in_place(k)
    q, k = multiplicands(q, k)
    gradients = zeros(q, k, needs_q, needs_k, needs_temperature)
    n, positive, blocks = len(q), q.new_empty(len(q), dtype=torch.float32), tile(q, rule)
    sums = torch.zeros(2, dtype=torch.float64, device=q.device)
    operands, rest = arguments(q, k, temperature, rule, blocks)
    biased = (None, bias.item()) if is_number(bias, q) else (bias, 0.0)

    def weigh(w, w_row, x, y, tiles_x, tiles_y):
        parts = positive.new_empty(2, tiles_x * tiles_y)
        sigmoid_kernel[tiles_x * tiles_y,](w, parts, positive, *biased, x, y, tiles_x, tiles_y, w_row,
                                           *operands, **rest)
        sums.add_(parts.sum(1, dtype=torch.float64))

    add_blocks(*gradients, q, k, blocks, weigh)
    logit = positive / temperature + bias
    side = Side(slope=(-logit).sigmoid())
    loss = ((sums[0] - F.logsigmoid(logit).sum(dtype=torch.float64)) / n).float()
    ending = Ending(loss.new_ones(()), 1 / n, True, gradient_dtype(dtype, temperature, "triton"))
    dq, dk, dot = finished(gradients, *given, operands[2], rule.exclude, side, Side(), ending,
                           needs_temperature)
    dt = -dot.sum() / temperature if needs_temperature else loss.new_empty(0)
    db = ((sums[1] - side.slope.sum(dtype=torch.float64)) / n).float() if needs_bias else loss.new_empty(0)
    return loss, dq, dk, dt, db
