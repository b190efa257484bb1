"""Candidates of a search that is served as a batch, with the history and the text that they are ranked by.

A feature that is not given, or NaN, counts as its mean over training. What `jobs.prepare --counts_as_of` has counted is
known, where the model was loaded with `counts`, and so are features of items, and hour and weekday of the request from
its `timestamp_ms`: a request of these needs no features of its candidates. Queries, and pairs of query and document,
that training has not seen are encoded, by the encoder that comes with the model, and kept; without one such a query
counts as none, and a warning says so.

Shapes: `N` candidates, `F` features, `A` labels of behaviours, `n` pairs, `q` queries, `W` width of text.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor

from models.own_features import OwnFeatures
from models.ragged import concat_columns, find_sorted
from models.requests import Columns, Request, Requests, Row
from models.search.counts import HOURS, Counts, hours
from models.search.data import NO_QUERY, SearchCatalogue, SearchDataset, pair_key
from models.storage.tables import UserError, read_manifest, read_table
from models.text.text_encoder import (
    MAX_CACHED_TEXTS,
    Floats,
    TextEncoder,
    TfidfEncoder,
    encode_cached,
)

ALONE = -1
"""Stands for the item of a query alone."""


class RequestText:
    """The text of what requests name: read in the tables of jobs.encode where it is there, else encoded, and kept."""

    def __init__(
        self,
        catalogue: SearchCatalogue,
        queries: Sequence[str],
        encoder: TextEncoder | TfidfEncoder | None = None,
        documents: Sequence[str] = (),
    ) -> None:
        """`queries` are those of the catalogue; `encoder` and `documents`, by item, those that its text was made with,
        without which there is no text but the catalogue's."""
        self.catalogue, self.encoder, self.documents = catalogue, encoder, documents
        self.number = {query: number for number, query in enumerate(queries)}
        self.cache: LRUCache[tuple[int, str], Floats] = LRUCache(MAX_CACHED_TEXTS)

    def has(self, query: str) -> bool:
        """Whether there is text of the query."""
        return self.encoder is not None or query in self.number

    def of(
        self, queries: list[str], item: NDArray[np.int64], query: NDArray[np.int64]
    ) -> SearchCatalogue:
        """The catalogue with `queries` alone, numbered as they stand there, and the pairs of `item` (n,) with them,
        `query` (n,) or NO_QUERY; without an encoder, those that were encoded before."""
        whole, count = self.catalogue, len(queries)
        number = np.array(
            [self.number.get(text, -1) for text in queries], np.int64
        )  # (q,) in the catalogue
        alone = whole.queries.new_zeros(count, whole.items.shape[1])
        alone[number >= 0] = whole.queries[number[number >= 0]]
        new = np.flatnonzero(number < 0)
        if len(new):
            alone[new] = self.vectors([(ALONE, queries[i]) for i in new])

        keys = np.unique(pair_key(item, query, count)[query != NO_QUERY])
        of_item, of_query = np.divmod(keys, count + 1)
        of_query -= 1
        before = number[of_query]
        place, found = find_sorted(
            whole.pair_keys.numpy(), pair_key(of_item, before, whole.num_queries)
        )
        found &= before >= 0
        if self.encoder is None:
            keys, place, found = keys[found], place[found], found[found]
        tables = [table for table in (whole.pairs, whole.joint) if table is not None]
        made = torch.cat(
            [table.new_zeros(len(keys), table.shape[1]) for table in tables], 1
        )
        made[found] = torch.cat([table[place[found]] for table in tables], 1)
        new = np.flatnonzero(~found)
        if len(new):
            made[new] = self.vectors(
                [(int(of_item[i]), queries[of_query[i]]) for i in new]
            )
        if not len(keys):  # what a model reads by is of one row at least
            keys, made = np.array([-1]), made.new_zeros(1, made.shape[1])
        pairs, *joint = made.chunk(len(tables), 1)
        return replace(
            whole,
            num_queries=count,
            queries=alone,
            pairs=pairs,
            pair_keys=torch.from_numpy(keys),
            joint=joint[0] if joint else None,
        )

    def vectors(self, texts: list[tuple[int, str]]) -> Tensor:
        """Return the vectors (n, W) of queries alone, or (n, W or 2 W) of pairs, from the cache or encoded."""

        def encode(missing: list[tuple[int, str]]) -> Floats:
            assert self.encoder is not None, "texts are encoded only with an encoder"
            alone = missing[0][0] == ALONE
            queries = [query for _, query in missing]
            documents = None if alone else [self.documents[item] for item, _ in missing]
            joint = not alone and self.catalogue.joint is not None
            return self.encoder.encode(queries, documents, joint)

        # batches of texts of similar length need little padding
        by_length = sorted(
            dict.fromkeys(texts),
            key=lambda text: -len(text[1]) - len(self.documents[text[0]]),
        )
        place = {text: number for number, text in enumerate(by_length)}
        vectors = encode_cached(self.cache, by_length, encode)
        return torch.from_numpy(vectors[[place[text] for text in texts]])


