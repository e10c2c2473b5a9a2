"""Several trials of a script, one for each --mode and seed (--num-seeds). Each trial is an ordinary run in
OUT/MODE-SEED. At the end a table compares the modes, and OUT gets a copy of the best trial's model."""
import argparse
import json
import os
import shutil
from pathlib import Path

import numpy as np

from .. import out
from ..errors import fail, log
from ..run import Run
from ..text.classifier import describe_scores, finish_run, metric_name, write_card


class Trial(Run):
    """An ordinary run. OUT is created when the first trial begins to train: until then nothing is written."""

    def __init__(self, args, script, parent):
        self.parent = parent
        super().__init__(args, script)

    def begin(self, *args, **kwargs):
        begin_parent(self.parent)
        super().begin(*args, **kwargs)


def run_trials(args, modes, script, train):
    """Train each mode with each seed from args.seed upwards, one after the other. --resume skips the trials
    that are finished, and continues the one that is not.

    train   function (args, run) that trains one mode, args.mode, with one seed
    """
    parent = Run(args, script)                                 # checks the flags, and writes OUT's own files
    seeds = range(args.seed, args.seed + args.num_seeds)
    trials = [trial_args(args, mode, seed) for mode in modes for seed in seeds]
    log("trials", f"{', '.join(modes)}, p {args.reserve_p:g}, {args.num_seeds} × seed {args.seed}, "
                  f"each in {args.out}/MODE-SEED")
    for trial in trials:
        folder = Path(trial.out)
        if is_finished(folder):
            log("skipped", f"{folder} is finished")
            continue
        trial.resume = (folder / out.UNFINISHED).is_file()
        run = Trial(trial, script, parent)
        train(trial, run)
        del run.model, run.optimizer                           # free memory: the signal handlers keep `run`
    begin_parent(parent)
    if parent.rank == 0:
        summarise(parent, trials, modes)


def trial_args(args, mode, seed):
    """Return the flags of one trial. They include a command: --resume with this trial's folder as --out
    continues it alone."""
    command = [*args.command, "--mode", mode, "--seed", str(seed), "--num-seeds", "1"]
    out = os.path.join(args.out, f"{mode}-{seed}")
    own = dict(mode=mode, seed=seed, num_seeds=1, out=out, command=command)
    return argparse.Namespace(**vars(args) | own)


def is_finished(folder):
    """Return whether the trial in a folder has ended."""
    return (folder / "args.json").is_file() and not (folder / out.UNFINISHED).is_file()


def begin_parent(run):
    """Write flags and code to OUT, or check that the flags are those of the trials in OUT. Only the first
    call does this."""
    if hasattr(run, "begun"):
        return
    run.begun = run.args.resume and (run.out / "args.json").is_file()
    if run.begun:
        run.refuse_changes(json.loads((run.out / "args.json").read_text(encoding="utf-8")))
    elif run.rank == 0:
        run.start_folder()


def summarise(parent, trials, modes):
    """Print the scores of each mode, copy the best trial into OUT, and print how to load its model. Trials
    are compared by --dev; without it the first one is copied."""
    args = parent.args
    rows = [last_row(Path(trial.out) / "metrics.jsonl") for trial in trials]
    scores = [scores_of(row) for row in rows]
    for mode in modes:
        own = [i for i, trial in enumerate(trials) if trial.mode == mode]
        if scores[0]:
            log(mode, mean_and_spread([scores[i] for i in own], args.labels))
        for detector in rows[0].get("ood", {}):
            found = mean_and_spread([rows[i]["ood"][detector] for i in own])
            log("ood", f"mode {mode}, {detector}: {found}")
    best = 0
    if args.dev:                                               # the first one if several are best
        best = max(range(len(trials)), key=lambda i: scores[i][args.metric])
    trial = trials[best]
    parent.extra_state["saved"] = {"mode": trial.mode, "seed": trial.seed, **scores[best]}
    copy_trial(trial, parent)
    finish_run(parent, trial, scores[best], sum(row["skipped"] for row in rows))


def last_row(path):
    """Return the last row of a finished trial's metrics.jsonl."""
    try:
        row = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        return row | {"skipped": int(row["skipped"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"{path}: damaged ({type(error).__name__}); delete {path.parent}, then --resume trains it again")


def scores_of(row):
    """Return {metric: percentage} on --dev and on the contrast set."""
    dev = {name.removeprefix("dev_"): score for name, score in row.items() if name.startswith("dev_")}
    return dev | row.get("contrast", {})


def mean_and_spread(runs, labels=()):
    """Return one line: the mean, standard deviation and best of each score, or the scores of a single run."""
    if len(runs) == 1:
        return describe_scores(runs[0], labels)
    parts = []
    for metric in runs[0]:
        values = [scores[metric] for scores in runs]
        best = min(values) if metric == "FPR95" else max(values)
        spread = np.std(values, ddof=1)
        parts.append(f"{metric_name(metric, labels)} {np.mean(values):.2f} ± {spread:.2f}, best {best:.2f}")
    return "; ".join(parts)


def copy_trial(trial, parent):
    """Copy a trial's model and metrics into OUT, which has flags and code of its own."""
    own_files = {"args.json", "state.pt", parent.script.name}
    with out.atomic_output(parent) as aside:
        for file in Path(trial.out).iterdir():
            if file.is_file() and file.name not in own_files:
                shutil.copyfile(file, aside / file.name)
        write_card(aside, trial, parent)
