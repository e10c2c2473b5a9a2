"""dclr.py: extreme values of its losses, noise, the guide, the head, the first loss."""
import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertTokenizer

import dclr
import loss_formulas
from running import DATA, ONE_BATCH, SENTENCES, embed_saved, run_text

TEXTS = [row[0] for row in SENTENCES]


@pytest.mark.parametrize("impl", ["eager", "blockwise"])
def test_an_anchor_without_negatives_has_loss_0(impl):
    """But a NaN is not mistaken for one: else a run with NaN weights would go on unnoticed."""
    z, f = torch.randn(2, 4, 8), torch.ones(4, 4)
    assert dclr.dclr_loss(*z, z[0, :0], f, f, 0.9, impl=impl) == 0
    assert dclr.dclr_loss(*z, z[0], f, f, 0.9, impl=impl) > 0
    z[0, 1, 0] = torch.nan
    assert dclr.dclr_loss(*z, z[1], f, f, 2.0, impl=impl).isnan()


@pytest.mark.parametrize("temperature", [0.05, 0.005])
def test_code_form_where_q_rounds_to_one(temperature):
    """The largest negative is close to its anchor and the positive is opposite, so 1 − q is about exp(−1/τ),
    far below the rounding error of q. There 1 − q must be summed from the other entries."""
    axes = torch.eye(4).double()
    z1, z2, noise = axes[:3].requires_grad_(), axes[[1, 2, 0]] - 0.1, -axes[:2] - 1
    logits = loss_formulas.cosines(z1, torch.cat([z2, noise])) / temperature
    own, each = torch.eye(3, 5, dtype=torch.bool), torch.eye(5, dtype=torch.bool)
    others = logits[:, None].masked_fill(each, -torch.inf).logsumexp(2)        # without one of the entries
    wanted = (logits.logsumexp(1)[:, None] - logits.where(own, others)).mean()
    found = dclr.dclr_loss(z1, z2, noise, axes[:3], axes[:3], 0.9, temperature, "code")
    both = [[loss, *torch.autograd.grad(loss, z1)] for loss in (found, wanted)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-10)
    single = [x.detach().float() for x in (z1, z2, noise, axes[:3], axes[:3])]
    assert dclr.dclr_loss(*single, 0.9, temperature, "code").item() == pytest.approx(wanted.item(), rel=1e-5)


def test_code_form_in_blocks_equals_the_whole_matrix(monkeypatch):
    apply, (z1, z2, f) = dclr.BlockwiseSum.apply, torch.randn(3, 9, 6).double()
    given = z2[:4], f, f.flip(0), 0.3, 0.05, "code"
    whole = dclr.dclr_loss(z1.requires_grad_(), z2.requires_grad_(), *given)
    monkeypatch.setattr(dclr.BlockwiseSum, "apply", lambda block, z, keys, _: apply(block, z, keys, 2))
    blocks = dclr.dclr_loss(z1, z2, *given)
    both = [[loss, *torch.autograd.grad(loss, [z1, z2])] for loss in (whole, blocks)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("dtype, temperature", [(torch.float64, 0.005), (torch.float32, 0.025)])
def test_noise_steps_have_full_length_or_none(form, dtype, temperature):
    """Row 1 has a softmax weight of about exp(−1/τ), so that the square of its gradient underflows: its step
    still has the full length. Rows 2 and 3 have cosine ±1 with the anchor, so their gradient is 0 and they
    stay."""
    noise = torch.tensor([[0.99, 0.1, 0], [-0.99, 0.1, 0], [4, 0, 0], [-1, 0, 0]], dtype=dtype)
    z = 2 * torch.eye(3, dtype=dtype)[:1]
    moved = dclr.noise_negatives(z, z, noise, 1, 0.5, temperature, form) - noise
    assert moved.norm(dim=1).tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=0, rel=1e-6)


@pytest.fixture(scope="module")
def guides(bert, tmp_path_factory):
    """Return {name: folder} of three guides. mean: modules.json with mean pooling, and another vocabulary;
    bare: no pooler; pooler: a pooler."""
    home = tmp_path_factory.mktemp("guides")
    made = {name: shutil.copytree(bert, home / name) for name in ("mean", "bare")}
    modules = [dict(path="", type="models.Transformer"), dict(path="1_Pooling", type="models.Pooling")]
    (made["mean"] / "modules.json").write_text(json.dumps(modules))
    (made["mean"] / "1_Pooling").mkdir()
    (made["mean"] / "1_Pooling" / "config.json").write_text(json.dumps(dict(pooling_mode="mean")))
    vocab = AutoTokenizer.from_pretrained(bert).get_vocab()
    turned = {piece: len(vocab) + 4 - i if i > 4 else i for piece, i in vocab.items()}
    BertTokenizer(turned, model_max_length=512).save_pretrained(made["mean"])
    AutoModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(made["bare"])
    return made | {"pooler": bert}


