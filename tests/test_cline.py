"""cline.py: its losses against formulas written out, its triples and their labels, its model, whole runs."""
import itertools
import math
import os
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoModel, AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

import cline
import running
from cline import CODES, KINDS, contrastive_loss, replaced_token_loss, total_loss
from kernels.training import tokens
from running import DATA, SENTENCES, equal, free_port, metrics, refuse, run
from test_losses import agree, points

SCRATCH = ["--model", "scratch", "--tagger", "lexicon"]
WORDNET = ["--wordnet", str(DATA / "wordnet")]
COMMAND = [*SCRATCH, *WORDNET, "--data", str(DATA / "sentences.txt")]
both_forms = pytest.mark.parametrize("form", ["paper", "code"])


# ── the losses, float64 to 1e-10 ──


def contrastive_written_out(o, s, a, form):
    total = 0
    for i in range(len(o)):
        if form == "paper":
            positive, negative = torch.exp(o[i] @ s[i]), torch.exp(o[i] @ a[i])
            total = total - torch.log(positive / (positive + negative)) / len(o)
        else:                                                  # binary cross entropy of sigmoids, of 2B pairs
            positive, negative = torch.sigmoid((o[i] * s[i]).mean()), torch.sigmoid((o[i] * a[i]).mean())
            total = total - (torch.log(positive) + torch.log(1 - negative)) / (2 * len(o))
    return total


@both_forms
@pytest.mark.parametrize("b, d", [(1, 1), (1, 7), (2, 16), (9, 5)])
def test_contrastive_loss(form, b, d):
    agree(lambda *x: contrastive_loss(*x, form), lambda *x: contrastive_written_out(*x, form),
          *(points(b, d, seed) for seed in range(3)))


def test_contrastive_loss_of_equal_texts():
    z = points(5, 8, 3)
    assert contrastive_loss(z, z, z).item() == pytest.approx(math.log(2), abs=1e-14)
    a = (z * z).mean(1)
    wanted = ((F.softplus(-a) + F.softplus(a)) / 2).mean().item()
    assert contrastive_loss(z, z, z, "code").item() == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("size", [3.0, 30.0, 300.0, 30000.0])
def test_contrastive_loss_of_large_products(size):
    """log(1 + exp(x)) without exp of a large x, its gradient σ(x): also where softplus has a threshold."""
    o = torch.tensor([[size], [size]], dtype=torch.float64, requires_grad=True)
    s, a = torch.tensor([[0.5], [-0.5]], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    loss = contrastive_loss(o, s, a)
    loss.backward()
    x = [-size / 2, size / 2]
    wanted = sum(max(v, 0) + math.log1p(math.exp(-abs(v))) for v in x) / 2
    assert loss.item() == pytest.approx(wanted, rel=1e-14)
    sigmoids = [math.exp(min(v, 0)) / (1 + math.exp(-abs(v))) for v in x]
    assert o.grad[:, 0].tolist() == pytest.approx([-sigmoids[0] / 4, sigmoids[1] / 4], rel=1e-13)


@both_forms
def test_contrastive_loss_follows_the_dtype(form):
    z = points(4, 768, 4) / 4
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        views = [(z + i).to(dtype) for i in range(3)]
        loss, exact = contrastive_loss(*views, form), contrastive_loss(*(v.double() for v in views), form)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=tolerance)


@pytest.mark.parametrize("call, wanted", [
    (lambda z: contrastive_loss(z, z, z, "papers"), "form: found 'papers', wanted 'paper' or 'code'"),
    (lambda z: contrastive_loss(z, z[:1], z), r"found \[\(3, 4\), \(1, 4\), \(3, 4\)\], wanted \(B, D\) thrice"),
    (lambda z: contrastive_loss(z[0], z[0], z[0]), "wanted .B, D. thrice"),
    (lambda z: replaced_token_loss(z, z.long(), "both"), "form: found 'both'"),
    (lambda z: replaced_token_loss(z, z.long(), "code"), r"logits: found \(3, 4\), wanted \(3, 4, 3\)"),
    (lambda z: replaced_token_loss(z[..., None].expand(3, 4, 3), z.long()),
     r"logits: found \(3, 4, 3\), wanted \(3, 4\)"),
    (lambda z: total_loss([z.sum()], z[0]), "shorter|longer")])
