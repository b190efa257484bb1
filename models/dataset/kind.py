"""A kind of requests: functions from rows of `sequences` to batches.

    KIND = Kind("changes", decode, list_columns, plan, collate)

The dataset calls these functions, which never call it back (`models/KIND/requests.py`).

Shapes: `n` examples of a split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from core.ragged import lengths_to_offsets
from core.splits import SPLITS
from models.dataset.batch import Batch
from models.dataset.columns import Columns


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


@dataclass(frozen=True)
class Selection:
    """The examples that a dataset plans."""

    split: str
    """`train`, `val`, `test`, or another entry of `Kind.splits`."""
    unit: str
    """Unit of an example, such as `request`; a kind documents its units."""
    max_history: int
    """Maximum number of behaviours of a history."""
    options: Any = None
    """Options of the kind."""
    new: NewExamples | None = None
    """Selection of the training examples; None for all, and in other splits."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Windows of users' behaviours and the requests that each window serves."""

    arrays: ClassVar[tuple[str, ...]] = ("user", "lengths", "weights")
    """Names of the fields with a value for each example."""
    counts_examples: ClassVar[bool] = False
    """Whether the size of a training batch is its mean number of examples, instead of
    the sum of their weights."""

    columns: Columns
    """The decoded table."""
    selection: Selection
    """The arguments of the plan."""
    user: NDArray[np.integer]
    """(n,) table row of each example's user."""
    lengths: NDArray[np.integer]
    """(n,) sequence length of each example; batches have similar lengths."""
    weights: NDArray[np.integer]
    """(n,) weight of each example in a batch."""
    num_requests: int
    """Number of requests of the split in the unit that the kind names, for messages."""
    num_learned: int
    """Number of requests (for a feed, events) that the examples learn."""
    skipped_users: NDArray[np.integer] = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    """(s,) table row of the user of each of the s requests without an example."""

    def __len__(self) -> int:
        return len(self.user)

    def take(self, rows: NDArray) -> Self:
        """Return the examples with these (b,) indices."""
        return replace(
            self, **{name: getattr(self, name)[rows] for name in self.arrays}
        )

    def sort_order(self) -> NDArray[np.int64]:
        """Return an order (n,) in which batches have little padding."""
        return np.argsort(self.lengths, kind="stable")

    def cut(self, batch_size: int) -> Iterator[slice]:
        """Cut the examples into consecutive batches of a weight up to `batch_size`.

        An example whose weight exceeds `batch_size` makes a batch of its own.
        """
        # (n + 1,) weight of all examples before each example
        weight_before = lengths_to_offsets(self.weights)
        first = 0
        while first < len(self):
            limit = weight_before[first] + batch_size
            fitting = np.searchsorted(weight_before, limit, side="right") - 1
            end = max(int(fitting), first + 1)
            yield slice(first, end)
            first = end

    def draw(self, seed: list[int]) -> Self:
        """Return the examples of a training batch, as drawn anew in each epoch."""
        return self


@dataclass(frozen=True)
class Kind:
    """Functions of a kind of requests."""

    name: str
    """Name of the kind in the tables' info: `retrieval`, `search` or `actions`."""
    decode: Callable[[pa.Table, Any], Columns]
    """Return the flat arrays of one part of `sequences`, by name. Arguments are the
    rows of the part, and the info of the table, a subclass of `SequencesInfo`."""
    list_columns: Callable[[Any], list[str]]
    """Return the columns of `sequences` that `decode` reads, given the info."""
    plan: Callable[[Columns, Selection], Examples]
    """Plan the examples of a selection over the decoded columns."""
    collate: Callable[[Any], Batch]
    """Return the batch of some `Examples`."""
    splits: tuple[str, ...] = SPLITS
    """Splits of the kind's tables."""
    request_unit: str = "requests"
    """Name of the unit of `Examples.num_requests`."""
    learned_unit: str = "requests"
    """Name of the unit of `Examples.num_learned`."""
