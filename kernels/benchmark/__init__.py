"""python -m kernels.benchmark: time, memory and error of each loss; see measure.py."""
from kernels import hf_kernels


def __getattr__(name):
    """Return an attribute of the module with this name in Hugging Face's package `kernels`: other files of
    that package import `Benchmark` from kernels.benchmark."""
    return hf_kernels.attribute(__name__, name)
