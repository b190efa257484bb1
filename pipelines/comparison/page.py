"""Build a self-contained HTML page of a comparison: the answer, tables and plots.

    differences = measure_differences(comparison)
    page = build_page(comparison, differences, build_tables(comparison, differences))

The page loads nothing from the network. A name has one colour in all plots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import polars as pl
from plotly import express
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs
from polars import selectors as cs

from core.errors import UserError
from models.metrics.metric import lower_is_better
from models.search.metrics import WITHIN_POSITIONS
from pipelines import tracking
from pipelines.comparison.compare import TEACHER, Comparison, find_best_run
from pipelines.comparison.tables import Table, format_difference

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
"""Tol's bright scheme, which colour-blind readers can distinguish."""

MAX_ROWS = 20
"""Largest number of drawn rows."""

MAX_CURVES, MAX_POINTS = 10, 300
"""Largest number of rows with curves, and of points of a curve."""

STYLE = """
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 84rem;
  color: #1c1e21; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
.answer { font-size: 1.1rem; } .notes { color: #6a6f76; font-size: 12.5px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
td, th { padding: .28rem .5rem; border-bottom: 1px solid #dcdedf; font-weight: inherit;
  white-space: nowrap; text-align: right; } thead { font-weight: 600; }
td:nth-child(-n + 2), th:nth-child(-n + 2) { text-align: left; }
"""


def build_page(
    comparison: Comparison, differences: pl.DataFrame, tables: Sequence[Table]
) -> str:
    """Build a page: the answer, differences to the best baseline, tables and curves.

    Args:
        comparison: Rows of the models.
        differences: Output of `measure_differences`.
        tables: Output of `build_tables`.

    Returns:
        The HTML document.
    """
    # a colour is a model, or a run if there is one model, as in many sweeps
    by = "model" if comparison.rows["model"].n_unique() > 1 else "label"
    names = comparison.rows[by].unique(maintain_order=True)
    colours = {
        escape(name): COLOURS[number % len(COLOURS)]
        for number, name in enumerate(names)
    }
    title = escape(comparison.title)
    return f"""<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta name=viewport content="width=device-width">
<link rel=icon href="data:,">
<title>{title}</title>
<style>{STYLE}</style>
<script>{get_plotlyjs()}</script>
<body>
<h1>{title}</h1>
<p class=answer>{escape(describe_best(comparison, differences))}</p>
{draw_differences(differences, by, colours)}
{"".join(map(to_html, tables))}
{draw_curves(comparison, by, colours)}
<p class=notes>from {escape(comparison.uri)}</p>
</body></html>
"""


def to_html(table: Table) -> str:
    """Render a table as an HTML section with a heading."""
    title, frame, notes = table
    rows = frame.to_pandas().to_html(index=False, border=0)
    items = "".join(f"<li>{escape(note)}" for note in notes)
    return (
        f"<section><h2>{escape(title)}</h2>\n<div class=wide>{rows}</div>\n"
        f"<ul class=notes>{items}</ul></section>\n"
    )


def describe_best(comparison: Comparison, differences: pl.DataFrame) -> str:
    """Return sentences on the best run by validation: its verdicts and its cost."""
    try:
        number = find_best_run(comparison)["row"]
    except UserError as error:
        return str(error)
    row = comparison.rows.row(by_predicate=pl.col("row") == number, named=True)
    metric = f"val/{comparison.metric}"
    text = f"Best by validation: {row['label']}, {metric} {row[metric]:.4f}."
    bases = {
        "baseline": ", the best model without training",
        "shown": ", which clicks favour",
    }
    for line in differences.filter(row=number).rows(named=True):
        _, difference, interval, verdict = format_difference(line).values()
        text += f" Against {line['base']}{bases[line['kind']]}: {difference} "
        text += f"(95% {interval}), {verdict}."
    within = row.get(f"test/{WITHIN_POSITIONS}")
    text += "" if within is None else f" GAUC within shown positions: {within:.4f}."
    seconds, speed = row["train/total_seconds"], row["test/requests_per_s"]
    if seconds is not None:
        is_built_on_others = row[TEACHER] or row.get("model.hashes")
        after = ", after the models that it builds on" if is_built_on_others else ""
        text += f" Trained in {seconds:,.0f} s{after}."
    return text if speed is None else f"{text} {speed:,.0f} requests/s on test."


