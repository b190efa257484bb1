"""Sequences from events: the pipeline that all kinds of request share.

    sequences = make_sequences(run, SearchBuilder, events, items, split)

An events part has all events of its users, sorted, so it becomes a part of `sequences`
in one vectorised pass over two polars frames, behaviours and requests.
`SequenceBuilder.build` selects and orders behaviours, forms requests, assigns splits,
joins `history_end`, and collects a row per user. A kind of request overrides the steps
that differ.

Shapes: E events of a part, F features.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import polars as pl
import pyarrow as pa

from core.errors import pluralize
from core.options import as_base
from core.schemas import (
    AsOfFeatures,
    AsOfInfo,
    EventsInfo,
    ItemsInfo,
    SequencesInfo,
    Split,
)
from core.splits import SPLITS
from core.tables import Part, Table, write_frame
from pipelines.prepare.events.build_events import (
    is_behaviour,
    read_part,
    user_time_keys,
)
from pipelines.prepare.reading.log import Log
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.as_of import (
    PREFIX,
    add_sessions,
    check_matched,
    join_as_of,
    make_timed_tables,
)
from pipelines.prepare.sequences.counts import (
    KeyCounter,
    Lookups,
    count_in_buckets,
)
from pipelines.prepare.sequences.custom_features import (
    TrainingValues,
    feature_columns,
)
from pipelines.prepare.sequences.splits import assign_splits, count_splits
from pipelines.prepare.settings.config import PrepareConfig, SequencesConfig


@dataclass(frozen=True)
class BuiltPart:
    """A written part of `sequences`, made of one events part, with statistics."""

    part: Part | None
    """Written file; None without rows."""
    count: Counter[str]
    """Counts of users, behaviours and requests, and of dropped ones."""
    training: TrainingValues | None = None
    """Statistics of training rows; None for kinds without them, and for an empty
    part."""


@dataclass(frozen=True)
class BuiltTable:
    """Written parts of `sequences`, not yet committed, in the order of events parts."""

    parts: list[Part]
    """Written files, for the manifest."""
    count: Counter[str]
    """Counts of all parts."""
    training: list[TrainingValues]
    """Statistics of training rows, for each part that has any."""

    def per_split(self, name: str) -> dict[str, int]:
        """Return the counts `NAME_train`, `NAME_val` and `NAME_test` by split."""
        return {split: self.count[f"{name}_{split}"] for split in SPLITS}

    def tied_targets(self) -> dict[str, int]:
        """Return the number of validation and test requests with a tied time."""
        return {split: self.count[f"tied_targets_{split}"] for split in SPLITS[1:]}


@dataclass(frozen=True)
class SequenceBuilder(ABC):
    """A kind of request: builds the sequences of a log from its events, in every task.

    Attributes of the class describe the kind to other code.
    """

    name: ClassVar[str]
    """Name of the kind in source files, which the models that read its tables have as
    `kind`."""
    info_class: ClassVar[type[SequencesInfo]]
    allows_repeats: ClassVar[bool] = False
    """Whether a user may have the same event twice."""
    uses_all_events: ClassVar[bool] = False
    """Whether the catalogue and the split count all events, not behaviours alone."""
    reads_as_of_features: ClassVar[bool] = False
    """Whether its models read the features of `as_of` tables, which change over
    time."""
    has_counts: ClassVar[bool] = False
    """Whether `prepare` can write a table of counts for served models."""
    statistics: ClassVar[tuple[str, ...]] = ()
    """Entries of the `info` of sequences that statistics.json repeats."""
    text_tables: ClassVar[tuple[str, ...]] = ()
    """Tables that `jobs.encode` writes; empty if the models read no text."""
    first_model: ClassVar[str]
    """Name of the configuration in the kind's folder of jobs/configs that is
    suggested for a first training."""
    simulated_source: ClassVar[str]
    """Name of the mapping file that reads simulated logs."""
    draw_log: ClassVar[Any]
    """Function that draws a simulated log, given its `Settings`."""

    source: Log
    """Mapping from the columns of the raw files to events and items."""
    config: PrepareConfig
    split: Split

    @staticmethod  # noqa: B027
    def check_settings(source: Log, config: PrepareConfig) -> None:
        """Raise UserError if the settings do not fit the kind or the log."""

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Columns of `events` that are read."""

    @property
    @abstractmethod
    def output(self) -> pa.Schema:
        """Schema of `sequences`."""

    @property
    def joined_schema(self) -> pa.Schema:
        """Schema of the events with the features that are joined to them."""
        fields = [*self.source.schema]
        for section in self.source.as_of.values():
            fields += [section.schema.field(name) for name in section.features]
        return pa.schema(fields)

    @property
    def custom_columns(self) -> list[str]:
        """Columns of custom features that models read."""
        return feature_columns(self.joined_schema)

    # Steps of a part, in tasks.

    def open_events(self, events: pl.DataFrame, lookups: Lookups) -> pl.DataFrame:
        """Return the events of a part with indices of their row, user, item and query.

        `known` is the time from which an event, as a behaviour, is in histories, and
        `as_of` the end of the features of an event. An item outside the catalogue and a
        missing query have the index -1.
        """
        known = [name for name in (f"known_{self.config.behaviour}",) if name in events]
        events = events.with_row_index("row").with_columns(
            user=pl.col("user_id").rle_id().set_sorted(),
            known=pl.coalesce(*known, "timestamp_ms"),
            as_of="timestamp_ms",
        )
        for name, rows in (("item_id", lookups.items), ("query", lookups.queries)):
            if rows is not None:
                events = events.join(rows, on=name, how="left", maintain_order="left")
        return events.with_columns(pl.col("^(item|query)_index$").fill_null(-1))

    def add_features(
        self, events: pl.DataFrame, counted: pl.DataFrame | None
    ) -> pl.DataFrame:
        """Add the column `features`; `counted` is for `KeyCounter.gather`."""
        return events

    @property
    def is_behaviour(self) -> pl.Expr:
        """Whether an event is a behaviour."""
        return (pl.col("item_index") >= 0) & is_behaviour(self.config.behaviour)

    def select_behaviours(
        self,
        events: pl.DataFrame,
        count: Counter[str],
        sessions: pl.DataFrame | None = None,
    ) -> pl.DataFrame:
        """Return the most recent behaviours of each user, in the order of `known`.

        `is_truncated` says whether the user has earlier ones.
        """
        behaviours = events.filter(self.is_behaviour)
        if sessions is not None:
            behaviours = add_sessions(behaviours, events, sessions, count)
        elif not behaviours["known"].equals(behaviours["timestamp_ms"]):
            behaviours = behaviours.sort("user", "known", maintain_order=True)
        excess, index = pl.col("excess"), pl.int_range(pl.len()).over("user")
        length = pl.len().over("user").cast(pl.Int64)
        behaviours = behaviours.with_columns(excess=length - self.config.max_events)
        behaviours = behaviours.with_columns(is_truncated=excess > 0)
        truncated = behaviours.filter("is_truncated").select("user", "excess").unique()
        count["truncated_users"] = truncated.height
        count["truncated_events"] = int(truncated["excess"].sum())
        return behaviours.filter(index >= excess) if truncated.height else behaviours

    @abstractmethod
    def form_requests(
        self, events: pl.DataFrame, behaviours: pl.DataFrame, count: Counter[str]
    ) -> pl.DataFrame:
        """Return the requests of a part, sorted by user and time.

        Args:
            events: Events of the part.
            behaviours: Behaviours of the part.
            count: Counter that the numbers of dropped requests are added to, in place.

        Returns:
            Columns `user`, `user_id`, `timestamp_ms`, the `item_id` of the first
            candidate, and the fields of `requests` in the table.
        """

    def collect_users(
        self, requests: pl.DataFrame, behaviours: pl.DataFrame, count: Counter[str]
    ) -> pl.DataFrame:
        """Return a row per user with the columns that are no lists of behaviours.

        Args:
            requests: Requests with their `split`.
            behaviours: Behaviours of the users.
            count: Counter that the kind's statistics are added to, in place.
        """
        requests = self.join_history(requests, behaviours)
        requests = requests.with_columns(pl.col("split").cast(pl.String))
        count_splits(count, "without_history", requests.filter(history_end=0))
        fields = self.output.field("requests").type.value_type
        struct = pl.struct([column.name for column in fields])
        return requests.group_by("user", maintain_order=True).agg(
            pl.first("user_id"), requests=struct
        )

    def join_history(
        self, requests: pl.DataFrame, behaviours: pl.DataFrame
    ) -> pl.DataFrame:
        """Add `history_end`, the number of behaviours known before each request."""
        known, time = user_time_keys(
            [
                (behaviours["user"], behaviours["known"]),
                (requests["user"], requests["timestamp_ms"]),
            ]
        )
        runs = requests["user"].rle().struct.unnest()
        starts = behaviours["user"].search_sorted(runs["value"], side="left")
        begin = np.repeat(starts.to_numpy(), runs["len"].to_numpy())
        num_known = known.search_sorted(time, side="left") - begin
        return requests.with_columns(history_end=num_known.cast(pl.Int32))

    def training_stats(
        self, requests: pl.DataFrame, behaviours: pl.DataFrame
    ) -> TrainingValues | None:
        """Return the statistics of training rows; None for kinds without them."""
        return None

    def build(
        self,
        sequences_uri: str,
        lookups: Lookups,
        uri: str,
        counted: pl.DataFrame | None = None,
    ) -> BuiltPart:
        """Build and write the sequences of one events part.

        Args:
            sequences_uri: Folder of the table.
            lookups: Tables that every part looks up.
            uri: File of the events part.
            counted: Features of the events, for `KeyCounter.gather`; None if nothing is
                counted.
        """
        count: Counter[str] = Counter()
        events = read_part(uri, self.columns)
        if not events.height:
            return BuiltPart(None, count)
        events = self.open_events(events, lookups)
        if lookups.as_of:
            events = join_as_of(events, lookups.as_of, count)
        events = self.add_features(events, counted)
        behaviours = self.select_behaviours(events, count, lookups.sessions)
        requests = self.form_requests(events, behaviours, count)
        if not requests.height:
            return BuiltPart(None, count)
        users = requests["user"].unique()
        behaviours = behaviours.filter(pl.col("user").is_in(users.implode()))
        # leave-last-out breaks ties between equal times by a hash
        hashes_ties, split = self.config.ties == "strict", self.split
        requests = assign_splits(requests, split, hashes_ties=hashes_ties)
        if split.by == "leave_last_out" and hashes_ties:
            is_tied = pl.struct("user", "timestamp_ms").is_duplicated()
            count_splits(count, "tied_targets", requests.filter(is_tied))
        count_splits(count, "requests", requests)
        rows = self.collect_users(requests, behaviours, count)

        lists = [name for name in self.output.names if name not in rows.columns]
        histories = behaviours.group_by("user", maintain_order=True).agg(lists)
        rows = rows.join(histories, on="user", how="left", maintain_order="left")
        rows = rows.with_columns(pl.col(lists).fill_null([]))

        is_tied = (pl.col("known").diff() == 0) & (pl.col("user").rle_id().diff() == 0)
        count["tied_rows"] = behaviours.select(is_tied.sum()).item()
        # a user is in one part only, so the pairs of all parts are summed
        pair = pl.col("user").cast(pl.Int64) * 2**32 + pl.col("item_index")
        count["pairs"] = behaviours.select(pair.n_unique()).item()
        count["users"] = rows.height
        count["interactions"] = behaviours.height
        lengths = rows["item_index"].list.len()
        count["max_length"] = int(lengths.max() or 0)  # type: ignore[arg-type]
        part = write_frame(sequences_uri, rows, self.output)
        return BuiltPart(part, count, self.training_stats(requests, behaviours))

    # Steps of the table, on the driver.

    def make_inputs(self, run: Run, events: Table[EventsInfo]) -> dict[str, Table]:
        """Make the tables that `sequences` is made from besides events and items."""
        return {**make_timed_tables(run)}

    def resolve(self, run: Run, events: Table[EventsInfo]) -> Self:
        """Return the builder after passes over the events that it needs."""
        return self

    def read_lookups(self, run: Run, as_of: dict[str, Table[AsOfInfo]]) -> Lookups:
        """Return the items and tables that every part looks up."""
        tables = {
            name: (table.info.key, pl.DataFrame(table.read()))
            for name, table in as_of.items()
        }
        return Lookups(run.read_items(), as_of=tables)

    def create_counter(self, run: Run) -> KeyCounter | None:
        """Return the counter of events; the base class counts nothing."""
        return None

    @abstractmethod
    def describe(self, run: Run, built: BuiltTable) -> dict[str, Any]:
        """Return the fields that `info_class` adds to `SequencesInfo`."""


