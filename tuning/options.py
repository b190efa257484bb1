"""Options of a sweep, without Ray, so that a command line is parsed before it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from models.config import check_least


@dataclass
class Options:
    """How a sweep is run."""

    concurrency: int = 0
    """Trials at once at most; 0: as many as the cluster has room for. Trials of several workers: as many as its nodes
    had room for at the start, and with an autoscaler at least 16, whose workers make it start nodes."""
    test: bool = True
    """Measure each finished trial on the test split too; the best is chosen on val all the same."""

    def __post_init__(self) -> None:
        check_least(self, ["concurrency"], 0, "options.")
