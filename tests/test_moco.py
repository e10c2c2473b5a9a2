"""MoCo's own: loss against single terms, queue, key encoder, split and shuffled batch norms, views, flags."""
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moco
from running import DATA, refuse, run

randn = partial(torch.randn, dtype=torch.float64)


@pytest.mark.parametrize("impl, near", [("eager", 1e-10), ("blockwise", 1e-10), ("triton", 2e-5)])
@pytest.mark.parametrize("n, k", [(1, 1), (5, 12), (4, 3)])
def test_loss_is_the_papers(n, k, impl, near):
    torch.manual_seed(10)
    keys, queue = randn(n, 16), F.normalize(randn(k, 16), dim=1)
    wanted, q = 0, randn(n, 16).requires_grad_()
    for q_i, k_i in zip(F.normalize(q, dim=1), F.normalize(keys, dim=1)):
        logits = torch.stack([q_i @ k_i, *(q_i @ n_j for n_j in queue)]) / 0.07
        wanted = wanted - logits.log_softmax(0)[0] / n
    kind = torch.float32 if impl == "triton" else torch.float64
    inputs = [x.detach().to(kind).requires_grad_() for x in (q, keys, queue)]
    loss = moco.moco_loss(*inputs, impl=impl)
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    found = [loss.double(), gradients[0].double()]
    torch.testing.assert_close(found, [wanted, *torch.autograd.grad(wanted, q)], rtol=near, atol=near)
    assert gradients[1:] == (None, None)


def test_queue_turns_round():
    queue = torch.arange(6.0)[:, None].repeat(1, 2)
    pointer = moco.enqueue(queue, 0, torch.full((4, 2), 10.0))
    assert pointer == 4 and queue[:, 0].tolist() == [10, 10, 10, 10, 4, 5]
    keys = torch.tensor([[20.0], [21], [22], [23]]).expand(4, 2).requires_grad_()
    assert moco.enqueue(queue, pointer, keys) == 2
    assert queue[:, 0].tolist() == [22, 23, 10, 10, 20, 21] and not queue.requires_grad
    assert moco.enqueue(queue, 0, torch.zeros(6, 2)) == 0 and not queue.any()
    with pytest.raises(ValueError, match="7 rows, the queue holds 6"):
        moco.enqueue(queue, 0, torch.zeros(7, 2))


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999, 1.0])
def test_key_encoder_follows(momentum):
    query, key = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double() for _ in range(2))
    query[1].running_mean += 5
    wanted = [momentum * k + (1 - momentum) * q for k, q in zip(key.parameters(), query.parameters())]
    moco.update_key_encoder(key, query, momentum)
    near = 1e-14 if 0 < momentum < 1 else 0                    # 0 copies and 1 freezes, to the bit
    torch.testing.assert_close([*key.parameters()], wanted, rtol=near, atol=near)
    assert not key[1].running_mean.any() and key[1].num_batches_tracked == 0  # statistics are its own


def test_every_weight_of_the_copy_follows_before_keys_are_encoded(tmp_path, monkeypatch):
    def checked(model, *rest, encode=moco.encode_keys):
        weights = dict(model.named_parameters())
        pairs = [(weights[name.removeprefix("key.")], weights[name]) for name in weights if "key." in name]
        assert len(pairs) == len(weights) / 2 and all(torch.equal(one, two) for one, two in pairs)
        return encode(model, *rest)

    monkeypatch.setattr(moco, "encode_keys", checked)
    flags = ["--momentum", 0, "--batch-size", 16, "--queue", 16, "--steps", 2, "--probe-epochs", 0]
    run("moco", tmp_path / "out", "--data", DATA / "shapes.npz", "--model", "resnet-small", *flags)


