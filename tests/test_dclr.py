"""DCLR against independent float64 formulas written out row by row, its edge cases, and how it reads its guide."""
import json
import math
import re
import shutil
import subprocess
import sys
from decimal import Decimal, getcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer, DistilBertConfig, DistilBertModel

import dclr
from dclr import dclr_loss, instance_weights, noise_negatives
from test_losses import agree, cosine, points
from test_scripts import SENTENCES, bert, equal, one_cpu_thread, run_text  # noqa: F401: fixtures

every_impl = pytest.mark.parametrize("impl", ["blockwise", "eager"])
every_form = pytest.mark.parametrize("form", ["paper", "code"])


def paper_written_out(z1, z2, noise, f1, f2, phi, temperature=0.05):
    """The paper's objective as printed: the sum has negatives alone; an anchor without any adds 0."""
    total = 0 * (z1.sum() + z2.sum())
    for i in range(len(z1)):
        kept = [z2[j] for j in range(len(z2)) if j != i and cosine(f1[i], f2[j]) < phi] + list(noise)
        if kept:
            negatives = sum(torch.exp(cosine(z1[i], k) / temperature) for k in kept)
            total = total - torch.log(torch.exp(cosine(z1[i], z2[i]) / temperature) / negatives)
    return total / len(z1)


def code_written_out(z1, z2, noise, f1, f2, phi, temperature=0.05):
    """The released objective: a weight of 0 multiplies the logit, and every entry is a yes or no."""
    total, columns = 0, list(z2) + list(noise)
    for i in range(len(z1)):
        flagged = [j != i and j < len(z2) and bool(cosine(f1[i], f2[j]) >= phi) for j in range(len(columns))]
        e = [torch.exp((1 - flagged[j]) * cosine(z1[i], columns[j]) / temperature) for j in range(len(columns))]
        total = total - torch.log(e[i] / sum(e))
        total = total - sum(torch.log(1 - e[j] / sum(e)) for j in range(len(columns)) if j != i)
    return total / (len(z1) * len(columns))


WRITTEN_OUT = {"paper": paper_written_out, "code": code_written_out}


def ascent_written_out(z1, z2, noise, steps=4, step_size=1e-3, temperature=0.05, form="paper"):
    """g_k = 1/(Nτ) Σ_i p_ik (z_i/|z_i| − cos(z_i, n_k) n_k/|n_k|) / |n_k|, p_ik among the noise, in the code form of z2 too."""
    noise = noise.clone()
    for _ in range(steps):
        gradients = []
        for n in noise:
            g = torch.zeros_like(n)
            for z in z1:
                below = sum(math.exp(cosine(z, other) / temperature) for other in [*noise, *(z2 if form == "code" else [])])
                p = math.exp(cosine(z, n) / temperature) / below
                g += p * (z / z.norm() - cosine(z, n) * n / n.norm()) / n.norm() / temperature / len(z1)
            gradients.append(g)
        noise += step_size * torch.stack([g / g.norm() for g in gradients])
    return noise


def case(n, k, seed=0, d=6, e=4):
    """(z1, z2, noise, f1, f2) of raw rows; f1 and f2 differ, so the weights are not symmetric."""
    return points(n, d, seed), points(n, d, seed + 1), points(k, d, seed + 2), points(n, e, seed + 3), points(n, e, seed + 4)


# ── the loss ──


@every_impl
@every_form
@pytest.mark.parametrize("n, k, phi, temperature", [
    (7, 7, 0.3, 0.05), (5, 12, 0.3, 0.2), (9, 0, 0.3, 0.05), (6, 3, 1.5, 0.05), (6, 3, -1.5, 0.05), (1, 3, 0.9, 0.05), (2, 0, 1.5, 0.05),
    (1, 0, 0.9, 0.05), (4, 0, -1.5, 0.05)])
def test_loss(form, impl, n, k, phi, temperature):
    """φ 1.5 flags nothing, −1.5 everything. Without any negative the value is 0, and so is the gradient; the code has no value then."""
    z1, z2, noise, f1, f2 = case(n, k)
    ours = lambda a, b: dclr_loss(a, b, noise, f1, f2, phi, temperature, form, impl=impl)
    if n + k == 1:
        agree(ours, lambda a, b: 0 * (a.sum() + b.sum()), z1, z2)
    else:
        agree(ours, lambda a, b: WRITTEN_OUT[form](a, b, noise, f1, f2, phi, temperature), z1, z2)


