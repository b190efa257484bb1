"""Figures of plots, and the colours that all of them have."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
"""Told apart by people who see colours differently (Tol's bright scheme), on light and on dark ground."""


def new_figure(columns: int, rows: int = 1, width: float = 4.6, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` x `columns` axes."""
    figure = Figure(figsize=(max(columns * width, 6), rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)
