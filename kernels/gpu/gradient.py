"""Backward pass of softmax losses: compute the logits again, turn them into weights W, multiply by W.

Let g_i = dloss_dlse_i and p_ij = exp(q_i·k_j/τ − lse_i), or 0 where the mask excludes column j. Then

    W_ij = g_i p_ij        dq_i = (1/τ) Σ_j W_ij k_j        dk_j = (1/τ) Σ_i W_ij q_i        dτ = −⟨q, dq⟩ / τ

Eager                                        bytes moved by eager (float32 logits)
    w = g[:, None] * (s - lse[:, None]).exp()    read and write 16 N·M or more
    dq, dk = w @ k / τ, w.T @ q / τ              read 8 N·M

gradient_small_d.py: a program loops over k for its rows of q and keeps dq and W in registers.
gradient_large_d.py: one kernel writes blocks of W, 2 N·M bytes in half types, and cuBLAS reads them twice.

If the loss also has a column softmax p' with derivatives g'_j, one dot product gives both terms of
W_ij = g_i p_ij + g'_j p'_ij. With self-similarity (rows z), dz = (1/τ) W z, where W_ij = g_i p_ij + g_j p_ji.
If column j is the positive of row i, the mask excludes it, and W_ij = 0. The positive has the coefficient
−g_i instead (with a column softmax −g_i − g'_j). Its term is added at the end, in float32.

In a half type, W must not overflow, and small weights should not underflow. Therefore g does not contain
constants such as 1/N; the gradients are multiplied by these at the end. As |g| ≤ 1, W can be stored times
WEIGHT_SCALE = 2¹⁴ (the final sums are divided by this): in float16, W then does not overflow, and if g = 1,
even p_ij = 2⁻³⁸ does not underflow. The order of all sums is fixed, so the same input gives the same bits.
"""
import torch

from . import gradient_large_d, gradient_small_d
from .heuristics import is_small_d
from .launch import check_device
from .products import GradientScaling, gradient_of_temperature
from .shift import Sides, as_side, make_side


def similarity_lse_backward(call, grad, stats, common_m, needs):
    """Return (dq, dk, dτ) for the upstream gradient grad (N,); stats and common_m are from similarity_lse."""
    largest = largest_finite(grad)              # divide by it: the kernels expect |dloss/dlse| ≤ 1
    rows = as_side(make_side(stats, (grad / largest).contiguous()))
    sides = Sides(rows, rows if call.k is None else as_side(None), common_m)
    return gradients(call, sides, GradientScaling(largest, 1.0, False, call.q.dtype), needs)


def largest_finite(grad):
    """Return the largest finite |grad|, but never 0: NaN and ∞ must not change the scale of other rows."""
    finite = grad.nan_to_num(0, 0, 0)
    return torch.linalg.vector_norm(finite, torch.inf).clamp(min=torch.finfo(torch.float32).tiny)


def softmax_loss_backward(call, grad, sides, common_m, needs, weighted):
    """Return (dq, dk, dτ) for the upstream gradient grad (0-dim); sides is from softmax_loss_forward.

    weighted  True: the rows have weights, so the loss is no mean over rows
    """
    rows = columns = as_side(sides[0])
    if call.k is not None:
        columns = as_side(sides[1] if len(sides) == 2 else None)
    factor = (1 if weighted else 1 / len(call.q)) / len(sides)
    scaling = GradientScaling(grad, factor, True, call.q.dtype)
    return gradients(call, Sides(rows, columns, common_m), scaling, needs)


def gradients(call, sides, scaling, needs):
    """Return (dq (N, D), dk (M, D), dτ). Unneeded ones are empty or None; dq is also computed for dτ.

    sides  with |dloss_dlse| ≤ 1. With self-similarity, rows and columns are the same side, and dq contains
           the whole gradient
    needs  whether the gradients of q, k and the temperature are needed
    """
    check_device(call.q)
    path = gradient_small_d if is_small_d(call) else gradient_large_d
    dq, dk, dot = path.gradients(call, sides, scaling, needs)
    return dq, dk, gradient_of_temperature(call, dot, needs)
