"""Every implementation against float64 eager: shapes, strides, rules, dtypes, every way through the kernels.

Tolerances calibrate themselves: an implementation may err three times as much as eager does in the same
dtype, plus a few units of rounding where eager happens to be exact. Triton runs on the GPU where there is
one, else in its interpreter, whose bfloat16 products are wrong: there that dtype waits for a GPU. Cases are
pairs of parameters, not all products, except where three meet in a kernel: rule, dtype, more than one tile.
"""
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import (
    blockwise,
    clip_loss,
    info_nce,
    linear_cross_entropy,
    nt_xent,
    paths,
    queue_loss,
    sigmoid_loss,
    sup_con_loss,
)
from kernels.rules import make_rule
from kernels.similarity import similarity_lse, similarity_topk

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RULES = ["all", "diagonal", "shifted", "ids", "within", "ids within", "similar", "diagonal similar within"]
HALF = [torch.float16] + [torch.bfloat16] * GPU
TRITON = [torch.float32, *HALF]
IMPLS = [("blockwise", torch.float64), ("blockwise", torch.float32), ("blockwise", torch.bfloat16),
         *(("triton", dtype) for dtype in TRITON)]
both_impls = pytest.mark.parametrize("impl", ["blockwise", "triton"])
all_triton = pytest.mark.parametrize("dtype", TRITON, ids=str)


