"""The items of other tables as the catalogue of a fresh log, byte for byte.

    python -m jobs.prepare --source YAML --input FRESH --output FRESH_TABLES --catalogue TABLES --core 0

Semantic IDs and checkpoints of TABLES belong to FRESH_TABLES too. Requests are split at
the same times: what TABLES was trained on is not a test here.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import (
    Manifest,
    Part,
    UserError,
    join,
    part_uris,
    read_manifest,
    read_parquet,
    write_part,
)
from pipelines.data.events.build_events import LoadStats
from pipelines.data.events.event_stats import EventStats
from pipelines.data.run import Run
from pipelines.data.schemas import items_schema


def read_split(catalogue: str, clock: bool) -> dict[str, Any]:
    """Return how the requests of the tables `catalogue` are split.

    Raises:
        UserError: if the split needs clock times and the log has none.
    """
    split = dict(read_manifest(join(catalogue, "items"), "items").info["split"])
    if split["kind"] == "temporal" and not clock:
        raise UserError(
            f"{catalogue} is split by time, but this log has no clock times; set 'time' as in the source file of "
            f"{catalogue}"
        )
    return split


def copy_items(
    run: Run,
    events: Manifest,
    load_stats: LoadStats,
    catalogue: str,
    split: dict[str, Any],
) -> Manifest:
    """Write and commit the items of the tables `catalogue`.

    Raises:
        UserError: if too few behaviours of the log are on these items.
    """
    uri, config = join(catalogue, "items"), run.config
    original = read_manifest(uri, "items")
    settings = {"catalogue": original.hash, "behaviour": run.behaviour}
    inputs = {"events": events.hash, "catalogue": original.hash}
    if finished := run.tables.find_finished("items", settings, inputs):
        return finished
    begin = time.perf_counter()
    stats = load_stats()
    schema = items_schema(
        original.info["texts"],
        original.info["attributes"],
        original.info.get("numbers", []),
    )
    with run.tables.clean_up_on_error("items"):
        parts, inside = _copy_parts(run, uri, original, schema, stats)
        share = _check_share(run, catalogue, stats, inside)
        info = {
            "texts": original.info.get("texts"),
            "attributes": original.info.get("attributes"),
            "numbers": original.info.get("numbers"),
            "catalogue_of": catalogue,
            "core": config.core,
            "core_window": "all",
            "behaviour": run.behaviour,
            "split": split,
            "split_made_from": run.split_inputs(events),
            "behaviours": stats.behaviours,
            "items_before_core": len(stats.items),
            "dropped_items": len(stats.items) - int(pc.sum(inside).as_py() or 0),
            "items_without_metadata": original.info["items_without_metadata"],
            "metadata_outside_catalogue": 0,
        }
        seconds = time.perf_counter() - begin
        items = run.tables.commit(
            "items", schema, parts, settings, inputs, info, write_s=seconds
        )
    if items.hash != original.hash:
        raise UserError(
            f"the items of {catalogue} are not written as this version writes them, so that models trained there would "
            f"not take these tables; make both again with the same version"
        )
    run.report(
        f"items: the {items.rows:,} of {catalogue}; {share:.1%} of the behaviours are on them, "
        f"{info['dropped_items']:,} other items left out"
    )
    return items


def _copy_parts(
    run: Run, uri: str, original: Manifest, schema: pa.Schema, stats: EventStats
) -> tuple[list[Part], pa.Array]:
    """Write the parts of the original table; also return which items of the events are in it."""
    parts = []
    inside = pa.nulls(len(stats.items), pa.bool_()).fill_null(False)
    for source, part in zip(part_uris(uri, original), original.files, strict=True):
        rows = read_parquet(source, None, part.sha256)
        ids = rows["item_id"].combine_chunks().cast(stats.items.type)
        inside = pc.or_(inside, pc.is_in(stats.items, ids))
        parts.append(write_part(run.tables.table_uri("items"), rows.cast(schema)))
    return parts, inside


def _check_share(
    run: Run, catalogue: str, stats: EventStats, inside: pa.Array
) -> float:
    """Return the share of behaviours on items of the catalogue.

    Raises:
        UserError: if it is below `min_matched`, or 0.
    """
    is_inside = inside.to_numpy(zero_copy_only=False)
    on_catalogue = int(stats.counts[is_inside].sum())
    share = on_catalogue / max(int(stats.counts.sum()), 1)
    if not share or share < run.config.min_matched:
        others = stats.items.filter(pc.invert(inside)).slice(0, 2).to_pylist()
        raise UserError(
            f"{share:.1%} of the behaviours are on items of the catalogue of {catalogue}, the least is min_matched "
            f"{run.config.min_matched:g}: it does not have {', '.join(map(repr, others))}; write the ids of both logs "
            f"alike, leading zeros among them, or lower --min_matched"
        )
    return share
