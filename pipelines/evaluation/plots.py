"""The plots of a comparison, each only where its runs exist, as SVG that stands in a page of either colour scheme.

    for plot in plots(compare(select(uri, ["retrieval/DATASET"]))): plot.svg

Drawn with two stand-in colours, which the SVG names `currentColor` and `var(--page)`: the page decides.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from pipelines.evaluation import benchmark_plots, pareto, run_plots, sweep_plots
from pipelines.evaluation.comparison import Comparison

INK, PAGE = "#010203", "#040506"
"""Stand-ins for the page's colours of text and ground."""

STYLE = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": INK, "legend.labelcolor": INK, "legend.framealpha": 0.0, "hatch.color": INK,
    "figure.facecolor": PAGE, "axes.facecolor": PAGE, "savefig.transparent": True, "svg.fonttype": "none",
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.labelsize": 9,
    "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.fontsize": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A plot with its words."""

    name: str
    """Short name, which is also its anchor in the page."""
    title: str
    """Heading."""
    caption: str
    """What is seen, and which figure of a paper shows the same."""
    svg: str
    """The drawing."""


def plots(comparison: Comparison, benchmark: Sequence[dict[str, Any]] = ()) -> list[Plot]:
    """All plots that the rows, and lines of jobs.benchmark, have something to show in."""
    makers: list[Callable[[], list[tuple[str, str, str, Figure | None]]]] = [
        lambda: sweep_plots.axes(comparison),
        lambda: sweep_plots.parallel_coordinates(comparison),
        lambda: run_plots.curves(comparison),
        lambda: pareto.plot(comparison),
        lambda: run_plots.tokenizers(comparison),
        lambda: run_plots.beams(comparison),
        lambda: benchmark_plots.sizes(benchmark),
    ]
    made = []
    with rc_context(STYLE):
        for make in makers:
            for name, title, caption, figure in make():
                if figure is not None:
                    made.append(Plot(name, title, caption, svg(figure, name)))
    return made


def svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element whose ids begin with `name`, so that several stand in one page."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    return (
        text.replace(' xmlns="http://www.w3.org/2000/svg"', "")
        .replace(INK, "currentColor")
        .replace(PAGE, "var(--page)")
    )
