"""The row of actions: a request is an impression whose actions are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.tables import Manifest
from pipelines.data.audit.base import KindRules
from pipelines.data.kinds.actions.audit import COLUMNS, WITHOUT, check_actions_tables
from pipelines.data.kinds.actions.config import ActionsConfig, check_actions
from pipelines.data.kinds.actions.flow import FLOW
from pipelines.data.kinds.actions.simulator import KINDS, FeedSettings, best_entropy, simulate_feed
from pipelines.data.kinds.base import RequestKind, Simulator

if TYPE_CHECKING:
    from pipelines.data.run import Run


def sequences(run: Run, events: Manifest, items: Manifest, split: dict[str, Any]) -> Manifest:
    """As `make_actions`."""
    from pipelines.data.kinds.actions.sequences import make_actions  # it imports Ray, so only now

    return make_actions(run, events, items, split)


ACTIONS = RequestKind(
    name="actions",
    config=ActionsConfig,
    check=check_actions,
    sequences=sequences,
    audit=KindRules(COLUMNS, check_actions_tables, WITHOUT),
    simulator=Simulator(
        "feed",
        "simulated_feed",
        FeedSettings,
        simulate_feed,
        described=FeedSettings.described,
        always=(
            f"half of the users like {KINDS[0]}s, half {KINDS[1]}s, which only their actions tell: normalised entropy "
            f"of like is 1 without actions and {best_entropy('like'):.3f} at best"
        ),
    ),
    flow=FLOW,
    statistics=(
        "base_rates",
        "users_with_candidates",
        "users_with_context",
        "users_without_context",
        "events_without_context",
        "events_outside",
        "dropped",
    ),
    per_user=True,
    texts=("items",),
    as_of=True,
)
