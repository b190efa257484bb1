"""Build `queries` and `sequences` of a search log.

Behaviours are engaged results; requests are searches with results. `python -m
jobs.prepare` builds both tables if the source file has
`prepare: {kind: search, behaviour: click}`.

Shapes: E events of a part, F features.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from core.errors import UserError
from core.options import as_base, check_known
from core.schemas import (
    CARRIED,
    QUERIES,
    AsOfInfo,
    EventsInfo,
    QueriesInfo,
    SearchInfo,
    search_schema,
)
from core.settings import SearchCounts
from core.splits import MINUTE_MS
from core.tables import Table, write_frame
from pipelines.prepare.events.build_events import IdCounts, read_part
from pipelines.prepare.kinds.search.features import (
    QUERY_FEATURES,
    SHOWN_FEATURES,
    context_features,
    count_keys,
    counted_names,
    feature_groups,
    feature_names,
    never_counted,
)
from pipelines.prepare.kinds.simulation import draw_searches
from pipelines.prepare.reading.log import Log
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.builder import (
    BuiltTable,
    SequenceBuilder,
)
from pipelines.prepare.sequences.counts import Columns, KeyCounter, Lookups
from pipelines.prepare.sequences.custom_features import (
    TrainingValues,
    default_groups,
    describe_features,
    item_columns,
    plain_name,
)
from pipelines.prepare.sequences.splits import count_splits, require_training
from pipelines.prepare.settings.config import PrepareConfig

QUERIES_PER_PART = 1_000_000

IDS = ("user_id", "item_id", "request_id", "query")

COUNTS = (
    "requests_outside",
    "candidates_outside",
    "requests_truncated",
    "requests_without_query",
)
"""Counts of the log that the info of sequences has."""


@dataclass(frozen=True)
class SearchBuilder(SequenceBuilder):
    """The kind `search`: a request is a search, which asks for its results' clicks."""

    name = "search"
    info_class = SearchInfo
    uses_all_events = True
    reads_as_of_features = True
    has_counts = True
    statistics = (
        "requests_without_history",
        "queries",
        "candidates",
        "requests_one_class",
        "requests_without_query",
        "requests_outside",
        "candidates_outside",
        "requests_truncated",
        "session_rows",
        "sessions_unknown_users",
        "sessions_unknown_items",
    )
    text_tables = ("items", "queries", "pairs", "tokens")
    first_model = "qgs"
    simulated_source = "simulated_search"
    draw_log = staticmethod(draw_searches)

    @staticmethod
    def check_settings(source: Log, config: PrepareConfig) -> None:
        """Raise UserError for settings or names of features that do not fit the log."""
        if config.behaviour is None:
            raise UserError(
                f"behaviour is not set, but kind search needs one of the bool labels "
                f"{', '.join(source.info.bool_labels)}"
            )
        custom_groups = default_groups(source, config.search.item_features)
        names = feature_names(config.search, source.info.clock)
        custom_names = [plain_name(column) for column in custom_groups]
        unknown = config.search.unknown_when_ranking
        check_known(unknown, custom_names, "search.unknown_when_ranking")
        grouped = chain.from_iterable(config.search.groups.values())
        check_known(grouped, [*names, *custom_names], "search.groups")

    @property
    def labels(self) -> list[str]:
        """Bool labels of the log, with the label that makes behaviours first."""
        return sorted(
            self.source.info.bool_labels,
            key=lambda name: name != self.config.behaviour,
        )

    @property
    def columns(self) -> list[str]:
        """Columns of `events` that are read."""
        names = [name for name in self.source.schema.names if name.startswith(CARRIED)]
        return [*IDS, "timestamp_ms", "position", *names]

    @property
    def item_columns(self) -> pa.Schema:
        """Columns of the item files that models read."""
        return item_columns(self.source, self.config.search.item_features)

    @property
    def joined_schema(self) -> pa.Schema:
        """Schema of the events with the features that are joined to them."""
        return pa.schema([*super().joined_schema, *self.item_columns])

    @property
    def features(self) -> list[str]:
        """Names of the features, in the order of their columns."""
        return feature_names(self.config.search, self.source.info.clock)

    @property
    def windows(self) -> list[str]:
        """Windows of the counts; empty without clock times."""
        days = self.config.search.windows_days if self.source.info.clock else []
        return [f"{length:g}d" for length in days]

    @property
    def output(self) -> pa.Schema:
        """Schema of `sequences`."""
        has_sessions = bool(self.source.sessions)
        return search_schema(
            self.joined_schema, self.labels, len(self.features), has_sessions
        )

    def open_events(self, events: pl.DataFrame, lookups: Lookups) -> pl.DataFrame:
        """Return the events of a part, with the search of each event.

        A search is identified by user, request id and query, and has the time of its
        earliest event. If a request id has several queries, each is a search, and all
        take the time of the earliest event (`earliest` is its row, `as_of` its time,
        `spread` an event's distance to it). So no click for one query is in another
        query's history. Events without a request id are a search if they have the same
        user, time and query. `first` is the row of the earliest event of a search.

        Raises:
            UserError: if the events of a request id are far apart, by clock times.
        """
        events = super().open_events(events, lookups)
        row, at = pl.col("row"), pl.col("timestamp_ms")
        has_id = pl.col("request_id") != ""
        request = ["user", "request_id", pl.when(has_id).then(0).otherwise(at)]
        events = events.with_columns(
            earliest=row.min().over(request), as_of=at.min().over(request)
        )
        events = events.with_columns(
            first=row.min().over("earliest", "query_index"), spread=at - pl.col("as_of")
        )
        limit = self.config.search.max_request_minutes
        reused = events.filter(pl.col("spread") > limit * MINUTE_MS)
        if self.source.info.clock and reused.height:
            longest = reused.sort("spread").row(-1, named=True)
            raise UserError(
                f"request '{longest['request_id']}' of user '{longest['user_id']}' has "
                f"results {longest['spread'] / MINUTE_MS:,.1f} minutes apart, over "
                f"search.max_request_minutes {limit:g}: 'request' may be an id that is "
                f"reused"
            )
        return events

    def add_features(
        self, events: pl.DataFrame, counted: pl.DataFrame | None
    ) -> pl.DataFrame:
        """Add the column `features`, as of the time of the search."""
        has_clock_times = self.source.info.clock
        features = context_features(events, self.config.search, has_clock_times)
        if self.windows:
            names = self.features[: -features.shape[1]]
            counts = SearchCounter(self).gather(counted, events.height, names)
            features = np.hstack([counts, features])
        labels = pl.col([f"label_{name}" for name in self.labels]).fill_null(False)
        return events.with_columns(
            labels.name.prefix("is_"), pl.Series("features", features)
        )

    def form_requests(
        self, events: pl.DataFrame, behaviours: pl.DataFrame, count: Counter[str]
    ) -> pl.DataFrame:
        """Return a request per search that shows an item of the catalogue.

        Requests that are older than the oldest behaviour of a truncated user are
        dropped. Requests are sorted by (user, time, request id, query), their results
        by position.
        """
        is_truncated = behaviours.filter("is_truncated")
        oldest = is_truncated.group_by("user").agg(oldest=pl.col("known").min())
        events = events.join(oldest, on="user", how="left", maintain_order="left")
        is_old = (pl.col("as_of") < pl.col("oldest")).fill_null(False)
        is_inside = pl.col("item_index") >= 0
        searches = events.group_by("first").agg(
            is_outside=~is_inside.any(),
            is_old=is_old.first(),
        )
        is_outside = pl.col("is_outside")
        sizes = events.select(
            at_position_0=(pl.col("position") == 0).sum(),
            at_position_1=(pl.col("position") == 1).sum(),
            candidates_outside=(~is_inside).sum(),
        ).hstack(
            searches.select(
                requests_outside=is_outside.sum(),
                requests_truncated=(pl.col("is_old") & ~is_outside).sum(),
            )
        )
        count.update(sizes.row(0, named=True))

        shown = events.filter(is_inside & ~is_old)
        shown = shown.sort("earliest", "query_index", "position", maintain_order=True)
        labels = [f"label_{name}" for name in self.labels]
        requests = shown.group_by("first", maintain_order=True).agg(
            pl.first("user", "user_id", "item_id", "query_index"),
            pl.first("as_of").alias("timestamp_ms"),
            pl.col("item_index").alias("candidates"),
            pl.col("position").alias("positions"),
            pl.col([f"is_{name}" for name in labels]).name.map(lambda n: n[3:]),
            pl.col("features").arr.explode(),
            pl.col(self.custom_columns),
        )
        count["requests_without_query"] = int((requests["query_index"] < 0).sum())
        return requests

    def collect_users(
        self, requests: pl.DataFrame, behaviours: pl.DataFrame, count: Counter[str]
    ) -> pl.DataFrame:
        """Return a row per user, and count candidates and requests of one class."""
        candidates = requests.select("split", "candidates").explode("candidates")
        count_splits(count, "candidates", candidates)
        clicked = pl.col(f"label_{self.config.behaviour}").list
        is_one_class = clicked.any() == clicked.all()
        count_splits(count, "one_class", requests.filter(is_one_class))
        return super().collect_users(requests, behaviours, count)

    def training_stats(
        self, requests: pl.DataFrame, behaviours: pl.DataFrame
    ) -> TrainingValues:
        """Return the statistics of custom features over training candidates."""
        train = requests.filter(split="train")
        candidates = train.select(pl.col(self.custom_columns).explode())
        return TrainingValues.from_frame(candidates)

    def make_inputs(self, run: Run, events: Table[EventsInfo]) -> dict[str, Table]:
        """Make the tables of queries and of joined features."""
        return {
            **super().make_inputs(run, events),
            "queries": make_queries(run, events),
        }

    def read_lookups(self, run: Run, as_of: dict[str, Table[AsOfInfo]]) -> Lookups:
        """Return the ids, queries and joined tables that every part looks up."""
        lookups = super().read_lookups(run, as_of)
        items = run.read_items(*self.item_columns.names)
        frames = [
            pl.DataFrame(run.current(f"session_{name}").read()).with_columns(
                session_type=pl.lit(name)
            )
            for name in self.source.sessions
        ]
        sessions = None
        if frames:
            sessions = pl.concat(frames).join(
                items, on="item_id", how="left", maintain_order="left"
            )
        queries = read_queries(run)
        return replace(lookups, items=items, queries=queries, sessions=sessions)

    def create_counter(self, run: Run) -> KeyCounter | None:
        """Return the counter of items, pairs and queries; None without windows."""
        return SearchCounter(self) if self.windows else None

    def describe(self, run: Run, built: BuiltTable) -> dict[str, Any]:
        """Return names and groups of the features, and counts of requests."""
        config, source, count = self.config.search, self.source, built.count
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
        custom_groups = default_groups(source, config.item_features)
        declared = config.unknown_when_ranking
        unknown = [name for name in custom_groups if plain_name(name) in declared]
        return {
            "tied_targets": built.tied_targets(),
            "queries": run.current("queries").rows,
            "labels": self.labels,
            "features": self.features,
            "groups": feature_groups(config, self.features, custom_groups),
            "unknown_when_ranking": [*SHOWN_FEATURES, *unknown],
            "windows": self.windows,
            "search": as_base(config, SearchCounts),
            "page_size": config.page_size,
            "requests": requests,
            "candidates": built.per_split("candidates"),
            "requests_one_class": built.per_split("one_class"),
            "requests_without_history": built.per_split("without_history"),
            "item_features": self.item_columns.names,
            "custom": describe_features(built.training, self.custom_columns),
            **{name: count[name] for name in COUNTS},
            "sessions": [*source.sessions],
            "session_rows": count["sessions_inside"],
            "sessions_unknown_users": sum(
                run.current(f"session_{name}").rows for name in source.sessions
            )
            - count["session_rows"],
            "sessions_unknown_items": count["session_rows"] - count["sessions_inside"],
        }


