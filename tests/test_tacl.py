"""TaCL: the losses against float64 formulas written out token by token, the preparation of its data against the rules of BERT's
generator, and whole small runs."""
import collections
import importlib
import itertools
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (AutoModel, AutoTokenizer, BertConfig, BertForPreTraining, BertModel, DistilBertConfig, DistilBertForMaskedLM,
                          DistilBertModel)

import tacl
from kernels import blockwise
from tacl import decoder_loss, tacl_loss, token_similarity
from test_losses import agree, points
from test_scripts import WORLD, bert, equal, metrics, one_cpu_thread, one_of_several, run  # noqa: F401, fixtures

ROOT = Path(__file__).resolve().parent.parent
LINES = (ROOT / "tests" / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines()


# ── the losses ──


def cosine(a, b):
    return (a @ b) / (a.norm() * b.norm())


def written_out(student, teacher, masked, real, temperature, form):
    """The paper's sum over anchors, divided by their number as the code does; padding in the denominator in the code's form."""
    total, anchors = 0, 0
    for s, t, chosen, inside in zip(student, teacher, masked, real):
        columns = [j for j in range(len(t)) if inside[j] or form == "code"]
        for i in range(len(s)):
            if chosen[i] and inside[i]:
                terms = [torch.exp(cosine(s[i], t[j]) / temperature) for j in columns]
                total, anchors = total - torch.log(torch.exp(cosine(s[i], t[i]) / temperature) / sum(terms)), anchors + 1
    return total / anchors


def batch(b, l, d, seed, share=0.3):
    """(student, teacher, masked, attention mask): padding behind, before and within; the last sequence has no anchor."""
    draw = torch.Generator().manual_seed(seed)
    student, teacher = points(b * l, d, seed).view(b, l, d), points(b * l, d, seed + 1).view(b, l, d)
    real, masked = torch.ones(b, l, dtype=torch.bool), torch.rand(b, l, generator=draw) < share
    for row in range(b):
        real[row] = [torch.arange(l) < l - row, torch.arange(l) >= row, torch.arange(l) % 3 != 1][row % 3]
    masked[0, 1] = True
    if b > 1:
        masked[-1] = False
    return student, teacher, masked, real


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("shape", [(1, 4, 3), (1, 9, 5), (6, 7, 4), (5, 40, 8)], ids=str)
@pytest.mark.parametrize("temperature", [0.01, 0.5])
def test_tacl_loss(impl, form, shape, temperature, monkeypatch):
    """Chosen padding is no anchor, whatever the form. Small strips: sequences of a few anchors share one, long ones are cut."""
    monkeypatch.setattr(blockwise, "SMALL", 0), monkeypatch.setattr(blockwise, "ROWS", 5), monkeypatch.setattr(blockwise, "STRIP", 1)
    student, teacher, masked, real = batch(*shape, seed=sum(shape))
    near = teacher + 0.3 * student                             # an easy task too: a loss near 0
    for x in (student, near):
        agree(lambda s: tacl_loss(s, teacher, masked, real, temperature, form, impl=impl),
              lambda s: written_out(s, teacher, masked, real, temperature, form), x)
        agree(lambda s: tacl_loss(s, teacher, masked.int(), real.long(), temperature, form, impl=impl),
              lambda s: written_out(s, teacher, masked, real, temperature, form), x)


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("form", ["paper", "code"])
def test_tacl_loss_without_padding_and_of_equal_views(form, impl):
    student, teacher, masked, real = batch(4, 11, 6, seed=3)
    real[:] = True
    agree(lambda s: tacl_loss(s, teacher, masked, temperature=0.01, form=form, impl=impl),
          lambda s: written_out(s, teacher, masked, real, 0.01, form), student)
    agree(lambda s: tacl_loss(s, student, masked, form=form, impl=impl),                        # 0.01 is the default
          lambda s: written_out(s, student, masked, real, 0.01, form), student)
    wide = F.normalize(points(44, 48, 4), dim=1).view(4, 11, 48)
    others = [torch.cat([wide[b, :i], wide[b, i + 1:]]) @ wide[b, i] for b, i in masked.nonzero()]
    small = np.mean([torch.log1p(torch.exp((cosines - 1) / 0.01).sum()).item() for cosines in others])
    assert small < 1e-15                                       # exact although 1 + small is 1, also in float32
    assert tacl_loss(wide.float(), wide.float(), masked, form=form, impl=impl).item() == pytest.approx(small, rel=1e-2)
    same = torch.ones(2, 8, 6, dtype=torch.float64)
    assert tacl_loss(same, same, masked[:2, :8], form=form, impl=impl).item() == pytest.approx(math.log(8), abs=1e-12)


def test_forms_differ_by_padding_alone():
    student, teacher, masked, real = batch(3, 9, 5, seed=5)
    tacl_loss = lambda *given, form="paper": tacl.tacl_loss(*given, temperature=0.5, form=form)
    paper, code = (tacl_loss(student, teacher, masked, real, form=form) for form in ("paper", "code"))
    assert code > paper
    other = torch.where(real[..., None], teacher, points(27, 5, 99).view(3, 9, 5))               # what padding holds
    assert tacl_loss(student, other, masked, real) == paper and tacl_loss(student, other, masked, real, form="code") != code
    assert tacl_loss(student, teacher, masked) != paper


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("form", ["paper", "code"])
def test_no_anchor_is_zero_with_zero_gradient(form, impl):
    student, teacher, masked, real = batch(3, 6, 4, seed=7)
    for chosen in (torch.zeros_like(masked), ~real):           # none chosen; padding alone chosen
        student.grad = None
        loss = tacl_loss(student.requires_grad_(), teacher, chosen, real, form=form, impl=impl)
        loss.backward()
        assert loss == 0 and loss.dtype == torch.float64 and torch.equal(student.grad, torch.zeros_like(student))
    assert tacl_loss(student.half(), teacher.half(), torch.zeros_like(masked)).dtype == torch.float32
    one = torch.eye(6, dtype=torch.bool)[:3]                   # a sequence of one token has no negatives, but for padding
    student.grad = None
    loss = tacl_loss(student, teacher, one, one, form=form, impl=impl)
    loss.backward()
    assert (loss == 0 and not student.grad.any()) if form == "paper" else loss > 0.1


def test_the_teacher_gets_no_gradient_and_keeps_its_values():
    student, teacher, masked, real = batch(3, 6, 4, seed=8)
    before = teacher.clone()
    teacher.requires_grad_()
    tacl_loss(student.requires_grad_(), teacher, masked, real).backward()
    assert teacher.grad is None and torch.equal(teacher, before) and student.grad[masked & real].any()
    assert not student.grad[~(masked & real)].any()            # other tokens of the student are not in the loss


def test_tacl_loss_dot_products():
    student, teacher, masked, real = batch(4, 7, 5, seed=9)

    def plain(s):
        total = [-torch.log_softmax((s[b, i] @ teacher[b].T).where(real[b], -torch.inf), 0)[i] for b, i in (masked & real).nonzero()]
        return sum(total) / len(total)
    agree(lambda s: tacl_loss(s, teacher, masked, real, temperature=0.3, similarity="dot"), plain, student)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_tacl_loss_dtypes_and_zero_vectors(dtype, error):
    student, teacher, masked, real = batch(3, 9, 16, seed=10)
    student, teacher = (student + 2 * teacher).to(dtype), teacher.to(dtype)
    exact = tacl_loss(student.double(), teacher.double(), masked, real)
    loss = tacl_loss(student, teacher, masked, real)
    assert loss.dtype == torch.float32 and abs(loss - exact) < error
    student, teacher = student * 0, teacher.clone()
    teacher[:, 2] = 0
    loss = tacl_loss(student.requires_grad_(), teacher, masked, real)                          # cosine 0 with all
    loss.backward()
    anchors = (masked & real).sum(1)
    assert loss.item() == pytest.approx((anchors * real.sum(1).log()).sum().item() / anchors.sum().item(), abs=0.01)
    assert student.grad.isfinite().all() or dtype == torch.float16                             # which ends at 65504


@pytest.mark.parametrize("change, wanted", [
    (dict(teacher=torch.zeros(2, 3, 5)), r"student: \(2, 3, 4\), wanted \(2, 3, 5\), as masked is \(B, L\)"),
    (dict(teacher=torch.zeros(2, 4, 4)), r"teacher: \(2, 4, 4\), wanted \(2, 3, 4\)"),
    (dict(masked=torch.ones(2, 4)), r"student: \(2, 3, 4\), wanted \(2, 4, 4\)"),
    (dict(attention_mask=torch.ones(3)), r"attention_mask: \(3,\), wanted \(2, 3\)"),
    (dict(form="both"), r"form: 'both', wanted paper or code"),
    (dict(similarity="euclid"), r"similarity: 'euclid', wanted cosine or dot"),
    (dict(temperature=0), r"temperature: 0, wanted a number above 0")])
def test_tacl_loss_refuses(change, wanted):
    given = dict(student=torch.zeros(2, 3, 4), teacher=torch.zeros(2, 3, 4), masked=torch.ones(2, 3))
    with pytest.raises(ValueError, match="^" + wanted):
        tacl_loss(**given | change)


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("bias", [True, False])
def test_decoder_loss(impl, bias, monkeypatch):
    monkeypatch.setattr(blockwise, "SMALL", 0), monkeypatch.setattr(blockwise, "ROWS", 3), monkeypatch.setattr(blockwise, "STRIP", 1)
    hidden, weight, biases = points(7, 5, 11), points(13, 5, 12), points(13, 1, 13)[:, 0]
    targets = torch.tensor([0, 12, 3, 3, 7, 1, 0])

    def decoder(w, b):
        return SimpleNamespace(weight=w, bias=b if bias else None)
    agree(lambda h, w, b: decoder_loss(h, decoder(w, b), targets, impl=impl) + 0 * b.sum(),
          lambda h, w, b: sum(torch.log(torch.exp(w @ x + bias * b).sum()) - w[t] @ x - bias * b[t] for x, t in zip(h, targets)) / 7
          + 0 * b.sum(), hidden, weight, biases)
    hidden = hidden[:0].requires_grad_()
    none = decoder_loss(hidden, decoder(weight, biases), targets[:0], impl=impl)
    none.backward()
    assert none == 0 and none.dtype == torch.float64


def test_token_similarity():
    hidden, mask = points(15, 6, 14).view(3, 5, 6), torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 1, 0, 0]]).bool()
    hidden[0, 2] = 0                                           # cosine 0 with all
    found = token_similarity(hidden, mask)
    for row in (0, 1):
        tokens = F.normalize(hidden[row, mask[row]], dim=1)
        wanted = np.mean([(a @ b).item() for a, b in itertools.permutations(tokens, 2)])
        assert found[row].item() == pytest.approx(wanted, abs=1e-12)
    assert found[2].isnan()


