"""Rules on sequences that several kinds share: behaviours, histories, splits, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce

import polars as pl

from pipelines.data.audit.base import FEW, SHOWN, Rule, Tables, count_before, name_request

PER_SPLIT = (
    "requests",
    "candidates",
    "requests_one_class",
    "events",
    "users_with_candidates",
    "users_without_context",
)
"""What manifests count by split."""


@dataclass
class Sequences:
    """The table `sequences` under audit: what the rules of a kind are given, and what those of every kind count."""

    tables: Tables
    items: pl.DataFrame
    """`item_index` and `item_id` of the catalogue."""
    event_users: pl.DataFrame
    """`user` (hash of the id) and `part`, one row per user and part of events."""
    core_users: pl.DataFrame
    """`user` of those that the k-core keeps."""
    rules: dict[str, Rule]
    progress: Callable[[str], None]
    held: dict[str, int] = field(default_factory=lambda: {"users": 0, "interactions": 0})
    """What the table holds, to be compared with what its manifest counts."""
    cut: dict[str, int] = field(default_factory=lambda: {"truncated_users": 0, "truncated_events": 0})
    """What `max_events` leaves out."""
    found: list[pl.DataFrame] = field(
        default_factory=lambda: [pl.DataFrame(schema={"user": pl.UInt64, "part": pl.Int32})]
    )
    """`user` and `part` of each row of the parts that were read."""

    def parts(self) -> Iterator[tuple[pl.DataFrame, pl.DataFrame | None]]:
        """Every part with its users' events: both with `row`, the rank of the user's row. None where there is none."""
        kept: tuple[int, pl.DataFrame] | None = None  # the part of events that was read last
        for number, users in self.tables.parts("sequences"):
            self.progress(f"sequences, part {number + 1} of {len(self.tables.sequences.files)}")
            users = users.with_row_index("row")
            hashes = users.select(user=pl.col("user_id").hash())
            self.found.append(hashes.with_columns(part=pl.lit(number, pl.Int32)))
            self.held["users"] += users.height
            self.held["interactions"] += int(users["item_index"].list.len().sum())
            mine = []
            for source in parts_of(self.event_users, hashes["user"]):  # one, where a part was made from a part
                if kept is None or kept[0] != source:
                    kept = (source, self.tables.part("events", source))
                mine.append(kept[1].join(users.select("user_id", "row"), on="user_id"))
            yield users, pl.concat(mine) if mine else None


def parts_of(event_users: pl.DataFrame, users: pl.Series) -> list[int]:
    """The parts of events that hold these users (hashes)."""
    return event_users.filter(pl.col("user").is_in(users.implode()))["part"].unique().sort().to_list()


def count_cut(tables: Tables, events: pl.DataFrame, items: pl.DataFrame, cut: dict[str, int]) -> None:
    """Adds the users of `events` who have more behaviours than are kept, and those that are not."""
    most = tables.sequences.info.get("max_events") or 2**31
    lengths = tables.behaviours_of(events).join(items, on="item_id", how="semi").group_by("row").len()
    over = lengths.select(pl.col("len").cast(pl.Int64) - most).to_series()
    cut["truncated_users"] += int((over > 0).sum())
    cut["truncated_events"] += int(over.clip(0).sum())


def note_cut(tables: Tables, cut: dict[str, int], rule: Rule) -> None:
    if cut["truncated_events"]:
        rule.remark(
            f"max_events: {tables.sequences.info['max_events']:,}; the oldest {cut['truncated_events']:,} behaviours "
            f"of {cut['truncated_users']:,} users are left out"
        )


def note_splits(sizes: dict[str, int], rule: Rule) -> None:
    """Notes splits with few or no requests; `sizes` by what they are."""
    for name, size in sizes.items():
        if size < FEW:
            rule.remark(f"{size:,} {name}")


def list_columns(users: pl.DataFrame) -> list[str]:
    return [name for name, kind in users.schema.items() if isinstance(kind, pl.List) and name != "requests"]


def check_lengths(users: pl.DataFrame, rule: Rule) -> pl.DataFrame:
    """Reports users whose lists differ in length and returns the others, which can be laid out as rows."""
    lengths = [pl.col(name).list.len() for name in list_columns(users)]
    equal = reduce(lambda a, b: a & b, (length == lengths[0] for length in lengths)).fill_null(False)
    rule.broken_rows(users.filter(~equal), lambda row: f"user {row['user_id']}: lists of unequal length")
    rule.rows += users.filter(~equal).height
    return users.filter(equal)


def behaviour_rows(users: pl.DataFrame) -> pl.DataFrame:
    """The behaviours of `users`, one row each: `row`, `user_id`, `place` and every list column."""
    lists = list_columns(users)
    flat = users.select("row", "user_id", *lists).filter(pl.col("item_index").list.len() > 0).explode(lists)
    return flat.with_columns(place=pl.int_range(pl.len(), dtype=pl.Int32).over("row"))


def request_rows(users: pl.DataFrame) -> pl.DataFrame:
    """The requests of `users`, one row each: `row`, `user_id`, `place` and the struct's fields."""
    flat = users.select("row", "user_id", "requests").filter(pl.col("requests").list.len() > 0).explode("requests")
    return flat.unnest("requests").with_columns(place=pl.int_range(pl.len(), dtype=pl.Int32).over("row"))


