"""Compare each trained model with the best model without training, on the same users.

    baseline_tables(compare(select(uri, ["retrieval/DATASET"])))

A baseline is a model whose class has `is_baseline`. Each log and ranking has its own
best baseline, chosen on test, which favours the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from core.schemas import RunRef
from models import registry
from models.metrics.per_user_metrics import decode_values
from pipelines.comparison.over_users import (
    DIFFERENCES,
    MIN_USERS,
    PER_USER_METRIC,
    Group,
    Interval,
    bootstrap_intervals,
    group_rows,
    judge_difference,
    load_paired_metric,
    newest_runs,
)
from pipelines.comparison.rows import (
    ALL_ITEMS,
    CANDIDATES,
    KNOWN_LEFT_OUT,
    Comparison,
    Row,
    leading_ranking,
    lower_is_better,
    repeat_share,
)
from pipelines.comparison.runs import search_runs
from pipelines.comparison.table import Table, percent
from pipelines.evaluation.baselines import Baseline
from pipelines.evaluation.record import Result
from pipelines.tracking import RANKS_BY_TAG, connect, to_mlflow_name

VERDICTS = CLEARS, BELOW, UNDECIDED = "clears it", "below it", "not told apart"
"""Verdicts on a model and its baseline."""

TIES = 0.5
"""GAUC of a shown order in which all results tie, as in a log without positions."""

SHOWN_ORDER_NOTE = "The shown order is the present ranking's; clicks on it favour it."

VALIDATION_PARAMS = ("fit.eval_options.unseen", "fit.eval_examples")
"""Params that must be equal for the validations of two trainings to be comparable."""


def is_baseline(row: Row) -> bool:
    """Return whether the row's model is a baseline."""
    return row.model in registry.MODELS and registry.find(row.model).is_baseline


def best_trained_baseline(run: RunRef, metric: str) -> tuple[str, float] | None:
    """Return the best baseline of a training's experiment on validation.

    A baseline counts if it was trained on the same tables, and validated on as many
    requests and with the same items left out.

    Args:
        run: MLflow run of the training.
        metric: Name of the metric, without its split.

    Returns:
        The baseline's name and the value of its metric, or None without a baseline.
    """
    client = connect(run.uri)
    training = client.get_run(run.run_id)
    key = to_mlflow_name(f"val/{metric}")
    values = {}
    for other in search_runs(client, [training.info.experiment_id]):
        name = other.data.params.get("model.name", "")
        if name not in registry.MODELS or not registry.find(name).is_baseline:
            continue
        value = other.data.metrics.get(key, math.nan)
        if has_comparable_validation(other, training):
            values[other.data.tags.get(RANKS_BY_TAG, name)] = value
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    if not finite:
        return None
    choose = min if lower_is_better(metric) else max
    best = choose(finite, key=finite.__getitem__)
    return best, finite[best]


def has_comparable_validation(run: Any, other: Any) -> bool:
    """Return whether the validations of two MLflow runs are on the same requests."""
    has_same_params = all(
        run.data.params.get(name) == other.data.params.get(name)
        for name in VALIDATION_PARAMS
    )
    sequences = [
        mlflow_run.data.tags.get("table.sequences") for mlflow_run in (run, other)
    ]
    return has_same_params and sequences[0] == sequences[1]


def explain_ranking(rows: Sequence[Row]) -> str:
    """Return a sentence on why a ranking is shown first.

    It is empty if the share of repeated items was not measured.
    """
    share = repeat_share(rows)
    if math.isnan(share):
        return ""
    repeats = f"{share:.1%} of the test requests ask for an item of the user's history"
    if leading_ranking(rows) == ALL_ITEMS:
        return f"{repeats}, so the ranking of all items comes first."
    return f"{repeats}, so the ranking without known items comes first."


def best_baselines(groups: Sequence[Group]) -> dict[tuple[str, ...], Group]:
    """Return the best baseline of each log and ranking, by `Row.log`.

    Args:
        groups: Groups of rows, best first.
    """
    best: dict[tuple[str, ...], Group] = {}
    for group in groups:
        if is_baseline(group.row):
            best.setdefault(group.row.log, group)
    return best


def compare_per_user(
    model_metric: Mapping[str, str], baseline_metric: Mapping[str, str]
) -> tuple[Interval, int] | None:
    """Return the paired difference of two metrics per user and the number of users.

    Args:
        model_metric: Encoded metric per user of the model (see `decode_values`).
        baseline_metric: Encoded metric per user of the baseline.

    Returns:
        The difference and the number of users, or None if the users differ.
    """
    if model_metric["users"] != baseline_metric["users"]:
        return None
    values, counts = decode_values(dict(model_metric))
    baseline_values, _ = decode_values(dict(baseline_metric))
    differences = (values - baseline_values)[None]
    return bootstrap_intervals(differences, counts)[0], len(counts)


