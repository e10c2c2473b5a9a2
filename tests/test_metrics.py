"""Evaluation and the order of training against slow, independent versions."""
import itertools
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import simcse
from kernels import own_rows


def slow_spearman(a, b):
    """Ranks counted pair by pair, then Pearson written out."""
    ranks = [[sum(y < v for y in x) + (sum(y == v for y in x) + 1) / 2 for v in x] for x in (a, b)]
    da, db = ([r - sum(x) / len(x) for r in x] for x in ranks)
    return sum(p * q for p, q in zip(da, db)) / math.sqrt(sum(p * p for p in da) * sum(q * q for q in db))


def test_spearman():
    draw = random.Random(0)
    for n in (2, 3, 10, 200):
        a, b = np.array([draw.random() for _ in range(n)]), [0, 1, *draw.choices(range(4), k=n - 2)]     # b has ties
        assert simcse.spearman(a, b) == pytest.approx(slow_spearman(a, b), abs=1e-12)
        assert simcse.spearman(a, -a) == pytest.approx(-1) and simcse.spearman(a, np.exp(a)) == pytest.approx(1)
    assert simcse.spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)               # 1 - 6·4 / (5·24)
    assert simcse.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9))          # 4.5 / √(4.5 · 5)
    assert simcse.spearman([1, 1, 1], [1, 2, 3]) == simcse.spearman([1, 2, 3], [1, 1, 1]) == 0   # a constant side


@pytest.mark.parametrize("name, content", [
    ("sts.tsv", 'score\tgenre\tsentence2\tsentence1\n5.0\tnews\tIt  eats.\t"A" cat.\n\tnews\tE\tF\n0\tnews\tC\tB\n'),
    ("sts.csv", 'sentence1,sentence2,score\n"""A"" cat.",It eats.,5\nE,F,\nB,C,0\n'),
    ("sts.jsonl", '["\\"A\\" cat.", "It eats.", 5]\n["E", "F", ""]\n["B", "C", 0.0]'),
    ("sts.tsv", 'E\tF\t\n"A" cat.\tIt eats.\t5\nB\tC\t.0\n'),
    ("sts.tsv", '5.000\t"A" cat.\tIt eats.\n\tE\tF\n0\tB\tC\n')])
def test_load_sts(tmp_path, name, content):
    """Columns by name or score first or last; '"' is only a quote in csv; E and F have no score."""
    (tmp_path / name).write_text(content)
    assert simcse.load_sts(tmp_path / name) == [('"A" cat.', "It eats.", 5.0), ("B", "C", 0.0)]


@torch.no_grad()
def test_evaluate(tmp_path):
    """One Spearman over all subsets, alignment and uniformity, by loops over embeddings taken one sentence at a time."""
    draw, path = random.Random(1), tmp_path / "sts.tsv"
    sentences = [" ".join(draw.choices("cat dog man sun eats runs sees old red".split(), k=2 + i)) for i in range(12)]
    rows = [(*draw.sample(sentences, 2), draw.randint(0, 3), "a") for _ in range(30)]            # unlike, low scores
    rows += [(one, one + " cat", draw.randint(2, 5), "b") for one in sentences]                  # alike, high scores
    path.write_text("\n".join("\t".join(map(str, row)) for row in [("sentence1", "sentence2", "score", "subset"), *rows]))
    args = simcse.make_parser().parse_args(["--data", str(path), *"--model scratch --pooling avg --max-length 3".split()])
    args.device = "cpu"
    torch.manual_seed(0)
    model, pairs = simcse.build_model(args), simcse.load_sts(path)
    assert pairs == [row[:3] for row in rows]
    result, z = simcse.evaluate(model, pairs, args), {}
    model.eval()
    for text in {text for row in rows for text in row[:2]}:
        ids = model.tokenizer(text, return_tensors="pt")["input_ids"]                            # whole, not 3 tokens
        mean = model.encoder(ids).last_hidden_state[0].double().mean(0).numpy()
        z[text] = mean / np.linalg.norm(mean)
    chosen = ([(z[one] @ z[two], score) for one, two, score, name in rows if name in names] for names in ("ab", "a", "b"))
    both, a, b = (100 * slow_spearman(*zip(*pairs)) for pairs in chosen)
    assert result["spearman"] == pytest.approx(both, abs=1e-3)
    assert abs(both - (a + b) / 2) > 20                        # the mean over subsets is another number
    near = [sum((z[one] - z[two]) ** 2) for one, two, score in pairs if score > 4]
    assert result["alignment"] == pytest.approx(np.mean(near), rel=1e-5)
    far = [math.exp(-2 * sum((x - y) ** 2)) for x, y in itertools.combinations(z.values(), 2)]
    assert result["uniformity"] == pytest.approx(math.log(np.mean(far)), rel=1e-4)