# ── the data ──


def reader(words="abcdefghijklmnopqrstuvwxyz"):
    """What the preparation asks of a model: 0 to 4 are special tokens, each word is a token; "##" continues a word."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokenizer = SimpleNamespace(cls_token_id=2, sep_token_id=3, mask_token_id=4, pad_token_id=0)
    return SimpleNamespace(tokenizer=tokenizer, special={0, 1, 2, 3, 4}, ordinary=list(range(5, len(pieces))),
                           continuing={i for i, piece in enumerate(pieces) if piece.startswith("##")}, device=torch.device("cpu"))


def numbered(sizes):
    """Documents of sentences of these sizes, no two tokens alike, so that a token tells where it stood."""
    count = itertools.count(5)
    return [[np.array([next(count) for _ in range(n)], np.int32) for n in document] for document in sizes]


def taken_apart(pair):
    ids, second, is_random = pair
    ids, first = ids.tolist(), int((~second).sum())
    assert ids[0] == 2 and ids[first - 1] == ids[-1] == 3 and not second[:first].any() and second[first:].all()
    return ids[1 : first - 1], ids[first:-1], is_random


def test_pairs_are_whole_sentences_of_one_document_or_two():
    """Where nothing has to be cut: the spans of a document follow each other, and B is the rest of a span or begins elsewhere."""
    draw, longest = random.Random(0), 6
    documents = numbered([[draw.randint(1, longest) for _ in range(draw.randint(2, 9))] for _ in range(60)])
    where = {int(t): (d, s) for d, document in enumerate(documents) for s, sentence in enumerate(document) for t in sentence}
    place = {d: 0 for d in range(60)}
    args, seen = SimpleNamespace(max_length=400), collections.Counter()
    pairs = tacl.sentence_pairs(documents, reader(), args, draw)
    pairs = [taken_apart(pair) for pair in pairs]
    assert [a[0] for a, _, _ in pairs] != sorted(a[0] for a, _, _ in pairs)                      # shuffled
    for a, b, is_random in sorted(pairs):
        (of_a, first), (of_b, other) = where[a[0]], where[b[0]]
        assert first == place[of_a]                            # nothing is left out, nothing comes twice
        for part, document, sentence in ((a, of_a, first), (b, of_b, other)):
            end = where[part[-1]][1] + 1
            assert part == np.concatenate(documents[document][sentence:end]).tolist()
            place[of_a] = end if part is a or not is_random else place[of_a]
        assert (of_a != of_b) if is_random else (of_a == of_b and other == where[a[-1]][1] + 1)
        seen[len(documents[of_a]) - first == 1, is_random] += 1
        if is_random:
            assert where[b[-1]][1] + 1 == len(documents[of_b]) or len(b) >= 2 - len(a)
    assert all(place[d] == len(documents[d]) for d in place)
    assert seen[True, False] == 0 and seen[True, True] > 20    # a last sentence alone has no true next
    assert seen[False, True] > 30 and seen[False, False] > 30


def test_pairs_have_berts_proportions():
    """Half of the splits are random, A ends evenly, a tenth of the documents have a shorter target."""
    args, draw = SimpleNamespace(max_length=23), random.Random(1)                                # pairs of 20 tokens
    documents = numbered([[4] * 5] * 4000)
    pairs = [taken_apart(pair) for pair in tacl.sentence_pairs(documents, reader(), args, draw)]
    assert all(len(a) + len(b) <= 20 for a, b, _ in pairs)
    whole = [(a, b, is_random) for a, b, is_random in pairs if (a[0] - 5) % 20 == 0 and len(a) % 4 == 0]      # a document's first
    full = [(a, b, is_random) for a, b, is_random in whole if not is_random and len(a) + len(b) == 20]
    assert abs(sum(is_random for *_, is_random in whole) / len(whole) - 0.5) < 0.06             # a target of 4 leaves no rest
    sizes = collections.Counter(len(a) // 4 for a, _, _ in full)
    assert set(sizes) == {1, 2, 3, 4} and max(sizes.values()) < 1.2 * min(sizes.values())
    # of targets drawn from 2 to 20, those up to 16 end a span before the document's end: 15 in 19 of a tenth
    short = sum(len(a) + len(b) < 20 for a, b, is_random in whole if not is_random) / sum(not is_random for *_, is_random in whole)
    assert 0.03 < short < 0.1


def test_pairs_are_cut_at_random_ends():
    """From the longer one, from B where they are equal; either end as often."""
    args, draw, front = SimpleNamespace(max_length=12), random.Random(2), collections.Counter()      # pairs of 9
    documents = numbered([[9, 14]] * 3000)
    where = {int(sentence[0]): len(sentence) for document in documents for sentence in document}
    for a, b, is_random in map(taken_apart, tacl.sentence_pairs(documents, reader(), args, draw)):
        assert (len(a), len(b)) == (5, 4)
        for part in (a, b):
            assert part == list(range(part[0], part[0] + len(part)))
            start = max(token for token in where if token <= part[0]) if part is a else None
            if start is not None and where[start] == 9:
                front[part[0] - start] += 1
    total = sum(front.values())
    assert total > 2500 and all(abs(front[n] / total - math.comb(4, n) / 16) < 0.03 for n in range(5))         # binomial of 4
    [pair] = [taken_apart(p) for p in tacl.sentence_pairs(numbered([[4, 9], [3, 3]]), reader(), args, Mock(
        random=lambda: 0.9, randint=lambda a, b: a, randrange=lambda *_: 1, shuffle=lambda x: None))][:1]
    assert pair == ([5, 6, 7, 8], [9, 10, 11, 12, 13], False)                               # 0.9: the true next, cut at the end


@pytest.mark.parametrize("length, chosen", [(3, 0), (4, 1), (10, 2), (23, 3), (30, 4), (64, 10), (200, 16)])
def test_masks_have_berts_number(length, chosen):
    """round(0.15 · length), at least 1, at most a quarter of --max-length, here 16; special tokens never."""
    args, model = SimpleNamespace(max_length=64, whole_word=False), reader()
    ids = np.array([2, *[5 + i % 20 for i in range(length - 3)], 3, 3][:length])
    places = collections.Counter()
    for seed in range(50):
        masked, mask = tacl.choose_and_mask(ids, model, args, random.Random(seed))
        assert mask.sum() == chosen and not mask[[0, -1]].any() and (masked == ids)[~mask].all()
        places.update(mask.nonzero()[0].tolist())
    assert length > 30 or set(places) == set(range(1, length - 2))                              # any of them


def test_masks_have_berts_proportions():
    args, model, seen = SimpleNamespace(max_length=4000, whole_word=False), reader(), collections.Counter()
    ids = np.array([2] + [5, 1, 6] * 1000 + [3])               # an unknown token is not chosen
    for seed in range(20):
        masked, chosen = tacl.choose_and_mask(ids, model, args, random.Random(seed))
        assert not chosen[ids == 1].any() and chosen.sum() == round(0.15 * 3002)
        seen.update("masked" if new == 4 else "kept" if new == old else "replaced" for new, old in zip(masked[chosen], ids[chosen]))
        assert not set(masked[chosen]) & {0, 1, 2, 3}
    total = sum(seen.values())
    for name, share in (("masked", 0.8), ("kept", 0.104), ("replaced", 0.096)):                # one in 26 is replaced by itself
        assert abs(seen[name] / total - share) < 0.01


def test_whole_words():
    """15 % of the words, at most a quarter of them rounded down; all pieces of a word, each with its own luck."""
    args, model = SimpleNamespace(max_length=64, whole_word=True), reader(["a", "##b", "c", "##d"])
    for words, wanted in ((3, 0), (4, 1), (12, 2), (40, 6)):
        ids = np.array([2, *[5, 6, 8] * words, 3, 7, 1, 6, 3])                                   # "##b" behind [UNK] begins a word
        whole, luck = 0, set()
        for seed in range(40):
            masked, chosen = tacl.choose_and_mask(ids, model, args, random.Random(seed))
            starts = [i for i in range(1, len(ids) - 1) if ids[i] in (5, 7) or ids[i] == 6 and ids[i - 1] == 1]
            groups = [chosen[start : start + 3 if ids[start] == 5 else start + 1] for start in starts]
            assert all(group.all() or not group.any() for group in groups)
            assert sum(group.any() for group in groups) == min((words + 2) // 4, max(1, round(0.15 * (words + 2))))
            luck |= {tuple(masked[s : s + 3] == 4) for s, group in zip(starts, groups) if len(group) == 3 and group.all()}
        assert words == 3 or len(luck) > 3


def documents_file(folder, documents, name="documents.txt"):
    path = folder / name
    path.write_text("\n\n".join("\n".join(document) for document in documents) + "\n", encoding="utf-8")
    return path


def cut_documents(count, size=5, start=0):
    return [LINES[start + i * size : start + (i + 1) * size] for i in range(count)]


def test_read_documents(tmp_path):
    """Windows newlines, a byte order mark, blank lines with blanks, no newline at the end; from any byte that it named."""
    path = tmp_path / "d.txt"
    path.write_bytes("\ufeffA é.\r\nB.\r\n \r\n\r\n\nC.\n\t\nD.\n  E. \nF.".encode())
    found = list(tacl.read_documents(path))
    assert [document for document, _ in found] == [["A é.", "B."], ["C."], ["D.", "E.", "F."]]
    for i, (_, end) in enumerate(found):
        assert list(tacl.read_documents(path, end)) == found[i + 1 :]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory, bert):
    """(model, args, function) that reads a file of 11 documents, one of a single sentence, 3 at a time."""
    folder = tmp_path_factory.mktemp("stream")
    documents = cut_documents(11)
    documents[4] = documents[4][:1]
    args = SimpleNamespace(data=documents_file(folder, documents), buffer=3, seed=5, max_length=64)
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert))
    return model, args, lambda n, place=(0, 0, 0), **change: list(itertools.islice(
        tacl.stream(10, place, model, SimpleNamespace(**vars(args) | change)), n))


def same(one, two):
    return len(one) == len(two) and all(
        place == other and is_random == again and (ids == other_ids).all() and (second == other_second).all()
        for ((ids, second, is_random), place), ((other_ids, other_second, again), other) in zip(one, two))


def test_stream_goes_on_where_it_stopped(streamed):
    *_, read = streamed
    whole = read(300)
    assert same(whole, read(300)) and not same(whole[:20], read(20, seed=6))
    for stop in (1, 2, 17, 60, 149):
        assert same(whole[stop:], read(300 - stop, whole[stop - 1][1]))


def test_stream_reads_all_documents_in_turn_and_a_few_at_a_time(streamed, monkeypatch):
    model, args, read = streamed
    held, real = [], tacl.sentence_pairs
    monkeypatch.setattr(tacl, "sentence_pairs", lambda documents, *rest: held.append(documents) or real(documents, *rest))
    pairs = read(200)
    texts = [[model.tokenizer.decode(row).replace(" ", "") for row in document] for documents in held for document in documents]
    plain = [["".join(line.lower().split()) for line in document] for document in cut_documents(11)]
    wanted = list(itertools.islice(itertools.cycle(plain[:4] + plain[5:]), len(texts)))         # the file's order, round its end
    letters = lambda text: re.sub("[^a-z]", "", text)
    assert [[letters(row) for row in document] for document in texts] == [[letters(row) for row in document] for document in wanted]
    assert max(map(len, held)) == 3 and len(held) > 8
    places = [place for _, place in pairs]
    assert len({number for _, number, _ in places}) > 6 and places[0] == [0, 0, 1]
    assert max(used for *_, used in places) < 40
    assert read(50, buffer=1000)[0][1] == [0, 0, 1]            # a buffer beyond the file is the file


def test_make_batch_pads_parts_of_similar_length():
    model, args = reader(), SimpleNamespace(max_length=12, form="paper", accumulate=2)
    rows = [(np.arange(5, 5 + n), np.arange(n) > 2, n % 2, np.arange(6, 6 + n), np.arange(n) == 1) for n in (9, 4, 7, 3, 8)]
    for form, widths in (("paper", [7, 9]), ("code", [12, 12])):
        args.form = form
        parts = tacl.make_batch(rows, model, args)
        assert [part[0].shape for part in parts] == [(3, widths[0]), (2, widths[1])]
        for part, sizes in zip(parts, ([3, 4, 7], [8, 9])):
            for ids, masked, segments, real, chosen, label, n in zip(*part, sizes):
                assert real.tolist() == [i < n for i in range(len(real))] and label == n % 2
                assert ids[:n].tolist() == list(range(5, 5 + n)) and not ids[n:].any()
                assert masked[:n].tolist() == list(range(6, 6 + n)) and not masked[n:].any()
                assert segments.tolist() == [int(2 < i < n) for i in range(len(real))]
                assert chosen.tolist() == [i == 1 for i in range(len(real))]


# ── the model and its three losses ──


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    data, dev = documents_file(folder, cut_documents(8)), documents_file(folder, cut_documents(4, start=500), "dev.txt")
    return ["--data", data, "--dev", dev, "--batch-size", "8"]


def build(flags, **change):
    args = tacl.make_parser().parse_args([*map(str, flags), "--model", str(change.pop("model", "scratch"))])
    vars(args).update(dict(device="cpu", rank=0, world=1, max_length=48) | change)
    torch.manual_seed(0)
    return tacl.build_model(args), args


def rows_of(model, args, n=6):
    rng = random.Random(0)
    documents, _ = tacl.next_documents(args.data, 0, 8, model)
    return [(*pair, *tacl.choose_and_mask(pair[0], model, args, rng)) for pair in tacl.sentence_pairs(documents, model, args, rng)[:n]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, bert):
    """A BERT with all its heads, and a DistilBERT with and without the one that it has, all with the letters of `bert`."""
    home, tokenizer = tmp_path_factory.mktemp("models"), AutoTokenizer.from_pretrained(bert)
    torch.manual_seed(1)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=len(tokenizer))
    small = DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=len(tokenizer))
    models = {"bert": BertForPreTraining(BertConfig(**shape, **off, initializer_range=0.2)), "distilbert": DistilBertModel(small),
              "distilbert-lm": DistilBertForMaskedLM(small), "wide": BertModel(BertConfig(**shape | dict(hidden_size=64), **off))}
    for parameter in models["bert"].cls.parameters():
        torch.nn.init.normal_(parameter, std=0.3)              # biases too
    for name, model in models.items():
        model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    return home


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_compute_loss_is_the_librarys_and_the_papers(form, accumulate, files, folders):
    """BertForPreTraining's own loss of all logits, and the contrast row by row, of a batch in one part or in four."""
    model, args = build(files, model=folders / "bert", form=form, accumulate=accumulate)
    rows = rows_of(model, args)
    tokens = sum(row[4].sum() for row in rows)
    values = collections.Counter()
    gradient = {name: 0 for name, _ in model.lm.named_parameters()}
    model.train()
    parts = tacl.make_batch(rows, model, args)
    assert len(parts) == min(accumulate, 3) and model.fresh == []
    for part in parts:
        loss, found = tacl.compute_loss(model, (part, 1 / tokens, 1 / len(rows)), args)
        assert set(found) == {"loss", "mlm", "nsp", "contrast"}
        loss.backward()
        values.update({name: value.item() for name, value in found.items()})
    ours = {name: parameter.grad.clone() for name, parameter in model.lm.named_parameters()}
    model.zero_grad()
    args.accumulate = 1
    [(ids, masked, segments, real, chosen, labels)] = tacl.make_batch(rows, model, args)
    library = model.lm(input_ids=masked, attention_mask=real, token_type_ids=segments, labels=ids.where(chosen, -100),
                       next_sentence_label=labels, output_hidden_states=True)
    teacher = BertModel.from_pretrained(folders / "bert").eval()(ids, attention_mask=real, token_type_ids=segments).last_hidden_state
    contrast = written_out(library.hidden_states[-1].double(), teacher.double().detach(), chosen, real, 0.01, form)
    (library.loss + contrast).backward()
    assert values["mlm"] + values["nsp"] == pytest.approx(library.loss.item(), abs=2e-5)
    assert values["contrast"] == pytest.approx(contrast.item(), abs=2e-3 * contrast.item())     # float32 against float64 at τ = 0.01
    assert values["loss"] == pytest.approx(values["mlm"] + values["nsp"] + values["contrast"], abs=1e-5)
    for name, parameter in model.lm.named_parameters():
        rounding = 2e-3 * parameter.grad.abs().max().item() + 1e-5
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=rounding, msg=name)


