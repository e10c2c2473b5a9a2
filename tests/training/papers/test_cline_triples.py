"""Test CLINE's triples: replaced words, their labels, .csv files of triples, and labels of tokens."""
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from kernels.training.data import read_table
from kernels.training.papers import cline_triples
from kernels.training.papers.cline_triples import KINDS, align_words, label_copies
from kernels.training.papers.cline_wordnet import WordNet, tag_words
from running import DATA, SENTENCES

LATE, WORDNET = "The old dog chased two hounds, late.", WordNet(DATA / "wordnet")
TEXTS = [text for text, in SENTENCES]


@pytest.mark.parametrize("side, text, kinds", [
    ("synonym", LATE, {0.33: "hypernym", 0.34: "synonym", 0.66: "synonym", 0.67: "inflected"}),
    ("antonym", LATE, {0.49: "antonym", 0.51: "random"}), ("synonym", "thing", {0.0: "inflected"}),
    ("antonym", "dog", {0.0: "random"}), ("synonym", "fully", {0.0: None})])
def test_one_kind_of_replacement_per_text(side, text, kinds, monkeypatch):
    """`kinds` is {random number: the kind of replacement that it selects for the text, None if no word is
    replaced}. If a kind finds nothing to replace, the next kind is tried (released code)."""
    rng = random.Random(0)
    words, = tag_words([text], None, WORDNET)
    for number, kind in kinds.items():
        monkeypatch.setattr(rng, "random", lambda: number)
        new, labels = cline_triples.replace_words(text, words, KINDS[side], 1, WORDNET, rng)
        assert {kind for *_, kind in labels} - {None} == ({kind} - {None})
        assert (new == text) == (kind is None)


def test_triples():
    """The text between candidate words does not change. Each replacement fits its kind, and the replaced
    share of the words is at most `rate`. Triples depend only on the texts and the seed."""
    args, rates = SimpleNamespace(synonym_rate=0.4, antonym_rate=0.1, seed=42, tagger="lexicon"), (0.4, 0.1)
    first, triples = (cline_triples.make_triples(TEXTS, WORDNET, args) for _ in range(2))
    args.seed = 1
    assert first == triples != cline_triples.make_triples(TEXTS, WORDNET, args)
    words = tag_words(TEXTS, None, WORDNET)
    found = {side: Counter() for side in KINDS}
    for text, row, tagged in zip(TEXTS, triples, words, strict=True):
        candidates = [word for word in tagged if word[2]]
        for copy, labels, side, rate in zip(row[1:3], row[3:], KINDS, rates):
            replaced, restored = [kind for *_, kind in labels if kind], copy
            for (start, end, pos), (a, b, kind) in reversed(list(zip(candidates, labels, strict=True))):
                old, new = text[start:end], copy[a:b]
                options = WORDNET.replacements(kind, old.lower(), pos) if kind else [old]
                assert new in options
                restored = restored[:a] + old + restored[b:]
            most = int(rate * len(tagged) + 1e-9)
            assert row[0] == restored == text and len(replaced) <= most and len(set(replaced)) <= 1
            found[side].update(replaced)
            found[side]["at the limit"] += len(replaced) == min(most, len(candidates))
    assert {side: {*KINDS[side], "at the limit"} for side in KINDS} == {x: {*found[x]} for x in found}
    assert all(count["at the limit"] > 20 for count in found.values())


def test_files_of_triples(tmp_path):
    """Saved texts can be read again. Words of a copy that are not in the original count as replaced."""
    texts = ('He said "no",\nthen', 'He said "not",\nthen', "She, 'yes'")
    run = SimpleNamespace(rank=0, args=SimpleNamespace(save_triples=tmp_path / "triples.csv"))
    cline_triples.save_triples([(*texts, [], [])], run)
    _, table = read_table(tmp_path / "triples.csv", roles=cline_triples.ROLES)
    assert [tuple(cells) for _, cells in table] == [texts]
    found = [bool(kind) for *_, kind in align_words("A dog eats.", "A big dog ate.")]
    assert found == [False, True, False, True, False]
    texts = "a b", "a c", "d b"
    *_, synonym, antonym = label_copies(texts)
    assert synonym == [(0, 1, None), (2, 3, "replace")] and antonym == [(0, 1, "replace"), (2, 3, None)]


@pytest.mark.parametrize("form, other", [("paper", 0), ("code", -100)])
def test_labels_of_tokens(form, other):
    """A token has the label of the word in which the token starts (released code). With a byte-level
    tokenizer, a token may begin with the space before the word."""
    text, words = "naïve bread makers go", [(0, 5, None), (6, 18, "hypernym")]
    offsets = [(0, 0), (0, 2), (2, 5), (5, 11), (6, 11), (11, 14), (14, 18), (18, 21), (19, 21), (0, 0)]
    encoding = SimpleNamespace(offsets=offsets, special_tokens_mask=[1, *[0] * 8, 1])
    labels = cline_triples.token_labels(text, words, encoding, 2, form)
    expected = [-100, 0, 0, *[2] * 4, other, other, -100]
    assert labels.dtype == np.int8 and labels.tolist() == expected


def test_tokenised_triples_are_truncated_with_their_labels(bert):
    """Truncation may cut a replaced word. A row whose truncated copy equals the original is left out."""
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert))
    rows = [("a dog eats", "a hound eats", "a cat eats", [(2, 7, True), (8, 12, None)], [(2, 5, True)]),
            ("the small dog", "the small hound", "a cat", [(10, 15, True)], [(0, 1, True)]),
            ("a", "b", "a", [(0, 1, True)], [])]
    args, none = SimpleNamespace(form="paper", max_length=8), -100          # 8 = 6 letters + 2 special tokens
    (row,), _ = cline_triples.tokenise_triples(rows, model, args)
    assert [len(x) for x in row[:5]] == [8] * 5
    labels = [x.tolist() for x in row[3:5]]
    assert labels == [[none, 0, 1, 1, 1, 1, 1, none], [none, 0, 2, 2, 2, 0, 0, none]]
