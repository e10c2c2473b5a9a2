"""python -m kernels.benchmark: time, memory and error of each loss, ours and others'; see measure.py."""
from kernels import hf_kernels


def __getattr__(name):
    """Hugging Face's package has a module of this name, and its own files import `Benchmark` from it."""
    return hf_kernels.attribute(__name__, name)
