"""Random cases against float64 eager, and hard cases: tiny temperatures, equal rows, NaN, invalid targets.

The number of random cases is set by TENCL_FUZZ; run more of them by hand:

    python -m pytest -q tests/kernels/test_fuzz.py                        40 cases
    TENCL_FUZZ=2000 python -m pytest -q tests/kernels/test_fuzz.py        2,000 cases
"""
import contextlib
import os
import random

import pytest
import torch
import torch.nn.functional as F
from test_kernels import (
    DEVICE,
    GPU,
    LOSSES,
    LSE_CALLS,
    compare,
    differentiate,
    patch_kernels,
    positive_pairs,
    unit_rows,
)

from kernels import (
    clip_loss,
    heuristics,
    info_nce,
    linear_cross_entropy,
    nt_xent,
    queue_loss,
    sigmoid_loss,
    similarity_lse,
    similarity_topk,
    sup_con_loss,
)

CASES = int(os.environ.get("TENCL_FUZZ", 40))
DTYPES = {"blockwise": [torch.float64, torch.float32, torch.float16, torch.bfloat16],
          "triton": [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]}
# force the paths for many rows or a large D; heuristics last: importing the other modules copies its FEW_ROWS
MANY_ROWS = {"gpu.shift.FEW_ROWS": 0, "masks.FEW_ROWS": 0, "heuristics.FEW_ROWS": 0}
LARGE_D = MANY_ROWS | {"heuristics.MAX_SMALL_D": 0}
twenty_at_a_time = pytest.mark.parametrize(
    "seeds", [range(i, min(i + 20, CASES)) for i in range(0, CASES, 20)])
every_impl = pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
# the fused implementations: blockwise with one strip and with several; Triton with its code paths for
# few rows, for many rows, and for a large D
FUSED_CASES = [("blockwise", {}), ("blockwise", {"blockwise.ONE_STRIP": 0, "blockwise.MIN_STRIP_ROWS": 3}),
               ("triton", {}), ("triton", MANY_ROWS), ("triton", LARGE_D)]
CASE_NAMES = ["one strip", "strips", "triton few rows", "triton many rows", "triton large D"]
fused_impls = pytest.mark.parametrize("impl, settings", FUSED_CASES, ids=CASE_NAMES)
all_impls_and_settings = pytest.mark.parametrize(
    "impl, settings", [("eager", {}), *FUSED_CASES], ids=["eager", *CASE_NAMES])

# ── random cases ────────────────────────────────────────────────────────────────────────────────────────────


def draw(seed):
    """Return (implementation, q, k, temperature, mask arguments) of the random case with this seed."""
    pick, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    impl = pick.choice(list(DTYPES))
    dtype = pick.choice(DTYPES[impl])
    n, m = (pick.choice([1, 2, pick.randint(1, 40), pick.randint(1, 300)]) for _ in range(2))
    d = pick.choice([1, 16, 64, pick.randint(1, 200)])

    def random_rows(count):
        x = torch.randn(count, d, generator=numbers, dtype=torch.float64)
        x = F.normalize(x, dim=1).to(DEVICE, dtype)
        by_columns, unaligned, every_second = range(1, 4)
        layout = pick.randrange(4)
        if layout == by_columns:
            return x.T.contiguous().T
        if layout == unaligned:  # a slice of longer rows
            return torch.cat([torch.zeros_like(x[:, :1]), x], 1)[:, 1:]
        return torch.stack([x, x], 1).flatten(0, 1)[::2] if layout == every_second else x

    def ids():
        dtype, end = pick.choice([torch.int64, torch.int32, torch.int16]), pick.choice([1, 2, 10, 1000])
        pair = [torch.randint(-end, end, (count,), generator=numbers).to(DEVICE, dtype) for count in (n, m)]
        return tuple(x.sort()[0] for x in pair) if pick.random() < 0.5 else tuple(pair)

    q, k = random_rows(n), random_rows(m)
    excludes = {"none": None, "diagonal": "diagonal", "ids": ids(), "both": ("diagonal", *ids())}
    kind = pick.choice(list(excludes))
    mask = {"exclude": excludes[kind], "within": pick.choice([None, None, ids()])}
    if pick.random() < 0.3:  # whole numbers, whose products are exact in every dtype
        width = pick.randint(1, 50)
        features = [torch.randint(-2, 3, (count, width), generator=numbers).to(DEVICE, torch.float32)
                    for count in (n, m)]
        mask["similar"] = (*features, pick.choice([0.0, 3.0, -100.0]))
    if kind in ("diagonal", "both"):
        mask["offset"] = pick.randint(-5, m)
    return impl, q, k, 10 ** pick.uniform(-2, 0.5), mask


