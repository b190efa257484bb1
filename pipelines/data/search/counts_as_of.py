"""Counts of a search log as of a moment, for served models: `python -m jobs.prepare --counts_as_of TIME`.

One row per item, query and pair of both that has an event strictly before the moment. What is counted, and the features
that are made of it, are those of a search at that moment (`features.py`). Rows travel once, to the bucket of their key,
which writes its part. `models/search/counts.py` reads the table.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
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
from pipelines.data.events.event_stats import Vocabulary
from pipelines.data.run import Run
from pipelines.data.schemas import counts_schema
from pipelines.data.search.config import SearchConfig
from pipelines.data.search.features import (
    COUNTED,
    SearchWindows,
    feature_names,
    features,
)
from pipelines.data.sequences.counts import UNSEEN, Columns, export_counts, to_piece


def names_of(config: SearchConfig) -> dict[str, list[str]]:
    """Counted features by kind of key."""
    names = feature_names(config, clock=True)
    return {of: [name for name in names if name.split("_")[0] == of] for of in COUNTED}


def values_of(counts: Columns, config: SearchConfig) -> dict[str, np.ndarray]:
    """By name the features (n,) of counts of some kinds of key, as of any search."""
    rows, windows = len(next(iter(counts.values()))), len(config.windows_ms)
    nothing: Columns = {
        of: np.zeros((rows, windows, len(labels)), np.int32)
        for of, labels in COUNTED.items()
    }
    nothing["gap"], place = np.full(rows, UNSEEN), np.zeros(rows, np.int64)
    values = features({**nothing, **counts}, place, place, config, clock=True)
    return dict(zip(feature_names(config, clock=True), values.T, strict=True))


def rows_of(
    counts: Columns,
    of: str,
    rows: Columns,
    ids: dict[str, Vocabulary],
    config: SearchConfig,
) -> pa.Table:
    """A row per key: `counts` of events, whose `item` and `query` are places in `ids`."""
    keys = {"item": ("item",), "query": ("query",), "pair": ("item", "query")}[of]
    code = np.zeros(len(rows["row"]), np.int64)
    for key in keys:
        code = code << 32 | rows[key]
    first = np.unique(code, return_index=True)[1]
    first = first[code[first] >= 0]  # without a query there is no pair
    mine = values_of(
        {
            name: counts[name][first]
            for name in (of, *(["gap"] if of == "pair" else []))
        },
        config,
    )
    columns = {name: mine[name] for name in names_of(config)[of]}
    for key, column in (("item", "item_id"), ("query", "query")):
        if key in keys:
            columns[column] = ids[key].at(rows[key][first]).cast(pa.string())
    schema = counts_schema(names_of(config).values())
    return pa.table(
        {f.name: columns.get(f.name, pa.nulls(len(first), f.type)) for f in schema},
        schema=schema,
    )


def _write_part(
    uri: str,
    windows: SearchWindows,
    catalogue: Vocabulary,
    queries: Vocabulary,
    bucket: int,
    rows: pa.Table,
) -> tuple[Part | None, Counter[str], None]:
    tables, count = [], Counter[str]()
    for number, shapes in enumerate(windows.shapes):
        piece = to_piece(rows.filter(pc.equal(rows["number"], number)))
        if not len(piece["row"]):
            continue
        counts = windows.count(number, piece)
        for of in (name for name in shapes if name in COUNTED):
            tables.append(
                rows_of(
                    counts,
                    of,
                    piece,
                    {"item": catalogue, "query": queries},
                    windows.config,
                )
            )
            count[of] = len(tables[-1])
    table = pa.concat_tables(tables) if tables else None
    return (write_part(uri, table) if table is not None else None), count, None


def make_counts(run: Run, events: Manifest, items: Manifest, moment: int) -> None:
    """The table of counts as of `moment`, in ms. One of another moment is replaced, as nothing is made from it."""
    config, label = run.config, run.config.behaviour
    assert label is not None, "a search log has a label that makes behaviours"
    said = (
        datetime.fromtimestamp(moment / 1000, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
    if moment <= events.info["first_ms"]:
        raise UserError(
            f"counts_as_of is {said}, and the log has no event before it; give a later time"
        )
    settings = {
        "counts_as_of": moment,
        "search": asdict(config.own),
        "behaviour": label,
    }
    inputs, uri = {"events": events.hash, "items": items.hash}, run.table("counts")
    if not run.overwrite and up_to_date(uri, fingerprint(settings, inputs)):
        run.say(f"counts: up to date, as of {said}")
        return
    begin = time.perf_counter()
    windows = SearchWindows(
        config.own, label, f"known_{label}" in run.source.schema.names, moment
    )
    with run.writing("counts"):
        shared = run.catalogue(), run.queries()
        parts = part_uris(run.table("events"), events)
        found = sorted(
            export_counts(
                run.engine,
                parts,
                events.rows,
                windows,
                shared,
                _write_part,
                (uri, windows, *shared),
            ),
            key=itemgetter(0),
        )
        names, count = names_of(config.own), Counter[str]()
        for _, (_, of_part, _) in found:
            count.update(of_part)
        never = values_of({"gap": np.full(1, UNSEEN)}, config.own)
        info: dict[str, Any] = {
            "as_of_ms": moment,
            "features": names,
            "never": {
                name: float(never[name][0]) for each in names.values() for name in each
            },
            "search": asdict(config.own),
            "behaviour": label,
            **count,
        }
        written = [part for _, (part, *_) in found if part is not None]
        seconds = time.perf_counter() - begin
        run.commit(
            "counts",
            counts_schema(names.values()),
            written,
            settings,
            inputs,
            info,
            count_write_s=seconds,
        )
    run.say(
        f"counts: {pluralize(count['item'], 'item')}, {pluralize(count['query'], 'query')} and "
        f"{pluralize(count['pair'], 'pair')} as of {said} in "
        f"{time.perf_counter() - begin:.1f} s: {uri}"
    )
