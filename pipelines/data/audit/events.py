"""Rules on events, on the catalogue that they give, and on users across tables."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import polars as pl

from models.tables import UserError, join
from pipelines.data.audit.base import DAY, SHOWN, Rule, Tables, label_of, name_event


def _earlier_than_previous(columns: list[str]) -> pl.Expr:
    """Whether a row sorts before the row above it, by `columns` in turn."""
    below = pl.lit(False)
    for name in reversed(columns):
        above = pl.col(name).shift(1)
        below = (pl.col(name) < above) | ((pl.col(name) == above) & below)
    return below.fill_null(False)


def check_events(tables: Tables, rules: dict[str, Rule], progress: Callable[[str], None]) -> pl.DataFrame:
    """Rules on rows of `events`. Returns `user` (hash of the id) and `part`, one row per user and part."""
    users, repetitions = [], 0
    last, times_of_day = 0, pl.Series(dtype=pl.Int64)
    kept = tables.events.info.get("duplicates_kept")  # None where they are dropped
    keys = ["user_id", *tables.event_order]
    for number, events in tables.parts("events"):
        progress(f"events, part {number + 1} of {len(tables.events.files)}")
        rule = rules["events"]
        rule.rows += events.height
        rule.broken_rows(
            events.filter(pl.any_horizontal(pl.col(keys).is_null()) | (pl.col("timestamp_ms") < 0)),
            lambda row: f"{name_event(row)}: a key that is null or a negative time",
        )
        rule.broken_rows(
            events.filter(_earlier_than_previous(keys)), lambda row: f"{name_event(row)}: sorts before the row above it"
        )
        _check_known(tables, events, rules["known"])
        rules["duplicates"].rows += events.height
        repeated = events.filter(events.is_duplicated())
        if kept is None:
            rules["duplicates"].broken(
                events.height - events.unique().height,
                [name_event(row) for row in repeated.unique(maintain_order=True).head(SHOWN).iter_rows(named=True)],
            )
        repetitions += events.height - events.unique().height
        last = max(last, int(events["timestamp_ms"].to_numpy().max(initial=0)))
        times_of_day = pl.concat([times_of_day, (events["timestamp_ms"] % DAY)]).unique().head(2)
        users.append(_hashes(events).with_columns(part=pl.lit(number, pl.Int32)))
    if kept is not None:
        rules["duplicates"].remark(f"duplicates: keep; {kept:,} events repeat another in every column")
        # under log_order equal events have a position each
        if tables.events.info.get("ties") == "strict" and repetitions != kept:
            rules["duplicates"].broken(1, [f"{repetitions:,} events repeat another, the manifest says {kept:,}"])
    if tables.events.info.get("clock") and times_of_day.len() == 1:
        rules["events"].remark("all times are of one time of day: events of a day are ties")
    made = datetime.fromisoformat(tables.events.created or "9999-12-31T00:00:00+00:00")
    if tables.events.info.get("clock") and last > made.timestamp() * 1000 + DAY:
        rules["events"].remark(f"the last time is {last}, later than the table itself ({tables.events.created})")
    return pl.concat(users)


def _check_known(tables: Tables, events: pl.DataFrame, rule: Rule) -> None:
    """A label that is known later than its event has a time where it is set and only there, never before the event."""
    for name, said in tables.events.info.get("known", {}).items():
        rule.rows += events.height
        time, known, label = pl.col("timestamp_ms"), pl.col(f"known_{name}"), pl.col(f"label_{name}")
        set_ = label.fill_null(False) if events.schema[f"label_{name}"] == pl.Boolean else label.is_not_null()
        right = known >= time
        if "delay_minutes" in said:
            right = known == time + round(said["delay_minutes"] * 60_000)
        wrong = events.filter((set_ & ~right.fill_null(False)) | (~set_ & known.is_not_null()))
        rule.broken_rows(
            wrong.with_columns(said=pl.lit(name), at=known),
            lambda row: f"{name_event(row)}: label {row['said']} is known from {row['at']} on",
        )


def _hashes(frame: pl.DataFrame) -> pl.DataFrame:
    """One 64-bit hash per user of `frame`: what stands for the id where all users must be in memory."""
    return frame.select(user=pl.col("user_id").unique().hash())


def read_catalogue(tables: Tables) -> pl.DataFrame:
    """`item_index` and `item_id` of all items."""
    parts = [part for _, part in tables.parts("items", ["item_index", "item_id"])]
    if not parts:
        raise UserError(f"{join(tables.uri, 'items')} lists no items; make the tables again")
    return pl.concat(parts)


def _core(
    tables: Tables, core: int, before: int | None, progress: Callable[[str], None], stay: pl.Series, given: bool
) -> tuple[pl.Series, pl.DataFrame]:
    """The k-core by the naive loop: drop what has fewer than `core` behaviours until nothing changes.

    Only behaviours known before the time `before` count, where it is given. Returns the item ids that stay and
    the hashes of the users that stay. stay: items that are not dropped. given: whether there
    are no others, so that only users are dropped.
    """
    items: pl.Series | None = stay if given else None
    core = max(core, 1)
    known = tables.known if tables.counted else "timestamp_ms"
    columns = list(dict.fromkeys(["user_id", "item_id", "timestamp_ms", *label_of(tables.counted), known]))
    while True:
        progress("k-core" if items is None else f"k-core, {items.len():,} items left")
        counts, users = [], []
        for _, events in tables.parts("events", columns):
            events = tables.behaviours_of(events) if tables.counted else events
            if before is not None:
                events = events.filter(pl.col(known) < before)
            if items is not None:
                events = events.filter(pl.col("item_id").is_in(items.implode()))
            events = events.filter(pl.len().over("user_id") >= core)
            counts.append(events.group_by("item_id").len())
            users.append(_hashes(events))
        counted = pl.concat(counts).group_by("item_id").agg(pl.col("len").sum())
        left = counted.filter((pl.col("len") >= core) | pl.col("item_id").is_in(stay.implode()))["item_id"]
        if given or (items is not None and left.len() == items.len()):
            return stay if given else left, pl.concat(users).unique()
        items = left


def _without_behaviours(tables: Tables, items: pl.DataFrame) -> int:
    """Items of the catalogue that no behaviour is on, in the whole log."""
    for _, events in tables.parts("events", ["item_id", *label_of(tables.counted)]):
        events = tables.behaviours_of(events) if tables.counted else events
        items = items.join(events, on="item_id", how="anti")
    return items.height


def check_catalogue(tables: Tables, items: pl.DataFrame, rule: Rule, progress: Callable[[str], None]) -> pl.DataFrame:
    """Checks the catalogue; returns the hashes of the users that the k-core keeps."""
    rule.rows = items.height
    placed = items.with_columns(
        expected=pl.int_range(pl.len(), dtype=pl.Int32), above=pl.col("item_id").shift(1)
    ).filter(
        pl.col("item_index").ne_missing(pl.col("expected"))
        | (pl.col("item_id") <= pl.col("above")).fill_null(False)
        | pl.col("item_id").is_null()
    )
    rule.broken_rows(
        placed,
        lambda row: f"item {row['item_id']}: index {row['item_index']} in row {row['expected']}, after {row['above']}",
    )
    core = tables.items.info.get("core") or 0
    window = tables.items.info.get("core_window", "all")
    split = tables.sequences.info.get("split") or {}
    before = split.get("val_start_ms") if window == "train" else None
    told_new = tables.items.info.get("items_without_behaviours")  # None unless all described items are kept
    given = tables.items.info.get("catalogue_of")
    stay = items["item_id"] if given or told_new is not None else items["item_id"].clear()
    kept, users = _core(tables, core, before, progress, stay, bool(given))
    computed = pl.DataFrame({"item_id": kept})
    if given:
        rule.remark(f"the catalogue is that of {given}; the {core}-core drops users only")
    elif told_new is None:
        rule.broken_rows(
            items.join(computed, on="item_id", how="anti"),
            lambda row: f"item {row['item_id']}: in the catalogue, but not in the {core}-core of the events",
        )
    else:
        new = _without_behaviours(tables, items)
        rule.remark(f"items.keep: all; {new:,} of {items.height:,} items have no behaviour")
        if new != told_new:
            rule.broken(1, [f"{new:,} items of the catalogue have no behaviour, the manifest says {told_new:,}"])
    rule.broken_rows(
        computed.join(items, on="item_id", how="anti").sort("item_id"),
        lambda row: f"item {row['item_id']}: in the {core}-core of the events, but not in the catalogue",
    )
    if core > 1 and window == "all" and split.get("kind") == "temporal":
        rule.remark(
            f"the {core}-core was computed on the whole log, validation and test included (core_window: all), "
            f"as papers do; core_window: train sees the training window only"
        )
    told = [field["name"] for field in tables.items.schema if field["name"].startswith(("text_", "cat_", "num_"))]
    if told:
        bare = sum(
            part.filter(pl.all_horizontal(pl.col(told).is_null())).height for _, part in tables.parts("items", told)
        )
        if bare > 0.1 * items.height:
            rule.remark(f"{bare:,} of {items.height:,} items have no text and no attribute")
    return users


def check_users(
    tables: Tables, in_events: pl.DataFrame, in_core: pl.DataFrame, in_sequences: pl.DataFrame, rule: Rule
) -> None:
    """Each argument holds `user` (hash); `in_core` those that survive in events, the others also `part`."""
    rule.rows = in_events["user"].n_unique()
    for table, frame in (("events", in_events), ("sequences", in_sequences)):
        repeated = frame.filter(pl.col("user").is_duplicated())
        several = _names(tables, table, repeated).group_by("user_id").len().filter(pl.col("len") > 1).sort("user_id")
        said = f"{'parts' if table == 'events' else 'rows'} of {table}"
        several = several.with_columns(said=pl.lit(said))
        rule.broken_rows(several, lambda row: f"user {row['user_id']}: in {row['len']} {row['said']}")
    lost = in_events.join(in_core, on="user", how="semi").join(in_sequences, on="user", how="anti")
    rule.broken_rows(
        _names(tables, "events", lost).unique().sort("user_id"),
        lambda row: f"user {row['user_id']}: survives in events, but is not in sequences",
    )
    added = in_sequences.join(in_core, on="user", how="anti")
    rule.broken_rows(
        _names(tables, "sequences", added).unique().sort("user_id"),
        lambda row: f"user {row['user_id']}: in sequences, but has no surviving events",
    )


def _names(tables: Tables, table: str, hashes: pl.DataFrame) -> pl.DataFrame:
    """The ids behind `hashes` (`user`, `part`): one row per part of events, or per row of sequences."""
    names = [pl.DataFrame(schema={"user_id": pl.String})]
    for number in hashes["part"].unique().sort().to_list():
        wanted = hashes.filter(pl.col("part") == number)["user"]
        ids = tables.part(table, number, ["user_id"])
        ids = ids.filter(pl.col("user_id").hash().is_in(wanted.implode()))
        names.append(ids.unique() if table == "events" else ids)
    return pl.concat(names)
