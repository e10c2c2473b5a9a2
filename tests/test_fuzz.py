"""Random shapes, dtypes, rules, strides and temperatures against float64 eager: a slice in CI, all of it by hand.

    python -m pytest -q tests/test_fuzz.py                        100 cases
    TENCL_FUZZ=2000 python -m pytest -q tests/test_fuzz.py        2,000 cases
"""
import os
import random

import pytest
import torch

from kernels import clip_loss, info_nce, linear_cross_entropy, nt_xent, paths, queue_loss, similarity_lse, similarity_topk
from test_kernels import DEVICE, GPU, compare

if paths.HAS_TRITON:
    from kernels import launch, lse_forward

CASES = int(os.environ.get("TENCL_FUZZ", 100))
DTYPES = {"blockwise": [torch.float64, torch.float32, torch.float16, torch.bfloat16],
          "triton": [torch.float32, torch.float16] + [torch.bfloat16] * GPU}


def draw(seed):
    """(implementation, q, k, temperature, rule) of a case; everything depends on the seed alone."""
    pick, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    impl = pick.choice(list(DTYPES))
    dtype = pick.choice(DTYPES[impl])
    n, m = (pick.choice([1, 2, pick.randint(1, 40), pick.randint(1, 300)]) for _ in range(2))
    d = pick.choice([1, 16, 64, pick.randint(1, 200)])

    def rows(count):
        x = torch.nn.functional.normalize(torch.randn(count, d, generator=numbers, dtype=torch.float64), dim=1)
        x = x.to(DEVICE, dtype)
        layout = pick.randrange(4)
        if layout == 1:                                                    # by columns
            return x.T.contiguous().T
        if layout == 2:                                                    # part of wider rows, not aligned
            return torch.cat([torch.zeros_like(x[:, :1]), x], 1)[:, 1:]
        if layout == 3:                                                    # every second row
            return torch.stack([x, x], 1).flatten(0, 1)[::2]
        return x

    def ids():
        kind, top = pick.choice([torch.int64, torch.int32, torch.int16]), pick.choice([1, 2, 10, 1000])
        made = [torch.randint(-top, top, (count,), generator=numbers).to(DEVICE, kind) for count in (n, m)]
        return tuple(x.sort()[0] for x in made) if pick.random() < 0.5 else tuple(made)

    q, k = rows(n), rows(m)
    rule = {"exclude": pick.choice([None, "diagonal", ids()]), "within": pick.choice([None, None, ids()])}
    if pick.random() < 0.3:                                                # whole numbers: exact in every dtype
        width = pick.randint(1, 50)
        features = [torch.randint(-2, 3, (count, width), generator=numbers).to(DEVICE, torch.float32) for count in (n, m)]
        rule["similar"] = (*features, pick.choice([0.0, 3.0, -100.0]))
    if rule["exclude"] == "diagonal":
        rule["offset"] = pick.randint(-5, m)
    return impl, q, k, 10 ** pick.uniform(-2, 0.5), rule


@pytest.mark.parametrize("first", range(0, CASES, 25))
def test_lse(first):
    for seed in range(first, min(first + 25, CASES)):
        impl, q, k, temperature, rule = draw(seed)
        try:
            compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **rule), q.dtype, q, k, temperature, impl, units=64)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {impl}, {q.dtype}, {tuple(q.shape)} × {tuple(k.shape)}, τ {temperature:.3g}, "
                                 f"{ {name: type(x).__name__ for name, x in rule.items()} }: {error}") from error


@pytest.mark.parametrize("first", range(0, CASES, 25))
def test_losses(first, monkeypatch):
    """The mean losses on the same rows, narrow and wide, in blocks of random sizes."""
    for seed in range(first, min(first + 25, CASES)):
        impl, q, k, temperature, _ = draw(seed)
        pick = random.Random(seed)
        temperature, n, m = max(temperature, 0.02), len(q), len(k)
        if pick.random() < 0.5:
            monkeypatch.setattr(paths, "FEW", 0), monkeypatch.setattr(paths, "WIDEST", pick.choice([0, 64, 256]))
            monkeypatch.setattr(lse_forward, "block_shape", lambda q, k, square, side=pick.choice([128, 256, 2 ** 14]): (side, side))
            monkeypatch.setattr(launch, "FEW", pick.choice([0, 1024]))
        offset = pick.randint(0, m - n) if n <= m else 0
        targets = torch.randint(m, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        half, few = n // 2 or 1, min(n, m)
        name, loss = pick.choice([
            ("info_nce", lambda q, k, t, impl: info_nce(q[:few], k, t, offset=offset, impl=impl)),
            ("clip_loss", lambda q, k, t, impl: clip_loss(q[:few], k[:few], t, impl=impl)),
            ("nt_xent", lambda q, k, t, impl: nt_xent(q[:half], q[-half:], t, impl=impl) + 0 * k.sum()),
            ("queue_loss", lambda q, k, t, impl: queue_loss(q[:few], k[:few], k.detach(), t, impl=impl)),
            ("linear_cross_entropy", lambda q, k, t, impl: linear_cross_entropy(q, k, targets, temperature=t, impl=impl))])
        try:
            compare(loss, q.dtype, q, k, temperature, impl, units=64, floor=1 / temperature / n)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {name}, {impl}, {q.dtype}, {tuple(q.shape)} × {tuple(k.shape)}, τ {temperature:.3g}: "
                                 f"{error}") from error
        monkeypatch.undo()


@pytest.mark.parametrize("first", range(0, CASES, 25))
def test_topk(first):
    """The products of the found columns are the n largest of float64 eager, up to the rounding of one product."""
    for seed in range(first, min(first + 25, CASES)):
        impl, q, k, _, rule = draw(seed)
        n = random.Random(seed).randint(1, min(20, len(k)))
        values, columns = similarity_topk(q, k, n, impl=impl, **rule)
        exact, wanted = similarity_topk(q.double(), k.double(), n, impl="eager", **rule)
        assert torch.equal(columns == -1, wanted == -1) and torch.equal(columns == -1, values.isneginf()), f"seed {seed}"
        found = (q.double() @ k.double().T).gather(1, columns.clamp(min=0)).where(columns >= 0, -torch.inf)
        for x in (values.double(), found):
            torch.testing.assert_close(x, exact, rtol=1e-5, atol=1e-5, msg=f"seed {seed}: {impl}, {q.dtype}")
        assert all(len(row.unique()) == len(row) for row in (row[row >= 0] for row in columns)), f"seed {seed}: a column twice"
