"""Draw the figures of kernels.benchmark; kernels.training.plot uses their style too. Needs matplotlib."""
import math
import sys

COLOURS = {"eager": "C7", "compiled": "C5", "ours": "black", "torch": "C6", "memeff": "C0", "Inf-CL": "C1",
           "CCE": "C2", "Liger": "C3", "siglip-kernel": "C4"}


def caption(result):
    """Return one line that says on which device, in which dtypes and when the results were measured."""
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in result["rows"]))
    return f"Forward + backward, {dtypes}: {result['device']}, torch {result['torch']}, {result['date']}"


def in_ms(ms):
    """Return a time in milliseconds as text with its unit."""
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def in_mb(mb):
    """Return a memory size in MB as text with its unit, which is GB from 1024 MB on."""
    if mb >= 1024:
        return f"{mb / 1024:.1f} GB"
    return f"{mb:.0f} MB" if mb >= 10 else f"{mb:.2g} MB"


def largest_cases(rows):
    """Return only the results for the largest size N·M·D of each loss."""
    largest = {row["loss"]: row["size"] for row in sorted(rows, key=lambda row: math.prod(row["size"]))}
    return [row for row in rows if row["size"] == largest[row["loss"]]]


def plot(result, path):
    """Plot time (left panels) and memory (right panels) against N. The panels of a loss show the cases with
    the D and M of its largest case (if M = N there, those with this D and M = N). Skip losses with one N."""
    rows = [row for row in result["rows"] if "ms" in row and row["set"] == result["rows"][0]["set"]]
    titles = dict.fromkeys(panel_title(row) for row in largest_cases(rows))
    panels = {title: [row for row in rows if panel_title(row) == title] for title in titles}
    panels = {title: rows for title, rows in panels.items() if len({row["size"][0] for row in rows}) > 1}
    if not panels:
        sys.exit("--plot: no loss has times for several N")
    figure, axes = new_figure(len(panels), 2, 4.7, 2, sharex=True)
    for (left, right), (title, rows) in zip(axes, panels.items()):
        left.set_title(f"{title}: time, ms", fontsize=10, loc="left")
        right.set_title("memory beside the inputs, MB", fontsize=10, loc="left")
        draw_curves(left, rows, "ms", in_ms)
        draw_curves(right, rows, "extra_mb", in_mb)
    for axis in axes[-1]:
        axis.set_xlabel("N: rows in the batch")
    figure.suptitle(caption(result), fontsize=10)
    save_figure(figure, path)


def panel_title(row):
    n, m, d = row["size"]
    return f"{row['loss']}, D = {d:,}" + (f", M = {m:,}" if m != n else "")


def draw_curves(axis, rows, key, in_units):
    """Draw one line per implementation, and write its name and last value at the right edge of the panel."""
    ends = []
    for impl, colour in COLOURS.items():
        points = sorted((row["size"][0], max(row[key], 2 ** -8)) for row in rows
                        if row["impl"] == impl and key in row)
        if points:
            width, order = (2.6, 3) if impl == "ours" else (1.4, 2)
            axis.loglog(*zip(*points), "o-", markersize=4, color=colour, linewidth=width, zorder=order)
            ends.append((points[-1][1], f"{impl} {in_units(points[-1][1])}", colour))
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
    ends.sort(reverse=True)
    places = [(math.log10(value) - low) / (high - low) for value, _, _ in ends]
    for i in reversed(range(len(ends) - 1)):                   # a label takes 0.12 of the panel's height
        places[i] = max(places[i], places[i + 1] + 0.12)
    for i, (_, text, colour) in enumerate(ends):
        places[i] = min(places[i], places[i - 1] - 0.12 if i else 1)
        axis.text(1.02, places[i], text, transform=axis.transAxes, color=colour, fontsize=9, va="center")


def new_figure(rows, columns, width, height, **shared):
    """Return (figure, axes), where axes is an array (rows, columns) of panels.

    width, height    of each panel, in inches
    shared           arguments sharex and sharey of matplotlib's subplots
    """
    try:
        from matplotlib.figure import Figure  # unlike pyplot, Figure opens no window
    except ImportError:
        sys.exit("plots need the package matplotlib; run pip install matplotlib")
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def save_figure(figure, path):
    """Save a figure to a file; its extension selects the format."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the extension
        sys.exit(f"{path}: {getattr(error, 'strerror', None) or error}")
