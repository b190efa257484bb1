"""Sequences from events: the pipeline that all kinds of request share.

    sequences = make_sequences(step)

An events part has all events of its users, sorted, so it becomes a part of `sequences`
in one vectorised pass. List columns are flat columns with offsets, and nothing is
copied per request. `SequenceBuilder.build` selects and orders behaviours, forms
requests, assigns splits, computes `history_end`, attaches features and labels, and
arranges the columns. A kind of request overrides the steps that differ.

Shapes: E events of a part, N behaviours, R requests, C candidates of all requests,
U users with a row.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from core.errors import pluralize
from core.ragged import lengths_to_starts, run_starts
from core.schemas import AsOfInfo, EventsInfo, ItemsInfo, SequencesInfo, Split
from core.tables import Part, Table, write_part
from pipelines.prepare.events.columns import (
    USER_AND_ITEM,
    bool_column,
    count_earlier,
    count_pairs,
    dictionary_column,
    encode_ids,
    known_times,
    read_part,
    take_rows,
)
from pipelines.prepare.executor import Call, Shared, fetch
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.as_of import (
    as_of_info,
    as_of_schema,
    join_as_of,
    report_missing,
    share_as_of,
)
from pipelines.prepare.sequences.counts import Columns, KeyCounter, count_in_buckets
from pipelines.prepare.sequences.custom_features import (
    TrainingValues,
    describe_features,
    feature_columns,
)
from pipelines.prepare.sequences.splits import (
    SPLITS,
    assign_splits,
    count_tied,
)

NOT_TRUNCATED = np.iinfo(np.int64).min
"""`Behaviours.oldest` of a user without truncation: earlier than any time."""


@dataclass(frozen=True)
class Lookups:
    """Tables that every part looks up: the tables themselves, or references to them."""

    catalogue: Shared
    """`Vocabulary` of item ids, whose indices are item_index."""
    queries: Shared = None
    """`Vocabulary` of queries, whose indices are query_index; None for kinds without
    queries."""
    as_of: tuple[Shared, ...] = ()
    """`AsOfTable` of each table whose features are joined to events."""

    def fetch(self) -> Lookups:
        """Return the lookups with all references resolved."""
        as_of = tuple(fetch(table) for table in self.as_of)
        return Lookups(fetch(self.catalogue), fetch(self.queries), as_of)


@dataclass(frozen=True)
class EventsPart:
    """An events part as arrays. Events are sorted by user and time."""

    table: pa.Table
    """Rows of `read_part`."""
    user: np.ndarray
    """(E,) index of the user within the part, ascending from 0."""
    item: np.ndarray
    """(E,) item_index, -1 for items outside the catalogue."""
    time: np.ndarray
    """(E,) time in ms."""
    known: np.ndarray
    """(E,) time in ms from which the event, as a behaviour, is in histories."""
    query: np.ndarray
    """(E,) query_index, -1 without a query; empty for kinds without a table of
    queries."""

    @classmethod
    def open(
        cls, table: pa.Table, lookups: Lookups, behaviour: str | None
    ) -> EventsPart:
        """Look up the users, items, queries and times of events.

        Args:
            table: Rows of `read_part`.
            lookups: Vocabularies of items and queries.
            behaviour: Label that makes an event a behaviour; None if all events are.
        """
        user = dictionary_column(table, "user_id").indices.to_numpy()
        is_first = np.ones(len(user), dtype=bool)
        is_first[1:] = user[1:] != user[:-1]
        query = np.zeros(0, np.int32)
        if lookups.queries is not None:
            query = encode_ids(dictionary_column(table, "query"), lookups.queries)
        return cls(
            table,
            np.cumsum(is_first) - 1,
            encode_ids(dictionary_column(table, "item_id"), lookups.catalogue),
            table["timestamp_ms"].to_numpy(),
            known_times(table, behaviour),
            query,
        )

    @cached_property
    def is_late(self) -> bool:
        """Whether some events become known later than they happen."""
        return self.known is not self.time and not np.array_equal(self.known, self.time)

    @property
    def num_users(self) -> int:
        """Number of users in the part."""
        return int(self.user[-1]) + 1 if len(self.user) else 0


@dataclass(frozen=True)
class Behaviours:
    """The behaviours of a part, sorted by user and the time at which they are known."""

    row: np.ndarray
    """(N,) rows of the part."""
    oldest: np.ndarray
    """(users of the part,) time in ms at which the oldest remaining behaviour of a
    truncated user is known; NOT_TRUNCATED for other users."""
    truncated_users: int
    """Number of users with more than `max_events` behaviours."""
    truncated_events: int
    """Number of dropped behaviours: the oldest ones of truncated users."""


def select_behaviours(
    part: EventsPart, is_behaviour: np.ndarray, max_events: int
) -> Behaviours:
    """Select the most recent `max_events` behaviours of each user.

    Args:
        part: Events of the part.
        is_behaviour: Mask (E,) of the events that are behaviours.
        max_events: Maximum number of behaviours per user.
    """
    row = np.flatnonzero(is_behaviour)
    if part.is_late:
        row = row[np.lexsort((part.known[row], part.user[row]))]
    start = run_starts(part.user[row])  # (users with behaviours,)
    length = np.diff(np.append(start, len(row)))
    end = start + length
    from_end = np.repeat(end, length) - np.arange(len(row))  # 1 for the latest
    is_recent = from_end <= max_events
    is_truncated = length > max_events
    oldest = np.full(part.num_users, NOT_TRUNCATED)
    oldest_row = row[(end - max_events)[is_truncated]]
    oldest[part.user[oldest_row]] = part.known[oldest_row]
    return Behaviours(
        row[is_recent],
        oldest,
        truncated_users=int(is_truncated.sum()),
        truncated_events=int((~is_recent).sum()),
    )


@dataclass(frozen=True)
class Requests:
    """The requests of a part, sorted by user and time."""

    row: np.ndarray
    """(R,) row of the event of a request, which determines its user."""
    time: np.ndarray
    """(R,) time in ms."""
    candidate: np.ndarray
    """(C,) rows of the events that are candidates, grouped by request."""
    start: np.ndarray
    """(R,) index of each request's first candidate."""
    as_of: np.ndarray
    """(E,) time in ms as of which the features of each event are taken, such as the
    time of its request."""

    @classmethod
    def one_per_event(cls, part: EventsPart, rows: np.ndarray) -> Requests:
        """Form a request of each event in `rows` (R,), which is its only candidate."""
        return cls(rows, part.time[rows], rows, np.arange(len(rows)), part.time)

    @property
    def lengths(self) -> np.ndarray:
        """Number (R,) of candidates of each request."""
        return np.diff(np.append(self.start, len(self.candidate)))

    def select(self, is_selected: np.ndarray) -> Requests:
        """Return the requests that the mask (R,) selects."""
        lengths = self.lengths
        candidate = self.candidate[np.repeat(is_selected, lengths)]
        start = lengths_to_starts(lengths[is_selected])
        row, time = self.row[is_selected], self.time[is_selected]
        return replace(self, row=row, time=time, candidate=candidate, start=start)


