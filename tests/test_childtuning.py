"""Child-Tuning: the optimizer, the Fisher information, R-Drop and the scores against independent float64 code, and whole small runs.

python tests/test_childtuning.py [base|large]      prints step times beside torch's AdamW, at OMP_NUM_THREADS threads
"""
import contextlib, io, json, math, os, re, shutil, socket, statistics, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (AutoConfig, AutoModel, AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification,
                          BertTokenizer, pipeline)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import childtuning
from childtuning import ChildTuningAdamW, fisher_information, fisher_mask, rdrop_loss
from test_scripts import DATA, bert, equal, metrics, one_cpu_thread  # noqa: F401, fixtures


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
def test_fifty_steps_follow_the_released_rule(mode, p, correct_bias):
    """Two groups, clipping before the mask, a falling rate, a weight without gradient in every third step, one of several blocks."""
    weights = parameters((7, 5), (5,), (), (1, 3), (700, 401))
    weights[0] = torch.nn.Parameter(draw(5, 7).T)              # columns are contiguous, rows are not
    masks = random_masks(weights[:-2] + weights[-1:], 50)      # the one before the last has none
    groups = [dict(params=weights[:2], weight_decay=0.1), dict(params=weights[2:], betas=(0.8, 0.99), eps=1e-3)]
    optimizer = ChildTuningAdamW(groups, 0.01, correct_bias=correct_bias, mode=mode, reserve_p=p,
                                 masks=dict(none=None, D=dict(masks), F=masks.get)[mode])
    state = [(w.detach().numpy().copy(), np.zeros(w.shape), np.zeros(w.shape)) for w in weights]
    times = [0] * len(weights)
    for step in range(50):
        lr = 0.01 * (1 - step / 60)
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
    for options in (dict(), dict(mode=None), dict(mode="F"), dict(mode="D"), dict(mode="ChildTuning-F", reserve_p=1.0), "all true"):
        weights = [torch.nn.Parameter(w.detach().to(dtype)) for w in parameters((6, 5), (5,))]
        if options == "all true":
            options = dict(mode="D", reserve_p=0.5, masks={w: torch.ones_like(w, dtype=torch.bool) for w in weights})
        results.append(steps(6, weights, ChildTuningAdamW(weights, 0.01, weight_decay=0.1, generator=generator, **options)))
    assert all(equal(result, results[0]) for result in results) and torch.equal(generator.get_state(), kept)
    assert not torch.equal(results[0][0], parameters((6, 5))[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.3, 0.75, 0.999])
def test_draws(p, dtype):
    """Seen in the first moment, (1 − β1) g M / p: the share p, independent of place and step, 1 / p in the weights' own type."""
    w, shares, masks = torch.nn.Parameter(torch.zeros(999, 401, dtype=dtype)), [], []
    torch.manual_seed(3)
    untouched = torch.get_rng_state()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        w.grad = torch.full_like(w, 0.5)
        optimizer = ChildTuningAdamW([w], betas=(0.5, 0.999), mode="F", reserve_p=p, generator=generator)
        optimizer.step()
        m = optimizer.state[w]["exp_avg"]
        assert set(m.unique().tolist()) == {0.0, (torch.full((), 0.5, dtype=dtype) * (1 / p)).mul(0.5).item()}
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
        results.append(steps(3, weights, ChildTuningAdamW(weights, mode="F", reserve_p=0.4, generator=generator)))
    assert equal(results[0], results[1]) and not equal(results[0], results[2])


def test_masked_gradients_may_be_anything():
    """A masked inf or NaN is 0; a step twice without a new backward masks the same gradient again; decay reaches all."""
    w = torch.nn.Parameter(torch.ones(4))
    mask = torch.tensor([True, False, False, True])
    optimizer = ChildTuningAdamW([w], lr=0.1, weight_decay=0.5, mode="D", masks={w: mask})
    w.grad = torch.tensor([1.0, math.nan, math.inf, -1.0])
    optimizer.step()
    optimizer.step()
    assert equal(w.grad[[0, 2, 3]], torch.tensor([1.0, math.inf, -1.0])) and w.grad[1].isnan()
    assert equal(w[[1, 2]].detach(), torch.ones(2).add(torch.ones(2), alpha=-0.05).add(torch.full((2,), 0.95), alpha=-0.05))
    assert w[0] < 0.9 ** 1 * 0.95 and w[3] > 0.95
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
def test_a_list_is_stepped_as_its_blocks(mode):
    """What a GPU gets in one go, this file sees in blocks: the same bits."""
    many, few = parameters((700, 401), (5,), ()), parameters((700, 401), (5,), ())
    masks = list(random_masks(many, 9).values())
    optimizer = ChildTuningAdamW(few, 0.01, weight_decay=0.1, mode=mode, reserve_p=0.4, masks=dict(zip(few, masks)))
    masks = [None] * 3 if mode == "none" else masks
    for i, w in enumerate(few):
        w.grad = draw(*w.shape, seed=i)
    with torch.no_grad():
        moments = [[torch.zeros_like(w) for w in many] for _ in range(2)]
        rates = [0.01 * (1 - 0.999) ** 0.5 / (1 - 0.9)] * 3
        optimizer.update(many, [w.grad for w in few], *moments, masks, rates, 0.01, optimizer.param_groups[0])
    optimizer.step()
    assert equal([w.detach() for w in many], [w.detach() for w in few])
    assert equal(moments[1], [optimizer.state[w]["exp_avg_sq"] for w in few])


