"""Host side of all kernels: tile sizes, copies with aligned rows, and the arguments of a launch.

From sm_90 on (GPUs with a tensor memory accelerator) kernels take q and k as tensor descriptors. For N·M·D up
to MAX_POINTER_WORK, and on older GPUs, they take pointers with a row stride.
"""
import os
from typing import Any, NamedTuple

import torch
from triton import cdiv
from triton.tools.tensor_descriptor import TensorDescriptor

from ..masks import transposed
from .tiles import LOG2E, copy_kernel, scale_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED_CAPABILITY = 9                   # major compute capability that CPU tensors stand for
EMULATED_MULTIPROCESSORS = 132            # number of multiprocessors (SMs) that CPU tensors stand for
MAX_POINTER_WORK = 2 ** 33                # N·M·D up to which a descriptor costs the host more than it saves


class MatmulShape(NamedTuple):
    """Shape and strides of the rows of q and k, for tiles.qk_tile."""
    D: int
    q_stride: Any            # elements from row to row; None: q is a tensor descriptor
    k_stride: Any


class KernelMask(NamedTuple):
    """The mask and the temperature as kernel arguments; mask.exclude is passed on its own, as EXCLUDE.

    Triton compiles no code for a field that is None.
    """
    row_ids: Any
    column_ids: Any
    row_groups: Any
    column_groups: Any
    row_features: Any
    column_features: Any
    offset: Any              # 4 · offset + 2 (kernel_args says why)
    phi: Any
    feature_count: Any       # E, features per row of row_features
    temperature: Any         # 0-dim tensor that the kernel reads; None if the temperature is a number
    log2e_over_tau: Any      # log2(e)/τ if the temperature is a number; else None


class GradientScaling(NamedTuple):
    """How finish_gradient turns a sum of weighted rows into a gradient."""
    grad: Any                # 0-dim tensor, upstream gradient; None: 1
    loss_factor: float       # constant that multiplies it, such as 1/N in a mean over rows
    positives: bool          # True: subtract the term of each row's positive, which the sum leaves out
    dtype: Any               # of the gradient


class FinishArgs(NamedTuple):
    """Arguments of tiles.finish_gradient for the gradient of x: the unpadded rows, and constants."""
    grad: Any
    x: Any
    positive_rows: Any       # the rows of the other side, which hold the positives; None: no positives
    loss_factor: float
    features: int
    x_stride: int            # elements from row to row
    positive_stride: int

    @classmethod
    def make(cls, x, y, scaling):
        """Return the FinishArgs of x and the rows y of the other side."""
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
    """Return the grid of a kernel whose programs loop over tiles: 8 warps per multiprocessor."""
    return min(tiles, 8 // warps * multiprocessors(x)),


def tile_config(x, mask):
    """Return tile sizes, warps, pipeline stages, registers and input precision for rows of x, as a dict."""
    dtypes = [x.dtype] + ([] if mask.row_features is None else [mask.row_features.dtype])
    if torch.float32 in dtypes and torch.get_float32_matmul_precision() == "highest":
        # multiply-adds outside the tensor cores, which do not take full float32
        return dict(BLOCK_N=64, BLOCK_M=64 // len(dtypes), BLOCK_D=16, num_warps=8, num_stages=2, maxnreg=255,
                    PRECISION="ieee")
    ids, half = None if mask.exclude == "target" else mask.row_ids, x.dtype != torch.float32
    kinds = sum(part is not None for part in (ids, mask.row_groups, mask.row_features))
    return dict(BLOCK_N=128,
                BLOCK_M=(128, 64, 64, 32)[kinds],                  # ids and features need registers
                BLOCK_D=64 if half else 32, num_stages=3, maxnreg=255,
                # with 4 warps of 255 registers, two programs share an SM of an H100
                num_warps=4 if half and capability(x) == 9 else 8,
                PRECISION="tf32")                                  # has no effect on half types


def check_device(q):
    """Raise ValueError for a CPU tensor unless Triton's interpreter was turned on before the first import."""
    if q.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"impl: 'triton' on {q.device} needs TRITON_INTERPRET=1 in the environment before "
                         "Python starts; or use 'blockwise'")


def contiguous_rows(x):
    """Return x, or a copy if its rows are not contiguous: kernels have no argument for feature strides."""
    return x if x.stride(1) == 1 else x.contiguous()


def aligned_rows(x):
    """Return x if its rows are contiguous, aligned and have 16·n features, else a copy padded with zeros.

    Kernels read 16 bytes at a time, and descriptors require it; the zeros do not change a product. float32
    rows are copied and rounded to TF32 unless products are in full float32: tensor cores would cut the last
    13 bits off, and these errors, all towards zero, would add up.
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
    """Return q, k and the mask with aligned_rows. A pass calls this once, for all its kernels."""
    if mask.row_features is not None:
        row_features, column_features = (
            aligned_rows((f.float() if f.dtype == torch.float64 else f).contiguous())   # tiles sum in float32
            for f in (mask.row_features, mask.column_features))
        mask = mask._replace(row_features=row_features, column_features=column_features)
    aligned_q = aligned_rows(q)
    return aligned_q, aligned_q if k is q else aligned_rows(k), mask


def transposed_mask(kernel_mask):
    """Return masks.transposed of a KernelMask."""
    swapped = transposed(kernel_mask)
    return swapped._replace(offset=swapped.offset + 4)  # −(4 · offset + 2) + 4 = 4 · (−offset) + 2


def is_host_scalar(scalar, x):
    """Return whether a 0-dim tensor (temperature or bias) was a number: call.as_scalar put it on the host."""
    return scalar.device != x.device


def scale_args(temperature, x):
    """Return the fields temperature and log2e_over_tau of a KernelMask."""
    if is_host_scalar(temperature, x):
        return None, LOG2E.value / temperature.item()
    return temperature, None


def temperature_only_mask(temperature, x):
    """Return a KernelMask that holds only the temperature."""
    return KernelMask(*[None] * (len(KernelMask._fields) - 2), *scale_args(temperature, x))


def scaled_copies(rows, factor):
    """Return factor · x in dtype for each (x, dtype); factor is a 0-dim tensor."""
    outs = [torch.empty_like(x, dtype=dtype) for x, dtype in rows]
    for out, (x, _) in zip(outs, rows):
        scale_kernel[cdiv(x.numel(), 4096),](out, x, x.numel(), factor, BLOCK=4096, enable_fp_fusion=True)
    return outs


def kernel_args(q, k, mask, temperature, config):
    """Return ((q, k, KernelMask, N, M, MatmulShape), keywords): arguments of all kernels that compute qk.

    q, k, mask  from aligned_operands
    """
    feature_count = None if mask.row_features is None else mask.row_features.shape[1]
    # Triton compiles separate kernels for tuple integers that are 1 or multiples of 16; 4 · offset + 2 is
    # never such a number
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
