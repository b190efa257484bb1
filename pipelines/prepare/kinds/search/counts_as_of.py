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
from typing import Any

import polars as pl
import pyarrow as pa

from core.errors import UserError, pluralize
from core.options import as_base
from core.schemas import (
    CountsInfo,
    EventsInfo,
    ItemsInfo,
    SearchCounts,
    counts_schema,
)
from core.tables import Part, Table, fingerprint, write_part
from pipelines.prepare.kinds.search.features import counted_names, never_counted
from pipelines.prepare.kinds.search.sequences import SearchBuilder, SearchCounter
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.counts import exchange_keys, split_by_kind, to_columns
from pipelines.prepare.sequences.lookups import (
    Lookups,
    read_catalogue,
    read_vocabulary,
)

KEYS = {"item": ["item"], "query": ["query"], "pair": ["item", "query"]}
"""Columns of counted events that each kind of key consists of."""

TABLE_COLUMNS = {"item": "item_id", "query": "query"}
"""Column of the table for each column of a key."""


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
    earlier = run.tables.existing.get("counts")
    if earlier and earlier.fingerprint == fingerprint(settings, inputs):
        run.report(f"counts: up to date, as of {as_of_text}")
        return
    started = time.perf_counter()
    uri = run.tables.table_uri("counts")
    builder = SearchBuilder(run.source, run.config, items.info.split)
    counter = SearchCounter(builder, as_of_ms)
    queries = read_vocabulary(run, "queries", "query")
    lookups = run.executor.put(Lookups(read_catalogue(run), queries))
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
    run.tables.commit(
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
    exchanged: pa.Table,
) -> tuple[int, Part | None, Counter[str]]:
    """Write a row per key of one bucket; return the part and the number of keys."""
    rows = split_by_kind(exchanged)
    vocabularies: dict[str, Any] = {"item": lookups.catalogue, "query": lookups.queries}
    names = counted_names(counter.builder.config.search)
    names["pair"] += ["pair_gap", "pair_seen"]
    schema = counts_schema(names.values())
    tables: list[pa.Table] = []
    num_keys: Counter[str] = Counter()
    for kind_index, kinds in enumerate((("item", "pair"), ("query",))):
        if kind_index not in rows:
            continue
        features = counter.compute(kind_index, to_columns(rows[kind_index]))
        columns = counter.names[kind_index]
        values = pl.DataFrame(features, columns, orient="row").cast(pl.Float32)
        events = rows[kind_index].select("item", "query").hstack(values)
        for kind in kinds:
            # all events of a key have the same features, those of the snapshot time
            keys = events.filter(pl.col(KEYS[kind][-1]) >= 0).unique(KEYS[kind])
            keys = keys.sort(KEYS[kind])
            table = keys.select(names[kind]).to_arrow()
            for column in KEYS[kind]:
                ids = vocabularies[column].ids_at(keys[column].to_numpy())
                ids = ids.cast(pa.string())
                table = table.append_column(TABLE_COLUMNS[column], ids)
            tables.append(table)
            num_keys[kind] = keys.height
    if not tables:
        return bucket, None, num_keys
    # columns of other kinds of key are null
    table = pa.concat_tables([schema.empty_table(), *tables], promote_options="default")
    return bucket, write_part(uri, table), num_keys
