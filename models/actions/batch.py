"""What the actions family is built on and fed with: the catalogue, and the tensors of a batch.

    batch = examples.collate(rows)     # of models/actions/data.py
    earlier(batch)                     # what each position may know

A row is one user. Its context is what happened before, in order of time, each event with its actions and labels.
Its candidates are events whose actions are to be predicted: all in one pass, none reading another. A candidate's
actions are not in the batch, only its labels.

Every position, of the context or a candidate, reads the context that is strictly earlier than it, by timestamp. Events
of one millisecond, as those of a page are in many logs, know nothing of each other: each is learned from as if it alone
had come. In which order they stand changes nothing, but for LAC, which reads one action before an event (`LAC`).

    item, time              (B, T) int64          context events: `item_index`, milliseconds; ascending in time
    action                  (B, T, A) float32     what the user did: 0 or 1 each, or graded
    label                   (B, T, K) float32     the tasks' 0 or 1
    feature                 (B, T, F) float32     counting statistics at the time of the event, for late fusion
    viewer                  (B, T, V) int64       viewer-side categories of the event, such as the device: 0 for none
                                                  and for what training has not seen; left out where V is 0
    own                     (B, T, X + G) float32 the log's own features, as `OwnFeatures.matrix` has them; left out
                                                  where there are none
    valid                   (B, T) bool           false on padding, which comes after the events
    untied                  (0,)                  there where no two context events of a row have one time: models take
                                                  a faster way then
    learn                   (B, T) bool           events that are learned from in training, where a model can: all, but
                                                  those that another row learns from and this one has as history
    new_numbers, new_categories, new_text
                            (n, ...)              of a served request alone: n items that are not in the catalogue, told
                                                  by `item` from I on
    candidate_item, candidate_time, candidate_label, candidate_feature, candidate_viewer, candidate_own, candidate_valid
                            the same for candidates, (B, C, ...), in any order; C may be 0 in training

Shapes: `B` users, `T` context events, `C` candidates, `A` kinds of action, `K` tasks, `F` features,
`V` viewer-side categories, `I` items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.own_features import CATEGORY, NUMBER, OwnFeatures
from models.storage.inputs import Inputs
from models.storage.tables import (
    TableVersion,
    UserError,
    join,
    read_table,
    sequences_manifest,
    table_hashes,
)
from models.text.text_tables import read_vectors, root_mean_square

Batch = dict[str, Tensor]

TABLES = {"tables": ("items", "sequences"), "text": ("items",)}
"""Tables that a catalogue comes from, by folder of `Inputs`."""


@dataclass(frozen=True)
class Attributes:
    """What is learned from the catalogue's items."""

    numbers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Mean and deviation by column; a deviation of 0 is that of a constant, or of no values."""
    categories: dict[str, pa.Array] = field(default_factory=dict)
    """Values by column, numbered from 1 in their order; 0 is for none and for another value."""

    @classmethod
    def of(cls, items: pa.Table, scales: Mapping[str, Any] | None = None) -> Self:
        """Those of the columns `num_*` and `cat_*`, of numbers those that a checkpoint's `scales` have."""
        numbers = {
            name: spread(values(items[name]))
            for name in items.column_names
            if name.startswith(NUMBER)
        }
        numbers |= {
            name: tuple(scale)
            for name, scale in (scales or {}).get("numbers", {}).items()
            if name in numbers
        }
        categories = {
            name: known(items[name])
            for name in items.column_names
            if name.startswith(CATEGORY)
        }
        return cls(numbers, categories)

    def read(self, items: pa.Table) -> tuple[Tensor, Tensor]:
        """(n, X) float32, standardised over the catalogue, 0 where there is none; (n, G) int64."""
        numbers, categories = (
            np.zeros((len(items), len(self.numbers))),
            np.zeros((len(items), len(self.categories))),
        )
        for place, (name, (mean, deviation)) in enumerate(self.numbers.items()):
            if deviation > 1e-9:
                numbers[:, place] = np.nan_to_num(
                    (values(items[name]) - mean) / deviation
                )
        for place, (name, there) in enumerate(self.categories.items()):
            found = pc.fill_null(pc.index_in(items[name].cast(pa.string()), there), -1)
            categories[:, place] = found.to_numpy() + 1
        return torch.from_numpy(numbers).float(), torch.from_numpy(categories).long()


