"""A driver for Triton that compiles kernels for a GPU that is not present, and ignores launches."""
import functools
from typing import NamedTuple


class Chip(NamedTuple):
    """Sizes of a GPU, from NVIDIA's data sheets."""
    multiprocessors: int
    shared: int          # bytes of shared memory that a program can have


CHIPS = {"sm_80": Chip(108, 166_912), "sm_90": Chip(132, 232_448), "sm_100": Chip(148, 232_448)}


class CompilingDriver:
    """A driver object as Triton expects it."""

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
        """Return what Triton expects: module, function, registers, spills, threads."""
        return 1, 0, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        """Return the function that Triton calls to launch a kernel."""
        return lambda *arguments: None


# One driver per chip: a kernel that Triton has compiled keeps the driver that it was compiled with.
compiling_driver = functools.cache(CompilingDriver)
