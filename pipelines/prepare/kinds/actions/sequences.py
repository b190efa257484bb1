"""Sequences of a log of actions: impressions with their actions, tasks and counts.

`python -m jobs.prepare` makes them if the source file has `prepare: {kind: actions}`.
The log is split at two times. Per user, `train_end` and `val_end` count the events
before these times, so context and candidates of each split are slices of the user's
events.

Shapes: N impressions of items of the catalogue, K tasks, A actions that models read, F
features.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import polars as pl
import pyarrow as pa

from core.errors import UserError, raise_first
from core.schemas import (
    ActionDefinitions,
    ActionsInfo,
    AsOfInfo,
    EventsInfo,
    actions_schema,
)
from core.splits import SPLITS
from core.tables import Table
from pipelines.prepare.events.build_events import read_part
from pipelines.prepare.kinds.actions.features import IDS, ActionsCounter, count_time
from pipelines.prepare.kinds.simulation import draw_feed
from pipelines.prepare.reading.log import Log
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.builder import (
    BuiltTable,
    SequenceBuilder,
)
from pipelines.prepare.sequences.counts import KeyCounter, Lookups
from pipelines.prepare.sequences.custom_features import (
    TrainingValues,
    describe_features,
    plain_name,
)
from pipelines.prepare.sequences.splits import (
    assign_splits,
)
from pipelines.prepare.settings.actions import ITEM, ActionsConfig
from pipelines.prepare.settings.config import PrepareConfig

MIN_DEVIATION = 1e-6
"""Features with a smaller standard deviation count as constant, as it is rounding."""


@dataclass(frozen=True)
class ActionsBuilder(SequenceBuilder):
    """The kind `actions`: a request is an impression whose actions are predicted."""

    name = "actions"
    info_class = ActionsInfo
    reads_as_of_features = True
    statistics = (
        "base_rates",
        "users_with_candidates",
        "users_with_context",
        "users_without_context",
        "events_outside",
        "dropped",
    )
    text_tables = ("items",)
    first_model = "attn_mvp"
    simulated_source = "simulated_feed"
    draw_log = staticmethod(draw_feed)

    actions: ActionsConfig = field(default_factory=ActionsConfig)
    """Tasks, inputs and counts, with all defaults filled in, without constant tasks
    and inputs."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Constant tasks and inputs that are left out."""

    @staticmethod
    def check_settings(source: Log, config: PrepareConfig) -> None:
        """Raise UserError for settings that do not fit a log of actions."""
        resolve_actions(source, config)

    @property
    def columns(self) -> list[str]:
        """Columns of `events` that are read: ids, times, labels and features."""
        prefixes = ("label_", "num_", "cat_")
        names = [n for n in self.source.schema.names if n.startswith(prefixes)]
        return [*IDS, "timestamp_ms", *names]

    @property
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
    def counter(self) -> ActionsCounter:
        """Counts of the configuration's keys."""
        return ActionsCounter(self.actions, self.split)

    def open_events(self, events: pl.DataFrame, lookups: Lookups) -> pl.DataFrame:
        """Return the events of a part with `as_of`, the time at which counts end."""
        events = super().open_events(events, lookups)
        return events.with_columns(as_of=count_time(self.split))

    def add_features(
        self, events: pl.DataFrame, counted: pl.DataFrame | None
    ) -> pl.DataFrame:
        """Add the windowed counts and rates, the tasks, and the inputs of models."""
        features = self.counter.compute_features(events, counted)
        tasks = {name: task.holds for name, task in self.actions.tasks.items()}
        inputs = [action.values(events) for action in self.actions.inputs.values()]
        return events.with_columns(
            pl.Series("features", features),
            pl.Series("tasks", events.select(**tasks).cast(pl.UInt8).to_numpy()),
            pl.Series("actions", np.stack(inputs, axis=1)),
        )

    def form_requests(
        self, events: pl.DataFrame, behaviours: pl.DataFrame, count: Counter[str]
    ) -> pl.DataFrame:
        """Return a request of each impression."""
        count["outside"] = int((events["item_index"] < 0).sum())
        return behaviours.select("user", "user_id", "item_id", "timestamp_ms")

    def collect_users(
        self, requests: pl.DataFrame, behaviours: pl.DataFrame, count: Counter[str]
    ) -> pl.DataFrame:
        """Return `train_end` and `val_end` of each user: events before the two cuts."""
        split = pl.col("split")
        users = requests.group_by("user", maintain_order=True).agg(
            pl.first("user_id"),
            train_end=(split == "train").sum().cast(pl.Int32),
            val_end=(split != "test").sum().cast(pl.Int32),
            test_end=pl.len().cast(pl.Int32),
        )
        context = pl.lit(0)  # events before the split
        for name in SPLITS:
            num_candidates = pl.col(f"{name}_end") - context
            has_candidates, has_context = num_candidates > 0, context > 0
            sizes = users.select(
                has_candidates.sum().alias(f"users_{name}"),
                (has_candidates & has_context).sum().alias(f"with_context_{name}"),
            )
            count.update(sizes.row(0, named=True))
            context = pl.col(f"{name}_end")
        return users.drop("test_end")

    def training_stats(
        self, requests: pl.DataFrame, behaviours: pl.DataFrame
    ) -> TrainingValues:
        """Return the sums of tasks and features over training events."""
        columns = behaviours.select(*self.custom_columns, "tasks", "features")
        train = columns.filter(requests["split"] == "train")
        features = train["features"].to_numpy().astype(np.float64)
        sums = {
            "tasks": train["tasks"].to_numpy().sum(axis=0, dtype=np.int64),
            "features": features.sum(axis=0),
            "squares": np.square(features, out=features).sum(axis=0),
        }
        custom = TrainingValues.from_frame(train.select(self.custom_columns))
        return replace(custom, sums=sums)

    def resolve(self, run: Run, events: Table[EventsInfo]) -> Self:
        """Drop tasks and inputs that are constant in training, and report them.

        A constant task has nothing to learn and no entropy to normalise by. A constant
        input carries no information, and models would meet its other values untrained.
        They are kept if files may be appended later.
        """
        builder = replace(self, actions=resolve_actions(self.source, self.config))
        constant = find_constants(run, builder, events)
        for name, reason in constant.items():
            if run.grows:
                line = f"kept: {name} is {reason}; appended files may have other values"
            else:
                line = f"dropped: {name} is {reason}, so there is nothing to learn"
            run.report(line)
        dropped = {} if run.grows else constant
        actions = builder.actions
        tasks = {n: t for n, t in actions.tasks.items() if f"task {n}" not in dropped}
        inputs = {
            name: action
            for name, action in actions.inputs.items()
            if f"action {name}" not in dropped
        }
        counted = [name for name in actions.counted_labels if name in tasks]
        counts = replace(actions.counts, counted_labels=counted)
        actions = ActionsConfig(tasks, inputs, counts)
        return replace(builder, actions=actions, dropped=dropped)

    def read_lookups(self, run: Run, as_of: dict[str, Table[AsOfInfo]]) -> Lookups:
        """Return the ids, the joined tables and the attributes of items."""
        names = [name for name in self.counter.keys if name != ITEM]
        items = run.read_items(*(f"cat_{name}" for name in names))
        codes = {
            f"key_{name}": pl.col(f"cat_{name}").rank("dense").cast(pl.Int32)
            for name in names
        }
        items = items.select("item_id", "item_index", **codes)
        return replace(super().read_lookups(run, as_of), items=items)

    def create_counter(self, run: Run) -> KeyCounter | None:
        """Return the counter of keys other than the user, or None if it has no keys.

        A user's events are in one part and need no exchange.
        """
        return self.counter if self.counter.keys else None

    def describe(self, run: Run, built: BuiltTable) -> dict[str, Any]:
        """Return names, definitions and statistics of tasks, actions and features.

        Viewer-side categories with few values are no custom features. Models hash the
        values of the others.
        """
        events = built.per_split("requests")
        if empty := [name for name in SPLITS if not events[name]]:
            counts = ", ".join(f"{name} {count:,}" for name, count in events.items())
            raise UserError(
                f"the cuts at {self.split.val_start_ms} and {self.split.test_start_ms} "
                f"ms leave no event in {' and '.join(empty)} ({counts})"
            )
        custom = describe_features(built.training, self.custom_columns)
        viewers = {
            plain_name(category.name): list(category.values)
            for category in custom.categories
            if category.name in self.source.schema.names and not category.buckets
        }
        others = [c for c in custom.categories if plain_name(c.name) not in viewers]
        # the order of the parts determines the rounding
        sums = {
            name: np.sum([part.sums[name] for part in built.training], axis=0)
            for name in ("tasks", "features", "squares")
        }
        mean, square = sums["features"] / events["train"], sums["squares"]
        std = np.sqrt((square / events["train"] - mean**2).clip(0))
        rates = (sums["tasks"] / events["train"]).tolist()
        users = built.per_split("users")
        with_context = built.per_split("with_context")
        return {
            "tasks": list(self.actions.tasks),
            "actions": list(self.actions.inputs),
            "features": self.actions.features,
            "viewers": viewers,
            "custom": replace(custom, categories=tuple(others)),
            "feature_mean": mean.tolist(),
            "feature_std": np.where(std > MIN_DEVIATION, std, 0.0).tolist(),
            "base_rates": dict(zip(self.actions.tasks, rates, strict=True)),
            "definitions": ActionDefinitions(**vars(self.actions)),
            "dropped": self.dropped,
            "requests": events,
            "users_with_candidates": users,
            "users_with_context": with_context,
            "users_without_context": {
                name: users[name] - with_context[name] for name in SPLITS
            },
            "events_outside": built.count["outside"],
        }


