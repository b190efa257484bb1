"""Served requests: a pydantic model per kind, whose requests become a batch.

    requests = RetrievalRequests(bundle, model, catalogue, Settings())
    request = requests.request_class.model_validate({"history": ["B01", "B02"]})
    batch = requests.collate_rows([requests.to_row(request)], max_history)

A request becomes a row of `sequences`, which the dataset of the training decodes and
collates (`models/<kind>/requests.py`). The MLflow models in `pipelines/serving` use
this module. A bundle is the folder of a served model, with the checkpoint and copies of
tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from core.schemas import CustomFeatures
from core.tables import LARGEST_NUMBER
from models.custom_features import CATEGORY, NUMBER
from models.text.text_encoder import load_saved

Floats = NDArray[np.float32]

MAX_ROWS = 10_000
"""Largest number of requests of a call."""

MAX_TEXT = 10_000
"""Longest text of a request in characters, such as a query, which may be cached."""

KINDS = {"numbers": NUMBER, "categories": CATEGORY}
"""Prefix of the columns of custom features, by the name of their field."""


def refuse_large(values: Any) -> Any:
    """Return a number or numbers, of which NaN and None are missing."""
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
            expected = self.history if name.startswith("history") else self.candidates
            lists = value if isinstance(value, dict) else {name: value}
            for key, values in lists.items():
                if isinstance(values, list) and len(values) != len(expected):
                    raise ValueError(
                        f"{key} has {len(values)} entries where {len(expected)} are "
                        "expected"
                    )
        return self

    def custom_columns(
        self,
        features: CustomFeatures,
        prefix: str = "",
        defaults: Mapping[str, list[Any]] | None = None,
    ) -> dict[str, list[Any]]:
        """Return the custom features of all candidates or behaviours, by column.

        Args:
            features: Custom features of the log.
            prefix: "history_" for behaviours.
            defaults: Values of columns that the request leaves out.
        """
        missing: list[Any] = [None] * len(self.history if prefix else self.candidates)
        columns = {**dict.fromkeys(features.names, missing), **(defaults or {})}
        for kind in list_custom_names(features):
            for name, values in (getattr(self, prefix + kind) or {}).items():
                columns[KINDS[kind] + name] = values
        return columns


class CandidateOptions(BaseModel):
    """Options of all requests of a call to a model that ranks candidates."""

    model_config = CONTRACT

    label: Text = ""
    """Label whose probability is the score; by default the model's first one."""


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
    """Split of the rows of requests."""
    schema: pa.Schema
    """Columns of the rows of requests."""
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
        """Return the fields that this log adds, such as custom features."""
        fields: dict[str, Any] = {}
        for kind, names in list_custom_names(self.info.custom).items():
            values = Numbers if kind == "numbers" else Texts
            lists = make_dict(kind, dict.fromkeys(names, values | None))
            fields[kind] = fields[f"history_{kind}"] = (lists | None, None)
        return fields

    def find_candidates(self, request: Any) -> list[int]:
        """Return the indices of the candidates that the model can score."""
        return [i for i, item in enumerate(request.candidates) if item in self.index]

    def collate_rows(
        self, rows: list[dict[str, Any]], max_history: int, **changes: Any
    ) -> Any:
        """Return the batch of rows of `sequences`.

        Args:
            rows: The rows, one per request.
            max_history: Maximum number of behaviours of a request.
            changes: Fields of the selection that differ from those of the model.
        """
        kind = self.model.kind
        columns = kind.decode(pa.Table.from_pylist(rows, self.schema), self.info)
        selection = self.model.selection(
            self.catalogue, self.split, max_history=max_history, **changes
        )
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


def fill_missing(name: str, vectors: Sequence[Any] | None, default: Floats) -> Floats:
    """Return vectors with the default (n, F) in place of NaN, None or all of them."""
    if vectors is None:
        return default
    count, width = default.shape
    widths = {len(vector) for vector in vectors} - {width}
    if widths:
        raise UserError(
            f"{name} has a vector of {min(widths)} numbers, {width} are expected"
        )
    values = np.array(vectors, np.float32).reshape(count, width)
    return np.where(np.isnan(values), default, values)


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
