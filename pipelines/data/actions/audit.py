"""Rules on the tables of a log of actions: the cuts, tasks and actions from labels, counts that see the past only.

Everything is computed from `events` with plain polars, by the definitions that the manifest of sequences names. Counts
are of all users' events before the time of an event, those of candidates before the cut that is before them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from pipelines.data.audit import sequences as shared
from pipelines.data.audit.base import Rule, Tables, counts_in

WIDE = ["tasks", "actions", "features"]
"""List columns with several numbers per event."""


def check_actions_tables(tables: Tables, rules: dict[str, Rule]) -> pl.DataFrame:
    """Rules on rows of `sequences`. Returns the users that must be there (`user_id`)."""
    info = tables.info
    users = shared.check_lengths(tables.sequences, rules["behaviours"])
    values = {name: wide(users, name, len(info[name])) for name in WIDE}
    flat = with_cuts(tables, shared.behaviour_rows(users.drop(WIDE)))
    expected = with_cuts(
        tables, shared.expected_behaviours(tables, tables.users_events)
    )
    shared.check_behaviours(
        users.drop(WIDE),
        flat,
        shared.with_as_of(tables, expected, "at"),
        rules["behaviours"],
    )
    check_ends(tables, users, flat, rules["splits"])
    for name, right in expected_values(tables, flat, info["definitions"]).items():
        rule = rules["windows" if name == "features" else "tasks"]
        rule.rows = flat.height
        shared.check_columns(
            flat, values[name], info[name], right, name.removesuffix("s"), rule
        )
    shared.check_as_of(tables, rules["features"])

    val = (
        pl.when(pl.col("place") < pl.col("val_end"))
        .then(pl.lit("val"))
        .otherwise(pl.lit("test"))
    )
    ends = flat.join(
        users.select("row", "train_end", "val_end"),
        on="row",
        how="left",
        maintain_order="left",
    )
    ends = ends.with_columns(
        split=pl.when(pl.col("place") < pl.col("train_end"))
        .then(pl.lit("train"))
        .otherwise(val)
    )
    held = {
        "events": shared.per_split(ends),
        "users_with_candidates": shared.per_split(ends.unique(["row", "split"])),
        "users_without_context": shared.per_split(ends.filter(pl.col("place") == 0)),
    }
    shared.check_counts(tables, held, rules["counts"])
    train, of_training = (
        ends.filter(split="train"),
        (ends["split"] == "train").to_numpy(),
    )
    shared.check_training(
        info, train.select(shared.own_columns(info)), rules["features"]
    )
    rates, features, rule = (
        values["tasks"][of_training].mean(0),
        values["features"][of_training],
        rules["counts"],
    )
    rule.rows += len(rates) + 2 * len(info["features"])
    for name, rate in zip(info["tasks"], rates, strict=True):
        shared.check_said(
            f"base rate of {name}", info["base_rates"][name], rate, 1.0, rule
        )
    for column, name in enumerate(info["features"]):
        mean, std = features[:, column].mean(), features[:, column].std()
        shared.check_said(
            f"feature_mean of {name}", info["feature_mean"][column], mean, 1.0, rule
        )
        shared.check_said(
            f"feature_std of {name}",
            info["feature_std"][column],
            std if std > 1e-6 else 0.0,
            1.0,
            rule,
        )
    for name, listed in info["viewers"].items():
        shared.check_listed(f"cat_{name}", listed, train, rules["counts"])
    return (
        tables.events.join(tables.catalogue, on="item_id", how="semi")
        .select("user_id")
        .unique()
    )


def wide(users: pl.DataFrame, name: str, width: int) -> np.ndarray:
    """(events, width) of a wide list column."""
    events = int(users["item_index"].list.len().sum())
    numbers = (
        users[name]
        .cast(pl.List(pl.List(pl.Float64)))
        .explode()
        .drop_nulls()
        .explode()
        .to_numpy()
    )
    return numbers.reshape(events, width) if width else np.zeros((events, 0))


def with_cuts(tables: Tables, flat: pl.DataFrame) -> pl.DataFrame:
    """`flat` with `at`, when its counts are taken: its time in training, for candidates the cut before them."""
    time, val, test = (
        pl.col("timestamp_ms"),
        tables.info["val_start_ms"],
        tables.info["test_start_ms"],
    )
    return flat.with_columns(
        at=pl.when(time >= test).then(test).when(time >= val).then(val).otherwise(time)
    )


def check_ends(
    tables: Tables, users: pl.DataFrame, flat: pl.DataFrame, rule: Rule
) -> None:
    """`train_end` and `val_end` count the user's events before the two cut times."""
    rule.rows += users.height
    before = [
        (pl.col("timestamp_ms") < tables.info[cut]).sum()
        for cut in ("val_start_ms", "test_start_ms")
    ]
    counted = flat.group_by("row").agg(train=before[0], val=before[1])
    both = users.select("row", "user_id", "train_end", "val_end").join(
        counted, on="row", how="left"
    )
    differ = pl.any_horizontal(
        pl.col(f"{name}_end").ne_missing(pl.col(name)) for name in ("train", "val")
    )
    said = "user {user_id}: train_end, val_end are {train_end}, {val_end}; before the cuts are {train}, {val} events"
    rule.broken_rows(both.filter(differ).sort("row"), said)


