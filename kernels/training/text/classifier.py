"""Fine-tune classifiers and regression models of texts: flags, labelled data, model, loss, metrics, saving.
A row of the data has one or two texts and a label."""
import math
import re
from collections import Counter
from inspect import signature
from unicodedata import normalize

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from kernels import check_rows, checks

from ..data import (
    NUMBER,
    empty_cell,
    header_note,
    iter_texts,
    join_names,
    normalise_name,
    read_table,
    refuse_identifiers,
    show_cells,
)
from ..errors import fail, log
from ..flags import check_batch_size
from ..pretrained import read_json
from ..progress import progress
from ..run import Run
from .checkpoint import save_transformer
from .evaluation import pearson, spearman
from .models import load_text_model, longest_input

INTEGER = r"-?\d{1,18}"


def classifier_flags(parser):
    """Add the flags that all scripts for classifiers have."""
    add = parser.add_argument
    parser.add_shared("--columns", shown="sentence, or sentence1 and sentence2, or else all columns but the "
                                         "label; then label or score, or else the last column")
    add("--task", group="data", choices=("classification", "regression"),
        help="type of task; default inferred from the labels")
    parser.set_defaults(labels=None, widths=(2, 3))         # load_rows sets class names and number of columns


def load_rows(path, args):
    """Read a file and print a summary. Return [(tuple of one or two texts, label)]: a label is an index into
    args.labels or, in regression, a number. If args.labels is None, infer_task sets it from this file."""
    rows = [(place, tuple(texts), normalize("NFC", label.strip()))
            for place, (*texts, label) in find_columns(path, args)]
    for place, sentences, answer in rows:
        if fault := empty_cell((*sentences, answer)):
            fail(f"{path} {place}: {fault}")
    counts = Counter(answer for *_, answer in rows)
    if args.labels is None:
        infer_task(counts, path, args)
    if args.task == "regression":
        values = {text: float(text) for text in counts if re.fullmatch(NUMBER, text)}
        wanted = "a number"
    else:
        values = {normalize("NFC", answer): i for i, answer in enumerate(args.labels)}
        source = args.model if args.evaluate else args.data
        wanted = f"one of the labels of {source}: {', '.join(args.labels)}"[:300]
    for place, _, answer in rows:
        if answer not in values:
            fail(f"{path} {place}: label {answer[:40]!r}, expected {wanted}")
    commonest, kind = max(counts, key=counts.get), "texts" if args.widths == [2] else "pairs"
    log("data", f"{args.task}: {len(rows):,} {kind} from {path}, {len(counts)} labels, "
                f"{100 * counts[commonest] / len(rows):.1f} % {commonest}")
    return [(sentences, values[answer]) for _, sentences, answer in rows]


def infer_task(counts, path, args):
    """Set args.labels to the class names in `counts`, {training label: number of its rows}. If --model is a
    classifier of these classes, their order is that of its outputs, else they are sorted. In regression, set
    [] instead. Default of --task: regression if all labels are numbers, some of them with a decimal point."""
    if args.task is None:
        numbers = all(re.fullmatch(NUMBER, label) for label in counts)
        has_point = any("." in label for label in counts)
        args.task = "regression" if numbers and has_point else "classification"
    args.labels = []
    if args.task == "classification":
        by_value = all(re.fullmatch(INTEGER, label) for label in counts)
        args.labels = sorted(counts, key=(lambda label: (int(label), label)) if by_value else None)
        if {*saved_labels(args.model)} == {*args.labels}:
            args.labels = saved_labels(args.model)
        if len(counts) > max(20, counts.total() / 2):
            fail(f"{path}: {len(counts):,} different labels in {counts.total():,} rows; choose columns by "
                 "--columns, the labels last")
    if len(counts) == 1:
        fail(f"{path}: every label is {min(counts)!r}; expected at least two different labels")
    check_batch_size(counts.total(), path, args.batch_size, least=1)


def saved_labels(name):
    """Return the class names in the config of a model, in the order of its outputs; [] if there are none."""
    names = {} if name == "scratch" else read_json(name, "config.json").get("id2label", {})
    return [names[i] for i in sorted(names, key=int)]


