"""Gradient-boosted trees over the features of each candidate: what most teams rank searches with today.

    python -m jobs.train --config jobs/configs/search/boosted.yaml --tables TABLES --storage runs --name boosted

scikit-learn grows the trees in one pass (`fit_counts`), on clicks of the train split. They are kept as tensors, in
safetensors as any weights, and read by torch, so that a checkpoint is no pickle and serving needs no scikit-learn.
It reads no text: of a candidate its features, and how often the user clicked before in ways that are like it.

Shapes: `N` candidates, `B` rows, `T` behaviours, `C` categories, `X` columns, `M` trees of up to `n` nodes each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from models.config import check_least, check_positive
from models.own_features import Standardised
from models.search.data import NO_QUERY, SearchCatalogue
from models.tables import UserError

Batch = dict[str, Tensor]

CODES = 256
"""Numbers of a category's values that scikit-learn takes, 0 for an unknown one among them; a category of more is not
split by its values, but clicks of the same value are counted."""
CHECKED = 2_000
"""Training rows on which torch's scores are held against scikit-learn's."""


@dataclass
class BoostedConfig:
    """Gradient-boosted trees. Names and defaults are those of scikit-learn's HistGradientBoostingClassifier, but for
    the depth."""

    max_history: int = 100
    """Latest behaviours among which clicks are counted."""
    max_iter: int = 100
    """Trees."""
    learning_rate: float = 0.1
    """Factor on what each tree adds."""
    max_leaf_nodes: int = 31
    """Leaves of a tree at most."""
    max_depth: int = 8
    """Splits on the way to a leaf at most."""
    min_samples_leaf: int = 20
    """Training candidates in a leaf at least."""
    l2_regularization: float = 0.0
    """Weight of the leaves' squared values."""
    max_features: float = 1.0
    """Share of the columns that each split chooses from; below 1 they are drawn by `fit.seed`."""

    # What examples and requests ask of every search model
    window_overlap: ClassVar[float] = 1.0
    batch_of: ClassVar[str] = "requests"
    history_pairs: ClassVar[bool] = False
    reads_times: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(
            self, ("max_history", "max_iter", "max_depth", "min_samples_leaf")
        )
        check_least(self, ("max_leaf_nodes",), 2)
        check_least(self, ("learning_rate", "l2_regularization"), 0)
        if not 0 < self.max_features <= 1:
            raise ValueError(
                f"max_features {self.max_features} is not in (0, 1]; give a share, 1 for all"
            )


