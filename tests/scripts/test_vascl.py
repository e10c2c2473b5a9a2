"""VaSCL: its public functions compared with float64 code that computes row by row, its forms, whole runs."""
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vascl
from formulas import check_equal, randn
from kernels.training.loop import batches
from running import DATA, NLI, ONE_BATCH, SENTENCES, SMALL, embed_saved, equal, rejects, run_text

both_forms = pytest.mark.parametrize("form", ["paper", "code"])
T, WEIGHTS = 0.05, (randn(6, 6, 100), randn(5, 6, 101))


def unit(x):
    return x / x.norm(dim=1, keepdim=True).clamp(min=1e-8)


def make_head(first, second, dead=-1):
    """Return a head: linear, ReLU, linear without biases. Its output is 0 for the row `dead`."""
    def head(x):
        return torch.relu(x @ first.T) @ second.T * (torch.arange(len(x)) != dead)[:, None]
    return head


def reference_neighbours(e, k):
    products = [[(float(a @ b), j) for j, b in enumerate(e) if j != i] for i, a in enumerate(e)]
    return torch.tensor([[j for _, j in sorted(row, reverse=True)[:k]] for row in products]).long()


def info_nce(positive, negatives):
    return -torch.log(torch.exp(positive) / (torch.exp(positive) + sum(torch.exp(x) for x in negatives)))


def reference_augmentation(e, head, neighbours, noise, radius, t, steps=1):
    """Compute δ like the released loop: in each step, the normalised gradient becomes the new direction."""
    def normalise(x):
        return x / (x.norm(dim=1, keepdim=True) + 1e-8)

    z, direction = unit(head(e)).detach(), normalise(noise)
    for _ in range(steps):
        direction.requires_grad_()
        moved, total = unit(head(e + radius * direction)), 0
        for i, near in enumerate(neighbours):
            total = total + info_nce(z[i] @ moved[i] / t, [moved[i] @ z[k] / t for k in near]) / len(e)
        direction = normalise(torch.autograd.grad(total, direction)[0])
    return radius * direction


def reference_loss(e, perturbed, head, neighbours, t, form="paper"):
    """Compute the neighbourhood term with a loop over its 2N anchors."""
    z, star, total = unit(head(e)), unit(head(perturbed)), 0
    if form == "code":
        z, star = z.detach(), unit(head(perturbed.detach()))
    for i, near in enumerate(neighbours):
        for anchor in (z[i], star[i]):
            negatives = [anchor @ others[k] / t for k in near for others in (z, star)]
            total = total + info_nce(z[i] @ star[i] / t, negatives) / (2 * len(e))
    return total


@both_forms
@pytest.mark.parametrize("n, k, steps, radius, t", [
    (8, 3, 1, 15.0, T), (8, 16, 1, 2.0, T), (6, 2, 3, 4.0, 0.2), (8, 3, 0, 15.0, T), (5, 0, 1, 1.0, T)])
def test_virtual_augmentation(form, n, k, steps, radius, t):
    """δ and the neighbours equal the reference. δ is 0 where there is no gradient: in row 0, whose projection
    is constant, and with K = 0 in all rows. With steps = 0, δ is 0 in row 1, whose noise is 0. Gradients and
    batch norm statistics do not change. If K is too large, all other rows are neighbours."""
    torch.manual_seed(0)
    e, noise, dead_head = randn(n, 6, 1), randn(n, 6, 2), make_head(*WEIGHTS, dead=0)
    noise[1] = 0
    neighbours = reference_neighbours(e, k)
    given = neighbours, noise, radius, t, steps
    assert k == 0 or torch.equal(vascl.nearest_neighbours(e.requires_grad_(), k), neighbours)
    norm_head = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)).double()
    before = [x.clone() for x in norm_head.buffers()]
    for head in (norm_head, dead_head):
        with torch.no_grad():                                  # the function turns gradients on itself
            delta = vascl.virtual_augmentation(e, head, *given, form)
        assert head is dead_head or equal(list(norm_head.buffers()), before)
        assert not delta.requires_grad and all(x.grad is None for x in (e, *norm_head.parameters()))
        expected = reference_augmentation(e.detach(), head, *given)
        torch.testing.assert_close(delta, expected, rtol=0, atol=1e-8)
    zero_rows = range(n) if k == 0 else [0] if steps else [1]
    lengths = [0 if i in zero_rows else radius for i in range(n)]
    assert delta.norm(dim=1).tolist() == pytest.approx(lengths, rel=1e-4)


@both_forms
@pytest.mark.parametrize("n, k, t", [(7, 3, T), (7, 6, T), (2, 1, T), (6, 2, 1.0)])
def test_neighbourhood_loss(form, n, k, t):
    """Rows 0 and 1 are equal, and row 2 has a projection of 0."""
    e, perturbed = randn(n, 6, 7), randn(n, 6, 7) + 0.5 * randn(n, 6, 8)
    e[1] = e[0]
    neighbours = vascl.nearest_neighbours(e, k)

    def loss_by(function):
        def loss(e, perturbed, *weights):
            zero = 0 * (e.sum() + perturbed.sum())             # makes a missing gradient 0
            return function(e, perturbed, make_head(*weights, dead=2), neighbours, t, form) + zero
        return loss

    check_equal(loss_by(vascl.neighbourhood_loss), loss_by(reference_loss), e, perturbed, *WEIGHTS)


