"""Random shapes, dtypes, rules, strides and temperatures against float64 eager: a slice in CI, all by hand.

    python -m pytest -q tests/test_fuzz.py                        40 cases
    TENCL_FUZZ=2000 python -m pytest -q tests/test_fuzz.py        2,000 cases
"""
import contextlib
import os
import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_kernels import DEVICE, GPU, compare, set_in

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
by_twenty = pytest.mark.parametrize("seeds", [range(i, min(i + 20, CASES)) for i in range(0, CASES, 20)])


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


# ── extremes ────────────────────────────────────────────────────────────────────────────────────────────────

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
BLOCKS = {"gpu.lse_forward.sums_block": lambda q, k, square: (128, 128),
          "gpu.gradient_blocks.weight_block": lambda q, k, square: (128, 128),
          "gpu.one_pass.strip_height": lambda q, k: 128,
          "blockwise.SMALL": 0, "blockwise.STRIP_LOGITS": 1}
PATHS = [{}, MANY, MANY | {"paths.WIDEST": 0}, MANY | {"paths.WIDEST": 0} | BLOCKS,
         MANY | {"operations.in_one_pass": lambda *x: False},
         {"gpu.launch.is_number": lambda temperature, x: True}]


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
