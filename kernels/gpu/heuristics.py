"""Choose kernels by shapes and dtypes, never by values in tensors, so that the host does not wait for a GPU.

"Small D" means: rows have a half type, D ≤ 128, and the loss is not linear_cross_entropy (mask "target").
"Large D" means all other cases. At large D, a row softmax loss uses fused_forward_backward. There is one
exception: if this would need several strips of fewer than MIN_FUSED_ROWS rows, the loss uses lse_forward
and gradient.

                                  small D                           large D
    row softmax loss (gradient)   lse_forward, gradient_small_d     fused_forward_backward
    row and column softmax, or    lse_forward, gradient_small_d     lse_forward, gradient
        self-similarity
    similarity_lse                lse_forward, gradient_small_d     lse_forward, gradient
    queue_loss (small: D ≤ 256)   queue                             lse_forward, gradient, in queue
    sigmoid_loss                  sigmoid                           sigmoid
"""
import torch

MAX_SMALL_D = 128              # up to this D, gradient_small_d is expected to be faster than gradient
MAX_QUEUE_D = 256              # up to this D, registers can hold a tile of rows and its gradient
TOPK_SLOTS = 64                # largest n of the topk kernel, which keeps n columns per row in registers
SHIFT_LOGITS = 2 ** 26         # up to this many logits, a shift probably saves less time than it costs
WEIGHT_BUFFER_BYTES = 2 ** 27  # softmax weights in products.py use a buffer of at most 128 MiB
TABLE_BYTES = 2 ** 25          # tables in lse_forward may take 32 MiB, or more if q and k are larger
STRIP_BYTES = 2 ** 29          # a strip takes at most 512 MiB, or as much as the keys if they are larger
MIN_FUSED_ROWS = 2048          # with fewer rows per strip, updating dk costs more than computing logits twice


def is_small_d(call):
    """Return whether gradient_small_d computes the gradients of a call ("small D", see above)."""
    is_small = call.q.shape[1] <= MAX_SMALL_D
    return is_small and call.product_dtype.itemsize == 2 and call.mask.exclude != "target"


def fuses_backward(call, both, needs):
    """Return whether a softmax loss computes its gradients in forward, together with the loss."""
    if both or call.k is None or not any(needs) or is_small_d(call):
        return False
    n, d = call.q.shape
    height = strip_height(call.product_dtype.itemsize, len(call.k), d)
    return height >= min(MIN_FUSED_ROWS, round_up(n, 128))


def strip_height(itemsize, m, d):
    """Return the number of rows of a strip in fused_forward_backward, a multiple of the tile size 128.

    A strip takes at most STRIP_BYTES, or as much memory as the m keys if the keys are larger.
    """
    return max(STRIP_BYTES // (itemsize * round_up(m, 128)), d) // 128 * 128


def cdiv(count, size):
    """Return count / size, rounded up. Triton's own cdiv takes several microseconds."""
    return -(-count // size)


def power_of_2(count):
    """Return the smallest power of 2 that is at least count."""
    return 1 << (count - 1).bit_length()


def round_up(count, size):
    """Return count, rounded up to a multiple of size."""
    return cdiv(count, size) * size


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

    Tables take at most TABLE_BYTES, or the size of q and k if larger (up to STRIP_BYTES). A logit takes 1/16
    byte, or 1/8 with square=True; this is 2 (4) times as much if tiles have 64 (32) instead of 128 columns.
    """
    (n, d), m = q.shape, k.shape[0]
    logits = max(TABLE_BYTES, min((n + m) * d * q.element_size(), STRIP_BYTES)) * (8 if square else 16)
    if square:
        limit = int(logits ** 0.5) // 1024 * 1024
        side = round_up(cdiv(n, cdiv(n, limit)), 1024)
        return side, side
    height = min(round_up(n, 1024), 2 ** 14)
    return height, logits // height // 1024 * 1024


def gradient_dtype(dtype):
    """Return the dtype in which Triton's forward stores gradients: not float16, which would underflow."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
