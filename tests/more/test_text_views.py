"""Views other than dropout (--views), losses other than InfoNCE (--objective), and the recipes that use
them."""
import functools
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

import simcse
from families import DECODERS, ENCODERS, small_model
from formulas import check_equal, cosine, randn
from kernels.training.extras import sentence_papers, text_views
from kernels.training.extras.sentence_papers import compute_loss, contrastive_loss
from kernels.training.extras.text_views import TextViews, apply_cutoff, random_subset, select_anchors
from kernels.training.text import mlm
from kernels.training.text.tokens import tokenise
from running import (
    DATA,
    NLI,
    ONE_BATCH,
    SENTENCES,
    SMALL,
    embed_saved,
    rejects,
    run,
    run_distributed,
    run_text,
)

ONE = torch.ones(())

# ── word embeddings ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name, rate, zeroed", [
    ("feature_cutoff", 0.2, [60] * 3), ("feature_cutoff", 0.29, [84] * 3), ("token_cutoff", 0, [0] * 3),
    ("token_cutoff", 0.15, [25, 25, 0]), ("embedding_dropout", 0.2, [60, 35, 5])])
def test_number_of_zeros_of_a_cutoff(name, rate, zeroed):
    """A cutoff zeroes int(rate · n) of n columns (also at padding), n real tokens, or n entries of real
    tokens, as in the released code. Nothing else changes."""
    x, mask = torch.ones(3, 12, 25), torch.arange(12) < torch.tensor([[12], [7], [1]])
    torch.manual_seed(0)
    found = [apply_cutoff(x, mask, name, rate) for _ in range(2)]
    assert [(row == 0).sum().item() for row in found[0]] == zeroed
    assert set(found[0].unique().tolist()) <= {0.0, 1.0} and torch.equal(*found) == (rate == 0)
    zeros = found[0] == 0
    if name == "feature_cutoff":
        assert torch.equal(zeros.all(1), zeros.any(1)) and not torch.equal(zeros[0], zeros[1])
    else:
        assert not zeros[~mask].any()
    if name == "token_cutoff":
        assert torch.equal(zeros.all(2), zeros.any(2))


def test_random_subset_is_uniform():
    eligible = (torch.arange(10) < 6).repeat(20_000, 1)
    frequencies = random_subset(eligible, 0.34).double().mean(0)
    torch.testing.assert_close(frequencies, eligible[0].double() / 3, atol=0.02, rtol=0)


def make_views(model_folder, views, pooling="avg", **more):
    """Return (TextViews, its model) for a model in a folder."""
    args = SimpleNamespace(model=model_folder, data=SENTENCES, pooling=pooling, max_length=64, batch_size=1,
                           views=views, view_rates=[0.2] * len(views), count=len(views), chunk_size=None,
                           adversarial=0.0, anchors=1, wordnet=None, candidate_length=None, masked=False)
    vars(args).update(more)
    run = SimpleNamespace(device=torch.device("cpu"), bf16=False, args=args)
    model = simcse.build_encoder(args, run)
    return TextViews(args, model, more.get("table", SENTENCES)), model


@pytest.mark.parametrize("pooling", ["cls", "avg", "avg_top2"])
def test_shuffle_permutes_position_ids(pooling, bert, monkeypatch):
    """Only real tokens of the shuffled view get other positions. Pooling still finds the first token."""
    views, model = make_views(bert, ["dropout", "shuffle"], pooling)
    rows, _ = tokenise(["Two dogs run.", "It rains a lot."], model.tokenizer, 64)
    group, = model.batch(rows, rows)
    places, ids, mask = group
    orders = []

    def reorder(x, order):
        orders.append(order)
        return x.gather(1, order[:, :, None].expand_as(x))

    monkeypatch.setattr(text_views, "reorder", reorder)
    found = model.pool(ids, mask, places // 2)
    order = orders[0]
    plain = torch.arange(ids.shape[1]).expand_as(order)
    assert torch.equal(order[places < 2], plain[places < 2]) and not torch.equal(order, plain)
    assert torch.equal(order.sort(1)[0], plain) and torch.equal(order[mask == 0], plain[mask == 0])
    encoder = AutoModel.from_pretrained(bert)
    with torch.no_grad():
        output = encoder(input_ids=ids, attention_mask=mask, position_ids=order.argsort(1),
                         output_hidden_states=True)
        expected = model.pool_states(output.last_hidden_state, mask, output.hidden_states)
    torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["feature_cutoff", "token_cutoff", "embedding_dropout"])
