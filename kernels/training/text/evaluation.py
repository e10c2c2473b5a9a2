"""Evaluate sentence encoders on held-out data, and select the best checkpoint. Scored sentence pairs give
Spearman's ρ of scores and cosines (semantic textual similarity, STS). For retrieval, see retrieval.py."""
import math
import re

import numpy as np
import torch
import torch.nn.functional as F

from kernels import similarity_lse

from ..data import NUMBER, SCORED_PAIR, are_scores, normalise_name, read_table, show_cells
from ..errors import fail, log
from ..run import Run
from .checkpoint import load_hint, save
from .encoders import build_encoder, describe_model
from .retrieval import Retrieval, evaluate_retrieval, load_retrieval

# {score: its name in messages}. The first score of an evaluation selects the best checkpoint.
SHOWN = {"spearman": "Spearman", "mrr@10": "MRR@10", "accuracy@1": "accuracy@1", "recall@10": "recall@10",
         "ndcg@10": "nDCG@10"}


def load_held_out(path, columns=None):
    """Read a file of --dev or --test: scored pairs [(sentence1, sentence2, score)], or a Retrieval. All pairs
    form one list (STS setting "all"). columns: --dev-columns, or None; in this case, the header decides.
    Without a header, the first or third of three columns may have scores; with `columns`, only the third."""
    header, table = read_table(path, columns=columns, names=SCORED_PAIR, join=True, flag="--dev-columns")
    by_column, names = [*zip(*(cells for _, cells in table))], []
    if header and not columns:
        names = [normalise_name(name) for name in header]
    elif len(by_column) == 3 and are_scores(by_column[2], *(header or ())[2:]):
        names = [*SCORED_PAIR]
    elif len(by_column) == 3 and are_scores(by_column[0]) and not columns:
        names = [SCORED_PAIR[2], *SCORED_PAIR[:2]]
    if not {*SCORED_PAIR} <= {*names}:
        return load_retrieval(path, columns)
    if columns or not header:
        log("note", f"the first row of {path} is read as {show_cells(names, next(iter(table))[1])}")
    pairs = []
    for place, cells in table:
        one, two, score = (" ".join(cells[names.index(name)].split()) for name in SCORED_PAIR)
        if not one or not two:
            fail(f"{path} {place}: an empty sentence")
        if score and not (re.fullmatch(NUMBER, score) and math.isfinite(float(score))):
            fail(f"{path} {place}: score {score[:40]!r}, expected a number, such as one from 0 to 5")
        if score:                              # pairs without a score, as in SemEval files, are skipped
            pairs.append((one, two, float(score)))
    if len({score for *_, score in pairs}) < 2:
        fail(f"{path}: {len(pairs)} scored pairs whose scores are all equal, expected at least 2 different "
             "scores: equal scores have no correlation")
    return pairs


def pearson(a, b):
    """Return the Pearson correlation of a and b, or 0 if a or b is constant."""
    return 0.0 if min(np.ptp(a), np.ptp(b)) == 0 else float(np.corrcoef(a, b)[0, 1])


def spearman(a, b):
    """Return Spearman's ρ, the Pearson correlation of ranks. Equal values all get their mean rank."""
    ranks = []
    for x in (a, b):
        _, group, sizes = np.unique(x, return_inverse=True, return_counts=True)
        ranks.append((sizes.cumsum() - (sizes - 1) / 2)[group])
    return pearson(*ranks)


@torch.no_grad()
def evaluate(model, data, impl="auto"):
    """Score a model on data of load_held_out, without truncation to --max-length. Return evaluate_retrieval's
    scores or, for pairs, {"spearman": 100 ρ, "alignment", "uniformity"} (Wang and Isola 2020). Alignment is
    computed for pairs with scores above 4, and only if no score is above 5."""
    if isinstance(data, Retrieval):
        return evaluate_retrieval(model, data, impl)
    z, indices = model.embed([pair[side] for side in (0, 1) for pair in data])
    z = F.normalize(torch.nan_to_num(z), dim=1, eps=1e-8)
    one, two = z[indices].double().chunk(2)
    scores = np.array([pair[2] for pair in data])
    result = {"spearman": 100 * spearman((one * two).sum(1).cpu().numpy(), scores)}
    near = torch.from_numpy(scores > 4).to(z.device)
    if near.any() and scores.max() <= 5:
        result["alignment"] = (one - two)[near].square().sum(1).mean().item()
    if len(z) > 1:            # uniformity is log mean exp(−2 |x − y|²), for unit rows log mean exp(4 x·y − 4)
        lse = similarity_lse(z, temperature=0.25, exclude="diagonal", impl=impl).double()
        result["uniformity"] = lse.logsumexp(0).item() - 4 - math.log(len(z) * (len(z) - 1))
    return result


