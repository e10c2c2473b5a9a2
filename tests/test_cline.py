"""cline.py: its losses against formulas written out, its WordNet, its triples and their labels, its model, and whole runs."""
import itertools, math, os, random, re, shutil, socket, sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (AutoModel, AutoTokenizer, BertTokenizer, DistilBertConfig, DistilBertForMaskedLM,
                          PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM)

import cline
import test_scripts
from cline import WordNet, contrastive_loss, replaced_token_loss, total_loss
from test_losses import agree, points
from test_scripts import DATA, SENTENCES, bert, equal, metrics, one_cpu_thread, run  # noqa: F401, fixtures hold here too

COMMAND = ["--model", "scratch", "--data", DATA / "sentences.txt", "--wordnet", str(DATA / "wordnet"), "--tagger", "lexicon"]
both_forms = pytest.mark.parametrize("form", ["paper", "code"])


# The losses, float64 to 1e-10.

def contrastive_written_out(o, s, a, form):
    total = 0
    for i in range(len(o)):
        if form == "paper":
            positive, negative = torch.exp(o[i] @ s[i]), torch.exp(o[i] @ a[i])
            total = total - torch.log(positive / (positive + negative)) / len(o)
        else:                                                  # binary cross entropy of sigmoids, mean over 2B pairs
            positive, negative = torch.sigmoid((o[i] * s[i]).mean()), torch.sigmoid((o[i] * a[i]).mean())
            total = total - (torch.log(positive) + torch.log(1 - negative)) / (2 * len(o))
    return total


@both_forms
@pytest.mark.parametrize("b, d", [(1, 1), (1, 7), (2, 16), (9, 5)])
def test_contrastive_loss(form, b, d):
    agree(lambda *x: contrastive_loss(*x, form), lambda *x: contrastive_written_out(*x, form), *(points(b, d, seed) for seed in range(3)))


def test_contrastive_loss_of_equal_texts():
    z = points(5, 8, 3)
    assert contrastive_loss(z, z, z).item() == pytest.approx(math.log(2), abs=1e-14)
    a = (z * z).mean(1)
    assert contrastive_loss(z, z, z, "code").item() == pytest.approx(((F.softplus(-a) + F.softplus(a)) / 2).mean().item(), abs=1e-14)


