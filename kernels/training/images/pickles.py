"""The pickles of CIFAR's python batches, without what a pickle can do: run any code.

A pickle is a program. Before it runs, all of its instructions are looked at (pickletools), and refused unless
a batch has such. Names of functions and classes are never looked up: those that a batch has stand for ones
of this module, which make plain values.
"""
import functools
import io
import pickle
import pickletools

import numpy as np

MOST = 2**21                                                   # instructions; CIFAR-100 has 250,000
KNOWN = set("""
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES
    BINBYTES8 BYTEARRAY8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    GLOBAL STACK_GLOBAL REDUCE BUILD""".split())


class Array:
    """An array of uint8; values are None until the pickle has said which."""
    values = None

    def __setstate__(self, state):
        _, shape, dtype, by_columns, data = state
        self.fill(data, shape, dtype, "F" if by_columns else "C")

    def fill(self, data, shape, dtype, order):
        fits = type(shape) is tuple and all(type(n) is int and 0 <= n <= len(data) for n in shape)
        if type(dtype) is not UInt8 or not fits or len(shape) > 4:         # what else is wrong, reshape says
            raise ValueError("holds an array whose type, shape and bytes do not agree")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order=order)
        return self


class UInt8:
    """numpy's dtype of that name."""

    def __init__(self, kind, *_):
        if kind not in ("u1", b"u1"):
            raise ValueError("holds a numpy.dtype that is no array of uint8, which no CIFAR batch does")

    def __setstate__(self, byte_order):
        pass


def array_of_bytes(data, dtype, shape, order):
    return Array().fill(data, shape, dtype, {"C": "C", "F": "F"}[order])


class BatchUnpickler(pickle._Unpickler):
    """Python's own, written in Python: the one in C takes memory for whatever number stands in a pickle."""

    def __init__(self, file):
        super().__init__(file, fix_imports=False, encoding="bytes")        # Python 2's strings are bytes
        encode = functools.cache(lambda text, _: text.encode("latin-1"))   # asked for again: the same bytes
        self.names = {"numpy ndarray": None, "numpy dtype": UInt8, "_codecs encode": encode}
        for core in ("numpy.core", "numpy._core"):
            self.names[f"{core}.multiarray _reconstruct"] = lambda *_: Array()
            self.names[f"{core}.numeric _frombuffer"] = array_of_bytes

    def find_class(self, module, name):
        if f"{module} {name}" not in self.names:
            raise ValueError(f"holds {ascii(f'{module}.{name}')[1:-1][:80]}, which no CIFAR batch does")
        return self.names[f"{module} {name}"]

    def build(self):
        if type(self.stack[-2]) not in (Array, UInt8):
            raise ValueError("holds a BUILD that no CIFAR batch does")
        self.load_build()

    def check_keys(self, items):
        """The hash of nested tuples could take for ever."""
        if not {type(key) for key in items[::2]} <= {bytes, str}:
            raise ValueError("holds keys that are no text, which no CIFAR batch does")

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
    """The value of a pickle of plain values and Arrays. Raises ValueError if it holds more, or is damaged."""
    for count, (instruction, _, _) in enumerate(pickletools.genops(data)):
        if instruction.name not in KNOWN:
            raise ValueError(f"holds {instruction.name}, which no CIFAR batch does")
        if count == MOST:
            raise ValueError(f"holds more than {MOST:,} parts, which no CIFAR batch does")
    try:
        return BatchUnpickler(io.BytesIO(data)).load()
    except (AttributeError, EOFError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"damaged, or no batch of CIFAR's ({type(error).__name__})") from error
