"""Test consert.py: changes of the word embeddings in a view, the loss, and adversarial noise."""
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel

import consert
import loss_formulas as formulas
from consert import ViewMaker, changed_embeddings, cutoff
from kernels.training.papers.cline_wordnet import WordNet, tag_words
from kernels.training.text.encoders import build_encoder
from kernels.training.text.tokens import tokenise
from running import DATA, NLI, ONE_BATCH, SENTENCES, embed_saved, run_text


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
    whole = dict(feature_cutoff=2, token_cutoff=3).get(name)   # along this axis, all or none are 0
    assert whole is None or torch.equal(zeros.all(whole), zeros.any(whole))
    eligible = mask[:, :, None].expand(3, 12, 25) | (name == "feature_cutoff")
    assert torch.equal(zeros.any(0)[:2], eligible[:2]) and not (zeros & ~eligible).any()


def make(folder, views, pooling="avg", adversarial=0.0):
    """Return (ViewMaker, its model, flags) for a model in a folder."""
    args = SimpleNamespace(model=folder, data=SENTENCES, pooling=pooling, max_length=64, chunk_size=None,
                           views=views, view_rates=[0.2] * 2, wordnet=None, adversarial=adversarial,
                           loss="infonce", temperature=1.0, impl="auto", precision="fp32")
    model = build_encoder(args, SimpleNamespace(device=torch.device("cpu"), bf16=False, args=args))
    return ViewMaker(args, model), model, args


def test_shuffle_changes_position_ids(bert, monkeypatch):
    """Only real tokens of the shuffled view get other positions, here in reverse order. Pooling still finds
    the first token."""
    def reverse(eligible):
        return torch.arange(eligible.shape[1], 0, -1).expand(eligible.shape).masked_fill(~eligible, 99)

    monkeypatch.setattr(consert, "random_keys", reverse)
    _, model, args = make(bert, ["dropout", "shuffle"], "cls")
    rows, _ = tokenise(["Two dogs run.", "It rains a lot."], model.tokenizer, 64)
    (places, ids, mask), = model.batch(rows, rows)
    found = consert.encode(model, [[places, ids, mask, places // 2]], args)[places]
    plain = torch.arange(ids.shape[1]).expand_as(ids)
    reversed_ = torch.where(mask == 1, mask.sum(1, keepdim=True) - 1 - plain, plain)
    with torch.no_grad():
        output = AutoModel.from_pretrained(bert)(
            input_ids=ids, attention_mask=mask, output_hidden_states=True,
            position_ids=torch.where(places[:, None] < 2, plain, reversed_))
        expected = model.pool_states(output.last_hidden_state, mask, output.hidden_states)
    torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["feature_cutoff", "token_cutoff", "embedding_dropout"])
def test_cutoffs_and_noise_change_the_input_of_the_first_layer(name, bert):
    """Only texts of the cutoff's view get zeros. Noise is added first, so it does not change the zeros."""
    _, model, args = make(bert, ["dropout", name])
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


@pytest.mark.parametrize("columns, objective", [(1, "nt-xent"), (2, "infonce")])
def test_first_loss_matches_the_formula(columns, objective, tmp_path, bert):
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, *ONE_BATCH, "--loss", objective, "--views", "dropout", "dropout"]
    step, = run_text("consert", tmp_path, rows, *flags).steps
    views = [embed_saved(bert, column, "avg").double() for column in zip(*rows)]
    formula = dict(zip(("nt-xent", "infonce"), (formulas.nt_xent, formulas.info_nce)))[objective]
    expected = formula(views[0], views[-1], 0.1, normalize=True)
    assert step["loss"] == pytest.approx(expected.item(), abs=1e-4)


def test_dropout(folder_of, tmp_path):
    """The encoder's dropout is that of --dropout, by default 0, whatever the config in the folder says."""
    for flags, p in ([], 0), (["--dropout", 0.3], 0.3):
        result = run_text("consert", tmp_path / f"{p}", SENTENCES[:4], "--model", folder_of("Bert"),
                          "--batch-size", 4, "--steps", 1, *flags)
        assert {x.p for x in result.model.modules() if isinstance(x, torch.nn.Dropout)} == {p}


def test_noise_is_along_the_gradient(bert):
    """The noise has length --adversarial on each real token of the anchors, and increases the loss."""
    maker, model, args = make(bert, ["shuffle", "dropout"], adversarial=0.1)
    rows = [tokenise(list(column), model.tokenizer, 64)[0] for column in zip(*(row[:2] for row in NLI[:7]))]
    batch = maker.make_batch(SimpleNamespace(views=lambda *_: rows), range(7))
    torch.manual_seed(0)                                       # the same order of tokens in all passes
    noisy = consert.add_adversarial_noise(model, batch, 7, args)
    for *_, mask, view, noise in noisy:
        torch.testing.assert_close(noise.norm(dim=2), 0.1 * (mask * (view == 0)[:, None]).float())

    def loss(scale):
        torch.manual_seed(0)
        scaled = [[*group[:4], scale * group[4]] for group in noisy]
        return consert.compute_loss(model, scaled, 7, args)[0].item()

    assert loss(1) > loss(0.1) > loss(0) > loss(-0.1)


def test_views_that_change_words():
    """crop keeps neighbouring words, delete keeps the order. At least one word changes; one word stays."""
    rng, words, wordnet = random.Random(0), [*"abcdefghij"], WordNet(DATA / "wordnet")
    crops, rests = ({"".join(consert.remove_words(words, name, 0.3, rng)) for _ in range(200)}
                    for name in ("crop", "delete"))
    assert crops == {"abcdefg", "bcdefgh", "cdefghi", "defghij"} and len(rests) > 50
    assert {len(rest) for rest in rests} == {7} and all([*rest] == sorted(rest) for rest in rests)
    assert consert.remove_words(["a"], "crop", 0.9, rng) == ["a"]
    tagged, = tag_words(["Two dogs ran again."], None, wordnet)
    found = {consert.replace_by_synonyms("Two dogs ran again.", tagged, 0.0, wordnet, rng) for _ in range(50)}
    assert found == {"Two hound ran again.", "Two dogs ran once more."}
