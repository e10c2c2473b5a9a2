"""The contract of the losses: value and gradients of each public loss equal those of its formula in float64.

The limit is 1e-10 in float64. In other dtypes "eager" may have the rounding errors of a textbook formula, and
others at most a few times eager's errors. Each call is repeated: the same bits. Only public names are used.
"""
import inspect
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels

from . import loss_formulas as formulas

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"                              # Triton's interpreter runs on the CPU
BOTH = ["eager", "blockwise"]
IMPLS = {torch.float64: BOTH, torch.float32: [*BOTH, "triton"], torch.float16: [*BOTH, "triton"],
         torch.bfloat16: [*BOTH, "triton"] if GPU else BOTH}   # the interpreter's bfloat16 products are wrong
# limits of eager's error; and what others may add to three times eager's error, which may happen to be tiny
EAGER = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
MORE = {torch.float64: 1e-10, torch.float32: 5e-7, torch.float16: 3e-4, torch.bfloat16: 2e-3}


@pytest.fixture(autouse=True)
def scripts_stay_on_the_cpu():
    """Replace conftest's fixture, which hides the GPU."""


def cast(x, dtype, device):
    """Return x on the device; rows of floats in this dtype, numbers in float32, or in float64 for float64."""
    if isinstance(x, tuple):
        return tuple(cast(part, dtype, device) for part in x)
    if not isinstance(x, torch.Tensor):
        return x
    number = dtype if dtype == torch.float64 or x.dim() else torch.float32
    return x.to(device, number if x.is_floating_point() else None)


def differentiate(f, arguments):
    """Return {part: tensor in float64}: the value of f, and its gradients in all tensors of floats."""
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items()
              if isinstance(x, torch.Tensor) and x.is_floating_point()}
    value = f(**arguments | leaves)
    double = all(x.dtype == torch.float64 for x in leaves.values())
    assert value.dtype == (torch.float64 if double else torch.float32), f"{f.__name__}: {value.dtype}"
    parts = {"value": value}
    if value.requires_grad:
        weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device)
        total = (value.where(value.isfinite(), 0) * weights.view_as(value)).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        parts |= {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients)}
    return {part: x.detach().double().cpu() for part, x in parts.items()}


def error_of(found, exact):
    """Return the largest error relative to the largest entry; infinite if the infinite entries differ."""
    finite = exact.isfinite()
    if found.shape != exact.shape or not torch.equal(found[~finite], exact[~finite]):
        return torch.inf
    found, exact = found[finite], exact[finite]
    if found.equal(exact):                                     # all entries may be 0, and there may be none
        return 0.0
    return ((found - exact).abs().max() / exact.abs().max()).item()


