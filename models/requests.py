"""Served requests: a pydantic model per kind, whose requests become a batch.

    requests = RetrievalRequests(bundle, model, catalogue, Settings())
    request = requests.request_class.model_validate({"history": ["B01", "B02"]})
    batch = requests.collate([request], max_history)

Requests become the columns that the kind decodes from `sequences` in training, and are
collated as there (`models/<kind>/requests.py`). The MLflow models in
`pipelines/serving` use this module. A bundle is the folder of a served model, with the
checkpoint and copies of tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)
from typing_extensions import TypedDict

from core.errors import UserError
from core.ids import parse_item_id
from core.ragged import row_numbers
from core.schemas import CustomFeatures
from core.tables import LARGEST_NUMBER
from models.custom_features import CATEGORY, NUMBER
from models.text.text_encoder import load_saved

Floats = NDArray[np.float32]

RequestColumns = tuple[dict[str, Any], dict[str, Any]]
"""Columns of requests, and fields of the selection (`Requests.to_columns`)."""

MAX_ROWS = 10_000
"""Largest number of requests of a call."""

MAX_TEXT = 10_000
"""Longest text of a request in characters, such as a query, which may be cached."""

KINDS = {"numbers": NUMBER, "categories": CATEGORY}
"""Prefix of the columns of custom features, by the name of their field."""


def refuse_large(values: Any) -> Any:
    """Return a number or numbers; NaN and None are missing values."""
    if (np.abs(np.array(values, np.float64)) > LARGEST_NUMBER).any():
        raise ValueError(f"a number is infinite or over {LARGEST_NUMBER:g}")
    return values


ItemId = Annotated[str, BeforeValidator(parse_item_id)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Time = Annotated[int, Field(gt=-(2**62), lt=2**62)]
Ids = Annotated[list[ItemId], Field(fail_fast=True)]
Texts = Annotated[list[Text | None], Field(fail_fast=True)]
Times = Annotated[list[Time | None], Field(fail_fast=True)]
Numbers = Annotated[
    list[float | None], Field(fail_fast=True), AfterValidator(refuse_large)
]
Vectors = Annotated[list[Numbers], Field(fail_fast=True)]


CONTRACT = ConfigDict(extra="forbid", use_attribute_docstrings=True)
"""Settings of requests: unknown keys are refused; NaN is a missing value."""


class ServedRequest(BaseModel):
    """A request to a served model."""

    model_config = CONTRACT

    history: Ids
    """Item ids of the user's behaviours, oldest first."""


class CandidateRequest(ServedRequest):
    """A request to rank candidates.

    Lists have a value for each candidate, and lists whose names start with `history_`
    for each behaviour.
    """

    candidates: Ids
    """Item ids."""
    timestamp_ms: Time | None = None
    """Time of the request."""
    features: Vectors | None = None
    """Features in the order of the model's metadata; missing ones have the mean."""
    history_time_ms: Times | None = None

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        """Raise ValueError for a list of another length."""
        for name, value in self:
            if name in ("history", "candidates", "new_items"):
                continue
            ids = self.history if name.startswith("history") else self.candidates
            for values in value.values() if isinstance(value, dict) else [value]:
                if isinstance(values, list) and len(values) != len(ids):
                    raise ValueError(
                        f"{name} has {len(values)} entries where {len(ids)} are "
                        "expected"
                    )
        return self


class CandidateOptions(BaseModel):
    """Options of all requests of a call to a model that ranks candidates."""

    model_config = CONTRACT

    label: Text = ""
    """Label whose probability is the score; by default the model's first one."""


class Entries:
    """The behaviours, or the candidates, of requests that a model reads, end to end.

    Args:
        requests: The requests.
        prefix: "history_" for behaviours, "" for candidates.
        selected: Positions of the entries of each request.
    """

    def __init__(
        self, requests: Sequence[Any], prefix: str, selected: list[list[int]]
    ) -> None:
        self.requests, self.prefix, self.selected = requests, prefix, selected
        self.counts = np.array([len(positions) for positions in selected], np.int64)
        """Number of entries of each request."""
        self.request = row_numbers(self.counts)
        """Row of each entry's request."""

    def read(self, name: str, key: str = "") -> list[Any]:
        """Return the value of each entry in the list `name`, or in its list `key`.

        Values that the requests leave out are None.
        """
        values: list[Any] = []
        for request, positions in zip(self.requests, self.selected, strict=True):
            column = getattr(request, name) or {}
            if key:
                column = column.get(key) or {}
            values += [column[i] if column else None for i in positions]
        return values

    def read_vectors(self, name: str, default: Floats) -> Floats:
        """Return vectors (n, F), with numbers of `default` (n, F) where missing."""
        width = default.shape[1]
        rows = [vector or [None] * width for vector in self.read(name)]
        if widths := {len(vector) for vector in rows} - {width}:
            raise UserError(
                f"{name} has a vector of {min(widths)} numbers, {width} are expected"
            )
        values = np.array(rows, np.float32).reshape(default.shape)
        return np.where(np.isnan(values), default, values)

    def read_custom(self, features: CustomFeatures) -> dict[str, pa.Array]:
        """Return the log's custom features, by column."""
        columns = {}
        for field in custom_schema(features.names):
            kind = "numbers" if field.name.startswith(NUMBER) else "categories"
            values = self.read(self.prefix + kind, field.name.removeprefix(KINDS[kind]))
            columns[field.name] = pa.array(values, field.type)
        return columns


