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

from ..heuristics import is_small_d
from . import gradient_large_d, gradient_small_d
from .launch import GradientScaling, check_device
from .shift import as_side


def gradients(q, k, temperature, mask, rows, columns, common_m, grad, loss_factor, needs_q, needs_k,
              needs_temperature, dtype, positives=False):
    """Return (dq (N, D), dk (M, D), dτ). Unneeded ones are empty; dq is also computed for dτ.

    k                  None: self-similarity with a symmetric mask. Then rows and columns are the same tensor,
                       and dq contains the whole gradient
    rows, columns      vectors (3, padded N) of the row softmax and (3, padded M) of the column softmax, from
                       forward() or shift.make_side; |dloss_dlse| ≤ 1. None: the loss lacks this softmax
    common_m           ForwardResult.common_m of the forward pass
    grad, loss_factor  upstream gradient (0-dim tensor) and a constant such as 1/N; both multiply all results
    needs_*            whether the gradients of q, k and the temperature are needed
    dtype              dtype of dq and dk; dτ is a float32 scalar
    positives          True: add the term of each row's positive (see the top of this file)
    """
    check_device(q)
    self_similarity = k is None
    k, needs_k = (q, False) if self_similarity else (k, needs_k)
    path = gradient_small_d if is_small_d(q.element_size(), q.shape[1], mask) else gradient_large_d
    needs = needs_q or needs_temperature, needs_k, needs_temperature
    dq, dk, dot = path.gradients(q, k, temperature, mask, as_side(rows), as_side(columns), common_m,
                                 GradientScaling(grad, loss_factor, positives, dtype), needs, self_similarity)
    if needs_temperature:      # with self-similarity, ⟨z, dz⟩ contains every dot product twice: halve it
        return dq, dk, dot.sum() * (-0.5 if self_similarity else -1.0) / temperature
    return dq, dk, q.new_empty(0, dtype=torch.float32)
