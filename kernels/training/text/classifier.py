"""Text classification and regression: labelled rows of one or two texts, their tokens, loss and metrics."""
import math
import re
from collections import Counter
from inspect import signature

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from kernels import check_rows, checks

from .. import out
from ..data import NUMBER, empty_cell, join_names, normalise_name, read_table, show_cells
from ..errors import fail, log
from ..out import atomic_output, save_tokenizer
from ..progress import progress
from ..run import Run
from .models import load_text_model, longest_input
from .sts import spearman
from .tokens import count_characters, text_batches

INTEGER = r"-?\d{1,18}"


def find_columns(path, args):
    """Return (table, indices of the text columns, index of the label column) of a file.

    Without --text-columns and --label-column the columns are found by their names (sentence, sentence1,
    sentence2; label, score), or else the last one has the labels. The names are stored in args, so that the
    next file, such as --dev, must have the same columns.
    """
    asked = [*(args.text_columns or [])]
    if args.label_column:
        asked.append(args.label_column)
    header, table, _ = read_table_with_names(path, asked)
    names = [normalise_name(name) for name in header]
    usual = next((name for name in ("label", "score") if name in names), names[-1])
    label = normalise_name(args.label_column or usual)
    others = [name for name in names if name not in (label, "")]
    texts = [name for name in ("sentence", "sentence1", "sentence2") if name in others] or others
    texts = [normalise_name(name) for name in args.text_columns or texts]
    if not {label, *texts} <= set(names) or label in texts or len(texts) not in (1, 2):
        fail(f"{path}: columns {join_names(header)}; expected one or two of text (now {join_names(texts)}) "
             f"and one of labels (now {label[:40]}); name them by --text-columns and --label-column")
    indices = [names.index(name) for name in texts]
    if not args.text_columns:
        cells = next(iter(table))[1]
        places = [*indices, names.index(label)]
        log("first", show_cells([*["text"] * len(indices), "label"], [cells[i] for i in places]))
    args.text_columns = [header[i] for i in indices]
    args.label_column = header[names.index(label)]
    return table, indices, names.index(label)


def read_table_with_names(path, names):
    """Return (column names, table, whether it has a header) of a file. `names` are names to look for in a
    header, see data.Table; without a header the columns are called "column 1", "column 2", ..."""
    header, table = read_table(path, names=names)
    return header or [f"column {i + 1}" for i in range(len(next(iter(table))[1]))], table, bool(header)


def read_labelled(path, args):
    """Return [(place in the file, texts, label)], all of them strings. Raise UserError if a cell is empty."""
    table, texts, label = find_columns(path, args)
    rows = [(place, tuple(cells[i] for i in texts), cells[label].strip()) for place, cells in table]
    for place, sentences, answer in rows:
        if fault := empty_cell((*sentences, answer)):
            fail(f"{path} {place}: {fault}")
    return rows


def infer_task(labels, args):
    """Set args.task and args.labels from the labels of the training data, which are strings.

    The task, unless it is given, is regression if all labels are numbers and one has a decimal point.
    args.labels becomes the sorted classes; [] for regression.
    """
    if args.task is None:
        numbers = all(re.fullmatch(NUMBER, label) for label in labels)
        has_point = any("." in label for label in labels)
        args.task = "regression" if numbers and has_point else "classification"
    args.labels = []
    if args.task == "classification":
        by_value = all(re.fullmatch(INTEGER, label) for label in labels)
        args.labels = sorted(set(labels), key=(lambda label: (int(label), label)) if by_value else None)


def encode_labels(rows, path, args):
    """Return read_labelled's rows as [(texts, label)], and print a summary. The new label is its index in
    args.labels for classification, its value for regression."""
    counts = Counter(answer for *_, answer in rows)
    if args.task == "regression":
        values, wanted = {text: float(text) for text in counts if re.fullmatch(NUMBER, text)}, "a number"
    else:
        values = {answer: i for i, answer in enumerate(args.labels)}
        wanted = f"one of the labels of {args.data or args.model}: {', '.join(args.labels)}"[:300]
    for place, _, answer in rows:
        if answer not in values:
            fail(f"{path} {place}: label {answer[:40]!r}, expected {wanted}")
    commonest, kind = max(counts, key=counts.get), "pairs" if len(rows[0][1]) == 2 else "texts"
    log("data", f"{args.task}: {len(rows):,} {kind} from {path}, {len(counts)} labels, "
                f"{100 * counts[commonest] / len(rows):.1f} % {commonest}")
    return [(sentences, values[answer]) for _, sentences, answer in rows]


