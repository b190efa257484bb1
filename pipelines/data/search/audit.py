"""Rules on the tables of a search log: requests with their results, and features that see the past only."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from pipelines.data.audit.base import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    REQUEST,
    Rule,
    Tables,
    latest_before,
    window_sums,
)
from pipelines.data.audit.sequences import (
    PLACE,
    check_as_of,
    check_behaviours,
    check_counts,
    check_history,
    check_training,
    check_values,
    compare_rows,
    count_per_split,
    expected_behaviours,
    join_as_of,
    own_columns,
    unfold,
)

KEYS = {"pair": ["item_id", "query"], "item": ["item_id"], "query": ["query"]}
"""Columns of events that counts are by, by kind of key."""

REQUEST_KEYS = ["user_id", "request_id", "alone"]
"""Columns in which the events of one search are equal; `alone` is of
`add_request_times`."""


def check_search_tables(tables: Tables, rules: dict[str, Rule]) -> pl.DataFrame:
    """Check the rows of `sequences`. Return the users that must be in them (`user_id`)."""
    queries = read_queries(tables)
    check_queries(tables, queries, rules["queries"])
    rows = unfold(tables, rules)
    log = read_log(tables, queries)
    users_log = tables.with_user_rows(log)
    expected = expected_behaviours(tables, users_log)
    check_behaviours(
        rows.users.drop("features"), rows.behaviours, expected, rules["behaviours"]
    )
    check_requests(tables, users_log, rows.requests, rules)
    check_history(tables, rows.behaviours, rows.requests, rules["history"])
    check_training_values(tables, rows.all_requests, rules["features"])
    check_as_of(tables, rules["features"])
    request_times = expected.select("row", "place", "asked")
    behaviours = rows.behaviours.join(
        request_times, on=["row", "place"], how="left", maintain_order="left"
    )
    check_features(tables, log, rows.all_requests, behaviours, rules["windows"])
    counts = count_requests(tables, rows.all_requests)
    counts |= {"requests": rows.per_split, "queries": queries.height}
    check_counts(tables, counts, rules["counts"])
    return filter_shown(tables, log).select("user_id").unique()


def read_queries(tables: Tables) -> pl.DataFrame:
    """Return `query_index` and `query` of all queries."""
    if not tables.manifests["queries"].files:
        return pl.DataFrame(schema={"query_index": pl.Int32, "query": pl.String})
    return tables.read("queries").drop("part")


def check_queries(tables: Tables, queries: pl.DataFrame, rule: Rule) -> None:
    """Check that the table holds the queries of events, with a dense `query_index` in their order."""
    rule.rows = queries.height
    expected = tables.events.select("query").drop_nulls().unique().sort("query")
    both = queries.with_row_index("at").join(
        expected.with_row_index("right"), on="query", how="full", coalesce=True
    )
    is_wrong = pl.any_horizontal(
        pl.col(name).ne_missing(pl.col("right")) for name in ("query_index", "at")
    )
    rule.add_rows(
        both.filter(is_wrong).sort("query"),
        "query '{query}': index {query_index} in row {at}, events give {right}",
    )


def read_log(tables: Tables, queries: pl.DataFrame) -> pl.DataFrame:
    """Return the events with their `query_index`, request time and joined features."""
    log = add_request_times(tables.events.drop("part"))
    log = log.join(queries, on="query", how="left", maintain_order="left")
    log = log.with_columns(pl.col("query_index").fill_null(-1))
    return join_as_of(tables, log, "asked")


def add_request_times(events: pl.DataFrame) -> pl.DataFrame:
    """Return the events with the time of their request, `asked`: that of its earliest event.

    `alone` is the event's time if the log gives no request id, else 0.
    """
    alone = pl.when(pl.col("request_id") == "").then(pl.col("timestamp_ms"))
    events = events.with_columns(alone=alone.otherwise(0))
    return events.with_columns(asked=pl.col("timestamp_ms").min().over(REQUEST_KEYS))


def filter_shown(tables: Tables, log: pl.DataFrame) -> pl.DataFrame:
    """Return the results that sequences show.

    They are items of the catalogue and, for a user with more than `max_events`
    behaviours, in requests that are not older than the first behaviour that is left.
    """
    inside = log.join(tables.catalogue, on="item_id", maintain_order="left")
    known = pl.col(tables.known).sort(descending=True)
    per_user = tables.filter_behaviours(inside).group_by("user_id").agg(known=known)
    most = tables.info["max_events"]
    truncated = per_user.filter(pl.col("known").list.len() > most)
    oldest = pl.col("known").list.get(most - 1, null_on_oob=True)
    inside = inside.join(
        truncated.select("user_id", oldest=oldest),
        on="user_id",
        how="left",
        maintain_order="left",
    )
    is_shown = pl.col("asked") >= pl.col("oldest")
    return inside.filter(is_shown.fill_null(True))


def check_requests(
    tables: Tables,
    users_log: pl.DataFrame,
    requests: pl.DataFrame,
    rules: dict[str, Rule],
) -> None:
    """Check the results and labels of requests (rule `targets`), and their custom features (rule `features`)."""
    own = own_columns(tables.info)
    labels = [f"label_{name}" for name in tables.info["labels"]]
    shown = filter_shown(tables, users_log)
    expected = expected_requests(shown, [*labels, *own])
    if own:
        compare_rows(requests, expected, own, "request", rules["features"])
    no_label = pl.col(labels).list.eval(pl.element().fill_null(False))
    expected = expected.with_columns(no_label)
    columns = ["timestamp_ms", "query_index", "candidates", "positions", *labels]
    compare_rows(requests, expected, columns, "request", rules["targets"])


def expected_requests(results: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """Return the requests that results (with `row`) give, one row each, with lists of these columns."""
    # Results that are equal in all keys are in the order of the log.
    results = results.sort(
        "row", "position", "timestamp_ms", "item_id", maintain_order=True
    )
    keys = ["row", "asked", *REQUEST_KEYS, "query_index"]
    requests = results.group_by(keys, maintain_order=True).agg(
        pl.col(columns), candidates="item_index", positions="position"
    )
    requests = requests.rename({"asked": "timestamp_ms"})
    order = ["row", "timestamp_ms", "request_id", "query_index"]
    return requests.sort(order).with_columns(PLACE)


def check_training_values(tables: Tables, requests: pl.DataFrame, rule: Rule) -> None:
    """Check the manifest's statistics of custom features against the candidates of training requests."""
    own = own_columns(tables.info)
    if not own:
        return
    candidates = pl.col("candidates").list.len()
    fits = pl.all_horizontal(pl.col(name).list.len() == candidates for name in own)
    is_train = pl.col("split") == "train"
    train = requests.filter(fits.fill_null(False) & is_train & (candidates > 0))
    check_training(tables.info, train.select(own).explode(own), rule)


