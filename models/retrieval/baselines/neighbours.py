"""Models that score items by stored neighbours of the history's items.

    score_j = sum over the history of factor_t similarity_tj

Shapes: `N` items, `B` requests, `T` behaviours of the longest history, `K` neighbours
of an item, `P` pairs of items.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional

from core.ragged import lengths_to_starts, row_numbers
from models.retrieval.baselines.interactions import add_scores, real_items
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.model import RetrievalModel
from models.retrieval.recommend import best_allowed, recommender

Pairs = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""(P,) items, the other items of the pairs, and their scores."""


class NeighbourModel(RetrievalModel):
    """A model of the neighbours of each item, fitted by subclasses.

    Items without a score are ranked last, by popularity.
    """

    trains_by_gradient = False
    is_baseline = True

    neighbours: Tensor
    """(N, K) int32 nearest items of each item, -1 at padding."""
    similarity: Tensor
    """(N, K) similarities of the neighbours, 0 at padding."""
    counts: Tensor
    """(N,) training behaviours of each item."""

    def __init__(self, config: Any, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        shape = (catalogue.num_items, config.neighbours)
        self.register_buffer("neighbours", torch.full(shape, -1, dtype=torch.int32))
        self.register_buffer("similarity", torch.zeros(shape))
        self.register_buffer("counts", torch.zeros(catalogue.num_items))

    def keep_best(self, blocks: Iterable[Pairs]) -> None:
        """Store the best neighbours of each item, ties by item_index.

        Args:
            blocks: Pairs of items, ascending; all pairs of an item are in one block.
        """
        neighbours = np.full(self.neighbours.shape, -1, np.int32)
        similarity = np.zeros(neighbours.shape, np.float32)
        for item, other, score in blocks:
            order = np.argsort(-score, kind="stable")
            order = order[np.argsort(item[order], kind="stable")]
            # rank within the pairs of its item
            rank = np.arange(len(item)) - lengths_to_starts(np.bincount(item))[item]
            is_best = rank < neighbours.shape[1]
            order, rank = order[is_best], rank[is_best]
            neighbours[item[order], rank] = other[order]
            similarity[item[order], rank] = score[order]
        self.neighbours.copy_(torch.from_numpy(neighbours))
        self.similarity.copy_(torch.from_numpy(similarity))

    def nearest_items(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the stored neighbours and similarities, (N, k) both, best first.

        If an item has fewer than k neighbours, the tail of its row is item -1 with
        score -inf.
        """
        missing = max(0, k - self.config.neighbours)
        is_padding = self.similarity == 0
        items = self.neighbours.long().masked_fill(is_padding, -1)
        scores = self.similarity.masked_fill(is_padding, -torch.inf)
        return (
            functional.pad(items, (0, missing), value=-1)[:, :k],
            functional.pad(scores, (0, missing), value=-torch.inf)[:, :k],
        )

    @recommender
    def recommend(self, batch: HistoryBatch, k: int) -> tuple[Tensor, Tensor]:
        """Return items and scores, (B, k) both, by sums over the history."""
        num_items = len(self.counts)
        items = real_items(batch, num_items)  # (B, T), `num_items` at padding
        index = items.clamp(max=num_items - 1)
        factors = self.history_factors(items) * (items < num_items)  # (B, T)
        similarity = self.similarity[index] * factors[..., None]  # (B, T, K)
        neighbours = self.neighbours[index].long()
        neighbours.masked_fill_((neighbours < 0) | (similarity == 0), num_items)
        scores = add_scores(self.counts, neighbours.flatten(1), similarity.flatten(1))
        return best_allowed(scores, k, batch)

    def history_factors(self, items: Tensor) -> Tensor:
        """Return the factors (B, T) of the items of histories (B, T)."""
        raise NotImplementedError


def list_pairs(matrix: csr_array, first: int) -> Pairs:
    """Return the pairs of a block of rows that begins at item `first`."""
    matrix.sort_indices()
    item = first + row_numbers(np.diff(matrix.indptr))
    return item, matrix.indices.astype(np.int64), matrix.data


def split_items(
    pairs_per_item: NDArray[np.int64], pairs_per_block: int
) -> Iterator[tuple[int, int]]:
    """Yield blocks (first, end) of items with about `pairs_per_block` pairs each."""
    block = np.cumsum(pairs_per_item) // pairs_per_block
    edges = np.flatnonzero(np.diff(block)) + 1
    yield from itertools.pairwise([0, *edges.tolist(), len(block)])
