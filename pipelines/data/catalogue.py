"""The catalogue: which items stay after the iterative k-core, and the items table with their metadata.

No process holds a table of users; the driver holds one count per item.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import ray

from models.tables import Part, UserError
from pipelines.data.matching import Compared, Match, compare, sample
from pipelines.data.sources.base import Rejected, Source
from pipelines.data.survey import Arrays, Survey
from pipelines.data.tables import items_schema, write_part
from pipelines.data.tasks import run_all, run_tasks

ITEMS_PER_PART = 1_000_000


def surviving_rows(
    item: np.ndarray, alive: np.ndarray, user_start: np.ndarray, counted: np.ndarray | None, core: int
) -> np.ndarray:
    """Rows that belong to the core: of a living item and of a user who has `core` such rows.

    item (E,) index into alive (N,); user_start (V,) first row of each user; counted (E,) rows within the
    window that membership is computed on, or None for all. Returns (E,) bool.
    """
    if not len(item):
        return np.zeros(0, dtype=bool)
    rows = alive[item]
    if counted is not None:
        rows &= counted
    per_user = np.add.reduceat(rows, user_start, dtype=np.int64)
    lengths = np.diff(np.append(user_start, len(item)))
    rows &= np.repeat(per_user >= core, lengths)
    return rows


def _events_of(arrays: Arrays, mapping: np.ndarray, items: int) -> np.ndarray:
    return np.bincount(mapping[arrays["item"]], minlength=items)


def events_of(survey: Survey, catalogue: pa.Array) -> np.ndarray:
    """(catalogue,) behaviours on each item of the catalogue."""
    calls = [
        (arrays, mapping, len(survey.items)) for arrays, mapping in zip(survey.arrays, survey.mappings, strict=True)
    ]
    counts = np.zeros(len(survey.items), dtype=np.int64)
    for _, partial in run_tasks(_events_of, calls):
        counts += partial
    return counts[pc.is_in(survey.items, catalogue).to_numpy(zero_copy_only=False)]  # both are sorted


def _count(arrays: Arrays, mapping: np.ndarray, alive: np.ndarray, core: int, before_ms: int | None) -> np.ndarray:
    item = mapping[arrays["item"]]
    counted = None if before_ms is None else arrays["known"] < before_ms
    rows = surviving_rows(item, alive, arrays["user_start"], counted, core)
    return np.bincount(item[rows], minlength=len(alive))


def core_items(survey: Survey, core: int, before_ms: int | None) -> tuple[pa.Array, int]:
    """Ids of the items in the k-core, sorted, and the number of rounds it took.

    Repeats until nothing changes: users with fewer than `core` behaviours on living items drop out, then
    items with fewer than `core` behaviours by the users that stay. `before_ms` counts only behaviours
    known earlier than that (membership on the training window). The driver holds one count per item.
    """
    core = max(core, 1)
    if core == 1 and before_ms is None:
        return survey.items, 0
    alive = np.ones(len(survey.items), dtype=bool)
    rounds = 0
    while True:
        shared = ray.put(alive)
        calls = [
            (arrays, mapping, shared, core, before_ms)
            for arrays, mapping in zip(survey.arrays, survey.mappings, strict=True)
        ]
        counts = np.zeros(len(alive), dtype=np.int64)
        for _, partial in run_tasks(_count, calls):
            counts += partial
        rounds += 1
        left = counts >= core
        if not left.any():
            raise UserError(
                f"no item is left in the {core}-core of {survey.behaviours:,} behaviours; set a lower --core"
            )
        if (left == alive).all():
            return survey.items.filter(pa.array(alive)), rounds
        alive = left


def _read_file(
    source: Source, input_uri: str, file: str, catalogue: pa.Array, schema: pa.Schema
) -> tuple[tuple[dict[str, int], Rejected], pa.Table]:
    """What is left out of one file, and its metadata of the catalogue's items, the first row of each."""
    kept, counts, rejected = [], {"outside": 0, "repeated": 0, "differ": 0}, Rejected()
    seen = np.zeros(len(catalogue), dtype=bool)
    said = np.zeros(len(catalogue), dtype=np.uint64)  # hash of what an item's first row says
    for block in source.read_items(input_uri, file):
        rejected.add(Rejected.of(block))
        table = block.rows
        index = pc.index_in(table["item_id"].cast(pa.large_string()).combine_chunks(), catalogue)
        known = index.is_valid().to_numpy(zero_copy_only=False)
        counts["outside"] += int((~known).sum())
        rows = np.flatnonzero(known)
        content = _hashes(table)
        _, first = np.unique(index.drop_null().to_numpy(), return_index=True)
        rows = np.sort(rows[first])
        rows = rows[~seen[index.take(pa.array(rows)).to_numpy()]]
        counts["repeated"] += int(known.sum()) - len(rows)
        taken = index.take(pa.array(rows))
        seen[taken.to_numpy()] = True
        said[taken.to_numpy()] = content[rows]
        counts["differ"] += int((content[known] != said[index.drop_null().to_numpy()]).sum())
        columns = {
            f.name: table[f.name].take(pa.array(rows)) if f.name in table.column_names else pa.nulls(len(rows), f.type)
            for f in schema
            if f.name not in ("item_index", "item_id")
        }
        kept.append(pa.table({"item_index": taken.cast(pa.int32()), **columns}))
    empty = pa.schema([f for f in schema if f.name != "item_id"]).empty_table()
    return (counts, rejected), pa.concat_tables([empty, *kept], promote_options="permissive")


