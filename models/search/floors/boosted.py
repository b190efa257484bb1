"""Gradient-boosted trees (LightGBM) over the features of each candidate.

    python -m jobs.train --config jobs/configs/search/boosted.yaml --tables TABLES
        --storage runs --name boosted

The trees learn the click from the train split. Boosting stops when the log loss on the
val split has not fallen for `EARLY_STOPPING_ROUNDS` trees, and keeps the best number of
trees. The checkpoint holds LightGBM's model text as bytes in safetensors, without
pickle. The model reads no text vectors: its columns are the candidate's features, and
counts of the user's earlier clicks that resemble the candidate.

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

from models.boosting import TreeConfig, grow_trees, predict_log_odds
from models.config import check_positive
from models.custom_features import Category
from models.layers.standardised import Standardised
from models.search.catalogue import NO_QUERY, SearchCatalogue
from models.search.data import SearchBatch
from models.search.model import SearchModel
from models.storage.tables import UserError

if TYPE_CHECKING:
    from lightgbm import Booster

MAX_SPLIT_VALUES = 255
"""Number of values up to which a category is a split column of the trees."""


@dataclass
class BoostedConfig(TreeConfig):
    """Options of gradient-boosted trees for search."""

    max_history: int = 100
    """Number of latest behaviours in which clicks are counted."""

    # Options that datasets and requests of all search models need
    window_overlap: ClassVar[float] = 1.0
    batch_unit: ClassVar[str] = "requests"
    reads_history_queries: ClassVar[bool] = False
    reads_times: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(self, ["max_history"])


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
        # a served request's missing features are filled with its means
        self.scale = Standardised(catalogue.feature_mean, catalogue.feature_std)
        index = {name: i for i, name in enumerate(catalogue.features)}
        readable = [
            name
            for name in catalogue.features
            if name not in catalogue.unknown_when_ranking
        ]
        categories = {c.name: c for c in catalogue.custom_features.categories}
        category_names = [name for name in readable if name in categories]
        split_names = [
            name
            for name in category_names
            if categories[name].rows <= MAX_SPLIT_VALUES + 1
        ]
        number_names = [name for name in readable if name not in categories]
        self.split_categories = [categories[name] for name in split_names]
        self.split_index = [index[name] for name in split_names]
        self.number_index = [index[name] for name in number_names]
        self.counted_index = [index[name] for name in category_names]
        """Features whose equal values are counted in the history: all categories."""
        self.booster: Booster | None = None
        # one (rows,) tensor per split category: code of the catalogue -> code in
        # training
        self.training_codes = [torch.arange(c.rows) for c in self.split_categories]

    def columns(self, batch: SearchBatch) -> Tensor:
        """Return the columns (N, X) float32 that the trees read.

        The split categories come first, NaN where unknown. Numbers follow, NaN where
        missing. The last columns count the user's earlier clicks: all clicks, clicks on
        the same item, clicks after the same query, and for each category the clicks
        with the same value.
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
        return predict_log_odds(self.booster, self.columns(batch))[:, None]

    def fit_in_one_pass(
        self, train: Iterable[SearchBatch], val: Iterable[SearchBatch]
    ) -> None:
        """Grow trees on the train split until the log loss on val stops falling.

        Raises:
            UserError: If all training candidates have the same label, or val is empty.
        """
        train_columns, train_labels = self._concat_batches(train)
        if train_labels.all() or not train_labels.any():
            raise UserError(
                f"all {len(train_labels):,} training candidates have the same "
                f"'{self.labels[0]}'"
            )
        val_columns, val_labels = self._concat_batches(val)
        if not len(val_labels):
            raise UserError("the val split is empty, so boosting cannot stop")
        self.booster = grow_trees(
            train_columns,
            train_labels,
            val_columns,
            val_labels,
            self.config,
            num_categories=len(self.split_categories),
        )

    def _concat_batches(
        self, batches: Iterable[SearchBatch]
    ) -> tuple[NDArray, NDArray]:
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
        """Load the trees from the result of `get_extra_state`.

        Tables that extend the tables of training may have more values per category.
        Values are matched by name; a value that was not in training counts as unknown.

        Raises:
            UserError: If the trees split by other categories than the tables have.
        """
        from lightgbm import Booster

        content = json.loads(bytes(state.numpy()))
        names = [category.name for category in self.split_categories]
        if names != list(content["values"]):
            raise UserError(
                f"the trees split by the categories {list(content['values'])}, but the "
                f"tables have {names} as the categories with at most "
                f"{MAX_SPLIT_VALUES} values"
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
    """Map the codes of a category to its codes in training.

    Hashed values have the same code in all tables.

    Args:
        category: Category of the present tables.
        trained: Values of the category in training, where their codes count from 1.

    Returns:
        (rows,) code in training of each code of `category`; 0 for unknown values.
    """
    if category.buckets:
        return torch.arange(category.rows)
    code = {value: i for i, value in enumerate(trained, 1)}
    return torch.tensor([0, *(code.get(value, 0) for value in category.values)])
