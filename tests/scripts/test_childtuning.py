"""childtuning.py: optimizer, Fisher information, R-Drop and SCL against independent float64 code; small
runs."""
import contextlib
import functools
import io
import json
import math
import os
import shutil
import statistics
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
from childtuning import ChildTuningAdamW, fisher_information, fisher_mask, warmup_steps
from kernels.training.papers import childtuning_adamw as masked_adamw
from running import DATA, equal, fork_context, free_port, metrics, rejects, run, start

tune = functools.partial(run, "childtuning")

def loss(model, batch):
    """Return Σ w·x: its gradient with respect to the weights is the batch."""
    return sum((model[name] * x).sum() for name, x in batch.items())


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_masks(weights, seed):
    return {w: randn(*w.shape, seed=seed + i) < -0.3 for i, w in enumerate(weights)}


@pytest.mark.parametrize("correct_bias, as_on_a_gpu", [(True, False), (False, True)])
@pytest.mark.parametrize("mode, p", [("none", 0.3), ("D", 0.3), ("F", 0.3), ("F", 0.9), (None, 1), ("D", 1),
                                     ("ChildTuning-F", 1)])
def test_steps_follow_the_released_rule(mode, p, correct_bias, as_on_a_gpu, monkeypatch):
    """30 steps equal a numpy version, both in blocks (as on a CPU) and over whole tensors (as on a GPU).

    There are two parameter groups and a falling learning rate. In every third step a weight has no gradient.
    In the last step some gradients are NaN; where the mask is 0 they count as 0. With p = 1 there is no mask.
    """
    monkeypatch.setattr(masked_adamw, "BLOCK", 16)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", as_on_a_gpu, raising=False)
    weights = [torch.nn.Parameter(randn(*shape)) for shape in ((5, 7), (5,), (), (1, 3), (17, 11))]
    weights[0] = torch.nn.Parameter(weights[0].detach().T)     # not contiguous
    masks = random_masks(weights[:-2] + weights[-1:], 50)      # weights[-2] has no mask
    given = dict(D=dict(masks), F=masks.get).get(mode) if p < 1 else None
    groups = dict(params=weights[:2], weight_decay=0.1), dict(params=weights[2:], betas=(0.8, 0.99), eps=1e-3)
    optimizer = ChildTuningAdamW(groups, 0.01, correct_bias=correct_bias, mode=mode, reserve_p=p, masks=given)
    states, fresh = [(w.tolist(), 0, 0, 0) for w in weights], optimizer.generator.get_state()
    for step in range(30):
        gradients = [randn(*w.shape, seed=100 * step + i).numpy() for i, w in enumerate(weights)]
        gradients[1] = gradients[1] if step % 3 else None
        gradients[4][gradients[4] > (1.5 if step == 29 else 9)] = math.nan
        masks |= random_masks(list(masks), 1000 * step) if mode == "F" else {}
        for w, g in zip(weights, gradients):
            w.grad = None if g is None else torch.tensor(g)
        lr = 0.01 * (1 - step / 40)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for i, (w, g) in enumerate(zip(weights, gradients)):
            if g is not None:
                np.testing.assert_array_equal(w.grad, g)       # .grad is not changed
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
def test_sampled_masks(p, dtype):
    """The first moment after a step, (1 − β1) g M / p, shows the sampled masks M.

    Weights are kept with probability p, independently of neighbours and seeds. g / p has the weights' dtype.
    PyTorch's default generator is not used, and the default seed is 0, so that ranks sample the same masks.
    """
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


def take_steps(count, weights, optimizer, take_step):
    """Return the weights after `count` steps with a falling learning rate, which is a tensor."""
    def closure():
        assert torch.is_grad_enabled()
        for i, w in enumerate(weights):
            w.grad = randn(*w.shape, seed=31 * step + i)
        return step

    for step in range(count):
        optimizer.param_groups[0]["lr"].fill_(0.01 / (step + 1))
        assert take_step(closure) == step
    return [w.detach().clone() for w in weights]


