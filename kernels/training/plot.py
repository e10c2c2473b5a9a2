"""Plot runs: training loss and dev score against the step, and further panels for what the runs have logged.

    python simcse.py --model scratch --data tests/data/nli.csv --dev tests/data/sts.tsv --out out/first
    python -m kernels.training.plot out/first --save first.png
    python -m kernels.training.plot out/first out/vascl out/dclr --save three.png    one line per folder

RUN is the output folder of a run, which may still be in progress. Its metrics.jsonl and args.json are read.
Further panels:

    alignment and uniformity (Wang and Isola)    runs of simcse, selfguided, ease, vascl and dclr with --dev
    similarity of a sentence's tokens, by layer  runs of tacl
    precision against recall, best checkpoint    runs of docs/eleventh/cil.py
    score of each layer and pooling              runs of selfguided with --layer-study; RUN may also be a
                                                 FILE.json that --layer-study wrote

A RUN may contain runs in folders NAME-SEED, such as F-42 of childtuning.py. Each is a line, and those of one
NAME have one colour.
This command needs matplotlib. python -m kernels.benchmark --plot plots the time and memory of the kernels.
"""
import argparse
import functools
import json
from pathlib import Path

from kernels.figures import new_figure, save_figure

from .errors import command, fail

# Axis labels of dev scores. If args.json names no metric, the first of these that the run has logged is used:
# the score that selects the best checkpoint, or that the paper is about.
METRIC_LABELS = {"spearman": "dev Spearman · 100", "knn": "dev kNN, %", "top1": "dev top-1, %",
                 "hits": "held-out hits, %", "accuracy": "dev accuracy, %", "f1": "dev F1 · 100",
                 "matthews": "dev Matthews · 100", "pearson": "dev Pearson · 100",
                 "auc": "dev AUC · 100"}


def read_runs(folder, name):
    """Return [(label, metric, rows)] of a folder: one run, or one for each run in a folder NAME-SEED.

    metric   the metric that args.json names, or None
    rows     the rows of metrics.jsonl; a row of step 0 was measured before training and has no loss
    """
    if folder.endswith(".json"):
        return [(name, None, [{"study": read_study(Path(folder))}])]
    started = (path for path in Path(folder).glob("*-*/metrics.jsonl") if path.stat().st_size)
    trials = sorted(path.parent for path in started)
    if not trials:
        return [(name, *read_run(Path(folder)))]
    return [(f"{name} {trial.name.rpartition('-')[0]}", *read_run(trial)) for trial in trials]


def read_run(folder):
    """Return (metric, rows) of one run; the last row gets its layer study, if there is one."""
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        metric = json.loads((folder / "args.json").read_text(encoding="utf-8")).get("metric")
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; expected the --out folder of a run")
    except (ValueError, AttributeError):                       # also if a file is not UTF-8
        fail(f"{folder}: metrics.jsonl is not text, or args.json is damaged")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            # raises TypeError unless both are numbers
            rows[-1]["step"] - (rows[-1]["loss"] if rows[-1]["step"] else 0)
        except (ValueError, KeyError, TypeError):
            expected = "expected a JSON object with step and loss"
            fail(f"{path} line {number}: damaged; found {line[:40]!r}, {expected}")
    if not rows:
        fail(f"{path}: empty; the run has reported no step yet")
    study = folder / "study.json"
    if study.is_file():
        rows[-1]["study"] = read_study(study)
    return metric, rows


def read_study(path):
    """Return {name of the encoder: {pooling: scores of its layers}} of a file that --layer-study wrote."""
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
        poolings, strict_zip = study.pop("poolings"), functools.partial(zip, strict=True)
        return {name: dict(strict_zip(poolings, strict_zip(*layers))) for name, layers in study.items()}
    except OSError as error:
        fail(f"{path}: {error.strerror}; expected a file that selfguided.py --layer-study wrote")
    except (ValueError, KeyError, TypeError, AttributeError):
        fail(f"{path}: damaged; expected a file that selfguided.py --layer-study wrote")


def values_of(rows, *keys):
    """Return a list of values for each key, from the rows that have all of the keys; [] if there are none."""
    found = ([row[key] for key in keys] for row in rows if all(key in row for key in keys))
    return [list(column) for column in zip(*found)]


def score_of(metric, rows):
    """Return the name of the dev score to plot for a run, or None if it has none."""
    candidates = [metric] if metric else METRIC_LABELS
    return next((key for key in candidates if values_of(rows, f"dev_{key}")), None)


# Each draw_ function adds one run to an axis.


def draw_loss(axis, label, metric, rows, colour):
    axis.plot(*values_of(rows, "step", "loss"), color=colour, label=label)
    axis.set(xlabel="step", ylabel="training loss")


