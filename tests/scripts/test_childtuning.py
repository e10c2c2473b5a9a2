"""Child-Tuning: its optimizer, Fisher information and R-Drop against independent float64 code; small runs."""
import contextlib
import functools
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import pipeline

import childtuning
from childtuning import ChildTuningAdamW, fisher_information, fisher_mask, rdrop_loss, warmup_steps
from kernels.training.extras import classifier_losses, masked_adamw
from running import DATA, equal, forks, free_port, metrics, refuse, run, start

tune = functools.partial(run, "childtuning")
loss = lambda model, batch: sum((model[name] * x).sum() for name, x in batch.items())  # a batch is its slope


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_masks(weights, seed):
    return {w: draw(*w.shape, seed=seed + i) < -0.3 for i, w in enumerate(weights)}


@pytest.mark.parametrize("correct_bias, as_on_a_gpu", [(True, False), (False, True)])
@pytest.mark.parametrize("mode, p", [("none", 0.3), ("D", 0.3), ("F", 0.3), ("F", 0.9), (None, 1), ("D", 1),
                                     ("ChildTuning-F", 1)])
def test_thirty_steps_follow_the_released_rule(mode, p, correct_bias, as_on_a_gpu, monkeypatch):
    """In blocks and, as on a GPU, in one go. Two groups, a falling rate, a weight without gradient in every
    third step; in the last one some NaN, of which those under a mask count as 0. p 1 draws nothing."""
    monkeypatch.setattr(masked_adamw, "BLOCK", 16)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", as_on_a_gpu, raising=False)
    weights = [torch.nn.Parameter(draw(*shape)) for shape in ((5, 7), (5,), (), (1, 3), (17, 11))]
    weights[0] = torch.nn.Parameter(weights[0].detach().T)     # columns are contiguous, rows are not
    masks = random_masks(weights[:-2] + weights[-1:], 50)      # the one before the last has none
    given = dict(D=dict(masks), F=masks.get).get(mode) if p < 1 else None
    groups = dict(params=weights[:2], weight_decay=0.1), dict(params=weights[2:], betas=(0.8, 0.99), eps=1e-3)
    optimizer = ChildTuningAdamW(groups, 0.01, correct_bias=correct_bias, mode=mode, reserve_p=p, masks=given)
    states, fresh = [(w.tolist(), 0, 0, 0) for w in weights], optimizer.generator.get_state()
    for step in range(30):
        gradients = [draw(*w.shape, seed=100 * step + i).numpy() for i, w in enumerate(weights)]
        gradients[1] = gradients[1] if step % 3 else None
        gradients[4][gradients[4] > (1.5 if step == 29 else 9)] = math.nan
        masks |= random_masks(list(masks), 1000 * step) if mode == "F" else {}
        for w, g in zip(weights, gradients):
            w.grad = None if g is None else torch.tensor(g)
        for group in optimizer.param_groups:
            group["lr"] = lr = 0.01 * (1 - step / 40)
        optimizer.step()
        for i, (w, g) in enumerate(zip(weights, gradients)):
            if g is not None:
                np.testing.assert_array_equal(w.grad, g)       # a second step masks it anew
                if given and w in masks:
                    g = np.where(masks[w].numpy(), g / p if mode == "F" else g, 0.0)
                beta1, beta2, eps, decay = (0.9, 0.999, 1e-6, 0.1) if i < 2 else (0.8, 0.99, 1e-3, 0.0)
                x, m, v, t = states[i]
                m, v, t = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g, t + 1
                a = lr * math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t) if correct_bias else lr
                x = x - a * m / (np.sqrt(v) + eps)
                states[i] = x - lr * decay * x, m, v, t
    for w, wanted in zip(weights, states):
        for x, y in zip((w.detach(), *map(optimizer.state[w].get, ("exp_avg", "exp_avg_sq"))), wanted):
            np.testing.assert_allclose(x.numpy(), y, rtol=1e-12, atol=1e-13)
    assert equal(optimizer.generator.get_state(), fresh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.3, 0.75, 0.999])
