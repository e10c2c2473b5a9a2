"""Test childtuning.py: the optimizer and the Fisher information, compared with independent float64 code, and
the child network of a run."""
import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import childtuning
from childtuning import ChildTuningAdamW, fisher_information, fisher_mask, sample_mask
from loss_check import numbers
from running import DATA, equal, metrics, run


def loss(model, batch):
    """Return Σ w·x. The gradient with respect to each weight w is its entry x of the batch."""
    return sum((model[name] * x).sum() for name, x in batch.items())


def random_masks(weights, seed):
    return {w: numbers(*w.shape, seed=seed + i) < -0.3 for i, w in enumerate(weights)}


# ── the optimizer ──


@pytest.mark.parametrize("mode, p, correct_bias", [
    ("none", 0.3, True), ("D", 0.3, False), ("F", 0.3, True), ("ChildTuning-F", 0.9, False), ("F", 1, True)])
def test_steps_follow_the_released_rule(mode, p, correct_bias):
    """Ten steps give the same weights as NumPy code, with two parameter groups and a falling learning rate.
    In every third step, one weight has no gradient. In the last step, some gradients are NaN; a NaN counts as
    0 where the mask is 0. With p = 1 there is no mask."""
    weights = [torch.nn.Parameter(numbers(*shape)) for shape in ((5, 7), (5,), (), (1, 3), (17, 11))]
    weights[0] = torch.nn.Parameter(weights[0].detach().T)     # this weight is not contiguous
    masks = random_masks(weights[:-2] + weights[-1:], 50)      # weights[-2] has no mask
    given = dict(D=dict(masks), F=masks.get).get(mode[-1]) if p < 1 else None
    groups = dict(params=weights[:2], weight_decay=0.1), dict(params=weights[2:], betas=(0.8, 0.99), eps=1e-3)
    optimizer = ChildTuningAdamW(groups, 0.01, correct_bias=correct_bias, mode=mode, reserve_p=p, masks=given)
    states = [(w.tolist(), 0, 0, 0) for w in weights]
    for step in range(10):
        gradients = [numbers(*w.shape, seed=100 * step + i).numpy() for i, w in enumerate(weights)]
        gradients[1] = gradients[1] if step % 3 else None
        gradients[4][gradients[4] > (1.5 if step == 9 else 9)] = math.nan
        masks |= random_masks(list(masks), 1000 * step) if mode[-1] == "F" else {}
        for w, g in zip(weights, gradients):
            w.grad = None if g is None else torch.tensor(g)
        lr = 0.01 * (1 - step / 40)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for i, (w, g) in enumerate(zip(weights, gradients)):
            if g is not None:
                np.testing.assert_array_equal(w.grad, g)       # step() does not change .grad
                if given and w in masks:
                    g = np.where(masks[w].numpy(), g / p if mode[-1] == "F" else g, 0.0)
                beta1, beta2, eps, decay = (0.9, 0.999, 1e-6, 0.1) if i < 2 else (0.8, 0.99, 1e-3, 0.0)
                x, m, v, t = states[i]
                m, v, t = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g, t + 1
                a = lr * math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t) if correct_bias else lr
                x = x - a * m / (np.sqrt(v) + eps)
                states[i] = x - lr * decay * x, m, v, t
    for w, (x, *_) in zip(weights, states):
        np.testing.assert_allclose(w.detach(), x, rtol=1e-12, atol=1e-13)


def test_masks_of_a_seed_stay_the_same():
    """docs/results.md has scores of runs with these masks. An odd number of weights uses half of the last
    random number. The default seed is 0 on all ranks, and PyTorch's default generator is not used."""
    mask = sample_mask(torch.zeros(3, 5), 0.3, torch.Generator().manual_seed(42))
    assert mask.int().tolist() == [[1, 0, 0, 0, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    w, masks, untouched = torch.nn.Parameter(torch.zeros(99, 401)), [], torch.get_rng_state()
    optimizer = ChildTuningAdamW([w], betas=(0, 0.999), mode="F", reserve_p=0.3)
    for _ in range(2):
        w.grad = torch.ones_like(w)
        optimizer.step()
        masks.append(optimizer.state[w]["exp_avg"] > 0)        # each step has its own mask
    first = sample_mask(w, 0.3, torch.Generator().manual_seed(0))
    assert torch.equal(masks[0], first) and torch.equal(torch.get_rng_state(), untouched)
    assert (masks[0] & masks[1]).double().mean().item() == pytest.approx(0.09, abs=0.01)


# ── Fisher information ──


@pytest.mark.parametrize("clip", [None, 2.0])
def test_fisher_information(clip, capsys):
    """Each tensor's gradient is clipped separately. A batch with a non-finite gradient is skipped. The masks
    select the largest values of all tensors together. For p = 0.9 the threshold is 0: all are selected."""
    names = "unused", "frozen", "layer_W", "layer_b"
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(numbers(2, 3)) for name in names})
    model["frozen"].requires_grad_(False)
    batches = [dict(layer_W=numbers(2, 3, seed=i), layer_b=numbers(2, 3, seed=i + 13)) for i in range(13)]
    wanted = {name: torch.zeros(2, 3, dtype=torch.float64) for name in model}
    for name, gradient in (pair for batch in batches for pair in batch.items()):
        shrunk = min(1, (clip or math.inf) / (gradient.square().sum().sqrt() + 1e-6))
        wanted[name] += (shrunk * gradient) ** 2 / 13
    bad = {name: gradient * math.inf for name, gradient in batches[0].items()}
    fisher = fisher_information(model, iter([batches[0], bad, *batches[1:]]), loss, clip)
    assert "1 of 14 batches" in capsys.readouterr().out and model["layer_b"].grad is None
    torch.testing.assert_close(fisher, wanted, rtol=1e-12, atol=0)
    for p, part in ((0.1, "layer"), (0.5, "_b"), (0.3, ""), (0.9, "")):
        masks, threshold = fisher_mask(model, batches, loss, p, clip, part)
        values = {name: F for name, F in wanted.items() if part in name}
        quantile = torch.cat(list(values.values())).quantile(1 - p).item()
        assert threshold == pytest.approx(quantile, rel=1e-12) and (p < 0.9 or threshold == 0)
        assert equal(masks, {name: F >= quantile * (1 - 1e-9) for name, F in values.items()})


