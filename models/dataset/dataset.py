"""Examples of one split of a `sequences` table, and the batches of one worker.

    dataset = RetrievalDataset.load(sequences, "train", "request", 20)
    for batch in dataset.epoch(256, seed=1, epoch=0):
        ...

An example is a window of one user's behaviours and the requests that the window serves.
The dataset of a kind plans its examples over the table's columns
(`models/dataset/columns.py`) and collates them to tensors. Every worker memory-maps the
whole table. The order of an epoch is the same for any number of workers, and worker `r`
of `w` takes every `w`-th example of a global batch, from number `r` on.

Shapes: `n` examples of the split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.errors import UserError
from core.ragged import lengths_to_offsets
from core.splits import SPLITS
from core.tables import Table
from models.dataset.batch import Batch
from models.dataset.columns import Columns, columns_bytes, open_columns
from models.dataset.order import count_steps, order_epoch


@dataclass(frozen=True)
class NewExamples:
    """Selection of the training examples of a model that continues another model."""

    since: int = 0
    """Time in ms; all examples from this time on are selected."""
    replay_fraction: float = 1.0
    """Fraction of the older examples to select at random."""
    seed: int = 0
    """Seed of the random selection."""

    def mask(self, time: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the (n,) mask of selected examples, given their (n,) times in ms."""
        rng = np.random.default_rng([self.seed, 0])
        is_replayed = rng.random(len(time)) < self.replay_fraction
        return (time >= self.since) | is_replayed


