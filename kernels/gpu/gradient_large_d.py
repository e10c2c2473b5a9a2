"""Gradient for large D: a kernel computes blocks of softmax weights W, and cuBLAS multiplies them by k and q.

W (N, M) may be large, so only one block of W is stored at a time. A block has at most WEIGHT_BUFFER_BYTES
(heuristics.py): 8192 × 8192 weights in a half type. cuBLAS computes the products, with float32 sums:

               columns J                          for each block of rows I, each block of columns J:
            ┌──────────────┐                          W      = kernel(q_I, k_J)     in q's dtype
     rows I │ W (I × J)    │                          dq_I  += W  @ k_J
            └──────────────┘                          dk_J  += Wᵀ @ q_I

This takes 6 N·M·D operations; 2 N·M·D of them compute the logits again. With self-similarity, W is symmetric.
Then only blocks on or above the diagonal are computed; those above it serve as W and as Wᵀ: 3 N²D operations.
"""
import torch
import triton
import triton.language as tl
from torch.torch_version import TorchVersion
from triton import cdiv

from ..heuristics import round_up, weight_block_shape
from .launch import (
    FinishArgs, aligned_operands, capability, contiguous_rows, kernel_args, persistent_grid, tile_config,
    transposed_mask)
from .shift import SoftmaxSide
from .tiles import (
    WEIGHT_SCALE, add_tile_product, cast_for_matmul, count_steps, finish_gradient, keep_mask, kernel,
    load_factors, log2e_over_tau, needs_mask, next_step, softmax_weights)

ADDMM_TO_FLOAT32 = TorchVersion(torch.__version__) >= (2, 11)     # addmm can return float32 for half types


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


