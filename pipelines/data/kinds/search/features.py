"""Features of what a search shows: counts of the pair of query and item, of the item and of the query, place and time.

Impressions and clicks of all users count. Rows travel twice: to the bucket of their item, which serves the pairs too,
and to that of their query. Counts are as of the request's time, that of its earliest result, so a search never counts
for itself.

Shapes: E events, W windows, M labels that are counted, F features.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from pipelines.data.counts import MOST_BUCKETS, UNSEEN, Piece, by_bucket, count_key, count_together, exchange, fill
from pipelines.data.durations import DAY_MS, HOUR_MS
from pipelines.data.kinds.search.config import SearchConfig
from pipelines.data.kinds.search.requests import requests_of
from pipelines.data.survey import coded, known_column, known_times, positions_in, read_coded

IDS = ("user_id", "item_id", "request_id", "query")
SHOWN = ("exposures", "clicks")
COUNTED = {"pair": SHOWN, "item": SHOWN, "query": (*SHOWN, "searches")}
"""What is counted, by key."""


def _scatter(
    uri: str, catalogue: pa.Array, queries: pa.Array, label: str, late: bool, config: SearchConfig, buckets: int
) -> list[Piece]:
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
        "as_of": time[requests.earliest],
        "exposures": np.ones(len(item), dtype=bool),
        "clicks": pc.fill_null(events[f"label_{label}"].combine_chunks(), False).to_numpy(zero_copy_only=False),
        "searches": searches,
        **({"known": known_times(events, label)} if late else {}),
    }
    return [piece for key in (item, query) for piece in by_bucket(key, buckets, columns)]


def _count_bucket(key: str, config: SearchConfig, *pieces: Piece) -> list[Piece]:
    """Counts of one bucket of the items, with their pairs, or of the queries, back in a piece per part."""
    windows = config.windows_ms, config.delay_ms

    def counted_labels(whole: Piece, names: tuple[str, ...]) -> np.ndarray:
        return np.stack([whole[name].astype(np.int32) for name in names], axis=1)

    def count(whole: Piece, of: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts (E, W, M) of the key `of` and its gap (E,)."""
        names, as_of = COUNTED[of], whole["as_of"]
        counts, gap = count_key(values, whole["time"], counted_labels(whole, names), *windows, as_of)
        if "known" in whole:  # a click counts from when it is known
            clicks = counted_labels(whole, ("clicks",))
            counts[:, :, names.index("clicks")] = count_key(values, whole["known"], clicks, *windows, as_of)[0][:, :, 0]
        return counts, gap

    def count_all(whole: Piece) -> Piece:
        if key == "query":
            return {"query": count(whole, "query", whole["query"])[0]}
        pairs, gap = count(whole, "pair", whole["item"].astype(np.int64) << 32 | whole["query"].astype(np.int64) + 1)
        asked = whole["query"] >= 0  # without a query there is no pair
        return {
            "item": count(whole, "item", whole["item"])[0],
            "pair": np.where(asked[:, None, None], pairs, 0),
            "gap": np.where(asked, gap, UNSEEN),
        }

    return count_together(pieces, count_all)


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
        _scatter, calls, _count_bucket, [(key, config) for key in ("item", "query") for _ in range(buckets)]
    )


def gather(events: int, config: SearchConfig, pieces: tuple[Piece, ...]) -> Piece:
    """Counts of a part's events: `pair`, `item` (E, W, 2), `query` (E, W, 3) and `gap` (E,)."""
    windows = len(config.windows_ms)
    counts: Piece = {key: np.zeros((events, windows, len(labels)), np.int32) for key, labels in COUNTED.items()}
    counts["gap"] = np.full(events, UNSEEN, dtype=np.int64)
    fill(counts, pieces)
    return counts


def feature_names(config: SearchConfig, clock: bool) -> list[str]:
    """Names of the columns of `features`."""
    names = []
    for key, labels in COUNTED.items() if clock else ():
        for days in config.windows_days:
            names += [f"{key}_{measure}_{days:g}d" for measure in (*labels, "ctr")]
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
        for key in COUNTED:
            for number in range(len(config.windows_ms)):
                seen = counts[key][:, number].astype(np.float64)  # (E, M): exposures, clicks, ...
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
