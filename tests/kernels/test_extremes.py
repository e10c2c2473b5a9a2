"""What breaks textbooks: tiny temperatures, rows that are all equal, NaN in a row, targets that are none."""
import pytest
import torch
import torch.nn.functional as F
from test_kernels import DEVICE, LOSSES, differentiate, pairs, rows, set_in

from kernels import (
    clip_loss,
    info_nce,
    linear_cross_entropy,
    nt_xent,
    queue_loss,
    sigmoid_loss,
    similarity_lse,
)
from kernels.similarity import similarity_topk

every_impl = pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
MANY = {"gpu.reference.FEW": 0, "gpu.launch.FEW": 0, "paths.FEW": 0}
# how rows are taken by Triton: as few; as many narrow, or wide, ones would be
WAYS = [("blockwise", {}), ("triton", {}), ("triton", MANY), ("triton", MANY | {"paths.WIDEST": 0})]
NAMES = ["blockwise", "triton few", "triton many", "triton wide"]
fused = pytest.mark.parametrize("impl, way", WAYS, ids=NAMES)
every_way = pytest.mark.parametrize("impl, way", [("eager", {}), *WAYS], ids=["eager", *NAMES])


# ── large logits ────────────────────────────────────────────────────────────────────────────────────────────


def relative_errors(loss, impl, q, k, temperature):
    """[of value, dq, dk, dτ], largest entries; q, k float32."""
    t = torch.tensor(temperature, device=DEVICE)
    exact = differentiate(lambda *x: loss(*x, "eager"), q.double(), k.double(), t.double())
    ours = differentiate(lambda *x: loss(*x, impl), q, k, t)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, exact)]


@fused
@pytest.mark.parametrize("loss", ["nt_xent", "clip_loss", "info_nce", "linear", "queue_loss",
                                  "sigmoid_loss", "sup_con_loss"])
def test_small_temperatures(impl, way, loss, monkeypatch):
    """A weight is as exact as eager's, however large the logits: their roundings are not a whole row's."""
    set_in(monkeypatch, way)
    q, k = rows(30, 24, torch.float32, 70), rows(30, 24, torch.float32, 71)
    for temperature in (1e-4, 1e-7):
        eager, ours = (relative_errors(LOSSES[loss], i, q, k, temperature) for i in ("eager", impl))
        for a, b in zip(ours[:3], eager):
            assert a <= 3 * b + 5e-6, temperature


@pytest.mark.parametrize("impl, way, norm", [
    (impl, way, norm) for impl, way in WAYS for norm in (3e4, 1e10, 1e13) if impl != "triton" or norm == 3e4])
def test_large_logits(impl, way, norm, monkeypatch):
    """Beyond 1e20 in blockwise. A GPU's fused multiply-add keeps what a logit's rounding loses, and exp2 of
    that overflows for logits above 2e9; so does the interpreter's since Triton 3.9."""
    set_in(monkeypatch, way)
    q, k = (norm * rows(20, 8, torch.float32, seed) for seed in (72, 73))
    for loss in (LOSSES[name] for name in ("nt_xent", "clip_loss", "info_nce", "sigmoid_loss")):
        assert max(relative_errors(loss, impl, q, k, 1.0)[:3]) < 1e-5


@fused
@pytest.mark.parametrize("loss", ["nt_xent", "clip_loss", "info_nce", "linear", "sigmoid_loss",
                                  "sup_con_loss"])
def test_collapsed_rows(impl, way, loss, monkeypatch):
    """All weights of a row times one row, less its positive, is nothing but rounding, not the logits'."""
    set_in(monkeypatch, way)
    one, t = rows(1, 24, torch.float32, 74), torch.tensor(1e-4, device=DEVICE)
    least = 8 * torch.finfo(torch.float32).eps / 1e-4 / 40
    f = lambda impl, *x: differentiate(lambda *x: LOSSES[loss](*x, impl), *x)
    for apart in (0.0, 1e-6):
        q, k = (F.normalize(one + apart * rows(40, 24, torch.float32, seed), dim=1) for seed in (75, 76))
        exact, eager = f("eager", q.double(), k.double(), t.double()), f("eager", q, k, t)
        for a, b, c in zip(f(impl, q, k, t)[1:3], exact[1:], eager[1:]):
            assert (a - b).abs().max() <= 3 * (c - b).abs().max() + least