@pytest.mark.parametrize("mode", ["none", "D", "F"])
def test_compiled_step_is_the_same(mode):
    """The rate is a tensor that changes; new steps must not be compiled anew. Inductor fuses the same graph."""
    torch._dynamo.reset()
    results, frames = [], []
    for compiled in (False, True):
        weights = parameters((6, 5), (5,), ())
        rate = torch.tensor(0.01, dtype=torch.float64)
        optimizer = ChildTuningAdamW(weights, rate, weight_decay=0.1, mode=mode, reserve_p=0.4,
                                     masks=random_masks(weights[:2], 9) if mode == "D" else None)
        def backend(graph, _):
            frames.append(graph)
            return graph
        step = torch.compile(optimizer.step, backend=backend, fullgraph=mode != "F") if compiled else optimizer.step
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
    (dict(lr=-1), ValueError, "lr is -1"), (dict(betas=(0.9, 1.0)), ValueError, "betas"), (dict(eps=-1), ValueError, "eps"),
    (dict(weight_decay=-1), ValueError, "weight_decay"), (dict(mode="E"), ValueError, "mode is 'E'"),
    (dict(reserve_p=0.0), ValueError, "reserve_p is 0.0"), (dict(reserve_p=1.5), ValueError, "reserve_p"),
    (dict(masks={"weight": torch.ones(3, dtype=torch.bool)}), ValueError, "masks"), (dict(masks={"w": torch.ones(3)}), ValueError, "masks"),
    (dict(masks={"w": torch.ones(2, dtype=torch.bool)}), ValueError, "masks"), (dict(mode="D", reserve_p=0.5), RuntimeError, "no masks"),
    (dict(sparse=True), RuntimeError, "sparse")])
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


# ── Fisher information and masks ──


class Softmax(torch.nn.Module):
    """Logits W x + b: ∂ −log p(y|x) / ∂W = (p − e_y) xᵀ and ∂ / ∂b = p − e_y. Two more weights have no part in it."""

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


@pytest.mark.parametrize("n, size, clip", [(12, 1, None), (12, 4, None), (13, 4, None), (12, 4, 0.5), (12, 1, 0.7)])
def test_fisher_information(n, size, clip):
    """1 is the paper's, 4 squares the mean gradient of a batch; each tensor is clipped on its own; short batches count as others."""
    model, batches = Softmax(), softmax_batches(n, size)
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
            total += (gradient * (1 if clip is None else min(1, clip / (norm + 1e-6)))) ** 2 / len(batches)
    model.layer.weight.grad = torch.ones(3, 5, dtype=torch.float64)
    fisher = fisher_information(model, iter(batches), cross_entropy, clip)
    assert list(fisher) == ["unused", "frozen", "layer.weight", "layer.bias"]
    for name, total in zip(("layer.weight", "layer.bias"), wanted):
        np.testing.assert_allclose(fisher[name].numpy(), total, rtol=1e-12)
    assert not fisher["unused"].any() and not fisher["frozen"].any()
    assert model.layer.weight.grad.eq(1).all() and model.layer.bias.grad is None and model.training

    for p in (0.1, 0.3, 0.5, 1.0):
        masks, threshold = fisher_mask(model, batches, cross_entropy, p, max_grad_norm=clip, name_filter="layer")
        values = np.concatenate([x.ravel() for x in wanted])
        assert threshold == pytest.approx(np.percentile(values, (1 - p) * 100), rel=1e-12)
        assert list(masks) == ["layer.weight", "layer.bias"] and all(mask.dtype == torch.bool for mask in masks.values())
        kept = len(values) - math.ceil(round((1 - p) * (len(values) - 1), 9))
        assert sum(mask.sum().item() for mask in masks.values()) == kept
        if p < 1:
            order = np.sort(values)[::-1]
            assert equal(masks["layer.weight"], torch.from_numpy(wanted[0] >= (order[kept - 1] + order[kept]) / 2))


@pytest.mark.parametrize("name_filter", ["layer.w", lambda name: name == "layer.weight"])
def test_name_filter(name_filter):
    assert list(fisher_mask(Softmax(), softmax_batches(3, 1), cross_entropy, 0.5, name_filter=name_filter)[0]) == ["layer.weight"]


