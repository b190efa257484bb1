"""Which parts of a table a worker reads, and an order of training examples that no number of workers changes.

The parts of a table are grouped into *shards* by the manifest alone, and whole shards are dealt out to the workers, so
a part is read by one worker, once for all splits. Every global batch takes its quota of rows from every shard, by a
permutation within the shard that is seeded by (seed, epoch, shard). So a worker arranges the rows of its own shards
and knows of the others no more than how many rows they have, and step s has the same examples whatever the number of
workers: a run goes on with another number of them, and ends with the same weights up to the order of sums.

The other way, every worker holding the index of all examples and loading its rows of each batch, needs 8 bytes for
every row of the table on every worker, which at four workers is as much as the rows' own data, and reads parts in
random order. It would keep the order of one worker on tables of any size. Here that holds for one shard alone, that is
for all tables below two times `shard_mb` (`FitConfig`): their rows are in one order.

Where there are fewer shards than workers, several hold a shard, whole, and take every so-manieth row of its part of
a batch. A file is the least that is read, as its hash, which tells damage, is of all of it; columns that are not asked
for are not decoded.

Shapes: `V` shards, `n` rows of a shard, `S` steps of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.tables import Manifest, UserError, part_uris, read_parquet
from models.whole_batch import IDLE

MOST_SHARDS = 256
"""Shards of a table at most: more workers than that share them."""

LEAST_QUOTA = 4
"""Rows of a batch that a shard gives at least, on average: fewer, and batches are of uneven sizes."""


@dataclass(frozen=True)
class Shard:
    """A run of a table's parts that this worker holds."""

    number: int
    """Its number, from 0."""
    parts: range
    """Numbers of its parts in the manifest."""
    place: int
    """This worker's place among those that hold it, from 0."""
    holders: int
    """Workers that hold it."""

    def counts(self, user_rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which users, by their rows of the table, are this worker's in an evaluation."""
        return user_rows % self.holders == self.place


@dataclass(frozen=True)
class Share:
    """What one worker of `world` holds of a table."""

    shards: int
    """V: shards of the table."""
    held: tuple[Shard, ...]
    """Those that this worker holds."""
    rank: int
    """The worker's number, from 0."""
    world: int
    """Number of workers."""

    @classmethod
    def of(cls, sizes: NDArray[np.int64], shards: int, rank: int, world: int) -> Self:
        """Of parts with these bytes: `shards` runs of about equal size (or one per part), dealt out to the workers.

        Worker r holds shards r, r + world, ... and not a run of them: quotas are rounded up by turns in the order of
        shards (`quotas`), so that workers with equally many shards have equally many rows of every batch.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not below the number of workers {world}")
        shards = max(1, min(shards, len(sizes)))
        edges = equal_parts(sizes, shards) if len(sizes) else np.zeros(2, np.int64)
        held = []
        for number in range(rank % shards, shards, world):
            parts = range(int(edges[number]), int(edges[number + 1]))
            held.append(Shard(number, parts, rank // shards, -(-(world - number) // shards) if world > shards else 1))
        return cls(shards, tuple(held), rank, world)

    def buffer(self, number: int, buffers: int) -> Self:
        """Of each shard the parts of buffer `number` of `buffers`: runs of about equally many parts."""
        held = [replace(shard, parts=cut(shard.parts, number, buffers)) for shard in self.held]
        return replace(self, held=tuple(held))

    def tables(self, uri: str, manifest: Manifest, columns: list[str]) -> Iterator[tuple[int, int, int, pa.Table]]:
        """(which of `held`, number of the part, row of the table that is its first, its rows), part by part."""
        first = np.cumsum([0, *(part.rows for part in manifest.files)])
        places = part_uris(uri, manifest)
        for index, shard in enumerate(self.held):
            for part in shard.parts:
                yield index, part, int(first[part]), read_parquet(places[part], columns, manifest.files[part].sha256)


def cut(parts: range, number: int, pieces: int) -> range:
    """Piece `number` of `pieces` runs of about equal lengths."""
    edges = [parts.start + len(parts) * place // pieces for place in (number, number + 1)]
    return range(*edges)


def shards_of(manifest: Manifest, shard_mb: float, batch_size: int) -> int:
    """V of a training: by the size of the table, its parts and the batch, and not by the number of workers."""
    size = sum(part.bytes for part in manifest.files)
    most = min(len(manifest.files), MOST_SHARDS, batch_size // LEAST_QUOTA)
    return max(1, min(most, int(size / (shard_mb * 2**20))))


def equal_parts(lengths: NDArray, parts: int) -> NDArray[np.int64]:
    """(parts + 1,) edges of runs of rows with about equal sums of `lengths`; none is empty if enough rows."""
    number = np.arange(parts + 1)
    if len(lengths) < parts:
        return len(lengths) * number // parts
    total = np.cumsum(lengths)
    edges = np.concatenate([[0], np.searchsorted(total, total[-1] * number[1:] / parts - 0.5) + 1])
    edges = np.maximum.accumulate(edges - number) + number
    return np.minimum(edges, len(lengths) - parts + number)


def quotas(rows: int, total: int, batch_size: int, steps: int, shard: int, shards: int) -> NDArray[np.int64]:
    """(S + 1,) edges of what a shard of `rows` of the `total` rows gives to each step: all of it over the epoch.

    Shards round at different steps, so that the batches have `batch_size` rows where shards are equal. One shard
    gives `batch_size` rows to each step but the last.
    """
    edges = (np.arange(steps + 1) * batch_size * rows + shard * total // shards) // max(1, total)
    edges = np.minimum(edges, rows)
    edges[0], edges[-1] = 0, rows
    return edges


def parts_by_turns(sizes: NDArray, steps: int, shard: int, shards: int) -> NDArray[np.int64]:
    """(S + 1,) edges of what a shard with rows of these sizes gives to each step: about as much to each.

    A row is of the step in which a point of it falls: of other shards another one, so that they round at different
    steps. No step is left without a row if there are enough.
    """
    point = np.cumsum(sizes) - sizes * (shard + 0.5) / shards
    number = np.arange(steps + 1)
    edges = np.searchsorted(point, sizes.sum() * number / max(1, steps))
    if len(sizes) < steps:
        return edges
    edges = np.maximum.accumulate(edges - number) + number
    return np.minimum(edges, len(sizes) - steps + number)


def steps_of(rows: NDArray[np.int64], examples: NDArray[np.int64], batch_size: int) -> int:
    """Batches of about `batch_size` of these examples, in so many rows: no more than rows."""
    return min(-(-int(examples.sum()) // batch_size), int(rows.sum()))


@dataclass(frozen=True)
class Read:
    """A part that was read."""

    content: dict[str, Any]
    """Flat arrays, for all splits, as the family's `_read` gives them."""
    number: int
    """Its number in the manifest."""
    first_user: int
    """Row of the table that is its first."""
    shard: Shard
    """The shard that it is of."""


Look = Callable[[Read], None]


class Sharded:
    """The examples of one split on one worker, in rows that batches are made of; a family's `data.py` fills it.

    Rows come shard by shard. A worker holds all rows of its shards. Of a shard that several hold it takes every
    so-manieth row of what the shard gives to a batch, and in an evaluation every so-manieth user.
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
    plan: ClassVar[tuple[int, ...]] = ()
    """All rows are held at once; others are streamed (`models/streaming.py`)."""
    counted: ClassVar[str] = "requests"
    """What `requests` counts, in words."""
    skipped = 0
    """Requests of the split, of this worker's evaluation, that are left out."""
    rows_per_shard: NDArray[np.int64]
    """(V,) rows of each shard; of those that other workers hold 0 until `agree`."""
    examples_per_shard: NDArray[np.int64]
    """(V,) what batches count of them (`sizes`); likewise."""

    def __init__(self, split: str, unit: str, max_history: int, share: Share) -> None:
        if max_history < 1:
            raise ValueError(f"max_history {max_history} is below 1; a history needs at least one behaviour")
        self.split, self.unit, self.max_history, self.share = split, unit, max_history, share
        self._rows_held = np.zeros(len(share.held), np.int64)
        self.rows_per_shard, self.examples_per_shard = np.zeros((2, share.shards), np.int64)
        self._kept: list[NDArray[np.int64]] | None = None  # of each shard held, the rows that `limit_to` left

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
        self, rows: NDArray[np.int64], shard: int, batch_size: int, steps: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(the rows in an order of this epoch, (S + 1,) edges of what each step takes of them)."""
        raise NotImplementedError

    def ordered(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows in the order of an evaluation: those of like length together."""
        raise NotImplementedError

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """What batches count of each row: one, unless a family says otherwise."""
        return np.ones(len(rows), np.int64)

    def bounded(self, order: NDArray[np.int64], batch_size: int) -> Iterator[NDArray[np.int64]]:
        """The rows of `order` in batches of at most `batch_size`, unless of one row."""
        upto, first = np.append(0, np.cumsum(self.sizes(order))), 0
        while first < len(order):
            last = int(np.searchsorted(upto, upto[first] + batch_size, side="right")) - 1
            yield order[first : (first := max(last, first + 1))]

    def drawn(self, rows: NDArray[np.int64], places: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """The rows of a training batch with what is drawn anew for it. `places` are their places in the epoch, which
        are the same however many workers share the batch."""
        return rows

    def user_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows, in the sequences table, of the rows' users."""
        raise NotImplementedError

    def collate(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows as tensors."""
        raise NotImplementedError

    def filled(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch of a training step in one of few shapes, by padding from which nothing is learned."""
        return batch

    def bring(self, catalogue: Any, history: bool) -> None:
        """Lets batches bring along what the model does not hold; only where `Family.accompany` asks for it."""
        raise NotImplementedError

    def notes(self, batch_size: int, seed: int) -> list[str]:
        """What is worth a line before training: nothing."""
        return []

    # What all have.

    @classmethod
    def load(
        cls, uri: str, split: str, *, unit: str | None = None, max_history: int | None = None, rank: int = 0,
        world: int = 1, shards: int = 1,
    ) -> Self:  # fmt: skip
        """The examples of one split: see `load_splits`. `unit` and `max_history` are by default the family's."""
        unit = cls.unit if unit is None else unit
        limit = cls.max_history if max_history is None else max_history
        return cls.load_splits(uri, {split: unit}, max_history=limit, rank=rank, world=world, shards=shards)[split]

    @classmethod
    def load_splits(
        cls, uri: str, units: Mapping[str, str], *, max_history: int, rank: int = 0, world: int = 1, shards: int = 1
    ) -> dict[str, Self]:
        """The examples of several splits, each with its unit, of the shards that this worker holds, read once."""
        manifest, _ = cls._open(uri)
        share = Share.of(np.array([part.bytes for part in manifest.files]), shards, rank, world)
        return cls.load_share(uri, units, max_history, share)

    @classmethod
    def load_share(
        cls, uri: str, units: Mapping[str, str], max_history: int, share: Share, look: Look | None = None
    ) -> dict[str, Self]:
        """The same of a given share of the table; `look` is shown each part on the way."""
        for split in units:
            if split not in cls.splits:
                *some, last = cls.splits
                raise UserError(f"models of {cls.kind} have no split '{split}'; choose {', '.join(some)} or {last}")
        manifest, columns = cls._open(uri)
        made = {split: cls(split, unit, max_history, share) for split, unit in units.items()}
        if not manifest.rows:
            raise UserError(f"{uri} has no users; check the filters of jobs.prepare")
        for index, number, first_user, table in share.tables(uri, manifest, columns):
            part, shard = cls._read(table, manifest, uri), share.held[index]
            for examples in made.values():
                examples._rows_held[index] += examples._add(part, first_user, shard)
            if look:
                look(Read(part, number, first_user, shard))
            del table, part
        for examples in made.values():
            examples._close()
            examples._count()
        pa.default_memory_pool().release_unused()  # what decoding took, which Arrow keeps else: as much as is held
        return made

    @classmethod
    def of_part(cls, split: str, unit: str, max_history: int, read: Read) -> Self:
        """The examples of one part that was read."""
        self = cls(split, unit, max_history, Share(1, (read.shard,), 0, 1))
        self._rows_held[0] = self._add(read.content, read.first_user, read.shard)
        self._close()
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are held."""
        return held_bytes(vars(self).values())

    @classmethod
    def in_memory(cls, split: str, unit: str, max_history: int, rows: int) -> Self:
        """Examples of no table, still empty: one shard of so many rows, which this worker alone holds."""
        self = cls(split, unit, max_history, Share(1, (Shard(0, range(0), 0, 1),), 0, 1))
        self._rows_held[:] = self.rows_per_shard[:] = self.examples_per_shard[:] = rows
        return self

    def agree(self, largest: Callable[[list[float]], list[float]]) -> None:
        """Learns how many rows the other workers' shards have; `largest` gives the largest of all workers' values."""
        mine = np.stack([self.rows_per_shard, self.examples_per_shard])
        found = np.array(largest([float(count) for count in mine.flat])).astype(np.int64)
        self.rows_per_shard, self.examples_per_shard = found.reshape(mine.shape)

    def _count(self) -> None:
        for shard, rows in self._shard_rows():
            self.rows_per_shard[shard.number] = len(rows)
            self.examples_per_shard[shard.number] = self.sizes(rows).sum()

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
        upto = np.append(0, np.cumsum(self.rows_per_shard))
        if not 0 < limit < upto[-1]:
            return
        counts = np.diff(limit * upto // upto[-1])
        self._kept = [
            np.sort(np.random.default_rng(shard.number).permutation(rows)[: counts[shard.number]])
            for shard, rows in self._shard_rows()
        ]
        # what they hold is known of a worker's own shards alone: of all their mean, which is the same on every worker
        self.examples_per_shard = self.examples_per_shard * counts // np.maximum(self.rows_per_shard, 1)
        self._rows_held, self.rows_per_shard = np.array([len(rows) for rows in self._kept], np.int64), counts

    def steps(self, batch_size: int) -> int:
        """S: batches per shuffled epoch of `batch_size` over all workers; the same on every worker."""
        return steps_of(self.rows_per_shard, self.examples_per_shard, batch_size)

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

    def _shuffled(self, batch_size: int, seed: int, epoch: int) -> Iterator[NDArray[np.int64]]:
        if not len(self):
            raise UserError(
                f"worker {self.share.rank} of {self.share.world} has no rows to train on; use fewer workers or more "
                f"users"
            )
        steps, mine = self.steps(batch_size), []
        for shard, rows in self._shard_rows():
            rng = np.random.default_rng([seed, epoch, shard.number])
            order, edges = self._arrange(rows, shard.number, batch_size, steps, rng)
            mine.append((order, edges, shard))
        if self.share.shards > 1:  # one order of the steps for all shards, so that rows of like length meet
            rng = np.random.default_rng([seed, epoch, self.share.shards])
        for step in rng.permutation(steps):
            parts = [np.arange(edges[step], edges[step + 1])[shard.place :: shard.holders] for _, edges, shard in mine]
            rows = np.concatenate([order[places] for (order, _, _), places in zip(mine, parts, strict=True)])
            yield self.drawn(rows, np.concatenate(parts), rng)

    def epoch(
        self, batch_size: int, *, seed: int, epoch: int, skip: int = 0, few_shapes: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """This worker's part of the shuffled batches from number `skip` on, as tensors, or in `few_shapes`."""
        for step, rows in enumerate(self.batches(batch_size, seed=seed, epoch=epoch, shuffle=True)):
            if step < skip:
                continue
            if len(rows):
                yield self.filled(self.collate(rows)) if few_shapes else self.collate(rows)
            else:  # this batch is of other workers' shards: some row, as DDP wants a gradient of everyone
                any_row = np.zeros(1, np.int64)
                yield {**self.collate(self.drawn(any_row, any_row, np.random.default_rng(0))), IDLE: torch.ones(1)}

    def chosen(self, limit: int = 0) -> NDArray[np.int64]:
        """This worker's rows of an evaluation, in order: all, or of about `limit` examples over all workers, spread
        over the lengths.

        The limit's rows are the same whatever the number of workers: each shard gives its part of them.
        """
        total = int(self.examples_per_shard.sum())
        upto = np.append(0, np.cumsum(self.examples_per_shard))
        found = []
        for shard, rows in self._shard_rows():
            if 0 < limit < total:
                first, last = (int(limit * n) // total for n in upto[shard.number : shard.number + 2])
                number = -(-(last - first) * len(rows) // max(1, int(self.examples_per_shard[shard.number])))
                rows = self.ordered(rows)[np.linspace(0, max(0, len(rows) - 1), number).astype(np.int64)]
            found.append(rows[shard.counts(self.user_rows(rows))])
        return self.ordered(np.concatenate(found))

    @property
    def requests(self) -> int:
        """Requests here; a row is one, unless a family says otherwise."""
        return len(self)

    @property
    def users(self) -> int:
        """Users who have a row here and are of no other worker's evaluation."""
        users = ((shard, np.unique(self.user_rows(rows))) for shard, rows in self._shard_rows())
        return sum(int(shard.counts(rows).sum()) for shard, rows in users)


def held_bytes(values: Iterable[Any]) -> int:
    """Bytes of the arrays among the values, and in mappings among them."""
    total = 0
    for value in values:
        if isinstance(value, np.ndarray):
            total += value.nbytes
        elif isinstance(value, Mapping):
            total += held_bytes(value.values())
    return total


def joined(parts: list[dict[str, NDArray]]) -> dict[str, NDArray]:
    """The arrays of all parts end to end, one name after the other, each let go of when it is copied."""
    return {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}


def compact(values: NDArray) -> NDArray:
    """The same numbers as uint8 or float16 where every one of them is one; else as they are."""
    for kind in (np.uint8, np.float16):
        with np.errstate(invalid="ignore", over="ignore"):
            small = values.astype(kind)
        if np.array_equal(small, values, equal_nan=kind is np.float16):
            return small
    return values


def starts(lengths: NDArray) -> NDArray[np.int64]:
    """Where each of consecutive runs of these lengths begins."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


def runs(begin: NDArray, lengths: NDArray) -> NDArray[np.int64]:
    """begin[0], begin[0] + 1, ... for lengths[0] numbers, then the same for the next."""
    return np.arange(int(lengths.sum())) + np.repeat(begin - starts(lengths), lengths)
