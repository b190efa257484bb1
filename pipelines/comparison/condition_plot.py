"""Figure 3 of QGS: the training loss of the next item, with the next query as a condition and without.

    for name, title, caption, figure in condition(compare(select(uri, ["search/DATASET"]))): ...

Drawn where an experiment has runs of a model with and without the condition whose other settings agree.
"""

from __future__ import annotations

from pipelines.comparison.rows import Comparison, Row
from pipelines.comparison.run_plots import Drawn, thinned
from pipelines.figures import COLOURS, new_figure, say_axes

CONDITION = "model.query_condition"
LOSS = "train/infonce"
"""Logged by the generative search models beside their whole loss: Eq. 5, without its weight."""

LABELS = {"none": "item only", "query": "query-conditioned", "joint": "joint [SEP], which has seen the item"}


def condition(comparison: Comparison) -> list[Drawn]:
    """The curves of the first pair of rows that differ in the condition alone; a line per run."""
    pair = pair_of(comparison.rows)
    if not pair:
        return []
    figure, (axes,) = new_figure(1, width=6)
    for place, row in enumerate(pair):
        label: str | None = LABELS[row.params[CONDITION]]
        for run in row.runs:
            points = comparison.history(run, LOSS)
            if len(points) > 1:
                steps, values = zip(*thinned(points), strict=True)
                axes.plot(steps, values, color=COLOURS[place], lw=1.2, alpha=0.85, label=label)
                label = None  # one entry of the legend for all seeds
    if not axes.lines:
        return []
    say_axes(axes, "optimizer step", "InfoNCE, training", legend=True)
    caption = (
        f"Loss of the next item ({LOSS}) of {pair[0].name} and {pair[1].name}, which differ in the condition alone; "
        "one line per run (QGS, Figure 3)."
    )
    return [("condition", "With and without the query condition", caption, figure)]


def pair_of(rows: list[Row]) -> list[Row]:
    """Rows of one model, one per condition, that share all other settings and have logged the loss; or none."""
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if CONDITION in row.params and not row.options and any(LOSS in run.metrics for run in row.runs):
            others = sorted((key, value) for key, value in row.params.items() if key != CONDITION)
            groups.setdefault((row.experiment, row.model, *others), {})[row.params[CONDITION]] = row
    for found in groups.values():
        if {"none", "query"} <= set(found):
            return [found[name] for name in LABELS if name in found]
    return []