def rule(name, n, m):
    """Keyword arguments of similarity_lse for a rule, with repeated, missing and negative ids."""
    rows, columns, e = (torch.arange(count, device=DEVICE) for count in (n, m, 20))
    # features of whole numbers have exact products in every dtype, also on the threshold
    f_q, f_k = (rows[:, None] * 5 + e) % 7 - 3, (columns[:, None] * 3 + e) % 5 - 2
    return {"all": {}, "diagonal": dict(exclude="diagonal"), "shifted": dict(exclude="diagonal", offset=2),
            "ids": dict(exclude=(rows % 5 - 2, (columns * 7) % 9 - 2)),
            "within": dict(within=(rows // 4, columns // 6)),
            "similar": dict(similar=(f_q.double(), f_k.double(), 2.0)),
            "ids within": dict(exclude=(rows.int() % 3, columns.int() % 3), within=(rows % 4, columns % 7)),
            "diagonal similar within": dict(exclude="diagonal", similar=(f_q.half(), f_k.half(), 5.0),
                                            within=(rows // 9, columns // 9))}[name]


def rows(n, d, dtype, seed, strided=False):
    """Unit rows; strided: every second row of a larger matrix laid out by columns."""
    x = torch.randn(d, 2 * n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).T[::2]
    x = F.normalize(x, dim=1).to(DEVICE, dtype)
    return x if strided else x.contiguous()


def pairs(n, d, dtype):
    q = rows(n, d, dtype, 17)
    return q, F.normalize(q.double() + 0.3 * rows(n, d, torch.float64, 18), dim=1).to(dtype)


def differentiate(f, *inputs):
    """[value, gradients...] of the weighted sum of f's finite entries, as float64."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = f(*inputs)
    finite = value.where(value.isfinite(), torch.zeros_like(value))
    weights = torch.linspace(-1, 2, max(value.numel(), 1), dtype=value.dtype, device=value.device)
    gradients = torch.autograd.grad((finite * weights.view_as(value)).sum(), inputs)
    return [value.detach().double(), *(gradient.double() for gradient in gradients)]


def assert_close(ours, exact, eager, dtype, steepness, units, floor=0.0):
    """Each of ours as close to exact as three times eager's own error, plus a few units of rounding.

    The exponential multiplies the rounding of a logit, done in float32, by the logit: steepness is the
    largest one, 1/τ. floor is the size of what cancels where a gradient vanishes.
    """
    summed = dtype if dtype == torch.float64 else torch.float32
    unit = units * (torch.finfo(dtype).eps + steepness * torch.finfo(summed).eps)
    for name, a, b, c in zip(("value", "dq", "dk", "dtemperature"), ours, exact, eager):
        assert torch.equal(a.isneginf(), b.isneginf()) and not a.isnan().any(), f"{name}: not finite"
        a, b, c = (x.nan_to_num(neginf=0.0) for x in (a, b, c))
        scale = b.abs().max().clamp(min=floor)
        if name == "dtemperature":  # a sum that may cancel
            scale = exact[1].abs().sum().clamp(min=floor * len(exact[1])) * steepness
        error, allowed = (a - b).abs().max().item(), (3 * (c - b).abs().max() + unit * scale).item()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def compare(f, q, k, temperature=0.07, impl="triton", units=16, floor=0.0):
    """f(q, k, temperature, impl) against itself in float64 eager, from the same rounded rows."""
    t = torch.tensor(temperature, dtype=torch.float32, device=DEVICE)
    exact = differentiate(lambda *x: f(*x, "eager"), q.double(), k.double(), t.double())
    t = t.double() if q.dtype == torch.float64 else t
    eager = differentiate(lambda *x: f(*x, "eager"), q, k, t)
    ours = differentiate(lambda *x: f(*x, impl), q, k, t)
    assert_close(ours, exact, eager, q.dtype, 1 / temperature, units, floor)


def set_in(monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setattr(f"kernels.{name}", value)


# ── the log-sum-exp ─────────────────────────────────────────────────────────────────────────────────────────


def in_turns(shapes):
    """(impl, dtype, shape, rule): every pair of two of them."""
    for (i, name), (j, shape) in itertools.product(enumerate(RULES), enumerate(shapes)):
        yield *IMPLS[(i + j) % len(IMPLS)], shape, name


def across_tiles(shape):
    """Triton's tiles have 128, 64 or 32 rows or columns, and 16 features or more."""
    return (("triton", dtype, shape, name) for dtype, name in itertools.product(TRITON, RULES))


@pytest.mark.parametrize("impl, dtype, shape, name", [
    *in_turns([(1, 1, 1), (1, 7, 3), (6, 1, 8), (37, 53, 20)]), *across_tiles((130, 140, 24))], ids=str)
def test_rules_and_shapes(impl, dtype, shape, name):
    n, m, d = shape
    q, k = rows(n, d, dtype, 0), rows(m, d, dtype, 1)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **rule(name, n, m)), q, k, impl=impl)


@pytest.mark.parametrize("impl, dtype, shape, name", [
    *in_turns([(1, 1, 1), (37, 53, 20), (10, 200, 130), (5, 40, 300)]),
    *across_tiles((70, 140, 24))], ids=str)
def test_keys_without_gradient(impl, dtype, shape, name, monkeypatch):
    n, m, d = shape
    q, k = rows(n, d, dtype, 40), rows(m, d, dtype, 41)
    lse = lambda q, k, t, impl: similarity_lse(q, k.detach(), t, impl=impl, **rule(name, n, m)) + 0 * k.sum()
    compare(lse, q, k, impl=impl)
    if impl == "triton" and dtype in HALF and m == 140:  # a program had a tile of columns, now one has all
        set_in(monkeypatch, {"gpu.lse_fixed_keys.MULTIPROCESSORS": 0})
        compare(lse, q, k)


@both_impls
@all_triton
def test_strides(impl, dtype):
    q, k = rows(40, 20, dtype, 3, strided=True), rows(50, 20, dtype, 4, strided=True)
    assert not q.is_contiguous()
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, exclude="diagonal", impl=impl), q, k, impl=impl)
    expanded = rows(1, 20, dtype, 5).expand(50, 20)  # a row stride of zero
    ours, exact = (similarity_lse(q, expanded, 0.1, impl=i) for i in (impl, "eager"))
    tolerance = dict(atol=2e-2, rtol=1e-3) if dtype in HALF else dict(atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, exact, **tolerance)


@pytest.mark.parametrize("impl, dtype, d", [
    ("blockwise", torch.float32, 1024), ("triton", torch.float32, 16), ("triton", torch.float32, 257),
    ("triton", torch.float32, 4096), ("triton", torch.float16, 64), ("triton", torch.float16, 257)], ids=str)
def test_every_width(impl, dtype, d):
    q, k = rows(9, d, dtype, 6), rows(11, d, dtype, 7)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, exclude="diagonal", impl=impl), q, k, impl=impl)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_row_without_columns(impl):
    q, ids = rows(5, 8, torch.float32, 9).requires_grad_(), torch.tensor([0, 0, 1, 0, 0], device=DEVICE)
    lse = similarity_lse(q, q.detach(), 0.1, exclude=(ids, torch.ones_like(ids)), impl=impl)
    assert lse[2] == -torch.inf and lse[[0, 1, 3, 4]].isfinite().all()
    lse.sum().backward()
    assert not q.grad[2].any() and q.grad[0].any() and not q.grad.isnan().any()


@both_impls
def test_same_input_same_bits(impl):
    q, k = rows(130, 40, torch.float32, 10), rows(140, 40, torch.float32, 11)
    lse, t = lambda *x: similarity_lse(*x, exclude="diagonal", impl=impl), torch.tensor(0.05, device=DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(differentiate(lse, q, k, t), differentiate(lse, q, k, t)))


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────


def ignoring(q, k, t, impl):
    """20 classes, repeated; every fourth row does not count."""
    row = torch.arange(len(q), device=DEVICE)
    targets = (row % 20).masked_fill(row % 4 == 0, -1)
    return linear_cross_entropy(q, k[:20], targets, -1, temperature=t, impl=impl)