def test_draws(p, dtype):
    """Seen in the first moment, (1 − β1) g M / p: the share p, independent of place and step, 1 / p in the
    weights' own type; a draw leaves PyTorch's own generator alone. Ranks draw alike."""
    w, masks, untouched = torch.nn.Parameter(torch.zeros(999, 401, dtype=dtype)), [], torch.get_rng_state()
    w.grad = torch.full_like(w, 0.5)
    whole = (torch.full((), 0.5, dtype=dtype) * (1 / p)).mul(0.5).item()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed) if seed else None
        optimizer = ChildTuningAdamW([w], betas=(0.5, 0.999), mode="F", reserve_p=p, generator=generator)
        assert optimizer.generator.initial_seed() == seed
        optimizer.step()
        masks.append((optimizer.state[w]["exp_avg"] > 0).double())
        assert optimizer.state[w]["exp_avg"].unique().tolist() == [0.0, whole]
    shares = [mask.mean().item() for mask in masks]
    assert shares == pytest.approx([p] * 3, abs=5 * math.sqrt(p * (1 - p) / 4e5)) and len(set(shares)) == 3
    for both in (masks[0] * masks[1], masks[0][:, 1:] * masks[0][:, :-1]):
        assert both.mean().item() == pytest.approx(p * p, abs=0.005)
    assert torch.equal(torch.get_rng_state(), untouched)


def steps(count, weights, optimizer, take):
    """The weights after so many with a rate, a tensor, that falls."""
    def closure():
        assert torch.is_grad_enabled()
        for i, w in enumerate(weights):
            w.grad = draw(*w.shape, seed=31 * step + i)
        return step

    for step in range(count):
        optimizer.param_groups[0]["lr"].fill_(0.01 / (step + 1))
        assert take(closure) == step
    return [w.detach().clone() for w in weights]


@pytest.mark.parametrize("mode", ["none", "D", "F"])
def test_compiled_steps_and_the_file_of_a_state(mode, tmp_path):
    """New steps are not compiled anew; a file continues to the bit, where no mode or masks were given."""
    torch._dynamo.reset()
    optimizers, frames = [], Mock(side_effect=lambda graph, _: graph)
    for _ in range(2):
        weights = [torch.nn.Parameter(draw(*shape)) for shape in ((6, 5), (5,), ())]
        masks = random_masks(weights[:2], 9) if mode == "D" else None
        options = dict(lr=torch.zeros((), dtype=torch.float64), weight_decay=0.1, reserve_p=0.4)
        optimizers.append(ChildTuningAdamW(weights, mode=mode, masks=masks, **options))
    eager, other = optimizers
    step = torch.compile(other.step, backend=frames, fullgraph=mode != "F")
    compiled = steps(8, weights, other, lambda closure: (closure(), step())[0])
    assert 1 <= frames.call_count <= (2 if mode != "F" else 6)  # the first step makes the state
    torch.testing.assert_close(compiled, steps(8, eager.weights(), eager, eager.step), rtol=1e-12, atol=1e-12)
    torch.save(eager.state_dict(), tmp_path / "state.pt")
    copies = [torch.nn.Parameter(w.detach().clone()) for w in eager.weights()]
    other = ChildTuningAdamW(copies)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert equal(steps(3, copies, other, other.step), steps(3, eager.weights(), eager, eager.step))
    assert equal(other.state_dict(), eager.state_dict())


def model_and_batches(n=13):
    weights = {name: torch.nn.Parameter(draw(2, 3)) for name in ("unused", "frozen", "layer_W", "layer_b")}
    weights["frozen"].requires_grad_(False)
    batches = [dict(layer_W=draw(2, 3, seed=i), layer_b=draw(2, 3, seed=i + n)) for i in range(n)]
    return torch.nn.ParameterDict(weights), batches


@pytest.mark.parametrize("clip", [None, 2.0])
def test_fisher_information(clip, capsys):
    """Each tensor is clipped alone; a batch without a finite gradient is left out."""
    model, batches = model_and_batches()
    wanted = {name: torch.zeros(2, 3, dtype=torch.float64) for name in model}
    for name, gradient in (pair for batch in batches for pair in batch.items()):
        shrunk = min(1, (clip or math.inf) / (gradient.square().sum().sqrt() + 1e-6))
        wanted[name] += (shrunk * gradient) ** 2 / 13
    model["layer_W"].grad = torch.ones(2, 3, dtype=torch.float64)
    bad = {name: gradient * math.inf for name, gradient in batches[0].items()}
    fisher = fisher_information(model, iter([batches[0], bad, *batches[1:]]), loss, clip)
    assert "1 of 14 batches" in capsys.readouterr().out and model.training
    torch.testing.assert_close(fisher, wanted, rtol=1e-12, atol=0)
    assert model["layer_W"].grad.eq(1).all() and model["layer_b"].grad is None
    for p, names in ((0.1, "layer"), (0.5, lambda name: name[0] == "l"), (0.3, None), (0.9, None)):
        masks, threshold = fisher_mask(model, batches, loss, p, clip, names)
        values = {name: F for name, F in wanted.items() if not names or "layer" in name}
        quantile = torch.cat(list(values.values())).quantile(1 - p).item()     # of p 0.9 it is 0
        assert threshold == pytest.approx(quantile, rel=1e-12)
        assert equal(masks, {name: F >= quantile * (1 - 1e-9) for name, F in values.items()})


