"""Plot time and memory of the losses against N, from results that python -m kernels.benchmark --json saved.

    python docs/plot_kernels.py docs/h200.json h200.png
    python docs/plot_kernels.py docs/h200.json kernels.png --loss nt_xent clip_loss info_nce

The extension of the image's name selects its format. This command needs matplotlib.
"""
import argparse
import math
import os
import sys

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))  # where kernels/ is
from kernels.benchmark import DEFAULT_SIZES, caption, in_mb, in_ms, largest_cases, load_result, name_ours
from kernels.training.errors import command, fail
from kernels.training.plot import new_figure

COLOURS = {"eager": "C7", "compile": "C5", "ours": "black", "triton": "C8", "blockwise": "C9", "torch": "C6",
           "memeff": "C0", "Inf-CL": "C1", "CCE": "C2", "Liger": "C3", "siglip-kernel": "C4"}


def plot(result, path):
    """Plot time (left panels) and memory (right panels) against N. The panels of a loss show the cases with
    the D and M of its largest case (if M = N there, those with this D and M = N). Skip losses with one N."""
    rows = [row for row in name_ours(result["rows"]) if "ms" in row]
    rows = [row for row in rows if row["set"] == rows[0]["set"]]
    titles = dict.fromkeys(panel_title(row) for row in largest_cases(rows))
    panels = {title: [row for row in rows if panel_title(row) == title] for title in titles}
    panels = {title: rows for title, rows in panels.items() if len({row["size"][0] for row in rows}) > 1}
    if not panels:
        fail("no loss has times for several N")
    figure, axes = new_figure(len(panels), 2, 4.7, 2, sharex=True)
    for (left, right), (title, rows) in zip(axes, panels.items()):
        left.set_title(f"{title}: time, ms", fontsize=10, loc="left")
        right.set_title("memory beside the inputs, MB", fontsize=10, loc="left")
        draw_curves(left, rows, "ms", in_ms)
        draw_curves(right, rows, "extra_mb", in_mb)
    for axis in axes[-1]:
        axis.set_xlabel("N: rows in the batch")
    figure.suptitle(caption(result), fontsize=10)
    figure.savefig(path, dpi=150)


def panel_title(row):
    n, m, d = row["size"]
    return f"{row['loss']}, D = {d:,}" + (f", M = {m:,}" if m != n else "")


def draw_curves(axis, rows, key, in_units):
    """Draw one line per implementation, and write its name and last value at the right edge of the panel. If
    the line ends before the right edge, write its last N, too."""
    largest_n, ends = max(row["size"][0] for row in rows), []
    for impl, colour in COLOURS.items():
        points = sorted((row["size"][0], max(row[key], 2 ** -8)) for row in rows
                        if row["impl"] == impl and key in row)
        if points:
            width, order = (2.6, 3) if impl == "ours" else (1.4, 2)
            axis.loglog(*zip(*points), "o-", markersize=4, color=colour, linewidth=width, zorder=order)
            n, value = points[-1]
            where = "" if n == largest_n else f" at N = {n:,}"
            ends.append((value, f"{impl} {in_units(value)}{where}", colour))
    axis.set_xscale("log", base=4)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.minorticks_off()
    axis.margins(0.05, 0.1)
    axis.tick_params(labelsize=8)
    low, high = map(math.log10, axis.get_ylim())
    if high - low < 2:                                         # show at least two powers of ten
        low, high = math.floor(low), math.ceil(high)
    axis.set_ylim(10 ** low, 10 ** high)
    write_labels(axis, ends, low, high)


def write_labels(axis, ends, low, high):
    """Write a label at the right edge for each (value, text, colour), near its value but without overlap.

    low, high    log10 of the limits of the y axis
    """
    ends = sorted(ends, reverse=True)
    places = [(math.log10(value) - low) / (high - low) for value, _, _ in ends]
    for i in reversed(range(len(ends) - 1)):                   # a label takes 0.12 of the panel's height
        places[i] = max(places[i], places[i + 1] + 0.12)
    for i, (_, text, colour) in enumerate(ends):
        places[i] = min(places[i], places[i - 1] - 0.12 if i else 1)
        axis.text(1.02, places[i], text, transform=axis.transAxes, color=colour, fontsize=9, va="center")


@command
def main(argv=None):
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.error = fail                                        # print a message without the usage text
    parser.add_argument("results", help="file that python -m kernels.benchmark --json wrote")
    parser.add_argument("image", help="file to write: .png, .svg or .pdf")
    parser.add_argument("--loss", nargs="+", choices=DEFAULT_SIZES, default=list(DEFAULT_SIZES),
                        metavar="LOSS", help=f"default: {', '.join(DEFAULT_SIZES)}")
    args = parser.parse_args(argv)
    result = load_result(args.results)
    rows = [row for row in result["rows"] if row["loss"] in args.loss]
    plot(result | {"rows": rows}, args.image)


if __name__ == "__main__":
    main()
