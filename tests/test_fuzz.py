"""Random shapes, dtypes, rules, strides and temperatures against float64 eager: a slice in CI, all by hand.

    python -m pytest -q tests/test_fuzz.py                        40 cases
    TENCL_FUZZ=2000 python -m pytest -q tests/test_fuzz.py        2,000 cases
"""
import contextlib
import os
import random

import pytest
import torch
import torch.nn.functional as F

from kernels import clip_loss, info_nce, linear_cross_entropy, nt_xent, paths, queue_loss
from kernels.similarity import similarity_lse, similarity_topk
from test_kernels import DEVICE, GPU, compare, set_in

CASES = int(os.environ.get("TENCL_FUZZ", 40))
DTYPES = {"blockwise": [torch.float64, torch.float32, torch.float16, torch.bfloat16],
          "triton": [torch.float32, torch.float16] + [torch.bfloat16] * GPU}
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
            set_in(monkeypatch, {"paths.FEW": 0, "reference.FEW": 0, "launch.FEW": 0})
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
                "paths.FEW": 0, "paths.WIDEST": pick.choice([0, 64, 256]), "reference.FEW": few,
                "lse_forward.block_shape": lambda q, k, square, side=side: (side, side)})
        offset = pick.randint(0, m - n) if n <= m else 0
        targets = torch.randint(m, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        half, few = n // 2 or 1, min(n, m)
        losses = {
            "info_nce": lambda q, k, t, impl: info_nce(q[:few], k, t, offset=offset, impl=impl),
            "clip_loss": lambda q, k, t, impl: clip_loss(q[:few], k[:few], t, impl=impl),
            "nt_xent": lambda q, k, t, impl: nt_xent(q[:half], q[-half:], t, impl=impl) + 0 * k.sum(),
            "queue_loss": lambda q, k, t, impl: queue_loss(q[:few], k[:few], k.detach(), t, impl=impl),
            "linear": lambda q, k, t, impl: linear_cross_entropy(q, k, targets, temperature=t, impl=impl)}
        loss = pick.choice(list(losses))
        with named(seed, loss, impl, q, k, temperature):
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
