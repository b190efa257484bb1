"""Build the tables of a comparison: verdicts on the same users, and the models.

    for table in build_tables(comparison, measure_differences(comparison)):
        print(to_markdown(table))

A table is a title, a frame of texts and notes.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

import polars as pl
from polars import selectors as cs

from models.metrics.metric import (
    TOP,
    CatalogueMetric,
    RequestMetric,
    find_metrics,
)
from pipelines.comparison.compare import (
    ALL_ITEMS,
    Comparison,
    leading_ranking,
    measured_metrics,
    repeat_share,
)
from pipelines.comparison.verdicts import (
    DIFFERENCES,
    DRAWS,
    MIN_USERS,
    SHOWN_ORDER_NOTE,
    VERDICTS,
    judge_difference,
)

Table = tuple[str, pl.DataFrame, list[str]]

METRICS = (
    "val/gauc",
    "test/gauc",
    "test/gauc_within_positions",
    "test/auc",
    "test/normalised_entropy",
    "test/log_loss",
    "test/eval_loss",
    "test/mean/normalised_entropy",
    "test/mean/auc",
)
"""Metrics of candidates in the table of models, in order."""

COUNTS = {
    "test/examples": "requests",
    "train/parameters": "params",
    "train/total_seconds": "train s",
    "test/requests_per_s": "requests/s",
}
"""Headings of the columns of counts in the table of models."""

MAX_WIDTH = 10_000
"""Largest number of characters of a line of a table."""


def build_tables(comparison: Comparison, differences: pl.DataFrame) -> list[Table]:
    """Return the table of verdicts, if a model has one, and the table of models.

    Args:
        comparison: Rows, best first.
        differences: Output of `measure_differences`.
    """
    rows, measured = comparison.rows, measured_metrics(comparison.rows)
    metrics = [*find_metrics(RequestMetric), *find_metrics(CatalogueMetric)]
    known = {f"test/{metric.name}": metric.compared for metric in metrics}
    compared: list[str] = []
    for name, ranks in known.items():
        compared += [f"{name}@{k}" for k in ranks]
    # metrics of a user's file, which this process need not know
    own = [
        name
        for name in measured
        if re.fullmatch(rf"test/\w+@{TOP}", name) and name.split("@")[0] not in known
    ]
    val, test = f"val/{comparison.metric}", f"test/{comparison.metric}"
    names = dict.fromkeys((val, test, *compared, *own, *METRICS))
    means = {name: format_means(rows, name) for name in names if name in measured}
    leading = [means.pop(name) for name in (val, test) if name in means]
    models = rows.select(
        pl.col("model_label").alias("model"),
        pl.col("name").alias("run"),
        pl.col("num_seeds").cast(pl.String).alias("seeds"),
        *leading,
        *(format_counts(rows[name]).alias(COUNTS[name]) for name in COUNTS),
        pl.col("settings").fill_null(""),
        *means.values(),
    )
    if not any(models["settings"]):
        models = models.drop("settings")
    notes = [
        "val: at the best epoch. requests: of test. train s: without the training of "
        "a teacher or a blend's models. ±: over seeds. [...]: evaluated with these "
        "options."
    ]
    unfinished = rows.filter(pl.col("num_unfinished") > 0)["name"]
    if len(unfinished):
        notes.append(f"with runs that are not finished: {', '.join(unfinished)}")
    table = comparison.title, models, notes + comparison.notes
    return [*verdict_tables(comparison, differences), table]


def format_means(rows: pl.DataFrame, metric: str) -> pl.Series:
    """Format the means of a metric, with the deviations over several seeds."""
    texts = []
    for mean, deviation in rows.select(metric, f"{metric} ±").rows():
        text = "-" if mean is None else f"{mean:.4f}"
        texts.append(text if deviation is None else f"{text} ± {deviation:.4f}")
    return pl.Series(metric, texts, pl.String)


def format_counts(values: pl.Series) -> pl.Series:
    """Format whole numbers; null becomes `-`."""
    texts = ["-" if value is None else f"{value:,.0f}" for value in values]
    return pl.Series(values.name, texts, pl.String)


def verdict_tables(comparison: Comparison, differences: pl.DataFrame) -> list[Table]:
    """Return the table of differences on the same users, or [] without differences."""
    if differences.is_empty():
        return []
    leading = leading_ranking(comparison.rows)
    lines = differences.sort(pl.col("ranking") != leading, maintain_order=True)
    cells = [
        {
            "run": line["label"],
            "ranking": line["ranking"],
            "against": line["base"],
            **format_difference(line),
        }
        for line in lines.iter_rows(named=True)
    ]
    table = pl.DataFrame(cells)
    if lines["ranking"].n_unique() == 1:
        table = table.drop("ranking")
    notes, share = [], repeat_share(comparison.rows)
    if share is not None:
        which = "of all items" if leading == ALL_ITEMS else "without known items"
        notes.append(
            f"{share:.1%} of the test requests ask for an item of the user's history, "
            f"so the ranking {which} comes first. With known items left out they count "
            f"as misses of every model."
        )
    notes.append(
        "Against the best model without training of each ranking, by test: differences "
        f"per user, with a bootstrap over users ({DRAWS:,} draws). Below {MIN_USERS} "
        "users there is no verdict."
    )
    if "shown" in lines["kind"]:
        notes.append(SHOWN_ORDER_NOTE)
    return [("On the same users", table, notes)]


def format_difference(line: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a difference on the same users."""
    mean, low, high, metric = line["mean"], line["low"], line["high"], line["metric"]
    words = VERDICTS if line["kind"] == "baseline" else DIFFERENCES
    return {
        "users": f"{line['users']:,}",
        f"test/{metric}": f"{mean:+.4f}",
        "95% interval": f"{low:+.4f} to {high:+.4f}",
        "verdict": judge_difference(low, high, line["users"], metric, words),
    }


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
