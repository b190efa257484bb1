"""Rules on sequences that several kinds share: behaviours, histories, splits, counts, values, own features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import polars as pl

from pipelines.data.audit.base import (
    REQUEST,
    SHOWN,
    SPLITS,
    Rule,
    Tables,
    before,
    sums_before,
)

TOLERANCE = 1e-5
"""Of means and deviations."""


def list_columns(users: pl.DataFrame) -> list[str]:
    return [
        name
        for name, kind in users.schema.items()
        if isinstance(kind, pl.List) and name != "requests"
    ]


def check_lengths(users: pl.DataFrame, rule: Rule) -> pl.DataFrame:
    """Reports users whose lists differ in length and returns the others, which can be laid out as rows."""
    lengths = [pl.col(name).list.len() for name in list_columns(users)]
    equal = pl.all_horizontal(length == lengths[0] for length in lengths).fill_null(
        False
    )
    rule.broken_rows(users.filter(~equal), "user {user_id}: lists of unequal length")
    return users.filter(equal)


def behaviour_rows(users: pl.DataFrame) -> pl.DataFrame:
    """The behaviours of `users`, one row each: `row`, `user_id`, `place` and every list column."""
    lists = list_columns(users)
    flat = (
        users.select("row", "user_id", *lists)
        .filter(pl.col("item_index").list.len() > 0)
        .explode(lists)
    )
    return flat.with_columns(place=pl.int_range(pl.len(), dtype=pl.Int32).over("row"))


def request_rows(users: pl.DataFrame) -> pl.DataFrame:
    """The requests of `users`, one row each: `row`, `user_id`, `place` and the struct's fields."""
    flat = (
        users.select("row", "user_id", "requests")
        .filter(pl.col("requests").list.len() > 0)
        .explode("requests")
    )
    return flat.unnest("requests").with_columns(
        place=pl.int_range(pl.len(), dtype=pl.Int32).over("row")
    )


def expected_behaviours(tables: Tables, events: pl.DataFrame) -> pl.DataFrame:
    """The behaviours that `events` (with `row`) give: those in the catalogue, as they become known, the most recent
    ones. The sort keeps the file's order where all keys are equal."""
    inside = tables.behaviours_of(events).join(
        tables.catalogue, on="item_id", maintain_order="left"
    )
    every = inside.sort("row", tables.known, *tables.event_order, maintain_order=True)
    over = (pl.len().over("row").cast(pl.Int64) - tables.info["max_events"]).clip(0)
    return every.with_columns(
        place=(pl.int_range(pl.len(), dtype=pl.Int64).over("row") - over).cast(pl.Int32)
    ).filter(pl.col("place") >= 0)


def check_behaviours(
    users: pl.DataFrame, behaviours: pl.DataFrame, expected: pl.DataFrame, rule: Rule
) -> None:
    """The lists of `users` are what events give."""
    columns = list_columns(users)
    absent = [
        name for name in columns if behaviours.schema[name] != expected.schema.get(name)
    ]
    if absent:
        rule.broken(
            f"column {absent[0]} of sequences is not in events, or is of another type",
            behaviours.height,
        )
    columns = [name for name in columns if name not in absent]
    compare(
        behaviours,
        expected.join(users.select("row"), on="row", how="semi"),
        columns,
        "behaviour",
        rule,
    )


def compare(
    found: pl.DataFrame,
    expected: pl.DataFrame,
    columns: list[str],
    what: str,
    rule: Rule,
) -> None:
    """Reports the rows, by `row` and `place`, where `columns` are not as expected, and those that only one side has."""
    both = found.select("row", "place", "user_id", *columns).join(
        expected.select("row", "place", "user_id", *columns),
        on=["row", "place"],
        how="full",
        coalesce=True,
        suffix="_events",
    )
    rule.rows += both.height
    differ = pl.any_horizontal(
        pl.col(name).ne_missing(pl.col(f"{name}_events"))
        for name in ("user_id", *columns)
    )
    wrong = both.filter(differ).sort("row", "place")
    for row in wrong.head(SHOWN).iter_rows(named=True):
        other = [name for name in columns if row[name] != row[f"{name}_events"]]
        said = "; ".join(
            f"{name} is {row[name]}, events give {row[f'{name}_events']}"
            for name in other
        )
        rule.broken(
            f"user {row['user_id'] or row['user_id_events']}, {what} {row['place']}: {said}"
        )
    rule.violations += max(0, wrong.height - SHOWN)


