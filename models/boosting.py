"""Gradient-boosted trees (LightGBM) with early stopping on validation.

A model with trees saves LightGBM's model text in its checkpoint, without pickle.

Shapes: `N` examples, `X` columns, `K` labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from core.errors import UserError
from core.options import STRICT, NamedConfig
from models.model import Model

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
) -> list[Booster | None]:
    """Train trees that predict each binary label, or that rank lists by lambdarank.

    The number of trees is the best on the validation examples, by log loss, or by
    NDCG@10 of lists. The seed of LightGBM is sampled from PyTorch's generator.

    Args:
        columns: (N, X) columns of the training examples.
        labels: (N, K) labels of the training examples, 0 or 1, or grades in lists.
        val_columns: (M, X) columns of the validation examples.
        val_labels: (M, K) labels of the validation examples.
        config: Options of the trees.
        num_categories: Number of categorical columns, which come first.
        sizes: Sizes of the lists in training and in validation, to rank.

    Returns:
        (K,) trees; None if all training examples have the same binary label.
    """
    import lightgbm

    train_sizes, val_sizes = sizes or (None, None)
    data = lightgbm.Dataset(
        columns, group=train_sizes, categorical_feature=list(range(num_categories))
    )
    val = data.create_valid(val_columns, group=val_sizes)
    parameters = {
        "objective": "lambdarank" if sizes else "binary",
        "metric": "ndcg" if sizes else "binary_logloss",
        "eval_at": 10,
        "learning_rate": config.learning_rate,
        "num_leaves": config.num_leaves,
        "max_depth": config.max_depth,
        "min_data_in_leaf": config.min_data_in_leaf,
        "feature_fraction": config.feature_fraction,
        "num_threads": torch.get_num_threads(),
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }
    boosters: list[Booster | None] = []
    for label, val_label in zip(labels.T, val_labels.T, strict=True):
        if sizes is None and label.min() == label.max():
            boosters.append(None)
            continue
        data.set_label(label)
        val.set_label(val_label)
        booster = lightgbm.train(
            {**parameters, "seed": int(torch.randint(2**31 - 1, ()))},
            data,
            config.num_iterations,
            valid_sets=[val],
            callbacks=[lightgbm.early_stopping(EARLY_STOPPING_ROUNDS, verbose=False)],
        )
        text = booster.model_to_string(num_iteration=booster.best_iteration)
        boosters.append(lightgbm.Booster(model_str=text))
    return boosters


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


class BoostedTrees(Model):
    """A model with one LightGBM ensemble per label; subclasses define the columns."""

    trains_by_gradient: ClassVar[bool] = False
    stops_early: ClassVar[bool] = True
    requirements = ("lightgbm",)
    boosters: Sequence[Booster | None] = ()
    """(K,) ensembles; None for a label that was the same in all training examples."""

    def columns(self, batch: Any) -> Tensor:
        """Return the columns (N, X) float32 that the trees read."""
        raise NotImplementedError

    def score(self, batch: Any) -> Tensor:
        """Return (N, K) float64 log-odds: sums of leaf values, or of a label's rate."""
        assert self.boosters, "fit or load the trees first"
        columns = self.columns(batch)
        scores = []
        for number, booster in enumerate(self.boosters):
            if booster is None:
                rate = torch.tensor(self.train_rates[number], dtype=torch.float64)
                logit = rate.logit(eps=1e-6).to(columns.device)
                scores.append(logit.expand(len(columns)))
            else:
                scores.append(predict_raw(booster, columns))
        return torch.stack(scores, 1)

    def trees_to_content(self, trees: list[str | None]) -> Any:
        """Return the JSON content of a checkpoint, given LightGBM's model texts."""
        return trees

    def trees_from_content(self, content: Any) -> list[str | None]:
        """Return the texts from which `trees_to_content` made the content."""
        return list(content)

    def get_extra_state(self) -> Tensor:
        """Return the trees as bytes of JSON, none before training."""
        if not self.boosters:
            return torch.zeros(0, dtype=torch.uint8)
        trees = [
            None if booster is None else booster.model_to_string()
            for booster in self.boosters
        ]
        text = json.dumps(self.trees_to_content(trees))
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Load the trees from the result of `get_extra_state`."""
        from lightgbm import Booster

        trees = self.trees_from_content(json.loads(bytes(state.numpy())))
        self.boosters = [
            None if text is None else Booster(model_str=text) for text in trees
        ]