LOSSES = {
    "info_nce": lambda q, k, t, impl, **how: info_nce(q, k, t, impl=impl, **how),
    "offset": lambda q, k, t, impl, **how: info_nce(q[:-7], k, t, offset=5, impl=impl, **how),
    "clip_loss": lambda q, k, t, impl, **how: clip_loss(q, k, t, impl=impl, **how),
    "nt_xent": lambda q, k, t, impl, **how: nt_xent(q, k, t, impl=impl, **how),
    "queue_loss": lambda q, k, t, impl, **how: queue_loss(
        q, k, k.detach().roll(3, 0)[:-6].flip(1), t, impl=impl, **how),
    "linear": lambda q, k, t, impl: linear_cross_entropy(
        q, k, torch.arange(len(q), device=DEVICE) * 3 % len(k), temperature=t, impl=impl),
    "ignoring": ignoring,
    "sigmoid_loss": lambda q, k, t, impl, **how: sigmoid_loss(
        q[:-7], k, t, -4.0, offset=5, impl=impl, **how),
    "sup_con_loss": lambda q, k, t, impl, **how: sup_con_loss(
        torch.stack([q, k], 1), torch.arange(len(q), device=DEVICE) // 3, t, impl=impl, **how)}
SUMS = {
    "lse": lambda q, k, t, impl, **how: similarity_lse(
        q, k, t, exclude="diagonal", offset=7, impl=impl, **how),
    "one_set": lambda q, k, t, impl, **how: similarity_lse(
        q, None, t, exclude="diagonal", impl=impl, **how) + 0 * k.sum(),
    "pair": lambda q, k, t, impl, **how: similarity_lse(
        q, None, t, exclude="pair", impl=impl, **how) + 0 * k.sum()}
NORMALIZES = [name for name in LOSSES | SUMS if name not in ("linear", "ignoring")]


@pytest.mark.parametrize("loss", LOSSES | SUMS)
@pytest.mark.parametrize("impl, dtype", IMPLS[:2] + IMPLS[3:], ids=str)
def test_losses(loss, impl, dtype):
    compare((LOSSES | SUMS)[loss], *pairs(38 if impl == "blockwise" else 150, 24, dtype), impl=impl, units=32)


@both_impls
def test_clip_loss_is_the_symmetric_info_nce(impl):
    q, k = pairs(9, 8, torch.float32)
    assert clip_loss(q, k, 0.1, impl=impl) == info_nce(q, k, 0.1, symmetric=True, impl=impl)


# ── normalize=True ──────────────────────────────────────────────────────────────────────────────────────────


def raw_rows(dtype):
    """20 pairs of rows, of lengths from 0.02 to 50."""
    lengths = torch.logspace(-1.7, 1.7, 20, dtype=torch.float64, device=DEVICE)[:, None]
    q, k = pairs(20, 24, torch.float64)
    return (q * lengths).to(dtype), (k * lengths.roll(7, 0)).to(dtype)


def unit(x):
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.normalize(x.to(wide), dim=1).to(x.dtype)


@pytest.mark.parametrize("loss", NORMALIZES)
@pytest.mark.parametrize("impl, dtype", [
    ("eager", torch.float64), ("eager", torch.float16), ("blockwise", torch.float32),
    ("blockwise", torch.bfloat16), ("triton", HALF[-1])], ids=str)
def test_normalize(loss, impl, dtype):
    """Value and gradients are those of F.normalize's rows in float64."""
    f, (q, k) = (LOSSES | SUMS)[loss], raw_rows(dtype)
    t = torch.tensor(0.07, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)
    on_unit_rows = lambda q, k, t: f(unit(q), unit(k), t, "eager")
    exact = differentiate(on_unit_rows, q.double(), k.double(), t.double())
    ours = differentiate(lambda q, k, t: f(q, k, t, impl, normalize=True), q, k, t)
    assert_close(ours, exact, differentiate(on_unit_rows, q, k, t), dtype, 1 / 0.07, 32, 1 / 0.07 / 20)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_normalize_of_neighbours(impl):
    q, k = raw_rows(torch.float32)
    for keys in (k, None):
        values, columns = similarity_topk(q, keys, 3, normalize=True, impl=impl)
        wanted, nearest = similarity_topk(unit(q), None if keys is None else unit(k), 3, impl=impl)
        assert torch.equal(values, wanted) and torch.equal(columns, nearest)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_normalize_takes_any_length(impl):
    """Rows of zeros have cosine 0, and F.normalize's gradient. float16 has no room for the squares."""
    q, k = raw_rows(torch.float32)
    q[3], k[5] = 0, 0
    assert not similarity_topk(q[3:4], k, 2, normalize=True, impl=impl)[0].any()
    f = lambda q, k: info_nce(q, k, 0.07, normalize=True, impl=impl)
    exact = differentiate(lambda q, k: info_nce(unit(q), unit(k), 0.07, impl="eager"), q.double(), k.double())
    for a, b in zip(differentiate(f, q, k), exact):
        assert b.isfinite().all() and b.abs().max() < 1e13
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for length in (1e5, 1e-4):                                 # of 24 numbers up to 65504, and from 6e-8
        x, y = ((length * unit(x)).half() for x in pairs(20, 24, torch.float64))
        exact = info_nce(unit(x.double()), unit(y.double()), 0.07).item()
        assert f(x, y).item() == pytest.approx(exact, rel=0.01)


@both_impls
def test_normalize_divides_a_float32_gradient_by_the_lengths(impl):
    """Those of the unit rows, about 1e-8, would be 0 in float16; of rows of length 1e-3 they are 1e-5."""
    f = lambda q, k, impl: 1e-6 * info_nce(q, k, 0.3, normalize=True, impl=impl)
    q, k = ((1e-3 * unit(x)).half() for x in pairs(20, 24, torch.float64))
    found = differentiate(lambda q, k: f(q, k, impl), q, k)
    exact = differentiate(lambda q, k: f(q, k, "eager"), q.double(), k.double())
    for a, b in zip(found[1:], exact[1:]):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_normalize_gives_a_queue_no_gradient(impl):
    q, k = (x.requires_grad_() for x in raw_rows(torch.float32))
    queue = (2 * rows(30, 24, torch.float32, 90)).requires_grad_()
    queue_loss(q, k, queue, normalize=True, impl=impl).backward()
    assert queue.grad is None and q.grad.any() and k.grad.any()


@pytest.mark.parametrize("impl, loss", [
    *itertools.product(["eager", "blockwise"], NORMALIZES), ("triton", "info_nce"), ("triton", "queue_loss")])
def test_normalize_under_autocast(impl, loss):
    """As of rows that F.normalize made in float32, to the bit; one side may have autocast's dtype."""
    f, (q, k) = (LOSSES | SUMS)[loss], raw_rows(torch.float32)
    half = lambda x: x.half().float()
    with torch.autocast(DEVICE, torch.float16):
        ours = differentiate(lambda q, k: f(q, k, 0.07, impl, normalize=True), q, k)
        wanted = differentiate(lambda q, k: f(unit(q), unit(k), 0.07, impl), q, k)
        mixed = f(q, k.half(), 0.07, impl, normalize=True)
        both = f(q.half(), k.half(), 0.07, impl, normalize=True)
        assert torch.equal(mixed, f(unit(q), unit(half(k)), 0.07, impl))
        assert torch.equal(both, f(unit(half(q)), unit(half(k)), 0.07, impl))
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted))


