"""Every implementation against float64 eager: odd shapes, strides, rules, dtypes, repeat to the bit; PyTorch's own checks.

Tolerances calibrate themselves: an implementation may err three times as much as eager does in the same dtype, plus a few
units of rounding where eager happens to be exact. Triton runs on the GPU where there is one, else in its interpreter,
whose bfloat16 products are wrong: there that dtype waits for a GPU.
"""
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import (benchmark, blockwise, clip_loss, info_nce, linear_cross_entropy, nt_xent, paths, queue_loss, similarity_lse,
                     similarity_topk)
from kernels.rules import Rule, make_rule

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = [(1, 1, 1), (1, 7, 3), (6, 1, 8), (37, 53, 20), (130, 259, 72)]
RULES = ["all", "diagonal", "shifted", "ids", "within", "ids within", "similar", "diagonal similar within"]
TRITON = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
HALF = (torch.float16, torch.bfloat16)


def rule(name, n, m):
    """Keyword arguments of similarity_lse for a rule, with repeated, missing and negative ids."""
    rows, columns = torch.arange(n, device=DEVICE), torch.arange(m, device=DEVICE)
    # features of whole numbers have exact products in every dtype, also on the threshold
    similar = (((rows[:, None] * 5 + torch.arange(20, device=DEVICE)) % 7 - 3).float(),
               ((columns[:, None] * 3 + torch.arange(20, device=DEVICE)) % 5 - 2).half().float(), 2.0)
    return {"all": {}, "diagonal": dict(exclude="diagonal"), "shifted": dict(exclude="diagonal", offset=2),
            "ids": dict(exclude=(rows % 5 - 2, (columns * 7) % 9 - 2)), "within": dict(within=(rows // 4, columns // 6)),
            "similar": dict(similar=similar), "diagonal similar within": dict(
                exclude="diagonal", similar=(similar[0].half(), similar[1].half(), 5.0), within=(rows // 9, columns // 9)),
            "ids within": dict(exclude=(rows.int() % 3, columns.int() % 3), within=(rows % 4, columns % 7))}[name]


def rows(n, d, dtype, seed, strided=False):
    """Unit rows; strided: every second row of a larger matrix laid out by columns."""
    x = torch.randn(d, 2 * n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).T[::2]
    x = torch.nn.functional.normalize(x, dim=1).to(DEVICE, dtype)
    return x if strided else x.contiguous()


def differentiate(f, *inputs):
    """[value, gradients...] of the weighted sum of f's finite entries, as float64."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = f(*inputs)
    finite = value.where(value.isfinite(), torch.zeros_like(value))
    weights = torch.linspace(-1, 2, max(value.numel(), 1), dtype=value.dtype, device=value.device).view_as(value)
    return [value.detach().double()] + [g.double() for g in torch.autograd.grad((finite * weights).sum(), inputs)]


def assert_close(ours, exact, eager, dtype, steepness, units, floor=0.0):
    """Each of ours as close to exact as three times eager's own error, plus a few units of rounding of the largest entry.

    The exponential multiplies the rounding of a logit, done in float32, by the logit: steepness is the largest one, 1/τ.
    floor is the size of what cancels where a gradient vanishes.
    """
    unit = units * (torch.finfo(dtype).eps + steepness * torch.finfo(ours[0].dtype if dtype == torch.float64 else torch.float32).eps)
    for name, a, b, c in zip(("value", "dq", "dk", "dtemperature"), ours, exact, eager):
        assert torch.equal(a.isneginf(), b.isneginf()) and not a.isnan().any(), f"{name}: not finite where it should be"
        a, b, c = (x.nan_to_num(neginf=0.0) for x in (a, b, c))
        scale = exact[1].abs().sum().clamp(min=floor * len(exact[1])) * steepness if name == "dtemperature" else b.abs().max().clamp(min=floor)   # a sum that may cancel
        error, allowed = (a - b).abs().max().item(), (3 * (c - b).abs().max() + unit * scale).item()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def compare(f, dtype, q, k, temperature=0.07, impl="triton", units=16, floor=0.0):
    """f(q, k, temperature, impl) against itself in float64 eager, from the same rounded rows."""
    t = torch.tensor(temperature, dtype=torch.float32, device=DEVICE)
    exact = differentiate(lambda *x: f(*x, "eager"), q.double(), k.double(), t.double())
    eager = differentiate(lambda *x: f(*x, "eager"), q, k, t.double() if dtype == torch.float64 else t)
    ours = differentiate(lambda *x: f(*x, impl), q, k, t.double() if dtype == torch.float64 else t)
    assert_close(ours, exact, eager, dtype, 1 / temperature, units, floor)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl, dtype", [("blockwise", torch.float64), ("blockwise", torch.float32),
                                         ("blockwise", torch.bfloat16)] + [("triton", x) for x in TRITON], ids=str)
def test_rules_and_shapes(impl, dtype, shape, name):
    n, m, d = shape
    q, k = rows(n, d, dtype, 0), rows(m, d, dtype, 1)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **rule(name, n, m)), dtype, q, k, impl=impl)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (6, 1, 8), (37, 53, 20), (10, 700, 130), (5, 40, 300)], ids=str)
@pytest.mark.parametrize("impl, dtype", [("blockwise", torch.float64), ("blockwise", torch.float32)] + [("triton", x) for x in TRITON], ids=str)
def test_keys_without_gradient(impl, dtype, shape, name):
    n, m, d = shape
    q, k = rows(n, d, dtype, 40), rows(m, d, dtype, 41)
    compare(lambda q, k, t, impl: similarity_lse(q, k.detach(), t, impl=impl, **rule(name, n, m)) + 0 * k.sum(), dtype, q, k, impl=impl)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("exclude", [None, "diagonal", "pair"])
def test_one_set(impl, exclude):
    q = rows(70, 24, torch.float32, 2)
    compare(lambda q, k, t, impl: similarity_lse(q, None, t, exclude=exclude, impl=impl) + 0 * k.sum(), q.dtype, q, q, impl=impl)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("dtype", TRITON, ids=str)
def test_strides(impl, dtype):
    q, k = rows(40, 20, dtype, 3, strided=True), rows(50, 20, dtype, 4, strided=True)
    assert not q.is_contiguous()
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, exclude="diagonal", impl=impl), dtype, q, k, impl=impl)
    expanded = rows(1, 20, dtype, 5).expand(50, 20)                                # a row stride of zero
    ours, exact = (similarity_lse(q, expanded, 0.1, impl=i) for i in (impl, "eager"))
    torch.testing.assert_close(ours, exact, atol=2e-2 if dtype in HALF else 1e-5, rtol=1e-3 if dtype in HALF else 1e-5)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("d", [16, 64, 257, 1024, 4096])
def test_every_width(impl, d):
    q, k = rows(9, d, torch.float32, 6), rows(11, d, torch.float32, 7)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, exclude="diagonal", impl=impl), q.dtype, q, k, impl=impl)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("temperature, norm, sign", [(0.005, 1, 1), (0.005, 1, -1), (0.01, 1, -1), (1.0, 1e3, 1), (100.0, 1, 1)])
def test_extreme_logits(impl, temperature, norm, sign):
    """Cosines down to −1, logits up to ±10⁶: no overflow, no underflow to −inf, exact to rounding of the logits."""
    q = rows(20, 32, torch.float32, 8) * norm
    k = sign * q.roll(1, 0)
    value, dq, _, _ = differentiate(lambda q, k, t: similarity_lse(q, k, t, impl=impl), q, k,
                                    torch.tensor(temperature, device=DEVICE))
    exact = differentiate(lambda q, k, t: similarity_lse(q, k, t, impl="eager"), q.double(), k.double(),
                          torch.tensor(temperature, device=DEVICE, dtype=torch.float64))
    assert value.isfinite().all() and dq.isfinite().all()
    torch.testing.assert_close(value, exact[0], rtol=1e-5, atol=1e-5 * norm ** 2 / temperature)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_row_without_columns(impl):
    q = rows(5, 8, torch.float32, 9).requires_grad_()
    ids = torch.tensor([0, 0, 1, 0, 0], device=DEVICE)
    lse = similarity_lse(q, q.detach(), 0.1, exclude=(ids, torch.ones(5, dtype=torch.long, device=DEVICE)), impl=impl)
    assert lse[2] == -torch.inf and lse[[0, 1, 3, 4]].isfinite().all()
    lse.sum().backward()
    assert torch.equal(q.grad[2], torch.zeros_like(q.grad[2])) and q.grad[0].abs().sum() > 0 and not q.grad.isnan().any()


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_same_input_same_bits(impl):
    q, k = rows(200, 40, torch.float32, 10), rows(300, 40, torch.float32, 11)
    one, two = (differentiate(lambda q, k, t: similarity_lse(q, k, t, exclude="diagonal", impl=impl), q, k,
                              torch.tensor(0.05, device=DEVICE)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("name", RULES)
def test_many_strips(name, monkeypatch):
    """Blockwise with strips of 3 rows instead of all rows at once, the last one short."""
    monkeypatch.setattr(blockwise, "ROWS", 3), monkeypatch.setattr(blockwise, "STRIP", 1), monkeypatch.setattr(blockwise, "SMALL", 0)
    q, k = rows(37, 12, torch.float64, 12), rows(53, 12, torch.float64, 13)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **rule(name, 37, 53)), q.dtype, q, k, impl="blockwise")
    compare(lambda q, k, t, impl: info_nce(q, k, t, offset=3, impl=impl), q.dtype, q, k, impl="blockwise")
    for loss in ("info_nce, symmetric", "nt_xent", "linear_cross_entropy"):
        compare(LOSSES[loss], q.dtype, q, k[:37], impl="blockwise", units=32)


@pytest.mark.parametrize("n, m, size", [(1, 1, 4), (2 ** 20, 2 ** 20, 2), (2 ** 17, 300, 4), (64, 2 ** 22, 2), (1, 2 ** 24, 2), (8192, 8192, 2)])
def test_blocks_fit_their_buffers(n, m, size):
    from kernels import gradient_blocks, lse_forward
    q, k = (torch.empty(rows, 1, dtype=torch.float32 if size == 4 else torch.float16) for rows in (n, m))
    for square in (False, True):
        height, width = gradient_blocks.block_shape(q, q if square else k, square)
        assert 1 <= height <= n and 1 <= width <= max(n, m) and height * width * size <= paths.BUFFER
        assert square or height * width == n * m or height * width * size > paths.BUFFER // 4 or width == 2 ** 22
        assert width <= 128 * 65_535
    assert paths.strip_height(q, k) * m * size <= paths.BUFFER
    for d in (1, 768, 4096):
        for square in (False, True):
            height, width = lse_forward.block_shape(torch.empty(1, d), k, square)
            assert height % 128 == width % 128 == 0 and height * width // 64 <= lse_forward.PARTS


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns, views aside."""
    entries = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.numel())
        return out


def test_blockwise_never_holds_the_matrix():
    n, d = 5000, 8
    q = rows(n, d, torch.float32, 16)
    ids = torch.arange(n, device=DEVICE) // 3
    for exclude in ("diagonal", (ids, ids)):
        selected = make_rule(q, q, False, exclude)
        t = torch.tensor(0.1, device=DEVICE)
        with Largest() as seen:
            lse = blockwise.similarity_lse(q, q, t, selected)
            blockwise.similarity_lse_backward(q, q, t, selected, torch.ones_like(lse), lse, True, True, True)
            if exclude == "diagonal":
                for k, both in ((q, False), (q, True), (None, False)):
                    blockwise.softmax_loss(q, k, t, selected, None, both, True, True, True)
        assert seen.entries <= blockwise.STRIP < n * n


LOSSES = {
    "info_nce": lambda q, k, t, impl: info_nce(q, k, t, impl=impl),
    "info_nce, offset": lambda q, k, t, impl: info_nce(q[:30], k, t, offset=5, impl=impl),
    "info_nce, symmetric": lambda q, k, t, impl: info_nce(q, k, t, symmetric=True, impl=impl),
    "clip_loss": lambda q, k, t, impl: clip_loss(q, k, t, impl=impl),
    "nt_xent": lambda q, k, t, impl: nt_xent(q, k, t, impl=impl),
    "queue_loss": lambda q, k, t, impl: queue_loss(q, k, k.detach().roll(3, 0)[:31].flip(1), t, impl=impl),
    "linear_cross_entropy": lambda q, k, t, impl: linear_cross_entropy(
        q, k, torch.arange(37, device=DEVICE) * 3 % 37, temperature=t, impl=impl),
    "linear_cross_entropy, ignored": lambda q, k, t, impl: linear_cross_entropy(
        q, k[:20], (torch.arange(37, device=DEVICE) % 20).masked_fill(torch.arange(37, device=DEVICE) % 4 == 0, -1), -1,
        temperature=t, impl=impl)}


def pairs(n, d, dtype):
    q = rows(n, d, dtype, 17)
    return q, torch.nn.functional.normalize(q.double() + 0.3 * rows(n, d, torch.float64, 18), dim=1).to(dtype)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("impl, dtype", [("blockwise", torch.float64), ("blockwise", torch.float32)]
                         + [("triton", x) for x in TRITON], ids=str)
def test_losses(loss, impl, dtype):
    compare(LOSSES[loss], dtype, *pairs(37, 24, dtype), impl=impl, units=32)


WIDE = dict(paths__WIDEST=0, paths__FEW=0)
WAYS = {                                               # each way through the kernels that a shape or a chip may choose
    "sums that need no maximum": dict(launch__FEW=0),
    "pointers": dict(launch__PLAYED=8),
    "pointers, wide": dict(launch__PLAYED=8, **WIDE),
    "tiles of a B200": dict(launch__PLAYED=10, launch__FEW=0),
    "temperature as a number": dict(launch__is_number=lambda temperature, x: True),
    "many blocks": dict(lse_forward__block_shape=lambda q, k, square: (128, 128)),
    "one pass": WIDE,
    "one pass, many strips": dict(one_pass__strip_height=lambda q, k: 128, **WIDE),
    "two passes": dict(operations__in_one_pass=lambda *x: False, launch__FEW=0, **WIDE),
    "two passes, many blocks": dict(operations__in_one_pass=lambda *x: False, lse_forward__block_shape=lambda q, k, square: (128, 128),
                                    gradient_blocks__block_shape=lambda q, k, square: (80, 80) if square else (48, 80), **WIDE)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", TRITON, ids=str)
def test_every_way_through_the_kernels(loss, way, dtype, monkeypatch):
    from kernels import gradient_blocks, launch, lse_forward, one_pass, operations
    modules = dict(gradient_blocks=gradient_blocks, lse_forward=lse_forward, one_pass=one_pass, operations=operations, paths=paths, launch=launch)
    for name, value in WAYS[way].items():
        module, name = name.split("__")
        monkeypatch.setattr(modules[module], name, value)
    n = 37 if "ignored" in loss else 150
    q, k = pairs(n, 24, dtype)
    compare(LOSSES[loss] if n == 37 else lambda q, k, t, impl: LARGE.get(loss, LOSSES[loss])(q, k, t, impl), dtype, q, k)
    if loss == "info_nce":
        compare(lambda q, k, t, impl: similarity_lse(q, k, t, exclude="diagonal", offset=7, impl=impl), dtype, q, k)
        compare(lambda q, k, t, impl: similarity_lse(q, None, t, exclude="diagonal", impl=impl) + 0 * k.sum(), dtype, q, k)


@pytest.mark.parametrize("dtype", TRITON, ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "nt_xent"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("temperature", [0.02, 0.01, 0.003])
def test_sums_beyond_the_range_of_float32_have_a_maximum(temperature, wide, loss, dtype, monkeypatch):
    """At 0.01 exp2(s) of unit rows overflows, at 0.003 it vanishes too: the way without a maximum must not be taken."""
    from kernels import launch
    monkeypatch.setattr(launch, "FEW", 0)
    if wide:
        monkeypatch.setattr(paths, "FEW", 0), monkeypatch.setattr(paths, "WIDEST", 0)
    q, k = pairs(40, 24, dtype)
    compare(LOSSES[loss], dtype, q, torch.where(torch.arange(40, device=DEVICE)[:, None] % 3 == 0, -q, k), temperature, units=64)


LARGE = {"linear_cross_entropy": lambda q, k, t, impl: linear_cross_entropy(
    q, k, torch.arange(150, device=DEVICE) * 3 % 150, temperature=t, impl=impl)}


@pytest.mark.parametrize("keys", ["with gradient", "without"])
@pytest.mark.parametrize("order", ["sorted", "only columns sorted", "not sorted"])
@pytest.mark.parametrize("dtype", TRITON, ids=str)
def test_groups_by_ranges(dtype, order, keys, monkeypatch):
    """Sorted column groups let a program skip the columns of other groups; the result must not know."""
    from kernels import launch
    monkeypatch.setattr(launch, "FEW", 0)
    q, k = rows(300, 24, dtype, 47), rows(400, 24, dtype, 48)
    groups = [torch.randint(0, 20, (n,), generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (300, 400)]
    if order == "sorted":                                                  # groups that end one column into a tile
        groups = [(torch.arange(300, device=DEVICE) - 78).clamp(min=0) // 50, torch.arange(400, device=DEVICE) // 65]
    groups = [x.sort()[0] if order == "sorted" or order.startswith("only") and len(x) == 400 else x for x in groups]
    groups[0][:64] = 30                                                    # rows that have no column: a whole tile of none
    groups[1] = groups[1].int()
    found = launch.ranges(make_rule(q, k, False, within=groups), dict(BLOCK_N=64))
    assert found.shape == (5, 2)
    seen = (found[:, 1] - found[:, 0]).clamp(min=0)
    assert (seen == 400).all() if order == "not sorted" else (seen < 400).any() if order == "sorted" else seen[0] < 400
    f = lambda q, k, t, impl: similarity_lse(q, k.detach() if keys == "without" else k, t, within=groups, impl=impl) + 0 * k.sum()
    compare(f, dtype, q, k)


@pytest.mark.parametrize("keys", ["with gradient", "without"])
@pytest.mark.parametrize("order", ["sorted", "only columns sorted", "only rows sorted"])
def test_sorted_groups_cost_the_pairs_that_they_keep(order, keys, monkeypatch):
    """Blockwise: groups of 1 to 90 rows, some without columns, some columns without rows; the result must not know."""
    monkeypatch.setattr(blockwise, "SMALL", 0), monkeypatch.setattr(blockwise, "STRIP", 32 * 150)
    draw = torch.Generator().manual_seed(7)
    sizes, widths = torch.randint(1, 30, (40,), generator=draw), torch.randint(0, 60, (40,), generator=draw)
    sizes[[3, 20]], widths[[0, 3, 12, 39]] = 90, torch.tensor([0, 160, 0, 0])    # 90 rows of 160 columns are three strips
    groups = [torch.arange(40).repeat_interleave(counts) - 7 for counts in (sizes, widths)]
    shuffled = {"only columns sorted": 0, "only rows sorted": 1}.get(order)
    if shuffled is not None:
        groups[shuffled] = groups[shuffled][torch.randperm(len(groups[shuffled]), generator=draw)]
    groups = [groups[0].int().to(DEVICE), groups[1].to(DEVICE)]
    n, m = map(len, groups)
    q, k = rows(n, 12, torch.float64, 49), rows(m, 12, torch.float64, 50)
    f = lambda q, k, t, impl: similarity_lse(q, k.detach() if keys == "without" else k, t, within=groups, impl=impl) + 0 * k.sum()
    compare(f, q.dtype, q, k, impl="blockwise")
    values, columns = similarity_topk(q, k, 5, within=groups, impl="blockwise")
    wanted = similarity_topk(q, k, 5, within=groups, impl="eager")
    torch.testing.assert_close(values, wanted[0], atol=1e-12, rtol=0)
    assert torch.equal(columns, wanted[1]) and (columns[:, 4] == -1).any()
    computed = [s.shape for _, _, s in blockwise.strips(q, k, torch.tensor(1.0), make_rule(q, k, False, within=groups))]
    kept, total = (sizes * widths).sum(), sum(height * width for height, width in computed)
    assert sum(height for height, _ in computed) == n
    assert all(height * width <= max(blockwise.STRIP, 32 * width) for height, width in computed)
    assert kept <= total < 2.5 * kept if order == "sorted" and not GPU else total == n * m


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("dtype", TRITON, ids=str)
def test_gradient_survives_success(impl, dtype):
    """Mean loss about 5e-3: the coefficient of a positive is 1 − 0.995, which eager rounds away and a kept-out one is not."""
    q = rows(256, 64, torch.float64, 19)
    k = torch.nn.functional.normalize(q + 0.5 * rows(256, 64, torch.float64, 20), dim=1).to(dtype)
    q = q.to(dtype)
    f = lambda impl: lambda q, k: 1000 * info_nce(q, k, 0.07, impl=impl)      # scaled, or float16 has no such small gradient
    exact, ours, eager = (differentiate(f(impl), *x) for impl, x in (("eager", (q.double(), k.double())), (impl, (q, k)),
                                                                     ("eager", (q, k))))
    assert 1 < exact[0] < 10
    error, eager = (((x[1] - exact[1]).norm() / exact[1].norm()).item() for x in (ours, eager))
    assert error < {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype] and error < eager / 4


def test_all_targets_ignored_and_one_class():
    h, w = rows(4, 8, torch.float32, 21), rows(6, 8, torch.float32, 22)
    for impl in ("eager", "blockwise", "triton"):
        x = h.clone().requires_grad_()
        loss = linear_cross_entropy(x, w, torch.full((4,), -100, device=DEVICE), impl=impl)
        loss.backward()
        assert loss == 0 and torch.equal(x.grad, torch.zeros_like(x))
        assert linear_cross_entropy(h, w[:1], torch.zeros(4, dtype=torch.long, device=DEVICE), impl=impl) == 0


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_repeated_targets_of_half_rows(impl):
    """A frequent word's gradient is a sum of thousands of rows: in float16 steps it would stand still."""
    h, w = rows(4000, 16, torch.float16, 45), rows(40, 16, torch.float16, 46)
    targets = torch.zeros(4000, dtype=torch.long, device=DEVICE)
    f = lambda impl: lambda h, w: 1000 * linear_cross_entropy(h, w, targets, temperature=0.2, impl=impl)
    exact, ours = differentiate(f("eager"), h.double(), w.double())[2], differentiate(f(impl), h, w)[2]
    assert (ours - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("name", RULES)
def test_opcheck(impl, name):
    q, k = (rows(n, 5, torch.float32, 23).requires_grad_() for n in (6, 9))
    t = torch.tensor(0.3, device=DEVICE, requires_grad=True)
    selected = make_rule(q, k, False, **rule(name, 6, 9))
    library.opcheck(torch.ops.tencl.similarity_lse.default, (q, k, t, *selected, impl))
    library.opcheck(torch.ops.tencl.similarity_lse_fixed_keys.default, (q, k.detach(), t, *selected, impl))
    library.opcheck(torch.ops.tencl.similarity_topk.default, (q.detach(), k.detach(), t.detach(), 2, *selected, impl))


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)          # in Triton one pass and two
def test_opcheck_losses(impl, dtype):
    q, k = (rows(6, 5, dtype, 23).requires_grad_() for _ in range(2))
    t, needs = torch.tensor(0.3, device=DEVICE, requires_grad=True), (True, True, True)
    for other, both, selected in ((k, False, Rule("diagonal")), (k, True, Rule("diagonal")), (None, False, Rule("pair")),
                                  (k, False, Rule("target", torch.tensor([0, 2, 2, 1, 5, 0], device=DEVICE)))):
        weights = torch.ones(6, device=DEVICE) if selected.exclude == "target" else None
        library.opcheck(torch.ops.tencl.softmax_loss.default, (q, other, t, weights, both, *selected, impl, *needs))
    library.opcheck(torch.ops.tencl.similarity_lse.default, (q, None, t, *Rule("pair"), impl))
    library.opcheck(torch.ops.tencl.queue_loss.default, (q, k, k.detach(), t, *Rule(), impl, *needs))


class Launches(TorchDispatchMode):
    """Counts what a GPU would be asked to run: kernels of ours, and operations of PyTorch that do more than hand out memory."""
    FREE = {"empty", "new_empty", "empty_like", "view", "slice", "select", "split", "split_with_sizes", "detach", "t", "alias", "_to_copy"}

    def __init__(self, monkeypatch):
        super().__init__()
        from kernels import gradient_rows, lse_forward
        self.ran = []
        for module, name in ((lse_forward, "parts_kernel"), (lse_forward, "merge_kernel"), (gradient_rows, "rows_kernel")):
            monkeypatch.setattr(module, name, self.counted(name, getattr(module, name)))

    def counted(self, name, kernel):
        class Counted:
            def __getitem__(_, grid):
                self.ran.append(name)
                return kernel[grid]
        return Counted()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        on_the_cpu = f is torch.ops.aten.full.default and not out.dim() and out.device.type == "cpu"       # a temperature
        if f.namespace == "aten" and f._schema.name.split("::")[1] not in self.FREE and not on_the_cpu:
            self.ran.append(f._schema.name)
        return out


@pytest.mark.parametrize("n", [64, 1024] if GPU else [64])
@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "nt_xent"])
def test_small_batches_take_two_launches(loss, n, monkeypatch):
    """At most two forward and two backward, beside putting two views together: launches cost more than such a batch."""
    q, k = (rows(n, 128, torch.float16, seed).requires_grad_() for seed in (49, 50))
    launches = Launches(monkeypatch)
    with launches:
        value = LOSSES[loss](q, k, 0.07, "triton")
    assert launches.ran == ["aten::cat"] * (loss == "nt_xent") + ["parts_kernel", "merge_kernel"]
    launches.ran.clear()
    one = torch.ones_like(value)
    with launches:
        torch.autograd.grad(value, (q, k), one)
    assert launches.ran == ["rows_kernel"] * (1 if loss == "nt_xent" else 2)


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "nt_xent", "queue_loss"])
def test_gpu_graph(loss):
    """Forward and backward are captured in a CUDA graph: nothing waits for the device. A replay reads the rows anew."""
    q, k = (rows(1024, 128, torch.bfloat16, seed).requires_grad_() for seed in (51, 52))
    step = lambda: torch.autograd.grad(LOSSES[loss](q, k, 0.07, "triton"), q)[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(rows(1024, 128, torch.bfloat16, 53))
    graph.replay()
    assert torch.equal(captured, step())


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
@pytest.mark.parametrize("loss", ["info_nce, symmetric", "nt_xent", "linear_cross_entropy"])
def test_compiles_in_one_graph(impl, loss):
    q, k, t = rows(37, 8, torch.float32, 24), rows(37, 8, torch.float32, 25), torch.tensor(0.2, device=DEVICE)
    f = lambda q, k, t: LOSSES[loss](q, k, t, impl)
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(differentiate(compiled, q, k, t), differentiate(f, q, k, t)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["blockwise"] + ["triton"] * GPU)
def test_autocast_multiplies_in_its_dtype_and_sums_in_float32(impl):
    q, k = rows(37, 24, torch.float32, 26).requires_grad_(), rows(37, 24, torch.float32, 27)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = info_nce(q, k, 0.05, impl=impl)
    loss.backward()
    rounded = info_nce(q.detach().bfloat16(), k.bfloat16(), 0.05, impl=impl)
    assert loss.dtype == q.grad.dtype == torch.float32 and loss == rounded
    assert loss != info_nce(q.detach(), k, 0.05, impl=impl)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("f", [lambda q, impl: info_nce(q, q.detach(), 0.1, impl=impl),
                               lambda q, impl: similarity_lse(q, None, 0.1, impl=impl).sum()], ids=["loss", "lse"])
def test_second_derivative_is_refused(impl, f):
    q = rows(5, 4, torch.float32, 28).requires_grad_()
    gradient, = torch.autograd.grad(f(q, impl), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use impl='eager'"):
        (f(q, impl) + gradient.norm()).backward()
    gradient, = torch.autograd.grad(f(q, "eager"), q, create_graph=True)
    torch.autograd.grad(gradient.norm(), q)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_similar_columns_are_left_out(impl, dtype):
    """DCLR's use: columns whose second similarity is at least phi, the threshold itself included, features of any dtype."""
    q, f = rows(4, 8, torch.float32, 44), torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=dtype, device=DEVICE)
    lse = similarity_lse(q, None, 0.5, similar=(f, f, 8.0), impl=impl)                # products from 8 up: 2·4, 3·3, 3·4, 4·4
    kept = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool, device=DEVICE)
    torch.testing.assert_close(lse, (q @ q.T / 0.5).masked_fill(~kept, -torch.inf).logsumexp(1))


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("n", [1, 5, 64, 65, 200])
def test_topk(impl, n):
    """Also beyond the slots of the Triton kernel; random rows have no ties. Strips and splits are merged in order."""
    q, k = rows(30, 16, torch.float32, 42), rows(1100, 16, torch.float32, 43)
    values, columns = similarity_topk(q, k, n, exclude="diagonal", offset=3, impl=impl)
    exact, wanted = similarity_topk(q.double(), k.double(), n, exclude="diagonal", offset=3, impl="eager")
    assert torch.equal(columns, wanted) and values.dtype == torch.float32 and columns.dtype == torch.int64
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(similarity_topk(k, None, 1, impl=impl)[1][:, 0], torch.arange(1100, device=DEVICE))


Q, K = torch.randn(4, 3), torch.randn(5, 3)
IDS = torch.arange(4), torch.arange(5)


@pytest.mark.parametrize("call, message", [
    (lambda: similarity_lse(torch.randn(4)), r"q: found \(4,\), wanted a tensor of two dimensions"),
    (lambda: similarity_lse(Q, torch.randn(5, 3, 1)), r"k: found \(5, 3, 1\), wanted"),
    (lambda: similarity_lse(Q.tolist()), "q: found list"),
    (lambda: similarity_lse(Q.long()), "q: found torch.int64, wanted float64"),
    (lambda: similarity_lse(Q, torch.randn(5, 4)), "k: 4 features a row, q has 3"),
    (lambda: similarity_lse(Q, K.double()), "k: dtype torch.float64 differs from q's, torch.float32"),
    (lambda: similarity_lse(Q, K.to("meta")), "k: device meta differs from q's, cpu"),
    (lambda: similarity_lse(Q, K[:0]), r"k: found shape \(0, 3\), wanted at least one row"),
    (lambda: similarity_lse(Q, K[:, :0]), r"k: found shape \(5, 0\), wanted at least one row and one feature"),
    (lambda: similarity_lse(Q, K, 0), "temperature: 0, wanted a number above 0"),
    (lambda: similarity_lse(Q, K, float("nan")), "temperature: nan, wanted a number above 0"),
    (lambda: similarity_lse(Q, K, float("inf")), "temperature: inf, wanted"),
    (lambda: similarity_lse(Q, K, "low"), "temperature: found str"),
    (lambda: similarity_lse(Q, K, torch.ones(1)), r"temperature: found torch.float32 of shape \(1,\)"),
    (lambda: similarity_lse(Q, K, torch.tensor(1)), "temperature: found torch.int64"),
    (lambda: similarity_lse(Q, K, exclude="self"), "exclude: 'self', wanted None"),
    (lambda: similarity_lse(Q, K, exclude="pair"), r'exclude: "pair" wants one set .* found a k'),
    (lambda: similarity_lse(torch.randn(3, 2), exclude="pair"), "found 3 rows"),
    (lambda: similarity_lse(Q, K, exclude=(IDS[0], IDS[0])), r"exclude: column ids have shape \(4,\), wanted \(5,\)"),
    (lambda: similarity_lse(Q, K, within=(IDS[0].float(), IDS[1])), "within: row ids are torch.float32, wanted integers"),
    (lambda: similarity_lse(Q, K, within=IDS[0]), "within: wanted a pair of tensors"),
    (lambda: similarity_lse(Q, K, exclude=(IDS[0], IDS[1].to("meta"))), "exclude: column ids are on meta, q is on cpu"),
    (lambda: similarity_lse(Q, K, similar=(Q, K)), r"similar: wanted \(row features \(N, E\), column features \(M, E\), phi\)"),
    (lambda: similarity_lse(Q, K, similar=(K, K, 0.5)), r"similar: row features are torch.float32 of shape \(5, 3\), wanted .*\(4, E\)"),
    (lambda: similarity_lse(Q, K, similar=(Q, K[:, :2], 0.5)), "row features are 3 wide .* column features 2 wide"),
    (lambda: similarity_lse(Q, K, similar=(Q, K, float("nan"))), "similar: phi is nan, wanted a number"),
    (lambda: similarity_lse(Q, K, offset=1.5), "offset: 1.5, wanted an integer"),
    (lambda: similarity_lse(Q, K, impl="cuda"), "impl: 'cuda', wanted one of auto, triton, blockwise, eager"),
    (lambda: similarity_lse(Q.double(), K.double(), impl="triton"), "impl: 'triton' has no float64"),
    (lambda: similarity_topk(Q, K, 6), "n: 6, wanted an integer from 1 to the 5 rows of k"),
    (lambda: similarity_topk(Q, K, 0), "n: 0, wanted"),
    (lambda: info_nce(K, Q), r"k: 4 rows, wanted at least 5 \+ offset 0"),
    (lambda: info_nce(Q, K, offset=-1), "offset -1"),
    (lambda: info_nce(Q, K, offset=0.5), "offset: 0.5, wanted an integer"),
    (lambda: linear_cross_entropy(Q, K, [0, 1, 2, 3]), "targets: found list, wanted an int64 tensor"),
    (lambda: info_nce(Q, K, symmetric=True), "symmetric: wanted as many rows in k as in q, found 5 and 4"),
    (lambda: nt_xent(Q, K), "z2: 5 rows, z1 has 4"),
    (lambda: linear_cross_entropy(Q, K, IDS[1]), r"targets: found torch.int64 of shape \(5,\), wanted int64 \(4,\)"),
    (lambda: linear_cross_entropy(Q, K, IDS[0].float()), "targets: found torch.float32"),
])
def test_bad_input_names_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def python(code, **environment):
    """Standard output of code in a process of its own, without the interpreter unless asked for."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=os.path.dirname(os.path.dirname(__file__)), env=environment,
                          capture_output=True, text=True)
    return done.stdout.strip() + done.stderr.strip()


def test_triton_on_the_cpu_needs_the_interpreter():
    code = "import torch, kernels\ntry: kernels.similarity_lse(torch.ones(2, 2), impl='triton')\nexcept ValueError as e: print(e)"
    assert "wants TRITON_INTERPRET=1" in python(code)


def test_without_triton():
    """macOS and Windows: importing and everything but impl='triton' works."""
    code = ("import sys; sys.modules['triton'] = None\nimport torch, kernels\nq = torch.eye(3, requires_grad=True)\n"
            "kernels.nt_xent(q, q, 1.0).backward(); print(kernels.choose_impl('auto', q))\n"
            "try: kernels.nt_xent(q, q, 1.0, impl='triton')\nexcept ValueError as e: print(e)")
    out = python(code)
    assert out.startswith("blockwise") and "wants the package triton, which is not installed" in out


def test_transformers_imports_beside_a_folder_named_kernels():
    assert python("import transformers, kernels; from transformers import AutoModel; print(kernels.__version__)").endswith("0.1.0")


def test_benchmark(tmp_path):
    """Every row has its numbers or its reason; the file is the table."""
    done = subprocess.run([sys.executable, "-m", "kernels.benchmark", "--loss", "nt_xent", "info_nce", "--sizes", "64x64x16",
                           "--impl", "eager", "blockwise", "CCE", "--dtype", "float32", "--repeat", "3", "--set", "trained", "--json",
                           str(tmp_path / "rows.json"), "--markdown"], cwd=os.path.dirname(os.path.dirname(__file__)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "rows.json").read_text())
    assert {"device", "torch", "date", "command"} <= set(result) and len(result["rows"]) == 6
    for row in result["rows"]:
        if row["impl"] == "CCE" and "failed" in row:
            continue                                              # not installed, or wants a GPU
        assert 0 < row["ms_20"] <= row["ms"] <= row["ms_80"] and row["forward_ms"] > 0 and row["peak_percent"] > 0
        assert row["impl"] == "CCE" or row["error"] < 1e-3
    assert done.stdout.count("| trained |") == 2 and "| rows | eager | blockwise | CCE |" in done.stdout


@pytest.mark.parametrize("flags, wanted", [
    ("--from none.json", "--from none.json: No such file or directory"), ("--from README.md", "--from README.md: wanted a file that --json wrote"),
    ("--from [].json", "--from [].json: wanted a file that --json wrote"), ("--json none/x.json", "none/x.json: its folder is not there, or cannot be written"),
    ("--sizes 4x4", "error: argument --sizes: 4x4: wanted N x M x D, as 4096x4096x128"),
    ("--sizes 4x4x4x", "error: argument --sizes: 4x4x4x: wanted N x M x D, as 4096x4096x128"),
    ("--repeat 0", "error: argument --repeat: 0: wanted a number of at least 1")])
def test_benchmark_refuses(flags, wanted, tmp_path, monkeypatch, capsys):
    """In one line, before anything is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# A"), (tmp_path / "[].json").write_text("[]")
    with pytest.raises(SystemExit) as end:
        benchmark.main(flags.split())
    out, error = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and error.splitlines()[-1].endswith(wanted)


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("dtype, d", list(itertools.product([torch.float32, *HALF], [64, 128, 768, 1024])))
def test_gpu_at_size(dtype, d):
    """Thousands of rows on a real GPU, all precisions, memory far below the matrix."""
    q, k = rows(4099, d, dtype, 29), rows(8201, d, dtype, 30)
    precisions = ["highest", "high"] if dtype == torch.float32 else ["highest"]
    for precision in precisions:
        torch.set_float32_matmul_precision(precision)
        try:
            for name in RULES:
                compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **rule(name, 4099, 8201)), dtype, q, k)
        finally:
            torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not GPU, reason="no GPU")
def test_gpu_memory():
    """32,768 × 32,768: the bfloat16 matrix alone is 2 GiB."""
    q, k = (rows(32768, 128, torch.bfloat16, s).requires_grad_() for s in (31, 32))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    info_nce(q, k, 0.07).backward()
    assert torch.cuda.max_memory_allocated() - before < 512 * 2 ** 20
