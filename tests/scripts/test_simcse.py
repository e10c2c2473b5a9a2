"""SimCSE: its modes, its first loss; the loss itself is in test_losses.py, the masked LM in test_mlm.py."""
import json
import re

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

import simcse
from families import DECODERS, ENCODERS, small_model
from kernels.training.cli import Fault
from kernels.training.text.encoders import set_dropout
from running import NLI, ONE_BATCH, SMALL, embed_saved, metrics, refuse, run_text

MODES = {1: ("unsupervised", 2, 64, 3e-5, 1), 2: ("pairs", 2, 512, 5e-5, 3),
         3: ("supervised", 3, 512, 5e-5, 3), 5: ("supervised", 5, 512, 5e-5, 3)}


@pytest.mark.parametrize("columns", MODES)
def test_columns_decide_what_was_not_given(columns, tmp_path):
    """By the paper, for BERT-base. A small random model has others; what was given stays."""
    file, names = tmp_path / "data.jsonl", "mode count batch_size lr epochs".split()
    file.write_text(512 * (json.dumps(columns * ["A man eats."]) + "\n"))
    given = "--batch-size 7 --lr 0.5 --epochs 9".split()
    scratch = (32, 2e-3, 4)
    for flags, wanted in ([], MODES[columns][2:]), (["--model", "scratch"], scratch), (given, (7, 0.5, 9)):
        args = simcse.make_parser().parse_args(["--data", str(file), *flags])
        assert len(simcse.load_data(file, args)) == 512
        assert tuple(getattr(args, name) for name in names) == (*MODES[columns][:2], *wanted)


@pytest.mark.parametrize("columns, flag, value", [
    (1, "--mlm-weight", 0), (2, "--temperature", 0.1), (3, "--hard-negative-weight", 1.5),
    (3, "--mlm-weight", 0.1)])
def test_first_loss_is_the_papers(columns, flag, value, tmp_path, bert):
    """Without dropout and with all rows in one batch: the objective on the folder's own embeddings."""
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, flag, value]
    step, = run_text("simcse", tmp_path, rows, *flags).steps
    z1, *others = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    logits = [z1 @ z.T / (value if flag == "--temperature" else 0.05) for z in others or [z1]]
    logits[-1] += (value if flag == "--hard-negative-weight" else 0) * torch.eye(12)
    wanted = F.cross_entropy(torch.cat(logits, 1), torch.arange(12)).item()
    assert step["loss"] == pytest.approx(wanted, abs=1e-4)
    assert ("mlm" in step) == (flag == "--mlm-weight" and value > 0)


@pytest.mark.parametrize("ignore", [False, True])
def test_several_hard_negatives(ignore, tmp_path, bert):
    """All of them against every anchor; with --ignore-equal but those equal to its own positive, which here
    are the last column's, of the next row."""
    rows = [[*row, other[1]] for row, other in zip(NLI[:12], NLI[1:13])]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, *["--ignore-equal"] * ignore]
    result = run_text("simcse", tmp_path, rows, *flags)
    z1, z2, z3, z4 = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    logits = torch.cat([z1 @ z.T / 0.05 for z in (z2, z3, z4)], 1)
    if ignore:
        logits[1:, 24:35].fill_diagonal_(-torch.inf)
        assert result.said["equal"].startswith("11 of 12 rows")
    assert result.losses == pytest.approx([F.cross_entropy(logits, torch.arange(12)).item()], abs=1e-4)


def test_rows_in_memory(tmp_path):
    """A list of rows trains as the file does; --resume knows them by their content."""
    flags = ["--model", "scratch", "--batch-size", "4", "--steps", "2", "--keep-state", "always"]
    file = run_text("simcse", tmp_path, NLI[:12], *flags)
    simcse.main([*flags, "--out", str(tmp_path / "list")], data=NLI[:12])
    assert [step["loss"] for step in metrics(tmp_path / "list")] == file.losses
    flags += ["--out", str(tmp_path / "list"), "--resume"]
    simcse.main(flags, data=[tuple(row) for row in NLI[:12]])
    with pytest.raises(SystemExit):
        simcse.main(flags, data=NLI[:11])
    assert "12 rows in memory, sha1" in (tmp_path / "list" / "README.md").read_text()
    with pytest.raises(SystemExit):
        simcse.main(flags, data=["A man eats.", ["He eats.", "Nobody."]])


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_dropout_is_that_of_the_config(family, tmp_path):
    """To the bit, also where the family's own is 0; and the config, which is saved, stays as it was."""
    folder, ids = small_model(family, tmp_path), torch.arange(6, 46).view(4, 10)
    read = lambda encoder: encoder(input_ids=ids, attention_mask=ids > 0).last_hidden_state
    encoder = AutoModel.from_pretrained(folder).train()
    own = encoder.config.to_dict()
    names = [name for name, value in own.items() if re.search("drop", name) and type(value) in (int, float)]
    for p in (0.3, 0.0, 0.2):
        set_dropout(encoder, p, family)
        theirs = AutoModel.from_pretrained(folder, **dict.fromkeys(names, p)).train()
        states = []
        for one in (encoder, theirs, encoder):
            torch.manual_seed(len(states) // 2)                # the third has other random numbers
            states.append(read(one))
        assert torch.equal(*states[:2]) and torch.equal(*states[1:]) == (p == 0)
    assert encoder.config.to_dict() == own and torch.equal(*(read(encoder.eval()) for _ in range(2)))


def test_dropout_of_a_run(tmp_path, bert):
    """Without, views of a text are one; what is saved keeps the model's own, here 0, for the next run."""
    rows, flags = [row[:1] for row in NLI[:12]], [*ONE_BATCH, "--lr", 0, "--model"]
    texts = {p: run_text("simcse", tmp_path / p, rows, *flags, "scratch", *(["--dropout", p] if p else []))
             for p in ("", "0.1", "0", "0.5")}
    assert texts[""].losses == texts["0.1"].losses != texts["0.5"].losses != texts["0"].losses
    assert [p for p, result in texts.items() if "without dropout" in result.said["model"]] == ["0"]
    for p, result in texts.items():
        config = json.loads((tmp_path / p / "out" / "config.json").read_text())
        assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.1
        assert {layer.p for layer in result.model.modules() if isinstance(layer, torch.nn.Dropout)} == {
            float(p or 0.1)}
    own = run_text("simcse", tmp_path / "own", rows, *flags, bert, "--dropout", 0.3)
    again = run_text("simcse", tmp_path / "again", rows, *flags, tmp_path / "own" / "out")
    assert "without" not in own.said["model"] and "without dropout" in again.said["model"]


def test_dropout_that_cannot_be(here, capfd):
    for p, wanted in ("-1", "argument .* at least 0"), ("1", r"--dropout 1\.0: wanted a .* less than 1"):
        refuse("simcse", capfd, wanted, *SMALL, "--dropout", p)
    with pytest.raises(Fault, match="--dropout 0.1: mine has no dropout that could be set"):
        set_dropout(torch.nn.Sequential(torch.nn.Linear(2, 2)), 0.1, "mine")
