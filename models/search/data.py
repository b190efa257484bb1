"""What search models are built on and trained on: the catalogue with its text, and the dataset of requests.

    catalogue = SearchCatalogue.load("tables", "text")
    dataset = SearchDataset.load("tables/sequences", "train", unit="user", max_history=100)
    for batch in dataset.epoch(100, seed=1, epoch=0): ...

An example is a history with all requests that it serves, so one encoder pass serves them all. Candidates are flat over
a batch: each knows its request, each request its row and how many of the row's behaviours lie before it.

Shapes: `B` rows, `T` positions, `R` requests, `N` candidates, `F` features, `K` labels, `W` width of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.dataset.columns import Columns
from models.dataset.dataset import SPLITS, RequestDataset
from models.own_features import OwnFeatures
from models.ragged import (
    find_sorted,
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
    to_tensors,
)
from models.storage.inputs import Inputs
from models.storage.tables import (
    Manifest,
    TableVersion,
    UserError,
    has_manifest,
    iter_parts,
    join,
    read_manifest,
    read_table,
    sequences_manifest,
    table_hashes,
)
from models.text.text_tables import read_vectors, root_mean_square
from models.training.cuda_graphs import rung

MAX_REQUESTS = 64
"""Requests of an example at most, so that a batch can hold the example of a user with many searches."""

TABLES = {
    "tables": ("items", "queries", "sequences"),
    "text": ("items", "queries", "pairs"),
}
"""Tables that a catalogue comes from, by folder of `Inputs`."""

NO_QUERY = -1
"""`query_index` of a behaviour or request without a query."""


@dataclass(frozen=True)
class DocumentTokens:
    """What the text encoder read of each document, and what it made of its states."""

    tokens: Tensor
    """int32, end to end, special tokens among them."""
    begin: Tensor
    """(I + 1,) int64: where each document begins, and the end."""
    pooling: str
    """`cls`: the first token's state; `mean`: that of all tokens."""
    normalize: bool
    """Whether the result is scaled to length 1."""


