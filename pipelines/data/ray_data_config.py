"""The settings of Ray Data for `jobs.prepare`; `engine.py` applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.config import check_choices, check_least

WORKERS = {"env_vars": {"RAY_DATA_SHUFFLE_MAP_WORKER": "1", "RAY_DATA_SHUFFLE_REDUCE_WORKER": "1"}}
"""The environments that Ray Data 2.60 gives the tasks of its shuffle, as that of a whole Ray: so all tasks share the
same processes, where each kind would start its own."""


@dataclass
class RayDataConfig:
    """How Ray Data runs; nothing of it changes the tables."""

    shuffle_batch_mb: int = 64
    """MiB of rows that one task cuts by partition."""
    compression: Literal["auto", "none", "lz4", "zstd"] = "auto"
    """Of rows between tasks; auto: none on one node, lz4 between nodes."""
    read_mb: int = 128
    """MiB of a plain file that one task reads; a compressed file is read by one task."""

    def __post_init__(self) -> None:
        check_least(self, ["shuffle_batch_mb", "read_mb"], 1, "ray_data.")
        check_choices(self, "ray_data.")
