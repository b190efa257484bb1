"""Rules on files, on events, on the catalogue that they give, and on users across tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from models.storage.tables import UserError, join, part_uris, read_parquet
from pipelines.data.audit.base import EVENT, MINUTE_MS, Rule, Tables


def check_files(tables: Tables, rule: Rule) -> None:
    """Check that every listed file exists, is whole, and has the listed columns."""
    for table, manifest in tables.manifests.items():
        names = [column["name"] for column in manifest.schema]
        for part in manifest.files:
            rule.rows += 1
            try:
                one_part = replace(manifest, files=[part])
                [uri] = part_uris(join(tables.uri, table), one_part)
                rows = read_parquet(uri, sha256=part.sha256)
            except UserError as error:
                rule.add_violation(str(error))
                continue
            if rows.num_rows != part.rows:
                rule.add_violation(
                    f"{table}/{part.path}: {rows.num_rows} rows, the manifest says {part.rows}"
                )
            for name in names:
                if name not in rows.column_names:
                    rule.add_violation(f"{table}/{part.path}: no column {name}")


def check_inputs(tables: Tables, rule: Rule) -> None:
    """Check that the tables were made from the tables beside them, by their hashes."""
    for table, manifest in tables.manifests.items():
        for name, recorded in manifest.inputs.items():
            if name not in tables.manifests:
                continue
            rule.rows += 1
            actual = tables.manifests[name].hash
            if recorded != actual:
                rule.add_violation(
                    f"{table} were made from {name} {recorded[:12]}, this folder holds {actual[:12]}"
                )


def check_events(tables: Tables, rules: dict[str, Rule]) -> None:
    """Check the rows of `events`: keys, times, order, duplicates and times of labels."""
    events, info = tables.events, tables.manifests["events"].info
    rule = rules["events"]
    rule.rows = events.height
    keys = ["user_id", *tables.event_order]
    is_null = pl.any_horizontal(pl.col(keys).is_null())
    rule.add_rows(
        events.filter(is_null | (pl.col("timestamp_ms") < 0)),
        EVENT + ": a key that is null or a negative time",
    )
    is_below = pl.lit(False)
    for name in reversed(keys):
        above = pl.col(name).shift(1)
        equal = pl.col(name) == above
        is_below = (pl.col(name) < above) | (equal & is_below)
    same_part = pl.col("part") == pl.col("part").shift(1)
    rule.add_rows(
        events.filter((is_below & same_part).fill_null(False)),
        EVENT + ": sorts before the row above it",
    )
    _check_duplicates(events.drop("part"), info, rules["duplicates"])
    _check_known_times(events, info, rules["known"])


def _check_duplicates(events: pl.DataFrame, info: dict[str, Any], rule: Rule) -> None:
    """Check that no event is in the table twice, or as often as the manifest says if duplicates are kept."""
    rule.rows = events.height
    repetitions = events.height - events.n_unique()
    kept = info.get("duplicates_kept")
    if kept is None:
        if repetitions:
            first = events.filter(events.is_duplicated()).row(0, named=True)
            rule.add_violation(EVENT.format(**first), repetitions)
        return
    # With ties in the log's order equal events have a position each.
    if kept != repetitions and info.get("ties") == "strict":
        rule.add_violation(
            f"{repetitions:,} events repeat another, the manifest says {kept:,}"
        )


def _check_known_times(events: pl.DataFrame, info: dict[str, Any], rule: Rule) -> None:
    """Check that events have the time of a late label if and only if the label is set, never before the event."""
    for name, late in info.get("known", {}).items():
        rule.rows += events.height
        time, known = pl.col("timestamp_ms"), pl.col(f"known_{name}")
        label = pl.col(f"label_{name}")
        is_set = label.is_not_null()
        if events.schema[f"label_{name}"] == pl.Boolean:
            is_set = label.fill_null(False)
        is_right = known >= time
        if "delay_minutes" in late:
            is_right = known == time + round(late["delay_minutes"] * MINUTE_MS)
        wrong = events.filter(
            (is_set & ~is_right.fill_null(False)) | (~is_set & known.is_not_null())
        )
        rule.add_rows(
            wrong.with_columns(at=known),
            EVENT + ": label {label} is known from {at} on",
            label=name,
        )


def check_catalogue(tables: Tables, rule: Rule) -> pl.DataFrame:
    """Check the items table against the k-core of the events. Return the users (`user_id`) in the k-core.

    The catalogue of a fresh log (`catalogue_of`) is that of other tables. A catalogue
    of described items (`items_without_behaviours`) holds items whatever their
    behaviours.
    """
    items, info = tables.catalogue, tables.manifests["items"].info
    rule.rows = items.height
    _check_item_order(tables, rule)
    core, split = info["core"], tables.info["split"]
    is_frozen = bool(info.get("catalogue_of"))
    described = info.get("items_without_behaviours")
    counted = tables.events
    if not tables.all_shown:
        counted = tables.filter_behaviours(counted)
    bare = items.join(counted, on="item_id", how="anti").height
    if info["core_window"] == "train" and split.get("val_start_ms") is not None:
        known = "timestamp_ms" if tables.all_shown else tables.known
        # what all folds share is computed before the earliest of them
        starts = [fold["val_start_ms"] for fold in split.get("folds", ())]
        counted = counted.filter(pl.col(known) < min(starts or [split["val_start_ms"]]))
    always_kept = items["item_id"]
    if not is_frozen and described is None:
        always_kept = always_kept.clear()
    core_events = _filter_core(counted, max(core, 1), always_kept, is_frozen)
    core_items = core_events.select("item_id").unique()
    if is_frozen:
        core_items = items.select("item_id")
    elif described is None:
        rule.add_rows(
            items.join(core_items, on="item_id", how="anti"),
            "item {item_id}: in the catalogue, but not in the {core}-core of the events",
            core=core,
        )
    elif bare != described:
        rule.add_violation(
            f"{bare:,} items of the catalogue have no behaviour, the manifest says {described:,}"
        )
    rule.add_rows(
        core_items.join(items, on="item_id", how="anti").sort("item_id"),
        "item {item_id}: in the {core}-core of the events, but not in the catalogue",
        core=core,
    )
    if core > 1 and info["core_window"] == "all" and split["kind"] == "temporal":
        rule.note = (
            f"the {core}-core was computed on the whole log, validation and test included (core_window: all), as "
            f"papers do; core_window: train sees the training window only"
        )
    return core_events.select("user_id").unique()


def _check_item_order(tables: Tables, rule: Rule) -> None:
    """Check that `item_index` is dense and follows `item_id`; appended items may follow in any order."""
    manifest = tables.manifests["items"]
    place, above = pl.int_range(pl.len(), dtype=pl.Int32), pl.col("item_id").shift(1)
    is_wrong = (pl.col("item_id") <= above).fill_null(False)
    if manifest.extends or manifest.info.get("catalogue_of"):
        is_wrong = ~pl.col("item_id").is_first_distinct()
    is_wrong |= pl.col("item_index").ne_missing(place) | pl.col("item_id").is_null()
    rows = tables.catalogue.with_columns(place=place, above=above, is_wrong=is_wrong)
    rule.add_rows(
        rows.filter("is_wrong"),
        "item {item_id}: index {item_index} in row {place}, after {above}",
    )


def _filter_core(
    events: pl.DataFrame, core: int, always_kept: pl.Series, is_frozen: bool
) -> pl.DataFrame:
    """Return the events of the k-core by the naive loop: drop users and items with few events until nothing changes.

    Args:
        events: Events that count.
        core: Least number of events.
        always_kept: Items that are not dropped.
        is_frozen: Whether there are no other items; then only users are dropped.
    """
    is_kept = pl.col("item_id").is_in(always_kept.implode())
    if is_frozen:
        return events.filter(is_kept).filter(pl.len().over("user_id") >= core)
    while True:
        left = events.filter(pl.len().over("user_id") >= core)
        left = left.filter((pl.len().over("item_id") >= core) | is_kept)
        if left.height == events.height:
            return left
        events = left


def check_users(tables: Tables, expected: pl.DataFrame, rule: Rule) -> None:
    """Check that a user's events are in one part, and that sequences have the `expected` users (`user_id`), once each."""
    events = tables.events.select("user_id", "part").unique()
    sequences = tables.sequences.select("user_id")
    rule.rows = events["user_id"].n_unique()
    for noun, frame in (("parts of events", events), ("rows of sequences", sequences)):
        several = frame.group_by("user_id").len().filter(pl.col("len") > 1)
        rule.add_rows(
            several.sort("user_id"), "user {user_id}: in {len} {noun}", noun=noun
        )
    rule.add_rows(
        expected.join(sequences, on="user_id", how="anti").sort("user_id"),
        "user {user_id}: survives in events, but is not in sequences",
    )
    rule.add_rows(
        sequences.unique().join(expected, on="user_id", how="anti").sort("user_id"),
        "user {user_id}: in sequences, but has no surviving events",
    )
