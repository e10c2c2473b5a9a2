"""Tokens on the disk and in batches."""
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from kernels.training import tokens
from kernels.training.tokens import grouped, length_groups, tokenise_table


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_rows_are_the_tokens_of_each_sentence(columns, tmp_path, bert, capsys):
    """In the order of the file, whatever the pieces that it is read in."""
    texts = ["Yes.", "He sang a very long song about the sea.", "No.", "\u00e4"] * 6_000 * columns
    table = [(None, tuple(texts[i : i + columns])) for i in range(0, len(texts), columns)]
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert), longest=512, prompted=list)
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