# ── every way through the kernels ───────────────────────────────────────────────────────────────────────────

WIDE = {"paths.WIDEST": 0, "paths.FEW": 0}
TWO_PASSES = WIDE | {"operations.in_one_pass": lambda *x: False}
BOUNDED = {"gpu.launch.FEW": 0, "gpu.reference.FEW": 0}  # rows are looked at for a bound
SUMS_IN_BLOCKS = {"gpu.lse_forward.sums_block": lambda q, k, square: (128, 128)}
IN_BLOCKS = SUMS_IN_BLOCKS | {
    "gpu.gradient_blocks.weight_block": lambda q, k, square: (128, 128)}
# each way that a shape or a chip may choose, for 150 rows, which are two tiles or more: what makes it so, and
# which losses it changes in float32, where all rows are wide, and in half types
WAYS = {
    "sums without maximum": (BOUNDED, "clip_loss nt_xent", "clip_loss nt_xent"),
    "pointers": ({"gpu.launch.PLAYED": 8},
                 "info_nce clip_loss queue_loss linear sigmoid_loss", "info_nce clip_loss queue_loss"),
    "pointers, wide": ({"gpu.launch.PLAYED": 8} | WIDE, "", "clip_loss queue_loss sigmoid_loss"),
    "tiles of a B200": ({"gpu.launch.PLAYED": 10} | BOUNDED, "clip_loss nt_xent", "clip_loss nt_xent"),
    "a number": ({f"gpu.{module}.is_number": lambda number, x: True for module in ("launch", "sigmoid")},
                 "info_nce clip_loss queue_loss sigmoid_loss", "info_nce clip_loss queue_loss sigmoid_loss"),
    "sums in blocks": (SUMS_IN_BLOCKS, "clip_loss nt_xent lse", "info_nce clip_loss nt_xent one_set"),
    "sums in blocks without maximum": (SUMS_IN_BLOCKS | BOUNDED, "clip_loss nt_xent", "clip_loss one_set"),
    "one pass": (WIDE, "", "info_nce offset clip_loss nt_xent lse one_set"),
    "strips": (WIDE | {"gpu.one_pass.strip_height": lambda q, k: 128},
               "info_nce linear ignoring", "info_nce offset linear"),
    "strips without maximum": (BOUNDED | {"gpu.one_pass.strip_height": lambda q, k: 128},
                               "info_nce offset linear ignoring", ""),
    "two passes": (TWO_PASSES | BOUNDED, "info_nce offset linear ignoring", "info_nce linear ignoring"),
    "two passes in blocks": (TWO_PASSES | IN_BLOCKS,
                             "info_nce clip_loss nt_xent linear lse one_set sigmoid_loss",
                             "offset clip_loss nt_xent sigmoid_loss"),
    "the same without maximum": (TWO_PASSES | IN_BLOCKS | BOUNDED, "clip_loss nt_xent linear one_set",
                                 "clip_loss nt_xent")}


