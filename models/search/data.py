"""Examples and batches of a search log.

    options = SearchOptions(text=catalogue.text)
    dataset = SearchDataset.load(sequences, "train", "user", 100, options)
    for batch in dataset.epoch(100, seed=1, epoch=0): ...

An example is a history with all requests that it serves, so that one encoder pass
serves all these requests. The candidates of all requests of a batch form one flat axis.
A candidate refers to its request. A request refers to its row and has the number of the
row's behaviours before the request.

Shapes: `B` rows, `T` behaviours, `R` requests, `N` candidates, `Q` distinct queries,
`P` distinct pairs of item and query, `F` features, `K` labels, `W` width of text,
`n` examples, `m` requests of the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.ragged import (
    find_rows,
    gather_ranges,
    lengths_to_offsets,
    pad_indices,
    pad_ragged,
    row_numbers,
    run_starts,
)
from core.schemas import CustomFeatures, SearchInfo
from core.splits import SPLITS
from models.custom_features import read_features
from models.dataset.batch import Batch, axes
from models.dataset.columns import Columns
from models.dataset.dataset import RequestDataset
from models.dataset.encoding import (
    PAD,
    decode_splits,
    request_columns,
    request_number,
    to_tensor,
)
from models.search.catalogue import NO_QUERY, SearchText

MAX_REQUESTS = 64
"""Maximum number of requests of an example, which bounds the size of a batch."""


@dataclass(frozen=True, kw_only=True)
class SearchBatch(Batch):
    """A batch of histories, with their requests and the requests' candidates."""

    bucket_axes: ClassVar[tuple[str, ...]] = ("B", "T", "R", "N", "Q", "P")

    history: Tensor = axes("B", "T", padding=PAD)
    """(B, T) int64 `item_index`, oldest first, -1 at padding."""
    history_query: Tensor = axes("B", "T", padding=NO_QUERY)
    """(B, T) int64 `query_index` of each behaviour, -1 without a query."""
    history_time: Tensor = axes("B", "T")
    """(B, T) int64 ms."""
    history_features: Tensor = axes("B", "T", "F")
    """(B, T, F) float32."""
    history_length: Tensor = axes("B")
    """(B,) int64 number of behaviours of each history."""
    history_new: Tensor = axes("B")
    """(B,) int64 position of the first behaviour that no earlier example of the user
    learns."""
    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    request_row: Tensor = axes("R")
    """(R,) int64 row of each request."""
    request_end: Tensor = axes("R")
    """(R,) int64 number of the row's behaviours before the request."""
    request_query: Tensor = axes("R", padding=NO_QUERY)
    """(R,) int64 `query_index`, -1 without a query."""
    request_time: Tensor = axes("R")
    """(R,) int64 ms."""
    request: Tensor = axes("R")
    """(R,) int64 `request_number`."""
    candidate: Tensor = axes("N")
    """(N,) int64 `item_index`."""
    candidate_request: Tensor = axes("N")
    """(N,) int64 request of each candidate, ascending."""
    candidate_position: Tensor = axes("N")
    """(N,) int64 position at which the candidate was shown."""
    candidate_valid: Tensor = axes("N")
    """(N,) bool, false at padding."""
    labels: Tensor = axes("N", "K")
    """(N, K) bool."""
    features: Tensor = axes("N", "F")
    """(N, F) float32."""
    query_text: Tensor = axes("Q", "W")
    """(Q, W) float32 vectors of the batch's distinct queries."""
    request_query_text: Tensor = axes("R", padding=-1)
    """(R,) int64 row of `query_text`, -1 without a query."""
    history_query_text: Tensor = axes("B", "T", padding=-1)
    """(B, T) int64 row of `query_text`, -1 without a query or if the model does not
    read it."""
    pair_text: Tensor = axes("P", "W")
    """(P, W) float32 vectors of the batch's distinct pairs of item and query."""
    joint_text: Tensor = axes("P", "W")
    """(P, W) float32 [SEP] vectors of the pairs of `pair_text`, or (P, 0)."""
    candidate_pair_text: Tensor = axes("N", padding=-1)
    """(N,) int64 row of `pair_text`, -1 without a query or a vector."""
    history_pair_text: Tensor = axes("B", "T", padding=-1)
    """(B, T) int64 row of `pair_text`, -1 without a query or if the model does not
    read it."""