def test_no_logits_of_all_tokens_are_made(files, folders, monkeypatch):
    """The decoder sees no token, and no tensor of (chosen tokens × vocabulary) logits is a module's output."""
    model, args = build(files, model=folders / "bert")
    rows, seen = rows_of(model, args), []
    for module in model.lm.modules():
        module.register_forward_hook(lambda module, _, output: seen.append(output) if torch.is_tensor(output) else None)
    [part] = tacl.make_batch(rows, model, args)
    tacl.compute_loss(model, (part, 1.0, 1.0), args)
    logits = [x.numel() for x in seen if x.shape[-1] == len(model.tokenizer)]
    assert len(seen) > 20 and logits and set(logits) == {0}


@pytest.mark.parametrize("name, fresh", [("distilbert", {"vocab_layer_norm", "vocab_projector", "vocab_transform", "next sentence"}),
                                         ("distilbert-lm", {"next sentence"})])
def test_heads_that_the_checkpoint_lacks(name, fresh, files, folders):
    model, args = build(files, model=folders / name)
    assert set(model.fresh) == fresh
    if name == "distilbert-lm":
        stored = DistilBertForMaskedLM.from_pretrained(folders / name).state_dict()
        assert all(torch.equal(value, stored[key]) for key, value in model.lm.state_dict().items())
    assert model.nsp[2].weight.std() < 0.05 and not model.nsp[2].bias.any()
    [part] = tacl.make_batch(rows_of(model, args), model, args)
    loss, values = tacl.compute_loss(model.train(), (part, 1 / part[4].sum().item(), 1 / 6), args)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert values["nsp"].item() == pytest.approx(math.log(2), abs=0.05)


