"""Values and gradients of the losses at the limits of the dtypes: underflow, overflow, cancellation."""
import pytest
import torch
import torch.nn.functional as F
from comparing import (
    DEVICE,
    LOSSES,
    TRITON,
    both_impls,
    differentiate,
    every_impl,
    patch_kernels,
    positive_pairs,
    unit_rows,
)

from kernels import info_nce, linear_cross_entropy, sigmoid_loss, similarity_topk, sup_con_loss

# {name: (fused implementation, settings)}: blockwise with one strip (block of rows) or several; Triton with
# its code paths for few logits, for many logits, and for a large D
MANY_LOGITS = {"gpu.heuristics.SHIFT_LOGITS": 0}
FUSED = {"one strip": ("blockwise", {}),
         "strips": ("blockwise", {"blockwise.ONE_STRIP": 0, "blockwise.MIN_STRIP_ROWS": 3}),
         "few logits": ("triton", {}), "many logits": ("triton", MANY_LOGITS),
         "large D": ("triton", MANY_LOGITS | {"gpu.heuristics.MAX_SMALL_D": 0})}
every_path = pytest.mark.parametrize("impl, settings", FUSED.values(), ids=FUSED)


def relative_error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


# ── small and large gradients ───────────────────────────────────────────────────────────────────────────────


@both_impls
@pytest.mark.parametrize("dtype", TRITON, ids=str)
def test_gradient_is_accurate_for_small_losses(impl, dtype):
    """At a loss of 5e-3, float32 eager loses digits in the positive's gradient weight, 1 − 0.995."""
    q = unit_rows(256, 64, torch.float64, 19)
    k = F.normalize(q + 0.5 * unit_rows(256, 64, torch.float64, 20), dim=1).to(dtype)
    q = q.to(dtype)

    def f(impl, *x):  # without the factor 1000, float16 cannot hold the small gradients
        return differentiate(lambda q, k: 1000 * info_nce(q, k, 0.07, impl=impl), *x)

    exact = f("eager", q.double(), k.double())
    error, eager = (relative_error(f(how, q, k)[1], exact[1]) for how in (impl, "eager"))
    assert 1 < exact[0] < 10
    assert error < {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    assert error < eager / 4 or dtype != torch.float32


@both_impls
def test_sup_con_is_accurate_for_small_losses(impl):
    """At a loss of 1e-6, where each view has one positive, eager has an error of several percent."""
    noise = 0.1 * unit_rows(128, 256, torch.float64, 20).view(64, 2, 256)
    z = F.normalize(unit_rows(64, 256, torch.float64, 19)[:, None] + noise, dim=2).flatten(0, 1).float()
    for views, labels in (2, torch.arange(64, device=DEVICE)), (1, torch.arange(128, device=DEVICE) // 2):
        f = lambda how, z: differentiate(
            lambda z: 1000 * sup_con_loss(z.unflatten(0, (-1, views)), labels, 0.05, impl=how), z)
        exact, found, eager = f("eager", z.double()), f(impl, z), f("eager", z)
        errors = [relative_error(a, b) for a, b in zip(found, exact)]
        assert exact[0] < 0.01 and max(errors) < 1e-5 < relative_error(eager[1], exact[1]) / 100


@both_impls
def test_sup_con_gradient_in_float16(impl):
    """The gradient is the difference of two terms, each of which would overflow in float16."""
    z = F.normalize(unit_rows(4, 16, torch.float64, 47)[:, None] + 0.1 * unit_rows(
        16, 16, torch.float64, 48).view(4, 4, 16), dim=2).view(8, 2, 16).half()
    labels = torch.arange(8, device=DEVICE) // 2
    found, exact = (differentiate(lambda z: 2.0 ** 16 * sup_con_loss(z, labels, impl=how), rows)[1]
                    for how, rows in ((impl, z), ("eager", z.double())))
    assert relative_error(found, exact) < 0.05


@both_impls
def test_repeated_targets_in_float16(impl):
    """The gradient of a frequent class is a sum over 1,500 rows. In float16 the sum would stop growing."""
    h, w = unit_rows(1500, 16, torch.float16, 45), unit_rows(40, 16, torch.float16, 46)
    targets = torch.zeros(1500, dtype=torch.long, device=DEVICE)

    def weight_gradient(impl, *x):
        return differentiate(
            lambda *x: 1000 * linear_cross_entropy(*x, targets, temperature=0.2, impl=impl), *x)[2]

    exact = weight_gradient("eager", h.double(), w.double())
    assert relative_error(weight_gradient(impl, h, w), exact) < 1e-3


@pytest.mark.parametrize("bias, scale", [(-18.0, 1e9), (30.0, 1.0)])
def test_sigmoid_weights_in_float16(bias, scale):
    """Gradients of keys without a positive are right for weights of 1, and of e⁻¹⁸, too small for float16."""
    q, k = (2 * unit_rows(n, 8, torch.float16, n) for n in (40, 50))

    def gradient(impl, *x):
        return differentiate(lambda *x: scale * sigmoid_loss(*x, 4.0, bias, impl=impl), *x)[2][40:]

    assert relative_error(gradient("triton", q, k), gradient("eager", q.double(), k.double())) < 2e-3


# ── normalize=True ──────────────────────────────────────────────────────────────────────────────────────────


@every_impl
def test_normalize_accepts_any_length(impl):
    """A zero row has cosine 0 and the gradient of F.normalize. Squares of float16 must stay in range."""
    lengths = torch.logspace(-1.7, 1.7, 20, dtype=torch.float64, device=DEVICE)[:, None]
    units = positive_pairs(20, 24, torch.float64)
    q, k = (units[0] * lengths).float(), (units[1] * lengths.roll(7, 0)).float()
    q[3], k[5] = 0, 0
    assert not similarity_topk(q[3:4], k, 2, normalize=True, impl=impl)[0].any()
    f = lambda q, k: info_nce(q, k, 0.07, normalize=True, impl=impl)
    exact = differentiate(
        lambda q, k: info_nce(F.normalize(q), F.normalize(k), 0.07, impl="eager"), q.double(), k.double())
    for found, expected in zip(differentiate(f, q, k), exact):
        assert expected.isfinite().all() and expected.abs().max() < 1e13
        errors, sizes = ((x if x.dim() else x[None]).norm(dim=-1) for x in (found - expected, expected))
        assert (errors <= 1e-4 * sizes + 1e-5).all()
    for length in (6e4, 1e-4):                                 # float16 ranges from 6e-8 to 65504
        x, y = ((length * x).half() for x in units)
        exact = info_nce(F.normalize(x.double()), F.normalize(y.double()), 0.07).item()
        assert f(x, y).item() == pytest.approx(exact, rel=0.01)


@both_impls
def test_normalize_divides_a_float32_gradient_by_the_lengths(impl):
    """Gradients of unit rows, about 1e-8, underflow in float16. Divided by the length 1e-3, they fit."""
    rows = [(1e-3 * x).half() for x in positive_pairs(20, 24, torch.float64)]
    found, exact = (differentiate(lambda q, k: 1e-6 * info_nce(q, k, 0.3, normalize=True, impl=how), *x)
                    for how, x in ((impl, rows), ("eager", [x.double() for x in rows])))
    assert all(relative_error(a, b) < 0.02 for a, b in zip(found[1:], exact[1:]))


# ── large logits ────────────────────────────────────────────────────────────────────────────────────────────


def largest_errors(loss, impl, q, k, t):
    """Return the relative errors of value, dq, dk in the maximum norm, for float32 q and k."""
    exact = differentiate(lambda *x: LOSSES[loss](*x, t, "eager"), q.double(), k.double())
    found = differentiate(lambda *x: LOSSES[loss](*x, t, impl), q, k)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact)]