def decode_sequences(table: pa.Table, info: SearchInfo) -> Columns:
    """Decode one part of the sequences of a search log.

    Returns:
        Columns by user: `behaviours_per_user` and `requests_per_user`. By behaviour:
        `item`, `time`, `query` and `history_features`. By request: `history_end`,
        `split`, `request_query`, `request_time` and `candidates_per_request`. By
        candidate: `candidate`, `position`, `labels` and `features`.
    """
    item_lists = table["item_index"].combine_chunks()
    items = item_lists.flatten().to_numpy()
    request_lists = table["requests"].combine_chunks()
    requests = request_lists.flatten()
    candidate_lists = pc.struct_field(requests, "candidates")
    candidates = candidate_lists.flatten().to_numpy()

    def by_behaviour(name: str) -> pa.Array:
        return table[name].combine_chunks().flatten()

    def by_request(name: str) -> NDArray:
        return pc.struct_field(requests, name).to_numpy()

    def by_candidate(name: str) -> pa.Array:
        return pc.struct_field(requests, name).flatten()

    history_vectors = by_behaviour("features").flatten().to_numpy()
    num_features = len(info.features)
    history_features = _join_custom_features(
        history_vectors.reshape(len(items), num_features),
        info.custom,
        {name: by_behaviour(name) for name in info.custom.names},
    )
    vectors = by_candidate("features").to_numpy()
    features = _join_custom_features(
        vectors.reshape(len(candidates), num_features),
        info.custom,
        {name: by_candidate(name) for name in info.custom.names},
    )
    label_columns = [by_candidate(f"label_{name}") for name in info.labels]
    return {
        "behaviours_per_user": pc.list_value_length(item_lists).to_numpy(),
        "requests_per_user": pc.list_value_length(request_lists).to_numpy(),
        "item": items,
        "time": by_behaviour("timestamp_ms").to_numpy(),
        "query": by_behaviour("query_index").to_numpy().astype(np.int32),
        "history_features": history_features,
        "history_end": by_request("history_end").astype(np.int32),
        "split": decode_splits(pc.struct_field(requests, "split")),
        "request_query": by_request("query_index").astype(np.int32),
        "request_time": by_request("timestamp_ms"),
        "candidates_per_request": pc.list_value_length(candidate_lists).to_numpy(),
        "candidate": candidates,
        "position": by_candidate("positions").to_numpy(),
        "labels": np.stack(
            [column.to_numpy(zero_copy_only=False) for column in label_columns], 1
        ),
        "features": features,
    }


def _join_custom_features(
    vectors: NDArray, custom_features: CustomFeatures, columns: dict[str, pa.Array]
) -> NDArray[np.float32]:
    """Append custom features to the feature vectors (n, F) of the table."""
    features = vectors.astype(np.float32, copy=False)
    if not custom_features.names:
        return features
    custom = read_features(custom_features, columns, len(vectors))
    return np.concatenate([features, custom], 1)


@dataclass(frozen=True)
class SearchOptions:
    """Options of a dataset of searches."""

    text: SearchText = SearchText.empty(0, 0)
    """Text vectors of batches; of width 0 for models that read no text."""
    window_overlap: float = 0.75
    """Minimum share of `max_history` that training reads before a request with a
    longer history."""
    batch_unit: str = "requests"
    """Unit of the size of a training batch: `requests` or `users` (examples)."""
    reads_history_queries: bool = False
    """Whether batches have the text of behaviours' queries too."""


