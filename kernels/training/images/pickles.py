"""The pickles of CIFAR's python batches, read without unpickling, which can run any code.

A pickle's instructions are taken one by one (pickletools knows them). Those that a batch has do here what
they say, to values that are made here; any other is refused. Nothing is imported: names are mere names.
"""
import functools
import pickletools

import numpy as np

MOST = 2**21                                                   # instructions; CIFAR-100 has 250,000


class Name(str):
    """What a pickle calls a function or a class; never looked up."""


class Array:
    """An array of uint8; values are None until the pickle has said which."""
    values = None

    def fill(self, data, shape, dtype, order):
        fits = type(shape) is tuple and all(type(n) is int and 0 <= n <= len(data) for n in shape)
        if dtype is not UINT8 or not fits or len(shape) > 4:   # what more does not agree, reshape says
            raise ValueError("holds an array whose type, shape and bytes do not agree")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order=order)
        return self


UINT8 = Name("uint8")
PLACES = ["numpy ndarray", "numpy dtype", "_codecs encode"]
PLACES += [f"numpy.{core}.{name}" for core in ("core", "_core")
           for name in ("multiarray _reconstruct", "numeric _frombuffer")]
NAMES = {place: Name(place.split()[1]) for place in PLACES}

# instructions: of a value, and how many values others take off the stack; None: all down to the last mark
VALUES = {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE",
          "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
          "BYTEARRAY8"}
BYTES = {"STRING", "BINSTRING", "SHORT_BINSTRING"}             # Python 2's
MAKES = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "NONE": lambda: None,
         "NEWTRUE": lambda: True, "NEWFALSE": lambda: False}
TAKES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None, "LIST": None, "DICT": None, "APPEND": 1,
         "APPENDS": None, "SETITEM": 2, "SETITEMS": None, "STACK_GLOBAL": 2, "REDUCE": 2, "BUILD": 1}


def read_pickle(data):
    """The value of a pickle of plain values and Arrays. Raises ValueError where it is more, or damaged."""
    stack, marks, memo = [], [], {}
    encode = functools.cache(lambda text: text.encode("latin-1"))      # asked for again: the same bytes
    try:
        for count, (instruction, value, _) in enumerate(pickletools.genops(data)):
            kind = instruction.name
            if count == MOST:
                raise ValueError(f"holds more than {MOST:,} parts, which no CIFAR batch does")
            if kind == "STOP":
                return stack.pop()
            if kind in VALUES:
                stack.append(value)
            elif kind in BYTES:
                stack.append(encode(value))
            elif kind in MAKES:
                stack.append(MAKES[kind]())
            elif kind == "MARK":
                marks.append(len(stack))
            elif kind in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if kind == "MEMOIZE" else value] = stack[-1]
            elif kind in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif kind == "GLOBAL":
                stack.append(known(value))
            elif kind in TAKES:
                first = marks.pop() if TAKES[kind] is None else max(0, len(stack) - TAKES[kind])
                items = stack[first:]
                del stack[first:]
                combine(kind, items, stack, encode)
            elif kind not in ("PROTO", "FRAME"):
                raise ValueError(f"holds {kind}, which no CIFAR batch does")
    except (IndexError, KeyError, TypeError) as error:         # it asks for what it has not made
        raise ValueError(f"damaged, or no batch of CIFAR's ({type(error).__name__})") from error


def known(place):
    """The Name of what a pickle asks for by module and name."""
    if place not in NAMES:
        raise ValueError(f"holds {ascii(place.replace(' ', '.'))[1:-1][:80]}, which no CIFAR batch does")
    return NAMES[place]


def combine(kind, items, stack, encode):
    """Does what an instruction says with the items that it took off the stack."""
    if kind.startswith("TUPLE"):
        stack.append(tuple(items))
    elif kind in ("LIST", "DICT"):
        stack.append(items if kind == "LIST" else paired(items))
    elif kind in ("APPEND", "APPENDS") and type(stack[-1]) is list:
        stack[-1].extend(items)
    elif kind in ("SETITEM", "SETITEMS") and type(stack[-1]) is dict:
        stack[-1].update(paired(items))
    elif kind == "STACK_GLOBAL":
        stack.append(known(" ".join(items)))
    elif kind == "REDUCE" and type(items[0]) is Name and type(items[1]) is tuple:
        stack.append(call(*items, encode))
    elif kind == "BUILD" and type(stack[-1]) is Array and len(items[0]) == 5:
        _, shape, dtype, by_columns, data = items[0]
        stack[-1].fill(data, shape, dtype, "F" if by_columns else "C")
    elif not (kind == "BUILD" and stack[-1] is UINT8):         # its byte order: it has none
        raise ValueError(f"holds a {kind} that no CIFAR batch does")


def call(name, arguments, encode):
    """What the function of this name would have made."""
    if name == "encode" and type(arguments[0]) is str:
        return encode(arguments[0])
    if name == "_reconstruct":
        return Array()
    if name == "_frombuffer":
        data, dtype, shape, order = arguments
        return Array().fill(data, shape, dtype, {"C": "C", "F": "F"}[order])
    if name == "dtype" and arguments[0] in ("u1", b"u1"):
        return UINT8
    raise ValueError(f"holds a numpy.{name} that is no array of uint8, which no CIFAR batch does")


def paired(items):
    """The dict of keys and values in turn."""
    if not {type(key) for key in items[::2]} <= {bytes, str}:  # the hash of nested tuples could take for ever
        raise ValueError("holds keys that are no text, which no CIFAR batch does")
    return dict(zip(items[::2], items[1::2], strict=True))
