"""Search requests: from rows of `sequences` to batches, and the served request.

    selection = SearchSelection("train", "user", 100, text=catalogue.text)
    dataset = Dataset(SEARCH, sequences, selection)

An example is a history with all requests that it serves, so that one encoder pass
serves all these requests. Units of an example:

- `request`: every request has exactly the latest `max_history` behaviours before it.
  Requests whose histories begin at the same behaviour share an example; for a user with
  at most `max_history` behaviours, these are all requests.
- `user`: the behaviours of a user are cut into overlapping windows, so that fewer
  encoder passes serve all requests. A request has at least `window_overlap *
  max_history` behaviours before it, or all if there are fewer.

A behaviour is learned once, in the earliest example that has a behaviour before it
(`first_new`). No example has more than `MAX_REQUESTS` requests. A request with an empty
history has an example too: its query alone ranks its candidates.

A served request may leave out features, or set them to NaN. Features of items, the hour
and weekday of `timestamp_ms` and, if the model was loaded with `counts`, the counts of
`jobs.prepare --counts_as_of` are then computed; other features are replaced by their
mean over training. Queries, and pairs of query and document, that
are not in the training tables are encoded by the encoder of the bundle and cached.
Without an encoder, an unknown query is treated as no query, with a warning.

The candidates of all requests of a batch form one flat axis. A candidate refers to its
request. A request refers to its row and has the number of the row's behaviours before
the request.

Shapes: `B` rows, `T` behaviours, `R` requests, `N` candidates, `Q` distinct queries,
`P` distinct pairs of item and query, `F` features, `K` labels, `W` width of text, `n`
examples, `m` requests of the split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import UserError
from core.options import check_known
from core.ragged import (
    find_rows,
    gather_ranges,
    lengths_to_offsets,
    pad_indices,
    pad_ragged,
    row_numbers,
    run_starts,
)
from core.schemas import SearchInfo
from core.splits import SPLITS
from core.tables import read_parquet
from models.custom_features import read_features
from models.dataset.batch import PAD, Batch, axes, request_number, to_tensor
from models.dataset.dataset import (
    Columns,
    Examples,
    Kind,
    Selection,
    decode_splits,
    request_columns,
)
from models.requests import (
    CandidateRequest,
    Entries,
    Floats,
    RequestColumns,
    Requests,
    Settings,
    Text,
    Texts,
    Vectors,
)
from models.search.catalogue import NO_QUERY, SearchCatalogue, SearchText, pair_key
from models.search.counts import HOURS, Counts, time_features
from models.search.request_text import RequestText

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
    history_type: Tensor = axes("B", "T")
    """(B, T) int64 0 for a click, else the number of a `session_types`, from 1."""
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
    candidate_pair_text: Tensor = axes("N", padding=-1)
    """(N,) int64 row of `pair_text`, -1 without a query."""
    history_pair_text: Tensor = axes("B", "T", padding=-1)
    """(B, T) int64 row of `pair_text`, -1 without a query or if the model does not
    read it."""

    def candidate_keys(self) -> dict[str, Tensor]:
        """Return the user, request, time, query, item and labels of each candidate."""
        request = self.candidate_request
        return {
            "user_row": self.user_row[self.request_row][request],
            "request": self.request[request],
            "time": self.request_time[request],
            "query": self.request_query[request],
            "item": self.candidate,
            "labels": self.labels,
        }


def list_columns(info: SearchInfo) -> list[str]:
    """Return the columns that `decode` reads, with labels and custom features."""
    by_user = ["item_index", "timestamp_ms", "query_index", "features"]
    session_type = ["session_type"] if info.sessions else []
    by_request = ["history_end", "split", "candidates", "positions", *by_user[1:]]
    labels = [f"label_{name}" for name in info.labels]
    requests = request_columns(*by_request, *labels, *info.custom.names)
    return [*by_user, *session_type, *info.custom.names, *requests]


def read_feature_matrix(
    info: SearchInfo,
    vectors: pa.Array,
    read: Callable[[str], pa.Array],
    num_rows: int,
) -> Floats:
    """Return the features (num_rows, F) of `sequences`, then the custom features.

    Args:
        info: Info of `sequences`.
        vectors: Flat features of the rows.
        read: Returns the column of a custom feature, given its name.
        num_rows: Number of behaviours or candidates.
    """
    matrix = vectors.to_numpy().reshape(num_rows, len(info.features))
    matrix = matrix.astype(np.float32, copy=False)
    if info.custom.names:
        custom = {name: read(name) for name in info.custom.names}
        matrix = np.hstack([matrix, read_features(info.custom, custom, num_rows)])
    return matrix


def decode(table: pa.Table, info: SearchInfo) -> Columns:
    """Decode one part of the sequences of a search log.

    Returns:
        Columns by user: `behaviours_per_user` and `requests_per_user`. By behaviour:
        `item`, `type`, `time`, `query` and `history_features`. By request:
        `history_end`, `split`, `request_query`, `request_time` and
        `candidates_per_request`. By candidate: `candidate`, `position`, `labels` and
        `features`.
    """
    item_lists = table["item_index"].combine_chunks()
    request_lists = table["requests"].combine_chunks()
    requests = request_lists.flatten()
    candidate_lists = pc.struct_field(requests, "candidates")

    def by_behaviour(name: str) -> pa.Array:
        return table[name].combine_chunks().flatten()

    def by_request(name: str) -> NDArray:
        return pc.struct_field(requests, name).to_numpy()

    def by_candidate(name: str) -> pa.Array:
        return pc.struct_field(requests, name).flatten()

    num_behaviours = len(item_lists.flatten())
    num_candidates = len(candidate_lists.flatten())
    types = np.zeros(num_behaviours, np.int64)
    if info.sessions:
        index = pc.index_in(
            by_behaviour("session_type"), pa.array(info.sessions), skip_nulls=True
        )
        types = pc.fill_null(index, -1).to_numpy() + 1
    labels = [
        by_candidate(f"label_{name}").to_numpy(zero_copy_only=False)
        for name in info.labels
    ]
    return {
        "behaviours_per_user": pc.list_value_length(item_lists).to_numpy(),
        "requests_per_user": pc.list_value_length(request_lists).to_numpy(),
        "item": item_lists.flatten().to_numpy(),
        "type": types.astype(np.int8),
        "time": by_behaviour("timestamp_ms").to_numpy(),
        "query": by_behaviour("query_index").to_numpy().astype(np.int32),
        "history_features": read_feature_matrix(
            info, by_behaviour("features").flatten(), by_behaviour, num_behaviours
        ),
        "history_end": by_request("history_end").astype(np.int32),
        "split": decode_splits(pc.struct_field(requests, "split")),
        "request_query": by_request("query_index").astype(np.int32),
        "request_time": by_request("timestamp_ms"),
        "candidates_per_request": pc.list_value_length(candidate_lists).to_numpy(),
        "candidate": candidate_lists.flatten().to_numpy(),
        "position": by_candidate("positions").to_numpy(),
        "labels": np.stack(labels, 1),
        "features": read_feature_matrix(
            info, by_candidate("features"), by_candidate, num_candidates
        ),
    }


@dataclass(frozen=True)
class SearchSelection(Selection):
    """The examples of a dataset of searches."""

    text: SearchText | RequestText = SearchText.empty(0, 0)
    """Text vectors of batches; of width 0 for models that read no text."""
    window_overlap: float = 0.75
    """Minimum share of `max_history` that training reads before a request with a
    longer history."""
    batch_unit: str = "requests"
    """Unit of the size of a training batch: `requests` or `users` (examples)."""
    reads_history_queries: bool = False
    """Whether batches have the text of behaviours' queries too."""


