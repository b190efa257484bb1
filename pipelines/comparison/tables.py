"""Build the tables of a comparison: verdicts, runs, paired tests, tasks and costs.

    for table in build_tables(comparison, measure_differences(comparison)):
        print(to_markdown(table))

A table is a title, a frame of texts and notes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import polars as pl
from polars import selectors as cs
from scipy.stats import t as student_t

from core.errors import pluralize
from models import registry
from models.metrics.metric import (
    CatalogueMetric,
    RequestMetric,
    find_metrics,
    lower_is_better,
)
from pipelines.comparison.compare import (
    ALL_ITEMS,
    KNOWN_LEFT_OUT,
    Comparison,
    leading_ranking,
    measured_metrics,
    repeat_share,
)
from pipelines.comparison.verdicts import (
    COMPARED,
    DIFFERENCES,
    DRAWS,
    MIN_USERS,
    SHOWN_ORDER_NOTE,
    TIES,
    VERDICTS,
    judge_difference,
)

Table = tuple[str, pl.DataFrame, list[str]]


def compared_names(kind: Any) -> list[str]:
    """Return the names on test of a kind's metrics that tables show."""
    return [
        f"test/{metric.name}@{k}"
        for metric in find_metrics(kind)
        for k in metric.compared
    ]


METRICS = (
    "val/ndcg@10",
    *compared_names(RequestMetric),
    "val/gauc",
    "test/gauc",
    "test/auc",
    "test/normalised_entropy",
    "test/log_loss",
    "test/eval_loss",
    "test/mean/normalised_entropy",
    "test/mean/auc",
)
"""Metrics of the table of runs, in order; metrics that no run has are left out."""

TASK_ENTROPY = re.compile(r"test/(?!mean/)(\w+)/normalised_entropy")
"""Names of the normalised entropy of one task."""

COSTS = {
    "train/parameters": "params",
    "val/epoch": "best epoch",
    "train/steps": "steps",
    "fit.batch_size": "batch",
    "train/total_seconds": "train s",
    "test/requests_per_s": "requests/s",
}
"""Headings of the table of costs."""

MAX_WIDTH = 10_000
"""Largest number of characters of a line of a table."""


def build_tables(comparison: Comparison, differences: pl.DataFrame) -> list[Table]:
    """Return the tables of a comparison that are not empty, with verdicts first.

    Args:
        comparison: Rows, best first.
        differences: Output of `measure_differences`.
    """
    rows, metric = comparison.shown, comparison.metric
    measured = measured_metrics(rows)
    run = pl.col("name").alias("run")
    full_run = run
    if rows["experiment"].n_unique() > 1:
        full_run = pl.format("{}: {}", "experiment", run).alias("run")
    names = dict.fromkeys((f"val/{metric}", *METRICS, f"test/{metric}"))
    means = [format_means(rows, name) for name in names if name in measured]
    runs = rows.select(
        full_run,
        *means,
        model="model_label",
        seeds=pl.col("num_seeds").cast(pl.String),
        requests=format_counts(rows["test/examples"]),
    )
    runs = runs.select(
        "model", "run", "seeds", *(mean.name for mean in means), "requests"
    )
    notes = describe_columns(rows, bool(means)) + describe_rows(rows) + comparison.notes
    tables = [
        *baseline_tables(comparison, differences),
        (comparison.title, runs, notes),
        *seeds_tables(comparison),
        *users_tables(differences),
    ]
    tasks = sorted(name for name in measured if TASK_ENTROPY.fullmatch(name))
    if tasks:
        means = [format_means(rows, name).alias(name.split("/")[1]) for name in tasks]
        note = (
            "by the test candidates' own rate: 1 is what the base rate alone gives, "
            "below 1 is better."
        )
        table = rows.select("model", run, *means)
        tables.append(("Normalised entropy by task", table, [note]))
    exposure = [name for name in compared_names(CatalogueMetric) if name in measured]
    if exposure:
        shown = rows.filter(pl.any_horizontal(pl.col(exposure).is_not_null()))
        means = [format_means(shown, name) for name in exposure]
        note = (
            "coverage: share of the catalogue in the top 10 of a request; new_items: "
            "share of recommended items without an event in training; gini: 0 if all "
            "items are recommended equally often; novelty: mean -log2 of their shares "
            "of training."
        )
        tables.append(("Recommended items", shown.select("model", run, *means), [note]))
    costs = [format_counts(rows[name]) for name in COSTS]
    table = rows.select("model", full_run, *costs).rename(COSTS)
    note = "train s: steps and validation alone. requests/s: of the evaluation on test."
    return [*tables, ("Sizes and speeds", table, [note])]


