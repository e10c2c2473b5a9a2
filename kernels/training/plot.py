"""Plot the training loss and the dev score of runs against the step, as one line per run.

    python simcse.py --model scratch --data tests/data/nli.csv --dev tests/data/sts.tsv --out out/first
    python -m kernels.training.plot out/first out/vascl out/dclr --save runs.png

RUN is the output folder of a run, which may still be in progress. This command needs matplotlib.
"""
import argparse
import json
from pathlib import Path

from .errors import command, fail


def read_run(folder, score):
    """Return (points of the loss, points of the dev score, name of the score) of a run. A point is (step,
    value). score: name of the score; None: the first score in metrics.jsonl."""
    lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    logged = [key.removeprefix("dev_") for row in rows for key in row if key.startswith("dev_")]
    name = score or next(iter(logged), None)
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    scores = [(row["step"], row[f"dev_{name}"]) for row in rows if f"dev_{name}" in row]
    return losses, scores, name


def new_figure(rows, columns, width, height, **shared):
    """Return (figure, array (rows, columns) of axes). width and height of an axis are in inches; `shared` are
    arguments of matplotlib's subplots."""
    try:
        from matplotlib.figure import Figure  # unlike pyplot, Figure opens no window
    except ImportError:
        fail("plots need the package matplotlib; run pip install matplotlib")
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.9", linewidth=0.6)
    return figure, axes


@command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail                                        # print a message without the usage text
    parser.add_argument("out", nargs="+", metavar="RUN", help="output folders (--out) of the runs to plot")
    parser.add_argument("--save", required=True, metavar="FILE", help="image to write: .png, .svg or .pdf")
    parser.add_argument("--score", metavar="NAME", help="dev score to plot; default the first of each run")
    args = parser.parse_args(argv)
    figure, ((left, right),) = new_figure(1, 2, 4, 3)
    names = []
    for folder in args.out:
        losses, scores, name = read_run(folder, args.score)
        line, = left.plot(*zip(*losses), label=folder.replace("$", r"\$"))     # matplotlib reads $x$ as math
        if scores:
            right.plot(*zip(*scores), "o-", markersize=3, color=line.get_color())
            names += [name] if name not in names else []
    left.set(xlabel="step", ylabel="training loss")
    right.set(xlabel="step", ylabel=f"dev {' or '.join(names)}")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    figure.savefig(args.save, dpi=150)


if __name__ == "__main__":
    main()