@kernel
def finish_gradient_kernel(DX, DOT, SUM, FACTOR, SHIFT, X_SIDE, Y_SIDE, MASK, N, M, FINISH,
                           EXCLUDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write finish_gradient(FACTOR · SUM) to DX. If DOT is given, write partial sums of x·dx per row to it.
    FACTOR (N,) has a factor for each row. If SHIFT is not 0 or FACTOR is None, the factors are 1."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = rows.to(tl.int64)[:, None] * FINISH.features + d[None, :]
    dx = tl.load(SUM + place, mask=(rows < N)[:, None] & (d < FINISH.features)[None, :], other=0.0)
    if FACTOR is not None:
        factor = tl.load(FACTOR + rows, mask=rows < N, other=0.0)
        dx = dx * tl.where(tl.load(SHIFT) == 0.0, factor, 1.0)[:, None]
    dx, inside, dots = finish_gradient(dx, FINISH, X_SIDE, Y_SIDE, MASK, rows, d, N, M, EXCLUDE,
                                       DOT is not None)
    tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
    if DOT is not None:
        tl.store(DOT + tl.program_id(1) * N + rows, dots, mask=rows < N)


def gradients(q, k, temperature, mask, rows, columns, common_m, scaling, needs, self_similarity):
    """Return (dq, dk, partial sums of ⟨q, dq⟩ or None), see gradient.gradients. Unneeded dq, dk are empty."""
    given, aligned, d = (q, k), aligned_operands(q, k, mask), q.shape[1]
    q, k = (x[:, :d] for x in aligned[:2])                         # views without the padding, for cuBLAS
    sums = gradient_sums(q, k, *needs)
    config = tile_config(q, aligned[2], square=self_similarity)
    two_sided = rows.factor is not None and columns.factor is not None
    if capability(q) >= 10 and two_sided:
        config |= dict(BLOCK_N=64, BLOCK_M=64, num_warps=4)        # 128 × 128 would spill registers
    operands, rest = kernel_args(*aligned, temperature, config)
    if two_sided and (operands[-1].q_stride is not None or mask.row_ids is not None):
        rest |= dict(num_warps=8)          # pointers take more registers than descriptors, and so do ids

    def fill_weights(w, w_row_stride, first_x, first_y, tiles_x, tiles_y):
        triangle = self_similarity and first_x == first_y
        tiles = tiles_x * (tiles_x + 1) // 2 if triangle else tiles_x * tiles_y
        weights_kernel[persistent_grid(tiles, q, rest["num_warps"])](
            w, rows, columns, common_m, tiles, first_x, first_y, tiles_x, tiles_y, w_row_stride, *operands,
            TRIANGLE=triangle, **rest)

    add_blocks(*sums, q, k, config, fill_weights, self_similarity)
    return finish_gradients(sums, *given, operands[2], mask.exclude, rows, columns, scaling, needs[2])


def gradient_sums(q, k, needs_q, needs_k, needs_temperature):
    """Return two uninitialised float32 tensors: (N, D) for Σ_j w_ij k_j and (M, D) for Σ_i w_ij q_i.
    A tensor that is not needed is empty."""
    needed = (q, needs_q or needs_temperature), (k, needs_k)
    return [torch.empty(x.shape[0] if is_needed else 0, x.shape[1], dtype=torch.float32, device=x.device)
            for x, is_needed in needed]


def add_blocks(sums_q, sums_k, q, k, config, fill_weights, self_similarity=False):
    """Add W k to sums_q and Wᵀ q to sums_k, block by block.

    sums_q, sums_k   from gradient_sums; an empty tensor stays empty
    fill_weights     function (w, w_row_stride, first_x, first_y, tiles_x, tiles_y) that writes the weights of
                     one block to the buffer w. The block starts at tile (first_x, first_y) and has
                     tiles_x × tiles_y tiles
    self_similarity  True: W is symmetric, and all products are added to sums_q
    """
    height, width = weight_block_shape(q, k, self_similarity)
    buffer = q.new_empty(*(round_up(x, config[y]) for x, y in ((height, "BLOCK_N"), (width, "BLOCK_M"))))
    for i in range(0, q.shape[0], height):
        for j in range(i if self_similarity else 0, k.shape[0], width):
            at_i, at_j = slice(i, min(i + height, q.shape[0])), slice(j, min(j + width, k.shape[0]))
            tiles = (cdiv(at.stop - at.start, config[block])
                     for at, block in ((at_i, "BLOCK_N"), (at_j, "BLOCK_M")))
            fill_weights(buffer, buffer.shape[1], i // config["BLOCK_N"], j // config["BLOCK_M"], *tiles)
            w = buffer[:at_i.stop - i, :at_j.stop - j]
            if sums_q.shape[0]:
                add_product(sums_q[at_i], w, k[at_j], j == 0)
            if sums_k.shape[0] or self_similarity and i != j:
                add_product((sums_q if self_similarity else sums_k)[at_j], w.T, q[at_i], i == 0)


def finish_gradients(sums, q, k, mask, exclude, rows, columns, scaling, needs_dot, shift=None):
    """Turn sums, the list [sums_q, sums_k], into (dq, dk, partial sums of ⟨q, dq⟩ or None).

    The list is emptied, so that sums_q can be freed before dk is allocated. mask is a KernelMask.
    shift  0-dim tensor: if it is 0, sums_q lacks the factors rows.factor, so multiply its rows by them. None:
           sums_q contains these factors
    """
    dq, dot = finish_side(sums.pop(0), q, k, mask, exclude, rows, columns, scaling, needs_dot, shift)
    dk, _ = finish_side(sums.pop(), k, q, transposed_mask(mask), exclude, columns, rows, scaling)
    return dq, dk, dot


def finish_side(sums, x, y, mask, exclude, x_side, y_side, scaling, needs_dot=False, shift=None):
    """Return (dx, partial sums of x·dx per row or None). If dx is float32, dx overwrites sums."""
    if not sums.shape[0]:
        return sums, None
    x, y = contiguous_rows(x), contiguous_rows(y)
    dx = sums if scaling.dtype == torch.float32 else torch.empty_like(sums, dtype=scaling.dtype)
    grid = cdiv(x.shape[0], 32), cdiv(x.shape[1], 128)
    dot = torch.empty(grid[1], x.shape[0], dtype=torch.float32, device=x.device) if needs_dot else None
    if exclude == "target" and mask.row_ids is None:  # then x is k, and many rows of q may share a key
        if scaling.positives:
            subtract_targets(sums, y, mask.column_ids, y_side.dloss_dlse)
        scaling = scaling._replace(positives=False)
    factor = None if shift is None else x_side.factor
    # the kernel reads only dloss_dlse. Without the other fields, more losses share one compiled kernel
    x_side, y_side = (SoftmaxSide(dloss_dlse=side.dloss_dlse) for side in (x_side, y_side))
    finish_gradient_kernel[grid](dx, dot, sums, factor, shift, x_side, y_side, mask, x.shape[0], y.shape[0],
                                 FinishArgs.make(x, y, scaling), EXCLUDE=exclude, BLOCK_N=32, BLOCK_D=128)
    return dx, dot


def add_product(sums, a, b, overwrite):
    """Add a @ b to sums (float32), in place; a and b have any dtype. overwrite: replace the old sums."""
    if not a.is_cuda:
        a, b = a.float(), b.float()         # on a CPU (Triton's interpreter), mm has no out_dtype
    to_float32 = {} if a.dtype == torch.float32 else dict(out_dtype=torch.float32)
    if overwrite:
        torch.mm(a, b, out=sums, **to_float32)
    elif ADDMM_TO_FLOAT32 or not to_float32:
        torch.addmm(sums, a, b, out=sums, **to_float32)
    else:
        sums += torch.mm(a, b, **to_float32)


def subtract_targets(sums, q, targets, dloss_dlse):
    """Subtract WEIGHT_SCALE · dloss_dlse_i · q_i from sums[targets_i] for all i, 8192 rows at a time.
    index_put_ adds the rows of a repeated target in a fixed order."""
    for first in range(0, q.shape[0], 8192):
        rows = slice(first, min(first + 8192, q.shape[0]))
        added = q[rows] * (dloss_dlse[rows] * -WEIGHT_SCALE.value)[:, None]
        sums.index_put_((targets[rows],), added, accumulate=True)
