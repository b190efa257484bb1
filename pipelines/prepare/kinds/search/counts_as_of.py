"""Counts of a search log as of a snapshot time, for served models.

    python -m jobs.prepare --counts_as_of TIME

The table has one row per item, per query, and per pair of both with an event strictly
before the snapshot time. Its features equal the features of a search at that time
(`features.py`).
Rows are exchanged once, to the bucket of their key, which writes its part.
`models/search/counts.py` reads the table.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import UserError, pluralize
from core.schemas import CountsInfo, counts_schema
from core.tables import (
    Part,
    Table,
    fingerprint,
    write_part,
)
from pipelines.prepare.events.columns import Vocabulary
from pipelines.prepare.kinds.search.config import SearchConfig
from pipelines.prepare.kinds.search.features import (
    COUNTED,
    SearchCounter,
    feature_names,
    features,
)
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.counts import (
    NO_GAP,
    Columns,
    export_counts,
    to_columns,
)

KEY_COLUMNS = {"item": ["item"], "query": ["query"], "pair": ["item", "query"]}
"""Columns of counted events that each kind of key consists of."""

TABLE_COLUMNS = {"item": "item_id", "query": "query"}
"""Column of the table for each column of a key."""


def make_counts(run: Run, events: Table, items: Table, as_of_ms: int) -> None:
    """Make the table of counts as of a time.

    A table as of another time is replaced, as no other table is made from it.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        events: Table of `events`.
        items: Table of `items`.
        as_of_ms: Time in epoch ms; only earlier events are counted.
    """
    config, click = run.config.kind_config, run.config.behaviour
    assert click is not None, "a search log has a label that makes behaviours"
    as_of_time = datetime.fromtimestamp(as_of_ms / 1000, UTC)
    as_of_text = as_of_time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if as_of_ms <= events.info.first_ms:
        raise UserError(
            f"counts_as_of is {as_of_text}, and the log has no event before it"
        )
    settings = {
        "counts_as_of": as_of_ms,
        "search": asdict(config),
        "behaviour": click,
    }
    inputs = {"events": events.hash, "items": items.hash}
    uri = run.tables.table_uri("counts")
    earlier = run.tables.existing.get("counts")
    if earlier and earlier.fingerprint == fingerprint(settings, inputs):
        run.report(f"counts: up to date, as of {as_of_text}")
        return
    started = time.perf_counter()
    is_late = f"known_{click}" in run.source.schema.names
    counter = SearchCounter(config, click, is_late, as_of_ms)
    with run.tables.clean_up_on_error("counts"):
        queries = run.tables.read_vocabulary("queries", "query")
        vocabularies = run.tables.read_catalogue(), queries
        results = export_counts(
            run.executor,
            events.part_uris(),
            events.rows,
            counter,
            vocabularies,
            _write_bucket,
            (uri, counter, *vocabularies),
        )
        buckets = [bucket for _, bucket in sorted(results, key=itemgetter(0))]
        num_keys: Counter[str] = Counter()
        for bucket in buckets:
            num_keys.update(bucket.num_keys)
        parts = [bucket.part for bucket in buckets if bucket.part]
        names = features_by_key(config)
        # counted features of a key without events
        never = compute_features({"gap": np.full(1, NO_GAP)}, config)
        info = CountsInfo(
            as_of_ms=as_of_ms,
            features={key: list(features) for key, features in names.items()},
            never={
                name: float(never[name][0])
                for name in itertools.chain.from_iterable(names.values())
            },
            search=asdict(config),
            behaviour=click,
        )
        schema = counts_schema(names.values())
        seconds = time.perf_counter() - started
        run.tables.commit(
            "counts", schema, parts, settings, inputs, info, count_write_s=seconds
        )
    run.report(
        f"counts: {pluralize(num_keys['item'], 'item')}, "
        f"{pluralize(num_keys['query'], 'query')} and "
        f"{pluralize(num_keys['pair'], 'pair')} as of {as_of_text} in "
        f"{time.perf_counter() - started:.1f} s: {uri}"
    )


def features_by_key(config: SearchConfig) -> dict[str, list[str]]:
    """Return the names of the counted features, by kind of key."""
    names = feature_names(config, has_clock_times=True)
    return {
        kind: [name for name in names if name.split("_")[0] == kind] for kind in COUNTED
    }


def compute_features(counts: Columns, config: SearchConfig) -> dict[str, np.ndarray]:
    """Compute features from the counts of some kinds of key.

    Args:
        counts: Counts (n, W, M) by kind of key, and the `gap` (n,) of pairs. Kinds that
            are missing count as zero.
        config: Settings of the features.

    Returns:
        The features (n,) by name.
    """
    num_rows = len(next(iter(counts.values())))
    all_counts: Columns = {
        kind: np.zeros((num_rows, len(config.windows_ms), len(labels)), np.int32)
        for kind, labels in COUNTED.items()
    }
    all_counts["gap"] = np.full(num_rows, NO_GAP)
    all_counts |= counts
    zeros = np.zeros(num_rows, np.int64)  # positions and times do not matter
    values = features(all_counts, zeros, zeros, config, has_clock_times=True)
    return dict(zip(feature_names(config, has_clock_times=True), values.T, strict=True))


@dataclass(frozen=True)
class WrittenBucket:
    """The part of one bucket of keys."""

    part: Part | None
    """The part, or None if the bucket has no keys."""
    num_keys: Counter[str]
    """Number of keys, which have a row each, by kind."""


def _write_bucket(
    uri: str,
    counter: SearchCounter,
    catalogue: Vocabulary,
    queries: Vocabulary,
    bucket: int,
    rows: pa.Table,
) -> WrittenBucket:
    """Count the events of one bucket, and write a row per key."""
    tables: list[pa.Table] = []
    num_keys: Counter[str] = Counter()
    vocabularies = {"item": catalogue, "query": queries}
    for kind_index, shapes in enumerate(counter.shapes):
        events = to_columns(rows.filter(pc.equal(rows["kind_index"], kind_index)))
        if not len(events["row"]):
            continue
        counts = counter.count(kind_index, events)
        for kind in shapes:
            if kind in COUNTED:  # not the gap of pairs
                table = key_rows(kind, counts, events, vocabularies, counter.config)
                tables.append(table)
                num_keys[kind] = len(table)
    part = write_part(uri, pa.concat_tables(tables)) if tables else None
    return WrittenBucket(part, num_keys)


def key_rows(
    kind: str,
    counts: Columns,
    events: Columns,
    vocabularies: dict[str, Vocabulary],
    config: SearchConfig,
) -> pa.Table:
    """Return the table's rows of one kind of key: ids and features of each key.

    Args:
        kind: Kind of key: `item`, `query` or `pair`.
        counts: Counts (E, W, M) of the events by kind, and the `gap` (E,) of pairs.
        events: Columns `item` and `query` (E,): indices into `vocabularies`, -1 without
            a query.
        vocabularies: Ids of items and texts of queries.
        config: Settings of the features.
    """
    key_columns = KEY_COLUMNS[kind]
    code = np.zeros(len(events["row"]), np.int64)
    for name in key_columns:
        code = code << 32 | events[name]
    first_event = np.unique(code, return_index=True)[1]  # (keys,)
    first_event = first_event[code[first_event] >= 0]  # a query of -1 makes no key
    names = [kind, "gap"] if kind == "pair" else [kind]
    key_counts = {name: counts[name][first_event] for name in names}
    features_by_name = compute_features(key_counts, config)
    columns = {name: features_by_name[name] for name in features_by_key(config)[kind]}
    for name in key_columns:
        ids = vocabularies[name].ids_at(events[name][first_event])
        columns[TABLE_COLUMNS[name]] = ids.cast(pa.string())
    schema = counts_schema(features_by_key(config).values())
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(columns[field.name])
        else:
            arrays.append(pa.nulls(len(first_event), field.type))
    return pa.table(arrays, names=schema.names).cast(schema)
