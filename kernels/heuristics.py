"""Choose the kernels by shapes and dtypes, never by values, so that the host does not wait for the GPU.

"Small D" means: half types, any mask but "target" (linear_cross_entropy), and D ≤ 128 or groups (within=).
"Large D" is everything else. With at most FEW_ROWS rows, or strips of fewer than MIN_FUSED_ROWS rows, a row
softmax loss of large D uses the kernels of the next line.

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

from .checks import check_impl, describe

HAS_TRITON = importlib.util.find_spec("triton") is not None
EAGER_LOGITS = 2 ** 18         # on the CPU, eager is the fastest for a matrix of at most this many logits
EAGER_LOGITS_ON_GPU = 2 ** 22  # the same on a GPU without Triton
MAX_SMALL_D = 128              # largest D for which gradient_small_d should be faster
MAX_QUEUE_D = 256              # largest D for which rows and their gradient fit into a program's registers
FEW_ROWS = 1024                # with at most this many rows, a kernel launch costs more than its arithmetic
TOPK_SLOTS = 64                # the topk kernel keeps up to this many columns per row in registers
WEIGHT_BUFFER_BYTES = 2 ** 27  # 128 MiB: buffer for softmax weights in gradient_large_d and sigmoid
TABLE_BYTES = 2 ** 25          # 32 MiB: tables of row and column statistics in lse_forward
STRIP_BYTES = 2 ** 29          # 512 MiB: a strip in fused_forward_backward, unless the keys take more
MIN_FUSED_ROWS = 2048          # strips of fewer rows would add to dk so often that a second pass costs less


def choose_impl(impl, x, n=None, m=None, product_dtype=None):
    """Return the implementation that impl selects for the tensor x: what "auto" means, else impl itself.

    "auto" is "triton" on a GPU. Without Triton, and for float64, it is "eager" for a small matrix of logits
    in full precision, else "blockwise".
    n, m           shape of the matrix of logits; None: a large matrix
    product_dtype  dtype of the products; None: that of x
    """
    check_impl(impl)
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"x: found {describe(x)}, expected a tensor")
    if impl == "auto":
        if x.is_cuda and HAS_TRITON and x.dtype != torch.float64:
            return "triton"
        largest = EAGER_LOGITS_ON_GPU if x.is_cuda else EAGER_LOGITS
        is_small = n is not None and n * m <= largest
        # in half types eager would round the logits, blockwise does not
        return "eager" if is_small and (product_dtype or x.dtype).itemsize > 2 else "blockwise"
    if impl == "triton":
        if not HAS_TRITON:
            raise ValueError("impl: 'triton' needs the package triton, which is not installed; "
                             "use 'blockwise'")
        if x.dtype == torch.float64:
            raise ValueError("impl: 'triton' does not support float64; use 'blockwise' or 'eager'")
    return impl


def is_small_d(itemsize, d, mask):
    """Return whether gradient_small_d computes the gradient of (N, D) rows (see the table above)."""
    small = d <= MAX_SMALL_D or mask.row_groups is not None
    return itemsize == 2 and mask.exclude != "target" and small


def has_queue_kernel(itemsize, d):
    """Return whether queue_loss uses its own kernel, which computes the loss and the gradient together."""
    return itemsize == 2 and d <= MAX_QUEUE_D


def strip_height(itemsize, m, d):
    """Return the number of rows of a strip in fused_forward_backward, a multiple of the tile size 128.

    A strip takes at most STRIP_BYTES, or as much memory as the keys, if that is more.
    """
    return max(STRIP_BYTES // (itemsize * round_up(m, 128)), d) // 128 * 128


def round_up(count, size):
    """Return count, rounded up to a multiple of size."""
    return -(-count // size) * size


def weight_block_shape(q, k, square):
    """Return (rows, columns) of the largest block of weights, nearly square, that fits in the buffer."""
    entries = WEIGHT_BUFFER_BYTES // q.element_size()
    side = 1 << (entries.bit_length() - 1) // 2
    if square:
        return min(q.shape[0], side), min(q.shape[0], side)
    height = min(q.shape[0], max(side, entries // k.shape[0] // 128 * 128))
    return height, min(k.shape[0], entries // round_up(height, 128) // 128 * 128)


def table_block_shape(q, k, square):
    """Return (rows, columns) of a block in lse_forward, whose tables take at most TABLE_BYTES.

    They may take as much memory as q and k, if that is more, but never more than STRIP_BYTES. Tables of tiles
    of 128 × 128 logits have 1/16 byte per logit; with columns, twice as much.
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
    """Return the dtype in which Triton keeps gradients that are computed in forward until backward.

    bfloat16 for bfloat16 rows: it has the range of float32. Else float32: in float16 small ones underflow.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def fuses_backward(call, both, needs):
    """Return whether a softmax loss in Triton computes its gradients in forward, together with its value."""
    itemsize, (n, d) = call.product_dtype.itemsize, call.q.shape
    if both or call.k is None or not any(needs) or is_small_d(itemsize, d, call.mask):
        return False
    m = len(call.k)
    return max(n, m) > FEW_ROWS and strip_height(itemsize, m, d) >= min(MIN_FUSED_ROWS, round_up(n, 128))
