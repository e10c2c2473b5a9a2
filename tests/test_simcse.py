"""SimCSE: its modes, ranks of unequal shares, whole runs against the paper's objective. The loss itself is in
test_losses.py, the masked language model in test_mlm.py."""
import json

import pytest
import torch
import torch.nn.functional as F

import simcse
from running import NLI, read, run_text
from test_losses import agree, points

# the paper's, for BERT-base
MODES = {1: ("unsupervised", 2, "train-only", "cls", 64, 3e-5, 1),
         2: ("pairs", 2, "keep", "cls", 512, 5e-5, 3), 3: ("supervised", 3, "keep", "cls", 512, 5e-5, 3)}


@pytest.mark.parametrize("columns", MODES)
def test_columns_decide_what_was_not_given(columns, tmp_path):
    """A small random model has others; what was given stays."""
    file, names = tmp_path / "data.jsonl", "mode views head pooling batch_size lr epochs".split()
    file.write_text(512 * (json.dumps(columns * ["A man eats."]) + "\n"))
    given = "--head keep --pooling avg_top2 --batch-size 7 --lr 0.5 --epochs 9".split()
    kept = "keep", "avg_top2", 7, 0.5, 9
    scratch = MODES[columns][2], "avg", 32, 2e-3, 4
    for flags, wanted in ([], MODES[columns][2:]), (["--model", "scratch"], scratch), (given, kept):
        args = simcse.make_parser().parse_args(["--data", str(file), *flags])
        assert len(simcse.load_data(file, args)) == 512
        assert tuple(getattr(args, name) for name in names) == (*MODES[columns][:2], *wanted)


@pytest.mark.parametrize("w", [0.0, 0.7])
def test_parts_of_ranks_and_their_gradients_add_up(w):
    """Ranks of 1, 2 and 3 anchors against the keys of all."""
    z1, z2, z3 = (points(6, 5, seed) for seed in range(3))

    def parts(z1, *keys):
        of_rank = lambda i, j: simcse.simcse_loss(z1[i:j], *keys, hard_negative_weight=w, offset=i)
        return sum(of_rank(i, j) * (j - i) / 6 for i, j in ((0, 1), (1, 3), (3, 6)))
    agree(parts, lambda *z: simcse.simcse_loss(*z, hard_negative_weight=w), z1, z2, z3)
    agree(parts, lambda *z: simcse.simcse_loss(*z, hard_negative_weight=w), z1, z2)


@pytest.mark.parametrize("columns, flag, value", [
    (1, "--mlm-weight", 0), (2, "--temperature", 0.1), (3, "--hard-negative-weight", 1.5),
    (3, "--mlm-weight", 0.1)])
def test_first_loss_is_the_papers(columns, flag, value, tmp_path, bert):
    """Without dropout and with all rows in one batch: the objective on the folder's own embeddings."""
    rows = [row[:columns] for row in NLI[:12]]
    flags = ["--model", bert, "--pooling", "avg", "--max-length", 512, "--batch-size", 12, "--steps", 1]
    step, = run_text("simcse", tmp_path, rows, *flags, flag, value).steps
    z1, *others = [F.normalize(read(bert, column, "avg").double(), dim=1) for column in zip(*rows)]
    temperature, weight = (value if flag == name else default
                           for name, default in (("--temperature", 0.05), ("--hard-negative-weight", 0)))
    logits = [z1 @ z.T / temperature for z in others or [z1]]
    logits[-1] += weight * torch.eye(12)
    wanted = F.cross_entropy(torch.cat(logits, 1), torch.arange(12)).item()
    assert step["loss"] == pytest.approx(wanted, abs=1e-4)
    assert ("mlm" in step) == (flag == "--mlm-weight" and value > 0)
