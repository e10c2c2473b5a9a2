"""VaSCL: its public functions against float64 code written out row by row, and what its two forms train."""
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoTokenizer

import vascl
from test_losses import agree, points
from test_scripts import NLI, SENTENCES, bert, one_cpu_thread, pooled, run_text  # noqa: F401, fixtures

both_forms = pytest.mark.parametrize("form", ["paper", "code"])
T = 0.05


def make_head(d, seed=0):
    """(head, its two weights): Linear, ReLU, Linear without biases, 5 numbers wide in the end."""
    first, second = points(d, d, seed + 100), points(5, d, seed + 101)
    return lambda x: torch.relu(x @ first.T) @ second.T, first, second


def unit(x):
    """Rows of length one, by hand; a row of zeros stays."""
    return torch.stack([row / row.square().sum().sqrt() if row.any() else row for row in x])


def written_nearest(e, k):
    products = [[(float(a @ b), j) for j, b in enumerate(e) if j != i] for i, a in enumerate(e)]
    return [[j for _, j in sorted(row, reverse=True)[:k]] for row in products]


def written_objective(z, moved, neighbours, t):
    """L_uni as printed, exp and all."""
    total = 0
    for i, near in enumerate(neighbours):
        positive = torch.exp(z[i] @ moved[i] / t)
        total = total - torch.log(positive / (positive + sum(torch.exp(moved[i] @ z[k] / t) for k in near)))
    return total / len(z)


def written_augmentation(e, head, neighbours, noise, radius, t, steps):
    """The released loop: a direction, the gradient there, which replaces it."""
    z, d = unit(head(e)), torch.stack([row / (row.norm() + 1e-8) for row in noise])
    for _ in range(steps):
        d = d.clone().requires_grad_()
        gradient, = torch.autograd.grad(written_objective(z, unit(head(e + radius * d)), neighbours, t), d)
        d = torch.stack([row / (row.norm() + 1e-8) for row in gradient])
    return radius * d


def written_loss(e, perturbed, head, neighbours, t, form="paper"):
    """The neighbourhood term with 2N anchors, one after the other."""
    z, star = unit(head(e)), unit(head(perturbed))
    if form == "code":
        z, star = z.detach(), unit(head(perturbed.detach()))
    total = 0
    for anchors in (z, star):
        for i, near in enumerate(neighbours):
            positive = torch.exp(z[i] @ star[i] / t)
            negatives = sum(torch.exp(anchors[i] @ z[k] / t) + torch.exp(anchors[i] @ star[k] / t) for k in near)
            total = total - torch.log(positive / (positive + negatives))
    return total / (2 * len(e))


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("n, k, kept", [(9, 3, 3), (9, 8, 8), (9, 16, 8), (2, 1, 1)])
def test_nearest_neighbours(impl, n, k, kept):
    """By raw inner products, which are not those of unit rows; a K that the batch has not is all others."""
    e = points(n, 6, 0) * torch.linspace(0.2, 3, n, dtype=torch.float64)[:, None]
    found = vascl.nearest_neighbours(e, k, impl=impl)
    assert found.dtype == torch.int64 and found.shape == (n, kept)
    assert found.tolist() == written_nearest(e, kept)
    assert n == 2 or found.tolist() != written_nearest(unit(e), kept) or k >= n - 1
    half = vascl.nearest_neighbours(e.bfloat16().requires_grad_(), k, impl=impl)
    assert half.tolist() == written_nearest(e.bfloat16().double(), kept)


@both_forms
@pytest.mark.parametrize("n, k, steps, radius, t", [(8, 3, 1, 15.0, T), (8, 7, 1, 2.0, T), (6, 2, 3, 4.0, 0.2), (8, 3, 0, 15.0, T), (5, 0, 1, 1.0, T)])
def test_virtual_augmentation(form, n, k, steps, radius, t):
    e, noise, head = points(n, 6, 1), points(n, 6, 2), make_head(6)[0]
    neighbours = torch.tensor(written_nearest(e, k), dtype=torch.int64)
    with torch.no_grad():                                      # the gradient inside is its own affair
        ours = vascl.virtual_augmentation(e, head, neighbours, noise, radius, t, steps, form)
    torch.testing.assert_close(ours, written_augmentation(e, head, neighbours.tolist(), noise, radius, t, steps), rtol=0, atol=1e-8)
    assert not ours.requires_grad
    if k:
        torch.testing.assert_close(ours.norm(dim=1), torch.full((n,), radius, dtype=torch.float64), rtol=1e-4, atol=0)
    else:                                                      # nothing to be told from: no gradient
        assert not ours.any()