@pytest.mark.parametrize("size", [3.0, 30.0, 300.0, 30000.0])
def test_contrastive_loss_of_large_products(size):
    """log(1 + exp(x)) without exp of a large x, its gradient σ(x): also where softplus has a threshold."""
    o = torch.tensor([[size], [size]], dtype=torch.float64, requires_grad=True)
    s, a = torch.tensor([[0.5], [-0.5]], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    loss = contrastive_loss(o, s, a)
    loss.backward()
    x = [-size / 2, size / 2]
    assert loss.item() == pytest.approx(sum(max(v, 0) + math.log1p(math.exp(-abs(v))) for v in x) / 2, rel=1e-14)
    sigmoids = [math.exp(min(v, 0)) / (1 + math.exp(-abs(v))) for v in x]
    assert o.grad[:, 0].tolist() == pytest.approx([-0.5 * sigmoids[0] / 2, 0.5 * sigmoids[1] / 2], rel=1e-13)


@both_forms
def test_contrastive_loss_follows_the_dtype(form):
    z = points(4, 768, 4) / 4
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        views = [(z + i).to(dtype) for i in range(3)]
        loss = contrastive_loss(*views, form)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(contrastive_loss(*(v.double() for v in views), form).item(), rel=tolerance)


@pytest.mark.parametrize("call, wanted", [
    (lambda z: contrastive_loss(z, z, z, "papers"), "form: found 'papers', wanted 'paper' or 'code'"),
    (lambda z: contrastive_loss(z, z[:1], z), r"found \[\(3, 4\), \(1, 4\), \(3, 4\)\], wanted \(B, D\) thrice"),
    (lambda z: contrastive_loss(z[0], z[0], z[0]), "wanted .B, D. thrice"),
    (lambda z: replaced_token_loss(z, z.long(), "both"), "form: found 'both'"),
    (lambda z: replaced_token_loss(z, z.long(), "code"), r"logits: found \(3, 4\), wanted \(3, 4, 3\)"),
    (lambda z: replaced_token_loss(z[:, :, None].expand(3, 4, 3), z.long()), r"logits: found \(3, 4, 3\), wanted \(3, 4\)"),
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
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
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
    losses, s = torch.tensor([2.0, 0.3, 0.7], dtype=torch.float64), torch.tensor([0.6, -0.4, 0.0], dtype=torch.float64)
    agree(lambda x, s: total_loss(x, s),
          lambda x, s: sum(math.e ** -s[i] * x[i] + (s[i] if i != 1 else 0) for i in range(3)), losses, s)     # max(0, 0) as s: slope 1
    assert total_loss(list(losses), list(s)) == total_loss(losses, s)
    optimal = torch.log(losses.clamp(min=1))                   # then the weight is 1 / max(L, 1)
    assert all(total_loss(losses, optimal) <= total_loss(losses, optimal + move * torch.eye(3)[i]) for i in range(3) for move in (-0.1, 0.1))


# WordNet

@pytest.fixture(scope="module")
def wordnet():
    return WordNet(DATA / "wordnet")


@pytest.mark.parametrize("word, pos, lemmas", [
    ("dogs", "noun", ["dog"]), ("women", "noun", ["woman"]), ("coaches", "noun", ["coach"]), ("parties", "noun", []),
    ("threw", "verb", ["throw"]), ("baked", "verb", ["bake"]), ("chases", "verb", ["chase"]), ("left", "verb", ["leave"]),
    ("leaving", "verb", ["leave"]), ("carries", "verb", []), ("better", "adj", ["good"]), ("older", "adj", ["old"]),
    ("later", "adj", ["late"]), ("late", "adv", ["late"]), ("dog", "verb", [])])
def test_lemmas(wordnet, word, pos, lemmas):
    assert wordnet.lemmas(word, pos) == lemmas


@pytest.mark.parametrize("kind, word, pos, options", [
    ("synonym", "dogs", "noun", ["hound"]), ("synonym", "baker", "noun", ["bread maker"]), ("synonym", "woman", "noun", ["lady"]),
    ("synonym", "twelve", "noun", ["noon"]), ("synonym", "walk", "verb", []), ("synonym", "again", "adv", ["once more"]),
    ("hypernym", "ponies", "noun", ["horse"]), ("hypernym", "thing", "noun", []), ("hypernym", "leave", "verb", ["go", "move"]),
    ("antonym", "boys", "noun", ["girl"]), ("antonym", "male child", "noun", ["girl"]),        # of any word of the synset
    ("antonym", "asleep", "adj", ["alert", "awake"][1:]), ("antonym", "unknown", "adj", []),
    ("inflected", "dog", "noun", ["dogs"]), ("inflected", "children", "noun", ["child"]), ("inflected", "took", "verb", ["take", "taken", "takes", "taking"]),
    ("inflected", "stops", "verb", ["stop", "stopped", "stopping"]), ("inflected", "old", "adj", ["older", "oldest"]),
    ("inflected", "best", "adj", ["better", "good"]), ("inflected", "winning", "verb", ["win", "wins", "won"]), ("inflected", "perfect", "adj", []), ("inflected", "soon", "adv", [])])
def test_options(wordnet, kind, word, pos, options):
    assert wordnet.options(kind, word, pos) == options == sorted(options)


def test_random_words_are_single_ones(wordnet):
    words = wordnet.options("random", "dog", "noun")
    assert words == sorted(set(words)) and len(words) > 200 and all(re.fullmatch(r"[^\W\d_]+", word) for word in words)
    assert {"dog", "buy", "scarlet", "soon"} < set(words)


@pytest.mark.parametrize("word, forms", [
    ("try", "tries trying tried trier"), ("bake", "bakes baking baked baker"), ("agree", "agrees agreeing agreed agreer"),
    ("play", "plays playing played player"), ("miss", "misses missing missed misser"), ("echo", "echoes echoing echoed echoer"),
    ("dye", "dyes dyeing dyed dyer")])
def test_inflect(word, forms):
    assert " ".join(cline.inflect(word, ending) for ending in ("es", "ing", "ed", "er")) == forms
    assert cline.inflect("photo", "s") == "photos" and cline.inflect("box", "s") == "boxes"


def test_irregular_forms_may_be_missing(tmp_path):
    shutil.copytree(DATA / "wordnet", tmp_path / "w")
    (tmp_path / "w" / "verb.exc").unlink()
    wordnet = WordNet(tmp_path / "w")
    assert wordnet.lemmas("threw", "verb") == [] and wordnet.lemmas("dogs", "noun") == ["dog"]


# Triples

def tagged(text, wordnet):
    return next(cline.tag_words([text], None, wordnet))


def test_lexicon_tags_words(wordnet):
    text = "Dogs chased him, and the Captain was late; 12 women's hounds didn't."
    marks = [(text[start:end], pos) for start, end, pos in tagged(text, wordnet)]
    assert marks == [("Dogs", "noun"), ("chased", "verb"), ("him", None), (",", None), ("and", None), ("the", None), ("Captain", None),
                     ("was", None), ("late", "adj"), (";", None), ("12", None), ("women's", None), ("hounds", "noun"), ("didn't", None), (".", None)]


def test_spacy_tags_words(monkeypatch):
    """With a spaCy that knows two sentences; a model that is not there is WordNet's turn only where none was asked for."""
    words = [[("A", 0, "DET", False), ("dog", 2, "NOUN", False), ("  ", 5, "SPACE", True), ("ran", 7, "VERB", False)], [("Up", 0, "ADV", False)]]
    docs = [[Mock(text=text, idx=idx, pos_=pos, is_space=space, __len__=lambda self: len(self.text)) for text, idx, pos, space in doc] for doc in words]
    model = SimpleNamespace(meta=dict(lang="en", name="tiny", version="1.2"), pipe=lambda texts: iter(docs))
    spacy, args = SimpleNamespace(load=Mock(return_value=model)), SimpleNamespace(tagger=None)
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    tagger = cline.load_tagger(args)
    assert spacy.load.call_args == (("en_core_web_sm",), dict(exclude=["parser", "ner", "lemmatizer"])) and args.tagger == "en_tiny 1.2"
    assert list(cline.tag_words(["A dog  ran", "Up"], tagger, None)) == [[(0, 1, None), (2, 5, "noun"), (7, 10, "verb")], [(0, 2, "adv")]]
    spacy.load.side_effect = OSError("[E050] Can't find model.\nMore")
    args.tagger = None
    assert cline.load_tagger(args) is None and args.tagger == "lexicon" and cline.load_tagger(args) is None
    args.tagger = "de_none"
    with pytest.raises(SystemExit):
        cline.load_tagger(args)


class Luck(random.Random):
    """The first number drawn, which chooses the kind, is given."""
    def __init__(self, first, seed=0):
        super().__init__(seed)
        self.first = first

    def shuffle(self, words):
        super().shuffle(words)
        self.random = lambda: self.__dict__.pop("random") and self.first


@pytest.mark.parametrize("side, first, kind", [
    ("synonym", 0.0, "hypernym"), ("synonym", 0.33, "hypernym"), ("synonym", 0.34, "synonym"), ("synonym", 0.66, "synonym"),
    ("synonym", 0.67, "inflected"), ("synonym", 0.99, "inflected"), ("antonym", 0.49, "antonym"), ("antonym", 0.51, "random")])
def test_a_text_has_one_kind_of_replacement(wordnet, side, first, kind):
    text = "The old dog chased two hounds, late."
    _, labels = cline.replace_words(text, tagged(text, wordnet), cline.KINDS[side], 1, wordnet, Luck(first))
    assert {code for *_, code in labels} - {0} == {cline.CODES[kind]}


@pytest.mark.parametrize("text, side, kind", [
    ("thing", "synonym", "inflected"), ("Baker!", "synonym", "hypernym"), ("the soon", "synonym", "synonym"), ("fully", "synonym", None),
    ("dog", "antonym", "random"), ("day", "antonym", "antonym"), ("of him", "antonym", None)])
def test_kinds_fall_through(wordnet, text, side, kind):
    new, labels = cline.replace_words(text, tagged(text, wordnet), cline.KINDS[side], 1, wordnet, Luck(0.0))
    assert [code for *_, code in labels if code] == ([cline.CODES[kind]] if kind else [])
    assert (new == text) == (kind is None)


def pieces(text, spans):
    """The text without the words at the spans, and these."""
    ends = [0, *(place for span in spans for place in span[:2]), len(text)]
    return [text[a:b] for a, b in zip(ends[::2], ends[1::2])], [text[start:end] for start, end, *_ in spans]


@pytest.mark.parametrize("side, rate", [("synonym", 0.4), ("antonym", 0.2), ("synonym", 0.5), ("antonym", 0.05), ("antonym", 1)])
def test_replacements(wordnet, side, rate):
    """What is between candidates stays; a replaced word is an option of its kind; never more than the rate of all words."""
    draw, full, kinds = random.Random(1), 0, Counter()
    for text, in SENTENCES[:150]:
        words = tagged(text, wordnet)
        new, labels = cline.replace_words(text, words, cline.KINDS[side], rate, wordnet, draw)
        candidates = [word for word in words if word[2]]
        (kept, old), (still, found) = pieces(text, candidates), pieces(new, labels)
        assert kept == still and len(old) == len(found)
        replaced = sum(code > 0 for *_, code in labels)
        assert replaced <= math.floor(rate * len(words) + 1e-9)
        full += replaced == min(math.floor(rate * len(words) + 1e-9), len(candidates))
        for before, after, (*_, pos), (*_, code) in zip(old, found, candidates, labels):
            kind = next((kind for kind in cline.CODES if cline.CODES[kind] == code), None)
            assert after == before if kind is None else after in wordnet.options(kind, before.lower(), pos)
            assert (after.lower() != before.lower()) == (code > 0)
            kinds[kind] += 1
    assert full > 20 and set(kinds) - {None} == (set(cline.KINDS[side]) if rate > 0.1 else {"antonym", "random"})
    if side == "synonym":
        assert any(" " in word for word in pieces(new, labels)[1]) or kinds["synonym"] > 10


def arguments(*flags):
    args = cline.make_parser().parse_args([*map(str, COMMAND), *map(str, flags)])
    args.rank, args.world, args.device = 0, 1, "cpu"
    return args


def triples_of(*flags):
    args = arguments(*flags)
    return cline.make_triples(*cline.load_data(args.data, args), args), args


def test_triples_depend_on_the_seed_alone(capsys):
    one, _ = triples_of()
    printed = re.search(r"triples  words tagged by lexicon; replaced: ([\d.]+) % .* synonym side .*, ([\d.]+) % .* antonym side", capsys.readouterr().out)
    assert one == triples_of()[0] != triples_of("--seed", 1)[0]
    assert [row[0] for row in one] == [text for text, in SENTENCES]
    words = sum(len(cline.WORD.findall(row[0])) for row in one)
    for side, share in zip((3, 4), printed.groups()):
        assert float(share) == pytest.approx(100 * sum(code > 0 for row in one for *_, code in row[side]) / words, abs=0.051)


def test_texts_without_replacements_are_left_out(tmp_path, bert):
    """On either side; of those that stay the place in the file is kept, for messages."""
    (tmp_path / "few.txt").write_text("He was not there.\nThe dog ate.\nFully.\nThe dog.\n")
    for flags, kept in ([], [1, 3]), (["--synonym-rate", 0.1], []), (["--antonym-rate", 0.1], []):
        triples, args = triples_of("--data", tmp_path / "few.txt", "--synonym-rate", 0.5, "--antonym-rate", 0.5, "--max-length", 99, *flags)
        assert len(triples) == 4 and triples[0] == ("He was not there.",) * 3 + ([], [])
        rows, _ = cline.tokenise_triples(triples, SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert)), args)
        assert [row[-1] for row in rows] == kept


def test_saved_triples_are_read_again(tmp_path):
    triples, args = triples_of()
    triples[0] = ('He said "no",\nthen', 'He said "not",\nthen', "She, 'yes'", [(3, 7, 0), (9, 12, 2)], [(0, 3, 5)])
    triples[1] = ("He", "He", "He", [], [])
    cline.save_triples(triples, tmp_path / "triples.csv")
    read, wordnet = cline.load_data(tmp_path / "triples.csv", args)
    assert read == triples and wordnet is None
    assert [path.name for path in tmp_path.iterdir()] == ["triples.csv"]


def test_three_columns_are_aligned():
    assert cline.new_words("A dog, a cat.", "A big dog, one cat.") == [(0, 1, 0), (2, 5, 1), (6, 9, 0), (9, 10, 0), (11, 14, 1), (15, 18, 0), (18, 19, 0)]
    assert cline.read_triple(["a b", "a c", "d b"], "") == ("a b", "a c", "d b", [(0, 1, 0), (2, 3, 1)], [(0, 1, 1), (2, 3, 0)])


# Labels of sub-words

WORDS = ["Zoë's", "naïve", "dog", "isn't", "a", "bread maker", "—", "café", "go", "unbelievably", "日本", "once more", "x"]


def byte_level(prefix=False, trim=True):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 2 + [text for text, in SENTENCES[:40]], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=trim, add_prefix_space=prefix)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", cls_token="<s>", sep_token="</s>", eos_token="</s>",
                                   pad_token="<pad>", unk_token="<unk>", mask_token="<mask>")