@contextlib.contextmanager
def describe_case(seed, what, impl, q, k, temperature):
    """Add a description of the case to an AssertionError inside the with block."""
    try:
        yield
    except AssertionError as error:
        case = f"{impl}, {q.dtype}, {tuple(q.shape)} × {tuple(k.shape)}, τ {temperature:.3g}"
        raise AssertionError(f"seed {seed}: {what}, {case}: {error}") from error


@twenty_at_a_time
def test_lse(seeds, monkeypatch):
    for seed in seeds:
        impl, q, k, temperature, mask = draw(seed)
        if random.Random(seed).random() < 0.5 and heuristics.HAS_TRITON:  # use the code path for many rows
            patch_kernels(monkeypatch, MANY_ROWS)
        types = {name: type(x).__name__ for name, x in mask.items()}
        with describe_case(seed, types, impl, q, k, temperature):
            compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **mask), q, k, temperature, impl,
                    units=64)
        monkeypatch.undo()


@twenty_at_a_time
def test_losses(seeds, monkeypatch):
    """Check the mean losses on random rows, also with random block sizes and limits between code paths."""
    for seed in seeds:
        impl, q, k, temperature, _ = draw(seed)
        pick = random.Random(seed)
        temperature, n, m = max(temperature, 0.02), len(q), len(k)
        if pick.random() < 0.5 and heuristics.HAS_TRITON:
            size, few_rows = pick.choice([128, 256, 2 ** 14]), pick.choice([0, 1024])
            patch_kernels(monkeypatch, {
                "gpu.shift.FEW_ROWS": few_rows, "heuristics.FEW_ROWS": 0,
                "heuristics.MAX_SMALL_D": pick.choice([0, 64, 256]),
                "gpu.lse_forward.table_block_shape": lambda q, k, square, size=size: (size, size)})
        offset = pick.randint(0, m - n) if n <= m else 0
        targets = torch.randint(m, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        half, both, bias = n // 2 or 1, min(n, m), pick.uniform(-12, 3)
        options = {"normalize": pick.random() < 0.3}
        losses = {
            "info_nce": lambda q, k, t, impl: info_nce(q[:both], k, t, offset=offset, impl=impl, **options),
            "clip_loss": lambda q, k, t, impl: clip_loss(q[:both], k[:both], t, impl=impl, **options),
            "nt_xent": lambda q, k, t, impl: nt_xent(
                q[:half], q[-half:], t, impl=impl, **options) + 0 * k.sum(),
            "queue_loss": lambda q, k, t, impl: queue_loss(
                q[:both], k[:both], k.detach(), t, impl=impl, **options),
            "linear": lambda q, k, t, impl: linear_cross_entropy(q, k, targets, temperature=t, impl=impl),
            "sigmoid_loss": lambda q, k, t, impl: sigmoid_loss(
                q[:both], k, t, bias, offset=offset, impl=impl, **options),
            "sup_con_loss": lambda q, k, t, impl: sup_con_loss(
                torch.stack([q[:both], k[:both]], 1), targets[:both], t, temperature, impl=impl, **options)}
        rank = slice(both // 3, both - both // 4)              # the rows of one of several ranks

        def gathered(loss):
            def of_one_rank(q, k, t, impl):
                found = loss(q[rank], k[rank], t, gathered=(q[:both], k[:both]), offset=rank.start, impl=impl,
                             **options)
                return found + 0 * k.sum()
            return of_one_rank

        losses |= {"gathered clip_loss": gathered(clip_loss), "gathered nt_xent": gathered(nt_xent)}
        loss = pick.choice(list(losses))
        with describe_case(seed, f"{loss}, {options}", impl, q, k, temperature):
            compare(losses[loss], q, k, temperature, impl, units=64, floor=1 / temperature / n)
        monkeypatch.undo()


@twenty_at_a_time
def test_topk(seeds):
    """The returned columns have the n largest dot products of float64 eager, up to rounding."""
    for seed in seeds:
        impl, q, k, temperature, mask = draw(seed)
        n = random.Random(seed).randint(1, min(20, len(k)))
        values, columns = similarity_topk(q, k, n, impl=impl, **mask)
        exact, expected = similarity_topk(q.double(), k.double(), n, impl="eager", **mask)
        found = (q.double() @ k.double().T).gather(1, columns.clamp(min=0)).where(columns >= 0, -torch.inf)
        with describe_case(seed, n, impl, q, k, temperature):
            assert torch.equal(columns == -1, expected == -1)
            assert torch.equal(columns == -1, values.isneginf())
            for x in (values.double(), found):
                torch.testing.assert_close(x, exact, rtol=1e-5, atol=1e-5)
            assert all(len(row.unique()) == len(row) for row in (row[row >= 0] for row in columns))


# ── large logits ────────────────────────────────────────────────────────────────────────────────────────────


def relative_errors(loss, impl, q, k, temperature):
    """Return the relative errors of value, dq, dk, dτ in the maximum norm, for float32 q and k."""
    t = torch.tensor(temperature, device=DEVICE)
    exact = differentiate(lambda *x: loss(*x, "eager"), q.double(), k.double(), t.double())
    ours = differentiate(lambda *x: loss(*x, impl), q, k, t)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, exact)]


