"""Histories of a served retrieval model as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from models.item_ids import WITHOUT_ALLOWED, clean_id, parse_allowed
from models.requests import Columns, Requests, Row
from models.retrieval.data import collate_histories, hash_strings
from models.storage.tables import UserError

EVERY = ["*"]
"""The default of a call's `allowed`: all items. An empty list of a client, or its [""], is a set without an item."""


class History(NamedTuple):
    """What a row says: behaviours as `item_index`; the id of the user, or nothing; how many entries are not in the
    catalogue."""

    items: list[int]
    user: str
    unknown: int


class RetrievalRequests(Requests):
    """Rows as `models/retrieval/data.py` makes batches."""

    needs: ClassVar[Columns] = {"history": "ids"}  # oldest first
    takes: ClassVar[Columns] = {"user_id": "id"}
    # unknown_items: entries of the history that are not in the catalogue; note: why there are fewer than k items
    gives: ClassVar[Columns] = {
        **Requests.gives,
        "unknown_items": "long",
        "note": "string",
    }

    def read(self, row: Row) -> History:
        sent = row.ids("history")
        items = [self.index[item] for item in sent if item in self.index]
        sent_user = row.given("user_id")
        user = "" if sent_user is None else clean_id(str(sent_user)) or ""
        return History(items, user, len(sent) - len(items))

    def batch(self, requests: Sequence[History]) -> dict[str, Tensor]:
        """Of requests with a history."""
        users = hash_strings(
            pa.array([request.user for request in requests], pa.string())
        )
        return collate_histories([request.items for request in requests], users)

    def allowed(self, ids: Sequence[Any]) -> Tensor:
        """(N,) bool, by item_index, of a set of items; ids that the catalogue does not have are skipped."""
        allowed = parse_allowed(ids)
        places = [self.index[item] for item in allowed if item in self.index]
        if not places:
            raise UserError(
                f"allowed has {len(ids)} ids, and none of an item of the catalogue; {WITHOUT_ALLOWED}"
            )
        return torch.zeros(len(self.items), dtype=torch.bool).index_fill(
            0, torch.tensor(places), True
        )