def word_pieces():
    letters = sorted(set("".join(WORDS)) | set("abcdefghijklmnopqrstuvwxyz"))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + x for x in letters), "dog", "un", "##believ", "bread", "##ker"]
    return BertTokenizer({piece: i for i, piece in enumerate(pieces)}, do_lower_case=False)


def released_scan(tokens, text, intervals, other):
    """The released code's: a running offset in bytes; the label is that of the interval which holds a sub-word's first byte."""
    raw, offset, labels = text.encode(), 0, []
    for token in tokens:
        labels.append(next((label for start, end, label in intervals if start <= offset <= end), other))
        if all(x in pre_tokenizers.ByteLevel.alphabet() for x in token) and not token.startswith("##") and scan_symbols:
            offset += len(token)                               # one symbol a byte, that of the leading space included
        else:
            offset += len(token.removeprefix("##").encode()) + (raw[offset : offset + 1] == b" ")
    assert offset == len(raw)
    return labels


scan_symbols = True


@both_forms
@pytest.mark.parametrize("kind", ["byte-level", "untrimmed", "word pieces"])
def test_labels_are_those_of_the_released_scan(form, kind, monkeypatch):
    """Multi-word replacements, letters of several bytes, words of many sub-words, and words of which one sub-word holds two parts."""
    tokenizer = word_pieces() if kind == "word pieces" else byte_level(trim=kind == "byte-level")
    monkeypatch.setitem(globals(), "scan_symbols", kind != "word pieces")
    draw, seen = random.Random(3), Counter()
    for _ in range(60):
        words = draw.choices(WORDS, k=draw.randint(1, 9))
        codes = [draw.choice((None, 0, 2, 5)) for _ in words]
        starts = list(itertools.accumulate((len(word) + 1 for word in words), initial=0))
        spans = [(start, start + len(word), code) for start, word, code in zip(starts, words, codes) if code is not None]
        text = " ".join(words)
        encoding = tokenizer(text).encodings[0]
        labels = cline.token_labels(text, spans, encoding, 2, SimpleNamespace(form=form))
        place = lambda letter: len(text[:letter].encode())
        intervals = [(place(start) - 1, place(end) - 1, 2 if code else 0) for start, end, code in spans]
        other = 0 if form == "paper" else -100
        assert labels.dtype == np.int8 and labels[[0, -1]].tolist() == [-100, -100]
        assert labels[1:-1].tolist() == released_scan(encoding.tokens[1:-1], text, intervals, other)
        seen.update(labels.tolist())
    assert min(seen[0], seen[2], seen[-100]) > 50


