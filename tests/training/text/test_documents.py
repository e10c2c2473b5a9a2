"""Files of documents, pairs of text from them and their masks, against the rules of BERT's generator."""
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

from kernels.training.cli import Fault
from kernels.training.files import stamp
from kernels.training.text import documents as module
from kernels.training.text.documents import mask_pair, next_documents, read_documents, sentence_pairs, stream
from running import SENTENCES


def numbered(sizes):
    """Documents of sentences of these sizes, no two tokens alike, so that a token tells where it stood."""
    count = itertools.count(5)
    return [[np.array([next(count) for _ in range(n)], np.int32) for n in document] for document in sizes]


def pairs_of(documents, most, draw):
    """[(A, B, whether B is random)] of up to `most` tokens, taken apart again."""
    model, pairs = SimpleNamespace(tokenizer=SimpleNamespace(cls_token_id=2, sep_token_id=3)), []
    args = SimpleNamespace(max_length=most + 3)
    for ids, second, is_random in sentence_pairs(documents, model, args, draw):
        ids, first = ids.tolist(), int((~second).sum())
        assert ids[0] == 2 and ids[first - 1] == ids[-1] == 3 and second[first:].all()
        pairs.append((ids[1 : first - 1], ids[first:-1], is_random))
    return pairs


def test_pairs_are_whole_sentences_of_one_document_or_two():
    """Where nothing has to be cut: nothing is left out, nothing comes twice, B is the rest of a span or
    begins elsewhere."""
    draw, seen, place = random.Random(0), Counter(), Counter()
    documents = numbered([[draw.randint(1, 6) for _ in range(draw.randint(2, 9))] for _ in range(60)])
    where = {int(token): (d, s) for d, document in enumerate(documents)
             for s, sentence in enumerate(document) for token in sentence}
    pairs = pairs_of(documents, 397, draw)
    assert pairs != sorted(pairs)                              # shuffled
    for a, b, is_random in sorted(pairs):
        (d, start), (other, at) = where[a[0]], where[b[0]]
        split, end = (where[part[-1]][1] + 1 for part in (a, b))
        assert a + b == np.concatenate(documents[d][start:split] + documents[other][at:end]).tolist()
        assert start == place[d] and (d != other if is_random else (other, at) == (d, split))
        place[d] = split if is_random else end
        seen[start + 1 == len(documents[d]), is_random] += 1
    assert all(place[d] == len(document) for d, document in enumerate(documents))
    assert set(seen) == {(True, True), (False, True), (False, False)}          # a last sentence has no next
    assert min(seen.values()) > 20


