"""What a kind of request is: a class with all that differs between kinds, from the raw log to audited tables."""

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
    """All that differs between kinds of request, from the raw log to audited tables, and its simulated logs."""

    name: ClassVar[str]
    """Name in source files, and of the models' family."""
    config: ClassVar[type | None] = None
    """Dataclass of its own settings: the section of a source's `prepare` that has the kind's name."""
    needs_history: ClassVar[bool] = False
    """Whether models are neither trained on nor measured by requests without a history."""
    repeats: ClassVar[bool] = False
    """Whether a user may have the same event twice."""
    all_shown: ClassVar[bool] = False
    """Whether all that was shown makes the catalogue and the split, and not the behaviours alone."""
    as_of: ClassVar[bool] = False
    """Whether its models read features with a time of their own."""
    counted: ClassVar[bool] = False
    """Whether there is a table of counts for served models."""
    statistics: ClassVar[tuple[str, ...]] = ()
    """Entries of the `info` of sequences that statistics.json repeats."""
    texts: ClassVar[tuple[str, ...]] = ()
    """Tables of text that `jobs.encode` makes of its logs; none where its models read no text."""
    model: ClassVar[str]
    """The model that a first training takes: a file of jobs/configs."""
    without: ClassVar[tuple[str, ...]] = ()
    """Rules of the audit that there is nothing to check for on its tables."""
    simulated: ClassVar[str]
    """What `jobs.simulate --kind` calls its logs."""
    source: ClassVar[str]
    """Name of the mapping file that reads them."""
    settings: ClassVar[type[Settings]] = Settings
    """Dataclass of their sizes, seed and causes."""

    @abstractmethod
    def check(self, source: Log, config: PrepareConfig) -> None:
        """UserError for settings that such a log cannot have."""

    @abstractmethod
    def sequences(
        self, run: Run, events: Manifest, items: Manifest, split: dict[str, Any]
    ) -> Manifest:
        """Makes the table, with others that it needs, and returns its manifest. Models of the family with the kind's
        name read it, or of that which its `info` names as `family`."""

    def counts(self, run: Run, events: Manifest, items: Manifest, moment: int) -> None:
        """Makes the table of counts as of a moment in ms, in the layout of served models, where it is `counted`."""
        raise NotImplementedError

    @abstractmethod
    def audit(
        self, tables: Tables, rules: dict[str, Rule], core_users: pl.DataFrame
    ) -> pl.DataFrame:
        """Checks the rules on sequences, given the users (`user_id`) that the k-core keeps. Returns those that must be
        in sequences."""

    def notices(self, events: Manifest, info: dict[str, Any]) -> Iterator[str]:
        """Lines on what may surprise, beside what is so of every kind, by the `info` of sequences."""
        yield from ()

    @abstractmethod
    def simulate(self, output: str, settings: Any) -> Iterator[str]:
        """Writes a log with known causes; yields lines that say what models can reach on it."""
