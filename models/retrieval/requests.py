"""Parsing of the requests that a served retrieval model gets: histories of item ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from core.errors import UserError
from core.ids import clean_id, parse_item_ids
from models.dataset.batch import Batch
from models.dataset.encoding import hash_strings
from models.requests import Columns, Requests, Row
from models.retrieval.data import RetrievalDataset

EVERY = ["*"]
"""Default of a call's `allowed`: all items. A client's empty list, or [""], is an empty
set of items."""


class History(NamedTuple):
    """The history of one request."""

    items: list[int]
    """`item_index` of the behaviours, oldest first."""
    user: str
    """Id of the user, or an empty string."""
    unknown: int
    """Entries that are not in the catalogue."""


class RetrievalRequests(Requests):
    """Requests for a ranking of the catalogue."""

    required_columns: ClassVar[Columns] = {"history": "ids"}  # oldest first
    optional_columns: ClassVar[Columns] = {"user_id": "id"}
    # unknown_items: number of history entries that are not in the catalogue; note:
    # reason for an answer with fewer than k items
    answer_columns: ClassVar[Columns] = {
        **Requests.answer_columns,
        "unknown_items": "long",
        "note": "string",
    }

    def parse(self, row: Row) -> History:
        """Return the history of a request, without items outside of the catalogue."""
        ids = row.item_ids("history")
        items = [self.index[item] for item in ids if item in self.index]
        user_id = row.value("user_id")
        user = "" if user_id is None else clean_id(str(user_id)) or ""
        return History(items, user, len(ids) - len(items))

    def collate(self, requests: Sequence[History]) -> Batch:
        """Return a batch of requests; each history has at least one item."""
        users = pa.array([request.user for request in requests], pa.string())
        items: list[int] = []
        for request in requests:
            items.extend(request.items)
        lengths = [len(request.items) for request in requests]
        dataset = RetrievalDataset.from_histories(
            np.array(items, np.int64), np.array(lengths, np.int64), hash_strings(users)
        )
        return dataset.collate(np.arange(len(requests)))

    def parse_allowed(self, ids: Sequence[Any]) -> Tensor:
        """Return a mask (I,) of the catalogue's items with these ids.

        Other ids are ignored.
        """
        allowed = parse_item_ids("allowed", ids)
        index = [self.index[item] for item in allowed if item in self.index]
        if not index:
            raise UserError(
                f"allowed has {len(ids)} ids, and none of an item of the catalogue"
            )
        mask = torch.zeros(len(self.items), dtype=torch.bool)
        return mask.index_fill(0, torch.tensor(index), True)
