"""Tokens in files and in batches."""
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
    count_characters,
    group_by_length,
    length_groups,
    text_batches,
    tokenise,
    tokenise_table,
)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_rows_are_the_tokens_of_each_sentence(columns, tmp_path, bert, capsys):
    """Rows are in file order, and do not depend on how many texts are tokenised at once."""
    texts = ["Yes.", "He sang a very long song about the sea.", "No.", "\u00e4"] * 6_000 * columns
    table = [(None, tuple(texts[i : i + columns])) for i in range(0, len(texts), columns)]
    model = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(bert), max_length=512, add_prompts=list,
                            encoder=SimpleNamespace(get_input_embeddings=lambda: None))
    run = SimpleNamespace(out=tmp_path, rank=0, world_size=1, args=SimpleNamespace(max_length=8))
    rows = tokenise_table(table, model, run)
    cut = f"{6_000 * columns:,} of {24_000 * columns:,} sentences truncated to 8 tokens"
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
    assert rows[0][0].flags.writeable          # torch.from_numpy warns of read-only arrays


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


class RecordingTokenizer:
    """A tokenizer that records the number of characters of each call in `sizes`."""

    def __init__(self, real, sizes):
        self.real, self.sizes = real, sizes

    def __getattr__(self, name):
        return getattr(self.real, name)

    @property
    def backend_tokenizer(self):
        return RecordingTokenizer(self.real.backend_tokenizer, self.sizes)

    def encode_batch_fast(self, texts):
        self.sizes.append(count_characters(texts))
        return self.real.encode_batch_fast(texts)

    def __call__(self, *columns, **options):
        self.sizes.append(sum(map(count_characters, columns)))
        return self.real(*columns, **options)


def test_long_texts_are_tokenised_few_at_a_time(bert, tmp_path, monkeypatch):
    """The tokens of tables, lists, labelled texts and triples do not change if few texts are tokenised at
    once."""
    pairs = [(f"He sang song {i} about the sea. " * (1 + i % 5), "He sang.") for i in range(60)]
    sizes = []
    tokenizer = RecordingTokenizer(AutoTokenizer.from_pretrained(bert), sizes)
    args = SimpleNamespace(max_length=20, form="paper")
    model = SimpleNamespace(tokenizer=tokenizer, max_length=512, add_prompts=list,
                            forward=lambda input_ids: None,
                            encoder=SimpleNamespace(get_input_embeddings=lambda: None))
    run = SimpleNamespace(out=tmp_path, rank=0, world_size=1, args=args)

    def tokenise_each(name):
        table = tokenise_table([(None, pair) for pair in pairs], model, run, name)
        yield [[ids.tolist() for ids in row] for row in table]
        found, cut = tokenise([text for text, _ in pairs], tokenizer, 20)
        yield [ids.tolist() for ids in found], cut
        found = tokenise_texts([(pair, 1) for pair in pairs], model, 20)
        yield [(row["input_ids"].tolist(), label) for row, label in found]
        found, cut = cline.tokenise_triples([[*pair, "No.", [], []] for pair in pairs], model, args)
        yield [[*map(list, ids[:3]), place] for *ids, place in found], cut

    at_once = [*tokenise_each("at-once")]
    largest = max(sizes)
    sizes.clear()
    monkeypatch.setattr(tokens, "MAX_CHARS", 700)
    in_parts = tokenise_each("in-parts")
    for wanted in at_once:
        assert next(in_parts) == wanted and len(sizes) > 5 and max(sizes) <= 700 < largest
        sizes.clear()


def test_length_groups_have_the_least_cost():
    for rng in map(random.Random, range(200)):
        lengths = sorted(rng.choices(range(1, 12), k=rng.randint(1, 9)))
        cost = rng.choice([0, 1, 5, 30, 1000])

        def total(cuts):
            return sum((end - start) * lengths[end - 1] + cost for start, end in cuts)
        ours, n = length_groups(lengths, cost), len(lengths)
        inner = itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n))
        assert [i for start, end in ours for i in range(start, end)] == list(range(n))
        assert total(ours) == min(total(list(zip((0, *cut), (*cut, n)))) for cut in inner)


@pytest.mark.parametrize("most, most_tokens", [(None, None), (1, None), (4, None), (None, 60), (4, 60)])
def test_groups_contain_every_row_once(most, most_tokens, monkeypatch):
    """Groups are ordered by length, respect the maximum sizes, and become fewer if groups cost more. If only
    the maximum sizes divide the rows, no group could take the next row, too."""
    lengths = random.Random(1).choices(range(3, 40), k=50)
    sizes = []
    for cost in (0, 60, 10**6):
        monkeypatch.setitem(tokens.GROUP_COST, "cpu", cost)
        groups = group_by_length(lengths, SimpleNamespace(type="cpu"), most, most_tokens)
        assert sorted(sum(groups, [])) == list(range(50))

        def fits(rows, longest):
            return rows <= (most or 50) and rows * lengths[longest] <= (most_tokens or 10**6)
        assert all(fits(len(group), group[-1]) or len(group) == 1 for group in groups)
        grouped = [lengths[i] for group in groups for i in group]
        assert grouped == sorted(grouped)
        sizes.append(len(groups))
    assert sizes == sorted(sizes, reverse=True)
    if not most and not most_tokens:
        assert sizes[2] == 1 < sizes[1] < sizes[0]
    else:                                      # with the highest cost per group, only limits divide the rows
        assert not any(fits(len(group) + 1, other[0]) for group, other in itertools.pairwise(groups))


@pytest.mark.parametrize("limits, expected", [
    ((None, 12), [[0, 1, 2], [3, 4], [5], [6]]),               # 3 · 3 and 2 · 6 tokens; 7 and 40 alone
    ((2, 12), [[0, 1], [2, 3], [4], [5], [6]]),                # 2 · 3, 2 · 5, 6, 7 and 40
    ((2, 1000), [[0, 1], [2, 3], [4, 5], [6]]), ((None, 1), [[0], [1], [2], [3], [4], [5], [6]])])
def test_rows_and_tokens_of_a_group_are_limited(limits, expected, monkeypatch):
    monkeypatch.setitem(tokens.GROUP_COST, "cpu", 10**9)
    assert group_by_length([2, 3, 3, 5, 6, 7, 40], SimpleNamespace(type="cpu"), *limits) == expected
