"""Sequences of a log of actions: impressions with their actions, tasks and counts.

`python -m jobs.prepare` makes them if the source file has `prepare: {kind: actions}`.
The log is split at two times. Per user, `train_end` and `val_end` count the events
before these times, so context and candidates of each split are slices of the user's
events.

Shapes: E events of a part, N impressions of items of the catalogue, U users, K tasks,
A actions that models read, F features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import UserError, pluralize, raise_first
from core.schemas import ActionsInfo, actions_schema
from core.tables import Table
from pipelines.prepare.events.columns import read_part, take_rows
from pipelines.prepare.executor import Call
from pipelines.prepare.kinds.actions.config import ITEM, ActionsConfig
from pipelines.prepare.kinds.actions.features import (
    IDS,
    ActionsCounter,
    count_times,
    features,
)
from pipelines.prepare.prepare_config import PrepareConfig
from pipelines.prepare.reading.log import Log
from pipelines.prepare.sequences.builder import (
    Behaviours,
    BuiltTable,
    EventsPart,
    Lookups,
    PartDraft,
    Requests,
    SequenceBuilder,
    SequencesStep,
    TrainingStats,
    select_behaviours,
    to_vectors,
)
from pipelines.prepare.sequences.counts import Columns, KeyCounter
from pipelines.prepare.sequences.custom_features import (
    CATEGORY,
    TrainingValues,
    describe_features,
    plain_name,
)
from pipelines.prepare.sequences.splits import (
    SPLITS,
    assign_splits,
    format_moment,
    require_training,
)

MIN_DEVIATION = 1e-6
"""Features with a smaller standard deviation count as constant, as it is rounding."""


@dataclass(frozen=True)
class ActionsBuilder(SequenceBuilder):
    """Builds the sequences of a log of actions from its events."""

    actions: ActionsConfig
    """Tasks, inputs and counts, with all defaults filled in."""
    hashed: tuple[str, ...] = ()
    """Columns of viewer-side categories with too many values to list; models hash their
    values."""

    @property
    def columns(self) -> list[str]:
        """Columns of `events` that are read: ids, times, labels and features."""
        prefixes = ("label_", "num_", "cat_")
        names = [name for name in self.schema.names if name.startswith(prefixes)]
        return [*IDS, "timestamp_ms", *names]

    @cached_property
    def output(self) -> pa.Schema:
        """Schema of `sequences`."""
        actions = self.actions
        return actions_schema(
            self.joined_schema,
            len(actions.tasks),
            len(actions.inputs),
            len(actions.features),
        )

    @property
    def categories(self) -> list[str]:
        """Columns of the viewer-side categories."""
        return [name for name in self.schema.names if name.startswith(CATEGORY)]

    @property
    def custom_columns(self) -> list[str]:
        """Columns of custom features and of hashed viewer-side categories."""
        listed = {*self.categories} - {*self.hashed}
        return [name for name in super().custom_columns if name not in listed]

    @property
    def counter(self) -> ActionsCounter:
        """Counts of the configuration's keys."""
        return ActionsCounter(self.actions, self.split)

    def form_requests(
        self, part: EventsPart, behaviours: Behaviours, count: Counter[str]
    ) -> Requests:
        """Form a request of each impression.

        `count_times` defines as of when the features of each impression are taken.
        """
        count["outside"] = int((part.item < 0).sum())
        as_of = count_times(self.split, part.time)
        return replace(Requests.one_per_event(part, behaviours.row), as_of=as_of)

    def compute_features(
        self, part: EventsPart, requests: Requests, pieces: list[Columns] | None
    ) -> np.ndarray:
        """Return the windowed counts and rates (E, F) float32 of the part's events."""
        return features(self.counter.gather(part.table, pieces), self.actions)

    def behaviour_columns(self, draft: PartDraft) -> dict[str, pa.Array]:
        """Return the items, tasks, actions and features of the behaviours (N,)."""
        table, row = draft.part.table, draft.row
        tasks = [task.values(table)[row] for task in self.actions.tasks.values()]
        inputs = [action.values(table)[row] for action in self.actions.inputs.values()]
        return super().behaviour_columns(draft) | {
            "tasks": to_vectors(np.stack(tasks, axis=1).astype(np.uint8), pa.uint8()),
            "actions": to_vectors(np.stack(inputs, axis=1), pa.float32()),
            "features": to_vectors(draft.features[row], pa.float32()),
        }

    def user_columns(
        self, draft: PartDraft, count: Counter[str]
    ) -> dict[str, pa.Array]:
        """Return `train_end` and `val_end` (U,): events before the two cuts."""
        start = draft.behaviour_offsets[:-1]  # (U,)
        length = np.diff(draft.behaviour_offsets)
        train_end = np.add.reduceat(draft.split <= 0, start).astype(np.int32)
        val_end = np.add.reduceat(draft.split <= 1, start).astype(np.int32)
        ends = {"train": train_end, "val": val_end, "test": length}
        context = np.zeros_like(train_end)  # (U,) events before the split
        for name, end in ends.items():
            num_candidates = end - context
            has_candidates = num_candidates > 0
            has_context = context > 0
            without_context = num_candidates[~has_context]
            count[f"users_{name}"] = int(has_candidates.sum())
            count[f"with_context_{name}"] = int((has_candidates & has_context).sum())
            count[f"events_without_context_{name}"] = int(without_context.sum())
            context = end
        return {"train_end": pa.array(train_end), "val_end": pa.array(val_end)}

    def training_stats(self, draft: PartDraft, table: pa.Table) -> TrainingStats:
        """Return the sums of tasks (K,) and features (2, F) over training events."""
        is_train = draft.split == 0
        tasks = table["tasks"].combine_chunks().flatten().flatten().to_numpy()
        tasks = tasks.reshape(len(draft.row), len(self.actions.tasks))
        values = draft.features[draft.row][is_train].astype(np.float64)
        train = draft.row[is_train]
        custom = {
            name: take_rows(draft.part.table, name, train)
            for name in self.custom_columns
        }
        return TrainingStats(
            TrainingValues.from_columns(custom),
            tasks[is_train].sum(axis=0, dtype=np.int64),
            np.array([values.sum(axis=0), (values**2).sum(axis=0)]),
        )


