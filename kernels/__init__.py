"""Softmax losses over similarities whose (N, M) matrix is never stored.

similarity_lse         log Σ_j exp(q_i·k_j / τ) for every row i: the one quadratic term of all these losses
similarity_topk        the n nearest columns of every row
info_nce               mean −log softmax of q_i·k_i among the keys; symmetric=True adds the columns
clip_loss              the same over rows and columns of image-text pairs
nt_xent                SimCLR's loss over the 2N views of one set
queue_loss             MoCo's loss: a positive a row against a queue without gradient
linear_cross_entropy   cross entropy of hidden·weightᵀ, for heads over a large vocabulary
embed_in_chunks        the embeddings of a batch whose activations do not fit, with exact gradients
gather_rows            the rows of all processes, with exact gradients; own_rows says which are whose

Each takes impl="auto" | "triton" | "blockwise" | "eager": Triton on CUDA, plain PyTorch over blocks of rows
elsewhere (any device, float64 too), and the textbook formula with the matrix stored, which is the oracle and
the baseline.
"""
from .chunks import embed_in_chunks
from .gather import gather_rows, own_rows
from .losses import clip_loss, info_nce, linear_cross_entropy, nt_xent, queue_loss
from .paths import choose_impl
from .similarity import similarity_lse, similarity_topk

# A folder named `kernels` beside a script hides the PyPI package of that name from transformers, and some of
# its 5.x releases parse the version of whatever they find: without this line `import transformers` crashes.
__version__ = "0.1.0"

__all__ = ["similarity_lse", "similarity_topk", "info_nce", "clip_loss", "nt_xent", "queue_loss",
           "linear_cross_entropy", "embed_in_chunks", "gather_rows", "own_rows", "choose_impl"]
