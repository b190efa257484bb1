"""Settings of `jobs.prepare`, which `settings.py` parses and checks against a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from core.errors import UserError
from core.options import check_least, check_shares
from pipelines.data.engine import RayDataConfig
from pipelines.data.sequences.splits import SplitConfig, epoch_ms


@dataclass
class PrepareConfig:
    """Settings of the tables of a raw log.

    They are the `prepare` section of a source file, overridden by the command line.
    """

    kind: str = "retrieval"
    """Kind of request: `retrieval` (predict the item of a behaviour), `search` (rank
    the results of a search) or `actions` (predict the actions on an impression)."""
    core: int = 5
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
    max_events: int = 10_000
    """Maximum number of behaviours per user; the most recent ones are kept."""
    behaviour: str | None = None
    """Bool label that makes an event a behaviour, such as `click`; by default every
    event is a behaviour."""
    partitions: int | None = None
    """Number of partitions of the shuffle, and of parts of the tables; by default from
    the size of the log."""
    max_rejects: float = 0.01
    """Maximum share of rows that break the schema; above it the job fails."""
    min_matched: float = 0.5
    """Minimum share of items (and of users, if there are user files) with a row in
    their files, both of distinct ids and of events; below it the job fails. 0 accepts
    any share."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Events that repeat another in every column that the mapping reads: `drop` treats
    them as logged twice; `keep` treats them as real, such as two purchases of a day."""
    catalogue: str | None = None
    """TABLES of a trained model, whose catalogue and split times are used for this log,
    for batch inference and evaluation. Events on other items are dropped."""
    counts_as_of: Any = None
    """Time as ISO 8601 (UTC) or epoch ms: also writes the table `counts`, with counts
    of all strictly earlier events, for a served model. Kind `search` only."""
    ray_data: RayDataConfig = field(default_factory=RayDataConfig)
    """Settings of Ray Data."""
    kind_config: Any = field(default=None, metadata={"hidden": True})
    """Instance of the kind's `config` class, such as `SearchConfig`; None if the kind
    has no settings."""

    def __post_init__(self) -> None:
        check_least(self, ["core"], 0)
        check_least(self, ["max_events", "partitions"], 1)
        check_shares(self, ["max_rejects", "min_matched"])
        if self.counts_as_of is not None:
            self.counts_as_of = epoch_ms(self.counts_as_of, "counts_as_of")


def raise_first(*checks: tuple[Any, str]) -> None:
    """Raise UserError with the message of the first check that fails.

    Args:
        checks: Pairs of a condition, true if the check fails, and a message.
    """
    for failed, message in checks:
        if failed:
            raise UserError(message)
