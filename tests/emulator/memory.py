"""Global memory, which is that of the tensors of a launch, and the shared memory of programs.

An access that is out of bounds or misaligned raises Fault. Global memory remembers which program wrote each
byte. Shared memory remembers which warp last wrote and read each byte since the last barrier, which bytes
nobody has written, which bytes a copy will still write, and which ones a product still reads. An access that
depends on timing is reported as a finding.
"""
import ctypes

import numpy as np
from arithmetic import UNSIGNED

BASE = 1024             # address of a program's shared memory; the hardware keeps the first KiB for itself


class Fault(Exception):
    """The hardware would stop here, or would never finish."""


def in_groups(bytes_, size):
    """Return a view with one row of `size` bytes or marks per access."""
    return bytes_.reshape(-1, size)


class GlobalMemory:
    """The storages of the tensors of a launch, and for each byte the number of the program that wrote it,
    plus 1. A program must not read what another one writes, nor write another value to the same place."""

    def __init__(self, report):
        self.storages, self.writers, self.report = {}, {}, report

    def add(self, tensor):
        """Add the storage of a tensor, at its own address."""
        storage = tensor.untyped_storage()
        start, count = storage.data_ptr(), storage.nbytes()
        if count and start not in self.storages:
            first = start & ~63                                # views of 8 bytes need aligned ends
            whole = count + start - first + 15 & ~15
            raw = np.frombuffer((ctypes.c_uint8 * whole).from_address(first), np.uint8)
            views = {size: raw.view(dtype) for size, dtype in UNSIGNED.items()}
            self.storages[start] = start, start + count, first, views, tensor

    def find(self, addresses, size, text):
        """Return [(indices into addresses, views, first address)] of the storages that hold the addresses."""
        if (addresses & np.uint64(size - 1)).any():
            raise Fault(f"misaligned access of {size} bytes at {hex(int(addresses.max()))}: {text}")
        low, high = int(addresses.min()), int(addresses.max()) + size
        for start, stop, first, views, _ in self.storages.values():
            if start <= low and high <= stop:
                return [(np.arange(len(addresses)), views, first)]
        found, seen = [], np.zeros(len(addresses), bool)
        for start, stop, first, views, _ in self.storages.values():
            inside = (addresses >= np.uint64(start)) & (addresses + np.uint64(size) <= np.uint64(stop))
            if inside.any():
                found.append((np.flatnonzero(inside), views, first))
                seen |= inside
        if not seen.all():
            wrong, near = int(addresses[~seen][0]), []
            for start, stop, _, _, tensor in self.storages.values():
                near.append((min(abs(wrong - start), abs(wrong - stop)), wrong - start, tuple(tensor.shape)))
            _, offset, shape = min(near, default=(0, wrong, ()))
            raise Fault(f"out of bounds: {size} bytes at {offset:+} of a tensor {shape}, "
                        f"{(~seen).sum()} lanes: {text}")
        return found

    def load(self, addresses, size, count, programs, text):
        """Return unsigned integers (lanes, count) of `size` bytes."""
        out = np.empty((len(addresses), count), UNSIGNED[size])
        for where, views, first in self.find(addresses, size * count, text):
            at = ((addresses[where] - np.uint64(first)) // np.uint64(size)).astype(np.int64)
            for i in range(count):
                out[where, i] = views[size][at + i]
            if first in self.writers:
                writer = in_groups(self.writers[first], size * count)[at // count]
                if ((writer != 0) & (writer != programs[where, None] + 1)).any():
                    self.report("race: a program reads what another program of the launch writes", text)
        return out

    def store(self, addresses, values, programs, text):
        """Store values (lanes, count)."""
        size, count = values.dtype.itemsize, values.shape[1]
        for where, views, first in self.find(addresses, size * count, text):
            at = ((addresses[where] - np.uint64(first)) // np.uint64(size)).astype(np.int64)
            if first not in self.writers:
                self.writers[first] = np.zeros(len(views[1]), np.int32)
            writer = in_groups(self.writers[first], size * count)
            others = ((writer[at // count] != 0) & (writer[at // count] != programs[where, None] + 1)).any(1)
            for i in range(count):
                changed = others & (views[size][at + i] != values[where, i])
                views[size][at + i] = values[where, i]
                if changed.any() or (views[size][at + i] != values[where, i]).any():
                    self.report("race: different values are written to the same place", text)
            writer[at // count] = programs[where, None] + 1


class SharedMemory:
    """The shared memory of the programs that run side by side, and what is known about each byte.

    A mark in `wrote` and `read` is 64 · epoch + 1 + warp, or 64 · epoch + 63 for several warps. A program's
    epoch ends at a barrier.
    """

    def __init__(self, programs, size, check, report):
        self.size, self.check, self.report = size, check, report
        self.stride = -(-(BASE + size) // 1024) * 1024         # bytes from program to program
        self.bytes = np.full(programs * self.stride, 0xA5, np.uint8)
        self.views = {n: self.bytes.view(dtype) for n, dtype in UNSIGNED.items()}
        self.epoch = np.ones(programs, np.int32)
        self.wrote, self.read = np.zeros((2, len(self.bytes) if check else 0), np.int32)
        self.known = np.zeros(len(self.bytes), bool)           # somebody wrote this byte
        self.unfenced = np.zeros(len(self.bytes), bool)        # threads wrote it, no fence.proxy.async since
        self.pending = np.zeros(len(self.bytes), bool)         # a copy will write it
        self.busy = np.zeros(len(self.bytes), bool)            # a product reads it

    def place(self, programs, addresses, size, text):
        """Return the indices of the bytes at these addresses of these programs."""
        addresses = addresses.astype(np.int64)
        if (addresses & size - 1).any():
            raise Fault(f"misaligned access of {size} bytes of shared memory: {text}")
        if (addresses < BASE).any() or (addresses + size > BASE + self.size).any():
            raise Fault(f"{size} bytes at {addresses.min() - BASE} to {addresses.max() - BASE} of "
                        f"{self.size} bytes of shared memory: {text}")
        return programs * self.stride + addresses

    def marks(self, programs, warps):
        """Return (first mark of the current epoch, mark of the warp), a column each."""
        epoch = self.epoch[programs, None] * 64
        return epoch, epoch + warps[:, None] + 1

    def load(self, programs, warps, addresses, size, count, text):
        """Return unsigned integers (lanes, count) of `size` bytes."""
        at = self.place(programs, addresses, size * count, text)
        self.check_read(at, size * count, programs, warps, text)
        return self.views[size].reshape(-1, count)[at // (size * count)]

    def store(self, programs, warps, addresses, values, text):
        """Store values (lanes, count)."""
        size = values.dtype.itemsize * values.shape[1]
        at = self.place(programs, addresses, size, text)
        self.check_write(at, size, programs, warps, text, values)
        in_groups(self.unfenced, size)[at // size] = True
        self.put(at, values)
        if (self.present(at, values) != values).any():
            self.report("race: two lanes write different values to the same place", text)

    def present(self, at, values):
        """Return what is stored where the values belong."""
        size = values.dtype.itemsize * values.shape[1]
        return self.views[values.dtype.itemsize].reshape(-1, values.shape[1])[at // size]

    def put(self, at, values):
        """Write values without any check."""
        size = values.dtype.itemsize * values.shape[1]
        self.views[values.dtype.itemsize].reshape(-1, values.shape[1])[at // size] = values
        in_groups(self.known, size)[at // size] = True

    def check_read(self, at, size, programs, warps, text):
        """Check a read of `size` bytes at each place, and remember it."""
        at = at // size
        if in_groups(self.pending, size)[at].any():
            self.report("race: read before the copy that writes it was waited for", text)
        if not in_groups(self.known, size)[at].all():
            self.report("shared memory that nobody wrote is read", text)
        if not self.check:
            return
        epoch, mark = self.marks(programs, warps)
        wrote = in_groups(self.wrote, size)[at]
        if ((wrote >= epoch) & (wrote != mark)).any():
            self.report("race: read of what another warp wrote since the last barrier", text)
        read = in_groups(self.read, size)
        new = np.where((read[at] >= epoch) & (read[at] != mark), epoch + 63, mark)
        read[at] = new
        overwritten = (read[at] != new).any(1)     # several warps read the same place in this instruction
        read[at[overwritten]] = epoch[overwritten] + 63

    def check_write(self, at, size, programs, warps, text, values=None):
        """Check a write, and remember it. Writing the values that are present already harms nobody."""
        rows = at // size
        if in_groups(self.pending, size)[rows].any():
            self.report("race: written although a copy will write it", text)
        if in_groups(self.busy, size)[rows].any():
            self.report("race: written while a product reads it", text)
        if not self.check:
            return
        epoch, mark = self.marks(programs, warps)
        for marks, what in ((self.wrote, "written"), (self.read, "read")):
            last = in_groups(marks, size)[rows]
            wrong = ((last >= epoch) & (last != mark)).any(1)
            if wrong.any() and values is not None:
                wrong &= (self.present(at, values) != values).any(1)
            if wrong.any():
                self.report(f"race: written after another warp has {what} it since the last barrier", text)
        in_groups(self.wrote, size)[rows] = mark

    def mark_written(self, at, size, programs, warps):
        """Remember that warps wrote these places in this epoch (a copy that was waited for)."""
        if self.check:
            in_groups(self.wrote, size)[at // size] = self.marks(programs, warps)[1]
