"""Losses against independent float64 formulas written out row by row, values and gradients; what all losses
of the sentence scripts share: types, memory, refusals."""
import math

import pytest
import torch
import torch.nn.functional as F

import vascl
from dclr import dclr_loss, noise_negatives
from ease import ease_loss
from formulas import agree, by_way, cosine, every_way, points
from kernels import nt_xent
from running import Memory
from selfguided import selfguided_loss
from simcse import simcse_loss


def simcse_written_out(z1, z2, z3=None, temperature=0.05, w=0.0, ids=None):
    """The paper's two objectives as printed, alpha = exp(w), for any number of hard negatives, without the
    texts that are the anchor's own positive."""
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


@every_way
@pytest.mark.parametrize("n, keys, w, temperature", [
    (1, 1, 0.0, 0.05), (2, 1, 0.0, 0.05), (9, 1, 0.0, 0.05), (1, 2, 0.0, 0.05), (7, 2, 0.0, 0.05),
    (7, 2, 1.3, 0.05), (7, 2, -2.0, 0.2), (5, 2, math.log(2), 1.0)])
def test_simcse(way, n, keys, w, temperature):
    """One anchor without hard negatives has 0, in its gradients too."""
    z = [points(n, 6, seed) for seed in range(1 + keys)]
    z[0][3:4], z[1][1:2] = 0, z[0][:1]                         # a zero vector, another's positive
    how = dict(temperature=temperature, hard_negative_weight=w)
    agree(lambda z1, *z: by_way(way, n, lambda own, **rest: simcse_loss(z1[own], *z, **how, **rest)),
          lambda *z: simcse_written_out(*z, temperature=temperature, w=w), *z)


IDS = torch.tensor([[7, 7, 3], [-5, 7, 2**40], [7, 2**40 + 7, -5], [9, -5, 9], [2**40, 1, 1]])     # rows


@pytest.mark.parametrize("way", ["blockwise", "eager", "ranks", "triton"])
@pytest.mark.parametrize("n, hard, w, ids", [
    (5, 2, 0.0, False), (5, 2, -1.3, False), (5, 3, 0.7, False), (5, 0, 0.0, True), (5, 2, 0.0, True),
    (5, 2, 1.3, True), (5, 2, -90.0, True), (2, 0, 0.0, True), (1, 1, 0.5, True)])
def test_simcse_of_many_hard_negatives_and_equal_texts(way, n, hard, w, ids):
    """Every anchor meets all of them, α is for its own; rows 0 and 2 have one positive. The last case has no
    negative left: 0, in its gradients too."""
    z1, z2, z3 = (points(shape[0], math.prod(shape[1:]), 30 + i).view(shape) for i, shape in enumerate(
        [(n, 6), (n, 6), (n, max(hard, 1), 6)]))
    found = IDS[:n, : 1 + hard] if ids else None
    z, how = (z1, z2, z3)[: 3 if hard else 2], dict(temperature=0.2, hard_negative_weight=w, ids=found)
    kind = torch.float32 if way == "triton" else torch.float64

    def ours(z1, *z):
        z1, *z = (x.to(kind) for x in (z1, *z))
        return by_way(way, n, lambda own, **rest: simcse_loss(z1[own], *z, **how, **rest)).double()

    def written_out(*z):
        return simcse_written_out(*z, temperature=0.2, w=w, ids=found) + 0 * sum(x.sum() for x in z)

    agree(ours, written_out, *z, tolerance=1e-5 if way == "triton" else 1e-10)


def test_one_hard_negative_is_as_before_to_the_bit():
    """Of (M, D) and (M, 1, D), and with ids that are all different."""
    z = [points(9, 6, seed).float() for seed in range(3)]
    losses = {simcse_loss(*z, hard_negative_weight=0.3).item(),
              simcse_loss(*z[:2], z[2][:, None], hard_negative_weight=0.3).item(),
              simcse_loss(*z, hard_negative_weight=0.3, ids=torch.arange(18).view(9, 2)).item()}
    assert len(losses) == 1


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
def test_nt_xent_is_the_papers_mean(impl):
    """Algorithm 1 of SimCLR: 2N anchors, 2N − 1 columns each, 1/2N."""
    def written_out(z1, z2, t):
        z, n, total = torch.cat([z1, z2]), len(z1), 0
        for i in range(2 * n):
            others = sum(torch.exp(z[i] @ z[j] / t) for j in range(2 * n) if j != i)
            total = total - torch.log(torch.exp(z[i] @ z[(i + n) % (2 * n)] / t) / others)
        return total / (2 * n)
    z1, z2 = F.normalize(points(5, 6, 19), dim=1), F.normalize(points(5, 6, 20), dim=1)
    t = torch.tensor(0.5, dtype=torch.float64)
    agree(lambda a, b, t: nt_xent(a, b, t, impl=impl), written_out, z1, z2, t)