def format_means(rows: pl.DataFrame, metric: str) -> pl.Series:
    """Format the means of a metric, with the deviations over several seeds."""
    texts = []
    for mean, deviation in rows.select(metric, f"{metric} ±").rows():
        text = "-" if mean is None else f"{mean:.4f}"
        texts.append(text if deviation is None else f"{text} ± {deviation:.4f}")
    return pl.Series(metric, texts, pl.String)


def format_counts(values: pl.Series) -> pl.Series:
    """Format whole numbers; texts stay, and null becomes `-`."""
    if values.dtype.is_float():
        texts = [value if value is None else f"{value:,.0f}" for value in values]
        values = pl.Series(values.name, texts, pl.String)
    return values.fill_null("-")


def format_percent(change: float, base: float) -> str:
    """Format a relative change as `+1.5%`; changes below 1% have two decimals."""
    if not base:
        return "-"
    change /= base
    return f"{change:+.1%}" if abs(change) >= 0.01 else f"{change:+.2%}"


def describe_columns(rows: pl.DataFrame, has_metrics: bool) -> list[str]:
    """Return notes that explain the columns of the table of runs."""
    models = set(rows["model"]) & set(registry.MODELS)
    ranked = "each ranked over the full catalogue"
    if any(registry.find(model).ranks == "candidates" for model in models):
        ranked = "candidates ranked in each"
    options, fresh_log = pl.col("options"), pl.col("fresh_log")
    log_alone = pl.format("log {}", fresh_log.str.slice(0, 8))
    notes: dict[str, pl.Expr] = {
        f"val: at the best epoch. requests: of test, {ranked}.": pl.lit(has_metrics),
        "[...]: evaluated with these options in place of the checkpoint's own.": (
            (options != "") & (options != log_alone)
        ),
        "[log ...]: evaluated on another log than the log of the training, so the "
        "requests differ.": fresh_log != "",
        "±: sample standard deviation over the seeds of a row.": pl.col("num_seeds")
        > 1,
    }
    return [note for note, condition in notes.items() if len(rows.filter(condition))]


def describe_rows(rows: pl.DataFrame) -> list[str]:
    """Return notes on single rows: settings, and trainings that are not complete."""
    notes = []
    for row in rows.filter(options="").iter_rows(named=True):
        name, epoch = row["name"], row["epoch"]
        if row["settings"]:
            notes.append(f"{name}: {row['settings']}")
        is_last_best = epoch is not None and epoch == row["val/epoch"]
        if is_last_best and row["fit.max_epochs"] == f"{epoch:.0f}":
            notes.append(
                f"{name}: not trained to its end, the last of its "
                f"{pluralize(int(epoch), 'epoch')} is the best; a larger "
                "fit.max_epochs may be better"
            )
        examples = int(row["fit.train_examples"] or 0)
        if examples:
            notes.append(
                f"{name}: trained on {examples:,} of its training examples alone "
                "(fit.train_examples)"
            )
        if row["num_unfinished"]:
            total = pluralize(row["num_runs"], "run")
            notes.append(f"{name}: {row['num_unfinished']} of {total} not finished")
    return notes


