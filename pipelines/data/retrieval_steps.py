"""The step of `jobs.prepare` that a retrieval log has of its own: `sequences`, committed when whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from models.tables import Manifest, part_uris, read_table
from pipelines.data.notices import require_training
from pipelines.data.sequences import Rules, write_sequences
from pipelines.data.splits import NAMES
from pipelines.data.tables import check_writable, commit, sequences_schema

if TYPE_CHECKING:
    from pipelines.data.prepare import _Run


def make_retrieval(
    run: _Run, events: Manifest, items: Manifest, split: dict[str, Any], made_from: list[Any], before_ms: int | None
) -> Manifest:
    """Sequences whose every behaviour is a request for itself; returns their manifest.

    made_from: what the split depends on; before_ms: the k-core counts behaviours earlier than this, None all.
    """
    config = run.config
    settings = {
        "kind": "retrieval",
        "split": config.split.settings(),
        "max_events": config.max_events,
        "core": config.core,
        "core_window": config.core_window,
        "behaviour": config.behaviour,
        "ties": config.ties,
    }
    inputs = {"events": events.hash, "items": items.hash}
    if finished := run.finished("sequences", settings, inputs):
        return finished
    begin = time.perf_counter()
    uri, schema = run.table("sequences"), run.source.schema
    rules = Rules(
        schema=schema,
        split=split,
        core=config.core,
        before_ms=before_ms,
        max_events=config.max_events,
        log_order=config.ties == "log_order",
        behaviour=config.behaviour,
    )
    catalogue = read_table(run.table("items"), "items", ["item_id"])["item_id"]
    with run.clean_on_error(uri):
        check_writable(uri)
        parts, count = write_sequences(
            part_uris(run.table("events"), events),
            uri,
            catalogue.cast("large_string").combine_chunks(),
            rules,
            run.progress("sequences"),
        )
        usable = {name: count[f"requests_{name}"] - count[f"without_history_{name}"] for name in NAMES}
        require_training(usable, count, config.max_events, "request with a history")
        info = {
            "kind": "retrieval",
            "users": count["users"],
            "interactions": count["interactions"],
            "pairs": count["pairs"],
            "items": items.rows,
            "split": split,
            "split_made_from": made_from,
            "ties": config.ties,
            "clock": events.info["clock"],
            "behaviour": config.behaviour,
            "core": config.core,
            "core_window": config.core_window,
            "max_events": config.max_events,
            "max_length": count["max_length"],
            "truncated_users": count["truncated_users"],
            "truncated_events": count["truncated_events"],
            "tied_behaviours": count["tied_rows"],
            "requests": {name: count[f"requests_{name}"] for name in NAMES},
            "requests_without_history": {name: count[f"without_history_{name}"] for name in NAMES},
            "items_hash": items.hash,
            "labels": run.source.info["labels"],
            "numbers": run.source.info["numbers"],
            "categories": run.source.info["categories"],
        }
        timings = {"build_write_s": time.perf_counter() - begin}
        sequences = commit(
            uri,
            "sequences",
            sequences_schema(schema),
            parts,
            config=settings,
            inputs=inputs,
            info=info,
            timings=timings,
        )
    run.say(f"sequences: {sequences.rows:,} users in {time.perf_counter() - begin:.1f} s")
    return sequences
