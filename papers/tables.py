"""Make tables for the papers' experiments.

They compare students with the margin of their teacher and models of actions with the
interleaved baseline, and list numbers of parameters and the origins of runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from papers.noninferiority import MARGIN, SIGNIFICANCE, non_inferiority
from pipelines.comparison.rows import Comparison, Row, ratio
from pipelines.comparison.table import Table
from pipelines.comparison.tables import task_entropies, task_name

BASELINE = "interleaved"

MAJOR_TASKS = ("long_dwell", "contribution", "like")
"""Major tasks of AttnMVP; for logs without these tasks, all tasks are shown."""


def paper_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of a comparison that have content, without the origins."""
    rows = comparison.rows
    return [
        *non_inferiority_tables(rows, comparison.metric, comparison.teachers),
        *relative_tables(rows),
        *parameter_tables(rows),
    ]


def non_inferiority_tables(
    rows: Sequence[Row], metric: str, teachers: Sequence[Row] = ()
) -> list[Table]:
    """Return a table of students beside the evaluations of their teachers.

    Teachers are identified by the hash of their weights. A student that was evaluated
    with other options than its checkpoint's is compared only with evaluations of its
    teacher with the same options.

    Args:
        rows: Rows of the comparison.
        metric: Metric on test.
        teachers: Rows of teachers that are not in `rows`.

    Returns:
        One table, or an empty list if there are no students.
    """
    name = f"test/{metric}"
    cells = []
    for student in rows:
        values = student.by_repeat(name)
        if not values:
            continue
        teacher_values = find_teacher_values(student, [*rows, *teachers], name)
        for teacher, value in teacher_values.items():
            test = non_inferiority(list(values.values()), value)
            mean, p = f"{test.mean:.4f}", "needs 2 seeds"
            if len(values) > 1:
                mean += f" ± {test.deviation:.4f}"
                p = f"{test.p:.3f}{' †' if test.p < SIGNIFICANCE else ''}"
            cells.append(
                [
                    student.name,
                    teacher,
                    str(len(values)),
                    mean,
                    f"{value:.4f}",
                    f"{test.difference:+.4f}",
                    p,
                ]
            )
    if not cells:
        return []
    header = [
        "student",
        "teacher",
        "seeds",
        name,
        "teacher's",
        "difference",
        "p",
    ]
    notes = [
        f"p: one-sided t-test over seeds that the student loses no more than "
        f"{MARGIN:.0%} (App. C.4 of SID-MLP); † below 0.05: it does not."
    ]
    return [Table("Students and their teachers", header, cells, notes)]


def find_teacher_values(
    student: Row, rows: Sequence[Row], name: str
) -> dict[str, float]:
    """Return a metric of the student's teacher by the name of the teacher's row.

    Args:
        student: Row of a student, whose runs have the same teacher.
        rows: Rows among which the teacher is looked up.
        name: Name of the metric.
    """
    teacher = student.runs[0].teacher
    if not teacher:
        return {}
    values = {}
    for row in rows:
        same_options = not student.options or student.options == row.options
        if not same_options or student.task != row.task:
            continue
        for run in row.runs:
            if run.weights == teacher and name in run.metrics:
                values[row.name] = run.metrics[name]
    return values


def relative_tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of relative changes on test against the interleaved baseline.

    Each row is compared with the first baseline of its log, over the repeats of both.
    """
    baselines: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row.model == BASELINE and row.by_repeat("test/eval_loss"):
            baselines.setdefault(row.log, row)
    entropies = task_entropies(rows)
    major = [f"test/{task}/normalised_entropy" for task in MAJOR_TASKS]
    shown = [name for name in major if name in entropies] or entropies
    names = ["test/eval_loss", "test/mean/normalised_entropy", *shown]
    cells = []
    for row in rows:
        baseline = baselines.get(row.log)
        if baseline is None:
            continue
        baseline_repeats = baseline.by_repeat(names[0])
        repeats = sorted(row.by_repeat(names[0]).keys() & baseline_repeats.keys())
        if row is not baseline and repeats:
            changes = [format_change(row, baseline, name, repeats) for name in names]
            cells.append([row.model, row.name, str(len(repeats)), *changes])
    if not cells:
        return []
    header = [
        "model",
        "run",
        "seeds",
        "eval loss",
        "mean NE",
        *(f"{task_name(name)} NE" for name in shown),
    ]
    notes = [
        f"change on test relative to "
        f"{', '.join(row.name for row in baselines.values())} of the same seed; below "
        f"0 is better. ±: sample standard deviation over seeds. NE: normalised entropy."
    ]
    return [Table("Against the interleaved baseline", header, cells, notes)]


def format_change(row: Row, baseline: Row, name: str, repeats: Sequence[str]) -> str:
    """Format the mean relative change of a metric over repeats.

    Args:
        row: Compared row.
        baseline: Row to compare with.
        name: Name of the metric.
        repeats: Repeats to average over, which are seeds; with several, the
            standard deviation is added.
    """
    values, base_values = row.by_repeat(name), baseline.by_repeat(name)
    changes = [
        ratio(values[repeat], base_values[repeat]) - 1
        for repeat in repeats
        if repeat in values and repeat in base_values
    ]
    if not changes:
        return "-"
    spread = f" ± {statistics.stdev(changes):.2%}" if len(changes) > 1 else ""
    mean = statistics.fmean(changes)
    return "-" if math.isnan(mean) else f"{mean:+.2%}{spread}"


def parameter_tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of the numbers of parameters by part, one line per model and size.

    The list is empty if no run has logged its parameters.
    """
    metrics: dict[str, None] = {}
    for row in rows:
        for run in row.runs:
            metrics |= dict.fromkeys(run.metrics)
    parts = [name for name in metrics if name.startswith("parameters/")]
    parts.sort(key=lambda name: name == "parameters/total")
    lines = set()
    for row in rows:
        if any(row.values(name) for name in parts):
            counts = [
                f"{row.mean(name):,.0f}" if row.values(name) else "-" for name in parts
            ]
            lines.add((row.model, *counts))
    if not lines:
        return []
    header = ["model", *(name.removeprefix("parameters/") for name in parts)]
    cells = [list(line) for line in sorted(lines)]
    return [Table("Parameters", header, cells, num_words=1)]


def origins_table(origins: Sequence[tuple[str, ...]]) -> Table:
    """Return the table of the hardware, commit and command of runs.

    Args:
        origins: Name, hardware, commit and command of each run.
    """
    cells = [
        [name, hardware, commit[:10], command]
        for name, hardware, commit, command in sorted(
            origins, key=lambda origin: origin[0]
        )
    ]
    return Table(
        "Where the runs are from",
        ["run", "hardware", "commit", "command"],
        cells,
        num_words=4,
    )
