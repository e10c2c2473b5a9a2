"""Checks of arguments: an error names the argument and says what was found and what is expected."""
import math

import torch
from torch import Tensor

FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
IMPLS = "auto", "triton", "blockwise", "eager"
DTYPES = {bool: ([torch.bool], "bool"), int: (INTEGERS, "integers: int64, int32, int16, int8 or uint8"),
          float: (FLOATS, "floating point: float64, float32, float16 or bfloat16")}
SMALLEST, LARGEST = 1e-38, 1e38          # float32 can hold both numbers and their reciprocals


def check_rows(offset=0, /, **named):
    """Raise ValueError if tensors have unexpected dtypes or shapes, or lie on different devices.

    Example: check_rows(offset, z=(z, "N D"), ids=(ids, "M t", int), t=1) expects floating-point z of shape
    (N, D) and integer ids of shape (M, 1).

    named    for each tensor: name=(tensor, dimensions, kinds...); for each known size: letter=size. The
             string dimensions has one letter per dimension. Equal letters mean equal sizes, and a capital
             letter means a size ≥ 1. kinds are the allowed types: bool, int or float (the default), None (the
             tensor may be None), or a class such as RingRows (an object of this class may replace the tensor)
    offset   this rank's first row: row i of (N, ...) belongs to row offset + i of (M, ...), so M ≥ N + offset
    """
    sizes = {letter: size for letter, size in named.items() if not isinstance(size, tuple)}
    first, device = {}, None     # first[letter] is the first (name, tensor) whose dimension 0 has this letter
    for name, what in named.items():
        if not isinstance(what, tuple) or what[0] is None and None in what[2:]:
            continue
        x, letters, *kinds = what
        letters, others = letters.split(), [kind for kind in kinds if kind and kind not in DTYPES]
        kinds = [kind for kind in kinds if kind in DTYPES] or [float]
        if not isinstance(x, (Tensor, *others)):
            raise ValueError(f"{name}: found {describe(x)}, expected a tensor {shape_text(letters, sizes)}")
        found = dict(zip(letters, x.shape))
        is_empty = 0 in x.shape and any(letter.isupper() and not size for letter, size in found.items())
        if x.ndim != len(letters) or is_empty or found | sizes != sizes | found:
            expected = shape_text(letters, sizes) + (", not empty" if is_empty else "")
            raise ValueError(f"{name}: found {tuple(x.shape)}, expected {expected}")
        if not any(x.dtype in DTYPES[kind][0] for kind in kinds):
            expected = " or ".join(DTYPES[kind][1] for kind in kinds)
            raise ValueError(f"{name}: found {x.dtype}, expected {expected}")
        device = device or x.device
        if x.device != device:
            raise ValueError(f"{name}: on {x.device}, expected {device} like the other tensors")
        sizes, first = found | sizes, {letters[0]: (name, x)} | first
    if "N" in first and "M" in first:
        check_positives(first["N"], first["M"], offset)


def shape_text(letters, sizes):
    """Return the expected shape as text, with numbers for known sizes and letters for unknown sizes."""
    parts = [str(sizes.get(letter, letter)) for letter in letters]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def check_inputs(q, k, names, temperature=1.0, offset=None, others=()):
    """Raise ValueError unless q (N, D), k (K, D) and the temperature τ are valid for the logits q·kᵀ/τ.

    others    classes whose objects may take the place of k
    offset    None, or the index of this rank's first row: key i + offset must exist for each query i
    """
    check_rows(**{names[0]: (q, "N D"), names[1]: (k, "K D", *others)})
    if k.dtype != q.dtype:
        device_type = q.device.type              # half is the dtype to which autocast casts float32, or False
        half = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
        if {q.dtype, k.dtype} != {torch.float32, half}:
            raise ValueError(f"{names[1]}: dtype {k.dtype}, expected {q.dtype} like {names[0]}")
    check_temperature(temperature, q.device)
    if offset is not None:
        check_positives((names[0], q), (names[1], k), offset)


def check_same_dtype(**rows):
    """Raise ValueError if tensors that will be multiplied have different dtypes; None is skipped.

    Under autocast nothing is checked: autocast casts the tensors, or PyTorch raises its own error.
    """
    rows = {name: x for name, x in rows.items() if x is not None}
    (first, z), *others = rows.items()
    for name, x in others:
        if x.dtype != z.dtype and not torch.is_autocast_enabled(z.device.type):
            raise ValueError(f"{name}: found {x.dtype}, expected {z.dtype} like {first}")