def test_split_batch_norms_are_one_a_part():
    x, parts = randn(8, 3, 4, 4), [nn.BatchNorm2d(3).double() for _ in range(4)]
    network = nn.Sequential(nn.BatchNorm2d(3))
    moco.split_norms(network, rows=2)
    split = network.double()[0]
    wanted = torch.cat([norm(part) for norm, part in zip(parts, x.chunk(4))])
    torch.testing.assert_close(split(x), wanted, rtol=1e-12, atol=1e-12)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(norm, name) for norm in parts]).mean(0)
        torch.testing.assert_close(getattr(split, name), mean)
    parts[0].load_state_dict(split.state_dict())
    assert torch.equal(split.eval()(x), parts[0].eval()(x)) and split.num_batches_tracked == 1


def test_keys_are_encoded_in_other_parts_and_come_back_in_order():
    seen, views = [], F.normalize(torch.randn(16, 5), dim=1)
    key = SimpleNamespace(features=lambda x: seen.append(x) or x, head=lambda x: x)
    torch.testing.assert_close(moco.encode_keys(SimpleNamespace(key=key), views, 16), views)
    assert not torch.equal(seen[0], views) and torch.equal(seen[0].sum(1).sort()[0], views.sum(1).sort()[0])


def test_rates_fall_by_epochs():
    v1, v2 = ([moco.epoch_rate(epoch, 200, SimpleNamespace(v1=v1)) for epoch in (0, 100, 119, 120, 160)]
              for v1 in (True, False))
    assert v1 == pytest.approx([1, 1, 1, 0.1, 0.01])
    assert v2[:2] == pytest.approx([1, 0.5]) and v2[4] == pytest.approx(0.5 - math.cos(math.pi / 5) / 2)


@pytest.mark.parametrize("v1, steps", [
    (True, [0.2, ("grey",), ("jitter", 0.4, 0.4, 1)]),
    (False, [("jitter", 0.4, 0.1, 0.8), 0.2, ("grey",), 0.5, ("blur",)])])
def test_views_are_the_versions(v1, steps, monkeypatch):
    """What is done, in order, with which amounts and shares; boxes are drawn in the logarithm of aspects."""
    done, boxes, coin = [], [], moco.coin
    for name in ("jitter", "grey", "blur"):
        monkeypatch.setattr(moco, name, lambda x, *amounts, name=name: done.append((name, *amounts)) or x)
    monkeypatch.setattr(moco, "coin", lambda p, x: done.append(p) or coin(p, x))
    monkeypatch.setattr(moco, "crop_and_flip", lambda x, *given: boxes.extend(given) or x)
    torch.manual_seed(0)
    pictures = torch.zeros(4000, 2, 1, 3, dtype=torch.uint8)
    views = moco.augment(pictures, SimpleNamespace(crop=0.2, v1=v1, blur=0.5))
    assert done == steps and views.shape == (4000, 3, 2, 1)
    least, aspects, resize = boxes
    counts, _ = np.histogram(aspects.log().numpy(), np.linspace(math.log(3 / 4), math.log(4 / 3), 6))
    assert aspects.shape == (4000, 10) and counts.min() > 7_700 and least == 0.2 and resize is moco.linear


@pytest.mark.parametrize("flags, wanted", [
    ("--queue 10", r"--queue 10 is no multiple of the 4 keys of a step; try 8"),
    ("--queue 12 --symmetric", r"--queue 12 is no multiple of the 8 keys of a step; try 8"),
    ("--queue 8", r"--bn-splits 8 does not divide --batch-size, which is 4"),
    ("--queue 8 --bn-splits 2 --chunk-size 3", r"--chunk-size 3: wanted a multiple of 2, --batch-size / .*"),
    ("--queue 8 --bn-splits 2 --momentum 1.5", r"--momentum 1\.5: wanted a share from 0 to 1")])
def test_bad_flags(flags, wanted, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((4, 8, 8, 3), np.uint8))
    refuse("moco", capfd, wanted, "--data", "x.npy", "--batch-size", 4, *flags.split())
