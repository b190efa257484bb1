"""Rules on sequences that several kinds share: behaviours, histories, splits, counts, custom features.

Frames of behaviours and of requests have a row each, with `row` and `place`
(`base.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import polars as pl

from pipelines.data.audit.base import (
    MAX_EXAMPLES,
    REQUEST,
    SPLITS,
    Rule,
    Tables,
    latest_before,
    sums_before,
)

TOLERANCE = 1e-5
"""Relative tolerance of means and deviations."""

FLOAT32_TOLERANCE = 4e-6
"""Relative tolerance of features, which are stored as float32."""

PLACE = pl.int_range(pl.len(), dtype=pl.Int32).over("row").alias("place")


@dataclass(frozen=True)
class UnfoldedSequences:
    """Sequences with requests, as rows."""

    all_requests: pl.DataFrame
    """Requests of all users."""
    users: pl.DataFrame
    """Users whose lists have equal lengths."""
    behaviours: pl.DataFrame
    """Behaviours of `users`."""
    requests: pl.DataFrame
    """Requests of `users`."""
    per_split: dict[str, int]
    """Number of requests of each split."""


def unfold(tables: Tables, rules: dict[str, Rule]) -> UnfoldedSequences:
    """Check the splits and the lengths of lists; return behaviours and requests as rows."""
    all_requests = request_rows(tables.sequences)
    per_split = check_splits(tables, all_requests, rules["splits"])
    check_folds(tables, all_requests, rules["folds"])
    users = check_lengths(tables.sequences, rules["behaviours"])
    requests = all_requests.join(users.select("row"), on="row", how="semi")
    behaviours = behaviour_rows(users)
    return UnfoldedSequences(all_requests, users, behaviours, requests, per_split)


def list_columns(users: pl.DataFrame) -> list[str]:
    """Return the columns with a list of behaviours per user."""
    return [
        name
        for name, kind in users.schema.items()
        if isinstance(kind, pl.List) and name != "requests"
    ]


def check_lengths(users: pl.DataFrame, rule: Rule) -> pl.DataFrame:
    """Report users whose lists differ in length. Return the other users."""
    lengths = [pl.col(name).list.len() for name in list_columns(users)]
    is_equal = pl.all_horizontal(length == lengths[0] for length in lengths)
    is_equal = is_equal.fill_null(False)
    rule.add_rows(users.filter(~is_equal), "user {user_id}: lists of unequal length")
    return users.filter(is_equal)


def behaviour_rows(users: pl.DataFrame) -> pl.DataFrame:
    """Return the behaviours of users, one row each: `row`, `user_id`, `place` and every list column."""
    lists = list_columns(users)
    has_behaviours = pl.col("item_index").list.len() > 0
    columns = users.select("row", "user_id", *lists).filter(has_behaviours)
    return columns.explode(lists).with_columns(PLACE)


def request_rows(users: pl.DataFrame) -> pl.DataFrame:
    """Return the requests of users, one row each: `row`, `user_id`, `place` and the struct's fields."""
    has_requests = pl.col("requests").list.len() > 0
    columns = users.select("row", "user_id", "requests").filter(has_requests)
    return columns.explode("requests").unnest("requests").with_columns(PLACE)


def expected_behaviours(tables: Tables, events: pl.DataFrame) -> pl.DataFrame:
    """Recompute the behaviours of users from `events` (with `row`).

    They are behaviours on items of the catalogue, ordered by the time from which they
    are visible, truncated to the most recent `max_events`.
    """
    behaviours = tables.filter_behaviours(events).join(
        tables.catalogue, on="item_id", maintain_order="left"
    )
    # The sort keeps the file's order where all keys are equal.
    order = ["row", tables.known, *tables.event_order]
    behaviours = behaviours.sort(order, maintain_order=True)
    length = pl.len().over("row").cast(pl.Int64)
    truncated = (length - tables.info["max_events"]).clip(0)
    place = pl.int_range(pl.len(), dtype=pl.Int64).over("row") - truncated
    behaviours = behaviours.with_columns(place=place.cast(pl.Int32))
    return behaviours.filter(pl.col("place") >= 0)


def check_behaviours(
    users: pl.DataFrame, behaviours: pl.DataFrame, expected: pl.DataFrame, rule: Rule
) -> None:
    """Check that the lists of `users`, with rows `behaviours`, hold the `expected` behaviours."""
    columns = list_columns(users)
    absent = [
        name for name in columns if behaviours.schema[name] != expected.schema.get(name)
    ]
    if absent:
        rule.add_violation(
            f"column {absent[0]} of sequences is not in events, or is of another type",
            behaviours.height,
        )
    columns = [name for name in columns if name not in absent]
    expected = expected.join(users.select("row"), on="row", how="semi")
    compare_rows(behaviours, expected, columns, "behaviour", rule)