class SearchRequests(Requests):
    """Rows as `models/search/data.py` makes batches."""

    takes: ClassVar[Columns] = {
        **Requests.takes,
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
            queries = read_table(f"{folder}/tables/queries", "queries")[
                "query"
            ].to_pylist()
        documents = (
            pq.read_table(f"{folder}/encoder/documents.parquet")["text"].to_pylist()
            if self.encoder
            else []
        )
        self.text = RequestText(catalogue, queries, self.encoder, documents)
        info = read_manifest(f"{folder}/tables/sequences", "sequences").info
        self.counts = (
            Counts.load(uri, info["features"], info)
            if (uri := settings.get("counts"))
            else None
        )
        self.hours = [
            place for place, name in enumerate(info["features"]) if name in HOURS
        ]
        self.own = OwnFeatures.of(info)
        of_items = info.get("item_features", [])
        self.of_items = (
            read_table(f"{folder}/tables/items", "items", of_items)
            if of_items
            else pa.table({})
        )

    def read(self, row: Row) -> Request:
        candidates, past = (row.ids(name) for name in ("candidates", "history"))
        known = [i for i, item in enumerate(candidates) if item in self.index]
        kept = [i for i, item in enumerate(past) if item in self.index][
            -self.config.max_history :
        ]
        asked = row.column("history_query", len(past), "")
        times = row.column("history_time_ms", len(past))
        if self.config.reads_times and None in times:
            raise UserError(
                "history_time_ms is missing, and the model reads when each behaviour was; give it"
            )
        parts: dict[str, NDArray] = {
            "asked": np.array([row.given("query")], object),
            "query": np.array([asked[i] for i in kept], object),
            "item": np.array([self.index[past[i]] for i in kept], np.int64),
            "time": np.array([times[i] or 0 for i in kept], np.int64),
            "history_features": self.features(row, "history_", past)[kept],
            "candidate": np.array([self.index[candidates[i]] for i in known], np.int64),
            "features": self.features(row, "", candidates)[known],
        }
        return Request(candidates, known, len(kept), parts)

    def features(self, row: Row, of: str, items: Sequence[str]) -> Floats:
        """(items, F) of candidates, or with `history_` of behaviours. Those of items are known, and of candidates what
        is counted and, from the request's time, hour and weekday."""
        places = pa.array([self.index.get(item) for item in items], pa.int64())
        usual = {
            name: self.of_items[name].combine_chunks().take(places)
            for name in self.of_items.column_names
        }
        own = row.own(self.own, of, len(items), usual)
        usually = np.tile(self.mean, (len(items), 1))
        if not of and self.counts:
            self.counts.fill(usually, items, row.given("query"))
        if not of and self.hours and (now := row.given("timestamp_ms")) is not None:
            usually[:, self.hours] = hours(np.array([now], np.int64))
        return np.concatenate([row.vectors(f"{of}features", usually), own], 1)

    def batch(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        rows = [request.parts for request in requests]
        for queries in (
            np.concatenate([row["asked"] for row in rows]),
            *(row["query"] for row in rows),
        ):
            if unknown := sum(
                bool(query) and not self.text.has(str(query)) for query in queries
            ):
                warnings.warn(
                    f"{unknown} of {len(queries)} queries are none of the training tables'; they count as no query",
                    stacklevel=2,
                )
        parts = concat_columns([dict(row) for row in rows])
        texts = [
            q
            for q in dict.fromkeys([*parts["asked"], *parts["query"]])
            if q and self.text.has(q)
        ]
        place = {query: number for number, query in enumerate(texts)}
        asked, parts["query"] = (
            np.array(
                [place.get(query, NO_QUERY) for query in parts.pop(name)], np.int64
            )
            for name in ("asked", "query")
        )
        lengths = np.array([request.events for request in requests])
        counts = np.array([len(request.known) for request in requests])
        read = {"candidates": (parts["candidate"], np.repeat(asked, counts))}
        if self.config.history_pairs:
            read["behaviours"] = parts["item"], parts["query"]
        text = self.text.of(
            texts, *(np.concatenate(each) for each in zip(*read.values(), strict=True))
        )
        for what, (item, query) in read.items():
            self.warn(what, item, query, text)
        columns = {**parts, "request_query": asked}
        dataset = SearchDataset.from_requests(columns, lengths, counts)
        dataset.attach_text(text, self.config.history_pairs, complete=False)
        return {**dataset.collate(np.arange(len(requests))), "queries": text.queries}

    def warn(
        self,
        what: str,
        item: NDArray[np.int64],
        query: NDArray[np.int64],
        text: SearchCatalogue,
    ) -> None:
        """Says how many pairs were never encoded, where the model cannot encode them."""
        key = pair_key(item, query, text.num_queries)[query != NO_QUERY]
        nothing = (
            self.text.encoder or not text.items.shape[1]
        )  # of a model that reads no text
        missing = 0 if nothing else int((~np.isin(key, text.pair_keys.numpy())).sum())
        if missing:
            warnings.warn(
                f"{missing} of {len(query)} {what} were never encoded together with their query; their document alone "
                f"is read",
                stacklevel=2,
            )
