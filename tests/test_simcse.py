"""SimCSE: its modes, its first loss; the loss itself is in test_losses.py, the masked LM in test_mlm.py."""
import json

import pytest
import torch
import torch.nn.functional as F

import simcse
from running import NLI, ONE_BATCH, metrics, read, run_text

MODES = {1: ("unsupervised", 2, 64, 3e-5, 1), 2: ("pairs", 2, 512, 5e-5, 3),
         3: ("supervised", 3, 512, 5e-5, 3), 5: ("supervised", 5, 512, 5e-5, 3)}


@pytest.mark.parametrize("columns", MODES)
def test_columns_decide_what_was_not_given(columns, tmp_path):
    """By the paper, for BERT-base. A small random model has others; what was given stays."""
    file, names = tmp_path / "data.jsonl", "mode views batch_size lr epochs".split()
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
    z1, *others = [F.normalize(read(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
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
    z1, z2, z3, z4 = [F.normalize(read(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    logits = torch.cat([z1 @ z.T / 0.05 for z in (z2, z3, z4)], 1)
    if ignore:
        logits[1:, 24:35].fill_diagonal_(-torch.inf)
        assert result.said["equal"].startswith("11 of 12 rows")
    assert result.losses == pytest.approx([F.cross_entropy(logits, torch.arange(12)).item()], abs=1e-4)


def test_rows_in_memory(tmp_path):
    """A list of rows trains as the file does; --resume knows them by their content."""
    flags = ["--model", "scratch", "--batch-size", "4", "--steps", "2"]
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
