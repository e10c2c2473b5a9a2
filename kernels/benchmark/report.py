"""Output of the benchmark: a printed line, a markdown table, a plot. `row` is one result, a dict."""
from ..printing import fail, one_line
from .cases import IMPLS
from .figures import new_figure, save_figure

COLUMNS = (("forward ms", "forward_ms", ".3g"), ("ms", "ms", ".4g"), ("20 %", "ms_20", ".4g"),
           ("80 %", "ms_80", ".4g"), ("extra MB", "extra_mb", ".0f"), ("error", "error", ".1e"),
           ("peak %", "peak_percent", ".0f"))
COLOURS = dict(zip(IMPLS, [*(f"C{i}" for i in range(10)), "black", "navy", "gold"], strict=True))


def cells(row):
    """Return the columns of a result as text: loss, size, set and implementation, then the numbers, or the
    reason of a failure."""
    texts = [row["loss"], "x".join(map(str, row["size"])), row["set"], row["impl"]]
    if "failed" in row:
        return texts + [row["failed"]]
    texts += [format(row[key], style) if key in row else "" for _, key, style in COLUMNS]
    if row.get("interpreted"):
        texts.append("  interpreted")
    return texts


def summary(row):
    """Return time, memory and error as text for a cell of the markdown table."""
    style = ",.0f" if row["ms"] >= 100 else ",.3g"
    error = f", {row['error']:.0e}" if "error" in row else ""
    interpreted = "interpreted: " if row.get("interpreted") else ""
    return f"{interpreted}{format(row['ms'], style)} ms, {row['extra_mb']:,.0f} MB{error}"


def markdown(result):
    """Return a markdown table with one line per case (loss, size, set) and one column per implementation.
    Cells have the time of forward and backward pass, extra memory and error."""
    cases, impls = {}, list(dict.fromkeys(row["impl"] for row in result["rows"]))
    for row in result["rows"]:
        case = row["loss"], "x".join(map(str, row["size"])), row["set"]
        cases.setdefault(case, {})[row["impl"]] = row.get("failed") or summary(row)
    table = [["loss", "N x M x D", "set", *impls], ["---"] * (3 + len(impls))]
    table += [[*case, *(found.get(impl, "") for impl in impls)] for case, found in cases.items()]
    head = ", ".join(f"{name} {value}" for name, value in result.items() if name not in ("rows", "command"))
    lines = [head, "", *("| " + " | ".join(line) + " |" for line in table)]
    return "\n".join(map(one_line, lines))                 # a file of --from may hold control characters


def plot(result, path):
    """Plot time (upper row of panels) and extra memory (lower row) against N, on logarithmic axes. There is
    one column of panels per loss and D, and one line per implementation, without interpreted results."""
    done = [row for row in result["rows"] if "ms" in row and not row.get("interpreted")]
    cases = {}                                         # {title: {implementation: [(N, ms, extra MB), ...]}}
    for row in done:
        n, m, d = row["size"]
        if row["set"] == done[0]["set"]:  # plot one set of inputs only, the first
            title = f"{row['loss']}, D {d:,}" + (f", M {m:,}" if m != n else "")
            cases.setdefault(title, {}).setdefault(row["impl"], []).append((n, row["ms"], row["extra_mb"]))
    curves = {title: lines for title, lines in cases.items() if max(map(len, lines.values())) > 1}
    cases = curves or cases  # leave out cases with a single size, unless there are no others
    if not cases:
        fail("--plot: no result has a time")
    figure, axes = new_figure(2, len(cases), 3.4, 2.1, sharex="col")
    for column, (title, lines) in zip(axes.T, cases.items()):
        column[0].set_title(title, fontsize=10)
        draw_curves(column[0], lines, 1)
        draw_curves(column[1], lines, 2)
        column[1].set_xlabel("N")
    axes[0, 0].set_ylabel("time, ms")
    axes[1, 0].set_ylabel("extra memory, MB")
    handles = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=5, frameon=False)
    version = f"torch {result['torch']}"
    caption = "forward + backward", done[0]["dtype"], result["device"], version, result["date"]
    figure.supxlabel(", ".join(caption), fontsize=8, color="0.4")
    save_figure(figure, path)


def draw_curves(axis, lines, column):
    """Draw one panel of plot. At the largest N, the highest and the lowest point are labelled with their
    value.

    lines     {implementation: [(N, ms, extra MB)]}
    column    1: ms is on the y axis; 2: extra MB is on the y axis
    """
    ends, largest = [], max(point[0] for points in lines.values() for point in points)
    for impl in sorted(lines, key=IMPLS.index):
        colour = COLOURS[impl]
        smallest = 2 ** -8  # MB, one page: a logarithmic axis has no 0
        points = sorted((point[0], max(point[column], smallest)) for point in lines[impl])
        is_highlighted = impl in ("blockwise", "triton", "auto")  # this package's
        style = dict(linewidth=2.4, zorder=3) if is_highlighted else dict(linewidth=1.4)
        axis.loglog(*zip(*points), "o-", markersize=4, color=colour, label=impl, **style)
        ends += [(value, colour) for n, value in points if n == largest]
    ends.sort()
    for (value, colour), side in ((ends[-1], "bottom"), (ends[0], "top"))[: len(ends)]:
        text = format(value, ",.0f" if value >= 100 else ",.1f")
        offset = 1 if side == "bottom" else -1
        axis.annotate(text, (largest, value), (5, offset), textcoords="offset points", fontsize=8,
                      color=colour, verticalalignment=side)
    sizes = sorted({point[0] for points in lines.values() for point in points})
    has_room = [i == 0 or n > 2 * sizes[i - 1] for i, n in enumerate(sizes)]
    axis.set_xticks(sizes, [f"{n:,}" if room else "" for n, room in zip(sizes, has_room)])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.minorticks_off()
    axis.margins(0.08, 0.15)