@dataclass(frozen=True, kw_only=True)
class SearchExamples(Examples):
    """Histories, each with the requests that it serves."""

    arrays: ClassVar[tuple[str, ...]] = (
        *Examples.arrays,
        "begin",
        "first",
        "count",
        "first_new",
    )

    offsets: NDArray[np.int64]
    """Index of each user's first behaviour."""
    request_offsets: NDArray[np.int64]
    """Index of each user's first request."""
    candidate_offsets: NDArray[np.int64]
    """Index of each request's first candidate."""
    requests: NDArray[np.int64]
    """(m,) index of each request of the split in the columns."""
    begin: NDArray[np.int64]
    """(n,) index of each example's first behaviour within its user."""
    first: NDArray[np.int64]
    """(n,) index in `requests` of each example's first request."""
    count: NDArray[np.int64]
    """(n,) number of requests of each example."""
    first_new: NDArray[np.int64]
    """(n,) position of the first behaviour that no earlier example learns; at least 1,
    since no behaviour precedes the first one."""


def plan(columns: Columns, selection: SearchSelection) -> SearchExamples:
    """Group the requests of the split into examples."""
    max_history = selection.max_history
    request_offsets = lengths_to_offsets(columns["requests_per_user"])
    requests = np.flatnonzero(columns["split"] == SPLITS.index(selection.split))
    if selection.new:
        requests = requests[selection.new.mask(columns["request_time"][requests])]
    user = find_rows(request_offsets, requests)  # (m,)
    end = columns["history_end"][requests].astype(np.int64)  # (m,)
    # (m,) first behaviour of the window that serves each request
    stride = 1
    if selection.unit == "user":
        stride = max(1, int(max_history * (1 - selection.window_overlap)))
    excess = np.maximum(end - max_history, 0)
    begin = (excess + stride - 1) // stride * stride
    # an example begins where a window begins, and after each `MAX_REQUESTS` requests
    index = np.arange(len(requests))
    starts = run_starts(user, begin)
    since_start = index - np.repeat(starts, np.diff(np.append(starts, len(requests))))
    first = np.flatnonzero(since_start % MAX_REQUESTS == 0)
    user, begin = user[first], begin[first]
    last_end = np.maximum.reduceat(end, first) if len(first) else end
    learned_end = np.append(0, last_end)[:-1]  # of the user's previous example
    learned_end[run_starts(user)] = 0
    count = np.diff(np.append(first, len(requests)))
    counts_requests = selection.batch_unit == "requests" or selection.split != "train"
    return SearchExamples(
        columns=columns,
        selection=selection,
        user=user,
        lengths=last_end - begin,
        weights=count if counts_requests else np.ones(len(first), np.int8),
        num_requests=len(requests),
        num_learned=len(requests),
        offsets=lengths_to_offsets(columns["behaviours_per_user"]),
        request_offsets=request_offsets,
        candidate_offsets=lengths_to_offsets(columns["candidates_per_request"]),
        requests=requests,
        begin=begin,
        first=first,
        count=count,
        first_new=np.clip(learned_end - begin, 1, None),
    )


