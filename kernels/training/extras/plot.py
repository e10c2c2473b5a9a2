"""Pictures of runs: the loss and the dev score against the step, and two more where a run has what they show.

    python simcse.py --model scratch --data tests/data/nli.csv --dev tests/data/sts.tsv --out out/first
    python -m kernels.training.plot out/first --save first.png
    python -m kernels.training.plot out/first out/vascl out/dclr --save three.png       a line for each folder

An OUT is the folder of a run, which may still be at work: metrics.jsonl and args.json are read. Runs with
alignment and uniformity (simcse, selfguided, ease, vascl, dclr) get Wang and Isola's plane, tacl's get the
similarity of a sentence's tokens in each layer, selfguided's with --study the score of each layer; a
FILE.json of --study is an OUT too. Where childtuning.py has written several trials, each is a line, and those
of one mode have one colour. Wants matplotlib. The kernels' own time and memory is drawn by
python -m kernels.benchmark --plot.
"""
import argparse
import functools
import json
from pathlib import Path

from kernels.benchmark.figures import new_figure, save
from kernels.printing import fail

# what chooses the best checkpoint or is the paper's aim, where args.json names no metric; the first that a
# run has
SCORES = {"spearman": "dev Spearman · 100", "knn": "dev kNN, %", "top1": "dev top-1, %",
          "hits": "held-out hits, %", "accuracy": "dev accuracy, %", "f1": "dev F1 · 100",
          "matthews": "dev Matthews · 100", "pearson": "dev Pearson · 100"}


def read_runs(folder, name):
    """[(label, metric, rows)] of a folder, one for each trial where it has several. The metric is what
    args.json names, or None. A row of step 0 has no loss, it was measured before training."""
    if folder.endswith(".json"):
        return [(name, None, [{"study": read_study(Path(folder))}])]
    begun = (path for path in Path(folder).glob("*-*/metrics.jsonl") if path.stat().st_size)
    trials = sorted(path.parent for path in begun)
    if not trials:
        return [(name, *read_run(Path(folder)))]
    return [(f"{name} {trial.name.rpartition('-')[0]}", *read_run(trial)) for trial in trials]


def read_run(folder):
    """(metric, rows) of one run; a study is in the last row."""
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        metric = json.loads((folder / "args.json").read_text(encoding="utf-8")).get("metric")
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; wanted the --out folder of a run")
    except (ValueError, AttributeError):                       # also what is no UTF-8
        fail(f"{folder}: metrics.jsonl is no text, or args.json is damaged")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["step"] - (rows[-1]["loss"] if rows[-1]["step"] else 0)   # numbers: a text fails here
        except (ValueError, KeyError, TypeError):
            wanted = f"wanted a JSON object with step and loss, found {line[:40]!r}"
            fail(f"{path} line {number}: damaged; {wanted}")
    if not rows:
        fail(f"{path}: empty; the run has reported no step yet")
    if (study := folder / "study.json").is_file():
        rows[-1]["study"] = read_study(study)
    return metric, rows


def read_study(path):
    """{name: {pooling: the scores of its layers}}"""
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
        poolings, whole = study.pop("poolings"), functools.partial(zip, strict=True)
        return {name: dict(whole(poolings, whole(*layers))) for name, layers in study.items()}
    except OSError as error:
        fail(f"{path}: {error.strerror}; wanted what --study of selfguided.py wrote")
    except (ValueError, KeyError, TypeError, AttributeError):
        fail(f"{path}: damaged; wanted what --study of selfguided.py wrote")


def columns(rows, *keys):
    """[values, ...] of the keys over the rows that have them all."""
    found = ([row[key] for key in keys] for row in rows if all(key in row for key in keys))
    return [list(column) for column in zip(*found)]


def score_of(metric, rows):
    return next((key for key in ([metric] if metric else SCORES) if columns(rows, f"dev_{key}")), None)


def draw_loss(axis, label, metric, rows, colour):
    axis.plot(*columns(rows, "step", "loss"), color=colour, label=label)
    axis.set(xlabel="step", ylabel="training loss")


