"""Gradient-boosted trees (LightGBM) with early stopping on validation.

    trees = grow_trees(columns, labels, val_columns, val_labels, TreeConfig())
    log_odds = predict_raw(trees, columns)

A model with trees saves `trees.model_to_string()` in its checkpoint.

Shapes: `N` examples, `X` columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from core.errors import UserError
from core.options import STRICT, NamedConfig

if TYPE_CHECKING:
    from lightgbm import Booster

EARLY_STOPPING_ROUNDS = 30
"""Number of trees without a better validation metric before training stops."""


@dataclass(config=STRICT)
class TreeConfig(NamedConfig):
    """Options of gradient-boosted trees, with LightGBM's names."""

    max_history: PositiveInt = 100
    """Number of latest behaviours in which the user's actions are counted."""
    num_iterations: PositiveInt = 1000
    """Maximum number of trees; early stopping chooses how many are used."""
    learning_rate: float = 0.1
    """Factor on the leaf values of each tree."""
    num_leaves: PositiveInt = 31
    """Maximum number of leaves of a tree."""
    max_depth: int = 6
    """Maximum depth of a tree."""
    min_data_in_leaf: PositiveInt = 100
    """Minimum number of training candidates in a leaf."""
    feature_fraction: float = 0.5
    """Fraction of the columns sampled for each tree, with the seed `fit.seed`."""


def concat_batches(
    batches: Iterable[Any], read: Callable[[Any], Sequence[Tensor]]
) -> list[NDArray]:
    """Read arrays from batches, and concatenate the arrays of all batches.

    Args:
        batches: Batches of a split.
        read: Function that returns a batch's arrays, of which the first has a row for
            each example.
    """
    parts = [[array.cpu().numpy() for array in read(batch)] for batch in batches]
    if not any(len(arrays[0]) for arrays in parts):
        raise UserError("the val split is empty, so boosting cannot stop")
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def grow_trees(
    columns: NDArray[np.float32],
    labels: NDArray[np.float32],
    val_columns: NDArray[np.float32],
    val_labels: NDArray[np.float32],
    config: TreeConfig,
    num_categories: int = 0,
    sizes: tuple[NDArray, NDArray] | None = None,
) -> Booster:
    """Train trees that predict a binary label, or that rank lists by lambdarank.

    The number of trees is the best on the validation examples, by log loss, or by
    NDCG@10 of lists. The seed of LightGBM is sampled from PyTorch's generator.

    Args:
        columns: (N, X) columns of the training examples.
        labels: (N,) labels of the training examples, 0 or 1, or grades in lists.
        val_columns: (M, X) columns of the validation examples.
        val_labels: (M,) labels of the validation examples.
        config: Options of the trees.
        num_categories: Number of categorical columns, which come first.
        sizes: Sizes of the lists in training and in validation, to rank.
    """
    import lightgbm

    train_sizes, val_sizes = sizes or (None, None)
    data = lightgbm.Dataset(
        columns,
        labels,
        group=train_sizes,
        categorical_feature=list(range(num_categories)),
    )
    parameters = {
        "objective": "lambdarank" if sizes else "binary",
        "metric": "ndcg" if sizes else "binary_logloss",
        "eval_at": 10,
        "learning_rate": config.learning_rate,
        "num_leaves": config.num_leaves,
        "max_depth": config.max_depth,
        "min_data_in_leaf": config.min_data_in_leaf,
        "feature_fraction": config.feature_fraction,
        "seed": int(torch.randint(2**31 - 1, ())),
        "num_threads": torch.get_num_threads(),
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }
    stop = lightgbm.early_stopping(EARLY_STOPPING_ROUNDS, verbose=False)
    booster = lightgbm.train(
        parameters,
        data,
        config.num_iterations,
        valid_sets=[data.create_valid(val_columns, val_labels, group=val_sizes)],
        callbacks=[stop],
    )
    text = booster.model_to_string(num_iteration=booster.best_iteration)
    return lightgbm.Booster(model_str=text)


def predict_raw(booster: Booster, columns: Tensor) -> Tensor:
    """Return the (N,) float64 sums of leaf values for (N, X) columns.

    They are log-odds if the trees predict a label.
    """
    if not len(columns):
        return columns.new_zeros(0, dtype=torch.float64)
    scores = booster.predict(
        columns.cpu().numpy(), raw_score=True, num_threads=torch.get_num_threads()
    )
    return torch.from_numpy(scores).to(columns.device)


def to_state(content: Any) -> Tensor:
    """Return the content of a checkpoint as bytes of JSON."""
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def from_state(state: Any) -> Any:
    """Return the content that `to_state` encoded."""
    return json.loads(bytes(state.numpy()))
