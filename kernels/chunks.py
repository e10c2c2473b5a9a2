"""Embed a batch whose activations do not fit into memory, with exact gradients (GradCache).

    z = torch.cat([embed(chunk) for chunk in chunks])      keeps the activations of all chunks until backward
    z = embed_in_chunks(embed, chunks, module)             keeps the activations of one chunk at a time

The loss depends on the weights θ only through the embeddings, L(z_1(θ), ..., z_C(θ)), so

    dL/dθ = Σ_c (dz_c/dθ)ᵀ dL/dz_c

and all that a chunk needs to know of the other chunks is dL/dz_c, a tensor as small as z_c (Gao, Zhang, Han,
Callan 2021, arXiv 2101.06983). So the forward pass drops the activations of each chunk, and the loss and
dL/dz are computed once for the whole batch. The backward pass embeds each chunk again, with the same random
numbers and the same autocast, and backpropagates through that chunk immediately. The price is one more
forward pass.
"""
import ctypes
import sys
import time

import torch
from torch.utils._pytree import tree_leaves

from .checks import check_callable, check_dense, describe
from .custom_op import cat_rows

TRIM_SECONDS = 1  # minimum time between two calls of malloc_trim: pages given back must be mapped again


def embed_in_chunks(embed, chunks, module):
    """Return torch.cat of embed(chunk) for all chunks, holding the activations of one chunk at a time.

    embed    function from a chunk to a tensor (n, D) on the module's device; its dropout is repeated exactly
    chunks   list of inputs of embed, such as tensor.split(size); they get no gradient, and must not change
             until the backward pass, which embeds them again
    module   torch.nn.Module with the parameters that embed uses, or None for plain torch.cat, which keeps all
             activations. The parameters get the same gradients as without this function. A batch norm
             normalises each chunk by the chunk's own statistics, as GPUs without synchronised batch norm do,
             and updates its running statistics once per chunk, not again in backward
    returns  (Σ n, D)
    raises   ValueError if embed changes a tensor of its chunk in place; RuntimeError in backward if it has
             been changed since
    source   Gao et al. 2021, section 3.2
    """
    check_callable("embed", embed)
    check_dense("chunks", chunks)
    if isinstance(chunks, torch.Tensor):
        raise ValueError(f"chunks: found one tensor {tuple(chunks.shape)}, whose rows would be the chunks; "
                         "expected a list of chunks: tensor.split(size)")
    if isinstance(chunks, str) or hasattr(chunks, "shape") or not hasattr(chunks, "__iter__"):
        raise ValueError(f"chunks: found {describe(chunks)}, expected a list of what embed takes")
    if not isinstance(module, (torch.nn.Module, type(None))):
        found = type(module).__name__
        raise ValueError(f"module: found {found}, expected the torch.nn.Module that embed uses")
    chunks = list(chunks)
    if not chunks:
        raise ValueError("chunks: found none, expected at least one")
    if module is None or not torch.is_grad_enabled() or len(chunks) == 1:
        return concatenate([embed_chunk(embed, chunk) for chunk in chunks])
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("module: no parameter requires a gradient; for a frozen module pass module=None")
    return ChunkedEmbedding.apply(embed, chunks, module, trained[0])


def embed_chunk(embed, chunk):
    """Return embed(chunk); raise ValueError for a vector, because torch.cat would join vectors into one."""
    z = embed(chunk)
    check_dense("embed", z)
    if not isinstance(z, torch.Tensor) or z.dim() < 2:
        found = f"a tensor {tuple(z.shape)}" if isinstance(z, torch.Tensor) else type(z).__name__
        raise ValueError(f"embed: found {found} for a chunk, expected a tensor (rows of the chunk, D)")
    return z


def concatenate(parts):
    """Return torch.cat of the embeddings of all chunks; raise ValueError if their rows differ in shape."""
    shape, *others = (part.shape[1:] for part in parts)
    for other in others:
        if other != shape:
            found = f"{tuple(shape)} and {tuple(other)}"
            raise ValueError(f"embed: found rows {found}, expected the same shape for all chunks")
    return cat_rows(parts)


class ChunkedEmbedding(torch.autograd.Function):
    """Forward embeds without storing activations; backward embeds again and adds to the parameters' .grad.

    The argument `parameter` only gives the device: an input that requires a gradient makes autograd call
    backward.
    """
    last_trim = 0.0  # time.monotonic() when malloc_trim was last called, by any use of this class

    @staticmethod
    def forward(ctx, embed, chunks, module, parameter):
        ctx.embed, ctx.chunks, ctx.module, ctx.random, parts = embed, chunks, module, [], []
        ctx.device = parameter.device
        ctx.autocast = torch.is_autocast_enabled(ctx.device.type), torch.get_autocast_dtype(ctx.device.type)
        ctx.versions = versions(chunks)
        for chunk in chunks:
            ctx.random.append(random_state(ctx.device))
            parts.append(embed_chunk(embed, chunk))
        if versions(chunks) != ctx.versions:
            raise ValueError("embed: changed its chunk in place, so the backward pass would embed something "
                             "else; expected a function that changes a copy")
        ctx.sizes = [len(part) for part in parts]
        return concatenate(parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        now, buffers = random_state(ctx.device), [(buffer, buffer.clone()) for buffer in ctx.module.buffers()]
        enabled, dtype = ctx.autocast
        if versions(ctx.chunks) != ctx.versions:
            raise RuntimeError("chunks: changed in place since embed_in_chunks embedded them, so gradients "
                               "would be wrong; expected no change before backward")
        for chunk, random, part in zip(ctx.chunks, ctx.random, gradient.split(ctx.sizes)):
            set_random_state(random, ctx.device)
            with torch.enable_grad(), torch.autocast(ctx.device.type, dtype, enabled=enabled):
                z = ctx.embed(chunk)
            if z.requires_grad:                                # else nothing was trained by this chunk
                torch.autograd.backward(z, part)
            if ctx.device.type == "cpu":
                trim_heap()
        set_random_state(now, ctx.device)
        for buffer, before in buffers:  # the second forward pass does not count in running statistics
            buffer.copy_(before)
        return None, None, None, None


def versions(chunks):
    """Return the version counters of the tensors in the chunks; PyTorch adds 1 for each change in place."""
    return [x._version for x in tree_leaves(chunks) if isinstance(x, torch.Tensor) and not x.is_inference()]


def trim_heap():
    """Return freed memory to the system with glibc's malloc_trim, at most once in TRIM_SECONDS.

    glibc keeps freed blocks. They are too small for a later chunk with longer rows, so the heap would grow
    from step to step. Other C libraries have no malloc_trim.
    """
    now = time.monotonic()
    if now - ChunkedEmbedding.last_trim >= TRIM_SECONDS and sys.platform == "linux":
        ChunkedEmbedding.last_trim = now
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)


def random_state(device):
    """Return (CPU state, GPU state) of the random generators; the GPU state is None if device is the CPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state, device):
    """Restore the states that random_state returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
