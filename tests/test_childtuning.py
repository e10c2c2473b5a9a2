"""Child-Tuning: the optimizer, the Fisher information and R-Drop against independent float64 code, and whole
small runs."""
import json
import math
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, pipeline
from transformers import get_linear_schedule_with_warmup

import childtuning
from childtuning import ChildTuningAdamW, fisher_information, fisher_mask, rdrop_loss
from running import DATA, equal, in_processes, metrics, refuse, run
from test_labels import KINDS, small_tokenizer


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(*shapes, seed=0):
    return [torch.nn.Parameter(draw(*shape, seed=seed + i)) for i, shape in enumerate(shapes)]


def random_masks(weights, seed):
    return {w: draw(*w.shape, seed=seed + i) < -0.3 for i, w in enumerate(weights)}


@pytest.fixture
def small_blocks(monkeypatch):
    """A tensor of a hundred weights has several."""
    monkeypatch.setattr(childtuning, "BLOCK", 16)


# ── the optimizer ───────────────────────────────────────────────────────────────────────────────────────────


def released_rule(w, m, v, t, g, lr, beta1, beta2, eps, decay, correct_bias):
    """One step for arrays, in the released order."""
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    a = lr * math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t) if correct_bias else lr
    w = w - a * m / (np.sqrt(v) + eps)
    return w - lr * decay * w, m, v


