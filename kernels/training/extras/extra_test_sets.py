"""Two more kinds of test sets for a classifier: contrast sets (--contrast-set), which are test texts and
minimal edits of them that change the label (Gardner et al. 2020), and texts of unseen classes (--ood, see
ood.py)."""
import torch

from ..errors import fail, log
from ..text.classifier import describe_scores, predict
from . import ood


def load_extra_sets(args, load_data):
    """Return {"unseen", "original", "edited": rows}, with [] for a flag that was not given.

    load_data   function (path, args) that returns the rows of a file
    """
    unseen, original, edited = ood.load_unseen(args), [], []
    if args.contrast_set:
        original, edited = (load_data(path, args) for path in args.contrast_set)
        if len(original) != len(edited) or args.task == "regression":
            fail(f"--contrast-set {' '.join(args.contrast_set)}: {args.task}, {len(original)} and "
                 f"{len(edited)} rows; expected classification, and an edited text for each original, in the "
                 "same order")
    return {"unseen": unseen, "original": original, "edited": edited}


def score_extra_sets(model, data):
    """Return {"contrast": scores, "ood": {detector: scores}}, without the parts for which data has no rows.

    data   {"train", "dev", "unseen", "original", "edited": rows, as tokenise_texts returns them}
    """
    found = {}
    if data["original"]:
        found["contrast"] = contrast_scores(model, data["original"], data["edited"])
    if data["unseen"]:
        found["ood"] = ood.unseen_scores(model, data["train"], data["dev"], data["unseen"])
    return found


def contrast_scores(model, original, edited):
    """Return {name: percentage}: the accuracy on "original" and on "edited" texts, and "consistency", the
    fraction of pairs in which both predictions are right."""
    right = torch.stack([predict(model, rows).argmax(1) == torch.tensor([label for _, label in rows])
                         for rows in (original, edited)])
    parts = {"original": right[0], "edited": right[1], "consistency": right.all(0)}
    return {name: 100 * part.double().mean().item() for name, part in parts.items()}


def log_extra_scores(found, label, files):
    """Print one line for the contrast set in these files, and one for each detector of unseen classes."""
    if "contrast" in found:
        log(label, f"{describe_scores(found['contrast'])}  {' '.join(files)}")
    for detector, scores in found.get("ood", {}).items():
        log("ood", f"{detector}: {describe_scores(scores)}")
