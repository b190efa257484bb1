"""What a comparison says, as tables: the runs, seed by seed, students beside teachers, item shift, the best.

for table in tables(compare(select(uri, ["retrieval/DATASET"]))): print(table.text())
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from models.words import number_of
from pipelines import tracking
from pipelines.comparison.baseline_tables import baseline_tables, figure
from pipelines.comparison.benchmark_tables import benchmark_tables, of_benchmark
from pipelines.comparison.noninferiority import MARGIN, non_inferiority, paired_test
from pipelines.comparison.over_users import over_users_tables
from pipelines.comparison.rows import FRESH, Comparison, Row, lower_is_better, ratio
from pipelines.comparison.table import Table, percent

SHOWN = (
    "val/ndcg@10", "test/recall@5", "test/recall@10", "test/ndcg@5", "test/ndcg@10",
    "val/gauc", "test/gauc", "test/auc", "test/normalised_entropy", "test/log_loss", "test/eval_loss",
    "test/mean/normalised_entropy", "test/mean/auc",
)  # fmt: skip
"""Metrics of the table, in order; those that no run has are left out."""


def tables(comparison: Comparison) -> list[Table]:
    """All tables that have something to say."""
    if of_benchmark(comparison.rows):
        return benchmark_tables(comparison.rows)
    return [
        runs_table(comparison),
        *paired_tables(comparison),
        *over_users_tables(comparison),
        *non_inferiority_tables(comparison.rows, comparison.metric, comparison.teachers),
        *item_shift_tables(comparison.rows),
        *importance_tables(comparison.rows),
        *baseline_tables(comparison.rows),
    ]


def runs_table(comparison: Comparison) -> Table:
    """All rows with their metrics, sizes, times and requests per second."""
    rows, metric = comparison.rows, comparison.metric
    measured = {name for row in rows for name in row.measured()}
    wanted = dict.fromkeys([f"val/{metric}", *SHOWN, f"test/{metric}"])
    metrics = [name for name in wanted if name in measured]
    several = len({row.experiment for row in rows}) > 1
    header = ["model", "run", "seeds", *metrics, "requests", "params", "epoch", "train s", "requests/s"]
    cells = [
        [
            row.model,
            f"{row.experiment}: {row.name}" if several else row.name,
            str(len({run.seed for run in row.runs})),
            *(figure(row, name) for name in metrics),
            number(row, "test/examples"),
            number(row, "train/parameters"),
            number(row, "val/epoch"),
            number(row, "train/total_seconds"),
            number(row, "test/users_per_s"),
        ]
        for row in rows
    ]
    ranked = (
        "those of test, candidates ranked in each"
        if metric.endswith(("auc", "entropy", "rig", "loss"))
        else "those of test, each ranked over the full catalogue"
    )
    notes = [f"val: at the best epoch. requests: {ranked}. train s: steps and validation alone."] if metrics else []
    if any(FRESH.sub("", row.options) for row in rows):
        notes.append("[...]: evaluated with these options in place of the checkpoint's own.")
    if any(row.fresh for row in rows):
        notes.append("[fresh-...]: evaluated on another log than that of the training, so these requests are others.")
    if any(len({run.seed for run in row.runs}) > 1 for row in rows):
        notes.append("±: sample standard deviation over the runs of a row, which differ in their seed alone.")
    for row in rows:
        if row.options:
            continue
        if row.settings:
            shown = ", ".join(f"{name} {value[:12]}" for name, value in row.settings.items())
            notes.append(f"{row.name}: {shown}")
        if unfinished := sum(not run.finished for run in row.runs):
            notes.append(f"{row.name}: {unfinished} of {number_of(len(row.runs), 'run')} not finished")
    return Table(comparison.selection.title, header, cells, notes + comparison.selection.notes)


def best_table(comparisons: Sequence[Comparison]) -> Table | None:
    """The best settings of each model by validation, and * the best model of each family and dataset; None where no
    model has more than one row and there is one family alone."""
    cells = []
    for comparison in comparisons:
        name, sign = comparison.metric, 1 if lower_is_better(comparison.metric) else -1
        own = [row for row in comparison.rows if not row.options and math.isfinite(row.mean(f"val/{name}"))]
        own.sort(key=lambda row: sign * row.mean(f"val/{name}"))
        best: dict[tuple[str, str], list[Row]] = {}
        for row in own:
            best.setdefault((row.experiment, row.model), []).append(row)
        for (experiment, model), rows in best.items():
            first = next(row for row in own if row.experiment == experiment)
            star = " *" if rows[0] is first else ""
            cells.append(
                [experiment, model + star, rows[0].name, str(len(rows)), name]
                + [figure(rows[0], f"{split}/{name}") for split in ("val", "test")]
            )
    if not cells or (len(comparisons) == 1 and all(line[3] == "1" for line in cells)):
        return None
    header = ["experiment", "model", "best run", "settings tried", "metric", "val", "test"]
    return Table("Best of each model", header, cells, ["by the metric on val; *: the best model of its experiment."], 3)


def paired_tables(comparison: Comparison) -> list[Table]:
    """Each row with two or more seeds against the best of the same log that has them too, seed by seed."""
    name = f"test/{comparison.metric}"
    best: dict[tuple[str, ...], Row] = {}
    cells = []
    for row in comparison.rows:
        if len(row.by_seed(name)) < 2 or (first := best.setdefault(row.log, row)) is row:
            continue
        ours, theirs = row.by_seed(name), first.by_seed(name)
        shared = sorted(ours.keys() & theirs.keys())
        if len(shared) < 2:
            continue
        differences = [ours[seed] - theirs[seed] for seed in shared]
        mean = statistics.fmean(differences)
        relative = ratio(mean, statistics.fmean(theirs[seed] for seed in shared))
        deviation, p = statistics.stdev(differences), paired_test(differences)
        cells.append(
            [row.model, row.name, ", ".join(shared), f"{mean:+.4f} ± {deviation:.4f}", percent(relative), f"{p:.3f}"]
        )
    header = ["model", "run", "seeds", f"{name} less the best's", "relative", "p"]
    names = ", ".join(row.name for row in best.values())
    notes = [
        f"the best: {names}. p: two-sided paired t-test over shared seeds; with few seeds only large, steady "
        f"differences are below 0.05."
    ]
    return [Table("Against the best, seed by seed", header, cells, notes)] if cells else []


def non_inferiority_tables(rows: Sequence[Row], metric: str, teachers: Sequence[Row] = ()) -> list[Table]:
    """Students beside each evaluation of their teacher, told by the hash of its weights, among the rows or `teachers`;
    none without such pairs.

    A student that was evaluated with other options than its own stands beside a teacher with the same alone.
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
            if student.options in ("", row.options) and student.asked == row.asked
        }
        values = student.by_seed(name)
        for teacher, value in beside.items() if values else ():
            found = non_inferiority(list(values.values()), value)
            mean = f"{found.mean:.4f}" + ("" if len(values) == 1 else f" ± {found.deviation:.4f}")
            p = "needs 2 seeds" if len(values) == 1 else f"{found.p:.3f}{' †' if found.p < 0.05 else ''}"
            cells.append([student.name, teacher, str(len(values)), mean, f"{value:.4f}", f"{found.difference:+.4f}", p])
    if not cells:
        return []
    header = ["student", "teacher", "seeds", name, "teacher's", "difference", "p"]
    notes = [
        f"p: one-sided t-test over seeds that the student loses no more than {MARGIN:.0%} (App. C.4 of SID-MLP); "
        f"† below 0.05: it does not."
    ]
    return [Table("Students and their teachers", header, cells, notes)]