@dataclass(frozen=True)
class PartDraft:
    """Behaviours, requests, splits and features of a part before its table is built.

    The part has a row for each user with a request.
    """

    part: EventsPart
    """Events of the part, from which columns are read."""
    row: np.ndarray
    """(N,) rows of the events that are behaviours, sorted by user and the time at which
    they are known."""
    requests: Requests
    """Requests of the part's users, with the histories that they may read."""
    split: np.ndarray
    """(R,) index into SPLITS."""
    features: np.ndarray
    """(E, F) features of each event; F is 0 for kinds without features."""

    @cached_property
    def request_start(self) -> np.ndarray:
        """Index (U,) of each user's first request."""
        return run_starts(self.part.user[self.requests.row])

    @cached_property
    def users(self) -> np.ndarray:
        """Users (U,) with a row: the users with a request."""
        return self.part.user[self.requests.row][self.request_start]

    @cached_property
    def behaviour_offsets(self) -> np.ndarray:
        """Offsets (U + 1,) of the users' behaviours."""
        begin = np.searchsorted(self.part.user[self.row], self.users)
        return np.append(begin, len(self.row))

    def take(self, name: str) -> pa.Array:
        """Return the column `name` of events for the behaviours (N,)."""
        table = self.part.table
        is_unchanged = len(self.row) == table.num_rows and not self.part.is_late
        if is_unchanged:
            column = table[name].combine_chunks()
            return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        return take_rows(table, name, self.row)


