"""Examples and batches of a log of actions: users' contexts and candidates.

    dataset = ActionsDataset.load(sequences, "train", "user", 1024, ActionsOptions())
    for batch in dataset.epoch(64, seed=1, epoch=0): ...

The rows of a training batch have similar lengths, which keeps padding small. Training
batches have about equally many events, so that all events have the same weight in the
loss. A user with more than `max_history` training events has several examples, cut
from the last event backwards. These examples overlap by `window_overlap * max_history`
events. An event in two examples is learned in the earlier one and is history in the
later one.

Shapes: `B` rows, `T` context events, `C` candidates, `A` kinds of action, `K` tasks,
`F` late features, `V` viewer-side categories, `n` examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.ragged import lengths_to_starts, pad_indices, pad_ragged, row_numbers
from core.schemas import ActionsInfo
from models.actions.batch import ActionsBatch, has_tied_times
from models.custom_features import read_features
from models.dataset.columns import Columns
from models.dataset.dataset import RequestDataset

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Step, modulo 1, between the cuts of a batch's rows, which spreads them evenly."""

MAX_PAIRS = 1 << 24
"""Maximum B x C x (T + 1) of an evaluation batch with several rows, which bounds the
memory of attention scores."""

EVENT_COLUMNS = ("item", "time", "action", "label", "feature", "viewer", "custom")
"""Columns by event; `viewer` and `custom` exist only if the log has them."""

TENSOR_TYPES = {"item": torch.int64, "time": torch.int64, "viewer": torch.int64}
"""Types of a batch's tensors; others are float32."""


class _Windows(NamedTuple):
    """Windows of users' events, one per example."""

    user: NDArray[np.int64]
    """(n,) user of each window."""
    begin: NDArray[np.int64]
    """(n,) index of the first event within the user."""
    context: NDArray[np.int64]
    """(n,) number of context events."""
    candidates: NDArray[np.int64]
    """(n,) number of candidates, which follow the context."""
    shared: NDArray[np.int64]
    """(n,) number of first context events that are not learned in this example."""


def decode_sequences(table: pa.Table, info: ActionsInfo) -> Columns:
    """Decode one part of the sequences of a log of actions.

    Returns:
        Columns by user: `behaviours_per_user`, and `train_end` and `val_end`, the
        numbers of events before the val and before the test split.

        Columns by event: `item`, `time`, `action` (A), `label` (K) and `feature` (F).
        If the log has viewer-side categories, `viewer` (V) holds the index of each
        value in the manifest's `viewers`, from 1, or 0 for other values. If the log has
        custom features, `custom` holds them as `read_features` returns them.
    """
    item_lists = table["item_index"].combine_chunks()

    def by_event(name: str) -> pa.Array:
        return table[name].combine_chunks().flatten()

    def vectors(name: str, width: int) -> NDArray:
        values = by_event(name).flatten().to_numpy(zero_copy_only=False)
        return values.reshape(-1, max(1, width))[:, :width]

    item = item_lists.flatten().to_numpy().astype(np.int32)
    feature = np.zeros((len(item), 0), np.float32)
    if info.features:
        feature = vectors("features", len(info.features))
    columns = {
        "behaviours_per_user": pc.list_value_length(item_lists).to_numpy(),
        "train_end": table["train_end"].to_numpy().astype(np.int32),
        "val_end": table["val_end"].to_numpy().astype(np.int32),
        "item": item,
        "time": by_event("timestamp_ms").to_numpy(),
        "action": _narrow(vectors("actions", len(info.actions))),
        "label": _narrow(vectors("tasks", len(info.tasks))),
        "feature": _narrow(feature),
    }
    if info.viewers:
        codes = [
            _category_codes(by_event(f"cat_{name}"), values)
            for name, values in info.viewers.items()
        ]
        columns["viewer"] = np.stack(codes, 1)
    if info.custom.names:
        custom_columns = {name: by_event(name) for name in info.custom.names}
        columns["custom"] = read_features(info.custom, custom_columns, len(item))
    return columns


def _category_codes(strings: pa.Array, values: list[str]) -> NDArray[np.int32]:
    """Return the index of each string in `values`, from 1; 0 for other strings."""
    index = pc.fill_null(pc.index_in(strings, pa.array(values, pa.string())), -1)
    return index.to_numpy(zero_copy_only=False).astype(np.int32) + 1


