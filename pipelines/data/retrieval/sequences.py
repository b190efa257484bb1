"""The sequences table: one row per user, built from one events part at a time.

The events are sorted by user and time, so a list column is the flat column with offsets over it: nothing
is grouped and nothing is copied per request.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.config import pluralize
from models.storage.tables import Manifest, Part, UserError, part_uris, write_part
from pipelines.data.events.catalogue import surviving_rows
from pipelines.data.events.event_stats import (
    Vocabulary,
    behaviour_column,
    coded,
    count_pairs,
    counted_before,
    known_times,
    positions_in,
    read_coded,
    runs,
)
from pipelines.data.run import Run, gather_parts
from pipelines.data.schemas import sequences_schema
from pipelines.data.sequences.splits import (
    NAMES,
    assign,
    count_tied,
    require_training,
    tied_targets,
)


@dataclass(frozen=True)
class Rules:
    """What turns events into sequences."""

    schema: pa.Schema
    """Schema of the events."""
    split: dict[str, Any]
    """The split as its manifest records it: `kind`, and the cut times of a temporal one."""
    core: int
    """Behaviours that a user must have on the catalogue."""
    before_ms: int | None
    """Only behaviours earlier than this count for `core`; None for all."""
    max_events: int
    """A user's most recent behaviours that are kept."""
    log_order: bool
    """Whether tied behaviours keep the log's order, each seeing the ones before it."""
    behaviour: str | None
    """Name of a bool label that an event must have to be a behaviour."""


def build_sequences(
    events: pa.Table, catalogue: Vocabulary, rules: Rules
) -> tuple[pa.Table, Counter[str]]:
    """Sequences of one events part (sorted, ids dictionary-coded) and what was counted on the way."""
    count: Counter[str] = Counter()
    if rules.behaviour:
        events = events.filter(
            pc.fill_null(events[f"label_{rules.behaviour}"], False)
        ).combine_chunks()
    schema = sequences_schema(rules.schema)
    if not events.num_rows:
        return schema.empty_table(), count
    user = coded(events, "user_id")
    items = positions_in(
        coded(events, "item_id"), catalogue
    )  # (E,) item_index, -1 outside it
    time, known = (
        events["timestamp_ms"].to_numpy(),
        known_times(events, rules.behaviour),
    )
    codes = user.indices.to_numpy()

    # 1. Behaviours in the order in which they are known: on items of the catalogue, by users who stay, the most recent
    # of each.
    late = not np.array_equal(time, known)
    user_rank = np.cumsum(np.append(0, codes[1:] != codes[:-1]))
    rows = np.lexsort((known, user_rank)) if late else np.arange(len(items))
    inside = items >= 0
    if late or not inside.all():
        rows = rows[inside[rows]]
        items, time, known, codes = items[rows], time[rows], known[rows], codes[rows]
    start = runs(codes)
    counted = None if rules.before_ms is None else known < rules.before_ms
    stays = surviving_rows(items, None, start, counted, max(rules.core, 1))
    if (
        counted is not None
    ):  # a user who stays keeps the behaviours outside the window too
        lengths = np.diff(np.append(start, len(items)))
        stays = (
            np.repeat(np.logical_or.reduceat(stays, start), lengths)
            if len(start)
            else stays
        )
    length = np.diff(np.append(start, len(items)))
    end = np.repeat(start + length, length)
    recent = end - np.arange(len(items)) <= rules.max_events
    keep = stays & recent
    count["truncated_users"] = (
        int((length[stays[start]] > rules.max_events).sum()) if len(start) else 0
    )
    count["truncated_events"] = int((stays & ~recent).sum())
    if not keep.all():
        rows, items, time, known, codes = (
            column[keep] for column in (rows, items, time, known, codes)
        )
    if not len(rows):
        return schema.empty_table(), count

    # 2. Requests, one for each behaviour, in the order of time; their histories are what is known strictly before.
    start = runs(codes)
    length = np.diff(np.append(start, len(rows)))
    here = np.arange(len(rows))
    user_begin = np.repeat(start, length)
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (known[1:] != known[:-1]) | (codes[1:] != codes[:-1])
    tie_begin = np.maximum.accumulate(np.where(new, here, 0))
    history_end = ((here if rules.log_order else tie_begin) - user_begin).astype(
        np.int32
    )
    asks = here
    if late:
        asks = np.argsort(rows)  # rows of events are in the order of user and time
        history_end = counted_before(user_begin, known, user_begin, time[asks]).astype(
            np.int32
        )
    drawn = rules.split["kind"] == "leave_last_out" and not rules.log_order
    item_ids = coded(events, "item_id").take(pa.array(rows[asks]))
    ids = (pa.DictionaryArray.from_arrays(codes[asks], user.dictionary), item_ids)
    split = assign(rules.split, time[asks], start, ids if drawn else None)
    if drawn:
        for name, tied in count_tied(split, time[asks], start).items():
            count[f"tied_targets_{name}"] = tied

    # 3. List columns: offsets over the flat columns.
    whole = len(rows) == events.num_rows and not late
    offsets = pa.array(np.append(start, len(rows)).astype(np.int32))

    def listed(values: pa.Array, field: pa.Field) -> pa.Array:
        return pa.ListArray.from_arrays(
            offsets, values.cast(field.type.value_type), type=field.type
        )

    def column(name: str) -> pa.Array:
        flat = events[name].combine_chunks()
        flat = flat.chunk(0) if isinstance(flat, pa.ChunkedArray) else flat
        return flat if whole else flat.take(pa.array(rows))

    item_array, time_array = pa.array(items, pa.int32()), pa.array(time, pa.int64())
    one_each = pa.array(np.arange(len(rows) + 1, dtype=np.int32))
    request_type = schema.field("requests").type.value_type
    split_names = pa.DictionaryArray.from_arrays(pa.array(split), pa.array(NAMES)).cast(
        pa.string()
    )
    query = column("query")
    asked = [
        array.take(pa.array(asks)) if late else array
        for array in (time_array, query, item_array)
    ]
    requests = pa.StructArray.from_arrays(
        [
            asked[0],
            asked[1],
            pa.array(history_end),
            split_names,
            pa.ListArray.from_arrays(one_each, asked[2]),
        ],
        fields=list(request_type),
    )
    flat = {
        "item_index": item_array,
        "timestamp_ms": time_array,
        "query": query,
        "requests": requests,
    }
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(codes[start]), user.dictionary).cast(
            pa.string()
        )
    ]
    for field in list(schema)[1:]:
        columns.append(
            listed(
                flat[field.name] if field.name in flat else column(field.name), field
            )
        )

    has_history = history_end > 0
    count.update(users=len(start), interactions=len(rows), tied_rows=int((~new).sum()))
    count["pairs"] = count_pairs(codes, items)
    count["max_length"] = int(length.max())
    for code, name in enumerate(NAMES):
        count[f"requests_{name}"] = int((split == code).sum())
        count[f"without_history_{name}"] = int(((split == code) & ~has_history).sum())
    return pa.Table.from_arrays(columns, schema=schema), count


