"""The cases: losses, masks, code paths and random draws from the tables of tests/kernels.

Only this module, and the driver, know the package `kernels` and its tests.
"""
import functools
import itertools
from typing import Any, NamedTuple
from unittest import mock

import pytest
import test_fuzz
import test_kernels as tests
import torch

from kernels.similarity import similarity_lse, similarity_topk

# short name: (dtype, precision of float32 products)
DTYPES = {"bf16": (torch.bfloat16, "high"), "f16": (torch.float16, "high"), "f32": (torch.float32, "high"),
          "f32 full": (torch.float32, "highest")}
LOSSES = tests.LOSSES | tests.LSE_CALLS
LARGE_D = tests.LARGE_D | tests.WITH_BOUND
SEVERAL_TILES = {"gpu.lse_forward.TARGET_PROGRAMS": 1}         # a program processes several tiles in a loop
# errors that rounding explains at τ ≥ 0.07, of a value and of a gradient, as a share of the largest entry.
# Products of half types are exact, but their gradients are rounded.
USUAL = {(torch.bfloat16, "high"): (2e-5, 1e-2), (torch.float16, "high"): (2e-5, 2e-3),
         (torch.float32, "high"): (4e-3, 6e-3), (torch.float32, "highest"): (2e-5, 2e-5)}


class Case(NamedTuple):
    """A case: compare() raises AssertionError if the result is wrong, else it returns a few words."""
    title: str
    precision: str           # of float32 products
    compare: Any


class Inputs(NamedTuple):
    q: Any
    k: Any
    temperature: float = 0.07


# ── comparisons ─────────────────────────────────────────────────────────────────────────────────────────────


def all_kernels():
    """Return the names of all kernels of the package."""
    import test_compile
    return {kernel.fn.__name__ for kernel in test_compile.all_kernels()}


def pretend(chip):
    """Let the host code accept CPU tensors and choose tiles for the chip, such as 90 for sm_90."""
    all_kernels()     # imports all modules: they copy heuristics.FEW_ROWS, which cases will patch
    from kernels.gpu import launch
    launch.INTERPRETED, launch.EMULATED_CAPABILITY = True, chip // 10


def compare_with_eager(f, inputs, precision, settings, units):
    """Compare f(q, k, temperature, impl) with eager in float64, with the tolerances of tests/kernels.

    If products are in TF32, eager gets rounded rows, and the unit of rounding is that of float16, which has
    as many bits.
    """
    (q, k, temperature), t = inputs, torch.tensor(inputs.temperature)
    in_tf32 = q.dtype == torch.float32 and precision == "high"
    rows = [tests.as_tf32(x, 2 ** 12) for x in (q, k)] if in_tf32 else [q, k]
    exact = tests.differentiate(lambda *x: f(*x, "eager"), q.double(), k.double(), t.double())
    eager = tests.differentiate(lambda *x: f(*x, "eager"), *rows, t)
    with pytest.MonkeyPatch.context() as patch:
        tests.patch_kernels(patch, settings)
        ours = tests.differentiate(lambda *x: f(*x, "triton"), q, k, t)
    dtype = torch.float16 if in_tf32 else q.dtype
    tests.assert_close(ours, exact, eager, dtype, 1 / temperature, units)
    # gradients below the smallest number of float16 are lost
    lost = 2.0 ** -24 if q.dtype == torch.float16 else 0.0
    errors = [relative_error(a, b, lost) for a, b in zip(ours[:3], exact)]
    value, gradient = USUAL[q.dtype, precision]
    usual = errors[0] <= value and max(errors[1:]) <= gradient
    assert usual or temperature < 0.07, f"errors of value, dq, dk beyond rounding: {errors}"
    return f"largest error {max(errors):.0e}"


def relative_error(a, b, lost):
    """Return the largest error of a beyond `lost`, as a share of the largest entry of b."""
    error = (a - b).nan_to_num().abs().max().item()            # −∞ − (−∞) is NaN
    return max(error - lost, 0) / max(b.nan_to_num(neginf=0.0).abs().max().item(), 1e-30)


