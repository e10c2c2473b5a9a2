"""Instructions that compute a lane's result from its own registers: add, fma, cvt, setp, selp, prmt, ...

A register is an array of unsigned integers with one entry per lane, or one entry if all lanes are equal.
Floats are views of their bits. An array is never changed in place.
"""
import numpy as np
from ptx import UNUSED, Number, Register, Symbol, Unsupported, Vector

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}            # by bytes
TYPES = {"b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
         "f16": np.float16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
         "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64}
FLOATS = "f16", "f32", "f64"

# ── operands ────────────────────────────────────────────────────────────────────────────────────────────────


def reader(operand, kind, machine):
    """Return a function of the registers that gives an operand as a type of TYPES, or as "pred"."""
    if not isinstance(operand, Register):
        constant = constant_of(operand, kind, machine)
        return lambda registers: constant
    at = operand.index
    if kind == "pred" or TYPES[kind] == UNSIGNED.get(operand.size):
        return lambda registers: registers[at]
    dtype = np.dtype(TYPES[kind])
    if dtype.itemsize > operand.size:
        raise Unsupported(f"a register of {operand.size} bytes read as {kind}")
    if dtype.itemsize < operand.size:                          # the low bytes
        narrow = UNSIGNED[dtype.itemsize]
        return lambda registers: registers[at].astype(narrow).view(dtype)
    return lambda registers: registers[at].view(dtype)


def constant_of(operand, kind, machine):
    """Return an operand that is not a register as an array."""
    if isinstance(operand, Number) and kind == "pred":
        return np.array([bool(operand.bits)])
    dtype = np.dtype(TYPES[kind])
    unsigned = UNSIGNED[dtype.itemsize]
    if isinstance(operand, Number):
        return np.array([operand.bits & (1 << 8 * dtype.itemsize) - 1], unsigned).view(dtype)
    if isinstance(operand, Symbol):
        return machine.symbol(operand.name).astype(unsigned).view(dtype)
    raise Unsupported(f"operand {operand}")


def writer(operand):
    """Return a function (registers, value, mask) that stores a value; mask None means all lanes."""
    if operand == UNUSED:
        return lambda registers, value, mask: None
    at, dtype = operand.index, np.dtype(UNSIGNED.get(operand.size, np.bool_))

    def write(registers, value, mask):
        if value.dtype.itemsize < dtype.itemsize:              # extend integers with their sign
            value = value if value.dtype.kind in "iu" else value.view(UNSIGNED[value.dtype.itemsize])
            value = value.astype(dtype)
        value = value.view(dtype)
        registers[at] = value if mask is None else np.where(mask, value, registers[at])
    return write


# ── floats ──────────────────────────────────────────────────────────────────────────────────────────────────


def flush(x):
    """Replace subnormal float32 numbers by zeros of the same sign."""
    return np.where(np.abs(x) < np.float32(2.0 ** -126), np.copysign(np.float32(0), x), x)


def fma(a, b, c):
    """Return a · b + c in float32. The product is exact in float64; the sum is rounded twice, which matters
    in one of 2²⁹ cases."""
    if a.dtype != np.float32:
        raise Unsupported("fma of another type than float32")
    return (a.astype(np.float64) * b + c).astype(np.float32)


def in_double(function):
    """Return a float32 function that computes in float64 and rounds once."""
    return lambda a: function(a.astype(np.float64)).astype(np.float32)


def to_bfloat16(x):
    """Round float32 to nearest even; return the upper 16 bits."""
    bits = x.view(np.uint32)
    high = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), high).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_half(x):
    return x.astype(np.float16).view(np.uint16)


def pack_bfloat16(high, low):
    return to_bfloat16(low).astype(np.uint32) | to_bfloat16(high).astype(np.uint32) << np.uint32(16)


def pack_half(high, low):
    return to_half(low).astype(np.uint32) | to_half(high).astype(np.uint32) << np.uint32(16)


# ── integers ────────────────────────────────────────────────────────────────────────────────────────────────


def divide(a, b):
    """Divide integers, rounding towards zero."""
    b = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return a // b
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def remainder(a, b):
    return a - divide(a, b) * b


def doubled(a):
    """Return integers in a type of twice as many bytes."""
    return a.astype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")


def multiply_wide(a, b):
    return doubled(a) * doubled(b)


def multiply_add(a, b, c):
    return a * b + c


def multiply_wide_add(a, b, c):
    return doubled(a) * doubled(b) + c


def shift_left(a, by):
    wide = a.dtype.itemsize * 8
    return np.where(by >= wide, a.dtype.type(0), a << (by & np.uint32(wide - 1)).astype(a.dtype))


def shift_right(a, by):
    wide = a.dtype.itemsize * 8
    shifted = a >> np.minimum(by, np.uint32(wide - 1)).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by >= wide, a.dtype.type(0), shifted)


def extract_bits(a, position, length):
    """Compute bfe: `length` bits of a from a position on, with their sign if a is signed."""
    position = np.minimum(position & np.uint32(255), np.uint32(63)).astype(np.uint64)
    length = np.minimum(length & np.uint32(255), np.uint32(32)).astype(np.uint64)
    mask = (np.uint64(1) << length) - np.uint64(1)
    field = a.astype(np.int64).view(np.uint64) >> position & mask
    if a.dtype.kind == "i":
        sign = np.uint64(1) << np.maximum(length, np.uint64(1)) - np.uint64(1)
        field = np.where(length == 0, np.uint64(0), (field ^ sign) - sign)
    return field.astype(np.uint32)


