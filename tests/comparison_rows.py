"""Rows, comparisons and evaluations made by hand, as those of MLflow runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines import tracking
from pipelines.comparison.rows import Comparison, EvaluationOptions, Row, Run
from pipelines.comparison.runs import Selection
from pipelines.evaluation.record import Result, log_evaluation

NDCG, LOSS = "test/ndcg@10", "test/eval_loss"


def row(
    model: str,
    *values: dict[str, float],
    seeds: str = "123",
    options: EvaluationOptions | None = None,
    **params: str,
) -> Row:
    """A row with a run per seed; params with __ for dots, and the runs' name, teacher
    and sids.
    """
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
        options or EvaluationOptions(),
        runs,
        {},
        "retrieval/x",
        {key.replace("__", "."): value for key, value in params.items()},
    )


def compared(rows: list[Row], metric: str = "ndcg@10", sweep: Any = None) -> Comparison:
    return Comparison(
        Selection("sqlite:////none", "retrieval/x", [], {}, sweep), rows, metric
    )


def to_result(
    metrics: dict[str, float],
    by_user: dict[str, dict[str, str]] | None = None,
    examples: int = 7,
) -> Result:
    """Return the result of an evaluation on test."""
    return Result(
        model="",
        checkpoint="runs/x/best",
        split="test",
        examples=examples,
        users=5,
        skipped=0,
        metrics=metrics,
        users_per_s=metrics.get("users_per_s", 10.0),
        seconds=1.0,
        seed=1,
        options={},
        hashes={},
        device="cpu",
        by_user=by_user or {},
    )


def evaluate_run(
    training: tracking.RunRef,
    metrics: dict[str, float],
    *,
    weights: str = "w",
    by_user: dict[str, dict[str, str]] | None = None,
    hashes: dict[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Log an evaluation of a training on test, as `jobs.evaluate` does."""
    result = to_result(metrics, by_user, int(metrics.get("examples", 7)))
    result.hashes, result.options = hashes or {}, dict(options or {})
    log_evaluation(training, result, options or {}, weights)
