"""Scored pairs: reading files, and Spearman, alignment and uniformity compared with slow direct versions."""
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from kernels.training.text.encoders import SentenceEncoder
from kernels.training.text.sts import evaluate, load_sts, spearman
from running import SMALL, rejects


def slow_spearman(a, b):
    """Count ranks pair by pair, then compute Pearson's correlation from its definition."""
    ranks = [[sum(y < v for y in x) + (sum(y == v for y in x) + 1) / 2 for v in x] for x in (a, b)]
    da, db = ([r - sum(x) / len(x) for r in x] for x in ranks)
    return sum(p * q for p, q in zip(da, db)) / math.sqrt(sum(p * p for p in da) * sum(q * q for q in db))


def test_spearman():
    rng = random.Random(0)
    for n in (2, 3, 10, 200):
        a = np.array([rng.random() for _ in range(n)])
        b = [0, 1, *rng.choices(range(4), k=n - 2)]            # has ties
        assert spearman(a, b) == pytest.approx(slow_spearman(a, b), abs=1e-12)
        assert spearman(a, -a) == pytest.approx(-1) and spearman(a, np.exp(a)) == pytest.approx(1)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)                # 1 - 6·4 / (5·24)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9))           # 4.5 / √(4.5 · 5)
    assert spearman([1, 1, 1], [1, 2, 3]) == spearman([1, 2, 3], [1, 1, 1]) == 0           # a constant side


@pytest.mark.parametrize("name, content", [
    ("sts.tsv",
     'score\tgenre\tsentence2\tsentence1\n5.0\tnews\tIt  eats.\t"A" cat.\n\tnews\tE\tF\n0\tnews\tC\tB\n'),
    ("sts.csv", 'sentence1,sentence2,score\n"""A"" cat.",It eats.,5\nE,F,\nB,C,0\n'),
    ("sts.jsonl", '["\\"A\\" cat.", "It eats.", 5]\n["E", "F", ""]\n["B", "C", 0.0]'),
    ("sts.tsv", 'E\tF\t\n"A" cat.\tIt eats.\t5\nB\tC\t.0\n'),
    ("sts.tsv", '5.000\t"A" cat.\tIt eats.\n\tE\tF\n0\tB\tC\n')])
def test_load_sts(tmp_path, name, content):
    """Columns are found by name, or the score is first or last. Only .csv files have quotes. The pair of E
    and F has no score and is skipped."""
    (tmp_path / name).write_text(content)
    assert load_sts(tmp_path / name) == [('"A" cat.', "It eats.", 5.0), ("B", "C", 0.0)]


def test_scores_and_columns_of_other_data_sets(tmp_path):
    """Scores may be on any scale. Columns may be chosen by name (SICK) or by number (STS-B's raw files)."""
    (tmp_path / "a.tsv").write_text("A\tb\t1e-05\nC\td\t-0.0\nE\tf\t100\n")
    assert [score for *_, score in load_sts(tmp_path / "a.tsv")] == [1e-5, 0, 100]
    sick = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\n1\tA\tB\t4.5\n2\tC\tD\t1\n"
    (tmp_path / "sick.tsv").write_text(sick)
    columns = ["sentence_A", "sentence_B", "relatedness_score"]
    assert load_sts(tmp_path / "sick.tsv", columns) == [("A", "B", 4.5), ("C", "D", 1.0)]
    (tmp_path / "raw.tsv").write_text("news\tx\t2012\t1\t2.5\tA\tB\nnews\tx\t2012\t2\t0\tC\tD\n")
    assert load_sts(tmp_path / "raw.tsv", ["6", "7", "5"]) == [("A", "B", 2.5), ("C", "D", 0.0)]


STS = "sentence1\tsentence2\tscore\nA man eats.\tHe eats.\t5\n"


@pytest.mark.parametrize("flag", ["--dev", "--test"])
@pytest.mark.parametrize("content, wanted", [
    (None, r"sts\.tsv: No such file or directory"),
    ("sentence1\tsentence2\nA\tb\n",
     r"sts\.tsv: found sentence1, sentence2; expected sentence1, sentence2, score, or 3 columns.*"),
    *((STS + f"A\tb\t{score}\n", rf"sts\.tsv line 3: score '{score}', expected a number, .* from 0 to 5")
      for score in ("many", "inf", "1e400", "1_0", "0x1", "nan")),
    (STS + "A\t \t1\n", r"sts\.tsv line 3: an empty sentence"),
    (STS + "A\tb\t\n", r"sts\.tsv: 1 scored pairs whose scores are all equal, .* there is no correlation"),
    (STS + "A\tb\t5.0\n", r"sts\.tsv: 2 scored pairs whose scores are all equal, .*")])
def test_invalid_files(cwd, capfd, flag, content, wanted):
    if content is not None:
        Path("sts.tsv").write_text(content)
    rejects("simcse", capfd, wanted, *SMALL, flag, "sts.tsv")


@torch.no_grad()
def test_evaluate(tmp_path, bert):
    """Spearman over all subsets together, alignment and uniformity equal those of loops over embeddings that
    are computed one sentence at a time."""
    rng, path = random.Random(1), tmp_path / "sts.tsv"
    words = "cat dog man sun eats runs sees old red".split()
    sentences = [" ".join(rng.choices(words, k=2 + i)) for i in range(12)]
    rows = [(*rng.sample(sentences, 2), rng.randint(0, 3), "a") for _ in range(30)]    # different sentences
    rows += [(one, one + " cat", rng.randint(2, 5), "b") for one in sentences]         # similar sentences
    head = ("sentence1", "sentence2", "score", "subset")
    path.write_text("\n".join("\t".join(map(str, row)) for row in [head, *rows]))
    args = SimpleNamespace(model="bert", max_length=3, chunk_size=None)        # evaluation ignores max_length
    run = SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)
    encoder, tokenizer = AutoModel.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    model, pairs = SentenceEncoder(encoder, tokenizer, run, "avg"), load_sts(path)
    assert pairs == [row[:3] for row in rows]
    result, z = evaluate(model, pairs), {}
    model.eval()
    for text in {text for row in rows for text in row[:2]}:
        hidden = encoder(tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state[0]
        mean = hidden.double().mean(0).numpy()
        z[text] = mean / np.linalg.norm(mean)
    subsets = ([(z[one] @ z[two], score) for one, two, score, name in rows if name in names]
               for names in ("ab", "a", "b"))
    both, a, b = (100 * slow_spearman(*zip(*subset)) for subset in subsets)
    assert result["spearman"] == pytest.approx(both, abs=1e-3)
    assert abs(both - (a + b) / 2) > 5         # the mean over subsets differs
    near = [sum((z[one] - z[two]) ** 2) for one, two, score in pairs if score > 4]
    assert result["alignment"] == pytest.approx(np.mean(near), rel=1e-4)
    far = [math.exp(-2 * sum((x - y) ** 2)) for x, y in itertools.combinations(z.values(), 2)]
    assert result["uniformity"] == pytest.approx(math.log(np.mean(far)), rel=1e-3)
