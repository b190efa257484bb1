"""EASE: a linear model of items on items in closed form.

Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019. X (U, M) is 1
where a user has a training behaviour with an item, else 0:

    P     = (X^T X + l2 I)^-1
    B_ij  = -P_ij / P_jj for i != j, B_jj = 0
    score = x B, x_i = history_decay^steps for the items of the history

steps counts the behaviours after the item's last one; with a decay of 1, x is 1 for the
items of the history, as in the paper. Validation chooses `l2` and `history_decay`.

B has M^2 numbers. If the catalogue has more than `max_items` items, M covers the items
most frequent in training, and all other items are ranked below them by popularity. If
none of the M items is in a history, all items are ranked by popularity.

Shapes: `U` users, `M` items of B, `N` items, `B` requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from scipy.linalg import lapack
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional

from core.options import STRICT, NamedConfig
from models.retrieval.baselines.choice import Values, choose
from models.retrieval.baselines.interactions import (
    decay_distinct,
    interaction_matrix,
    popular_below_zero,
    real_items,
)
from models.retrieval.data import (
    Catalogue,
    HistoryBatch,
    InteractionBatch,
    RequestBatch,
)
from models.retrieval.model import RetrievalModel
from models.retrieval.recommend import best_allowed, recommender

TRAINING_BYTES = 20
"""Bytes per entry of B in training: five float32 matrices at once, two of them
solutions for values of l2."""


@dataclass(config=STRICT)
class EASEConfig(NamedConfig):
    """EASE: a linear item-to-item model in closed form."""

    l2: Values[PositiveFloat] = (200.0, 500.0)
    """L2 regularisation of B: larger for fewer behaviours per item."""
    history_decay: Values[PositiveFloat] = (0.8, 1.0)
    """Factor on an item of the history per later behaviour."""
    max_items: PositiveInt = 10_000
    """M, the most items that B covers. The model takes 4 M^2 bytes and training 20
    M^2."""
    max_history: PositiveInt = 1000
    """Number of latest behaviours read per request."""


class EASE(RetrievalModel):
    """A linear model of items on the items of a history."""

    name = "ease"
    config_class = EASEConfig
    example_unit = "behaviour"
    trains_by_gradient = False
    stops_early = True
    is_baseline = True

    counts: Tensor
    """(N,) training behaviours of each item."""
    items: Tensor
    """(M,) items that B covers, ascending."""
    weights: Tensor
    """(M, M) the matrix B."""
    history_decay: Tensor
    """() the chosen `history_decay`."""

    def __init__(self, config: EASEConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        size = min(config.max_items, catalogue.num_items)
        self.register_buffer("counts", torch.zeros(catalogue.num_items))
        self.register_buffer("items", torch.arange(size))
        self.register_buffer("weights", torch.zeros((size, size)))
        self.register_buffer("history_decay", torch.ones(()))

    @classmethod
    def resolve_config(cls, config: EASEConfig, catalogue: Catalogue) -> EASEConfig:
        """Return the config with `max_items` no larger than the catalogue."""
        return replace(config, max_items=min(config.max_items, catalogue.num_items))

    def prepare_training(self, catalogue: Catalogue) -> list[str]:
        """Return a message if B does not cover the whole catalogue."""
        if self.config.max_items >= catalogue.num_items:
            return []
        gib = TRAINING_BYTES * catalogue.num_items**2 / 2**30
        return [
            f"EASE on the {self.config.max_items:,} most frequent of "
            f"{catalogue.num_items:,} items, other items ranked below by popularity; "
            f"max_items {catalogue.num_items} covers all items and takes "
            f"{gib:,.1f} GiB"
        ]

    def fit_in_one_pass(
        self, batches: Iterable[InteractionBatch], val_batches: Iterable[RequestBatch]
    ) -> None:
        """Solve for B from training batches of unit `behaviour`, once per l2."""
        matrix = interaction_matrix(batches, len(self.counts))
        self.counts.copy_(torch.from_numpy(matrix.sum(axis=0)))
        frequent = np.argsort(-self.counts.cpu().numpy(), kind="stable")
        items = np.sort(frequent[: len(self.items)])
        self.items.copy_(torch.from_numpy(items))
        solve = cache(partial(solve_weights, matrix[:, items]))

        def learn(l2: float) -> None:
            self.weights.copy_(solve(l2))

        choose(self, ("l2",), "history_decay", learn, val_batches)

    @recommender
    def recommend(self, batch: HistoryBatch, k: int) -> tuple[Tensor, Tensor]:
        """Return items and scores, (B, k) both, by the linear model."""
        num_items, size = len(self.counts), len(self.items)
        history = real_items(batch, num_items)  # (B, T), `num_items` at padding
        index = torch.searchsorted(self.items, history).clamp(max=size - 1)
        is_covered = self.items[index] == history
        factors = decay_distinct(history, num_items, self.history_decay)
        linear_scores = functional.embedding_bag(
            index, self.weights, mode="sum", per_sample_weights=factors * is_covered
        )  # (B, M)
        # items that B does not cover are below all linear scores
        lowest = linear_scores.amin(1, keepdim=True).clamp(max=0)
        popular = popular_below_zero(self.counts)
        # (N,): column of each item's linear score, M for items that B does not cover
        column = self.items.new_full((num_items,), size)
        column[self.items] = torch.arange(size, device=column.device)
        scores = torch.cat([linear_scores, lowest], 1).index_select(1, column)
        scores += popular.index_fill(0, self.items, 0.0)
        has_history = is_covered.any(1, keepdim=True)
        return best_allowed(torch.where(has_history, scores, popular), k, batch)


def solve_weights(matrix: csr_array, l2: float) -> Tensor:
    """Return the matrix B (M, M), float32.

    Args:
        matrix: (U, M) training behaviours of each user with each item.
        l2: Weight of the regularisation.
    """
    indicators = csr_array(matrix.astype(bool), dtype=np.float64)  # X
    gram = np.asfortranarray((indicators.T @ indicators).toarray())
    gram[np.diag_indices_from(gram)] += l2
    # in place: a large catalogue has no memory for a copy
    factor, _ = lapack.dpotrf(gram, lower=1, overwrite_a=1)
    inverse, _ = lapack.dpotri(factor, lower=1, overwrite_c=1)
    for column in range(len(inverse)):  # LAPACK fills the lower triangle only
        inverse[column, column + 1 :] = inverse[column + 1 :, column]
    diagonal = np.diag(inverse).astype(np.float32)
    weights = torch.from_numpy(inverse.astype(np.float32))
    weights /= -torch.from_numpy(diagonal)
    return weights.fill_diagonal_(0)