def test_the_teacher_is_frozen_whatever_train_reaches(files, bert):
    """Dropout of the student and none of the teacher, which is no part of what is trained, saved or set to train."""
    model, args = build(files)                                 # scratch has dropout
    model.train()
    [teacher] = model.teacher
    [part] = tacl.make_batch(rows_of(model, args), model, args)
    ids, _, segments, real, chosen, _ = part
    one, two = (tacl.read(teacher, ids, segments, real).last_hidden_state for _ in range(2))
    assert torch.equal(one, two) and not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    hidden = [tacl.embed(model, ids, segments, real, chosen)[0] for _ in range(2)]
    assert not torch.equal(*hidden) and torch.equal(tacl.embed(model.eval(), ids, segments, real, chosen)[0], one)
    assert not {id(p) for p in teacher.parameters()} & {id(p) for p in model.parameters()}
    assert sum(p.numel() for p in model.parameters()) < 1.5 * sum(p.numel() for p in teacher.parameters())


@torch.no_grad()
def test_evaluate(files, folders):
    """By loops: the losses, how often the most similar token is the own one, each sentence's token similarity in each layer."""
    for form in ("paper", "code"):
        model, args = build(files, model=folders / "bert", form=form, dev_pairs=9)
        with torch.no_grad():
            for parameter in model.encoder.parameters():
                parameter += 0.05 * torch.randn_like(parameter)                                # unlike its teacher
        pairs, sentences = dev = tacl.load_dev(args.dev, 4, model, args)
        assert len(pairs) == len(sentences) == 9
        found, teacher = tacl.evaluate(model, dev, args), model.teacher[0]
        assert model.training
        model.eval()
        right, nsp = [], []
        for ids, second, label, masked, chosen in pairs:
            pad = (args.max_length - len(ids)) * (form == "code")
            ids, masked, second = (torch.tensor([*x, *[0] * pad])[None] for x in (ids, masked, second.astype(int)))
            real = torch.arange(ids.shape[1])[None] < ids.shape[1] - pad
            s = model.encoder(masked, attention_mask=real, token_type_ids=second).last_hidden_state[0].double()
            t = teacher(ids, attention_mask=real, token_type_ids=second).last_hidden_state[0].double()
            nearest = [max(range(len(t)), key=lambda j: cosine(s[i], t[j])) for i in chosen.nonzero()[0]]
            right += [i == j for i, j in zip(chosen.nonzero()[0], nearest)]
            logits = model.lm(masked, attention_mask=real, token_type_ids=second).seq_relationship_logits[0]
            nsp.append(-logits.double().log_softmax(0)[int(label)].item())
        assert found["accuracy"] == pytest.approx(100 * np.mean(right), abs=1e-3) and 10 < found["accuracy"] < 100
        assert found["nsp"] == pytest.approx(np.mean(nsp), abs=1e-5)
        assert found["loss"] == pytest.approx(found["mlm"] + found["nsp"] + found["contrast"], abs=1e-4)
        layers = [[] for _ in range(3)]
        for ids, *_ in sentences:
            states = model.encoder(torch.tensor(ids)[None].long(), output_hidden_states=True).hidden_states
            for layer, state in zip(layers, states):
                tokens = F.normalize(state[0, 1:-1].double(), dim=1)                            # without [CLS] and [SEP]
                layer.append(np.mean([(a @ b).item() for a, b in itertools.permutations(tokens, 2)]))
        assert found["similarity"] == pytest.approx([np.mean(layer) for layer in layers], abs=1e-5)


