"""Random cases against float64 eager, and what breaks textbooks: tiny temperatures, equal rows, NaN, targets
that are none. Random cases are a slice in CI, and all by hand:

    python -m pytest -q tests/kernels/test_fuzz.py                        40 cases
    TENCL_FUZZ=2000 python -m pytest -q tests/kernels/test_fuzz.py        2,000 cases
"""
import contextlib
import os
import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_kernels import DEVICE, GPU, LOSSES, SUMS, compare, differentiate, pairs, rows, set_in

from kernels import (
    clip_loss,
    info_nce,
    linear_cross_entropy,
    nt_xent,
    paths,
    queue_loss,
    sigmoid_loss,
    sup_con_loss,
)
from kernels.similarity import similarity_lse, similarity_topk

CASES = int(os.environ.get("TENCL_FUZZ", 40))
DTYPES = {"blockwise": [torch.float64, torch.float32, torch.float16, torch.bfloat16],
          "triton": [torch.float32, torch.float16] + [torch.bfloat16] * GPU}
# as many rows would be taken; paths last, as the others copy its number when they are imported
MANY = {"gpu.reference.FEW": 0, "gpu.launch.FEW": 0, "paths.FEW": 0}
WIDE = MANY | {"paths.WIDEST": 0}
BLOCKS = {"gpu.lse_forward.sums_block": lambda q, k, square: (128, 128),
          "gpu.gradient_blocks.weight_block": lambda q, k, square: (128, 128),
          "gpu.one_pass.strip_height": lambda q, k: 128,
          "blockwise.SMALL": 0, "blockwise.STRIP_LOGITS": 1}
PATHS = [{}, MANY, WIDE, WIDE | BLOCKS, MANY | {"operations.in_one_pass": lambda *x: False},
         {"gpu.launch.is_number": lambda temperature, x: True}]
by_twenty = pytest.mark.parametrize("seeds", [range(i, min(i + 20, CASES)) for i in range(0, CASES, 20)])
every_impl = pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
# how rows are taken by Triton: as few; as many narrow, or wide, ones would be
WAYS = [("blockwise", {}), ("triton", {}), ("triton", MANY), ("triton", WIDE)]
NAMES = ["blockwise", "triton few", "triton many", "triton wide"]
fused = pytest.mark.parametrize("impl, way", WAYS, ids=NAMES)
every_way = pytest.mark.parametrize("impl, way", [("eager", {}), *WAYS], ids=["eager", *NAMES])

# ── random cases ────────────────────────────────────────────────────────────────────────────────────────────


def draw(seed):
    """(implementation, q, k, temperature, rule) of a case; everything depends on the seed alone."""
    pick, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    impl = pick.choice(list(DTYPES))
    dtype = pick.choice(DTYPES[impl])
    n, m = (pick.choice([1, 2, pick.randint(1, 40), pick.randint(1, 300)]) for _ in range(2))
    d = pick.choice([1, 16, 64, pick.randint(1, 200)])

    def rows(count):
        x = torch.randn(count, d, generator=numbers, dtype=torch.float64)
        x = F.normalize(x, dim=1).to(DEVICE, dtype)
        by_columns, unaligned, every_second = range(1, 4)
        layout = pick.randrange(4)
        if layout == by_columns:
            return x.T.contiguous().T
        if layout == unaligned:  # part of wider rows
            return torch.cat([torch.zeros_like(x[:, :1]), x], 1)[:, 1:]
        return torch.stack([x, x], 1).flatten(0, 1)[::2] if layout == every_second else x

    def ids():
        kind, top = pick.choice([torch.int64, torch.int32, torch.int16]), pick.choice([1, 2, 10, 1000])
        made = [torch.randint(-top, top, (count,), generator=numbers).to(DEVICE, kind) for count in (n, m)]
        return tuple(x.sort()[0] for x in made) if pick.random() < 0.5 else tuple(made)

    q, k = rows(n), rows(m)
    rule = {"exclude": pick.choice([None, "diagonal", ids()]), "within": pick.choice([None, None, ids()])}
    if pick.random() < 0.3:  # whole numbers: exact in every dtype
        width = pick.randint(1, 50)
        features = [torch.randint(-2, 3, (count, width), generator=numbers).to(DEVICE, torch.float32)
                    for count in (n, m)]
        rule["similar"] = (*features, pick.choice([0.0, 3.0, -100.0]))
    if rule["exclude"] == "diagonal":
        rule["offset"] = pick.randint(-5, m)
    return impl, q, k, 10 ** pick.uniform(-2, 0.5), rule


@contextlib.contextmanager
def named(seed, what, impl, q, k, temperature):
    try:
        yield
    except AssertionError as error:
        case = f"{impl}, {q.dtype}, {tuple(q.shape)} × {tuple(k.shape)}, τ {temperature:.3g}"
        raise AssertionError(f"seed {seed}: {what}, {case}: {error}") from error


