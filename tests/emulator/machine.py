"""Execute a parsed kernel: a few programs of the grid at a time, all their threads in step where they agree.

A lane is a thread of a program; the lanes of all running programs lie side by side in arrays. The lanes that
are furthest behind in the text run next, until a branch parts them or they reach instructions where others
may wait. A barrier holds lanes until all lanes of their program arrive. An instruction of a whole warp, or of
a group of four warps, waits until all their lanes arrive.

A mask says which lanes execute an instruction; None means all.
"""
from typing import NamedTuple

import arithmetic
import numpy as np
from arithmetic import UNSIGNED, reader, writer
from asynchronous import Barriers, Copies, TensorMap
from memory import BASE, Fault, SharedMemory
from ptx import Address, Number, Pair, Symbol, Unsupported, Vector
from tensor_cores import build_ldmatrix, build_mma, build_stmatrix
from wgmma import Products

PARAMETERS = 1 << 60      # address of the first parameter in generic memory; each takes 256 bytes
GARBAGE = {0: False, 1: 0xFF, 2: 0xFFC1, 4: 0xFFC0DEAD, 8: 0xFFF8DEAD_FFC0DEAD}    # in registers, by size
SPACES = {"global", "shared", "shared::cta", "param"}
CACHE_HINTS = {"volatile", "relaxed", "weak", "nc", "ca", "cg", "cs", "lu", "cv", "gpu", "cta", "sys"}
PLAIN, BRANCH, BARRIER, EXIT = "plain", "branch", "barrier", "exit"


class Step(NamedTuple):
    kind: str             # one of the four above
    run: object           # function of (registers, mask)
    lanes: int = 1        # number of neighbouring lanes that must execute it together


