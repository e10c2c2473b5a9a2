"""Keys without gradient in Triton (a queue, a frozen tower, a memory bank): lse and dq in one pass, no backward kernel.

    lse_i = log Σ_j exp(q_i·k_j / τ)        dq_i = (g_i / τ) o_i,    o_i = Σ_j p_ij k_j,    p_ij = exp(q_i·k_j / τ − lse_i)

o is attention with the keys as values, so it comes out of the forward loop: 4 N·M·D operations where a recomputing backward
needs 6. A tile of keys is read once for both products:

           ┌─ (BLOCK_D, BLOCK_M) ─┐
    q_i ·  │        k_Jᵀ          │  = s       p = exp2(s − top)       o = o · exp2(old top − top) + p · k_J
           └──────────────────────┘

Few rows leave most of the chip idle, so their columns are split over several programs, each with its own top, total and o;
the splits are merged by their weights exp(lse_split − lse) in PyTorch. o stays in registers, hence half types and D ≤ 256.
"""
import torch
import triton
import triton.language as tl

from .tiles import LN2, PROGRAMS, arguments, check_device, kept, load, octaves, tile, touched


@triton.jit
def fixed_keys_kernel(LSE, O, split, Q, K, TEMPERATURE, RULE, N, M, D, q_row, k_row, EXCLUDE: tl.constexpr,
                      PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """LSE[y, rows of program x] in units of log 2, O[y, rows, :], over the columns [y·split, (y + 1)·split)."""
    row = tl.program_id(0) * BLOCK_N
    rows, d = row + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q = load(Q, row, 0, N, D, q_row, BLOCK_N, BLOCK_D)
    scale = octaves(TEMPERATURE)
    first = tl.program_id(1) * split
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    o = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(first, tl.minimum(first + split, M), BLOCK_M):
        columns = start + tl.arange(0, BLOCK_M)
        k = load(K, start, 0, M, D, k_row, BLOCK_M, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION) * scale
        if touched(row, start, N, M, RULE, EXCLUDE, BLOCK_N, BLOCK_M):
            s = tl.where(kept(rows, columns, N, M, RULE, EXCLUDE, PRECISION), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        reference = tl.where(new == float("-inf"), 0.0, new)      # −inf − (−inf) would be NaN: nothing kept so far
        p = tl.exp2(s - reference[:, None])
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(k.dtype), k, o * shrink[:, None], input_precision=PRECISION)
        top = new
    slot = tl.program_id(1).to(tl.int64) * N
    tl.store(LSE + slot + rows, top + tl.log2(total), mask=rows < N)
    o = o / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(O + (slot + rows)[:, None] * D + d[None, :], o, mask=(rows < N)[:, None] & (d < D)[None, :])


def block_sizes(q, rule):
    """As tile(), with all of a row in one block and few enough columns that o fits beside the logits; maxnreg keeps the
    assembler from spilling to run more programs."""
    blocks, width = tile(q, rule), max(16, triton.next_power_of_2(q.shape[1]))
    columns = 64 if width <= 128 else 32 if rule.row_features is None else 16
    return {**blocks, "BLOCK_N": 64, "BLOCK_M": min(columns, blocks["BLOCK_M"]), "BLOCK_D": width,
            "num_warps": 4 if width <= 128 else 8, "num_stages": 2, "maxnreg": 255}


def similarity_lse(q, k, temperature, rule):
    """(lse (N,), o (N, D)), both float32."""
    check_device(q)
    blocks = block_sizes(q, rule)
    pointers, sizes, rest = arguments(q, k, temperature, rule, blocks)
    width = sizes[2]                                                                     # of rows as arguments() padded them
    row_blocks, column_blocks = triton.cdiv(len(q), blocks["BLOCK_N"]), triton.cdiv(len(k), blocks["BLOCK_M"])
    split = triton.cdiv(column_blocks, min(column_blocks, triton.cdiv(PROGRAMS, row_blocks))) * blocks["BLOCK_M"]
    splits = triton.cdiv(len(k), split)
    lse = torch.empty(splits, len(q), dtype=torch.float32, device=q.device)
    o = torch.empty(splits, len(q), width, dtype=torch.float32, device=q.device)
    fixed_keys_kernel[row_blocks, splits](lse, o, split, *pointers, *sizes, **rest)
    lse *= LN2
    if splits == 1:
        return lse[0], o[0, :, :q.shape[1]].contiguous()
    whole = lse.logsumexp(0)
    weights = (lse - whole.clamp(min=torch.finfo(torch.float32).min)).exp()              # 0 for a row without columns
    return whole, torch.einsum("sn,snd->nd", weights, o)[:, :q.shape[1]].contiguous()
