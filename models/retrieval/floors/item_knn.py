"""ItemKNN: recommend the neighbours of the items in a user's history.

X (U, N) counts the training behaviours of each user with each item, W its weights:

    none      w_ui = x_ui
    tfidf     w_ui = sqrt(x_ui) idf_u
    bm25      w_ui = idf_u x_ui (k1 + 1) / (x_ui + k1 (1 - b + b c_i / mean(c)))
    idf_u     log(N / (1 + number of items of u)), at least 0
    s_ij      <w_i, w_j> / (|w_i| |w_j| + shrinkage), w_i the column of item i
    score     sum of s_ij over the distinct items i of the history, j among the
              `neighbours` items most similar to i

Items are documents and users are terms: a user of many items says little, and with bm25
an item of many users is damped (c_i is the sum of column i; k1 = 1.2, b = 0.75).
Item-based top-N: Deshpande and Karypis, TOIS 2004; shrinkage: Bell and Koren, ICDM
2007; BM25: Robertson and Zaragoza, 2009. Items without a score follow by popularity.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional

from models.config import check_least
from models.retrieval.data import Catalogue, HistoryBatch, InteractionBatch
from models.retrieval.floors.interactions import (
    interaction_matrix,
    item_counts,
    popular_below_zero,
    real_items,
)
from models.retrieval.model import RetrievalModel
from models.retrieval.recommend import best_allowed, recommender

K1, B = 1.2, 0.75
"""BM25: saturation of counts, and how far the length of an item counts."""

PRODUCTS_PER_BLOCK = 20_000_000
"""Most pairs of items whose similarities are held at once while neighbours are
chosen."""


@dataclass
class ItemKNNConfig:
    """Options of ItemKNN, which recommends the items most similar to the history by
    common users.
    """

    neighbours: int = 100
    """Most similar items kept for each item."""
    weights: Literal["none", "tfidf", "bm25"] = "tfidf"
    """Weights of a user's items: counts as they are, TF-IDF or BM25."""
    shrinkage: float = 0.0
    """Added to the denominator of the cosine: lowers similarities that rest on few
    users."""
    max_history: int = 200
    """Behaviours read per request: the latest."""

    def __post_init__(self) -> None:
        check_least(self, ["max_history", "neighbours"], 1, "model.")
        check_least(self, ["shrinkage"], 0, "model.")


