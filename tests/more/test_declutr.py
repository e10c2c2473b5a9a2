"""DeCLUTR: spans of documents, the loss of anchors and positives, and the masked LM of both forms."""
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import declutr
from declutr import sample_cell
from kernels.training.text import mlm
from kernels.training.text.encoders import build_encoder
from kernels.training.text.tokens import tokenise
from running import SENTENCES, embed_saved, rejects, run_text


class Documents(list):
    """A table whose rows have one text."""
    def __iter__(self):
        return ((f"line {i + 1}", [text]) for i, text in enumerate(super().__iter__()))


def test_spans(bert, tmp_path):
    """Lengths of anchors and positives follow Beta(4, 2) and Beta(2, 4). A document is cut into cells of
    --max-length tokens. Anchors lie in cells that are not adjacent; positives overlap or touch their anchor.
    Each span has special tokens at its ends. Short documents are left out."""
    documents = Documents(" ".join(random.Random(n).choices("abcdef", k=n)) for n in (255, 256, 700, 3000))
    folder = shutil.copytree(bert, tmp_path / "padding")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_padding(length=20)                          # like sentence-transformers' MiniLM
    backend.save(str(folder / "tokenizer.json"))
    args = SimpleNamespace(model=folder, data=[["a"]], pooling="avg", max_length=64, chunk_size=None,
                           spans=[2, 3], batch_size=3)
    model = build_encoder(args, SimpleNamespace(device=torch.device("cpu"), bf16=False, args=args))
    assert declutr.long_documents(documents, model, args) == [1, 2, 3]
    positions = np.arange(1000, 4000, dtype=np.int32)          # a document whose tokens are positions
    document = np.concatenate([[model.tokenizer.cls_token_id], positions, [model.tokenizer.sep_token_id]])
    lengths, starts_before, ends_after = {0: [], 1: []}, [], []
    for seed in range(300):
        anchors, *positives = declutr.sample_spans([document], model, args, random.Random(seed))
        assert [len(view) for view in (anchors, *positives)] == [2] * 4
        cells = [(row[1] - 1000) // 64 for row in anchors]
        assert [(row[-2] - 1000) // 64 for row in anchors] == cells and abs(cells[0] - cells[1]) > 1
        for view in (anchors, *positives):
            for row, anchor in zip(view, anchors):
                assert row[0] == document[0] and row[-1] == document[-1] and len(row) <= 64
                assert list(row[1:-1]) == list(range(row[1], row[1] + len(row) - 2))
                assert row[1] <= anchor[-2] + 3 and row[-2] >= anchor[1] - 3   # two tokens may be truncated
                lengths[view is not anchors].append(len(row) - 2)
                starts_before.append(row[1] < anchor[1])
                ends_after.append(row[-2] > anchor[-2])
    for is_positive, mean in (0, 2 / 3), (1, 1 / 3):
        found = torch.tensor(lengths[is_positive]).double()
        assert found.min() >= 32 and abs(found.mean() - (32 + mean * 32 - 0.5)) < 0.7
    # below 1/2: the anchors count, too, and neither start before nor end after themselves
    assert 0.2 < np.mean(starts_before) < 0.5 and 0.2 < np.mean(ends_after) < 0.5


def cell_probabilities(cells, anchors):
    """Return {cells of the anchors: probability} of the released code, a reference for sample_cell.

    Each anchor takes a random free cell. If `left` anchors still need one and fewer than left² are free, it
    takes the first or the last free cell. This cell and its neighbours in the list of free cells are removed.
    """
    found = {(): (1.0, tuple(range(cells)))}
    for left in range(anchors, 0, -1):
        following = {}
        for drawn, (probability, free) in found.items():
            choices = range(len(free)) if len(free) // left >= left else [0, len(free) - 1]
            for at in choices:
                still_free = tuple(cell for i, cell in enumerate(free) if abs(i - at) > 1)
                key = (*drawn, free[at])
                before = following.get(key, (0.0, still_free))[0]
                following[key] = (before + probability / len(choices), still_free)
        found = following
    return {drawn: probability for drawn, (probability, _) in found.items()}


@pytest.mark.parametrize("cells, anchors", [(4, 2), (9, 2), (6, 3), (7, 3), (8, 4)])
def test_cells_are_drawn_one_after_the_other(cells, anchors):
    """20,000 samples pass a chi-square test, which a uniform choice among all sets of cells would fail."""
    expected, rng, n = cell_probabilities(cells, anchors), random.Random(1), 20_000
    counts = dict.fromkeys(expected, 0)
    for _ in range(n):
        free = [*range(cells)]
        counts[tuple(sample_cell(free, left, rng) for left in range(anchors, 0, -1))] += 1
    assert sum(expected.values()) == pytest.approx(1) and all(
        abs(a - b) > 1 for drawn in expected for a in drawn for b in drawn if a != b)

    def chi_square(probabilities):
        return sum((counts[key] - n * p) ** 2 / (n * p) for key, p in probabilities.items())

    freedom = len(expected) - 1
    assert chi_square(expected) < freedom + 4 * (2 * freedom) ** 0.5 + 8
    if (cells, anchors) == (7, 3):
        uniform = dict.fromkeys(expected, 1 / len(expected))
        assert chi_square(uniform) > 10 * freedom


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("pooling", ["avg", "avg_first_last"])
def test_masked_anchors_are_embedded(pooling, chunk_size, tmp_path, bert, monkeypatch):
    """--form code: one pass over masked anchors gives their embeddings and the masked-LM loss, whose decoder
    is tied to the word embeddings. Positives are not masked."""
    spans = [[row[0] for row in SENTENCES[start : start + 4]] for start in (0, 4, 8)]
    tokenizer = AutoTokenizer.from_pretrained(bert)

    monkeypatch.setattr(declutr, "sample_spans",
                        lambda *_: [tokenise(view, tokenizer, 512)[0] for view in spans])

    def mask_even_ids(ids, maskable, tokenizer):
        chosen = maskable & (ids % 2 == 0)
        return torch.where(chosen, tokenizer.mask_token_id, ids), chosen

    monkeypatch.setattr(mlm, "mask_tokens", mask_even_ids)
    flags = ["--steps", 1, "--max-length", 8, "--lr", 0, "--pooling", pooling, "--spans", 1, 2,
             "--batch-size", 4, "--form", "code"]
    flags += ["--chunk-size", chunk_size] if chunk_size else []
    result = run_text("declutr", tmp_path / "run", [["abc " * 20]] * 4, "--model", bert, *flags)
    lm, z, losses = result.model.lm.eval(), [], []
    lm.zero_grad()
    for view, texts in enumerate(spans):
        for ids in (torch.from_numpy(row).long() for row in tokenise(texts, tokenizer, 512)[0]):
            maskable = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
            masked, chosen = mask_even_ids(ids, maskable, tokenizer)
            if view > 0:
                masked, chosen = ids, maskable & False
            output = lm(input_ids=masked[None], output_hidden_states=True)
            hidden = output.hidden_states[-1]
            z.append((hidden if pooling == "avg" else (hidden + output.hidden_states[1]) / 2)[0].mean(0))
            losses.append(F.cross_entropy(output.logits[0][chosen], ids[chosen], reduction="none"))
    anchors, *positives = torch.stack(z).chunk(3)
    views = [F.normalize(x, dim=1) for x in (anchors, torch.stack(positives).mean(0))]
    both = torch.cat(views)
    logits = (both @ both.T / 0.05).fill_diagonal_(-torch.inf)
    contrast = F.cross_entropy(logits, torch.arange(8).roll(4))
    step, = result.steps
    assert step["loss"] == pytest.approx(contrast.item(), abs=1e-4)
    assert step["mlm"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)
    (contrast + torch.cat(losses).mean()).backward()
    norm = torch.stack([w.grad.norm() for w in lm.parameters() if w.grad is not None]).norm().item()
    assert result.norms[0] == pytest.approx(norm, rel=1e-3)
    assert lm.get_output_embeddings().weight is result.model.encoder.get_input_embeddings().weight


@pytest.mark.parametrize("anchors", [1, 2])
def test_loss_of_spans(anchors, tmp_path, bert, monkeypatch):
    """The loss compares eight anchors with the means of their three positives; other anchors of the document
    are negatives. With --form paper the masked LM gets the clean anchors."""
    spans = [[row[0] for row in SENTENCES[start : start + 8]] for start in (0, 8, 16, 24)]
    tokenizer = AutoTokenizer.from_pretrained(bert)
    tokens = [tokenise(view, tokenizer, 512)[0] for view in spans]
    monkeypatch.setattr(declutr, "sample_spans", lambda *_: tokens)
    batches, nothing = [], torch.zeros(())
    monkeypatch.setattr(declutr, "masked_lm_loss", lambda _, batch, impl: batches.append(batch) or nothing)
    flags = ["--steps", 1, "--max-length", 8, "--spans", anchors, 3, "--batch-size", 8 // anchors]
    result = run_text("declutr", tmp_path, [["abc " * 20]] * 9, "--model", bert, *flags)
    assert result.said["spans"].startswith(f"9 of 9 documents have at least {16 * anchors} tokens")
    seen = [ids[mask.bool()].tolist() for group in batches[0] for _, ids, mask in zip(*group)]
    assert sorted(seen) == sorted([*ids] for ids in tokens[0])
    anchors, *positives = [embed_saved(bert, view, "avg").double() for view in spans]
    z = F.normalize(torch.cat([anchors, torch.stack(positives).mean(0)]), dim=1)
    logits = (z @ z.T / 0.05).fill_diagonal_(-torch.inf)
    expected = F.cross_entropy(logits, torch.arange(16).roll(8)).item()
    assert result.losses == pytest.approx([expected], abs=1e-4)
    lm = result.model.lm                                       # its decoder is untied
    assert lm.get_output_embeddings().weight is not result.model.encoder.get_input_embeddings().weight


def test_learning_rate(tmp_path, bert):
    """The rate rises from 1/32 of --lr during a tenth of the steps, and falls again."""
    flags = ["--model", bert, "--steps", 20, "--max-length", 8, "--spans", 1, 1, "--batch-size", 2]
    rates = [row["lr"] / 5e-5 for row in run_text("declutr", tmp_path, [["abc " * 20]] * 4, *flags).steps]
    assert rates[:3] == pytest.approx([1 / 32, (1 + 31 / 2) / 32, 1])
    assert rates[-1] == pytest.approx((1 + 31 / 18) / 32)


@pytest.mark.parametrize("flags, expected", [
    ("--spans 0 2", r"argument --spans: 0: expected a number of at least 1"),
    ("", r"good\.csv: several columns, expected one of documents; choose it by --columns"),
    ("--columns 1", r"good\.csv: 0 of 3 documents have at least 128 .*, which is --batch-size")])
def test_mistakes(flags, expected, cwd, capfd):
    rejects("declutr", capfd, expected, "--data", "good.csv", "--model", "scratch", "--max-length", 32,
            *flags.split())
