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
"blockwise"    plain PyTorch over blocks of rows, on any device, float64 too; a small matrix is stored
"eager"        the textbook formula with the (N, M) matrix stored: the oracle and the baseline
"auto"         "triton" on CUDA if the matrix is large (above 2048 × 2048), else "blockwise"

Every public function raises ValueError if an argument does not fit; the message names the argument, what was
found and what is expected.
"""
import importlib
import os
from importlib.machinery import PathFinder

from . import hf_kernels

VERSION = "0.1.0"
FOLDER = [os.path.dirname(__file__)]

MODULES = {"checks": ["check_rows", "check_unit"], "chunks": ["embed_in_chunks"],
           "gather": ["gather_rows", "own_rows"], "heuristics": ["choose_impl"],
           "losses": ["clip_loss", "info_nce", "linear_cross_entropy", "margin_loss", "nt_xent", "queue_loss",
                      "sigmoid_loss", "sup_con_loss", "triplet_loss"],
           "call": ["similarity_lse", "similarity_topk"]}
__all__ = [name for names in MODULES.values() for name in names]


def __getattr__(name):
    """Load a function or a module on first use, so that --help does not wait for torch.

    A name that this package does not have is looked up in an installed Hugging Face package of the same name.
    """
    if name == "__version__":  # transformers reads it; 0.1.0 is too old for it, as if nothing were installed
        return hf_kernels.version() or VERSION
    for module, names in MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    if PathFinder.find_spec(f"{__name__}.{name}", FOLDER):
        return importlib.import_module(f".{name}", __name__)
    return hf_kernels.attribute(__name__, name)
