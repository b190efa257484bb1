"""Create Matplotlib figures with common colours, axes and layout.

figure, (axes,) = new_figure(1)
label_axes(axes, "optimizer step", "val/ndcg@10")
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
"""Tol's bright scheme, which colour-blind readers can distinguish on light and dark
backgrounds."""

NEUTRAL = "#888888"
"""Colour of lines that connect several models."""

MARKERS = "os^Dv"
"""Markers that distinguish lines of one colour."""

MAX_TICKS = 8
"""Largest number of ticks on a logarithmic axis."""


def new_figure(
    columns: int, rows: int = 1, width: float = 4.6, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes in row-major order.

    Args:
        columns: Number of columns of axes.
        rows: Number of rows of axes.
        width: Width of a column in inches; the figure is at least 6 inches wide.
        height: Height of a row in inches.
    """
    figure = Figure(
        figsize=(max(columns * width, 6), rows * height), layout="constrained"
    )
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def label_axes(axes: Axes, x: str, y: str, legend: bool = False) -> None:
    """Label both axes, and draw a faint grid and optionally a legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.15)
    if legend:
        axes.legend()


def make_logarithmic(axes: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers as ticks: 300, 500, 1,000.

    Matplotlib's default ticks are mathematical markup, which an SVG with text elements
    shows unrendered.
    """
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FewTicks())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


class FewTicks(LogLocator):
    """Tick locator of a logarithmic axis with at most `MAX_TICKS` ticks."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """Return the positions of the ticks."""
        if vmax < 3 * vmin:
            return MaxNLocator(MAX_TICKS).tick_values(vmin, vmax)
        for factors in (
            (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
            (1.0, 2.0, 5.0),
            (1.0, 3.0),
            (1.0,),
        ):
            self.set_params(subs=factors)
            values = super().tick_values(vmin, vmax)
            if sum(vmin <= value <= vmax for value in values) <= MAX_TICKS:
                break
        return values
