"""Helpers to compare a loss with its formula, written out in float64."""
import pytest
import torch

both_impls = pytest.mark.parametrize("impl", ["blockwise", "eager"])
POOL = dict(max=lambda x: x.amax(0), mean=lambda x: x.mean(0), sum=lambda x: x.sum(0))      # states (L, H)
every_path = pytest.mark.parametrize("path", ["blockwise", "eager", "ranks"])


def randn(n, d, seed):
    """Return random normal vectors (n, d)."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a, b):
    return (a @ b) / (a.norm().clamp(min=1e-8) * b.norm().clamp(min=1e-8))


def check_equal(loss, formula, *inputs, tolerance=1e-10):
    """Check that two functions of the inputs have equal values and gradients in float64."""
    results = []
    for f in (loss, formula):
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = f(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def loss_by_path(path, n, loss):
    """Return the loss of n rows, computed in one of several ways.

    path   an impl; or "ranks": the sum of the shares of three ranks, with 1, 2 and n - 3 rows
    loss   loss(rows, offset=, impl=): mean loss of a slice of the rows
    """
    cuts, impl = ((0, 1, 3, n), "auto") if path == "ranks" else ((0, n), path)
    shares = [slice(a, min(b, n)) for a, b in zip(cuts, cuts[1:]) if a < n]
    return sum(loss(own, offset=own.start, impl=impl) * (own.stop - own.start) / n for own in shares)
