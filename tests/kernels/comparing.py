"""Rows, masks and losses for the tests of this folder. Losses are compared with eager in float64.

Tolerances depend on eager: an implementation may have three times the error of eager in the same dtype, plus
a few units of rounding, because eager may be exact by chance. All tensors are on DEVICE, which is the GPU or,
without a GPU, the CPU. On the CPU, Triton runs in its interpreter, which computes wrong products in bfloat16,
so Triton is tested in bfloat16 only on a GPU.
"""
import functools
import importlib
import pkgutil

import pytest
import torch
import torch.nn.functional as F

from kernels import (
    clip_loss,
    gpu,
    info_nce,
    linear_cross_entropy,
    nt_xent,
    queue_loss,
    sigmoid_loss,
    similarity_lse,
    sup_con_loss,
)
from kernels.gather import cat_rows

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = [torch.float16, torch.bfloat16] if GPU else [torch.float16]
TRITON = [torch.float32, *HALF]                                # dtypes in which Triton is tested
both_impls = pytest.mark.parametrize("impl", ["blockwise", "triton"])
every_impl = pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])

# ── rows and masks ──────────────────────────────────────────────────────────────────────────────────────────


def unit_rows(n, d, dtype, seed):
    """Return random unit rows (n, d)."""
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(x, dim=1).to(DEVICE, dtype)


def positive_pairs(n, d, dtype):
    """Return unit rows q and k (n, d), in which k_i is near q_i."""
    q = unit_rows(n, d, dtype, 17)
    return q, F.normalize(q.double() + 0.3 * unit_rows(n, d, torch.float64, 18), dim=1).to(dtype)


