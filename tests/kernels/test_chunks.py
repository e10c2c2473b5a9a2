"""Tests of embed_in_chunks, which gives the gradients of the whole graph with the memory of one chunk.

tests/contract compares loss, gradients and random numbers with those of the whole batch, with dropout and
batch norm.
"""
import weakref
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from kernels import embed_in_chunks


def test_activations_of_one_chunk_exist_at_a_time():
    """Forward stores only the embeddings. Backward has the activations of one chunk at a time."""
    layer, alive, most = nn.Linear(6, 5), set(), []

    def embed(chunk):
        hidden = layer(chunk).tanh()
        alive.add(weakref.ref(hidden, alive.discard))
        most.append(len(alive))
        return hidden * hidden

    z = embed_in_chunks(embed, torch.randn(12, 6).split(3), layer)
    assert len(most) == 4 and not alive
    z.square().sum().backward()
    assert len(most) == 8 and max(most) == 1 and not alive
    with torch.no_grad():
        assert not embed_in_chunks(embed, torch.randn(12, 6).split(3), layer).requires_grad


@pytest.mark.parametrize("change", [nn.Module.eval, lambda layer: layer.weight.add_(1),
                                    lambda layer: layer.bias.add_(1)])         # the bias is frozen
def test_changes_before_backward_are_refused(change):
    layer = nn.Linear(6, 5)
    layer.bias.requires_grad_(False)
    loss = embed_in_chunks(layer, torch.randn(8, 6).split(3), layer).square().sum()
    with torch.no_grad():
        change(layer)
    with pytest.raises(RuntimeError, match="has changed|modified by an inplace"):
        loss.backward()


@dataclass
class Texts:
    x: torch.Tensor


@pytest.mark.parametrize("kind, zero", [
    (lambda x: {"x": x}, lambda chunk: chunk["x"].zero_()), (lambda x: {"x": x}, lambda chunk: chunk.clear()),
    (lambda x: BatchEncoding({"x": [x]}), lambda chunk: chunk["x"][0].zero_()),
    (MappingProxyType, lambda chunk: chunk["x"].zero_()), (Texts, lambda chunk: chunk.x.zero_()),
    (lambda x: (0, [x.numpy()]), lambda chunk: chunk[1][0].fill(0))])
def test_changed_chunks_are_refused(kind, zero):
    """Without this check, gradients would be wrong if a data loader reused its buffers before backward."""
    layer, rows = nn.Linear(6, 5), torch.randn(8, 6).split(3)
    chunks = [kind({"x": x.clone()} if kind is MappingProxyType else x.clone()) for x in rows]
    z = embed_in_chunks(lambda chunk: layer(rows[0]), chunks, layer)
    zero(chunks[1])
    with pytest.raises(RuntimeError, match="a chunk, a parameter or the training mode .* has changed"):
        z.sum().backward()


def chunked_loss(layer):
    return embed_in_chunks(layer, torch.randn(8, 6).split(3), layer).square().sum()


def test_two_backward_passes():
    """With retain_graph=True, the second backward pass repeats the dropout masks, too."""
    layer = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5))
    loss = chunked_loss(layer)
    loss.backward(retain_graph=True)
    once = layer[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(layer[0].weight.grad, 2 * once)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_other_ways_to_differentiate_are_refused():
    """They would return None or wrong gradients, because each chunk adds to .grad."""
    layer = nn.Linear(6, 5)
    with pytest.raises(RuntimeError, match="found torch.autograd.grad"):
        torch.autograd.grad(chunked_loss(layer), layer.weight, allow_unused=True)
    with pytest.raises(RuntimeError, match="second derivatives need; pass module=None"):
        chunked_loss(layer).backward(create_graph=True)


def test_autocast_keeps_no_weights_without_gradient():
    """Before torch 2.11, later layers would get autocast's copies of weights, which have no gradient."""
    layer, seen = nn.Linear(6, 5), []
    layer.register_forward_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    with torch.autocast("cpu", torch.bfloat16):
        assert embed_in_chunks(layer, torch.randn(8, 6).split(3), layer).dtype == torch.bfloat16
    assert seen == [False] * 3
