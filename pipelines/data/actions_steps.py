"""The step of `jobs.prepare` that a log of actions has of its own: `sequences`, committed when whole."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import ray

from models.tables import Manifest, part_uris, read_table
from pipelines.data.actions import ActionsRules, drop_constants, write_actions
from pipelines.data.actions_config import ITEM, USER
from pipelines.data.notices import require_training
from pipelines.data.prepare_config import check_actions
from pipelines.data.splits import NAMES
from pipelines.data.tables import check_writable, commit

if TYPE_CHECKING:
    from pipelines.data.prepare import _Run


def attribute_codes(run: _Run, names: list[str]) -> dict[str, np.ndarray]:
    """(I,) int32 per attribute of items: a code for each value, -1 where the item has none."""
    if not names:
        return {}
    items = read_table(run.table("items"), "items", [f"cat_{name}" for name in names])
    return {
        name: pc.fill_null(items[f"cat_{name}"].combine_chunks().dictionary_encode().indices, -1).to_numpy()
        for name in names
    }


def make_actions(run: _Run, events: Manifest, items: Manifest, split: dict[str, Any], made_from: list[Any]) -> Manifest:
    """The sequences of a log of actions; returns their manifest."""
    config, source = run.config, run.source
    settings = {
        "kind": "actions",
        "split": config.split.settings(),
        "max_events": config.max_events,
        "core_window": config.core_window,
        "actions": asdict(config.actions),
        "candidates_counted_at": "cut",  # tables of earlier code, which counted at each candidate's time, are not these
    }
    inputs = {"events": events.hash, "items": items.hash}
    if finished := run.finished("sequences", settings, inputs):
        return finished
    begin, uri = time.perf_counter(), run.table("sequences")
    parts = part_uris(run.table("events"), events)
    ids = read_table(run.table("items"), "items", ["item_id"])["item_id"].cast("large_string").combine_chunks()
    catalogue = ray.put(ids)
    rules = ActionsRules(source.schema, split, config.split.shares, config.max_events, check_actions(source, config))
    rules, dropped, viewers = drop_constants(parts, catalogue, rules)
    for name, reason in dropped.items():
        run.say(f"dropped: {name} is {reason}, so there is nothing to learn of it")
    attributes = attribute_codes(run, [name for name in rules.actions.counts.keys if name not in (USER, ITEM)])
    with run.clean_on_error(uri):
        check_writable(uri)
        written, count, scale = write_actions(parts, uri, catalogue, attributes, rules, run.progress("sequences"))
        events_in = {name: count[f"events_{name}"] for name in NAMES}
        require_training(events_in, count, config.max_events, "event")
        info = {
            "kind": "actions",
            "users": count["users"],
            "interactions": count["interactions"],
            "pairs": count["pairs"],
            "items": items.rows,
            "tasks": list(rules.actions.tasks),
            "actions": list(rules.actions.inputs),
            "features": rules.actions.features,
            "viewers": viewers,
            "feature_mean": scale[0].tolist(),
            "feature_std": scale[1].tolist(),
            "base_rates": {name: count[f"positives_{name}"] / count["events_train"] for name in rules.actions.tasks},
            "definitions": asdict(rules.actions),
            "dropped": dropped,
            "val_start_ms": split["val_start_ms"],
            "test_start_ms": split["test_start_ms"],
            "split": split,
            "split_made_from": made_from,
            "ties": config.ties,
            "clock": events.info["clock"],
            "behaviour": None,
            "core": config.core,
            "core_window": config.core_window,
            "max_events": config.max_events,
            "max_length": count["max_length"],
            "truncated_users": count["truncated_users"],
            "truncated_events": count["truncated_events"],
            "tied_behaviours": count["tied_rows"],
            "events": events_in,
            "users_with_candidates": {name: count[f"users_{name}"] for name in NAMES},
            "users_with_context": {name: count[f"with_context_{name}"] for name in NAMES},
            "users_without_context": {name: count[f"users_{name}"] - count[f"with_context_{name}"] for name in NAMES},
            "events_without_context": {name: count[f"events_without_context_{name}"] for name in NAMES},
            "events_outside": count["outside"],
            "items_hash": items.hash,
            "labels": source.info["labels"],
            "numbers": source.info["numbers"],
            "categories": source.info["categories"],
        }
        sequences = commit(
            uri,
            "sequences",
            rules.output,
            written,
            config=settings,
            inputs=inputs,
            info=info,
            timings={"build_write_s": time.perf_counter() - begin},
        )
    run.say(
        f"sequences: {sequences.rows:,} users, {len(info['tasks'])} tasks, {len(info['actions'])} actions and "
        f"{len(info['features'])} features in {time.perf_counter() - begin:.1f} s; {count['outside']:,} events outside "
        f"the catalogue left out, {count['tied_rows']:,} share their millisecond with the one before"
    )
    for name in NAMES[1:]:
        run.say(
            f"{name}: {count[f'users_{name}']:,} users with {count[f'events_{name}']:,} candidates, "
            f"{info['users_without_context'][name]:,} of them without context"
        )
    run.say("base rates: " + ", ".join(f"{name} {rate:.4f}" for name, rate in info["base_rates"].items()))
    return sequences
