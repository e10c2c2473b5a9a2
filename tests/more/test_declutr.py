"""Test declutr.py: spans of documents, the contrastive loss, and the masked-LM loss of both forms."""
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

import declutr
import loss_formulas as formulas
from kernels.training.text import mlm
from kernels.training.text.tokens import tokenise
from running import SENTENCES, embed_saved, mask_every_fourth, run_text

DOCUMENT = [["abc " * 20]]


def test_spans(bert):
    """Lengths of anchors follow Beta(4, 2), lengths of positives Beta(2, 4). A document is cut into cells of
    --max-length tokens. Each anchor lies in one cell, and the cells of two anchors are not adjacent.
    Positives overlap or touch their anchor. Each span has special tokens at its ends."""
    tokenizer = AutoTokenizer.from_pretrained(bert)
    args = SimpleNamespace(max_length=64, spans=[2, 3])
    positions = np.arange(1000, 4000, dtype=np.int32)          # each token's id tells its position
    ends = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    document = np.concatenate([ends[:1], positions, ends[1:]])
    lengths, sides = {0: [], 1: []}, set()
    for seed in range(300):
        anchors, *positives = declutr.sample_spans([document], args, random.Random(seed))
        assert [len(view) for view in (anchors, *positives)] == [2] * 4
        cells = [(row[1] - 1000) // 64 for row in anchors]
        assert [(row[-2] - 1000) // 64 for row in anchors] == cells and abs(cells[0] - cells[1]) > 1
        for view in (anchors, *positives):
            for row, anchor in zip(view, anchors):
                assert [row[0], row[-1]] == ends and len(row) <= 64
                assert list(row[1:-1]) == list(range(row[1], row[1] + len(row) - 2))
                assert row[1] <= anchor[-2] + 3 and row[-2] >= anchor[1] - 3   # two tokens may be truncated
                lengths[view is not anchors].append(len(row) - 2)
                sides.add(np.sign(row[1] - anchor[1]))
    for is_positive, mean in (0, 2 / 3), (1, 1 / 3):
        found = np.array(lengths[is_positive])
        assert found.min() >= 32 and abs(found.mean() - (32 + mean * 32 - 0.5)) < 0.7
    assert sides == {-1, 0, 1}


@pytest.mark.parametrize("chunks", [[], ["--chunk-size", 2]])
def test_masked_anchors_are_embedded(chunks, tmp_path, bert, monkeypatch):
    """With --form code, one pass over masked anchors gives their embeddings and the masked-LM loss. The
    decoder is tied to the word embeddings. Positives are not masked."""
    spans = [[row[0] for row in SENTENCES[start : start + 4]] for start in (0, 4, 8)]
    tokenizer = AutoTokenizer.from_pretrained(bert)
    tokens = [tokenise(view, tokenizer, 512)[0] for view in spans]

    monkeypatch.setattr(declutr, "sample_spans", lambda *_: tokens)
    monkeypatch.setattr(mlm, "mask_tokens", mask_every_fourth)
    flags = ["--steps", 1, "--max-length", 8, "--lr", 0, "--spans", 1, 2, "--batch-size", 4, "--form", "code"]
    result = run_text("declutr", tmp_path / "run", DOCUMENT * 4, "--model", bert, *flags, *chunks)
    lm, z, losses = result.model.lm.eval(), [], []
    lm.zero_grad()
    for view, rows in enumerate(tokens):
        for ids in (torch.from_numpy(row).long() for row in rows):
            maskable = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids)) & (view == 0)
            masked, chosen = mask_every_fourth(ids, maskable, tokenizer)
            output = lm(input_ids=masked[None], output_hidden_states=True)
            z.append(output.hidden_states[-1][0].mean(0))
            losses.append(F.cross_entropy(output.logits[0][chosen], ids[chosen], reduction="none"))
    anchors, *positives = torch.stack(z).chunk(3)
    contrast = formulas.nt_xent(anchors, sum(positives) / 2, 0.05, normalize=True)
    masked_lm = torch.cat(losses).mean()
    step, = result.steps
    assert step["loss"] == pytest.approx(contrast.item(), abs=1e-4)
    assert step["mlm"] == pytest.approx(masked_lm.item(), abs=1e-4)
    (contrast + masked_lm).backward()
    norm = torch.nn.utils.get_total_norm([w.grad for w in lm.parameters() if w.grad is not None])
    assert result.norms[0] == pytest.approx(norm.item(), rel=1e-3)
    assert lm.get_output_embeddings().weight is result.model.encoder.get_input_embeddings().weight


@pytest.mark.parametrize("anchors", [1, 2])
def test_loss_of_spans(anchors, tmp_path, bert, monkeypatch):
    """The loss compares each of eight anchors with the mean of its three positives. All other anchors are
    negatives. With --form paper, masked_lm_loss gets the unmasked anchors, and the decoder is not tied."""
    spans = [[row[0] for row in SENTENCES[start : start + 8]] for start in (0, 8, 16, 24)]
    tokenizer = AutoTokenizer.from_pretrained(bert)
    tokens = [tokenise(view, tokenizer, 512)[0] for view in spans]
    monkeypatch.setattr(declutr, "sample_spans", lambda *_: tokens)
    batches, nothing = [], torch.zeros(())
    monkeypatch.setattr(declutr, "masked_lm_loss", lambda _, batch, impl: batches.append(batch) or nothing)
    flags = ["--steps", 1, "--max-length", 8, "--spans", anchors, 3, "--batch-size", 8 // anchors]
    result = run_text("declutr", tmp_path, DOCUMENT * 9, "--model", bert, *flags)
    seen = [ids[mask.bool()].tolist() for group in batches[0] for _, ids, mask in zip(*group)]
    assert sorted(seen) == sorted([*ids] for ids in tokens[0])
    z, *positives = [embed_saved(bert, view, "avg").double() for view in spans]
    expected = formulas.nt_xent(z, sum(positives) / 3, 0.05, normalize=True)
    assert result.losses == pytest.approx([expected.item()], abs=1e-4)
    decoder = result.model.lm.get_output_embeddings()
    assert decoder.weight is not result.model.encoder.get_input_embeddings().weight