def test_cutoff_changes_one_view(name, bert):
    """A batch without views, as in evaluation, is not changed, and no hook remains."""
    views, model = make_views(bert, ["dropout", name])
    rows, _ = tokenise([row[0] for row in NLI[:6]], model.tokenizer, 64)
    tokens = SimpleNamespace(views=lambda places, count: [[rows[i] for i in places]] * count)
    batch = views.make_batch(tokens, list(range(6)))
    first, second = model(batch).chunk(2)
    plain = model(model.batch(rows))
    torch.testing.assert_close(first, plain, atol=1e-6, rtol=0)
    assert ((second - plain).norm(dim=1) > 0.01).all()
    assert not model.encoder._forward_hooks and not model.encoder.get_input_embeddings()._forward_hooks


LAYERS = dict.fromkeys([*ENCODERS, "Electra"], "encoder.layer.0")
LAYERS |= dict.fromkeys([*DECODERS, "ModernBert"], "layers.0")
LAYERS |= {"DistilBert": "transformer.layer.0", "XLM": "attentions.0", "SqueezeBert": "encoder",
           "Albert": "encoder"}                                # where embeddings get the layers' width


@pytest.mark.parametrize("name", ["feature_cutoff", "token_cutoff", "embedding_dropout"])
@pytest.mark.parametrize("family", [*LAYERS])
def test_cutoff_in_the_input_of_the_first_layer(family, name, tmp_path, monkeypatch):
    """The input of the first layer, after positions, token types and norms, has exactly the zeros of the
    cutoff. Nothing else changes, and nothing in the other view."""
    for more in ("Albert", "Electra"):
        monkeypatch.setitem(ENCODERS, more, ENCODERS["Bert"] | dict(embedding_size=16))
    views, model = make_views(small_model(family, tmp_path), ["dropout", name], "avg")
    rows, _ = tokenise(["two dogs run", "it rains a lot of cats", "a"], model.tokenizer, 64)
    group, = model.eval().batch(rows, rows)
    places, ids, mask = group
    seen, layer = [], model.encoder.get_submodule(LAYERS[family])
    with layer.register_forward_hook(lambda _, given, named, out: seen.append(given or [*named.values()]),
                                     with_kwargs=True):        # sees the changed input
        for how in ([], [places // 3]):
            model.pool(ids, mask, *how)
    plain, found = (x[0].detach() for x in seen)
    second, real = places // 3 == 1, mask[:, :, None].bool()
    assert torch.equal(found[~second], plain[~second]) and not (plain == 0)[mask.bool()].any()
    plain, found, real = plain[second], found[second], real[second].expand_as(found[second])
    zeros, lengths, width = (found == 0) & real, mask[second].sum(1), found.shape[2]
    expected = dict(feature_cutoff=lengths * int(width * 0.2), token_cutoff=(lengths * 0.2).long() * width,
                  embedding_dropout=(lengths * width * 0.2).long())[name]
    assert torch.equal(zeros.sum((1, 2)), expected)
    assert torch.equal(found[real & ~zeros], plain[real & ~zeros])
    if name == "feature_cutoff":
        assert torch.equal(zeros.sum(1).bool().sum(1), torch.full_like(lengths, int(width * 0.2)))
    elif name == "token_cutoff":
        assert torch.equal(zeros.all(2), zeros.any(2))


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_every_family(family, tmp_path):
    """Both views change the embeddings; without views the model is unchanged."""
    views, model = make_views(small_model(family, tmp_path), ["shuffle", "token_cutoff"], "avg")
    rows, _ = tokenise([row[0] for row in NLI[:5]], model.tokenizer, 64)
    group, = model.eval().batch(rows, rows)
    places, ids, mask = group
    torch.manual_seed(0)
    plain, found = (model.pool(ids, mask, *how).detach() for how in ([], [places // 5]))
    assert ((found - plain).norm(dim=1) > 1e-3 * plain.norm(dim=1)).all() and found.isfinite().all()
    assert torch.equal(model.pool(ids, mask), plain)


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["crop", "delete"])
@pytest.mark.parametrize("rate, left", [(0, 17), (0.1, 17), (0.2, 15), (0.5, 9), (0.99, 1)])
def test_remove_words(name, rate, left):
    """The remaining words keep their order; those of a crop are consecutive and start anywhere. At least one
    word is removed, and at least one stays."""
    found = [tuple(text_views.remove_words([*range(18)], name, rate, random.Random(i))) for i in range(200)]
    assert {len(words) for words in found} == {left} and all(tuple(sorted(x)) == x for x in found)
    assert len(set(found)) > (1 if left > 9 else 5) and {i for words in found for i in words} == {*range(18)}
    assert all(words[-1] - words[0] == left - 1 for words in found) == (name == "crop" or left == 1)
    assert text_views.remove_words(["one"], name, rate, random.Random(0)) == ["one"]
    assert text_views.remove_words([], name, rate, random.Random(0)) == []


def test_synonyms(bert):
    """As many words as requested become WordNet synonyms, if they have any; the rest of the text stays."""
    text = "The small dog went home, and the big cat slept."
    views, model = make_views(bert, ["synonym", "dropout"], wordnet=DATA / "wordnet")
    words = next(iter(text_views.tag_words([text], None, views.wordnet)))
    options = {text[start:end]: views.wordnet.replacements("synonym", text[start:end].lower(), pos)
               for start, end, pos in words if pos}
    options = {word: others for word, others in options.items() if others}
    assert len(options) > 1
    singles = {text.replace(word, other) for word, others in options.items() for other in others}
    found = {views.replace_by_synonyms(text, words, 0.01, random.Random(i)) for i in range(200)}
    assert found == singles
    both = {views.replace_by_synonyms(text, words, 0.2, random.Random(i)) for i in range(200)}       # 2 of 12
    assert both and not both & (singles | {text})
    rows = tokenise([text], model.tokenizer, 64)[0]
    new, = views.change_words(rows, "synonym", 0.01, random.Random(0))
    assert model.tokenizer.decode(new[1:-1]) in {model.tokenizer.decode(row[1:-1])
                                                 for row in tokenise(sorted(singles), model.tokenizer, 64)[0]}


# ── documents ───────────────────────────────────────────────────────────────────────────────────────────────


class Documents(list):
    """A table whose rows have one text."""
    def __iter__(self):
        return ((f"line {i + 1}", [text]) for i, text in enumerate(super().__iter__()))


def test_spans(bert, tmp_path):
    """Lengths of anchors and positives follow Beta(4, 2) and Beta(2, 4). A document is cut into cells of
    --max-length tokens. Anchors lie in cells that are not adjacent; positives overlap or touch their anchor.
    Each span has special tokens at its ends. Short documents are left out."""
    documents = Documents(" ".join(random.Random(n).choices("abcdef", k=n)) for n in (255, 256, 700, 3000))
    folder = shutil.copytree(bert, tmp_path / "padding")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_padding(length=20)                          # like sentence-transformers' MiniLM
    backend.save(str(folder / "tokenizer.json"))
    views, model = make_views(folder, ["spans"], anchors=2, spans=[2, 3], count=4, max_length=64,
                              batch_size=3, table=documents, data=[["a"]])
    assert views.used_rows == [1, 2, 3]
    positions = np.arange(1000, 4000, dtype=np.int32)          # a document whose tokens are positions
    document = np.concatenate([[model.tokenizer.cls_token_id], positions, [model.tokenizer.sep_token_id]])
    lengths, starts_before, ends_after = {0: [], 1: []}, [], []
    for seed in range(300):
        anchors, *positives = views.sample_spans([document], random.Random(seed))
        assert [len(view) for view in (anchors, *positives)] == [2] * 4
        cells = [(row[1] - 1000) // 64 for row in anchors]
        assert [(row[-2] - 1000) // 64 for row in anchors] == cells and abs(cells[0] - cells[1]) > 1
        for view in (anchors, *positives):
            for row, anchor in zip(view, anchors):
                assert row[0] == document[0] and row[-1] == document[-1] and len(row) <= 64
                assert list(row[1:-1]) == list(range(row[1], row[1] + len(row) - 2))
                assert row[1] <= anchor[-2] + 3 and row[-2] >= anchor[1] - 3   # two tokens may be truncated
                lengths[view is not anchors].append(len(row) - 2)
                starts_before.append(row[1] < anchor[1])
                ends_after.append(row[-2] > anchor[-2])
    for is_positive, mean in (0, 2 / 3), (1, 1 / 3):
        found = torch.tensor(lengths[is_positive]).double()
        assert found.min() >= 32 and abs(found.mean() - (32 + mean * 32 - 0.5)) < 0.7
    # below 1/2: the anchors count, too, and neither start before nor end after themselves
    assert 0.2 < np.mean(starts_before) < 0.5 and 0.2 < np.mean(ends_after) < 0.5


def cell_probabilities(cells, anchors):
    """Return {cells of the anchors: probability} of the released code, a reference for sample_cell.

    Each anchor takes a random free cell. If `left` anchors still need one and fewer than left² are free, it
    takes the first or the last free cell. This cell and its neighbours in the list of free cells are removed.
    """
    found = {(): (1.0, tuple(range(cells)))}
    for left in range(anchors, 0, -1):
        following = {}
        for drawn, (probability, free) in found.items():
            choices = range(len(free)) if len(free) // left >= left else [0, len(free) - 1]
            for at in choices:
                still_free = tuple(cell for i, cell in enumerate(free) if abs(i - at) > 1)
                key = (*drawn, free[at])
                before = following.get(key, (0.0, still_free))[0]
                following[key] = (before + probability / len(choices), still_free)
        found = following
    return {drawn: probability for drawn, (probability, _) in found.items()}


@pytest.mark.parametrize("cells, anchors", [(4, 2), (9, 2), (6, 3), (7, 3), (8, 4)])
def test_cells_are_drawn_one_after_the_other(cells, anchors):
    """20,000 samples pass a chi-square test, which a uniform choice among all sets of cells would fail."""
    expected, rng, n = cell_probabilities(cells, anchors), random.Random(1), 20_000
    counts = dict.fromkeys(expected, 0)
    for _ in range(n):
        free = [*range(cells)]
        counts[tuple(text_views.sample_cell(free, left, rng) for left in range(anchors, 0, -1))] += 1
    assert sum(expected.values()) == pytest.approx(1) and all(
        abs(a - b) > 1 for drawn in expected for a in drawn for b in drawn if a != b)

    def chi_square(probabilities):
        return sum((counts[key] - n * p) ** 2 / (n * p) for key, p in probabilities.items())

    freedom = len(expected) - 1
    assert chi_square(expected) < freedom + 4 * (2 * freedom) ** 0.5 + 8
    if (cells, anchors) == (7, 3):
        uniform = dict.fromkeys(expected, 1 / len(expected))
        assert chi_square(uniform) > 10 * freedom


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("pooling", ["avg", "avg_first_last"])
def test_masked_anchors_are_embedded(pooling, chunk_size, tmp_path, bert, monkeypatch):
    """--form code: one pass over masked anchors gives their embeddings and the masked-LM loss, whose decoder
    is tied to the word embeddings. Positives are not masked."""
    spans = [[row[0] for row in SENTENCES[start : start + 4]] for start in (0, 4, 8)]
    tokenizer = AutoTokenizer.from_pretrained(bert)

    def fixed_spans(self, documents, rng):
        return [tokenise(view, tokenizer, 512)[0] for view in spans]

    monkeypatch.setattr(TextViews, "sample_spans", fixed_spans)

    def mask_even_ids(ids, maskable, tokenizer):
        chosen = maskable & (ids % 2 == 0)
        return torch.where(chosen, tokenizer.mask_token_id, ids), chosen

    monkeypatch.setattr(mlm, "mask_tokens", mask_even_ids)
    flags = ["--views", "spans", "--objective", "nt-xent", "--steps", 1, "--max-length", 8, "--lr", 0,
             "--pooling", pooling, "--mlm-weight", 1, "--spans", 1, 2, "--batch-size", 4, "--form", "code",
             "--dropout", 0]
    flags += ["--chunk-size", chunk_size] if chunk_size else []
    result = run_text("simcse", tmp_path / "run", [["abc " * 20]] * 4, "--model", bert, *flags)
    lm, z, losses = result.model.lm.eval(), [], []
    lm.zero_grad()
    for view, texts in enumerate(spans):
        for ids in (torch.from_numpy(row).long() for row in tokenise(texts, tokenizer, 512)[0]):
            maskable = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
            masked, chosen = mask_even_ids(ids, maskable, tokenizer)
            if view > 0:
                masked, chosen = ids, maskable & False
            output = lm(input_ids=masked[None], output_hidden_states=True)
            hidden = output.hidden_states[-1]
            z.append((hidden if pooling == "avg" else (hidden + output.hidden_states[1]) / 2)[0].mean(0))
            losses.append(F.cross_entropy(output.logits[0][chosen], ids[chosen], reduction="none"))
    anchors, *positives = torch.stack(z).chunk(3)
    views = [F.normalize(x, dim=1) for x in (anchors, torch.stack(positives).mean(0))]
    both = torch.cat(views)
    logits = (both @ both.T / 0.05).fill_diagonal_(-torch.inf)
    contrast = F.cross_entropy(logits, torch.arange(8).roll(4))
    step, = result.steps
    assert step["loss"] == pytest.approx(contrast.item(), abs=1e-4)
    assert step["mlm"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)
    (contrast + torch.cat(losses).mean()).backward()
    norm = torch.stack([w.grad.norm() for w in lm.parameters() if w.grad is not None]).norm().item()
    assert result.norms[0] == pytest.approx(norm, rel=1e-3)
    assert lm.get_output_embeddings().weight is result.model.encoder.get_input_embeddings().weight


def test_select_anchors_keeps_the_first_texts_of_a_batch(bert):
    _, model = make_views(bert, ["dropout"])
    rows, _ = tokenise([f"{'a' * n}" for n in range(1, 31)], model.tokenizer, 64)
    batch = select_anchors(model.batch(rows), 7)
    found = sorted((int(i), ids[mask.bool()].tolist()) for group in batch for i, ids, mask in zip(*group))
    assert [i for i, _ in found] == [*range(7)] and [ids for _, ids in found] == [[*row] for row in rows[:7]]


# ── objectives ──────────────────────────────────────────────────────────────────────────────────────────────


def reference_ranking_loss(scores, reference, margin, form):
    """Return the paper's loss, or the released code's: a mean over the pairs of each rank difference."""
    n, c = scores.shape
    total = 0
    below = [max(scores[b, i] - reference[b], torch.zeros(())) for b in range(n) for i in range(c)]
    pairs = {(i, j): [max(scores[b, j] - scores[b, i] + (j - i) * margin, torch.zeros(())) for b in range(n)]
             for i in range(c) for j in range(i + 1, c)}
    if form == "paper":
        return (sum(below) + sum(sum(x) for x in pairs.values())) / n
    for apart in range(1, c):
        same = [x for (i, j), found in pairs.items() if j - i == apart for x in found]
        total = total + sum(same) / len(same)
    return total + sum(below) / len(below)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("n, c, margin", [(1, 1, 0.01), (4, 1, 0.01), (3, 5, 0.01), (5, 4, 0.5), (2, 16, 0)])
def test_ranking_loss(form, n, c, margin):
    check_equal(lambda s, r: simcse.ranking_loss(s, r, margin, form),
          lambda s, r: reference_ranking_loss(s, r, margin, form), randn(n, c, 0), randn(n, 1, 1)[:, 0])


def test_ranking_loss_checks_its_arguments():
    x = torch.zeros(3, 2)
    for expected, *given in ((r"scores: found \(3,\)", x[:, 0], x[:, 0]), ("reference: found", x, x[:2, 0]),
                           ("form: 'both', expected paper or code", x, x[:, 0], 0.01, "both"),
                           ("scores: found torch.int64", x.long(), x[:, 0])):
        with pytest.raises(ValueError, match=expected):
            simcse.ranking_loss(*given)


@pytest.mark.parametrize("columns", [1, 2])
def test_nt_xent_compares_all_views(columns, tmp_path, bert):
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--objective", "nt-xent", "--temperature", 0.1]
    step, = run_text("simcse", tmp_path, rows, *flags).steps
    views = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    z = torch.cat(views if columns == 2 else views * 2)
    logits = (z @ z.T / 0.1).fill_diagonal_(-torch.inf)
    expected = F.cross_entropy(logits, torch.arange(24).roll(12)).item()
    assert step["loss"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_columns_of_the_ranking_loss(form, tmp_path, bert):
    """The columns are text, reference, and candidates from best to worst."""
    rows = [[*row, other[1], other[2]] for row, other in zip(NLI[:12], NLI[1:13])]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--objective", "ranking", "--margin", 0.05]
    step, = run_text("simcse", tmp_path, rows, *flags, "--form", form).steps
    text, *others = [embed_saved(bert, column, "avg").double() for column in zip(*rows)]
    scores = torch.tensor([[cosine(a, b) for b in row] for a, *row in zip(text, *others)])
    expected = reference_ranking_loss(scores[:, 1:], scores[:, 0], 0.05, form).item()
    assert step["loss"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("anchors", [1, 2])
def test_nt_xent_of_spans(anchors, tmp_path, bert, monkeypatch):
    """The loss compares eight anchors with the means of their three positives; other anchors of the document
    are negatives. The masked LM gets the anchors."""
    spans = [[row[0] for row in SENTENCES[start : start + 8]] for start in (0, 8, 16, 24)]
    tokenizer = AutoTokenizer.from_pretrained(bert)

    def fixed_spans(self, documents, rng):
        return [tokenise(view, tokenizer, 512)[0] for view in spans]

    monkeypatch.setattr(TextViews, "sample_spans", fixed_spans)
    batches = []
    monkeypatch.setattr(sentence_papers, "masked_lm_loss",
                        lambda model, batch, impl: batches.append(batch) or 0 * ONE)
    flags = "--views spans --objective nt-xent --steps 1 --max-length 8 --pooling avg --mlm-weight 1".split()
    flags += ["--spans", anchors, 3, "--batch-size", 8 // anchors]
    result = run_text("simcse", tmp_path, [["abc " * 20]] * 9, "--model", bert, *flags)
    assert result.said["spans"].startswith(f"9 of 9 documents have at least {16 * anchors} tokens")
    seen = [ids[mask.bool()].tolist() for group in batches[0] for _, ids, mask in zip(*group)]
    assert sorted(seen) == sorted([*ids] for ids in fixed_spans(None, None, None)[0])
    anchors, *positives = [embed_saved(bert, view, "avg").double() for view in spans]
    z = F.normalize(torch.cat([anchors, torch.stack(positives).mean(0)]), dim=1)
    logits = (z @ z.T / 0.05).fill_diagonal_(-torch.inf)
    expected = F.cross_entropy(logits, torch.arange(16).roll(8)).item()
    assert result.losses == pytest.approx([expected], abs=1e-4)


@pytest.mark.parametrize("objective", ["nt-xent", "infonce"])
def test_spans_of_two_ranks(objective, monkeypatch):
    """The losses of two ranks add up to that of one. Each rank has whole documents with all their anchors."""
    whole = [randn(6, 5, seed) for seed in range(2)]          # three documents of two anchors
    args = SimpleNamespace(anchors=2, objective=objective, temperature=0.05, impl="auto", precision="fp32",
                           hard_negative_weight=0.0)
    alone, total = contrastive_loss(whole[0], whole[1:], 3, args, simcse.simcse_loss), 0
    for own in (slice(0, 1), slice(1, 3)):
        own_rows = slice(2 * own.start, 2 * own.stop)
        # nt-xent gathers the anchors and the keys, infonce the keys
        parts = iter(whole if objective == "nt-xent" else whole[1:])
        monkeypatch.setattr(sentence_papers, "gather_keys", lambda *_: next(parts).unflatten(0, (3, 2)))
        monkeypatch.setattr(sentence_papers, "own_rows", lambda rows: own)
        part = contrastive_loss(whole[0][own_rows], [whole[1][own_rows]], 3, args, simcse.simcse_loss)
        total = total + part * (own.stop - own.start) / 3
    torch.testing.assert_close(total, alone)


@pytest.mark.parametrize("flags", ["--objective nt-xent --columns 1 2", "--objective ranking --form code",
                                   "--adversarial 0.5 --views dropout dropout dropout"])
def test_several_processes_equal_one(flags, tmp_path, bert):
    lines = (DATA / "nli.csv").read_text().splitlines(True)[:21]
    (tmp_path / "nli.csv").write_text("".join(lines))
    flags = ["--data", tmp_path / "nli.csv", "--model", bert, "--pooling", "avg", "--steps", 3, "--lr", 1e-3,
             "--batch-size", 8, *flags.split()]
    one = run("simcse", tmp_path / "one", *flags)
    assert run_distributed(3, "simcse", tmp_path / "three", flags) == pytest.approx(one.norms, rel=1e-4)


# ── adversarial noise ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunk", [None, 5])
def test_noise_is_along_the_gradient(chunk, bert):
    """The noise has length ε on each real token of the anchors, and increases the loss."""
    views, model = make_views(bert, ["dropout"] * 3, adversarial=0.1, objective="infonce", temperature=1.0,
                        impl="auto", precision="fp32", hard_negative_weight=0.0, chunk_size=chunk)
    rows = [tokenise(list(column), model.tokenizer, 64)[0] for column in zip(*NLI[:7])]
    tokens = SimpleNamespace(views=lambda places, count: rows)
    batch = views.make_batch(tokens, list(range(7)))
    loss_of = functools.partial(compute_loss, args=views.args, simcse_loss=simcse.simcse_loss)
    noisy = views.add_adversarial_noise(batch, loss_of, 7)
    for (*_, mask, view), (*_, step) in zip(batch, noisy):
        torch.testing.assert_close(step.norm(dim=2), 0.1 * (mask * (view == 0)[:, None]).float())

    def loss(scale):
        return loss_of(model, [[*group[:4], scale * group[4]] for group in noisy], 7)[0].item()

    assert loss(1) > loss(0.1) > loss(0) > loss(-0.1)


def test_noise_moves_with_its_token(bert, monkeypatch):
    """If a token moves to another position, its noise moves with it."""
    views, model = make_views(bert, ["shuffle", "dropout"], adversarial=0.1)
    rows, _ = tokenise([row[0] for row in NLI[:4]], model.tokenizer, 64)
    group, = model.eval().batch(rows)
    places, ids, mask = group
    step, seen, orders = torch.randn(*ids.shape, 32), [], []

    def reorder(x, order):
        orders.append(order)
        return x.gather(1, order[:, :, None].expand_as(x))

    monkeypatch.setattr(text_views, "reorder", reorder)
    with model.encoder.encoder.register_forward_hook(lambda _, given, named, out: seen.append(given[0]),
                                                     with_kwargs=True):
        for more in ([], [step]):
            torch.manual_seed(0)                               # the same order
            model.pool(ids, mask, places // 4, *more)
    expected = step.gather(1, orders[0][:, :, None].expand_as(step))
    torch.testing.assert_close(seen[1] - seen[0], expected, atol=1e-5, rtol=0)
    assert not torch.equal(expected, step)


@pytest.mark.parametrize("flags", ["--views embedding_dropout shuffle shuffle", "--adversarial 0.5"])
def test_chunks_equal_the_full_batch(flags, tmp_path, monkeypatch):
    """Random views and the noise are reproduced when the backward pass encodes a chunk again."""
    flags = ["--model", "scratch", "--batch-size", 12, "--steps", 1, "--chunk-size", 5, *flags.split()]
    chunked = run_text("simcse", tmp_path / "chunked", NLI[:12], *flags)

    def embed_directly(embed, chunks, module):
        return torch.cat([embed(chunk) for chunk in chunks])

    monkeypatch.setattr("kernels.training.text.encoders.embed_in_chunks", embed_directly)
    whole = run_text("simcse", tmp_path / "whole", NLI[:12], *flags)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert chunked.norms == pytest.approx(whole.norms, rel=1e-5)


# ── recipes and bad flags ───────────────────────────────────────────────────────────────────────────────────


def test_recipes_train(tmp_path):
    """ConSERT's recipe trains on sentences, DeCLUTR's on documents."""
    few = ["--model", "scratch", "--batch-size", 8, "--steps", 6, "--lr", 1e-3]
    result = run_text("simcse", tmp_path / "consert", SENTENCES[:40], *few, "--recipe", "consert")
    args = result.args
    assert (args.pooling, args.temperature, args.objective, args.max_length) == ("avg", 0.1, "nt-xent", 64)
    assert (args.views, args.view_rates, args.dropout) == (["feature_cutoff", "shuffle"], [0.2, 0.0], 0.0)
    assert "--lr 0.001 (not 5e-07)" in result.said["recipe"] and result.losses[-1] < result.losses[0]
    documents = [[" ".join(row[0] for row in SENTENCES[i : i + 30])] for i in range(0, 360, 30)]
    flags = ["--recipe", "declutr", "--max-length", 32]
    result = run_text("simcse", tmp_path / "declutr", documents, *few, *flags)
    assert result.losses[-1] < result.losses[0] and "mlm" in result.steps[0]
    expected = "12 of 12 documents have at least 128 tokens, 2 · 2 anchors · --max-length 32"
    assert result.said["spans"].startswith(expected)


@pytest.mark.parametrize("flags, expected", [
    ("--views shuffle", r"--views shuffle: expected 2 names, one per view"),
    ("--views crop crop crop", r"--views crop crop crop: expected 2 names, .*"),
    ("--views blur dropout", r"argument --views: invalid choice: 'blur' .*"),
    ("--views spans", r"--views spans: expected no other view, and data with a single column, .*"),
    ("--columns 1 --views spans crop", r"--views spans: expected no other view, .*"),
    ("--columns 1 --views spans --ignore-equal", r"--ignore-equal: cannot be combined with --views .*"),
    ("--columns 1 --views spans --spans 0 2", r"--spans 0 2: expected numbers above 0"),
    ("--columns 1 --views spans", r"good\.csv: 0 of 3 documents have at least 128 .*, which is --batch-size"),
    ("--columns 1 --views spans --prompt x", r"--prompt: --views spans would change .*"),
    ("--views delete dropout --prompt x", r"--prompt: --views delete dropout would change .*"),
    ("--views crop shuffle --view-rates 0.1", r"--view-rates 0\.1: expected 2 numbers from 0 to less than 1"),
    ("--view-rates 0.1 nan", r"--view-rates 0\.1 nan: expected 2 numbers from 0 to less than 1"),
    ("--view-rates 0.1 1", r"--view-rates 0\.1 1\.0: expected 2 numbers .*"),
    ("--views synonym dropout", r"--views synonym: expected --wordnet with the folder of a WordNet .*"),
    ("--wordnet none", r"--wordnet: only --views synonym uses it; leave it out"),
    ("--views synonym dropout --wordnet none", r"--wordnet none: data\.noun: No such file.*"),
    ("--columns 1 --adversarial 0.1", r"--adversarial: good\.csv has 1 column, expected an anchor .*"),
    ("--objective ranking", r"--objective ranking: good\.csv has 2 columns, expected text, reference and .*"),
    ("--objective nt-xent --ignore-equal", r"--objective nt-xent: does not use --ignore-equal .*"),
    ("--recipe simcse", r"argument --recipe: invalid choice: 'simcse' \(choose from 'consert', .*\)")])
def test_bad_flags(flags, expected, cwd, capfd):
    rejects("simcse", capfd, expected, *SMALL, *flags.split())


@pytest.mark.parametrize("kind, flags, expected", [
    ("Longformer", "--views dropout token_cutoff", "has no layers that take the .* of an embedding layer"),
    ("Longformer", "--adversarial 0.5", "has no layers that take the .* of an embedding layer"),
    ("IBert", "--views token_cutoff shuffle", "does not embed the words of a batch in one call")])
def test_unsupported_models(kind, flags, expected, cwd, monkeypatch, capfd):
    """Longformer pads texts to whole windows; I-BERT's embeddings are pairs of numbers and scales. Every view
    fails before --out is created."""
    own = dict(attention_window=[8] * 3) if kind == "Longformer" else {}
    monkeypatch.setitem(ENCODERS, kind, ENCODERS["Bert"] | own)
    small_model(kind, "model")
    capfd.readouterr()                                         # a progress bar of transformers
    expected = f"{kind}Model {expected}, one text per row; .*"
    rejects("simcse", capfd, expected, *SMALL, "--model", "model", "--max-length", 40, *flags.split())


def test_nt_xent_takes_no_hard_negatives(cwd, capfd):
    flags = [*SMALL, "--data", DATA / "nli.csv", "--objective", "nt-xent"]
    rejects("simcse", capfd, r"--objective nt-xent: .* has 3 columns, expected a text and its .*", *flags)
