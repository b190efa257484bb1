"""Events to sequences, one events part at a time: the pipeline that all kinds of request share.

    sequences = make_sequences(step)

An events part holds each of its users whole and sorted, so it becomes a part of
`sequences` in one vectorised pass: list columns are flat columns with offsets over
them, and nothing is copied per request. `SequenceBuilder.build` selects and orders
behaviours, forms requests, assigns splits, computes `history_end`, attaches features
and labels, and lays out the table. A kind of request overrides the steps that differ.

Shapes: E events of a part, N behaviours, R requests, C candidates of all requests,
U users with a row.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from models.config import pluralize
from models.ragged import lengths_to_starts, run_starts
from models.storage.tables import Manifest, Part, part_uris, write_part
from pipelines.data.engine import Call, Shared, fetch
from pipelines.data.events.columns import (
    USER_AND_ITEM,
    bool_column,
    count_earlier,
    count_pairs,
    dictionary_column,
    index_in,
    known_times,
    read_part,
    take_rows,
)
from pipelines.data.run import Report, Run
from pipelines.data.sequences.as_of import (
    as_of_info,
    as_of_schema,
    join_as_of,
    report_missing,
    share_as_of,
)
from pipelines.data.sequences.counts import Columns, KeyCounter, count_in_buckets
from pipelines.data.sequences.own_features import (
    TrainingValues,
    describe_features,
    feature_columns,
)
from pipelines.data.sequences.splits import (
    SPLITS,
    assign_splits,
    count_by_fold,
    count_tied,
)

NOT_TRUNCATED = np.iinfo(np.int64).min
"""`Behaviours.oldest` of a user who keeps all behaviours: earlier than any time."""


@dataclass(frozen=True)
class Lookups:
    """Ids and tables that the build of every part looks up: values, or references to them."""

    catalogue: Shared
    """`Vocabulary` whose integers are item_index."""
    queries: Shared = None
    """`Vocabulary` whose integers are query_index; None for kinds without queries."""
    as_of: tuple[Shared, ...] = ()
    """`AsOfTable` of each table with features that are joined."""

    def fetch(self) -> Lookups:
        """Return the lookups with values instead of references."""
        as_of = tuple(fetch(table) for table in self.as_of)
        return Lookups(fetch(self.catalogue), fetch(self.queries), as_of)


@dataclass(frozen=True)
class EventsPart:
    """An events part as arrays. Events are sorted by user and time."""

    table: pa.Table
    """Rows of `read_part`."""
    user: np.ndarray
    """(E,) rank of the user within the part, from 0, ascending."""
    item: np.ndarray
    """(E,) item_index, -1 outside the catalogue."""
    time: np.ndarray
    """(E,) ms."""
    known: np.ndarray
    """(E,) ms from which the event is visible as a behaviour."""
    query: np.ndarray
    """(E,) query_index, -1 without a query; empty for kinds without a table of
    queries."""

    @classmethod
    def open(
        cls, table: pa.Table, lookups: Lookups, behaviour: str | None
    ) -> EventsPart:
        """Look up users, items and times of a table of `read_part`.

        `behaviour` is the label that makes an event a behaviour; None if all events
        are.
        """
        user = dictionary_column(table, "user_id").indices.to_numpy()
        is_first = np.ones(len(user), dtype=bool)
        is_first[1:] = user[1:] != user[:-1]
        query = np.zeros(0, np.int32)
        if lookups.queries is not None:
            query = index_in(dictionary_column(table, "query"), lookups.queries)
        return cls(
            table,
            np.cumsum(is_first) - 1,
            index_in(dictionary_column(table, "item_id"), lookups.catalogue),
            table["timestamp_ms"].to_numpy(),
            known_times(table, behaviour),
            query,
        )

    @cached_property
    def is_late(self) -> bool:
        """Whether an event becomes visible later than it happens."""
        return self.known is not self.time and not np.array_equal(self.known, self.time)

    @property
    def num_users(self) -> int:
        return int(self.user[-1]) + 1 if len(self.user) else 0


@dataclass(frozen=True)
class Behaviours:
    """The behaviours of a part, by user and the time at which they are visible."""

    row: np.ndarray
    """(N,) rows of the part."""
    oldest: np.ndarray
    """(users of the part,) ms from which a truncated user's behaviours are visible;
    NOT_TRUNCATED for others."""
    truncated_users: int
    """Users with more than `max_events` behaviours."""
    truncated_events: int
    """Behaviours that these users lose: their oldest."""


def select_behaviours(
    part: EventsPart, is_behaviour: np.ndarray, max_events: int
) -> Behaviours:
    """Return the most recent `max_events` behaviours of each user.

    `is_behaviour` (E,) bool marks the events that are behaviours.
    """
    row = np.flatnonzero(is_behaviour)
    if part.is_late:
        row = row[np.lexsort((part.known[row], part.user[row]))]
    start = run_starts(part.user[row])
    length = np.diff(np.append(start, len(row)))
    from_end = np.repeat(start + length, length) - np.arange(len(row))
    is_recent = from_end <= max_events
    is_truncated = length > max_events
    oldest = np.full(part.num_users, NOT_TRUNCATED)
    oldest_row = row[(start + length - max_events)[is_truncated]]
    oldest[part.user[oldest_row]] = part.known[oldest_row]
    return Behaviours(
        row[is_recent],
        oldest,
        truncated_users=int(is_truncated.sum()),
        truncated_events=int((~is_recent).sum()),
    )


@dataclass(frozen=True)
class Requests:
    """The requests of a part, by user and time."""

    row: np.ndarray
    """(R,) the event that a request is at; its user is the request's."""
    time: np.ndarray
    """(R,) ms."""
    candidate: np.ndarray
    """(C,) events that are the candidates, request after request."""
    start: np.ndarray
    """(R,) first candidate of each request."""
    as_of: np.ndarray
    """(E,) ms at which the features of each event are taken: the time of its
    request."""

    @classmethod
    def one_per_event(cls, part: EventsPart, rows: np.ndarray) -> Requests:
        """Form a request of each event in `rows` (R,), with the event as its only candidate."""
        return cls(rows, part.time[rows], rows, np.arange(len(rows)), part.time)

    @property
    def lengths(self) -> np.ndarray:
        """(R,) number of candidates of each request."""
        return np.diff(np.append(self.start, len(self.candidate)))

    def select(self, is_selected: np.ndarray) -> Requests:
        """Return the requests of a mask (R,)."""
        lengths = self.lengths
        candidate = self.candidate[np.repeat(is_selected, lengths)]
        start = lengths_to_starts(lengths[is_selected])
        row, time = self.row[is_selected], self.time[is_selected]
        return replace(self, row=row, time=time, candidate=candidate, start=start)


