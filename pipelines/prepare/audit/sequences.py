"""Audit rules for `sequences` that several kinds of request share.

They check behaviours, histories, splits, counts and custom features. Frames of
behaviours and of requests have one row each, with `row` and `index` (`base.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import polars as pl

from core.schemas import CustomFeatures
from pipelines.prepare.audit.base import (
    MAX_EXAMPLES,
    REQUEST,
    SPLITS,
    Rule,
    Tables,
    latest_before,
    sums_before,
)

TOLERANCE = 1e-5
"""Relative tolerance of means and standard deviations."""

FLOAT32_TOLERANCE = 4e-6
"""Relative tolerance of features, which are stored as float32."""

INDEX = pl.int_range(pl.len(), dtype=pl.Int32).over("row").alias("index")
"""Index of a behaviour or request within its user's, in the order of the rows."""


@dataclass(frozen=True)
class UnfoldedSequences:
    """The lists of `sequences` as frames with one row per element."""

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
    """Check splits and lengths of lists, and unfold the lists of `sequences`."""
    all_requests = request_rows(tables.sequences)
    per_split = check_splits(tables, all_requests, rules["splits"])
    users = check_lengths(tables.sequences, rules["behaviours"])
    requests = all_requests.join(users.select("row"), on="row", how="semi")
    behaviours = behaviour_rows(users)
    return UnfoldedSequences(all_requests, users, behaviours, requests, per_split)


def list_columns(users: pl.DataFrame) -> list[str]:
    """Return the names of the columns with a list of behaviours per user."""
    return [
        name
        for name, kind in users.schema.items()
        if isinstance(kind, pl.List) and name != "requests"
    ]


def check_lengths(users: pl.DataFrame, rule: Rule) -> pl.DataFrame:
    """Check that a user's lists have equal lengths, and return the users that pass."""
    lengths = [pl.col(name).list.len() for name in list_columns(users)]
    is_equal = pl.all_horizontal(length == lengths[0] for length in lengths)
    is_equal = is_equal.fill_null(False)
    rule.add_rows(users.filter(~is_equal), "user {user_id}: lists of unequal length")
    return users.filter(is_equal)


def behaviour_rows(users: pl.DataFrame) -> pl.DataFrame:
    """Return one row per behaviour: `row`, `user_id`, `index` and the list columns."""
    lists = list_columns(users)
    has_behaviours = pl.col("item_index").list.len() > 0
    columns = users.select("row", "user_id", *lists).filter(has_behaviours)
    return columns.explode(lists).with_columns(INDEX)


def request_rows(users: pl.DataFrame) -> pl.DataFrame:
    """Return one row per request: `row`, `user_id`, `index` and the struct's fields."""
    has_requests = pl.col("requests").list.len() > 0
    columns = users.select("row", "user_id", "requests").filter(has_requests)
    return columns.explode("requests").unnest("requests").with_columns(INDEX)


