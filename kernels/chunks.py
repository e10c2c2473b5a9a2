"""Embed a batch whose activations do not fit into memory, with exact gradients (GradCache).

The loss L depends on the weights θ only through the embeddings z_1, ..., z_C of the C chunks of a batch, so

    dL/dθ = Σ_c (dz_c/dθ)ᵀ dL/dz_c

The term of chunk c depends on other chunks only through dL/dz_c, which is as small as z_c (Gao, Zhang, Han,
Callan 2021, arXiv 2101.06983). So the forward pass drops the activations of each chunk. The backward pass
embeds the chunks again, one by one, and backpropagates through each. The price is one more forward pass.
"""
import contextlib
import functools

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .checks import check_callable, describe
from .gather import cat_rows


def embed_in_chunks(embed, chunks, module):
    """Return torch.cat of embed(chunk) for all chunks, with the activations of only one chunk in memory.

    embed    function from a chunk to its embeddings (n, D) on the module's device. Backward calls embed
             again, and must get the same result (as in torch.utils.checkpoint). So embed must not change its
             chunk, nor use anything that changes before backward, such as weights or module.eval(). PyTorch's
             random numbers, as in dropout, are repeated on the CPU and the module's device; those of NumPy,
             `random` and generators of your own are not repeated
    chunks   list of chunks, such as tensor.split(size), which must not change before backward. Backward goes
             from the last chunk to the first
    module   torch.nn.Module with the parameters that embed uses; None: store all activations, as for a plain
             torch.cat. A batch norm layer uses the statistics of one chunk at a time, like a GPU without
             synchronised batch norm, and updates its running statistics once per chunk
    returns  (Σ n, D) embeddings of all chunks
    raises   RuntimeError in backward if a parameter or the training mode of the module has changed, or a
             tensor of a chunk (also inside tuples, lists and dicts)
    source   Gao et al. 2021, section 3.2
    """
    check_callable("embed", embed)
    if isinstance(chunks, (torch.Tensor, str)) or hasattr(chunks, "shape") or not hasattr(chunks, "__iter__"):
        raise ValueError(f"chunks: found {describe(chunks)}, expected a list of what embed takes, such as "
                         "tensor.split(size)")
    chunks = list(chunks)
    if not chunks:
        raise ValueError("chunks: found none, expected at least one")
    if module is None or not torch.is_grad_enabled() or len(chunks) == 1:
        return concatenate([embed_chunk(embed, chunk) for chunk in chunks])
    weights = [*module.parameters()]
    if not any(weight.requires_grad for weight in weights):
        raise ValueError("module: no parameter requires a gradient; for a frozen module pass module=None")
    # weights[0] is passed for its device only: checkpoint saves the random states of its arguments' devices
    return concatenate([checkpoint(embed_chunk, embed, chunk, weights[0], use_reentrant=False,
                                   context_fn=functools.partial(contexts, module, (weights, chunk)))
                        for chunk in chunks])


def embed_chunk(embed, chunk, parameter=None):
    """Return embed(chunk); raise ValueError if it is a vector: torch.cat would join vectors into one."""
    z = embed(chunk)
    if not isinstance(z, torch.Tensor) or z.dim() < 2:
        found = f"a tensor {tuple(z.shape)}" if isinstance(z, torch.Tensor) else type(z).__name__
        raise ValueError(f"embed: found {found} for a chunk, expected a tensor (rows of the chunk, D)")
    return z


def contexts(module, used):
    """Return two context managers, in which a chunk is embedded: one for forward, one for backward.

    used  nested lists and dicts with the tensors that must not change before backward. On exit, the second
          context restores the module's buffers, such as running statistics
    """
    def state():
        tensors = [x for x in tree_leaves(used) if isinstance(x, torch.Tensor) and not x.is_inference()]
        return module.training, [x._version for x in tensors]

    @contextlib.contextmanager
    def second(before):
        if state() != before:
            raise RuntimeError("embed_in_chunks: a chunk, a parameter or the training mode of the module has "
                               "changed since the chunk was embedded; expected no change before backward")
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        try:
            yield
        finally:
            for buffer, old in buffers:
                buffer.data = old
    return contextlib.nullcontext(), second(state())


def concatenate(parts):
    """Return torch.cat of the embeddings of all chunks; raise ValueError if their rows differ in shape."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise ValueError(f"embed: found rows of shapes {sorted(shapes)}, expected one shape for all chunks")
    return cat_rows(parts)
