"""How a family reads what a served model is asked: a row of a frame, of whose columns most may be left out.

    requests = family.requests(bundle, model, catalogue, {"device": "cpu"})
    batch = requests.batch([requests.read(Row(row)) for row in rows])

`models/<family>/requests.py` says which columns there are and makes a batch of them; `pipelines/serving` has the MLflow
models that ask it. A bundle is the folder with what such a model needs: the checkpoint, and copies of tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from models.config import did_you_mean
from models.item_ids import parse_item_ids
from models.own_features import CATEGORY, NUMBER, OwnFeatures
from models.storage.inputs import MADE_BY, Inputs
from models.storage.tables import LARGEST_NUMBER, UserError, read_table
from models.text.text_encoder import load_saved

Floats = NDArray[np.float32]

NAMES = ("features", "actions", "viewers")
"""What the manifest of sequences names, in order, beside labels."""

Columns = dict[str, Any]
"""By column its type: `ids` of items, `id`, `string`, `strings`, `long`, `longs`, `numbers`, `vectors`, by name
`own_numbers`, `own_categories` or `labels`, or a list of objects as a mapping of the types of their fields."""


class Row(dict[str, Any]):
    """A request: the values of its columns. What does not fit is a UserError."""

    def given(self, name: str) -> Any:
        """What it has in a column, None where it has nothing."""
        value = self.get(name)
        return None if isinstance(value, float) and np.isnan(value) else value

    def ids(self, name: str) -> list[str]:
        """A column of ids, as the catalogue has them."""
        return parse_item_ids(name, self[name])

    def column(self, name: str, count: int, empty: Any = None) -> list[Any]:
        """`count` entries of a column of lists, `empty` for what is not given."""
        return counted(name, self.given(name), count, empty)

    def by_name(
        self, name: str, known: Collection[str], count: int
    ) -> dict[str, list[Any]]:
        """The `count` entries of each list that a column gives by name; the model reads those that are `known`."""
        found = self.given(name) or {}
        for key in found:
            if key not in known:
                near = did_you_mean(
                    key, known, f"it reads no {name.removeprefix('history_')}"
                )
                raise UserError(
                    f"{name} has '{key}', which the model does not read; {near}"
                )
        return {
            key: counted(f"'{key}' of {name}", values, count)
            for key, values in found.items()
        }

    def vectors(self, name: str, empty: Floats) -> Floats:
        """(count, width) of a column of vectors, `empty` (count, width) for what is not given."""
        (count, width), there = empty.shape, self.given(name)
        if there is None:
            return empty
        if any(vector is None for vector in there):
            raise UserError(
                f"{name} has an entry without numbers; give NaN for what is not known, or leave it out"
            )
        widths = {len(vector) for vector in there} or {width}
        if len(there) != count or widths != {width}:
            wide = ", ".join(map(str, sorted(widths)))
            raise UserError(
                f"{name} has {len(there)} vectors of {wide} numbers, {count} of {width} are expected; the model's "
                f"metadata names them"
            )
        values = np.array([list(vector) for vector in there], np.float32).reshape(
            count, width
        )
        return finite(name, np.where(np.isnan(values), empty, values))

    def own(
        self,
        own: OwnFeatures,
        of: str,
        count: int,
        usual: Mapping[str, pa.Array] | None = None,
    ) -> Floats:
        """(count, own features) of what the columns `{of}numbers` and `{of}categories` give by name; `usual` has
        columns for those that they do not give."""
        columns, names = dict(usual or {}), own_names(own)
        for name, values in self.by_name(
            f"{of}numbers", names.get("numbers", ()), count
        ).items():
            finite(f"'{name}' of {of}numbers", np.array(values, np.float32))
            columns[NUMBER + name] = pa.array(values, pa.float32(), from_pandas=True)
        for name, values in self.by_name(
            f"{of}categories", names.get("categories", ()), count
        ).items():
            columns[CATEGORY + name] = pa.array(values, pa.string(), from_pandas=True)
        return own.matrix(columns, count)


@dataclass(frozen=True)
class Request:
    """What a row says."""

    candidates: list[str]
    """Ids, in the order given."""
    known: list[int]
    """Places of those that are scored: of the catalogue's, and of new items."""
    events: int
    """Behaviours that are read."""
    parts: dict[str, NDArray]
    """Arrays by name, by behaviour that is read or candidate that is scored, to be joined in a batch."""
    new: Sequence[dict[str, Any]] = ()
    """Items that the row brings and that are not in the catalogue."""


