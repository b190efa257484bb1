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
from torch.nn import functional

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


def is_last_occurrence(items: Tensor, num_items: int) -> Tensor:
    """Return whether no later behaviour of the history (B, T) has the same item.

    Args:
        items: (B, T) items of histories, `num_items` at padding.
        num_items: Number N of items.
    """
    position = torch.arange(items.shape[1], device=items.device).expand_as(items)
    last = position.new_zeros((len(items), num_items + 1))
    last.scatter_reduce_(1, items, position, "amax")
    return last.gather(1, items) == position


def decay_distinct(items: Tensor, num_items: int, decay: Tensor) -> Tensor:
    """Return decay^steps (B, T) at the last occurrence of each item, 0 elsewhere.

    Args:
        items: (B, T) items of histories, `num_items` at padding.
        num_items: Number N of items.
        decay: () factor per later behaviour.
    """
    return decay ** steps_back(items, num_items) * is_last_occurrence(items, num_items)


def popular_below_zero(counts: Tensor) -> Tensor:
    """Return (N,) scores in [-1, 0) that order items by their `counts` (N,).

    They rank the items without a score of a model by popularity, if the model's scores
    are positive.
    """
    return counts / (counts.max() + 1) - 1


def add_scores(counts: Tensor, items: Tensor, addends: Tensor) -> Tensor:
    """Return scores (B, N): sums of addends, and popularity below zero without one.

    Args:
        counts: (N,) training behaviours of each item.
        items: (B, P) items of the addends, N at padding.
        addends: (B, P) positive addends.
    """
    popular = functional.pad(popular_below_zero(counts), (0, 1)).to(addends.dtype)
    scores = popular.repeat(len(items), 1)
    return scores.scatter_(1, items, 0.0).scatter_add_(1, items, addends)[:, :-1]
