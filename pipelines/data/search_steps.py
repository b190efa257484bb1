"""The steps of `jobs.prepare` that a search log has of its own: `queries` and `sequences`, committed when whole."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from models.tables import Manifest, UserError, part_uris, read_table
from pipelines.data.notices import require_training
from pipelines.data.prepare_config import bool_labels
from pipelines.data.search import SearchRules, write_queries, write_search
from pipelines.data.search_config import MINUTE_MS
from pipelines.data.splits import NAMES
from pipelines.data.tables import QUERIES, check_writable, commit

if TYPE_CHECKING:
    from pipelines.data.prepare import _Run


def make_queries(run: _Run, events: Manifest) -> Manifest:
    """The table of distinct queries."""
    inputs = {"events": events.hash}
    if finished := run.finished("queries", {}, inputs):
        return finished
    begin, uri = time.perf_counter(), run.table("queries")
    with run.clean_on_error(uri):
        check_writable(uri)
        parts, queries = write_queries(part_uris(run.table("events"), events), uri)
        manifest = commit(uri, "queries", QUERIES, parts, config={}, inputs=inputs)
    run.say(f"queries: {len(queries):,} distinct in {time.perf_counter() - begin:.1f} s")
    return manifest


def make_search(run: _Run, events: Manifest, items: Manifest, split: dict[str, Any], made_from: list[Any]) -> Manifest:
    """Queries and sequences of a search log; returns the manifest of the sequences."""
    config, source = run.config, run.source
    queries = make_queries(run, events)
    settings = {
        "kind": "search",
        "split": config.split.settings(),
        "max_events": config.max_events,
        "core_window": config.core_window,
        "behaviour": config.behaviour,
        "search": asdict(config.search),
    }
    inputs = {"events": events.hash, "items": items.hash, "queries": queries.hash}
    if finished := run.finished("sequences", settings, inputs):
        return finished
    begin, uri = time.perf_counter(), run.table("sequences")
    rules = SearchRules(
        schema=source.schema,
        split=split,
        max_events=config.max_events,
        labels=bool_labels(source, config.behaviour),
        clock=events.info["clock"],
        search=config.search,
    )
    catalogue = read_table(run.table("items"), "items", ["item_id"])["item_id"].cast("large_string").combine_chunks()
    texts = pa.array([], pa.large_string())
    if queries.rows:
        texts = read_table(run.table("queries"), "queries")["query"].cast("large_string").combine_chunks()
    with run.clean_on_error(uri):
        check_writable(uri)
        parts, count = write_search(
            part_uris(run.table("events"), events), uri, catalogue, texts, rules, run.progress("sequences")
        )
        if not parts:
            raise UserError(
                f"no request shows an item of the catalogue: {count['requests_outside']:,} are outside it; "
                f"use --core_window all"
            )
        per_split = {
            name: {split: count[f"{short}_{split}"] for split in NAMES}
            for name, short in (
                ("requests", "requests"),
                ("candidates", "candidates"),
                ("requests_one_class", "one_class"),
                ("requests_without_history", "without_history"),
            )
        }
        require_training(per_split["requests"], count, config.max_events, "request")
        info = {
            "kind": "search",
            "users": count["users"],
            "interactions": count["interactions"],
            "pairs": count["pairs"],
            "items": items.rows,
            "queries": queries.rows,
            "split": split,
            "split_made_from": made_from,
            "ties": config.ties,
            "clock": rules.clock,
            "behaviour": config.behaviour,
            "labels": rules.labels,
            "features": rules.features,
            "windows": [f"{days:g}d" for days in config.search.windows_days] if rules.windowed else [],
            "search": asdict(config.search),
            "core": config.core,
            "core_window": config.core_window,
            "max_events": config.max_events,
            "max_length": count["max_length"],
            "max_candidates": count["max_candidates"],
            "truncated_users": count["truncated_users"],
            "truncated_events": count["truncated_events"],
            "tied_behaviours": count["tied_rows"],
            **per_split,
            "requests_outside": count["requests_outside"],
            "candidates_outside": count["candidates_outside"],
            "requests_truncated": count["requests_truncated"],
            "requests_without_query": count["requests_without_query"],
            "requests_spread": count["requests_spread"],
            "max_request_spread_ms": count["max_spread_ms"],
            "items_hash": items.hash,
            "queries_hash": queries.hash,
            "numbers": source.info["numbers"],
            "categories": source.info["categories"],
        }
        sequences = commit(
            uri,
            "sequences",
            rules.output,
            parts,
            config=settings,
            inputs=inputs,
            info=info,
            timings={"build_write_s": time.perf_counter() - begin},
        )
    one_class = sum(per_split["requests_one_class"].values())
    run.say(
        f"sequences: {sequences.rows:,} users, {sum(per_split['requests'].values()):,} requests with "
        f"{sum(per_split['candidates'].values()):,} candidates and {len(rules.features)} features in "
        f"{time.perf_counter() - begin:.1f} s; left out: {count['requests_outside']:,} requests and "
        f"{count['candidates_outside']:,} candidates outside the catalogue, {count['requests_truncated']:,} requests "
        f"older than the kept behaviours; {one_class:,} requests have one class only"
    )
    if count["requests_spread"]:
        apart = count["max_spread_ms"]
        run.say(
            f"note: the results of {count['requests_spread']:,} requests have times of their own, up to "
            + (f"{apart / MINUTE_MS:,.2f} minutes" if rules.clock else f"{apart:,} places")
            + " apart; a request's time is that of its earliest result"
        )
    return sequences