def test_losses_refuse(call, wanted):
    with pytest.raises(ValueError, match=wanted):
        call(points(3, 4, 5))


def replaced_written_out(logits, labels, form):
    total, count = 0, 0
    for row, classes in zip(logits, labels.tolist()):
        for x, label in zip(row, classes):
            if label != -100:
                p = torch.sigmoid(x) if form == "paper" else torch.exp(x[label]) / torch.exp(x).sum()
                total, count = total - torch.log(p if label or form == "code" else 1 - p), count + 1
    return total / count


@both_forms
@pytest.mark.parametrize("labels", [
    [[0, 1, 1, 0]], [[1]], [[-100, 0, 2, 1, -100], [-100, 1, -100, -100, -100]], [[-100, -100], [2, 0], [0, -100]]])
def test_replaced_token_loss(form, labels):
    labels = torch.tensor(labels)
    shape = (*labels.shape, 3) if form == "code" else labels.shape
    logits = points(labels.numel(), 3 if form == "code" else 1, 1).view(shape)
    agree(lambda x: replaced_token_loss(x, labels, form), lambda x: replaced_written_out(x, labels, form), logits)
    noise = torch.where(labels.view(*labels.shape, *[1] * (form == "code")) == -100, 1e4, 0.0)
    assert replaced_token_loss(logits + noise, labels, form) == replaced_token_loss(logits, labels, form)
    assert replaced_token_loss(logits.bfloat16(), labels.to(torch.int8), form).dtype == torch.float32


def test_replaced_token_loss_counts_all_that_is_above_0_as_replaced():
    logits, labels = points(2, 6, 6), torch.tensor([[0, 1, 2, 3, 4, 5], [-100, 1, 0, 5, 0, 2]])
    assert replaced_token_loss(logits, labels) == replaced_token_loss(logits, labels.clamp(max=1))


@both_forms
def test_no_token_counts(form):
    logits = torch.randn(2, 3, 3, requires_grad=True)
    loss = replaced_token_loss(logits if form == "code" else logits[:, :, 0], torch.full((2, 3), -100), form)
    loss.backward()
    assert loss == 0 and loss.dtype == torch.float32 and not logits.grad.any()


def test_total_loss():
    losses = torch.tensor([2.0, 0.3, 0.7], dtype=torch.float64)
    s = torch.tensor([0.6, -0.4, 0.0], dtype=torch.float64)
    agree(total_loss, lambda x, s: sum(math.e ** -s[i] * x[i] + (s[i] if i != 1 else 0) for i in range(3)),
          losses, s)                                           # max(0, 0) as s: slope 1
    assert total_loss(list(losses), list(s)) == total_loss(losses, s)
    optimal = torch.log(losses.clamp(min=1))                   # then the weight is 1 / max(L, 1)
    for i, move in itertools.product(range(3), (-0.1, 0.1)):
        assert total_loss(losses, optimal) <= total_loss(losses, optimal + move * torch.eye(3)[i])


# ── triples ──


@pytest.fixture(scope="module")
def wordnet():
    return cline.WordNet(DATA / "wordnet")


def tagged(text, wordnet):
    return next(cline.tag_words([text], None, wordnet))


class Luck(random.Random):
    """The first number drawn, which chooses the kind, is given."""
    def __init__(self, first):
        super().__init__(0)
        self.first = first

    def shuffle(self, words):
        super().shuffle(words)
        self.random = lambda: self.__dict__.pop("random") and self.first


