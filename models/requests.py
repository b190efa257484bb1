"""Parsing of served requests: a row of a frame becomes arrays, and requests together become a batch.

    requests = family.requests(bundle, model, catalogue, {"device": "cpu"})
    batch = requests.collate([requests.parse(Row(row)) for row in rows])

`models/<family>/requests.py` declares the columns of a family's requests; most may be
left out. `pipelines/serving` has the MLflow models that call it. A bundle is the folder
of a served model: its checkpoint, and copies of tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from models.config import did_you_mean
from models.dataset.batch import Batch
from models.item_ids import parse_item_ids
from models.own_features import CATEGORY, NUMBER, OwnFeatures
from models.storage.inputs import MADE_BY, Inputs
from models.storage.tables import LARGEST_NUMBER, UserError, read_table
from models.text.text_encoder import load_saved

Floats = NDArray[np.float32]

NAMES = ("features", "actions", "viewers")
"""Keys of the manifest of sequences that list names in order, beside labels."""

Columns = dict[str, Any]
"""Type of each column: `ids` of items, `id`, `string`, `strings`, `long`, `longs`,
`numbers`, `vectors`, by name `own_numbers`, `own_categories` or `labels`, or for a list
of objects a mapping with the types of their fields."""


class Row(dict[str, Any]):
    """The columns of one request. Its methods raise UserError for values that no request can have."""

    def value(self, name: str) -> Any:
        """Return the value of a column, or None if it is missing."""
        value = self.get(name)
        return None if isinstance(value, float) and np.isnan(value) else value

    def item_ids(self, name: str) -> list[str]:
        """Return a column of item ids, in the form of the catalogue's ids."""
        return parse_item_ids(name, self[name])

    def entries(self, name: str, count: int, default: Any = None) -> list[Any]:
        """Return the `count` entries of a list, all `default` where the column is left out."""
        return _check_count(name, self.value(name), count, default)

    def entries_by_name(
        self, name: str, known: Collection[str], count: int
    ) -> dict[str, list[Any]]:
        """Return the lists of a mapping, each with `count` entries and a name that is `known`."""
        lists = self.value(name) or {}
        for key in lists:
            if key not in known:
                near = did_you_mean(
                    key, known, f"it reads no {name.removeprefix('history_')}"
                )
                raise UserError(
                    f"{name} has '{key}', which the model does not read; {near}"
                )
        return {
            key: _check_count(f"'{key}' of {name}", values, count)
            for key, values in lists.items()
        }

    def vectors(self, name: str, default: Floats) -> Floats:
        """Return a column of vectors (count, width), with `default` (count, width) for NaN and a missing column."""
        (count, width), vectors = default.shape, self.value(name)
        if vectors is None:
            return default
        if any(vector is None for vector in vectors):
            raise UserError(
                f"{name} has an entry without numbers; give NaN for what is not known, or leave it out"
            )
        widths = {len(vector) for vector in vectors} or {width}
        if len(vectors) != count or widths != {width}:
            wide = ", ".join(map(str, sorted(widths)))
            raise UserError(
                f"{name} has {len(vectors)} vectors of {wide} numbers, {count} of {width} are expected; the model's "
                f"metadata names them"
            )
        values = np.array([list(vector) for vector in vectors], np.float32)
        values = values.reshape(count, width)
        return _check_finite(name, np.where(np.isnan(values), default, values))

    def own_features(
        self,
        own: OwnFeatures,
        prefix: str,
        count: int,
        defaults: Mapping[str, pa.Array] | None = None,
    ) -> Floats:
        """Return the log's own features (count, X + G).

        Args:
            own: The features.
            prefix: Beginning of the names of the two columns, `{prefix}numbers` and
                `{prefix}categories`.
            count: Number of candidates or behaviours.
            defaults: Columns of the features that the request leaves out.
        """
        columns, names = dict(defaults or {}), _own_names(own)
        numbers = self.entries_by_name(
            f"{prefix}numbers", names.get("numbers", ()), count
        )
        for name, values in numbers.items():
            _check_finite(f"'{name}' of {prefix}numbers", np.array(values, np.float32))
            columns[NUMBER + name] = pa.array(values, pa.float32(), from_pandas=True)
        categories = self.entries_by_name(
            f"{prefix}categories", names.get("categories", ()), count
        )
        for name, values in categories.items():
            columns[CATEGORY + name] = pa.array(values, pa.string(), from_pandas=True)
        return own.matrix(columns, count)