@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("mode, p", [("none", 0.3), ("D", 0.3), ("F", 0.3), ("F", 0.9)])
def test_thirty_steps_follow_the_released_rule(mode, p, correct_bias, small_blocks):
    """Two groups, clipping before the mask, a falling rate, a weight without gradient in every third step."""
    weights = parameters((7, 5), (5,), (), (1, 3), (17, 11))
    weights[0] = torch.nn.Parameter(draw(5, 7).T)              # columns are contiguous, rows are not
    masks = random_masks(weights[:-2] + weights[-1:], 50)      # the one before the last has none
    groups = [dict(params=weights[:2], weight_decay=0.1),
              dict(params=weights[2:], betas=(0.8, 0.99), eps=1e-3)]
    optimizer = ChildTuningAdamW(groups, 0.01, correct_bias=correct_bias, mode=mode, reserve_p=p,
                                 masks=dict(none=None, D=dict(masks), F=masks.get)[mode])
    state = [(w.detach().numpy().copy(), np.zeros(w.shape), np.zeros(w.shape)) for w in weights]
    times = [0] * len(weights)
    for step in range(30):
        lr = 0.01 * (1 - step / 40)
        for i, w in enumerate(weights):
            w.grad = None if i == 1 and step % 3 == 0 else draw(*w.shape, seed=100 * step + i + 7)
        norm = math.sqrt(sum(w.grad.square().sum().item() for w in weights if w.grad is not None))
        gradients = [w.grad.numpy() / (norm + 1e-6) if w.grad is not None else None for w in weights]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        if mode == "F":
            masks.update(random_masks(list(masks), 1000 * step))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for i, (w, g) in enumerate(zip(weights, gradients)):
            if g is not None:
                if mode != "none" and w in masks:
                    g = np.where(masks[w].numpy(), g / p if mode == "F" else g, 0.0)
                times[i] += 1
                rest = (0.9, 0.999, 1e-6, 0.1) if i < 2 else (0.8, 0.99, 1e-3, 0.0)
                state[i] = released_rule(*state[i], times[i], g, lr, *rest, correct_bias)
    for w, (wanted, m, v) in zip(weights, state):
        np.testing.assert_allclose(w.detach().numpy(), wanted, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(optimizer.state[w]["exp_avg"].numpy(), m, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(optimizer.state[w]["exp_avg_sq"].numpy(), v, rtol=1e-12, atol=1e-15)


def steps(count, weights, optimizer, seed=0):
    for step in range(count):
        for i, w in enumerate(weights):
            w.grad = draw(*w.shape, seed=seed + 31 * step + i).to(w.dtype)
        optimizer.step()
    return [w.detach().clone() for w in weights]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_p_1_is_plain_adamw_to_the_bit(dtype):
    results, generator = [], torch.Generator().manual_seed(5)
    kept = generator.get_state()
    released = dict(mode="ChildTuning-F", reserve_p=1.0)
    for options in ({}, dict(mode=None), dict(mode="F"), dict(mode="D"), released, "all true"):
        weights = [torch.nn.Parameter(w.detach().to(dtype)) for w in parameters((6, 5), (5,))]
        if options == "all true":
            masks = {w: torch.ones_like(w, dtype=torch.bool) for w in weights}
            options = dict(mode="D", reserve_p=0.5, masks=masks)
        optimizer = ChildTuningAdamW(weights, 0.01, weight_decay=0.1, generator=generator, **options)
        results.append(steps(6, weights, optimizer))
    assert all(equal(result, results[0]) for result in results) and torch.equal(generator.get_state(), kept)
    assert not torch.equal(results[0][0], parameters((6, 5))[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.3, 0.75, 0.999])
def test_draws(p, dtype):
    """Seen in the first moment, (1 − β1) g M / p: the share p, independent of place and step, 1 / p in the
    weights' own type."""
    w, shares, masks = torch.nn.Parameter(torch.zeros(999, 401, dtype=dtype)), [], []
    torch.manual_seed(3)
    untouched = torch.get_rng_state()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        w.grad = torch.full_like(w, 0.5)
        optimizer = ChildTuningAdamW([w], betas=(0.5, 0.999), mode="F", reserve_p=p, generator=generator)
        optimizer.step()
        m = optimizer.state[w]["exp_avg"]
        whole = (torch.full((), 0.5, dtype=dtype) * (1 / p)).mul(0.5).item()
        assert set(m.unique().tolist()) == {0.0, whole}
        assert torch.equal(w.grad, torch.full_like(w, 0.5))
        masks.append(m > 0)
        shares.append(masks[-1].double().mean().item())
    deviation = math.sqrt(p * (1 - p) / w.numel())
    assert shares == pytest.approx([p] * 3, abs=5 * deviation) and len(set(shares)) == 3
    both = (masks[0] & masks[1]).double().mean().item()
    neighbours = (masks[0][:, 1:] & masks[0][:, :-1]).double().mean().item()
    assert both == pytest.approx(p * p, abs=0.005) and neighbours == pytest.approx(p * p, abs=0.005)
    assert torch.equal(torch.get_rng_state(), untouched)


def test_ranks_and_repetitions_draw_alike():
    """By default all optimizers begin at one seed; the draws of two steps, and after another seed, differ."""
    results = []
    for seed, dropout in ((None, 0), (None, 1), (1, 0)):
        torch.manual_seed(dropout)                             # as ranks have it
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        weights = parameters((60, 50))
        optimizer = ChildTuningAdamW(weights, mode="F", reserve_p=0.4, generator=generator)
        results.append(steps(3, weights, optimizer))
    assert equal(results[0], results[1]) and not equal(results[0], results[2])


def test_masked_gradients_may_be_anything():
    """A masked inf or NaN is 0; a step twice without a new backward masks the same gradient again; decay
    reaches all."""
    w = torch.nn.Parameter(torch.ones(4))
    mask = torch.tensor([True, False, False, True])
    optimizer = ChildTuningAdamW([w], lr=0.1, weight_decay=0.5, mode="D", masks={w: mask})
    w.grad = torch.tensor([1.0, math.nan, math.inf, -1.0])
    optimizer.step()
    optimizer.step()
    assert equal(w.grad[[0, 2, 3]], torch.tensor([1.0, math.inf, -1.0])) and w.grad[1].isnan()
    decayed = torch.ones(2).add(torch.ones(2), alpha=-0.05).add(torch.full((2,), 0.95), alpha=-0.05)
    assert equal(w[[1, 2]].detach(), decayed)
    assert w[0] < 0.9 * 0.95 and w[3] > 0.95
    w.grad[0] = math.nan
    optimizer.step()
    assert w[0].isnan() and w[1:].isfinite().all()


@pytest.mark.parametrize("mode", ["none", "D", "F"])
def test_state_dict_continues_to_the_bit(mode, tmp_path):
    """Also a file of it, into an optimizer that was made without mode, masks or generator."""
    weights = parameters((6, 5), (5,), (3,))
    masks = random_masks(weights[:2], 9) if mode == "D" else None
    generator = torch.Generator().manual_seed(8)
    optimizer = ChildTuningAdamW(weights, 0.01, mode=mode, reserve_p=0.4, masks=masks, generator=generator)
    steps(3, weights, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    copies = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    other = ChildTuningAdamW(copies)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert equal(steps(3, copies, other, seed=50), steps(3, weights, optimizer, seed=50))
    assert equal(other.state_dict(), optimizer.state_dict())
    assert mode != "D" or all(mask.dtype == torch.bool for mask in other.masks.values())


@pytest.mark.parametrize("mode", ["none", "D", "F"])
def test_a_list_is_stepped_as_its_blocks(mode, small_blocks):
    """What a GPU gets in one go, this file sees in blocks: the same bits."""
    many, few = parameters((17, 11), (5,), ()), parameters((17, 11), (5,), ())
    masks = list(random_masks(many, 9).values())
    optimizer = ChildTuningAdamW(few, 0.01, weight_decay=0.1, mode=mode, reserve_p=0.4,
                                 masks=dict(zip(few, masks)))
    masks = [None] * 3 if mode == "none" else masks
    for i, w in enumerate(few):
        w.grad = draw(*w.shape, seed=i)
    with torch.no_grad():
        moments = [[torch.zeros_like(w) for w in many] for _ in range(2)]
        rates = [0.01 * (1 - 0.999) ** 0.5 / (1 - 0.9)] * 3
        group = optimizer.param_groups[0]
        optimizer.update(many, [w.grad for w in few], *moments, masks, rates, 0.01, group)
    optimizer.step()
    assert equal([w.detach() for w in many], [w.detach() for w in few])
    assert equal(moments[1], [optimizer.state[w]["exp_avg_sq"] for w in few])


@pytest.mark.parametrize("mode", ["none", "D", "F"])
def test_compiled_step_is_the_same(mode):
    """The rate is a tensor that changes; new steps must not be compiled anew. Inductor fuses the same
    graph."""
    torch._dynamo.reset()
    results, frames = [], []

    def backend(graph, _):
        frames.append(graph)
        return graph

    for compiled in (False, True):
        weights, rate = parameters((6, 5), (5,), ()), torch.tensor(0.01, dtype=torch.float64)
        masks = random_masks(weights[:2], 9) if mode == "D" else None
        optimizer = ChildTuningAdamW(weights, rate, weight_decay=0.1, mode=mode, reserve_p=0.4, masks=masks)
        step = optimizer.step
        if compiled:
            step = torch.compile(step, backend=backend, fullgraph=mode != "F")
        for turn in range(12):
            rate.fill_(0.01 / (turn + 1))
            for i, w in enumerate(weights):
                w.grad = draw(*w.shape, seed=turn + i)
            step()
        results.append([w.detach() for w in weights])
    assert 1 <= len(frames) <= (2 if mode != "F" else 6)       # the first step makes the state
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options, error, said", [
    (dict(lr=-1), ValueError, "lr is -1"), (dict(betas=(0.9, 1.0)), ValueError, "betas"),
    (dict(eps=-1), ValueError, "eps"), (dict(weight_decay=-1), ValueError, "weight_decay"),
    (dict(mode="E"), ValueError, "mode is 'E'"), (dict(reserve_p=0.0), ValueError, "reserve_p is 0.0"),
    (dict(reserve_p=1.5), ValueError, "reserve_p"),
    (dict(masks={"weight": torch.ones(3, dtype=torch.bool)}), ValueError, "masks"),
    (dict(masks={"w": torch.ones(3)}), ValueError, "masks"),
    (dict(masks={"w": torch.ones(2, dtype=torch.bool)}), ValueError, "masks"),
    (dict(mode="D", reserve_p=0.5), RuntimeError, "no masks"), (dict(sparse=True), RuntimeError, "sparse")])
def test_optimizer_refuses(options, error, said):
    w = torch.nn.Parameter(torch.zeros(3))
    w.grad = torch.ones(3).to_sparse() if options.pop("sparse", False) else torch.ones(3)
    if "w" in options.get("masks", ()):
        options["masks"] = {w: options["masks"]["w"]}
    with pytest.raises(error, match=re.escape(said)):
        ChildTuningAdamW([w], **options).step()


def test_closure():
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = ChildTuningAdamW([w], 0.1)

    def closure():
        optimizer.zero_grad()
        (w ** 2).sum().backward()
        return (w ** 2).sum()

    assert optimizer.step(closure) == 3 and (w < 1).all()


# ── Fisher information, masks, R-Drop ───────────────────────────────────────────────────────────────────────


class Softmax(torch.nn.Module):
    """Logits W x + b: ∂ −log p(y|x) / ∂W = (p − e_y) xᵀ and ∂ / ∂b = p − e_y. Two more weights have no
    part."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3, dtype=torch.float64)
        self.unused, self.frozen = parameters((4,), (2, 2))
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            self.layer.weight.copy_(draw(3, 5, seed=1))
            self.layer.bias.copy_(draw(3, seed=2))


def cross_entropy(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model.layer(x), y)


def softmax_batches(n, size):
    x, y = draw(n, 5, seed=3), torch.arange(n) % 3
    return [(x[i : i + size], y[i : i + size]) for i in range(0, n, size)]


def fisher_by_hand(model, batches, clip):
    """[F of the matrix, F of the bias] in NumPy."""
    W, b = (w.detach().numpy() for w in (model.layer.weight, model.layer.bias))
    wanted = [np.zeros((3, 5)), np.zeros(3)]
    for x, y in batches:
        gradients = [np.zeros((3, 5)), np.zeros(3)]
        for row, label in zip(x.numpy(), y.tolist()):
            e = np.exp(W @ row + b)
            error = e / e.sum() - np.eye(3)[label]
            gradients[0] += np.outer(error, row) / len(x)
            gradients[1] += error / len(x)
        for total, gradient in zip(wanted, gradients):
            norm = np.sqrt((gradient ** 2).sum())
            share = 1 if clip is None else min(1, clip / (norm + 1e-6))
            total += (gradient * share) ** 2 / len(batches)
    return wanted


@pytest.mark.parametrize("n, size, clip", [(12, 1, None), (12, 4, None), (13, 4, None), (12, 4, 0.5), (12, 1, 0.7)])
def test_fisher_information(n, size, clip):
    """1 is the paper's, 4 squares the mean gradient of a batch; each tensor is clipped on its own; short
    batches count as others."""
    model, batches = Softmax(), softmax_batches(n, size)
    wanted = fisher_by_hand(model, batches, clip)
    model.layer.weight.grad = torch.ones(3, 5, dtype=torch.float64)
    fisher = fisher_information(model, iter(batches), cross_entropy, clip)
    assert list(fisher) == ["unused", "frozen", "layer.weight", "layer.bias"]
    for name, total in zip(("layer.weight", "layer.bias"), wanted):
        np.testing.assert_allclose(fisher[name].numpy(), total, rtol=1e-12)
    assert not fisher["unused"].any() and not fisher["frozen"].any()
    assert model.layer.weight.grad.eq(1).all() and model.layer.bias.grad is None and model.training
    values = np.concatenate([x.ravel() for x in wanted])
    order = np.sort(values)[::-1]
    for p in (0.1, 0.3, 0.5, 1.0):
        masks, threshold = fisher_mask(model, batches, cross_entropy, p, max_grad_norm=clip, name_filter="layer")
        assert threshold == pytest.approx(np.percentile(values, (1 - p) * 100), rel=1e-12)
        assert list(masks) == ["layer.weight", "layer.bias"]
        assert all(mask.dtype == torch.bool for mask in masks.values())
        kept = len(values) - math.ceil(round((1 - p) * (len(values) - 1), 9))
        assert sum(mask.sum().item() for mask in masks.values()) == kept
        if p < 1:
            between = (order[kept - 1] + order[kept]) / 2
            assert equal(masks["layer.weight"], torch.from_numpy(wanted[0] >= between))


@pytest.mark.parametrize("name_filter", ["layer.w", lambda name: name == "layer.weight"])
def test_name_filter(name_filter):
    masks, _ = fisher_mask(Softmax(), softmax_batches(3, 1), cross_entropy, 0.5, name_filter=name_filter)
    assert list(masks) == ["layer.weight"]


def test_ties_and_zeros_are_kept():
    model = Softmax()  # 18 weights with a Fisher information, 8 without
    masks, threshold = fisher_mask(model, softmax_batches(12, 1), cross_entropy, 0.8)
    assert threshold == 0 and all(mask.all() for mask in masks.values())
    masks, threshold = fisher_mask(model, softmax_batches(12, 1), cross_entropy, 0.5)
    assert threshold > 0 and not masks["unused"].any() and not masks["frozen"].any()
    w, batch = torch.nn.Linear(6, 1, bias=False), torch.tensor([1.0, 1, 1, 1, 2, 2])       # F 1 1 1 1 4 4
    masks, threshold = fisher_mask(w, [batch], lambda model, x: model(x)[0], 0.5)
    assert threshold == 1 and masks["weight"].all()
    masks, threshold = fisher_mask(w, [batch], lambda model, x: model(x)[0], 0.3)
    assert threshold == pytest.approx(2.5) and masks["weight"].tolist() == [[False] * 4 + [True] * 2]


def test_threshold_past_sixteen_million():
    """torch.quantile ends there. F is (i + 1)² for i in a random order; 30 % of 17 million are kept."""
    n = 17_000_000
    values = torch.randperm(n, generator=torch.Generator().manual_seed(0)).float().add(1).div(n)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(n))
    masks, threshold = fisher_mask(model, [values], lambda model, x: (model.w * x).sum(), 0.3)
    assert masks["w"].sum().item() == pytest.approx(0.3 * n, abs=2)            # float32 has ties
    assert threshold == pytest.approx(0.49, abs=1e-6) and equal(masks["w"], values.square() >= threshold)


def test_a_batch_without_finite_gradient_is_left_out(capsys):
    good = softmax_batches(6, 1)
    bad = [*good[:2], (good[0][0] * math.inf, good[0][1]), *good[2:]]
    assert equal(*(fisher_information(Softmax(), batches, cross_entropy) for batches in (bad, good)))
    assert "1 of 7 batches" in capsys.readouterr().out


@pytest.mark.parametrize("batches, options, said", [
    (1, dict(reserve_p=0.0), "reserve_p"), (1, dict(reserve_p=1.1), "reserve_p"),
    (1, dict(name_filter="h.0"), "name_filter: .*layer.bias"), (1, dict(name_filter="frozen"), "name_filter"),
    (0, {}, "batches"), (-1, {}, "batches")])
def test_fisher_mask_refuses(batches, options, said):
    made = softmax_batches(6, 1)[: abs(batches)]
    made = [(x * math.nan, y) for x, y in made] if batches < 0 else made
    with pytest.raises(ValueError, match=said):
        fisher_mask(Softmax(), made, cross_entropy, **dict(reserve_p=0.5) | options)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("classes", [1, 2, 4])
def test_rdrop(form, classes):
    """Written out row by row, values and gradients of both passes."""
    def written_out(a, b):
        task = apart = 0
        for i in range(6):
            if classes == 1:
                task = task + ((a[i, 0] - scores[i]) ** 2 + (b[i, 0] - scores[i]) ** 2) / 6
                apart = apart + (a[i, 0] - b[i, 0]) ** 2
            else:
                p, q = (x[i].exp() / x[i].exp().sum() for x in (a, b))
                task = task - (p[labels[i]].log() + q[labels[i]].log()) / 6
                apart = apart + sum(p * (p / q).log() + q * (q / p).log()) / 2
        return task + 0.7 * apart / 6 if form == "paper" else task / 2 + 0.7 * apart

    labels, scores = torch.arange(6) % max(classes, 2), draw(6, seed=5)
    results = []
    for f in (lambda a, b: rdrop_loss(a, b, scores if classes == 1 else labels, 0.7, form), written_out):
        leaves = [draw(6, classes, seed=i).requires_grad_() for i in (1, 2)]
        value = f(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


# ── whole runs ──────────────────────────────────────────────────────────────────────────────────────────────


def topics(folder, rows=36):
    """The first command of the docstring with the first rows of its files."""
    for name in ("topics.tsv", "topics_dev.tsv"):
        (folder / name).write_bytes(b"".join((DATA / name).read_bytes().splitlines(True)[: rows + 1]))
    data = ["--data", folder / "topics.tsv", "--dev", folder / "topics_dev.tsv"]
    return ["--model", "scratch", *data, "--batch-size", 8]


def tune(out, *flags):
    return run("childtuning", out, *flags)


def test_every_mode_learns_a_batch_that_repeats(tmp_path):
    flags = ["--mode", "none", "F", "D", "--reserve-p", 0.5, "--child", ".", "--steps", 25, "--lr", 5e-3]
    result = tune(tmp_path / "out", *topics(tmp_path, 8), *flags)
    for mode in ("none", "F", "D"):
        losses = [step["loss"] for step in result.steps if step["mode"] == mode]
        assert 0 < max(losses[-5:]) < 0.5 * losses[0], mode


def test_learns(tmp_path):
    data = ["--model", "scratch", "--data", DATA / "topics.tsv", "--dev", DATA / "topics_dev.tsv"]
    result = tune(tmp_path / "out", *data, "--mode", "F", "--epochs", 5, "--reserve-p", 0.5)
    assert result.steps[-1]["dev_accuracy"] > 80               # one in eight is right by chance


@pytest.fixture(scope="module")
def four_trials(tmp_path_factory):
    """(flags, result) of four trials of five steps, whole; the last batch of an epoch is short."""
    folder = tmp_path_factory.mktemp("trials")
    trials = ["--mode", "D", "F", "--seeds", 2, "--steps", 5, "--eval-every", 3]
    flags = [*topics(folder), *trials, "--reserve-p", 0.4, "--fisher-samples", 12]
    return flags, tune(folder / "whole", *flags)


@pytest.mark.parametrize("stop", [4, 10, 19])
def test_resume_is_exact(stop, four_trials, tmp_path, monkeypatch):
    """Interrupted within a trial and at its end, in both modes; masks and draws come from the state."""
    flags, whole = four_trials
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(childtuning, "sum_gradients", Mock(side_effect=[None] * stop + [KeyboardInterrupt]))
        tune(tmp_path / "parts", *flags)
    fisher = Mock(wraps=childtuning.fisher_mask)
    monkeypatch.setattr(childtuning, "fisher_mask", fisher)
    parts = tune(tmp_path / "parts", *flags, "--resume")
    assert fisher.call_count == (stop < 5)                     # the second trial's; the first one's is kept
    assert [step | {"seconds": 0} for step in parts.steps] == [step | {"seconds": 0} for step in whole.steps]
    assert equal(parts.state, whole.state)
    models = [load_file(x.run.out / "model.safetensors") for x in (parts, whole)]
    assert equal(*models)
    assert [parts.said[mode] for mode in "DF"] == [whole.said[mode] for mode in "DF"]


def test_a_short_batch_is_a_mean_too(four_trials):
    """Nothing is learnt in the first step of a schedule, so that a loss is that of its rows."""
    flags, whole = four_trials
    assert [step["step"] for step in whole.steps] == list(range(1, 21))
    assert whole.losses[4] > 1.5                               # 4 rows of 8 labels: ln 8, not half of it


def test_seeds_differ_and_repeat_alone(tmp_path):
    """The third trial of several is the run of its seed alone, to the bit; the table is mean, deviation and
    best of each mode; the best trial is kept; rates are transformers' linear schedule."""
    flags, lr = [*topics(tmp_path), "--steps", 6, "--eval-every", 3, "--lr", 5e-3], []
    several = tune(tmp_path / "several", *flags, "--mode", "none", "F", "--seeds", 3)
    alone = tune(tmp_path / "alone", *flags, "--mode", "none", "--seed", 44)
    trials = [(mode, seed) for mode in ("none", "F") for seed in (42, 43, 44)]
    parts = [[(step["loss"], step.get("dev_accuracy")) for step in several.steps
              if (step["mode"], step["seed"]) == trial] for trial in trials]
    assert parts[2] == [(step["loss"], step.get("dev_accuracy")) for step in alone.steps]
    assert len({part[0] for part in parts[:3]}) == 3 and parts[0][0] == parts[3][0]
    scores = [part[-1][1] for part in parts]                   # of the last step
    for mode, mine in (("none", scores[:3]), ("F", scores[3:])):
        table = f"accuracy {np.mean(mine):.2f} ± {statistics.stdev(mine):.2f}, best {max(mine):.2f};"
        assert several.said[mode].startswith(table)
    best, first = several.state["progress"]["best"], scores.index(max(scores))
    assert (best["accuracy"], best["mode"], best["seed"]) == (max(scores), *trials[first])
    assert [step["best"] for step in several.steps if "best" in step][:2] == [True, True]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=5e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, math.ceil(0.1 * 6), 6)
    for _ in range(6):
        lr += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert [step["lr"] for step in several.steps] == pytest.approx(lr * 6)


