"""cline.py: its losses against formulas written out, its triples and their labels, its model, whole runs."""
import itertools
import math
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
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

import cline
import running
from cline import CODES, KINDS, contrastive_loss, replaced_token_loss, total_loss
from kernels.training import tokens
from running import DATA, SENTENCES, equal, free_port, refuse, run
from test_losses import agree, points
from test_tacl import check_processes, check_resume

SCRATCH = ["--model", "scratch", "--tagger", "lexicon", "--wordnet", str(DATA / "wordnet")]
COMMAND = [*SCRATCH, "--data", str(DATA / "sentences.txt")]
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
@pytest.mark.parametrize("b, d", [(1, 1), (2, 16), (9, 5)])
def test_contrastive_loss(form, b, d):
    views = [points(b, d, seed) for seed in range(3)]
    agree(lambda *x: contrastive_loss(*x, form), lambda *x: contrastive_written_out(*x, form), *views)
    assert contrastive_loss(*[views[0]] * 3).item() == pytest.approx(math.log(2), abs=1e-14)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        loss = contrastive_loss(*(view.to(dtype) for view in views), form)
        exact = contrastive_loss(*(view.to(dtype).double() for view in views), form).item()
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, rel=tolerance)
    for size in (10, 1e3, 1e8):                                # log(1 + exp(x)) without exp of a large x
        o, s, a = (math.sqrt(size) * view for view in views)
        x, loss = (o * (a - s)).sum(1), contrastive_loss(o.requires_grad_(), s, a)
        assert loss.item() == pytest.approx(np.logaddexp(0, x.numpy()).mean(), rel=1e-13)
        wanted = torch.sigmoid(x)[:, None] * (a - s) / b
        torch.testing.assert_close(torch.autograd.grad(loss, o)[0], wanted, rtol=1e-10, atol=1e-300)


def replaced_written_out(logits, labels, form):
    losses = []
    for place in (labels != -100).nonzero():
        x, label = logits[tuple(place)], labels[tuple(place)]
        p = torch.sigmoid(x) if form == "paper" else torch.exp(x[label]) / torch.exp(x).sum()
        losses.append(-torch.log(p if label or form == "code" else 1 - p))
    return sum(losses) / len(losses)


@both_forms
@pytest.mark.parametrize("labels", [[[0, 1, 1]], [[-100, 0, 2, 1, -100], [-100, 1, -100, -100, -100]]])
def test_replaced_token_loss(form, labels):
    """What does not count has no part in it; where none counts it is 0; all above 0 is one class (paper)."""
    labels = torch.tensor(labels)
    logits = points(labels.numel(), 3, 1).view(*labels.shape, 3)[..., slice(3) if form == "code" else 0]
    loss = lambda x, truth=labels: replaced_token_loss(x, truth, form)
    agree(loss, lambda x: replaced_written_out(x, labels, form), logits)
    noisy = logits.clone()
    noisy[labels == -100] = 1e4
    assert loss(noisy) == loss(logits)
    assert loss(logits.bfloat16(), labels.to(torch.int8)).dtype == torch.float32
    assert form == "code" or loss(logits) == loss(logits, torch.where(labels > 0, labels + 3, labels))
    leaf = logits.float().requires_grad_()
    none = loss(leaf, torch.full_like(labels, -100))
    assert none == 0 and none.dtype == torch.float32 and not torch.autograd.grad(none, leaf)[0].any()


def test_total_loss():
    losses = torch.tensor([2.0, 0.3, 0.7], dtype=torch.float64)
    s = torch.tensor([0.6, -0.4, 0.0], dtype=torch.float64)
    agree(total_loss, lambda x, s: sum(math.e ** -s[i] * x[i] + (s[i] if i != 1 else 0) for i in range(3)),
          losses, s)                                           # max(0, 0) as s: slope 1
    assert total_loss(list(losses), list(s)) == total_loss(losses, s)
    optimal = torch.log(losses.clamp(min=1))                   # then the weight is 1 / max(L, 1)
    for i, move in itertools.product(range(3), (-0.1, 0.1)):
        assert total_loss(losses, optimal) <= total_loss(losses, optimal + move * torch.eye(3)[i])


