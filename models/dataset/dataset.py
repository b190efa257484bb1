"""Examples of one split of a `sequences` table, and the batches of one worker.

    selection = Selection("train", "request", 20)
    dataset = Dataset(RETRIEVAL, sequences, selection)
    for batch in dataset.epoch(256, seed=1, epoch=0):
        ...

An example is a window of one user's behaviours and the requests that the window serves.
A kind (`models/KIND/requests.py`) plans its examples over the table's columns and
collates them to tensors; it never calls the dataset. The order of an epoch is a pure
function of seed and epoch, the same for any number of workers, and worker `r` of `w`
takes every `w`-th example of a global batch, from number `r` on.

Columns are flat arrays, in files of a folder that is named by the hash of the table's
content. A node decodes a table once, and its processes memory-map the files
(`open_columns`). The page cache shares them and drops pages under memory pressure, so
tables larger than memory can be read.

Shapes: `n` examples of the split, `m` requests.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock
from numpy.typing import NDArray

from core.errors import UserError
from core.ragged import lengths_to_offsets, narrow_indices, split_evenly
from core.splits import SPLITS
from core.tables import Table, read_parquet
from models.dataset.batch import Batch

CACHE_VARIABLE = "TRIELINE_CACHE"
"""Environment variable that names the cache folder."""

MAX_UNUSED_S = 7 * 24 * 3600
"""Seconds after its last use after which a cache entry is removed."""

ENTRY = re.compile(r"[a-z_]+-[0-9a-f]{32}(\.|$)")
"""Names of entries, their locks and unfinished entries."""

FORMAT_VERSION = 4
"""Version of the format and names of arrays; part of the name of a cache entry."""

Columns = dict[str, NDArray[Any]]
"""Arrays by name. Arrays from `open_columns` are read-only."""

Decoder = Callable[[pa.Table], Columns]
"""Turn one part of a table into flat arrays by name. The arrays of all parts are
concatenated along their first axis."""

WINDOW_STEPS = 64
"""Number of steps whose examples are sorted together by length, so that a batch has
little padding."""


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
    """The examples that a dataset plans. A kind adds its options in a subclass."""

    split: str
    """`train`, `val`, `test`, or another entry of `Kind.splits`."""
    unit: str
    """Unit of an example, such as `request`; a kind documents its units."""
    max_history: int
    """Maximum number of behaviours of a history."""
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

    def take(self, rows: NDArray | slice) -> Self:
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
        """Draw the random part of a training batch's examples; by default, none is."""
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
    plan: Callable[[Columns, Any], Examples]
    """Plan the examples of a selection over the decoded columns."""
    collate: Callable[[Any], Batch]
    """Return the batch of some `Examples`."""
    selection_class: type[Selection] = Selection
    """Selection with the kind's options."""
    splits: tuple[str, ...] = SPLITS
    """Splits of the kind's tables."""
    request_unit: str = "requests"
    """Name of the unit of `Examples.num_requests`."""
    learned_unit: str = "requests"
    """Name of the unit of `Examples.num_learned`."""


class Dataset:
    """The examples of one split, and the share of them that one worker reads.

    Args:
        kind: Kind of the requests.
        table: A `sequences` table.
        selection: Examples to plan.
        rank: Rank of this worker.
        world: Number of workers.
    """

    def __init__(
        self,
        kind: Kind,
        table: Table[Any],
        selection: Selection,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if selection.split not in kind.splits:
            raise UserError(f"models of {kind.name} have no split '{selection.split}'")
        assert 0 <= rank < world
        if not table.rows:
            raise UserError(f"{table.uri} has no users")
        self.kind, self.selection = kind, selection
        self.rank, self.world = rank, world
        columns = open_columns(
            table,
            kind.name,
            kind.list_columns(table.info),
            lambda part: kind.decode(part, table.info),
            asdict(table.info),
        )
        self.examples = kind.plan(columns, selection)

    @classmethod
    def load(
        cls,
        model: Any,
        catalogue: Any,
        split: str,
        rank: int = 0,
        world: int = 1,
        **fields: Any,
    ) -> Self:
        """Load the examples of a split that a model reads.

        Args:
            model: The model, whose `selection` gets the `fields`.
            catalogue: Catalogue of the tables.
            split: Name of the split.
            rank: Rank of this worker.
            world: Number of workers.
        """
        selection = model.selection(catalogue, split, **fields)
        sequences = catalogue.versions["sequences"]
        return cls(model.kind, sequences, selection, rank, world)

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

    def num_steps(self, batch_size: int) -> int:
        """Return the number of global batches of an epoch.

        Args:
            batch_size: Weight of a global batch, such as its number of requests.
        """
        if self.examples.counts_examples:
            return math.ceil(len(self) / batch_size)
        total = int(self.examples.weights.sum())
        return min(math.ceil(total / batch_size), len(self))

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
            yield batch.take(slice(self.rank, None, self.world))

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


def order_epoch(
    lengths: NDArray,
    weights: NDArray,
    batch_size: int,
    steps: int,
    *,
    seed: int,
    epoch: int,
    skip: int = 0,
) -> Iterator[NDArray[np.int64]]:
    """Yield the global batches of an epoch from step `skip` on.

    The examples are permuted and split into windows of `WINDOW_STEPS` steps. The
    examples of a window are sorted by length and split into batches, which are yielded
    in random order.

    Args:
        lengths: (n,) length of each example's history.
        weights: (n,) weight of each example, such as its number of requests.
        batch_size: Number of examples of a batch, used if all weights are 1.
        steps: Number of batches. If weights differ, batches have about equal weights.
        seed: Seed of the order.
        epoch: Number of the epoch, from 0.
        skip: Number of steps to skip, to resume a run.

    Yields:
        (b,) indices of a batch's examples; no batch is empty.
    """
    order = narrow_indices(np.arange(len(lengths)))
    np.random.default_rng([seed, epoch]).shuffle(order)
    is_uniform = bool((weights == 1).all())
    if is_uniform:
        edges = np.minimum(np.arange(steps + 1) * batch_size, len(order))
    else:
        edges = split_evenly(weights[order], steps)
    first_window = skip - skip % WINDOW_STEPS
    for first in range(first_window, steps, WINDOW_STEPS):
        last = min(first + WINDOW_STEPS, steps)
        window = order[edges[first] : edges[last]].astype(np.int64)
        window = window[np.argsort(lengths[window], kind="stable")]
        cuts = edges[first : last + 1] - edges[first]
        if not is_uniform:
            cuts = split_evenly(weights[window], last - first)
        rng = np.random.default_rng([seed, epoch, first])
        batches = rng.permutation(last - first)  # order of the window's batches
        for batch in batches[max(0, skip - first) :]:
            yield window[cuts[batch] : cuts[batch + 1]]


# Flat arrays of a table, decoded once per node.


def cache_folder() -> Path:
    """Return the folder `columns` of `$TRIELINE_CACHE` or of `~/.cache/trieline`."""
    configured = os.environ.get(CACHE_VARIABLE)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured or Path(user_cache) / "trieline") / "columns"


