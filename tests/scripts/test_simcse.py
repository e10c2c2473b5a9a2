"""Test simcse.py: the first loss, the head and dropout. Lists of negatives and equal texts are tested in
tests/training/test_data.py, the masked LM in tests/training/text/test_mlm.py."""
import re

import pytest
import torch
from transformers import AutoModel

import loss_formulas
from families import small_model
from kernels.training.text.encoders import set_dropout
from running import NLI, ONE_BATCH, embed_saved, run_text


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


def test_dropout_of_a_run(tmp_path):
    """The dropout of --model scratch is 0.1 by default. With --dropout 0 the loss differs."""
    rows, flags = [row[:1] for row in NLI[:12]], [*ONE_BATCH, "--lr", 0, "--model", "scratch"]
    own, same, none = (run_text("simcse", tmp_path / name, rows, *flags, *more).losses
                       for name, *more in (["own"], ["same", "--dropout", 0.1], ["none", "--dropout", 0]))
    assert own == same != none