@fused_impls
@pytest.mark.parametrize("loss", ["nt_xent", "clip_loss", "info_nce", "linear", "queue_loss",
                                  "sigmoid_loss", "sup_con_loss", "lse"])
def test_small_temperatures(impl, settings, loss, monkeypatch):
    """For huge logits, gradients are as accurate as eager's: a rounded lse would scale a row's gradient."""
    patch_kernels(monkeypatch, settings)
    q, k = unit_rows(30, 24, torch.float32, 70), unit_rows(30, 24, torch.float32, 71)
    for temperature in (1e-4, 1e-7):
        f = (LOSSES | LSE_CALLS)[loss]
        eager, ours = (relative_errors(f, i, q, k, temperature) for i in ("eager", impl))
        for a, b in zip(ours[:3], eager):
            assert a <= 3 * b + 5e-6, temperature


@pytest.mark.parametrize("impl, settings, norm", [
    (impl, settings, norm) for impl, settings in FUSED_CASES for norm in (3e4, 1e10, 1e13)
    if impl != "triton" or norm == 3e4])
def test_large_logits(impl, settings, norm, monkeypatch):
    """Value and gradients are accurate for logits up to 1e9, and in blockwise beyond 1e20.
    Above 2e9 Triton overflows on a GPU, and since version 3.9 in the interpreter too: a fused multiply-add
    keeps the part of a logit that rounding drops, and exp2 of that part overflows."""
    patch_kernels(monkeypatch, settings)
    q, k = (norm * unit_rows(20, 8, torch.float32, seed) for seed in (72, 73))
    for loss in ("nt_xent", "clip_loss", "info_nce", "sigmoid_loss", "lse"):
        assert max(relative_errors((LOSSES | LSE_CALLS)[loss], impl, q, k, 1.0)[:3]) < 1e-5


@fused_impls
@pytest.mark.parametrize("loss", ["nt_xent", "clip_loss", "info_nce", "linear", "sigmoid_loss",
                                  "sup_con_loss"])
def test_collapsed_rows(impl, settings, loss, monkeypatch):
    """Rows are (nearly) equal, so most gradients cancel to 0. Errors may come from the rounding of rows, but
    not from the rounding of logits, which are 10,000, unless the CPU multiplies equal rows differently."""
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
            assert (a - b).abs().max() <= 4 * (c - b).abs().max() + allowed      # 3.5 in strips on an H200


# ── NaN and infinity ────────────────────────────────────────────────────────────────────────────────────────

PER_ROW_LOSSES = {
    "lse": lambda q, k, t, impl: similarity_lse(q, k, t, exclude="diagonal", offset=3, impl=impl),
    "info_nce": lambda q, k, t, impl: info_nce(q, k, t, impl=impl),
    "linear": lambda q, k, t, impl: linear_cross_entropy(
        q, k, torch.arange(len(q), device=DEVICE) * 3 % len(k), temperature=t, impl=impl),
    "sigmoid_loss": lambda q, k, t, impl: sigmoid_loss(q, k, t, -2.0, impl=impl) / len(k),
    "normalize": lambda q, k, t, impl: similarity_lse(3 * q, 2 * k, t, normalize=True, impl=impl),
    "queue_loss": lambda q, k, t, impl: queue_loss(q, k, k.detach().flip(0), t, impl=impl)}


