"""The interface of a kind of request, such as a search or an impression."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from core.schemas import Split
from core.tables import Table
from pipelines.prepare.kinds.simulation import Settings, SimulatedLog
from pipelines.prepare.prepare_config import PrepareConfig
from pipelines.prepare.reading.log import Log
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.as_of import make_as_of_tables
from pipelines.prepare.sequences.builder import SequencesStep, make_sequences


class Kind(ABC):
    """A kind of request: its settings, sequences and simulated logs."""

    name: ClassVar[str]
    """Name of the kind in source files, which the models that read its tables have as
    `kind`."""
    step_class: ClassVar[type[SequencesStep]]
    """The step of prepare that makes `sequences`."""
    needs_history: ClassVar[bool] = False
    """Whether training and evaluation skip requests without a history."""
    allows_repeats: ClassVar[bool] = False
    """Whether a user may have the same event twice."""
    uses_all_events: ClassVar[bool] = False
    """Whether the catalogue and the split count all events, not behaviours alone."""
    reads_as_of_features: ClassVar[bool] = False
    """Whether its models read the features of `as_of` tables, which change over
    time."""
    has_counts: ClassVar[bool] = False
    """Whether `prepare` can write a table of counts for served models."""
    statistics: ClassVar[tuple[str, ...]] = ()
    """Entries of the `info` of sequences that statistics.json repeats."""
    text_tables: ClassVar[tuple[str, ...]] = ()
    """Tables that `jobs.encode` writes; empty if the models read no text."""
    first_model: ClassVar[str]
    """Name of the configuration in the kind's folder of jobs/configs that is
    suggested for a first training."""
    simulated_source: ClassVar[str]
    """Name of the mapping file that reads simulated logs."""

    @abstractmethod
    def check_settings(self, source: Log, config: PrepareConfig) -> None:
        """Raise UserError if the settings do not fit the kind or the log."""

    def make_sequences(
        self, run: Run, events: Table, items: Table, split: Split
    ) -> Table:
        """Write the table `sequences`, with the tables it depends on.

        Args:
            run: Log, settings and tables of this call of `prepare`.
            events: Table of the events.
            items: Table of the items.
            split: The split.
        """
        as_of = make_as_of_tables(run)
        return make_sequences(self.step_class(run, events, items, split, as_of))

    def make_counts(self, run: Run, events: Table, items: Table, as_of_ms: int) -> None:
        """Write the table of counts that served models read; only if `has_counts`.

        Args:
            run: Log, settings and tables of this call of `prepare`.
            events: Table of the events.
            items: Table of the items.
            as_of_ms: Time in epoch ms; only earlier events are counted.
        """
        raise NotImplementedError

    def warn(self, info: Any) -> Iterator[str]:
        """Yield warnings about valid tables that only this kind has.

        Args:
            info: Info of the sequences.
        """
        yield from ()

    @abstractmethod
    def draw_log(self, settings: Settings) -> SimulatedLog:
        """Draw a simulated log of the kind."""
