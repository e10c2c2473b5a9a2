"""Compare the modes of childtuning.py over several seeds.

    python -m kernels.training.papers.childtuning_modes out/rte

FOLDER contains the --out folders of the runs. For each mode, the program prints the mean ± standard deviation
and the best value of each score at the last step. It names unfinished runs and leaves them out.
"""
import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from statistics import mean, stdev

from ..errors import command, fail, log
from ..out import UNFINISHED
from ..text.classifier import describe_scores, metric_name


def read_run(folder):
    """Return (mode, labels, scores, {detector of out-of-distribution texts: scores}) of a finished run."""
    args = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    row = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    scores = {name.removeprefix("dev_"): score for name, score in row.items() if name.startswith("dev_")}
    return args.get("mode", "runs"), args["labels"], scores | row.get("contrast", {}), row.get("ood", {})


def mean_and_spread(runs, labels):
    """Return a text: mean ± standard deviation and best value of each score or, for one run, the scores."""
    if len(runs) == 1:
        return describe_scores(runs[0], labels)
    parts = []
    for metric in runs[0]:
        values = [scores[metric] for scores in runs]
        best = min(values) if metric == "FPR95" else max(values)
        found = f"{mean(values):.2f} ± {stdev(values):.2f}, best {best:.2f}"
        parts.append(f"{metric_name(metric, labels)} {found}")
    return "; ".join(parts)


@command
def main(argv=None):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.error = fail                                        # print a message without the usage text
    parser.add_argument("folder", metavar="FOLDER", help="folder that contains the --out folders of the runs")
    folder, modes = Path(parser.parse_args(argv).folder), {}
    for run in sorted(path.parent for path in folder.glob("*/args.json")):
        if (run / UNFINISHED).exists():
            log("note", f"{run}: unfinished, left out")
            continue
        mode, labels, *scores = read_run(run)
        modes.setdefault(mode, []).append(scores)
    if not modes:
        fail(f"{folder}: no finished run; expected a folder that contains the --out folders of runs")
    for mode, runs in modes.items():
        log(mode, mean_and_spread([scores for scores, _ in runs], labels))
        for detector in runs[0][1]:
            log("ood", f"{detector}: {mean_and_spread([found[detector] for _, found in runs], labels)}")


if __name__ == "__main__":
    main()