# Tasks and inputs that are constant in training are dropped.


@dataclass(frozen=True)
class PartLabelStats:
    """Statistics of the labels of one events part."""

    events: np.ndarray
    """(3,) impressions per split."""
    positives: dict[str, int]
    """Positive training impressions by task."""
    input_ranges: dict[str, tuple[float, float]]
    """Minimum and maximum of each input in training; empty without training
    impressions."""
    categories: TrainingValues
    """Values of the viewer-side categories in training."""


def _part_label_stats(
    catalogue: Any, builder: ActionsBuilder, uri: str
) -> PartLabelStats:
    """Compute the statistics of the events part at `uri`."""
    part = EventsPart.open(
        read_part(uri, builder.columns, IDS), Lookups(catalogue), None
    )
    is_behaviour = builder.find_behaviours(part)
    row = select_behaviours(part, is_behaviour, builder.max_events).row
    split = assign_splits(builder.split, part.time[row], np.zeros(0, np.int64))
    train_row = row[split == 0]
    categories = {
        name: take_rows(part.table, name, train_row) for name in builder.categories
    }
    positives = {
        name: int(task.values(part.table)[train_row].sum())
        for name, task in builder.actions.tasks.items()
    }
    ranges: dict[str, tuple[float, float]] = {}
    if len(train_row):
        for name, action in builder.actions.inputs.items():
            values = action.values(part.table)[train_row]
            ranges[name] = (float(values.min()), float(values.max()))
    return PartLabelStats(
        np.bincount(split, minlength=len(SPLITS)),
        positives,
        ranges,
        TrainingValues.from_columns(categories),
    )


@dataclass(frozen=True)
class LabelStats:
    """Statistics of the labels of all parts."""

    constant: dict[str, str]
    """Description of the constant value in training, by `task NAME` or `action
    NAME`."""
    viewers: dict[str, list[str]]
    """Values in training of each viewer-side category with few values."""
    hashed: tuple[str, ...]
    """Columns of categories with too many values to list."""