def test_loss_forms_differ_where_the_method_says():
    z1, z2, noise, f1, f2 = case(6, 4)
    losses = [dclr_loss(z1, z2, noise, f1, f2, phi, form=form).item() for form in ("paper", "code") for phi in (0.3, 1.5)]
    assert len({round(loss, 6) for loss in losses}) == 4


@every_impl
@every_form
def test_duplicate_sentences_are_no_negatives(form, impl):
    """Rows 0 and 3 are one sentence: its other view is flagged by φ = 0.9, though random f are not; no gradient reaches it as a negative."""
    z1, z2, noise, f1, f2 = case(6, 2, d=8, e=64)
    f1 = f2 = torch.cat([f1[:3], f1[:1], f1[4:]])
    assert instance_weights(f1, f2, 0.9).tolist() == [[float(i == j or {i, j} != {0, 3}) for j in range(6)] for i in range(6)]
    agree(lambda a, b: dclr_loss(a, b, noise, f1, f2, 0.9, form=form, impl=impl),
          lambda a, b: WRITTEN_OUT[form](a, b, noise, f1, f2, 0.9), z1, z2)
    z1.requires_grad_()
    one = lambda b: torch.autograd.grad(dclr_loss(z1, b, noise, f1, f2, 0.9, form=form, impl=impl), z1)[0][0]
    moved = torch.cat([z2[:3], points(1, 8, 99), z2[4:]])
    torch.testing.assert_close(one(moved), one(z2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [0.05, 0.02, 0.005])
def test_code_form_where_q_rounds_to_one(temperature, dtype):
    """A negative beside its anchor, the positive opposite: 1 − q is exp(−1/τ …), far below the rounding of 1."""
    z1, z2 = torch.eye(4, dtype=dtype)[:3], torch.eye(4, dtype=dtype)[[1, 2, 0]] - 0.1
    noise, f = -torch.ones(2, 4, dtype=dtype), torch.eye(3, dtype=dtype)
    z1.requires_grad_()
    loss = dclr_loss(z1, z2, noise, f, f, 0.9, temperature, "code")
    loss.backward()
    getcontext().prec, total = 400, Decimal(0)
    for i in range(3):
        e = [Decimal(cosine(z1[i].detach().double(), y.double()).item() / temperature).exp() for y in (*z2, *noise)]
        total -= (e[i] / sum(e)).ln() + sum((1 - e[j] / sum(e)).ln() for j in range(5) if j != i)
    assert max(e) / sum(e) > 1 - Decimal(10) ** (-8)
    assert loss.item() == pytest.approx(float(total / 15), rel=1e-10 if dtype == torch.float64 else 1e-5)
    assert z1.grad.isfinite().all() and z1.grad.abs().max() > 0.1


@every_form
def test_ranks_make_the_global_loss(form):
    """Two ranks of 3 anchors against gathered rows: the mean of their losses, and the sum of their gradients, are one process's."""
    z1, z2, noise, f1, f2 = case(6, 5)
    parts = lambda a, b: sum(dclr_loss(a[i:i + 3], b, noise, f1[i:i + 3], f2, 0.3, form=form, offset=i) for i in (0, 3)) / 2
    agree(parts, lambda a, b: dclr_loss(a, b, noise, f1, f2, 0.3, form=form), z1, z2)
    rows = [instance_weights(f1[i:i + 3], f2, 0.3, offset=i) for i in (0, 3)]
    assert torch.equal(torch.cat(rows), instance_weights(f1, f2, 0.3))


@every_form
def test_constants_get_no_gradient_and_lengths_do_not_count(form):
    rows = [x.requires_grad_() for x in case(5, 4)]
    loss = dclr_loss(*rows, 0.3, form=form)
    gradients = torch.autograd.grad(loss, rows, allow_unused=True)
    assert [g is None for g in gradients] == [False, False, True, True, True]
    scaled = [x * s * torch.arange(1, len(x) + 1)[:, None] for x, s in zip(rows, (2, 0.1, 30, 4, 0.5))]
    torch.testing.assert_close(dclr_loss(*scaled, 0.3, form=form), loss, rtol=1e-12, atol=1e-12)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        short = dclr_loss(*(x.detach().to(dtype) for x in rows), 0.3, form=form)
        assert short.dtype == torch.float32 and short.item() == pytest.approx(loss.item(), rel=tolerance)


@every_form
def test_blocks_of_rows(form):
    """2,100 anchors are two blocks of the code form; 600 rows have a duplicate."""
    z1, z2, _, f, _ = case(2100, 0)
    f[1500:] = f[:600]
    loss = lambda a, b: dclr_loss(a, b, z1[:0], f, f, 0.9, form=form)
    s, w = F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T / 0.05, instance_weights(f, f, 0.9)
    off = ~torch.eye(2100, dtype=torch.bool)
    if form == "paper":
        wanted = (s.exp() * w * off).sum(1).log().mean() - s.diagonal().mean()
    else:
        q = (s * w).softmax(1)
        wanted = -(q.diagonal().log().sum() + torch.log1p(-q)[off].sum()) / 2100**2
    assert (1 - w).sum() >= 1200
    torch.testing.assert_close(loss(z1, z2), wanted, rtol=1e-10, atol=1e-10)
    z1.requires_grad_()
    gradient, = torch.autograd.grad(loss(z1, z2), z1)
    direction = points(2100, 6, 9)
    step = 1e-5 * direction
    slope = (loss(z1.detach() + step, z2) - loss(z1.detach() - step, z2)) / 2e-5
    assert (gradient * direction).sum().item() == pytest.approx(slope.item(), rel=1e-6)


def test_memory():
    """Loss, noise and gradients of 10,000 rows, whose matrix has 400 MB in float32, in a process of its own."""
    code = """if True:
        import resource, torch, dclr
        z1, z2, noise, f = (torch.randn(10_000, 16, requires_grad=i < 2) for i in range(4))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for form in ("paper", "code"):
            negatives = dclr.noise_negatives(z1, z2, noise, 1, form=form)
            dclr.dclr_loss(z1, z2, negatives, f, f, 0.9, form=form).backward()
            print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(dclr.__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [float(line) < 300 for line in done.stdout.split()] == [True, True], done.stdout


@pytest.mark.parametrize("function", [lambda *x, **more: dclr_loss(*x, 0.9, **more), lambda *x, **more: noise_negatives(*x[:3], **more)])
def test_wrong_arguments(function):
    with pytest.raises(ValueError, match="form: 'papr', wanted paper or code"):
        function(*case(4, 3), form="papr")
    with pytest.raises(ValueError, match="impl: 'quick'"):
        function(*case(4, 3), impl="quick")


# ── the weights ──


def test_instance_weights():
    f1, f2 = points(8, 3, 0), points(8, 3, 1)
    for phi in (-1.5, -0.2, 0.5, 0.9, 1.5):
        weights = instance_weights(f1, f2, phi)
        assert weights.tolist() == [[float(i == j or cosine(f1[i], f2[j]) < phi) for j in range(8)] for i in range(8)]
    assert not torch.equal(instance_weights(f1, f2, 0.5), instance_weights(f1, f2, 0.5).T)
    assert instance_weights(f1.float(), f2.float(), 0.5).dtype == torch.float32
    assert torch.equal(instance_weights(f1 * 7, f2 * 0.1, 0.5), instance_weights(f1, f2, 0.5))
    axes = torch.eye(3)[[0, 0, 1]]
    assert instance_weights(axes, axes, 0.0).tolist() == torch.eye(3).tolist()                # φ itself counts as similar
    assert instance_weights(axes, axes, 1.0).tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 1]]


# ── the noise ──


@every_impl
@every_form
@pytest.mark.parametrize("n, k, steps, step_size, temperature", [(5, 5, 4, 1e-3, 0.05), (3, 7, 2, 0.5, 0.2), (1, 2, 1, 1e-3, 0.05)])
def test_noise(form, impl, n, k, steps, step_size, temperature):
    z1, z2, noise, _, _ = case(n, k)
    ours = noise_negatives(z1, z2, noise, steps, step_size, temperature, form, impl=impl)
    torch.testing.assert_close(ours, ascent_written_out(z1, z2, noise, steps, step_size, temperature, form), rtol=1e-10, atol=1e-10)
    assert torch.equal(noise, case(n, k)[2])                   # what was given is as it was


def test_noise_forms_differ():
    z1, z2, noise, _, _ = case(5, 5)
    assert not torch.allclose(*(noise_negatives(z1, z2, noise, form=form) for form in ("paper", "code")), rtol=1e-9, atol=1e-9)


@every_form
def test_noise_of_no_steps_or_no_rows(form):
    z1, z2, noise, _, _ = case(5, 4)
    assert torch.equal(noise_negatives(z1, z2, noise, steps=0, form=form), noise)
    assert noise_negatives(z1, z2, noise[:0], form=form).shape == (0, 6)


@every_form
def test_noise_climbs_and_is_a_constant(form):
    z1, z2, noise, f, _ = (x.requires_grad_() for x in case(8, 8))
    def against(noise):
        columns = torch.cat([noise, z2]) if form == "code" else noise
        return (F.normalize(z1, dim=1) @ F.normalize(columns, dim=1).T / 0.05).logsumexp(1).mean()
    with torch.no_grad():                                      # works there too
        heights = [against(noise_negatives(z1, z2, noise, steps, form=form)).item() for steps in range(5)]
    assert heights == sorted(heights) and heights[0] < heights[4]
    assert not noise_negatives(z1, z2, noise, form=form).requires_grad


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_noise_row_without_gradient_stays(form, dtype):
    """Noise along all anchors has cosine ±1, where the gradient is 0; the others step by their whole length all the same."""
    z1 = torch.tensor([[2.0, 0, 0], [1, 0, 0]], dtype=dtype)
    noise = torch.tensor([[4.0, 0, 0], [0, 1, 0], [-1, 0, 0], [0, 0, 3]], dtype=dtype)
    moved = noise_negatives(z1, z1, noise, steps=1, form=form) - noise
    torch.testing.assert_close(moved.norm(dim=1), torch.tensor([0, 1e-3, 0, 1e-3], dtype=dtype), atol=1e-6, rtol=1e-3)
    assert not moved[[0, 2]].any()


@pytest.mark.parametrize("dtype, temperature", [(torch.float64, 0.005), (torch.float32, 0.025)])
def test_noise_steps_are_whole_where_the_gradient_is_tiny(dtype, temperature):
    """The weight of the far row is exp(−1/τ …): the square of its gradient is no number of this type."""
    z1, noise = torch.tensor([[1.0, 0, 0, 0]], dtype=dtype), torch.tensor([[0.99, 0.1, 0, 0], [-0.99, 0, 0.1, 0]], dtype=dtype)
    step = noise_negatives(z1, z1, noise, steps=1, step_size=0.5, temperature=temperature) - noise
    torch.testing.assert_close(step.norm(dim=1), torch.full((2,), 0.5, dtype=dtype), atol=1e-6, rtol=1e-6)


# ── the script ──


def pooled(folder, sentences, how):
    """(n, H) of a folder, one sentence after the other: "pooler", "cls" or "avg"."""
    model, tokenizer, rows = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder), []
    for tokens in (tokenizer(sentence, return_tensors="pt", truncation=True, max_length=32) for sentence in sentences):
        with torch.no_grad():
            output = model(**tokens)
        hidden = output.last_hidden_state[0]
        rows.append(output.pooler_output[0] if how == "pooler" else hidden[0] if how == "cls" else hidden.mean(0))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def guides(bert, tmp_path_factory):  # noqa: F811
    """{how it is to be read: folder}: with a pooler, with 1_Pooling, without either, and of another library class."""
    home, made = tmp_path_factory.mktemp("guides"), {}
    for name in ("mean", "first", "bare", "distilbert"):
        made[name] = shutil.copytree(bert, home / name)
    for name in ("mean", "first"):
        (made[name] / "1_Pooling").mkdir()
        settings = {"pooling_mode_cls_token": name == "first", "pooling_mode_mean_tokens": name == "mean"}
        (made[name] / "1_Pooling" / "config.json").write_text(json.dumps(settings, indent=1))
    bare = AutoModel.from_pretrained(bert, add_pooling_layer=False)
    bare.save_pretrained(made["bare"])
    torch.manual_seed(1)
    shape = dict(dim=32, n_layers=1, n_heads=2, hidden_dim=64, vocab_size=bare.config.vocab_size, initializer_range=0.2)
    DistilBertModel(DistilBertConfig(**shape)).save_pretrained(made["distilbert"])
    return made | {"pooler": bert}


@pytest.mark.parametrize("name, how", [("pooler", "pooler"), ("mean", "avg"), ("first", "cls"), ("bare", "cls"), ("distilbert", "cls")])
def test_guide_is_read_as_its_folder_says(name, how, guides, tmp_path):
    """With its own tokenizer, which is not the student's, without dropout; and nothing of it is trained or saved."""
    result = run_text("dclr", tmp_path, SENTENCES[:12], "--model", "scratch", "--guide", guides[name], "--batch-size", 4, "--steps", 2)
    guide, sentences = result.model.guide, [row[0] for row in SENTENCES[:8]]
    rows = [(ids,) for ids in dclr.tokenise(sentences, guide, 32)[0]]
    f = dclr.embed(guide, dclr.make_batch(rows, guide, result.args))
    torch.testing.assert_close(f, pooled(guides[name], sentences, how), atol=1e-5, rtol=0)
    assert not f.requires_grad and not any("guide" in key for key in result.state["model"])
    assert result.said["guide"] == f"{guides[name]}, {'avg' if how == 'avg' else 'cls'} pooling" + ", its pooler" * (how == "pooler")


@every_form
def test_first_loss_is_the_papers(form, guides, tmp_path, monkeypatch):
    """Without dropout and with all rows in one batch: the formula on the folders' own embeddings and the noise that was drawn."""
    sentences = [row[0] for row in [*SENTENCES[:10], *SENTENCES[:2]]]                         # two come twice
    asked = Mock(wraps=dclr.noise_negatives)
    monkeypatch.setattr(dclr, "noise_negatives", asked)
    z, f = (pooled(guides[name], sentences, "avg").double() for name in ("bare", "mean"))
    cosines = sorted(cosine(a, b).item() for a in f for b in f)
    phi = max((b - a, (a + b) / 2) for a, b in zip(cosines[72:], cosines[73:]) if b < 0.9999)[1]      # far from each of them
    flags = ["--model", guides["bare"], "--pooling", "avg", "--batch-size", 12, "--lr", 1e-3, "--steps", 3, "--phi", phi]
    losses = run_text("dclr", tmp_path, [[text] for text in sentences], *flags, "--guide", guides["mean"], "--noise-times", 1.3,
                      "--form", form).losses
    noise = asked.call_args_list[0].args[2].double()
    assert noise.shape == (15, 32) and abs(noise.std() - 1) < 0.1                             # ⌊1.3 · 12⌋
    assert 4 < (1 - instance_weights(f, f, phi)).sum() < 100   # the duplicates and others, not all
    # the order of a batch is drawn, but neither the rows' order nor which noise is where changes the mean
    wanted = WRITTEN_OUT[form](z, z, ascent_written_out(z, z, noise, form=form), f, f, phi)
    assert losses[0] == pytest.approx(wanted.item(), abs=2e-4) and len(losses) == 3
    assert losses[2] < losses[0]


def test_noise_and_weights_can_be_switched_off(guides, tmp_path):
    """--noise-times 0 and --phi 1 leave the in-batch loss, here in the paper's form, which is lower than SimCSE's by the positive."""
    sentences = [row[0] for row in SENTENCES[:12]]
    flags = ["--model", guides["bare"], "--guide", guides["mean"], "--pooling", "avg", "--batch-size", 12, "--steps", 1]
    losses = run_text("dclr", tmp_path, SENTENCES[:12], *flags, "--noise-times", 0, "--phi", 1).losses
    z = F.normalize(pooled(guides["bare"], sentences, "avg").double(), dim=1)
    s = z @ z.T / 0.05
    wanted = s.masked_fill(torch.eye(12, dtype=torch.bool), -torch.inf).logsumexp(1).mean() - s.diagonal().mean()
    assert losses[0] == pytest.approx(wanted.item(), abs=1e-4)


def test_head_of_the_code_form_sits_on_the_pooler(bert, tmp_path):  # noqa: F811
    flags = ["--model", bert, "--guide", bert, "--batch-size", 4, "--steps", 1, "--lr", 0, "--form", "code"]
    result = run_text("dclr", tmp_path, SENTENCES[:4], *flags)
    first, _, second = result.model.head
    assert equal(dict(first.state_dict()), dict(AutoModel.from_pretrained(bert).pooler.dense.state_dict()))
    assert abs(second.weight.std() - 0.2) < 0.02 and not second.bias.any()
    views = dclr.make_batch([(ids,) for ids in dclr.tokenise([row[0] for row in SENTENCES[:4]], result.model, 32)[0]], result.model, result.args)
    pooler = pooled(bert, [row[0] for row in SENTENCES[:4]], "pooler")
    torch.testing.assert_close(dclr.embed(result.model.train(), views), torch.tanh(second(pooler)), atol=1e-5, rtol=0)
    bare = pooled(bert, [row[0] for row in SENTENCES[:4]], "cls")
    torch.testing.assert_close(dclr.embed(result.model.eval(), views), bare, atol=1e-5, rtol=0)


@every_form
@pytest.mark.parametrize("pooling", ["cls", "avg"])
def test_others_load_the_student_alone(form, pooling, bert, tmp_path):  # noqa: F811
    """By the line that was printed: no head, no guide; the embeddings are those of the weights in state.pt."""
    flags = ["--model", bert, "--guide", bert, "--pooling", pooling, "--batch-size", 8, "--steps", 3, "--lr", 1e-2, "--form", form]
    result, sentences = run_text("dclr", tmp_path, SENTENCES[:24], *flags), [row[0] for row in SENTENCES[:6]]
    result.model.load_state_dict(result.state["model"])
    rows = [(ids,) for ids in dclr.tokenise(sentences, result.model, 512)[0]]
    ours = dclr.embed(result.model.eval(), dclr.make_batch(rows, result.model, result.args))
    model = eval(result.said["load"].split("  or  ")[1], {"AutoModel": AutoModel}).eval()
    tokens = [AutoTokenizer.from_pretrained(tmp_path / "out")(sentence, return_tensors="pt") for sentence in sentences]
    hidden = [model(**x).last_hidden_state[0] for x in tokens]
    torch.testing.assert_close(torch.stack([h[0] if pooling == "cls" else h.mean(0) for h in hidden]), ours, atol=1e-5, rtol=0)
    assert model.pooler is None and not (tmp_path / "out" / "2_Dense").exists()


@pytest.mark.parametrize("flags, wanted", [
    ("--guide none/such", r"--guide none/such: no such folder, and the hub does not give it; name a local folder"),
    ("--guide scratch", r"--guide scratch: no such folder, and the hub does not give it; name a local folder"),
    ("--guide empty", r"--guide empty: no config\.json in this folder, so it is no transformers model"),
    ("--guide short", r"--guide short: .*model\.safetensors.*"),
    ("--phi 1.2", r"--phi 1\.2: wanted a cosine, from -1 to 1"),
    ("--phi -2", r"argument --phi: -2: wanted a number of at least -1"),
    ("--phi nan", r"argument --phi: nan: wanted a number of at least -1"),
    ("--noise-times -1", r"argument --noise-times: -1: wanted a number of at least 0"),
    ("--noise-steps 1.5", r"argument --noise-steps: invalid int value: '1\.5'"),
    ("--form both", r"argument --form: invalid choice: 'both' .*"),
    ("--data two.csv", r"two\.csv line 1: 2 columns, wanted 1 \(sentence\)")])
def test_bad_input(flags, wanted, bert, tmp_path, monkeypatch, capfd):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("A man eats.\nA dog runs.\nThe sun is up.\n")
    Path("two.csv").write_text("A man eats.,He eats.\nA dog runs.,It runs.\n")
    Path("empty").mkdir()
    shutil.copytree(bert, "short")
    Path("short/model.safetensors").unlink()
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as end:
        dclr.main(["--data", "data.txt", "--model", "scratch", "--guide", str(bert), "--batch-size", "2", "--steps", "1", *flags.split()])
    assert end.value.code == 2 and re.fullmatch(rf"dclr\.py: {wanted}\n", capfd.readouterr().err)
    assert sorted(Path().rglob("*")) == before