def compare_rows(
    rows: pl.DataFrame,
    expected: pl.DataFrame,
    columns: list[str],
    noun: str,
    rule: Rule,
) -> None:
    """Report rows whose `columns` differ from the expected rows, by `row` and `place`, and rows that only one side has.

    `noun` is what a row is called.
    """
    keys = ["row", "place"]
    both = rows.select(*keys, "user_id", *columns).join(
        expected.select(*keys, "user_id", *columns),
        on=keys,
        how="full",
        coalesce=True,
        suffix="_events",
    )
    rule.rows += both.height
    differs = pl.any_horizontal(
        pl.col(name).ne_missing(pl.col(f"{name}_events"))
        for name in ("user_id", *columns)
    )
    wrong = both.filter(differs).sort(keys)
    for row in wrong.head(MAX_EXAMPLES).iter_rows(named=True):
        differing = [name for name in columns if row[name] != row[f"{name}_events"]]
        details = "; ".join(
            f"{name} is {row[name]}, events give {row[f'{name}_events']}"
            for name in differing
        )
        user = row["user_id"] or row["user_id_events"]
        rule.add_violation(f"user {user}, {noun} {row['place']}: {details}")
    rule.violations += max(0, wrong.height - MAX_EXAMPLES)


def check_history(
    tables: Tables, behaviours: pl.DataFrame, requests: pl.DataFrame, rule: Rule
) -> None:
    """Check that `history_end` counts the behaviours that are visible before the request.

    With ties in the log's order a request is a behaviour, and sees all before it in the
    log.
    """
    rule.rows += requests.height
    # A request without a time has a wrong target, which is reported there.
    timed = requests.drop_nulls("timestamp_ms")
    expected = timed.select(expected=pl.col("place").cast(pl.Int64))
    if not tables.log_order:
        one = pl.lit(1, pl.Int64)
        counted = behaviours.select("row", time=tables.known, expected=one)
        points = timed.select("row", at="timestamp_ms")
        expected = sums_before(points, counted, ["row"], 0, "time")
    history_end = pl.col("history_end").cast(pl.Int64)
    wrong = timed.with_columns(expected).filter(
        history_end.ne_missing(pl.col("expected"))
    )
    rule.add_rows(
        wrong.sort("row", "place"),
        REQUEST
        + " at {timestamp_ms}: history_end is {history_end}, {expected} behaviours are known earlier",
    )


def check_splits(tables: Tables, requests: pl.DataFrame, rule: Rule) -> dict[str, int]:
    """Check the split of each request. Return the number of requests of each split."""
    rule.rows += requests.height
    split = tables.info.get("split") or {}
    starts = [split.get("val_start_ms"), split.get("test_start_ms")]
    is_timed = all(isinstance(start, int) for start in starts)
    if split.get("kind") == "leave_last_out":
        requests = requests.with_columns(rank=rank_in_time(tables, requests))
        length = pl.len().over("row")
        from_end = length.cast(pl.Int64) - 1 - pl.col("rank")
        is_train = (length < 3) | (from_end > 1)
        is_val = from_end == 1
        if tables.manifests["events"].info["clock"]:
            rule.note = "leave-last-out lets other users' later behaviour into training; a temporal split does not"
    elif split.get("kind") == "temporal" and is_timed:
        is_train, is_val = (pl.col("timestamp_ms") < start for start in starts)
    else:
        rule.add_violation(
            f"the manifest of sequences names no known split: {split}", requests.height
        )
        return {}
    expected = pl.when(is_train).then(pl.lit("train")).when(is_val)
    requests = requests.with_columns(
        expected=expected.then(pl.lit("val")).otherwise(pl.lit("test"))
    )
    wrong = requests.filter(pl.col("split").ne_missing(pl.col("expected")))
    rule.add_rows(
        wrong.sort("row", "place"),
        REQUEST + " at {timestamp_ms}: in {split}, belongs to {expected}",
    )
    return count_per_split(requests)


