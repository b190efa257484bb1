"""Models of actions task by task; beside the interleaved baseline, as in Tables 1 and 2 of AttnMVP; and what each
consists of, so that it is seen that only the fusion differs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from pipelines.comparison.rows import Row, ratio
from pipelines.comparison.table import Table

BASELINE = "interleaved"

ENTROPY = re.compile(r"test/(?!mean/)\w+/normalised_entropy")

MAJOR = ("long_dwell", "contribution", "like")
"""The paper's major tasks; of a log that has none of them, all tasks are shown."""


def baseline_tables(rows: Sequence[Row]) -> list[Table]:
    """All three, where there is something to say."""
    entropies = sorted({name for row in rows for name in row.measured() if ENTROPY.fullmatch(name)})
    return [*task_tables(rows, entropies), *relative_tables(rows, entropies), *parameter_tables(rows)]


def task_tables(rows: Sequence[Row], entropies: Sequence[str]) -> list[Table]:
    """Normalised entropy of every task on test."""
    cells = [[row.model, row.name, *(figure(row, name) for name in entropies)] for row in rows]
    if not entropies:
        return []
    note = "by the test candidates' own rate: 1 is what the base rate alone gives, below 1 is better."
    return [Table("Normalised entropy by task", ["model", "run", *map(task_of, entropies)], cells, [note])]


def relative_tables(rows: Sequence[Row], entropies: Sequence[str]) -> list[Table]:
    """Each row's change on test against the baseline of the same log, the best, over the seeds that both have."""
    baselines: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row.model == BASELINE and row.by_seed("test/eval_loss"):
            baselines.setdefault(row.log, row)
    major = [name for task in MAJOR if (name := f"test/{task}/normalised_entropy") in entropies] or entropies
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
    header = ["model", "run", "seeds", "eval loss", "mean NE", *(f"{task_of(name)} NE" for name in major)]
    notes = [
        f"change on test relative to {', '.join(row.name for row in baselines.values())} of the same seed; below 0 is "
        f"better. ±: sample standard deviation over seeds. NE: normalised entropy."
    ]
    return [Table("Against the interleaved baseline", header, cells, notes)]


def task_of(name: str) -> str:
    """`like` of `test/like/normalised_entropy`."""
    return name.split("/")[1]


def change(row: Row, baseline: Row, name: str, seeds: Sequence[str]) -> str:
    """Mean relative change over `seeds`, with its deviation where there are several."""
    ours, theirs = row.by_seed(name), baseline.by_seed(name)
    changes = [ratio(ours[seed], theirs[seed]) - 1 for seed in seeds if seed in ours and seed in theirs]
    if not changes:
        return "-"
    spread = f" ± {statistics.stdev(changes):.2%}" if len(changes) > 1 else ""
    mean = statistics.fmean(changes)
    return "-" if math.isnan(mean) else f"{mean:+.2%}{spread}"


def figure(row: Row, metric: str) -> str:
    """Mean, with the deviation where there are several runs."""
    mean, deviation = row.mean(metric), row.deviation(metric)
    if math.isnan(mean):
        return "-"
    return f"{mean:.4f}" if math.isnan(deviation) else f"{mean:.4f} ± {deviation:.4f}"


def parameter_tables(rows: Sequence[Row]) -> list[Table]:
    """Learned numbers by part of each model; one row per model and size."""
    parts = list(
        dict.fromkeys(n for row in rows for run in row.runs for n in run.metrics if n.startswith("parameters/"))
    )
    parts.sort(key=lambda name: name == "parameters/total")
    lines = {
        (row.model, *(f"{row.mean(name):,.0f}" if row.values(name) else "-" for name in parts))
        for row in rows
        if any(row.values(name) for name in parts)
    }
    if not lines:
        return []
    header = ["model", *(name.removeprefix("parameters/") for name in parts)]
    return [Table("Parameters", header, [list(line) for line in sorted(lines)], words=1)]