def test_threshold_past_sixteen_million():
    """torch.quantile ends there. F is (i / n)² for i in a random order; 30 % of 17 million are kept."""
    gradient = torch.randperm(17_000_000, generator=torch.Generator().manual_seed(0)) / 17e6
    model = torch.nn.ParameterDict(dict(w=torch.zeros_like(gradient)))
    masks, threshold = fisher_mask(model, [dict(w=gradient)], loss, 0.3)
    assert threshold == pytest.approx(0.49, abs=1e-6) and equal(masks["w"], gradient.square() >= threshold)


def test_arguments_are_refused():
    """By name; masks of other keys, types and shapes too."""
    w, three, (model, batches) = torch.nn.Parameter(torch.zeros(3)), torch.ones(3), model_and_batches()
    for options in (dict(lr=-1), dict(betas=(0.9, 1.0)), dict(eps=-1), dict(weight_decay=-1), dict(mode="E"),
                    dict(reserve_p=0.0), dict(reserve_p=1.5), dict(masks={"w": three > 0}),
                    dict(masks={w: three}), dict(masks={w: three[:2] > 0})):
        with pytest.raises(ValueError, match=rf"^{min(options)}\b"):
            ChildTuningAdamW([w], **options)
    for w.grad, said in ((three, "no masks"), (three.to_sparse(), "sparse")):
        with pytest.raises(RuntimeError, match=said):
            ChildTuningAdamW([w], mode="D", reserve_p=0.5).step()
    for options in (dict(z=draw(3, 2)), dict(labels=draw(3)), dict(temperature=0.0)):
        with pytest.raises(ValueError, match=rf"^{min(options)}\b.*wanted"):
            childtuning.supcon_loss(**dict(z=draw(3, 1, 2), labels=torch.arange(3)) | options)
    for options in (dict(reserve_p=0.0), dict(reserve_p=1.1), dict(batches=[]), dict(name_filter="h.0"),
                    dict(name_filter="frozen"), dict(batches=[dict(layer_W=draw(2, 3) * math.nan)])):
        with pytest.raises(ValueError, match=rf"^{min(options)}\b"):
            fisher_mask(**dict(model=model, batches=batches, loss=loss, reserve_p=0.5) | options)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("classes", [1, 2, 4])
