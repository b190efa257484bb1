"""Examples of one split of a `sequences` table, and the batches that a worker reads of them.

    dataset = RetrievalDataset.load("tables/sequences", "train", unit="request", max_history=20)
    for batch in dataset.epoch(256, seed=1, epoch=0): ...

An example is a window of one user's behaviours and the requests that the window serves.
A family's dataset plans its examples over the table's columns
(`models/dataset/columns.py`) and collates them to tensors. Every worker maps the whole
table; the order of an epoch is the same for any number of workers, and worker `r` of
`w` takes every `w`-th example of a batch, beginning with number `r`.

Shapes: `n` examples of the split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from models.dataset.batch import Batch
from models.dataset.columns import Columns, columns_bytes, open_columns
from models.dataset.folds import assign_fold, resolve_fold
from models.dataset.order import count_steps, order_epoch
from models.ragged import lengths_to_offsets
from models.storage.tables import Manifest, UserError, sequences_manifest

SPLITS = ("train", "val", "test")
"""Splits of a table; columns have their index."""


@dataclass(frozen=True)
class NewExamples:
    """Which training examples a model reads that continues another one."""

    since: int = 0
    """Time in ms; examples from it on are trained on."""
    replay_fraction: float = 1.0
    """Share of the older examples that is trained on too, drawn at random."""
    seed: int = 0
    """Seed of the draw."""

    def mask(self, time: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which examples of these (n,) times to train on."""
        is_drawn = (
            np.random.default_rng([self.seed, 0]).random(len(time))
            < self.replay_fraction
        )
        return (time >= self.since) | is_drawn


