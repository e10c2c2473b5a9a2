"""Evaluate sentence encoders on scored sentence pairs, and select the best checkpoint. Semantic textual
similarity (STS) is Spearman's ρ of human scores and cosines."""
import math
import re

import numpy as np
import torch
import torch.nn.functional as F

from kernels import similarity_lse

from ..data import NUMBER, join_names, normalise_name, read_table, show_cells
from ..errors import fail, log
from ..run import Run
from .checkpoint import load_hint, save
from .encoders import build_encoder, describe_model

NAMES = "sentence1", "sentence2", "score"


def load_sts(path, columns=None):
    """Read [(sentence1, sentence2, score)] from a file. All its subsets form one list (STS setting "all").

    columns   names or numbers of the three columns (--dev-columns); None: find the columns by the header.
              A file without a header must have three columns, with the score first or last
    """
    header, table = read_table(path, columns=columns, names=NAMES)
    first = next(iter(table))[1]
    names = [*NAMES] if columns else [normalise_name(name) for name in header or []]
    if not names and len(first) == 3:          # score last or, if the last cell is not a number, first
        names = [*NAMES] if re.fullmatch(f"({NUMBER})?", first[2].strip()) else [NAMES[2], *NAMES[:2]]
        log("note", f"{path} has no header; its first row is read as {show_cells(names, first)}")
    if not {*NAMES} <= {*names}:
        found = join_names(header or [f"{len(first)} columns without a header"])
        fail(f"{path}: found {found}; expected {', '.join(NAMES)}, or 3 columns with the score first or last;"
             " choose them by --dev-columns, by name or number")
    pairs = []
    for place, cells in table:
        one, two, score = (" ".join(cells[names.index(name)].split()) for name in NAMES)
        if not one or not two:
            fail(f"{path} {place}: an empty sentence")
        if score and not (re.fullmatch(NUMBER, score) and math.isfinite(float(score))):
            fail(f"{path} {place}: score {score[:40]!r}, expected a number, such as one from 0 to 5")
        if score:                              # pairs without a score, as in SemEval files, are skipped
            pairs.append((one, two, float(score)))
    if len({score for *_, score in pairs}) < 2:
        fail(f"{path}: {len(pairs)} scored pairs whose scores are all equal, expected at least 2 different "
             "scores: without them there is no correlation")
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
def evaluate(model, pairs, impl="auto"):
    """Score a model on pairs, without truncation to --max-length. Return {"spearman": 100 ρ} and, as in Wang
    and Isola 2020, "alignment" of pairs scored above 4 (if none has above 5), "uniformity" of sentences."""
    z, indices = model.embed([pair[side] for side in (0, 1) for pair in pairs])
    z = F.normalize(torch.nan_to_num(z), dim=1, eps=1e-8)
    one, two = z[indices].double().chunk(2)
    scores = np.array([pair[2] for pair in pairs])
    result = {"spearman": 100 * spearman((one * two).sum(1).cpu().numpy(), scores)}
    near = torch.from_numpy(scores > 4).to(z.device)
    if near.any() and scores.max() <= 5:
        result["alignment"] = (one - two)[near].square().sum(1).mean().item()
    if len(z) > 1:                             # log mean exp(−2 |x − y|²); for unit rows, exp(4 x·y − 4)
        lse = similarity_lse(z, temperature=0.25, exclude="diagonal", impl=impl).double()
        result["uniformity"] = lse.logsumexp(0).item() - 4 - math.log(len(z) * (len(z) - 1))
    return result


class Evaluator:
    """The evaluation data of a run. --dev selects the best checkpoint, which --test scores at the end. All
    files are read and checked before the first step."""

    def __init__(self, args):
        self.args = args
        self.dev = load_sts(args.dev, args.dev_columns) if args.dev else []
        self.tests = {path: load_sts(path, args.dev_columns) for path in args.test}
        if args.evaluate and not (self.dev or self.tests):
            fail("--evaluate: nothing to evaluate; give --dev or --test")

    def evaluate_before(self, model, run):
        """Score the model on --dev before the first step. Print the score, also when a run is resumed."""
        if self.dev and run.step == 0:
            run.log_initial_scores(evaluate(model, self.dev, self.args.impl))
        if self.dev:
            log("before", f"dev Spearman {run.extra_state['before']['spearman']:.2f}")

    def evaluate_and_save(self, model, run):
        """Score the model on --dev. Save the model if this score is the best so far or --dev is missing."""
        scores = evaluate(model, self.dev, self.args.impl) if self.dev else {}
        if scores.get("uniformity", -1) > -1e-3:               # 0 if all embeddings are equal
            log("note", f"step {run.step}: all sentences have nearly the same embedding, so the model has "
                        "collapsed; usual causes are a too high --lr or --temperature")
        shown = f"{scores['spearman']:.2f}" if scores else ""
        if run.should_save(scores, by="spearman", shown=shown):
            save(model, run)

    def finish(self, model, run):
        """Load the best checkpoint. Print its test scores and the Python code that loads this checkpoint."""
        model.restore(run.out)
        self.print_test_scores(model)
        before, best = run.extra_state["before"], run.extra_state["saved"]
        rise = ""
        if self.dev:
            rise = f"dev Spearman {before['spearman']:.2f} → {best['spearman']:.2f} at step {best['step']}, "
        run.finish(rise)
        log("load", load_hint(run))

    def print_test_scores(self, model):
        """Print the score of each file of --test, and the mean of the rounded scores, as papers do."""
        scores = [self.print_score("test", model, path, pairs) for path, pairs in self.tests.items()]
        if scores:
            log("test", f"{np.mean(scores):.2f}  mean")

    def print_score(self, word, model, path, pairs):
        """Print and return the model's score on the scored pairs of a file. The line begins with `word`."""
        scores = evaluate(model, pairs, self.args.impl)
        more = (f"{name} {scores[name]:.3f}  " for name in ("alignment", "uniformity") if name in scores)
        log(word, f"{scores['spearman']:.2f}  {''.join(more)}{path}")
        return round(scores["spearman"], 2)


def evaluate_model(evaluator, script, pooling="cls"):
    """Run --evaluate: print the scores of --model on the evaluator's data."""
    args, run = evaluator.args, Run(evaluator.args, script)
    model = build_encoder(args, run, pooling).to(run.device)
    log("model", describe_model(model, args))
    if args.dev:
        evaluator.print_score("dev", model, args.dev, evaluator.dev)
    evaluator.print_test_scores(model)
