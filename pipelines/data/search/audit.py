"""Rules on the tables of a search log: requests with what they showed, and features that see the past only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl

from pipelines.data.audit import sequences as shared
from pipelines.data.audit.base import (
    DAY,
    MINUTE,
    REQUEST,
    Rule,
    Tables,
    before,
    counts_in,
)

HOUR = 3_600_000
KEYS = {"pair": ["item_id", "query"], "item": ["item_id"], "query": ["query"]}


def check_search_tables(tables: Tables, rules: dict[str, Rule]) -> pl.DataFrame:
    """Rules on rows of `sequences`. Returns the users that must be there (`user_id`)."""
    info, own = tables.info, shared.own_columns(tables.info)
    queries = read_queries(tables)
    check_queries(tables, queries, rules["queries"])
    every = shared.request_rows(tables.sequences)
    in_split = shared.check_splits(tables, every, rules["splits"])
    users = shared.check_lengths(tables.sequences, rules["behaviours"])
    behaviours, requests = (
        shared.behaviour_rows(users),
        every.join(users.select("row"), on="row", how="semi"),
    )

    log = asked(tables.events.drop("part")).join(
        queries, on="query", how="left", maintain_order="left"
    )
    log = shared.with_as_of(
        tables, log.with_columns(pl.col("query_index").fill_null(-1)), "asked"
    )
    mine = log.join(
        tables.sequences.select("user_id", "row"), on="user_id", maintain_order="left"
    )
    expected = shared.expected_behaviours(tables, mine)
    shared.check_behaviours(
        users.drop("features"), behaviours, expected, rules["behaviours"]
    )
    labels = [f"label_{name}" for name in info["labels"]]
    logged = expected_requests(shown(tables, mine), [*labels, *own])
    columns = ["timestamp_ms", "query_index", "candidates", "positions", *labels]
    known = logged.with_columns(pl.col(labels).list.eval(pl.element().fill_null(False)))
    shared.compare(requests, known, columns, "request", rules["targets"])
    shared.check_history(tables, behaviours, requests, rules["history"])
    if own:
        shared.compare(requests, logged, own, "request", rules["features"])
        fits = pl.all_horizontal(
            pl.col(name).list.len() == pl.col("candidates").list.len() for name in own
        )
        train = every.filter(fits.fill_null(False) & (pl.col("split") == "train"))
        shared.check_training(
            info,
            train.filter(pl.col("candidates").list.len() > 0).select(own).explode(own),
            rules["features"],
        )
    shared.check_as_of(tables, rules["features"])
    of_request = expected.select("row", "place", "asked")
    seen = behaviours.join(
        of_request, on=["row", "place"], how="left", maintain_order="left"
    )
    check_features(tables, log, every, seen, rules["windows"])

    clicked = pl.col(labels[0]).list
    by_split = {
        "requests": in_split,
        "candidates": shared.per_split(
            every.select("split", "candidates").explode("candidates").drop_nulls()
        ),
        "requests_one_class": shared.per_split(
            every.filter(clicked.any() == clicked.all())
        ),
    }
    shared.check_counts(
        tables, {"queries": queries.height, **by_split}, rules["counts"]
    )
    return shown(tables, log).select("user_id").unique()


def read_queries(tables: Tables) -> pl.DataFrame:
    """`query_index` and `query` of all queries."""
    if not tables.manifests["queries"].files:
        return pl.DataFrame(schema={"query_index": pl.Int32, "query": pl.String})
    return tables.read("queries").drop("part")


def check_queries(tables: Tables, queries: pl.DataFrame, rule: Rule) -> None:
    """The queries are those of events, and `query_index` is dense in their order."""
    rule.rows = queries.height
    right = (
        tables.events.select("query")
        .drop_nulls()
        .unique()
        .sort("query")
        .with_row_index("right")
    )
    both = queries.with_row_index("at").join(
        right, on="query", how="full", coalesce=True
    )
    wrong = both.filter(
        pl.any_horizontal(
            pl.col(name).ne_missing(pl.col("right")) for name in ("query_index", "at")
        )
    )
    rule.broken_rows(
        wrong.sort("query"),
        "query '{query}': index {query_index} in row {at}, events give {right}",
    )


def asked(events: pl.DataFrame) -> pl.DataFrame:
    """`events` with their request: `alone`, the time where the log gives no request id, and `asked`, its earliest."""
    return events.with_columns(
        alone=pl.when(pl.col("request_id") == "")
        .then(pl.col("timestamp_ms"))
        .otherwise(0)
    ).with_columns(
        asked=pl.col("timestamp_ms").min().over("user_id", "request_id", "alone")
    )


def shown(tables: Tables, events: pl.DataFrame) -> pl.DataFrame:
    """The results that sequences show: of items of the catalogue and, of a user with more behaviours than are kept,
    of requests not older than the first kept one. `events` are those of `asked`."""
    inside = events.join(tables.catalogue, on="item_id", maintain_order="left")
    known = (
        tables.behaviours_of(inside)
        .group_by("user_id")
        .agg(known=pl.col(tables.known).sort(descending=True))
    )
    cut = known.filter(pl.col("known").list.len() > tables.info["max_events"])
    oldest = cut.select(
        "user_id",
        oldest=pl.col("known").list.get(
            tables.info["max_events"] - 1, null_on_oob=True
        ),
    )
    both = inside.join(oldest, on="user_id", how="left", maintain_order="left")
    return both.filter((pl.col("asked") >= pl.col("oldest")).fill_null(True))


def expected_requests(results: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """The requests that results (with `row`) give, one row each, with lists of these columns."""
    return (
        results.sort(
            "row", "position", "timestamp_ms", "item_id", maintain_order=True
        )  # others as the log has them
        .group_by(
            "row",
            "user_id",
            "asked",
            "request_id",
            "alone",
            "query_index",
            maintain_order=True,
        )
        .agg(pl.col(columns), candidates="item_index", positions="position")
        .rename({"asked": "timestamp_ms"})
        .sort("row", "timestamp_ms", "request_id", "query_index")
        .with_columns(place=pl.int_range(pl.len(), dtype=pl.Int32).over("row"))
    )


def check_features(
    tables: Tables,
    log: pl.DataFrame,
    requests: pl.DataFrame,
    behaviours: pl.DataFrame,
    rule: Rule,
) -> None:
    """Recomputes every feature of every candidate and behaviour from events, as of the time of their request.

    log: events of `asked`; behaviours: with the time of their request, `asked`.
    """
    features, results = tables.info["features"], pl.col("candidates").list.len()
    fits = (pl.col("features").list.len() == results * len(features)) & (
        pl.col("positions").list.len() == results
    )
    unfit = requests.filter(~fits.fill_null(False))
    rule.broken_rows(unfit, REQUEST + ": features of other length than candidates")
    requests = requests.filter(fits.fill_null(False) & (results > 0))
    columns = ["user_id", "item_index", "query_index", "position", "timestamp_ms"]
    candidates = requests.rename({"candidates": "item_index", "positions": "position"})
    candidates = candidates.select(columns).explode("item_index", "position")
    engaged = behaviours.with_columns(
        timestamp_ms=pl.coalesce("asked", "timestamp_ms")
    ).select(columns)
    points = pl.concat([candidates, engaged]).with_columns(at="timestamp_ms")
    points = points.join(
        tables.catalogue, on="item_index", how="left", maintain_order="left"
    )
    points = points.join(
        read_queries(tables), on="query_index", how="left", maintain_order="left"
    )
    values = [
        frame["features"].cast(pl.List(pl.Float64)).explode().to_numpy()
        for frame in (requests, behaviours)
    ]
    table = np.concatenate(values).reshape(points.height, len(features))
    rule.rows += points.height
    shared.check_columns(
        points, table, features, expected_features(tables, log, points), "feature", rule
    )


def expected_features(
    tables: Tables, log: pl.DataFrame, points: pl.DataFrame
) -> dict[str, np.ndarray]:
    """Every feature by name, (points,) each."""
    info, settings = tables.info, tables.info["search"]
    position = points["position"].to_numpy().clip(0)
    found: dict[str, Any] = {
        "position": np.log1p(position),
        "page": np.log1p(position // settings["page_size"]),
    }
    time = points["at"].to_numpy()
    for name, share in {
        "hour": time % DAY // HOUR / 24,
        "weekday": (time // DAY + 3) % 7 / 7,
    }.items():
        found |= {
            f"{name}_sin": np.sin(2 * math.pi * share),
            f"{name}_cos": np.cos(2 * math.pi * share),
        }
    delay, strength = (
        round(settings["delay_minutes"] * MINUTE),
        settings["ctr_strength"],
    )
    search = (
        pl.struct("user_id", "request_id", "alone", "query")
        .is_first_distinct()
        .cast(pl.Int64)
    )
    one, none, columns = (
        pl.lit(1, pl.Int64),
        pl.lit(0, pl.Int64),
        ["item_id", "query", "timestamp_ms"],
    )
    shown = log.select(*columns, exposures=one, clicks=none, searches=search)
    clicked = log.filter(
        pl.col(f"label_{info['labels'][0]}").fill_null(False)
    ).with_columns(timestamp_ms=tables.known)
    counted = pl.concat(
        [shown, clicked.select(*columns, exposures=none, clicks=one, searches=none)]
    )
    for kind, keys in KEYS.items() if info["windows"] else ():
        of_key = counted.select(
            *keys, "timestamp_ms", "exposures", "clicks", "searches"
        )
        for name, count in counts_in(
            points, of_key, keys, settings["windows_days"], settings["delay_minutes"]
        ):
            found |= {
                f"{kind}_{what}_{name}": np.log1p(count[what].to_numpy())
                for what in count.columns
            }
            rate = (count["clicks"] + settings["ctr_prior"] * strength) / (
                count["exposures"] + strength
            )
            found[f"{kind}_ctr_{name}"] = rate.to_numpy()
    if info["windows"]:
        along = log.select(
            *KEYS["pair"], time="timestamp_ms", last="timestamp_ms"
        ).drop_nulls()
        last = before(points, along, KEYS["pair"], delay, "time")["last"]
        found["pair_seen"] = last.is_not_null().to_numpy()
        found["pair_gap"] = np.log1p(
            ((points["at"] - last) / HOUR).fill_null(0).to_numpy()
        )
    return found
