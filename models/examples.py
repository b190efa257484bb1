"""A worker's examples of one split, in rows that batches are made of; its training examples held whole, or in buffers.

    shards, buffers = plan(Examples, uri, "request", 20, shards=1, budget=8 * 2**30, world=4)
    examples = Examples.load_share(uri, {"train": "request", "val": "request"}, 20, share, buffers)
    for batch in examples["train"].epoch(256, seed=1, epoch=0): ...

Where a share is larger than a worker's memory, the parts of every shard are cut into P runs, and buffer b holds run b
of each of them. An epoch goes through the buffers in an order that is drawn for it; the batches of a buffer are drawn
from all its rows, so they do not depend on the number of workers either (`models/shares.py`). While a worker trains on
one buffer a thread reads the next: two are held at a time. The price: rows of two buffers never meet in a batch. A
share that is held whole is one buffer, which stays.

The cursor is the number of the step in its epoch: how many rows a buffer has is counted once, in the pass that
collects the validation rows, so a run that is continued opens the buffer where it stands and reads none before it.

Shapes: `V` shards, `P` buffers, `n` rows of a shard, `S` steps of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.shares import Shard, Share, cut, held_bytes, steps_of
from models.tables import Manifest, UserError, part_uris, read_parquet
from models.whole_batch import IDLE, ROWS

MOST_UNPACKED = 64
"""Bytes in memory for each on disk, above any table seen: shares that fit with it are not looked at."""


def plan(
    family: type[Sharded],
    uri: str,
    unit: str,
    max_history: int,
    *,
    shards: int,
    budget: float,
    world: int,
) -> tuple[int, int]:
    """(V, P): how one of `world` workers reads its share. In `shards`, held whole, where that fits the `budget` in
    bytes (0: any does), else in buffers of which two do: by the bytes that the rows of the table's first part take, and
    as many parts for each worker and buffer as fit. UserError where one does not."""
    manifest, columns = family._open(uri)
    disk = sum(part.bytes for part in manifest.files)
    if not budget or disk * MOST_UNPACKED <= budget * world:
        return shards, 1
    first = manifest.files[0]
    content = family._read(
        read_parquet(part_uris(uri, manifest)[0], columns, first.sha256), manifest, uri
    )
    part = family.of_part(
        "train", unit, max_history, content, 0, Shard(0, range(1), 0, 1)
    )
    share = part.nbytes / first.bytes * disk / world
    if share <= budget:
        return shards, 1
    files = len(manifest.files)
    largest = max(part.bytes for part in manifest.files) * part.nbytes / first.bytes
    fit = int(budget / 2 / largest)  # parts of a buffer of one worker
    if fit < 1 or files < world:
        least = math.ceil(2 * largest / 2**30 * 1e4) / 1e4
        raise UserError(
            f"fit.memory_budget_gb {budget / 2**30:g} is below {least:g}, which two of the {files} files of {uri} "
            f"take; raise it, or prepare with more --partitions"
        )
    return world, math.ceil(math.ceil(files / world) / fit)


class Sharded:
    """The examples of one split on one worker, in rows that batches are made of; a family's `data.py` fills it.

    Rows come shard by shard. A worker holds all rows of its shards. Of a shard that several hold it takes every
    so-manieth row of what the shard gives to a batch, and in an evaluation every so-manieth user. What is cut into
    several buffers has itself no rows: `epoch` reads them.
    """

    kind: ClassVar[str]
    """Name of the family."""
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")
    """Splits that it has."""
    unit: str
    """What a row is; of the class: where nothing else is asked for."""
    max_history: int
    """Behaviours of a history at most; of the class: where nothing else is asked for."""
    lengths: NDArray[np.integer]
    """Of each row, what batches are sorted by."""
    counted: ClassVar[str] = "requests"
    """What `requests` counts, in words."""
    since: ClassVar[int] = 0
    """Of training: time in ms before which a share of `replay` is left, drawn by `seed`."""
    replay: ClassVar[float] = 1.0
    seed: ClassVar[int] = 0
    skipped = 0
    """Requests of the split, of this worker's evaluation, that are left out."""
    requests = 0
    """Requests of the split on this worker."""
    learned = 0
    """Requests, of a feed events, that this worker's rows are trained on."""
    learned_unit: ClassVar[str] = "requests"
    """Name of the unit of `learned`."""
    without_history = 0
    """Those among `requests` that have no history, of a model that learns from them too."""
    buffers = 1
    """P: buffers that its share is cut into."""
    rows_per_buffer: NDArray[np.int64]
    """(V, P) rows of each buffer of each shard; of those that other workers hold 0 until `agree`."""
    examples_per_buffer: NDArray[np.int64]
    """(V, P) what batches count of them (`sizes`); likewise."""

    def __init__(self, split: str, unit: str, max_history: int, share: Share) -> None:
        self.split, self.unit, self.max_history, self.share = (
            split,
            unit,
            max_history,
            share,
        )
        self._rows_held = np.zeros(len(share.held), np.int64)
        self.rows_per_buffer, self.examples_per_buffer = np.zeros(
            (2, share.shards, 1), np.int64
        )
        self._kept: list[NDArray[np.int64]] | None = (
            None  # of each shard held, the rows that `limit_to` left
        )

    def left(self, time: NDArray[np.int64], first: int) -> NDArray[np.bool_]:
        """(n,) which of the part's training requests or rows of these times are trained on; `first` tells parts
        apart."""
        return (time >= self.since) | (
            np.random.default_rng([self.seed, first]).random(len(time)) < self.replay
        )

    # What a family gives.

    @classmethod
    def of_model(cls, config: Any) -> type[Self]:
        """The class as a model's config wants its training rows."""
        return cls

    @classmethod
    def _open(cls, uri: str) -> tuple[Manifest, list[str]]:
        """The manifest of its sequences and the columns that it reads; UserError for those of another family."""
        raise NotImplementedError

    @classmethod
    def _read(cls, table: pa.Table, manifest: Manifest, uri: str) -> dict[str, Any]:
        """Flat arrays of one part, for all splits."""
        raise NotImplementedError

    def _add(self, part: dict[str, Any], first_user: int, shard: Shard) -> int:
        """Keeps what rows of the split need of a part that begins with that row of the table; returns their number."""
        raise NotImplementedError

    def _close(self) -> None:
        """Makes one of what was kept of all parts."""
        raise NotImplementedError

    def _arrange(
        self,
        rows: NDArray[np.int64],
        shard: int,
        batch_size: int,
        steps: int,
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(the rows in an order of this epoch, (S + 1,) edges of what each step takes of them)."""
        raise NotImplementedError

    def ordered(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows in the order of an evaluation: those of like length together."""
        raise NotImplementedError

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """What batches count of each row: one, unless a family says otherwise."""
        return np.ones(len(rows), np.int64)

    def bounded(
        self, order: NDArray[np.int64], batch_size: int
    ) -> Iterator[NDArray[np.int64]]:
        """The rows of `order` in batches of at most `batch_size`, unless of one row."""
        upto, first = np.append(0, np.cumsum(self.sizes(order))), 0
        while first < len(order):
            last = (
                int(np.searchsorted(upto, upto[first] + batch_size, side="right")) - 1
            )
            yield order[first : (first := max(last, first + 1))]

    def drawn(
        self,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> NDArray[np.int64]:
        """The rows of a training batch with what is drawn anew for it. `places` are their places in the epoch, which
        are the same however many workers share the batch."""
        return rows

    def user_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows, in the sequences table, of the rows' users."""
        raise NotImplementedError

    def collate(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows as tensors."""
        raise NotImplementedError

    def asked(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the rows of a model's `score(batch)` are of, each (N,): user_row, request, by which those of a user are
        told apart and ordered, its time in ms and its query, and item; where a family ranks candidates."""
        raise NotImplementedError

    def filled(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch of a training step in one of few shapes, by padding from which nothing is learned."""
        return batch

    def _bring(self, catalogue: Any, history: bool, complete: bool) -> None:
        """See `bring`; only where `Family.trim_catalogue` asks for it."""
        raise NotImplementedError

    # What all have.

    @classmethod
    def load(
        cls,
        uri: str,
        split: str,
        *,
        unit: str | None = None,
        max_history: int | None = None,
        rank: int = 0,
        world: int = 1,
        shards: int = 1,
    ) -> Self:
        """The examples of one split, of the shards that this worker holds. `unit` and `max_history` are by default the
        family's."""
        sizes = np.array([part.bytes for part in cls._open(uri)[0].files])
        units = {split: cls.unit if unit is None else unit}
        limit = cls.max_history if max_history is None else max_history
        return cls.load_share(uri, units, limit, Share.of(sizes, shards, rank, world))[
            split
        ]

    @classmethod
    def load_share(
        cls,
        uri: str,
        units: Mapping[str, str],
        max_history: int,
        share: Share,
        buffers: int = 1,
    ) -> dict[str, Self]:
        """The examples of several splits, each with its unit, of this worker's share of the table, read once; those of
        training cut into so many buffers."""
        for split in units:
            if split not in cls.splits:
                *some, last = cls.splits
                raise UserError(
                    f"models of {cls.kind} have no split '{split}'; choose {', '.join(some)} or {last}"
                )
        manifest, columns = cls._open(uri)
        made = {
            split: cls(split, unit, max_history, share) for split, unit in units.items()
        }
        if not manifest.rows:
            raise UserError(f"{uri} has no users; check the filters of jobs.prepare")
        if buffers > 1:
            made["train"]._cut(uri, buffers)
        for index, number, first_user, table in share.tables(uri, manifest, columns):
            part, shard = cls._read(table, manifest, uri), share.held[index]
            for examples in made.values():
                if examples.buffers == 1:
                    examples._rows_held[index] += examples._add(part, first_user, shard)
                else:
                    examples._look(part, number, first_user, shard)
            del table, part
        for examples in made.values():
            if examples.buffers == 1:
                examples._close()
                examples._count()
        pa.default_memory_pool().release_unused()  # what decoding took, which Arrow keeps else: as much as is held
        return made

    def _cut(self, uri: str, buffers: int) -> None:
        """Makes it that of several buffers."""
        self.uri, self.buffers = uri, buffers
        self.rows_per_buffer, self.examples_per_buffer = np.zeros(
            (2, self.share.shards, buffers), np.int64
        )
        self._bytes = np.zeros(buffers, np.int64)
        self._brings: tuple[Any, ...] = ()

    def _look(
        self, content: dict[str, Any], number: int, first_user: int, shard: Shard
    ) -> None:
        """Counts the rows of a part."""
        part = self.of_part(
            self.split, self.unit, self.max_history, content, first_user, shard
        )
        parts = next(
            held.parts for held in self.share.held if held.number == shard.number
        )
        buffer = next(
            b for b in range(self.buffers) if number in cut(parts, b, self.buffers)
        )
        self.rows_per_buffer[shard.number, buffer] += len(part)
        self.examples_per_buffer[shard.number, buffer] += part.sizes(
            np.arange(len(part))
        ).sum()
        self.requests += part.requests
        self.learned += part.learned
        self.without_history += part.without_history
        self._bytes[buffer] += part.nbytes

    @classmethod
    def of_part(
        cls,
        split: str,
        unit: str,
        max_history: int,
        content: dict[str, Any],
        first_user: int,
        shard: Shard,
    ) -> Self:
        """The examples of one part that was read."""
        self = cls(split, unit, max_history, Share(1, (shard,), 0, 1))
        self._rows_held[0] = self._add(content, first_user, shard)
        self._close()
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are held, of the largest buffer."""
        return (
            held_bytes(vars(self).values())
            if self.buffers == 1
            else int(self._bytes.max())
        )

    @classmethod
    def in_memory(cls, split: str, unit: str, max_history: int, rows: int) -> Self:
        """Examples of no table, still empty: one shard of so many rows, which this worker alone holds."""
        self = cls(
            split, unit, max_history, Share(1, (Shard(0, range(0), 0, 1),), 0, 1)
        )
        self._rows_held[:] = self.rows_per_buffer[:] = self.examples_per_buffer[:] = (
            rows
        )
        return self

    def bring(self, catalogue: Any, history: bool, complete: bool = True) -> None:
        """Lets batches bring along what the model does not hold: those of a buffer when it is read."""
        if self.buffers > 1:
            self._brings = catalogue, history, complete
        else:
            self._bring(catalogue, history, complete)

    def notes(self) -> list[str]:
        """What is worth a line before training."""
        if self.buffers == 1:
            return []
        largest = f"{self.nbytes / 2**20:,.0f} MiB"
        return [
            f"streaming: {self.buffers} buffers, of which two are held, the largest {largest} (fit.memory_budget_gb)"
        ]

    def agree(self, largest: Callable[[list[float]], list[float]]) -> None:
        """Learns how many rows the other workers' shards have; `largest` gives the largest of all workers' values."""
        mine = np.stack([self.rows_per_buffer, self.examples_per_buffer])
        found = np.array(largest([float(count) for count in mine.flat])).astype(
            np.int64
        )
        self.rows_per_buffer, self.examples_per_buffer = found.reshape(mine.shape)

    def _count(self) -> None:
        for shard, rows in self._shard_rows():
            self.rows_per_buffer[shard.number] = len(rows)
            self.examples_per_buffer[shard.number] = self.sizes(rows).sum()

    def learned_per_row(self) -> float:
        """Return the mean of `learned` over the rows of this worker's shards; before `limit_to`."""
        held = [shard.number for shard in self.share.held]
        return self.learned / max(1, int(self.rows_per_buffer[held].sum()))

    def __len__(self) -> int:
        """Rows on this worker."""
        return int(self._rows_held.sum())

    def _shard_rows(self) -> Iterator[tuple[Shard, NDArray[np.int64]]]:
        if self._kept is not None:
            yield from zip(self.share.held, self._kept, strict=True)
            return
        first = 0
        for shard, rows in zip(self.share.held, self._rows_held.tolist(), strict=True):
            yield shard, np.arange(first, first + rows)
            first += rows

    def limit_to(self, limit: int) -> None:
        """Leaves `limit` rows over all workers, drawn at random, of each shard its part: the same ones whatever the
        number of workers. After `agree`."""
        if self.buffers > 1:
            raise UserError(
                f"fit.train_examples is {limit}, and training examples are streamed in {self.buffers} buffers; raise "
                f"fit.memory_budget_gb, or leave fit.train_examples out"
            )
        upto = np.append(0, np.cumsum(self.rows_per_buffer))
        if not 0 < limit < upto[-1]:
            return
        counts = np.diff(limit * upto // upto[-1])
        self._kept = [
            np.sort(
                np.random.default_rng(shard.number).permutation(rows)[
                    : counts[shard.number]
                ]
            )
            for shard, rows in self._shard_rows()
        ]
        # what they hold is known of a worker's own shards alone: of all their mean, which is the same on every worker
        counts = counts[:, None]
        self.examples_per_buffer = (
            self.examples_per_buffer * counts // np.maximum(self.rows_per_buffer, 1)
        )
        self._rows_held, self.rows_per_buffer = (
            np.array([len(rows) for rows in self._kept], np.int64),
            counts,
        )

    def steps(self, batch_size: int) -> int:
        """S: batches per shuffled epoch of `batch_size` over all workers; the same on every worker, in every epoch."""
        return int(self._steps(batch_size).sum())

    def _steps(self, batch_size: int) -> NDArray[np.int64]:
        pairs = zip(self.rows_per_buffer.T, self.examples_per_buffer.T, strict=True)
        return np.array(
            [steps_of(rows, examples, batch_size) for rows, examples in pairs]
        )  # (P,)

    def batches(
        self, batch_size: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = False
    ) -> Iterator[NDArray[np.int64]]:
        """Row numbers, batch by batch, rows of like length together; the same for the same arguments.

        Shuffled: this worker's rows of each of the `steps(batch_size)` global batches, which may be none. In order: its
        rows of the split, once each, in batches of `batch_size` of its own.
        """
        if shuffle:
            return self._shuffled(batch_size, seed, epoch)
        return self.bounded(self.chosen(), batch_size)

    def _shuffled(
        self, batch_size: int, seed: int, epoch: int
    ) -> Iterator[NDArray[np.int64]]:
        self._check_rows()
        steps, mine = self.steps(batch_size), []
        for shard, rows in self._shard_rows():
            rng = np.random.default_rng([seed, epoch, shard.number])
            order, edges = self._arrange(rows, shard.number, batch_size, steps, rng)
            mine.append((order, edges, shard))
        if (
            self.share.shards > 1
        ):  # one order of the steps for all shards, so that rows of like length meet
            rng = np.random.default_rng([seed, epoch, self.share.shards])
        for step in rng.permutation(steps):
            parts = [
                np.arange(edges[step], edges[step + 1])[shard.place :: shard.holders]
                for _, edges, shard in mine
            ]
            rows = np.concatenate(
                [
                    order[places]
                    for (order, _, _), places in zip(mine, parts, strict=True)
                ]
            )
            yield self.drawn(rows, np.concatenate(parts), rng)

    def _check_rows(self) -> None:
        own = self.rows_per_buffer[[shard.number for shard in self.share.held]]
        for buffer in np.flatnonzero(own.sum(0) == 0):
            raise UserError(
                f"worker {self.share.rank} of {self.share.world} has no rows to train on in buffer {buffer} of "
                f"{self.buffers}; use fewer workers, more users or a larger fit.memory_budget_gb"
            )

    def epoch(
        self,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        skip: int = 0,
        few_shapes: bool = False,
    ) -> Iterator[dict[str, Tensor]]:
        """This worker's part of the shuffled batches from number `skip` on, as tensors, or in `few_shapes`: a buffer
        after the other."""
        self._check_rows()
        order = np.random.default_rng(
            [seed, epoch, self.share.shards, self.buffers]
        ).permutation(self.buffers)
        ends = np.cumsum(self._steps(batch_size)[order])
        first = int(np.searchsorted(ends, skip, side="right"))
        skip -= int(ends[first - 1]) if first else 0
        numbers = order[first:].tolist()
        with ThreadPoolExecutor(1, "buffer") as reader:
            coming: Iterator[Future[Sharded]] = (
                reader.submit(self._buffer, number) for number in numbers
            )
            following = next(coming, None)
            for number in numbers:
                assert following is not None
                examples = following.result()
                following = next(coming, None)
                # by its number in all epochs is drawn how a buffer's rows are ordered in this one
                yield from examples._epoch(
                    batch_size, seed, epoch * self.buffers + number, skip, few_shapes
                )
                skip = 0

    def _buffer(self, number: int) -> Sharded:
        """The examples of a buffer, held; these where there is but one."""
        if self.buffers == 1:
            return self
        share = self.share.buffer(number, self.buffers)
        examples = self.load_share(
            self.uri, {self.split: self.unit}, self.max_history, share
        )[self.split]
        examples.rows_per_buffer = self.rows_per_buffer[:, [number]]
        examples.examples_per_buffer = self.examples_per_buffer[:, [number]]
        if self._brings:
            examples.bring(*self._brings)
        return examples

    def _epoch(
        self, batch_size: int, seed: int, epoch: int, skip: int, few_shapes: bool
    ) -> Iterator[dict[str, Tensor]]:
        for step, rows in enumerate(
            self.batches(batch_size, seed=seed, epoch=epoch, shuffle=True)
        ):
            if step < skip:
                continue
            if len(rows):
                batch = self.collate(rows)
                real = torch.tensor(len(next(iter(batch.values()))))
                yield {**self.filled(batch), ROWS: real} if few_shapes else batch
            else:  # this batch is of other workers' shards: some row, as DDP wants a gradient of everyone
                any_row = np.zeros(1, np.int64)
                yield {
                    **self.collate(
                        self.drawn(any_row, any_row, np.random.default_rng(0))
                    ),
                    IDLE: torch.ones(1),
                }

    def chosen(self, limit: int = 0) -> NDArray[np.int64]:
        """This worker's rows of an evaluation, in order: all, or of about `limit` examples over all workers, spread
        over the lengths.

        The limit's rows are the same whatever the number of workers: each shard gives its part of them.
        """
        upto = np.append(0, np.cumsum(self.examples_per_buffer))
        total = int(upto[-1])
        found = []
        for shard, rows in self._shard_rows():
            if 0 < limit < total:
                first, last = (
                    int(limit * n) // total
                    for n in upto[shard.number : shard.number + 2]
                )
                number = -(
                    -(last - first)
                    * len(rows)
                    // max(1, int(self.examples_per_buffer[shard.number, 0]))
                )
                rows = self.ordered(rows)[
                    np.linspace(0, max(0, len(rows) - 1), number).astype(np.int64)
                ]
            found.append(rows[shard.counts(self.user_rows(rows))])
        return self.ordered(np.concatenate(found))

    def of_users(self, rows: NDArray[np.int64], stride: int) -> NDArray[np.int64]:
        """Return those of `rows` that belong to every `stride`-th user of the table, the same users for all models."""
        return rows[self.user_rows(rows) % stride == 0] if stride > 1 else rows

    def users(self, stride: int = 1) -> int:
        """Return the number of users, of every `stride`-th user of the table, who have a row here and are of no other
        worker's evaluation."""
        users = (
            (shard, np.unique(self.user_rows(self.of_users(rows, stride))))
            for shard, rows in self._shard_rows()
        )
        return sum(int(shard.counts(rows).sum()) for shard, rows in users)
