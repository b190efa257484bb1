"""Rules on the tables of a log of actions: the cuts, tasks and actions from labels, counts that see the past only.

Everything is computed from `events` with plain polars, by the definitions that the manifest of sequences
names. Counts are labels added up along the time of each key and looked up where a window begins and ends; those of
candidates at the cut before them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import polars as pl

from pipelines.data.audit.base import BEHAVIOURS, EVENTS, ITEMS, SPLITS, Rule, Tables
from pipelines.data.audit.own_features import TrainingValues, check_as_of_inputs, own_columns, with_as_of
from pipelines.data.audit.sequences import (
    Sequences,
    behaviour_rows,
    check_behaviours,
    check_counts,
    check_lengths,
    count_cut,
    expected_behaviours,
    note_cut,
    note_splits,
)

DAY, MINUTE = 86_400_000, 60_000
TOLERANCE = 4e-6  # of features and actions, which are 32-bit floats
REQUIRED = {"events": EVENTS, "items": ITEMS, "sequences": {**BEHAVIOURS, "train_end": "int32", "val_end": "int32"}}
WITHOUT = ("history", "known", "requests", "targets", "queries")
WIDE = ["tasks", "actions", "features"]
"""List columns with several numbers per event."""


def check_actions_tables(sequences: Sequences) -> pl.DataFrame:
    """Rules on rows of `sequences`. Returns the users that events give (`user`)."""
    tables, items, rules, cut = sequences.tables, sequences.items, sequences.rules, sequences.cut
    info = tables.sequences.info
    held = {f"{name}.{split}": 0 for name in ("events", "users_with_candidates") for split in SPLITS}
    held |= {f"users_without_context.{split}": 0 for split in SPLITS}
    positives = np.zeros(len(info["tasks"]))
    scale = np.zeros((2, len(info["features"])))
    viewers: dict[str, set[str]] = {name: set() for name in info.get("viewers", {})}
    training = TrainingValues(info)
    attributed = items.join(_attributes(tables), on="item_index", how="left")
    for users, mine in sequences.parts():
        users = check_lengths(users, rules["behaviours"])
        values = {name: _flat(users, name, len(info[name])) for name in WIDE}
        flat = behaviour_rows(users.drop(WIDE))
        check_ends(tables, users, flat, rules["splits"])
        _count_users(users, held)
        ends = flat.join(users.select("row", "train_end"), on="row", how="left", maintain_order="left")
        train = ends.select(pl.col("place") < pl.col("train_end")).to_series().to_numpy()
        positives += values["tasks"][train].sum(axis=0)
        training.add(flat.filter(pl.Series(train)).select(own_columns(info)))
        for name, seen in viewers.items():
            seen |= set(flat.filter(pl.Series(train))[f"cat_{name}"].drop_nulls().unique())
        scale += [values["features"][train].sum(axis=0), (values["features"][train] ** 2).sum(axis=0)]
        if mine is not None:
            count_cut(tables, mine, items, cut)
            expected = expected_behaviours(tables, mine, items)
            expected = with_as_of(tables, expected.with_columns(as_of(tables, expected)), "as_of")
            check_behaviours(tables, users.drop(WIDE), flat, expected, rules["behaviours"])
        check_definitions(info, flat, values, rules["tasks"])
        points = flat.with_columns(as_of(tables, flat)).join(
            attributed, on="item_index", how="left", maintain_order="left"
        )
        check_features(tables, points, values["features"], attributed, rules["windows"], sequences.progress)
    training.check(rules["features"])
    check_as_of_inputs(tables, rules["features"])
    check_counts(sequences, held)
    note_cut(tables, cut, rules["behaviours"])
    note_splits({f"{name} events": held[f"events.{name}"] for name in SPLITS}, rules["splits"])
    check_scale(info, positives, scale, rules["counts"])
    for name, seen in viewers.items():
        rules["counts"].rows += 1
        if sorted(seen) != info["viewers"][name]:
            stated = len(info["viewers"][name])
            rules["counts"].broken(
                1, [f"viewers of {name}: {stated} values, which are not the {len(seen)} of training"]
            )
    kept = [
        part.filter(pl.col("item_id").is_in(items["item_id"].implode())).select(user=pl.col("user_id").unique().hash())
        for _, part in tables.parts("events", ["user_id", "item_id"])
    ]
    return pl.concat(kept).unique()


def _attributes(tables: Tables) -> pl.DataFrame:
    """`item_index` and, as `of_NAME`, the attributes of items that are counted."""
    keys = tables.sequences.info["definitions"]["counts"]["keys"]
    names = [f"cat_{key}" for key in keys if key not in ("user", "item")]
    parts = [part for _, part in tables.parts("items", ["item_index", *names])]
    return pl.concat(parts).rename({name: name.replace("cat_", "of_", 1) for name in names})


def _flat(users: pl.DataFrame, name: str, width: int) -> np.ndarray:
    """(events, width) of a wide list column."""
    if not width:
        return np.zeros((int(users[name].list.len().sum()), 0))
    return users[name].cast(pl.List(pl.List(pl.Float64))).explode().drop_nulls().explode().to_numpy().reshape(-1, width)


def cut_times(tables: Tables, flat: pl.DataFrame) -> pl.DataFrame:
    """Per `row` of a user the two cut times, `val_cut` and `test_cut`; null where no event of his is after it.

    Those of a per_user split are the times of the events that have the shares of the user's events before them.
    """
    info = tables.sequences.info
    if info["split"]["kind"] == "per_user":
        after = [tables.sequences.config["split"][name] for name in ("val_fraction", "test_fraction")]
        places = [(pl.len() * (1 - share) - 1e-9).ceil().cast(pl.Int64) for share in (sum(after), after[1])]
        cuts = [pl.col("timestamp_ms").get(place, null_on_oob=True) for place in places]
    else:
        cuts = [pl.lit(info[name], pl.Int64).first() for name in ("val_start_ms", "test_start_ms")]
    return flat.group_by("row").agg(val_cut=cuts[0], test_cut=cuts[1])


def check_ends(tables: Tables, users: pl.DataFrame, flat: pl.DataFrame, rule: Rule) -> None:
    """`train_end` and `val_end` count the user's events before the two cut times."""
    rule.rows += users.height
    if tables.sequences.info["split"]["kind"] == "per_user":
        note = "per_user cuts let other users' later actions into training; a temporal split does not"
        if note not in rule.note:  # said once for all parts
            rule.remark(note)
    before = [
        (pl.col("timestamp_ms") < pl.col(cut)).fill_null(True).sum().cast(pl.Int32) for cut in ("val_cut", "test_cut")
    ]
    timed = flat.join(cut_times(tables, flat), on="row")
    counted = timed.group_by("row").agg(train=before[0], val=before[1])
    both = users.select("row", "user_id", "train_end", "val_end").join(counted, on="row", how="left")
    wrong = both.filter(
        pl.col("train_end").ne_missing(pl.col("train")) | pl.col("val_end").ne_missing(pl.col("val"))
    ).sort("row")
    rule.broken_rows(
        wrong,
        lambda row: (
            f"user {row['user_id']}: train_end, val_end are {row['train_end']}, {row['val_end']}; before the cuts are "
            f"{row['train']}, {row['val']} events"
        ),
    )