@pytest.mark.parametrize("name, how", [("pooler", "pooler"), ("mean", "avg"), ("bare", "cls")])
def test_guide_embeds_as_its_folder_describes(name, how, guides):
    """The guide is in eval mode and frozen. Without saved settings it uses its pooler, if it has one."""
    args = SimpleNamespace(guide=guides[name], max_length=32)
    guide = dclr.build_guide(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    wanted = embed_saved(guides[name], TEXTS[:8], how)
    torch.testing.assert_close(guide.embed_texts(TEXTS[:8]), wanted, atol=1e-5, rtol=0)
    assert not guide.training and not any(weight.requires_grad for weight in guide.parameters())


@pytest.mark.parametrize("head, name, layers, origin", [
    (None, "pooler", 4, "new"), (None, "bare", 2, "new"), (["pooler"], "pooler", 2, "pooler")])
def test_head_of_the_released_code(head, name, layers, origin, guides):
    """Base models have a new layer on top of the pooler. With --head pooler, as for large models, the pooler
    alone is the head. Both are dropped after training."""
    flags = ["--data", str(DATA / "sentences.txt"), "--model", str(guides[name]), "--form", "code"]
    args = dclr.make_parser().parse_args([*flags, *(["--head", *head] if head else [])])
    model = dclr.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    assert (len(model.head), model.head_origin, model.keep_head) == (layers, origin, False)


@pytest.mark.parametrize("form, per_sentence, name, pooling, more, ascent", [
    ("paper", 1.3, "pooler", "cls", "", (4, 1e-3, 0.05)), ("code", 0, "bare", "cls", "", (4, 1e-3, 0.05)),
    ("paper", 1, "pooler", "cls", "--noise-step-size 0.5 --noise-temperature 0.3", (4, 0.5, 0.3)),
    ("code", 1.3, "pooler", "pooler", "--noise-steps 2 --temperature 0.1", (2, 1e-3, 0.1))])
def test_first_loss_matches_the_formula(form, per_sentence, name, pooling, more, ascent, guides, tmp_path,
                                        monkeypatch):
    """The first loss equals the formula on the embeddings of model and guide, which have their own
    tokenizers, and on the sampled noise. The models have no dropout, and the batch holds all rows. With
    --form code the head is on top of the pooler. noise_negatives gets the noise flags."""
    ascend = Mock(wraps=dclr.noise_negatives)
    monkeypatch.setattr(dclr, "noise_negatives", ascend)
    rows = SENTENCES[:10] + SENTENCES[:2]                      # two sentences occur twice
    flags = ["--model", guides[name], "--guide", guides["mean"], "--noise-per-sentence", per_sentence]
    flags += ["--phi", 0.99, "--form", form, "--lr", 0, *more.split()]
    result = run_text("dclr", tmp_path, rows, *flags, *ONE_BATCH)
    linear, texts = result.model.head[-2], [row[0] for row in rows]
    z = torch.tanh(linear(embed_saved(guides[name], texts, pooling))).detach().double()
    f = embed_saved(guides["mean"], texts, "avg").double()     # φ differs from all cosines by 0.001 at least
    assert 4 < (1 - loss_formulas.instance_weights(f, f, 0.99)).sum() < 100    # the duplicates and others
    noise, settings = ascend.call_args_list[0].args[2].double(), ascend.call_args_list[0].args[3:]
    assert noise.shape == (int(per_sentence * 12), 32) and settings == (*ascent, form)
    assert noise.square().sum() / 32 == pytest.approx(len(noise), rel=0.1)     # Gaussian
    moved = loss_formulas.noise_negatives(z, z, noise, *ascent, form) if len(noise) else noise
    expected = loss_formulas.dclr_loss(z, z, moved, f, f, 0.99, result.args.temperature, form)
    assert result.losses == pytest.approx([expected.item()], abs=2e-4)
