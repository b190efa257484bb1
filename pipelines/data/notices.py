"""Warnings on valid tables with surprising figures, a line each with its remedy, from manifests alone.

`jobs.prepare` prints them last; a healthy log has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from models.storage.tables import Manifest
from pipelines.data.kinds import KINDS
from pipelines.data.sequences.splits import SPLITS

MIN_REQUESTS = 30
"""Requests of a split below which its figures are noise."""

MAX_DUPLICATES = 0.01
"""Share of events that repeat another event, above which there is a warning."""

MAX_DROPPED = 0.5
"""Share of behaviours that the k-core leaves out, above which there is a warning."""


def notices(events: Manifest, items: Manifest, sequences: Manifest) -> list[str]:
    """Return the warnings on these tables."""
    info = sequences.info
    lines = [
        *_warn_of_repeats(events, items),
        *_warn_of_core(events, items, info),
        *_warn_of_truncation(info),
        *KINDS[info["kind"]].notices(events, info),
    ]
    if not items.info.get("catalogue_of"):  # on a fresh log nothing is trained
        lines += _warn_of_splits(info)
    return [f"warning: {line}" for line in lines]


def _warn_of_repeats(events: Manifest, items: Manifest) -> Iterator[str]:
    """Yield lines on events and items that are described more than once."""
    duplicates = events.info["duplicates"]
    share = duplicates / max(events.rows + duplicates, 1)
    # At the same millisecond it is one event, logged twice.
    is_coarse = not events.info["clock"] or events.info.get("grain_ms", 1) > 1
    if is_coarse and share > MAX_DUPLICATES:
        columns = ", ".join(_columns_read(events))
        yield (
            f"{duplicates:,} events ({share:.1%}) repeat another in every column that is read ({columns}) and "
            f"were dropped; if they are real, such as two purchases of a day, --duplicates keep"
        )
    if items.info.get("metadata_differ"):
        yield (
            f"{items.info['metadata_differ']:,} rows of the item files describe an item otherwise than its first row, "
            f"which alone counts; leave one row for each item"
        )


def _columns_read(events: Manifest) -> list[str]:
    """Return the columns of events that come from the log."""
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
    """Yield a line if the k-core leaves out most behaviours."""
    behaviours = items.info.get("behaviours")
    left = info["interactions"] + info["truncated_events"]
    if items.info["core"] > 1 and behaviours and left < (1 - MAX_DROPPED) * behaviours:
        yield (
            f"the {items.info['core']}-core leaves {left:,} of {behaviours:,} behaviours, of {info['users']:,} of "
            f"{events.info['users']:,} users; a lower --core keeps more"
        )


def _warn_of_truncation(info: dict) -> Iterator[str]:
    """Yield a line if users have more than `max_events` behaviours."""
    if info["truncated_events"]:
        yield (
            f"{info['truncated_users']:,} users have more than max_events {info['max_events']:,} behaviours: their "
            f"oldest {info['truncated_events']:,} are left out, with what they asked; raise --max_events to keep them"
        )


def _warn_of_splits(info: dict) -> Iterator[str]:
    """Yield lines on empty, small and tied evaluation splits."""
    requests = info.get("requests") or info["events"]
    noun = "requests" if "requests" in info else "events"
    for name in SPLITS[1:]:
        if not requests[name]:
            effect = ""
            if name == "val":
                effect = ", so jobs.train cannot choose its best epoch"
            remedy = "give larger split fractions, or a longer log"
            if info["split"]["kind"] == "leave_last_out":
                remedy = "each user needs three for that: use --split.kind temporal where the log has clock times"
            yield f"there are no {name} {noun}{effect}; {remedy}"
            continue
        if tied := info.get("tied_targets", {}).get(name):
            yield (
                f"{tied:,} of {requests[name]:,} {name} {noun} have the time of another one of their user, such as a "
                f"basket; a hash of user, time and item decides which is held out: --split.kind temporal holds out all"
            )
        if requests[name] < MIN_REQUESTS:
            yield f"there are only {requests[name]:,} {name} {noun}: their figures are noise; a longer log has more"
    for number, of_fold in enumerate(info.get("requests_per_fold", [])[:-1], 1):
        for name in SPLITS:
            if of_fold[name] < MIN_REQUESTS:
                yield (
                    f"fold {number} has only {of_fold[name]:,} {name} {noun}; give fewer --split.folds, or a longer log"
                )
