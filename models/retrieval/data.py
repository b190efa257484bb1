"""The catalogue, batches and dataset of retrieval models.

    catalogue = Catalogue.load("tables", "sids")
    dataset = RetrievalDataset.load("tables/sequences", "train", unit="request", max_history=20)
    for batch in dataset.epoch(256, seed=1, epoch=0): ...

Shapes: `I` items, `C` codes of an item; `B` rows, `T` behaviours and `R` requests of a
batch; `n` examples and `m` requests of a dataset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.dataset.batch import Batch, axes
from models.dataset.columns import Columns
from models.dataset.dataset import SPLITS, RequestDataset
from models.ragged import (
    find_sorted,
    gather_ranges,
    lengths_to_offsets,
    lengths_to_starts,
    pad_indices,
    pad_ragged,
    row_numbers,
    run_starts,
)
from models.retrieval.search.trie import Trie
from models.storage.inputs import Inputs
from models.storage.tables import (
    Manifest,
    TableVersion,
    UserError,
    join,
    read_manifest,
    read_table,
    table_hashes,
)

PAD = -1
"""`item_index` at padded positions of a history, and the target where there is none."""

TABLES = {"tables": ("items", "sequences"), "sids": ("sids", "trie")}
"""Tables that a catalogue comes from, by folder of `Inputs`."""


@dataclass(frozen=True)
class Catalogue:
    """The items that a model can recommend, and their semantic IDs where it needs them."""

    num_items: int
    """Items; `item_index` is dense from 0."""
    sids: Tensor | None = None
    """(I, C) int64 codes of each item, or None."""
    codebook_sizes: tuple[int, ...] = ()
    """Codes per level; empty without semantic IDs."""
    trie: Trie | None = None
    """The semantic IDs as a trie, or None."""
    versions: dict[str, TableVersion] = field(default_factory=dict)
    """Versions of the catalogue's tables: `sequences`, `items`, `sids`, `trie`."""
    tables: str = ""
    """Where the tables are, for models that read the items' texts; empty without
    tables."""

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the catalogue's tables, by name."""
        return table_hashes(self.versions)

    def scales(self) -> dict[str, Any]:
        """Return nothing, since retrieval models read no numbers or texts."""
        return {}

    @classmethod
    def load(cls, tables_uri: str, sids_uri: str | None = None) -> Self:
        """Load the catalogue of a retrieval log.

        Args:
            tables_uri: The folder that jobs.prepare made.
            sids_uri: The folder that jobs.tokenize made; None without semantic IDs.

        Raises:
            UserError: If the tables do not belong together.
        """
        versions = Inputs(tables_uri, sids_uri).versions(TABLES)
        items = read_manifest(join(tables_uri, "items"), "items")
        if items.rows == 0:
            raise UserError(
                f"{join(tables_uri, 'items')} has no rows; check the filters of jobs.prepare"
            )
        if sids_uri is None:
            return cls(items.rows, versions=versions, tables=tables_uri)

        sids = read_manifest(join(sids_uri, "sids"), "sids")
        sizes = tuple(int(size) for size in sids.info["codebook_sizes"])
        sids_table = join(sids_uri, "sids")
        codes = read_codes(read_table(sids_table, "sids"), sids_table)
        if codes.shape != (items.rows, len(sizes)):
            raise UserError(
                f"{sids_uri} holds {codes.shape[0]} codes of {codes.shape[1]} levels for {items.rows} items and "
                f"{len(sizes)} codebooks; run jobs.tokenize again"
            )
        try:
            trie = Trie(codes, sizes)
        except UserError as error:
            raise UserError(f"{sids_uri}: {error}") from error
        return cls(items.rows, codes, sizes, trie, versions, tables_uri)

    @classmethod
    def from_codes(cls, codes: Tensor, codebook_sizes: tuple[int, ...]) -> Self:
        """Return a catalogue of items with these (I, C) codes, for tests and benchmarks."""
        return cls(
            len(codes), codes.long(), codebook_sizes, Trie(codes, codebook_sizes)
        )


