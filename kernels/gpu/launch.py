"""How the host cuts a problem into tiles and hands it to a kernel.

On chips with a tensor memory accelerator (sm_90 on) q and k travel as descriptors, elsewhere as pointers with
a stride.
"""
import os
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..paths import FEW
from ..rules import swapped
from .tiles import LOG2E, copy_kernel

INTERPRETED, PLAYED = os.environ.get("TRITON_INTERPRET") == "1", 9
MULTIPROCESSORS = 132  # of an H100 or H200
PROGRAMS = 2 * MULTIPROCESSORS


class Shape(NamedTuple):
    """Of the rows of q and k that a product takes."""
    D: int
    q_row: Any            # strides; None where they travel as descriptors
    k_row: Any


class KernelRule(NamedTuple):
    """Rule, without its name (EXCLUDE), and temperature as kernels take them; None is not there: no code."""
    row_ids: Any
    column_ids: Any
    row_groups: Any
    column_groups: Any
    row_features: Any
    column_features: Any
    offset: Any           # 4 · offset + 2
    phi: Any
    width: Any            # E
    row_stride: Any       # of the features
    column_stride: Any
    temperature: Any      # where it is learned: read on the device
    octaves: Any          # log2(e)/τ where it is a number


class Ending(NamedTuple):
    """How a sum of weighted rows becomes a gradient."""
    grad: Any         # 0-dim: what reached the loss,
    unit: float       # times this number
    positives: bool   # whether the positives, which the rule leaves out of the sum, have a share
    dtype: Any        # of the gradient


class Given(NamedTuple):
    """Rows as they were given and an Ending, as kernels take them for the last step of a gradient of x."""
    grad: Any
    x: Any
    partners: Any     # the other rows, where positives are; None: no share of positives
    unit: float
    features: int
    x_row: int        # strides
    partner_row: int

    @classmethod
    def of(cls, x, y, ending):
        partners = y if ending.positives else None
        return cls(ending.grad, x, partners, ending.unit, x.shape[1], x.stride(0), y.stride(0))


def ranges(rule, blocks):
    """(row tiles, 2) int32: first and past the last column of the groups of a tile's rows; None: all columns.

    No value is looked at on the host: column ids that are not sorted give every tile all columns.
    """
    rows, columns, size = rule.row_groups, rule.column_groups, blocks["BLOCK_N"]
    if rows is None or max(len(rows), len(columns)) <= FEW:
        return None
    rows, columns = rows.long(), columns.long()
    rows = torch.cat([rows, rows[-1:].expand(-len(rows) % size)]).view(-1, size)
    first = torch.searchsorted(columns, rows.amin(1))
    last = torch.searchsorted(columns, rows.amax(1), right=True)
    is_sorted = (columns[1:] >= columns[:-1]).all()
    return torch.stack([first * is_sorted, torch.where(is_sorted, last, len(columns))], 1).int()


def capability(x):
    """8 for an A100, 9 for H100 and H200, 10 for B200; what a CPU tensor stands in for is PLAYED."""
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else PLAYED


def tile(x, rule, two_sided=False):
    """Block sizes, warps, stages and input precision for rows of x; registers: tests/gpu/test_compile.py.

    two_sided    the tile is reduced along, or weighted with vectors of, both of its sides
    """
    # 64-bit ids of a tile's columns, or a second product, take the registers of half a tile, all three of
    # three quarters
    parts = sum(part is not None for part in (rule.row_ids, rule.row_groups, rule.row_features))
    columns = (128, 64, 64, 32)[parts]
    full = torch.get_float32_matmul_precision() == "highest"
    if full and torch.float32 in (x.dtype, getattr(rule.row_features, "dtype", None)):
        # plain multiply-adds: no tensor core takes full float32
        columns = 64 if rule.row_features is None else 32
        return dict(BLOCK_N=64, BLOCK_M=columns, BLOCK_D=16, num_warps=8, num_stages=2, maxnreg=255,
                    PRECISION="ieee")
    blocks = dict(BLOCK_N=128, BLOCK_M=columns, BLOCK_D=32 if x.dtype == torch.float32 else 64,
                  num_warps=8, num_stages=3,
                  maxnreg=128 if capability(x) == 9 else 255,  # 128: two programs share a multiprocessor
                  PRECISION="tf32")                            # of no effect on half types
    if two_sided and capability(x) >= 10:
        blocks |= dict(BLOCK_N=64, BLOCK_M=64, num_warps=4)    # 128 × 128 spills there
    return blocks