def draw_score(axis, label, metric, rows, colour):
    """Scores of several kinds share the axis: its label names them all."""
    score = score_of(metric, rows)
    axis.plot(*columns(rows, "step", f"dev_{score}"), "o-", markersize=3, color=colour, label=label)
    named = [x for x in axis.get_ylabel().split(" or ") if x]
    axis.set(xlabel="step", ylabel=" or ".join(dict.fromkeys([*named, SCORES.get(score, f"dev {score}")])))


def draw_plane(axis, label, metric, rows, colour):
    """From the hollow point to the large one; the middle and the end have their step."""
    steps, x, y = columns(rows, "step", "dev_uniformity", "dev_alignment")
    axis.plot(x, y, "o-", markersize=2.5, linewidth=1, color=colour, label=label)
    axis.plot(x[0], y[0], "o", color=colour, markerfacecolor="white")
    axis.plot(x[-1], y[-1], "o", markersize=8, color=colour)
    for i in sorted({0, len(steps) // 2, len(steps) - 1}):
        if i or not axis.texts:  # runs mostly begin at one place: the first one labels it
            text = f"step {steps[i]}" if i == 0 else steps[i]
            axis.annotate(text, (x[i], y[i]), (5, 5), textcoords="offset points", fontsize=8, color=colour)
    axis.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)")


def draw_layers(axis, label, metric, rows, colour):
    layers, = columns(rows, "dev_similarity")
    if "dev_similarity" in rows[0] and rows[0]["step"] == 0:
        axis.plot(layers[0], "o--", markersize=3, color=colour)
        axis.set_title("dashed: before training", fontsize=9)
    axis.plot(layers[-1], "o-", markersize=3, color=colour)
    axis.set(xlabel="layer (0: word embeddings)", ylabel="cosine of a sentence's tokens")
    axis.xaxis.get_major_locator().set_params(integer=True)


def draw_study(axis, label, metric, rows, colour):
    """A run's own panel: its colours are poolings."""
    study = rows[-1]["study"]
    for name, poolings in study.items():
        for i, scores in enumerate(poolings.values()):
            axis.plot(scores, "o--" if name == "untrained" else "o-", markersize=3, color=f"C{i}")
    axis.legend(axis.lines[-len(poolings) :], poolings, fontsize=8)
    axis.set_title(label + "; dashed: untrained" * ("untrained" in study), fontsize=9)
    axis.set(xlabel="layer (0: word embeddings)", ylabel=SCORES["spearman"])
    axis.xaxis.get_major_locator().set_params(integer=True)


# each with what a run must have to be in it
PANELS = ((draw_loss, lambda metric, rows: columns(rows, "loss")), (draw_score, score_of),
          (draw_plane, lambda metric, rows: columns(rows, "dev_alignment", "dev_uniformity")),
          (draw_layers, lambda metric, rows: columns(rows, "dev_similarity")))


def draw(runs, path):
    """One row of panels, those that some run has something for, under one legend."""
    labels = list(dict.fromkeys(label for label, _, _ in runs))
    panels = [(panel, [run for run in runs if wants(*run[1:])]) for panel, wants in PANELS]
    panels = [(panel, found) for panel, found in panels if found]
    panels += [(draw_study, [run]) for run in runs if columns(run[2], "study")]
    figure, axes = new_figure(1, len(panels), 4, 3.4)
    for axis, (panel, found) in zip(axes[0], panels):
        for run in found:
            panel(axis, *run, f"C{labels.index(run[0]) % 10}")
    handles = dict(zip(*reversed(axes[0][0].get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=6, frameon=False)
    save(figure, path)


def main(argv=None):
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.error = fail                                        # in one line, without the usage
    parser.add_argument("out", nargs="+", metavar="OUT", help="folders that --out of a script named")
    parser.add_argument("--save", required=True, metavar="FILE", help="the picture: .png, .svg, .pdf")
    args = parser.parse_args(argv)
    short = [Path(folder).resolve().name for folder in args.out]
    names = short if len(set(short)) == len(short) else args.out
    draw([run for folder, name in zip(args.out, names) for run in read_runs(folder, name)], args.save)


if __name__ == "__main__":
    main()