@dataclass(frozen=True)
class PartDraft:
    """A part of sequences while it is built: who has a row, which behaviours and requests are in it."""

    part: EventsPart
    row: np.ndarray
    """(N,) events that are behaviours, by user and the time at which they are
    visible."""
    requests: Requests
    split: np.ndarray
    """(R,) index into SPLITS."""
    features: np.ndarray
    """(E, F) features of each event; F is 0 for kinds without features."""

    @cached_property
    def request_start(self) -> np.ndarray:
        """(U,) first request of each user with a row."""
        return run_starts(self.part.user[self.requests.row])

    @cached_property
    def users(self) -> np.ndarray:
        """(U,) users with a row: the users with a request."""
        return self.part.user[self.requests.row][self.request_start]

    @cached_property
    def behaviour_offsets(self) -> np.ndarray:
        """(U + 1,) offsets of the users' behaviours."""
        begin = np.searchsorted(self.part.user[self.row], self.users)
        return np.append(begin, len(self.row))

    def take(self, name: str) -> pa.Array:
        """Return the column `name` of events for each behaviour."""
        table = self.part.table
        is_whole = len(self.row) == table.num_rows and not self.part.is_late
        if is_whole:
            column = table[name].combine_chunks()
            return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        return take_rows(table, name, self.row)