@pytest.mark.parametrize("way, dtype, loss", [
    (way, dtype, loss) for way, (_, full, half) in WAYS.items() for dtype in TRITON
    for loss in (full if dtype == torch.float32 else half).split()], ids=str)
def test_every_way_through_the_kernels(way, dtype, loss, monkeypatch):
    set_in(monkeypatch, WAYS[way][0])
    compare((LOSSES | SUMS)[loss], *pairs(150, 40, dtype), units=32 if loss in LOSSES else 16)


@pytest.mark.parametrize("impl, dtype, wide", [
    ("blockwise", torch.float32, True), ("triton", torch.float32, True),
    *itertools.product(["triton"], HALF, [False, True])], ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "nt_xent", "info_nce"])
@pytest.mark.parametrize("temperature", [0.02, 0.01, 0.003])
def test_sums_beyond_the_range_of_float32_have_a_maximum(temperature, loss, impl, dtype, wide, monkeypatch):
    """At 0.01 exp2(s) of unit rows overflows, which a common shift prevents; at 0.003 most rows' sums vanish
    then, and those rows need a maximum of their own."""
    set_in(monkeypatch, BOUNDED | (WIDE if wide else {}))
    q, k = pairs(40, 24, dtype)
    k = torch.where(torch.arange(40, device=DEVICE)[:, None] % 3 == 0, -q, k)
    compare(LOSSES[loss], q, k, temperature, impl, units=64)


@pytest.mark.parametrize("order, keys, dtype", [
    *itertools.product(["sorted", "only columns sorted", "not sorted"], ["with gradient"], TRITON),
    *itertools.product(["sorted", "not sorted"], ["without"], HALF)], ids=str)
def test_groups_by_ranges(order, keys, dtype, monkeypatch):
    """Sorted column groups let a program skip the columns of other groups; the result must not know."""
    from kernels.gpu.launch import ranges
    set_in(monkeypatch, BOUNDED | {"gpu.lse_forward.PROGRAMS": 1})  # a program walks several tiles
    q, k = rows(200, 24, dtype, 47), rows(270, 24, dtype, 48)
    groups = [torch.randint(0, 20, (n,), generator=torch.Generator().manual_seed(n)) for n in (200, 270)]
    if order == "sorted":  # groups that end one column into a tile
        groups = [(torch.arange(200) - 78).clamp(min=0) // 50, torch.arange(270) // 65]
    groups[1] = groups[1] if order == "not sorted" else groups[1].sort()[0]
    groups[0][:64] = 30  # rows that have no column: a whole tile of none
    groups = [groups[0].to(DEVICE), groups[1].int().to(DEVICE)]
    seen = ranges(make_rule(q, k, False, within=groups), dict(BLOCK_N=64)).diff().clamp(min=0)
    assert len(seen) == 4 and ((seen == 270).all() if order == "not sorted" else seen[0] < 270)
    own = (lambda k: k) if keys == "with gradient" else torch.Tensor.detach
    lse = lambda q, k, t, impl: similarity_lse(q, own(k), t, within=groups, impl=impl) + 0 * k.sum()
    compare(lse, q, k)


# ── blockwise ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", RULES)
def test_many_strips(name, monkeypatch):
    """Strips of 3 rows instead of all rows at once, the last one short."""
    set_in(monkeypatch, {"blockwise.ROWS": 3, "blockwise.STRIP_LOGITS": 1, "blockwise.SMALL": 0})
    q, k = rows(37, 12, torch.float64, 12), rows(53, 12, torch.float64, 13)
    lse = lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **rule(name, 37, 53))
    compare(lse, q, k, impl="blockwise")
    if name == "all":
        for loss in ("info_nce", "offset", "clip_loss", "nt_xent", "linear", "sigmoid_loss", "sup_con_loss"):
            compare(LOSSES[loss], q, k[:37], impl="blockwise", units=32)