@pytest.mark.parametrize("text, side, first, kind", [
    *(("The old dog chased two hounds, late.", *rest) for rest in (
        ("synonym", 0.0, "hypernym"), ("synonym", 0.33, "hypernym"), ("synonym", 0.34, "synonym"),
        ("synonym", 0.66, "synonym"), ("synonym", 0.67, "inflected"), ("synonym", 0.99, "inflected"),
        ("antonym", 0.49, "antonym"), ("antonym", 0.51, "random"))),
    ("thing", "synonym", 0.0, "inflected"), ("Baker!", "synonym", 0.0, "hypernym"),            # falls through
    ("the soon", "synonym", 0.0, "synonym"), ("fully", "synonym", 0.0, None), ("dog", "antonym", 0.0, "random"),
    ("day", "antonym", 0.0, "antonym"), ("of him", "antonym", 0.0, None)])
def test_a_text_has_one_kind_of_replacement(wordnet, text, side, first, kind):
    new, labels = cline.replace_words(text, tagged(text, wordnet), KINDS[side], 1, wordnet, Luck(first))
    assert {code for *_, code in labels} - {0} == ({CODES[kind]} if kind else set())
    assert (new == text) == (kind is None)


def pieces(text, spans):
    """The text without the words at the spans, and these."""
    ends = [0, *(place for span in spans for place in span[:2]), len(text)]
    return [text[a:b] for a, b in zip(ends[::2], ends[1::2])], [text[start:end] for start, end, *_ in spans]


@pytest.mark.parametrize("side, rate", [("synonym", 0.4), ("antonym", 0.2), ("antonym", 0.05), ("antonym", 1)])
def test_replacements(wordnet, side, rate):
    """What is between candidates stays; a replaced word is an option of its kind; never more than the rate of
    all words."""
    draw, full, kinds, names = random.Random(1), 0, Counter(), {code: kind for kind, code in CODES.items()}
    for text, in SENTENCES[:150]:
        words = tagged(text, wordnet)
        new, labels = cline.replace_words(text, words, KINDS[side], rate, wordnet, draw)
        candidates = [word for word in words if word[2]]
        (kept, old), (still, found) = pieces(text, candidates), pieces(new, labels)
        assert kept == still and len(old) == len(found)
        replaced, most = sum(code > 0 for *_, code in labels), math.floor(rate * len(words) + 1e-9)
        assert replaced <= most
        full += replaced == min(most, len(candidates))
        for before, after, (*_, pos), (*_, code) in zip(old, found, candidates, labels):
            kind = names.get(code)
            assert after in wordnet.options(kind, before.lower(), pos) if kind else after == before
            assert (after.lower() != before.lower()) == (code > 0)
            kinds[kind] += 1
    assert full > 20 and set(kinds) - {None} == set(KINDS[side])


def triples_of(*flags):
    args = cline.make_parser().parse_args([*COMMAND, *map(str, flags)])
    return cline.make_triples(*cline.load_data(args.data, args), args), args


def test_triples_depend_on_the_seed_alone(capsys):
    one, _ = triples_of()
    said = r"triples  words tagged by lexicon; replaced: ([\d.]+) % .* synonym side .*, ([\d.]+) % .* antonym side"
    printed = re.search(said, capsys.readouterr().out)
    assert one == triples_of()[0] != triples_of("--seed", 1)[0]
    assert [row[0] for row in one] == [text for text, in SENTENCES]
    words = sum(len(cline.WORD.findall(row[0])) for row in one)
    for side, share in zip((3, 4), printed.groups()):
        replaced = sum(code > 0 for row in one for *_, code in row[side])
        assert float(share) == pytest.approx(100 * replaced / words, abs=0.051)


