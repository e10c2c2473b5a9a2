"""Test TaCL's sentence pairs and masks, compared with the rules of BERT's data generator."""
import itertools
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from kernels.training.papers import tacl_documents
from running import SENTENCES


def numbered_documents(sizes):
    """Return documents whose sentences have these numbers of tokens. A token's number shows its position."""
    count = itertools.count(5)
    return [[np.array([next(count) for _ in range(n)], np.int32) for n in document] for document in sizes]


def make_pairs(documents, max_tokens, seed):
    """Call sentence_pairs, check special tokens and segments, and return [(A, B, whether B is random)]."""
    model, pairs = SimpleNamespace(tokenizer=SimpleNamespace(cls_token_id=2, sep_token_id=3)), []
    args = SimpleNamespace(max_length=max_tokens + 3)
    for ids, second, is_random in tacl_documents.sentence_pairs(documents, model, args, random.Random(seed)):
        ids, first = ids.tolist(), int((~second).sum())
        assert ids[0] == 2 and ids[first - 1] == ids[-1] == 3 and second[first:].all()
        pairs.append((ids[1 : first - 1], ids[first:-1], is_random))
    return pairs


def test_pairs_consist_of_whole_sentences():
    """Without truncation, each sentence of a document is used once, in order. B continues A or comes from
    another document: always if A starts with a document's last sentence, else half of the time. The pairs are
    shuffled."""
    rng, seen, used, ends = random.Random(0), Counter(), Counter(), []
    documents = numbered_documents([[rng.randint(1, 6) for _ in range(rng.randint(2, 9))] for _ in range(60)])
    sentence_of = {int(token): (d, s) for d, document in enumerate(documents)
                   for s, sentence in enumerate(document) for token in sentence}
    pairs = make_pairs(documents, 397, 0)
    assert pairs != sorted(pairs)
    for a, b, is_random in sorted(pairs):
        (d, start), (other, first) = sentence_of[a[0]], sentence_of[b[0]]
        split, end = (sentence_of[part[-1]][1] + 1 for part in (a, b))
        assert a + b == np.concatenate(documents[d][start:split] + documents[other][first:end]).tolist()
        assert start == used[d] and (d != other if is_random else (other, first) == (d, split))
        used[d] = split if is_random else end
        seen[start + 1 == len(documents[d]), is_random] += 1
        ends += [end == len(documents[other])] * is_random
    assert all(used[d] == len(document) for d, document in enumerate(documents))
    assert np.mean(ends) > 0.8                                 # few pairs have a small target length
    assert set(seen) == {(True, True), (False, True), (False, False)}
    assert seen[False, True] / (seen[False, True] + seen[False, False]) == pytest.approx(0.5, abs=0.15)


def test_pairs_are_cut_at_random_ends():
    """Tokens are removed from random ends of the longer text, or of B if both texts are equally long."""
    pairs = make_pairs(numbered_documents([[9, 14]] * 100), 9, 2)
    for a, b, _ in pairs:
        assert (a, b) == ([*range(a[0], a[0] + 5)], [*range(b[0], b[0] + 4)])
    assert {(a[0] - 5) % 23 for a, *_ in pairs} >= {0, 1, 2, 3, 4}        # 0 to 4 tokens are removed in front


@pytest.mark.parametrize("words, wanted", [(6, 4), (40, 16)])
def test_mask_pair(words, wanted):
    """As in BERT, round(0.15 · length) tokens are chosen, at most a quarter of --max-length, here 16. They
    become the mask token (80 %) or a random token (10 %). Special tokens (ids 0 to 4) stay."""
    ids = np.array([2, *[5, 6, 8] * words, 3, 7, 1, 6, 3])
    args, outcomes = SimpleNamespace(max_length=64), Counter()
    model = SimpleNamespace(tokenizer=SimpleNamespace(mask_token_id=4), special_ids={0, 1, 2, 3, 4},
                            regular_ids=[5, 6, 7, 8])
    for seed in range(200):
        masked, chosen = tacl_documents.mask_pair(ids, model, args, random.Random(seed))
        assert (masked == ids)[~chosen].all() and chosen.sum() == chosen[ids > 4].sum() == wanted
        outcomes.update(np.where(masked == 4, "mask", np.where(masked == ids, "same", "other"))[chosen])
    if words == 40:                            # a quarter of the random tokens equal the original
        share = {name: count / outcomes.total() for name, count in outcomes.items()}
        assert share == pytest.approx(dict(mask=0.8, same=0.125, other=0.075), abs=0.02)


def test_stream_pairs(bert, tmp_path, monkeypatch):
    """The stream reads documents of two or more sentences in file order, again and again, one buffer at a
    time. Sentences are truncated to 512 tokens. The stream continues from any position."""
    tokenizer, path, buffers = AutoTokenizer.from_pretrained(bert), tmp_path / "d.txt", []
    make_pairs = tacl_documents.sentence_pairs
    monkeypatch.setattr(tacl_documents, "sentence_pairs",
                        lambda documents, *rest: buffers.append(documents) or make_pairs(documents, *rest))
    documents = [["of a " * 200, "It."], *([line for line, in SENTENCES[i : i + 5]] for i in range(0, 45, 5))]
    path.write_text("\n\n".join("\n".join(lines) for lines in [*documents[:4], ["One."], *documents[4:]]))

    def read(n, position=(0, 0, 0), seed=5):
        args = SimpleNamespace(data=path, shuffle_buffer=3, seed=seed, max_length=64)
        stream = tacl_documents.stream_pairs(10, position, SimpleNamespace(tokenizer=tokenizer), args)
        return [(*(x.tolist() for x in pair[:2]), end) for pair, end in itertools.islice(stream, n)]

    whole = read(150)
    for wanted, found in zip(itertools.cycle(documents), itertools.chain(*buffers)):
        expected = [tokenizer(line, add_special_tokens=False)["input_ids"][:512] for line in wanted]
        assert [row.tolist() for row in found] == expected
    assert max(map(len, buffers)) == 3 and len(buffers) > 6 and whole[:20] != read(20, seed=6)
    for stop in (1, 17, 129):
        assert read(150 - stop, whole[stop - 1][-1]) == whole[stop:]
