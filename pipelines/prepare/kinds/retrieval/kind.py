"""The kind `retrieval`: a request asks for the next item, which is its target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelines.prepare.kinds.kind import Kind
from pipelines.prepare.kinds.retrieval.sequences import RetrievalStep
from pipelines.prepare.kinds.simulation import Settings, SimulatedLog, draw_interactions
from pipelines.prepare.prepare_config import PrepareConfig
from pipelines.prepare.reading.log import Log

MAX_WITHOUT_HISTORY = 0.5
"""Share of training requests without a history, for any reason, that causes a
notice."""


class Retrieval(Kind):
    """The kind of request that asks for the next item of the catalogue."""

    name = "retrieval"
    step_class = RetrievalStep
    needs_history = True
    allows_repeats = True
    statistics = ("requests_without_history",)
    first_model = "tiger"
    simulated_source = "simulated"

    def check_settings(self, source: Log, config: PrepareConfig) -> None:
        """Accept all settings."""

    def draw_log(self, settings: Settings) -> SimulatedLog:
        """Draw a log in which items follow from the user's last item and clusters."""
        return draw_interactions(settings)

    def warn(self, info: Any) -> Iterator[str]:
        """Yield a line if many training requests have no history."""
        num_train = info.requests["train"]
        num_skipped = info.requests_without_history["train"]
        if num_skipped > MAX_WITHOUT_HISTORY * num_train:
            yield (
                f"{num_skipped:,} of {num_train:,} training requests have no history "
                f"and are skipped in training (ties is {info.ties})"
            )