def test_ties_and_zeros_are_kept():
    model = Softmax()                                          # 18 weights with a Fisher information, 8 without
    masks, threshold = fisher_mask(model, softmax_batches(12, 1), cross_entropy, 0.8)
    assert threshold == 0 and all(mask.all() for mask in masks.values())
    masks, threshold = fisher_mask(model, softmax_batches(12, 1), cross_entropy, 0.5)
    assert threshold > 0 and not masks["unused"].any() and not masks["frozen"].any()
    w = torch.nn.Linear(6, 1, bias=False)                      # F 1 1 1 1 4 4
    masks, threshold = fisher_mask(w, [torch.tensor([1.0, 1, 1, 1, 2, 2])], lambda model, x: model(x)[0], 0.5)
    assert threshold == 1 and masks["weight"].all()
    masks, threshold = fisher_mask(w, [torch.tensor([1.0, 1, 1, 1, 2, 2])], lambda model, x: model(x)[0], 0.3)
    assert threshold == pytest.approx(2.5) and masks["weight"].tolist() == [[False] * 4 + [True] * 2]


def test_threshold_past_sixteen_million():
    """torch.quantile ends there. F is (i + 1)² for i in a random order; 30 % of 17 million are kept."""
    n = 17_000_000
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(n))
    masks, threshold = fisher_mask(model, [order.float().add(1).div(n)], lambda model, x: (model.w * x).sum(), 0.3)
    assert masks["w"].sum().item() == pytest.approx(0.3 * n, abs=2)            # float32 has ties
    assert threshold == pytest.approx(0.49, abs=1e-6) and equal(masks["w"], order.float().add(1).div(n).square() >= threshold)


def test_a_batch_without_finite_gradient_is_left_out(capsys):
    good = softmax_batches(6, 1)
    bad = [*good[:2], (good[0][0] * math.inf, good[0][1]), *good[2:]]
    assert equal(fisher_information(Softmax(), bad, cross_entropy), fisher_information(Softmax(), good, cross_entropy))
    assert "1 of 7 batches" in capsys.readouterr().out


@pytest.mark.parametrize("batches, options, said", [
    (1, dict(reserve_p=0.0), "reserve_p"), (1, dict(reserve_p=1.1), "reserve_p"), (1, dict(name_filter="h.0"), "name_filter: .*layer.bias"),
    (1, dict(name_filter="frozen"), "name_filter"), (0, {}, "batches"), (-1, {}, "batches")])
def test_fisher_mask_refuses(batches, options, said):
    made = softmax_batches(6, 1)[: abs(batches)]
    made = [(x * math.nan, y) for x, y in made] if batches < 0 else made
    with pytest.raises(ValueError, match=said):
        fisher_mask(Softmax(), made, cross_entropy, **dict(reserve_p=0.5) | options)


