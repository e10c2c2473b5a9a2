"""Child-Tuning: its optimizer, Fisher information and R-Drop against independent float64 code; small runs."""
import functools
import math
import re
import statistics
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import childtuning
from childtuning import ChildTuningAdamW, fisher_information, fisher_mask, rdrop_loss
from running import DATA, equal, in_processes, metrics, refuse, run

tune = functools.partial(run, "childtuning")
every_mode = pytest.mark.parametrize("mode", ["none", "D", "F"])


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(*shapes, seed=0):
    return [torch.nn.Parameter(draw(*shape, seed=seed + i)) for i, shape in enumerate(shapes)]


def random_masks(weights, seed):
    return {w: draw(*w.shape, seed=seed + i) < -0.3 for i, w in enumerate(weights)}


# ── the optimizer ──


def released_rule(w, m, v, t, g, lr, beta1, beta2, eps, decay, correct_bias):
    """One step for arrays, in the released order."""
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    a = lr * math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t) if correct_bias else lr
    w = w - a * m / (np.sqrt(v) + eps)
    return w - lr * decay * w, m, v


@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("mode, p", [("none", 0.3), ("D", 0.3), ("F", 0.3), ("F", 0.9)])
def test_thirty_steps_follow_the_released_rule(mode, p, correct_bias, monkeypatch):
    """Two groups, clipping before the mask, a falling rate, a weight without gradient in every third step."""
    monkeypatch.setattr(childtuning, "BLOCK", 16)
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
        for i, w in enumerate(weights):
            w.grad = None if i == 1 and step % 3 == 0 else draw(*w.shape, seed=100 * step + i + 7)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        if mode == "F":
            masks.update(random_masks(list(masks), 1000 * step))
        for group in optimizer.param_groups:
            group["lr"] = lr = 0.01 * (1 - step / 40)
        gradients = [None if w.grad is None else w.grad.numpy().copy() for w in weights]
        optimizer.step()
        for i, (w, g) in enumerate(zip(weights, gradients)):
            if g is not None:
                if mode != "none" and w in masks:
                    g = np.where(masks[w].numpy(), g / p if mode == "F" else g, 0.0)
                times[i] += 1
                rest = (0.9, 0.999, 1e-6, 0.1) if i < 2 else (0.8, 0.99, 1e-3, 0.0)
                state[i] = released_rule(*state[i], times[i], g, lr, *rest, correct_bias)
    for w, wanted in zip(weights, state):
        found = w.detach(), optimizer.state[w]["exp_avg"], optimizer.state[w]["exp_avg_sq"]
        for x, y in zip(found, wanted):
            np.testing.assert_allclose(x.numpy(), y, rtol=1e-12, atol=1e-13)


def steps(count, weights, optimizer, seed=0):
    def closure():
        assert torch.is_grad_enabled()
        for i, w in enumerate(weights):
            w.grad = draw(*w.shape, seed=seed + 31 * step + i).to(w.dtype)
        return step

    for step in range(count):
        assert optimizer.step(closure) == step
    return [w.detach().clone() for w in weights]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_p_1_is_plain_adamw_to_the_bit(dtype):
    results, generator = [], torch.Generator().manual_seed(5)
    kept = generator.get_state()
    for mode in (None, "none", "F", "D", "ChildTuning-F", "all true"):
        weights = [torch.nn.Parameter(w.detach().to(dtype)) for w in parameters((6, 5), (5,))]
        options = dict(mode=mode)
        if mode == "all true":
            options = dict(mode="D", reserve_p=0.5, masks={w: w > -math.inf for w in weights})
        optimizer = ChildTuningAdamW(weights, 0.01, weight_decay=0.1, generator=generator, **options)
        results.append(steps(6, weights, optimizer))
    assert all(equal(result, results[0]) for result in results) and torch.equal(generator.get_state(), kept)
    assert not torch.equal(results[0][0], parameters((6, 5))[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.3, 0.75, 0.999])
