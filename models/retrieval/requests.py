"""Histories of a served retrieval model as a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
from torch import Tensor

from models.item_ids import clean_id, item_ids
from models.requests import Columns, Requests, Row, given
from models.retrieval.data import batch_of, hash_strings


@dataclass(frozen=True)
class History:
    """What a row says."""

    items: list[int]
    """`item_index` of the latest behaviours that the model reads."""
    user: str
    """Id of the user, or nothing."""
    size: int
    """Entries of the history."""
    unknown: int
    """How many of them are not in the catalogue."""


class RetrievalRequests(Requests):
    """Rows as `models/retrieval/data.py` makes batches."""

    needs: ClassVar[Columns] = {"history": "ids"}  # oldest first
    takes: ClassVar[Columns] = {"user_id": "string"}
    beside = ("sids", "trie")

    def __init__(self, folder: str, model: Any, catalogue: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, model, catalogue, settings)
        self.length = model.config.max_history

    def read(self, row: Row) -> History:
        sent = item_ids("history", row["history"])
        items = [self.index[item] for item in sent if item in self.index]
        user = clean_id(str(given(row, "user_id") or "")) or ""
        return History(items[-self.length :], user, len(sent), len(sent) - len(items))

    def batch(self, requests: Sequence[History]) -> dict[str, Tensor]:
        """Of requests with a history."""
        users = hash_strings(pa.array([request.user for request in requests], pa.string()))
        return batch_of([request.items for request in requests], users)