@pytest.mark.parametrize("sums", ["one_set", "pair"])
@pytest.mark.parametrize("temperature", [0.07, 0.01])
def test_strips_of_one_set_start_on_the_diagonal(sums, temperature, monkeypatch):
    """Half of the products, with one exponential for a pair where nothing overflows, and else with two."""
    set_in(monkeypatch, {"blockwise.ROWS": 3, "blockwise.STRIP_LOGITS": 1, "blockwise.SMALL": 0})
    q = rows(38, 12, torch.float64, 12)
    compare(SUMS[sums], q, q, temperature, impl="blockwise", units=32)
    found = blockwise.strips(q, q, torch.tensor(1.0), make_rule(q, q, True, "pair"), upper=True)
    assert sum(s.numel() for _, _, s in found) == sum((38 - i) * min(3, 38 - i) for i in range(0, 38, 3))


@pytest.mark.parametrize("keys", ["with gradient", "without"])
@pytest.mark.parametrize("order", ["sorted", "only columns sorted", "only rows sorted"])
def test_sorted_groups_cost_the_pairs_that_they_keep(order, keys, monkeypatch):
    """Groups of 1 to 90 rows, some without columns, some columns without rows; the result must not know."""
    set_in(monkeypatch, {"blockwise.SMALL": 0, "blockwise.STRIP_LOGITS": 32 * 150})
    draw = torch.Generator().manual_seed(7)
    sizes, widths = torch.randint(1, 30, (40,), generator=draw), torch.randint(0, 60, (40,), generator=draw)
    sizes[[0, 3, 20]], widths[[0, 3, 12, 20, 39]] = 90, torch.tensor([0, 160, 0, 0, 0])  # 90 × 160: 3 strips
    groups = [torch.arange(40).repeat_interleave(counts) - 7 for counts in (sizes, widths)]
    shuffled = {"only columns sorted": 0, "only rows sorted": 1}.get(order)
    if shuffled is not None:
        groups[shuffled] = groups[shuffled][torch.randperm(len(groups[shuffled]), generator=draw)]
    groups = [groups[0].int().to(DEVICE), groups[1].to(DEVICE)]
    n, m = map(len, groups)
    q, k = rows(n, 12, torch.float64, 49), rows(m, 12, torch.float64, 50)
    own = (lambda k: k) if keys == "with gradient" else torch.Tensor.detach
    lse = lambda q, k, t, impl: similarity_lse(q, own(k), t, within=groups, impl=impl) + 0 * k.sum()
    compare(lse, q, k, impl="blockwise")
    topk = lambda impl: similarity_topk(q, k, 5, within=groups, impl=impl)
    (values, columns), wanted = topk("blockwise"), topk("eager")
    torch.testing.assert_close(values, wanted[0], atol=1e-12, rtol=0)
    assert torch.equal(columns, wanted[1]) and (columns[:, 4] == -1).any()
    selected = make_rule(q, k, False, within=groups)
    computed = [s.shape for _, _, s in blockwise.strips(q, k, torch.tensor(1.0), selected)]
    kept, total = (sizes * widths).sum(), sum(height * width for height, width in computed)
    assert sum(height for height, _ in computed) == n
    assert all(height * width <= max(blockwise.STRIP_LOGITS, 32 * width) for height, width in computed)
    assert kept <= total < 2.5 * kept if order == "sorted" and not GPU else total == n * m


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""
    entries = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.entries = max(self.entries, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_blockwise_never_holds_the_matrix(monkeypatch):
    set_in(monkeypatch, {"blockwise.SMALL": 0, "blockwise.STRIP_LOGITS": 2 ** 16})
    q, t = rows(400, 8, torch.float32, 16), torch.tensor(0.1, device=DEVICE)
    ids = torch.arange(400, device=DEVICE) // 3
    for exclude in ("diagonal", (ids, ids)):
        selected = make_rule(q, q, False, exclude)
        with Largest() as seen:
            lse, sums = blockwise.similarity_lse(q, q, t, selected)
            one = torch.ones_like(lse)
            blockwise.similarity_lse_backward(q, q, t, selected, one, sums, True, True, True)
            if exclude == "diagonal":
                lse, sums = blockwise.similarity_lse(q, None, t, selected)
                blockwise.similarity_lse_backward(q, None, t, selected, one, sums, True, True, True)
                blockwise.sigmoid_loss(q, q, t, t, selected, True, True, True, True)
            for k, both in ((q, False), (q, True), (None, False)) if exclude == "diagonal" else ():
                blockwise.softmax_loss(q, k, t, selected, None, both, True, True, True)
        assert seen.entries <= blockwise.STRIP_LOGITS < 400 * 400


# ── numbers that are hard to keep ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n, m, size", [
    (1, 1, 4), (2 ** 20, 2 ** 20, 2), (2 ** 17, 300, 4), (64, 2 ** 22, 2), (1, 2 ** 24, 2), (8192, 8192, 2)])