def test_draws(p, dtype):
    """Seen in the first moment, (1 − β1) g M / p: the share p, independent of place and step, 1 / p in the
    weights' own type; a draw leaves PyTorch's own generator and the gradient alone. Ranks draw alike."""
    w, masks, untouched = torch.nn.Parameter(torch.zeros(999, 401, dtype=dtype)), [], torch.get_rng_state()
    whole = (torch.full((), 0.5, dtype=dtype) * (1 / p)).mul(0.5).item()
    for seed in range(3):
        w.grad = torch.full_like(w, 0.5)
        generator = torch.Generator().manual_seed(seed)
        optimizer = ChildTuningAdamW([w], betas=(0.5, 0.999), mode="F", reserve_p=p, generator=generator)
        optimizer.step()
        m = optimizer.state[w]["exp_avg"]
        assert set(m.unique().tolist()) == {0.0, whole} and w.grad.eq(0.5).all()
        masks.append((m > 0).double())
    shares = [mask.mean().item() for mask in masks]
    assert shares == pytest.approx([p] * 3, abs=5 * math.sqrt(p * (1 - p) / 4e5)) and len(set(shares)) == 3
    for both in (masks[0] * masks[1], masks[0][:, 1:] * masks[0][:, :-1]):
        assert both.mean().item() == pytest.approx(p * p, abs=0.005)
    assert torch.equal(torch.get_rng_state(), untouched)
    assert ChildTuningAdamW([w]).generator.initial_seed() == 0


def test_masked_gradients_may_be_anything():
    """A masked inf or NaN is 0; a step twice without a new backward masks the same gradient again; decay
    reaches all."""
    w, mask = torch.nn.Parameter(torch.ones(4)), torch.tensor([True, False, False, True])
    optimizer = ChildTuningAdamW([w], lr=0.1, weight_decay=0.5, mode="D", masks={w: mask})
    w.grad = torch.tensor([1.0, math.nan, math.inf, -1.0])
    optimizer.step()
    optimizer.step()
    assert w.grad.nan_to_num(7, 8).tolist() == [1, 7, 8, -1]
    assert w[1:3].tolist() == pytest.approx([0.95 ** 2] * 2) and w[0] < 0.9 * 0.95 and w[3] > 0.95
    w.grad[0] = math.nan
    optimizer.step()
    assert w[0].isnan() and w[1:].isfinite().all()


@every_mode
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


@every_mode
def test_a_list_is_stepped_as_its_blocks(mode, monkeypatch):
    """What a GPU gets in one go, this file sees in blocks: the same bits."""
    monkeypatch.setattr(childtuning, "BLOCK", 16)
    many, few = parameters((17, 11), (5,), ()), parameters((17, 11), (5,), ())
    masks = list(random_masks(many, 9).values())
    options = dict(weight_decay=0.1, mode=mode, reserve_p=0.4, masks=dict(zip(few, masks)))
    optimizer = ChildTuningAdamW(few, 0.01, **options)
    steps(1, few, optimizer)
    masks = [None] * 3 if mode == "none" else masks
    moments = [[torch.zeros_like(w) for w in many] for _ in range(2)]
    rate = 0.01 * (1 - 0.999) ** 0.5 / (1 - 0.9)
    with torch.no_grad():
        group, gradients = optimizer.param_groups[0], [w.grad for w in few]
        optimizer.update(many, gradients, *moments, masks, [rate] * 3, 0.01, group)
    assert equal([w.detach() for w in many], [w.detach() for w in few])
    assert equal(moments[1], [optimizer.state[w]["exp_avg_sq"] for w in few])


@every_mode
def test_compiled_step_is_the_same(mode):
    """The rate is a tensor that changes; new steps must not be compiled anew."""
    torch._dynamo.reset()
    results, frames = [], []

    def keep(graph, _):
        frames.append(graph)
        return graph

    for compiled in (False, True):
        weights, rate = parameters((6, 5), (5,), ()), torch.tensor(0.01, dtype=torch.float64)
        masks = random_masks(weights[:2], 9) if mode == "D" else None
        optimizer = ChildTuningAdamW(weights, rate, weight_decay=0.1, mode=mode, reserve_p=0.4, masks=masks)
        options = dict(backend=keep, fullgraph=mode != "F", disable=not compiled)
        step = torch.compile(optimizer.step, **options)
        for turn in range(8):
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
    (dict(reserve_p=1.5), ValueError, "reserve_p"), (dict(masks={0: torch.ones(3)}), ValueError, "masks"),
    (dict(masks={"w": torch.ones(3) > 0}), ValueError, "masks"),
    (dict(masks={0: torch.ones(2) > 0}), ValueError, "masks"),
    (dict(mode="D", reserve_p=0.5), RuntimeError, "no masks"), (dict(sparse=True), RuntimeError, "sparse")])
