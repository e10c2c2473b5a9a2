"""Code on the host (CPU) for all kernels: tile sizes, aligned copies of q and k, arguments and launches.

Kernels read q and k through pointers with row strides. If N·M·D exceeds MAX_POINTER_WORK and the GPU has a
tensor memory accelerator (sm_90 or later), kernels that multiply rows use tensor descriptors instead.
"""
import functools
import os
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..masks import transposed
from .heuristics import cdiv
from .tiles import LOG2E, copy_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED_CAPABILITY = 9                   # major compute capability that we assume for CPU tensors
EMULATED_MULTIPROCESSORS = 132            # number of multiprocessors (SMs) that we assume for CPU tensors
MAX_POINTER_WORK = 2 ** 33                # up to this N·M·D, tensor descriptors cost more time than they save


class MatmulShape(NamedTuple):
    """The number of features and the row strides of q and k, as kernel arguments."""
    D: int                   # number of features
    q_stride: Any            # number of elements from one row to the next; None if q is a tensor descriptor
    k_stride: Any


class Temperature(NamedTuple):
    """The temperature as a kernel argument."""
    temperature: Any         # 0-dim tensor that the kernel reads; None if the temperature is a number
    log2e_over_tau: Any      # log2(e)/τ if the temperature is a number; else None


class KernelMask(NamedTuple):
    """The mask and the temperature as kernel arguments. Fields from row_ids to phi are those of masks.Mask;
    the constexpr EXCLUDE is Mask.exclude. For a field that is None, Triton compiles no code."""
    row_ids: Any
    column_ids: Any
    row_groups: Any
    column_groups: Any
    row_features: Any
    column_features: Any
    offset: Any              # 4 · offset + 2; kernel_mask says why
    phi: Any                 # column j is excluded if f_i·f_j ≥ phi, for the features f of row i and column j
    feature_count: Any       # number of features per row in row_features and column_features
    temperature: Any         # as in Temperature
    log2e_over_tau: Any


# ── the GPU and the tiles ───────────────────────────────────────────────────────────────────────────────────


@functools.cache
def properties(device):
    """Return PyTorch's properties of a GPU. PyTorch itself takes a few microseconds for each answer."""
    return torch.cuda.get_device_properties(device)


def capability(x):
    """Return the major compute capability of x's GPU: 8 for A100, 9 for H100 and H200, 10 for B200."""
    return properties(x.device).major if x.is_cuda else EMULATED_CAPABILITY


def multiprocessors(x):
    """Return the number of multiprocessors (SMs) of x's GPU."""
    return properties(x.device).multi_processor_count if x.is_cuda else EMULATED_MULTIPROCESSORS


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
                PRECISION="tf32")                                  # PRECISION has no effect on half types


def check_device(q):
    """Raise ValueError if q is on the CPU and Triton's interpreter was off when this file was imported."""
    if q.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"impl: 'triton' on {q.device} needs TRITON_INTERPRET=1 in the environment before "
                         "Python starts; or use 'blockwise'")


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────────


def aligned_rows(x):
    """Return x if its rows are contiguous and aligned and 16 divides D; else copy it and pad with zeros.

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
    launch(copy_kernel, grid, copy, x, count, features, copy.shape[1], row_stride, column_stride,
           ROUND=rounds, BLOCK_N=32, BLOCK_D=128)
    return copy


def aligned(call):
    """Return the call with q and k in its product dtype and all rows aligned, for all kernels of a pass."""
    call, mask = call.rounded, call.mask
    q, k = aligned_rows(call.q), call.k if call.k is None else aligned_rows(call.k)
    if mask.row_features is not None:
        row_features, column_features = (
            aligned_rows((f.float() if f.dtype == torch.float64 else f).contiguous())   # kernels lack float64
            for f in (mask.row_features, mask.column_features))
        mask = mask._replace(row_features=row_features, column_features=column_features)
    elif q is call.q and k is call.k:
        return call
    return call._replace(q=q, k=k, mask=mask)


def swapped(call):
    """Return the call of the transposed matrix, with queries and keys swapped."""
    return call._replace(q=call.keys, k=call.q, mask=transposed(call.mask))


def is_host_scalar(scalar, x):
    """Return whether x is on a GPU and scalar is not: the caller gave a temperature or bias as a number."""
    return scalar.device != x.device


def temperature_of(call):
    """Return the Temperature of a call."""
    if is_host_scalar(call.temperature, call.q):
        return Temperature(None, LOG2E.value / call.temperature.item())
    return Temperature(call.temperature, None)


def kernel_mask(call):
    """Return the KernelMask of a call."""
    mask, features = call.mask, call.mask.row_features
    # Triton compiles another variant of a kernel if an integer in a tuple is 1 or a multiple of 16.
    # 4 · offset + 2 is neither for any offset, so all offsets share one variant
    feature_count = None if features is None else features.shape[1]
    return KernelMask(*mask[1:7], 4 * mask.offset + 2, mask.phi, feature_count, *temperature_of(call))


def kernel_args(call, config):
    """Return ((q, k, KernelMask, N, M, MatmulShape), keywords), the arguments of any kernel that computes qk.
    The call must come from aligned()."""
    q, k = call.q, call.keys
    (n, features), m = q.shape, k.shape[0]
    if capability(q) >= 9 and n * m * features > MAX_POINTER_WORK:
        shape = MatmulShape(features, None, None)
        q = TensorDescriptor.from_tensor(q, [config["BLOCK_N"], config["BLOCK_D"]])
        k = TensorDescriptor.from_tensor(k, [config["BLOCK_M"], config["BLOCK_D"]])
    else:
        shape = MatmulShape(features, q.stride(0), k.stride(0))
    operands = q, k, kernel_mask(call), n, m, shape
    return operands, dict(EXCLUDE=call.mask.exclude, enable_fp_fusion=True, **config)


# ── launches ────────────────────────────────────────────────────────────────────────────────────────────────

COMPILED = {}      # {what Triton specialises a kernel on: (compiled kernel, names of its constants)}


def launch(kernel, grid, *arguments, **keywords):
    """Do what kernel[grid](*arguments, **keywords) does; the first argument is a tensor.

    The first launch with a key (see kinds) makes Triton compile the kernel. Later launches get the compiled
    kernel from COMPILED. This takes the host less time than Triton's own search for the compiled kernel.
    """
    if INTERPRETED:
        kernel[grid](*arguments, **keywords)
        return
    key = kernel.fn, arguments[0].get_device(), *keywords.values(), *kinds(arguments)
    compiled, constants = COMPILED.get(key, (None, None))
    if compiled is None:
        COMPILED[key] = kernel[grid](*arguments, **keywords), kernel.arg_names[len(arguments):]
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments, *[keywords[name] for name in constants])


def kinds(arguments):
    """Return a list with everything on which Triton specialises a kernel: the dtypes of tensors, alignment of
    their addresses, and whether integers are 1, multiples of 16 or too large for 32 bits."""
    found = []
    for x in arguments:
        kind = type(x)
        if x is None or kind is float:
            found.append(kind)
        elif isinstance(x, torch.Tensor):
            found += x.dtype, x.data_ptr() % 16 == 0
        elif kind is int:
            found.append(1 if x == 1 else (x % 16 == 0, -2 ** 31 <= x < 2 ** 31))
        elif kind is TensorDescriptor:
            found += x.base.dtype, *x.block_shape
        else:
            found += kinds(x)                                  # x is a tuple
    return found