class Boosted(nn.Module):
    """See the module. Scores are of the first label, the click."""

    feature: Tensor
    threshold: Tensor
    below: Tensor
    missing_left: Tensor
    code_left: Tensor
    value: Tensor
    start: Tensor
    split_by: Tensor

    def __init__(self, config: BoostedConfig, catalogue: SearchCatalogue) -> None:
        super().__init__()
        self.config, self.labels = config, catalogue.labels[:1]
        self.scale = Standardised(
            catalogue.feature_mean, catalogue.feature_std
        )  # of features that are not given
        place = {name: number for number, name in enumerate(catalogue.features)}
        known = [
            name
            for name in catalogue.features
            if name not in catalogue.unknown_when_ranking
        ]
        rows = {category.name: category.rows for category in catalogue.own.categories}
        split_by = [name for name in known if name in rows and rows[name] <= CODES]
        self.same = [place[name] for name in known if name in rows]
        """Features whose equal values count as like: the categories."""
        self.categories = len(split_by)
        order = [
            place[name]
            for name in (*split_by, *(name for name in known if name not in rows))
        ]
        self.register_buffer(
            "split_by", torch.tensor(order, dtype=torch.long), persistent=False
        )
        trees, nodes = config.max_iter, 2 * config.max_leaf_nodes - 1
        self.register_buffer(
            "feature", torch.zeros(trees, nodes, dtype=torch.long)
        )  # (M, n) column of each split
        self.register_buffer(
            "threshold", torch.zeros(trees, nodes, dtype=torch.float64)
        )  # (M, n) up to it to the left
        self.register_buffer(
            "below", torch.zeros(2, trees, nodes, dtype=torch.long)
        )  # right, left; a leaf: itself
        self.register_buffer(
            "missing_left", torch.zeros(trees, nodes, dtype=torch.bool)
        )  # where NaN goes
        of_codes = (trees, nodes, CODES) if split_by else (0,)
        self.register_buffer(
            "code_left", torch.zeros(of_codes, dtype=torch.bool)
        )  # where a category's values go
        self.register_buffer(
            "value", torch.zeros(trees, nodes, dtype=torch.float64)
        )  # (M, n) what a leaf adds
        self.register_buffer(
            "start", torch.zeros(1, dtype=torch.float64)
        )  # the log-odds of a click

    def columns(self, batch: Batch) -> Tensor:
        """(N, X) float64: categories first, unknown values and missing numbers as NaN, then counts of earlier clicks
        of the user: all, of the same item, after the same query, and of each category's same value."""
        features, request = batch["features"], batch["candidate_request"]
        row, before = (
            batch["request_row"][request],
            batch["request_end"][request, None],
        )  # (N,), (N, 1)
        earlier = (
            torch.arange(batch["history"].shape[1], device=row.device) < before
        )  # (N, T)
        query = batch["request_query"][request, None]

        def clicks(alike: Tensor) -> Tensor:
            return (earlier & alike).sum(1)

        counts = [
            before[:, 0],
            clicks(batch["history"][row] == batch["candidate"][:, None]),
        ]
        counts.append(
            clicks((batch["history_query"][row] == query) & (query != NO_QUERY))
        )
        for place in self.same:
            own = features[:, place, None]
            counts.append(
                clicks((batch["history_features"][row, :, place] == own) & (own > 0))
            )
        read = features[:, self.split_by.to(features.device)].double()
        codes = read[:, : self.categories]
        known = torch.where(codes > 0, codes, torch.nan)
        return torch.cat(
            [known, read[:, self.categories :], torch.stack(counts, 1).double()], 1
        )

    def logits(self, columns: Tensor) -> Tensor:
        """(N,) float64: the log-odds of a click, each of `columns` (N, X) taken through all trees at once."""
        trees, nodes = self.value.shape
        first = (
            torch.arange(trees, device=columns.device) * nodes
        )  # (M,) the trees' roots
        feature, threshold, value = (
            self.feature.view(-1),
            self.threshold.view(-1),
            self.value.view(-1),
        )
        missing_left, below = self.missing_left.view(-1), self.below.view(2, -1)
        at = first.expand(
            len(columns), trees
        )  # (N, M) where each candidate is in each tree
        for _ in range(self.config.max_depth):
            column = feature[at]
            found = columns.gather(1, column)
            left = torch.where(found.isnan(), missing_left[at], found <= threshold[at])
            if self.categories:
                code = torch.where(
                    column < self.categories, found.nan_to_num(), 0
                ).long()
                left = torch.where(
                    column < self.categories,
                    self.code_left.view(-1)[at * CODES + code],
                    left,
                )
            at = first + below[left.long(), at]
        return self.start + value[at].sum(1)

    def score(self, batch: Batch) -> Tensor:
        """(N, 1) logits of a click on every candidate."""
        return self.logits(self.columns(batch))[:, None]

    def fit_counts(self, batches: Iterable[Batch]) -> None:
        """Grows the trees on the batches of the train split; called once in place of training. UserError where all
        results are clicked, or none is; RuntimeError where torch reads the trees otherwise than scikit-learn."""
        parts = []
        for batch in batches:
            real = batch.get(
                "real", torch.ones(len(batch["candidate"]), dtype=torch.bool)
            )
            parts.append((self.columns(batch)[real], batch["labels"][real, 0]))
        columns, clicked = (torch.cat(part) for part in zip(*parts, strict=True))
        x, y = columns.numpy(), clicked.numpy()
        if y.all() or not y.any():
            raise UserError(
                f"all {len(y):,} training candidates have the same '{self.labels[0]}'; check the labels"
            )
        trees, seen = grow(
            x, y, self.categories, self.config, seed=int(torch.randint(2**31 - 1, ()))
        )
        self.start.fill_(float(trees._baseline_prediction.item()))
        for number, (tree,) in enumerate(trees._predictors):
            self.take(number, tree, seen)
        sample = columns[:CHECKED]
        found = self.logits(sample.to(self.value.device)).cpu().numpy()
        if not np.allclose(
            found,
            trees.decision_function(ordinals(sample.numpy(), seen)),
            rtol=1e-9,
            atol=1e-9,
        ):
            raise RuntimeError(
                "torch does not score as scikit-learn; its trees are of a form that is not known here"
            )

    def take(self, number: int, tree: Any, seen: list[np.ndarray]) -> None:
        """Writes a tree of scikit-learn into the tensors; `seen` (C,) has the values of each category, ascending."""
        nodes = tree.nodes
        count = len(nodes)
        leaf, missing = (
            nodes["is_leaf"].astype(bool),
            nodes["missing_go_to_left"].astype(bool),
        )
        own = np.arange(count)
        right, left = (
            np.where(leaf, own, nodes[side]).astype(np.int64)
            for side in ("right", "left")
        )
        columns = {
            "feature": nodes["feature_idx"].astype(np.int64),
            "threshold": nodes["num_threshold"],
            "missing_left": missing,
            "value": np.where(leaf, nodes["value"], 0),
        }
        for name, values in columns.items():
            getattr(self, name)[number, :count] = torch.from_numpy(
                np.ascontiguousarray(values)
            )
        self.below[:, number, :count] = torch.from_numpy(np.stack([right, left]))
        for node in np.flatnonzero(nodes["is_categorical"] & ~leaf):
            codes = seen[nodes["feature_idx"][node]]
            goes = np.full(
                CODES, missing[node]
            )  # values that training has not seen go where missing ones do
            bits = (
                tree.raw_left_cat_bitsets[nodes["bitset_idx"][node]]
                .astype("<u4")
                .view(np.uint8)
            )
            goes[codes.astype(np.int64)] = np.unpackbits(bits, bitorder="little")[
                : len(codes)
            ]
            self.code_left[number, node] = torch.from_numpy(goes)


