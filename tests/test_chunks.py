"""embed_in_chunks: the gradients of the whole graph, dropout included, and the memory of one chunk."""
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kernels import info_nce
from kernels.chunks import embed_in_chunks


class Encoder(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 5))

    def forward(self, x):
        return self.layers(x)


def gradients(embed_all, encoder, x, seed=5):
    """Loss, gradients and the random numbers that follow, of one step over both halves of x."""
    torch.manual_seed(seed)
    z = embed_all(x)
    loss = info_nce(*nn.functional.normalize(z, dim=1).chunk(2), temperature=0.2, symmetric=True)
    encoder.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in encoder.parameters()), torch.rand(3)]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_gradients_are_those_of_the_whole_graph(size, norm):
    if norm and size == 1:
        pytest.skip("a batch norm cannot normalise one row")
    torch.manual_seed(0)
    encoder, x = Encoder(norm).double(), torch.randn(64, 6, dtype=torch.float64)
    chunks = list(x.split(size))
    chunks[-2:] = [torch.cat(chunks[-2:])] if norm and len(chunks[-1]) == 1 else chunks[-2:]
    wanted = gradients(lambda x: torch.cat([encoder(chunk) for chunk in chunks]), encoder, x)
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    if norm:                                                       # the same start for the other run
        encoder.layers[1].reset_running_stats()
    found = gradients(lambda x: embed_in_chunks(encoder, chunks, encoder), encoder, x)
    for a, b in zip(wanted, found):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(tensor, state[name]) for name, tensor in encoder.state_dict().items())   # statistics moved once


@pytest.mark.parametrize("size", [1, 7, 64])
def test_without_dropout_any_chunk_size_is_the_full_step(size):
    torch.manual_seed(1)
    encoder, x = Encoder().double().eval(), torch.randn(64, 6, dtype=torch.float64)
    wanted = gradients(encoder, encoder, x)
    found = gradients(lambda x: embed_in_chunks(encoder, x.split(size), encoder), encoder, x)
    for a, b in zip(wanted, found):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_autocast_is_repeated():
    torch.manual_seed(2)
    encoder, x = Encoder(), torch.randn(8, 6)

    def embed_all(chunks):
        with torch.autocast("cpu", torch.bfloat16):
            return chunks(x).float()

    wanted = gradients(lambda x: embed_all(lambda x: torch.cat([encoder(c) for c in x.split(3)])), encoder, x)
    found = gradients(lambda x: embed_all(lambda x: embed_in_chunks(encoder, x.split(3), encoder)), encoder, x)
    assert torch.equal(wanted[0], found[0])
    for a, b in zip(wanted, found):                                # the whole graph sums a weight's gradients in bfloat16
        torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)


def test_no_gradient_no_graph():
    encoder, x = Encoder().eval(), torch.randn(8, 6)
    with torch.no_grad():
        z = embed_in_chunks(encoder, x.split(3), encoder)
    assert not z.requires_grad and torch.allclose(z, encoder(x))


PEAK = """
import sys, torch
from kernels.chunks import embed_in_chunks
torch.set_num_threads(1)
encoder = torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())))
held = [0, 0]
class Count(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        super().__init__(self.pack, lambda x: x)
    def pack(self, x):
        held[0] += x.numel()
        held[1] = max(held)
        return x
x = torch.randn(int(sys.argv[1]), 64)
def embed(chunk):
    held[0] = 0
    return encoder(chunk)
with Count():
    embed_in_chunks(embed, x.split(32), encoder).square().sum().backward()
print(held[1])
"""


def test_graphs_hold_one_chunk():
    """The numbers that autograd keeps at any time: those of a chunk, whatever the batch, beside the embeddings."""
    kept = [int(subprocess.run([sys.executable, "-c", PEAK, str(n)], cwd=Path(__file__).parent.parent, capture_output=True, text=True).stdout)
            for n in (64, 1024)]
    assert kept[1] <= kept[0] + 1024 * 64
