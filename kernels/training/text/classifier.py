"""A text classifier: labelled rows of one or two texts, their tokens and batches, the task's loss, scores."""
import math
import re
from collections import Counter
from inspect import signature

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from kernels import check_rows, checks

from ..cli import fail, say
from ..output_dir import model_card, new_files, save_tokenizer
from ..pretrained import blaming
from ..progress import progress
from ..run import Run
from ..tables import empty_cell
from .labelled import find_columns
from .models import load_text_model, longest_input
from .sts import spearman
from .tokens import letters_of, portions

NUMBER, WHOLE = r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d\d?)?", r"-?\d{1,18}"


def read_labelled(path, args):
    """[(place in the file, texts, label)], all texts; an empty cell is an error."""
    table, texts, label = find_columns(path, args)
    rows = [(place, tuple(cells[i] for i in texts), cells[label].strip()) for place, cells in table]
    for place, sentences, answer in rows:
        if fault := empty_cell((*sentences, answer)):
            fail(f"{path} {place}: {fault}")
    return rows


def decide_task(labels, args):
    """Set args.task, unless given, and args.labels, the sorted classes ([] in regression), by the labels of
    the training data: numbers with a point are regression."""
    if args.task is None:
        numbers = all(re.fullmatch(NUMBER, label) for label in labels)
        has_point = any("." in label for label in labels)
        args.task = "regression" if numbers and has_point else "classification"
    args.labels = []
    if args.task == "classification":
        by_value = all(re.fullmatch(WHOLE, label) for label in labels)
        args.labels = sorted(set(labels), key=(lambda label: (int(label), label)) if by_value else None)


def number_labels(rows, path, args):
    """[(texts, label)] of read_labelled's rows: the label's place in args.labels, or its number."""
    counts = Counter(answer for *_, answer in rows)
    if args.task == "regression":
        values = {text: float(text) for text in counts if re.fullmatch(NUMBER, text)}
        values = {text: x for text, x in values.items() if abs(x) < 1e18}
        wanted = "a number below 1e18"
    else:
        values = {answer: i for i, answer in enumerate(args.labels)}
        wanted = f"one of {args.data or args.model}, which are {', '.join(args.labels)}"[:300]
    for place, _, answer in rows:
        if answer not in values:
            fail(f"{path} {place}: label {answer[:40]!r}, wanted {wanted}")
    usual, kind = max(counts, key=counts.get), "pairs" if len(rows[0][1]) == 2 else "texts"
    say("data", f"{args.task}: {len(rows):,} {kind} from {path}, {len(counts)} labels, "
                f"{100 * counts[usual] / len(rows):.1f} % {usual}")
    return [(sentences, values[answer]) for _, sentences, answer in rows]


def tokenise_texts(rows, model, longest):
    """([({name: int32 (L,)}, label)], how many were cut): one text or two, with special tokens and without
    padding."""
    done, cut = [], 0
    takes = set(model.tokenizer.model_input_names) & set(signature(model.forward).parameters)
    names = [name for name in ("input_ids", "token_type_ids") if name in takes]
    bar = progress(rows, "tokenising", " rows")
    for part in portions(bar, lambda row: letters_of(row[0])):
        texts, labels = zip(*part)
        encoded = model.tokenizer(*map(list, zip(*texts)), truncation=True, max_length=longest)
        done += [({name: np.array(encoded[name][i], np.int32) for name in names}, label)
                 for i, label in enumerate(labels)]
        cut += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
        del encoded                                            # before there are others
    return done, cut


def tokenise_data(data, model, longest):
    """{name: rows} of tokens from {name: [(texts, label)]}; "train" is among them."""
    parts = {name: tokenise_texts(rows, model, longest) for name, rows in data.items()}
    cut = parts["train"][1]
    say("data", f"{cut:,} of {len(data['train']):,} training rows cut to {longest} tokens")
    return {name: rows for name, (rows, _) in parts.items()}


def make_batch(rows, model):
    """({name: (n, L)}, labels (n,)): the inputs of the rows, padded to the longest, on the device."""
    columns = {name: [row[name] for row, _ in rows] for name in rows[0][0]}
    inputs = model.tokenizer.pad(columns, return_tensors="pt")
    labels = torch.tensor([label for _, label in rows], device=model.device)
    return {name: x.to(model.device) for name, x in inputs.items()}, labels


