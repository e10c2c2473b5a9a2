"""What a loss was given, before it is used: ValueError names the argument, what it was and what is wanted."""
import torch
from torch import Tensor


def check_rows(offset=0, /, **given):
    """ValueError where a tensor is not as said: check_rows(offset, z=(z, "N D"), ids=(ids, "M t", int), t=1).

    given    name=(tensor or None, letters, int where it is of integers), all on one device. A letter is a
             dimension, of one size wherever it stands and at least 1 if it is a capital; letter=its size
    offset   this rank's first row: the N rows of one have theirs among the M of another, M ≥ N + offset
    """
    tensors = {name: what for name, what in given.items() if isinstance(what, tuple) and what[0] is not None}
    sizes = {letter: size for letter, size in given.items() if not isinstance(size, tuple)}
    first, device = {}, None
    for name, (x, letters, *kind) in tensors.items():
        letters = letters.split()
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: found {type(x).__name__}, wanted a tensor {spelt(letters, sizes)}")
        found = dict(zip(letters, x.shape))
        if x.dim() != len(letters) or any(sizes.get(letter, size) != size for letter, size in found.items()):
            raise ValueError(f"{name}: found {tuple(x.shape)}, wanted {spelt(letters, sizes)}")
        if any(letter.isupper() and size == 0 for letter, size in found.items()):
            raise ValueError(f"{name}: found {tuple(x.shape)}, wanted {spelt(letters, sizes)}, none 0")
        is_integer = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if not (is_integer if int in kind else x.is_floating_point()):
            wanted = "integers" if int in kind else "floating point"
            raise ValueError(f"{name}: found {x.dtype}, wanted {wanted}")
        if x.device != (device := device or x.device):
            raise ValueError(f"{name}: on {x.device}, wanted {device} as the others")
        sizes, first = found | sizes, {letters[0]: (name, x)} | first
    if "N" in first and "M" in first:
        check_positives(first["N"], first["M"], offset)


def spelt(letters, sizes):
    """The shape that is wanted, letters where nothing says a size."""
    return f"({', '.join(str(sizes.get(letter, letter)) for letter in letters)}{',' * (len(letters) == 1)})"


def check_positives(q, k, offset):
    """ValueError where row i of q, which is (name, tensor), has no row offset + i in k."""
    (name_q, q), (name_k, k) = q, k
    if not isinstance(offset, (int, torch.SymInt)) or isinstance(offset, bool):
        raise ValueError(f"offset: {offset!r}, wanted an integer")
    if offset < 0 or len(q) + offset > len(k):
        wanted = f"{len(q)} + offset {offset}: one positive for each row of {name_q}"
        raise ValueError(f"{name_k}: {len(k)} rows, wanted at least {wanted}")
    check_gathered(q, k, offset, name_k)


def check_gathered(q, k, offset, name="k"):
    """ValueError where offset is 0, but k is a result of gather_rows and this rank's rows start further down.

    What was computed from such a result, by F.normalize for one, is not known to be gathered. All rows as
    queries, on every rank, need no offset.
    """
    if torch.compiler.is_compiling() or offset != 0:
        return
    start, stop = getattr(k, "own_rows", (0, 0))
    if start > 0 and len(q) == stop - start:
        raise ValueError(f"offset: 0, but {name} has the rows of all processes, and this one's start at "
                         f"{start}; wanted offset=own_rows({len(k)}).start")


@torch.no_grad()
def check_unit(name, x):
    """ValueError where rows of x are not of length 1, to 1e-2.

    To look waits for a GPU, so a tensor is read when it comes first, and once more after it was changed: with
    the first keys in a queue.
    """
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return
    seen, version = getattr(x, "unit_at", ()), 0 if x.is_inference() else x._version
    if len(seen) == 2 or version in seen:
        return
    lengths = torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
    shortest, longest = lengths.aminmax()
    if not (shortest >= 0.99 and longest <= 1.01):             # NaN is neither
        raise ValueError(f"{name}: rows of length {shortest:.3g} to {longest:.3g}, wanted unit rows: "
                         "F.normalize(..., dim=1)")
    x.unit_at = *seen, version
