"""Requests to a served retrieval model: histories of item ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import pyarrow as pa
import torch
from pydantic import BaseModel, BeforeValidator, Field
from torch import Tensor

from core.errors import UserError
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

    def find_history(self, request: RetrievalRequest) -> list[int]:
        """Return the history as `item_index`, without items outside the catalogue."""
        return [self.index[item] for item in request.history if item in self.index]

    def collate(self, requests: Sequence[RetrievalRequest], max_history: int) -> Batch:
        """Return the batch of requests, each with an item of the catalogue."""
        rows = [request.to_row(self.find_history(request)) for request in requests]
        return self.collate_rows(rows, max_history)

    def parse_allowed(self, ids: Sequence[str]) -> Tensor:
        """Return a mask (I,) of the catalogue's items with these ids.

        Other ids are ignored.
        """
        index = [self.index[item] for item in ids if item in self.index]
        if not index:
            raise UserError(
                f"allowed has {len(ids)} ids, and none of an item of the catalogue"
            )
        mask = torch.zeros(len(self.items), dtype=torch.bool)
        return mask.index_fill(0, torch.tensor(index), True)