@dataclass(frozen=True)
class SearchCounter(KeyCounter):
    """Counts items and pairs by the key `item`, and queries by the key `query`."""

    builder: SearchBuilder
    as_of_ms: int | None = None
    """Time in ms as of which all earlier events are counted; None: the time of their
    request."""

    @property
    def names(self) -> list[list[str]]:
        """Names of the features of each kind of key."""
        names = counted_names(self.builder.config.search)
        return [[*names["pair"], *names["item"], *QUERY_FEATURES], names["query"]]

    @property
    def never(self) -> dict[str, float]:
        """Features of a key without events, by name."""
        return never_counted(self.builder.config.search)

    def read_keys(
        self, uri: str, lookups: Lookups
    ) -> tuple[list[np.ndarray], pl.DataFrame]:
        """Read the items, queries, times and labels of a part's events."""
        builder = self.builder
        click = f"label_{builder.config.behaviour}"
        known = click.replace("label_", "known_", 1)
        names = [*IDS, "timestamp_ms", click, known]
        names = [name for name in names if name in builder.source.schema.names]
        events = builder.open_events(read_part(uri, names), lookups)
        columns = events.select(
            pl.col("item_index").alias("item"),
            pl.col("query_index").alias("query"),
            pl.col("timestamp_ms").alias("time"),
            "known",
            "as_of",
            click=pl.col(click).fill_null(False),
            is_search=pl.col("first") == pl.col("row"),
        )
        keys = [columns[name].to_numpy() for name in ("item", "query")]
        if self.as_of_ms is not None:
            is_before = columns["time"].to_numpy() < self.as_of_ms
            keys = [np.where(is_before, key, -1) for key in keys]
            columns = columns.with_columns(as_of=pl.lit(self.as_of_ms, pl.Int64))
        return keys, columns

    def compute(self, kind_index: int, rows: Columns) -> np.ndarray:
        """Return the features (E, F) of items and pairs, or of queries."""
        return count_keys(kind_index, rows, self.builder.config.search)


