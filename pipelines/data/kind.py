"""The interface of a kind of request: what differs between kinds, from the raw log to audited tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import polars as pl

from models.storage.tables import Manifest
from pipelines.data.audit.base import Rule, Tables
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import Log
from pipelines.data.run import Run
from pipelines.data.simulation import Settings


class Kind(ABC):
    """A kind of request, from the raw log to audited tables, and its simulated logs."""

    name: ClassVar[str]
    """Name in source files, and of the models' family."""
    config: ClassVar[type | None] = None
    """Dataclass of the kind's settings: the section of a source's `prepare` with the
    kind's name."""
    needs_history: ClassVar[bool] = False
    """Whether requests without a history are skipped in training and evaluation."""
    repeats: ClassVar[bool] = False
    """Whether a user may have the same event twice."""
    all_shown: ClassVar[bool] = False
    """Whether all events make the catalogue and the split, not the behaviours alone."""
    as_of: ClassVar[bool] = False
    """Whether its models read features with a time of their own."""
    counted: ClassVar[bool] = False
    """Whether there is a table of counts for served models."""
    statistics: ClassVar[tuple[str, ...]] = ()
    """Entries of the `info` of sequences that statistics.json repeats."""
    texts: ClassVar[tuple[str, ...]] = ()
    """Tables of text that `jobs.encode` makes of its logs; none if its models read no
    text."""
    model: ClassVar[str]
    """Model of a first training: a file of jobs/configs."""
    without: ClassVar[tuple[str, ...]] = ()
    """Rules of the audit that do not apply to its tables."""
    simulated: ClassVar[str]
    """Name of its logs in `jobs.simulate --kind`."""
    source: ClassVar[str]
    """Name of the mapping file that reads simulated logs."""
    settings: ClassVar[type[Settings]] = Settings
    """Dataclass of the sizes, seed and causes of simulated logs."""

    @abstractmethod
    def check(self, source: Log, config: PrepareConfig) -> None:
        """Raise UserError for settings that the kind does not have."""

    @abstractmethod
    def sequences(
        self, run: Run, events: Manifest, items: Manifest, split: dict[str, Any]
    ) -> Manifest:
        """Make the table `sequences`, with other tables that it needs, and return its manifest.

        Models of the family with the kind's name read it, or of the family that its
        `info` names as `family`.
        """

    def counts(self, run: Run, events: Manifest, items: Manifest, moment: int) -> None:
        """Make the table of counts as of a moment in ms, which served models read; only if `counted`."""
        raise NotImplementedError

    @abstractmethod
    def audit(
        self, tables: Tables, rules: dict[str, Rule], core_users: pl.DataFrame
    ) -> pl.DataFrame:
        """Check the rules on sequences.

        Args:
            tables: The audited tables.
            rules: Rules by name; they take the findings.
            core_users: Users (`user_id`) in the k-core.

        Returns:
            The users that must be in sequences.
        """

    def notices(self, events: Manifest, info: dict[str, Any]) -> Iterator[str]:
        """Yield lines on surprising tables, beside the lines of every kind. `info` belongs to sequences."""
        yield from ()

    @abstractmethod
    def simulate(self, output: str, settings: Any) -> Iterator[str]:
        """Write a log with known causes; yield lines on the best figures that models can reach on it."""