def draw_score(axis, label, metric, rows, colour):
    """Runs with different metrics share the axis, whose label lists all of these metrics."""
    score = score_of(metric, rows)
    axis.plot(*values_of(rows, "step", f"dev_{score}"), "o-", markersize=3, color=colour, label=label)
    listed = [x for x in axis.get_ylabel().split(" or ") if x]
    listed.append(METRIC_LABELS.get(score, f"dev {score}"))
    axis.set(xlabel="step", ylabel=" or ".join(dict.fromkeys(listed)))


def draw_alignment_uniformity(axis, label, metric, rows, colour):
    """Draw the path of a run from a hollow marker to a large one. Its middle and end are labelled with
    steps."""
    steps, x, y = values_of(rows, "step", "dev_uniformity", "dev_alignment")
    axis.plot(x, y, "o-", markersize=2.5, linewidth=1, color=colour, label=label)
    axis.plot(x[0], y[0], "o", color=colour, markerfacecolor="white")
    axis.plot(x[-1], y[-1], "o", markersize=8, color=colour)
    for i in sorted({0, len(steps) // 2, len(steps) - 1}):
        if i or not axis.texts:            # most runs start at the same point: only the first labels it
            text = f"step {steps[i]}" if i == 0 else steps[i]
            axis.annotate(text, (x[i], y[i]), (5, 5), textcoords="offset points", fontsize=8, color=colour)
    axis.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)")


def draw_token_similarity(axis, label, metric, rows, colour):
    layers, = values_of(rows, "dev_similarity")
    if "dev_similarity" in rows[0] and rows[0]["step"] == 0:
        axis.plot(layers[0], "o--", markersize=3, color=colour)
        axis.set_title("dashed: before training", fontsize=9)
    axis.plot(layers[-1], "o-", markersize=3, color=colour)
    axis.set(xlabel="layer (0: word embeddings)", ylabel="cosine of a sentence's tokens")
    axis.xaxis.get_major_locator().set_params(integer=True)


def draw_precision_recall(axis, label, metric, rows, colour):
    """Draw the curve of the checkpoint with the best area under it, a point per percent of recall."""
    curves, areas = values_of(rows, "dev_curve", "dev_auc")
    curve = curves[areas.index(max(areas))]
    axis.plot([i / 100 for i in range(1, len(curve) + 1)], curve, color=colour, label=label)
    axis.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))


def draw_study(axis, label, metric, rows, colour):
    """A layer study has a panel of its own, in which colours stand for poolings instead of runs."""
    study = rows[-1]["study"]
    for name, poolings in study.items():
        for i, scores in enumerate(poolings.values()):
            axis.plot(scores, "o--" if name == "untrained" else "o-", markersize=3, color=f"C{i}")
    axis.legend(axis.lines[-len(poolings) :], poolings, fontsize=8)
    axis.set_title(f"{label}; dashed: untrained" if "untrained" in study else label, fontsize=9)
    axis.set(xlabel="layer (0: word embeddings)", ylabel=METRIC_LABELS["spearman"])
    axis.xaxis.get_major_locator().set_params(integer=True)


# (function that draws a panel, function of (metric, rows) that is true if the run has data for it)
PANELS = ((draw_loss, lambda metric, rows: values_of(rows, "loss")), (draw_score, score_of),
          (draw_alignment_uniformity,
           lambda metric, rows: values_of(rows, "dev_alignment", "dev_uniformity")),
          (draw_token_similarity, lambda metric, rows: values_of(rows, "dev_similarity")),
          (draw_precision_recall, lambda metric, rows: values_of(rows, "dev_curve", "dev_auc")))


def draw(runs, path):
    """Draw a row of panels under one legend. A panel without data of any run is left out."""
    labels = list(dict.fromkeys(label for label, _, _ in runs))
    panels = [(panel, [run for run in runs if has_data(*run[1:])]) for panel, has_data in PANELS]
    panels = [(panel, found) for panel, found in panels if found]
    panels += [(draw_study, [run]) for run in runs if values_of(run[2], "study")]
    figure, axes = new_figure(1, len(panels), 4, 3.4)
    for axis, (panel, found) in zip(axes[0], panels):
        for run in found:
            panel(axis, *run, f"C{labels.index(run[0]) % 10}")
    handles = dict(zip(*reversed(axes[0][0].get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=6, frameon=False)
    save_figure(figure, path)


@command
def main(argv=None):
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.error = fail                                        # one line, without argparse's usage text
    parser.add_argument("out", nargs="+", metavar="RUN", help="output folders (--out) of the runs to plot")
    parser.add_argument("--save", required=True, metavar="FILE",
                        help="image file to write: .png, .svg or .pdf")
    args = parser.parse_args(argv)
    short = [Path(folder).resolve().name for folder in args.out]
    names = short if len(set(short)) == len(short) else args.out
    names = [name.replace("$", r"\$") for name in names]       # Matplotlib would draw it as mathematics
    draw([run for folder, name in zip(args.out, names) for run in read_runs(folder, name)], args.save)
