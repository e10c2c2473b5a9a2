"""A driver with which Triton compiles kernels for a GPU that the machine lacks. Launches do nothing."""
import functools
from typing import NamedTuple


class Chip(NamedTuple):
    """Sizes of a GPU, from NVIDIA's data sheets."""
    multiprocessors: int
    shared: int          # bytes of shared memory that one program can use


CHIPS = {"sm_80": Chip(108, 166_912), "sm_90": Chip(132, 232_448), "sm_100": Chip(148, 232_448)}


class CompilingDriver:
    """A driver with the attributes and methods that Triton uses."""

    def __init__(self, chip):
        from triton.backends.compiler import GPUTarget
        self.chip, self.number, self.utils = CHIPS[chip], int(chip.removeprefix("sm_")), self
        self.target = GPUTarget("cuda", self.number, 32)

    def get_current_device(self):
        return self.number

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target

    def get_device_properties(self, device):
        return dict(max_shared_mem=self.chip.shared, max_num_regs=65_536,
                    multiprocessor_count=self.chip.multiprocessors, warpSize=32)

    def load_binary(self, name, binary, shared, device):
        """Return placeholders for what Triton expects: module, function, registers, spills, threads."""
        return 1, 0, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        """Return the function that Triton calls to launch a kernel. It does nothing."""
        return lambda *arguments: None


# There is one driver per chip, because a compiled kernel keeps the driver with which it was compiled.
compiling_driver = functools.cache(CompilingDriver)
