"""Test dclr.py: anchors without negatives, the loss in blocks, the guide, the first loss with its noise."""
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import dclr
import loss_formulas
from running import ONE_BATCH, SENTENCES, embed_saved, run_text

TEXTS = [row[0] for row in SENTENCES]


def test_an_anchor_without_negatives_has_loss_0():
    """A NaN embedding gives loss NaN, not 0. Otherwise, a run with NaN weights would go on unnoticed."""
    z, f = torch.randn(2, 4, 8), torch.ones(4, 4)
    assert dclr.dclr_loss(*z, z[0, :0], f, f, 0.9) == 0
    z[0, 1, 0] = torch.nan
    assert dclr.dclr_loss(*z, z[1], f, f, 2.0).isnan()


def test_code_form_in_blocks_equals_the_whole_matrix(monkeypatch):
    apply, (z1, z2, f) = dclr.BlockwiseSum.apply, torch.randn(3, 9, 6).double()
    given = z2[:4], f, f.flip(0), 0.3, 0.05, "code"
    whole = dclr.dclr_loss(z1.requires_grad_(), z2.requires_grad_(), *given)
    monkeypatch.setattr(dclr.BlockwiseSum, "apply", lambda block, z, keys, _: apply(block, z, keys, 2))
    blocks = dclr.dclr_loss(z1, z2, *given)
    both = [[loss, *torch.autograd.grad(loss, [z1, z2])] for loss in (whole, blocks)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def guides(bert, folder_of, tmp_path_factory):
    """Return {name: folder} of two guides. "mean" has saved settings with mean pooling, and another
    vocabulary. "pooler" has no saved settings, but a pooler."""
    mean = tmp_path_factory.mktemp("guides")
    run_text("simcse", mean, SENTENCES[:4], "--model", folder_of("Bert"), "--pooling", "avg",
             "--max-length", 128, "--batch-size", 4, "--steps", 1, "--lr", 0)
    return dict(mean=mean / "out", pooler=bert)


@pytest.mark.parametrize("name, how", [("pooler", "pooler"), ("mean", "avg")])
def test_guide_embeds_as_its_folder_describes(name, how, guides):
    """The guide is in eval mode and frozen. Without saved settings, the guide uses its pooler."""
    args = SimpleNamespace(guide=guides[name], max_length=32)
    guide = dclr.build_guide(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    wanted = embed_saved(guides[name], TEXTS[:8], how)
    torch.testing.assert_close(guide.embed_texts(TEXTS[:8]), wanted, atol=1e-5, rtol=0)
    assert not guide.training and not any(weight.requires_grad for weight in guide.parameters())


@pytest.mark.parametrize("form, per_sentence, pooling, more, ascent", [
    ("paper", 1.3, "cls", "", (4, 1e-3, 0.05)),
    ("code", 0, "pooler", "", (4, 1e-3, 0.05)),
    ("code", 1.3, "pooler", "--noise-steps 2 --temperature 0.1", (2, 1e-3, 0.1))])
def test_first_loss_matches_the_formula(form, per_sentence, pooling, more, ascent, bert, guides, tmp_path,
                                        monkeypatch):
    """The first loss equals the formula on the embeddings of model and guide, and on the sampled noise. Model
    and guide have different tokenizers and no dropout, and the batch holds all rows. With --form code the
    head follows the pooler. noise_negatives gets the values of the noise flags."""
    ascend = Mock(wraps=dclr.noise_negatives)
    monkeypatch.setattr(dclr, "noise_negatives", ascend)
    rows = SENTENCES[:10] + SENTENCES[:2]                      # two sentences occur twice
    flags = ["--model", bert, "--guide", guides["mean"], "--noise-per-sentence", per_sentence]
    flags += ["--phi", 0.99, "--form", form, "--lr", 0, *more.split()]
    result = run_text("dclr", tmp_path, rows, *flags, *ONE_BATCH)
    linear, texts = result.model.head[-2], [row[0] for row in rows]
    z = torch.tanh(linear(embed_saved(bert, texts, pooling))).detach().double()
    f = embed_saved(guides["mean"], texts, "avg").double()     # all cosines differ from φ by at least 0.001
    assert 4 < (1 - loss_formulas.instance_weights(f, f, 0.99)).sum() < 100    # 4 pairs are duplicates
    noise, settings = ascend.call_args_list[0].args[2].double(), ascend.call_args_list[0].args[3:]
    assert noise.shape == (int(per_sentence * 12), 32) and settings == (*ascent, form)
    assert noise.square().sum() / 32 == pytest.approx(len(noise), rel=0.1)     # the noise is standard normal
    moved = loss_formulas.noise_negatives(z, z, noise, *ascent, form) if len(noise) else noise
    expected = loss_formulas.dclr_loss(z, z, moved, f, f, 0.99, result.args.temperature, form)
    assert result.losses == pytest.approx([expected.item()], abs=2e-4)
