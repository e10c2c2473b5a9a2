"""Gradient in Triton: softmax weights of a tile, recomputed, times rows; narrow rows and wide rows differ.

With g_i the gradient that reaches lse_i and p_ij = exp(s_ij − lse_i) the softmax over the kept columns,

    W_ij = g_i p_ij        dq_i = (1/τ) Σ_j W_ij k_j        dk_j = (1/τ) Σ_i W_ij q_i        dτ = −⟨q, dq⟩ / τ

Where the loss has a softmax over the columns too, W_ij = g_i p_ij + g'_j p'_ij, from the same product. Where
q and k are one set, dz = (1/τ) W z with W_ij = g_i p_ij + g_j p_ji. The positive was left out by index; its
coefficient −g_i (−g'_j) comes in at the end, in float32, where nothing cancels.

    narrow rows      gradient_rows: a program owns rows of q, walks k, and keeps dq in registers
    wide rows        gradient_blocks: blocks of W, and cuBLAS for the products with them

Both (paths.py tells them apart) fix the order of every sum, so the same input gives the same bits. In a half
type W must neither overflow nor vanish: |g| ≤ 1 by the choice of the unit that is taken out of it, and W is
held times WEIGHT_SCALE, 2¹⁴, which uses float16's range to the full (p_ij of 2⁻³⁸ still counts) and costs
bfloat16 and float32 nothing; both factors come back at the end, in float32.
"""
import torch

from ..paths import is_narrow
from . import gradient_blocks, gradient_rows
from .launch import Ending, check_device
from .reference import common_top, side_of


def gradients(q, k, temperature, rule, rows, columns, grad, unit, needs_q, needs_k, needs_temperature, dtype,
              positives=False):
    """(dq (N, D) or empty, dk (M, D) or empty) in dtype, and dτ, a float32 scalar (empty).

    rows, columns    (sums, slope), (2, N) and (N,), (2, M) and (M,) float32, |slope| ≤ 1: the loss's
                     softmaxes; None: has not
    grad, unit       a scalar tensor and a number: what slope is to be multiplied by to reach dloss/dlse
    positives        whether row i's positive (by rule) has a logit s_ip, of gradient −slope_i (−slope'_p)

    k None: one set of rows under a symmetric rule, columns is rows; all of the gradient is dq, dk is empty.
    """
    check_device(q)
    one_set = k is None
    k, needs_k = (q, False) if one_set else (k, needs_k)
    path = gradient_rows if is_narrow(q, k, rule) else gradient_blocks
    reference = None
    if rows is not None and columns is not None:
        reference = common_top(rows[0], None if one_set else columns[0], len(q), len(k))
    of_rows = side_of(rows)
    of_columns = of_rows if columns is rows else side_of(columns)
    needs = needs_q or needs_temperature, needs_k, needs_temperature
    dq, dk, dot = path.gradients(q, k, temperature, rule, of_rows, of_columns, reference,
                                 Ending(grad, unit, positives, dtype), needs, one_set)
    if needs_temperature:                # s = q·k/τ: with one set every product is in ⟨z, dz⟩ twice
        return dq, dk, -dot.sum() / temperature / (2 if one_set else 1)
    return dq, dk, q.new_empty(0, dtype=torch.float32)
