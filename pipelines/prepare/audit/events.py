"""Audit rules for files, events, the catalogue, and users across tables."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import polars as pl

from core.errors import UserError
from pipelines.prepare.audit.base import EVENT, MINUTE_MS, Rule, Tables
from pipelines.prepare.reading.read import parse_sql


def check_files(tables: Tables, rule: Rule) -> None:
    """Check that every listed file is complete and has the listed rows and columns."""
    for name, table in tables.opened.items():
        for part in table.files:
            rule.rows += 1
            try:
                rows = replace(table, files=[part]).read()
            except UserError as error:
                rule.add_violation(str(error))
                continue
            if rows.num_rows != part.rows:
                rule.add_violation(
                    f"{name}/{part.path}: {rows.num_rows} rows, the manifest says "
                    f"{part.rows}"
                )
            for column in table.columns:
                if column not in rows.column_names:
                    rule.add_violation(f"{name}/{part.path}: no column {column}")


def check_inputs(tables: Tables, rule: Rule) -> None:
    """Check that recorded input hashes equal the hashes of the tables in the folder."""
    for made, table in tables.opened.items():
        for name, recorded in table.inputs.items():
            if name not in tables.opened:
                continue
            rule.rows += 1
            actual = tables.opened[name].hash
            if recorded != actual:
                rule.add_violation(
                    f"{made} were made from {name} {recorded[:12]}, this folder has "
                    f"{actual[:12]}"
                )


def check_events(tables: Tables, rules: dict[str, Rule]) -> None:
    """Check the rows of `events`: keys, times, order, duplicates and known times."""
    events, info = tables.events, tables.opened["events"].info
    rule = rules["events"]
    rule.rows = events.height
    keys = ["user_id", *tables.event_order]
    is_null = pl.any_horizontal(pl.col(keys).is_null())
    rule.add_rows(
        events.filter(is_null | (pl.col("timestamp_ms") < 0)),
        EVENT + ": a key that is null or a negative time",
    )
    # lexicographic comparison with the previous row, from the last key to the first
    is_less = pl.lit(False)
    for name in reversed(keys):
        previous = pl.col(name).shift(1)
        is_equal = pl.col(name) == previous
        is_less = (pl.col(name) < previous) | (is_equal & is_less)
    is_same_part = pl.col("part") == pl.col("part").shift(1)
    rule.add_rows(
        events.filter((is_less & is_same_part).fill_null(False)),
        EVENT + ": sorts before the previous row",
    )
    check_rows(tables, rules["rows"])
    rule, events = rules["duplicates"], events.drop("part")
    rule.rows = events.height
    num_duplicates = events.height - events.n_unique()
    recorded = info.duplicates_kept
    if recorded is None and num_duplicates:
        first = events.filter(events.is_duplicated()).row(0, named=True)
        rule.add_violation(EVENT.format(**first), num_duplicates)
    # with `ties: log_order`, equal events have different positions
    if recorded not in (None, num_duplicates) and info.ties == "strict":
        rule.add_violation(
            f"{num_duplicates:,} events repeat another, the manifest says {recorded:,}"
        )
    rule = rules["known"]
    for name, delay in info.log.known.items():
        rule.rows += events.height
        time, known = pl.col("timestamp_ms"), pl.col(f"known_{name}")
        label = pl.col(f"label_{name}")
        is_set = label.is_not_null()
        if events.schema[f"label_{name}"] == pl.Boolean:
            is_set = label.fill_null(False)
        is_valid = known >= time
        if delay is not None:
            is_valid = known == time + round(delay * MINUTE_MS)
        is_wrong = is_set & ~is_valid.fill_null(False)
        is_unexpected = ~is_set & known.is_not_null()
        rule.add_rows(
            events.filter(is_wrong | is_unexpected).with_columns(at=known),
            EVENT + ": label {label} is known from {at} on",
            label=name,
        )


def check_rows(tables: Tables, rule: Rule) -> None:
    """Check that each row of the log is accounted for, and the condition `where`.

    The condition is evaluated on events if it reads columns of which events have text.
    """
    table, events = tables.opened["events"], tables.events
    info, source = table.info, table.config["source"]
    rule.rows = events.height
    accounted = events.height + info.duplicates + info.rejects
    if info.rows_read != accounted:
        rule.add_violation(
            f"{info.rows_read:,} rows were read, {accounted:,} are events, duplicates "
            f"or rejects"
        )
    condition = source.get("where")
    if info.rows_left_out and not condition:
        rule.add_violation(f"{info.rows_left_out:,} rows are left out without `where`")
    keys = {"user": "user_id", "item": "item_id", "query": "query"}
    copies = {source[key]: name for key, name in keys.items() if source.get(key)}
    categories = source.get("categories", {})
    copies |= {text: f"cat_{name}" for name, text in categories.items()}
    if not condition:
        return
    unknown = {*parse_sql(condition).meta.root_names()} - copies.keys()
    if unknown:
        rule.note = (
            f"`where` is not checked: events have no {', '.join(sorted(unknown))}"
        )
    else:
        columns = {text: pl.col(name) for text, name in copies.items()}
        with suppress(pl.exceptions.PolarsError):  # columns that are no text in the log
            holds = events.select(**columns).select(parse_sql(condition)).to_series()
            rule.add_rows(
                events.filter(~holds.fill_null(False)),
                EVENT + ": left out by where '{condition}'",
                condition=condition,
            )


def check_catalogue(tables: Tables, rule: Rule) -> None:
    """Check the `items` table against the k-core of the events.

    A catalogue of described items (`items_without_behaviours`) also has items without
    behaviours.
    """
    items, table = tables.catalogue, tables.opened["items"]
    info = table.info
    rule.rows = items.height
    row = pl.int_range(pl.len(), dtype=pl.Int32)
    previous = pl.col("item_id").shift(1)
    is_wrong = (pl.col("item_id") <= previous).fill_null(False)
    if table.extends:
        is_wrong = ~pl.col("item_id").is_first_distinct()
    is_wrong |= pl.col("item_index").ne_missing(row) | pl.col("item_id").is_null()
    ordered = items.with_columns(row=row, previous=previous, is_wrong=is_wrong)
    rule.add_rows(
        ordered.filter("is_wrong"),
        "item {item_id}: index {item_index} in row {row}, after {previous}",
    )
    core = info.core
    num_described = info.items_without_behaviours
    behaviours = tables.events
    if info.behaviour:
        behaviours = tables.filter_behaviours(behaviours)
    num_unused = items.join(behaviours, on="item_id", how="anti").height
    core_items = tables.core_events.select("item_id").unique()
    if num_described is None:
        rule.add_rows(
            items.join(core_items, on="item_id", how="anti"),
            "item {item_id}: in the catalogue, but not in the {core}-core of events",
            core=core,
        )
    elif num_unused != num_described:
        rule.add_violation(
            f"{num_unused:,} items of the catalogue have no behaviour, the manifest "
            f"says {num_described:,}"
        )
    rule.add_rows(
        core_items.join(items, on="item_id", how="anti").sort("item_id"),
        "item {item_id}: in the {core}-core of events, but not in the catalogue",
        core=core,
    )
    if core > 1 and info.core_window == "all" and info.split.by == "temporal":
        rule.note = (
            f"the {core}-core was computed on the whole log including validation and "
            f"test (core_window: all), as in papers; core_window: train uses only the "
            f"training window"
        )


def check_texts(tables: Tables, rule: Rule) -> None:
    """Check the texts of items that come from events against the latest before val."""
    info, events = tables.opened["items"].info, tables.events
    if info.split.by == "temporal":
        events = events.filter(pl.col("timestamp_ms") < info.split.val_start_ms)
    for name in events.select("^text_.*$").columns:
        rule.rows += tables.items.height
        latest = (
            events.drop_nulls(name)
            .group_by("item_id")
            .agg(expected=pl.col(name).sort_by("timestamp_ms", name).last())
        )
        joined = tables.items.join(latest, on="item_id", how="left")
        rule.add_rows(
            joined.filter(pl.col(name).ne_missing(pl.col("expected"))).sort("item_id"),
            f"item {{item_id}}: {name} is {{{name}}}, events give {{expected}}",
        )


def check_users(tables: Tables, expected: pl.DataFrame, rule: Rule) -> None:
    """Check the users of `events` and `sequences`.

    A user's events must be in one part. `sequences` must have the `expected` users
    (`user_id`), and each once.
    """
    events = tables.events.select("user_id", "part").unique()
    sequences = tables.sequences.select("user_id")
    rule.rows = events["user_id"].n_unique()
    for noun, frame in (("parts of events", events), ("rows of sequences", sequences)):
        repeated = frame.group_by("user_id").len().filter(pl.col("len") > 1)
        rule.add_rows(
            repeated.sort("user_id"), "user {user_id}: in {len} {noun}", noun=noun
        )
    rule.add_rows(
        expected.join(sequences, on="user_id", how="anti").sort("user_id"),
        "user {user_id}: expected from events, but is not in sequences",
    )
    rule.add_rows(
        sequences.unique().join(expected, on="user_id", how="anti").sort("user_id"),
        "user {user_id}: in sequences, but not expected from events",
    )
