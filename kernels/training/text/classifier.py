"""Labelled texts, one or two a row: their columns, tokens and batches; the scores of a classifier."""
import math
from inspect import signature

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from ..cli import fail, say
from ..extras import ood
from ..output_dir import model_card, new_files, save_tokenizer
from ..pretrained import blaming
from ..progress import progress
from ..run import Run
from ..tables import empty_cell, listed, plain
from .labelled import find_columns, read_named  # noqa: F401
from .models import load_text_model, longest_input
from .sts import spearman
from .tokens import letters_of, portions


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


def try_out(name, step):
    """step() of a row, which gives a loss first: what a model makes of it is told in one line, before --out
    is begun."""
    with blaming(f"--model {name}"):                           # X-MOD wants a language
        loss, _ = step()
    if not loss.isfinite():
        fail(f"--model {name}: the loss of the first row is {loss.item()}; wanted a checkpoint of a training "
             "that went well")


def mask_of(inputs):
    """(n, L), 0 for padding; FNet's tokenizer gives none."""
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))


def classify_vectors(model, inputs):
    """(n, labels) float32 logits, and (n, H) float32 vectors: what the last linear layer reads, in training
    behind the model's own dropout."""
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    linear, seen = [part for part in linear if part.out_features == model.config.num_labels], []
    if not linear:
        fail(f"{type(model).__name__} has no linear layer of {model.config.num_labels} labels, which reads a "
             "text's vector; take another --model")
    hook = linear[-1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        logits = classify(model, inputs)
    finally:
        hook.remove()
    if len(seen) != 1:
        fail(f"{type(model).__name__} does not read a text's vector by its last linear layer of "
             f"{model.config.num_labels} labels; take another --model", every_rank=True)
    vectors, = seen
    if vectors.dim() == 3:                                     # GPT-2's of all tokens: the last real one's
        last = (torch.arange(1, vectors.shape[1] + 1, device=model.device) * mask_of(inputs)).argmax(1)
        vectors = vectors[torch.arange(len(last), device=model.device), last]
    return logits, vectors.float()


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


def load_contrast_set(args, load_data):
    """[original rows, edited rows] of --contrast-set, row by row; without it []."""
    parts = [load_data(path, args) for path in args.contrast_set or []]
    if parts and (len(parts[0]) != len(parts[1]) or args.task == "regression"):
        original, edited = map(len, parts)
        fail(f"--contrast-set {' '.join(args.contrast_set)}: {args.task}, {original} and {edited} rows; "
             "wanted classification, and an edited text for each original, in the same order")
    return parts


def contrast_scores(model, original, edited):
    """{name: percent} of a contrast set (Gardner et al. 2020): the accuracy on original texts, that on edited
    ones, and consistency, the share of pairs with both answers right."""
    right = torch.stack([predict(model, rows).argmax(1) == torch.tensor([label for _, label in rows])
                         for rows in (original, edited)])
    parts = {"original": right[0], "edited": right[1], "consistency": right.all(0)}
    return {name: 100 * part.double().mean().item() for name, part in parts.items()}


def load_unseen(args):
    """[(texts, 0)] of --ood: what stands in the columns of text that --data has; without it []."""
    if args.ood is None:
        return []
    if not args.dev or args.task == "regression":
        fail(f"--ood {args.ood}: {args.task} with{'' if args.dev else 'out'} --dev; wanted classification, "
             "and texts of known classes by --dev")
    header, table, named = read_named(args.ood, args.text)
    names, wanted = [plain(name) for name in header], [plain(name) for name in args.text]
    if not named and len(names) == len(wanted):                # texts alone
        names = wanted
    if not set(wanted) <= set(names):
        fail(f"{args.ood}: columns {listed(header)}; wanted those of {args.data or args.dev}, "
             f"{listed(args.text)}")
    rows = [(place, tuple(cells[names.index(name)] for name in wanted)) for place, cells in table]
    for place, texts in rows:
        if fault := empty_cell(texts):
            fail(f"{args.ood} {place}: {fault}")
    say("data", f"{len(rows):,} texts of no known class from {args.ood}")
    return [(texts, 0) for _, texts in rows]


def unseen_scores(model, train, dev, unseen):
    """{detector: {"AUROC", "FPR95", "F1"}} in percent, see module ood; without training rows of the maximum
    softmax alone."""
    found = [[x.to(model.device) for x in forward_rows(model, rows, classify_vectors)]
             for rows in (dev, unseen, train) if rows]
    if not all(x.isfinite().all() for part in found for x in part):
        say("note", "--ood: logits or vectors hold NaN or infinity, which count as 0")
        found = [[x.nan_to_num(0, 0, 0) for x in part] for part in found]
    if not train:
        return ood.detect(*found)
    labels = torch.tensor([label for _, label in train], device=model.device)
    return ood.detect(*found[:2], found[2][1], labels)


def judge_unseen(model, rows, trial, run):
    """unseen_scores at the end of a trial: said, kept for its table, and in its row of metrics."""
    run.values["ood"] = found = unseen_scores(model, *rows)
    run.progress["ood"].append(found)
    say_unseen(f"mode {trial.mode}, seed {trial.seed}, ", [found])


def say_unseen(what, runs):
    """A line for each detector: its scores in a run, or mean ± deviation and best of several."""
    for name in runs[0]:
        say("ood", f"{what}{name}: {mean_and_spread([found[name] for found in runs])}")


def metric_name(metric, labels=()):
    """A metric as it is printed: which f1 it is depends on the labels, see confusion_scores."""
    if metric != "f1":
        return metric
    return "f1 of label 1" if list(labels) == ["0", "1"] else "macro f1"


def say_modes(trials, run):
    """A line for each mode: the scores of its trials, and those on texts of unseen classes."""
    args = run.args
    for mode in args.mode:
        own = [i for i, trial in enumerate(trials) if trial.mode == mode]
        say(mode, mean_and_spread([run.progress["scores"][i] for i in own], args.labels))
        if args.ood and args.seeds > 1:
            say_unseen(f"mode {mode}, ", [run.progress["ood"][i] for i in own])


def mean_and_spread(runs, labels=()):
    """One line: the scores of a run, or of several mean ± deviation and best."""
    columns = {metric_name(metric, labels): [scores[metric] for scores in runs] for metric in runs[0]}
    if len(runs) == 1:
        return ", ".join(f"{metric} {x[0]:.2f}" for metric, x in columns.items())
    best = {name: min(x) if name == "FPR95" else max(x) for name, x in columns.items()}
    return "; ".join(f"{metric} {np.mean(x):.2f} ± {np.std(x, ddof=1):.2f}, best {best[metric]:.2f}"
                     for metric, x in columns.items())


def score(args, script, load_data):
    """--evaluate: a classifier's scores on --dev and --contrast-set, with the labels it was trained on."""
    run, path = Run(args, script), args.dev or args.data
    model, tokenizer = load_text_model(args.model, None, AutoModelForSequenceClassification)
    if model.missing:
        fail(f"--model {args.model}: no classifier, {min(model.missing)} is missing; train it first")
    config, model.tokenizer, model.bf16 = model.config, tokenizer, run.bf16
    regression = config.problem_type == "regression" or config.num_labels == 1
    args.task = "regression" if regression else "classification"
    args.labels = [] if regression else [config.id2label[i] for i in range(config.num_labels)]
    longest = min(args.max_length, longest_input(model.base_model, tokenizer))
    held_out = [load_data(path, args)] if path else []
    unseen, contrast = load_unseen(args), load_contrast_set(args, load_data)
    train = load_data(args.data, args) if unseen and args.data else []
    held_out = [tokenise_texts(rows, model.to(run.device), longest)[0]
                for rows in (*held_out, *contrast, unseen, train)]
    *held_out, unseen, train = held_out
    if path:
        say("test", f"{mean_and_spread([evaluate(model, held_out[0], args)], args.labels)}  {path}")
    if contrast:
        found = mean_and_spread([contrast_scores(model, *held_out[-2:])])
        say("test", f"{found}  {' '.join(args.contrast_set)}")
    if unseen:
        if not train:
            say("note", "--ood: local outlier factor and Mahalanobis want the training rows, in --data")
        say_unseen("", [unseen_scores(model, train, held_out[0], unseen)])


def save(model, trial, run):
    """The classifier as transformers reads it."""
    if run.rank:
        return
    with new_files(run) as aside:
        model.save_pretrained(aside)
        save_tokenizer(model.tokenizer, aside)
        text = (f"{trial.task.capitalize()} of text, mode {trial.mode}. "
                'A pair is {"text": ..., "text_pair": ...}.')
        card = model_card(run, "text-classification", ["transformers"], text, load_line(run))
        (aside / "README.md").write_text(card, encoding="utf-8")


def load_line(run):
    """How others load the folder."""
    return f'pipeline("text-classification", "{run.args.out}")'
