"""Compare random shapes, strides, masks, temperatures, dtypes and code paths with eager in float64.

The environment variable TENCL_FUZZ sets the number of random cases. Run more of them by hand:

    python -m pytest -q tests/kernels/test_fuzz.py                        60 cases
    TENCL_FUZZ=2000 python -m pytest -q tests/kernels/test_fuzz.py        2,000 cases
"""
import os
import random

import pytest
import torch
import torch.nn.functional as F
from comparing import DEVICE, LOSSES, TRITON, compare, patch_kernels

from kernels import similarity_lse, similarity_topk
from kernels.call import HAS_TRITON

CASES = int(os.environ.get("TENCL_FUZZ", 60))
DTYPES = {"blockwise": [torch.float64, torch.float32, torch.float16, torch.bfloat16],
          **({"triton": TRITON} if HAS_TRITON else {})}
SMALLEST = [(1, 1, 1), (1, 7, 3), (6, 1, 8), (2, 2, 1)]        # N, M, D of the first cases


def draw_rows(count, d, dtype, pick, numbers):
    """Return random unit rows (count, d) in a random memory layout."""
    x = torch.randn(count, d, generator=numbers, dtype=torch.float64)
    x = F.normalize(x, dim=1).to(DEVICE, dtype)
    layout = pick.choice(["plain", "by columns", "unaligned", "every second row"])
    if layout == "by columns":
        return x.T.contiguous().T
    if layout == "unaligned":                                  # a slice of longer rows
        return torch.cat([torch.zeros_like(x[:, :1]), x], 1)[:, 1:]
    return torch.stack([x, x], 1).flatten(0, 1)[::2] if layout == "every second row" else x


def draw_mask(n, m, pick, numbers):
    """Return random mask arguments of similarity_lse."""
    def ids():
        dtype, end = pick.choice([torch.int64, torch.int32, torch.int16]), pick.choice([1, 2, 10, 1000])
        pair = [torch.randint(-end, end, (count,), generator=numbers).to(DEVICE, dtype) for count in (n, m)]
        return tuple(x.sort()[0] for x in pair) if pick.random() < 0.5 else tuple(pair)

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
    return mask


def draw(seed):
    """Return (implementation, q, k, temperature, mask arguments) of the random case with this seed."""
    pick, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    impl = pick.choice(list(DTYPES))
    dtype = pick.choice(DTYPES[impl])
    n, m = (pick.choice([2, pick.randint(1, 40), pick.randint(1, 300)]) for _ in range(2))
    d = pick.choice([1, 16, 64, pick.randint(1, 200)])
    n, m, d = SMALLEST[seed] if seed < len(SMALLEST) else (n, m, d)
    q, k = (draw_rows(count, d, dtype, pick, numbers) for count in (n, m))
    return impl, q, k, 10 ** pick.uniform(-2, 0.5), draw_mask(n, m, pick, numbers)


def draw_settings(pick):
    """Return random settings that select the code paths of Triton and blockwise, as for patch_kernels."""
    if not HAS_TRITON or pick.random() < 0.3:
        return {}
    size = pick.choice([128, 256, 2 ** 14])
    return {"gpu.heuristics.SHIFT_LOGITS": pick.choice([0, 2 ** 26]),
            "gpu.launch.MAX_POINTER_WORK": pick.choice([0, 2 ** 33]),
            "gpu.launch.EMULATED_MULTIPROCESSORS": pick.choice([1, 132]),
            "gpu.lse_forward.table_block_shape": lambda q, k, square: (size, size),
            "blockwise.ONE_STRIP": 0, "blockwise.MIN_STRIP_ROWS": pick.choice([3, 32]),
            "gpu.heuristics.MAX_SMALL_D": pick.choice([0, 64, 256])}


@pytest.mark.parametrize("seed", range(CASES))
def test_random_case(seed, monkeypatch):
    """Check similarity_lse, similarity_topk and, if both sides have enough rows, a random loss."""
    impl, q, k, temperature, mask = draw(seed)
    pick, both = random.Random(seed), min(len(q), len(k)) // 2 * 2
    patch_kernels(monkeypatch, draw_settings(pick))
    lse = lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **mask)
    compare(lse, q, k, temperature, impl, units=64)
    check_topk(impl, q, k, mask, pick.randint(1, min(20, len(k))))
    if both >= 8:                                              # a loss that leaves out rows needs enough rows
        name, temperature = pick.choice(list(LOSSES)), max(temperature, 0.02)
        options = {} if name in ("linear", "ignoring") else {"normalize": pick.random() < 0.3}
        loss = lambda q, k, t, impl: LOSSES[name](q, k, t, impl, **options)
        compare(loss, q[:both], k[:both], temperature, impl, units=64, floor=1 / temperature / both)


def check_topk(impl, q, k, mask, n):
    """Check that the returned columns have the n largest products, as in float64 eager, up to rounding."""
    values, columns = similarity_topk(q, k, n, impl=impl, **mask)
    exact, expected = similarity_topk(q.double(), k.double(), n, impl="eager", **mask)
    found = (q.double() @ k.double().T).gather(1, columns.clamp(min=0)).where(columns >= 0, -torch.inf)
    assert torch.equal(columns == -1, expected == -1)
    assert torch.equal(columns == -1, values.isneginf())
    for x in (values.double(), found):
        torch.testing.assert_close(x, exact, rtol=1e-5, atol=1e-5)
    assert all(len(row.unique()) == len(row) for row in (row[row >= 0] for row in columns))