# ── losses, scores, schedule ──


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
                apart = apart + sum(p[c] * (p[c] / q[c]).log() + q[c] * (q[c] / p[c]).log() for c in range(classes)) / 2
        return task + 0.7 * apart / 6 if form == "paper" else task / 2 + 0.7 * apart

    labels, scores = torch.arange(6) % max(classes, 2), draw(6, seed=5)
    results = []
    for f in (lambda a, b: rdrop_loss(a, b, scores if classes == 1 else labels, 0.7, form), written_out):
        leaves = [draw(6, classes, seed=i).requires_grad_() for i in (1, 2)]
        value = f(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_confusion_scores():
    rng = np.random.default_rng(0)
    for labels, n in ((["0", "1"], 40), (["no", "yes"], 40), (["a", "b", "c", "d"], 60)):
        truth, said = rng.integers(0, len(labels), n), rng.integers(0, len(labels), n)
        said[: n // 2] = truth[: n // 2]
        truth[truth == 3], said[said == 3] = 2, 2              # d occurs nowhere and has no part in the mean
        f1 = []
        for c in range(min(len(labels), 3)):
            hits = sum((truth == c) & (said == c))
            f1.append(2 * hits / (sum(truth == c) + sum(said == c)))
        one_hot = [np.eye(len(labels))[x] - np.eye(len(labels))[x].mean(0) for x in (truth, said)]
        rk = (one_hot[0] * one_hot[1]).sum() / math.sqrt((one_hot[0] ** 2).sum() * (one_hot[1] ** 2).sum())    # a correlation
        scores = childtuning.confusion_scores(truth, said, labels)
        assert scores["accuracy"] == pytest.approx((truth == said).mean()) and scores["matthews"] == pytest.approx(rk)
        assert scores["f1"] == pytest.approx(f1[1] if labels == ["0", "1"] else np.mean(f1))
    tp, tn, fp, fn = 6, 3, 1, 2                                # 6·3 − 1·2 over √(7·8·4·5)
    truth, said = np.repeat([1, 0, 0, 1], [tp, tn, fp, fn]), np.repeat([1, 0, 1, 0], [tp, tn, fp, fn])
    assert childtuning.confusion_scores(truth, said, ["0", "1"])["matthews"] == pytest.approx(16 / math.sqrt(7 * 8 * 4 * 5))
    assert childtuning.confusion_scores(truth, np.ones(12, int), ["0", "1"])["matthews"] == 0


def test_warmup():
    """transformers' linear schedule: its first step is step 0."""
    from transformers import get_linear_schedule_with_warmup
    for total, share in ((20, 0.1), (25, 0.1), (7, 0.0), (3, 0.1), (10, 1.0)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        schedule = get_linear_schedule_with_warmup(optimizer, math.ceil(total * share), total)
        for step in range(1, total + 1):
            assert childtuning.warmup_linear(step - 1, total, math.ceil(share * total), 0.5) == pytest.approx(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()


# ── whole runs ──


def topics(folder, rows=36):
    """The README's command with the first rows of its files."""
    for name in ("topics.tsv", "topics_dev.tsv"):
        (folder / name).write_bytes(b"".join((DATA / name).read_bytes().splitlines(True)[: rows + 1]))
    return ["--model", "scratch", "--data", folder / "topics.tsv", "--dev", folder / "topics_dev.tsv", "--batch-size", 8]


def run(out, *flags):
    """main(flags) in this process: what it says, writes and trained."""
    made, build = [], childtuning.build_model
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as lines:
        patch.setattr(childtuning, "build_model", lambda args: made.append(build(args)) or made[-1])
        childtuning.main([*map(str, flags), "--out", str(out)])
    steps, state = metrics(out), torch.load(out / "state.pt", weights_only=True)
    return SimpleNamespace(lines=lines.getvalue().splitlines(), model=made[-1], steps=steps, state=state, losses=[step["loss"] for step in steps])


def test_copied_with_kernels_alone(tmp_path):
    home = tmp_path / "home"
    shutil.copytree(ROOT / "kernels", home / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "childtuning.py", home)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "childtuning.py", *map(str, topics(tmp_path)), "--out", "out/first", "--steps", "3"]
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["done", "load"] and "Traceback" not in done.stderr
    wanted = "README.md args.json config.json metrics.jsonl model.safetensors state.pt tokenizer.json childtuning.py"
    assert [file for file in wanted.split() if not (home / "out" / "first" / file).is_file()] == []
    assert [step["step"] for step in metrics(home / "out" / "first")] == [1, 2, 3]


@pytest.mark.parametrize("flags", [["--mode", "F", "--reserve-p", 0.5], ["--mode", "D", "--reserve-p", 0.5, "--child", "."],
                                   ["--mode", "none", "--rdrop", 0.5]])
def test_loss_falls_when_one_batch_repeats(flags, tmp_path):
    losses = run(tmp_path / "out", *topics(tmp_path, 8), "--steps", 30, "--lr", 5e-3, *flags).losses
    assert 0 < max(losses[-5:]) < 0.5 * losses[0]


def test_learns(tmp_path):
    result = run(tmp_path / "out", "--model", "scratch", "--data", DATA / "topics.tsv", "--dev", DATA / "topics_dev.tsv", "--mode", "F",
                 "--epochs", 5, "--reserve-p", 0.5)
    assert result.steps[-1]["dev_accuracy"] > 80               # one in eight is right by chance


RUNS = ["--mode", "D", "F", "--seeds", 2, "--reserve-p", 0.4, "--fisher-samples", 12, "--steps", 5, "--eval-every", 3]


@pytest.mark.parametrize("stop", [4, 10, 12, 19])
def test_resume_is_exact(stop, tmp_path, monkeypatch):
    """Four runs of five steps, interrupted within a run and at its end, in both modes; masks and draws come from the state."""
    flags = [*topics(tmp_path), *RUNS]
    whole = run(tmp_path / "whole", *flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(childtuning, "average_gradients", Mock(side_effect=[None] * stop + [KeyboardInterrupt]))
        run(tmp_path / "parts", *flags)
    fisher = Mock(wraps=childtuning.fisher_mask)
    monkeypatch.setattr(childtuning, "fisher_mask", fisher)
    parts = run(tmp_path / "parts", *flags, "--resume")
    assert fisher.call_count == (stop < 5)                     # the second run's; that of the run in progress is reused
    assert [step | {"seconds": 0} for step in parts.steps] == [step | {"seconds": 0} for step in whole.steps]
    assert equal(parts.state, whole.state)
    assert equal(load_file(tmp_path / "parts" / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors"))
    assert parts.lines[-4:-2] == whole.lines[-4:-2]            # the table


def test_seeds_differ_and_repeat_alone(tmp_path):
    """The third run of several is the run of its seed alone, to the bit; the table is mean, deviation and best of each mode."""
    flags = [*topics(tmp_path), "--steps", 6, "--eval-every", 3]
    several = run(tmp_path / "several", *flags, "--mode", "none", "F", "--seeds", 3, "--lr", 5e-3)
    alone = run(tmp_path / "alone", *flags, "--mode", "none", "--seed", 44, "--lr", 5e-3)
    parts = [[(s["loss"], s.get("dev_accuracy")) for s in several.steps if (s["mode"], s["seed"]) == (mode, seed)]
             for mode in ("none", "F") for seed in (42, 43, 44)]
    assert parts[2] == [(s["loss"], s.get("dev_accuracy")) for s in alone.steps]
    assert all(a[0] != b[0] for i, a in enumerate(parts[:3]) for b in parts[:i]) and parts[0][0] == parts[3][0]
    for mode, mine in (("none", parts[:3]), ("F", parts[3:])):
        [line] = [line for line in several.lines if line.startswith(f"{mode} ")]
        scores = [part[-1][1] for part in mine]                # of the last step
        assert f"accuracy {np.mean(scores):.2f} ± {statistics.stdev(scores):.2f}, best {max(scores):.2f}" in line
    best = several.state["progress"]["best"]
    lasts = [(part[-1][1], -i) for i, part in enumerate(parts)]
    assert (best["accuracy"], best["mode"], best["seed"]) == (max(lasts)[0], *[("none", "F")[i // 3] for i in [-max(lasts)[1]]],
                                                              42 + -max(lasts)[1] % 3)


def test_p_1_of_both_modes_is_the_plain_run(tmp_path):
    flags = [*topics(tmp_path), "--steps", 4]
    one, two, three = (run(tmp_path / mode, *flags, "--mode", mode, "--reserve-p", p) for mode, p in (("none", 0.3), ("F", 1), ("D", 1)))
    assert one.losses == two.losses == three.losses and equal(one.state["model"], two.state["model"])
    assert equal(one.state["model"], three.state["model"])
    assert one.losses != run(tmp_path / "half", *flags, "--mode", "F", "--reserve-p", 0.5).losses


def test_masked_weights_stay(tmp_path):
    """Mode D in whole runs: without decay, what lies outside the child keeps its bits and the rest does not; the head is free."""
    for form, masked, free in (("paper", "bert.", "classifier."), ("code", "layer", "embeddings.")):
        result = run(tmp_path / form, *topics(tmp_path), "--steps", 4, "--weight-decay", 0, "--form", form, "--fisher-samples", 16)
        torch.manual_seed(42)
        args = childtuning.make_parser().parse_args([*map(str, topics(tmp_path)), "--seed", "42"])
        args.device, args.task, args.labels = "cpu", "classification", sorted(result.model.config.label2id)
        before = dict(childtuning.build_model(args).named_parameters())
        moved = {name: w != before[name] for name, w in result.model.named_parameters()}
        outside = [name for name in moved if masked not in name]
        share = sum(moved[name].sum().item() for name in moved if masked in name) / sum(moved[name].numel() for name in moved if masked in name)
        assert 0.2 < share <= 0.301                            # dead words have no gradient
        assert any(name.startswith(free) or free in name for name in outside) and all(moved[name].any() for name in outside if "position" not in name)


def test_fisher_pass_of_each_form(tmp_path, monkeypatch):
    """Paper: single rows, no dropout, no clipping, the encoder's weights. Code: batches, dropout, clipping to 1, layers."""
    seen = []

    def fisher_mask(model, batches, loss, p, clip, name_filter):
        seen.append(([len(batch) for batch in batches], model.training, clip, {name.split(".")[1] for name, _ in model.named_parameters() if name_filter in name}))
        return childtuning_fisher_mask(model, batches, loss, p, clip, name_filter)

    childtuning_fisher_mask = childtuning.fisher_mask
    monkeypatch.setattr(childtuning, "fisher_mask", fisher_mask)
    flags = [*topics(tmp_path, 20), "--steps", 1, "--mode", "D"]
    losses = [run(tmp_path / "paper", *flags).losses, run(tmp_path / "code", *flags, "--form", "code").losses]
    run(tmp_path / "own", *flags, "--fisher-batch-size", 3, "--fisher-samples", 7, "--fisher-clip", 0.5, "--child", "pooler")
    assert seen[0] == ([1] * 20, False, None, {"embeddings", "encoder", "pooler"})
    assert seen[1] == ([16, 4], True, 1.0, {"encoder"})
    assert seen[2] == ([3, 3, 1], False, 0.5, {"pooler"})
    assert losses[0] == losses[1]                              # the training's draws do not depend on the pass


def test_nan_gradients_are_skipped_counted_and_said(tmp_path, monkeypatch):
    flags = [*topics(tmp_path), "--steps", 6, "--mode", "F", "--warmup-share", 0]
    losses = iter([1, 1, math.nan, 1, math.nan, 1])
    compute = childtuning.compute_loss

    def compute_loss(model, batch, args):
        loss, values = compute(model, batch, args)
        factor = next(losses)
        return loss * factor, {"loss": loss.detach() * factor}

    monkeypatch.setattr(childtuning, "compute_loss", compute_loss)
    result = run(tmp_path / "out", *flags)
    assert [line.split("step ")[1].split(":")[0] for line in result.lines if line.startswith("note")] == ["3", "5"]
    assert "2 steps skipped" in result.lines[-2] and all(map(math.isfinite, result.losses))
    assert [step["skipped"] for step in result.steps] == [0, 0, 1, 2, 2] and all(w.isfinite().all() for w in result.model.parameters())
    assert {state["step"].item() for state in result.state["optimizer"]["state"].values()} == {4.0}


WORLD = int(os.environ.get("TENCL_WORLD", 3))                  # three processes have unequal shares of a batch


def one_of_several(rank, port, out, flags):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.is_available = lambda: False
    torch.set_num_threads(1)
    childtuning.main([*map(str, flags), "--out", str(out)])


def test_several_processes_equal_one(tmp_path, bert):  # noqa: F811
    """D's sums over ranks, F's equal draws, and a KL that is summed over the batch of all ranks."""
    flags = [*topics(tmp_path), "--model", bert, "--steps", 4, "--lr", 1e-3, "--mode", "D", "F", "--rdrop", 0.5, "--form", "code",
             "--fisher-batch-size", 5]
    one = run(tmp_path / "one", *flags)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(one_of_several, (port, tmp_path / "two", flags), nprocs=WORLD, start_method="forkserver")
    two = torch.load(tmp_path / "two" / "state.pt", weights_only=True)
    assert [step["mode"] for step in metrics(tmp_path / "two")] == ["D"] * 4 + ["F"] * 4
    assert [step["loss"] for step in metrics(tmp_path / "two")] == pytest.approx(one.losses, rel=1e-4)
    assert torch.equal(one.state["optimizer"]["generator"], two["optimizer"]["generator"])
    for key, weight in two["model"].items():
        if not key.endswith("key.bias"):                       # softmax ignores it: its gradient is rounding, which Adam makes large
            assert (weight - one.state["model"][key]).abs().gt(1e-4).float().mean() < 0.01, key


@pytest.mark.parametrize("task", ["classification", "pairs", "regression"])
def test_pipeline_loads_the_folder(task, tmp_path, bert):  # noqa: F811
    """By the line that was printed; scores are those of our own evaluation, labels the file's."""
    rows = [line.split("\t") for line in (DATA / ("topics.tsv" if task == "classification" else "sts.tsv")).read_text().splitlines()]
    if task == "pairs":
        rows = [["sentence1", "sentence2", "label"]] + [[a, b, "close" if float(score) > 3 else "far"] for a, b, score, _ in rows[1:]]
    (tmp_path / "data.tsv").write_text("\n".join("\t".join(row) for row in rows[:41]))
    result = run(tmp_path / "out", "--model", bert, "--data", tmp_path / "data.tsv", "--dev", tmp_path / "data.tsv", "--steps", 12,
                 "--lr", 1e-3, "--mode", "F", "--max-length", 512)
    load = result.lines[-1].split(None, 1)[1]
    texts = [dict(zip(("text", "text_pair"), row[: 1 if task == "classification" else 2])) for row in rows[1:41]]
    found = eval(load, {"pipeline": pipeline})(texts, function_to_apply="none" if task == "regression" else None)
    if task == "regression":
        scores, wanted = [one["score"] for one in found], [float(row[2]) for row in rows[1:41]]
        assert 100 * np.corrcoef(scores, wanted)[0, 1] == pytest.approx(result.steps[-1]["dev_pearson"], abs=1e-3)
        assert result.model.config.problem_type == "regression"
    else:
        right = np.mean([one["label"] == row[-1] for one, row in zip(found, rows[1:41])])
        assert 100 * right == pytest.approx(result.steps[-1]["dev_accuracy"])
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
    assert task == "regression" or config.id2label == dict(enumerate(sorted({row[-1] for row in rows[1:]})))
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["truncation"] is None


TINY = dict(vocab_size=120, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
KINDS = {"distilbert": dict(vocab_size=120, dim=16, n_layers=1, n_heads=2, hidden_dim=32), "roberta": dict(**TINY, type_vocab_size=2, pad_token_id=0),
         "electra": dict(**TINY, embedding_size=16), "gpt2": dict(vocab_size=120, n_embd=16, n_layer=1, n_head=2),
         "xlnet": dict(vocab_size=120, d_model=16, n_layer=1, n_head=2, d_inner=32),
         "t5": dict(vocab_size=120, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0)}


@pytest.mark.parametrize("kind", KINDS)
def test_any_classifier_is_tuned_saved_and_padded_on_its_own_side(kind, tmp_path):
    """Logits of a padded batch are those of its rows alone; XLNet reads its last token, so it pads left. The folder gives them too."""
    letters = "abcdefghijklmnopqrstuvwxyzøşłé.,'\"!?"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    tokenizer = BertTokenizer({piece: i for i, piece in enumerate(pieces)}, model_max_length=200, padding_side="left" if kind == "xlnet" else "right")
    AutoModel.from_config(AutoConfig.for_model(kind, **KINDS[kind])).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    flags = topics(tmp_path, 16)[2:]
    result = run(tmp_path / "out", *flags, "--model", tmp_path / "model", "--steps", 2, "--mode", "D")
    args = SimpleNamespace(data=flags[1], labels=None, label=None, text=None)
    rows, _ = childtuning.tokenise_texts([((text,), 0) for text in ("No.", "She sang a very long song.", "He ran away")], result.model.eval(), 64)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    loaded.tokenizer, loaded.bf16 = result.model.tokenizer, False
    with torch.no_grad():
        together = childtuning.classify(result.model, childtuning.make_batch(rows, result.model, args)[0])
        alone = [childtuning.classify(model, childtuning.make_batch([row], model, args)[0]) for model in (result.model, loaded.eval()) for row in rows]
    torch.testing.assert_close(torch.cat(alone[:3]), together, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(alone[3:]), together, atol=1e-5, rtol=0)


def test_evaluation_leaves_no_trace(tmp_path):
    flags = [*topics(tmp_path), "--steps", 5, "--mode", "F"]
    often, seldom = run(tmp_path / "often", *flags, "--eval-every", 1), run(tmp_path / "seldom", *flags, "--eval-every", 100)
    never = run(tmp_path / "never", *[flag for i, flag in enumerate(flags) if "--dev" not in flags[max(0, i - 1) : i + 1]])
    assert [sum("dev_accuracy" in step for step in x.steps) for x in (often, seldom, never)] == [5, 1, 0]
    for other in (seldom, never):
        assert other.losses == often.losses and equal(other.state["model"], often.state["model"])
        assert equal(other.state["optimizer"], often.state["optimizer"]) and equal(other.state["random"], often.state["random"])


# ── data and bad input ──


PAIRS = "sentence1\tsentence2\tlabel\trelatedness\n" + "".join(f"A {i}.\tB {i}.\t{'yes' if i % 2 else 'no'}\t{i / 2}\n" for i in range(6))


@pytest.mark.parametrize("name, content, flags, texts, answer, labels", [
    ("a.tsv", PAIRS, [], ("A 1.", "B 1."), "yes", ["no", "yes"]),
    ("a.tsv", PAIRS, ["--label", "relatedness"], ("A 1.", "B 1."), 0.5, []),
    ("a.tsv", PAIRS, ["--text", "sentence2"], ("B 1.",), "yes", ["no", "yes"]),
    ("a.tsv", PAIRS, ["--label", "relatedness", "--task", "classification"], ("A 1.", "B 1."), "0.5", "0.0 0.5 1.0 1.5 2.0 2.5".split()),
    ("a.csv", 'I ran.,10\n"Oh, no.",9\nNo.,-1\n', [], ("Oh, no.",), "9", ["-1", "9", "10"]),
    ("a.csv", 'I ran.,10\n"Oh, no.",9\nNo.,-1\n', ["--task", "regression"], ("Oh, no.",), 9.0, []),
    ("a.jsonl", '{"premise": "A", "hypothesis": "B", "gold": 1}\n{"premise": "C", "hypothesis": "D", "gold": 0}\n', [], ("C", "D"), "0", ["0", "1"]),
    ("a.jsonl", '["A", "B", 1.0]\n["C", "D", 5]\n', [], ("C", "D"), 5.0, []),
    ("a.tsv", "label\tid\tsentence\ny\t1\tA\nx\t2\tB\n", [], ("B",), "x", ["x", "y"])])
def test_columns_and_tasks(tmp_path, name, content, flags, texts, answer, labels):
    (tmp_path / name).write_text(content)
    args = childtuning.make_parser().parse_args(["--data", str(tmp_path / name), "--batch-size", "2", *flags])
    found, label = childtuning.load_data(tmp_path / name, args)[1]
    assert (found, args.labels) == (texts, labels)
    assert (args.task, args.metric) == (("classification", "accuracy") if labels else ("regression", "spearman"))
    assert (labels[label] if labels else label) == answer


GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"


@pytest.mark.parametrize("name, content, flags, wanted", [
    ("a.tsv", "sentence\tlabel\nA\tx\n \ty\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("a.tsv", "sentence\tlabel\nA\tx\nB\t\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("a.tsv", "sentence\tlabel\nA\tx\nB\tx\n", "", r"a\.tsv: every label is 'x'; wanted at least two"),
    ("a.tsv", "sentence\tlabel\n", "", r"a\.tsv: no rows"),
    ("a.tsv", GOOD, "--dev b.tsv", r"b\.tsv line 2: label 'sleep', wanted one of a\.tsv, which are motion, rest"),
    ("a.tsv", GOOD, "--dev empty.tsv", r"empty\.tsv: no rows"),
    ("a.tsv", GOOD, "--dev c.tsv", r"c\.tsv: columns text, label, more; wanted one or two of text \(now sentence\) .*"),
    ("a.tsv", GOOD, "--label topic", r"a\.tsv: columns sentence, label; wanted .* \(now topic\); name them by --text and --label"),
    ("a.tsv", GOOD, "--text sentence label", r"a\.tsv: columns sentence, label; wanted .*"),
    ("a.tsv", "A\tB\tC\tx\nA\tB\tC\ty\n", "", r"a\.tsv: columns column 1, column 2, column 3, column 4; wanted .*"),
    ("a.tsv", "A\t1.5\nB\tx\n", "--task regression", r"a\.tsv line 2: label 'x', wanted a number"),
    ("a.tsv", GOOD, "--batch-size 5", r"a\.tsv: 4 rows, wanted at least --batch-size, which is 5"),
    ("a.tsv", GOOD, "--reserve-p 0", r"--reserve-p 0\.0: wanted a share above 0, up to 1"),
    ("a.tsv", GOOD, "--reserve-p 1.01", r"--reserve-p 1\.01: wanted .*"),
    ("a.tsv", GOOD, "--reserve-p nan", r"--reserve-p nan: wanted .*"),
    ("a.tsv", GOOD, "--metric pearson", r"--metric pearson: this is classification, wanted accuracy, f1, matthews"),
    ("a.tsv", GOOD, "--mode E", r"argument --mode: invalid choice: 'E' .*"),
    ("a.tsv", GOOD, "--seeds 0", r"argument --seeds: 0: wanted a number of at least 1"),
    ("a.tsv", GOOD, "--child h.0", r"--child h\.0: in no name of the weights of scratch, which are like bert\..*"),
    ("a.tsv", GOOD, "--mode none F D --child h.0", r"--child h\.0: in no name .*"),
    ("a.tsv", GOOD, "--max-length 600", r"--max-length 600: scratch reads at most 512 tokens"),
    ("a.tsv", GOOD, "--model none/such", r"--model none/such: no such folder, and the hub does not give it.*"),
    ("a.tsv", GOOD, "--out a.tsv", r"--out a\.tsv: .* is no folder that can be written"),
    ("a.tsv", GOOD, "--resume --out new", r"--out new: no state\.pt to resume from")])
def test_bad_input(tmp_path, monkeypatch, capfd, name, content, flags, wanted):
    """One line on stderr, exit code 2, and nothing written."""
    monkeypatch.chdir(tmp_path)
    Path("b.tsv").write_text("sentence\tlabel\nA\tsleep\n")
    Path("c.tsv").write_text("text\tlabel\tmore\nA\tmotion\tB\n")
    Path("empty.tsv").write_text("sentence\tlabel\n")
    Path(name).write_text(content)
    before = {path: path.read_bytes() for path in Path().rglob("*")}
    with pytest.raises(SystemExit) as end:
        childtuning.main(["--data", name, "--model", "scratch", "--batch-size", "2", "--steps", "1", *flags.split()])
    err = capfd.readouterr().err
    assert end.value.code == 2 and re.fullmatch(rf"childtuning\.py: {wanted}\n", err), err
    assert {path: path.read_bytes() for path in Path().rglob("*")} == before


def test_resume_with_other_flags(tmp_path, capfd):
    flags = [*topics(tmp_path, 12), "--steps", 2, "--mode", "F"]
    run(tmp_path / "out", *flags)
    with pytest.raises(SystemExit):
        run(tmp_path / "out", *flags, "--resume", "--seeds", 2)
    assert "--resume: seeds was 1" in capfd.readouterr().err


# ── step time ──


def step_times(size):
    """Median milliseconds of a step over the weights of a BERT classifier, one optimizer after the other, by turns."""
    shape = dict(base={}, large=dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096))[size]
    with torch.device("meta"):
        shapes = [w.shape for w in BertForSequenceClassification(BertConfig(**shape)).parameters()]
    weights = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    for w in weights:
        w.grad = 1e-3 * torch.randn_like(w)
    masks = {w: torch.rand_like(w) < 0.3 for w in weights}
    makers = {"torch AdamW, foreach": lambda: torch.optim.AdamW(weights, lr=1e-5, foreach=True),
              "torch AdamW, fused": lambda: torch.optim.AdamW(weights, lr=1e-5, fused=True),
              "none": lambda: ChildTuningAdamW(weights, lr=1e-5),
              "D, p 0.3": lambda: ChildTuningAdamW(weights, lr=1e-5, mode="D", reserve_p=0.3, masks=masks),
              "F, p 0.3": lambda: ChildTuningAdamW(weights, lr=1e-5, mode="F", reserve_p=0.3)}
    print(f"BERT-{size}, {sum(w.numel() for w in weights) / 1e6:.0f} M weights in {len(weights)} tensors, {torch.get_num_threads()} threads\n")
    print("| optimizer | ms a step | over foreach |\n| --- | --- | --- |")
    first = None
    for name, make in makers.items():
        optimizer, times = make(), []
        for _ in range(8):
            began = time.perf_counter()
            optimizer.step()
            times.append(1e3 * (time.perf_counter() - began))
        median = statistics.median(times[1:])                  # the first makes the state
        first = first or median
        print(f"| {name} | {median:.0f} | {median / first:.2f} |", flush=True)


if __name__ == "__main__":
    step_times(sys.argv[1] if len(sys.argv) > 1 else "base")