@pytest.mark.parametrize("call, wanted", [
    (lambda z: contrastive_loss(z, z, z, "papers"), "form: found 'papers', wanted 'paper' or 'code'"),
    (lambda z: contrastive_loss(z, z[:1], z), r"\[\(3, 4\), \(1, 4\), \(3, 4\)\], wanted \(B, D\) thrice"),
    (lambda z: contrastive_loss(*z), "wanted .B, D. thrice"),
    (lambda z: replaced_token_loss(z, z.long(), "both"), "form: found 'both'"),
    (lambda z: replaced_token_loss(z, z.long(), "code"), r"logits: found \(3, 4\), wanted \(3, 4, 3\)"),
    (lambda z: replaced_token_loss(z[None], z.long()), r"logits: found \(1, 3, 4\), wanted \(3, 4\)"),
    (lambda z: total_loss([z.sum()], z[0]), "shorter|longer")])
def test_losses_refuse(call, wanted):
    with pytest.raises(ValueError, match=wanted):
        call(points(3, 4, 5))


# ── triples ──


@pytest.fixture(scope="module")
def wordnet():
    return cline.WordNet(DATA / "wordnet")


def replaced(text, side, rate, wordnet, draw):
    """(what may be replaced, new text, labels)"""
    [words] = cline.tag_words([text], None, wordnet)
    return words, *cline.replace_words(text, words, KINDS[side], rate, wordnet, draw)


LATE = "The old dog chased two hounds, late."


@pytest.mark.parametrize("text, side, first, kind", [
    (LATE, "synonym", 0.33, "hypernym"), (LATE, "synonym", 0.34, "synonym"),
    (LATE, "synonym", 0.66, "synonym"), (LATE, "synonym", 0.67, "inflected"),
    (LATE, "antonym", 0.49, "antonym"), (LATE, "antonym", 0.51, "random"),
    ("thing", "synonym", 0.0, "inflected"), ("Baker!", "synonym", 0.0, "hypernym"),            # falls through
    ("the soon", "synonym", 0.0, "synonym"), ("fully", "synonym", 0.0, None), ("him", "antonym", 0.0, None),
    ("dog", "antonym", 0.0, "random"), ("day", "antonym", 0.0, "antonym")])
def test_a_text_has_one_kind_of_replacement(wordnet, text, side, first, kind):
    draw = random.Random(0)
    draw.random = lambda: first
    _, new, labels = replaced(text, side, 1, wordnet, draw)
    assert {code for *_, code in labels} - {0} == ({CODES[kind]} if kind else set())
    assert (new == text) == (kind is None)


def pieces(text, spans):
    """The text without the words at the spans, and these."""
    ends = [0, *(place for span in spans for place in span[:2]), len(text)]
    return [text[a:b] for a, b in zip(ends[::2], ends[1::2])], [text[start:end] for start, end, *_ in spans]


@pytest.mark.parametrize("side, rate", [("synonym", 0.4), ("antonym", 0.1), ("antonym", 0.2), ("antonym", 1)])
def test_replacements(wordnet, side, rate):
    """What is between candidates stays; what is replaced is an option of its kind; the rate is the most."""
    draw, full, kinds, names = random.Random(1), 0, Counter(), {code: kind for kind, code in CODES.items()}
    for text, in SENTENCES[:150]:
        words, new, labels = replaced(text, side, rate, wordnet, draw)
        candidates = [word for word in words if word[2]]
        (kept, old), (still, found) = pieces(text, candidates), pieces(new, labels)
        assert kept == still and len(old) == len(found)
        count, most = sum(code > 0 for *_, code in labels), math.floor(rate * len(words) + 1e-9)
        assert count <= most
        full += count == min(most, len(candidates))
        for before, after, (*_, pos), (*_, code) in zip(old, found, candidates, labels):
            kind = names.get(code)
            assert after in wordnet.options(kind, before.lower(), pos) if kind else after == before
            assert (after.lower() != before.lower()) == (code > 0)
            kinds[kind] += 1
    assert full > 20 and set(kinds) - {None} == set(KINDS[side])


def triples_of(*flags):
    args = cline.make_parser().parse_args([*COMMAND, *map(str, flags)])
    return cline.make_triples(*cline.load_data(args.data, args), args), args


def test_triples_depend_on_the_seed_alone(capsys, tmp_path):
    """The shares that are printed are those of the labels. Saved triples are read again."""
    one, args = triples_of()
    said = r"words tagged by lexicon; replaced: ([\d.]+) % .* synonym side .*, ([\d.]+) % .* antonym side"
    printed = re.search(said, capsys.readouterr().out)
    assert one == triples_of()[0] != triples_of("--seed", 1)[0]
    assert [row[0] for row in one] == [text for text, in SENTENCES]
    words = sum(len(cline.WORD.findall(row[0])) for row in one)
    for side, share in zip((3, 4), printed.groups()):
        count = sum(code > 0 for row in one for *_, code in row[side])
        assert float(share) == pytest.approx(100 * count / words, abs=0.051)
    labels = [(3, 7, 0), (9, 12, 2)], [(0, 3, 5)]
    one[0] = 'He said "no",\nthen', 'He said "not",\nthen', "She, 'yes'", *labels
    one[1] = "He", "He", "He", [], []
    cline.save_triples(one, tmp_path / "triples.csv")
    assert cline.load_data(tmp_path / "triples.csv", args) == (one, None)
    assert [path.name for path in tmp_path.iterdir()] == ["triples.csv"]


