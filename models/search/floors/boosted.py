"""Gradient-boosted trees (LightGBM) over the features of each candidate.

    python -m jobs.train --config jobs/configs/search/boosted.yaml --tables TABLES --storage runs --name boosted

The trees learn the click from the train split. Boosting stops when the log loss on the
val split has not fallen for `early_stopping_rounds` trees, and keeps the best number of
trees. The checkpoint holds LightGBM's model text as bytes in safetensors, so it is no
pickle. The model reads no text: it reads a candidate's features, and how many of the
user's earlier clicks resemble the candidate.

Shapes: `N` candidates, `B` rows, `T` behaviours, `C` split categories, `X` columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.config import check_least, check_positive
from models.layers.standardised import Standardised
from models.own_features import Category
from models.search.catalogue import NO_QUERY, SearchCatalogue
from models.search.data import SearchBatch
from models.search.model import SearchModel
from models.storage.tables import UserError

if TYPE_CHECKING:
    from lightgbm import Booster

MAX_SPLIT_VALUES = 255
"""Largest number of values of a category that trees split by."""


@dataclass
class BoostedConfig:
    """Options of gradient-boosted trees, with LightGBM's names."""

    max_history: int = 100
    """Latest behaviours among which clicks are counted."""
    num_iterations: int = 1000
    """Trees at most; validation chooses how many are used."""
    early_stopping_rounds: int = 30
    """Trees without a lower log loss on val after which boosting stops."""
    learning_rate: float = 0.1
    """Factor on the values of each tree."""
    num_leaves: int = 31
    """Leaves of a tree at most."""
    max_depth: int = 6
    """Splits on the way to a leaf at most."""
    min_data_in_leaf: int = 100
    """Training candidates in a leaf at least."""
    lambda_l2: float = 0.0
    """Weight of the leaves' squared values."""
    feature_fraction: float = 0.5
    """Share of the columns that each tree chooses from, drawn by `fit.seed`."""

    # What examples and requests ask of every search model
    window_overlap: ClassVar[float] = 1.0
    batch_unit: ClassVar[str] = "requests"
    reads_history_queries: ClassVar[bool] = False
    reads_times: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive = (
            "max_history",
            "num_iterations",
            "early_stopping_rounds",
            "max_depth",
            "min_data_in_leaf",
        )
        check_positive(self, positive)
        check_least(self, ("num_leaves",), 2)
        check_least(self, ("learning_rate", "lambda_l2"), 0)
        if not 0 < self.feature_fraction <= 1:
            raise ValueError(
                f"feature_fraction {self.feature_fraction} is not in (0, 1]; "
                "give a share, 1 for all"
            )


