"""Parsing of served requests of search models: a query, candidates, and a history.

A feature that is left out, or NaN, is replaced by its mean over training. Three kinds
of features are filled in where a request leaves them out: features of items, the hour
and weekday of the request's `timestamp_ms`, and, if the model was loaded with `counts`,
the counts of `jobs.prepare --counts_as_of`. A request then needs no features of its
candidates. Queries, and pairs of query and document, that are not in the training
tables are encoded by the encoder of the bundle and cached. Without an encoder, an
unknown query is treated as no query, with a warning.

Shapes: `F` features, `q` queries, `n` and `p` pairs, `W` width of text.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from core.errors import UserError
from core.ragged import concat_columns
from core.schemas import SearchInfo
from core.tables import read_parquet
from models.requests import Columns, Request, Requests, Row
from models.search.catalogue import NO_QUERY, SearchCatalogue, SearchText, pair_key
from models.search.counts import HOURS, Counts, time_features
from models.search.data import SearchBatch, SearchDataset
from models.text.text_encoder import (
    Floats,
    TextCache,
    TextEncoder,
    TfidfEncoder,
)

NO_ITEM = -1
"""Item of a query alone, in the keys of encoded texts."""


class RequestText:
    """Text vectors of served requests, read from tables or encoded and cached."""

    def __init__(
        self,
        text: SearchText,
        queries: Sequence[str],
        encoder: TextEncoder | TfidfEncoder | None = None,
        documents: Sequence[str] = (),
    ) -> None:
        """Index the queries of the catalogue.

        Args:
            text: Vectors of the catalogue.
            queries: Queries of the catalogue, by `query_index`.
            encoder: Encoder that made the vectors. Without an encoder, text that is
                not in the catalogue has no vector.
            documents: Texts of the documents, by `item_index`; needed with an encoder.
        """
        self.text = text
        self.encoder = encoder
        self.documents = documents
        self.query_index = {query: index for index, query in enumerate(queries)}
        self.cache: TextCache[tuple[int, str]] = TextCache()

    def has_query(self, query: str) -> bool:
        """Return whether the query has a vector or can be encoded."""
        return self.encoder is not None or query in self.query_index

    def select(
        self, queries: list[str], item: NDArray[np.int64], query: NDArray[np.int64]
    ) -> SearchText:
        """Return the vectors of queries, and of pairs of items with these queries.

        Args:
            queries: (q,) texts for which `has_query` is true. In the result,
                `query_index` is the index in this list.
            item: (n,) item of each pair.
            query: (n,) index of each pair's query in `queries`, or NO_QUERY.
        """
        index = np.array([self.query_index.get(text, -1) for text in queries], np.int64)
        is_pair = query != NO_QUERY
        keys = np.unique(pair_key(item, query, len(queries))[is_pair])
        keys, pairs = self._pair_vectors(keys, queries, index)
        width = self.text.width
        return replace(
            self.text,
            queries=self._query_vectors(queries, index),
            pair_keys=keys,
            pairs=pairs[:, :width],
            joint=pairs[:, width:],
            is_complete=False,
        )

    def _query_vectors(self, queries: list[str], index: NDArray[np.int64]) -> Floats:
        """Return the vectors (q, W) of queries."""
        vectors = np.zeros((len(queries), self.text.width), np.float32)
        is_new = index < 0
        vectors[~is_new] = self.text.queries[index[~is_new]]
        if is_new.any():
            new = [(NO_ITEM, queries[i]) for i in np.flatnonzero(is_new)]
            vectors[is_new] = self._encode(new)
        return vectors

    def _pair_vectors(
        self, keys: NDArray[np.int64], queries: list[str], index: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], Floats]:
        """Return the keys of the pairs that have a vector, and the vectors."""
        item, query = np.divmod(keys, len(queries) + 1)
        query = query - 1
        catalogue_query = index[query]
        row, is_encoded = self.text.find_pairs(
            pair_key(item, catalogue_query, self.text.num_queries)
        )
        is_encoded &= catalogue_query >= 0
        row = row[is_encoded]
        width = self.text.width + self.text.joint.shape[1]
        encoded = np.hstack([self.text.pairs[row], self.text.joint[row]])
        if self.encoder is None:
            return keys[is_encoded], encoded
        vectors = np.zeros((len(keys), width), np.float32)
        vectors[is_encoded] = encoded
        new = np.flatnonzero(~is_encoded)
        if len(new):
            pairs = [(int(item[i]), queries[query[i]]) for i in new]
            vectors[new] = self._encode(pairs)
        return keys, vectors

    def _encode(self, texts: list[tuple[int, str]]) -> Floats:
        """Return the vectors of texts not in the catalogue, encoded or cached."""

        def encode(missing: list[tuple[int, str]]) -> Floats:
            assert self.encoder is not None, "texts are encoded only with an encoder"
            is_query = missing[0][0] == NO_ITEM
            queries = [query for _, query in missing]
            documents = None
            if not is_query:
                documents = [self.documents[item] for item, _ in missing]
            has_joint = not is_query and self.text.joint.shape[1] > 0
            return self.encoder.encode(queries, documents, has_joint)

        # batches of texts of similar length need little padding
        by_length = sorted(
            dict.fromkeys(texts),
            key=lambda text: -len(text[1]) - len(self.documents[text[0]]),
        )
        row_by_text = {text: row for row, text in enumerate(by_length)}
        vectors = self.cache.encode(by_length, encode)
        return vectors[[row_by_text[text] for text in texts]]


class SearchRequests(Requests):
    """Parser of requests to rank candidates for a query."""

    optional_columns: ClassVar[Columns] = {
        **Requests.optional_columns,
        "query": "string",
        "timestamp_ms": "long",  # of the request
        "features": "vectors",  # of each candidate
        "history_query": "strings",  # of each behaviour, "" for none
        "history_time_ms": "longs",
        "history_features": "vectors",
    }
    # counts: the table of jobs.prepare --counts_as_of
    settings: ClassVar[Mapping[str, Any]] = {**Requests.settings, "counts": ""}

    def __init__(
        self,
        folder: str,
        model: Any,
        catalogue: SearchCatalogue,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(folder, model, catalogue, settings)
        self.mean, self.config = model.scale.mean.numpy(), model.config
        queries: list[str] = []
        if catalogue.num_queries:
            table = catalogue.versions["queries"].read()
            queries = table["query"].to_pylist()
        documents: list[str] = []
        if self.encoder:
            table = read_parquet(f"{folder}/encoder/documents.parquet")
            documents = table["text"].to_pylist()
        self.text = RequestText(catalogue.text, queries, self.encoder, documents)
        info: SearchInfo = catalogue.versions["sequences"].info
        features = info.features
        self.counts = None
        if settings.get("counts"):
            self.counts = Counts.load(settings["counts"], info)
        self.time_columns = [
            index for index, name in enumerate(features) if name in HOURS
        ]
        self.custom_features = info.custom
        self.item_features = pa.table({})
        """The log's custom features of items, by `item_index`."""
        if info.item_features:
            self.item_features = catalogue.versions["items"].read(info.item_features)

    @classmethod
    def list_names(cls, info: SearchInfo) -> dict[str, Any]:
        """Return the names of labels, features and custom features."""
        names = {"labels": info.labels, "features": info.features}
        return super().list_names(info) | names

    def parse(self, row: Row) -> Request:
        """Return the request of a row, with the latest `max_history` behaviours.

        Items that are not in the catalogue are left out of history and candidates.
        """
        candidates, history = row.item_ids("candidates"), row.item_ids("history")
        # positions of catalogue items in the lists of the row
        scored = [i for i, item in enumerate(candidates) if item in self.index]
        behaviours = [i for i, item in enumerate(history) if item in self.index]
        behaviours = behaviours[-self.config.max_history :]
        queries = row.entries("history_query", len(history), "")
        times = row.entries("history_time_ms", len(history))
        if self.config.reads_times and None in times:
            raise UserError(
                "history_time_ms is missing, and the model reads the time of each "
                "behaviour"
            )
        history_features = self._parse_features(row, "history_", history)
        features = self._parse_features(row, "", candidates)
        item = [self.index[history[i]] for i in behaviours]
        candidate = [self.index[candidates[i]] for i in scored]
        parts: dict[str, NDArray] = {
            "request_query": np.array([row.text("query")], object),
            "history_query": np.array([queries[i] for i in behaviours], object),
            "item": np.array(item, np.int64),
            "time": np.array([times[i] or 0 for i in behaviours], np.int64),
            "history_features": history_features[behaviours],
            "candidate": np.array(candidate, np.int64),
            "features": features[scored],
        }
        return Request(candidates, scored, len(behaviours), parts)

    def _parse_features(self, row: Row, prefix: str, items: Sequence[str]) -> Floats:
        """Return the features (n, F) of candidates or of behaviours."""
        index = pa.array([self.index.get(item) for item in items], pa.int64())
        item_features = {
            name: self.item_features[name].combine_chunks().take(index)
            for name in self.item_features.column_names
        }
        custom_features = row.custom_features(
            self.custom_features, prefix, len(items), item_features
        )
        default = np.tile(self.mean, (len(items), 1))
        if not prefix and self.counts:
            self.counts.fill(default, items, row.text("query") or "")
        time = row.value("timestamp_ms")
        if not prefix and self.time_columns and time is not None:
            default[:, self.time_columns] = time_features(np.array([time], np.int64))
        built_in = row.vectors(f"{prefix}features", default)
        return np.concatenate([built_in, custom_features], 1)

    def collate(self, requests: Sequence[Request]) -> SearchBatch:
        """Collate requests into one batch; each distinct query is encoded once."""
        columns = concat_columns([dict(request.parts) for request in requests])
        request_queries = columns.pop("request_query")
        history_queries = columns.pop("history_query")
        for request in requests:
            self._warn_about_queries(request.parts["history_query"])
        self._warn_about_queries(request_queries)
        distinct = dict.fromkeys([*request_queries, *history_queries])
        queries = [query for query in distinct if query and self.text.has_query(query)]
        index_of = {query: index for index, query in enumerate(queries)}
        request_query = np.array(
            [index_of.get(query, NO_QUERY) for query in request_queries], np.int64
        )
        history_query = np.array(
            [index_of.get(query, NO_QUERY) for query in history_queries], np.int64
        )
        lengths = np.array([request.events for request in requests])
        counts = np.array([len(request.scored) for request in requests])
        # the items and queries of the pairs whose text the model reads
        candidate_query = np.repeat(request_query, counts)
        pairs = {"candidates": (columns["candidate"], candidate_query)}
        if self.config.reads_history_queries:
            pairs["behaviours"] = columns["item"], history_query
        text = self.text.select(
            queries,
            np.concatenate([item for item, _ in pairs.values()]),
            np.concatenate([query for _, query in pairs.values()]),
        )
        for name, (item, query) in pairs.items():
            self._warn_about_pairs(name, item, query, text)
        dataset = SearchDataset.from_requests(
            {**columns, "query": history_query, "request_query": request_query},
            lengths,
            counts,
            text,
            self.config.reads_history_queries,
        )
        return dataset.collate(np.arange(len(requests)))

    def _warn_about_queries(self, queries: NDArray) -> None:
        """Warn about queries that have no vector and cannot be encoded."""
        unknown = sum(bool(q) and not self.text.has_query(str(q)) for q in queries)
        if unknown:
            warnings.warn(
                f"{unknown} of {len(queries)} queries are not in the training tables "
                "and are treated as no query",
                stacklevel=2,
            )

    def _warn_about_pairs(
        self, name: str, item: NDArray, query: NDArray, text: SearchText
    ) -> None:
        """Warn about pairs that have no vector and cannot be encoded."""
        if self.text.encoder or not text.width:
            return
        keys = pair_key(item, query, text.num_queries)[query != NO_QUERY]
        missing = int((~np.isin(keys, text.pair_keys)).sum())
        if missing:
            warnings.warn(
                f"{missing} of {len(query)} {name} have no text vector for the pair of "
                "document and query; the vector of the document alone is used",
                stacklevel=2,
            )
