"""Files of documents, their sentence pairs and masks, compared with the rules of BERT's data generator."""
import itertools
import math
import os
import random
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from transformers import AutoTokenizer

from kernels.training.errors import UserError
from kernels.training.papers import tacl_documents as module
from kernels.training.papers.tacl_documents import (
    mask_pair,
    next_documents,
    read_documents,
    sentence_pairs,
    stream_pairs,
)
from running import SENTENCES


def numbered_documents(sizes):
    """Return documents with sentences of these sizes. Each token is unique, and so shows its position."""
    count = itertools.count(5)
    return [[np.array([next(count) for _ in range(n)], np.int32) for n in document] for document in sizes]


def make_pairs(documents, max_tokens, rng):
    """Return sentence_pairs as [(A, B, whether B is random)], after checking special tokens and segments."""
    model, pairs = SimpleNamespace(tokenizer=SimpleNamespace(cls_token_id=2, sep_token_id=3)), []
    args = SimpleNamespace(max_length=max_tokens + 3)
    for ids, second, is_random in sentence_pairs(documents, model, args, rng):
        ids, first = ids.tolist(), int((~second).sum())
        assert ids[0] == 2 and ids[first - 1] == ids[-1] == 3 and second[first:].all()
        pairs.append((ids[1 : first - 1], ids[first:-1], is_random))
    return pairs


def test_pairs_consist_of_whole_sentences():
    """Without truncation each sentence of a document is used once, in order. B continues A, or is from
    another document."""
    rng, seen, used = random.Random(0), Counter(), Counter()
    documents = numbered_documents([[rng.randint(1, 6) for _ in range(rng.randint(2, 9))] for _ in range(60)])
    sentence_of = {int(token): (d, s) for d, document in enumerate(documents)
                   for s, sentence in enumerate(document) for token in sentence}
    pairs = make_pairs(documents, 397, rng)
    assert pairs != sorted(pairs)              # shuffled
    for a, b, is_random in sorted(pairs):
        d, start = sentence_of[a[0]]
        other, first = sentence_of[b[0]]
        split, end = (sentence_of[part[-1]][1] + 1 for part in (a, b))
        assert a + b == np.concatenate(documents[d][start:split] + documents[other][first:end]).tolist()
        assert start == used[d] and (d != other if is_random else (other, first) == (d, split))
        used[d] = split if is_random else end
        seen[start + 1 == len(documents[d]), is_random] += 1
    assert all(used[d] == len(document) for d, document in enumerate(documents))
    assert set(seen) == {(True, True), (False, True), (False, False)}  # B after a last sentence: random
    assert min(seen.values()) > 20


