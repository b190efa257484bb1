"""Queries and sequences of a search log: engaged results, and searches with results.

`python -m jobs.prepare` makes them if the source file has
`prepare: {kind: search, behaviour: click}`.

Shapes: E events of a part, R requests (searches), C candidates of all requests,
F features.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import UserError, pluralize
from core.ragged import run_starts
from core.schemas import CARRIED, QUERIES, QueriesInfo, SearchInfo, search_schema
from core.tables import Table, write_part
from pipelines.prepare.events.columns import (
    bool_column,
    dictionary_column,
    read_part,
    sorted_unique,
)
from pipelines.prepare.events.event_stats import IdCounts
from pipelines.prepare.executor import Call
from pipelines.prepare.kinds.search.config import SearchConfig, bool_labels
from pipelines.prepare.kinds.search.features import (
    IDS,
    SearchCounter,
    feature_groups,
    feature_names,
    features,
    features_unknown_when_ranking,
)
from pipelines.prepare.kinds.search.requests import find_requests
from pipelines.prepare.reading.durations import MINUTE_MS
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.as_of import (
    share_items,
)
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
    to_vectors,
)
from pipelines.prepare.sequences.counts import Columns, KeyCounter, gather_counts
from pipelines.prepare.sequences.custom_features import (
    TrainingValues,
    default_groups,
    item_columns,
)
from pipelines.prepare.sequences.splits import (
    SPLITS,
    require_training,
    tied_targets,
)

QUERIES_PER_PART = 1_000_000


@dataclass(frozen=True)
class SearchBuilder(SequenceBuilder):
    """Builds the sequences of a search log from its events."""

    labels: list[str]
    """Bool labels of the log; the first makes a result a behaviour."""
    has_clock_times: bool
    """Whether times are clock times; without them there are no windowed counts, and no
    features of hour and weekday."""
    search: SearchConfig
    """Settings of the features."""

    ids = IDS

    @property
    def behaviour_label(self) -> str:
        """Label that makes a result a behaviour."""
        return self.labels[0]

    @property
    def columns(self) -> list[str]:
        """Columns of `events` that are read."""
        names = [name for name in self.schema.names if name.startswith(CARRIED)]
        return [*IDS, "timestamp_ms", "position", *names]

    @cached_property
    def features(self) -> list[str]:
        """Names of the features, in the order of their columns."""
        return feature_names(self.search, self.has_clock_times)

    @property
    def is_windowed(self) -> bool:
        """Whether the features have windowed counts."""
        return self.has_clock_times and bool(self.search.windows_ms)

    @cached_property
    def output(self) -> pa.Schema:
        """Schema of `sequences`."""
        return search_schema(self.joined_schema, self.labels, len(self.features))

    def form_requests(
        self,
        part: EventsPart,
        behaviours: Behaviours,
        count: Counter[str],
    ) -> Requests:
        """Form one request per search that shows an item of the catalogue.

        Requests that are older than the oldest behaviour of a truncated user are
        dropped.
        """
        query = part.query
        position = part.table["position"].to_numpy()
        searches = find_requests(part.table, query, self.search, self.has_clock_times)
        in_catalogue = part.item >= 0
        request_time = part.time[searches.earliest]  # (E,)
        is_too_old = request_time < behaviours.oldest[part.user]
        order, begins_request = searches.sort(query, position)
        request = np.cumsum(begins_request) - 1  # (E,) request of each sorted event
        is_candidate = (in_catalogue & ~is_too_old)[order]
        candidate = order[is_candidate]
        start = run_starts(request[is_candidate])
        # the event of a request is its earliest, even if that is outside the catalogue
        row = searches.first[candidate[start]]

        num_in_catalogue = np.bincount(request, weights=in_catalogue[order])
        is_truncated = is_too_old[order][begins_request] & (num_in_catalogue > 0)
        count["at_position_0"] = int((position == 0).sum())
        count["at_position_1"] = int((position == 1).sum())
        count["requests_outside"] = int((num_in_catalogue == 0).sum())
        count["candidates_outside"] = int((~in_catalogue).sum())
        count["requests_truncated"] = int(is_truncated.sum())
        count["requests_without_query"] = int((query[row] < 0).sum())
        spread = searches.spread(part.time)
        count["requests_spread"] = len(sorted_unique(searches.first[spread > 0]))
        count["max_spread_ms"] = int(spread.max())
        return Requests(row, request_time[row], candidate, start, request_time)

    def compute_features(
        self,
        part: EventsPart,
        requests: Requests,
        pieces: list[Columns] | None,
    ) -> np.ndarray:
        """Return the features (E, F) float32 of events, as of their request."""
        counts = None
        if pieces is not None:
            counter = SearchCounter(self.search, self.behaviour_label)
            counts = gather_counts(counter, len(part.time), pieces)
        position = part.table["position"].to_numpy()
        return features(
            counts, position, requests.as_of, self.search, self.has_clock_times
        )

    def behaviour_columns(self, draft: PartDraft) -> dict[str, pa.Array]:
        """Return the items, queries and features of the behaviours (N,)."""
        vectors = to_vectors(draft.features[draft.row], pa.float32())
        query = draft.part.query[draft.row]
        columns = super().behaviour_columns(draft)
        return columns | {"query_index": pa.array(query), "features": vectors}

    def user_columns(
        self, draft: PartDraft, count: Counter[str]
    ) -> dict[str, pa.Array]:
        """Return the column `requests`, with the shown results of each request."""
        table, query = draft.part.table, draft.part.query[draft.requests.row]
        labels = {
            f"label_{name}": bool_column(table, f"label_{name}") for name in self.labels
        }
        _count_candidates(draft, labels[f"label_{self.behaviour_label}"], count)
        per_candidate = {
            "positions": table["position"].to_numpy(),
            "features": draft.features,
            **labels,
        }
        per_request = {"query_index": pa.array(query)}
        column = self.request_column(draft, count, per_request, per_candidate)
        return {"requests": column}

    def training_stats(self, draft: PartDraft, table: pa.Table) -> TrainingStats:
        """Return the statistics of custom features over training candidates."""
        requests = table["requests"].combine_chunks().flatten()
        is_train = pc.equal(pc.struct_field(requests, "split"), "train")
        train = requests.filter(is_train)
        columns = {
            name: pc.struct_field(train, name).flatten() for name in self.custom_columns
        }
        return TrainingStats(TrainingValues.from_columns(columns))


def _count_candidates(
    draft: PartDraft, is_clicked: np.ndarray, count: Counter[str]
) -> None:
    """Count candidates, and requests with all or no clicks, for each split."""
    requests = draft.requests
    num_candidates = requests.lengths  # (R,)
    clicks = is_clicked[requests.candidate].astype(np.int64)  # (C,)
    num_clicks = np.add.reduceat(clicks, requests.start)  # (R,)
    is_one_class = (num_clicks == 0) | (num_clicks == num_candidates)
    count["max_candidates"] = int(num_candidates.max())
    for code, name in enumerate(SPLITS):
        in_split = draft.split == code
        count[f"candidates_{name}"] = int(num_candidates[in_split].sum())
        count[f"one_class_{name}"] = int(is_one_class[in_split].sum())


@dataclass(frozen=True)
class SearchStep(SequencesStep):
    """The step of prepare that makes the sequences of a search log."""

    info_class = SearchInfo

    queries: Table[QueriesInfo]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the table depends on, including the settings of features."""
        config = self.run.config
        return super().settings | {
            "behaviour": config.behaviour,
            "search": asdict(config.kind_config),
        }

    @property
    def inputs(self) -> dict[str, str]:
        """Hashes of the input tables, including `queries`."""
        return super().inputs | {"queries": self.queries.hash}

    @property
    def joined_schema(self) -> pa.Schema:
        """Schema of the features that are joined to each event as of its time."""
        return pa.schema([*super().joined_schema, *self._item_columns])

    @property
    def _item_columns(self) -> pa.Schema:
        """Columns of the item files that models read."""
        return item_columns(self.run.source, self.run.config.kind_config.item_features)

    def create_builder(self) -> SearchBuilder:
        """Return the builder of the parts."""
        run = self.run
        return SearchBuilder(
            schema=run.source.schema,
            split=self.split,
            max_events=run.config.max_events,
            joined=self.joined_schema,
            labels=bool_labels(run.source, run.config.behaviour),
            has_clock_times=self.events.info.log.clock,
            search=run.config.kind_config,
        )

    def share_lookups(self) -> Lookups:
        """Store the ids, queries and joined tables that every part looks up."""
        lookups = super().share_lookups()
        items = share_items(self.run, self._item_columns.names)
        queries = self.run.tables.read_vocabulary("queries", "query")
        return replace(lookups, queries=queries, as_of=(*lookups.as_of, *items))

    def create_counter(
        self, builder: SearchBuilder, lookups: Lookups
    ) -> tuple[KeyCounter, Call] | None:
        """Return the counter of items, pairs and queries; None without windows."""
        if not builder.is_windowed:
            return None
        click = builder.behaviour_label
        is_late = f"known_{click}" in builder.schema.names
        counter = SearchCounter(builder.search, click, is_late)
        return counter, (lookups.catalogue, lookups.queries)

    def describe(self, builder: SearchBuilder, built: BuiltTable) -> dict[str, Any]:
        """Return names and groups of the features, and counts of requests."""
        config, source = self.run.config, self.run.source
        count = built.count
        if not built.parts:
            raise UserError(
                f"none of the {count['requests_outside']:,} requests shows an item of "
                f"the catalogue"
            )
        column = source.position
        if column and count["at_position_1"] and not count["at_position_0"]:
            raise UserError(
                f"position: '{column}' begins at 1, but positions count from 0, such "
                f"as cast({column} as bigint) - 1"
            )
        requests = built.per_split("requests")
        require_training(requests, "request")
        windows = config.kind_config.windows_days if builder.is_windowed else []
        custom_groups = default_groups(source, config.kind_config.item_features)
        return {
            "tied_targets": tied_targets(count),
            "queries": self.queries.rows,
            "labels": builder.labels,
            "features": builder.features,
            "groups": feature_groups(
                config.kind_config, builder.features, custom_groups
            ),
            "unknown_when_ranking": features_unknown_when_ranking(
                config.kind_config, custom_groups
            ),
            "windows": [f"{days:g}d" for days in windows],
            "search": asdict(config.kind_config),
            "max_candidates": count["max_candidates"],
            "requests": requests,
            "candidates": built.per_split("candidates"),
            "requests_one_class": built.per_split("one_class"),
            "requests_without_history": built.per_split("without_history"),
            "requests_outside": count["requests_outside"],
            "candidates_outside": count["candidates_outside"],
            "requests_truncated": count["requests_truncated"],
            "requests_without_query": count["requests_without_query"],
            "requests_spread": count["requests_spread"],
            "max_request_spread_ms": count["max_spread_ms"],
            "item_features": self._item_columns.names,
        }

    def report(self, sequences: Table[Any], seconds: float) -> None:
        """Report the sizes of the table, and counts of dropped or unusual requests."""
        info, report = sequences.info, self.run.report
        requests = sum(info.requests.values())
        candidates = sum(info.candidates.values())
        one_class = sum(info.requests_one_class.values())
        num_features = len(info.features) + len(info.custom.names)
        report(
            f"sequences: {sequences.rows:,} users, {requests:,} requests with "
            f"{candidates:,} candidates and {num_features} features in {seconds:.1f} "
            f"s; dropped: {pluralize(info.requests_outside, 'request')} and "
            f"{pluralize(info.candidates_outside, 'candidate')} outside the "
            f"catalogue, {pluralize(info.requests_truncated, 'request')} older than "
            f"the user's behaviours; {one_class:,} requests have one class only"
        )
        if info.requests_without_query:
            report(
                f"note: {info.requests_without_query:,} of {requests:,} requests "
                f"have no query"
            )
        if info.requests_spread:
            spread = info.max_request_spread_ms
            span = f"{spread:,} positions in the log"
            if info.log.clock:
                span = f"{spread / MINUTE_MS:,.2f} minutes"
            report(
                f"note: the results of {info.requests_spread:,} requests have "
                f"different times, up to {span} apart; a request's time is that of its "
                f"earliest result"
            )


