"""Which columns a row leaves out: rules on index and id vectors, because an (N, M) mask would undo the kernel."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor


class Rule(NamedTuple):
    """A checked rule, in the order in which the operations take it.

    exclude                      "none" | "diagonal" (j = i + offset) | "pair" (j = i, j = i ± N/2) | "ids" (equal ids)
    row_ids, column_ids          (N,), (M,) integers where exclude is "ids", else None
    row_groups, column_groups    (N,), (M,) integers: only columns of the row's own group are kept; None: all
    offset                       index of row 0 among the columns
    """
    exclude: str = "none"
    row_ids: Optional[Tensor] = None
    column_ids: Optional[Tensor] = None
    row_groups: Optional[Tensor] = None
    column_groups: Optional[Tensor] = None
    offset: int = 0


def make_rule(q, k, one_set, exclude, within, offset):
    """Turn the public arguments into a Rule, or raise ValueError naming the argument, what it was and what is wanted."""
    if not isinstance(offset, (int, torch.SymInt)) or isinstance(offset, bool):
        raise ValueError(f"offset: {offset!r}, wanted an integer")
    groups = (None, None) if within is None else check_ids("within", within, q, k)
    if exclude is None or isinstance(exclude, str):
        if exclude not in (None, "diagonal", "pair"):
            raise ValueError(f'exclude: {exclude!r}, wanted None, "diagonal", "pair" or a pair of id vectors')
        if exclude == "pair" and (not one_set or len(q) % 2):
            raise ValueError('exclude: "pair" wants one set (k=None) of an even number of rows, the two views stacked; '
                             + (f"found {len(q)} rows" if one_set else "found a k"))
        return Rule(exclude or "none", None, None, *groups, offset)
    return Rule("ids", *check_ids("exclude", exclude, q, k), *groups, offset)


def check_ids(name, ids, q, k):
    """The pair (row ids (N,), column ids (M,)) as contiguous integer vectors on q's device."""
    if not isinstance(ids, (tuple, list)) or len(ids) != 2 or not all(isinstance(x, Tensor) for x in ids):
        raise ValueError(f"{name}: wanted a pair of tensors (row ids (N,), column ids (M,)), found {type(ids).__name__}")
    for x, side, count in zip(ids, ("row", "column"), (len(q), len(k))):
        if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
            raise ValueError(f"{name}: {side} ids are {x.dtype}, wanted integers")
        if x.dim() != 1 or len(x) != count:
            raise ValueError(f"{name}: {side} ids have shape {tuple(x.shape)}, wanted ({count},)")
        if x.device != q.device:
            raise ValueError(f"{name}: {side} ids are on {x.device}, q is on {q.device}")
    return tuple(x.contiguous() for x in ids)


def left_out(rule, rows, m):
    """(len(rows), m) bool: what rule leaves out of these rows (an index vector); None where it leaves out nothing."""
    columns = torch.arange(m, device=rows.device)
    out = None
    if rule.exclude == "diagonal":
        out = columns == rows[:, None] + rule.offset
    elif rule.exclude == "pair":
        out = (columns - rows[:, None]) % (m // 2) == 0
    elif rule.exclude == "ids":
        out = rule.row_ids[rows, None] == rule.column_ids
    if rule.row_groups is not None:
        other = rule.row_groups[rows, None] != rule.column_groups
        out = other if out is None else out | other
    return out
