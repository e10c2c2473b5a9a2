"""Views beyond dropout (--views), what is done with their similarities (--objective), and their recipes."""
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
from formulas import agree, cosine, points
from kernels.training.extras import sentence_papers, text_views
from kernels.training.extras.sentence_papers import compute_loss, contrast
from kernels.training.extras.text_views import TextViews, anchors_of, some, zeroed
from kernels.training.text import mlm
from kernels.training.text.tokens import tokenise
from running import DATA, NLI, ONE_BATCH, SENTENCES, SMALL, embed_saved, in_processes, refuse, run, run_text

ONE = torch.ones(())

# ── word embeddings ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name, rate, gone", [
    ("feature_cutoff", 0.2, [60] * 3), ("feature_cutoff", 0.29, [84] * 3), ("token_cutoff", 0, [0] * 3),
    ("token_cutoff", 0.15, [25, 25, 0]), ("embedding_dropout", 0.2, [60, 35, 5])])
def test_as_many_are_zeroed_as_released(name, rate, gone):
    """int(share) of the columns, padding too; of real tokens; of their entries. Others stay as they are."""
    x, mask = torch.ones(3, 12, 25), torch.arange(12) < torch.tensor([[12], [7], [1]])
    torch.manual_seed(0)
    found = [zeroed(x, mask, name, rate) for _ in range(2)]
    assert [(row == 0).sum().item() for row in found[0]] == gone
    assert set(found[0].unique().tolist()) <= {0.0, 1.0} and torch.equal(*found) == (rate == 0)
    zeros = found[0] == 0
    if name == "feature_cutoff":
        assert torch.equal(zeros.all(1), zeros.any(1)) and not torch.equal(zeros[0], zeros[1])
    else:
        assert not zeros[~mask].any()
    if name == "token_cutoff":
        assert torch.equal(zeros.all(2), zeros.any(2))


def test_some_are_drawn_evenly():
    may = (torch.arange(10) < 6).repeat(20_000, 1)
    shares = some(may, 0.34).double().mean(0)
    torch.testing.assert_close(shares, may[0].double() / 3, atol=0.02, rtol=0)


def make(model_folder, views, pooling="avg", **more):
    """(TextViews, its model) of a folder."""
    args = SimpleNamespace(model=model_folder, data=SENTENCES, pooling=pooling, max_length=64, batch_size=1,
                           views=views, view_rates=[0.2] * len(views), count=len(views), chunk_size=None,
                           adversarial=0.0, anchors=1, wordnet=None, candidate_length=None, masked=False)
    vars(args).update(more)
    run = SimpleNamespace(device=torch.device("cpu"), bf16=False, args=args)
    model = simcse.build_encoder(args, run)
    return TextViews(args, model, more.get("table", SENTENCES)), model


