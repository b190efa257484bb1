"""Search: a request is a search with the results that it showed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from models.storage.tables import Manifest
from pipelines.data.audit.base import Rule, Tables
from pipelines.data.kind import Kind
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import Log
from pipelines.data.run import Run
from pipelines.data.search.audit import check_search_tables
from pipelines.data.search.config import SearchConfig, check_search
from pipelines.data.search.counts_as_of import make_counts
from pipelines.data.search.features import feature_names
from pipelines.data.search.groups import feature_groups, unknown_features
from pipelines.data.search.sequences import make_search
from pipelines.data.search.simulator import SearchSettings, best_gauc, simulate_search
from pipelines.data.sequences.own_features import usual_groups
from pipelines.data.sequences.splits import NAMES


class Search(Kind):
    """Which of these results will be clicked?"""

    name = "search"
    config = SearchConfig
    all_shown = True
    as_of = True
    counted = True
    statistics = (
        "queries",
        "candidates",
        "requests_one_class",
        "requests_without_query",
        "requests_outside",
        "requests_spread",
        "max_request_spread_ms",
        "candidates_outside",
    )
    texts = ("items", "queries", "pairs", "tokens")
    model = "qgs"
    without = ("tasks",)
    simulated = "search"
    source = "simulated_search"
    settings = SearchSettings

    def check(self, source: Log, config: PrepareConfig) -> None:
        """Also: features of items and groups that the source file names are those of the log."""
        check_search(source, config)
        own = usual_groups(source, config.own.item_features)
        unknown_features(config.own, own)
        if config.own.groups:
            feature_groups(
                config.own, feature_names(config.own, source.info["clock"]), own
            )

    def sequences(
        self, run: Run, events: Manifest, items: Manifest, split: dict[str, Any]
    ) -> Manifest:
        return make_search(run, events, items, split)

    def counts(self, run: Run, events: Manifest, items: Manifest, moment: int) -> None:
        make_counts(run, events, items, moment)

    def audit(
        self, tables: Tables, rules: dict[str, Rule], core_users: pl.DataFrame
    ) -> pl.DataFrame:
        return check_search_tables(tables, rules)

    def notices(self, events: Manifest, info: dict[str, Any]) -> Iterator[str]:
        """A line for each split that no model can be compared on."""
        for name in NAMES:
            if (
                info["requests"][name]
                and info["requests_one_class"][name] == info["requests"][name]
            ):
                yield (
                    f"all {info['requests'][name]:,} {name} requests have one class only, all results or none with "
                    f"'{info['behaviour']}', so there is no GAUC; check the labels, and that results without it are in "
                    f"the log"
                )

    def simulate(self, output: str, settings: SearchSettings) -> Iterator[str]:
        world, log = simulate_search(output, settings)
        for searches, latest in (
            ("all searches", 1.0),
            ("the latest tenth, which models are tested on", 0.1),
        ):
            best = ", ".join(
                f"{name} {value:.4f}"
                for name, value in best_gauc(world, log, latest).items()
            )
            yield f"GAUC of clicks at best over {searches}, by {best}"