def test_texts_without_replacements_are_left_out(tmp_path, bert):
    """On either side; of those that stay the place in the file is kept, for messages."""
    (tmp_path / "few.txt").write_text("He was not there.\nThe dog ate.\nFully.\nThe dog.\n")
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert))
    rates = "--synonym-rate", 0.5, "--antonym-rate", 0.5
    for flags, kept in ([], [1, 3]), (["--synonym-rate", 0.1], []), (["--antonym-rate", 0.1], []):
        triples, args = triples_of("--data", tmp_path / "few.txt", "--max-length", 99, *rates, *flags)
        assert len(triples) == 4 and triples[0] == ("He was not there.",) * 3 + ([], [])
        rows, _ = cline.tokenise_triples(triples, model, args)
        assert [row[-1] for row in rows] == kept
    tokens = [(None, i) for i in range(5, 50, 2)]
    assert cline.name_rows(tokens, [3, 0, 1]) == "rows 12, 6, 8, ..."


def test_saved_triples_are_read_again(tmp_path):
    triples, args = triples_of()
    triples[0] = ('He said "no",\nthen', 'He said "not",\nthen', "She, 'yes'", [(3, 7, 0), (9, 12, 2)], [(0, 3, 5)])
    triples[1] = ("He", "He", "He", [], [])
    cline.save_triples(triples, tmp_path / "triples.csv")
    read, wordnet = cline.load_data(tmp_path / "triples.csv", args)
    assert read == triples and wordnet is None
    assert [path.name for path in tmp_path.iterdir()] == ["triples.csv"]


def test_three_columns_are_aligned():
    words = [(0, 1, 0), (2, 5, 1), (6, 9, 0), (9, 10, 0), (11, 14, 1), (15, 18, 0), (18, 19, 0)]
    assert cline.new_words("A dog, a cat.", "A big dog, one cat.") == words
    labels = [(0, 1, 0), (2, 3, 1)], [(0, 1, 1), (2, 3, 0)]
    assert cline.read_triple(["a b", "a c", "d b"], "") == ("a b", "a c", "d b", *labels)


# ── labels of sub-words ──

WORDS = ["Zoë's", "naïve", "dog", "isn't", "a", "bread maker", "—", "café", "go", "unbelievably", "日本", "once more"]


def byte_level(trim):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = dict(bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>")
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[*marks.values()], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([" ".join(WORDS)] * 2 + [text for text, in SENTENCES[:40]], trainer)
    ends = dict(trim_offsets=trim, add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), **ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token="<s>", sep_token="</s>", **marks)


def word_pieces():
    letters = sorted(set("".join(WORDS)) | set("abcdefghijklmnopqrstuvwxyz"))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + x for x in letters)]
    pieces += ["dog", "un", "##believ", "bread", "##ker"]
    return BertTokenizer({piece: i for i, piece in enumerate(pieces)}, do_lower_case=False)


def released_scan(sub_words, text, intervals, other, one_symbol_a_byte):
    """The released code's: a running offset in bytes; the label is that of the interval which holds a
    sub-word's first byte."""
    raw, offset, labels = text.encode(), 0, []
    for token in sub_words:
        labels.append(next((label for start, end, label in intervals if start <= offset <= end), other))
        if one_symbol_a_byte:                                  # that of the leading space included
            offset += len(token)
        else:
            offset += len(token.removeprefix("##").encode()) + (raw[offset : offset + 1] == b" ")
    assert offset == len(raw)
    return labels


