"""Render figures as SVG for light and dark pages, with values shown on hover.

    with plot_style():
        drawing = Drawing("pareto", "Accuracy against speed", caption, figure, hover)
        plot = render(drawing)

Figures are drawn in placeholder colours, which become `currentColor` and `var(--page)`
in the SVG, so that the page sets its colours. Browsers show the title of a marker on
hover.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK, PAGE = "#010203", "#040506"
"""Placeholders for the page's colours of text and background."""

STYLE: Any = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "legend.labelcolor": INK,
    "legend.framealpha": 0.0,
    "hatch.color": INK,
    "figure.facecolor": PAGE,
    "axes.facecolor": PAGE,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "text.parse_math": False,
}
"""Matplotlib's settings while a figure is drawn and rendered."""

SVG_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
"""Metadata to leave out, as it would differ between calls."""


@dataclass
class Drawing:
    """A figure that is not rendered yet."""

    name: str
    """Short name, which becomes the anchor in the page."""
    title: str
    """Heading."""
    caption: str
    """Explanation of the figure."""
    figure: Figure
    """Matplotlib figure to render as SVG."""
    hover: dict[str, list[str]] = field(default_factory=dict)
    """Text of each marker of a line, by the line's group id (`add_hover`)."""


@dataclass(frozen=True)
class Plot:
    """A rendered figure."""

    name: str
    """Short name, which is also the anchor in the page."""
    title: str
    """Heading."""
    caption: str
    """Explanation of the figure."""
    svg: str
    """The figure as an `<svg>` element."""

    def to_file(self) -> str:
        """Return the content of an SVG file, dark on white and without hover texts."""
        svg = re.sub(r"><title>[^<]*</title></use>", "/>", self.svg)
        svg = svg.replace("currentColor", "#1c1e21")
        tag, _, attributes = svg.replace("var(--page)", "#ffffff").partition(" ")
        return f'{tag} xmlns="http://www.w3.org/2000/svg" {attributes}'


def plot_style() -> Any:
    """Return a context manager that sets the style of figures."""
    return rc_context(STYLE)


def add_hover(hover: dict[str, list[str]], line: Line2D, texts: Sequence[str]) -> None:
    """Register the texts that a line's markers show on hover.

    Args:
        hover: Texts by group id, to which the line is added.
        line: The line, which gets a group id.
        texts: A text for each marker, in order.
    """
    group = f"hover{len(hover)}"
    line.set_gid(group)
    hover[group] = list(texts)


def render(drawing: Drawing, prefix: str = "") -> Plot:
    """Render a drawing as SVG.

    Args:
        drawing: Figure with its texts.
        prefix: Prefix of the name, which distinguishes the drawings of several
            comparisons on one page.
    """
    name = f"{prefix}{drawing.name}"
    svg = to_svg(drawing.figure, name, drawing.hover)
    return Plot(name, drawing.title, drawing.caption, svg)


def to_svg(figure: Figure, name: str, hover: dict[str, list[str]] | None = None) -> str:
    """Return a figure as an `<svg>` element.

    Args:
        figure: The figure, drawn with `plot_style`.
        name: Prefix of all ids in the element, unique on the page.
        hover: Texts by group id (`add_hover`).
    """
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=SVG_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for group, texts in (hover or {}).items():
        svg = add_titles(svg, group, texts)
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    svg = svg.replace("xlink:href", "href")
    svg = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return svg.replace(INK, "currentColor").replace(PAGE, "var(--page)")


def add_titles(svg: str, group: str, texts: Sequence[str]) -> str:
    """Return an SVG with titles added to the markers of one group.

    Args:
        svg: The SVG.
        group: Id of the group.
        texts: A title for each marker, in order.
    """
    begin = svg.index(f'<g id="{group}">')
    end = svg.find('<g id="', begin + 1)
    titles: Iterator[str] = iter(texts)

    def add_title(marker: re.Match[str]) -> str:
        return f"{marker[1]}><title>{escape(next(titles))}</title></use>"

    markers = re.sub(r"(<use [^>]*?)\s*/>", add_title, svg[begin:end])
    return svg[:begin] + markers + svg[end:]


def to_label(name: str) -> str:
    """Return a name as a label of a legend.

    Matplotlib leaves out labels that begin with `_`, so a space is put before it.
    """
    return f" {name}" if name.startswith("_") else name
