"""Files of documents, one sentence per line, a blank line between documents: an endless stream of text pairs
for BERT's pre-training, and the masks of their tokens."""
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..cli import fail, memory
from ..files import decoded, opened, stamp, unchanged
from .tokens import tokenise


def read_documents(path, offset=0):
    """Yield ([sentence, ...], byte after them) of each document, from byte `offset` of the file on."""
    if Path(path).suffix.lower() == ".gz":  # --resume would unpack all before its place
        fail(f"{path}: documents are not read from .gz; unpack it, for example with gunzip -k")
    sentences, start, most = [], offset, memory() // 8
    with opened(path) as file:
        file.seek(offset)
        for line, size in decoded(file, path):
            offset += size
            if sentence := line.removeprefix("\ufeff").strip():    # of files that were put together
                sentences.append(sentence)
            elif sentences:
                yield sentences, offset
                sentences, start = [], offset
            if offset - start > most and sentences:
                fail(f"{path}: a document of over {most / 2**30:.1f} GB; put a blank line between documents")
        if sentences:
            yield sentences, offset


def read_round(path, offset):
    """Yield documents of two or more sentences from byte `offset` on, then all of them again and again."""
    for start in itertools.chain([offset], itertools.repeat(0)):
        found = False
        for document in read_documents(path, start):
            if len(document[0]) > 1:
                found = True
                yield document
        if not found and start == 0:
            fail(f"{path}: no documents of two or more sentences")


def next_documents(path, offset, count, model, was=None):
    """Tokenise the next `count` documents of two or more sentences from byte `offset`, round the file's end.

    was       the file's stamp (files.stamp), if it must not have changed since
    returns   [[ids of a sentence, ...] of each document], without special tokens; and the byte after them
    """
    with unchanged(path, was or stamp(path)):
        found, ends = zip(*itertools.islice(read_round(path, offset), count))
    rows, _ = tokenise([sentence for sentences in found for sentence in sentences], model.tokenizer, 514)
    ids = (row[1:-1] for row in rows)  # without [CLS] and [SEP]: at most 512 (released code)
    documents = [[row for row in (next(ids) for _ in sentences) if len(row)] for sentences in found]
    documents = [document for document in documents if document]
    if len(documents) < 2:
        known = f"{len(documents)} of {count:,} documents from byte {offset:,} on"
        fail(f"{path}: {known} hold words of the tokenizer, wanted 2")
    return documents, ends[-1]


def sentence_pairs(documents, model, args, rng):
    """Pairs [CLS] A [SEP] B [SEP] of documents of tokenised sentences, made as BERT's generator makes them.

    Sentences of a document are taken in turn until they fill a pair or, in a tenth of the documents, a random
    part of one. A is a random number of the first of these; B is the rest or, half of the time, a stretch of
    another document. Then the rest is put back. If there is no rest, B is random.

    returns   [(ids (L,), which tokens are of the second segment (L,), whether B is random)] in random order
    """
    cls, sep = [model.tokenizer.cls_token_id], [model.tokenizer.sep_token_id]
    pairs, most = [], args.max_length - 3
    for place, document in enumerate(documents):
        target, start = rng.randint(2, most) if rng.random() < 0.1 else most, 0
        while start < len(document):
            end, length = start, 0
            while end < len(document) and length < target:
                length, end = length + len(document[end]), end + 1
            split = start + (rng.randint(1, end - start - 1) if end - start > 1 else 1)
            a, b = document[start:split], document[split:end]
            is_random = not b or rng.random() < 0.5
            if is_random:
                other = documents[(place + rng.randrange(1, len(documents))) % len(documents)]
                at, wanted, b, end = rng.randrange(len(other)), target - sum(map(len, a)), [], split
                while not b or at < len(other) and sum(map(len, b)) < wanted:
                    b.append(other[at])
                    at += 1
            a, b = cut_pair(np.concatenate(a), np.concatenate(b), most, rng)
            ids = np.concatenate([cls, a, sep, b, sep], dtype=np.int32)
            pairs.append((ids, np.arange(len(ids)) >= len(a) + 2, is_random))
            start = end
    rng.shuffle(pairs)
    return pairs


def cut_pair(a, b, most, rng):
    """Cut a pair to `most` tokens: the longer text, or B if they are equal, loses tokens at random ends."""
    while len(a) + len(b) > most:                              # views: nothing is copied
        front = rng.random() < 0.5
        if len(a) > len(b):
            a = a[front : len(a) - 1 + front]
        else:
            b = b[front : len(b) - 1 + front]
    return a, b


def mask_pair(ids, model, args, rng):
    """(masked ids, chosen) of a pair: 15 % of the tokens that are not special are chosen, at least one if
    there is any, at most a quarter of --max-length. Of these 80 % become [MASK] and 10 % a random token. With
    --whole-word 15 % of the words are chosen, at most a quarter; each piece of a word has its own luck."""
    words = []
    for place, token in enumerate(ids.tolist()):
        if args.whole_word and token in model.continuing and words and words[-1][-1] == place - 1:
            words[-1].append(place)
        elif token not in model.special:
            words.append([place])
    most, length = int(0.25 * args.max_length), len(ids)
    if args.whole_word:
        most, length = len(words) // 4, len(words)
    masked, chosen = ids.copy(), np.zeros(len(ids), bool)
    for word in rng.sample(words, min(most, max(1, round(0.15 * length)), len(words))):
        for place in word:
            chosen[place], luck = True, rng.random()
            if luck < 0.8:
                masked[place] = model.tokenizer.mask_token_id
            elif luck < 0.9:
                masked[place] = rng.choice(model.ordinary)
    return masked, chosen


def stream(count, place, model, args, was=None):
    """Yield (pair, place after it) endlessly, from a place on.

    Documents come in the order of the file, round its end, --buffer at a time, and their pairs are shuffled.
    A buffer depends only on the seed, its number and the byte where it begins. A thread makes the next one.

    count     how many documents the file has
    place     [byte where the buffer begins, number of the buffer, pairs of it that were used]
    was       the file's stamp, which must not change; default: its stamp when the stream begins
    """
    was = was or stamp(args.data)

    def make(byte, number):
        documents, end = next_documents(args.data, byte, min(count, args.buffer), model, was)
        return sentence_pairs(documents, model, args, random.Random(f"{args.seed} pairs {number}")), end

    byte, number, used = place
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(make, byte, number)
        while True:
            pairs, end = following.result()
            following = pool.submit(make, end, number + 1)
            for at in range(used, len(pairs)):
                yield pairs[at], [byte, number, at + 1]
            byte, number, used = end, number + 1, 0