def as_of(tables: Tables, flat: pl.DataFrame) -> pl.Series:
    """When each event's counts are taken, in ms: its time in training, for candidates the cut before them."""
    time, val, test = pl.col("timestamp_ms"), pl.col("val_cut"), pl.col("test_cut")
    timed = flat.join(cut_times(tables, flat), on="row", how="left", maintain_order="left")
    return timed.select(as_of=pl.when(time >= test).then(test).when(time >= val).then(val).otherwise(time)).to_series()


def _count_users(users: pl.DataFrame, held: dict[str, int]) -> None:
    """Adds a part's events and users per split to what the manifest should count."""
    begin = [pl.lit(0), pl.col("train_end"), pl.col("val_end")]
    ends = [pl.col("train_end"), pl.col("val_end"), pl.col("item_index").list.len().cast(pl.Int64)]
    for split, low, high in zip(SPLITS, begin, ends, strict=True):
        here = users.select(rows=(high - low), first=low == 0)
        held[f"events.{split}"] += int(here["rows"].sum())
        some = here.filter(pl.col("rows") > 0)
        held[f"users_with_candidates.{split}"] += some.height
        held[f"users_without_context.{split}"] += int(some["first"].sum())


def check_definitions(info: dict[str, Any], flat: pl.DataFrame, values: dict[str, np.ndarray], rule: Rule) -> None:
    """Tasks and actions are what the labels say, by the definitions of the manifest."""
    rule.rows += flat.height
    made = info["definitions"]
    for column, name in enumerate(info["tasks"]):
        right = flat.select(task_of(made["tasks"][name]).cast(pl.Float64)).to_series().to_numpy()
        _differ(flat, values["tasks"][:, column], right, f"task {name}", rule)
    for column, name in enumerate(info["actions"]):
        right = flat.select(action_of(made["inputs"][name])).to_series().to_numpy()
        _differ(flat, values["actions"][:, column], right, f"action {name}", rule)


def task_of(task: dict[str, Any]) -> pl.Expr:
    """A task by its definition; a missing label is an action that was not taken."""
    if task["any"]:
        return reduce(lambda a, b: a | b, (pl.col(f"label_{label}").fill_null(False) for label in task["any"]))
    label = pl.col(f"label_{task['label']}")
    if task["above"] is not None:
        return (label > task["above"]).fill_null(False)
    if task["at_least"] is not None:
        return (label >= task["at_least"]).fill_null(False)
    return label.fill_null(False)


def action_of(action: dict[str, Any]) -> pl.Expr:
    """What models read of an action: a bool as it is, a number from 0 to 1 within its range."""
    label = pl.col(f"label_{action['label']}")
    if action["range"] is None:
        return label.fill_null(False).cast(pl.Float64)
    low, high = action["range"]
    over, whole = label.cast(pl.Float64).fill_null(low).clip(low, high) - low, float(high - low)
    if action["log_unit"] is None:
        return over / whole
    return (over / action["log_unit"]).log1p() / float(np.log1p(whole / action["log_unit"]))


