"""Figures of the papers: tokenizers and beams (Fig. 3a and c of SID-MLP).

    plots(compare(select(uri, ["retrieval/DATASET"])), (tokenizers, beams))

A function returns (name, title, caption, figure) tuples, none if no run has the values.
"""

from __future__ import annotations

import math
from pathlib import Path

from pipelines.comparison.rows import Comparison, Row, lower_is_better, ratio
from pipelines.comparison.svg import Drawing, to_label
from pipelines.figures import COLOURS, label_axes, new_figure


def tokenizers(comparison: Comparison) -> list[Drawing]:
    """Plot teacher and student for each folder of semantic IDs, for two or more."""
    name = f"test/{comparison.metric}"
    pairs: dict[str, tuple[float, Row]] = {}
    sign = 1 if lower_is_better(comparison.metric) else -1
    for student in sorted(
        comparison.rows, key=lambda row: sign * row.mean(f"val/{comparison.metric}")
    ):
        teachers = [
            run.metrics[name]
            for row in comparison.rows
            for run in row.runs
            if not row.options
            and run.weights == student.runs[0].teacher
            and name in run.metrics
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
        axes.bar(
            place - 0.2,
            teacher,
            0.38,
            color=COLOURS[6],
            label=None if place else "teacher",
        )
        error = None if math.isnan(deviation) else deviation
        axes.bar(
            place + 0.2,
            value,
            0.38,
            yerr=error,
            color=COLOURS[0],
            label=None if place else "student",
        )
        axes.annotate(
            f"{ratio(value, teacher):.1%}",
            (place + 0.2, value),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_xticks(range(len(pairs)), list(pairs))
    axes.set_ylabel(name)
    axes.legend(loc="lower right")
    caption = "Each student beside its own teacher, by tokenizer; above, what it keeps (SID-MLP, Figure 3a)."
    return [Drawing("tokenizers", "Tokenizers", caption, figure)]


def beams(comparison: Comparison) -> list[Drawing]:
    """Plot the metric by the number of beams, for models evaluated with two or more."""
    name = f"test/{comparison.metric}"
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for row in comparison.rows:
        if row.beam and row.values(name):
            checkpoint = row.params.get(
                "checkpoint", ""
            )  # of a run that is an evaluation alone
            named = (
                f"{row.model} {Path(checkpoint.removesuffix('/best')).name}"
                if checkpoint
                else row.name
            )
            lines.setdefault((checkpoint, named.removesuffix(f" [{row.options}]")), {})[
                row.beam
            ] = row.mean(name)
    lines = {told: points for told, points in lines.items() if len(points) > 1}
    if not lines:
        return []
    figure, (axes,) = new_figure(1)
    for place, ((_, label), points) in enumerate(lines.items()):
        counts, values = zip(*sorted(points.items()), strict=True)
        axes.plot(
            counts, values, marker="o", color=COLOURS[place % 7], label=to_label(label)
        )
    label_axes(axes, "beams", name, legend=True)
    caption = (
        "Checkpoints evaluated again with other numbers of beams (SID-MLP, Figure 3c)."
    )
    return [Drawing("beams", "Beams and accuracy", caption, figure)]
