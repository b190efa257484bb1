"""Draw the plots of a comparison.

    for plot in plots(compare(select(uri, ["retrieval/DATASET"]))):
        print(plot.svg)

The plots show the validation of all models, the effect of each setting of a sweep,
learning curves, and accuracy against throughput. A plot without data is left out. A
model has one colour in all plots of a page.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.comparison.rows import Comparison, Row, lower_is_better
from pipelines.comparison.svg import (
    Drawing,
    Plot,
    add_hover,
    plot_style,
    render,
    to_label,
)
from pipelines.figures import (
    COLOURS,
    MARKERS,
    NEUTRAL,
    label_axes,
    make_logarithmic,
    new_figure,
)

MAX_PANELS = 4
"""Largest number of models with learning curves."""

MAX_ROWS = 7
"""Largest number of a model's rows with learning curves."""

MAX_POINTS = 300
"""Largest number of points of a curve; neighbouring points are averaged."""

MAX_HOVER_POINTS = 25
"""Largest number of points of a learning curve with a marker and a hover text."""

MIN_VALUES = 3
"""Smallest number of values for which a setting outside of a sweep is plotted."""

LINE_STYLES = ("-", "--", ":", "-.")
"""Styles that distinguish lines of one colour."""

Points = list[tuple[float, float]]
"""Steps and values of a curve."""

Colours = Mapping[str, str]
"""Colours by model."""


def choose_colours(comparisons: Iterable[Comparison]) -> dict[str, str]:
    """Return a colour for each model of a page; beyond seven models, colours repeat."""
    colours: dict[str, str] = {}
    for comparison in comparisons:
        for row in (*comparison.rows, *comparison.teachers):
            if row.model not in colours:
                colours[row.model] = COLOURS[len(colours) % len(COLOURS)]
    return colours


def plots(
    comparison: Comparison,
    colours: Colours | None = None,
    more: Iterable[Callable[[Comparison], list[Drawing]]] = (),
) -> list[Plot]:
    """Draw and render all plots for which the rows have data.

    Args:
        comparison: Rows of one experiment.
        colours: Colours of the page's models; by default those of the comparison.
        more: Functions that draw further plots.
    """
    colours = colours or choose_colours([comparison])
    prefix = re.sub(r"\W+", "-", comparison.selection.title)
    with plot_style():
        drawings = [
            *draw_validation(comparison, colours),
            *draw_settings(comparison, colours),
            *draw_curves(comparison, colours),
            *draw_pareto(comparison, colours),
        ]
        for draw in more:
            drawings += draw(comparison)
        return [render(drawing, f"{prefix}-") for drawing in drawings]


class MarkerCycle:
    """Markers and line styles that distinguish lines of one colour."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def next(self, colour: str) -> tuple[str, str]:
        """Return the marker and the line style for the next line of a colour."""
        index = self.counts[colour]
        self.counts[colour] += 1
        marker = MARKERS[index % len(MARKERS)]
        return marker, LINE_STYLES[index % len(LINE_STYLES)]


def draw_validation(comparison: Comparison, colours: Colours) -> list[Drawing]:
    """Draw the metric on validation over steps for the best row of each model.

    A run that was validated once has a dashed horizontal line at the mean of its row.
    Nothing is drawn for a single model, or if all runs were validated once.
    """
    metric = f"val/{comparison.metric}"
    rows = best_rows(comparison)
    if len(rows) < 2:
        return []
    figure, (axes,) = new_figure(1, width=9, height=max(4, 1 + 0.2 * len(rows)))
    hover: dict[str, list[str]] = {}
    markers = MarkerCycle()
    has_curve = False
    for row in rows:
        colour = colours[row.model]
        marker, _ = markers.next(colour)
        label = to_label(f"{row.name} {row.mean(metric):.4f}")
        for run_index, run in enumerate(row.runs):
            points = average_neighbours(comparison.history(run, metric), MAX_POINTS)
            style: dict[str, Any] = {
                "color": colour,
                "label": None if run_index else label,  # one legend entry per row
                "lw": 1.2,
            }
            if len(points) < 2:
                axes.axhline(row.mean(metric), ls="--", **style)
                continue
            has_curve = True
            steps, values = zip(*points, strict=True)
            (line,) = axes.plot(steps, values, marker=marker, ms=3, **style)
            add_hover(hover, line, [describe_point(run.name, *p) for p in points])
    if not has_curve:
        return []
    make_logarithmic(axes)
    label_axes(axes, "optimizer step", metric)
    figure.legend(loc="outside right upper")
    caption = (
        f"{metric} of the best row of each model, best first, a line per run; in the "
        "legend the value at the best epoch. Dashed: measured once."
    )
    return [Drawing("validation", "Validation of all models", caption, figure, hover)]


def best_rows(comparison: Comparison) -> list[Row]:
    """Return the row of each model with the best metric on validation, best first.

    Rows evaluated with other options than their checkpoint's are left out, as their
    training is the one of the row without options.
    """
    best: dict[str, Row] = {}
    for row in sort_by_validation(comparison, comparison.rows):
        if not row.options:
            best.setdefault(row.model, row)
    return list(best.values())


def sort_by_validation(comparison: Comparison, rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the metric on validation, best first."""
    metric = f"val/{comparison.metric}"
    measured = [row for row in rows if row.values(metric)]
    return sorted(measured, key=lambda row: comparison.sign * row.mean(metric))


