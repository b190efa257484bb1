"""What a log brings of its own to rank by: numbers and categories, as the manifest of its sequences describes them.

    own = OwnFeatures.of(manifest.info)
    own.matrix({"num_bm25": pa.array([2.5, None]), "cat_city": pa.array(["Oslo", "Rome"])})   # (2, 2) float32

jobs.prepare learns the description from the training window alone (`pipelines/data/sequences/own_features.py`); training,
evaluation and serving read values by this one piece of code. Tables hold values as the log has them.

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
"""Beginnings of the columns."""


@dataclass(frozen=True)
class Number:
    """A number, over the values that training has of it."""

    name: str
    """Its column."""
    mean: float
    std: float
    """0 for a constant, and where training has no value."""
    missing: bool
    """Whether training lacks it at times; models then read whether it is there."""


@dataclass(frozen=True)
class Category:
    """A category; a value is told to models by its number, 0 for one that is unknown."""

    name: str
    """Its column."""
    values: tuple[str, ...] = ()
    """Those of training, numbered from 1."""
    buckets: int = 0
    """Where training has too many values: numbers from 1 to this, of which each value has the one of its hash."""

    @property
    def rows(self) -> int:
        """Numbers that a value may have."""
        return 1 + (self.buckets or len(self.values))

    def codes(self, strings: pa.Array) -> NDArray[np.int64]:
        """(n,) the number of each string."""
        found = (
            strings.dictionary_encode()
            if not pa.types.is_dictionary(strings.type)
            else strings
        )
        words = found.dictionary.cast(pa.large_string())
        if self.buckets:
            number = hash_strings(words) % self.buckets + 1
        else:
            known = pa.array(self.values, pa.large_string())
            number = (
                pc.fill_null(pc.index_in(words, known), -1).to_numpy().astype(np.int64)
                + 1
            )
        index = pc.fill_null(found.indices.cast(pa.int64()), -1).to_numpy()
        return np.append(number, 0)[index]  # index -1 is the appended one


@dataclass(frozen=True)
class OwnFeatures:
    """All of a log, in the order of its source file."""

    numbers: tuple[Number, ...] = ()
    categories: tuple[Category, ...] = ()

    @classmethod
    def of(
        cls, info: Mapping[str, Any], scales: Mapping[str, Any] | None = None
    ) -> Self:
        """As the manifest of sequences says; none where it says nothing. `scales` are those of a checkpoint."""
        said = info.get("own") or {"numbers": [], "categories": []}
        kept = {number["name"]: number for number in (scales or {}).get("own", [])}
        return cls(
            tuple(
                Number(**{**number, **kept.get(number["name"], {})})
                for number in said["numbers"]
            ),
            tuple(
                Category(**{**c, "values": tuple(c["values"])})
                for c in said["categories"]
            ),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Their columns: numbers, then categories."""
        return (
            *(number.name for number in self.numbers),
            *(category.name for category in self.categories),
        )

    def matrix(self, columns: Mapping[str, pa.Array], rows: int) -> NDArray[np.float32]:
        """(rows, X + G): numbers, NaN where there is none, and the numbers of categories' values. A column that is not
        there is of unknown values."""
        found = np.zeros((rows, len(self.names)), np.float32)
        for place, number in enumerate(self.numbers):
            found[:, place] = np.nan
            if number.name in columns:
                values = columns[number.name].cast(pa.float32())
                found[:, place] = values.to_numpy(
                    zero_copy_only=False
                )  # null becomes NaN
        for place, category in enumerate(self.categories, len(self.numbers)):
            if category.name in columns:
                found[:, place] = category.codes(columns[category.name])
        return found


def adopt_scales(
    scales: Mapping[str, Any], info: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the scales with which a model goes on from a checkpoint, and warnings.

    Numbers keep the scale of the checkpoint. One without values or without spread there takes the scale of the new
    tables, of which `info` is the manifest of sequences.
    """
    own = [
        number
        if number["std"]
        else {"name": number["name"], "missing": number["missing"]}
        for number in scales.get("own", [])
    ]
    items = {
        name: (mean, std)
        for name, (mean, std) in scales.get("numbers", {}).items()
        if std
    }
    now = {
        number["name"]: number for number in (info.get("own") or {}).get("numbers", [])
    }
    warnings = [
        f"warning: the mean of {number['name']} was {number['mean']:.4g} and is "
        f"{now[number['name']]['mean']:.4g}, over {MAX_DEVIATIONS:g} deviations of then: most values are cut; train a model anew"
        for number in own
        if number.get("std")
        and number["name"] in now
        and abs(now[number["name"]]["mean"] - number["mean"])
        > MAX_DEVIATIONS * number["std"]
    ]
    return {**scales, "own": own, "numbers": items}, warnings


class OwnInputs(Standardised, EmbeddingTables):
    """Own features as a layer reads them: numbers standardised, whether a number is there, embeddings of categories. In
    training a share of the categories' values counts as unknown, so that unknown ones have a meaning."""

    at_times: Tensor

    def __init__(self, own: OwnFeatures, width: int, dropout: float) -> None:
        super().__init__(
            torch.tensor([n.mean for n in own.numbers]),
            torch.tensor([n.std for n in own.numbers]),
            [n.name for n in own.numbers],
        )
        self.count, self.dropout = len(own.numbers), dropout
        at_times = [place for place, number in enumerate(own.numbers) if number.missing]
        self.register_buffer(
            "at_times", torch.tensor(at_times, dtype=torch.long), persistent=False
        )
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(
                torch.randn(c.rows, width) * width**-0.5, freeze=False
            )
            for c in own.categories
        )
        self.row_names = [None if c.buckets else c.values for c in own.categories]
        self.columns = [
            *(number.name for number in own.numbers),
            *(own.numbers[place].name for place in at_times),
            *(category.name for category in own.categories for _ in range(width)),
        ]
        """(O,) the feature that each column of the output is of."""

    def forward(self, values: Tensor) -> Tensor:
        """(..., O) of `values` (..., X + G), as `OwnFeatures.matrix` has them."""
        numbers, codes = values[..., : self.count], values[..., self.count :].long()
        scaled = super().forward(numbers)
        parts = [
            torch.nan_to_num(scaled),
            (~torch.isnan(numbers[..., self.at_times])).to(scaled.dtype),
        ]
        if self.training and self.dropout and len(self.tables):
            codes = torch.where(
                torch.rand(codes.shape, device=codes.device) < self.dropout, 0, codes
            )
        parts += [
            table(code)
            for table, code in zip(self.tables, codes.unbind(-1), strict=True)
        ]
        return torch.cat(parts, -1)