def test_pairs_have_berts_proportions():
    """Half of the splits are random, A ends evenly, B fills the pair, a tenth of the documents have a shorter
    target."""
    pairs = pairs_of(numbered([[4] * 5] * 2000), 20, random.Random(1))
    whole = [pair for pair in pairs if (pair[0][0] - 5) % 20 == 0]             # a document's first
    true = [(len(a) // 4, len(a) + len(b)) for a, b, is_random in whole if not is_random]
    assert len(true) / len(whole) == pytest.approx(0.5, abs=0.06)              # a target of 4 leaves no rest
    sizes = Counter(size for size, both in true if both == 20)
    assert set(sizes) == {1, 2, 3, 4} and max(sizes.values()) < 1.3 * min(sizes.values())
    # of targets drawn from 2 to 20, those up to 16 end a span before the document's end: 15 in 19 of a tenth
    assert 0.03 < np.mean([both < 20 for _, both in true]) < 0.1
    fills = [len(b) == min(20 - len(a), 20 - (b[0] - 5) % 20) for a, b, is_random in pairs if is_random]
    assert 0.8 < np.mean(fills) < 0.95


def test_pairs_are_cut_at_random_ends():
    """From the longer one, from B where they are equal; either end as often: of A binomial of 4."""
    front, documents = Counter(), numbered([[9, 14]] * 1000)
    for a, b, _ in pairs_of(documents, 9, random.Random(2)):
        assert (a, b) == ([*range(a[0], a[0] + 5)], [*range(b[0], b[0] + 4)])
        front[(a[0] - 5) % 23] += 1                            # up to 4: from a document's first sentence
    total = sum(front[n] for n in range(5))
    assert total > 900 and all(abs(front[n] / total - math.comb(4, n) / 16) < 0.045 for n in range(5))
    never = Mock(random=lambda: 0.9, randint=lambda a, b: a, randrange=lambda *_: 1, shuffle=lambda x: None)
    first = pairs_of(numbered([[4, 9], [3, 3]]), 9, never)[0]
    assert first == ([5, 6, 7, 8], [9, 10, 11, 12, 13], False)                 # the true next, cut at the end


def row_of(words):
    """Ids: 0 to 4 are special tokens, 6 and 8 go on with a word, but behind the unknown 1, where 6 is one."""
    return np.array([2, *[5, 6, 8] * words, 3, 7, 1, 6, 3])


@pytest.mark.parametrize("whole, ids, wanted", [
    (False, np.array([2, 3, 3]), 0), (False, np.array([2, 5, 3, 3]), 1), (False, row_of(2), 2),
    (False, row_of(6), 4), (False, row_of(40), 16), (True, row_of(1), 0), (True, row_of(3), 1),
    (True, row_of(12), 2), (True, row_of(40), 6)])
def test_masks(whole, ids, wanted):
    """BERT's number: round(0.15 · length), at least 1, at most a quarter of --max-length, here 16; of whole
    words, whose pieces each have their own luck, at most a quarter. 80 % are masks, 10 % a random token."""
    args, places, luck, became = SimpleNamespace(max_length=64, whole_word=whole), set(), set(), Counter()
    model = SimpleNamespace(tokenizer=SimpleNamespace(mask_token_id=4), special={0, 1, 2, 3, 4},
                            continuing={6, 8}, ordinary=[5, 6, 7, 8])
    ordinary = np.flatnonzero(ids > 4)
    goes_on = whole & np.isin(ids[ordinary], [6, 8]) & (ids[ordinary - 1] > 4)
    words = np.split(ordinary, np.flatnonzero(~goes_on)[1:])
    for seed in range(200):
        masked, chosen = mask_pair(ids, model, args, random.Random(seed))
        assert (masked == ids)[~chosen].all() and chosen.sum() == chosen[ordinary].sum()
        assert all(len({*chosen[word]}) <= 1 for word in words)
        assert sum(chosen[word].any() for word in words) == wanted
        luck |= {tuple(masked[word] == 4) for word in words if chosen[word].any()}
        places.update(np.flatnonzero(chosen))
        became.update(np.where(masked == 4, "mask", np.where(masked == ids, "same", "other"))[chosen])
    assert wanted == 0 or places == {*ordinary} and len(luck) > 2 * whole
    share = {name: count / became.total() for name, count in became.items()}
    assert wanted < 16 or share == pytest.approx(dict(mask=0.8, same=0.125, other=0.075), abs=0.02)


def test_read_documents(tmp_path):
    """Windows newlines, a byte order mark, blank lines with blanks, no newline at the end; from any byte that
    it named."""
    path = tmp_path / "d.txt"
    path.write_bytes("\ufeffA é.\r\nB.\r\n \r\n\r\n\nC.\n\t\nD.\n  E. \nF.".encode())
    found = list(read_documents(path))
    assert [document for document, _ in found] == [["A é.", "B."], ["C."], ["D.", "E.", "F."]]
    for i, (_, end) in enumerate(found):
        assert list(read_documents(path, end)) == found[i + 1 :]


def test_stream(bert, tmp_path, monkeypatch):
    """Documents of two sentences or more in the file's order, round its end, a few at a time, sentences of at
    most 512 tokens; it goes on where it stopped."""
    spy, tokenizer, path = Mock(wraps=sentence_pairs), AutoTokenizer.from_pretrained(bert), tmp_path / "d.txt"
    monkeypatch.setattr(module, "sentence_pairs", spy)
    documents = [["of a " * 200, "It."], *([line for line, in SENTENCES[i : i + 5]] for i in range(0, 45, 5))]
    path.write_text("\n\n".join("\n".join(lines) for lines in [*documents[:4], ["One."], *documents[4:]]))

    def read(n, place=(0, 0, 0), buffer=3, seed=5):
        args = SimpleNamespace(data=path, buffer=buffer, seed=seed, max_length=64)
        pairs = itertools.islice(stream(10, place, SimpleNamespace(tokenizer=tokenizer), args), n)
        return [(ids.tolist(), second.tolist(), random, place) for (ids, second, random), place in pairs]

    whole = read(150)
    held = [call.args[0] for call in spy.call_args_list]
    ids = lambda line: tokenizer(line, add_special_tokens=False)["input_ids"][:512]
    for wanted, found in zip(itertools.cycle(documents), itertools.chain(*held)):
        assert [row.tolist() for row in found] == [ids(line) for line in wanted]
    assert max(map(len, held)) == 3 and len(held) > 6 and whole[:20] != read(20, seed=6)
    for stop in (1, 2, 17, 60, 129):
        assert read(150 - stop, whole[stop - 1][-1]) == whole[stop:]
    rounds = read(99, buffer=1000)                             # beyond the file: all of it, once
    first, second = ([row[0] for row in rounds if row[-1][1] == number] for number in (0, 1))
    assert len(second) > 20 and first[:20] != second[:20]      # pairs anew in every round
    assert max(len(call.args[0]) for call in spy.call_args_list) == 10


LINES = "".join(f"{a}\n{b}\n\n" for (a,), (b,) in zip(SENTENCES[:30], SENTENCES[30:60]))
CHANGES = {"shrinks": lambda path: os.truncate(path, 40), "is empty": lambda path: os.truncate(path, 0),
           "has one sentence": lambda path: path.write_text("A.\n"), "is deleted": lambda path: path.unlink(),
           "grows": lambda path: path.write_text(LINES * 2),
           "is no UTF-8": lambda path: path.write_bytes(b"\xff"),
           "is another": lambda path: path.write_text(LINES.replace("the", "The"))}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_ends_the_stream(change, bert, tmp_path, alarm):
    """Rather than to go round in what is left of it, for ever."""
    path, tokenizer = tmp_path / "d.txt", AutoTokenizer.from_pretrained(bert)
    path.write_text(LINES)
    args = SimpleNamespace(data=path, buffer=3, seed=5, max_length=64)
    pairs = stream(30, (0, 0, 0), SimpleNamespace(tokenizer=tokenizer), args)
    next(pairs)
    CHANGES[change](path)
    with pytest.raises(Fault, match=r"d\.txt: changed or deleted while it was read; .* start again$"):
        for _ in itertools.islice(pairs, 1000):
            pass


def test_a_stream_of_a_file_that_was_checked(bert, tmp_path):
    path, tokenizer = tmp_path / "d.txt", AutoTokenizer.from_pretrained(bert)
    path.write_text(LINES)
    was, args = stamp(path), SimpleNamespace(data=path, buffer=3, seed=5, max_length=64)
    model = SimpleNamespace(tokenizer=tokenizer)
    assert next(stream(30, (0, 0, 0), model, args, was))
    path.write_text(LINES[:-9])
    with pytest.raises(Fault, match=r"d\.txt: changed or deleted"):
        next(stream(30, (0, 0, 0), model, args, was))
    assert next(stream(30, (0, 0, 0), model, args))


@pytest.mark.parametrize("content, wanted", [
    ("A.\n\nB.\n", "no documents of two or more sentences"), ("", "no documents of two or more sentences"),
    (b"A.\nB\0.\n", "line 2: a NUL character; .*"), (b"A.\nB.\n\n\xff", "line 4: not UTF-8; convert it, .*"),
    ("A.\rB.\r\rC.\rD.\r", "lines end as on an old Mac; .*"),
    ("A.\nB.\n".encode("UTF-16"), "line 1: a NUL character; .* if this is UTF-16, .*"),
    (b"A.\n" + b"x" * (2**24 + 1), "line 2: over 16 MB; .*"), (None, "No such file or directory")])
def test_what_is_no_file_of_documents(content, wanted, tmp_path, alarm):
    path = tmp_path / "d.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Fault, match=rf"d\.txt:? {wanted}$"):
        next_documents(path, 0, 2, None)


def test_a_document_without_end(tmp_path, monkeypatch):
    """Does not fill the memory."""
    path = tmp_path / "d.txt"
    path.write_text("A sentence.\n" * 5 + "\n" + "A sentence.\n" * 1000)
    assert [len(document) for document, _ in read_documents(path)] == [5, 1000]
    monkeypatch.setattr(module, "memory", lambda: 8 * 5000)
    with pytest.raises(Fault, match=r"d\.txt: a document of over 0\.0 GB; put a blank line between .*$"):
        list(read_documents(path))
