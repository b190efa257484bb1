"""Plots of what a setting does: a metric over alpha, width, m (Fig. 5 of SID-MLP) or lambda, and whole sweeps.

Of a sweep every axis is drawn; of other runs every number of the model in which rows differ while all else is equal.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import yaml
from matplotlib import colormaps
from matplotlib.axes import Axes
from mlflow.exceptions import MlflowException

from pipelines.comparison.rows import Comparison, Row, lower_is_better, ratio
from pipelines.comparison.run_plots import Drawn
from pipelines.figures import COLOURS, new_figure, say_axes

LEAST = 3
"""Values that a setting needs to be drawn where no sweep varied it."""

Series = dict[str, list[Row]]


def number(text: str | None) -> float | None:
    """The number that a param is, or None."""
    try:
        return float(text) if text not in (None, "", "True", "False") else None
    except ValueError:
        return None


def sweep_axes(comparison: Comparison) -> list[str]:
    """Dotted keys that the sweep varies, but for seeds, which are together in a row; none of other selections."""
    sweep = comparison.selection.sweep
    varied = json.loads(sweep.data.tags.get("sweep.axes", "[]")) if sweep is not None else []
    return [key for key in varied if key != "fit.seed"]


GRID = "grid.yaml"
"""The artifact of a sweep's run that holds its grid file."""


def grid_of(comparison: Comparison) -> dict[str, Any]:
    """The sweep's grid file, as its run keeps it."""
    sweep = comparison.selection.sweep
    return {} if sweep is None else yaml.safe_load(grid_text(sweep)) or {}


def grid_text(sweep: Any) -> str:
    """The grid file of a sweep's run; nothing of one that ended before it kept it: what was published is not known."""
    try:
        return str(mlflow.artifacts.load_text(f"{sweep.info.artifact_uri}/{GRID}"))
    except (MlflowException, OSError):
        return ""


def controlled(rows: Sequence[Row], key: str) -> list[list[Row]]:
    """Groups of rows that differ in the param `key` alone, in order of its value."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if not row.options and key in row.params:
            others = tuple(sorted((name, value) for name, value in row.params.items() if name != key))
            groups.setdefault((row.experiment, row.model, *others), []).append(row)
    return [sorted(group, key=lambda row: order(row.params[key])) for group in groups.values()]


def axes(comparison: Comparison) -> list[Drawn]:
    """A plot per setting: the metric, users per second, and beside what was published where the grid says it."""
    swept = sweep_axes(comparison)
    own = [row for row in comparison.rows if not row.options]
    keys = swept or sorted(
        key
        for key in {key for row in own for key in row.settings if key.startswith("model.")}
        if all(number(row.params[key]) is not None for row in own if key in row.params)
    )
    published = grid_of(comparison).get("published") or []
    drawn: list[Drawn] = []
    for key in keys:
        groups = [group for group in controlled(own, key) if len(group) >= (2 if swept else LEAST)]
        if best := bool(swept) and not groups:
            groups = [best_of_each(own, key, comparison)]
        groups = sorted((group for group in groups if len(group) > 1), key=len, reverse=True)[: len(COLOURS)]
        if groups:
            drawn.append(setting_plot(comparison, key, groups, published, best))
    return drawn


def best_of_each(rows: Sequence[Row], key: str, comparison: Comparison) -> list[Row]:
    """For each value of the setting the row that is best on validation."""
    name, sign = f"val/{comparison.metric}", 1 if lower_is_better(comparison.metric) else -1
    found: dict[str, Row] = {}
    for row in sorted((r for r in rows if r.values(name)), key=lambda r: sign * r.mean(name)):
        found.setdefault(setting(row, key), row)
    return sorted(found.values(), key=lambda row: order(setting(row, key)))


def setting_plot(
    comparison: Comparison, key: str, groups: Sequence[Sequence[Row]], published: Sequence[dict[str, Any]], best: bool
) -> Drawn:
    """The panels of one setting: the metric, users per second, peak memory, and beside what is published."""
    rows = [row for group in groups for row in group]
    measured = {name for row in rows for name in row.measured() if sum(bool(row.values(name)) for row in rows) > 1}
    metric, entropy = comparison.metric, comparison.metric.endswith(("normalised_entropy", "/rig"))
    entropies = sorted(name for name in measured if entropy and name.endswith("/normalised_entropy"))
    shown = [name for name in entropies if name.startswith("test/")] or entropies
    main = [name for name in shown or (f"val/{metric}", f"test/{metric}") if name in measured][: len(COLOURS)]
    more: list[list[str]] = [
        [name] for name in ("test/users_per_s", "test/peak_memory_mb") if name in measured and name not in main
    ]
    theirs = printed(published, key, metric)
    figure, panels = new_figure(bool(main) + len(more) + bool(theirs))
    values = sorted({setting(row, key) for row in rows}, key=order)
    for panel, names in zip(panels, ([main] if main else []) + more, strict=False):
        for line, (name, group) in enumerate((name, group) for name in names for group in groups):
            there = [row for row in group if row.values(name)]
            spread = [0.0 if math.isnan(row.deviation(name)) else row.deviation(name) for row in there]
            panel.errorbar(
                [values.index(setting(row, key)) for row in there], [row.mean(name) for row in there], spread,
                marker="o", capsize=2, color=COLOURS[line % len(COLOURS)], linestyle="-" if numeric(values) else "none",
                label=name if len(groups) == 1 else f"{name}: {told_apart(group[0], groups, key)}",
            )  # fmt: skip
        dress(panel, values, key, names[0] if len(names) == 1 else "NE" if shown else metric)
        panel.legend()
    if theirs:
        beside_published(panels[-1], comparison, key, groups[0], theirs)
    how = "the best trial on validation for each value" if best else "all else equal"
    caption = f"{key}: {how}; bars are the deviation over seeds."
    return (key.replace(".", "-"), f"What {key} does", caption, figure)


def told_apart(row: Row, groups: Sequence[Sequence[Row]], key: str) -> str:
    """The row's model, with the settings but `key` by which its group differs from others of the model."""
    kin = [group[0] for group in groups if group[0].model == row.model]
    apart = [name for name in row.params if name != key and len({other.params.get(name) for other in kin}) > 1]
    return " ".join([row.model, *(f"{name.split('.', 1)[-1]} {setting(row, name)[:14]}" for name in apart)])


