"""Sequential rules: recommend what followed the items of a history in training.

W (N, N) counts, over all training requests, the items a of the history before target b:

    W_ab    sum of distance^-distance_power; distance is 1 for the latest item
    V_ab    W_ab / (n_a^source_power n_b^target_power)
    score_b sum over the history of decay^steps V_ab; steps is 0 for the latest item

n_i is 1 plus the number of training requests with a history for item i. With
`both_directions`, W_ba gets the same addend as W_ab. Histories are cut to the latest
`max_history` items, in training too. Each item keeps the `neighbours` largest V_ab.
Items without a score are ranked last, by n.

An option with several values is chosen on validation: all combinations are tried, and
the one with the highest NDCG@10 is kept.

Sequential rules: Ludewig and Jannach, UMUAI 2018. The powers of popularity and the
decay over all of the history are additions of this project.

Shapes: `N` items, `B` requests, `T` items of the longest history, `K` neighbours of an
item, `R` training requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from scipy.sparse import csr_array
from torch import Tensor

from core.options import STRICT, NamedConfig
from models.retrieval.baselines.choice import Values, choose
from models.retrieval.baselines.interactions import steps_back
from models.retrieval.baselines.neighbours import (
    NeighbourModel,
    Pairs,
    list_pairs,
    split_items,
)
from models.retrieval.data import Catalogue, RequestBatch

PAIRS_PER_BLOCK = 20_000_000
"""Most pairs of a history's item and a target that are counted at once."""

MAX_TRIED = 200_000
"""Most training requests on which the options are tried, drawn evenly."""

LEARNED = ("distance_power", "source_power", "target_power", "both_directions")
"""Chosen options of which the counts depend."""


@dataclass(config=STRICT)
class SequentialRulesConfig(NamedConfig):
    """Sequential rules: recommends items that followed the history's in training."""

    distance_power: Values[NonNegativeFloat] = (0.0, 0.3)
    """How fast a pair's count falls with the distance of its items, 0 for not at
    all."""
    source_power: Values[NonNegativeFloat] = (0.3,)
    """Strength of the division by the popularity of the history's item."""
    target_power: Values[NonNegativeFloat] = (0.18, 0.4)
    """Strength of the division by the popularity of the recommended item."""
    decay: Values[PositiveFloat] = (0.4, 0.6)
    """Factor on the score per step back in the history."""
    both_directions: Values[bool] = (False, True)
    """Whether an item also predicts the items before it."""
    neighbours: PositiveInt = 200
    """Number of items stored per item."""
    max_history: PositiveInt = 20
    """Number of latest behaviours read per request."""


class SequentialRules(NeighbourModel):
    """A model of the items that follow an item; its similarities are V."""

    name = "sequential_rules"
    config_class = SequentialRulesConfig
    example_unit = "request"
    stops_early = True

    decay: Tensor
    """() the chosen `decay`."""

    def __init__(self, config: SequentialRulesConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        self.register_buffer("decay", torch.ones(()))

    def fit_in_one_pass(
        self, batches: Iterable[RequestBatch], val_batches: Iterable[RequestBatch]
    ) -> None:
        """Choose the options on validation, and count the pairs of all requests."""
        longest = self.config.max_history
        histories, targets = [np.zeros((0, longest), np.int32)], [np.zeros(0, np.int32)]
        for batch in batches:
            length = batch.history_length.numpy()[:, None]
            index = length - 1 - np.arange(longest)  # (B, T): the latest item first
            items = np.take_along_axis(batch.history.numpy(), index.clip(0), 1)
            histories.append(np.where(index < 0, -1, items).astype(np.int32))
            targets.append(batch.target.numpy().astype(np.int32))
        history, target = np.concatenate(histories), np.concatenate(targets)
        counts = np.bincount(target, minlength=len(self.counts))
        self.counts.copy_(torch.from_numpy(counts))

        # training batches are in random order
        learn = partial(self._learn, history[:MAX_TRIED], target[:MAX_TRIED])
        choice = choose(self, LEARNED, "decay", learn, val_batches)
        if len(target) > MAX_TRIED:
            self._learn(history, target, *(choice[name] for name in LEARNED))

    def _learn(
        self,
        history: NDArray[np.int32],
        target: NDArray[np.int32],
        distance_power: float,
        source_power: float,
        target_power: float,
        both_directions: bool,
    ) -> None:
        """Set the neighbours and their V from R training requests."""
        popularity = self.counts.double().cpu().numpy() + 1
        weight = np.arange(1, 1 + history.shape[1]) ** -distance_power  # (T,)
        blocks = count_pairs(history, target, weight, len(popularity), both_directions)
        source_norm, target_norm = popularity**source_power, popularity**target_power
        self.keep_best(
            (source, follower, count / (source_norm[source] * target_norm[follower]))
            for source, follower, count in blocks
        )

    def history_factors(self, items: Tensor) -> Tensor:
        """Return decay^steps (B, T) of the items of histories (B, T)."""
        return self.decay ** steps_back(items, len(self.counts))


def count_pairs(
    history: NDArray[np.int32],
    target: NDArray[np.int32],
    weight: NDArray[np.float64],
    num_items: int,
    both_directions: bool,
) -> Iterator[Pairs]:
    """Yield the pairs a, b with their W_ab, by blocks of items a.

    Args:
        history: (R, T) histories, latest item first and -1 at padding.
        target: (R,) targets.
        weight: (T,) addend of a pair, by distance from 1.
        num_items: Number N of items.
        both_directions: Whether a target also counts as before its history.
    """
    pairs_per_item = np.bincount(history[history >= 0], minlength=num_items)
    if both_directions:
        lengths = (history >= 0).sum(1)
        pairs_per_item += np.bincount(target, lengths, num_items).astype(np.int64)
    for first, end in split_items(pairs_per_item, PAIRS_PER_BLOCK):
        row, column = np.nonzero((history >= first) & (history < end))
        pairs = [(history[row, column], target[row], weight[column])]
        if both_directions:
            row, column = np.nonzero(
                ((target >= first) & (target < end))[:, None] & (history >= 0)
            )
            pairs.append((target[row], history[row, column], weight[column]))
        columns = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        source, follower, addend = columns
        shape = (end - first, num_items)
        counts = csr_array((addend, (source - first, follower)), shape=shape)
        yield list_pairs(counts, first)
