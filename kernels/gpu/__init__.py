"""The Triton kernels and the code that launches them, one stage of the mathematics per file.

    tiles.py                    device functions that all kernels share
    launch.py                   host side: tile sizes, aligned copies, kernel arguments
    shift.py                    one shift for all logits, instead of a maximum per row and per column
    lse_forward.py              log-sum-exp of each row, or of each row and each column; the softmax loss
    gradient.py                 gradient; it calls gradient_small_d.py or gradient_large_d.py
    fused_forward_backward.py   loss with a row softmax only, and its gradient, in one pass
    queue_loss.py               queue loss and its gradient in one pass
    sigmoid.py                  sigmoid loss and its gradient in one pass
    topk.py                     the n largest logits of each row

Letters and words that all files use:

    q, k             (N, D) queries and (M, D) keys: row i of q gives row i of the logits, row j of k column j
    x, y             q and k, or k and q: one kernel computes the gradient of either side
    qk               dot product q_i·k_j, as the tensor cores return it (xy where the operands are x and y)
    s                logit in log2 units: s_ij = q_i·k_j log2(e)/τ, so that exp2(s_ij) = exp(q_i·k_j / τ);
                     the hardware has exp2, not exp
    m_i, l_i         running maximum and running sum of row i: m_i = max_j s_ij, l_i = Σ_j exp2(s_ij − m_i);
                     in some kernels m_i is another number that keeps exp2 in range
    stats            m and l stacked, (2, N)
    lse              log-sum-exp of a row in nats, (m + log2 l) / log2(e)
    p                softmax, p_ij = exp2(s_ij − m_i) / l_i
    shift            one number r that is subtracted from all logits in place of the maxima (shift.py)
    positive         the column p that is paired with row i; the mask excludes it from the sums. In formulas
                     positive_i is its logit, in code (positive, POSITIVE) its dot product q_i·k_p
    dloss_dlse       derivative of the loss in lse_i (g_i in formulas), without factors that all rows share
    side             one softmax of the loss: the row softmax (one per row i, dim=1) or the column softmax
                     (one per column j, dim=0)
    self-similarity  the rows of q are compared with each other (k is None); the logits are symmetric
    WEIGHT_SCALE     softmax weights are stored multiplied by 2¹⁴ (gradient.py says why)
    program          one instance of a kernel, Triton's unit of parallelism
    tile             BLOCK_N × BLOCK_M logits that a program has in registers
    block, strip     many tiles that one launch covers: a rectangle, or some rows with all of the columns
    config           the constexpr parameters and launch options of a kernel: BLOCK_N, num_warps, ...

In kernels, the names of pointers, tuples of arguments and constexprs are in capitals (STATS, MASK, EXCLUDE).
The package imports this folder only for impl="triton". From `kernels` this folder imports only
`heuristics`, which chooses the kernels, `masks`, which defines the excluded columns, and `replay`, which
records launches; none of them needs Triton.
"""
