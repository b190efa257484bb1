"""Sequences of a retrieval log: every behaviour is a request for itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from models.config import pluralize
from models.storage.tables import Manifest, UserError
from pipelines.data.events.columns import first_of_run, take_rows
from pipelines.data.schemas import sequences_schema
from pipelines.data.sequences.builder import (
    Behaviours,
    BuiltTable,
    EventsPart,
    PartDraft,
    Requests,
    SequenceBuilder,
    SequencesStep,
)
from pipelines.data.sequences.splits import (
    SPLITS,
    describe_folds,
    folds_info,
    require_training,
    tied_targets_info,
)


@dataclass(frozen=True)
class RetrievalBuilder(SequenceBuilder):
    """Rules by which events become sequences whose every behaviour is a request for itself."""

    core: int
    """Behaviours on the catalogue that a user must have."""
    before_ms: int | None
    """Only behaviours known earlier than this count for `core`; None for all."""
    log_order: bool
    """Whether a behaviour sees the tied behaviours before it in the log."""
    behaviour: str | None
    """Label that makes an event a behaviour; None if all events are."""

    @property
    def behaviour_label(self) -> str | None:
        return self.behaviour

    @property
    def hashes_ties(self) -> bool:
        return not self.log_order

    @property
    def columns(self) -> list[str]:
        unused = ("request_id", "position")
        return [name for name in self.schema.names if name not in unused]

    @property
    def output(self) -> pa.Schema:
        return sequences_schema(self.schema)

    def find_behaviours(self, part: EventsPart) -> np.ndarray:
        """Return the mask (E,) of behaviours of users with at least `core` of them."""
        is_behaviour = super().find_behaviours(part)
        counts = is_behaviour
        if self.before_ms is not None:
            counts = counts & (part.known < self.before_ms)
        per_user = np.bincount(part.user[counts], minlength=part.num_users)
        return is_behaviour & (per_user >= max(self.core, 1))[part.user]

    def form_requests(
        self,
        part: EventsPart,
        behaviours: Behaviours,
        count: Counter[str],
    ) -> Requests:
        # Events are in the order of time, behaviours in the order in which they are
        # visible.
        return Requests.one_per_event(part, np.sort(behaviours.row))

    def history_ends(self, draft: PartDraft) -> np.ndarray:
        part, request = draft.part, draft.requests.row
        if part.is_late:
            return super().history_ends(draft)
        # Behaviours are in the order of events: count those up to the request.
        behaviours_before = np.zeros(len(part.user) + 1, dtype=np.int32)
        behaviours_before[draft.row + 1] = 1
        np.cumsum(behaviours_before, out=behaviours_before)
        end = request
        if not self.log_order:
            end = first_of_run(part.user, part.time)[request]
        begin = first_of_run(part.user)[request]
        return behaviours_before[end] - behaviours_before[begin]

    def user_columns(
        self, draft: PartDraft, count: Counter[str]
    ) -> dict[str, pa.Array]:
        query = take_rows(draft.part.table, "query", draft.requests.row)
        return {"requests": self.request_column(draft, count, {"query": query}, {})}


@dataclass(frozen=True)
class RetrievalStep(SequencesStep):
    """Makes the sequences of a retrieval log."""

    builder_class: ClassVar[type[RetrievalBuilder]] = RetrievalBuilder

    @property
    def settings(self) -> dict[str, Any]:
        config = self.run.config
        return super().settings | {
            "core": config.core,
            "behaviour": config.behaviour,
            "ties": config.ties,
        }

    def create_builder(self) -> RetrievalBuilder:
        config = self.run.config
        return self.builder_class(
            schema=self.run.source.schema,
            split=self.split,
            max_events=config.max_events,
            joined=self.joined,
            core=config.core,
            before_ms=self.run.core_before_ms(self.split),
            log_order=config.ties == "log_order",
            behaviour=config.behaviour,
        )

    def describe(self, builder: Any, built: BuiltTable) -> dict[str, Any]:
        requests = built.per_split("requests")
        without_history = built.per_split("without_history")
        usable = {name: requests[name] - without_history[name] for name in SPLITS}
        self._check(built.count, usable)
        return {
            **tied_targets_info(built.count),
            **folds_info(self.split, built.count),
            "requests": requests,
            "requests_without_history": without_history,
        }

    def _check(self, count: Counter[str], usable: dict[str, int]) -> None:
        """Raise UserError if no request can be trained on; on a frozen catalogue, if no user is left."""
        config = self.run.config
        if config.catalogue is None:
            require_training(
                usable,
                count,
                config.max_events,
                "request with a history",
                self.split["kind"],
                count["tied_rows"] if config.ties == "strict" else 0,
            )
        elif not count["users"]:
            raise UserError(
                f"no user has {max(config.core, 1)} behaviours on the catalogue of {config.catalogue}; use --core 0"
            )

    def report(self, sequences: Manifest, seconds: float) -> None:
        self.run.report(
            f"sequences: {pluralize(sequences.rows, 'user')} in {seconds:.1f} s"
        )
        for line in describe_folds(sequences.info):
            self.run.report(line)
