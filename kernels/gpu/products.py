"""Multiply weights W by k and q, and turn the sums into gradients.

gradient.py, sigmoid.py and fused_forward_backward.py compute W. W may be large, so only one block of W is
stored at a time. In gradient.py and sigmoid.py, a block takes at most WEIGHT_BUFFER_BYTES (heuristics.py):
8192 × 8192 weights in a half type. cuBLAS computes the products, with float32 sums:

               columns J                          for each block of rows I, each block of columns J:
            ┌──────────────┐                          W      = kernel(q_I, k_J)     in q's dtype
     rows I │ W (I × J)    │                          dq_I  += W  @ k_J
            └──────────────┘                          dk_J  += Wᵀ @ q_I

With self-similarity, W is symmetric. Then only blocks on or above the diagonal are computed; those above it
serve as W and as Wᵀ.
"""
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch.torch_version import TorchVersion

from .heuristics import cdiv, round_up, weight_block_shape
from .launch import kernel_mask, launch, swapped
from .shift import SoftmaxSide
from .tiles import WEIGHT_SCALE, finish_gradient, kernel

ADDMM_TO_FLOAT32 = TorchVersion(torch.__version__) >= (2, 11)     # addmm can return float32 for half types


class GradientScaling(NamedTuple):
    """Options of tiles.finish_gradient, which turns a sum of weighted rows into a gradient."""
    grad: Any                # upstream gradient, a 0-dim tensor; None means 1
    loss_factor: float       # constant factor of the gradient, such as 1/N for a mean over N rows
    positives: bool         # True: the gradient also has a term of each row's positive, subtracted at the end
    dtype: Any               # dtype of the gradient


class FinishArgs(NamedTuple):
    """Kernel arguments of tiles.finish_gradient for the gradient of x. x and positive_rows are not padded."""
    grad: Any
    x: Any
    positive_rows: Any       # y, which contains the positives of x; None: do not subtract their terms
    loss_factor: float
    features: int            # number of features
    x_stride: int            # number of elements from one row of x to the next
    positive_stride: int     # number of elements from one row of positive_rows to the next


def finish_args(call, scaling):
    """Return the FinishArgs for the gradient of q. The call has q and k in the dtype of products."""
    x, y = call.q.contiguous(), call.keys.contiguous()
    return FinishArgs(scaling.grad, x, y if scaling.positives else None, scaling.loss_factor, x.shape[1],
                      x.stride(0), y.stride(0))


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


def gradient_sums(call, needs):
    """Return two uninitialised float32 tensors: (N, D) for Σ_j w_ij k_j and (M, D) for Σ_i w_ij q_i.

    A tensor that is not needed is empty. The first tensor is also needed for dτ. With self-similarity, the
    first tensor holds the whole gradient, and the second tensor is empty.
    """
    (n, d), device = call.q.shape, call.q.device
    counts = n if needs[0] or needs[2] else 0, len(call.k) if needs[1] and call.k is not None else 0
    return [torch.empty(count, d, dtype=torch.float32, device=device) for count in counts]


def without_padding(aligned, call):
    """Return q and k of an aligned call, as views without the columns of zeros, for cuBLAS."""
    d = call.q.shape[1]
    return aligned.q[:, :d], aligned.keys[:, :d]


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


def finish_gradients(sums, call, sides, scaling, needs_dot, shift=None):
    """Turn sums, the list [sums_q, sums_k], into (dq, dk, partial sums of ⟨q, dq⟩ or None).

    The list is emptied, so that sums_q can be freed before dk is allocated.
    call   has q and k in the dtype of products
    shift  0-dim tensor or None. If its value is 0, row i of sums_q must still be multiplied by
           sides.rows.factor[i]. In all other cases, sums_q contains these factors
    """
    dq, dot = finish_side(sums.pop(0), call, sides, scaling, needs_dot, shift)
    dk, _ = finish_side(sums.pop(), swapped(call), sides.swapped(), scaling)
    return dq, dk, dot


def finish_side(sums, call, sides, scaling, needs_dot=False, shift=None):
    """Return (gradient of q, partial sums of ⟨q, dq⟩ per row or None). A float32 gradient overwrites sums."""
    if not len(sums):
        return sums, None
    (n, d), mask = sums.shape, call.mask
    dx = sums if scaling.dtype == torch.float32 else torch.empty_like(sums, dtype=scaling.dtype)
    grid = cdiv(n, 32), cdiv(d, 128)
    dot = torch.empty(grid[1], n, dtype=torch.float32, device=sums.device) if needs_dot else None
    if mask.exclude == "target" and mask.row_ids is None:    # the mask is transposed; queries may share a key
        if scaling.positives:
            subtract_targets(sums, call.keys, mask.column_ids, sides.columns.dloss_dlse)
        scaling = scaling._replace(positives=False)
    # the kernel reads only dloss_dlse. Without the other fields, more losses share one compiled kernel
    of_rows, of_columns = (SoftmaxSide(dloss_dlse=side.dloss_dlse) for side in sides[:2])
    launch(finish_gradient_kernel, grid, dx, dot, sums, None if shift is None else sides.rows.factor, shift,
           of_rows, of_columns, kernel_mask(call), n, len(call.keys), finish_args(call, scaling),
           EXCLUDE=mask.exclude, BLOCK_N=32, BLOCK_D=128)
    return dx, dot


def gradient_of_temperature(call, dot, needs):
    """Return dτ = −⟨q, dq⟩/τ, float32, from partial sums of ⟨q, dq⟩; None if it is not needed.
    With self-similarity, ⟨q, dq⟩ contains every dot product twice, so the result is halved."""
    if not needs[2]:
        return None
    return dot.sum() * (-0.5 if call.k is None else -1.0) / call.temperature


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