def values(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """NaN where there is none."""
    return pc.cast(column, pa.float64()).to_numpy()


def spread(numbers: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation of those that are there; 0 and 0 of none."""
    return (
        (float(np.nanmean(numbers)), float(np.nanstd(numbers)))
        if np.isfinite(numbers).any()
        else (0.0, 0.0)
    )


def known(column: pa.ChunkedArray) -> pa.Array:
    """Distinct strings, sorted, without the empty one."""
    there = pc.unique(column.cast(pa.string())).drop_null()
    there = there.filter(pc.not_equal(there, ""))
    return there.take(pc.sort_indices(there))


@dataclass(frozen=True)
class ActionsCatalogue:
    """Items with their attributes, and the names of actions, tasks and features of a log."""

    num_items: int
    """I; `item_index` is dense from 0."""
    actions: tuple[str, ...]
    """Names of the A kinds of action that models read."""
    labels: tuple[str, ...]
    """Names of the K tasks."""
    features: tuple[str, ...] = ()
    """Names of the F late-fusion features."""
    feature_mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(F,) mean over training events."""
    feature_std: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(F,) standard deviation over training events; 0 for a constant."""
    numbers: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(I, X) float32 attributes of items, or empty."""
    categories: Tensor = field(
        default_factory=lambda: torch.zeros(0, dtype=torch.int64)
    )
    """(I, G) int64 attributes of items such as author or type, each dense from 0; or empty."""
    attributes: Attributes = field(default_factory=Attributes)
    """What numbers and categories say of an item, for items that are not among the I."""
    text: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(I, W) float32: the text of each item by a frozen encoder, where models read it; or empty."""
    text_size: float = 0.0
    """Root mean square of `text`, or that of a checkpoint."""
    viewers: dict[str, list[str]] = field(default_factory=dict)
    """The V viewer-side categories of events, such as device or place in the app (Sec. 1 of AttnMVP), and the values
    that training has seen of each."""
    own: OwnFeatures = field(default_factory=OwnFeatures)
    """The log's own features of events: numbers, and what is joined to them as of their time."""
    train_rates: tuple[float, ...] = ()
    """Each task's share of positives among training events; or empty where it is not known."""
    versions: dict[str, TableVersion] = field(default_factory=dict)
    """Versions of the catalogue's tables, by name."""

    def __post_init__(self) -> None:
        if not self.text_size:
            object.__setattr__(self, "text_size", root_mean_square(self.text))

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the catalogue's tables, by name."""
        return table_hashes(self.versions)

    def scales(self) -> dict[str, Any]:
        """What a checkpoint keeps of how items' and events' numbers and texts are read."""
        own = [asdict(number) for number in self.own.numbers]
        return {
            "numbers": self.attributes.numbers,
            "own": own,
            "text_size": self.text_size,
            "rates": dict(zip(self.labels, self.train_rates, strict=False)),
        }

    @classmethod
    def load(
        cls,
        tables: str,
        text: str | None = None,
        scales: Mapping[str, Any] | None = None,
    ) -> Self:
        """Reads what jobs.prepare made at `tables` from a source of kind `actions`, and with `text` the items' text
        that jobs.encode made there; `scales` are those of a checkpoint.

        Raises UserError where the tables do not belong together.
        """
        versions = Inputs(tables, text=text).versions(TABLES)
        info = sequences_manifest(join(tables, "sequences"), "actions").info
        items = read_table(join(tables, "items"), "items")
        if not np.array_equal(items["item_index"].to_numpy(), np.arange(len(items))):
            raise UserError(
                f"{join(tables, 'items')}: item_index is not dense and sorted from 0; run jobs.prepare again"
            )
        scales = scales or {}
        attributes, vectors = Attributes.of(items, scales), torch.zeros(0)
        numbers, categories = attributes.read(items)
        if text is not None:
            vectors = read_vectors(
                read_table(join(text, "items")),
                "embedding",
                len(items),
                join(text, "items"),
            )
        return cls(
            num_items=len(items),
            actions=tuple(info["actions"]),
            labels=tuple(info["tasks"]),
            features=tuple(info["features"]),
            feature_mean=torch.tensor(info["feature_mean"], dtype=torch.float32),
            feature_std=torch.tensor(info["feature_std"], dtype=torch.float32),
            numbers=numbers,
            categories=categories,
            attributes=attributes,
            text=vectors,
            text_size=scales.get("text_size", 0.0),
            viewers=info.get("viewers", {}),
            own=OwnFeatures.of(info, scales),
            train_rates=tuple(
                float(info["base_rates"][task]) for task in info["tasks"]
            ),
            versions=versions,
        )


def earlier(batch: Batch) -> Tensor:
    """(B, T + C) int64: how many context events are strictly earlier than each context event and each candidate, by
    timestamp; these are the row's first ones."""
    last = torch.iinfo(torch.int64).max
    known = batch["time"].masked_fill(
        ~batch["valid"], last
    )  # ascending, padding included
    return torch.searchsorted(known, torch.cat([known, batch["candidate_time"]], 1))


def any_tied(batch: Batch) -> bool:
    """Whether two context events of a row have one time. Waits for a GPU."""
    time, valid = batch["time"], batch["valid"]
    return bool(((time[:, 1:] == time[:, :-1]) & valid[:, 1:]).any())
