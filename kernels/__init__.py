"""Contrastive losses over similarities whose (N, M) matrix is never stored.

similarity_lse         log Σ_j exp(q_i·k_j / τ) for every row i: the one quadratic term of all these losses
similarity_topk        the n nearest columns of every row
info_nce               mean −log softmax of q_i·k_i among the keys; symmetric=True adds the columns
clip_loss              the same over rows and columns of image-text pairs
nt_xent                SimCLR's loss over the 2N views of one set
queue_loss             MoCo's loss: a positive a row against a queue without gradient
sigmoid_loss           SigLIP's loss: each pair for itself, match or no match; in-batch NCE with its bias
sup_con_loss           SupCon's loss: all other views of the same label are positives
triplet_loss           nearer to the positive than to the negative, given or found in the batch, by a margin
margin_loss            the same near each other, others a margin apart
linear_cross_entropy   cross entropy of hidden·weightᵀ, for heads over a large vocabulary
embed_in_chunks        the embeddings of a batch whose activations do not fit, with exact gradients
gather_rows            the rows of all processes, with exact gradients; own_rows says which are whose
check_rows             refuses tensors that do not fit each other; check_unit, rows that are not of length 1;
                       kernels.checks has more of the kind, for numbers and words

Similarities are dot products of rows as given: pass unit rows (F.normalize), or normalize=True for cosines.
What compares all pairs takes impl="auto" | "triton" | "blockwise" | "eager": Triton on CUDA, plain PyTorch
over blocks of rows elsewhere (any device, float64 too), and the textbook formula with the matrix stored,
which is the oracle and the baseline.

Every function raises ValueError for an argument that does not fit; the message names it, what was found and
what is expected. The first use of a function raises ImportError if torch or triton is older than versions.py
says.
"""
import importlib
import os
from importlib.machinery import PathFinder

from . import hf_kernels, versions

VERSION = "0.1.0"
FOLDER = [os.path.dirname(__file__)]

HOMES = {"checks": ["check_rows", "check_unit"], "chunks": ["embed_in_chunks"],
         "gather": ["gather_rows", "own_rows"], "paths": ["choose_impl"],
         "losses": ["clip_loss", "info_nce", "linear_cross_entropy", "margin_loss", "nt_xent", "queue_loss",
                    "sigmoid_loss", "sup_con_loss", "triplet_loss"],
         "similarity": ["similarity_lse", "similarity_topk"]}
__all__ = [name for names in HOMES.values() for name in names]


def __getattr__(name):
    """Load a function or a module when it is first asked for, so that --help need not wait for torch. A name
    that is not ours is looked up in Hugging Face's package of the same name, if that is installed."""
    if name == "__version__":  # transformers reads it: 0.1.0 is too old for it, as if nothing was installed
        return hf_kernels.version() or VERSION
    for home, names in HOMES.items():
        if name in names:
            problem = versions.problem("python", "torch", "triton")
            if problem:
                raise ImportError(f"kernels: {problem}")
            return getattr(importlib.import_module(f".{home}", __name__), name)
    if PathFinder.find_spec(f"{__name__}.{name}", FOLDER):
        return importlib.import_module(f".{name}", __name__)
    return hf_kernels.attribute(__name__, name)