def describe_point(name: str, step: float, value: float) -> str:
    """Return the hover text of a point of a curve."""
    return f"{name}, step {step:,.0f}: {value:.4g}"


@dataclass(frozen=True)
class Curve:
    """A metric of one run over steps."""

    row: Row
    """Row of the run, which chooses line style and label."""
    points: Points
    """Points in order of the steps."""


def draw_curves(comparison: Comparison, colours: Colours) -> list[Drawing]:
    """Draw training loss and the metric on validation over steps, a panel per model."""
    panels = load_panels(comparison)
    if not panels:
        return []
    columns = min(len(panels), 2)
    figure, all_axes = new_figure(columns, math.ceil(len(panels) / columns))
    hover: dict[str, list[str]] = {}
    # not strict: the grid of axes may have one more than there are panels
    for axes, (model, metric, curves) in zip(all_axes, panels, strict=False):
        draw_panel(axes, colours[model], curves, hover)
        axes.set_title(model)
        label_axes(axes, "optimizer step", metric, legend=True)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    caption = (
        "Training loss as logged, and validation, by optimizer step; one line per run, "
        "a line style per row of the table. Losses of different models are different "
        "sums, so each model has its own panel."
    )
    return [Drawing("curves", "Learning curves", caption, figure, hover)]


def load_panels(comparison: Comparison) -> list[tuple[str, str, list[Curve]]]:
    """Load the learning curves of the best models.

    Returns:
        Panels as (model, metric, curves), at most two for each of `MAX_PANELS` models.
    """
    by_model: dict[str, list[Row]] = {}
    for row in comparison.rows:
        if not row.options:
            by_model.setdefault(row.model, []).append(row)
    panels: list[tuple[str, str, list[Curve]]] = []
    for model, rows in by_model.items():
        if len({panel_model for panel_model, _, _ in panels}) == MAX_PANELS:
            break
        for metric in ("train/loss", f"val/{comparison.metric}"):
            curves = load_curves(comparison, rows[:MAX_ROWS], metric)
            if curves:
                panels.append((model, metric, curves))
    return panels


def load_curves(
    comparison: Comparison, rows: Sequence[Row], metric: str
) -> list[Curve]:
    """Return a curve for each run that logged the metric at two steps or more."""
    curves = []
    for row in rows:
        for run in row.runs:
            if metric in run.metrics:
                curves.append(Curve(row, comparison.history(run, metric)))
    return [curve for curve in curves if len(curve.points) > 1]


