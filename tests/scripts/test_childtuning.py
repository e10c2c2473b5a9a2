"""childtuning.py: optimizer and Fisher information against independent float64 code; small runs."""
import functools
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import childtuning
from childtuning import ChildTuningAdamW, fisher_information, fisher_mask, sample_mask, warmup_steps
from kernels.training.papers import childtuning_modes
from running import DATA, equal, rejects, run, run_distributed
from whole_runs import check_processes, check_resume

tune = functools.partial(run, "childtuning")
GOOD = "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"


def loss(model, batch):
    """Return Σ w·x: its gradient with respect to the weights is the batch."""
    return sum((model[name] * x).sum() for name, x in batch.items())


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_masks(weights, seed):
    return {w: randn(*w.shape, seed=seed + i) < -0.3 for i, w in enumerate(weights)}


@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("mode, p", [("none", 0.3), ("D", 0.3), ("F", 0.3), ("F", 0.9), (None, 1), ("D", 1),
                                     ("ChildTuning-F", 1)])
def test_steps_follow_the_released_rule(mode, p, correct_bias):
    """30 steps equal a numpy version, for two parameter groups and a falling learning rate. In every third
    step a weight has no gradient. In the last step some gradients are NaN; where the mask is 0 they count
    as 0. With p = 1 there is no mask."""
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