def test_tokenised_triples_are_cut_with_their_labels(bert):
    """In the middle of a replaced word too; a row that then differs no more is left out."""
    args = arguments("--model", bert, "--max-length", 8)
    cline.load_data(args.data, args)
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert))
    rows = [("a dog eats", "a hound eats", "a cat eats", [(2, 7, 2), (8, 12, 0)], [(2, 5, 4)]),
            ("the small dog", "the small hound", "a cat", [(10, 15, 2)], [(0, 1, 1)]), ("a", "b", "c", [(0, 1, 2)], [(0, 1, 4)])]
    (first, last), cut = cline.tokenise_triples(rows, model, args)
    assert cut == 5 and [len(x) for x in first[:5]] == [8] * 5 and (first[5], last[5]) == (0, 2)     # 6 letters of each and two special tokens
    assert first[3].tolist() == [-100, 0, 1, 1, 1, 1, 1, -100] and first[4].tolist() == [-100, 0, 2, 2, 2, 0, 0, -100]
    assert [x.tolist() for x in last[3:5]] == [[-100, 1, -100], [-100, 2, -100]]


# The model

def fixed_masks(ids, may, tokenizer):
    """Each fifth place, so that rows have the same masks in every batch."""
    chosen = may & (torch.arange(ids.shape[1]) % 5 == 2)
    return torch.where(chosen, tokenizer.mask_token_id, ids), torch.where(chosen, ids, -100)


