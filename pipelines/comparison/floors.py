"""Each trained model beside the best model without training, on the same users.

    floor_tables(compare(select(uri, ["retrieval/DATASET"])))

A floor is a model whose class has `is_floor`. Every log and ranking has
its own best floor. It is the best on test: a bar that favours the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from models import registry
from models.metrics.per_user_metrics import decode_values
from pipelines.comparison.over_users import (
    COARSER,
    LEAST,
    Group,
    Interval,
    groups_of,
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
from pipelines.comparison.runs import search
from pipelines.comparison.table import Table, percent
from pipelines.evaluation.floors import Floor
from pipelines.tracking import RunRef, connect, metric_name

CLEARS, BELOW, NOT_TOLD = "clears it", "below it", "not told apart"
"""Verdicts on a model beside its floor."""


def is_floor(row: Row) -> bool:
    """Return whether the row is of a model without training."""
    return row.model in registry.MODELS and registry.find(row.model).is_floor


VALIDATED_ALIKE = ("fit.eval_options.unseen", "fit.eval_examples")
"""Params in which two trainings must agree for their validations to compare."""


def best_trained_floor(run: RunRef, metric: str) -> tuple[str, float] | None:
    """Return the best floor of a training's experiment by validation, or None.

    A floor counts if it was trained on the tables of the training `run`, and validated
    on as many requests and with the same items left out.
    """
    client = connect(run.uri)
    trained = client.get_run(run.run_id)
    sequences = trained.data.tags.get("table.sequences")
    alike = [trained.data.params.get(name) for name in VALIDATED_ALIKE]
    key = metric_name(f"val/{metric}")
    values = {}
    for other in search(client, [trained.info.experiment_id]):
        name = other.data.params.get("model.name", "")
        if name not in registry.MODELS or not registry.find(name).is_floor:
            continue
        same = [other.data.params.get(param) for param in VALIDATED_ALIKE] == alike
        if same and other.data.tags.get("table.sequences") == sequences:
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
    asked = f"{share:.1%} of the test requests ask for an item of the user's history"
    if leading_ranking(rows) == ALL_ITEMS:
        return f"{asked}, so the ranking of all items comes first."
    return f"{asked}, so the ranking without known items comes first."


def best_floors(groups: Sequence[Group]) -> dict[tuple[str, ...], Group]:
    """Return the best floor of each log and ranking; `groups` are best first."""
    best: dict[tuple[str, ...], Group] = {}
    for group in groups:
        if is_floor(group.row):
            best.setdefault(group.row.log, group)
    return best


def judge(interval: Interval, users: int, metric: str) -> str:
    """Return whether a model clears its floor, from the paired difference to it."""
    if users < LEAST:
        return "-"
    if interval.is_noise:
        return NOT_TOLD
    better = (interval.mean > 0) != lower_is_better(metric)
    return CLEARS if better else BELOW


def interval_of(
    model: Mapping[str, str], floor: Mapping[str, str]
) -> tuple[Interval, int] | None:
    """Return the paired difference of two packed metrics and the number of users.

    None if the two are of different users.
    """
    if model["users"] != floor["users"]:
        return None
    values, counts = decode_values(dict(model))
    base = decode_values(dict(floor))[0]
    return intervals((values - base)[None], counts)[0], len(counts)


def judge_result(
    result: dict[str, Any], floors: list[Floor], metric: str
) -> dict[str, Any]:
    """Return the verdict on an evaluation's file against the best of the floors.

    A `metric` that is not measured user by user gives way to the first that is.
    """
    by_user = result["by_user"]
    if metric not in by_user:
        metric = next(iter(by_user))
    sign = -1 if lower_is_better(metric) else 1
    best = max(floors, key=lambda floor: sign * floor.metrics[metric])
    compared = interval_of(by_user[metric], best.by_user[metric])
    if compared is None:
        raise ValueError(f"{best.name} was measured on other users than the model")
    interval, users = compared
    first = result["metrics"].get("first/examples", 0.0)
    ranking = KNOWN_LEFT_OUT if result["options"].get("unseen") else ALL_ITEMS
    if "first/examples" not in result["metrics"]:
        ranking = CANDIDATES
    return {
        "ranking": ranking,
        "repeats": 1 - first / result["examples"],
        "metric": metric,
        "value": result["metrics"][metric],
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
    """Return the trained models beside the best floor of their log and ranking."""
    metric = COARSER.get(comparison.metric, comparison.metric)
    groups = groups_of(comparison)
    floors = best_floors(groups)
    leading = leading_ranking(comparison.rows)
    cells: list[tuple[bool, list[str]]] = []
    for group in groups:
        floor = floors.get(group.row.log)
        if floor is None or is_floor(group.row):
            continue
        runs = tuple(product(group.runs, floor.runs))
        options = (group.row.options, floor.row.options)
        same = same_users(runs, options, metric)
        if same is None:
            continue
        (interval,) = intervals(same.difference[None], same.counts)
        users = len(same.counts)
        row = [
            group.row.model,
            group.row.name,
            group.row.ranking,
            floor.row.model,
            f"{same.mean:.4f}",
            f"{users:,}",
            f"{interval.mean:+.4f}",
            f"{interval.low:+.4f} to {interval.high:+.4f}",
            percent(interval.mean / same.mean if same.mean else math.nan),
            judge(interval, users, metric),
        ]
        cells.append((group.row.ranking != leading, row))
    if not cells:
        return []
    cells.sort(key=lambda cell: cell[0])
    header = ["model", "run", "ranking", "best without training", "its value", "users"]
    header += [f"test/{metric}", "95% interval", "relative", "verdict"]
    notes = (
        [explain_ranking(comparison.rows)] if explain_ranking(comparison.rows) else []
    )
    notes.append(
        "The best model without training of each ranking, by test; differences user by "
        "user with a bootstrap over users."
    )
    title = "Against the best model without training"
    rows = [row for _, row in cells]
    if len({row[2] for row in rows}) > 1:
        return [Table(title, header, rows, notes, 4)]
    del header[2]
    return [Table(title, header, [row[:2] + row[3:] for row in rows], notes, 3)]
