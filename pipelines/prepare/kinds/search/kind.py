"""The kind `search`: a request is a search with its results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.errors import UserError
from core.schemas import Split
from core.tables import Table
from pipelines.prepare.kinds.kind import Kind
from pipelines.prepare.kinds.search.counts_as_of import make_counts
from pipelines.prepare.kinds.search.features import check_feature_names, feature_names
from pipelines.prepare.kinds.search.sequences import SearchStep, make_queries
from pipelines.prepare.kinds.simulation import Settings, SimulatedLog, draw_searches
from pipelines.prepare.prepare_config import PrepareConfig
from pipelines.prepare.reading.log import Log
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.as_of import make_as_of_tables
from pipelines.prepare.sequences.builder import make_sequences
from pipelines.prepare.sequences.custom_features import default_groups
from pipelines.prepare.sequences.splits import SPLITS


class Search(Kind):
    """The kind of request that asks which results of a search will be clicked."""

    name = "search"
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
        "requests_spread",
        "max_request_spread_ms",
        "candidates_outside",
    )
    text_tables = ("items", "queries", "pairs", "tokens")
    first_model = "qgs"
    simulated_source = "simulated_search"

    def check_settings(self, source: Log, config: PrepareConfig) -> None:
        """Raise UserError for settings or names of features that do not fit the log."""
        if config.behaviour is None:
            raise UserError(
                f"behaviour is not set, but kind search needs one of the bool labels "
                f"{', '.join(source.info.bool_labels)}"
            )
        custom_groups = default_groups(source, config.kind_config.item_features)
        names = feature_names(config.kind_config, source.info.clock)
        check_feature_names(config.kind_config, names, custom_groups)

    def make_sequences(
        self, run: Run, events: Table, items: Table, split: Split
    ) -> Table:
        """Make `queries`, the tables of joined features, and `sequences`."""
        queries, as_of = make_queries(run, events), make_as_of_tables(run)
        return make_sequences(SearchStep(run, events, items, split, as_of, queries))

    def make_counts(self, run: Run, events: Table, items: Table, as_of_ms: int) -> None:
        """Make the table of counts of items, queries and pairs as of a time in ms."""
        make_counts(run, events, items, as_of_ms)

    def warn(self, info: Any) -> Iterator[str]:
        """Yield a line for each split whose requests have one class only."""
        for name in SPLITS:
            requests = info.requests[name]
            if requests and info.requests_one_class[name] == requests:
                yield (
                    f"all {requests:,} {name} requests have one class only, so there "
                    f"is no GAUC"
                )

    def draw_log(self, settings: Settings) -> SimulatedLog:
        """Draw searches with clicks, purchases and dwell time."""
        return draw_searches(settings)
