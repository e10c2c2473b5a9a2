"""Tokens in files, in batches, and in groups of similar length."""
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from kernels.training.text import tokens
from kernels.training.text.classifier import tokenise_texts
from kernels.training.text.tokens import (
    count_characters,
    group_by_length,
    length_groups,
    text_batches,
    tokenise,
    tokenise_table,
)

CPU = SimpleNamespace(type="cpu")
TEXTS = ["Yes.", "He sang a very long song about the sea.", "No.", "\u00e4", "We rest.", "It rains."]


@pytest.mark.parametrize("at_once", [10, 200, 2**21])
def test_tokens_are_those_of_each_text(at_once, tmp_path, bert, monkeypatch, capsys):
    """Tokens are in the order of the texts, truncated to the maximum length, and do not depend on how many
    characters are tokenised at once."""
    monkeypatch.setattr(tokens, "MAX_CHARS", at_once)
    tokenizer = AutoTokenizer.from_pretrained(bert)
    model = SimpleNamespace(tokenizer=tokenizer, max_length=512, add_prompts=list,
                            forward=lambda input_ids, token_type_ids: None)
    run = SimpleNamespace(out=tmp_path, rank=0, world_size=1, args=SimpleNamespace(max_length=8))

    def expected(*texts, part="input_ids"):
        return tokenizer(*texts, truncation=True, max_length=8)[part]

    rows, cut = tokenise(TEXTS, tokenizer, 8)
    assert [ids.tolist() for ids in rows] == [*map(expected, TEXTS)] and cut == 3
    for columns in (1, 2, 3):
        table = [(None, tuple(TEXTS[i : i + columns])) for i in range(0, 6, columns)]
        rows = tokenise_table(table, model, run)
        assert "3 of 6 sentences truncated to 8 tokens" in capsys.readouterr().out
        assert [[ids.tolist() for ids in row] for row in rows] == [[*map(expected, row)] for _, row in table]
        views = rows.views([1, 0], 4)                          # a second view of each column, and so on
        assert [[ids.tolist() for ids in view] for view in views] == [
            [rows[i][view % columns].tolist() for i in (1, 0)] for view in range(4)]
    pairs = [*zip(TEXTS, TEXTS[::-1])]
    found = tokenise_texts([(pair, 5) for pair in pairs], model, 8, training=True)
    assert [(row["input_ids"].tolist(), label) for row, label in found] == [
        (expected(*pair), 5) for pair in pairs]
    assert found[0][0]["token_type_ids"].tolist() == expected(*pairs[0], part="token_type_ids")
    assert "4 of 6 training rows truncated to 8 tokens" in capsys.readouterr().out


def test_text_batches_keep_the_limits(monkeypatch):
    """No batch exceeds the limits on rows and characters, and none could take the next item, too."""
    monkeypatch.setattr(tokens, "MAX_CHARS", 100)
    for rng in map(random.Random, range(50)):
        items = ["a" * rng.choice([0, 1, 9, 40, 300]) for _ in range(rng.randint(0, 60))]
        most = rng.randint(1, 9)
        found = list(text_batches(iter(items), rows=most))
        assert [item for part in found for item in part] == items and [] not in found
        assert all(len(part) <= most and (len(part) == 1 or count_characters(part) <= 100) for part in found)
        for part, following in itertools.pairwise(found):
            assert len(part) == most or count_characters([*part, following[0]]) > 100


def test_length_groups_have_the_least_cost():
    """The cost is that of the best of all divisions."""
    for rng in map(random.Random, range(100)):
        lengths = sorted(rng.choices(range(1, 12), k=rng.randint(1, 8)))
        cost, n = rng.choice([0, 1, 5, 30, 1000]), len(lengths)

        def total(cuts):
            return sum((end - start) * lengths[end - 1] + cost for start, end in cuts)
        ours = length_groups(lengths, cost)
        inner = itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n))
        assert [i for start, end in ours for i in range(start, end)] == list(range(n))
        assert total(ours) == min(total(list(zip((0, *cut), (*cut, n)))) for cut in inner)


@pytest.mark.parametrize("limits, expected", [
    ((None, 12), [[0, 1, 2], [3, 4], [5], [6]]),               # 3 · 3 and 2 · 6 tokens; 7 and 40 alone
    ((2, 12), [[0, 1], [2, 3], [4], [5], [6]]),                # 2 · 3, 2 · 5, 6, 7 and 40
    ((2, 1000), [[0, 1], [2, 3], [4, 5], [6]]), ((None, 1), [[0], [1], [2], [3], [4], [5], [6]])])
def test_rows_and_tokens_of_a_group_are_limited(limits, expected, monkeypatch):
    monkeypatch.setitem(tokens.GROUP_COST, "cpu", 10**9)
    assert group_by_length([2, 3, 3, 5, 6, 7, 40], CPU, *limits) == expected
    shuffled = np.random.default_rng(0).permutation([2, 3, 3, 5, 6, 7, 40])
    groups = group_by_length(shuffled, CPU, *limits)
    assert sorted(itertools.chain(*groups)) == [*range(7)]
    assert [[shuffled[i] for i in group] for group in groups] == [
        [[2, 3, 3, 5, 6, 7, 40][i] for i in group] for group in expected]
