"""The Triton kernels and the Python code that launches them, with one file for each step or loss.

    tiles.py                    device functions that several kernels call
    heuristics.py               choice of kernels and block sizes, by shape and dtype
    launch.py                   code on the host (CPU) for all kernels: tile sizes, aligned copies, launches
    products.py                 products of weights with k and q, and gradients from their sums
    shift.py                    one number that replaces the maxima of all rows and columns in a softmax
    lse_forward.py              forward pass of softmax losses: log-sum-exp of rows and columns, and the loss
    gradient.py                 backward pass of softmax losses; gradient_small_d.py is for a small D
    fused_forward_backward.py   loss and gradient in one pass, for losses with a row softmax only
    queue.py                    the queue loss and its gradient in one pass
    sigmoid.py                  the sigmoid loss and its gradient in one pass
    topk.py                     the n largest dot products of each row

Letters and words that mean the same in all files:

    q, k             queries (N, D) and keys (M, D): q_i and k_j give the logit in row i and column j
    x, y             operands in a kernel that computes the gradient of x: x = q and y = k, or x = k and y = q
    qk               dot product q_i·k_j; the name is xy if the operands are called x and y
    s                logit in log2 units, s_ij = q_i·k_j log2(e)/τ, so that exp2(s_ij) = exp(q_i·k_j / τ):
                     GPUs have an instruction for exp2, but not for exp
    m_i, l_i         running maximum and running sum of row i: m_i = max_j s_ij, l_i = Σ_j exp2(s_ij − m_i).
                     Some kernels subtract another number in place of the maximum, and store it as m_i
    m                in host code: number of keys M (and n is N; in topk.py, n neighbours). In kernels: m_i
    stats            m and l of N rows, stacked: (2, N)
    lse, p           log-sum-exp of a row in nats, (m + log2 l) / log2(e); softmax, exp2(s_ij − m_i) / l_i
    shift            one number r that is subtracted from all logits in place of the maxima (shift.py)
    positive         the key k⁺_i that belongs to row i; the mask excludes this column from the sums. In
                     formulas, positive_i is the logit of this key; in code, positive is the dot product
                     q_i·k⁺_i (in sigmoid.py, it is the logit)
    dloss_dlse       derivative of the loss with respect to lse_i (g_i in formulas), without the constants
                     that all rows share, such as 1/N: these multiply the gradient at the end
    side             one softmax of the loss: the row softmax (one per row i, dim=1) or the column softmax
                     (one per column j, dim=0)
    self-similarity  k is None: the rows of q are compared with each other, so the logits are symmetric
    WEIGHT_SCALE     2¹⁴, a factor on stored softmax weights (gradient.py says why)
    tile             BLOCK_N × BLOCK_M logits that a program holds in registers
    block            a rectangle of many tiles that one launch computes
    strip            a block that has all of the columns, but only some of the rows
    config           dict of the constexpr parameters and launch options of a kernel: BLOCK_N, num_warps, ...

In kernels, the names of pointers, tuples of arguments and constexprs are in capitals (STATS, MASK, EXCLUDE).
The package imports this folder only for impl="triton". fused.py calls the functions below with a Call;
blockwise.py has functions with the same names, except softmax_loss_forward and softmax_loss_backward. gpu/
imports masks.py and blockwise.py from `kernels`; these do not need Triton. masks.py transposes masks.
blockwise.py computes dτ of the queue loss, and similarity_topk if n is too large for the topk kernel.
"""
from .fused_forward_backward import softmax_loss
from .gradient import similarity_lse_backward, softmax_loss_backward
from .heuristics import fuses_backward
from .launch import check_device
from .lse_forward import similarity_lse, softmax_loss_forward
from .queue import queue_loss
from .sigmoid import sigmoid_loss
from .topk import similarity_topk
