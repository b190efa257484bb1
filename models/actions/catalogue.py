"""The catalogue of actions models: items with attributes and text, actions and tasks.

    catalogue = ActionsCatalogue.load(Inputs("tables", text="text"))

Shapes: `I` items, `A` kinds of action, `K` tasks, `F` late features, `V` viewer-side
categories, `X` numbers and `G` categories of an item, `W` width of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.schemas import ActionsInfo, CustomFeatures, Inputs
from core.tables import Table
from models.custom_features import CATEGORY, CUSTOM_KEY, NUMBER, rescale
from models.text.text_tables import read_vectors, root_mean_square


@dataclass(frozen=True)
class Attributes:
    """Statistics of items' attributes, to standardise numbers and encode categories."""

    numbers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Mean and standard deviation by column. The deviation is 0 for a constant and for
    a column without values."""
    categories: dict[str, pa.Array] = field(default_factory=dict)
    """Values by column. The code of a value is its position, from 1; 0 is the code of
    unknown values."""

    @classmethod
    def from_items(
        cls, items: pa.Table, scales: Mapping[str, Any] | None = None
    ) -> Self:
        """Compute the statistics of the columns `num_*` and `cat_*`.

        Args:
            items: The catalogue's items.
            scales: Scales from a checkpoint, which replace computed statistics of
                numbers.
        """
        stored_scales = (scales or {}).get("numbers", {})
        numbers: dict[str, tuple[float, float]] = {}
        categories = {}
        for name in items.column_names:
            if name.startswith(NUMBER):
                values, scale = _to_float(items[name]), stored_scales.get(name)
                if not scale and np.isfinite(values).any():
                    scale = float(np.nanmean(values)), float(np.nanstd(values))
                numbers[name] = scale or (0.0, 0.0)
            elif name.startswith(CATEGORY):
                strings = pc.unique(items[name].cast(pa.string())).drop_null()
                strings = strings.filter(pc.not_equal(strings, ""))
                categories[name] = strings.take(pc.sort_indices(strings))
        return cls(numbers, categories)

    def read(self, items: pa.Table) -> tuple[Tensor, Tensor]:
        """Return the attributes of items.

        Returns:
            (n, X) float32 numbers, standardised over the catalogue, 0 where missing,
            and (n, G) int64 codes of categories.
        """
        numbers = np.zeros((len(items), len(self.numbers)))
        categories = np.zeros((len(items), len(self.categories)))
        for column, (name, (mean, std)) in enumerate(self.numbers.items()):
            if std > 1e-9:
                scaled = (_to_float(items[name]) - mean) / std
                numbers[:, column] = np.nan_to_num(scaled)
        for column, (name, values) in enumerate(self.categories.items()):
            index = pc.index_in(items[name].cast(pa.string()), values)
            categories[:, column] = pc.fill_null(index, -1).to_numpy() + 1
        return torch.from_numpy(numbers).float(), torch.from_numpy(categories).long()


def _to_float(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return the numbers of a column, NaN where missing."""
    return pc.cast(column, pa.float64()).to_numpy()


@dataclass(frozen=True)
class ActionsCatalogue:
    """Items, actions, tasks and features of a log of actions."""

    tables: ClassVar[Mapping[str, Sequence[str]]] = {
        "tables": ("items", "sequences"),
        "text": ("items",),
    }
    """Tables from which a catalogue is loaded, by folder of `Inputs`."""

    num_items: int
    """Number I of items; `item_index` is dense from 0."""
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
    """(I, X) float32 standardised numbers of items, or empty."""
    categories: Tensor = field(
        default_factory=lambda: torch.zeros(0, dtype=torch.int64)
    )
    """(I, G) int64 codes of items' categories, such as author or type, or empty."""
    attributes: Attributes = field(default_factory=Attributes)
    """Statistics of the attributes, for items that are not in the catalogue."""
    text: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(I, W) float32 text vectors of items from a frozen encoder; empty if models read
    no text."""
    text_size: float = 0.0
    """Root mean square of `text`, or the value in a checkpoint."""
    viewers: dict[str, list[str]] = field(default_factory=dict)
    """Values in training of each viewer-side category of events, such as device (Sec. 1
    of AttnMVP)."""
    custom_features: CustomFeatures = field(default_factory=CustomFeatures)
    """The log's custom features of events, including features joined as of the time of
    the event."""
    train_rates: tuple[float, ...] = ()
    """(K,) share of positives among training events; empty if unknown."""
    versions: dict[str, Table[Any]] = field(default_factory=dict)
    """Versions of the catalogue's tables, by name."""

    def __post_init__(self) -> None:
        if not self.text_size:
            object.__setattr__(self, "text_size", root_mean_square(self.text))

    def scales(self) -> dict[str, Any]:
        """Return the scales and the tasks' rates, which a checkpoint stores."""
        return {
            "numbers": self.attributes.numbers,
            CUSTOM_KEY: [asdict(number) for number in self.custom_features.numbers],
            "text_size": self.text_size,
            # not strict: the rates are empty if they are unknown
            "rates": dict(zip(self.labels, self.train_rates, strict=False)),
        }

    @classmethod
    def load(
        cls,
        inputs: Inputs,
        scales: Mapping[str, Any] | None = None,
        manifest_only: bool = False,
    ) -> Self:
        """Load the catalogue of a log of actions.

        Args:
            inputs: Folders of the tables, and of texts for models with text.
            scales: Result of `scales()` stored in a checkpoint, which replaces computed
                scales.
            manifest_only: Unused, as only the manifest of `sequences` is read.
        """
        versions = inputs.versions(cls.tables, ActionsInfo)
        info: ActionsInfo = versions["sequences"].info
        items = versions["items"].read()
        scales = scales or {}
        attributes = Attributes.from_items(items, scales)
        numbers, categories = attributes.read(items)
        vectors = torch.zeros(0)
        if inputs.text is not None:
            vectors = read_vectors(versions["text_items"].read(), "embedding")
        return cls(
            num_items=len(items),
            actions=tuple(info.actions),
            labels=tuple(info.tasks),
            features=tuple(info.features),
            feature_mean=torch.tensor(info.feature_mean, dtype=torch.float32),
            feature_std=torch.tensor(info.feature_std, dtype=torch.float32),
            numbers=numbers,
            categories=categories,
            attributes=attributes,
            text=vectors,
            text_size=scales.get("text_size", 0.0),
            viewers=info.viewers,
            custom_features=rescale(info.custom, scales),
            train_rates=tuple(info.base_rates[task] for task in info.tasks),
            versions=versions,
        )
