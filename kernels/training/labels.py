"""Labelled texts, one or two a row: their columns, tokens and batches; the scores of a classifier."""
import math
from inspect import signature

import numpy as np
import torch

from .command import fail
from .sts import spearman
from .tables import read_table


def find_columns(path, args):
    """(rows of the table, places of its columns of text, place of its column of labels)"""
    header, table = read_table(path)
    names = header or [f"column {i + 1}" for i in range(len(next(iter(table))[1]))]
    label = args.label or next((name for name in ("label", "score") if name in names), names[-1])
    others = [name for name in names if name != label]
    texts = args.text or [name for name in ("sentence", "sentence1", "sentence2") if name in others] or others
    if not {label, *texts} <= set(names) or label in texts or len(texts) not in (1, 2):
        fail(f"{path}: columns {', '.join(names)}; wanted one or two of text (now {', '.join(texts)}) and "
             f"one of labels (now {label}); name them by --text and --label")
    args.text, args.label = texts, label                       # the same in --dev
    return table, [names.index(name) for name in texts], names.index(label)


def tokenise_texts(rows, model, longest):
    """([({name: int32 (L,)}, label)], how many were cut): one text or two, with special tokens and without
    padding."""
    done, cut = [], 0
    takes = set(model.tokenizer.model_input_names) & set(signature(model.forward).parameters)
    names = [name for name in ("input_ids", "token_type_ids") if name in takes]
    for start in range(0, len(rows), 10_000):  # a million at once would hold tens of gigabytes
        texts, labels = zip(*rows[start : start + 10_000])
        encoded = model.tokenizer(*map(list, zip(*texts)), truncation=True, max_length=longest)
        done += [({name: np.array(encoded[name][i], np.int32) for name in names}, label)
                 for i, label in enumerate(labels)]
        cut += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
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
def evaluate(model, rows, args):
    """{metric: 100 times its value}: accuracy, F1 and Matthews' correlation, in regression Spearman's and
    Pearson's."""
    model.eval()
    rows = sorted(rows, key=lambda row: len(row[0]["input_ids"]))              # little padding
    parts = (make_batch(rows[i : i + 128], model)[0] for i in range(0, len(rows), 128))
    logits = torch.cat([classify(model, inputs) for inputs in parts]).cpu()
    model.train()
    truth = np.array([label for _, label in rows])
    if args.task == "classification":
        scores = confusion_scores(truth, logits.argmax(1).numpy(), args.labels)
    else:
        said = logits[:, 0].double().numpy()
        constant = min(np.ptp(truth), np.ptp(said)) == 0
        scores = {"spearman": spearman(truth, said),
                  "pearson": 0.0 if constant else np.corrcoef(truth, said)[0, 1]}
    return {metric: 100 * float(score) for metric, score in scores.items()}
