"""What may surprise in tables that are well made, a line each with its remedy, from manifests alone.

`jobs.prepare` says them last; a healthy log has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from models.storage.tables import Manifest
from pipelines.data.kinds import KINDS
from pipelines.data.sequences.splits import NAMES

FEW_REQUESTS = 30
"""Requests of a split below which its figures are noise."""
DUPLICATES = 0.01
"""Share of events that repeat another."""
DROPPED = 0.5
"""Share of behaviours that the k-core leaves out."""


def notices(events: Manifest, items: Manifest, sequences: Manifest) -> list[str]:
    """The lines for these tables."""
    info = sequences.info
    found = [*_log(events, items), *_core(events, items, info), *_truncated(info)]
    found += KINDS[info["kind"]].notices(events, info)
    if not items.info.get("catalogue_of"):  # on a fresh log nothing is trained
        found += _splits(info)
    return [f"warning: {line}" for line in found]


def _log(events: Manifest, items: Manifest) -> Iterator[str]:
    info = events.info
    # at the same millisecond it is one event, logged twice
    coarse = not info["clock"] or info.get("grain_ms", 1) > 1
    if coarse and info["duplicates"] > DUPLICATES * (events.rows + info["duplicates"]):
        share = info["duplicates"] / (events.rows + info["duplicates"])
        source = events.config["source"]
        unset = [
            ("query", ["query"]),
            ("request_id", ["request", "explode"]),
            ("position", ["position", "explode"]),
        ]
        unread = [
            name for name, keys in unset if not any(source.get(key) for key in keys)
        ]
        read = ", ".join(
            column["name"] for column in events.schema if column["name"] not in unread
        )
        yield (
            f"{info['duplicates']:,} events ({share:.1%}) repeat another in every column that is read ({read}) and "
            f"were dropped; if they are real, such as two purchases of a day, --duplicates keep"
        )
    if items.info.get("metadata_differ"):
        yield (
            f"{items.info['metadata_differ']:,} rows of the item files describe an item otherwise than its first row, "
            f"which alone counts; leave one row for each item"
        )


def _core(events: Manifest, items: Manifest, info: dict) -> Iterator[str]:
    behaviours = items.info.get("behaviours")
    left = info["interactions"] + info["truncated_events"]
    if items.info["core"] > 1 and behaviours and left < (1 - DROPPED) * behaviours:
        yield (
            f"the {items.info['core']}-core leaves {left:,} of {behaviours:,} behaviours, of {info['users']:,} of "
            f"{events.info['users']:,} users; a lower --core keeps more"
        )


def _truncated(info: dict) -> Iterator[str]:
    if info["truncated_events"]:
        yield (
            f"{info['truncated_users']:,} users have more than max_events {info['max_events']:,} behaviours: their "
            f"oldest {info['truncated_events']:,} are left out, with what they asked; raise --max_events to keep them"
        )


def _splits(info: dict) -> Iterator[str]:
    requests = info.get("requests") or info["events"]
    unit = "requests" if "requests" in info else "events"
    for name in NAMES[1:]:
        if not requests[name]:
            refused = (
                ", so jobs.train cannot choose its best epoch" if name == "val" else ""
            )
            remedy = "give larger split fractions, or a longer log"
            if info["split"]["kind"] == "leave_last_out":
                remedy = "each user needs three for that: use --split.kind temporal where the log has clock times"
            yield f"there are no {name} {unit}{refused}; {remedy}"
            continue
        if tied := info.get("tied_targets", {}).get(name):
            yield (
                f"{tied:,} of {requests[name]:,} {name} {unit} have the time of another one of their user, such as a "
                f"basket; a hash of user, time and item decides which is held out: --split.kind temporal holds out all"
            )
        if requests[name] < FEW_REQUESTS:
            yield f"there are only {requests[name]:,} {name} {unit}: their figures are noise; a longer log has more"
