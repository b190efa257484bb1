"""Rules on files, on events, on the catalogue that they give, and on users across tables."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from models.storage.tables import UserError, join, part_uris, read_parquet
from pipelines.data.audit.base import EVENT, MINUTE, Rule, Tables


def check_files(tables: Tables, rule: Rule) -> None:
    """Every listed file is there, whole, and has the columns that are listed."""
    for table, manifest in tables.manifests.items():
        for part in manifest.files:
            rule.rows += 1
            try:
                [uri] = part_uris(
                    join(tables.uri, table), replace(manifest, files=[part])
                )
                rows = read_parquet(uri, sha256=part.sha256)
            except UserError as error:
                rule.broken(str(error))
                continue
            if rows.num_rows != part.rows:
                rule.broken(
                    f"{table}/{part.path}: {rows.num_rows} rows, the manifest says {part.rows}"
                )
            for name in [
                column["name"]
                for column in manifest.schema
                if column["name"] not in rows.column_names
            ]:
                rule.broken(f"{table}/{part.path}: no column {name}")


def check_inputs(tables: Tables, rule: Rule) -> None:
    """The hashes that tables were made from are those of the tables beside them."""
    for made, manifest in tables.manifests.items():
        for name, recorded in manifest.inputs.items():
            rule.rows += name in tables.manifests
            if name in tables.manifests and recorded != (
                here := tables.manifests[name].hash
            ):
                rule.broken(
                    f"{made} were made from {name} {recorded[:12]}, this folder holds {here[:12]}"
                )


def check_events(tables: Tables, rules: dict[str, Rule]) -> None:
    """Rules on rows of `events`."""
    events, said, rule = tables.events, tables.manifests["events"].info, rules["events"]
    keys = ["user_id", *tables.event_order]
    rule.rows = events.height
    rule.broken_rows(
        events.filter(
            pl.any_horizontal(pl.col(keys).is_null()) | (pl.col("timestamp_ms") < 0)
        ),
        EVENT + ": a key that is null or a negative time",
    )
    below = pl.lit(False)
    for name in reversed(keys):
        above = pl.col(name).shift(1)
        below = (pl.col(name) < above) | ((pl.col(name) == above) & below)
    rule.broken_rows(
        events.filter(
            (below & (pl.col("part") == pl.col("part").shift(1))).fill_null(False)
        ),
        EVENT + ": sorts before the row above it",
    )
    _check_duplicates(events.drop("part"), said, rules["duplicates"])
    _check_known(events, said, rules["known"])


def _check_duplicates(events: pl.DataFrame, said: dict, rule: Rule) -> None:
    rule.rows = events.height
    repetitions = events.height - events.n_unique()
    kept = said.get("duplicates_kept")  # None where they are dropped
    if kept is None and repetitions:
        first = events.filter(events.is_duplicated()).row(0, named=True)
        rule.broken(EVENT.format(**first), repetitions)
    elif (
        kept not in (None, repetitions) and said.get("ties") == "strict"
    ):  # else equal events have a position each
        rule.broken(
            f"{repetitions:,} events repeat another, the manifest says {kept:,}"
        )


def _check_known(events: pl.DataFrame, said: dict, rule: Rule) -> None:
    """A label that is known later than its event has a time where it is set and only there, never before the event."""
    for name, late in said.get("known", {}).items():
        rule.rows += events.height
        time, known, label = (
            pl.col("timestamp_ms"),
            pl.col(f"known_{name}"),
            pl.col(f"label_{name}"),
        )
        set_ = (
            label.fill_null(False)
            if events.schema[f"label_{name}"] == pl.Boolean
            else label.is_not_null()
        )
        right = (
            known == time + round(late["delay_minutes"] * MINUTE)
            if "delay_minutes" in late
            else known >= time
        )
        wrong = events.filter(
            (set_ & ~right.fill_null(False)) | (~set_ & known.is_not_null())
        )
        rule.broken_rows(
            wrong.with_columns(at=known),
            EVENT + ": label {label} is known from {at} on",
            label=name,
        )


def check_catalogue(tables: Tables, rule: Rule) -> pl.DataFrame:
    """Checks the catalogue; returns the users (`user_id`) that the k-core keeps."""
    items, said = tables.catalogue, tables.manifests["items"].info
    rule.rows = items.height
    place, above = pl.int_range(pl.len(), dtype=pl.Int32), pl.col("item_id").shift(1)
    wrong = pl.col("item_index").ne_missing(place)
    if tables.manifests["items"].extends or said.get(
        "catalogue_of"
    ):  # new items may follow the old ones
        wrong |= ~pl.col("item_id").is_first_distinct()
    else:
        wrong |= (pl.col("item_id") <= above).fill_null(False)
    placed = items.with_columns(place=place, above=above).filter(
        wrong | pl.col("item_id").is_null()
    )
    rule.broken_rows(
        placed, "item {item_id}: index {item_index} in row {place}, after {above}"
    )
    core, split = said["core"], tables.info["split"]
    counted = tables.events if tables.all_shown else tables.behaviours_of(tables.events)
    new, given = said.get("items_without_behaviours"), said.get("catalogue_of")
    bare = items.join(counted, on="item_id", how="anti").height
    if said["core_window"] == "train" and split.get("val_start_ms") is not None:
        known = "timestamp_ms" if tables.all_shown else tables.known
        counted = counted.filter(pl.col(known) < split["val_start_ms"])
    stay = (
        items["item_id"].clear() if not given and new is None else items["item_id"]
    )  # whatever their behaviours
    kept = _core(counted, max(core, 1), stay, bool(given))
    of_core = items.select("item_id") if given else kept.select("item_id").unique()
    if not given and new is None:
        outside = items.join(of_core, on="item_id", how="anti")
        rule.broken_rows(
            outside,
            "item {item_id}: in the catalogue, but not in the {core}-core of the events",
            core=core,
        )
    elif not given and bare != new:
        rule.broken(
            f"{bare:,} items of the catalogue have no behaviour, the manifest says {new:,}"
        )
    missing = of_core.join(items, on="item_id", how="anti").sort("item_id")
    rule.broken_rows(
        missing,
        "item {item_id}: in the {core}-core of the events, but not in the catalogue",
        core=core,
    )
    if core > 1 and said["core_window"] == "all" and split["kind"] == "temporal":
        rule.note = (
            f"the {core}-core was computed on the whole log, validation and test included (core_window: all), as "
            f"papers do; core_window: train sees the training window only"
        )
    return kept.select("user_id").unique()


def _core(
    events: pl.DataFrame, core: int, stay: pl.Series, given: bool
) -> pl.DataFrame:
    """The events of the k-core by the naive loop: drop what has fewer than `core` events until nothing changes. Items
    of `stay` are not dropped; where the catalogue is `given` there are no others, and only users are dropped."""
    stays = pl.col("item_id").is_in(stay.implode())
    if given:
        return events.filter(stays).filter(pl.len().over("user_id") >= core)
    while True:
        left = events.filter(pl.len().over("user_id") >= core).filter(
            (pl.len().over("item_id") >= core) | stays
        )
        if left.height == events.height:
            return left
        events = left


def check_users(tables: Tables, surviving: pl.DataFrame, rule: Rule) -> None:
    """A user's events are in one part; the `surviving` users (`user_id`) are in sequences, once each, and no others."""
    events, sequences = (
        tables.events.select("user_id", "part").unique(),
        tables.sequences.select("user_id"),
    )
    rule.rows = events["user_id"].n_unique()
    for said, frame in (("parts of events", events), ("rows of sequences", sequences)):
        several = (
            frame.group_by("user_id").len().filter(pl.col("len") > 1).sort("user_id")
        )
        rule.broken_rows(several, "user {user_id}: in {len} {said}", said=said)
    rule.broken_rows(
        surviving.join(sequences, on="user_id", how="anti").sort("user_id"),
        "user {user_id}: survives in events, but is not in sequences",
    )
    rule.broken_rows(
        sequences.unique().join(surviving, on="user_id", how="anti").sort("user_id"),
        "user {user_id}: in sequences, but has no surviving events",
    )