class Requests:
    """The requests of one family: here of one that ranks candidates."""

    needs: ClassVar[Columns] = {"candidates": "ids", "history": "ids"}  # oldest first
    """Columns of every request."""
    takes: ClassVar[Columns] = {}
    """Columns that a request may have beside those that follow from the log (`columns`)."""
    gives: ClassVar[Columns] = {"item_id": "strings", "score": "numbers"}  # best first
    """Columns of an answer."""
    settings: ClassVar[Mapping[str, Any]] = {"device": "cpu"}  # or cuda
    """What may be set when the model is loaded, with its defaults."""

    def __init__(
        self, folder: str, model: Any, catalogue: Any, settings: Mapping[str, Any]
    ) -> None:
        """Of a bundle."""
        self.items: list[str] = read_table(
            f"{folder}/tables/items", "items", ["item_id"]
        )["item_id"].to_pylist()
        self.index = {item: number for number, item in enumerate(self.items)}
        self.encoder = (
            load_saved(f"{folder}/encoder")
            if Path(folder, "encoder").exists()
            else None
        )
        """What encodes texts that training has not seen, where the bundle has it."""

    def read(self, row: Row) -> Any:
        """A `Request`, or what else `batch` takes; UserError for what no request can have. The row is not changed."""
        raise NotImplementedError

    def batch(self, requests: Sequence[Any]) -> dict[str, Tensor]:
        """What the model scores."""
        raise NotImplementedError

    @classmethod
    def columns(cls, info: Mapping[str, Any], inputs: Inputs) -> Columns:
        """`takes`, and what follows from the log, by the `info` of its sequences: its own features, of candidates and
        of behaviours."""
        own = own_names(OwnFeatures.of(info))
        return {
            **cls.takes,
            **{f"{of}{kind}": f"own_{kind}" for kind in own for of in ("", "history_")},
        }

    @classmethod
    def about(cls, info: Mapping[str, Any]) -> dict[str, Any]:
        """What whoever sends requests has to know: the names of features, actions and labels, in order."""
        told = {"labels": info.get("tasks", info.get("labels"))} | {
            name: info.get(name) for name in NAMES
        }
        found = {name: list(names) for name, names in told.items() if names is not None}
        return found | own_names(OwnFeatures.of(info))


def counted(
    what: str, values: Iterable[Any] | None, count: int, empty: Any = None
) -> list[Any]:
    """`count` values, `empty` where none are given; UserError for another number."""
    found = [empty] * count if values is None else list(values)
    if len(found) != count:
        raise UserError(
            f"{what} has {len(found)} entries where {count} are expected; give one each"
        )
    return found


def finite(name: str, values: Floats) -> Floats:
    """Return the values.

    Raises:
        UserError: for an infinite number, or one whose square is infinite in float32.
    """
    if (np.abs(values) > LARGEST_NUMBER).any():
        raise UserError(
            f"{name} has an infinite number, or one over {LARGEST_NUMBER:g}; give NaN for what is not known"
        )
    return values


def own_names(own: OwnFeatures) -> dict[str, list[str]]:
    """The log's own features as requests call them, by the column that gives them; nothing where there are none."""
    starts = {"numbers": NUMBER, "categories": CATEGORY} if own.names else {}
    return {
        kind: [x.removeprefix(start) for x in own.names if x.startswith(start)]
        for kind, start in starts.items()
    }


def bundled(folder: str) -> Inputs:
    """What a bundle has."""
    beside = {
        name: f"{folder}/{name}" for name in MADE_BY if Path(folder, name).exists()
    }
    return Inputs(f"{folder}/tables", **beside)
