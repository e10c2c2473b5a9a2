"""The WordNet reader: lemmas, replacements of a word, parts of speech of a text, and damaged files."""
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kernels.training.errors import UserError
from kernels.training.papers.cline_wordnet import WordNet, inflect, load_tagger, tag_words
from running import DATA

WORDNET = WordNet(DATA / "wordnet")


@pytest.mark.parametrize("kind, pos, expected", [
    ("lemma", "noun", dict(dogs="dog", women="woman", coaches="coach", parties="", leave="")),
    ("lemma", "verb", dict(threw="throw", baked="bake", left="leave", leaving="leave", carries="")),
    ("lemma", "adj", dict(better="good", older="old", later="late")), ("lemma", "adv", dict(late="late")),
    ("synonym", "noun", {"dogs": "hound", "baker": "bread maker", "woman": "lady"}),
    ("synonym", "verb", {"walk": ""}), ("synonym", "adv", {"again": "once more"}),
    ("hypernym", "noun", {"ponies": "horse", "thing": ""}), ("hypernym", "verb", {"leave": "go, move"}),
    ("antonym", "noun", {"boys": "girl", "male child": "girl"}),               # of all words in the synset
    ("inflected", "noun", {"dog": "dogs", "children": "child"}),
    ("inflected", "verb", {"took": "take, taken, takes, taking", "stops": "stop, stopped, stopping"}),
    ("inflected", "adj", {"old": "older, oldest", "best": "better, good", "perfect": ""}),
    ("inflected", "adv", {"soon": ""})])
def test_lemmas_and_replacements(kind, pos, expected):
    def find(word):
        return WORDNET.lemmas(word, pos) if kind == "lemma" else WORDNET.replacements(kind, word, pos)

    assert {word: ", ".join(find(word)) for word in expected} == expected
    words = WORDNET.replacements("random", "dog", "noun")      # single words of any kind
    assert {"dog", "buy", "scarlet", "soon"} < set(words) and all(word.isalpha() for word in words)


@pytest.mark.parametrize("forms", [
    "try tries trying tried trier", "bake bakes baking baked baker", "agree agrees agreeing agreed agreer",
    "play plays playing played player", "dye dyes dyeing dyed dyer", "echo echoes echoing echoed echoer"])
def test_inflect(forms):
    word, *expected = forms.split()
    assert [inflect(word, ending) for ending in ("es", "ing", "ed", "er")] == expected
    assert inflect("photo", "s") == "photos" and inflect("box", "s") == "boxes"


def test_lexicon_tags_words():
    text = "Dogs chased him, and the Captain was late; 12 women's hounds didn't."
    [words] = tag_words([text], None, WORDNET)
    found = "|".join(f"{text[start:end]} {pos}" if pos else text[start:end] for start, end, pos in words)
    assert found == ("Dogs noun|chased verb|him|,|and|the|Captain|was|late adj|;|12|women's|hounds noun|"
                     "didn't|.")


def test_spacy_tags_words(monkeypatch):
    """A fake spaCy knows two sentences. If the default model is not installed, WordNet is used; if another
    model is not, UserError."""
    def word(n, idx, pos):
        return Mock(idx=idx, pos_=pos, is_space=pos == "SPACE", __len__=lambda _: n)

    docs = [[word(1, 0, "DET"), word(3, 2, "NOUN"), word(2, 5, "SPACE"), word(3, 7, "VERB")],
            [word(2, 0, "ADV")]]
    model = SimpleNamespace(meta=dict(lang="en", name="tiny", version="1.2"), pipe=lambda texts: iter(docs))
    spacy, args = SimpleNamespace(load=Mock(return_value=model)), SimpleNamespace(tagger=None)
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    tagger = load_tagger(args)
    assert args.tagger == "en_tiny 1.2" and spacy.load.call_args[0] == ("en_core_web_sm",)
    words = [[(0, 1, None), (2, 5, "noun"), (7, 10, "verb")], [(0, 2, "adv")]]
    assert list(tag_words(["A dog  ran", "Up"], tagger, None)) == words
    spacy.load.side_effect, args.tagger = OSError("[E050] Can't find model.\nMore"), None
    assert load_tagger(args) is None and args.tagger == "lexicon"
    with pytest.raises(UserError, match=r"^--tagger none: \[E050\] Can't find model\.; install it, .*"):
        load_tagger(SimpleNamespace(tagger="none"))


@pytest.mark.parametrize("cut, message", [
    (b"or individual", "line 3: not a valid line"), (b"00000742 00 n", "points to word 1 of 00000742")])
def test_damaged_database(cut, message, tmp_path):
    """A file that ends in a line, or after one, is named. Files of irregular forms may be missing."""
    folder = shutil.copytree(DATA / "wordnet", tmp_path / "wordnet")
    (folder / "verb.exc").unlink()
    wordnet = WordNet(folder)
    assert wordnet.lemmas("threw", "verb") == [] and wordnet.lemmas("dogs", "noun") == ["dog"]
    whole = (folder / "data.noun").read_bytes()
    (folder / "data.noun").write_bytes(whole[: whole.index(cut)])
    with pytest.raises(UserError, match=rf"data\.noun.*{message}.*; the database is damaged; copy it again"):
        WordNet(folder)
