"""mma.sync, the matrix product of a warp, and ldmatrix and stmatrix, which move its operands to and from shared
memory."""
import numpy as np
from arithmetic import from_bfloat16, writer
from ptx import Unsupported, Vector

LANE = np.arange(32)
ROW, COLUMN_PAIR = LANE // 4, LANE % 4          # of a lane in an 8 × 8 fragment
SHAPES = {"m16n8k16.bf16", "m16n8k16.f16", "m16n8k8.tf32", "m16n8k8.bf16", "m16n8k8.f16", "m16n8k4.tf32"}


def decode(words, kind):
    """Return the numbers of 32-bit words as float64: two per word for half types, one for TF32, whose last 13
    bits are cut off."""
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    halves = np.ascontiguousarray(words).view(np.uint16)
    return (halves.view(np.float16) if kind == "f16" else from_bfloat16(halves)).astype(np.float64)


def matrix_shape(instruction):
    """Return (number of 8 × 8 matrices, whether they are transposed) of ldmatrix and stmatrix."""
    known = {"ldmatrix", "stmatrix", "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "b16",
             "shared::cta"}
    if set(instruction.parts) - known:
        raise Unsupported(instruction.text)
    count = next(int(part[1]) for part in instruction.parts if part in ("x1", "x2", "x4"))
    return count, "trans" in instruction.parts


class MatrixRows:
    """The rows of 16 bytes in shared memory that an ldmatrix or stmatrix of the active warps accesses."""

    def __init__(self, machine, address, count, registers, mask):
        warps = np.arange(machine.lanes // 32)
        if mask is not None:
            warps = warps[mask.reshape(-1, 32)[:, 0]]
        self.lanes = warps[:, None] * 32 + LANE
        addresses = machine.wide(address(registers)).reshape(-1, 32)[warps, :8 * count]
        lanes = self.lanes[:, :1].repeat(8 * count, 1).ravel()
        self.where = machine.program[lanes], machine.warp[lanes], addresses.ravel()


def build_ldmatrix(machine, instruction):
    """Return the function of ldmatrix."""
    count, transposed = matrix_shape(instruction)
    to, place = instruction.operands
    writes = [writer(x) for x in (to.parts if isinstance(to, Vector) else (to,))]
    address = machine.address(place)

    def load(registers, mask):
        rows = MatrixRows(machine, address, count, registers, mask)
        words = machine.shared.load(*rows.where, 4, 4, instruction.text)
        found = words.reshape(-1, count, 32)                       # a matrix: 8 rows of 4 words
        if transposed:
            halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
            low, high = (halves[:, :, 2 * COLUMN_PAIR + i, ROW].astype(np.uint32) for i in (0, 1))
            found = low | high << np.uint32(16)
        for i, write in enumerate(writes):
            write(registers, machine.spread(found[:, i].ravel(), rows.lanes.ravel()), mask)
    return load


def build_stmatrix(machine, instruction):
    """Return the function of stmatrix."""
    count, transposed = matrix_shape(instruction)
    place, source = instruction.operands
    source = source.parts if isinstance(source, Vector) else (source,)
    address = machine.address(place)

    def store(registers, mask):
        rows = MatrixRows(machine, address, count, registers, mask)
        words = np.stack([machine.wide(registers[x.index])[rows.lanes] for x in source], 1)
        if transposed:
            halves = np.empty((len(words), count, 8, 8), np.uint16)
            halves[:, :, 2 * COLUMN_PAIR, ROW] = words & np.uint32(0xFFFF)
            halves[:, :, 2 * COLUMN_PAIR + 1, ROW] = words >> np.uint32(16)
            words = halves.reshape(len(words), count, 64).view(np.uint32)
        machine.shared.store(*rows.where, words.reshape(-1, 4), instruction.text)
    return store


def build_mma(machine, instruction):
    """Return the function of mma.sync. Sums are in float64 and rounded once."""
    parts = instruction.parts
    shape, kind = parts[3], parts[-2]
    if parts[4:7] != ["row", "col", "f32"] or f"{shape}.{kind}" not in SHAPES or parts[-1] != "f32":
        raise Unsupported(instruction.text)
    d, a, b, c = (operand.parts for operand in instruction.operands)
    writes = [writer(x) for x in d]

    def multiply(registers, mask):
        warps = machine.lanes // 32

        def fragments(operands):
            """Return (warps, 8 rows, numbers) of 8 rows whose words are spread over operands."""
            words = [machine.wide(registers[x.index]).reshape(warps, 8, 4) for x in operands]
            return decode(np.concatenate(words, 2), kind)

        upper_and_lower = np.concatenate([fragments(a[0::2]), fragments(a[1::2])], 1)
        sums = (upper_and_lower @ fragments(b).transpose(0, 2, 1)).reshape(warps, 2, 8, 4, 2)
        for i, write in enumerate(writes):
            total = sums[:, i // 2, :, :, i % 2].ravel() + machine.wide(registers[c[i].index].view(np.float32))
            write(registers, total.astype(np.float32), mask)
    return multiply