def test_optimizer_refuses(options, error, said):
    w = torch.nn.Parameter(torch.zeros(3))
    w.grad = torch.ones(3).to_sparse() if options.pop("sparse", False) else torch.ones(3)
    if 0 in options.get("masks", ()):
        options["masks"] = {w: options["masks"][0]}
    with pytest.raises(error, match=re.escape(said)):
        ChildTuningAdamW([w], **options).step()


# ── Fisher information, masks, R-Drop ──


class Softmax(torch.nn.Module):
    """Logits W x + b: ∂ −log p(y|x) / ∂W = (p − e_y) xᵀ, ∂ / ∂b = p − e_y. Two more weights have no part."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3, dtype=torch.float64)
        self.unused, self.frozen = parameters((4,), (2, 2))
        self.frozen.requires_grad_(False)
        self.layer.weight.data, self.layer.bias.data = draw(3, 5, seed=1), draw(3, seed=2)


def cross_entropy(model, batch):
    return torch.nn.functional.cross_entropy(model.layer(batch[0]), batch[1])


def softmax_batches(n, size):
    x, y = draw(n, 5, seed=3), torch.arange(n) % 3
    return [(x[i : i + size], y[i : i + size]) for i in range(0, n, size)]


@pytest.mark.parametrize("n, size, clip", [(12, 1, None), (12, 1, 0.7), (13, 4, None), (13, 4, 0.5)])
def test_fisher_information(n, size, clip):
    """1 row is the paper's, 4 have a mean gradient; each tensor is clipped alone; short batches count."""
    model, batches = Softmax(), softmax_batches(n, size)
    W, b = (w.detach().numpy() for w in (model.layer.weight, model.layer.bias))
    wanted = [np.zeros((3, 5)), np.zeros(3)]
    for x, y in ((x.numpy(), y.numpy()) for x, y in batches):
        e = np.exp(x @ W.T + b)
        error = e / e.sum(1, keepdims=True) - np.eye(3)[y]
        for total, gradient in zip(wanted, (error.T @ x / len(x), error.mean(0))):
            norm = np.sqrt((gradient ** 2).sum())
            total += (gradient * (1 if clip is None else min(1, clip / (norm + 1e-6)))) ** 2 / len(batches)
    model.layer.weight.grad = torch.ones(3, 5, dtype=torch.float64)
    fisher = fisher_information(model, iter(batches), cross_entropy, clip)
    assert list(fisher) == ["unused", "frozen", "layer.weight", "layer.bias"]
    for name, total in zip(("layer.weight", "layer.bias"), wanted):
        np.testing.assert_allclose(fisher[name].numpy(), total, rtol=1e-12)
    assert not fisher["unused"].any() and not fisher["frozen"].any()
    assert model.layer.weight.grad.eq(1).all() and model.layer.bias.grad is None and model.training
    values = np.concatenate([x.ravel() for x in wanted])
    order, layer = np.sort(values)[::-1], "layer" if clip else lambda name: name.startswith("layer.")
    for p in (0.1, 0.3, 0.5, 1.0):
        masks, threshold = fisher_mask(model, batches, cross_entropy, p, clip, layer)
        assert threshold == pytest.approx(np.percentile(values, (1 - p) * 100), rel=1e-12)
        assert list(masks) == ["layer.weight", "layer.bias"] and masks["layer.bias"].dtype == torch.bool
        kept = len(values) - math.ceil(round((1 - p) * (len(values) - 1), 9))
        assert sum(mask.sum().item() for mask in masks.values()) == kept
        least = (order[kept - 1] + order[kept]) / 2 if p < 1 else 0
        assert equal(masks["layer.weight"], torch.from_numpy(wanted[0] >= least))


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
    """torch.quantile ends there. F is (i / n)² for i in a random order; 30 % of 17 million are kept."""
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


