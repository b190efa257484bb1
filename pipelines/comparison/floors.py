"""Compare each trained model with the best model without training, on the same users.

    floor_tables(compare(select(uri, ["retrieval/DATASET"])))

A floor is a model whose class has `is_floor`. Every log and ranking has its own best
floor. It is the best on test: a bar that favours the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from models import registry
from models.metrics.per_user_metrics import decode_values
from pipelines.comparison.over_users import (
    FOLDS_NOTE,
    MIN_USERS,
    PER_USER_METRIC,
    Group,
    Interval,
    group_rows,
    intervals,
    same_users,
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
from pipelines.evaluation.floors import Floor
from pipelines.evaluation.record import Result
from pipelines.tracking import RunRef, connect, metric_name

CLEARS, BELOW, NOT_TOLD = "clears it", "below it", "not told apart"
"""Verdicts on a model beside its floor."""

VALIDATION_PARAMS = ("fit.eval_options.unseen", "fit.eval_examples", "fit.fold")
"""Params in which two trainings must agree for their validations to compare."""


def is_floor(row: Row) -> bool:
    """Return whether the row is of a model without training."""
    return row.model in registry.MODELS and registry.find(row.model).is_floor


def best_trained_floor(run: RunRef, metric: str) -> tuple[str, float] | None:
    """Return the best floor of a training's experiment by validation, or None.

    A floor counts if it was trained on the tables of the training `run`, and validated
    on as many requests and with the same items left out.
    """
    client = connect(run.uri)
    trained = client.get_run(run.run_id)
    sequences = trained.data.tags.get("table.sequences")
    validated = [trained.data.params.get(name) for name in VALIDATION_PARAMS]
    key = metric_name(f"val/{metric}")
    values = {}
    for other in search_runs(client, [trained.info.experiment_id]):
        name = other.data.params.get("model.name", "")
        if name not in registry.MODELS or not registry.find(name).is_floor:
            continue
        params = [other.data.params.get(param) for param in VALIDATION_PARAMS]
        if params == validated and other.data.tags.get("table.sequences") == sequences:
            values[name] = other.data.metrics.get(key, math.nan)
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    if not finite:
        return None
    best = (min if lower_is_better(metric) else max)(finite, key=finite.__getitem__)
    return best, finite[best]


def explain_ranking(rows: Sequence[Row]) -> str:
    """Return a sentence on the ranking that is shown first, empty if unmeasured."""
    share = repeat_share(rows)
    if math.isnan(share):
        return ""
    repeats = f"{share:.1%} of the test requests ask for an item of the user's history"
    if leading_ranking(rows) == ALL_ITEMS:
        return f"{repeats}, so the ranking of all items comes first."
    return f"{repeats}, so the ranking without known items comes first."


def best_floors(groups: Sequence[Group]) -> dict[tuple[str, ...], Group]:
    """Return the best floor of each log and ranking; `groups` are best first."""
    best: dict[tuple[str, ...], Group] = {}
    for group in groups:
        if is_floor(group.row):
            best.setdefault(group.row.log, group)
    return best


def judge(interval: Interval, users: int, metric: str) -> str:
    """Return whether a model clears its floor, from the paired difference to it."""
    if users < MIN_USERS:
        return "-"
    if interval.is_noise:
        return NOT_TOLD
    better = (interval.mean > 0) != lower_is_better(metric)
    return CLEARS if better else BELOW


def compare_per_user(
    model: Mapping[str, str], floor: Mapping[str, str]
) -> tuple[Interval, int] | None:
    """Return the paired difference of two metrics per user and the number of users.

    The result is None if the two are of different users.
    """
    if model["users"] != floor["users"]:
        return None
    values, counts = decode_values(dict(model))
    base = decode_values(dict(floor))[0]
    return intervals((values - base)[None], counts)[0], len(counts)


def judge_result(result: Result, floors: list[Floor], metric: str) -> dict[str, Any]:
    """Return the verdict on the result of an evaluation against the best of the floors.

    A `metric` that is not measured per user gives way to the first one that is.
    """
    if metric not in result.by_user:
        metric = next(iter(result.by_user))
    sign = -1 if lower_is_better(metric) else 1
    best = max(floors, key=lambda floor: sign * floor.metrics[metric])
    compared = compare_per_user(result.by_user[metric], best.by_user[metric])
    if compared is None:
        raise ValueError(f"{best.name} was measured on other users than the model")
    interval, users = compared
    first = result.metrics.get("first/examples", 0.0)
    ranking = KNOWN_LEFT_OUT if result.options.get("unseen") else ALL_ITEMS
    if "first/examples" not in result.metrics:
        ranking = CANDIDATES
    return {
        "ranking": ranking,
        "repeats": 1 - first / result.examples,
        "metric": metric,
        "value": result.metrics[metric],
        "floor": best.name,
        "floor_value": best.metrics[metric],
        "low": interval.low,
        "high": interval.high,
        "users": users,
        "verdict": judge(interval, users, metric),
    }


def describe_verdict(verdict: dict[str, Any]) -> str:
    """Return one line on a model and the best model without training."""
    return (
        f"{verdict['ranking']}: {verdict['metric']} {verdict['value']:.4f}, "
        f"{verdict['floor']} without training {verdict['floor_value']:.4f} "
        f"(95% of the difference {verdict['low']:+.4f} to {verdict['high']:+.4f}, "
        f"{verdict['users']:,} users): {verdict['verdict']}"
    )


def floor_tables(comparison: Comparison) -> list[Table]:
    """Return the table of trained models beside the best floor of their log and ranking."""
    metric = PER_USER_METRIC.get(comparison.metric, comparison.metric)
    groups = group_rows(comparison)
    floors = best_floors(groups)
    leading = leading_ranking(comparison.rows)
    trained = [group for group in groups if not is_floor(group.row)]
    trained.sort(key=lambda group: group.row.ranking != leading)
    cells = []
    for group in trained:
        floor = floors.get(group.row.log)
        if floor is not None:
            cells += to_floor_cells(group, floor, metric)
    if not cells:
        return []
    header = ["run", "ranking", "best without training", "its value", "users"]
    header += [f"test/{metric}", "95% interval", "relative", "verdict"]
    num_words = 3
    if len({row[1] for row in cells}) == 1:
        num_words = 2
        del header[1]
        cells = [row[:1] + row[2:] for row in cells]
    notes = (
        [explain_ranking(comparison.rows)] if explain_ranking(comparison.rows) else []
    )
    notes.append(
        "The best model without training of each ranking, by test; differences per user "
        "with a bootstrap over users."
    )
    if any(row.folds for row in comparison.rows):
        notes.append(FOLDS_NOTE)
    title = "Against the best model without training"
    return [Table(title, header, cells, notes, num_words)]


def to_floor_cells(group: Group, floor: Group, metric: str) -> list[list[str]]:
    """Return the row of a group beside its floor, or nothing without common users."""
    same = same_users(tuple(product(group.runs, floor.runs)), metric)
    if same is None:
        return []
    (interval,) = intervals(same.difference[None], same.counts)
    users = len(same.counts)
    return [
        [
            group.row.label,
            group.row.ranking,
            floor.row.model,
            f"{same.mean:.4f}",
            f"{users:,}",
            f"{interval.mean:+.4f}",
            str(interval),
            percent(interval.mean / same.mean if same.mean else math.nan),
            judge(interval, users, metric),
        ]
    ]
