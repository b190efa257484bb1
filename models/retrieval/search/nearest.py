"""Nearest items by the cosine of item vectors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.search.topk import top_k

ITEMS_PER_BLOCK = 1024
"""Items whose similarities to all items are in memory at once."""


@torch.no_grad()
def nearest_by_cosine(vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k nearest other items of each item.

    Args:
        vectors: (N, D) vectors of the items.
        k: Number of neighbours per item.

    Returns:
        Items and cosines, (N, k) both, best first. If an item has fewer neighbours,
        the tail of its row is item -1 with score -inf.
    """
    vectors = functional.normalize(vectors, dim=1)
    item_blocks, score_blocks = [], []
    for first in range(0, len(vectors), ITEMS_PER_BLOCK):
        cosine = vectors[first : first + ITEMS_PER_BLOCK] @ vectors.T
        cosine.diagonal(first).fill_(-torch.inf)  # not the item itself
        items, scores = top_k(cosine, k)
        item_blocks.append(items.masked_fill(scores == -torch.inf, -1))
        score_blocks.append(scores)
    return torch.cat(item_blocks), torch.cat(score_blocks)
