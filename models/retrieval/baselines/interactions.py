"""Matrices of users and items for models without gradient training.

    matrix = interaction_matrix(batches, num_items)  # (U, N) counts

Shapes: `U` users, `N` items, `B` requests, `T` behaviours of the longest history.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from models.retrieval.data import HistoryBatch, InteractionBatch


def interaction_matrix(
    batches: Iterable[InteractionBatch], num_items: int
) -> csr_array:
    """Return the (U, N) number of training behaviours of each user with each item.

    Args:
        batches: Training batches of unit `behaviour`.
        num_items: Number N of items.
    """
    users, items = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch in batches:
        users.append(batch.user_row.cpu().numpy())
        items.append(batch.target.cpu().numpy())
    rows, columns = np.concatenate(users), np.concatenate(items)
    shape = (1 + rows.max(initial=0), num_items)
    return csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)


def real_items(batch: HistoryBatch, num_items: int) -> Tensor:
    """Return the items (B, T) of the histories, with `num_items` at padding."""
    history = batch.history
    position = torch.arange(history.shape[1], device=history.device)
    real = position < batch.history_length[:, None]
    return history.masked_fill(~real, num_items)


def steps_back(items: Tensor, num_items: int) -> Tensor:
    """Return how many behaviours follow each one in its history (B, T).

    Args:
        items: (B, T) items of histories, `num_items` at padding.
        num_items: Number N of items.
    """
    length = (items < num_items).sum(1, keepdim=True)
    return (length - 1 - torch.arange(items.shape[1], device=items.device)).clamp(0)


def decay_distinct(items: Tensor, num_items: int, decay: Tensor) -> Tensor:
    """Return decay^steps (B, T) at the last occurrence of each item, 0 elsewhere.

    Args:
        items: (B, T) items of histories, `num_items` at padding.
        num_items: Number N of items.
        decay: () factor per later behaviour.
    """
    position = torch.arange(items.shape[1], device=items.device).expand_as(items)
    last = position.new_zeros((len(items), num_items + 1))
    last.scatter_reduce_(1, items, position, "amax")
    is_last = last.gather(1, items) == position
    return decay ** steps_back(items, num_items) * is_last


def popular_below_zero(counts: Tensor) -> Tensor:
    """Return (N,) scores in [-1, 0) that order items by their `counts` (N,).

    Added to a model's positive scores, they rank the items without a score by
    popularity.
    """
    return counts / (counts.max() + 1) - 1
