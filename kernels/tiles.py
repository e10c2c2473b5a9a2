"""What all kernels share: a tile of logits, what the rule leaves of it, and how the host cuts and passes its arguments.

              columns j →
           ┌──────┬──────┬──────┐     A tile is Σ over D in blocks of BLOCK_D of (BLOCK_N, BLOCK_D)·(BLOCK_D, BLOCK_M)
    rows i │ tile │ tile │ tile │     on the tensor cores, so no D is too large; it never leaves the registers.
           └──────┴──────┴──────┘

Logits are kept in units of log 2 (s·log2(e)/τ), because exp2 is what the hardware has. Where every |s| ≤ BOUND, no
exp2(s) and no sum of 2²⁰ of them overflows or vanishes in float32: no maximum has to be subtracted, and one exponential
serves rows and columns alike. Unit rows are bounded from τ = 0.0145 up.

On chips with a tensor memory accelerator (sm_90 on) q and k travel as descriptors, elsewhere as pointers with a stride.
"""
import math
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .paths import FEW

LOG2E = tl.constexpr(math.log2(math.e))
BOUND = tl.constexpr(100.0)
INTERPRETED, PLAYED = os.environ.get("TRITON_INTERPRET") == "1", 9
PROGRAMS = 264        # two for each of the 132 multiprocessors of an H100 or H200


class KernelRule(NamedTuple):
    """Rule and temperature as the kernels take them, the rule's name aside (EXCLUDE): None is not there and leaves no code."""
    row_ids: Any
    column_ids: Any
    row_groups: Any
    column_groups: Any
    row_features: Any
    column_features: Any
    offset: Any
    phi: Any
    width: Any            # E
    row_stride: Any       # of the features
    column_stride: Any
    temperature: Any      # where it is learned: read on the device
    octaves: Any          # log2(e)/τ where it is a number


@triton.jit
def load(X, row, d, count, width, stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D) of X (count, width) from (row, d) on, zeros outside."""
    if stride is None:
        x = X.load([row, d])
    else:
        rows, features = row + tl.arange(0, BLOCK), d + tl.arange(0, BLOCK_D)
        x = tl.load(X + rows.to(tl.int64)[:, None] * stride + features[None, :],           # 64 bits: N·D may pass 2³¹
                    mask=(rows < count)[:, None] & (features < width)[None, :], other=0.0)
    return x


@triton.jit
def product(Q, K, row, column, N, M, D, q_row, k_row, PRECISION: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_N, BLOCK_M) float32: q_i·k_j of the tile at (row, column)."""
    s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for d in range(0, D, BLOCK_D):
        q = load(Q, row, d, N, D, q_row, BLOCK_N, BLOCK_D)
        k = load(K, column, d, M, D, k_row, BLOCK_M, BLOCK_D)
        s = tl.dot(q, k.T, s, input_precision=PRECISION)
    return s


@triton.jit
def octaves(RULE):
    """log2(e)/τ: from q·k to a logit in units of log 2."""
    if RULE.temperature is None:
        scale = RULE.octaves
    else:
        scale = LOG2E / tl.load(RULE.temperature)
    return scale


