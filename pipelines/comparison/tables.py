"""The tables of a comparison: verdicts, runs, seed by seed, on the same users, task by task.

for table in tables(compare(select(uri, ["retrieval/DATASET"]))): print(table.text())
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from scipy.stats import t as student_t

from models import registry
from models.config import pluralize
from pipelines.comparison.floors import floor_tables
from pipelines.comparison.over_users import over_users_tables
from pipelines.comparison.rows import Comparison, Row, ratio
from pipelines.comparison.table import Table, percent

METRICS = (
    "val/ndcg@10",
    "test/recall@5",
    "test/recall@10",
    "test/ndcg@5",
    "test/ndcg@10",
    "val/gauc",
    "test/gauc",
    "test/with_position/gauc",
    "test/auc",
    "test/normalised_entropy",
    "test/log_loss",
    "test/eval_loss",
    "test/mean/normalised_entropy",
    "test/mean/auc",
)
"""Metrics of the table of runs, in order; metrics that no run has are left out."""

EXPOSURE_METRICS = ("test/coverage@10", "test/new_items@10", "test/gini@10")
"""Metrics of the recommended items."""

TASK_ENTROPY = re.compile(r"test/(?!mean/|with_position/)\w+/normalised_entropy")
"""Names of the normalised entropy of one task."""


def tables(comparison: Comparison) -> list[Table]:
    """Return all tables of a comparison, without empty ones; verdicts come first."""
    return [
        *floor_tables(comparison),
        runs_table(comparison),
        *paired_tables(comparison),
        *over_users_tables(comparison),
        *task_tables(comparison.rows),
        *exposure_tables(comparison),
        costs_table(comparison),
    ]


def runs_table(comparison: Comparison) -> Table:
    """Return the metrics of all rows."""
    rows, metric = comparison.rows, comparison.metric
    measured = {name for row in rows for name in row.measured()}
    names = dict.fromkeys([f"val/{metric}", *METRICS, f"test/{metric}"])
    metrics = [name for name in names if name in measured]
    has_folds = any(row.folds for row in rows)
    cells = [
        [
            row.model,
            name_row(row, rows),
            str(len({run.seed for run in row.runs})),
            *([str(len(row.folds) or 1)] if has_folds else []),
            *(format_mean(row, name) for name in metrics),
            format_count(row, "test/examples"),
        ]
        for row in rows
    ]
    header = ["model", "run", "seeds", *["folds"] * has_folds, *metrics, "requests"]
    notes = [*describe_columns(comparison, bool(metrics)), *describe_rows(rows)]
    notes += comparison.selection.notes
    return Table(comparison.selection.title, header, cells, notes)


def name_row(row: Row, rows: Sequence[Row]) -> str:
    """Return the name of a row, with its experiment if rows have several."""
    if len({other.experiment for other in rows}) > 1:
        return f"{row.experiment}: {row.name}"
    return row.name


def describe_columns(comparison: Comparison, is_measured: bool) -> list[str]:
    """Return notes that explain the columns of the table of runs."""
    rows, notes = comparison.rows, []
    ranks_candidates = comparison.metric.endswith(("auc", "entropy", "rig", "loss"))
    ranked = "each ranked over the full catalogue"
    if ranks_candidates:
        ranked = "candidates ranked in each"
    if is_measured:
        notes.append(f"val: at the best epoch. requests: of test, {ranked}.")
    if any(row.options.values for row in rows):
        notes.append(
            "[...]: evaluated with these options in place of the checkpoint's own."
        )
    if any(row.options.fresh_log for row in rows):
        notes.append(
            "[log ...]: evaluated on another log than the log of the training, so the "
            "requests differ."
        )
    if any(len({run.seed for run in row.runs}) > 1 for row in rows):
        notes.append("±: sample standard deviation over the seeds of a row.")
    if any(len(row.folds) > 1 for row in rows):
        notes.append(
            "folds: windows of time (fit.fold) that a row is the mean over, each with its own "
            "training; ± is over the folds too."
        )
    return notes


def describe_rows(rows: Sequence[Row]) -> list[str]:
    """Return notes on single rows: diagnostics, settings, trainings that are not done."""
    notes = []
    for row in rows:
        if row.model in registry.MODELS and registry.find(row.model).is_diagnostic:
            notes.append(
                f"{row.name}: results in the order that the log showed, a diagnostic of "
                "the log. A position is unknown when a search is ranked, so this is no "
                "floor, and it is never the best model."
            )
    for row in rows:
        if row.options:
            continue
        if row.settings:
            settings = [f"{name} {value[:12]}" for name, value in row.settings.items()]
            notes.append(f"{row.name}: {', '.join(settings)}")
        notes += describe_training(row)
        unfinished = sum(not run.finished for run in row.runs)
        if unfinished:
            total = pluralize(len(row.runs), "run")
            notes.append(f"{row.name}: {unfinished} of {total} not finished")
    return notes


def describe_training(row: Row) -> list[str]:
    """Return notes on a training that ended early or used a part of its examples.

    A training ended early if its last epoch is the best one; early stopping is no such
    end.
    """
    best, last = row.mean("val/epoch"), row.mean("epoch")
    notes = []
    if best == last and str(row.params.get("fit.max_epochs")) == f"{last:.0f}":
        epochs = pluralize(int(last), "epoch")
        notes.append(
            f"{row.name}: not trained to its end, the last of its {epochs} is the best; "
            f"a larger fit.max_epochs may be better"
        )
    examples = row.params.get("fit.train_examples", "0")
    if examples not in ("0", ""):
        notes.append(
            f"{row.name}: trained on {int(examples):,} of its training examples alone "
            f"(fit.train_examples)"
        )
    return notes


def exposure_tables(comparison: Comparison) -> list[Table]:
    """Return the table of coverage, novelty and Gini index, if they are measured."""
    measured = {name for row in comparison.rows for name in row.measured()}
    metrics = [name for name in EXPOSURE_METRICS if name in measured]
    rows = [row for row in comparison.rows if any(row.values(name) for name in metrics)]
    if not rows:
        return []
    cells = [
        [row.model, row.name, *(format_mean(row, name) for name in metrics)]
        for row in rows
    ]
    note = (
        "coverage: share of the catalogue in the top 10 of a request; new_items: share of "
        "recommended items without an event in training; gini: 0 if all items are "
        "recommended equally often."
    )
    return [Table("Recommended items", ["model", "run", *metrics], cells, [note])]


def costs_table(comparison: Comparison) -> Table:
    """Return sizes, training lengths and speeds of all rows."""
    cells = [
        [
            row.model,
            name_row(row, comparison.rows),
            format_count(row, "train/parameters"),
            format_count(row, "val/epoch"),
            format_count(row, "train/steps"),
            row.params.get("fit.batch_size", "-"),
            format_count(row, "train/total_seconds"),
            format_count(row, "test/users_per_s"),
        ]
        for row in comparison.rows
    ]
    header = ["model", "run", "params", "best epoch", "steps", "batch", "train s"]
    header += ["requests/s"]
    note = "train s: steps and validation alone. requests/s: of the evaluation on test."
    return Table("Sizes and speeds", header, cells, [note])


def best_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Return the best settings of each model by validation, over several comparisons.

    A `*` marks the best model of each experiment. The result is None if no model has
    more than one row and there is one comparison alone.
    """
    cells = []
    for comparison in comparisons:
        cells += best_cells(comparison)
    if not cells or (len(comparisons) == 1 and all(row[3] == "1" for row in cells)):
        return None
    header = ["experiment", "model", "best run", "settings tried"]
    header += ["metric", "val", "test"]
    note = "by the metric on val; *: the best model of its experiment."
    return Table("Best of each model", header, cells, [note], 3)