@by_twenty
def test_lse(seeds, monkeypatch):
    for seed in seeds:
        impl, q, k, temperature, rule = draw(seed)
        if random.Random(seed).random() < 0.5 and paths.HAS_TRITON:  # as many rows would be taken
            set_in(monkeypatch, MANY)
        with named(seed, {name: type(x).__name__ for name, x in rule.items()}, impl, q, k, temperature):
            lse = lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **rule)
            compare(lse, q, k, temperature, impl, units=64)
        monkeypatch.undo()


@by_twenty
def test_losses(seeds, monkeypatch):
    """The mean losses on the same rows, narrow and wide, in blocks of random sizes."""
    for seed in seeds:
        impl, q, k, temperature, _ = draw(seed)
        pick = random.Random(seed)
        temperature, n, m = max(temperature, 0.02), len(q), len(k)
        if pick.random() < 0.5 and paths.HAS_TRITON:
            side, few = pick.choice([128, 256, 2 ** 14]), pick.choice([0, 1024])
            set_in(monkeypatch, {
                "gpu.reference.FEW": few, "paths.FEW": 0, "paths.WIDEST": pick.choice([0, 64, 256]),
                "gpu.lse_forward.sums_block": lambda q, k, square, side=side: (side, side)})
        offset = pick.randint(0, m - n) if n <= m else 0
        targets = torch.randint(m, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        half, few, bias = n // 2 or 1, min(n, m), pick.uniform(-12, 3)
        how = {"normalize": pick.random() < 0.3}
        losses = {
            "info_nce": lambda q, k, t, impl: info_nce(q[:few], k, t, offset=offset, impl=impl, **how),
            "clip_loss": lambda q, k, t, impl: clip_loss(q[:few], k[:few], t, impl=impl, **how),
            "nt_xent": lambda q, k, t, impl: nt_xent(q[:half], q[-half:], t, impl=impl, **how) + 0 * k.sum(),
            "queue_loss": lambda q, k, t, impl: queue_loss(q[:few], k[:few], k.detach(), t, impl=impl, **how),
            "linear": lambda q, k, t, impl: linear_cross_entropy(q, k, targets, temperature=t, impl=impl),
            "sigmoid_loss": lambda q, k, t, impl: sigmoid_loss(
                q[:few], k, t, bias, offset=offset, impl=impl, **how),
            "sup_con_loss": lambda q, k, t, impl: sup_con_loss(
                torch.stack([q[:few], k[:few]], 1), targets[:few], t, temperature, impl=impl, **how)}
        loss = pick.choice(list(losses))
        with named(seed, f"{loss}, {how}", impl, q, k, temperature):
            compare(losses[loss], q, k, temperature, impl, units=64, floor=1 / temperature / n)
        monkeypatch.undo()


@by_twenty
def test_topk(seeds):
    """The products of the found columns are the n largest of float64 eager, up to a product's rounding."""
    for seed in seeds:
        impl, q, k, temperature, rule = draw(seed)
        n = random.Random(seed).randint(1, min(20, len(k)))
        values, columns = similarity_topk(q, k, n, impl=impl, **rule)
        exact, wanted = similarity_topk(q.double(), k.double(), n, impl="eager", **rule)
        found = (q.double() @ k.double().T).gather(1, columns.clamp(min=0)).where(columns >= 0, -torch.inf)
        with named(seed, n, impl, q, k, temperature):
            assert torch.equal(columns == -1, wanted == -1) and torch.equal(columns == -1, values.isneginf())
            for x in (values.double(), found):
                torch.testing.assert_close(x, exact, rtol=1e-5, atol=1e-5)
            assert all(len(row.unique()) == len(row) for row in (row[row >= 0] for row in columns))


# ── random extremes ─────────────────────────────────────────────────────────────────────────────────────────

counted = lambda q: torch.arange(len(q), device=DEVICE)
EXTREME = {
    "lse": lambda q, k, t, impl: similarity_lse(q, k, t, exclude="diagonal", offset=3, impl=impl),
    "one set": lambda q, k, t, impl: similarity_lse(q, None, t, exclude="diagonal", impl=impl) + 0 * k.sum(),
    "fixed keys": lambda q, k, t, impl: similarity_lse(q, k.detach(), t, impl=impl) + 0 * k.sum(),
    "info_nce": lambda q, k, t, impl: info_nce(q, k, t, impl=impl),
    "clip_loss": lambda q, k, t, impl: clip_loss(q, k, t, impl=impl),
    "nt_xent": lambda q, k, t, impl: nt_xent(q, k, t, impl=impl),
    "queue_loss": lambda q, k, t, impl: queue_loss(*(x[: len(x) // 2] for x in (q, k)), k[len(k) // 2 :], t,
                                                   impl=impl),
    "linear": lambda q, k, t, impl: linear_cross_entropy(
        q, k, counted(q) * 3 % len(k), temperature=t, impl=impl),
    "ignoring": lambda q, k, t, impl: linear_cross_entropy(
        q, k, counted(q) * 3 % len(k) * (counted(q) % 2), 0, temperature=t, impl=impl),
    "sigmoid_loss": lambda q, k, t, impl: sigmoid_loss(q, k, t, -2.0, impl=impl) / len(k),
    "sup_con_loss": lambda q, k, t, impl: sup_con_loss(
        torch.stack([q, k], 1), counted(q) // 2, t, t, impl=impl)}
KINDS = ["random", "trained", "equal", "nearly equal", "a row of zeros", "nan", "inf"]


def draw_extreme(seed):
    """(implementation, loss, kind, path, q, k, temperature): τ of 1e-7 … 1e3, norms of 1e-10 … 1e10."""
    pick, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    impl, loss, kind = (pick.choice(list(x)) for x in (DTYPES, EXTREME, KINDS))
    dtype = pick.choice([torch.float32, torch.float32, torch.float16])
    n = pick.choice([2, 7, pick.randint(3, 40), pick.randint(40, 200)])
    d = pick.choice([1, 16, pick.randint(2, 80)])
    new = lambda n: F.normalize(torch.randn(n, d, generator=numbers, dtype=torch.float64), dim=1)
    q, k = new(n), new(n)
    if kind == "trained":
        k = F.normalize(q + 0.1 * k, dim=1)
    if "equal" in kind:
        apart, ends = 10 ** pick.uniform(-7, -3) * ("nearly" in kind), pick.choice([(0, 0), (0, 1)])
        q, k = (F.normalize(x[:1] + apart * new(n), dim=1) for x in [(q, k)[end] for end in ends])
    largest = 2 if dtype == torch.float16 else 10
    norms = [10 ** pick.choice([0, pick.uniform(-largest, largest)]) for _ in range(2)]
    if loss in ("one set", "nt_xent", "sup_con_loss"):
        norms[1] = norms[0]
    q, k = (x * norm for x, norm in zip((q, k), norms))
    wrong = {"a row of zeros": 0.0, "nan": torch.nan, "inf": pick.choice([torch.inf, -torch.inf])}
    if kind in wrong:
        (q if pick.random() < 0.7 else k)[pick.randrange(n), slice(pick.choice([1, d]))] = wrong[kind]
    path = pick.choice(PATHS) if paths.HAS_TRITON else {}
    return impl, loss, kind, path, q.to(DEVICE, dtype), k.to(DEVICE, dtype), 10 ** pick.uniform(-7, 3)


def gradients(f, *inputs):
    """[value, dq, dk, dτ] of the weighted sum of f's entries that have a column, as float64."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    value = f(*inputs)
    weights = torch.linspace(-1, 2, value.numel(), dtype=value.dtype, device=DEVICE) if value.dim() else 1
    found = torch.autograd.grad((value.masked_fill(value.isneginf(), 0) * weights).sum(), inputs)
    return [x.detach().double() for x in (value, *found)]


def to_all_digits(s, axis):
    """logsumexp, whose gradient exp(s − lse) is wrong in float64 too where s + log 2 is rounded to s."""
    top = s.detach().amax(axis, keepdim=True)
    return (s - top).exp().sum(axis).log() + top.squeeze(axis)


def rounded(seed, *tensors):
    """In float64, but for seed 0 with float32's roundings by chance."""
    numbers, by = torch.Generator().manual_seed(seed), min(seed, 1) * torch.finfo(torch.float32).eps
    noise = lambda x: torch.randn(x.shape, generator=numbers, dtype=torch.float64).to(x.device)
    return [x.double() * (1 + by * noise(x)) for x in tensors]


def errors(f, impl, q, k, temperature):
    """Of value, dq, dk, dτ, the largest in units of eager's own, which is exact at times: so that is the
    largest over some orders of the features, over q/τ before and after the product, and of what rounding q
    and k does to float64; and 8 roundings of the terms that cancel. Rows of a gradient count where eager has
    them finite."""
    t = torch.tensor(temperature, dtype=torch.float32, device=DEVICE)
    with mock.patch.object(torch.Tensor, "logsumexp", to_all_digits):
        exact, *eagers = (gradients(lambda *x: f(*x, "eager"), *rounded(seed, q, k), t.double())
                          for seed in range(4))
    ours = gradients(lambda *x: f(*x, impl), q, k, t)
    for seed in range(3):
        order = torch.randperm(q.shape[1], generator=torch.Generator().manual_seed(seed))
        value, dq, dk, dt = gradients(lambda *x: f(*x, "eager"), q[:, order], k[:, order], t)
        eagers.append([value, dq[:, order.argsort()], dk[:, order.argsort()], dt])
    if q.dtype == torch.float32:
        value, dq, dk, _ = gradients(lambda *x: f(*x, "eager"), q / t, k, t / t)
        eagers.append([value, dq / temperature, dk, dt])
    largest = lambda x, among=True: x.abs().where(among & x.isfinite(), 0).amax().item()
    x, y = (z.double().nan_to_num(0, 0, 0).norm(dim=1).amax().item() for z in (q, k))
    one, everyone = (1, len(q)) if exact[0].dim() else (1 / len(q), 1)        # what a row, and all rows count
    found, logit = [], x * y / temperature
    sizes = logit, one * y / temperature, everyone * x / temperature, everyone * logit / temperature
    for a, b, size, *of_eager in zip(ours, exact, sizes, *eagers):
        among = torch.stack([b, *of_eager]).isfinite().all(0)
        kind = q.dtype if found else torch.float32             # the value is float32 for half types
        if b.dim() == 2:
            among &= b.abs() < torch.finfo(q.dtype).max / 2
            among = among.all(1, keepdim=True).expand_as(among)
        unit = max(largest(c - b, among) for c in of_eager)
        unit += 8 * torch.finfo(kind).eps * (largest(b, among) + size) + torch.finfo(q.dtype).tiny
        found.append(float("inf") if (among & ~a.isfinite()).any() else largest(a - b, among) / unit)
    return found


@by_twenty
def test_extremes(seeds, monkeypatch):
    """No error beyond three of eager's own; where eager's gradient of a row is finite, so is ours."""
    for seed in seeds:
        impl, loss, kind, path, q, k, temperature = draw_extreme(seed)
        set_in(monkeypatch, path)
        with named(seed, f"{loss}, {kind}", impl, q, k, temperature):
            found = errors(EXTREME[loss], impl, q, k, temperature)
            assert max(found) <= 3, found
        monkeypatch.undo()


# ── large logits ────────────────────────────────────────────────────────────────────────────────────────────


def relative_errors(loss, impl, q, k, temperature):
    """[of value, dq, dk, dτ], largest entries; q, k float32."""
    t = torch.tensor(temperature, device=DEVICE)
    exact = differentiate(lambda *x: loss(*x, "eager"), q.double(), k.double(), t.double())
    ours = differentiate(lambda *x: loss(*x, impl), q, k, t)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, exact)]


@fused
@pytest.mark.parametrize("loss", ["nt_xent", "clip_loss", "info_nce", "linear", "queue_loss",
                                  "sigmoid_loss", "sup_con_loss", "lse"])
def test_small_temperatures(impl, way, loss, monkeypatch):
    """A weight is as exact as eager's, however large the logits: their roundings are not a whole row's."""
    set_in(monkeypatch, way)
    q, k = rows(30, 24, torch.float32, 70), rows(30, 24, torch.float32, 71)
    for temperature in (1e-4, 1e-7):
        eager, ours = (relative_errors((LOSSES | SUMS)[loss], i, q, k, temperature) for i in ("eager", impl))
        for a, b in zip(ours[:3], eager):
            assert a <= 3 * b + 5e-6, temperature


@pytest.mark.parametrize("impl, way, norm", [
    (impl, way, norm) for impl, way in WAYS for norm in (3e4, 1e10, 1e13) if impl != "triton" or norm == 3e4])
def test_large_logits(impl, way, norm, monkeypatch):
    """Beyond 1e20 in blockwise. A GPU's fused multiply-add keeps what a logit's rounding loses, and exp2 of
    that overflows for logits above 2e9; so does the interpreter's since Triton 3.9."""
    set_in(monkeypatch, way)
    q, k = (norm * rows(20, 8, torch.float32, seed) for seed in (72, 73))
    for loss in ("nt_xent", "clip_loss", "info_nce", "sigmoid_loss", "lse"):
        assert max(relative_errors((LOSSES | SUMS)[loss], impl, q, k, 1.0)[:3]) < 1e-5


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

OF_ROWS = {name: EXTREME[name] for name in ("lse", "fixed keys", "info_nce", "linear", "sigmoid_loss")} | {
    "normalize": lambda q, k, t, impl: similarity_lse(3 * q, 2 * k, t, normalize=True, impl=impl),
    "queue_loss": lambda q, k, t, impl: queue_loss(q, k, k.detach().flip(0), t, impl=impl)}


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
        total = OF_ROWS[loss](*x, 0.2, impl).sum()
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