Ranges = dict[str, tuple[float, float]]
"""Minimum and maximum in training of each `task NAME` and `action NAME`."""


def _training_ranges(
    builder: ActionsBuilder, lookups: Lookups, uri: str
) -> tuple[int, Ranges]:
    """Return the number and the ranges of the training events of one part."""
    events = builder.open_events(read_part(uri, builder.columns), lookups)
    events = assign_splits(builder.select_behaviours(events, Counter()), builder.split)
    train = events.filter(split="train")
    if not train.height:
        return 0, {}
    values = {
        f"action {name}": action.values(train)
        for name, action in builder.actions.inputs.items()
    }
    for name, task in builder.actions.tasks.items():
        values[f"task {name}"] = train.select(task.holds).to_series().to_numpy()
    ranges = {n: (float(v.min()), float(v.max())) for n, v in values.items()}
    return train.height, ranges


def find_constants(
    run: Run, builder: ActionsBuilder, table: Table[EventsInfo]
) -> dict[str, str]:
    """Describe the value of each `task NAME` and `action NAME` constant in training."""
    shared = (builder, run.executor.put(Lookups(run.read_items())))
    calls = [(uri,) for uri in table.part_uris()]
    results = run.executor.map_unordered(_training_ranges, calls, shared)
    parts = [part for _, part in results]
    ranges = [part for count, part in parts if count]
    rows = f"all {sum(count for count, _ in parts):,} training events"
    constant: dict[str, str] = {}
    actions = builder.actions
    for kind, names in (("task", actions.tasks), ("action", actions.inputs)):
        for key in (f"{kind} {name}" for name in names):
            bounds = {bound for part in ranges for bound in part[key]}
            if len(bounds) == 1:
                constant[key] = f"{bounds.pop():g} for {rows}"
        if all(f"{kind} {name}" in constant for name in names):
            raise UserError(
                f"every {kind} is constant in training ({', '.join(constant)})"
            )
    return constant


def resolve_actions(source: Log, config: PrepareConfig) -> ActionsConfig:
    """Return the checked settings, with all defaults filled in from the log."""
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
        resolved: ActionsConfig = config.actions.resolve(
            source.info, source.items_columns[1]
        )
    except ValueError as error:
        raise UserError(f"prepare.actions: {error}") from error
    return resolved
