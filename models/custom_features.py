"""Custom features: numbers and categories that a log provides.

    columns = {"num_bm25": pa.array([2.5, None])}
    read_features(info.custom, columns, 2)   # (2, X + G) float32

The features describe candidates and behaviours. jobs.prepare computes their statistics
and vocabularies from the training window only
(`pipelines/prepare/sequences/custom_features.py`). Tables store values as they are in
the log; training, evaluation and serving read the values through this module, whose
layers standardise numbers and embed categories.

Shapes: `n` values, `X` numbers, `G` categories, `O` columns that a layer reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from core.ids import hash_strings
from core.schemas import Category, CustomFeatures

CUSTOM_KEY = "own"
"""Key of the scales of custom features in a checkpoint."""

NUMBER, CATEGORY = "num_", "cat_"
"""Prefixes of the names of the features' columns."""

MAX_DEVIATIONS = 5.0
"""Standardised features are clipped to this many deviations from the mean."""

RowNames = Sequence[Sequence[str] | None]
"""Names of the rows of each embedding table, from row 1 on; None for a table whose rows
have no names."""


def read_codes(category: Category, strings: pa.Array) -> NDArray[np.int64]:
    """Return the (n,) codes of (n,) strings."""
    encoded = strings
    if not pa.types.is_dictionary(strings.type):
        encoded = strings.dictionary_encode()
    distinct = encoded.dictionary.cast(pa.large_string())
    if category.buckets:
        codes = hash_strings(distinct) % category.buckets + 1
    else:
        vocabulary = pa.array(category.values, pa.large_string())
        position = pc.fill_null(pc.index_in(distinct, vocabulary), -1)
        codes = position.to_numpy().astype(np.int64) + 1
    index = pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy()
    return np.append(codes, 0)[index]  # a null has index -1, the appended 0


def read_features(
    features: CustomFeatures, columns: Mapping[str, pa.Array], num_rows: int
) -> NDArray[np.float32]:
    """Convert columns to a matrix.

    Args:
        features: Custom features of the log.
        columns: (n,) values by name of the column; values of absent columns are
            missing or unknown.
        num_rows: Number n of rows.

    Returns:
        (n, X + G) numbers, NaN if missing, followed by codes of categories.
    """
    matrix = np.zeros((num_rows, len(features.names)), np.float32)
    for index, number in enumerate(features.numbers):
        matrix[:, index] = np.nan
        if number.name in columns:
            values = columns[number.name].cast(pa.float32())
            matrix[:, index] = values.to_numpy(zero_copy_only=False)  # null to NaN
    for index, category in enumerate(features.categories, len(features.numbers)):
        if category.name in columns:
            matrix[:, index] = read_codes(category, columns[category.name])
    return matrix


def rescale(features: CustomFeatures, scales: Mapping[str, Any]) -> CustomFeatures:
    """Return the features with the scales of a checkpoint in place of the tables'."""
    trained = {number["name"]: number for number in scales.get(CUSTOM_KEY, [])}
    numbers = tuple(
        replace(number, **trained.get(number.name, {})) for number in features.numbers
    )
    return replace(features, numbers=numbers)