def tokenise_texts(rows, model, max_length):
    """Tokenise rows [(texts, label)] of one or two texts, with special tokens and without padding.

    max_length  truncate rows to this many tokens
    returns     ([({input name: int32 (L,)}, label)], number of truncated rows)
    """
    done, cut = [], 0
    accepted = set(model.tokenizer.model_input_names) & set(signature(model.forward).parameters)
    names = [name for name in ("input_ids", "token_type_ids") if name in accepted]
    bar = progress(rows, "tokenising", " rows")
    for part in text_batches(bar, lambda row: count_characters(row[0])):
        texts, labels = zip(*part)
        encoded = model.tokenizer(*map(list, zip(*texts)), truncation=True, max_length=max_length)
        done += [({name: np.array(encoded[name][i], np.int32) for name in names}, label)
                 for i, label in enumerate(labels)]
        cut += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
        del encoded                            # frees its memory before the next part is tokenised
    return done, cut


def tokenise_data(data, model, max_length):
    """Tokenise {name: [(texts, label)]} to {name: rows}. Print how many rows of "train" are truncated."""
    parts = {name: tokenise_texts(rows, model, max_length) for name, rows in data.items()}
    cut = parts["train"][1]
    log("data", f"{cut:,} of {len(data['train']):,} training rows truncated to {max_length} tokens")
    return {name: rows for name, (rows, _) in parts.items()}


def make_batch(rows, model):
    """Return ({input name: (n, L)}, labels (n,)) on the model's device, padded to the longest row."""
    columns = {name: [row[name] for row, _ in rows] for name in rows[0][0]}
    inputs = model.tokenizer.pad(columns, return_tensors="pt")
    labels = torch.tensor([label for _, label in rows], device=model.device)
    return {name: x.to(model.device) for name, x in inputs.items()}, labels


