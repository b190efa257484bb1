"""The catalogue and the batches of retrieval models.

    catalogue = Catalogue.load(Inputs("tables", "sids"))

Shapes: `I` items, `C` codes of an item; `B` rows, `T` behaviours and `R` requests of a
batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from core.schemas import Inputs, RetrievalInfo
from core.tables import Table
from models.dataset.batch import PAD, Batch, axes
from models.retrieval.search import Trie


@dataclass(frozen=True)
class Catalogue:
    """The items that a model can recommend, with or without semantic IDs."""

    tables: ClassVar[Mapping[str, Sequence[str]]] = {
        "tables": ("items", "sequences"),
        "sids": ("sids", "trie"),
    }
    """Tables from which a catalogue is loaded, by folder of `Inputs`."""

    num_items: int
    """Number I of items; `item_index` is dense from 0."""
    sids: Tensor | None = None
    """(I, C) int64 codes of each item, or None."""
    codebook_sizes: tuple[int, ...] = ()
    """Number of codes per level; empty without semantic IDs."""
    trie: Trie | None = None
    """The semantic IDs as a trie, or None."""
    versions: dict[str, Table[Any]] = field(default_factory=dict)
    """Versions of the catalogue's tables: `sequences`, `items`, `sids`, `trie`."""

    def scales(self) -> dict[str, Any]:
        """Return an empty dict, since retrieval models read no numbers."""
        return {}

    @classmethod
    def load(
        cls, inputs: Inputs, scales: Any = None, manifest_only: bool = False
    ) -> Self:
        """Load the items, and the semantic IDs if `inputs` has them.

        The other arguments are unused: retrieval models read no numbers, and only the
        manifest of `sequences`.
        """
        versions = inputs.versions(cls.tables, RetrievalInfo)
        num_items = versions["items"].rows
        if not inputs.sids:
            return cls(num_items, versions=versions)

        sizes = tuple(versions["sids"].info.codebook_sizes)
        codes = read_codes(versions["sids"].read())
        trie = Trie(codes, sizes)
        return cls(num_items, codes, sizes, trie, versions)

    @classmethod
    def from_codes(cls, codes: Tensor, codebook_sizes: tuple[int, ...]) -> Self:
        """Return a catalogue of items with `codes` (I, C), for tests and benchmarks."""
        return cls(
            len(codes), codes.long(), codebook_sizes, Trie(codes, codebook_sizes)
        )


def read_codes(table: pa.Table) -> Tensor:
    """Return the (I, C) int64 codes of a `sids` table."""
    lists = table["codes"].combine_chunks()
    codes = lists.flatten().to_numpy().astype(np.int64).reshape(len(lists), -1)
    return torch.from_numpy(codes)


@dataclass(frozen=True, kw_only=True)
class HistoryBatch(Batch):
    """Histories, after which a model recommends items."""

    history: Tensor = axes("B", "T", padding=PAD)
    """(B, T) int64 `item_index` of the latest behaviours, oldest first, -1 at
    padding."""
    history_length: Tensor = axes("B", padding=1)
    """(B,) int64 behaviours of each history."""
    user: Tensor = axes("B")
    """(B,) int64 hash of the user's id."""
    allowed: Tensor | None = axes("E", default=None)
    """(E,) set of the items that a search may return, from `encode_allowed`; None for
    all items."""

    @property
    def histories(self) -> HistoryBatch:
        """The histories without targets: all that a search reads."""
        return HistoryBatch(
            history=self.history,
            history_length=self.history_length,
            user=self.user,
            allowed=self.allowed,
        )


@dataclass(frozen=True, kw_only=True)
class RequestBatch(HistoryBatch):
    """Requests, one per row."""

    # B is not padded, as the loss would include the padded rows
    bucket_axes: ClassVar[tuple[str, ...]] = ("T",)

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    request: Tensor = axes("B")
    """(B,) int64 `request_number`."""
    target: Tensor = axes("B", padding=PAD)
    """(B,) int64 item to predict, -1 if unknown."""
    repeats: Tensor = axes("B")
    """(B,) int64, 1 where the target is among all of the user's behaviours before the
    request, else 0."""
    targets: Tensor | None = axes("B", "M", padding=PAD, default=None)
    """(B, M) int64 items of each basket, -1 at padding; None in training, and where a
    request has one target."""


@dataclass(frozen=True, kw_only=True)
class WindowBatch(HistoryBatch):
    """Windows of users' behaviours, each with all requests that it serves."""

    bucket_axes: ClassVar[tuple[str, ...]] = ("T", "R")

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    request: Tensor = axes("B")
    """(B,) int64 `request_number` of the first request."""
    target: Tensor = axes("R", padding=PAD)
    """(R,) int64 item to predict, -1 at padding."""
    target_row: Tensor = axes("R")
    """(R,) int64 row of each request."""
    target_position: Tensor = axes("R")
    """(R,) int64 position in the row's history of the last behaviour before the
    request."""


@dataclass(frozen=True, kw_only=True)
class InteractionBatch(Batch):
    """Pairs of a user and an item, without histories."""

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    target: Tensor = axes("B")
    """(B,) int64 item."""