def expected_behaviours(
    tables: Tables, events: pl.DataFrame, sessions: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Recompute the behaviours of users from their events.

    They are the behaviours on items of the catalogue, in the order in which they become
    known, truncated to the most recent `max_events`.

    Args:
        tables: Tables under audit, which are read into memory.
        events: Events with the `row` of their user.
        sessions: Behaviours of sessions, numbered in the column `session`.

    Returns:
        The behaviours, with `item_index` and `index`.
    """
    behaviours = tables.filter_behaviours(events).join(
        tables.catalogue, on="item_id", maintain_order="left"
    )
    # events that are equal in all keys keep the order of the file
    keys = ["row", tables.known_time_column, *tables.event_order]
    if sessions is not None:
        # at equal times, behaviours of events come first: nulls sort before numbers
        keys.insert(2, "session")
        items = tables.items.select("item_index", "item_id", *tables.info.item_features)
        rows = (
            tables.with_user_rows(sessions)
            .join(items, on="item_id")
            .with_columns(
                pl.lit(-1, pl.Int32).alias("position"),
                pl.lit(-1, behaviours.schema["query_index"]).alias("query_index"),
                pl.col("timestamp_ms").alias(tables.known_time_column),
            )
        )
        behaviours = pl.concat([behaviours, rows], how="diagonal_relaxed")
    behaviours = behaviours.sort(keys, maintain_order=True)
    length = pl.len().over("row").cast(pl.Int64)
    num_truncated = (length - tables.info.max_events).clip(0)
    index = pl.int_range(pl.len(), dtype=pl.Int64).over("row") - num_truncated
    behaviours = behaviours.with_columns(index=index.cast(pl.Int32))
    return behaviours.filter(pl.col("index") >= 0)


def check_behaviours(
    users: pl.DataFrame, behaviours: pl.DataFrame, expected: pl.DataFrame, rule: Rule
) -> None:
    """Check the behaviours of `sequences` against the behaviours in `events`.

    Args:
        users: Rows of `sequences` whose lists have equal lengths.
        behaviours: Rows of `behaviour_rows(users)`.
        expected: Rows of `expected_behaviours`.
        rule: Rule that rows and violations are added to.
    """
    columns = list_columns(users)
    unexpected = [
        name for name in columns if behaviours.schema[name] != expected.schema.get(name)
    ]
    if unexpected:
        rule.add_violation(
            f"column {unexpected[0]} of sequences is not in events, or has another "
            f"type there",
            behaviours.height,
        )
    columns = [name for name in columns if name not in unexpected]
    expected = expected.join(users.select("row"), on="row", how="semi")
    compare_rows(behaviours, expected, columns, "behaviour", rule)


def compare_rows(
    rows: pl.DataFrame,
    expected: pl.DataFrame,
    columns: list[str],
    noun: str,
    rule: Rule,
) -> None:
    """Check that rows equal the expected rows with the same `row` and `index`.

    A row that only one of the frames has is a violation too.

    Args:
        rows: Columns `row`, `index`, `user_id` and `columns`.
        expected: The same columns, from events.
        columns: Names of the columns to compare.
        noun: Name of a row in messages.
        rule: Rule that rows and violations are added to.
    """
    keys = ["row", "index"]
    joined = rows.select(*keys, "user_id", *columns).join(
        expected.select(*keys, "user_id", *columns),
        on=keys,
        how="full",
        coalesce=True,
        suffix="_events",
    )
    rule.rows += joined.height
    differs = pl.any_horizontal(
        pl.col(name).ne_missing(pl.col(f"{name}_events"))
        for name in ("user_id", *columns)
    )
    violating = joined.filter(differs).sort(keys)
    for row in violating.head(MAX_EXAMPLES).iter_rows(named=True):
        details = "; ".join(
            f"{name} is {row[name]}, events give {row[f'{name}_events']}"
            for name in columns
            if row[name] != row[f"{name}_events"]
        )
        user = row["user_id"] or row["user_id_events"]
        rule.add_violation(f"user {user}, {noun} {row['index']}: {details}")
    rule.violations += max(0, violating.height - MAX_EXAMPLES)


def check_history(
    tables: Tables, behaviours: pl.DataFrame, requests: pl.DataFrame, rule: Rule
) -> None:
    """Check that `history_end` counts the behaviours known before the request.

    With `log_order` every request is a behaviour, and `history_end` is its index.

    Args:
        tables: Tables under audit, which are read into memory.
        behaviours: Behaviours with the `row` of their user.
        requests: Requests with the `row` of their user.
        rule: Rule that rows and violations are added to.
    """
    rule.rows += requests.height
    # the rule `targets` reports requests without a time
    timed = requests.drop_nulls("timestamp_ms")
    expected = timed.select(expected=pl.col("index").cast(pl.Int64))
    if not tables.log_order:
        one = pl.lit(1, pl.Int64)
        counted = behaviours.select("row", time=tables.known_time_column, expected=one)
        points = timed.select("row", at="timestamp_ms")
        expected = sums_before(points, counted, ["row"], 0, "time")
    history_end = pl.col("history_end").cast(pl.Int64)
    is_wrong = history_end.ne_missing(pl.col("expected"))
    violating = timed.with_columns(expected).filter(is_wrong)
    rule.add_rows(
        violating.sort("row", "index"),
        REQUEST + " at {timestamp_ms}: history_end is {history_end}, {expected} "
        "behaviours are known earlier",
    )


def check_splits(tables: Tables, requests: pl.DataFrame, rule: Rule) -> dict[str, int]:
    """Check the split of each request, and return the number of requests per split."""
    rule.rows += requests.height
    split = tables.info.split
    if split.by == "leave_last_out":
        requests = requests.with_columns(rank=rank_in_time(tables, requests))
        length = pl.len().over("row")
        from_end = length.cast(pl.Int64) - 1 - pl.col("rank")
        is_train = (length < 3) | (from_end > 1)
        is_val = from_end == 1
        if tables.opened["events"].info.log.clock:
            rule.note = (
                "leave-last-out trains on other users' later behaviours; a temporal "
                "split does not"
            )
    else:
        is_train = pl.col("timestamp_ms") < split.val_start_ms
        is_val = pl.col("timestamp_ms") < split.test_start_ms
    requests = requests.with_columns(expected=name_split(is_train, is_val))
    violating = requests.filter(pl.col("split").ne_missing(pl.col("expected")))
    rule.add_rows(
        violating.sort("row", "index"),
        REQUEST + " at {timestamp_ms}: in {split}, belongs to {expected}",
    )
    return count_per_split(requests)


def name_split(is_train: pl.Expr, is_val: pl.Expr) -> pl.Expr:
    """Return the name of the first split that is true, else test."""
    train, val, test = map(pl.lit, SPLITS)
    return pl.when(is_train).then(train).when(is_val).then(val).otherwise(test)


def rank_in_time(tables: Tables, requests: pl.DataFrame) -> pl.Series:
    """Return the index of each request among its user's, by time and then by a hash."""
    if tables.log_order:
        return requests["index"].cast(pl.Int64)
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

    Args:
        tables: Tables under audit, which are read into memory.
        counts: Expected counts of the kind, by name and, if they are split, by split.
            Users, interactions and items are checked for every kind.
        rule: Rule that rows and violations are added to.
    """
    lengths = tables.sequences["item_index"].list.len()
    all_counts: dict[str, int | dict[str, int]] = {
        "users": len(lengths),
        "interactions": int(lengths.sum()),
        "items": tables.catalogue.height,
        **counts,
    }
    for name, count in all_counts.items():
        recorded = getattr(tables.info, name)
        pairs = [(name, recorded, count)]
        if isinstance(count, dict):
            pairs = [(f"{name} {s}", recorded.get(s), n) for s, n in count.items()]
        for label, value, expected in pairs:
            rule.rows += 1
            if value != expected:
                rule.add_violation(
                    f"{label}: the manifest says {value}, the table has {expected}"
                )


def count_per_split(rows: pl.DataFrame) -> dict[str, int]:
    """Return the number of rows of each `split`."""
    return {split: rows.filter(pl.col("split") == split).height for split in SPLITS}


def check_values(
    rows: pl.DataFrame,
    values: np.ndarray,
    names: list[str],
    expected: pl.DataFrame,
    noun: str,
    rule: Rule,
) -> None:
    """Check values of the table against expected values, up to rounding to float32.

    Args:
        rows: Columns `user_id`, `item_index` and `timestamp_ms`, for messages.
        values: Values (rows, names) of the table.
        names: Names of the columns of `values`.
        expected: Columns of expected values.
        noun: Name of a column's kind in messages, such as `feature`.
        rule: Rule that rows and violations are added to.
    """
    for column, name in enumerate(names):
        if name not in expected:
            rule.add_violation(f"{name}: unknown {noun}", rows.height)
            continue
        value, correct = values[:, column], expected[name].to_numpy()
        tolerance = FLOAT32_TOLERANCE * np.maximum(1, np.abs(correct))
        is_wrong = ~(np.abs(value - correct) <= tolerance)
        compared = rows.with_columns(
            value=pl.Series(value), expected=pl.Series(correct)
        )
        rule.add_rows(
            compared.filter(is_wrong),
            "user {user_id}, item {item_index} at {timestamp_ms}: {noun} {name} is "
            "{value:.6g}, events give {expected:.6g}",
            noun=noun,
            name=name,
        )


# Custom features.


def join_as_of(tables: Tables, rows: pl.DataFrame, at: str) -> pl.DataFrame:
    """Join the features of items, and of each `as_of` table.

    Of a table, the latest row of the item or user strictly before `at` is joined.

    Args:
        tables: Tables under audit, which are read into memory.
        rows: Rows with `item_id` and `user_id`.
        at: Name of the rows' column with the time.
    """
    for name, table in tables.info.as_of.items():
        key = table.key
        columns = tables.read(name).select(key, *table.features, __since="timestamp_ms")
        points = rows.with_columns(at=at)
        rows = rows.hstack(latest_before(points, columns, [key], 0, "__since"))
    if item_features := tables.info.item_features:
        items = tables.items.select("item_id", *item_features)
        rows = rows.join(items, on="item_id", how="left", maintain_order="left")
    return rows


def check_as_of(tables: Tables, rule: Rule) -> None:
    """Check that tables with times of their own have one row per id and time."""
    for name, table in tables.info.as_of.items():
        key = table.key
        rows = tables.read(name).select(key, "timestamp_ms")
        rule.rows += rows.height
        rule.add_rows(
            rows.filter(rows.is_duplicated()),
            f"{name}: {{{key}}} has several rows at {{timestamp_ms}}",
        )


def check_number(
    name: str, recorded: float, expected: float, scale: float, rule: Rule
) -> None:
    """Check a statistic of the manifest against training rows.

    Args:
        name: Name of the statistic, for the message.
        recorded: Value in the manifest.
        expected: Value over the training rows.
        scale: The tolerance is relative to the larger of `scale` and `expected`.
        rule: Rule that rows and violations are added to.
    """
    if abs(recorded - expected) > TOLERANCE * max(scale, abs(expected)):
        rule.add_violation(
            f"{name}: the manifest says {recorded}, training rows give {expected:.6g}"
        )


def check_custom_scales(
    custom: CustomFeatures, train: pl.DataFrame, rule: Rule
) -> None:
    """Check the manifest's statistics of custom features against training rows.

    Args:
        custom: Custom features of the manifest of `sequences`.
        train: Training rows, with a column per custom feature.
        rule: Rule that rows and violations are added to.
    """
    for number in custom.numbers:
        rule.rows += 1
        name = number.name
        values = train[name].drop_nulls().cast(pl.Float64).to_numpy()
        mean, std = (values.mean(), values.std()) if len(values) else (0.0, 0.0)
        if std <= 1e-9 * max(1.0, abs(mean)):
            std = 0.0
        has_missing = len(values) < train.height
        statistics = {"mean": mean, "std": std, "missing": has_missing}
        for key, expected in statistics.items():
            check_number(f"{key} of {name}", getattr(number, key), expected, std, rule)
    for category in custom.categories:
        if not category.buckets:
            check_category(category.name, list(category.values), train, rule)


def check_category(
    name: str, listed: list[str], train: pl.DataFrame, rule: Rule
) -> None:
    """Check that the manifest lists a category's values in training rows, sorted.

    Args:
        name: Column of the category.
        listed: Values in the manifest.
        train: Training rows.
        rule: Rule that rows and violations are added to.
    """
    rule.rows += 1
    values = train[name].drop_nulls().unique().sort().to_list()
    if listed != values:
        differing = sorted(set(values) ^ set(listed))[:MAX_EXAMPLES]
        rule.add_violation(
            f"values of {name}: {len(listed):,} in the manifest, {len(values):,} in "
            f"training rows; only one of them has {differing}"
        )