def test_mask_tokens(monkeypatch):
    torch.manual_seed(0)
    ids, may = torch.randint(5, 1000, (400, 500)), torch.rand(400, 500) < 0.9
    tokenizer = Mock(mask_token_id=4, __len__=lambda self: 1000)
    masked, targets = cline.mask_tokens(ids, may, tokenizer)
    chosen = targets != -100
    assert not (chosen & ~may).any() and equal(targets[chosen], ids[chosen]) and equal(masked[~chosen], ids[~chosen])
    shares = [(masked == 4)[chosen], (masked == ids)[chosen], ((masked != ids) & (masked != 4))[chosen]]
    assert [float(chosen[may].double().mean())] + [float(x.double().mean()) for x in shares] == pytest.approx([0.15, 0.8, 0.1, 0.1], abs=0.01)
    assert masked.min() < 5 and len(masked[(masked != ids) & (masked != 4)].unique()) > 900


def one_by_one(model, rows, masks, form):
    """MLM, RTD, CTS of rows encoded one text at a time without padding, by the library's own heads."""
    vectors, mlm, rtd = [[], [], []], [], []
    for row in rows:
        for view, ids in enumerate(row[:3]):
            ids = torch.from_numpy(ids).long()[None]
            masked, targets = fixed_masks(ids, ~torch.isin(ids, torch.tensor(model.tokenizer.all_special_ids)) & (view == 0) & masks, model.tokenizer)
            output = model.lm(input_ids=masked, output_hidden_states=True)
            hidden = output.hidden_states[-1]
            z = hidden[0, 0]
            vectors[view].append(z if form == "paper" else torch.tanh(z @ model.head.weight.T + model.head.bias))
            mlm.append(F.cross_entropy(output.logits[0], targets[0], reduction="none")[targets[0] != -100])
            if view:
                labels, logits = torch.from_numpy(row[view + 2]).long(), model.rtd(hidden)[0]
                counts = labels != -100
                losses = (F.cross_entropy(logits[counts], labels[counts], reduction="none") if form == "code" else
                          F.binary_cross_entropy_with_logits(logits[counts, 0], (labels[counts] > 0).float(), reduction="none"))
                rtd.append(losses)
    return (torch.cat(mlm).mean(), torch.cat(rtd).mean(), contrastive_written_out(*map(torch.stack, vectors), form)), vectors


def prepared(form, bert, *flags, texts=9):
    triples, args = triples_of("--form", form, "--model", bert, "--max-length", 256, *flags)
    model = cline.build_model(args)
    return model, cline.tokenise_triples(triples[:texts], model, args)[0], args


