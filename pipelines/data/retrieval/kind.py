"""Retrieval: each behaviour is a request for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from models.storage.tables import Manifest
from pipelines.data.audit import sequences as shared
from pipelines.data.audit.base import Rule, Tables
from pipelines.data.kind import Kind
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.durations import DAY_MS
from pipelines.data.reading.log import Log
from pipelines.data.retrieval.sequences import make_retrieval
from pipelines.data.retrieval.simulator import simulate_retrieval
from pipelines.data.run import Run
from pipelines.data.simulation import Settings

TIED = 0.1
"""Share of requests that ties leave without a history, above which it is said."""
WITHOUT_HISTORY = 0.5
"""Share of training requests without a history, whatever the reason, above which it is said."""


class Retrieval(Kind):
    """Which item comes next?"""

    name = "retrieval"
    needs_history = True
    repeats = True
    model = "tiger"
    without = ("tasks", "queries", "features", "windows")
    simulated = "retrieval"
    source = "simulated"

    def check(self, source: Log, config: PrepareConfig) -> None:
        """Any settings will do."""

    def sequences(
        self, run: Run, events: Manifest, items: Manifest, split: dict[str, Any]
    ) -> Manifest:
        return make_retrieval(run, events, items, split)

    def audit(
        self, tables: Tables, rules: dict[str, Rule], core_users: pl.DataFrame
    ) -> pl.DataFrame:
        every = shared.request_rows(tables.sequences)
        in_split = shared.check_splits(tables, every, rules["splits"])
        users = shared.check_lengths(tables.sequences, rules["behaviours"])
        requests = every.join(users.select("row"), on="row", how="semi")
        behaviours = shared.behaviour_rows(users)
        expected = shared.expected_behaviours(tables, tables.users_events)
        shared.check_behaviours(users, behaviours, expected, rules["behaviours"])
        if tables.known != "timestamp_ms":  # requests are in the order of their times
            place = pl.int_range(pl.len(), dtype=pl.Int32).over("row")
            behaviours = expected.sort("row", *tables.event_order).with_columns(
                place=place
            )
        shared.check_history(
            tables, behaviours, requests, rules["history"], tables.order_of_log
        )
        asked = behaviours.with_columns(candidates=pl.concat_list("item_index"))
        shared.compare(
            requests,
            asked,
            ["timestamp_ms", "query", "candidates"],
            "request",
            rules["targets"],
        )
        inside = tables.behaviours_of(tables.users_events).join(
            tables.catalogue, on="item_id", how="semi"
        )
        over = (
            inside.group_by("row").len()["len"].cast(pl.Int64)
            - tables.info["max_events"]
        )
        lost = {
            "truncated_users": int((over > 0).sum()),
            "truncated_events": int(over.clip(0).sum()),
        }
        shared.check_counts(tables, {**lost, "requests": in_split}, rules["counts"])
        return core_users

    def simulate(self, output: str, settings: Settings) -> Iterator[str]:
        simulate_retrieval(output, settings)
        yield from ()

    def notices(self, events: Manifest, info: dict[str, Any]) -> Iterator[str]:
        """A line where many training requests have no history."""
        requests, without = info["requests"], info["requests_without_history"]
        train, bare = requests["train"], without["train"]
        first = (
            sum(without.values()) - info["users"]
        )  # each user's first behaviour has none, whatever the ties
        said = f"{bare:,} of {train:,} training requests ({bare / max(train, 1):.0%}) have no history and train nothing"
        if info["ties"] == "strict" and first > TIED * sum(requests.values()):
            days = events.info["clock"] and events.info.get("grain_ms") == DAY_MS
            yield (
                f"{said}: {'all times are days' if days else 'many share their time'}, and ties are in no history; "
                f"--ties log_order lets each behaviour see those before it in the log"
            )
        elif bare > WITHOUT_HISTORY * train:
            yield f"{said}: most users have one behaviour; a longer log, or a higher --core, leaves those with more"
