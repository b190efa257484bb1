"""Tables that the papers' experiments need.

Students against the margin of their teacher, models of actions against the interleaved
baseline, numbers of parameters, and the origins of runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from papers.noninferiority import MARGIN, non_inferiority
from pipelines.comparison.rows import Comparison, Row, ratio
from pipelines.comparison.table import Table
from pipelines.comparison.tables import task_entropies, task_name

BASELINE = "interleaved"

MAJOR = ("long_dwell", "contribution", "like")
"""The major tasks of AttnMVP; all tasks are shown for logs without them."""


def paper_tables(comparison: Comparison) -> list[Table]:
    """Return all tables with content except the origins."""
    rows = comparison.rows
    return [
        *non_inferiority_tables(rows, comparison.metric, comparison.teachers),
        *relative_tables(rows),
        *parameter_tables(rows),
    ]


def non_inferiority_tables(
    rows: Sequence[Row], metric: str, teachers: Sequence[Row] = ()
) -> list[Table]:
    """Compare students with each evaluation of their teacher.

    Teachers are found by the hash of their weights. A student that was evaluated with
    other options is compared only with its teacher under the same options.

    Args:
        rows: Rows of the comparison.
        metric: Metric on test.
        teachers: Rows of further teachers.
    """
    name = f"test/{metric}"
    cells = []
    for student in rows:
        taught_by = student.runs[0].teacher  # all runs of a row have the same
        teacher_values = {
            row.name: run.metrics[name]
            for row in (*rows, *teachers)
            for run in row.runs
            if taught_by and run.weights == taught_by and name in run.metrics
            if not student.options or student.options == row.options
            if student.task == row.task
        }
        values = student.by_seed(name)
        for teacher, value in teacher_values.items() if values else ():
            test = non_inferiority(list(values.values()), value)
            mean, p = f"{test.mean:.4f}", "needs 2 seeds"
            if len(values) > 1:
                mean += f" ± {test.deviation:.4f}"
                p = f"{test.p:.3f}{' †' if test.p < 0.05 else ''}"
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
    header = ["student", "teacher", "seeds", name, "teacher's", "difference", "p"]
    notes = [
        f"p: one-sided t-test over seeds that the student loses no more than "
        f"{MARGIN:.0%} (App. C.4 of SID-MLP); † below 0.05: it does not."
    ]
    return [Table("Students and their teachers", header, cells, notes)]


def relative_tables(rows: Sequence[Row]) -> list[Table]:
    """Compare each row on test with the best baseline of its log, over common seeds."""
    baselines: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row.model == BASELINE and row.by_seed("test/eval_loss"):
            baselines.setdefault(row.log, row)
    every = task_entropies(rows)
    major = [
        name for task in MAJOR if (name := f"test/{task}/normalised_entropy") in every
    ] or every
    names = ["test/eval_loss", "test/mean/normalised_entropy", *major]
    cells = []
    for row in rows:
        if (baseline := baselines.get(row.log)) is None:
            continue
        seeds = sorted(row.by_seed(names[0]).keys() & baseline.by_seed(names[0]).keys())
        if row is not baseline and seeds:
            changes = (change(row, baseline, name, seeds) for name in names)
            cells.append([row.model, row.name, str(len(seeds)), *changes])
    if not cells:
        return []
    header = [
        "model",
        "run",
        "seeds",
        "eval loss",
        "mean NE",
        *(f"{task_name(name)} NE" for name in major),
    ]
    notes = [
        f"change on test relative to "
        f"{', '.join(row.name for row in baselines.values())} of the same seed; below "
        f"0 is better. ±: sample standard deviation over seeds. NE: normalised entropy."
    ]
    return [Table("Against the interleaved baseline", header, cells, notes)]


def change(row: Row, baseline: Row, name: str, seeds: Sequence[str]) -> str:
    """Format the mean relative change over `seeds`, with its deviation if several."""
    ours, theirs = row.by_seed(name), baseline.by_seed(name)
    changes = [
        ratio(ours[seed], theirs[seed]) - 1
        for seed in seeds
        if seed in ours and seed in theirs
    ]
    if not changes:
        return "-"
    spread = f" ± {statistics.stdev(changes):.2%}" if len(changes) > 1 else ""
    mean = statistics.fmean(changes)
    return "-" if math.isnan(mean) else f"{mean:+.2%}{spread}"


def parameter_tables(rows: Sequence[Row]) -> list[Table]:
    """Make a table of the parameters by part, one row per model and size."""
    parts = list(
        dict.fromkeys(
            n
            for row in rows
            for run in row.runs
            for n in run.metrics
            if n.startswith("parameters/")
        )
    )
    parts.sort(key=lambda name: name == "parameters/total")
    lines = {
        (
            row.model,
            *(f"{row.mean(name):,.0f}" if row.values(name) else "-" for name in parts),
        )
        for row in rows
        if any(row.values(name) for name in parts)
    }
    if not lines:
        return []
    header = ["model", *(name.removeprefix("parameters/") for name in parts)]
    return [
        Table("Parameters", header, [list(line) for line in sorted(lines)], num_words=1)
    ]


def origins_table(origins: Sequence[tuple[str, ...]]) -> Table:
    """Make the table of the hardware, commit and command of runs."""
    cells = [
        [name, hardware, commit[:10], command]
        for name, hardware, commit, command in sorted(origins, key=lambda o: o[0])
    ]
    return Table(
        "Where the runs are from",
        ["run", "hardware", "commit", "command"],
        cells,
        num_words=4,
    )
