"""Rows and comparisons made by hand, as those of MLflow runs."""

from __future__ import annotations

from typing import Any

from pipelines.comparison.rows import Comparison, Row, Run
from pipelines.comparison.runs import Selection

NDCG, LOSS = "test/ndcg@10", "test/eval_loss"


def row(
    model: str,
    *values: dict[str, float],
    seeds: str = "123",
    options: str = "",
    **params: str,
) -> Row:
    """A row with a run per seed; params with __ for dots, and the runs' name, teacher and sids."""
    told = {key: params.pop(key, "") for key in ("name", "weights", "teacher", "sids")}
    runs = [
        Run(
            f"{id(value)}",
            f"{told['name'] or model}-{seed}",
            seed,
            True,
            told["weights"],
            told["teacher"],
            value,
            told["sids"],
        )
        for seed, value in zip(seeds, values, strict=False)
    ]
    return Row(
        model,
        options,
        runs,
        {},
        "retrieval/x",
        {key.replace("__", "."): value for key, value in params.items()},
    )


def compared(rows: list[Row], metric: str = "ndcg@10", sweep: Any = None) -> Comparison:
    return Comparison(
        Selection("sqlite:////none", "retrieval/x", [], {}, sweep), rows, metric
    )
