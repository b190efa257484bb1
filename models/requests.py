"""Parsing of served requests: rows become arrays, and requests become a batch.

    requests = RetrievalRequests(bundle, model, catalogue, {"device": "cpu"})
    batch = requests.collate([requests.parse(Row(row)) for row in rows])

`models/<kind>/requests.py` declares the columns of a kind's requests. Most columns
are optional. The MLflow models in `pipelines/serving` use this module. A bundle is the
folder of a served model, with the checkpoint and copies of tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from core.errors import UserError
from core.ids import parse_item_ids
from core.schemas import CustomFeatures, Inputs
from core.tables import LARGEST_NUMBER
from models.custom_features import CATEGORY, NUMBER, read_features
from models.dataset.batch import Batch
from models.text.text_encoder import load_saved

Floats = NDArray[np.float32]

MAX_TEXT = 10_000
"""Longest text of a request in characters, such as a query, which may be cached."""

Columns = dict[str, Any]
"""Type of each column: `id` and `ids` of items, `string`, `strings`, `long`, `longs`,
`numbers` and `vectors`; `own_numbers`, `own_categories` and `labels` are mappings by
name. The type of a list of objects is a mapping with the types of their fields."""


class Row(dict[str, Any]):
    """The columns of one request.

    The methods raise UserError for invalid values.
    """

    def value(self, name: str) -> Any:
        """Return the value of a column, or None if it is missing."""
        (value,) = check_entries(name, [self.get(name)], 1)
        return None if isinstance(value, float) and np.isnan(value) else value

    def text(self, name: str) -> str | None:
        """Return a column of text, or None if it is missing."""
        value = self.value(name)
        if not isinstance(value, str | None):
            raise UserError(f"{name} is {value!r:.200}, which is not a text")
        return value

    def item_ids(self, name: str) -> list[str]:
        """Return a column of item ids, normalised like the ids of the catalogue."""
        return parse_item_ids(name, self[name])

    def entries(self, name: str, count: int, default: Any = None) -> list[Any]:
        """Return a list column.

        Args:
            name: Name of the column.
            count: Required number of entries.
            default: Value of all entries if the request does not have the column.
        """
        return check_entries(name, self.value(name), count, default)

    def entries_by_name(
        self, name: str, keys: Collection[str], count: int
    ) -> dict[str, list[Any]]:
        """Return a column of named lists.

        Args:
            name: Name of the column.
            keys: Names of the lists that the model reads.
            count: Required number of entries of each list.
        """
        lists = self.value(name) or {}
        for key in lists:
            if key not in keys:
                raise UserError(
                    f"{name} has '{key!s:.200}', which the model does not read"
                )
        return {
            key: check_entries(f"'{key}' of {name}", values, count)
            for key, values in lists.items()
        }

    def vectors(self, name: str, default: Floats) -> Floats:
        """Return a column of vectors.

        Args:
            name: Name of the column.
            default: (count, width) values for NaN, and for a missing column.

        Returns:
            (count, width) values.
        """
        count, width = default.shape
        vectors = self.value(name)
        if vectors is None:
            return default
        if any(vector is None for vector in vectors):
            raise UserError(f"{name} has an entry without numbers")
        widths = {len(vector) for vector in vectors} or {width}
        if len(vectors) != count or widths != {width}:
            given_widths = ", ".join(map(str, sorted(widths)))
            raise UserError(
                f"{name} has {len(vectors)} vectors of {given_widths} numbers, {count} "
                f"of {width} are expected"
            )
        values = np.array([list(vector) for vector in vectors], np.float32)
        values = values.reshape(count, width)
        return _check_finite(name, np.where(np.isnan(values), default, values))

    def custom_features(
        self,
        features: CustomFeatures,
        prefix: str,
        count: int,
        defaults: Mapping[str, pa.Array] | None = None,
    ) -> Floats:
        """Return the log's custom features.

        Args:
            features: Custom features of the log.
            prefix: Prefix of the names of the columns, `{prefix}numbers` and
                `{prefix}categories`.
            count: Number of candidates or behaviours.
            defaults: (count,) values of features that the request does not have, by
                name of the feature.

        Returns:
            (count, X + G) values, as from `CustomFeatures.matrix`.
        """
        columns, names = dict(defaults or {}), _list_custom_names(features)
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
        return read_features(features, columns, count)


@dataclass(frozen=True)
class Request:
    """A parsed request to rank candidates."""

    candidates: list[str]
    """Item ids in the order of the request."""
    scored: list[int]
    """Indices of the scored candidates, which are items of the catalogue or new items
    that the request describes."""
    events: int
    """Number of behaviours of the history that the model reads."""
    parts: dict[str, NDArray]
    """Arrays by name, with an entry per behaviour or per scored candidate. `collate`
    concatenates the arrays of all requests."""
    new: Sequence[dict[str, Any]] = ()
    """Items of the request that are not in the catalogue."""


class Requests:
    """Parser of the requests of one kind.

    The defaults are for a kind that ranks candidates.
    """

    required_columns: ClassVar[Columns] = {"candidates": "ids", "history": "ids"}
    """Columns that every request must have; the history is oldest first."""
    optional_columns: ClassVar[Columns] = {}
    """Columns that a request may have for any log; `columns` adds the log's columns."""
    answer_columns: ClassVar[Columns] = {"item_id": "strings", "score": "numbers"}
    """Columns of a response, best item first."""
    settings: ClassVar[Mapping[str, Any]] = {"device": "cpu"}  # or cuda
    """Options for loading a served model, with their defaults."""

    def __init__(
        self, folder: str, model: Any, catalogue: Any, settings: Mapping[str, Any]
    ) -> None:
        """Load the items, and the text encoder if the bundle has one.

        Args:
            folder: Folder of the bundle.
            model: Model that answers the requests.
            catalogue: Catalogue of the model.
            settings: Options for loading, as declared in `settings`.
        """
        items = catalogue.versions["items"].read(["item_id"])
        self.items: list[str] = items["item_id"].to_pylist()
        self.index = {item: index for index, item in enumerate(self.items)}
        self.encoder = None
        """Encoder of texts that are not in the tables; None if the bundle has none."""
        if Path(folder, "encoder").exists():
            self.encoder = load_saved(f"{folder}/encoder")

    def parse(self, row: Row) -> Any:
        """Parse one row."""
        raise NotImplementedError

    def collate(self, requests: Sequence[Any]) -> Batch:
        """Return the batch of parsed requests."""
        raise NotImplementedError

    @classmethod
    def columns(cls, info: Any, inputs: Inputs) -> Columns:
        """Return all optional columns, including columns of the log's custom features.

        Args:
            info: Info of the sequences.
            inputs: Folders of the tables.
        """
        columns = dict(cls.optional_columns)
        for kind in _list_custom_names(info.custom):
            columns[kind] = f"own_{kind}"
            columns[f"history_{kind}"] = f"own_{kind}"
        return columns

    @classmethod
    def list_names(cls, info: Any) -> dict[str, Any]:
        """Return the ordered names of features, actions and labels in requests.

        Args:
            info: Info of the sequences.
        """
        return {"labels": list(info.log.labels)} | _list_custom_names(info.custom)