@both_forms
@pytest.mark.parametrize("kind", ["byte-level", "untrimmed", "word pieces"])
def test_labels_are_those_of_the_released_scan(form, kind):
    """Multi-word replacements, letters of several bytes, words of many sub-words."""
    tokenizer = word_pieces() if kind == "word pieces" else byte_level(trim=kind == "byte-level")
    draw, seen = random.Random(3), Counter()
    for _ in range(60):
        words = draw.choices(WORDS, k=draw.randint(1, 9))
        codes = [draw.choice((None, 0, 2, 5)) for _ in words]
        starts = itertools.accumulate((len(word) + 1 for word in words), initial=0)
        spans = [(start, start + len(word), code) for start, word, code in zip(starts, words, codes)]
        spans, text = [span for span in spans if span[2] is not None], " ".join(words)
        encoding = tokenizer(text).encodings[0]
        labels = cline.token_labels(text, spans, encoding, 2, SimpleNamespace(form=form))
        before = lambda letter: len(text[:letter].encode()) - 1
        intervals = [(before(start), before(end), 2 if code else 0) for start, end, code in spans]
        other = 0 if form == "paper" else -100
        scan = released_scan(encoding.tokens[1:-1], text, intervals, other, kind != "word pieces")
        assert labels.dtype == np.int8 and labels.tolist() == [-100, *scan, -100]
        seen.update(labels.tolist())
    assert min(seen[0], seen[2], seen[-100]) > 50


def test_tokenised_triples_are_cut_with_their_labels(bert):
    """In the middle of a replaced word too; a row that then differs no more is left out."""
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert))
    rows = [("a dog eats", "a hound eats", "a cat eats", [(2, 7, 2), (8, 12, 0)], [(2, 5, 4)]),
            ("the small dog", "the small hound", "a cat", [(10, 15, 2)], [(0, 1, 1)]),
            ("a", "b", "c", [(0, 1, 2)], [(0, 1, 4)])]
    (first, last), cut = cline.tokenise_triples(rows, model, SimpleNamespace(form="paper", max_length=8))
    assert cut == 5 and (first[5], last[5]) == (0, 2)          # 6 letters of each and two special tokens
    assert [len(x) for x in first[:5]] == [8] * 5
    assert first[3].tolist() == [-100, 0, 1, 1, 1, 1, 1, -100]
    assert first[4].tolist() == [-100, 0, 2, 2, 2, 0, 0, -100]
    assert [x.tolist() for x in last[3:5]] == [[-100, 1, -100], [-100, 2, -100]]


# ── the model ──


def fixed_masks(ids, may, tokenizer):
    """Each fifth place, so that rows have the same masks in every batch."""
    chosen = may & (torch.arange(ids.shape[1]) % 5 == 2)
    return torch.where(chosen, tokenizer.mask_token_id, ids), chosen


def one_by_one(model, rows, masks, form):
    """MLM, RTD, CTS of rows encoded one text at a time without padding, by the library's own heads."""
    vectors, mlm, rtd, special = [[], [], []], [], [], torch.tensor(model.tokenizer.all_special_ids)
    for row in rows:
        for view, ids in enumerate(row[:3]):
            ids = torch.from_numpy(ids).long()[None]
            may = ~torch.isin(ids, special) & (view == 0) & masks
            masked, chosen = fixed_masks(ids, may, model.tokenizer)
            output = model.lm(input_ids=masked, output_hidden_states=True)
            hidden = output.hidden_states[-1]
            z = hidden[0, 0]
            vectors[view].append(z if form == "paper" else torch.tanh(z @ model.head.weight.T + model.head.bias))
            mlm.append(F.cross_entropy(output.logits[chosen], ids[chosen], reduction="none"))
            if view:
                labels, logits = torch.from_numpy(row[view + 2]).long(), model.rtd(hidden)[0]
                logits, labels = logits[labels != -100], labels[labels != -100]
                if form == "code":
                    rtd.append(F.cross_entropy(logits, labels, reduction="none"))
                else:
                    truth = (labels > 0).float()
                    rtd.append(F.binary_cross_entropy_with_logits(logits[:, 0], truth, reduction="none"))
    cts = contrastive_written_out(*map(torch.stack, vectors), form)
    return (torch.cat(mlm).mean(), torch.cat(rtd).mean(), cts), vectors


def prepared(form, bert, texts=9):
    triples, args = triples_of("--form", form, "--model", bert, "--max-length", 256)
    model = cline.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    return model, cline.tokenise_triples(triples[:texts], model, args)[0], args


