"""The content of statistics.json: sizes of a dataset, and counts of dropped rows.

`collect_warnings` warns about valid but unusual tables.

`users`, `items`, `interactions`, `sparsity` (the share of (user, item) pairs without an
interaction) and `mean_length` are the columns of Tables 10 and 13 of the SID-MLP paper.
The branching per digit of its Table 7 is in the manifest of `trie`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import polars as pl

from core.schemas import EventsInfo, ItemsInfo, SequencesInfo
from core.splits import SPLITS
from core.tables import Table, read_parquet
from pipelines.prepare.kinds.registry import KINDS

MAX_ASCENDING = 0.6
"""Share of adjacent behaviours with ascending items above which a line is printed. Half
of them ascend by chance."""

MIN_STEPS = 1000
"""Number of adjacent behaviours below which their order is considered noise."""


def summarise(
    events: Table[EventsInfo],
    items: Table[ItemsInfo],
    sequences: Table[SequencesInfo],
) -> dict[str, Any]:
    """Return the statistics of a dataset from the manifests of its tables."""
    info = sequences.info
    users, interactions = info.users, info.interactions
    statistics = {
        "users": users,
        "items": items.rows,
        "interactions": interactions,
        "sparsity": round(1 - info.pairs / (users * items.rows), 6),
        "mean_length": round(interactions / users, 4),
        "max_length": info.max_length,
        "split": {k: value for k, value in asdict(items.info.split).items() if value},
    }
    for name in ("requests", *KINDS[info.kind].statistics):
        value = getattr(info, name)
        if isinstance(value, dict) and value.keys() == {*SPLITS}:
            # the same bytes for computed and reloaded counts
            value = {split: value[split] for split in SPLITS}
        statistics[name] = value
    return {
        **statistics,
        "tied_behaviours": info.tied_behaviours,
        "truncated_users": info.truncated_users,
        "truncated_events": info.truncated_events,
        "core": items.info.core,
        "core_window": items.info.core_window,
        "behaviour": info.behaviour,
        "ties": info.ties,
        "clock": info.log.clock,
        "raw": {
            "rows_read": events.info.rows_read,
            "rows_left_out": events.info.rows_left_out,
            "rejects": events.info.rejects,
            "reject_reasons": events.info.reject_reasons,
            "duplicates": events.info.duplicates,
            "events": events.rows,
            "users": events.info.users,
            "items": items.info.items_before_core,
            "items_dropped": items.info.dropped_items,
            "items_without_metadata": items.info.items_without_metadata,
            "metadata_outside_catalogue": items.info.metadata_outside_catalogue,
        },
        "hashes": {
            "events": events.hash,
            "items": items.hash,
            "sequences": sequences.hash,
        },
    }


def collect_warnings(
    items: Table[ItemsInfo], sequences: Table[SequencesInfo]
) -> list[str]:
    """Return the warnings about the tables with these manifests."""
    info = sequences.info
    lines = []
    if items.info.metadata_differ:
        lines.append(
            f"{items.info.metadata_differ:,} rows of the item files differ from the "
            f"first row of their item and were ignored"
        )
    if info.truncated_events:
        lines.append(
            f"the oldest {info.truncated_events:,} behaviours of "
            f"{info.truncated_users:,} users, over max_events "
            f"{info.max_events:,}, were dropped"
        )
    lines += describe_id_order(sequences)
    tied = getattr(info, "tied_targets", {})
    for name in SPLITS[1:]:
        if tied.get(name):
            lines.append(
                f"{tied[name]:,} {name} requests have the time of another of their "
                f"user; a hash decides which is held out"
            )
    return [f"warning: {line}" for line in lines]


def describe_id_order(sequences: Table[SequencesInfo]) -> list[str]:
    """Return a line if items ascend by id in a log without clock times.

    Histories are those of the first part of `sequences`, and ids are in the order of
    `item_index`.
    """
    if sequences.info.log.clock:
        return []
    part = read_parquet(sequences.part_uris()[0], ["item_index"])
    steps = pl.Series(part["item_index"]).list.diff(null_behavior="drop").explode()
    steps = steps.filter(steps != 0)
    share = (steps > 0).sum() / max(1, len(steps))
    if len(steps) < MIN_STEPS or share <= MAX_ASCENDING:
        return []
    return [
        f"{share:.0%} of adjacent behaviours have ascending item ids, 50% "
        "where the order is real: ties seem to be broken by id, and models that know "
        "the order are rewarded for it"
    ]