def compare_topk(n, d, mask, dtype, precision):
    """Compare similarity_topk with eager in float64. Columns with equal logits may differ."""
    arguments = tests.mask_arguments(mask, 150, 270)
    q, k = tests.unit_rows(150, d, dtype, 1), tests.unit_rows(270, d, dtype, 2)
    values, columns = similarity_topk(q, k, n, impl="triton", **arguments)
    exact, expected = similarity_topk(q.double(), k.double(), n, impl="eager", **arguments)
    found = (q.double() @ k.double().T).gather(1, columns.clamp(min=0)).where(columns >= 0, -torch.inf)
    assert torch.equal(columns == -1, expected == -1) and torch.equal(columns == -1, values.isneginf())
    tolerance = 1e-3 if (dtype, precision) == (torch.float32, "high") else 1e-5
    for x in (values.double(), found):
        torch.testing.assert_close(x, exact, rtol=tolerance, atol=tolerance)
    assert all(len(row.unique()) == len(row) for row in (row[row >= 0] for row in columns)), "a column twice"
    return ""


def lse_case(mask, n, m, d, label, frozen_keys=False, strided=False):
    """Return the case of a similarity_lse with a mask of tests/kernels."""
    (dtype, precision), arguments = DTYPES[label], tests.mask_arguments(mask, n, m)

    def lse(q, k, t, impl):
        keys = k.detach() if frozen_keys else k
        return similarity_lse(q, keys, t, impl=impl, **arguments) + 0 * k.sum()

    inputs = Inputs(tests.unit_rows(n, d, dtype, 1, strided), tests.unit_rows(m, d, dtype, 2, strided))
    title = f"lse {mask} {n}×{m}×{d} {label}" + (", frozen keys" if frozen_keys else "")
    return Case(title, precision, functools.partial(compare_with_eager, lse, inputs, precision, {}, 16))


def loss_case(name, n, d, label, settings=None, about=""):
    """Return the case of a loss of tests/kernels."""
    (dtype, precision), units = DTYPES[label], 32 if name in tests.LOSSES else 16
    # in many dimensions negatives are far away: at a low temperature all gradients would nearly vanish
    inputs = Inputs(*tests.positive_pairs(n, d, dtype), 0.07 if d < 256 else 0.3)
    title = f"{name} {n}×{d} {label}" + (f", {about}" if about else "")
    return Case(title, precision, functools.partial(compare_with_eager, LOSSES[name], inputs, precision,
                                                    settings or {}, units))


def topk_case(n, d, mask, label):
    dtype, precision = DTYPES[label]
    return Case(f"topk {n} of {d} {mask} {label}", precision,
                functools.partial(compare_topk, n, d, mask, dtype, precision))


# ── sections ────────────────────────────────────────────────────────────────────────────────────────────────


def masks(chip):
    for label in DTYPES:
        for name in tests.MASKS:
            yield lse_case(name, 300, 500, 64, label)
        for name in ("all", "diagonal similar within"):
            for d in (128, 256, 768):
                yield lse_case(name, 150, 270, d, label)
        yield lse_case("diagonal", 150, 270, 41, label, strided=True)


def frozen_keys(chip):
    for label, d in itertools.product(("bf16", "f16"), (64, 256)):
        for name in ("all", "ids within", "diagonal similar within"):
            yield lse_case(name, 150, 500, d, label, frozen_keys=True)


def losses(chip):
    for label, name in itertools.product(DTYPES, LOSSES):
        yield loss_case(name, 150, 64, label)
    for label, name, d in itertools.product(("bf16", "f32"), LOSSES, (256, 768)):
        yield loss_case(name, 300, d, label)


def code_paths(chip):
    """Yield the code paths of tests/kernels, but on sm_80 none of other GPUs."""
    for path, (settings, full, half) in tests.CODE_PATHS.items():
        if chip == 80 and "gpu.launch.EMULATED_CAPABILITY" in settings:
            continue
        for label in DTYPES:
            for name in (full if label.startswith("f32") else half).split():
                yield loss_case(name, 150, 40, label, settings, path)


def large_d(chip):
    """Yield every loss with 1,024 and 4,096 features: on the paths for many rows, and some for few rows."""
    for d, label in itertools.product((1024, 4096), DTYPES):
        for name in LOSSES:
            yield loss_case(name, 70, d, label, LARGE_D, "many rows")
        for name in ("info_nce", "clip_loss", "nt_xent"):
            yield loss_case(name, 70, d, label, about="few rows")
        yield topk_case(16, d, "diagonal similar within", label)