def draw_panel(
    axes: Axes, colour: str, curves: Sequence[Curve], hover: dict[str, list[str]]
) -> None:
    """Draw the curves of one model; its rows differ in line style and opacity.

    Args:
        axes: Axes of the panel.
        colour: Colour of the model.
        curves: Curves of the model's runs.
        hover: Hover texts by group id, to which the curves are added.
    """
    names = list(dict.fromkeys(curve.row.name for curve in curves))
    labelled = set()
    for curve in curves:
        name = curve.row.name
        row_index = names.index(name)
        label = None if name in labelled else to_label(name)
        labelled.add(name)
        opacity = 1 - 0.6 * row_index / max(len(names), 2)
        points = average_neighbours(curve.points, MAX_POINTS)
        steps, values = zip(*points, strict=True)
        style = LINE_STYLES[row_index % len(LINE_STYLES)]
        stride = math.ceil(len(points) / MAX_HOVER_POINTS)
        (line,) = axes.plot(
            steps,
            values,
            style,
            color=colour,
            lw=1.2,
            alpha=opacity,
            label=label,
            marker=".",
            markevery=stride,
        )
        texts = [describe_point(name, *point) for point in points[::stride]]
        add_hover(hover, line, texts)


def average_neighbours(points: Points, count: int) -> Points:
    """Return at most `count` points, each the mean of neighbouring points."""
    size = max(1, math.ceil(len(points) / count))
    averages = []
    for begin in range(0, len(points), size):
        steps, values = zip(*points[begin : begin + size], strict=True)
        averages.append((sum(steps) / len(steps), sum(values) / len(values)))
    return averages


@dataclass(frozen=True)
class Point:
    """Speed and accuracy of a row."""

    row: Row
    """Row that the point is labelled with."""
    speed: float
    """Requests per second on test."""
    accuracy: float
    """Mean over seeds of the metric on test."""


def to_points(rows: Sequence[Row], metric: str) -> list[Point]:
    """Return the test speed and accuracy of the rows of one evaluation task.

    Only rows of the same `Row.task` are comparable. The smallest task is used: the log
    of the training before fresh logs, then the ranking of all items before the ranking
    without items of the history.
    """
    task = min((row.task for row in rows), default=None)
    points = []
    for row in rows:
        is_timed = bool(row.values("test/users_per_s"))
        if row.task == task and is_timed and row.values(f"test/{metric}"):
            speed = row.mean("test/users_per_s")
            points.append(Point(row, speed, row.mean(f"test/{metric}")))
    return points


def pareto_frontier(
    points: Sequence[Point], is_lower_better: bool = False
) -> list[Point]:
    """Return the Pareto-optimal points, slowest first.

    Args:
        points: Speed and accuracy of rows.
        is_lower_better: Whether a smaller value of the metric is better.
    """
    sign = -1 if is_lower_better else 1
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.speed, -sign * p.accuracy)):
        if not best or sign * point.accuracy > sign * best[-1].accuracy:
            best.append(point)
    return best[::-1]


def draw_pareto(comparison: Comparison, colours: Colours) -> list[Drawing]:
    """Draw accuracy against requests per second, if two rows were evaluated on test."""
    metric = comparison.metric
    points = to_points(comparison.rows, metric)
    if len(points) < 2:
        return []
    figure, (axes,) = new_figure(1, width=9, height=max(5, 1 + 0.2 * len(points)))
    best = pareto_frontier(points, lower_is_better(metric))
    speeds, accuracies = [p.speed for p in best], [p.accuracy for p in best]
    axes.plot(speeds, accuracies, "--", color="#999999", drawstyle="steps-pre")
    hover: dict[str, list[str]] = {}
    markers = MarkerCycle()
    for point in points:
        colour = colours[point.row.model]
        marker, _ = markers.next(colour)
        (line,) = axes.plot(
            [point.speed],
            [point.accuracy],
            marker,
            color=colour,
            label=to_label(point.row.name),
        )
        values = f"{metric} {point.accuracy:.4f}, {point.speed:,.0f} requests/s"
        add_hover(hover, line, [f"{point.row.name}: {values}"])
    make_logarithmic(axes)
    axes.margins(x=0.12, y=0.12)
    if all(point.accuracy >= 0 for point in points):
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    label_axes(axes, "requests per second on test (log scale)", f"test {metric}")
    figure.legend(loc="outside right upper")
    caption = (
        "Each row evaluated on test; dashed: no other is both faster and better. "
        "Speeds compare only where they were measured on the same machine, with the "
        "same batch."
    )
    return [Drawing("pareto", f"{metric} against throughput", caption, figure, hover)]