def test_the_augmentation_climbs():
    """For small steps: along the gradient the objective rises as fast as its length says, and faster than in other directions."""
    e, noise, head = points(8, 6, 3), points(8, 6, 4), make_head(6)[0]
    neighbours = vascl.nearest_neighbours(e, 3)
    z, radius, rises = unit(head(e)), 1e-4, []
    for delta in [vascl.virtual_augmentation(e, head, neighbours, noise, radius, T)] + [radius * unit(points(8, 6, s)) for s in range(5, 25)]:
        rises.append(float(written_objective(z, unit(head(e + delta)), neighbours, T) - written_objective(z, z, neighbours, T)))
    assert rises[0] == max(rises) and rises[0] > 2 * sum(map(abs, rises[1:])) / 20


@both_forms
def test_rows_without_gradient(form):
    """Noise that is 0, and a point where all of the head's units are dead: no NaN, and e itself is its augmentation there."""
    e, noise, head = points(8, 6, 5), points(8, 6, 6), make_head(6)[0]
    dead = lambda x: head(x) * torch.cat([torch.zeros(1, 1), torch.ones(len(x) - 1, 1)]).double()
    neighbours = vascl.nearest_neighbours(e, 3)
    noise[4] = 0
    ours = vascl.virtual_augmentation(e, dead, neighbours, noise, 3.0, T, 1, form)
    assert ours.isfinite().all() and not ours[0].any() and ours[1:].any(1).all()
    torch.testing.assert_close(ours, written_augmentation(e, dead, neighbours.tolist(), noise, 3.0, T, 1), rtol=0, atol=1e-8)
    start = vascl.virtual_augmentation(e, head, neighbours, noise, 3.0, T, 0, form)
    assert not start[4].any() and start[:4].any(1).all()
    loss = vascl.neighbourhood_loss(e, e + ours, dead, neighbours, T, form)
    assert loss.isfinite()


@both_forms
@pytest.mark.parametrize("n, k, t", [(7, 3, T), (7, 6, T), (2, 1, T), (6, 2, 1.0)])
def test_neighbourhood_loss(form, n, k, t):
    """Value, and gradients of the embeddings, of the perturbed ones and of the head."""
    e, perturbed, (_, first, second) = points(n, 6, 7), points(n, 6, 7) + 0.5 * points(n, 6, 8), make_head(6)
    neighbours = torch.tensor(written_nearest(e, k))

    def with_weights(f, neighbours):
        def value(e, perturbed, first, second):
            head = lambda x: torch.relu(x @ first.T) @ second.T
            return f(e, perturbed, head, neighbours, t, form) + 0 * (e.sum() + perturbed.sum())    # code: a gradient of 0
        return value
    agree(with_weights(vascl.neighbourhood_loss, neighbours), with_weights(written_loss, neighbours.tolist()), e, perturbed, first, second)


def test_code_trains_the_head_alone_and_paper_all():
    head, first, second = make_head(6)
    leaves = [x.requires_grad_() for x in (points(7, 6, 9), first, second)]
    e, neighbours = leaves[0], vascl.nearest_neighbours(leaves[0], 3)
    delta = vascl.virtual_augmentation(e, head, neighbours, points(7, 6, 10), 3.0, T)
    assert all(x.grad is None for x in leaves)                 # none has leaked from the ascent
    grads = {form: torch.autograd.grad(vascl.neighbourhood_loss(e, e + delta, head, neighbours, T, form), leaves, allow_unused=True)
             for form in ("paper", "code")}
    assert all(g.any() for g in grads["paper"])
    assert grads["code"][0] is None and all(g.any() for g in grads["code"][1:])
    losses = [vascl.neighbourhood_loss(e, e + delta, head, neighbours, T, form) for form in ("paper", "code")]
    assert losses[0] == losses[1]


