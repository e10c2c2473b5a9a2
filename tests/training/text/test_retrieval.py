"""Test the evaluation on retrieval data: reading files, the scores, and which checkpoint is kept."""
import math
import re

import pytest
import torch.nn.functional as F
from saved_encoders import make_encoder

from kernels.training.errors import UserError
from kernels.training.text.evaluation import evaluate, load_held_out
from running import NLI, embed_saved, metrics, train, write_table

LABELS = ["MRR@10", "accuracy@1", "recall@10", "nDCG@10"]
ROWS = [["q", "A.", "B."], ["r", "C.", "A."], ["q", "D.", "B."]]
LISTS = [{"query": "q", "pos": ["A.", "D."], "neg": ["B.", "A."]}, {"query": "r", "pos": ["C."], "neg": []}]


@pytest.mark.parametrize("name, rows, header, columns, order", [
    ("a.csv", ROWS, ["question", "answer", "wrong_answer"], None, "ABCD"),     # columns with usual names
    ("a.csv", ROWS, ["frage", "antwort", "falsch"], None, "ABCD"),             # roles by position
    ("a.csv", [row[::-1] for row in ROWS], ["no", "yes", "text"], ["text", "yes", "no"], "ABCD"),
    ("a.csv", [["1", *row] for row in ROWS], None, ["2", "3", "4"], "ABCD"),
    ("a.csv", [*ROWS[:2], [f" {text} " for text in ROWS[2]]], None, None, "ABCD"),
    ("a.jsonl", LISTS, None, None, "ABDC"), ("a.jsonl", ROWS, None, None, "ABCD")])
def test_reading(name, rows, header, columns, order, tmp_path, capsys):
    """All rows of a query count. A text that is both a positive and a negative of a query is a positive. Rows
    may differ in the number of their negatives. The first row is printed, with the role of each cell."""
    found = load_held_out(write_table(tmp_path / name, rows, header), columns)
    texts = [{found.corpus[i] for i in positives} for positives in found.positives]
    assert (found.queries, texts) == (["q", "r"], [{"A.", "D."}, {"C."}])
    assert [text[0] for text in found.corpus] == [*order]
    first = r'2 queries, 4 texts: 3 rows.*\nfirst +anchor\b.* "q"  positive\b.* "A'
    assert re.search(first, capsys.readouterr().out)


@pytest.mark.parametrize("name, rows, header, columns", [
    ("a.csv", [["5", "A", "B"], ["1", "C", "D"]], None, None),
    ("a.csv", [["A", "B", score] for score in ("5", "", "", "", "1")], ["query", "pos", "n"], [*"123"]),
    ("a.jsonl", [dict(query="q", sentence1="A", sentence2="B", score=n) for n in (0, 1)], None, None)])
def test_two_texts_and_a_number_are_a_scored_pair(name, rows, header, columns, tmp_path, capsys):
    """The first row is printed unless the columns have the names sentence1, sentence2 and score."""
    pairs = load_held_out(write_table(tmp_path / name, rows, header), columns)
    assert ("the first row of" in capsys.readouterr().out) == (name == "a.csv")
    assert isinstance(pairs, list) and pairs[0][:2] == ("A", "B") and len(pairs) == 2


def test_texts_of_any_script_and_numbers_with_usual_names(tmp_path):
    path = write_table(tmp_path / "a.csv", [["When?", "1999", "2001"], ["Where?", "Here.", "1600"]],
                       ["query", "answer", "negative"])
    assert load_held_out(path, ["query", "answer", "negative"]).corpus == ["1999", "2001", "Here.", "1600"]
    path = write_table(tmp_path / "b.csv", [["你好", "世界"], ["天气", "很好"]])
    assert load_held_out(path).corpus == ["世界", "很好"]


@pytest.mark.parametrize("header, rows, columns, part", [
    ("sentence1 sentence2 score", ["A. B. 5", "C. D. 1"], "score sentence1 sentence2", "column 1 has no"),
    ("sentence1 sentence2 class", ["A. B. 1", "C. D. NA", "E. F. NA"], "1 2 3", "score 'NA'"),
    ("one two mark", ["A. B. 1,5", "C. D. 80%"], "1 2 3", "column 3 has no texts"),
    ("text1 text2 label", ["A. B. high", "C. D. low"], None, "column 3 has no texts"),
    ("sentence1 sentence2 score", ["A. B. 5", "C. D. 1"], "1 sentence1", "occurs twice"),
    ("query answer note note", ["A. B. C. D."], None, "2 columns are called note"),
    (None, ["A. B.", "C. x1"], None, "column 2 has no texts, .* such as x1;"),
    (None, ["P-1 A. B. 5 x.", "Pair A. B. NA x.", "P-2 A. B. 1 x."], None, "column 1 has no texts")])