@both_forms
def test_compute_loss(form, bert, monkeypatch):
    """Value and every gradient against texts encoded one by one, whatever the groups."""
    model, rows, args = prepared(form, bert)
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    torch.nn.init.normal_(model.log_variances)
    torch.nn.init.normal_(model.rtd.weight if form == "paper" else model.rtd[3].weight)
    expected, _ = one_by_one(model, rows, True, form)
    loss = total_loss(expected, model.log_variances)
    wanted = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    for cost in (0, 10**6):
        monkeypatch.setitem(cline.GROUP_COST, "cpu", cost)
        batch = cline.make_batch(rows, model, args)
        assert (len(batch) > 5) == (cost == 0)
        total, values = cline.compute_loss(model, batch, args)
        assert [values[name].item() for name in ("loss", "mlm", "rtd", "cts")] == pytest.approx([x.item() for x in (loss, *expected)], rel=1e-4)
        model.zero_grad()
        total.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4, msg=lambda text: f"{name}: {text}")


def test_a_batch_without_masks(bert, monkeypatch):
    model, rows, args = prepared("paper", bert)
    monkeypatch.setattr(torch, "rand", torch.ones)
    loss, values = cline.compute_loss(model, cline.make_batch(rows, model, args), args)
    loss.backward()
    assert values["mlm"] == 0 and loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@both_forms
def test_sentence_probe(form, bert):
    model, rows, args = prepared(form, bert, texts=70)
    model.train()
    with torch.no_grad():
        (_, rtd, cts), (original, synonym, antonym) = one_by_one(model, rows, False, form)
    margins = [(o @ s - o @ a).item() for o, s, a in zip(original, synonym, antonym)]
    result = cline.sentence_probe(model, rows, args)
    assert model.training and result["hits"] == pytest.approx(100 * np.mean([m > 0 for m in margins]))
    assert [result["margin"], result["rtd"], result["cts"]] == pytest.approx([np.mean(margins), rtd.item(), cts.item()], rel=1e-3)


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
def test_other_encoders(kind):
    """The head of each: what it makes of all tokens, its decoder gives for the chosen ones."""
    torch.manual_seed(0)
    if kind == "roberta":
        model = RobertaForMaskedLM(RobertaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32))
    else:
        model = DistilBertForMaskedLM(DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=32))
    wrapped = SimpleNamespace(lm=model.eval(), encoder=model.base_model, device=torch.device("cpu"), bf16=False)
    torch.nn.init.normal_(model.get_output_embeddings().bias)
    ids, mask = torch.randint(3, 40, (3, 9)), torch.ones(3, 9).long()
    chosen = torch.rand(3, 9) < 0.4
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    hidden, states = cline.lm_states(wrapped, ids, mask, chosen)
    torch.testing.assert_close(hidden, output.hidden_states[-1])
    torch.testing.assert_close(model.get_output_embeddings()(states), output.logits[chosen])
    loss = cline.masked_lm_loss(states, ids[chosen], wrapped, SimpleNamespace(impl="auto"))
    torch.testing.assert_close(loss, F.cross_entropy(output.logits[chosen], ids[chosen]))
    assert not model.base_model._forward_hooks and not model.get_output_embeddings()._forward_pre_hooks


# Whole runs; the shared ones are those of test_scripts.py, whose SCRIPTS read scored pairs.

@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(test_scripts.SCRIPTS, "cline", COMMAND)
    monkeypatch.setattr(test_scripts, "TEXT", [*test_scripts.TEXT, "cline"])


def test_copied_with_kernels_alone(registered, tmp_path):
    test_scripts.test_copied_with_kernels_alone("cline", tmp_path)


@both_forms
def test_resume_is_exact(registered, form, tmp_path, monkeypatch):
    test_scripts.test_resume_is_exact("cline", ["--form", form, "--held-out", 4], tmp_path, monkeypatch)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_impl_follows_eager(registered, impl, tmp_path, monkeypatch):
    if impl == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU's Triton, and this file stays on the CPU")
    flags = [*test_scripts.small("cline", tmp_path, 12), "--steps", 2, "--batch-size", 4]
    losses = {x: [step["mlm"] for step in run("cline", tmp_path / x, *flags, "--impl", x).steps] for x in ("eager", impl)}
    assert losses[impl] == pytest.approx(losses["eager"], abs=1e-4) and losses[impl][0] > 1


def test_learns(tmp_path):
    """All three losses fall, and on texts that were held out the margin opens."""
    result = run("cline", tmp_path / "out", *COMMAND, "--steps", 150, "--batch-size", 16, "--eval-every", 50, "--held-out", 60)
    first, last = ({name: np.mean([step[name] for step in part]) for name in ("mlm", "rtd", "cts")} for part in (result.steps[:4], result.steps[-4:]))
    assert last["mlm"] < 0.8 * first["mlm"] and last["rtd"] < 0.4 * first["rtd"] and last["cts"] < first["cts"]
    margins = [step["dev_margin"] for step in result.steps if "dev_margin" in step]             # hits 25.000 → 78.333, margin ...
    before, after = (float(result.said["done"].split()[i].strip(",")) for i in (1, 3))
    assert len(margins) == 3 and margins[-1] > max(0.01, *margins[:-1]) and before < 40 and after > 60


