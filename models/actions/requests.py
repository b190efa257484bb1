"""Actions requests: from rows of `sequences` to batches, and the served request.

    selection = ActionsSelection("train", "user", 1024)
    dataset = Dataset(ACTIONS, sequences, selection)

The rows of a training batch have similar lengths, which keeps padding small. Training
batches have about equally many events, so that all events have the same weight in the
loss. A user with more than `max_history` training events has several examples, cut
from the last event backwards. These examples overlap by `window_overlap * max_history`
events. An event in two examples is learned in the earlier one and is history in the
later one. Units of a training example:

- `user`: a sequence of training events, all of them context. Each event is learned in
  one example.
- `split_sequence`: a sequence cut into context and candidates, for models that learn
  candidates only. The cut is drawn uniformly for each example and epoch, and spread
  evenly over the rows of a batch, so that a batch learns about half of its events. At
  least one event is a candidate. Events that another example learns are context.

In val and test, the context is the latest `max_history` events before the split. The
candidates are all events of the user in the split; the context may be empty.

In a served request, actions are numbers from 0 to 1; `inputs` in the model's metadata
defines their scale. An action that is left out counts as not taken. `new_items` may
hold items that are not in the catalogue, each with its `item_id`, and its text and
attributes by name. New items can be candidates or part of the history; the model reads
them by their content. A missing value of an item counts as unknown, as does a category
that is not in the training data. A late feature that is left out is replaced by its
mean over training.

Each context event and candidate reads the context events with a strictly earlier
timestamp. Events with the same millisecond, such as the events of one page in many
logs, do not read each other. The order of events of equal time is irrelevant, except in
LAC, which reads one action before an event.

Shapes: `B` rows, `T` context events, `C` candidates, `A` kinds of action, `K` tasks,
`F` late features, `V` viewer-side categories, `O` custom features of the log, `I` items
of the catalogue, `M` new items, `X` numbers and `G` categories of an item, `W` width of
text, `n` examples.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Required, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from core.ragged import lengths_to_offsets, pad_indices, pad_ragged, row_numbers
from core.schemas import ActionsInfo
from models.actions.catalogue import ActionsCatalogue
from models.custom_features import CATEGORY, NUMBER, read_features
from models.dataset.batch import Batch, axes
from models.dataset.dataset import Columns, Examples, Kind, Selection
from models.requests import (
    CandidateRequest,
    ItemId,
    RequestColumns,
    Requests,
    Settings,
    Text,
    Texts,
    Time,
    Vectors,
    custom_schema,
    make_dict,
    refuse_large,
)
from models.text.text_encoder import TextCache, format_item_texts, text_columns

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Step, modulo 1, between the cuts of a batch's rows, which spreads them evenly."""

MAX_PAIRS = 1 << 24
"""Maximum B x C x (T + 1) of an evaluation batch with several rows, which bounds the
memory of attention scores."""

EVENT_COLUMNS = ("item", "time", "action", "label", "feature", "viewer", "custom")
"""Columns by event; `viewer` and `custom` exist only if the log has them."""

TENSOR_TYPES = {"item": torch.int64, "time": torch.int64, "viewer": torch.int64}
"""Types of a batch's tensors; others are float32."""