def item_shift_tables(rows: Sequence[Row]) -> list[Table]:
    """NDCG@10 and Recall@10 on targets first seen late in the log; none where no run was so evaluated."""
    measured = {name for row in rows for run in row.runs for name in run.metrics}
    names = sorted({found[1] for name in measured if (found := re.fullmatch(r"test/(temporal\d+)/examples", name))})
    there = [row for row in rows if any(row.values(f"test/{name}/examples") for name in names)]
    if not there:
        return []
    header, cells = ["model", "run"], [[row.model, row.name] for row in there]
    for name in names:
        header += [f"{name} requests", "recall@10", "ndcg@10"]
        for row, line in zip(there, cells, strict=True):
            line.append(number(row, f"test/{name}/examples"))
            line += [figure(row, f"test/{name}/{metric}") for metric in ("recall@10", "ndcg@10")]
    notes = [
        "test requests whose target was first interacted with, by anyone, after the timestamp by which 80% (90%) of "
        "all interactions had happened (App. E.3 of SID-MLP)."
    ]
    return [Table("Temporal item shift", header, cells, notes)]


def importance_tables(rows: Sequence[Row]) -> list[Table]:
    """What models lose on test without each of their inputs; none where no run was so evaluated."""
    prefix = "test/importance/"
    names = {name.removeprefix(prefix) for row in rows for name in row.measured() if name.startswith(prefix)}
    inputs = sorted(name for name in names if not name.endswith("_sd"))
    there = [row for row in rows if any(row.values(prefix + name) for name in inputs)]
    if not there:
        return []
    cells = [[row.model, row.name, *(figure(row, prefix + name) for name in inputs)] for row in there]
    notes = [
        "loss of the metric where an input comes from another request at random (jobs.evaluate --importance true)."
    ]
    return [Table("What models rank by", ["model", "run", *inputs], cells, notes)]


def origins_table(comparison: Comparison) -> Table:
    """Where the runs are from: hardware, commit and command of each."""
    cells = []
    for run in sorted(comparison.selection.runs, key=lambda run: str(run.info.run_name)):
        tags = run.data.tags
        commit = tags.get(tracking.COMMIT_TAG, "")[:10]
        cells.append([str(run.info.run_name), tags.get("hardware", ""), commit, tags.get("command", "")])
    return Table("Where the runs are from", ["run", "hardware", "commit", "command"], cells, words=4)


def number(row: Row, metric: str) -> str:
    """Mean as a whole number."""
    return "-" if math.isnan(row.mean(metric)) else f"{row.mean(metric):,.0f}"
