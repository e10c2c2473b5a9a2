"""Test which checkpoint a script keeps, and which score --evaluate prints."""
import copy
from pathlib import Path

import pytest

import simcse
from running import DATA, NLI, equal, few_pairs, run_text, saved_weights

SMALL = ["--model", "scratch", "--batch-size", 8]


def test_best_checkpoint_is_kept(tmp_path, monkeypatch):
    """A higher score on --dev replaces the checkpoint; an equal score does not. The score before training
    does not count. --test scores the checkpoint that is kept."""
    scores, seen = iter([9.0, 1.0, 3.0, 3.0, 2.0, 7.0]), []

    def next_score(model, *_):
        seen.append(copy.deepcopy(model.encoder.state_dict()))
        return {"spearman": next(scores)}

    monkeypatch.setattr("kernels.training.text.evaluation.evaluate", next_score)
    flags = [*SMALL, "--dev", DATA / "sts.tsv", "--test", DATA / "sts.tsv", "--steps", 4, "--eval-every", 1]
    result = run_text("simcse", tmp_path, NLI[:12], *flags)
    assert [step["best"] for step in result.steps] == [True, True, False, False]
    assert [i for i, weights in enumerate(seen) if equal(dict(seen[2]), dict(weights))] == [2, 5]
    assert equal(dict(seen[2]), saved_weights(tmp_path / "out"))
    assert "9.00 → 3.00 at step 2," in result.said["done"]


def test_the_mean_over_test_sets(cwd, bert, capsys):
    """The last line has the mean score over the files of --test, without --dev. The model's folder does not
    name a pooling, so the flag --pooling is needed."""
    Path("one.tsv").write_text("A man eats.\tHe eats.\t5\nA dog.\tThe sun.\t0\nIt is.\tIt was.\t4\n")
    files, last_lines = ["one.tsv", few_pairs(Path(), 30)], []
    for given in (files[:1], files[1:], [*files, "--dev", DATA / "sts.tsv"]):
        simcse.main(["--evaluate", "--model", str(bert), "--pooling", "avg", "--test", *map(str, given)])
        last_lines.append(capsys.readouterr().out.splitlines()[-1].split())
    assert last_lines[2][0] == "test" and last_lines[2][-1] == "mean"
    one, other, both = (float(words[1]) for words in last_lines)
    assert both == pytest.approx((one + other) / 2, abs=0.006)