def _differ(flat: pl.DataFrame, said: np.ndarray, right: np.ndarray, name: str, rule: Rule) -> None:
    """Reports the events where the table says something else than what is right."""
    wrong = ~(np.abs(said - right) <= TOLERANCE * np.maximum(1, np.abs(right)))
    rows = flat.select("user_id", "place", said=pl.Series(said), right=pl.Series(right)).filter(pl.Series(wrong))
    rule.broken_rows(
        rows,
        lambda row: (
            f"user {row['user_id']}, event {row['place']}: {name} is {row['said']:.6g}, events give {row['right']:.6g}"
        ),
    )


def check_features(
    tables: Tables,
    points: pl.DataFrame,
    values: np.ndarray,
    items: pl.DataFrame,
    rule: Rule,
    progress: Callable[[str], None],
) -> None:
    """Recounts every feature of every event from the events of all users."""
    info = tables.sequences.info
    counts = info["definitions"]["counts"]
    rule.rows += points.height
    points = points.with_row_index("point")
    known = dict.fromkeys(info["features"], False)
    for key in counts["keys"]:
        by = {"user": "user_id", "item": "item_id"}.get(key, f"of_{key}")
        shifts = [round(counts["delay_minutes"] * MINUTE), *(round(days * DAY) for days in counts["windows_days"])]
        progress(f"counts of {key}")
        until = counted_before(tables, points, by, items, shifts)
        for days, shift in zip(counts["windows_days"], shifts[1:], strict=True):
            seen = until[shifts[0]] - until[shift]  # (points, 1 + labels)
            strength = counts["strength"]
            right = {f"{key}_exposures_{days:g}d": np.log1p(seen[:, 0])}
            for column, label in enumerate(counts["counted_labels"], start=1):
                right[f"{key}_{label}_{days:g}d"] = np.log1p(seen[:, column])
                rate = (seen[:, column] + counts["prior"] * strength) / (seen[:, 0] + strength)
                right[f"{key}_{label}_rate_{days:g}d"] = rate
            for name in right.keys() & known.keys():
                known[name] = True
                _differ(points, values[:, info["features"].index(name)], right[name], f"feature {name}", rule)
    strange = [name for name, checked in known.items() if not checked]
    if strange:
        rule.broken(points.height, [f"{name}: a feature that the audit does not know" for name in strange])


def counted_before(
    tables: Tables, points: pl.DataFrame, by: str, items: pl.DataFrame, shifts: list[int]
) -> dict[int, np.ndarray]:
    """Per shift (points, 1 + labels): exposures and tasks of the key before the point's `as_of` less the shift, over
    all users; no point counts an event of its own time."""
    made = tables.sequences.info["definitions"]
    counted = made["counts"]["counted_labels"]
    labels = [task_of(made["tasks"][name]).cast(pl.Int64).alias(f"counted_{name}") for name in counted]
    names = ["shown", *(f"counted_{name}" for name in counted)]
    total = {shift: np.zeros((points.height, len(names))) for shift in shifts}
    moved = {
        shift: points.select("point", by, at=pl.col("as_of") - shift).drop_nulls(by).sort("at") for shift in shifts
    }
    for _, events in tables.parts("events"):
        if by not in events.columns:
            events = events.join(items.select("item_id", by), on="item_id")
        along = (
            events.with_columns(pl.lit(1, pl.Int64).alias("shown"), *labels)
            .drop_nulls(by)
            .group_by(by, "timestamp_ms")
            .agg(pl.col(names).sum())
            .sort("timestamp_ms")
            .with_columns(pl.col(names).cum_sum().over(by))
        )
        for shift, at in moved.items():
            found = at.join_asof(
                along, left_on="at", right_on="timestamp_ms", by=by, allow_exact_matches=False, check_sortedness=False
            )
            total[shift][found["point"].to_numpy()] += found.select(pl.col(names).fill_null(0)).to_numpy()
    return total


def check_scale(info: dict[str, Any], positives: np.ndarray, sums: np.ndarray, rule: Rule) -> None:
    """Base rates, means and deviations of the manifest are those of training events."""
    events = info["events"]["train"]
    stated = [info["base_rates"].get(name) for name in info["tasks"]]
    mean = sums[0] / events
    std = np.sqrt((sums[1] / events - mean**2).clip(0))
    checks = [
        ("base_rates", info["tasks"], stated, positives / events),
        ("feature_mean", info["features"], info["feature_mean"], mean),
        ("feature_std", info["features"], info["feature_std"], np.where(std > 1e-6, std, 1.0)),
    ]
    for kind, names, said, right in checks:
        rule.rows += len(names)
        for name, value, expected in zip(names, said, right, strict=True):
            if value is None or abs(value - expected) > 1e-5 * max(1.0, abs(expected)):
                rule.broken(1, [f"{kind} of {name}: the manifest says {value}, training events give {expected:.6g}"])