@pytest.mark.parametrize("form, columns, length", [
    ("paper", 1, "--radius 2"), ("code", 2, "--radius 2"), ("paper", 2, "--radius 0"), ("paper", 1, ""),
    ("code", 1, ""), ("code", 1, "--relative-radius 0.7"), ("paper", 1, "--relative-radius 0")])
def test_first_loss_matches_the_formula(form, columns, length, tmp_path, bert, monkeypatch):
    """Both terms of the first loss, and the head's gradients, equal the formulas on the embeddings of the
    model. The model has no dropout, and the batch holds all rows. The length of δ is --radius, or a multiple
    of the spread of the batch."""
    noise = randn(12, 32, 20)
    if form == "paper":
        monkeypatch.setattr(torch, "randn_like", lambda x: noise.float())
    else:                                                      # vascl.py uses rand_like − 0.5
        monkeypatch.setattr(torch, "rand_like", lambda x: noise.float() + 0.5)
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--lr", 0, "--head-lr", 0, "--neighbours", 3, *length.split(), *ONE_BATCH]
    result = run_text("vascl", tmp_path, rows, *flags, "--form", form)
    order = next(batches(12, 12, result.args.seed))            # noise belongs to positions in the batch
    views = [embed_saved(bert, [rows[i][column] for i in order], "avg").double() for column in range(columns)]
    layers = list(result.model.projection.parameters())
    assert [tuple(weight.shape) for weight in layers] == [(32, 32), (128, 32)]             # no biases
    weights = [weight.detach().double().requires_grad_() for weight in layers]
    e, head = views[0], make_head(*weights)
    z = unit(head(torch.cat([e, views[-1]])))
    logits = (z @ z.T / T).masked_fill(torch.eye(24).bool(), -torch.inf)
    terms = {"instance": F.cross_entropy(logits, torch.arange(24).roll(12))}
    spread = np.mean([(row - e.mean(0)).norm().item() for row in e])
    default = 15 if form == "code" else 0.25 * spread
    radius = {"": default, "--radius 2": 2, "--relative-radius 0.7": 0.7 * spread}.get(length, 0)
    if radius:
        near = reference_neighbours(e, 3)
        delta = reference_augmentation(e, head, near, noise, radius, T)
        terms["neighbourhood"] = reference_loss(e, e + delta, head, near, T, form)
    terms["loss"] = sum(terms.values())
    expected = {name: term.item() for name, term in terms.items()}
    assert {name: result.steps[0][name] for name in expected} == pytest.approx(expected, abs=1e-4)
    for weight, gradient in zip(layers, torch.autograd.grad(terms["loss"], weights)):
        torch.testing.assert_close(weight.grad.double(), gradient, rtol=1e-4, atol=1e-4)


def test_duplicates_are_dropped_and_learning_rates_are_constant(tmp_path):
    """9 of 12 rows are distinct, so the third batch of an epoch would have one sentence, without negatives:
    it is left out. The head has a learning rate of its own."""
    flags = ["--model", "scratch", "--batch-size", 4, "--neighbours", 3, "--epochs", 2, "--lr", 1e-3]
    result = run_text("vascl", tmp_path, SENTENCES[:9] + SENTENCES[2:5], *flags, "--head-lr", 1e-2)
    assert "12 rows of one column" in result.said["vascl"] and "9 of them distinct" in result.said["vascl"]
    assert ["neighbourhood" in step for step in result.steps] == [True] * 4
    assert min(result.losses) > 0 and {step["lr"] for step in result.steps} == {1e-3}
    groups = result.run.optimizer.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-3, 0), (1e-2, 0)]
    assert equal(groups[1]["params"], list(result.model.projection.parameters()))


@pytest.mark.parametrize("flags, message", [
    ("--neighbours 2", "--neighbours 2: expected fewer than --batch-size, which is 2"),
    ("--neighbours 0", "argument .* at least 1"), ("--radius -1", "argument .* at least 0"),
    ("--radius 15 --relative-radius 0.2", "--radius 15 --relative-radius 0.2: expected one of the two"),
    ("--ascent-steps -1", "argument .* at least 0"),
    ("--data same.csv", r"same.csv: 1 distinct rows, expected at least 2 and at least --batch-size \(2\)"),
    (f"--data {DATA}/nli.csv", r".*nli.csv line 2: 3 columns, expected 1 .* or 2 \(.*, positive\); .* 1 2")])
def test_bad_input(flags, message, cwd, capfd):
    Path("same.csv").write_text("A,b\nA,b\nA,b\n")
    rejects("vascl", capfd, message, *SMALL, "--neighbours", 1, *flags.split())
