"""Nearest items by the cosine of item vectors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.search.topk import top_k

ITEMS_PER_BLOCK = 1024


@torch.no_grad()
def nearest_by_cosine(vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the items nearest to each of the `vectors` (N, D), without the item itself.

    Returns:
        (items, scores), each (N, k), best first; -1 and -inf where there are fewer.
    """
    vectors = functional.normalize(vectors, dim=1)
    blocks = []
    for first in range(0, len(vectors), ITEMS_PER_BLOCK):
        cosine = vectors[first : first + ITEMS_PER_BLOCK] @ vectors.T
        cosine.diagonal(first).fill_(-torch.inf)
        items, scores = top_k(cosine, k)
        blocks.append((items.masked_fill(scores == -torch.inf, -1), scores))
    return (
        torch.cat([items for items, _ in blocks]),
        torch.cat([scores for _, scores in blocks]),
    )
