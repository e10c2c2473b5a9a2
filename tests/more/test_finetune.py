"""Test finetune.py: losses of a batch, and contrast sets."""
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import finetune
import loss_formulas as formulas
from loss_check import numbers


@pytest.mark.parametrize("form", ["paper", "code"])
def test_loss_of_two_passes(form, monkeypatch):
    """The loss has R-Drop and SCL (supervised contrastive loss), whose views are the two passes."""
    logits, z, labels = numbers(2, 3, 3), numbers(2, 3, 4, seed=1), torch.tensor([0, 1, 1])
    monkeypatch.setattr(finetune, "classify_with_features", Mock(side_effect=zip(logits, z)))
    args = SimpleNamespace(rdrop_weight=0.7, supcon_weight=0.2, form=form, temperature=0.3)
    found, _ = finetune.compute_loss(None, ({}, labels), 3, args)
    supcon = formulas.supcon_loss(z.transpose(0, 1), labels, 0.3)
    torch.testing.assert_close(found, 0.8 * formulas.rdrop_loss(*logits, labels, 0.7, form) + 0.2 * supcon)
    assert finetune.supcon_loss(z[:1].transpose(0, 1), torch.arange(3)) == 0   # no text has a positive


def test_contrast_set(monkeypatch):
    """Consistency is the percentage of texts whose two versions are both classified correctly."""
    monkeypatch.setattr(finetune.classifier, "predict", lambda _, rows: torch.tensor([x for x, _ in rows]))
    data = dict(original=[([0.0, 1.0], 1), ([1.0, 0.0], 0), ([2.0, 1.0], 1), ([0.0, 3.0], 1)],
                edited=[([0.0, 1.0], 0), ([1.0, 0.0], 0), ([2.0, 1.0], 0), ([0.0, 3.0], 1)])
    args = SimpleNamespace(contrast_set=["a.tsv", "b.tsv"])
    monkeypatch.setattr(finetune, "load_data", lambda path, _: [path])
    assert finetune.load_contrast_set(args) == dict(original=["a.tsv"], edited=["b.tsv"])
    found = finetune.score_contrast_set(None, data)["contrast"]
    assert found == dict(original=75, edited=75, consistency=50)