class RequestDataset:
    """The examples of one split, and the share of them that one worker reads."""

    kind: ClassVar[str]
    """Name of the family."""
    splits: ClassVar[tuple[str, ...]] = SPLITS
    """Splits that a dataset can have."""
    default_unit: ClassVar[str]
    """Unit of an example if `load` is called without one."""
    default_max_history: ClassVar[int]
    """Behaviours of a history at most if `load` is called without a limit."""
    counted: ClassVar[str] = "requests"
    """Unit that `num_requests` counts, for messages."""
    learned_unit: ClassVar[str] = "requests"
    """Unit that `num_learned` counts, for messages."""

    user: NDArray[np.integer]
    """(n,) row of each example's user in the table."""
    lengths: NDArray[np.integer]
    """(n,) length by which examples are sorted, so that a batch has little padding."""
    weights: NDArray[np.integer]
    """(n,) weight of each example in a batch."""
    num_requests: int
    """Requests of the split, over all workers."""
    num_learned: int
    """Requests, of a feed events, that the examples are trained on, over all
    workers."""
    num_without_history: int = 0
    """Requests among `num_requests` that have no history, of a model that learns from
    them too."""
    skipped_users: NDArray[np.integer]
    """Table row of the user of each request that has no example."""

    def __init__(
        self,
        columns: Columns,
        split: str,
        unit: str,
        max_history: int,
        *,
        rank: int = 0,
        world: int = 1,
        new: NewExamples | None = None,
        **options: Any,
    ) -> None:
        """Plan the examples of a split over decoded columns.

        Args:
            columns: The decoded table, or served requests in the same form.
            split: `train`, `val`, `test`, or another one of `splits`.
            unit: Unit of an example, such as `request`; a family documents its units.
            max_history: Behaviours of a history at most.
            rank: Number of this worker.
            world: Number of workers.
            new: Which examples of training are read; None for all.
            options: Options of the family, as `dataset_options` returns them.
        """
        if split not in self.splits:
            *some, last = self.splits
            raise UserError(
                f"models of {self.kind} have no split '{split}'; choose {', '.join(some)} or {last}"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not below the number of workers {world}")
        self.columns = columns
        self.split, self.unit, self.max_history = split, unit, max_history
        self.rank, self.world = rank, world
        self.new = new if new and new.since else None
        self.skipped_users = np.zeros(0, np.int64)
        self.offsets = lengths_to_offsets(columns["behaviours_per_user"])
        self._kept: NDArray[np.int64] | None = None
        for name, value in options.items():
            setattr(self, name, value)
        self._plan()

    # Pieces of a family.

    @classmethod
    def dataset_options(cls, config: Any, catalogue: Any) -> dict[str, Any]:
        """Return the options of the dataset that a model's config and catalogue set."""
        return {}

    @classmethod
    def parquet_columns(cls, manifest: Manifest) -> list[str]:
        """Return the columns of `sequences` that `decode` reads."""
        raise NotImplementedError

    @classmethod
    def decode(cls, table: pa.Table, manifest: Manifest, uri: str) -> Columns:
        """Return flat arrays of one part of `sequences`."""
        raise NotImplementedError

    @classmethod
    def decoder_settings(cls, manifest: Manifest) -> Any:
        """Return a JSON value that the decoded arrays depend on, beside the table's content."""
        return None

    def _plan(self) -> None:
        """Set `user`, `lengths`, `weights`, `num_requests`, and the attributes that `collate` reads."""
        raise NotImplementedError

    def collate(self, rows: NDArray[np.int64]) -> Batch:
        """Return the examples of these numbers as tensors."""
        raise NotImplementedError

    def sort_for_evaluation(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the examples in the order of an evaluation, with similar lengths next to each other."""
        return rows[np.argsort(self.lengths[rows], kind="stable")]

    def candidate_keys(self, batch: Any) -> dict[str, Tensor]:
        """Return the keys of the N candidates that a model scores.

        Returns:
            (N,) tensors: `user_row`; `request`, by which a user's requests are told apart and ordered; the request's
            `time` in ms and `query`; `item`; and labels (N, K).
        """
        raise NotImplementedError

    def _draw(
        self, rows: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return the examples of a training batch, with parts that are drawn at random for each epoch."""
        return rows

    # Common to all families.

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
        new: NewExamples | None = None,
        fold: int | None = None,
        **options: Any,
    ) -> Self:
        """Load the examples of one split of a `sequences` table.

        `fold` is the number of the fold, from 1, of a table that is cut into folds; by
        default the last one.

        Raises:
            UserError: If the table is of another family, is damaged, has no users or
                not the fold.
        """
        manifest = sequences_manifest(uri, cls.kind)
        if not manifest.rows:
            raise UserError(f"{uri} has no users; check the filters of jobs.prepare")
        columns = open_columns(
            uri,
            cls.kind,
            cls.parquet_columns(manifest),
            lambda table: cls.decode(table, manifest, uri),
            manifest=manifest,
            settings=cls.decoder_settings(manifest),
        )
        fold = resolve_fold(manifest.info, fold, uri)
        if fold is not None:
            cuts, times = manifest.info["split"], columns["request_time"]
            columns = {**columns, "split": assign_fold(cuts, fold, times)}
        return cls(
            columns,
            split,
            cls.default_unit if unit is None else unit,
            cls.default_max_history if max_history is None else max_history,
            rank=rank,
            world=world,
            new=new,
            **options,
        )

    def __len__(self) -> int:
        """Return the number of examples, over all workers."""
        return len(self.lengths) if self._kept is None else len(self._kept)

    def rows(self) -> NDArray[np.int64]:
        """Return the numbers of all examples, over all workers."""
        return np.arange(len(self.lengths)) if self._kept is None else self._kept

    def user_rows(self, rows: NDArray[np.int64]) -> NDArray[np.integer]:
        """Return the table row of each example's user."""
        return self.user[rows]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the decoded columns, on disk."""
        return columns_bytes(self.columns)

    @property
    def num_skipped(self) -> int:
        """Requests without an example, of this worker's users in an evaluation."""
        return int(self._is_mine(self.skipped_users).sum())

    def keep_users(self, rows: NDArray[np.int64], stride: int) -> NDArray[np.int64]:
        """Return the examples of every `stride`-th user of the table, the same users for all models."""
        return rows[self.user_rows(rows) % stride == 0] if stride > 1 else rows

    def count_users(self, stride: int = 1) -> int:
        """Return the number of users with an example, of this worker's and of every `stride`-th user."""
        users = np.unique(self.user_rows(self.keep_users(self.rows(), stride)))
        return int(self._is_mine(users).sum())

    def _is_mine(self, users: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which users this worker evaluates."""
        return users % self.world == self.rank

    def keep_random(self, limit: int) -> None:
        """Keep `limit` examples, drawn at random; all examples if they are fewer."""
        if not 0 < limit < len(self):
            return
        drawn = np.random.default_rng(0).permutation(len(self))[:limit]
        self._kept = np.sort(self.rows()[drawn])

    def num_steps(self, batch_size: int) -> int:
        """Return the number of global batches of an epoch."""
        return count_steps(self.weights[self.rows()], batch_size)

    def epoch_rows(
        self, batch_size: int, *, seed: int = 0, epoch: int = 0, skip: int = 0
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of this worker's examples of each global batch, from step `skip` on."""
        rows = self.rows()
        batches = order_epoch(
            self.lengths[rows],
            self.weights[rows],
            batch_size,
            self.num_steps(batch_size),
            seed=seed,
            epoch=epoch,
            skip=skip,
        )
        for step, batch in enumerate(batches, skip):
            rng = np.random.default_rng([seed, epoch, step])
            yield self._draw(rows[batch], rng)[self.rank :: self.world]

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

        A worker without an example of a batch yields a stand-in, since
        DistributedDataParallel needs a gradient of every worker.

        Args:
            batch_size: Weight of a batch over all workers, such as its number of
                requests.
            seed: Seed of the order.
            epoch: Number of the epoch.
            skip: Steps to leave out, when a run is continued.
            pad_to_buckets: Whether batches come in few shapes, as CUDA graphs need
                them.
        """
        for rows in self.epoch_rows(batch_size, seed=seed, epoch=epoch, skip=skip):
            if len(rows):
                batch = self.collate(rows)
                if pad_to_buckets:
                    batch = batch.pad_to_buckets(self.max_history)
                yield batch
            else:
                stand_in = self._draw(self.rows()[:1], np.random.default_rng(0))
                yield replace(self.collate(stand_in), is_stand_in=True)

    def evaluation_rows(self, limit: int = 0) -> NDArray[np.int64]:
        """Return this worker's examples of an evaluation, in order.

        With `limit` about that many over all workers, spread evenly over the lengths. A
        user's examples are all evaluated by one worker.
        """
        rows = self.sort_for_evaluation(self.rows())
        total = int(self.weights[rows].sum())
        if 0 < limit < total:
            count = -(-limit * len(rows) // total)
            rows = rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
        return rows[self._is_mine(self.user_rows(rows))]

    def cut_batches(
        self, rows: NDArray[np.int64], batch_size: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the examples in batches of at most `batch_size` by weight; an example that is larger comes alone."""
        total = lengths_to_offsets(self.weights[rows])
        first = 0
        while first < len(rows):
            end = np.searchsorted(total, total[first] + batch_size, side="right") - 1
            last = max(int(end), first + 1)
            yield rows[first:last]
            first = last

    def evaluation_batches(
        self, batch_size: int, limit: int = 0
    ) -> Iterator[NDArray[np.int64]]:
        """Yield this worker's examples of an evaluation in batches."""
        return self.cut_batches(self.evaluation_rows(limit), batch_size)