def test_pairs_have_berts_proportions():
    """Half of the Bs are random, all lengths of A are equally frequent, a random B fills the pair, and a
    tenth of the documents have a random target length."""
    pairs = make_pairs(numbered_documents([[4] * 5] * 2000), 20, random.Random(1))
    first = [pair for pair in pairs if (pair[0][0] - 5) % 20 == 0]     # each document's first pair
    true = [(len(a) // 4, len(a) + len(b)) for a, b, is_random in first if not is_random]
    assert len(true) / len(first) == pytest.approx(0.5, abs=0.06)      # targets up to 4: B is always random
    sizes = Counter(size for size, both in true if both == 20)
    assert set(sizes) == {1, 2, 3, 4} and max(sizes.values()) < 1.3 * min(sizes.values())
    # A tenth of the documents has a random target from 2 to 20; 15 of these 19 values end a pair early.
    assert 0.03 < np.mean([both < 20 for _, both in true]) < 0.1
    fills = [len(b) == min(20 - len(a), 20 - (b[0] - 5) % 20) for a, b, is_random in pairs if is_random]
    assert 0.8 < np.mean(fills) < 0.95


def test_pairs_are_cut_at_random_ends():
    """Tokens are removed from the longer text, or from B if both are equally long; each end is equally
    likely, so the number removed from the front of A is binomial with n = 4."""
    front, documents = Counter(), numbered_documents([[9, 14]] * 1000)
    for a, b, _ in make_pairs(documents, 9, random.Random(2)):
        assert (a, b) == ([*range(a[0], a[0] + 5)], [*range(b[0], b[0] + 4)])
        front[(a[0] - 5) % 23] += 1            # 0 to 4 if A is the document's first sentence
    total = sum(front[n] for n in range(5))
    assert total > 900 and all(abs(front[n] / total - math.comb(4, n) / 16) < 0.045 for n in range(5))
    fixed = Mock(random=lambda: 0.9, randint=lambda a, b: a, randrange=lambda *_: 1, shuffle=lambda x: None)
    first = make_pairs(numbered_documents([[4, 9], [3, 3]]), 9, fixed)[0]
    assert first == ([5, 6, 7, 8], [9, 10, 11, 12, 13], False)         # B continues A, and is cut at its end


def make_ids(words):
    """Return the ids of this many words, each with the pieces 5, 6, 8, then a few more tokens. Ids 0 to 4 are
    special tokens; 6 and 8 continue a word, unless they follow a special token such as 1."""
    return np.array([2, *[5, 6, 8] * words, 3, 7, 1, 6, 3])


@pytest.mark.parametrize("whole, ids, wanted", [
    (False, np.array([2, 3, 3]), 0), (False, np.array([2, 5, 3, 3]), 1), (False, make_ids(2), 2),
    (False, make_ids(6), 4), (False, make_ids(40), 16), (True, make_ids(1), 0), (True, make_ids(3), 1),
    (True, make_ids(12), 2), (True, make_ids(40), 6)])
def test_mask_pair(whole, ids, wanted):
    """As in BERT, round(0.15 · length) tokens are chosen: at least 1, at most a quarter of --max-length,
    here 16; with --whole-word, at most a quarter of the words. Each piece of a chosen word is masked
    independently: 80 % become the mask token, 10 % a random token."""
    args, positions, patterns = SimpleNamespace(max_length=64, whole_word=whole), set(), set()
    outcomes = Counter()
    model = SimpleNamespace(tokenizer=SimpleNamespace(mask_token_id=4), special_ids={0, 1, 2, 3, 4},
                            suffix_ids={6, 8}, regular_ids=[5, 6, 7, 8])
    ordinary = np.flatnonzero(ids > 4)
    continues = whole & np.isin(ids[ordinary], [6, 8]) & (ids[ordinary - 1] > 4)
    words = np.split(ordinary, np.flatnonzero(~continues)[1:])
    for seed in range(200):
        masked, chosen = mask_pair(ids, model, args, random.Random(seed))
        assert (masked == ids)[~chosen].all() and chosen.sum() == chosen[ordinary].sum()
        assert all(len({*chosen[word]}) <= 1 for word in words)
        assert sum(chosen[word].any() for word in words) == wanted
        patterns |= {tuple(masked[word] == 4) for word in words if chosen[word].any()}
        positions.update(np.flatnonzero(chosen))
        outcomes.update(np.where(masked == 4, "mask", np.where(masked == ids, "same", "other"))[chosen])
    if wanted:
        assert positions == {*ordinary} and len(patterns) > (2 if whole else 0)
    if wanted >= 16:                           # a quarter of the random tokens equal the original
        share = {name: count / outcomes.total() for name, count in outcomes.items()}
        assert share == pytest.approx(dict(mask=0.8, same=0.125, other=0.075), abs=0.02)


def test_read_documents(tmp_path):
    """The file has Windows newlines, a byte order mark, blank lines with white space, and no newline at its
    end. Reading can continue from the end of each document."""
    path = tmp_path / "d.txt"
    path.write_bytes("\ufeffA é.\r\nB.\r\n \r\n\r\n\nC.\n\t\nD.\n  E. \nF.".encode())
    found = list(read_documents(path))
    assert [document for document, _ in found] == [["A é.", "B."], ["C."], ["D.", "E.", "F."]]
    for i, (_, end) in enumerate(found):
        assert list(read_documents(path, end)) == found[i + 1 :]


def test_stream_pairs(bert, tmp_path, monkeypatch):
    """The stream reads documents of two or more sentences in file order, over and over, a buffer at a time,
    and truncates sentences to 512 tokens. It continues from any position."""
    spy, tokenizer, path = Mock(wraps=sentence_pairs), AutoTokenizer.from_pretrained(bert), tmp_path / "d.txt"
    monkeypatch.setattr(module, "sentence_pairs", spy)
    documents = [["of a " * 200, "It."], *([line for line, in SENTENCES[i : i + 5]] for i in range(0, 45, 5))]
    path.write_text("\n\n".join("\n".join(lines) for lines in [*documents[:4], ["One."], *documents[4:]]))

    def read(n, position=(0, 0, 0), buffer=3, seed=5):
        args = SimpleNamespace(data=path, shuffle_buffer=buffer, seed=seed, max_length=64)
        pairs = itertools.islice(stream_pairs(10, position, SimpleNamespace(tokenizer=tokenizer), args), n)
        return [(ids.tolist(), second.tolist(), is_random, end) for (ids, second, is_random), end in pairs]

    whole = read(150)
    buffers = [call.args[0] for call in spy.call_args_list]
    for wanted, found in zip(itertools.cycle(documents), itertools.chain(*buffers)):
        expected = [tokenizer(line, add_special_tokens=False)["input_ids"][:512] for line in wanted]
        assert [row.tolist() for row in found] == expected
    assert max(map(len, buffers)) == 3 and len(buffers) > 6 and whole[:20] != read(20, seed=6)
    for stop in (1, 2, 17, 60, 129):
        assert read(150 - stop, whole[stop - 1][-1]) == whole[stop:]
    passes = read(99, buffer=1000)             # larger than the file: a buffer is one pass over the file
    first, second = ([row[0] for row in passes if row[-1][1] == number] for number in (0, 1))
    assert len(second) > 20 and first[:20] != second[:20]      # every pass has other pairs
    assert max(len(call.args[0]) for call in spy.call_args_list) == 10


LINES = "".join(f"{a}\n{b}\n\n" for (a,), (b,) in zip(SENTENCES[:30], SENTENCES[30:60]))
CHANGES = {"shrinks": lambda path: os.truncate(path, 40), "is empty": lambda path: os.truncate(path, 0),
           "has one sentence": lambda path: path.write_text("A.\n"), "is deleted": lambda path: path.unlink(),
           "grows": lambda path: path.write_text(LINES * 2),
           "is no UTF-8": lambda path: path.write_bytes(b"\xff"),
           "is another": lambda path: path.write_text(LINES.replace("the", "The"))}


@pytest.mark.parametrize("content, wanted", [
    ("A.\n\nB.\n", "no documents of two or more sentences"), ("", "no documents of two or more sentences"),
    (b"A.\nB.\n\n\xff", "not UTF-8 before byte 8; convert it, .*")])
def test_invalid_files_of_documents(content, wanted, tmp_path):
    path = tmp_path / "d.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"d\.txt:? {wanted}$"):
        next_documents(path, 0, 2, None)
