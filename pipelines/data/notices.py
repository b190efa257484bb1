"""What may surprise in tables that are well made, a line each with its remedy, from manifests alone.

`jobs.prepare` says them last; a healthy log has none. The audit finds the same facts with code of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from models.tables import Manifest, UserError
from pipelines.data.splits import NAMES
from pipelines.data.survey import DAY

FEW_REQUESTS = 30
"""Requests of a split below which its figures are noise."""
TIED = 0.1
"""Share of requests that ties leave without a history."""
WITHOUT_HISTORY = 0.5
"""Share of training requests without a history, whatever the reason."""
DUPLICATES = 0.01
"""Share of events that repeat another."""
DROPPED = 0.5
"""Share of behaviours that the k-core leaves out."""


def notices(events: Manifest, items: Manifest, sequences: Manifest) -> list[str]:
    """The lines for these tables."""
    info = sequences.info
    found = [*_log(events, items), *_core(events, items, info), *_truncated(info)]
    if info.get("kind") == "retrieval":
        found += _histories(events, info)
    if info.get("kind") == "search":
        found += _classes(info)
    return [f"warning: {line}" for line in [*found, *_splits(info)]]


def require_training(requests: dict[str, int], truncated: dict[str, int], max_events: int, what: str) -> None:
    """UserError where nothing can be trained. `requests` per split, those that can be learned from; `what` they are;
    `truncated`: `truncated_users` and `truncated_events`."""
    if requests["train"]:
        return
    others = ", ".join(f"{requests[name]:,} {name}" for name in NAMES[1:])
    remedy = "move the cuts with --split.val_start and --split.test_start, or choose another --split.kind"
    if truncated["truncated_events"]:
        remedy = (
            f"max_events {max_events:,} has left out the oldest {truncated['truncated_events']:,} behaviours of "
            f"{truncated['truncated_users']:,} users: raise --max_events, or {remedy}"
        )
    raise UserError(f"there is no training {what} (there are {others}), so nothing can be trained; {remedy}")


def _log(events: Manifest, items: Manifest) -> Iterator[str]:
    info = events.info
    made = datetime.fromisoformat(events.created).timestamp() * 1000 if events.created else float("inf")
    if info["clock"] and info.get("last_ms", 0) > made + DAY:
        last = datetime.fromtimestamp(info["last_ms"] / 1000, UTC)
        yield f"the log runs to {last:%Y-%m-%d}, which is in the future; check time.unit and the clock of the log"
    # at the same millisecond it is one event, logged twice
    coarse = not info["clock"] or info.get("grain_ms", 1) > 1
    if coarse and info["duplicates"] > DUPLICATES * (events.rows + info["duplicates"]):
        share = info["duplicates"] / (events.rows + info["duplicates"])
        yield (
            f"{info['duplicates']:,} events ({share:.1%}) repeat another in every column and were dropped; if they are "
            f"real, such as two purchases of a day, --duplicates keep"
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


def _histories(events: Manifest, info: dict) -> Iterator[str]:
    requests, without = info["requests"], info["requests_without_history"]
    train, bare = requests["train"], without["train"]
    first = sum(without.values()) - info["users"]  # each user's first behaviour has none, whatever the ties
    said = f"{bare:,} of {train:,} training requests ({bare / max(train, 1):.0%}) have no history and train nothing"
    if info["ties"] == "strict" and first > TIED * sum(requests.values()):
        times = (
            "all times are days"
            if events.info["clock"] and events.info.get("grain_ms") == DAY
            else "many share their time"
        )
        yield (
            f"{said}: {times}, and ties are in no history; --ties log_order lets each behaviour see those before it in "
            f"the log"
        )
    elif bare > WITHOUT_HISTORY * train:
        yield f"{said}: most users have one behaviour; a longer log, or a higher --core, leaves those with more"


def _classes(info: dict) -> Iterator[str]:
    for name in NAMES:
        if info["requests"][name] and info["requests_one_class"][name] == info["requests"][name]:
            yield (
                f"all {info['requests'][name]:,} {name} requests have one class only, all results or none with "
                f"'{info['behaviour']}', so there is no GAUC; check the labels, and that results without it are in the "
                f"log"
            )


def _splits(info: dict) -> Iterator[str]:
    requests = info.get("requests") or info["events"]
    unit = "requests" if "requests" in info else "events"
    for name in NAMES[1:]:
        if not requests[name]:
            refused = ", so jobs.train cannot choose its best epoch" if name == "val" else ""
            yield f"there are no {name} {unit}{refused}; give larger split fractions, or a longer log"
        elif requests[name] < FEW_REQUESTS:
            yield f"there are only {requests[name]:,} {name} {unit}: their figures are noise; a longer log has more"