def open_columns(
    table: Table[Any],
    layout: str,
    parquet_columns: list[str] | None,
    decode: Decoder,
    settings: Any = None,
) -> Columns:
    """Memory-map the decoded columns of a table.

    The first process of a node that opens the table decodes it.

    Args:
        table: The table.
        layout: Name of the decoder, such as `retrieval`.
        parquet_columns: The columns that `decode` reads; None for all.
        decode: Decodes one part of the table.
        settings: JSON value on which the decoded arrays depend, in addition to the
            content of the table.
    """
    hashes = [part.sha256 for part in table.files]
    key = [FORMAT_VERSION, layout, hashes, parquet_columns, settings]
    digest = hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:32]
    entry = cache_folder() / f"{layout}-{digest}"
    # only this user may read histories, and write what the compiled kernels lie beside
    entry.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    entry.parent.mkdir(mode=0o700, exist_ok=True)
    if not entry.exists():
        with FileLock(f"{entry}.lock"):
            if not entry.exists():
                _write_entry(entry, table.part_uris(), parquet_columns, decode)
                _remove_unused(entry.parent)
    os.utime(entry)
    files = entry.glob("*.npy")
    return {file.stem: np.asarray(np.load(file, mmap_mode="r")) for file in files}


def _write_entry(
    entry: Path, uris: list[str], parquet_columns: list[str] | None, decode: Decoder
) -> None:
    """Write the arrays of all parts to a folder that is renamed when it is complete."""
    unfinished = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    try:
        files: dict[str, list[Path]] = defaultdict(list)
        for uri in uris:
            for name, values in decode(read_parquet(uri, parquet_columns)).items():
                files[name].append(unfinished / f"{name}.{len(files[name])}.npy")
                np.save(files[name][-1], values)
        # Arrow would keep the freed memory of the parts
        pa.default_memory_pool().release_unused()
        for name, paths in files.items():
            parts = [np.load(path, mmap_mode="r") for path in paths]
            joined = np.lib.format.open_memmap(
                unfinished / f"{name}.npy",
                "w+",
                np.result_type(*parts),
                (sum(map(len, parts)), *parts[0].shape[1:]),
            )
            np.concatenate(parts, out=joined)
            for path in paths:
                path.unlink()
        unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _remove_unused(folder: Path) -> None:
    """Remove entries, also unfinished ones, that were not used for `MAX_UNUSED_S`."""
    oldest_used = time.time() - MAX_UNUSED_S
    for entry in folder.iterdir():
        if not ENTRY.match(entry.name):
            continue
        try:
            used = entry.stat().st_mtime
        except FileNotFoundError:
            continue
        if used >= oldest_used:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def request_columns(*names: str) -> list[str]:
    """Return the Parquet paths of the requests' fields `names`."""
    return [f"requests.list.element.{name}" for name in names]


def decode_splits(splits: pa.Array) -> NDArray[np.int8]:
    """Return the index (m,) of each split name in `SPLITS`, or -1 for other names."""
    index = pc.index_in(splits, pa.array(SPLITS, splits.type))
    return pc.fill_null(index, -1).to_numpy(zero_copy_only=False).astype(np.int8)