def masks(n, m):
    """Return {name: mask arguments of similarity_lse}. Ids repeat, are negative or occur on one side only."""
    rows, columns, e = (torch.arange(count, device=DEVICE) for count in (n, m, 20))
    # Features are whole numbers. Their products are exact in every dtype, so rounding crosses no threshold.
    f_q, f_k = (rows[:, None] * 5 + e) % 7 - 3, (columns[:, None] * 3 + e) % 5 - 2
    ids = rows % 5 - 2, (columns * 7) % 9 - 2
    return {"all": {}, "diagonal": dict(exclude="diagonal"), "shifted": dict(exclude="diagonal", offset=2),
            "ids": dict(exclude=ids), "diagonal ids": dict(exclude=("diagonal", *ids), offset=3),
            "within": dict(within=(rows // 4, columns // 6)),
            "ids within": dict(exclude=(rows.int() % 3, columns.int() % 3), within=(rows % 4, columns % 7)),
            "similar": dict(similar=(f_q.double(), f_k.double(), 2.0)),
            "diagonal similar within": dict(exclude="diagonal", similar=(f_q.half(), f_k.half(), 5.0),
                                            within=(rows // 9, columns // 9))}


MASKS = list(masks(1, 1))

# ── losses, as functions of (q, k, temperature, impl) ───────────────────────────────────────────────────────


def labels_of(rows):
    """Return labels: each row in the first half has its own, in the second half three rows share a label."""
    row = torch.arange(len(rows), device=rows.device)
    return torch.where(row < len(rows) // 2, -row, row // 3)


def pairs(q, k):
    """Return torch.stack([q, k], 1), which under autocast on the CPU accepts only autocast's half type."""
    return cat_rows([q, k]).unflatten(0, (2, -1)).transpose(0, 1)


def ignoring(q, k, t, impl):
    """Return linear_cross_entropy over the first 20 rows of k as classes, with every fifth row ignored."""
    row = torch.arange(len(q), device=DEVICE)
    targets = (row % 20).masked_fill(row % 5 == 0, -1)
    return linear_cross_entropy(q, k[:20], targets, -1, temperature=t, impl=impl)


def gathered(loss, q, k, t, impl, **options):
    """Return the loss of one rank that has the middle rows, with all rows as the gathered rows."""
    own = slice(len(q) // 3, len(q) - len(q) // 4)
    options |= dict(offset=own.start, impl=impl)
    if loss == sup_con_loss:
        z, labels = pairs(q, k), labels_of(q) % 9 - 40
        return sup_con_loss(z[own], labels[own], t, 0.07, gathered=(z, labels), **options)
    return loss(q[own], k[own], t, gathered=(q, k), **options)


LOSSES = {
    "info_nce": lambda q, k, t, impl, **options: info_nce(q, k, t, impl=impl, **options),
    "offset": lambda q, k, t, impl, **options: info_nce(q[:-7], k, t, offset=5, impl=impl, **options),
    "clip_loss": lambda q, k, t, impl, **options: clip_loss(q, k, t, impl=impl, **options),
    "nt_xent": lambda q, k, t, impl, **options: nt_xent(q, k, t, impl=impl, **options),
    "queue_loss": lambda q, k, t, impl, **options: queue_loss(
        q, k, k.detach()[6:].flip(0, 1), t, impl=impl, **options),
    "linear": lambda q, k, t, impl: linear_cross_entropy(
        q, k, torch.arange(len(q), device=DEVICE) * 3 % len(k), temperature=t, impl=impl),
    "ignoring": ignoring,
    "sigmoid_loss": lambda q, k, t, impl, **options: sigmoid_loss(
        q[:-7], k, t, -4.0, offset=5, impl=impl, **options),
    "sup_con_loss": lambda q, k, t, impl, **options: sup_con_loss(
        pairs(q, k), labels_of(q), t, impl=impl, **options),
    "lse": lambda q, k, t, impl, **options: similarity_lse(
        q, k, t, exclude="diagonal", offset=7, impl=impl, **options),
    "self_similarity": lambda q, k, t, impl, **options: similarity_lse(
        q, None, t, exclude="diagonal", impl=impl, **options) + 0 * k.sum(),
    "pair": lambda q, k, t, impl, **options: similarity_lse(
        q, None, t, exclude="pair", impl=impl, **options) + 0 * k.sum(),
    "ids": lambda q, k, t, impl, **options: similarity_lse(
        q, None, t, exclude=(labels_of(q),) * 2, impl=impl, **options) + 0 * k.sum(),
    "gathered_clip_loss": functools.partial(gathered, clip_loss),
    "gathered_nt_xent": functools.partial(gathered, nt_xent),
    "gathered_sup_con_loss": functools.partial(gathered, sup_con_loss)}

# ── comparison ──────────────────────────────────────────────────────────────────────────────────────────────


def differentiate(f, *inputs):
    """Return [value, gradients...] in float64. The gradients are of a weighted sum of all finite values."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = f(*inputs)
    finite = value.where(value.isfinite(), torch.zeros_like(value))
    weights = torch.linspace(-1, 2, max(value.numel(), 1), dtype=value.dtype, device=value.device)
    gradients = torch.autograd.grad((finite * weights.view_as(value)).sum(), inputs)
    return [value.detach().double(), *(gradient.double() for gradient in gradients)]


def assert_close(ours, exact, eager, dtype, largest_logit, units, floor=0.0):
    """Check that each error of `ours` is at most three times that of `eager`, plus `units` units of rounding.

    largest_logit  1/τ for unit rows: exp turns the float32 rounding error of a logit, which grows with the
                   logit, into a relative error of its result
    floor          errors are relative to at least this size, for gradients with terms that cancel
    """
    summed = dtype if dtype == torch.float64 else torch.float32
    unit = units * (torch.finfo(dtype).eps + largest_logit * torch.finfo(summed).eps)
    for name, a, b, c in zip(("value", "dq", "dk", "dtemperature"), ours, exact, eager):
        assert torch.equal(a.isneginf(), b.isneginf()) and not a.isnan().any(), f"{name}: infinite or NaN"
        a, b, c = (x.nan_to_num(neginf=0.0) for x in (a, b, c))
        scale = b.abs().max().clamp(min=floor)
        if name == "dtemperature":  # dtemperature is a sum whose terms may cancel
            scale = exact[1].abs().sum().clamp(min=floor * len(exact[1])) * largest_logit
        error, allowed = (a - b).abs().max().item(), (3 * (c - b).abs().max() + unit * scale).item()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def compare(f, q, k, temperature=0.07, impl="triton", units=16, floor=0.0):
    """Compare f(q, k, temperature, impl) with its result in eager in float64, on the same rounded rows."""
    t = torch.tensor(temperature, dtype=torch.float32, device=DEVICE)
    exact = differentiate(lambda *x: f(*x, "eager"), q.double(), k.double(), t.double())
    t = t.double() if q.dtype == torch.float64 else t
    eager = differentiate(lambda *x: f(*x, "eager"), q, k, t)
    ours = differentiate(lambda *x: f(*x, impl), q, k, t)
    assert_close(ours, exact, eager, q.dtype, 1 / temperature, units, floor)


def patch_kernels(monkeypatch, settings):
    """Set {name inside the package kernels: value} for one test."""
    for module in pkgutil.iter_modules(gpu.__path__):          # a later import would keep the new values
        importlib.import_module(f"kernels.gpu.{module.name}")
    for name, value in settings.items():
        monkeypatch.setattr(f"kernels.{name}", value)
