"""Which columns a row leaves out: rules on index and id vectors, as an (N, M) mask would undo the kernel."""
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_gathered, check_number, check_offset, check_pair, check_rows, told


class Rule(NamedTuple):
    """A checked rule, in the order in which the operations take it.

    exclude                      "none" | "diagonal" (j = i + offset) | "pair" (j = i, j = i ± N/2)
                                 | "ids" (equal ids) | "target" (j = row_ids[i]; swapped: i = column_ids[j])
    row_ids, column_ids          (N,), (M,) integers where "ids", (N,) and None where "target", else None
    row_groups, column_groups    (N,), (M,) integers: only columns of the row's own group are kept; None: all
    row_features, column_features  (N, E), (M, E): columns with f_i·f_j ≥ phi are left out; None: none
    offset                       index of row 0 among the columns
    phi                          threshold of the features
    """
    exclude: str = "none"
    row_ids: Tensor | None = None
    column_ids: Tensor | None = None
    row_groups: Tensor | None = None
    column_groups: Tensor | None = None
    row_features: Tensor | None = None
    column_features: Tensor | None = None
    offset: int = 0
    phi: float = 0.0


def positive_of(rule, n, device):
    """(n,) the column of each row's positive, for "diagonal", "pair" or "target", which leave it out."""
    if rule.exclude == "target":
        return rule.row_ids
    rows = torch.arange(n, device=device)
    return (rows + n // 2) % n if rule.exclude == "pair" else rows + rule.offset


def is_symmetric(rule):
    """Whether, of one set of rows, i leaves out j where j leaves out i, for any rows."""
    by_index = rule.exclude in ("none", "diagonal", "pair") and rule.offset == 0
    return by_index and all(part is None for part in rule[1:7])


def swapped(rule):
    """The rule with rows and columns in each other's place: the entries that it leaves out are the same."""
    return rule._replace(row_ids=rule.column_ids, column_ids=rule.row_ids, row_groups=rule.column_groups,
                         column_groups=rule.row_groups, row_features=rule.column_features,
                         column_features=rule.row_features, offset=-rule.offset)


def make_rule(q, k, one_set, exclude=None, within=None, similar=None, offset=0):
    """The public arguments as a Rule, or ValueError naming the argument, what it was and what is wanted."""
    check_offset(offset)
    groups = (None, None) if within is None else check_ids("within", within, q, k)
    *features, phi = (None, None, 0.0) if similar is None else check_similar(similar, q, k)
    rest = (*groups, *features, offset, phi)
    if exclude is None or isinstance(exclude, str):
        if exclude not in (None, "diagonal", "pair"):
            wanted = 'None, "diagonal", "pair" or a pair of id vectors'
            raise ValueError(f"exclude: {told(exclude)}, wanted {wanted}")
        if exclude == "pair" and (not one_set or len(q) % 2):
            found = f"found {len(q)} rows" if one_set else "found a k"
            raise ValueError('exclude: "pair" wants one set (k=None) of an even number of rows, the two '
                             f"views stacked; {found}")
        if exclude == "diagonal":
            check_gathered(q, k, offset)
        return Rule(exclude or "none", None, None, *rest)
    return Rule("ids", *check_ids("exclude", exclude, q, k), *rest)


def check_ids(name, ids, q, k):
    """The pair (row ids (N,), column ids (M,)) as contiguous vectors of one integer type on q's device."""
    rows, columns = check_pair(name, ids, "of tensors: row ids (N,) and column ids (M,)")
    check_rows(q=(q, "n D"), m=len(k), **{f"{name}: row ids": (rows, "n", int),
                                          f"{name}: column ids": (columns, "m", int)})
    if rows.dtype != columns.dtype:        # Triton takes int8's -1 for uint8's 255
        rows, columns = rows.long(), columns.long()
    return rows.contiguous(), columns.contiguous()


def check_similar(similar, q, k):
    """(row features (N, E), column features (M, E), phi), the features without gradient."""
    if not isinstance(similar, (tuple, list)) or len(similar) != 3:
        wanted = "(row features (N, E), column features (M, E), phi)"
        raise ValueError(f"similar: wanted {wanted}, found {type(similar).__name__}")
    f_q, f_k, phi = similar
    check_rows(q=(q, "n D"), m=len(k), **{"similar: row features": (f_q, "n E"),
                                          "similar: column features": (f_k, "m E")})
    if f_q.dtype != f_k.dtype:
        raise ValueError(f"similar: column features are {f_k.dtype}, wanted {f_q.dtype} as row features")
    check_number("similar: phi", phi, -math.inf, math.inf)
    return f_q.detach().resolve_neg(), f_k.detach().resolve_neg(), float(phi)    # kernels read memory


def left_out(rule, rows, m, at=slice(None)):
    """(len(rows), m) bool: what rule leaves out of these rows (an index vector); None where it leaves out
    nothing. at: only these of the m columns."""
    columns = torch.arange(m, device=rows.device)[at]
    out = None
    if rule.exclude == "diagonal":
        out = columns == rows[:, None] + rule.offset
    elif rule.exclude == "pair":
        out = (columns - rows[:, None]) % (m // 2) == 0
    elif rule.exclude == "target":
        out = columns == rule.row_ids[rows, None]
    elif rule.exclude == "ids":
        out = rule.row_ids[rows, None] == rule.column_ids[at]
    if rule.row_groups is not None:
        other = rule.row_groups[rows, None] != rule.column_groups[at]
        out = other if out is None else out | other
    if rule.row_features is not None:
        wide = torch.float64 if rule.row_features.dtype == torch.float64 else torch.float32
        near = rule.row_features[rows].to(wide) @ rule.column_features[at].T.to(wide) >= rule.phi
        out = near if out is None else out | near
    return out
