"""CLINE's triples: a text, a copy in which words keep its meaning, and a copy in which words change it.

Labels of a copy are [(start, end, code)]: places of words in the copy, and how each was replaced (CODES).
"""
import csv
import difflib
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np

from ..cli import fail, say, written
from ..output_dir import new_file
from ..progress import progress
from ..tables import plain
from ..text.tokens import letters_of, portions
from .wordnet import WORD, WordNet, load_tagger, tag_words

COLUMNS = "original", "synonym", "antonym", "synonym_words", "antonym_words"   # of a file of triples
ROLES = {name: [plain(name)] for name in COLUMNS} | {"original": ["original", "text", "sentence"]}
# Each side of a text draws one of its kinds; the next is taken if that finds no word (released code).
KINDS = {"synonym": ("hypernym", "synonym", "inflected"), "antonym": ("antonym", "random")}
CODES = dict(inflected=1, synonym=2, hypernym=3, antonym=4, random=5)          # 0: kept


def load_wordnet(path, args):
    """The WordNet database that makes triples of the texts of `path`; checks --wordnet and --save-triples."""
    if not args.wordnet:
        fail(f"{path} holds texts, which want --wordnet, a WordNet folder: "
             "Debian's package wordnet-base has /usr/share/wordnet")
    if args.save_triples:
        target = Path(args.save_triples)
        taken = target.exists() and not args.resume
        if taken or target.suffix != ".csv" or not target.absolute().parent.is_dir():
            fail(f"--save-triples {target}: wanted a .csv that does not exist, in a folder that does")
    return WordNet(args.wordnet)


def make_triples(texts, wordnet, args):
    """Replace words of the texts and report how many.

    args      synonym_rate, antonym_rate: the largest share of a text's words to replace; seed; tagger
    returns   [(original, synonym text, antonym text, labels of the synonym text, labels of the antonym text)]
    """
    tagger, draw = load_tagger(args), random.Random(args.seed)
    rates = dict(synonym=args.synonym_rate, antonym=args.antonym_rate)
    triples, words, replaced = [], 0, Counter()
    for text, tagged in zip(progress(texts, "replacing words", " texts"), tag_words(texts, tagger, wordnet)):
        sides = [replace_words(text, tagged, KINDS[side], rates[side], wordnet, draw) for side in KINDS]
        copies, labels = zip(*sides)
        triples.append((text, *copies, *labels))
        words += len(tagged)
        replaced.update(code for side in labels for *_, code in side)
    share = {kind: 100 * replaced[code] / words for kind, code in CODES.items()}
    told = []
    for side, kinds in KINDS.items():
        each = " ".join(f"{kind} {share[kind]:.1f}" for kind in kinds)
        told.append(f"{sum(share[kind] for kind in kinds):.1f} % of words on the {side} side ({each})")
    say("triples", f"words tagged by {args.tagger}; replaced: {', '.join(told)}")
    return triples


def replace_words(text, words, kinds, rate, wordnet, draw):
    """Replace at most rate · words of a text, all by words of one kind.

    words     [(start, end, part of speech)] of tag_words; those with a part of speech may be replaced
    kinds     one is drawn, and the first from there on that finds any replacement is used
    draw      a random.Random
    returns   (new text, labels of all words that could have been replaced)
    """
    candidates, most = [word for word in words if word[2]], int(rate * len(words))
    draw.shuffle(candidates)
    for kind in kinds[int(draw.random() * len(kinds)) :]:
        new = {}
        for start, end, pos in candidates:
            if len(new) == most:
                break
            word = text[start:end].lower()
            choice = draw.choice(wordnet.options(kind, word, pos) or [word])
            if choice.lower() != word:
                new[start] = choice
        if new:
            break
    result, done, labels = "", 0, []
    for start, end, _ in sorted(candidates):
        result, word = result + text[done:start], new.get(start, text[start:end])
        labels.append((len(result), len(result) + len(word), CODES[kind] if start in new else 0))
        result, done = result + word, end
    return result + text[done:], labels


def save_triples(triples, run):
    """Write --save-triples once. A resumed run does not: a downloaded run folder could name any path."""
    path = run.args.save_triples
    if path and run.rank == 0 and not run.args.resume and not Path(path).exists():
        write_triples(triples, path)


def write_triples(triples, path):
    """Write a .csv that read_triple reads."""
    aside = Path(f"{path}.saving")
    with written(path), new_file(aside) as file:
        rows = ((*row[:3], *map(spell_labels, row[3:])) for row in triples)
        csv.writer(file).writerows([COLUMNS, *rows])
    os.replace(aside, path)


def spell_labels(labels):
    """Labels as write_triples writes them: start:end:code, with spaces between."""
    return " ".join(f"{start}:{end}:{code}" for start, end, code in labels)


def read_triple(cells, place):
    """A row of make_triples from 5 cells of a file, or from its 3 texts, whose words align_words labels."""
    if len(cells) == 3:
        return *cells, *(align_words(cells[0], text) for text in cells[1:])
    found = [re.findall(r"(\d{1,9}):(\d{1,9}):([0-5])", cell) for cell in cells[3:]]
    labels = [[tuple(map(int, word)) for word in words] for words in found]
    for text, cell, words in zip(cells[1:], cells[3:], labels):
        ends = [letter for word in words for letter in word[:2]]
        if cell != spell_labels(words) or ends != sorted(ends) or max(ends, default=0) > len(text):
            fail(f"{place}: {cell[:40]!r}, wanted start:end:code (0 kept, 1 to 5 replaced) of words of the "
                 "text, in order")
    return *cells[:3], *labels


def align_words(original, text):
    """Labels of all words of a text: 1 where an alignment with the original finds no equal word, else 0."""
    words = list(WORD.finditer(text))
    matcher = difflib.SequenceMatcher(None, WORD.findall(original), WORD.findall(text), autojunk=False)
    return [(*words[i].span(), int(kind != "equal"))
            for kind, _, _, first, last in matcher.get_opcodes() for i in range(first, last)]


def tokenise_triples(triples, model, args):
    """Tokenise triples, leaving out rows in which two of the three texts are equal.

    returns   [(ids, ids, ids, labels, labels, place in triples)], with token_labels of the synonym and
              the antonym text; and how many texts were cut to --max-length
    """
    rows, cut, first, how = [], 0, 0, dict(truncation=True, max_length=args.max_length)
    for part in portions(triples, lambda row: letters_of(row[:3])):
        views = [model.tokenizer([row[i] for row in part], **how).encodings for i in range(3)]
        for place, (row, *encodings) in enumerate(zip(part, *views), first):
            ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
            cut += sum(bool(encoding.overflowing) for encoding in encodings)
            if any(np.array_equal(ids[0], other) for other in ids[1:]):
                continue
            labels = (token_labels(row[i], row[i + 2], encodings[i], i, args.form) for i in (1, 2))
            rows.append((*ids, *labels, place))
        first += len(part)
    return rows, cut


def token_labels(text, words, encoding, replaced, form):
    """(L,) int8: RTD's class of each token of a copy, that of the word in which the token starts.

    words      the copy's labels; a replaced word has the class `replaced`, a kept one 0
    form       tokens of words without a label are kept (paper: 0), or do not count (code: −100); special
               tokens never count
    """
    letters = np.full(len(text) + 1, -100 if form == "code" else 0, np.int8)
    for start, end, code in words:
        letters[start:end] = replaced if code else 0
    starts = [end - len(text[start:end].lstrip()) for start, end in encoding.offsets]      # of some a space
    return np.where(encoding.special_tokens_mask, -100, letters[starts]).astype(np.int8)
