"""Requests to a served retrieval model: histories of item ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, Field

from core.ids import MAX_SERVED_ID, clean_id
from core.options import STRICT
from core.schemas import sequences_schema
from models.dataset.batch import Batch
from models.requests import Ids, Requests, ServedRequest

MAX_K = 10_000
"""Largest number of items of a ranking."""

EVERY = ["*"]
"""Default of a call's `allowed`: all items. A client's empty list, or [""], is an empty
set of items."""

UserId = Annotated[
    str,
    BeforeValidator(lambda value: clean_id(str(value)) or ""),
    Field(max_length=MAX_SERVED_ID),
]


class RetrievalRequest(ServedRequest):
    """A request for a ranking of the catalogue after a history."""

    user_id: UserId = ""

    def to_row(self, items: Sequence[int]) -> dict[str, Any]:
        """Return a row of `sequences`, with the history as `item_index`."""
        return {"user_id": self.user_id, "item_index": items, "requests": []}


class CatalogueOptions(BaseModel):
    """Options of all requests of a call to a model that ranks the catalogue."""

    model_config = STRICT

    k: Annotated[int, Field(ge=1, le=MAX_K)] = 10
    """Number of items of a ranking."""
    unseen: bool = False
    """Whether to leave out the items of the history."""
    allowed: Ids = EVERY
    """Ids of the items that may be ranked; ["*"] for all."""


class RetrievalRequests(Requests):
    """Reader of requests for a ranking of the catalogue."""

    split = "next"
    schema = sequences_schema(pa.schema([]))
    base_class = RetrievalRequest
    options_class = CatalogueOptions

    def find_items(self, ids: Iterable[str]) -> list[int]:
        """Return the `item_index` of ids, without ids outside the catalogue."""
        return [self.index[item] for item in ids if item in self.index]

    def collate(self, requests: Sequence[RetrievalRequest], max_history: int) -> Batch:
        """Return the batch of requests, each with an item of the catalogue."""
        rows = [
            request.to_row(self.find_items(request.history)) for request in requests
        ]
        return self.collate_rows(rows, max_history)
