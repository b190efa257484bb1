"""Training examples of a share that is larger than a worker's memory: a buffer after the other.

    shards, buffers = plan(Examples, uri, unit, max_history, budget=8 * 2**30, world=4)
    stream, val = ...                              # models/setup.py
    for batch in stream.epoch(256, seed=1, epoch=0): ...

The parts of every shard are cut into P runs, and buffer b holds run b of each of them. An epoch goes through the
buffers in an order that is drawn for it; the batches of a buffer are drawn from all its rows, as those of a table that
is held whole are (`models/shares.py`), so they do not depend on the number of workers either. While a worker trains on
one buffer a thread reads the next: two are held at a time. The price: rows of two buffers never meet in a batch.

The cursor is the number of the step in its epoch: how many rows a buffer has is counted once, in the pass that
collects the validation rows, so a run that is continued opens the buffer where it stands and reads none before it.

Shapes: `V` shards, `P` buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from models.shares import Read, Shard, Sharded, Share, steps_of
from models.tables import UserError, part_uris, read_parquet

MOST_UNPACKED = 64
"""Bytes in memory for each on disk, above any table seen: shares that fit with it are not looked at."""


Plan = tuple[int, ...]
"""(V, P) of a share that is streamed; () of one that is held whole."""


def plan(
    family: type[Sharded], uri: str, unit: str, max_history: int, *, budget: float, world: int
) -> Plan:  # fmt: skip
    """How one of `world` workers reads its share: whole where that fits the `budget` in bytes (0: any does), else in
    buffers of which two do. By the bytes that the rows of the table's first part take, and as many parts for each
    worker and buffer as fit. UserError where one does not."""
    manifest, columns = family._open(uri)
    disk = sum(part.bytes for part in manifest.files)
    if not budget or disk * MOST_UNPACKED <= budget * world:
        return ()
    first = manifest.files[0]
    content = family._read(read_parquet(part_uris(uri, manifest)[0], columns, first.sha256), manifest, uri)
    part = family.of_part("train", unit, max_history, Read(content, 0, 0, Shard(0, range(1), 0, 1)))
    share = part.nbytes / first.bytes * disk / world
    if share <= budget:
        return ()
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


class Stream:
    """The training examples of one worker, of which it holds two buffers at a time; as `Sharded`, for `Batches`."""

    def __init__(
        self, family: type[Sharded], uri: str, unit: str, max_history: int, share: Share, buffers: int
    ) -> None:  # fmt: skip
        self.family, self.uri, self.unit, self.max_history = family, uri, unit, max_history
        self.share, self.buffers, self.plan = share, buffers, (share.shards, buffers)
        self.requests = 0
        """Training requests on this worker."""
        self.nbytes = 0
        """Bytes of its largest buffer."""
        self.rows, self.examples = np.zeros((2, share.shards, buffers), np.int64)
        """(V, P) rows of each buffer of each shard, and what batches count of them; of those that other workers hold 0
        until `agree`."""
        self._bytes = np.zeros(buffers, np.int64)
        self._dress: tuple[Any, ...] = ()

    def look(self, read: Read) -> None:
        """Counts the training rows of a part; each part of the share is to come here once."""
        part = self.family.of_part("train", self.unit, self.max_history, read)
        parts = next(shard.parts for shard in self.share.held if shard.number == read.shard.number)
        edges = [parts.start + len(parts) * number // self.buffers for number in range(1, self.buffers)]
        buffer = int(np.searchsorted(edges, read.number, side="right"))
        place = read.shard.number, buffer
        self.rows[place] += len(part)
        self.examples[place] += part.sizes(np.arange(len(part))).sum()
        self.requests += part.requests
        self._bytes[buffer] += part.nbytes
        self.nbytes = int(self._bytes.max())

    def agree(self, largest: Callable[[list[float]], list[float]]) -> None:
        """Learns how many rows the other workers' shards have; `largest` gives the largest of all workers' values."""
        mine = np.stack([self.rows, self.examples])
        found = np.array(largest([float(count) for count in mine.flat])).astype(np.int64)
        self.rows, self.examples = found.reshape(mine.shape)

    @property
    def rows_per_shard(self) -> NDArray[np.int64]:
        """(V,) rows of each shard."""
        return self.rows.sum(1)

    def bring(self, *what: Any) -> None:
        """What `bring` of each buffer's examples is called with when it is read."""
        self._dress = what

    def steps(self, batch_size: int) -> int:
        """Batches of an epoch; the same on every worker and in every epoch."""
        return int(self._steps(batch_size).sum())

    def _steps(self, batch_size: int) -> NDArray[np.int64]:
        pairs = zip(self.rows.T, self.examples.T, strict=True)
        return np.array([steps_of(rows, examples, batch_size) for rows, examples in pairs])  # (P,)

    def notes(self, batch_size: int, seed: int) -> list[str]:
        """What is worth a line before training."""
        return [
            f"streaming: {self.buffers} buffers, of which two are held, the largest {self.nbytes / 2**20:,.0f} MiB "
            f"(fit.memory_budget_gb)"
        ]

    def epoch(
        self, batch_size: int, *, seed: int, epoch: int, skip: int = 0, few_shapes: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """This worker's part of the epoch's batches from number `skip` on."""
        self._check_rows()
        order = np.random.default_rng([seed, epoch, self.share.shards, self.buffers]).permutation(self.buffers)
        steps = self._steps(batch_size)[order]
        first = int(np.searchsorted(np.cumsum(steps), skip, side="right"))
        skip -= int(steps[:first].sum())
        with ThreadPoolExecutor(1, "buffer") as reader:
            following: Future[Sharded] | None = None
            for place in range(first, self.buffers):
                examples = following.result() if following else self._load(int(order[place]))
                following = reader.submit(self._load, int(order[place + 1])) if place + 1 < self.buffers else None
                number = epoch * self.buffers + int(order[place])  # what a buffer's order of this epoch is drawn by
                yield from examples.epoch(batch_size, seed=seed, epoch=number, skip=skip, few_shapes=few_shapes)
                skip = 0

    def _load(self, number: int) -> Sharded:
        share = self.share.buffer(number, self.buffers)
        examples = self.family.load_share(self.uri, {"train": self.unit}, self.max_history, share)["train"]
        examples.rows_per_shard, examples.examples_per_shard = self.rows[:, number], self.examples[:, number]
        if self._dress:
            examples.bring(*self._dress)
        return examples

    def _check_rows(self) -> None:
        for number in range(self.buffers):
            for rank in range(self.share.world):
                shards = [shard for shard in range(self.share.shards) if self._holds(rank, shard)]
                if not self.rows[shards, number].any():
                    raise UserError(
                        f"worker {rank} of {self.share.world} has no training rows in buffer {number} of "
                        f"{self.buffers}; use fewer workers or a larger fit.memory_budget_gb"
                    )

    def _holds(self, rank: int, shard: int) -> bool:
        world, shards = self.share.world, self.share.shards
        return shard % world == rank % world if shards >= world else shard == rank % shards
