"""WordNet's reader: lemmas, what may replace a word, which words of a text are such words, damaged files."""
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kernels.training.command import Fault
from kernels.training.wordnet import WordNet, inflect, load_tagger, tag_words
from running import DATA


@pytest.fixture(scope="module")
def wordnet():
    return WordNet(DATA / "wordnet")


@pytest.mark.parametrize("pos, lemmas", [
    ("noun", dict(dogs="dog", women="woman", coaches="coach", parties="", leave="")),
    ("verb", dict(threw="throw", baked="bake", chases="chase", left="leave", leaving="leave", carries="")),
    ("adj", dict(better="good", older="old", later="late")), ("adv", dict(late="late"))])
def test_lemmas(wordnet, pos, lemmas):
    assert {word: " ".join(wordnet.lemmas(word, pos)) for word in lemmas} == lemmas


@pytest.mark.parametrize("kind, pos, options", [
    ("synonym", "noun", {"dogs": "hound", "baker": "bread maker", "woman": "lady", "twelve": "noon"}),
    ("synonym", "verb", {"walk": ""}), ("synonym", "adv", {"again": "once more"}),
    ("hypernym", "noun", {"ponies": "horse", "thing": ""}), ("hypernym", "verb", {"leave": "go, move"}),
    ("antonym", "noun", {"boys": "girl", "male child": "girl"}),               # of any word of the synset
    ("antonym", "adj", {"asleep": "awake", "unknown": ""}),
    ("inflected", "noun", {"dog": "dogs", "children": "child"}),
    ("inflected", "verb", {"took": "take, taken, takes, taking", "stops": "stop, stopped, stopping",
                           "winning": "win, wins, won"}),
    ("inflected", "adj", {"old": "older, oldest", "best": "better, good", "perfect": ""}),
    ("inflected", "adv", {"soon": ""})])
def test_options(wordnet, kind, pos, options):
    assert {word: ", ".join(wordnet.options(kind, word, pos)) for word in options} == options


def test_random_words_are_single_ones(wordnet):
    words = wordnet.options("random", "dog", "noun")
    assert words == sorted(set(words)) and len(words) > 200
    assert all(re.fullmatch(r"[^\W\d_]+", word) for word in words)
    assert {"dog", "buy", "scarlet", "soon"} < set(words)


@pytest.mark.parametrize("word, forms", [
    ("try", "tries trying tried trier"), ("bake", "bakes baking baked baker"),
    ("agree", "agrees agreeing agreed agreer"), ("play", "plays playing played player"),
    ("miss", "misses missing missed misser"), ("echo", "echoes echoing echoed echoer"),
    ("dye", "dyes dyeing dyed dyer")])
def test_inflect(word, forms):
    assert " ".join(inflect(word, ending) for ending in ("es", "ing", "ed", "er")) == forms
    assert inflect("photo", "s") == "photos" and inflect("box", "s") == "boxes"


def test_lexicon_tags_words(wordnet):
    text = "Dogs chased him, and the Captain was late; 12 women's hounds didn't."
    [words] = tag_words([text], None, wordnet)
    assert [text[start:end] for start, end, _ in words] == [
        "Dogs", "chased", "him", ",", "and", "the", "Captain", "was", "late", ";", "12", "women's", "hounds",
        "didn't", "."]
    tagged = {text[start:end]: pos for start, end, pos in words if pos}
    assert tagged == dict(Dogs="noun", chased="verb", late="adj", hounds="noun")


def test_spacy_tags_words(monkeypatch):
    """With a spaCy that knows two sentences. A model that is not there is WordNet's turn only where none was
    asked for."""
    def word(text, idx, pos):
        return Mock(idx=idx, pos_=pos, is_space=pos == "SPACE", __len__=lambda _: len(text))

    docs = [[word("A", 0, "DET"), word("dog", 2, "NOUN"), word("  ", 5, "SPACE"), word("ran", 7, "VERB")],
            [word("Up", 0, "ADV")]]
    model = SimpleNamespace(meta=dict(lang="en", name="tiny", version="1.2"), pipe=lambda texts: iter(docs))
    spacy, args = SimpleNamespace(load=Mock(return_value=model)), SimpleNamespace(tagger=None)
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    tagger = load_tagger(args)
    assert args.tagger == "en_tiny 1.2"
    assert spacy.load.call_args == (("en_core_web_sm",), dict(exclude=["parser", "ner", "lemmatizer"]))
    words = [[(0, 1, None), (2, 5, "noun"), (7, 10, "verb")], [(0, 2, "adv")]]
    assert list(tag_words(["A dog  ran", "Up"], tagger, None)) == words
    spacy.load.side_effect = OSError("[E050] Can't find model.\nMore")
    args.tagger = None
    assert load_tagger(args) is None and args.tagger == "lexicon" and load_tagger(args) is None
    args.tagger = "de_none"
    wanted = r"^--tagger de_none: \[E050\] Can't find model\.; install it, or take lexicon$"
    with pytest.raises(Fault, match=wanted):
        load_tagger(args)


def spoil(change):
    """A change of the lines of data.noun."""
    def write(folder):
        lines = (folder / "data.noun").read_bytes().splitlines(keepends=True)
        (folder / "data.noun").write_bytes(b"".join(change(lines)))
    return write


def third(change):
    return spoil(lambda lines: [*lines[:2], change(lines[2]), *lines[3:]])


DAMAGED = r"w/data\.noun line %d: not what a WordNet database has at this place; it is damaged, copy it anew"
GONE = r"w/data\.noun: synset \d{8} points to word 1 of \d{8} in data\.noun, which is not there; the .*"


@pytest.mark.parametrize("change, wanted", [
    (shutil.rmtree, r"--wordnet w: data\.noun: No such file or directory; wanted the folder of a WordNet .*"),
    (lambda w: (w / "data.verb").unlink(), r"--wordnet w: data\.verb: No such file .*"),
    (lambda w: (w / "data.verb").write_bytes(b""), r"--wordnet w: data\.verb is empty; .*"),
    (third(lambda line: b"x" + line), DAMAGED % 3),
    (third(lambda line: line.replace(b"individual", b"\xff\xff")), DAMAGED % 3),
    (third(lambda line: line.replace(b" 001 @", b" 002 @")), DAMAGED % 3),
    (third(lambda line: b""), DAMAGED % 3),
    (spoil(lambda lines: [line.replace(b"\n", b"\r\n") for line in lines]), DAMAGED % 2),
    (spoil(lambda lines: [*lines[:-1], lines[-1][:-3]]), DAMAGED % 118),
    (spoil(lambda lines: lines[:10]), GONE),
    (lambda w: (w / "noun.exc").write_bytes(b"\n"), r"w/noun\.exc line 1: not what .*")])
def test_a_damaged_database(tmp_path, monkeypatch, change, wanted):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "wordnet", "w")
    change(Path("w"))
    with pytest.raises(Fault, match=f"^{wanted}$"):
        WordNet("w")


def test_irregular_forms_may_be_missing(tmp_path):
    shutil.copytree(DATA / "wordnet", tmp_path / "w")
    (tmp_path / "w" / "verb.exc").unlink()
    wordnet = WordNet(tmp_path / "w")
    assert wordnet.lemmas("threw", "verb") == [] and wordnet.lemmas("dogs", "noun") == ["dog"]