def check_number(name, x, minimum=-LARGEST, maximum=LARGEST, device=None):
    """Raise ValueError unless x is a number from minimum to maximum that float32 can hold.

    minimum, maximum  limits of x. If a limit is infinite, x may have this value
    device            if given, x may also be a 0-dim floating-point tensor on this device. The value of a
                      tensor on a GPU is not checked, because the host would have to wait for it
    """
    value = x
    if isinstance(x, Tensor) and device is not None:
        if x.dim() or x.dtype not in FLOATS:
            raise ValueError(f"{name}: found {x.dtype} of shape {tuple(x.shape)}, "
                             "expected a number or a 0-dim floating-point tensor")
        if x.device != device:
            raise ValueError(f"{name}: on {x.device}, expected {device}")
        if not x.is_cpu or torch.compiler.is_compiling():
            return
        value = x.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        expected = "a number" if device is None else "a number or a 0-dim tensor"
        raise ValueError(f"{name}: found {describe(x)}, expected {expected}")
    if not minimum <= value <= maximum or LARGEST < abs(value) < math.inf:
        expected = "a number above 0," if minimum > 0 else "a number"
        raise ValueError(f"{name}: {describe(value)}, expected {expected} from {minimum:g} to {maximum:g}")


def check_temperature(temperature, device, name="temperature"):
    """Raise ValueError unless temperature is a number from 1e-38 to 1e38, or a 0-dim tensor on the device."""
    check_number(name, temperature, SMALLEST, LARGEST, device)


def check_integer(name, x, minimum, maximum=None, expected=None):
    """Raise ValueError if x is not an integer from minimum to maximum (None: no upper limit).

    expected  how the message describes the allowed values; None: "from minimum to maximum"
    """
    if not is_integer(x) or x < minimum or maximum is not None and x > maximum:
        expected = expected or (f"from {minimum}" if maximum is None else f"from {minimum} to {maximum}")
        raise ValueError(f"{name}: {describe(x)}, expected an integer {expected}")


def is_integer(x):
    """Return whether x is an int or a symbolic integer of torch.compile; True and False are not integers."""
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def check_choice(name, x, *choices):
    """Raise ValueError if x is not one of the strings in choices."""
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name}: {describe(x)}, expected {', '.join(choices[:-1])} or {choices[-1]}")


def check_flag(name, x):
    """Raise ValueError if x is not True, False, 1 or 0; "no", which Python treats as true, raises too."""
    if x is not True and x is not False and not (is_integer(x) and x in (0, 1)):
        raise ValueError(f"{name}: {describe(x)}, expected True or False")


def check_pair(name, x, contents):
    """Return x; raise ValueError if x is not a tuple or list of length 2. The elements are not checked."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        found = f"{len(x)} elements" if isinstance(x, (tuple, list)) else describe(x)
        raise ValueError(f"{name}: found {found}, expected a pair {contents}")
    return x


def refuse_second_derivative(what, advice="use impl='eager'"):
    """Raise RuntimeError in a backward pass with create_graph=True. `what` names the function that raises."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what}: found create_graph=True, which second derivatives need; {advice}")


def check_index(name, x, count, allowed=None):
    """Raise ValueError unless each entry of x is an index from 0 to count − 1, or equal to `allowed`.

    Only integer tensors on the CPU are checked: to read a tensor on a GPU, the host would have to wait.
    """
    if x.dtype in INTEGERS and x.is_cpu and not torch.compiler.is_compiling():
        x = x.long()                   # x < count would cast count to the dtype of x: in int8, 300 becomes 44
        wrong = (x < 0) | (x >= count)
        wrong = wrong if allowed is None else wrong & (x != allowed)
        if wrong.any():
            expected = f"0 to {count - 1}" + (f", or {allowed}" if allowed is not None else "")
            raise ValueError(f"{name}: found {x[wrong][0]}, expected {expected}")


def describe(x):
    """Return x as text for a message: a number, the first characters of a string, or the type of x."""
    if x is None or not isinstance(x, (int, float, complex, str)):
        return type(x).__name__
    text = repr(x)
    return text if len(text) <= 40 else f"{text[:40]}…"


def check_offset(offset):
    """Raise ValueError if offset is not an integer."""
    if not is_integer(offset):
        raise ValueError(f"offset: {describe(offset)}, expected an integer (index of this rank's first row)")


def check_positives(queries, keys, offset):
    """Raise ValueError unless key i + offset exists for each query i; queries and keys: (name, tensor)."""
    check_offset(offset)
    name_q, q = queries
    name_k, k = keys
    n, m = q.shape[0], k.shape[0]
    if offset < 0 or n + offset > m:
        if not 0 <= offset < m:
            expected = f"the index of this rank's first row in the {m} rows of {name_k}"
            raise ValueError(f"offset: {describe(offset)}, expected {expected}")
        expected = f"{n} + offset {offset}: one positive for each row of {name_q}"
        raise ValueError(f"{name_k}: {m} rows, expected at least {expected}")