@dataclass(frozen=True, kw_only=True)
class ActionsBatch(Batch):
    """A batch of users, each with a context and candidates.

    The context holds past events ordered by time, each with its actions and labels.
    Candidates are events whose actions are predicted, all in one pass and independently
    of each other. The batch has the labels of a candidate, but not its actions.
    """

    bucket_axes: ClassVar[tuple[str, ...]] = ("B", "T", "C")

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    item: Tensor = axes("B", "T")
    """(B, T) int64 `item_index`; I and above are new items."""
    time: Tensor = axes("B", "T")
    """(B, T) int64 ms, ascending in each row."""
    action: Tensor = axes("B", "T", "A")
    """(B, T, A) float32 actions of the user on the item, from 0 to 1."""
    label: Tensor = axes("B", "T", "K")
    """(B, T, K) float32 label of each task, 0 or 1."""
    feature: Tensor = axes("B", "T", "F")
    """(B, T, F) float32 late features: counts as of the time of the event."""
    valid: Tensor = axes("B", "T")
    """(B, T) bool, false at padding, which follows the events."""
    learn: Tensor = axes("B", "T")
    """(B, T) bool, true for events that are learned; an event is learned in one
    example."""
    candidate_item: Tensor = axes("B", "C")
    """(B, C) int64 `item_index`, in any order; C may be 0 in training."""
    candidate_time: Tensor = axes("B", "C")
    """(B, C) int64 ms."""
    candidate_label: Tensor = axes("B", "C", "K")
    """(B, C, K) float32 label of each task, 0 or 1."""
    candidate_feature: Tensor = axes("B", "C", "F")
    """(B, C, F) float32 late features."""
    candidate_valid: Tensor = axes("B", "C")
    """(B, C) bool, false at padding."""
    viewer: Tensor | None = axes("B", "T", "V", default=None)
    """(B, T, V) int64 viewer-side categories of the event, 0 for an unknown value; None
    if the log has none."""
    candidate_viewer: Tensor | None = axes("B", "C", "V", default=None)
    """(B, C, V) int64 viewer-side categories."""
    custom: Tensor | None = axes("B", "T", "O", default=None)
    """(B, T, O) float32 custom features of the log, from `CustomFeatures.matrix`; None
    if the log has none."""
    candidate_custom: Tensor | None = axes("B", "C", "O", default=None)
    """(B, C, O) float32 custom features of the log."""
    new_numbers: Tensor | None = axes("M", "X", default=None)
    """(M, X) float32 numbers of the new items of served requests; None without new
    items."""
    new_categories: Tensor | None = axes("M", "G", default=None)
    """(M, G) int64 categories of the new items."""
    new_text: Tensor | None = axes("M", "W", default=None)
    """(M, W) float32 text vectors of the new items."""
    has_ties: bool = True
    """Whether context events of a row may share a timestamp; attention is faster
    without ties."""

    def join(self, name: str) -> Tensor:
        """Return a field of the context, then of the candidates, (B, T + C, ...)."""
        return torch.cat([getattr(self, name), getattr(self, f"candidate_{name}")], 1)

    def candidate_keys(self) -> dict[str, Tensor]:
        """Return the user, request, time, item and labels of each valid candidate.

        The candidates of a user with the same timestamp form one request. Impressions
        have no query, so `query` is -1.
        """
        valid = self.candidate_valid
        time = self.candidate_time[valid]
        return {
            "user_row": self.user_row[:, None].expand_as(valid)[valid],
            "request": time,
            "time": time,
            "query": torch.full_like(time, -1),
            "item": self.candidate_item[valid],
            "labels": self.candidate_label[valid],
        }

    def count_earlier(self) -> Tensor:
        """Count the strictly earlier context events of each event and candidate.

        Returns:
            (B, T + C) int64. A count of n refers to the first n events of the row.
        """
        last = torch.iinfo(torch.int64).max
        # ascending, padding included
        context_time = self.time.masked_fill(~self.valid, last)
        times = torch.cat([context_time, self.candidate_time], 1)
        return torch.searchsorted(context_time, times)


def list_columns(info: ActionsInfo) -> list[str]:
    """Return the columns that `decode` reads, with viewer-side and custom features."""
    events = ["item_index", "timestamp_ms", *list_logged(info)]
    return [*events, "actions", "tasks", "features", "train_end", "val_end"]


