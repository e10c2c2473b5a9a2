"""Test simcse.py: the first loss, equal texts, the head and dropout. Lists of negatives are tested in
tests/training/test_data.py, the masked LM in tests/training/text/test_mlm.py."""
import re

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

import loss_formulas
from families import small_model
from kernels.training.text.encoders import set_dropout
from running import NLI, ONE_BATCH, SENTENCES, embed_saved, run_text


@pytest.mark.parametrize("columns, flag, value", [
    (1, "--mlm-weight", 0), (2, "--temperature", 0.1), (3, "--hard-negative-weight", 1.5),
    (3, "--mlm-weight", 0.1)])
def test_first_loss_matches_the_formula(columns, flag, value, tmp_path, bert):
    """The first loss equals the paper's formula on the embeddings of the model. The model has no dropout, and
    the batch holds all rows. The masked-LM loss is logged separately."""
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, flag, value]
    step, = run_text("simcse", tmp_path, rows, *flags).steps
    z1, *others = [embed_saved(bert, column, "avg").double() for column in zip(*rows)]
    z2, z3 = [*(others or [z1]), None][:2]
    given = {} if flag == "--mlm-weight" else {flag[2:].replace("-", "_"): value}
    expected = loss_formulas.simcse_loss(z1, z2, z3, **dict(temperature=0.05) | given)
    assert step["loss"] == pytest.approx(expected.item(), abs=1e-4)
    assert ("mlm" in step) == (flag == "--mlm-weight" and value > 0)


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_ignore_equal(columns, tmp_path, bert):
    """The keys of an anchor are its positive, and all positives and hard negatives with another meaning. The
    output shows how the first row is read, and the share of equal anchors or, if it is larger, positives."""
    texts = [row[0] for row in NLI[:9]]
    rows = [[texts[(i + column * (i % 4 + 1)) % 9] for column in range(columns)] for i in range(12)]
    for i, row in enumerate(rows):
        linked = (i + 3 * (i % 3)) % 9 if i % 3 else 0         # texts with the same index % 3 are linked
        row[1:2] = [texts[linked]][: columns - 1]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--ignore-equal"]
    result = run_text("simcse", tmp_path, rows, *flags)
    z1, *keys = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    anchors, *others = zip(*rows)
    others = others or [anchors]
    linked = torch.eye(9, dtype=torch.bool)                    # linked[i, j]: i and j are anchor and positive
    linked[[*map(texts.index, anchors)], [*map(texts.index, others[0])]] = True
    for _ in range(4):                                         # paths of 16 links reach all linked texts
        linked = (linked | linked.T).float() @ (linked | linked.T).float() > 0
    keys_of_rows = [texts.index(text) for column in others for text in column]
    left_out = linked[[*map(texts.index, anchors)]][:, keys_of_rows]
    left_out[range(12), range(12)] = False
    logits = (z1 @ torch.cat(keys or [z1]).T / 0.05).masked_fill(left_out, -torch.inf)
    assert result.losses == [pytest.approx(F.cross_entropy(logits, torch.arange(12)).item(), abs=1e-4)]
    assert result.said["first"].startswith(f'anchor "{texts[0][:37]}')
    share = "50 % of the sentences" if columns == 1 else "67 % of the positives"
    assert result.said["equal"].startswith(f"{share} occur more than once; --ignore-equal leaves out")


@pytest.mark.parametrize("columns, is_kept", [(1, False), (2, True), (3, True)])
def test_head_of_the_first_token(columns, is_kept, tmp_path, bert):
    """The head is saved and used at inference, except after unsupervised training (paper)."""
    rows = [row[:columns] for row in NLI[:12]]
    assert run_text("simcse", tmp_path, rows, "--model", bert, *ONE_BATCH).model.keep_head == is_kept


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert"])
def test_set_dropout_equals_dropout_in_the_config(family, tmp_path):
    """After set_dropout, a model gives the same bits as one loaded with this dropout in its config, also in
    families whose default dropout is 0. The config, which a run saves, does not change."""
    folder, ids, states = small_model(family, tmp_path), torch.arange(6, 46).view(4, 10), []
    encoder = AutoModel.from_pretrained(folder).train()
    config = encoder.config.to_dict()
    names = [key for key, value in config.items() if re.search("drop", key) and type(value) in (int, float)]
    for p in (0.3, 0.0):
        set_dropout(encoder, p, family)
        for model in (encoder, AutoModel.from_pretrained(folder, **dict.fromkeys(names, p)).train()):
            torch.manual_seed(0)
            states.append(model(input_ids=ids, attention_mask=ids > 0).last_hidden_state)
    assert torch.equal(*states[:2]) and torch.equal(*states[2:]) and not torch.equal(*states[1:3])
    assert encoder.config.to_dict() == config


@pytest.mark.parametrize("name, flags, p", [
    ("simcse", [], 0.1), ("simcse", ["--dropout", 0], 0), ("consert", [], 0),
    ("consert", ["--dropout", 0.3], 0.3)])
def test_dropout_of_a_run(name, flags, p, tmp_path):
    """Without --dropout, simcse.py has the model's own dropout, and consert.py none."""
    flags = ["--model", "scratch", "--batch-size", 4, "--steps", 1, *flags]
    modules = run_text(name, tmp_path, SENTENCES[:4], *flags).model.modules()
    assert {part.p for part in modules if isinstance(part, torch.nn.Dropout)} == {p}
