"""The catalogue, batches and dataset of retrieval models.

    catalogue = Catalogue.load(Inputs("tables", "sids"))
    dataset = RetrievalDataset.load(sequences, "train", "request", 20)
    for batch in dataset.epoch(256, seed=1, epoch=0): ...

Shapes: `I` items, `C` codes of an item; `B` rows, `T` behaviours and `R` requests of a
batch; `n` examples and `m` requests of a dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

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
from core.schemas import Inputs, RetrievalInfo
from core.splits import SPLITS
from core.tables import Table, table_hashes
from models.dataset.batch import Batch, axes
from models.dataset.columns import Columns
from models.dataset.dataset import RequestDataset
from models.dataset.encoding import (
    PAD,
    decode_splits,
    hash_strings,
    request_columns,
    request_number,
    to_tensor,
)
from models.retrieval.search.trie import Trie


@dataclass(frozen=True)
class Catalogue:
    """The items that a model can recommend, with or without semantic IDs."""

    tables: ClassVar[Mapping[str, Sequence[str]]] = {
        "tables": ("items", "sequences"),
        "sids": ("sids", "trie"),
    }
    """Tables from which a catalogue is loaded, by folder of `Inputs`."""

    num_items: int
    """Number I of items; `item_index` is dense from 0."""
    sids: Tensor | None = None
    """(I, C) int64 codes of each item, or None."""
    codebook_sizes: tuple[int, ...] = ()
    """Number of codes per level; empty without semantic IDs."""
    trie: Trie | None = None
    """The semantic IDs as a trie, or None."""
    versions: dict[str, Table[Any]] = field(default_factory=dict)
    """Versions of the catalogue's tables: `sequences`, `items`, `sids`, `trie`."""

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the catalogue's tables, by name."""
        return table_hashes(self.versions)

    def scales(self) -> dict[str, Any]:
        """Return an empty dict, since retrieval models read no numbers."""
        return {}

    @classmethod
    def load(
        cls, inputs: Inputs, scales: Any = None, manifest_only: bool = False
    ) -> Self:
        """Load the items, and the semantic IDs if `inputs` has them.

        The other arguments are unused: retrieval models read no numbers, and only the
        manifest of `sequences`.
        """
        versions = inputs.versions(cls.tables, RetrievalInfo)
        num_items = versions["items"].rows
        if inputs.sids is None:
            return cls(num_items, versions=versions)

        sizes = tuple(versions["sids"].info.codebook_sizes)
        codes = read_codes(versions["sids"].read())
        trie = Trie(codes, sizes)
        return cls(num_items, codes, sizes, trie, versions)

    @classmethod
    def from_codes(cls, codes: Tensor, codebook_sizes: tuple[int, ...]) -> Self:
        """Return a catalogue of items with `codes` (I, C), for tests and benchmarks."""
        return cls(
            len(codes), codes.long(), codebook_sizes, Trie(codes, codebook_sizes)
        )


def read_codes(table: pa.Table) -> Tensor:
    """Return the (I, C) int64 codes of a `sids` table."""
    lists = table["codes"].combine_chunks()
    codes = lists.flatten().to_numpy().astype(np.int64).reshape(len(lists), -1)
    return torch.from_numpy(codes)


@dataclass(frozen=True, kw_only=True)
class HistoryBatch(Batch):
    """Histories, after which a model recommends items."""

    history: Tensor = axes("B", "T", padding=PAD)
    """(B, T) int64 `item_index` of the latest behaviours, oldest first, -1 at
    padding."""
    history_length: Tensor = axes("B", padding=1)
    """(B,) int64 behaviours of each history."""
    user: Tensor = axes("B")
    """(B,) int64 hash of the user's id."""
    allowed: Tensor | None = axes("E", default=None)
    """(E,) set of the items that a search may return, from `encode_allowed`; None for
    all items."""

    @property
    def histories(self) -> HistoryBatch:
        """The histories without targets: all that a search reads."""
        return HistoryBatch(
            history=self.history,
            history_length=self.history_length,
            user=self.user,
            allowed=self.allowed,
        )


@dataclass(frozen=True, kw_only=True)
class RequestBatch(HistoryBatch):
    """Requests, one per row."""

    # B is not padded, as the loss would include the padded rows
    bucket_axes: ClassVar[tuple[str, ...]] = ("T",)

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    request: Tensor = axes("B")
    """(B,) int64 `request_number`."""
    target: Tensor = axes("B", padding=PAD)
    """(B,) int64 item to predict, -1 if unknown."""
    repeats: Tensor = axes("B")
    """(B,) int64, 1 where the target is among all of the user's behaviours before the
    request, else 0."""


@dataclass(frozen=True, kw_only=True)
class WindowBatch(HistoryBatch):
    """Windows of users' behaviours, each with all requests that it serves."""

    bucket_axes: ClassVar[tuple[str, ...]] = ("T", "R")

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    request: Tensor = axes("B")
    """(B,) int64 `request_number` of the first request."""
    target: Tensor = axes("R", padding=PAD)
    """(R,) int64 item to predict, -1 at padding."""
    target_row: Tensor = axes("R")
    """(R,) int64 row of each request."""
    target_position: Tensor = axes("R")
    """(R,) int64 position in the row's history of the last behaviour before the
    request."""


