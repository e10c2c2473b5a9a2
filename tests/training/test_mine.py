"""kernels.training.mine: filters compared with their definition, files that are read and written, errors."""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import simcse
from kernels.training import mine
from kernels.training.data import read_table
from running import SMALL, metrics, rejects

NEEDED = "--data good.csv --model bert --out out.csv".split()
NO_BOUND = ["--relative-margin", "-9"]                         # on the score of a negative


def arguments(*flags):
    args = mine.make_parser().parse_args([*NEEDED, *map(str, flags)])
    mine.check_flags(args)
    return args


def pairs():
    """Return (rows (60, 3) of text ids, embeddings z (65, 6) of texts 0 to 64, q and k of mine.mine).

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
    """Yield for each row the text ids of all its candidates, the hardest first."""
    for anchor, own, *_ in rows.tolist():
        known = {text for row in rows.tolist() if row[0] == anchor for text in row}
        scores = (z @ z[anchor]).tolist()
        p = scores[own]
        most = min(p * (1 - args.relative_margin), p - args.margin, args.max_score)
        pool = {text for text in rows[:, 1].tolist() if args.min_score <= scores[text] <= most}
        yield sorted(pool - known, key=scores.__getitem__, reverse=True)


@pytest.mark.parametrize("slots", [1, 64])                     # 1: nearly all rows need a second search
@pytest.mark.parametrize("flags", [
    [], ["--negatives", 3], ["--relative-margin", 0.4], ["--relative-margin", -100], ["--margin", 0.3],
    ["--max-score", 0.4], ["--min-score", 0.2, "--max-score", 0.5, "--negatives", 2],
    ["--ranks", 2, 2], ["--ranks", 3, 9, "--negatives", 2, "--margin", 0.1]], ids=str)
def test_filters(flags, slots, monkeypatch):
    """Negatives are candidates with ranks in --ranks, hardest first; a row with too few of them gets −1."""
    monkeypatch.setattr(mine, "TOPK_SLOTS", slots)
    monkeypatch.setattr(mine, "BLOCK", 7)
    rows, z, q, k = pairs()
    args = arguments(*flags)
    first, last = args.ranks
    n, full = args.negatives, 0
    negatives, scores, positives = mine.mine(rows, q, k, args)
    assert torch.allclose(positives, (z[rows[:, 0]] * z[rows[:, 1]]).sum(1))
    for row, found, s, expected in zip(rows, negatives.tolist(), scores, by_definition(rows, z, args)):
        ranked = expected[first - 1 : last]
        assert (found == [-1] * n) == (len(ranked) < n)
        if found[0] >= 0:
            assert sorted(set(found), key=ranked.index) == found and len(found) == n
            assert found == ranked[:n] or last - first + 1 > n
            assert torch.allclose(s, z[found] @ z[row[0]])
            full += 1
    assert 20 < full


def test_sampling_from_ranks(monkeypatch):
    """All ranks of --ranks are sampled. The result depends on the seed, and not on the block size."""
    rows, z, *sides = pairs()
    args, other = (arguments("--ranks", 2, 5, "--negatives", 2, "--seed", seed) for seed in (0, 1))
    found, _, _ = mine.mine(rows, *sides, args)
    assert not found.equal(mine.mine(rows, *sides, other)[0])
    ranked = list(by_definition(rows, z, args))
    ranks = {all.index(text) + 1 for all, ids in zip(ranked, found.tolist()) for text in ids if text >= 0}
    assert ranks == {2, 3, 4, 5}
    monkeypatch.setattr(mine, "BLOCK", 7)
    assert found.equal(mine.mine(rows, *sides, args)[0])


@pytest.mark.parametrize("first, second", ["qq", "qp"])
def test_prompts(first, second):
    """Anchors get the first prompt, positives the second."""
    model = SimpleNamespace(bf16=False, prompts=(first, second))

    def embed(texts):
        rows = [[len(text), ord(model.default_prompt)] for text in reversed(texts)]
        return torch.tensor(rows).float(), range(len(texts))[::-1]

    model.embed, texts = embed, ["a", "bbb", "cc"]
    sides = mine.embed_anchors_and_positives(model, texts, torch.tensor([0, 1]), torch.tensor([1, 2]))
    expected = [[1, ord(first)], [3, ord(first)], [3, ord(second)], [2, ord(second)]]
    assert torch.cat(sides).allclose(F.normalize(torch.tensor(expected).float(), dim=1))


def test_texts_of_the_same_anchor_are_no_candidates(cwd, bert):
    """Each row has one candidate left, the last row none. Quotes and line breaks are written correctly."""
    flags = [*NEEDED, *NO_BOUND, "--data", "data.json", "--model", str(bert)]
    rows = [["a b", "c\n d", "z"], ["a  b", '"e" f', "z"], ["x", "g\rh", "c d"], ['"e" f', "c d", "g h"]]
    Path("data.json").write_text(json.dumps(rows))
    for name in ("out.csv", "out.jsonl"):
        mine.main([*flags, "--out", name])
        header, table = read_table(name)
        assert header == ["anchor", "positive", "negative_1", "negative_2"]
        negatives = ["g\rh", "g\rh", '"e" f']
        assert [cells for _, cells in table] == [[*row, text] for row, text in zip(rows, negatives)]
    assert {path.name for path in Path().iterdir()} == {"good.csv", "data.json", "out.csv", "out.jsonl"}


def test_simcse_trains_on_the_file(cwd, bert, capsys):
    mine.main([*NEEDED, *NO_BOUND, "--model", str(bert), "--out", "triples.tsv"])
    assert "3 rows written to triples.tsv, 0 left out" in capsys.readouterr().out
    simcse.main([*SMALL, "--data", "triples.tsv", "--out", "out"])
    assert "supervised: 3 rows (anchor anchor" in capsys.readouterr().out and metrics(Path("out"))


@pytest.mark.parametrize("flags, expected", [
    ("--data one.csv", r"one\.csv line 1: 1 column, expected anchor, positive and any hard negatives"),
    ("--data broken.json --out out.tsv", r"broken\.json item 1: a tab or a line break, which .*"),
    ("--ranks 5 2", r"--ranks 5 2: expected FIRST LAST, with at least --negatives 1 ranks"),
    ("--out good.csv", r"--out good\.csv: this file exists; delete it or name another"),
    ("--out out.txt", r"--out out\.txt: expected a name that ends in \.csv, \.tsv, \.jsonl"),
    ("--out none/out.csv", r"--out none/out\.csv: none is not a writable folder"),
    ("--negatives 3", r"good\.csv: 3 distinct positives, expected more than 3, the last rank .*"),
    ("--min-score 0.9 --max-score 0.1", r"good\.csv: nothing to write, all rows have fewer than 1 .*")])
def test_bad_input(cwd, capfd, monkeypatch, flags, expected):
    model = SimpleNamespace(bf16=False, prompts=("",))
    model.embed = lambda texts: (torch.randn(len(texts), 6), range(len(texts)))
    monkeypatch.setattr(mine, "load_model", lambda args: model)
    Path("one.csv").write_text("A man eats.\nA dog runs.\n")
    Path("broken.json").write_text('[["a", "b\\tc"], ["d", "e"]]')
    rejects(mine, capfd, expected, *NEEDED, *flags.split())