@triton.jit
def overlap(row, column, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether the tile that starts at (row, column) has an entry on the diagonal."""
    return (row < column + BLOCK_M) & (column < row + BLOCK_N)


@triton.jit
def touched(row, column, N, M, RULE, EXCLUDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether the rule or the edge may leave out any entry of a tile: of index rules all but a diagonal of tiles is whole."""
    some = (row + BLOCK_N > N) | (column + BLOCK_M > M)
    if EXCLUDE == "diagonal":
        some = some | overlap(row + RULE.offset, column, BLOCK_N, BLOCK_M)
    elif EXCLUDE == "pair":
        some = some | overlap(row, column, BLOCK_N, BLOCK_M) | overlap(row + N // 2, column, BLOCK_N, BLOCK_M) | \
            overlap(row, column + N // 2, BLOCK_N, BLOCK_M)
    if EXCLUDE == "ids" or EXCLUDE == "target" or RULE.row_groups is not None or RULE.row_features is not None:
        some = True
    return some


@triton.jit
def positive_of(rows, N, RULE, EXCLUDE: tl.constexpr):
    """The column that holds each row's positive, which the rule leaves out; it may lie outside [0, M)."""
    if EXCLUDE == "pair":
        column = tl.where(rows < N // 2, rows + N // 2, rows - N // 2)
    elif EXCLUDE == "target":
        column = tl.load(RULE.row_ids + rows, mask=rows < N, other=-1)
    else:
        column = rows + RULE.offset
    return column


@triton.jit
def kept(rows, columns, N, M, RULE, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr):
    """(rows, columns) bool: the columns that the rule leaves to each row. The twin of rules.left_out."""
    keep = (rows < N)[:, None] & (columns < M)[None, :]
    if EXCLUDE == "diagonal":
        keep = keep & (columns[None, :] != rows[:, None] + RULE.offset)
    elif EXCLUDE == "pair":
        keep = keep & (columns[None, :] != rows[:, None]) & (columns[None, :] != positive_of(rows, N, RULE, EXCLUDE)[:, None])
    elif EXCLUDE == "target" and RULE.row_ids is None:            # the other way round: rows are what columns aim at
        keep = keep & (rows[:, None] != tl.load(RULE.column_ids + columns, mask=columns < M, other=-1)[None, :])
    elif EXCLUDE == "target":
        keep = keep & (columns[None, :] != positive_of(rows, N, RULE, EXCLUDE)[:, None])
    elif EXCLUDE == "ids":
        row_ids = tl.load(RULE.row_ids + rows, mask=rows < N, other=0)
        column_ids = tl.load(RULE.column_ids + columns, mask=columns < M, other=0)
        keep = keep & (row_ids[:, None] != column_ids[None, :])
    if RULE.row_groups is not None:
        row_groups = tl.load(RULE.row_groups + rows, mask=rows < N, other=0)
        column_groups = tl.load(RULE.column_groups + columns, mask=columns < M, other=0)
        keep = keep & (row_groups[:, None] == column_groups[None, :])
    if RULE.row_features is not None:
        f = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
        for e in range(0, RULE.width, 16):
            f_row = load(RULE.row_features, tl.min(rows, 0), e, N, RULE.width, RULE.row_stride, rows.shape[0], 16)
            f_column = load(RULE.column_features, tl.min(columns, 0), e, M, RULE.width, RULE.column_stride, columns.shape[0], 16)
            f = tl.dot(f_row, f_column.T, f, input_precision=PRECISION)
        keep = keep & (f < RULE.phi)
    return keep


@triton.jit
def log_sum(s, axis: tl.constexpr):
    """log2 Σ exp2(s) along an axis, whatever the size of s; −inf where nothing is left."""
    top = tl.max(s, axis)
    reference = tl.where(top == float("-inf"), 0.0, top)          # −inf − (−inf) would be NaN
    return reference + tl.log2(tl.sum(tl.exp2(s - tl.expand_dims(reference, axis)), axis))


@triton.jit
def shifts(LSE, SLOPE, at, count, SHIFT: tl.constexpr):
    """(lse_i − log2 |slope_i| − SHIFT, sign of slope_i) in units of log 2: one vector instead of two, where no slope is negative."""
    shift, sign = 0.0, 1.0
    if LSE is not None:
        slope = tl.load(SLOPE + at, mask=at < count, other=0.0)
        shift = tl.load(LSE + at, mask=at < count, other=0.0) * LOG2E - tl.log2(tl.abs(slope)) - SHIFT
        sign = tl.where(slope < 0, -1.0, 1.0)
    return shift, sign


@triton.jit
def weights(s, row_shift, row_sign, column_shift, column_sign, bounded, OF_ROWS: tl.constexpr, OF_COLUMNS: tl.constexpr,
            SIGNED: tl.constexpr):
    """2^SHIFT (slope_i exp2(s_ij − lse_i) + slope_j exp2(s_ij − lse_j)): dloss/ds of a tile; either part may be missing."""
    if OF_ROWS and OF_COLUMNS and not SIGNED:
        if bounded:
            w = tl.exp2(s) * (tl.exp2(-row_shift)[:, None] + tl.exp2(-column_shift)[None, :])
        else:
            w = tl.exp2(s - row_shift[:, None]) + tl.exp2(s - column_shift[None, :])
    else:
        w = tl.zeros(s.shape, tl.float32)
        if OF_ROWS:
            of_rows = tl.exp2(s - row_shift[:, None])
            w = of_rows * row_sign[:, None] if SIGNED else of_rows
        if OF_COLUMNS:
            of_columns = tl.exp2(s - column_shift[None, :])
            w += of_columns * column_sign[None, :] if SIGNED else of_columns
    return w


@triton.jit
def finish(dx, X, PARTNERS, X_SLOPE, Y_SLOPE, GRAD, unit, RULE, rows, d, N, M, width, x_row, partner_row,
           EXCLUDE: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr):
    """From Σ_j w_ij y_j to the gradient: less the positive's share, times what reached the loss; and if DOT each row's
    share of ⟨x, dx⟩."""
    dx = dx * (1.0 / (1 << SHIFT))
    inside = (rows < N)[:, None] & (d < width)[None, :]
    if PARTNERS is not None:
        at = positive_of(rows, N, RULE, EXCLUDE)
        there = (rows < N) & (at >= 0) & (at < M)
        share = tl.zeros((rows.shape[0],), tl.float32)
        if X_SLOPE is not None:
            share += tl.load(X_SLOPE + rows, mask=there, other=0.0)
        if Y_SLOPE is not None:
            share += tl.load(Y_SLOPE + at, mask=there, other=0.0)
        partner = tl.load(PARTNERS + at.to(tl.int64)[:, None] * partner_row + d[None, :],
                          mask=there[:, None] & (d < width)[None, :], other=0.0)
        dx = dx - share[:, None] * partner.to(tl.float32)
    dx = dx * (tl.load(GRAD) * unit * octaves(RULE) / LOG2E)
    dots = 0.0
    if DOT:
        x = tl.load(X + rows.to(tl.int64)[:, None] * x_row + d[None, :], mask=inside, other=0.0)
        dots = tl.sum(dx * x.to(tl.float32), 1)
    return dx, inside, dots


@triton.jit
def softplus(x):
    """(log(1 + exp(x)), σ(x)), to the last digits for every x."""
    u = tl.exp(-tl.abs(x))
    # log(1 + u) loses u below 2⁻²⁴; the quotient gives it back (Kahan)
    rounded = 1 + u
    log1p = tl.where(rounded == 1, u, tl.log(rounded) * u / tl.where(rounded == 1, 1.0, rounded - 1))
    return tl.maximum(x, 0.0) + log1p, tl.where(x > 0, 1.0, u) / rounded


@triton.jit
def is_bounded(LIMIT):
    """Whether every |s| ≤ BOUND, as far as LIMIT, the largest possible |s|, tells; None tells nothing."""
    if LIMIT is None:
        bounded = False
    else:
        bounded = tl.load(LIMIT) <= BOUND
    return bounded


@triton.jit
def in_range(RANGES, tile, start, stop, BLOCK_M: tl.constexpr):
    """Of the columns [start, stop), start a multiple of BLOCK_M, those whole tiles that the rows of a tile may keep any of."""
    if RANGES is not None:
        start = tl.maximum(start, tl.load(RANGES + 2 * tile) // BLOCK_M * BLOCK_M)
        stop = tl.minimum(stop, tl.load(RANGES + 2 * tile + 1))
    return start, stop


def ranges(rule, blocks):
    """(row tiles, 2) int32: first and one past the last column of the groups of each tile's rows; None: all columns.

    No value is looked at on the host: column ids that are not sorted give every tile all columns.
    """
    rows, columns, size = rule.row_groups, rule.column_groups, blocks["BLOCK_N"]
    if rows is None or max(len(rows), len(columns)) <= FEW:
        return None
    rows = torch.cat([rows, rows[-1:].expand(-len(rows) % size)]).view(-1, size)
    first, last = torch.searchsorted(columns, rows.amin(1)), torch.searchsorted(columns, rows.amax(1), right=True)
    is_sorted = (columns[1:] >= columns[:-1]).all()
    return torch.stack([first * is_sorted, torch.where(is_sorted, last, len(columns))], 1).int()


def limit_of(q, k, temperature):
    """Largest possible |s| (Cauchy and Schwarz), a 0-dim float32 tensor; None where reading the rows again costs too much."""
    if max(len(q), len(k)) <= FEW:
        return None
    longest = [torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).amax() for x in ((q,) if k is q else (q, k))]
    return longest[0] * longest[-1] * LOG2E.value / temperature


def capability(x):
    """8 for an A100, 9 for H100 and H200, 10 for B200; what a CPU tensor stands in for is PLAYED."""
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else PLAYED


def tile(x, rule, two_sided=False):
    """Block sizes, warps, stages and input precision for rows of x. Registers and shared memory: tests/test_compile.py.

    two_sided    the tile is reduced along, or weighted with vectors of, both of its sides
    """
    # 64-bit ids of a tile's columns, or a second product, take the registers of half a tile, all three of three quarters
    parts = sum(part is not None for part in (rule.row_ids, rule.row_groups, rule.row_features))
    columns = (128, 64, 64, 32)[parts]
    full = torch.get_float32_matmul_precision() == "highest"
    if full and torch.float32 in (x.dtype, getattr(rule.row_features, "dtype", None)):
        # plain multiply-adds: no tensor core takes full float32
        columns = 64 if rule.row_features is None else 32
        return dict(BLOCK_N=64, BLOCK_M=columns, BLOCK_D=16, num_warps=8, num_stages=2, maxnreg=255, PRECISION="ieee")
    blocks = dict(BLOCK_N=128, BLOCK_M=columns, BLOCK_D=32 if x.dtype == torch.float32 else 64, num_warps=8, num_stages=3,
                  maxnreg=128 if capability(x) == 9 else 255,  # 128: two programs share a multiprocessor
                  PRECISION="tf32")                            # of no effect on half types
    if two_sided and capability(x) >= 10:
        blocks |= dict(BLOCK_N=64, BLOCK_M=64, num_warps=4)    # 128 × 128 spills there
    return blocks


def check_device(q):
    """A CPU tensor needs the interpreter, which Triton turns on when the kernels are first imported."""
    if q.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"impl: 'triton' on {q.device} wants TRITON_INTERPRET=1 in the environment before the start; "
                         "use 'blockwise'")


def in_whole_words(x):
    """x itself where its rows are contiguous, aligned and a multiple of 16 long, else a copy with zeros behind each row.

    Kernels read 16 bytes at a time, and descriptors nothing else; zeros change no product.
    """
    if x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    copy = x.new_zeros(len(x), triton.cdiv(x.shape[1], 16) * 16)
    copy[:, :x.shape[1]] = x
    return copy


def is_number(temperature, x):
    """Whether the temperature was given as a number: similarity.check_temperature left it on the CPU."""
    return temperature.device != x.device


def arguments(q, k, temperature, rule, blocks):
    """(pointers and rule, sizes and strides, the rest by name): what every kernel takes of its rows q and columns k."""
    words = in_whole_words(q)
    q, k = words, words if k is q else in_whole_words(k)
    f_q, f_k = (f if f is None else in_whole_words(f.float() if f.dtype == torch.float64 else f)    # tiles sum in float32
                for f in (rule.row_features, rule.column_features))
    shape = (None, None, None) if f_q is None else (f_q.shape[1], f_q.stride(0), f_k.stride(0))
    scale = (None, LOG2E.value / temperature.item()) if is_number(temperature, q) else (temperature, None)
    taken = KernelRule(*rule[1:5], f_q, f_k, rule.offset, rule.phi, *shape, *scale)
    sizes, strides = (len(q), *k.shape), (q.stride(0), k.stride(0))
    if capability(q) >= 9:
        strides = None, None
        q, k = (TensorDescriptor.from_tensor(x, [rows, blocks["BLOCK_D"]])
                for x, rows in ((q, blocks["BLOCK_N"]), (k, blocks["BLOCK_M"])))
    return (q, k, taken), (*sizes, *strides), dict(EXCLUDE=rule.exclude, enable_fp_fusion=True, **blocks)
