"""A log of actions as `sequences`: every impression with all its actions, tasks and counts, cut in time.

`python -m jobs.prepare` makes them where a source says `prepare: {kind: actions}`. An events part holds
each of its users whole and sorted, so a part becomes a part of `sequences` in one vectorised pass. What a
user did before the two cut times of the log is told by two integers, `train_end` and `val_end`: context
and candidates of validation and of test are slices, and nothing is copied.

Shapes: E events of a part, U users, K tasks, A actions that models read, F features.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.config import pluralize
from models.storage.tables import Manifest, Part, UserError, part_uris, write_part
from pipelines.data.actions.config import ITEM, USER, ActionsConfig, check_actions
from pipelines.data.actions.features import IDS, ActionsWindows, features, gather
from pipelines.data.engine import Engine, Shared, fetch
from pipelines.data.events.event_stats import (
    Vocabulary,
    coded,
    count_pairs,
    positions_in,
    read_coded,
    runs,
)
from pipelines.data.run import Run, gather_parts
from pipelines.data.schemas import actions_schema
from pipelines.data.sequences.as_of import (
    AsOfTable,
    as_of_schema,
    attach,
    describe_as_of,
    make_as_of,
    say_missing,
    share_as_of,
)
from pipelines.data.sequences.counts import Columns, count_in_buckets
from pipelines.data.sequences.own_features import (
    TrainingValues,
    describe_features,
    own_names,
)
from pipelines.data.sequences.splits import NAMES, require_training

NOTHING = pa.schema([])


@dataclass(frozen=True)
class ActionsRules:
    """What turns the events of a log of actions into sequences."""

    schema: pa.Schema
    """Schema of the events."""
    split: dict[str, Any]
    """As the manifest records it: the cut times of a temporal one."""
    max_events: int
    """A user's most recent events that are kept."""
    actions: ActionsConfig
    """Tasks, inputs and counts, resolved."""
    large: tuple[str, ...] = ()
    """Columns of categories with too many values to list, which are hashed as the log's own features."""
    joined: pa.Schema = NOTHING
    """Features of tables with a time of their own."""

    @property
    def cuts(self) -> np.ndarray:
        """(2,) ms: where validation and test begin."""
        return np.array([self.split["val_start_ms"], self.split["test_start_ms"]])

    def sides(self, time: np.ndarray) -> np.ndarray:
        """(E,) index into NAMES, as `cuts` says; an event at a cut belongs to the later side."""
        return (time >= self.cuts[:, None]).sum(axis=0)

    def as_of(self, events: pa.Table) -> np.ndarray:
        """(E,) ms: when each event's counts are taken. Its own time in training; for candidates the cut before them,
        when they are all scored, so that no candidate's counts know what was done with another."""
        time = events["timestamp_ms"].to_numpy()
        side = self.sides(time)
        return np.where(side > 0, self.cuts[side - 1], time)

    @property
    def output(self) -> pa.Schema:
        """Schema of the sequences."""
        events, made = pa.schema([*self.schema, *self.joined]), self.actions
        return actions_schema(
            events, len(made.tasks), len(made.inputs), len(made.features)
        )

    @property
    def own(self) -> list[str]:
        """Columns of the log's own features, but for the viewer-side categories."""
        every = own_names(pa.schema([*self.schema, *self.joined]))
        return [
            name for name in every if name not in self.categories or name in self.large
        ]

    @property
    def categories(self) -> list[str]:
        """Columns of the viewer-side categories."""
        return [name for name in self.schema.names if name.startswith("cat_")]

    @property
    def columns(self) -> list[str]:
        """Columns of events that are read."""
        carried = [
            name
            for name in self.schema.names
            if name.startswith(("label_", "num_", "cat_"))
        ]
        return [*IDS, "timestamp_ms", *carried]


