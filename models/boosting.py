"""Gradient-boosted trees (LightGBM) with early stopping on validation.

    trees = grow_trees(columns, labels, val_columns, val_labels, TreeConfig())
    log_odds = predict_log_odds(trees, columns)

A model with trees saves `trees.model_to_string()` in its checkpoint.

Shapes: `N` examples, `X` columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from lightgbm import Booster

EARLY_STOPPING_ROUNDS = 30
"""Number of trees without a lower validation log loss before training stops."""


@dataclass
class TreeConfig:
    """Options of gradient-boosted trees, with LightGBM's names."""

    num_iterations: int = 1000
    """Maximum number of trees; early stopping chooses how many are used."""
    learning_rate: float = 0.1
    """Factor on the leaf values of each tree."""
    num_leaves: int = 31
    """Maximum number of leaves of a tree."""
    max_depth: int = 6
    """Maximum depth of a tree."""
    min_data_in_leaf: int = 100
    """Minimum number of training candidates in a leaf."""
    feature_fraction: float = 0.5
    """Fraction of the columns sampled for each tree, with the seed `fit.seed`."""


def grow_trees(
    columns: NDArray[np.float32],
    labels: NDArray[np.float32],
    val_columns: NDArray[np.float32],
    val_labels: NDArray[np.float32],
    config: TreeConfig,
    num_categories: int = 0,
) -> Booster:
    """Train trees that predict a binary label.

    The number of trees is the best on the validation examples. The seed of LightGBM is
    sampled from PyTorch's generator.

    Args:
        columns: (N, X) columns of the training examples.
        labels: (N,) labels of the training examples, 0 or 1.
        val_columns: (M, X) columns of the validation examples.
        val_labels: (M,) labels of the validation examples.
        config: Options of the trees.
        num_categories: Number of categorical columns, which come first.
    """
    import lightgbm

    data = lightgbm.Dataset(
        columns, labels, categorical_feature=list(range(num_categories))
    )
    parameters = {
        "objective": "binary",
        "metric": "binary_logloss",
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
        valid_sets=[data.create_valid(val_columns, val_labels)],
        callbacks=[stop],
    )
    text = booster.model_to_string(num_iteration=booster.best_iteration)
    return lightgbm.Booster(model_str=text)


def predict_log_odds(booster: Booster, columns: Tensor) -> Tensor:
    """Return the (N,) float64 log-odds of the label for (N, X) columns."""
    if not len(columns):
        return columns.new_zeros(0, dtype=torch.float64)
    log_odds = booster.predict(
        columns.cpu().numpy(), raw_score=True, num_threads=torch.get_num_threads()
    )
    return torch.from_numpy(log_odds).to(columns.device)
