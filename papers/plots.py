"""Plot figures of the papers: tokenizers and beams (Fig. 3a and c of SID-MLP).

    comparison = compare(select(uri, ["retrieval/DATASET"]))
    plots(comparison, (draw_tokenizers, draw_beams))

The functions return an empty list if no run has the values.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from pipelines.comparison.rows import Comparison, Row, lower_is_better, ratio
from pipelines.comparison.svg import Drawing, to_label
from pipelines.figures import COLOURS, label_axes, new_figure

STUDENT_COLOUR, TEACHER_COLOUR = COLOURS[0], COLOURS[6]


def draw_tokenizers(comparison: Comparison) -> list[Drawing]:
    """Draw the metric on test of teacher and student by folder of semantic IDs.

    The list is empty for fewer than two folders.
    """
    name = f"test/{comparison.metric}"
    pairs = find_best_students(comparison)
    if len(pairs) < 2:
        return []
    figure, (axes,) = new_figure(1)
    for position, (teacher, student) in enumerate(pairs.values()):
        value, deviation = student.mean(name), student.deviation(name)
        axes.bar(
            position - 0.2,
            teacher,
            0.38,
            color=TEACHER_COLOUR,
            label=None if position else "teacher",
        )
        error = None if math.isnan(deviation) else deviation
        axes.bar(
            position + 0.2,
            value,
            0.38,
            yerr=error,
            color=STUDENT_COLOUR,
            label=None if position else "student",
        )
        axes.annotate(
            f"{ratio(value, teacher):.1%}",
            (position + 0.2, value),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_xticks(range(len(pairs)), list(pairs))
    axes.set_ylabel(name)
    axes.legend(loc="lower right")
    caption = (
        "Each student beside its own teacher, by tokenizer; above, what it keeps "
        "(SID-MLP, Figure 3a)."
    )
    return [Drawing("tokenizers", "Tokenizers", caption, figure)]


def find_best_students(comparison: Comparison) -> dict[str, tuple[float, Row]]:
    """Return the teacher's metric and the best student, by folder of semantic IDs.

    Students are ranked by validation. Evaluations with other options than the
    checkpoint's are ignored.
    """
    name = f"test/{comparison.metric}"
    default_rows = [row for row in comparison.rows if not row.options]
    teacher_values: dict[str, float] = {}
    for row in default_rows:
        for run in row.runs:
            if name in run.metrics:
                teacher_values.setdefault(run.weights, run.metrics[name])
    sign = 1 if lower_is_better(comparison.metric) else -1
    default_rows.sort(key=lambda row: sign * row.mean(f"val/{comparison.metric}"))
    pairs: dict[str, tuple[float, Row]] = {}
    for student in default_rows:
        first_run = student.runs[0]
        teacher = first_run.teacher
        if teacher and teacher in teacher_values and student.values(name):
            pairs.setdefault(first_run.sids, (teacher_values[teacher], student))
    return pairs


def draw_beams(comparison: Comparison) -> list[Drawing]:
    """Plot the metric by the number of beams.

    Models that were evaluated with a single number of beams are left out.
    """
    name = f"test/{comparison.metric}"
    # mean of the metric by number of beams, for each checkpoint
    curves: dict[CurveKey, dict[int, float]] = {}
    for row in comparison.rows:
        if row.beam and row.values(name):
            curves.setdefault(curve_key(row), {})[row.beam] = row.mean(name)
    curves = {key: points for key, points in curves.items() if len(points) > 1}
    if not curves:
        return []
    has_experiments = len({key.experiment for key in curves}) > 1
    figure, (axes,) = new_figure(1)
    for index, (key, points) in enumerate(curves.items()):
        num_beams, values = zip(*sorted(points.items()), strict=True)
        label = f"{key.experiment}: {key.label}" if has_experiments else key.label
        axes.plot(
            num_beams,
            values,
            marker="o",
            color=COLOURS[index % len(COLOURS)],
            label=to_label(label),
        )
    label_axes(axes, "beams", name, legend=True)
    caption = (
        "Checkpoints evaluated again with other numbers of beams (SID-MLP, Figure 3c)."
    )
    return [Drawing("beams", "Beams and accuracy", caption, figure)]


class CurveKey(NamedTuple):
    """Key that the evaluations of a checkpoint with different beams share."""

    experiment: str
    """Name of the experiment."""
    checkpoint: str
    """Folder of the checkpoint that was only evaluated; empty for a training."""
    label: str
    """Name of the training, or model and name of the checkpoint."""


def curve_key(row: Row) -> CurveKey:
    """Return the experiment and the checkpoint that a row evaluates, and its label.

    The label lacks the number of beams, so that all beams of a run share a key.
    """
    checkpoint = row.params.get("checkpoint", "")
    if checkpoint:  # a run that only evaluates a checkpoint names the checkpoint
        label = f"{row.model} {Path(checkpoint.removesuffix('/best')).name}"
    else:
        label = row.name.removesuffix(f" [{row.options}]")
    return CurveKey(row.experiment, checkpoint, label)