@dataclass(frozen=True)
class KeptEvents:
    """The events of a part that sequences hold."""

    row: np.ndarray
    """(E,) their rows in the part."""
    item: np.ndarray
    """(E,) item_index."""
    user: np.ndarray
    """(E,) code of the user."""
    time: np.ndarray
    """(E,) ms."""
    outside: int
    """Events of items outside the catalogue."""
    truncated_users: int
    truncated_events: int

    @classmethod
    def of(cls, events: pa.Table, catalogue: Vocabulary, max_events: int) -> KeptEvents:
        """Events of items of the catalogue, the most recent of each user."""
        codes = coded(events, "user_id").indices.to_numpy()
        item = positions_in(coded(events, "item_id"), catalogue)
        row = np.flatnonzero(item >= 0)
        start = runs(codes[row])
        length = np.diff(np.append(start, len(row)))
        recent = np.repeat(start + length, length) - np.arange(len(row)) <= max_events
        outside, row = events.num_rows - len(row), row[recent]
        lost = int((~recent).sum())
        time = events["timestamp_ms"].to_numpy()[row]
        return cls(
            row,
            item[row],
            codes[row],
            time,
            outside,
            int((length > max_events).sum()),
            lost,
        )


def _survey_part(
    catalogue: Vocabulary, rules: ActionsRules, uri: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """Events per split, and over training events the positives of each task, the least and largest input and the
    values of each category."""
    events = read_coded(uri, rules.columns, IDS)
    if not events.num_rows:
        return np.zeros(len(NAMES), dtype=np.int64), {}
    kept = KeptEvents.of(events, catalogue, rules.max_events)
    split = rules.sides(kept.time)
    train = kept.row[split == 0]
    of_viewers = {
        name: events[name].combine_chunks().take(pa.array(train))
        for name in rules.categories
    }
    found: dict[str, Any] = {"viewers": TrainingValues.of(of_viewers)}
    for name, task in rules.actions.tasks.items():
        found[f"task {name}"] = np.array([task.values(events)[train].sum()])
    for name, action in rules.actions.inputs.items() if len(train) else ():
        values = action.values(events)[train]
        found[f"input {name}"] = np.array([values.min(), values.max()])
    return np.bincount(split, minlength=len(NAMES)), found


def find_constants(
    parts: list[str], catalogue: Shared, rules: ActionsRules, engine: Engine
) -> tuple[dict[str, str], dict[str, list[str]], tuple[str, ...]]:
    """Find the tasks and inputs that are constant in training, and the values of the viewer-side categories.

    Returns:
        By `task NAME` or `action NAME` what the constant ones are; the values of each category in training; and the
        categories with too many values to list.

    Raises:
        UserError: where a side of a cut is empty, or every task or every input is constant.
    """
    events = np.zeros(len(NAMES), dtype=np.int64)
    positives = dict.fromkeys(rules.actions.tasks, 0)
    ends: dict[str, list[np.ndarray]] = {name: [] for name in rules.actions.inputs}
    viewers: list[TrainingValues] = []
    for _, (rows, found) in engine.each(
        _survey_part, [(uri,) for uri in parts], (catalogue, rules)
    ):
        events += rows
        for name in positives:
            positives[name] += int(found[f"task {name}"].sum()) if found else 0
        for name, seen in ends.items():
            seen += [found[f"input {name}"]] if f"input {name}" in found else []
        viewers += [found["viewers"]] if found else []
    check_sides(dict(zip(NAMES, events.tolist(), strict=True)), rules)
    train = int(events[0])
    constant = {
        f"task {name}": f"{count and 1} for all {train:,} training events"
        for name, count in positives.items()
        if count in (0, train)
    }
    for name, seen in ends.items():
        low, high = np.min(seen), np.max(seen)
        if low == high:
            constant[f"action {name}"] = f"{low:g} for all {train:,} training events"
    for kind, names in (
        ("task", rules.actions.tasks),
        ("action", rules.actions.inputs),
    ):
        if all(f"{kind} {name}" in constant for name in names):
            raise UserError(
                f"every {kind} is constant in training ({', '.join(constant)}); define one that is not in the source "
                f"file, or choose another cut"
            )
    values = describe_features(viewers, rules.categories)["categories"]
    large = tuple(category["name"] for category in values if category["buckets"])
    listed = {
        category["name"][4:]: category["values"]
        for category in values
        if not category["buckets"]
    }
    return constant, listed, large


def without_constants(
    actions: ActionsConfig, constant: Mapping[str, str]
) -> ActionsConfig:
    """Return the configuration without the tasks and inputs of `constant`, whose keys are `task NAME`, `action NAME`.

    A constant task has nothing to learn and no entropy to normalise by. A constant input tells nothing, and models
    would meet its other values untrained.
    """
    tasks = {
        name: task
        for name, task in actions.tasks.items()
        if f"task {name}" not in constant
    }
    inputs = {
        name: action
        for name, action in actions.inputs.items()
        if f"action {name}" not in constant
    }
    counted_labels = [name for name in actions.counted_labels if name in tasks]
    return ActionsConfig(
        tasks, inputs, replace(actions.counts, counted_labels=counted_labels)
    )


def check_sides(events: dict[str, int], rules: ActionsRules) -> None:
    """UserError where a side of a cut has no event."""
    empty = [name for name in NAMES if not events[name]]
    if empty:
        where = " and ".join(
            str(rules.split[name]) for name in ("val_start_ms", "test_start_ms")
        )
        raise UserError(
            f"the cuts at {where} ms leave no event in "
            f"{' and '.join(empty)} ({', '.join(f'{name} {rows:,}' for name, rows in events.items())}); choose "
            f"split.val_start and split.test_start within the log, or larger fractions"
        )


def build_actions(
    events: pa.Table,
    catalogue: Vocabulary,
    pieces: list[Columns],
    rules: ActionsRules,
    joined: Sequence[AsOfTable] = (),
) -> tuple[pa.Table, Counter[str], np.ndarray]:
    """Sequences of one events part (sorted, IDS dictionary-coded), what was counted on the way, and (2, F)
    sums and sums of squares of the features of training events.

    catalogue: the ids whose places are item_index; pieces: of `count_in_buckets`; joined: the tables of `rules.joined`.
    """
    count: Counter[str] = Counter()
    schema, config = rules.output, rules.actions
    sums = np.zeros((2, len(config.features)))
    kept = (
        KeptEvents.of(events, catalogue, rules.max_events) if events.num_rows else None
    )
    if kept is None or not len(kept.row):
        count["outside"] = kept.outside if kept else 0
        return schema.empty_table(), count, sums
    rows = pa.array(kept.row)
    as_of = rules.as_of(events)
    events = attach(events, as_of, joined, count)
    counts = gather(events, config, pieces, as_of)
    values = features(counts, config)[kept.row]  # (E, F)
    tasks = np.stack(
        [task.values(events)[kept.row] for task in config.tasks.values()], axis=1
    )  # (E, K)
    actions = np.stack(
        [action.values(events)[kept.row] for action in config.inputs.values()], axis=1
    )  # (E, A)

    start = runs(kept.user)  # (U,) first event of each user
    offsets = pa.array(np.append(start, len(kept.row)).astype(np.int32))
    split = rules.sides(kept.time)
    ends = [
        np.add.reduceat(split <= side, start).astype(np.int32) for side in (0, 1)
    ]  # train_end, val_end

    def listed(flat: pa.Array, field: pa.Field) -> pa.Array:
        return pa.ListArray.from_arrays(
            offsets, flat.cast(field.type.value_type), type=field.type
        )

    def wide(flat: np.ndarray, kind: pa.DataType) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(
            pa.array(flat.reshape(-1), kind), flat.shape[1]
        )

    user = coded(events, "user_id")
    made: dict[str, pa.Array] = {
        "user_id": pa.DictionaryArray.from_arrays(
            pa.array(kept.user[start]), user.dictionary
        ).cast(pa.string()),
        "train_end": pa.array(ends[0]),
        "val_end": pa.array(ends[1]),
    }
    flat = {
        "item_index": pa.array(kept.item),
        "timestamp_ms": pa.array(kept.time),
        "tasks": wide(tasks.astype(np.uint8), pa.uint8()),
        "actions": wide(actions, pa.float32()),
        "features": wide(values, pa.float32()),
    }
    columns = []
    for field in schema:
        if field.name in made:
            columns.append(made[field.name])
        else:
            column = flat.get(field.name)
            column = (
                events[field.name].combine_chunks().take(rows)
                if column is None
                else column
            )
            columns.append(listed(column, field))

    length = np.diff(np.append(start, len(kept.row)))
    train = split == 0
    tied = (kept.time[1:] == kept.time[:-1]) & (kept.user[1:] == kept.user[:-1])
    count.update(
        users=len(start),
        interactions=len(kept.row),
        outside=kept.outside,
        tied_rows=int(tied.sum()),
    )
    count["pairs"] = count_pairs(kept.user, kept.item)
    count.update(
        truncated_users=kept.truncated_users, truncated_events=kept.truncated_events
    )
    count["max_length"] = int(length.max())
    for name, positives in zip(config.tasks, tasks[train].sum(axis=0), strict=True):
        count[f"positives_{name}"] = int(positives)
    befores = (np.zeros_like(ends[0]), ends[0], ends[1])
    for code, (name, before, end) in enumerate(
        zip(NAMES, befores, (*ends, length), strict=True)
    ):
        count[f"events_{name}"] = int((split == code).sum())
        count[f"users_{name}"] = int((end > before).sum())
        count[f"with_context_{name}"] = int(((end > before) & (before > 0)).sum())
        count[f"events_without_context_{name}"] = int((end - before)[before == 0].sum())
    doubles = values[train].astype(np.float64)
    sums += [doubles.sum(axis=0), (doubles**2).sum(axis=0)]
    return pa.Table.from_arrays(columns, schema=schema), count, sums


def _write_part(
    sequences_uri: str,
    catalogue: Vocabulary,
    rules: ActionsRules,
    joined: list[Shared],
    uri: str,
    pieces: list[Columns] | None = None,
) -> tuple[Part | None, Counter[str], dict[str, Any]]:
    events, tables = (
        read_coded(uri, rules.columns, IDS),
        [fetch(table) for table in joined],
    )
    table, count, sums = build_actions(events, catalogue, pieces or [], rules, tables)
    told = {
        "sums": np.array(sums).tolist(),
        "seen": of_training(table, rules.own).record(),
    }
    return (write_part(sequences_uri, table) if table.num_rows else None), count, told


def of_training(sequences: pa.Table, names: list[str]) -> TrainingValues:
    """What training events say of own features."""
    lists = sequences["item_index"].combine_chunks()
    length, ends = (
        pc.list_value_length(lists).to_numpy(),
        sequences["train_end"].to_numpy(),
    )
    place = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    train = pa.array(place < np.repeat(ends, length))
    return TrainingValues.of(
        {
            name: sequences[name].combine_chunks().flatten().filter(train)
            for name in names
        }
    )


def scale_of(sums: list[Any], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(F,) mean and standard deviation, 0 for a constant, of the features over training events, by `build_actions`'s
    sums of the parts, in their order, always the same."""
    mean, square = np.sum(sums, axis=0) / max(1, rows)
    std = np.sqrt((square - mean**2).clip(0))
    return mean, np.where(std > 1e-6, std, 0.0)


def attribute_codes(run: Run, names: list[str]) -> dict[str, np.ndarray]:
    """(I,) int32 per attribute of items: a code for each value, -1 where the item has none."""
    if not names:
        return {}
    items = run.read("items", [f"cat_{name}" for name in names])
    return {
        name: pc.fill_null(
            items[f"cat_{name}"].combine_chunks().dictionary_encode().indices, -1
        ).to_numpy()
        for name in names
    }


def make_actions(
    run: Run, events: Manifest, items: Manifest, split: dict[str, Any]
) -> Manifest:
    """The sequences of a log of actions; returns their manifest."""
    config, source = run.config, run.source
    settings = {
        "kind": "actions",
        "split": config.split.settings(),
        "max_events": config.max_events,
        "core_window": config.core_window,
        "actions": asdict(config.own),
    }
    as_of = make_as_of(run)
    joined = as_of_schema(list(source.as_of.values()))
    inputs = {
        "events": events.hash,
        "items": items.hash,
        **{name: table.hash for name, table in as_of.items()},
    }
    if finished := run.finished("sequences", settings, inputs):
        return finished
    begin, uri = time.perf_counter(), run.table("sequences")
    parts = part_uris(run.table("events"), events)
    catalogue = run.catalogue()
    resolved = check_actions(source, config)
    rules = ActionsRules(
        source.schema, split, config.max_events, resolved, joined=joined
    )
    constant, viewers, large = find_constants(parts, catalogue, rules, run.engine)
    dropped = {} if run.grows else constant
    rules = replace(
        rules, actions=without_constants(rules.actions, dropped), large=large
    )
    for name, reason in constant.items():
        done = "kept" if run.grows else "dropped"
        until = "until another day has more" if run.grows else "so it is left out"
        run.say(f"{done}: {name} is {reason}: there is nothing to learn of it, {until}")
    attributes = attribute_codes(
        run, [name for name in rules.actions.counts.keys if name not in (USER, ITEM)]
    )
    windows = ActionsWindows(rules.actions, rules.as_of)
    shared = (uri, catalogue, rules, share_as_of(run, as_of))
    with run.writing("sequences"):
        if windows.keys:
            results = count_in_buckets(
                run.engine,
                parts,
                events.rows,
                windows,
                (catalogue, run.engine.put(attributes)),
                _write_part,
                shared,
            )
        else:
            results = run.engine.each(_write_part, [(part,) for part in parts], shared)
        written, count, found = gather_parts(
            results, len(parts), run.progress("sequences")
        )
        mean, std = scale_of(
            [of_part["sums"] for of_part in found], count["events_train"]
        )
        own = describe_features(
            (TrainingValues.read(of_part["seen"]) for of_part in found), rules.own
        )
        say_missing(run, as_of, events.rows, count)
        events_in = {name: count[f"events_{name}"] for name in NAMES}
        require_training(events_in, count, config.max_events, "event", split["kind"])
        info = {
            **run.sequences_info(events, items, split, count),
            "tasks": list(rules.actions.tasks),
            "actions": list(rules.actions.inputs),
            "features": rules.actions.features,
            "viewers": viewers,
            **({"own": own} if rules.own else {}),
            **({"as_of": describe_as_of(as_of)} if as_of else {}),
            "feature_mean": mean.tolist(),
            "feature_std": std.tolist(),
            "base_rates": {
                name: count[f"positives_{name}"] / count["events_train"]
                for name in rules.actions.tasks
            },
            "definitions": asdict(rules.actions),
            "dropped": dropped,
            "val_start_ms": split["val_start_ms"],
            "test_start_ms": split["test_start_ms"],
            "events": events_in,
            "users_with_candidates": {name: count[f"users_{name}"] for name in NAMES},
            "users_with_context": {
                name: count[f"with_context_{name}"] for name in NAMES
            },
            "users_without_context": {
                name: count[f"users_{name}"] - count[f"with_context_{name}"]
                for name in NAMES
            },
            "events_without_context": {
                name: count[f"events_without_context_{name}"] for name in NAMES
            },
            "events_outside": count["outside"],
        }
        seconds = time.perf_counter() - begin
        sequences = run.commit(
            "sequences",
            rules.output,
            written,
            settings,
            inputs,
            info,
            build_write_s=seconds,
        )
    run.say(
        f"sequences: {pluralize(sequences.rows, 'user')}, {pluralize(len(info['tasks']), 'task')}, "
        f"{pluralize(len(info['actions']), 'action')} and {pluralize(len(info['features']), 'feature')} in "
        f"{time.perf_counter() - begin:.1f} s; {pluralize(count['outside'], 'event')} outside the "
        f"catalogue left out, {count['tied_rows']:,} share their millisecond with the one before"
    )
    for name in NAMES[1:]:
        run.say(
            f"{name}: {count[f'users_{name}']:,} users with {count[f'events_{name}']:,} candidates, "
            f"{info['users_without_context'][name]:,} of them without context"
        )
    run.say(
        "base rates: "
        + ", ".join(f"{name} {rate:.4f}" for name, rate in info["base_rates"].items())
    )
    return sequences
