"""Tokens on the disk and in batches."""
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

import cline
from kernels.training.text import tokens
from kernels.training.text.classifier import tokenise_texts
from kernels.training.text.tokens import (
    grouped,
    length_groups,
    letters_of,
    portions,
    tokenise,
    tokenise_table,
)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_rows_are_the_tokens_of_each_sentence(columns, tmp_path, bert, capsys):
    """In the order of the file, whatever the pieces that it is read in."""
    texts = ["Yes.", "He sang a very long song about the sea.", "No.", "\u00e4"] * 6_000 * columns
    table = [(None, tuple(texts[i : i + columns])) for i in range(0, len(texts), columns)]
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert), longest=512, prompted=list,
                            encoder=SimpleNamespace(get_input_embeddings=lambda: None))
    run = SimpleNamespace(out=tmp_path, rank=0, world=1, args=SimpleNamespace(max_length=8))
    rows = tokenise_table(table, model, run)
    cut = f"{6_000 * columns:,} of {24_000 * columns:,} sentences cut to 8"
    assert len(rows) == len(table) and capsys.readouterr().out == f"tokens   {cut}\n"
    for i in (0, 1, 2, 9_999, 10_000, 10_001, 19_999, 20_000, 23_999):
        wanted = [model.tokenizer(text, truncation=True, max_length=8)["input_ids"] for text in table[i][1]]
        assert [ids.tolist() for ids in rows[i]] == wanted and all(ids.dtype == np.int32 for ids in rows[i])
    views = rows.views([3, 7], 3)
    assert [[ids.tolist() for ids in view] for view in views] == [
        [rows[i][view % columns].tolist() for i in (3, 7)] for view in range(3)]
    with pytest.raises(IndexError):
        rows[len(rows)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tokens"]
    assert rows[0][0].flags.writeable                          # which torch.from_numpy warns of


def test_portions_have_so_many_rows_and_letters(monkeypatch):
    monkeypatch.setattr(tokens, "LETTERS", 100)
    for draw in map(random.Random, range(50)):
        items = ["a" * draw.choice([0, 1, 9, 40, 300]) for _ in range(draw.randint(0, 60))]
        found = list(portions(iter(items), rows=(most := draw.randint(1, 9))))
        assert [item for part in found for item in part] == items and [] not in found
        assert all(len(part) <= most and (len(part) == 1 or letters_of(part) <= 100) for part in found)
        for part, following in itertools.pairwise(found):      # none that could be longer
            assert len(part) == most or letters_of([*part, following[0]]) > 100


class Watched:
    """A tokenizer that notes how many letters it gets at once."""

    def __init__(self, real, sizes):
        self.real, self.sizes = real, sizes

    def __getattr__(self, name):
        return getattr(self.real, name)

    @property
    def backend_tokenizer(self):
        return Watched(self.real.backend_tokenizer, self.sizes)

    def encode_batch_fast(self, texts):
        self.sizes.append(letters_of(texts))
        return self.real.encode_batch_fast(texts)

    def __call__(self, *columns, **how):
        self.sizes.append(sum(map(letters_of, columns)))
        return self.real(*columns, **how)


def test_long_texts_are_tokenised_few_at_a_time(bert, tmp_path, monkeypatch):
    """And to the same tokens: of tables, lists, labelled texts and triples."""
    pairs = [(f"He sang song {i} about the sea. " * (1 + i % 5), "He sang.") for i in range(60)]
    tokenizer = Watched(AutoTokenizer.from_pretrained(bert), sizes := [])
    args = SimpleNamespace(max_length=20, form="paper")
    model = SimpleNamespace(tokenizer=tokenizer, longest=512, prompted=list, forward=lambda input_ids: None,
                            encoder=SimpleNamespace(get_input_embeddings=lambda: None))
    run = SimpleNamespace(out=tmp_path, rank=0, world=1, args=args)

    def each(name):
        table = tokenise_table([(None, pair) for pair in pairs], model, run, name)
        yield [[ids.tolist() for ids in row] for row in table]
        found, cut = tokenise([text for text, _ in pairs], tokenizer, 20)
        yield [ids.tolist() for ids in found], cut
        found, cut = tokenise_texts([(pair, 1) for pair in pairs], model, 20)
        yield [(row["input_ids"].tolist(), label) for row, label in found], cut
        found, cut = cline.tokenise_triples([[*pair, "No.", [], []] for pair in pairs], model, args)
        yield [[*map(list, ids[:3]), place] for *ids, place in found], cut

    whole, most = [*each("whole")], max(sizes)
    sizes.clear()
    monkeypatch.setattr(tokens, "LETTERS", 700)
    found = each("parts")
    for wanted in whole:
        assert next(found) == wanted and len(sizes) > 5 and max(sizes) <= 700 < most
        sizes.clear()


def test_length_groups_cost_least():
    for draw in map(random.Random, range(200)):
        lengths = sorted(draw.choices(range(1, 12), k=draw.randint(1, 9)))
        cost = draw.choice([0, 1, 5, 30, 1000])

        def total(cuts):
            return sum((end - start) * lengths[end - 1] + cost for start, end in cuts)
        ours, n = length_groups(lengths, cost), len(lengths)
        inner = itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n))
        assert [i for start, end in ours for i in range(start, end)] == list(range(n))
        assert total(ours) == min(total(list(zip((0, *cut), (*cut, n)))) for cut in inner)


@pytest.mark.parametrize("most", [None, 1, 4])
def test_groups_hold_every_row_once(most, monkeypatch):
    lengths = random.Random(1).choices(range(3, 40), k=50)
    sizes = []
    for cost in (0, 60, 10**6):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        groups = grouped(lengths, SimpleNamespace(type="cpu"), most)
        assert sorted(sum(groups, [])) == list(range(50)) and (most is None or max(map(len, groups)) <= most)
        in_order = [lengths[i] for group in groups for i in group]
        assert in_order == sorted(in_order)
        sizes.append(len(groups))
    assert sizes == sorted(sizes, reverse=True) and (most or (sizes[2] == 1 < sizes[1] < sizes[0]))
