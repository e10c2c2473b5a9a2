"""Evaluate sentence encoders also on labelled texts (--transfer, --cluster) and on candidates (--objective
ranking)."""
import numpy as np

from ..errors import fail
from ..text import evaluation
from ..text.evaluation import evaluate_model, expand_folders  # noqa: F401 - imported by scripts
from . import candidates, probes


class Evaluator(evaluation.Evaluator):
    """An Evaluator that scores the best checkpoint also on --transfer and --cluster."""

    def __init__(self, args):
        super().__init__(args)
        paths = expand_folders(args.transfer, "--transfer")
        self.transfers = {path: probes.load_train_test(path) for path in paths}
        paths = expand_folders(args.cluster, "--cluster")
        self.clusters = {path: probes.load_clusters(path) for path in paths}
        if args.evaluate and not (self.dev or self.tests or self.transfers or self.clusters):
            fail("--evaluate: nothing to evaluate; give --dev, --test, --transfer or --cluster")

    def load_dev(self, args):
        """Return the rows of --dev: scored pairs or, with --objective ranking, also texts with candidates."""
        if getattr(args, "objective", None) == "ranking" and not candidates.is_scored_pairs(args.dev):
            self.metric, self.metric_label, rows = candidates.load_dev(args.dev)
            self.score_format = ".4g" if self.metric == "chosen" else ".2f"
            return rows
        return super().load_dev(args)

    def dev_scores(self, model):
        """Return {metric: value} of the model on --dev."""
        if self.metric == "spearman":
            return super().dev_scores(model)
        return candidates.evaluate_candidates(model, self.dev)

    def describe_dev_scores(self, model):
        """Return the scores of the model on --dev as text."""
        if self.metric == "spearman":
            return super().describe_dev_scores(model)
        found = (f"{name} {value:.4g}" for name, value in self.dev_scores(model).items())
        return f"{'  '.join(found)}  {self.args.dev}"

    def test_scores(self, model):
        """Return {label: iterator over (score, text to print after it)}."""
        return super().test_scores(model) | {"transfer": self.score_transfer(model),
                                             "cluster": self.score_clusters(model)}

    def score_transfer(self, model):
        """Yield (accuracy of a logistic regression, text to print after it) for each file of --transfer."""
        for path, parts in self.transfers.items():
            accuracy, strengths = probes.evaluate_transfer(model, *parts, self.args.seed)
            yield accuracy, f"  C {' '.join(f'{c:g}' for c in strengths)}  {path}"

    def score_clusters(self, model):
        """Yield (mean V-measure of k-means, text to print after it) for each file of --cluster."""
        for path, data in self.clusters.items():
            runs = np.array(probes.evaluate_clusters(model, data, self.args.seed))
            v_measure, accuracy = runs.mean(0)
            deviation = runs.std(0, ddof=1)[0]
            yield v_measure, f" ± {deviation:.2f}  accuracy {accuracy:.2f}  {path}"