def test_p_1_of_both_modes_is_the_plain_run(tmp_path):
    flags = [*topics(tmp_path), "--steps", 3]
    kinds = ("none", 0.3), ("F", 1), ("D", 1), ("F", 0.5)
    one, *whole, half = (tune(tmp_path / f"{mode}{p}", *flags, "--mode", mode, "--reserve-p", p) for mode, p in kinds)
    assert all(x.losses == one.losses and equal(x.state["model"], one.state["model"]) for x in whole)
    assert one.losses != half.losses


@pytest.mark.parametrize("form, masked, free", [("paper", "bert.", "classifier."), ("code", "layer", "embeddings.")])
def test_masked_weights_stay(form, masked, free, tmp_path, monkeypatch):
    """Mode D in a whole run: without decay, what lies outside the child keeps its bits; the rest is free."""
    build, before = childtuning.build_model, {}

    def build_model(args, run):
        model = build(args, run)
        before.update({name: w.detach().clone() for name, w in model.named_parameters()})
        return model

    monkeypatch.setattr(childtuning, "build_model", build_model)
    flags = ["--steps", 4, "--weight-decay", 0, "--form", form, "--fisher-samples", 16]
    result = tune(tmp_path / "out", *topics(tmp_path), *flags)
    moved = {name: w != before[name] for name, w in result.model.named_parameters()}
    inside = torch.cat([x.flatten() for name, x in moved.items() if masked in name])
    outside = [name for name in moved if masked not in name]
    assert 0.2 < inside.double().mean() <= 0.301               # dead words have no gradient
    assert any(free in name for name in outside)
    assert all(moved[name].any() for name in outside if "position" not in name)


