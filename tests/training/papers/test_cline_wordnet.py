"""The WordNet reader: lemmas, replacements of a word, parts of speech of a text, and damaged files."""
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kernels.training.errors import UserError
from kernels.training.papers.cline_wordnet import WordNet, inflect, load_tagger, tag_words
from running import DATA


@pytest.fixture(scope="module")
def wordnet():
    return WordNet(DATA / "wordnet")


@pytest.mark.parametrize("kind, pos, expected", [
    ("lemma", "noun", dict(dogs="dog", women="woman", coaches="coach", parties="", leave="")),
    ("lemma", "verb", dict(threw="throw", baked="bake", chases="chase", left="leave", leaving="leave",
                           carries="")),
    ("lemma", "adj", dict(better="good", older="old", later="late")), ("lemma", "adv", dict(late="late")),
    ("synonym", "noun", {"dogs": "hound", "baker": "bread maker", "woman": "lady", "twelve": "noon"}),
    ("synonym", "verb", {"walk": ""}), ("synonym", "adv", {"again": "once more"}),
    ("hypernym", "noun", {"ponies": "horse", "thing": ""}), ("hypernym", "verb", {"leave": "go, move"}),
    ("antonym", "noun", {"boys": "girl", "male child": "girl"}), # antonyms of all words in the synset
    ("antonym", "adj", {"asleep": "awake", "unknown": ""}),
    ("inflected", "noun", {"dog": "dogs", "children": "child"}),
    ("inflected", "verb", {"took": "take, taken, takes, taking", "stops": "stop, stopped, stopping",
                           "winning": "win, wins, won"}),
    ("inflected", "adj", {"old": "older, oldest", "best": "better, good", "perfect": ""}),
    ("inflected", "adv", {"soon": ""})])
def test_lemmas_and_replacements(wordnet, kind, pos, expected):
    def find(word):
        return wordnet.lemmas(word, pos) if kind == "lemma" else wordnet.replacements(kind, word, pos)

    assert {word: ", ".join(find(word)) for word in expected} == expected


def test_random_replacements_are_single_words(wordnet):
    words = wordnet.replacements("random", "dog", "noun")
    assert words == sorted(set(words)) and len(words) > 200 and {"dog", "buy", "scarlet", "soon"} < set(words)
    assert all(re.fullmatch(r"[^\W\d_]+", word) for word in words)


@pytest.mark.parametrize("forms", [
    "try tries trying tried trier", "bake bakes baking baked baker", "agree agrees agreeing agreed agreer",
    "play plays playing played player", "miss misses missing missed misser", "dye dyes dyeing dyed dyer",
    "echo echoes echoing echoed echoer", "radio radios radioing radioed radioer"])
def test_inflect(forms):
    word, *expected = forms.split()
    assert [inflect(word, ending) for ending in ("es", "ing", "ed", "er")] == expected
    assert inflect("photo", "s") == "photos" and inflect("box", "s") == "boxes"


def test_lexicon_tags_words(wordnet):
    text = "Dogs chased him, and the Captain was late; 12 women's hounds didn't."
    [words] = tag_words([text], None, wordnet)
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
    assert args.tagger == "en_tiny 1.2"
    assert spacy.load.call_args == (("en_core_web_sm",), dict(exclude=["parser", "ner", "lemmatizer"]))
    words = [[(0, 1, None), (2, 5, "noun"), (7, 10, "verb")], [(0, 2, "adv")]]
    assert list(tag_words(["A dog  ran", "Up"], tagger, None)) == words
    spacy.load.side_effect, args.tagger = OSError("[E050] Can't find model.\nMore"), None
    assert load_tagger(args) is None and args.tagger == "lexicon" and load_tagger(args) is None
    with pytest.raises(UserError, match=r"^--tagger none: \[E050\] Can't find model\.; install it, .*"):
        load_tagger(SimpleNamespace(tagger="none"))


DAMAGED = r"w/data\.noun line %d: not a valid line of a WordNet database; the database is damaged; .*"
BAD_FOLDER = r"--wordnet w: data\.%s; expected the folder of a WordNet database"


@pytest.mark.parametrize("name, old, new, expected", [
    ("data.noun", None, None, BAD_FOLDER % r"noun: No such file or directory"),
    ("data.verb", None, None, BAD_FOLDER % r"verb: No such file or directory"),
    ("data.verb", b"(?s).+", b"", BAD_FOLDER % r"verb is empty"),
    ("data.noun", b"00000131", b"x00000131", DAMAGED % 3), ("data.noun", b"individual", b"\xff", DAMAGED % 3),
    ("data.noun", rb" @ 00000131 n 0000", b" @ 00000131 n 00-1",
     r"w/data\.noun: synset 00000217 points to word -1 of 00000131 in data\.noun, .*"),
    ("data.noun", b" 001 @", b" 002 @", DAMAGED % 3), ("data.noun", b"00000131.*\n", b"", DAMAGED % 3),
    ("data.noun", b"\n", b"\r\n", DAMAGED % 2), ("data.noun", rb" +\n\Z", b"", DAMAGED % 118),
    ("data.noun", b"(?s)00000742 00 n.*", b"", r"w/data\.noun: synset 00000644 points to word 1 of 00000742 "
     r"in data\.noun, which does not exist; the database is damaged; copy it again"),
    ("noun.exc", b"(?s).+", b"\n", r"w/noun\.exc line 1: not a valid .*")])
def test_damaged_database(tmp_path, monkeypatch, name, old, new, expected):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "wordnet", "w")
    path = Path("w", name)
    path.write_bytes(re.sub(old, new, path.read_bytes(), count=1)) if old else path.unlink()
    with pytest.raises(UserError, match=f"^{expected}$"):
        WordNet("w")


def test_irregular_forms_may_be_missing(tmp_path):
    shutil.copytree(DATA / "wordnet", tmp_path, dirs_exist_ok=True)
    (tmp_path / "verb.exc").unlink()
    wordnet = WordNet(tmp_path)
    assert wordnet.lemmas("threw", "verb") == [] and wordnet.lemmas("dogs", "noun") == ["dog"]
