"""Embeddings of a batch whose activations do not fit, with exact gradients.

    z = torch.cat([embed(chunk) for chunk in chunks])        keeps all chunks' activations until backward
    z = embed_in_chunks(embed, chunks, module)               keeps those of one chunk

The loss sees the weights θ through the embeddings alone, L(z_1(θ), ..., z_C(θ)), so

    dL/dθ = Σ_c (dz_c/dθ)ᵀ dL/dz_c

and all that a chunk has to know of the others is its dL/dz_c, a tensor as small as z_c (GradCache: Gao,
Zhang, Han, Callan 2021, arXiv 2101.06983). Forward therefore forgets each chunk's activations; the loss and
dL/dz are computed once, over the whole batch; backward embeds each chunk again, with the random numbers and
the autocast of the first time, and goes through it at once. Price: one forward more.
"""
import ctypes
import sys
import time

import torch

from .checks import check_callable, check_dense, told

TRIM_SECONDS = 1  # from one to the next: pages that are given back have to be fetched again


def embed_in_chunks(embed, chunks, module):
    """torch.cat of embed(chunk) over the chunks, holding the activations of one chunk at a time.

    embed    callable, chunk → (n, D) tensor on the module's device; backward repeats its dropout exactly
    chunks   list of what embed takes, as tensor.split(size) is; no gradient goes to them
    module   whose parameters embed uses: they get the gradients that they would get without this function.
             Batch norms inside normalise by each chunk's own statistics, as as many GPUs would without
             synchronisation, and count them once. None: plain torch.cat, which keeps all activations
    returns  (Σ n, D)
    source   Gao et al. 2021, section 3.2
    """
    check_callable("embed", embed)
    check_dense("chunks", chunks)
    if isinstance(chunks, torch.Tensor):
        raise ValueError(f"chunks: found one tensor {tuple(chunks.shape)}, whose rows would be the chunks; "
                         "wanted a list of chunks: tensor.split(size)")
    if isinstance(chunks, str) or hasattr(chunks, "shape") or not hasattr(chunks, "__iter__"):
        raise ValueError(f"chunks: found {told(chunks)}, wanted a list of what embed takes")
    if not isinstance(module, (torch.nn.Module, type(None))):
        raise ValueError(f"module: found {type(module).__name__}, wanted the torch.nn.Module that embed uses")
    chunks = list(chunks)
    if not chunks:
        raise ValueError("chunks: found none, wanted at least one")
    if module is None or not torch.is_grad_enabled() or len(chunks) == 1:
        return stacked([embed_rows(embed, chunk) for chunk in chunks])
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("module: no parameter requires a gradient; for a module at rest give module=None")
    return Chunks.apply(embed, chunks, module, trained[0])


def embed_rows(embed, chunk):
    """embed(chunk); a list of single rows would become one long vector."""
    z = embed(chunk)
    check_dense("embed", z)
    if not isinstance(z, torch.Tensor) or z.dim() < 2:
        found = f"a tensor {tuple(z.shape)}" if isinstance(z, torch.Tensor) else type(z).__name__
        raise ValueError(f"embed: found {found} for a chunk, wanted a tensor (rows of the chunk, D)")
    return z


def stacked(parts):
    """torch.cat of what embed gave for each chunk."""
    wide, *others = (part.shape[1:] for part in parts)
    for other in others:
        if other != wide:
            raise ValueError(f"embed: found rows {tuple(wide)} and {tuple(other)}, wanted all chunks' alike")
    return torch.cat(parts)


class Chunks(torch.autograd.Function):
    """Its last argument, a parameter, makes autograd call backward, which puts all gradients in place."""
    trimmed = 0.0  # when the heap was, by any call

    @staticmethod
    def forward(ctx, embed, chunks, module, _):
        ctx.embed, ctx.chunks, ctx.module, ctx.random, parts = embed, chunks, module, [], []
        ctx.device = _.device
        ctx.autocast = torch.is_autocast_enabled(ctx.device.type), torch.get_autocast_dtype(ctx.device.type)
        for chunk in chunks:
            ctx.random.append(random_state(ctx.device))
            parts.append(embed_rows(embed, chunk))
        ctx.sizes = [len(part) for part in parts]
        return stacked(parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        now, buffers = random_state(ctx.device), [(buffer, buffer.clone()) for buffer in ctx.module.buffers()]
        for chunk, random, part in zip(ctx.chunks, ctx.random, gradient.split(ctx.sizes)):
            set_random_state(random, ctx.device)
            kind, (enabled, dtype) = ctx.device.type, ctx.autocast
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled=enabled):
                z = ctx.embed(chunk)
            torch.autograd.backward(z, part)
            if ctx.device.type == "cpu":
                trim_heap()
        set_random_state(now, ctx.device)
        for buffer, before in buffers:
            buffer.copy_(before)
        return None, None, None, None


def trim_heap():
    """Gives the system what this process has freed, if that was not done just now. glibc keeps it, in pieces
    that a chunk of longer rows cannot use, so that the heap grows from step to step; other C libraries have
    no malloc_trim."""
    now = time.monotonic()
    if now - Chunks.trimmed >= TRIM_SECONDS and sys.platform == "linux":
        Chunks.trimmed = now
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


def random_state(device):
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state, device):
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
