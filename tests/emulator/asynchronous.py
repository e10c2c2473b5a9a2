"""Copies that run while threads do something else: cp.async, and bulk tensor copies (TMA) with mbarrier.

A copy is done as late as possible: when it is waited for. Whoever reads earlier finds old data and causes a
finding.
"""
import numpy as np
import torch
from arithmetic import reader, writer
from memory import Fault, in_groups
from ptx import UNUSED, Number, Unsupported, Vector

SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}         # per swizzle mode of a tensor map
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
BULK_COPIES = {f"cp.async.bulk.tensor.2d.shared::{space}.global.mbarrier::complete_tx::bytes"
               for space in ("cta", "cluster")}


class Copies:
    """cp.async: the copies of each thread, in commit groups."""

    def __init__(self, machine):
        self.machine = machine
        self.unfinished = []                   # (lanes, destinations, values, commit group of each lane)
        self.committed = np.zeros(machine.lanes, np.int64)

    def build(self, instruction):
        """Return the function of an instruction whose name begins with cp.async."""
        opcode, parts = instruction.opcode, instruction.parts
        if opcode == "cp.async.commit_group":
            return lambda registers, mask: self.commit(mask)
        if opcode == "cp.async.wait_group":
            left = instruction.operands[0].bits
            return lambda registers, mask: self.wait(left, mask)
        if parts[2] in ("ca", "cg") and parts[3:5] == ["shared", "global"] and \
                all(part.startswith("L2") for part in parts[5:]):
            return self.build_copy(instruction)
        raise Unsupported(instruction.text)

    def commit(self, mask):
        self.committed[self.machine.active(mask)] += 1

    def build_copy(self, instruction):
        """Return the function of a copy of `size` bytes, of which `taken` come from global memory; the rest
        are zeros."""
        machine, text = self.machine, instruction.text
        to, source, size, *taken = instruction.operands
        to, source, size = machine.address(to), machine.address(source), size.bits
        taken = reader(taken[0] if taken else Number(size), "u32", machine)

        def copy(registers, mask):
            lanes, shared = machine.active(mask), machine.shared
            counts, sources = machine.wide(taken(registers))[lanes], machine.wide(source(registers))[lanes]
            programs, values = machine.grid_program[lanes], np.zeros((len(lanes), size), np.uint8)
            if (sources[counts > 0] & np.uint64(size - 1)).any():
                raise Fault(f"misaligned source: {text}")
            full, load = counts == size, machine.memory.load
            if full.any():
                found = load(sources[full], 4, size // 4, programs[full], text)
                values[full] = np.ascontiguousarray(found).view(np.uint8)
            for i in range(size):                              # of a part of the bytes
                some = ~full & (counts > i)
                if some.any():
                    values[some, i] = load(sources[some] + np.uint64(i), 1, 1, programs[some], text)[:, 0]
            at = shared.place(machine.program[lanes], machine.wide(to(registers))[lanes], size, text)
            shared.check_write(at, size, machine.program[lanes], machine.warp[lanes], text)
            in_groups(shared.pending, size)[at // size] = True
            self.unfinished.append((lanes, at, values.view(np.uint32), self.committed[lanes]))
        return copy

    def wait(self, left, mask):
        """Do the copies of all commit groups but the last `left` ones."""
        machine, shared, here = self.machine, self.machine.shared, self.machine.as_mask(mask)
        still = []
        for lanes, at, values, group in self.unfinished:
            done = here[lanes] & (group < self.committed[lanes] - left)
            if done.any():
                size, place = values.shape[1] * 4, at[done]
                in_groups(shared.pending, size)[place // size] = False
                shared.put(place, values[done])
                in_groups(shared.unfenced, size)[place // size] = True
                shared.mark_written(place, size, machine.program[lanes[done]], machine.warp[lanes[done]])
            if not done.all():
                still.append((lanes[~done], at[~done], values[~done], group[~done]))
        self.unfinished = still


def swizzle(addresses, span):
    """Return where the bytes of these addresses are if rows of `span` bytes are swizzled."""
    return addresses ^ ((addresses >> 7 & span // 16 - 1) << 4) if span else addresses


class TensorMap:
    """The tensor map that the driver would make of Triton's descriptor; Fault if it would refuse."""

    def __init__(self, descriptor, about):
        base, shape, strides = descriptor.base, list(descriptor.shape), list(descriptor.strides)
        size, self.span, self.block = about["elem_size"], SWIZZLE_BYTES[about["swizzle"]], about["block_size"]
        row_bytes = self.block[1] * size
        wrong = {
            "rank": len(shape) != 2 or len(self.block) != 2,
            "base": base.data_ptr() % 16,
            "stride": strides[0] * size % 16 or strides[1] != 1,
            "stride below the row": strides[0] < shape[1] and shape[0] > 1,
            "block": max(self.block) > 256 or row_bytes % 16,
            "block wider than its swizzle": self.span and row_bytes > self.span,
            "padding": descriptor.padding != "zero" or about["fp4_padded"],
            "element": base.element_size() != size}
        if any(wrong.values()):
            raise Fault(f"tensor map: {[name for name, value in wrong.items() if value]}: {descriptor}")
        self.rows = base.detach().as_strided(shape, strides).view(INTEGERS[size]).numpy()

    def box(self, x, y):
        """Return the bytes of the block at column x of row y, with zeros outside of the tensor."""
        out = np.zeros(self.block, self.rows.dtype)
        top, left = max(y, 0), max(x, 0)
        inside = self.rows[top:max(y + self.block[0], 0), left:max(x + self.block[1], 0)]
        out[top - y:top - y + inside.shape[0], left - x:left - x + inside.shape[1]] = inside
        return out.view(np.uint8)


class Barrier:
    """An mbarrier object."""

    def __init__(self, arrivals):
        self.arrivals, self.missing, self.bytes, self.phase = arrivals, arrivals, 0, 0
        self.copies = []                       # (destinations, values) that arrive at this barrier
        self.waited = False                    # somebody has waited for these copies in vain

    def complete_phase(self):
        """Begin the next phase if all arrivals and bytes are there."""
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.arrivals, self.phase + 1


class Barriers:
    """The mbarrier objects by program and address, the bulk copies that arrive at them, and fences."""

    def __init__(self, machine):
        self.machine, self.barriers = machine, {}

    def build(self, instruction):
        """Return the function of an instruction for barriers, fences or bulk copies."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode.startswith("fence.proxy.async"):
            return lambda registers, mask: self.fence(mask)
        if opcode.startswith(("fence.", "membar.", "prefetch.tensormap")):
            return lambda registers, mask: None
        if opcode in BULK_COPIES:
            return self.build_bulk_copy(instruction)
        name = opcode.split(".shared")[0]
        if name == "mbarrier.init":
            return self.for_each_lane(operands[0], lambda key: self.initialise(key, operands[1].bits))
        if name == "mbarrier.inval":
            return self.for_each_lane(operands[0], lambda key: self.barriers.pop(key))
        if name == "mbarrier.arrive.expect_tx" and operands[0] == UNUSED:
            expect = operands[2].bits
            return self.for_each_lane(operands[1], lambda key: self.arrive(key, expect, instruction.text))
        if name == "mbarrier.try_wait.parity":
            return self.build_wait(*operands)
        raise Unsupported(instruction.text)

    def for_each_lane(self, place, do):
        """Return a function that calls do((program, address of the barrier)) for each active lane."""
        machine, address = self.machine, self.machine.address(place)

        def run(registers, mask):
            lanes = machine.active(mask)
            addresses = machine.wide(address(registers))[lanes]
            machine.shared.place(machine.program[lanes], addresses, 8, "mbarrier")
            for key in zip(machine.program[lanes].tolist(), addresses.tolist()):
                do(key)
        return run

    def initialise(self, key, arrivals):
        self.barriers[key] = Barrier(arrivals)

    def find(self, key, text):
        if key not in self.barriers:
            raise Fault(f"there is no barrier: {text}")
        return self.barriers[key]

    def arrive(self, key, expect, text):
        """Arrive at a barrier, which then expects so many more bytes."""
        barrier = self.find(key, text)
        if barrier.missing == 0:
            raise Fault(f"one arrival too many: {text}")
        barrier.bytes += expect
        barrier.missing -= 1
        barrier.complete_phase()

    def build_wait(self, to, place, parity):
        """Return the function of mbarrier.try_wait.parity. It returns False if all lanes wait in vain."""
        machine, address, write = self.machine, self.machine.address(place), writer(to)
        parity = reader(parity, "u32", machine)

        def wait(registers, mask):
            lanes, done = machine.active(mask), np.zeros(machine.lanes, bool)
            keys = machine.program[lanes] << 32 | machine.wide(address(registers))[lanes].astype(np.int64)
            parities = machine.wide(parity(registers))[lanes]
            for key in np.unique(keys).tolist():
                barrier, some = self.find((key >> 32, key & 0xFFFFFFFF), "try_wait"), keys == key
                self.finish_copies(barrier)
                done[lanes[some]] = barrier.phase % 2 != parities[some]
            machine.asleep[lanes[~done[lanes]]] = True
            write(registers, done, mask)
            return bool(done[lanes].any())
        return wait

    def finish_copies(self, barrier):
        """Do the copies of a barrier, but only when they are waited for a second time: a kernel that does not
        repeat a wait in vain would go on without them."""
        shared = self.machine.shared
        if barrier.copies and not barrier.waited:
            barrier.waited = True
            return
        barrier.waited = False
        for place, values in barrier.copies:
            in_groups(shared.pending, 16)[place // 16] = False
            shared.put(place, values)
            in_groups(shared.unfenced, 16)[place // 16] = False
            if shared.check:
                in_groups(shared.wrote, 16)[place // 16] = 0
            barrier.bytes -= 16 * len(place)
        barrier.copies = []
        barrier.complete_phase()

    def build_bulk_copy(self, instruction):
        """Return the function of a copy of a tensor map's box to shared memory."""
        machine, text = self.machine, instruction.text
        to, source, barrier = instruction.operands
        coordinates = source.coordinates[0]
        if not isinstance(coordinates, Vector) or len(coordinates.parts) != 2:
            raise Unsupported(text)
        reads = [machine.address(place) for place in (to, source, barrier)]
        reads += [reader(part, "s32", machine) for part in coordinates.parts]

        def copy(registers, mask):
            lanes = machine.active(mask)
            values = [machine.wide(read(registers))[lanes].tolist() for read in reads]
            for one in zip(lanes.tolist(), *values):
                self.issue(*one, text)
        return copy

    def issue(self, lane, address, map_address, barrier, column, row, text):
        """Issue the bulk copy of one lane."""
        machine, shared = self.machine, self.machine.shared
        program = machine.program[[lane]]
        if map_address not in machine.maps:
            raise Fault(f"there is no tensor map at {hex(map_address)}: {text}")
        if address % 128:
            raise Fault(f"bulk copy to {address}, which is not a multiple of 128: {text}")
        tensor_map = machine.maps[map_address]
        values = tensor_map.box(column, row).reshape(-1, 16).view(np.uint32)
        addresses = swizzle(address + 16 * np.arange(len(values)), tensor_map.span)
        at = shared.place(program, addresses, 16, text)
        shared.check_write(at, 16, program, machine.warp[[lane]], text)
        if shared.unfenced[at].any():
            machine.report("race: a bulk copy to what threads wrote without fence.proxy.async", text)
        in_groups(shared.pending, 16)[at // 16] = True
        if shared.check:
            in_groups(shared.wrote, 16)[at // 16] = 0
        self.find((int(program[0]), barrier), text).copies.append((at, values))

    def fence(self, mask):
        """Let bulk copies and products see what threads have written."""
        shared = self.machine.shared
        for program in np.unique(self.machine.program[self.machine.active(mask)]):
            shared.unfenced[program * shared.stride:(program + 1) * shared.stride] = False
