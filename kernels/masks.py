"""Masks: which columns each row excludes, described by indices and vectors, never by an (N, M) tensor."""
import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks


class Mask(NamedTuple):
    """A checked mask of (N, M) logits. An entry is excluded if any part of the mask excludes it.

    exclude                      what row i excludes: "none" | "diagonal" (column i + offset) | "pair" (both
                                 views of its sample: columns c and c + M/2, with c = i mod (N/2) + offset)
                                 | "target" (column row_ids[i]; in a transposed mask, column j excludes row
                                 column_ids[j])
    row_ids, column_ids          integers (N,), (M,): row i excludes columns with its id; None: no ids. For
                                 exclude="target", row_ids holds the targets, and column_ids is None
    row_groups, column_groups    integers (N,), (M,): row i excludes columns of other groups; None: no groups
    row_features, column_features  f (N, E), (M, E): row i excludes column j if f_i·f_j ≥ phi; or None
    offset                       row i belongs to column i + offset; transposed() changes the sign of offset
    """
    exclude: str = "none"
    row_ids: Tensor | None = None       # this field and all below are also the first fields of KernelMask
    column_ids: Tensor | None = None
    row_groups: Tensor | None = None
    column_groups: Tensor | None = None
    row_features: Tensor | None = None
    column_features: Tensor | None = None
    offset: int = 0
    phi: float = 0.0

    @property
    def has_vectors(self):
        """Whether the mask has ids, targets, groups or features; if not, indices alone define the mask."""
        vectors = self.row_ids, self.column_ids, self.row_groups, self.row_features
        return any(part is not None for part in vectors)

    @property
    def is_symmetric(self):
        """True: the mask is surely symmetric. It has no offset, targets, groups or features; if it has ids,
        row_ids and column_ids are the same tensor."""
        others = self._replace(row_ids=None, column_ids=None)
        return self.offset == 0 and self.row_ids is self.column_ids and not others.has_vectors


def positive_columns(mask, n, m, device):
    """Return (n,): the column of each row's positive, for exclude = "diagonal", "pair" or "target"."""
    if mask.exclude == "target":
        return mask.row_ids
    if mask.exclude != "pair":
        return torch.arange(mask.offset, mask.offset + n, device=device)
    other_views = torch.arange(n, device=device).roll(n // 2)
    return other_views if n == m else own_columns(mask, other_views, n, m)


def own_columns(mask, rows, n, m):
    """Return, for each row index in `rows`, the column that holds the same view (exclude is "pair")."""
    return rows % (n // 2) + mask.offset + (rows >= n // 2) * (m // 2)


def transposed(mask):
    """Return the mask of the transposed matrix, with rows and columns swapped."""
    return mask._replace(row_ids=mask.column_ids, column_ids=mask.row_ids, row_groups=mask.column_groups,
                         column_groups=mask.row_groups, row_features=mask.column_features,
                         column_features=mask.row_features, offset=-mask.offset)


def make_mask(n, m, self_similarity, exclude=None, within=None, similar=None, offset=0):
    """Make the Mask of an (n, m) matrix from public arguments; raise ValueError for an invalid argument."""
    checks.check_offset(offset)
    ids, groups, features, phi = (None, None), (None, None), (None, None), 0.0
    if within is not None:
        groups = check_ids("within", within, n, m)
    if similar is not None:
        *features, phi = check_similar(similar, n, m)
    if isinstance(exclude, (tuple, list)):
        if len(exclude) == 3:
            exclude, *ids = exclude
            checks.check_choice("exclude", exclude, "diagonal")
        else:
            exclude, ids = None, exclude
        ids = check_ids("exclude", ids, n, m)
    elif exclude not in (None, "diagonal", "pair"):
        expected = 'None, "diagonal", "pair" or a pair of id vectors'
        raise ValueError(f"exclude: {checks.describe(exclude)}, expected {expected}")
    if offset != 0 and exclude != "diagonal":
        raise ValueError(f'offset: {checks.describe(offset)}, expected 0 unless exclude is "diagonal"')
    if exclude == "pair" and (not self_similarity or n % 2):
        found = f"found {n} rows" if self_similarity else "found keys k"
        raise ValueError('exclude: "pair" needs k=None and an even number of rows '
                         f"(first views, then second views); {found}")
    return Mask(exclude or "none", *ids, *groups, *features, offset, phi)


def check_ids(name, ids, n, m):
    """Return the checked (row ids (n,), column ids (m,)), contiguous and with the same integer dtype."""
    rows, columns = checks.check_pair(name, ids, "of tensors: row ids (N,) and column ids (M,)")
    checks.check_rows(n=n, m=m, **{f"{name}: row ids": (rows, "n", int),
                                   f"{name}: column ids": (columns, "m", int)})
    if rows.dtype != columns.dtype:        # Triton would take int8 -1 and uint8 255 as equal
        rows, columns = rows.long(), columns.long()
    return rows.contiguous(), columns.contiguous()


def check_similar(similar, n, m):
    """Return the checked (row features (n, E), column features (m, E), phi); features are detached."""
    if not isinstance(similar, (tuple, list)) or len(similar) != 3:
        expected = "(row features (N, E), column features (M, E), phi)"
        raise ValueError(f"similar: found {type(similar).__name__}, expected {expected}")
    f_q, f_k, phi = similar
    checks.check_rows(n=n, m=m, **{"similar: row features": (f_q, "n E"),
                                   "similar: column features": (f_k, "m E")})
    if f_q.dtype != f_k.dtype:
        raise ValueError(f"similar: column features are {f_k.dtype}, expected {f_q.dtype} like row features")
    checks.check_number("similar: phi", phi, -math.inf, math.inf)
    # resolve_neg() copies lazily negated views such as x.conj().imag, because Triton reads raw memory
    return f_q.detach().resolve_neg(), f_k.detach().resolve_neg(), float(phi)


def excluded(mask, rows, n, m, at=slice(None)):
    """Return a bool matrix (rows, columns), True for excluded entries; None if the mask excludes nothing.

    rows  vector of indices from 0 to n − 1: the rows to return
    at    slice of the m columns: the columns to return
    """
    columns = torch.arange(m, device=rows.device)[at]
    out = None
    if mask.exclude == "diagonal":
        out = columns == rows[:, None] + mask.offset
    elif mask.exclude == "pair":
        out = (columns - own_columns(mask, rows, n, m)[:, None]) % (m // 2) == 0
    elif mask.exclude == "target":
        out = columns == mask.row_ids[rows, None]
    if mask.row_ids is not None and mask.exclude != "target":
        equal = mask.row_ids[rows, None] == mask.column_ids[at]
        out = equal if out is None else out | equal
    if mask.row_groups is not None:
        other = mask.row_groups[rows, None] != mask.column_groups[at]
        out = other if out is None else out | other
    if mask.row_features is not None:
        wide = torch.float64 if mask.row_features.dtype == torch.float64 else torch.float32
        with torch.autocast(rows.device.type, enabled=False):
            similar = mask.row_features[rows].to(wide) @ mask.column_features[at].T.to(wide) >= mask.phi
        out = similar if out is None else out | similar
    return out