class SearchDataset(RequestDataset):
    """The requests of one split, in examples that share a history.

    Units of an example:

    - `request`: every request has exactly the latest `max_history` behaviours before
      it. Requests whose histories begin at the same behaviour share an example; for a
      user with at most `max_history` behaviours, these are all requests.
    - `user`: the behaviours of a user are cut into overlapping windows, so that fewer
      encoder passes serve all requests. A request has at least `window_overlap *
      max_history` behaviours before it, or all if there are fewer.

    A behaviour is learned once, in the earliest example that has a behaviour before it
    (`history_new`). No example has more than `MAX_REQUESTS` requests. Requests with an
    empty history have examples too, since their query can be ranked by.
    """

    kind = "search"
    decode = staticmethod(decode_sequences)
    options: SearchOptions

    requests: NDArray[np.int64]
    """(m,) index of each request of the split in the columns."""
    begin: NDArray[np.int64]
    """(n,) index of each example's first behaviour within its user."""
    end: NDArray[np.int64]
    """(n,) number of the user's behaviours before an example's last request."""
    first: NDArray[np.int64]
    """(n + 1,) index in `requests` of each example's first request."""
    first_new: NDArray[np.int64]
    """(n,) position of the first behaviour that no earlier example learns; at least 1,
    since no behaviour precedes the first one."""

    @classmethod
    def parquet_columns(cls, info: SearchInfo) -> list[str]:
        """Return the columns to read, including labels and custom features."""
        labels = [f"label_{name}" for name in info.labels]
        by_user = ["item_index", "timestamp_ms", "query_index", "features"]
        by_request = [
            "timestamp_ms",
            "query_index",
            "history_end",
            "split",
            "candidates",
            "positions",
            "features",
        ]
        requests = request_columns(*by_request, *labels, *info.custom.names)
        return [*by_user, *info.custom.names, *requests]

    def _plan(self) -> None:
        """Group the requests of the split into examples."""
        columns = self.columns
        self.request_offsets = lengths_to_offsets(columns["requests_per_user"])
        self.candidate_offsets = lengths_to_offsets(columns["candidates_per_request"])
        requests = np.flatnonzero(columns["split"] == SPLITS.index(self.split))
        if self.split == "train" and self.new_examples:
            requests = requests[
                self.new_examples.mask(columns["request_time"][requests])
            ]
        user = find_rows(self.request_offsets, requests)  # (m,)
        end = columns["history_end"][requests].astype(np.int64)  # (m,)
        begin = self._window_begin(end)  # (m,)
        first = _limit_runs(run_starts(user, begin), len(requests), MAX_REQUESTS)
        self.requests = requests
        self.num_requests = self.num_learned = len(requests)
        self.user = user[first]
        self.begin = begin[first]
        self.end = np.maximum.reduceat(end, first)
        self.first = np.append(first, len(requests))
        self.lengths = self.end - self.begin
        self.first_new = self._first_new()
        counts_requests = self.options.batch_unit == "requests" or self.split != "train"
        requests_per_example = np.diff(self.first)
        self.weights = (
            requests_per_example if counts_requests else np.ones(len(first), np.int8)
        )

    def _window_begin(self, end: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first behaviour of the window that serves each request."""
        stride = 1
        if self.unit == "user":
            stride = max(1, int(self.max_history * (1 - self.options.window_overlap)))
        excess = np.maximum(end - self.max_history, 0)
        return (excess + stride - 1) // stride * stride

    def _first_new(self) -> NDArray[np.int64]:
        """Return `first_new` from the user, begin and end of each example."""
        learned_end = np.zeros(len(self.user), np.int64)
        if len(self.user):
            same_user = self.user[1:] == self.user[:-1]
            learned_end[1:] = np.where(same_user, self.end[:-1], 0)
        return np.clip(learned_end - self.begin, 1, None)

    def collate(self, rows: NDArray[np.int64]) -> SearchBatch:
        """Collate examples into a batch, with histories padded on the right.

        Args:
            rows: (B,) examples.
        """
        columns, user = self.columns, self.user[rows]
        begin = self.begin[rows]
        first = self.first[rows]
        count = self.first[rows + 1] - first
        request = self.requests[gather_ranges(first, count)]
        request_user = np.repeat(user, count)
        number = request_number(
            request_user, request - self.request_offsets[request_user]
        )
        num_candidates = columns["candidates_per_request"][request].astype(np.int64)
        candidate = gather_ranges(self.candidate_offsets[request], num_candidates)
        index, inside = pad_indices(self.offsets[user] + begin, self.lengths[rows])
        history = pad_ragged(columns["item"], index, inside, PAD)
        history_query = pad_ragged(columns["query"], index, inside, NO_QUERY)
        history_features = pad_ragged(columns["history_features"], index, inside, 0)
        item = columns["candidate"][candidate]
        request_query = columns["request_query"][request]
        request_end = columns["history_end"][request] - np.repeat(begin, count)
        text = self.options.text.collate(
            history,
            history_query if self.options.reads_history_queries else None,
            request_query,
            item,
            num_candidates,
        )
        return SearchBatch(
            history=to_tensor(history),
            history_query=to_tensor(history_query),
            history_time=to_tensor(pad_ragged(columns["time"], index, inside, 0)),
            history_features=torch.from_numpy(history_features),
            history_length=to_tensor(self.lengths[rows]),
            history_new=to_tensor(self.first_new[rows]),
            user_row=to_tensor(user),
            request_row=to_tensor(row_numbers(count)),
            request_end=to_tensor(request_end),
            request_query=to_tensor(request_query),
            request_time=to_tensor(columns["request_time"][request]),
            request=to_tensor(number),
            candidate=to_tensor(item),
            candidate_request=to_tensor(row_numbers(num_candidates)),
            candidate_position=to_tensor(columns["position"][candidate]),
            candidate_valid=torch.ones(len(candidate), dtype=torch.bool),
            labels=torch.from_numpy(columns["labels"][candidate]),
            features=torch.from_numpy(columns["features"][candidate]),
            **text,
        )

    def candidate_keys(self, batch: SearchBatch) -> dict[str, Tensor]:
        """Return the user, request, time, query, item and labels of each candidate."""
        request = batch.candidate_request
        return {
            "user_row": batch.user_row[batch.request_row][request],
            "request": batch.request[request],
            "time": batch.request_time[request],
            "query": batch.request_query[request],
            "item": batch.candidate,
            "labels": batch.labels,
        }


def _limit_runs(
    starts: NDArray[np.int64], total: int, longest: int
) -> NDArray[np.int64]:
    """Cut runs into runs of at most `longest` values."""
    is_start = np.zeros(total, bool)
    is_start[starts] = True
    index = np.arange(total)
    run_start = np.maximum.accumulate(np.where(is_start, index, 0))  # of each value
    return np.flatnonzero((index - run_start) % longest == 0)
