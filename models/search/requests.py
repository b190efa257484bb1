"""Requests to served search models: a query, candidates, and a history.

A feature that is left out, or NaN, is replaced by its mean over training. Three kinds
of features are filled in where a request leaves them out: features of items, the hour
and weekday of the request's `timestamp_ms`, and, if the model was loaded with `counts`,
the counts of `jobs.prepare --counts_as_of`. A request then needs no features of its
candidates. Queries, and pairs of query and document, that are not in the training
tables are encoded by the encoder of the bundle and cached. Without an encoder, an
unknown query is treated as no query, with a warning.

Shapes: `F` features.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from core.errors import UserError
from core.schemas import SearchInfo, search_schema
from core.tables import read_parquet
from models.requests import (
    CandidateRequest,
    Requests,
    Settings,
    Text,
    Texts,
    Vectors,
    custom_schema,
    fill_missing,
)
from models.search.catalogue import NO_QUERY, SearchCatalogue, SearchText, pair_key
from models.search.counts import HOURS, Counts, time_features
from models.search.data import SearchBatch, SearchDataset
from models.search.request_text import RequestText


class SearchRequest(CandidateRequest):
    """A request to rank candidates for a query."""

    query: Text | None = None
    history_query: Texts | None = None
    """Query of each behaviour, "" for none."""
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
        info: SearchInfo = self.info
        self.counts = Counts.load(settings.counts, info) if settings.counts else None
        self.time_columns = [
            index for index, name in enumerate(info.features) if name in HOURS
        ]
        self.item_features = pa.table({})
        """The log's custom features of items, by `item_index`."""
        if info.item_features:
            self.item_features = catalogue.versions["items"].read(info.item_features)
        custom = custom_schema(info.custom.names)
        self.schema = search_schema(custom, info.labels, len(info.features))

    @classmethod
    def list_names(cls, info: SearchInfo) -> dict[str, Any]:
        """Return the names of labels, features and custom features."""
        names = {"labels": info.labels, "features": info.features}
        return super().list_names(info) | names

    def to_row(self, request: SearchRequest) -> dict[str, Any]:
        """Return a row of `sequences`, with the text of queries as `query_index`.

        Candidates, and the latest behaviours, are left out if they are not in the
        catalogue.
        """
        labels = self.info.labels
        scored = self.find_candidates(request)
        past = [i for i, item in enumerate(request.history) if item in self.index]
        past = past[-self.max_history :]
        times = request.history_time_ms or [None] * len(request.history)
        if self.config.reads_times and None in times:
            raise UserError(
                "history_time_ms is missing, and the model reads the time of each "
                "behaviour"
            )
        queries = request.history_query or [""] * len(request.history)
        mean = np.tile(self.mean, (len(request.history), 1))
        vectors = fill_missing("history_features", request.history_features, mean)
        candidates = [self.index[request.candidates[i]] for i in scored]
        history = [self.index[request.history[i]] for i in past]
        return {
            "user_id": "",
            "item_index": history,
            "timestamp_ms": [times[i] or 0 for i in past],
            "query_index": [queries[i] for i in past],
            "features": list(vectors[past]),
            **self._custom_columns(request, "history_", past, history),
            "requests": [
                {
                    "timestamp_ms": 0,
                    "query_index": request.query,
                    "history_end": len(past),
                    "split": "test",
                    "candidates": candidates,
                    "positions": [0] * len(scored),
                    "features": self._fill_features(request)[scored].ravel(),
                    **{f"label_{name}": [False] * len(scored) for name in labels},
                    **self._custom_columns(request, "", scored, candidates),
                }
            ],
        }

    def _fill_features(self, request: SearchRequest) -> NDArray[np.float32]:
        """Return the features of candidates, with counts and times where missing."""
        default = np.tile(self.mean, (len(request.candidates), 1))
        if self.counts:
            self.counts.fill(default, request.candidates, request.query or "")
        if self.time_columns and request.timestamp_ms is not None:
            time = np.array([request.timestamp_ms], np.int64)
            default[:, self.time_columns] = time_features(time)
        return fill_missing("features", request.features, default)

    def _custom_columns(
        self, request: SearchRequest, prefix: str, index: list[int], items: list[int]
    ) -> dict[str, list[Any]]:
        """Return custom features, those of items from the catalogue if left out."""
        rows = self.item_features.take(pa.array(items, pa.int64()))
        defaults = rows.to_pydict()
        return request.custom_columns(self.info.custom, prefix, index, defaults)

    def collate(self, requests: Sequence[SearchRequest]) -> SearchBatch:
        """Return the batch of requests; each distinct query is encoded once."""
        rows = [self.to_row(request) for request in requests]
        searches = [row["requests"][0] for row in rows]
        texts = [[search["query_index"] for search in searches]]
        texts += [row["query_index"] for row in rows]
        for queries_of_row in [*texts[1:], texts[0]]:
            self._warn_about_queries(queries_of_row)
        distinct = dict.fromkeys(chain.from_iterable(texts))
        queries = [query for query in distinct if query and self.text.has_query(query)]
        index_of = {query: index for index, query in enumerate(queries)}
        # the items and queries of the pairs whose text the model reads
        pairs: dict[str, list[tuple[int, int]]] = {"candidates": [], "behaviours": []}
        for row, search in zip(rows, searches, strict=True):
            query = index_of.get(search["query_index"], NO_QUERY)
            search["query_index"] = query
            past = [index_of.get(text, NO_QUERY) for text in row["query_index"]]
            row["query_index"] = past
            pairs["candidates"] += [(item, query) for item in search["candidates"]]
            if self.config.reads_history_queries:
                pairs["behaviours"] += zip(row["item_index"], past, strict=True)
        keys = np.array([*pairs["candidates"], *pairs["behaviours"]], np.int64)
        item, query = keys.reshape(-1, 2).T
        text = self.text.select(queries, item, query)
        for name, pairs_of_name in pairs.items():
            self._warn_about_pairs(name, pairs_of_name, text)
        table = pa.Table.from_pylist(rows, self.schema)
        dataset = SearchDataset(
            SearchDataset.decode(table, self.info),
            "test",
            "request",
            self.max_history,
            text=text,
            reads_history_queries=self.config.reads_history_queries,
        )
        return dataset.collate(np.arange(len(requests)))

    def _warn_about_queries(self, queries: Sequence[str | None]) -> None:
        """Warn about queries that have no vector and cannot be encoded."""
        unknown = sum(bool(q) and not self.text.has_query(q) for q in queries)
        if unknown:
            warnings.warn(
                f"{unknown} of {len(queries)} queries are not in the training tables "
                "and are treated as no query",
                stacklevel=2,
            )

    def _warn_about_pairs(
        self, name: str, pairs: Sequence[tuple[int, int]], text: SearchText
    ) -> None:
        """Warn about pairs that have no vector and cannot be encoded."""
        if self.text.encoder or not text.width:
            return
        keys = [
            pair_key(item, query, text.num_queries)
            for item, query in pairs
            if query != NO_QUERY
        ]
        missing = int((~np.isin(keys, text.pair_keys)).sum())
        if missing:
            warnings.warn(
                f"{missing} of {len(pairs)} {name} have no text vector for the pair of "
                "document and query; the vector of the document alone is used",
                stacklevel=2,
            )
