"""Test classifiers: columns of labelled texts, tasks, metrics, and loading a saved model in transformers."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertTokenizer, pipeline

from childtuning import load_data, make_parser
from finetune import classify_with_features
from kernels.training.errors import UserError
from kernels.training.text.classifier import (
    classification_metrics,
    classify,
    load_model,
    make_batch,
    tokenise_texts,
)
from running import DATA, run

PAIRS = "sentence1\tsentence2\tlabel\trelatedness\n"
PAIRS += "".join(f"A {i}.\tB {i}.\t{'yes' if i % 2 else 'no'}\t{i / 2}\n" for i in range(6))
MOVES = 'I ran.,10\n"Oh, no.",9\nNo.,-1\n'
NAMED = '{"premise": "A", "hypothesis": "B", "gold": 1}\n{"premise": "C", "hypothesis": "D", "gold": 0}\n'


@pytest.mark.parametrize("kind, content, flags, texts, answer, labels", [
    ("tsv", PAIRS, "", ("A 1.", "B 1."), "yes", "no yes"),
    ("tsv", PAIRS, "--columns sentence1 sentence2 relatedness", ("A 1.", "B 1."), 0.5, ""),
    ("csv", MOVES, "", ("Oh, no.",), "9", "-1 9 10"),
    ("jsonl", NAMED, "", ("C", "D"), "0", "0 1")])
def test_columns_and_tasks(tmp_path, kind, content, flags, texts, answer, labels):
    """Columns are found by their names; without known names, the last column has the labels. If some of the
    labels have a decimal point, the task is regression."""
    data = tmp_path / f"a.{kind}"
    data.write_text(content)
    args = make_parser().parse_args(["--data", str(data), "--batch-size", "2", *flags.split()])
    found, label = load_data(data, args)[1]
    task = "classification" if labels else "regression"
    assert (found, args.labels, args.task) == (texts, labels.split(), task)
    assert (args.labels[label] if labels else label) == answer


@pytest.mark.parametrize("lines, labels", [
    (["review,sentiment", "A good film.,good", "So so.,bad"], "bad good"),     # the header has single words
    (["word,kind", "cat,animal", "oak,plant", "elm,plant", "dog,animal"], "animal plant"),
    (["The text,The label", "A film.,good", "So so.,bad", "Fine.,good", "No.,bad"], "bad good"),
    (["text,stars", "A film.,3", "So so.,1"], "1 3"),
    (["A film.,a class", "So so.,b", "Fine.,c"], "a class b c"),               # no header: each label once
    (["Great,good", "So so.,bad", "Fine.,good"], "bad good"),                  # no header: a known label
    (["A film.,caf\u00e9", "So so.,cafe\u0301", "Fine.,tea"], "caf\u00e9 tea")])
def test_headers_and_spellings(lines, labels, tmp_path, capsys):
    """A first row with a label that no other row has is a header. Header and names of columns are shown."""
    (tmp_path / "a.csv").write_text("\n".join(lines))
    args = make_parser().parse_args(["--data", str(tmp_path / "a.csv"), "--batch-size", "2"])
    is_header = len(load_data(args.data, args)) < len(lines)
    assert " ".join(args.labels) == labels and is_header == (lines[0][:4] in ("revi", "word", "The ", "text"))
    header = f"(after the header {lines[0].replace(',', ', ')})"
    shown, column = capsys.readouterr().out, lines[0].split(",")[1] if is_header else 2
    assert (header in shown) == is_header and " texts from" in shown and f'  label {column} "' in shown


def test_data_without_a_header_and_dev_with_one(tmp_path):
    """Each file without a header is read by position, each file with a header by its names."""
    args = make_parser().parse_args(["--data", str(tmp_path / "a.csv"), "--batch-size", "2"])
    for name, text in (("a", "A.,B.,0\nC.,D.,1\n"), ("b", "sentence,label\nA.,1\n"),
                       ("c", "sentence2,id,label,sentence1\nB.,x,1,A.\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    assert load_data(tmp_path / "a.csv", args)[0] == (("A.", "B."), 0)
    with pytest.raises(UserError, match="found the columns sentence, label; expected .*as in --data"):
        load_data(tmp_path / "b.csv", args)
    assert load_data(tmp_path / "c.csv", args) == [(("A.", "B."), 1)]


def test_dev_has_the_columns_of_data(tmp_path):
    """The names of the columns of --data are looked for in --dev, in any order."""
    args = make_parser().parse_args(["--data", str(tmp_path / "a.csv"), "--batch-size", "2"])
    for name, text in ("a", "review,mood\nA.,good\nB.,bad\n"), ("b", "mood,x,review\ngood,y,C.\n"):
        (tmp_path / f"{name}.csv").write_text(text)
    load_data(tmp_path / "a.csv", args)
    assert load_data(tmp_path / "b.csv", args) == [(("C.",), 1)]
    (tmp_path / "b.csv").write_text("A.,B.,C.,x\nD.,E.,F.,y\n")
    args = make_parser().parse_args(["--data", str(tmp_path / "b.csv"), "--columns", *"1234"])
    with pytest.raises(UserError, match="expected 1 or 2 text columns"):
        load_data(args.data, args)


@pytest.mark.parametrize("labels, n", [("01", 40), (["no", "yes"], 40), ("abcd", 60)])
def test_classification_metrics(labels, n):
    """Label d never occurs and does not count in the mean F1. The Matthews correlation equals the correlation
    of one-hot rows; it is 0 if all predictions are equal."""
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, min(len(labels), 3), (2, n))
    predicted[: n // 2] = truth[: n // 2]
    f1 = [2 * sum((truth == c) & (predicted == c)) / (sum(truth == c) + sum(predicted == c))
          for c in np.unique(truth)]
    one, two = (np.eye(len(labels))[x] - np.eye(len(labels))[x].mean(0) for x in (truth, predicted))
    scores = classification_metrics(truth, predicted, list(labels))
    assert scores["accuracy"] == pytest.approx((truth == predicted).mean())
    assert scores["matthews"] == pytest.approx((one * two).sum() / np.sqrt((one**2).sum() * (two**2).sum()))
    assert scores["f1"] == pytest.approx(f1[1] if labels == "01" else np.mean(f1))
    assert classification_metrics(truth, truth * 0, labels)["matthews"] == 0


def test_a_trained_head_keeps_the_order_of_its_labels(tmp_path, bert, capsys):
    """If the labels of the data have other names, the names of the head's labels are printed."""
    BertTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(bert, id2label={0: "yes", 1: "no", 2: "maybe"})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    for labels, order, shown in (("no maybe yes", "yes no maybe", False), ("a b c", "a b c", True)):
        (tmp_path / "a.tsv").write_text("".join(f"A.\t{label}\n" for label in 2 * labels.split()))
        flags = ["--data", tmp_path / "a.tsv", "--model", tmp_path, "--batch-size", 2, "--max-length", 9]
        args = make_parser().parse_args([*map(str, flags)])
        assert [args.labels[label] for _, label in load_data(args.data, args)] == 2 * labels.split()
        assert args.labels == order.split()
        load_model(args, SimpleNamespace(bf16=False, device="cpu"))
        assert ("trained classifier, whose labels were yes, no, maybe" in capsys.readouterr().out) == shown


