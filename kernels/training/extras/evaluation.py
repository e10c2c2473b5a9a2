"""Evaluate sentence encoders also on candidates (--objective ranking)."""
from ..text import evaluation
from ..text.evaluation import evaluate_model  # noqa: F401 - imported by scripts
from . import candidates


class Evaluator(evaluation.Evaluator):
    """An Evaluator whose --dev may also have candidates."""

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