def compute_label_stats(step: ActionsStep, builder: ActionsBuilder) -> LabelStats:
    """Find constant tasks and inputs, and the values of viewer-side categories."""
    run = step.run
    uris = step.events.part_uris()
    shared = (run.tables.read_catalogue(), builder)
    calls = [(uri,) for uri in uris]
    results = run.executor.map_unordered(_part_label_stats, calls, shared)
    parts = [part for _, part in results]
    events = np.sum([part.events for part in parts], axis=0).tolist()
    num_events = dict(zip(SPLITS, events, strict=True))
    empty = [name for name in SPLITS if not num_events[name]]
    if empty:
        counts = ", ".join(f"{name} {count:,}" for name, count in num_events.items())
        raise UserError(
            f"the cuts at {format_moment(builder.split.val_start_ms)} and "
            f"{format_moment(builder.split.test_start_ms)} leave no event in "
            f"{' and '.join(empty)} ({counts})"
        )
    num_train = events[0]
    everywhere = f"for all {num_train:,} training events"
    constant = {}
    for name in builder.actions.tasks:
        positives = sum(part.positives[name] for part in parts)
        if positives in (0, num_train):
            constant[f"task {name}"] = f"{1 if positives else 0} {everywhere}"
    for name in builder.actions.inputs:
        ranges = [part.input_ranges[name] for part in parts if part.input_ranges]
        low = min(minimum for minimum, _ in ranges)
        if low == max(maximum for _, maximum in ranges):
            constant[f"action {name}"] = f"{low:g} {everywhere}"
    for kind, names in (
        ("task", builder.actions.tasks),
        ("action", builder.actions.inputs),
    ):
        if all(f"{kind} {name}" in constant for name in names):
            raise UserError(
                f"every {kind} is constant in training ({', '.join(constant)})"
            )
    categories = [part.categories for part in parts]
    described = describe_features(categories, builder.categories)
    viewers, hashed = {}, []
    for category in described.categories:
        if category.buckets:
            hashed.append(category.name)
        else:
            viewers[plain_name(category.name)] = list(category.values)
    return LabelStats(constant, viewers, tuple(hashed))


def drop_constants(
    actions: ActionsConfig, constant: Mapping[str, str]
) -> ActionsConfig:
    """Return the configuration without constant tasks and inputs.

    A constant task has nothing to learn and no entropy to normalise by. A constant
    input carries no information, and models would meet its other values untrained.

    Args:
        actions: Tasks, inputs and counts.
        constant: Its keys, `task NAME` or `action NAME`, are dropped.
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
    labels = [name for name in actions.counted_labels if name in tasks]
    return ActionsConfig(tasks, inputs, replace(actions.counts, counted_labels=labels))


def feature_scale(
    parts: list[TrainingStats], rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean (F,) and standard deviation (F,) of features over training rows.

    The deviation of a constant feature is 0. The order of the parts determines the
    rounding, so it must be deterministic.

    Args:
        parts: Sums and sums of squares of all parts.
        rows: Number of training rows.
    """
    sums = [part.feature_sums for part in parts]
    mean, square = np.sum(sums, axis=0) / max(1, rows)
    std = np.sqrt((square - mean**2).clip(0))
    return mean, np.where(std > MIN_DEVIATION, std, 0.0)