def draw(
    title: str,
    caption: str,
    plot: Callable[..., Figure],
    points: pl.DataFrame,
    by: str,
    colours: Mapping[str, str],
    orders: Mapping[str, list[str]],
    **options: Any,
) -> str:
    """Draw a frame as an HTML section with heading and caption.

    Args:
        title: Heading.
        caption: Explanation of the plot.
        plot: Function of `plotly.express`.
        points: A line per point.
        by: Column whose texts have a colour.
        colours: Colour of each text, in order.
        orders: Order of the texts of other columns.
        **options: Further arguments of the function.
    """
    # plotly reads tags in texts
    texts = cs.string().map_elements(escape, return_dtype=pl.String)
    figure = plot(
        points.with_columns(texts),
        color=by,
        color_discrete_map=colours,
        category_orders={by: list(colours), **orders},
        template="plotly_white",
        **options,
    )
    figure.update_xaxes(
        matches=None, showticklabels=True, rangemode="tozero", zerolinecolor="#777777"
    )
    figure.update_yaxes(ticklabelstandoff=6)
    figure.update_layout(legend_title_text="")
    # "MODEL, LABEL" where lines differ in colour and dashes
    figure.for_each_trace(lambda trace: trace.update(name=trace.name.split(", ")[-1]))
    if points[options["y"]].dtype.is_numeric():  # names are the same in all panels
        figure.update_yaxes(matches=None, showticklabels=True)
    figure.for_each_annotation(lambda note: note.update(text=note.text.split("=")[-1]))
    html = figure.to_html(full_html=False, include_plotlyjs=False)
    return (
        f"<section><h2>{escape(title)}</h2>\n{html}\n"
        f"<p class=notes>{escape(caption)}</p></section>\n"
    )


def draw_differences(
    differences: pl.DataFrame, by: str, colours: Mapping[str, str]
) -> str:
    """Draw the difference of each model to the best baseline, a panel per ranking."""
    lines = differences.filter(kind="baseline")
    if lines.is_empty():
        return ""
    lines = lines.with_columns(
        above=pl.col("high") - pl.col("mean"),
        below=pl.col("mean") - pl.col("low"),
        label=pl.col("label").str.replace(" [unseen]", "", literal=True),
    )
    labels = lines["label"].unique(maintain_order=True).head(MAX_ROWS).to_list()
    lines = lines.filter(pl.col("label").is_in(labels))
    return draw(
        f"test/{lines['metric'][0]} against the best model without training",
        "Differences per user on test, with the 95% interval over users, at most "
        f"{MAX_ROWS} rows.",
        express.scatter,
        lines,
        by,
        colours,
        {"label": list(map(escape, labels))},
        x="mean",
        y="label",
        error_x="above",
        error_x_minus="below",
        facet_col="ranking" if lines["ranking"].n_unique() > 1 else None,
        labels={"mean": "difference", "label": ""},
        height=180 + 30 * len(labels),
    )


def draw_curves(comparison: Comparison, by: str, colours: Mapping[str, str]) -> str:
    """Draw validation and training loss of the best rows over steps, a line per run."""
    client, metric = tracking.connect(comparison.uri), f"val/{comparison.metric}"
    rows = comparison.rows.drop_nulls(metric).filter(
        is_baseline=False, is_diagnostic=False, options=""
    )
    descending = not lower_is_better(metric)
    rows = rows.sort(metric, descending=descending, maintain_order=True)
    runs = (
        rows.select("row", "label")
        .head(MAX_CURVES)
        .join(
            comparison.runs.select("row", "model", "name", "training"),
            on="row",
            maintain_order="left",
        )
    )
    points = []
    for run in runs.iter_rows(named=True):
        for name in (metric, "train/loss"):
            history = client.get_metric_history(
                run["training"], tracking.to_mlflow_name(name)
            )
            values = sorted((point.step, point.value) for point in history)
            points += [
                {**run, "metric": name, "step": step, "value": value}
                for step, value in values[:: len(values) // MAX_POINTS + 1]
            ]
    if len({point["step"] for point in points}) < 2:
        return ""
    return draw(
        "Learning curves",
        "The best rows by validation, a line per run. Losses of different models are "
        "different sums.",
        express.line,
        pl.DataFrame(points, infer_schema_length=None),
        by,
        colours,
        {},
        x="step",
        y="value",
        line_dash="label",
        line_group="training",
        hover_name="name",
        facet_col="metric",
        markers=True,
        log_x=True,
        labels={"step": "optimizer step", "value": ""},
    )
