"""Histories of a served retrieval model as a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
from torch import Tensor

from models.item_ids import clean_id
from models.requests import Columns, Requests, Row
from models.retrieval.data import batch_of, hash_strings


class History(NamedTuple):
    """What a row says: the latest behaviours that the model reads, as `item_index`; the id of the user, or nothing; how
    many entries are not in the catalogue."""

    items: list[int]
    user: str
    unknown: int


class RetrievalRequests(Requests):
    """Rows as `models/retrieval/data.py` makes batches."""

    needs: ClassVar[Columns] = {"history": "ids"}  # oldest first
    takes: ClassVar[Columns] = {"user_id": "string"}
    # how many entries of the history are not in the catalogue; with no other the ranking is empty
    gives: ClassVar[Columns] = {**Requests.gives, "unknown_items": "long"}
    settings: ClassVar[Mapping[str, Any]] = {"device": "cpu"}

    def __init__(self, folder: str, model: Any, catalogue: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, model, catalogue, settings)
        self.length = model.config.max_history

    def read(self, row: Row) -> History:
        sent = row.ids("history")
        items = [self.index[item] for item in sent if item in self.index]
        user = clean_id(str(row.given("user_id") or "")) or ""
        return History(items[-self.length :], user, len(sent) - len(items))

    def batch(self, requests: Sequence[History]) -> dict[str, Tensor]:
        """Of requests with a history."""
        users = hash_strings(pa.array([request.user for request in requests], pa.string()))
        return batch_of([request.items for request in requests], users)