def make_sequences(
    run: Run,
    builder_class: type[SequenceBuilder],
    events: Table[EventsInfo],
    items: Table[ItemsInfo],
    split: Split,
) -> Table[SequencesInfo]:
    """Make `sequences`, unless it is up to date, and the tables it depends on."""
    config = run.config
    builder = builder_class(run.source, config, split)
    made = builder.make_inputs(run, events)
    settings = asdict(as_base(config, SequencesConfig))
    tables: dict[str, Table[Any]] = {"events": events, "items": items, **made}
    inputs = {name: table.hash for name, table in tables.items()}
    if finished := run.find_finished(SequencesInfo, settings, inputs):
        return finished
    started = time.perf_counter()
    builder = builder.resolve(run, events)
    as_of = {name: table for name, table in made.items() if name.startswith(PREFIX)}
    built = build_parts(run, builder, events, as_of)
    count = built.count
    missing = {name: count[f"nothing_of_{name}"] for name in as_of}
    check_matched(run, events.rows, missing)
    info = builder.info_class(
        kind=config.kind,
        users=count["users"],
        interactions=count["interactions"],
        pairs=count["pairs"],
        items=items.rows,
        split=split,
        ties=config.ties,
        log=run.source.info,
        behaviour=config.behaviour,
        max_events=config.max_events,
        max_length=count["max_length"],
        truncated_users=count["truncated_users"],
        truncated_events=count["truncated_events"],
        tied_behaviours=count["tied_rows"],
        **builder.describe(run, built),
        as_of={
            name: AsOfFeatures(table.info.key, table.columns[2:])
            for name, table in as_of.items()
        },
    )
    sequences = run.commit(
        "sequences", builder.output, built.parts, settings, inputs, info
    )
    seconds = time.perf_counter() - started
    run.report(f"sequences: {pluralize(sequences.rows, 'user')} in {seconds:.1f} s")
    for name in builder.statistics:
        value = getattr(info, name)
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count}" for key, count in value.items())
        if value:
            run.report(f"  {name}: {value}")
    return sequences


