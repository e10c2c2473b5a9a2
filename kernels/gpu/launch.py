"""Code on the host (CPU) for all kernels: tile sizes, aligned copies of q and k, arguments of launches.

Kernels read q and k through pointers with row strides. If N·M·D exceeds MAX_POINTER_WORK and the GPU has a
tensor memory accelerator (sm_90 or later), kernels read q and k through tensor descriptors instead.
"""
import os
from typing import Any, NamedTuple

import torch
from triton import cdiv
from triton.tools.tensor_descriptor import TensorDescriptor

from ..masks import transposed
from .tiles import LOG2E, copy_kernel, scale_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED_CAPABILITY = 9                   # major compute capability that we assume for CPU tensors
EMULATED_MULTIPROCESSORS = 132            # number of multiprocessors (SMs) that we assume for CPU tensors
MAX_POINTER_WORK = 2 ** 33                # up to this N·M·D, making descriptors takes longer than they save


class MatmulShape(NamedTuple):
    """The number of features and the row strides of q and k, as kernel arguments."""
    D: int                   # number of features
    q_stride: Any            # elements from row to row; None: q is a tensor descriptor
    k_stride: Any


class KernelMask(NamedTuple):
    """The mask and the temperature as kernel arguments. Fields from row_ids to phi are those of masks.Mask;
    the constexpr EXCLUDE is its field exclude. Triton compiles no code for a field that is None."""
    row_ids: Any
    column_ids: Any
    row_groups: Any
    column_groups: Any
    row_features: Any
    column_features: Any
    offset: Any              # 4 · (offset of the Mask) + 2; kernel_args says why
    phi: Any                 # columns with f_i·f_j ≥ phi are excluded; f_i, f_j: row, column features
    feature_count: Any       # number of features per row in row_features and column_features
    temperature: Any         # 0-dim tensor that the kernel reads; None if the temperature is a number
    log2e_over_tau: Any      # log2(e)/τ if the temperature is a number; else None


class GradientScaling(NamedTuple):
    """Options of tiles.finish_gradient, which turns a sum of weighted rows into a gradient."""
    grad: Any                # upstream gradient, a 0-dim tensor; None means 1
    loss_factor: float       # constant factor of the gradient, such as 1/N for a mean over N rows
    positives: bool          # True: subtract the term of each row's positive, which the sum does not contain
    dtype: Any               # dtype of the gradient


class FinishArgs(NamedTuple):
    """Kernel arguments of tiles.finish_gradient for the gradient of x. x and positive_rows are not padded."""
    grad: Any
    x: Any
    positive_rows: Any       # y, which contains the positives of x; None: do not subtract their terms
    loss_factor: float
    features: int            # number of features
    x_stride: int            # elements from row to row of x
    positive_stride: int     # elements from row to row of positive_rows

    @classmethod
    def make(cls, x, y, scaling):
        """Return the FinishArgs for the gradient of x, where the logits are dot products of x and y."""
        positive_rows = y if scaling.positives else None
        return cls(scaling.grad, x, positive_rows, scaling.loss_factor, x.shape[1], x.stride(0), y.stride(0))


def capability(x):
    """Return the major compute capability of x's GPU: 8 for A100, 9 for H100 and H200, 10 for B200."""
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else EMULATED_CAPABILITY


def multiprocessors(x):
    """Return the number of multiprocessors (SMs) of x's GPU."""
    if not x.is_cuda:
        return EMULATED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def persistent_grid(tiles, x, warps=4):
    """Return the grid of a kernel whose programs loop over tiles. Each multiprocessor gets 8 warps."""
    return min(tiles, 8 // warps * multiprocessors(x)),


def tile_config(x, mask, square=False):
    """Return the config of a kernel that computes dot products of x, for the dtype of x and the mask.

    square   True: tiles must be square, because the kernel computes only half of a symmetric matrix
    """
    dtypes = [x.dtype] + ([] if mask.row_features is None else [mask.row_features.dtype])
    if torch.float32 in dtypes and torch.get_float32_matmul_precision() == "highest":
        # tensor cores do not support full float32, so CUDA cores compute the products
        return dict(BLOCK_N=64, BLOCK_M=64 // len(dtypes), BLOCK_D=16, num_warps=8, num_stages=2, maxnreg=255,
                    PRECISION="ieee")
    ids, half = None if mask.exclude == "target" else mask.row_ids, x.dtype != torch.float32
    kinds = sum(part is not None for part in (ids, mask.row_groups, mask.row_features))
    return dict(BLOCK_N=128,
                # registers also hold ids, groups and features
                BLOCK_M=128 if square else (128, 64, 64, 32)[kinds],
                BLOCK_D=64 if half else 32, num_stages=3, maxnreg=255,
                # with 4 warps and 255 registers per thread, an SM of an H100 runs two programs at a time
                num_warps=4 if half and capability(x) == 9 else 8,
                PRECISION="tf32")                                  # has no effect on half types


def check_device(q):
    """Raise ValueError if q is on the CPU and Triton's interpreter was off when this file was imported."""
    if q.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"impl: 'triton' on {q.device} needs TRITON_INTERPRET=1 in the environment before "
                         "Python starts; or use 'blockwise'")


