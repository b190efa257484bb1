"""Settings of `jobs.prepare`. `settings.py` reads them and checks them against a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import check_choices, check_least, check_shares
from models.storage.tables import UserError
from pipelines.data.engine import RayDataConfig
from pipelines.data.sequences.splits import SplitConfig, epoch_ms


@dataclass
class PrepareConfig:
    """Settings of the tables of a raw log: the `prepare` section of a source file, below the command line."""

    kind: str = "retrieval"
    """Kind of request: `retrieval`, a behaviour, whose item is predicted; `search`, a
    search with its results; `actions`, an impression, whose actions are predicted."""
    core: int = 5
    """Iterative k-core: users and items with fewer behaviours are left out. 0 or 1
    keeps all that `core_window` has."""
    core_window: Literal["all", "train"] = "all"
    """Events that the k-core counts: `all`, the whole log, as in the papers; `train`,
    the training window of a temporal split, with several folds that of the first."""
    ties: Literal["strict", "log_order"] = "strict"
    """`strict`: a history holds only strictly earlier events. `log_order`: it also
    holds events of the same time that come earlier in the log; `position` is then the
    order in the log."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Split of the requests."""
    max_events: int = 10_000
    """Behaviours kept per user: the most recent ones."""
    behaviour: str | None = None
    """A bool label that makes an event a behaviour, such as `click`; by default every
    event is one."""
    partitions: int | None = None
    """Partitions of the shuffle, which are also the parts of the tables; by default
    from the bytes of the log."""
    max_rejects: float = 0.01
    """Share of rows that may break the schema; with more the job fails."""
    min_matched: float = 0.5
    """Share of the items (and of the users, if there are user files) that must have a
    row in their files, by number and by events; with less the job fails. 0 accepts any.
    """
    duplicates: Literal["drop", "keep"] = "drop"
    """Events that repeat another in every column that the mapping reads: `drop` them as
    logged twice; `keep` them as real, such as two purchases of a day."""
    catalogue: str | None = None
    """TABLES of a trained model: the log is read as a fresh log of the same catalogue,
    for batch inference and evaluation. Events of other items are left out, and requests
    are split at the same times."""
    counts_as_of: Any = None
    """A moment, as ISO 8601 (UTC) or epoch ms: also makes the table `counts`, with
    counts of what is strictly before it, for a served model. Of kind `search`."""
    ray_data: RayDataConfig = field(default_factory=RayDataConfig)
    """Settings of Ray Data."""
    own: Any = field(default=None, metadata={"hidden": True})
    """Settings of the kind, such as the features of a search log; None if it has
    none."""

    def __post_init__(self) -> None:
        check_least(self, ["core"], 0)
        check_least(self, ["max_events", "partitions"], 1)
        check_shares(self, ["max_rejects", "min_matched"])
        check_choices(self)
        if self.counts_as_of is not None:
            self.counts_as_of = epoch_ms(self.counts_as_of, "counts_as_of")


def refuse(*faults: tuple[Any, str]) -> None:
    """Raise UserError with the message of the first true condition of (condition, message) pairs."""
    for condition, message in faults:
        if condition:
            raise UserError(message)