def show_scores(scores):
    """Return scores as text, such as "MRR@10 90.12, accuracy@1 85.00", without alignment and uniformity."""
    return ", ".join(f"{shown} {scores[name]:.2f}" for name, shown in SHOWN.items() if name in scores)


class Evaluator:
    """The evaluation data of a run. --dev selects the best checkpoint, which --test scores at the end. All
    files are read and checked before the first step."""

    def __init__(self, args):
        self.args = args
        self.dev = load_held_out(args.dev, args.dev_columns) if args.dev else None
        self.tests = {path: load_held_out(path, args.dev_columns) for path in args.test}
        if args.evaluate and not (self.dev or self.tests):
            fail("--evaluate: nothing to evaluate; give --dev or --test")

    def evaluate_before(self, model, run):
        """Score the model on --dev before the first step. Print the score, also when a run is resumed."""
        if self.dev and run.step == 0:
            run.log_initial_scores(evaluate(model, self.dev, self.args.impl))
        if self.dev:
            log("before", f"dev {show_scores(run.extra_state['before'])}")

    def evaluate_and_save(self, model, run):
        """Score the model on --dev. Save the model if this score is the best so far or --dev is missing."""
        scores = evaluate(model, self.dev, self.args.impl) if self.dev else {}
        if scores.get("uniformity", -1) > -1e-3:               # uniformity is 0 if all embeddings are equal
            log("note", f"step {run.step}: all sentences have nearly the same embedding, so the model has "
                        "collapsed; usual causes are a too high --lr or --temperature")
        first = next(iter(scores), None)
        if run.should_save(scores, by=first, shown=f"{scores[first]:.2f}" if scores else ""):
            save(model, run)

    def finish(self, model, run):
        """Load the best checkpoint. Print its test scores and the Python code that loads this checkpoint."""
        model.restore(run.out)
        before, best, rise = run.extra_state["before"], run.extra_state["saved"], ""
        if self.dev:
            first = next(iter(before))
            rise = f"dev {SHOWN[first]} {before[first]:.2f} → {best[first]:.2f} at step {best['step']}, "
        if isinstance(self.dev, Retrieval):                    # retrieval has more scores than `rise` shows
            log("dev", f"{show_scores(best)}  {self.args.dev}")
        self.print_test_scores(model)
        run.finish(rise)
        log("load", load_hint(model, run))

    def print_test_scores(self, model):
        """Print the scores of each file of --test, and the mean of the rounded first scores, as papers do."""
        scores = [self.print_scores("test", model, path, data) for path, data in self.tests.items()]
        for first in ("spearman", "mrr@10"):
            rounded = [round(score[first], 2) for score in scores if first in score]
            if len(rounded) > 1:
                log("test", f"{SHOWN[first]} {np.mean(rounded):.2f}  mean")

    def print_scores(self, word, model, path, data):
        """Print and return the model's scores on a file. The line begins with `word`."""
        scores = evaluate(model, data, self.args.impl)
        more = (f"  {name} {scores[name]:.3f}" for name in ("alignment", "uniformity") if name in scores)
        log(word, f"{show_scores(scores)}{''.join(more)}  {path}")
        return scores


def evaluate_model(evaluator, script, pooling="cls"):
    """Run --evaluate: print the scores of --model on the evaluator's data."""
    args, run = evaluator.args, Run(evaluator.args, script)
    model = build_encoder(args, run, pooling).to(run.device)
    log("model", describe_model(model, args))
    if args.dev:
        evaluator.print_scores("dev", model, args.dev, evaluator.dev)
    evaluator.print_test_scores(model)
