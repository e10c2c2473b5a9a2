"""Test tokenisation of data files and batches, and groups of sequences of similar length."""
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from kernels.training.text import tokens
from kernels.training.text.classifier import tokenise_texts
from kernels.training.text.tokens import group_by_length, tokenise, tokenise_table

TEXTS = ["Yes.", "He sang a very long song about the sea.", "No.", "\u00e4", "We rest.", "It rains."]


@pytest.mark.parametrize("at_once, side", [(10, "right"), (2**21, "left")])
def test_tokens_are_those_of_each_text(at_once, side, tmp_path, bert, monkeypatch, capsys):
    """Tokens are in the order of the texts. They have prompts, are truncated to the maximum length on the
    tokenizer's side, and lack the padding that some tokenizers add. They do not depend on the number of
    characters that are tokenised at once."""
    monkeypatch.setattr(tokens, "MAX_CHARS", at_once)
    tokenizer = AutoTokenizer.from_pretrained(bert, truncation_side=side)
    model = SimpleNamespace(tokenizer=tokenizer, max_length=512,
                            add_prompts=lambda cells: ["q " + cell for cell in cells],
                            forward=lambda input_ids, token_type_ids: None)
    run = SimpleNamespace(out=tmp_path, rank=0, world_size=1, args=SimpleNamespace(max_length=8))

    def expected(*texts, part="input_ids"):
        return tokenizer(*texts, truncation=True, max_length=8)[part]

    tokenizer.backend_tokenizer.enable_padding(length=12)
    rows, cut = tokenise(TEXTS, tokenizer, 8)
    assert [ids.tolist() for ids in rows] == [*map(expected, TEXTS)] and cut == 3
    for columns in (1, 2, 3):
        table = [(None, tuple(TEXTS[i : i + columns])) for i in range(0, 6, columns)]
        rows = tokenise_table(table, model, run)
        assert "3 of 6 sentences truncated to 8 tokens" in capsys.readouterr().out
        assert [[ids.tolist() for ids in row] for row in rows] == [
            [expected("q " + text) for text in row] for _, row in table]
        views = rows.views([1, 0], 4)                          # view i shows column i % columns
        assert [[ids.tolist() for ids in view] for view in views] == [
            [rows[i][view % columns].tolist() for i in (1, 0)] for view in range(4)]
    pairs = [*zip(TEXTS, TEXTS[::-1])]
    found = tokenise_texts([(pair, 5) for pair in pairs], model, 8, training=True)
    assert [(row["input_ids"].tolist(), label) for row, label in found] == [
        (expected(*pair), 5) for pair in pairs]
    assert found[0][0]["token_type_ids"].tolist() == expected(*pairs[0], part="token_type_ids")
    assert "4 of 6 training rows truncated to 8 tokens" in capsys.readouterr().out


def test_rows_of_a_group_are_limited(monkeypatch):
    """Sequences enter groups in the order of their lengths."""
    monkeypatch.setitem(tokens.GROUP_COST, "cpu", 10**9)
    lengths = [7, 3, 40, 4, 2, 6, 5]
    groups = group_by_length(lengths, SimpleNamespace(type="cpu"), 3)
    assert [[lengths[i] for i in group] for group in groups] == [[2, 3, 4], [5, 6, 7], [40]]