@both_forms
def test_duplicates(form):
    """Equal rows are each other's neighbours; their negatives equal the positive, and all stays finite."""
    e = points(6, 6, 11)
    e[3] = e[0] = 2 * e[0]
    head, neighbours = make_head(6)[0], vascl.nearest_neighbours(e, 2)
    assert neighbours[0, 0] == 3 and neighbours[3, 0] == 0
    delta = vascl.virtual_augmentation(e, head, neighbours, points(6, 6, 12), 3.0, T, 1, form)
    torch.testing.assert_close(delta, written_augmentation(e, head, neighbours.tolist(), points(6, 6, 12), 3.0, T, 1), rtol=0, atol=1e-8)
    agree(lambda e: vascl.neighbourhood_loss(e, e + delta, head, neighbours, T) + vascl.neighbourhood_loss(e, e, head, neighbours, T),
          lambda e: written_loss(e, e + delta, head, neighbours.tolist(), T) + written_loss(e, e, head, neighbours.tolist(), T), e)


def test_small_temperature_and_float32():
    """Logits of ±1000 overflow exp; and float32 follows float64."""
    e, head = points(9, 6, 13).float().double(), make_head(6)[0]
    narrow = lambda x: head(x.double()).float()
    neighbours, noise = vascl.nearest_neighbours(e, 4), points(9, 6, 14)
    for t in (1e-3, T):
        delta = vascl.virtual_augmentation(e, head, neighbours, noise, 2.0, t)
        exact = vascl.neighbourhood_loss(e, e + delta, head, neighbours, t)
        single = vascl.neighbourhood_loss(e.float(), (e + delta).float(), narrow, neighbours, t)
        assert exact.dtype == torch.float64 and single.dtype == torch.float32
        assert math.isclose(single, exact, rel_tol=1e-4) and 0 < exact < math.inf


def test_a_batch_norm_does_not_see_the_ascent():
    head = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 5)).double()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    e = points(8, 6, 15).requires_grad_()
    delta = vascl.virtual_augmentation(e, head, vascl.nearest_neighbours(e, 3), points(8, 6, 16), 3.0, T, 2)
    assert delta.any() and all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    assert e.grad is None and all(weight.grad is None for weight in head.parameters())
    other = written_augmentation(e.detach(), head, vascl.nearest_neighbours(e, 3).tolist(), points(8, 6, 16), 3.0, T, 2)
    torch.testing.assert_close(delta, other, rtol=0, atol=1e-8)


@pytest.mark.parametrize("change, wanted", [
    (dict(radius=-1.0), "radius -1.0"), (dict(radius=math.nan), "radius nan"), (dict(steps=-1), "steps -1"),
    (dict(form="papers"), "form 'papers'"), (dict(noise=points(1, 6, 0)), r"noise \(1, 6\)")])