def baseline_tables(comparison: Comparison, differences: pl.DataFrame) -> list[Table]:
    """Return the table of trained models and the best baselines of their logs.

    The list is empty if no baseline was evaluated.
    """
    if differences.is_empty():
        return []
    leading = leading_ranking(comparison.shown)
    is_shown, ranking = pl.col("kind") == "shown", pl.col("ranking")
    is_tied = is_shown & (pl.col("base_mean") == TIES)
    lines = differences.filter(pl.col("kind").is_in(["baseline", "shown"]) & ~is_tied)
    cells = []
    for line in lines.sort(ranking != leading, "position", "kind").iter_rows(
        named=True
    ):
        is_diagnostic = line["kind"] == "shown"
        words = DIFFERENCES if is_diagnostic else VERDICTS
        cells.append(
            {
                "run": "  against the shown order" if is_diagnostic else line["label"],
                "ranking": line["ranking"],
                "best without training": line["model_label of base"],
                "its value": f"{line['base_mean']:.4f}",
                **format_difference(line, words),
            }
        )
    if not cells:
        return []
    table = pl.DataFrame(cells)
    if table["ranking"].n_unique() == 1:
        table = table.drop("ranking")
    notes, share = [], repeat_share(comparison.shown)
    if share is not None:
        which = "of all items" if leading == ALL_ITEMS else "without known items"
        notes.append(
            f"{share:.1%} of the test requests ask for an item of the user's history, "
            f"so the ranking {which} comes first."
        )
    if KNOWN_LEFT_OUT in set(lines["ranking"]):
        notes.append(
            "With known items left out, a request for an item of the history counts as "
            "a miss of every model."
        )
    notes.append(
        "The best model without training of each ranking, by test; differences per "
        f"user with a bootstrap over users. Below {MIN_USERS} users there is no "
        "verdict."
    )
    if len(lines.filter(is_shown)):
        notes.append(SHOWN_ORDER_NOTE)
    return [("Against the best model without training", table, notes)]


def users_tables(differences: pl.DataFrame) -> list[Table]:
    """Return the table of paired differences, or [] without metrics per user."""
    cells = [
        {
            "model": line["name"],
            "against": line["name of base"],
            "pairs of runs": str(line["pairs"]),
            **format_difference(line, DIFFERENCES),
            "training differs": describe_training_difference(line),
        }
        for line in differences.iter_rows(named=True)
        if line["kind"] in ("teacher", "best")
    ]
    note = (
        "Differences per user, averaged over the pairs of runs; the interval is of a "
        f"bootstrap over users ({DRAWS:,} draws) and does not cover other seeds. Below "
        f"{MIN_USERS} users there is no verdict."
    )
    return [("On the same users", pl.DataFrame(cells), [note])] if cells else []


def format_difference(
    line: dict[str, Any], words: tuple[str, str, str]
) -> dict[str, str]:
    """Return the cells of a difference on the same users."""
    mean, low, high, metric = line["mean"], line["low"], line["high"], line["metric"]
    return {
        "users": f"{line['users']:,}",
        f"test/{metric}": f"{mean:+.4f}",
        "95% interval": f"{low:+.4f} to {high:+.4f}",
        "relative": format_percent(mean, line["base_mean"]),
        "verdict": judge_difference(low, high, line["users"], metric, words),
    }


def describe_training_difference(line: dict[str, Any]) -> str:
    """Return in which of steps, batch size and seeds a row and its base differ.

    The text is such as "steps 1,000 / 2,000; batch 64 / 128". It is empty if one of the
    models is not trained by steps.
    """
    texts = []
    columns = {"steps": "train/steps", "batch": "fit.batch_size", "seeds": "seeds"}
    for name, column in columns.items():
        values = [
            f"{value:,.0f}" if isinstance(value, float) else value
            for value in (line[column], line[f"{column} of base"])
        ]
        if all(values) and values[0] != values[1]:
            texts.append(f"{name} {values[0]} / {values[1]}")
    has_steps = line["has_steps"] and line["has_steps of base"]
    return "; ".join(texts) if has_steps else ""


