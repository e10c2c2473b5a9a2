"""sigmoid_loss, sup_con_loss, triplet_loss and margin_loss against float64 formulas written pair by pair.

Also: gradients of bias and temperature, one rank's part of a gathered batch, memory, and errors.
"""
import math

import pytest
import torch
from test_kernels import DEVICE

from formulas import both_impls, check_equal, randn
from kernels import margin_loss, sigmoid_loss, sup_con_loss, triplet_loss
from kernels.losses import semi_hard_negatives
from running import Memory


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x))


def numbers(*values):
    """Return a float64 tensor for each of the numbers."""
    return [torch.tensor(value, dtype=torch.float64) for value in values]


# ── the sigmoid loss ────────────────────────────────────────────────────────────────────────────────────────


def sigmoid_written_out(q, k, t, b, offset=0):
    total = 0
    for i in range(len(q)):
        for j in range(len(k)):
            y = 1 if j == i + offset else -1
            total = total + softplus(-y * (q[i] @ k[j] / t + b))
    return total / len(q)


@both_impls
@pytest.mark.parametrize("n, m, offset", [(1, 1, 0), (5, 5, 0), (4, 9, 0), (4, 9, 3), (4, 9, 5)])
@pytest.mark.parametrize("t, b", [(0.1, -10.0), (1.0, 0.0), (0.3, 12.0), (0.002, -40.0)])
def test_sigmoid_loss(impl, n, m, offset, t, b):
    """The last temperature gives logits of ±1000, in both tails of softplus."""
    check_equal(lambda q, k, t, b: sigmoid_loss(q, k, t, b, offset=offset, impl=impl),
          lambda q, k, t, b: sigmoid_written_out(q, k, t, b, offset),
          randn(n, 6, 1) / 2, randn(m, 6, 2) / 2, *numbers(t, b))


def test_sigmoid_loss_with_bias_is_noise_contrastive_estimation():
    """With the bias −log(M − 1) it is −log p(match) for one data sample and M − 1 noise samples."""
    q, k, t = randn(5, 6, 3), randn(5, 6, 4), 0.7
    ratio = (q @ k.T / t).exp()
    matched = ratio.diagonal() / (ratio.diagonal() + 4)
    noise = (4 / (ratio + 4)).fill_diagonal_(1)
    expected = -(matched.log().sum() + noise.log().sum()) / 5
    torch.testing.assert_close(sigmoid_loss(q, k, t, -math.log(4)), expected)