@dataclass(frozen=True)
class TrainingStats:
    """Statistics of training rows of a part."""

    own: TrainingValues
    """Statistics of custom features."""
    positives: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """(K,) positive rows of each task; K is 0 for kinds without tasks."""
    feature_sums: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    """(2, F) sums and sums of squares of the features; F is 0 for kinds that do not
    standardise them."""


@dataclass(frozen=True)
class BuiltPart:
    """A part of sequences, and statistics of it."""

    table: pa.Table | None
    """Its rows; None once they are written."""
    count: Counter[str]
    """Counts of users, behaviours and requests, and of what was left out."""
    training: TrainingStats | None = None
    """None for kinds without such statistics, and for an empty part."""
    written: Part | None = None
    """The written part; None if there are no rows."""


@dataclass(frozen=True)
class SequenceBuilder(ABC):
    """Rules by which the events of one kind of log become sequences. Sent to every task."""

    schema: pa.Schema
    """Schema of the events."""
    split: dict[str, Any]
    """The split as manifests record it: `kind`, and the cut times of a temporal
    split."""
    max_events: int
    """Most recent behaviours that are kept of each user."""
    joined: pa.Schema
    """Features of items and of tables with a time of their own, which are joined to
    events."""

    ids: ClassVar[tuple[str, ...]] = USER_AND_ITEM
    """Columns that are read dictionary-coded."""

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Columns of events that are read."""

    @property
    @abstractmethod
    def output(self) -> pa.Schema:
        """Schema of the sequences."""

    @property
    def joined_schema(self) -> pa.Schema:
        """Columns of events, and features that are joined to them."""
        return pa.schema([*self.schema, *self.joined])

    @property
    def own(self) -> list[str]:
        """Columns of custom features that models read."""
        return feature_columns(self.joined_schema)

    @property
    def behaviour_label(self) -> str | None:
        """Label that makes an event a behaviour; None if all events are behaviours."""
        return None

    @property
    def hashes_ties(self) -> bool:
        """Whether leave-last-out orders requests of one time by a hash; else the later one in the log is later."""
        return True

    @abstractmethod
    def form_requests(
        self,
        part: EventsPart,
        behaviours: Behaviours,
        count: Counter[str],
    ) -> Requests:
        """Return the requests of a part, by user and time. Add counts of left-out requests to `count`."""

    def find_behaviours(self, part: EventsPart) -> np.ndarray:
        """Return the mask (E,) of the events that are behaviours."""
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
        """Return the (E, F) features of each event as of `requests.as_of`.

        `pieces` are the counts of the part's events; None if nothing is counted.
        """
        return np.zeros((len(part.time), 0), np.float32)

    def history_ends(self, draft: PartDraft) -> np.ndarray:
        """Return (R,) int32 the number of the user's behaviours that are visible strictly before each request."""
        part, requests = draft.part, draft.requests
        user, known = part.user[draft.row], part.known[draft.row]
        earlier = count_earlier(user, known, part.user[requests.row], requests.time)
        return earlier.astype(np.int32)

    def behaviour_columns(self, draft: PartDraft) -> dict[str, pa.Array]:
        """Return flat columns of the behaviours (N,), beside the columns of events of the same name."""
        return {"item_index": pa.array(draft.part.item[draft.row], pa.int32())}

    @abstractmethod
    def user_columns(
        self, draft: PartDraft, count: Counter[str]
    ) -> dict[str, pa.Array]:
        """Return columns with one value, or one list, per user (U,). Add the kind's counts to `count`."""

    def request_column(
        self,
        draft: PartDraft,
        count: Counter[str],
        per_request: dict[str, pa.Array],
        per_candidate: dict[str, np.ndarray],
    ) -> pa.Array:
        """Return the column `requests`: for each user the structs of their requests.

        Args:
            draft: The part.
            count: Is given the requests without history by split.
            per_request: (R,) the kind's fields of requests.
            per_candidate: (E,) or (E, width) values of events, of which each request
                lists those of its candidates. Another field of the struct is a column
                of events.
        """
        requests, kind = draft.requests, self.output.field("requests").type
        history_end = self.history_ends(draft)
        for code, name in enumerate(SPLITS):
            is_bare = (draft.split == code) & (history_end == 0)
            count[f"without_history_{name}"] = int(is_bare.sum())
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
        """Return the statistics of training rows of the built `table`; None for kinds without."""
        return None

    def build(
        self,
        events: pa.Table,
        lookups: Lookups,
        pieces: list[Columns] | None = None,
    ) -> BuiltPart:
        """Build the sequences of one events part.

        Args:
            events: Rows of `read_part`, with the columns `columns`.
            lookups: Values, not references.
            pieces: Counts of the part's events; None if nothing is counted.
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
        table = self._lay_out(draft, count)
        _count_rows(draft, count)
        count.update(count_by_fold(self.split, requests.time))
        return BuiltPart(table, count, self.training_stats(draft, table))

    def _assign_splits(
        self, part: EventsPart, requests: Requests, count: Counter[str]
    ) -> np.ndarray:
        """Return the (R,) index into SPLITS of each request."""
        user_start = run_starts(part.user[requests.row])
        if self.split["kind"] == "temporal" or not self.hashes_ties:
            return assign_splits(self.split, requests.time, user_start)
        first_candidate = pa.array(requests.candidate[requests.start])
        user = dictionary_column(part.table, "user_id").take(pa.array(requests.row))
        item = dictionary_column(part.table, "item_id").take(first_candidate)
        split = assign_splits(self.split, requests.time, user_start, (user, item))
        for name, tied in count_tied(split, requests.time, user_start).items():
            count[f"tied_targets_{name}"] = tied
        return split

    def _lay_out(self, draft: PartDraft, count: Counter[str]) -> pa.Table:
        """Return the rows of sequences: list columns are offsets over flat columns."""
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
    """Return the behaviours (N,) of users with a request.

    A user whose requests are all older than the truncated history has no row.
    """
    has_row = np.zeros(part.num_users, dtype=bool)
    has_row[part.user[requests.row]] = True
    return row if has_row.all() else row[has_row[part.user[row]]]


def _count_rows(draft: PartDraft, count: Counter[str]) -> None:
    """Count users, behaviours and requests of a part, for every kind."""
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


def to_lists(offsets: np.ndarray, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a list column of type `kind` over flat values."""
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), values.cast(kind.value_type), type=kind
    )


