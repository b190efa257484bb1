"""The options of a sweep, apart from what runs it, so that a command line is read before Ray is imported."""

from __future__ import annotations

from dataclasses import dataclass

from models.config import check_least


@dataclass
class Options:
    """How a sweep is run."""

    concurrency: int = 0
    """Trials at once at most; 0: as many as the cluster has room for."""
    retries: int = 2
    """How often a trial whose process was lost is continued; then it is recorded as failed."""
    again: bool = False
    """With --resume: trials that failed are taken up again."""
    budget_hours: float = 0.0
    """Time after which no trial goes on; 0: none. --resume takes the sweep up again."""
    test: bool = True
    """Measure each finished trial on the test split too; the best is chosen on val all the same."""

    def __post_init__(self) -> None:
        check_least(self, ["concurrency", "retries", "budget_hours"], 0)
