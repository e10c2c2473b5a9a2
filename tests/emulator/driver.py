"""A driver for Triton that compiles kernels to PTX for a GPU and runs them in the emulator.

The arguments of a launch become kernel parameters as in triton/backends/nvidia/driver.py: descriptors and
tuples are expanded, constants left out, and two pointers to scratch memory follow.
"""
import functools
import struct
import time
from typing import NamedTuple

import torch
from asynchronous import TensorMap
from machine import Machine
from memory import Fault, GlobalMemory
from ptx import Unsupported, parse
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import expand_signature

from kernels.cost.launches import RecordingDriver

FORMATS = {"i1": "<B", "u1": "<B", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u8": "<B", "u16": "<H",
           "u32": "<I", "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d"}
MOST_LANES = 4096         # threads that NumPy runs side by side


class Launch(NamedTuple):
    kernel: str
    programs: int
    seconds: float


class EmulatedGPU(RecordingDriver):
    """Runs launches on the memory of CPU tensors.

    launches     list of Launch, in order
    findings     texts of what depends on timing, such as races
    change_ptx   function that changes the text of every kernel (self_check.py plants faults)
    """

    def __init__(self, chip, check_races):
        super().__init__(f"sm_{chip}")
        self.check_races, self.launches, self.findings, self.change_ptx = check_races, [], [], None

    def activate(self):
        """Become Triton's driver, and replace the assembler: the "binary" of a kernel is its PTX."""
        from triton.runtime import driver
        CUDABackend.make_cubin = lambda backend, ptx, *rest: ptx.encode()
        driver.set_active(self)

    def launcher_cls(self, source, metadata):
        """Return the function that Triton calls to launch a kernel."""
        def launch(x, y, z, stream, function, *rest):
            started, arguments = time.time(), rest[-len(source.signature):]
            ptx = self.binaries[function].decode()
            kernel = parse_once(self.change_ptx(ptx) if self.change_ptx else ptx)
            memory = GlobalMemory(functools.partial(self.report, metadata.name))
            values = pack(kernel, source.signature, metadata, arguments, memory)
            machine = Machine(kernel, values, memory, (x, y, z), 32 * metadata.num_warps, metadata.shared,
                              MOST_LANES, self.check_races)
            machine.run()
            self.launches.append(Launch(metadata.name, x * y * z, time.time() - started))
        return launch

    def report(self, kernel, what, text):
        finding = f"{kernel}: {what}: {text}"
        if finding not in self.findings:
            self.findings.append(finding)


@functools.lru_cache(maxsize=64)
def parse_once(ptx):
    return parse(ptx)


def pack(kernel, signature, metadata, arguments, memory):
    """Return {parameter: bytes or TensorMap}, and add the tensors of the arguments to the memory."""
    found = []
    descriptors = iter(metadata.tensordesc_meta or [])

    def add(kind, value):
        if isinstance(kind, tuple):
            for of_kind, of_value in zip(kind, value, strict=True):
                add(of_kind, of_value)
        elif kind.startswith("tensordesc"):
            about = next(descriptors, None)
            if about is None:
                raise Unsupported(f"a descriptor without a tensor map: {kind}")
            memory.add(value.base)
            found.append(TensorMap(value, about))
            found.extend(struct.pack("<i", size) for size in value.shape)
            found.extend(struct.pack("<q", stride) for stride in value.strides)
        elif kind.startswith("*"):
            if not isinstance(value, torch.Tensor):
                raise Unsupported(f"a pointer from {type(value)}")
            memory.add(value)
            found.append(struct.pack("<Q", value.data_ptr()))
        elif kind != "constexpr":
            found.append(struct.pack(FORMATS[kind], value))

    for kind, value in zip(signature.values(), arguments, strict=True):
        add(kind, value)
    expand_signature(list(signature.values()), metadata.tensordesc_meta)   # asserts that their numbers agree
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise Unsupported("scratch memory")
    found += [struct.pack("<Q", 0)] * 2
    if len(found) != len(kernel.parameters):
        raise Fault(f"{len(found)} values for {len(kernel.parameters)} parameters")
    return dict(zip(kernel.parameters, found))