def _write_part(
    sequences_uri: str, catalogue: Vocabulary, rules: Rules, uri: str
) -> tuple[Part | None, Counter[str], None]:
    names = [
        name for name in rules.schema.names if name not in ("request_id", "position")
    ]
    columns = list(dict.fromkeys([*names, *behaviour_column(rules.behaviour)]))
    table, count = build_sequences(read_coded(uri, columns), catalogue, rules)
    return (write_part(sequences_uri, table) if table.num_rows else None), count, None


def make_retrieval(
    run: Run, events: Manifest, items: Manifest, split: dict[str, Any]
) -> Manifest:
    """Sequences whose every behaviour is a request for itself; returns their manifest."""
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
    uri, schema = run.table("sequences"), sequences_schema(run.source.schema)
    rules = Rules(
        schema=run.source.schema,
        split=split,
        core=config.core,
        before_ms=run.before_ms(split),
        max_events=config.max_events,
        log_order=config.ties == "log_order",
        behaviour=config.behaviour,
    )
    with run.writing("sequences"):
        calls = [(source,) for source in part_uris(run.table("events"), events)]
        shared = (uri, run.catalogue(), rules)
        results = run.engine.each(_write_part, calls, shared)
        parts, count, _ = gather_parts(results, len(calls), run.progress("sequences"))
        usable = {
            name: count[f"requests_{name}"] - count[f"without_history_{name}"]
            for name in NAMES
        }
        if config.catalogue is None:  # a fresh log may be of test alone
            tied = count["tied_rows"] if config.ties == "strict" else 0
            require_training(
                usable,
                count,
                config.max_events,
                "request with a history",
                split["kind"],
                tied,
            )
        elif not count["users"]:
            raise UserError(
                f"no user has {max(config.core, 1)} behaviours on the catalogue of {config.catalogue}; use --core 0"
            )
        info = {
            **run.sequences_info(events, items, split, count),
            **tied_targets(count),
            "requests": {name: count[f"requests_{name}"] for name in NAMES},
            "requests_without_history": {
                name: count[f"without_history_{name}"] for name in NAMES
            },
        }
        seconds = time.perf_counter() - begin
        sequences = run.commit(
            "sequences", schema, parts, settings, inputs, info, build_write_s=seconds
        )
    run.say(
        f"sequences: {pluralize(sequences.rows, 'user')} in {time.perf_counter() - begin:.1f} s"
    )
    return sequences