def read_codes(table: pa.Table, name: str) -> Tensor:
    """Return the (I, C) int64 codes of a `sids` table, in the order of `item_index`.

    Raises:
        UserError: If the codes have several lengths, or `item_index` is not dense and
            sorted.
    """
    lists = table["codes"].combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy()
    if lengths.min() != lengths.max():
        raise UserError(
            f"{name} has codes of {lengths.min()} to {lengths.max()} levels, not of one length; run jobs.tokenize again"
        )
    index = table["item_index"].to_numpy()
    if not np.array_equal(index, np.arange(len(index))):
        raise UserError(
            f"{name}: item_index is not dense and sorted from 0; run jobs.tokenize again"
        )
    codes = lists.flatten().to_numpy().astype(np.int64).reshape(len(index), -1)
    return torch.from_numpy(codes)


def hash_strings(strings: pa.Array) -> NDArray[np.int64]:
    """Return a stable, non-negative 63-bit hash of each string: a polynomial over its bytes, then mixed."""
    binary = strings.cast(pa.large_binary())
    if len(binary) == 0:
        return np.zeros(0, np.int64)
    offsets = np.frombuffer(binary.buffers()[1], np.int64)[
        binary.offset : binary.offset + len(binary) + 1
    ]
    if offsets[-1] == offsets[0]:
        return np.zeros(len(binary), np.int64)
    data = np.frombuffer(binary.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    lengths = np.diff(offsets)
    powers = np.full(
        int(lengths.max()), 0x100000001B3, np.uint64
    )  # FNV's prime, wrapping at 64 bits
    powers = np.cumprod(powers)
    position = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    totals = np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers[position])
    totals = np.concatenate([np.zeros(1, np.uint64), totals])
    value = totals[offsets[1:]] - totals[offsets[:-1]]
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9),
        (27, 0x94D049BB133111EB),
    ):  # splitmix64's finaliser
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return ((value ^ (value >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def request_number(
    user_row: NDArray[np.integer], index: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return the number of a request: its user's row in the table and its index among the user's requests.

    No two requests share a number, below 16 million requests of a user.
    """
    return (np.asarray(user_row, np.int64) << 24) + index


def request_index(number: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the index of a request among its user's requests, from its `request_number`."""
    return np.asarray(number, np.int64) & ((1 << 24) - 1)


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
    """(E,) the only items that a search may return, as `allow` makes it; None for all
    items."""

    @property
    def histories(self) -> HistoryBatch:
        """The histories alone, which are all that a search reads."""
        return HistoryBatch(
            history=self.history,
            history_length=self.history_length,
            user=self.user,
            allowed=self.allowed,
        )


@dataclass(frozen=True, kw_only=True)
class RequestBatch(HistoryBatch):
    """Requests, one per row."""

    # without B: a loss would learn from rows of padding
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
    """Pairs of user and item, without histories."""

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    target: Tensor = axes("B")
    """(B,) int64 item."""


class RetrievalDataset(RequestDataset):
    """The requests of one split, as examples of one `unit`.

    `request`: an example is one request, its history the latest `max_history`
    behaviours before it. `behaviour`: an example is the target of one request, with its
    user and without a history; requests without a history are examples too. `user`: an
    example is a window of a user's history with all of the split's requests in it, so
    that one causal pass serves them all. A user with more than `max_history` behaviours
    has overlapping windows; each request is in exactly one of them and has at least
    half of `max_history` behaviours before it.

    The split `next` has one request per user that follows all behaviours and has no
    target (-1), for recommending to all users.
    """

    kind = "retrieval"
    splits: ClassVar[tuple[str, ...]] = (*SPLITS, "next")
    default_unit = "request"
    default_max_history = 20
    request_unit = "requests with a history"

    requests: NDArray[np.int64]
    """(m,) index of each request of the split in the columns."""
    end: NDArray[np.int32]
    """(n,) behaviours of the user before an example's last request."""
    first: NDArray[np.int64]
    """(n + 1,) index in `requests` of each example's first request."""

    @classmethod
    def parquet_columns(cls, manifest: Manifest) -> list[str]:
        fields = ("timestamp_ms", "history_end", "candidates", "split")
        return ["user_id", "item_index", *request_columns(*fields)]

    @classmethod
    def decode(cls, table: pa.Table, manifest: Manifest, uri: str) -> Columns:
        return decode_sequences(table, uri)

    def _plan(self) -> None:
        if self.split == "next":
            self.columns = add_next_requests(self.columns)
        columns = self.columns
        self.request_offsets = lengths_to_offsets(columns["requests_per_user"])
        if self.split == "next":
            chosen = np.arange(len(columns["history_end"]))
        else:
            chosen = np.flatnonzero(columns["split"] == SPLITS.index(self.split))
        if self.split == "train" and self.new:
            chosen = chosen[self.new.mask(columns["request_time"][chosen])]
        owner = np.searchsorted(self.request_offsets, chosen, side="right") - 1
        end = columns["history_end"][chosen]
        has_history = (end > 0) | (self.unit == "behaviour")
        self.skipped_users = owner[~has_history]
        self.requests = chosen[has_history]
        owner, end = owner[has_history], end[has_history]
        first = self._window_starts(owner, end)
        self.num_requests = self.num_learned = len(self.requests)
        self.num_without_history = int((end == 0).sum())
        self.user = owner[first]
        self.end = np.maximum.reduceat(end, first) if len(first) else end[:0]
        self.first = np.append(first, self.num_requests)
        self.lengths = np.minimum(self.end, np.int32(self.max_history))
        self.weights = np.ones(len(first), np.int8)

    def _window_starts(
        self, owner: NDArray[np.int64], end: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Return the indices of the requests at which an example begins. Requests come user by user, in time."""
        if self.unit != "user" or len(owner) == 0:
            return np.arange(len(owner))
        first_of_user = run_starts(owner)
        requests_of_user = np.diff(np.append(first_of_user, len(owner)))
        longest = np.repeat(np.maximum.reduceat(end, first_of_user), requests_of_user)
        stride = max(1, self.max_history // 2)
        window = np.where(longest <= self.max_history, 0, (longest - end) // stride)
        return run_starts(owner, window)

    @property
    def targets(self) -> NDArray[np.int32]:
        """(m,) target of each request."""
        return self.columns["target"][self.requests]

    @property
    def request_numbers(self) -> NDArray[np.int64]:
        """(m,) `request_number` of each request, unique across all splits except `next`."""
        counts = np.diff(self.first)
        user = np.repeat(self.user, counts)
        return request_number(user, self.requests - self.request_offsets[user])

    def visited_items(self) -> NDArray[np.int64]:
        """Return the items in the histories and targets of the requests, ascending."""
        last = np.append(run_starts(self.user)[1:], len(self.user)) - 1
        user, longest = self.user[last], self.end[last].astype(np.int64)
        behaviours = gather_ranges(self.offsets[user], longest)
        return np.union1d(self.columns["item"][behaviours], self.targets)

    def collate(self, rows: NDArray[np.int64]) -> Any:
        """Return the examples as tensors, histories right-padded with -1 to the longest.

        Returns:
            A `RequestBatch`, `WindowBatch` or `InteractionBatch` for the units `request`, `user` and `behaviour`.
        """
        columns, user = self.columns, self.user[rows]
        first = self.first[rows]
        if self.unit == "behaviour":
            target = columns["target"][self.requests[first]]
            return InteractionBatch(target=to_tensor(target), user_row=to_tensor(user))
        length = self.lengths[rows].astype(np.int64)
        window_start = self.end[rows] - length
        index, inside = pad_indices(self.offsets[user] + window_start, length)
        first_request = self.requests[first]
        number = request_number(user, first_request - self.request_offsets[user])
        by_row: dict[str, Any] = {
            "history": to_tensor(pad_ragged(columns["item"], index, inside, PAD)),
            "history_length": to_tensor(length),
            "user": to_tensor(columns["user_hash"][user]),
            "user_row": to_tensor(user),
            "request": to_tensor(number),
        }
        if self.unit == "request":
            return RequestBatch(
                **by_row,
                target=to_tensor(columns["target"][first_request]),
                repeats=to_tensor(columns["repeats"][first_request]),
            )
        count = self.first[rows + 1] - first
        request = self.requests[gather_ranges(first, count)]
        position = columns["history_end"][request] - np.repeat(window_start, count) - 1
        return WindowBatch(
            **by_row,
            target=to_tensor(columns["target"][request]),
            target_row=to_tensor(row_numbers(count)),
            target_position=to_tensor(position),
        )

    @classmethod
    def from_histories(
        cls, items: NDArray[np.int64], lengths: NDArray[np.int64], user: NDArray
    ) -> RetrievalDataset:
        """Return the requests of a served model as a dataset, each with its whole history.

        Args:
            items: The items of all histories, end to end.
            lengths: (B,) length of each history, at least 1.
            user: (B,) hash of each request's user.
        """
        columns = {
            "behaviours_per_user": lengths,
            "item": items,
            "user_hash": user,
        }
        return cls(columns, "next", "request", max(1, int(lengths.max(initial=1))))


def add_next_requests(columns: Columns) -> Columns:
    """Replace the requests by one per user that follows all behaviours and has no target."""
    users = len(columns["behaviours_per_user"])
    return {
        **columns,
        "requests_per_user": np.ones(users, np.int32),
        "history_end": columns["behaviours_per_user"],
        "target": np.full(users, PAD, np.int32),
        "repeats": np.zeros(users, bool),
    }


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
    size = 1 + max(items.max(initial=0), target.max(initial=0))
    pairs = row_numbers(behaviours_per_user) * size + items
    first_pairs, first_index = np.unique(pairs, return_index=True)
    owner = row_numbers(requests_per_user)
    index, is_there = find_sorted(first_pairs, owner * size + target)
    user_start = lengths_to_starts(behaviours_per_user)[owner]
    if not len(first_index):
        return is_there
    return is_there & (first_index[index] < user_start + end)


def to_tensor(values: NDArray) -> Tensor:
    """Return the values as an int64 tensor."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))


def request_columns(*names: str) -> list[str]:
    """Return the Parquet paths of fields of the requests; other fields are not decoded."""
    return [f"requests.list.element.{name}" for name in names]


def decode_splits(splits: pa.Array) -> NDArray[np.int8]:
    """Return the index of each split in `SPLITS`; -1 for another one."""
    index = pc.index_in(splits, pa.array(SPLITS, splits.type))
    return pc.fill_null(index, -1).to_numpy(zero_copy_only=False).astype(np.int8)


def decode_sequences(table: pa.Table, name: str) -> Columns:
    """Decode one part of the sequences of a retrieval log.

    Returns:
        By user (U,): behaviours_per_user, requests_per_user, user_hash. By behaviour (E,): item. By request (R,):
        history_end, target, repeats, request_time, split.

    Raises:
        UserError: If a request has other than one candidate.
    """
    lists = table["item_index"].combine_chunks()
    behaviours_per_user = pc.list_value_length(lists).to_numpy()
    items = lists.flatten().to_numpy()
    request_lists = table["requests"].combine_chunks()
    requests_per_user = pc.list_value_length(request_lists).to_numpy()
    requests = request_lists.flatten()
    candidates = pc.struct_field(requests, "candidates")
    num_candidates = pc.min_max(pc.list_value_length(candidates)).as_py()
    if len(candidates) and num_candidates != {"min": 1, "max": 1}:
        raise UserError(
            f"{name} has requests with other than one candidate; retrieval needs the target alone"
        )
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
