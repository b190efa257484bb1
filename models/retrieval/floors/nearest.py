"""An item's nearest items: by cosine of learned vectors, or a model's own neighbours.

    items, scores = nearest_items(model, k=10)  # each (N, k)

A model has `item_vectors()`, (N, D), or `nearest(k)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.search.topk import top_k
from models.storage.tables import UserError

ITEMS_PER_BLOCK = 1024


@torch.no_grad()
def nearest_items(model: Any, k: int) -> tuple[Tensor, Tensor]:
    """Return (items, scores), each (N, k), best first, -1 and -inf where there are fewer.

    Raises:
        UserError: if the model has neither vectors nor neighbours of items.
    """
    if hasattr(model, "nearest"):
        items, scores = model.nearest(k)
        return items, scores
    if not hasattr(model, "item_vectors"):
        raise UserError(
            f"{type(model).__name__} has no vectors of items; give a checkpoint of "
            f"sasrec, tiger or item_knn"
        )
    vectors = functional.normalize(model.item_vectors(), dim=1)
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