def test_evaluation_leaves_no_trace(tmp_path):
    flags = [*COMMAND, "--steps", 4, "--batch-size", 8, "--held-out", 20]
    often, seldom = (run("cline", tmp_path / str(every), *flags, "--eval-every", every) for every in (1, 100))
    assert [sum("dev_margin" in step for step in x.steps) for x in (often, seldom)] == [4, 1]
    assert often.losses == seldom.losses
    assert [part for part in ("model", "optimizer", "random") if not equal(often.state[part], seldom.state[part])] == []


def one_of_several(rank, port, out, flags):
    cline.mask_tokens = fixed_masks
    test_scripts.one_of_several(rank, test_scripts.WORLD, port, "cline", out, flags)


def test_several_processes_equal_one(registered, tmp_path, bert, monkeypatch):
    """With masks that do not depend on the process. Ranks have different numbers of masked and of scored tokens."""
    flags = [*test_scripts.small("cline", tmp_path, 23), "--model", bert, "--form", "code", "--steps", 3, "--lr", 1e-4, "--warmup-steps", 1,
             "--max-length", 64, "--held-out", 2]
    monkeypatch.setattr(cline, "mask_tokens", fixed_masks)
    one = run("cline", tmp_path / "one", *flags)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(one_of_several, (port, tmp_path / "two", flags), nprocs=test_scripts.WORLD, start_method="forkserver")
    two = metrics(tmp_path / "two")
    for name in ("loss", "mlm", "rtd", "cts"):
        assert [step[name] for step in two] == pytest.approx([step[name] for step in one.steps], abs=1e-4)
    assert torch.load(tmp_path / "two" / "norms") == pytest.approx(one.norms, rel=1e-3)
    for key, weight in torch.load(tmp_path / "two" / "state.pt", weights_only=True)["model"].items():
        if not key.endswith("key.bias"):                       # softmax ignores it: its gradient is rounding, which Adam makes large
            torch.testing.assert_close(weight, one.state["model"][key], atol=2e-4, rtol=0, msg=key)


@both_forms
def test_the_folder_is_the_encoder(form, tmp_path, bert):
    """By the line that was printed; in the code's form with the trained pooler."""
    flags = [*COMMAND, "--model", bert, "--form", form, "--steps", 2, "--batch-size", 4, "--max-length", 64]
    result = run("cline", tmp_path / "out", *flags)
    encoder = eval(result.said["load"].split("  or  ")[1], {"AutoModel": AutoModel}).eval()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("The dog ate.", return_tensors="pt")
    hidden = result.model.eval().encoder(**tokens).last_hidden_state
    output = encoder(**tokens)
    torch.testing.assert_close(output.last_hidden_state, hidden)
    assert (encoder.pooler is None) == (form == "paper")
    if form == "code":
        torch.testing.assert_close(output.pooler_output, torch.tanh(result.model.head(hidden[:, 0])))


def test_saved_triples_make_the_same_run(registered, tmp_path, bert):
    """Also resumed, when the file is there already."""
    flags, file = [*test_scripts.small("cline", tmp_path), "--model", bert, "--max-length", 64, "--steps", 3], tmp_path / "triples.csv"
    made = run("cline", tmp_path / "made", *flags, "--save-triples", file)
    content = file.read_bytes()
    read = run("cline", tmp_path / "read", *flags, "--data", file)
    assert read.losses == made.losses and equal(read.state["model"], made.state["model"])
    resumed = run("cline", tmp_path / "made", *flags, "--save-triples", file, "--resume")
    assert resumed.losses == made.losses and file.read_bytes() == content


# Bad input: one line, exit code 2, nothing written.

def refuse(capfd, wanted, *flags):
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    with pytest.raises(SystemExit) as end:
        cline.main([str(flag) for flag in (*COMMAND, "--batch-size", 2, "--steps", 1, *flags)])
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert re.fullmatch(rf"cline\.py: {wanted}\n", err), err
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before


def spoil(change):
    """A change of data.noun's third line, or of the whole."""
    def write(folder):
        lines = (folder / "data.noun").read_bytes().splitlines(keepends=True)
        (folder / "data.noun").write_bytes(b"".join(change(lines)))
    return write


DAMAGED = r"w/data\.noun line %d: not what a WordNet database has at this place; it is damaged, copy it anew"


