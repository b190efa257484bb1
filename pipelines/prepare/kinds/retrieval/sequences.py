"""Sequences of a retrieval log: every behaviour is the target of a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from core.errors import UserError, pluralize
from core.schemas import RetrievalInfo, sequences_schema
from core.tables import Table
from pipelines.prepare.events.columns import first_of_run, take_rows
from pipelines.prepare.sequences.builder import (
    Behaviours,
    BuiltTable,
    EventsPart,
    PartDraft,
    Requests,
    SequenceBuilder,
    SequencesStep,
)
from pipelines.prepare.sequences.splits import (
    SPLITS,
    require_training,
    tied_targets,
)


@dataclass(frozen=True)
class RetrievalBuilder(SequenceBuilder):
    """Builds sequences in which every behaviour is the target of a request."""

    core: int
    """Minimum number of behaviours on the catalogue that a user must have."""
    before_ms: int | None
    """Time in ms: only behaviours known earlier count for `core`; None counts all."""
    log_order: bool
    """Whether behaviours of the same time, earlier in the log, are in the history."""
    behaviour: str | None
    """Label that makes an event a behaviour; None if all events are."""

    @property
    def behaviour_label(self) -> str | None:
        """Label that makes an event a behaviour; None if all events are."""
        return self.behaviour

    @property
    def hashes_ties(self) -> bool:
        """Whether a hash, not the order of the log, decides which tie is the target."""
        return not self.log_order

    @property
    def columns(self) -> list[str]:
        """Columns of `events` that are read: all but request ids and positions."""
        unused = ("request_id", "position")
        return [name for name in self.schema.names if name not in unused]

    @property
    def output(self) -> pa.Schema:
        """Schema of `sequences`."""
        return sequences_schema(self.schema)

    def find_behaviours(self, part: EventsPart) -> np.ndarray:
        """Return a mask (E,) of the behaviours of users with `core` or more of them."""
        is_behaviour = super().find_behaviours(part)
        is_counted = is_behaviour
        if self.before_ms is not None:
            is_counted = is_counted & (part.known < self.before_ms)
        num_counted = np.bincount(part.user[is_counted], minlength=part.num_users)
        return is_behaviour & (num_counted >= max(self.core, 1))[part.user]

    def form_requests(
        self,
        part: EventsPart,
        behaviours: Behaviours,
        count: Counter[str],
    ) -> Requests:
        """Form a request of each behaviour, in the order of their times.

        Behaviours are in the order in which they become known.
        """
        return Requests.one_per_event(part, np.sort(behaviours.row))

    def history_ends(self, draft: PartDraft) -> np.ndarray:
        """Return the number (R,) of the user's earlier behaviours for each request.

        With `log_order`, behaviours at the same time count if they are earlier in the
        log.
        """
        part, request = draft.part, draft.requests.row
        if part.is_late:
            return super().history_ends(draft)
        # behaviours are in the order of events: count the user's up to the request
        is_behaviour = np.zeros(len(part.user), dtype=np.int32)
        is_behaviour[draft.row] = 1
        num_before = np.zeros(len(part.user) + 1, dtype=np.int32)  # before each event
        np.cumsum(is_behaviour, out=num_before[1:])
        end = request
        if not self.log_order:
            end = first_of_run(part.user, part.time)[request]
        begin = first_of_run(part.user)[request]
        return num_before[end] - num_before[begin]

    def user_columns(
        self, draft: PartDraft, count: Counter[str]
    ) -> dict[str, pa.Array]:
        """Return the column `requests`, with the query of each request."""
        query = take_rows(draft.part.table, "query", draft.requests.row)
        return {"requests": self.request_column(draft, count, {"query": query}, {})}


@dataclass(frozen=True)
class RetrievalStep(SequencesStep):
    """The step of prepare that makes the sequences of a retrieval log."""

    info_class = RetrievalInfo
    builder_class: ClassVar[type[RetrievalBuilder]] = RetrievalBuilder

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the table depends on."""
        config = self.run.config
        return super().settings | {
            "core": config.core,
            "behaviour": config.behaviour,
            "ties": config.ties,
        }

    def create_builder(self) -> RetrievalBuilder:
        """Return the builder of the parts."""
        config = self.run.config
        return self.builder_class(
            schema=self.run.source.schema,
            split=self.split,
            max_events=config.max_events,
            joined=self.joined_schema,
            core=config.core,
            before_ms=self.run.core_before_ms(self.split),
            log_order=config.ties == "log_order",
            behaviour=config.behaviour,
        )

    def describe(self, builder: Any, built: BuiltTable) -> dict[str, Any]:
        """Return the counts of requests, and of requests without a history."""
        requests = built.per_split("requests")
        without_history = built.per_split("without_history")
        usable = {name: requests[name] - without_history[name] for name in SPLITS}
        config = self.run.config
        if config.catalogue is None:
            require_training(usable, "request with a history")
        elif not built.count["users"]:
            raise UserError(
                f"no user has {max(config.core, 1)} behaviours on the catalogue of "
                f"{config.catalogue}"
            )
        return {
            "tied_targets": tied_targets(built.count),
            "requests": requests,
            "requests_without_history": without_history,
        }

    def report(self, sequences: Table[Any], seconds: float) -> None:
        """Report the number of users."""
        self.run.report(
            f"sequences: {pluralize(sequences.rows, 'user')} in {seconds:.1f} s"
        )
