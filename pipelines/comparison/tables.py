"""What a comparison says, as tables: the runs, seed by seed, on the same users, task by task, and the best.

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
from pipelines.comparison.rows import FRESH, Comparison, Row, lower_is_better, ratio
from pipelines.comparison.table import Table, percent

SHOWN = (
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
    "test/coverage@10",
    "test/new_items@10",
    "test/gini@10",
)
"""Metrics of the table, in order; those that no run has are left out."""

ENTROPY = re.compile(r"test/(?!mean/|with_position/)\w+/normalised_entropy")
"""The metric of one task."""


def tables(comparison: Comparison) -> list[Table]:
    """All tables that have something to say."""
    return [
        runs_table(comparison),
        *floor_tables(comparison),
        *paired_tables(comparison),
        *over_users_tables(comparison),
        *task_tables(comparison.rows),
    ]


def runs_table(comparison: Comparison) -> Table:
    """All rows with their metrics, sizes, times and requests per second."""
    rows, metric = comparison.rows, comparison.metric
    measured = {name for row in rows for name in row.measured()}
    wanted = dict.fromkeys([f"val/{metric}", *SHOWN, f"test/{metric}"])
    metrics = [name for name in wanted if name in measured]
    several = len({row.experiment for row in rows}) > 1
    header = [
        "model",
        "run",
        "seeds",
        *metrics,
        "requests",
        "params",
        "epoch",
        "steps",
        "batch",
        "train s",
    ]
    header.append("requests/s")
    cells = [
        [
            row.model,
            f"{row.experiment}: {row.name}" if several else row.name,
            str(len({run.seed for run in row.runs})),
            *(figure(row, name) for name in metrics),
            number(row, "test/examples"),
            number(row, "train/parameters"),
            number(row, "val/epoch"),
            number(row, "train/steps"),
            row.params.get("fit.batch_size", "-"),
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
    notes = (
        [
            f"val: at the best epoch. requests: {ranked}. train s: steps and validation alone."
        ]
        if metrics
        else []
    )
    if any(FRESH.sub("", row.options) for row in rows):
        notes.append(
            "[...]: evaluated with these options in place of the checkpoint's own."
        )
    if any(row.fresh for row in rows):
        notes.append(
            "[fresh-...]: evaluated on another log than that of the training, so these requests are others."
        )
    if any(len({run.seed for run in row.runs}) > 1 for row in rows):
        notes.append(
            "±: sample standard deviation over the runs of a row, which differ in their seed alone."
        )
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
            shown = ", ".join(
                f"{name} {value[:12]}" for name, value in row.settings.items()
            )
            notes.append(f"{row.name}: {shown}")
        notes += training_notes(row)
        if unfinished := sum(not run.finished for run in row.runs):
            notes.append(
                f"{row.name}: {unfinished} of {pluralize(len(row.runs), 'run')} not finished"
            )
    return Table(
        comparison.selection.title, header, cells, notes + comparison.selection.notes
    )


def training_notes(row: Row) -> list[str]:
    """Return notes on a row whose training was not trained to its end: validation still rose at the last epoch, or only
    a share of the training examples was drawn. A row that its validation ended has none."""
    best, done = row.mean("val/epoch"), row.mean("epoch")
    notes = []
    if best == done and str(row.params.get("fit.max_epochs")) == f"{done:.0f}":
        notes.append(
            f"{row.name}: not trained to its end, the last of its {pluralize(int(done), 'epoch')} is the best; "
            f"a larger fit.max_epochs may be better"
        )
    examples = row.params.get("fit.train_examples", "0")
    if examples not in ("0", ""):
        notes.append(
            f"{row.name}: trained on {int(examples):,} of its training examples alone (fit.train_examples)"
        )
    return notes


def best_table(comparisons: Sequence[Comparison]) -> Table | None:
    """The best settings of each model by validation, and * the best model of each family and dataset; None where no
    model has more than one row and there is one family alone."""
    cells = []
    for comparison in comparisons:
        name, sign = comparison.metric, 1 if lower_is_better(comparison.metric) else -1
        own = [
            row
            for row in comparison.rows
            if not row.options and math.isfinite(row.mean(f"val/{name}"))
        ]
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
    header = [
        "experiment",
        "model",
        "best run",
        "settings tried",
        "metric",
        "val",
        "test",
    ]
    return Table(
        "Best of each model",
        header,
        cells,
        ["by the metric on val; *: the best model of its experiment."],
        3,
    )


def paired_tables(comparison: Comparison) -> list[Table]:
    """Each row with two or more seeds against the best of the same log that has them too, seed by seed."""
    name = f"test/{comparison.metric}"
    best: dict[tuple[str, ...], Row] = {}
    cells = []
    for row in comparison.rows:
        if (
            len(row.by_seed(name)) < 2
            or (first := best.setdefault(row.log, row)) is row
        ):
            continue
        ours, theirs = row.by_seed(name), first.by_seed(name)
        shared = sorted(ours.keys() & theirs.keys())
        if len(shared) < 2:
            continue
        differences = [ours[seed] - theirs[seed] for seed in shared]
        mean = statistics.fmean(differences)
        relative = ratio(mean, statistics.fmean(theirs[seed] for seed in shared))
        spread, p = (
            f"{mean:+.4f} ± {statistics.stdev(differences):.4f}",
            f"{paired_test(differences):.3f}",
        )
        cells.append(
            [
                row.model,
                row.name,
                ", ".join(shared),
                spread,
                percent(relative),
                p,
                row.unlike(first),
            ]
        )
    header = [
        "model",
        "run",
        "seeds",
        f"{name} less the best's",
        "relative",
        "p",
        "trained unlike",
    ]
    names = ", ".join(row.name for row in best.values())
    notes = [
        f"the best: {names}. p: two-sided paired t-test over shared seeds; with few seeds only large, steady "
        f"differences are below 0.05."
    ]
    return (
        [Table("Against the best, seed by seed", header, cells, notes)] if cells else []
    )


def paired_test(differences: Sequence[float]) -> float:
    """p of the two-sided paired t-test that differences, one per seed, are 0 in the mean. ValueError below two."""
    if len(differences) < 2:
        raise ValueError(
            f"there are {len(differences)} differences, the test needs at least 2; train more seeds"
        )
    deviation, mean = statistics.stdev(differences), statistics.fmean(differences)
    if (
        deviation == 0
    ):  # all alike: t is without bound, or there is no difference at all
        return 1.0 if mean == 0 else 0.0
    statistic = abs(mean) / (deviation / math.sqrt(len(differences)))
    return float(2 * student_t.sf(statistic, len(differences) - 1))


def entropies(rows: Sequence[Row]) -> list[str]:
    """The normalised entropies of tasks that the rows have."""
    return sorted(
        {name for row in rows for name in row.measured() if ENTROPY.fullmatch(name)}
    )


def task_tables(rows: Sequence[Row]) -> list[Table]:
    """Normalised entropy of every task on test, of models of actions and of search."""
    if not (names := entropies(rows)):
        return []
    cells = [
        [row.model, row.name, *(figure(row, name) for name in names)] for row in rows
    ]
    note = "by the test candidates' own rate: 1 is what the base rate alone gives, below 1 is better."
    return [
        Table(
            "Normalised entropy by task",
            ["model", "run", *map(task_of, names)],
            cells,
            [note],
        )
    ]


def task_of(name: str) -> str:
    """`like` of `test/like/normalised_entropy`."""
    return name.split("/")[1]


def figure(row: Row, metric: str) -> str:
    """Mean, with the deviation where there are several runs."""
    mean, deviation = row.mean(metric), row.deviation(metric)
    if math.isnan(mean):
        return "-"
    return f"{mean:.4f}" if math.isnan(deviation) else f"{mean:.4f} ± {deviation:.4f}"


def number(row: Row, metric: str) -> str:
    """Mean as a whole number."""
    return "-" if math.isnan(row.mean(metric)) else f"{row.mean(metric):,.0f}"
