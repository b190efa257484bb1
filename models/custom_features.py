"""Custom features: numbers and categories that a log provides.

    columns = {"num_bm25": pa.array([2.5, None])}
    read_features(info.custom, columns, 2)   # (2, X + G) float32

The features describe candidates and behaviours. jobs.prepare computes their statistics
and vocabularies from the training window only
(`pipelines/prepare/sequences/custom_features.py`). Tables store values as they are in
the log; training, evaluation and serving read the values through this module.

Shapes: `n` values, `X` numbers, `G` categories, `O` columns that a layer reads.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from models.layers.standardised import Standardised
from models.warm_start import EmbeddingTables

CUSTOM_KEY = "own"
"""Key of the scales of custom features in a checkpoint."""

NUMBER, CATEGORY = "num_", "cat_"
"""Prefixes of the names of the features' columns."""


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
