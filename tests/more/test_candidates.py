"""Candidates in --dev (SimCLS): which ones are selected, their scores, and the recipe from end to end."""
import contextlib
import csv
import io

import pytest
import torch
import torch.nn.functional as F

import simcse
from kernels.training.errors import UserError
from kernels.training.extras.candidates import evaluate_candidates, is_scored_pairs, load_candidates
from running import DATA, NLI, embed_saved, rejects, run

ROWS = [[*row, *other] for row, other in zip(NLI[:12], NLI[1:13])]     # text, reference, four candidates


def write(path, rows, header=None):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([*([header] if header else []), *rows])
    return path


HEADER = ["text", "reference", "cand1", "cand2", "cand3", "cand4", "rouge"]


def test_nearest_candidate_is_selected(tmp_path, bert):
    """Check which candidates are selected (highest cosine), their mean score, and the mean best score."""
    scores = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)).round(decimals=3)
    rows = [[*row, " ".join(map(str, x.tolist()))] for row, x in zip(ROWS, scores)]
    found = load_candidates(write(tmp_path / "x.csv", rows, HEADER))
    assert [row[0] for row in found] == [row[0] for row in ROWS] and found[3][1] == ROWS[3][2:]
    assert torch.allclose(torch.tensor([row[2] for row in found]), scores)

    class Model:
        def embed(self, texts):
            distinct = sorted(set(texts))
            return embed_saved(bert, distinct, "avg"), [distinct.index(text) for text in texts]
    vectors = {text: F.normalize(embed_saved(bert, [text], "avg")[0].double(), dim=0)
               for row in ROWS for text in row}
    at = [max(range(4), key=lambda i: (vectors[row[0]] @ vectors[row[2 + i]]).item()) for row in ROWS]
    expected = {"chosen": scores[range(12), at].mean().item(), "best": scores.amax(1).mean().item(),
              "first": 100 * at.count(0) / 12}
    assert evaluate_candidates(Model(), found) == pytest.approx(expected, abs=1e-6) and 0 < at.count(0) < 12
    bare = load_candidates(write(tmp_path / "y.csv", ROWS, HEADER[:6]))
    assert evaluate_candidates(Model(), bare) == {"first": pytest.approx(100 * at.count(0) / 12)}


@pytest.mark.parametrize("rows, header, expected", [
    ([[*ROWS[0], "1 2 3"]] * 2, HEADER, r"line 2: 3 scores \(1, 2, 3\) for 4 candidates; expected text, .*"),
    ([[*ROWS[0], "1 2 x 4"]] * 2, HEADER, r"line 2: 4 scores \(1, 2, x, 4\) for 4 candidates; .* number .*"),
    ([ROWS[0][:2]] * 2, HEADER[:2], "line 2: 0 candidates; expected text, reference, candidates"),
    ([[*ROWS[0][:2], "", *ROWS[0][3:]]] * 2, HEADER[:6], "line 2: an empty cell.*")])
def test_bad_rows(rows, header, expected, tmp_path):
    with pytest.raises(UserError, match=expected):
        load_candidates(write(tmp_path / "x.csv", rows, header))


def test_is_scored_pairs_is_false_for_candidates(tmp_path):
    assert is_scored_pairs(DATA / "sts.tsv")
    assert not is_scored_pairs(write(tmp_path / "x.csv", ROWS, HEADER[:6]))
    assert not is_scored_pairs(write(tmp_path / "y.csv", [row[:3] for row in ROWS]))
    assert is_scored_pairs(write(tmp_path / "z.csv", [["2.5", *row[:2]] for row in ROWS]))


def test_recipe(tmp_path):
    """--recipe simcls keeps the checkpoint with the highest mean score of the selected candidates. --evaluate
    prints the same score."""
    rows = [[*row, "0.9 0.5 0.25 0.1"] for row in ROWS]
    dev = write(tmp_path / "dev.csv", rows, HEADER)
    data = write(tmp_path / "data.csv", ROWS, HEADER[:6])
    flags = ["--model", "scratch", "--data", data, "--dev", dev, "--recipe", "simcls", "--eval-every", 4]
    result = run("simcse", tmp_path / "out", *flags, "--lr", 20, "--epochs", 12, "--candidate-length", 8)
    args = result.args
    assert (args.batch_size, args.objective, args.form) == (12, "ranking", "code")
    assert args.pooling == "cls_before_pooler"
    assert result.model.head is None and args.model == "scratch" and args.max_length == 512
    rates = [step["lr"] for step in result.steps]
    assert rates[0] == pytest.approx(20 * 1e-6, rel=1e-6) and rates[-1] == pytest.approx(20 * 12e-6, rel=1e-6)
    scores = [step["dev_chosen"] for step in result.steps if "dev_chosen" in step]
    assert result.run.extra_state["saved"]["chosen"] == max(scores) and max(scores) < 0.91
    assert "score of the chosen" in result.said["before"] and "score of the chosen" in result.said["done"]
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        model = str(tmp_path / "out")
        simcse.main(["--evaluate", "--objective", "ranking", "--model", model, "--dev", str(dev)])
    assert f"dev      chosen {max(scores):.4g}  best 0.9  first" in lines.getvalue()


def test_candidates_are_truncated_before_their_end_token(tmp_path, bert):
    """--candidate-length applies to candidates only, whose last token is still [SEP]."""
    from types import SimpleNamespace

    from kernels.training.extras.text_views import TextViews
    from kernels.training.text.tokens import tokenise
    args = SimpleNamespace(model=bert, pooling="avg", max_length=64, count=4,
                           views=["dropout"] * 4, view_rates=[0.0] * 4, chunk_size=None,
                           adversarial=0.0, anchors=1, wordnet=None, candidate_length=6, data=[["a"]])
    run_ = SimpleNamespace(device=torch.device("cpu"), bf16=False, args=args)
    model = simcse.build_encoder(args, run_)
    rows = tokenise([row[0] for row in NLI[:3]], model.tokenizer, 64)[0]
    views = TextViews(args, model, [["a"]])
    tokens = SimpleNamespace(views=lambda places, count: [[rows[i] for i in places]] * count)
    batch = views.make_batch(tokens, range(3))
    found = {int(i): ids[mask.bool()].tolist() for group in batch for i, ids, mask in zip(*group)}
    for i in range(12):
        whole = rows[i % 3].tolist()
        assert found[i] == (whole if i < 6 else [*whole[:5], whole[-1]])


def test_candidate_length_needs_the_ranking_loss(cwd, capfd):
    rejects("simcse", capfd, "--candidate-length: only --objective ranking uses it; leave it out", "--model",
           "scratch", "--data", DATA / "nli.csv", "--candidate-length", 8, "--batch-size", 8)