def classify(model, inputs):
    """(n, labels) float32 logits: one path for training, Fisher information and evaluation."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
        return model(**inputs).logits.float()


def task_loss(logits, labels):
    """Mean cross entropy of logits (N, C), int64 labels (N,), or squared error of (N, 1) and float (N,)."""
    checks.check_dense("labels", labels)
    regression = torch.is_tensor(labels) and labels.dtype in checks.FLOATS
    sizes = {"C": 1} if regression else {}
    check_rows(logits=(logits, "N C"), labels=(labels, "N", float if regression else int), **sizes)
    checks.check_index("labels", labels, logits.shape[1], -100)
    return F.mse_loss(logits[:, 0], labels) if regression else F.cross_entropy(logits, labels.long())


def try_out(name, step):
    """Call step(), which returns (loss of the first row, ...): a model that cannot read it ends the run in
    one line, before --out is begun."""
    with blaming(f"--model {name}"):                           # X-MOD wants a language
        loss, _ = step()
    if not loss.isfinite():
        fail(f"--model {name}: the loss of the first row is {loss.item()}; wanted a checkpoint of a training "
             "that went well")


def confusion_scores(truth, said, labels):
    """{"accuracy", "f1", "matthews"} of label numbers (n,), from 0 to 1 or −1 to 1.

    f1 is that of label 1 where labels are 0 and 1, else the mean over labels that occur. matthews is the
    correlation of truth and said for any number of labels (R_K, Gorodkin 2004), 0 where one side is constant.
    """
    table = np.zeros((len(labels), len(labels)))
    np.add.at(table, (truth, said), 1)
    right, true, found, n = table.diagonal(), table.sum(1), table.sum(0), table.sum()
    f1 = 2 * right / np.maximum(true + found, 1)
    spread = math.sqrt((n * n - true @ true) * (n * n - found @ found))
    return {"accuracy": right.sum() / n,
            "f1": f1[1] if list(labels) == ["0", "1"] else f1[true + found > 0].mean(),
            "matthews": (n * right.sum() - true @ found) / spread if spread else 0.0}


@torch.no_grad()
def forward_rows(model, rows, forward):
    """What forward(model, inputs) gives, a tuple of tensors, of all rows, in their order, without dropout."""
    model.eval()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]["input_ids"]))           # little padding
    starts = progress(range(0, len(rows), 128), "evaluating", " batches")
    parts = ([rows[i] for i in order[start : start + 128]] for start in starts)
    found = zip(*(forward(model, make_batch(part, model)[0]) for part in parts))
    found = [torch.cat(x).cpu() for x in found]
    model.train()
    return [torch.empty_like(x).index_copy_(0, torch.tensor(order), x) for x in found]


def predict(model, rows):
    """(n, labels) float32 logits of the rows."""
    return forward_rows(model, rows, lambda *x: (classify(*x),))[0]


def evaluate(model, rows, args):
    """{metric: 100 times its value}: accuracy, F1 and Matthews' correlation, in regression Spearman's and
    Pearson's."""
    logits, truth = predict(model, rows), np.array([label for _, label in rows])
    if args.task == "classification":
        scores = confusion_scores(truth, logits.argmax(1).numpy(), args.labels)
    else:
        said = logits[:, 0].double().numpy()
        constant = min(np.ptp(truth), np.ptp(said)) == 0
        scores = {"spearman": spearman(truth, said),
                  "pearson": 0.0 if constant else np.corrcoef(truth, said)[0, 1]}
    return {metric: 100 * float(score) for metric, score in scores.items()}


def describe_scores(scores, labels=()):
    """"accuracy 12.50, macro f1 2.78": the scores of one run."""
    return ", ".join(f"{metric_name(metric, labels)} {score:.2f}" for metric, score in scores.items())


def metric_name(metric, labels=()):
    """A metric as it is printed: which f1 it is depends on the labels, see confusion_scores."""
    if metric != "f1":
        return metric
    return "f1 of label 1" if list(labels) == ["0", "1"] else "macro f1"


def score(args, script, load_data):
    """--evaluate: the scores of a trained classifier, which knows its labels."""
    run, path = Run(args, script), args.dev or args.data
    model, tokenizer = load_text_model(args.model, None, AutoModelForSequenceClassification)
    if model.missing:
        fail(f"--model {args.model}: no classifier, {min(model.missing)} is missing; train it first")
    config, model.tokenizer, model.bf16 = model.config, tokenizer, run.bf16
    regression = config.problem_type == "regression" or config.num_labels == 1
    args.task = "regression" if regression else "classification"
    args.labels = [] if regression else [config.id2label[i] for i in range(config.num_labels)]
    longest = min(args.max_length, longest_input(model.base_model, tokenizer))
    model.to(run.device)
    data = {"dev": load_data(path, args) if path else [], "train": []}
    if args.contrast_set or args.ood:
        from ..extras import held_out
        data |= held_out.load_more(args, load_data)
        if args.ood and args.data:
            data["train"] = load_data(args.data, args)
    data = {name: tokenise_texts(rows, model, longest)[0] for name, rows in data.items()}
    if path:
        say("test", f"{describe_scores(evaluate(model, data['dev'], args), args.labels)}  {path}")
    if args.contrast_set or args.ood:
        if args.ood and not args.data:
            say("note", "--ood: local outlier factor and Mahalanobis want the training rows, in --data")
        held_out.say_more(held_out.more_scores(model, data), "test", args.contrast_set)


def save(model, args, run):
    """Write the classifier, as transformers reads it, and its README.md into --out."""
    if run.rank:
        return
    with new_files(run) as aside:
        model.save_pretrained(aside)
        save_tokenizer(model.tokenizer, aside)
        write_card(aside, args, run)


def write_card(folder, args, run):
    """README.md of a classifier that a run with these args trained, for the run's --out."""
    text = f"{args.task.capitalize()} of text, mode {args.mode}. "
    text += 'A pair is {"text": ..., "text_pair": ...}.'
    card = model_card(run, "text-classification", ["transformers"], text, load_line(run))
    (folder / "README.md").write_text(card, encoding="utf-8")


def finish(run, args, scores, skipped):
    """End a run: say what the model in --out, trained with these args, scores, and how to load it."""
    text = ""
    if args.dev:
        metric = metric_name(args.metric, args.labels)
        text = f"{metric} {scores[args.metric]:.2f} of mode {args.mode}, seed {args.seed}, "
    if skipped:
        text += f"{skipped} steps skipped, "
    run.done(text)
    say("load", load_line(run))


def load_line(run):
    """How others load the folder."""
    return f'pipeline("text-classification", "{run.args.out}")'
