"""Retrieval requests: from rows of `sequences` to batches, and the served request.

    dataset = Dataset(RETRIEVAL, sequences, Selection("train", "request", 20))

Units of an example:

- `request`: one request with the latest `max_history` behaviours before it.
- `behaviour`: the user and the target of one request, also of a request without a
  history.
- `user`: a window of a user's history with the split's requests in it, so that one
  causal pass serves all of them. A user with more than `max_history` behaviours has
  overlapping windows. Each request is in exactly one window, with at least half of
  `max_history` behaviours before it.

The split `next` has one request per user after all behaviours, without a target (-1),
to recommend items to all users.

Shapes: `E` behaviours, `U` users, `n` examples, `m` requests of the split; `B` rows and
`R` requests of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field

from core.ids import MAX_SERVED_ID, clean_id, hash_strings
from core.options import STRICT
from core.ragged import (
    find_rows,
    find_sorted,
    gather_ranges,
    lengths_to_offsets,
    lengths_to_starts,
    narrow_indices,
    pad_indices,
    pad_ragged,
    row_numbers,
    run_starts,
)
from core.schemas import RetrievalInfo
from core.splits import SPLITS
from core.tables import Table
from models.dataset.batch import PAD, Batch, request_number, to_tensor
from models.dataset.dataset import (
    Columns,
    Dataset,
    Examples,
    Kind,
    Selection,
    decode_splits,
    request_columns,
)
from models.requests import Ids, RequestColumns, Requests, ServedRequest
from models.retrieval.data import InteractionBatch, RequestBatch, WindowBatch

MAX_K = 10_000
"""Largest number of items of a ranking."""

EVERY = ["*"]
"""Default of a call's `allowed`: all items. A client's empty list, or [""], is an empty
set of items."""


def list_columns(info: RetrievalInfo) -> list[str]:
    """Return the columns that `decode` reads."""
    fields = ("timestamp_ms", "history_end", "candidates", "split")
    return ["user_id", "item_index", *request_columns(*fields)]


def decode(table: pa.Table, info: RetrievalInfo) -> Columns:
    """Decode one part of the sequences of a retrieval log.

    Returns:
        By user (U,): behaviours_per_user, requests_per_user, user_hash. By behaviour
        (E,): item. By target of a request (R,): history_end, target, repeats,
        request_time, split; of baskets also `basket`, the number of targets in the row
        of a basket's first target, and 0 in the others.
    """
    lists = table["item_index"].combine_chunks()
    behaviours_per_user = pc.list_value_length(lists).to_numpy()
    items = lists.flatten().to_numpy()
    request_lists = table["requests"].combine_chunks()
    requests_per_user = pc.list_value_length(request_lists).to_numpy()
    requests = request_lists.flatten()
    candidates = pc.struct_field(requests, "candidates")
    target = candidates.flatten().to_numpy()
    targets_per_request = pc.list_value_length(candidates).to_numpy()
    request = row_numbers(targets_per_request)  # (R,)
    request_user = row_numbers(requests_per_user)
    history_end = pc.struct_field(requests, "history_end").to_numpy()[request]
    # pairs of a user and an item as one number, with the pair's first behaviour
    num_items = 1 + max(items.max(initial=0), target.max(initial=0)).astype(np.int64)
    pairs, first_behaviour = np.unique(
        row_numbers(behaviours_per_user) * num_items + items, return_index=True
    )
    user_row = request_user[request]
    index, repeats = find_sorted(pairs, user_row * num_items + target)  # (R,)
    if len(pairs):  # the target is among the behaviours before the request
        user_start = lengths_to_starts(behaviours_per_user)[user_row]
        repeats &= first_behaviour[index] < user_start + history_end
    baskets = {}
    if info.baskets:
        starts = lengths_to_starts(targets_per_request)
        baskets["basket"] = np.zeros(len(target), np.int32)
        baskets["basket"][starts] = targets_per_request
        if len(starts):  # a basket repeats if any of its targets does
            repeats = np.logical_or.reduceat(repeats, starts)[request]
    return {
        **baskets,
        "behaviours_per_user": behaviours_per_user.astype(np.int32),
        "requests_per_user": np.bincount(
            user_row, minlength=len(requests_per_user)
        ).astype(np.int32),
        "user_hash": hash_strings(table["user_id"].combine_chunks()),
        "item": items.astype(np.int32),
        "history_end": history_end.astype(np.int32),
        "target": target.astype(np.int32),
        "repeats": repeats,
        "request_time": pc.struct_field(requests, "timestamp_ms").to_numpy()[request],
        "split": decode_splits(pc.struct_field(requests, "split"))[request],
    }


@dataclass(frozen=True, kw_only=True)
class RetrievalExamples(Examples):
    """Windows of users' behaviours, each with the requests that it is read for."""

    arrays: ClassVar[tuple[str, ...]] = (*Examples.arrays, "end", "first", "count")

    offsets: NDArray[np.int64]
    """(users + 1,) index of each user's first behaviour."""
    request_offsets: NDArray[np.int64]
    """(users + 1,) index of each user's first request."""
    requests: NDArray[np.integer]
    """(m,) index of each request of the split in the columns."""
    end: NDArray[np.int32]
    """(n,) number of the user's behaviours before an example's last request."""
    first: NDArray[np.integer]
    """(n,) index in `requests` of each example's first request."""
    count: NDArray[np.integer]
    """(n,) number of requests of each example."""

    @property
    def targets(self) -> NDArray[np.int32]:
        """Target (n,) of each example's first request."""
        return self.columns["target"][self.requests[self.first]]

    @property
    def target_sets(self) -> NDArray[np.integer]:
        """Targets (n, M) of each example's first request, right-padded with -1."""
        request = self.requests[self.first]
        if "basket" not in self.columns:
            return self.targets[:, None]
        index, inside = pad_indices(request, self.columns["basket"][request])
        return pad_ragged(self.columns["target"], index, inside, PAD)


