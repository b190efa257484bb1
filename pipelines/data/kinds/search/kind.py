"""The row of search: a request is a search with the results that it showed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.tables import Manifest
from pipelines.data.audit.base import KindRules
from pipelines.data.kinds.base import RequestKind, Simulator
from pipelines.data.kinds.search.audit import COLUMNS, WITHOUT, check_search_tables
from pipelines.data.kinds.search.config import SearchConfig, check_search
from pipelines.data.kinds.search.flow import FLOW
from pipelines.data.kinds.search.groups import feature_groups, unknown_features
from pipelines.data.kinds.search.notices import classes
from pipelines.data.kinds.search.simulator import SearchSettings, best_gauc, simulate_search
from pipelines.data.log import Log
from pipelines.data.own_features import usual_groups
from pipelines.data.prepare_config import PrepareConfig

if TYPE_CHECKING:
    from pipelines.data.run import Run


def check(source: Log, config: PrepareConfig) -> None:
    """As `check_search`; and features of items and groups that the source file names are those of the log."""
    check_search(source, config)
    own = usual_groups(source, config.own.item_features)
    unknown_features(config.own, own)
    if config.own.groups:
        from pipelines.data.kinds.search.features import feature_names  # it imports Ray

        feature_groups(config.own, feature_names(config.own, source.info["clock"]), own)


def sequences(run: Run, events: Manifest, items: Manifest, split: dict[str, Any]) -> Manifest:
    """As `make_search`."""
    from pipelines.data.kinds.search.sequences import make_search  # it imports Ray, so only now

    return make_search(run, events, items, split)


def counts(run: Run, events: Manifest, items: Manifest, moment: int) -> None:
    """As `make_counts`."""
    from pipelines.data.kinds.search.counts_as_of import make_counts  # it imports Ray, so only now

    make_counts(run, events, items, moment)


def reachable(causes: Any) -> list[str]:
    """Of what `simulate_search` returns."""
    world, log = causes
    lines = []
    for searches, latest in (("all searches", 1.0), ("the latest tenth, which models are tested on", 0.1)):
        best = ", ".join(f"{name} {value:.4f}" for name, value in best_gauc(world, log, latest).items())
        lines.append(f"GAUC of clicks at best over {searches}, by {best}")
    return lines


SEARCH = RequestKind(
    name="search",
    config=SearchConfig,
    check=check,
    sequences=sequences,
    audit=KindRules(COLUMNS, check_search_tables, WITHOUT, all_shown=True),
    simulator=Simulator(
        "search",
        "simulated_search",
        SearchSettings,
        simulate_search,
        unit="searches",
        described=SearchSettings.described,
        reachable=reachable,
    ),
    flow=FLOW,
    notices=classes,
    statistics=(
        "queries",
        "candidates",
        "requests_one_class",
        "requests_without_query",
        "requests_outside",
        "requests_spread",
        "max_request_spread_ms",
        "candidates_outside",
    ),
    all_shown=True,
    texts=("items", "queries", "pairs", "tokens"),
    as_of=True,
    counts=counts,
)