def test_rdrop(form, classes, monkeypatch):
    """Values, and gradients of both passes, of a batch and of the parts that two processes have of it."""
    leaves = a, b = [draw(6, classes, seed=i).requires_grad_() for i in (1, 2)]
    labels, (p, q) = torch.arange(6) % classes, (x.exp() / x.exp().sum(1, keepdim=True) for x in leaves)
    task, apart = -(p * q)[range(6), labels].log().mean(), (p * (p / q).log() + q * (q / p).log()) / 2
    if classes == 1:
        labels, apart = draw(6, seed=5), (a - b) ** 2
        task = ((a[:, 0] - labels) ** 2 + (b[:, 0] - labels) ** 2).mean()
    wanted = task + 0.7 * apart.sum() / 6 if form == "paper" else task / 2 + 0.7 * apart.sum()
    monkeypatch.setattr(classifier_losses, "classify", Mock(side_effect=[a[:4], b[:4], a[4:], b[4:]]))
    args = Mock(rdrop=0.7, supcon=0, form=form)
    parts = [childtuning.compute_loss(None, (None, labels[rows]), 6, args)[0]
             for rows in (slice(4), slice(4, 6))]
    results = [(value, *torch.autograd.grad(value, leaves, retain_graph=True))
               for value in (rdrop_loss(a, b, labels, 0.7, form), sum(parts), wanted)]
    torch.testing.assert_close(results[:2], results[2:] * 2, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("labels", [[0, 5, 0, 0, 5, 7], [0, 1, 2, 3, 4, 5], [3, 3, 3, 3, 3, 3]])
def test_supcon(views, labels, monkeypatch):
    """Value and gradients are those of the sums written out, over the views that have a positive alone; the
    task's loss is mixed in, of two passes R-Drop's."""
    z, labels = draw(6, views, 5).requires_grad_(), torch.tensor(labels)
    rows = (z / z.square().sum(2, keepdim=True).sqrt()).flatten(0, 1)
    kinds, losses = labels.repeat_interleave(views).tolist(), []
    for i, u in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        total = sum((u @ rows[j] / 0.2).exp() for j in others)
        near = [j for j in others if kinds[j] == kinds[i]]
        if near:
            losses.append(-sum(((u @ rows[j] / 0.2).exp() / total).log() for j in near) / len(near))
    wanted = sum(losses, 0 * z.sum()) / max(1, len(losses))
    logits = [draw(6, 8, seed=i).requires_grad_() for i in range(views)]
    passes = [(logits[i], z[:, i]) for i in range(views)]
    monkeypatch.setattr(classifier_losses, "classify_vectors", Mock(side_effect=passes))
    args = Mock(rdrop=None if views == 1 else 0.7, supcon=0.4, temperature=0.2, form="paper")
    mixed = childtuning.compute_loss(None, (None, labels), 6, args)[0]
    task = rdrop_loss(*logits, labels, 0.7) if views == 2 else childtuning.task_loss(*logits, labels)
    alone, mix = childtuning.supcon_loss(z, labels, 0.2), 0.6 * task + 0.4 * wanted
    for value, same in ((alone, wanted), (mixed, mix)):
        gradients = (torch.autograd.grad(x, z, retain_graph=True) for x in (value, same))
        torch.testing.assert_close((value, *next(gradients)), (same, *next(gradients)), rtol=1e-9, atol=1e-12)


def topics(folder, rows=36):
    """The first command of the docstring with the first rows of its files: four batches of 8, one of 4."""
    for name in ("topics.tsv", "topics_dev.tsv"):
        (folder / name).write_bytes(b"".join((DATA / name).read_bytes().splitlines(True)[: rows + 1]))
    files = ["--data", folder / "topics.tsv", "--dev", folder / "topics_dev.tsv"]
    return ["--model", "scratch", "--batch-size", 8, *files]


@pytest.mark.parametrize("form, mode, given, wanted", [
    ("paper", "F", None, 3), ("code", "none", None, 3), ("code", "F", None, 0), ("code", "D", None, 0),
    ("code", "D", 0.2, 5), ("paper", "none", 0.0, 0)])
def test_released_modes_have_no_warm_up(form, mode, given, wanted):
    """A tenth of 25 steps, rounded up."""
    assert warmup_steps(SimpleNamespace(form=form, mode=mode, warmup_share=given), 25) == wanted


def sweep(out, *flags):
    """Several trials: lines that are said, and of each folder steps, weights and state."""
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        childtuning.main([*map(str, flags), "--out", str(out), "--keep-state", "always"])
    found = SimpleNamespace(lines=lines.getvalue().splitlines(), trials={})
    found.said = dict(line.split(None, 1) for line in found.lines)
    for folder in (path.parent for path in sorted(out.glob("*/metrics.jsonl"))):
        steps, weights = metrics(folder), load_file(folder / "model.safetensors")
        state = torch.load(folder / "state.pt", weights_only=True)
        found.trials[folder.name] = SimpleNamespace(steps=steps, weights=weights, state=state,
                                                    losses=[step["loss"] for step in steps])
    return found


TRIALS = ["--form", "code", "--fisher-samples", 12, "--steps", 5, "--lr", 0.01, "--warmup-share", 0.1,
          "--eval-every", 3, "--mode", "D", "F", "--seeds", 2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(flags, folder, what it did) of a sweep that was left alone."""
    folder = tmp_path_factory.mktemp("sweep")
    flags = [*TRIALS, *topics(folder)]
    return flags, folder / "whole", sweep(folder / "whole", *flags)


def check_equal(parts, out, whole):
    """A sweep that was interrupted has the bits of the one that was left alone."""
    _, folder, found = whole
    assert parts.trials.keys() == found.trials.keys() and parts.said["D"] == found.said["D"]
    for name, trial in found.trials.items():
        steps = parts.trials[name].steps
        assert [x | {"seconds": 0} for x in steps] == [x | {"seconds": 0} for x in trial.steps]
        assert equal(parts.trials[name].state, trial.state), name
    assert equal(*(load_file(path / "model.safetensors") for path in (out, folder)))


def test_a_trial_is_an_ordinary_run(whole, tmp_path):
    """A trial of several is the run of its mode and seed alone, to the bit, and without evaluation; a Fisher
    pass with dropout changes no draw; the loss of a short batch is a mean."""
    (*flags, _, _), trials = whole[0], whole[2].trials
    more = ["--mode", "F", "--seeds", 1, "--seed", 43, "--eval-every", 9]
    alone = tune(tmp_path / "alone", *flags, *more)
    assert alone.losses == trials["F-43"].losses
    assert not any("dev_accuracy" in step for step in alone.steps)
    assert all(equal(alone.state[part], trials["F-43"].state[part])
               for part in ("model", "optimizer", "random"))
    assert [step["lr"] for step in alone.steps] == pytest.approx([0, 0.01, 7.5e-3, 5e-3, 2.5e-3])
    first = [trials[name].losses[0] for name in ("D-42", "D-43", "F-42", "F-43")]
    assert first[:2] == first[2:] and first[0] != first[1]
    assert all(min(trial.losses) > 1.5 for trial in trials.values())           # ln 8 is 2.1
    for trial in trials.values():
        assert ["dev_accuracy" in step for step in trial.steps] == [False, False, True, False, True]


def test_table_and_best_trial(whole):
    """The table has means, deviations and best; OUT has the first of the best trials, and can be loaded."""
    _, out, found = whole
    scores = {name: trial.steps[-1]["dev_accuracy"] for name, trial in found.trials.items()}
    for mode in "DF":
        mine = [scores[f"{mode}-42"], scores[f"{mode}-43"]]
        table = f"accuracy {np.mean(mine):.2f} ± {statistics.stdev(mine):.2f}, best {max(mine):.2f};"
        assert found.said[mode].startswith(table)
    best = max(scores, key=scores.get)
    assert found.said["done"].startswith(f"accuracy {scores[best]:.2f} of mode {best[0]}, seed {best[2:]}, ")
    assert equal(load_file(out / "model.safetensors"), found.trials[best].weights)
    assert metrics(out) == found.trials[best].steps and not (out / "state.pt").exists()
    assert json.loads((out / "args.json").read_text())["mode"] == ["D", "F"]
    assert f"seed {best[2:]}, accuracy" in (out / "README.md").read_text()
    assert pipeline("text-classification", str(out))("I ran.")[0]["score"] > 0


@pytest.mark.parametrize("stop", [4, 10, 19])
def test_resume_skips_finished_trials(stop, whole, tmp_path, monkeypatch):
    """Others go on from their own state, which has the masks and draws, or begin."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(childtuning, "sum_gradients", Mock(side_effect=[None] * stop + [KeyboardInterrupt]))
        sweep(tmp_path / "out", *whole[0])
    assert (tmp_path / "out" / ".running").exists()
    monkeypatch.setattr(childtuning, "fisher_mask", fisher := Mock(wraps=fisher_mask))
    parts = sweep(tmp_path / "out", *whole[0], "--resume")
    assert fisher.call_count == (stop < 5)                     # the second trial's; the first one's is kept
    assert sum(line.startswith("skipped") for line in parts.lines) == stop // 5
    check_equal(parts, tmp_path / "out", whole)


@pytest.mark.parametrize("trial", ["D-43", "F-42"])
def test_a_killed_sweep_is_resumed(trial, whole, tmp_path):
    """kill -9 in the second trial, or the third."""
    process = start("childtuning", tmp_path / "out", *whole[0], "--keep-state", "always")
    path = tmp_path / "out" / trial / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and path.read_text().count("\n") >= 2):
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    check_equal(sweep(tmp_path / "out", "--resume"), tmp_path / "out", whole)


def test_what_a_sweep_refuses(whole, tmp_path, monkeypatch, capfd):
    """A finished one, other flags, another process at work, foreign files, a damaged trial."""
    flags, out, _ = whole
    monkeypatch.chdir(tmp_path)
    shutil.copytree(out, "out")
    again = [*flags, "--out", "out"]
    refuse("childtuning", capfd, "--out out holds a finished run: name another folder, .*", *again)
    refuse("childtuning", capfd, "--out out holds a finished run: to train .*", *again, "--resume")
    Path("out", ".running").touch()
    refuse("childtuning", capfd, "--out out holds a run that has no checkpoint yet: .*", *again)
    capfd.readouterr()
    for more, wanted in ((["--seeds", 3], "seeds was 2 in out, now it is 3"),
                         (["--mode", "D"], r"mode was \['D', 'F'\] in out, now it is .*")):
        refuse("childtuning", capfd, f"--resume: {wanted}", *again, *more, "--resume")
    lock = "import fcntl, sys, time; f = open('out/.running', 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); "
    with subprocess.Popen([sys.executable, "-c", lock + "print(1, flush=True); time.sleep(99)"],
                          stdout=subprocess.PIPE) as other:
        other.stdout.read(1)
        refuse("childtuning", capfd, "--out out: another process is at work in it; .*", *again, "--resume")
        other.kill()
    shutil.rmtree("out/F-43")
    Path("out/F-43").mkdir()
    Path("out/F-43/mine.txt").touch()
    refuse("childtuning", capfd, "--out out/F-43 holds files but no checkpoint: .*", *again, "--resume")
    shutil.rmtree("out/F-43")
    Path("out/D-42/metrics.jsonl").write_text('{"st')
    with pytest.raises(SystemExit):
        childtuning.main([*map(str, again), "--resume"])
    assert "out/D-42/metrics.jsonl: damaged" in capfd.readouterr().err


@pytest.mark.parametrize("form, flags, masked, seen", [
    ("paper", [], "bert.", ([1] * 20, False, None)), ("code", [], "layer", ([16, 4], True, 1.0)),
    ("paper", ["--mode", "D", "--fisher-batch-size", 3, "--fisher-samples", 7, "--fisher-clip", 0.5,
               "--child", "pooler"], "pooler", ([3, 3, 1], False, 0.5))])
def test_the_child(form, flags, masked, seen, tmp_path, monkeypatch):
    """Paper: from single rows, no dropout, no clipping, the encoder. Code: batches, dropout, clipping to 1,
    layers. Without decay, what lies outside the child keeps its bits; other weights are free. Mode D learns a
    batch that repeats."""
    before = {}

    def find(model, batches, loss, p, clip, name_filter):
        before.update({name: w.detach().clone() for name, w in model.named_parameters()})
        assert ([len(batch) for batch in batches], model.training, clip, name_filter) == (*seen, masked)
        return fisher_mask(model, batches, loss, p, clip, name_filter)

    monkeypatch.setattr(childtuning, "fisher_mask", find)
    flags = ["--steps", 20, "--lr", 1e-2, "--weight-decay", 0, "--form", form, *flags]
    result = tune(tmp_path / "out", *topics(tmp_path, 20), "--batch-size", 20, *flags)
    moved = {name: w != before[name] for name, w in result.model.named_parameters()}
    inside = torch.cat([x.flatten() for name, x in moved.items() if masked in name]).double()
    outside = [name for name in moved if masked not in name and "position" not in name]
    assert 0.15 < inside.mean() <= 0.301                       # dead words stay
    assert outside and all(moved[name].any() for name in outside)
    assert result.losses[-1] < 0.8 * result.losses[0]


@pytest.mark.parametrize("mode", ["none", "F"])
def test_other_modes_learn_a_batch_that_repeats(mode, tmp_path):
    flags = ["--batch-size", 20, "--steps", 20, "--lr", 1e-2, "--mode", mode]
    result = tune(tmp_path / "out", *topics(tmp_path, 20), *flags)
    assert result.losses[-1] < 0.8 * result.losses[0]


def test_nan_gradients_are_skipped_counted_and_said(tmp_path, monkeypatch):
    """A row of metrics repeats the last finite loss; where a trial has none yet, it is NaN. OUT has the best
    trial, here the second one. Each seed has its order."""
    factors, scores = iter([1, 1, math.nan, math.nan, 1, 1]), iter([1.0, 2, 3, 9, 4, 5])
    compute_loss = Mock(wraps=childtuning.compute_loss)
    spoil = lambda model: model.classifier.bias.grad.mul_(next(factors))
    monkeypatch.setattr(childtuning, "sum_gradients", spoil)
    monkeypatch.setattr(childtuning, "compute_loss", compute_loss)
    monkeypatch.setattr(childtuning, "evaluate", lambda *_: {"accuracy": next(scores)})
    flags = ["--steps", 3, "--eval-every", 1, "--mode", "none", "--seeds", 2, "--warmup-share", 0]
    result = sweep(tmp_path / "out", *topics(tmp_path), *flags)
    first, second = result.trials["none-42"], result.trials["none-43"]
    calls = [call.args[1][1].tolist() for call in compute_loss.call_args_list]             # their labels
    assert result.said["note"].startswith("step 1:") and calls[1] != calls[5]  # each is tried out first
    assert first.losses[2] == first.losses[1] and "2 steps skipped" in result.said["done"]
    assert [math.isnan(loss) for loss in first.losses + second.losses] == [False] * 3 + [True] + [False] * 2
    assert [step["skipped"] for step in first.steps + second.steps] == [0, 0, 1, 1, 1, 1]
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), second.weights)
    assert {state["step"].item() for state in second.state["optimizer"]["state"].values()} == {2.0}


