"""The work of one of several ranks, whose rows are compared with the rows of all ranks.

tests/contract checks that the ranks' losses and gradients add up to those of one process.
"""
import pytest
import torch

from kernels import clip_loss, info_nce, nt_xent, sigmoid_loss, sup_con_loss
from running import multiplications

LOSSES = {                              # functions of (z1, z2), and of the rows of all ranks as `gathered`
    "nt_xent": nt_xent,
    "clip_loss": clip_loss,
    "info_nce, symmetric": lambda z1, z2, **options: info_nce(z1, z2, symmetric=True, **options),
    "info_nce": lambda z1, z2, gathered=None, **options: info_nce(z1, (gathered or [z2])[-1], **options),
    "sigmoid_loss": lambda z1, z2, gathered=None, **options: sigmoid_loss(
        z1, (gathered or [z2])[-1], **options),
    "sup_con_loss": lambda z1, z2, gathered=None, **options: sup_con_loss(
        torch.stack([z1, z2], 1), torch.arange(len(z1)) % 4,
        gathered=gathered and (torch.stack(gathered, 1), torch.arange(66) % 4), **options)}


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_multiplies_only_its_share(name):
    """With three ranks, each rank computes at most 0.75 times the products of one process with eager.
    clip_loss needs 2/3: its rows and columns have separate products, which one process shares."""
    z1, z2 = torch.randn(2, 66, 40, dtype=torch.float64, requires_grad=True)
    own = slice(20, 42)
    of_rank = dict(gathered=(z1, z2), offset=own.start, impl="blockwise")
    _, alone = multiplications(lambda: LOSSES[name](z1, z2, impl="eager").backward())
    _, share = multiplications(lambda: LOSSES[name](z1[own], z2[own], **of_rank).backward())
    print(f"{name}: {share / alone:.2f} of eager's {alone / 1e6:.1f} Mflop")
    assert 0.3 < share / alone < 0.75