@pytest.mark.parametrize("factors, options, said", [
    ([1], dict(reserve_p=0.0), "reserve_p"), ([1], dict(reserve_p=1.1), "reserve_p"), ([], {}, "batches"),
    ([math.nan], {}, "batches"), ([1], dict(name_filter="h.0"), "name_filter: .*layer.bias"),
    ([1], dict(name_filter="frozen"), "name_filter")])
def test_fisher_mask_refuses(factors, options, said):
    made = [(x * factor, y) for factor, (x, y) in zip(factors, softmax_batches(6, 1))]
    with pytest.raises(ValueError, match=said):
        fisher_mask(Softmax(), made, cross_entropy, **dict(reserve_p=0.5) | options)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("classes", [1, 2, 4])
def test_rdrop(form, classes):
    """Values, and gradients of both passes."""
    labels, scores = torch.arange(6) % max(classes, 2), draw(6, seed=5)

    def written_out(a, b, *_):
        if classes == 1:
            task, apart = ((a[:, 0] - scores) ** 2 + (b[:, 0] - scores) ** 2).mean(), (a - b) ** 2
        else:
            p, q = (x.exp() / x.exp().sum(1, keepdim=True) for x in (a, b))
            task = -(p * q)[range(6), labels].log().mean()
            apart = (p * (p / q).log() + q * (q / p).log()) / 2
        return task + 0.7 * apart.sum() / 6 if form == "paper" else task / 2 + 0.7 * apart.sum()

    results = []
    for loss in (rdrop_loss, written_out):
        leaves = [draw(6, classes, seed=i).requires_grad_() for i in (1, 2)]
        value = loss(*leaves, scores if classes == 1 else labels, 0.7, form)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


# ── whole runs ──


def topics(folder, rows=36):
    """The first command of the docstring with the first rows of its files."""
    for name in ("topics.tsv", "topics_dev.tsv"):
        (folder / name).write_bytes(b"".join((DATA / name).read_bytes().splitlines(True)[: rows + 1]))
    files = ["--data", folder / "topics.tsv", "--dev", folder / "topics_dev.tsv"]
    return ["--model", "scratch", *files, "--batch-size", 8]


def test_every_mode_learns_a_batch_that_repeats(tmp_path):
    flags = ["--mode", "none", "F", "D", "--reserve-p", 0.5, "--child", ".", "--steps", 30, "--lr", 5e-3]
    result = tune(tmp_path / "out", *topics(tmp_path, 8), *flags, "--eval-every", 30)
    for mode in ("none", "F", "D"):
        losses = [step["loss"] for step in result.steps if step["mode"] == mode]
        assert 0 < losses[-1] < 0.5 * losses[0], mode


@pytest.fixture(scope="module")
def four_trials(tmp_path_factory):
    """(flags, result) of four trials of five steps: the fifth has four rows."""
    folder = tmp_path_factory.mktemp("trials")
    trials = ["--mode", "D", "F", "--seeds", 2, "--steps", 5, "--eval-every", 3]
    flags = [*topics(folder), *trials, "--reserve-p", 0.4, "--fisher-samples", 12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)               # conftest's comes after this
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
    assert equal(*(load_file(x.run.out / "model.safetensors") for x in (parts, whole)))
    assert [parts.said[mode] for mode in "DF"] == [whole.said[mode] for mode in "DF"]


def test_evaluation_leaves_no_trace(four_trials, tmp_path):
    """The loss of a short batch is a mean as well."""
    flags, whole = four_trials
    dev = flags.index("--dev")
    never = tune(tmp_path / "never", *flags[:dev], *flags[dev + 2 :], "--eval-every", 100)
    assert [sum("dev_accuracy" in step for step in x.steps) for x in (whole, never)] == [8, 0]
    assert never.losses == whole.losses and min(whole.losses) > 1.5            # ln 8 is 2.1
    assert all(equal(never.state[part], whole.state[part]) for part in ("model", "optimizer", "random"))


