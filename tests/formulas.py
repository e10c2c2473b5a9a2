"""Formulas written out in float64, and how a loss is compared with one."""
import pytest
import torch

both_impls = pytest.mark.parametrize("impl", ["blockwise", "eager"])
POOL = dict(max=lambda x: x.amax(0), mean=lambda x: x.mean(0), sum=lambda x: x.sum(0))      # of (L, H)
every_way = pytest.mark.parametrize("way", ["blockwise", "eager", "ranks"])


def points(n, d, seed):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a, b):
    return (a @ b) / (a.norm().clamp(min=1e-8) * b.norm().clamp(min=1e-8))


def agree(ours, written_out, *inputs, tolerance=1e-10):
    """Equal value and gradients, both in float64."""
    results = []
    for f in (ours, written_out):
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = f(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def by_way(way, n, loss):
    """loss(rows, offset, impl) of all n rows, or the sum of its parts on ranks of 1, 2 and the other rows."""
    cuts, impl = ((0, 1, 3, n), "auto") if way == "ranks" else ((0, n), way)
    shares = [slice(a, min(b, n)) for a, b in zip(cuts, cuts[1:]) if a < n]
    return sum(loss(own, offset=own.start, impl=impl) * (own.stop - own.start) / n for own in shares)