class Machine:
    """Runs one launch.

    kernel         from ptx.parse
    values         by parameter name: bytes, or a TensorMap
    memory         a GlobalMemory that holds the tensors
    grid, threads  number of programs (x, y, z), and of threads of a program
    shared         bytes of shared memory of a program
    most_lanes     run at most so many lanes side by side, but at least one program
    check          look for races in shared memory
    """

    def __init__(self, kernel, values, memory, grid, threads, shared, most_lanes, check):
        self.kernel, self.memory, self.grid, self.threads = kernel, memory, grid, threads
        self.shared_size, self.most_lanes, self.check = shared, most_lanes, check
        self.values, self.addresses, self.maps = values, {}, {}
        self.report = memory.report
        if kernel.threads != threads:
            raise Fault(f"{threads} threads, but the kernel is for {kernel.threads}")
        for i, (name, value) in enumerate(values.items()):
            size = 128 if isinstance(value, TensorMap) else len(value)
            if size != kernel.parameters[name]:
                raise Fault(f"{name}: {size} bytes, but the kernel takes {kernel.parameters[name]}")
            self.addresses[name] = PARAMETERS + 256 * i
            if isinstance(value, TensorMap):
                self.maps[self.addresses[name]] = value

    def symbol(self, name):
        """Return the address of a parameter or of shared memory (one entry), or a special register."""
        (x, y, z), program = self.grid, self.grid_program
        special = {"%tid.x": self.all_lanes % self.threads, "%ctaid.x": program % x,
                   "%ctaid.y": program // x % y, "%ctaid.z": program // (x * y), "%nctaid.x": np.array([x]),
                   "%nctaid.y": np.array([y]), "%nctaid.z": np.array([z]), "global_smem": np.array([BASE])}
        if name not in special and name not in self.addresses:
            raise Unsupported(f"symbol {name}")
        return special[name] if name in special else np.array([self.addresses[name]])

    def wide(self, x):
        """Return a register with one entry per lane."""
        return x if len(x) == self.lanes else np.broadcast_to(x, self.lanes)

    def active(self, mask):
        """Return the indices of the lanes of a mask."""
        return self.all_lanes if mask is None else np.flatnonzero(mask)

    def as_mask(self, mask):
        return np.ones(self.lanes, bool) if mask is None else mask

    # ── execution ───────────────────────────────────────────────────────────────────────────────────────────

    def run(self):
        """Run all programs of the grid."""
        total, at_once = self.grid[0] * self.grid[1] * self.grid[2], max(1, self.most_lanes // self.threads)
        with np.errstate(all="ignore"):
            for first in range(0, total, at_once):
                self.run_programs(np.arange(first, min(first + at_once, total)))

    def run_programs(self, programs):
        """Run these programs side by side."""
        self.lanes = len(programs) * self.threads
        self.all_lanes = np.arange(self.lanes)
        self.grid_program = programs.repeat(self.threads)          # of each lane: its program in the grid,
        self.program = self.all_lanes // self.threads              # its program among those that run,
        self.warp = self.all_lanes % self.threads // 32            # and its warp in the program
        self.shared = SharedMemory(len(programs), self.shared_size, self.check, self.report)
        self.barriers, self.copies, self.products = Barriers(self), Copies(self), Products(self)
        self.registers = [np.full(1, GARBAGE[size], UNSIGNED.get(size, bool)) for size in self.kernel.sizes]
        self.steps = {}                                            # by index, built when they are reached
        self.pc = np.zeros(self.lanes, np.int64)                   # index of each lane's next instruction
        self.held = np.zeros(self.lanes, bool)                     # waits at a barrier
        self.asleep = np.zeros(self.lanes, bool)                   # waits until other lanes have moved on
        self.moved = True                                          # any lane since all were asleep
        while self.run_some_lanes():
            pass

    def run_some_lanes(self):
        """Run the lanes that are furthest behind for a while. Return False when all lanes have finished."""
        running = self.pc < len(self.kernel.code)
        ready = running & ~self.held & ~self.asleep
        if ready.any():
            at = int(self.pc[ready].min())
            mask = ready & (self.pc == at)
            self.advance(at, None if mask.all() else mask)
        elif self.asleep.any() and self.moved:
            self.asleep[:] = False
            self.moved = False
        elif running.any():
            raise Fault(f"deadlock: {self.kernel.code[int(self.pc[running].min())].text}")
        return running.any()

    def advance(self, at, mask):
        """Run the lanes of a mask from an instruction on until other lanes must be looked at."""
        start = at
        while at < len(self.kernel.code):
            if mask is not None and at != start and at in self.kernel.targets:
                break
            if at not in self.steps:
                self.steps[at] = self.build(self.kernel.code[at])
            step = self.steps[at]
            if step.kind == BRANCH:
                at = self.branch(step, at, mask)
                if at is None:
                    return
                continue
            if step.kind in (BARRIER, EXIT):
                self.pc[self.active(mask)] = at if step.kind == BARRIER else len(self.kernel.code)
                self.held[self.active(mask)] = step.kind == BARRIER
                self.release()
                self.moved = True
                return
            if step.lanes > 1 and mask is not None:
                mask = self.complete_groups(at, step.lanes, mask)
                if mask is None:
                    return
            # a wait in vain returns False, so that lanes which only wait are found to be in a deadlock
            self.moved |= step.run(self.registers, mask) is not False
            at += 1
        self.pc[self.active(mask)] = at

    def branch(self, step, at, mask):
        """Return the next instruction of the lanes of the mask; None: they part, or others are asleep."""
        target, taken = self.kernel.code[at].target, step.run(self.registers)
        among = taken[mask] if len(taken) > 1 and mask is not None else taken
        if among.all():
            if self.asleep.any():                              # a loop that waits must let the others run
                self.pc[self.active(mask)] = target
                return None
            return target
        if not among.any():
            return at + 1
        taken, here = self.wide(taken), self.as_mask(mask)
        self.pc[here & ~taken], self.pc[here & taken] = at + 1, target
        return None

    def complete_groups(self, at, size, mask):
        """Return the mask of the groups of `size` lanes that are complete, or None; the others wait."""
        whole = mask.reshape(-1, size).all(1).repeat(size)
        waiting = mask & ~whole
        self.pc[waiting], self.asleep[waiting] = at, True
        return whole if whole.any() else None

    def release(self):
        """Let programs go on all of whose lanes wait at a barrier or have finished."""
        held, pc = self.held.reshape(-1, self.threads), self.pc.reshape(-1, self.threads)
        finished = pc >= len(self.kernel.code)
        for i in np.flatnonzero((held | finished).all(1) & held.any(1)):
            barriers = {self.kernel.code[at].operands for at in set(pc[i][held[i]].tolist())}
            if len(barriers) > 1:
                raise Fault("the lanes of a program wait at different barriers")
            pc[i][held[i]] += 1
            held[i] = False
            self.shared.epoch[i] += 1

    # ── instructions ────────────────────────────────────────────────────────────────────────────────────────

    def build(self, instruction):
        """Return the Step of an instruction."""
        parts, guarded = instruction.parts, instruction.guard is not None
        if parts[0] == "bra":
            always = np.ones(1, bool)
            return Step(BRANCH, self.predicate(instruction) if guarded else lambda registers: always)
        if parts[0] in ("bar", "barrier") and "warp" not in parts:
            if guarded or parts[1] not in ("sync", "cta") or instruction.operands != (Number(0),):
                raise Unsupported(instruction.text)
            return Step(BARRIER, None)
        if parts[0] in ("ret", "exit") and not guarded:
            return Step(EXIT, None)
        together = self.build_together(instruction)
        if together is not None:
            if guarded:
                raise Unsupported(instruction.text)
            return Step(PLAIN, together, 128 if parts[0] == "wgmma" else 32)
        if parts[0] in ("ld", "st"):
            run = self.build_access(instruction)
        elif parts[:2] == ["cp", "async"] and "bulk" not in parts:
            run = self.copies.build(instruction)
        elif parts[0] in ("mbarrier", "fence", "membar", "prefetch", "cp"):
            run = self.barriers.build(instruction)
        else:
            run = arithmetic.build(instruction, self)
        return Step(PLAIN, self.guarded(run, self.predicate(instruction)) if guarded else run)

    def predicate(self, instruction):
        """Return a function of the registers that gives an instruction's guard."""
        at, negated = instruction.guard.index, instruction.negated
        return lambda registers: ~registers[at] if negated else registers[at]

    def guarded(self, run, predicate):
        """Return a function that runs an instruction for the lanes whose predicate is true."""
        def run_some(registers, mask):
            taken = self.wide(predicate(registers))
            taken = taken if mask is None else mask & taken
            if taken.any():
                return run(registers, None if taken.all() else taken)
            return None
        return run_some

    def build_access(self, instruction):
        """Return the function of ld and st."""
        parts, text = instruction.parts, instruction.text
        space = next((part for part in parts if part in SPACES), None)
        shape = [part for part in parts[1:-1]
                 if part != space and part not in CACHE_HINTS and not part.startswith(("L1", "L2"))]
        count = int(shape.pop()[1:]) if shape and shape[-1] in ("v2", "v4", "v8") else 1
        if shape or space is None:
            raise Unsupported(text)
        size = np.dtype(arithmetic.TYPES[parts[-1]]).itemsize
        if space == "param":
            return self.build_parameter(instruction, size)
        data, place = instruction.operands if parts[0] == "ld" else instruction.operands[::-1]
        data = data.parts if isinstance(data, Vector) else (data,)
        if len(data) != count:
            raise Unsupported(text)
        make = self.build_load if parts[0] == "ld" else self.build_store
        return make(data, self.address(place), size, space.startswith("shared"), text)

    def build_load(self, data, address, size, in_shared, text):
        """Return the function of ld from global or shared memory."""
        writes = [writer(x) for x in data]

        def load(registers, mask):
            lanes = self.active(mask)
            at = self.wide(address(registers))[lanes]
            if in_shared:
                found = self.shared.load(self.program[lanes], self.warp[lanes], at, size, len(writes), text)
            else:
                found = self.memory.load(at, size, len(writes), self.grid_program[lanes], text)
            for i, write in enumerate(writes):
                write(registers, self.spread(found[:, i], lanes), mask)
        return load

    def build_store(self, data, address, size, in_shared, text):
        """Return the function of st to global or shared memory."""
        reads = [reader(x, f"b{8 * size}", self) for x in data]

        def store(registers, mask):
            lanes = self.active(mask)
            at = self.wide(address(registers))[lanes]
            values = np.stack([self.wide(read(registers))[lanes] for read in reads], 1)
            if in_shared:
                self.shared.store(self.program[lanes], self.warp[lanes], at, values, text)
            else:
                self.memory.store(at, values, self.grid_program[lanes], text)
        return store

    def spread(self, values, lanes):
        """Return an array of all lanes that has these values in some lanes."""
        if len(lanes) == self.lanes:
            return np.ascontiguousarray(values)
        found = np.zeros(self.lanes, values.dtype)
        found[lanes] = values
        return found

    def address(self, place):
        """Return a function of the registers that gives the addresses of an operand [base + offset]."""
        if not isinstance(place, Address):
            raise Unsupported(f"address {place}")
        if isinstance(place.base, Symbol):
            constant = (self.symbol(place.base.name) + place.offset).astype(np.uint64)
            return lambda registers: constant
        at, size = place.base.index, place.base.size
        offset = UNSIGNED[size](place.offset & (1 << 8 * size) - 1)
        return lambda registers: registers[at] + offset if offset else registers[at]

    def build_parameter(self, instruction, size):
        """Return the function of ld.param."""
        to, place = instruction.operands
        value = self.values[place.base.name]
        if isinstance(to, Vector) or isinstance(value, TensorMap):
            raise Unsupported(instruction.text)
        value, write = np.frombuffer(value[place.offset:place.offset + size], UNSIGNED[size]), writer(to)
        return lambda registers, mask: write(registers, value, mask)

    # ── instructions of a whole warp ────────────────────────────────────────────────────────────────────────

    def build_together(self, instruction):
        """Return the function of an instruction that a whole warp or four warps execute together, or None."""
        parts = instruction.parts
        name = ".".join(parts[:2])
        if name == "bar.warp":
            return lambda registers, mask: None
        if name == "elect.sync":
            return self.build_elect(instruction.operands[0])
        if name == "shfl.sync":
            return self.build_shuffle(parts[2], instruction.operands)
        if name == "redux.sync":
            return self.build_redux(parts[2], parts[3], instruction.operands)
        if name == "mma.sync":
            return build_mma(self, instruction)
        if parts[0] == "ldmatrix":
            return build_ldmatrix(self, instruction)
        if parts[0] == "stmatrix":
            return build_stmatrix(self, instruction)
        return self.products.build(instruction) if parts[0] == "wgmma" else None

    def build_elect(self, pair):
        """Return the function of elect.sync: the first lane of each warp is elected."""
        write_lane, write_elected, first = writer(pair.first), writer(pair.second), self.all_lanes % 32 == 0

        def elect(registers, mask):
            write_lane(registers, np.zeros(1, np.uint32), mask)
            write_elected(registers, first, mask)
        return elect

    def build_shuffle(self, mode, operands):
        """Return the function of shfl.sync: read a register of another lane of the warp."""
        to, value, by, *whole_warp = operands
        if mode not in ("bfly", "idx") or whole_warp != [Number(31), Number(-1)] or isinstance(to, Pair):
            raise Unsupported(f"shfl.{mode} {operands}")
        value, by, write = reader(value, "b32", self), reader(by, "u32", self), writer(to)
        lane = self.all_lanes % 32

        def shuffle(registers, mask):
            source = self.wide(by(registers)).astype(np.int64) & 31
            source = (lane ^ source if mode == "bfly" else source) + self.all_lanes - lane
            write(registers, self.wide(value(registers))[source], mask)
        return shuffle

    def build_redux(self, operation, kind, operands):
        """Return the function of redux.sync: reduce a register over the lanes of a warp."""
        to, value, members = operands
        if operation not in ("min", "max", "add"):
            raise Unsupported(f"redux.{operation}")
        reduce = {"min": np.minimum, "max": np.maximum, "add": np.add}[operation].reduce
        value, members, write = reader(value, kind, self), reader(members, "s32", self), writer(to)

        def redux(registers, mask):
            if (self.wide(members(registers))[self.active(mask)] != -1).any():
                raise Unsupported("redux over a part of a warp")
            found = reduce(self.wide(value(registers)).reshape(-1, 32), axis=1).astype(value(registers).dtype)
            write(registers, found.repeat(32), mask)
        return redux
