"""Which checkpoint a script keeps, and what --evaluate scores."""
import copy
import csv
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from running import DATA, NLI, SENTENCES, equal, few_pairs, rejects, run, run_text, saved_weights

SMALL = ["--model", "scratch", "--batch-size", 8]


def evaluate(name, capsys, *flags):
    """Run --evaluate and return its last line. Check that no file in the working folder changes."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    capsys.readouterr()
    importlib.import_module(name).main(["--evaluate", *map(str, flags)])
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    return capsys.readouterr().out.splitlines()[-1]


def test_best_checkpoint_is_kept(tmp_path, monkeypatch):
    """A better score on --dev replaces the checkpoint. An equal score does not, and the score before training
    does not count. --test evaluates the kept checkpoint."""
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
    """The last line has the mean score of --test; --dev does not count. This folder has no saved pooling, so
    --pooling gives it."""
    Path("one.tsv").write_text("A man eats.\tHe eats.\t5\nA dog.\tThe sun.\t0\nIt is.\tIt was.\t4\n")
    flags, files = ["--model", bert, "--pooling", "avg"], ["one.tsv", few_pairs(Path(), 30)]
    alone = [float(evaluate("simcse", capsys, *flags, "--test", file).split()[1]) for file in files]
    both = evaluate("simcse", capsys, *flags, "--test", *files, "--dev", DATA / "sts.tsv")
    assert both.startswith("test ") and both.endswith(" mean")
    assert float(both.split()[1]) == pytest.approx(np.mean(alone), abs=0.006)


def test_cline(cwd, capfd):
    """Training holds out the last rows of a file. --evaluate on these rows alone gives the same scores."""
    rows = [(a, a.replace(" ", " so "), b) for (a,), (b,) in zip(SENTENCES[:60], SENTENCES[60:120])]
    for name, part in ("all.csv", rows), ("last.csv", rows[40:]), ("same.csv", [("A b.", "A b.", "A c.")]):
        with open(name, "w", newline="") as file:
            csv.writer(file).writerows([("original", "synonym", "antonym"), *part])
    result = run("cline", Path("out"), "--data", "all.csv", *SMALL, "--steps", 4, "--held-out-rows", 20)
    found = re.search(r"(hits .*), RTD [\d.]+(, CTS [\d.]+)", result.said["held"])
    line = evaluate("cline", capfd, "--model", "out", "--data", "last.csv")
    assert line == f"test     {found[1]}{found[2]}, 20 triples of last.csv"
    wanted = "same.csv: no row has a replaced word in both copies; expected .*"
    rejects("cline", capfd, wanted, "--evaluate", "--model", "out", "--data", "same.csv")


def test_childtuning_of_a_regression(cwd, capsys):
    """Scores that --evaluate prints are those of the run."""
    Path("few.tsv").write_text("".join(f"{row[0]}\t{i % 5}.5\n" for i, row in enumerate(SENTENCES[:40])))
    flags = ["--data", "few.tsv", "--mode", "none", "--epochs", 2, "--dev", "few.tsv", "--model", "scratch"]
    result = run("childtuning", Path("out"), *flags)
    line = evaluate("childtuning", capsys, "--model", "out", "--dev", "few.tsv")
    assert line == f"test     {result.said['dev'].split(': ')[1]}  few.tsv"


@pytest.mark.parametrize("name, flags, wanted", [
    ("moco", ["--data", "x.npy"], "--model resnet-50: a new model has learnt nothing; .*"),
    ("simclr", ["--data", "x.npy", "--model", "y"], "--evaluate: expected labelled test images, .*"),
    ("childtuning", ["--dev", "good.csv", "--model", "encoder"], "--model encoder: .* a classifier.*")])
def test_what_cannot_be_evaluated(name, flags, wanted, cwd, bert, capfd):
    np.save("x.npy", np.zeros((4, 8, 8, 3), np.uint8))
    Path("encoder").symlink_to(bert)
    rejects(name, capfd, wanted, "--evaluate", *flags)