@dataclass(frozen=True)
class TrainingStats:
    """Statistics of the training rows of a part."""

    custom: TrainingValues
    """Statistics of custom features."""
    positives: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """(K,) number of positive rows of each task; K is 0 for kinds without tasks."""
    feature_sums: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    """(2, F) sums and sums of squares of the features; F is 0 for kinds that do not
    standardise features."""


@dataclass(frozen=True)
class BuiltPart:
    """A part of `sequences`, with its statistics."""

    table: pa.Table | None
    """The rows, or None after they were written."""
    count: Counter[str]
    """Counts of users, behaviours and requests, and of dropped ones."""
    training: TrainingStats | None = None
    """Statistics of training rows; None for kinds without them, and for an empty
    part."""
    written: Part | None = None
    """The written part, or None if there are no rows."""


@dataclass(frozen=True)
class SequenceBuilder(ABC):
    """Builds the sequences of one kind of log from its events, in every task."""

    schema: pa.Schema
    """Schema of the events."""
    split: Split
    max_events: int
    """Maximum number of behaviours per user, the most recent ones."""
    joined: pa.Schema
    """Features of items and of tables with times of their own, which are joined to
    events."""

    ids: ClassVar[tuple[str, ...]] = USER_AND_ITEM
    """Columns that are read as dictionary arrays."""

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
        return pa.schema([*self.schema, *self.joined])

    @property
    def custom_columns(self) -> list[str]:
        """Columns of custom features that models read."""
        return feature_columns(self.joined_schema)

    @property
    def behaviour_label(self) -> str | None:
        """Label that makes an event a behaviour; None if all events are behaviours."""
        return None

    @property
    def hashes_ties(self) -> bool:
        """Whether leave-last-out breaks ties between equal timestamps by a hash.

        Otherwise they keep the order of the log.
        """
        return True

    @abstractmethod
    def form_requests(
        self,
        part: EventsPart,
        behaviours: Behaviours,
        count: Counter[str],
    ) -> Requests:
        """Form the requests of a part, sorted by user and time.

        Args:
            part: Events of the part.
            behaviours: Behaviours of the part.
            count: Counter that the numbers of dropped requests are added to, in place.
        """

    def find_behaviours(self, part: EventsPart) -> np.ndarray:
        """Return a mask (E,) of the events that are behaviours."""
        is_behaviour = part.item >= 0
        if self.behaviour_label:
            is_behaviour &= bool_column(part.table, f"label_{self.behaviour_label}")
        return is_behaviour

    def compute_features(
        self,
        part: EventsPart,
        requests: Requests,
        pieces: list[Columns] | None,
    ) -> np.ndarray:
        """Compute the features (E, F) float32 of each event as of `requests.as_of`.

        Args:
            part: Events of the part.
            requests: Requests of the part.
            pieces: Counts of the events, for `gather_counts`; None if nothing is
                counted.
        """
        return np.zeros((len(part.time), 0), np.float32)

    def history_ends(self, draft: PartDraft) -> np.ndarray:
        """Return `history_end` (R,) int32 of each request.

        It is the number of the user's behaviours that are known strictly before the
        request.
        """
        part, requests = draft.part, draft.requests
        user, known = part.user[draft.row], part.known[draft.row]
        earlier = count_earlier(user, known, part.user[requests.row], requests.time)
        return earlier.astype(np.int32)

    def behaviour_columns(self, draft: PartDraft) -> dict[str, pa.Array]:
        """Return columns (N,) of the behaviours that are not columns of events."""
        return {"item_index": pa.array(draft.part.item[draft.row], pa.int32())}

    @abstractmethod
    def user_columns(
        self, draft: PartDraft, count: Counter[str]
    ) -> dict[str, pa.Array]:
        """Return the columns (U,) with one value per user.

        Args:
            draft: Requests and features of the part.
            count: Counter that the kind's statistics are added to, in place.
        """

    def request_column(
        self,
        draft: PartDraft,
        count: Counter[str],
        per_request: dict[str, pa.Array],
        per_candidate: dict[str, np.ndarray],
    ) -> pa.Array:
        """Build the column `requests`: a list of structs per user.

        A field is taken from `per_request`, from `per_candidate`, or from the column of
        events with its name.

        Args:
            draft: Requests and features of the part.
            count: Counter that the numbers of requests without a history are added to,
                by split, in place.
            per_request: Fields (R,) of requests.
            per_candidate: Values (E,) or (E, width) of events; a request lists the
                values of its candidates.
        """
        requests, kind = draft.requests, self.output.field("requests").type
        history_end = self.history_ends(draft)
        for code, name in enumerate(SPLITS):
            has_no_history = (draft.split == code) & (history_end == 0)
            count[f"without_history_{name}"] = int(has_no_history.sum())
        per_request = per_request | {
            "timestamp_ms": pa.array(requests.time),
            "history_end": pa.array(history_end),
            "split": split_names(draft.split),
        }
        per_candidate = per_candidate | {"candidates": draft.part.item}
        offsets = np.append(requests.start, len(requests.candidate))
        arrays = []
        for column in kind.value_type:
            if column.name in per_request:
                arrays.append(per_request[column.name])
                continue
            width = 1
            if column.name in per_candidate:
                values = per_candidate[column.name][requests.candidate]
                width = values.shape[1] if values.ndim == 2 else 1
                flat = pa.array(values.reshape(-1))
            else:
                flat = take_rows(draft.part.table, column.name, requests.candidate)
            arrays.append(to_lists(offsets * width, flat, column.type))
        structs = pa.StructArray.from_arrays(arrays, fields=list(kind.value_type))
        user_offsets = np.append(draft.request_start, len(requests.row))
        return to_lists(user_offsets, structs, kind)

    def training_stats(self, draft: PartDraft, table: pa.Table) -> TrainingStats | None:
        """Return the statistics of training rows; None for kinds without them.

        Args:
            draft: Requests and features of the part.
            table: The built rows of `sequences`.
        """
        return None

    def build(
        self,
        events: pa.Table,
        lookups: Lookups,
        pieces: list[Columns] | None = None,
    ) -> BuiltPart:
        """Build the sequences of one events part.

        Args:
            events: Rows of `read_part` with the columns `columns`.
            lookups: Lookups without references.
            pieces: Counts of the events, for `gather_counts`; None if nothing is
                counted.
        """
        count: Counter[str] = Counter()
        if not events.num_rows:
            return BuiltPart(self.output.empty_table(), count)
        part = EventsPart.open(events, lookups, self.behaviour_label)
        is_behaviour = self.find_behaviours(part)
        behaviours = select_behaviours(part, is_behaviour, self.max_events)
        count["truncated_users"] = behaviours.truncated_users
        count["truncated_events"] = behaviours.truncated_events
        requests = self.form_requests(part, behaviours, count)
        table = join_as_of(part.table, requests.as_of, lookups.as_of, count)
        part = replace(part, table=table)
        if not len(requests.row):
            return BuiltPart(self.output.empty_table(), count)
        draft = PartDraft(
            part,
            _drop_users_without_request(part, behaviours.row, requests),
            requests,
            self._assign_splits(part, requests, count),
            self.compute_features(part, requests, pieces),
        )
        table = self._arrange_columns(draft, count)
        _count_rows(draft, count)
        return BuiltPart(table, count, self.training_stats(draft, table))

    def _assign_splits(
        self, part: EventsPart, requests: Requests, count: Counter[str]
    ) -> np.ndarray:
        """Return the index (R,) into SPLITS of each request."""
        user_start = run_starts(part.user[requests.row])
        if self.split.by == "temporal" or not self.hashes_ties:
            return assign_splits(self.split, requests.time, user_start)
        first_candidate = pa.array(requests.candidate[requests.start])
        user = dictionary_column(part.table, "user_id").take(pa.array(requests.row))
        item = dictionary_column(part.table, "item_id").take(first_candidate)
        split = assign_splits(self.split, requests.time, user_start, (user, item))
        for name, tied in count_tied(split, requests.time, user_start).items():
            count[f"tied_targets_{name}"] = tied
        return split

    def _arrange_columns(self, draft: PartDraft, count: Counter[str]) -> pa.Table:
        """Return the rows of `sequences`, with the columns of `output`."""
        user = dictionary_column(draft.part.table, "user_id")
        first_request = draft.requests.row[draft.request_start]
        per_user = {"user_id": user.take(pa.array(first_request)).cast(pa.string())}
        per_user |= self.user_columns(draft, count)
        per_behaviour = self.behaviour_columns(draft)
        columns = []
        for column in self.output:
            if column.name in per_user:
                columns.append(per_user[column.name])
                continue
            values = per_behaviour.get(column.name)
            if values is None:
                values = draft.take(column.name)
            columns.append(to_lists(draft.behaviour_offsets, values, column.type))
        return pa.Table.from_arrays(columns, schema=self.output)


