"""What retrieval models are built on and trained on: the catalogue, and examples as flat arrays.

    catalogue = Catalogue.load("tables", "sids")
    examples = Examples.load("tables/sequences", "train", unit="request", max_history=20)
    for rows in examples.batches(256, seed=1, epoch=0, shuffle=True):
        batch = examples.collate(rows)

A history is a slice of the user's behaviours, found when a batch is made; nothing is copied per
request. Shapes: `B` rows of a batch, `T` positions (the batch's own maximum), `M` targets of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.retrieval.search.trie import Trie
from models.tables import UserError, iter_parts, join, read_manifest, read_table, sequences_manifest

Unit = Literal["request", "user"]
Split = Literal["train", "val", "test", "next"]

PAD = -1
"""`item_index` at padded positions of a history, and the target where there is none."""

BUCKET = 64
"""Batches whose rows are sorted by length together when shuffling."""


@dataclass(frozen=True)
class Catalogue:
    """The items that a model can recommend, and their semantic IDs where it needs them."""

    num_items: int
    """Items; `item_index` is dense from 0."""
    sids: Tensor | None = None
    """(N, C) int64: codes of each item, or None."""
    codebook_sizes: tuple[int, ...] = ()
    """Codes per level; empty without semantic IDs."""
    trie: Trie | None = None
    """The semantic IDs as a trie, or None."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the tables it comes from: `sequences`, `items`, `sids`, `trie`."""
    tables: str = ""
    """Where the tables are, for models that read the items' texts; empty without tables."""

    @staticmethod
    def hashes_of(tables_uri: str, sids_uri: str | None = None) -> dict[str, str]:
        """Hashes of the tables that `load` reads, from their manifests. UserError if they do not belong together."""
        items = read_manifest(join(tables_uri, "items"), "items")
        sequences = read_manifest(join(tables_uri, "sequences"), "sequences")
        _check_made_from(f"the sequences of {tables_uri}", sequences.inputs, "items", items.hash, "jobs.prepare")
        hashes = {"sequences": sequences.hash, "items": items.hash}
        if sids_uri is None:
            return hashes
        sids = read_manifest(join(sids_uri, "sids"), "sids")
        edges = read_manifest(join(sids_uri, "trie"), "trie")
        _check_made_from(f"the sids of {sids_uri}", sids.inputs, "items", items.hash, "jobs.tokenize")
        _check_made_from(f"the trie of {sids_uri}", edges.inputs, "sids", sids.hash, "jobs.tokenize")
        return {**hashes, "sids": sids.hash, "trie": edges.hash}

    @classmethod
    def load(cls, tables_uri: str, sids_uri: str | None = None) -> Self:
        """Reads the manifests under `tables_uri` and, if given, the semantic IDs under `sids_uri`.

        Raises UserError if the tables do not belong together.
        """
        hashes = cls.hashes_of(tables_uri, sids_uri)
        items = read_manifest(join(tables_uri, "items"), "items")
        if items.rows == 0:
            raise UserError(f"{join(tables_uri, 'items')} has no rows; check the filters of jobs.prepare")
        if sids_uri is None:
            return cls(items.rows, hashes=hashes, tables=tables_uri)

        sids = read_manifest(join(sids_uri, "sids"), "sids")
        sizes = tuple(int(size) for size in sids.info["codebook_sizes"])
        codes = codes_of(read_table(join(sids_uri, "sids"), "sids"), join(sids_uri, "sids"))
        if codes.shape != (items.rows, len(sizes)):
            raise UserError(
                f"{sids_uri} holds {codes.shape[0]} codes of {codes.shape[1]} levels for {items.rows} items and "
                f"{len(sizes)} codebooks; run jobs.tokenize again"
            )
        over = (codes >= torch.tensor(sizes)).any(0).nonzero().flatten().tolist()
        if over:
            raise UserError(
                f"{sids_uri}: code {int(codes[:, over[0]].max())} at level {over[0]} exceeds its codebook of "
                f"{sizes[over[0]]}; run jobs.tokenize again"
            )
        table = read_table(join(sids_uri, "trie"), "trie")
        try:
            trie = Trie.from_table(table, sizes)
            trie.check_leads_to(codes)
        except UserError as error:
            raise UserError(f"{join(sids_uri, 'trie')}: {error}") from error
        return cls(items.rows, codes, sizes, trie, hashes, tables_uri)

    @classmethod
    def from_codes(cls, codes: Tensor, codebook_sizes: tuple[int, ...]) -> Self:
        """A catalogue of the items with these (N, C) codes, for tests and benchmarks."""
        return cls(len(codes), codes.long(), codebook_sizes, Trie.from_codes(codes, codebook_sizes))