# ── whole runs ──


def test_copied_with_kernels_alone(tmp_path, files):
    home = tmp_path / "home"
    shutil.copytree(ROOT / "kernels", home / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tacl.py", home)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "tacl.py", "--model", "scratch", *map(str, files), "--out", "out/first", "--steps", "3"]
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["done", "load"]
    out = home / "out" / "first"
    wanted = ["README.md", "args.json", "config.json", "metrics.jsonl", "model.safetensors", "state.pt", "tacl.py", "tokenizer.json"]
    assert [file for file in wanted if not (out / file).is_file()] == []
    assert (out / "tacl.py").read_bytes() == (ROOT / "tacl.py").read_bytes()
    assert [step["step"] for step in metrics(out)] == [1, 2, 3]


@pytest.mark.parametrize("form", ["paper", "code"])
def test_learns(form, tmp_path, files, bert):
    """From a random BERT whose tokens look alike: the contrast is learned, and the tokens of the top layer move apart."""
    flags = [*files, "--model", bert, "--steps", 60, "--lr", 2e-3, "--max-length", 48, "--form", form]
    result = run("tacl", tmp_path / "out", *flags)
    last, before = result.steps[-1], result.state["progress"]["before"]
    assert last["dev_accuracy"] > before["accuracy"] + 20 and last["dev_contrast"] < 0.7 * before["contrast"]
    assert last["dev_mlm"] < before["mlm"] - 0.1 and np.mean(result.losses[-5:]) < 0.7 * np.mean(result.losses[:5])
    assert last["dev_similarity"][-1] < before["similarity"][-1] and len(before["similarity"]) == 4
    assert result.said["done"].startswith(f"contrast accuracy {before['accuracy']:.2f} → {last['dev_accuracy']:.2f} %, ")
    assert tacl.summary(before) == result.said["before"] and result.said["after"].endswith(f"{last['dev_similarity'][-1]:.3f}")
    assert "cls.seq_relationship" in result.said["model"]


@pytest.mark.parametrize("flags", [
    [], ["--form", "code", "--accumulate", 3, "--whole-word", "--similarity", "dot", "--buffer", 2]], ids=str)
def test_resume_is_exact(flags, tmp_path, files, monkeypatch):
    """Steps 4 and 5, which the interrupted run did after its evaluation, are done again; the stream goes through its file twice."""
    flags = [*files, "--model", "scratch", "--max-length", 48, "--steps", 8, "--eval-every", 3, *flags]
    whole = run("tacl", tmp_path / "whole", *flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(tacl, "average_gradients", Mock(side_effect=[None] * 5 + [KeyboardInterrupt]))
        run("tacl", tmp_path / "parts", *flags)
    assert len(metrics(tmp_path / "parts")) == 5
    parts = run("tacl", tmp_path / "parts", *flags, "--resume")
    assert [step | {"seconds": 0} for step in parts.steps] == [step | {"seconds": 0} for step in whole.steps]
    assert equal(parts.state, whole.state) and whole.state["progress"]["place"][1] > 0
    assert equal(load_file(tmp_path / "parts" / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors"))


def test_several_processes_equal_one(tmp_path, files, bert):
    """Ranks have unequal numbers of chosen tokens, and clipping hides a gradient that is too large: norms are compared too."""
    flags = [*files, "--model", bert, "--max-length", 48, "--steps", 5, "--lr", 1e-3, "--accumulate", 2]
    one = run("tacl", tmp_path / "one", *flags)
    assert max(one.norms) > 1  # clipping is active
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(one_of_several, (WORLD, port, "tacl", tmp_path / "two", flags), nprocs=WORLD, start_method="forkserver")
    for a, b in zip(metrics(tmp_path / "two"), one.steps):
        assert [a[name] for name in ("loss", "mlm", "nsp", "contrast")] == pytest.approx(
            [b[name] for name in ("loss", "mlm", "nsp", "contrast")], abs=1e-4)
    assert torch.load(tmp_path / "two" / "norms") == pytest.approx(one.norms, rel=1e-3)
    for key, weight in torch.load(tmp_path / "two" / "state.pt", weights_only=True)["model"].items():
        if not key.endswith("key.bias"):  # softmax ignores it: its gradient is rounding, which Adam makes large
            torch.testing.assert_close(weight, one.state["model"][key], atol=2e-4, rtol=0, msg=key)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_impl_follows_eager(impl, tmp_path, files, bert, monkeypatch):
    if impl == "triton" and not (importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("no Triton, or a GPU's, and this file stays on the CPU")
    flags = [*files[:2], *files[4:], "--model", bert, "--max-length", 24, "--steps", 2]
    eager = run("tacl", tmp_path / "eager", *flags, "--impl", "eager")
    asked = Mock(wraps=tacl.choose_impl)
    monkeypatch.setattr("kernels.similarity.choose_impl", asked)
    monkeypatch.setattr("kernels.losses.choose_impl", asked)
    other = run("tacl", tmp_path / "other", *flags, "--impl", impl)
    assert {call.args[0] for call in asked.call_args_list} == {impl}
    for name in ("mlm", "contrast"):
        assert [step[name] for step in other.steps] == pytest.approx([step[name] for step in eager.steps], rel=1e-3)


def test_evaluation_leaves_no_trace(tmp_path, files):
    """The same losses, weights and random numbers with four evaluations, with one and without --dev."""
    flags = [*files, "--model", "scratch", "--max-length", 32, "--steps", 4]
    often = run("tacl", tmp_path / "often", *flags, "--eval-every", 1)
    seldom = run("tacl", tmp_path / "seldom", *flags)
    never = run("tacl", tmp_path / "never", *flags[:2], *flags[4:])
    assert [sum("dev_accuracy" in step for step in x.steps) for x in (often, seldom, never)] == [4, 1, 0]
    for other in (seldom, never):
        assert other.losses == often.losses
        assert [part for part in ("model", "optimizer", "random") if not equal(other.state[part], often.state[part])] == []
    assert "after" not in never.said and never.said["done"].startswith("0 min")


def test_rate_rises_over_a_tenth_and_falls_to_zero(tmp_path, files):
    steps = run("tacl", tmp_path / "out", *files[:2], "--model", "scratch", "--max-length", 16, "--batch-size", 2, "--steps", 20,
                "--lr", 1.9e-3).steps
    assert [step["lr"] for step in steps] == pytest.approx([0.95e-3, *(1e-4 * n for n in range(19, 0, -1))])


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_others_load_the_folder(name, tmp_path, files, folders):
    """By the line that was printed: the encoder in state.pt with its pooler, no head, no teacher, a tokenizer that cuts nothing."""
    flags = [*files, "--model", folders / name, "--teacher", folders / "bert", "--max-length", 48, "--steps", 2]
    result = run("tacl", tmp_path / "out", *flags)
    model = eval(result.said["load"], {"AutoModel": AutoModel})
    prefix = "lm." + {"bert": "bert", "distilbert": "distilbert"}[name] + "."
    state = {key.removeprefix(prefix): value for key, value in result.state["model"].items() if key.startswith(prefix)}
    assert equal(dict(model.state_dict()), state) and (name == "distilbert" or any("pooler" in key for key in state))
    assert {key for key in load_file(tmp_path / "out" / "model.safetensors")} == set(state)
    assert not any("teacher" in key for key in result.state["model"])
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["truncation"] is None
    long = "a " * 600
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")(long)["input_ids"]) == 602
    assert f"{result.steps[-1]['dev_accuracy']:.2f} %" in (tmp_path / "out" / "README.md").read_text()


# ── bad input ──

GOOD = "A man eats.\nHe likes it.\n\nA dog runs.\nIt is fast.\n"
WANTED = r"documents of two or more sentences, wanted at least 2; a sentence a line, a blank line between documents"


@pytest.mark.parametrize("flag", ["--data", "--dev"])
@pytest.mark.parametrize("content, wanted", [
    (None, r"bad\.txt: No such file or directory"),
    ("", r"bad\.txt: 0 " + WANTED),
    ("\n \n", r"bad\.txt: 0 " + WANTED),
    ("A man eats.\nHe likes it.\nA dog runs.\n", r"bad\.txt: 1 " + WANTED),
    ("A.\n\nB.\n\nC.\nD.\n", r"bad\.txt: 1 " + WANTED),
    (b"A.\nB.\n\nC.\nD\xff.\n", r"bad\.txt line 5: not UTF-8; convert it, for example with iconv")])
def test_bad_data(flag, content, wanted, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text(GOOD)
    if content is not None:
        Path("bad.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(capfd, wanted, "--data", "good.txt", "--model", "scratch", flag, "bad.txt")


@pytest.mark.parametrize("flags, wanted", [
    ("--max-length 4", r"argument --max-length: 4: wanted a number of at least 5"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--temperature 0", r"argument --temperature: 0: wanted a number of at least 0\.0001"),
    ("--buffer 1", r"argument --buffer: 1: wanted a number of at least 2"),
    ("--form released", r"argument --form: invalid choice: 'released' .*"),
    ("--model none/such", r"--model none/such: no such folder, and the hub .*; name a local folder, or take scratch"),
    ("--teacher none/such", r"--teacher none/such: no such folder, and the hub .*"),
    ("--model {bert} --teacher {wide}", r"--teacher \S+: its vectors have 64 numbers, those of \S+ 32; wanted equal widths"),
    ("--teacher {bert}", r"--teacher \S+: its vectors have 32 numbers, those of scratch 128; wanted equal widths"),
    ("--model {bert} --teacher {other}", r"--teacher \S+: its vocabulary is not that of \S+; wanted one tokenizer for both"),
    ("--model {bert} --whole-word", None),
    ("--model {bare} --whole-word", r"--whole-word: the tokenizer of \S+ has no pieces that begin with ##"),
    ("--model {lost}", r"--model \S+: \d+ weights, such as .*, are missing or do not fit its config\.json"),
    ("--out good.txt", r"--out good\.txt: /.*/good\.txt is no folder that can be written")])
def test_bad_flags(flags, wanted, tmp_path, capfd, monkeypatch, folders):
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text(GOOD)
    names = {"bert": folders / "bert", "wide": folders / "wide"}
    for name, old, new in (("other", '"##a"', '"##other"'), ("bare", '"##', '"__'),
                           ("lost", '"num_hidden_layers": 2', '"num_hidden_layers": 3')):
        if "{%s}" % name in flags:
            names[name] = shutil.copytree(folders / "bert", folders / name, dirs_exist_ok=True)
            for file in ("tokenizer.json", "config.json", "vocab.txt"):
                if (folders / name / file).is_file():
                    (folders / name / file).write_text((folders / name / file).read_text().replace(old, new))
    argv = ["--data", "good.txt", "--model", "scratch", "--batch-size", "2", "--steps", "1", *flags.format(**names).split()]
    if wanted:
        refused(capfd, wanted, *argv)
    else:
        tacl.main([*argv, "--max-length", "8", "--out", "fine"])


def refused(capfd, wanted, *argv):
    """Exit code 2, one line on stderr that fits, nothing written."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as end:
        tacl.main([*argv])
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert re.fullmatch(rf"tacl\.py: {wanted}\n", err), err
    assert sorted(Path().rglob("*")) == before
