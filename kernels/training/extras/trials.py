"""Several trials of a script, --mode times --seeds: each is an ordinary run in OUT/MODE-SEED. They end with a
table of their scores, and with the best trial's model in OUT."""
import argparse
import json
import os
import shutil
from pathlib import Path

import numpy as np

from .. import output_dir
from ..cli import fail, say
from ..run import Run
from ..text.classifier import describe_scores, finish, metric_name, write_card


class Trial(Run):
    """An ordinary run. The first trial that begins also begins OUT: until then nothing is written."""

    def __init__(self, args, script, whole):
        self.whole = whole
        super().__init__(args, script)

    def begin(self, *given, **more):
        begin_whole(self.whole)
        self.known = dict(self.whole.inputs)                   # read once, for all trials
        super().begin(*given, **more)


def run_trials(args, modes, script, train):
    """Train each mode with each seed from args.seed upwards, one after the other. --resume skips trials that
    are finished and continues the one that is not.

    train   train(args, run) trains one mode, args.mode, with one seed
    """
    whole = Run(args, script)                                  # for what it refuses, and OUT's own files
    seeds = range(args.seed, args.seed + args.seeds)
    trials = [trial_args(args, mode, seed) for mode in modes for seed in seeds]
    say("trials", f"{', '.join(modes)}, p {args.reserve_p:g}, {args.seeds} × seed {args.seed}, "
                  f"each in {args.out}/MODE-SEED")
    for trial in trials:
        folder = Path(trial.out)
        if is_finished(folder):
            say("skipped", f"{folder} is finished")
            continue
        trial.resume = (folder / output_dir.RUNNING).is_file()
        run = Trial(trial, script, whole)
        train(trial, run)
        del run.model, run.optimizer                           # signal handlers still know the run
    begin_whole(whole)
    if whole.rank == 0:
        sum_up(whole, trials, modes)


def trial_args(args, mode, seed):
    """The flags of one trial; its command makes --resume of its folder alone continue just this trial."""
    command = [*args.command, "--mode", mode, "--seed", str(seed), "--seeds", "1"]
    own = dict(mode=mode, seed=seed, seeds=1, out=os.path.join(args.out, f"{mode}-{seed}"), command=command)
    return argparse.Namespace(**vars(args) | own)


def is_finished(folder):
    return (folder / "args.json").is_file() and not (folder / output_dir.RUNNING).is_file()


def begin_whole(run):
    """Lock OUT and write the flags and the code, or compare the flags with those of the trials in OUT."""
    if hasattr(run, "lock"):
        return
    run.inputs = output_dir.fingerprints(run.args, run.known)
    with output_dir.locked(run.out, run.args.resume, run.rank) as run.lock:
        begun = run.args.resume and output_dir.has_run(run.out)
        if begun:
            was = json.loads((run.out / "args.json").read_text(encoding="utf-8"))
            output_dir.refuse_changes(was, run.flags(), run.out)
    if run.rank == 0 and not begun:
        output_dir.write_code(run.out, run.script, run.flags())


def sum_up(whole, trials, modes):
    """Say the scores of each mode, copy the best trial into OUT, and say how to load it. Without --dev, which
    compares trials, the first one is kept."""
    args = whole.args
    rows = [last_row(Path(trial.out) / "metrics.jsonl") for trial in trials]
    scores = [scores_of(row) for row in rows]
    for mode in modes:
        own = [i for i, trial in enumerate(trials) if trial.mode == mode]
        if scores[0]:
            say(mode, mean_and_spread([scores[i] for i in own], args.labels))
        for detector in rows[0].get("ood", {}):
            found = mean_and_spread([rows[i]["ood"][detector] for i in own])
            say("ood", f"mode {mode}, {detector}: {found}")
    best = 0
    if args.dev:                                               # the first of equal ones
        best = max(range(len(trials)), key=lambda i: scores[i][args.metric])
    trial = trials[best]
    whole.progress["saved"] = {"mode": trial.mode, "seed": trial.seed, **scores[best]}
    copy_trial(trial, whole)
    finish(whole, trial, scores[best], sum(row["skipped"] for row in rows))


def last_row(path):
    """The last row of a finished trial's metrics.jsonl."""
    try:
        row = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        return row | {"skipped": int(row["skipped"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"{path}: damaged ({type(error).__name__}); delete {path.parent}, and --resume trains it again")


def scores_of(row):
    """{metric: percent} on --dev and on the contrast set."""
    dev = {name.removeprefix("dev_"): score for name, score in row.items() if name.startswith("dev_")}
    return dev | row.get("contrast", {})


def mean_and_spread(runs, labels=()):
    """One line: the mean, deviation and best of each score over several runs; of one run its scores."""
    if len(runs) == 1:
        return describe_scores(runs[0], labels)
    parts = []
    for metric in runs[0]:
        values = [scores[metric] for scores in runs]
        best = min(values) if metric == "FPR95" else max(values)
        spread = np.std(values, ddof=1)
        parts.append(f"{metric_name(metric, labels)} {np.mean(values):.2f} ± {spread:.2f}, best {best:.2f}")
    return "; ".join(parts)


def copy_trial(trial, whole):
    """Copy a trial's model and metrics into OUT, whose flags and code are there already."""
    left = {"args.json", "state.pt", whole.script.name}
    with output_dir.new_files(whole) as aside:
        for file in Path(trial.out).iterdir():
            if file.is_file() and file.name not in left:
                shutil.copyfile(file, aside / file.name)
        write_card(aside, trial, whole)
