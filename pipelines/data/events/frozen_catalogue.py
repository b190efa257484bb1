"""A fresh log of a catalogue that models were trained on: its tables have those items, byte for byte.

    python -m jobs.prepare --source YAML --input FRESH --output FRESH_TABLES --catalogue TABLES --core 0

So semantic IDs and checkpoints of TABLES belong to FRESH_TABLES too. Requests are split at the same times: what TABLES
was trained on is not a test here.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import (
    Manifest,
    UserError,
    join,
    part_uris,
    read_manifest,
    read_parquet,
    write_part,
)
from pipelines.data.run import Run
from pipelines.data.schemas import items_schema


def split_of(catalogue: str, clock: bool) -> dict[str, Any]:
    """How the requests of the tables `catalogue` are split. UserError where that needs clock times and the log has
    none."""
    split = dict(read_manifest(join(catalogue, "items"), "items").info["split"])
    if split["kind"] == "temporal" and not clock:
        raise UserError(
            f"{catalogue} is split by time, but this log has no clock times; set 'time' as in the source file of "
            f"{catalogue}"
        )
    return split


def take_items(
    run: Run, events: Manifest, catalogue: str, split: dict[str, Any]
) -> Manifest:
    """Writes the items of the tables `catalogue` and commits them. UserError where the log has too few of them."""
    uri, config = join(catalogue, "items"), run.config
    given = read_manifest(uri, "items")
    settings = {"catalogue": given.hash, "behaviour": run.counted}
    inputs = {"events": events.hash, "catalogue": given.hash}
    if finished := run.finished("items", settings, inputs):
        return finished
    begin = time.perf_counter()
    found = run.survey(events)
    schema = items_schema(
        given.info["texts"], given.info["attributes"], given.info.get("numbers", [])
    )
    with run.writing("items"):
        parts, inside = [], pa.nulls(len(found.items), pa.bool_()).fill_null(False)
        for source, part in zip(part_uris(uri, given), given.files, strict=True):
            rows = read_parquet(source, None, part.sha256)
            inside = pc.or_(
                inside,
                pc.is_in(
                    found.items, rows["item_id"].combine_chunks().cast(found.items.type)
                ),
            )
            parts.append(write_part(run.table("items"), rows.cast(schema)))
        known = inside.to_numpy(zero_copy_only=False)
        of_known = int(found.counts[known].sum())
        others = found.items.filter(pa.array(~known)).slice(0, 2).to_pylist()
        share = of_known / max(int(found.counts.sum()), 1)
        if not share or share < config.min_matched:
            raise UserError(
                f"{share:.1%} of the behaviours are on items of the catalogue of {catalogue}, the least is min_matched "
                f"{config.min_matched:g}: it does not have {', '.join(map(repr, others))}; write the ids of both logs "
                f"alike, leading zeros among them, or lower --min_matched"
            )
        info = {
            **{
                name: given.info.get(name)
                for name in ("texts", "attributes", "numbers")
            },
            "catalogue_of": catalogue,
            "core": config.core,
            "core_window": "all",
            "behaviour": run.counted,
            "split": split,
            "split_made_from": run.split_key(events),
            "behaviours": found.behaviours,
            "items_before_core": len(found.items),
            "dropped_items": len(found.items) - int(known.sum()),
            "items_without_metadata": given.info["items_without_metadata"],
            "metadata_outside_catalogue": 0,
        }
        items = run.commit(
            "items",
            schema,
            parts,
            settings,
            inputs,
            info,
            write_s=time.perf_counter() - begin,
        )
    if items.hash != given.hash:
        raise UserError(
            f"the items of {catalogue} are not written as this version writes them, so that models trained there would "
            f"not take these tables; make both again with the same version"
        )
    run.say(
        f"items: the {items.rows:,} of {catalogue}; {share:.1%} of the behaviours are on them, "
        f"{info['dropped_items']:,} other items left out"
    )
    return items