def check_device(q):
    """A CPU tensor needs the interpreter, which Triton turns on when the kernels are first imported."""
    if q.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"impl: 'triton' on {q.device} wants TRITON_INTERPRET=1 in the environment before "
                         "the start; use 'blockwise'")


def rows_in_place(x):
    """x, or a copy where a row's features are not contiguous: kernels take the stride of rows only."""
    return x if x.stride(1) == 1 else x.contiguous()


def in_whole_words(x):
    """x, where its rows are contiguous, aligned and a multiple of 16 long; else a copy with zeros behind, and
    rounded to TF32 where products are.

    Kernels read 16 bytes at a time, and descriptors nothing else; zeros change no product. Tensor cores cut
    float32 rows off, which costs three digits of every product that rounding does not.
    """
    (count, features), (row, column) = x.shape, x.stride()
    rounds = x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    fits = column == 1 and row >= features and row % 16 == features % 16 == x.data_ptr() % 16 == 0
    if fits and not rounds:
        return x
    copy = x.new_empty(count, triton.cdiv(features, 16) * 16)
    grid = triton.cdiv(count, 32), triton.cdiv(copy.shape[1], 128)
    copy_kernel[grid](copy, x, count, features, copy.shape[1], row, column, ROUND=rounds, BLOCK_N=32,
                      BLOCK_D=128)
    return copy


def multiplicands(q, k):
    """q and k as a matrix product takes them that has to agree with the kernels'."""
    first = in_whole_words(q)[:, :q.shape[1]]
    return first, first if k is q else in_whole_words(k)[:, :k.shape[1]]


def turned(taken):
    """rules.swapped of a KernelRule."""
    taken = swapped(taken)
    return taken._replace(offset=taken.offset + 4)


def is_number(temperature, x):
    """Whether the temperature was given as a number: similarity.as_scalar left it on the CPU."""
    return temperature.device != x.device


def scale_of(temperature, x):
    """A KernelRule of nothing but the temperature."""
    scale = (None, LOG2E.value / temperature.item()) if is_number(temperature, x) else (temperature, None)
    return KernelRule(*[None] * (len(KernelRule._fields) - 2), *scale)


def octaves_of(temperature, x):
    """log2(e)/τ in the kernels' own rounding, for a logit beside theirs."""
    wide = temperature.double() if is_number(temperature, x) else temperature
    return (torch.full_like(wide, LOG2E.value) / wide).to(temperature.dtype)


def arguments(q, k, temperature, rule, blocks):
    """((q, k, KernelRule, N, M, Shape), the rest by name): what all kernels with a product take."""
    words = in_whole_words(q)
    q, k = words, words if k is q else in_whole_words(k)
    f_q, f_k = (None if f is None else in_whole_words(f.float() if f.dtype == torch.float64 else f)
                for f in (rule.row_features, rule.column_features))  # tiles sum in float32
    features = (None, None, None) if f_q is None else (f_q.shape[1], f_q.stride(0), f_k.stride(0))
    offset = 4 * rule.offset + 2  # in a tuple integers that are 1, or divide by 16, have kernels of their own
    taken = KernelRule(*rule[1:5], f_q, f_k, offset, rule.phi, *features, *scale_of(temperature, q)[-2:])
    n, m, shape = len(q), len(k), Shape(k.shape[1], q.stride(0), k.stride(0))
    if capability(q) >= 9:
        shape = Shape(k.shape[1], None, None)
        q, k = (TensorDescriptor.from_tensor(x, [rows, blocks["BLOCK_D"]])
                for x, rows in ((q, blocks["BLOCK_N"]), (k, blocks["BLOCK_M"])))
    return (q, k, taken, n, m, shape), dict(EXCLUDE=rule.exclude, enable_fp_fusion=True, **blocks)
