"""DCLR: its public functions compared with float64 code that computes row by row, edge cases, the guide."""
import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertTokenizer

import dclr
from dclr import dclr_loss, instance_weights, noise_negatives
from formulas import check_equal, cosine, every_path, loss_by_path, randn
from running import DATA, ONE_BATCH, SENTENCES, SMALL, embed_saved, rejects, run_text

every_form = pytest.mark.parametrize("form", ["paper", "code"])
TEXTS = [row[0] for row in SENTENCES]


def reference_loss(z1, z2, noise, f1, f2, phi, temperature=0.05, form="paper"):
    """Compute both objectives entry by entry. paper: the denominator has negatives only, and an anchor
    without negatives adds 0. code: a weight of 0 sets a logit to 0, and an entry q of the softmax adds
    −log q for the positive, −log(1 − q) for a negative; 1 − q is the sum of the other entries."""
    total, columns = 0 * (z1.sum() + z2.sum()), [*z2, *noise]
    for i, z in enumerate(z1):
        others = [j for j in range(len(columns)) if j != i]
        kept = [j for j in others if j >= len(z2) or cosine(f1[i], f2[j]) < phi]
        e = [torch.exp(cosine(z, y) / temperature) for y in columns]
        if form == "code":
            e = [x if j in (i, *kept) else torch.ones_like(x) for j, x in enumerate(e)]
            no = sum(torch.log(sum(e[:j] + e[j + 1 :]) / sum(e)) for j in others)
            total = total - torch.log(e[i] / sum(e)) - no
        elif kept:
            total = total - torch.log(e[i] / sum(e[j] for j in kept))
    return total / len(z1) / (len(columns) if form == "code" else 1)


def reference_ascent(z1, z2, noise, steps=4, step_size=1e-3, temperature=0.05, form="paper"):
    """Ascend the gradient of Σ_i log Σ_k exp(cos(z_i, n_k) / τ); --form code has z2 in the sum over k too."""
    for _ in range(steps if len(noise) else 0):
        noise = noise.detach().requires_grad_()
        columns = [*noise, *z2] if form == "code" else noise
        total = sum(torch.log(sum(torch.exp(cosine(z, y) / temperature) for y in columns)) for z in z1)
        gradient = torch.autograd.grad(total, noise)[0]
        noise = noise + step_size * torch.stack([g / g.norm() for g in gradient])
    return noise.detach()


def random_inputs(n, k):
    """Return (z1, z2, noise, f1, f2), with weights that are not symmetric. f2[0] equals f1[-1]."""
    rows = randn(n, 6, 0), randn(n, 6, 1), randn(k, 6, 2), randn(n, 4, 3), randn(n, 4, 4)
    rows[3][-1] = rows[4][0]
    return rows


@every_path
@every_form
@pytest.mark.parametrize("n, k, phi, temperature", [
    (7, 7, 0.3, 0.05), (5, 12, 0.3, 0.2), (9, 0, 0.3, 0.05), (8, 2, 0.999, 0.05), (6, 3, 1.5, 0.05),
    (6, 3, -1.5, 0.05), (1, 3, 0.9, 0.05), (2, 0, 1.5, 0.05), (1, 0, 0.9, 0.05), (4, 0, -1.5, 0.05)])
def test_loss_matches_the_formula(form, path, n, k, phi, temperature, monkeypatch):
    """With φ = 0.999 only the duplicate has weight 0, with 1.5 no pair, with −1.5 every pair. Without
    negatives, loss and gradient are 0. The code form runs in blocks of two rows, except with impl "eager".
    Noise and guide embeddings get no gradient."""
    z1, z2, noise, f1, f2 = random_inputs(n, k)
    apply, flags = dclr.BlockwiseSum.apply, (phi, temperature, form)
    if path != "eager":
        monkeypatch.setattr(dclr.BlockwiseSum, "apply", lambda block, z, keys, _: apply(block, z, keys, 2))

    def loss(a, b):
        return loss_by_path(path, n, lambda own, **more: dclr_loss(
            a[own], b, noise, f1[own], f2, *flags, **more))

    check_equal(loss, lambda a, b: reference_loss(a, b, noise, f1, f2, *flags), z1, z2)
    assert not dclr_loss(z1, z2, *(x.requires_grad_() for x in (noise, f1, f2)), *flags).requires_grad


