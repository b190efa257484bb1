"""Features of search results: counts of item, query and pair, position and time.

Impressions and clicks of all users count. Each event is exchanged twice: to the bucket
of its item, where pairs are counted too, and to the bucket of its query. Counts are as
of the request's time, the time of its earliest result, so a search never counts
itself. `feature_groups` groups the features for HFG-Attention.

Shapes: E events, W windows, M counted labels, F features.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from core.options import check_known
from core.schemas import FeatureGroup
from models.search.counts import HOURS, time_features
from pipelines.prepare.events.columns import (
    bool_column,
    dictionary_column,
    encode_ids,
    known_columns,
    known_times,
    read_part,
)
from pipelines.prepare.kinds.search.config import SearchConfig
from pipelines.prepare.kinds.search.requests import find_requests
from pipelines.prepare.reading.durations import HOUR_MS
from pipelines.prepare.sequences.counts import (
    NO_GAP,
    Columns,
    KeyCounter,
    smooth_rates,
    stack_columns,
    window_counts,
)
from pipelines.prepare.sequences.custom_features import plain_name

IDS = ("user_id", "item_id", "request_id", "query")
IMPRESSION_LABELS = ("exposures", "clicks")
COUNTED = {
    "pair": IMPRESSION_LABELS,
    "item": IMPRESSION_LABELS,
    "query": (*IMPRESSION_LABELS, "searches"),
}
"""Counted labels by kind of key."""

QUERY_KIND = 1
"""Index of the kind of key `query`. Index 0 is the item; pairs are counted with it."""

GROUPS = {"pair": "cross", "item": "document", "query": "query"}
"""Default groups of counts by kind of key (Sec. 3.1 of QGS)."""

QUERY_FEATURES = ("pair_gap", "pair_seen")
"""Features of a pair that belong to the group of the query."""

SHOWN_FEATURES = ["position", "page"]
"""Features that are unknown until a result is shown."""

CONTEXT_GROUP = "context"
"""Default group of position and time."""


@dataclass(frozen=True)
class SearchCounter(KeyCounter):
    """Counts items and pairs by the key `item`, and queries by the key `query`."""

    config: SearchConfig
    """Windows, delay and smoothing of the counts."""
    click: str
    """Label of clicks."""
    is_late: bool = False
    """Whether clicks may become known later than their event: events have the column
    `known_CLICK`."""
    as_of_ms: int | None = None
    """Time in ms as of which all events are counted; None: the time of their
    request."""

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:  # type: ignore[override]
        """The shapes (W, M) of the counts per event; the gap of a pair is a number."""
        num_windows = len(self.config.windows_ms)
        shapes = {kind: (num_windows, len(labels)) for kind, labels in COUNTED.items()}
        return [
            {"item": shapes["item"], "pair": shapes["pair"], "gap": ()},
            {"query": shapes["query"]},
        ]

    def read_keys(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        """Read the items, queries, times and labels of a part's events.

        `shared` are the `Vocabulary` of items and of queries. Events from `as_of_ms` on
        get the key -1 and are not counted.
        """
        catalogue, queries = shared
        late_columns = known_columns(self.click, self.is_late)
        names = [*IDS, "timestamp_ms", f"label_{self.click}", *late_columns]
        events = read_part(uri, names, IDS)
        item = encode_ids(dictionary_column(events, "item_id"), catalogue)
        query = encode_ids(dictionary_column(events, "query"), queries)
        requests = find_requests(events, query, self.config, has_clock_times=True)
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
        if self.is_late:
            columns["known"] = known_times(events, self.click)
        if self.as_of_ms is None:
            return [item, query], columns
        columns["as_of"] = np.full(len(time), self.as_of_ms)
        is_before = time < self.as_of_ms
        return [np.where(is_before, key, -1) for key in (item, query)], columns

    def count(self, kind_index: int, rows: Columns) -> Columns:
        """Return the counts (E, W, M) of items and pairs, or of queries.

        Pairs also have a gap (E,) in ms since they were last shown. An event without a
        query has no pair: its counts are 0, its gap is NO_GAP.
        """
        rows = {**rows, "exposures": np.ones(len(rows["row"]), dtype=bool)}
        item, query = rows["item"], rows["query"]
        if kind_index == QUERY_KIND:
            return {"query": self._count("query", query, rows)[0]}
        pair_key = item.astype(np.int64) << 32 | query.astype(np.int64) + 1
        pair, gap = self._count("pair", pair_key, rows)
        has_query = query >= 0
        return {
            "item": self._count("item", item, rows)[0],
            "pair": np.where(has_query[:, None, None], pair, 0),
            "gap": np.where(has_query, gap, NO_GAP),
        }

    def _count(
        self, kind: str, key: np.ndarray, rows: Columns
    ) -> tuple[np.ndarray, np.ndarray]:
        """Count the labels of one kind of key."""
        windows, delay = self.config.windows_ms, self.config.delay_ms
        labels, as_of = COUNTED[kind], rows["as_of"]
        flags = _stack_labels(rows, labels)
        counts, gap = window_counts(key, rows["time"], flags, windows, delay, as_of)
        if "known" in rows:  # a click counts from the time at which it is known
            clicks = _stack_labels(rows, ("clicks",))
            late_counts, _ = window_counts(
                key, rows["known"], clicks, windows, delay, as_of
            )
            counts[:, :, labels.index("clicks")] = late_counts[:, :, 0]
        return counts, gap


def _stack_labels(rows: Columns, names: tuple[str, ...]) -> np.ndarray:
    """Return the labels (E, len(names)) int32."""
    return np.stack([rows[name].astype(np.int32) for name in names], axis=1)


def feature_names(config: SearchConfig, has_clock_times: bool) -> list[str]:
    """Return the names of the columns that `features` computes.

    Without clock times there are no counts.
    """
    names = []
    if has_clock_times:
        for key, labels in COUNTED.items():
            for days in config.windows_days:
                names += [f"{key}_{measure}_{days:g}d" for measure in (*labels, "ctr")]
        if config.windows_days:
            names += ["pair_gap", "pair_seen"]
    names += SHOWN_FEATURES
    if has_clock_times:
        names += HOURS
    return names


def features(
    counts: Columns | None,
    position: np.ndarray,
    time: np.ndarray,
    config: SearchConfig,
    has_clock_times: bool,
) -> np.ndarray:
    """Compute the features (E, F) float32, in the order of `feature_names`.

    Counts, the gap in hours, position and page are log(1 + value); rates are smoothed.
    A pair that was not shown before has gap 0 and `pair_seen` 0. Hour and weekday are
    in UTC. No value is missing.

    Args:
        counts: Counts (E, W, M) by kind of key, and the `gap` (E,) in ms of pairs; None
            without windows.
        position: Rank (E,) at which a result is shown, from 0.
        time: Time (E,) in ms of each event's request.
        config: Settings of the features.
        has_clock_times: Whether times are clock times.
    """
    columns: list[np.ndarray] = []
    if counts is not None:
        for key in COUNTED:
            for window in range(len(config.windows_ms)):
                # (E, M): exposures, clicks, ...
                count = counts[key][:, window].astype(np.float64)
                rate = smooth_rates(
                    count[:, 1], count[:, 0], config.ctr_prior, config.ctr_strength
                )
                columns += [*np.log1p(count).T, rate]
        gap = counts["gap"]
        columns += [np.log1p(gap.clip(0) / HOUR_MS), gap >= 0]
    position = position.clip(0)
    columns += [np.log1p(position), np.log1p(position // config.page_size)]
    if has_clock_times:
        columns += list(time_features(time).T)
    return stack_columns(columns)


def feature_groups(
    config: SearchConfig, names: list[str], custom_groups: dict[str, str]
) -> list[FeatureGroup]:
    """Group the features that HFG-Attention turns into tokens; no group is empty.

    Args:
        config: Settings with the groups that the source file declares, which come
            first.
        names: Names of `feature_names`.
        custom_groups: Default group of each column of custom features.

    """
    declared_group: dict[str, str] = {}
    for group, members in config.groups.items():
        declared_group |= dict.fromkeys(members, group)
    order = (*config.groups, *GROUPS.values(), CONTEXT_GROUP, *custom_groups.values())
    groups: dict[str, list[str]] = {name: [] for name in order}
    for name in names:
        default = GROUPS.get(name.split("_")[0], CONTEXT_GROUP)
        if name in QUERY_FEATURES:
            default = GROUPS["query"]
        groups[declared_group.get(name, default)].append(name)
    for column, default in custom_groups.items():
        group = declared_group.get(plain_name(column), default)
        groups[group].append(column)
    return [FeatureGroup(name, members) for name, members in groups.items() if members]


def check_feature_names(
    config: SearchConfig, names: Iterable[str], custom_columns: Iterable[str]
) -> None:
    """Check the features that the source file declares by name.

    Args:
        config: Settings of the source file.
        names: Names of `feature_names`.
        custom_columns: Columns of all custom features.
    """
    custom_names = [plain_name(column) for column in custom_columns]
    unknown = config.unknown_when_ranking
    check_known(unknown, custom_names, "search.unknown_when_ranking")
    grouped = chain.from_iterable(config.groups.values())
    check_known(grouped, [*names, *custom_names], "search.groups")


def features_unknown_when_ranking(
    config: SearchConfig, custom_columns: Collection[str]
) -> list[str]:
    """Return the features that are unknown when a result is ranked.

    The features are the position, the page, and the custom features that the source
    file declares in `unknown_when_ranking`.

    Args:
        config: Settings of the source file.
        custom_columns: Columns of all custom features.
    """
    declared = config.unknown_when_ranking
    unknown = [name for name in custom_columns if plain_name(name) in declared]
    return [*SHOWN_FEATURES, *unknown]