def test_three_columns_are_aligned():
    words = [(0, 1, 0), (2, 5, 1), (6, 9, 0), (9, 10, 0), (11, 14, 1), (15, 18, 0), (18, 19, 0)]
    assert cline.new_words("A dog, a cat.", "A big dog, one cat.") == words
    texts = "a b", "a c", "d b"
    assert cline.read_triple(texts, "") == (*texts, [(0, 1, 0), (2, 3, 1)], [(0, 1, 1), (2, 3, 0)])


def test_texts_without_replacements_are_left_out(tmp_path, bert):
    """On either side; of those that stay the place in the file is kept, for messages."""
    (tmp_path / "few.txt").write_text("He was not there.\nThe dog ate.\nFully.\nThe dog.\n")
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert))
    for synonyms, antonyms, kept in (0.5, 0.5, [1, 3]), (0.1, 0.5, []), (0.5, 0.1, []):
        rates = ["--synonym-rate", synonyms, "--antonym-rate", antonyms]
        triples, args = triples_of("--data", tmp_path / "few.txt", "--max-length", 99, *rates)
        assert len(triples) == 4 and triples[0] == ("He was not there.",) * 3 + ([], [])
        rows, _ = cline.tokenise_triples(triples, model, args)
        assert [row[-1] for row in rows] == kept
    assert cline.name_rows([(None, 4), (None, 9), (None, 2)], [2, 0]) == "rows 3, 5, ..."


# ── labels of sub-words ──

WORDS = "Zoë's,naïve,dog,isn't,a,bread maker,—,café,go,unbelievably,日本,once more".split(",")


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


def released_scan(sub_words, text, intervals, other, one_symbol_a_byte):
    """The released code's: a running offset in bytes; the label is that of the interval which holds a
    sub-word's first byte."""
    raw, offset, labels = text.encode(), 0, []
    for token in sub_words:
        labels.append(next((label for start, end, label in intervals if start <= offset <= end), other))
        space = raw[offset : offset + 1] == b" "
        offset += len(token) if one_symbol_a_byte else len(token.removeprefix("##").encode()) + space
    assert offset == len(raw)
    return labels


@both_forms
@pytest.mark.parametrize("kind", ["byte-level", "untrimmed", "word pieces"])
def test_labels_are_those_of_the_released_scan(form, kind, bert):
    """Multi-word replacements, letters of several bytes, words of many sub-words."""
    pieces = kind == "word pieces"
    tokenizer = AutoTokenizer.from_pretrained(bert) if pieces else byte_level(trim=kind == "byte-level")
    draw, seen, other = random.Random(3), Counter(), 0 if form == "paper" else -100
    for _ in range(60):
        words = draw.choices([word for word in WORDS if word.isascii() or not pieces], k=draw.randint(1, 9))
        codes = [draw.choice((None, 0, 2, 5)) for _ in words]
        starts = itertools.accumulate((len(word) + 1 for word in words), initial=0)
        spans = [(start, start + len(word), code) for start, word, code in zip(starts, words, codes)]
        spans, text = [span for span in spans if span[2] is not None], " ".join(words)
        encoding = tokenizer(text).encodings[0]
        labels = cline.token_labels(text, spans, encoding, 2, SimpleNamespace(form=form))
        before = lambda letter: len(text[:letter].encode()) - 1
        intervals = [(before(start), before(end), 2 if code else 0) for start, end, code in spans]
        scan = released_scan(encoding.tokens[1:-1], text, intervals, other, not pieces)
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
    for row, view in itertools.product(rows, range(3)):
        ids = torch.from_numpy(row[view]).long()[None]
        may = ~torch.isin(ids, special) & (view == 0) & masks
        masked, chosen = fixed_masks(ids, may, model.tokenizer)
        output = model.lm(input_ids=masked, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        z = hidden[0, 0]
        vectors[view].append(z if form == "paper" else torch.tanh(z @ model.head.weight.T + model.head.bias))
        mlm.append(F.cross_entropy(output.logits[chosen], ids[chosen], reduction="none"))
        if view:
            labels, logits = torch.from_numpy(row[view + 2]).long(), model.rtd(hidden)[0].squeeze(-1)
            rtd.append(replaced_written_out(logits, labels, form) * (labels != -100).sum())
    counted = sum((row[view] != -100).sum() for row in rows for view in (3, 4))
    cts = contrastive_written_out(*map(torch.stack, vectors), form)
    return (torch.cat(mlm).mean(), sum(rtd) / counted, cts), vectors


def prepared(form, bert, texts=9):
    triples, args = triples_of("--form", form, "--model", bert, "--max-length", 256)
    model = cline.build_model(args, SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False))
    return model, cline.tokenise_triples(triples[:texts], model, args)[0], args