def find_columns(path, args):
    """Return the table of a file, with one or two text columns, then the label column. Print its first row.
    Later files, such as --dev, must have the same number of columns and, with a header, the same names."""
    header, table = read_table(path, columns=args.columns)
    header = find_label_header(table, args) or header
    names = header or [str(1 + i) for i in range(table.width)]
    columns = args.columns or usual_columns(names)
    if len(columns) not in args.widths:
        fail(f"{path}: found the columns {join_names(columns)}; expected 1 or 2 text columns (as in --data), "
             "then 1 label column; choose these columns by --columns, by name or number")
    args.widths = [len(columns)]
    others = [name for name in names if "label" in normalise_name(name) and name != columns[-1]]
    if others and not args.columns:
        fail(f"{path}: the labels may be in {columns[-1]} or in {join_names(others)}; choose columns by "
             "--columns, the labels last")
    if not args.columns:
        args.columns, table.columns = columns if header else None, columns
        table.select_columns(names)
        refuse_identifiers(table, range(len(columns) - 1))
    roles = [*(f"text {name}" for name in columns[:-1]), f"label {columns[-1]}"]
    log("first", show_cells(roles, next(iter(table))[1]) + header_note(table))
    return table


def usual_columns(header):
    """Return the names of the text columns, then of the label column. Texts: sentence, else sentence1 and
    sentence2, else all columns but the label column. Labels: label, else score, else the last column."""
    names = [normalise_name(name) for name in header]
    label = next((name for name in ("label", "score") if name in names), names[-1])
    others = [name for name in names if name not in (label, "")]
    texts = [name for name in ("sentence", "sentence1", "sentence2") if name in others] or others
    return [header[names.index(name)] for name in (*texts, label)]


def find_label_header(table, args):
    """Return the first row of a .csv or .tsv if it is a header, else None. In a header, the last cell is no
    label, but all other rows end in labels: known from args.labels or, without it, repeated or numbers."""
    if table.header_row or table.kind not in (".csv", ".tsv"):
        return None
    row, *rows = (cells for _, cells in table)
    first, others = row[-1].strip(), Counter(cells[-1].strip() for cells in rows)
    if args.labels:
        are_labels = others.keys() <= set(args.labels)
    else:
        are_labels = all(times > 1 or re.fullmatch(NUMBER, label) for label, times in others.items())
    is_label = first in {*others, *(args.labels or ())} or re.fullmatch(NUMBER, first)
    return table.set_header(row) if others and are_labels and not is_label else None


def load_model(args, run):
    """Load --model and its tokenizer. Keep a trained head that has as many outputs, else make a new head."""
    torch.manual_seed(args.seed)                               # the seed decides the weights of a new head
    config = dict(problem_type="regression", num_labels=1)
    if args.labels:
        config = dict(problem_type="single_label_classification", id2label=dict(enumerate(args.labels)),
                      label2id={label: i for i, label in enumerate(args.labels)})
    auto = AutoModelForSequenceClassification
    model, tokenizer = load_text_model(args.model, iter_texts(args.data), auto, **config)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    longest = longest_input(model.base_model, tokenizer)
    if args.max_length > longest:
        fail(f"--max-length {args.max_length}: {args.model} reads at most {longest} tokens")
    model.tokenizer, model.bf16 = tokenizer, run.bf16
    head = "new" if model.missing or args.model == "scratch" else "trained"
    before = saved_labels(args.model) if head == "trained" and args.labels else args.labels
    renamed = f", whose labels were {join_names(before)}" if before != args.labels else ""
    log("model", f"{args.model}, {model.num_parameters() / 1e6:.1f} M parameters, {head} classifier{renamed}")
    return model.to(run.device).train()


def tokenise_texts(rows, model, max_length, training=False):
    """Tokenise rows [(texts, label)], truncated to max_length tokens. Return [({input name: int32 (L,)},
    label)], with special tokens and without padding. If `training`, print how many rows were truncated."""
    done, cut = [], 0
    accepted = set(model.tokenizer.model_input_names) & set(signature(model.forward).parameters)
    names = [name for name in ("input_ids", "token_type_ids") if name in accepted]
    for texts, label in progress(rows, "tokenising", " rows"):
        encoded = model.tokenizer(*texts, truncation=True, max_length=max_length)
        done.append(({name: np.array(encoded[name], np.int32) for name in names}, label))
        cut += bool(encoded.encodings[0].overflowing)
    if training:
        log("data", f"{cut:,} of {len(rows):,} training rows truncated to {max_length} tokens")
    return done


def make_batch(rows, model):
    """Pad n rows to the longest row. Return ({input name: (n, L)}, labels (n,)) on the model's device."""
    columns = {name: [row[name] for row, _ in rows] for name in rows[0][0]}
    inputs = model.tokenizer.pad(columns, return_tensors="pt")
    labels = torch.tensor([label for _, label in rows], device=model.device)
    return {name: x.to(model.device) for name, x in inputs.items()}, labels