@pytest.mark.parametrize("mode", ["none", "D", "F"])
def test_compile_and_saved_state(mode, tmp_path):
    """torch.compile does not recompile for later steps. A saved state_dict continues bit-exactly in an
    optimizer that was made without mode and masks."""
    torch._dynamo.reset()
    optimizers, frames = [], Mock(side_effect=lambda graph, _: graph)
    for _ in range(2):
        weights = [torch.nn.Parameter(randn(*shape)) for shape in ((6, 5), (5,), ())]
        masks = random_masks(weights[:2], 9) if mode == "D" else None
        options = dict(lr=torch.zeros((), dtype=torch.float64), weight_decay=0.1, reserve_p=0.4)
        optimizers.append(ChildTuningAdamW(weights, mode=mode, masks=masks, **options))
    eager, other = optimizers
    step = torch.compile(other.step, backend=frames, fullgraph=mode != "F")
    compiled = take_steps(8, weights, other, lambda closure: (closure(), step())[0])
    assert 1 <= frames.call_count <= (2 if mode != "F" else 6)  # the first step also creates the state
    expected = take_steps(8, eager.weights(), eager, eager.step)
    torch.testing.assert_close(compiled, expected, rtol=1e-12, atol=1e-12)
    torch.save(eager.state_dict(), tmp_path / "state.pt")
    copies = [torch.nn.Parameter(w.detach().clone()) for w in eager.weights()]
    other = ChildTuningAdamW(copies)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert equal(take_steps(3, copies, other, other.step), take_steps(3, eager.weights(), eager, eager.step))
    assert equal(other.state_dict(), eager.state_dict())


def model_and_batches(n=13):
    weights = {name: torch.nn.Parameter(randn(2, 3)) for name in ("unused", "frozen", "layer_W", "layer_b")}
    weights["frozen"].requires_grad_(False)
    batches = [dict(layer_W=randn(2, 3, seed=i), layer_b=randn(2, 3, seed=i + n)) for i in range(n)]
    return torch.nn.ParameterDict(weights), batches


@pytest.mark.parametrize("clip", [None, 2.0])
def test_fisher_information(clip, capsys):
    """Each tensor's gradient is clipped separately. A batch with a non-finite gradient is skipped."""
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
        quantile = torch.cat(list(values.values())).quantile(1 - p).item()     # 0 for p = 0.9
        assert threshold == pytest.approx(quantile, rel=1e-12)
        assert equal(masks, {name: F >= quantile * (1 - 1e-9) for name, F in values.items()})


def test_threshold_of_more_than_16_million_values():
    """torch.quantile accepts at most 16 million values. F is (i / n)² for shuffled i < n = 17 million."""
    gradient = torch.randperm(17_000_000, generator=torch.Generator().manual_seed(0)) / 17e6
    model = torch.nn.ParameterDict(dict(w=torch.zeros_like(gradient)))
    masks, threshold = fisher_mask(model, [dict(w=gradient)], loss, 0.3)
    assert threshold == pytest.approx(0.49, abs=1e-6) and equal(masks["w"], gradient.square() >= threshold)


def test_invalid_arguments_raise():
    """Messages begin with the argument's name. Wrong keys, dtypes and shapes of masks are invalid, too."""
    w, three = torch.nn.Parameter(torch.zeros(3)), torch.ones(3)
    model, batches = model_and_batches()
    for options in (dict(lr=-1), dict(betas=(0.9, 1.0)), dict(eps=-1), dict(weight_decay=-1), dict(mode="E"),
                    dict(reserve_p=0.0), dict(reserve_p=1.5), dict(masks={"w": three > 0}),
                    dict(masks={w: three}), dict(masks={w: three[:2] > 0})):
        with pytest.raises(ValueError, match=rf"^{min(options)}\b"):
            ChildTuningAdamW([w], **options)
    for gradient, message in ((three, "no masks"), (three.to_sparse(), "sparse")):
        w.grad = gradient
        with pytest.raises(RuntimeError, match=message):
            ChildTuningAdamW([w], mode="D", reserve_p=0.5).step()
    for options in (dict(z=randn(3, 2)), dict(labels=randn(3)), dict(temperature=0.0)):
        with pytest.raises(ValueError, match=rf"^{min(options)}\b.*expected"):
            childtuning.supcon_loss(**dict(z=randn(3, 1, 2), labels=torch.arange(3)) | options)
    for options in (dict(reserve_p=0.0), dict(reserve_p=1.1), dict(batches=[]), dict(name_filter="h.0"),
                    dict(name_filter="frozen"), dict(batches=[dict(layer_W=randn(2, 3) * math.nan)])):
        with pytest.raises(ValueError, match=rf"^{min(options)}\b"):
            fisher_mask(**dict(model=model, batches=batches, loss=loss, reserve_p=0.5) | options)


