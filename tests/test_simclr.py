"""SimCLR's own: both losses against sums of single terms, LARS, views, heads, --profile."""
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import simclr
from running import DATA

randn = partial(torch.randn, dtype=torch.float64)


def term_by_term(features, labels, tau):
    """SupCon of features (N, V, D); of two views and N different labels it is NT-Xent."""
    u, y, total = F.normalize(features, dim=2).flatten(0, 1), labels.repeat_interleave(features.shape[1]), 0
    for i in range(len(u)):
        others = [j for j in range(len(u)) if j != i]
        lse = (u[others] @ u[i] / tau).logsumexp(0)
        terms = [lse - u[i] @ u[p] / tau for p in others if y[p] == y[i]]
        total = total + (torch.stack(terms).mean() if terms else 0)
    return total / len(u)


@pytest.mark.parametrize("impl, near", [("eager", 1e-10), ("blockwise", 1e-10), ("triton", 2e-5)])
@pytest.mark.parametrize("labels", [None, [0, 0, 1, 2, 0, 1], [3, 3, 3, 3, 3, 3]], ids=str)
def test_losses_are_the_papers(labels, impl, near):
    torch.manual_seed(7)
    kind, x = torch.float32 if impl == "triton" else torch.float64, randn(6, 2, 16)
    y = None if labels is None else torch.tensor(labels)
    losses = [lambda x: term_by_term(x, torch.arange(6) if y is None else y, 0.3),
              lambda x: simclr.sup_con_loss(x.to(kind), y, 0.3, impl=impl)]
    if labels is None:
        losses.append(lambda x: simclr.simclr_loss(*x.to(kind).unbind(1), 0.3, impl=impl))
    found = []
    for loss in losses:
        value = loss(x.requires_grad_())
        found.append([value.double(), *torch.autograd.grad(value, x)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=near, atol=near)


def test_losses_at_the_edges():
    x, y = randn(6, 2, 5), torch.tensor([0, 0, 1, 2, 0, 1])
    released = simclr.sup_con_loss(x, y, 0.3, 0.07)
    torch.testing.assert_close(released, simclr.sup_con_loss(x, y, 0.3) * 0.3 / 0.07)
    assert simclr.sup_con_loss(x[:, :1], torch.arange(6)) == 0  # no view has a positive
    assert simclr.simclr_loss(x[:1, 0], x[:1, 1]) == 0         # no view has a negative


def test_lars_steps():
    weights = [randn(3, 4), randn(3), torch.zeros(2, 2, dtype=torch.float64)]
    tensors, momenta = [torch.nn.Parameter(w.clone()) for w in weights], [0, 0, 0]
    optimizer = simclr.LARS(tensors, lr=0.5, weight_decay=0.01)
    for step, lr in enumerate((0.5, 0.2, 0.1)):
        optimizer.param_groups[0]["lr"] = lr
        for i, w in enumerate(weights):
            tensors[i].grad = g = randn(*w.shape)
            if w.dim() > 1:
                g = g + 0.01 * w
                g = g * (0.001 * w.norm() / g.norm() if w.norm() > 0 else 1)
            momenta[i] = 0.9 * momenta[i] + lr * g
            weights[i] = w - momenta[i]
        optimizer.step()
    torch.testing.assert_close([w.detach() for w in tensors], weights, rtol=1e-10, atol=1e-12)


def test_views_are_seeded_and_their_boxes_tensorflows(monkeypatch):
    """Which draws aspects evenly."""
    x = torch.randint(256, (400, 8, 8, 3), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    args, boxes, crop = SimpleNamespace(crop=0.08, colour=0.5, grey=0.2, blur=0.5), [], simclr.crop_and_flip
    monkeypatch.setattr(simclr, "crop_and_flip", lambda x, *given: boxes.extend(given) or crop(x, *given))
    one, two, other = (simclr.augment(x, args) for seed in (6, 6, 7) if torch.manual_seed(seed))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert one.shape == (400, 3, 8, 8) and 0 <= one.min() and one.max() <= 1
    least, aspects, resize, *_ = boxes
    counts, _ = np.histogram(aspects.numpy(), np.linspace(3 / 4, 4 / 3, 6))
    assert aspects.shape == (400, 100) and counts.min() > 7_700 and least == 0.08 and resize is simclr.cubic


@pytest.mark.parametrize("form", ["paper", "code"])
def test_heads(form):
    inner = ["Linear", "ReLU"] if form == "paper" else ["Linear", "BatchNorm1d", "ReLU"]
    head = simclr.projection_head(8, SimpleNamespace(head_layers=3, width=4, form=form))
    assert [type(part).__name__ for part in head] == (3 * inner)[:-1]
    assert head[-1].bias.requires_grad == (form == "paper") and (head[0].bias is None) == (form == "code")


def test_profile_times_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = str(DATA / "shapes.npz")
    simclr.main(["--profile", "--data", data, "--model", "resnet-small", "--batch-size", "8"])
    said = re.search(r"step ([\d.]+) ms, loss ([\d.]+) ms, ([\d.]+) % of it", capsys.readouterr().out)
    step, loss, share = map(float, said.groups())
    assert 0 < loss < step and share == pytest.approx(100 * loss / step, abs=0.2)
    assert not any(tmp_path.iterdir())
