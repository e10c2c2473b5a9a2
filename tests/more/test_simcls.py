"""SimCLS: the ranking loss, its columns, the choice among candidates, and a run from end to end."""
import contextlib
import csv
import io
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import simcls
from formulas import check_equal, cosine, randn
from kernels.training.errors import UserError
from kernels.training.text.encoders import build_encoder
from kernels.training.text.tokens import tokenise
from running import NLI, ONE_BATCH, embed_saved, rejects, run, run_distributed, run_text
from simcls import evaluate, load_dev

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
    found = load_dev(write(tmp_path / "x.csv", rows, HEADER))
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
    assert evaluate(Model(), found) == pytest.approx(expected, abs=1e-6) and 0 < at.count(0) < 12
    bare = load_dev(write(tmp_path / "y.csv", ROWS, HEADER[:6]))
    assert evaluate(Model(), bare) == {"first": pytest.approx(100 * at.count(0) / 12)}


@pytest.mark.parametrize("rows, header, expected", [
    ([[*ROWS[0], "1 2 3"]] * 2, HEADER, "line 2: scores '1 2 3'; expected a number for each of the 4 .*"),
    ([[*ROWS[0], "1 2 x 4"]] * 2, HEADER, "line 2: scores '1 2 x 4'; expected a number .*"),
    ([ROWS[0][:2]] * 2, HEADER[:2], "line 2: no candidates; expected text, reference, candidates"),
    ([[*ROWS[0][:2], "", *ROWS[0][3:]]] * 2, HEADER[:6], "line 2: an empty cell.*")])
def test_bad_rows(rows, header, expected, tmp_path):
    with pytest.raises(UserError, match=expected):
        load_dev(write(tmp_path / "x.csv", rows, header))


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


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("n, c, margin", [(1, 1, 0.01), (4, 1, 0.01), (3, 5, 0.01), (5, 4, 0.5), (2, 16, 0)])
def test_ranking_loss(form, n, c, margin):
    check_equal(lambda s, r: simcls.ranking_loss(s, r, margin, form),
          lambda s, r: reference_ranking_loss(s, r, margin, form), randn(n, c, 0), randn(n, 1, 1)[:, 0])


def test_ranking_loss_checks_its_arguments():
    x = torch.zeros(3, 2)
    for expected, *given in ((r"scores: found \(3,\)", x[:, 0], x[:, 0]), ("reference: found", x, x[:2, 0]),
                           ("form: 'both', expected paper or code", x, x[:, 0], 0.01, "both"),
                           ("scores: found torch.int64", x.long(), x[:, 0])):
        with pytest.raises(ValueError, match=expected):
            simcls.ranking_loss(*given)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_columns_of_the_ranking_loss(form, tmp_path, bert):
    """The columns are text, reference, and candidates from best to worst."""
    rows = [[*row, other[1], other[2]] for row, other in zip(NLI[:12], NLI[1:13])]
    flags = ["--model", bert, "--pooling", "avg", *ONE_BATCH, "--margin", 0.05]
    step, = run_text("simcls", tmp_path, rows, *flags, "--form", form).steps
    text, *others = [embed_saved(bert, column, "avg").double() for column in zip(*rows)]
    scores = torch.tensor([[cosine(a, b) for b in row] for a, *row in zip(text, *others)])
    expected = reference_ranking_loss(scores[:, 1:], scores[:, 0], 0.05, form).item()
    assert step["loss"] == pytest.approx(expected, abs=1e-4)


def test_columns_of_json(tmp_path):
    """Columns are found by their names, and a list of candidates has one column per candidate."""
    (tmp_path / "a.jsonl").write_text(2 * '{"candidates": ["c", "d"], "text": "a", "reference": "b"}\n')
    args = simcls.make_parser().parse_args(["--data", str(tmp_path / "a.jsonl"), "--batch-size", "2"])
    assert [cells for _, cells in simcls.load_data(args.data, args)] == [["a", "b", "c", "d"]] * 2
    assert args.count == 4 and (args.epochs, args.lr) == (5, 2e-3)


def test_run(tmp_path):
    """It keeps the checkpoint with the highest mean score of the chosen candidates, and --evaluate prints
    this score."""
    dev = write(tmp_path / "dev.csv", [[*row, "0.9 0.5 0.25 0.1"] for row in ROWS], HEADER)
    data = write(tmp_path / "data.csv", ROWS, HEADER[:6])
    flags = ["--model", "scratch", "--data", data, "--dev", dev, "--form", "code", "--eval-every", 4]
    result = run("simcls", tmp_path / "out", *flags, "--lr", 20, "--epochs", 12, "--candidate-length", 8)
    assert result.args.batch_size == 12 and result.model.head is None
    rates = [step["lr"] for step in result.steps]
    assert rates[0] == pytest.approx(20 * 1e-6, rel=1e-6) and rates[-1] == pytest.approx(20 * 12e-6, rel=1e-6)
    scores = [step["dev_chosen"] for step in result.steps if "dev_chosen" in step]
    assert result.run.extra_state["saved"]["chosen"] == max(scores) and max(scores) < 0.91
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        simcls.main(["--evaluate", "--model", str(tmp_path / "out"), "--dev", str(dev)])
    assert f"dev      chosen {max(scores):.4g}  best 0.9  first" in lines.getvalue()


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


def test_several_processes_equal_one(tmp_path, bert):
    flags = ["--data", write(tmp_path / "data.csv", ROWS), "--model", bert, "--pooling", "avg", "--steps", 3,
             "--lr", 1e-3, "--batch-size", 8]
    one = run("simcls", tmp_path / "one", *flags)
    assert run_distributed(3, "simcls", tmp_path / "three", flags) == pytest.approx(one.norms, rel=1e-4)


@pytest.mark.parametrize("flags, expected", [
    ("", r"good\.csv: 2 columns, expected text, reference and candidates; see --columns"),
    ("--columns 1 2 1", r"good\.csv: 3 rows, expected at least --batch-size, which is 12"),
    ("--columns 1 2 9", r"good\.csv: no column 9; .*")])
def test_mistakes(flags, expected, cwd, capfd):
    rejects("simcls", capfd, expected, "--data", "good.csv", "--model", "scratch", *flags.split())