def test_length_groups_cost_least():
    for draw in map(random.Random, range(200)):
        lengths, cost = sorted(draw.choices(range(1, 12), k=draw.randint(1, 9))), draw.choice([0, 1, 5, 30, 1000])
        def total(cuts):
            return sum((end - start) * lengths[end - 1] + cost for start, end in cuts)
        ours, n = simcse.length_groups(lengths, cost), len(lengths)
        inner = itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n))
        assert [i for start, end in ours for i in range(start, end)] == list(range(n))
        assert total(ours) == min(total(list(zip((0, *cut), (*cut, n)))) for cut in inner)


def order(steps, skip=0, rows=23, **flags):
    args = SimpleNamespace(**dict(seed=3, batch_size=4, world=1, rank=0) | flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simcse, "own_rows", lambda rows: own_rows(rows, args.rank, args.world))
        return list(itertools.islice(simcse.batches(list(range(rows)), skip, args), steps))


def test_batches():
    """Six steps are an epoch of 23 rows, its last batch short."""
    run, epochs = order(18), [order(6, skip) for skip in (0, 6, 12)]
    assert run == sum(epochs, []) == order(18)                 # the same again, whatever was drawn from torch between
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4, 4, 4, 4, 3]
        assert sorted(sum(epoch, [])) == list(range(23))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != order(6, seed=4)
    assert all(order(5, skip) == run[skip : skip + 5] for skip in range(13))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rows", [24, 25, 23])
def test_batches_of_several_ranks(rows, world):
    """Shares that differ by one row at most and make up the global batch; a last batch that does not reach all ranks is left out."""
    steps = (rows + 4 - world) // 4
    ranks = [order(steps + 1, rows=rows, world=world, rank=rank) for rank in range(world)]
    for sizes in [list(map(len, shares)) for shares in zip(*ranks)]:
        assert 1 <= min(sizes) and max(sizes) - min(sizes) <= 1
    assert [sum(shares, []) for shares in zip(*ranks)][:steps] == order(steps, rows=rows)
    assert len(ranks[0][steps]) == 4 // world                  # the next epoch


def test_lr_falls_linearly():
    assert [simcse.lr_at(step, 4, SimpleNamespace(lr=2.0)) for step in (1, 2, 3, 4)] == [2.0, 1.5, 1.0, 0.5]


def test_shipped_data_is_what_its_generator_writes(tmp_path):
    data = Path(__file__).parent / "data"
    subprocess.run([sys.executable, data / "make.py", tmp_path], check=True)
    made, kept = (np.load(folder / "shapes.npz") for folder in (tmp_path, data))
    assert made.files == kept.files and all((made[name] == kept[name]).mean() > 0.999 for name in made.files)   # cosines may round
    for name in ("nli.csv", "sentences.txt", "sts.tsv", "entities.tsv", "topics.tsv", "topics_dev.tsv", *(path.relative_to(data) for path in (data / "wordnet").iterdir())):
        assert (tmp_path / name).read_bytes() == (data / name).read_bytes(), name