def make_queries(run: Run, events: Table) -> Table:
    """Make the table of distinct queries, sorted, unless it is up to date."""
    inputs = {"events": events.hash}
    if finished := run.tables.find_finished(QueriesInfo, {}, inputs):
        return finished
    started = time.perf_counter()
    uri = run.tables.table_uri("queries")
    with run.tables.clean_up_on_error("queries"):
        calls = [(part,) for part in events.part_uris()]
        distinct = IdCounts()
        for _, part_queries in run.executor.map_unordered(_read_queries, calls):
            distinct.add(part_queries)
        queries = distinct.sort().select(query="id").with_row_index("query_index")
        parts = [
            write_part(uri, rows.to_arrow().cast(QUERIES))
            for rows in queries.iter_slices(QUERIES_PER_PART)
        ]
        committed = run.tables.commit(
            "queries", QUERIES, parts, {}, inputs, QueriesInfo()
        )
    seconds = time.perf_counter() - started
    run.report(f"queries: {len(queries):,} distinct in {seconds:.1f} s")
    return committed


def _read_queries(uri: str) -> pl.DataFrame:
    """Return the distinct queries of an events part as rows for `IdCounts`."""
    table = read_part(uri, ["query"], ("query",))
    queries = dictionary_column(table, "query").dictionary.cast(pa.large_string())
    return pl.select(id=pl.Series(queries), count=pl.lit(0, pl.Int64))
