"""BERT's pre-training data: an endless stream of sentence pairs from a file of documents, and the masking of
tokens. The file has one sentence per line and a blank line between documents."""
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import fail
from ..text.tokens import tokenise


def read_documents(path, offset=0):
    """Yield each document from byte `offset` on: ([sentence, ...], offset of the byte after the document)."""
    sentences = []
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            try:                       # in joined files, any line may begin with a byte order mark
                sentence = line.decode().removeprefix("\ufeff").strip()
            except UnicodeDecodeError:
                fail(f"{path}: not UTF-8 before byte {offset:,}; convert it, for example with iconv")
            if sentence:
                sentences.append(sentence)
            elif sentences:
                yield sentences, offset
                sentences = []
    if sentences:
        yield sentences, offset


def cycle_documents(path, offset):
    """Yield documents of two or more sentences: from byte `offset` on, then the whole file, over and over."""
    for start in itertools.chain([offset], itertools.repeat(0)):
        found = False
        for document in read_documents(path, start):
            if len(document[0]) > 1:
                found = True
                yield document
        if not found and start == 0:
            fail(f"{path}: no documents of two or more sentences")


def next_documents(path, offset, count, model):
    """Tokenise the next `count` documents of two or more sentences. At the file's end, continue at its start.

    offset     byte of the file from which to read
    returns    [[token ids of a sentence, ...] per document] without special tokens, offset of the next byte
    """
    sentences, lengths, end = [], [], offset
    for document, next_byte in itertools.islice(cycle_documents(path, offset), count):
        sentences += document
        lengths.append(len(document))
        end = next_byte
    rows, _ = tokenise(sentences, model.tokenizer, 514)
    ids = (row[1:-1] for row in rows)      # without [CLS] and [SEP], at most 512 ids are left (released code)
    documents = []
    for length in lengths:
        document = [row for row in itertools.islice(ids, length) if len(row)]
        if document:
            documents.append(document)
    if len(documents) < 2:
        fail(f"{path}: the tokenizer finds tokens in {len(documents)} of {count:,} documents from byte "
             f"{offset:,} on, expected at least 2")
    return documents, end


def sentence_pairs(documents, model, args, rng):
    """Make BERT's pairs [CLS] A [SEP] B [SEP] from documents of tokenised sentences.

    Consecutive sentences of a document are collected up to a target length: the maximum or, in a tenth of
    the documents, a random length. A gets a random number of the first sentences, B the remaining sentences.
    With probability 0.5, or if no sentences remain, B instead comes from another document. In this case, the
    next pair starts after A.

    returns   shuffled list of (ids (L,), bool (L,): B and its [SEP], whether B is from another document)
    """
    cls, sep = [model.tokenizer.cls_token_id], [model.tokenizer.sep_token_id]
    pairs, max_tokens = [], args.max_length - 3
    for i, document in enumerate(documents):
        target = rng.randint(2, max_tokens) if rng.random() < 0.1 else max_tokens
        start = 0
        while start < len(document):
            end, length = start, 0
            while end < len(document) and length < target:
                length, end = length + len(document[end]), end + 1
            split = start + (rng.randint(1, end - start - 1) if end - start > 1 else 1)
            a, b = document[start:split], document[split:end]
            is_random = not b or rng.random() < 0.5
            if is_random:
                other = documents[(i + rng.randrange(1, len(documents))) % len(documents)]
                b = sentences_of_length(other[rng.randrange(len(other)) :], target - sum(map(len, a)))
                end = split
            a, b = truncate_pair(np.concatenate(a), np.concatenate(b), max_tokens, rng)
            ids = np.concatenate([cls, a, sep, b, sep], dtype=np.int32)
            pairs.append((ids, np.arange(len(ids)) >= len(a) + 2, is_random))
            start = end
    rng.shuffle(pairs)
    return pairs


def sentences_of_length(sentences, least):
    """Return as many of the first sentences as needed for `least` tokens, but at least one sentence."""
    taken = sentences[:1]
    for sentence in sentences[1:]:
        if sum(map(len, taken)) >= least:
            break
        taken.append(sentence)
    return taken


def truncate_pair(a, b, max_tokens, rng):
    """Truncate a pair to `max_tokens` tokens. Tokens are removed one by one from a random end of the longer
    text, or of b if both are equally long."""
    while len(a) + len(b) > max_tokens:        # slices of arrays are views: nothing is copied
        front = rng.random() < 0.5
        if len(a) > len(b):
            a = a[front : len(a) - 1 + front]
        else:
            b = b[front : len(b) - 1 + front]
    return a, b


def mask_pair(ids, model, args, rng):
    """Choose tokens of a pair to predict, and mask them as BERT does. Return (masked ids, chosen), both (L,).

    15 % of the tokens are chosen: at least one, at most a quarter of --max-length, and no special tokens.
    Each of them independently becomes [MASK] with probability 0.8, or a random token with probability 0.1.
    """
    places = [i for i, token in enumerate(ids.tolist()) if token not in model.special_ids]
    count = min(int(0.25 * args.max_length), max(1, round(0.15 * len(ids))), len(places))
    masked, chosen = ids.copy(), np.zeros(len(ids), bool)
    for i in rng.sample(places, count):
        chosen[i] = True
        draw = rng.random()
        if draw < 0.8:
            masked[i] = model.tokenizer.mask_token_id
        elif draw < 0.9:
            masked[i] = rng.choice(model.regular_ids)
    return masked, chosen


def stream_pairs(count, position, model, args):
    """Yield (pair, position after the pair) endlessly, starting at `position`.

    Documents are read in file order, over and over, in buffers of --shuffle-buffer documents. The pairs of
    a buffer are shuffled. The pairs depend only on the seed, the buffer's number, and the buffer's first byte
    in the file. While one buffer is used, a thread prepares the next buffer.

    count      number of documents in the file
    position   [offset of a buffer's first byte, number of the buffer, number of its pairs already used]
    """
    def make_buffer(byte, number):
        size = min(count, args.shuffle_buffer)
        documents, end = next_documents(args.data, byte, size, model)
        return sentence_pairs(documents, model, args, random.Random(f"{args.seed} pairs {number}")), end

    byte, number, used = position
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(make_buffer, byte, number)
        while True:
            pairs, end = following.result()
            following = pool.submit(make_buffer, end, number + 1)
            for i in range(used, len(pairs)):
                yield pairs[i], [byte, number, i + 1]
            byte, number, used = end, number + 1, 0