@both_forms
def test_compute_loss(form, bert, monkeypatch):
    """Value and every gradient against texts encoded one by one, whatever the groups; by --impl's kernels."""
    model, rows, args = prepared(form, bert)
    decoder_loss = Mock(wraps=cline.decoder_loss)
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    monkeypatch.setattr(cline, "decoder_loss", decoder_loss)
    torch.nn.init.normal_(model.log_variances)
    torch.nn.init.normal_(model.rtd.weight if form == "paper" else model.rtd[3].weight)
    expected, _ = one_by_one(model, rows, True, form)
    loss, (names, weights) = total_loss(expected, model.log_variances), zip(*model.named_parameters())
    wanted = dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True)))
    for cost, args.impl in ((0, "eager"), (10**6, "blockwise")):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        batch = cline.make_batch(rows, model)
        assert (len(batch) > 5) == (cost == 0)
        total, values = cline.compute_loss(model, batch, len(rows), args)
        assert decoder_loss.call_args.kwargs == dict(impl=args.impl)
        found = [values[name].item() for name in ("loss", "mlm", "rtd", "cts")]
        assert found == pytest.approx([x.item() for x in (loss, *expected)], rel=1e-4)
        model.zero_grad()
        total.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)
    monkeypatch.setattr(cline, "mask_tokens", lambda ids, may, _: (ids, may & False))
    loss, values = cline.compute_loss(model, cline.make_batch(rows, model), len(rows), args)
    loss.backward()                                            # a batch without masks
    assert values["mlm"] == 0 and all(p.grad.isfinite().all() for p in model.parameters())


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
    return [*SCRATCH, "--data", folder / "few.txt", "--batch-size", 8]


@both_forms
def test_resume_is_exact_and_evaluation_leaves_no_trace(form, tmp_path, monkeypatch):
    flags = [*few(tmp_path), "--form", form, "--held-out", 4, "--steps", 8, "--eval-every", 3]
    whole, other = check_resume("cline", tmp_path, flags, ["--eval-every", 9], monkeypatch)
    assert [sum("dev_margin" in step for step in x.steps) for x in (whole, other)] == [3, 1]


def test_learns(tmp_path):
    """All three losses fall, and on texts that were held out the margin opens."""
    flags = [*COMMAND, "--synonym-rate", 0.6, "--antonym-rate", 0.6, "--lr", 4e-3, "--steps", 60]
    result = run("cline", tmp_path / "out", *flags, "--batch-size", 16, "--eval-every", 20, "--held-out", 60)
    mean = lambda name, steps: np.mean([step[name] for step in steps])
    for name, most in dict(mlm=0.97, rtd=0.5, cts=0.9).items():
        assert mean(name, result.steps[-4:]) < most * mean(name, result.steps[:4]), name
    margins = [step["dev_margin"] for step in result.steps if "dev_margin" in step]
    before, after = (float(result.said["done"].split()[i].strip(",")) for i in (1, 3))     # hits 47 → 81,
    assert len(margins) == 3 and margins[-1] > max(0.1, *margins[:-1]) and before < 50 and after > 65


def one_of_several(rank, *rest):
    cline.mask_tokens = fixed_masks
    running.one_of_several(rank, *rest)


def test_several_processes_equal_one(tmp_path, bert, monkeypatch):
    """With masks that do not depend on the process. Ranks have different numbers of masked and of scored
    tokens, and of rows; max(s, 0), which is no mean, counts once."""
    flags = [*few(tmp_path, 23), "--model", bert, "--form", "code", "--steps", 3, "--max-length", 64]
    flags += ["--lr", 1e-4, "--warmup-steps", 1, "--held-out", 2]
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    one, out = run("cline", tmp_path / "one", *flags), tmp_path / "three"
    rest = 3, free_port(), "cline", out, flags
    torch.multiprocessing.start_processes(one_of_several, rest, 3, start_method="forkserver")
    check_processes(one, out, torch.load(out / "norms"))


