"""What sentence encoders are judged by: scored pairs, which choose the best checkpoint too, and labels."""
import os
from pathlib import Path

import numpy as np

from ..cli import fail, say
from ..run import Run
from ..tables import KINDS
from .checkpoint import load_line, save
from .encoders import build_encoder, describe_model
from .sts import evaluate, load_sts


class HeldOut:
    """The data of --dev, which choose the best checkpoint, and of --test, --transfer and --cluster, which it
    is read with. They are all read, and checked, before the first step."""

    def __init__(self, args):
        self.args, self.by, self.named = args, "spearman", "Spearman"          # what --dev is judged by
        self.dev = self.load_dev(args) if args.dev else []
        self.tests = {path: load_sts(path) for path in files(args.test, "--test")}
        self.transfers = self.clusters = {}
        if args.transfer or args.cluster:
            from ..extras.probes import load_clusters, load_parts
            self.transfers = {path: load_parts(path) for path in files(args.transfer, "--transfer")}
            self.clusters = {path: load_clusters(path) for path in files(args.cluster, "--cluster")}

    def load_dev(self, args):
        """The scored pairs of --dev; of simcse.py's --objective ranking, texts with candidates."""
        if getattr(args, "objective", None) == "ranking":
            from ..extras import candidates
            if not candidates.is_scored_pairs(args.dev):
                self.by, self.named, rows = candidates.load_dev(args.dev)
                return rows
        return load_sts(args.dev)

    def before(self, model, run):
        """The score before the first step; how long it takes tells how long the test sets will."""
        if self.dev and run.step == 0:
            tests = sum(map(len, self.tests.values()))
            with run.clock.apart(again=tests / len(self.dev), evaluation=True):
                run.note_before(self.scores(model))
        if self.dev:
            say("before", f"dev {self.named} {self.shown(run.progress['before'])}")

    def scores(self, model):
        """Of --dev."""
        if self.by == "spearman":
            return evaluate(model, self.dev, self.args.impl)
        from ..extras.candidates import choose
        return choose(model, self.dev)

    def shown(self, scores):
        return f"{scores[self.by]:{'.4g' if self.by == 'chosen' else '.2f'}}"

    def judge(self, model, run):
        """Evaluate, and save the model if it is the best so far; without --dev, always."""
        scores = self.scores(model) if self.dev else {}
        if run.keeps(scores, by=self.by, shown=self.shown(scores) if scores else ""):
            save(model, run)

    def after(self, model, run):
        """Reads the best checkpoint, tests it, and says how to load it."""
        model.restore(run.out)
        self.say_scores(model)
        before, best = run.progress["before"], run.progress["saved"]
        rise = ""
        if self.dev:
            rise = f"dev {self.named} {self.shown(before)} → {self.shown(best)} at step {best['step']}, "
        run.done(rise)
        say("load", load_line(model, run))

    def say_scores(self, model):
        """A line a file, and of each kind the mean, as papers have it, of the scores as they are printed."""
        kinds = {"test": self.of_pairs, "transfer": self.of_regressions, "cluster": self.of_clusters}
        for label, scored in kinds.items():
            scores = []
            for score, text in scored(model):
                say(label, f"{score:.2f}{text}")
                scores.append(round(score, 2))
            if scores:
                say(label, f"{np.mean(scores):.2f}  mean")

    def of_pairs(self, model, files=None):
        for path, pairs in (files or self.tests).items():
            scores = evaluate(model, pairs, self.args.impl)
            more = (f"{name} {scores[name]:.3f}  " for name in ("alignment", "uniformity") if name in scores)
            yield scores["spearman"], f"  {''.join(more)}{path}"

    def of_regressions(self, model):
        from ..extras.probes import transfer
        for path, parts in self.transfers.items():
            accuracy, strengths = transfer(model, *parts, self.args.seed)
            yield accuracy, f"  C {' '.join(f'{c:g}' for c in strengths)}  {path}"

    def of_clusters(self, model):
        from ..extras.probes import cluster
        for path, data in self.clusters.items():
            runs = np.array(cluster(model, data, self.args.seed))
            (v, accuracy), (spread, _) = runs.mean(0), runs.std(0, ddof=1)
            yield v, f" ± {spread:.2f}  accuracy {accuracy:.2f}  {path}"


def files(paths, flag):
    """The paths, with the data files of a folder in its place."""
    found = []
    for path in paths:
        inside = [path]
        if os.path.isdir(path):                                # Path's raises where a name is too long
            names = (str(file) for file in sorted(Path(path).iterdir()))
            inside = [name for name in names if name.lower().removesuffix(".gz").endswith(KINDS)]
        if not inside:
            fail(f"{flag} {path}: no file in this folder ends in {', '.join(KINDS)}")
        found += inside
    return found


def score(args, script, pooling="cls"):
    """--evaluate of sentence encoders: the files of --dev and the other flags through --model."""
    if not (args.dev or args.test or args.transfer or args.cluster):
        fail("--evaluate: nothing to evaluate; name files of scored pairs by --dev or --test, of labels by "
             "--transfer or --cluster")
    held_out, run = HeldOut(args), Run(args, script)
    model = build_encoder(args, run, pooling, columns=len(args.prompt or [""])).to(run.device)
    say("model", describe_model(model, args))
    if args.dev and held_out.by != "spearman":
        found = (f"{name} {value:.4g}" for name, value in held_out.scores(model).items())
        say("dev", f"{'  '.join(found)}  {args.dev}")
    elif args.dev:
        (score, text), = held_out.of_pairs(model, {args.dev: held_out.dev})
        say("dev", f"{score:.2f}{text}")
    held_out.say_scores(model)