def read_queries(run: Run) -> pl.DataFrame:
    """Return the queries and their indices."""
    queries = run.current("queries")
    return pl.DataFrame(queries.read() if queries.files else QUERIES.empty_table())


def make_queries(run: Run, events: Table) -> Table:
    """Make the table of distinct queries, sorted, unless it is up to date."""
    inputs = {"events": events.hash}
    if finished := run.find_finished(QueriesInfo, {}, inputs):
        return finished
    started = time.perf_counter()
    uri = run.table_uri("queries")
    calls = [(part,) for part in events.part_uris()]
    distinct = IdCounts()
    for _, part_queries in run.executor.map_unordered(_read_queries, calls):
        distinct.add(part_queries)
    queries = distinct.sort().select(query="id").with_row_index("query_index")
    parts = [
        write_frame(uri, rows, QUERIES)
        for rows in queries.iter_slices(QUERIES_PER_PART)
    ]
    committed = run.commit("queries", QUERIES, parts, {}, inputs, QueriesInfo())
    seconds = time.perf_counter() - started
    run.report(f"queries: {len(queries):,} distinct in {seconds:.1f} s")
    return committed


def _read_queries(uri: str) -> pl.DataFrame:
    """Return the distinct queries of an events part as rows for `IdCounts`."""
    queries = read_part(uri, ["query"]).drop_nulls().unique()
    return queries.select(id="query", count=pl.lit(0, pl.Int64))
