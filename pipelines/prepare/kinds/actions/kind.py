"""The kind `actions`: a request is an impression whose actions are predicted."""

from __future__ import annotations

import polars as pl

from pipelines.prepare.audit.base import Rule, Tables
from pipelines.prepare.kinds.actions.audit import check_actions_tables
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
    skipped_rules = ("history", "known", "targets", "queries")
    simulated_source = "simulated_feed"

    def check_settings(self, source: Log, config: PrepareConfig) -> None:
        """Raise UserError for settings that do not fit a log of actions."""
        check_actions(source, config)

    def audit_sequences(
        self, tables: Tables, rules: dict[str, Rule], core_users: pl.DataFrame
    ) -> pl.DataFrame:
        """Check the rules on `sequences`; users with catalogue events must be in it."""
        return check_actions_tables(tables, rules)

    def draw_log(self, settings: Settings) -> SimulatedLog:
        """Draw a feed of dog and cat users."""
        return draw_feed(settings)
