"""Contrastive losses over similarities whose (N, M) matrix is never stored.

similarity_lse         log Σ_j exp(q_i·k_j / τ) for every row i: the one quadratic term of all these losses
similarity_topk        the n nearest columns of every row
info_nce               mean −log softmax of q_i·k_i among the keys; symmetric=True adds the columns
clip_loss              the same over rows and columns of image-text pairs
nt_xent                SimCLR's loss over the 2N views of one set
queue_loss             MoCo's loss: a positive a row against a queue without gradient
sigmoid_loss           SigLIP's loss: each pair for itself, match or no match; in-batch NCE with its bias
sup_con_loss           SupCon's loss: all other views of the same label are positives
triplet_loss           nearer to the positive than to the negative, given or the nearest, by a margin
margin_loss            the same near each other, others a margin apart
linear_cross_entropy   cross entropy of hidden·weightᵀ, for heads over a large vocabulary
embed_in_chunks        the embeddings of a batch whose activations do not fit, with exact gradients
gather_rows            the rows of all processes, with exact gradients; own_rows says which are whose
check_rows             refuses tensors that do not fit each other; check_unit, rows that are not of length 1

Similarities are dot products of rows as given: pass unit rows (F.normalize), or normalize=True for cosines.
What compares all pairs takes impl="auto" | "triton" | "blockwise" | "eager": Triton on CUDA, plain PyTorch
over blocks of rows elsewhere (any device, float64 too), and the textbook formula with the matrix stored,
which is the oracle and the baseline.
"""
import importlib

# A folder named `kernels` beside a script hides the PyPI package of that name from transformers, and some of
# its 5.x releases parse the version of whatever they find: without this line `import transformers` crashes.
__version__ = "0.1.0"

HOMES = {"checks": ["check_rows", "check_unit"], "chunks": ["embed_in_chunks"],
         "gather": ["gather_rows", "own_rows"], "paths": ["choose_impl"],
         "losses": ["clip_loss", "info_nce", "linear_cross_entropy", "margin_loss", "nt_xent", "queue_loss",
                    "sigmoid_loss", "sup_con_loss", "triplet_loss"],
         "similarity": ["similarity_lse", "similarity_topk"]}
__all__ = [name for names in HOMES.values() for name in names]


def __getattr__(name):
    """Loads a function, or a module, when it is first asked for: a script answers --help before torch is
    loaded."""
    home = next((home for home, names in HOMES.items() if name in names), name)
    try:
        module = importlib.import_module(f".{home}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{home}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return module if home == name else getattr(module, name)
