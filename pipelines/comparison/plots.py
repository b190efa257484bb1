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
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from pipelines.comparison import condition_plot, pareto, run_plots, sweep_plots
from pipelines.comparison.benchmark_plots import sizes
from pipelines.comparison.rows import Comparison
from pipelines.comparison.run_plots import Drawn

INK, PAGE = "#010203", "#040506"
"""Stand-ins for the page's colours of text and ground."""

STYLE: Any = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": INK, "legend.labelcolor": INK, "legend.framealpha": 0.0, "hatch.color": INK,
    "figure.facecolor": PAGE, "axes.facecolor": PAGE, "savefig.transparent": True, "svg.fonttype": "none",
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.labelsize": 9,
    "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.fontsize": 8, "text.parse_math": False,
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

    def alone(self) -> str:
        """The drawing as a file of its own, dark on white."""
        head, _, rest = self.svg.replace("currentColor", "#1c1e21").replace("var(--page)", "#ffffff").partition(" ")
        return f'{head} xmlns="http://www.w3.org/2000/svg" {rest}'


def plots(comparison: Comparison) -> list[Plot]:
    """All plots that the rows have something to show in."""
    makers: list[Callable[[Comparison], list[Drawn]]] = [
        sweep_plots.axes,
        sweep_plots.parallel_coordinates,
        run_plots.curves,
        condition_plot.condition,
        pareto.plot,
        run_plots.tokenizers,
        run_plots.beams,
    ]
    with rc_context(STYLE):
        prefix = re.sub(r"\W+", "-", comparison.selection.title)
        return [finished(drawn, prefix) for make in makers for drawn in make(comparison)]


def benchmark_plots(lines: Sequence[dict[str, Any]]) -> list[Plot]:
    """Throughput and memory by size."""
    with rc_context(STYLE):
        return [finished(drawn, "benchmark") for drawn in sizes(lines)]


def finished(drawn: Drawn, prefix: str) -> Plot:
    name, title, caption, figure = drawn
    return Plot(f"{prefix}-{name}", title, caption, svg(figure, f"{prefix}-{name}"))


def svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element whose ids begin with `name`, so that several stand in one page."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for number, axes in enumerate(figure.axes, 1):
        scales = " ".join(f'data-{axis.axis_name}="{scale(axis)}"' for axis in (axes.xaxis, axes.yaxis))
        text = text.replace(f'<g id="axes_{number}"', f'<g {scales} id="axes_{number}"')
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    return (
        text.replace(' xmlns="http://www.w3.org/2000/svg"', "")
        .replace(INK, "currentColor")
        .replace(PAGE, "var(--page)")
    )


def scale(axis: Axis) -> str:
    """What the page needs to make an axis's ticks anew when it zooms: `linear LOW HIGH`, `log LOW HIGH`, or `fixed`
    where ticks stand at chosen places."""
    low, high = axis.get_view_interval()
    free = not isinstance(axis.get_major_locator(), FixedLocator | NullLocator)
    return f"{axis.get_scale()} {low:.6g} {high:.6g}" if free else "fixed"
