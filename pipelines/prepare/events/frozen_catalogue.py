"""Use the items and split times of other tables for a new log.

    python -m jobs.prepare --source YAML --input NEW --output NEW_TABLES
        --catalogue TABLES --core 0

The table `items` of NEW_TABLES has the bytes of `items` of TABLES, so semantic IDs and
checkpoints of TABLES also fit NEW_TABLES. Requests are split at the times of TABLES, so
the test split has no request from the training window of TABLES.
"""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import UserError
from core.schemas import ItemsInfo, Split, items_schema
from core.tables import (
    Table,
    read_parquet,
    write_part,
)
from pipelines.prepare.events.build_events import LoadStats
from pipelines.prepare.run import Run


def copy_items(
    run: Run,
    events: Table,
    load_stats: LoadStats,
    original: Table[ItemsInfo],
    split: Split,
) -> Table[ItemsInfo]:
    """Write the items of other tables as the items of this log.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        events: Table of the events.
        load_stats: Returns statistics of the events.
        original: Items of the other tables.
        split: The split.

    Returns:
        The table of the items.
    """
    config, catalogue = run.config, run.config.catalogue
    settings = {"catalogue": original.hash, "behaviour": run.behaviour}
    inputs = {"events": events.hash, "catalogue": original.hash}
    if finished := run.tables.find_finished(ItemsInfo, settings, inputs):
        return finished
    begin = time.perf_counter()
    stats = load_stats()
    schema = items_schema(
        original.info.texts, original.info.attributes, original.info.numbers
    )
    with run.tables.clean_up_on_error("items"):
        parts = []
        is_inside = np.zeros(len(stats.items), bool)
        for source in original.part_uris():
            rows = read_parquet(source)
            ids = rows["item_id"].combine_chunks().cast(stats.items.type)
            is_inside |= pc.is_in(stats.items, ids).to_numpy(zero_copy_only=False)
            parts.append(write_part(run.tables.table_uri("items"), rows.cast(schema)))
        share = int(stats.counts[is_inside].sum()) / max(int(stats.counts.sum()), 1)
        if not share or share < config.min_matched:
            others = stats.items.filter(pa.array(~is_inside)).slice(0, 2).to_pylist()
            raise UserError(
                f"{share:.1%} of the behaviours are on items of the catalogue of "
                f"{catalogue}, below min_matched {config.min_matched:g}: it does not "
                f"have {', '.join(map(repr, others))}"
            )
        info = ItemsInfo(
            texts=original.info.texts,
            attributes=original.info.attributes,
            numbers=original.info.numbers,
            catalogue_of=catalogue,
            core=config.core,
            core_window="all",
            behaviour=run.behaviour,
            split=split,
            split_made_from=run.split_inputs(events),
            items_before_core=len(stats.items),
            dropped_items=int((~is_inside).sum()),
            items_without_metadata=original.info.items_without_metadata,
            metadata_outside_catalogue=0,
        )
        seconds = time.perf_counter() - begin
        items = run.tables.commit(
            "items", schema, parts, settings, inputs, info, write_s=seconds
        )
    if items.hash != original.hash:
        raise UserError(
            f"the items of {catalogue} were written by another version", "format"
        )
    run.report(
        f"items: the {items.rows:,} of {catalogue}; {share:.1%} of the behaviours are "
        f"on them, {info.dropped_items:,} other items dropped"
    )
    return items
