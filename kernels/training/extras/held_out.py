"""What else a classifier can be scored on: contrast sets (--contrast-set), which are test texts and minimal
edits of them that change the label (Gardner et al. 2020), and texts of unseen classes (--ood, module ood)."""
import torch

from ..cli import fail, say
from ..text.classifier import describe_scores, predict
from . import ood


def load_more(args, load_data):
    """{"unseen", "original", "edited": rows} as load_data(path, args) gives them; [] for a flag not given."""
    unseen, original, edited = ood.load_unseen(args), [], []
    if args.contrast_set:
        original, edited = (load_data(path, args) for path in args.contrast_set)
        if len(original) != len(edited) or args.task == "regression":
            fail(f"--contrast-set {' '.join(args.contrast_set)}: {args.task}, {len(original)} and "
                 f"{len(edited)} rows; wanted classification, and an edited text for each original, in the "
                 "same order")
    return {"unseen": unseen, "original": original, "edited": edited}


def more_scores(model, data):
    """{"contrast": scores, "ood": scores by detector}, each where data has its rows.

    data   {"train", "dev", "unseen", "original", "edited": rows as tokenise_texts gives them}
    """
    found = {}
    if data["original"]:
        found["contrast"] = contrast_scores(model, data["original"], data["edited"])
    if data["unseen"]:
        found["ood"] = ood.unseen_scores(model, data["train"], data["dev"], data["unseen"])
    return found


def contrast_scores(model, original, edited):
    """{name: percent}: accuracy on original texts, on edited ones, and consistency, the share of pairs with
    both answers right."""
    right = torch.stack([predict(model, rows).argmax(1) == torch.tensor([label for _, label in rows])
                         for rows in (original, edited)])
    parts = {"original": right[0], "edited": right[1], "consistency": right.all(0)}
    return {name: 100 * part.double().mean().item() for name, part in parts.items()}


def say_more(found, label, files):
    """A line for the contrast set in these files, and one for each detector of unseen classes."""
    if "contrast" in found:
        say(label, f"{describe_scores(found['contrast'])}  {' '.join(files)}")
    for detector, scores in found.get("ood", {}).items():
        say("ood", f"{detector}: {describe_scores(scores)}")