def expected_behaviours(tables: Tables, events: pl.DataFrame, items: pl.DataFrame) -> pl.DataFrame:
    """The behaviours that `events` give: those in the catalogue, as they become known, the most recent ones.

    The sort keeps the file's order where all keys are equal.
    """
    most = tables.sequences.info.get("max_events") or 2**31
    return (
        tables.behaviours_of(events)
        .join(items, on="item_id", maintain_order="left")
        .sort("row", tables.known, *tables.event_order, maintain_order=True)
        .with_columns(place=pl.int_range(pl.len(), dtype=pl.Int64).over("row"), length=pl.len().over("row"))
        .with_columns(place=(pl.col("place") - (pl.col("length").cast(pl.Int64) - most).clip(0)).cast(pl.Int32))
        .filter(pl.col("place") >= 0)
    )


def check_behaviours(
    tables: Tables, users: pl.DataFrame, behaviours: pl.DataFrame, expected: pl.DataFrame, rule: Rule
) -> None:
    columns = list_columns(users)
    absent = [name for name in columns if behaviours.schema[name] != expected.schema.get(name)]
    if absent:
        rule.broken(behaviours.height, [f"column {absent[0]} of sequences is not in events, or is of another type"])
        columns = [name for name in columns if name not in absent]
    both = behaviours.join(
        expected.filter(pl.col("row").is_in(users["row"].implode())).select("row", "place", *columns),
        on=["row", "place"],
        how="full",
        coalesce=True,
        suffix="_events",
    )
    rule.rows += both.height
    differ = pl.any_horizontal(pl.col(name).ne_missing(pl.col(f"{name}_events")) for name in columns)
    wrong = both.filter(differ).sort("row", "place")
    name_of = dict(
        users.filter(pl.col("row").is_in(wrong["row"].head(SHOWN).implode())).select("row", "user_id").rows()
    )
    rule.broken_rows(
        wrong,
        lambda row: (
            f"user {name_of[row['row']]}, behaviour {row['place']}: "
            + "; ".join(
                f"{name} is {row[name]}, events give {row[f'{name}_events']}"
                for name in columns
                if row[name] != row[f"{name}_events"]
            )
        ),
    )


