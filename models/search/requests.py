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

from collections.abc import Sequence
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
from models.search.catalogue import SearchCatalogue
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

    def collate(
        self, requests: Sequence[SearchRequest], max_history: int
    ) -> SearchBatch:
        """Return the batch of requests; each distinct query is encoded once."""
        rows = [self.to_row(request) for request in requests]
        text = self.text.index_queries(rows, self.config.reads_history_queries)
        return self.collate_rows(rows, max_history, text=text)