def test_fisher_pass_of_each_form(tmp_path, monkeypatch):
    """Paper: single rows, no dropout, no clipping, the encoder's weights. Code: batches, dropout, clipping to
    1, layers."""
    seen, original = [], childtuning.fisher_mask

    def fisher_mask(model, batches, loss, p, clip, name_filter):
        parts = {name.split(".")[1] for name, _ in model.named_parameters() if name_filter in name}
        seen.append(([len(batch) for batch in batches], model.training, clip, parts))
        return original(model, batches, loss, p, clip, name_filter)

    monkeypatch.setattr(childtuning, "fisher_mask", fisher_mask)
    flags, own = [*topics(tmp_path, 20), "--steps", 1, "--mode", "D"], ["--fisher-clip", 0.5, "--child", "pooler"]
    losses = [tune(tmp_path / form, *flags, "--form", form).losses for form in ("paper", "code")]
    tune(tmp_path / "own", *flags, "--fisher-batch-size", 3, "--fisher-samples", 7, *own)
    assert seen[0] == ([1] * 20, False, None, {"embeddings", "encoder", "pooler"})
    assert seen[1] == ([16, 4], True, 1.0, {"encoder"})
    assert seen[2] == ([3, 3, 1], False, 0.5, {"pooler"})
    assert losses[0] == losses[1]  # the training's draws do not depend on the pass


