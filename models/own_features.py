"""Numbers and categories of a log's own, by which candidates and behaviours are described.

    own = OwnFeatures.from_info(manifest.info)
    own.matrix({"num_bm25": pa.array([2.5, None]), "cat_city": pa.array(["Oslo", "Rome"])}, 2)   # (2, 2) float32

jobs.prepare learns their description from the training window alone
(`pipelines/data/sequences/custom_features.py`). Tables hold values as the log has them;
training, evaluation and serving read them with this module.

Shapes: `n` values, `X` numbers, `G` categories, `O` columns that a layer reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.layers.standardised import MAX_DEVIATIONS, Standardised
from models.retrieval.data import hash_strings
from models.warm_start import EmbeddingTables

NUMBER, CATEGORY = "num_", "cat_"
"""Prefixes of the columns."""


@dataclass(frozen=True)
class Number:
    """A number, with its statistics over training."""

    name: str
    """Name of its column."""
    mean: float
    std: float
    """Standard deviation; 0 for a constant, and if training has no value."""
    missing: bool
    """Whether training lacks some values; models then read whether the number is
    present."""


@dataclass(frozen=True)
class Category:
    """A category. Models read a value as its code, 0 for an unknown value."""

    name: str
    """Name of its column."""
    values: tuple[str, ...] = ()
    """Values of training, with codes from 1."""
    buckets: int = 0
    """Number of codes, given by a value's hash, where training has too many values;
    else 0."""

    @property
    def rows(self) -> int:
        """Number of codes, 0 included."""
        return 1 + (self.buckets or len(self.values))

    def codes(self, strings: pa.Array) -> NDArray[np.int64]:
        """Return the code of each string (n,)."""
        encoded = strings
        if not pa.types.is_dictionary(strings.type):
            encoded = strings.dictionary_encode()
        words = encoded.dictionary.cast(pa.large_string())
        if self.buckets:
            codes = hash_strings(words) % self.buckets + 1
        else:
            values = pa.array(self.values, pa.large_string())
            index = pc.fill_null(pc.index_in(words, values), -1)
            codes = index.to_numpy().astype(np.int64) + 1
        index = pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy()
        return np.append(codes, 0)[index]  # index -1 is the appended 0


@dataclass(frozen=True)
class OwnFeatures:
    """The numbers and categories of a log, in the order of its mapping file."""

    numbers: tuple[Number, ...] = ()
    categories: tuple[Category, ...] = ()

    @classmethod
    def from_info(
        cls, info: Mapping[str, Any], scales: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the features of a log.

        Args:
            info: The manifest's `info` of the sequences.
            scales: The scales of a checkpoint, which replace the statistics of numbers.
        """
        own = info.get("own") or {"numbers": [], "categories": []}
        trained = {number["name"]: number for number in (scales or {}).get("own", [])}
        numbers = [
            Number(**{**number, **trained.get(number["name"], {})})
            for number in own["numbers"]
        ]
        categories = [
            Category(**{**category, "values": tuple(category["values"])})
            for category in own["categories"]
        ]
        return cls(tuple(numbers), tuple(categories))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns: numbers, then categories."""
        numbers = [number.name for number in self.numbers]
        return (*numbers, *(category.name for category in self.categories))

    def matrix(self, columns: Mapping[str, pa.Array], rows: int) -> NDArray[np.float32]:
        """Return (rows, X + G): numbers, NaN where missing, and codes of categories.

        A column that is left out counts as missing or unknown.
        """
        matrix = np.zeros((rows, len(self.names)), np.float32)
        for index, number in enumerate(self.numbers):
            matrix[:, index] = np.nan
            if number.name in columns:
                values = columns[number.name].cast(pa.float32())
                # a null becomes NaN
                matrix[:, index] = values.to_numpy(zero_copy_only=False)
        for index, category in enumerate(self.categories, len(self.numbers)):
            if category.name in columns:
                matrix[:, index] = category.codes(columns[category.name])
        return matrix


def adopt_scales(
    scales: Mapping[str, Any], info: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the scales of a model that continues a checkpoint, and warnings.

    Numbers keep the checkpoint's scale. A number without values or without spread in
    the checkpoint takes the scale of the new tables.

    Args:
        scales: The scales of the checkpoint.
        info: The manifest's `info` of the new sequences.
    """
    new = {
        number["name"]: number for number in (info.get("own") or {}).get("numbers", [])
    }
    own, warnings = [], []
    for number in scales.get("own", []):
        name = number["name"]
        if not number["std"]:
            own.append({"name": name, "missing": number["missing"]})
            continue
        own.append(number)
        if name not in new:
            continue
        mean, new_mean = number["mean"], new[name]["mean"]
        if abs(new_mean - mean) > MAX_DEVIATIONS * number["std"]:
            warnings.append(
                f"warning: the mean of {name} was {mean:.4g} and is {new_mean:.4g}, over {MAX_DEVIATIONS:g} deviations of then: "
                f"most values are cut; train a model anew"
            )
    items = {
        name: (mean, std)
        for name, (mean, std) in scales.get("numbers", {}).items()
        if std
    }
    return {**scales, "own": own, "numbers": items}, warnings


class OwnInputs(Standardised, EmbeddingTables):
    """Own features as a layer reads them: standardised numbers, whether a number is present, category embeddings.

    In training a fraction `dropout` of the categories' values counts as unknown, so
    that unknown values are learned.
    """

    at_times: Tensor
    """Indices of the numbers that are missing at times."""

    def __init__(self, own: OwnFeatures, width: int, dropout: float) -> None:
        super().__init__(
            torch.tensor([number.mean for number in own.numbers]),
            torch.tensor([number.std for number in own.numbers]),
            [number.name for number in own.numbers],
        )
        self.count, self.dropout = len(own.numbers), dropout
        at_times = [i for i, number in enumerate(own.numbers) if number.missing]
        self.register_buffer(
            "at_times", torch.tensor(at_times, dtype=torch.long), persistent=False
        )
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(
                torch.randn(category.rows, width) * width**-0.5, freeze=False
            )
            for category in own.categories
        )
        self.row_names = [None if c.buckets else c.values for c in own.categories]
        self.columns = [
            *(number.name for number in own.numbers),
            *(own.numbers[i].name for i in at_times),
            *(category.name for category in own.categories for _ in range(width)),
        ]
        """(O,) the feature of each column of the output."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the columns (..., O) of `values` (..., X + G) in the form of `OwnFeatures.matrix`."""
        numbers, codes = values[..., : self.count], values[..., self.count :].long()
        scaled = super().forward(numbers)
        is_present = ~torch.isnan(numbers[..., self.at_times])
        parts = [torch.nan_to_num(scaled), is_present.to(scaled.dtype)]
        if self.training and self.dropout and len(self.tables):
            is_dropped = torch.rand(codes.shape, device=codes.device) < self.dropout
            codes = torch.where(is_dropped, 0, codes)
        embeddings = zip(self.tables, codes.unbind(-1), strict=True)
        parts += [table(code) for table, code in embeddings]
        return torch.cat(parts, -1)
