"""Contrastive losses that need no large (N, M) matrix of similarities in memory.

similarity_lse         log Σ_j exp(q_i·k_j / τ) for every query i: the log-sum-exp (lse) of softmax losses
similarity_topk        for every query, the n keys with the largest similarity to it
info_nce               InfoNCE: cross entropy of query i with target key i (symmetric=True: both directions)
clip_loss              CLIP's loss: the symmetric info_nce of image-text pairs
nt_xent                SimCLR's loss over the 2N views of a batch
queue_loss             MoCo's loss: one positive per query; the negatives are a queue, which gets no gradient
sigmoid_loss           SigLIP's loss: classifies each pair on its own as match or no match
sup_con_loss           SupCon's loss: the positives of a view are all other views with the same label
triplet_loss           FaceNet's loss: the positive must be nearer than the negative, by at least a margin
margin_loss            Hadsell's loss: pulls pairs of a class together, pushes others at least a margin apart
linear_cross_entropy   cross entropy of the logits hidden·weightᵀ, for a linear layer over a large vocabulary
embed_in_chunks        embeddings of a batch whose activations do not fit into memory, with exact gradients
gather_rows            all rows of a batch that is split over several processes, with exact gradients
ring_rows              like gather_rows for huge batches: a loss gets the rows block by block, not all at once
own_rows               the slice of the batch that belongs to one process, if several processes share a batch
check_rows             raise ValueError if tensors do not have the expected dtypes, shapes and device
choose_impl            the implementation that impl="auto" selects for a tensor

A similarity is the dot product of two rows. For cosine similarities pass rows of norm 1 (F.normalize) or
normalize=True. The argument impl of a function is the implementation:

"triton"       fused Triton kernels, on CUDA GPUs
"blockwise"    plain PyTorch that computes a few rows of the matrix at a time; any device, also float64
"eager"        the textbook formula, which stores the (N, M) matrix; tests and benchmarks compare with it
"auto"         "eager" if N·M is at most 2²⁴ on a GPU (4096 × 4096 logits take 200 to 310 MB) or 2¹⁸ on a CPU.
               If N·M is larger: "triton" on a CUDA GPU, except for float64; in other cases "blockwise"

A wrong tensor, number or option raises ValueError, whose message names the argument and what is expected.
"""
import functools
import importlib.metadata
import importlib.util
import pkgutil
import sys
from pathlib import Path

from .call import choose_impl, similarity_lse, similarity_topk
from .checks import check_rows
from .chunks import embed_in_chunks
from .gather import gather_rows, own_rows
from .losses import (
    clip_loss,
    info_nce,
    linear_cross_entropy,
    margin_loss,
    nt_xent,
    queue_loss,
    sigmoid_loss,
    sup_con_loss,
    triplet_loss,
)
from .ring import RingRows, ring_rows

VERSION = __version__ = "0.1.0"

# Hugging Face has a package with the name "kernels" too, and transformers uses it. Python finds our folder
# first. Names and modules that are not in our folder are loaded from Hugging Face's package, if installed.
OURS = [__name__, *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))]
for installed in importlib.metadata.distributions(name="kernels"):
    __path__.append(str(installed.locate_file("kernels")))
    __version__ = installed.version                            # other packages may read __version__


def __getattr__(name):
    if len(__path__) == 1 or name.startswith("__") or f"{__name__}.{name}" in OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load_installed(), name)


@functools.cache
def load_installed():
    """Import Hugging Face's `kernels`. Meanwhile sys.modules lacks our modules: both have a benchmark.py."""
    spec = importlib.util.spec_from_file_location(__name__, Path(__path__[1], "__init__.py"))
    ours = {name: sys.modules.pop(name) for name in OURS if name in sys.modules}
    sys.modules[__name__] = package = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    finally:
        sys.modules.update(ours)
    return package
