"""Features of search results: counts of item, query and pair, position and time.

Impressions and clicks of all users count. Each event is exchanged twice: to the bucket
of its item, where pairs are counted too, and to the bucket of its query. Counts are as
of the request's time, the time of its earliest result, so a search never counts
itself. `feature_groups` groups the features for HFG-Attention.

Counts, the gap in hours, position and page are log(1 + value); rates are smoothed. A
pair that was not shown before has gap 0 and `pair_seen` 0. Hour and weekday are in UTC.
No value is missing.

Shapes: E events, W windows, M counted labels, F features.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import polars as pl

from core.schemas import FeatureGroup
from core.splits import HOUR_MS
from models.search.counts import HOURS, time_features
from pipelines.prepare.sequences.counts import (
    NO_GAP,
    Columns,
    count_features,
    window_counts,
)
from pipelines.prepare.sequences.custom_features import plain_name
from pipelines.prepare.settings.config import SearchConfig

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


def counted_names(config: SearchConfig) -> dict[str, list[str]]:
    """Return the names of the counted features by kind of key."""
    return {
        key: config.name_features(key, [*labels, "ctr"])
        for key, labels in COUNTED.items()
    }


def feature_names(config: SearchConfig, has_clock_times: bool) -> list[str]:
    """Return the names of the features, without counts if times are no clock times."""
    names = list(SHOWN_FEATURES)
    if has_clock_times:
        names += HOURS
        if config.windows_days:
            counted = chain.from_iterable(counted_names(config).values())
            names = [*counted, *QUERY_FEATURES, *names]
    return names


def context_features(
    events: pl.DataFrame, config: SearchConfig, has_clock_times: bool
) -> np.ndarray:
    """Return the features (E, 2 or 6) of position and, with clock times, of `as_of`."""
    position = events["position"].to_numpy().clip(0)
    columns = [np.log1p(position), np.log1p(position // config.page_size)]
    if has_clock_times:
        columns += list(time_features(events["as_of"].to_numpy()).T)
    return np.stack([column.astype(np.float32) for column in columns], axis=1)


def count_keys(kind_index: int, rows: Columns, config: SearchConfig) -> np.ndarray:
    """Count the events of some items, with their pairs, or of some queries.

    An event without a query has no pair: its counts are 0, its gap is NO_GAP.

    Args:
        kind_index: 0 for items, QUERY_KIND for queries.
        rows: Columns `item`, `query`, `time`, `known`, `as_of`, `click` and
            `is_search` (E,) of all events with the keys.
        config: Settings of the features.

    Returns:
        The features (E, F): of pairs, items, and the gaps of pairs, or of queries.
    """

    def count(key: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the features (E, W * (M + 1)) of a key's counts, and the gap (E,)."""
        one, click = np.ones(len(key), np.int32), rows["click"].astype(np.int32)
        flags = [one, click, rows["is_search"].astype(np.int32)][: len(COUNTED[kind])]
        windows, delay, as_of = config.windows_ms, config.delay_ms, rows["as_of"]
        labels = np.stack(flags, axis=1)
        counts, gap = window_counts(key, rows["time"], labels, windows, delay, as_of)
        if not np.array_equal(rows["known"], rows["time"]):
            # a click counts from the time at which it is known
            late, _ = window_counts(
                key, rows["known"], click[:, None], windows, delay, as_of
            )
            counts[:, :, 1] = late[:, :, 0]
        return counts, gap

    def rate(counts: np.ndarray) -> np.ndarray:
        return count_features(counts, 1, config.ctr_prior, config.ctr_strength)

    item, query = rows["item"], rows["query"]
    if kind_index == QUERY_KIND:
        return rate(count(query, "query")[0])
    pair, gap = count(item.astype(np.int64) << 32 | query.astype(np.int64) + 1, "pair")
    pair[query < 0] = 0
    gap[query < 0] = NO_GAP
    seen = np.stack([np.log1p(gap.clip(0) / HOUR_MS), gap >= 0], axis=1)
    return np.hstack([rate(pair), rate(count(item, "item")[0]), seen])


def never_counted(config: SearchConfig) -> dict[str, float]:
    """Return the counted features of keys without events, by name."""
    values = dict.fromkeys(QUERY_FEATURES, 0.0)
    for kind, names in counted_names(config).items():
        counts = np.zeros((1, len(config.windows_ms), len(COUNTED[kind])), np.int32)
        features = count_features(counts, 1, config.ctr_prior, config.ctr_strength)
        values |= dict(zip(names, features[0].astype(np.float32).tolist(), strict=True))
    return values


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