def test_nan_gradients_are_skipped_counted_and_said(tmp_path, monkeypatch):
    """A row of metrics repeats the last finite loss; where there is none yet in a trial it has NaN."""
    flags = [*topics(tmp_path), "--steps", 3, "--mode", "F", "--seeds", 2, "--warmup-share", 0]
    factors, compute, said = iter([1, 1, math.nan, math.nan, 1, 1]), childtuning.compute_loss, []

    def compute_loss(*given):
        loss, _ = compute(*given)
        loss = loss * next(factors)
        return loss, {"loss": loss.detach()}

    monkeypatch.setattr(childtuning, "compute_loss", compute_loss)
    monkeypatch.setattr(childtuning, "say", lambda label, text: said.append((label, text)))
    result = tune(tmp_path / "out", *flags, "--eval-every", 1)
    notes = [text.split(":")[0] for label, text in said if label == "note"]
    assert notes == ["mode F, seed 42, step 3", "mode F, seed 43, step 1"]
    assert result.losses[2] == result.losses[1] and [math.isnan(x) for x in result.losses] == [False] * 3 + [True] + [False] * 2
    assert [step["skipped"] for step in result.steps] == [0, 0, 1, 2, 2, 2]
    assert "2 steps skipped" in result.said["done"]
    assert all(w.isfinite().all() for w in result.model.parameters())
    assert {state["step"].item() for state in result.state["optimizer"]["state"].values()} == {2.0}