def test_scores_are_never_read_as_texts(header, rows, columns, part, tmp_path):
    path = write_table(tmp_path / "a.csv", map(str.split, rows), header and header.split())
    with pytest.raises(UserError, match=part):
        load_held_out(path, columns and columns.split())


@pytest.fixture
def data(tmp_path):
    """Return the path of a file with 12 queries, each with three positives, and hard negatives."""
    rows = [[NLI[i - i % 3][0], *NLI[i][1:]] for i in range(36)]
    return write_table(tmp_path / "dev.csv", rows, ["query", "positive", "negative"])


def test_scores(data, bert):
    """The scores equal those of plain loops over embeddings that are computed one text at a time. Queries and
    other texts have their own prompts."""
    held_out = load_held_out(data)
    found = evaluate(make_encoder(bert, pooling="avg", prompt=["ask ", "text "]), held_out)
    q, k = (F.normalize(embed_saved(bert, [prompt + text for text in texts], "avg").double(), dim=1)
            for prompt, texts in zip(["ask ", "text "], held_out))
    sums = dict.fromkeys(map(str.lower, LABELS), 0)
    for cosines, positives in zip((q @ k.T).tolist(), held_out.positives):
        order = sorted(range(len(k)), key=lambda i: -cosines[i])[:10]
        ranks = [rank for rank, i in enumerate(order, 1) if i in positives]
        sums["mrr@10"] += 1 / ranks[0] if ranks else 0
        sums["accuracy@1"] += 1 in ranks
        sums["recall@10"] += len(ranks) / len(positives)
        best = sum(1 / math.log2(1 + rank) for rank in range(1, len(positives) + 1))
        sums["ndcg@10"] += sum(1 / math.log2(1 + rank) for rank in ranks) / best
    assert {len(positives) for positives in held_out.positives} == {3} and 0 < sums["mrr@10"] < len(q)
    assert found == pytest.approx({name: 100 * total / len(q) for name, total in sums.items()}, abs=1e-9)


def test_the_best_checkpoint_and_sentence_transformers(data, bert, tmp_path):
    """The checkpoint with the highest MRR@10 is kept. Its scores are those of sentence-transformers."""
    flags = ["--model", bert, "--pooling", "avg", "--prompt", "ask ", "text ", "--data", data, "--dev", data,
             "--batch-size", 12, "--steps", 6, "--eval-every", 1, "--lr", 3e-3, "--out", "out"]
    printed = train(["simcse", *flags], tmp_path)
    steps = [row for row in metrics(tmp_path / "out") if row["step"]]
    best = max(steps, key=lambda row: row["dev_mrr@10"])
    assert best["step"] < 6 and f"→ {best['dev_mrr@10']:.2f} at step {best['step']}," in printed
    assert printed.endswith("(for head and prompts, see docs/use.md)\n")
    shown = ", ".join(f"{label} {best[f'dev_{label.lower()}']:.2f}" for label in LABELS)
    again = train(["simcse", "--evaluate", "--model", "out", "--dev", data], tmp_path)
    assert f"dev      {shown}  {data}\n" in printed and f"dev      {shown}  {data}\n" in again
    library = pytest.importorskip("sentence_transformers")
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    held_out = load_held_out(data)
    queries, corpus = ({str(i): text for i, text in enumerate(texts)} for texts in held_out[:2])
    wanted = {str(i): {*map(str, positives)} for i, positives in enumerate(held_out.positives)}
    evaluator = evaluation.InformationRetrievalEvaluator(queries, corpus, wanted)
    theirs = evaluator(library.SentenceTransformer(str(tmp_path / "out")))
    for name in map(str.lower, LABELS):
        assert best[f"dev_{name}"] == pytest.approx(100 * theirs[f"cosine_{name}"], abs=1e-4), name
