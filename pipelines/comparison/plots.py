"""The plots of a comparison, each only where its runs exist, as SVG that stands in a page of either colour scheme.

    for plot in plots(compare(select(uri, ["retrieval/DATASET"]))): plot.svg

Drawn are the validation of all models beside each other, what each setting of a sweep does, learning curves, and
accuracy against throughput. The colours of text and
ground are stand-ins, which the SVG names `currentColor` and `var(--page)`: the page decides.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from pipelines.comparison.rows import Comparison, Row, lower_is_better
from pipelines.figures import COLOURS, logarithmic, new_figure, say_axes

INK, PAGE = "#010203", "#040506"
"""Stand-ins for the page's colours of text and ground."""

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

PANELS, LINES = 4, 7
"""Models and rows of a model whose curves are drawn, at most; the best."""

POINTS = 300
"""Points of a curve, at most; more are averaged, neighbours together."""

LEAST = 3
"""Values that a setting needs to be drawn where no sweep varied it."""

MARKS = "os^Dv"
"""Of the first rows, as many as there are colours, of the next ones and so on."""

Drawn = tuple[str, str, str, Figure]
"""Name, title, caption and figure of a plot."""


@dataclass(frozen=True)
class Plot:
    """A plot with its words."""

    name: str
    """Short name, which is also its anchor in the page."""
    title: str
    """Heading."""
    caption: str
    """What is seen."""
    svg: str
    """The drawing."""

    def alone(self) -> str:
        """The drawing as a file of its own, dark on white."""
        head, _, rest = (
            self.svg.replace("currentColor", "#1c1e21")
            .replace("var(--page)", "#ffffff")
            .partition(" ")
        )
        return f'{head} xmlns="http://www.w3.org/2000/svg" {rest}'


def plots(
    comparison: Comparison, more: Iterable[Callable[[Comparison], list[Drawn]]] = ()
) -> list[Plot]:
    """All plots that the rows have something to show in, and those of `more` functions."""
    prefix = re.sub(r"\W+", "-", comparison.selection.title)
    with rc_context(STYLE):
        drawn = [
            each
            for make in (validation, settings, curves, pareto, *more)
            for each in make(comparison)
        ]
        return [
            Plot(f"{prefix}-{name}", title, caption, svg(figure, f"{prefix}-{name}"))
            for name, title, caption, figure in drawn
        ]


def svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element whose ids begin with `name`, so that several stand in one page."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = re.sub(
        r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL
    )
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace(
        "xlink:href", "href"
    )
    text = text.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return text.replace(INK, "currentColor").replace(PAGE, "var(--page)")


def legible(label: str) -> str:
    """A label as a legend shows it, which leaves out those that begin with `_`."""
    return f" {label}" if label.startswith("_") else label


def validation(comparison: Comparison) -> list[Drawn]:
    """The metric on validation over steps, of the best row of each model; none with fewer than two models."""
    key = f"val/{comparison.metric}"
    sign = 1 if lower_is_better(comparison.metric) else -1
    best: dict[str, Row] = {}
    for row in sorted(
        (row for row in comparison.rows if row.values(key)),
        key=lambda row: sign * row.mean(key),
    ):
        if not row.options:
            best.setdefault(row.model, row)
    if len(best) < 2:
        return []
    figure, (axes,) = new_figure(1, width=9, height=max(4, 1 + 0.2 * len(best)))
    for place, row in enumerate(best.values()):
        mark, colour = (
            MARKS[place // len(COLOURS) % len(MARKS)],
            COLOURS[place % len(COLOURS)],
        )
        for number, run in enumerate(row.runs):
            points = thinned(comparison.history(run, key))
            label = None if number else legible(f"{row.name} {row.mean(key):.4f}")
            if len(points) > 1:
                axes.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    marker=mark,
                    ms=3,
                    lw=1.2,
                    label=label,
                )
            else:
                axes.axhline(row.mean(key), color=colour, ls="--", lw=1.2, label=label)
    if any(line.get_linestyle() == "-" for line in axes.lines):
        logarithmic(axes, x=True)
    say_axes(axes, "optimizer step", key)
    figure.legend(loc="outside right upper")
    caption = (
        f"{key} of the best row of each model, best first, a line per run; in the legend that of the best epoch. "
        f"Dashed: measured once."
    )
    return [("validation", "Validation of all models", caption, figure)]