def one_of_several(rank, world, port, out, flags):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.cuda.is_available = lambda: False
    torch.set_num_threads(1)
    childtuning.main([*map(str, flags), "--out", str(out), "--keep-state", "always"])


def test_several_processes_equal_one(tmp_path, bert):
    """D's sums over ranks and F's equal draws, of three that have unequal shares, in a sweep."""
    flags = [*topics(tmp_path), "--model", bert, "--mode", "D", "F", "--steps", 3, "--lr", 1e-3]
    flags += ["--rdrop", 0.5, "--form", "code", "--fisher-batch-size", 5, "--supcon", 0.3]
    one, out = sweep(tmp_path / "one", *flags), tmp_path / "three"
    forks()
    torch.multiprocessing.start_processes(one_of_several, (3, free_port(), out, flags), 3,
                                          start_method="forkserver")
    assert (out / "model.safetensors").exists() and not (out / ".running").exists()
    for name, trial in one.trials.items():
        state = torch.load(out / name / "state.pt", weights_only=True)
        assert [step["loss"] for step in metrics(out / name)] == pytest.approx(trial.losses, rel=1e-4)
        assert torch.equal(trial.state["optimizer"]["generator"], state["optimizer"]["generator"])
        for key, weight in state["model"].items():
            if not key.endswith("key.bias"):  # softmax ignores it: Adam makes its gradient's rounding large
                assert (weight - trial.state["model"][key]).abs().gt(1e-4).float().mean() < 0.01, key


GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"


def contrast_set(folder, rows):
    """original.tsv and edited.tsv, its rows in another order; every fourth and every fifth label is wrong."""
    rows = [row.split("\t") for row in rows]
    for name, first, wrong in ("original", 0, 4), ("edited", 7, 5):
        part = [(text, rows[i - 1][1] if i % wrong == 0 else label) for i, (text, label) in enumerate(rows)]
        lines = ["\t".join(row) for row in part[first:] + part[:first]]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return [folder / "original.tsv", folder / "edited.tsv"]


def test_contrast_set(tmp_path, capsys):
    """Both accuracies and consistency are those of the answers of transformers' pipeline, text by text; the
    same again by --evaluate."""
    rows = (DATA / "topics_dev.tsv").read_text().splitlines()[1:41]
    files = contrast_set(tmp_path, rows)
    flags = ["--data", DATA / "topics.tsv", "--contrast-set", *files, "--mode", "none", "--epochs", 8]
    result = tune(tmp_path / "out", *flags, "--model", "scratch")
    ask, right = pipeline("text-classification", str(tmp_path / "out")), []
    for file in files:
        texts = [line.split("\t") for line in file.read_text().splitlines()[1:]]
        right.append([ask(text)[0]["label"] == label for text, label in texts])
    both = [a and b for a, b in zip(*right)]
    original, edited, consistency = (100 * np.mean(part) for part in (*right, both))
    wanted = f"original {original:.2f}, edited {edited:.2f}, consistency {consistency:.2f}"
    wanted = f"{wanted}  {' '.join(map(str, files))}"
    assert 0 < consistency < min(original, edited) and result.said["test"] == wanted
    assert [*result.steps[-1]["contrast"].values()] == [original, edited, consistency]
    childtuning.main(["--evaluate", "--model", str(tmp_path / "out"), "--contrast-set", *map(str, files)])
    assert capsys.readouterr().out.splitlines()[-1] == f"test     {wanted}"


