"""Figures with one style for benchmark and training plots. They need matplotlib."""
from pathlib import Path

from ..printing import fail


def new_figure(rows, columns, width, height, **shared):
    """Return (figure, axes (rows, columns)).

    width, height    of each panel, in inches
    shared           sharex and sharey of matplotlib's subplots
    """
    try:
        from matplotlib.figure import Figure  # unlike pyplot, this opens no window and needs no backend
    except ImportError:
        fail("plots need the package matplotlib; run pip install matplotlib")
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
        if Path(path).suffix == ".png":  # 64 colours are enough for lines and take a third of the bytes
            from PIL import Image  # matplotlib depends on Pillow
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the extension
        fail(f"{path}: {getattr(error, 'strerror', None) or error}")