def best_cells(comparison: Comparison) -> list[list[str]]:
    """Return a row of cells for each model of a comparison."""
    name = comparison.metric
    rows = [
        row
        for row in comparison.rows
        if not row.options and math.isfinite(row.mean(f"val/{name}"))
    ]
    rows.sort(key=lambda row: comparison.sign * row.mean(f"val/{name}"))
    best_of_experiment: dict[str, Row] = {}
    by_model: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        best_of_experiment.setdefault(row.experiment, row)
        by_model.setdefault((row.experiment, row.model), []).append(row)
    cells = []
    for (experiment, model), (best, *others) in by_model.items():
        star = " *" if best is best_of_experiment[experiment] else ""
        values = [format_mean(best, f"{split}/{name}") for split in ("val", "test")]
        tried = str(1 + len(others))
        cells.append([experiment, model + star, best.name, tried, name, *values])
    return cells


def paired_tables(comparison: Comparison) -> list[Table]:
    """Compare rows with several seeds with the best row of their log, seed by seed."""
    name = f"test/{comparison.metric}"
    best: dict[tuple[str, ...], Row] = {}
    cells = []
    for row in comparison.rows:
        if len(row.by_seed(name)) < 2:
            continue
        first = best.setdefault(row.log, row)
        if first is not row:
            cells += to_paired_cells(row, first, name)
    if not cells:
        return []
    header = ["model", "run", "seeds", f"{name} less the best's", "relative", "p"]
    header.append("training differs")
    names = ", ".join(row.name for row in best.values())
    note = (
        f"the best: {names}. p: two-sided paired t-test over shared seeds; with few seeds "
        f"only large, steady differences are below 0.05."
    )
    if any(row.folds for row in best.values()):
        note += (
            " Runs are paired by seed and fold; later folds train on what earlier ones do, so p is somewhat "
            "too small."
        )
    return [Table("Against the best, seed by seed", header, cells, [note])]