@dataclass(frozen=True)
class ActionsStep(SequencesStep):
    """The step of prepare that makes the sequences of a log of actions."""

    info_class = ActionsInfo

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the table depends on, including the settings of actions."""
        return super().settings | {"actions": asdict(self.run.config.kind_config)}

    @cached_property
    def label_stats(self) -> LabelStats:
        """Statistics of the labels, computed with all tasks and inputs."""
        return compute_label_stats(self, self._full_builder)

    @cached_property
    def dropped_labels(self) -> dict[str, str]:
        """Constant tasks and inputs to drop; none if more files will be appended."""
        return {} if self.run.grows else self.label_stats.constant

    @property
    def _full_builder(self) -> ActionsBuilder:
        """The builder with all tasks and inputs of the configuration."""
        source, config = self.run.source, self.run.config
        return ActionsBuilder(
            schema=source.schema,
            split=self.split,
            max_events=config.max_events,
            joined=self.joined_schema,
            actions=check_actions(source, config),
        )

    def create_builder(self) -> ActionsBuilder:
        """Return the builder without constant tasks and inputs, and report them."""
        for name, reason in self.label_stats.constant.items():
            if self.run.grows:
                line = f"kept: {name} is {reason}; appended files may have other values"
            else:
                line = f"dropped: {name} is {reason}, so there is nothing to learn"
            self.run.report(line)
        full = self._full_builder
        actions = drop_constants(full.actions, self.dropped_labels)
        return replace(full, actions=actions, hashed=self.label_stats.hashed)

    def create_counter(
        self, builder: ActionsBuilder, lookups: Lookups
    ) -> tuple[KeyCounter, Call] | None:
        """Return the counter of the keys other than the user; None without such keys.

        A user's events are in one part and need no exchange.
        """
        counter = builder.counter
        if not counter.keys:
            return None
        # by attribute, the code (I,) int32 of each item's value, -1 for a missing value
        codes: dict[str, np.ndarray] = {}
        for name in counter.keys:
            if name != ITEM:
                column = f"cat_{name}"
                items = self.run.tables.current("items").read([column])
                values = items[column].combine_chunks().dictionary_encode()
                codes[name] = pc.fill_null(values.indices, -1).to_numpy()
        return counter, (lookups.catalogue, self.run.executor.put(codes))

    def describe(self, builder: ActionsBuilder, built: BuiltTable) -> dict[str, Any]:
        """Return names, definitions and statistics of tasks, actions and features."""
        count = built.count
        events = built.per_split("requests")
        require_training(events, "event")
        mean, std = feature_scale(built.training, events["train"])
        positives = np.sum([part.positives for part in built.training], axis=0)
        rates = (positives / events["train"]).tolist()
        users = built.per_split("users")
        with_context = built.per_split("with_context")
        return {
            "tasks": list(builder.actions.tasks),
            "actions": list(builder.actions.inputs),
            "features": builder.actions.features,
            "viewers": self.label_stats.viewers,
            "feature_mean": mean.tolist(),
            "feature_std": std.tolist(),
            "base_rates": dict(zip(builder.actions.tasks, rates, strict=True)),
            "definitions": asdict(builder.actions),
            "dropped": self.dropped_labels,
            "requests": events,
            "users_with_candidates": users,
            "users_with_context": with_context,
            "users_without_context": {
                name: users[name] - with_context[name] for name in SPLITS
            },
            "events_without_context": built.per_split("events_without_context"),
            "events_outside": count["outside"],
        }

    def report(self, sequences: Table[Any], seconds: float) -> None:
        """Report sizes of the table and its splits, and the base rates of the tasks."""
        info, report = sequences.info, self.run.report
        report(
            f"sequences: {pluralize(sequences.rows, 'user')}, "
            f"{pluralize(len(info.tasks), 'task')}, "
            f"{pluralize(len(info.actions), 'action')} and "
            f"{pluralize(len(info.features), 'feature')} in {seconds:.1f} s; "
            f"{pluralize(info.events_outside, 'event')} outside the catalogue "
            f"dropped, {info.tied_behaviours:,} at the same millisecond as the "
            f"user's previous event"
        )
        for name in SPLITS[1:]:
            report(
                f"{name}: {info.users_with_candidates[name]:,} users with "
                f"{info.requests[name]:,} candidates, "
                f"{info.users_without_context[name]:,} of these users without "
                f"context"
            )
        rates = [f"{name} {rate:.4f}" for name, rate in info.base_rates.items()]
        report(f"base rates: {', '.join(rates)}")


def check_actions(source: Log, config: PrepareConfig) -> ActionsConfig:
    """Check the settings of a log of actions.

    Returns:
        The settings with all defaults filled in from the log.
    """
    late_label = min(source.info.known, default=None)
    split = config.split.resolve(source.info.clock)
    raise_first(
        (
            split != "temporal",
            f"split.by is {split}, but kind actions needs temporal, and clock times",
        ),
        (
            late_label,
            f"label '{late_label}' is known later than its event, but kind actions "
            f"reads the labels of every earlier event",
        ),
        (
            config.behaviour is not None,
            f"behaviour is '{config.behaviour}', but for kind actions every impression "
            f"is a behaviour",
        ),
    )
    try:
        resolved: ActionsConfig = config.kind_config.resolve(
            source.info, source.items_columns[1]
        )
    except ValueError as error:
        raise UserError(f"prepare.actions: {error}") from error
    return resolved
