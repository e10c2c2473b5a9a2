"""CLINE's triples: a text, a copy in which replaced words keep the meaning ("synonym"), and a copy in which
replaced words change the meaning ("antonym").

The labels of a copy are [(start, end, code)]. Each label describes the word copy[start:end]: the code stands
for the kind of replacement that gave this word (see CODES), or is 0 if the word was not replaced.
"""
import csv
import difflib
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np

from ..data import normalise_name
from ..errors import fail, log
from ..out import atomic_file
from ..progress import progress
from ..text.tokens import count_characters, text_batches
from .cline_wordnet import WORD, WordNet, load_tagger, tag_words

COLUMNS = "original", "synonym", "antonym", "synonym_words", "antonym_words"   # in a .csv of triples
ROLES = {name: [normalise_name(name)] for name in COLUMNS} | {"original": ["original", "text", "sentence"]}
# kinds of replacement for each copy of a text. One kind, drawn at random, is tried first. If it replaces no
# word in the text, the next kind in the list is tried (released code).
KINDS = {"synonym": ("hypernym", "synonym", "inflected"), "antonym": ("antonym", "random")}
CODES = dict(inflected=1, synonym=2, hypernym=3, antonym=4, random=5)          # 0: not replaced


def load_wordnet(path, args):
    """Load the WordNet database of --wordnet. Raise UserError if the flag is missing, or if --save-triples
    does not name a new .csv file. The message about --wordnet names `path`, the file of the texts."""
    if not args.wordnet:
        fail(f"{path}: one column of texts, expected --wordnet with the folder of a WordNet database, for "
             "example /usr/share/wordnet of Debian's package wordnet-base")
    if args.save_triples:
        target = Path(args.save_triples)
        exists = target.exists() and not args.resume
        if exists or target.suffix != ".csv" or not target.absolute().parent.is_dir():
            fail(f"--save-triples {target}: expected the name of a new .csv file in an existing folder")
    return WordNet(args.wordnet)


def make_triples(texts, wordnet, args):
    """Make a triple of each text by replacing words. Print the percentage of words that each kind of
    replacement has replaced.

    args      has synonym_rate and antonym_rate (largest fractions of words to replace), seed and tagger
    returns   [(original, synonym text, antonym text, labels of the synonym text, labels of the antonym text)]
    """
    tagger, rng = load_tagger(args), random.Random(args.seed)
    rates = dict(synonym=args.synonym_rate, antonym=args.antonym_rate)
    triples, words, replaced = [], 0, Counter()
    for text, tagged in zip(progress(texts, "replacing words", " texts"), tag_words(texts, tagger, wordnet)):
        sides = [replace_words(text, tagged, KINDS[side], rates[side], wordnet, rng) for side in KINDS]
        copies, labels = zip(*sides)
        triples.append((text, *copies, *labels))
        words += len(tagged)
        replaced.update(code for side in labels for *_, code in side)
    percent = {kind: 100 * replaced[code] / words for kind, code in CODES.items()}
    found = []
    for side, kinds in KINDS.items():
        each = " ".join(f"{kind} {percent[kind]:.1f}" for kind in kinds)
        found.append(f"{sum(percent[kind] for kind in kinds):.1f} % of words on the {side} side ({each})")
    log("triples", f"words tagged by {args.tagger}; replaced: {', '.join(found)}")
    return triples


def replace_words(text, words, kinds, rate, wordnet, rng):
    """Replace at most rate · len(words) words of a text, all by replacements of one kind.

    words     [(start, end, part of speech)] from tag_words; words with part of speech None are kept
    kinds     kinds of replacement: they are tried in order, from a random one on, until one replaces a word
    rng       a random.Random
    returns   (new text, labels of its words, except those with part of speech None)
    """
    candidates, most = [word for word in words if word[2]], int(rate * len(words))
    rng.shuffle(candidates)
    for kind in kinds[int(rng.random() * len(kinds)) :]:
        new = {}                                               # {start of a word: its replacement}
        for start, end, pos in candidates:
            if len(new) == most:
                break
            word = text[start:end].lower()
            choice = rng.choice(wordnet.replacements(kind, word, pos) or [word])
            if choice.lower() != word:
                new[start] = choice
        if new:
            break
    result, done, labels = "", 0, []
    for start, end, _ in sorted(candidates):
        result += text[done:start]
        word = new.get(start, text[start:end])
        labels.append((len(result), len(result) + len(word), CODES[kind] if start in new else 0))
        result += word
        done = end
    return result + text[done:], labels


