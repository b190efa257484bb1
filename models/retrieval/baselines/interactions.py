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
        batches: Training batches of unit `behaviour`. Users without a training
            behaviour have no row.
        num_items: Number N of items.
    """
    users, items = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch in batches:
        users.append(batch.user_row.cpu().numpy())
        items.append(batch.target.cpu().numpy())
    user_rows, rows = np.unique(np.concatenate(users), return_inverse=True)
    columns = np.concatenate(items)
    ones = np.ones(len(columns))
    return csr_array((ones, (rows, columns)), shape=(len(user_rows), num_items))


def item_counts(matrix: csr_array) -> Tensor:
    """Return the (N,) number of training behaviours of each item, float32."""
    return torch.from_numpy(matrix.sum(axis=0)).float()


def history_counts(batch: HistoryBatch, num_items: int) -> Tensor:
    """Return the number of occurrences (B, N) of items in histories, float32."""
    items = real_items(batch, num_items)
    ones = torch.ones(items.shape, device=items.device)
    # the last column is padding
    counts = ones.new_zeros((len(items), num_items + 1)).scatter_add_(1, items, ones)
    return counts[:, :num_items]


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


def is_last_occurrence(items: Tensor, num_items: int) -> Tensor:
    """Return whether each item of a history (B, T) is its last occurrence there.

    Args:
        items: (B, T) items of histories, `num_items` at padding.
        num_items: Number N of items.
    """
    position = torch.arange(items.shape[1], device=items.device).expand_as(items)
    last = position.new_zeros((len(items), num_items + 1))
    last.scatter_reduce_(1, items, position, "amax")
    return last.gather(1, items) == position


def popular_below_zero(counts: Tensor) -> Tensor:
    """Return (N,) scores in [-1, 0) that order items by their `counts` (N,).

    Added to a model's positive scores, they rank the items without a score by
    popularity.
    """
    return counts / (counts.max() + 1) - 1