# ── of all sentence scripts ──


def dclr_of_all(z, y, impl, form="paper"):
    noise = noise_negatives(z, y, z[:9] - y[:9], 1, form=form, impl=impl)
    return dclr_loss(z, y, noise, y, z, 0.9, form=form, impl=impl)


def vascl_of_all(z, y, impl):
    near = vascl.nearest_neighbours(z, 4, impl=impl)
    delta = vascl.virtual_augmentation(z, torch.tanh, near, y, 3.0, 0.05)
    return vascl.neighbourhood_loss(z, z + delta, torch.tanh, near, 0.004)     # of ±250


ALL = {"simcse": lambda z, y, impl: simcse_loss(z, y, z - y, 0.001, impl=impl),        # logits of ±1000
       "simcse ids": lambda z, y, impl: simcse_loss(z, y, torch.stack([z - y, z * y], 1), 0.05, impl=impl,
                                                    ids=torch.arange(3 * len(z)).view(-1, 3) // 2),
       "ease": lambda z, y, impl: ease_loss(z, y, torch.stack([y.flip(0), z.flip(0)], 1), 0.1, impl=impl),
       "selfguided": lambda z, y, impl: selfguided_loss(z, torch.stack([y, z * y], 1), 0.05, impl=impl),
       "dclr": dclr_of_all, "dclr code": lambda z, y, impl: dclr_of_all(z, y, impl, "code"),
       "vascl": vascl_of_all}


@pytest.mark.parametrize("name, dtype", [
    *((name, torch.float32) for name in ALL), *((name, torch.bfloat16) for name in ALL if name != "vascl")])
def test_types(name, dtype):
    """Half types have a float32 loss, near that of the same numbers in float64, EASE's to its rounding."""
    rows = [points(6, 8, seed).to(dtype) for seed in (15, 16)]
    loss, exact = ALL[name](*rows, "auto"), ALL[name](*(x.double() for x in rows), "auto").item()
    near = 1e-5 if name == "ease" else 1e-4 if dtype == torch.float32 else 0.1
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, rel=near)


@pytest.mark.parametrize("impl", ["auto", "eager"])
@pytest.mark.parametrize("name", ALL)
def test_only_eager_stores_all_pairs(name, impl):
    """Of 3,500 rows, 47 MB; DCLR's released form has no other implementation, and takes rows in blocks."""
    rows = [points(3500, 6, seed).float().requires_grad_() for seed in (17, 18)]
    with Memory() as memory:
        ALL[name](*rows, impl).backward()
    blocks = name == "dclr code"
    assert (memory.peak > (150 if blocks else 40)) == (impl == "eager" and not blocks), memory.peak


def test_ease_takes_the_weight_of_a_hardest_negative_back():
    """Under autocast its share of the sum, whose products are rounded, may seem to be more than all."""
    z, entity, noise = (points(64, 32, seed).float() for seed in (21, 22, 23))
    rows = z, entity, (z + 0.05 * noise)[:, None]
    exact = ease_loss(*(x.double() for x in rows), 0.01, -5.0)
    with torch.autocast("cpu", torch.float16):
        assert ease_loss(*rows, 0.01, -5.0).item() == pytest.approx(exact.item(), rel=0.02)


Z = torch.randn(3, 4)
NEAR = torch.tensor([[1], [2], [0]])


def augment(noise=Z, radius=1.0, **more):
    return vascl.virtual_augmentation(Z, torch.tanh, NEAR, noise, radius, 0.05, **more)


@pytest.mark.parametrize("call, wanted", [
    (lambda: selfguided_loss(Z, Z[:2]), r"h: found \(2, 4\), wanted \(3, 4\)"),
    (lambda: selfguided_loss(Z, Z[0, :3], objective="opt2"), r"h: found \(3,\), wanted"),
    (lambda: selfguided_loss(Z, Z.view(3, 2, 2), objective="opt1"), r"h: found \(3, 2, 2\), wanted"),
    (lambda: augment(noise=Z[:1]), r"noise: found \(1, 4\), wanted \(3, 4\)")])
def test_bad_arguments(call, wanted):
    with pytest.raises(ValueError, match=wanted):
        call()
