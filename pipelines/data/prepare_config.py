"""The settings of `jobs.prepare`. `settings.py` reads them and holds them against a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import check_choices, check_least, check_shares
from pipelines.data.ray_data_config import RayDataConfig
from pipelines.data.splits import SplitConfig


@dataclass
class PrepareConfig:
    """What is made of a raw log. A source file's `prepare` section sets these; the command line wins."""

    kind: str = "retrieval"
    """What a request is, a name in `kinds/table.py`: `retrieval`, each behaviour asks for itself; `search`, a search
    with the results it showed; `actions`, an impression whose actions are asked for."""
    core: int = 5
    """Iterative k-core: users and items with fewer behaviours are left out. 0 or 1 keeps all."""
    core_window: Literal["all", "train"] = "all"
    """Whether the k-core counts the whole log, as papers do, or the training window of a temporal split only."""
    ties: Literal["strict", "log_order"] = "strict"
    """`strict`: a history holds only what is strictly earlier. `log_order`: events of equal time keep the log's
    order and see the ones before; `position` then is that order."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """How requests are split."""
    max_events: int = 10_000
    """Behaviours per user; of longer histories the most recent are kept."""
    behaviour: str | None = None
    """A bool label that makes an event a behaviour, such as `click`; by default every event is one."""
    partitions: int | None = None
    """Partitions of the shuffle and parts of the tables; by default from the bytes read."""
    max_rejects: float = 0.01
    """Share of rows that may break the schema before the job fails."""
    min_matched: float = 0.5
    """Share of the items, and of the users where there are user files, that must have a row in those files, by number
    and by events, before the job fails; 0 accepts any."""
    duplicates: Literal["drop", "keep", "count"] = "drop"
    """Events that repeat another in every column: dropped as logged twice, kept as real, such as two purchases of
    a day, or one kept for all, whose label `repeats` counts them."""
    catalogue: str | None = None
    """TABLES whose catalogue this log has too: a fresh log, for batch inference and evaluation by models that were
    trained there. Items that are not in it are left out, and requests are split at the same times."""
    ray_data: RayDataConfig = field(default_factory=RayDataConfig)
    """How Ray Data runs."""
    own: Any = None
    """The kind's own settings, such as the features of a search log; None where it has none."""

    def __post_init__(self) -> None:
        check_least(self, ["core"], 0)
        check_least(self, ["max_events", "partitions"], 1)
        check_shares(self, ["max_rejects", "min_matched"])
        check_choices(self)
