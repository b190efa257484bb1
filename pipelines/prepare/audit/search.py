"""Audit rules for the tables of a search log: requests, results and features."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from pipelines.prepare.audit.base import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    REQUEST,
    Rule,
    Tables,
    latest_before,
    window_features,
)
from pipelines.prepare.audit.sequences import (
    INDEX,
    check_as_of,
    check_behaviours,
    check_counts,
    check_custom_scales,
    check_history,
    check_values,
    compare_rows,
    count_per_split,
    expected_behaviours,
    join_as_of,
    unfold,
)

KEYS = {"pair": ["item_id", "query"], "item": ["item_id"], "query": ["query"]}
"""Columns of events that each kind of key consists of."""

REQUEST_KEYS = ["user_id", "request_id", "alone"]
"""Columns that identify the search of an event; `read_log` adds `alone`."""


def check_search_tables(tables: Tables, rules: dict[str, Rule]) -> pl.DataFrame:
    """Check `queries`, and the behaviours, requests and features of `sequences`.

    Args:
        tables: The audited tables.
        rules: Rules by name, to which violations are added in place.

    Returns:
        The users (`user_id`) with a candidate, whom `sequences` must have.
    """
    queries = read_queries(tables)
    check_queries(tables, queries, rules["queries"])
    rows = unfold(tables, rules)
    log = read_log(tables, queries)
    users_log = tables.with_user_rows(log)
    sessions = tables.sessions if tables.info.sessions else None
    expected = expected_behaviours(tables, users_log, sessions)
    check_behaviours(
        rows.users.drop("features"), rows.behaviours, expected, rules["behaviours"]
    )
    check_requests(tables, users_log, rows.requests, rules)
    check_history(tables, rows.behaviours, rows.requests, rules["history"])
    check_training_values(tables, rows.all_requests, rules["features"])
    check_as_of(tables, rules["features"])
    request_times = expected.select("row", "index", "asked")
    behaviours = rows.behaviours.join(
        request_times, on=["row", "index"], how="left", maintain_order="left"
    )
    if tables.info.sessions:
        is_session = pl.col("session_type").is_not_null()
        check_session_features(behaviours.filter(is_session), rules["windows"])
        behaviours = behaviours.filter(~is_session)
    check_features(tables, log, rows.all_requests, behaviours, rules["windows"])
    clicked = pl.col(f"label_{tables.info.labels[0]}").list
    candidates = rows.all_requests.select("split", "candidates").explode("candidates")
    one_class = rows.all_requests.filter(clicked.any() == clicked.all())
    counts: dict[str, int | dict[str, int]] = {
        "requests": rows.per_split,
        "queries": queries.height,
        "candidates": count_per_split(candidates.drop_nulls()),
        "requests_one_class": count_per_split(one_class),
    }
    if tables.info.sessions:
        counts |= count_session_rows(tables)
    check_counts(tables, counts, rules["counts"])
    return expected_candidates(tables, log).select("user_id").unique()


def check_queries(tables: Tables, queries: pl.DataFrame, rule: Rule) -> None:
    """Check that `queries` has the queries of events, sorted, with dense indices."""
    rule.rows = queries.height
    distinct = tables.events.select("query").drop_nulls().unique().sort("query")
    indexed = queries.with_row_index("at").join(
        distinct.with_row_index("expected"), on="query", how="full", coalesce=True
    )
    is_wrong = pl.any_horizontal(
        pl.col(name).ne_missing(pl.col("expected")) for name in ("query_index", "at")
    )
    rule.add_rows(
        indexed.filter(is_wrong).sort("query"),
        "query '{query}': index {query_index} in row {at}, events give {expected}",
    )


def check_training_values(tables: Tables, requests: pl.DataFrame, rule: Rule) -> None:
    """Check the statistics of custom features against training candidates.

    `check_requests` reports requests whose lists differ in length.
    """
    names = tables.info.custom.names
    length = pl.col("candidates").list.len()
    has_length = [pl.col(name).list.len() == length for name in names]
    is_counted = pl.all_horizontal(*has_length, length > 0).fill_null(False)
    train = requests.filter(is_counted, split="train")
    values = train.select(pl.col(names).explode())
    check_custom_scales(tables.info.custom, values, rule)


def check_session_features(behaviours: pl.DataFrame, rule: Rule) -> None:
    """Check that the features of behaviours of sessions are 0."""
    features = pl.col("features").arr
    has_features = (features.min() != 0) | (features.max() != 0)
    rule.add_rows(
        behaviours.filter(has_features),
        "user {user_id}, behaviour {index}: has features, but is of a session",
    )


def count_session_rows(tables: Tables) -> dict[str, int]:
    """Return the counts of rows of sessions, by their name in the manifest."""
    known_users = tables.sessions.join(tables.events, on="user_id", how="semi")
    inside = known_users.join(tables.catalogue, on="item_id", how="semi").height
    return {
        "session_rows": inside,
        "sessions_unknown_items": known_users.height - inside,
        "sessions_unknown_users": tables.sessions.height - known_users.height,
    }


def read_queries(tables: Tables) -> pl.DataFrame:
    """Return `query_index` and `query` of all queries."""
    if not tables.opened["queries"].files:
        return pl.DataFrame(schema={"query_index": pl.Int32, "query": pl.String})
    return tables.read("queries")


def read_log(tables: Tables, queries: pl.DataFrame) -> pl.DataFrame:
    """Return the events with their `query_index`, request time and joined features.

    `asked` is the time of the earliest event of an event's request. Events without a
    request id form a request if they have the same user and time. For them the column
    `alone` is the time; for other events it is 0.
    """
    time = pl.col("timestamp_ms")
    alone = pl.when(pl.col("request_id") == "").then(time).otherwise(0)
    log = tables.events.drop("part").with_columns(alone=alone)
    log = log.with_columns(asked=time.min().over(REQUEST_KEYS))
    log = log.join(queries, on="query", how="left", maintain_order="left")
    log = log.with_columns(pl.col("query_index").fill_null(-1))
    return join_as_of(tables, log, "asked")


def expected_candidates(tables: Tables, log: pl.DataFrame) -> pl.DataFrame:
    """Return the logged results that `sequences` must contain as candidates.

    Results for items outside the catalogue are dropped. For a user with more than
    `max_events` behaviours, requests before the oldest stored behaviour are dropped
    too.
    """
    results = log.join(tables.catalogue, on="item_id", maintain_order="left")
    known = pl.col(tables.known_time_column)
    times = tables.filter_behaviours(results).select("user_id", known=known)
    if tables.info.sessions:
        inside = tables.sessions.join(tables.catalogue, on="item_id", how="semi")
        times = pl.concat([times, inside.select("user_id", known="timestamp_ms")])
    per_user = times.group_by("user_id").agg(pl.col("known").sort(descending=True))
    max_events = tables.info.max_events
    truncated = per_user.filter(pl.col("known").list.len() > max_events)
    oldest = pl.col("known").list.get(max_events - 1, null_on_oob=True)
    results = results.join(
        truncated.select("user_id", oldest=oldest),
        on="user_id",
        how="left",
        maintain_order="left",
    )
    is_recent = pl.col("asked") >= pl.col("oldest")
    return results.filter(is_recent.fill_null(True))


def check_requests(
    tables: Tables,
    users_log: pl.DataFrame,
    requests: pl.DataFrame,
    rules: dict[str, Rule],
) -> None:
    """Check the results, labels and custom features of requests.

    Args:
        tables: Tables under audit, which are read into memory.
        users_log: Events of `read_log`, with the `row` of their user.
        requests: Requests of `sequences`.
        rules: `targets` takes wrong results and labels, `features` wrong features.
    """
    custom_features = list(tables.info.custom.names)
    labels = [f"label_{name}" for name in tables.info.labels]
    # results that are equal in all keys keep the order of the log
    results = expected_candidates(tables, users_log).sort(
        "row", "position", "timestamp_ms", "item_id", maintain_order=True
    )
    keys = ["row", "asked", *REQUEST_KEYS, "query_index"]
    expected = results.group_by(keys, maintain_order=True).agg(
        pl.col(labels + custom_features), candidates="item_index", positions="position"
    )
    expected = expected.rename({"asked": "timestamp_ms"})
    order = ["row", "timestamp_ms", "request_id", "query_index"]
    expected = expected.sort(order).with_columns(INDEX)
    if custom_features:
        compare_rows(requests, expected, custom_features, "request", rules["features"])
    # a missing label is false
    filled = pl.col(labels).list.eval(pl.element().fill_null(False))
    expected = expected.with_columns(filled)
    columns = ["timestamp_ms", "query_index", "candidates", "positions", *labels]
    compare_rows(requests, expected, columns, "request", rules["targets"])


# Features.


def check_features(
    tables: Tables,
    log: pl.DataFrame,
    requests: pl.DataFrame,
    behaviours: pl.DataFrame,
    rule: Rule,
) -> None:
    """Check every feature of candidates and behaviours against values from events.

    Expected features are as of the time of the request that showed the item.

    Args:
        tables: Tables under audit, which are read into memory.
        log: Events of `read_log`.
        requests: Requests of all users.
        behaviours: Behaviours with the time of their request, `asked`.
        rule: Rule that rows and violations are added to.
    """
    names = tables.info.features
    num_candidates = pl.col("candidates").list.len()
    has_features = pl.col("features").list.len() == num_candidates * len(names)
    has_positions = pl.col("positions").list.len() == num_candidates
    has_length = (has_features & has_positions).fill_null(False)
    rule.add_rows(
        requests.filter(~has_length),
        REQUEST + ": features of other length than candidates",
    )
    requests = requests.filter(has_length & (num_candidates > 0))
    points = feature_points(tables, requests, behaviours)
    flat = [
        frame["features"].cast(pl.List(pl.Float64)).explode().to_numpy()
        for frame in (requests, behaviours)
    ]
    values = np.concatenate(flat).reshape(points.height, len(names))
    rule.rows += points.height
    expected = pl.DataFrame(expected_features(tables, log, points))
    check_values(points, values, names, expected, "feature", rule)


def feature_points(
    tables: Tables, requests: pl.DataFrame, behaviours: pl.DataFrame
) -> pl.DataFrame:
    """Return the candidates, then the behaviours, with the time `at` of their request.

    Each row has the ids that features are counted by, and the position.
    """
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
    """Recompute all features from events; returns values (points,) by name.

    Args:
        tables: Tables under audit, which are read into memory.
        log: Events of `read_log`.
        points: Rows of `feature_points`.
    """
    info, settings = tables.info, tables.info.search
    position, time = points["position"].to_numpy().clip(0), points["at"].to_numpy()
    hour = time % DAY_MS // HOUR_MS / 24
    weekday = (time // DAY_MS + 3) % 7 / 7  # 1 January 1970 was a Thursday
    features = {
        "position": np.log1p(position),
        "page": np.log1p(position // info.page_size),
        "hour_sin": np.sin(2 * math.pi * hour),
        "hour_cos": np.cos(2 * math.pi * hour),
        "weekday_sin": np.sin(2 * math.pi * weekday),
        "weekday_cos": np.cos(2 * math.pi * weekday),
    }
    if not info.windows:
        return features
    # counts and click rates of items, queries and pairs
    smoothing = settings.ctr_prior, settings.ctr_strength
    one, zero = pl.lit(1, pl.Int64), pl.lit(0, pl.Int64)
    columns = ["item_id", "query", "timestamp_ms"]
    is_first = pl.struct(*REQUEST_KEYS, "query").is_first_distinct().cast(pl.Int64)
    shown = log.select(*columns, exposures=one, clicks=zero, searches=is_first)
    is_clicked = pl.col(f"label_{info.labels[0]}").fill_null(False)
    clicked = log.filter(is_clicked).with_columns(timestamp_ms=tables.known_time_column)
    clicked = clicked.select(*columns, exposures=zero, clicks=one, searches=zero)
    counted = pl.concat([shown, clicked])
    rates = {"ctr": "clicks"}
    for kind, keys in KEYS.items():
        rows = counted.select(*keys, "timestamp_ms", "exposures", "clicks", "searches")
        features |= window_features(
            points, rows, keys, kind, settings, smoothing, rates
        )
    # whether, and how long before, the pair of each point was last shown
    pairs = log.select(*KEYS["pair"], time="timestamp_ms", last="timestamp_ms")
    delay = round(settings.delay_minutes * MINUTE_MS)
    latest = latest_before(points, pairs.drop_nulls(), KEYS["pair"], delay, "time")
    last = latest["last"]
    hours = ((points["at"] - last) / HOUR_MS).fill_null(0)
    features["pair_seen"] = last.is_not_null().to_numpy()
    features["pair_gap"] = np.log1p(hours.to_numpy())
    return features
