"""Helpers that compare a loss with its formula in float64, and the formula of Spearman's correlation."""
import pytest
import torch

both_impls = pytest.mark.parametrize("impl", ["blockwise", "eager"])
POOL = dict(max=lambda x: x.amax(0), mean=lambda x: x.mean(0), sum=lambda x: x.sum(0))      # states x (L, H)


def randn(n, d, seed):
    """Return (n, d) random normal numbers in float64."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a, b):
    return (a @ b) / (a.norm().clamp(min=1e-8) * b.norm().clamp(min=1e-8))


def check_equal(loss, formula, *inputs, tolerance=1e-10):
    """Check that loss(*inputs) and formula(*inputs) have equal values and equal gradients."""
    results = []
    for f in (loss, formula):
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = f(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def spearman(x, y):
    """Return Spearman's rank correlation of two vectors; equal values share their mean rank."""
    ranks = []
    for values in (x, y):
        below, equal = values[:, None] > values, values[:, None] == values
        ranks.append(below.double().sum(1) + equal.double().sum(1) / 2)
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()