def classify(model, inputs):
    """Run the model on the inputs of make_batch. Return float32 logits (n, number of labels)."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        return model(**inputs).logits.float()


def task_loss(logits, labels):
    """Return the mean cross entropy of logits (N, C) and int64 labels (N,), or the mean squared error of
    logits (N, 1) and float labels (N,)."""
    regression = torch.is_tensor(labels) and labels.dtype in checks.FLOATS
    sizes = {"C": 1} if regression else {}
    check_rows(logits=(logits, "N C"), labels=(labels, "N", float if regression else int), **sizes)
    checks.check_index("labels", labels, logits.shape[1], -100)
    return F.mse_loss(logits[:, 0], labels) if regression else F.cross_entropy(logits, labels.long())


def classification_metrics(truth, predicted, labels):
    """Return {"accuracy", "f1", "matthews"} (not in percent) of true and predicted label indices (n,).

    f1 is the F1 score of label 1 if the labels are 0 and 1, else the mean F1 score of the labels that occur.
    matthews is the correlation R_K (Gorodkin 2004); it is 0 if `truth` or `predicted` is constant.
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
    """Run forward(model, inputs) on all rows in eval mode. Return the outputs on the CPU, in row order."""
    model.eval()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]["input_ids"]))       # sorting saves padding
    found = []
    for start in progress(range(0, len(rows), 128), "evaluating", " batches"):
        inputs, _ = make_batch([rows[i] for i in order[start : start + 128]], model)
        found.append(forward(model, inputs))
    model.train()
    place = torch.tensor(order).argsort()                      # place of each row in `order`
    return [torch.cat(parts).cpu()[place] for parts in zip(*found)]


def evaluate(model, rows, args):
    """Score a model on tokenised rows. Return {metric: 100 · score}: accuracy, F1 and Matthews correlation,
    or in regression Spearman and Pearson correlation."""
    logits, = forward_rows(model, rows, lambda *inputs: (classify(*inputs),))
    truth = np.array([label for _, label in rows])
    if args.task == "classification":
        scores = classification_metrics(truth, logits.argmax(1).numpy(), args.labels)
    else:
        predicted = logits[:, 0].double().numpy()
        scores = {"spearman": spearman(truth, predicted), "pearson": pearson(truth, predicted)}
    return {metric: 100 * float(score) for metric, score in scores.items()}


def describe_scores(scores, labels=()):
    """Return scores as text, such as "accuracy 12.50, macro f1 2.78"."""
    names = {"f1": "f1 of label 1" if list(labels) == ["0", "1"] else "macro f1"}
    return ", ".join(f"{names.get(metric, metric)} {score:.2f}" for metric, score in scores.items())


def evaluate_and_save(model, rows, args, run):
    """Score the model on the rows of --dev, if given. Save the model, and replace the one saved before."""
    scores = evaluate(model, rows, args) if rows else {}
    run.should_save(scores)                                    # only records the scores: every model is saved
    if scores:
        log("dev", f"step {run.step:,}: {describe_scores(scores, args.labels)}")
    save_transformer(run, model, model.tokenizer)


def finish_run(run, args, text=""):
    """End the run. Print the scores of the saved model, `text`, and the code that loads this model."""
    scores = dict(run.extra_state["saved"])
    scores.pop("step")
    shown = f"{describe_scores(scores, args.labels)} on --dev, " if scores else ""
    run.finish(shown + text)
    log("load", f'pipeline("text-classification", "{args.out}")  # the model after the last step')


def evaluate_model(args, script):
    """Run --evaluate: print the scores of a trained classifier on --dev or, if only --data is given, on
    --data. Return (model, tokenised rows). Set args.task, args.labels and args.max_length from the model."""
    run, path = Run(args, script), args.dev or args.data
    model, tokenizer = load_text_model(args.model, None, AutoModelForSequenceClassification)
    if model.missing:
        fail(f"--model {args.model}: {min(model.missing)} is missing, expected a classifier; train one first")
    config, model.tokenizer, model.bf16 = model.config, tokenizer, run.bf16
    regression = config.problem_type == "regression" or config.num_labels == 1
    args.task = "regression" if regression else "classification"
    args.labels = [] if regression else [config.id2label[i] for i in range(config.num_labels)]
    args.max_length = min(args.max_length, longest_input(model.base_model, tokenizer))
    model.to(run.device)
    rows = tokenise_texts(load_rows(path, args), model, args.max_length) if path else []
    if rows:
        log("test", f"{describe_scores(evaluate(model, rows, args), args.labels)}  {path}")
    return model, rows
