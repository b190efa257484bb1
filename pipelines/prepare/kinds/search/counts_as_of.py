"""Counts of a search log as of a snapshot time, for served models.

    python -m jobs.prepare --counts_as_of TIME

The table has one row per item, per query, and per pair of both with an event strictly
before the snapshot time. Its features equal the features of a search at that time
(`features.py`).
Rows are exchanged once, to the bucket of their key, which writes its part.
`models/search/counts.py` reads the table.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from operator import itemgetter

import polars as pl

from core.errors import UserError, pluralize
from core.options import as_base
from core.schemas import CountsInfo, EventsInfo, ItemsInfo, counts_schema
from core.settings import SearchCounts
from core.tables import Part, Table, fingerprint, write_frame
from pipelines.prepare.kinds.search.features import counted_names, never_counted
from pipelines.prepare.kinds.search.sequences import (
    SearchBuilder,
    SearchCounter,
    read_queries,
)
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.counts import (
    Lookups,
    exchange_keys,
    split_by_kind,
    to_columns,
)

KEYS = {
    "item": ["item_index"],
    "query": ["query_index"],
    "pair": ["item_index", "query_index"],
}
"""Columns of counted events that each kind of key consists of."""


def make_counts(
    run: Run, events: Table[EventsInfo], items: Table[ItemsInfo], as_of_ms: int
) -> None:
    """Make the table of counts as of a time.

    A table as of another time is replaced, as no other table is made from it.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        events: Table of `events`.
        items: Table of `items`.
        as_of_ms: Time in epoch ms; only earlier events are counted.
    """
    config, click = run.config.search, run.config.behaviour
    assert click is not None, "a search log has a label that makes behaviours"
    as_of_time = datetime.fromtimestamp(as_of_ms / 1000, UTC)
    as_of_text = as_of_time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if as_of_ms <= events.info.first_ms:
        raise UserError(
            f"counts_as_of is {as_of_text}, and the log has no event before it"
        )
    settings = {"counts_as_of": as_of_ms, "search": asdict(config), "behaviour": click}
    inputs = {"events": events.hash, "items": items.hash}
    earlier = run.existing.get("counts")
    if earlier and earlier.fingerprint == fingerprint(settings, inputs):
        run.report(f"counts: up to date, as of {as_of_text}")
        return
    started = time.perf_counter()
    uri = run.table_uri("counts")
    builder = SearchBuilder(run.source, run.config, items.info.split)
    counter = SearchCounter(builder, as_of_ms)
    lookups = run.executor.put(Lookups(run.read_items(), read_queries(run)))
    exchange = exchange_keys(
        events.part_uris(),
        events.rows,
        counter,
        lookups,
        _write_bucket,
        (uri, counter, lookups),
    )
    buckets = sorted(run.executor.exchange(exchange), key=itemgetter(0))
    num_keys: Counter[str] = Counter()
    for _, _, keys in buckets:
        num_keys.update(keys)
    names = counted_names(config)
    names["pair"] += ["pair_gap", "pair_seen"]
    info = CountsInfo(
        as_of_ms=as_of_ms,
        features=names,
        never=never_counted(config),
        search=as_base(config, SearchCounts),
        behaviour=click,
    )
    run.commit(
        "counts",
        counts_schema(names.values()),
        [part for _, part, _ in buckets if part],
        settings,
        inputs,
        info,
    )
    run.report(
        f"counts: {pluralize(num_keys['item'], 'item')}, "
        f"{pluralize(num_keys['query'], 'query')} and "
        f"{pluralize(num_keys['pair'], 'pair')} as of {as_of_text} in "
        f"{time.perf_counter() - started:.1f} s: {uri}"
    )


def _write_bucket(
    uri: str,
    counter: SearchCounter,
    lookups: Lookups,
    bucket: int,
    exchanged: pl.DataFrame,
) -> tuple[int, Part | None, Counter[str]]:
    """Write a row per key of one bucket; return the part and the number of keys."""
    rows = split_by_kind(exchanged)
    assert lookups.queries is not None, "a search log has queries"
    ids = {"item_index": lookups.items, "query_index": lookups.queries}
    names = counted_names(counter.builder.config.search)
    names["pair"] += ["pair_gap", "pair_seen"]
    schema = counts_schema(names.values())
    frames = [pl.DataFrame(schema=pl.Schema(schema))]
    num_keys: Counter[str] = Counter()
    for kind_index, kinds in enumerate((("item", "pair"), ("query",))):
        if kind_index not in rows:
            continue
        features = counter.compute(kind_index, to_columns(rows[kind_index]))
        columns = counter.names[kind_index]
        values = pl.DataFrame(features, columns, orient="row").cast(pl.Float32)
        events = rows[kind_index].select(item_index="item", query_index="query")
        events = events.hstack(values)
        for kind in kinds:
            # all events of a key have the same features, those of the snapshot time
            keys = events.filter(pl.col(KEYS[kind][-1]) >= 0).unique(KEYS[kind])
            num_keys[kind] = keys.height
            keys = keys.sort(KEYS[kind])
            for column in KEYS[kind]:
                keys = keys.join(ids[column], on=column, maintain_order="left")
            frames.append(keys.select("^(item_id|query)$", *names[kind]))
    counts = pl.concat(frames, how="diagonal")
    part = write_frame(uri, counts, schema) if counts.height else None
    return bucket, part, num_keys