def decode(table: pa.Table, info: ActionsInfo) -> Columns:
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
    item = item_lists.flatten().to_numpy().astype(np.int32)

    def by_event(name: str) -> pa.Array:
        return table[name].combine_chunks().flatten()

    def vectors(name: str, width: int) -> NDArray:
        """Return vectors (events, width) as uint8 or float16 if that is exact."""
        if not width:
            return np.zeros((len(item), 0), np.uint8)
        values = by_event(name).flatten().to_numpy(zero_copy_only=False)
        values = values.reshape(-1, width)
        for dtype in (np.uint8, np.float16):
            with np.errstate(invalid="ignore", over="ignore"):
                narrow = values.astype(dtype)
            if np.array_equal(narrow, values, equal_nan=dtype is np.float16):
                return narrow
        return values

    columns = {
        "behaviours_per_user": pc.list_value_length(item_lists).to_numpy(),
        "train_end": table["train_end"].to_numpy().astype(np.int32),
        "val_end": table["val_end"].to_numpy().astype(np.int32),
        "item": item,
        "time": by_event("timestamp_ms").to_numpy(),
        "action": vectors("actions", len(info.actions)),
        "label": vectors("tasks", len(info.tasks)),
        "feature": vectors("features", len(info.features)),
    }
    logged = {name: by_event(name) for name in list_logged(info)}
    return columns | read_logged(info, logged, len(item))


def list_logged(info: ActionsInfo) -> list[str]:
    """Return the columns of viewer-side categories and custom features."""
    return [*(CATEGORY + name for name in info.viewers), *info.custom.names]


def read_logged(
    info: ActionsInfo, columns: Mapping[str, pa.Array], num_events: int
) -> Columns:
    """Return the columns `viewer` and `custom` if the log has them."""
    logged: Columns = {}
    if info.viewers:
        codes = []
        for name, values in info.viewers.items():
            vocabulary = pa.array(values, pa.string())
            index = pc.index_in(columns[CATEGORY + name], vocabulary)
            codes.append(pc.fill_null(index, -1).to_numpy().astype(np.int32) + 1)
        logged["viewer"] = np.stack(codes, 1)
    if info.custom.names:
        logged["custom"] = read_features(info.custom, columns, num_events)
    return logged


@dataclass(frozen=True)
class ActionsSelection(Selection):
    """The examples of a dataset of actions."""

    window_overlap: float = 0.5
    """Share of `max_history` by which a user's training examples overlap."""
    keep_empty: bool = False
    """Whether evaluation has examples of users without a candidate too."""


@dataclass(frozen=True, kw_only=True)
class ActionsExamples(Examples):
    """Windows of users' events: context, followed by candidates."""

    arrays: ClassVar[tuple[str, ...]] = (
        *Examples.arrays,
        "begin",
        "context",
        "shared",
    )
    counts_examples: ClassVar[bool] = True

    begin: NDArray[np.int64]
    """(n,) index of each example's first event in the columns."""
    context: NDArray[np.int64]
    """(n,) number of context events."""
    shared: NDArray[np.int64]
    """(n,) number of first context events that are not learned in this example."""

    def sort_order(self) -> NDArray[np.int64]:
        """Return the order by context length, in powers of two, then by candidates."""
        candidates = self.lengths - self.context
        octave = np.log2(self.context + 1).astype(np.int64)
        return np.lexsort((self.context, candidates, octave))

    def cut(self, batch_size: int) -> Iterator[slice]:
        """Cut the examples into batches.

        A batch has at most `batch_size` examples and, unless it has a single example,
        at most `MAX_PAIRS` pairs of a candidate and a context event.
        """
        first, max_context, max_candidates = 0, 1, 0
        candidates = self.lengths - self.context
        sizes = zip(self.context.tolist(), candidates.tolist(), strict=True)
        for i, (context, num_candidates) in enumerate(sizes):
            max_context = max(max_context, context)
            max_candidates = max(max_candidates, num_candidates)
            num_pairs = (i - first + 1) * max_candidates * (max_context + 1)
            if i > first and (i - first == batch_size or num_pairs > MAX_PAIRS):
                yield slice(first, i)
                first, max_context, max_candidates = i, max(1, context), num_candidates
        if len(self):
            yield slice(first, len(self))

    def draw(self, seed: list[int]) -> Self:
        """Draw the cuts of a batch's sequences, for the unit `split_sequence`."""
        if self.selection.unit != "split_sequence":
            return self
        rng = np.random.default_rng(seed)
        share = (rng.random() + np.arange(len(self)) * GOLDEN_RATIO) % 1
        drawn = (share * (self.lengths - self.shared)).astype(np.int64)
        return replace(self, context=self.shared + drawn)


