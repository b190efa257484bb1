"""Features of what a search shows: counts of the pair of query and item, of the item and of the query, place and time.

Impressions and clicks of all users count. Rows travel twice: to the bucket of their item, which serves the pairs too,
and to that of their query. Counts are as of the request's time, that of its earliest result, so a search never counts
for itself.

Shapes: E events, W windows, M labels that are counted, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from models.search.counts import HOURS, hours
from pipelines.data.events.event_stats import (
    coded,
    known_column,
    known_times,
    positions_in,
    read_coded,
)
from pipelines.data.reading.durations import HOUR_MS
from pipelines.data.search.config import SearchConfig
from pipelines.data.search.requests import requests_of
from pipelines.data.sequences.counts import (
    UNSEEN,
    Columns,
    Windows,
    count_key,
    fill,
    side_by_side,
)

IDS = ("user_id", "item_id", "request_id", "query")
SHOWN = ("exposures", "clicks")
COUNTED = {"pair": SHOWN, "item": SHOWN, "query": (*SHOWN, "searches")}
"""What is counted, by key."""


@dataclass(frozen=True)
class SearchWindows(Windows):
    """Counts by item, with their pairs, and then by query."""

    config: SearchConfig
    label: str
    """Of clicks."""
    late: bool = False
    """Whether events say when it is known."""
    moment: int | None = None
    """In ms: counts are as of then, of what is before it; None: as of each event's request."""

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:  # type: ignore[override]
        windows = len(self.config.windows_ms)
        of = {key: (windows, len(labels)) for key, labels in COUNTED.items()}
        return [
            {"item": of["item"], "pair": of["pair"], "gap": ()},
            {"query": of["query"]},
        ]

    def keyed(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        catalogue, queries = shared
        events = read_coded(
            uri,
            [
                *IDS,
                "timestamp_ms",
                f"label_{self.label}",
                *known_column(self.label, self.late),
            ],
            IDS,
        )
        item = positions_in(coded(events, "item_id"), catalogue)
        query = positions_in(coded(events, "query"), queries)
        requests, time = (
            requests_of(events, query, self.config, clock=True),
            events["timestamp_ms"].to_numpy(),
        )
        searches = np.zeros(len(item), dtype=bool)
        searches[requests.first] = True
        columns = {
            "item": item,
            "query": query,
            "time": time,
            "as_of": time[requests.earliest]
            if self.moment is None
            else np.full(len(time), self.moment),
            "clicks": pc.fill_null(
                events[f"label_{self.label}"].combine_chunks(), False
            ).to_numpy(zero_copy_only=False),
            "searches": searches,
            **({"known": known_times(events, self.label)} if self.late else {}),
        }
        before = True if self.moment is None else time < self.moment
        return [np.where(before, key, -1) for key in (item, query)], columns

    def count(self, number: int, rows: Columns) -> Columns:
        windows = self.config.windows_ms, self.config.delay_ms
        rows = {**rows, "exposures": np.ones(len(rows["row"]), dtype=bool)}

        def counted_labels(names: tuple[str, ...]) -> np.ndarray:
            return np.stack([rows[name].astype(np.int32) for name in names], axis=1)

        def count(of: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Counts (E, W, M) of the key `of` and its gap (E,)."""
            names, as_of = COUNTED[of], rows["as_of"]
            counts, gap = count_key(
                values, rows["time"], counted_labels(names), *windows, as_of
            )
            if "known" in rows:  # a click counts from when it is known
                clicks = counted_labels(("clicks",))
                late = count_key(values, rows["known"], clicks, *windows, as_of)[0]
                counts[:, :, names.index("clicks")] = late[:, :, 0]
            return counts, gap

        if number == 1:
            return {"query": count("query", rows["query"])[0]}
        pairs, gap = count(
            "pair",
            rows["item"].astype(np.int64) << 32 | rows["query"].astype(np.int64) + 1,
        )
        asked = rows["query"] >= 0  # without a query there is no pair
        return {
            "item": count("item", rows["item"])[0],
            "pair": np.where(asked[:, None, None], pairs, 0),
            "gap": np.where(asked, gap, UNSEEN),
        }


def gather(events: int, config: SearchConfig, pieces: list[Columns]) -> Columns:
    """Counts of a part's events: `pair`, `item` (E, W, 2), `query` (E, W, 3) and `gap` (E,)."""
    windows = len(config.windows_ms)
    counts: Columns = {
        key: np.zeros((events, windows, len(labels)), np.int32)
        for key, labels in COUNTED.items()
    }
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
    return names + (list(HOURS) if clock else [])


def features(
    counts: dict[str, np.ndarray] | None,
    position: np.ndarray,
    time: np.ndarray,
    config: SearchConfig,
    clock: bool,
) -> np.ndarray:
    """(E, F) float32 in the order of `feature_names`: what a model reads, all of small size and none missing.

    time (E,) ms is that of each event's request. Counts, the gap in hours, position and page are log(1 + value);
    rates are smoothed; a pair that was not shown before has gap 0 and `pair_seen` 0. Hour and weekday are of UTC.
    """
    columns: list[np.ndarray] = []
    if counts is not None:
        for key in COUNTED:
            for number in range(len(config.windows_ms)):
                seen = counts[key][:, number].astype(
                    np.float64
                )  # (E, M): exposures, clicks, ...
                rate = (seen[:, 1] + config.ctr_prior * config.ctr_strength) / (
                    seen[:, 0] + config.ctr_strength
                )
                columns += [*np.log1p(seen).T, rate]
        gap = counts["gap"]
        columns += [np.log1p(gap.clip(0) / HOUR_MS), gap >= 0]
    columns += [
        np.log1p(position.clip(0)),
        np.log1p(position.clip(0) // config.page_size),
    ]
    columns += list(hours(time).T) if clock else []
    return side_by_side(columns)
