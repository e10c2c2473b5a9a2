"""Gradient in Triton: blocks of softmax weights, and plain matrix products with them.

With g_i the gradient that reaches lse_i and p_ij = exp(s_ij − lse_i) the softmax over the kept columns,

    W_ij = g_i p_ij        dq_i = (1/τ) Σ_j W_ij k_j        dk_j = (1/τ) Σ_i W_ij q_i        dτ = −⟨q, dq⟩ / τ

W is (N, M), so it exists one block of at most BUFFER_MB at a time. The kernel computes a block from q, k and lse, a
matrix product with an exponential at its end; cuBLAS does the other two products, with float32 sums. 6 N·M·D operations, as many as eager's backward plus the recomputed product:

               columns J                          for each block of rows I, each block of columns J:
            ┌──────────────┐                          W      = kernel(q_I, k_J, lse_I, g_I)     in q's dtype
     rows I │ W (I × J)    │                          dq_I  += W  @ k_J
            └──────────────┘                          dk_J  += Wᵀ @ q_I

The order is fixed, so the same input gives the same bits. In a half type W must neither overflow nor vanish: g is
divided by its largest entry and the weights multiplied by 2¹⁴, which uses float16's range to the full (p_ij of 2⁻³⁸
still counts) and costs bfloat16 and float32 nothing; both factors come back at the end, in float32.
"""
import torch
import triton
import triton.language as tl

from .lse_forward import arguments, check_device, kept, product_tile, tile

BUFFER_MB = 128   # of weights: 8192 × 8192 in a half type
SHIFT = 14        # weights are stored times 2¹⁴


@triton.jit
def weights_kernel(W, LSE, GRAD, Q, K, TEMPERATURE, RULE, N, M, D, first_row, first_column, last_row, last_column, w_row,
                   q_row, k_row, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr, SHIFT: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """W[i − first_row, j − first_column] = 2^SHIFT GRAD_i exp(s_ij − LSE_i) for the rows and columns of the block."""
    rows = first_row + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = first_column + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    scale = 1.4426950408889634 / tl.load(TEMPERATURE)             # log2(e)/τ
    s = product_tile(Q, K, rows, columns, N, M, D, q_row, k_row, PRECISION, BLOCK_D) * scale
    keep = kept(rows, columns, N, M, RULE, EXCLUDE, PRECISION)
    lse = tl.load(LSE + rows, mask=rows < N, other=0.0) * 1.4426950408889634 - SHIFT
    grad = tl.load(GRAD + rows, mask=rows < N, other=0.0)
    w = tl.where(keep, grad[:, None] * tl.exp2(s - lse[:, None]), 0.0)
    inside = (rows < last_row)[:, None] & (columns < last_column)[None, :]
    place = (rows - first_row).to(tl.int64)[:, None] * w_row + (columns - first_column)[None, :]
    tl.store(W + place, w.to(W.dtype.element_ty), mask=inside)


def similarity_lse_backward(grad, lse, q, k, temperature, rule, needs_q, needs_k):
    """(dq (N, D) or empty, dk (M, D) or empty) in float32, for the gradient (N,) of each row's lse."""
    check_device(q)
    blocks = tile(q, rule)
    largest = grad.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    grad = (grad / largest).contiguous()
    dq, dk = (torch.zeros(len(x) if needed else 0, x.shape[1], dtype=torch.float32, device=q.device)
              for x, needed in ((q, needs_q), (k, needs_k)))
    height, width = block_shape(q, k)
    buffer = torch.empty(height * width, dtype=q.dtype, device=q.device)
    pointers, sizes, rest = arguments(q, k, temperature, rule)
    for i in range(0, len(q), height):
        rows = slice(i, min(i + height, len(q)))
        for j in range(0, len(k), width):
            columns = slice(j, min(j + width, len(k)))
            shape = (rows.stop - i, columns.stop - j)
            w = buffer[:shape[0] * shape[1]].view(shape)
            grid = triton.cdiv(shape[0], blocks["BLOCK_N"]), triton.cdiv(shape[1], blocks["BLOCK_M"])
            weights_kernel[grid](w, lse, grad, *pointers, *sizes, first_row=i, first_column=j, last_row=rows.stop,
                                 last_column=columns.stop, w_row=shape[1], SHIFT=SHIFT, **rest, **blocks)
            if needs_q:
                dq[rows] += product(w, k[columns])
            if needs_k:
                dk[columns] += product(w.T, q[rows])
    unit = largest / temperature / 2 ** SHIFT
    return dq.mul_(unit), dk.mul_(unit)


def block_shape(q, k):
    """(rows, columns) of the largest block of weights that BUFFER_MB holds, near square so that both products are large."""
    entries = BUFFER_MB * 2 ** 20 // q.element_size()
    side = 1 << (entries.bit_length() - 1) // 2
    height = min(len(q), max(side, entries // len(k)))
    return height, min(len(k), entries // height, 2 ** 22)      # a grid has at most 65,535 programs across


def product(a, b):
    """a @ b with float32 sums and a float32 result, whatever the dtype of a and b."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()                              # the interpreter's path: the CPU has no such product
