"""Test moco.py: queue, key encoder, split batch norm, and shuffled keys. The order of operations
in a step, and several processes, are tested in tests/training/images/test_dataset.py."""
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loss_formulas
import moco
from running import equal


def test_enqueue_overwrites_the_oldest_keys():
    queue = torch.arange(6.0)[:, None].repeat(1, 2)
    pointer = moco.enqueue(queue, 0, torch.full((4, 2), 10.0))
    assert pointer == 4 and queue[:, 0].tolist() == [10, 10, 10, 10, 4, 5]
    keys = torch.tensor([[20.0], [21], [22], [23]]).expand(4, 2).requires_grad_()
    assert moco.enqueue(queue, pointer, keys) == 2
    assert queue[:, 0].tolist() == [22, 23, 10, 10, 20, 21] and not queue.requires_grad


@pytest.mark.parametrize("momentum", [0.0, 0.999, 1.0])
def test_update_key_encoder(momentum):
    """The key encoder's weights follow those of the query encoder. Momentum 0 copies the weights exactly;
    momentum 1 keeps the old weights exactly. Batch norms of the key encoder keep their running statistics."""
    query, key = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double() for _ in range(2))
    query[1].running_mean += 5
    wanted = [momentum * k + (1 - momentum) * q for k, q in zip(key.parameters(), query.parameters())]
    moco.update_key_encoder(key, query, momentum)
    near = 1e-14 if 0 < momentum < 1 else 0
    torch.testing.assert_close([*key.parameters()], wanted, rtol=near, atol=near)
    assert not key[1].running_mean.any()


def test_split_batch_norm():
    """The outputs equal those of one batch norm per split. The running statistics are the mean over these
    batch norms. In eval mode, the layer is an ordinary batch norm."""
    x, parts = torch.randn(8, 3, 4, 4).double(), [nn.BatchNorm2d(3).double() for _ in range(4)]
    network = nn.Sequential(nn.BatchNorm2d(3).double())
    moco.use_split_batch_norm(network, split_size=2)
    split = network.double()[0]
    wanted = torch.cat([norm(part) for norm, part in zip(parts, x.chunk(4))])
    torch.testing.assert_close(split(x), wanted, rtol=1e-12, atol=1e-12)
    mean = {name: sum(norm.state_dict()[name] for norm in parts) / 4 for name in split.state_dict()}
    torch.testing.assert_close(split.state_dict(), mean | {"num_batches_tracked": torch.tensor(1)})
    parts[0].load_state_dict(split.state_dict())
    assert torch.equal(split.eval()(x), parts[0].eval()(x))


def test_keys_are_shuffled_for_encoding_only():
    views = F.normalize(torch.randn(16, 5), dim=1)
    features = Mock(side_effect=lambda x: x)
    model = SimpleNamespace(key=SimpleNamespace(features=features, head=lambda x: x))
    torch.testing.assert_close(moco.encode_keys(model, views, 16), views)
    assert not torch.equal(features.call_args.args[0], views)


def test_symmetric_uses_each_view_as_query_and_as_key(monkeypatch):
    """The losses of both directions are added. The keys of the first views enter the queue first."""
    first, second, queue = F.normalize(torch.randn(3, 4, 6).double(), dim=2)
    monkeypatch.setattr(moco, "augment", lambda x, _: x)
    images = SimpleNamespace(training_views=iter([torch.cat([first, second])]))
    args = SimpleNamespace(symmetric=True, temperature=0.2, impl="eager", precision="fp32")
    queries, keys = moco.make_batch(images, args)
    assert equal([queries, keys], [[second, first], [first, second]])
    loss, _ = moco.compute_loss(Mock(side_effect=lambda x: x, queue=queue), (queries, keys), 4, args)
    wanted = sum(loss_formulas.moco_loss(q, k, queue, 0.2) for q, k in ((second, first), (first, second)))
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=0)
