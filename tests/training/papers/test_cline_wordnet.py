"""Test the WordNet reader: lemmas, replacements of a word, and parts of speech of the words of a text."""
import pytest

from kernels.training.papers.cline_wordnet import WordNet, tag_words
from running import DATA

WORDNET = WordNet(DATA / "wordnet")


@pytest.mark.parametrize("kind, pos, expected", [
    ("lemma", "noun", dict(dogs="dog", women="woman", coaches="coach", parties="", leave="")),
    ("lemma", "verb", dict(threw="throw", baked="bake", left="leave", leaving="leave", carries="")),
    ("lemma", "adj", dict(better="good", older="old", later="late")), ("lemma", "adv", dict(late="late")),
    ("synonym", "noun", {"dogs": "hound", "baker": "bread maker", "woman": "lady"}),
    ("synonym", "verb", {"walk": ""}), ("synonym", "adv", {"again": "once more"}),
    ("hypernym", "noun", {"ponies": "horse", "thing": ""}), ("hypernym", "verb", {"leave": "go, move"}),
    ("antonym", "noun", {"boys": "girl", "male child": "girl"}),               # synonyms share antonyms
    ("inflected", "noun", {"dog": "dogs", "children": "child"}),
    ("inflected", "verb", {"took": "take, taken, takes, taking", "stops": "stop, stopped, stopping"}),
    ("inflected", "adj", {"old": "older, oldest", "best": "better, good", "perfect": ""})])
def test_lemmas_and_replacements(kind, pos, expected):
    def find(word):
        return WORDNET.lemmas(word, pos) if kind == "lemma" else WORDNET.replacements(kind, word, pos)

    assert {word: ", ".join(find(word)) for word in expected} == expected
    words = WORDNET.replacements("random", "dog", "noun")      # single words of any part of speech
    assert {"dog", "buy", "scarlet", "soon"} < set(words) and all(word.isalpha() for word in words)


def test_lexicon_tags_words():
    text = "Dogs chased him, and the Captain was late; 12 women's hounds didn't."
    [words] = tag_words([text], None, WORDNET)
    found = "|".join(f"{text[start:end]} {pos}" if pos else text[start:end] for start, end, pos in words)
    assert found == ("Dogs noun|chased verb|him|,|and|the|Captain|was|late adj|;|12|women's|hounds noun|"
                     "didn't|.")


def test_the_part_of_speech_with_the_most_senses_wins():
    wordnet = WordNet(DATA / "wordnet")
    wordnet.senses["verb"]["hound"] = [0] * 9
    assert [*tag_words(["hound"], None, wordnet)] == [[(0, 5, "verb")]]