def _check_made_from(what: str, inputs: dict[str, str], table: str, expected: str, job: str) -> None:
    if inputs.get(table) != expected:
        raise UserError(
            f"{what} were made from other {table} ({inputs.get(table, 'unknown')[:12]}, these are {expected[:12]}); "
            f"point at tables that belong together or run {job} again"
        )


def codes_of(table: pa.Table, name: str) -> Tensor:
    """(N, C) int64 codes of a `sids` table, in the order of `item_index`."""
    lists = table["codes"].combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy()
    if lengths.min() != lengths.max():
        raise UserError(
            f"{name} has codes of {lengths.min()} to {lengths.max()} levels, not of one length; run jobs.tokenize again"
        )
    index = table["item_index"].to_numpy()
    if not np.array_equal(index, np.arange(len(index))):
        raise UserError(f"{name}: item_index is not dense and sorted from 0; run jobs.tokenize again")
    codes = lists.flatten().to_numpy().astype(np.int64).reshape(len(index), -1)
    return torch.from_numpy(codes)


def hash_strings(strings: pa.Array) -> NDArray[np.int64]:
    """A stable, non-negative 63-bit hash of each string: a polynomial over its bytes, then mixed."""
    binary = strings.cast(pa.large_binary())
    if len(binary) == 0:
        return np.zeros(0, np.int64)
    offsets = np.frombuffer(binary.buffers()[1], np.int64)[binary.offset : binary.offset + len(binary) + 1]
    if offsets[-1] == offsets[0]:
        return np.zeros(len(binary), np.int64)
    data = np.frombuffer(binary.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    lengths = np.diff(offsets)
    powers = np.full(int(lengths.max()), 0x100000001B3, np.uint64)  # FNV's prime, wrapping at 64 bits
    powers = np.cumprod(powers)
    place = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    totals = np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers[place])
    totals = np.concatenate([np.zeros(1, np.uint64), totals])
    value = totals[offsets[1:]] - totals[offsets[:-1]]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's finaliser
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return ((value ^ (value >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


class Examples:
    """The requests of one split as flat arrays, in rows of one `unit`.

    `request`: a row is one request, its history the latest `max_history` behaviours before it.
    `user`: a row is a user's history with all of the split's requests in it, so that one causal pass
    serves them all. A user with more than `max_history` behaviours has overlapping windows, each request
    in exactly one of them and with at least half of `max_history` behaviours before it.

    Only requests of the split are read as targets, and only behaviours before a request as its history.
    Requests with no history are skipped and counted (`skipped`).
    """

    behaviours: NDArray[np.int32]
    """Items of this rank's users, user after user."""
    lengths: NDArray[np.int64]
    """Of each row, the behaviours in its history."""
    skipped: int
    """Requests of the split, on this rank, that have nothing to condition on."""
    rows_per_rank: NDArray[np.int64]
    """Rows of every rank."""
    # by user: first behaviour, hash of the id, row in the table
    _user_start: NDArray[np.int64]
    _user_hash: NDArray[np.int64]
    _user_row: NDArray[np.int64]
    # by request: its user, behaviours before it, target, number in the table
    _owner: NDArray[np.int64]
    _end: NDArray[np.int64]
    _target: NDArray[np.int64]
    _request: NDArray[np.int64]
    # by row: its first request, its requests, behaviours before the last of them
    _first: NDArray[np.int64]
    _count: NDArray[np.int64]
    _row_end: NDArray[np.int64]

    def __init__(self, unit: Unit, max_history: int, rank: int, world: int) -> None:
        if unit not in ("request", "user"):
            raise ValueError(f"unit '{unit}' is unknown; choose 'request' or 'user'")
        if max_history < 1:
            raise ValueError(f"max_history {max_history} is below 1; a history needs at least one behaviour")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not below the number of workers {world}")
        self.unit, self.max_history, self.rank, self.world = unit, max_history, rank, world

    @classmethod
    def load(
        cls,
        sequences_uri: str,
        split: Split,
        *,
        unit: Unit = "request",
        max_history: int = 20,
        rank: int = 0,
        world: int = 1,
    ) -> Self:
        """The users of this rank: every `world`-th row of the table from row `rank` on.

        The split `next` has one request per user that follows all behaviours and has no target (-1),
        for recommending to all users.
        """
        sequences_manifest(sequences_uri, "retrieval")
        self = cls(unit, max_history, rank, world)
        parts: list[tuple[NDArray, ...]] = []
        users = mine = behaviours = requests = skipped = 0
        self.rows_per_rank = np.zeros(world, np.int64)
        for table in iter_parts(sequences_uri, "sequences", ["user_id", "item_index", "requests"]):
            if table.num_rows == 0:
                continue
            items, lengths, owner, end, target, chosen = _read_part(table, split, sequences_uri)
            row = np.arange(users, users + table.num_rows)
            ids = np.arange(requests, requests + len(end))
            usable = chosen & (end > 0)
            skipped += int((chosen & ~usable & (row[owner] % world == rank)).sum())
            owner, end, target, ids = owner[usable], end[usable], target[usable], ids[usable]
            first_of_row = self._first_of_row(owner, end)
            self.rows_per_rank += np.bincount(row[owner[first_of_row]] % world, minlength=world)

            my_user = row % world == rank
            my_request = my_user[owner]
            local = np.cumsum(my_user) - 1 + mine  # this rank's number of the user
            hashes = hash_strings(table["user_id"].combine_chunks())
            part = (
                items[np.repeat(my_user, lengths)],
                behaviours + _starts(lengths[my_user]),
                hashes[my_user],
                row[my_user],
                local[owner[my_request]],
                end[my_request],
                target[my_request],
                ids[my_request],
                first_of_row[my_request],
            )
            parts.append(part)
            users += table.num_rows
            mine += int(my_user.sum())
            behaviours += len(part[0])
            requests += len(chosen)
        if not parts:
            raise UserError(f"{sequences_uri} has no users; check the filters of jobs.prepare")
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        self.behaviours = columns[0].astype(np.int32)
        self._user_start, self._user_hash, self._user_row = columns[1:4]
        self._owner, self._end, self._target, self._request, first = columns[4:]
        self.skipped = skipped
        self._first = np.flatnonzero(first)
        self._count = np.diff(np.append(self._first, len(first)))
        self._row_end = np.maximum.reduceat(self._end, self._first) if len(self._first) else self._end[:0]
        self.lengths = np.minimum(self._row_end, max_history)
        return self

    def _first_of_row(self, owner: NDArray, end: NDArray) -> NDArray[np.bool_]:
        """Marks the requests that start a new row. Requests come user by user, `end` never falling."""
        if self.unit == "request" or len(owner) == 0:
            return np.ones(len(owner), bool)
        new_user = np.append(True, owner[1:] != owner[:-1])
        starts = np.flatnonzero(new_user)
        longest = np.repeat(np.maximum.reduceat(end, starts), np.diff(np.append(starts, len(owner))))
        stride = max(1, self.max_history // 2)
        window = np.where(longest <= self.max_history, 0, (longest - end) // stride)
        return new_user | np.append(True, window[1:] != window[:-1])

    def __len__(self) -> int:
        """Rows on this rank."""
        return len(self._first)

    @property
    def requests(self) -> int:
        """Requests on this rank: the number of training targets or of evaluated requests."""
        return len(self._end)

    @property
    def users(self) -> int:
        """Users on this rank who have a request here."""
        return len(np.unique(self._owner))

    @property
    def request_numbers(self) -> NDArray[np.int64]:
        """Numbers, in the sequences table, of the requests on this rank: no two splits share one, but for `next`."""
        return self._request

    def steps(self, batch_size: int) -> int:
        """Batches per shuffled epoch, the same on every rank."""
        return -(-int(self.rows_per_rank.max()) // batch_size)

    def batches(
        self, batch_size: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = False
    ) -> Iterator[NDArray[np.int64]]:
        """Row numbers, batch by batch, rows of like length together; the same for the same arguments.

        Shuffled, every rank yields `steps(batch_size)` batches (a rank with fewer rows repeats some), as
        workers that train together must. In order, each row comes once, shortest history first.
        """
        count = len(self)
        if not shuffle:
            order = np.argsort(self.lengths, kind="stable")
        else:
            if count == 0:
                raise UserError(
                    f"worker {self.rank} of {self.world} has no rows to train on; use fewer workers or more users"
                )
            rng = np.random.default_rng([seed, epoch, self.rank])
            order = np.resize(rng.permutation(count), int(self.rows_per_rank.max()))
            bucket = np.arange(len(order)) // (BUCKET * batch_size)
            order = order[np.lexsort((self.lengths[order], bucket))]
        starts = np.arange(0, len(order), batch_size)
        for start in rng.permutation(starts) if shuffle else starts:
            yield order[start : start + batch_size]

    def bounded(self, order: NDArray[np.int64], batch_size: int) -> Iterator[NDArray[np.int64]]:
        """The rows of `order` in batches of `batch_size`."""
        return (order[i : i + batch_size] for i in range(0, len(order), batch_size))

    def notes(self, batch_size: int, seed: int) -> list[str]:
        """What is worth a line before training: nothing."""
        return []

    def collate(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows as tensors, right-padded with -1 to their own longest history.

        history (B, T) item_index; history_length (B,); user (B,) hash of the user id; user_row (B,) row
        in the sequences table; request (B,) number of the (first) request in that table. For unit
        `request` target (B,); for unit `user` the targets of all its requests: target (M,), target_row
        (M,) in the batch, target_position (M,) of the last behaviour before the request.
        """
        first = self._first[rows]
        user = self._owner[first]
        length = self.lengths[rows]
        begin = self._user_start[user] + self._row_end[rows] - length
        place = np.arange(int(length.max(initial=1)))
        inside = place < length[:, None]
        index = np.where(inside, begin[:, None] + place, 0)
        batch = {
            "history": np.where(inside, self.behaviours[index], PAD).astype(np.int64),
            "history_length": length,
            "user": self._user_hash[user],
            "user_row": self._user_row[user],
            "request": self._request[first],
        }
        if self.unit == "request":
            batch["target"] = self._target[first]
        else:
            count = self._count[rows]
            batch["target_row"] = np.repeat(np.arange(len(rows)), count)
            request = np.arange(count.sum()) + np.repeat(first - _starts(count), count)
            batch["target"] = self._target[request]
            window_start = np.repeat(self._row_end[rows] - length, count)
            batch["target_position"] = self._end[request] - window_start - 1
        return {name: torch.from_numpy(np.ascontiguousarray(value, np.int64)) for name, value in batch.items()}


def _starts(lengths: NDArray) -> NDArray[np.int64]:
    """Where each of consecutive runs of these lengths begins."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


def _read_part(table: pa.Table, split: Split, name: str) -> tuple[NDArray, ...]:
    """Of one part: items and lengths by user; owner, history_end, target and choice by request."""
    lists = table["item_index"].combine_chunks()
    items = lists.flatten().to_numpy()
    lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)
    if split == "next":
        owner = np.arange(len(lengths))
        return items, lengths, owner, lengths, np.full(len(lengths), PAD), np.ones(len(lengths), bool)
    lists = table["requests"].combine_chunks()
    counts = pc.list_value_length(lists).to_numpy().astype(np.int64)
    requests = lists.flatten()
    candidates = pc.struct_field(requests, "candidates")
    if len(candidates) and pc.min_max(pc.list_value_length(candidates)).as_py() != {"min": 1, "max": 1}:
        raise UserError(f"{name} has requests with other than one candidate; retrieval needs the target alone")
    return (
        items,
        lengths,
        np.repeat(np.arange(len(lengths)), counts),
        pc.struct_field(requests, "history_end").to_numpy().astype(np.int64),
        candidates.flatten().to_numpy().astype(np.int64),
        pc.equal(pc.struct_field(requests, "split"), split).to_numpy(zero_copy_only=False),
    )
