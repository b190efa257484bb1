"""Sequences of a retrieval log: every behaviour is the target of a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from core.schemas import RetrievalInfo, sequences_schema
from core.splits import SPLITS
from pipelines.prepare.kinds.simulation import draw_interactions
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.builder import BuiltTable, SequenceBuilder
from pipelines.prepare.sequences.splits import require_training


@dataclass(frozen=True)
class RetrievalBuilder(SequenceBuilder):
    """The kind `retrieval`: a request asks for the next item of the catalogue."""

    name = "retrieval"
    info_class = RetrievalInfo
    allows_repeats = True
    statistics = ("requests_without_history",)
    first_model = "tiger"
    simulated_source = "simulated"
    draw_log = staticmethod(draw_interactions)

    @property
    def columns(self) -> list[str]:
        """Columns of `events` that are read: no request ids, positions and texts."""
        names = [
            name
            for name in self.source.schema.names
            if not name.startswith(("request_id", "position", "text_"))
        ]
        return [*names, "request_id"] if self.config.baskets == "request" else names

    @property
    def output(self) -> pa.Schema:
        """Schema of `sequences`."""
        return sequences_schema(self.source.schema)

    @property
    def is_behaviour(self) -> pl.Expr:
        """Whether an event is a behaviour of a user with `core` or more of them."""
        is_behaviour = is_counted = super().is_behaviour
        if self.config.core <= 1 and self.config.core_window == "all":
            return is_behaviour
        if self.config.core_window == "train":
            is_counted = is_counted & (pl.col("known") < self.split.val_start_ms)
        num_counted = is_counted.sum().over("user")
        return is_behaviour & (num_counted >= max(self.config.core, 1))

    def form_requests(
        self, events: pl.DataFrame, behaviours: pl.DataFrame, count: Counter[str]
    ) -> pl.DataFrame:
        """Return a request of each behaviour or basket, in the order of their times.

        A basket has the time of its earliest behaviour. One that crosses a cut of the
        split is two requests, so that training has no target of a later window.
        """
        columns = ["row", "user", "user_id", "item_id", "timestamp_ms", "query"]
        if not self.config.baskets:
            requests = behaviours.select(
                *columns, candidates=pl.concat_list("item_index")
            ).sort("row")
            is_tied = (pl.col("user").diff() == 0) & (
                pl.col("timestamp_ms").diff() == 0
            )
            is_shared = (is_tied | is_tied.shift(-1)).fill_null(False)
            count["shared_times"] = requests.select(is_shared.sum()).item()
            return requests
        by_time = self.config.baskets == "equal_times"
        key = "timestamp_ms" if by_time else "request_id"
        cuts = (self.split.val_start_ms, self.split.test_start_ms)
        window = pl.sum_horizontal(pl.col("timestamp_ms") >= cut for cut in cuts)
        baskets = (
            behaviours.sort("row")
            .group_by("user", key, window.alias("window"), maintain_order=True)
            .agg(
                pl.first(*(name for name in columns if name not in ("user", key))),
                candidates=pl.col("item_index").unique(maintain_order=True),
            )
        )
        return baskets.sort("row")

    def join_history(
        self, requests: pl.DataFrame, behaviours: pl.DataFrame
    ) -> pl.DataFrame:
        """Add `history_end`; with `ties: log_order`, ties earlier in the log count."""
        if self.config.ties == "strict":
            return super().join_history(requests, behaviours)
        index = pl.int_range(pl.len(), dtype=pl.Int32).over("user")
        return requests.with_columns(history_end=index)

    def describe(self, run: Run, built: BuiltTable) -> dict[str, Any]:
        """Return the counts of requests, and of requests without a history."""
        requests = built.per_split("requests")
        without_history = built.per_split("without_history")
        usable = {name: requests[name] - without_history[name] for name in SPLITS}
        require_training(usable, "request with a history")
        skipped = [f"{count:,} {name}" for name, count in without_history.items()]
        run.report(
            f"requests without history: {', '.join(skipped)}; skipped in training and "
            f"evaluation"
        )
        shared, total = built.count["shared_times"], built.count["interactions"]
        if self.config.baskets:
            run.report(f"baskets: {sum(requests.values()):,} requests")
        elif shared and self.source.info.clock and self.config.ties == "strict":
            run.report(
                f"note: {shared:,} of {total:,} behaviours share user and time; "
                f"baskets: equal_times makes them one request"
            )
        return {
            "baskets": self.config.baskets,
            "tied_targets": built.tied_targets(),
            "requests": requests,
            "requests_without_history": without_history,
        }
