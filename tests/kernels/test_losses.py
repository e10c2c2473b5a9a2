"""SimCSE and NT-Xent against float64 formulas, row by row; dtypes, memory and errors of sentence losses."""
import math

import pytest
import torch
import torch.nn.functional as F

import vascl
from dclr import dclr_loss, noise_negatives
from ease import ease_loss
from formulas import check_equal, cosine, every_path, loss_by_path, randn
from kernels import nt_xent
from running import Memory
from selfguided import selfguided_loss
from simcse import simcse_loss


def simcse_written_out(z1, z2, z3=None, temperature=0.05, w=0.0, ids=None):
    """Return the loss by the paper's two equations, with alpha = exp(w) and any number of hard negatives.
    Candidates with the id of the anchor's own positive text are not negatives."""
    total, n = 0, len(z1)
    hard = [] if z3 is None else [z3] if z3.dim() == 2 else z3.unbind(1)
    for i in range(n):
        numerator = denominator = torch.exp(cosine(z1[i], z2[i]) / temperature)
        for column, z in enumerate([z2, *hard]):
            for j in range(n):
                if (column or i != j) and (ids is None or ids[j, column] != ids[i, 0]):
                    weight = math.exp(w) if column and i == j else 1.0
                    denominator = denominator + weight * torch.exp(cosine(z1[i], z[j]) / temperature)
        total = total - torch.log(numerator / denominator)
    return total / n


@every_path
@pytest.mark.parametrize("n, keys, w, temperature", [
    (1, 1, 0.0, 0.05), (2, 1, 0.0, 0.05), (9, 1, 0.0, 0.05), (1, 2, 0.0, 0.05), (7, 2, 0.0, 0.05),
    (7, 2, 1.3, 0.05), (7, 2, -2.0, 0.2), (5, 2, math.log(2), 1.0)])
def test_simcse(path, n, keys, w, temperature):
    """The loss equals the formula; for one anchor without hard negatives, loss and gradients are 0."""
    z = [randn(n, 6, seed) for seed in range(1 + keys)]
    z[0][3:4], z[1][1:2] = 0, z[0][:1]                         # a zero row; a positive equals an anchor
    options = dict(temperature=temperature, hard_negative_weight=w)
    check_equal(lambda z1, *z: loss_by_path(
                    path, n, lambda own, **rest: simcse_loss(z1[own], *z, **options, **rest)),
          lambda *z: simcse_written_out(*z, temperature=temperature, w=w), *z)


# the ids of the texts in each row
IDS = torch.tensor([[7, 7, 3], [-5, 7, 2**40], [7, 2**40 + 7, -5], [9, -5, 9], [2**40, 1, 1]])


@pytest.mark.parametrize("path", ["blockwise", "eager", "ranks", "triton"])
@pytest.mark.parametrize("n, hard, w, ids", [
    (5, 2, 0.0, False), (5, 2, -1.3, False), (5, 3, 0.7, False), (5, 0, 0.0, True), (5, 2, 0.0, True),
    (5, 2, 1.3, True), (5, 2, -90.0, True), (2, 0, 0.0, True), (1, 1, 0.5, True)])
def test_simcse_of_many_hard_negatives_and_equal_texts(path, n, hard, w, ids):
    """All hard negatives are in each anchor's denominator; alpha weights only its own.
    Rows 0 and 2 of IDS have the same positive. In the last case no negative is left: the loss is 0."""
    z1, z2, z3 = (randn(shape[0], math.prod(shape[1:]), 30 + i).view(shape) for i, shape in enumerate(
        [(n, 6), (n, 6), (n, max(hard, 1), 6)]))
    found = IDS[:n, : 1 + hard] if ids else None
    z, options = (z1, z2, z3)[: 3 if hard else 2], dict(temperature=0.2, hard_negative_weight=w, ids=found)
    dtype = torch.float32 if path == "triton" else torch.float64

    def ours(z1, *z):
        z1, *z = (x.to(dtype) for x in (z1, *z))
        return loss_by_path(path, n, lambda own, **rest: simcse_loss(z1[own], *z, **options, **rest)).double()

    def written_out(*z):
        return simcse_written_out(*z, temperature=0.2, w=w, ids=found) + 0 * sum(x.sum() for x in z)

    check_equal(ours, written_out, *z, tolerance=1e-5 if path == "triton" else 1e-10)


def test_one_hard_negative_has_the_same_bits_in_all_forms():
    """The forms are z3 (M, D), z3 (M, 1, D), and ids that are all different."""
    z = [randn(9, 6, seed).float() for seed in range(3)]
    losses = {simcse_loss(*z, hard_negative_weight=0.3).item(),
              simcse_loss(*z[:2], z[2][:, None], hard_negative_weight=0.3).item(),
              simcse_loss(*z, hard_negative_weight=0.3, ids=torch.arange(18).view(9, 2)).item()}
    assert len(losses) == 1


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
def test_nt_xent_equals_the_papers_formula(impl):
    """Algorithm 1 of SimCLR: the mean over 2N anchors, with 2N − 1 columns each."""
    def written_out(z1, z2, t):
        z, n, total = torch.cat([z1, z2]), len(z1), 0
        for i in range(2 * n):
            others = sum(torch.exp(z[i] @ z[j] / t) for j in range(2 * n) if j != i)
            total = total - torch.log(torch.exp(z[i] @ z[(i + n) % (2 * n)] / t) / others)
        return total / (2 * n)
    z1, z2 = F.normalize(randn(5, 6, 19), dim=1), F.normalize(randn(5, 6, 20), dim=1)
    t = torch.tensor(0.5, dtype=torch.float64)
    check_equal(lambda a, b, t: nt_xent(a, b, t, impl=impl), written_out, z1, z2, t)


