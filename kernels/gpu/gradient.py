"""Gradient of softmax losses: recompute the logits, turn them into softmax weights, multiply these with rows.

With g_i = dloss_dlse_i and p_ij = exp(q_i·k_j/τ − lse_i), the softmax over the kept columns,

    W_ij = g_i p_ij        dq_i = (1/τ) Σ_j W_ij k_j        dk_j = (1/τ) Σ_i W_ij q_i        dτ = −⟨q, dq⟩ / τ

Eager                                        bytes moved, N·M float32 logits
    w = g[:, None] * (s - lse[:, None]).exp()    read and write 16 N·M or more
    dq, dk = w @ k / τ, w.T @ q / τ              read 8 N·M

gradient_small_d.py: a program loops over k for its rows of q and keeps dq in registers; W is never written.
gradient_large_d.py: one kernel writes blocks of W, 2 N·M bytes in half types, and cuBLAS reads them twice.

If the loss also has a column softmax (dim=0), p' with gradient g', then W_ij = g_i p_ij + g'_j p'_ij, from
the same dot product. With self-similarity (rows z) dz = (1/τ) W z with W_ij = g_i p_ij + g_j p_ji. The mask
excludes the positive from these sums; its term, with the coefficient −g_i (and −g'_j), is added at the end,
in float32.

W in a half type must neither overflow nor underflow. Therefore |g| ≤ 1: constants such as 1/N are multiplied
at the end. And W is stored multiplied by WEIGHT_SCALE, 2¹⁴, which is undone at the end. This uses the whole
range of float16 (p_ij of 2⁻³⁸ still counts). The order of every sum is fixed, so the same input gives the
same bits.
"""
import torch

from ..heuristics import is_small_d
from . import gradient_large_d, gradient_small_d
from .launch import GradientScaling, check_device
from .shift import as_side


def gradients(q, k, temperature, mask, rows, columns, common_m, grad, loss_factor, needs_q, needs_k,
              needs_temperature, dtype, positives=False):
    """Return dq (N, D) and dk (M, D) in dtype, and dτ, a float32 scalar; without elements if not needed.

    k                  None: self-similarity with a symmetric mask. Then rows and columns are the same; dq is
                       the whole gradient
    rows, columns      sides of the row softmax (dim=1) and of the column softmax (dim=0), from forward or
                       shift.make_side, with |dloss_dlse| ≤ 1; None: the loss has no such softmax
    common_m           of the ForwardResult
    grad, loss_factor  upstream gradient (0-dim tensor) and a constant, such as 1/N, which multiply the result
    positives          True: add the term of each row's positive p, the column that the mask excludes:
                       dloss/ds_ip = −dloss_dlse_i, with a column softmax −dloss_dlse_i − dloss_dlse'_p
    """
    check_device(q)
    self_similarity = k is None
    k, needs_k = (q, False) if self_similarity else (k, needs_k)
    path = gradient_small_d if is_small_d(q.element_size(), q.shape[1], mask) else gradient_large_d
    needs = needs_q or needs_temperature, needs_k, needs_temperature
    dq, dk, dot = path.gradients(q, k, temperature, mask, as_side(rows), as_side(columns), common_m,
                                 GradientScaling(grad, loss_factor, positives, dtype), needs, self_similarity)
    if needs_temperature:      # s = q·k/τ; with self-similarity ⟨z, dz⟩ contains every dot product twice
        return dq, dk, dot.sum() * (-0.5 if self_similarity else -1.0) / temperature
    return dq, dk, q.new_empty(0, dtype=torch.float32)