def _narrow(values: NDArray) -> NDArray:
    """Return the values as uint8 or float16 if that is exact, else unchanged."""
    for dtype in (np.uint8, np.float16):
        with np.errstate(invalid="ignore", over="ignore"):
            narrow = values.astype(dtype)
        if np.array_equal(narrow, values, equal_nan=dtype is np.float16):
            return narrow
    return values


@dataclass(frozen=True)
class ActionsOptions:
    """Options of a dataset of actions."""

    window_overlap: float = 0.5
    """Share of `max_history` by which a user's training examples overlap."""
    keep_empty: bool = False
    """Whether evaluation has examples of users without a candidate too."""


class ActionsDataset(RequestDataset):
    """The events of one split, in examples of one user.

    Units of a training example:

    - `user`: a sequence of training events, all of them context. Each event is learned
      in one example.
    - `split_sequence`: a sequence cut into context and candidates, for models that
      learn candidates only. The cut is drawn uniformly for each example and epoch, and
      spread evenly over the rows of a batch, so that a batch learns about half of its
      events. At least one event is a candidate. Events that another example learns are
      context.

    In val and test, the context is the latest `max_history` events before the split.
    The candidates are all events of the user in the split; the context may be empty.
    """

    kind = "actions"
    decode = staticmethod(decode_sequences)
    request_unit = "sequences of events"
    learned_unit = "events"
    options: ActionsOptions

    begin: NDArray[np.int64]
    """(n,) index of each example's first event in the columns."""
    context: NDArray[np.int64]
    """(n,) number of context events."""
    shared: NDArray[np.int64]
    """(n,) number of first context events that are not learned in this example."""

    @classmethod
    def parquet_columns(cls, info: ActionsInfo) -> list[str]:
        """Return the columns to read, including viewer-side and custom features."""
        viewers = [f"cat_{name}" for name in info.viewers]
        vectors = ("actions", "tasks", "features")
        ends = ("train_end", "val_end")
        return [
            "item_index",
            "timestamp_ms",
            *viewers,
            *info.custom.names,
            *vectors,
            *ends,
        ]

    def _plan(self) -> None:
        """Cut the events of the split into examples."""
        is_train = self.split == "train"
        windows = self._training_windows() if is_train else self._evaluation_windows()
        begin = self.offsets[windows.user] + windows.begin
        if is_train and self.new_examples:
            shared = self._count_not_learned(begin, windows.context, windows.shared)
            has_learned_events = shared < windows.context
            windows = windows._replace(shared=shared)
            windows = _Windows(*(values[has_learned_events] for values in windows))
            begin = begin[has_learned_events]
        self.user, self.begin = windows.user, begin
        self.context, self.shared = windows.context, windows.shared
        self.lengths = windows.context + windows.candidates
        self.weights = self.lengths if is_train else np.ones_like(self.lengths)
        self.num_requests = len(windows.user)
        self.num_learned = int((windows.context - windows.shared).sum())

    def _training_windows(self) -> _Windows:
        """Return the windows of training, which have no candidates."""
        num_events = self.columns["train_end"].astype(np.int64)  # by user
        overlap = int(self.options.window_overlap * self.max_history)
        stride = max(1, self.max_history - overlap)
        excess = np.maximum(num_events - self.max_history, 0)
        num_windows = np.where(num_events > 0, 1 + (excess + stride - 1) // stride, 0)
        user = row_numbers(num_windows)  # by window, as are the arrays below
        first_window = np.repeat(lengths_to_starts(num_windows), num_windows)
        index = np.arange(len(user)) - first_window  # within the user
        end = num_events[user] - (num_windows[user] - 1 - index) * stride
        begin = np.maximum(end - self.max_history, 0)
        return _Windows(
            user=user,
            begin=begin,
            context=end - begin,
            candidates=np.zeros_like(begin),
            shared=np.where(index > 0, end - begin - stride, 0),
        )

    def _evaluation_windows(self) -> _Windows:
        """Return the windows of val or test, which learn no event."""
        columns = self.columns
        ends = {
            "train": columns["train_end"].astype(np.int64),
            "val": columns["val_end"].astype(np.int64),
            "test": columns["behaviours_per_user"].astype(np.int64),
        }
        split_begin = ends["train" if self.split == "val" else "val"]  # by user
        split_end = ends[self.split]
        user = np.flatnonzero((split_end > split_begin) | self.options.keep_empty)
        begin = np.maximum(split_begin[user] - self.max_history, 0)
        context = split_begin[user] - begin
        candidates = (split_end - split_begin)[user]
        return _Windows(user, begin, context, candidates, shared=context)

    def _count_not_learned(
        self, begin: NDArray, context: NDArray, shared: NDArray
    ) -> NDArray[np.int64]:
        """Return `shared` with the old events of examples that are not replayed."""
        assert self.new_examples is not None
        old_before = np.append(
            0, np.cumsum(self.columns["time"] < self.new_examples.since)
        )
        num_old = old_before[begin + context] - old_before[begin]
        is_replayed = self.new_examples.mask(
            np.full(len(begin), self.new_examples.since - 1)
        )
        return np.where(is_replayed, shared, np.maximum(shared, num_old))

    def num_steps(self, batch_size: int) -> int:
        """Return the number of steps of an epoch.

        Args:
            batch_size: Mean number of examples of a step; steps have equally many
                events.
        """
        return math.ceil(len(self) / batch_size)

    def _sample_batch(
        self, rows: NDArray[np.int64], seed: list[int]
    ) -> NDArray[np.int64]:
        """Draw the cuts of a batch's sequences, for the unit `split_sequence`."""
        if self.unit != "split_sequence":
            return rows
        rng = np.random.default_rng(seed)
        share = (rng.random() + np.arange(len(rows)) * GOLDEN_RATIO) % 1
        shared = self.shared[rows]
        context = shared + (share * (self.lengths[rows] - shared)).astype(np.int64)
        return np.stack([rows, context], 1)

    def sort_for_evaluation(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sort examples by context length, in powers of two, then by candidates."""
        context = self.context[rows]
        candidates = self.lengths[rows] - context
        octave = np.log2(context + 1).astype(np.int64)
        return rows[np.lexsort((context, candidates, octave))]

    def cut_batches(
        self, rows: NDArray[np.int64], batch_size: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the examples in batches.

        A batch has at most `batch_size` examples and, unless it has a single example,
        at most `MAX_PAIRS` pairs of a candidate and a context event.
        """
        first = 0
        max_context, max_candidates = 1, 0
        for i, row in enumerate(rows):
            context = max(1, int(self.context[row]))
            candidates = int(self.lengths[row] - self.context[row])
            max_context = max(max_context, context)
            max_candidates = max(max_candidates, candidates)
            num_pairs = (i - first + 1) * max_candidates * (max_context + 1)
            if i > first and (i - first == batch_size or num_pairs > MAX_PAIRS):
                yield rows[first:i]
                first = i
                max_context, max_candidates = context, candidates
        if len(rows):
            yield rows[first:]

    def collate(self, rows: NDArray[np.int64]) -> ActionsBatch:
        """Collate examples into a batch, with padding on the right.

        Args:
            rows: (B,) examples, or (B, 2) examples and their context lengths, for the
                unit `split_sequence`.
        """
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
            context_values = pad_ragged(values, index, inside, 0)
            tensors[name] = torch.from_numpy(context_values).to(dtype)
            if name != "action":
                candidate_values = pad_ragged(
                    values, candidate_index, candidate_inside, 0
                )
                tensors[f"candidate_{name}"] = torch.from_numpy(candidate_values).to(
                    dtype
                )
        valid = torch.from_numpy(inside)
        position = np.arange(index.shape[1])
        is_not_shared = torch.from_numpy(position >= self.shared[rows, None])
        return ActionsBatch(
            user_row=torch.from_numpy(self.user[rows]),
            valid=valid,
            learn=valid & is_not_shared,
            candidate_valid=torch.from_numpy(candidate_inside),
            has_ties=has_tied_times(tensors["time"], valid),
            **tensors,  # type: ignore[arg-type]
        )

    def candidate_keys(self, batch: ActionsBatch) -> dict[str, Tensor]:
        """Return the user, request, time, item and labels of each candidate.

        The candidates of a user with the same timestamp form one request. Impressions
        have no query, so `query` is -1.
        """
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
