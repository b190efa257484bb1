"""Build the table `items`: the catalogue of a log, with metadata from item files.

`python -m jobs.prepare` calls `make_items`. One process holds all items and all rows of
the item files.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from core.errors import UserError
from core.schemas import EventsInfo, ItemsInfo, Match, Split
from core.tables import Table, write_frame
from pipelines.prepare.events.build_events import (
    check_matched,
    is_behaviour,
    label_columns,
    load_stats,
    read_part,
)
from pipelines.prepare.reading.rows import read_section
from pipelines.prepare.run import Run

ITEMS_PER_PART = 1_000_000


def make_items(run: Run, events: Table[EventsInfo], split: Split) -> Table[ItemsInfo]:
    """Write the table `items`, unless it is up to date.

    Items without metadata have null texts. Of several rows of an item, the first one is
    used. Items of an earlier version come first and keep their `item_index`.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        events: Table of the events.
        split: The split.
    """
    source, config = run.source, run.config
    files = source.item_files(run.input)
    settings: dict[str, Any] = {
        "source": source.config,
        "core": config.core,
        "core_window": config.core_window,
        "behaviour": run.behaviour,
    }
    if config.core_window == "train" or source.texts:
        settings["split"] = config.split.settings()
    settings = json.loads(json.dumps(settings, default=str))
    inputs = {"events": events.hash}
    stamps = run.stamps(files)
    if finished := run.find_finished(ItemsInfo, settings, inputs, stamps):
        return finished
    stats = load_stats(run, events)
    earlier = run.appended_version("items")
    missing = sorted(earlier.info.stamps.keys() - {*files}) if earlier else []
    if missing:
        raise UserError(
            f"{run.input} has no file {missing[0]}, from which the items were made",
            "settings",
        )
    old = earlier.config["source"].get("items", {}) if earlier else {}
    if earlier and source.items and old.get("where") != source.items.where:
        raise UserError(
            f"{earlier.uri} was made with items.where {old.get('where')}, not "
            f"{source.items.where}",
            "settings",
        )
    metadata = pl.DataFrame(schema={"item_id": pl.String})
    left_out = 0
    if source.items:
        metadata, rejected = read_section(source.items, run.input, files)
        run.check_rejects(rejected, " of the item files")
        left_out = rejected.left_out
    elif source.texts:
        metadata = _read_texts(run, events, split)
    keeps_all = source.items is not None and source.items.keep == "all"
    described = metadata["item_id"] if keeps_all else None
    # core_window `train` counts the behaviours that are known before validation
    before_ms = split.val_start_ms if config.core_window == "train" else None
    in_core, core_rounds = core_items(run, events, before_ms, described)
    ids = in_core["id"]
    if described is not None:
        ids = pl.concat([ids, described]).unique().sort()
    if earlier:
        old = pl.Series(earlier.read(["item_id"])["item_id"])
        ids = pl.concat([old, ids.filter(~ids.is_in(old.implode()))])
    inside = metadata.filter(metadata["item_id"].is_in(ids.implode()))
    first = inside.unique("item_id", keep="first", maintain_order=True)
    differing = inside.join(first, on=first.columns, how="anti", nulls_equal=True)
    items = ids.to_frame("item_id").with_row_index("item_index")
    items = items.join(first, on="item_id", how="left", maintain_order="left")
    schema = source.items_schema
    info = ItemsInfo(
        texts=source.items_columns[0],
        attributes=source.items_columns[1],
        numbers=source.items_numbers,
        core=config.core,
        core_window=config.core_window,
        core_rounds=core_rounds,
        behaviour=run.behaviour,
        split=split,
        split_made_from=run.split_inputs(events),
        stamps=stamps,
        items_before_core=stats.items.height,
        dropped_items=stats.items.height - in_core.height,
        items_without_metadata=items.height - first.height,
        metadata_outside_catalogue=metadata.height - inside.height,
        metadata_differ=differing.height,
        rows_left_out=left_out,
    )
    if keeps_all:
        info.items_without_behaviours = items.height - in_core.height
    if files:
        _check_metadata(run, in_core, metadata["item_id"])
    uri = run.table_uri("items")
    slices = items.iter_slices(ITEMS_PER_PART)
    parts = [write_frame(uri, rows, schema) for rows in slices]
    committed = run.commit(
        "items",
        schema,
        parts,
        settings,
        inputs,
        info,
    )
    without_behaviours = ""
    if info.items_without_behaviours is not None:
        without_behaviours = (
            f", {info.items_without_behaviours:,} of them without behaviours"
        )
    run.report(
        f"items: {items.height:,} in the catalogue{without_behaviours}, "
        f"{info.dropped_items:,} dropped by the {config.core}-core "
        f"({info.core_rounds} rounds), {info.items_without_metadata:,} without "
        f"metadata, {info.metadata_outside_catalogue:,} metadata rows of other "
        f"items dropped"
    )
    return committed


def _read_texts(run: Run, events: Table, split: Split) -> pl.DataFrame:
    """Read the latest text of each item before validation from the events."""
    columns = [f"text_{name}" for name in run.source.texts]
    before = split.val_start_ms if split.by == "temporal" else None
    calls = [(uri,) for uri in events.part_uris()]
    parts = run.executor.map_unordered(_read_latest_texts, calls, (columns, before))
    texts = _select_latest(pl.concat([part for _, part in parts]))
    texts = texts.pivot("column", index="item_id", values="text")
    names = [name for name in columns if name not in texts.columns]
    return texts.with_columns(pl.lit(None, pl.String).alias(name) for name in names)


def _read_latest_texts(
    columns: list[str], before_ms: int | None, uri: str
) -> pl.DataFrame:
    """Read the latest text of each item and column of a part of the events."""
    events = read_part(uri, ["item_id", "timestamp_ms", *columns])
    if before_ms is not None:
        events = events.filter(pl.col("timestamp_ms") < before_ms)
    texts = events.unpivot(
        columns,
        index=["item_id", "timestamp_ms"],
        variable_name="column",
        value_name="text",
    )
    return _select_latest(texts.drop_nulls())


def _select_latest(texts: pl.DataFrame) -> pl.DataFrame:
    """Select the latest text of each item and column; of equal times the greatest."""
    ordered = texts.sort("timestamp_ms", "text")
    return ordered.unique(["item_id", "column"], keep="last")


def _check_metadata(run: Run, in_core: pl.DataFrame, described: pl.Series) -> None:
    """Warn or raise if few items of the k-core, or few behaviours, have metadata."""
    is_described = in_core["id"].is_in(described.implode())
    matched = in_core.filter(is_described)
    match = Match(
        ids=in_core.height,
        ids_matched=matched.height,
        events=int(in_core["count"].sum()),
        events_matched=int(matched["count"].sum()),
        unmatched=in_core["id"].filter(~is_described).head(2).to_list(),
        others=described.head(2).to_list(),
    )
    check_matched(match, "item", run.config.min_matched, run.report)


# The k-core. No process holds a table of users.


def core_items(
    run: Run,
    events: Table[EventsInfo],
    before_ms: int | None,
    always_kept: pl.Series | None,
) -> tuple[pl.DataFrame, int]:
    """Compute the items in the k-core.

    Each round drops users with fewer than `core` behaviours on the remaining items, and
    then items with fewer than `core` behaviours by the remaining users. The rounds end
    when no item is dropped. Between rounds, 8 bytes per behaviour stay in Ray's object
    store.

    Args:
        run: Log, settings and tables of this call of `prepare`; `core` 0 and 1 keep all
            items that have a behaviour.
        events: Table of the events.
        before_ms: Epoch ms; only behaviours known earlier are counted. None counts all.
        always_kept: Ids of items that are kept even with fewer behaviours.

    Returns:
        Ids of the items, sorted, with their numbers of behaviours, as in `stats.items`,
        and the number of rounds.
    """
    stats, core, executor = (
        load_stats(run, events),
        max(run.config.core, 1),
        run.executor,
    )
    if core == 1 and before_ms is None:
        return stats.items, 0
    ids = stats.items["id"]
    items = executor.put(ids.to_frame("item_id").with_row_index("item"))
    shared = (run.behaviour, run.is_late, before_ms, items)
    calls = [(uri,) for uri in events.part_uris()]
    parts = list(executor.submit(_read_pairs, calls, shared))
    is_in_core = np.ones(len(ids), dtype=bool)
    is_always_kept = np.zeros(len(ids), dtype=bool)
    if always_kept is not None:
        is_always_kept = ids.is_in(always_kept.implode()).to_numpy()
    rounds = 0
    while True:
        counts = np.zeros(len(is_in_core), dtype=np.int64)
        part_calls = [(core, part) for part in parts]
        mask = (executor.put(is_in_core),)
        for _, part in executor.map_unordered(_count_items, part_calls, mask):
            counts[part["item"].to_numpy()] += part["count"].to_numpy()
        rounds += 1
        is_still_in_core = (counts >= core) | is_always_kept
        if not counts[is_still_in_core].any():
            raise UserError(
                f"no item remains in the {core}-core of {stats.behaviours:,} behaviours"
            )
        if (is_still_in_core == is_in_core).all():
            return stats.items.filter(is_in_core), rounds
        is_in_core = is_still_in_core


def _read_pairs(
    behaviour: str | None,
    is_late: bool,
    before_ms: int | None,
    items: pl.DataFrame,
    uri: str,
) -> pa.Table:
    """Read the user and the item of each counted behaviour of a part."""
    columns = ["user_id", "item_id", "timestamp_ms", *label_columns(behaviour, is_late)]
    events = read_part(uri, columns).filter(is_behaviour(behaviour))
    if before_ms is not None:
        known = pl.coalesce(*label_columns(behaviour, is_late)[1:], "timestamp_ms")
        events = events.filter(known < before_ms)
    pairs = events.join(items, on="item_id", maintain_order="left")
    return pairs.select(user=pl.col("user_id").rle_id(), item="item").to_arrow()


def _count_items(is_in_core: np.ndarray, core: int, pairs: pa.Table) -> pl.DataFrame:
    """Count the behaviours per item of a part, without users below the core."""
    counted = pl.DataFrame(pairs.filter(pa.array(is_in_core[pairs["item"]])))
    counted = counted.filter(pl.len().over("user") >= core)
    return counted.group_by("item").len("count")