@pytest.mark.parametrize("temperature", [0.05, 0.02, 0.005])
def test_code_form_where_q_rounds_to_one(temperature):
    """The largest negative is close to its anchor and the positive is opposite, so 1 − q is about exp(−1/τ),
    far below the rounding error of q."""
    axes = torch.eye(4).double()
    z1, z2 = axes[:3], axes[[1, 2, 0]] - 0.1
    others = -axes[:2] - 1, axes[:3], axes[:3]                 # noise, f1, f2
    flags = 0.9, temperature, "code"

    def reference(a, b):
        return reference_loss(a, b, *others, *flags)

    check_equal(lambda a, b: dclr_loss(a, b, *others, *flags), reference, z1, z2)
    single = [x.float().requires_grad_() for x in (z1, z2, *others)]
    loss = dclr_loss(*single, *flags)
    gradient = torch.autograd.grad(loss, single[0])[0]
    assert loss.item() == pytest.approx(reference(z1, z2).item(), rel=1e-5)
    assert gradient.isfinite().all() and gradient.abs().max() > 0.1


@every_form
@pytest.mark.parametrize("dtype, temperature", [(torch.float64, 0.005), (torch.float32, 0.025)])
def test_noise_steps_have_full_length_or_none(form, dtype, temperature):
    """Row 1 has a softmax weight of about exp(−1/τ), so that the square of its gradient underflows: its step
    still has the full length. Rows 2 and 3 have cosine ±1 with the anchor, so their gradient is 0 and they
    stay."""
    noise = torch.tensor([[0.99, 0.1, 0], [-0.99, 0.1, 0], [4, 0, 0], [-1, 0, 0]], dtype=dtype)
    z = 2 * torch.eye(3, dtype=dtype)[:1]
    moved = noise_negatives(z, z, noise, 1, 0.5, temperature, form) - noise
    assert moved.norm(dim=1).tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=0, rel=1e-6)


@pytest.fixture(scope="module")
def guides(bert, tmp_path_factory):
    """Return {name: folder} of four guides. mean: modules.json with mean pooling, and another vocabulary;
    first: modules.json with [CLS] pooling; bare: no pooler; pooler: a pooler."""
    home = tmp_path_factory.mktemp("guides")
    made = {name: shutil.copytree(bert, home / name) for name in ("mean", "first", "bare")}
    for name, mode in ("mean", "mean"), ("first", "cls"):
        modules = [dict(path="", type="models.Transformer"), dict(path="1_Pooling", type="models.Pooling")]
        (made[name] / "modules.json").write_text(json.dumps(modules))
        (made[name] / "1_Pooling").mkdir()
        (made[name] / "1_Pooling" / "config.json").write_text(json.dumps(dict(pooling_mode=mode)))
    vocab = AutoTokenizer.from_pretrained(bert).get_vocab()
    turned = {piece: len(vocab) + 4 - i if i > 4 else i for piece, i in vocab.items()}
    BertTokenizer(turned, model_max_length=512).save_pretrained(made["mean"])
    AutoModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(made["bare"])
    return made | {"pooler": bert}


@pytest.mark.parametrize("name, how", [
    ("pooler", "pooler"), ("mean", "avg"), ("first", "cls"), ("bare", "cls")])
