"""SimCLR's own: both losses against sums of single terms, LARS, heads."""
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import simclr

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
@pytest.mark.parametrize("views, labels", [(2, [0, 1, 2, 3]), (2, [0, 0, 1, 0]), (3, [3, 3]), (1, [5, 6, 5])])
def test_losses_are_the_papers(views, labels, impl, near):
    """Of one view, label 6 has no positive; of one picture, no view has a negative."""
    torch.manual_seed(7)
    x, y = randn(len(labels), views, 16, requires_grad=True), torch.tensor(labels)
    z = x.float() if impl == "triton" else x
    losses = [term_by_term(x, y, 0.3), simclr.sup_con_loss(z, y, 0.3, impl=impl)]
    losses.append(simclr.sup_con_loss(z, y, 0.3, 0.07, impl=impl) * 0.07 / 0.3)            # as released
    if len(set(labels)) == 4:
        losses.append(simclr.sup_con_loss(z, None, 0.3, impl=impl))
        losses.append(simclr.simclr_loss(*z.unbind(1), 0.3, impl=impl))
        assert simclr.simclr_loss(*z[:1].unbind(1), impl=impl) == 0
    wanted, *found = ([loss.double(), *torch.autograd.grad(loss, x, retain_graph=True)] for loss in losses)
    for other in found:
        torch.testing.assert_close(other, wanted, rtol=near, atol=near)


def test_lars_steps():
    weights = [randn(3, 4), randn(3), torch.zeros(2, 2, dtype=torch.float64)]
    tensors, momenta = [torch.nn.Parameter(w.clone()) for w in weights], [0, 0, 0]
    optimizer = simclr.LARS(tensors, lr=0.5, weight_decay=0.01)
    for lr in (0.5, 0.2, 0.1):
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


@pytest.mark.parametrize("form", ["paper", "code"])
def test_heads(form):
    inner = ["Linear", "ReLU"] if form == "paper" else ["Linear", "BatchNorm1d", "ReLU"]
    head = simclr.projection_head(8, SimpleNamespace(head_layers=3, width=4, form=form))
    assert [type(part).__name__ for part in head] == (3 * inner)[:-1]
    assert head[-1].bias.requires_grad == (form == "paper") and (head[0].bias is None) == (form == "code")
