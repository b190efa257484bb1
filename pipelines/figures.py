"""Figures of plots, and the colours that all of them have."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
"""Told apart by people who see colours differently (Tol's bright scheme), on light and on dark ground."""

TICKS = 8
"""Ticks of a logarithmic axis, at most, unless it spans more decades."""


def logarithmic(axes: Axes, x: bool) -> None:
    """Makes the x axis, or else the y axis, logarithmic, with ticks that are plain numbers: 300, 500, 1,000.
    Matplotlib's own are mathematical markup, which text in an SVG shows as it is."""
    if x:
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis = axes.xaxis if x else axes.yaxis
    axis.set_major_locator(FewTicks())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


class FewTicks(LogLocator):
    """As many ticks as do not run into each other: of several decades fewer in each, of a part of one evenly spaced."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        if vmax < 3 * vmin:
            return MaxNLocator(TICKS).tick_values(vmin, vmax)
        for factors in (
            (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
            (1.0, 2.0, 5.0),
            (1.0, 3.0),
            (1.0,),
        ):
            self.set_params(subs=factors)
            values = super().tick_values(vmin, vmax)
            if sum(vmin <= value <= vmax for value in values) <= TICKS:
                break
        return values


def new_figure(
    columns: int, rows: int = 1, width: float = 4.6, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` x `columns` axes."""
    figure = Figure(
        figsize=(max(columns * width, 6), rows * height), layout="constrained"
    )
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def say_axes(axes: Axes, x: str, y: str, legend: bool = False) -> None:
    """Labels of both axes, a faint grid and, where asked for, a legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.15)
    if legend:
        axes.legend()
