"""Text vectors of served requests, read from tables or encoded and cached.

Shapes: `q` queries, `n` pairs of item and query, `W` width of text.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from core.ragged import find_sorted
from models.search.catalogue import NO_QUERY, SearchText, pair_key
from models.text.text_encoder import Floats, TextCache, TextEncoder, TfidfEncoder

NO_ITEM = -1
"""Item of a query alone, in the keys of encoded texts."""


@dataclass(frozen=True)
class RequestText:
    """The text vectors of a batch of served requests, in place of a `SearchText`.

    Queries of the catalogue are numbered by `query_index`, and new queries of the
    requests from `len(queries)` on.
    """

    text: SearchText
    """Vectors of the catalogue."""
    queries: Sequence[str]
    """Queries of the catalogue, by `query_index`."""
    index: Mapping[str, int]
    """The `query_index` of each query of the catalogue."""
    encoder: TextEncoder | TfidfEncoder | None = None
    """Encoder that made the vectors. Without an encoder, text that is not in the
    catalogue has no vector."""
    documents: Sequence[str] = ()
    """Texts of the documents, by `item_index`; needed with an encoder."""
    cache: TextCache[tuple[int, str]] = field(default_factory=TextCache)
    """Encoded vectors of pairs of item and query."""
    new_queries: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the requests' queries that the catalogue does not have."""

    @property
    def width(self) -> int:
        """Width W of the vectors; 0 if models read no text."""
        return self.text.width

    @property
    def num_queries(self) -> int:
        """Number of queries of the catalogue and of the requests."""
        return len(self.queries) + len(self.new_queries)

    def add_queries(self, texts: Iterable[str | None]) -> Self:
        """Return the text of requests with these queries; None and "" are no query.

        Without an encoder, a query that is not in the catalogue is no query either,
        with a warning.
        """
        queries = [query for query in texts if query]
        new = [query for query in queries if query not in self.index]
        if new and not self.encoder:
            warnings.warn(
                f"{len(new)} of {len(queries)} queries are not in the training tables "
                "and are treated as no query",
                stacklevel=2,
            )
            return self
        numbers = enumerate(dict.fromkeys(new), len(self.queries))
        return replace(self, new_queries={query: number for number, query in numbers})

    def find_queries(self, queries: Iterable[str | None]) -> NDArray[np.int64]:
        """Return the number of each query, or NO_QUERY."""
        names = [query or "" for query in queries]
        new = self.new_queries
        numbers = [self.index.get(name, new.get(name, NO_QUERY)) for name in names]
        return np.array(numbers, np.int64)

    def _name_queries(self, query: NDArray[np.int64]) -> list[str]:
        """Return the queries with these numbers."""
        count, new = len(self.queries), list(self.new_queries)
        return [self.queries[i] if i < count else new[i - count] for i in query]

    def read_queries(self, query: NDArray[np.int64]) -> Floats:
        """Return the vectors (q, W) of queries."""
        is_known = query < len(self.queries)
        new = [(NO_ITEM, name) for name in self._name_queries(query[~is_known])]
        return self._complete(self.text.queries[query[is_known]], is_known, new)

    def read_pairs(self, item: NDArray[np.int64], query: NDArray[np.int64]) -> Floats:
        """Return the vectors (n, W) of pairs.

        Pairs that have no vector and cannot be encoded have that of the document, with
        a warning that counts them.
        """
        row, is_known = find_sorted(
            self.text.pair_keys, pair_key(item, query, self.text.num_queries)
        )
        is_known &= query < len(self.queries)
        known = self.text.pairs[row[is_known]]
        if self.encoder is None:
            vectors: Floats = self.text.items.numpy()[item]
            vectors[is_known] = known
            if not is_known.all():
                warnings.warn(
                    f"{(~is_known).sum()} of {len(item)} pairs of document and query "
                    "have no text vector; the vector of the document alone is used",
                    stacklevel=2,
                )
            return vectors
        names = self._name_queries(query[~is_known])
        new = list(zip(item[~is_known].tolist(), names, strict=True))
        return self._complete(known, is_known, new)

    def _complete(
        self,
        known: Floats,
        is_known: NDArray[np.bool_],
        new: list[tuple[int, str]],
    ) -> Floats:
        """Return the vectors of all texts, and encode the new ones."""
        vectors = np.zeros((len(is_known), known.shape[1]), np.float32)
        vectors[is_known] = known
        if not new:
            return vectors

        def encode(missing: list[tuple[int, str]]) -> Floats:
            assert self.encoder is not None, "texts are encoded only with an encoder"
            queries = [query for _, query in missing]
            if missing[0][0] == NO_ITEM:
                return self.encoder.encode(queries)
            documents = [self.documents[item] for item, _ in missing]
            return self.encoder.encode(queries, documents)

        # batches of texts of similar length need little padding
        lengths = [-len(query) - len(self.documents[item]) for item, query in new]
        order = np.argsort(lengths, kind="stable")
        encoded = self.cache.encode([new[i] for i in order], encode)
        vectors[~is_known] = encoded[order.argsort()]
        return vectors
