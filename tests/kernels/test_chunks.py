"""embed_in_chunks: the gradients of the whole graph, dropout included, and the memory of one chunk."""
import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kernels import chunks as module
from kernels import embed_in_chunks, info_nce


class Encoder(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        middle = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(6, 16), middle, nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 5))

    def forward(self, x):
        return self.layers(x)


def gradients(embed_all, encoder):
    """Loss, gradients and the random numbers that follow, of one step over both halves of the embeddings."""
    torch.manual_seed(5)
    z = nn.functional.normalize(embed_all(), dim=1) + 0.1 * torch.rand(1)  # a loss may draw numbers too
    loss = info_nce(*z.chunk(2), temperature=0.2, symmetric=True)
    encoder.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in encoder.parameters()), torch.rand(3)]


@pytest.mark.parametrize("size, norm", [(1, False), (7, False), (64, False), (7, True), (64, True)])
def test_gradients_are_those_of_the_whole_graph(size, norm):
    torch.manual_seed(0)
    encoder, chunks = Encoder(norm).double(), list(torch.randn(66, 6, dtype=torch.float64).split(size))
    wanted = gradients(lambda: torch.cat([encoder(chunk) for chunk in chunks]), encoder)
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    if norm:  # the same start for the other run
        encoder.layers[1].reset_running_stats()
    found = gradients(lambda: embed_in_chunks(encoder, chunks, encoder), encoder)
    for a, b in zip(wanted, found):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    # statistics moved once
    assert all(torch.equal(tensor, state[name]) for name, tensor in encoder.state_dict().items())


def test_autocast_is_repeated():
    torch.manual_seed(2)
    encoder, chunks = Encoder(), torch.randn(8, 6).split(3)

    def in_bfloat16(embed):
        with torch.autocast("cpu", torch.bfloat16):
            return embed().float()

    whole = lambda: torch.cat([encoder(chunk) for chunk in chunks])
    wanted = gradients(lambda: in_bfloat16(whole), encoder)
    found = gradients(lambda: in_bfloat16(lambda: embed_in_chunks(encoder, chunks, encoder)), encoder)
    assert torch.equal(wanted[0], found[0])
    for a, b in zip(wanted, found):  # the whole graph sums a weight's gradients in bfloat16
        torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)


def test_no_gradient_no_graph():
    encoder, x = Encoder().eval(), torch.randn(8, 6)
    with torch.no_grad():
        z = embed_in_chunks(encoder, x.split(3), encoder)
    assert not z.requires_grad and torch.allclose(z, encoder(x))


def test_graphs_hold_one_chunk():
    """What autograd keeps in forward is the embeddings, and in backward the numbers of a chunk at a time."""
    encoder = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    held = []

    def embed(chunk):
        held.append(0)
        return encoder(chunk)

    def keep(x):
        held[-1] += x.numel()
        return x

    x = torch.randn(256, 64)
    chunks = x.split(32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        embed_in_chunks(embed, chunks, encoder).square().sum().backward()
    forward, backward = held[:len(chunks)], held[len(chunks):]
    assert len(backward) == len(chunks) and sum(forward) == x.numel()
    assert 0 < max(backward) <= 8 * (2 * 32 * 64 + 64 * 64)  # of a layer: rows twice, weights


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc")
@pytest.mark.parametrize("seconds, freed", [(0, True), (1, False)])
def test_freed_memory_goes_back(seconds, freed, monkeypatch):
    """What a chunk has freed below something that is kept, as gradients are, leaves the process: not at once
    if the last time is less than TRIM_SECONDS ago, in this call or another."""
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    def embed(x):
        nonlocal kept, most
        if torch.is_grad_enabled():
            pieces = [torch.ones(2**14) for _ in range(2**11)]  # 64 KiB each, 128 MiB
            kept, most = pieces[-1], resident()
        return x * weight

    kept, most, weight = None, 0, nn.Parameter(torch.ones(1))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.5))
    monkeypatch.setattr(module.Chunks, "trimmed", 100.0)
    monkeypatch.setattr(module, "TRIM_SECONDS", seconds)
    embed_in_chunks(embed, torch.ones(4, 1).split(2), nn.ParameterList([weight])).sum().backward()
    assert weight.grad == 4 and kept is not None and (most - resident() > 100) == freed
    assert module.Chunks.trimmed == (100.5 if freed else 100.0)