def to_vectors(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return (n, width) values as lists of fixed size of `kind`."""
    flat = pa.array(values.reshape(-1), kind)
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def split_names(split: np.ndarray) -> pa.Array:
    """Return the names of (n,) indices into SPLITS."""
    names = pa.DictionaryArray.from_arrays(pa.array(split), pa.array(SPLITS))
    return names.cast(pa.string())


# The step: all parts, one after the other, and the manifest.


@dataclass(frozen=True)
class BuiltTable:
    """The parts of sequences, not yet committed, in the order of the events parts."""

    parts: list[Part]
    count: Counter[str]
    """Counts of all parts."""
    training: list[TrainingStats]
    """Statistics of training rows, per part."""

    def per_split(self, name: str) -> dict[str, int]:
        """Return the counts `name_SPLIT` by split."""
        return {split: self.count[f"{name}_{split}"] for split in SPLITS}


@dataclass(frozen=True)
class SequencesStep(ABC):
    """The step of prepare that makes `sequences` of one kind of log. Stays on the driver."""

    run: Run
    events: Manifest
    items: Manifest
    split: dict[str, Any]
    """The split as manifests record it."""
    as_of: dict[str, Manifest]
    """Tables with features that have a time of their own, by name."""

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
        """Hashes of the tables that it is made from."""
        tables = {"events": self.events, "items": self.items, **self.as_of}
        return {name: table.hash for name, table in tables.items()}

    @property
    def joined(self) -> pa.Schema:
        """Features that are joined to events."""
        return as_of_schema(list(self.run.source.as_of.values()))

    @abstractmethod
    def create_builder(self) -> SequenceBuilder:
        """Return the builder of the parts."""

    def share_lookups(self) -> Lookups:
        """Store the ids and tables that the build of every part looks up."""
        as_of = share_as_of(self.run, self.as_of)
        return Lookups(self.run.tables.read_catalogue(), as_of=tuple(as_of))

    def create_counter(
        self, builder: Any, lookups: Lookups
    ) -> tuple[KeyCounter, Call] | None:
        """Return the counter of events and the arguments of its `read_keys`; None if nothing is counted."""
        return None

    @abstractmethod
    def describe(self, builder: Any, built: BuiltTable) -> dict[str, Any]:
        """Return the kind's entries of the manifest's `info`.

        Raises:
            UserError: if nothing can be trained on the table.
        """

    @abstractmethod
    def report(self, sequences: Manifest, seconds: float) -> None:
        """Report the table, and counts of left-out events and requests."""


def make_sequences(step: SequencesStep) -> Manifest:
    """Make the table of a step and return its manifest."""
    run = step.run
    settings, inputs = step.settings, step.inputs
    if finished := run.tables.find_finished("sequences", settings, inputs):
        return finished
    begin = time.perf_counter()
    with run.tables.clean_up_on_error("sequences"):
        builder = step.create_builder()
        built = _build_parts(step, builder)
        report_missing(run, step.as_of, step.events.rows, built.count)
        info = run.sequences_info(step.events, step.items, step.split, built.count)
        info |= step.describe(builder, built)
        if builder.own and built.training:
            own = [part.own for part in built.training]
            info["own"] = describe_features(own, builder.own)
        if step.as_of:
            info["as_of"] = as_of_info(step.as_of)
        sequences = run.tables.commit(
            "sequences",
            builder.output,
            built.parts,
            settings,
            inputs,
            info,
            build_write_s=time.perf_counter() - begin,
        )
    step.report(sequences, time.perf_counter() - begin)
    return sequences


def _build_parts(step: SequencesStep, builder: SequenceBuilder) -> BuiltTable:
    """Build and write all parts, without committing them."""
    engine, tables = step.run.engine, step.run.tables
    parts = part_uris(tables.table_uri("events"), step.events)
    lookups = step.share_lookups()
    shared = (tables.table_uri("sequences"), builder, lookups)
    if counted := step.create_counter(builder, lookups):
        counter, count_inputs = counted
        results = count_in_buckets(
            engine,
            parts,
            step.events.rows,
            counter,
            count_inputs,
            _build_and_write,
            shared,
        )
    else:
        calls = [(uri,) for uri in parts]
        results = engine.map_unordered(_build_and_write, calls, shared)
    progress = step.run.report_progress("sequences")
    return gather_parts(results, len(parts), progress)


def _build_and_write(
    sequences_uri: str,
    builder: SequenceBuilder,
    lookups: Lookups,
    uri: str,
    pieces: list[Columns] | None = None,
) -> BuiltPart:
    """Build the sequences of an events part, write them, and return their statistics."""
    events = read_part(uri, builder.columns, builder.ids)
    built = builder.build(events, lookups.fetch(), pieces)
    assert built.table is not None
    written = write_part(sequences_uri, built.table) if built.table.num_rows else None
    return replace(built, table=None, written=written)


MAX_COUNTS = ("max_length", "max_candidates", "max_spread_ms")
"""Counts of which a table has the largest of its parts, not the sum."""


def gather_parts(
    results: Iterable[tuple[int, BuiltPart]], parts: int, progress: Report
) -> BuiltTable:
    """Collect the parts that tasks have built, in the order of the events parts.

    Args:
        results: (number of the part, part) in any order.
        parts: Number of parts.
        progress: Reports a line per part.
    """
    by_number: dict[int, BuiltPart] = {}
    total: Counter[str] = Counter()
    for number, built in results:
        by_number[number] = built
        largest = {name: max(total[name], built.count[name]) for name in MAX_COUNTS}
        total.update(built.count)
        total.update({name: value - total[name] for name, value in largest.items()})
        users = pluralize(total["users"], "user")
        progress(f"part {len(by_number)} of {parts} built, {users}")
    ordered = [by_number[number] for number in sorted(by_number)]
    return BuiltTable(
        [built.written for built in ordered if built.written],
        total,
        [built.training for built in ordered if built.training],
    )