def seeds_tables(comparison: Comparison) -> list[Table]:
    """Test each row against the best row of its log, paired by seed.

    Returns:
        One table, or an empty list if no row shares two seeds with the best row.
    """
    metric = f"test/{comparison.metric}"
    by_row: dict[int, dict[str, float]] = {}
    values = comparison.runs.select("row", "repeat", metric).drop_nulls()
    for number, repeat, value in values.iter_rows():
        by_row.setdefault(number, {})[repeat] = value
    best: dict[str, dict[str, Any]] = {}
    cells = []
    for row in comparison.shown.iter_rows(named=True):
        own = by_row.get(row["row"], {})
        if len(own) < 2:
            continue
        base = best.setdefault(row["log"], row)
        others = by_row[base["row"]]
        shared = sorted(own.keys() & others.keys())
        if base is row or len(shared) < 2:
            continue
        difference = np.array([own[seed] - others[seed] for seed in shared])
        mean, deviation = float(difference.mean()), float(difference.std(ddof=1))
        base_mean = float(np.mean([others[seed] for seed in shared]))
        p = float(mean == 0)  # of equal differences, where t is infinite, or 0 / 0
        if deviation:
            statistic = abs(mean) / (deviation / math.sqrt(len(shared)))
            p = 2 * student_t.sf(statistic, len(shared) - 1)
        of_base = {f"{name} of base": base[name] for name in COMPARED}
        cells.append(
            {
                "model": row["model"],
                "run": row["name"],
                "seeds": ", ".join(shared),
                f"{metric} less the best's": f"{mean:+.4f} ± {deviation:.4f}",
                "relative": format_percent(mean, base_mean),
                "p": f"{p:.3f}",
                "training differs": describe_training_difference(row | of_base),
            }
        )
    note = (
        f"the best: {', '.join(row['name'] for row in best.values())}. p: two-sided "
        "paired t-test over shared seeds; with few seeds only large, steady "
        "differences are below 0.05."
    )
    title = "Against the best, seed by seed"
    return [(title, pl.DataFrame(cells), [note])] if cells else []


def best_tables(comparisons: Sequence[Comparison]) -> list[Table]:
    """Return the table of the best settings of each model by validation.

    A `*` marks the best model of each experiment. The list is empty for a single
    comparison with one row per model.
    """
    tables, of_model = [], ["experiment", "model"]
    for comparison in comparisons:
        val, test = (f"{split}/{comparison.metric}" for split in ("val", "test"))
        rows = comparison.shown.filter(
            pl.col(val).is_not_null() & ~pl.col("is_diagnostic"), options=""
        )
        descending = not lower_is_better(val)
        rows = rows.sort(val, descending=descending, maintain_order=True)
        rows = rows.with_columns(pl.len().over(of_model).cast(pl.String))
        rows = rows.unique(of_model, keep="first", maintain_order=True)
        is_best = pl.col("experiment").is_first_distinct()
        columns: dict[str, Any] = {
            "experiment": "experiment",
            "model": pl.col("model")
            + pl.when(is_best).then(pl.lit(" *")).otherwise(pl.lit("")),
            "best run": "name",
            "settings tried": "len",
            "metric": pl.lit(comparison.metric),
            "val": format_means(rows, val),
            "test": format_means(rows, test),
        }
        tables.append(rows.select(**columns))
    table = pl.concat(tables)
    if len(comparisons) == 1 and (table["settings tried"] == "1").all():
        return []
    note = "by the metric on val; *: the best model of its experiment."
    return [("Best of each model", table, [note])] if len(table) else []


def to_markdown(table: Table) -> str:
    """Render a table as Markdown with aligned columns, and the notes below."""
    title, frame, notes = table
    texts = cs.string().map_elements(escape_markdown, return_dtype=pl.String)
    frame = frame.with_columns(texts).rename(escape_markdown)
    with pl.Config(
        tbl_formatting="ASCII_MARKDOWN",
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
        tbl_rows=-1,
        tbl_cols=-1,
        tbl_width_chars=MAX_WIDTH,
        fmt_str_lengths=MAX_WIDTH,
    ):
        lines = str(frame)
    items = [f"- {escape_markdown(note)}" for note in notes]
    return "\n".join([f"### {escape_markdown(title)}", "", lines, "", *items, ""])


def escape_markdown(text: str) -> str:
    """Return a text as one line of Markdown without HTML, links or new cells."""
    line = escape(" ".join(text.splitlines()), quote=False)
    return line.replace("|", "\\|").replace("](", "]\\(")
