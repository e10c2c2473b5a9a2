"""Test kernels.training.mine: mined negatives, compared with their definition, written files, and errors."""
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernels.training import mine
from kernels.training.data import SENTENCE_COLUMNS, read_table
from running import rejects

NEEDED = "--data good.csv --model bert --out out.csv".split()


def arguments(*flags):
    args = mine.make_parser().parse_args([*NEEDED, *map(str, flags)])
    mine.check_flags(args)
    return args


def pairs():
    """Return (rows (60, 3) of text ids, embeddings z (65, 6) of texts 0 to 64, arguments q, k of mine.mine).

    Each of 25 anchors has several rows; some anchors are positives of other anchors. Text 65 occurs only as a
    hard negative, and has no embedding.
    """
    generator = torch.Generator().manual_seed(0)
    anchors, z = torch.randn(25, 6, generator=generator), torch.randn(65, 6, generator=generator)
    positives, negatives = (torch.randint(20, end, (60,), generator=generator) for end in (65, 66))
    rows = torch.stack([torch.arange(60) % 25, positives, negatives], 1)
    z[positives] += anchors[rows[:, 0]]
    z[:25] = anchors
    z = F.normalize(z, dim=1)
    return rows, z, z[rows[:, 0].unique()], z[positives.unique()]


def by_definition(rows, z, args):
    """Yield the text ids of all candidates of each row, the hardest first."""
    for anchor, own, *_ in rows.tolist():
        known = {text for row in rows.tolist() if row[0] == anchor for text in row}
        scores = (z @ z[anchor]).tolist()
        p = scores[own]
        most = min(p * (1 - args.relative_margin), p - args.margin, args.max_score)
        pool = {text for text in rows[:, 1].tolist() if args.min_score <= scores[text] <= most}
        yield sorted(pool - known, key=scores.__getitem__, reverse=True)


@pytest.mark.parametrize("slots", [1, 64])                     # 1: nearly all rows are searched twice
@pytest.mark.parametrize("flags", [
    [], ["--negatives", 3], ["--relative-margin", 0.4], ["--relative-margin", -100], ["--margin", 0.3],
    ["--max-score", 0.4], ["--min-score", 0.2, "--max-score", 0.5, "--negatives", 2],
    ["--ranks", 2, 2], ["--ranks", 3, 9, "--negatives", 2, "--margin", 0.1]], ids=str)
def test_negatives_are_the_nearest_candidates(flags, slots, monkeypatch):
    """Negatives come from all ranks of --ranks, the hardest first. Rows with too few candidates get −1."""
    monkeypatch.setattr(mine, "TOPK_SLOTS", slots)
    monkeypatch.setattr(mine, "BLOCK", 7)
    rows, z, q, k = pairs()
    args = arguments(*flags)
    first, last = args.ranks
    n, sampled = args.negatives, []
    negatives, scores, positives = mine.mine(rows, q, k, args)
    assert torch.allclose(positives, (z[rows[:, 0]] * z[rows[:, 1]]).sum(1))
    for row, found, s, expected in zip(rows, negatives.tolist(), scores, by_definition(rows, z, args)):
        ranked = expected[first - 1 : last]
        assert (found == [-1] * n) == (len(ranked) < n)
        if found[0] >= 0:
            assert sorted(set(found), key=ranked.index) == found and len(found) == n
            assert torch.allclose(s, z[found] @ z[row[0]])
            sampled += map(ranked.index, found)
    assert {*sampled} == {*range(last - first + 1)} and len(sampled) > 20
    args.seed = 7
    assert torch.equal(mine.mine(rows, q, k, args)[0], negatives) == (last - first + 1 == n)


@pytest.mark.parametrize("out", ["out.csv", "out.jsonl"])
def test_files(out, cwd, bert):
    """The written file can be read again, with quotes and line breaks. Each row has one candidate, the last
    has none: texts of rows with the same anchor are excluded, and white space does not distinguish texts."""
    rows = [["a b", "c\n d", "z"], ["a  b", '"e" f', "z"], ["x", "g\rh", "c d"], ['"e" f', "c d", "g h"]]
    Path("data.json").write_text(json.dumps(rows))
    mine.main(["--data", "data.json", "--model", str(bert), "--out", out, "--relative-margin", "-9"])
    header, table = read_table(out, roles=SENTENCE_COLUMNS)
    assert [name.split()[0] for name in header] == ["anchor", "positive", "negative", "negative"]
    negatives = ["g\rh", "g\rh", '"e" f']
    assert [cells for _, cells in table] == [[*row, text] for row, text in zip(rows, negatives)]


@pytest.mark.parametrize("flags, expected", [
    ("--ranks 5 2", r"--ranks 5 2: expected FIRST LAST, with at least --negatives 1 ranks"),
    ("--out good.csv", r"--out good\.csv: this file exists; delete it or name another"),
    ("--negatives 3", r"good\.csv: 3 distinct positives, expected more than 3, the last rank .*")])
def test_bad_input(cwd, capfd, flags, expected):
    rejects(mine, capfd, expected, *NEEDED, *flags.split())