def small_command(folder, rows=36):
    """Return flags of the docstring's first command for the first rows of its files: by default 36 rows, four
    batches of 8 and one of 4."""
    for name in ("topics.tsv", "topics_dev.tsv"):
        (folder / name).write_bytes(b"".join((DATA / name).read_bytes().splitlines(True)[: rows + 1]))
    files = ["--data", folder / "topics.tsv", "--dev", folder / "topics_dev.tsv"]
    return ["--model", "scratch", "--batch-size", 8, *files]


@pytest.mark.parametrize("form, mode, given, wanted", [
    ("paper", "F", None, 3), ("code", "none", None, 3), ("code", "F", None, 0), ("code", "D", None, 0),
    ("code", "D", 0.2, 5), ("paper", "none", 0.0, 0)])
def test_warmup_steps(form, mode, given, wanted):
    """The default is a tenth of the 25 steps, rounded up, but 0 in modes F and D of the released code."""
    assert warmup_steps(SimpleNamespace(form=form, mode=mode, warmup_ratio=given), 25) == wanted


def run_sweep(out, *flags):
    """Run several trials. Return the printed lines, and the steps, weights and state of each trial's
    folder."""
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


TRIALS = ["--form", "code", "--fisher-samples", 12, "--steps", 5, "--lr", 0.01, "--warmup-ratio", 0.1,
          "--eval-every", 3, "--mode", "D", "F", "--num-seeds", 2]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return (flags, folder, result of run_sweep) of a sweep that was not interrupted."""
    folder = tmp_path_factory.mktemp("sweep")
    flags = [*TRIALS, *small_command(folder)]
    return flags, folder / "whole", run_sweep(folder / "whole", *flags)


def check_same_sweep(resumed, out, uninterrupted):
    """Check that a resumed sweep equals the uninterrupted one bit by bit."""
    _, folder, expected = uninterrupted
    assert resumed.trials.keys() == expected.trials.keys() and resumed.said["D"] == expected.said["D"]
    for name, trial in expected.trials.items():
        steps = resumed.trials[name].steps
        assert [x | {"seconds": 0} for x in steps] == [x | {"seconds": 0} for x in trial.steps]
        assert equal(resumed.trials[name].state, trial.state), name
    assert equal(*(load_file(path / "model.safetensors") for path in (out, folder)))


def test_a_trial_is_an_ordinary_run(uninterrupted, tmp_path):
    """A trial of a sweep equals a single run with its mode and seed bit by bit, even a run without --dev.

    A Fisher pass with dropout does not change later random numbers. The loss of a short batch is its mean.
    """
    flags, _, found = uninterrupted
    flags, trials = flags[:-2], found.trials                   # without --dev
    more = ["--mode", "F", "--num-seeds", 1, "--seed", 43, "--eval-every", 9]
    alone = tune(tmp_path / "alone", *flags, *more)
    assert alone.losses == trials["F-43"].losses
    assert not any("dev_accuracy" in step for step in alone.steps)
    assert all(equal(alone.state[part], trials["F-43"].state[part])
               for part in ("model", "optimizer", "random"))
    assert [step["lr"] for step in alone.steps] == pytest.approx([0, 0.01, 7.5e-3, 5e-3, 2.5e-3])
    first = [trials[name].losses[0] for name in ("D-42", "D-43", "F-42", "F-43")]
    assert first[:2] == first[2:] and first[0] != first[1]
    assert all(min(trial.losses) > 1.5 for trial in trials.values())           # untrained: ln 8 = 2.1
    for trial in trials.values():
        assert ["dev_accuracy" in step for step in trial.steps] == [False, False, True, False, True]


def test_table_and_best_trial(uninterrupted):
    """The table shows mean, standard deviation and best score. OUT has the files of the first best trial, and
    transformers loads it."""
    _, out, found = uninterrupted
    scores = {name: trial.steps[-1]["dev_accuracy"] for name, trial in found.trials.items()}
    for mode in "DF":
        pair = [scores[f"{mode}-42"], scores[f"{mode}-43"]]
        table = f"accuracy {np.mean(pair):.2f} ± {statistics.stdev(pair):.2f}, best {max(pair):.2f};"
        assert found.said[mode].startswith(table)
    best = max(scores, key=scores.get)
    assert found.said["done"].startswith(f"accuracy {scores[best]:.2f} of mode {best[0]}, seed {best[2:]}, ")
    assert equal(load_file(out / "model.safetensors"), found.trials[best].weights)
    assert metrics(out) == found.trials[best].steps and not (out / "state.pt").exists()
    assert json.loads((out / "args.json").read_text())["mode"] == ["D", "F"]
    assert f"seed {best[2:]}, accuracy" in (out / "README.md").read_text()
    assert pipeline("text-classification", str(out))("I ran.")[0]["score"] > 0


@pytest.mark.parametrize("stop", [4, 10, 19])
def test_resume_skips_finished_trials(stop, uninterrupted, tmp_path, monkeypatch):
    """The interrupted trial continues from its state, which contains masks and generator. Later trials run
    from the start."""
    interrupt = Mock(side_effect=[None] * stop + [KeyboardInterrupt])
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(childtuning, "all_reduce_gradients", interrupt)
        run_sweep(tmp_path / "out", *uninterrupted[0])
    assert (tmp_path / "out" / ".running").exists()
    fisher = Mock(wraps=fisher_mask)
    monkeypatch.setattr(childtuning, "fisher_mask", fisher)
    resumed = run_sweep(tmp_path / "out", *uninterrupted[0], "--resume")
    assert fisher.call_count == (1 if stop < 5 else 0)  # the first trial has its mask in state.pt
    skipped = [line for line in resumed.lines if line.startswith("skipped")]
    assert len(skipped) == stop // 5
    check_same_sweep(resumed, tmp_path / "out", uninterrupted)


@pytest.mark.parametrize("trial", ["D-43", "F-42"])
def test_resume_after_kill(trial, uninterrupted, tmp_path):
    """The sweep is killed (SIGKILL) in the second or third trial."""
    process = start("childtuning", tmp_path / "out", *uninterrupted[0], "--keep-state", "always")
    path = tmp_path / "out" / trial / "metrics.jsonl"
    while process.is_alive() and not (path.exists() and path.read_text().count("\n") >= 2):
        time.sleep(0.005)
    process.kill()
    process.join()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    check_same_sweep(run_sweep(tmp_path / "out", "--resume"), tmp_path / "out", uninterrupted)


def test_a_sweep_rejects_unusable_folders(uninterrupted, tmp_path, monkeypatch, capfd):
    """Cases: a finished sweep, changed flags, foreign files, a damaged trial."""
    flags, out, _ = uninterrupted
    monkeypatch.chdir(tmp_path)
    shutil.copytree(out, "out")
    again = [*flags, "--out", "out"]
    rejects("childtuning", capfd, "--out out contains a finished run; choose another folder, .*", *again)
    rejects("childtuning", capfd, "--out out contains a finished run; to train .*", *again, "--resume")
    Path("out", ".running").touch()
    rejects("childtuning", capfd, "--out out contains a run without a checkpoint; .*", *again)
    capfd.readouterr()
    for more, wanted in ((["--num-seeds", 3], "num_seeds was 2 in out, now it is 3"),
                         (["--mode", "D"], r"mode was \['D', 'F'\] in out, now it is .*")):
        rejects("childtuning", capfd, f"--resume: {wanted}", *again, *more, "--resume")
    shutil.rmtree("out/F-43")
    Path("out/F-43").mkdir()
    Path("out/F-43/mine.txt").touch()
    rejects("childtuning", capfd, "--out out/F-43 contains files but no checkpoint; .*", *again, "--resume")
    shutil.rmtree("out/F-43")
    Path("out/D-42/metrics.jsonl").write_text('{"st')
    with pytest.raises(SystemExit):
        childtuning.main([*map(str, again), "--resume"])
    assert "out/D-42/metrics.jsonl: damaged" in capfd.readouterr().err


@pytest.mark.parametrize("form, flags, masked, seen", [
    ("paper", [], "bert.", ([1] * 20, False, None)), ("code", [], "layer", ([16, 4], True, 1.0)),
    ("paper", ["--mode", "D", "--fisher-batch-size", 3, "--fisher-samples", 7, "--fisher-clip", 0.5,
               "--child-filter", "pooler"], "pooler", ([3, 3, 1], False, 0.5))])
def test_child_network(form, flags, masked, seen, tmp_path, monkeypatch):
    """Mode D masks the right weights, and learns a repeated batch.

    masked  the text that the names of all masked weights contain
    seen    (batch sizes, dropout, clipping norm) of the Fisher pass; the defaults of paper and code differ
    Without weight decay, at most 30 % of these weights change (the child network); other tensors change.
    """
    before = {}

    def find(model, batches, loss, p, clip, name_filter):      # checks its arguments, calls fisher_mask
        before.update({name: w.detach().clone() for name, w in model.named_parameters()})
        assert ([len(batch) for batch in batches], model.training, clip, name_filter) == (*seen, masked)
        return fisher_mask(model, batches, loss, p, clip, name_filter)

    monkeypatch.setattr(childtuning, "fisher_mask", find)
    flags = ["--steps", 20, "--lr", 1e-2, "--weight-decay", 0, "--form", form, *flags]
    result = tune(tmp_path / "out", *small_command(tmp_path, 20), "--batch-size", 20, *flags)
    moved = {name: w != before[name] for name, w in result.model.named_parameters()}
    inside = torch.cat([x.flatten() for name, x in moved.items() if masked in name]).double()
    outside = [name for name in moved if masked not in name and "position" not in name]
    assert 0.15 < inside.mean() <= 0.301                       # embeddings of unused words do not move
    assert outside and all(moved[name].any() for name in outside)
    assert result.losses[-1] < 0.8 * result.losses[0]


@pytest.mark.parametrize("mode", ["none", "F"])
def test_other_modes_learn_a_repeated_batch(mode, tmp_path):
    flags = ["--batch-size", 20, "--steps", 20, "--lr", 1e-2, "--mode", mode]
    result = tune(tmp_path / "out", *small_command(tmp_path, 20), *flags)
    assert result.losses[-1] < 0.8 * result.losses[0]


def test_nan_gradients_are_skipped(tmp_path, monkeypatch):
    """Steps with NaN gradients are skipped, counted and reported. Their metrics repeat the last finite loss,
    or have NaN if there is none. OUT gets the best trial, here the second one. Each seed has its own order of
    rows."""
    factors = iter([1, 1, math.nan, math.nan, 1, 1])
    scores = iter([1.0, 2, 3, 9, 4, 5])
    compute_loss = Mock(wraps=childtuning.compute_loss)

    def spoil_gradient(model):
        model.classifier.bias.grad.mul_(next(factors))
    monkeypatch.setattr(childtuning, "all_reduce_gradients", spoil_gradient)
    monkeypatch.setattr(childtuning, "compute_loss", compute_loss)
    monkeypatch.setattr(childtuning, "evaluate", lambda *_: {"accuracy": next(scores)})
    flags = ["--steps", 3, "--eval-every", 1, "--mode", "none", "--num-seeds", 2, "--warmup-ratio", 0]
    result = run_sweep(tmp_path / "out", *small_command(tmp_path), *flags)
    first, second = result.trials["none-42"], result.trials["none-43"]
    calls = [call.args[1][1].tolist() for call in compute_loss.call_args_list]             # their labels
    assert result.said["note"].startswith("step 1:") and calls[1] != calls[5]  # calls 0 and 4: smoke tests
    assert first.losses[2] == first.losses[1] and "2 steps skipped" in result.said["done"]
    assert [math.isnan(loss) for loss in first.losses + second.losses] == [False] * 3 + [True] + [False] * 2
    assert [step["skipped"] for step in first.steps + second.steps] == [0, 0, 1, 1, 1, 1]
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), second.weights)
    assert {state["step"].item() for state in second.state["optimizer"]["state"].values()} == {2.0}


def run_rank(rank, world, port, out, flags):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.cuda.is_available = lambda: False
    torch.set_num_threads(1)
    childtuning.main([*map(str, flags), "--out", str(out), "--keep-state", "always"])


def test_several_processes_equal_one(tmp_path, bert):
    """Mode D sums Fisher information over three ranks with unequal numbers of rows, and mode F samples the
    same masks on each of them."""
    flags = [*small_command(tmp_path), "--model", bert, "--mode", "D", "F", "--steps", 3, "--lr", 1e-3]
    flags += ["--rdrop-weight", 0.5, "--form", "code", "--fisher-batch-size", 5, "--supcon-weight", 0.3]
    one, out = run_sweep(tmp_path / "one", *flags), tmp_path / "three"
    fork_context()
    torch.multiprocessing.start_processes(run_rank, (3, free_port(), out, flags), 3,
                                          start_method="forkserver")
    assert (out / "model.safetensors").exists() and not (out / ".running").exists()
    for name, trial in one.trials.items():
        state = torch.load(out / name / "state.pt", weights_only=True)
        assert [step["loss"] for step in metrics(out / name)] == pytest.approx(trial.losses, rel=1e-4)
        assert torch.equal(trial.state["optimizer"]["generator"], state["optimizer"]["generator"])
        for key, weight in state["model"].items():
            if not key.endswith("key.bias"):  # its true gradient is 0, and Adam scales rounding errors up
                assert (weight - trial.state["model"][key]).abs().gt(1e-4).float().mean() < 0.01, key


GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"


def write_contrast_set(folder, rows):
    """Write original.tsv, where every fourth label is wrong, and edited.tsv, where every fifth one is wrong
    and the rows are rotated by seven."""
    rows = [row.split("\t") for row in rows]
    for name, first, wrong in ("original", 0, 4), ("edited", 7, 5):
        part = [(text, rows[i - 1][1] if i % wrong == 0 else label) for i, (text, label) in enumerate(rows)]
        lines = ["\t".join(row) for row in part[first:] + part[:first]]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return [folder / "original.tsv", folder / "edited.tsv"]


def test_contrast_set(tmp_path, capsys):
    """Both accuracies and the consistency agree with transformers' pipeline on single texts. --evaluate
    prints the same scores."""
    rows = (DATA / "topics_dev.tsv").read_text().splitlines()[1:41]
    files = write_contrast_set(tmp_path, rows)
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
def test_fine_tunes_models_of_tacl_and_cline(name, flags, tmp_path):
    """The encoder has the weights of the saved model bit by bit, as --lr is 0. The classifier is new."""
    texts = (DATA / "sentences.txt").read_text().splitlines()
    documents = ["\n".join(texts[i : i + 8]) for i in range(0, 64, 8)]
    data = tmp_path / "data.txt"
    data.write_text(("\n\n" if name == "tacl" else "\n").join(documents))
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
    ("sentence\tlabel\nA\tx\nB\tx\n", "", r"a\.tsv: every label is 'x'; expected at least two .*"),
    (GOOD, "--dev b.tsv", r"b\.tsv line 2: label 'sleep', expected .* of a\.tsv: motion, rest"),
    (GOOD, "--dev c.tsv", r"c\.tsv: columns text, label, more; expected .* of text \(now sentence\) .*"),
    (GOOD, "--label-column topic", r"a\.tsv: columns sentence, label; expected .* \(now topic\); .*"),
    (GOOD, "--text-columns sentence label", r"a\.tsv: columns sentence, label; expected .*"),
    ("A\tB\tC\tx\nA\tB\tC\ty\n", "", r"a\.tsv: columns column 1, column 2, column 3, column 4; expected .*"),
    ("A\t1.5\nB\tx\n", "--task regression", r"a\.tsv line 2: label 'x', expected a number"),
    (GOOD, "--batch-size 5", r"a\.tsv: 4 rows, expected at least --batch-size, which is 5"),
    (GOOD, "--supcon-weight 1.5", r"argument --supcon-weight: 1\.5: expected a number from 0 to 1"),
    (GOOD, "--supcon-weight nan", r"argument --supcon-weight: nan: expected a number from 0 to 1"),
    ("A\t1.5\nB\t2\n", "--supcon-weight 0.5", "--supcon-weight and --ood-epochs: the task is .*"),
    (GOOD, "--reserve-p 0", r"--reserve-p 0\.0: expected a number above 0 and at most 1"),
    (GOOD, "--reserve-p nan", r"--reserve-p nan: expected .*"),
    (GOOD, "--metric pearson", r"--metric pearson: the task is classification, expected accuracy, .*"),
    (GOOD, "--mode none F D --child-filter h.0",
     r"--child-filter h\.0: found in no parameter name of scratch; names are like bert\..*"),
    (GOOD, "--contrast-set a.tsv d.tsv", "--contrast-set a.tsv d.tsv: classification, 4 and 1 rows; .*"),
    (GOOD, "--contrast-set a.tsv b.tsv", r"b\.tsv line 2: label 'sleep', expected one of the labels .*"),
    (GOOD, "--max-length 600", r"--max-length 600: scratch reads at most 512 tokens")])
def test_bad_input(tmp_path, monkeypatch, capfd, content, flags, wanted):
    monkeypatch.chdir(tmp_path)
    Path("a.tsv").write_text(content)
    Path("b.tsv").write_text("sentence\tlabel\nA\tsleep\n")
    Path("c.tsv").write_text("text\tlabel\tmore\nA\tmotion\tB\n")
    Path("d.tsv").write_text("sentence\tlabel\nA\tmotion\n")
    rejects("childtuning", capfd, wanted, *f"--data a.tsv --model scratch --batch-size 2 {flags}".split())
