"""Compare every implementation with float64 eager: shapes, strides, masks, dtypes, all code paths.

Tolerances calibrate themselves: an implementation may have three times the error of eager in the same dtype,
plus a few units of rounding, because eager may happen to be exact. Triton runs on a GPU if there is one,
else in its interpreter. The interpreter's bfloat16 products are wrong, so bfloat16 is tested on a GPU only.
Every mask is tested with every small shape, in one implementation and dtype. On several tiles, Triton is
tested with all masks and dtypes.
"""
import functools
import importlib
import itertools
import pkgutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import (
    blockwise,
    clip_loss,
    fused,
    gpu,
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
from kernels.call import prepare
from kernels.masks import make_mask

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
MASKS = ["all", "diagonal", "shifted", "ids", "within", "ids within", "similar", "diagonal similar within",
         "diagonal ids"]
HALF = [torch.float16, torch.bfloat16] if GPU else [torch.float16]
TRITON = [torch.float32, *HALF]
IMPLS = [("blockwise", torch.float64), ("blockwise", torch.float32), ("blockwise", torch.bfloat16),
         *(("triton", dtype) for dtype in TRITON)]
both_impls = pytest.mark.parametrize("impl", ["blockwise", "triton"])
all_triton = pytest.mark.parametrize("dtype", TRITON, ids=str)


def mask_arguments(name, n, m):
    """Return keyword arguments of similarity_lse for a mask, with repeated, missing and negative ids."""
    rows, columns, e = (torch.arange(count, device=DEVICE) for count in (n, m, 20))
    # features of whole numbers have exact products in every dtype, so that none is rounded across the
    # threshold
    f_q, f_k = (rows[:, None] * 5 + e) % 7 - 3, (columns[:, None] * 3 + e) % 5 - 2
    return {"all": {}, "diagonal": dict(exclude="diagonal"), "shifted": dict(exclude="diagonal", offset=2),
            "ids": dict(exclude=(rows % 5 - 2, (columns * 7) % 9 - 2)),
            "diagonal ids": dict(exclude=("diagonal", rows % 5 - 2, (columns * 7) % 9 - 2), offset=3),
            "within": dict(within=(rows // 4, columns // 6)),
            "similar": dict(similar=(f_q.double(), f_k.double(), 2.0)),
            "ids within": dict(exclude=(rows.int() % 3, columns.int() % 3), within=(rows % 4, columns % 7)),
            "diagonal similar within": dict(exclude="diagonal", similar=(f_q.half(), f_k.half(), 5.0),
                                            within=(rows // 9, columns // 9))}[name]


def unit_rows(n, d, dtype, seed, strided=False):
    """Return random unit rows; strided: every second row of a larger matrix stored by columns."""
    x = torch.randn(d, 2 * n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).T[::2]
    x = F.normalize(x, dim=1).to(DEVICE, dtype)
    return x if strided else x.contiguous()


def positive_pairs(n, d, dtype):
    """Return unit rows q, k (n, d) in which k_i is near q_i."""
    q = unit_rows(n, d, dtype, 17)
    return q, F.normalize(q.double() + 0.3 * unit_rows(n, d, torch.float64, 18), dim=1).to(dtype)


def differentiate(f, *inputs):
    """Return [value, gradients...] in float64, with gradients of a weighted sum of the finite values."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = f(*inputs)
    finite = value.where(value.isfinite(), torch.zeros_like(value))
    weights = torch.linspace(-1, 2, max(value.numel(), 1), dtype=value.dtype, device=value.device)
    gradients = torch.autograd.grad((finite * weights.view_as(value)).sum(), inputs)
    return [value.detach().double(), *(gradient.double() for gradient in gradients)]


def assert_close(ours, exact, eager, dtype, largest_logit, units, floor=0.0):
    """Check that each error of ours is at most three times that of eager, plus a few units of rounding.

    largest_logit  1/τ for unit rows: exp turns the float32 rounding error of a logit, which grows with the
                   logit, into a relative error of its result
    floor          size of a gradient's terms if they cancel: errors are relative to at least this size
    """
    summed = dtype if dtype == torch.float64 else torch.float32
    unit = units * (torch.finfo(dtype).eps + largest_logit * torch.finfo(summed).eps)
    for name, a, b, c in zip(("value", "dq", "dk", "dtemperature"), ours, exact, eager):
        assert torch.equal(a.isneginf(), b.isneginf()) and not a.isnan().any(), f"{name}: infinite or NaN"
        a, b, c = (x.nan_to_num(neginf=0.0) for x in (a, b, c))
        scale = b.abs().max().clamp(min=floor)
        if name == "dtemperature":  # its terms may cancel
            scale = exact[1].abs().sum().clamp(min=floor * len(exact[1])) * largest_logit
        error, allowed = (a - b).abs().max().item(), (3 * (c - b).abs().max() + unit * scale).item()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def compare(f, q, k, temperature=0.07, impl="triton", units=16, floor=0.0):
    """Compare f(q, k, temperature, impl) with itself in float64 eager on the same rounded rows."""
    t = torch.tensor(temperature, dtype=torch.float32, device=DEVICE)
    exact = differentiate(lambda *x: f(*x, "eager"), q.double(), k.double(), t.double())
    t = t.double() if q.dtype == torch.float64 else t
    eager = differentiate(lambda *x: f(*x, "eager"), q, k, t)
    ours = differentiate(lambda *x: f(*x, impl), q, k, t)
    assert_close(ours, exact, eager, q.dtype, 1 / temperature, units, floor)


def patch_kernels(monkeypatch, settings):
    """Set {name inside the package kernels: value} for this test."""
    for module in pkgutil.iter_modules(gpu.__path__):          # one imported later would copy values for ever
        importlib.import_module(f"kernels.gpu.{module.name}")
    for name, value in settings.items():
        monkeypatch.setattr(f"kernels.{name}", value)


# ── the log-sum-exp ─────────────────────────────────────────────────────────────────────────────────────────


def pairwise_cases(shapes):
    """Yield (impl, dtype, shape, mask) so that every shape occurs with every mask."""
    for (i, name), (j, shape) in itertools.product(enumerate(MASKS), enumerate(shapes)):
        yield *IMPLS[(i + j) % len(IMPLS)], shape, name


def cases_across_tiles(shape):
    """Return all dtypes and masks for a shape of several Triton tiles (of 32, 64 or 128 rows and columns)."""
    return (("triton", dtype, shape, name) for dtype, name in itertools.product(TRITON, MASKS))


@pytest.mark.parametrize("impl, dtype, shape, name", [
    *pairwise_cases([(1, 1, 1), (1, 7, 3), (6, 1, 8), (37, 53, 20)]),
    *cases_across_tiles((130, 140, 24))], ids=str)
def test_masks_and_shapes(impl, dtype, shape, name):
    n, m, d = shape
    q, k = unit_rows(n, d, dtype, 0), unit_rows(m, d, dtype, 1)
    arguments = mask_arguments(name, n, m)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **arguments), q, k, impl=impl)


def test_gradient_of_one_row_has_plain_strides():
    """One row may have any strides, but cuBLAS refuses some of them for the result of a product."""
    q = torch.ones(3, device=DEVICE).as_strided((1, 3), (1, 1)).requires_grad_()
    lse = similarity_lse(q, unit_rows(7, 3, torch.float32, 0), impl="blockwise")
    assert torch.autograd.grad(lse.sum(), q)[0].stride() == (3, 1)


@pytest.mark.parametrize("impl, dtype, d", [
    ("blockwise", torch.float32, 1024), ("triton", torch.float32, 16), ("triton", torch.float32, 257),
    ("triton", torch.float32, 4096), ("triton", torch.float16, 64), ("triton", torch.float16, 257)], ids=str)
def test_numbers_of_features(impl, dtype, d):
    q, k = unit_rows(9, d, dtype, 6), unit_rows(11, d, dtype, 7)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, exclude="diagonal", impl=impl), q, k, impl=impl)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_row_without_columns(impl):
    """The lse of such a row is −∞, and its gradient is 0."""
    q, ids = unit_rows(5, 8, torch.float32, 9).requires_grad_(), torch.tensor([0, 0, 1, 0, 0], device=DEVICE)
    lse = similarity_lse(q, q.detach(), 0.1, exclude=(ids, torch.ones_like(ids)), impl=impl)
    assert lse[2] == -torch.inf and lse[[0, 1, 3, 4]].isfinite().all()
    lse.sum().backward()
    assert not q.grad[2].any() and q.grad[0].any() and not q.grad.isnan().any()


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────


def ignoring(q, k, t, impl):
    """Return linear_cross_entropy with 20 repeated classes; every fifth row is ignored."""
    row = torch.arange(len(q), device=DEVICE)
    targets = (row % 20).masked_fill(row % 5 == 0, -1)
    return linear_cross_entropy(q, k[:20], targets, -1, temperature=t, impl=impl)


def gathered(loss, q, k, t, impl, **options):
    """Return a loss of the middle rows, as one rank's, against all rows."""
    own = slice(5, len(q) - 7)
    if loss == sup_con_loss:
        z, labels = torch.stack([q, k], 1), torch.arange(len(q), device=DEVICE) // 3 % 9
        options = dict(gathered=(z, labels), offset=5, impl=impl, **options)
        return sup_con_loss(z[own], labels[own], t, 0.07, **options)
    return loss(q[own], k[own], t, gathered=(q, k), offset=5, impl=impl, **options)


LOSSES = {
    "info_nce": lambda q, k, t, impl, **options: info_nce(q, k, t, impl=impl, **options),
    "offset": lambda q, k, t, impl, **options: info_nce(q[:-7], k, t, offset=5, impl=impl, **options),
    "clip_loss": lambda q, k, t, impl, **options: clip_loss(q, k, t, impl=impl, **options),
    "nt_xent": lambda q, k, t, impl, **options: nt_xent(q, k, t, impl=impl, **options),
    "queue_loss": lambda q, k, t, impl, **options: queue_loss(
        q, k, k.detach().roll(3, 0)[:-6].flip(1), t, impl=impl, **options),
    "linear": lambda q, k, t, impl: linear_cross_entropy(
        q, k, torch.arange(len(q), device=DEVICE) * 3 % len(k), temperature=t, impl=impl),
    "ignoring": ignoring,
    "sigmoid_loss": lambda q, k, t, impl, **options: sigmoid_loss(
        q[:-7], k, t, -4.0, offset=5, impl=impl, **options),
    "sup_con_loss": lambda q, k, t, impl, **options: sup_con_loss(
        torch.stack([q, k], 1), torch.arange(len(q), device=DEVICE) // 3, t, impl=impl, **options),
    "gathered_clip_loss": functools.partial(gathered, clip_loss),
    "gathered_nt_xent": functools.partial(gathered, nt_xent),
    "gathered_sup_con_loss": functools.partial(gathered, sup_con_loss)}
LSE_CALLS = {
    "lse": lambda q, k, t, impl, **options: similarity_lse(
        q, k, t, exclude="diagonal", offset=7, impl=impl, **options),
    "self_similarity": lambda q, k, t, impl, **options: similarity_lse(
        q, None, t, exclude="diagonal", impl=impl, **options) + 0 * k.sum(),
    "pair": lambda q, k, t, impl, **options: similarity_lse(
        q, None, t, exclude="pair", impl=impl, **options) + 0 * k.sum()}
NORMALIZING = [name for name in LOSSES | LSE_CALLS if name not in ("linear", "ignoring")]


@pytest.mark.parametrize("loss", LOSSES | LSE_CALLS)
@pytest.mark.parametrize("impl, dtype", IMPLS[:2] + IMPLS[3:], ids=str)
def test_losses(loss, impl, dtype):
    q, k = positive_pairs(38 if impl == "blockwise" else 150, 24, dtype)
    compare((LOSSES | LSE_CALLS)[loss], q, k, impl=impl, units=32)


# ── normalize=True ──────────────────────────────────────────────────────────────────────────────────────────


def raw_rows(dtype):
    """Return 20 pairs of rows with lengths from 0.02 to 50."""
    lengths = torch.logspace(-1.7, 1.7, 20, dtype=torch.float64, device=DEVICE)[:, None]
    q, k = positive_pairs(20, 24, torch.float64)
    return (q * lengths).to(dtype), (k * lengths.roll(7, 0)).to(dtype)


def unit(x):
    """Return the rows of x divided by their lengths, computed in float32 or float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.normalize(x.to(wide), dim=1).to(x.dtype)


@pytest.mark.parametrize("loss", NORMALIZING)
@pytest.mark.parametrize("impl, dtype", [
    ("eager", torch.float64), ("eager", torch.float16), ("blockwise", torch.float32),
    ("blockwise", torch.bfloat16), ("triton", HALF[-1])], ids=str)
def test_normalize(loss, impl, dtype):
    """normalize=True has the value and gradients of unit rows from F.normalize in float64."""
    f = (LOSSES | LSE_CALLS)[loss]
    q, k = raw_rows(dtype)
    t = torch.tensor(0.07, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)

    def on_unit_rows(q, k, t):
        return f(unit(q), unit(k), t, "eager")

    exact = differentiate(on_unit_rows, q.double(), k.double(), t.double())
    ours = differentiate(lambda q, k, t: f(q, k, t, impl, normalize=True), q, k, t)
    assert_close(ours, exact, differentiate(on_unit_rows, q, k, t), dtype, 1 / 0.07, 32, 1 / 0.07 / 20)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_topk_with_normalize(impl):
    q, k = raw_rows(torch.float32)
    for keys in (k, None):
        values, columns = similarity_topk(q, keys, 3, normalize=True, impl=impl)
        expected, nearest = similarity_topk(unit(q), None if keys is None else unit(k), 3, impl=impl)
        assert torch.equal(values, expected) and torch.equal(columns, nearest)


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_normalize_accepts_any_length(impl):
    """A zero row has cosine 0 and F.normalize's gradient. Squares of float16 must not overflow or vanish."""
    q, k = raw_rows(torch.float32)
    q[3], k[5] = 0, 0
    assert not similarity_topk(q[3:4], k, 2, normalize=True, impl=impl)[0].any()
    f = lambda q, k: info_nce(q, k, 0.07, normalize=True, impl=impl)
    exact = differentiate(lambda q, k: info_nce(unit(q), unit(k), 0.07, impl="eager"), q.double(), k.double())
    for a, b in zip(differentiate(f, q, k), exact):
        assert b.isfinite().all() and b.abs().max() < 1e13
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for length in (1e5, 1e-4):                                 # float16 ranges from 6e-8 to 65504
        x, y = ((length * unit(x)).half() for x in positive_pairs(20, 24, torch.float64))
        exact = info_nce(unit(x.double()), unit(y.double()), 0.07).item()
        assert f(x, y).item() == pytest.approx(exact, rel=0.01)


@both_impls
def test_normalize_divides_a_float32_gradient_by_the_lengths(impl):
    """Gradients of unit rows, here about 1e-8, underflow in float16; divided by a length of 1e-3 they fit."""
    def f(q, k, impl):
        return 1e-6 * info_nce(q, k, 0.3, normalize=True, impl=impl)

    q, k = ((1e-3 * unit(x)).half() for x in positive_pairs(20, 24, torch.float64))
    found = differentiate(lambda q, k: f(q, k, impl), q, k)
    exact = differentiate(lambda q, k: f(q, k, "eager"), q.double(), k.double())
    for a, b in zip(found[1:], exact[1:]):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_normalize_gives_a_queue_no_gradient(impl):
    q, k = (x.requires_grad_() for x in raw_rows(torch.float32))
    queue = (2 * unit_rows(30, 24, torch.float32, 90)).requires_grad_()
    queue_loss(q, k, queue, normalize=True, impl=impl).backward()
    assert queue.grad is None and q.grad.any() and k.grad.any()


@pytest.mark.parametrize("impl, loss", [
    *itertools.product(["eager", "blockwise"], NORMALIZING),
    ("triton", "info_nce"), ("triton", "queue_loss")])
def test_normalize_under_autocast(impl, loss):
    """Same bits as for rows normalised in float32; one of q and k may already have autocast's dtype."""
    f = (LOSSES | LSE_CALLS)[loss]
    q, k = raw_rows(torch.float32)
    half_q, half_k = (x.half().float() for x in (q, k))
    with torch.autocast(DEVICE, torch.float16):
        ours = differentiate(lambda q, k: f(q, k, 0.07, impl, normalize=True), q, k)
        expected = differentiate(lambda q, k: f(unit(q), unit(k), 0.07, impl), q, k)
        mixed = f(q, k.half(), 0.07, impl, normalize=True)
        both = f(q.half(), k.half(), 0.07, impl, normalize=True)
        assert torch.equal(mixed, f(unit(q), unit(half_k), 0.07, impl))
        assert torch.equal(both, f(unit(half_q), unit(half_k), 0.07, impl))
    for a, b in zip(ours, expected):           # gathered rows are normalised twice, and two gradients added
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * b.abs().max().item() * ("gathered" in loss))


# ── every code path of the kernels ──────────────────────────────────────────────────────────────────────────

LARGE_D = {"heuristics.MAX_SMALL_D": 0, "heuristics.FEW_ROWS": 0}
SEPARATE_BACKWARD = LARGE_D | {"fused.fuses_backward": lambda *x: False}
WITH_BOUND = {"masks.FEW_ROWS": 0, "gpu.shift.FEW_ROWS": 0}  # as for many rows: bound, not row maxima
ONE_MULTIPROCESSOR = {"gpu.launch.EMULATED_MULTIPROCESSORS": 1}
LSE_IN_BLOCKS = {"gpu.lse_forward.table_block_shape": lambda q, k, square: (128, 128)}
STRIPS_OF_128 = {"gpu.fused_forward_backward.strip_height": lambda *x: 128}
ALL_IN_BLOCKS = LSE_IN_BLOCKS | {
    "gpu.gradient_large_d.weight_block_shape": lambda q, k, square: (128, 128)}
# {path that a shape or a GPU can select: (settings that force it, losses that use it in float32, the same in
# half types)}. The rows are 150, at least two tiles. In float32 every D counts as large.
CODE_PATHS = {
    "lse with bound": (WITH_BOUND, "clip_loss nt_xent", "clip_loss nt_xent"),
    "pointers": ({"gpu.launch.EMULATED_CAPABILITY": 8},
                 "info_nce clip_loss queue_loss linear sigmoid_loss", "info_nce clip_loss sigmoid_loss"),
    "temperature as a number": (
        {f"gpu.{module}.is_host_scalar": lambda number, x: True for module in ("launch", "sigmoid")},
        "info_nce clip_loss queue_loss sigmoid_loss", "info_nce clip_loss queue_loss sigmoid_loss"),
    "queue, a program for all columns": ({"gpu.launch.EMULATED_MULTIPROCESSORS": 0}, "", "queue_loss"),
    "lse in blocks": (LSE_IN_BLOCKS,
                      "clip_loss nt_xent lse", "info_nce clip_loss nt_xent self_similarity"),
    "lse in blocks with bound": (LSE_IN_BLOCKS | WITH_BOUND,
                                 "clip_loss nt_xent", "clip_loss self_similarity"),
    "several tiles in a program": (ONE_MULTIPROCESSOR | LARGE_D | WITH_BOUND,
                                   "info_nce offset clip_loss nt_xent linear sigmoid_loss",
                                   "info_nce clip_loss nt_xent linear sigmoid_loss"),
    "large D": (LARGE_D, "", "info_nce offset clip_loss nt_xent gathered_nt_xent lse self_similarity"),
    "strips": (LARGE_D | STRIPS_OF_128,
               "info_nce gathered_nt_xent linear ignoring", "info_nce offset gathered_nt_xent linear"),
    "strips with bound": (WITH_BOUND | STRIPS_OF_128, "info_nce offset gathered_nt_xent linear ignoring", ""),
    "wide tiles": (LARGE_D | {"gpu.fused_forward_backward.MIN_WIDE_D": 0}, "", "offset linear"),
    "separate backward": (SEPARATE_BACKWARD | WITH_BOUND,
                          "info_nce offset gathered_nt_xent linear ignoring", "info_nce linear ignoring"),
    "separate backward in blocks": (SEPARATE_BACKWARD | ALL_IN_BLOCKS,
                                    "info_nce clip_loss nt_xent linear lse self_similarity sigmoid_loss",
                                    "offset clip_loss nt_xent gathered_nt_xent sigmoid_loss"),
    "separate backward in blocks with bound": (SEPARATE_BACKWARD | ALL_IN_BLOCKS | WITH_BOUND,
                                               "clip_loss nt_xent linear self_similarity",
                                               "clip_loss nt_xent")}


@pytest.mark.parametrize("path, dtype, loss", [
    (path, dtype, loss) for path, (_, full, half) in CODE_PATHS.items() for dtype in TRITON
    for loss in (full if dtype == torch.float32 else half).split()], ids=str)
def test_every_code_path(path, dtype, loss, monkeypatch):
    patch_kernels(monkeypatch, CODE_PATHS[path][0])
    compare((LOSSES | LSE_CALLS)[loss], *positive_pairs(150, 40, dtype), units=32 if loss in LOSSES else 16)


@pytest.mark.parametrize("impl, dtype, large_d", [
    ("blockwise", torch.float32, True), ("triton", torch.float32, True),
    *itertools.product(["triton"], HALF, [False, True])], ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "nt_xent", "info_nce"])
@pytest.mark.parametrize("temperature", [0.02, 0.01, 0.003])
def test_exponentials_beyond_the_range_of_float32(temperature, loss, impl, dtype, large_d, monkeypatch):
    """Subtracting a common bound works as long as sums do not underflow.
    At τ = 0.01, exp2(s) of unit rows would overflow without the bound. At 0.003, most rows' sums underflow
    with the bound, and these rows must be computed again with their own maximum."""
    patch_kernels(monkeypatch, WITH_BOUND | (LARGE_D if large_d else {}))
    q, k = positive_pairs(40, 24, dtype)
    k = torch.where(torch.arange(40, device=DEVICE)[:, None] % 3 == 0, -q, k)
    q[-1] *= 4                                                 # the bound counts the last rows too
    compare(LOSSES[loss], q, k, temperature, impl, units=64)


def test_a_triangle_has_each_tile_once():
    import triton
    import triton.language as tl

    from kernels.gpu import tiles

    @triton.jit
    def tiles_kernel(X, Y, side, tile_at: tl.constexpr):
        x, y = tile_at(tl.program_id(0), side, side, True)
        tl.store(X + tl.program_id(0), x)
        tl.store(Y + tl.program_id(0), y)

    for side in range(1, 20):
        x, y = torch.full((2, side * (side + 1) // 2), -1, dtype=torch.int32, device=DEVICE)
        tiles_kernel[len(x),](x, y, side, tiles.tile_at)
        found = sorted(tuple(sorted(pair)) for pair in zip(x.tolist(), y.tolist()))
        assert found == [(i, j) for i in range(side) for j in range(i, side)]


@pytest.mark.parametrize("dtype", TRITON, ids=str)
@pytest.mark.parametrize("order", ["sorted", "only columns sorted", "not sorted"])
def test_group_ranges(order, dtype, monkeypatch):
    """Sorted column groups let a program skip the columns of other groups; the results stay the same."""
    from kernels.masks import column_ranges
    patch_kernels(monkeypatch, WITH_BOUND)
    q, k = unit_rows(200, 24, dtype, 47), unit_rows(270, 24, dtype, 48)
    groups = [torch.randint(0, 20, (n,), generator=torch.Generator().manual_seed(n)) for n in (200, 270)]
    if order == "sorted":  # groups end one column after the start of a tile
        groups = [(torch.arange(200) - 78).clamp(min=0) // 50, torch.arange(270) // 65]
    groups[1] = groups[1] if order == "not sorted" else groups[1].sort()[0]
    groups[0][:64] = 30  # a whole tile of rows without columns
    groups = [groups[0].to(DEVICE), groups[1].int().to(DEVICE)]
    mask = make_mask(len(q), len(k), False, within=groups)
    columns = column_ranges(mask, 64).diff().clamp(min=0)
    assert len(columns) == 4 and ((columns == 270).all() if order == "not sorted" else columns[0] < 270)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, within=groups, impl=impl), q, k)


# ── blockwise ───────────────────────────────────────────────────────────────────────────────────────────────


STRIPS = {"blockwise.ONE_STRIP": 0, "blockwise.MIN_STRIP_ROWS": 32}
STRIPS_OF_3 = {"blockwise.ONE_STRIP": 0, "blockwise.MIN_STRIP_ROWS": 3, "blockwise.STRIP_LOGITS": 1}


@pytest.mark.parametrize("strips", [{}, STRIPS_OF_3], ids=["one strip", "strips of 3"])
@pytest.mark.parametrize("name", MASKS)
def test_strips(name, strips, monkeypatch):
    """The rows are one strip, or are cut into strips of 3, the last of which is shorter."""
    patch_kernels(monkeypatch, strips)
    q, k = unit_rows(37, 12, torch.float64, 12), unit_rows(53, 12, torch.float64, 13)
    arguments = mask_arguments(name, 37, 53)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **arguments), q, k, impl="blockwise")
    if name == "all":
        for loss in LOSSES:
            if loss not in ("queue_loss", "ignoring"):
                compare(LOSSES[loss], q, k[:37], impl="blockwise", units=32)


@pytest.mark.parametrize("name", ["self_similarity", "pair"])
@pytest.mark.parametrize("temperature", [0.07, 0.01])
def test_strips_of_self_similarity_start_on_the_diagonal(name, temperature, monkeypatch):
    """Only the upper triangle is computed. exp(s_ij) serves (i, j) and (j, i), unless it could overflow."""
    patch_kernels(monkeypatch, STRIPS_OF_3)
    q = unit_rows(38, 12, torch.float64, 12)
    compare(LSE_CALLS[name], q, q, temperature, impl="blockwise", units=32)
    mask = make_mask(len(q), len(q), True, "pair")
    found = blockwise.logit_strips(q, q, torch.tensor(1.0), mask, triangle=True)
    assert sum(s.numel() for _, _, s in found) == sum((38 - i) * min(3, 38 - i) for i in range(0, 38, 3))


@pytest.mark.parametrize("order", ["sorted", "only columns sorted", "only rows sorted"])
def test_sorted_groups_skip_other_groups(order, monkeypatch):
    """For sorted groups the work is proportional to the number of pairs within groups; results are the same.
    Groups have 1 to 90 rows; some have no columns, and some columns have no rows."""
    patch_kernels(monkeypatch, STRIPS | {"blockwise.STRIP_LOGITS": 32 * 150})
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(1, 30, (40,), generator=generator)   # rows and columns of each group
    widths = torch.randint(0, 60, (40,), generator=generator)
    sizes[[0, 3, 20]], widths[[0, 3, 12, 20, 39]] = 90, torch.tensor([0, 160, 0, 0, 0])  # 90 × 160: 3 strips
    groups = [torch.arange(40).repeat_interleave(counts) - 7 for counts in (sizes, widths)]
    shuffled = {"only columns sorted": 0, "only rows sorted": 1}.get(order)
    if shuffled is not None:
        groups[shuffled] = groups[shuffled][torch.randperm(len(groups[shuffled]), generator=generator)]
    groups = [groups[0].int().to(DEVICE), groups[1].to(DEVICE)]
    n, m = map(len, groups)
    q, k = unit_rows(n, 12, torch.float64, 49), unit_rows(m, 12, torch.float64, 50)
    compare(lambda q, k, t, impl: similarity_lse(q, k, t, within=groups, impl=impl), q, k, impl="blockwise")
    values, columns = similarity_topk(q, k, 5, within=groups, impl="blockwise")
    expected_values, expected_columns = similarity_topk(q, k, 5, within=groups, impl="eager")
    torch.testing.assert_close(values, expected_values, atol=1e-12, rtol=0)
    assert torch.equal(columns, expected_columns) and (columns[:, 4] == -1).any()
    selected = make_mask(len(q), len(k), False, within=groups)
    computed = [s.shape for _, _, s in blockwise.logit_strips(q, k, torch.tensor(1.0), selected)]
    kept, total = (sizes * widths).sum(), sum(height * width for height, width in computed)
    assert sum(height for height, _ in computed) == n
    assert all(height * width <= max(blockwise.STRIP_LOGITS, 32 * width) for height, width in computed)
    assert kept <= total < 2.5 * kept if order == "sorted" and not GPU else total == n * m


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""
    entries = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.entries = max(self.entries, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_blockwise_never_holds_the_matrix(monkeypatch):
    patch_kernels(monkeypatch, STRIPS | {"blockwise.STRIP_LOGITS": 2 ** 16})
    q, t = unit_rows(400, 8, torch.float32, 16), torch.tensor(0.1, device=DEVICE)
    ids = torch.arange(400, device=DEVICE) // 3
    for exclude in ("diagonal", (ids, ids)):
        selected = make_mask(len(q), len(q), False, exclude)
        with LargestTensor() as largest:
            lse, sums = blockwise.similarity_lse(q, q, t, selected)
            one = torch.ones_like(lse)
            blockwise.similarity_lse_backward(q, q, t, selected, one, sums, True, True, True)
            if exclude == "diagonal":
                lse, sums = blockwise.similarity_lse(q, None, t, selected)
                blockwise.similarity_lse_backward(q, None, t, selected, one, sums, True, True, True)
                blockwise.sigmoid_loss(q, q, t, t, selected, True, True, True, True)
            for k, both in ((q, False), (q, True), (None, False)) if exclude == "diagonal" else ():
                blockwise.softmax_loss(q, k, t, selected, None, both, True, True, True)
        assert largest.entries <= blockwise.STRIP_LOGITS < 400 * 400


# ── limits, precision, autocast ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n, m, size", [
    (1, 1, 4), (2 ** 20, 2 ** 20, 2), (2 ** 17, 300, 4), (64, 2 ** 22, 2), (1, 2 ** 24, 2), (8192, 8192, 2)])
def test_blocks_fit_their_buffers(n, m, size):
    """Blocks of weights, strips of logits and tables of row statistics stay within their limits."""
    whole_tiles = lambda count: heuristics.round_up(count, 128)
    q, k = (torch.empty(count, 1, dtype=torch.float32 if size == 4 else torch.float16) for count in (n, m))
    for square in (False, True):
        height, width = heuristics.weight_block_shape(q, q if square else k, square)
        bytes_used = whole_tiles(height) * whole_tiles(width) * size
        assert 1 <= height <= n and 1 <= width <= max(n, m) and bytes_used <= heuristics.WEIGHT_BUFFER_BYTES
        assert height in (n, whole_tiles(height)) and width in (n if square else m, whole_tiles(width))
        assert square or height * width == n * m or bytes_used > heuristics.WEIGHT_BUFFER_BYTES // 4
    assert whole_tiles(heuristics.strip_height(size, m, 64)) * whole_tiles(m) * size <= heuristics.STRIP_BYTES
    assert heuristics.strip_height(2, 2 ** 17, 4096) == 4096       # as much memory as the keys
    for d, square in itertools.product((1, 768, 2 ** 17), (False, True)):
        q, k = (torch.empty(count, d, dtype=torch.half, device="meta") for count in (n, n if square else m))
        height, width = heuristics.table_block_shape(q, k, square)
        tables = (2 if square else 1) * 2 * 4 * height * width // 128
        assert 0 < height and 0 < width and height % 128 == width % 128 == 0
        assert tables <= max(heuristics.TABLE_BYTES, min(2 * (q.numel() + k.numel()), heuristics.STRIP_BYTES))


@both_impls
@all_triton
def test_gradient_is_accurate_for_small_losses(impl, dtype):
    """At a loss of 5e-3, eager loses digits in 1 − 0.995, the positive's gradient weight; ours must not."""
    q = unit_rows(256, 64, torch.float64, 19)
    k = F.normalize(q + 0.5 * unit_rows(256, 64, torch.float64, 20), dim=1).to(dtype)
    q = q.to(dtype)

    def f(impl, *x):  # times 1000, because float16 cannot hold such small gradients
        return differentiate(lambda q, k: 1000 * info_nce(q, k, 0.07, impl=impl), *x)

    exact, ours, eager = f("eager", q.double(), k.double()), f(impl, q, k), f("eager", q, k)
    assert 1 < exact[0] < 10
    error, eager = (((x[1] - exact[1]).norm() / exact[1].norm()).item() for x in (ours, eager))
    assert error < {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    assert error < eager / 4


@pytest.mark.parametrize("impl", ["eager", "blockwise", "triton"])
def test_all_targets_ignored_or_one_class(impl):
    """In both cases the loss and its gradient are 0. Targets may be strided."""
    h, w = unit_rows(4, 8, torch.float32, 21).requires_grad_(), unit_rows(6, 8, torch.float32, 22)
    targets = torch.zeros(4, dtype=torch.long, device=DEVICE)
    expected = linear_cross_entropy(h, w, torch.arange(4, device=DEVICE), impl=impl)
    strided = torch.arange(8, device=DEVICE)[:4].repeat_interleave(2)[::2]
    assert linear_cross_entropy(h, w, strided, impl=impl) == expected
    for classes, ignore_index in ((w, 0), (w[:1], -100)):
        loss = linear_cross_entropy(h, classes, targets, ignore_index, impl=impl)
        gradient, = torch.autograd.grad(loss, h)
        assert loss == 0 and not gradient.any()


@both_impls
@pytest.mark.parametrize("n", [9, 1100])                       # in Triton, 1100 rows have another path
def test_row_weights(impl, n):
    q, k = (x[:, :8] for x in positive_pairs(n, 20, torch.float32))
    weights = torch.linspace(0, 1, n, device=DEVICE)

    def weighted(q, k):
        call = prepare(q, k, 0.2, exclude="diagonal", positives=True, impl=impl)
        return fused.softmax_loss(call, weights=weights)

    def exact(q, k):
        losses = F.cross_entropy(q @ k.T / 0.2, torch.arange(n, device=DEVICE), reduction="none")
        return weights.double() @ losses

    for a, b in zip(differentiate(weighted, q, k), differentiate(exact, q.double(), k.double())):
        assert (a - b).norm() < 1e-3 * b.norm()


@both_impls
def test_sup_con_gradient_in_float16(impl):
    """It is the difference of two gradients, each of which would overflow in float16."""
    z = F.normalize(unit_rows(4, 16, torch.float64, 47)[:, None] + 0.05 * unit_rows(
        16, 16, torch.float64, 48).view(4, 4, 16), dim=2).view(8, 2, 16).half().requires_grad_()
    labels, found = torch.arange(8, device=DEVICE) // 2, []
    for how, rows in ((impl, z), ("eager", z.double())):
        loss = sup_con_loss(rows, labels, 0.07, impl=how) * 2.0 ** 16
        found.append(torch.autograd.grad(loss, z)[0].double())
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


@both_impls
def test_repeated_targets_in_float16(impl):
    """The gradient of a frequent word sums over a thousand rows; summed in float16 it would stop growing."""
    h, w = unit_rows(1500, 16, torch.float16, 45), unit_rows(40, 16, torch.float16, 46)
    targets = torch.zeros(1500, dtype=torch.long, device=DEVICE)

    def weight_gradient(impl, *x):
        return differentiate(
            lambda *x: 1000 * linear_cross_entropy(*x, targets, temperature=0.2, impl=impl), *x)[2]

    exact, ours = weight_gradient("eager", h.double(), w.double()), weight_gradient(impl, h, w)
    assert (ours - exact).norm() < 1e-3 * exact.norm()


def as_tf32(x, half_a_step=0):
    """Truncate float32 to TF32's 10 bits, as tensor cores do; half_a_step = 2 ** 12 rounds instead."""
    return ((x.contiguous().view(torch.int32) + half_a_step) & -2 ** 13).view(torch.float32)


@pytest.mark.skipif(GPU, reason="simulates a GPU")
@pytest.mark.parametrize("loss, changes", [
    ("info_nce", {}), ("info_nce", {"fused.fuses_backward": lambda *x: False}), ("clip_loss", WITH_BOUND)])
def test_tf32_is_rounded_not_truncated(loss, changes, monkeypatch):
    """Tensor cores truncate float32 operands to TF32. Our operands are rounded first, as in cuBLAS."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from kernels.gpu import gradient_large_d
    multiply, add_product = InterpreterBuilder.create_dot, gradient_large_d.add_product

    def truncated(x):
        return TensorHandle(as_tf32(torch.from_numpy(x.data.copy())).numpy(), x.dtype)

    def add_product_in_tf32(sums, a, b, overwrite):
        assert torch.equal(as_tf32(a), a) and torch.equal(as_tf32(b), b)
        add_product(sums, a, b, overwrite)

    modules = "gradient_large_d", "fused_forward_backward"
    patch_kernels(monkeypatch, changes | {f"gpu.{name}.add_product": add_product_in_tf32 for name in modules})
    monkeypatch.setattr(InterpreterBuilder, "create_dot",
                        lambda self, a, b, *rest: multiply(self, truncated(a), truncated(b), *rest))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    q, k = positive_pairs(150, 40, torch.float32)
    rounded = [as_tf32(x, 2 ** 12).double() for x in (q, k)]
    f, t = LOSSES[loss], torch.tensor(0.05)
    exact = differentiate(lambda *x: f(*x, t.double(), "eager"), q.double(), k.double())
    of_rounded = differentiate(lambda *x: f(*x, t.double(), "eager"), *rounded)
    ours = differentiate(lambda *x: f(*x, t, "triton"), q, k)
    truncated_rows = (as_tf32(x).double() for x in (q, k))
    of_truncated = differentiate(lambda *x: f(*x, t.double(), "eager"), *truncated_rows)
    for a, b, c, d in zip(ours, of_rounded, of_truncated, exact):
        assert (a - d).norm() < 1.5 * (b - d).norm() < (c - d).norm()


@both_impls
@pytest.mark.parametrize("n, multiprocessors", [(1, 132), (5, 1), (64, 132), (65, 132)])
def test_topk(impl, n, multiprocessors, monkeypatch):
    """n = 65 exceeds the 64 slots of the Triton kernel. A program has 1 column tile or half of them."""
    patch_kernels(monkeypatch, {"gpu.launch.EMULATED_MULTIPROCESSORS": multiprocessors})
    q, k = unit_rows(30, 16, torch.float32, 42), unit_rows(230, 16, torch.float32, 43)
    values, columns = similarity_topk(q, k, n, exclude="diagonal", offset=3, impl=impl)
    exact, expected = similarity_topk(q.double(), k.double(), n, exclude="diagonal", offset=3, impl="eager")
    assert torch.equal(columns, expected) and values.dtype == torch.float32 and columns.dtype == torch.int64
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)
    if n == 1:  # a unit row is its own nearest neighbour
        assert torch.equal(similarity_topk(k, None, 1, impl=impl)[1][:, 0], torch.arange(230, device=DEVICE))


@pytest.mark.parametrize("loss", LOSSES | LSE_CALLS)
@pytest.mark.parametrize("impl, dtype, large_d", [
    ("blockwise", torch.float16, False), ("blockwise", torch.bfloat16, False),
    *itertools.product(["triton"], HALF, [False, True])], ids=str)
def test_autocast_multiplies_in_half_and_sums_in_float32(loss, impl, dtype, large_d, monkeypatch):
    """Gradients stay in float32, as float16 could not hold them. Rows may have autocast's dtype already."""
    patch_kernels(monkeypatch, LARGE_D if large_d else {})
    f, inputs = (LOSSES | LSE_CALLS)[loss], positive_pairs(38, 24, torch.float32)
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
def test_first_launch_of_a_thread():
    """PyTorch's backward thread has no CUDA context before its first launch, and descriptors need one."""
    code = ("import torch, kernels; q, k = torch.rand(2, 5000, 128, device='cuda').bfloat16().unbind();"
            "kernels.nt_xent(q.requires_grad_(), k, 10.0).backward()")
    subprocess.run([sys.executable, "-c", code], check=True)


@on_a_gpu
@both_impls
@pytest.mark.parametrize("loss", ["info_nce", "clip_loss", "nt_xent", "queue_loss"])
def test_cuda_graph(loss, impl):
    """A CUDA graph captures forward and backward, so nothing synchronises; a replay reads the new q."""
    q, k = (unit_rows(1024, 128, torch.bfloat16, seed).requires_grad_() for seed in (51, 52))

    def step():
        return torch.autograd.grad(LOSSES[loss](q, k, 0.07, impl), q)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(unit_rows(1024, 128, torch.bfloat16, 53))
    graph.replay()
    assert torch.equal(captured, step())


@on_a_gpu
@pytest.mark.parametrize("d", [64, 128, 768, 1024])
@pytest.mark.parametrize("dtype, precision", [
    (torch.float32, "highest"), (torch.float32, "high"), *((dtype, "highest") for dtype in HALF)], ids=str)
def test_gpu_at_size(dtype, precision, d):
    """Check every mask on thousands of rows, in all dtypes and precisions."""
    q, k = unit_rows(4099, d, dtype, 29), unit_rows(8201, d, dtype, 30)
    torch.set_float32_matmul_precision(precision)
    try:
        for name in MASKS:
            arguments = mask_arguments(name, 4099, 8201)
            compare(lambda q, k, t, impl: similarity_lse(q, k, t, impl=impl, **arguments), q, k)
    finally:
        torch.set_float32_matmul_precision("highest")


@on_a_gpu
def test_gpu_memory():
    """For 32,768 × 32,768 rows less than 512 MiB is used; the bfloat16 matrix alone would be 2 GiB."""
    q, k = (unit_rows(32768, 128, torch.bfloat16, seed).requires_grad_() for seed in (31, 32))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    info_nce(q, k, 0.07).backward()
    assert torch.cuda.max_memory_allocated() - before < 512 * 2 ** 20
