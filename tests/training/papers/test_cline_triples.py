"""CLINE's triples: replaced words, their labels, .csv files of triples, and labels of tokens."""
import csv
import math
import random
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from kernels.training.papers.cline_triples import (
    CODES,
    COLUMNS,
    KINDS,
    align_words,
    make_triples,
    read_triple,
    replace_words,
    token_labels,
    tokenise_triples,
    write_triples,
)
from kernels.training.papers.cline_wordnet import WordNet, tag_words
from running import DATA, SENTENCES

LATE, WORDNET = "The old dog chased two hounds, late.", WordNet(DATA / "wordnet")
TEXTS = [text for text, in SENTENCES]


@pytest.mark.parametrize("side, text, kinds", [
    ("synonym", LATE, {0.33: "hypernym", 0.34: "synonym", 0.66: "synonym", 0.67: "inflected"}),
    ("antonym", LATE, {0.49: "antonym", 0.51: "random"}), ("antonym", "day", {0.0: "antonym"}),
    ("synonym", "Baker!", {0.0: "hypernym"}), ("synonym", "thing", {0.0: "inflected"}), # no hypernym
    ("synonym", "the soon", {0.0: "synonym"}), ("antonym", "dog", {0.0: "random"}),
    ("synonym", "fully", {0.0: None}), ("antonym", "him", {0.0: None})])
def test_one_kind_of_replacement_per_text(side, text, kinds, monkeypatch):
    """Each random number in `kinds` selects this kind of replacement for the text (None: no replacement)."""
    rng = random.Random(0)
    words, = tag_words([text], None, WORDNET)
    for number, kind in kinds.items():
        monkeypatch.setattr(rng, "random", lambda: number)     # noqa: B023 - called before the next loop
        new, labels = replace_words(text, words, KINDS[side], 1, WORDNET, rng)
        assert {code for *_, code in labels} - {0} == ({CODES[kind]} if kind else set())
        assert (new == text) == (kind is None)


def triples_of_texts(rates, seed=42):
    args = SimpleNamespace(synonym_rate=rates[0], antonym_rate=rates[1], seed=seed, tagger="lexicon")
    return make_triples(TEXTS, WORDNET, args)


@pytest.mark.parametrize("rates", [(0.4, 0.1), (1, 0.2), (0.4, 1)])
def test_triples(rates, capsys, tmp_path):
    """The text between candidate words does not change. Each replacement fits its kind, and at most a
    fraction `rate` of the words is replaced. The printed percentages are those of the labels. Triples depend
    on the seed only, and can be saved and read again."""
    triples, names = triples_of_texts(rates), {0: None} | {code: kind for kind, code in CODES.items()}
    expected = r"words tagged by lexicon; replaced: ([\d.]+) % .* synonym side .*, ([\d.]+) % .* antonym side"
    printed = re.search(expected, capsys.readouterr().out).groups()
    assert triples == triples_of_texts(rates) != triples_of_texts(rates, seed=1)
    assert [row[0] for row in triples] == TEXTS
    words = list(tag_words(TEXTS, None, WORDNET))
    for i, (side, rate, share) in enumerate(zip(KINDS, rates, printed), 1):
        kinds, full = Counter(), 0
        for row, tagged in zip(triples, words):
            candidates, restored = [word for word in tagged if word[2]], row[i]
            for (start, end, pos), (a, b, code) in reversed(list(zip(candidates, row[i + 2], strict=True))):
                old, new, kind = row[0][start:end], row[i][a:b], names[code]
                restored = restored[:a] + old + restored[b:]
                assert new in WORDNET.replacements(kind, old.lower(), pos) if kind else new == old
                kinds[kind] += 1
            count, most = sum(code > 0 for *_, code in row[i + 2]), math.floor(rate * len(tagged) + 1e-9)
            assert restored == row[0] and count <= most
            full += count == min(most, len(candidates))
        assert full > 20 and set(kinds) - {None} == set(KINDS[side])
        replaced = kinds.total() - kinds[None]
        assert float(share) == pytest.approx(100 * replaced / sum(map(len, words)), abs=0.051)
    labels = [(3, 7, 0), (9, 12, 2)], [(0, 3, 5)]
    triples[0] = 'He said "no",\nthen', 'He said "not",\nthen', "She, 'yes'", *labels
    triples[1] = "He", "He", "He", [], []
    write_triples(triples, tmp_path / "triples.csv")
    with open(tmp_path / "triples.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == COLUMNS and [read_triple(row, "") for row in rows] == triples
    assert [path.name for path in tmp_path.iterdir()] == ["triples.csv"]


def test_labels_from_differences_of_three_texts():
    words = [(0, 1, 0), (2, 5, 1), (6, 9, 0), (9, 10, 0), (11, 14, 1), (15, 18, 0), (18, 19, 0)]
    assert align_words("A dog, a cat.", "A big dog, one cat.") == words
    texts = "a b", "a c", "d b"
    assert read_triple(texts, "") == (*texts, [(0, 1, 0), (2, 3, 1)], [(0, 1, 1), (2, 3, 0)])


@pytest.mark.parametrize("form", ["paper", "code"])
def test_labels_of_tokens(form):
    """A token has the label of the word in which it starts, as in the released code. The offsets are
    those of word pieces and of byte-level tokenizers: a token may begin with a space, be a space, or share a
    character of several bytes with another."""
    text, words = "naïve bread makers go — 日本 ", [(0, 5, 0), (6, 18, 3), (22, 23, 5)]
    offsets = [(0, 0), (0, 2), (2, 5), (5, 11), (6, 11), (11, 14), (14, 18), (18, 21), (19, 21), (21, 22),
               (22, 23), (22, 23), (23, 25), (24, 25), (24, 25), (25, 26), (26, 27), (0, 0)]
    encoding = SimpleNamespace(offsets=offsets, special_tokens_mask=[1, *[0] * 16, 1])
    labels = token_labels(text, words, encoding, 2, form)
    other = 0 if form == "paper" else -100
    expected = [-100, 0, 0, *[2] * 4, other, other, 2, 2, 2, *[other] * 5, -100]
    assert labels.dtype == np.int8 and labels.tolist() == expected


def test_tokenised_triples_are_truncated_with_their_labels(bert):
    """Truncation may cut a replaced word. Rows without a difference, before or after truncation, are left
    out; the others keep their index, for error messages."""
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert))
    rows = [("a dog eats", "a hound eats", "a cat eats", [(2, 7, 2), (8, 12, 0)], [(2, 5, 4)]),
            ("the small dog", "the small hound", "a cat", [(10, 15, 2)], [(0, 1, 1)]),
            ("a", "b", "a", [(0, 1, 2)], []), ("a", "b", "c", [(0, 1, 2)], [(0, 1, 4)])]
    found, truncated = tokenise_triples(rows, model, SimpleNamespace(form="paper", max_length=8))
    first, last = found
    none = -100
    assert truncated == 5 and (first[5], last[5]) == (0, 3)    # 6 letters and two special tokens fit
    assert [len(x) for x in first[:5]] == [8] * 5
    labels = [x.tolist() for x in (*first[3:5], *last[3:5])]
    assert labels[:2] == [[none, 0, 1, 1, 1, 1, 1, none], [none, 0, 2, 2, 2, 0, 0, none]]
    assert labels[2:] == [[none, 1, none], [none, 2, none]]