def _hashes(table: pa.Table) -> np.ndarray:
    """(rows,) of all columns, to compare within this process."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame.hash_rows().to_numpy()


def _compare_file(source: Source, input_uri: str, file: str, ids: list[str]) -> Compared:
    """The ids of one file beside some without metadata."""
    return compare(ids, (block.rows["item_id"] for block in source.read_items(input_uri, file)))


def match_items(
    source: Source, input_uri: str, files: list[str], catalogue: pa.Array, missing: np.ndarray, events: np.ndarray
) -> Match:
    """How many items have metadata. missing: (M,) the indices of those without; events: (items,) of each item."""
    total = int(events.sum())
    match = Match(len(catalogue), len(catalogue) - len(missing), total, total - int(events[missing].sum()))
    if match.doubtful:  # only then the files are read again
        ids, compared = sample(catalogue.take(pa.array(missing))), Compared()
        for found in run_all(_compare_file, [(source, input_uri, file, ids) for file in files]):
            compared.add(found)
        match.explain(ids, compared)
    return match


def _write_range(
    items_uri: str, low: int, ids: pa.Array, schema: pa.Schema, *metadata: pa.Table
) -> tuple[Part, np.ndarray, int, int]:
    """One part: items from index `low` on, joined with their metadata. Also the indices of items without any, and
    how many metadata rows an earlier file had already given, and given differently."""
    frame = pl.DataFrame({"item_index": np.arange(low, low + len(ids), dtype=np.int32), "item_id": pl.from_arrow(ids)})
    missing, repeated, differ = frame["item_index"].to_numpy(), 0, 0
    if metadata:
        within = (pc.field("item_index") >= low) & (pc.field("item_index") < low + len(ids))
        rows = pl.from_arrow(pa.concat_tables([table.filter(within) for table in metadata]))
        assert isinstance(rows, pl.DataFrame)
        first = rows.unique("item_index", keep="first", maintain_order=True)
        missing = frame.join(first, on="item_index", how="anti", maintain_order="left")["item_index"].to_numpy()
        repeated = len(rows) - len(first)
        differ = rows.unique().height - len(first) if repeated else 0
        frame = frame.join(first, on="item_index", how="left", maintain_order="left")
    for field in schema:
        if field.name not in frame.columns:
            frame = frame.with_columns(pl.lit(None).alias(field.name))
    table = frame.select(schema.names).to_arrow().cast(schema)
    return write_part(items_uri, table), missing, repeated, differ


def write_items(
    source: Source, input_uri: str, files: list[str], catalogue: pa.Array, items_uri: str
) -> tuple[list[Part], pa.Schema, dict[str, Any], Rejected, np.ndarray]:
    """Writes the parts of the items table, uncommitted: (parts, schema, counts for the manifest, rejected rows,
    indices of the items without metadata).

    Items without metadata keep null texts and are counted; metadata of items that are not in the
    catalogue is left out and counted.
    """
    texts, attributes = source.items_columns
    schema = items_schema(texts, attributes, source.items_numbers)
    shared = ray.put(catalogue)
    reads = [(source, input_uri, file, shared, schema) for file in files]
    counts, tables, rejected = [], [], Rejected()
    for _, ((count, of_file), table) in sorted(run_tasks(_read_file, reads, num_returns=2), key=itemgetter(0)):
        counts.append(count)
        tables.append(table)
        rejected.add(of_file)
    ranges = [
        (items_uri, low, catalogue.slice(low, ITEMS_PER_PART), schema, *tables)
        for low in range(0, len(catalogue), ITEMS_PER_PART)
    ]
    written = run_all(_write_range, ranges)
    missing = np.concatenate([[], *(of_range for _, of_range, _, _ in written)]).astype(np.int64)
    info = {
        "texts": texts,
        "attributes": attributes,
        "numbers": source.items_numbers,
        "items_without_metadata": len(missing),
        "metadata_outside_catalogue": sum(count["outside"] for count in counts),
        "metadata_repeated": sum(count["repeated"] for count in counts) + sum(again for _, _, again, _ in written),
        "metadata_differ": sum(count["differ"] for count in counts) + sum(differ for *_, differ in written),
    }
    return [part for part, *_ in written], schema, info, rejected, missing