class ItemKNN(RetrievalModel):
    """A ranker by similar items; tables of nearest items are padded with -1 and 0."""

    name = "item_knn"
    config_class = ItemKNNConfig
    example_unit = "behaviour"
    trains_by_gradient = False
    is_floor = True

    neighbours: Tensor
    similarity: Tensor
    counts: Tensor

    def __init__(self, config: ItemKNNConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        shape = (catalogue.num_items, config.neighbours)
        self.register_buffer("neighbours", torch.full(shape, -1, dtype=torch.int32))
        self.register_buffer("similarity", torch.zeros(shape))
        self.register_buffer("counts", torch.zeros(catalogue.num_items))

    def fit_counts(self, batches: Iterable[InteractionBatch]) -> None:
        """Find the neighbours from training batches of unit `behaviour`, once."""
        matrix = interaction_matrix(batches, len(self.counts))
        self.counts.copy_(item_counts(matrix))
        neighbours, similarity = nearest_items(
            weigh(matrix, self.config.weights),
            self.config.neighbours,
            self.config.shrinkage,
        )
        self.neighbours.copy_(torch.from_numpy(neighbours))
        self.similarity.copy_(torch.from_numpy(similarity))

    def nearest_items(self, k: int) -> tuple[Tensor, Tensor]:
        missing = max(0, k - self.config.neighbours)
        fewer = self.similarity == 0
        items = self.neighbours.long().masked_fill(fewer, -1)
        scores = self.similarity.masked_fill(fewer, -torch.inf)
        return (
            functional.pad(items, (0, missing), value=-1)[:, :k],
            functional.pad(scores, (0, missing), value=-torch.inf)[:, :k],
        )

    @recommender
    def recommend(self, batch: HistoryBatch, k: int) -> tuple[Tensor, Tensor]:
        """Return (items, scores), each (B, k)."""
        num_items = len(self.counts)
        items = real_items(batch, num_items)  # (B, T), padding is `num_items`
        item = items.clamp(max=num_items - 1)
        counted = is_last_occurrence(items) & (items < num_items)
        similarity = self.similarity[item] * counted[..., None]  # (B, T, K)
        neighbours = self.neighbours[item].long() % (num_items + 1)  # -1 to N
        scores = similarity.new_zeros((len(items), num_items + 1))
        scores.scatter_add_(1, neighbours.flatten(1), similarity.flatten(1))
        scores = scores[:, :num_items]
        popular = popular_below_zero(self.counts)
        return best_allowed(torch.where(scores == 0, popular, scores), k, batch)


def is_last_occurrence(items: Tensor) -> Tensor:
    """Return (B, T) whether each of the `items` (B, T) does not occur again later."""
    equal = items[:, :, None] == items[:, None, :]
    return ~equal.triu(1).any(2)


def weigh(matrix: csr_array, weights: str) -> csr_array:
    """Return W of the (U, N) counts, by the equations above."""
    if weights == "none":
        return matrix
    items_per_user = np.diff(matrix.indptr)
    idf = np.log(matrix.shape[1] / (1 + items_per_user)).clip(0)
    row_idf = np.repeat(idf, items_per_user)  # of each stored count
    counts = matrix.data
    if weights == "tfidf":
        weighted = np.sqrt(counts) * row_idf
    else:
        item_length = matrix.sum(axis=0)
        norm = K1 * (1 - B + B * item_length / max(item_length.mean(), 1e-12))
        weighted = row_idf * counts * (K1 + 1) / (counts + norm[matrix.indices])
    return csr_array((weighted, matrix.indices, matrix.indptr), shape=matrix.shape)


def nearest_items(
    weighted: csr_array, neighbours: int, shrinkage: float
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return each item's most similar items and their similarities.

    Args:
        weighted: (U, N) weights of each user's items.
        neighbours: K, items kept for each item; an item is no neighbour of its own.
        shrinkage: added to the denominator of the cosine.

    Returns:
        (N, K) items, best first and ties by item_index, -1 where an item has fewer;
        (N, K) similarities, 0 there.
    """
    num_items = weighted.shape[1]
    items = np.full((num_items, neighbours), -1, np.int32)
    similarity = np.zeros((num_items, neighbours), np.float32)
    norm = np.sqrt((weighted**2).sum(axis=0))
    by_item = csr_array(weighted.T)  # (N, U)
    for first, last in item_blocks(by_item, weighted):
        products = csr_array(by_item[first:last] @ weighted)  # (n, N)
        row = np.repeat(np.arange(first, last), np.diff(products.indptr))
        column = products.indices.astype(np.int64)
        value = products.data / (norm[row] * norm[column] + shrinkage)
        chosen = np.flatnonzero((value > 0) & (row != column))
        order = chosen[np.lexsort((column[chosen], -value[chosen], row[chosen]))]
        rank = rank_in_run(row[order])
        order, rank = order[rank < neighbours], rank[rank < neighbours]
        items[row[order], rank] = column[order]
        similarity[row[order], rank] = value[order]
    return items, similarity


def rank_in_run(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each of the sorted `values` among its equals, from 0."""
    return np.arange(len(values)) - np.searchsorted(values, values)


def item_blocks(by_item: csr_array, weighted: csr_array) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of consecutive items with a bounded number of pairs."""
    items_per_user = np.diff(weighted.indptr)
    pairs = by_item.astype(bool).astype(np.int64) @ items_per_user  # at most, per item
    block = np.cumsum(np.minimum(pairs, weighted.shape[1])) // PRODUCTS_PER_BLOCK
    edges = np.flatnonzero(np.diff(block)) + 1
    yield from itertools.pairwise([0, *edges.tolist(), len(block)])