def check_folds(tables: Tables, requests: pl.DataFrame, rule: Rule) -> None:
    """Check the windows of the folds against the events, and their requests against the times of `requests`."""
    split = tables.info.get("split") or {}
    folds = split.get("folds") or []
    if not folds:
        return
    rule.rows += requests.height
    last = folds[-1]
    for name in ("val_start_ms", "test_start_ms"):
        if last[name] != split[name]:
            rule.add_violation(
                f"fold {len(folds)}: {name} is {last[name]}, of the split it is {split[name]}"
            )
    time = tables.events["timestamp_ms"]
    if not tables.all_shown:
        time = tables.filter_behaviours(tables.events)["timestamp_ms"]
    end = pl.Series([time.max()]).item() + 1
    if not tables.manifests["items"].info.get("catalogue_of"):
        if last["test_end_ms"] != end:
            rule.add_violation(
                f"fold {len(folds)}: test ends at {last['test_end_ms']}, the log at {end}"
            )
        if folds[0]["val_start_ms"] <= pl.Series([time.min()]).item():
            rule.add_violation("fold 1: no behaviour is earlier than its validation")
    lengths = [fold["test_end_ms"] - fold["test_start_ms"] for fold in folds]
    val_lengths = [fold["test_start_ms"] - fold["val_start_ms"] for fold in folds]
    for number in range(1, len(folds)):
        earlier, later = folds[number - 1 : number + 1]
        if earlier["test_end_ms"] != later["test_start_ms"]:
            rule.add_violation(
                f"fold {number}: test ends at {earlier['test_end_ms']}, that of the next fold begins at "
                f"{later['test_start_ms']}"
            )
        if (
            lengths[number - 1] != lengths[-1]
            or val_lengths[number - 1] != val_lengths[-1]
        ):
            rule.add_violation(
                f"fold {number}: windows of {val_lengths[number - 1]} and {lengths[number - 1]} ms, of the last fold "
                f"{val_lengths[-1]} and {lengths[-1]}"
            )
    recorded = tables.info.get("requests_per_fold") or []
    if len(recorded) != len(folds):
        rule.add_violation(f"requests of {len(recorded)} folds, {len(folds)} are cut")
    at = requests["timestamp_ms"]
    for number, (fold, counts) in enumerate(zip(folds, recorded, strict=False), 1):
        is_before_end = pl.Series([True]) if fold is last else at < fold["test_end_ms"]
        expected = {
            "train": (at < fold["val_start_ms"]).sum(),
            "val": at.is_between(
                fold["val_start_ms"], fold["test_start_ms"], closed="left"
            ).sum(),
            "test": ((at >= fold["test_start_ms"]) & is_before_end).sum(),
        }
        for name in SPLITS:
            if counts.get(name) != expected[name]:
                rule.add_violation(
                    f"fold {number}: {counts.get(name)} {name} requests, their times give {expected[name]}"
                )


def rank_in_time(tables: Tables, requests: pl.DataFrame) -> pl.Series:
    """Return the rank of each request within its user, from 0: by time, and at one time by a hash."""
    if tables.log_order:
        return requests["place"].cast(pl.Int64)
    keys = requests.select(
        "row",
        "user_id",
        "timestamp_ms",
        item_index=pl.col("candidates").list.first(),
        is_tied=pl.len().over("row", "timestamp_ms") > 1,
    ).join(tables.catalogue, on="item_index", how="left", maintain_order="left")
    hashes = []
    columns = keys.select("user_id", "timestamp_ms", "item_id", "is_tied")
    for user, time, item, is_tied in columns.iter_rows():
        text = json.dumps([0, user, time, item])
        digest = sha256(text.encode()).hexdigest()[:16] if is_tied else ""
        hashes.append(digest)
    keys = keys.with_row_index("at").with_columns(
        hash=pl.Series(hashes, dtype=pl.String)
    )
    keys = keys.sort("row", "timestamp_ms", "hash", maintain_order=True)
    keys = keys.with_columns(rank=pl.int_range(pl.len()).over("row"))
    return keys.sort("at")["rank"]


def check_counts(
    tables: Tables, counts: Mapping[str, int | dict[str, int]], rule: Rule
) -> None:
    """Check the counts of the manifest against the table.

    `counts` are the kind's, also by split, beside users, interactions and items.
    """
    lengths = tables.sequences["item_index"].list.len()
    every: dict[str, int | dict[str, int]] = {
        "users": len(lengths),
        "interactions": int(lengths.sum()),
        "items": tables.catalogue.height,
        **counts,
    }
    for name, count in every.items():
        recorded = tables.info.get(name)
        if isinstance(count, dict):
            for split, of_split in count.items():
                value = (recorded or {}).get(split)
                _check_count(f"{name} {split}", value, of_split, rule)
        else:
            _check_count(name, recorded, count, rule)


def _check_count(name: str, recorded: Any, count: int, rule: Rule) -> None:
    rule.rows += 1
    if recorded != count:
        rule.add_violation(
            f"{name}: the manifest says {recorded}, the table holds {count}"
        )


def count_per_split(rows: pl.DataFrame) -> dict[str, int]:
    """Return the number of rows of each `split`."""
    return {split: rows.filter(pl.col("split") == split).height for split in SPLITS}


