"""Figures with the same look everywhere. Wants matplotlib."""
from pathlib import Path

from ..printing import fail


def new_figure(rows, columns, width, height, **shared):
    """(figure, axes (rows, columns)) in the house's look; width and height are a panel's, in inches."""
    try:
        from matplotlib.figure import Figure  # without pyplot no window and no backend
    except ImportError:
        fail("wants the package matplotlib: pip install matplotlib")
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def save(figure, path):
    try:
        figure.savefig(path, dpi=150)
        if Path(path).suffix == ".png":  # 64 colours are enough for lines, and a third of the bytes
            from PIL import Image  # comes with matplotlib
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        fail(f"{path}: {getattr(error, 'strerror', None) or error}")