@all_impls_and_settings
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("loss", PER_ROW_LOSSES)
def test_a_bad_query_does_not_affect_others(impl, settings, dtype, loss, monkeypatch):
    """NaN or infinity in a query changes its own loss, but no gradient of another query."""
    patch_kernels(monkeypatch, settings)
    q, k = positive_pairs(9, 20, dtype)
    others, found = torch.arange(9, device=DEVICE) != 4, []
    for value in (q[4, 3].item(), torch.nan, torch.inf):       # first the right value, for comparison
        x = [y.clone().requires_grad_() for y in (q, k)]
        x[0].data[4, 3] = value
        total = PER_ROW_LOSSES[loss](*x, 0.2, impl).sum()
        found.append(torch.autograd.grad(total, x, allow_unused=True, materialize_grads=True))
    for dq, dk in found[1:]:
        torch.testing.assert_close(dq[others], found[0][0][others], rtol=1e-3, atol=1e-5)
        if loss == "queue_loss":                               # here each query has its own key
            torch.testing.assert_close(dk[others], found[0][1][others], rtol=1e-3, atol=1e-5)


@all_impls_and_settings
def test_ignored_rows_may_hold_nan(impl, settings, monkeypatch):
    """A row whose target is ignore_index changes neither the loss nor the gradients, and gets gradient 0."""
    patch_kernels(monkeypatch, settings)
    h, w = unit_rows(9, 20, torch.float32, 77), unit_rows(12, 20, torch.float32, 78)
    targets = torch.arange(9, device=DEVICE).masked_fill_(torch.arange(9, device=DEVICE) % 4 == 1, -100)

    def f(*x):
        return linear_cross_entropy(*x, targets, impl=impl)

    clean = differentiate(f, h.masked_fill((targets < 0)[:, None], 0), w)
    for value in (torch.nan, torch.inf):
        h[1], h[5, 2] = value, value
        found = differentiate(f, h, w)
        assert all(torch.equal(a, b) for a, b in zip(found, clean)) and not found[1][targets < 0].any()


@every_impl
@pytest.mark.parametrize("exclude", [None, "diagonal"])
def test_nan_is_the_nearest_neighbour(impl, exclude):
    """As in torch.topk, NaN counts as the largest, so it is visible and the same in all implementations."""
    q, k = unit_rows(6, 20, torch.float32, 79), unit_rows(70, 20, torch.float32, 80)
    q[1], k[3, 2], k[66] = torch.nan, torch.nan, torch.nan
    values, columns = similarity_topk(q, k, 4, exclude=exclude, impl=impl)
    assert values[1].isnan().all() and len(columns[1].unique()) == 4 and (columns >= 0).all()
    for row in (0, 2, 3, 4, 5):
        found = {66} if (exclude, row) == ("diagonal", 3) else {3, 66}
        assert values[row].isnan().sum() == len(found) and set(columns[row, : len(found)].tolist()) == found
        clean = [j for j in range(70) if j not in (3, 66) and (exclude is None or j != row)]
        expected = (k.double()[clean] @ q.double()[row]).topk(4 - len(found))[0].float()
        torch.testing.assert_close(values[row, len(found):], expected)
    q[2, 0], k[:, 0] = torch.inf, k[:, 0].abs() + 1            # ∞ is returned as ∞
    assert similarity_topk(q[2:3], k[4:60], 2, impl=impl)[0].isposinf().all()


# ── rejected input ──────────────────────────────────────────────────────────────────────────────────────────


@every_impl
def test_targets_out_of_range(impl, monkeypatch):
    """A bad target raises ValueError on the CPU. On a GPU the loss is NaN instead."""
    h, w = (unit_rows(n, 8, torch.float32, 83).requires_grad_() for n in (5, 12))

    def f(target):
        targets = torch.tensor([0, 11, -100, target, 3], device=DEVICE)
        return linear_cross_entropy(h, w, targets, impl=impl)

    for wrong in (-1, 12, 2 ** 40) if DEVICE == "cpu" else ():
        with pytest.raises(ValueError, match=f"row 3 is {wrong}, expected 0 to 11, or ignore_index, -100"):
            f(wrong)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    for wrong in (-1, 12, 2 ** 40):
        loss = f(wrong)
        assert loss.isnan() and all(x.isnan().any() for x in torch.autograd.grad(loss, (h, w)))
    assert f(5).isfinite()
