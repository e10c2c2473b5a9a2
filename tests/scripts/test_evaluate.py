"""--evaluate of every script prints the score that the training run printed, and writes nothing."""
import csv
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import simcse
from running import DATA, SENTENCES, few_pairs, rejects, run

PICTURES = np.load(DATA / "shapes.npz")
SCORED = ["simcse", "ease", "vascl", "dclr", "selfguided"]


def evaluate(name, capsys, *flags):
    """Run --evaluate and return its last line. Check that no file in the working folder changes."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    capsys.readouterr()
    importlib.import_module(name).main(["--evaluate", *map(str, flags)])
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("name", SCORED)
def test_scored_pairs(name, cwd, bert, capsys):
    """With several --test files, the last line has the mean of their scores. This folder has no saved
    pooling, so --pooling gives it."""
    Path("one.tsv").write_text("A man eats.\tHe eats.\t5\nA dog.\tThe sun.\t0\nIt is.\tIt was.\t4\n")
    flags = ["--test", "one.tsv", few_pairs(Path(), 30)]
    last = evaluate(name, capsys, "--model", bert, "--pooling", "avg", *flags)
    alone = (["--model", bert, "--pooling", "avg", "--test", file] for file in flags[1:])
    files = [evaluate(name, capsys, *flags) for flags in alone]
    mean = np.mean([float(line.split()[1]) for line in files])
    assert last.startswith("test ") and float(last.split()[1]) == pytest.approx(mean, abs=0.006)


def test_dev_does_not_count_as_a_test_set(cwd, bert, capsys):
    """--dev has a line of its own, and the mean is over the test sets only."""
    Path("one.tsv").write_text("A man eats.\tHe eats.\t5\nA dog.\tThe sun.\t0\nIt is.\tIt was.\t4\n")
    simcse.main(["--evaluate", "--model", str(bert), "--pooling", "avg", "--dev", "one.tsv", "--test",
                 str(DATA / "sts.tsv")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    _, dev, test, mean = (line for line in lines if line[0] != "note")
    assert (dev[0], dev[-1], test[0], test[-1]) == ("dev", "one.tsv", "test", str(DATA / "sts.tsv"))
    assert mean == ["test", test[1], "mean"] and dev[1] != test[1]


def test_cline(cwd, capsys):
    """Training holds out the last rows of a file. --evaluate on these rows alone gives the same scores."""
    rows = [(a, a.replace(" ", " so "), b) for (a,), (b,) in zip(SENTENCES[:60], SENTENCES[60:120])]
    for name, part in ("all.csv", rows), ("last.csv", rows[40:]):
        with open(name, "w", newline="") as file:
            csv.writer(file).writerows([("original", "synonym", "antonym"), *part])
    flags = ["--model", "scratch", "--batch-size", 8, "--steps", 4, "--held-out-rows", 20]
    result = run("cline", Path("out"), "--data", "all.csv", *flags)
    found = re.search(r"(hits .*), RTD [\d.]+(, CTS [\d.]+)", result.said["held"])
    line = evaluate("cline", capsys, "--model", "out", "--data", "last.csv")
    assert line == f"test     {found[1]}{found[2]}, 20 triples of last.csv"


@pytest.mark.parametrize("regression", [False, True])
def test_childtuning(regression, cwd, capsys):
    """--evaluate uses the saved labels in their saved order, or scores a regression."""
    if regression:
        Path("few.tsv").write_text("".join(f"{row[0]}\t{i % 5}.5\n" for i, row in enumerate(SENTENCES[:40])))
    else:
        Path("few.tsv").write_text("".join((DATA / "topics.tsv").read_text().splitlines(True)[:60]))
    flags = ["--data", "few.tsv", "--mode", "none", "--epochs", 2, "--dev", "few.tsv"]
    result = run("childtuning", Path("out"), *flags, "--model", "scratch")
    line = evaluate("childtuning", capsys, "--model", "out", "--dev", "few.tsv")
    assert line == f"test     {result.said['dev'].split(': ')[1]}  few.tsv"


def test_cline_rejects_rows_without_replaced_words(cwd, capfd):
    Path("same.csv").write_text("original,synonym,antonym\nHe eats.,He eats.,He sleeps.\n")
    run("cline", Path("out"), "--data", DATA / "sentences.txt", "--wordnet", DATA / "wordnet", "--model",
        "scratch", "--batch-size", 8, "--steps", 1, "--tagger", "lexicon")
    capfd.readouterr()
    flags = ["--evaluate", "--model", "out", "--data", "same.csv"]
    rejects("cline", capfd, "same.csv: no row has a replaced word in both copies; expected .*", *flags)


STS = ["--test", str(DATA / "sts.tsv")]
NOTHING = "--evaluate: nothing to evaluate; give .*"


@pytest.mark.parametrize("name, flags, wanted", [
    ("simcse", [], NOTHING), ("tacl", [], NOTHING), ("simclr", [], NOTHING),
    ("simcse", ["--data", "good.csv"], "--evaluate: nothing to evaluate; give .*"),
    ("simcse", [*STS, "--model", "scratch"], "--model scratch: a new model is untrained; .*"),
    ("moco", ["--dev", "good.csv"], "--model resnet-50: a new model has learnt nothing; .*"),
    ("moco", ["--data", "x.npy"], "--model resnet-50: a new model has learnt nothing; .*"),
    ("simclr", ["--data", "x.npy", "--model", "y"], "--evaluate: expected labelled test images, .*"),
    ("childtuning", ["--dev", "good.csv", "--model", "encoder"], "--model encoder: .* a classifier.*")])
def test_what_cannot_be_evaluated(name, flags, wanted, cwd, bert, capfd):
    np.save("x.npy", PICTURES["images"][:4])
    Path("encoder").symlink_to(bert)
    rejects(name, capfd, wanted, "--evaluate", *flags)
