"""Audit rules for the tables of a log of actions: splits, tasks, actions and counts.

Expected values are computed from `events` with plain polars, by the definitions in the
manifest of `sequences`. The counts of a training event cover the events of all users
before its time; the counts of a candidate of validation or test cover the events before
the start of its split.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from core.settings import InputSettings, TaskSettings
from pipelines.prepare.audit.base import Rule, Tables, window_features
from pipelines.prepare.audit.sequences import (
    behaviour_rows,
    check_as_of,
    check_behaviours,
    check_category,
    check_counts,
    check_custom_scales,
    check_lengths,
    check_number,
    check_values,
    count_per_split,
    expected_behaviours,
    join_as_of,
    name_split,
)

VECTORS = ["tasks", "actions", "features"]
"""List columns with several numbers per event."""


def check_actions_tables(tables: Tables, rules: dict[str, Rule]) -> pl.DataFrame:
    """Check behaviours, splits, tasks, actions and features of `sequences`.

    Args:
        tables: The audited tables.
        rules: Rules by name, to which violations are added in place.

    Returns:
        The users (`user_id`) with a known item, whom `sequences` must have.
    """
    info = tables.info
    users = check_lengths(tables.sequences, rules["behaviours"])
    values = {
        name: read_vectors(users, name, len(getattr(info, name))) for name in VECTORS
    }
    users = users.drop(VECTORS)
    rows = add_count_times(tables, behaviour_rows(users))
    expected = expected_behaviours(tables, tables.users_events)
    expected = join_as_of(tables, add_count_times(tables, expected), "at")
    check_behaviours(users, rows, expected, rules["behaviours"])
    # `train_end` and `val_end` count a user's events before the two cuts
    time, split = pl.col("timestamp_ms"), info.split
    before = rows.group_by("row").agg(
        train=(time < split.val_start_ms).sum(), val=(time < split.test_start_ms).sum()
    )
    ends = users.select("row", "user_id", "train_end", "val_end")
    rules["splits"].rows += users.height
    is_wrong = pl.any_horizontal(
        pl.col(f"{name}_end").ne_missing(pl.col(name)) for name in ("train", "val")
    )
    rules["splits"].add_rows(
        ends.join(before, on="row", how="left").filter(is_wrong).sort("row"),
        "user {user_id}: train_end, val_end are {train_end}, {val_end}; before the "
        "cuts are {train}, {val} events",
    )
    tasks = {name: task_values(task) for name, task in info.definitions.tasks.items()}
    inputs = info.definitions.inputs
    actions = {name: action_values(action) for name, action in inputs.items()}
    rules["tasks"].rows = rules["windows"].rows = rows.height
    recomputed = rows.select(**tasks).cast(pl.Float64)
    check_values(rows, values["tasks"], info.tasks, recomputed, "task", rules["tasks"])
    recomputed = rows.select(**actions)
    check_values(
        rows, values["actions"], info.actions, recomputed, "action", rules["tasks"]
    )
    recomputed = pl.DataFrame(expected_features(tables, rows))
    check_values(
        rows, values["features"], info.features, recomputed, "feature", rules["windows"]
    )
    check_as_of(tables, rules["features"])
    # the split of each event, by its index within its user's
    rows = rows.join(ends.drop("user_id"), on="row", how="left", maintain_order="left")
    index = pl.col("index")
    rows = rows.with_columns(
        split=name_split(index < pl.col("train_end"), index < pl.col("val_end"))
    )
    counts: dict[str, int | dict[str, int]] = {
        "requests": count_per_split(rows),
        "users_with_candidates": count_per_split(rows.unique(["row", "split"])),
        "users_without_context": count_per_split(rows.filter(pl.col("index") == 0)),
    }
    check_counts(tables, counts, rules["counts"])
    check_statistics(tables, rows, values, rules)
    catalogue_events = tables.events.join(tables.catalogue, on="item_id", how="semi")
    return catalogue_events.select("user_id").unique()


def read_vectors(users: pl.DataFrame, name: str, width: int) -> np.ndarray:
    """Return a list column of vectors as an (events, width) float64 array."""
    num_events = int(users["item_index"].list.len().sum())
    if not width:
        return np.zeros((num_events, 0))
    vectors = users[name].cast(pl.List(pl.List(pl.Float64))).explode().drop_nulls()
    return vectors.explode().to_numpy().reshape(num_events, width)


def add_count_times(tables: Tables, rows: pl.DataFrame) -> pl.DataFrame:
    """Add the column `at`: the end of the time that the counts of an event cover.

    It is the event's time in training, and the start of its split for candidates.
    """
    time = pl.col("timestamp_ms")
    val, test = tables.info.split.val_start_ms, tables.info.split.test_start_ms
    at = pl.when(time >= test).then(test).when(time >= val).then(val).otherwise(time)
    return rows.with_columns(at=at)


def check_statistics(
    tables: Tables,
    rows: pl.DataFrame,
    values: dict[str, np.ndarray],
    rules: dict[str, Rule],
) -> None:
    """Check the manifest's statistics of training events.

    Args:
        tables: Tables under audit, which are read into memory.
        rows: Events with their `split`.
        values: The arrays `tasks`, `actions` and `features`, (events, width) each.
        rules: Rules by name; they take the violations.
    """
    info = tables.info
    rule = rules["counts"]
    train = rows.filter(split="train")
    check_custom_scales(info.custom, train.select(info.custom.names), rules["features"])
    is_train = (rows["split"] == "train").to_numpy()
    rates = values["tasks"][is_train].mean(0)
    features = values["features"][is_train]
    rule.rows += len(rates) + 2 * len(info.features)
    for name, rate in zip(info.tasks, rates, strict=True):
        check_number(f"base rate of {name}", info.base_rates[name], rate, 1.0, rule)
    for column, name in enumerate(info.features):
        mean, std = features[:, column].mean(), features[:, column].std()
        std = std if std > 1e-6 else 0.0
        for key, expected in (("feature_mean", mean), ("feature_std", std)):
            recorded = getattr(info, key)[column]
            check_number(f"{key} of {name}", recorded, expected, 1.0, rule)
    for name, listed in info.viewers.items():
        check_category(f"cat_{name}", listed, train, rule)


# Tasks, actions and counts by the definitions of the manifest.


def task_values(task: TaskSettings) -> pl.Expr:
    """Return whether a task holds; a missing label means that no action was taken."""
    if task.any:
        labels = [pl.col(f"label_{label}").fill_null(False) for label in task.any]
        return pl.any_horizontal(labels)
    label = pl.col(f"label_{task.label}")
    if task.above is not None:
        return (label > task.above).fill_null(False)
    if task.at_least is not None:
        return (label >= task.at_least).fill_null(False)
    return label.fill_null(False)


def action_values(action: InputSettings) -> pl.Expr:
    """Return an action as models read it, from 0 to 1.

    A bool label becomes 0 or 1. A number is scaled by its range, linearly or, with
    `log_unit`, logarithmically.
    """
    label = pl.col(f"label_{action.label}")
    if action.range is None:
        return label.fill_null(False).cast(pl.Float64)
    low, high = action.range
    distance = label.cast(pl.Float64).fill_null(low).clip(low, high) - low
    length, unit = float(high - low), action.log_unit
    if unit is None:
        return distance / length
    return (distance / unit).log1p() / float(np.log1p(length / unit))


def expected_features(tables: Tables, rows: pl.DataFrame) -> dict[str, np.ndarray]:
    """Recompute the windowed counts and rates.

    They count exposures and tasks of the user, of the item or of one of its attributes,
    up to a delay before the time `at`.

    Returns:
        The features (events,) by name.
    """
    definitions = tables.info.definitions
    tasks, settings = definitions.tasks, definitions.counts
    key_columns = {
        key: {"user": "user_id", "item": "item_id"}.get(key, f"cat_{key}")
        for key in settings.keys
    }
    attributes = [name for name in key_columns.values() if name.startswith("cat_")]
    items = tables.items.select("item_index", "item_id", *attributes)
    labels = settings.counted_labels or []
    counted = {name: task_values(tasks[name]).cast(pl.Int64) for name in labels}
    keys = ["user_id", "item_id", "timestamp_ms"]
    log = tables.events.select(*keys, exposures=pl.lit(1, pl.Int64), **counted)
    log = log.join(items, on="item_id", how="left")
    points = rows.select("user_id", "item_index", "at")
    points = points.join(items, on="item_index", how="left", maintain_order="left")
    smoothing = settings.prior, settings.strength
    rates = {f"{name}_rate": name for name in labels}
    features: dict[str, np.ndarray] = {}
    for key, column in key_columns.items():
        key_log = log.select(column, "timestamp_ms", "exposures", *labels)
        features |= window_features(
            points, key_log, [column], key, settings, smoothing, rates
        )
    return features
