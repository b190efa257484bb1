"""Counts of a search log as of a moment, for served models: `python -m jobs.prepare --counts_as_of TIME`.

One row per item, query and pair of both that has an event strictly before the moment.
The counts, and the features that are computed from them, equal those of a search at
that moment (`features.py`). Rows travel once, to the bucket of their key, which writes
its part. `models/search/counts.py` reads the table.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.config import pluralize
from models.storage.tables import (
    Manifest,
    Part,
    UserError,
    fingerprint,
    part_uris,
    up_to_date,
    write_part,
)
from pipelines.data.events.columns import Vocabulary
from pipelines.data.run import Run
from pipelines.data.schemas import counts_schema
from pipelines.data.search.config import SearchConfig
from pipelines.data.search.features import (
    COUNTED,
    SearchCounter,
    feature_names,
    features,
)
from pipelines.data.sequences.counts import (
    NO_GAP,
    Columns,
    export_counts,
    to_columns,
)

KEY_COLUMNS = {"item": ["item"], "query": ["query"], "pair": ["item", "query"]}
"""Columns of ids by kind of key."""

TABLE_COLUMNS = {"item": "item_id", "query": "query"}
"""Columns of the table with the ids."""


def make_counts(run: Run, events: Manifest, items: Manifest, moment: int) -> None:
    """Make the table of counts as of `moment`, in ms.

    A table of another moment is replaced, as nothing is made from it.

    Raises:
        UserError: if the log has no event before the moment.
    """
    config, click = run.config, run.config.behaviour
    assert click is not None, "a search log has a label that makes behaviours"
    shown = _format_moment(moment)
    if moment <= events.info["first_ms"]:
        raise UserError(
            f"counts_as_of is {shown}, and the log has no event before it; give a later time"
        )
    settings = {
        "counts_as_of": moment,
        "search": asdict(config.own),
        "behaviour": click,
    }
    inputs, uri = (
        {"events": events.hash, "items": items.hash},
        run.tables.table_uri("counts"),
    )
    if not run.tables.overwrite and up_to_date(uri, fingerprint(settings, inputs)):
        run.report(f"counts: up to date, as of {shown}")
        return
    begin = time.perf_counter()
    is_late = f"known_{click}" in run.source.schema.names
    counter = SearchCounter(config.own, click, is_late, moment)
    with run.tables.clean_up_on_error("counts"):
        parts, count = _write_buckets(run, events, counter)
        names = features_by_key(config.own)
        default = compute_features({"gap": np.full(1, NO_GAP)}, config.own)
        info: dict[str, Any] = {
            "as_of_ms": moment,
            "features": names,
            "never": {
                name: float(default[name][0])
                for group in names.values()
                for name in group
            },
            "search": asdict(config.own),
            "behaviour": click,
            **count,
        }
        schema = counts_schema(names.values())
        seconds = time.perf_counter() - begin
        run.tables.commit(
            "counts", schema, parts, settings, inputs, info, count_write_s=seconds
        )
    run.report(
        f"counts: {pluralize(count['item'], 'item')}, {pluralize(count['query'], 'query')} and "
        f"{pluralize(count['pair'], 'pair')} as of {shown} in "
        f"{time.perf_counter() - begin:.1f} s: {uri}"
    )


def _format_moment(moment: int) -> str:
    """Return a moment in ms as ISO 8601 in UTC."""
    text = datetime.fromtimestamp(moment / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def features_by_key(config: SearchConfig) -> dict[str, list[str]]:
    """Return the names of the counted features by kind of key."""
    names = feature_names(config, clock=True)
    return {
        kind: [name for name in names if name.split("_")[0] == kind] for kind in COUNTED
    }


def compute_features(counts: Columns, config: SearchConfig) -> dict[str, np.ndarray]:
    """Return (n,) features by name of counts of some kinds of key; nothing was counted of the others."""
    rows, windows = len(next(iter(counts.values()))), len(config.windows_ms)
    every: Columns = {
        kind: np.zeros((rows, windows, len(labels)), np.int32)
        for kind, labels in COUNTED.items()
    }
    every["gap"] = np.full(rows, NO_GAP)
    zeros = np.zeros(rows, np.int64)
    values = features({**every, **counts}, zeros, zeros, config, clock=True)
    return dict(zip(feature_names(config, clock=True), values.T, strict=True))


@dataclass(frozen=True)
class WrittenBucket:
    """The part of one bucket of keys."""

    part: Part | None
    """None if the bucket has no rows."""
    count: Counter[str]
    """Rows by kind of key."""


def _write_buckets(
    run: Run, events: Manifest, counter: SearchCounter
) -> tuple[list[Part], Counter[str]]:
    """Write the parts, without committing them. Also return the rows by kind of key."""
    queries = run.tables.read_vocabulary("queries", "query")
    vocabularies = run.tables.read_catalogue(), queries
    results = export_counts(
        run.engine,
        part_uris(run.tables.table_uri("events"), events),
        events.rows,
        counter,
        vocabularies,
        _write_bucket,
        (run.tables.table_uri("counts"), counter, *vocabularies),
    )
    buckets = [bucket for _, bucket in sorted(results, key=itemgetter(0))]
    count: Counter[str] = Counter()
    for bucket in buckets:
        count.update(bucket.count)
    return [bucket.part for bucket in buckets if bucket.part], count


def _write_bucket(
    uri: str,
    counter: SearchCounter,
    catalogue: Vocabulary,
    queries: Vocabulary,
    bucket: int,
    rows: pa.Table,
) -> WrittenBucket:
    """Count the rows of one bucket and write a row per key."""
    tables, count = [], Counter[str]()
    vocabularies = {"item": catalogue, "query": queries}
    for number, shapes in enumerate(counter.shapes):
        columns = to_columns(rows.filter(pc.equal(rows["number"], number)))
        if not len(columns["row"]):
            continue
        counts = counter.count(number, columns)
        for kind in shapes:
            if kind in COUNTED:
                table = key_rows(kind, counts, columns, vocabularies, counter.config)
                tables.append(table)
                count[kind] = len(table)
    part = write_part(uri, pa.concat_tables(tables)) if tables else None
    return WrittenBucket(part, count)


def key_rows(
    kind: str,
    counts: Columns,
    events: Columns,
    vocabularies: dict[str, Vocabulary],
    config: SearchConfig,
) -> pa.Table:
    """Return a row per key of this kind.

    Args:
        kind: Kind of key: `item`, `query` or `pair`.
        counts: Counts of the events.
        events: Columns `item` and `query`: integers of `vocabularies`.
        vocabularies: Ids of items and texts of queries.
        config: Settings of search logs.
    """
    keys = KEY_COLUMNS[kind]
    code = np.zeros(len(events["row"]), np.int64)
    for key in keys:
        code = code << 32 | events[key]
    first = np.unique(code, return_index=True)[1]
    first = first[code[first] >= 0]  # without a query there is no pair
    names = [kind, "gap"] if kind == "pair" else [kind]
    values = compute_features({name: counts[name][first] for name in names}, config)
    columns = {name: values[name] for name in features_by_key(config)[kind]}
    for key in keys:
        ids = vocabularies[key].ids_at(events[key][first])
        columns[TABLE_COLUMNS[key]] = ids.cast(pa.string())
    schema = counts_schema(features_by_key(config).values())
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(columns[field.name])
        else:
            arrays.append(pa.nulls(len(first), field.type))
    return pa.table(arrays, names=schema.names).cast(schema)