class Settings(BaseModel):
    """Options for loading a served model."""

    model_config = CONTRACT

    device: str = "cpu"
    """Device of the model, such as `cuda`."""
    trust_code: bool = False
    """Whether to run code that the checkpoint contains."""


class Requests:
    """Reader of the requests of one kind."""

    split: ClassVar[str] = "test"
    """Split of the examples of requests."""
    base_class: ClassVar[type[ServedRequest]]
    """Requests with the fields that all logs have."""
    options_class: ClassVar[type[BaseModel]] = CandidateOptions
    settings_class: ClassVar[type[Settings]] = Settings

    def __init__(
        self, folder: str, model: Any, catalogue: Any, settings: Settings
    ) -> None:
        """Load the items, and the text encoder if the bundle has one.

        Args:
            folder: Folder of the bundle.
            model: Model that answers the requests.
            catalogue: Catalogue of the model.
            settings: Options for loading, of `settings_class`.
        """
        items = catalogue.versions["items"].read(["item_id"])
        self.items: list[str] = items["item_id"].to_pylist()
        self.index = {item: index for index, item in enumerate(self.items)}
        self.info = catalogue.versions["sequences"].info
        self.model, self.catalogue = model, catalogue
        self.max_history: int = model.config.max_history
        self.encoder = None
        """Encoder of texts that are not in the tables; None if the bundle has none."""
        if Path(folder, "encoder").exists():
            self.encoder = load_saved(f"{folder}/encoder")
        self.request_class = create_model(
            self.base_class.__name__, __base__=self.base_class, **self.log_fields()
        )
        """Requests with the fields of the model's log."""

    def log_fields(self) -> dict[str, Any]:
        """Return the fields that the model's log adds to `base_class`, by name."""
        fields: dict[str, Any] = {}
        for kind, names in list_custom_names(self.info.custom).items():
            values = Numbers if kind == "numbers" else Texts
            lists = make_dict(kind, dict.fromkeys(names, values | None))
            fields[kind] = fields[f"history_{kind}"] = (lists | None, None)
        return fields

    def find_known(self, request: Any, ids: Sequence[str]) -> list[int]:
        """Return the positions of the ids of items that the model can read."""
        return [i for i, item in enumerate(ids) if item in self.index]

    def find_past(self, request: Any) -> list[int]:
        """Return the positions of the latest behaviours that the model can read."""
        return self.find_known(request, request.history)[-self.max_history :]

    def split_entries(self, requests: Sequence[Any]) -> tuple[Entries, Entries]:
        """Return the behaviours, and the candidates, that the model can read."""
        past = [self.find_past(request) for request in requests]
        known = [self.find_known(request, request.candidates) for request in requests]
        return Entries(requests, "history_", past), Entries(requests, "", known)

    def to_columns(self, requests: Sequence[Any]) -> RequestColumns:
        """Return requests as columns in the layout of the kind's `decode`.

        Items outside the catalogue are left out.

        Returns:
            The columns, and fields of the selection that differ from those of the
            model.
        """
        raise NotImplementedError

    def collate(self, requests: Sequence[Any], max_history: int) -> Any:
        """Return the batch of requests."""
        columns, fields = self.to_columns(requests)
        selection = self.model.selection(
            self.catalogue, self.split, max_history=max_history, **fields
        )
        kind = self.model.kind
        return kind.collate(kind.plan(columns, selection))

    @classmethod
    def list_names(cls, info: Any) -> dict[str, Any]:
        """Return the ordered names of features, actions and labels in requests.

        Args:
            info: Info of the sequences.
        """
        return {"labels": list(info.log.labels)} | list_custom_names(info.custom)


def make_dict(name: str, fields: dict[str, Any]) -> Any:
    """Return the type of a dict with some or all of these fields, and no others."""
    made: Any = TypedDict(name, fields, total=False)  # type: ignore[misc, operator]
    made.__pydantic_config__ = CONTRACT  # type: ignore[attr-defined]
    return made


def custom_schema(names: Iterable[str]) -> pa.Schema:
    """Return the schema of columns: `num_*` are numbers, others text."""
    number, text = pa.float32(), pa.string()
    return pa.schema([(n, number if n.startswith(NUMBER) else text) for n in names])


def list_custom_names(features: CustomFeatures) -> dict[str, list[str]]:
    """Return the names of the log's custom features, by kind."""
    if not features.names:
        return {}
    return {
        kind: [name.removeprefix(p) for name in features.names if name.startswith(p)]
        for kind, p in KINDS.items()
    }