def test_blocks_fit_their_buffers(n, m, size):
    from kernels.gpu import gradient_blocks, lse_forward
    q, k = (torch.empty(rows, 1, dtype=torch.float32 if size == 4 else torch.float16) for rows in (n, m))
    for square in (False, True):
        height, width = gradient_blocks.weight_block(q, q if square else k, square)
        whole = lambda count: -(-count // 128) * 128
        fits = whole(height) * whole(width) * size
        assert 1 <= height <= n and 1 <= width <= max(n, m) and fits <= paths.BUFFER
        # a block starts with a tile
        assert height in (n, whole(height)) and width in (n if square else m, whole(width))
        assert square or height * width == n * m or fits > paths.BUFFER // 4
    assert whole(paths.strip_height(q, k)) * whole(m) * size <= paths.STRIP
    for d, square in itertools.product((1, 768, 4096), (False, True)):
        height, width = lse_forward.sums_block(torch.empty(1, d), k, square)
        assert height % 128 == width % 128 == 0 and height * width // 64 <= lse_forward.PARTS


def test_limits_may_be_set_lower(monkeypatch):
    """Strips of few rows are not worth their passes over the columns' gradient: then there are two passes."""
    from kernels.gpu import gradient_blocks
    q, k = (torch.empty(rows, 8, device="meta") for rows in (5000, 6000))
    one_pass = lambda q: paths.in_one_pass(q, k, False, make_rule(q, k, False), "triton", [True, True, False])
    assert one_pass(q) and one_pass(q[:100])
    set_in(monkeypatch, {"paths.STRIP": 2 ** 24, "paths.BUFFER": 2 ** 20})
    height, width = gradient_blocks.weight_block(q, k, False)
    assert not one_pass(q) and one_pass(q[:100]) and height * width * 4 <= 2 ** 20


@both_impls
@all_triton
def test_gradient_survives_success(impl, dtype):
    """Mean loss about 5e-3: a positive's coefficient is 1 − 0.995, which eager rounds away."""
    q = rows(256, 64, torch.float64, 19)
    k = F.normalize(q + 0.5 * rows(256, 64, torch.float64, 20), dim=1).to(dtype)
    q = q.to(dtype)
    # scaled, or float16 has no such small gradient
    f = lambda impl, *x: differentiate(lambda q, k: 1000 * info_nce(q, k, 0.07, impl=impl), *x)
    exact, ours, eager = f("eager", q.double(), k.double()), f(impl, q, k), f("eager", q, k)
    assert 1 < exact[0] < 10
    error, eager = (((x[1] - exact[1]).norm() / exact[1].norm()).item() for x in (ours, eager))
    assert error < {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    assert error < eager / 4


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_all_targets_ignored_and_one_class(impl):
    h, w = rows(4, 8, torch.float32, 21).requires_grad_(), rows(6, 8, torch.float32, 22)
    targets = torch.zeros(4, dtype=torch.long, device=DEVICE)
    for classes, ignore_index in ((w, 0), (w[:1], -100)):
        loss = linear_cross_entropy(h, classes, targets, ignore_index, impl=impl)
        gradient, = torch.autograd.grad(loss, h)
        assert loss == 0 and not gradient.any()


@both_impls
def test_repeated_targets_of_half_rows(impl):
    """A frequent word's gradient is a sum of thousands of rows: in float16 steps it would stand still."""
    h, w = rows(1500, 16, torch.float16, 45), rows(40, 16, torch.float16, 46)
    targets = torch.zeros(1500, dtype=torch.long, device=DEVICE)
    loss = lambda impl: lambda *x: 1000 * linear_cross_entropy(*x, targets, temperature=0.2, impl=impl)
    exact, ours = differentiate(loss("eager"), h.double(), w.double())[2], differentiate(loss(impl), h, w)[2]
    assert (ours - exact).norm() < 1e-3 * exact.norm()


def as_tf32(x, half_a_step=0):
    """float32 cut to TF32's 10 digits, as tensor cores read it; rounded, if half a step was added."""
    return ((x.contiguous().view(torch.int32) + half_a_step) & -2 ** 13).view(torch.float32)


@pytest.mark.skipif(GPU, reason="a model of what a GPU does")
@pytest.mark.parametrize("loss, changes", [
    ("info_nce", {}), ("info_nce", {"operations.in_one_pass": lambda *x: False}), ("clip_loss", BOUNDED)])
def test_tf32_is_rounded_and_not_cut(loss, changes, monkeypatch):
    """On tensor cores that cut, our products are as good as if they rounded, which cuBLAS's do."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from kernels.gpu import gradient_blocks
    multiply, add_product = InterpreterBuilder.create_dot, gradient_blocks.add_product

    def cut(x):
        return TensorHandle(as_tf32(torch.from_numpy(x.data.copy())).numpy(), x.dtype)

    def in_tf32(total, a, b):
        assert torch.equal(as_tf32(a), a) and torch.equal(as_tf32(b), b)
        add_product(total, a, b)

    products = {f"gpu.{module}.add_product": in_tf32 for module in ("gradient_blocks", "one_pass")}
    set_in(monkeypatch, changes | products)
    monkeypatch.setattr(InterpreterBuilder, "create_dot",
                        lambda self, a, b, *rest: multiply(self, cut(a), cut(b), *rest))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    q, k = pairs(150, 40, torch.float32)
    rounded = [as_tf32(x, 2 ** 12).double() for x in (q, k)]
    f, t = LOSSES[loss], torch.tensor(0.05)
    exact = differentiate(lambda *x: f(*x, t.double(), "eager"), q.double(), k.double())
    best = differentiate(lambda *x: f(*x, t.double(), "eager"), *rounded)
    ours = differentiate(lambda *x: f(*x, t, "triton"), q, k)
    cut_off = differentiate(lambda *x: f(*x, t.double(), "eager"), *(as_tf32(x).double() for x in (q, k)))
    for a, b, c, d in zip(ours, best, cut_off, exact):
        assert (a - d).norm() < 1.5 * (b - d).norm() < (c - d).norm()


@both_impls
@pytest.mark.parametrize("n, programs", [(1, 264), (5, 1), (64, 264), (65, 264)])
def test_topk(impl, n, programs, monkeypatch):
    """Also beyond the slots of the Triton kernel. A split of the columns has one tile, or all of them."""
    set_in(monkeypatch, {"gpu.topk.PROGRAMS": programs})
    q, k = rows(30, 16, torch.float32, 42), rows(230, 16, torch.float32, 43)
    values, columns = similarity_topk(q, k, n, exclude="diagonal", offset=3, impl=impl)
    exact, wanted = similarity_topk(q.double(), k.double(), n, exclude="diagonal", offset=3, impl="eager")
    assert torch.equal(columns, wanted) and values.dtype == torch.float32 and columns.dtype == torch.int64
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)
    if n == 1:  # unit rows are their own neighbours
        assert torch.equal(similarity_topk(k, None, 1, impl=impl)[1][:, 0], torch.arange(230, device=DEVICE))


@pytest.mark.parametrize("loss", LOSSES | SUMS)
@pytest.mark.parametrize("impl, dtype, wide", [
    ("blockwise", torch.float16, False), ("blockwise", torch.bfloat16, False),
    *itertools.product(["triton"], HALF, [False, True])], ids=str)
def test_autocast_multiplies_in_its_dtype_and_sums_in_float32(loss, impl, dtype, wide, monkeypatch):
    """Gradients too, all the way: float16 has none of this size. Rows may have autocast's dtype already."""
    set_in(monkeypatch, WIDE if wide else {})
    f, inputs = (LOSSES | SUMS)[loss], pairs(38, 24, torch.float32)
    with torch.autocast(DEVICE, dtype=dtype):
        value, *ours = differentiate(lambda q, k: 1e-7 * f(q, k, 0.07, impl), *inputs)
        mixed = f(inputs[0], inputs[1].to(dtype), 0.07, impl)
    rounded = [x.to(dtype) for x in inputs]
    assert torch.equal(f(*rounded, 0.07, impl), mixed)
    _, *exact = differentiate(lambda q, k: 1e-7 * f(q, k, 0.07, "eager"), *(x.double() for x in rounded))
    for a, b in zip(ours, exact):
        assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm()


# ── on a GPU ────────────────────────────────────────────────────────────────────────────────────────────────

on_a_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


@on_a_gpu
@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "nt_xent", "queue_loss"])
def test_gpu_graph(loss):
    """A CUDA graph has forward and backward: nothing waits for the device. A replay reads the rows anew."""
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


@on_a_gpu
@pytest.mark.parametrize("d", [64, 128, 768, 1024])
@pytest.mark.parametrize("dtype, precision", [
    (torch.float32, "highest"), (torch.float32, "high"), *((dtype, "highest") for dtype in HALF)], ids=str)
def test_gpu_at_size(dtype, precision, d):
    """Thousands of rows on a real GPU, all precisions, memory far below the matrix."""
    q, k = rows(4099, d, dtype, 29), rows(8201, d, dtype, 30)
    torch.set_float32_matmul_precision(precision)
    try:
        for name in RULES:
            compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **rule(name, 4099, 8201)), q, k)
    finally:
        torch.set_float32_matmul_precision("highest")


@on_a_gpu
def test_gpu_memory():
    """32,768 × 32,768: the bfloat16 matrix alone is 2 GiB."""
    q, k = (rows(32768, 128, torch.bfloat16, s).requires_grad_() for s in (31, 32))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    info_nce(q, k, 0.07).backward()
    assert torch.cuda.max_memory_allocated() - before < 512 * 2 ** 20
