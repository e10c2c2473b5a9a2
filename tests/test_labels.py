"""Labelled texts: which columns they are, their tokens and batches, the scores of a classifier, and that
others load it. The runs are childtuning.py's."""
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertTokenizer, pipeline

import childtuning
from kernels.training.labels import classify, confusion_scores, make_batch, tokenise_texts
from running import DATA, run

PAIRS = "sentence1\tsentence2\tlabel\trelatedness\n"
PAIRS += "".join(f"A {i}.\tB {i}.\t{'yes' if i % 2 else 'no'}\t{i / 2}\n" for i in range(6))
MOVES = 'I ran.,10\n"Oh, no.",9\nNo.,-1\n'
NAMED = '{"premise": "A", "hypothesis": "B", "gold": 1}\n{"premise": "C", "hypothesis": "D", "gold": 0}\n'


@pytest.mark.parametrize("name, content, flags, texts, answer, labels", [
    ("a.tsv", PAIRS, "", ("A 1.", "B 1."), "yes", ["no", "yes"]),
    ("a.tsv", PAIRS, "--label relatedness", ("A 1.", "B 1."), 0.5, []),
    ("a.tsv", PAIRS, "--text sentence2", ("B 1.",), "yes", ["no", "yes"]),
    ("a.tsv", PAIRS, "--label relatedness --task classification", ("A 1.", "B 1."), "0.5",
     "0.0 0.5 1.0 1.5 2.0 2.5".split()),
    ("a.csv", MOVES, "", ("Oh, no.",), "9", ["-1", "9", "10"]),
    ("a.csv", MOVES, "--task regression", ("Oh, no.",), 9.0, []),
    ("a.jsonl", NAMED, "", ("C", "D"), "0", ["0", "1"]),
    ("a.jsonl", '["A", "B", 1.0]\n["C", "D", 5]\n', "", ("C", "D"), 5.0, []),
    ("a.tsv", "label\tid\tsentence\ny\t1\tA\nx\t2\tB\n", "", ("B",), "x", ["x", "y"])])
def test_columns_and_tasks(tmp_path, name, content, flags, texts, answer, labels):
    (tmp_path / name).write_text(content)
    flags = ["--data", str(tmp_path / name), "--batch-size", "2", *flags.split()]
    args = childtuning.make_parser().parse_args(flags)
    found, label = childtuning.load_data(tmp_path / name, args)[1]
    task = ("classification", "accuracy") if labels else ("regression", "spearman")
    assert (found, args.labels, args.task, args.metric) == (texts, labels, *task)
    assert (labels[label] if labels else label) == answer


