"""What a loss was given, before it is used: ValueError names the argument, what it was and what is wanted."""
import math

import torch
from torch import Tensor

from .dispatch import is_watched

FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
IMPLS = "auto", "triton", "blockwise", "eager"
KINDS = {bool: ([torch.bool], "bool"), int: (INTEGERS, "integers: int64, int32, int16, int8 or uint8"),
         float: (FLOATS, "floating point: float64, float32, float16 or bfloat16")}
STRIDED, META = torch.strided, torch.device("meta")
TINY, HUGE = 1e-38, 1e38                 # float32 holds both, and 1 by each
FARTHEST = 2 ** 60                       # kernels multiply an offset by 4


def check_rows(offset=0, /, **given):
    """ValueError where a tensor is not as said: check_rows(offset, z=(z, "N D"), ids=(ids, "M t", int), t=1).

    given    name=(tensor, letters, what it may be of bool, int, float and None: float where nothing says so),
             all on one device. A letter is a dimension, of one size wherever it stands and at least 1 if it
             is a capital; letter=its size
    offset   this rank's first row: the N rows of one have theirs among the M of another, M ≥ N + offset
    """
    sizes = {letter: size for letter, size in given.items() if not isinstance(size, tuple)}
    first, device = {}, None
    check_offset(offset)
    for name, what in given.items():
        if not isinstance(what, tuple) or what[0] is None and None in what[2:]:
            continue
        x, letters, *kinds = what
        letters, kinds = letters.split(), [kind for kind in kinds if kind] or [float]
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: found {told(x)}, wanted a tensor {spelt(letters, sizes)}")
        check_dense(name, x)
        shape = x.shape
        found = dict(zip(letters, shape))
        is_other = any(sizes.get(letter, size) != size for letter, size in found.items())
        if is_other or len(shape) != len(letters):
            raise ValueError(f"{name}: found {tuple(shape)}, wanted {spelt(letters, sizes)}")
        if any(letter.isupper() and size == 0 for letter, size in found.items()):
            raise ValueError(f"{name}: found {tuple(shape)}, wanted {spelt(letters, sizes)}, none 0")
        if not any(x.dtype in KINDS[kind][0] for kind in kinds):
            wanted = " or ".join(KINDS[kind][1] for kind in kinds)
            raise ValueError(f"{name}: found {x.dtype}, wanted {wanted}")
        if device is None:
            device = x.device
            check_is_somewhere(name, x)
        if x.device != device:
            raise ValueError(f"{name}: on {x.device}, wanted {device} as the others")
        sizes, first = found | sizes, {letters[0]: (name, x)} | first
    if "N" in first and "M" in first:
        check_positives(first["N"], first["M"], offset)
        check_gathered(first["N"][1], first["M"][1], offset, first["M"][0])


def spelt(letters, sizes):
    """The shape that is wanted, letters where nothing says a size."""
    return f"({', '.join(str(sizes.get(letter, letter)) for letter in letters)}{',' * (len(letters) == 1)})"


def check_alike(**rows):
    """ValueError where tensors (None is not there) that are to be multiplied differ in dtype; where autocast
    is on, it is left to say so."""
    rows = {name: x for name, x in rows.items() if x is not None}
    (first, z), *others = rows.items()
    for name, x in others:
        if x.dtype != z.dtype and not torch.is_autocast_enabled(z.device.type):
            raise ValueError(f"{name}: found {x.dtype}, wanted {z.dtype} as {first}")


def check_dense(name, x):
    """ValueError where a tensor is sparse, nested or of another layout that has no strides."""
    if isinstance(x, Tensor) and (x.layout != STRIDED or x.is_nested):
        if x.is_nested:
            found, advice = "a nested tensor", "call .unbind() and torch.cat"
        else:
            found = "an mkldnn tensor" if x.is_mkldnn else "a sparse tensor"
            advice = "call .to_dense()"
        raise ValueError(f"{name}: found {found}, wanted a dense one; {advice}")


def check_is_somewhere(name, x):
    """ValueError where a tensor is of the meta device. A fake tensor is not: its device is the real one's."""
    if x.device == META:
        raise ValueError(f"{name}: found a meta tensor, wanted one that has numbers, on the CPU or a GPU")


def check_number(name, x, least=-HUGE, most=HUGE, device=None):
    """ValueError where x is not a number from least to most that float32 holds, or ±∞ where that is a limit.

    With a device x may be a floating-point tensor of no dimensions there: to look at its value would wait for
    a GPU.
    """
    if isinstance(x, Tensor) and device is not None:
        check_dense(name, x)
        if x.dim() or x.dtype not in FLOATS:
            raise ValueError(f"{name}: found {x.dtype} of shape {tuple(x.shape)}, "
                             "wanted a number or a floating-point tensor of no dimensions")
        if x.device != device:
            raise ValueError(f"{name}: on {x.device}, wanted {device}")
        return
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        wanted = "a number" if device is None else "a number or a 0-dim tensor"
        raise ValueError(f"{name}: found {told(x)}, wanted {wanted}")
    if not least <= x <= most or HUGE < abs(x) < math.inf:
        wanted = "a number above 0," if least > 0 else "a number"
        raise ValueError(f"{name}: {told(x)}, wanted {wanted} from {least:g} to {most:g}")


