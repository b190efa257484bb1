"""The kind `retrieval`: each behaviour is a request for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from models.storage.tables import Manifest
from pipelines.data.audit.base import Rule, Tables
from pipelines.data.kind import Kind
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.durations import DAY_MS
from pipelines.data.reading.log import Log
from pipelines.data.retrieval.audit import check_retrieval_tables
from pipelines.data.retrieval.sequences import RetrievalStep
from pipelines.data.retrieval.simulator import simulate_retrieval
from pipelines.data.run import Run
from pipelines.data.sequences.builder import make_sequences
from pipelines.data.simulation import Settings

MAX_TIED = 0.1
"""Share of requests that ties leave without a history, above which there is a
warning."""

MAX_WITHOUT_HISTORY = 0.5
"""Share of training requests without a history, whatever the reason, above which there
is a warning."""


class Retrieval(Kind):
    """The kind of request that asks for the next item of the catalogue."""

    name = "retrieval"
    needs_history = True
    repeats = True
    model = "tiger"
    without = ("tasks", "queries", "features", "windows")
    simulated = "retrieval"
    source = "simulated"

    def check(self, source: Log, config: PrepareConfig) -> None:
        """Accept all settings."""

    def sequences(
        self, run: Run, events: Manifest, items: Manifest, split: dict[str, Any]
    ) -> Manifest:
        return make_sequences(RetrievalStep(run, events, items, split, as_of={}))

    def audit(
        self, tables: Tables, rules: dict[str, Rule], core_users: pl.DataFrame
    ) -> pl.DataFrame:
        check_retrieval_tables(tables, rules)
        return core_users

    def simulate(self, output: str, settings: Settings) -> Iterator[str]:
        simulate_retrieval(output, settings)
        yield from ()

    def notices(self, events: Manifest, info: dict[str, Any]) -> Iterator[str]:
        """Yield a line if many training requests have no history."""
        requests, without = info["requests"], info["requests_without_history"]
        train, bare = requests["train"], without["train"]
        # Each user's first behaviour has no history, whatever the ties.
        by_ties = sum(without.values()) - info["users"]
        line = f"{bare:,} of {train:,} training requests ({bare / max(train, 1):.0%}) have no history and train nothing"
        if info["ties"] == "strict" and by_ties > MAX_TIED * sum(requests.values()):
            cause = "many share their time"
            if events.info["clock"] and events.info.get("grain_ms") == DAY_MS:
                cause = "all times are days"
            yield (
                f"{line}: {cause}, and ties are in no history; "
                f"--ties log_order lets each behaviour see those before it in the log"
            )
        elif bare > MAX_WITHOUT_HISTORY * train:
            yield f"{line}: most users have one behaviour; a longer log, or a higher --core, leaves those with more"
