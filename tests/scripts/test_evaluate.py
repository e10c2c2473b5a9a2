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
        return {"spearman": next(scores), "uniformity": -len(seen)}   # the first score selects the checkpoint

    monkeypatch.setattr("kernels.training.text.evaluation.evaluate", next_score)
    flags = [*SMALL, "--dev", DATA / "sts.tsv", "--test", DATA / "sts.tsv", "--steps", 4, "--eval-every", 1]
    result = run_text("simcse", tmp_path, NLI[:12], *flags)
    assert [step["best"] for step in result.steps] == [True, True, False, False]
    assert [i for i, weights in enumerate(seen) if equal(dict(seen[2]), dict(weights))] == [2, 5]
    assert equal(dict(seen[2]), saved_weights(tmp_path / "out"))
    assert "9.00 → 3.00 at step 2," in result.said["done"]


def test_the_mean_over_test_sets(cwd, bert, capsys):
    """The last line has the mean score over the files of --test, without --dev and without the only file of
    another kind."""
    Path("one.tsv").write_text("A man eats.\tHe eats.\t5\nA dog.\tThe sun.\t0\nIt is.\tIt was.\t4\n")
    Path("pairs.csv").write_text("query,positive\nA man eats.,He eats.\nA dog.,It barks.\n")
    files = ["one.tsv", str(few_pairs(Path(), 30)), "pairs.csv", "--dev", str(DATA / "sts.tsv")]
    simcse.main(["--evaluate", "--model", str(bert), "--pooling", "avg", "--test", *files])
    *_, one, two, pairs, mean = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [words[0] for words in (one, two, pairs, mean)] == ["test"] * 4 and pairs[1] == "MRR@10"
    assert mean[1] == "Spearman" and mean[3:] == ["mean"]
    assert float(mean[2]) == pytest.approx((float(one[2]) + float(two[2])) / 2, abs=0.006)
