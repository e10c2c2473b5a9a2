"""What sentence encoders are judged by: scored pairs, which choose the best checkpoint too, and labels."""
import os
from pathlib import Path

import numpy as np

from ..cli import fail, say
from ..extras.candidates import choose, is_scored_pairs, load_candidates
from ..extras.probes import cluster, load_labelled, transfer
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
        ranks = args.dev and getattr(args, "objective", None) == "ranking" and not is_scored_pairs(args.dev)
        self.dev = (load_candidates if ranks else load_sts)(args.dev) if args.dev else []
        if ranks:
            self.by = "chosen" if self.dev[0][2] else "first"
            self.named = {"chosen": "score of the chosen", "first": "% first chosen"}[self.by]
        self.tests = {path: load_sts(path) for path in files(args.test, "--test")}
        self.transfers = {path: load_parts(path) for path in files(args.transfer, "--transfer")}
        self.clusters = {path: load_labelled(path) for path in files(args.cluster, "--cluster")}
        for path, (rows, *_) in self.clusters.items():
            if len(rows[0]) == 2:
                fail(f"--cluster {path}: two columns of text, wanted one")

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
        return choose(model, self.dev)

    def shown(self, scores):
        return f"{scores[self.by]:{'.4g' if self.by == 'chosen' else '.2f'}}"

    def judge(self, model, run):
        """Evaluate, and save the model if it is the best so far; without --dev, always."""
        if run.keeps(self.scores(model) if self.dev else {}, by=self.by):
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
        for path, parts in self.transfers.items():
            accuracy, strengths = transfer(model, *parts, self.args.seed)
            yield accuracy, f"  C {' '.join(f'{c:g}' for c in strengths)}  {path}"

    def of_clusters(self, model):
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


def load_parts(path):
    """(train, test or None) of a file that is cross-validated, or of train.tsv,test.tsv."""
    names = [path] if os.path.exists(path) else path.split(",")
    if len(names) > 2 or not all(names):
        fail(f"--transfer {path}: wanted a file, or two, to train on and to test on, with a comma between")
    train = load_labelled(names[0])
    test = load_labelled(names[1], train[2]) if names[1:] else None
    if test and len(test[0][0]) != len(train[0][0]):
        fail(f"--transfer {path}: one file has a text a row, the other two")
    return train, test


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