def task_of(task: dict[str, Any]) -> pl.Expr:
    """A task by its definition; a missing label is an action that was not taken."""
    if task["any"]:
        return pl.any_horizontal(
            pl.col(f"label_{label}").fill_null(False) for label in task["any"]
        )
    label, above, at_least = (
        pl.col(f"label_{task['label']}"),
        task["above"],
        task["at_least"],
    )
    taken = (
        label > above
        if above is not None
        else label >= at_least
        if at_least is not None
        else label
    )
    return taken.fill_null(False)


def action_of(action: dict[str, Any]) -> pl.Expr:
    """What models read of an action: a bool as it is, a number from 0 to 1 within its range."""
    label = pl.col(f"label_{action['label']}")
    if action["range"] is None:
        return label.fill_null(False).cast(pl.Float64)
    low, high = action["range"]
    over, whole = (
        label.cast(pl.Float64).fill_null(low).clip(low, high) - low,
        float(high - low),
    )
    if action["log_unit"] is None:
        return over / whole
    return (over / action["log_unit"]).log1p() / float(
        np.log1p(whole / action["log_unit"])
    )


def expected_values(
    tables: Tables, flat: pl.DataFrame, made: dict[str, Any]
) -> dict[str, dict[str, np.ndarray]]:
    """Tasks, actions and features by name, (events,) each, by the definitions of the manifest. Features are of
    exposures and tasks of the user, the item or an attribute of that in each window, before the time `at` and a delay.
    """
    tasks, counts = made["tasks"], made["counts"]
    of_tasks = flat.select(
        task_of(task).cast(pl.Float64).alias(name) for name, task in tasks.items()
    )
    of_actions = flat.select(
        action_of(action).alias(name) for name, action in made["inputs"].items()
    )
    by = {
        key: {"user": "user_id", "item": "item_id"}.get(key, f"cat_{key}")
        for key in counts["keys"]
    }
    of_items = tables.items.select(
        "item_index",
        "item_id",
        *(name for name in by.values() if name.startswith("cat_")),
    )
    labels = [
        task_of(tasks[name]).cast(pl.Int64).alias(f"task_{name}")
        for name in counts["counted_labels"]
    ]
    log = tables.events.select(
        "user_id",
        "item_id",
        "timestamp_ms",
        pl.lit(1, pl.Int64).alias("shown"),
        *labels,
    )
    log = log.join(of_items, on="item_id", how="left")
    points = flat.select("user_id", "item_index", "at")
    points = points.join(of_items, on="item_index", how="left", maintain_order="left")
    columns = ["shown", *(f"task_{name}" for name in counts["counted_labels"])]
    strength, found = counts["strength"], {}
    for key in counts["keys"]:
        counted = log.select(by[key], "timestamp_ms", *columns)
        for name, seen in counts_in(
            points, counted, [by[key]], counts["windows_days"], counts["delay_minutes"]
        ):
            shown = seen["shown"].to_numpy()
            found[f"{key}_exposures_{name}"] = np.log1p(shown)
            for label in counts["counted_labels"]:
                taken = seen[f"task_{label}"].to_numpy()
                found[f"{key}_{label}_{name}"] = np.log1p(taken)
                found[f"{key}_{label}_rate_{name}"] = (
                    taken + counts["prior"] * strength
                ) / (shown + strength)
    of_labels = {"tasks": of_tasks, "actions": of_actions}
    return {
        name: {c.name: c.to_numpy() for c in frame} for name, frame in of_labels.items()
    } | {"features": found}
