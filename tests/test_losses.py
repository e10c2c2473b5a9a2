"""The papers' losses against independent float64 formulas written out row by row, values and gradients."""
import math

import pytest
import torch
import torch.nn.functional as F

from kernels import clip_loss, info_nce, linear_cross_entropy, nt_xent
from simcse import simcse_loss


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
    total = 0
    for i in range(len(z1)):
        numerator = torch.exp(cosine(z1[i], z2[i]) / temperature)
        denominator = sum(torch.exp(cosine(z1[i], z2[j]) / temperature) for j in range(len(z1)))
        if z3 is not None:
            denominator = denominator + sum(math.exp(w) ** (i == j) * torch.exp(cosine(z1[i], z3[j]) / temperature)
                                            for j in range(len(z1)))
        total = total - torch.log(numerator / denominator)
    return total / len(z1)


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("n", [2, 9])
def test_simcse_unsupervised(impl, n):
    agree(lambda a, b: simcse_loss(a, b, impl=impl), simcse_written_out, points(n, 6, 0), points(n, 6, 1))


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("n, w, temperature", [(1, 0.0, 0.05), (7, 0.0, 0.05), (7, 1.3, 0.05), (7, -2.0, 0.2), (5, math.log(2), 1.0)])
def test_simcse_hard_negatives(impl, n, w, temperature):
    agree(lambda a, b, c: simcse_loss(a, b, c, temperature, w, impl=impl),
          lambda a, b, c: simcse_written_out(a, b, c, temperature, w), points(n, 6, 2), points(n, 6, 3), points(n, 6, 4))


def test_simcse_weight_is_a_logarithm_of_the_own_hard_negative():
    z1, z2, z3 = points(4, 6, 5), points(4, 6, 6), points(4, 6, 7)
    plain = simcse_loss(z1, z2, z3)
    assert simcse_loss(z1, z2, z3, hard_negative_weight=0.0) == plain
    assert simcse_loss(z1, z2, z3, hard_negative_weight=2.0) > plain > simcse_loss(z1, z2, z3, hard_negative_weight=-2.0)


def test_simcse_ranks_make_the_global_loss():
    """Two ranks of 3 anchors against gathered keys: the mean of their losses is the loss of one process."""
    z1, z2, z3 = points(6, 5, 8), points(6, 5, 9), points(6, 5, 10)
    parts = [simcse_loss(z1[i:i + 3], z2, z3, hard_negative_weight=0.7, offset=i) for i in (0, 3)]
    torch.testing.assert_close(sum(parts) / 2, simcse_loss(z1, z2, z3, hard_negative_weight=0.7), rtol=1e-12, atol=1e-12)


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
    z1.requires_grad_()
    loss = simcse_loss(z1, z2)
    loss.backward()
    torch.testing.assert_close(loss.detach(), simcse_written_out(z1.detach(), z2), rtol=1e-10, atol=1e-10)
    assert z1.grad.isfinite().all()


def test_simcse_identical_views_small_temperature_and_dtypes():
    z = points(6, 8, 15)
    assert simcse_loss(z, z) > 0
    tiny = simcse_loss(z.float(), points(6, 8, 16).float(), temperature=0.001)           # logits of ±1000
    exact = simcse_loss(z.float().double(), points(6, 8, 16).float().double(), temperature=0.001)
    assert tiny.dtype == torch.float32 and math.isclose(tiny, exact, rel_tol=1e-4)
    assert simcse_loss(z, z).dtype == torch.float64
    assert simcse_loss(z.bfloat16(), z.bfloat16()).dtype == torch.float32


def softmax_rows(logits, targets):
    """−mean log softmax, by the definition."""
    return sum(torch.log(torch.exp(row).sum()) - row[t] for row, t in zip(logits, targets)) / len(logits)


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
def test_public_losses(impl):
    q, k, t = points(7, 5, 17), points(9, 5, 18), torch.tensor(0.7, dtype=torch.float64)
    agree(lambda q, k, t: info_nce(q, k, t, impl=impl), lambda q, k, t: softmax_rows(q @ k.T / t, range(7)), q, k, t)
    agree(lambda q, k, t: info_nce(q, k, t, offset=2, impl=impl), lambda q, k, t: softmax_rows(q @ k.T / t, range(2, 9)), q, k, t)
    agree(lambda q, k, t: clip_loss(q, k, t, impl=impl),
          lambda q, k, t: (softmax_rows(q @ k.T / t, range(7)) + softmax_rows(k @ q.T / t, range(7))) / 2, q, k[:7], t)
    targets = torch.tensor([3, 0, 8, 8, -100, 2, 3])
    agree(lambda q, k, t: linear_cross_entropy(q, k, targets, temperature=t, impl=impl),
          lambda q, k, t: softmax_rows((q @ k.T / t)[targets >= 0], targets[targets >= 0]), q, k, t)


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
def test_nt_xent_is_the_papers_mean(impl):
    """Algorithm 1 of SimCLR: 2N anchors, 2N − 1 columns each, 1/2N."""
    def written_out(z1, z2, t):
        z, n, total = torch.cat([z1, z2]), len(z1), 0
        for i in range(2 * n):
            others = [j for j in range(2 * n) if j != i]
            total = total - torch.log(torch.exp(z[i] @ z[(i + n) % (2 * n)] / t) / sum(torch.exp(z[i] @ z[j] / t) for j in others))
        return total / (2 * n)
    z1, z2 = F.normalize(points(5, 6, 19), dim=1), F.normalize(points(5, 6, 20), dim=1)
    agree(lambda a, b, t: nt_xent(a, b, t, impl=impl), written_out, z1, z2, torch.tensor(0.5, dtype=torch.float64))
