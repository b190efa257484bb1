"""Build the tables of a comparison: verdicts, runs, paired tests, tasks and costs.

for table in tables(compare(select(uri, ["retrieval/DATASET"]))):
    print(table.text())
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from scipy.stats import t as student_t

from core.errors import pluralize
from models import registry
from pipelines.comparison.baselines import baseline_tables
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
    """Return all tables of a comparison that are not empty, with verdicts first."""
    return [
        *baseline_tables(comparison),
        runs_table(comparison),
        *compare_with_best(comparison),
        *over_users_tables(comparison),
        *task_tables(comparison.rows),
        *exposure_tables(comparison),
        costs_table(comparison),
    ]


def runs_table(comparison: Comparison) -> Table:
    """Return the metrics of all rows."""
    rows, metric = comparison.rows, comparison.metric
    measured = {name for row in rows for name in row.metric_names()}
    names = dict.fromkeys([f"val/{metric}", *METRICS, f"test/{metric}"])
    metrics = [name for name in names if name in measured]
    cells = [
        [
            row.model_label,
            name_row(row, rows),
            str(len({run.seed for run in row.runs})),
            *(format_mean(row, name) for name in metrics),
            format_count(row, "test/examples"),
        ]
        for row in rows
    ]
    header = ["model", "run", "seeds", *metrics, "requests"]
    notes = [*describe_columns(comparison, bool(metrics)), *describe_rows(rows)]
    notes += comparison.selection.notes
    return Table(comparison.selection.title, header, cells, notes)


def name_row(row: Row, rows: Sequence[Row]) -> str:
    """Return the name of a row, with its experiment if rows have several."""
    if len({other.experiment for other in rows}) > 1:
        return f"{row.experiment}: {row.name}"
    return row.name


def describe_columns(comparison: Comparison, is_measured: bool) -> list[str]:
    """Return notes that explain the columns of the table of runs.

    Args:
        comparison: Rows of one experiment.
        is_measured: Whether the table has columns of metrics.
    """
    rows, notes = comparison.rows, []
    models = {row.model for row in rows} & set(registry.MODELS)
    ranked = "each ranked over the full catalogue"
    if any(registry.find(model).ranks == "candidates" for model in models):
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
    return notes


def describe_rows(rows: Sequence[Row]) -> list[str]:
    """Return notes on single rows: settings and unfinished trainings."""
    notes = []
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
    """Return notes on a training that is too short or uses only some of its examples.

    A training is too short if it ran all of `fit.max_epochs` and the last epoch is the
    best.
    """
    best_epoch, last_epoch = row.mean("val/epoch"), row.mean("epoch")
    ran_all_epochs = row.params.get("fit.max_epochs") == f"{last_epoch:.0f}"
    notes = []
    if best_epoch == last_epoch and ran_all_epochs:
        epochs = pluralize(int(last_epoch), "epoch")
        notes.append(
            f"{row.name}: not trained to its end, the last of its {epochs} is the "
            "best; a larger fit.max_epochs may be better"
        )
    examples = row.params.get("fit.train_examples", "0")
    if examples not in ("0", ""):
        notes.append(
            f"{row.name}: trained on {int(examples):,} of its training examples alone "
            "(fit.train_examples)"
        )
    return notes


def exposure_tables(comparison: Comparison) -> list[Table]:
    """Return the table of coverage, novelty and Gini index, or [] if unmeasured."""
    measured = {name for row in comparison.rows for name in row.metric_names()}
    metrics = [name for name in EXPOSURE_METRICS if name in measured]
    rows = [row for row in comparison.rows if any(row.values(name) for name in metrics)]
    if not rows:
        return []
    cells = [
        [row.model, row.name, *(format_mean(row, name) for name in metrics)]
        for row in rows
    ]
    note = (
        "coverage: share of the catalogue in the top 10 of a request; new_items: share "
        "of recommended items without an event in training; gini: 0 if all items are "
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

    A `*` marks the best model of each experiment.

    Returns:
        The table, or None for a single comparison with one row per model.
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
    """Return the table cells of the best settings, one list per model."""
    metric = comparison.metric
    rows = [
        row
        for row in comparison.rows
        if not row.options
        and not row.is_diagnostic
        and math.isfinite(row.mean(f"val/{metric}"))
    ]
    rows.sort(key=lambda row: comparison.sign * row.mean(f"val/{metric}"))
    best_of_experiment: dict[str, Row] = {}
    by_model: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        best_of_experiment.setdefault(row.experiment, row)
        by_model.setdefault((row.experiment, row.model), []).append(row)
    cells = []
    for (experiment, model), model_rows in by_model.items():
        best = model_rows[0]
        star = " *" if best is best_of_experiment[experiment] else ""
        values = [format_mean(best, f"{split}/{metric}") for split in ("val", "test")]
        num_settings = str(len(model_rows))
        cells.append(
            [experiment, model + star, best.name, num_settings, metric, *values]
        )
    return cells


def compare_with_best(comparison: Comparison) -> list[Table]:
    """Test each row against the best row of its log, paired by seed.

    Returns:
        One table, or an empty list if no row shares two repeats with the best row.
    """
    metric = f"test/{comparison.metric}"
    best_by_log: dict[tuple[str, ...], Row] = {}
    cells = []
    for row in comparison.rows:
        if len(row.by_repeat(metric)) < 2:
            continue
        best = best_by_log.setdefault(row.log, row)  # rows are sorted best first
        if best is not row:
            cells += to_paired_cells(row, best, metric)
    if not cells:
        return []
    header = [
        "model",
        "run",
        "seeds",
        f"{metric} less the best's",
        "relative",
        "p",
        "training differs",
    ]
    names = ", ".join(row.name for row in best_by_log.values())
    note = (
        f"the best: {names}. p: two-sided paired t-test over shared seeds; with few "
        "seeds only large, steady differences are below 0.05."
    )
    return [Table("Against the best, seed by seed", header, cells, [note])]


def to_paired_cells(row: Row, best: Row, metric: str) -> list[list[str]]:
    """Return the table cells of a row and the best row.

    Args:
        row: Row to compare with the best.
        best: Best row of the same log.
        metric: Name of the metric, with its split.

    Returns:
        One list of cells, or [] if the rows share fewer than two repeats.
    """
    values, best_values = row.by_repeat(metric), best.by_repeat(metric)
    repeats = sorted(values.keys() & best_values.keys())
    if len(repeats) < 2:
        return []
    differences = [values[repeat] - best_values[repeat] for repeat in repeats]
    mean = statistics.fmean(differences)
    best_mean = statistics.fmean(best_values[repeat] for repeat in repeats)
    relative = ratio(mean, best_mean)
    return [
        [
            row.model,
            row.name,
            ", ".join(repeats),
            f"{mean:+.4f} ± {statistics.stdev(differences):.4f}",
            percent(relative),
            f"{paired_t_test(differences):.3f}",
            row.describe_training_difference(best),
        ]
    ]


def paired_t_test(differences: Sequence[float]) -> float:
    """Return the p-value of the two-sided paired t-test that the mean difference is 0.

    Raises:
        ValueError: If there are fewer than two differences.
    """
    if len(differences) < 2:
        raise ValueError(
            f"there are {len(differences)} differences, the test needs at least 2"
        )
    deviation, mean = statistics.stdev(differences), statistics.fmean(differences)
    if deviation == 0:  # equal differences: t is infinite, or 0 / 0
        return 1.0 if mean == 0 else 0.0
    statistic = abs(mean) / (deviation / math.sqrt(len(differences)))
    return float(2 * student_t.sf(statistic, len(differences) - 1))


def task_entropies(rows: Sequence[Row]) -> list[str]:
    """Return the names of the normalised entropies of single tasks."""
    measured = {name for row in rows for name in row.metric_names()}
    return sorted(name for name in measured if TASK_ENTROPY.fullmatch(name))


def task_tables(rows: Sequence[Row]) -> list[Table]:
    """Return the table of every task's normalised entropy, or [] if unmeasured."""
    names = task_entropies(rows)
    if not names:
        return []
    cells = [
        [row.model, row.name, *(format_mean(row, name) for name in names)]
        for row in rows
    ]
    note = (
        "by the test candidates' own rate: 1 is what the base rate alone gives, below "
        "1 is better."
    )
    header = ["model", "run", *map(task_name, names)]
    return [Table("Normalised entropy by task", header, cells, [note])]


def task_name(metric: str) -> str:
    """Return the task in a metric's name: `like` in `test/like/normalised_entropy`."""
    return metric.split("/")[1]


def format_mean(row: Row, metric: str) -> str:
    """Format the mean of a metric, with its standard deviation over several seeds."""
    mean, deviation = row.mean(metric), row.deviation(metric)
    if math.isnan(mean):
        return "-"
    return f"{mean:.4f}" if math.isnan(deviation) else f"{mean:.4f} ± {deviation:.4f}"


def format_count(row: Row, metric: str) -> str:
    """Format the mean of a metric as a whole number, or `-` if it is not measured."""
    mean = row.mean(metric)
    return "-" if math.isnan(mean) else f"{mean:,.0f}"
