"""Read the pickles of CIFAR's python batches without running code in them.

A pickle is a program, and unpickling an untrusted one can run anything. So all instructions are checked first
(with pickletools), and only those that occur in CIFAR's batches are allowed. Functions and classes named in
the pickle are never imported: the few names that CIFAR's batches use are replaced by functions and classes
of this module, which create plain values.
"""
import functools
import io
import pickle
import pickletools

import numpy as np

MAX_INSTRUCTIONS = 2**21                                       # CIFAR-100 has 250,000
ALLOWED = set("""
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES
    BINBYTES8 BYTEARRAY8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    GLOBAL STACK_GLOBAL REDUCE BUILD""".split())


class Array:
    """Stand-in for a numpy array of uint8; values is None until the pickle's data are set."""
    values = None

    def __setstate__(self, state):
        _, shape, dtype, fortran_order, data = state
        self.fill(data, shape, dtype, "F" if fortran_order else "C")

    def fill(self, data, shape, dtype, order):
        """Set the values from bytes, and return this array."""
        fits = type(shape) is tuple and all(type(n) is int and 0 <= n <= len(data) for n in shape)
        if type(dtype) is not UInt8 or not fits or len(shape) > 4:         # reshape checks the rest
            raise ValueError("contains an array whose type, shape and bytes do not agree")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order=order)
        return self


class UInt8:
    """Stand-in for numpy's dtype uint8."""

    def __init__(self, kind, *_):
        if kind not in ("u1", b"u1"):
            raise ValueError("contains a numpy.dtype other than uint8, which CIFAR batches never contain")

    def __setstate__(self, byte_order):
        pass


def array_from_bytes(data, dtype, shape, order):
    """Stand-in for numpy's _frombuffer."""
    return Array().fill(data, shape, dtype, {"C": "C", "F": "F"}[order])


class BatchUnpickler(pickle._Unpickler):
    """Python's unpickler with stand-ins for numpy. It is based on the version written in Python, because the
    one in C allocates memory for any size that a pickle claims."""

    def __init__(self, file):
        super().__init__(file, fix_imports=False, encoding="bytes")        # Python 2's strings are bytes

        @functools.cache                       # so that a repeated text does not take memory again
        def encode(text, _):
            return text.encode("latin-1")

        def new_array(*_):
            return Array()

        self.names = {"numpy ndarray": None, "numpy dtype": UInt8, "_codecs encode": encode}
        for core in ("numpy.core", "numpy._core"):             # before and since numpy 2
            self.names[f"{core}.multiarray _reconstruct"] = new_array
            self.names[f"{core}.numeric _frombuffer"] = array_from_bytes

    def find_class(self, module, name):
        """Return the stand-in for a name; raise ValueError for any other name."""
        if f"{module} {name}" not in self.names:
            raise ValueError(f"contains {ascii(f'{module}.{name}')[1:-1][:80]}, "
                             "which CIFAR batches never contain")
        return self.names[f"{module} {name}"]

    def build(self):
        """Run a BUILD instruction (__setstate__), for the stand-ins only."""
        if type(self.stack[-2]) not in (Array, UInt8):
            raise ValueError("contains a BUILD instruction that CIFAR batches never contain")
        self.load_build()

    def check_keys(self, items):
        """Raise ValueError unless dict keys are text: hashing deeply nested tuples could take for ever."""
        if not {type(key) for key in items[::2]} <= {bytes, str}:
            raise ValueError("contains dict keys that are not text, which CIFAR batches never contain")

    def set_item(self):
        self.check_keys(self.stack[-2:])
        self.load_setitem()

    def set_items(self):
        self.check_keys(self.stack)
        self.load_setitems()

    def make_dict(self):
        self.check_keys(self.stack)
        self.load_dict()

    dispatch = pickle._Unpickler.dispatch | {
        pickle.BUILD[0]: build, pickle.SETITEM[0]: set_item, pickle.SETITEMS[0]: set_items,
        pickle.DICT[0]: make_dict}


def read_pickle(data):
    """Return the value of a pickle (bytes) of plain values and uint8 arrays, which become Arrays. Raises
    ValueError if it contains anything else, or is damaged."""
    for count, (instruction, _, _) in enumerate(pickletools.genops(data)):
        if instruction.name not in ALLOWED:
            raise ValueError(f"contains {instruction.name}, which CIFAR batches never contain")
        if count == MAX_INSTRUCTIONS:
            raise ValueError(f"contains more than {MAX_INSTRUCTIONS:,} instructions; CIFAR's have fewer")
    try:
        return BatchUnpickler(io.BytesIO(data)).load()
    except (AttributeError, EOFError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"damaged, or not a CIFAR batch ({type(error).__name__})") from error