def check_history(
    tables: Tables,
    behaviours: pl.DataFrame,
    requests: pl.DataFrame,
    rule: Rule,
    log_order: bool = False,
) -> None:
    """`history_end` counts the behaviours that are known before the request. log_order: where a request is its
    behaviour, which sees all that are before it in the log."""
    rule.rows += requests.height
    known = requests.drop_nulls(
        "timestamp_ms"
    )  # which it has where its target is right
    earlier = behaviours.select("row", time=tables.known, expected=pl.lit(1, pl.Int64))
    counted = sums_before(
        known.select("row", at="timestamp_ms"), earlier, ["row"], 0, "time"
    )
    right = (
        known.select(expected=pl.col("place").cast(pl.Int64)) if log_order else counted
    )
    wrong = known.with_columns(right).filter(
        pl.col("history_end").cast(pl.Int64).ne_missing(pl.col("expected"))
    )
    rule.broken_rows(
        wrong.sort("row", "place"),
        REQUEST
        + " at {timestamp_ms}: history_end is {history_end}, {expected} behaviours are known earlier",
    )


def check_splits(tables: Tables, requests: pl.DataFrame, rule: Rule) -> dict[str, int]:
    """Checks the split of each request; returns how many requests each split has."""
    rule.rows += requests.height
    split = tables.info.get("split") or {}
    starts = [split.get("val_start_ms"), split.get("test_start_ms")]
    if split.get("kind") == "leave_last_out":
        requests = requests.with_columns(rank=rank_in_time(tables, requests))
        last = (
            pl.len().over("row").cast(pl.Int64) - 1 - pl.col("rank")
        )  # 0 for the user's last request
        train, val = (pl.len().over("row") < 3) | (last > 1), last == 1
        if tables.manifests["events"].info["clock"]:
            rule.note = "leave-last-out lets other users' later behaviour into training; a temporal split does not"
    elif split.get("kind") == "temporal" and all(
        isinstance(start, int) for start in starts
    ):
        train, val = (pl.col("timestamp_ms") < start for start in starts)
    else:
        rule.broken(
            f"the manifest of sequences names no known split: {split}", requests.height
        )
        return {}
    expected = (
        pl.when(train)
        .then(pl.lit("train"))
        .when(val)
        .then(pl.lit("val"))
        .otherwise(pl.lit("test"))
    )
    wrong = requests.with_columns(expected=expected).filter(
        pl.col("split").ne_missing(pl.col("expected"))
    )
    rule.broken_rows(
        wrong.sort("row", "place"),
        REQUEST + " at {timestamp_ms}: in {split}, belongs to {expected}",
    )
    return per_split(requests)


def rank_in_time(tables: Tables, requests: pl.DataFrame) -> pl.Series:
    """Return the rank of each request within its user, from 0: by time, and among those of one time by a hash."""
    if tables.order_of_log:
        return requests["place"].cast(pl.Int64)
    keyed = requests.select(
        "row",
        "user_id",
        "timestamp_ms",
        item_index=pl.col("candidates").list.first(),
        tied=pl.len().over("row", "timestamp_ms") > 1,
    ).join(tables.catalogue, on="item_index", how="left", maintain_order="left")
    hashes = [
        sha256(json.dumps([0, user, time, item]).encode()).hexdigest() if tied else ""
        for user, time, item, tied in keyed.select(
            "user_id", "timestamp_ms", "item_id", "tied"
        ).iter_rows()
    ]
    sorted_rows = (
        keyed.with_row_index("at")
        .with_columns(hash=pl.Series(hashes, dtype=pl.String).str.slice(0, 16))
        .sort("row", "timestamp_ms", "hash", maintain_order=True)
        .with_columns(rank=pl.int_range(pl.len()).over("row"))
    )
    return sorted_rows.sort("at")["rank"]


def check_counts(
    tables: Tables, held: Mapping[str, int | dict[str, int]], rule: Rule
) -> None:
    """The manifest counts what the table holds; `held`: what this kind counts besides, also by split."""
    lengths = tables.sequences["item_index"].list.len()
    every: dict[str, int | dict[str, int]] = {
        "users": len(lengths),
        "interactions": int(lengths.sum()),
        "items": tables.catalogue.height,
        **held,
    }
    for name, counts in every.items():
        for split, count in (
            counts.items() if isinstance(counts, dict) else [("", counts)]
        ):
            rule.rows += 1
            said = (
                (tables.info.get(name) or {}).get(split)
                if split
                else tables.info.get(name)
            )
            if said != count:
                rule.broken(
                    f"{name} {split}: the manifest says {said}, the table holds {count}".replace(
                        " :", ":"
                    )
                )


