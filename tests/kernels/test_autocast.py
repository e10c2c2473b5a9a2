"""Every loss for every dtype of rows under every autocast: values and dtypes."""
import os

import pytest
import torch
from test_kernels import positive_pairs

import kernels

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
TEMPERATURE = 0.2


def with_targets(q, k, t, impl):
    targets = torch.arange(len(q), device=q.device) * 5 % len(k)
    return kernels.linear_cross_entropy(q, k, targets, ignore_index=0, temperature=t, impl=impl)


SOFTMAX = {                             # functions of (q, k, temperature), and keyword arguments
    "info_nce": kernels.info_nce,
    "clip_loss": kernels.clip_loss,
    "nt_xent": kernels.nt_xent,
    "queue_loss": lambda q, k, t, **options: kernels.queue_loss(q, k, k.detach().flip(0), t, **options),
    "sigmoid_loss": lambda q, k, t, **options: kernels.sigmoid_loss(q, k, t, -4.0, **options),
    "sup_con_loss": lambda q, k, t, **options: kernels.sup_con_loss(
        q.unflatten(0, (-1, 2)), None, t, **options),
    "labels": lambda q, k, t, **options: kernels.sup_con_loss(
        q.unflatten(0, (-1, 2)), torch.arange(len(q) // 2, device=q.device) // 2, t, **options),
    "linear_cross_entropy": with_targets,
    "similarity_lse": lambda q, k, t, **options: kernels.similarity_lse(q, k, t, **options).sum(),
    "frozen_keys": lambda q, k, t, **options: kernels.similarity_lse(q, k.detach(), t, **options).sum(),
    "self": lambda q, k, t, **options: kernels.similarity_lse(q, None, t, exclude="pair", **options).sum(),
    "similarity_topk": lambda q, k, t, **options: kernels.similarity_topk(q, k, 3, **options)[0].sum()}
DISTANCES = {                           # functions of (q, k)
    "hard": kernels.triplet_loss,
    "semi-hard": lambda q, k: kernels.triplet_loss(q, k, mining="semi-hard"),
    "triplet": lambda q, k: kernels.triplet_loss(q, k, k.flip(0)),
    "margin": lambda q, k: kernels.margin_loss(q, k, torch.arange(len(q), device=q.device) % 2)}
DTYPES = [*((dtype, dtype, autocast) for dtype in (F64, F32, F16, BF16) for autocast in (F16, BF16)),
          *((a, b, half) for half in (F16, BF16) for a, b in ((F32, half), (half, F32)))]
all_dtypes = pytest.mark.parametrize("q_dtype, k_dtype, autocast", DTYPES, ids=str)


def dtype_of_products(impl, q_dtype, k_dtype, autocast):
    """Float32 rows are multiplied in autocast's dtype; half rows in their own, except by eager."""
    half = F32 in (q_dtype, k_dtype) or impl == "eager" and q_dtype != F64
    return autocast if half else q_dtype


@pytest.fixture(autouse=True)
def rows_on_the_cpu(monkeypatch):
    """These tests use autocast on the CPU. The rows of test_kernels would be on a GPU if there is one."""
    monkeypatch.setattr("test_kernels.DEVICE", "cpu")


# no float64 in Triton; its interpreter, which is off if there is a GPU, computes wrong products in bfloat16
IMPLS = ["eager", "blockwise", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
CASES = [(impl, *dtypes) for impl in IMPLS for dtypes in DTYPES
         if impl != "triton" or dtype_of_products(impl, *dtypes) in (F32, F16)]


def check(f, q, k, autocast, reference, tolerance):
    """Compare f under autocast with the reference, a float64 value and its gradients, and check dtypes.

    The backward pass runs outside autocast, as it should, and inside.
    """
    leaves, (expected, *gradients) = [x.clone().requires_grad_() for x in (q, k)], reference
    with torch.autocast("cpu", autocast):
        value = f(*leaves)
    assert value.dtype == (F64 if F64 in (q.dtype, k.dtype) else F32)
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
    for inside in (False, True) if value.requires_grad else ():
        with torch.autocast("cpu", autocast, enabled=inside):
            found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        for x, ours, exact in zip(leaves, found, gradients):
            assert (ours is None) == (exact is None)
            if ours is not None:
                assert ours.dtype == x.dtype
                assert (ours - exact).norm() <= 4 * tolerance * exact.norm()


def float64_reference(f, *rows):
    """Return [value, gradients...] of f in float64; the gradient is None if there is none."""
    leaves = [x.double().requires_grad_() for x in rows]
    value = f(*leaves)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else ()
    return [value.detach(), *gradients]


@pytest.mark.parametrize("impl, q_dtype, k_dtype, autocast", CASES, ids=str)
@pytest.mark.parametrize("loss", SOFTMAX)
def test_softmax_losses(loss, impl, q_dtype, k_dtype, autocast):
    product_dtype = dtype_of_products(impl, q_dtype, k_dtype, autocast)
    pairs = positive_pairs(12, 16, F64)
    q, k = (x.to(dtype) for x, dtype in zip(pairs, (q_dtype, k_dtype)))
    rounded = [x.to(product_dtype) for x in (q, k)]
    reference = float64_reference(lambda q, k: SOFTMAX[loss](q, k, TEMPERATURE, impl="eager"), *rounded)
    tolerance = max(torch.finfo(product_dtype).eps, 1e-12)
    if impl == "eager":                                        # it rounds the products too
        tolerance *= 2 / TEMPERATURE
    check(lambda q, k: SOFTMAX[loss](q, k, TEMPERATURE, impl=impl), q, k, autocast, reference, tolerance)


@all_dtypes
@pytest.mark.parametrize("loss", DISTANCES)
def test_losses_of_distances(loss, q_dtype, k_dtype, autocast):
    """Autocast does not round them."""
    q, k = (x.to(dtype) for x, dtype in zip(positive_pairs(12, 16, F64), (q_dtype, k_dtype)))
    tolerance = max(1e-12, *(torch.finfo(dtype).eps for dtype in (q_dtype, k_dtype)))
    check(DISTANCES[loss], q, k, autocast, float64_reference(DISTANCES[loss], q, k), tolerance)