def check_temperature(temperature, device, name="temperature"):
    """ValueError where it is not a number that float32 can divide by, nor a 0-dim tensor on the device."""
    check_number(name, temperature, TINY, HUGE, device)


def check_integer(name, x, least, most=None, wanted=None):
    """ValueError where x is not an integer from least to most."""
    if not is_integer(x) or x < least or most is not None and x > most:
        wanted = wanted or (f"from {least}" if most is None else f"from {least} to {most}")
        raise ValueError(f"{name}: {told(x)}, wanted an integer {wanted}")


def is_integer(x):
    """Whether x is an integer, also of a shape that torch.compile keeps open; True and False are none."""
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def check_choice(name, x, *choices):
    """ValueError where x is none of these words."""
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name}: {told(x)}, wanted {', '.join(choices[:-1])} or {choices[-1]}")


def check_impl(impl):
    check_choice("impl", impl, *IMPLS)


def check_flag(name, x):
    """ValueError where x is not True or False, 1 or 0: "no" would count as True."""
    if x is not True and x is not False and not (is_integer(x) and x in (0, 1)):
        raise ValueError(f"{name}: {told(x)}, wanted True or False")


def check_callable(name, x):
    if not callable(x):
        raise ValueError(f"{name}: found {told(x)}, wanted a function or a torch.nn.Module")


def check_pair(name, x, of):
    """The pair x; ValueError where it is no tuple or list of two, whatever they are."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        found = f"{len(x)} of them" if isinstance(x, (tuple, list)) else told(x)
        raise ValueError(f"{name}: found {found}, wanted a pair {of}")
    return x


def check_scalars(name, xs):
    """ValueError where xs is no floating-point vector and no sequence of floating-point 0-dim tensors."""
    if isinstance(xs, Tensor):
        return check_rows(**{name: (xs, "T")})
    wanted = "a tensor (T,) or a list of 0-dim tensors"
    if isinstance(xs, str) or not hasattr(xs, "__len__") or not hasattr(xs, "__iter__") or not len(xs):
        raise ValueError(f"{name}: found {told(xs)}, wanted {wanted}")
    for x in xs:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: found {told(x)} among them, wanted {wanted}")
        check_number(name, x, device=x.device)
        check_is_somewhere(name, x)


def check_index(name, x, count, spared=None):
    """ValueError where an integer is none of 0 … count − 1, nor the one that is spared.

    Integers are read on the CPU alone, as a GPU would have to be waited for. Other numbers pass.
    """
    is_read = x.dtype in INTEGERS and x.is_cpu and not is_watched(x)
    if is_read and not torch._C._are_functorch_transforms_active():
        x = x.long()                     # in int8 300 would be 44, and -100 in uint8 156
        wrong = (x < 0) | (x >= count)
        wrong = wrong if spared is None else wrong & (x != spared)
        if wrong.any():
            least = f"0 to {count - 1}" + (f", or {spared}" if spared is not None else "")
            raise ValueError(f"{name}: found {x[wrong][0]}, wanted {least}")


def told(x):
    """What was found, on one line: a number or a short text as it is, anything else by its type."""
    if isinstance(x, int) and not -2 ** 63 <= x < 2 ** 63:
        return f"an integer of {x.bit_length()} bits"
    if x is None or not isinstance(x, (int, float, complex, str)):
        return type(x).__name__
    text = repr(x)
    return text if len(text) <= 40 else f"{text[:40]}…"


def check_offset(offset):
    """ValueError where an offset is not an integer, or one that kernels cannot count with."""
    if not is_integer(offset):
        raise ValueError(f"offset: {told(offset)}, wanted an integer")
    if isinstance(offset, int) and not -FARTHEST <= offset <= FARTHEST:
        raise ValueError(f"offset: {told(offset)}, wanted an integer up to 2^60, this rank's first row")


def check_positives(q, k, offset):
    """ValueError where row i of q, which is (name, tensor), has no row offset + i in k."""
    (name_q, q), (name_k, k) = q, k
    n, m = q.shape[0], k.shape[0]
    if offset < 0 or n + offset > m:
        if not 0 <= offset < m:
            wanted = f"this rank's first row among the {m} of {name_k}"
            raise ValueError(f"offset: {told(offset)}, wanted {wanted}")
        wanted = f"{n} + offset {offset}: one positive for each row of {name_q}"
        raise ValueError(f"{name_k}: {m} rows, wanted at least {wanted}")


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
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: found {told(x)}, wanted a tensor of unit rows")
    check_dense(name, x)
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return
    seen, version = getattr(x, "unit_at", ()), 0 if x.is_inference() else x._version
    if len(seen) == 2 or version in seen:
        return
    check_rows(**{name: (x, "N D")})
    lengths = torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
    shortest, longest = lengths.aminmax()
    if not (shortest >= 0.99 and longest <= 1.01):             # NaN is neither
        raise ValueError(f"{name}: rows of length {shortest:.3g} to {longest:.3g}, wanted unit rows: "
                         "F.normalize(..., dim=1)")
    x.unit_at = *seen, version
