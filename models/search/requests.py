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

from collections.abc import Mapping, Sequence
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
from models.search.catalogue import NO_QUERY, SearchCatalogue
from models.search.counts import HOURS, Counts, time_features
from models.search.data import SearchBatch
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
        self.mean = model.scale.mean.numpy()
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

    def to_row(
        self, request: SearchRequest, query_index: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return a row of `sequences`.

        Candidates, and the latest behaviours, are left out if they are not in the
        catalogue.

        Args:
            request: The request.
            query_index: Numbers of the queries of the batch.
        """
        scored = self.find_candidates(request)
        past = [i for i, item in enumerate(request.history) if item in self.index]
        past = past[-self.max_history :]
        times = request.history_time_ms or [None] * len(request.history)
        if self.model.reads_times and None in times:
            raise UserError(
                "history_time_ms is missing, and the model reads the time of each "
                "behaviour"
            )
        queries = request.history_query or [""] * len(request.history)
        mean = np.tile(self.mean, (len(request.history), 1))
        vectors = fill_missing("history_features", request.history_features, mean)
        labels = {f"label_{name}": [False] * len(scored) for name in self.info.labels}
        return {
            "user_id": "",
            "item_index": [self.index[request.history[i]] for i in past],
            "timestamp_ms": [times[i] or 0 for i in past],
            "query_index": [query_index.get(queries[i] or "", NO_QUERY) for i in past],
            "features": list(vectors[past]),
            **self._custom_columns(request, "history_", past),
            "requests": [
                {
                    "timestamp_ms": 0,
                    "query_index": query_index.get(request.query or "", NO_QUERY),
                    "history_end": len(past),
                    "split": "test",
                    "candidates": [self.index[request.candidates[i]] for i in scored],
                    "positions": [0] * len(scored),
                    "features": self._fill_features(request)[scored].ravel(),
                    **labels,
                    **self._custom_columns(request, "", scored),
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
        self, request: SearchRequest, prefix: str, selected: list[int]
    ) -> dict[str, list[Any]]:
        """Return custom features, those of items from the catalogue if left out."""
        items = request.history if prefix else request.candidates
        rows = pa.array([self.index.get(item) for item in items], pa.int64())
        defaults = self.item_features.take(rows).to_pydict()
        columns = request.custom_columns(self.info.custom, prefix, defaults)
        return {name: [values[i] for i in selected] for name, values in columns.items()}

    def collate(
        self, requests: Sequence[SearchRequest], max_history: int
    ) -> SearchBatch:
        """Return the batch of requests; each distinct query is encoded once."""
        texts: list[str | None] = []
        for request in requests:
            texts += [request.query, *(request.history_query or ())]
        query_index = self.text.index_queries(texts)
        rows = [self.to_row(request, query_index) for request in requests]
        # pairs that the model reads
        items: list[int] = []
        queries: list[int] = []
        for row in rows:
            (search,) = row["requests"]
            items += search["candidates"]
            queries += [search["query_index"]] * len(search["candidates"])
            if self.model.reads_history_queries:
                items += row["item_index"]
                queries += row["query_index"]
        text = self.text.select(list(query_index), items, queries)
        return self.collate_rows(rows, max_history, text=text)
