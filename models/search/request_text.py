"""Text vectors of served requests, read from tables or encoded and cached.

Shapes: `q` queries, `n` pairs of item and query, `W` width of text.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from core.ragged import find_sorted
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

    def index_queries(self, texts: Iterable[str | None]) -> dict[str, int]:
        """Return numbers of the distinct queries that have a vector or can be encoded.

        A warning counts the others. None and "" stand for no query.
        """
        queries = [query for query in texts if query]
        known = queries
        if not self.encoder:
            known = [query for query in queries if query in self.query_index]
        if len(known) < len(queries):
            warnings.warn(
                f"{len(queries) - len(known)} of {len(queries)} queries are not in the "
                "training tables and are treated as no query",
                stacklevel=2,
            )
        return {query: index for index, query in enumerate(dict.fromkeys(known))}

    def select(
        self, queries: Sequence[str], item: Sequence[int], query: Sequence[int]
    ) -> SearchText:
        """Return the vectors of queries, and of pairs of items with these queries.

        A warning counts the pairs that have no vector and cannot be encoded.

        Args:
            queries: (q,) queries from `index_queries`, by their number.
            item: (n,) item of each pair.
            query: (n,) number of each pair's query, or NO_QUERY.
        """
        index = np.array([self.query_index.get(text, -1) for text in queries], np.int64)
        number = np.array(query, np.int64)
        pairs = pair_key(np.array(item, np.int64), number, len(queries))
        keys = np.unique(pairs[number != NO_QUERY])
        items, numbers = np.divmod(keys, len(queries) + 1)
        catalogue_query = index[numbers - 1]
        row, is_known = find_sorted(
            self.text.pair_keys,
            pair_key(items, catalogue_query, self.text.num_queries),
        )
        is_known &= catalogue_query >= 0
        if self.encoder is None:
            if self.text.width and not is_known.all():
                warnings.warn(
                    f"{(~is_known).sum()} of {len(keys)} pairs of document and query "
                    "have no text vector; the vector of the document alone is used",
                    stacklevel=2,
                )
            keys, row, is_known = keys[is_known], row[is_known], is_known[is_known]
        row = row[is_known]
        pair_vectors = self._complete(
            np.hstack([self.text.pairs[row], self.text.joint[row]]),
            is_known,
            [
                (int(item), queries[number - 1])
                for item, number in zip(items, numbers, strict=True)
            ],
        )
        query_vectors = self._complete(
            self.text.queries[index[index >= 0]],
            index >= 0,
            [(NO_ITEM, text) for text in queries],
        )
        width = self.text.width
        return replace(
            self.text,
            queries=query_vectors,
            pair_keys=keys,
            pairs=pair_vectors[:, :width],
            joint=pair_vectors[:, width:],
            is_complete=False,
        )

    def _complete(
        self,
        known: Floats,
        is_known: NDArray[np.bool_],
        texts: Sequence[tuple[int, str]],
    ) -> Floats:
        """Return the vectors of all texts, of which unknown ones are encoded."""
        vectors = np.zeros((len(is_known), known.shape[1]), np.float32)
        vectors[is_known] = known
        new = np.flatnonzero(~is_known).tolist()
        if new:
            vectors[new] = self._encode([texts[i] for i in new])
        return vectors

    def _encode(self, texts: list[tuple[int, str]]) -> Floats:
        """Return the vectors of distinct texts not in the catalogue, or cached."""

        def encode(missing: list[tuple[int, str]]) -> Floats:
            assert self.encoder is not None, "texts are encoded only with an encoder"
            queries = [query for _, query in missing]
            if missing[0][0] == NO_ITEM:
                return self.encoder.encode(queries)
            documents = [self.documents[item] for item, _ in missing]
            has_joint = self.text.joint.shape[1] > 0
            return self.encoder.encode(queries, documents, has_joint)

        # batches of texts of similar length need little padding
        lengths = [-len(query) - len(self.documents[item]) for item, query in texts]
        order = np.argsort(lengths, kind="stable")
        vectors = self.cache.encode([texts[i] for i in order], encode)
        return vectors[order.argsort()]