def count_requests(
    tables: Tables, requests: pl.DataFrame
) -> dict[str, int | dict[str, int]]:
    """Count candidates and requests of one class by split."""
    clicked = pl.col(f"label_{tables.info['labels'][0]}").list
    candidates = requests.select("split", "candidates").explode("candidates")
    one_class = requests.filter(clicked.any() == clicked.all())
    return {
        "candidates": count_per_split(candidates.drop_nulls()),
        "requests_one_class": count_per_split(one_class),
    }


# Features.


def check_features(
    tables: Tables,
    log: pl.DataFrame,
    requests: pl.DataFrame,
    behaviours: pl.DataFrame,
    rule: Rule,
) -> None:
    """Recompute every feature of every candidate and behaviour from events, as of the time of their request.

    Args:
        tables: The tables.
        log: Events of `read_log`.
        requests: Requests of all users.
        behaviours: Behaviours with the time of their request, `asked`.
        rule: Takes the violations.
    """
    names, results = tables.info["features"], pl.col("candidates").list.len()
    fits = pl.col("features").list.len() == results * len(names)
    fits &= pl.col("positions").list.len() == results
    fits = fits.fill_null(False)
    rule.add_rows(
        requests.filter(~fits), REQUEST + ": features of other length than candidates"
    )
    requests = requests.filter(fits & (results > 0))
    points = feature_points(tables, requests, behaviours)
    flat = [
        frame["features"].cast(pl.List(pl.Float64)).explode().to_numpy()
        for frame in (requests, behaviours)
    ]
    values = np.concatenate(flat).reshape(points.height, len(names))
    rule.rows += points.height
    expected = expected_features(tables, log, points)
    check_values(points, values, names, expected, "feature", rule)