def check_entries(
    name: str, values: Iterable[Any] | None, count: int, default: Any = None
) -> list[Any]:
    """Return the values as a list of `count` entries without too long texts."""
    entries = [default] * count if values is None else list(values)
    if len(entries) != count:
        raise UserError(f"{name} has {len(entries)} entries where {count} are expected")
    if any(isinstance(entry, str) and len(entry) > MAX_TEXT for entry in entries):
        raise UserError(f"{name} has a text of over {MAX_TEXT} characters")
    return entries


def _check_finite(name: str, values: Floats) -> Floats:
    """Return the values unchanged if they are not too large."""
    if (np.abs(values) > LARGEST_NUMBER).any():
        raise UserError(
            f"{name} has an infinite number, or one over {LARGEST_NUMBER:g}"
        )
    return values


def _list_custom_names(features: CustomFeatures) -> dict[str, list[str]]:
    """Return the names of the log's custom features, by kind."""
    if not features.names:
        return {}
    prefixes = {"numbers": NUMBER, "categories": CATEGORY}
    return {
        kind: [name.removeprefix(p) for name in features.names if name.startswith(p)]
        for kind, p in prefixes.items()
    }


def find_bundled_inputs(folder: str) -> Inputs:
    """Return the input folders that a bundle contains."""
    optional = {
        name: f"{folder}/{name}"
        for name in ("sids", "text")
        if Path(folder, name).exists()
    }
    return Inputs(f"{folder}/tables", **optional)
