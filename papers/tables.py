"""What the papers' tables ask of runs here: students against the margin of their teacher, models of actions beside the
interleaved baseline, what each consists of, what models rank by, and where the runs are from."""

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
"""The major tasks of AttnMVP; of a log that has none of them, all tasks are shown."""


def paper_tables(comparison: Comparison) -> list[Table]:
    """Return all tables of a page except the last one, without empty tables."""
    rows = comparison.rows
    return [
        *non_inferiority_tables(rows, comparison.metric, comparison.teachers),
        *relative_tables(rows),
        *parameter_tables(rows),
    ]


def non_inferiority_tables(
    rows: Sequence[Row], metric: str, teachers: Sequence[Row] = ()
) -> list[Table]:
    """Return tables of students beside each evaluation of their teacher.

    A teacher is found by the hash of its weights among the rows or `teachers`. A
    student evaluated with non-default options is compared with a teacher evaluated with
    the same ones.
    """
    name = f"test/{metric}"
    cells = []
    for student in rows:
        taught_by = student.runs[0].teacher  # all runs of a row have the same
        beside = {
            row.name: run.metrics[name]
            for row in (*rows, *teachers)
            for run in row.runs
            if taught_by and run.weights == taught_by and name in run.metrics
            if not student.options or student.options == row.options
            if student.task == row.task
        }
        values = student.by_seed(name)
        for teacher, value in beside.items() if values else ():
            found = non_inferiority(list(values.values()), value)
            mean = f"{found.mean:.4f}" + (
                "" if len(values) == 1 else f" ± {found.deviation:.4f}"
            )
            p = (
                "needs 2 seeds"
                if len(values) == 1
                else f"{found.p:.3f}{' †' if found.p < 0.05 else ''}"
            )
            cells.append(
                [
                    student.name,
                    teacher,
                    str(len(values)),
                    mean,
                    f"{value:.4f}",
                    f"{found.difference:+.4f}",
                    p,
                ]
            )
    if not cells:
        return []
    header = ["student", "teacher", "seeds", name, "teacher's", "difference", "p"]
    notes = [
        f"p: one-sided t-test over seeds that the student loses no more than {MARGIN:.0%} (App. C.4 of SID-MLP); "
        f"† below 0.05: it does not."
    ]
    return [Table("Students and their teachers", header, cells, notes)]


def relative_tables(rows: Sequence[Row]) -> list[Table]:
    """Return each row's change on test against the best baseline of its log, over
    common seeds.
    """
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
        f"change on test relative to {', '.join(row.name for row in baselines.values())} of the same seed; below 0 is "
        f"better. ±: sample standard deviation over seeds. NE: normalised entropy."
    ]
    return [Table("Against the interleaved baseline", header, cells, notes)]


def change(row: Row, baseline: Row, name: str, seeds: Sequence[str]) -> str:
    """Format the mean relative change over `seeds`, with its deviation for several
    seeds.
    """
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
    """Return the number of parameters by part, one row per model and size."""
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
    """Return the origin of runs: name, hardware, commit and command."""
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