def to_paired_cells(row: Row, best: Row, metric: str) -> list[list[str]]:
    """Return the cells of a row beside the best, or nothing if they share few seeds."""
    mine, theirs = row.by_seed(metric), best.by_seed(metric)
    shared = sorted(mine.keys() & theirs.keys())
    if len(shared) < 2:
        return []
    differences = [mine[seed] - theirs[seed] for seed in shared]
    mean = statistics.fmean(differences)
    relative = ratio(mean, statistics.fmean(theirs[seed] for seed in shared))
    return [
        [
            row.model,
            row.name,
            ", ".join(shared),
            f"{mean:+.4f} ± {statistics.stdev(differences):.4f}",
            percent(relative),
            f"{paired_test(differences):.3f}",
            row.describe_training_difference(best),
        ]
    ]


def paired_test(differences: Sequence[float]) -> float:
    """Return p of the two-sided paired t-test that the mean of differences is 0.

    Raises:
        ValueError: if there are fewer than two differences.
    """
    if len(differences) < 2:
        raise ValueError(
            f"there are {len(differences)} differences, the test needs at least 2; "
            f"train more seeds"
        )
    deviation, mean = statistics.stdev(differences), statistics.fmean(differences)
    if deviation == 0:  # equal differences: t is infinite, or 0 / 0
        return 1.0 if mean == 0 else 0.0
    statistic = abs(mean) / (deviation / math.sqrt(len(differences)))
    return float(2 * student_t.sf(statistic, len(differences) - 1))


def task_entropies(rows: Sequence[Row]) -> list[str]:
    """Return the names of the normalised entropies of single tasks."""
    measured = {name for row in rows for name in row.measured()}
    return sorted(name for name in measured if TASK_ENTROPY.fullmatch(name))


def task_tables(rows: Sequence[Row]) -> list[Table]:
    """Return the normalised entropy of every task on test, if it is measured."""
    names = task_entropies(rows)
    if not names:
        return []
    cells = [
        [row.model, row.name, *(format_mean(row, name) for name in names)]
        for row in rows
    ]
    note = (
        "by the test candidates' own rate: 1 is what the base rate alone gives, below 1 is "
        "better."
    )
    header = ["model", "run", *map(task_name, names)]
    return [Table("Normalised entropy by task", header, cells, [note])]


def task_name(metric: str) -> str:
    """Return `like` for `test/like/normalised_entropy`."""
    return metric.split("/")[1]


def format_mean(row: Row, metric: str) -> str:
    """Format the mean, with the standard deviation over several seeds."""
    mean, deviation = row.mean(metric), row.deviation(metric)
    if math.isnan(mean):
        return "-"
    return f"{mean:.4f}" if math.isnan(deviation) else f"{mean:.4f} ± {deviation:.4f}"


def format_count(row: Row, metric: str) -> str:
    """Format the mean as a whole number."""
    mean = row.mean(metric)
    return "-" if math.isnan(mean) else f"{mean:,.0f}"
