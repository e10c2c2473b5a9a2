"""Mined negatives: every filter against its definition, pair by pair; files in and out; faults."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import simcse
from kernels.training import cli
from kernels.training.cli import Fault
from kernels.training.extras import mine
from kernels.training.tables import read_table
from running import SMALL, metrics, refuse

NEEDED = "--data good.csv --model bert --out out.csv".split()
ALL = ["--relative-margin", "-9"]                              # whatever they score


def arguments(*flags):
    args = mine.make_parser().parse_args([*NEEDED, *map(str, flags)])
    mine.check_flags(args)
    return args


def pairs(given):
    """(rows (60, 2 or 3), z, q, k): 25 anchors of several rows each, some of them positives of others."""
    draw = torch.Generator().manual_seed(0)
    anchors, z = torch.randn(25, 6, generator=draw), torch.randn(65, 6, generator=draw)
    rows = torch.stack([torch.arange(60) % 25, torch.randint(20, 65, (60,), generator=draw)], 1)
    z[rows[:, 1]] += anchors[rows[:, 0]]
    z[:25] = anchors
    if given:
        rows = torch.cat([rows, torch.randint(20, 66, (60, 1), generator=draw)], 1)        # 65: no such text
    z = F.normalize(z, dim=1)
    return rows, z, z[rows[:, 0].unique()], z[rows[:, 1].unique()]


def by_definition(rows, z, args):
    """[text ids of all candidates, the hardest first] of each row."""
    for anchor, own, *_ in rows.tolist():
        known = {text for row in rows.tolist() if row[0] == anchor for text in row}
        scores = (z @ z[anchor]).tolist()
        p, margin = scores[own], -2 if args.margin is None else args.margin
        most = min(p * (1 - args.relative_margin), p - margin, args.max_score)
        pool = {text for text in rows[:, 1].tolist() if args.min_score <= scores[text] <= most}
        yield sorted(pool - known, key=scores.__getitem__, reverse=True)


@pytest.mark.parametrize("slots", [1, 64])                     # with 1 nearly all rows are searched again
@pytest.mark.parametrize("flags", [
    [], ["--negatives", 3], ["--relative-margin", 0.4], ["--relative-margin", -100], ["--margin", 0.3],
    ["--max-score", 0.4], ["--min-score", 0.2, "--max-score", 0.5, "--negatives", 2],
    ["--ranks", 2, 2], ["--ranks", 3, 9, "--negatives", 2, "--margin", 0.1]], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_filters(given, flags, slots, monkeypatch):
    monkeypatch.setattr(mine, "TOPK_SLOTS", slots)
    monkeypatch.setattr(mine, "BLOCK", 7)
    (rows, z, q, k), args = pairs(given), arguments(*flags)
    (first, last), n, full = args.ranks, args.negatives, 0
    negatives, scores, positives = mine.mine(rows, q, k, args)
    assert torch.allclose(positives, (z[rows[:, 0]] * z[rows[:, 1]]).sum(1))
    for row, found, s, wanted in zip(rows, negatives.tolist(), scores, by_definition(rows, z, args)):
        ranked = wanted[first - 1 : last]
        assert (found == [-1] * n) == (len(ranked) < n)
        if found[0] >= 0:
            assert sorted(set(found), key=ranked.index) == found and len(found) == n
            assert found == ranked[:n] or last - first + 1 > n
            assert torch.allclose(s, z[found] @ z[row[0]])
            full += 1
    assert 20 < full


def test_draws(monkeypatch):
    """Of every rank of the range, by the seed, whatever the size of blocks."""
    rows, z, *sides = pairs(False)
    args, other = (arguments("--ranks", 2, 5, "--negatives", 2, "--seed", seed) for seed in (0, 1))
    found, _, _ = mine.mine(rows, *sides, args)
    assert not found.equal(mine.mine(rows, *sides, other)[0])
    ranked = list(by_definition(rows, z, args))
    ranks = {all.index(text) + 1 for all, ids in zip(ranked, found.tolist()) for text in ids if text >= 0}
    assert ranks == {2, 3, 4, 5}
    monkeypatch.setattr(mine, "BLOCK", 7)
    assert found.equal(mine.mine(rows, *sides, args)[0])


def test_prompts():
    """Anchors are read behind one prompt and positives behind the other, whatever their order by length."""
    model = SimpleNamespace(device=torch.device("cpu"), bf16=False, prompts=("q: ", "p: "))
    mark = lambda text: [len(text), ord(model.scored[0])]
    model.embed_texts = lambda texts: torch.tensor([*map(mark, texts)]).float()
    q, k = mine.embed(model, ["a", "bbb", "cc"], torch.tensor([0, 1]), torch.tensor([1, 2]))
    wanted = torch.tensor([[1, 113], [3, 113], [3, 112], [2, 112]]).float()
    assert torch.cat([q, k]).allclose(F.normalize(wanted, dim=1))


def test_what_a_text_equals(here, bert):
    """Each row has one text left, the last none. Quotes and line breaks come through."""
    flags = [*NEEDED, *ALL, "--data", "data.json", "--model", str(bert)]
    rows = [["a b", "c\n d", "z"], ["a  b", '"e" f', "z"], ["x", "g\rh", "c d"], ['"e" f', "c d", "g h"]]
    Path("data.json").write_text(json.dumps(rows))
    for name in ("out.csv", "out.jsonl"):
        mine.main([*flags, "--out", name])
        header, table = read_table(name)
        assert header == ["anchor", "positive", "negative_1", "negative_2"]
        negatives = ["g\rh", "g\rh", '"e" f']
        assert [cells for _, cells in table] == [[*row, text] for row, text in zip(rows, negatives)]
    assert {path.name for path in Path().iterdir()} == {"good.csv", "data.json", "out.csv", "out.jsonl"}


def test_out_is_there_once_it_is_whole(here):
    class Watched(list):
        def __iter__(self):
            for row in super().__iter__():
                assert not Path("out.csv").exists()
                yield row

    mine.write(Path("out.csv"), Watched(read_table("good.csv")[1]), torch.zeros(3, 1, dtype=int), ["No."])
    assert Path("out.csv").read_text().splitlines()[1] == "A man eats.,He eats.,No."


def test_simcse_trains_on_the_file(here, bert, capsys):
    mine.main([*NEEDED, *ALL, "--model", str(bert), "--out", "triples.tsv"])
    assert "3 rows written to triples.tsv, 0 left out" in capsys.readouterr().out
    simcse.main([*SMALL, "--data", "triples.tsv", "--out", "out"])
    assert "supervised: 3 rows (anchor anchor" in capsys.readouterr().out and metrics(Path("out"))


def test_ranks_that_no_memory_holds(monkeypatch):
    rows, _, *sides = pairs(False)
    monkeypatch.setattr(cli, "memory", lambda: 35_000)
    wanted = "--ranks 2 9: .* candidates of 60 rows at a time would need .* GB of memory, this machine has .*"
    with pytest.raises(Fault, match=wanted):
        mine.mine(rows, *sides, arguments("--ranks", 2, 9))
    mine.mine(rows, *sides, arguments("--ranks", 2, 3))


@pytest.mark.parametrize("flags, wanted", [
    ("--data one.csv", r"one\.csv line 1: 1 column, wanted anchor, positive and any hard negatives"),
    ("--data broken.json --out out.tsv", r"broken\.json item 1: a tab or a line break, which --out .tsv .*"),
    ("--ranks 5 2", r"--ranks 5 2: wanted FIRST LAST, with at least --negatives 1 ranks"),
    ("--ranks 2 3 --negatives 3", r"--ranks 2 3: wanted FIRST LAST, with at least --negatives 3 ranks"),
    ("--out good.csv", r"--out good\.csv: this file exists; delete it or name another"),
    ("--out out.txt", r"--out out\.txt: wanted a name that ends in \.csv, \.tsv or \.jsonl"),
    ("--out none/out.csv", r"--out none/out\.csv: none is no folder that can be written"),
    ("--negatives 3", r"good\.csv: 3 different positives, wanted more than --negatives 3"),
    ("--ranks 1 100000000", r"good\.csv: 3 different positives, wanted more than LAST of --ranks 1 .*"),
    ("--min-score 0.9 --max-score 0.1", r"good\.csv: nothing to write, all rows have fewer than 1 .*")])
def test_faults(here, capfd, monkeypatch, flags, wanted):
    model = SimpleNamespace(device=torch.device("cpu"), bf16=False, prompts=("",))
    model.embed_texts = lambda texts: torch.randn(len(texts), 6)
    monkeypatch.setattr(mine, "load_model", lambda args: model)
    monkeypatch.setitem(sys.modules, "mine", mine)
    Path("one.csv").write_text("A man eats.\nA dog runs.\n")
    Path("broken.json").write_text('[["a", "b\\tc"], ["d", "e"]]')
    refuse("mine", capfd, wanted, *NEEDED, *flags.split())