# ── NaN and infinity ────────────────────────────────────────────────────────────────────────────────────────

OF_ROWS = {
    "lse": lambda q, k, impl: similarity_lse(q, k, 0.2, impl=impl),
    "fixed keys": lambda q, k, impl: similarity_lse(q, k.detach(), 0.2, impl=impl),
    "info_nce": lambda q, k, impl: info_nce(q, k, 0.2, impl=impl),
    "normalize": lambda q, k, impl: similarity_lse(3 * q, 2 * k, 0.2, normalize=True, impl=impl),
    "queue_loss": lambda q, k, impl: queue_loss(q, k, k.detach().flip(0), 0.2, impl=impl),
    "linear": lambda q, k, impl: linear_cross_entropy(q, k, torch.arange(len(q), device=DEVICE), impl=impl),
    "sigmoid_loss": lambda q, k, impl: sigmoid_loss(q, k, 0.2, -2.0, impl=impl)}


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("loss", OF_ROWS)
def test_a_row_stays_to_itself(impl, way, dtype, loss, monkeypatch):
    """What a bad query does to its own loss does not reach the gradients of others."""
    set_in(monkeypatch, way)
    q, k = pairs(9, 20, dtype)
    others, found = torch.arange(9, device=DEVICE) != 4, []
    for wrong in (q[4, 3].item(), torch.nan, torch.inf):       # the first is right
        x = [y.clone().requires_grad_() for y in (q, k)]
        x[0].data[4, 3] = wrong
        total = OF_ROWS[loss](*x, impl).sum()
        found.append(torch.autograd.grad(total, x, allow_unused=True, materialize_grads=True))
    for dq, dk in found[1:]:
        torch.testing.assert_close(dq[others], found[0][0][others], rtol=1e-3, atol=1e-5)
        if loss == "queue_loss":                               # a positive belongs to one row
            torch.testing.assert_close(dk[others], found[0][1][others], rtol=1e-3, atol=1e-5)


@every_way
def test_a_row_that_does_not_count_may_hold_anything(impl, way, monkeypatch):
    set_in(monkeypatch, way)
    h, w = rows(9, 20, torch.float32, 77), rows(12, 20, torch.float32, 78)
    targets = torch.arange(9, device=DEVICE).masked_fill_(torch.arange(9, device=DEVICE) % 4 == 1, -100)
    f = lambda *x: linear_cross_entropy(*x, targets, impl=impl)
    clean = differentiate(f, h.masked_fill((targets < 0)[:, None], 0), w)
    for wrong in (torch.nan, torch.inf):
        h[1], h[5, 2] = wrong, wrong
        found = differentiate(f, h, w)
        assert all(torch.equal(a, b) for a, b in zip(found, clean)) and not found[1][targets < 0].any()


@every_impl
def test_zero_rows(impl):
    q, k = pairs(9, 20, torch.float32)
    q[2], k[5] = 0, 0
    for loss in (info_nce, clip_loss, nt_xent):
        found, exact = (differentiate(lambda *x: loss(*x, 1e-3, impl=i), *y)
                        for i, y in ((impl, (q, k)), ("eager", (q.double(), k.double()))))
        for a, b in zip(found, exact):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@every_impl
