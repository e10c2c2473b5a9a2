"""The work of one of several ranks, which compares its own rows with the rows of all ranks: no rank repeats
another's. tests/contract checks that losses and gradients of all ranks add up to those of one process."""
import pytest
import torch

import dclr
import ease
import selfguided
import simclr
import simcse
import vascl
from running import multiplications

ROWS, WIDTH = 66, 48
ALL, OWN = slice(0, ROWS), slice(22, 44)                        # rows of one process, of one of three
X, Y, Z, NOISE = torch.randn(4, ROWS, WIDTH, dtype=torch.float64).requires_grad_()
VIEWS, IDS, LABELS = torch.stack([X, Y, Z], 1), torch.arange(ROWS) % 40, torch.arange(ROWS) * 7 % 10
LAYER = torch.nn.Linear(WIDTH, WIDTH).double()


def gathered(own, *rows):
    """Return the arguments `gathered` and `offset` of a loss; none if one process has all rows."""
    return {} if own == ALL else dict(gathered=rows, offset=own.start)


def gather(x):
    """Return rows in place of those that the other ranks would send."""
    return torch.ones(ROWS, *x.shape[1:], dtype=x.dtype)


def vascl_loss(own, impl, form):
    rows = {} if own == ALL else dict(gathered=X, offset=own.start)
    near = vascl.nearest_neighbours(X[own], 4, impl=impl, **rows)
    delta = vascl.virtual_augmentation(X[own], LAYER, near, NOISE[own], 1.0, 0.1, gather=gather)
    loss = vascl.neighbourhood_loss(X[own], X[own] + delta, LAYER, near, 0.1, form, gather=gather)
    instance = simclr.simclr_loss(LAYER(X[own]), LAYER(Y[own]), **gathered(own, X, Y), impl=impl)
    return loss + instance


def dclr_loss(own, impl, form):
    noise = dclr.noise_negatives(X[own], Y, NOISE, 2, 0.1, 0.1, form, all_reduce=lambda x: x, impl=impl)
    return dclr.dclr_loss(X[own], Y, noise, Z[own], Z, 0.9, 0.1, form, offset=own.start, impl=impl)


LOSSES = {
    "simclr": lambda own, impl: simclr.simclr_loss(X[own], Y[own], **gathered(own, X, Y), impl=impl),
    "simclr --supervised": lambda own, impl: simclr.sup_con_loss(
        VIEWS[own, :2], LABELS[own], **gathered(own, VIEWS[:, :2], LABELS), impl=impl),
    "simcse": lambda own, impl: simcse.simcse_loss(X[own], Y, Z, offset=own.start, impl=impl),
    "simcse --ignore-equal": lambda own, impl: simcse.simcse_loss(
        X[own], Y, Z, ids=torch.stack([IDS, IDS * 3 % 40], 1), offset=own.start, impl=impl),
    "selfguided": lambda own, impl: selfguided.selfguided_loss(
        X[own], VIEWS[own], **gathered(own, X, VIEWS), impl=impl),
    "selfguided --objective base": lambda own, impl: selfguided.selfguided_loss(
        X[own], Y[own], 0.1, "base", **gathered(own, X, Y), impl=impl),
    "ease": lambda own, impl: ease.ease_loss(
        X[own], Y, VIEWS[:, 1:], 0.1, 0.3, IDS, offset=own.start, impl=impl),
    "vascl --form paper": lambda own, impl: vascl_loss(own, impl, "paper"),
    "vascl": lambda own, impl: vascl_loss(own, impl, "code"),
    "dclr": lambda own, impl: dclr_loss(own, impl, "paper"),
    "dclr --form code": lambda own, impl: dclr_loss(own, impl, "code")}


@pytest.mark.parametrize("name", LOSSES)
def test_no_rank_repeats_anothers_work(name):
    """A rank multiplies at most half of what eager multiplies in one process; a third is the ideal."""
    _, alone = multiplications(lambda: LOSSES[name](ALL, "eager").backward())
    _, share = multiplications(lambda: LOSSES[name](OWN, "blockwise").backward())
    print(f"{name}: {share / alone:.2f} of eager's {alone / 1e6:.1f} Mflop")
    assert 0.3 < share / alone < 0.52