@dataclass(frozen=True, kw_only=True)
class InteractionBatch(Batch):
    """Pairs of a user and an item, without histories."""

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    target: Tensor = axes("B")
    """(B,) int64 item."""


def find_repeats(
    items: NDArray[np.int64],
    behaviours_per_user: NDArray[np.int64],
    requests_per_user: NDArray[np.int64],
    end: NDArray[np.int64],
    target: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return whether each request's target is among the user's first `end` behaviours.

    Args:
        items: (E,) items of all users' behaviours, end to end.
        behaviours_per_user: (U,) number of behaviours.
        requests_per_user: (U,) number of requests.
        end: (R,) behaviours before each request.
        target: (R,) item of each request.
    """
    num_items = 1 + max(items.max(initial=0), target.max(initial=0))
    # pairs of a user and an item as one number, with the pair's first behaviour
    behaviour_pairs = row_numbers(behaviours_per_user) * num_items + items  # (E,)
    pairs, first_behaviour = np.unique(behaviour_pairs, return_index=True)
    user_row = row_numbers(requests_per_user)
    index, is_in_log = find_sorted(pairs, user_row * num_items + target)  # (R,)
    if not len(pairs):
        return is_in_log
    user_start = lengths_to_starts(behaviours_per_user)[user_row]
    return is_in_log & (first_behaviour[index] < user_start + end)


def decode_sequences(table: pa.Table, info: RetrievalInfo) -> Columns:
    """Decode one part of the sequences of a retrieval log.

    Args:
        table: Rows of the part, one per user.
        info: Info of the table, which is not needed.

    Returns:
        By user (U,): behaviours_per_user, requests_per_user, user_hash. By behaviour
        (E,): item. By request (R,): history_end, target, repeats, request_time, split.
    """
    lists = table["item_index"].combine_chunks()
    behaviours_per_user = pc.list_value_length(lists).to_numpy()
    items = lists.flatten().to_numpy()
    request_lists = table["requests"].combine_chunks()
    requests_per_user = pc.list_value_length(request_lists).to_numpy()
    requests = request_lists.flatten()
    candidates = pc.struct_field(requests, "candidates")
    target = candidates.flatten().to_numpy()
    history_end = pc.struct_field(requests, "history_end").to_numpy()
    repeats = find_repeats(
        items.astype(np.int64),
        behaviours_per_user.astype(np.int64),
        requests_per_user.astype(np.int64),
        history_end.astype(np.int64),
        target.astype(np.int64),
    )
    return {
        "behaviours_per_user": behaviours_per_user.astype(np.int32),
        "requests_per_user": requests_per_user.astype(np.int32),
        "user_hash": hash_strings(table["user_id"].combine_chunks()),
        "item": items.astype(np.int32),
        "history_end": history_end.astype(np.int32),
        "target": target.astype(np.int32),
        "repeats": repeats,
        "request_time": pc.struct_field(requests, "timestamp_ms").to_numpy(),
        "split": decode_splits(pc.struct_field(requests, "split")),
    }


class RetrievalDataset(RequestDataset):
    """The requests of one split, as examples of one `unit`.

    - `request`: an example is one request with the latest `max_history` behaviours
      before it.
    - `behaviour`: an example is the user and the target of one request. Requests
      without a history are examples too.
    - `user`: an example is a window of a user's history with the split's requests in
      it, so that one causal pass serves all of them. A user with more than
      `max_history` behaviours has overlapping windows. Each request is in exactly one
      window, with at least half of `max_history` behaviours before it.

    The split `next` has one request per user after all behaviours, without a target
    (-1), to recommend items to all users.
    """

    kind = "retrieval"
    decode = staticmethod(decode_sequences)
    splits: ClassVar[tuple[str, ...]] = (*SPLITS, "next")
    request_unit = "requests with a history"

    requests: NDArray[np.integer]
    """(m,) index of each request of the split in the columns."""
    end: NDArray[np.int32]
    """(n,) behaviours of the user before an example's last request."""
    first: NDArray[np.integer]
    """(n + 1,) index in `requests` of each example's first request."""

    @classmethod
    def parquet_columns(cls, info: RetrievalInfo) -> list[str]:
        """Return the columns that `decode_sequences` reads."""
        fields = ("timestamp_ms", "history_end", "candidates", "split")
        return ["user_id", "item_index", *request_columns(*fields)]

    def _plan(self) -> None:
        """Set the examples of the split: their requests, users and history lengths."""
        if self.split == "next":
            self.columns = add_next_requests(self.columns)
        columns = self.columns
        self.request_offsets = lengths_to_offsets(columns["requests_per_user"])
        if self.split == "next":
            requests = np.arange(len(columns["history_end"]))
        else:
            requests = np.flatnonzero(columns["split"] == SPLITS.index(self.split))
        if self.split == "train" and self.new_examples:
            is_new = self.new_examples.mask(columns["request_time"][requests])
            requests = requests[is_new]
        end = columns["history_end"][requests]
        is_example = (end > 0) | (self.unit == "behaviour")
        self.skipped_users = find_rows(self.request_offsets, requests[~is_example])
        self.requests = narrow_indices(requests[is_example])
        end = end[is_example]
        user_row = narrow_indices(find_rows(self.request_offsets, self.requests))
        first = np.arange(len(user_row))  # request at which each example begins
        if self.unit == "user" and len(user_row):
            first_of_user = run_starts(user_row)
            requests_per_user = np.diff(np.append(first_of_user, len(user_row)))
            # (m,) longest history of the request's user
            longest = np.repeat(max_per_run(end, first_of_user), requests_per_user)
            stride = max(1, self.max_history // 2)
            window = np.where(longest <= self.max_history, 0, (longest - end) // stride)
            first = run_starts(user_row, window)
        self.num_requests = self.num_learned = len(self.requests)
        self.num_without_history = int((end == 0).sum())
        self.user = user_row[first]
        self.end = max_per_run(end, first)
        self.first = narrow_indices(np.append(first, self.num_requests))
        # one or two bytes per example, which numpy sorts by radix
        length_type = np.min_scalar_type(-1 - self.max_history)
        self.lengths = np.minimum(self.end, self.max_history).astype(length_type)
        self.weights = np.ones(len(first), np.int8)

    @property
    def targets(self) -> NDArray[np.int32]:
        """Targets (m,) of the requests."""
        return self.columns["target"][self.requests]

    @property
    def request_numbers(self) -> NDArray[np.int64]:
        """Numbers (m,) of the requests, unique across all splits except `next`."""
        requests_per_example = np.diff(self.first)
        user_row = np.repeat(self.user, requests_per_example)
        return request_number(user_row, self.requests - self.request_offsets[user_row])

    @property
    def visited_items(self) -> NDArray[np.int64]:
        """The items in the histories and targets of the requests, ascending."""
        # a user's last example has the user's longest history
        last_of_user = np.append(run_starts(self.user)[1:], len(self.user)) - 1
        user_row = self.user[last_of_user]
        num_behaviours = self.end[last_of_user].astype(np.int64)
        behaviours = gather_ranges(self.offsets[user_row], num_behaviours)
        return np.union1d(self.columns["item"][behaviours], self.targets)

    def collate(self, rows: NDArray[np.int64]) -> Any:
        """Return examples as tensors, with histories right-padded with -1.

        Returns:
            A `RequestBatch`, `WindowBatch` or `InteractionBatch` for the units
            `request`, `user` and `behaviour`.
        """
        columns, user_row = self.columns, self.user[rows]
        first = self.first[rows]
        if self.unit == "behaviour":
            target = columns["target"][self.requests[first]]
            return InteractionBatch(
                target=to_tensor(target), user_row=to_tensor(user_row)
            )
        length = self.lengths[rows].astype(np.int64)
        window_start = self.end[rows] - length
        index, inside = pad_indices(self.offsets[user_row] + window_start, length)
        first_request = self.requests[first]
        index_of_user = first_request - self.request_offsets[user_row]
        row_tensors: dict[str, Any] = {
            "history": to_tensor(pad_ragged(columns["item"], index, inside, PAD)),
            "history_length": to_tensor(length),
            "user": to_tensor(columns["user_hash"][user_row]),
            "user_row": to_tensor(user_row),
            "request": to_tensor(request_number(user_row, index_of_user)),
        }
        if self.unit == "request":
            return RequestBatch(
                **row_tensors,
                target=to_tensor(columns["target"][first_request]),
                repeats=to_tensor(columns["repeats"][first_request]),
            )
        requests_per_row = self.first[rows + 1] - first
        request = self.requests[gather_ranges(first, requests_per_row)]  # (R,)
        start_of_request = np.repeat(window_start, requests_per_row)
        position = columns["history_end"][request] - start_of_request - 1
        return WindowBatch(
            **row_tensors,
            target=to_tensor(columns["target"][request]),
            target_row=to_tensor(row_numbers(requests_per_row)),
            target_position=to_tensor(position),
        )


def max_per_run(values: NDArray, starts: NDArray[np.int64]) -> NDArray:
    """Return the maximum (k,) of each run of `values` (n,).

    Args:
        values: (n,) values.
        starts: (k,) index of each run's first value; the first run starts at 0.
    """
    return np.maximum.reduceat(values, starts) if len(starts) else values[:0]


def add_next_requests(columns: Columns) -> Columns:
    """Replace the requests by one per user after all behaviours, without a target."""
    users = len(columns["behaviours_per_user"])
    return {
        **columns,
        "requests_per_user": np.ones(users, np.int32),
        "history_end": columns["behaviours_per_user"],
        "target": np.full(users, PAD, np.int32),
        "repeats": np.zeros(users, bool),
    }
