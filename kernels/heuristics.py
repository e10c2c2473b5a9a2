"""Choose kernels by shapes and dtypes, never by values in tensors, so that the host does not wait for a GPU.

"Small D" means that rows have a half type, that the mask is not "target" (linear_cross_entropy has this one),
and that D ≤ 128 or the mask has groups (argument within). "Large D" means all other cases. At large D, a row
softmax loss uses lse_forward and gradient_large_d instead of fused_forward_backward if there are at most
FEW_ROWS rows and columns, or if the latter would need several strips of fewer than MIN_FUSED_ROWS rows.

                                  small D                           large D
    row softmax loss              lse_forward, gradient_small_d     fused_forward_backward
    row and column softmax, or    lse_forward, gradient_small_d     lse_forward, gradient_large_d
        self-similarity
    similarity_lse                lse_forward, gradient_small_d     lse_forward, gradient_large_d
    queue_loss (small: D ≤ 256)   queue_loss                        blockwise.py
    sigmoid_loss                  sigmoid                           sigmoid
"""
import importlib.util

import torch

from .checks import IMPLS, check_choice, describe

HAS_TRITON = importlib.util.find_spec("triton") is not None
EAGER_LOGITS = 2 ** 18         # on the CPU, eager is usually faster for at most this many logits (N·M)
EAGER_LOGITS_ON_GPU = 2 ** 22  # the same limit on a GPU without Triton
MAX_SMALL_D = 128              # up to this D, gradient_small_d is expected to be faster than gradient_large_d
MAX_QUEUE_D = 256              # up to this D, registers can hold a tile of rows and its gradient
FEW_ROWS = 1024                # up to this many rows, the launch of a kernel takes longer than its arithmetic
TOPK_SLOTS = 64                # largest n of the topk kernel, which keeps n columns per row in registers
WEIGHT_BUFFER_BYTES = 2 ** 27  # 128 MiB: buffer for softmax weights in gradient_large_d and sigmoid
TABLE_BYTES = 2 ** 25          # 32 MiB: limit for tables of statistics in lse_forward (see table_block_shape)
STRIP_BYTES = 2 ** 29          # 512 MiB: limit for a strip in fused_forward_backward (see strip_height)
MIN_FUSED_ROWS = 2048          # fewer rows per strip: updating dk costs more than computing the logits twice


def choose_impl(impl, x, n=None, m=None, product_dtype=None):
    """Return the implementation for the tensor x: the choice of "auto", or impl itself if it is not "auto".

    "auto" selects "triton" on a GPU with Triton, except for float64. In other cases it selects "eager" if the
    matrix of logits is small and the products are in full precision, and "blockwise" if not.
    n, m           shape of the matrix of logits; None: a large matrix
    product_dtype  dtype of the products; None: the dtype of x
    """
    check_choice("impl", impl, *IMPLS)
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"x: found {describe(x)}, expected a tensor")
    if impl == "auto":
        if x.is_cuda and HAS_TRITON and x.dtype != torch.float64:
            return "triton"
        largest = EAGER_LOGITS_ON_GPU if x.is_cuda else EAGER_LOGITS
        is_small = n is not None and n * m <= largest
        # in half types eager would round the logits; blockwise does not round them
        return "eager" if is_small and (product_dtype or x.dtype).itemsize > 2 else "blockwise"
    if impl == "triton":
        if not HAS_TRITON:
            raise ValueError("impl: 'triton' needs the package triton, which is not installed; "
                             "use 'blockwise'")
        if x.dtype == torch.float64:
            raise ValueError("impl: 'triton' does not support float64; use 'blockwise' or 'eager'")
    return impl


def is_small_d(itemsize, d, mask):
    """Return whether gradient_small_d computes the gradient of (N, D) rows ("small D", see above)."""
    small = d <= MAX_SMALL_D or mask.row_groups is not None
    return itemsize == 2 and mask.exclude != "target" and small


def has_queue_kernel(itemsize, d):
    """Return whether queue_loss can use its own Triton kernel (half types, and D up to MAX_QUEUE_D)."""
    return itemsize == 2 and d <= MAX_QUEUE_D


def strip_height(itemsize, m, d):
    """Return the number of rows of a strip in fused_forward_backward, a multiple of the tile size 128.

    A strip takes at most STRIP_BYTES, or as much memory as the m keys if the keys are larger.
    """
    return max(STRIP_BYTES // (itemsize * round_up(m, 128)), d) // 128 * 128


def round_up(count, size):
    """Return count, rounded up to a multiple of size."""
    return -(-count // size) * size


def weight_block_shape(q, k, square):
    """Return (rows, columns) of the largest nearly square block of weights within WEIGHT_BUFFER_BYTES."""
    entries = WEIGHT_BUFFER_BYTES // q.element_size()
    side = 1 << (entries.bit_length() - 1) // 2
    if square:
        return min(q.shape[0], side), min(q.shape[0], side)
    height = min(q.shape[0], max(side, entries // round_up(k.shape[0], 128) // 128 * 128))
    return height, min(k.shape[0], entries // round_up(height, 128) // 128 * 128)


def table_block_shape(q, k, square):
    """Return (rows, columns) of a block of logits in lse_forward, limited by the size of its tables.

    Tables take at most TABLE_BYTES, or as much as q and k if these are larger, up to STRIP_BYTES: 1/16 byte
    per logit, with square=True 1/8. Tiles of 64 (32) instead of 128 columns need 2 (4) times as much.
    """
    (n, d), m = q.shape, k.shape[0]
    logits = max(TABLE_BYTES, min((n + m) * d * q.element_size(), STRIP_BYTES)) * (8 if square else 16)
    if square:
        limit = int(logits ** 0.5) // 1024 * 1024
        side = round_up(-(-n // -(-n // limit)), 1024)
        return side, side
    height = min(round_up(n, 1024), 2 ** 14)
    return height, logits // height // 1024 * 1024


def gradient_dtype(dtype):
    """Return the dtype in which Triton's forward stores gradients: not float16, which would underflow."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def fuses_backward(call, both, needs):
    """Return whether a softmax loss in Triton computes its gradients in forward, together with the loss."""
    itemsize, (n, d) = call.product_dtype.itemsize, call.q.shape
    if both or call.k is None or not any(needs) or is_small_d(itemsize, d, call.mask):
        return False
    m = len(call.k)
    return max(n, m) > FEW_ROWS and strip_height(itemsize, m, d) >= min(MIN_FUSED_ROWS, round_up(n, 128))