def adopt_scales(scales: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scales of a model that continues training from a checkpoint.

    Numbers keep the scale of the checkpoint. A number without values or with a standard
    deviation of 0 in the checkpoint takes the scale of the new tables.

    Args:
        scales: Scales of the checkpoint.
    """
    numbers = [
        number
        if number["std"]
        else {"name": number["name"], "missing": number["missing"]}
        for number in scales.get(CUSTOM_KEY, [])
    ]
    item_numbers = {
        name: (mean, std)
        for name, (mean, std) in scales.get("numbers", {}).items()
        if std
    }
    return {**scales, CUSTOM_KEY: numbers, "numbers": item_numbers}


class Standardised(nn.Module):
    """Standardise features (..., F) and clip them at `MAX_DEVIATIONS`.

    A feature that did not vary in training has deviation 0. Nothing can be learned
    about it, so all its values become 0, including later ones.

    Args:
        mean: (F,) means over the training examples.
        std: (F,) deviations over the training examples.
        names: (F,) names of the features, for messages.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", mean.float().clone())
        spread = std.float()
        # inf maps every value of a constant feature to 0
        self.register_buffer("std", torch.where(spread > 0, spread, torch.inf))
        self.feature_names = tuple(names)

    def forward(self, features: Tensor) -> Tensor:
        """Return the standardised features (..., F); missing values stay NaN."""
        return ((features - self.mean) / self.std).clamp(
            -MAX_DEVIATIONS, MAX_DEVIATIONS
        )

    def replace_constant_scales(self, mean: Tensor, std: Tensor) -> list[str]:
        """Replace the mean and deviation of features that were constant before.

        A feature is constant if it has a single value, or none, in the training
        examples; its deviation is inf. A feature is replaced if it was constant in the
        training of the checkpoint and varies in the examples of this module.

        Args:
            mean: (F,) means of the checkpoint, changed in place.
            std: (F,) deviations of the checkpoint, changed in place; inf if constant.

        Returns:
            Names of the replaced features.
        """
        is_new = std.isinf() & self.std.isfinite()
        mean[is_new], std[is_new] = self.mean[is_new], self.std[is_new]
        return [
            self.feature_names[index] for index in is_new.nonzero().flatten().tolist()
        ]


class EmbeddingTables(nn.Module):
    """A module with a list `tables` of embeddings whose row 0 is the unknown value."""

    row_names: RowNames = ()
    """Names of the rows of each table, which are the values that the rows embed."""
    catalogue_buffers: tuple[str, ...] = ()
    """Names of buffers that hold content of the catalogue instead of learned values."""
    new_items_are_zeros = False
    """Whether new items start as zeros, because a zero vector means an unknown item."""


class CustomInputs(Standardised, EmbeddingTables):
    """A layer that turns custom features into columns of floats.

    The output has the standardised numbers, the presence of each number that may be
    missing, and the embeddings of categories.
    """

    optional_numbers: Tensor
    """(M,) indices of the M numbers that may be missing."""

    def __init__(self, features: CustomFeatures, width: int, dropout: float) -> None:
        """Create the layer.

        Args:
            features: Custom features of the log.
            width: Width of the embedding of a category.
            dropout: Fraction of category values that are replaced by the unknown value
                in training, so that its embedding is learned.
        """
        numbers = [number.name for number in features.numbers]
        super().__init__(
            torch.tensor([number.mean for number in features.numbers]),
            torch.tensor([number.std for number in features.numbers]),
            numbers,
        )
        self.num_numbers, self.dropout = len(features.numbers), dropout
        optional = [i for i, number in enumerate(features.numbers) if number.missing]
        self.register_buffer(
            "optional_numbers",
            torch.tensor(optional, dtype=torch.long),
            persistent=False,
        )
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(
                torch.randn(category.rows, width) * width**-0.5, freeze=False
            )
            for category in features.categories
        )
        self.row_names = [None if c.buckets else c.values for c in features.categories]
        self.columns = numbers + [numbers[i] for i in optional]
        for category in features.categories:
            self.columns += [category.name] * width
        """(O,) name of the feature of each output column."""

    def forward(self, values: Tensor) -> Tensor:
        """Compute the columns of features.

        Args:
            values: (..., X + G) features from `read_features`.

        Returns:
            (..., O) columns, described by `columns`.
        """
        numbers, codes = (
            values[..., : self.num_numbers],
            values[..., self.num_numbers :].long(),
        )
        scaled = super().forward(numbers)
        is_present = ~torch.isnan(numbers[..., self.optional_numbers])
        parts = [torch.nan_to_num(scaled), is_present.to(scaled.dtype)]
        if self.training and self.dropout and len(self.tables):
            is_dropped = torch.rand(codes.shape, device=codes.device) < self.dropout
            codes = torch.where(is_dropped, 0, codes)
        embeddings = zip(self.tables, codes.unbind(-1), strict=True)
        parts += [table(code) for table, code in embeddings]
        return torch.cat(parts, -1)