def ordinals(columns: np.ndarray, seen: list[np.ndarray]) -> np.ndarray:
    """The columns with each category's value as its place among those `seen`, NaN for another one."""
    columns = columns.copy()
    for place, codes in enumerate(seen):
        found = np.searchsorted(codes, columns[:, place]).clip(
            max=max(0, len(codes) - 1)
        )
        there = (
            codes[found] == columns[:, place]
            if len(codes)
            else np.zeros(len(columns), bool)
        )
        columns[:, place] = np.where(there, found, np.nan)
    return columns


def grow(
    x: np.ndarray, y: np.ndarray, categories: int, config: BoostedConfig, seed: int
) -> tuple[Any, list[np.ndarray]]:
    """scikit-learn's classifier of `y` (N,) by `x` (N, X), and the values that it has seen of each category."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # of training alone

    seen = [np.unique(column[~np.isnan(column)]) for column in x[:, :categories].T]
    trees = HistGradientBoostingClassifier(
        max_iter=config.max_iter,
        learning_rate=config.learning_rate,
        max_leaf_nodes=config.max_leaf_nodes,
        max_depth=config.max_depth,
        min_samples_leaf=config.min_samples_leaf,
        l2_regularization=config.l2_regularization,
        max_features=config.max_features,
        categorical_features=list(range(categories)) or None,
        early_stopping=False,
        random_state=seed,
    )
    return trees.fit(ordinals(x, seen), y), seen
