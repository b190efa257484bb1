"""Audit rules for the tables of a retrieval log, whose behaviours are the requests."""

from __future__ import annotations

import polars as pl

from pipelines.prepare.audit.base import Rule, Tables
from pipelines.prepare.audit.sequences import (
    INDEX,
    check_behaviours,
    check_counts,
    check_history,
    compare_rows,
    expected_behaviours,
    unfold,
)


def check_retrieval_tables(tables: Tables, rules: dict[str, Rule]) -> pl.DataFrame:
    """Check behaviours, histories, targets, splits and counts of `sequences`."""
    rows = unfold(tables, rules)
    expected = expected_behaviours(tables, tables.users_events)
    check_behaviours(rows.users, rows.behaviours, expected, rules["behaviours"])
    behaviours = rows.behaviours
    baskets = tables.info.baskets
    if baskets or tables.known_time_column != "timestamp_ms":
        # behaviours are sorted by the time at which they are known, requests by time
        behaviours = expected.sort("row", *tables.event_order).with_columns(INDEX)
    check_history(tables, behaviours, rows.requests, rules["history"])
    targets = behaviours.with_columns(candidates=pl.concat_list("item_index"))
    if baskets:
        key = "timestamp_ms" if baskets == "equal_times" else "request_id"
        time, split = pl.col("timestamp_ms"), tables.info.split
        is_later = (time >= split.val_start_ms, time >= split.test_start_ms)
        targets = (
            behaviours.with_columns(window=pl.sum_horizontal(is_later))
            .group_by("row", key, "window", maintain_order=True)
            .agg(
                pl.first("user_id", "query"),
                pl.col("timestamp_ms").min().alias("time"),
                pl.col("item_index").unique(maintain_order=True).alias("candidates"),
            )
            .with_columns(INDEX, timestamp_ms="time")
        )
    columns = ["timestamp_ms", "query", "candidates"]
    compare_rows(rows.requests, targets, columns, "request", rules["targets"])
    # users with more than `max_events` behaviours, and dropped behaviours
    kept = tables.filter_behaviours(tables.users_events)
    kept = kept.join(tables.catalogue, on="item_id", how="semi")
    lengths = kept.group_by("row").len()["len"].cast(pl.Int64)
    excess = lengths - tables.info.max_events
    counts: dict[str, int | dict[str, int]] = {
        "requests": rows.per_split,
        "truncated_users": int((excess > 0).sum()),
        "truncated_events": int(excess.clip(0).sum()),
    }
    check_counts(tables, counts, rules["counts"])
    return tables.core_events.select("user_id").unique()
