"""The settings of `jobs.prepare`. `settings.py` reads them and holds them against a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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
        if self.core < 0:
            raise ValueError(f"core is {self.core}; it must be 0 (keep all) or more")
        if self.core_window not in ("all", "train"):
            raise ValueError(f"core_window is '{self.core_window}'; it is one of all, train")
        if self.ties not in ("strict", "log_order"):
            raise ValueError(f"ties is '{self.ties}'; it is one of strict, log_order")
        if self.max_events < 1:
            raise ValueError(f"max_events is {self.max_events}; a user needs at least 1")
        if self.partitions is not None and self.partitions < 1:
            raise ValueError(f"partitions is {self.partitions}; it must be 1 or more, or left out")
        if not 0 <= self.max_rejects <= 1:
            raise ValueError(f"max_rejects is {self.max_rejects}; it is a share between 0 and 1")
        if not 0 <= self.min_matched <= 1:
            raise ValueError(f"min_matched is {self.min_matched}; it is a share between 0 and 1")
        if self.duplicates not in ("drop", "keep", "count"):
            raise ValueError(f"duplicates is '{self.duplicates}'; it is one of drop, keep, count")