def collate(examples: SearchExamples) -> SearchBatch:
    """Collate examples into a batch, with histories padded on the right."""
    columns, user, count = examples.columns, examples.user, examples.count
    selection: Any = examples.selection
    request = examples.requests[gather_ranges(examples.first, count)]
    request_user = np.repeat(user, count)
    number = request_number(
        request_user, request - examples.request_offsets[request_user]
    )
    num_candidates = columns["candidates_per_request"][request].astype(np.int64)
    candidate = gather_ranges(examples.candidate_offsets[request], num_candidates)
    index, inside = pad_indices(
        examples.offsets[user] + examples.begin, examples.lengths
    )
    history = pad_ragged(columns["item"], index, inside, PAD)
    history_query = pad_ragged(columns["query"], index, inside, NO_QUERY)
    history_features = pad_ragged(columns["history_features"], index, inside, 0)
    item = columns["candidate"][candidate]
    request_query = columns["request_query"][request]
    request_end = columns["history_end"][request] - np.repeat(examples.begin, count)
    text = collate_text(
        selection.text,
        history,
        history_query if selection.reads_history_queries else None,
        request_query,
        item,
        num_candidates,
    )
    return SearchBatch(
        history=to_tensor(history),
        history_query=to_tensor(history_query),
        history_type=to_tensor(pad_ragged(columns["type"], index, inside, 0)),
        history_time=to_tensor(pad_ragged(columns["time"], index, inside, 0)),
        history_features=torch.from_numpy(history_features),
        history_length=to_tensor(examples.lengths),
        history_new=to_tensor(examples.first_new),
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


def collate_text(
    text: SearchText | RequestText,
    history: NDArray,
    history_query: NDArray | None,
    request_query: NDArray,
    candidate: NDArray,
    num_candidates: NDArray[np.int64],
) -> dict[str, Any]:
    """Return the text fields of a `SearchBatch`.

    Each distinct vector of the batch is copied once; the other fields refer to it
    by row.

    Args:
        history: (B, T) items.
        history_query: (B, T) queries, or None if the model does not read them.
        request_query: (R,) queries.
        candidate: (N,) items.
        num_candidates: (R,) number of candidates of each request.
    """
    if history_query is None:
        history_query = np.full(history.shape, NO_QUERY)
    has_text = text.width > 0
    # queries of requests, then of behaviours
    query = np.concatenate([request_query, history_query.ravel()])
    distinct_query, query_row = _distinct_rows(query, (query != NO_QUERY) & has_text)
    request_row, history_row = np.split(query_row, [len(request_query)])
    # pairs of candidates, then of behaviours
    pair_item = np.concatenate([candidate, history.ravel()]).astype(np.int64)
    candidate_query = np.repeat(request_query, num_candidates)
    pair_query = np.concatenate([candidate_query, history_query.ravel()])
    is_pair = (pair_item >= 0) & (pair_query != NO_QUERY) & has_text
    keys = pair_key(pair_item, pair_query, text.num_queries)
    distinct_keys, pair_row = _distinct_rows(keys, is_pair)
    pair_item, pair_query = np.divmod(distinct_keys, text.num_queries + 1)
    pair_text = text.read_pairs(pair_item, pair_query - 1)
    candidate_row, behaviour_row = np.split(pair_row, [len(candidate)])
    return {
        "query_text": torch.from_numpy(text.read_queries(distinct_query)),
        "request_query_text": torch.from_numpy(request_row),
        "history_query_text": torch.from_numpy(history_row.reshape(history.shape)),
        "pair_text": torch.from_numpy(pair_text),
        "candidate_pair_text": torch.from_numpy(candidate_row),
        "history_pair_text": torch.from_numpy(behaviour_row.reshape(history.shape)),
    }


def _distinct_rows(
    values: NDArray, is_used: NDArray[np.bool_]
) -> tuple[NDArray, NDArray[np.int64]]:
    """Return the distinct used values, ascending, and each value's index in them."""
    index = np.full(len(values), -1)
    distinct, index[is_used] = np.unique(values[is_used], return_inverse=True)
    return distinct, index


SEARCH = Kind("search", decode, list_columns, plan, collate, SearchSelection)


class SearchRequest(CandidateRequest):
    """A request to rank candidates for a query."""

    query: Text | None = None
    history_query: Texts | None = None
    """Query of each behaviour, "" for none."""
    history_type: Texts | None = None
    """Type of each behaviour that is no click, "" for a click."""
    history_features: Vectors | None = None


class SearchSettings(Settings):
    """Options for loading a served search model."""

    counts: str = ""
    """Folder of the table of jobs.prepare --counts_as_of."""


class SearchRequests(Requests):
    """Reader of requests to rank candidates for a query."""

    base_class = SearchRequest
    settings_class = SearchSettings

    def __init__(
        self,
        folder: str,
        model: Any,
        catalogue: SearchCatalogue,
        settings: SearchSettings,
    ) -> None:
        super().__init__(folder, model, catalogue, settings)
        self.mean = catalogue.feature_mean.numpy()
        queries: list[str] = []
        if catalogue.num_queries:
            table = catalogue.versions["queries"].read()
            queries = table["query"].to_pylist()
        documents: list[str] = []
        if self.encoder:
            table = read_parquet(f"{folder}/encoder/documents.parquet")
            documents = table["text"].to_pylist()
        index = {query: number for number, query in enumerate(queries)}
        self.text = RequestText(catalogue.text, queries, index, self.encoder, documents)
        info: SearchInfo = self.info
        self.counts = Counts.load(settings.counts, info) if settings.counts else None
        self.time_columns = [
            index for index, name in enumerate(info.features) if name in HOURS
        ]
        items = catalogue.versions["items"]
        self.item_features = {
            name: items.read([name])[name].combine_chunks()
            for name in info.item_features
        }
        """The log's custom features of items, by `item_index`."""

    @classmethod
    def list_names(cls, info: SearchInfo) -> dict[str, Any]:
        """Return the names of labels, features and custom features."""
        names = {"labels": info.labels, "features": info.features}
        return super().list_names(info) | names

    def to_columns(self, requests: Sequence[Any]) -> RequestColumns:
        """Return the columns of requests, and the text, which numbers their queries."""
        info: SearchInfo = self.info
        past, shown = self.split_entries(requests)
        item = np.array([self.index[id_] for id_ in past.read("history")], np.int64)
        candidates = shown.read("candidates")
        candidate = np.array([self.index[id_] for id_ in candidates], np.int64)
        times = past.read("history_time_ms")
        if self.model.reads_times and None in times:
            raise UserError(
                "history_time_ms is missing, and the model reads the time of each "
                "behaviour"
            )
        request_times = [request.timestamp_ms for request in requests]
        if info.sessions and None in request_times:
            raise UserError("timestamp_ms is missing, and the model reads sessions")
        type_names = ["", *info.sessions]
        types = [name or "" for name in past.read("history_type")]
        check_known(filter(None, types), info.sessions, "history_type")
        history_default = np.tile(self.mean, (len(item), 1))
        history_default[[bool(name) for name in types]] = 0
        default = np.tile(self.mean, (len(candidate), 1))
        queries = [request.query for request in requests]
        if self.counts:
            asked = [queries[row] for row in shown.request]
            self.counts.fill(default, candidates, asked)
        for row, time in enumerate(request_times):
            if self.time_columns and time is not None:
                cells = np.ix_(shown.request == row, self.time_columns)
                default[cells] = time_features(np.array([time], np.int64))
        history_queries = past.read("history_query")
        text = self.text.add_queries([*queries, *history_queries])
        columns = {
            "behaviours_per_user": past.counts,
            "requests_per_user": np.ones_like(past.counts),
            "item": item,
            "type": np.array([type_names.index(name) for name in types], np.int64),
            "time": np.array([time or 0 for time in times], np.int64),
            "query": text.find_queries(history_queries),
            "history_features": self.read_features(past, item, history_default),
            "history_end": past.counts,
            "split": np.full_like(past.counts, SPLITS.index(self.split)),
            "request_query": text.find_queries(queries),
            "request_time": np.array([time or 0 for time in request_times], np.int64),
            "candidates_per_request": shown.counts,
            "candidate": candidate,
            "position": np.zeros_like(candidate),
            "labels": np.zeros((len(candidate), len(info.labels)), bool),
            "features": self.read_features(shown, candidate, default),
        }
        return columns, {"text": text}

    def read_features(
        self, entries: Entries, item: NDArray[np.int64], default: Floats
    ) -> Floats:
        """Return all features of entries; the catalogue fills its items' features."""
        vectors = entries.read_vectors(f"{entries.prefix}features", default)
        columns = entries.read_custom(self.info.custom)
        for name, values in self.item_features.items():
            of_items = values.take(pa.array(item)).cast(columns[name].type)
            columns[name] = pc.coalesce(columns[name], of_items)
        custom = read_features(self.info.custom, columns, len(item))
        return np.hstack([vectors, custom])
