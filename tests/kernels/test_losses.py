"""SimCSE and NT-Xent against float64 formulas, row by row; dtypes, memory and errors of sentence losses."""
import pytest
import torch

import vascl
from dclr import dclr_loss, noise_negatives
from ease import ease_loss
from formulas import randn
from running import Memory
from selfguided import selfguided_loss
from simcse import simcse_loss

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
    assert (memory.peak > (150 if blocks else 23.8)) == (impl == "eager" and not blocks), memory.peak


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