# ── losses of all sentence scripts ──────────────────────────────────────────────────────────────────────────


def dclr_from_rows(z, y, impl, form="paper"):
    noise = noise_negatives(z, y, z[:9] - y[:9], 1, form=form, impl=impl)
    return dclr_loss(z, y, noise, y, z, 0.9, form=form, impl=impl)


def vascl_from_rows(z, y, impl):
    neighbours = vascl.nearest_neighbours(z, 4, impl=impl)
    delta = vascl.virtual_augmentation(z, torch.tanh, neighbours, y, 3.0, 0.05)
    return vascl.neighbourhood_loss(z, z + delta, torch.tanh, neighbours, 0.004)     # logits of ±250


SENTENCE_LOSSES = {
    "simcse": lambda z, y, impl: simcse_loss(z, y, z - y, 0.001, impl=impl),           # logits of ±1000
    "simcse ids": lambda z, y, impl: simcse_loss(
        z, y, torch.stack([z - y, z * y], 1), 0.05, impl=impl, ids=torch.arange(3 * len(z)).view(-1, 3) // 2),
    "ease": lambda z, y, impl: ease_loss(z, y, torch.stack([y.flip(0), z.flip(0)], 1), 0.1, impl=impl),
    "selfguided": lambda z, y, impl: selfguided_loss(z, torch.stack([y, z * y], 1), 0.05, impl=impl),
    "dclr": dclr_from_rows, "dclr code": lambda z, y, impl: dclr_from_rows(z, y, impl, "code"),
    "vascl": vascl_from_rows}


@pytest.mark.parametrize("name, dtype", [
    *((name, torch.float32) for name in SENTENCE_LOSSES),
    *((name, torch.bfloat16) for name in SENTENCE_LOSSES if name != "vascl")])
def test_dtypes(name, dtype):
    """The loss is float32 also for half types, and near the loss of the same rows in float64."""
    rows = [randn(6, 8, seed).to(dtype) for seed in (15, 16)]
    loss = SENTENCE_LOSSES[name](*rows, "auto")
    exact = SENTENCE_LOSSES[name](*(x.double() for x in rows), "auto").item()
    tolerance = 1e-5 if name == "ease" else 1e-4 if dtype == torch.float32 else 0.1
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("impl", ["auto", "eager"])
@pytest.mark.parametrize("name", SENTENCE_LOSSES)
def test_only_eager_stores_all_pairs(name, impl):
    """2,500 × 2,500 logits take 24 MB. DCLR's form="code" computes blocks of them, with any impl."""
    rows = [randn(2500, 6, seed).float().requires_grad_() for seed in (17, 18)]
    with Memory() as memory:
        SENTENCE_LOSSES[name](*rows, impl).backward()
    blocks = name == "dclr code"
    assert (memory.peak > (150 if blocks else 40)) == (impl == "eager" and not blocks), memory.peak


def test_ease_reweights_hard_negatives_under_autocast():
    """EASE needs the share of a row's hard negatives in the sum. Autocast may round this share above 1."""
    z, entity, noise = (randn(64, 32, seed).float() for seed in (21, 22, 23))
    rows = z, entity, (z + 0.05 * noise)[:, None]
    exact = ease_loss(*(x.double() for x in rows), 0.01, -5.0)
    with torch.autocast("cpu", torch.float16):
        assert ease_loss(*rows, 0.01, -5.0).item() == pytest.approx(exact.item(), rel=0.02)


Z = torch.randn(3, 4)
NEIGHBOURS = torch.tensor([[1], [2], [0]])


def perturb(noise=Z, radius=1.0, **more):
    """Call VaSCL's virtual_augmentation with these and otherwise valid arguments."""
    return vascl.virtual_augmentation(Z, torch.tanh, NEIGHBOURS, noise, radius, 0.05, **more)


@pytest.mark.parametrize("call, message", [
    (lambda: selfguided_loss(Z, Z[:2]), r"h: found \(2, 4\), expected \(3, 4\)"),
    (lambda: selfguided_loss(Z, Z[0, :3], objective="opt2"), r"h: found \(3,\), expected"),
    (lambda: selfguided_loss(Z, Z.view(3, 2, 2), objective="opt1"), r"h: found \(3, 2, 2\), expected"),
    (lambda: perturb(noise=Z[:1]), r"noise: found \(1, 4\), expected \(3, 4\)")])
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
