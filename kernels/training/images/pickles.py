"""Read the pickles of CIFAR's python batches without running code in them.

A pickle can name any function to call. No name in a pickle is imported here: the few names that CIFAR's
batches use are replaced by functions and classes of this module, which create plain values.
"""
import io
import pickle

import numpy as np


class Array:
    """Stand-in for a numpy array of uint8; values is None until the pickle's data are set."""
    values = None

    def __setstate__(self, state):
        _, shape, dtype, fortran_order, data = state
        if type(dtype) is not UInt8:
            raise ValueError("contains an array without a type")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran_order else "C")


class UInt8:
    """Stand-in for numpy's dtype uint8."""

    def __init__(self, kind, *_):
        if kind not in ("u1", b"u1"):
            raise ValueError("contains a numpy.dtype other than uint8, which CIFAR batches never contain")

    def __setstate__(self, byte_order):
        pass


def new_array(*_):
    """Stand-in for numpy's _reconstruct."""
    return Array()


def array_from_bytes(data, dtype, shape, order):
    """Stand-in for numpy's _frombuffer."""
    array = Array()
    array.__setstate__((None, shape, dtype, order == "F", data))
    return array


def encode(text, _):
    """Stand-in for _codecs.encode, with which pickles store bytes."""
    return text.encode("latin-1")


NAMES = {"numpy ndarray": None, "numpy dtype": UInt8, "_codecs encode": encode}
for core in ("numpy.core", "numpy._core"):                     # before and since numpy 2
    NAMES |= {f"{core}.multiarray _reconstruct": new_array, f"{core}.numeric _frombuffer": array_from_bytes}


class BatchUnpickler(pickle.Unpickler):
    """An unpickler that knows only the stand-ins."""

    def find_class(self, module, name):
        """Return the stand-in for a name; raise ValueError for any other name."""
        if f"{module} {name}" not in NAMES:
            raise ValueError(f"contains {ascii(f'{module}.{name}')[1:-1][:80]}, "
                             "which CIFAR batches never contain")
        return NAMES[f"{module} {name}"]


def read_pickle(data):
    """Return the value of a pickle (bytes) of plain values and uint8 arrays, which become Arrays. Raises
    ValueError if it contains anything else, or is damaged."""
    try:                                                       # Python 2's strings are bytes
        return BatchUnpickler(io.BytesIO(data), fix_imports=False, encoding="bytes").load()
    except (AttributeError, EOFError, LookupError, MemoryError, OverflowError, TypeError,
            pickle.UnpicklingError) as error:
        raise ValueError(f"damaged, or not a CIFAR batch ({type(error).__name__})") from error
