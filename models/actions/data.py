"""Examples and batches of a log of actions: a user's context, and candidates whose actions are to be predicted.

    dataset = ActionsDataset.load("tables/sequences", "train", unit="user", max_history=1024)
    for batch in dataset.epoch(64, seed=1, epoch=0): ...

Batches of training have similar lengths, so that there is little padding, and equally
many events, so that all events have the same weight in the loss. A user with more than
`max_history` training events has several examples. These are cut from the end and
overlap by a fraction `window_overlap` of `max_history`: an event that two examples
share is learned from in the earlier one and is history in the later one.

Shapes: `B` rows, `T` context events, `C` candidates, `A` kinds of action, `K` tasks,
`F` features, `n` examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.actions.batch import ActionsBatch, any_tied
from models.dataset.columns import Columns
from models.dataset.dataset import RequestDataset
from models.own_features import OwnFeatures
from models.ragged import (
    lengths_to_starts,
    pad_indices,
    pad_ragged,
    row_numbers,
)
from models.storage.tables import Manifest

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Its multiples modulo 1 are evenly distributed, and so are the cuts of a batch's
rows."""

MAX_PAIRS = 1 << 24
"""Largest B x C x (T + 1) of an evaluation batch of several rows, which bounds the
memory of attention scores."""

EVENT_COLUMNS = ("item", "time", "action", "label", "feature", "viewer", "own")
"""Columns by event; `viewer` and `own` only if the log has some."""

TENSOR_TYPES = {"item": torch.int64, "time": torch.int64, "viewer": torch.int64}
"""Types of a batch's tensors that are not float32."""