def to_number(text: str | None) -> float | None:
    """Return a param as a number, or None if it is not a number."""
    if text in (None, "", "True", "False"):
        return None
    try:
        return float(text)
    except ValueError:
        return None


def sort_key(value: str) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by size, and words after numbers."""
    number = to_number(value)
    return number is None, number or 0.0, value


def read_setting(row: Row, key: str) -> str:
    """Return the value of a row's param; of a path the last part."""
    if key == "model.name":
        return row.model
    return Path(row.params.get(key, "none")).name


def group_controlled(rows: Sequence[Row], key: str) -> list[list[Row]]:
    """Group rows that differ only in one param, sorted by its value.

    Args:
        rows: Rows; those without the param or with evaluation options are left out.
        key: Name of the param.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if not row.options and key in row.params:
            others = [item for item in row.params.items() if item[0] != key]
            group_key = (row.experiment, row.model, *sorted(others))
            groups.setdefault(group_key, []).append(row)
    return [
        sorted(group, key=lambda row: sort_key(row.params[key]))
        for group in groups.values()
    ]


def draw_settings(comparison: Comparison, colours: Colours) -> list[Drawing]:
    """Draw the effect of each axis of a sweep, over all seeds.

    Without a sweep, a numeric option of the models' configs takes the place of an axis
    if it has at least `MIN_VALUES` values with all other options equal.
    """
    axes = swept_settings(comparison)
    rows = [row for row in comparison.rows if not row.options]
    drawings = []
    for key in axes or numeric_settings(rows):
        min_values = 2 if axes else MIN_VALUES
        groups = group_controlled(rows, key)
        groups = [group for group in groups if len(group) >= min_values]
        selection = "all else equal"
        if axes and not groups:
            groups = [best_by_setting(comparison, rows, key)]
            selection = "the best trial on validation for each value"
        groups = [group for group in groups if len(group) > 1]
        groups = sorted(groups, key=len, reverse=True)[: len(COLOURS)]
        if groups:
            hover: dict[str, list[str]] = {}
            figure = draw_setting(comparison.metric, key, groups, colours, hover)
            caption = f"{key}: {selection}; bars are the deviation over seeds."
            name, title = key.replace(".", "-"), f"What {key} does"
            drawings.append(Drawing(name, title, caption, figure, hover))
    return drawings


def swept_settings(comparison: Comparison) -> list[str]:
    """Return the compared sweep's axes except the seed; [] without a sweep."""
    sweep = comparison.selection.sweep
    if not sweep:
        return []
    axes = json.loads(sweep.data.tags.get("sweep.axes", "[]"))
    return [key for key in axes if key != "fit.seed"]


def numeric_settings(rows: Sequence[Row]) -> list[str]:
    """Return the numeric options of the models' configs in which rows differ."""
    keys = {key for row in rows for key in row.settings if key.startswith("model.")}
    numeric = []
    for key in sorted(keys):
        values = [row.params[key] for row in rows if key in row.params]
        if all(to_number(value) is not None for value in values):
            numeric.append(key)
    return numeric


def best_by_setting(comparison: Comparison, rows: Iterable[Row], key: str) -> list[Row]:
    """Return the row that is best on validation for each value of a setting."""
    best: dict[str, Row] = {}
    for row in sort_by_validation(comparison, rows):
        best.setdefault(read_setting(row, key), row)
    return sorted(best.values(), key=lambda row: sort_key(read_setting(row, key)))


def draw_setting(
    metric: str,
    key: str,
    groups: Sequence[Sequence[Row]],
    colours: Colours,
    hover: dict[str, list[str]],
) -> Figure:
    """Draw the panels of one setting: the metric, requests per second, peak memory.

    If the comparison is by normalised entropy, the metric's panel shows the entropy of
    each task.

    Args:
        metric: Metric of the comparison, without its split.
        key: Name of the setting.
        groups: Rows that differ only in the setting, sorted by its value.
        colours: Colours by model.
        hover: Hover texts by group id, to which the lines are added.
    """
    rows = [row for group in groups for row in group]
    panels = choose_panels(metric, rows)
    figure, all_axes = new_figure(max(len(panels), 1))
    values = sorted({read_setting(row, key) for row in rows}, key=sort_key)
    # not strict: there is one set of axes even if there are no panels
    for axes, names in zip(all_axes, panels, strict=False):
        markers = MarkerCycle()
        for name in names:
            for group in groups:
                models = {row.model for row in group}
                colour = colours[group[0].model] if len(models) == 1 else NEUTRAL
                label = name
                if len(groups) > 1:
                    label = f"{name}: {describe_group(group[0], groups, key)}"
                marker, line_style = markers.next(colour)
                style = {
                    "color": colour,
                    "marker": marker,
                    "linestyle": line_style if are_numbers(values) else "none",
                    "label": label,
                }
                measured = [row for row in group if row.values(name)]
                positions = [values.index(read_setting(row, key)) for row in measured]
                draw_error_bars(axes, measured, name, positions, style, hover)
        axes.set_xticks(range(len(values)), [value or "none" for value in values])
        label_axes(axes, key, label_values(names, metric), legend=True)
    return figure