@every_path
@pytest.mark.parametrize("loss", ["nt_xent", "clip_loss", "linear", "queue_loss", "sigmoid_loss", "lse"])
def test_large_logits(impl, settings, loss, monkeypatch):
    """Gradients are as accurate as eager's for logits up to 1e9, and in blockwise up to 1e26. A rounded
    log-sum-exp would scale a row's gradient.
    Above 2e9 Triton overflows on a GPU, and from version 3.9 on in the interpreter too: a fused multiply-add
    keeps the part of a logit that rounding drops, and exp2 of this part overflows."""
    patch_kernels(monkeypatch, settings)
    rows = [unit_rows(30, 24, torch.float32, seed) for seed in (70, 71)]
    largest = [(1.0, 1e13)] if impl == "blockwise" else []
    for temperature, norm in [(1e-7, 1), (1.0, 3e4), *largest]:
        q, k = (norm * x for x in rows)
        eager, found = (largest_errors(loss, how, q, k, temperature) for how in ("eager", impl))
        assert all(a <= 3 * b + 1e-5 for a, b in zip(found, eager)), (temperature, norm)


@every_path
@pytest.mark.parametrize("loss", ["nt_xent", "clip_loss", "linear", "sigmoid_loss"])
def test_collapsed_rows(impl, settings, loss, monkeypatch):
    """All rows are (nearly) equal, so most gradients cancel to 0. Errors may come from the rounding of rows,
    not from that of logits of 10,000. They may be larger if the CPU gives equal rows different products."""
    patch_kernels(monkeypatch, settings)
    one, t = unit_rows(1, 24, torch.float32, 74), torch.tensor(1e-4, device=DEVICE)
    equal = [(one.expand(n, 24) / t) @ one.expand(m, 24).T for n in range(1, 11) for m in range(1, 81)]
    allowed = (8 * torch.finfo(torch.float32).eps + max(x.max() - x.min() for x in equal)) / 1e-4 / 40

    def f(impl, *x):
        return differentiate(lambda *x: LOSSES[loss](*x, impl), *x)

    for spread in (0.0, 1e-6):
        q, k = (F.normalize(one + spread * unit_rows(40, 24, torch.float32, seed), dim=1)
                for seed in (75, 76))
        exact, eager = f("eager", q.double(), k.double(), t.double()), f("eager", q, k, t)
        for a, b, c in zip(f(impl, q, k, t)[1:3], exact[1:], eager[1:]):
            assert (a - b).abs().max() <= 4 * (c - b).abs().max() + allowed      # an H200 had factor 3.5
