"""The kind `actions`: a request is an impression whose actions are predicted."""

from __future__ import annotations

from pipelines.prepare.kinds.actions.sequences import ActionsStep, check_actions
from pipelines.prepare.kinds.kind import Kind
from pipelines.prepare.kinds.simulation import Settings, SimulatedLog, draw_feed
from pipelines.prepare.prepare_config import PrepareConfig
from pipelines.prepare.reading.log import Log


class Actions(Kind):
    """The kind of request that asks which actions a user will take on an impression."""

    name = "actions"
    step_class = ActionsStep
    reads_as_of_features = True
    statistics = (
        "base_rates",
        "users_with_candidates",
        "users_with_context",
        "users_without_context",
        "events_without_context",
        "events_outside",
        "dropped",
    )
    text_tables = ("items",)
    first_model = "attn_mvp"
    simulated_source = "simulated_feed"

    def check_settings(self, source: Log, config: PrepareConfig) -> None:
        """Raise UserError for settings that do not fit a log of actions."""
        check_actions(source, config)

    def draw_log(self, settings: Settings) -> SimulatedLog:
        """Draw a feed of dog and cat users."""
        return draw_feed(settings)
