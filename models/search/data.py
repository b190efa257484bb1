"""Examples and batches of a search log.

    catalogue = SearchCatalogue.load("tables", "text")
    dataset = SearchDataset.load("tables/sequences", "train", unit="user", max_history=100, text=catalogue.text)
    for batch in dataset.epoch(100, seed=1, epoch=0): ...

An example is a history with all requests that it serves, so one encoder pass serves
them all. Candidates are flat over a batch: each knows its request, each request its row
and how many of the row's behaviours lie before it.

Shapes: `B` rows, `T` behaviours, `R` requests, `N` candidates, `Q` distinct queries,
`P` distinct pairs of item and query, `F` features, `K` labels, `W` width of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.dataset.batch import Batch, axes
from models.dataset.columns import Columns
from models.dataset.dataset import SPLITS, RequestDataset
from models.own_features import OwnFeatures
from models.ragged import (
    gather_ranges,
    lengths_to_offsets,
    pad_indices,
    pad_ragged,
    row_numbers,
    run_starts,
)
from models.retrieval.data import (
    PAD,
    decode_splits,
    hash_strings,
    request_columns,
    request_number,
    to_tensor,
)
from models.search.catalogue import NO_QUERY, SearchCatalogue, SearchText
from models.storage.tables import Manifest

MAX_REQUESTS = 64
"""Requests of an example at most, so that a batch can hold the example of a user with
many searches."""


@dataclass(frozen=True, kw_only=True)
class SearchBatch(Batch):
    """Histories, the requests that they serve, and the requests' candidates."""

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
    """(B,) int64 behaviours of each history."""
    history_new: Tensor = axes("B")
    """(B,) int64 first behaviour that is learned in this example and in no other
    one."""
    user: Tensor = axes("B")
    """(B,) int64 hash of the user's id."""
    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    request_row: Tensor = axes("R")
    """(R,) int64 row of each request."""
    request_end: Tensor = axes("R")
    """(R,) int64 behaviours of the row before the request."""
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
    """(B, T) int64 row of `query_text`, -1 without a query or where models do not read
    it."""
    pair_text: Tensor = axes("P", "W")
    """(P, W) float32 vectors of the batch's distinct pairs of item and query."""
    joint_text: Tensor = axes("P", "W")
    """(P, W) float32 [SEP] vectors of the same pairs, or (P, 0)."""
    candidate_pair_text: Tensor = axes("N", padding=-1)
    """(N,) int64 row of `pair_text`, -1 without a query or a vector."""
    history_pair_text: Tensor = axes("B", "T", padding=-1)
    """(B, T) int64 row of `pair_text`, -1 without a query or where models do not read
    it."""


