"""Plots of runs: training loss (Fig. 3 of QGS), tokenizers (Fig. 3a of SID-MLP), NDCG by beams (its Fig. 3c).

Each function gives (name, title, caption, figure) tuples, none where no runs have what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from pipelines.comparison.rows import Comparison, Row, lower_is_better, ratio
from pipelines.figures import COLOURS, new_figure, say_axes

Drawn = tuple[str, str, str, Figure]
"""Name, title, caption and figure of a plot."""

PANELS, LINES = 4, 7
"""Models and rows of a model whose curves are drawn, at most; the best."""

POINTS = 300
"""Points of a curve, at most; more are averaged, neighbours together."""


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
                (row, comparison.history(run, key)) for row in rows[:LINES] for run in row.runs if key in run.metrics
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
            label = None if row.name in colours else legible(row.name)  # one entry of the legend for all seeds
            colour = colours.setdefault(row.name, COLOURS[len(colours) % len(COLOURS)])
            steps, values = zip(*thinned(points), strict=True)
            axes.plot(steps, values, color=colour, lw=1.2, alpha=0.85, label=label)
        axes.set_title(model)
        say_axes(axes, "optimizer step", key, legend=True)
    for axes in panels[len(drawn) :]:
        axes.remove()
    caption = (
        "Training loss as logged, and validation, by optimizer step; one line per run, a colour per row of the table. "
        "Losses of different models are different sums, so each model has its own panel (QGS, Figure 3)."
    )
    return [("curves", "Learning curves", caption, figure)]


def legible(label: str) -> str:
    """A label as a legend shows it, which leaves out those that begin with `_`."""
    return f" {label}" if label.startswith("_") else label


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `POINTS` points, each the mean of its neighbours."""
    size = math.ceil(len(points) / POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(p[0] for p in g) / len(g), sum(p[1] for p in g) / len(g)) for g in groups]


def tokenizers(comparison: Comparison) -> list[Drawn]:
    """Teacher and student side by side for each folder of semantic IDs; none with fewer than two."""
    name = f"test/{comparison.metric}"
    pairs: dict[str, tuple[float, Row]] = {}
    sign = 1 if lower_is_better(comparison.metric) else -1
    for student in sorted(comparison.rows, key=lambda row: sign * row.mean(f"val/{comparison.metric}")):
        teachers = [
            run.metrics[name]
            for row in comparison.rows
            for run in row.runs
            if not row.options and run.weights == student.runs[0].teacher and name in run.metrics
        ]
        folder = student.runs[0].sids
        if (
            student.runs[0].teacher
            and not student.options
            and teachers
            and student.values(name)
            and folder not in pairs
        ):
            pairs[folder] = (teachers[0], student)
    if len(pairs) < 2:
        return []
    figure, (axes,) = new_figure(1)
    for place, (teacher, student) in enumerate(pairs.values()):
        value, deviation = student.mean(name), student.deviation(name)
        axes.bar(place - 0.2, teacher, 0.38, color=COLOURS[6], label=None if place else "teacher")
        error = None if math.isnan(deviation) else deviation
        axes.bar(place + 0.2, value, 0.38, yerr=error, color=COLOURS[0], label=None if place else "student")
        axes.annotate(
            f"{ratio(value, teacher):.1%}", (place + 0.2, value), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    axes.set_xticks(range(len(pairs)), list(pairs))
    axes.set_ylabel(name)
    axes.legend(loc="lower right")
    caption = "Each student beside its own teacher, by tokenizer; above, what it keeps (SID-MLP, Figure 3a)."
    return [("tokenizers", "Tokenizers", caption, figure)]


def beams(comparison: Comparison) -> list[Drawn]:
    """The metric by the number of beams, for models evaluated with two or more."""
    name = f"test/{comparison.metric}"
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for row in comparison.rows:
        if row.beam and row.values(name):
            checkpoint = row.params.get("checkpoint", "")  # of a run that is an evaluation alone
            named = f"{row.model} {Path(checkpoint.removesuffix('/best')).name}" if checkpoint else row.name
            lines.setdefault((checkpoint, named.removesuffix(f" [{row.options}]")), {})[row.beam] = row.mean(name)
    lines = {told: points for told, points in lines.items() if len(points) > 1}
    if not lines:
        return []
    figure, (axes,) = new_figure(1)
    for place, ((_, label), points) in enumerate(lines.items()):
        counts, values = zip(*sorted(points.items()), strict=True)
        axes.plot(counts, values, marker="o", color=COLOURS[place % 7], label=legible(label))
    say_axes(axes, "beams", name, legend=True)
    caption = "Checkpoints evaluated again with other numbers of beams (SID-MLP, Figure 3c)."
    return [("beams", "Beams and accuracy", caption, figure)]