def draw_error_bars(
    axes: Axes,
    rows: Sequence[Row],
    metric: str,
    positions: Sequence[int],
    style: dict[str, Any],
    hover: dict[str, list[str]],
) -> None:
    """Draw a metric's mean and deviation over seeds for each row.

    Args:
        axes: Axes of the panel.
        rows: Rows that have the metric.
        metric: Name of the metric, with its split.
        positions: Position of each row on the horizontal axis.
        style: Colour, marker, line style and label.
        hover: Hover texts by group id, to which the line is added.
    """
    means = [row.mean(metric) for row in rows]
    deviations = [zero_if_nan(row.deviation(metric)) for row in rows]
    container = axes.errorbar(positions, means, deviations, capsize=2, **style)
    texts = [f"{row.name}: {metric} {row.mean(metric):.4g}" for row in rows]
    add_hover(hover, container[0], texts)


def are_numbers(values: Sequence[str]) -> bool:
    """Return whether all values of a setting are numbers."""
    return all(to_number(value) is not None for value in values)


def label_values(names: Sequence[str], metric: str) -> str:
    """Return the label of a panel's vertical axis.

    Args:
        names: Metrics that the panel shows.
        metric: Metric of the comparison, without its split.
    """
    if len(names) == 1:
        return names[0]
    if names[0].endswith("/normalised_entropy"):
        return "normalised entropy"
    return metric


def choose_panels(metric: str, rows: Sequence[Row]) -> list[list[str]]:
    """Return the metrics of each panel of a setting.

    The first panel has the comparison's metric on validation and test, or for
    normalised entropy and RIG the normalised entropy of each task. Speed and memory on
    test have a panel each.

    Args:
        metric: Metric of the comparison, without its split.
        rows: Rows; a metric is shown if at least two of them have it.
    """
    counts = Counter(name for row in rows for name in row.metric_names())
    measured = {name for name, count in counts.items() if count > 1}
    names = [f"val/{metric}", f"test/{metric}"]
    if metric.endswith(("normalised_entropy", "/rig")):
        names = task_entropies(measured) or names
    main = [name for name in names if name in measured][: len(COLOURS)]
    panels = [main] if main else []
    for name in ("test/users_per_s", "test/peak_memory_mb"):
        if name in measured and name not in main:
            panels.append([name])
    return panels


def task_entropies(metrics: Iterable[str]) -> list[str]:
    """Return the normalised entropies of tasks on test, or else on validation."""
    names = sorted(name for name in metrics if name.endswith("/normalised_entropy"))
    on_test = [name for name in names if name.startswith("test/")]
    return on_test or names


def zero_if_nan(value: float) -> float:
    """Return the value, or 0 if it is NaN."""
    return 0.0 if math.isnan(value) else value


def describe_group(row: Row, groups: Sequence[Sequence[Row]], key: str) -> str:
    """Return a row's model with the settings in which its group differs from others.

    Args:
        row: First row of its group.
        groups: All groups.
        key: Setting that varies within the groups, which is left out.
    """
    first_rows = [group[0] for group in groups if group[0].model == row.model]
    words = [row.model]
    for name in row.params:
        values = {first.params.get(name) for first in first_rows}
        if name != key and len(values) > 1:
            words.append(f"{name.split('.', 1)[-1]} {read_setting(row, name)[:14]}")
    return " ".join(words)