def test_several_processes_equal_one(tmp_path, bert):
    """D's sums over ranks, F's equal draws, and a KL that is summed over the batch of all ranks: three have
    unequal shares of it."""
    flags = [*topics(tmp_path), "--model", bert, "--mode", "D", "F", "--steps", 4, "--lr", 1e-3]
    flags += ["--rdrop", 0.5, "--form", "code", "--fisher-batch-size", 5]
    one = tune(tmp_path / "one", *flags)
    norms = in_processes(3, "childtuning", tmp_path / "three", flags)
    three, state = metrics(tmp_path / "three"), torch.load(tmp_path / "three" / "state.pt", weights_only=True)
    assert [step["mode"] for step in three] == ["D"] * 4 + ["F"] * 4
    assert [step["loss"] for step in three] == pytest.approx(one.losses, rel=1e-4)
    assert norms == pytest.approx(one.norms, rel=1e-3) and state["progress"] == one.state["progress"]
    assert torch.equal(one.state["optimizer"]["generator"], state["optimizer"]["generator"])
    for key, weight in state["model"].items():
        if not key.endswith("key.bias"):   # softmax ignores it: Adam makes the rounding of its gradient large
            assert (weight - one.state["model"][key]).abs().gt(1e-4).float().mean() < 0.01, key