def printed(published: Sequence[dict[str, Any]], key: str, metric: str) -> dict[str, dict[str, float]]:
    """By dataset the published figure of each value of the setting, where there are two or more."""
    found: dict[str, dict[str, float]] = {}
    for given in published:
        figure = given.get("metrics", {}).get(f"test/{metric}")
        if list(given.get("point", {})) == [key] and figure is not None and "relative_to" not in given:
            found.setdefault(given.get("dataset", "the paper"), {})[str(given["point"][key])] = figure
    return {dataset: line for dataset, line in found.items() if len(line) > 1}


def order(value: str) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    return number(value) is None, number(value) or 0.0, value


def numeric(values: Sequence[str]) -> bool:
    return all(number(value) is not None for value in values)


def dress(axes: Axes, values: Sequence[str], key: str, label: str) -> None:
    """Ticks at the setting's values, evenly spaced, and labels."""
    axes.set_xticks(range(len(values)), [value or "none" for value in values])
    say_axes(axes, key, label)


def beside_published(
    axes: Axes, comparison: Comparison, key: str, rows: Sequence[Row], theirs: dict[str, dict[str, float]]
) -> None:
    """Ours and the paper's, each relative to its own best, since datasets differ."""
    metric = comparison.metric
    name = next((n for n in (f"test/{metric}", f"val/{metric}") if all(row.values(n) for row in rows)), "")
    ours = {"ours": {setting(row, key): row.mean(name) for row in rows}} if name else {}
    lines = {label: {number(value): f for value, f in line.items()} for label, line in {**ours, **theirs}.items()}
    everything = sorted({value for line in lines.values() for value in line if value is not None})
    for drawn, (label, line) in enumerate(lines.items()):
        there = [value for value in everything if value in line]
        top = (min if lower_is_better(metric) else max)(line[value] for value in there)
        shown = [100 * (ratio(line[value], top) - 1) for value in there]
        colour = COLOURS[drawn % len(COLOURS)]
        axes.plot([everything.index(v) for v in there], shown, marker="s" if drawn else "o", color=colour, label=label)
    dress(axes, [f"{value:g}" for value in everything], key, f"{metric}, % of own best")
    axes.legend()


def parallel_coordinates(comparison: Comparison) -> list[Drawn]:
    """A sweep of two axes or more: a line per trial through its values to its metric, the best drawn last."""
    keys = sweep_axes(comparison)
    name = f"val/{comparison.metric}"
    rows = [row for row in comparison.rows if not row.options and row.values(name)]
    if len(keys) < 2 or len(rows) < 2:
        return []
    figure, (axes,) = new_figure(1, width=min(1.5 * (len(keys) + 1) + 1, 11), height=4)
    results = [row.mean(name) for row in rows]
    low, high = min(results), max(results)
    sign = -1 if lower_is_better(comparison.metric) else 1
    heights: dict[str, dict[str, float]] = {}
    for key in keys:
        values = sorted({setting(row, key) for row in rows}, key=order)
        heights[key] = {value: i / max(len(values) - 1, 1) for i, value in enumerate(values)}
    colour = colormaps["viridis"]
    for row in sorted(rows, key=lambda row: sign * row.mean(name)):
        share = (row.mean(name) - low) / (high - low) if high > low else 1.0
        line = [heights[key][setting(row, key)] for key in keys] + [share]
        good = share if sign > 0 else 1 - share
        axes.plot(
            range(len(line)), line, color=colour(0.15 + 0.8 * good), lw=1 + 1.6 * (good == 1), alpha=0.4 + 0.6 * good
        )
    for place, key in enumerate(keys):
        axes.axvline(place, lw=0.8, alpha=0.5, color=axes.xaxis.label.get_color())
        for value, height in heights[key].items():
            axes.annotate(value[:14], (place, height), xytext=(3, 2), textcoords="offset points", fontsize=7)
    axes.axvline(len(keys), lw=0.8, alpha=0.5, color=axes.xaxis.label.get_color())
    for height, result in ((0.0, low), (0.5, statistics.fmean([low, high])), (1.0, high)):
        axes.annotate(f"{result:.4f}", (len(keys), height), xytext=(4, 2), textcoords="offset points", fontsize=7)
    axes.set_xticks(range(len(keys) + 1), [key.split(".", 1)[-1] for key in keys] + [name])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.margins(x=0.08, y=0.06)
    caption = f"A line per trial, through its settings to {name}; brighter is better, the best is thick."
    return [("trials", "Trials of the sweep", caption, figure)]


def setting(row: Row, key: str) -> str:
    """The row's value of a swept key."""
    return row.model if key == "model.name" else Path(row.params.get(key, "none")).name