def curves(comparison: Comparison) -> list[Drawn]:
    """Training loss, and the metric on validation, over steps: a panel per model, a colour per row, a line per run."""
    models: dict[str, list[Row]] = {}
    for row in comparison.rows:
        if not row.options:
            models.setdefault(row.model, []).append(row)
    drawn: list[tuple[str, str, list[tuple[Row, list[tuple[float, float]]]]]] = []
    for model, rows in list(models.items())[:PANELS]:
        for key in ("train/loss", f"val/{comparison.metric}"):
            lines: list[tuple[Row, list[tuple[float, float]]]] = [
                (row, comparison.history(run, key))
                for row in rows[:LINES]
                for run in row.runs
                if key in run.metrics
            ]
            lines = [(row, points) for row, points in lines if len(points) > 1]
            if lines:
                drawn.append((model, key, lines))
    if not drawn:
        return []
    columns = min(len(drawn), 2)
    figure, panels = new_figure(columns, math.ceil(len(drawn) / columns))
    for axes, (model, key, lines) in zip(panels, drawn, strict=False):
        colours: dict[str, str] = {}
        for row, points in lines:
            label = (
                None if row.name in colours else legible(row.name)
            )  # one entry of the legend for all seeds
            colour = colours.setdefault(row.name, COLOURS[len(colours) % len(COLOURS)])
            steps, values = zip(*thinned(points), strict=True)
            axes.plot(steps, values, color=colour, lw=1.2, alpha=0.85, label=label)
        axes.set_title(model)
        say_axes(axes, "optimizer step", key, legend=True)
    for axes in panels[len(drawn) :]:
        axes.remove()
    caption = (
        "Training loss as logged, and validation, by optimizer step; one line per run, a colour per row of the table. "
        "Losses of different models are different sums, so each model has its own panel."
    )
    return [("curves", "Learning curves", caption, figure)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `POINTS` points, each the mean of its neighbours."""
    size = math.ceil(len(points) / POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (sum(p[0] for p in g) / len(g), sum(p[1] for p in g) / len(g)) for g in groups
    ]


@dataclass(frozen=True)
class Point:
    """A row that has both figures."""

    label: str
    """Name of the row."""
    speed: float
    """Users per second on test."""
    accuracy: float
    """The metric on test, mean over seeds."""


def points_of(rows: Sequence[Row], metric: str) -> list[Point]:
    """The rows that were evaluated on test, all on the same log and with or without the items that users know."""
    asked = min((row.asked for row in rows), default=None)
    return [
        Point(row.name, row.mean("test/users_per_s"), row.mean(f"test/{metric}"))
        for row in rows
        if row.asked == asked
        and row.values("test/users_per_s")
        and row.values(f"test/{metric}")
    ]


def frontier(points: Sequence[Point], lower: bool = False) -> list[Point]:
    """Those that no other beats: none is both as fast and as accurate, and better in one. Slowest first.

    With `lower` a smaller figure is the more accurate one.
    """
    sign = -1 if lower else 1
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.speed, -sign * p.accuracy)):
        if not best or sign * point.accuracy > sign * best[-1].accuracy:
            best.append(point)
    return best[::-1]


def pareto(comparison: Comparison) -> list[Drawn]:
    """Accuracy against requests per second; none with fewer than two rows that were evaluated on test."""
    points, metric = points_of(comparison.rows, comparison.metric), comparison.metric
    if len(points) < 2:
        return []
    figure, (axes,) = new_figure(1, width=9, height=max(5, 1 + 0.2 * len(points)))
    line = frontier(points, lower_is_better(metric))
    axes.plot(
        [p.speed for p in line],
        [p.accuracy for p in line],
        color="#999999",
        zorder=1,
        linestyle="--",
        drawstyle="steps-pre",
    )
    for place, point in enumerate(points):
        mark, colour = (
            MARKS[place // len(COLOURS) % len(MARKS)],
            COLOURS[place % len(COLOURS)],
        )
        axes.scatter(
            point.speed,
            point.accuracy,
            color=colour,
            marker=mark,
            zorder=2,
            label=legible(point.label),
        )
    logarithmic(axes, x=True)
    axes.margins(x=0.12, y=0.12)
    if all(point.accuracy >= 0 for point in points):
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    say_axes(axes, "requests per second on test (log scale)", f"test {metric}")
    figure.legend(loc="outside right upper")
    caption = (
        "Each row evaluated on test; dashed: no other is both faster and better. Speeds compare only where they were "
        "measured on the same machine, with the same batch."
    )
    return [("pareto", f"{metric} against throughput", caption, figure)]


def number(text: str | None) -> float | None:
    """The number that a param is, or None."""
    try:
        return float(text) if text not in (None, "", "True", "False") else None
    except ValueError:
        return None


def order(value: str) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    return number(value) is None, number(value) or 0.0, value


def setting(row: Row, key: str) -> str:
    """The row's value of a swept key."""
    return row.model if key == "model.name" else Path(row.params.get(key, "none")).name


def controlled(rows: Sequence[Row], key: str) -> list[list[Row]]:
    """Groups of rows that differ in the param `key` alone, in order of its value."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if not row.options and key in row.params:
            others = tuple(
                sorted(
                    (name, value) for name, value in row.params.items() if name != key
                )
            )
            groups.setdefault((row.experiment, row.model, *others), []).append(row)
    return [
        sorted(group, key=lambda row: order(row.params[key]))
        for group in groups.values()
    ]


def settings(comparison: Comparison) -> list[Drawn]:
    """What each axis of a sweep does, seeds together; of other runs every number of the model in which rows differ
    while all else is equal."""
    sweep = comparison.selection.sweep
    varied = (
        json.loads(sweep.data.tags.get("sweep.axes", "[]")) if sweep is not None else []
    )
    swept = [key for key in varied if key != "fit.seed"]
    own = [row for row in comparison.rows if not row.options]
    keys = swept or sorted(
        key
        for key in {
            key for row in own for key in row.settings if key.startswith("model.")
        }
        if all(number(row.params[key]) is not None for row in own if key in row.params)
    )
    drawn: list[Drawn] = []
    for key in keys:
        groups = [
            group
            for group in controlled(own, key)
            if len(group) >= (2 if swept else LEAST)
        ]
        how = "all else equal"
        if swept and not groups:
            groups, how = (
                [best_of_each(own, key, comparison)],
                "the best trial on validation for each value",
            )
        groups = sorted(
            (group for group in groups if len(group) > 1), key=len, reverse=True
        )[: len(COLOURS)]
        if groups:
            caption = f"{key}: {how}; bars are the deviation over seeds."
            figure = setting_plot(comparison.metric, key, groups)
            drawn.append((key.replace(".", "-"), f"What {key} does", caption, figure))
    return drawn


def best_of_each(rows: Sequence[Row], key: str, comparison: Comparison) -> list[Row]:
    """For each value of the setting the row that is best on validation."""
    name, sign = (
        f"val/{comparison.metric}",
        1 if lower_is_better(comparison.metric) else -1,
    )
    found: dict[str, Row] = {}
    for row in sorted(
        (r for r in rows if r.values(name)), key=lambda r: sign * r.mean(name)
    ):
        found.setdefault(setting(row, key), row)
    return sorted(found.values(), key=lambda row: order(setting(row, key)))


def setting_plot(metric: str, key: str, groups: Sequence[Sequence[Row]]) -> Figure:
    """The panels of one setting: the metric, or the entropies of its tasks; users per second; peak memory."""
    rows = [row for group in groups for row in group]
    measured = {
        name
        for row in rows
        for name in row.measured()
        if sum(bool(row.values(name)) for row in rows) > 1
    }
    entropy = metric.endswith(("normalised_entropy", "/rig"))
    entropies = sorted(
        name for name in measured if entropy and name.endswith("/normalised_entropy")
    )
    shown = [name for name in entropies if name.startswith("test/")] or entropies
    main = [
        name
        for name in shown or (f"val/{metric}", f"test/{metric}")
        if name in measured
    ][: len(COLOURS)]
    shown_in: list[list[str]] = [main] if main else []
    shown_in += [
        [name]
        for name in ("test/users_per_s", "test/peak_memory_mb")
        if name in measured - {*main}
    ]
    figure, panels = new_figure(len(shown_in))
    values = sorted({setting(row, key) for row in rows}, key=order)
    joined = "-" if all(number(value) is not None for value in values) else "none"
    for panel, names in zip(panels, shown_in, strict=True):
        for line, (name, group) in enumerate(
            (name, group) for name in names for group in groups
        ):
            there = [row for row in group if row.values(name)]
            spread = [
                0.0 if math.isnan(row.deviation(name)) else row.deviation(name)
                for row in there
            ]
            panel.errorbar(
                [values.index(setting(row, key)) for row in there],
                [row.mean(name) for row in there],
                spread,
                marker="o",
                capsize=2,
                color=COLOURS[line % len(COLOURS)],
                linestyle=joined,
                label=name
                if len(groups) == 1
                else f"{name}: {told_apart(group[0], groups, key)}",
            )
        panel.set_xticks(range(len(values)), [value or "none" for value in values])
        say_axes(
            panel,
            key,
            names[0] if len(names) == 1 else "NE" if shown else metric,
            legend=True,
        )
    return figure


def told_apart(row: Row, groups: Sequence[Sequence[Row]], key: str) -> str:
    """The row's model, with the settings but `key` by which its group differs from others of the model."""
    kin = [group[0] for group in groups if group[0].model == row.model]
    apart = [
        name
        for name in row.params
        if name != key and len({other.params.get(name) for other in kin}) > 1
    ]
    return " ".join(
        [
            row.model,
            *(f"{name.split('.', 1)[-1]} {setting(row, name)[:14]}" for name in apart),
        ]
    )