def test_seeds_differ_and_repeat_alone(tmp_path):
    """The third trial of several is the run of its seed alone, to the bit; a Fisher pass with dropout changes
    no draw; the table is mean, deviation and best of each mode; the first of the best trials is kept."""
    flags = [*topics(tmp_path), "--steps", 6, "--eval-every", 3, "--lr", 5e-3, "--warmup-share", 0.1]
    fisher = ["--seeds", 3, "--form", "code", "--fisher-samples", 16]
    several = tune(tmp_path / "several", *flags, "--mode", "none", "D", *fisher)
    alone = tune(tmp_path / "alone", *flags, "--mode", "none", "--seed", 44)
    trials = [(mode, seed) for mode in ("none", "D") for seed in (42, 43, 44)]
    parts = [[(step["loss"], step.get("dev_accuracy")) for step in several.steps
              if (step["mode"], step["seed"]) == trial] for trial in trials]
    assert parts[2] == [(step["loss"], step.get("dev_accuracy")) for step in alone.steps]
    assert len({part[0] for part in parts[:3]}) == 3 and parts[0][0] == parts[3][0]
    scores = [part[-1][1] for part in parts]                   # of the last step
    for mode, mine in (("none", scores[:3]), ("D", scores[3:])):
        table = f"accuracy {np.mean(mine):.2f} ± {statistics.stdev(mine):.2f}, best {max(mine):.2f};"
        assert several.said[mode].startswith(table)
    best = several.state["progress"]["best"]
    assert (best["mode"], best["seed"], best["accuracy"]) == (*trials[scores.index(max(scores))], max(scores))
    assert [step["lr"] for step in alone.steps] == pytest.approx([0, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3])


@pytest.mark.parametrize("form, flags, masked, free, seen", [
    ("paper", [], "bert.", "classifier.", ([1] * 20, False, None)),
    ("code", [], "layer", "embeddings.", ([16, 4], True, 1.0)),
    ("paper", ["--fisher-batch-size", 3, "--fisher-samples", 7, "--fisher-clip", 0.5, "--child", "pooler"],
     "pooler", "bert.encoder", ([3, 3, 1], False, 0.5))])
def test_the_child(form, flags, masked, free, seen, tmp_path, monkeypatch):
    """Paper: from single rows, no dropout, no clipping, the encoder. Code: batches, dropout, clipping to 1,
    layers. Without decay, what lies outside the child keeps its bits; other weights are free."""
    find, before = childtuning.fisher_mask, {}

    def fisher_mask(model, batches, loss, p, clip, name_filter):
        before.update({name: w.detach().clone() for name, w in model.named_parameters()})
        assert ([len(batch) for batch in batches], model.training, clip, name_filter) == (*seen, masked)
        return find(model, batches, loss, p, clip, name_filter)

    monkeypatch.setattr(childtuning, "fisher_mask", fisher_mask)
    flags = [*topics(tmp_path, 20), "--steps", 4, "--weight-decay", 0, "--form", form, *flags]
    result = tune(tmp_path / "out", *flags)
    moved = {name: w != before[name] for name, w in result.model.named_parameters()}
    inside = torch.cat([x.flatten() for name, x in moved.items() if masked in name]).double()
    outside = [name for name in moved if masked not in name and "position" not in name]
    assert 0.15 < inside.mean() <= 0.301 and any(free in name for name in outside)         # dead words stay
    assert all(moved[name].any() for name in outside)


def test_nan_gradients_are_skipped_counted_and_said(tmp_path, monkeypatch):
    """A row of metrics repeats the last finite loss; where a trial has none yet, it is NaN. Beside the first
    trial's, only the last state of a trial is kept, here the second trial's. Each seed has its order."""
    factors, scores = iter([1, 1, math.nan, math.nan, 1, 1]), iter([1.0, 2, 3, 9, 4, 5])
    compute, said, orders = childtuning.compute_loss, [], []

    def compute_loss(model, batch, *rest):
        orders.append(batch[1].tolist())
        loss = compute(model, batch, *rest)[0] * next(factors)
        return loss, {"loss": loss.detach()}

    monkeypatch.setattr(childtuning, "compute_loss", compute_loss)
    monkeypatch.setattr(childtuning, "evaluate", lambda *_: {"accuracy": next(scores)})
    monkeypatch.setattr(childtuning, "say", lambda label, text: said.append((label, text.split(":")[0])))
    flags = ["--steps", 3, "--eval-every", 1, "--mode", "F", "--seeds", 2, "--warmup-share", 0]
    result = tune(tmp_path / "out", *topics(tmp_path), *flags)
    notes = [text for label, text in said if label == "note"]
    assert notes == ["mode F, seed 42, step 3", "mode F, seed 43, step 1"] and orders[0] != orders[3]
    assert result.losses[2] == result.losses[1] and "2 steps skipped" in result.said["done"]
    assert [i for i, loss in enumerate(result.losses) if math.isnan(loss)] == [3]
    assert [step["skipped"] for step in result.steps] == [0, 0, 1, 2, 2, 2]
    assert [step["best"] for step in result.steps] == [True, True, True, False, False, True]
    assert all(w.isfinite().all() for w in result.model.parameters())
    assert {state["step"].item() for state in result.state["optimizer"]["state"].values()} == {2.0}


