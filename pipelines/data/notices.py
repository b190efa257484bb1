"""Warnings about valid but unusual tables, computed from their manifests.

`jobs.prepare` prints them at its end, one line each with a remedy.
"""

from __future__ import annotations

from collections.abc import Iterator

from models.storage.tables import Manifest
from pipelines.data.kinds import KINDS
from pipelines.data.sequences.splits import SPLITS

MIN_REQUESTS = 30
"""Number of requests below which the metrics of a split are considered noise."""

MAX_DUPLICATES = 0.01
"""Share of duplicate events above which a warning is printed."""

MAX_DROPPED = 0.5
"""Share of behaviours dropped by the k-core above which a warning is printed."""


def collect_warnings(
    events: Manifest, items: Manifest, sequences: Manifest
) -> list[str]:
    """Return the warnings about the tables with these manifests."""
    info = sequences.info
    lines = [
        *_warn_of_repeats(events, items),
        *_warn_of_core(events, items, info),
        *_warn_of_truncation(info),
        *KINDS[info["kind"]].warn(events, info),
    ]
    # no model is trained on a log with the catalogue of other tables
    if not items.info.get("catalogue_of"):
        lines += _warn_of_splits(info)
    return [f"warning: {line}" for line in lines]


def _warn_of_repeats(events: Manifest, items: Manifest) -> Iterator[str]:
    """Yield warnings about duplicate events and repeated rows of items."""
    duplicates = events.info["duplicates"]
    share = duplicates / max(events.rows + duplicates, 1)
    # Equal events at one millisecond are one event that was logged twice.
    is_coarse = not events.info["clock"] or events.info.get("grain_ms", 1) > 1
    if is_coarse and share > MAX_DUPLICATES:
        columns = ", ".join(_list_log_columns(events))
        yield (
            f"{duplicates:,} events ({share:.1%}) repeat another in every column that "
            f"is read ({columns}) and were dropped; if they are real, such as two "
            f"purchases of a day, pass --duplicates keep"
        )
    if items.info.get("metadata_differ"):
        yield (
            f"{items.info['metadata_differ']:,} rows of the item files differ from the "
            f"first row of their item and were ignored; keep one row per item"
        )


def _list_log_columns(events: Manifest) -> list[str]:
    """Return the columns of events that the log provides."""
    source = events.config["source"]
    origins = {
        "query": ["query"],
        "request_id": ["request", "explode"],
        "position": ["position", "explode"],
    }
    unread = {
        name
        for name, keys in origins.items()
        if not any(source.get(key) for key in keys)
    }
    names = [column["name"] for column in events.schema]
    return [name for name in names if name not in unread]


def _warn_of_core(events: Manifest, items: Manifest, info: dict) -> Iterator[str]:
    """Yield a warning if the k-core drops most behaviours."""
    core, behaviours = items.info["core"], items.info.get("behaviours")
    in_core = info["interactions"] + info["truncated_events"]
    if core > 1 and behaviours and in_core < (1 - MAX_DROPPED) * behaviours:
        yield (
            f"the {core}-core keeps only {in_core:,} of {behaviours:,} behaviours and "
            f"{info['users']:,} of {events.info['users']:,} users; a lower --core "
            f"keeps more"
        )


def _warn_of_truncation(info: dict) -> Iterator[str]:
    """Yield a warning if users have more than `max_events` behaviours."""
    if info["truncated_events"]:
        yield (
            f"{info['truncated_users']:,} users have more than max_events "
            f"{info['max_events']:,} behaviours: the oldest "
            f"{info['truncated_events']:,} and their requests were dropped; raise "
            f"--max_events to keep them"
        )


def _warn_of_splits(info: dict) -> Iterator[str]:
    """Yield warnings about empty, small and tied evaluation splits."""
    requests = info.get("requests") or info["events"]
    noun = "requests" if "requests" in info else "events"
    for name in SPLITS[1:]:
        if not requests[name]:
            effect = ""
            if name == "val":
                effect = ", so jobs.train cannot choose its best epoch"
            remedy = "use larger split fractions or a longer log"
            if info["split"]["kind"] == "leave_last_out":
                remedy = (
                    "leave_last_out needs three per user; use --split.kind temporal "
                    "if the log has clock times"
                )
            yield f"there are no {name} {noun}{effect}; {remedy}"
            continue
        if tied := info.get("tied_targets", {}).get(name):
            yield (
                f"{tied:,} of {requests[name]:,} {name} {noun} have the same time as "
                f"another of their user, such as items of a basket; a hash of user, "
                f"time and item decides which is held out; --split.kind temporal holds "
                f"out all of them"
            )
        if requests[name] < MIN_REQUESTS:
            yield (
                f"there are only {requests[name]:,} {name} {noun}: metrics on them "
                f"are noise; use a longer log"
            )
