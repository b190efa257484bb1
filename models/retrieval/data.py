"""What retrieval models are built on and trained on: the catalogue, and examples as flat arrays.

    catalogue = Catalogue.load("tables", "sids")
    examples = Examples.load("tables/sequences", "train", unit="request", max_history=20)
    for rows in examples.batches(256, seed=1, epoch=0, shuffle=True):
        batch = examples.collate(rows)

A history is a slice of the user's behaviours, found when a batch is made; nothing is copied per
request. Shapes: `B` rows of a batch, `T` positions (the batch's own maximum), `M` targets of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.examples import Sharded
from models.gpu.graphs import rung
from models.inputs import Inputs
from models.retrieval.search.trie import Trie
from models.shares import Shard, Share, joined, quotas, runs, starts
from models.tables import (
    Manifest,
    UserError,
    join,
    read_manifest,
    read_table,
    sequences_manifest,
)

PAD = -1
"""`item_index` at padded positions of a history, and the target where there is none."""

TABLES = {"tables": ("items", "sequences"), "sids": ("sids", "trie")}
"""Tables that a catalogue comes from, by folder of `Inputs`."""

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

    def scales(self) -> dict[str, Any]:
        """Nothing: items are numbers."""
        return {}

    @classmethod
    def load(cls, tables_uri: str, sids_uri: str | None = None) -> Self:
        """Reads the manifests under `tables_uri` and, if given, the semantic IDs under `sids_uri`.

        Raises UserError if the tables do not belong together.
        """
        hashes = Inputs(tables_uri, sids_uri).hashes(TABLES)
        items = read_manifest(join(tables_uri, "items"), "items")
        if items.rows == 0:
            raise UserError(
                f"{join(tables_uri, 'items')} has no rows; check the filters of jobs.prepare"
            )
        if sids_uri is None:
            return cls(items.rows, hashes=hashes, tables=tables_uri)

        sids = read_manifest(join(sids_uri, "sids"), "sids")
        sizes = tuple(int(size) for size in sids.info["codebook_sizes"])
        codes = codes_of(
            read_table(join(sids_uri, "sids"), "sids"), join(sids_uri, "sids")
        )
        if codes.shape != (items.rows, len(sizes)):
            raise UserError(
                f"{sids_uri} holds {codes.shape[0]} codes of {codes.shape[1]} levels for {items.rows} items and "
                f"{len(sizes)} codebooks; run jobs.tokenize again"
            )
        try:
            trie = Trie(codes, sizes)
        except UserError as error:
            raise UserError(f"{sids_uri}: {error}") from error
        return cls(items.rows, codes, sizes, trie, hashes, tables_uri)

    @classmethod
    def from_codes(cls, codes: Tensor, codebook_sizes: tuple[int, ...]) -> Self:
        """A catalogue of the items with these (N, C) codes, for tests and benchmarks."""
        return cls(
            len(codes), codes.long(), codebook_sizes, Trie(codes, codebook_sizes)
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
        raise UserError(
            f"{name}: item_index is not dense and sorted from 0; run jobs.tokenize again"
        )
    codes = lists.flatten().to_numpy().astype(np.int64).reshape(len(index), -1)
    return torch.from_numpy(codes)


def hash_strings(strings: pa.Array) -> NDArray[np.int64]:
    """A stable, non-negative 63-bit hash of each string: a polynomial over its bytes, then mixed."""
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
    place = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    totals = np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers[place])
    totals = np.concatenate([np.zeros(1, np.uint64), totals])
    value = totals[offsets[1:]] - totals[offsets[:-1]]
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9),
        (27, 0x94D049BB133111EB),
    ):  # splitmix64's finaliser
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return ((value ^ (value >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def request_number(user_row: NDArray, place: NDArray) -> NDArray[np.int64]:
    """Number of a request in the sequences table: by its user's row and its place among the user's requests, so that
    it is known without the parts before. No two share one, below 16 million requests of a user."""
    return (np.asarray(user_row, np.int64) << 24) + place


def request_place(number: NDArray) -> NDArray[np.int64]:
    """Return the place of a request among its user's requests, from its `request_number`."""
    return np.asarray(number, np.int64) & ((1 << 24) - 1)