@pytest.mark.parametrize("exclude", [None, "diagonal"])
def test_nan_is_the_nearest_neighbour(impl, exclude):
    """As torch.topk has it: what is wrong is seen, and does not depend on the implementation."""
    q, k = rows(6, 20, torch.float32, 79), rows(70, 20, torch.float32, 80)
    q[1], k[3, 2], k[66] = torch.nan, torch.nan, torch.nan
    values, columns = similarity_topk(q, k, 4, exclude=exclude, impl=impl)
    assert values[1].isnan().all() and len(columns[1].unique()) == 4 and (columns >= 0).all()
    for row in (0, 2, 3, 4, 5):
        found = {66} if (exclude, row) == ("diagonal", 3) else {3, 66}
        assert values[row].isnan().sum() == len(found) and set(columns[row, : len(found)].tolist()) == found
        clean = [j for j in range(70) if j not in (3, 66) and (exclude is None or j != row)]
        wanted = (k.double()[clean] @ q.double()[row]).topk(4 - len(found))[0].float()
        torch.testing.assert_close(values[row, len(found):], wanted)
    q[2, 0], k[:, 0] = torch.inf, k[:, 0].abs() + 1            # ∞ is no NaN
    assert similarity_topk(q[2:3], k[4:60], 2, impl=impl)[0].isposinf().all()


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────


@every_impl
def test_targets_out_of_range(impl, monkeypatch):
    """Refused where they are read; else, as on a GPU, the loss is NaN, and memory is left alone."""
    h, w = (rows(n, 8, torch.float32, 83).requires_grad_() for n in (5, 12))
    f = lambda wrong: linear_cross_entropy(
        h, w, torch.tensor([0, 11, -100, wrong, 3], device=DEVICE), impl=impl)
    for wrong in (-1, 12, 2 ** 40) if DEVICE == "cpu" else ():
        with pytest.raises(ValueError, match=f"row 3 is {wrong}, wanted 0 to 11, or ignore_index, -100"):
            f(wrong)
    monkeypatch.setattr("kernels.losses.is_watched", lambda x: True)
    for wrong in (-1, 12, 2 ** 40):
        loss = f(wrong)
        assert loss.isnan() and all(x.isnan().any() for x in torch.autograd.grad(loss, (h, w)))
    assert f(5).isfinite()


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(f)(q), "vmap": lambda f, q: torch.func.vmap(f)(torch.stack([q, q])),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)), "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "hessian": lambda f, q: torch.func.hessian(f)(q),
    "vectorised": lambda f, q: torch.autograd.functional.jacobian(f, q, vectorize=True)}


@every_impl
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "nt_xent", "queue_loss", "linear", "sigmoid"])
def test_transforms_name_eager(impl, transform, loss):
    q, k = rows(4, 8, torch.float32, 84), rows(12, 8, torch.float32, 85)
    f = lambda q: {"queue_loss": lambda: queue_loss(q, k[:4], k, 0.2, impl=impl),
                   "linear": lambda: linear_cross_entropy(q, k, torch.arange(4, device=DEVICE), impl=impl),
                   "sigmoid": lambda: sigmoid_loss(q, k, 0.2, impl=impl)
                   }.get(loss, lambda: LOSSES[loss](q, k[:4], 0.2, impl))()
    if impl == "eager":
        TRANSFORMS[transform](f, q)
        return
    with pytest.raises(RuntimeError, match="kernels: the fused operations have no .*; use impl='eager'"):
        TRANSFORMS[transform](f, q)


# ── autocast ────────────────────────────────────────────────────────────────────────────────────────────────


@every_impl
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_queue_loss_casts_its_rows_together(impl, dtype):
    """Whichever of the three autocast's dtype already has."""
    if impl == "triton" and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter's bfloat16 products are wrong")
    q, k, queue = (rows(n, 20, torch.float32, seed) for n, seed in ((6, 86), (6, 87), (30, 88)))
    found = []
    for halves in range(8):
        x = [y.to(dtype) if halves >> i & 1 else y for i, y in enumerate((q, k, queue))]
        leaves = [y.detach().requires_grad_() for y in x[:2]]
        with torch.autocast(DEVICE, dtype):
            loss = queue_loss(*leaves, x[2], 0.2, impl=impl)
        gradients = torch.autograd.grad(loss, leaves)
        assert [g.dtype for g in gradients] == [y.dtype for y in leaves]
        found.append([loss.detach(), *gradients])
    for loss, *gradients in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=0, atol=1e-5 if impl != "eager" else 1e-2)
        for a, b in zip(gradients, found[0][1:]):
            torch.testing.assert_close(a.float(), b.float(), rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