@dataclass(frozen=True)
class SearchCatalogue:
    """Items, queries, labels and features of a search log, and the text embeddings of a frozen encoder."""

    num_items: int
    """Items; `item_index` is dense from 0."""
    num_queries: int
    """Queries; `query_index` is dense from 0."""
    labels: tuple[str, ...]
    """Names of the K labels; GAUC is of the first."""
    features: tuple[str, ...]
    """Names of the F features of a candidate and of a behaviour: counts, place and time, then the log's own."""
    queries: Tensor
    """(Q, W) float32: each query alone."""
    items: Tensor
    """(I, W) float32: each document alone."""
    pairs: Tensor
    """(P, W) float32: document and query together."""
    pair_keys: Tensor
    """(P,) int64, ascending: `pair_key` of each of them."""
    joint: Tensor | None = None
    """(P, W) float32: the encoder's [SEP] output over query and document, which has seen the document; or None."""
    text_size: float = 0.0
    """Root mean square of the documents' numbers, or that of a checkpoint."""
    feature_mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(F - own ones,) mean over train candidates."""
    feature_std: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(F - own ones,) standard deviation over train candidates; 0 for a constant."""
    own: OwnFeatures = field(default_factory=OwnFeatures)
    """The log's own features, the last ones of `features`."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Groups of features, in order."""
    versions: dict[str, TableVersion] = field(default_factory=dict)
    """Versions of the catalogue's tables, by name."""
    documents: DocumentTokens | None = None
    """What the encoder read; None for TF-IDF."""
    unknown_when_ranking: tuple[str, ...] = ("position", "page")
    """Features that a candidate has once it was shown; `models/search/position.py` keeps them from the ranking."""

    def __post_init__(self) -> None:
        if not self.text_size:
            object.__setattr__(self, "text_size", root_mean_square(self.items))

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the catalogue's tables, by name."""
        return table_hashes(self.versions)

    def scales(self) -> dict[str, Any]:
        """What a checkpoint keeps of how texts and the log's own numbers are read."""
        return {
            "own": [asdict(number) for number in self.own.numbers],
            "text_size": self.text_size,
        }

    @classmethod
    def load(
        cls,
        tables: str,
        text: str | None,
        scale: bool = True,
        scales: Mapping[str, Any] | None = None,
    ) -> Self:
        """Reads what jobs.prepare made at `tables` and jobs.encode at `text`; without it, text is 0 wide.

        Without `scale` the manifest of the sequences is enough: 0 and 1 stand for the features' mean and deviation,
        which a checkpoint brings with it, as it does its `scales`. Raises UserError where they do not belong together.
        """
        versions = Inputs(tables, text=text).versions(TABLES)
        uri = join(tables, "sequences")
        sequences = sequences_manifest(uri, "search")
        items, queries = (
            read_manifest(join(tables, name), name) for name in ("items", "queries")
        )
        info, own = sequences.info, OwnFeatures.of(sequences.info, scales)
        features = len(info["features"])
        mean, std = (
            feature_scale(uri, features)
            if scale
            else (torch.zeros(features), torch.ones(features))
        )
        return cls(
            num_items=items.rows,
            num_queries=queries.rows,
            labels=tuple(info["labels"]),
            features=(*info["features"], *own.names),
            **(
                load_text(text, items, queries.rows)
                if text
                else no_text(items.rows, queries.rows)
            ),
            text_size=(scales or {}).get("text_size", 0.0),
            feature_mean=mean,
            feature_std=std,
            own=own,
            unknown_when_ranking=tuple(info["unknown_when_ranking"]),
            groups={
                group["name"]: tuple(group["features"]) for group in info["groups"]
            },
            versions=versions,
        )

    def of_pairs(self, keys: NDArray[np.int64]) -> Self:
        """The same with the text of the pairs at `keys` alone, where it has it; of one pair at least."""
        place, found = find_sorted(self.pair_keys.numpy(), keys)
        rows = torch.from_numpy(
            place[found]
            if found.any()
            else np.zeros(min(1, len(self.pair_keys)), np.int64)
        )
        joint = None if self.joint is None else self.joint[rows]
        return replace(
            self, pair_keys=self.pair_keys[rows], pairs=self.pairs[rows], joint=joint
        )

    def leave_pairs_to(self, examples: Iterable[SearchDataset], config: Any) -> Self:
        """The same without text of pairs, which `examples` bring with their batches from now on, for a model of
        `config`. They keep that of their own pairs alone; so none is on the device but a batch's."""
        if not self.items.shape[1]:
            return self
        for part in examples:
            part.attach_text(self, config.history_pairs)
        none = self.pairs[:0].clone()
        joint = None if self.joint is None else none
        return replace(
            self, pairs=none, pair_keys=self.pair_keys[:0].clone(), joint=joint
        )


def load_text(text: str, items: Manifest, queries: int) -> dict[str, Any]:
    """Fields of a catalogue from what jobs.encode made; UserError where its tables do not belong together."""
    there = [
        name
        for name in ("items", "queries", "pairs", "tokens")
        if has_manifest(join(text, name))
    ]
    encoders = [encoded_by(read_manifest(join(text, name))) for name in there]
    if any(encoder != encoders[0] for encoder in encoders):
        raise UserError(
            f"the tables of {text} were encoded with several settings; run jobs.encode again"
        )
    of_items = embeddings(text, "items", items.rows)
    pairs = read_table(join(text, "pairs"))
    item, query = (
        pairs[name].to_numpy().astype(np.int64)
        for name in ("item_index", "query_index")
    )
    key = pair_key(item, query, queries)
    order = np.argsort(key, kind="stable")
    of_pairs = [
        read_vectors(pairs, name, len(key), join(text, "pairs"))[order]
        for name in ("embedding", "joint")
        if name in pairs.column_names
    ]
    return {
        "queries": embeddings(text, "queries", queries)
        if queries
        else of_items[:0].clone(),
        "items": of_items,
        "pairs": of_pairs[0],
        "pair_keys": torch.from_numpy(key[order]),
        "joint": of_pairs[1] if of_pairs[1:] else None,
        "documents": load_documents(join(text, "tokens"), items),
    }


def no_text(items: int, queries: int) -> dict[str, Any]:
    """The same fields for models that read no text."""
    widths = {
        "queries": torch.zeros(queries, 0),
        "items": torch.zeros(items, 0),
        "pairs": torch.zeros(0, 0),
    }
    return {**widths, "pair_keys": torch.zeros(0, dtype=torch.long)}


