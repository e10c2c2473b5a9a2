"""Test consert.py: changes of the word embeddings in a view, the loss, and adversarial noise."""
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel

import consert
import loss_formulas as formulas
from consert import changed_embeddings, cutoff
from kernels.training.text.encoders import build_encoder
from kernels.training.text.tokens import tokenise
from running import NLI, ONE_BATCH, SENTENCES, embed_saved, run_text


@pytest.mark.parametrize("name, rate, zeroed", [
    ("feature_cutoff", 0.29, [84] * 3), ("token_cutoff", 0.15, [25, 25, 0]),
    ("embedding_dropout", 0.2, [60, 35, 5])])
def test_cutoffs(name, rate, zeroed):
    """A cutoff sets int(rate · n) of a text's n parts to 0 (released code). Parts are features (also at
    padding), real tokens, or entries of real tokens. Nothing else changes."""
    torch.manual_seed(0)
    mask = torch.arange(12) < torch.tensor([[12], [7], [1]])
    draws = torch.stack([cutoff(torch.ones(3, 12, 25), mask, name, rate) for _ in range(50)])
    zeros = draws == 0
    assert set(draws.unique().tolist()) <= {0.0, 1.0}
    assert (zeros.sum((2, 3)) == torch.tensor(zeroed)).all()
    whole = dict(feature_cutoff=2, token_cutoff=3).get(name)   # along this axis, all entries or none are 0
    assert whole is None or torch.equal(zeros.all(whole), zeros.any(whole))
    eligible = mask[:, :, None].expand(3, 12, 25) | (name == "feature_cutoff")
    assert torch.equal(zeros.any(0)[:2], eligible[:2]) and not (zeros & ~eligible).any()


def make(folder, views, pooling="avg", adversarial=0.0):
    """Return (model, flags) for a model in a folder."""
    args = SimpleNamespace(model=folder, data=SENTENCES, pooling=pooling, max_length=64, chunk_size=None,
                           views=views, view_rates=[0.2] * 2, adversarial=adversarial, temperature=1.0,
                           impl="auto", precision="fp32")
    return build_encoder(args, SimpleNamespace(device=torch.device("cpu"), bf16=False, args=args)), args


def test_shuffle_changes_position_ids(bert, monkeypatch):
    """Only real tokens of the shuffled view get other positions, here in reverse order. Pooling still finds
    the first token, and noise follows its token."""
    def reverse(eligible):
        return torch.arange(eligible.shape[1], 0, -1).expand(eligible.shape).masked_fill(~eligible, 99)

    monkeypatch.setattr(consert, "random_keys", reverse)
    model, args = make(bert, ["dropout", "shuffle"], "cls")
    rows, _ = tokenise(["Two dogs run.", "It rains a lot."], model.tokenizer, 64)
    (places, ids, mask), = model.batch(rows, rows)
    noise, bert = torch.randn(*ids.shape, 32), AutoModel.from_pretrained(bert)
    found = consert.encode(model, [[places, ids, mask, places // 2, noise]], args)[places]
    plain = torch.arange(ids.shape[1]).expand_as(ids)
    reversed_ = torch.where(mask == 1, mask.sum(1, keepdim=True) - 1 - plain, plain)
    bert.embeddings.register_forward_hook(lambda _, __, x: x + noise)
    with torch.no_grad():
        output = bert(input_ids=ids, attention_mask=mask, output_hidden_states=True,
                      position_ids=torch.where(places[:, None] < 2, plain, reversed_))
        expected = model.pool_states(output.last_hidden_state, mask, output.hidden_states)
    torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["feature_cutoff", "token_cutoff", "embedding_dropout"])
def test_cutoffs_and_noise_change_the_input_of_the_first_layer(name, bert):
    """Only texts of the cutoff's view get zeros. Noise is added first, so it does not change the zeros."""
    model, args = make(bert, ["dropout", name])
    rows, _ = tokenise(["two dogs run", "it rains a lot of cats"], model.tokenizer, 64)
    (places, ids, mask), = model.eval().batch(rows, rows)
    seen, noise, view = [], torch.randn(*ids.shape, 32), places // 2
    with model.encoder.encoder.layer[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        model.pool(ids, mask)
        with changed_embeddings(model.encoder, args, mask, view, noise):
            model.pool(ids, mask)
    plain, found = seen
    zeros = found == 0
    assert torch.equal(found[~zeros], (plain + noise)[~zeros])
    assert zeros[view == 1].any((1, 2)).all() and not zeros[view == 0].any()


@pytest.mark.parametrize("columns", [1, 2])
def test_first_loss_matches_the_formula(columns, tmp_path, bert):
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, *ONE_BATCH, "--views", "dropout", "dropout"]
    step, = run_text("consert", tmp_path, rows, *flags).steps
    views = [embed_saved(bert, column, "avg").double() for column in zip(*rows)]
    expected = formulas.nt_xent(views[0], views[-1], 0.1, normalize=True)
    assert step["loss"] == pytest.approx(expected.item(), abs=1e-4)


def test_noise_is_along_the_gradient(bert):
    """The noise has length --adversarial on each real token of the anchors, and increases the loss."""
    model, args = make(bert, ["shuffle", "dropout"], adversarial=0.1)
    rows = [tokenise(list(column), model.tokenizer, 64)[0] for column in zip(*(row[:2] for row in NLI[:7]))]
    batch = consert.make_batch(model, SimpleNamespace(views=lambda *_: rows), range(7))
    torch.manual_seed(0)                                       # all passes then have the same order of tokens
    noisy = consert.add_adversarial_noise(model, batch, 7, args)
    for places, _, mask, view, noise in noisy:
        assert torch.equal(view, places // 7)
        torch.testing.assert_close(noise.norm(dim=2), 0.1 * (mask * (view == 0)[:, None]).float())

    def loss(scale):
        torch.manual_seed(0)
        scaled = [[*group[:4], scale * group[4]] for group in noisy]
        return consert.compute_loss(model, scaled, 7, args)[0].item()

    assert loss(1) > loss(0.1) > loss(0) > loss(-0.1)
