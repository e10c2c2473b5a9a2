"""embed_in_chunks: same gradients as the whole graph, dropout included, with the memory of one chunk."""
import weakref

import pytest
import torch
from torch import nn

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


def test_activations_of_one_chunk_exist_at_a_time():
    """Forward keeps only the embeddings; backward has the activations of one chunk at a time."""
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


def test_hooks_inputs_and_unused_parameters():
    """Hooks see the whole gradient once; backward(inputs=...) reaches these only; unused ones get none."""
    torch.manual_seed(3)
    layer, unused = nn.Linear(6, 5), nn.Linear(6, 5)
    module, seen = nn.ModuleList([layer, unused]), []
    x = torch.randn(12, 6)
    layer(x).square().sum().backward()
    expected, layer.weight.grad, layer.bias.grad = layer.weight.grad, None, None
    handle = layer.weight.register_hook(lambda g: seen.append(g))
    embed_in_chunks(layer, x.split(5), module).square().sum().backward(inputs=[layer.weight])
    torch.testing.assert_close(layer.weight.grad, expected)
    assert len(seen) == 1 and layer.bias.grad is None and unused.weight.grad is None
    handle.remove()


def test_changes_before_backward_are_refused():
    for change in (nn.Module.eval, lambda layer: layer.bias.add_(1), lambda layer: layer.weight.add_(1)):
        layer = nn.Linear(6, 5)
        loss = embed_in_chunks(layer, torch.randn(8, 6).split(3), layer).square().sum()
        with torch.no_grad():
            change(layer)
        with pytest.raises(RuntimeError, match="has changed|modified by an inplace"):
            loss.backward()


def test_an_expanded_buffer_is_no_obstacle():
    layer = nn.Linear(6, 5)
    layer.register_buffer("scale", torch.ones(1).expand(5))
    embed_in_chunks(lambda x: layer(x) * layer.scale, torch.randn(8, 6).split(3), layer).sum().backward()
    assert layer.weight.grad is not None