@pytest.mark.parametrize("pooling", ["cls", "avg", "avg_top2"])
def test_shuffle_permutes_position_ids(pooling, bert, monkeypatch):
    """Of the real tokens, in the rows of its view alone; the first token is pooled wherever it went."""
    views, model = make(bert, ["dropout", "shuffle"], pooling)
    rows, _ = tokenise(["Two dogs run.", "It rains a lot."], model.tokenizer, 64)
    (places, ids, mask), = model.batch(rows, rows)
    orders = []
    shuffled = lambda x, order: orders.append(order) or x.gather(1, order[:, :, None].expand_as(x))
    monkeypatch.setattr(text_views, "reordered", shuffled)
    found = model.pool(ids, mask, places // 2)
    order = orders[0]
    plain = torch.arange(ids.shape[1]).expand_as(order)
    assert torch.equal(order[places < 2], plain[places < 2]) and not torch.equal(order, plain)
    assert torch.equal(order.sort(1)[0], plain) and torch.equal(order[mask == 0], plain[mask == 0])
    encoder = AutoModel.from_pretrained(bert)
    with torch.no_grad():
        output = encoder(input_ids=ids, attention_mask=mask, position_ids=order.argsort(1),
                         output_hidden_states=True)
        wanted = model.pool_states(output.last_hidden_state, mask, output.hidden_states)
    torch.testing.assert_close(found.detach(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["feature_cutoff", "token_cutoff", "embedding_dropout"])
def test_word_embeddings_of_one_view_change(name, bert):
    """Evaluation does not see it, and the hooks are gone."""
    views, model = make(bert, ["dropout", name])
    rows, _ = tokenise([row[0] for row in NLI[:6]], model.tokenizer, 64)
    tokens = SimpleNamespace(views=lambda places, count: [[rows[i] for i in places]] * count)
    batch = views.batch(tokens, list(range(6)))
    first, second = model(batch).chunk(2)
    plain = model(model.batch(rows))
    torch.testing.assert_close(first, plain, atol=1e-6, rtol=0)
    assert ((second - plain).norm(dim=1) > 0.01).all()
    assert not model.encoder._forward_hooks and not model.encoder.get_input_embeddings()._forward_hooks


LAYERS = dict.fromkeys([*ENCODERS, "Electra"], "encoder.layer.0")
LAYERS |= dict.fromkeys([*DECODERS, "ModernBert"], "layers.0")
LAYERS |= {"DistilBert": "transformer.layer.0", "XLM": "attentions.0", "SqueezeBert": "encoder",
           "Albert": "encoder"}                                # it maps the embeddings for its layers


@pytest.mark.parametrize("name", ["feature_cutoff", "token_cutoff", "embedding_dropout"])
@pytest.mark.parametrize("family", [*LAYERS])
def test_zeros_in_what_the_first_layer_reads(family, name, tmp_path, monkeypatch):
    """Exactly, behind positions, token types and norms; the rest is as it was, in the other view all."""
    for more in ("Albert", "Electra"):
        monkeypatch.setitem(ENCODERS, more, ENCODERS["Bert"] | dict(embedding_size=16))
    views, model = make(small_model(family, tmp_path), ["dropout", name], "avg")
    rows, _ = tokenise(["two dogs run", "it rains a lot of cats", "a"], model.tokenizer, 64)
    (places, ids, mask), = model.eval().batch(rows, rows)
    seen, layer = [], model.encoder.get_submodule(LAYERS[family])
    with layer.register_forward_hook(lambda _, given, named, out: seen.append(given or [*named.values()]),
                                     with_kwargs=True):        # behind whatever changes what it is given
        for how in ([], [places // 3]):
            model.pool(ids, mask, *how)
    plain, found = (x[0].detach() for x in seen)
    second, real = places // 3 == 1, mask[:, :, None].bool()
    assert torch.equal(found[~second], plain[~second]) and not (plain == 0)[mask.bool()].any()
    plain, found, real = plain[second], found[second], real[second].expand_as(found[second])
    zeros, lengths, width = (found == 0) & real, mask[second].sum(1), found.shape[2]
    wanted = dict(feature_cutoff=lengths * int(width * 0.2), token_cutoff=(lengths * 0.2).long() * width,
                  embedding_dropout=(lengths * width * 0.2).long())[name]
    assert torch.equal(zeros.sum((1, 2)), wanted) and torch.equal(found[real & ~zeros], plain[real & ~zeros])
    if name == "feature_cutoff":
        assert torch.equal(zeros.sum(1).bool().sum(1), torch.full_like(lengths, int(width * 0.2)))
    elif name == "token_cutoff":
        assert torch.equal(zeros.all(2), zeros.any(2))


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_every_family(family, tmp_path):
    """Both views change in training; a text without words that change stays as it is."""
    views, model = make(small_model(family, tmp_path), ["shuffle", "token_cutoff"], "avg")
    rows, _ = tokenise([row[0] for row in NLI[:5]], model.tokenizer, 64)
    (places, ids, mask), = model.eval().batch(rows, rows)
    torch.manual_seed(0)
    plain, found = (model.pool(ids, mask, *how).detach() for how in ([], [places // 5]))
    assert ((found - plain).norm(dim=1) > 1e-3 * plain.norm(dim=1)).all() and found.isfinite().all()
    assert torch.equal(model.pool(ids, mask), plain)


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["crop", "delete"])
@pytest.mark.parametrize("rate, left", [(0, 17), (0.1, 17), (0.2, 15), (0.5, 9), (0.99, 1)])
def test_words_that_are_left(name, rate, left):
    """In their order; those of a crop side by side, anywhere; one goes at the least, one stays."""
    found = [tuple(text_views.without([*range(18)], name, rate, random.Random(i))) for i in range(200)]
    assert {len(words) for words in found} == {left} and all(tuple(sorted(x)) == x for x in found)
    assert len(set(found)) > (1 if left > 9 else 5) and {i for words in found for i in words} == {*range(18)}
    assert all(words[-1] - words[0] == left - 1 for words in found) == (name == "crop" or left == 1)
    assert text_views.without(["one"], name, rate, random.Random(0)) == ["one"]
    assert text_views.without([], name, rate, random.Random(0)) == []


def test_synonyms(bert):
    """Of WordNet, as many as asked for, in place of words that have any; the rest of the text stays."""
    text = "The small dog went home, and the big cat slept."
    views, model = make(bert, ["synonym", "dropout"], wordnet=DATA / "wordnet")
    words = next(iter(text_views.tag_words([text], None, views.wordnet)))
    options = {text[start:end]: views.wordnet.options("synonym", text[start:end].lower(), pos)
               for start, end, pos in words if pos}
    options = {word: others for word, others in options.items() if others}
    assert len(options) > 1
    singles = {text.replace(word, other) for word, others in options.items() for other in others}
    found = {views.with_synonyms(text, words, 0.01, random.Random(i)) for i in range(200)}
    assert found == singles
    both = {views.with_synonyms(text, words, 0.2, random.Random(i)) for i in range(200)}       # 2 of 12
    assert both and not both & (singles | {text})
    rows = tokenise([text], model.tokenizer, 64)[0]
    new, = views.reworded(rows, "synonym", 0.01, random.Random(0))
    assert model.tokenizer.decode(new[1:-1]) in {model.tokenizer.decode(row[1:-1])
                                                 for row in tokenise(sorted(singles), model.tokenizer, 64)[0]}


# ── documents ───────────────────────────────────────────────────────────────────────────────────────────────


class Documents(list):
    """A table of documents of so many letters."""
    def __iter__(self):
        return ((f"line {i + 1}", [text]) for i, text in enumerate(super().__iter__()))


def test_spans(bert, tmp_path):
    """Lengths of Beta(4, 2) and Beta(2, 4); anchors of a document in cells that are not neighbours; positives
    overlap or touch theirs; special tokens at the ends of each; short documents are counted."""
    documents = Documents(" ".join(random.Random(n).choices("abcdef", k=n)) for n in (255, 256, 700, 3000))
    folder = shutil.copytree(bert, tmp_path / "padding")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_padding(length=20)                          # as sentence-transformers' MiniLM has
    backend.save(str(folder / "tokenizer.json"))
    views, model = make(folder, ["spans"], anchors=2, spans=[2, 3], count=4, max_length=64, batch_size=3,
                        table=documents, data=[["a"]])
    assert views.kept == [1, 2, 3]
    places = np.arange(1000, 4000, dtype=np.int32)             # a document whose tokens are their places
    whole = np.concatenate([[model.tokenizer.cls_token_id], places, [model.tokenizer.sep_token_id]])
    lengths, before, behind = {0: [], 1: []}, [], []
    for seed in range(300):
        anchors, *positives = views.spans([whole], random.Random(seed))
        assert [len(view) for view in (anchors, *positives)] == [2] * 4
        cells = [(row[1] - 1000) // 64 for row in anchors]
        assert [(row[-2] - 1000) // 64 for row in anchors] == cells and abs(cells[0] - cells[1]) > 1
        for view in (anchors, *positives):
            for row, anchor in zip(view, anchors):
                assert row[0] == whole[0] and row[-1] == whole[-1] and len(row) <= 64
                assert list(row[1:-1]) == list(range(row[1], row[1] + len(row) - 2))
                assert row[1] <= anchor[-2] + 3 and row[-2] >= anchor[1] - 3   # up to two were cut off
                lengths[view is not anchors].append(len(row) - 2)
                before.append(row[1] < anchor[1])
                behind.append(row[-2] > anchor[-2])
    for kind, mean in (0, 2 / 3), (1, 1 / 3):
        found = torch.tensor(lengths[kind]).double()
        assert found.min() >= 32 and abs(found.mean() - (32 + mean * 32 - 0.5)) < 0.7
    assert 0.2 < np.mean(before) < 0.5 and 0.2 < np.mean(behind) < 0.5         # an anchor itself is neither


def shares_of_cells(cells, anchors):
    """{cells of the anchors: how often}, as the released code draws them, written out: each anchor takes any
    of the free cells, or, where fewer than left² are free (rounded down), the first or the last; it and those
    beside it in the list of free ones are free no more."""
    shares = {(): (1.0, tuple(range(cells)))}
    for left in range(anchors, 0, -1):
        following = {}
        for drawn, (share, free) in shares.items():
            places = range(len(free)) if len(free) // left >= left else [0, len(free) - 1]
            for at in places:
                now = tuple(cell for i, cell in enumerate(free) if abs(i - at) > 1)
                key = (*drawn, free[at])
                before = following.get(key, (0.0, now))[0]
                following[key] = (before + share / len(places), now)
        shares = following
    return {drawn: share for drawn, (share, _) in shares.items()}


@pytest.mark.parametrize("cells, anchors", [(4, 2), (9, 2), (6, 3), (7, 3), (8, 4)])
def test_cells_are_drawn_one_after_the_other(cells, anchors):
    """By chi-square of 20,000 draws; drawing all at once, evenly, would be noticed."""
    wanted, draw, n = shares_of_cells(cells, anchors), random.Random(1), 20_000
    counts = dict.fromkeys(wanted, 0)
    for _ in range(n):
        free = [*range(cells)]
        counts[tuple(text_views.drawn_cell(free, left, draw) for left in range(anchors, 0, -1))] += 1
    assert sum(wanted.values()) == pytest.approx(1) and all(
        abs(a - b) > 1 for drawn in wanted for a in drawn for b in drawn if a != b)
    chi = lambda shares: sum((counts[key] - n * share) ** 2 / (n * share) for key, share in shares.items())
    freedom = len(wanted) - 1
    assert chi(wanted) < freedom + 4 * (2 * freedom) ** 0.5 + 8
    if (cells, anchors) == (7, 3):
        even = dict.fromkeys(wanted, 1 / len(wanted))
        assert chi(even) > 10 * freedom


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("pooling", ["avg", "avg_first_last"])
def test_masked_anchors_are_embedded(pooling, chunk_size, tmp_path, bert, monkeypatch):
    """--form code: one pass over masked anchors gives their embeddings and the masked LM's loss, its decoder
    being the word embeddings; positives are read as they are."""
    spans = [[row[0] for row in SENTENCES[start : start + 4]] for start in (0, 4, 8)]
    tokenizer = AutoTokenizer.from_pretrained(bert)
    cut = lambda self, documents, draw: [tokenise(view, tokenizer, 512)[0] for view in spans]
    monkeypatch.setattr(TextViews, "spans", cut)
    masks = lambda ids, may, tokenizer: (torch.where(may & (ids % 2 == 0), tokenizer.mask_token_id, ids),
                                         may & (ids % 2 == 0))
    monkeypatch.setattr(mlm, "mask_tokens", masks)
    flags = ["--views", "spans", "--objective", "nt-xent", "--steps", 1, "--max-length", 8, "--lr", 0,
             "--pooling", pooling, "--mlm-weight", 1, "--spans", 1, 2, "--batch-size", 4, "--form", "code",
             "--dropout", 0]
    flags += ["--chunk-size", chunk_size] if chunk_size else []
    result = run_text("simcse", tmp_path / "run", [["abc " * 20]] * 4, "--model", bert, *flags)
    lm, z, losses = result.model.lm.eval(), [], []
    lm.zero_grad()
    for view, texts in enumerate(spans):
        for ids in (torch.from_numpy(row).long() for row in tokenise(texts, tokenizer, 512)[0]):
            may = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
            given, chosen = masks(ids, may, tokenizer) if view == 0 else (ids, may & False)
            output = lm(input_ids=given[None], output_hidden_states=True)
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


def test_masked_lm_of_documents_reads_anchors_alone(bert):
    _, model = make(bert, ["dropout"])
    rows, _ = tokenise([f"{'a' * n}" for n in range(1, 31)], model.tokenizer, 64)
    batch = anchors_of(model.batch(rows), 7)
    found = sorted((int(i), ids[mask.bool()].tolist()) for group in batch for i, ids, mask in zip(*group))
    assert [i for i, _ in found] == [*range(7)] and [ids for _, ids in found] == [[*row] for row in rows[:7]]


# ── objectives ──────────────────────────────────────────────────────────────────────────────────────────────


def ranking_written_out(scores, reference, margin, form):
    """As printed, text by text, and as released: means over all pairs of one distance."""
    (n, c), total = scores.shape, 0
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
    agree(lambda s, r: simcse.ranking_loss(s, r, margin, form),
          lambda s, r: ranking_written_out(s, r, margin, form), points(n, c, 0), points(n, 1, 1)[:, 0])


def test_ranking_loss_refuses():
    x = torch.zeros(3, 2)
    for wanted, *given in ((r"scores: found \(3,\)", x[:, 0], x[:, 0]), ("reference: found", x, x[:2, 0]),
                           ("form: 'both', wanted paper or code", x, x[:, 0], 0.01, "both"),
                           ("scores: found torch.int64", x.long(), x[:, 0])):
        with pytest.raises(ValueError, match=wanted):
            simcse.ranking_loss(*given)


@pytest.mark.parametrize("columns", [1, 2])
def test_nt_xent_has_both_views_as_one_set(columns, tmp_path, bert):
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--objective", "nt-xent", "--temperature", 0.1]
    step, = run_text("simcse", tmp_path, rows, *flags).steps
    views = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    z = torch.cat(views if columns == 2 else views * 2)
    logits = (z @ z.T / 0.1).fill_diagonal_(-torch.inf)
    wanted = F.cross_entropy(logits, torch.arange(24).roll(12)).item()
    assert step["loss"] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_ranking_of_columns(form, tmp_path, bert):
    """Text, reference, candidates, best first."""
    rows = [[*row, other[1], other[2]] for row, other in zip(NLI[:12], NLI[1:13])]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--objective", "ranking", "--margin", 0.05]
    step, = run_text("simcse", tmp_path, rows, *flags, "--form", form).steps
    text, *others = [embed_saved(bert, column, "avg").double() for column in zip(*rows)]
    scores = torch.tensor([[cosine(a, b) for b in row] for a, *row in zip(text, *others)])
    wanted = ranking_written_out(scores[:, 1:], scores[:, 0], 0.05, form).item()
    assert step["loss"] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("anchors", [1, 2])
def test_spans_are_averaged_and_others_of_a_document_are_negatives(anchors, tmp_path, bert, monkeypatch):
    """Eight anchors, three positives each: NT-Xent over anchors and mean positives; the masked LM reads the
    anchors."""
    spans = [[row[0] for row in SENTENCES[start : start + 8]] for start in (0, 8, 16, 24)]
    tokenizer = AutoTokenizer.from_pretrained(bert)
    cut = lambda self, documents, draw: [tokenise(view, tokenizer, 512)[0] for view in spans]
    monkeypatch.setattr(TextViews, "spans", cut)
    batches = []
    monkeypatch.setattr(sentence_papers, "masked_lm_loss",
                        lambda model, batch, impl: batches.append(batch) or 0 * ONE)
    flags = "--views spans --objective nt-xent --steps 1 --max-length 8 --pooling avg --mlm-weight 1".split()
    flags += ["--spans", anchors, 3, "--batch-size", 8 // anchors]
    result = run_text("simcse", tmp_path, [["abc " * 20]] * 9, "--model", bert, *flags)
    assert result.said["spans"].startswith(f"9 of 9 documents have {16 * anchors} tokens")
    seen = [ids[mask.bool()].tolist() for group in batches[0] for _, ids, mask in zip(*group)]
    assert sorted(seen) == sorted([*ids] for ids in cut(None, None, None)[0])
    anchors, *positives = [embed_saved(bert, view, "avg").double() for view in spans]
    z = F.normalize(torch.cat([anchors, torch.stack(positives).mean(0)]), dim=1)
    logits = (z @ z.T / 0.05).fill_diagonal_(-torch.inf)
    wanted = F.cross_entropy(logits, torch.arange(16).roll(8)).item()
    assert result.losses == pytest.approx([wanted], abs=1e-4)


@pytest.mark.parametrize("objective", ["nt-xent", "infonce"])
def test_spans_of_two_ranks(objective, monkeypatch):
    """Their parts of the loss add up to the whole: documents are shared, with all anchors of each."""
    whole = [points(6, 5, seed) for seed in range(2)]          # three documents of two anchors
    args = SimpleNamespace(anchors=2, objective=objective, temperature=0.05, impl="auto", precision="fp32",
                           hard_negative_weight=0.0)
    alone, total = contrast(whole[0], whole[1:], 3, args, simcse.simcse_loss), 0
    for own in (slice(0, 1), slice(1, 3)):
        own_rows = slice(2 * own.start, 2 * own.stop)
        parts = iter([whole[1], whole[0]])                     # in the order in which they are gathered
        monkeypatch.setattr(sentence_papers, "gather_rows", lambda z, rows: next(parts).unflatten(0, (3, 2)))
        monkeypatch.setattr(sentence_papers, "own_rows", lambda rows: own)
        part = contrast(whole[0][own_rows], [whole[1][own_rows]], 3, args, simcse.simcse_loss)
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
    assert in_processes(3, "simcse", tmp_path / "three", flags) == pytest.approx(one.norms, rel=1e-4)


# ── adversarial noise ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunk", [None, 5])
def test_noise_is_along_the_gradient(chunk, bert):
    """Of length ε on each real token of the anchors; the loss rises as its gradient says."""
    views, model = make(bert, ["dropout"] * 3, adversarial=0.1, objective="infonce", temperature=1.0,
                        impl="auto", precision="fp32", hard_negative_weight=0.0, chunk_size=chunk)
    rows = [tokenise(list(column), model.tokenizer, 64)[0] for column in zip(*NLI[:7])]
    tokens = SimpleNamespace(views=lambda places, count: rows)
    batch = views.batch(tokens, list(range(7)))
    loss_of = functools.partial(compute_loss, args=views.args, simcse_loss=simcse.simcse_loss)
    noisy = views.against(batch, loss_of, 7)
    for (*_, mask, view), (*_, step) in zip(batch, noisy):
        torch.testing.assert_close(step.norm(dim=2), 0.1 * (mask * (view == 0)[:, None]).float())
    loss = lambda scale: loss_of(model, [[*group[:4], scale * group[4]] for group in noisy], 7)[0].item()
    assert loss(1) > loss(0.1) > loss(0) > loss(-0.1)


def test_noise_moves_with_its_token(bert, monkeypatch):
    """What the first layer reads at a token's new place is the token there, and its own step."""
    views, model = make(bert, ["shuffle", "dropout"], adversarial=0.1)
    rows, _ = tokenise([row[0] for row in NLI[:4]], model.tokenizer, 64)
    (places, ids, mask), = model.eval().batch(rows)
    step, seen, orders = torch.randn(*ids.shape, 32), [], []
    shuffled = lambda x, order: orders.append(order) or x.gather(1, order[:, :, None].expand_as(x))
    monkeypatch.setattr(text_views, "reordered", shuffled)
    with model.encoder.encoder.register_forward_hook(lambda _, given, named, out: seen.append(given[0]),
                                                     with_kwargs=True):
        for more in ([], [step]):
            torch.manual_seed(0)                               # the same order
            model.pool(ids, mask, places // 4, *more)
    wanted = step.gather(1, orders[0][:, :, None].expand_as(step))
    torch.testing.assert_close(seen[1] - seen[0], wanted, atol=1e-5, rtol=0)
    assert not torch.equal(wanted, step)


@pytest.mark.parametrize("flags", ["--views embedding_dropout shuffle shuffle", "--adversarial 0.5"])
def test_chunks_are_the_whole_step(flags, tmp_path, monkeypatch):
    """What was drawn, and the noise, is there again when backward embeds anew."""
    flags = ["--model", "scratch", "--batch-size", 12, "--steps", 1, "--chunk-size", 5, *flags.split()]
    chunked = run_text("simcse", tmp_path / "chunked", NLI[:12], *flags)
    keep = lambda embed, chunks, module: torch.cat([embed(chunk) for chunk in chunks])
    monkeypatch.setattr("kernels.training.text.encoders.embed_in_chunks", keep)
    whole = run_text("simcse", tmp_path / "whole", NLI[:12], *flags)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert chunked.norms == pytest.approx(whole.norms, rel=1e-5)


# ── recipes and refusals ────────────────────────────────────────────────────────────────────────────────────


def test_recipes_train(tmp_path):
    """ConSERT as released, on real sentences; DeCLUTR on documents."""
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
    assert result.said["spans"].startswith("12 of 12 documents have 128 tokens, 2 · 2 · --max-length 32")


@pytest.mark.parametrize("flags, wanted", [
    ("--views shuffle", r"--views shuffle: wanted 2 names, one for each view"),
    ("--views crop crop crop", r"--views crop crop crop: wanted 2 names, .*"),
    ("--views blur dropout", r"argument --views: invalid choice: 'blur' .*"),
    ("--views spans", r"--views spans: stands alone, and wants rows of one text, a document"),
    ("--columns 1 --views spans crop", r"--views spans: stands alone, .*"),
    ("--columns 1 --views spans --ignore-equal", r"--ignore-equal: spans are no rows; leave it out"),
    ("--columns 1 --views spans --spans 0 2", r"--spans 0 2: wanted numbers above 0"),
    ("--columns 1 --views spans", r"good\.csv: 0 of 3 documents have 128 tokens, .*, which is 2"),
    ("--columns 1 --views spans --prompt x", r"--prompt: --views spans would change its words too"),
    ("--views delete dropout --prompt x", r"--prompt: --views delete dropout would change its words too"),
    ("--views crop shuffle --view-rates 0.1", r"--view-rates 0\.1: wanted 2 shares from 0 to less than 1"),
    ("--view-rates 0.1 nan", r"--view-rates 0\.1 nan: wanted 2 shares from 0 to less than 1"),
    ("--view-rates 0.1 1", r"--view-rates 0\.1 1\.0: wanted 2 shares .*"),
    ("--views synonym dropout", r"--views synonym and --wordnet, a WordNet folder, want each other: .*"),
    ("--wordnet none", r"--views synonym and --wordnet, .*"),
    ("--views synonym dropout --wordnet none", r"--wordnet none: data\.noun: No such file.*"),
    ("--columns 1 --adversarial 0.1", r"--adversarial: wants rows with a positive, .*"),
    ("--adversarial nan", r"argument --adversarial: nan: wanted a number of at least 0"),
    ("--objective ranking", r"--objective ranking: good\.csv has 2 columns, wanted text, reference and .*"),
    ("--objective ranking --margin -1", r"argument --margin: -1: wanted a number of at least 0"),
    ("--objective nt-xent --ignore-equal", r"--objective nt-xent: has no --ignore-equal and no .*"),
    ("--recipe simcse", r"argument --recipe: invalid choice: 'simcse' \(choose from 'consert', .*\)")])
def test_flags_that_cannot_be(flags, wanted, here, capfd):
    refuse("simcse", capfd, wanted, *SMALL, *flags.split())


@pytest.mark.parametrize("kind, flags, wanted", [
    ("Longformer", "--views dropout token_cutoff", "layers that read the output of an embedding layer"),
    ("Longformer", "--adversarial 0.5", "layers that read the output of an embedding layer"),
    ("IBert", "--views token_cutoff shuffle", "word embeddings that it reads once")])
def test_a_model_whose_words_do_not_change(kind, flags, wanted, here, monkeypatch, capfd):
    """Longformer reads more of them than there are, whole windows; I-BERT pairs of numbers and scales.
    Refused before --out is begun, by whichever view."""
    own = dict(attention_window=[8] * 3) if kind == "Longformer" else {}
    monkeypatch.setitem(ENCODERS, kind, ENCODERS["Bert"] | own)
    small_model(kind, "model")
    capfd.readouterr()                                         # transformers' bar of what it writes
    wanted = f"{kind}Model has no {wanted}, a row a text; .*"
    refuse("simcse", capfd, wanted, *SMALL, "--model", "model", "--max-length", 40, *flags.split())


def test_nt_xent_has_no_hard_negatives(here, capfd):
    flags = [*SMALL, "--data", DATA / "nli.csv", "--objective", "nt-xent"]
    refuse("simcse", capfd, r"--objective nt-xent: .* has 3 columns, wanted a text and its .*", *flags)