def contiguous_rows(x):
    """Return x if its feature stride is 1, else a contiguous copy: kernels assume a feature stride of 1."""
    return x if x.stride(1) == 1 else x.contiguous()


def aligned_rows(x):
    """Return x if its rows are contiguous and aligned and 16 divides D; else such a copy, padded with zeros.

    Kernels and descriptors read 16 bytes at a time, from aligned addresses. Zeros do not change dot products.
    If products use TF32, float32 rows are always copied, and rounded to TF32. Without the rounding, tensor
    cores would cut off the last 13 bits. These errors would all go towards zero, and so add up.
    """
    (count, features), (row_stride, column_stride) = x.shape, x.stride()
    rounds = x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    fits = (column_stride == 1 and row_stride >= features
            and row_stride % 16 == features % 16 == x.data_ptr() % 16 == 0)
    if fits and not rounds:
        return x
    copy = x.new_empty(count, cdiv(features, 16) * 16)
    grid = cdiv(count, 32), cdiv(copy.shape[1], 128)
    copy_kernel[grid](copy, x, count, features, copy.shape[1], row_stride, column_stride, ROUND=rounds,
                      BLOCK_N=32, BLOCK_D=128)
    return copy


def aligned_operands(q, k, mask):
    """Return q, k and the mask, with all rows aligned. All kernels of a pass use the same copies."""
    if mask.row_features is not None:
        row_features, column_features = (
            aligned_rows((f.float() if f.dtype == torch.float64 else f).contiguous())   # kernels use float32
            for f in (mask.row_features, mask.column_features))
        mask = mask._replace(row_features=row_features, column_features=column_features)
    aligned_q = aligned_rows(q)
    return aligned_q, aligned_q if k is q else aligned_rows(k), mask


def transposed_mask(kernel_mask):
    """Return a KernelMask with rows and columns swapped, as masks.transposed does for a Mask."""
    swapped = transposed(kernel_mask)
    return swapped._replace(offset=swapped.offset + 4)  # −(4 · offset + 2) + 4 = 4 · (−offset) + 2


def is_host_scalar(scalar, x):
    """Return whether x is on a GPU and scalar is not: the caller gave a temperature or bias as a number."""
    return scalar.device != x.device


def scale_args(temperature, x):
    """Return (temperature, log2e_over_tau), the last two fields of a KernelMask; exactly one is None."""
    if is_host_scalar(temperature, x):
        return None, LOG2E.value / temperature.item()
    return temperature, None


def temperature_only_mask(temperature, x):
    """Return a KernelMask that holds only the temperature."""
    return KernelMask(*[None] * (len(KernelMask._fields) - 2), *scale_args(temperature, x))


def scaled_copies(rows, factor):
    """Return a list with factor · x in dtype for each (x, dtype) of rows; factor is a 0-dim tensor."""
    outs = [torch.empty_like(x, dtype=dtype) for x, dtype in rows]
    for out, (x, _) in zip(outs, rows):
        scale_kernel[cdiv(x.numel(), 4096),](out, x, x.numel(), factor, BLOCK=4096, enable_fp_fusion=True)
    return outs


def kernel_args(q, k, mask, temperature, config):
    """Return ((q, k, KernelMask, N, M, MatmulShape), keywords), the arguments of any kernel that computes qk.
    The arguments q, k and mask must come from aligned_operands."""
    feature_count = None if mask.row_features is None else mask.row_features.shape[1]
    # Triton compiles another variant of a kernel if an integer in a tuple is 1 or a multiple of 16.
    # 4 · offset + 2 is neither for any offset, so all offsets share one variant
    kernel_mask = KernelMask(*mask[1:7], 4 * mask.offset + 2, mask.phi, feature_count,
                             *scale_args(temperature, q))
    (n, _), (m, features) = q.shape, k.shape
    if capability(q) >= 9 and n * m * features > MAX_POINTER_WORK:
        shape = MatmulShape(features, None, None)
        q = TensorDescriptor.from_tensor(q, [config["BLOCK_N"], config["BLOCK_D"]])
        k = TensorDescriptor.from_tensor(k, [config["BLOCK_M"], config["BLOCK_D"]])
    else:
        shape = MatmulShape(features, q.stride(0), k.stride(0))
    return (q, k, kernel_mask, n, m, shape), dict(EXCLUDE=mask.exclude, enable_fp_fusion=True, **config)
