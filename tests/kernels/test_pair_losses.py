"""sigmoid_loss, sup_con_loss, triplet_loss and margin_loss against float64 formulas written pair by pair.

Also: gradients of bias and temperature, one rank's part of a gathered batch, memory, and errors.
"""
import math

import pytest
import torch
from test_kernels import DEVICE

from formulas import randn
from kernels import margin_loss, sigmoid_loss, sup_con_loss, triplet_loss
from kernels.losses import semi_hard_negatives
from running import Memory


def numbers(*values):
    """Return a float64 tensor for each of the numbers."""
    return [torch.tensor(value, dtype=torch.float64) for value in values]


# ── the sigmoid loss ────────────────────────────────────────────────────────────────────────────────────────


def test_sigmoid_loss_with_bias_is_noise_contrastive_estimation():
    """With the bias −log(M − 1) it is −log p(match) for one data sample and M − 1 noise samples."""
    q, k, t = randn(5, 6, 3), randn(5, 6, 4), 0.7
    ratio = (q @ k.T / t).exp()
    matched = ratio.diagonal() / (ratio.diagonal() + 4)
    noise = (4 / (ratio + 4)).fill_diagonal_(1)
    expected = -(matched.log().sum() + noise.log().sum()) / 5
    torch.testing.assert_close(sigmoid_loss(q, k, t, -math.log(4)), expected)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("needed", range(16))
def test_any_subset_of_gradients(impl, needed):
    """All 16 subsets of the gradients of q, k, τ and b; the others are None."""
    x = randn(5, 6, 7).float(), randn(8, 6, 8).float(), torch.tensor(0.2), torch.tensor(-1.0)
    x = [y.to(DEVICE) for y in x]
    leaves = [y.clone().requires_grad_() for y in x]
    expected = torch.autograd.grad(sigmoid_loss(*leaves, impl="eager"), leaves)
    inputs = [y.requires_grad_(bool(needed >> i & 1)) for i, y in enumerate(x)]
    loss = sigmoid_loss(*inputs, impl=impl)
    assert loss.requires_grad == bool(needed)
    if needed:
        loss.backward()
    for y, gradient in zip(inputs, expected):
        assert (y.grad is not None) == y.requires_grad
        if y.grad is not None:
            torch.testing.assert_close(y.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias, scale", [(-18.0, 1e9), (30.0, 1.0)])
def test_weights_in_float16_neither_underflow_nor_overflow(bias, scale):
    """Weights of e⁻¹⁸, below float16's range, and of 1 give correct gradients of keys without a positive."""
    q, k, found = randn(40, 8, 9).to(DEVICE).half(), randn(50, 8, 10).to(DEVICE).half(), []
    for impl, dtype in (("eager", torch.float64), ("triton", torch.float16)):
        keys = k.to(dtype).requires_grad_()
        gradient, = torch.autograd.grad(scale * sigmoid_loss(q.to(dtype), keys, 4.0, bias, impl=impl), keys)
        found.append(gradient[40:].double())
    assert (found[1] - found[0]).norm() < 2e-3 * found[0].norm()


# ── supervised contrastive ──────────────────────────────────────────────────────────────────────────────────


def test_one_tensor_for_both_temperatures():
    """If τ and τ_base are one tensor, the factor τ/τ_base is 1 and gets no gradient.

    Two gradients, of τ and of τ_base, would cancel only up to rounding. The rows are nearly equal, so the
    true gradient is tiny, and this rounding would show.
    """
    z, t = randn(1, 8, 24) + 1e-4 * randn(40, 8, 25), torch.tensor(200.0, requires_grad=True)
    z = torch.nn.functional.normalize(z, dim=1).view(20, 2, 8)
    exact = t.detach().double().requires_grad_()
    expected, = torch.autograd.grad(sup_con_loss(z, None, exact, exact, impl="eager"), exact)
    found, = torch.autograd.grad(sup_con_loss(z.float(), None, t, t), t)
    assert abs(found - expected) < 1e-6 / 200**2


@pytest.mark.parametrize("loss", ["sigmoid", "sup_con"])
def test_less_than_a_seventh_of_eagers_memory(loss):
    """Check forward and backward with 3,000 rows; with more rows, the fraction is smaller."""
    peaks = []
    for impl in ("blockwise", "eager"):
        q, k = (randn(3000, 16, seed).float().requires_grad_() for seed in (13, 14))
        with Memory() as memory:
            if loss == "sigmoid":
                sigmoid_loss(q, k, impl=impl).backward()
            else:
                sup_con_loss(torch.stack([q, k], 1)[:1500], torch.arange(1500) // 3, impl=impl).backward()
        peaks.append(memory.peak)
    assert 7 * peaks[0] < peaks[1]


# ── distances ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
def test_mining_rows_far_from_0(mining):
    """Negatives are right in float32 although rows are far from 0, where products lose digits."""
    a = randn(60, 64, 28).float() + 300
    p = a + 0.3 * randn(60, 64, 29).float()
    found, expected = (triplet_loss(a.to(dtype), p.to(dtype), mining=mining, margin=30.0)
                       for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_semi_hard_negatives_in_several_blocks():
    """The first block has 1,997 of the 2,100 rows."""
    a, p = randn(2100, 3, 26), randn(2100, 3, 27)
    far = torch.cdist(a, p)
    far[far <= far.diagonal()[:, None]] = torch.inf
    none = far.isinf().all(1)
    expected = torch.where(none, torch.cdist(a, p).fill_diagonal_(-1).argmax(1), far.argmin(1))
    assert torch.equal(semi_hard_negatives(a, p), expected) and 0 < none.sum() < 2100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_upcast(dtype):
    x, y = (randn(6, 4, seed).to(dtype) for seed in (22, 23))
    for loss in (triplet_loss, lambda x, y: margin_loss(x, y, torch.arange(6) % 2)):
        assert loss(x, y).dtype == torch.float32 and loss(x, y) == loss(x.float(), y.float())


X, ONE = torch.randn(4, 3), torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize("call, message", [
    (lambda: triplet_loss(X, X[:3]), r"positive: found \(3, 3\), expected \(4, 3\)"),
    (lambda: triplet_loss(X, X, X[:, :2]), r"negative: found \(4, 2\), expected \(4, 3\)"),
    (lambda: triplet_loss(X[:1], X[:1]), "positive: 1 row, expected at least 2 if negative is None"),
    (lambda: triplet_loss(X, X, margin=0), "margin: 0, expected a number above 0"),
    (lambda: margin_loss(X, X, ONE[:3]), r"same: found \(3,\), expected \(4,\)"),
    (lambda: margin_loss(X, X, ONE * 2), "same: found 2, expected 0 or 1"),
    (lambda: sup_con_loss(X), r"z: found \(4, 3\), expected \(N, V, D\)"),
    (lambda: sup_con_loss(X[:, None], ONE[:3]), r"labels: found \(3,\), expected \(4,\)")])
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
