"""Examples of one split of a `sequences` table, and the batches of one worker.

    dataset = Dataset.load(RETRIEVAL, sequences, Selection("train", "request", 20))
    for batch in dataset.epoch(256, seed=1, epoch=0):
        ...

An example is a window of one user's behaviours and the requests that the window serves.
A kind plans its examples over the table's columns (`models/dataset/columns.py`) and
collates them to tensors. Every worker memory-maps the whole table. The order of an
epoch is the same for any number of workers, and worker `r` of `w` takes every `w`-th
example of a global batch, from number `r` on.

Shapes: `n` examples of the split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from core.errors import UserError
from core.tables import Table
from models.dataset.batch import Batch
from models.dataset.columns import Columns, open_columns
from models.dataset.kind import Examples, Kind, Selection
from models.dataset.order import count_steps, order_epoch


class Dataset:
    """The examples of one split, and the share of them that one worker reads.

    Args:
        kind: Kind of the requests.
        columns: The decoded table, or served requests in the same form.
        selection: Examples to plan.
        rank: Rank of this worker.
        world: Number of workers.
    """

    def __init__(
        self,
        kind: Kind,
        columns: Columns,
        selection: Selection,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if selection.split not in kind.splits:
            raise UserError(f"models of {kind.name} have no split '{selection.split}'")
        assert 0 <= rank < world
        self.kind, self.selection = kind, selection
        self.rank, self.world = rank, world
        self.examples = kind.plan(columns, selection)

    @classmethod
    def load(
        cls, kind: Kind, table: Table[Any], selection: Selection, **share: int
    ) -> Self:
        """Load the examples of a `sequences` table; `share` are `rank` and `world`."""
        if not table.rows:
            raise UserError(f"{table.uri} has no users")
        columns = open_columns(
            table,
            kind.name,
            kind.list_columns(table.info),
            lambda part: kind.decode(part, table.info),
            asdict(table.info),
        )
        return cls(kind, columns, selection, **share)

    def __len__(self) -> int:
        """Return the number of examples, over all workers."""
        return len(self.examples)

    @property
    def num_skipped(self) -> int:
        """Number of requests without an example among the users of this worker."""
        return int(self._is_assigned(self.examples.skipped_users).sum())

    def count_users(self) -> int:
        """Return the number of users with an example that this worker evaluates."""
        return int(self._is_assigned(np.unique(self.examples.user)).sum())

    def _is_assigned(self, users: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return the (u,) mask of users that this worker evaluates, given (u,) rows."""
        return users % self.world == self.rank

    def keep_random(self, limit: int) -> None:
        """Keep a random sample of at most `limit` examples; 0 keeps all."""
        if 0 < limit < len(self):
            sample = np.random.default_rng(0).permutation(len(self))[:limit]
            self.examples = self.examples.take(np.sort(sample))

    def num_steps(self, batch_size: int) -> int:
        """Return the number of global batches of an epoch.

        Args:
            batch_size: Weight of a global batch, such as its number of requests.
        """
        if self.examples.counts_examples:
            return math.ceil(len(self) / batch_size)
        return count_steps(self.examples.weights, batch_size)

    def epoch_examples(
        self, batch_size: int, *, seed: int = 0, epoch: int = 0, skip: int = 0
    ) -> Iterator[Examples]:
        """Yield this worker's examples of each global batch.

        Args:
            batch_size: Weight of a global batch, such as its number of requests.
            seed: Seed of the order.
            epoch: Number of the epoch, from 0.
            skip: Number of steps to skip, to resume a run.
        """
        batches = order_epoch(
            self.examples.lengths,
            self.examples.weights,
            batch_size,
            self.num_steps(batch_size),
            seed=seed,
            epoch=epoch,
            skip=skip,
        )
        for step, rows in enumerate(batches, skip):
            batch = self.examples.take(rows).draw([seed, epoch, step])
            yield batch.take(np.arange(self.rank, len(rows), self.world))

    def epoch(
        self,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        skip: int = 0,
        pad_to_buckets: bool = False,
    ) -> Iterator[Batch]:
        """Yield this worker's share of each global batch of an epoch.

        If a worker has no example of a batch, it yields a stand-in, because
        DistributedDataParallel needs a gradient from every worker. Arguments are those
        of `epoch_examples`.

        Args:
            pad_to_buckets: Whether to pad batches to few shapes, for CUDA graphs.
        """
        order = {"seed": seed, "epoch": epoch, "skip": skip}
        for examples in self.epoch_examples(batch_size, **order):
            if len(examples):
                batch = self.kind.collate(examples)
                if pad_to_buckets:
                    batch = batch.pad_to_buckets(self.selection.max_history)
                yield batch
            else:
                stand_in = self.examples.take(np.zeros(1, np.int64)).draw([0])
                yield replace(self.kind.collate(stand_in), is_stand_in=True)

    def collate(self, rows: NDArray[np.int64]) -> Any:
        """Return the batch of the examples with these (b,) indices."""
        return self.kind.collate(self.examples.take(rows))

    def evaluation_rows(self, limit: int = 0) -> NDArray[np.int64]:
        """Return the (b,) indices of the examples that this worker evaluates, in order.

        All examples of a user are evaluated by the same worker.

        Args:
            limit: Approximate number of requests to evaluate over all workers, spread
                evenly over the lengths of histories; 0 for all.
        """
        rows = self.examples.sort_order()
        total = int(self.examples.weights.sum())
        if 0 < limit < total:
            count = math.ceil(limit * len(rows) / total)
            rows = rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
        return rows[self._is_assigned(self.examples.user[rows])]

    def cut_batches(
        self, rows: NDArray[np.int64], batch_size: int
    ) -> Iterator[NDArray[np.int64]]:
        """Split (b,) indices of examples into batches of limited weight."""
        for batch in self.examples.take(rows).cut(batch_size):
            yield rows[batch]

    def evaluation_batches(
        self, batch_size: int, limit: int = 0
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the (b,) indices of each evaluation batch of this worker.

        Args:
            batch_size: Maximum weight of a batch, such as its number of requests.
            limit: As in `evaluation_rows`.
        """
        return self.cut_batches(self.evaluation_rows(limit), batch_size)