def feature_points(
    tables: Tables, requests: pl.DataFrame, behaviours: pl.DataFrame
) -> pl.DataFrame:
    """Return the candidates and behaviours with features, one row each, with the time `at` of their request."""
    columns = ["user_id", "item_index", "query_index", "position", "timestamp_ms"]
    requests = requests.rename({"candidates": "item_index", "positions": "position"})
    candidates = requests.select(columns).explode("item_index", "position")
    request_time = pl.coalesce("asked", "timestamp_ms")
    behaviours = behaviours.with_columns(timestamp_ms=request_time).select(columns)
    points = pl.concat([candidates, behaviours]).with_columns(at="timestamp_ms")
    points = points.join(
        tables.catalogue, on="item_index", how="left", maintain_order="left"
    )
    return points.join(
        read_queries(tables), on="query_index", how="left", maintain_order="left"
    )


def expected_features(
    tables: Tables, log: pl.DataFrame, points: pl.DataFrame
) -> dict[str, np.ndarray]:
    """Return every feature by name, (points,) each."""
    features = _context_features(tables, points)
    if tables.info["windows"]:
        features |= _count_features(tables, log, points)
        features |= _gap_features(tables, log, points)
    return features


def _context_features(tables: Tables, points: pl.DataFrame) -> dict[str, np.ndarray]:
    """Return the features of position and time."""
    position = points["position"].to_numpy().clip(0)
    page = position // tables.info["search"]["page_size"]
    time = points["at"].to_numpy()
    hour = time % DAY_MS // HOUR_MS / 24
    weekday = (time // DAY_MS + 3) % 7 / 7  # 1 January 1970 was a Thursday
    return {
        "position": np.log1p(position),
        "page": np.log1p(page),
        "hour_sin": np.sin(2 * math.pi * hour),
        "hour_cos": np.cos(2 * math.pi * hour),
        "weekday_sin": np.sin(2 * math.pi * weekday),
        "weekday_cos": np.cos(2 * math.pi * weekday),
    }


def _count_features(
    tables: Tables, log: pl.DataFrame, points: pl.DataFrame
) -> dict[str, np.ndarray]:
    """Return the windowed counts and click-through rates by item, query and pair."""
    info, settings = tables.info, tables.info["search"]
    prior, strength = settings["ctr_prior"], settings["ctr_strength"]
    one, zero = pl.lit(1, pl.Int64), pl.lit(0, pl.Int64)
    columns = ["item_id", "query", "timestamp_ms"]
    is_first = pl.struct(*REQUEST_KEYS, "query").is_first_distinct().cast(pl.Int64)
    shown = log.select(*columns, exposures=one, clicks=zero, searches=is_first)
    is_clicked = pl.col(f"label_{info['labels'][0]}").fill_null(False)
    clicked = log.filter(is_clicked).with_columns(timestamp_ms=tables.known)
    clicked = clicked.select(*columns, exposures=zero, clicks=one, searches=zero)
    counted = pl.concat([shown, clicked])
    features = {}
    for kind, keys in KEYS.items():
        rows = counted.select(*keys, "timestamp_ms", "exposures", "clicks", "searches")
        for window, sums in window_sums(
            points, rows, keys, settings["windows_days"], settings["delay_minutes"]
        ):
            for name in sums.columns:
                features[f"{kind}_{name}_{window}"] = np.log1p(sums[name].to_numpy())
            rate = (sums["clicks"] + prior * strength) / (sums["exposures"] + strength)
            features[f"{kind}_ctr_{window}"] = rate.to_numpy()
    return features


def _gap_features(
    tables: Tables, log: pl.DataFrame, points: pl.DataFrame
) -> dict[str, np.ndarray]:
    """Return the features of the last time that the pair was shown."""
    delay = round(tables.info["search"]["delay_minutes"] * MINUTE_MS)
    pairs = log.select(*KEYS["pair"], time="timestamp_ms", last="timestamp_ms")
    last = latest_before(points, pairs.drop_nulls(), KEYS["pair"], delay, "time")[
        "last"
    ]
    hours = ((points["at"] - last) / HOUR_MS).fill_null(0)
    return {
        "pair_seen": last.is_not_null().to_numpy(),
        "pair_gap": np.log1p(hours.to_numpy()),
    }
