"""Files of documents, and pairs of text from them, against the rules of BERT's generator."""
import itertools
import math
import random
import re
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from transformers import AutoTokenizer

from kernels.training import documents as module
from kernels.training.documents import read_documents, sentence_pairs, stream
from running import SENTENCES

READER = SimpleNamespace(tokenizer=SimpleNamespace(cls_token_id=2, sep_token_id=3))


def numbered(sizes):
    """Documents of sentences of these sizes, no two tokens alike, so that a token tells where it stood."""
    count = itertools.count(5)
    return [[np.array([next(count) for _ in range(n)], np.int32) for n in document] for document in sizes]


def pairs_of(documents, most, draw):
    """[(A, B, whether B is random)] of up to `most` tokens, taken apart again."""
    pairs = []
    args = SimpleNamespace(max_length=most + 3)
    for ids, second, is_random in sentence_pairs(documents, READER, args, draw):
        ids, first = ids.tolist(), int((~second).sum())
        assert ids[0] == 2 and ids[first - 1] == ids[-1] == 3
        assert not second[:first].any() and second[first:].all()
        pairs.append((ids[1 : first - 1], ids[first:-1], is_random))
    return pairs


def test_pairs_are_whole_sentences_of_one_document_or_two():
    """Where nothing has to be cut: the spans of a document follow each other, and B is the rest of a span or
    begins elsewhere."""
    draw = random.Random(0)
    documents = numbered([[draw.randint(1, 6) for _ in range(draw.randint(2, 9))] for _ in range(60)])
    where = {int(token): (d, s) for d, document in enumerate(documents)
             for s, sentence in enumerate(document) for token in sentence}
    place, seen = {d: 0 for d in range(60)}, Counter()
    pairs = pairs_of(documents, 397, draw)
    assert [a[0] for a, _, _ in pairs] != sorted(a[0] for a, _, _ in pairs)    # shuffled
    for a, b, is_random in sorted(pairs):
        (of_a, first), (of_b, other) = where[a[0]], where[b[0]]
        assert first == place[of_a]                            # nothing is left out, nothing comes twice
        for part, document, sentence in ((a, of_a, first), (b, of_b, other)):
            end = where[part[-1]][1] + 1
            assert part == np.concatenate(documents[document][sentence:end]).tolist()
            place[of_a] = end if part is a or not is_random else place[of_a]
        assert of_a != of_b if is_random else of_a == of_b and other == where[a[-1]][1] + 1
        seen[len(documents[of_a]) - first == 1, is_random] += 1
        if is_random:
            assert where[b[-1]][1] + 1 == len(documents[of_b]) or len(b) >= 2 - len(a)
    assert all(place[d] == len(documents[d]) for d in place)
    assert seen[True, False] == 0 and seen[True, True] > 20    # a last sentence alone has no true next
    assert seen[False, True] > 30 and seen[False, False] > 30