def check(loss, formula, arguments, dtypes=IMPLS):
    """Compare a loss with its formula in all dtypes and implementations; fail with a list of all errors."""
    sizes = {name: tuple(x.shape) for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    shown = {name: "..." if isinstance(x, tuple) else x for name, x in arguments.items()} | sizes
    is_large = max(shape[0] for shape in sizes.values() if shape) > 500        # too large for the interpreter
    has_impl, problems = "impl" in inspect.signature(loss).parameters, []
    for dtype in dtypes:
        rounded = {name: cast(x, dtype, "cpu") for name, x in arguments.items()}
        exact = differentiate(formula, {name: cast(x, torch.float64, "cpu") for name, x in rounded.items()})
        impls = [None] if not has_impl else BOTH if is_large else IMPLS[dtype]
        limits, eager = dict.fromkeys(exact, EAGER[dtype]), None
        for impl in impls:
            device = DEVICE if impl == "triton" else "cpu"
            given = {name: cast(x, dtype, device) for name, x in rounded.items()}
            given |= dict(impl=impl) if has_impl else {}
            found, again = differentiate(loss, given), differentiate(loss, given)
            errors = {part: error_of(found[part], exact[part]) for part in exact}
            eager = eager or errors                            # the first implementation is eager
            for part, error in errors.items():
                where = f"{loss.__name__} {shown}, impl {impl}, {dtype}, {part}"
                if not error <= limits[part]:
                    problems.append(f"{where}: error {error:.1e}, limit {limits[part]:.1e}, "
                                    f"eager's error {eager[part]:.1e}")
                if not torch.equal(found[part], again[part]):
                    problems.append(f"{where}: the second call gives other bits")
            limits = {part: 3 * error + MORE[dtype] for part, error in eager.items()}
    assert not problems, "\n" + "\n".join(problems)


# ── the losses of kernels ───────────────────────────────────────────────────────────────────────────────────


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit_rows(n, seed):
    return formulas.unit(numbers(n, 20, seed=seed))


def topk(n, impl, **arguments):
    """Return the n largest products, and the products of the columns found, which must be the same."""
    products, columns = kernels.similarity_topk(n=n, impl=impl, **arguments)
    q, k = (arguments[x].detach().double() for x in "qk")
    q, k = (formulas.unit(q), formulas.unit(k)) if arguments.get("normalize") else (q, k)
    found = (q @ k.T).gather(1, columns.clamp(min=0)).to(products.dtype)
    return torch.cat([products, found.masked_fill(columns < 0, -torch.inf)])


def cases(loss, formula, *variants, **common):
    return [(loss, formula, common | variant) for variant in variants]


T, N, M = torch.tensor(0.1).double(), torch.arange(37), torch.arange(53)
Q, K = unit_rows(37, 1), unit_rows(53, 2).T.contiguous().T     # K is stored by columns
QUEUE = unit_rows(61, 3)
TILES = dict(q=unit_rows(150, 4), k=unit_rows(170, 5))         # of several tiles in Triton
LARGE = dict(q=unit_rows(1031, 6), k=unit_rows(1051, 7))       # too many pairs to store them
LONG = dict(q=3 * Q, k=K / 2, normalize=True)
IDS, GROUPS = (N % 5 - 2, M * 7 % 9 - 2), (N // 4, M // 6)     # row 36 has no column of its group
# features of whole numbers, whose products are exact in all dtypes; some are equal to the threshold
SIMILAR = (N[:, None] * 5 + N[:6]).double() % 7 - 3, (M[:, None] * 3 + M[:6]).double() % 5 - 2, 4.0
MASKS = [{}, dict(exclude="diagonal", offset=3), dict(exclude=IDS), dict(within=GROUPS), dict(within=IDS),
         dict(exclude=("diagonal", *IDS), offset=1), dict(similar=SIMILAR),
         dict(exclude="diagonal", within=(N % 3, M % 4), similar=SIMILAR), LONG]
VIEWS, LABELS = unit_rows(60, 8).view(20, 3, 20), torch.arange(20) * 3 % 7
TARGETS = (N * 7 % 53).where(N % 4 > 0, 9)
CASES = {
    "info_nce": cases(
        kernels.info_nce, formulas.info_nce, dict(offset=5), LONG, TILES, LARGE,
        dict(symmetric=True, k=K[:37]), dict(symmetric=True, normalize=True, q=3 * Q, k=K[:37]),
        dict(symmetric=True, q=LARGE["q"], k=LARGE["k"][:1031]), q=Q, k=K, temperature=T),
    "clip_loss": cases(
        kernels.clip_loss, formulas.clip_loss, {}, dict(text=3 * K[:37], normalize=True),
        image=Q, text=K[:37], temperature=T),
    "nt_xent": cases(
        kernels.nt_xent, formulas.nt_xent, {}, dict(z1=3 * Q, normalize=True),
        dict(z1=TILES["q"][:75], z2=TILES["k"][:75]), dict(z1=LARGE["q"][:530], z2=LARGE["k"][:530]),
        z1=Q, z2=K[:37], temperature=T),
    "queue_loss": cases(
        kernels.queue_loss, formulas.queue_loss, {}, dict(k=3 * K[:37], queue=QUEUE / 2, normalize=True),
        dict(q=TILES["q"], k=TILES["k"][:150], queue=LARGE["q"][:170]),
        dict(q=LARGE["q"], k=LARGE["k"][:1031], queue=LARGE["k"]), q=Q, k=K[:37], queue=QUEUE, temperature=T),
    "sigmoid_loss": cases(
        kernels.sigmoid_loss, formulas.sigmoid_loss, dict(offset=9), LONG, TILES, LARGE,
        q=Q, k=K, temperature=T, bias=-30 * T),
    "sup_con_loss": cases(
        kernels.sup_con_loss, formulas.sup_con_loss, {}, dict(labels=None), dict(base_temperature=0.07),
        dict(z=3 * VIEWS, normalize=True), dict(z=VIEWS[:, :1], labels=torch.arange(20) * 3 % 13),
        dict(z=LARGE["q"].view(1031, 1, 20), labels=torch.arange(1031) * 3 % 700),
        z=VIEWS, labels=LABELS, temperature=T),
    "linear_cross_entropy": cases(
        kernels.linear_cross_entropy, formulas.linear_cross_entropy, {}, dict(ignore_index=9),
        dict(targets=TARGETS.where(N % 3 > 0, -100)), dict(targets=0 * TARGETS, ignore_index=0),
        dict(hidden=TILES["q"], weight=TILES["k"], targets=torch.arange(150) + 20),
        dict(hidden=LARGE["q"], weight=LARGE["k"], targets=torch.arange(1031) + 20),
        hidden=10 * Q, weight=K, targets=TARGETS, temperature=7 * T),
    "triplet_loss and margin_loss": [
        *cases(kernels.triplet_loss, formulas.triplet_loss, dict(negative=QUEUE[:37]), {},
               dict(negative=QUEUE[:37], margin=0.1), dict(mining="semi-hard"),
               anchor=Q, positive=K[:37] * (1 + N[:, None] / 9)),
        *cases(kernels.margin_loss, formulas.margin_loss, {}, dict(margin=1.4),
               x1=Q, x2=K[:37], same=N % 3 == 0)],
    "similarity_lse": [
        *cases(kernels.similarity_lse, formulas.similarity_lse, *MASKS, TILES | dict(exclude="diagonal"),
               LARGE, LARGE | dict(exclude="diagonal", offset=7), q=Q, k=K, temperature=T),
        *cases(kernels.similarity_lse, formulas.similarity_lse, {}, dict(exclude="diagonal"),
               dict(exclude="pair"), dict(q=3 * Q[:36], exclude="diagonal", normalize=True),
               dict(q=LARGE["q"][:1030], exclude="pair"), q=Q[:36], temperature=T)],
    "similarity_topk": cases(topk, formulas.similarity_topk, *MASKS, TILES, LARGE, q=Q, k=K, n=11)}


@pytest.mark.parametrize("name", CASES)
def test_loss_of_kernels(name):
    for loss, formula, arguments in CASES[name]:
        check(loss, formula, arguments)


# ── several processes, chunks ───────────────────────────────────────────────────────────────────────────────


def test_losses_of_1_2_and_3_ranks(tmp_path):
    """The shares of all ranks, and their gradients, add up to those of one process without gathered rows."""
    here = Path(__file__).resolve()
    subprocess.run([sys.executable, here.with_name("loss_ranks.py"), tmp_path], check=True, timeout=120,
                   env=os.environ | {"PYTHONPATH": str(here.parents[2])})
    problems, alone = [], torch.load(tmp_path / "0-0")
    for world in (1, 2, 3):
        ranks = [torch.load(tmp_path / f"{world}-{rank}") for rank in range(world)]
        for name, parts in alone.items():
            for part, exact in parts.items():
                error = error_of(sum(rank[name][part] for rank in ranks), exact)
                if not error <= 1e-10:
                    problems.append(f"{name} on {world} ranks, {part}: error {error:.1e}, limit 1e-10")
    assert not problems, "\n" + "\n".join(problems)
    assert len(alone) > 20 and all(parts["value"] for parts in alone.values())


def test_embed_in_chunks():
    """Loss, gradients and the next random number are those of the whole batch, whose dropout is repeated."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.4), torch.nn.Linear(16, 5)
    module, x = torch.nn.Sequential(*layers).double(), numbers(34, 6)

    def step(embed_all):
        torch.manual_seed(1)
        z = embed_all() + 0.1 * torch.rand(1)                  # a loss may use random numbers, too
        module.zero_grad()
        loss = kernels.info_nce(*z.chunk(2), 0.3, symmetric=True, normalize=True)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in module.parameters()), torch.rand(1)]

    for size, has_dropout in itertools.product((1, 5, 33), (True, False)):
        module.train(has_dropout)
        chunks = x.split(size)
        found = step(lambda: kernels.embed_in_chunks(module, chunks, module))
        exact = step(lambda: torch.cat([module(chunk) for chunk in chunks]) if has_dropout else module(x))
        errors = list(map(error_of, found, exact))
        assert max(errors) <= 1e-10, f"chunks of {size}, dropout {has_dropout}, {errors}"
