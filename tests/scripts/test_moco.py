"""moco.py: the loss against its formula, queue, key encoder, split and shuffled batch norms, learning
rates."""
import math
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moco
from kernels.training.papers import moco_bank

randn = partial(torch.randn, dtype=torch.float64)


def test_enqueue_wraps_around():
    queue = torch.arange(6.0)[:, None].repeat(1, 2)
    pointer = moco.enqueue(queue, 0, torch.full((4, 2), 10.0))
    assert pointer == 4 and queue[:, 0].tolist() == [10, 10, 10, 10, 4, 5]
    keys = torch.tensor([[20.0], [21], [22], [23]]).expand(4, 2).requires_grad_()
    assert moco.enqueue(queue, pointer, keys) == 2
    assert queue[:, 0].tolist() == [22, 23, 10, 10, 20, 21] and not queue.requires_grad
    with pytest.raises(ValueError, match="found 7 rows, expected at most 6"):
        moco.enqueue(queue, 0, torch.zeros(7, 2))


def test_a_step_with_a_memory_bank(monkeypatch):
    """A query's positive is its own slot, its negatives are sampled slots. Then only the slots of these
    images are updated."""
    torch.manual_seed(11)
    bank, q, rows = F.normalize(randn(7, 5), dim=1), randn(3, 5, requires_grad=True), [4, 0, 6]
    sampled = torch.tensor([0, 2, 2, 5])
    model = Mock(return_value=q, queue=bank.clone())
    monkeypatch.setattr(torch, "randint", lambda *size, device: sampled)
    args = SimpleNamespace(queue_size=4, temperature=0.07, momentum=0.5, impl="eager", precision="fp32")
    loss, _ = moco_bank.compute_bank_loss(model, q, rows, args)
    unit, wanted = F.normalize(q, dim=1), 0
    for x, row in zip(unit, rows):
        logits = torch.stack([bank[row], *bank[sampled]]) @ x / 0.07
        wanted = wanted - logits.log_softmax(0)[0] / 3
    grads = [torch.autograd.grad(x, q)[0] for x in (loss, wanted)]
    torch.testing.assert_close([loss, grads[0]], [wanted, grads[1]], rtol=1e-10, atol=1e-10)
    expected = bank.clone()
    for row, x in zip(rows, unit.detach()):
        mean = (bank[row] + x) / 2
        expected[row] = mean / mean.norm()
    torch.testing.assert_close(model.queue, expected, rtol=1e-6, atol=1e-6)       # updates are in float32
    for momentum, expected in ((1, bank), (0, bank.index_copy(0, torch.tensor(rows), unit.detach()))):
        updated = bank.float()
        moco_bank.update_bank(updated, torch.tensor(rows), unit.detach(), momentum)
        torch.testing.assert_close(updated, expected.float())


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999, 1.0])
def test_update_key_encoder(momentum):
    query, key = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double() for _ in range(2))
    query[1].running_mean += 5
    wanted = [momentum * k + (1 - momentum) * q for k, q in zip(key.parameters(), query.parameters())]
    moco.update_key_encoder(key, query, momentum)
    near = 1e-14 if 0 < momentum < 1 else 0                    # 0 copies and 1 freezes exactly
    torch.testing.assert_close([*key.parameters()], wanted, rtol=near, atol=near)
    assert not key[1].running_mean.any()                       # it keeps its own statistics


def test_split_batch_norm():
    """The layer equals a separate batch norm for each split; running statistics are their mean. In eval mode
    it is an ordinary batch norm."""
    x, parts = randn(8, 3, 4, 4), [nn.BatchNorm2d(3).double() for _ in range(4)]
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


@pytest.mark.parametrize("v1", [True, False])
def test_lr_factor(v1):
    """v1 divides the rate by 10 after 60 % and 80 % of the epochs; v2 follows half a cosine."""
    epochs = 0, 100, 119, 120, 160
    wanted = [1, 1, 1, 0.1, 0.01] if v1 else [0.5 + math.cos(math.pi * x / 200) / 2 for x in epochs]
    assert [moco.lr_factor(x, 200, SimpleNamespace(v1=v1)) for x in epochs] == pytest.approx(wanted)


@pytest.mark.parametrize("given, wanted", [
    ("", dict(recipe=None, model="resnet-50", queue_size=None, temperature=None)),
    ("--v1", dict(recipe=None, v1=True, image_size=None, queue_size=None)),
    ("--memory-bank", dict(v1=True, momentum=0.5, queue_size=4096, temperature=0.07, crop=0.2)),
    ("--recipe v1", dict(v1=True, head_layers=1, temperature=0.07, blur=0, queue_size=65536, image_size=224)),
    ("--recipe v2", dict(v1=False, head_layers=2, temperature=0.2, blur=0.5, weight_decay=1e-4)),
    ("--recipe demo --epochs 9", dict(model="resnet-18", head_layers=1, temperature=0.1, epochs=9, lr=0.03,
                                      batch_size=512, bn_splits=8, queue_size=4096, momentum=0.99))])
def test_recipes(given, wanted):
    args = moco.make_parser().parse_args(["--data", "x", *given.split()])
    assert wanted.items() <= vars(args).items()
