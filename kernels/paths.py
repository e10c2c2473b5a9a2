"""Which kernels run. Shapes and dtypes decide, never values: nothing waits, fake tensors go the same way.

                                      narrow: half types, and           wide: everything else
                                      D ≤ 256, few rows or groups
    loss over rows                    lse_forward, gradient_rows        one_pass
    loss over rows and columns,       lse_forward, gradient_rows        lse_forward, gradient_blocks
        or over one set
    similarity_lse                    lse_forward, gradient_rows        lse_forward, gradient_blocks
        keys without gradient         lse_fixed_keys (D ≤ 256)          lse_forward, gradient_blocks
    sigmoid_loss                      sigmoid                           sigmoid

The thresholds come from registers and arithmetic (tests/gpu/test_compile.py prints the first), not from a
measurement yet.
"""
import importlib.util

import torch

from .checks import IMPLS, check_impl, told  # noqa: F401 - IMPLS is also read from here

HAS_TRITON = importlib.util.find_spec("triton") is not None
WIDEST = 256              # features that a program keeps beside as many of their gradient
FEW = 1024                # rows up to which launches cost more than arithmetic
TOPK_SLOTS = 64           # columns a row that topk keeps in registers
BUFFER = 2 ** 27          # bytes of softmax weights at a time, 128 MiB in blocks: kernels.paths.BUFFER = …
STRIP = 2 ** 29           # and 512 MiB in strips of one_pass: either may be set lower
LEAST_STRIP = 2048        # rows below which passing over the columns' gradient costs more than a second pass


def choose_impl(impl, x):
    """The implementation that impl means for the tensor x (see similarity_lse)."""
    check_impl(impl)
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"x: found {told(x)}, wanted a tensor")
    if impl == "auto":
        return "triton" if x.is_cuda and HAS_TRITON and x.dtype != torch.float64 else "blockwise"
    if impl == "triton":
        if not HAS_TRITON:
            raise ValueError("impl: 'triton' wants the package triton, which is not installed; "
                             "use 'blockwise'")
        if x.dtype == torch.float64:
            raise ValueError("impl: 'triton' has no float64; use 'blockwise' or 'eager'")
    return impl


def is_narrow(q, k, rule):
    """Whether gradient_rows takes the gradient."""
    few = max(len(q), len(k)) <= FEW
    small = q.shape[1] <= WIDEST or few or rule.row_groups is not None
    return q.element_size() == 2 and rule.exclude != "target" and small


def keeps_keys(q, impl, products):
    """Whether keys without gradient have their own kernel, which takes q's gradient with the log-sum-exp."""
    return impl == "blockwise" or (products or q.dtype).itemsize == 2 and q.shape[1] <= WIDEST


def strip_height(q, k):
    """Rows of a strip of softmax weights, whole tiles of them."""
    return STRIP // (q.element_size() * -(-len(k) // 128) * 128) // 128 * 128


def gradient_dtype(dtype, temperature, impl):
    """Of gradients that wait for the loss's own: bfloat16 has float32's range, float16's would vanish."""
    return torch.bfloat16 if impl == "triton" and dtype == torch.bfloat16 else temperature.dtype


def in_one_pass(q, k, both, rule, impl, needs):
    """Whether a loss takes its gradients with its value."""
    if impl == "blockwise":
        return True
    if both or k is None or not any(needs) or is_narrow(q, k, rule):
        return False
    return strip_height(q, k) >= min(LEAST_STRIP, -(-len(q) // 128) * 128)
