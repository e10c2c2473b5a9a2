"""ConSERT: views of word embeddings and of words, the loss, adversarial noise, chunks."""
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel

import consert
import loss_formulas as formulas
from consert import ViewMaker, changed_embeddings, cutoff, remove_words, replace_by_synonyms
from kernels.training.papers.cline_wordnet import WordNet, tag_words
from kernels.training.text.encoders import build_encoder
from kernels.training.text.tokens import tokenise
from running import DATA, NLI, ONE_BATCH, SENTENCES, embed_saved, run_text


@pytest.mark.parametrize("name, rate, zeroed", [
    ("feature_cutoff", 0.2, [60] * 3), ("feature_cutoff", 0.29, [84] * 3), ("token_cutoff", 0, [0] * 3),
    ("token_cutoff", 0.15, [25, 25, 0]), ("embedding_dropout", 0.2, [60, 35, 5])])
def test_cutoffs(name, rate, zeroed):
    """As in the released code, a cutoff zeroes int(rate · n) of n columns (also at padding), n real tokens,
    or n entries of real tokens. All are equally likely. Nothing else changes."""
    torch.manual_seed(0)
    mask = torch.arange(12) < torch.tensor([[12], [7], [1]])
    draws = torch.stack([cutoff(torch.ones(3, 12, 25), mask, name, rate) for _ in range(500)])
    zeros = draws == 0
    assert set(draws.unique().tolist()) <= {0.0, 1.0}
    assert (zeros.sum((2, 3)) == torch.tensor(zeroed)).all()
    whole = dict(feature_cutoff=2, token_cutoff=3).get(name)   # the axis along which zeros reach
    assert whole is None or torch.equal(zeros.all(whole), zeros.any(whole))
    eligible = mask[:, :, None].expand(3, 12, 25) if name != "feature_cutoff" else torch.ones(3, 12, 25)
    share = torch.tensor(zeroed) / eligible.sum((1, 2))
    torch.testing.assert_close(zeros.double().mean(0), share[:, None, None] * eligible, atol=0.1, rtol=0,
                               check_dtype=False)


def make(folder, views, pooling="avg", **more):
    """Return (ViewMaker, its model, flags) for a model in a folder."""
    args = SimpleNamespace(model=folder, data=SENTENCES, pooling=pooling, max_length=64, chunk_size=None,
                           views=views, view_rates=[0.2] * 2, wordnet=None, adversarial=0.0,
                           loss="infonce", temperature=1.0, impl="auto", precision="fp32")
    vars(args).update(more)
    model = build_encoder(args, SimpleNamespace(device=torch.device("cpu"), bf16=False, args=args))
    return ViewMaker(args, model), model, args


@pytest.mark.parametrize("pooling", ["cls", "avg_top2"])
def test_shuffle_changes_position_ids(pooling, bert, monkeypatch):
    """Only real tokens of the shuffled view get other positions, here in reverse order. Pooling still finds
    the first token."""
    def reverse(eligible):
        return torch.arange(eligible.shape[1], 0, -1).expand(eligible.shape).masked_fill(~eligible, 99)

    monkeypatch.setattr(consert, "random_keys", reverse)
    _, model, args = make(bert, ["dropout", "shuffle"], pooling)
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
    """Only texts of the view get zeros, noise comes before them, and no hook remains."""
    _, model, args = make(bert, ["dropout", name])
    rows, _ = tokenise(["two dogs run", "it rains a lot of cats"], model.tokenizer, 64)
    (places, ids, mask), = model.eval().batch(rows, rows)
    seen, noise, view = [], torch.randn(*ids.shape, 32), places // 2
    with model.encoder.encoder.layer[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        model.pool(ids, mask)
        with changed_embeddings(model.encoder, args, mask, view, noise):
            model.pool(ids, mask)
        model.pool(ids, mask)
    plain, found, after = seen
    zeros = found == 0
    assert torch.equal(found[~zeros], (plain + noise)[~zeros]) and torch.equal(plain, after)
    assert zeros[view == 1].any((1, 2)).all() and not zeros[view == 0].any()


@pytest.mark.parametrize("name", ["crop", "delete"])
@pytest.mark.parametrize("rate, left", [(0, 17), (0.1, 17), (0.2, 15), (0.5, 9), (0.99, 1)])
def test_remove_words(name, rate, left):
    """The remaining words keep their order; those of a crop are consecutive and start anywhere. At least one
    word is removed, and at least one stays."""
    found = {tuple(remove_words([*range(18)], name, rate, random.Random(i))) for i in range(200)}
    assert {len(words) for words in found} == {left} and all(tuple(sorted(x)) == x for x in found)
    assert {i for words in found for i in words} == {*range(18)}
    assert all(words[-1] - words[0] == left - 1 for words in found) == (name == "crop" or left == 1)
    assert remove_words(["one"], name, rate, random.Random(0)) == ["one"]


def test_synonyms():
    """As many words as requested become WordNet synonyms, if they have any; the rest of the text stays."""
    text, wordnet = "The small dog went home, and the big cat slept.", WordNet(DATA / "wordnet")
    words = next(iter(tag_words([text], None, wordnet)))
    options = {text[start:end]: wordnet.replacements("synonym", text[start:end].lower(), pos)
               for start, end, pos in words if pos}
    singles = {text.replace(word, other) for word, others in options.items() for other in others}
    found = {replace_by_synonyms(text, words, 0.01, wordnet, random.Random(i)) for i in range(200)}
    assert found == singles and len(singles) > 1
    both = {replace_by_synonyms(text, words, 0.2, wordnet, random.Random(i)) for i in range(200)}    # 2 of 12
    assert both and not both & (singles | {text})


@pytest.mark.parametrize("columns, objective", [(1, "nt-xent"), (2, "infonce")])
def test_first_loss_matches_the_formula(columns, objective, tmp_path, bert):
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, *ONE_BATCH, "--loss", objective, "--views", "dropout", "dropout"]
    step, = run_text("consert", tmp_path, rows, *flags).steps
    views = [embed_saved(bert, column, "avg").double() for column in zip(*rows)]
    formula = dict(zip(("nt-xent", "infonce"), (formulas.nt_xent, formulas.info_nce)))[objective]
    expected = formula(views[0], views[-1], 0.1, normalize=True)
    assert step["loss"] == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("view", ["dropout", "shuffle"])
def test_noise_is_along_the_gradient(view, bert):
    """The noise has length ε on each real token of the anchors, and increases the loss."""
    maker, model, args = make(bert, [view, "dropout"], adversarial=0.1)
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


def test_chunks_equal_the_full_batch(tmp_path, monkeypatch):
    """Random views are the same when the backward pass encodes a chunk again."""
    flags = ["--model", "scratch", "--batch-size", 12, "--steps", 1, "--chunk-size", 5]
    flags += ["--views", "embedding_dropout", "shuffle"]
    chunked = run_text("consert", tmp_path / "chunked", SENTENCES[:12], *flags)
    monkeypatch.setattr(consert, "embed_in_chunks",
                        lambda embed, chunks, module: torch.cat([embed(chunk) for chunk in chunks]))
    whole = run_text("consert", tmp_path / "whole", SENTENCES[:12], *flags)
    assert [*chunked.losses, *chunked.norms] == pytest.approx([*whole.losses, *whole.norms], rel=1e-5)
