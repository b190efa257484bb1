"""Plots of what a setting does: a metric over alpha, width, m (Fig. 5 of SID-MLP) or lambda, and whole sweeps.

Of a sweep every axis is drawn; of other runs every number of the model in which rows differ while all else is equal.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import mlflow
import yaml
from matplotlib import colormaps
from matplotlib.axes import Axes
from mlflow.exceptions import MlflowException

from pipelines.evaluation.comparison import Comparison, Row, lower_is_better
from pipelines.evaluation.run_plots import COLOURS, Drawn, new_figure

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
    """Dotted keys that the sweep varies; none of other selections."""
    sweep = comparison.selection.sweep
    return json.loads(sweep.data.tags.get("sweep.axes", "[]")) if sweep is not None else []


def grid_of(comparison: Comparison) -> dict[str, Any]:
    """The sweep's grid file, as its run keeps it."""
    sweep = comparison.selection.sweep
    if sweep is None:
        return {}
    try:
        content = mlflow.artifacts.load_text(f"{sweep.info.artifact_uri}/grid.yaml")
    except (MlflowException, OSError):  # a sweep that ended before it kept its grid: what was published is not known
        return {}
    return yaml.safe_load(content) or {}


def controlled(rows: Sequence[Row], key: str) -> list[list[Row]]:
    """Groups of rows that differ in the param `key` alone, in order of its value."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if not row.options and key in row.params:
            others = tuple(sorted((name, value) for name, value in row.params.items() if name != key))
            groups.setdefault((row.experiment, row.model, *others), []).append(row)
    return [sorted(group, key=lambda row: number(row.params[key]) or 0.0) for group in groups.values()]


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
        if key == "fit.seed":
            continue
        groups = [group for group in controlled(own, key) if len(group) >= (2 if swept else LEAST)]
        if not groups and swept:
            groups = [best_of_each(own, key, comparison)]
        groups = sorted((group for group in groups if len(group) > 1), key=len, reverse=True)[: len(COLOURS)]
        if groups:
            drawn.append(setting_plot(comparison, key, groups, published, bool(swept) and len(swept) > 1))
    return drawn


def best_of_each(rows: Sequence[Row], key: str, comparison: Comparison) -> list[Row]:
    """For each value of the setting the row that is best on validation."""
    name, sign = f"val/{comparison.metric}", 1 if lower_is_better(comparison.metric) else -1
    found: dict[str, Row] = {}
    for row in sorted((r for r in rows if r.values(name)), key=lambda r: sign * r.mean(name)):
        found.setdefault(row.params.get(key, ""), row)
    return sorted(found.values(), key=lambda row: number(row.params.get(key)) or 0.0)


def setting_plot(
    comparison: Comparison, key: str, groups: Sequence[Sequence[Row]], published: Sequence[dict[str, Any]], best: bool
) -> Drawn:
    """The panels of one setting."""
    metric = comparison.metric
    rows = [row for group in groups for row in group]
    tasks = sorted(
        name for name in {name for row in rows for name in row.measured()} if name.endswith("/normalised_entropy")
    ) if metric.endswith("normalised_entropy") else []  # fmt: skip
    names = [
        name for name in (tasks or [f"val/{metric}", f"test/{metric}"]) if sum(bool(r.values(name)) for r in rows) > 1
    ]
    theirs = {
        point["point"][key]: value
        for point in published
        if key in point.get("point", {})
        for name, value in point.get("metrics", {}).items()
        if name.removeprefix("test/") == metric and len(point["point"]) == 1
    }
    speed = sum(bool(row.values("test/users_per_s")) for row in rows) > 1
    figure, panels = new_figure(1 + speed + (len(theirs) > 1))
    values = sorted({row.params.get(key, "") for row in rows}, key=lambda v: (number(v) is None, number(v) or 0.0, v))
    places = {value: place for place, value in enumerate(values)}
    for panel, wanted in zip(panels, [names, ["test/users_per_s"]][: 1 + speed], strict=False):
        for line, (name, group) in enumerate((name, group) for name in wanted for group in groups):
            there = [row for row in group if row.values(name)]
            x = [places[row.params.get(key, "")] for row in there]
            spread = [0.0 if math.isnan(row.deviation(name)) else row.deviation(name) for row in there]
            label = name if len(groups) == 1 else f"{name}: {group[0].model}"
            colour = COLOURS[line % len(COLOURS)]
            panel.errorbar(
                x, [row.mean(name) for row in there], spread, marker="o", color=colour, label=label, capsize=2
            )
        dress(panel, values, key, " / ".join(dict.fromkeys(wanted)) if len(wanted) < 3 else metric)
        panel.legend()
    if len(theirs) > 1:
        beside_published(panels[-1], comparison, key, groups[0], theirs)
    task = "" if not tasks else " A line per task."
    line = "the best trial on validation for each value" if best else "all else equal"
    caption = f"{key}: {line}; bars are the deviation over seeds.{task} SID-MLP shows alpha, width and m in Figure 5."
    return (key.replace(".", "-"), f"What {key} does", caption, figure)


def dress(axes: Axes, values: Sequence[str], key: str, label: str) -> None:
    """Ticks at the setting's values, evenly spaced, and labels."""
    axes.set_xticks(range(len(values)), [value or "none" for value in values])
    axes.set_xlabel(key)
    axes.set_ylabel(label)
    axes.grid(alpha=0.15)


def beside_published(
    axes: Axes, comparison: Comparison, key: str, rows: Sequence[Row], theirs: dict[Any, float]
) -> None:
    """Ours and the paper's, each relative to its own best, since datasets differ."""
    metric = comparison.metric
    name = next((n for n in (f"test/{metric}", f"val/{metric}") if all(row.values(n) for row in rows)), "")
    best = min if lower_is_better(metric) else max
    lines = {"the paper": {number(str(value)): figure for value, figure in theirs.items()}}
    if name:
        lines = {"ours": {number(row.params[key]): row.mean(name) for row in rows}, **lines}
    everything = sorted({value for line in lines.values() for value in line if value is not None})
    for place, (label, line) in enumerate(lines.items()):
        there = [value for value in everything if value in line]
        top = best(line[value] for value in there)
        shown = [100 * (line[value] / top - 1) for value in there]
        axes.plot([everything.index(v) for v in there], shown, marker="os"[place], color=COLOURS[place], label=label)
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
        values = sorted({setting(row, key) for row in rows}, key=lambda v: (number(v) is None, number(v) or 0.0, v))
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
    for height, value in ((0, low), (0.5, statistics.fmean([low, high])), (1, high)):
        axes.annotate(f"{value:.4f}", (len(keys), height), xytext=(4, 2), textcoords="offset points", fontsize=7)
    axes.set_xticks(range(len(keys) + 1), [key.split(".", 1)[-1] for key in keys] + [name])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.margins(x=0.08, y=0.06)
    caption = f"A line per trial, through its settings to {name}; brighter is better, the best is thick."
    return [("trials", "Trials of the sweep", caption, figure)]


def setting(row: Row, key: str) -> str:
    """The row's value of a swept key; one that makes no difference to a row, such as the seed, is the runs' own."""
    return row.runs[0].seed if key == "fit.seed" else row.params.get(key, "none")
