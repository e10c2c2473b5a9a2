"""Test scored pairs: reading files; Spearman, alignment and uniformity, compared with direct code."""
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import loss_formulas as formulas
from kernels.training.text.encoders import SentenceEncoder
from kernels.training.text.evaluation import evaluate, load_held_out, spearman
from running import embed_unbatched


def test_spearman():
    rng = random.Random(0)
    for n in (2, 3, 10, 200):
        a = np.array([rng.random() for _ in range(n)])
        b = [0, 1, *rng.choices(range(4), k=n - 2)]            # b has ties
        exact = formulas.spearman(torch.tensor(a), torch.tensor(b))
        assert spearman(a, b) == pytest.approx(exact, abs=1e-12)
        assert spearman(a, -a) == pytest.approx(-1) and spearman(a, np.exp(a)) == pytest.approx(1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9))           # 4.5 / √(4.5 · 5)
    assert spearman([1, 1, 1], [1, 2, 3]) == spearman([1, 2, 3], [1, 1, 1]) == 0       # one side is constant


@pytest.mark.parametrize("name, content, columns", [
    ("sts.tsv", 'score\tgenre\tsentence2\tsentence1\n5.0\tnews\tIt  eats.\t"A" cat.\n\tnews\tE\tF\n'
     "0\tnews\tC\tB\n", None),
    ("sts.csv", 'sentence1,sentence2,score\n"""A"" cat.",It eats.,5\nE,F,\nB,C,0\n', None),
    ("sts.tsv", 'E\tF\t\n"A" cat.\tIt eats.\t5\nB\tC\t-0.0\n', None),
    ("sick.tsv", 'pair_ID\tsentence_A\tsentence_B\trelatedness\n1\t"A" cat.\tIt eats.\t5\n2\tB\tC\t0\n',
     ["sentence_A", "sentence_B", "relatedness"]),
    ("raw.tsv", 'news\t2012\t1\t5\t"A" cat.\tIt eats.\nnews\t2012\t2\t0\tB\tC\n', ["5", "6", "4"])])
def test_scored_pairs(tmp_path, name, content, columns):
    """Columns are found by known names, or chosen by name (SICK) or number (STS-B); otherwise the last column
    has the score. Only .csv files have quotes. The pair E, F has no score and is skipped."""
    (tmp_path / name).write_text(content)
    assert load_held_out(tmp_path / name, columns) == [('"A" cat.', "It eats.", 5.0), ("B", "C", 0.0)]


def test_evaluate(bert):
    """The scores equal those of plain loops over embeddings that are computed one sentence at a time."""
    rng, words = random.Random(1), "cat dog man sun eats runs sees old".split()
    sentences = [" ".join(rng.choices(words, k=2 + i)) for i in range(9)]
    pairs = [(*rng.sample(sentences, 2), rng.randint(0, 3)) for _ in range(20)]    # different sentences
    pairs += [(one, one + " cat", rng.randint(2, 5)) for one in sentences]         # similar sentences
    args = SimpleNamespace(model="bert", max_length=3, chunk_size=None)       # evaluation ignores max_length
    encoder, tokenizer = AutoModel.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), bf16=False)
    result = evaluate(SentenceEncoder(encoder, tokenizer, run, "avg"), pairs)
    texts = sorted({text for pair in pairs for text in pair[:2]})
    rows = embed_unbatched(encoder, tokenizer, texts, "avg").double()
    z = dict(zip(texts, (rows / rows.norm(dim=1, keepdim=True)).numpy()))
    cosines = torch.tensor([z[one] @ z[two] for one, two, _ in pairs])
    rho = formulas.spearman(cosines, torch.tensor([score for *_, score in pairs]))
    assert result["spearman"] == pytest.approx(100 * rho, abs=1e-3)
    near = [sum((z[one] - z[two]) ** 2) for one, two, score in pairs if score > 4]
    assert result["alignment"] == pytest.approx(np.mean(near), rel=1e-4)
    far = [math.exp(-2 * sum((x - y) ** 2)) for x, y in itertools.combinations(z.values(), 2)]
    assert result["uniformity"] == pytest.approx(math.log(np.mean(far)), rel=1e-3)
