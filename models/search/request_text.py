"""Text vectors of served requests, read from tables or encoded and cached.

Shapes: `q` queries, `n` and `p` pairs, `W` width of text.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.search.catalogue import NO_QUERY, SearchText, pair_key
from models.text.text_encoder import Floats, TextCache, TextEncoder, TfidfEncoder

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

    def index_queries(
        self, rows: list[dict[str, Any]], reads_history: bool
    ) -> SearchText:
        """Replace the texts of queries in rows of `sequences` by their index.

        Args:
            rows: Rows with one request each and texts as `query_index`.
            reads_history: Whether the model reads the queries of behaviours.

        Returns:
            The vectors of the queries, and of the pairs that the model reads.
        """
        searches = [row["requests"][0] for row in rows]
        texts = [row["query_index"] for row in rows]
        texts.append([search["query_index"] for search in searches])
        for queries in texts:
            self._warn_about_queries(queries)
        distinct = dict.fromkeys(chain.from_iterable(texts))
        queries = [query for query in distinct if query and self.has_query(query)]
        index_of = {query: index for index, query in enumerate(queries)}
        pairs: dict[str, list[tuple[int, int]]] = {"candidates": [], "behaviours": []}
        for row, search in zip(rows, searches, strict=True):
            query = index_of.get(search["query_index"], NO_QUERY)
            search["query_index"] = query
            past = [index_of.get(text, NO_QUERY) for text in row["query_index"]]
            row["query_index"] = past
            pairs["candidates"] += [(item, query) for item in search["candidates"]]
            if reads_history:
                pairs["behaviours"] += zip(row["item_index"], past, strict=True)
        all_pairs = np.array(list(chain.from_iterable(pairs.values())), np.int64)
        selected = self.select(queries, *all_pairs.reshape(-1, 2).T)
        for name, pairs_of_name in pairs.items():
            self._warn_about_pairs(name, pairs_of_name, selected)
        return selected

    def _warn_about_queries(self, queries: Sequence[str | None]) -> None:
        """Warn about queries that have no vector and cannot be encoded."""
        unknown = sum(not self.has_query(query) for query in queries if query)
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
        if self.encoder or not text.width:
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