def save_triples(triples, run):
    """Write the triples to --save-triples, if this file does not exist."""
    path = run.args.save_triples
    if path and run.rank == 0 and not Path(path).exists():
        write_triples(triples, path)


def write_triples(triples, path):
    """Write triples to a .csv file, whose rows read_triple can read."""
    with atomic_file(Path(path)) as file:
        rows = ((*row[:3], *map(format_labels, row[3:])) for row in triples)
        csv.writer(file).writerows([COLUMNS, *rows])


def format_labels(labels):
    """Return labels as the text of a .csv cell: start:end:code, separated by spaces."""
    return " ".join(f"{start}:{end}:{code}" for start, end, code in labels)


def read_triple(cells, place):
    """Make a triple (see make_triples) from the 3 or 5 cells of a row. If a row has 3 cells, they are the
    texts, and align_words finds the labels.

    place   where the row is, for error messages
    """
    if len(cells) == 3:
        return *cells, *(align_words(cells[0], text) for text in cells[1:])
    found = [re.findall(r"(\d{1,9}):(\d{1,9}):([0-5])", cell) for cell in cells[3:]]
    labels = [[tuple(map(int, word)) for word in words] for words in found]
    for text, cell, words in zip(cells[1:], cells[3:], labels):
        ends = [position for word in words for position in word[:2]]
        if cell != format_labels(words) or ends != sorted(ends) or max(ends, default=0) > len(text):
            fail(f"{place}: {cell[:40]!r}, expected start:end:code of words in order; code 0 is a kept word, "
                 "1 to 5 a replaced word")
    return *cells[:3], *labels


def align_words(original, text):
    """Return labels of a copy's words: code 0 if a word is aligned with an equal original word, else 1."""
    words = list(WORD.finditer(text))
    matcher = difflib.SequenceMatcher(None, WORD.findall(original), WORD.findall(text), autojunk=False)
    return [(*words[i].span(), int(kind != "equal"))
            for kind, _, _, first, last in matcher.get_opcodes() for i in range(first, last)]


def tokenise_triples(triples, model, args):
    """Tokenise triples. Leave out each triple in which a copy has the same tokens as the original.

    returns   (rows, number of texts that were truncated to --max-length). A row has the token ids of
              the three texts, token_labels of the two copies, and the index of the triple in `triples`
    """
    rows, truncated, first = [], 0, 0
    settings = dict(truncation=True, max_length=args.max_length)
    for part in text_batches(triples, lambda row: count_characters(row[:3])):
        views = [model.tokenizer([row[i] for row in part], **settings).encodings for i in range(3)]
        for index, (row, *encodings) in enumerate(zip(part, *views), first):
            ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
            truncated += sum(bool(encoding.overflowing) for encoding in encodings)
            if any(np.array_equal(ids[0], other) for other in ids[1:]):
                continue
            labels = (token_labels(row[i], row[i + 2], encodings[i], i, args.form) for i in (1, 2))
            rows.append((*ids, *labels, index))
        first += len(part)
    return rows, truncated


def token_labels(text, words, encoding, replaced_class, form):
    """Return the classes (L,) int8 of a copy's tokens for replaced token detection (RTD). A token has the
    class of the word in which the token starts.

    words            labels of the copy's words; words with code 0 (not replaced) have class 0
    replaced_class   class of replaced words
    form             "paper": tokens outside labelled words have class 0; "code": these tokens have class
                     −100, which the loss ignores. Special tokens always have class −100
    """
    classes = np.full(len(text) + 1, -100 if form == "code" else 0, np.int8)   # of each character
    for start, end, code in words:
        classes[start:end] = replaced_class if code else 0
    # some tokenizers count a space before a word as part of the word's first token
    starts = [end - len(text[start:end].lstrip()) for start, end in encoding.offsets]
    return np.where(encoding.special_tokens_mask, -100, classes[starts]).astype(np.int8)
