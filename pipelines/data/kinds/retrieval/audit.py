"""Rules on the tables of a retrieval log: behaviours, histories, and requests that ask for one behaviour each."""

from __future__ import annotations

import polars as pl

from pipelines.data.audit import sequences as shared
from pipelines.data.audit.base import REQUEST, Rule, Tables

COLUMNS = {"sequences": ("requests",)}
WITHOUT = ("requests", "tasks", "queries", "features", "windows")


def check_retrieval_tables(tables: Tables, rules: dict[str, Rule], core_users: pl.DataFrame) -> pl.DataFrame:
    """Rules on rows of `sequences`. Returns the users that must be there (`user_id`)."""
    every = shared.request_rows(tables.sequences)
    in_split = shared.check_splits(tables, every, rules["splits"])
    users = shared.check_lengths(tables.sequences, rules["behaviours"])
    requests = every.join(users.select("row"), on="row", how="semi")
    behaviours = shared.behaviour_rows(users)
    expected = shared.expected_behaviours(tables, tables.users_events)
    shared.check_behaviours(users, behaviours, expected, rules["behaviours"])
    shared.check_known(tables, requests, expected, rules["known"])
    if tables.known != "timestamp_ms":  # requests are in the order of their times
        place = pl.int_range(pl.len(), dtype=pl.Int32).over("row")
        behaviours = expected.sort("row", *tables.event_order).with_columns(place=place)
    shared.check_history(tables, behaviours, requests, rules["history"], tables.order_of_log)
    check_targets(behaviours, requests, tables.catalogue.height, rules["targets"])
    stated = {name: count for name, count in shared.truncated(tables).items() if name in tables.info}
    shared.check_counts(tables, {**stated, "requests": in_split}, rules["counts"])
    return core_users


def check_targets(behaviours: pl.DataFrame, requests: pl.DataFrame, items: int, rule: Rule) -> None:
    """Each request asks for its behaviour, an item of the catalogue."""
    rule.rows += requests.height
    target = pl.col("candidates").list.first()
    known = (pl.col("candidates").list.len() == 1) & target.is_between(0, items - 1)
    rule.broken_rows(
        requests.filter(~known.fill_null(False)),
        REQUEST + ": candidates {candidates} of a catalogue of {items} items",
        items=items,
    )
    asked = pl.col("query") if "query" in behaviours.columns else pl.lit(None, pl.String)
    targets = behaviours.select("row", "place", "user_id", "item_index", time="timestamp_ms", asked=asked)
    both = requests.join(targets, on=["row", "place"], how="full", coalesce=True, suffix="_behaviours")
    right = (
        (target == pl.col("item_index"))
        & (pl.col("timestamp_ms") == pl.col("time"))
        & pl.col("query").eq_missing(pl.col("asked"))
    )
    wrong = both.filter(known.fill_null(True) & ~right.fill_null(False)).sort("row", "place")
    rule.broken_rows(
        wrong.with_columns(user_id=pl.coalesce("user_id", "user_id_behaviours")),
        REQUEST + ": asks for {candidates} at {timestamp_ms}, behaviour {place} is item {item_index} at {time}",
    )
