"""Gradient-boosted trees (LightGBM) over the features of each candidate.

    python -m jobs.train --config jobs/configs/search/boosted.yaml --tables TABLES
        --storage runs --name boosted

Two ensembles learn from the train split: one predicts the click, and one ranks lists by
LightGBM's lambdarank, with the sum of a result's labels as its grade. Each stops when
its metric on the val split has not improved for `EARLY_STOPPING_ROUNDS` trees, and
keeps the best number of trees. The ensemble with the higher GAUC on val is the model;
scores of lambdarank are mapped to log-odds of a click by a line that is fitted on val.

The checkpoint holds LightGBM's model text as bytes in safetensors, without pickle. The
model reads no text vectors. Its columns are the candidate's features, its numbers
relative to the list, and counts of the user's earlier clicks that resemble the
candidate.

Shapes: `N` candidates, `B` rows, `T` behaviours, `C` split categories, `X` columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.errors import UserError
from core.options import STRICT
from core.schemas import Category
from models.boosting import (
    BoostedTrees,
    TreeConfig,
    concat_batches,
    grow_trees,
    predict_raw,
)
from models.metrics.ranking_metrics import rank_in_request, request_auc
from models.search.catalogue import NO_QUERY, SearchCatalogue
from models.search.ranker import SearchModel
from models.search.requests import SearchBatch

HOUR_MS = 3_600_000

MAX_SPLIT_VALUES = 255
"""Number of values up to which a category is a split column of the trees."""

MAX_LIST = 10_000
"""Number of results of a search from which LightGBM's lambdarank can learn."""


@dataclass(config=STRICT)
class BoostedConfig(TreeConfig):
    """Options of gradient-boosted trees for search."""


class Boosted(BoostedTrees, SearchModel):
    """A LightGBM booster that scores candidates by the log-odds of the first label."""

    name = "boosted"
    config_class = BoostedConfig
    example_unit = "request"
    extra_inputs: ClassVar[Mapping[str, bool]] = {}
    reads_first_label = True

    def __init__(self, config: BoostedConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        self.labels = catalogue.labels[:1]
        index = {name: i for i, name in enumerate(catalogue.features)}
        category_names, number_names = catalogue.readable_features()
        categories = {c.name: c for c in catalogue.custom_features.categories}
        split_names = [
            name
            for name in category_names
            if categories[name].rows <= MAX_SPLIT_VALUES + 1
        ]
        self.split_categories = [categories[name] for name in split_names]
        self.split_index = [index[name] for name in split_names]
        self.number_index = [index[name] for name in number_names]
        self.counted_index = [index[name] for name in category_names]
        """Features whose equal values are counted in the history: all categories."""
        self.num_types = len(catalogue.session_types)
        self.reads_times = self.num_types > 0
        self.slope, self.intercept = 1.0, 0.0
        """Line from a sum of leaf values to log-odds of a click."""
        # one (rows,) tensor per split category: code of the catalogue -> code in
        # training
        self.training_codes = [torch.arange(c.rows) for c in self.split_categories]

    def columns(self, batch: SearchBatch) -> Tensor:
        """Return the columns (N, X) float32 that the trees read.

        The split categories come first, NaN where unknown. Numbers follow, NaN where
        missing, then the numbers relative to the list. The next columns count the
        user's earlier clicks: all clicks, clicks on the same item, clicks after the
        same query, and for each category the clicks with the same value. If the log has
        sessions, the last columns are the candidate's counts in them by type, and the
        number of behaviours and the hours since its latest one, NaN without one.
        """
        features, request = batch.features, batch.candidate_request
        row = batch.request_row[request]  # (N,)
        end = batch.request_end[request, None]  # (N, 1)
        position = torch.arange(batch.history.shape[1], device=row.device)
        is_before = position < end  # (N, T)
        earlier = is_before & (batch.history_type[row] == 0)
        query = batch.request_query[request, None]
        same_item = batch.history[row] == batch.candidate[:, None]
        same_query = (batch.history_query[row] == query) & (query != NO_QUERY)
        counts = [
            earlier.sum(1),
            (earlier & same_item).sum(1),
            (earlier & same_query).sum(1),
        ]
        for i in self.counted_index:
            value = features[:, i, None]
            same_value = (batch.history_features[row, :, i] == value) & (value > 0)
            counts.append((earlier & same_value).sum(1))
        if self.num_types:
            opened = is_before & same_item & (batch.history_type[row] > 0)
            for number in range(1, self.num_types + 1):
                counts.append((opened & (batch.history_type[row] == number)).sum(1))
            # (N,) one more than the position of the latest one, 0 without one
            latest = functional.pad(opened * (position + 1), (1, 0)).amax(1)
            times = functional.pad(batch.history_time, (1, 0))[row, latest]
            hours = (batch.request_time[request] - times) / HOUR_MS
            for since in (end[:, 0] - latest, hours):
                counts.append(torch.where(latest > 0, since, torch.nan))
        codes = select_columns(features, self.split_index)
        if self.split_categories:
            columns = [
                table.to(codes.device)[code.long()]
                for table, code in zip(self.training_codes, codes.T, strict=True)
            ]
            codes = torch.stack(columns, 1).float()
        codes = torch.where(codes > 0, codes, torch.nan)
        numbers = select_columns(features, self.number_index)
        relative = relate_to_list(numbers, request)
        counts_by_click = torch.stack(counts, 1).float()
        return torch.cat([codes, numbers, relative, counts_by_click], 1)

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, 1) float64 log-odds of a click."""
        return self.slope * super().score(batch) + self.intercept

    def fit_in_one_pass(
        self, train: Iterable[SearchBatch], val: Iterable[SearchBatch]
    ) -> None:
        """Grow trees that predict clicks, trees that rank, and keep the better ones."""

        def read(batch: SearchBatch) -> tuple[Tensor, Tensor, Tensor]:
            """Return columns (N, X), labels (N, K) and the sizes of lists."""
            valid = batch.candidate_valid
            request = batch.candidate_request[valid]
            _, sizes = request.unique_consecutive(return_counts=True)
            return self.columns(batch)[valid], batch.labels[valid].float(), sizes

        columns, labels, sizes = concat_batches(train, read)
        val_columns, val_labels, val_sizes = concat_batches(val, read)
        click, val_click = labels[:, :1], val_labels[:, :1]
        num_categories = len(self.split_categories)
        (pointwise,) = grow_trees(
            columns, click, val_columns, val_click, self.config, num_categories
        )
        if pointwise is None:
            raise UserError(
                f"all {len(click):,} training candidates have the same "
                f"'{self.labels[0]}'"
            )
        self.boosters = [pointwise]
        grade, val_grade = labels.sum(1), val_labels.sum(1)
        used, used_sizes = select_ranked(grade, sizes)
        val_used, val_used_sizes = select_ranked(val_grade, val_sizes)
        if not len(val_used_sizes):
            return
        (ranker,) = grow_trees(
            columns[used],
            grade[used, None],
            val_columns[val_used],
            val_grade[val_used, None],
            self.config,
            num_categories,
            (used_sizes, val_used_sizes),
        )
        assert ranker is not None
        gaucs = []  # of both; `scores` are those of lambdarank afterwards
        request = torch.from_numpy(np.repeat(np.arange(len(val_sizes)), val_sizes))
        for booster in (pointwise, ranker):
            scores = predict_raw(booster, torch.from_numpy(val_columns))
            auc, valid = request_auc(scores, torch.from_numpy(val_click[:, 0]), request)
            gaucs.append(float(auc[valid].mean()))
        print(f"val gauc: pointwise {gaucs[0]:.4f}, lambdarank {gaucs[1]:.4f}")
        if gaucs[1] > gaucs[0]:
            from sklearn.linear_model import LogisticRegression

            self.boosters = [ranker]
            line = LogisticRegression().fit(scores[:, None].numpy(), val_click[:, 0])
            self.slope = max(float(line.coef_[0, 0]), 1e-3)
            self.intercept = float(line.intercept_[0])

    def trees_to_content(self, trees: list[str | None]) -> dict[str, Any]:
        """Return the trees with the categories' values and the line to log-odds."""
        return {
            "trees": trees[0],
            "values": {c.name: list(c.values) for c in self.split_categories},
            "log_odds": [self.slope, self.intercept],
        }

    def trees_from_content(self, content: dict[str, Any]) -> list[str | None]:
        """Return the trees of a checkpoint, and set the values of its categories.

        The slope and intercept that turn scores into log-odds are set, too.

        Tables that extend the tables of training may have more values per category.
        Values are matched by name; a value that was not in training counts as unknown.
        """
        names = [category.name for category in self.split_categories]
        if names != list(content["values"]):
            raise UserError(
                f"the trees split by the categories {list(content['values'])}, but the "
                f"tables have {names} as the categories with at most "
                f"{MAX_SPLIT_VALUES} values"
            )
        self.slope, self.intercept = content["log_odds"]
        self.training_codes = [
            map_codes(category, content["values"][category.name])
            for category in self.split_categories
        ]
        return [content["trees"]]


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