def judge_result(
    result: Result, baselines: list[Baseline], metric: str
) -> dict[str, Any]:
    """Return the verdict on the result of an evaluation against the best baseline.

    Args:
        result: Result of the model's evaluation.
        baselines: Results of the baselines on the same requests.
        metric: Name of the metric. If it is not measured per user, the first metric
            that is measured per user replaces it.

    Returns:
        The verdict, which `describe_verdict` formats.

    Raises:
        ValueError: If the baselines were measured on other users.
    """
    if metric not in result.by_user:
        metric = next(iter(result.by_user))
    sign = -1 if lower_is_better(metric) else 1
    best = max(
        (baseline for baseline in baselines if not baseline.is_shown_order),
        key=lambda baseline: sign * baseline.metrics[metric],
    )
    comparison = compare_per_user(result.by_user[metric], best.by_user[metric])
    if comparison is None:
        raise ValueError(f"{best.name} was measured on other users than the model")
    interval, users = comparison
    first = result.metrics.get("first/examples", 0.0)
    ranking = KNOWN_LEFT_OUT if result.options.get("unseen") else ALL_ITEMS
    if "first/examples" not in result.metrics:
        ranking = CANDIDATES
    shown_order = ""
    for baseline in baselines:
        if baseline.is_shown_order and baseline.metrics[metric] != TIES:
            shown = compare_per_user(result.by_user[metric], baseline.by_user[metric])
            assert shown is not None, "the users are those of the best baseline"
            shown_order = f"{shown[0].mean:+.4f} (95% {shown[0]})"
    return {
        "shown_order": shown_order,
        "ranking": ranking,
        "repeats": 1 - first / result.examples,
        "metric": metric,
        "value": result.metrics[metric],
        "baseline": best.name,
        "baseline_value": best.metrics[metric],
        "low": interval.low,
        "high": interval.high,
        "users": users,
        "verdict": judge_difference(interval, MIN_USERS, metric, VERDICTS),
    }


def describe_verdict(verdict: dict[str, Any]) -> str:
    """Return lines about a model, the best baseline, and the shown order.

    Args:
        verdict: Content that `judge_result` returned.
    """
    shown_order = ""
    if verdict["shown_order"]:
        shown_order = f"\n  against the shown order: {verdict['shown_order']}. "
        shown_order += SHOWN_ORDER_NOTE
    return (
        f"{verdict['ranking']}: {verdict['metric']} {verdict['value']:.4f}, best "
        f"baseline ({verdict['baseline']}) {verdict['baseline_value']:.4f} "
        f"(95% of the difference {verdict['low']:+.4f} to {verdict['high']:+.4f}, "
        f"{verdict['users']:,} users): {verdict['verdict']}{shown_order}"
    )


def baseline_tables(comparison: Comparison) -> list[Table]:
    """Return the table of trained models and the best baselines of their logs.

    The list is empty if no baseline was evaluated.
    """
    metric = PER_USER_METRIC.get(comparison.metric, comparison.metric)
    groups = group_rows(comparison)
    baselines = best_baselines(groups)
    leading = leading_ranking(comparison.rows)
    shown_orders = {group.row.log: group for group in groups if group.row.is_diagnostic}
    trained = [
        group
        for group in groups
        if not is_baseline(group.row) and not group.row.is_diagnostic
    ]
    trained.sort(key=lambda group: group.row.ranking != leading)
    cells, shown_cells = [], []
    for group in trained:
        log = group.row.log
        if log in baselines:
            cells += to_baseline_cells(group, baselines[log], metric)
        if log in baselines and log in shown_orders:
            shown_cells = to_baseline_cells(group, shown_orders[log], metric)
            cells += shown_cells
    if not cells:
        return []
    header = ["run", "ranking", "best without training", "its value", "users"]
    header += [f"test/{metric}", "95% interval", "relative", "verdict"]
    num_words = 3
    if len({row[1] for row in cells}) == 1:
        num_words = 2
        del header[1]
        cells = [row[:1] + row[2:] for row in cells]
    ranking_note = explain_ranking(comparison.rows)
    notes = [ranking_note] if ranking_note else []
    if KNOWN_LEFT_OUT in {group.row.ranking for group in trained}:
        notes.append(
            "With known items left out, a request for an item of the history counts as "
            "a miss of every model."
        )
    notes.append(
        "The best model without training of each ranking, by test; differences per "
        f"user with a bootstrap over users. Below {MIN_USERS} users there is no "
        "verdict."
    )
    if shown_cells:
        notes.append(SHOWN_ORDER_NOTE)
    title = "Against the best model without training"
    return [Table(title, header, cells, notes, num_words)]


def to_baseline_cells(group: Group, baseline: Group, metric: str) -> list[list[str]]:
    """Return a group's row of the baseline table.

    It is [] if the users are not the baseline's, or if the log has no positions.

    Args:
        group: Runs of a trained model.
        baseline: Runs of the best baseline, or of the shown order.
        metric: Name of the metric per user, without its split.
    """
    pairs = tuple(product(newest_runs(group), newest_runs(baseline)))
    paired = load_paired_metric(pairs, metric)
    if paired is None:
        return []
    (interval,) = bootstrap_intervals(paired.difference[None], paired.counts)
    base = paired.base_mean
    label, words = group.label, VERDICTS
    if baseline.row.is_diagnostic:
        if base == TIES:
            return []
        label, words = "  against the shown order", DIFFERENCES
    return [
        [
            label,
            group.row.ranking,
            baseline.row.model_label,
            f"{base:.4f}",
            f"{len(paired.counts):,}",
            f"{interval.mean:+.4f}",
            str(interval),
            percent(interval.mean / base if base else math.nan),
            judge_difference(interval, len(paired.counts), metric, words),
        ]
    ]