def check_values(
    rows: pl.DataFrame,
    values: np.ndarray,
    names: list[str],
    expected: dict[str, np.ndarray],
    noun: str,
    rule: Rule,
) -> None:
    """Report the rows where a value differs from the one expected, beyond the rounding of float32.

    Args:
        rows: Columns `user_id`, `item_index` and `timestamp_ms`.
        values: (rows, names) values of the table.
        names: Names of the columns of `values`.
        expected: (rows,) by name.
        noun: What a column is called.
        rule: Takes the violations.
    """
    for column, name in enumerate(names):
        if name not in expected:
            rule.add_violation(
                f"{name}: a {noun} that the audit does not know", rows.height
            )
            continue
        value, right = values[:, column], expected[name]
        tolerance = FLOAT32_TOLERANCE * np.maximum(1, np.abs(right))
        is_wrong = ~(np.abs(value - right) <= tolerance)
        wrong = rows.with_columns(value=pl.Series(value), right=pl.Series(right))
        rule.add_rows(
            wrong.filter(is_wrong),
            "user {user_id}, item {item_index} at {timestamp_ms}: {noun} {name} is {value:.6g}, "
            "events give {right:.6g}",
            noun=noun,
            name=name,
        )


# Custom features.


def own_columns(info: dict[str, Any]) -> list[str]:
    """Return the columns of custom features that the manifest of sequences names."""
    own = info.get("own") or {}
    entries = [*own.get("numbers", ()), *own.get("categories", ())]
    return [entry["name"] for entry in entries]


def join_as_of(tables: Tables, rows: pl.DataFrame, at: str) -> pl.DataFrame:
    """Return `rows` with the features of items and of tables with a time of their own.

    The latter are those of the latest row of the `item_id` or `user_id` strictly before
    the column `at`.
    """
    for name, table in (tables.info.get("as_of") or {}).items():
        key = table["key"]
        columns = tables.read(name).select(
            key, *table["features"], __since="timestamp_ms"
        )
        points = rows.with_columns(at=at)
        rows = rows.hstack(latest_before(points, columns, [key], 0, "__since"))
    if item_features := tables.info.get("item_features"):
        items = tables.items.select("item_id", *item_features)
        rows = rows.join(items, on="item_id", how="left", maintain_order="left")
    return rows


def check_as_of(tables: Tables, rule: Rule) -> None:
    """Check that an id has one row at a time in the tables with a time of their own."""
    for name, table in (tables.info.get("as_of") or {}).items():
        key = table["key"]
        rows = tables.read(name).select(key, "timestamp_ms")
        rule.rows += rows.height
        rule.add_rows(
            rows.filter(rows.is_duplicated()),
            f"{name}: {{{key}}} has several rows at {{timestamp_ms}}",
        )


def check_number(
    name: str, recorded: float, expected: float, scale: float, rule: Rule
) -> None:
    """Check a number of the manifest against training rows. `scale` is the size of deviations that matter."""
    if abs(recorded - expected) > TOLERANCE * max(scale, abs(expected)):
        rule.add_violation(
            f"{name}: the manifest says {recorded}, training rows give {expected:.6g}"
        )


def check_training(info: dict[str, Any], train: pl.DataFrame, rule: Rule) -> None:
    """Check the manifest's statistics of custom features against training rows, with a column per feature."""
    own = info.get("own") or {"numbers": [], "categories": []}
    for number in own["numbers"]:
        rule.rows += 1
        name = number["name"]
        values = train[name].drop_nulls().cast(pl.Float64).to_numpy()
        mean, std = (values.mean(), values.std()) if len(values) else (0.0, 0.0)
        if std <= 1e-9 * max(1.0, abs(mean)):
            std = 0.0
        is_missing = len(values) < train.height
        check_number(f"mean of {name}", number["mean"], mean, std, rule)
        check_number(f"std of {name}", number["std"], std, std, rule)
        check_number(f"missing of {name}", number["missing"], is_missing, std, rule)
    for category in own["categories"]:
        if not category["buckets"]:
            check_category(category["name"], category["values"], train, rule)


def check_category(
    name: str, listed: list[str], train: pl.DataFrame, rule: Rule
) -> None:
    """Check that the manifest lists the values that a category has in training rows."""
    rule.rows += 1
    values = train[name].drop_nulls().unique().sort().to_list()
    if listed != values:
        others = sorted(set(values) ^ set(listed))[:MAX_EXAMPLES]
        rule.add_violation(
            f"values of {name}: {len(listed):,} in the manifest, {len(values):,} in training rows; such as {others}"
        )