def select(a, b, predicate):
    return np.where(predicate, a, b)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────

# opcodes without type and without modifiers that change only the precision
FLOAT_OPERATIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": fma, "neg": np.negative,
    "abs": np.abs, "max": np.fmax, "min": np.fmin, "max.NaN": np.maximum, "min.NaN": np.minimum,
    "sqrt": np.sqrt, "ex2": in_double(np.exp2), "lg2": in_double(np.log2), "selp": select}
INTEGER_OPERATIONS = {
    "add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "mul.wide": multiply_wide,
    "mad.lo": multiply_add, "mad.wide": multiply_wide_add, "div": divide, "rem": remainder,
    "neg": np.negative, "abs": np.abs, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not, "shl": shift_left, "shr": shift_right,
    "bfe": extract_bits, "selp": select}
PREDICATE_OPERATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
                        "not": np.logical_not}
CONVERSIONS = {
    "cvt.rn.bf16.f32": to_bfloat16, "cvt.rn.f16.f32": to_half, "cvt.rn.bf16x2.f32": pack_bfloat16,
    "cvt.rn.f16x2.f32": pack_half, "cvt.f32.bf16": from_bfloat16}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
               "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
               "hs": np.greater_equal}


def find_operation(opcode):
    """Return (function of arrays, type of the operands) of an opcode, or raise Unsupported."""
    name, *flags, kind = opcode.split(".")
    if name == "cvt":
        return find_conversion(opcode)
    if kind == "pred":
        table = PREDICATE_OPERATIONS
    else:
        table = FLOAT_OPERATIONS if kind in FLOATS else INTEGER_OPERATIONS
    if kind in FLOATS:
        flags = [flag for flag in flags if flag not in ("rn", "full", "approx", "ftz")]
    function = table.get(".".join([name, *flags]))
    if function is None:
        raise Unsupported(opcode)
    if "ftz" in opcode.split("."):
        return lambda *x: flush(function(*map(flush, x))), kind
    return function, kind


def find_conversion(opcode):
    """Return (function of arrays, type of the operands) of a cvt."""
    *flags, to, source = opcode.split(".")[1:]
    if opcode in CONVERSIONS:
        return CONVERSIONS[opcode], "u16" if source == "bf16" else source
    floats = (to in FLOATS) + (source in FLOATS)
    if {to, source} <= set(TYPES) and (flags == ["rn"] and to in FLOATS or not flags and floats != 1):
        return lambda a: a.astype(TYPES[to]), source
    raise Unsupported(opcode)


# ── instructions ────────────────────────────────────────────────────────────────────────────────────────────


def build(instruction, machine):
    """Return the function (registers, mask) that executes an instruction."""
    name, *_, kind = instruction.parts
    to, *operands = instruction.operands
    if name in ("mov", "cvta"):
        return build_move(kind, to, operands[0], machine)
    if name == "setp":
        return build_comparison(instruction, machine)
    function, kind = find_operation(instruction.opcode)
    types = [kind] * len(operands)
    if name in ("shl", "shr", "bfe"):
        types[1:] = ["u32"] * len(types[1:])
    elif name == "selp":
        types[2] = "pred"
    elif instruction.opcode.startswith("mad.wide"):
        types[2] = kind[0] + str(2 * int(kind[1:]))
    reads = [reader(operand, of, machine) for operand, of in zip(operands, types)]
    write = writer(to)
    return lambda registers, mask: write(registers, function(*[read(registers) for read in reads]), mask)


def build_move(kind, to, source, machine):
    """Return the function of a mov, which may join registers into a wider one or take one apart."""
    if isinstance(source, Vector):
        bits, wide, write = 8 * to.size // len(source.parts), UNSIGNED[to.size], writer(to)
        reads = [reader(part, f"b{bits}", machine) for part in source.parts]

        def join(registers, mask):
            found = wide(0)
            for i, read in enumerate(reads):
                found = found | read(registers).astype(wide) << wide(bits * i)
            write(registers, found, mask)
        return join
    if isinstance(to, Vector):
        bits = 8 * source.size // len(to.parts)
        narrow, wide, writes = UNSIGNED[bits // 8], UNSIGNED[source.size], [writer(x) for x in to.parts]

        def take_apart(registers, mask):
            for i, write in enumerate(writes):
                write(registers, (registers[source.index] >> wide(bits * i)).astype(narrow), mask)
        return take_apart
    read, write = reader(source, kind, machine), writer(to)
    return lambda registers, mask: write(registers, read(registers), mask)


def compare_floats(name, a, b):
    """Compare floats. Names ending with u are also true for NaN."""
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if name not in COMPARISONS:
        return COMPARISONS[name.removesuffix("u")](a, b) | unordered
    return COMPARISONS[name](a, b) & ~unordered


def build_comparison(instruction, machine):
    """Return the function of setp.name[.combine].type p, a, b[, c]."""
    name, *combine, kind = instruction.parts[1:]
    if combine not in ([], ["and"], ["or"], ["xor"]):
        raise Unsupported(instruction.text)
    to, *operands = instruction.operands
    reads = [reader(x, of, machine) for x, of in zip(operands, (kind, kind, "pred"))]
    write = writer(to)

    def compare(registers, mask):
        a, b, *others = [read(registers) for read in reads]
        found = compare_floats(name, a, b) if kind in FLOATS else COMPARISONS[name](a, b)
        write(registers, PREDICATE_OPERATIONS[combine[0]](found, *others) if combine else found, mask)
    return compare
