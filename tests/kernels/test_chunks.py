"""embed_in_chunks: same gradients as the whole graph, dropout included, with the memory of one chunk."""
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
    """Return loss, gradients and random numbers drawn after a step. The two halves of the rows are views."""
    torch.manual_seed(5)
    z = nn.functional.normalize(embed_all(), dim=1) + 0.1 * torch.rand(1)  # a loss may use random numbers too
    loss = info_nce(*z.chunk(2), temperature=0.2, symmetric=True)
    encoder.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in encoder.parameters()), torch.rand(3)]


@pytest.mark.parametrize("size, norm", [(1, False), (7, False), (64, False), (7, True), (64, True)])
def test_gradients_equal_those_of_the_whole_graph(size, norm):
    torch.manual_seed(0)
    encoder, chunks = Encoder(norm).double(), list(torch.randn(66, 6, dtype=torch.float64).split(size))
    expected = gradients(lambda: torch.cat([encoder(chunk) for chunk in chunks]), encoder)
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    if norm:  # start the second run from the same statistics
        encoder.layers[1].reset_running_stats()
    found = gradients(lambda: embed_in_chunks(encoder, chunks, encoder), encoder)
    for a, b in zip(expected, found):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    # running statistics were updated once per chunk, not twice
    assert all(torch.equal(tensor, state[name]) for name, tensor in encoder.state_dict().items())


def test_recomputation_uses_the_same_autocast():
    torch.manual_seed(2)
    encoder, chunks = Encoder(), torch.randn(8, 6).split(3)

    def in_bfloat16(embed):
        with torch.autocast("cpu", torch.bfloat16):
            return embed().float()

    def embed_whole():
        return torch.cat([encoder(chunk) for chunk in chunks])

    expected = gradients(lambda: in_bfloat16(embed_whole), encoder)
    found = gradients(lambda: in_bfloat16(lambda: embed_in_chunks(encoder, chunks, encoder)), encoder)
    assert torch.equal(expected[0], found[0])
    for a, b in zip(expected, found):  # unchunked, a weight's gradients are summed in bfloat16
        torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)


def test_no_graph_under_no_grad():
    encoder, x = Encoder().eval(), torch.randn(8, 6)
    with torch.no_grad():
        z = embed_in_chunks(encoder, x.split(3), encoder)
    assert not z.requires_grad and torch.allclose(z, encoder(x))


def test_graphs_hold_one_chunk():
    """Autograd saves only the embeddings in forward, and one chunk's activations at a time in backward."""
    encoder = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    saved = []  # numbers that autograd saved, per call of embed

    def embed(chunk):
        saved.append(0)
        return encoder(chunk)

    def count(x):
        saved[-1] += x.numel()
        return x

    x = torch.randn(256, 64)
    chunks = x.split(32)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        embed_in_chunks(embed, chunks, encoder).square().sum().backward()
    forward, backward = saved[:len(chunks)], saved[len(chunks):]
    assert len(backward) == len(chunks) and sum(forward) == x.numel()
    assert 0 < max(backward) <= 8 * (2 * 32 * 64 + 64 * 64)  # per layer: input and output, and the weights


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc")
@pytest.mark.parametrize("seconds, freed", [(0, True), (1, False)])
def test_freed_memory_returns_to_the_system(seconds, freed, monkeypatch):
    """malloc_trim returns freed memory to the system. Without it, glibc keeps freed memory as long as a later
    allocation (a gradient) is in use. It is called at most every TRIM_SECONDS, over all backward passes."""
    def resident_mb():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    def embed(x):
        nonlocal kept, peak
        if torch.is_grad_enabled():
            pieces = [torch.ones(2**14) for _ in range(2**11)]  # 64 KiB each, 128 MiB
            kept, peak = pieces[-1], resident_mb()
        return x * weight

    kept, peak, weight = None, 0, nn.Parameter(torch.ones(1))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.5))
    monkeypatch.setattr(module.ChunkedEmbedding, "last_trim", 100.0)
    monkeypatch.setattr(module, "TRIM_SECONDS", seconds)
    embed_in_chunks(embed, torch.ones(4, 1).split(2), nn.ParameterList([weight])).sum().backward()
    assert weight.grad == 4 and kept is not None and (peak - resident_mb() > 100) == freed
    assert module.ChunkedEmbedding.last_trim == (100.5 if freed else 100.0)
