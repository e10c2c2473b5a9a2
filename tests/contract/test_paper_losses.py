"""The contract of the scripts: each public loss has the value and the gradients of the paper's formula.

Formulas are those of the papers (form="paper") and of the authors' released code (form="code").
"""
import pytest
import torch

import cil
import cline
import dclr
import ease
import finetune
import loss_formulas as formulas
import moco
import ood
import selfguided
import simclr
import simcse
import tacl
import vascl
from loss_check import cases, cast, check, numbers

DTYPES = [torch.float64, torch.float32]
N = 13
X, Y, Z, E, P = (numbers(N, 8, seed=seed) for seed in range(5))
X[3] = 0                                                       # cosines of a zero vector are 0
MANY, MASK = numbers(N, 3, 8, seed=5), numbers(N, 3, seed=6) > 0
BAG_OF = torch.tensor([2, 0, 1, 3, 1, 2, 1, 0, 3, 3, 2, 0])   # three sentences per bag
IDS, LABELS = torch.arange(N) * 5 % 9, torch.arange(N) * 3 % 4
PAPER, CODE = dict(form="paper"), dict(form="code")
HEAD = dict(first=numbers(16, 8, seed=7), second=numbers(5, 16, seed=8))      # weights of VaSCL's head
NEAR = (torch.arange(N)[:, None] + torch.tensor([2, 5])) % N
REAL = torch.arange(9) < torch.tensor([9, 4, 7])[:, None]       # False for padding tokens
GUIDE = (E + 0.5 * P)[torch.arange(N) // 2]                    # rows 2i and 2i + 1 of DCLR's guide are equal


def with_head(loss):
    """Return a loss that takes the weights of VaSCL's head instead of the head."""
    def f(e, first, second, **arguments):
        return loss(e, head=formulas.head(first, second), **arguments)
    f.__name__ = loss.__name__
    return f


def nearest_products(e, impl):
    """Return the dot products of each row with its four nearest neighbours."""
    return (e @ e.T).detach().gather(1, vascl.nearest_neighbours(e, 4, impl=impl))


def sup_con_loss(features, **arguments):
    return formulas.sup_con_loss(features, **arguments, normalize=True)


CASES = {
    "simclr": [
        *cases(simclr.simclr_loss, formulas.nt_xent, dict(normalize=True), dict(normalize=False),
               z1=X, z2=Y, temperature=0.5),
        *cases(simclr.sup_con_loss, sup_con_loss, {}, dict(base_temperature=0.07), dict(labels=None),
               features=MANY, labels=LABELS, temperature=0.2)],
    "moco": cases(moco.moco_loss, formulas.moco_loss, {}, q=X, k=Y, queue=formulas.unit(P), temperature=0.07),
    "simcse": cases(
        simcse.simcse_loss, formulas.simcse_loss, {}, dict(z3=None), dict(z3=MANY),
        dict(hard_negative_weight=1.3), dict(hard_negative_weight=-0.7, z3=MANY),
        dict(hard_negative_weight=0.4, ids=torch.stack([IDS, IDS * 3 % 7], 1)),
        z1=X, z2=Y, z3=Z, temperature=0.2),
    "selfguided": cases(
        selfguided.selfguided_loss, formulas.selfguided_loss, dict(objective="base"), dict(objective="opt1"),
        dict(objective="opt2"), dict(objective="opt3"), dict(objective="opt3", h=MANY),
        c=X, h=Y, temperature=0.1),
    "cline": [
        *cases(cline.contrastive_loss, formulas.contrastive_loss, PAPER, CODE,
               original=X, synonym=Y, antonym=Z),
        *cases(cline.replaced_token_loss, formulas.replaced_token_loss, PAPER | dict(logits=MANY[:, :, 0]),
               CODE | dict(logits=MANY[:, :, :3]),
               labels=(torch.arange(3 * N) % 5 % 3).view(N, 3).where(MASK, -100)),
        *cases(cline.total_loss, formulas.total_loss, {}, dict(log_variances=torch.zeros(3).double()),
               losses=X[0, :3].abs(), log_variances=Y[2, :3])],
    "tacl": cases(
        tacl.tacl_loss, formulas.tacl_loss, PAPER, CODE, PAPER | dict(similarity="dot"),
        CODE | dict(similarity="dot"), student=numbers(3, 9, 6, seed=9), teacher=numbers(3, 9, 6, seed=10),
        masked=torch.arange(27).view(3, 9) % 3 == 1, attention_mask=REAL, temperature=0.1),
    "ease": cases(
        ease.ease_loss, formulas.ease_loss, {}, dict(hard=None), dict(hard_logit=0.9), dict(entity_ids=IDS),
        dict(hard_logit=-0.7, entity_ids=IDS, hard_ids=IDS[:, None] + 1 + torch.arange(3)),
        z=X, entity=Y, hard=MANY, temperature=0.2),
    "vascl": [
        *cases(with_head(vascl.neighbourhood_loss), formulas.neighbourhood_loss, PAPER, CODE,
               e=X, perturbed=X + 0.5 * Y, neighbours=NEAR, temperature=0.2, **HEAD),
        *cases(with_head(vascl.virtual_augmentation), formulas.virtual_augmentation, dict(steps=1),
               dict(steps=3), e=X, noise=Y, neighbours=NEAR, temperature=0.2, radius=2.0, **HEAD),
        *cases(nearest_products, formulas.nearest_products, {}, e=X)],
    "dclr": [
        *cases(dclr.dclr_loss, formulas.dclr_loss, PAPER, CODE, PAPER | dict(noise=P[:0]),
               CODE | dict(noise=P[:0]), PAPER | dict(noise=P[:0], phi=0.0),
               *(form | dict(temperature=torch.tensor(0.2).double()) for form in (PAPER, CODE)),
               z1=X, z2=Y, noise=P, f1=E, f2=GUIDE, phi=0.3, temperature=0.2),
        *cases(dclr.noise_negatives, formulas.noise_negatives, PAPER, CODE,
               z1=X, z2=Y, noise=P[:9], steps=3, step_size=0.1, temperature=0.2),
        *cases(dclr.instance_weights, formulas.instance_weights, {}, f1=E, f2=GUIDE, phi=0.3)],
    "cil": cases(
        cil.cil_loss, formulas.cil_loss, PAPER, CODE, CODE | dict(x=X[:4], a=Y[:4], bag_of=BAG_OF[:4]),
        PAPER | dict(bag_of=BAG_OF * BAG_OF % 4),              # the bags have unequal sizes
        x=X[:12], a=Y[:12], bags=Z[:4], bag_of=BAG_OF, temperature=0.2),
    "finetune": [
        *cases(finetune.rdrop_loss, formulas.rdrop_loss, PAPER, CODE,
               logits1=X, logits2=Y, labels=LABELS, alpha=0.7),
        *cases(finetune.supcon_loss, formulas.supcon_loss, dict(z=MANY), dict(z=MANY[:, :1], labels=IDS),
               labels=LABELS, temperature=0.3)],
    "ood": [
        *cases(ood.ood_contrastive_loss, formulas.ood_contrastive_loss, PAPER, CODE,
               z=E, z_adv=Y, labels=LABELS, temperature=0.3)]}


@pytest.mark.parametrize("name", CASES)
def test_losses_of_scripts(name):
    for loss, formula, arguments in CASES[name]:
        check(loss, formula, arguments, DTYPES)


@pytest.mark.parametrize("name", ["simclr", "moco", "simcse", "selfguided", "ease", "dclr"])
def test_a_zero_row_in_float16(name):
    """X has a zero row, whose cosines are 0 in float16, too."""
    for loss, _, arguments in CASES[name]:
        half, single = (loss(**{key: cast(x, dtype, "cpu") for key, x in arguments.items()})
                        for dtype in (torch.float16, torch.float32))
        assert torch.allclose(half.float(), single, rtol=0.01, atol=0.01), (loss, arguments)