@both_forms
def test_compute_loss(form, bert, monkeypatch):
    """Value and every gradient against texts encoded one by one, whatever the groups."""
    model, rows, args = prepared(form, bert)
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    torch.nn.init.normal_(model.log_variances)
    torch.nn.init.normal_(model.rtd.weight if form == "paper" else model.rtd[3].weight)
    expected, _ = one_by_one(model, rows, True, form)
    loss, (names, weights) = total_loss(expected, model.log_variances), zip(*model.named_parameters())
    wanted = dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True)))
    for cost in (0, 10**6):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        batch = cline.make_batch(rows, model)
        assert (len(batch) > 5) == (cost == 0)
        total, values = cline.compute_loss(model, batch, len(rows), args)
        found = [values[name].item() for name in ("loss", "mlm", "rtd", "cts")]
        assert found == pytest.approx([x.item() for x in (loss, *expected)], rel=1e-4)
        model.zero_grad()
        total.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_batch_without_masks(bert, monkeypatch):
    model, rows, args = prepared("paper", bert)
    monkeypatch.setattr(torch, "rand", lambda shape, device: torch.ones(shape))
    loss, values = cline.compute_loss(model, cline.make_batch(rows, model), len(rows), args)
    loss.backward()
    assert values["mlm"] == 0 and loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@both_forms
def test_sentence_probe(form, bert):
    model, rows, args = prepared(form, bert, texts=70)
    model.train()
    with torch.no_grad():
        (_, rtd, cts), (original, synonym, antonym) = one_by_one(model, rows, False, form)
    margins = [(o @ s - o @ a).item() for o, s, a in zip(original, synonym, antonym)]
    result = cline.sentence_probe(model, rows, args)
    assert model.training and result["hits"] == pytest.approx(100 * np.mean([m > 0 for m in margins]))
    wanted = [np.mean(margins), rtd.item(), cts.item()]
    assert [result[name] for name in ("margin", "rtd", "cts")] == pytest.approx(wanted, rel=1e-3)


# ── whole runs ──


def few(folder, rows=36):
    """COMMAND with the first rows: 36 are four batches of 8 and one of 4."""
    (folder / "few.txt").write_text("\n".join(text for text, in SENTENCES[:rows]))
    return [*SCRATCH, *WORDNET, "--data", folder / "few.txt", "--batch-size", 8]


@both_forms
def test_resume_is_exact_and_evaluation_leaves_no_trace(form, tmp_path, monkeypatch):
    """Step 6 begins the second epoch; step 4, which the interrupted run did after its evaluation, is done
    again."""
    flags = [*few(tmp_path), "--form", form, "--held-out", 4, "--steps", 6, "--eval-every", 3]
    whole, seldom = run("cline", tmp_path / "whole", *flags), run("cline", tmp_path / "x", *flags, "--eval-every", 9)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(cline, "sum_gradients", Mock(side_effect=[None] * 4 + [KeyboardInterrupt]))
        run("cline", tmp_path / "parts", *flags)
    assert len(metrics(tmp_path / "parts")) == 4
    parts = run("cline", tmp_path / "parts", *flags, "--resume")
    assert [step | {"seconds": 0} for step in parts.steps] == [step | {"seconds": 0} for step in whole.steps]
    assert equal(parts.state, whole.state)
    models = [load_file(tmp_path / part / "model.safetensors") for part in ("parts", "whole")]
    assert equal(*models)
    assert [sum("dev_margin" in step for step in x.steps) for x in (whole, seldom)] == [2, 1]
    assert [part for part in ("model", "optimizer", "random") if not equal(whole.state[part], seldom.state[part])] == []


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_impl_follows_eager(impl, tmp_path):
    if impl == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU's Triton, and this file stays on the CPU")
    flags = [*few(tmp_path, 12), "--steps", 2, "--batch-size", 4]
    eager, other = ([step["mlm"] for step in run("cline", tmp_path / x, *flags, "--impl", x).steps]
                    for x in ("eager", impl))
    assert other == pytest.approx(eager, abs=1e-4) and eager[0] > 1