def per_split(rows: pl.DataFrame) -> dict[str, int]:
    """How many rows are of each `split`."""
    return {split: rows.filter(pl.col("split") == split).height for split in SPLITS}


def check_columns(
    rows: pl.DataFrame,
    said: np.ndarray,
    names: list[str],
    right: dict[str, np.ndarray],
    what: str,
    rule: Rule,
) -> None:
    """Reports the rows where a column of `said` (rows, names) is not what is right, beyond what float32 rounds."""
    for column, name in enumerate(names):
        if name not in right:
            rule.broken(f"{name}: a {what} that the audit does not know", rows.height)
            continue
        wrong = ~(
            np.abs(said[:, column] - right[name])
            <= 4e-6 * np.maximum(1, np.abs(right[name]))
        )
        found = rows.with_columns(
            said=pl.Series(said[:, column]), right=pl.Series(right[name])
        ).filter(wrong)
        place = "user {user_id}, item {item_index} at {timestamp_ms}: {what} {name}"
        rule.broken_rows(
            found,
            place + " is {said:.6g}, events give {right:.6g}",
            what=what,
            name=name,
        )


def own_columns(info: dict[str, Any]) -> list[str]:
    """The columns of own features that the manifest of sequences names."""
    said = info.get("own") or {}
    return [
        each["name"]
        for kind in ("numbers", "categories")
        for each in said.get(kind, ())
    ]


def with_as_of(tables: Tables, rows: pl.DataFrame, at: str) -> pl.DataFrame:
    """`rows` with the features of each table with a time of its own: those of the latest row of their `item_id` or
    `user_id` whose time is strictly before `at`; and with those of items."""
    for name, said in (tables.info.get("as_of") or {}).items():
        known = tables.read(name).select(
            said["key"], *said["features"], __since="timestamp_ms"
        )
        rows = rows.hstack(
            before(rows.with_columns(at=at), known, [said["key"]], 0, "__since")
        )
    if of_items := tables.info.get("item_features"):
        rows = rows.join(
            tables.items.select("item_id", *of_items),
            on="item_id",
            how="left",
            maintain_order="left",
        )
    return rows


def check_as_of(tables: Tables, rule: Rule) -> None:
    """In the tables with a time of their own an id has one row at a time."""
    for name, said in (tables.info.get("as_of") or {}).items():
        keys = tables.read(name).select(said["key"], "timestamp_ms")
        rule.rows += keys.height
        twice = keys.filter(keys.is_duplicated())
        rule.broken_rows(
            twice, f"{name}: {{{said['key']}}} has several rows at {{timestamp_ms}}"
        )


def check_said(what: str, said: float, right: float, scale: float, rule: Rule) -> None:
    """The manifest says a number that training rows give."""
    if abs(said - right) > TOLERANCE * max(scale, abs(right)):
        rule.broken(f"{what}: the manifest says {said}, training rows give {right:.6g}")


def check_training(info: dict[str, Any], train: pl.DataFrame, rule: Rule) -> None:
    """The manifest says of own features what the rows of training do; `train` has a column per feature."""
    said = info.get("own") or {"numbers": [], "categories": []}
    for number in said["numbers"]:
        rule.rows += 1
        known = train[number["name"]].drop_nulls().cast(pl.Float64).to_numpy()
        mean, std = (known.mean(), known.std()) if len(known) else (0.0, 0.0)
        std = std if std > 1e-9 * max(1.0, abs(mean)) else 0.0
        for key, value in {
            "mean": mean,
            "std": std,
            "missing": len(known) < train.height,
        }.items():
            check_said(f"{key} of {number['name']}", number[key], value, std, rule)
    for category in said["categories"]:
        if not category["buckets"]:
            check_listed(category["name"], category["values"], train, rule)


def check_listed(name: str, listed: list[str], train: pl.DataFrame, rule: Rule) -> None:
    """The manifest lists the values that a category has in training."""
    rule.rows += 1
    seen = train[name].drop_nulls().unique().sort().to_list()
    if listed != seen:
        other = sorted(set(seen) ^ set(listed))[:SHOWN]
        rule.broken(
            f"values of {name}: {len(listed):,} in the manifest, {len(seen):,} in training rows; such as {other}"
        )
