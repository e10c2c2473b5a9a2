"""Losses against independent float64 formulas written out row by row, values and gradients."""
import math

import pytest
import torch
import torch.nn.functional as F

from kernels import nt_xent
from simcse import simcse_loss

both_impls = pytest.mark.parametrize("impl", ["blockwise", "eager"])


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


def simcse_written_out(z1, z2, z3=None, temperature=0.05, w=0.0):
    """The paper's two objectives as printed, alpha = exp(w)."""
    total, n = 0, len(z1)
    for i in range(n):
        numerator = torch.exp(cosine(z1[i], z2[i]) / temperature)
        denominator = sum(torch.exp(cosine(z1[i], z2[j]) / temperature) for j in range(n))
        for j in range(n) if z3 is not None else ():
            weight = math.exp(w) ** (i == j)
            denominator = denominator + weight * torch.exp(cosine(z1[i], z3[j]) / temperature)
        total = total - torch.log(numerator / denominator)
    return total / n


@both_impls
@pytest.mark.parametrize("n", [2, 9])
def test_simcse_unsupervised(impl, n):
    agree(lambda a, b: simcse_loss(a, b, impl=impl), simcse_written_out, points(n, 6, 0), points(n, 6, 1))


@both_impls
@pytest.mark.parametrize("n, w, temperature", [
    (1, 0.0, 0.05), (7, 0.0, 0.05), (7, 1.3, 0.05), (7, -2.0, 0.2), (5, math.log(2), 1.0)])
def test_simcse_hard_negatives(impl, n, w, temperature):
    z = [points(n, 6, seed) for seed in (2, 3, 4)]
    agree(lambda a, b, c: simcse_loss(a, b, c, temperature, w, impl=impl),
          lambda a, b, c: simcse_written_out(a, b, c, temperature, w), *z)


def test_simcse_ranks_make_the_global_loss():
    """Ranks of 4 and of 2 anchors against gathered keys: their parts sum to the loss of one process."""
    z1, z2, z3 = points(6, 5, 8), points(6, 5, 9), points(6, 5, 10)
    part = lambda own: simcse_loss(z1[own], z2, z3, hard_negative_weight=0.7, offset=own.start)
    parts = part(slice(0, 4)) * 4 / 6 + part(slice(4, 6)) * 2 / 6
    whole = simcse_loss(z1, z2, z3, hard_negative_weight=0.7)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_simcse_one_anchor_is_zero():
    z1, z2 = points(1, 5, 11).requires_grad_(), points(1, 5, 12).requires_grad_()
    loss = simcse_loss(z1, z2)
    loss.backward()
    assert loss == 0 and not z1.grad.any() and not z2.grad.any()


def test_simcse_scale_invariant_and_safe_at_zero():
    z1, z2 = points(5, 6, 13), points(5, 6, 14)
    scaled = simcse_loss(z1 * torch.arange(1, 6)[:, None], z2 * 1e3)
    torch.testing.assert_close(scaled, simcse_loss(z1, z2), rtol=1e-12, atol=1e-12)
    z1[2] = 0
    loss = simcse_loss(z1.requires_grad_(), z2)
    loss.backward()
    torch.testing.assert_close(loss.detach(), simcse_written_out(z1.detach(), z2), rtol=1e-10, atol=1e-10)
    assert z1.grad.isfinite().all()


def test_simcse_identical_views_small_temperature_and_dtypes():
    z, other = points(6, 8, 15), points(6, 8, 16)
    assert simcse_loss(z, z) > 0 and simcse_loss(z, z).dtype == torch.float64
    tiny = simcse_loss(z.float(), other.float(), temperature=0.001)  # logits of ±1000
    exact = simcse_loss(z.float().double(), other.float().double(), temperature=0.001)
    assert tiny.dtype == torch.float32 and math.isclose(tiny, exact, rel_tol=1e-4)
    assert simcse_loss(z.bfloat16(), z.bfloat16()).dtype == torch.float32


@both_impls
def test_nt_xent_is_the_papers_mean(impl):
    """Algorithm 1 of SimCLR: 2N anchors, 2N − 1 columns each, 1/2N."""
    def written_out(z1, z2, t):
        z, n, total = torch.cat([z1, z2]), len(z1), 0
        for i in range(2 * n):
            others = sum(torch.exp(z[i] @ z[j] / t) for j in range(2 * n) if j != i)
            total = total - torch.log(torch.exp(z[i] @ z[(i + n) % (2 * n)] / t) / others)
        return total / (2 * n)
    z1, z2 = F.normalize(points(5, 6, 19), dim=1), F.normalize(points(5, 6, 20), dim=1)
    t = torch.tensor(0.5, dtype=torch.float64)
    agree(lambda a, b, t: nt_xent(a, b, t, impl=impl), written_out, z1, z2, t)
