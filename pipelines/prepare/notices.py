"""Warnings about valid but unusual tables, computed from their manifests.

`jobs.prepare` prints them at its end, one line each.
"""

from __future__ import annotations

from core.schemas import EventsInfo, ItemsInfo, SequencesInfo
from core.tables import Table
from pipelines.prepare.kinds.registry import KINDS
from pipelines.prepare.sequences.splits import SPLITS

MIN_REQUESTS = 30
"""Number of requests below which the metrics of a split are considered noise."""

MAX_DUPLICATES = 0.01
"""Share of duplicate events above which a warning is printed."""


def collect_warnings(
    events: Table[EventsInfo],
    items: Table[ItemsInfo],
    sequences: Table[SequencesInfo],
) -> list[str]:
    """Return the warnings about the tables with these manifests."""
    info = sequences.info
    lines = []
    duplicates = events.info.duplicates
    # Equal events at one millisecond are one event that was logged twice.
    is_coarse = not events.info.log.clock or events.info.grain_ms > 1
    if is_coarse and duplicates > MAX_DUPLICATES * (events.rows + duplicates):
        lines.append(f"{duplicates:,} equal events were dropped (duplicates: drop)")
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
    lines += KINDS[info.kind].warn(info)
    # no model is trained on a log with the catalogue of other tables
    if not items.info.catalogue_of:
        requests = info.requests
        tied = getattr(info, "tied_targets", {})
        for name in SPLITS[1:]:
            if requests[name] < MIN_REQUESTS:
                lines.append(f"there are only {requests[name]:,} {name} requests")
            if tied.get(name):
                lines.append(
                    f"{tied[name]:,} of {requests[name]:,} {name} requests have the "
                    f"time of another of their user; a hash decides which is held out"
                )
    return [f"warning: {line}" for line in lines]