def test_pairs_have_berts_proportions():
    """Half of the splits are random, A ends evenly, a tenth of the documents have a shorter target."""
    pairs = pairs_of(numbered([[4] * 5] * 2000), 20, random.Random(1))
    assert all(len(a) + len(b) <= 20 for a, b, _ in pairs)
    whole = [pair for pair in pairs if (pair[0][0] - 5) % 20 == 0 and len(pair[0]) % 4 == 0]
    true = [(a, b) for a, b, is_random in whole if not is_random]              # a document's first
    assert abs(len(true) / len(whole) - 0.5) < 0.06            # a target of 4 leaves no rest
    sizes = Counter(len(a) // 4 for a, b in true if len(a) + len(b) == 20)
    assert set(sizes) == {1, 2, 3, 4} and max(sizes.values()) < 1.3 * min(sizes.values())
    # of targets drawn from 2 to 20, those up to 16 end a span before the document's end: 15 in 19 of a tenth
    assert 0.03 < sum(len(a) + len(b) < 20 for a, b in true) / len(true) < 0.1


def test_pairs_are_cut_at_random_ends():
    """From the longer one, from B where they are equal; either end as often."""
    front, documents = Counter(), numbered([[9, 14]] * 1000)
    for a, b, _ in pairs_of(documents, 9, random.Random(2)):
        assert (len(a), len(b)) == (5, 4)
        for part in (a, b):
            assert part == list(range(part[0], part[0] + len(part)))
        if (a[0] - 5) % 23 < 9:                                # from a document's first sentence
            front[(a[0] - 5) % 23] += 1
    total = sum(front.values())
    assert total > 900                                         # binomial of 4
    assert all(abs(front[n] / total - math.comb(4, n) / 16) < 0.045 for n in range(5))
    never = Mock(random=lambda: 0.9, randint=lambda a, b: a, randrange=lambda *_: 1, shuffle=lambda x: None)
    first = pairs_of(numbered([[4, 9], [3, 3]]), 9, never)[0]
    assert first == ([5, 6, 7, 8], [9, 10, 11, 12, 13], False)                 # the true next, cut at the end


def test_read_documents(tmp_path):
    """Windows newlines, a byte order mark, blank lines with blanks, no newline at the end; from any byte that
    it named."""
    path = tmp_path / "d.txt"
    path.write_bytes("\ufeffA é.\r\nB.\r\n \r\n\r\n\nC.\n\t\nD.\n  E. \nF.".encode())
    found = list(read_documents(path))
    assert [document for document, _ in found] == [["A é.", "B."], ["C."], ["D.", "E.", "F."]]
    for i, (_, end) in enumerate(found):
        assert list(read_documents(path, end)) == found[i + 1 :]


DOCUMENTS = [[line for line, in SENTENCES[i : i + 5]] for i in range(0, 55, 5)]


@pytest.fixture(scope="module")
def read(tmp_path_factory, bert):
    """A function that reads pairs of 11 documents, one of a single sentence, 3 at a time."""
    path = tmp_path_factory.mktemp("stream") / "documents.txt"
    documents = [*DOCUMENTS[:4], DOCUMENTS[4][:1], *DOCUMENTS[5:]]
    path.write_text("\n\n".join("\n".join(document) for document in documents), encoding="utf-8")
    args = dict(data=path, buffer=3, seed=5, max_length=64)
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert))

    def read(n, place=(0, 0, 0), **change):
        pairs = itertools.islice(stream(10, place, model, SimpleNamespace(**args | change)), n)
        return [(ids.tolist(), second.tolist(), random, place) for (ids, second, random), place in pairs]
    return read


def test_stream_goes_on_where_it_stopped(read):
    whole = read(150)
    assert whole == read(150) and whole[:20] != read(20, seed=6)
    for stop in (1, 2, 17, 60, 129):
        assert whole[stop:] == read(150 - stop, whole[stop - 1][-1])


def test_stream_reads_all_documents_in_turn_and_a_few_at_a_time(read, bert, monkeypatch):
    spy, tokenizer = Mock(wraps=sentence_pairs), AutoTokenizer.from_pretrained(bert)
    monkeypatch.setattr(module, "sentence_pairs", spy)
    places = [place for *_, place in read(200)]
    held = [call.args[0] for call in spy.call_args_list]
    letters = lambda text: re.sub("[^a-z]", "", text.lower())
    decode = lambda document: [letters(tokenizer.decode(row)) for row in document]
    texts = [decode(document) for few in held for document in few]
    order = itertools.cycle(DOCUMENTS[:4] + DOCUMENTS[5:])     # the file's, round its end
    assert texts == [[letters(line) for line in next(order)] for _ in texts]
    assert max(map(len, held)) == 3 and len(held) > 8
    assert len({number for _, number, _ in places}) > 6 and places[0] == [0, 0, 1]
    assert max(used for *_, used in places) < 40
    assert read(50, buffer=1000)[0][-1] == [0, 0, 1]           # a buffer beyond the file is the file