def test_bad_arguments(change, wanted):
    e, head = points(5, 6, 17), make_head(6)[0]
    neighbours = vascl.nearest_neighbours(e, 2)
    arguments = dict(e=e, head=head, neighbours=neighbours, noise=e, radius=1.0, temperature=T) | change
    with pytest.raises(ValueError, match=wanted):
        vascl.virtual_augmentation(**arguments)
    with pytest.raises(ValueError, match="form: 'papers'"):
        vascl.neighbourhood_loss(e, e, head, neighbours, T, "papers")
    with pytest.raises(ValueError, match="n: 0"):
        vascl.nearest_neighbours(e[:1], 2)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor has, views aside."""
    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(x):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_the_square_matrix_is_never_stored():
    n, k, d = 3000, 4, 16
    e, noise, head = points(n, d, 18).requires_grad_(), points(n, d, 19), make_head(d)[0]
    with Largest() as largest:
        neighbours = vascl.nearest_neighbours(e, k)
        delta = vascl.virtual_augmentation(e, head, neighbours, noise, 3.0, T)
        vascl.neighbourhood_loss(e, e + delta, head, neighbours, T).backward()
    assert n * 2 * k * 5 <= largest.numbers < n * n / 3


# ── the script ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def first_step(folder, rows, *flags):
    """A run of one step whose rates are 0: all of its weights are those of before the step."""
    folder.mkdir(exist_ok=True)
    return run_text("vascl", folder, rows, "--model", "scratch", "--steps", 1, "--lr", 0, "--head-lr", 0, *flags)


@both_forms
@pytest.mark.parametrize("width", [1, 2])
def test_first_loss_is_the_papers(form, width, tmp_path, bert, monkeypatch):
    """Without dropout and with all rows in one batch, on the folder's own embeddings and the noise that was drawn."""
    noise = []
    for name in ("randn_like", "rand_like"):
        draw = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda x, draw=draw, name=name: noise.append((name, draw(x))) or noise[-1][1])
    rows = SENTENCES[:12] if width == 1 else [row[:2] for row in NLI[:12]]
    flags = ["--model", bert, "--batch-size", 12, "--neighbours", 3, "--radius", 2, "--form", form, "--max-length", 512]
    result = first_step(tmp_path, rows, *flags)
    (drawn, noise), = noise
    assert drawn == {"paper": "randn_like", "code": "rand_like"}[form]
    folder = AutoModel.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    rows = next(vascl.batches(rows, 0, result.args))           # in the order in which noise was drawn
    e1, *others = [pooled(*folder, view, "avg").double() for view in zip(*rows)]
    head = result.model.projection.double()
    assert [tuple(weight.shape) for weight in head.parameters()] == [(32, 32), (128, 32)]        # no biases
    z = torch.cat([unit(head(e)) for e in [e1, *(others or [e1])]])
    logits = z @ z.T / T
    instance = torch.nn.functional.cross_entropy(logits.fill_diagonal_(-torch.inf), torch.arange(24).roll(12)).item()
    near = written_nearest(e1, 3)
    delta = written_augmentation(e1, head, near, noise.double() - (form == "code") / 2, 2, T, 1)
    neighbourhood = written_loss(e1, e1 + delta, head, near, T).item()
    step, = result.steps
    assert [step["instance"], step["neighbourhood"]] == pytest.approx([instance, neighbourhood], abs=1e-3)
    assert step["loss"] == pytest.approx(step["instance"] + step["neighbourhood"], abs=1e-5)


@both_forms
@pytest.mark.parametrize("radius", [0.0, 2.0])
def test_the_terms_and_what_they_train(form, radius, monkeypatch):
    """compute_loss on given embeddings: the sum of both terms and its gradients, those of the encoder with each form its own."""
    noise, near = points(7, 6, 21), 3
    monkeypatch.setattr(torch, "randn_like", lambda x: noise)
    monkeypatch.setattr(torch, "rand_like", lambda x: noise + 0.5)
    args = SimpleNamespace(rows=7, world=1, temperature=T, impl="auto", radius=radius, neighbours=near, ascent_steps=1, form=form)

    def ours(views, first, second):
        monkeypatch.setattr(vascl, "embed", lambda model, batch: views)
        head = lambda x: torch.relu(x @ first.T) @ second.T
        loss, values = vascl.compute_loss(SimpleNamespace(projection=head), None, args)
        assert values.keys() == {"loss", "instance", "neighbourhood"} - ({"neighbourhood"} if radius == 0 else set())
        assert values["loss"] == loss == sum(values.values()) - values["loss"]
        return loss

    def written(views, first, second):
        head, e = lambda x: torch.relu(x @ first.T) @ second.T, views[:7]
        z = unit(head(views))
        logits = (z @ z.T / T).masked_fill(torch.eye(14).bool(), -torch.inf)
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(14).roll(7))
        if radius:
            neighbours = written_nearest(e.detach(), near)
            delta = written_augmentation(e.detach(), head, neighbours, noise, radius, T, 1).detach()
            loss = loss + written_loss(e, e + delta, head, neighbours, T, form)
        return loss
    agree(ours, written, points(14, 6, 20), *make_head(6)[1:], tolerance=1e-8)