class RequestDataset:
    """The examples of one split, and the share of them that one worker reads."""

    kind: ClassVar[str]
    """Kind of the requests: `retrieval`, `search` or `actions`."""
    decode: ClassVar[Any]
    """Return the flat arrays of one part of `sequences`, by name. Arguments are the
    rows of the part, and the info of the table, a subclass of `SequencesInfo`."""
    splits: ClassVar[tuple[str, ...]] = SPLITS
    """Splits of the kind's tables."""
    request_unit: ClassVar[str] = "requests"
    """Name of the unit of `num_requests`, for messages."""
    learned_unit: ClassVar[str] = "requests"
    """Name of the unit of `num_learned`, for messages."""

    user: NDArray[np.integer]
    """(n,) table row of each example's user."""
    lengths: NDArray[np.integer]
    """(n,) sequence length of each example; batches have similar lengths."""
    weights: NDArray[np.integer]
    """(n,) weight of each example in a batch."""
    num_requests: int
    """Number of requests of the split, over all workers."""
    num_learned: int
    """Number of requests (for a feed, events) in the training examples, over all
    workers."""
    num_without_history: int = 0
    """Number of requests without a history among `num_requests`, if the model learns
    from such requests."""
    skipped_users: NDArray[np.integer]
    """(s,) table row of the user of each of the s requests without an example."""

    def __init__(
        self,
        columns: Columns,
        split: str,
        unit: str,
        max_history: int,
        options: Any = None,
        *,
        rank: int = 0,
        world: int = 1,
        new: NewExamples | None = None,
    ) -> None:
        """Plan the examples of a split over decoded columns.

        Args:
            columns: The decoded table, or served requests in the same form.
            split: `train`, `val`, `test`, or another entry of `splits`.
            unit: Unit of an example, such as `request`; a kind documents its units.
            max_history: Maximum number of behaviours of a history.
            options: Options of the kind, of `options_class`.
            rank: Rank of this worker.
            world: Number of workers.
            new: Selection of the training examples; None for all.
        """
        if split not in self.splits:
            raise UserError(f"models of {self.kind} have no split '{split}'")
        assert 0 <= rank < world
        self.columns = columns
        self.split, self.unit, self.max_history = split, unit, max_history
        self.rank, self.world = rank, world
        self.new_examples = new if new and new.since else None
        self.skipped_users = np.zeros(0, np.int64)
        self.offsets = lengths_to_offsets(columns["behaviours_per_user"])
        self._sampled: NDArray[np.int64] | None = None
        self.options = options
        self._plan()

    # Methods that a kind overrides.

    @classmethod
    def parquet_columns(cls, info: Any) -> list[str]:
        """Return the columns of `sequences` that `decode` reads."""
        raise NotImplementedError

    def _plan(self) -> None:
        """Set the arrays and numbers that describe the examples, such as `lengths`."""
        raise NotImplementedError

    def collate(self, rows: NDArray[np.int64]) -> Batch:
        """Return the batch of the examples with these (b,) indices."""
        raise NotImplementedError

    def sort_for_evaluation(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sort (b,) examples by length, so that batches have little padding."""
        return rows[np.argsort(self.lengths[rows], kind="stable")]

    def candidate_keys(self, batch: Any) -> dict[str, Tensor]:
        """Return the keys of the N candidates that a model scores, by name.

        Returns:
            (N,) tensors: `user_row`; `request`, which identifies and orders the
            requests of a user; the request's `time` in ms and `query`; `item`. And the
            (N, K) labels.
        """
        raise NotImplementedError

    def _sample_batch(
        self, rows: NDArray[np.int64], seed: list[int]
    ) -> NDArray[np.int64]:
        """Return the (b,) examples of a training batch, sampled anew in each epoch."""
        return rows

    # Methods that all kinds share.

    @classmethod
    def load(
        cls,
        table: Table[Any],
        split: str,
        unit: str,
        max_history: int,
        options: Any = None,
        *,
        rank: int = 0,
        world: int = 1,
        new: NewExamples | None = None,
    ) -> Self:
        """Load the examples of one split of a `sequences` table.

        The arguments are those of the constructor.
        """
        if not table.rows:
            raise UserError(f"{table.uri} has no users")
        columns = open_columns(
            table,
            cls.kind,
            cls.parquet_columns(table.info),
            lambda part: cls.decode(part, table.info),
            asdict(table.info),
        )
        return cls(
            columns, split, unit, max_history, options, rank=rank, world=world, new=new
        )

    def __len__(self) -> int:
        """Return the number of examples, over all workers."""
        return len(self.lengths) if self._sampled is None else len(self._sampled)

    def rows(self) -> NDArray[np.int64]:
        """Return the (n,) indices of all examples, over all workers."""
        return np.arange(len(self.lengths)) if self._sampled is None else self._sampled

    @property
    def cache_bytes(self) -> int:
        """Size of the decoded columns on disk, in bytes."""
        return columns_bytes(self.columns)

    @property
    def num_skipped(self) -> int:
        """Number of requests without an example among the users of this worker."""
        return int(self._is_assigned(self.skipped_users).sum())

    def count_users(self) -> int:
        """Return the number of users with an example that this worker evaluates."""
        return int(self._is_assigned(np.unique(self.user[self.rows()])).sum())

    def _is_assigned(self, users: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return the (u,) mask of users that this worker evaluates, given (u,) rows."""
        return users % self.world == self.rank

    def keep_random(self, limit: int) -> None:
        """Keep a random sample of at most `limit` examples; 0 keeps all."""
        if not 0 < limit < len(self):
            return
        sample = np.random.default_rng(0).permutation(len(self))[:limit]
        self._sampled = np.sort(self.rows()[sample])

    def _select_sampled(self, values: NDArray) -> NDArray:
        """Return the (n,) values of all examples, without those not sampled."""
        return values if self._sampled is None else values[self._sampled]

    def num_steps(self, batch_size: int) -> int:
        """Return the number of global batches of an epoch.

        Args:
            batch_size: Weight of a global batch, such as its number of requests.
        """
        return count_steps(self._select_sampled(self.weights), batch_size)

    def epoch_rows(
        self, batch_size: int, *, seed: int = 0, epoch: int = 0, skip: int = 0
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the (b,) indices of this worker's examples of each global batch.

        Args:
            batch_size: Weight of a global batch, such as its number of requests.
            seed: Seed of the order.
            epoch: Number of the epoch, from 0.
            skip: Number of steps to skip, to resume a run.
        """
        batches = order_epoch(
            self._select_sampled(self.lengths),
            self._select_sampled(self.weights),
            batch_size,
            self.num_steps(batch_size),
            seed=seed,
            epoch=epoch,
            skip=skip,
        )
        for step, batch in enumerate(batches, skip):
            rows = batch if self._sampled is None else self._sampled[batch]
            yield self._sample_batch(rows, [seed, epoch, step])[self.rank :: self.world]

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
        DistributedDataParallel needs a gradient from every worker.

        Args:
            batch_size: Weight of a global batch, such as its number of requests.
            seed: Seed of the order.
            epoch: Number of the epoch, from 0.
            skip: Number of steps to skip, to resume a run.
            pad_to_buckets: Whether to pad batches to few shapes, for CUDA graphs.
        """
        for rows in self.epoch_rows(batch_size, seed=seed, epoch=epoch, skip=skip):
            if len(rows):
                batch = self.collate(rows)
                if pad_to_buckets:
                    batch = batch.pad_to_buckets(self.max_history)
                yield batch
            else:
                stand_in = self._sample_batch(self.rows()[:1], [0])
                yield replace(self.collate(stand_in), is_stand_in=True)

    def evaluation_rows(self, limit: int = 0) -> NDArray[np.int64]:
        """Return the (b,) indices of the examples that this worker evaluates, in order.

        All examples of a user are evaluated by the same worker.

        Args:
            limit: Approximate number of requests to evaluate over all workers, spread
                evenly over the lengths of histories; 0 for all.
        """
        rows = self.sort_for_evaluation(self.rows())
        total = int(self.weights[rows].sum())
        if 0 < limit < total:
            count = math.ceil(limit * len(rows) / total)
            rows = rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
        return rows[self._is_assigned(self.user[rows])]

    def cut_batches(
        self, rows: NDArray[np.int64], batch_size: int
    ) -> Iterator[NDArray[np.int64]]:
        """Split (n,) examples into consecutive batches of limited weight.

        An example whose weight exceeds `batch_size` makes a batch of its own.

        Args:
            rows: (n,) indices of the examples.
            batch_size: Maximum weight of a batch.
        """
        # (n + 1,) weight of all examples before each example
        weight_before = lengths_to_offsets(self.weights[rows])
        first = 0
        while first < len(rows):
            limit = weight_before[first] + batch_size
            fitting = np.searchsorted(weight_before, limit, side="right") - 1
            end = max(int(fitting), first + 1)
            yield rows[first:end]
            first = end

    def evaluation_batches(
        self, batch_size: int, limit: int = 0
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the (b,) indices of each evaluation batch of this worker.

        Args:
            batch_size: Maximum weight of a batch, such as its number of requests.
            limit: As in `evaluation_rows`.
        """
        return self.cut_batches(self.evaluation_rows(limit), batch_size)
