"""Settings of `jobs.prepare`, which `kinds/resolve.py` checks against a log."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT, Fraction, Free
from pipelines.prepare.executor import RayDataConfig
from pipelines.prepare.settings.actions import ActionsConfig
from pipelines.prepare.settings.search import SearchConfig
from pipelines.prepare.settings.split import SplitConfig, epoch_ms


@dataclass(config=STRICT)
class SequencesConfig:
    """Settings that decide the table `sequences`, which its manifest records."""

    kind: str = "retrieval"
    """Kind of request: `retrieval` (predict the item of a behaviour), `search` (rank
    the results of a search) or `actions` (predict the actions on an impression)."""
    core: NonNegativeInt = 5
    """Iterative k-core: users and items with fewer behaviours are dropped. 0 and 1 keep
    all users and items with a behaviour in `core_window`."""
    core_window: Literal["all", "train"] = "all"
    """Events that the k-core counts: `all`, the whole log, as in the papers; `train`,
    the training window of a temporal split."""
    ties: Literal["strict", "log_order"] = "strict"
    """`strict`: a history holds only strictly earlier events. `log_order`: it also
    holds events of the same time that come earlier in the log; `position` is then the
    order in the log."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Split of the requests."""
    max_events: PositiveInt = 10_000
    """Maximum number of behaviours per user; the most recent ones are kept."""
    behaviour: str | None = None
    """Bool label that makes an event a behaviour, such as `click`; by default every
    event is a behaviour."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """Features of a log of searches."""
    actions: ActionsConfig = field(default_factory=ActionsConfig)
    """Tasks, inputs and counts of a log of actions."""


@dataclass(config=STRICT)
class PrepareConfig(SequencesConfig):
    """Settings of the tables of a raw log.

    They are the `prepare` section of a source file, overridden by the command line.
    """

    partitions: PositiveInt | None = None
    """Number of partitions of the shuffle, and of parts of the tables; by default from
    the size of the log."""
    max_rejects: Fraction = 0.01
    """Maximum share of rows that break the schema; above it the job fails."""
    min_matched: Fraction = 0.5
    """Minimum share of items (and of users, if there are user files) with a row in
    their files, both of distinct ids and of events; below it the job fails. 0 accepts
    any share."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Events that repeat another in every column that the mapping reads: `drop` treats
    them as logged twice; `keep` treats them as real, such as two purchases of a day."""
    catalogue: str | None = None
    """TABLES of a trained model, whose catalogue and split times are used for this log,
    for batch inference and evaluation. Events on other items are dropped."""
    counts_as_of: Free = None
    """Time as ISO 8601 (UTC) or epoch ms: also writes the table `counts`, with counts
    of all strictly earlier events, for a served model. Kind `search` only."""
    ray_data: RayDataConfig = field(default_factory=RayDataConfig)
    """Settings of Ray Data."""

    def __post_init__(self) -> None:
        if self.counts_as_of is not None:
            self.counts_as_of = epoch_ms(self.counts_as_of, "counts_as_of")