@pytest.mark.parametrize("name, flags", [("tacl", []), ("cline", ["--wordnet", DATA / "wordnet"])])
def test_what_tacl_and_cline_wrote_is_fine_tuned(name, flags, tmp_path):
    """From their weights, to the bit, with a new classifier."""
    texts = (DATA / "sentences.txt").read_text().splitlines()
    lines = [text + "\n" * (i % 8 == 7 and name == "tacl") for i, text in enumerate(texts[:64])]
    (data := tmp_path / "data.txt").write_text("\n".join(lines))
    flags += ["--data", data, "--model", "scratch", "--steps", 1, "--batch-size", 8]
    run(name, tmp_path / "first", *flags)
    tune(tmp_path / "second", "--model", tmp_path / "first", "--data", DATA / "topics.tsv", "--mode", "none",
         "--steps", 1, "--lr", 0)
    first, second = (load_file(tmp_path / part / "model.safetensors") for part in ("first", "second"))
    tuned = {key.removeprefix("bert."): x for key, x in second.items()}
    shared = [key for key in first if key.removeprefix("bert.") in tuned]
    assert len(shared) > 30 and all(first[key].equal(tuned[key.removeprefix("bert.")]) for key in shared)
    assert "classifier.weight" in second


@pytest.mark.parametrize("content, flags, wanted", [
    ("sentence\tlabel\nA\tx\n \ty\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("sentence\tlabel\nA\tx\nB\t\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("sentence\tlabel\nA\tx\nB\tx\n", "", r"a\.tsv: every label is 'x'; wanted at least two"),
    (GOOD, "--dev b.tsv", r"b\.tsv line 2: label 'sleep', wanted one of a\.tsv, which are motion, rest"),
    (GOOD, "--dev c.tsv", r"c\.tsv: columns text, label, more; wanted .* of text \(now sentence\) .*"),
    (GOOD, "--label topic", r"a\.tsv: columns sentence, label; wanted .* \(now topic\); name them by .*"),
    (GOOD, "--text sentence label", r"a\.tsv: columns sentence, label; wanted .*"),
    ("A\tB\tC\tx\nA\tB\tC\ty\n", "", r"a\.tsv: columns column 1, column 2, column 3, column 4; wanted .*"),
    ("A\t1.5\nB\tx\n", "--task regression", r"a\.tsv line 2: label 'x', wanted a number below 1e18"),
    (GOOD, "--batch-size 5", r"a\.tsv: 4 rows, wanted at least --batch-size, which is 5"),
    (GOOD, "--supcon 1.5", r"argument --supcon: 1\.5: wanted a number from 0 to 1"),
    (GOOD, "--supcon nan", r"argument --supcon: nan: wanted a number from 0 to 1"),
    ("A\t1.5\nB\t2\n", "--supcon 0.5", "--supcon and --ood-epochs: this is regression, wanted classes"),
    (GOOD, "--reserve-p 0", r"--reserve-p 0\.0: wanted a share above 0, up to 1"),
    (GOOD, "--reserve-p nan", r"--reserve-p nan: wanted .*"),
    (GOOD, "--metric pearson", r"--metric pearson: this is classification, wanted accuracy, f1, matthews"),
    (GOOD, "--mode none F D --child h.0", r"--child h\.0: in no name of the weights of scratch, .* bert\..*"),
    (GOOD, "--contrast-set a.tsv d.tsv", "--contrast-set a.tsv d.tsv: classification, 4 and 1 rows; .*"),
    (GOOD, "--contrast-set a.tsv b.tsv", r"b\.tsv line 2: label 'sleep', wanted one of a\.tsv, .*"),
    (GOOD, "--max-length 600", r"--max-length 600: scratch reads at most 512 tokens")])
def test_bad_input(tmp_path, monkeypatch, capfd, content, flags, wanted):
    monkeypatch.chdir(tmp_path)
    Path("a.tsv").write_text(content)
    Path("b.tsv").write_text("sentence\tlabel\nA\tsleep\n")
    Path("c.tsv").write_text("text\tlabel\tmore\nA\tmotion\tB\n")
    Path("d.tsv").write_text("sentence\tlabel\nA\tmotion\n")
    refuse("childtuning", capfd, wanted, *f"--data a.tsv --model scratch --batch-size 2 {flags}".split())