def encoded_by(manifest: Manifest) -> tuple[Any, dict[str, Any]]:
    """The encoder of a table of texts, and its settings; pairs may have a [SEP] state beside."""
    settings = {
        name: value
        for name, value in manifest.config.items()
        if name != "query_condition"
    }
    return manifest.inputs.get("encoder"), settings


def load_documents(uri: str, items: Manifest) -> DocumentTokens | None:
    """The table of documents' tokens, if there is one; UserError where it is of other items."""
    if not has_manifest(uri):
        return None
    manifest = read_manifest(uri, "tokens")
    if manifest.inputs.get("items") != items.hash:
        raise UserError(f"{uri} was made from other items; run jobs.encode again")
    lists = read_table(uri, "tokens")["tokens"].combine_chunks()
    begin = np.append(
        0, np.cumsum(pc.list_value_length(lists).to_numpy(), dtype=np.int64)
    )
    tokens = torch.from_numpy(lists.flatten().to_numpy().copy())
    return DocumentTokens(
        tokens,
        torch.from_numpy(begin),
        manifest.info["pooling"],
        manifest.info["normalize"],
    )


def pair_key(item: Any, query: Any, num_queries: int) -> Any:
    """One int64 for an item and a query; works on arrays and tensors."""
    return item * (num_queries + 1) + query + 1


def embeddings(text: str, name: str, rows: int) -> Tensor:
    """(rows, W) of a table of jobs.encode."""
    return read_vectors(
        read_table(join(text, name)), "embedding", rows, join(text, name)
    )


def feature_scale(uri: str, features: int) -> tuple[Tensor, Tensor]:
    """(mean, standard deviation), each (F,), over the train candidates of the first part that has some."""
    for table in iter_parts(uri, "sequences", ["requests"]):
        requests = table["requests"].combine_chunks().flatten()
        train = requests.filter(pc.equal(pc.struct_field(requests, "split"), "train"))
        values = (
            pc.struct_field(train, "features")
            .flatten()
            .to_numpy()
            .reshape(-1, max(1, features))[:, :features]
        )
        if len(values):
            found = torch.from_numpy(values.astype(np.float64))
            std = found.std(0, correction=0)
            return found.mean(0).float(), torch.where(std > 1e-6, std, 0.0).float()
    raise UserError(f"{uri} has no train request; check the split of jobs.prepare")


