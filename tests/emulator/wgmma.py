"""wgmma: asynchronous matrix products of four warps. Matrix descriptors point at operands in shared memory.

The sums are computed when a product is issued, in float64, and rounded once. Their registers hold a NaN until
the program has waited for the product. Until then its operands must not change.
"""
import re
from typing import NamedTuple

import numpy as np
from arithmetic import reader
from asynchronous import swizzle
from ptx import Number, Unsupported, Vector
from tensor_cores import decode

NOT_READY = np.array([0xFFC0FFEE], np.uint32)
SWIZZLE_BYTES = {0: 0, 1: 128, 2: 64, 3: 32}         # per swizzle mode of a matrix descriptor
OPCODE = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(bf16|f16|tf32)\.\3")


class Operand(NamedTuple):
    """Operand of a product in shared memory: rows × k numbers."""
    read: object             # function of the registers: its matrix descriptor
    rows: int
    k: int
    kind: str
    transposed: bool
    text: str


class Read(NamedTuple):
    """A product that reads shared memory until it is waited for."""
    group: int               # of four warps
    at: np.ndarray           # indices of the bytes, in steps of 16
    number: int              # of the commit group


class Products:
    """The products that have been issued and not been waited for."""

    def __init__(self, machine):
        self.machine, self.reads = machine, []
        self.hidden = {}     # {register: (values, commit group of each lane or −1)}
        self.committed = np.zeros(machine.lanes // 128 + 1, np.int64)          # commit groups of each group

    def build(self, instruction):
        """Return the function of an instruction whose name begins with wgmma."""
        opcode, found = instruction.opcode, OPCODE.fullmatch(instruction.opcode)
        if self.machine.threads % 128:
            raise Unsupported("wgmma by fewer than four warps")
        if opcode == "wgmma.fence.sync.aligned":
            return lambda registers, mask: None
        if opcode == "wgmma.commit_group.sync.aligned":
            return lambda registers, mask: self.commit(mask)
        if opcode == "wgmma.wait_group.sync.aligned":
            left = instruction.operands[0].bits
            return lambda registers, mask: self.wait(left, mask)
        if not found:
            raise Unsupported(instruction.text)
        return self.build_product(instruction, int(found[1]), int(found[2]), found[3])

    def groups(self, mask):
        """Return the numbers of the groups of four warps in a mask."""
        count = self.machine.lanes // 128
        return np.arange(count) if mask is None else np.flatnonzero(mask.reshape(-1, 128)[:, 0])

    def commit(self, mask):
        self.committed[self.groups(mask)] += 1

    def of_lanes(self, of_groups):
        """Return an array with one entry per group as one with an entry per lane."""
        return of_groups.repeat(128)[:self.machine.lanes]

    def wait(self, left, mask):
        """Wait until at most `left` commit groups are unfinished."""
        shared, waiting = self.machine.shared, np.zeros(len(self.committed), bool)
        waiting[self.groups(mask)] = True
        busy, still = shared.busy.reshape(-1, 16), []
        for read in self.reads:
            if not waiting[read.group] or read.number >= self.committed[read.group] - left:
                still.append(read)
                continue
            busy[read.at // 16] = False
            if shared.check:
                epoch = shared.epoch[self.machine.program[read.group * 128]]
                shared.read.reshape(-1, 16)[read.at // 16] = epoch * 64 + 63
        for read in still:
            busy[read.at // 16] = True
        self.reads = still
        self.reveal(self.of_lanes(waiting), self.of_lanes(self.committed) - left)

    def reveal(self, waiting, before):
        """Write the hidden sums of commit groups below a number to the registers of waiting lanes."""
        registers = self.machine.registers
        for at, (values, number) in list(self.hidden.items()):
            done = waiting & (number >= 0) & (number < before)
            if done.any():
                registers[at] = np.where(done, values, registers[at])
                self.hidden[at] = values, np.where(done, -1, number)
            if (self.hidden[at][1] < 0).all():
                del self.hidden[at]

    def current(self, at):
        """Return a register as the next product finds it: with the sums that are still hidden."""
        values, number = self.hidden.get(at, (0, np.array([-1])))
        return np.where(number >= 0, values, self.machine.wide(self.machine.registers[at]))

    def hide(self, at, values, lanes, mask):
        """Store sums that nobody may read yet."""
        registers, mask = self.machine.registers, self.machine.as_mask(mask)
        old, old_number = self.hidden.get(at, (np.uint32(0), np.array([-1])))
        values = np.where(mask, self.machine.spread(values, lanes), old)
        self.hidden[at] = values, np.where(mask, self.of_lanes(self.committed), old_number)
        registers[at] = np.where(mask, NOT_READY, registers[at])

    def build_product(self, instruction, n, k, kind):
        """Return the function of wgmma.mma_async."""
        machine, text = self.machine, instruction.text
        d, a, b, keep, *immediates = instruction.operands
        scales, transposed = immediates[:2], [bool(x.bits) for x in immediates[2:]]
        if scales != [Number(1), Number(1)] or len(d.parts) != n // 2:
            raise Unsupported(text)
        keep, a_in_registers = reader(keep, "pred", machine), isinstance(a, Vector)
        b = Operand(reader(b, "b64", machine), n, k, kind, any(transposed[-1:]), text)
        if not a_in_registers:
            a = Operand(reader(a, "b64", machine), 64, k, kind, any(transposed[:1]), text)

        def multiply(registers, mask):
            groups = self.groups(mask)
            columns = self.matrix(b, registers, groups)
            rows = self.fragments(a, kind, groups) if a_in_registers else self.matrix(a, registers, groups)
            sums = rows @ columns.transpose(0, 2, 1)                        # (groups, 64, n)
            # to (register, lane): warp, upper or lower 8 rows, row, block of 8 columns, column pair, column
            sums = sums.reshape(-1, 4, 2, 8, n // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5).reshape(n // 2, -1)
            lanes = (groups[:, None] * 128 + np.arange(128)).ravel()
            kept = machine.wide(keep(registers))[lanes]
            old = np.stack([self.current(x.index)[lanes] for x in d.parts]).view(np.float32)
            total = (sums + np.where(kept, old, np.float32(0))).astype(np.float32).view(np.uint32)
            for x, values in zip(d.parts, total):
                self.hide(x.index, values, lanes, mask)
        return multiply

    def fragments(self, a, kind, groups):
        """Return the (groups, 64, k) numbers of an operand in registers."""
        registers, machine = self.machine.registers, self.machine
        words = np.stack([machine.wide(registers[x.index]).reshape(-1, 128)[groups] for x in a.parts], 1)
        # (groups, block of 4 words, upper or lower 8 rows, warp, row, word)
        words = words.reshape(len(groups), 2, 2, 4, 8, 4).transpose(0, 3, 2, 4, 1, 5)
        return decode(words.reshape(len(groups), 64, 8), kind)

    def matrix(self, operand, registers, groups):
        """Return the (groups, rows, k) numbers of an Operand."""
        machine, shared = self.machine, self.machine.shared
        descriptor = machine.wide(operand.read(registers)).reshape(-1, 128)[groups, 0]
        addresses = matrix_addresses(descriptor, operand)
        programs = machine.program[groups * 128]
        at = shared.place(programs[:, None, None], addresses, 16, operand.text)
        self.check_reads(at, groups, programs, operand.text)
        words = shared.views[4].reshape(-1, 4)[at // 16]                    # (groups, lines, chunks, 4)
        numbers = decode(words.reshape(len(groups), at.shape[1], -1), operand.kind)
        return numbers.transpose(0, 2, 1) if operand.transposed else numbers

    def check_reads(self, at, groups, programs, text):
        """Check and remember the reads of a product. Of each 16 bytes the marks of the first one count."""
        shared = self.machine.shared
        if shared.pending[at].any():
            shared.report("race: a product reads before the copy that writes was waited for", text)
        if not shared.known[at].all():
            shared.report("a product reads shared memory that nobody wrote", text)
        if shared.unfenced[at].any():
            shared.report("race: a product reads what threads wrote without fence.proxy.async", text)
        if shared.check and (shared.wrote[at] >= shared.epoch[programs][:, None, None] * 64).any():
            shared.report("race: a product reads what was written since the last barrier", text)
        for group, places in zip(groups.tolist(), at):
            self.reads.append(Read(group, places.ravel(), self.committed[group]))
            shared.busy.reshape(-1, 16)[places.ravel() // 16] = True


def matrix_addresses(descriptor, operand):
    """Return the addresses (groups, lines, chunks of 16 bytes) that matrix descriptors point at.

    A line is a row of the operand, or a column if it is transposed.
    """
    def field(low, bits):
        return (descriptor >> np.uint64(low) & np.uint64((1 << bits) - 1)).astype(np.int64)

    start, leading, stride = (field(low, 14)[:, None, None] << 4 for low in (0, 16, 32))
    modes = np.unique(field(62, 2))
    if field(49, 3).any() or len(modes) > 1:
        raise Unsupported("a matrix descriptor with a base offset, or two swizzle modes at once")
    span = SWIZZLE_BYTES[int(modes[0])]
    lines, chunks = (operand.k, operand.rows // 8) if operand.transposed else (operand.rows, 2)
    line, chunk = np.arange(lines)[:, None], np.arange(chunks)
    if span:
        per_span = span // 16
        offset = line // 8 * stride + line % 8 * span + chunk % per_span * 16 + chunk // per_span * leading
    elif operand.transposed:
        offset = chunk * stride + line % 8 * 16 + line // 8 * leading
    else:
        offset = line // 8 * stride + line % 8 * 16 + chunk * leading
    return swizzle(start + offset, span)
