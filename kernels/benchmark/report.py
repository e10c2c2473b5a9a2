"""What the benchmark says of its rows: a line, a markdown table, a picture."""
from ..printing import fail, one_line
from .cases import IMPLS
from .figures import new_figure, save

COLUMNS = (("forward ms", "forward_ms", ".3g"), ("ms", "ms", ".4g"), ("20 %", "ms_20", ".4g"),
           ("80 %", "ms_80", ".4g"), ("extra MB", "extra_mb", ".0f"), ("error", "error", ".1e"),
           ("peak %", "peak_percent", ".0f"))


def cells(row):
    """A row's columns as text; one that failed has its reason behind the name."""
    name = [row["loss"], "x".join(map(str, row["size"])), row["set"], row["impl"]]
    if "failed" in row:
        return name + [row["failed"]]
    numbers = [format(row[key], style) if key in row else "" for _, key, style in COLUMNS]
    return name + numbers + ["  interpreted"] * row.get("interpreted", False)


def summary(row):
    """Milliseconds, memory and error, in a cell of the table."""
    style = ",.0f" if row["ms"] >= 100 else ",.3g"
    error = f", {row['error']:.0e}" if "error" in row else ""
    interpreted = "interpreted: " if row.get("interpreted") else ""
    return f"{interpreted}{format(row['ms'], style)} ms, {row['extra_mb']:,.0f} MB{error}"


def markdown(result):
    """A line a case and a column an implementation: ms of forward and backward, extra MB, error."""
    cases, impls = {}, list(dict.fromkeys(row["impl"] for row in result["rows"]))
    for row in result["rows"]:
        case = row["loss"], "x".join(map(str, row["size"])), row["set"]
        cases.setdefault(case, {})[row["impl"]] = row.get("failed") or summary(row)
    table = [["loss", "N x M x D", "rows", *impls], ["---"] * (3 + len(impls))]
    table += [[*case, *(found.get(impl, "") for impl in impls)] for case, found in cases.items()]
    head = ", ".join(f"{name} {value}" for name, value in result.items() if name not in ("rows", "command"))
    lines = [head, "", *("| " + " | ".join(line) + " |" for line in table)]
    return "\n".join(map(one_line, lines))                     # they may be a file's


def plot(result, path):
    """Time above memory against N: a column for each loss and width, a line for each implementation that was
    not interpreted."""
    done, cases = [row for row in result["rows"] if "ms" in row and not row.get("interpreted")], {}
    for row in done:
        n, m, d = row["size"]
        if row["set"] == done[0]["set"]:  # one kind of rows, the first that was measured
            title = f"{row['loss']}, D {d:,}" + (f", M {m:,}" if m != n else "")
            cases.setdefault(title, {}).setdefault(row["impl"], []).append((n, row["ms"], row["extra_mb"]))
    several = lambda lines: any(len(points) > 1 for points in lines.values())
    curves = {title: lines for title, lines in cases.items() if several(lines)}
    cases = curves or cases  # a single size is no curve: the table has it
    if not cases:
        fail("--plot: no row has a time")
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
    about = "forward + backward", done[0]["dtype"], result["device"], version, result["date"]
    figure.supxlabel(", ".join(about), fontsize=8, color="0.4")
    save(figure, path)


def draw_curves(axis, lines, column):
    """One panel of plot. At the largest N the highest and the lowest point have their number."""
    ends, largest = [], max(point[0] for points in lines.values() for point in points)
    for impl in sorted(lines, key=IMPLS.index):
        colour = [*(f"C{i}" for i in range(10)), "black"][IMPLS.index(impl)]
        least = 2 ** -8  # no memory is less than a page
        points = sorted((point[0], max(point[column], least)) for point in lines[impl])
        stands_out = impl in ("blockwise", "triton")  # ours
        thick = dict(linewidth=2.4, zorder=3) if stands_out else dict(linewidth=1.4)
        axis.loglog(*zip(*points), "o-", markersize=4, color=colour, label=impl, **thick)
        ends += [(value, colour) for n, value in points if n == largest]
    ends.sort()
    for (value, colour), side in ((ends[-1], "bottom"), (ends[0], "top"))[: len(ends)]:
        text, above = format(value, ",.0f" if value >= 100 else ",.1f"), 1 if side == "bottom" else -1
        axis.annotate(text, (largest, value), (5, above), textcoords="offset points", fontsize=8,
                      color=colour, verticalalignment=side)
    sizes = sorted({point[0] for points in lines.values() for point in points})
    has_room = [i == 0 or n > 2 * sizes[i - 1] for i, n in enumerate(sizes)]
    axis.set_xticks(sizes, [f"{n:,}" if room else "" for n, room in zip(sizes, has_room)])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.minorticks_off()
    axis.margins(0.08, 0.15)