@both_forms
def test_the_folder_is_the_encoder(form, tmp_path, bert):
    """By the line that was printed; in the code's form with the trained pooler. A run on the triples that it
    saved is the same run, and resumed it finds their file."""
    file = tmp_path / "triples.csv"
    flags = [*few(tmp_path), "--model", bert, "--form", form, "--max-length", 64, "--steps", 3]
    flags += ["--save-triples", file]
    result = run("cline", tmp_path / "out", *flags)
    encoder = eval(result.said["load"].split("  or  ")[1], {"AutoModel": AutoModel}).eval()
    words = AutoTokenizer.from_pretrained(tmp_path / "out")("The dog ate.", return_tensors="pt")
    hidden, output = result.model.eval().encoder(**words).last_hidden_state, encoder(**words)
    torch.testing.assert_close(output.last_hidden_state, hidden)
    assert (encoder.pooler is None) == (form == "paper")
    if form == "code":
        torch.testing.assert_close(output.pooler_output, torch.tanh(result.model.head(hidden[:, 0])))
    content = file.read_bytes()
    read = run("cline", tmp_path / "read", *flags[:-2], "--data", file)
    assert read.losses == result.losses and equal(read.state["model"], result.state["model"])
    resumed = run("cline", tmp_path / "out", *flags, "--resume")
    assert resumed.losses == result.losses and file.read_bytes() == content


# ── bad input ──

FILES = {"good.csv": "A dog.,A hound.,A cat.\n" * 4, "none.txt": "He was not.\nIt is his.\nThey were.\n",
         "same.csv": "A b,A b,c d\nA b,A c,A b\n", "blank.txt": "A dog ate.\n\n", "blank.csv": "A,b,\n",
         "two.csv": "A b,c\n", "four.csv": "a b,c,d,e\n", "words.csv": "A,b,c,0:1:2,x\n",
         "long.csv": "A,b,c,0:2:2,0:1:4\n", "order.csv": "A,b c,c,2:3:2 0:1:2,0:1:4\n",
         "kind.csv": "A,b,c,0:1:6,0:1:4\n"}
LABELS = r"csv line 1: '%s', wanted start:end:code \(0 kept, 1 to 5 replaced\) of words of the text, in order"
COLUMNS = r"wanted 1 \(text\), 3 \(original, synonym, antonym\) or 5 \(and synonym_words, antonym_words\)"
FEW = r"rows have replaced words on both sides, wanted at least --batch-size \+ --held-out, which are 2 \+ "


@pytest.mark.parametrize("flags, wanted", [
    ("--data none.txt", rf"none\.txt: 0 {FEW}0"), ("--data same.csv", rf"same\.csv: 0 {FEW}0"),
    ("--data good.csv --held-out 3", rf"good\.csv: 4 {FEW}3"),
    ("--data blank.txt", r"blank\.txt line 2: an empty cell; fill it or delete the row"),
    ("--data blank.csv", r"blank\.csv line 1: an empty cell; .*"),
    ("--data two.csv", r"two\.csv line 1: 2 columns, " + COLUMNS),
    ("--data four.csv", r"four\.csv line 1: 4 columns, " + COLUMNS),
    ("--data words.csv", r"words\." + LABELS % "x"),
    ("--data long.csv", r"long\." + LABELS % "0:2:2"),
    ("--data order.csv", r"order\." + LABELS % "2:3:2 0:1:2"),
    ("--data kind.csv", r"kind\." + LABELS % "0:1:6"),
    ("--tagger xx_none", r"--tagger xx_none: .*; install it, or take lexicon"),
    ("--save-triples new.txt", r"--save-triples new\.txt: wanted a \.csv that does not exist, in a .*"),
    ("--save-triples none/a.csv", r"--save-triples none/a\.csv: wanted .*"),
    ("--save-triples good.csv", r"--save-triples good\.csv: wanted .*"),
    ("--save-triples new.csv --data good.csv", r"--save-triples new\.csv: good\.csv holds triples already"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--synonym-rate nan", r"argument --synonym-rate: nan: wanted a number of at least 0"),
    ("--wordnet good.csv", r"--wordnet good\.csv: data\.noun: Not a directory; wanted the folder of .*"),
    ("--wordnet=", r".*\.txt holds texts, which want --wordnet, a WordNet folder: Debian's package .*")])
def test_bad_input(tmp_path, monkeypatch, capfd, flags, wanted):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(content)
    rates = ["--synonym-rate", 1, "--antonym-rate", 1]
    refuse("cline", capfd, wanted, *COMMAND, "--batch-size", 2, "--steps", 1, *rates, *flags.split())