class Examples(Sharded):
    """The requests of one split as flat arrays, in rows of one `unit`.

    `request`: a row is one request, its history the latest `max_history` behaviours before it.
    `behaviour`: a row is the target of one request, with its user and without a history; requests without a history
    are rows too.
    `user`: a row is a user's history with all of the split's requests in it, so that one causal pass
    serves them all. A user with more than `max_history` behaviours has overlapping windows, each request
    in exactly one of them and with at least half of `max_history` behaviours before it.

    Only requests of the split are read as targets, and only behaviours before a request as its history.
    Other requests with no history are skipped and counted (`skipped`). Of the users only those with a row are held,
    and of their behaviours those from the first to the last that a row has.

    The split `next` has one request per user that follows all behaviours and has no target (-1), for recommending to
    all users.
    """

    kind = "retrieval"
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test", "next")
    unit = "request"
    counted = "requests with a history"
    max_history = 20

    behaviours: NDArray[np.int32]
    """Items of this rank's users, user after user."""
    lengths: NDArray[np.int32]
    """Of each row, the behaviours in its history."""
    # by user: place of its first behaviour, were it held; hash of the id; row in the table
    _user_start: NDArray[np.int64]
    _user_hash: NDArray[np.int64]
    _user_row: NDArray[np.int64]
    # by request: its user, behaviours before it, target, place among its user's requests; in val and test, whether the
    # target is among all behaviours before it
    _owner: NDArray[np.int32]
    _end: NDArray[np.int32]
    _target: NDArray[np.int32]
    _place: NDArray[np.int32]
    _repeats: NDArray[np.bool_] | None
    # of each row and one more, its first request; by row: behaviours before the last of its requests
    _first: NDArray[np.int32]
    _row_end: NDArray[np.int32]

    def __init__(self, split: str, unit: str, max_history: int, share: Share) -> None:
        super().__init__(split, unit, max_history, share)
        self.skipped = 0
        self._users = self.requests = self._behaviours = 0
        self._parts: list[dict[str, NDArray]] = []

    @classmethod
    def _open(cls, uri: str) -> tuple[Manifest, list[str]]:
        manifest = sequences_manifest(uri, "retrieval")
        return manifest, [
            "user_id",
            "item_index",
            *of_requests(
                *["timestamp_ms"] * bool(cls.since),
                "history_end",
                "candidates",
                "split",
            ),
        ]

    @classmethod
    def _read(cls, table: pa.Table, manifest: Manifest, uri: str) -> dict[str, NDArray]:
        return _read_part(table, uri)

    def _add(self, part: dict[str, NDArray], first_user: int, shard: Shard) -> int:
        if self.split == "next":
            end = part["lengths"]
            owner, target, place = (
                np.arange(len(end)),
                np.full(len(end), PAD),
                np.zeros(len(end), np.int64),
            )
        else:
            chosen = (
                pc.equal(part["split"], self.split)
                .to_numpy(zero_copy_only=False)
                .nonzero()[0]
            )
            if self.split == "train" and self.since:
                chosen = chosen[self.left(part["time"][chosen], first_user)]
            owner, end, target, place = (
                part[name][chosen] for name in ("owner", "end", "target", "place")
            )
        usable = (end > 0) | (self.unit == "behaviour")
        self.skipped += int((~usable & shard.counts(first_user + owner)).sum())
        owner, end, target, place = (
            owner[usable],
            end[usable],
            target[usable],
            place[usable],
        )
        self.without_history += int((end == 0).sum())
        measured = (
            {"repeats": seen_before(part, owner, end, target)}
            if self.split in ("val", "test")
            else {}
        )
        first = np.flatnonzero(self._first_of_row(owner, end))
        row_end = np.maximum.reduceat(end, first) if len(first) else end[:0]
        users, local = np.unique(owner, return_inverse=True)
        # of each user, behaviours from the first of its first row to the last of any
        new = (
            np.flatnonzero(np.append(True, owner[first][1:] != owner[first][:-1]))
            if len(first)
            else first
        )
        low = (
            np.minimum.reduceat(np.maximum(row_end - self.max_history, 0), new)
            if len(first)
            else end[:0]
        )
        count = (np.maximum.reduceat(row_end, new) if len(first) else end[:0]) - low
        self._parts.append(
            {
                "behaviours": part["items"][
                    runs(part["user_start"][users] + low, count)
                ].astype(np.int32),
                "user_start": self._behaviours + starts(count) - low,
                "user_hash": part["user_hash"][users],
                "user_row": first_user + users,
                "owner": (self._users + local).astype(np.int32),
                "end": end.astype(np.int32),
                "target": target.astype(np.int32),
                "place": place.astype(np.int32),
                "first": (self.requests + first).astype(np.int32),
                "row_end": row_end.astype(np.int32),
                **measured,
            }
        )
        self._users += len(users)
        self.requests += len(end)
        self.learned += len(end)
        self._behaviours += int(count.sum())
        return len(first)

    def _close(self) -> None:
        columns = joined(self._parts)
        del self._parts
        self.behaviours = columns["behaviours"]
        self._user_start, self._user_hash, self._user_row = (
            columns[name] for name in ("user_start", "user_hash", "user_row")
        )
        self._owner, self._end, self._target, self._place = (
            columns[name] for name in ("owner", "end", "target", "place")
        )
        self._repeats = columns.get("repeats")
        self._first = np.append(columns["first"], np.int32(self.requests))
        self._row_end = columns["row_end"]
        self.lengths = np.minimum(self._row_end, np.int32(self.max_history))

    def _first_of_row(self, owner: NDArray, end: NDArray) -> NDArray[np.bool_]:
        """Marks the requests that start a new row. Requests come user by user, `end` never falling."""
        if self.unit != "user" or len(owner) == 0:
            return np.ones(len(owner), bool)
        new_user = np.append(True, owner[1:] != owner[:-1])
        users = np.flatnonzero(new_user)
        longest = np.repeat(
            np.maximum.reduceat(end, users), np.diff(np.append(users, len(owner)))
        )
        stride = max(1, self.max_history // 2)
        window = np.where(longest <= self.max_history, 0, (longest - end) // stride)
        return new_user | np.append(True, window[1:] != window[:-1])

    @property
    def targets(self) -> NDArray[np.int32]:
        """Targets of the requests on this rank."""
        return self._target

    @property
    def request_numbers(self) -> NDArray[np.int64]:
        """Numbers, in the sequences table, of the requests on this rank: no two splits share one, but for `next`."""
        return request_number(self._user_row[self._owner], self._place)

    def _arrange(
        self,
        rows: NDArray[np.int64],
        shard: int,
        batch_size: int,
        steps: int,
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """At random, and by length within the rows of `BUCKET` steps."""
        order = rows[rng.permutation(len(rows))]
        total = int(self.rows_per_buffer.sum())
        edges = quotas(len(rows), total, batch_size, steps, shard, self.share.shards)
        bucket = np.repeat(np.arange(steps) // BUCKET, np.diff(edges))
        return order[np.lexsort((self.lengths[order], bucket))], edges

    def ordered(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Shortest history first."""
        return rows[np.argsort(self.lengths[rows], kind="stable")]

    def user_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._user_row[self._owner[self._first[rows]]]

    def collate(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows as tensors, right-padded with -1 to their own longest history.

        history (B, T) item_index; history_length (B,); user (B,) hash of the user id; user_row (B,) row
        in the sequences table; request (B,) `request_number` of the (first) request. Unit `behaviour`
        has user_row and target (B,) alone. For unit `request` target (B,)
        and, in val and test, repeats (B,), 1 where the target is among all of
        the user's behaviours before the request, be they in `history` or not; for unit `user` the targets of all its
        requests: target (M,), target_row (M,) in the batch, target_position (M,) of the last behaviour before it.
        """
        first = self._first[rows].astype(np.int64)
        user = self._owner[first]
        if self.unit == "behaviour":
            target, user_row = self._target[first], self._user_row[user]
            return tensors({"target": target, "user_row": user_row})
        length = self.lengths[rows].astype(np.int64)
        begin = self._user_start[user] + self._row_end[rows] - length
        batch: dict[str, NDArray[Any]] = {
            "history": padded(self.behaviours, begin, length),
            "history_length": length,
            "user": self._user_hash[user],
            "user_row": self._user_row[user],
            "request": request_number(self._user_row[user], self._place[first]),
        }
        if self.unit != "user":
            batch["target"] = self._target[first]
            if self._repeats is not None:
                batch["repeats"] = self._repeats[first]
        else:
            count = self._first[rows + 1] - first
            batch["target_row"] = np.repeat(np.arange(len(rows)), count)
            request = runs(first, count)
            batch["target"] = self._target[request]
            window_start = np.repeat(self._row_end[rows] - length, count)
            batch["target_position"] = self._end[request] - window_start - 1
        return tensors(batch)

    def filled(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """With longer histories, up to `max_history`, and of unit `user` with targets that are none."""
        if self.unit == "behaviour":
            return batch
        length = batch["history"].shape[1]
        wide = min(rung(length), max(length, self.max_history)) - length
        batch = {
            **batch,
            "history": functional.pad(batch["history"], (0, wide), value=PAD),
        }
        if self.unit == "user":
            more = rung(len(batch["target"])) - len(batch["target"])
            batch["target"] = functional.pad(batch["target"], (0, more), value=PAD)
            for name in ("target_row", "target_position"):
                batch[name] = functional.pad(batch[name], (0, more))
        return batch


def seen_before(
    part: dict[str, NDArray],
    owner: NDArray[np.int64],
    end: NDArray[np.int64],
    target: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """(R,) whether the target is among the first `end` behaviours, of which there is one, of the user `owner`, each
    (R,)."""
    size = 1 + max(part["items"].max(initial=0), target.max(initial=0))
    user = np.repeat(np.arange(len(part["lengths"])), part["lengths"])
    pairs, place = np.unique(
        user * size + part["items"], return_index=True
    )  # of each user's item, its first place
    wanted = owner * size + target
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    return (pairs[at] == wanted) & (place[at] < part["user_start"][owner] + end)


def padded(
    items: NDArray, begin: NDArray[np.int64], length: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(B, T) `length` (B,) of the `items` from `begin` (B,) on, then PAD; T is the longest, at least 1."""
    place = np.arange(int(length.max(initial=1)))
    inside = place < length[:, None]
    return np.where(
        inside, items[np.where(inside, begin[:, None] + place, 0)], PAD
    ).astype(np.int64)


def tensors(batch: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    """The arrays as int64 tensors."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(value, np.int64))
        for name, value in batch.items()
    }


def batch_of(
    histories: Sequence[Sequence[int]], user: NDArray[np.int64]
) -> dict[str, Tensor]:
    """What `Examples.collate` gives of histories in no table, for `recommend`: `item_index` of at least one of each
    request, and the hash of its user."""
    length = np.array([len(history) for history in histories], np.int64)
    items = np.array([item for history in histories for item in history], np.int64)
    return tensors(
        {
            "history": padded(items, starts(length), length),
            "history_length": length,
            "user": user,
        }
    )


def of_requests(*names: str) -> list[str]:
    """Paths, in the Parquet files, of fields of the requests: the others are not decoded."""
    return [f"requests.list.element.{name}" for name in names]


def _read_part(table: pa.Table, name: str) -> dict[str, Any]:
    """Of one part: items end to end; by user lengths, user_start, user_hash; by request owner, place, end, target,
    (as an Arrow array) split and, where it was read, time."""
    lists = table["item_index"].combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)
    requests = table["requests"].combine_chunks()
    counts = pc.list_value_length(requests).to_numpy().astype(np.int64)
    asked = requests.flatten()
    candidates = pc.struct_field(asked, "candidates")
    if len(candidates) and pc.min_max(pc.list_value_length(candidates)).as_py() != {
        "min": 1,
        "max": 1,
    }:
        raise UserError(
            f"{name} has requests with other than one candidate; retrieval needs the target alone"
        )
    return {
        "items": lists.flatten().to_numpy(),
        "lengths": lengths,
        "user_start": starts(lengths),
        "user_hash": hash_strings(table["user_id"].combine_chunks()),
        "owner": np.repeat(np.arange(len(counts)), counts),
        "place": runs(np.zeros_like(counts), counts),
        "end": pc.struct_field(asked, "history_end").to_numpy().astype(np.int64),
        "target": candidates.flatten().to_numpy().astype(np.int64),
        "split": pc.struct_field(asked, "split"),
    } | (
        {"time": pc.struct_field(asked, "timestamp_ms").to_numpy()}
        if "timestamp_ms" in asked.type.names
        else {}
    )
