"""Features of what a search shows: counts of item, query and their pair, position and time; and their groups.

Impressions and clicks of all users count. Rows travel twice: to the bucket of their
item, which serves the pairs too, and to the bucket of their query. Counts are as of the
request's time, that of its earliest result, so a search never counts for itself.

Shapes: E events, W windows, M labels that are counted, F features.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.config import check_known
from models.search.counts import HOURS, hours
from pipelines.data.events.columns import (
    bool_column,
    dictionary_column,
    index_in,
    known_columns,
    known_times,
    read_part,
)
from pipelines.data.reading.durations import HOUR_MS
from pipelines.data.search.config import SearchConfig
from pipelines.data.search.requests import find_requests
from pipelines.data.sequences.counts import (
    NO_GAP,
    Columns,
    KeyCounter,
    smooth_rates,
    stack_columns,
    window_counts,
)
from pipelines.data.sequences.own_features import plain_name

IDS = ("user_id", "item_id", "request_id", "query")
IMPRESSION_LABELS = ("exposures", "clicks")
COUNTED = {
    "pair": IMPRESSION_LABELS,
    "item": IMPRESSION_LABELS,
    "query": (*IMPRESSION_LABELS, "searches"),
}
"""Counted labels by kind of key."""

QUERY_KEY = 1
"""Number of the key `query`; key 0 is the item, which serves the pairs too."""

GROUPS = {"pair": "cross", "item": "document", "query": "query"}
"""Default groups of counts by kind of key (Sec. 3.1 of QGS)."""

QUERY_FEATURES = ("pair_gap", "pair_seen")
"""Features of a pair that belong to the group of the query."""

SHOWN_FEATURES = ["position", "page"]
"""Features that are known once a result was shown."""

CONTEXT_GROUP = "context"
"""Default group of position and time."""


@dataclass(frozen=True)
class SearchCounter(KeyCounter):
    """Counts by item, with their pairs, and then by query."""

    config: SearchConfig
    click: str
    """Label of clicks."""
    late: bool = False
    """Whether events have a `known_*` column of that label."""
    moment: int | None = None
    """Time in ms as of which all rows are counted; None: as of each event's request."""

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:  # type: ignore[override]
        windows = len(self.config.windows_ms)
        pair, item, query = (
            (windows, len(COUNTED[kind])) for kind in ("pair", "item", "query")
        )
        return [{"item": item, "pair": pair, "gap": ()}, {"query": query}]

    def read_keys(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        catalogue, queries = shared
        late = known_columns(self.click, self.late)
        names = [*IDS, "timestamp_ms", f"label_{self.click}", *late]
        events = read_part(uri, names, IDS)
        item = index_in(dictionary_column(events, "item_id"), catalogue)
        query = index_in(dictionary_column(events, "query"), queries)
        requests = find_requests(events, query, self.config, clock=True)
        time = events["timestamp_ms"].to_numpy()
        is_search = np.zeros(len(item), dtype=bool)
        is_search[requests.first] = True
        columns = {
            "item": item,
            "query": query,
            "time": time,
            "as_of": time[requests.earliest],
            "clicks": bool_column(events, f"label_{self.click}"),
            "searches": is_search,
        }
        if self.late:
            columns["known"] = known_times(events, self.click)
        if self.moment is None:
            return [item, query], columns
        columns["as_of"] = np.full(len(time), self.moment)
        is_before = time < self.moment
        return [np.where(is_before, key, -1) for key in (item, query)], columns

    def count(self, key_number: int, rows: Columns) -> Columns:
        rows = {**rows, "exposures": np.ones(len(rows["row"]), dtype=bool)}
        item, query = rows["item"], rows["query"]
        if key_number == QUERY_KEY:
            return {"query": self._count("query", query, rows)[0]}
        pair_key = item.astype(np.int64) << 32 | query.astype(np.int64) + 1
        pair, gap = self._count("pair", pair_key, rows)
        has_query = query >= 0  # without a query there is no pair
        return {
            "item": self._count("item", item, rows)[0],
            "pair": np.where(has_query[:, None, None], pair, 0),
            "gap": np.where(has_query, gap, NO_GAP),
        }

    def _count(
        self, kind: str, key: np.ndarray, rows: Columns
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (E, W, M) counts and (E,) gaps of a kind of key."""
        windows = self.config.windows_ms, self.config.delay_ms
        names, as_of = COUNTED[kind], rows["as_of"]
        labels = _stack_labels(rows, names)
        counts, gap = window_counts(key, rows["time"], labels, *windows, as_of)
        if "known" in rows:  # a click counts from when it is known
            clicks = _stack_labels(rows, ("clicks",))
            late, _ = window_counts(key, rows["known"], clicks, *windows, as_of)
            counts[:, :, names.index("clicks")] = late[:, :, 0]
        return counts, gap


def _stack_labels(rows: Columns, names: tuple[str, ...]) -> np.ndarray:
    return np.stack([rows[name].astype(np.int32) for name in names], axis=1)


def feature_names(config: SearchConfig, clock: bool) -> list[str]:
    """Return the names of the columns of `features`, for a log with or without clock times."""
    names = []
    if clock:
        for key, labels in COUNTED.items():
            for days in config.windows_days:
                names += [f"{key}_{measure}_{days:g}d" for measure in (*labels, "ctr")]
        if config.windows_days:
            names += ["pair_gap", "pair_seen"]
    names += SHOWN_FEATURES
    if clock:
        names += HOURS
    return names


def features(
    counts: Columns | None,
    position: np.ndarray,
    time: np.ndarray,
    config: SearchConfig,
    clock: bool,
) -> np.ndarray:
    """Return (E, F) float32 features in the order of `feature_names`: small numbers, none missing.

    Counts, the gap in hours, position and page are log(1 + value); rates are smoothed.
    A pair that was not shown before has gap 0 and `pair_seen` 0. Hour and weekday are
    in UTC.

    Args:
        counts: `gather_counts` of the events; None without windows.
        position: (E,) rank shown, from 0.
        time: (E,) ms of each event's request.
        config: Settings of search logs.
        clock: Whether times are clock times.
    """
    columns: list[np.ndarray] = []
    if counts is not None:
        for key in COUNTED:
            for number in range(len(config.windows_ms)):
                # (E, M): exposures, clicks, ...
                count = counts[key][:, number].astype(np.float64)
                rate = smooth_rates(
                    count[:, 1], count[:, 0], config.ctr_prior, config.ctr_strength
                )
                columns += [*np.log1p(count).T, rate]
        gap = counts["gap"]
        columns += [np.log1p(gap.clip(0) / HOUR_MS), gap >= 0]
    position = position.clip(0)
    columns += [np.log1p(position), np.log1p(position // config.page_size)]
    if clock:
        columns += list(hours(time).T)
    return stack_columns(columns)


def feature_groups(
    config: SearchConfig, names: list[str], own: dict[str, str]
) -> list[dict[str, Any]]:
    """Return the groups of features that HFG-Attention turns into tokens, without empty groups.

    Args:
        config: Settings with the groups that the source file declares, which come
            first.
        names: Names of `feature_names`.
        own: Default group by column of custom features.

    Returns:
        `name` and `features` of each group.

    Raises:
        UserError: for a declared feature that does not exist.
    """
    declared: dict[str, str] = {}
    for group, members in config.groups.items():
        declared |= dict.fromkeys(members, group)
    check_known(
        declared,
        [*names, *map(plain_name, own)],
        lambda name, near: (
            f"search.groups has '{name}', which is no feature of the log; the nearest is '{near}'"
        ),
    )
    order = (*config.groups, *GROUPS.values(), CONTEXT_GROUP, *own.values())
    groups: dict[str, list[str]] = {name: [] for name in order}
    for name in names:
        default = GROUPS.get(name.split("_")[0], CONTEXT_GROUP)
        if name in QUERY_FEATURES:
            default = GROUPS["query"]
        groups[declared.get(name, default)].append(name)
    for name, default in own.items():
        groups[declared.get(plain_name(name), default)].append(name)
    return [
        {"name": name, "features": members}
        for name, members in groups.items()
        if members
    ]


def unknown_features(config: SearchConfig, own: Collection[str]) -> list[str]:
    """Return the features that are unknown when a result is ranked: its position, and declared custom features.

    `own` are the columns of custom features.

    Raises:
        UserError: for a declared feature that does not exist.
    """
    check_known(
        config.unknown_when_ranking,
        list(map(plain_name, own)),
        lambda name, near: (
            f"search.unknown_when_ranking has '{name}', which is no feature of the log's own; the nearest is '{near}'"
        ),
    )
    declared = [name for name in own if plain_name(name) in config.unknown_when_ranking]
    return [*SHOWN_FEATURES, *declared]