def test_steps_are_adam_at_two_constant_rates(tmp_path):
    """Adam's first step moves every weight with a gradient by its rate; later ones are not smaller by schedule."""
    flags = ["--model", "scratch", "--batch-size", 6, "--neighbours", 2, "--lr", 1e-3, "--head-lr", 1e-2]
    result = run_text("vascl", tmp_path, SENTENCES[:12], *flags, "--steps", 4)
    assert [(group["lr"], group["weight_decay"]) for group in result.state["optimizer"]["param_groups"]] == [(1e-3, 0), (1e-2, 0)]
    assert {step["lr"] for step in result.steps} == {1e-3}
    before = first_step(tmp_path / "none", SENTENCES[:12], *flags[:6]).state["model"]
    (tmp_path / "one").mkdir()
    one = run_text("vascl", tmp_path / "one", SENTENCES[:12], *flags, "--steps", 1).state["model"]
    for name, rate in (("projection.0.weight", 1e-2), ("encoder.encoder.layer.1.output.dense.weight", 1e-3)):
        assert (one[name] - before[name]).abs().max().item() == pytest.approx(rate, rel=1e-3)


def test_rows_that_repeat_are_left_out_and_a_last_sentence_is_alone(tmp_path):
    rows = SENTENCES[:9] + SENTENCES[2:5]
    result = run_text("vascl", tmp_path, rows, "--model", "scratch", "--batch-size", 4, "--neighbours", 3, "--epochs", 2)
    assert "12 rows of 1 columns" in result.said["vascl"] and "9 of them distinct" in result.said["vascl"]
    assert ["neighbourhood" in step for step in result.steps] == [True, True, False] * 2
    assert [step["loss"] for step in result.steps][2::3] == [0, 0]           # 9 rows: the third batch is one sentence


def test_others_load_the_encoder_without_the_head(tmp_path, bert):
    flags = ["--model", bert, "--batch-size", 8, "--neighbours", 3, "--steps", 3, "--lr", 1e-2]
    result = run_text("vascl", tmp_path, SENTENCES[:24], *flags)
    _, auto_model = result.said["load"].split("  or  ")
    model, tokenizer = eval(auto_model, {"AutoModel": AutoModel}), AutoTokenizer.from_pretrained(tmp_path / "out")
    sentences = [row[0] for row in SENTENCES[:6]]
    rows = [(ids,) for ids in vascl.tokenise(sentences, result.model, 512)[0]]
    ours = vascl.embed(result.model.eval(), vascl.make_batch(rows, result.model, result.args)).detach()
    assert model.pooler is None
    torch.testing.assert_close(pooled(model, tokenizer, sentences, "avg"), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name, content, flags, wanted", [
    ("a.txt", "A\nB\nC\n", "--neighbours 2", "--neighbours 2: wanted fewer than --batch-size, which is 2"),
    ("a.txt", "A\nB\nC\n", "--neighbours 0", "argument --neighbours: 0: wanted a number of at least 1"),
    ("a.txt", "A\nB\nC\n", "--radius -1", "argument --radius: -1: wanted a number of at least 0"),
    ("a.txt", "A\nB\nC\n", "--ascent-steps -1", "argument --ascent-steps: -1: wanted a number of at least 0"),
    ("a.txt", "A\nB\nC\n", "--head-lr nan", "argument --head-lr: nan: wanted a number of at least 0"),
    ("a.txt", "A\nB\nC\n", "--form paer", "argument --form: invalid choice: 'paer' (choose from *"),
    ("a.txt", "A\nB\nC\n", "--pooling cls", "argument --pooling: invalid choice: 'cls' (choose from *"),
    ("a.txt", "A\nA\nA\n", "", "a.txt: 1 distinct rows, wanted at least 2 and --batch-size, which is 2"),
    ("a.csv", "A,b,c\nA,b,c\n", "", "a.csv line 1: 3 columns, wanted 1 (sentence) or 2 (sentence, positive)"),
    ("a.txt", "A\n\nB\n", "", "a.txt line 2: an empty cell; fill it or delete the row")])
def test_bad_input(name, content, flags, wanted, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    with pytest.raises(SystemExit) as end:
        vascl.main(["--data", name, "--model", "scratch", "--batch-size", "2", "--neighbours", "1", *flags.split()])
    err = capfd.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and err.startswith("vascl.py: " + wanted.rstrip("*"))
    assert wanted.endswith("*") or err == f"vascl.py: {wanted}\n"
    assert os.listdir() == [name]
