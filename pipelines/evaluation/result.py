"""What an evaluation found, apart from what finds it, so that a command line is read before Ray is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.checkpoint import Checkpoint


@dataclass
class Result:
    """What an evaluation found, as `evaluation-SPLIT.json` beside the checkpoint."""

    model: str
    """Name in the registry."""
    checkpoint: str
    """What was evaluated."""
    split: str
    """val or test."""
    examples: int
    """Requests ranked."""
    users: int
    """Users whose requests they are."""
    skipped: int
    """Requests without a history, left out."""
    metrics: dict[str, float]
    """By name, such as `recall@K` and `ndcg@K`."""
    users_per_s: float
    """Requests per second of `recommend`, all shards together; under this name in MLflow from the first."""
    seconds: float
    """Time of the evaluation."""
    seed: int | None
    """Seed of the training."""
    options: dict[str, Any]
    """Options of `recommend` and the batch size."""
    hashes: dict[str, str]
    """Hashes of the tables."""
    device: str
    """`cpu` with the number of threads, or the GPU's name; before it how many worked at once, if more than one."""
    by_user: dict[str, dict[str, str]]
    """Metrics user by user (`models/by_user.py`, packed), for comparisons on the same users."""

    def is_fresh(self, about: Checkpoint) -> bool:
        """Whether the requests are of another log than that of the training."""
        return self.hashes.get("sequences") != about.hashes.get("sequences")