def build_parts(
    run: Run,
    builder: SequenceBuilder,
    events: Table[EventsInfo],
    as_of: dict[str, Table[AsOfInfo]],
) -> BuiltTable:
    """Build and write the parts of `sequences`, and report their progress."""
    uris = events.part_uris()
    lookups = run.executor.put(builder.read_lookups(run, as_of))
    shared = (builder, run.table_uri("sequences"), lookups)
    build = SequenceBuilder.build
    results: Iterator[tuple[int, BuiltPart]]
    if counter := builder.create_counter(run):
        results = count_in_buckets(
            run.executor, uris, events.rows, counter, lookups, build, shared
        )
    else:
        results = run.executor.map_unordered(build, [(uri,) for uri in uris], shared)
    built: dict[int, BuiltPart] = {}
    count: Counter[str] = Counter()
    last_report = time.monotonic()
    for index, part in results:
        built[index] = part
        longest = max(count["max_length"], part.count["max_length"])
        count.update(part.count)
        count["max_length"] = longest
        if time.monotonic() - last_report >= 1:
            last_report = time.monotonic()
            run.report(
                f"sequences: part {len(built)} of {len(uris)} built, "
                f"{pluralize(count['users'], 'user')}"
            )
    ordered = [built[index] for index in sorted(built)]
    return BuiltTable(
        [part.part for part in ordered if part.part],
        count,
        [part.training for part in ordered if part.training],
    )