def plan(columns: Columns, selection: ActionsSelection) -> ActionsExamples:
    """Cut the events of the split into examples."""
    max_history, split = selection.max_history, selection.split
    offsets = lengths_to_offsets(columns["behaviours_per_user"])
    train_end = columns["train_end"].astype(np.int64)  # by user, as is `val_end`
    val_end = columns["val_end"].astype(np.int64)
    if split == "train":  # windows without candidates
        stride = max(1, max_history - int(selection.window_overlap * max_history))
        excess = np.maximum(train_end - max_history, 0)
        num_windows = np.where(train_end > 0, 1 + (excess + stride - 1) // stride, 0)
        user = row_numbers(num_windows)  # by window, as are the arrays below
        index = np.arange(len(user)) - lengths_to_offsets(num_windows)[user]
        end = train_end[user] - (num_windows[user] - 1 - index) * stride
        begin = np.maximum(end - max_history, 0)
        context = lengths = end - begin
        shared = np.where(index > 0, context - stride, 0)
    else:  # context without a learned event, and the candidates
        split_begin = train_end if split == "val" else val_end
        split_end = val_end if split == "val" else columns["behaviours_per_user"]
        user = np.flatnonzero((split_end > split_begin) | selection.keep_empty)
        begin = np.maximum(split_begin[user] - max_history, 0)
        context = shared = split_begin[user] - begin
        lengths = split_end[user] - begin
    begin = offsets[user] + begin
    if selection.new:
        is_old = columns["time"] < selection.new.since
        old_before = np.append(0, np.cumsum(is_old))
        num_old = old_before[begin + context] - old_before[begin]
        # a replayed example learns its old events too
        before = np.full(len(begin), selection.new.since - 1)
        is_replayed = selection.new.mask(before)
        shared = np.where(is_replayed, shared, np.maximum(shared, num_old))
    examples = ActionsExamples(
        columns=columns,
        selection=selection,
        user=user,
        lengths=lengths,
        weights=lengths if split == "train" else np.ones_like(lengths),
        num_requests=len(user),
        num_learned=int((context - shared).sum()),
        begin=begin,
        context=context,
        shared=shared,
    )
    if not selection.new:
        return examples
    examples = examples.take(np.flatnonzero(shared < context))
    return replace(examples, num_requests=len(examples))


def collate(examples: ActionsExamples) -> ActionsBatch:
    """Collate examples into a batch, with padding on the right."""
    context, columns = examples.context, examples.columns
    index, inside = pad_indices(examples.begin, context)
    candidate_index, candidate_inside = pad_indices(
        examples.begin + context, examples.lengths - context, 0
    )
    tensors: dict[str, Tensor] = {}
    for name in EVENT_COLUMNS:
        if name not in columns:
            continue
        values, dtype = columns[name], TENSOR_TYPES.get(name, torch.float32)
        past = pad_ragged(values, index, inside, 0)
        tensors[name] = torch.from_numpy(past).to(dtype)
        if name != "action":
            asked = pad_ragged(values, candidate_index, candidate_inside, 0)
            tensors[f"candidate_{name}"] = torch.from_numpy(asked).to(dtype)
    valid = torch.from_numpy(inside)
    is_shared = np.arange(index.shape[1]) < examples.shared[:, None]
    time = tensors["time"]
    is_tied = (time[:, 1:] == time[:, :-1]) & valid[:, 1:]
    return ActionsBatch(
        user_row=torch.from_numpy(examples.user),
        valid=valid,
        learn=valid & ~torch.from_numpy(is_shared),
        candidate_valid=torch.from_numpy(candidate_inside),
        has_ties=bool(is_tied.any()),
        **tensors,  # type: ignore[arg-type]
    )


ACTIONS = Kind(
    "actions",
    decode,
    list_columns,
    plan,
    collate,
    ActionsSelection,
    request_unit="sequences of events",
    learned_unit="events",
)

LATEST_MS = 1 << 62
"""A time later than all times of logs."""
EARLIEST_MS = -(1 << 62)
"""A time earlier than all times of logs."""


Number = Annotated[float | None, AfterValidator(refuse_large)]


def check_actions(vectors: list[list[float | None]]) -> list[list[float | None]]:
    """Return actions; NaN and None are missing values."""
    for vector in vectors:
        actions = np.array(vector, np.float64)
        if ((actions < 0) | (actions > 1)).any():
            raise ValueError("an action is not from 0 to 1")
    return vectors


class ActionsRequest(CandidateRequest):
    """A request to predict a user's actions on candidates.

    Behaviours at the time of the request or later are ignored.
    """

    history_actions: Annotated[Vectors, AfterValidator(check_actions)]
    """Actions of each behaviour, in the order of the model's metadata."""

    history_time_ms: Annotated[list[Time], Field(fail_fast=True)] | None = None  # type: ignore[assignment]

    @model_validator(mode="after")
    def check_times(self) -> Self:
        """Raise ValueError for times that fall."""
        times = self.history_time_ms or []
        if times != sorted(times):
            raise ValueError("history_time_ms falls")
        return self


def field_name(column: str) -> str:
    """Return the name of an item's column in requests: `title` for `text_title`."""
    return column.partition("_")[2]


class ActionsRequests(Requests):
    """Reader of requests to predict a user's actions on candidates."""

    base_class = ActionsRequest

    def __init__(
        self,
        folder: str,
        model: Any,
        catalogue: ActionsCatalogue,
        settings: Settings,
    ) -> None:
        text = catalogue.versions.get("text_items")
        self.template = str(text.config.get("template", "")) if text else ""
        names = catalogue.versions["items"].columns
        columns = [name for name in names if name.startswith((NUMBER, CATEGORY))]
        if text:
            columns += text_columns(names, self.template).values()
        self.content = list(dict.fromkeys(columns))
        """Columns of items that the model reads: attributes and parts of the text."""
        self.cache: TextCache[str] = TextCache()
        super().__init__(folder, model, catalogue, settings)
        self.feature_mean = catalogue.feature_mean.numpy()

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of custom features, viewer-side categories, new items."""
        fields = super().log_fields()
        for name in self.info.viewers:
            fields[f"viewer_{name}"] = (Text | None, None)
            fields[f"history_viewer_{name}"] = (Texts | None, None)
        content = {
            field_name(name): Number if name.startswith(NUMBER) else Text | None
            for name in self.content
        }
        item: Any = make_dict("NewItem", {"item_id": Required[ItemId], **content})
        return {**fields, "new_items": (list.__class_getitem__(item), [])}

    @classmethod
    def list_names(cls, info: ActionsInfo) -> dict[str, Any]:
        """Return the names that requests refer to, and the definitions of actions."""
        return {
            **super().list_names(info),
            "labels": info.tasks,
            "features": info.features,
            "actions": info.actions,
            "viewers": list(info.viewers),
            "inputs": asdict(info.definitions)["inputs"],
        }

    def find_known(self, request: Any, ids: Sequence[str]) -> list[int]:
        """Return the positions of ids in the catalogue or among the new items."""
        new = {item["item_id"] for item in request.new_items}
        return [i for i, item in enumerate(ids) if item in self.index or item in new]

    def find_past(self, request: Any) -> list[int]:
        """Return the positions of the latest behaviours before the request."""
        past, times = self.find_known(request, request.history), request.history_time_ms
        if times and request.timestamp_ms is not None:
            past = [i for i in past if times[i] < request.timestamp_ms]
        return past[-self.max_history :]

    def to_columns(self, requests: Sequence[Any]) -> RequestColumns:
        """Return the events of requests as columns.

        Each request's behaviours precede its candidates.
        """
        info: ActionsInfo = self.info
        past, shown = self.split_entries(requests)
        num_past = len(past.request)
        # all behaviours, then all candidates
        row = np.concatenate([past.request, shown.request])
        ids = zip(row, past.read("history") + shown.read("candidates"), strict=True)
        new = self.find_new_items(requests)
        numbers = dict(zip(new, itertools.count(len(self.items)), strict=False))
        item = [self.index.get(id_, numbers.get((i, id_))) for i, id_ in ids]
        now = [
            LATEST_MS if request.timestamp_ms is None else request.timestamp_ms
            for request in requests
        ]
        time = [
            EARLIEST_MS + index if time is None else time
            for index, time in enumerate(past.read("history_time_ms"))
        ]
        # candidates have no actions, and behaviours no features
        action = np.zeros((len(row), len(info.actions)), np.float32)
        action[:num_past] = past.read_vectors("history_actions", action[:num_past])
        feature = np.tile(self.feature_mean, (len(row), 1))
        feature[num_past:] = shown.read_vectors("features", feature[num_past:])
        logged = {}
        for name in info.viewers:
            viewers = past.read(f"history_viewer_{name}")
            viewers += [getattr(requests[i], f"viewer_{name}") for i in shown.request]
            logged[CATEGORY + name] = pa.array(viewers, pa.string())
        custom = past.read_custom(info.custom)
        for name, values in shown.read_custom(info.custom).items():
            logged[name] = pa.concat_arrays([custom[name], values])
        events = {
            "item": np.array(item),
            "time": np.array(time + [now[i] for i in shown.request]),
            "action": action,
            "feature": feature,
            "label": np.zeros((len(row), len(info.tasks)), np.uint8),
            **read_logged(info, logged, len(row)),
        }
        # by request, behaviours first
        order = np.argsort(row, kind="stable")
        columns = {
            **{name: values[order] for name, values in events.items()},
            "behaviours_per_user": past.counts + shown.counts,
            "train_end": np.zeros_like(past.counts),
            "val_end": past.counts,
        }
        return columns, {"keep_empty": True}

    def find_new_items(self, requests: Sequence[Any]) -> dict[tuple[int, str], Any]:
        """Return new items of requests, by the row of the request and the item's id."""
        new = {}
        for row, request in enumerate(requests):
            for item in request.new_items:
                if item["item_id"] not in self.index:
                    new[row, item["item_id"]] = item
        return new

    def collate(self, requests: Sequence[Any], max_history: int) -> ActionsBatch:
        """Return the batch of requests, with the new items of all requests."""
        batch = super().collate(requests, max_history)
        new_items = self.find_new_items(requests).values()
        if not new_items:
            return batch  # type: ignore[no-any-return]
        return replace(batch, **self.read_new_items(list(new_items)))

    def read_new_items(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields `new_*` of `ActionsBatch`, each a tensor (n, ...)."""
        content = [
            {column: item.get(field_name(column)) for column in self.content}
            for item in items
        ]
        table = pa.Table.from_pylist(content, custom_schema(self.content))
        numbers, categories = self.catalogue.attributes.read(table)
        catalogue_text = self.catalogue.text
        width = catalogue_text.shape[1] if catalogue_text.numel() else 0
        text = np.zeros((len(items), width), np.float32)
        if width and self.encoder:
            texts = format_item_texts(table, self.template)[0]
            text = self.cache.encode(texts, self.encoder.encode).astype(np.float32)
        elif width:
            warnings.warn(
                f"the model was saved without its text encoder; {len(items)} new items "
                "are scored without their text",
                stacklevel=2,
            )
        return {
            "new_numbers": numbers,
            "new_categories": categories,
            "new_text": torch.from_numpy(text),
        }