@pytest.mark.parametrize("impl, dtype", [("blockwise", torch.float64), ("triton", torch.float32)])
def test_losses_of_ranks_sum_to_the_whole(impl, dtype):
    """Gradients of keys, τ and b add up too. τ and b as numbers or as tensors give the same bits."""
    q, k, *scalars = (x.to(DEVICE, dtype) for x in (randn(7, 6, 5), randn(7, 6, 6), *numbers(0.2, -3.0)))
    found = []
    for cuts in ((0, 7), (0, 1, 3, 7)):
        x = [y.clone().requires_grad_() for y in (q, k, *scalars)]
        parts = [sigmoid_loss(x[0][i:j], *x[1:], offset=i, impl=impl) * (j - i) / 7
                 for i, j in zip(cuts, cuts[1:])]
        found.append([sum(parts), *torch.autograd.grad(sum(parts), x)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)
    assert sigmoid_loss(q, k, 0.2, -3.0, impl=impl) == found[0][0]


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


def sup_con_written_out(z, labels, t, base=None):
    n, views, _ = z.shape
    rows, total = [(i, v) for i in range(n) for v in range(views)], 0
    for i, v in rows:
        others = [(j, w) for j, w in rows if (j, w) != (i, v)]
        positives = [(j, w) for j, w in others if (i == j if labels is None else labels[i] == labels[j])]
        for j, w in positives:
            log_sum = torch.stack([z[i, v] @ z[other] / t for other in others]).logsumexp(0)
            total = total - (z[i, v] @ z[j, w] / t - log_sum) / len(positives)
    return total / len(rows) * (1 if base is None else t / base) + 0 * z.sum() * t


@both_impls
@pytest.mark.parametrize("shape, labels", [
    ((4, 2, 5), None), ((5, 3, 4), [2**40, -1, 2**40, 0, -1]), ((5, 1, 4), [0, 1, 0, 2, 2]),
    ((3, 1, 4), [0, 1, 2]), ((3, 1, 4), None), ((1, 1, 4), None), ((1, 2, 4), None), ((3, 2, 4), [7, 7, 7])])
@pytest.mark.parametrize("base", [None, 0.07, 0.3])
def test_sup_con_loss(impl, shape, labels, base):
    """The loss equals the formula; without any positives, loss and gradients are 0."""
    labels = None if labels is None else torch.tensor(labels)
    z = randn(shape[0], shape[1] * shape[2], 11).view(shape)
    check_equal(lambda z, t: sup_con_loss(z, labels, t, base, impl=impl),
          lambda z, t: sup_con_written_out(z, labels, t, base), z, *numbers(0.3))


def test_sup_con_loss_of_large_logits():
    """For logits above 69, blockwise computes separate exponentials for rows and columns."""
    z, labels = 9 * randn(5, 12, 12).view(5, 3, 4), torch.tensor([1, 0, 1, 1, 2])
    check_equal(lambda z: sup_con_loss(z, labels, 0.1), lambda z: sup_con_written_out(z, labels, 0.1), z,
          tolerance=1e-9)


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


def distance(x, y):
    return (x - y + 1e-6).square().sum().sqrt()                # 1e-6 as in PyTorch


def triplet_written_out(a, p, n, margin):
    terms = [distance(x, y) - distance(x, z) + margin for x, y, z in zip(a, p, n)]
    return torch.stack(terms).clamp(min=0).mean()


@pytest.mark.parametrize("margin", [0.5, 3.0])
def test_triplet_loss(margin):
    rows = [randn(9, 4, seed) for seed in (15, 16, 17)]
    check_equal(lambda *x: triplet_loss(*x, margin=margin), lambda *x: triplet_written_out(*x, margin), *rows)


def test_hard_negative_is_the_nearest_other_row():
    """It is the nearest by distance, not by dot product; the rows have different lengths."""
    a, p = randn(30, 4, 18), randn(30, 4, 19) * torch.linspace(0.1, 5, 30, dtype=torch.float64)[:, None]
    far = torch.cdist(a, p).fill_diagonal_(torch.inf)
    near = far.argmin(1)
    assert (near != (a @ p.T).fill_diagonal_(-torch.inf).argmax(1)).any()
    check_equal(lambda a, p: triplet_loss(a, p), lambda a, p: triplet_written_out(a, p, p[near], 1.0), a, p)
    with torch.autocast("cpu", torch.bfloat16):
        assert triplet_loss(a.float(), p.float()) == pytest.approx(triplet_loss(a, p).item(), rel=1e-5)


def semi_hard(a, p):
    """Return for each row a_i the index of the nearest row of p farther than p_i, or else of the farthest."""
    chosen = []
    for i, x in enumerate(a):
        far = [(distance(x, y).item(), j) for j, y in enumerate(p) if j != i]
        own = distance(x, p[i]).item()
        chosen.append(min([pair for pair in far if pair[0] > own], default=max(far))[1])
    return torch.tensor(chosen)


@pytest.mark.parametrize("n", [2, 30])
def test_semi_hard_negative_is_the_nearest_farther_row(n):
    """The last positive is moved far away, so that none is farther; then the farthest row is the negative."""
    a, p = randn(n, 4, 24), randn(n, 4, 25)
    p[-1] = 50
    near = semi_hard(a, p)
    hard = torch.cdist(a, p).fill_diagonal_(torch.inf).argmin(1)
    assert near[-1] == torch.cdist(a[-1:], p[:-1]).argmax() and ((near != hard).sum() > n / 4 or n == 2)
    check_equal(lambda a, p: triplet_loss(a, p, mining="semi-hard"),
          lambda a, p: triplet_written_out(a, p, p[near], 1.0), a, p)
    with torch.autocast("cpu", torch.bfloat16):
        found = triplet_loss(a.float(), p.float(), mining="semi-hard")
    assert found == pytest.approx(triplet_loss(a, p, mining="semi-hard").item(), rel=1e-5)


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


def margin_written_out(x, y, same, margin):
    terms = []
    for a, b, s in zip(x, y, same):
        d = (a - b).square().sum()
        d = d.sqrt() if d > 0 else 0 * d
        terms.append(d**2 / 2 if s else (margin - d).clamp(min=0) ** 2 / 2)
    return torch.stack(terms).mean()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_margin_loss(dtype):
    """The loss equals the formula; x and y are equal in rows 0 and 1, where the gradient is 0."""
    x, y, same = randn(8, 3, 20), randn(8, 3, 21), torch.tensor([1, 0, 1, 1, 0, 0, 0, 1]).to(dtype)
    y[:2] = x[:2]
    for margin in (0.5, 4.0):
        check_equal(lambda x, y: margin_loss(x, y, same, margin),
              lambda x, y: margin_written_out(x, y, same, margin), x, y)


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
