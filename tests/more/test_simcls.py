"""SimCLS: the ranking loss, its columns, and the choice among candidates."""
import csv
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import simcls
from formulas import check_equal, cosine, randn
from kernels.training.text.encoders import build_encoder
from kernels.training.text.tokens import tokenise
from running import NLI, ONE_BATCH, embed_saved, run, run_text

ROWS = [[*row, *other] for row, other in zip(NLI[:12], NLI[1:13])]     # text, reference, four candidates
HEADER = ["text", "reference", "cand1", "cand2", "cand3", "cand4", "rouge"]
both_forms = pytest.mark.parametrize("form", ["paper", "code"])


def write(path, *rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def reference_ranking_loss(scores, reference, margin, form):
    """Return the paper's loss, or the released code's: a mean over the pairs of each rank difference."""
    n, c = scores.shape
    total = 0
    below = [max(scores[b, i] - reference[b], torch.zeros(())) for b in range(n) for i in range(c)]
    pairs = {(i, j): [max(scores[b, j] - scores[b, i] + (j - i) * margin, torch.zeros(())) for b in range(n)]
             for i in range(c) for j in range(i + 1, c)}
    if form == "paper":
        return (sum(below) + sum(sum(x) for x in pairs.values())) / n
    for apart in range(1, c):
        same = [x for (i, j), found in pairs.items() if j - i == apart for x in found]
        total = total + sum(same) / len(same)
    return total + sum(below) / len(below)


@both_forms
@pytest.mark.parametrize("n, c, margin", [(4, 1, 0.01), (3, 5, 0.01), (5, 4, 0.5), (2, 16, 0)])
def test_ranking_loss(form, n, c, margin):
    check_equal(lambda s, r: simcls.ranking_loss(s, r, margin, form),
                lambda s, r: reference_ranking_loss(s, r, margin, form), randn(n, c, 0), randn(n, 1, 1)[:, 0])


@both_forms
def test_columns_of_the_ranking_loss(form, tmp_path, bert):
    """The columns are text, reference, and candidates from best to worst. The scores are cosines."""
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--margin", 0.05, "--form", form]
    step, = run_text("simcls", tmp_path, ROWS, *flags).steps
    text, *others = [embed_saved(bert, column, "avg").double() for column in zip(*ROWS)]
    scores = torch.tensor([[cosine(a, b) for b in row] for a, *row in zip(text, *others)])
    expected = reference_ranking_loss(scores[:, 1:], scores[:, 0], 0.05, form).item()
    assert step["loss"] == pytest.approx(expected, abs=1e-4)


def test_columns_of_json(tmp_path):
    """Columns are found by their names, and a list of candidates has one column per candidate."""
    (tmp_path / "a.jsonl").write_text(2 * '{"candidates": ["c", "d"], "text": "a", "reference": "b"}\n')
    args = simcls.make_parser().parse_args(["--data", str(tmp_path / "a.jsonl"), "--batch-size", "2"])
    assert [cells for _, cells in simcls.load_data(args.data, args)] == [["a", "b", "c", "d"]] * 2
    assert args.count == 4


def test_candidates_are_truncated_before_their_end_token(bert):
    """--candidate-length applies to candidates only, whose last token is still [SEP]."""
    args = SimpleNamespace(model=bert, data=[["a"]], pooling="avg", max_length=64, count=4, chunk_size=None,
                           candidate_length=6)
    model = build_encoder(args, SimpleNamespace(device=torch.device("cpu"), bf16=False, args=args))
    rows = tokenise([row[0] for row in NLI[:3]], model.tokenizer, 64)[0]
    tokens = SimpleNamespace(views=lambda places, count: [[rows[i] for i in places]] * count)
    batch = simcls.make_batch(tokens, range(3), model, args)
    found = {int(i): ids[mask.bool()].tolist() for group in batch for i, ids, mask in zip(*group)}
    for i in range(12):
        whole = rows[i % 3].tolist()
        assert found[i] == (whole if i < 6 else [*whole[:5], whole[-1]])


def test_nearest_candidate_is_chosen(tmp_path, bert):
    """Scores of the candidates with the highest cosine, of each text's best candidate, and how often the
    first one is chosen, which is all that is known without a column of scores."""
    class Model:
        def embed(self, texts):
            distinct = sorted(set(texts))
            return embed_saved(bert, distinct, "avg"), [distinct.index(text) for text in texts]

    scores = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)).round(decimals=3)
    rows = [[*row, " ".join(map(str, x.tolist()))] for row, x in zip(ROWS, scores)]
    z = [F.normalize(embed_saved(bert, column, "avg").double(), dim=1) for column in zip(*ROWS)]
    at = torch.stack([(z[0] * candidate).sum(1) for candidate in z[2:]], 1).argmax(1)
    first = 100 * (at == 0).double().mean().item()
    expected = {"chosen": scores[range(12), at].mean().item(), "best": scores.amax(1).mean().item()}
    found = simcls.evaluate(Model(), simcls.load_dev(write(tmp_path / "x.csv", HEADER, *rows)))
    assert found == pytest.approx(expected | {"first": first}, abs=1e-6) and 0 < first < 100
    bare = simcls.load_dev(write(tmp_path / "y.csv", HEADER[:6], *ROWS))
    assert simcls.evaluate(Model(), bare) == {"first": pytest.approx(first)}


def test_run(tmp_path):
    """It keeps the checkpoint with the highest mean score of the chosen candidates: here the first, because
    the last candidates, against which it trains, have high scores. Step t has the released learning rate:
    --lr · min(t^-½, t · 10,000^-1½)."""
    dev = write(tmp_path / "dev.csv", HEADER, *([*row, "0.1 0.25 0.5 0.9"] for row in ROWS))
    flags = ["--model", "scratch", "--data", write(tmp_path / "data.csv", HEADER[:6], *ROWS), "--dev", dev]
    result = run("simcls", tmp_path / "out", *flags, "--eval-every", 3, "--lr", 10, "--steps", 6)
    assert [step["lr"] for step in result.steps] == pytest.approx([10e-6 * t for t in range(1, 7)])
    first, last = (result.steps[i]["dev_chosen"] for i in (2, 5))
    assert first > last and result.run.extra_state["saved"]["chosen"] == first
