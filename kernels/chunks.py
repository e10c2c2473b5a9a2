"""Embed a batch whose activations do not fit into memory, with exact gradients (GradCache).

The loss L depends on the weights θ only through the embeddings z_1, ..., z_C of the C chunks of a batch, so

    dL/dθ = Σ_c (dz_c/dθ)ᵀ dL/dz_c

The term of chunk c depends on other chunks only through dL/dz_c, which is as small as z_c (Gao, Zhang, Han,
Callan 2021, arXiv 2101.06983). So the forward pass drops the activations of each chunk. The backward pass
embeds the chunks again, one by one, and adds the term of each chunk to .grad before it embeds the next one.
The price is one more forward pass.
"""
import ctypes
import dataclasses
import sys
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from .checks import describe, refuse_second_derivative
from .gather import cat_rows

TRIM_SECONDS = 1               # minimum time between two calls of malloc_trim, because it slows allocations


def embed_in_chunks(embed, chunks, module):
    """Return torch.cat of embed(chunk) for all chunks, with the activations of only one chunk in memory.

    embed    function from a chunk to its embeddings (n, D) on the module's device. Backward calls embed
             again, and needs the same result (as in torch.utils.checkpoint). So embed must not change its
             chunk. What embed reads must not change before backward (no optimizer step, no module.eval()).
             PyTorch's random numbers (dropout) are repeated on the CPU and on the module's device. Random
             numbers of NumPy, of `random` and of your own generators are not repeated
    chunks   list of chunks, such as tensor.split(size), which must not change before backward. Backward goes
             from the last chunk to the first
    module   torch.nn.Module with the parameters that embed uses; loss.backward() adds to their .grad once per
             chunk. None: store all activations, as for a plain torch.cat. A batch norm layer uses the
             statistics of one chunk at a time, like a GPU without synchronised batch norm, and updates its
             running statistics once per chunk
    returns  (Σ n, D) embeddings of all chunks
    raises   with two or more chunks, RuntimeError in backward for second derivatives (create_graph=True), for
             torch.autograd.grad (it fills no .grad), and if a parameter, module.training or a chunk (also in
             a tuple, list, mapping or dataclass) has changed. A change through .data is not noticed
    source   Gao et al. 2021, section 3.2
    """
    if isinstance(chunks, (torch.Tensor, str)) or hasattr(chunks, "shape") or not hasattr(chunks, "__iter__"):
        raise ValueError(f"chunks: found {describe(chunks)}, expected a list of inputs of embed, such as "
                         "tensor.split(size)")
    chunks = list(chunks)
    if not chunks:
        raise ValueError("chunks: found none, expected at least one")
    if module is None or not torch.is_grad_enabled() or len(chunks) == 1:
        return cat_rows([embed_chunk(embed, chunk) for chunk in chunks])
    weights = [*module.parameters()]
    trained = next((weight for weight in weights if weight.requires_grad), None)
    if trained is None:
        raise ValueError("module: no parameter requires a gradient; for a frozen module pass module=None")
    return cat_rows([EmbedChunk.apply(embed, chunk, module, weights, trained) for chunk in chunks])


def embed_chunk(embed, chunk):
    """Return embed(chunk); raise ValueError if it is a vector: torch.cat would join vectors into one."""
    z = embed(chunk)
    if not isinstance(z, torch.Tensor) or z.dim() < 2:
        found = f"a tensor {tuple(z.shape)}" if isinstance(z, torch.Tensor) else type(z).__name__
        raise ValueError(f"embed: found {found} for a chunk, expected a tensor (rows of the chunk, D)")
    return z


class EmbedChunk(torch.autograd.Function):
    """Embed a chunk without storing activations. Backward embeds the chunk again, and adds to .grad.

    trained  a weight of the module that requires a gradient. Without it, autograd would not call backward
    """
    last_trim = 0.0           # time.monotonic() at the last call of malloc_trim; all chunks share this number

    @staticmethod
    def forward(ctx, embed, chunk, module, weights, trained):
        ctx.embed, ctx.chunk, ctx.module, ctx.weights = embed, chunk, module, weights
        kind = trained.device.type
        ctx.autocast = dict(device_type=kind, dtype=torch.get_autocast_dtype(kind),
                            enabled=torch.is_autocast_enabled(kind))
        ctx.random_state, ctx.device_states = torch.get_rng_state(), get_device_states(trained)
        ctx.before = module.training, version(weights), version(chunk)
        # before torch 2.11, weights that autocast caches here would have no gradient
        with torch.autocast(**ctx.autocast, cache_enabled=False):
            return embed_chunk(embed, chunk)

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivative("embed_in_chunks", "pass module=None")
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("embed_in_chunks: found torch.autograd.grad or backward(inputs=...), expected "
                               "loss.backward(), which adds to .grad of the module's parameters")
        if (ctx.module.training, version(ctx.weights), version(ctx.chunk)) != ctx.before:
            raise RuntimeError("embed_in_chunks: a chunk, a parameter or the training mode of the module has "
                               "changed since the chunk was embedded; expected no change before backward")
        buffers = [(buffer, buffer.clone()) for buffer in ctx.module.buffers()]
        with torch.random.fork_rng(ctx.device_states[0]), torch.enable_grad(), torch.autocast(**ctx.autocast):
            torch.set_rng_state(ctx.random_state)
            set_device_states(*ctx.device_states)
            z = ctx.embed(ctx.chunk)
        for buffer, old in buffers:        # undo the changes: running statistics must count a chunk only once
            buffer.data = old
        if z.requires_grad:
            torch.autograd.backward(z, gradient)
        del z
        if gradient.is_cpu:
            trim_heap()
        return None, None, None, None, None


def trim_heap():
    """Return freed memory to the system. glibc would keep it, in blocks that are often too small for the next
    chunk, whose rows may be longer. Other C libraries have no malloc_trim."""
    if sys.platform == "linux" and time.monotonic() - EmbedChunk.last_trim >= TRIM_SECONDS:
        EmbedChunk.last_trim = time.monotonic()
        getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)


def version(x):
    """Return nested lists; they differ after an in-place change of a tensor, an array or a container in x."""
    if isinstance(x, torch.Tensor):
        return id(x), None if x.is_inference() else x._version
    if isinstance(x, np.ndarray):                              # NumPy arrays have no version counter
        return hash(x.tobytes())
    if dataclasses.is_dataclass(x):
        return [version(getattr(x, field.name)) for field in dataclasses.fields(x)]
    if isinstance(x, Mapping):                                 # transformers.BatchEncoding is a Mapping, too
        return [(key, version(value)) for key, value in x.items()]
    return [version(item) for item in x] if isinstance(x, (tuple, list)) else id(x)