@pytest.mark.parametrize("task", ["classification", "pairs", "regression"])
def test_pipeline_loads_the_folder(task, tmp_path, bert):
    """By the line that was printed; scores are those of our own evaluation, labels the file's."""
    lines = (DATA / ("topics.tsv" if task == "classification" else "sts.tsv")).read_text().splitlines()[:41]
    head, *rows = [line.split("\t") for line in lines]
    if task == "pairs":
        head = ["sentence1", "sentence2", "label"]
        rows = [[a, b, "close" if float(score) > 3 else "far"] for a, b, score, _ in rows]
    data = tmp_path / "data.tsv"
    data.write_text("\n".join("\t".join(row) for row in [head, *rows]))
    flags = ["--steps", 12, "--lr", 1e-3, "--mode", "F", "--max-length", 512]
    result = tune(tmp_path / "out", "--model", bert, "--data", data, "--dev", data, *flags)
    texts = [dict(zip(("text", "text_pair"), row[: 1 if task == "classification" else 2])) for row in rows]
    none = "none" if task == "regression" else None
    found = eval(result.said["load"], {"pipeline": pipeline})(texts, function_to_apply=none)
    if task == "regression":
        scores, wanted = [one["score"] for one in found], [float(row[2]) for row in rows]
        pearson = 100 * np.corrcoef(scores, wanted)[0, 1]
        assert pearson == pytest.approx(result.steps[-1]["dev_pearson"], abs=1e-3)
        assert result.model.config.problem_type == "regression"
    else:
        right = np.mean([one["label"] == row[-1] for one, row in zip(found, rows)])
        assert 100 * right == pytest.approx(result.steps[-1]["dev_accuracy"])
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
    assert task == "regression" or config.id2label == dict(enumerate(sorted({row[-1] for row in rows})))
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["truncation"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_any_classifier_is_tuned_and_saved(kind, tmp_path):
    """The folder gives the logits of the model that was tuned."""
    AutoModel.from_config(AutoConfig.for_model(kind, **KINDS[kind])).save_pretrained(tmp_path / "model")
    small_tokenizer(kind).save_pretrained(tmp_path / "model")
    flags = [*topics(tmp_path, 16), "--model", tmp_path / "model", "--steps", 2, "--mode", "D"]
    result = tune(tmp_path / "out", *flags)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokens = result.model.tokenizer("She sang a very long song.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, result.model.eval()(tokens).logits)


def test_evaluation_leaves_no_trace(tmp_path):
    flags = [*topics(tmp_path), "--steps", 4, "--mode", "F"]
    often = tune(tmp_path / "often", *flags, "--eval-every", 1)
    seldom = tune(tmp_path / "seldom", *flags, "--eval-every", 100)
    dev = flags.index("--dev")
    never = tune(tmp_path / "never", *flags[:dev], *flags[dev + 2 :])
    assert [sum("dev_accuracy" in step for step in x.steps) for x in (often, seldom, never)] == [4, 1, 0]
    for other in (seldom, never):
        assert other.losses == often.losses
        assert all(equal(other.state[part], often.state[part]) for part in ("model", "optimizer", "random"))


# ── data and bad input ──────────────────────────────────────────────────────────────────────────────────────


PAIRS = "sentence1\tsentence2\tlabel\trelatedness\n"
PAIRS += "".join(f"A {i}.\tB {i}.\t{'yes' if i % 2 else 'no'}\t{i / 2}\n" for i in range(6))
MOVES = 'I ran.,10\n"Oh, no.",9\nNo.,-1\n'
NAMED = '{"premise": "A", "hypothesis": "B", "gold": 1}\n{"premise": "C", "hypothesis": "D", "gold": 0}\n'


@pytest.mark.parametrize("name, content, flags, texts, answer, labels", [
    ("a.tsv", PAIRS, "", ("A 1.", "B 1."), "yes", ["no", "yes"]),
    ("a.tsv", PAIRS, "--label relatedness", ("A 1.", "B 1."), 0.5, []),
    ("a.tsv", PAIRS, "--text sentence2", ("B 1.",), "yes", ["no", "yes"]),
    ("a.tsv", PAIRS, "--label relatedness --task classification", ("A 1.", "B 1."), "0.5",
     "0.0 0.5 1.0 1.5 2.0 2.5".split()),
    ("a.csv", MOVES, "", ("Oh, no.",), "9", ["-1", "9", "10"]),
    ("a.csv", MOVES, "--task regression", ("Oh, no.",), 9.0, []),
    ("a.jsonl", NAMED, "", ("C", "D"), "0", ["0", "1"]),
    ("a.jsonl", '["A", "B", 1.0]\n["C", "D", 5]\n', "", ("C", "D"), 5.0, []),
    ("a.tsv", "label\tid\tsentence\ny\t1\tA\nx\t2\tB\n", "", ("B",), "x", ["x", "y"])])
def test_columns_and_tasks(tmp_path, name, content, flags, texts, answer, labels):
    (tmp_path / name).write_text(content)
    flags = ["--data", str(tmp_path / name), "--batch-size", "2", *flags.split()]
    args = childtuning.make_parser().parse_args(flags)
    found, label = childtuning.load_data(tmp_path / name, args)[1]
    task = ("classification", "accuracy") if labels else ("regression", "spearman")
    assert (found, args.labels, args.task, args.metric) == (texts, labels, *task)
    assert (labels[label] if labels else label) == answer


GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"


@pytest.mark.parametrize("content, flags, wanted", [
    ("sentence\tlabel\nA\tx\n \ty\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("sentence\tlabel\nA\tx\nB\t\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("sentence\tlabel\nA\tx\nB\tx\n", "", r"a\.tsv: every label is 'x'; wanted at least two"),
    ("sentence\tlabel\n", "", r"a\.tsv: no rows"),
    (GOOD, "--dev b.tsv", r"b\.tsv line 2: label 'sleep', wanted one of a\.tsv, which are motion, rest"),
    (GOOD, "--dev empty.tsv", r"empty\.tsv: no rows"),
    (GOOD, "--dev c.tsv", r"c\.tsv: columns text, label, more; wanted one or two of text \(now sentence\) .*"),
    (GOOD, "--label topic", r"a\.tsv: columns sentence, label; wanted .* \(now topic\); name them by .*"),
    (GOOD, "--text sentence label", r"a\.tsv: columns sentence, label; wanted .*"),
    ("A\tB\tC\tx\nA\tB\tC\ty\n", "", r"a\.tsv: columns column 1, column 2, column 3, column 4; wanted .*"),
    ("A\t1.5\nB\tx\n", "--task regression", r"a\.tsv line 2: label 'x', wanted a number"),
    (GOOD, "--batch-size 5", r"a\.tsv: 4 rows, wanted at least --batch-size, which is 5"),
    (GOOD, "--reserve-p 0", r"--reserve-p 0\.0: wanted a share above 0, up to 1"),
    (GOOD, "--reserve-p 1.01", r"--reserve-p 1\.01: wanted .*"),
    (GOOD, "--reserve-p nan", r"--reserve-p nan: wanted .*"),
    (GOOD, "--metric pearson", r"--metric pearson: this is classification, wanted accuracy, f1, matthews"),
    (GOOD, "--mode E", r"argument --mode: invalid choice: 'E' .*"),
    (GOOD, "--seeds 0", r"argument --seeds: 0: wanted a number of at least 1"),
    (GOOD, "--child h.0", r"--child h\.0: in no name of the weights of scratch, which are like bert\..*"),
    (GOOD, "--mode none F D --child h.0", r"--child h\.0: in no name .*"),
    (GOOD, "--max-length 600", r"--max-length 600: scratch reads at most 512 tokens"),
    (GOOD, "--model none/such", r"--model none/such: no such folder, and the hub does not give it.*")])
def test_bad_input(tmp_path, monkeypatch, capfd, content, flags, wanted):
    monkeypatch.chdir(tmp_path)
    Path("a.tsv").write_text(content)
    Path("b.tsv").write_text("sentence\tlabel\nA\tsleep\n")
    Path("c.tsv").write_text("text\tlabel\tmore\nA\tmotion\tB\n")
    Path("empty.tsv").write_text("sentence\tlabel\n")
    run = ["--data", "a.tsv", "--model", "scratch", "--batch-size", 2, "--steps", 1]
    refuse("childtuning", capfd, wanted, *run, *flags.split())


def test_resume_with_other_flags(tmp_path, capfd):
    flags = [*topics(tmp_path, 12), "--steps", 1, "--mode", "F"]
    tune(tmp_path / "out", *flags)
    with pytest.raises(SystemExit):
        tune(tmp_path / "out", *flags, "--resume", "--seeds", 2)
    assert "--resume: seeds was 1" in capfd.readouterr().err
