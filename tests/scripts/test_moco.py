"""MoCo's own: loss against single terms, queue, key encoder, split and shuffled batch norms, rates."""
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moco

randn = partial(torch.randn, dtype=torch.float64)


@pytest.mark.parametrize("impl, near", [("eager", 1e-10), ("blockwise", 1e-10), ("triton", 2e-5)])
@pytest.mark.parametrize("n, k", [(1, 1), (5, 12)])
def test_loss_is_the_papers(n, k, impl, near):
    torch.manual_seed(10)
    q, keys, wanted = randn(n, 16, requires_grad=True), randn(n, 16, requires_grad=True), 0
    others = F.normalize(randn(k, 16), dim=1)
    for q_i, k_i in zip(F.normalize(q, dim=1), F.normalize(keys.detach(), dim=1)):
        wanted = wanted - (torch.stack([k_i, *others]) @ q_i / 0.07).log_softmax(0)[0] / n
    kind = torch.float32 if impl == "triton" else torch.float64
    loss = moco.moco_loss(q.to(kind), keys.to(kind), others.to(kind), impl=impl).double()
    found, wanted = ([x, *torch.autograd.grad(x, (q, keys), allow_unused=True)] for x in (loss, wanted))
    torch.testing.assert_close(found[:2], wanted[:2], rtol=near, atol=near)
    assert found[2] is None


def test_queue_turns_round():
    queue = torch.arange(6.0)[:, None].repeat(1, 2)
    pointer = moco.enqueue(queue, 0, torch.full((4, 2), 10.0))
    assert pointer == 4 and queue[:, 0].tolist() == [10, 10, 10, 10, 4, 5]
    keys = torch.tensor([[20.0], [21], [22], [23]]).expand(4, 2).requires_grad_()
    assert moco.enqueue(queue, pointer, keys) == 2
    assert queue[:, 0].tolist() == [22, 23, 10, 10, 20, 21] and not queue.requires_grad
    with pytest.raises(ValueError, match="7 rows, the queue holds 6"):
        moco.enqueue(queue, 0, torch.zeros(7, 2))


def test_a_step_with_a_memory_bank(monkeypatch):
    """Each query beside its own slot and those drawn; then the slots move, those of other pictures do not."""
    torch.manual_seed(11)
    bank, q, rows = F.normalize(randn(7, 5), dim=1), randn(3, 5, requires_grad=True), [4, 0, 6]
    drawn = torch.tensor([0, 2, 2, 5])
    model = lambda views: q
    model.queue, before = bank.clone(), bank.clone()
    monkeypatch.setattr(torch, "randint", lambda *size, device: drawn)
    args = SimpleNamespace(queue=4, temperature=0.07, momentum=0.5, impl="eager", precision="fp32")
    loss, _ = moco.compute_bank_loss(model, q, rows, args)
    unit, wanted = F.normalize(q, dim=1), 0
    for x, row in zip(unit, rows):
        logits = torch.stack([bank[row], *bank[drawn]]) @ x / 0.07
        wanted = wanted - logits.log_softmax(0)[0] / 3
    grads = [torch.autograd.grad(x, q)[0] for x in (loss, wanted)]
    torch.testing.assert_close([loss, grads[0]], [wanted, grads[1]], rtol=1e-10, atol=1e-10)
    for row, x in zip(rows, unit.detach()):
        mean = (bank[row] + x) / 2
        before[row] = mean / mean.norm()
    torch.testing.assert_close(model.queue, before, rtol=1e-6, atol=1e-6)         # slots are found in float32
    for momentum, slots in ((1, bank), (0, bank.index_copy(0, torch.tensor(rows), unit.detach()))):
        moco.update_bank(kept := bank.float(), torch.tensor(rows), unit.detach(), momentum)
        torch.testing.assert_close(kept, slots.float())


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999, 1.0])
def test_key_encoder_follows(momentum):
    query, key = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double() for _ in range(2))
    query[1].running_mean += 5
    wanted = [momentum * k + (1 - momentum) * q for k, q in zip(key.parameters(), query.parameters())]
    moco.update_key_encoder(key, query, momentum)
    near = 1e-14 if 0 < momentum < 1 else 0                    # 0 copies and 1 freezes, to the bit
    torch.testing.assert_close([*key.parameters()], wanted, rtol=near, atol=near)
    assert not key[1].running_mean.any()                       # statistics are its own


def test_split_batch_norms_are_one_a_part():
    x, parts = randn(8, 3, 4, 4), [nn.BatchNorm2d(3).double() for _ in range(4)]
    moco.split_norms(network := nn.Sequential(nn.BatchNorm2d(3).double()), rows=2)
    split = network.double()[0]
    wanted = torch.cat([norm(part) for norm, part in zip(parts, x.chunk(4))])
    torch.testing.assert_close(split(x), wanted, rtol=1e-12, atol=1e-12)
    mean = {name: sum(norm.state_dict()[name] for norm in parts) / 4 for name in split.state_dict()}
    torch.testing.assert_close(split.state_dict(), mean | {"num_batches_tracked": torch.tensor(1)})
    parts[0].load_state_dict(split.state_dict())
    assert torch.equal(split.eval()(x), parts[0].eval()(x))


def test_keys_are_encoded_in_other_parts_and_come_back_in_order():
    seen, views = [], F.normalize(torch.randn(16, 5), dim=1)
    key = SimpleNamespace(features=lambda x: seen.append(x) or x, head=lambda x: x)
    torch.testing.assert_close(moco.encode_keys(SimpleNamespace(key=key), views, 16), views)
    assert not torch.equal(seen[0], views)


def test_rates_fall_by_epochs():
    epochs, half = (0, 100, 119, 120, 160), lambda x: 0.5 + math.cos(math.pi * x / 200) / 2
    for v1, wanted in ((True, [1, 1, 1, 0.1, 0.01]), (False, [*map(half, epochs)])):
        assert [moco.epoch_rate(x, 200, SimpleNamespace(v1=v1)) for x in epochs] == pytest.approx(wanted)


@pytest.mark.parametrize("given, wanted", [
    ("", dict(recipe=None, model="resnet-50", queue=None, temperature=None)),
    ("--v1", dict(recipe=None, v1=True, size=None, queue=None)),
    ("--memory-bank", dict(v1=True, momentum=0.5, queue=4096, temperature=0.07, crop=0.2)),
    ("--recipe v1", dict(v1=True, head_layers=1, temperature=0.07, blur=0.0, queue=65536, size=224)),
    ("--recipe v2", dict(v1=False, head_layers=2, temperature=0.2, blur=0.5, weight_decay=1e-4)),
    ("--recipe demo --epochs 9", dict(model="resnet-18", head_layers=1, temperature=0.1, epochs=9, lr=0.03,
                                      batch_size=512, bn_splits=8, queue=4096, momentum=0.99))])
def test_recipes(given, wanted):
    args = moco.make_parser().parse_args(["--data", "x", *given.split()])
    assert wanted.items() <= vars(args).items()