def test_several_processes_equal_one(tmp_path, bert):
    """D's sums over ranks, F's equal draws, and a KL that is summed over the batch of all ranks, of which
    three have unequal shares."""
    flags = [*topics(tmp_path), "--model", bert, "--mode", "D", "F", "--steps", 3, "--lr", 1e-3]
    flags += ["--rdrop", 0.5, "--form", "code", "--fisher-batch-size", 5]
    one = tune(tmp_path / "one", *flags)
    norms = in_processes(3, "childtuning", tmp_path / "three", flags)
    three, state = metrics(tmp_path / "three"), torch.load(tmp_path / "three" / "state.pt", weights_only=True)
    assert [step["mode"] for step in three] == ["D"] * 3 + ["F"] * 3
    assert [step["loss"] for step in three] == pytest.approx(one.losses, rel=1e-4)
    assert norms == pytest.approx(one.norms, rel=1e-3)
    assert torch.equal(one.state["optimizer"]["generator"], state["optimizer"]["generator"])
    for key, weight in state["model"].items():
        if not key.endswith("key.bias"):   # softmax ignores it: Adam makes the rounding of its gradient large
            assert (weight - one.state["model"][key]).abs().gt(1e-4).float().mean() < 0.01, key


# ── bad input ──


GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"


@pytest.mark.parametrize("content, flags, wanted", [
    ("sentence\tlabel\nA\tx\n \ty\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("sentence\tlabel\nA\tx\nB\t\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("sentence\tlabel\nA\tx\nB\tx\n", "", r"a\.tsv: every label is 'x'; wanted at least two"),
    (GOOD, "--dev b.tsv", r"b\.tsv line 2: label 'sleep', wanted one of a\.tsv, which are motion, rest"),
    (GOOD, "--dev c.tsv", r"c\.tsv: columns text, label, more; wanted .* of text \(now sentence\) .*"),
    (GOOD, "--label topic", r"a\.tsv: columns sentence, label; wanted .* \(now topic\); name them by .*"),
    (GOOD, "--text sentence label", r"a\.tsv: columns sentence, label; wanted .*"),
    ("A\tB\tC\tx\nA\tB\tC\ty\n", "", r"a\.tsv: columns column 1, column 2, column 3, column 4; wanted .*"),
    ("A\t1.5\nB\tx\n", "--task regression", r"a\.tsv line 2: label 'x', wanted a number"),
    (GOOD, "--batch-size 5", r"a\.tsv: 4 rows, wanted at least --batch-size, which is 5"),
    (GOOD, "--reserve-p 0", r"--reserve-p 0\.0: wanted a share above 0, up to 1"),
    (GOOD, "--reserve-p nan", r"--reserve-p nan: wanted .*"),
    (GOOD, "--metric pearson", r"--metric pearson: this is classification, wanted accuracy, f1, matthews"),
    (GOOD, "--child h.0", r"--child h\.0: in no name of the weights of scratch, which are like bert\..*"),
    (GOOD, "--mode none F D --child h.0", r"--child h\.0: in no name .*"),
    (GOOD, "--max-length 600", r"--max-length 600: scratch reads at most 512 tokens")])
def test_bad_input(tmp_path, monkeypatch, capfd, content, flags, wanted):
    monkeypatch.chdir(tmp_path)
    Path("a.tsv").write_text(content)
    Path("b.tsv").write_text("sentence\tlabel\nA\tsleep\n")
    Path("c.tsv").write_text("text\tlabel\tmore\nA\tmotion\tB\n")
    common = ["--data", "a.tsv", "--model", "scratch", "--batch-size", 2, "--steps", 1]
    refuse("childtuning", capfd, wanted, *common, *flags.split())
