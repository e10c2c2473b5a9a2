"""Test vascl.py: the perturbation δ, the first loss, and the removal of duplicate rows."""
import numpy as np
import pytest
import torch

import loss_formulas
import vascl
from kernels.training.loop import batches
from loss_check import numbers
from running import NLI, ONE_BATCH, SENTENCES, embed_saved, equal, run_text


def test_virtual_augmentation_leaves_everything_else_unchanged():
    """Each row of δ has length Δ. Embeddings and head get no gradient, and the statistics of batch norms do
    not change. The function also works within torch.no_grad()."""
    e, noise = numbers(8, 6).requires_grad_(), numbers(8, 6, seed=2)
    head = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)).double()
    before = [x.clone() for x in head.buffers()]
    with torch.no_grad():
        near = vascl.nearest_neighbours(e, 16)                 # there are only 7 other rows
        delta = vascl.virtual_augmentation(e, head, near, noise, 2.0, 0.5)
    assert near.shape == (8, 7) and not delta.requires_grad
    assert delta.norm(dim=1).tolist() == pytest.approx([2] * 8, rel=1e-4)
    assert equal(list(head.buffers()), before) and all(x.grad is None for x in (e, *head.parameters()))


@pytest.mark.parametrize("form, columns, length", [
    ("paper", 1, "--radius 2"), ("code", 2, "--radius 2 --ascent-steps 2"), ("paper", 2, "--radius 0"),
    ("paper", 1, ""), ("code", 1, ""), ("code", 1, "--relative-radius 0.7")])
def test_first_loss_matches_the_formula(form, columns, length, tmp_path, bert, monkeypatch):
    """Both terms of the first loss, and the head's gradients, equal the formulas on the model's embeddings.
    The model has no dropout, and the batch holds all rows. The length of δ is --radius, or a multiple of the
    spread of the batch. The first direction of δ is Gaussian in the paper, uniform in the code."""
    noise = numbers(12, 32, seed=20)
    if form == "paper":
        monkeypatch.setattr(torch, "randn_like", lambda x: noise.float())
    else:                                                      # vascl.py uses rand_like − 0.5
        monkeypatch.setattr(torch, "rand_like", lambda x: noise.float() + 0.5)
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--lr", 0, "--head-lr", 0, "--neighbours", 3, *length.split(), *ONE_BATCH]
    result = run_text("vascl", tmp_path, rows, *flags, "--form", form)
    order = next(batches(12, 12, result.args.seed))            # row i of the noise is for row i of the batch
    views = [embed_saved(bert, [rows[i][column] for i in order], "avg").double() for column in range(columns)]
    layers = list(result.model.projection.parameters())
    assert [tuple(weight.shape) for weight in layers] == [(32, 32), (128, 32)]     # the layers have no biases
    weights = [weight.detach().double().requires_grad_() for weight in layers]
    e, head = views[0], loss_formulas.head(*weights)
    terms = {"instance": loss_formulas.nt_xent(head(e), head(views[-1]), 0.05, normalize=True)}
    spread = (e - e.mean(0)).norm(dim=1).mean().item()
    default = 15 if form == "code" else 0.25 * spread
    radius = {"": default, "--relative-radius 0.7": 0.7 * spread}.get(length, 2 * ("--radius 2" in length))
    if radius:
        near = (e @ e.T).fill_diagonal_(-torch.inf).topk(3).indices
        steps = 2 if "steps" in length else 1
        delta = loss_formulas.virtual_augmentation(e, *weights, near, noise, radius, 0.05, steps)
        terms["neighbourhood"] = loss_formulas.neighbourhood_loss(e, e + delta, *weights, near, 0.05, form)
    terms["loss"] = sum(terms.values())
    expected = {name: term.item() for name, term in terms.items()}
    assert {name: result.steps[0][name] for name in expected} == pytest.approx(expected, abs=1e-4)
    for weight, gradient in zip(layers, torch.autograd.grad(terms["loss"], weights)):
        torch.testing.assert_close(weight.grad.double(), gradient, rtol=1e-4, atol=1e-4)


def test_a_saved_head_is_trained(tmp_path, bert):
    flags = ["--batch-size", 4, "--steps", 1, "--lr", 0.1, "--model"]
    first = run_text("simcse", tmp_path / "a", SENTENCES[:9], "--head", "keep", *flags, bert)
    second = run_text("vascl", tmp_path / "b", SENTENCES[:9], "--neighbours", 3, *flags, first.args.out)
    assert not torch.equal(first.model.head[0].weight, second.model.head[0].weight)


def test_duplicates_are_dropped(tmp_path):
    """9 of 12 rows are distinct; two of these have the same anchor. With batches of 4, the third batch of an
    epoch would have one row and no negatives, so it is left out."""
    rows = [[*SENTENCES[i % 8], *SENTENCES[i]] for i in (*range(9), 2, 3, 4)]
    flags = ["--model", "scratch", "--batch-size", 4, "--neighbours", 3, "--epochs", 2]
    result = run_text("vascl", tmp_path, rows, *flags)
    assert "12 rows of 2 columns" in result.said["vascl"] and "9 of them distinct" in result.said["vascl"]
    assert ["neighbourhood" in step for step in result.steps] == [True] * 4 and np.min(result.losses) > 0