# ── whole runs ──


def small_command(folder, rows=36):
    """Copy the first rows of topics.tsv to a file, and return flags that train on it: by default 36 rows."""
    (folder / "topics.tsv").write_bytes(
        b"".join((DATA / "topics.tsv").read_bytes().splitlines(True)[: rows + 1]))
    return ["--model", "scratch", "--batch-size", 8, "--data", folder / "topics.tsv", "--fisher-samples", 12]


@pytest.mark.parametrize("form, flags, masked, seen", [
    ("paper", [], "bert.", ([1] * 20, False, None)), ("code", [], "layer", ([16, 4], True, 1.0))])
def test_child_network(form, flags, masked, seen, tmp_path, monkeypatch):
    """In mode D without weight decay, at most 30 % of the masked weights change: the child network. Tensors
    without a mask change, too.

    masked  the text that the names of all masked weights contain
    seen    (batch sizes, whether dropout is on, clipping norm) for the Fisher information of this --form
    """
    before = {}

    def find(model, batches, loss, p, clip, name_filter):      # check the arguments, call fisher_mask
        before.update({name: w.detach().clone() for name, w in model.named_parameters()})
        assert ([len(batch) for batch in batches], model.training, clip, name_filter) == (*seen, masked)
        return fisher_mask(model, batches, loss, p, clip, name_filter)

    monkeypatch.setattr(childtuning, "fisher_mask", find)
    given = [*small_command(tmp_path, 20), "--fisher-samples", 20, "--batch-size", 20, "--mode", "D"]
    result = run("childtuning", tmp_path / "out", *given, "--steps", 8, "--lr", 1e-2, "--weight-decay", 0,
                 "--form", form, *flags)
    moved = {name: w != before[name] for name, w in result.model.named_parameters()}
    inside = torch.cat([x.flatten() for name, x in moved.items() if masked in name]).double()
    outside = [name for name in moved if masked not in name and "position" not in name]
    assert 0.15 < inside.mean() <= 0.301                       # embeddings of unused words do not move
    assert outside and all(moved[name].any() for name in outside)


def test_fisher_pass_and_resume(tmp_path, monkeypatch):
    """Computing the Fisher information with dropout does not change later random numbers: in the first step,
    modes D and F have the same loss. A resumed run does not compute the Fisher information again."""
    flags = [*small_command(tmp_path), "--form", "code", "--warmup-ratio", 0.5, "--steps", 4, "--mode"]
    both = [run("childtuning", tmp_path / mode, *flags, mode).losses for mode in ("D", "F")]
    assert both[0][0] == both[1][0]
    find_child = Mock(wraps=childtuning.find_child)
    monkeypatch.setattr(childtuning, "find_child", find_child)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(childtuning, "all_reduce_gradients", Mock(side_effect=[None, None, KeyboardInterrupt]))
        run("childtuning", tmp_path / "parts", *flags, "D", "--eval-every", 2)
    assert len(metrics(tmp_path / "parts")) == 2 and find_child.call_count == 1
    resumed = run("childtuning", tmp_path / "parts", *flags, "D", "--eval-every", 2, "--resume")
    assert resumed.losses == both[0] and find_child.call_count == 1


def test_nan_gradients_are_skipped(tmp_path, monkeypatch):
    """The run skips and counts steps with NaN gradients, and logs the loss of the step before instead of NaN.
    The optimizer counts only the other steps."""
    factors, compute_loss = iter([math.nan, 1, math.nan, 1]), childtuning.compute_loss

    def spoil(*given):
        loss = compute_loss(*given)[0] * next(factors)
        return loss, {"loss": loss.detach()}

    monkeypatch.setattr(childtuning, "compute_loss", spoil)
    result = run("childtuning", tmp_path / "out", *small_command(tmp_path), "--steps", 4, "--mode", "none")
    assert [step["skipped"] for step in result.steps] == [1, 1, 2, 2]
    assert math.isnan(result.losses[0]) and result.losses[1] == result.losses[2] > 0
    assert {int(state["step"]) for state in result.state["optimizer"]["state"].values()} == {2}
