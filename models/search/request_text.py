"""The text of what requests name: read in the tables of jobs.encode where it is there, else encoded, and kept.

    text = RequestText(catalogue, queries, load_saved("encoder"), documents)
    of_batch = text.of(["kettle", "copper kettle"], item, query)     # a catalogue of these texts alone

Shapes: `n` pairs, `q` queries, `W` width of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.latest import TEXTS, Latest
from models.search.data import NO_QUERY, SearchCatalogue, pair_key
from models.shares import find_in
from models.text_encoder import Floats, TextEncoder, TfidfEncoder

ALONE = -1
"""Stands for the item of a query alone."""


class RequestText:
    """See the module."""

    def __init__(
        self, catalogue: SearchCatalogue, queries: Sequence[str], encoder: TextEncoder | TfidfEncoder | None = None,
        documents: Sequence[str] = (), most: int = TEXTS,
    ) -> None:  # fmt: skip
        """`queries` are those of the catalogue; `encoder` and `documents`, by item, those that its text was made with,
        without which there is no text but the catalogue's."""
        self.catalogue, self.encoder, self.documents = catalogue, encoder, documents
        self.number = {query: number for number, query in enumerate(queries)}
        self.kept: Latest[Floats] = Latest(most)

    def has(self, query: str) -> bool:
        """Whether there is text of the query."""
        return self.encoder is not None or query in self.number

    def of(self, queries: list[str], item: NDArray[np.int64], query: NDArray[np.int64]) -> SearchCatalogue:
        """The catalogue with `queries` alone, numbered as they stand there, and the pairs of `item` (n,) with them,
        `query` (n,) or NO_QUERY; without an encoder, those that were encoded before."""
        whole, count = self.catalogue, len(queries)
        number = np.array([self.number.get(text, -1) for text in queries], np.int64)  # (q,) in the catalogue
        alone = whole.queries.new_zeros(count, whole.items.shape[1])
        alone[number >= 0] = whole.queries[number[number >= 0]]
        new = np.flatnonzero(number < 0)
        if len(new):
            alone[new] = self.vectors([(ALONE, queries[i]) for i in new])

        keys = np.unique(pair_key(item, query, count)[query != NO_QUERY])
        of_item, of_query = np.divmod(keys, count + 1)
        of_query -= 1
        before = number[of_query]
        place, found = find_in(whole.pair_keys.numpy(), pair_key(of_item, before, whole.num_queries))
        found &= before >= 0
        if self.encoder is None:
            keys, place, found = keys[found], place[found], found[found]
        tables = [table for table in (whole.pairs, whole.joint) if table is not None]
        made = torch.cat([table.new_zeros(len(keys), table.shape[1]) for table in tables], 1)
        made[found] = torch.cat([table[place[found]] for table in tables], 1)
        new = np.flatnonzero(~found)
        if len(new):
            made[new] = self.vectors([(int(of_item[i]), queries[of_query[i]]) for i in new])
        if not len(keys):  # what a model reads by is of one row at least
            keys, made = np.array([-1]), made.new_zeros(1, made.shape[1])
        pairs, *joint = made.chunk(len(tables), 1)
        return replace(
            whole, num_queries=count, queries=alone, pairs=pairs, pair_keys=torch.from_numpy(keys),
            joint=joint[0] if joint else None,
        )  # fmt: skip

    def vectors(self, texts: list[tuple[int, str]]) -> Tensor:
        """(n, W) of queries alone, or (n, W or 2 W) of pairs: encoded once, while they are kept."""

        def encode(missing: list[tuple[int, str]]) -> dict[tuple[int, str], Floats]:
            assert self.encoder is not None, "asked for where there is one"
            missing.sort(key=lambda text: -len(text[1]) - len(self.documents[text[0]]))  # batches of like length
            queries, documents = [query for _, query in missing], [self.documents[item] for item, _ in missing]
            alone = missing[0][0] == ALONE
            both = () if alone else (documents, self.catalogue.joint is not None)
            return dict(zip(missing, self.encoder.encode(queries, *both), strict=True))

        return torch.from_numpy(np.stack(self.kept.of(texts, encode)))
