"""Rules on the tables of a search log: requests with what they showed, and features that see the past only.

Windowed counts of all users are recounted key by key: labels are summed per (key, time), added up along
the time, and looked up where a window begins and where it ends. Parts of events are read one at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl

from pipelines.data.audit.base import BEHAVIOURS, EVENTS, ITEMS, SPLITS, Rule, Tables, name_request
from pipelines.data.audit.own_features import TrainingValues, check_as_of_inputs, own_columns, with_as_of
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
    parts_of,
    request_rows,
)

HOUR, DAY = 3_600_000, 86_400_000
TOLERANCE = 4e-6  # of features, which are 32-bit floats
KEYS = {"pair": ["item_id", "query"], "item": ["item_id"], "query": ["query"]}
COUNTED = {
    "pair": ["exposures", "clicks"],
    "item": ["exposures", "clicks"],
    "query": ["exposures", "clicks", "searches"],
}
REQUIRED = {
    "events": EVENTS,
    "items": ITEMS,
    "queries": {"query_index": "int32", "query": "string"},
    "sequences": {**BEHAVIOURS, "query_index": "list<item: int32>", "position": "list<item: int32>"},
}
"""The manifest lists the other columns of sequences."""
WITHOUT = ("tasks",)
RAW = ["user_id", "request_id", "timestamp_ms", "item_id", "query", "position"]


def read_queries(tables: Tables, rule: Rule) -> pl.DataFrame:
    """`query_index` and `query` of all queries, after the check that they are dense and sorted."""
    parts = [part for _, part in tables.parts("queries")]
    queries = pl.concat(parts) if parts else pl.DataFrame(schema={"query_index": pl.Int32, "query": pl.String})
    rule.rows += queries.height
    expected, above = pl.int_range(pl.len(), dtype=pl.Int32), pl.col("query").shift(1)
    wrong = queries.with_columns(expected=expected).filter(
        pl.col("query_index").ne_missing(pl.col("expected")) | (pl.col("query") <= above).fill_null(False)
    )
    rule.broken_rows(wrong, lambda row: f"query '{row['query']}': index {row['query_index']} in row {row['expected']}")
    return queries


def check_search_tables(sequences: Sequences) -> pl.DataFrame:
    """Rules on rows of `sequences`. Returns the users that events give (`user`)."""
    tables, items, rules, cut = sequences.tables, sequences.items, sequences.rules, sequences.cut
    queries = read_queries(tables, rules["queries"])
    asked = pl.Series(dtype=pl.String)
    in_split = {f"{name}.{split}": 0 for name in ("requests", "candidates", "requests_one_class") for split in SPLITS}
    label, training = f"label_{tables.sequences.info['labels'][0]}", TrainingValues(tables.sequences.info)
    for users, events in sequences.parts():
        requests = request_rows(users).drop("features")
        users = check_lengths(users, rules["behaviours"]).drop("features")
        check_splits(tables, requests, rules["splits"])
        count_requests(requests, label, in_split)
        check_own_features(tables, requests, training, rules["features"])
        requests = requests.join(users.select("row"), on="row", how="semi")
        behaviours = behaviour_rows(users)
        if events is not None:
            mine = with_as_of(tables, _asked(_with_queries(events, queries)), "asked")
            expected = expected_behaviours(tables, mine, items)
            count_cut(tables, mine, items, cut)
            check_behaviours(tables, users, behaviours, expected, rules["behaviours"])
            logged = _expected_requests(tables, mine, items)
            columns = ["timestamp_ms", "query_index", "candidates", "positions", *_labels(tables)]
            _check_requests(requests, logged, columns, rules["targets"])
            if own := own_columns(tables.sequences.info):
                _check_requests(requests, logged, own, rules["features"])
            check_known(tables, requests, expected, rules["known"])
            _check_own(requests, logged, expected, rules["requests"])
        check_history(tables, behaviours, requests, rules["history"])
    for number, events_part in tables.parts("events", ["query"]):
        sequences.progress(f"queries, part {number + 1} of {len(tables.events.files)}")
        asked = pl.concat([asked, events_part["query"].drop_nulls()]).unique()
    lost = pl.DataFrame({"query": asked}).join(queries, on="query", how="anti").sort("query")
    rules["queries"].broken_rows(lost, lambda row: f"query '{row['query']}': in events, but not in queries")
    never = queries.filter(~pl.col("query").is_in(asked.implode()))
    rules["queries"].broken_rows(never, lambda row: f"query '{row['query']}': in queries, but not in events")
    training.check(rules["features"])
    check_as_of_inputs(tables, rules["features"])
    check_counts(sequences, {"queries": queries.height, **in_split})
    note_cut(tables, cut, rules["behaviours"])
    note_splits({f"{name} requests": in_split[f"requests.{name}"] for name in SPLITS}, rules["splits"])
    for name in SPLITS:
        if 0 < in_split[f"requests.{name}"] == in_split[f"requests_one_class.{name}"]:
            rules["targets"].remark(f"all {name} requests have one class only")
    engaged = f"label_{tables.sequences.info['behaviour']}"
    shown = [
        _shown(tables, _asked(part), items).select(user=pl.col("user_id").unique().hash())
        for _, part in tables.parts("events", list(dict.fromkeys([*RAW, engaged, tables.known])))
    ]
    check_search_windows(sequences, queries)
    return pl.concat(shown).unique()


def count_requests(requests: pl.DataFrame, label: str, in_split: dict[str, int]) -> None:
    """Adds the requests of a part to what the manifest should count."""
    one_class = (pl.col(label).list.any() == pl.col(label).list.all()).sum()
    counted = requests.group_by("split").agg(pl.len(), pl.col("candidates").list.len().sum(), one_class)
    for split, *numbers in counted.iter_rows():
        for name, value in zip(("requests", "candidates", "requests_one_class"), numbers, strict=True):
            in_split[f"{name}.{split}"] = in_split.get(f"{name}.{split}", 0) + value


def check_own_features(tables: Tables, requests: pl.DataFrame, training: TrainingValues, rule: Rule) -> None:
    """Requests have a value of each own feature per candidate, as `_check_requests` compares them; adds those of
    training."""
    names = own_columns(tables.sequences.info)
    if not names:
        return
    rule.rows += requests.height
    fits = pl.all_horizontal(pl.col(name).list.len() == pl.col("candidates").list.len() for name in names)
    rule.broken_rows(
        requests.filter(~fits.fill_null(False)),
        lambda row: f"{name_request(row)}: own features of other length than candidates",
    )
    train = requests.filter(
        fits.fill_null(False) & (pl.col("split") == "train") & (pl.col("candidates").list.len() > 0)
    )
    training.add(train.select(names).explode(names))


def _with_queries(events: pl.DataFrame, queries: pl.DataFrame) -> pl.DataFrame:
    return events.join(queries, on="query", how="left").with_columns(pl.col("query_index").fill_null(-1))


def _labels(tables: Tables) -> list[str]:
    return [f"label_{name}" for name in tables.sequences.info["labels"]]


def _asked(events: pl.DataFrame) -> pl.DataFrame:
    """`events` with their request: `alone`, the time where the log gives no request id, and `asked`, its earliest."""
    return events.with_columns(
        alone=pl.when(pl.col("request_id") == "").then(pl.col("timestamp_ms")).otherwise(0)
    ).with_columns(asked=pl.col("timestamp_ms").min().over("user_id", "request_id", "alone"))


def _shown(tables: Tables, events: pl.DataFrame, items: pl.DataFrame) -> pl.DataFrame:
    """The results that sequences show: of items of the catalogue and, of a user with more behaviours than are kept,
    of requests not older than the first kept one. `events` are those of `_asked`."""
    most = tables.sequences.info.get("max_events") or 2**31
    inside = events.join(items, on="item_id")
    engaged = tables.behaviours_of(inside).group_by("user_id").agg(known=pl.col(tables.known).sort(descending=True))
    cut = engaged.filter(pl.col("known").list.len() > most).select(
        "user_id", oldest=pl.col("known").list.get(most - 1, null_on_oob=True)
    )
    return inside.join(cut, on="user_id", how="left").filter((pl.col("asked") >= pl.col("oldest")).fill_null(True))


def _expected_requests(tables: Tables, events: pl.DataFrame, items: pl.DataFrame) -> pl.DataFrame:
    """The requests that `events` give, one row each."""
    return (
        _shown(tables, events, items)
        .sort("row", "position", "timestamp_ms", "item_id")
        .group_by("row", "asked", "request_id", "alone", "query_index", maintain_order=True)
        .agg(
            candidates=pl.col("item_index"),
            positions=pl.col("position"),
            **{name: pl.col(name).fill_null(False) for name in _labels(tables)},
            **{name: pl.col(name) for name in own_columns(tables.sequences.info)},
        )
        .rename({"asked": "timestamp_ms"})
        .sort("row", "timestamp_ms", "request_id", "query_index")
        .with_columns(place=pl.int_range(pl.len(), dtype=pl.Int32).over("row"))
    )


def _check_own(requests: pl.DataFrame, expected: pl.DataFrame, behaviours: pl.DataFrame, rule: Rule) -> None:
    """Each request is one of the log, and its history holds none of its own behaviours.

    expected: of `_expected_requests`; behaviours: those that events give, with their `place`.
    """
    rule.rows += requests.height
    same, own = ["row", "timestamp_ms", "query_index"], ["row", "request_id", "alone"]
    several = pl.int_range(pl.len()).over(same)  # of one time and query, told apart by their order
    known = expected.sort("row", "place").select(*same, *own[1:], nth=several)
    found = requests.sort("row", "place").with_columns(nth=several).join(known, on=[*same, "nth"], how="left")
    rule.broken_rows(
        found.filter(pl.col("request_id").is_null()).sort("row", "place"),
        lambda row: f"{name_request(row)} at {row['timestamp_ms']}: the log has no request of this time and query",
    )
    first = behaviours.group_by(own).agg(first=pl.col("place").min())
    inside = found.join(first, on=own).filter(pl.col("first") < pl.col("history_end")).sort("row", "place")
    rule.broken_rows(
        inside,
        lambda row: (
            f"{name_request(row)} at {row['timestamp_ms']}: behaviour {row['first']} is of request "
            f"'{row['request_id']}' itself and in its history, which ends at {row['history_end']}"
        ),
    )


def _check_requests(requests: pl.DataFrame, expected: pl.DataFrame, columns: list[str], rule: Rule) -> None:
    both = requests.select("row", "place", "user_id", *columns).join(
        expected.select("row", "place", *columns), on=["row", "place"], how="full", coalesce=True, suffix="_events"
    )
    rule.rows += both.height
    differ = pl.any_horizontal(pl.col(name).ne_missing(pl.col(f"{name}_events")).fill_null(True) for name in columns)
    rule.broken_rows(
        both.filter(differ).sort("row", "place"),
        lambda row: (
            f"{name_request(row)}: "
            + "; ".join(
                f"{name} is {row[name]}, events give {row[f'{name}_events']}"
                for name in columns
                if row[name] != row[f"{name}_events"]
            )
        ),
    )


def check_search_windows(sequences: Sequences, queries: pl.DataFrame) -> None:
    """Recomputes every feature of every candidate and behaviour from events, as of the time of their request."""
    tables, items, rule = sequences.tables, sequences.items, sequences.rules["windows"]
    info = tables.sequences.info
    rule.note = "" if info["windows"] else "no windowed features"
    for number, users in tables.parts("sequences"):
        asked = _asked_of(tables, users, items, sequences.event_users)
        points, values = _points(users, asked, len(info["features"]), rule)
        points = points.join(items, on="item_index", how="left").join(queries, on="query_index", how="left")
        points = points.sort("point")
        rule.rows += points.height
        sequences.progress(f"features, part {number + 1} of {len(tables.sequences.files)}")
        expected = _expected_features(tables, points)
        for column, name in enumerate(info["features"]):
            if name not in expected:
                rule.broken(points.height, [f"{name}: a feature that the audit does not know"])
                continue
            right = expected[name]
            wrong = ~(np.abs(values[:, column] - right) <= TOLERANCE * np.maximum(1, np.abs(right)))
            said = points.with_columns(value=values[:, column], right=right, said=pl.lit(name)).filter(pl.Series(wrong))
            rule.broken_rows(
                said,
                lambda row: (
                    f"user {row['user_id']}, item {row['item_id']} at {row['timestamp_ms']}: {row['said']} is "
                    f"{row['value']:.6g}, events give {row['right']:.6g}"
                ),
            )


def _asked_of(tables: Tables, users: pl.DataFrame, items: pl.DataFrame, event_users: pl.DataFrame) -> pl.DataFrame:
    """Per `user_id` and `place` of a behaviour `asked`, the time of the request that showed it."""
    rows = users.select("user_id").with_row_index("row")
    sources = parts_of(event_users, rows.select(user=pl.col("user_id").hash())["user"])
    mine = [tables.part("events", source).join(rows, on="user_id") for source in sources]
    if not mine:
        return pl.DataFrame(schema={"user_id": pl.String, "place": pl.Int32, "asked": pl.Int64})
    return expected_behaviours(tables, _asked(pl.concat(mine)), items).select("user_id", "place", "asked")


def _points(users: pl.DataFrame, asked: pl.DataFrame, features: int, rule: Rule) -> tuple[pl.DataFrame, np.ndarray]:
    """Candidates and behaviours of `users`, one row each with the time of their request, and their features (rows, F).

    asked: of `_asked_of`.
    """
    keys = ["user_id", "item_index", "query_index", "timestamp_ms", "position"]
    requests = users.select("user_id", "requests").explode("requests").drop_nulls("requests").unnest("requests")
    fits = pl.col("features").list.len() == pl.col("candidates").list.len() * features
    fits &= pl.col("positions").list.len() == pl.col("candidates").list.len()
    rule.broken_rows(
        requests.filter(~fits.fill_null(False)),
        lambda row: f"user {row['user_id']} at {row['timestamp_ms']}: features of other length than candidates",
    )
    requests = requests.filter(fits.fill_null(False) & (pl.col("candidates").list.len() > 0))
    shown = requests.rename({"candidates": "item_index", "positions": "position"}).select(*keys, "features")
    equal = pl.all_horizontal(
        pl.col(name).list.len() == pl.col("item_index").list.len() for name in (*keys[1:], "features")
    )
    behaviours = users.filter(equal & (pl.col("item_index").list.len() > 0))  # the others are found by `behaviours`
    behaviours = behaviours.select(*keys, pl.col("features").cast(pl.List(pl.List(pl.Float32))))
    values = [
        shown["features"].explode().to_numpy().reshape(-1, features),
        behaviours["features"].explode().explode().to_numpy().reshape(-1, features),
    ]
    engaged = behaviours.drop("features").explode(*keys[1:])
    engaged = engaged.with_columns(place=pl.int_range(pl.len(), dtype=pl.Int32).over("user_id"))
    engaged = engaged.join(asked, on=["user_id", "place"], how="left", maintain_order="left")
    points = [
        shown.drop("features").explode("item_index", "position"),
        engaged.with_columns(timestamp_ms=pl.coalesce("asked", "timestamp_ms")),
    ]
    return pl.concat([p.select(keys) for p in points]).with_row_index("point"), np.concatenate(values).astype(float)


def _expected_features(tables: Tables, points: pl.DataFrame) -> dict[str, np.ndarray]:
    """Every feature by name, (points,) each."""
    info = tables.sequences.info
    settings: dict[str, Any] = info["search"]
    position = points["position"].to_numpy().clip(0)
    expected = {"position": np.log1p(position), "page": np.log1p(position // settings["page_size"])}
    time = points["timestamp_ms"].to_numpy()
    turn = {"hour": time % DAY // HOUR / 24, "weekday": (time // DAY + 3) % 7 / 7}
    for name, share in turn.items():
        expected |= {f"{name}_sin": np.sin(2 * math.pi * share), f"{name}_cos": np.cos(2 * math.pi * share)}
    if not info["windows"]:
        return expected
    delay = round(settings["delay_minutes"] * 60_000)
    lengths = [round(days * DAY) for days in settings["windows_days"]]
    strength = settings["ctr_strength"]
    for kind, keys in KEYS.items():
        until = {
            shift: _counts_before(tables, points, keys, COUNTED[kind], shift)
            for shift in dict.fromkeys((delay, *lengths))
        }
        for name, length in zip(info["windows"], lengths, strict=True):
            count = {label: (until[delay][label] - until[length][label]).to_numpy() for label in COUNTED[kind]}
            expected |= {f"{kind}_{label}_{name}": np.log1p(count[label]) for label in COUNTED[kind]}
            clicks = count["clicks"] + settings["ctr_prior"] * strength
            expected[f"{kind}_ctr_{name}"] = clicks / (count["exposures"] + strength)
        if kind == "pair":
            last = until[delay]["last"]
            expected["pair_seen"] = last.is_not_null().to_numpy()
            expected["pair_gap"] = np.log1p(((points["timestamp_ms"] - last) / HOUR).fill_null(0).to_numpy())
    return expected


def _counts_before(
    tables: Tables, points: pl.DataFrame, keys: list[str], counted_labels: list[str], shift: int
) -> pl.DataFrame:
    """Per point: the labels of its key before its time less `shift`, over all users, and the time of the last."""
    label = f"label_{tables.sequences.info['labels'][0]}"
    moved = points.select("point", *keys, at=pl.col("timestamp_ms") - shift).sort("at")
    total = pl.DataFrame({name: np.zeros(points.height, np.int64) for name in counted_labels}).with_columns(
        last=pl.lit(None, pl.Int64)
    )
    for _, events in tables.parts("events", list(dict.fromkeys([*RAW, label, tables.known]))):
        search = pl.struct("user_id", "request_id", "alone", "query").is_first_distinct()
        labelled = _asked(events).with_columns(
            exposures=pl.lit(1), clicks=pl.col(label).fill_null(False), searches=search
        )
        clicked = labelled.filter("clicks").with_columns(timestamp_ms=pl.col(tables.known))
        for rows, names in ((labelled, [name for name in counted_labels if name != "clicks"]), (clicked, ["clicks"])):
            along = (
                rows.drop_nulls(keys)
                .group_by(*keys, "timestamp_ms")
                .agg(pl.col(names).cast(pl.Int64).sum())
                .sort("timestamp_ms")
                .with_columns(pl.col(names).cum_sum().over(keys), shown=pl.col("timestamp_ms"))
            )
            found = moved.join_asof(
                along, left_on="at", right_on="timestamp_ms", by=keys, allow_exact_matches=False, check_sortedness=False
            ).sort("point")
            total = total.with_columns(total[name] + found[name].fill_null(0) for name in names)
            if "exposures" in names:
                total = total.with_columns(last=pl.max_horizontal(total["last"], found["shown"]))
    return total
