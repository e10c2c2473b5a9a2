"""Evaluate sentence encoders on scored sentence pairs and labelled texts, and select the best checkpoint."""
import os
from pathlib import Path

import numpy as np

from ..cli import fail, log
from ..run import Run
from ..tables import FILE_EXTENSIONS
from .checkpoint import load_hint, save
from .encoders import build_encoder, describe_model
from .sts import evaluate, load_sts


class Evaluator:
    """The evaluation data of a run: --dev selects the best checkpoint, and --test, --transfer and --cluster
    score it at the end. All files are read and checked before the first step."""

    def __init__(self, args):
        self.args, self.selection_metric, self.metric_label = args, "spearman", "Spearman"
        self.dev = self.load_dev(args) if args.dev else []
        self.tests = {path: load_sts(path) for path in expand_folders(args.test, "--test")}
        self.transfers, self.clusters = {}, {}
        if args.transfer or args.cluster:
            from ..extras.probes import load_clusters, load_train_test
            paths = expand_folders(args.transfer, "--transfer")
            self.transfers = {path: load_train_test(path) for path in paths}
            self.clusters = {path: load_clusters(path) for path in expand_folders(args.cluster, "--cluster")}

    def load_dev(self, args):
        """Return the rows of --dev: scored pairs or, with --objective ranking, also texts with candidates."""
        if getattr(args, "objective", None) == "ranking":
            from ..extras import candidates
            if not candidates.is_scored_pairs(args.dev):
                self.selection_metric, self.metric_label, rows = candidates.load_dev(args.dev)
                return rows
        return load_sts(args.dev)

    def evaluate_before(self, model, run):
        """Evaluate on --dev before the first step. Its duration predicts how long the test sets will take."""
        if self.dev and run.step == 0:
            tests = sum(map(len, self.tests.values()))
            with run.clock.exclude(repeats=tests / len(self.dev), evaluation=True):
                run.log_initial_scores(self.dev_scores(model))
        if self.dev:
            log("before", f"dev {self.metric_label} {self.format_score(run.extra_state['before'])}")

    def dev_scores(self, model):
        """Return {metric: value} of the model on --dev."""
        if self.selection_metric == "spearman":
            return evaluate(model, self.dev, self.args.impl)
        from ..extras.candidates import evaluate_candidates
        return evaluate_candidates(model, self.dev)

    def format_score(self, scores):
        """Return the selection metric as text."""
        digits = ".4g" if self.selection_metric == "chosen" else ".2f"
        return f"{scores[self.selection_metric]:{digits}}"

    def evaluate_and_save(self, model, run):
        """Evaluate the model on --dev and save it if it is the best so far; without --dev, always save it."""
        scores = self.dev_scores(model) if self.dev else {}
        shown = self.format_score(scores) if scores else ""
        if run.should_save(scores, by=self.selection_metric, shown=shown):
            save(model, run)

    def finish(self, model, run):
        """Load the best checkpoint, print its test scores, and print how to load it."""
        model.restore(run.out)
        self.print_test_scores(model)
        before, best = run.extra_state["before"], run.extra_state["saved"]
        rise = ""
        if self.dev:
            rise = (f"dev {self.metric_label} {self.format_score(before)} → {self.format_score(best)} "
                    f"at step {best['step']}, ")
        run.finish(rise)
        log("load", load_hint(model, run))

    def print_test_scores(self, model):
        """Print one line per file of --test, --transfer and --cluster, and a mean per flag. As in papers, the
        mean is that of the rounded scores."""
        scorers = {"test": self.score_pairs, "transfer": self.score_transfer, "cluster": self.score_clusters}
        for label, scorer in scorers.items():
            scores = []
            for score, text in scorer(model):
                log(label, f"{score:.2f}{text}")
                scores.append(round(score, 2))
            if scores:
                log(label, f"{np.mean(scores):.2f}  mean")

    def score_pairs(self, model, files=None):
        """Yield (Spearman, text to print after it) for each of `files` {path: scored pairs}; None: --test."""
        for path, pairs in (files or self.tests).items():
            scores = evaluate(model, pairs, self.args.impl)
            more = (f"{name} {scores[name]:.3f}  " for name in ("alignment", "uniformity") if name in scores)
            yield scores["spearman"], f"  {''.join(more)}{path}"

    def score_transfer(self, model):
        """Yield (accuracy of a logistic regression, text to print after it) for each file of --transfer."""
        from ..extras.probes import evaluate_transfer
        for path, parts in self.transfers.items():
            accuracy, strengths = evaluate_transfer(model, *parts, self.args.seed)
            yield accuracy, f"  C {' '.join(f'{c:g}' for c in strengths)}  {path}"

    def score_clusters(self, model):
        """Yield (mean V-measure of k-means, text to print after it) for each file of --cluster."""
        from ..extras.probes import evaluate_clusters
        for path, data in self.clusters.items():
            runs = np.array(evaluate_clusters(model, data, self.args.seed))
            v_measure, accuracy = runs.mean(0)
            deviation = runs.std(0, ddof=1)[0]
            yield v_measure, f" ± {deviation:.2f}  accuracy {accuracy:.2f}  {path}"


def expand_folders(paths, flag):
    """Return the paths, with each folder replaced by the data files in it."""
    found = []
    for path in paths:
        inside = [path]
        if os.path.isdir(path):                # Path.is_dir raises OSError if a name is too long
            names = (str(file) for file in sorted(Path(path).iterdir()))
            inside = [name for name in names if name.lower().removesuffix(".gz").endswith(FILE_EXTENSIONS)]
        if not inside:
            fail(f"{flag} {path}: the folder has no file whose name ends in {', '.join(FILE_EXTENSIONS)}")
        found += inside
    return found


def evaluate_model(args, script, pooling="cls"):
    """Run --evaluate: score --model on the files of --dev, --test, --transfer and --cluster."""
    if not (args.dev or args.test or args.transfer or args.cluster):
        fail("--evaluate: nothing to evaluate; name files of scored pairs by --dev or --test, or files of "
             "labelled texts by --transfer or --cluster")
    evaluator, run = Evaluator(args), Run(args, script)
    model = build_encoder(args, run, pooling, columns=len(args.prompt or [""])).to(run.device)
    log("model", describe_model(model, args))
    if args.dev and evaluator.selection_metric != "spearman":
        found = (f"{name} {value:.4g}" for name, value in evaluator.dev_scores(model).items())
        log("dev", f"{'  '.join(found)}  {args.dev}")
    elif args.dev:
        for score, text in evaluator.score_pairs(model, {args.dev: evaluator.dev}):
            log("dev", f"{score:.2f}{text}")
    evaluator.print_test_scores(model)