def relate_to_list(values: Tensor, request: Tensor) -> Tensor:
    """Return values relative to the other values of their lists.

    Args:
        values: (N, C) numbers, NaN if missing.
        request: (N,) request of each row.

    Returns:
        (N, 2 C) float32 differences to the list's mean, then ranks from 0 in the list;
        NaN if missing.
    """
    num_rows, num_columns = values.shape
    num_requests = int(request.max()) + 1 if num_rows else 0
    zeros = values.new_zeros(num_requests, num_columns, dtype=torch.float64)
    sums = zeros.index_add(0, request, values.nan_to_num(0.0).double())
    counts = zeros.index_add(0, request, (~values.isnan()).double())
    difference = values - (sums / counts)[request]
    # one list for each request and column
    column = torch.arange(num_columns, device=values.device)[:, None]
    lists = (column * num_requests + request).flatten()
    rank = rank_in_request(values.T.flatten(), lists).view(num_columns, num_rows).T
    rank = torch.where(values.isnan(), torch.nan, rank)
    return torch.cat([difference, rank], 1).float()


def select_ranked(grade: NDArray, sizes: NDArray) -> tuple[NDArray, NDArray]:
    """Select the results from which lambdarank learns.

    Lists without a positive are left out, and longer lists than `MAX_LIST` are cut.

    Args:
        grade: (N,) grades of the results, list after list.
        sizes: Sizes of the lists.

    Returns:
        (N,) mask of the selected results, and the sizes of their lists.
    """
    row = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]
    has_positive = np.bincount(row, grade, minlength=len(sizes)) > 0
    if sizes.max(initial=0) > MAX_LIST:
        print(f"lambdarank learns from the first {MAX_LIST:,} results of a search")
    is_used = has_positive[row] & (place < MAX_LIST)
    return is_used, np.minimum(sizes, MAX_LIST)[has_positive]
