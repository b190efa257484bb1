"""Point-in-time counts: what happened to a key in [t - window, t - delay), from events alone.

`python -m jobs.prepare` makes them for a search log (`prepare: {kind: search}`). The keys are the pair of
query and item, the item, and the query. Impressions and clicks of all users count, so rows travel to the
partition of their key: once by item, which serves the pairs too, and once by query. Each partition is one
vectorised kernel: a sort, running sums, and a binary search per window, so the cost is E log E in the
events, whatever the windows hold. What comes back are integers; `features` makes numbers for models. They are as of
the request's time, that of its earliest result, so a search never counts for itself.

Shapes: E events, W windows, M marks that are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import ray

from models.tables import UserError
from pipelines.data.search_config import DAY_MS, HOUR_MS, MINUTE_MS, SearchConfig
from pipelines.data.survey import coded, known_column, known_times, read_coded

IDS = ("user_id", "item_id", "request_id", "query")
MARKS = ("exposures", "clicks")
QUERY_MARKS = (*MARKS, "searches")
MOST_BUCKETS = 64  # partitions of a key: enough for some hundred million events, and parts x 64 pieces in transit
MARKS_OF = {"pair": MARKS, "item": MARKS, "query": QUERY_MARKS}
UNSEEN = -1  # gap of a pair that was never shown before


def window_counts(
    key: np.ndarray,
    time: np.ndarray,
    marks: np.ndarray,
    windows_ms: list[int],
    delay_ms: int,
    moment: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Marks of the same key in [t - window, t - delay) for every event, and the time since the last event.

    key (E,) dense codes from 0, time (E,) ms, marks (E, M) int; t is `moment` (E,) ms, by default the event's own
    time. Returns counts (E, W, M) int32 and gap (E,) int64: ms since the key's last event before t - delay,
    UNSEEN where there is none. Events of one time never count for each other, whatever the delay.
    """
    events = len(key)
    counts = np.zeros((events, len(windows_ms), marks.shape[1]), dtype=np.int32)
    gap = np.full(events, UNSEEN, dtype=np.int64)
    if not events:
        return counts, gap
    # Times by rank, so that (key, rank) fits an integer whatever the clock's unit.
    values, rank = np.unique(time, return_inverse=True)
    moments, which = (values, rank) if moment is None else np.unique(moment, return_inverse=True)
    line = key.astype(np.int64) * (len(values) + 1) + rank
    order = np.argsort(line)
    rank, which, time, line = rank[order], which[order], time[order], line[order]
    base = line - rank  # (E,) start of the key's stretch of the line
    total = np.concatenate([np.zeros((1, marks.shape[1]), np.int64), np.cumsum(marks[order], axis=0, dtype=np.int64)])

    def earlier(shift: int) -> np.ndarray:
        """(E,) events on the line before (key, t - shift)."""
        return np.searchsorted(line, base + np.searchsorted(values, moments - shift)[which])

    end = earlier(delay_ms)
    if windows_ms:
        counts[order] = np.stack([total[end] - total[earlier(window)] for window in windows_ms], axis=1)
    last = end - 1
    seen = (end > 0) & (base[last] == base)
    gap[order] = np.where(seen, moments[which] - time[last], UNSEEN)
    return counts, gap


def positions_in(values: pa.DictionaryArray, table: pa.Array) -> np.ndarray:
    """(E,) int32: the place of each value in `table`, -1 where it is null or not there."""
    place = pc.fill_null(pc.index_in(values.dictionary.cast(pa.large_string()), table), -1).to_numpy()
    index = pc.fill_null(values.indices.cast(pa.int64()), -1).to_numpy()
    return np.append(place, -1)[index].astype(np.int32)  # index -1 is the appended one