def test_masks_of_a_seed_stay_the_same():
    """docs/results.md has scores of these masks. An odd number of weights uses half of the last number."""
    mask = sample_mask(torch.zeros(3, 5), 0.3, torch.Generator().manual_seed(42))
    assert mask.int().tolist() == [[1, 0, 0, 0, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("mode", ["none", "D", "F"])
def test_saved_state(mode, tmp_path):
    """A saved state_dict continues bit-exactly in an optimizer that was made without mode and masks."""
    def take_steps(optimizer):
        for step in range(3):
            def closure(step=step):
                assert torch.is_grad_enabled()
                for i, w in enumerate(optimizer.weights()):
                    w.grad = randn(*w.shape, seed=31 * step + i)
                return step
            assert optimizer.step(closure) == step
        return [w.detach().clone() for w in optimizer.weights()]

    weights = [torch.nn.Parameter(randn(*shape)) for shape in ((6, 5), (5,), ())]
    masks = random_masks(weights[:2], 9) if mode == "D" else None
    optimizer = ChildTuningAdamW(weights, 0.01, weight_decay=0.1, mode=mode, reserve_p=0.4, masks=masks)
    before = take_steps(optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = ChildTuningAdamW([torch.nn.Parameter(w) for w in before])
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert equal(take_steps(other), take_steps(optimizer))
    assert equal(other.state_dict(), optimizer.state_dict())


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
    w.grad = three
    with pytest.raises(RuntimeError, match="no masks"):
        ChildTuningAdamW([w], mode="D", reserve_p=0.5).step()
    for options in (dict(reserve_p=0.0), dict(reserve_p=1.1), dict(batches=[]), dict(name_filter="h.0"),
                    dict(name_filter="frozen"), dict(batches=[dict(layer_W=randn(2, 3) * math.nan)])):
        with pytest.raises(ValueError, match=rf"^{min(options)}\b"):
            fisher_mask(**dict(model=model, batches=batches, loss=loss, reserve_p=0.5) | options)


def small_command(folder, rows=36):
    """Return flags for the first rows of two files: by default 36 rows, four batches of 8 and one of 4."""
    for name in ("topics.tsv", "topics_dev.tsv"):
        (folder / name).write_bytes(b"".join((DATA / name).read_bytes().splitlines(True)[: rows + 1]))
    files = ["--data", folder / "topics.tsv", "--dev", folder / "topics_dev.tsv"]
    return ["--model", "scratch", "--batch-size", 8, *files]


def flags_of(mode, folder):
    flags = ["--mode", mode, "--form", "code", "--fisher-samples", 12, "--steps", 5, "--lr", 0.01]
    return [*small_command(folder), *flags, "--warmup-ratio", 0.1]


@pytest.mark.parametrize("mode", ["D", "F"])
def test_resume_is_bitwise_exact(mode, tmp_path, monkeypatch):
    """The state has masks and generator: the Fisher information is computed by each new run, but not again by
    a resumed one. A run without --dev trains alike."""
    find_child = Mock(wraps=childtuning.find_child)
    monkeypatch.setattr(childtuning, "find_child", find_child)
    flags = flags_of(mode, tmp_path)
    without_dev = flags[:6] + flags[8:]
    whole = check_resume("childtuning", tmp_path, [*flags, "--eval-every", 3], without_dev, 4, [2, 0])
    assert find_child.call_count == (3 if mode == "D" else 0)
    assert [step["lr"] for step in whole.steps] == pytest.approx([0, 0.01, 7.5e-3, 5e-3, 2.5e-3])


def test_modes_of_a_seed_have_the_same_dropout(tmp_path):
    """A Fisher pass with dropout does not change later random numbers. The first step has lr 0."""
    first = [tune(tmp_path / mode, *flags_of(mode, tmp_path), "--steps", 1).losses for mode in ("D", "F")]
    assert first[0] == first[1]


def test_table_of_modes(tmp_path, capsys):
    """It has mean, standard deviation and best of each score, from the last step. An unfinished run is left
    out. A lower FPR95 is better."""
    out = tmp_path / "out"
    runs = [tune(out / name, *flags_of(name[:1], tmp_path), "--seed", name[2:], "--eval-every", 3)
            for name in ("D-42", "F-42", "F-43")]
    (out / "D-42" / ".running").touch()
    childtuning_modes.main([str(out)])
    pair = [run.steps[-1]["dev_accuracy"] for run in runs[1:]]
    note, table = capsys.readouterr().out.splitlines()
    assert note == f"note     {out}/D-42: unfinished, left out" and len(set(pair)) == 2
    assert table.startswith(f"F        accuracy {np.mean(pair):.2f} ± {statistics.stdev(pair):.2f}, best "
                            f"{max(pair):.2f}; macro f1 ")
    detector = [{"AUROC": 80.0, "FPR95": 30.0}, {"AUROC": 90.0, "FPR95": 10.0}]
    expected = "AUROC 85.00 ± 7.07, best 90.00; FPR95 20.00 ± 14.14, best 10.00"
    assert childtuning_modes.mean_and_spread(detector, []) == expected
    with pytest.raises(SystemExit, match="2"):
        childtuning_modes.main([str(tmp_path)])
    assert f"{tmp_path}: no finished run; expected" in capsys.readouterr().err


@pytest.mark.parametrize("form, mode, given, wanted", [
    ("paper", "F", None, 3), ("code", "none", None, 3), ("code", "F", None, 0), ("code", "D", None, 0),
    ("code", "D", 0.2, 5), ("paper", "none", 0.0, 0)])
def test_warmup_steps(form, mode, given, wanted):
    """The default is a tenth of the 25 steps, rounded up, but 0 in modes F and D of the released code."""
    assert warmup_steps(SimpleNamespace(form=form, mode=mode, warmup_ratio=given), 25) == wanted


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


@pytest.mark.parametrize("name, flags", [("childtuning", ["--mode", "none"]), ("finetune", [])])
def test_nan_gradients_are_skipped(name, flags, tmp_path, monkeypatch):
    """Steps with NaN gradients are skipped, counted and reported. Their metrics repeat the last finite loss,
    or have NaN if there is none. The optimizer counts the other steps only."""
    factors = iter([math.nan, 1, math.nan, 1])

    def spoil_gradient(model):
        model.classifier.bias.grad.mul_(next(factors))
    monkeypatch.setattr(f"{name}.all_reduce_gradients", spoil_gradient)
    flags += [*small_command(tmp_path), "--steps", 4, "--eval-every", 1, "--warmup-ratio", 0]
    result = run(name, tmp_path / "out", *flags)
    assert [math.isnan(loss) for loss in result.losses] == [True, False, False, False]
    assert result.losses[2] == result.losses[1] != result.losses[3]
    assert [step["skipped"] for step in result.steps] == [1, 1, 2, 2]
    assert result.said["note"].startswith("step 3:") and ", 2 steps skipped, " in result.said["done"]
    assert {int(state["step"]) for state in result.state["optimizer"]["state"].values()} == {2}


@pytest.mark.parametrize("mode", ["D", "F"])
def test_several_processes_equal_one(mode, tmp_path, bert):
    """Mode D sums Fisher information over three ranks with unequal numbers of rows, and mode F samples the
    same masks on each of them."""
    flags = [*small_command(tmp_path), "--model", bert, "--mode", mode, "--steps", 3, "--lr", 1e-4]
    flags += ["--fisher-batch-size", 5, "--keep-state", "always"]
    one = tune(tmp_path / "one", *flags)
    norms = run_distributed(3, "childtuning", tmp_path / "three", flags)
    check_processes(one, tmp_path / "three", norms)
    state = torch.load(tmp_path / "three" / "state.pt", weights_only=True)
    assert torch.equal(one.state["optimizer"]["generator"], state["optimizer"]["generator"])


@pytest.mark.parametrize("content, flags, wanted", [
    ("sentence\tlabel\nA\tx\n \ty\n", "", r"a\.tsv line 3: an empty cell; .*"),
    ("sentence\tlabel\nA\tx\nB\tx\n", "", r"a\.tsv: every label is 'x'; expected at least two .*"),
    (GOOD, "--dev b.tsv", r"b\.tsv line 2: label 'sleep', expected .* of a\.tsv: motion, rest"),
    (GOOD, "--dev c.tsv", r"c\.tsv: columns text, label, more; expected .* of text \(now sentence\) .*"),
    (GOOD, "--text-columns sentence label", r"a\.tsv: columns sentence, label; expected .*"),
    ("A\tB\tC\tx\nA\tB\tC\ty\n", "", r"a\.tsv: columns column 1, column 2, column 3, column 4; expected .*"),
    ("A\t1.5\nB\tx\n", "--task regression", r"a\.tsv line 2: label 'x', expected a number"),
    (GOOD, "--batch-size 5", r"a\.tsv: 4 rows, expected at least --batch-size, which is 5"),
    (GOOD, "--reserve-p 0", r"--reserve-p 0\.0: expected a number above 0 and at most 1"),
    (GOOD, "--reserve-p nan", r"--reserve-p nan: expected .*"),
    (GOOD, "--metric pearson", r"--metric pearson: the task is classification, expected accuracy, .*"),
    (GOOD, "--child-filter h.0",
     r"--child-filter h\.0: found in no parameter name of scratch; names are like bert\..*"),
    (GOOD, "--max-length 600", r"--max-length 600: scratch reads at most 512 tokens")])
def test_bad_input(tmp_path, monkeypatch, capfd, content, flags, wanted):
    monkeypatch.chdir(tmp_path)
    Path("a.tsv").write_text(content)
    Path("b.tsv").write_text("sentence\tlabel\nA\tsleep\n")
    Path("c.tsv").write_text("text\tlabel\tmore\nA\tmotion\tB\n")
    rejects("childtuning", capfd, wanted, *f"--data a.tsv --model scratch --batch-size 2 {flags}".split())
