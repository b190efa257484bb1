"""The items table: the catalogue with its metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import ray

from models.tables import Part
from pipelines.data.sources.base import Rejected, Source
from pipelines.data.tables import items_schema, write_part
from pipelines.data.tasks import fetch, run_all

ITEMS_PER_PART = 1_000_000


def _read_file(
    source: Source, input_uri: str, file: str, catalogue: pa.Array, schema: pa.Schema
) -> tuple[pa.Table, tuple[dict[str, int], Rejected]]:
    """Metadata of the catalogue's items in one file, the first row of each, and what was left out."""
    kept, counts, rejected = [], {"outside": 0, "repeated": 0}, Rejected()
    seen = np.zeros(len(catalogue), dtype=bool)
    for block in source.read_items(input_uri, file):
        rejected.add(Rejected.of(block))
        table = block.rows
        index = pc.index_in(table["item_id"].cast(pa.large_string()).combine_chunks(), catalogue)
        known = index.is_valid().to_numpy(zero_copy_only=False)
        counts["outside"] += int((~known).sum())
        rows = np.flatnonzero(known)
        _, first = np.unique(index.drop_null().to_numpy(), return_index=True)
        rows = np.sort(rows[first])
        rows = rows[~seen[index.take(pa.array(rows)).to_numpy()]]
        counts["repeated"] += int(known.sum()) - len(rows)
        taken = index.take(pa.array(rows))
        seen[taken.to_numpy()] = True
        columns = {
            f.name: table[f.name].take(pa.array(rows)) if f.name in table.column_names else pa.nulls(len(rows), f.type)
            for f in schema
            if f.name not in ("item_index", "item_id")
        }
        kept.append(pa.table({"item_index": taken.cast(pa.int32()), **columns}))
    empty = pa.schema([f for f in schema if f.name != "item_id"]).empty_table()
    return pa.concat_tables([empty, *kept], promote_options="permissive"), (counts, rejected)


def _write_range(
    items_uri: str, low: int, ids: pa.Array, schema: pa.Schema, *metadata: pa.Table
) -> tuple[Part, int, int]:
    """One part: items from index `low` on, joined with their metadata. Also counts the items without any
    and the metadata rows that an earlier file had already given."""
    frame = pl.DataFrame({"item_index": np.arange(low, low + len(ids), dtype=np.int32), "item_id": pl.from_arrow(ids)})
    missing, repeated = len(ids), 0
    if metadata:
        within = (pc.field("item_index") >= low) & (pc.field("item_index") < low + len(ids))
        rows = pl.from_arrow(pa.concat_tables([table.filter(within) for table in metadata]))
        assert isinstance(rows, pl.DataFrame)
        first = rows.unique("item_index", keep="first", maintain_order=True)
        missing, repeated = len(ids) - len(first), len(rows) - len(first)
        frame = frame.join(first, on="item_index", how="left", maintain_order="left")
    for field in schema:
        if field.name not in frame.columns:
            frame = frame.with_columns(pl.lit(None).alias(field.name))
    table = frame.select(schema.names).to_arrow().cast(schema)
    return write_part(items_uri, table), missing, repeated


def write_items(
    source: Source, input_uri: str, files: list[str], catalogue: pa.Array, items_uri: str
) -> tuple[list[Part], pa.Schema, dict[str, Any], Rejected]:
    """Writes the parts of the items table, uncommitted: (parts, schema, counts for the manifest, rejected rows).

    Items without metadata keep null texts and are counted; metadata of items that are not in the
    catalogue is left out and counted.
    """
    texts, attributes = source.items_columns
    schema = items_schema(texts, attributes, source.items_numbers)
    shared = ray.put(catalogue)
    read: Any = ray.remote(num_returns=2)(_read_file)
    refs = [read.remote(source, input_uri, file, shared, schema) for file in files]
    counts, rejected = [], Rejected()
    for _, found in refs:
        count, of_file = fetch(found)
        counts.append(count)
        rejected.add(of_file)
    ranges = [
        (items_uri, low, catalogue.slice(low, ITEMS_PER_PART), schema, *(table for table, _ in refs))
        for low in range(0, len(catalogue), ITEMS_PER_PART)
    ]
    written = run_all(_write_range, ranges)
    info = {
        "texts": texts,
        "attributes": attributes,
        "numbers": source.items_numbers,
        "items_without_metadata": sum(missing for _, missing, _ in written),
        "metadata_outside_catalogue": sum(count["outside"] for count in counts),
        "metadata_repeated": sum(count["repeated"] for count in counts) + sum(repeated for _, _, repeated in written),
    }
    return [part for part, _, _ in written], schema, info, rejected
