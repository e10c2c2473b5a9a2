"""Evaluate sentence encoders on scored sentence pairs and labelled texts, and select the best checkpoint."""
import numpy as np

from ..errors import fail, log
from ..run import Run
from .checkpoint import load_hint, save
from .encoders import build_encoder, describe_model
from .sts import evaluate, load_sts


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
        log("load", load_hint(model, run))

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