class ActionsDataset(RequestDataset):
    """The events of one split, in examples of one user.

    Training, `user`: an example is a sequence of training events, all of them context.
    Each event is learned from in one example. Training, `split_sequence`, for models
    that learn from candidates only: the sequence is cut into context and candidates.
    The cut is drawn uniformly for each example and epoch, and evenly over the rows of a
    batch, so that a batch learns from about half of its events. At least one event is a
    candidate, and no event that another example learns from. Validation and test: the
    context is the latest `max_history` events before the split's time. The candidates
    are all of the user's events in the split, also of users without a context.
    """

    kind = "actions"
    default_unit = "user"
    default_max_history = 1024
    request_unit = "sequences of events"
    learned_unit = "events"
    window_overlap: float = 0.5
    """Fraction of `max_history` by which examples of a user overlap in training."""
    keep_empty: bool = False
    """Whether users without a candidate have an example in evaluation too."""

    begin: NDArray[np.int64]
    """(n,) index of each example's first event in the columns."""
    context: NDArray[np.int64]
    """(n,) events of the context."""
    shared: NDArray[np.int64]
    """(n,) first events of the context that another example learns from."""

    @classmethod
    def dataset_options(cls, config: Any, catalogue: Any) -> dict[str, Any]:
        return {"window_overlap": config.window_overlap}

    @classmethod
    def parquet_columns(cls, manifest: Manifest) -> list[str]:
        viewers = [f"cat_{name}" for name in manifest.info.get("viewers", {})]
        own = OwnFeatures.from_info(manifest.info).names
        vectors = ("actions", "tasks", "features")
        ends = ("train_end", "val_end")
        return ["item_index", "timestamp_ms", *viewers, *own, *vectors, *ends]

    @classmethod
    def decode(cls, table: pa.Table, manifest: Manifest, uri: str) -> Columns:
        return decode_sequences(table, manifest)

    @classmethod
    def decoder_settings(cls, manifest: Manifest) -> Any:
        names = ("actions", "tasks", "features", "viewers", "own")
        return {name: manifest.info.get(name) for name in names}

    @classmethod
    def from_requests(
        cls, events: Columns, context: NDArray, candidates: NDArray
    ) -> ActionsDataset:
        """Return served requests as a dataset.

        Args:
            events: The columns of all events, end to end: of each request its context,
                then its candidates.
            context: (R,) events of each context.
            candidates: (R,) candidates of each request.
        """
        sizes = context + candidates
        columns = {
            **events,
            "behaviours_per_user": sizes,
            "train_end": np.zeros(len(sizes), np.int64),
            "val_end": context,
        }
        longest = max(1, int(context.max(initial=1)))
        return cls(columns, "test", "user", longest, keep_empty=True)

    def _plan(self) -> None:
        if self.split == "train":
            owner, begin, context, shared = self._training_windows()
            candidates = np.zeros_like(context)
        else:
            owner, begin, context, candidates = self._evaluation_windows()
            shared = context
        begin = self.offsets[owner] + begin
        if self.split == "train" and self.new:
            shared = self._skip_old(begin, context, shared)
            some_new = np.flatnonzero(shared < context)
            owner, begin, context, candidates, shared = (
                values[some_new]
                for values in (owner, begin, context, candidates, shared)
            )
        self.user, self.begin = owner, begin
        self.context, self.shared = context, shared
        self.lengths = context + candidates
        self.weights = self.lengths if self.split == "train" else np.ones_like(context)
        self.num_requests = len(owner)
        self.num_learned = int((context - shared).sum())

    def _training_windows(self) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """Return user, first event within the user, events, and shared events of each training example."""
        known = self.columns["train_end"].astype(np.int64)
        overlap = int(self.window_overlap * self.max_history)
        stride = max(1, self.max_history - overlap)
        excess = np.maximum(known - self.max_history, 0)
        windows = np.where(known > 0, 1 + (excess + stride - 1) // stride, 0)
        owner = row_numbers(windows)
        window = np.arange(len(owner)) - np.repeat(lengths_to_starts(windows), windows)
        end = known[owner] - (windows[owner] - 1 - window) * stride
        begin = np.maximum(end - self.max_history, 0)
        shared = np.where(window > 0, end - begin - stride, 0)
        return owner, begin, end - begin, shared

    def _evaluation_windows(self) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """Return user, first event within the user, context and candidates of each example of val or test."""
        columns = self.columns
        ends = {
            "train": columns["train_end"].astype(np.int64),
            "val": columns["val_end"].astype(np.int64),
            "test": columns["behaviours_per_user"].astype(np.int64),
        }
        known = ends[self.split]
        past = ends["train" if self.split == "val" else "val"]
        owner = np.flatnonzero((known > past) | self.keep_empty)
        begin = np.maximum(past[owner] - self.max_history, 0)
        return owner, begin, past[owner] - begin, (known - past)[owner]

    def _skip_old(
        self, begin: NDArray, context: NDArray, shared: NDArray
    ) -> NDArray[np.int64]:
        """Return the events of each example that are not learned from, with the old events that are not replayed."""
        assert self.new is not None
        old_before = np.append(0, np.cumsum(self.columns["time"] < self.new.since))
        num_old = old_before[begin + context] - old_before[begin]
        replayed = self.new.mask(np.full(len(begin), self.new.since - 1))
        return np.where(replayed, shared, np.maximum(shared, num_old))

    def num_steps(self, batch_size: int) -> int:
        """Return the steps of an epoch: `batch_size` counts examples, and steps have equally many events."""
        return -(-len(self) // batch_size)

    def _sample_batch(
        self, rows: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return for unit `split_sequence` (B, 2): the example, and the size of its context."""
        if self.unit != "split_sequence":
            return rows
        share = (rng.random() + np.arange(len(rows)) * GOLDEN_RATIO) % 1
        shared = self.shared[rows]
        context = shared + (share * (self.lengths[rows] - shared)).astype(np.int64)
        return np.stack([rows, context], 1)

    def sort_for_evaluation(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return contexts within a factor of two together, and of these similar numbers of candidates."""
        context = self.context[rows]
        candidates = self.lengths[rows] - context
        octave = np.log2(context + 1).astype(np.int64)
        return rows[np.lexsort((context, candidates, octave))]

    def cut_batches(
        self, rows: NDArray[np.int64], batch_size: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the examples in batches of at most `batch_size` and, unless of one example, `MAX_PAIRS`."""
        first, longest, most = 0, 1, 0
        for i, row in enumerate(rows):
            context = max(1, int(self.context[row]))
            candidates = int(self.lengths[row] - self.context[row])
            longest, most = max(longest, context), max(most, candidates)
            pairs = (i - first + 1) * most * (longest + 1)
            if i > first and (i - first == batch_size or pairs > MAX_PAIRS):
                yield rows[first:i]
                first, longest, most = i, context, candidates
        if len(rows):
            yield rows[first:]

    def collate(self, rows: NDArray[np.int64]) -> ActionsBatch:
        """Return the examples as tensors; `rows` (B,) or, for unit `cut`, (B, 2) with the size of each context."""
        if rows.ndim == 2:
            rows, context = rows.T
        else:
            context = self.context[rows]
        begin = self.begin[rows]
        index, inside = pad_indices(begin, context)
        candidate_index, candidate_inside = pad_indices(
            begin + context, self.lengths[rows] - context, 0
        )
        tensors: dict[str, Tensor] = {}
        for name in EVENT_COLUMNS:
            if name not in self.columns:
                continue
            values, dtype = self.columns[name], TENSOR_TYPES.get(name, torch.float32)
            past = pad_ragged(values, index, inside, 0)
            tensors[name] = torch.from_numpy(past).to(dtype)
            if name != "action":
                shown = pad_ragged(values, candidate_index, candidate_inside, 0)
                tensors[f"candidate_{name}"] = torch.from_numpy(shown).to(dtype)
        valid = torch.from_numpy(inside)
        position = np.arange(index.shape[1])
        learned_here = torch.from_numpy(position >= self.shared[rows, None])
        return ActionsBatch(
            user_row=torch.from_numpy(self.user[rows]),
            valid=valid,
            learn=valid & learned_here,
            candidate_valid=torch.from_numpy(candidate_inside),
            has_ties=any_tied(tensors["time"], valid),
            **tensors,  # type: ignore[arg-type]
        )

    def candidate_keys(self, batch: ActionsBatch) -> dict[str, Tensor]:
        """Return the keys of the candidates; all candidates of a user at one time are one request."""
        valid = batch.candidate_valid
        time = batch.candidate_time[valid]
        return {
            "user_row": batch.user_row[:, None].expand_as(valid)[valid],
            "request": time,
            "time": time,
            "query": torch.full_like(time, -1),
            "item": batch.candidate_item[valid],
            "labels": batch.candidate_label[valid],
        }


def decode_sequences(table: pa.Table, manifest: Manifest) -> Columns:
    """Decode one part of the sequences of a log of actions.

    Returns:
        By user (U,): behaviours_per_user, train_end and val_end, the events before validation and before test. By
        event (E, ...): item, time, action (A), label (K), feature (F); where the log
        has some, viewer (V), the number
        of each value in the manifest's `viewers` from 1, or 0, and own, as `OwnFeatures.matrix` has them.
    """
    info, own = manifest.info, OwnFeatures.from_info(manifest.info)
    item_lists = table["item_index"].combine_chunks()

    def by_event(name: str) -> pa.Array:
        return table[name].combine_chunks().flatten()

    def vectors(name: str) -> NDArray:
        width = len(info[name])
        values = by_event(name).flatten().to_numpy(zero_copy_only=False)
        return values.reshape(-1, max(1, width))[:, :width]

    item = item_lists.flatten().to_numpy().astype(np.int32)
    feature = np.zeros((len(item), 0), np.float32)
    if info["features"]:
        feature = vectors("features")
    columns = {
        "behaviours_per_user": pc.list_value_length(item_lists).to_numpy(),
        "train_end": table["train_end"].to_numpy().astype(np.int32),
        "val_end": table["val_end"].to_numpy().astype(np.int32),
        "item": item,
        "time": by_event("timestamp_ms").to_numpy(),
        "action": _narrow(vectors("actions")),
        "label": _narrow(vectors("tasks")),
        "feature": _narrow(feature),
    }
    if viewers := info.get("viewers"):
        codes = [
            _category_codes(by_event(f"cat_{name}"), values)
            for name, values in viewers.items()
        ]
        columns["viewer"] = np.stack(codes, 1)
    if own.names:
        own_columns = {name: by_event(name) for name in own.names}
        columns["own"] = own.matrix(own_columns, len(item))
    return columns


def _category_codes(strings: pa.Array, values: list[str]) -> NDArray[np.int32]:
    """Return the index of each string in `values`, from 1; 0 for other strings."""
    index = pc.fill_null(pc.index_in(strings, pa.array(values, pa.string())), -1)
    return index.to_numpy(zero_copy_only=False).astype(np.int32) + 1


def _narrow(values: NDArray) -> NDArray:
    """Return the values as uint8 or float16 if every number fits exactly, else unchanged."""
    for dtype in (np.uint8, np.float16):
        with np.errstate(invalid="ignore", over="ignore"):
            narrow = values.astype(dtype)
        if np.array_equal(narrow, values, equal_nan=dtype is np.float16):
            return narrow
    return values
