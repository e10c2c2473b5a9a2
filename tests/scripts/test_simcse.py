"""SimCSE: defaults by number of columns, first loss, data in memory, dropout. The loss function is tested in
tests/kernels/test_losses.py, the masked LM in test_mlm.py."""
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

import simcse
from families import DECODERS, ENCODERS, small_model
from kernels.training.errors import UserError
from kernels.training.text.encoders import set_dropout
from running import DATA, NLI, ONE_BATCH, SMALL, embed_saved, metrics, rejects, run_text

# number of columns: mode, texts per row, batch size, learning rate, epochs
DEFAULTS = {1: ("unsupervised", 2, 64, 3e-5, 1), 2: ("pairs", 2, 512, 5e-5, 3),
            3: ("supervised", 3, 512, 5e-5, 3), 5: ("supervised", 5, 512, 5e-5, 3)}


@pytest.mark.parametrize("columns", DEFAULTS)
def test_defaults_depend_on_the_number_of_columns(columns, tmp_path):
    """The defaults are the paper's for BERT-base, or those of --model scratch. Flags that are given win."""
    file, names = tmp_path / "data.jsonl", "mode count batch_size lr epochs".split()
    file.write_text(512 * (json.dumps(columns * ["A man eats."]) + "\n"))
    given = "--batch-size 7 --lr 0.5 --epochs 9".split()
    scratch = (32, 2e-3, 4)
    for flags, values in ([], DEFAULTS[columns][2:]), (["--model", "scratch"], scratch), (given, (7, 0.5, 9)):
        args = simcse.make_parser().parse_args(["--data", str(file), *flags])
        assert len(simcse.load_data(file, args)) == 512
        assert tuple(getattr(args, name) for name in names) == (*DEFAULTS[columns][:2], *values)


@pytest.mark.parametrize("columns, flag, value", [
    (1, "--mlm-weight", 0), (2, "--temperature", 0.1), (3, "--hard-negative-weight", 1.5),
    (3, "--mlm-weight", 0.1)])
def test_first_loss_matches_the_formula(columns, flag, value, tmp_path, bert):
    """The first loss equals the paper's formula on the embeddings of the model. The model has no dropout, and
    the batch holds all rows."""
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, flag, value]
    step, = run_text("simcse", tmp_path, rows, *flags).steps
    z1, *others = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    logits = [z1 @ z.T / (value if flag == "--temperature" else 0.05) for z in others or [z1]]
    logits[-1] += (value if flag == "--hard-negative-weight" else 0) * torch.eye(12)
    expected = F.cross_entropy(torch.cat(logits, 1), torch.arange(12)).item()
    assert step["loss"] == pytest.approx(expected, abs=1e-4)
    assert ("mlm" in step) == (flag == "--mlm-weight" and value > 0)


def test_rows_in_memory(tmp_path):
    """Training on a list of rows gives the losses of training on the file. --resume recognises the rows by
    their content, and rejects others."""
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


def test_training_that_went_nowhere_is_reported(cwd, capsys):
    """A rate of 0 improves nothing; a huge rate gives all sentences one embedding. A folder called scratch is
    not the new model of this name."""
    Path("scratch").mkdir()
    flags = [*map(str, [*SMALL, "--dev", DATA / "sts.tsv", "--steps", 2]), "--lr"]
    simcse.main([*flags, "0", "--out", "a"])
    said = capsys.readouterr().out
    assert "note     no checkpoint scored higher on --dev than the model that training began with" in said
    assert "collapsed" not in said
    simcse.main([*flags, "100", "--out", "b"])
    assert "all sentences have nearly the same embedding, so the model has" in capsys.readouterr().out


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_set_dropout_equals_dropout_in_the_config(family, tmp_path):
    """set_dropout gives the same bits as loading the model with this dropout in its config, also for families
    whose own dropout is 0. The config, which is saved later, does not change."""
    folder, ids = small_model(family, tmp_path), torch.arange(6, 46).view(4, 10)

    def hidden_states(encoder):
        return encoder(input_ids=ids, attention_mask=ids > 0).last_hidden_state

    encoder = AutoModel.from_pretrained(folder).train()
    config = encoder.config.to_dict()
    names = [key for key, value in config.items() if re.search("drop", key) and type(value) in (int, float)]
    for p in (0.3, 0.0, 0.2):
        set_dropout(encoder, p, family)
        loaded = AutoModel.from_pretrained(folder, **dict.fromkeys(names, p)).train()
        states = []
        for model in (encoder, loaded, encoder):
            torch.manual_seed(len(states) // 2)                # the third call has another seed
            states.append(hidden_states(model))
        assert torch.equal(*states[:2]) and torch.equal(*states[1:]) == (p == 0)
    assert encoder.config.to_dict() == config
    assert torch.equal(*(hidden_states(encoder.eval()) for _ in range(2)))


def test_dropout_of_a_run(tmp_path, bert):
    """--dropout changes the losses; with 0, both views of a text are equal. --dropout is not
    saved: the next run has the model's own dropout again, which is 0 for the model `bert`."""
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


def test_invalid_dropout(cwd, capfd):
    for p, expected in ("-1", "argument .* from 0 to 0.999"), ("1", "argument .* from 0 to 0.999"):
        rejects("simcse", capfd, expected, *SMALL, "--dropout", p)
    with pytest.raises(UserError, match="--dropout 0.1: mine has no dropout layers"):
        set_dropout(torch.nn.Sequential(torch.nn.Linear(2, 2)), 0.1, "mine")
