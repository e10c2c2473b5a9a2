"""Values, gradients and dtypes of every loss, for every dtype of rows and every dtype of autocast."""
import pytest
import torch
import torch.nn.functional as F
from comparing import DEVICE, GPU, LOSSES, patch_kernels, positive_pairs, unit_rows

import kernels
from ease import ease_loss

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
TEMPERATURE = 0.2
SOFTMAX = LOSSES | {                    # functions of (q, k, temperature, impl)
    "frozen_keys": lambda q, k, t, impl: kernels.similarity_lse(q, k.detach(), t, impl=impl) + 0 * k.sum(),
    "topk": lambda q, k, t, impl: kernels.similarity_topk(q, k, 3, impl=impl)[0]}
DISTANCES = {                           # functions of (q, k)
    "triplet": lambda q, k: kernels.triplet_loss(q, k, k.flip(0)),
    "margin": lambda q, k: kernels.margin_loss(q, k, torch.arange(len(q), device=q.device) % 2)}
DTYPES = [(F64, F64, F16), (F32, F32, F16), (F32, F32, BF16), (F16, F16, F16), (F16, F16, BF16),
          (BF16, BF16, F16), (F32, F16, F16), (F16, F32, F16), (F32, BF16, BF16)]


def dtype_of_products(q_dtype, k_dtype, autocast):
    """Return autocast's dtype for float32 rows, else the rows' dtype."""
    return autocast if F32 in (q_dtype, k_dtype) else q_dtype


# Triton does not support float64, and its interpreter computes wrong products in bfloat16
CASES = [(impl, *dtypes) for impl in ("eager", "blockwise", "triton") for dtypes in DTYPES
         if impl != "triton" or dtype_of_products(*dtypes) in (F32, F16, *([BF16] if GPU else []))]
CASES += [("triton, large D", F32, F32, F16), ("triton, large D", F32, F16, F16)]
LARGE_D = {"gpu.heuristics.MAX_SMALL_D": 0}


def check(f, q, k, autocast, exact_rows, tolerance, scale=1.0):
    """Compare f(q, k) under autocast, and its gradients, with f(*exact_rows, exact=True) in float64.

    scale  the upstream gradient. Backward runs twice: outside autocast, as PyTorch recommends, and inside
    """
    leaves, exact_leaves = ([x.detach().requires_grad_() for x in rows] for rows in ((q, k), exact_rows))
    exact = f(*exact_leaves, exact=True)
    with torch.autocast(DEVICE, autocast):
        value = f(*leaves)
    assert value.dtype == (F64 if F64 in (q.dtype, k.dtype) else F32)
    torch.testing.assert_close(value.double(), exact, rtol=tolerance, atol=tolerance)
    for inside in (False, True) if value.requires_grad else ():
        with torch.autocast(DEVICE, autocast, enabled=inside):
            found = torch.autograd.grad(value, leaves, scale * torch.ones_like(value), retain_graph=True)
        expected = torch.autograd.grad(exact, exact_leaves, torch.ones_like(exact), retain_graph=True)
        for x, gradient, exact_gradient in zip(leaves, found, expected):
            assert gradient.dtype == x.dtype
            assert (gradient / scale - exact_gradient).norm() <= 4 * tolerance * exact_gradient.norm()


@pytest.mark.parametrize("impl, q_dtype, k_dtype, autocast", CASES, ids=str)
@pytest.mark.parametrize("loss", SOFTMAX)
def test_softmax_losses(loss, impl, q_dtype, k_dtype, autocast, monkeypatch):
    """Gradients of float32 rows are float32. Scaled by 1e-7, they would be 0 in float16."""
    if impl == "triton, large D":
        impl = "triton"
        patch_kernels(monkeypatch, LARGE_D)

    def f(q, k, exact=False):
        return SOFTMAX[loss](q, k, TEMPERATURE, "eager" if exact else impl)

    product_dtype = dtype_of_products(q_dtype, k_dtype, autocast)
    q, k = (x.to(dtype) for x, dtype in zip(positive_pairs(12, 16, F64), (q_dtype, k_dtype)))
    rounded = [x.to(product_dtype).double() for x in (q, k)]
    tolerance = max(torch.finfo(product_dtype).eps, 1e-12)
    scale = 1e-7 if q_dtype == k_dtype == F32 else 1.0
    check(f, q, k, autocast, rounded, tolerance, scale)


@pytest.mark.parametrize("impl", ["eager", "blockwise"])
def test_sums_and_masks_are_not_rounded(impl):
    """A sum of 50,000 is too large for float16. Products of features are 2,051, below phi = 2,052, so that no
    column is excluded. In float16 these products would be 2,052."""
    h, w = 30 * unit_rows(1500, 16, F32, 90), unit_rows(1500, 16, F32, 91)
    targets = torch.arange(1500, device=DEVICE).masked_fill(torch.arange(1500, device=DEVICE) == 7, -100)
    features = torch.full((60, 1), 2051.0, device=DEVICE), (torch.arange(70, device=DEVICE) % 2.0)[:, None]

    def results():
        mean = kernels.linear_cross_entropy(h, w, targets, temperature=0.5, impl=impl)
        return mean, kernels.similarity_lse(h[:60], w[:70], similar=(*features, 2052.0), impl=impl)

    exact = results()
    with torch.autocast(DEVICE, F16):
        for found, expected in zip(results(), exact):
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("q_dtype, k_dtype, autocast", DTYPES, ids=str)
@pytest.mark.parametrize("loss", DISTANCES)
def test_losses_of_distances(loss, q_dtype, k_dtype, autocast):
    """Autocast does not round the rows of losses that use distances."""
    q, k = (x.to(dtype) for x, dtype in zip(positive_pairs(12, 16, F64), (q_dtype, k_dtype)))
    tolerance = max(1e-12, *(2 * torch.finfo(dtype).eps for dtype in (q_dtype, k_dtype)))
    f = lambda q, k, exact=False: DISTANCES[loss](q, k)
    check(f, q, k, autocast, [q.double(), k.double()], tolerance)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "queue_loss", "sup_con_loss", "self_similarity"])
def test_normalize_divides_in_float32(loss, impl):
    """The loss is bitwise that of rows normalised in float32, even if q or k has autocast's dtype."""
    q, k = (3 * x for x in positive_pairs(24, 16, F32))
    with torch.autocast(DEVICE, F16):
        for x, y in ((q, k), (q, k.half()), (q.half(), k.half())):
            found = LOSSES[loss](x, y, TEMPERATURE, impl, normalize=True)
            units = (F.normalize(rows.float(), dim=1) for rows in (x, y))
            assert torch.equal(found, LOSSES[loss](*units, TEMPERATURE, impl))


def test_ease_reweights_hard_negatives():
    """EASE needs the share of hard negatives in a row's sum. Autocast may round this share above 1."""
    z, noise = (6 * x for x in positive_pairs(64, 32, F32))
    rows = z, noise.flip(0), (z + 0.2 * noise)[:, None]
    exact = ease_loss(*(x.double() for x in rows), 0.01, -5.0)
    with torch.autocast(DEVICE, F16):
        assert ease_loss(*rows, 0.01, -5.0).item() == pytest.approx(exact.item(), rel=0.02)
