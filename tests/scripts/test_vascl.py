"""VaSCL: its public functions against float64 code written out row by row, and what its two forms train."""
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vascl
from formulas import agree, points
from kernels.training.loop import batches
from running import DATA, NLI, ONE_BATCH, SENTENCES, SMALL, embed_saved, equal, refuse, run_text

both_forms = pytest.mark.parametrize("form", ["paper", "code"])
T, WEIGHTS = 0.05, (points(6, 6, 100), points(5, 6, 101))
unit = lambda x: x / x.norm(dim=1, keepdim=True).clamp(min=1e-8)


def head_of(first, second, dead=-1):
    """Linear, ReLU, Linear without biases; and a row whose output is 0."""
    return lambda x: torch.relu(x @ first.T) @ second.T * (torch.arange(len(x)) != dead)[:, None]


def written_nearest(e, k):
    products = [[(float(a @ b), j) for j, b in enumerate(e) if j != i] for i, a in enumerate(e)]
    return torch.tensor([[j for _, j in sorted(row, reverse=True)[:k]] for row in products]).long()


def cost(positive, negatives):
    return -torch.log(torch.exp(positive) / (torch.exp(positive) + sum(torch.exp(x) for x in negatives)))


def written_augmentation(e, head, neighbours, noise, radius, t, steps=1):
    """The released loop: a direction, and the gradient there of L_uni as printed, which replaces it."""
    short = lambda x: x / (x.norm(dim=1, keepdim=True) + 1e-8)
    z, d = unit(head(e)).detach(), short(noise)
    for _ in range(steps):
        d.requires_grad_()
        moved, total = unit(head(e + radius * d)), 0
        for i, near in enumerate(neighbours):
            total = total + cost(z[i] @ moved[i] / t, [moved[i] @ z[k] / t for k in near]) / len(e)
        d = short(torch.autograd.grad(total, d)[0])
    return radius * d


def written_loss(e, perturbed, head, neighbours, t, form="paper"):
    """The neighbourhood term with 2N anchors, one after the other."""
    z, star, total = unit(head(e)), unit(head(perturbed)), 0
    if form == "code":
        z, star = z.detach(), unit(head(perturbed.detach()))
    for i, near in enumerate(neighbours):
        for anchor in (z[i], star[i]):
            negatives = [anchor @ others[k] / t for k in near for others in (z, star)]
            total = total + cost(z[i] @ star[i] / t, negatives) / (2 * len(e))
    return total


@both_forms
@pytest.mark.parametrize("n, k, steps, radius, t", [
    (8, 3, 1, 15.0, T), (8, 16, 1, 2.0, T), (6, 2, 3, 4.0, 0.2), (8, 3, 0, 15.0, T), (5, 0, 1, 1.0, T)])
def test_virtual_augmentation(form, n, k, steps, radius, t):
    """There is no way without gradient, as row 0's head is dead, nor, without steps, without noise: row 1; it
    leaves no trace, nor in a batch norm. Neighbours are near by raw products; too large a K is all others."""
    torch.manual_seed(0)
    e, noise, dead = points(n, 6, 1), points(n, 6, 2), head_of(*WEIGHTS, dead=0)
    noise[1], given = 0, (neighbours := written_nearest(e, k), noise, radius, t, steps)
    assert k == 0 or torch.equal(vascl.nearest_neighbours(e.requires_grad_(), k), neighbours)
    norm = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)).double()
    before = [x.clone() for x in norm.buffers()]
    for head in (norm, dead):
        with torch.no_grad():                                  # the gradient inside is its own affair
            ours = vascl.virtual_augmentation(e, head, *given, form)
        assert head is dead or equal(list(norm.buffers()), before)
        assert not ours.requires_grad and all(x.grad is None for x in (e, *norm.parameters()))
        wanted = written_augmentation(e.detach(), head, *given)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-8)
    still = [0 if steps else 1] if k else range(n)
    lengths = [radius * (i not in still) for i in range(n)]
    assert ours.norm(dim=1).tolist() == pytest.approx(lengths, rel=1e-4)


@both_forms
@pytest.mark.parametrize("n, k, t", [(7, 3, T), (7, 6, T), (2, 1, T), (6, 2, 1.0)])
def test_neighbourhood_loss(form, n, k, t):
    """Rows 0 and 1 are equal, the head of row 2 is dead."""
    e, perturbed = points(n, 6, 7), points(n, 6, 7) + 0.5 * points(n, 6, 8)
    e[1] = e[0]
    neighbours = vascl.nearest_neighbours(e, k)

    def loss(function, e, perturbed, *weights):                # where a form has no gradient, this has 0
        head, nothing = head_of(*weights, dead=2), 0 * (e.sum() + perturbed.sum())
        return function(e, perturbed, head, neighbours, t, form) + nothing
    ours, written = (lambda *x, f=f: loss(f, *x) for f in (vascl.neighbourhood_loss, written_loss))
    agree(ours, written, e, perturbed, *WEIGHTS)