class Boosted(SearchModel):
    """A LightGBM booster that scores candidates by the log-odds of the first label."""

    name = "boosted"
    config_class = BoostedConfig
    example_unit = "request"
    extra_inputs: ClassVar[Mapping[str, bool]] = {}
    trains_by_gradient = False
    stops_early = True
    reads_first_label = True
    requirements = ("lightgbm",)

    def __init__(self, config: BoostedConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        self.labels, self.masks = catalogue.labels[:1], [None]
        # what a served request's missing features are filled with
        self.scale = Standardised(catalogue.feature_mean, catalogue.feature_std)
        index = {name: i for i, name in enumerate(catalogue.features)}
        known = [
            name
            for name in catalogue.features
            if name not in catalogue.unknown_when_ranking
        ]
        categories = {c.name: c for c in catalogue.own.categories}
        split = [
            name
            for name in known
            if name in categories and categories[name].rows <= MAX_SPLIT_VALUES + 1
        ]
        numbers = [name for name in known if name not in categories]
        self.split_categories = [categories[name] for name in split]
        self.split_index = [index[name] for name in split]
        self.number_index = [index[name] for name in numbers]
        self.counted_index = [index[name] for name in known if name in categories]
        """Features whose equal values are counted in the history: all categories."""
        self.booster: Booster | None = None
        # (C,) tensors: the training's code of each of the catalogue's codes
        self.training_codes = [torch.arange(c.rows) for c in self.split_categories]

    def columns(self, batch: SearchBatch) -> Tensor:
        """Return (N, X) float32 columns of the trees.

        Split categories come first, NaN where unknown, then numbers, NaN where missing,
        then counts of the user's earlier clicks: all, on the same item, after the same
        query, and with the same value of each category.
        """
        features, request = batch.features, batch.candidate_request
        row = batch.request_row[request]  # (N,)
        end = batch.request_end[request, None]  # (N, 1)
        position = torch.arange(batch.history.shape[1], device=row.device)
        earlier = position < end  # (N, T)
        query = batch.request_query[request, None]
        same_item = batch.history[row] == batch.candidate[:, None]
        same_query = (batch.history_query[row] == query) & (query != NO_QUERY)
        counts = [
            end[:, 0],
            (earlier & same_item).sum(1),
            (earlier & same_query).sum(1),
        ]
        for i in self.counted_index:
            value = features[:, i, None]
            same_value = (batch.history_features[row, :, i] == value) & (value > 0)
            counts.append((earlier & same_value).sum(1))
        codes = select_columns(features, self.split_index)
        if self.split_categories:
            columns = [
                table.to(codes.device)[code.long()]
                for table, code in zip(self.training_codes, codes.T, strict=True)
            ]
            codes = torch.stack(columns, 1).float()
        codes = torch.where(codes > 0, codes, torch.nan)
        numbers = select_columns(features, self.number_index)
        return torch.cat([codes, numbers, torch.stack(counts, 1).float()], 1)

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, 1) float64 log-odds of a click."""
        assert self.booster is not None, "fit or load the trees first"
        columns = self.columns(batch)
        if not len(columns):
            return columns.new_zeros(0, 1, dtype=torch.float64)
        logits = self.booster.predict(
            columns.cpu().numpy(), raw_score=True, num_threads=torch.get_num_threads()
        )
        return torch.from_numpy(logits).to(columns.device)[:, None]

    def fit_counts(
        self, train: Iterable[SearchBatch], val: Iterable[SearchBatch]
    ) -> None:
        """Grow the trees on batches of the train split; stop by the log loss on the val
        split.

        Raises:
            UserError: if all training candidates have the same label, or val is empty.
        """
        import lightgbm

        x, y = self._read(train)
        if y.all() or not y.any():
            raise UserError(
                f"all {len(y):,} training candidates have the same '{self.labels[0]}'; "
                "check the labels"
            )
        val_x, val_y = self._read(val)
        if not len(val_y):
            raise UserError(
                "the val split is empty, so boosting cannot stop; check the split of "
                "jobs.prepare"
            )
        data = lightgbm.Dataset(
            x, y, categorical_feature=list(range(len(self.split_categories)))
        )
        config = self.config
        parameters = {
            "objective": "binary",
            "metric": "binary_logloss",
            "learning_rate": config.learning_rate,
            "num_leaves": config.num_leaves,
            "max_depth": config.max_depth,
            "min_data_in_leaf": config.min_data_in_leaf,
            "lambda_l2": config.lambda_l2,
            "feature_fraction": config.feature_fraction,
            "seed": int(torch.randint(2**31 - 1, ())),
            "num_threads": torch.get_num_threads(),
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
        }
        stop = lightgbm.early_stopping(config.early_stopping_rounds, verbose=False)
        booster = lightgbm.train(
            parameters,
            data,
            config.num_iterations,
            valid_sets=[data.create_valid(val_x, val_y)],
            callbacks=[stop],
        )
        text = booster.model_to_string(num_iteration=booster.best_iteration)
        self.booster = lightgbm.Booster(model_str=text)

    def _read(self, batches: Iterable[SearchBatch]) -> tuple[NDArray, NDArray]:
        """Return the columns (N, X) and first labels (N,) of batches."""
        columns, labels = [], []
        for batch in batches:
            valid = batch.candidate_valid
            columns.append(self.columns(batch)[valid].cpu().numpy())
            labels.append(batch.labels[valid, 0].cpu().numpy())
        if not columns:
            return np.zeros((0, 0), np.float32), np.zeros(0, np.float32)
        return np.concatenate(columns), np.concatenate(labels).astype(np.float32)

    def get_extra_state(self) -> Tensor:
        """Return LightGBM's model text and the categories' values as bytes of JSON."""
        if self.booster is None:
            return torch.zeros(0, dtype=torch.uint8)
        state = {
            "trees": self.booster.model_to_string(),
            "values": {c.name: list(c.values) for c in self.split_categories},
        }
        return torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        )

    def set_extra_state(self, state: Any) -> None:
        """Load the trees from `get_extra_state`.

        Categories of tables that extend the training's may have other values: each
        value is found by name, and a value that training has not seen is unknown.

        Raises:
            UserError: if the tables' categories are not those that the trees split by.
        """
        from lightgbm import Booster

        content = json.loads(bytes(state.numpy()))
        names = [category.name for category in self.split_categories]
        if names != list(content["values"]):
            raise UserError(
                f"the trees split by the categories {list(content['values'])}, and those "
                f"of the tables with at most {MAX_SPLIT_VALUES} values are {names}; train "
                "anew"
            )
        self.booster = Booster(model_str=content["trees"])
        self.training_codes = [
            map_codes(category, content["values"][category.name])
            for category in self.split_categories
        ]


def select_columns(features: Tensor, index: list[int]) -> Tensor:
    """Return (N, len(index)) columns of `features` (N, F)."""
    return features.index_select(1, torch.tensor(index).long().to(features.device))


def map_codes(category: Category, trained: list[str]) -> Tensor:
    """Return (rows,) the training's code of each code of `category`, 0 for unknown ones.

    `trained` holds the values of the training, whose codes count from 1. Hashed values
    have the same code in all tables.
    """
    if category.buckets:
        return torch.arange(category.rows)
    code = {value: i for i, value in enumerate(trained, 1)}
    return torch.tensor([0, *(code.get(value, 0) for value in category.values)])
