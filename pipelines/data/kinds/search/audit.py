"""Rules on the tables of a search log: requests with what they showed, and features that see the past only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl

from pipelines.data.audit import sequences as shared
from pipelines.data.audit.base import DAY, MINUTE, REQUEST, Rule, Tables, sums_before
from pipelines.data.audit.own_features import check_as_of, check_training, own_columns, with_as_of

HOUR = 3_600_000
KEYS = {"pair": ["item_id", "query"], "item": ["item_id"], "query": ["query"]}
COLUMNS = {
    "queries": ("query_index", "query"),
    "sequences": ("query_index", "position", "features", "requests"),
}
WITHOUT = ("tasks",)


def check_search_tables(tables: Tables, rules: dict[str, Rule], core_users: pl.DataFrame) -> pl.DataFrame:
    """Rules on rows of `sequences`. Returns the users that must be there (`user_id`)."""
    info, own = tables.info, own_columns(tables.info)
    queries = check_queries(tables, rules["queries"])
    every = shared.request_rows(tables.sequences)
    in_split = shared.check_splits(tables, every, rules["splits"])
    users = shared.check_lengths(tables.sequences, rules["behaviours"])
    behaviours, requests = shared.behaviour_rows(users), every.join(users.select("row"), on="row", how="semi")

    log = asked(tables.events.drop("part")).join(queries, on="query", how="left", maintain_order="left")
    log = with_as_of(tables, log.with_columns(pl.col("query_index").fill_null(-1)), "asked")
    mine = log.join(tables.sequences.select("user_id", "row"), on="user_id", maintain_order="left")
    expected = shared.expected_behaviours(tables, mine)
    shared.check_behaviours(users.drop("features"), behaviours, expected, rules["behaviours"])
    labels = [f"label_{name}" for name in info["labels"]]
    logged = expected_requests(shown(tables, mine), [*labels, *own])
    columns = ["timestamp_ms", "query_index", "candidates", "positions", *labels]
    known = logged.with_columns(pl.col(labels).list.eval(pl.element().fill_null(False)))
    shared.compare(requests, known, columns, "request", rules["targets"])
    shared.check_known(tables, requests, expected, rules["known"])
    check_own(requests, logged, expected, rules["requests"])
    shared.check_history(tables, behaviours, requests, rules["history"])
    if own:
        shared.compare(requests, logged, own, "request", rules["features"])
        fits = pl.all_horizontal(pl.col(name).list.len() == pl.col("candidates").list.len() for name in own)
        train = every.filter(fits.fill_null(False) & (pl.col("split") == "train"))
        check_training(
            info, train.filter(pl.col("candidates").list.len() > 0).select(own).explode(own), rules["features"]
        )
    check_as_of(tables, rules["features"])
    of_request = expected.select("row", "place", "asked")
    seen = behaviours.join(of_request, on=["row", "place"], how="left", maintain_order="left")
    check_features(tables, log, (every, seen), queries, rules["windows"])

    clicked = pl.col(labels[0]).list
    by_split = {
        "requests": in_split,
        "candidates": shared.per_split(every.select("split", "candidates").explode("candidates").drop_nulls()),
        "requests_one_class": shared.per_split(every.filter(clicked.any() == clicked.all())),
    }
    shared.check_counts(tables, {"queries": queries.height, **by_split}, rules["counts"])
    return shown(tables, log).select("user_id").unique()


def check_queries(tables: Tables, rule: Rule) -> pl.DataFrame:
    """`query_index` and `query` of all queries, which are dense, sorted, and those of events."""
    none = not tables.manifests["queries"].files
    queries = pl.DataFrame(schema={"query_index": pl.Int32, "query": pl.String})
    queries = queries if none else tables.read("queries").drop("part")
    rule.rows += queries.height
    wrong = queries.with_columns(expected=pl.int_range(pl.len(), dtype=pl.Int32)).filter(
        pl.col("query_index").ne_missing(pl.col("expected"))
        | (pl.col("query") <= pl.col("query").shift(1)).fill_null(False)
    )
    rule.broken_rows(wrong, "query '{query}': index {query_index} in row {expected}")
    of_events = tables.events.select("query").drop_nulls().unique().sort("query")
    for one, two, said in (
        (of_events, queries, "in events, but not in queries"), (queries, of_events, "in queries, but not in events")
    ):  # fmt: skip
        rule.broken_rows(one.join(two, on="query", how="anti"), "query '{query}': {said}", said=said)
    return queries


def asked(events: pl.DataFrame) -> pl.DataFrame:
    """`events` with their request: `alone`, the time where the log gives no request id, and `asked`, its earliest."""
    return events.with_columns(
        alone=pl.when(pl.col("request_id") == "").then(pl.col("timestamp_ms")).otherwise(0)
    ).with_columns(asked=pl.col("timestamp_ms").min().over("user_id", "request_id", "alone"))


def shown(tables: Tables, events: pl.DataFrame) -> pl.DataFrame:
    """The results that sequences show: of items of the catalogue and, of a user with more behaviours than are kept,
    of requests not older than the first kept one. `events` are those of `asked`."""
    inside = events.join(tables.catalogue, on="item_id")
    known = tables.behaviours_of(inside).group_by("user_id").agg(known=pl.col(tables.known).sort(descending=True))
    cut = known.filter(pl.col("known").list.len() > tables.most)
    oldest = cut.select("user_id", oldest=pl.col("known").list.get(tables.most - 1, null_on_oob=True))
    both = inside.join(oldest, on="user_id", how="left")
    return both.filter((pl.col("asked") >= pl.col("oldest")).fill_null(True))


def expected_requests(results: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """The requests that results (with `row`) give, one row each, with lists of these columns."""
    return (
        results.sort("row", "position", "timestamp_ms", "item_id")
        .group_by("row", "user_id", "asked", "request_id", "alone", "query_index", maintain_order=True)
        .agg(pl.col(columns), candidates="item_index", positions="position")
        .rename({"asked": "timestamp_ms"})
        .sort("row", "timestamp_ms", "request_id", "query_index")
        .with_columns(place=pl.int_range(pl.len(), dtype=pl.Int32).over("row"))
    )


def check_own(requests: pl.DataFrame, logged: pl.DataFrame, behaviours: pl.DataFrame, rule: Rule) -> None:
    """Each request is one of those that are `logged`, and its history holds none of its own `behaviours`."""
    rule.rows += requests.height
    same, own = ["row", "timestamp_ms", "query_index"], ["row", "request_id", "alone"]
    several = pl.int_range(pl.len()).over(same)  # of one time and query, told apart by their order
    known = logged.sort("row", "place").select(*same, *own[1:], nth=several)
    found = requests.sort("row", "place").with_columns(nth=several).join(known, on=[*same, "nth"], how="left")
    rule.broken_rows(
        found.filter(pl.col("request_id").is_null()).sort("row", "place"),
        REQUEST + " at {timestamp_ms}: the log has no request of this time and query",
    )
    first = behaviours.group_by(own).agg(first=pl.col("place").min())
    inside = found.join(first, on=own).filter(pl.col("first") < pl.col("history_end")).sort("row", "place")
    rule.broken_rows(
        inside,
        REQUEST + " at {timestamp_ms}: behaviour {first} is of request "
        "'{request_id}' itself and in its history, which ends at {history_end}",
    )


def check_features(
    tables: Tables, log: pl.DataFrame, held: tuple[pl.DataFrame, pl.DataFrame], queries: pl.DataFrame, rule: Rule
) -> None:
    """Recomputes every feature of every candidate and behaviour from events, as of the time of their request.

    log: events of `asked`; held: requests, and behaviours with the time of their request, `asked`.
    """
    requests, behaviours = held
    features, results = tables.info["features"], pl.col("candidates").list.len()
    fits = (pl.col("features").list.len() == results * len(features)) & (pl.col("positions").list.len() == results)
    said = REQUEST + ": features of other length than candidates"
    rule.broken_rows(requests.filter(~fits.fill_null(False)), said)
    requests = requests.filter(fits.fill_null(False) & (results > 0))
    columns = ["user_id", "item_index", "query_index", "position", "timestamp_ms"]
    candidates = requests.rename({"candidates": "item_index", "positions": "position"})
    candidates = candidates.select(columns).explode("item_index", "position")
    engaged = behaviours.with_columns(timestamp_ms=pl.coalesce("asked", "timestamp_ms")).select(columns)
    points = pl.concat([candidates, engaged]).with_columns(at="timestamp_ms")
    points = points.join(tables.catalogue, on="item_index", how="left", maintain_order="left")
    points = points.join(queries, on="query_index", how="left", maintain_order="left")
    values = [frame["features"].cast(pl.List(pl.Float64)).explode().to_numpy() for frame in (requests, behaviours)]
    table = np.concatenate(values).reshape(points.height, len(features))
    rule.rows += points.height
    right = expected_features(tables, log, points)
    for column, name in enumerate(features):
        if name in right:
            shared.check_values(points, table[:, column], right[name], f"feature {name}", rule)
        else:
            rule.broken(f"{name}: a feature that the audit does not know", points.height)


def expected_features(tables: Tables, log: pl.DataFrame, points: pl.DataFrame) -> dict[str, np.ndarray]:
    """Every feature by name, (points,) each."""
    info, settings = tables.info, tables.info["search"]
    position = points["position"].to_numpy().clip(0)
    found: dict[str, Any] = {"position": np.log1p(position), "page": np.log1p(position // settings["page_size"])}
    time = points["at"].to_numpy()
    for name, share in {"hour": time % DAY // HOUR / 24, "weekday": (time // DAY + 3) % 7 / 7}.items():
        found |= {f"{name}_sin": np.sin(2 * math.pi * share), f"{name}_cos": np.cos(2 * math.pi * share)}
    delay, strength = round(settings["delay_minutes"] * MINUTE), settings["ctr_strength"]
    lengths = [round(days * DAY) for days in settings["windows_days"]]
    search = pl.struct("user_id", "request_id", "alone", "query").is_first_distinct()
    every = log.with_columns(exposures=pl.lit(1, pl.Int64), searches=search.cast(pl.Int64))
    label = pl.col(f"label_{info['labels'][0]}").fill_null(False)
    clicks = every.filter(label).with_columns(clicks=pl.lit(1, pl.Int64), timestamp_ms=pl.col(tables.known))
    for kind, keys in KEYS.items() if info["windows"] else ():
        exposed = ["exposures", "searches"] if kind == "query" else ["exposures"]

        def until(shift: int, keys: list[str] = keys, exposed: list[str] = exposed) -> pl.DataFrame:
            parts = [every.select(*keys, "timestamp_ms", *exposed), clicks.select(*keys, "timestamp_ms", "clicks")]
            return pl.concat(
                (sums_before(points, part, keys, "timestamp_ms", shift) for part in parts), how="horizontal"
            )

        before = until(delay)
        for name, length in zip(info["windows"], lengths, strict=True):
            count = before - until(length)
            found |= {f"{kind}_{what}_{name}": np.log1p(count[what].to_numpy()) for what in count.columns}
            rate = (count["clicks"] + settings["ctr_prior"] * strength) / (count["exposures"] + strength)
            found[f"{kind}_ctr_{name}"] = rate.to_numpy()
    if info["windows"]:
        moved = points.select(*KEYS["pair"], at=pl.col("at") - delay).with_row_index("point").sort("at")
        along = every.select(*KEYS["pair"], last="timestamp_ms").drop_nulls().sort("last")
        seen = moved.join_asof(
            along.with_columns(time="last"), left_on="at", right_on="time", by=KEYS["pair"],
            allow_exact_matches=False, check_sortedness=False,
        ).sort("point")  # fmt: skip
        found["pair_seen"] = seen["last"].is_not_null().to_numpy()
        found["pair_gap"] = np.log1p(((points["at"] - seen["last"]) / HOUR).fill_null(0).to_numpy())
    return found