def classify(model, inputs):
    """Return (n, labels) float32 logits, for training, Fisher information and evaluation alike."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        return model(**inputs).logits.float()


def task_loss(logits, labels):
    """Return the mean cross entropy of logits (N, C) and int64 labels (N,), or the mean squared error of
    logits (N, 1) and float labels (N,)."""
    checks.check_dense("labels", labels)
    regression = torch.is_tensor(labels) and labels.dtype in checks.FLOATS
    sizes = {"C": 1} if regression else {}
    check_rows(logits=(logits, "N C"), labels=(labels, "N", float if regression else int), **sizes)
    checks.check_index("labels", labels, logits.shape[1], -100)
    return F.mse_loss(logits[:, 0], labels) if regression else F.cross_entropy(logits, labels.long())


def classification_metrics(truth, predicted, labels):
    """Return {"accuracy", "f1", "matthews"} of label indices (n,), as fractions.

    f1 is that of label 1 if the labels are 0 and 1, else the mean over the labels that occur. matthews is the
    correlation R_K for any number of labels (Gorodkin 2004), 0 if truth or prediction is constant.
    """
    table = np.zeros((len(labels), len(labels)))
    np.add.at(table, (truth, predicted), 1)
    right, true, found, n = table.diagonal(), table.sum(1), table.sum(0), table.sum()
    f1 = 2 * right / np.maximum(true + found, 1)
    spread = math.sqrt((n * n - true @ true) * (n * n - found @ found))
    return {"accuracy": right.sum() / n,
            "f1": f1[1] if list(labels) == ["0", "1"] else f1[true + found > 0].mean(),
            "matthews": (n * right.sum() - true @ found) / spread if spread else 0.0}


@torch.no_grad()
def forward_rows(model, rows, forward):
    """Call forward(model, inputs) on batches of the rows in eval mode.

    forward     returns a tuple of tensors with one item per row
    returns     list of these tensors for all rows, in row order, on the CPU
    """
    model.eval()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]["input_ids"]))       # reduces padding
    starts = progress(range(0, len(rows), 128), "evaluating", " batches")
    parts = ([rows[i] for i in order[start : start + 128]] for start in starts)
    found = zip(*(forward(model, make_batch(part, model)[0]) for part in parts))
    found = [torch.cat(x).cpu() for x in found]
    model.train()
    return [torch.empty_like(x).index_copy_(0, torch.tensor(order), x) for x in found]


def predict(model, rows):
    """Return the (n, labels) float32 logits of the rows."""
    return forward_rows(model, rows, lambda *x: (classify(*x),))[0]


def evaluate(model, rows, args):
    """Return {metric: value times 100}: accuracy, F1 and Matthews correlation; for regression, Spearman and
    Pearson correlation."""
    logits, truth = predict(model, rows), np.array([label for _, label in rows])
    if args.task == "classification":
        scores = classification_metrics(truth, logits.argmax(1).numpy(), args.labels)
    else:
        predicted = logits[:, 0].double().numpy()
        constant = min(np.ptp(truth), np.ptp(predicted)) == 0
        scores = {"spearman": spearman(truth, predicted),
                  "pearson": 0.0 if constant else np.corrcoef(truth, predicted)[0, 1]}
    return {metric: 100 * float(score) for metric, score in scores.items()}


def describe_scores(scores, labels=()):
    """Return the scores of a run as text, such as "accuracy 12.50, macro f1 2.78"."""
    return ", ".join(f"{metric_name(metric, labels)} {score:.2f}" for metric, score in scores.items())


def metric_name(metric, labels=()):
    """Return the printed name of a metric. That of f1 depends on the labels, see classification_metrics."""
    if metric != "f1":
        return metric
    return "f1 of label 1" if list(labels) == ["0", "1"] else "macro f1"


def evaluate_model(args, script, load_data):
    """Run --evaluate: print the scores of a trained classifier. Its labels are read from its config."""
    run, path = Run(args, script), args.dev or args.data
    model, tokenizer = load_text_model(args.model, None, AutoModelForSequenceClassification)
    if model.missing:
        fail(f"--model {args.model}: {min(model.missing)} is missing, expected a classifier; train one first")
    config, model.tokenizer, model.bf16 = model.config, tokenizer, run.bf16
    regression = config.problem_type == "regression" or config.num_labels == 1
    args.task = "regression" if regression else "classification"
    args.labels = [] if regression else [config.id2label[i] for i in range(config.num_labels)]
    longest = min(args.max_length, longest_input(model.base_model, tokenizer))
    model.to(run.device)
    data = {"dev": load_data(path, args) if path else [], "train": []}
    if args.contrast_set or args.ood:
        from ..extras import extra_test_sets
        data |= extra_test_sets.load_extra_sets(args, load_data)
        if args.ood and args.data:
            data["train"] = load_data(args.data, args)
    data = {name: tokenise_texts(rows, model, longest)[0] for name, rows in data.items()}
    if path:
        log("test", f"{describe_scores(evaluate(model, data['dev'], args), args.labels)}  {path}")
    if args.contrast_set or args.ood:
        if args.ood and not args.data:
            log("note", "--ood: local outlier factor and Mahalanobis need the training rows, in --data")
        scores = extra_test_sets.score_extra_sets(model, data)
        extra_test_sets.log_extra_scores(scores, "test", args.contrast_set)


def save(model, args, run):
    """Write the classifier, in transformers' format, and its README.md into --out."""
    if run.rank:
        return
    with atomic_output(run) as aside:
        model.save_pretrained(aside)
        save_tokenizer(model.tokenizer, aside)
        write_card(aside, args, run)


def write_card(folder, args, run):
    """Write a classifier's README.md into `folder`; its example loads the model from the run's --out."""
    text = f"{args.task.capitalize()} of text, mode {args.mode}. "
    text += 'A pair is {"text": ..., "text_pair": ...}.'
    out.write_card(folder, run, "text-classification", ["transformers"], text, load_hint(run))


def finish_run(run, args, scores, skipped):
    """End the run: print the scores of the saved model, the number of skipped steps, and how to load it.
    `args` are the flags with which the saved model was trained."""
    text = ""
    if args.dev:
        metric = metric_name(args.metric, args.labels)
        text = f"{metric} {scores[args.metric]:.2f} of mode {args.mode}, seed {args.seed}, "
    if skipped:
        text += f"{skipped} steps skipped, "
    run.finish(text)
    log("load", load_hint(run))


def load_hint(run):
    """Return the Python expression that loads the saved folder."""
    return f'pipeline("text-classification", "{run.args.out}")'