class SearchDataset(RequestDataset):
    """The requests of one split, in examples that share a history.

    `request`: every request sees exactly the latest `max_history` behaviours before it; requests whose histories begin
    at the same behaviour (all of a user with at most `max_history`) share an example.
    `user`: longer histories have overlapping windows, so that far fewer passes serve all requests, each with at least
    `window_overlap` of `max_history` behaviours before it. A behaviour is learned in the earliest example that has
    behaviours before it, and in no other one (`history_new`).
    No example has more than `MAX_REQUESTS` requests.

    Requests with an empty history are kept, as a search has its query.
    """

    kind = "search"
    default_unit = "user"
    default_max_history = 1000
    window_overlap: float = 0.75
    """Share of `max_history` that a search of a longer history reads at least in training."""
    batch_unit: str = "requests"
    """What a batch counts in training: `requests`, or examples of `users`."""

    requests: NDArray[np.int64]
    """(m,) index of each request of the split in the columns."""
    begin: NDArray[np.int64]
    """(n,) first behaviour of each example, within its user."""
    end: NDArray[np.int64]
    """(n,) behaviours of the user before an example's last request."""
    first: NDArray[np.int64]
    """(n + 1,) index in `requests` of each example's first request."""
    first_new: NDArray[np.int64]
    """(n,) the first behaviour of an example that no earlier one has learned; at least 1, as the first behaviour has
    nothing before it."""
    catalogue: SearchCatalogue | None = None
    """Text of the pairs that batches bring along, where the model does not hold it."""
    history_pairs = False
    """Whether batches bring the text of behaviours' pairs too."""

    @classmethod
    def dataset_options(cls, config: Any) -> dict[str, Any]:
        return {
            "window_overlap": config.window_overlap,
            "batch_unit": config.batch_unit,
        }

    @classmethod
    def parquet_columns(cls, manifest: Manifest) -> list[str]:
        own = OwnFeatures.of(manifest.info).names
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
        own = OwnFeatures.of(manifest.info)
        return decode_sequences(table, labels, num_features, own)

    @classmethod
    def decoder_settings(cls, manifest: Manifest) -> Any:
        names = ("labels", "features", "own")
        return {name: manifest.info.get(name) for name in names}

    @classmethod
    def from_requests(
        cls, columns: Columns, lengths: NDArray, counts: NDArray
    ) -> SearchDataset:
        """Return served requests as a dataset, each with a history and an example of its own, without labels.

        Args:
            columns: item, time, query and history_features by behaviour, end to end; request_query (R,); candidate and
                features by candidate, end to end.
            lengths: (R,) behaviours of each request.
            counts: (R,) candidates of each request.
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
        return cls(whole, "test", "request", max(1, int(lengths.max(initial=1))))

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

    def attach_text(
        self, catalogue: SearchCatalogue, history: bool, complete: bool = True
    ) -> None:
        """Let batches bring the text of their candidates' pairs, and with `history` of their behaviours' pairs.

        Raises:
            UserError: If the catalogue lacks a pair, unless it need not be `complete`.
        """
        columns, self.history_pairs = self.columns, history
        counts = columns["candidates_per_request"][self.requests]
        candidates = gather_ranges(self.candidate_offsets[self.requests], counts)
        query = np.repeat(columns["request_query"][self.requests], counts)
        keys = _pair_keys(
            columns["candidate"][candidates], query, catalogue.num_queries
        )
        if history:
            behaviours = self._visited_behaviours()
            past = _pair_keys(
                columns["item"][behaviours],
                columns["query"][behaviours],
                catalogue.num_queries,
            )
            keys = np.union1d(keys, past)
        self.catalogue = catalogue.of_pairs(keys)
        missing = np.setdiff1d(keys, self.catalogue.pair_keys.numpy())
        if complete and len(missing):
            lost_item, lost_query = divmod(int(missing[0]), catalogue.num_queries + 1)
            raise UserError(
                f"the text has no embedding of item {lost_item} with query {lost_query - 1}; "
                f"run jobs.encode again on these tables"
            )

    def _visited_behaviours(self) -> NDArray[np.int64]:
        """Return the index of the behaviours that examples have as history, from each user's first to the last."""
        first = run_starts(self.user)
        if not len(first):
            return first
        begin = np.minimum.reduceat(self.begin, first)
        end = np.maximum.reduceat(self.end, first)
        return gather_ranges(self.offsets[self.user[first]] + begin, end - begin)

    def collate(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the examples as tensors, histories right-padded with -1 to the longest.

        Returns:
            By row: history (B, T) item_index, history_query (B, T), history_time (B, T) ms, history_features (B, T, F),
            history_length (B,), history_new (B,) the first behaviour that no other example has learned, user (B,) hash
            of the id, user_row (B,). By request: request_row (R,), request_end (R,) behaviours of the row before it,
            request_query (R,), request_time (R,) ms, request (R,) its `request_number`. By candidate: candidate (N,)
            item_index, candidate_request (N,), candidate_position (N,), labels (N, K) bool, features (N, F). After
            `attach_text` also, of P distinct pairs, pair_keys (P,), pairs (P, W) and, where there is one, joint (P, W).
        """
        columns, user = self.columns, self.user[rows]
        begin, length = self.begin[rows], self.lengths[rows]
        index, inside = pad_indices(self.offsets[user] + begin, length)
        first = self.first[rows]
        count = self.first[rows + 1] - first
        request = self.requests[gather_ranges(first, count)]
        request_user = np.repeat(user, count)
        place = request - self.request_offsets[request_user]
        num_candidates = columns["candidates_per_request"][request].astype(np.int64)
        candidate = gather_ranges(self.candidate_offsets[request], num_candidates)
        batch = {
            "history": pad_ragged(columns["item"], index, inside, PAD),
            "history_query": pad_ragged(columns["query"], index, inside, NO_QUERY),
            "history_time": pad_ragged(columns["time"], index, inside, 0),
            "history_length": length,
            "history_new": self.first_new[rows],
            "user": columns["user_hash"][user],
            "user_row": user,
            "request_row": row_numbers(count),
            "request_end": columns["history_end"][request] - np.repeat(begin, count),
            "request_query": columns["request_query"][request],
            "request_time": columns["request_time"][request],
            "request": request_number(request_user, place),
            "candidate": columns["candidate"][candidate],
            "candidate_request": row_numbers(num_candidates),
            "candidate_position": columns["position"][candidate],
        }
        tensors = to_tensors(batch)
        past = pad_ragged(columns["history_features"], index, inside, 0)
        tensors["history_features"] = torch.from_numpy(past)
        tensors["labels"] = torch.from_numpy(columns["labels"][candidate])
        tensors["features"] = torch.from_numpy(columns["features"][candidate])
        if self.catalogue:
            tensors |= self._pair_text(self.catalogue, batch, num_candidates)
        return tensors

    def _pair_text(
        self,
        catalogue: SearchCatalogue,
        batch: dict[str, NDArray],
        num_candidates: NDArray[np.int64],
    ) -> dict[str, Tensor]:
        """Return the text of the pairs in a batch."""
        query = np.repeat(batch["request_query"], num_candidates)
        keys = _pair_keys(batch["candidate"], query, catalogue.num_queries)
        if self.history_pairs:
            past = _pair_keys(
                batch["history"], batch["history_query"], catalogue.num_queries
            )
            keys = np.union1d(keys, past)
        text = catalogue.of_pairs(keys)
        tensors = {"pair_keys": text.pair_keys, "pairs": text.pairs}
        if text.joint is not None:
            tensors["joint"] = text.joint
        return tensors

    def candidate_keys(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        request = batch["candidate_request"]
        return {
            "user_row": batch["user_row"][batch["request_row"]][request],
            "request": batch["request"][request],
            "time": batch["request_time"][request],
            "query": batch["request_query"][request],
            "item": batch["candidate"],
            "labels": batch["labels"],
        }

    def pad_to_buckets(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Pad rows, behaviours, requests, candidates and pairs; `real` (N,) marks the candidates."""
        length = batch["history"].shape[1]
        more_positions = min(rung(length), max(length, self.max_history)) - length
        more = {
            name: rung(len(batch[name])) - len(batch[name])
            for name in SIZED
            if name in batch
        }
        empty = {
            "history": PAD,
            "history_query": NO_QUERY,
            "request_query": NO_QUERY,
            "pair_keys": 2**62,  # above all keys; a larger one would be rounded
        }

        def pad(name: str, value: Tensor) -> Tensor:
            rows = next(
                more[of] for of, named in SIZED.items() if name.startswith(named)
            )
            inner = (0, 0) * (value.ndim - 1)
            if name in HISTORIES:
                inner = (*(0, 0) * (value.ndim - 2), 0, more_positions)
            return functional.pad(value, (*inner, 0, rows), value=empty.get(name, 0))

        batch = {**batch, "real": torch.ones(len(batch["candidate"]), dtype=torch.bool)}
        return {name: pad(name, value) for name, value in batch.items()}


HISTORIES = ("history", "history_query", "history_time", "history_features")
"""Tensors of a batch by row and behaviour."""
SIZED = {
    "pair_keys": ("pair", "joint"),
    "request_query": ("request",),
    "user": ("user", "history"),
    "candidate": ("candidate", "labels", "features", "real"),
}
"""A tensor of each size of a batch, and the beginnings of the names of the tensors of that size."""


def _limit_runs(
    starts: NDArray[np.int64], total: int, longest: int
) -> NDArray[np.int64]:
    """Cut runs that begin at `starts` and end at `total` into runs of at most `longest`; return where they begin."""
    is_start = np.zeros(total, bool)
    is_start[starts] = True
    number = np.arange(total)
    within_run = number - np.maximum.accumulate(np.where(is_start, number, 0))
    return np.flatnonzero(within_run % longest == 0)


def _pair_keys(item: NDArray, query: NDArray, num_queries: int) -> NDArray[np.int64]:
    """Return the ascending `pair_key` of the pairs that have an item and a query."""
    there = (item >= 0) & (query != NO_QUERY)
    item, query = item[there].astype(np.int64), query[there].astype(np.int64)
    return np.unique(pair_key(item, query, num_queries))


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