def _drop_users_without_request(
    part: EventsPart, row: np.ndarray, requests: Requests
) -> np.ndarray:
    """Return the behaviours (N,) of users with a request."""
    has_row = np.zeros(part.num_users, dtype=bool)
    has_row[part.user[requests.row]] = True
    return row if has_row.all() else row[has_row[part.user[row]]]


def _count_rows(draft: PartDraft, count: Counter[str]) -> None:
    """Add the counts that every kind of request has to `count`."""
    part, row = draft.part, draft.row
    user, known = part.user[row], part.known[row]
    is_tied = (known[1:] == known[:-1]) & (user[1:] == user[:-1])
    count["users"] = len(draft.users)
    count["interactions"] = len(row)
    count["tied_rows"] = int(is_tied.sum())
    count["pairs"] = count_pairs(user, part.item[row])
    count["max_length"] = int(np.diff(draft.behaviour_offsets).max())
    for code, name in enumerate(SPLITS):
        count[f"requests_{name}"] = int((draft.split == code).sum())


def to_lists(offsets: np.ndarray, values: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Return a list column of flat values.

    Args:
        offsets: Offsets (n + 1,) of the lists.
        values: Values of all lists, end to end.
        dtype: Type of the lists.
    """
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), values.cast(dtype.value_type), type=dtype
    )


def to_vectors(values: np.ndarray, dtype: pa.DataType) -> pa.Array:
    """Convert values (n, width) to fixed-size lists of numbers of the type `dtype`."""
    flat = pa.array(values.reshape(-1), dtype)
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def split_names(split: np.ndarray) -> pa.Array:
    """Convert indices (n,) into SPLITS to names."""
    names = pa.DictionaryArray.from_arrays(pa.array(split), pa.array(SPLITS))
    return names.cast(pa.string())


# The step: all parts, one after the other, and the manifest.


@dataclass(frozen=True)
class BuiltTable:
    """Written parts of `sequences`, not yet committed, in the order of events parts."""

    parts: list[Part]
    """Written files, for the manifest."""
    count: Counter[str]
    """Counts of all parts."""
    training: list[TrainingStats]
    """Statistics of training rows, for each part that has any."""

    def per_split(self, name: str) -> dict[str, int]:
        """Return the counts `NAME_train`, `NAME_val` and `NAME_test` by split."""
        return {split: self.count[f"{name}_{split}"] for split in SPLITS}


@dataclass(frozen=True)
class SequencesStep(ABC):
    """The step of prepare that makes `sequences`; runs on the driver."""

    info_class: ClassVar[type[SequencesInfo]]

    run: Run
    """The run of prepare."""
    events: Table[EventsInfo]
    """Table of `events`."""
    items: Table[ItemsInfo]
    """Table of `items`."""
    split: Split
    as_of: dict[str, Table[AsOfInfo]]
    """Manifests of the tables of features with times of their own, by name."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the table depends on."""
        config = self.run.config
        return {
            "kind": config.kind,
            "split": config.split.settings(),
            "max_events": config.max_events,
            "core_window": config.core_window,
        }

    @property
    def inputs(self) -> dict[str, str]:
        """Hashes of the input tables, by name."""
        tables: dict[str, Table[Any]] = {"events": self.events, "items": self.items}
        tables |= self.as_of
        return {name: table.hash for name, table in tables.items()}

    @property
    def joined_schema(self) -> pa.Schema:
        """Schema of the features that are joined to each event as of its time."""
        return as_of_schema(list(self.run.source.as_of.values()))

    @abstractmethod
    def create_builder(self) -> SequenceBuilder:
        """Return the builder of the parts."""

    def share_lookups(self) -> Lookups:
        """Store the ids and tables that every part looks up, for all tasks."""
        as_of = share_as_of(self.run, self.as_of)
        return Lookups(self.run.tables.read_catalogue(), as_of=tuple(as_of))

    def create_counter(
        self, builder: Any, lookups: Lookups
    ) -> tuple[KeyCounter, Call] | None:
        """Return the counter of events, and the arguments of its `read_keys`.

        The base class counts nothing and returns None.

        Args:
            builder: Builder of the parts.
            lookups: Shared lookups.
        """
        return None

    @abstractmethod
    def describe(self, builder: Any, built: BuiltTable) -> dict[str, Any]:
        """Return the fields that `info_class` adds to `SequencesInfo`."""

    @abstractmethod
    def report(self, sequences: Table[Any], seconds: float) -> None:
        """Report the sizes of the table, and counts of dropped events and requests.

        Args:
            sequences: The table.
            seconds: Duration of the step.
        """


MAX_COUNTS = ("max_length", "max_candidates", "max_spread_ms")
"""Counts that are the maximum over parts, not the sum."""


def make_sequences(step: SequencesStep) -> Table[SequencesInfo]:
    """Make the table of a step, unless it is up to date."""
    run, config = step.run, step.run.config
    settings, inputs = step.settings, step.inputs
    if finished := run.tables.find_finished(SequencesInfo, settings, inputs):
        return finished
    started = time.perf_counter()
    with run.tables.clean_up_on_error("sequences"):
        builder = step.create_builder()
        parts = step.events.part_uris()
        lookups = step.share_lookups()
        shared = (run.tables.table_uri("sequences"), builder, lookups)
        counter_and_lookups = step.create_counter(builder, lookups)
        if counter_and_lookups:
            counter, key_lookups = counter_and_lookups
            results = count_in_buckets(
                run.executor,
                parts,
                step.events.rows,
                counter,
                key_lookups,
                _build_and_write,
                shared,
            )
        else:
            calls = [(uri,) for uri in parts]
            results = run.executor.map_unordered(_build_and_write, calls, shared)
        built_by_index: dict[int, BuiltPart] = {}
        count: Counter[str] = Counter()
        last_report = time.monotonic()
        for index, part in results:
            built_by_index[index] = part
            maxima = {name: max(count[name], part.count[name]) for name in MAX_COUNTS}
            count.update(part.count)
            for name, maximum in maxima.items():
                count[name] = maximum
            if time.monotonic() - last_report >= 1:
                last_report = time.monotonic()
                run.report(
                    f"sequences: part {len(built_by_index)} of {len(parts)} built, "
                    f"{pluralize(count['users'], 'user')}"
                )
        ordered = [built_by_index[index] for index in sorted(built_by_index)]
        built = BuiltTable(
            [part.written for part in ordered if part.written],
            count,
            [part.training for part in ordered if part.training],
        )
        report_missing(run, step.as_of, step.events.rows, count)
        custom = [part.custom for part in built.training]
        custom_columns = builder.custom_columns if custom else []
        info = step.info_class(
            kind=config.kind,
            users=count["users"],
            interactions=count["interactions"],
            pairs=count["pairs"],
            items=step.items.rows,
            split=step.split,
            ties=config.ties,
            log=run.source.info,
            behaviour=config.behaviour,
            max_events=config.max_events,
            max_length=count["max_length"],
            truncated_users=count["truncated_users"],
            truncated_events=count["truncated_events"],
            tied_behaviours=count["tied_rows"],
            **step.describe(builder, built),
            custom=describe_features(custom, custom_columns),
            as_of=as_of_info(step.as_of),
        )
        sequences = run.tables.commit(
            "sequences",
            builder.output,
            built.parts,
            settings,
            inputs,
            info,
            build_write_s=time.perf_counter() - started,
        )
    step.report(sequences, time.perf_counter() - started)
    return sequences


def _build_and_write(
    sequences_uri: str,
    builder: SequenceBuilder,
    lookups: Lookups,
    uri: str,
    pieces: list[Columns] | None = None,
) -> BuiltPart:
    """Build and write the sequences of an events part, and return their statistics."""
    events = read_part(uri, builder.columns, builder.ids)
    built = builder.build(events, lookups.fetch(), pieces)
    assert built.table is not None
    written = write_part(sequences_uri, built.table) if built.table.num_rows else None
    return replace(built, table=None, written=written)