@dataclass(frozen=True)
class Requests:
    """Which of a part's events are of one request: what the log says is one, (user, request id).

    A request id with several queries is one request per query. Only events without a request id are cut by time.
    """

    first: np.ndarray
    """(E,) row of the earliest event of each event's request; its time is the request's."""
    moment: np.ndarray | None
    """(E,) number of the (user, time, request id) at which each event's request begins; None where each request is of
    one moment and each moment of one request, so that events are in the order of requests."""

    @classmethod
    def of(cls, events: pa.Table, query: np.ndarray) -> Requests:
        """Of events as their table sorts them; query (E,) query_index."""
        rows = events.num_rows
        here = np.arange(rows)
        if not rows:
            return cls(here, None)
        user, id_ = coded(events, "user_id").indices.to_numpy(), coded(events, "request_id")
        named = pc.not_equal(id_.dictionary, "").to_numpy(zero_copy_only=False)[id_.indices.to_numpy()]
        columns = {
            "user": user,
            "id": id_.indices.to_numpy(),
            "query": query,
            "time": events["timestamp_ms"].to_numpy(),
        }
        new = _changes(*(columns[name] for name in ("user", "time", "id")))
        moment = np.cumsum(new)  # (E,) number of the (user, time, request id)
        begin = np.maximum.accumulate(np.where(new, here, 0))
        pairs = pl.DataFrame({"user": user[new & named], "id": columns["id"][new & named]})
        if pairs.n_unique() == pairs.height and (query == query[begin]).all():
            return cls(begin, None)  # as in most logs: one time and one query per request
        key = pl.DataFrame(columns | {"row": here, "time": np.where(named, 0, columns["time"])})
        first = key.select(pl.col("row").first().over("user", "id", "query", "time")).to_series().to_numpy()
        return cls(first, moment[first])

    def order(self, query: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(E,) rows in the order of their requests, which is that of (user, time, request id, query), and of their
        position within one; and (E,) which of them begin a request."""
        rows = np.arange(len(query)) if self.moment is None else np.lexsort((position, query, self.moment))
        return rows, _changes(self.first[rows])

    def spread(self, time: np.ndarray) -> np.ndarray:
        """(E,) ms from the request's time to the event's. time (E,) ms"""
        return time - time[self.first]


def _changes(*columns: np.ndarray) -> np.ndarray:
    """(E,) whether a row differs from the one above it, the first always."""
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return new


def requests_of(events: pa.Table, query: np.ndarray, config: SearchConfig, clock: bool) -> Requests:
    """The requests of a part; UserError for one whose events lie further apart than `max_request_minutes`."""
    found = Requests.of(events, query)
    time = events["timestamp_ms"].to_numpy()
    spread = found.spread(time)
    if clock and len(spread) and spread.max() > config.max_request_minutes * MINUTE_MS:
        row = int(spread.argmax())
        user, id_ = (events[name][row].as_py() for name in ("user_id", "request_id"))
        raise UserError(
            f"request '{id_}' of user '{user}' has results {spread[row] / MINUTE_MS:,.1f} minutes apart, over the "
            f"limit search.max_request_minutes {config.max_request_minutes:g}; ids that come again, such as those of "
            f"sessions or a counter, name no request: map another column to 'request', leave it out to cut by time, "
            f"or raise the limit"
        )
    return found


def _scatter(
    uri: str, catalogue: pa.Array, queries: pa.Array, label: str, late: bool, config: SearchConfig, buckets: int
) -> list[dict[str, np.ndarray]]:
    """One part's events by bucket of their item, then by bucket of their query: 2 x buckets pieces."""
    events = read_coded(uri, [*IDS, "timestamp_ms", f"label_{label}", *known_column(label, late)], IDS)
    item = positions_in(coded(events, "item_id"), catalogue)
    query = positions_in(coded(events, "query"), queries)
    requests, time = requests_of(events, query, config, clock=True), events["timestamp_ms"].to_numpy()
    searches = np.zeros(len(item), dtype=bool)
    searches[requests.first] = True
    columns = {
        "item": item,
        "query": query,
        "time": time,
        "moment": time[requests.first],
        "clicks": pc.fill_null(events[f"label_{label}"].combine_chunks(), False).to_numpy(zero_copy_only=False),
        "searches": searches,
        **({"known": known_times(events, label)} if late else {}),
    }
    pieces = []
    for key in (item, query):
        bucket = np.where(key >= 0, key % buckets, -1)  # events without the key count for none
        order = np.argsort(bucket, kind="stable")
        edges = np.searchsorted(bucket[order], np.arange(buckets + 1))
        for low, high in pairwise(edges):
            rows = order[low:high]
            pieces.append({"row": rows.astype(np.int32), **{name: column[rows] for name, column in columns.items()}})
    return pieces


def _marks(piece: dict[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    ones = np.ones(len(piece["time"]), dtype=np.int32)
    return np.stack([piece[name].astype(np.int32) if name in piece else ones for name in names], axis=1)


def _count_bucket(kind: str, config: SearchConfig, *pieces: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Counts of one bucket of the items or of the queries, back in a piece per part."""
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    time, moment = whole["time"], whole["moment"]

    def count(key: np.ndarray, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        dense = np.unique(key, return_inverse=True)[1]
        counts, gap = window_counts(dense, time, _marks(whole, names), config.windows_ms, config.delay_ms, moment)
        if "known" in whole:  # a click counts from when it is known
            clicks = _marks(whole, ("clicks",))
            later = window_counts(dense, whole["known"], clicks, config.windows_ms, config.delay_ms, moment)[0]
            counts[:, :, names.index("clicks")] = later[:, :, 0]
        return counts.reshape(len(time), counts.shape[1] * counts.shape[2]), gap

    if kind == "query":
        counted = {"row": whole["row"], "query": count(whole["query"], QUERY_MARKS)[0]}
    else:
        pairs, gap = count(whole["item"].astype(np.int64) << 32 | whole["query"].astype(np.int64) + 1, MARKS)
        asked = whole["query"] >= 0  # without a query there is no pair
        counted = {"row": whole["row"], "item": count(whole["item"], MARKS)[0]}
        counted["pair"] = np.where(asked[:, None], pairs, 0)
        counted["gap"] = np.where(asked, gap, UNSEEN)
    edges = np.cumsum([len(piece["time"]) for piece in pieces])[:-1]
    split = {name: np.split(column, edges) for name, column in counted.items()}
    return [{name: split[name][number] for name in split} for number in range(len(pieces))]


def count_windows(
    parts: list[str],
    catalogue: ray.ObjectRef,
    queries: ray.ObjectRef,
    label: str,
    config: SearchConfig,
    late: bool = False,
) -> list[list[ray.ObjectRef]]:
    """Per events part the pieces that `gather` puts together; they stay in Ray's object store. late: whether events
    say when the label is known."""
    buckets = min(len(parts), MOST_BUCKETS)
    calls = [(uri, catalogue, queries, label, late, config, buckets) for uri in parts]
    return exchange(
        _scatter, calls, _count_bucket, [(kind, config) for kind in ("item", "query") for _ in range(buckets)]
    )


def exchange(
    scatter: Callable[..., list[Any]],
    calls: list[tuple[Any, ...]],
    count: Callable[..., list[Any]],
    heads: list[tuple[Any, ...]],
) -> list[list[ray.ObjectRef]]:
    """Rows to the bucket of their key and what is counted there back: per call one piece of every bucket.

    `scatter(*call)` gives a piece for each of `heads`; `count(*heads[n], *pieces)` has piece n of all calls
    and gives a piece back to each of them.
    """

    def several(function: Callable[..., Any], returns: int) -> Callable[..., list[ray.ObjectRef]]:
        """The function as a task that returns a list of references, whatever their number."""
        if returns == 1:  # Ray returns one value as it is and not as a list
            return lambda *call: [ray.remote(_only).remote(function, *call)]
        return ray.remote(function).options(num_returns=returns).remote  # type: ignore[no-any-return]

    pieces = [several(scatter, len(heads))(*call) for call in calls]  # calls x heads
    count_there = several(count, len(calls))
    counted = [count_there(*head, *(piece[number] for piece in pieces)) for number, head in enumerate(heads)]
    return [[bucket[number] for bucket in counted] for number in range(len(calls))]


def _only(function: Callable[..., list[Any]], *call: Any) -> Any:
    """The one element of what the function returns."""
    return function(*call)[0]


def gather(events: int, config: SearchConfig, pieces: tuple[dict[str, np.ndarray], ...]) -> dict[str, np.ndarray]:
    """Counts of a part's events: `pair`, `item` (E, W, 2), `query` (E, W, 3) and `gap` (E,)."""
    windows = len(config.windows_ms)
    counts: dict[str, np.ndarray] = {
        name: np.zeros((events, windows * len(marks)), np.int32) for name, marks in MARKS_OF.items()
    }
    counts["gap"] = np.full(events, UNSEEN, dtype=np.int64)
    for piece in pieces:
        for name in piece.keys() - {"row"}:
            counts[name][piece["row"]] = piece[name]
    return {
        name: values if name == "gap" else values.reshape(events, windows, len(MARKS_OF[name]))
        for name, values in counts.items()
    }


def feature_names(config: SearchConfig, clock: bool) -> list[str]:
    """Names of the columns of `features`."""
    names = []
    for kind, marks in MARKS_OF.items() if clock else ():
        for days in config.windows_days:
            names += [f"{kind}_{measure}_{days:g}d" for measure in (*marks, "ctr")]
    names += ["pair_gap", "pair_seen"] if clock and config.windows_days else []
    names += ["position", "page"]
    return names + (["hour_sin", "hour_cos", "weekday_sin", "weekday_cos"] if clock else [])


def features(
    counts: dict[str, np.ndarray] | None, position: np.ndarray, time: np.ndarray, config: SearchConfig, clock: bool
) -> np.ndarray:
    """(E, F) float32 in the order of `feature_names`: what a model reads, all of small size and none missing.

    time (E,) ms is that of each event's request. Counts, the gap in hours, position and page are log(1 + value);
    rates are smoothed; a pair that was not shown before has gap 0 and `pair_seen` 0. Hour and weekday are of UTC.
    """
    columns: list[np.ndarray] = []
    if counts is not None:
        for kind in MARKS_OF:
            for number in range(len(config.windows_ms)):
                seen = counts[kind][:, number].astype(np.float64)  # (E, M): exposures, clicks, ...
                rate = (seen[:, 1] + config.ctr_prior * config.ctr_strength) / (seen[:, 0] + config.ctr_strength)
                columns += [*np.log1p(seen).T, rate]
        gap = counts["gap"]
        columns += [np.log1p(gap.clip(0) / HOUR_MS), gap >= 0]
    columns += [np.log1p(position.clip(0)), np.log1p(position.clip(0) // config.page_size)]
    if clock:
        for period, start in ((DAY_MS, 0), (7 * DAY_MS, 3 * DAY_MS)):  # 1 January 1970 was a Thursday
            angle = 2 * np.pi * ((time + start) % period // (HOUR_MS if period == DAY_MS else DAY_MS))
            angle /= 24 if period == DAY_MS else 7
            columns += [np.sin(angle), np.cos(angle)]
    return np.stack(columns, axis=1).astype(np.float32)
