"""CLINE's triples: a text, a copy in which replaced words keep the meaning ("synonym"), and a copy in which
replaced words change the meaning ("antonym").

The labels of a copy are [(start, end, kind)]. Each label describes the word copy[start:end]: `kind` is the
kind of replacement that gave this word (see KINDS), or None if the word was not replaced.
"""
import csv
import difflib
import random
from collections import Counter
from pathlib import Path

import numpy as np

from ..errors import fail, log
from ..out import atomic_file
from ..progress import progress
from .cline_wordnet import WORD, WordNet, load_tagger, tag_words

# {role of a column: usual column names}
ROLES = {"original": ["original", "text", "sentence"], "synonym": ["synonym"], "antonym": ["antonym"]}
# kinds of replacement for each copy of a text. One kind, drawn at random, is tried first. If it replaces no
# word in the text, the next kind in the list is tried (released code).
KINDS = {"synonym": ("hypernym", "synonym", "inflected"), "antonym": ("antonym", "random")}


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
        replaced.update(kind for side in labels for *_, kind in side)
    found = []
    for side, kinds in KINDS.items():
        percent = {kind: 100 * replaced[kind] / words for kind in kinds}
        each = " ".join(f"{kind} {percent[kind]:.1f}" for kind in kinds)
        found.append(f"{sum(percent.values()):.1f} % of words on the {side} side ({each})")
    log("triples", f"words tagged by {args.tagger}; replaced: {', '.join(found)}")
    return triples


def replace_words(text, words, kinds, rate, wordnet, rng):
    """Replace at most rate · len(words) words of a text, all by replacements of one kind.

    words     [(start, end, part of speech)] from tag_words; words with part of speech None are kept
    kinds     kinds of replacement, tried in order from a random kind on, until one kind replaces a word
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
        labels.append((len(result), len(result) + len(word), kind if start in new else None))
        result += word
        done = end
    return result + text[done:], labels


def save_triples(triples, run):
    """Write the texts of the triples to --save-triples, if this .csv file does not exist."""
    path = run.args.save_triples
    if path and run.rank == 0 and not Path(path).exists():
        with atomic_file(Path(path)) as file:
            csv.writer(file).writerows([[*ROLES], *(row[:3] for row in triples)])


def label_copies(texts):
    """Make a triple (see make_triples) of its three texts. Words are labelled by align_words."""
    return *texts, *(align_words(texts[0], text) for text in texts[1:])


def align_words(original, text):
    """Return labels of a copy's words: kind None if a word is aligned with an equal original word, else the
    operation of difflib: "replace" or "insert"."""
    words, labels = list(WORD.finditer(text)), []
    matcher = difflib.SequenceMatcher(None, WORD.findall(original), WORD.findall(text), autojunk=False)
    for kind, _, _, first, last in matcher.get_opcodes():
        for word in words[first:last]:
            labels.append((*word.span(), None if kind == "equal" else kind))
    return labels


def tokenise_triples(triples, model, args):
    """Tokenise triples. Leave out each triple in which a copy has the same tokens as the original.

    returns   (rows, number of texts that were truncated to --max-length). A row has the token ids of the
              three texts, and token_labels of the two copies
    """
    rows, truncated = [], 0
    settings = dict(truncation=True, max_length=args.max_length)
    for row in triples:
        encodings = [model.tokenizer(text, **settings).encodings[0] for text in row[:3]]
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        truncated += sum(bool(encoding.overflowing) for encoding in encodings)
        if any(np.array_equal(ids[0], other) for other in ids[1:]):
            continue
        labels = (token_labels(row[i], row[i + 2], encodings[i], i, args.form) for i in (1, 2))
        rows.append((*ids, *labels))
    return rows, truncated


def token_labels(text, words, encoding, replaced_class, form):
    """Return the classes (L,) int8 of a copy's tokens for replaced token detection (RTD). A token has the
    class of the word in which the token starts.

    words            labels of the copy's words; words that were not replaced have class 0
    replaced_class   class of replaced words
    form             "paper": tokens outside labelled words have class 0; "code": these tokens have class
                     −100, which the loss ignores. Special tokens always have class −100
    """
    classes = np.full(len(text) + 1, -100 if form == "code" else 0, np.int8)   # the class of each character
    for start, end, kind in words:
        classes[start:end] = replaced_class if kind else 0
    # some tokenizers count a space before a word as part of the word's first token
    starts = [end - len(text[start:end].lstrip()) for start, end in encoding.offsets]
    return np.where(encoding.special_tokens_mask, -100, classes[starts]).astype(np.int8)