def test_learns(tmp_path):
    """All three losses fall, and on texts that were held out the margin opens."""
    flags = [*COMMAND, "--steps", 150, "--batch-size", 16, "--eval-every", 50, "--held-out", 60]
    result = run("cline", tmp_path / "out", *flags)
    mean = lambda name, steps: np.mean([step[name] for step in steps])
    fall = {name: mean(name, result.steps[-4:]) / mean(name, result.steps[:4]) for name in ("mlm", "rtd", "cts")}
    assert fall["mlm"] < 0.8 and fall["rtd"] < 0.4 and fall["cts"] < 1
    margins = [step["dev_margin"] for step in result.steps if "dev_margin" in step]
    before, after = (float(result.said["done"].split()[i].strip(",")) for i in (1, 3))     # hits 25.000 → 78.333
    assert len(margins) == 3 and margins[-1] > max(0.01, *margins[:-1]) and before < 40 and after > 60


def one_of_several(rank, *rest):
    cline.mask_tokens = fixed_masks
    running.one_of_several(rank, *rest)


def test_several_processes_equal_one(tmp_path, bert, monkeypatch):
    """With masks that do not depend on the process. Ranks have different numbers of masked and of scored tokens,
    and of rows, and what is no mean, max(s, 0), counts once."""
    flags = [*few(tmp_path, 23), "--model", bert, "--form", "code", "--steps", 3, "--lr", 1e-4, "--warmup-steps", 1,
             "--max-length", 64, "--held-out", 2]
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    one, rest = run("cline", tmp_path / "one", *flags), (3, free_port(), "cline", tmp_path / "three", flags)
    torch.multiprocessing.start_processes(one_of_several, rest, 3, start_method="forkserver")
    three, state = metrics(tmp_path / "three"), torch.load(tmp_path / "three" / "state.pt", weights_only=True)
    for name in one.steps[0].keys() - {"seconds"}:
        assert [step[name] for step in three] == pytest.approx([step[name] for step in one.steps], rel=1e-5), name
    assert torch.load(tmp_path / "three" / "norms") == pytest.approx(one.norms, rel=1e-4)
    for key, weight in state["model"].items():
        if not key.endswith("key.bias"):   # softmax ignores it: Adam makes the rounding of its gradient large
            torch.testing.assert_close(weight, one.state["model"][key], atol=2e-4, rtol=0, msg=key)


@both_forms
def test_the_folder_is_the_encoder(form, tmp_path, bert):
    """By the line that was printed; in the code's form with the trained pooler."""
    flags = ["--model", bert, "--form", form, "--steps", 2, "--batch-size", 4, "--max-length", 64]
    result = run("cline", tmp_path / "out", *few(tmp_path), *flags)
    encoder = eval(result.said["load"].split("  or  ")[1], {"AutoModel": AutoModel}).eval()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("The dog ate.", return_tensors="pt")
    hidden = result.model.eval().encoder(**tokens).last_hidden_state
    output = encoder(**tokens)
    torch.testing.assert_close(output.last_hidden_state, hidden)
    assert (encoder.pooler is None) == (form == "paper")
    if form == "code":
        torch.testing.assert_close(output.pooler_output, torch.tanh(result.model.head(hidden[:, 0])))
        torch.testing.assert_close(result.model.read(["The dog ate."]), output.pooler_output)