SHAPE = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.5)
KINDS = {"bert": dict(intermediate_size=32), "distilbert": dict(hidden_dim=32), "gpt2": {},
         "xlnet": dict(d_head=8, d_inner=32)}


@pytest.mark.parametrize("kind, task", [
    ("bert", "pairs"), ("distilbert", "regression"), ("gpt2", "texts"), ("xlnet", "pairs")])
def test_models_are_fine_tuned_and_loaded_by_pipeline(kind, task, tmp_path, bert):
    """The printed code loads the model as a pipeline. Its logits of single rows equal ours of a padded batch.
    XLNet reads the last token, so its padding is on the left. The pipeline has the file's labels, and its
    score equals ours. The last linear layer maps features of classify_with_features to logits."""
    tokenizer = BertTokenizer.from_pretrained(bert, padding_side="left" if kind == "xlnet" else "right")
    tokenizer.save_pretrained(tmp_path / "model")
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SHAPE, **KINDS[kind])
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    rows = [line.split("\t")[:3] for line in (DATA / "sts.tsv").read_text().splitlines()[1:31]]
    texts = [(one,) if task == "texts" else (one, two) for one, two, _ in rows]
    answers = [score if task == "regression" else f"about {float(score):.0f}" for *_, score in rows]
    data = tmp_path / "data.tsv"
    data.write_text("\n".join("\t".join((*text, answer)) for text, answer in zip(texts, answers)))
    flags = ["--data", data, "--dev", data, "--model", tmp_path / "model", "--max-length", 300, "--mode", "F"]
    result = run("childtuning", tmp_path / "out", *flags, "--steps", 2, "--batch-size", 8)
    tokens = tokenise_texts([(text, 2) for text in texts], result.model, 300)
    inputs, labels = make_batch(tokens, result.model)
    with torch.no_grad():
        ours = classify(result.model.eval(), inputs)
        logits, vectors = classify_with_features(result.model, inputs)
        last = [part for part in result.model.modules() if isinstance(part, torch.nn.Linear)][-1]
        torch.testing.assert_close((logits, last(vectors)), (ours, ours), atol=1e-5, rtol=1e-5)
    assert labels.tolist() == [2] * 30
    theirs = eval(result.said["load"], {"pipeline": pipeline})
    asked = [dict(zip(("text", "text_pair"), text)) for text in texts]
    found = [{label["label"]: label["score"] for label in row}
             for row in theirs(asked, function_to_apply="none", top_k=None)]
    names = sorted(set(answers)) if task != "regression" else ["LABEL_0"]
    found = torch.tensor([[row[name] for name in names] for row in found])
    torch.testing.assert_close(found, ours, atol=1e-4, rtol=0)
    if task == "regression":
        metric, score = "dev_pearson", np.corrcoef(found[:, 0], np.array(answers, float))[0, 1]
    else:
        predicted = [names[i] for i in found.argmax(1)]
        metric, score = "dev_accuracy", np.mean([one == other for one, other in zip(predicted, answers)])
    assert result.steps[-1][metric] == pytest.approx(100 * score, abs=1e-2)
