"""Contrastive losses that never store the (N, M) matrix of similarities.

similarity_lse         log Σ_j exp(q_i·k_j / τ) for every row i: the only O(N·M) part of the softmax losses
similarity_topk        the n columns with the largest similarity for every row
info_nce               mean −log softmax of q_i·k_i over the keys; symmetric=True adds the column softmax
clip_loss              the symmetric info_nce of image-text pairs
nt_xent                SimCLR's loss over the 2N views of a batch
queue_loss             MoCo's loss: one positive per row, negatives from a queue without gradient
sigmoid_loss           SigLIP's loss: each pair is classified on its own, match or no match
sup_con_loss           SupCon's loss: all other views of the same label are positives
triplet_loss           positive nearer than negative by a margin; negatives are given, or mined in the batch
margin_loss            pairs of the same class near each other, other pairs at least a margin apart
linear_cross_entropy   cross entropy of hidden·weightᵀ, for heads over a large vocabulary
embed_in_chunks        embeddings of a batch whose activations do not fit into memory, with exact gradients
gather_rows            the rows of all processes, with exact gradients; own_rows returns one process's slice
check_rows             raise ValueError if the types, shapes or devices of tensors do not fit
check_unit             raise ValueError if the rows of a tensor do not have norm 1
choose_impl            the implementation that impl="auto" selects for a tensor

Similarities are dot products of the rows as given: pass unit rows (F.normalize), or normalize=True for
cosines. Functions over all pairs of rows accept an implementation as impl=...:

"triton"       fused Triton kernels, on CUDA GPUs
"blockwise"    plain PyTorch over strips of rows, on any device, float64 too
"eager"        the textbook formula with the (N, M) matrix stored: the oracle and the baseline
"auto"         "triton" on CUDA; on the CPU "eager" for a small matrix of logits, else "blockwise"

Every public function raises ValueError if an argument does not fit; the message names the argument, what was
found and what is expected.
"""
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys

from .call import similarity_lse, similarity_topk
from .checks import check_rows, check_unit
from .chunks import embed_in_chunks
from .gather import gather_rows, own_rows
from .heuristics import choose_impl
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

VERSION = __version__ = "0.1.0"

# Hugging Face has a package of the same name, from which transformers imports names. Python finds this folder
# first. So names and modules that this folder does not have come from that package, if it is installed.
OURS = [__name__, *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))]
with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    installed = importlib.metadata.distribution("kernels")
    __version__ = installed.version                            # other packages ask for it
    __path__.append(str(installed.locate_file("kernels")))


def __getattr__(name):
    """Return an attribute of Hugging Face's package."""
    if len(__path__) == 1 or name.startswith("__") or f"{__name__}.{name}" in OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load_installed(), name)


@functools.cache
def load_installed():
    """Import Hugging Face's package. Our modules step aside meanwhile: both packages have a benchmark.py."""
    spec = importlib.util.spec_from_file_location(__name__, os.path.join(__path__[1], "__init__.py"))
    package = importlib.util.module_from_spec(spec)
    ours = {name: sys.modules.pop(name) for name in OURS if name in sys.modules}
    sys.modules[__name__] = package
    try:
        spec.loader.exec_module(package)
    finally:
        for name in OURS:
            sys.modules.pop(name, None)
        sys.modules.update(ours)
    return package
