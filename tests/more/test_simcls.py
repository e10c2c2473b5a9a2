"""Test simcls.py: the ranking loss, the columns of the data, and the choice among candidates."""
import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import simcls
from loss_check import check, numbers
from running import NLI, ONE_BATCH, embed_saved, run, run_text, write_table

ROWS = [[*row, *other] for row, other in zip(NLI[:12], NLI[1:13])]     # text, reference, four candidates
HEADER = ["text", "reference", "cand1", "cand2", "cand3", "cand4", "rouge"]


def reference_ranking_loss(scores, reference, margin, form):
    """Return the paper's loss, or the released code's: a sum of means, one for each distance j − i."""
    n, c = scores.shape
    hinges = {0: [scores[b, i] - reference[b] for b in range(n) for i in range(c)]}    # {j − i: terms}
    for b, i, j in itertools.product(range(n), range(c), range(c)):
        if i < j:
            hinges.setdefault(j - i, []).append(scores[b, j] - scores[b, i] + (j - i) * margin)
    hinges = [torch.stack(terms).clamp(min=0) for terms in hinges.values()]
    return sum(x.sum() / n for x in hinges) if form == "paper" else sum(x.mean() for x in hinges)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("n, c, margin", [(4, 1, 0.01), (5, 4, 0.5)])
def test_ranking_loss(form, n, c, margin):
    given = dict(scores=numbers(n, c), reference=numbers(n, seed=1), margin=margin, form=form)
    check(simcls.ranking_loss, reference_ranking_loss, given, [torch.float64])


def test_columns_of_the_ranking_loss(tmp_path, bert):
    """Columns are text, reference, and candidates from best to worst. Scores are cosines with the text."""
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--margin", 0.05, "--form", "code"]
    step, = run_text("simcls", tmp_path, ROWS, *flags).steps
    text, *others = [embed_saved(bert, column, "avg").double() for column in zip(*ROWS)]
    reference, *scores = [torch.cosine_similarity(text, other) for other in others]
    expected = reference_ranking_loss(torch.stack(scores, 1), reference, 0.05, "code")
    assert step["loss"] == pytest.approx(expected.item(), abs=1e-4)


def test_cut_candidates_keep_their_last_token():
    model, ids = Mock(), np.arange(9)
    args = SimpleNamespace(candidate_length=5, count=3)
    simcls.make_batch(Mock(views=lambda *_: [[ids], [ids], [ids]]), [0], model, args)
    text, reference, candidates = model.batch.call_args.args
    assert candidates[0].tolist() == [0, 1, 2, 3, 8] and len(text[0]) == len(reference[0]) == 9


def test_nearest_candidate_is_chosen(tmp_path):
    """evaluate returns the mean score of the candidates with the highest cosine, and the mean score of each
    text's best candidate. In a file without scores, the first candidate has 100, and the others have 0."""
    scores = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)).round(decimals=3)
    rows = [[*row, " ".join(map(str, x.tolist()))] for row, x in zip(ROWS, scores)]
    texts = sorted({text for row in ROWS for text in row})
    z, places = numbers(len(texts), 3), {text: i for i, text in enumerate(texts)}
    model = SimpleNamespace(embed=lambda texts: (z, [places[text] for text in texts]))
    text, _, *candidates = (z[[places[text] for text in column]] for column in zip(*ROWS))
    at = torch.stack([torch.cosine_similarity(text, x) for x in candidates], 1).argmax(1)
    expected = {"chosen": scores[range(12), at].mean().item(), "best": scores.amax(1).mean().item()}
    found = simcls.evaluate(model, simcls.load_dev(write_table(tmp_path / "x.csv", rows, HEADER)))
    assert found == pytest.approx(expected, abs=1e-6)
    rows = [[row[-1], *row[:-1]] for row in rows]              # --columns does not name the scores
    again = simcls.load_dev(write_table(tmp_path / "z.csv", rows, ["rouge", *"abcdef"]), [*"abcdef"])
    assert simcls.evaluate(model, again) == pytest.approx(expected, abs=1e-6)
    found = simcls.evaluate(model, simcls.load_dev(write_table(tmp_path / "y.csv", ROWS, [*"abcdef"])))
    assert found == pytest.approx({"chosen": 100 * (at == 0).double().mean().item(), "best": 100})


def test_run(tmp_path):
    """The run keeps the checkpoint whose chosen candidates have the highest mean score: here the first
    checkpoint, as training prefers the first candidates, whose scores in --dev are the lowest. Step t has the
    learning rate of the released code: --lr · min(t^-½, t · 10,000^-1½)."""
    dev = write_table(tmp_path / "dev.csv", [[*row, "0.1 0.25 0.5 0.9"] for row in ROWS], HEADER)
    data = write_table(tmp_path / "data.csv", ROWS, HEADER[:6])
    flags = ["--model", "scratch", "--data", data, "--dev", dev]
    result = run("simcls", tmp_path / "out", *flags, "--eval-every", 3, "--lr", 10, "--steps", 6, "--seed", 2)
    assert [step["lr"] for step in result.steps] == pytest.approx([10e-6 * t for t in range(1, 7)])
    first, last = (result.steps[i]["dev_chosen"] for i in (2, 5))
    assert first > last and result.run.extra_state["saved"]["chosen"] == first