def test_saved_triples_make_the_same_run(tmp_path, bert):
    """Also resumed, when the file is there already."""
    flags, file = [*few(tmp_path), "--model", bert, "--max-length", 64, "--steps", 3], tmp_path / "triples.csv"
    made = run("cline", tmp_path / "made", *flags, "--save-triples", file)
    content = file.read_bytes()
    read = run("cline", tmp_path / "read", *flags, "--data", file)
    assert read.losses == made.losses and equal(read.state["model"], made.state["model"])
    resumed = run("cline", tmp_path / "made", *flags, "--save-triples", file, "--resume")
    assert resumed.losses == made.losses and file.read_bytes() == content


# ── bad input ──

START = [*COMMAND, "--batch-size", "2", "--steps", "1"]
RATES = ["--synonym-rate", "1", "--antonym-rate", "1"]
LABELS = r"a\.csv line 1: '%s', wanted start:end:code \(0 kept, 1 to 5 replaced\) of words of the text, in order"


@pytest.mark.parametrize("name, content, wanted", [
    ("a.txt", "He was not.\nIt is his.\nThey were.\n",
     r"a\.txt: 0 rows have replaced words on both sides, wanted at least --batch-size \+ --held-out, .* 2 \+ 0"),
    ("a.txt", "A dog ate.\n\n", r"a\.txt line 2: an empty cell; fill it or delete the row"),
    ("a.csv", "A b,c\n", r"a\.csv line 1: 2 columns, wanted 1 \(text\), 3 \(original, synonym, antonym\) or 5 "
                         r"\(and synonym_words, antonym_words\)"),
    ("a.csv", "a b,c,d,e\n", r"a\.csv line 1: 4 columns, wanted .*"),
    ("a.csv", "A,b,\n", r"a\.csv line 1: an empty cell; .*"),
    ("a.csv", "A,b,c,0:1:2,x\n", LABELS % "x"),
    ("a.csv", "A,b,c,0:1:2,0-1-4\n", LABELS % "0-1-4"),
    ("a.csv", "A,b,c,0:2:2,0:1:4\n", LABELS % "0:2:2"),
    ("a.csv", "A,b c,c,2:3:2 0:1:2,0:1:4\n", LABELS % "2:3:2 0:1:2"),
    ("a.csv", "A,b,c,0:1:6,0:1:4\n", LABELS % "0:1:6"),
    ("a.csv", "A b,A b,c d\nA b,A c,A b\n", r"a\.csv: 0 rows have .*"),
    ("a.txt", "A dog ate.\nA cat ate.\nThe cat ran.\n", r"a\.txt: 3 rows have .*, which are 2 \+ 2")])
def test_bad_data(tmp_path, monkeypatch, capfd, name, content, wanted):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    refuse("cline", capfd, wanted, *START, "--data", name, *RATES, *["--held-out", 2] * wanted.endswith("2 .. 2"))


@pytest.mark.parametrize("flags, wanted", [
    ("--tagger xx_none", r"--tagger xx_none: .*; install it, or take lexicon"),
    ("--save-triples good.txt", r"--save-triples good\.txt: wanted a \.csv that does not exist, in a folder that does"),
    ("--save-triples none/a.csv", r"--save-triples none/a\.csv: wanted .*"),
    ("--save-triples good.csv", r"--save-triples good\.csv: wanted .*"),
    ("--save-triples new.csv --data good.csv", r"--save-triples new\.csv: good\.csv holds triples already"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--synonym-rate nan", r"argument --synonym-rate: nan: wanted a number of at least 0"),
    ("--wordnet good.csv", r"--wordnet good\.csv: data\.noun: Not a directory; wanted the folder of .*")])
def test_bad_flags(tmp_path, monkeypatch, capfd, flags, wanted):
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text("A dog.,A hound.,A cat.\n" * 4)
    refuse("cline", capfd, wanted, *START, *flags.split())


def test_texts_need_a_wordnet(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    wanted = r".* holds texts, which want --wordnet, a WordNet folder: Debian's package .* has /usr/share/wordnet"
    refuse("cline", capfd, wanted, *SCRATCH, "--data", DATA / "sentences.txt")