@pytest.mark.parametrize("form, columns, length", [
    ("paper", 1, "--radius 2"), ("code", 2, "--radius 2"), ("paper", 2, "--radius 0"), ("paper", 1, ""),
    ("code", 1, ""), ("code", 1, "--relative-radius 0.7"), ("paper", 1, "--relative-radius 0")])
def test_first_loss_is_the_papers(form, columns, length, tmp_path, bert, monkeypatch):
    """Without dropout, all rows one batch, on the folder's embeddings: terms, and gradients of the head. The
    length of δ is a number, or one of the mean length of the batch."""
    noise, draw = points(12, 32, 20), {"paper": "randn_like", "code": "rand_like"}[form]
    monkeypatch.setattr(torch, draw, lambda x: noise.float() + (form == "code") / 2)
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--lr", 0, "--head-lr", 0, "--neighbours", 3, *length.split(), *ONE_BATCH]
    result = run_text("vascl", tmp_path, rows, *flags, "--form", form)
    order = next(batches(12, 12, result.args.seed))            # each row has its noise
    views = [embed_saved(bert, [rows[i][column] for i in order], "avg").double() for column in range(columns)]
    layers = list(result.model.projection.parameters())
    assert [tuple(weight.shape) for weight in layers] == [(32, 32), (128, 32)]             # no biases
    weights = [weight.detach().double().requires_grad_() for weight in layers]
    e, head = views[0], head_of(*weights)
    z = unit(head(torch.cat([e, views[-1]])))
    logits = (z @ z.T / T).masked_fill(torch.eye(24).bool(), -torch.inf)
    terms = {"instance": F.cross_entropy(logits, torch.arange(24).roll(12))}
    mean = np.mean([(row - e.mean(0)).norm().item() for row in e])
    radius = {"": 15 if form == "code" else 0.25 * mean, "--radius 2": 2, "--relative-radius 0.7": 0.7 * mean}
    if radius := radius.get(length):
        near = written_nearest(e, 3)
        delta = written_augmentation(e, head, near, noise, radius, T)
        terms["neighbourhood"] = written_loss(e, e + delta, head, near, T, form)
    terms["loss"] = sum(terms.values())
    wanted = {name: term.item() for name, term in terms.items()}
    assert {name: result.steps[0][name] for name in wanted} == pytest.approx(wanted, abs=1e-4)
    for weight, gradient in zip(layers, torch.autograd.grad(terms["loss"], weights)):
        torch.testing.assert_close(weight.grad.double(), gradient, rtol=1e-4, atol=1e-4)


def test_distinct_rows_at_two_constant_rates(tmp_path):
    """9 of 12 rows: the third batch of an epoch is one sentence, without negatives and neighbours."""
    flags = ["--model", "scratch", "--batch-size", 4, "--neighbours", 3, "--epochs", 2, "--lr", 1e-3]
    result = run_text("vascl", tmp_path, SENTENCES[:9] + SENTENCES[2:5], *flags, "--head-lr", 1e-2)
    assert "12 rows of one column" in result.said["vascl"] and "9 of them distinct" in result.said["vascl"]
    assert ["neighbourhood" in step for step in result.steps] == [True, True, False] * 2
    assert result.losses[2::3] == [0, 0] and {step["lr"] for step in result.steps} == {1e-3}
    groups = result.run.optimizer.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-3, 0), (1e-2, 0)]
    assert equal(groups[1]["params"], list(result.model.projection.parameters()))


@pytest.mark.parametrize("flags, wanted", [
    ("--neighbours 2", "--neighbours 2: wanted fewer than --batch-size, which is 2"),
    ("--neighbours 0", "argument .* at least 1"), ("--radius -1", "argument .* at least 0"),
    ("--radius 15 --relative-radius 0.2", "--radius 15 --relative-radius 0.2: wanted one of them"),
    ("--ascent-steps -1", "argument .* at least 0"),
    ("--data same.csv", "same.csv: 1 distinct rows, wanted at least 2 and --batch-size, which is 2"),
    (f"--data {DATA}/nli.csv", r".*nli.csv line 2: 3 columns, wanted 1 .* or 2 \(.*, positive\), as .* 1 2")])
def test_bad_input(flags, wanted, here, capfd):
    Path("same.csv").write_text("A,b\nA,b\nA,b\n")
    refuse("vascl", capfd, wanted, *SMALL, "--neighbours", 1, *flags.split())