def plan(columns: Columns, selection: Selection) -> RetrievalExamples:
    """Plan the examples of a split: their requests, users and history lengths.

    Training learns each target of a basket as a request of its own; other splits have
    one request per basket.
    """
    if selection.split == "next":
        columns = {name: columns[name] for name in columns if name != "basket"}
        num_users = len(columns["behaviours_per_user"])
        columns = {
            **columns,
            "requests_per_user": np.ones(num_users, np.int32),
            "history_end": columns["behaviours_per_user"],
            "target": np.full(num_users, PAD, np.int32),
            "repeats": np.zeros(num_users, bool),
        }
        requests: NDArray = np.arange(num_users)
    else:
        requests = np.flatnonzero(columns["split"] == SPLITS.index(selection.split))
        if "basket" in columns and selection.split != "train":
            requests = requests[columns["basket"][requests] > 0]
    if selection.new:
        requests = requests[selection.new.mask(columns["request_time"][requests])]
    request_offsets = lengths_to_offsets(columns["requests_per_user"])
    end: NDArray = columns["history_end"][requests]
    is_example = (end > 0) | (selection.unit == "behaviour")
    skipped_users = find_rows(request_offsets, requests[~is_example])
    requests = narrow_indices(requests[is_example])
    end = end[is_example]
    user_row = narrow_indices(find_rows(request_offsets, requests))
    first = np.arange(len(user_row))  # request at which each example begins
    max_history = selection.max_history
    if selection.unit == "user" and len(user_row):
        first_of_user = run_starts(user_row)
        requests_per_user = np.diff(np.append(first_of_user, len(user_row)))
        # (m,) longest history of the request's user
        longest = np.repeat(np.maximum.reduceat(end, first_of_user), requests_per_user)
        stride = max(1, max_history // 2)
        window = np.where(longest <= max_history, 0, (longest - end) // stride)
        first = run_starts(user_row, window)
    last_end = np.maximum.reduceat(end, first) if len(first) else end
    # one or two bytes per example, which numpy sorts by radix
    length_type = np.min_scalar_type(-1 - max_history)
    return RetrievalExamples(
        columns=columns,
        selection=selection,
        user=user_row[first],
        lengths=np.minimum(last_end, max_history).astype(length_type),
        weights=np.ones(len(first), np.int8),
        num_requests=int((end > 0).sum()),
        num_learned=len(requests),
        skipped_users=skipped_users,
        offsets=lengths_to_offsets(columns["behaviours_per_user"]),
        request_offsets=request_offsets,
        requests=requests,
        end=last_end,
        first=narrow_indices(first),
        count=narrow_indices(np.diff(np.append(first, len(requests)))),
    )


def collate(examples: RetrievalExamples) -> Batch:
    """Return examples as tensors, with histories right-padded with -1.

    Returns:
        A `RequestBatch`, `WindowBatch` or `InteractionBatch` for the units `request`,
        `user` and `behaviour`.
    """
    columns, user_row, first = examples.columns, examples.user, examples.first
    unit, first_request = examples.selection.unit, examples.requests[first]
    target = to_tensor(examples.targets)
    if unit == "behaviour":
        return InteractionBatch(target=target, user_row=to_tensor(user_row))
    length = examples.lengths.astype(np.int64)
    window_start = examples.end - length
    index, inside = pad_indices(examples.offsets[user_row] + window_start, length)
    index_of_user = first_request - examples.request_offsets[user_row]
    row_tensors: dict[str, Any] = {
        "history": to_tensor(pad_ragged(columns["item"], index, inside, PAD)),
        "history_length": to_tensor(length),
        "user": to_tensor(columns["user_hash"][user_row]),
        "user_row": to_tensor(user_row),
        "request": to_tensor(request_number(user_row, index_of_user)),
    }
    if unit == "request":
        row_tensors["repeats"] = to_tensor(columns["repeats"][first_request])
        if "basket" in columns and examples.selection.split != "train":
            row_tensors["targets"] = to_tensor(examples.target_sets)
        return RequestBatch(**row_tensors, target=target)
    request = examples.requests[gather_ranges(first, examples.count)]  # (R,)
    start_of_request = np.repeat(window_start, examples.count)
    position = columns["history_end"][request] - start_of_request - 1
    return WindowBatch(
        **row_tensors,
        target=to_tensor(columns["target"][request]),
        target_row=to_tensor(row_numbers(examples.count)),
        target_position=to_tensor(position),
    )


RETRIEVAL = Kind(
    "retrieval",
    decode,
    list_columns,
    plan,
    collate,
    splits=(*SPLITS, "next"),
    request_unit="requests with a history",
)


def find_train_items(sequences: Table[RetrievalInfo]) -> NDArray[np.integer]:
    """Return the items (k,) of training requests and their histories, ascending."""
    selection = Selection("train", "user", 2**31 - 1)  # one window of each user
    train: Any = Dataset(RETRIEVAL, sequences, selection).examples
    behaviours = gather_ranges(train.offsets[train.user], train.end.astype(np.int64))
    targets = train.columns["target"][train.requests]
    return np.union1d(train.columns["item"][behaviours], targets)


UserId = Annotated[
    str,
    BeforeValidator(lambda value: clean_id(str(value)) or ""),
    Field(max_length=MAX_SERVED_ID),
]


class RetrievalRequest(ServedRequest):
    """A request for a ranking of the catalogue after a history."""

    user_id: UserId = ""


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
    base_class = RetrievalRequest
    options_class = CatalogueOptions

    def find_items(self, ids: Iterable[str]) -> list[int]:
        """Return the `item_index` of ids, without ids outside the catalogue."""
        return [self.index[item] for item in ids if item in self.index]

    def to_columns(self, requests: Sequence[Any]) -> RequestColumns:
        """Return the columns of requests."""
        items = [self.find_items(request.history) for request in requests]
        users = [request.user_id for request in requests]
        columns = {
            "behaviours_per_user": np.array([len(found) for found in items]),
            "user_hash": hash_strings(pa.array(users, pa.string())),
            "item": np.array([*chain.from_iterable(items)], np.int64),
        }
        return columns, {}
