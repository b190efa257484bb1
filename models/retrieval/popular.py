"""The most popular items, which stand in for a ranking where there is no history.

    learned["popularity"] = encode_counts(targets, num_items)
    counts = load_counts(metadata, num_items)  # (N,)

The checkpoint of a model that ranks a catalogue has the number of training behaviours
of each item, as the model `popularity` counts them. A served model ranks by them for
visitors without a history, and an evaluation measures them on such requests.
"""

from __future__ import annotations

import base64

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.metrics.ranked.accuracy import NDCG, Recall
from models.retrieval.metrics import rank_targets
from models.retrieval.search import top_k
from models.training.checkpoint import Checkpoint

CUTOFF = 10
"""Length of the measured ranking."""


def encode_counts(targets: NDArray[np.integer], num_items: int) -> str:
    """Count the targets by item, and encode the counts as text for a checkpoint."""
    counts = np.bincount(targets, minlength=num_items)
    return base64.b64encode(counts.astype("<u4").tobytes()).decode()


def load_counts(metadata: Checkpoint, num_items: int) -> Tensor:
    """Return the counts (N,) float32 of a checkpoint, 0 for items that are newer."""
    encoded = base64.b64decode(metadata.learned.get("popularity", ""))
    counts = torch.zeros(num_items)
    trained = np.frombuffer(encoded, "<u4").astype(np.float32)
    counts[: len(trained)] = torch.from_numpy(trained)
    return counts


def sum_popularity(counts: Tensor, targets: NDArray[np.integer]) -> dict[str, float]:
    """Return the sums of recall and NDCG of the most popular items.

    Args:
        counts: (N,) training behaviours of each item.
        targets: (n, M) targets of each request, right-padded with -1.
    """
    items, _ = top_k(counts[None], CUTOFF)
    sets = torch.from_numpy(targets)
    ranking = rank_targets(items.expand(len(sets), -1), sets)
    return {
        f"{metric.name}@{CUTOFF}": float(metric.values(ranking, CUTOFF).sum())
        for metric in (Recall(), NDCG())
    }
