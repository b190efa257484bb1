"""Which parts of a table a worker reads, so that the order of training examples is the same for any number of workers.

The parts of a table are grouped into *shards* by the manifest alone, and whole shards are dealt out to the workers, so
a part is read by one worker, once for all splits. Every global batch takes its quota of rows from every shard, by a
permutation within the shard that is seeded by (seed, epoch, shard). So a worker arranges the rows of its own shards
and knows of the others no more than how many rows they have, and step s has the same examples whatever the number of
workers: a run goes on with another number of them, and ends with the same weights up to the order of sums.

Where there are fewer shards than workers, several hold a shard, whole, and take every so-manieth row of its part of
a batch. A file is the least that is read, as its hash, which tells damage, is of all of it; columns that are not asked
for are not decoded.

Shapes: `V` shards, `n` rows of a shard, `S` steps of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from models.tables import Manifest, part_uris, read_parquet

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
            held.append(
                Shard(
                    number,
                    parts,
                    rank // shards,
                    -(-(world - number) // shards) if world > shards else 1,
                )
            )
        return cls(shards, tuple(held), rank, world)

    def buffer(self, number: int, buffers: int) -> Self:
        """Of each shard the parts of buffer `number` of `buffers`: runs of about equally many parts."""
        held = [
            replace(shard, parts=cut(shard.parts, number, buffers))
            for shard in self.held
        ]
        return replace(self, held=tuple(held))

    def tables(
        self, uri: str, manifest: Manifest, columns: list[str]
    ) -> Iterator[tuple[int, int, int, pa.Table]]:
        """(which of `held`, number of the part, row of the table that is its first, its rows), part by part."""
        first = np.cumsum([0, *(part.rows for part in manifest.files)])
        places = part_uris(uri, manifest)
        for index, shard in enumerate(self.held):
            for part in shard.parts:
                yield (
                    index,
                    part,
                    int(first[part]),
                    read_parquet(places[part], columns, manifest.files[part].sha256),
                )


def cut(parts: range, number: int, pieces: int) -> range:
    """Piece `number` of `pieces` runs of about equal lengths."""
    edges = [
        parts.start + len(parts) * place // pieces for place in (number, number + 1)
    ]
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
    edges = np.concatenate(
        [[0], np.searchsorted(total, total[-1] * number[1:] / parts - 0.5) + 1]
    )
    edges = np.maximum.accumulate(edges - number) + number
    return np.minimum(edges, len(lengths) - parts + number)


def quotas(
    rows: int, total: int, batch_size: int, steps: int, shard: int, shards: int
) -> NDArray[np.int64]:
    """(S + 1,) edges of what a shard of `rows` of the `total` rows gives to each step: all of it over the epoch.

    Shards round at different steps, so that the batches have `batch_size` rows where shards are equal. One shard
    gives `batch_size` rows to each step but the last.
    """
    edges = (np.arange(steps + 1) * batch_size * rows + shard * total // shards) // max(
        1, total
    )
    edges = np.minimum(edges, rows)
    edges[0], edges[-1] = 0, rows
    return edges


def parts_by_turns(
    sizes: NDArray, steps: int, shard: int, shards: int
) -> NDArray[np.int64]:
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


def steps_of(
    rows: NDArray[np.int64], examples: NDArray[np.int64], batch_size: int
) -> int:
    """Batches of about `batch_size` of these examples, in so many rows: no more than rows."""
    return min(-(-int(examples.sum()) // batch_size), int(rows.sum()))


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
    return {
        name: np.concatenate([part.pop(name) for part in parts])
        for name in list(parts[0])
    }


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


def spans(
    owner: NDArray, begin: NDArray, end: NDArray
) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """Of rows that come owner by owner and read `begin` to `end` of what theirs has: (owners, the place of each row's
    among them, of each owner the first that any row reads, and how many there are up to the last)."""
    owners, place = np.unique(owner, return_inverse=True)
    first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1])[: len(owner)])
    low = np.minimum.reduceat(begin, first) if len(first) else begin
    return (
        owners,
        place,
        low,
        (np.maximum.reduceat(end, first) if len(first) else end) - low,
    )


def find_in(
    there: NDArray, wanted: NDArray
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(a place in the ascending `there`, whether it is there) of each of the `wanted`."""
    place = np.minimum(np.searchsorted(there, wanted), max(0, len(there) - 1))
    return place, there[place] == wanted if len(there) else np.zeros(len(wanted), bool)