def check_history(
    tables: Tables, behaviours: pl.DataFrame, requests: pl.DataFrame, rule: Rule, log_order: bool = False
) -> int:
    """Checks `history_end`; returns how many requests have tied behaviours in their history.

    log_order: whether a request is its behaviour, which sees all that are before it in the log.
    """
    rule.rows += requests.height
    known = requests.filter(pl.col("timestamp_ms").is_not_null())
    rule.broken_rows(
        requests.filter(pl.col("timestamp_ms").is_null()), lambda row: f"{name_request(row)}: no timestamp_ms"
    )
    earlier = behaviours.select("row", timestamp_ms=pl.col(tables.known))
    counted = count_before(known, earlier, ["row"], "timestamp_ms")
    late = counted.with_columns(expected=pl.col("count"))
    if log_order:
        late = counted.with_columns(expected=pl.col("place").cast(pl.Int64))
    wrong = late.filter(pl.col("history_end").cast(pl.Int64).ne_missing(pl.col("expected"))).sort("row", "place")
    rule.broken_rows(
        wrong,
        lambda row: (
            f"{name_request(row)} at {row['timestamp_ms']}: history_end is {row['history_end']}, "
            f"{row['expected']} behaviours are known earlier"
        ),
    )
    return counted.filter(pl.col("history_end") > pl.col("count")).height


def check_known(tables: Tables, requests: pl.DataFrame, expected: pl.DataFrame, rule: Rule) -> None:
    """No history holds a behaviour before it is known. expected: the behaviours that events give."""
    if tables.known == "timestamp_ms":
        return
    rule.rows += requests.height
    latest = expected.sort("row", "place").select(
        "row",
        "item_id",
        end=pl.col("place") + 1,
        known=pl.col(tables.known),
        latest=pl.col(tables.known).cum_max().over("row"),
    )
    seen = requests.select("row", "place", "user_id", "timestamp_ms", pl.col("history_end").alias("end"))
    early = seen.join(latest, on=["row", "end"]).filter(pl.col("latest") >= pl.col("timestamp_ms")).sort("row", "place")
    rule.broken_rows(
        early,
        lambda row: (
            f"{name_request(row)} at {row['timestamp_ms']}: its history holds a behaviour that is known from "
            f"{row['latest']} on"
        ),
    )


def check_splits(tables: Tables, requests: pl.DataFrame, rule: Rule) -> None:
    rule.rows += requests.height
    split = tables.sequences.info.get("split") or {}
    starts = [split.get("val_start_ms"), split.get("test_start_ms")]
    if split.get("kind") == "leave_last_out":
        last = pl.len().over("row").cast(pl.Int64) - 1 - pl.col("place")  # 0 for the user's last request
        few = pl.len().over("row") < 3
        expected = (
            pl.when(few | (last > 1))
            .then(pl.lit("train"))
            .when(last == 1)
            .then(pl.lit("val"))
            .otherwise(pl.lit("test"))
        )
        if tables.events.info.get("clock"):
            note = "leave-last-out lets other users' later behaviour into training; a temporal split does not"
            if note not in rule.note:  # said once for all parts
                rule.remark(note)
    elif split.get("kind") == "temporal" and all(isinstance(start, int) for start in starts):
        time = pl.col("timestamp_ms")
        expected = (
            pl.when(time < starts[0])
            .then(pl.lit("train"))
            .when(time < starts[1])
            .then(pl.lit("val"))
            .otherwise(pl.lit("test"))
        )
        if tables.events.info.get("clock") is False and not rule.violations:
            rule.broken(1, ["a temporal split of a log that has an order and no clock"])
    else:
        rule.broken(requests.height, [f"the manifest of sequences names no known split: {split}"])
        return
    wrong = requests.with_columns(expected=expected).filter(pl.col("split").ne_missing(pl.col("expected")))
    rule.broken_rows(
        wrong.sort("row", "place"),
        lambda row: f"{name_request(row)} at {row['timestamp_ms']}: in {row['split']}, belongs to {row['expected']}",
    )


def check_counts(sequences: Sequences, held: dict[str, int]) -> None:
    """The manifest counts what the table holds; `held`: what this kind counts besides."""
    info, rule = sequences.tables.sequences.info, sequences.rules["counts"]
    by_split = {name: info.get(name) or {} for name in PER_SPLIT}
    stated = info | {f"{name}.{split}": n for name, counts in by_split.items() for split, n in counts.items()}
    for name, count in {**sequences.held, "items": sequences.items.height, **held}.items():
        rule.rows += 1
        if stated.get(name) != count:
            rule.broken(1, [f"{name}: the manifest says {stated.get(name)}, the table holds {count}"])