@dataclass(frozen=True)
class Request:
    """A parsed request that ranks candidates."""

    candidates: list[str]
    """Ids, in the order of the row."""
    known: list[int]
    """Indices of the candidates that are scored: those of the catalogue, and new
    items."""
    events: int
    """Number of behaviours that are read."""
    parts: dict[str, NDArray]
    """Arrays by behaviour or by scored candidate; `collate` concatenates those of all
    requests."""
    new: Sequence[dict[str, Any]] = ()
    """Items of the row that are not in the catalogue."""


class Requests:
    """Parser of one family's requests, by default of a family that ranks candidates."""

    required_columns: ClassVar[Columns] = {"candidates": "ids", "history": "ids"}
    """Columns of every request; the history is oldest first."""
    optional_columns: ClassVar[Columns] = {}
    """Columns that a request may have, beside those that depend on the log
    (`columns`)."""
    answer_columns: ClassVar[Columns] = {"item_id": "strings", "score": "numbers"}
    """Columns of an answer, best item first."""
    settings: ClassVar[Mapping[str, Any]] = {"device": "cpu"}  # or cuda
    """Options of loading a served model, with their defaults."""

    def __init__(
        self, folder: str, model: Any, catalogue: Any, settings: Mapping[str, Any]
    ) -> None:
        """Read the items, and the encoder if the bundle has one, from `folder`."""
        items = read_table(f"{folder}/tables/items", "items", ["item_id"])
        self.items: list[str] = items["item_id"].to_pylist()
        self.index = {item: number for number, item in enumerate(self.items)}
        self.encoder = None
        """Encoder of texts that training has not seen, if the bundle has it."""
        if Path(folder, "encoder").exists():
            self.encoder = load_saved(f"{folder}/encoder")

    def parse(self, row: Row) -> Any:
        """Return the request of a row.

        Raises:
            UserError: If the row has a value that no request can have.
        """
        raise NotImplementedError

    def collate(self, requests: Sequence[Any]) -> Batch:
        """Return the batch of parsed requests."""
        raise NotImplementedError

    @classmethod
    def columns(cls, info: Mapping[str, Any], inputs: Inputs) -> Columns:
        """Return all optional columns, including columns for the log's own features.

        Args:
            info: The manifest's `info` of the sequences.
            inputs: Where the tables are.
        """
        own = _own_names(OwnFeatures.from_info(info))
        own_columns = {
            f"{prefix}{kind}": f"own_{kind}"
            for kind in own
            for prefix in ("", "history_")
        }
        return {**cls.optional_columns, **own_columns}

    @classmethod
    def about(cls, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names of features, actions and labels in order, which the sender of requests has to know."""
        labels = info.get("tasks", info.get("labels"))
        lists = {"labels": labels} | {name: info.get(name) for name in NAMES}
        names = {key: list(names) for key, names in lists.items() if names is not None}
        return names | _own_names(OwnFeatures.from_info(info))


def _check_count(
    name: str, values: Iterable[Any] | None, count: int, default: Any = None
) -> list[Any]:
    """Return `count` values, all `default` where none are given.

    Raises:
        UserError: If there is another number of values.
    """
    entries = [default] * count if values is None else list(values)
    if len(entries) != count:
        raise UserError(
            f"{name} has {len(entries)} entries where {count} are expected; give one each"
        )
    return entries


def _check_finite(name: str, values: Floats) -> Floats:
    """Return the values.

    Raises:
        UserError: If a number is infinite, or its square is infinite in float32.
    """
    if (np.abs(values) > LARGEST_NUMBER).any():
        raise UserError(
            f"{name} has an infinite number, or one over {LARGEST_NUMBER:g}; give NaN for what is not known"
        )
    return values


def _own_names(own: OwnFeatures) -> dict[str, list[str]]:
    """Return the names of the log's own features in requests, by column: `numbers` and `categories`."""
    if not own.names:
        return {}
    prefixes = {"numbers": NUMBER, "categories": CATEGORY}
    return {
        kind: [name.removeprefix(p) for name in own.names if name.startswith(p)]
        for kind, p in prefixes.items()
    }


def find_bundled_inputs(folder: str) -> Inputs:
    """Return the tables of a bundle, and the folders beside them that it has."""
    beside = {
        name: f"{folder}/{name}" for name in MADE_BY if Path(folder, name).exists()
    }
    return Inputs(f"{folder}/tables", **beside)
