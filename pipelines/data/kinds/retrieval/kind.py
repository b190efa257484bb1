"""The row of retrieval: each behaviour is a request for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.tables import Manifest
from pipelines.data.audit.base import KindRules
from pipelines.data.kinds.base import RequestKind, Simulator
from pipelines.data.kinds.retrieval.audit import COLUMNS, WITHOUT, check_retrieval_tables
from pipelines.data.kinds.retrieval.flow import FLOW
from pipelines.data.kinds.retrieval.notices import histories
from pipelines.data.kinds.retrieval.simulator import simulate_retrieval
from pipelines.data.kinds.simulation import Settings

if TYPE_CHECKING:
    from pipelines.data.run import Run


def sequences(run: Run, events: Manifest, items: Manifest, split: dict[str, Any]) -> Manifest:
    """As `make_retrieval`."""
    from pipelines.data.kinds.retrieval.sequences import make_retrieval  # it imports Ray, so only now

    return make_retrieval(run, events, items, split)


RETRIEVAL = RequestKind(
    name="retrieval",
    check=lambda source, config: None,
    sequences=sequences,
    audit=KindRules(COLUMNS, check_retrieval_tables, WITHOUT),
    simulator=Simulator("retrieval", "simulated", Settings, simulate_retrieval),
    flow=FLOW,
    notices=histories,
    needs_history=True,
    repeats=True,
)