@pytest.mark.parametrize("change, wanted", [
    (shutil.rmtree, r"--wordnet w: data\.noun: No such file or directory; wanted the folder of a WordNet database"),
    (lambda w: (w / "data.verb").unlink(), r"--wordnet w: data\.verb: No such file .*"),
    (lambda w: (w / "data.verb").write_bytes(b""), r"--wordnet w: data\.verb is empty; .*"),
    (spoil(lambda lines: lines[:2] + [b"x" + lines[2]] + lines[3:]), DAMAGED % 3),
    (spoil(lambda lines: lines[:2] + [lines[2].replace(b"individual", b"\xff\xff")] + lines[3:]), DAMAGED % 3),
    (spoil(lambda lines: lines[:2] + [lines[2].replace(b" 001 @", b" 002 @")] + lines[3:]), DAMAGED % 3),
    (spoil(lambda lines: [line.replace(b"\n", b"\r\n") for line in lines]), DAMAGED % 2),
    (spoil(lambda lines: lines[:2] + lines[3:]), DAMAGED % 3),
    (spoil(lambda lines: lines[:-1] + [lines[-1][:-3]]), DAMAGED % 118),
    (spoil(lambda lines: lines[:10]), r"w/data\.noun: synset \d{8} points to word 1 of \d{8} in data\.noun, which is not there; the database .*"),
    (lambda w: (w / "noun.exc").write_bytes(b"\n"), r"w/noun\.exc line 1: not what .*")])
def test_damaged_wordnet(tmp_path, monkeypatch, capfd, change, wanted):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "wordnet", "w")
    change(Path("w"))
    refuse(capfd, wanted, "--wordnet", "w")


@pytest.mark.parametrize("name, content, wanted", [
    ("a.txt", "He was not.\nIt is his.\nThey were.\n", r"a\.txt: 0 rows have replaced words on both sides, wanted at least --batch-size \+ --held-out, which are 2 \+ 0"),
    ("a.txt", "A dog ate.\n\n", r"a\.txt line 2: an empty cell; fill it or delete the row"),
    ("a.csv", "A b,c\n", r"a\.csv line 1: 2 columns, wanted 1 \(text\), 3 \(original, synonym, antonym\) or 5 \(and synonym_words, antonym_words\)"),
    ("a.csv", "a b,c,d,e\n", r"a\.csv line 1: 4 columns, wanted .*"),
    ("a.csv", "A,b,c\nA,b\n", r"a\.csv line 2: 2 columns, wanted 3"),
    ("a.csv", "A,b,\n", r"a\.csv line 1: an empty cell; .*"),
    ("a.csv", "A,b,c,0:1:2,x\n", r"a\.csv line 1: 'x', wanted .*"),
    ("a.csv", "A,b,c,0:1:2,0-1-4\n", r"a\.csv line 1: '0-1-4', wanted start:end:code \(0 kept, 1 to 5 replaced\) of words of the text, in order"),
    ("a.csv", "A,b,c,0:2:2,0:1:4\n", r"a\.csv line 1: '0:2:2', wanted .*"),
    ("a.csv", "A,b c,c,2:3:2 0:1:2,0:1:4\n", r"a\.csv line 1: '2:3:2 0:1:2', wanted .*"),
    ("a.csv", "A,b,c,0:1:6,0:1:4\n", r"a\.csv line 1: '0:1:6', wanted .*"),
    ("a.csv", "A b,A b,c d\nA b,A c,A b\n", r"a\.csv: 0 rows have .*"),
    ("a.txt", "A dog ate.\nA cat ate.\nThe cat ran.\n", r"a\.txt: 3 rows have .*, which are 2 \+ 2")])
def test_bad_data(tmp_path, monkeypatch, capfd, name, content, wanted):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    refuse(capfd, wanted, "--data", name, "--synonym-rate", 1, "--antonym-rate", 1, *["--held-out", 2] * wanted.endswith("2"))


@pytest.mark.parametrize("flags, wanted", [
    ("--tagger xx_none", r"--tagger xx_none: .*; install it, or take lexicon"),
    ("--save-triples good.txt", r"--save-triples good\.txt: wanted a \.csv that does not exist, in a folder that does"),
    ("--save-triples none/a.csv", r"--save-triples none/a\.csv: wanted .*"),
    ("--save-triples good.csv", r"--save-triples good\.csv: wanted .*"),
    ("--save-triples new.csv --data good.csv", r"--save-triples new\.csv: good\.csv holds triples already"),
    ("--max-length 513", r"--max-length 513: scratch reads at most 512 tokens"),
    ("--synonym-rate nan", r"argument --synonym-rate: nan: wanted a number of at least 0")])
def test_bad_flags(tmp_path, monkeypatch, capfd, flags, wanted):
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text("A dog.,A hound.,A cat.\n" * 4)
    refuse(capfd, wanted, *flags.split())


def test_texts_need_a_wordnet(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys.modules[__name__], "COMMAND", COMMAND[:4])
    monkeypatch.chdir(tmp_path)
    refuse(capfd, r".*sentences\.txt holds texts, which want --wordnet, a WordNet folder: Debian's package wordnet-base has /usr/share/wordnet")