@pytest.mark.parametrize("labels, n", [(["0", "1"], 40), (["no", "yes"], 40), (["a", "b", "c", "d"], 60)])
def test_confusion_scores(labels, n):
    """d occurs nowhere and has no part in the mean; Matthews' is a correlation of one-hot rows."""
    rng = np.random.default_rng(0)
    truth, said = rng.integers(0, min(len(labels), 3), (2, n))
    said[: n // 2] = truth[: n // 2]
    f1 = []
    for c in range(min(len(labels), 3)):
        hits = sum((truth == c) & (said == c))
        f1.append(2 * hits / (sum(truth == c) + sum(said == c)))
    one, two = (np.eye(len(labels))[x] - np.eye(len(labels))[x].mean(0) for x in (truth, said))
    scores = confusion_scores(truth, said, labels)
    assert scores["accuracy"] == pytest.approx((truth == said).mean())
    assert scores["matthews"] == pytest.approx((one * two).sum() / math.sqrt((one**2).sum() * (two**2).sum()))
    assert scores["f1"] == pytest.approx(f1[1] if labels == ["0", "1"] else np.mean(f1))


def test_matthews_by_hand():
    """6 true positives, 3 true negatives, 1 false positive, 2 false negatives; a constant answer has 0."""
    truth, said = np.repeat([1, 0, 0, 1], [6, 3, 1, 2]), np.repeat([1, 0, 1, 0], [6, 3, 1, 2])
    wanted = (6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5)
    assert confusion_scores(truth, said, ["0", "1"])["matthews"] == pytest.approx(wanted)
    assert confusion_scores(truth, np.ones(12, int), ["0", "1"])["matthews"] == 0


BERT = dict(vocab_size=120, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
T5 = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, eos_token_id=3, decoder_start_token_id=0)
KINDS = {"distilbert": dict(vocab_size=120, dim=16, n_layers=1, n_heads=2, hidden_dim=32),
         "roberta": dict(**BERT, type_vocab_size=2, pad_token_id=0),
         "electra": dict(**BERT, embedding_size=16),
         "gpt2": dict(vocab_size=120, n_embd=16, n_layer=1, n_head=2),
         "xlnet": dict(vocab_size=120, d_model=16, n_layer=1, n_head=2, d_inner=32),
         "t5": dict(vocab_size=120, pad_token_id=0, **T5)}


@pytest.mark.parametrize("kind", KINDS)
def test_any_classifier_is_tuned_saved_and_padded_on_its_own_side(kind, tmp_path):
    """Logits of a padded batch are those of its rows alone; XLNet reads its last token, so it pads left. The
    folder gives them too."""
    letters = "abcdefghijklmnopqrstuvwxyzøşłé.,'\"!?"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    AutoModel.from_config(AutoConfig.for_model(kind, **KINDS[kind])).save_pretrained(tmp_path / "model")
    BertTokenizer({piece: i for i, piece in enumerate(pieces)}, model_max_length=200,
                  padding_side="left" if kind == "xlnet" else "right").save_pretrained(tmp_path / "model")
    data = ["--data", DATA / "topics.tsv", "--dev", DATA / "topics_dev.tsv", "--fisher-samples", 8]
    result = run("childtuning", tmp_path / "out", *data, "--model", tmp_path / "model", "--steps", 2)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    loaded.tokenizer, loaded.bf16 = result.model.tokenizer, False
    texts = [("No.", "Yes."), ("She sang a very long song.", "So?"), ("He ran away", "He left the town")]
    for width in (1, 2):
        rows, cut = tokenise_texts([(text[:width], 2) for text in texts], result.model, 20)
        assert cut == width and max(len(row["input_ids"]) for row, _ in rows) == 20
        inputs, labels = make_batch(rows, result.model)
        assert labels.tolist() == [2, 2, 2] and inputs["input_ids"].shape == (3, 20)
        with torch.no_grad():
            together = classify(result.model.eval(), inputs)
            for model in (result.model, loaded.eval()):
                alone = torch.cat([classify(model, make_batch([row], model)[0]) for row in rows])
                torch.testing.assert_close(alone, together, atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", ["classification", "pairs", "regression"])
def test_pipeline_loads_the_folder(task, tmp_path, bert):
    """By the line that was printed; scores are those of our own evaluation, labels the file's."""
    lines = (DATA / ("topics.tsv" if task == "classification" else "sts.tsv")).read_text().splitlines()[:41]
    head, *rows = [line.split("\t") for line in lines]
    if task == "pairs":
        head = ["sentence1", "sentence2", "label"]
        rows = [[a, b, "close" if float(score) > 3 else "far"] for a, b, score, _ in rows]
    data = tmp_path / "data.tsv"
    data.write_text("\n".join("\t".join(row) for row in [head, *rows]))
    flags = ["--model", bert, "--data", data, "--dev", data, "--steps", 12, "--lr", 1e-3, "--mode", "F"]
    result = run("childtuning", tmp_path / "out", *flags, "--max-length", 512)
    texts = [dict(zip(("text", "text_pair"), row[: 1 if task == "classification" else 2])) for row in rows]
    plain = "none" if task == "regression" else None
    found = eval(result.said["load"], {"pipeline": pipeline})(texts, function_to_apply=plain)
    if task == "regression":
        scores, wanted = [one["score"] for one in found], [float(row[2]) for row in rows]
        pearson = 100 * np.corrcoef(scores, wanted)[0, 1]
        assert pearson == pytest.approx(result.steps[-1]["dev_pearson"], abs=1e-3)
        assert result.model.config.problem_type == "regression"
    else:
        right = np.mean([one["label"] == row[-1] for one, row in zip(found, rows)])
        assert 100 * right == pytest.approx(result.steps[-1]["dev_accuracy"])
        config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
        assert config.id2label == dict(enumerate(sorted({row[-1] for row in rows})))
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["truncation"] is None