class SearchDataset(RequestDataset):
    """The requests of one split, in examples that share a history.

    `request`: every request sees exactly the latest `max_history` behaviours before it;
    requests whose histories begin at the same behaviour (all of a user with at most
    `max_history`) share an example. `user`: longer histories have overlapping windows,
    so that far fewer passes serve all requests, each with at least `window_overlap` of
    `max_history` behaviours before it. A behaviour is learned in the earliest example
    that has behaviours before it, and in no other one (`history_new`). No example has
    more than `MAX_REQUESTS` requests.

    Requests with an empty history are kept, as a search has its query.
    """

    kind = "search"
    default_unit = "user"
    default_max_history = 1000
    window_overlap: float = 0.75
    """Least fraction of `max_history` that training reads before a request with a
    longer history."""
    batch_unit: str = "requests"
    """Unit of a training batch's size: `requests`, or examples of `users`."""

    requests: NDArray[np.int64]
    """(m,) index of each request of the split in the columns."""
    begin: NDArray[np.int64]
    """(n,) first behaviour of each example, within its user."""
    end: NDArray[np.int64]
    """(n,) behaviours of the user before an example's last request."""
    first: NDArray[np.int64]
    """(n + 1,) index in `requests` of each example's first request."""
    first_new: NDArray[np.int64]
    """(n,) first behaviour that no earlier example has learned; at least 1, since
    nothing precedes a first behaviour."""
    text: SearchText = SearchText.empty(0, 0)
    """Text vectors that batches bring; of width 0 for models that read no text."""
    reads_history_queries: bool = False
    """Whether batches bring the text of behaviours' queries too."""

    @classmethod
    def dataset_options(cls, config: Any, catalogue: SearchCatalogue) -> dict[str, Any]:
        return {
            "window_overlap": config.window_overlap,
            "batch_unit": config.batch_unit,
            "text": catalogue.text,
            "reads_history_queries": config.reads_history_queries,
        }

    @classmethod
    def parquet_columns(cls, manifest: Manifest) -> list[str]:
        own = OwnFeatures.from_info(manifest.info).names
        labels = [f"label_{name}" for name in manifest.info["labels"]]
        by_user = ["user_id", "item_index", "timestamp_ms", "query_index", "features"]
        by_request = [
            "timestamp_ms",
            "query_index",
            "history_end",
            "split",
            "candidates",
            "positions",
            "features",
        ]
        return [*by_user, *own, *request_columns(*by_request, *labels, *own)]

    @classmethod
    def decode(cls, table: pa.Table, manifest: Manifest, uri: str) -> Columns:
        labels = [f"label_{name}" for name in manifest.info["labels"]]
        num_features = len(manifest.info["features"])
        own = OwnFeatures.from_info(manifest.info)
        return decode_sequences(table, labels, num_features, own)

    @classmethod
    def decoder_settings(cls, manifest: Manifest) -> Any:
        names = ("labels", "features", "own")
        return {name: manifest.info.get(name) for name in names}

    @classmethod
    def from_requests(
        cls,
        columns: Columns,
        lengths: NDArray,
        counts: NDArray,
        text: SearchText,
        reads_history_queries: bool,
    ) -> SearchDataset:
        """Return served requests as a dataset, each with a history and an example of its own, without labels.

        Args:
            columns: item, time, query and history_features by behaviour, end to end;
                request_query (R,); candidate and
                features by candidate, end to end.
            lengths: (R,) behaviours of each request.
            counts: (R,) candidates of each request.
            text: Text vectors, with queries numbered as in `columns`.
            reads_history_queries: Whether batches bring the text of behaviours'
                queries.
        """
        requests = len(lengths)
        candidates = len(columns["candidate"])
        whole = {
            **columns,
            "behaviours_per_user": lengths,
            "requests_per_user": np.ones(requests, np.int64),
            "user_hash": np.zeros(requests, np.int64),
            "history_end": lengths,
            "split": np.full(requests, SPLITS.index("test"), np.int8),
            "request_time": np.zeros(requests, np.int64),
            "candidates_per_request": counts,
            "position": np.zeros(candidates, np.int64),
            "labels": np.zeros((candidates, 0), bool),
        }
        return cls(
            whole,
            "test",
            "request",
            max(1, int(lengths.max(initial=1))),
            text=text,
            reads_history_queries=reads_history_queries,
        )

    def _plan(self) -> None:
        columns = self.columns
        self.request_offsets = lengths_to_offsets(columns["requests_per_user"])
        self.candidate_offsets = lengths_to_offsets(columns["candidates_per_request"])
        chosen = np.flatnonzero(columns["split"] == SPLITS.index(self.split))
        if self.split == "train" and self.new:
            chosen = chosen[self.new.mask(columns["request_time"][chosen])]
        owner = np.searchsorted(self.request_offsets, chosen, side="right") - 1
        end = columns["history_end"][chosen].astype(np.int64)
        begin = self._window_begin(end)
        first = _limit_runs(run_starts(owner, begin), len(chosen), MAX_REQUESTS)
        self.requests = chosen
        self.num_requests = self.num_learned = len(chosen)
        self.user = owner[first]
        self.begin = begin[first]
        self.end = np.maximum.reduceat(end, first) if len(first) else end[:0]
        self.first = np.append(first, len(chosen))
        self.lengths = self.end - self.begin
        self.first_new = self._first_new()
        counts_requests = self.batch_unit == "requests" or self.split != "train"
        requests_per_example = np.diff(self.first)
        self.weights = (
            requests_per_example if counts_requests else np.ones(len(first), np.int8)
        )

    def _window_begin(self, end: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first behaviour of the example that serves a request with `end` behaviours before it."""
        stride = 1
        if self.unit == "user":
            stride = max(1, int(self.max_history * (1 - self.window_overlap)))
        excess = np.maximum(end - self.max_history, 0)
        return (excess + stride - 1) // stride * stride

    def _first_new(self) -> NDArray[np.int64]:
        """Return the first behaviour of each example that the user's examples before it have not learned."""
        learned = np.zeros(len(self.user), np.int64)
        if len(self.user):
            same_user = self.user[1:] == self.user[:-1]
            learned[1:] = np.where(same_user, self.end[:-1], 0)
        return np.clip(learned - self.begin, 1, None)

    def collate(self, rows: NDArray[np.int64]) -> SearchBatch:
        """Return the examples as tensors, histories right-padded with -1 to the longest."""
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
        text = self.text.collate(
            history,
            history_query if self.reads_history_queries else None,
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
            user=to_tensor(columns["user_hash"][user]),
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
    """Cut runs that begin at `starts` and end at `total` into runs of at most `longest`; return where they begin."""
    is_start = np.zeros(total, bool)
    is_start[starts] = True
    number = np.arange(total)
    within_run = number - np.maximum.accumulate(np.where(is_start, number, 0))
    return np.flatnonzero(within_run % longest == 0)


def decode_sequences(
    table: pa.Table, labels: list[str], num_features: int, own: OwnFeatures
) -> Columns:
    """Decode one part of the sequences of a search log.

    Args:
        table: The part.
        labels: Fields of a request that hold the labels of its candidates.
        num_features: Length of the table's feature vectors.
        own: Features of the log that have columns of their own.

    Returns:
        By user (U,): behaviours_per_user, requests_per_user, user_hash. By behaviour: item, time, query,
        history_features. By request: history_end, split, request_query, request_time, candidates_per_request. By
        candidate: candidate, position, labels, features.
    """
    item_lists = table["item_index"].combine_chunks()
    items = item_lists.flatten().to_numpy()
    request_lists = table["requests"].combine_chunks()
    requests = request_lists.flatten()
    candidate_lists = pc.struct_field(requests, "candidates")
    candidates = candidate_lists.flatten().to_numpy()

    def by_behaviour(column: str) -> NDArray:
        return table[column].combine_chunks().flatten().to_numpy()

    def by_request(name: str) -> NDArray:
        return pc.struct_field(requests, name).to_numpy()

    def by_candidate(name: str) -> NDArray:
        values = pc.struct_field(requests, name).flatten()
        return values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type))

    def features(vectors: NDArray, columns: dict[str, pa.Array], rows: int) -> NDArray:
        counted = vectors.astype(np.float32).reshape(rows, num_features)
        if not own.names:
            return counted
        return np.concatenate([counted, own.matrix(columns, rows)], 1)

    past = {name: table[name].combine_chunks().flatten() for name in own.names}
    now = {name: pc.struct_field(requests, name).flatten() for name in own.names}
    past_vectors = table["features"].combine_chunks().flatten().flatten().to_numpy()
    return {
        "behaviours_per_user": pc.list_value_length(item_lists).to_numpy(),
        "requests_per_user": pc.list_value_length(request_lists).to_numpy(),
        "user_hash": hash_strings(table["user_id"].combine_chunks()),
        "item": items,
        "time": by_behaviour("timestamp_ms"),
        "query": by_behaviour("query_index").astype(np.int32),
        "history_features": features(past_vectors, past, len(items)),
        "history_end": by_request("history_end").astype(np.int32),
        "split": decode_splits(pc.struct_field(requests, "split")),
        "request_query": by_request("query_index").astype(np.int32),
        "request_time": by_request("timestamp_ms"),
        "candidates_per_request": pc.list_value_length(candidate_lists).to_numpy(),
        "candidate": candidates,
        "position": by_candidate("positions"),
        "labels": np.stack([by_candidate(name) for name in labels], 1),
        "features": features(by_candidate("features"), now, len(candidates)),
    }
