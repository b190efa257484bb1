"""Labels of earlier behaviours as part of their tokens: what a user did with a result beside what made it a behaviour.

python -m jobs.train --config jobs/configs/qgs.yaml --model.token_labels '[purchase, dwell_ms]' ...

A token is read by all later searches of its user, and never by what it is learned to predict: no label of a candidate,
nor of the item that comes next, is an input. So a label counts as it was known when the result became a behaviour. One
with a time of its own that is later counts as not set.

Shapes: `A` labels, `O` columns that layers read of them, `...` any index shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.config import hint
from models.own_features import Standardised
from models.shares import compact
from models.tables import Manifest, UserError


@dataclass(frozen=True)
class BehaviourLabel:
    """A label of behaviours."""

    number: bool = False
    """Whether it is a number, such as a dwell time, and not true or false."""
    mean: float = 0.0
    """Of a number, over the behaviours that training searches read."""
    std: float = 1.0
    """1 for a constant."""


def behaviour_labels(manifest: Manifest) -> dict[str, BehaviourLabel]:
    """By name those of a table of sequences, but the one that makes a result a behaviour."""
    columns = {column["name"]: column["type"] for column in manifest.schema}
    names = (name.removeprefix("label_") for name in columns if name.startswith("label_"))
    known = {name: BehaviourLabel("float" in columns[f"label_{name}"]) for name in names}
    known.pop(manifest.info["labels"][0], None)
    return known


def label_columns(manifest: Manifest, names: Sequence[str]) -> list[str]:
    """The columns that `read_labels` reads beside the times."""
    there = {column["name"] for column in manifest.schema}
    since = [f"known_{name}" for name in (manifest.info["labels"][0], *names)] if names else []
    return [f"label_{name}" for name in names] + [name for name in since if name in there]


def read_labels(table: pa.Table, names: Sequence[str], manifest: Manifest) -> NDArray:
    """(behaviours, A) labels of one part as they were known when results became behaviours: 0 or 1 of those that are
    true or false, NaN for a number that is not there."""

    def flat(column: str) -> pa.Array:
        return table[column].combine_chunks().flatten()

    columns, since = [], f"known_{manifest.info['labels'][0]}"
    since = since if since in table.column_names else "timestamp_ms"
    for name in names:
        values = flat(f"label_{name}")
        found = values.cast(pa.float32()).to_numpy(zero_copy_only=False).copy()
        empty = 0.0 if pa.types.is_boolean(values.type) else np.nan
        found[values.is_null().to_numpy(zero_copy_only=False)] = empty
        if f"known_{name}" in table.column_names:
            known = flat(f"known_{name}").cast(pa.float64()).to_numpy(zero_copy_only=False)  # NaN where it is not set
            found[known > flat(since).to_numpy()] = empty
        columns.append(found)
    return compact(np.stack(columns, 1))


class TokenLabels(Standardised):
    """What layers read of the labels `names`: 0 or 1; of numbers, standardised and cut at 5 deviations, and whether
    they are there."""

    numbers: Tensor

    def __init__(self, names: Sequence[str], known: Mapping[str, BehaviourLabel], width: int) -> None:
        for name in names:
            if name not in known:
                none = "behaviours have no other label than the one that makes them"
                raise UserError(f"token_labels has '{name}', which is no label to be read; {hint(name, known, none)}")
        labels = [known[name] for name in names]
        super().__init__(torch.tensor([label.mean for label in labels]), torch.tensor([label.std for label in labels]))
        numbers = [place for place, label in enumerate(labels) if label.number]
        self.register_buffer("numbers", torch.tensor(numbers, dtype=torch.long), persistent=False)
        self.project = nn.Linear(len(names) + len(numbers), width, bias=False)

    def forward(self, labels: Tensor) -> Tensor:
        """(..., width) of `labels` (..., A), as `read_labels` has them."""
        scaled = torch.nan_to_num(super().forward(labels))
        there = (~torch.isnan(labels[..., self.numbers])).to(scaled.dtype)
        return self.project(torch.cat([scaled, there], -1))
