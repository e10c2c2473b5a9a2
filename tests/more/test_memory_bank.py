"""Test memory_bank.py. Several processes are tested in tests/training/images/test_dataset.py."""
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import loss_formulas
import memory_bank
from loss_check import numbers


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_with_a_memory_bank(momentum, monkeypatch):
    """The positive of a query is the bank's slot of the same image; the negatives are sampled slots. The step
    moves only the slots of the batch's images. They move towards the queries, and stay unit vectors."""
    bank, q, rows = F.normalize(numbers(7, 5), dim=1), numbers(3, 5, seed=1).requires_grad_(), [4, 0, 6]
    sampled = torch.tensor([0, 2, 2, 5])
    model = Mock(return_value=q, bank=bank.clone())
    monkeypatch.setattr(torch, "randint", lambda *size, device: sampled)
    args = SimpleNamespace(queue_size=4, temperature=0.07, bank_momentum=momentum, impl="eager",
                           precision="fp32")
    loss, _ = memory_bank.compute_loss(model, q, rows, args)
    wanted = loss_formulas.moco_loss(q, bank[rows], bank[sampled], 0.07)
    gradients = [torch.autograd.grad(x, q)[0] for x in (loss, wanted)]
    torch.testing.assert_close([loss, gradients[0]], [wanted, gradients[1]], rtol=1e-10, atol=1e-10)
    moved = F.normalize(momentum * bank[rows] + (1 - momentum) * F.normalize(q.detach(), dim=1), dim=1)
    expected = bank.index_copy(0, torch.tensor(rows), moved)
    torch.testing.assert_close(model.bank, expected, rtol=1e-6, atol=1e-6)   # the bank is updated in float32
