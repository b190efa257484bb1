"""ItemKNN: recommend the neighbours of the items in a user's history.

X (U, N) counts the training behaviours of each user with each item, W its weights:

    none      w_ui = x_ui
    tfidf     w_ui = sqrt(x_ui) idf_u
    bm25      w_ui = idf_u x_ui (k1 + 1) / (x_ui + k1 (1 - b + b c_i / mean(c)))
    idf_u     log(N / (1 + number of items of u)), at least 0
    s_ij      <w_i, w_j> / (|w_i| |w_j| + shrinkage), w_i the column of item i
    score     sum of history_decay^steps s_ij over the distinct items i of the history,
              j among the `neighbours` items most similar to i; steps counts the
              behaviours after the item's last one

Items are documents and users are terms: users with many items have less weight, and
with bm25 items with many users have lower weights (c_i is the sum of column i; k1 =
1.2, b = 0.75). Items without a score are ranked last, by popularity. `weights`,
`shrinkage` and `history_decay` are chosen on validation.

Item-based top-N: Deshpande and Karypis, TOIS 2004; shrinkage: Bell and Koren, ICDM
2007; BM25: Robertson and Zaragoza, 2009.

Shapes: `U` users, `N` items, `B` requests, `T` behaviours of the longest history, `K`
neighbours of an item.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from scipy.sparse import csr_array
from torch import Tensor

from core.options import STRICT, NamedConfig
from models.retrieval.baselines.choice import Values, choose
from models.retrieval.baselines.interactions import decay_distinct, interaction_matrix
from models.retrieval.baselines.neighbours import (
    NeighbourModel,
    Pairs,
    list_pairs,
    split_items,
)
from models.retrieval.data import Catalogue, InteractionBatch, RequestBatch

BM25_K1 = 1.2
"""Saturation of counts in BM25."""

BM25_B = 0.75
"""Strength of BM25's normalisation by the number of users of an item."""

PRODUCTS_PER_BLOCK = 20_000_000
"""Most pairs of items whose similarities are in memory at once."""


@dataclass(config=STRICT)
class ItemKNNConfig(NamedConfig):
    """ItemKNN: recommends items that share users with the items of the history."""

    neighbours: PositiveInt = 100
    """Number of most similar items stored per item."""
    weights: Values[Literal["none", "tfidf", "bm25"]] = ("tfidf", "bm25")
    """Weights of a user's items: none (raw counts), tfidf or bm25."""
    shrinkage: Values[NonNegativeFloat] = (0.0,)
    """Added to the denominator of the cosine, which lowers similarities based on few
    users."""
    history_decay: Values[PositiveFloat] = (0.8, 1.0)
    """Factor on an item of the history per later behaviour."""
    max_history: PositiveInt = 200
    """Number of latest behaviours read per request."""


class ItemKNN(NeighbourModel):
    """A model that recommends the nearest neighbours of the history's items."""

    name = "item_knn"
    config_class = ItemKNNConfig
    example_unit = "behaviour"
    stops_early = True

    history_decay: Tensor
    """() the chosen `history_decay`."""

    def __init__(self, config: ItemKNNConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        self.register_buffer("history_decay", torch.ones(()))

    def fit_in_one_pass(
        self, batches: Iterable[InteractionBatch], val_batches: Iterable[RequestBatch]
    ) -> None:
        """Find the neighbours from training batches of unit `behaviour`."""
        matrix = interaction_matrix(batches, len(self.counts))
        self.counts.copy_(torch.from_numpy(matrix.sum(axis=0)))

        def learn(weights: str, shrinkage: float) -> None:
            weighted = weight_counts(matrix, weights)
            self.keep_best(find_similar(weighted, shrinkage))

        learned = ("weights", "shrinkage")
        choose(self, learned, "history_decay", learn, val_batches)

    def history_factors(self, items: Tensor) -> Tensor:
        """Count each distinct item once: history_decay^steps, or 0."""
        return decay_distinct(items, len(self.counts), self.history_decay)


def weight_counts(matrix: csr_array, weights: str) -> csr_array:
    """Return the weights W (U, N) by the equations in the module's docstring.

    Args:
        matrix: (U, N) counts X.
        weights: As in `ItemKNNConfig`.
    """
    if weights == "none":
        return matrix
    items_per_user = np.diff(matrix.indptr)
    idf = np.log(matrix.shape[1] / (1 + items_per_user)).clip(0)
    # one value per stored count
    count = matrix.data
    count_idf = np.repeat(idf, items_per_user)
    if weights == "tfidf":
        weighted = np.sqrt(count) * count_idf
    else:
        item_length = matrix.sum(axis=0)  # (N,) behaviours of each item
        relative_length = BM25_B * item_length / max(item_length.mean(), 1e-12)
        norm = BM25_K1 * (1 - BM25_B + relative_length)
        weighted = count_idf * count * (BM25_K1 + 1) / (count + norm[matrix.indices])
    return csr_array((weighted, matrix.indices, matrix.indptr), shape=matrix.shape)


def find_similar(weighted: csr_array, shrinkage: float) -> Iterator[Pairs]:
    """Yield the pairs of similar items with their similarities, by blocks.

    Args:
        weighted: (U, N) weights of each user's items.
        shrinkage: Added to the denominator of the cosine.
    """
    norm = np.sqrt((weighted**2).sum(axis=0))
    by_item = csr_array(weighted.T)  # (N, U)
    is_stored = by_item.astype(bool).astype(np.int64)
    # (N,) upper bound of the number of items that share a user with each item
    max_pairs = np.minimum(is_stored @ np.diff(weighted.indptr), weighted.shape[1])
    for first, end in split_items(max_pairs, PRODUCTS_PER_BLOCK):
        products = csr_array(by_item[first:end] @ weighted)  # (end - first, N)
        # one entry per pair of items with a common user
        item, other, product = list_pairs(products, first)
        cosine = product / (norm[item] * norm[other] + shrinkage)
        is_pair = (cosine > 0) & (item != other)
        yield item[is_pair], other[is_pair], cosine[is_pair]