def test_guide_embeds_as_its_folder_describes(name, how, guides, capsys):
    """The guide is in eval mode and frozen. Without saved settings it uses its pooler, if it has one."""
    args = SimpleNamespace(guide=guides[name], max_length=32)
    guide = dclr.build_guide(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    wanted = embed_saved(guides[name], TEXTS[:8], how)
    torch.testing.assert_close(guide.embed_texts(TEXTS[:8]), wanted, atol=1e-5, rtol=0)
    assert not guide.training and not any(weight.requires_grad for weight in guide.parameters())
    said = {"avg": "avg pooling", "cls": "cls pooling", "pooler": "cls pooling, pooler as head"}[how]
    assert capsys.readouterr().out == f"guide    {guides[name]}, 0.0 M parameters, {said}\n"


@pytest.mark.parametrize("form, per_sentence, name, pooling, more, ascent", [
    ("paper", 1.3, "pooler", "cls", "", (4, 1e-3, 0.05)), ("code", 0, "bare", "cls", "", (4, 1e-3, 0.05)),
    ("paper", 1.3, "pooler", "cls", "--noise-step-size 0.5 --noise-temperature 0.3", (4, 0.5, 0.3)),
    ("code", 1.3, "pooler", "pooler", "--noise-step-size 0.5 --temperature 0.1", (4, 0.5, 0.1))])
def test_first_loss_matches_the_formula(form, per_sentence, name, pooling, more, ascent, guides, tmp_path,
                                        monkeypatch):
    """The first loss equals the formula on the embeddings of model and guide, which have their own
    tokenizers, and on the sampled noise. The models have no dropout, and the batch holds all rows. With
    --form code the head is on top of the pooler. noise_negatives gets the noise flags."""
    ascend = Mock(wraps=noise_negatives)
    monkeypatch.setattr(dclr, "noise_negatives", ascend)
    rows = SENTENCES[:10] + SENTENCES[:2]                      # two sentences occur twice
    flags = ["--model", guides[name], "--guide", guides["mean"], "--noise-per-sentence", per_sentence]
    flags += ["--phi", 0.99, "--form", form, "--lr", 0, *more.split()]
    result = run_text("dclr", tmp_path, rows, *flags, *ONE_BATCH)
    linear, texts = result.model.head[-2], [row[0] for row in rows]
    assert abs(linear.weight.std() - 0.2) < 0.02 and not linear.bias.any()
    z = torch.tanh(linear(embed_saved(guides[name], texts, pooling))).detach().double()
    f = embed_saved(guides["mean"], texts, "avg").double()     # φ differs from all cosines by 0.001 at least
    assert 4 < (1 - instance_weights(f, f, 0.99)).sum() < 100  # the duplicates and others, not all
    noise, settings = ascend.call_args_list[0].args[2].double(), ascend.call_args_list[0].args[3:]
    assert noise.shape == (int(per_sentence * 12), 32) and settings == (*ascent, form)
    assert noise.square().sum() / 32 == pytest.approx(len(noise), rel=0.1)
    moved = reference_ascent(z, z, noise, *ascent, form)
    expected = reference_loss(z, z, moved, f, f, 0.99, result.args.temperature, form)
    assert result.losses == pytest.approx([expected.item()], abs=2e-4)


@pytest.mark.parametrize("impl", ["eager", "blockwise"])
def test_loss_of_nan_embeddings_is_nan(impl):
    """NaN is not mistaken for an anchor without negatives, which has loss 0: else a run with NaN weights
    would go on unnoticed."""
    z, f = torch.randn(2, 4, 8), torch.eye(4)
    assert dclr_loss(*z, z[0], f, f, 2.0, impl=impl) > 0
    z[0, 1, 0] = torch.nan
    assert dclr_loss(*z, z[1], f, f, 2.0, impl=impl).isnan()


@pytest.mark.parametrize("head, name, layers, origin", [
    (None, "pooler", 4, "new"), (None, "bare", 2, "new"), (["pooler"], "pooler", 2, "pooler")])
def test_head_of_the_released_code(head, name, layers, origin, guides):
    """Base models have a new layer on top of the pooler. With --head pooler, as for large models, the pooler
    alone is the head. Both are dropped after training."""
    flags = ["--data", str(DATA / "sentences.txt"), "--model", str(guides[name]), "--form", "code"]
    args = dclr.make_parser().parse_args([*flags, *(["--head", *head] if head else [])])
    model = dclr.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    assert (len(model.head), model.head_origin, model.keep_head) == (layers, origin, False)


@pytest.mark.parametrize("flags, message", [
    ("--guide scratch", r"--guide scratch: a new model is untrained; name a folder or a model of the hub"),
    ("--phi 1.2", r"--phi 1\.2: expected a cosine, from -1 to 1"),
    ("--phi -2", r"argument .* at least -1"), ("--noise-per-sentence -1", r"argument .* at least 0"),
    ("--noise-step-size -1", r"argument .* at least 0"), ("--noise-temperature 0", r".* at least 0\.0001"),
    ("--data good.csv", r"good\.csv line 1: 2 columns, expected 1 \(sentence\); .* with --columns 1")])
def test_bad_input(flags, message, cwd, bert, capfd):
    rejects("dclr", capfd, message, *SMALL, "--data", DATA / "sentences.txt", "--guide", bert, *flags.split())