def several_tiles(chip):
    """Yield programs that process several tiles, in loops that Triton pipelines."""
    for bound, (label, d) in itertools.product((True, False), (
            ("bf16", 64), ("bf16", 256), ("f16", 128), ("f32", 64), ("f32 full", 40))):
        for name in ("clip_loss", "nt_xent", "lse"):
            settings = SEVERAL_TILES | (tests.WITH_BOUND if bound else {})
            yield loss_case(name, 600 if d <= 128 else 450, d, label, settings,
                            "several tiles" + (" with bound" if bound else ""))


def sorted_groups(chip):
    """Yield sorted groups, which let programs skip columns; a whole tile of rows has no columns."""
    for label, frozen in itertools.product(DTYPES, (False, True)):
        dtype, precision = DTYPES[label]
        rows, columns = (torch.arange(200) - 78).clamp(min=0) // 50, torch.arange(270).int() // 65
        rows[:64] = 30

        def lse(q, k, t, impl, frozen=frozen, groups=(rows, columns)):
            keys = k.detach() if frozen else k
            return similarity_lse(q, keys, t, within=groups, impl=impl) + 0 * k.sum()

        inputs = Inputs(tests.unit_rows(200, 24, dtype, 47), tests.unit_rows(270, 24, dtype, 48))
        yield Case(f"sorted groups {label}" + (", frozen keys" if frozen else ""), precision,
                   functools.partial(compare_with_eager, lse, inputs, precision,
                                     tests.WITH_BOUND | SEVERAL_TILES, 16))


def extremes(chip):
    """Yield temperatures at which exp2 overflows without the bound, or sums underflow with it."""
    for label, large, name, temperature in itertools.product(
            ("bf16", "f16", "f32"), (False, True), ("clip_loss", "nt_xent", "info_nce"), (0.01, 0.003)):
        dtype, precision = DTYPES[label]
        q, k = tests.positive_pairs(40, 24, dtype)
        k = torch.where(torch.arange(40)[:, None] % 3 == 0, -q, k)
        settings = LARGE_D if large else tests.WITH_BOUND
        yield Case(f"{name} τ {temperature} {label}" + (", large D" if large else ""), precision,
                   functools.partial(compare_with_eager, LOSSES[name], Inputs(q, k, temperature), precision,
                                     settings, 64))


def fuzz(chip):
    """Yield random cases: shapes, strides, types of ids, masks."""
    for seed in range(40):
        with mock.patch.dict(test_fuzz.DTYPES, triton=[torch.float32, torch.float16, torch.bfloat16],
                             clear=True):
            _, q, k, temperature, arguments = test_fuzz.draw(seed)

        def lse(q, k, t, impl, arguments=arguments):
            return similarity_lse(q, k, t, impl=impl, **arguments)

        title = f"seed {seed} {tuple(q.shape)} {tuple(k.shape)} {q.dtype} {q.stride()} {list(arguments)}"
        yield Case(title, "high", functools.partial(
            compare_with_eager, lse, Inputs(q, k, temperature), "high",
            test_fuzz.MANY_ROWS if seed % 2 else {}, 64))


def topk(chip):
    for label, n, name in itertools.product(DTYPES, (2, 16, 64), ("all", "diagonal similar within")):
        yield topk_case(n, 72, name, label)


def sample(chip):
    """Yield a few cases that launch every kernel and compile fast."""
    yield lse_case("diagonal", 150, 140, 41, "bf16")
    yield lse_case("all", 70, 140, 64, "f16", frozen_keys=True)
    yield loss_case("clip_loss", 150, 64, "bf16", tests.WITH_BOUND, "bound")
    yield loss_case("info_nce", 140, 40, "f32", tests.WITH_BOUND, "bound")
    yield loss_case("clip_loss", 140, 64, "f16", tests.LARGE_D, "large D")
    yield loss_case("sigmoid_loss", 140, 64, "f16")
    yield topk_case(2, 64, "all", "bf16")


SECTIONS = {function.__name__: function for function in (
    masks, losses, frozen_keys, code_paths, large_d, sorted_groups, several_tiles, extremes, fuzz, topk)}


def in_turn(chip, sections):
    """Yield (section, case), one of each section in turn."""
    for cases in itertools.zip_longest(*(SECTIONS[name](chip) for name in sections)):
        for name, case in zip(sections, cases):
            if case is not None:
                yield name, case
