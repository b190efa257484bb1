"""Rules on the tables of a retrieval log: behaviours, histories, and requests that ask for one behaviour each."""

from __future__ import annotations

import polars as pl

from pipelines.data.audit.base import BEHAVIOURS, EVENTS, ITEMS, SPLITS, Rule, name_request
from pipelines.data.audit.sequences import (
    Sequences,
    behaviour_rows,
    check_behaviours,
    check_counts,
    check_history,
    check_known,
    check_lengths,
    check_splits,
    count_cut,
    expected_behaviours,
    note_cut,
    note_splits,
    request_rows,
)

REQUESTS = (
    "list<item: struct<timestamp_ms: int64, query: string, history_end: int32, split: string, "
    "candidates: list<item: int32>>>"
)
REQUIRED = {"events": EVENTS, "items": ITEMS, "sequences": {**BEHAVIOURS, "requests": REQUESTS}}
WITHOUT = ("requests", "tasks", "queries", "features", "windows")


def check_retrieval_tables(sequences: Sequences) -> pl.DataFrame:
    """Rules on rows of `sequences`. Returns the users that events give (`user`)."""
    tables, items, rules, cut = sequences.tables, sequences.items, sequences.rules, sequences.cut
    tied = 0
    in_split = dict.fromkeys(SPLITS, 0)
    bare = dict.fromkeys(SPLITS, 0)  # requests without a history
    for users, mine in sequences.parts():
        requests = request_rows(users)
        check_splits(tables, requests, rules["splits"])
        for split, count in requests["split"].value_counts().iter_rows():
            in_split[split] = in_split.get(split, 0) + count
        for split, count in requests.filter(pl.col("history_end") == 0)["split"].value_counts().iter_rows():
            bare[split] = bare.get(split, 0) + count
        users = check_lengths(users, rules["behaviours"])
        requests = requests.join(users.select("row"), on="row", how="semi")
        behaviours = behaviour_rows(users)
        if mine is not None:
            count_cut(tables, mine, items, cut)
            expected = expected_behaviours(tables, mine, items)
            check_behaviours(tables, users, behaviours, expected, rules["behaviours"])
            check_known(tables, requests, expected, rules["known"])
            if tables.known != "timestamp_ms":  # requests are in the order of their times
                place = pl.int_range(pl.len(), dtype=pl.Int32).over("row")
                behaviours = expected.sort("row", *tables.event_order).with_columns(place=place)
        tied += check_history(tables, behaviours, requests, rules["history"], tables.order_of_log)
        check_targets(behaviours, requests, items.height, rules["targets"])
    if tables.order_of_log:
        note = f"ties: log_order; {tied:,} requests have a behaviour of their own time in their history"
        rules["history"].remark(note)
    elif sum(bare.values()) - sequences.held["users"] > 0.1 * sum(
        in_split.values()
    ):  # each user's first has none, ties or not
        rules["history"].remark(
            f"ties: strict; {bare['train']:,} of {in_split['train']:,} train requests have no history, as their user's "
            f"earlier behaviours are of the same time"
        )
    elif bare["train"] > 0.5 * in_split["train"]:
        rules["history"].remark(f"{bare['train']:,} of {in_split['train']:,} train requests have no history")
    note_cut(tables, cut, rules["behaviours"])
    note_splits({f"{name} requests": in_split[name] for name in SPLITS}, rules["splits"])
    left = sequences.held["interactions"] + cut["truncated_events"]
    if tables.behaviour is None and (tables.items.info.get("core") or 0) > 1 and left < 0.5 * tables.events.rows:
        rules["catalogue"].remark(f"the k-core keeps {left:,} of {tables.events.rows:,} behaviours")
    stated = {name: count for name, count in cut.items() if name in tables.sequences.info}
    in_splits = {f"requests.{name}": n for name, n in in_split.items()}
    check_counts(sequences, {**stated, **in_splits})
    return sequences.core_users


def check_targets(behaviours: pl.DataFrame, requests: pl.DataFrame, items: int, rule: Rule) -> None:
    """Each request asks for its behaviour, an item of the catalogue."""
    rule.rows += requests.height
    inside = pl.col("candidates").list.eval((pl.element() >= 0) & (pl.element() < items)).list.all()
    known = (
        inside
        & (pl.col("candidates").list.len() > 0)
        & (pl.col("candidates").list.eval(pl.element().is_null()).list.any().not_())
    )
    outside = requests.filter(~known.fill_null(False))
    rule.broken_rows(
        outside, lambda row: f"{name_request(row)}: candidates {row['candidates']} of a catalogue of {items} items"
    )
    query = (
        [pl.col("query").alias("asked")] if "query" in behaviours.columns else [pl.lit(None, pl.String).alias("asked")]
    )
    targets = behaviours.select("row", "place", "user_id", "item_index", pl.col("timestamp_ms").alias("time"), *query)
    both = requests.join(outside.select("row", "place"), on=["row", "place"], how="anti").join(
        targets, on=["row", "place"], how="full", coalesce=True, suffix="_behaviours"
    )
    both = both.join(outside.select("row", "place"), on=["row", "place"], how="anti")
    right = (
        (pl.col("candidates").list.len() == 1)
        & (pl.col("candidates").list.first() == pl.col("item_index"))
        & (pl.col("timestamp_ms") == pl.col("time"))
        & pl.col("query").eq_missing(pl.col("asked"))
    )
    rule.broken_rows(
        both.filter(~right.fill_null(False))
        .with_columns(user_id=pl.coalesce("user_id", "user_id_behaviours"))
        .sort("row", "place"),
        lambda row: (
            f"{name_request(row)}: asks for {row['candidates']} at {row['timestamp_ms']}, "
            f"behaviour {row['place']} is item {row['item_index']} at {row['time']}"
        ),
    )
