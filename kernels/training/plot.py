"""Plot runs: training loss and dev score against the step, and further panels for what the runs have logged.

    python simcse.py --model scratch --data tests/data/nli.csv --dev tests/data/sts.tsv --out out/first
    python -m kernels.training.plot out/first --save first.png
    python -m kernels.training.plot out/first out/vascl out/dclr --save three.png    one line per folder

RUN is the output folder of a run, which may still be in progress. Further panels:

    alignment and uniformity (Wang and Isola)    runs of scripts for sentences with --dev
    similarity of a sentence's tokens, by layer  runs of tacl
    precision against recall, best checkpoint    runs of docs/more/cil.py

Each run is a line. Runs whose folder names differ only in a number at the end share a colour and an entry
in the legend: for out/D-42 and out/D-43, the entry is D. This command needs matplotlib.
"""
import argparse
import json
import re
from pathlib import Path

from .errors import command, fail

# Axis labels of dev scores. For a run without --metric, plot the first of these scores that the run logged.
METRIC_LABELS = {"spearman": "dev Spearman · 100", "knn": "dev kNN, %", "top1": "dev top-1, %",
                 "hits": "held-out hits, %", "accuracy": "dev accuracy, %", "f1": "dev F1 · 100",
                 "matthews": "dev Matthews · 100", "pearson": "dev Pearson · 100", "auc": "dev AUC · 100"}


def read_run(folder):
    """Return (axis label of the dev score, rows of metrics.jsonl) of a run. A row of step 0 was measured
    before training and has no loss. The dev score to plot is copied to the key "score"."""
    lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metric = json.loads(Path(folder, "args.json").read_text(encoding="utf-8")).get("metric")
    if not lines:
        fail(f"{folder}/metrics.jsonl: empty; the run has reported no step yet")
    rows = [json.loads(line) for line in lines]
    candidates = [metric] if metric else METRIC_LABELS
    score = next((key for key in candidates if values_of(rows, f"dev_{key}")), None)
    for row in rows:
        if f"dev_{score}" in row:
            row["score"] = row[f"dev_{score}"]
    return METRIC_LABELS.get(score, f"dev {score}"), rows


def label_runs(folders):
    """Return the label of each run in the legend: the name of its folder or, if two folders have the same
    name, the path. A number at the end is removed if several runs then have the same label."""
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = folders
    shared = [re.sub(r"-\d+$", "", name) for name in names]
    names = [short if shared.count(short) > 1 else name for short, name in zip(shared, names)]
    return [name.replace("$", r"\$") for name in names]       # Matplotlib would draw $x$ as a formula


def values_of(rows, *keys):
    """Return a list of values for each key, from the rows that have all keys; [] if no row has all keys."""
    found = ([row[key] for key in keys] for row in rows if all(key in row for key in keys))
    return [list(column) for column in zip(*found)]


def draw_loss(axis, label, score_label, rows, colour):
    axis.plot(*values_of(rows, "step", "loss"), color=colour, label=label)
    axis.set(xlabel="step", ylabel="training loss")


def draw_score(axis, label, score_label, rows, colour):
    """Draw the dev score. The axis label lists the metrics of all runs that were drawn on this axis."""
    axis.plot(*values_of(rows, "step", "score"), "o-", markersize=3, color=colour, label=label)
    listed = [x for x in axis.get_ylabel().split(" or ") if x] + [score_label]
    axis.set(xlabel="step", ylabel=" or ".join(dict.fromkeys(listed)))


def draw_alignment_uniformity(axis, label, score_label, rows, colour):
    """Draw the path of a run from a hollow marker (start) to a large marker (end, labelled with its step)."""
    steps, x, y = values_of(rows, "step", "dev_uniformity", "dev_alignment")
    axis.plot(x, y, "o-", markersize=2.5, linewidth=1, color=colour, label=label)
    axis.plot(x[0], y[0], "o", color=colour, markerfacecolor="white")
    axis.plot(x[-1], y[-1], "o", markersize=8, color=colour)
    axis.annotate(f"step {steps[-1]}", (x[-1], y[-1]), (5, 5), textcoords="offset points", color=colour)
    axis.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)")


def draw_token_similarity(axis, label, score_label, rows, colour):
    layers, = values_of(rows, "dev_similarity")
    if "dev_similarity" in rows[0] and rows[0]["step"] == 0:
        axis.plot(layers[0], "o--", markersize=3, color=colour)
        axis.set_title("dashed: before training", fontsize=9)
    axis.plot(layers[-1], "o-", markersize=3, color=colour)
    axis.set(xlabel="layer (0: word embeddings)", ylabel="cosine of a sentence's tokens")
    axis.xaxis.get_major_locator().set_params(integer=True)


def draw_precision_recall(axis, label, score_label, rows, colour):
    """Draw precision at each percent of recall, for the checkpoint with the largest area under this curve."""
    curves, areas = values_of(rows, "dev_curve", "dev_auc")
    curve = curves[areas.index(max(areas))]
    axis.plot([i / 100 for i in range(1, len(curve) + 1)], curve, color=colour, label=label)
    axis.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))


# {function that adds one run to a panel: keys of the data that a run needs for it}
PANELS = {draw_loss: ["loss"], draw_score: ["score"],
          draw_alignment_uniformity: ["dev_alignment", "dev_uniformity"],
          draw_token_similarity: ["dev_similarity"], draw_precision_recall: ["dev_curve", "dev_auc"]}


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


def save_figure(figure, path):
    """Save a figure to a file; its extension selects the format."""
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # matplotlib does not know the extension
        fail(f"{path}: {error}")


def draw(runs, path):
    """Draw a row of panels under one legend, and save it. Panels for which no run has data are left out."""
    labels = list(dict.fromkeys(label for label, _, _ in runs))
    panels = [(panel, [run for run in runs if values_of(run[2], *keys)]) for panel, keys in PANELS.items()]
    panels = [(panel, found) for panel, found in panels if found]
    figure, axes = new_figure(1, len(panels), 4, 3.4)
    for axis, (panel, found) in zip(axes[0], panels):
        for run in found:
            panel(axis, *run, f"C{labels.index(run[0]) % 10}")
    handles = dict(zip(*reversed(axes[0][0].get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=6, frameon=False)
    save_figure(figure, path)


@command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail                                        # print a message without the usage text
    parser.add_argument("out", nargs="+", metavar="RUN", help="output folders (--out) of the runs to plot")
    parser.add_argument("--save", required=True, metavar="FILE", help="image to write: .png, .svg or .pdf")
    args = parser.parse_args(argv)
    draw([(label, *read_run(folder)) for label, folder in zip(label_runs(args.out), args.out)], args.save)


if __name__ == "__main__":
    main()
